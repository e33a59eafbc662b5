"""The executor: one process per device carries out its row of a plan's program."""

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from math import inf, isfinite
from statistics import fmean, median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.capture.draws import whole_draws
from stagewright.executor.capture.loss_graph import require_no_parameters
from stagewright.executor.capture.shapes import LayerTrace, Value, propagate, values_of
from stagewright.executor.capture.tracing import CapturedLayer, LayeredModel
from stagewright.executor.capture.twins import twins
from stagewright.executor.programs.periodic import lower_any
from stagewright.executor.programs.program import Families, Program, stages_on
from stagewright.executor.programs.shares import Rows, pieces, rows
from stagewright.executor.programs.trace import RankAction, Trace, traced_step
from stagewright.executor.programs.verify import peak_bytes, verify
from stagewright.executor.training.initialise import Model, initialise, total_bytes
from stagewright.executor.training.interpreter import (
    Batch,
    Boundary,
    Interpreter,
    Joint,
    OutOfMemory,
    Rank,
)
from stagewright.executor.training.launch import require_torch
from stagewright.executor.training.losses import Loss, cross_entropy
from stagewright.executor.training.stage import Part, Share, StageComputation
from stagewright.executor.training.weights import MakeOptimizer, TiedSums, Weights, clips_by_itself
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes

T = TypeVar("T")

OPTIMIZER: MakeOptimizer = partial(torch.optim.SGD, lr=0.01)

MEETINGS = 15  # of all ranks before a run that is traced


@dataclass(slots=True)
class _Recording:
    """What this rank did from ``step`` on, until nothing was under way.

    Times are of its own clock, which said ``met_seconds`` when all ranks had met, one time or
    several.
    """

    step: int
    met_seconds: list[float]
    losses: list[float] = field(default_factory=list)
    records: list[RankAction] = field(default_factory=list)
    iterations: int | None = None

    @property
    def loss(self) -> float | None:
        """The mean loss, on ranks of the last stage."""
        return fmean(self.losses) if self.losses else None

    def begin(self, first: "_Recording") -> float:
        """When all began, on this rank's clock; ``first`` is what the first rank recorded."""
        pairs = zip(self.met_seconds, first.met_seconds, strict=True)
        return first.met_seconds[-1] + median(own - its for own, its in pairs)


class Executor:
    """One rank of a plan, among the processes of torch's default group; alone if there is none.

    Parameters
    ----------
    plan
        Rank r is the r-th device in the order in which the plan's stages name them.
    module
        A module, a list of modules, or a function without arguments that makes one. Every rank
        keeps the layers of its own stages alone.
    loss
        ``loss(output, targets)``: a mean over samples, one number; or a pair ``(sum, count)``,
        which is normalised over the whole mini-batch, whatever the plan. With ``stash`` weights,
        where a microbatch is a mini-batch of its own, it is normalised over each. By default
        cross-entropy, without the labels that are -100.
    optimizer
        Makes an optimizer for a list of parameters; there is one for each stage.
    clip_norm
        The most that the norm of all gradients together may be: larger ones are scaled, as
        ``torch.nn.utils.clip_grad_norm_`` does for the whole model.
    seed
        Of the parameters, where ``module`` is a function, and of all that its layers draw.
    dtype
        Type of parameters and inputs. With bfloat16, computations are cast to it and the
        parameters stay float32.
    device
        Of this rank; by default its GPU, or the CPU where there is none.
    timeout_seconds
        How long a rank waits for another in an all-reduce; for the rest the group's own limit
        holds.
    trace
        Whether to record when each action ran, in all steps; see `trace_on_first_rank`.

    Raises
    ------
    InputError
        If the model or the number of processes is another than the plan's, or torch's version is
        none that is supported.
    InvalidPlan
        If the plan cannot be carried out.

    Examples
    --------
    As every rank under ``torchrun``::

        dist.init_process_group()
        executor = Executor(load_plan("plan.json"), make_model, optimizer=partial(SGD, lr=0.1))
        for inputs, targets in batches:
            loss = executor.step(inputs, targets)
        losses = executor.finish()

    With a periodic plan mini-batches overlap: `step` begins one, and the loss that it returns is of
    one that was begun before.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        module: Model | Callable[[], Model],
        loss: Loss = cross_entropy,
        optimizer: MakeOptimizer = OPTIMIZER,
        *,
        clip_norm: float | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        timeout_seconds: float = 60.0,
        trace: bool = False,
    ) -> None:
        require_torch()
        require_clip_norm(plan, clip_norm)
        require_no_parameters(loss)
        self._clip_norm = inf if clip_norm is None else clip_norm
        self.plan, self.steps_done, self._failed = plan, 0, False
        self._loss, self._seed, self._dtype = loss, seed, dtype
        self._timeout = timedelta(seconds=timeout_seconds)
        self._rank = _rank(plan, _device(device))
        self._name = self._rank.devices[self._rank.number]
        self._stages = stages_on(plan, self._name)
        self._autocast = dtype if dtype == torch.bfloat16 else None
        self._parameter_type = dtype if self._autocast is None else torch.float32
        self._model = self._initialise(module)
        self._families = self._find_families()
        if self._families:  # known only now
            self._rank = _rank(plan, self._rank.device, self._families)
        self._modules = self._split_modules()
        self._weights = self._make_weights(optimizer)
        self._groups, self._tied_groups = self._make_groups()
        self._joint = self._make_joint()
        self._interpreters: dict[object, Interpreter] = {}
        self._running: Interpreter | None = None  # of a periodic plan
        self._trace = trace
        self._recording: _Recording | None = None  # of what is under way
        self._recorded: list[_Recording] = []

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self._rank.number

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return len(self._rank.devices)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this rank's stages."""
        every = (weights.optimizer for weights in self._weights.values())
        return [one for one in every if one is not None]

    def step(self, inputs: Batch, targets: Batch) -> float | None:
        """One iteration on a mini-batch; its mean loss on ranks of the last stage, else None.

        Every rank gives the same mini-batch: ``inputs`` are the model's, a tensor or a tuple of
        them, with the samples in dimension 0. They are cut into the plan's microbatches in order.

        With a periodic plan the mini-batch is begun, and those before it go on. The loss is of the
        one whose last forward was done in this call, in the order in which they were given; None if
        there was none, as in the first calls. `finish` has those that are left.

        Raises
        ------
        InputError
            If the samples do not divide into the plan's microbatches, or the model or the loss do
            not take them; if the shape changes while mini-batches are under way.
        NonFiniteLoss, OutOfMemory
            Naming the stage. Weights and gradients are then anything: the executor has ended.
        """
        self._require_sound()
        given = tuple(map(self._typed, _tensors("inputs", inputs)))
        _require_as_many(given, _tensors("targets", targets))
        interpreter = self._interpreter(given)
        last = len(self.plan.stages) - 1
        here = given if 0 in self._stages else ()
        wanted: Batch = ()
        if last in self._stages:
            wanted = _mapped(targets, lambda one: one.to(self._rank.device))
        if self._trace and self._recording is None:
            self._recording = _Recording(self.steps_done, self._met())
        own, step = tuple(one.to(self._rank.device) for one in here), self.steps_done
        losses = self._carried_out(lambda records: interpreter.run(own, wanted, step, records))
        self.steps_done += 1
        if self._running is None:
            self._end_recording()
        return next(iter(losses), None)

    def finish(self) -> list[float]:
        """End the mini-batches that are under way; their mean losses on ranks of the last stage.

        Those whose losses `step` has returned are not among them; there are none without a periodic
        plan. The weights are then those after all updates, as if there had been no pipeline, and
        the next `step` begins with an empty one. All ranks call it.

        Raises
        ------
        NonFiniteLoss, OutOfMemory
            As `step`.
        """
        self._require_sound()
        interpreter, self._running = self._running, None
        if interpreter is None:
            return []
        losses = self._carried_out(interpreter.finish)
        self._end_recording()
        return losses

    def _require_sound(self) -> None:
        if self._failed:
            raise InputError("a step failed before; make a new executor and load a checkpoint")

    def _require_finished(self) -> None:
        if self._running is not None:
            raise InputError(
                f"mini-batches are under way after step {self.steps_done} of a periodic plan: call "
                "finish() on all ranks first"
            )

    def _interpreter(self, given: tuple[Tensor, ...]) -> Interpreter:
        """The one for mini-batches of this shape; with a periodic plan it is then under way."""
        key = tuple((one.shape, one.dtype) for one in given)
        found = self._interpreters.get(key)
        if self._running is not None and found is not self._running:
            raise InputError(
                f"a mini-batch of shape {', '.join(str(tuple(one.shape)) for one in given)} "
                "follows others while they are under way; call finish() on all ranks before the "
                "shape changes"
            )
        if found is None:
            found = self._interpreters[key] = self._prepare(given)
        if self.plan.is_periodic:
            self._running = found
        return found

    def _carried_out(
        self, run: Callable[[list[RankAction] | None], list[tuple[float, float]]]
    ) -> list[float]:
        """What ``run`` does on this rank; the losses of all ranks of the last stage together.

        It gets the place for what happened when, None without a trace.
        """
        device, last = self._rank.device, len(self.plan.stages) - 1
        recording = self._recording
        self._failed = True
        # What layers draw differs from rank to rank; what the caller draws must not.
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            found = run(None if recording is None else recording.records)
        self._failed = False
        group = self._groups.get(last)
        parts = [self._summed(part, group) for part in found]
        losses = [value / count if count else value for value, count in parts]
        if recording is not None:
            recording.losses += losses
        return losses

    def _met(self) -> list[float]:
        """When all ranks had met, as often as it takes to set their clocks by it.

        They leave a barrier milliseconds apart if one of them has to wait for its processor. In a
        long run nothing makes up for that.
        """
        found = []
        for _ in range(MEETINGS if self.plan.is_periodic else 1):
            _barrier(self._rank.group)
            found.append(time.perf_counter())
        return found

    def _end_recording(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        if self.plan.is_periodic:
            recording.iterations = self.steps_done - recording.step
        self._recorded.append(recording)

    # What outlives the process

    def state(self) -> dict[str, Tensor]:
        """The share of a checkpoint that this rank writes; no key is another rank's too.

        ``model.NAME`` are parameters and buffers under the model's own names,
        ``optimizer.NAME.KEY`` what the optimizer keeps for a parameter, and ``previous.NAME`` the
        weights before the last update, where the plan computes on them. The next step changes these
        tensors.

        Raises
        ------
        InputError
            If mini-batches are under way: `finish` comes first.
        """
        self._require_finished()
        found: dict[str, Tensor] = {}
        for s in self._stages:
            if self._first_rank(s) == self.rank:
                for name, one in self._tensors(s).items():
                    if self._stages_of[name][0] == s:
                        found[f"model.{name}"] = one.detach()
                found |= self._optimizer_state(s)
        return found

    def _optimizer_state(self, s: int) -> dict[str, Tensor]:
        weights, found = self._weights[s], dict[str, Tensor]()
        for name, one in weights.parameters(weights.newest).items():
            if self._stages_of[name][0] != s:
                continue
            if self.plan.weight_rule.staleness > 0:
                found[f"previous.{name}"] = weights.parameters(0)[name].detach()
            kept = weights.optimizer.state.get(one, {}) if weights.optimizer else {}
            for key, value in kept.items():
                if value is not None:
                    found[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
        return found

    def wanted(self, keys: Iterable[str]) -> list[str]:
        """Which entries of a checkpoint belong to this rank's stages."""
        own = {name for s in self._stages for name in self._tensors(s)}
        kinds = ["model", "optimizer"]
        kinds += ["previous"] if self.plan.weight_rule.staleness > 0 else []
        return [key for key in keys if _belongs(key, own, kinds)]

    def load_state(self, tensors: Mapping[str, Tensor], steps_done: int) -> None:
        """Go on where a run was that wrote ``tensors`` (`wanted` says which) after its steps.

        Raises
        ------
        InputError
            If something of this rank's is missing, or mini-batches are under way.
        """
        self._require_finished()
        for s in self._stages:
            for name, one in self._tensors(s).items():
                if f"model.{name}" not in tensors:
                    raise InputError(f"the checkpoint has no {name!r} of stage {s}")
                with torch.no_grad():
                    one.copy_(tensors[f"model.{name}"])
            self._weights[s].load(tensors, buffered=self.plan.weight_rule.staleness > 0)
        self.steps_done = steps_done

    def parameters_on_first_rank(self) -> dict[str, Tensor] | None:
        """The whole model's state dict under its own names on rank 0, None on the others.

        All ranks call it.
        """
        own = {
            key.removeprefix("model."): value.to("cpu", copy=True)
            for key, value in self.state().items()
            if key.startswith("model.")
        }
        shares = self._gathered(own)
        if shares is None:
            return None
        whole = {name: value for share in shares for name, value in share.items()}
        return {
            name: whole[names[0]] for names in self._names for name in names if names[0] in whole
        }

    def trace_on_first_rank(self) -> Trace | None:
        """When everything ran in the steps so far, on rank 0; None on the others.

        All ranks call it. With a periodic plan, what it did between two drains is one step.

        Raises
        ------
        InputError
            If mini-batches are under way: `finish` comes first.
        """
        self._require_finished()
        shares = self._gathered(self._recorded)
        if shares is None:
            return None
        last = len(self.plan.stages) - 1
        teller = self._first_rank(last)
        steps = tuple(
            traced_step(
                self.plan,
                own.step,
                [
                    record
                    for share in shares
                    for record in _since(share[i].begin(own), share[i].records)
                ],
                shares[teller][i].loss,
                own.iterations,
            )
            for i, own in enumerate(self._recorded)
        )
        group = self._rank.group
        return Trace(
            digest=self.plan.digest,
            model=self.plan.model,
            machine=f"{platform.node()}, {os.cpu_count()} CPUs, {self._rank.device.type}",
            backend="none" if group is None else dist.get_backend(group),
            world_size=self.world_size,
            dtype=str(self._dtype).removeprefix("torch."),
            steps=steps,
        )

    def _gathered(self, own: T) -> list[T] | None:
        if self._rank.group is None:
            return [own]
        shares: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(own, shares, group=self._rank.group, group_dst=0)
        return shares

    # The parts of this rank

    def _initialise(self, module: Model | Callable[[], Model]) -> LayeredModel:
        """The captured model, with this rank's layers alone on its device."""
        wanted = {i for s in self._stages for i in range(*self.plan.stages[s].layers)}
        model = initialise(
            module,
            wanted,
            seed=self._seed,
            device=self._rank.device,
            dtype=self._parameter_type,
            agree=lambda fits: self._summed((float(not fits),), self._rank.group) == (0.0,),
        )
        _require_same_model(self.plan, model)
        self._names = [*model.parameters_by_name(), *model.buffers_by_name()]
        self._primary = {name: names[0] for names in self._names for name in names}
        stages: dict[str, set[int]] = {}
        for s, stage in enumerate(self.plan.stages):
            for layer in model.layers[slice(*stage.layers)]:
                for name in _tensors_of(layer):
                    stages.setdefault(self._primary[name], set()).add(s)
        self._stages_of = {name: sorted(found) for name, found in stages.items()}
        buffers = {self._primary[names[0]] for names in model.buffers_by_name()}
        shared = sorted(name for name, found in self._stages_of.items() if len(found) > 1)
        self._shared_buffers = [name for name in shared if name in buffers]
        self._tied = [name for name in shared if name not in buffers]
        _require_updated_together(self.plan, self._tied, self._stages_of)
        if self._clip_norm < inf and self.plan.is_periodic:
            _require_not_shared(self._tied, self._stages_of)
        _require_whole_gradients(self.plan, model, self._stages_of)
        return model

    def _split_modules(self) -> dict[int, list[CapturedLayer]]:
        """Per stage its layers. What stages share, each has for itself, also on one rank."""
        layers = list(self._model.layers)
        found: dict[int, list[CapturedLayer]] = {}
        for s in self._stages:
            start, stop = self.plan.stages[s].layers
            if found:
                copies = twins([layer.module for layer in layers[start:stop]])
                layers[start:stop] = [
                    CapturedLayer(layer.name, module)
                    for layer, module in zip(layers[start:stop], copies, strict=True)
                ]
            found[s] = layers[start:stop]
        self._model = replace(self._model, layers=tuple(layers))
        return found

    def _make_weights(self, optimizer: MakeOptimizer) -> dict[int, Weights]:
        made = {
            s: Weights(
                [layer.module for layer in layers],
                self._primary,
                self._tied,
                optimizer,
                versions=self.plan.weight_rule.versions,
                two_gradients=self._reduces_beside(s),
            )
            for s, layers in self._modules.items()
        }
        for weights in made.values() if len(self.plan.stages) > 1 else ():
            name = weights.optimizer and clips_by_itself(weights.optimizer)
            if name:
                raise InputError(
                    f"the optimizer {name} clips by the norm of one stage's gradients alone; give "
                    "one that does not, and clip_norm for that of all"
                )
        return made

    def _find_families(self) -> set[frozenset[int]]:
        """Stages that have a trained parameter in common, and all that have a norm in common."""
        found = {frozenset(self._stages_of[name]) for name in self._tied}
        everything = frozenset(range(len(self.plan.stages)))
        return found | {everything} if self._clip_norm < inf else found

    def _reduces_beside(self, s: int) -> bool:
        """Whether a stage's gradients are summed up with others' while the next ones are made."""
        if not self.plan.is_periodic:
            return False
        return len(self.plan.stages[s].devices) > 1 or any(s in one for one in self._families)

    def _tensors(self, s: int) -> dict[str, Tensor]:
        """Parameters, in their newest version, and buffers of a stage, by their first names."""
        found: dict[str, Tensor] = {}
        for layer in self._modules[s]:
            for name, one in _tensors_of(layer).items():
                found.setdefault(self._primary[name], one)
        weights = self._weights[s]
        return found | weights.parameters(weights.newest)

    def _holders(self, name: str) -> set[str]:
        """The devices of all stages that have a parameter."""
        return {v for s in self._stages_of[name] for v in self.plan.stages[s].devices}

    def _first_rank(self, s: int) -> int:
        return self._rank.devices.index(self.plan.stages[s].devices[0])

    def _make_groups(self) -> tuple[dict[int, dist.ProcessGroup], dict[str, dist.ProcessGroup]]:
        """The processes of each stage, and those that hold each tied parameter, this rank among.

        All ranks make all groups, in the same order: torch's way to make one among its members
        alone gives it different names on them if they are in different numbers of groups.
        """
        stages = {s: set(stage.devices) for s, stage in enumerate(self.plan.stages)}
        tied = {name: self._holders(name) for name in self._tied}
        made: dict[frozenset[str], dist.ProcessGroup] = {}
        for devices in map(frozenset, (*stages.values(), *tied.values())):
            if len(devices) > 1 and devices not in made:
                ranks = sorted(map(self._rank.devices.index, devices))
                made[devices] = dist.new_group(ranks, timeout=self._timeout)
        mine = {devices: group for devices, group in made.items() if self._name in devices}
        return (
            {s: mine[frozenset(v)] for s, v in stages.items() if frozenset(v) in mine},
            {name: mine[frozenset(v)] for name, v in tied.items() if frozenset(v) in mine},
        )

    # Mini-batches

    def _typed(self, one: Tensor) -> Tensor:
        return one.to(self._parameter_type) if one.is_floating_point() else one

    def _prepare(self, inputs: tuple[Tensor, ...]) -> Interpreter:
        """The interpreter for mini-batches of the shape of ``inputs``."""
        plan, samples = self.plan, _samples(self.plan, inputs)
        lanes = rows(plan, samples)
        counts = {samples, *(len(lane) for stage in lanes for lane in stage)}
        entering = {count: values_of(inputs, count) for count in counts}
        traces = {
            count: propagate(self._model.layers, values, self._rank.device, self._autocast)
            for count, values in entering.items()
        }
        self._require_constant_buffers(traces[samples])
        computations = {
            s: self._computation(s, lanes[s], samples, entering, traces) for s in self._stages
        }
        self._require_fit(computations)
        boundaries = []
        for s, stage in enumerate(plan.stages[:-1]):
            crossing = {count: trace[stage.layers[1] - 1] for count, trace in traces.items()}
            boundaries.append(_boundary(plan, s, lanes, crossing, samples))
        return Interpreter(
            self._rank,
            computations,
            self._weights,
            self._groups,
            boundaries,
            lanes,
            samples,
            loss=self._loss,
            single_output=self._model.single_output,
            scale=1.0 if plan.weight_rule.updates_every_round else 1 / plan.microbatches,
            seed=self._seed,
            joint=self._joint,
        )

    def _computation(
        self,
        s: int,
        lanes: Sequence[Rows],
        samples: int,
        entering: Mapping[int, tuple[Value, ...]],
        traces: Mapping[int, tuple[LayerTrace, ...]],
    ) -> StageComputation:
        """Stage ``s`` on this rank's share of a microbatch; all by the number of samples."""
        stage = self.plan.stages[s]
        start, stop = stage.layers
        lane = stage.devices.index(self._name) if len(lanes) > 1 else 0
        count = len(lanes[lane])
        trace = traces[count][start:stop]
        inputs = [entering[count] if start == 0 else traces[count][start - 1].outputs]
        inputs += [one.outputs for one in trace[:-1]]
        # By any layer: a parameter that stages share may get its gradient in another one alone.
        trained = {self._primary[name] for one in traces[count] for name in one.trained}
        self._weights[s].leave_out(trained)
        parts = [Part(*each) for each in zip(self._modules[s], inputs, trace, strict=True)]
        of_stage = {one: found[start:stop] for one, found in traces.items()}
        return StageComputation(
            parts,
            stage.recompute,
            self._rank.device,
            self._autocast,
            offload=stage.offload,
            share=_share(lanes[lane], lane, samples, of_stage),
        )

    def _require_constant_buffers(self, trace: Sequence[LayerTrace]) -> None:
        """Refuse a buffer that a layer may change in one stage while another stage has it too."""
        for layer, found in zip(self._model.layers, trace, strict=True):
            own = {self._primary[name] for name in _tensors_of(layer)} if found.changes else set()
            for name in self._shared_buffers:
                if name in own:
                    raise InputError(
                        f"layer {layer.name!r} changes its buffers, of which {name!r} is used in "
                        f"stages {_and(self._stages_of[name])}; put its layers into one stage"
                    )

    def _require_fit(self, computations: Mapping[int, StageComputation]) -> None:
        """Refuse to begin what cannot fit: better than to be killed in the middle."""
        footprints = {s: one.footprint() for s, one in computations.items()}
        for s in filter(self._reduces_beside, footprints):
            more = footprints[s].static_bytes + self._weights[s].gradient_bytes
            footprints[s] = replace(footprints[s], static_bytes=more)
        need, where = peak_bytes(self.plan, self._rank.row, footprints)
        room = total_bytes(self._rank.device)
        if need > room:
            one = self._rank.row[where]
            raise OutOfMemory(
                f"stage {one.action.stage} does not fit: rank {self.rank} ({self._name}) needs "
                f"{format_bytes(need)} and more at {one} and has {format_bytes(room)}: at least "
                f"{need - room:.0f} bytes short"
            )

    def _sum_tied(self) -> None:
        """Sum up what all stages' devices have of the gradients of parameters that they share."""
        for name in self._tied:
            own = [
                self._weights[s].gradient(name) for s in self._stages_of[name] if s in self._stages
            ]
            found = [one for one in own if one is not None]
            if not found:
                continue
            total = torch.stack(found).sum(0)
            if name in self._tied_groups:
                dist.all_reduce(total, group=self._tied_groups[name])
            for one in found:
                one.copy_(total)

    def _make_joint(self) -> Joint:
        return Joint(
            self._make_count_group(),
            frozenset[int]().union(*self._families),
            self._sum_tied,
            self._squares,
            self._clip_norm,
            self._make_tied_sums(),
        )

    def _make_count_group(self) -> dist.ProcessGroup | None:
        """The processes that together normalise a loss; gloo's, as numbers lie on the host."""
        devices: Sequence[str] = self._rank.devices
        if self.plan.weight_rule.updates_every_round:
            devices = self.plan.stages[-1].runners(0)
        if len(devices) == 1:
            return None
        ranks = [self._rank.devices.index(name) for name in devices]
        group = dist.new_group(sorted(ranks), timeout=self._timeout, backend="gloo")
        return group if self.rank in ranks else None

    def _make_tied_sums(self) -> TiedSums | None:
        if not self.plan.is_periodic:
            return None
        sharing = {
            name: [s for s in self._stages_of[name] if s in self._stages] for name in self._tied
        }
        own = {name: stages for name, stages in sharing.items() if stages}
        return TiedSums(self._weights, own, self._tied_groups)

    def _squares(self) -> float:
        """The squared norm of gradients, each parameter on one rank: the first that has it."""
        first = {s for s in self._stages if self._first_rank(s) == self.rank}
        tied = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            for name in self._tied
            if (s := self._stages_of[name][0]) in first
            and (gradient := self._weights[s].gradient(name)) is not None
        ]
        return sum(self._weights[s].squares() for s in first) + float(sum(tied))

    def _summed(
        self, values: tuple[float, ...], group: dist.ProcessGroup | None
    ) -> tuple[float, ...]:
        if group is None:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self._rank.wire)
        dist.all_reduce(total, group=group)
        return tuple(total.tolist())


def require_clip_norm(plan: PipelinePlan, clip_norm: float | None) -> None:
    """Refuse a norm that is none, and one for weights that change stage by stage."""
    if clip_norm is None:
        return
    if not (isfinite(clip_norm) and clip_norm > 0):
        raise InputError(f"clip_norm must be a positive number, got {clip_norm:g}")
    if plan.weight_rule.updates_every_round:
        raise InputError(
            f"clip_norm needs a step of the whole model: with {plan.weights!r} weights every stage "
            "updates at its own times; plan with 'flush' weights"
        )


def _device(given: torch.device | str | None) -> torch.device:
    if given is not None:
        device = torch.device(given)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local % torch.cuda.device_count())


def _rank(plan: PipelinePlan, device: torch.device, families: Families = ()) -> Rank:
    group = dist.group.WORLD if dist.is_initialized() else None
    program = lower_any(plan, families)
    verify(plan, program, families=families)
    size = 1 if group is None else group.size()
    if size != len(program.devices):
        raise InputError(
            f"the plan needs {len(program.devices)} ranks, one for each of "
            f"{', '.join(program.devices)}; there are {size}"
        )
    number = 0 if group is None else group.rank()
    # Gloo moves what lies in the host's memory.
    gloo = group is not None and dist.get_backend(group) == "gloo"
    wire = torch.device("cpu") if gloo else device
    periodic = None if isinstance(program, Program) else program
    whole = program if isinstance(program, Program) else program.until_it_repeats()
    row = whole.rows[number]
    return Rank(plan, program.devices, number, row, device, wire, group, periodic)


def _require_same_model(plan: PipelinePlan, model: LayeredModel) -> None:
    """The model's layers are those that were planned: their number, names and sizes."""
    count = plan.stages[-1].layers[1]
    if len(model.layers) != count:
        names = ", ".join(layer.name for layer in model.layers)
        raise InputError(f"the plan has {count} layers, the model {len(model.layers)}: {names}")
    sizes = set()
    for i, (planned, layer) in enumerate(zip(plan.layers or (), model.layers, strict=False)):
        if planned.name != layer.name:
            raise InputError(
                f"layer {i} is {planned.name!r} in the plan, {layer.name!r} in the model"
            )
        numbers = sum(one.numel() for one in layer.module.parameters())
        if (planned.parameter_bytes > 0) != (numbers > 0):
            raise _other_size(i, planned.name, planned.parameter_bytes, numbers)
        if numbers:
            sizes.add(planned.parameter_bytes / numbers)
            # Whatever type was planned for, it is the same for all layers.
            if len(sizes) > 1:
                raise _other_size(i, planned.name, planned.parameter_bytes, numbers)


def _other_size(i: int, name: str, planned_bytes: float, numbers: int) -> InputError:
    return InputError(
        f"layer {i}, {name!r}, has {planned_bytes:.0f} bytes of parameters in the plan and "
        f"{numbers} parameters in the model"
    )


def _require_updated_together(
    plan: PipelinePlan, tied: Sequence[str], stages_of: Mapping[str, Sequence[int]]
) -> None:
    for name in tied if plan.weight_rule.updates_every_round else ():
        raise InputError(
            f"parameter {name!r} is shared by stages {_and(stages_of[name])}, which with "
            f"{plan.weights!r} update it at different times; put its layers into one stage"
        )


def _require_not_shared(tied: Sequence[str], stages_of: Mapping[str, Sequence[int]]) -> None:
    for name in tied:
        raise InputError(
            f"clip_norm: parameter {name!r} is shared by stages {_and(stages_of[name])} of a "
            "periodic plan, where its gradient is not known in time; put its layers into one stage"
        )


def _require_whole_gradients(
    plan: PipelinePlan, model: LayeredModel, stages_of: Mapping[str, Sequence[int]]
) -> None:
    for names, one in model.parameters_by_name().items():
        for s in stages_of[names[0]] if one._backward_hooks else ():
            if len(plan.stages[s].runners(0)) > 1:
                raise InputError(
                    f"parameter {names[0]!r} has a hook, which each of the devices that split the "
                    f"microbatches of stage {s} would call with a part of the gradient; remove it"
                )


def _and(stages: Sequence[int]) -> str:
    return " and ".join(map(str, stages))


def _tensors_of(layer: CapturedLayer) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a layer, under all their names."""
    state = layer.module.state_dict(keep_vars=True)
    return {name: one for name, one in state.items() if isinstance(one, Tensor)}


def _belongs(key: str, own: set[str], kinds: Sequence[str]) -> bool:
    kind, _, name = key.partition(".")
    if kind == "optimizer":
        name = name.rpartition(".")[0]
    return kind in kinds and name in own


def _tensors(name: str, batch: Batch) -> tuple[Tensor, ...]:
    found = batch if isinstance(batch, tuple) else (batch,)
    for one in found:
        if not isinstance(one, Tensor):
            raise InputError(
                f"{name} must be a tensor or a tuple of tensors, got {type(one).__name__}"
            )
    return found


def _require_as_many(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for one in (*inputs, *targets):
        if one.dim() == 0 or len(one) != len(inputs[0]):
            raise InputError(
                f"a mini-batch needs as many samples in all its inputs and targets, got shapes "
                f"{', '.join(str(tuple(each.shape)) for each in (*inputs, *targets))}"
            )


def _samples(plan: PipelinePlan, inputs: Sequence[Tensor]) -> int:
    """The samples of a microbatch."""
    count = len(inputs[0])
    if count == 0 or count % plan.microbatches:
        raise InputError(
            f"a mini-batch of {count} samples cannot be cut into {plan.microbatches} equal "
            "microbatches; leave a ragged last mini-batch out, or fill it up"
        )
    return count // plan.microbatches


def _boundary(
    plan: PipelinePlan,
    s: int,
    lanes: Sequence[Sequence[Rows]],
    traces: Mapping[int, LayerTrace],
    samples: int,
) -> Boundary:
    values = traces[samples].outputs
    by_sample = tuple(
        all(trace.outputs[i].shape[:1] == (count,) for count, trace in traces.items())
        for i in range(len(values))
    )
    below, above = lanes[s], lanes[s + 1]
    if len(below) > 1 and plan.stages[s].runners(0) == plan.stages[s + 1].runners(0):
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


def _share(
    rows: Rows, lane: int, samples: int, traces: Mapping[int, Sequence[LayerTrace]]
) -> Share | None:
    """The samples of a microbatch that a device works on, None if it is all of them in order.

    ``traces`` of the stage's layers, by the number of samples.
    """
    if rows == tuple(range(samples)):
        return None
    fewer = min(traces)
    pairs = zip(traces[samples], traces[fewer], strict=True)
    return Share(
        rows,
        samples,
        lane,
        tuple(
            None if one.draws_again else whole_draws(one.draws, samples, other.draws, fewer)
            for one, other in pairs
        ),
    )


def _mapped(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    return tuple(map(change, batch)) if isinstance(batch, tuple) else change(batch)


def _barrier(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group)


def _since(start: float, records: Sequence[RankAction]) -> list[RankAction]:
    return [
        replace(
            one,
            start_seconds=max(0.0, one.start_seconds - start),
            finish_seconds=max(0.0, one.finish_seconds - start),
        )
        for one in records
    ]
