"""The training loop of one rank: mini-batches, steps, checkpoints, results."""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from stagewright.executor.programs.operators.placed import devices_of
from stagewright.executor.programs.program import plan_devices
from stagewright.executor.programs.trace import save_trace
from stagewright.executor.training import checkpoint
from stagewright.executor.training.checkpoint import Header
from stagewright.executor.training.checkpoint_share import (
    require_format,
    write_model,
    write_parameters,
)
from stagewright.executor.training.data.batches import (
    Readers,
    mini_batches,
    one_pass,
    pair,
    readers_of,
    replica_of,
    tensors_of_batch,
)
from stagewright.executor.training.logs import OnStep, StepReport, peak_bytes
from stagewright.executor.training.losses import Loss, cross_entropy
from stagewright.executor.training.model_checks import require_capturable, require_trainable
from stagewright.executor.training.operators.executor import OperatorExecutor
from stagewright.executor.training.ranks.endings import Member
from stagewright.executor.training.runtime import Executor
from stagewright.executor.training.stages.initialise import Model
from stagewright.executor.training.stages.learning_rates import (
    OPTIMIZER,
    ParameterGroups,
    RateSchedule,
    require_not_captured,
)
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError

_AnyExecutor = Executor | OperatorExecutor


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """A class of torch.optim with its arguments."""

    name: str
    kind: type[Optimizer]
    arguments: Mapping[str, Any]

    def __call__(self, parameters: list[Any]) -> Optimizer:
        """Make the optimizer of ``parameters``, or of torch's mappings for groups of them."""
        return self.kind(parameters, **self.arguments)


@dataclass(frozen=True, slots=True)
class Task:
    """A training run, the same on every rank.

    ``data`` makes one pass over the mini-batches; if it takes ``replica`` and ``replicas``, over
    the samples of that one. Without a ``loss`` it is cross-entropy, or the model's own where
    mini-batches are keywords;
    ``clip_norm`` is the most that the norm of all gradients may be; ``dtype`` is the type of a
    pipeline's parameters, ``weights`` are files with their values; ``steps`` counts those of an
    earlier run that is resumed; each takes ``accumulate`` mini-batches. A checkpoint is written to
    the folder ``checkpoints`` every ``checkpoint_every`` steps and at the end; as often as
    ``evaluate_every`` says the mini-batches of ``evaluation`` are evaluated. ``graph`` and
    ``compile`` as in `Executor`.
    """

    plan: PipelinePlan | OperatorPlan
    model: Callable[[], Model]
    data: Callable[..., Iterable[Any]]
    loss: Loss | None
    optimizer: NamedOptimizer
    groups: ParameterGroups
    schedule: RateSchedule | None
    accumulate: int
    clip_norm: float | None
    steps: int
    seed: int
    dtype: torch.dtype | None
    weights: Path | None
    timeout_seconds: float
    checkpoints: Path | None
    checkpoint_every: int
    evaluation: Callable[[], Iterable[Any]] | None
    evaluate_every: int
    resume: bool
    parameters: Path | None
    model_folder: Path | None
    trace: Path | None
    graph: bool
    compile: bool

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**31:
            raise InputError(f"the seed must be from 0 to {2**31 - 1}, got {self.seed}")
        require_format(self.parameters, self.model_folder)
        if isinstance(self.plan, OperatorPlan):
            self._require_captured()
            return
        traced, scaled = self.trace is not None, self.dtype == torch.float16
        checked = {"compiled": self.compile, "traced": traced, "scaled": scaled}
        require_trainable(self.plan, self.clip_norm, self.accumulate, **checked)
        require_not_captured(self.schedule, captured=self.graph)
        if self.graph:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            require_capturable(self.plan, device, traced=traced)

    def _require_captured(self) -> None:
        """A plan of operators carries out the step that was captured, and nothing else."""
        for name, given in (
            ("clip_norm", self.clip_norm is not None),
            ("dtype", self.dtype is not None),
            ("weights", self.weights is not None),
            ("graph", self.graph),
            ("compile", self.compile),
            ("groups", bool(self.groups)),
            ("accumulate", self.accumulate != 1),
            ("schedule", self.schedule is not None),
            ("evaluation", self.evaluation is not None),
            ("data of replicas", self.has_own_samples),
        ):
            if given:
                raise InputError(
                    f"{name} is for pipelines; a plan of operators runs the step that was captured"
                )

    def header(self, steps: int) -> Header:
        """The header of a checkpoint after ``steps``."""
        plan = self.plan
        weights = "flush" if isinstance(plan, OperatorPlan) else plan.weights
        others = (one[OPTIMIZER].name for one in self.groups.values() if OPTIMIZER in one)
        stepping = "+".join(dict.fromkeys([self.optimizer.name, *others]))
        return Header(steps, weights, stepping, str(self.schedule or "none"), self.accumulate)

    @property
    def has_own_samples(self) -> bool:
        """Whether the data are the samples of one replica alone."""
        return {"replica", "replicas"} <= inspect.signature(self.data).parameters.keys()

    def readers(self, rank: int) -> Readers:
        """How a rank gets mini-batches; all ranks call it."""
        if isinstance(self.plan, OperatorPlan):  # the ranks are known with the graph
            return Readers(rank, reads=True, told=None)
        return readers_of(self.plan, rank)

    def batches(self, rank: int, skipped: int) -> Iterator[tuple[Any, Any]]:
        """The mini-batches of a rank after the first ``skipped``, without end."""
        data = self.data
        if self.has_own_samples:
            assert isinstance(self.plan, PipelinePlan)
            replica = replica_of(self.plan, plan_devices(self.plan)[rank])
            data = partial(data, replica=replica, replicas=self.plan.stages[0].replicas)
        return map(self.pair, mini_batches(data, self.seed, skipped))

    def held_out(self) -> Iterator[tuple[Any, Any]]:
        """The mini-batches of an evaluation."""
        assert self.evaluation is not None
        return map(self.pair, one_pass(self.evaluation, self.seed))

    def pair(self, batch: Any) -> tuple[Any, Any]:
        """A mini-batch as (inputs, targets); see `pair`."""
        return pair(batch, has_loss=self.loss is not None)

    def executor(self, batch: tuple[Any, Any], device: torch.device) -> _AnyExecutor:
        """Make the executor of this rank; ``batch`` is the first mini-batch."""
        trace = self.trace is not None
        if isinstance(self.plan, OperatorPlan):
            return OperatorExecutor(
                self.plan,
                self.model,
                batch,
                self.loss or cross_entropy,
                self.optimizer,
                seed=self.seed,
                device=device,
                trace=trace,
            )
        return Executor(
            self.plan,
            self.model,
            self.loss,
            self.optimizer,
            groups=self.groups,
            schedule=self.schedule,
            accumulate=self.accumulate,
            example=batch[0],
            clip_norm=self.clip_norm,
            seed=self.seed,
            dtype=self.dtype or torch.float32,
            weights=self.weights,
            device=device,
            timeout_seconds=self.timeout_seconds,
            trace=trace,
            graph=self.graph,
            compile=self.compile,
            own_samples=self.has_own_samples,
            evaluates=self.evaluation is not None,
        )


@dataclass(frozen=True, slots=True)
class TrainingHistory:
    """Mean loss and duration of every step of a run, and the evaluations by their steps.

    ``updates_left_out``: those with infinite gradients of a scaled loss.

    Where mini-batches overlap, a step lasts as long as the call that began it, and
    before a checkpoint or the end, until no mini-batch is in flight.
    """

    losses: list[float] = field(default_factory=list)
    updates_left_out: int = 0
    seconds: list[float] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)


def train(
    task: Task, member: Member, on_step: OnStep, tell: Callable[[str], None]
) -> TrainingHistory:
    """Carry out ``task`` as one of its ranks.

    ``on_step`` is called for every step, on one rank that knows its loss, as soon as it does, and
    again with the loss of an evaluation after it;
    ``tell``, on the first rank, with notes for the user. Every rank returns the same losses and
    times.
    """
    devices = devices_of_any(task.plan)
    if len(devices) != member.world_size:
        raise InputError(
            f"the plan needs {len(devices)} ranks (devices {', '.join(devices)}), "
            f"torchrun started {member.world_size}"
        )
    told = tell if member.rank == 0 else lambda _: None
    path = checkpoint.find(task.checkpoints, task.resume, task.header(task.steps), told)
    readers = task.readers(member.rank)
    read = 0 if path is None else checkpoint.read_header(path).seen
    batches = readers.each(partial(task.batches, member.rank, read))
    ahead = next(batches)
    executor = task.executor(ahead, member.device)
    if path is not None:
        _resume(executor, path)
    if task.evaluation is not None:  # what is wrong with the data that are held out is told now
        _evaluated(task, readers, executor, most=1)
    loop = _Loop(task, member, executor, readers, on_step, executor.steps_done // task.accumulate)
    batches = chain([ahead], batches)
    for step in range(loop.first + 1, task.steps + 1):
        member.place = f"at step {step}"
        loop.step(step, [next(batches) for _ in range(task.accumulate)])
    member.place = "after the last step"
    left_out = executor.updates_left_out if isinstance(executor, Executor) else 0
    seen = [replace(loop.history, updates_left_out=left_out)]
    dist.broadcast_object_list(seen, src=executor.reporter)
    return seen[0]


@dataclass(slots=True, eq=False)
class _Loop:
    """The steps of a rank after the ``first`` ones, which an earlier run has done."""

    task: Task
    member: Member
    executor: _AnyExecutor
    readers: Readers
    on_step: OnStep
    first: int
    history: TrainingHistory = field(default_factory=TrainingHistory)
    reported: StepReport | None = None

    def step(self, step: int, given: Sequence[tuple[Any, Any]]) -> None:
        """Do a step on ``given`` mini-batches; save and report its results, then evaluate."""
        task, executor = self.task, self.executor
        rate, start = _learning_rate(executor), time.perf_counter()
        evaluates = task.evaluation is not None and _is_due(task.evaluate_every, task, step)
        to_the_end = evaluates or _is_due(task.checkpoint_every, task, step)
        losses = _step(executor, given, to_the_end=to_the_end)
        seconds = time.perf_counter() - start
        self.history.seconds.append(seconds)
        if self.member.peaks is not None:
            self.member.peaks.tell(peak_bytes(self.member.device))
        _save(task, executor, step)
        if step == task.steps:
            _write_results(task, executor)
        rank, samples = self.member.rank, _samples(task, given)
        for loss in losses if rank == executor.reporter else ():
            self._report(loss, seconds, samples / seconds, rate)
        if evaluates:
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        """Evaluate the model after a step, whose report is made again with the loss of that."""
        evaluated = _evaluated(self.task, self.readers, self.executor)
        if evaluated is not None:
            self.history.evaluations[step] = evaluated
            if self.reported is not None:
                self.on_step(replace(self.reported, evaluation_loss=evaluated))

    def _report(
        self, loss: float, seconds: float, samples_per_second: float, rate: float | None
    ) -> None:
        """Tell of the next step whose loss is known."""
        self.history.losses.append(loss)
        step = self.first + len(self.history.losses)
        own, peaks = peak_bytes(self.member.device), self.member.peaks
        self.reported = StepReport(
            step=step,
            loss=loss,
            samples_per_second=samples_per_second,
            seconds=seconds,
            learning_rate=rate,
            peak_bytes=own if peaks is None else peaks.most(own),
        )
        self.on_step(self.reported)


def _learning_rate(executor: _AnyExecutor) -> float | None:
    """The learning rate of the rank's first parameter group."""
    optimizers = [] if isinstance(executor, OperatorExecutor) else executor.optimizers
    return next((float(one.param_groups[0]["lr"]) for one in optimizers), None)


def _samples(task: Task, batches: Sequence[tuple[Any, Any]]) -> int:
    """The samples of mini-batches, of all replicas."""
    own = sum(len(tensors_of_batch("inputs", inputs)[0]) for inputs, _ in batches)
    if not task.has_own_samples:
        return own
    assert isinstance(task.plan, PipelinePlan)
    return own * task.plan.stages[0].replicas


def devices_of_any(plan: PipelinePlan | OperatorPlan) -> tuple[str, ...]:
    """The devices of a plan, in the order of the ranks."""
    return devices_of(plan) if isinstance(plan, OperatorPlan) else plan_devices(plan)


def _resume(executor: _AnyExecutor, path: Path) -> None:
    checkpoint.require_same_model(path, executor.state())
    keys = executor.wanted(checkpoint.read_kinds(path))
    executor.load_state(checkpoint.read(path, keys), checkpoint.read_header(path).seen)


def _step(
    executor: _AnyExecutor, batches: Sequence[tuple[Any, Any]], *, to_the_end: bool
) -> list[float]:
    """Do a step, ``to_the_end`` with the mini-batches in flight; the losses known then.

    One loss is the mean of those of several ``batches``.
    """
    losses = [loss for batch in batches if (loss := executor.step(*batch)) is not None]
    if len(batches) > 1 and losses:
        losses = [sum(losses) / len(losses)]
    return losses + (executor.finish() if to_the_end else [])


def _is_due(every: int, task: Task, step: int) -> bool:
    """Whether ``step`` is a multiple of ``every``, or the last step."""
    return step % every == 0 or step == task.steps


def _evaluated(
    task: Task, readers: Readers, executor: _AnyExecutor, most: int | None = None
) -> float | None:
    """The mean loss of (at most ``most``) held-out mini-batches; None on ranks without it."""
    assert isinstance(executor, Executor)
    return executor.evaluate(islice(readers.each(task.held_out), most))


def _save(task: Task, executor: _AnyExecutor, step: int) -> None:
    if task.checkpoints is not None and _is_due(task.checkpoint_every, task, step):
        checkpoint.save(task.checkpoints, executor.state(), task.header(step))


def _write_results(task: Task, executor: _AnyExecutor) -> None:
    if task.parameters is not None:
        parameters = executor.parameters_on_first_rank()
        if parameters is not None:
            write_parameters(task.parameters, parameters)
    if task.model_folder is not None:
        write_model(task.model_folder, task.model, executor)
    if task.trace is not None and (trace := executor.trace_on_first_rank()) is not None:
        save_trace(trace, task.trace)
