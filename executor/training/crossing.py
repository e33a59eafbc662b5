"""Values between stages, and samples of the devices of a stage, by the shapes of a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stagewright.executor.capture.draws import whole_draws
from stagewright.executor.capture.layers import CapturedLayer
from stagewright.executor.capture.shapes import LayerTrace, Value, values_of
from stagewright.executor.programs.work import Rows, pieces, rows
from stagewright.executor.training.interpreter.exchange import Boundary
from stagewright.executor.training.ranks.rank import Rank
from stagewright.executor.training.stages.sharded_stage import ShardedComputation
from stagewright.executor.training.stages.sharded_weights import WeightShards
from stagewright.executor.training.stages.stage import SampleShare, StageComputation, StageLayer
from stagewright.executor.training.stages.staged_model import StagedModel
from stagewright.executor.training.stages.weights import Weights
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.plan_class import Recompute
from stagewright.formulations.plans.shards import stays
from stagewright.graphs.documents.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """The values of a microbatch of ``samples`` on their way through the stages of a plan.

    ``lanes`` are per stage, and device that works on a microbatch, its samples. ``entering`` are
    the model's inputs, ``layers`` and ``traces`` those of the model; each by the number of samples
    of the microbatch and of every share of it.
    """

    plan: PipelinePlan
    samples: int
    lanes: tuple[tuple[Rows, ...], ...]
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
        if isinstance(weights, WeightShards):
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
    lanes: Sequence[Sequence[Rows]],
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
    rows: Rows, lane: int, samples: int, traces: Mapping[int, Sequence[LayerTrace]]
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
