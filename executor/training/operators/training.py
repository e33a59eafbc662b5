"""Training by a plan of operators, as one of its ranks."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stagewright.executor.capture.steps.step import CapturedStep, capture_step
from stagewright.executor.programs.operators.lower import lower_operators
from stagewright.executor.programs.operators.placed import PlacedGraph, place_graph
from stagewright.executor.programs.operators.trace import traced_operators
from stagewright.executor.programs.operators.verify import verify_operators
from stagewright.executor.programs.trace import Trace
from stagewright.executor.training.interpreter.failures import NonFiniteLoss
from stagewright.executor.training.losses import Loss, cross_entropy
from stagewright.executor.training.operators.interpreter import OperatorInterpreter
from stagewright.executor.training.operators.matching import (
    gradients,
    losses,
    replicas_of,
    require_same_graph,
    share_of,
)
from stagewright.executor.training.operators.operations import Operations, splits_of
from stagewright.executor.training.ranks.collectives import gathered
from stagewright.executor.training.ranks.rank import Place, this_place
from stagewright.executor.training.recording import Recording, meet, records_since
from stagewright.executor.training.stages.weights import MakeOptimizer
from stagewright.executor.training.trace_recorder import trace_of
from stagewright.executor.training.training import mini_batches, pair
from stagewright.formulations.operators.plan import OperatorPlan, digest_of
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.step_graph import StepGraph


@dataclass(frozen=True, slots=True, eq=False)
class OperatorTask:
    """A training run by a plan of operators, the same on every rank.

    Attributes
    ----------
    graph
        What was planned, before the plan's splits. Times in it are not used.
    model, data, loss, optimizer
        As for the capture of ``graph``; ``data`` makes one pass over the mini-batches. The loss is
        cross-entropy if it is None.
    seed
        For the model's parameters, the data and operators that draw.
    cluster
        If given, it must be the one that was planned for.
    """

    plan: OperatorPlan
    graph: StepGraph
    model: Callable[[], nn.Module]
    data: Callable[[], Iterable[Any]]
    optimizer: MakeOptimizer
    steps: int
    loss: Loss | None = None
    seed: int = 0
    cluster: Cluster | None = None

    def placed(self) -> PlacedGraph:
        """The operators on ranks; raises InvalidPlan if the plan is not of this graph."""
        if self.cluster is not None:
            digest = digest_of(self.graph, self.cluster, self.plan.contention)
            if not self.plan.answers(digest):
                raise InvalidPlan("the plan answers another graph, cluster or contention")
        return place_graph(self.plan, self.graph)


@dataclass(slots=True, eq=False)
class OperatorRun:
    """Mean loss and duration of every step, of the slowest rank.

    Only the first rank has ``parameters``, parameters and buffers by their path in the model, and
    the ``trace``. ``gradients`` are those of every step that this rank makes, by path.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] | None = None
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    trace: Trace | None = None


def train_operators(
    task: OperatorTask,
    device: torch.device | str | None = None,
    *,
    trace: bool = False,
    with_gradients: bool = False,
) -> OperatorRun:
    """Carry out ``task`` as one of the processes of torch's default group; alone if there is none.

    Raises
    ------
    InputError
        If the model does not capture to the graph, the data do not fit, or the plan needs another
        number of processes.
    InvalidPlan
        If the plan cannot be carried out.
    NonFiniteLoss
        Naming the step.
    """
    placed = task.placed()
    place = this_place(placed.devices, device)
    program = lower_operators(placed)
    verify_operators(placed, program)
    batches = mini_batches(task.data, task.seed)
    batch = pair(next(batches))
    torch.manual_seed(task.seed)
    model = task.model()
    step = _captured(task, model, batch)
    share = _Share.of(task, place, placed, model, step)
    del model
    interpreter = OperatorInterpreter(
        place,
        placed,
        program.rows[place.number],
        Operations(placed, step, _splits(task)),
        share.states,
        share.losses | (share.gradients if with_gradients else {}),
        task.seed,
    )
    del step
    run, seen, recordings = OperatorRun(), list[dict[str, float]](), list[Recording]()
    for number in range(task.steps):
        if number:
            batch = pair(next(batches))
        inputs = share.inputs(batch)
        if trace:
            meet(place.group)
            recordings.append(Recording(number, [time.perf_counter()]))
        start = time.perf_counter()
        found = interpreter.run(inputs, number, recordings[-1].records if trace else None)
        seen.append({name: found[name].item() for name in share.losses if name in found})
        run.seconds.append(time.perf_counter() - start)
        _require_finite(seen[-1], number)
        run.gradients.append({name: found[name] for name in share.gradients if name in found})
    _collect(task, place, placed, share, run, seen, recordings)
    return run


def _splits(task: OperatorTask) -> Any:
    return splits_of(task.plan.splits, {node.name: node.splits for node in task.graph.nodes})


def _captured(task: OperatorTask, model: nn.Module, batch: tuple[Any, Any]) -> CapturedStep:
    """The step of one replica, which must be that of the graph."""
    step = capture_step(
        model,
        share_of(batch, task.graph),
        loss=task.loss or cross_entropy,
        optimizer=task.optimizer,
        name=task.graph.name,
    )
    require_same_graph(step, task.graph)
    return step


def _require_finite(found: Mapping[str, float], step: int) -> None:
    for loss in found.values():
        if not torch.isfinite(torch.tensor(loss)):
            raise NonFiniteLoss(f"step {step + 1}: the loss is {loss}")


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """What this rank has of the run.

    ``states`` and ``batch`` are by the numbers of their operators: the values, and the replica and
    the tensor of a mini-batch. ``names`` are the nodes of parameters and buffers by path.
    """

    graph: StepGraph
    device: torch.device
    states: dict[int, Tensor]
    batch: dict[int, tuple[int, int]]
    names: dict[str, str]
    losses: dict[str, Any]
    gradients: dict[str, Any]

    @classmethod
    def of(
        cls,
        task: OperatorTask,
        place: Place,
        placed: PlacedGraph,
        model: nn.Module,
        step: CapturedStep,
    ) -> "_Share":
        own = [n for n, rank in enumerate(placed.rank) if rank == place.number]
        states, batch = {}, {}
        for n in own:
            node = placed.nodes[n]
            name, _, replica = node.name.partition("@")
            if node.role == "state":
                states[n] = step.states[name].to(place.device, copy=True)
            elif node.role == "input":
                batch[n] = int(replica or 0), int(name.removeprefix("input_"))
        return cls(
            task.graph,
            place.device,
            states,
            batch,
            _paths(model, step),
            losses(step, placed, replicas_of(task.graph)),
            gradients(step, placed),
        )

    def inputs(self, batch: tuple[Any, Any]) -> dict[int, Tensor]:
        """The tensors of a mini-batch that this rank reads."""
        shares = [
            tree_leaves(share_of(batch, self.graph, r)) for r in range(replicas_of(self.graph))
        ]
        return {n: shares[r][i].to(self.device) for n, (r, i) in self.batch.items()}


def _paths(model: nn.Module, step: CapturedStep) -> dict[str, str]:
    """The nodes of parameters and buffers, by all their paths in the model's state dict."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first = {id(one): step.names[path] for path, one in reversed(named) if path in step.names}
    saved = model.state_dict().keys()
    return {path: first[id(one)] for path, one in named if path in saved}


def _collect(
    task: OperatorTask,
    place: Place,
    placed: PlacedGraph,
    share: _Share,
    run: OperatorRun,
    seen: list[dict[str, float]],
    recordings: list[Recording],
) -> None:
    """Bring the results of all ranks together."""
    states = {placed.nodes[n].name: one.cpu() for n, one in share.states.items()}
    own = (seen, run.seconds, states, recordings)
    found = gathered(place, own)
    if found is None:
        return
    every, seconds, held, recorded = (list(one) for one in zip(*found, strict=True))
    run.losses = [
        fmean(value for each in step for value in each.values())
        for step in zip(*every, strict=True)
    ]
    run.seconds = [max(step) for step in zip(*seconds, strict=True)]
    whole: dict[str, Tensor] = {name: one for each in held for name, one in each.items()}
    run.parameters = {
        path: whole[name] if name in whole else whole[f"{name}@0"]
        for path, name in share.names.items()
    }
    if recordings:
        steps = tuple(
            traced_operators(
                placed,
                first.step,
                [
                    record
                    for one in ranks
                    for record in records_since(one.begin(first), one.records)
                ],
                loss,
            )
            for ranks, loss in zip(zip(*recorded, strict=True), run.losses, strict=True)
            for first in ranks[:1]
        )
        dtype = next(iter(run.parameters.values())).dtype
        run.trace = trace_of(place, task.plan.digest, task.graph.name, dtype, steps)
