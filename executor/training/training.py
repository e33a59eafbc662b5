"""The training loop of one rank: mini-batches, steps, checkpoints, results."""

import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from stagewright.executor.programs.operators.placed import devices_of
from stagewright.executor.programs.program import plan_devices
from stagewright.executor.programs.trace import save_trace
from stagewright.executor.training import checkpoint
from stagewright.executor.training.checkpoint import Header
from stagewright.executor.training.losses import Loss, cross_entropy
from stagewright.executor.training.model_checks import (
    require_capturable,
    require_clip_norm,
    require_known_tensor_plan,
)
from stagewright.executor.training.operators.executor import OperatorExecutor
from stagewright.executor.training.ranks.endings import Member
from stagewright.executor.training.runtime import Executor
from stagewright.executor.training.stages.initialise import Model
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError

AnyExecutor = Executor | OperatorExecutor
Report = Callable[[int, float, float], None]


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """A class of torch.optim with its arguments."""

    name: str
    kind: type[Optimizer]
    arguments: Mapping[str, Any]

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Make the optimizer of ``parameters``."""
        return self.kind(parameters, **self.arguments)


@dataclass(frozen=True, slots=True)
class Task:
    """A training run, the same on every rank.

    ``data`` makes one pass over the mini-batches; without a ``loss`` it is cross-entropy, or the
    model's own where mini-batches are keywords;
    ``clip_norm`` is the most that the norm of all gradients may be; ``dtype`` is the type of a
    pipeline's parameters; ``steps`` counts those of an earlier run that is resumed. A checkpoint is
    written to the folder ``checkpoints`` every ``checkpoint_every`` steps and at the end. ``graph``
    and ``compile`` as in `Executor`.
    """

    plan: PipelinePlan | OperatorPlan
    model: Callable[[], Model]
    data: Callable[[], Iterable[Any]]
    loss: Loss | None
    optimizer: NamedOptimizer
    clip_norm: float | None
    steps: int
    seed: int
    dtype: torch.dtype | None
    timeout_seconds: float
    checkpoints: Path | None
    checkpoint_every: int
    resume: bool
    parameters: Path | None
    trace: Path | None
    graph: bool
    compile: bool

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**31:
            raise InputError(f"the seed must be from 0 to {2**31 - 1}, got {self.seed}")
        if isinstance(self.plan, OperatorPlan):
            self._require_captured()
            return
        require_clip_norm(self.plan, self.clip_norm)
        require_known_tensor_plan(self.plan)
        if self.graph:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            require_capturable(self.plan, device, traced=self.trace is not None)

    def _require_captured(self) -> None:
        """A plan of operators carries out the step that was captured, and nothing else."""
        for name, given in (
            ("clip_norm", self.clip_norm is not None),
            ("dtype", self.dtype is not None),
            ("graph", self.graph),
            ("compile", self.compile),
        ):
            if given:
                raise InputError(
                    f"{name} is for pipelines; a plan of operators runs the step that was captured"
                )

    def header(self, steps: int) -> Header:
        """The header of a checkpoint after ``steps``."""
        plan = self.plan
        weights = "flush" if isinstance(plan, OperatorPlan) else plan.weights
        return Header(steps, weights, self.optimizer.name)

    def pair(self, batch: Any) -> tuple[Any, Any]:
        """A mini-batch as (inputs, targets); see `pair`."""
        return pair(batch, has_loss=self.loss is not None)

    def executor(self, batch: tuple[Any, Any], device: torch.device) -> AnyExecutor:
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
            example=batch[0],
            clip_norm=self.clip_norm,
            seed=self.seed,
            dtype=self.dtype or torch.float32,
            device=device,
            timeout_seconds=self.timeout_seconds,
            trace=trace,
            graph=self.graph,
            compile=self.compile,
        )


@dataclass(frozen=True, slots=True)
class TrainingHistory:
    """Mean loss and duration of every step of a run.

    Where mini-batches overlap, a step lasts as long as the call that began it, and
    before a checkpoint or the end, until no mini-batch is in flight.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def train(
    task: Task, member: Member, report: Report, tell: Callable[[str], None]
) -> TrainingHistory:
    """Carry out ``task`` as one of its ranks.

    ``report`` is called with number, loss and seconds of every step, on one rank that knows them,
    as soon as it does; ``tell``, on the first rank, with notes for the user. Every rank returns
    the same losses and times.
    """
    devices = devices_of_any(task.plan)
    if len(devices) != member.world_size:
        raise InputError(
            f"the plan needs {len(devices)} ranks (devices {', '.join(devices)}), "
            f"torchrun started {member.world_size}"
        )
    told = tell if member.rank == 0 else lambda _: None
    path = checkpoint.find(task.checkpoints, task.resume, task.header(task.steps), told)
    batches = mini_batches(task.data, task.seed)
    ahead = next(batches)
    executor = task.executor(task.pair(ahead), member.device)
    if path is not None:
        _resume(executor, path)
    reporter = executor.reporter
    history = TrainingHistory()
    batches = chain([ahead], batches)
    first = executor.steps_done
    for _ in range(first):
        next(batches)
    for step in range(first + 1, task.steps + 1):
        member.place = f"at step {step}"
        batch = task.pair(next(batches))
        start = time.perf_counter()
        losses = _step(executor, batch, to_the_end=_is_due(task, step))
        history.seconds.append(time.perf_counter() - start)
        for loss in losses if member.rank == reporter else ():
            history.losses.append(loss)
            report(first + len(history.losses), loss, history.seconds[-1])
        _save(task, executor, step)
    member.place = "after the last step"
    _write_results(task, executor)
    seen = [history]
    dist.broadcast_object_list(seen, src=reporter)
    return seen[0]


def devices_of_any(plan: PipelinePlan | OperatorPlan) -> tuple[str, ...]:
    """The devices of a plan, in the order of the ranks."""
    return devices_of(plan) if isinstance(plan, OperatorPlan) else plan_devices(plan)


def mini_batches(data: Callable[[], Iterable[Any]], seed: int) -> Iterator[Any]:
    """The mini-batches of ``data``, pass after pass, without end.

    They have a separate random state: draws of the executor differ from rank to rank, and all ranks
    must see the same mini-batches.

    Raises
    ------
    InputError
        If a pass is empty.
    """
    state = torch.Generator().manual_seed(seed).get_state()
    batches: Iterator[Any] | None = None
    is_new = True
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            if batches is None:
                batches, is_new = iter(data()), True
            try:
                batch = next(batches)
            except StopIteration:
                if is_new:
                    raise InputError("the data hold no mini-batch") from None
                batches = None
            state = torch.get_rng_state()
        if batches is not None:
            is_new = False
            yield batch


def pair(batch: Any, *, has_loss: bool = True) -> tuple[Any, Any]:
    """A mini-batch as (inputs, targets).

    Keywords alone are the model's inputs; a loss, if there is one, is given them as targets.

    Raises
    ------
    InputError
        If it is neither a pair nor a mapping.
    """
    if isinstance(batch, Mapping):
        return dict(batch), dict(batch) if has_loss else ()
    if not (isinstance(batch, list | tuple) and len(batch) == 2):
        raise InputError(
            "the data must be pairs (inputs, targets) or dicts of the model's keywords, got "
            f"{type(batch).__name__}"
        )
    inputs, targets = batch  # torch's loaders make lists of what was a tuple
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets


def _resume(executor: AnyExecutor, path: Path) -> None:
    checkpoint.require_same_model(path, executor.state())
    keys = executor.wanted(checkpoint.read_kinds(path))
    executor.load_state(checkpoint.read(path, keys), checkpoint.read_header(path).steps)


def _step(executor: AnyExecutor, batch: tuple[Any, Any], *, to_the_end: bool) -> list[float]:
    """Do a step, ``to_the_end`` with the mini-batches in flight; the losses known then."""
    loss = executor.step(*batch)
    losses = [] if loss is None else [loss]
    return losses + (executor.finish() if to_the_end else [])


def _is_due(task: Task, step: int) -> bool:
    """Whether a checkpoint would follow ``step``, if there are any."""
    return step % task.checkpoint_every == 0 or step == task.steps


def _save(task: Task, executor: AnyExecutor, step: int) -> None:
    if task.checkpoints is not None and _is_due(task, step):
        checkpoint.save(task.checkpoints, executor.state(), task.header(step))


def _write_results(task: Task, executor: AnyExecutor) -> None:
    if task.parameters is not None:
        parameters = executor.parameters_on_first_rank()
        if parameters is not None:
            buffer = io.BytesIO()
            torch.save(parameters, buffer)
            documents.write_bytes(task.parameters, buffer.getvalue())
    if task.trace is not None:
        trace = executor.trace_on_first_rank()
        if trace is not None:
            save_trace(trace, task.trace)
