"""The interpreter for mini-batches of one shape, from the layers and weights of a rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.capture.draws import whole_draws
from stagewright.executor.capture.layers import CapturedLayer
from stagewright.executor.capture.shapes import LayerTrace, Value, values_of
from stagewright.executor.capture.split_layer import SavedForWeights, SplitLayer
from stagewright.executor.capture.twins import made_once
from stagewright.executor.programs.memory import peak_bytes
from stagewright.executor.programs.program import Families, Samples, pieces, rows
from stagewright.executor.training.data.batches import microbatch_samples
from stagewright.executor.training.interpreter.exchange import Boundary
from stagewright.executor.training.interpreter.interpreter import Interpreter
from stagewright.executor.training.interpreter.last_stage import OutOfMemory
from stagewright.executor.training.interpreter.streams import (
    DeviceStreams,
    Joint,
    OneStream,
    make_streams,
)
from stagewright.executor.training.losses import Loss
from stagewright.executor.training.model_checks import (
    require_capturable_steps,
    require_no_divided_draws,
    require_no_draws,
)
from stagewright.executor.training.ranks.rank import Rank, RankProgram
from stagewright.executor.training.stages.division import InFlight, backward_of
from stagewright.executor.training.stages.initialise import total_bytes
from stagewright.executor.training.stages.sharded_weights import GradientShards
from stagewright.executor.training.stages.stage import (
    Gradients,
    SampleShare,
    Seed,
    StageComputation,
    StageLayer,
    Tensors,
)
from stagewright.executor.training.stages.staged_model import StagedModel
from stagewright.executor.training.stages.weights import Weights
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.plan_class import Recompute
from stagewright.formulations.plans.shards import stays
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes


class ShardedComputation(StageComputation):
    """A stage of which every replica has a part of the gradients, or of the ``weights`` too.

    Each layer has its own record of autograd, so that what is divided is whole only while it
    computes. Backwards begin at the stage's outputs, which are never attached. In two parts, I
    gathers a layer's weights and W sums up its gradients; a layer without pieces does both in I,
    and one whose weight gradients need its weights (as without an input gradient) gathers in W.
    """

    def __init__(self, *given: Any, weights: GradientShards, **options: Any) -> None:
        super().__init__(*given, **options)
        self._weights = weights

    def _layer(self, i: int, inputs: Tensors, seed: Seed) -> Tensors:
        with self._weights.gathered(i):
            return super()._layer(i, inputs, seed)

    def _split_layer(self, i: int) -> SplitLayer:
        with self._weights.in_memory(i):
            return super()._split_layer(i)

    def _run_layer(self, flight: InFlight, i: int, inputs: Tensors) -> Tensors:
        with self._weights.gathered(i):
            return super()._run_layer(flight, i, inputs)

    @made_once()
    def _run(self, flight: Any, inputs: Tensors, in_two: bool, attached: bool = False) -> Tensors:
        if in_two:
            return super()._run(flight, inputs, in_two)
        for i in range(len(self.layers)):
            graph, outputs = self._record(range(i, i + 1), inputs, flight.seed)
            flight.graphs.append(graph)
            inputs = tuple(one.detach() for one in outputs)
        return inputs

    @made_once()
    def backward(self, microbatch: int, output_gradients: Gradients) -> Gradients:
        """The whole backward: gradients of the stage's inputs; parts of the weights' are added."""
        flight = self._flights.pop(microbatch)
        if self.recompute == "full":
            with self._again(flight):
                self._run(flight, flight.inputs.pop(), in_two=False)
        for i in reversed(range(len(self.layers))):
            with self._weights.summed(i):
                if self.recompute == "layer":
                    with self._again(flight):
                        graph, _ = self._record(range(i, i + 1), flight.inputs.pop(), flight.seed)
                else:
                    graph = flight.graphs.pop()
                output_gradients = backward_of(graph, output_gradients)
        return output_gradients

    def _input_gradient_of(
        self, i: int, flight: InFlight, output_gradients: Gradients
    ) -> Gradients:
        is_whole = self._pieces[i] is None
        with self._weights.summed(i) if is_whole else self._weights.gathered(i):
            return super()._input_gradient_of(i, flight, output_gradients)

    def _weight_gradient_of(self, i: int, saved: SavedForWeights) -> None:
        needed = self._weights.are_among(saved.values, i)
        with self._weights.summed(i, gathers=needed):
            super()._weight_gradient_of(i, saved)


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """The values of a microbatch of ``samples`` on their way through the stages of a plan.

    ``lanes`` are per stage, and device that works on a microbatch, its samples. ``entering`` are
    the model's inputs, ``layers`` and ``traces`` those of the model; each by the number of samples
    of the microbatch and of every share of it.
    """

    plan: PipelinePlan
    samples: int
    lanes: tuple[tuple[Samples, ...], ...]
    entering: Mapping[int, tuple[Value, ...]]
    layers: Mapping[int, Sequence[CapturedLayer]]
    traces: Mapping[int, tuple[LayerTrace, ...]]

    def boundaries(self) -> list[Boundary]:
        """Boundary s lies between stages s and s + 1."""
        found = []
        for s, stage in enumerate(self.plan.stages[:-1]):
            crossing = {count: trace[stage.layers[1] - 1] for count, trace in self.traces.items()}
            found.append(boundary_of(self.plan, s, self.lanes, crossing, self.samples))
        return found

    def stage_layers(self, s: int, lane: int) -> list[StageLayer]:
        """The layers of stage ``s`` for the samples of one of its lanes."""
        start, stop = self.plan.stages[s].layers
        count = len(self.lanes[s][lane])
        traces = self.traces[count]
        inputs = [self.entering[count] if start == 0 else traces[start - 1].outputs]
        inputs += [one.outputs for one in traces[start : stop - 1]]
        own = zip(self.layers[count][start:stop], inputs, traces[start:stop], strict=True)
        return [StageLayer(*each) for each in own]

    def lane(self, rank: Rank, s: int) -> int:
        """The lane of ``rank`` in stage ``s``; 0 where every lane has whole microbatches."""
        return rank.lane(rank.number, s, 0) if len(self.lanes[s]) > 1 else 0

    def computation(
        self,
        rank: Rank,
        s: int,
        weights: Weights,
        autocast: torch.dtype | None,
        *,
        recompute: Recompute = "none",
        offload: bool = False,
        compiled: bool = False,
    ) -> StageComputation:
        """Stage ``s`` on the samples of ``rank``; the options as in `StageComputation`."""
        lane = self.lane(rank, s)
        share = self.share(s, lane)
        given = self.stage_layers(s, lane), recompute, rank.device, autocast
        if isinstance(weights, GradientShards):
            return ShardedComputation(*given, share=share, weights=weights)
        return StageComputation(*given, offload=offload, share=share, compiled=compiled)

    def share(self, s: int, lane: int) -> SampleShare | None:
        """The samples of one of the lanes of stage ``s``; None if it is all of them in order."""
        start, stop = self.plan.stages[s].layers
        of_stage = {one: found[start:stop] for one, found in self.traces.items()}
        return share_of(self.lanes[s][lane], lane, self.samples, of_stage)


def crossing_of(
    plan: PipelinePlan,
    samples: int,
    inputs: Sequence[Tensor],
    model: StagedModel,
    sized: Callable[[Sequence[tuple[int, ...]]], Sequence[CapturedLayer]],
    device: torch.device,
    autocast: torch.dtype | None,
) -> Crossing:
    """How microbatches of ``samples`` of ``inputs`` pass through the stages of ``plan``.

    ``sized`` gives the layers of ``model`` for inputs of some shapes. Raises InputError if the
    model does not take them, or the plan's devices cannot divide them.
    """
    lanes = rows(plan, samples)
    counts = {samples, *(len(lane) for stage in lanes for lane in stage)}
    entering = {count: values_of(inputs, count) for count in counts}
    if len(entering) > 1:
        model.require_divisible()
    layers = {count: sized([one.shape for one in values]) for count, values in entering.items()}
    traces = {
        count: model.traces(layers[count], values, device, autocast)
        for count, values in entering.items()
    }
    return Crossing(plan, samples, lanes, entering, layers, traces)


def boundary_of(
    plan: PipelinePlan,
    s: int,
    lanes: Sequence[Sequence[Samples]],
    traces: Mapping[int, LayerTrace],
    samples: int,
) -> Boundary:
    """The values between stages ``s`` and ``s + 1``; ``traces`` by the number of samples."""
    values = traces[samples].outputs
    by_sample = tuple(
        all(trace.outputs[i].shape[:1] == (count,) for count, trace in traces.items())
        for i in range(len(values))
    )
    below, above = lanes[s], lanes[s + 1]
    if len(below) > 1 and stays(plan.stages[s], plan.stages[s + 1], 0):
        return Boundary(values, by_sample, None)
    for i, (value, cut) in enumerate(zip(values, by_sample, strict=True)):
        by_share = value.gradient or any(one.outputs[i] != value for one in traces.values())
        if by_share and not cut and len(below) * len(above) > 1:
            raise InputError(
                f"a value of shape {value.shape} between stages {s} and {s + 1} has no samples in "
                "its first dimension, so that it or its gradient cannot be split among devices; "
                "cut elsewhere, or leave these stages on one device each"
            )
    return Boundary(values, by_sample, pieces([len(lane) for lane in below], len(above)))


def share_of(
    rows: Samples, lane: int, samples: int, traces: Mapping[int, Sequence[LayerTrace]]
) -> SampleShare | None:
    """The samples of a microbatch that a device works on, None if it is all of them in order.

    ``traces`` of the stage's layers, by the number of samples.
    """
    if rows == tuple(range(samples)):
        return None
    fewer = min(traces)
    pairs = zip(traces[samples], traces[fewer], strict=True)
    return SampleShare(
        rows,
        samples,
        lane,
        tuple(
            None if one.draws_again else whole_draws(one.draws, samples, other.draws, fewer)
            for one, other in pairs
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Preparation:
    """The parts of a rank that do not depend on the shapes of mini-batches.

    ``weights`` and ``groups`` are by stage; ``families`` are stages whose updates need each other's
    gradients; ``captured`` says whether windows between two losses are captured as graphs, and
    ``compiled`` whether layers are compiled. Mini-batches are of one of ``replicas``, all of them
    if it is 1.
    """

    rank: Rank
    program: RankProgram
    model: StagedModel
    weights: Mapping[int, Weights]
    groups: Mapping[int, dist.ProcessGroup]
    joint: Joint
    families: Families
    loss: Loss
    seed: int
    autocast: torch.dtype | None
    captured: bool
    compiled: bool
    replicas: int

    def interpreter(self, inputs: tuple[Tensor, ...]) -> Interpreter:
        """The interpreter for mini-batches of the shape of ``inputs``."""
        plan, samples = self.rank.plan, microbatch_samples(self.rank.plan, inputs, self.replicas)
        crossing = crossing_of(
            plan, samples, inputs, self.model, self.model.sized, self.rank.device, self.autocast
        )
        traces = crossing.traces
        self.model.require_constant_buffers(traces[samples])
        computations = {s: self._computation(s, crossing) for s in self.weights}
        if self.captured:
            require_no_draws(self.model.layers, traces[samples])
            every = (one.optimizer for one in self.weights.values())
            require_capturable_steps(one for one in every if one is not None)
        self._require_fit(computations)
        self.model.watch(self.weights)
        return Interpreter(
            self.rank,
            self.program,
            computations,
            self.weights,
            self.groups,
            crossing.boundaries(),
            crossing.lanes,
            samples,
            loss=self.loss,
            result=self.model.result,
            scale=1.0 if plan.weight_rule.updates_every_round else 1 / plan.microbatches,
            seed=self.seed,
            joint=self.joint,
            streams=self._streams(),
            captured=self.captured,
            is_own=self.replicas > 1,
        )

    def _streams(self) -> DeviceStreams:
        """One stream, unless the plan has a second one or its windows are captured."""
        is_sub = any(one.stream is not None for one in self.program.row)
        return make_streams(self.rank.device) if is_sub or self.captured else OneStream()

    def _computation(self, s: int, crossing: Crossing) -> StageComputation:
        """Stage ``s`` on this rank's share of a microbatch."""
        stage, lane = self.rank.plan.stages[s], crossing.lane(self.rank, s)
        traces = crossing.traces[len(crossing.lanes[s][lane])]
        # By any layer: a parameter that stages share may get its only gradient in another stage.
        trained = {self.model.primary[name] for one in traces for name in one.trained}
        self.weights[s].leave_out(trained)
        divided = traces[slice(*stage.layers)]
        require_no_divided_draws(f"stage {s}", self.model.modules[s], divided)
        return crossing.computation(
            self.rank,
            s,
            self.weights[s],
            self.autocast,
            recompute=stage.recompute,
            offload=stage.offload,
            compiled=self.compiled,
        )

    def _require_fit(self, computations: Mapping[int, StageComputation]) -> None:
        """Refuse to begin a run that cannot fit into memory."""
        footprints = {s: one.footprint() for s, one in computations.items()}
        for s, weights in self.weights.items():
            if isinstance(weights, GradientShards):
                least = weights.static_bytes
                footprints[s] = replace(footprints[s], static_bytes=least, gradient_bytes=0.0)
                continue
            if weights.releases:
                continue
            more = footprints[s].static_bytes + footprints[s].gradient_bytes
            if needs_two_gradients(self.rank.plan, self.families, s):
                more += weights.gradient_bytes
            footprints[s] = replace(footprints[s], static_bytes=more, gradient_bytes=0.0)
        need, where = peak_bytes(self.rank.plan, self.program.row, footprints)
        room = total_bytes(self.rank.device)
        if need > room:
            one = self.program.row[where]
            raise OutOfMemory(
                f"stage {one.action.stage} does not fit: rank {self.rank.number} "
                f"({self.rank.name}) needs {format_bytes(need)} and more at {one} and has "
                f"{format_bytes(room)}: at least {need - room:.0f} bytes short"
            )


def needs_two_gradients(plan: PipelinePlan, families: Families, s: int) -> bool:
    """Whether a stage's gradients are reduced while the next ones are computed."""
    if not plan.is_periodic or plan.weight_rule.updates_every_round:
        return False
    return plan.stages[s].replicas > 1 or any(s in one for one in families)
