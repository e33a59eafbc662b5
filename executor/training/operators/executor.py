"""One rank of a plan of operators: the counterpart of `runtime.Executor` for pipelines."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stagewright.executor.capture.steps.step import CapturedStep, capture_step, share_of
from stagewright.executor.programs.operators.placed import (
    PlacedGraph,
    devices_of,
    lower_operators,
    traced_operators,
)
from stagewright.executor.programs.operators.verify import verify_operators
from stagewright.executor.training.interpreter.last_stage import NonFiniteLoss
from stagewright.executor.training.losses import Loss
from stagewright.executor.training.operators.interpreter import (
    Operations,
    OperatorInterpreter,
    losses,
    planned_graph,
    replica_of,
    replicas_of,
)
from stagewright.executor.training.rank_executor import MODEL, RankExecutor
from stagewright.executor.training.ranks.rank import RankPlace, summed, this_place
from stagewright.executor.training.stages.initialise import Model
from stagewright.executor.training.stages.learning_rates import MakeOptimizer
from stagewright.executor.training.trace_recorder import TraceRecorder
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.graphs.documents.errors import InputError

OTHER = "state."  # what the keys of states start with that are neither


@dataclass(frozen=True, eq=False)
class OwnStates:
    """A rank's states.

    ``values``: by the number of their operator; steps change them. ``first``: the states of the
    first replica, where every replica has states of its own. ``keys``: the keys in a checkpoint by
    number: ``model.PATH`` of parameters and buffers, ``state.PATH`` of the rest. Replicas have the
    same keys. ``paths``: the first path of every parameter and buffer in the model's state dict, by
    each of its paths.
    """

    values: Mapping[int, Tensor]
    first: frozenset[int]
    keys: Mapping[int, str]
    paths: Mapping[str, str]

    @classmethod
    def of(
        cls, place: RankPlace, placed: PlacedGraph, model: nn.Module, step: CapturedStep
    ) -> "OwnStates":
        """Copies of the states of ``step`` that are placed on this rank."""
        paths = _paths(model, step)
        saved = set(paths.values())
        keys = {
            name: f"{MODEL if path in saved else OTHER}{path}" for path, name in step.names.items()
        }
        own = {
            n: node.name
            for n, node in enumerate(placed.nodes)
            if node.role == "state" and placed.rank[n] == place.number
        }
        single = {n: name.partition("@")[0] for n, name in own.items()}
        return cls(
            {n: step.states[name].to(place.device, copy=True) for n, name in single.items()},
            frozenset(n for n, name in own.items() if replica_of(name) == 0),
            {n: keys[name] for n, name in single.items()},
            paths,
        )

    def state(self) -> dict[str, Tensor]:
        """The tensors that this rank writes to a checkpoint; each key is written by one rank."""
        return {self.keys[n]: self.values[n] for n in sorted(self.first)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint's tensors into states; raises InputError if a tensor is missing."""
        for n, key in self.keys.items():
            if key not in tensors:
                raise InputError(f"the checkpoint has no {key!r}")
            self.values[n].copy_(tensors[key])

    def wanted(self, keys: Iterable[str]) -> list[str]:
        """Which entries of a checkpoint belong to this rank's operators."""
        own = set(self.keys.values())
        return [key for key in keys if key in own]

    def whole_model(self, shares: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The model's state dict under all its names, from the shares of all ranks."""
        whole = {path: value for share in shares for path, value in share.items()}
        return {path: whole[first] for path, first in self.paths.items()}


def _paths(model: nn.Module, step: CapturedStep) -> dict[str, str]:
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first = {id(one): path for path, one in reversed(named) if path in step.names}
    keys = model.state_dict().keys()
    return {path: first[id(one)] for path, one in named if path in keys}


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a mini-batch that a rank reads.

    ``kinds``: shape and type of every tensor of a replica's share. ``leaves``: replica and number
    of the tensor by the number of the operator.
    """

    replicas: int
    device: torch.device
    kinds: tuple[tuple[torch.Size, torch.dtype], ...]
    leaves: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, place: RankPlace, placed: PlacedGraph, batch: tuple[Any, Any]) -> "Inputs":
        """The share of this rank for mini-batches like ``batch``."""
        replicas = replicas_of(placed.plan)
        share = tree_leaves(share_of(batch, replicas, 0))
        return cls(
            replicas,
            place.device,
            tuple((one.shape, one.dtype) for one in share),
            {
                n: (replica_of(node.name), int(node.name.partition("@")[0].removeprefix("input_")))
                for n, node in enumerate(placed.nodes)
                if node.role == "input" and placed.rank[n] == place.number
            },
        )

    def read(self, batch: tuple[Any, Any]) -> dict[int, Tensor]:
        """The tensors by operator; raises InputError if one is not as planned."""
        shares = [
            tree_leaves(share_of(batch, self.replicas, number)) for number in range(self.replicas)
        ]
        found = tuple((one.shape, one.dtype) for one in shares[0])
        if found != self.kinds:
            of = " for a replica" if self.replicas > 1 else ""
            raise InputError(
                f"the mini-batch has {_shown(found)}{of}, the plan is of {_shown(self.kinds)}"
            )
        return {n: shares[r][i].to(self.device) for n, (r, i) in self.leaves.items()}


def _shown(kinds: tuple[tuple[torch.Size, torch.dtype], ...]) -> str:
    return ", ".join(f"{list(shape)} {str(kind).removeprefix('torch.')}" for shape, kind in kinds)


class OperatorExecutor(RankExecutor):
    """One rank of a plan, among the processes of torch's default group; alone if there is none.

    Raises InputError if model and mini-batch are not what was planned, or the plan needs another
    number of processes. Raises InvalidPlan if the plan cannot be carried out.

    ``plan``: rank r is the r-th device in the order in which the plan uses them. ``model``: a
    function without arguments that makes the module; every rank makes it, with the same ``seed``,
    and keeps the states that are placed on its device. ``batch``: a mini-batch like those that
    `step` is given. ``loss``, ``optimizer``: as for the capture of the graph that was planned.
    ``seed``: for the parameters, and for operators that draw: an operator draws the same numbers on
    every device.
    """

    def __init__(
        self,
        plan: OperatorPlan,
        model: Callable[[], Model],
        batch: tuple[Any, Any],
        loss: Loss,
        optimizer: MakeOptimizer,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        trace: bool = False,
    ) -> None:
        self.plan, self.steps_done = plan, 0
        self._place = this_place(devices_of(plan), device)
        torch.manual_seed(seed)
        module = model()
        if not isinstance(module, nn.Module):
            raise InputError(
                f"a plan of operators is of one module, the model is a {type(module).__name__}"
            )
        replicas = replicas_of(plan)
        step = capture_step(
            module, share_of(batch, replicas, 0), loss=loss, optimizer=optimizer, name=plan.model
        )
        placed = planned_graph(plan, step)
        program = lower_operators(placed)
        verify_operators(placed, program)
        self._replicas = replicas
        self._own = OwnStates.of(self._place, placed, module, step)
        self._inputs = Inputs.of(self._place, placed, batch)
        values = losses(step, placed)
        self._losses = {placed.rank[n] for n, _ in values}
        self._interpreter = OperatorInterpreter(
            self._place,
            placed,
            program.rows[self.rank],
            Operations(placed, step),
            self._own.values,
            [value for value in values if placed.rank[value[0]] == self.rank],
            seed,
        )
        self._recorder = TraceRecorder(
            self._place,
            plan,
            next(module.parameters()).dtype,
            lambda step, records, loss, _: traced_operators(placed, step, records, loss),
            self.reporter,
            on=trace,
        )

    @property
    def reporter(self) -> int:
        """A rank that knows the losses."""
        return min(self._losses)

    def step(self, inputs: Any, targets: Any) -> float | None:
        """One step on a mini-batch, the same on every rank.

        Raises InputError if the tensors are not as planned. Raises NonFiniteLoss, OutOfMemory.
        Returns the mean loss, on ranks that make one of a replica.
        """
        given = self._inputs.read((inputs, targets))
        self._recorder.begin(self.steps_done)
        with self._own_draws():
            own = self._interpreter.run(given, self.steps_done, self._recorder.records)
        self.steps_done += 1
        for loss in own:
            if not math.isfinite(loss):
                raise NonFiniteLoss(f"step {self.steps_done}: the loss is {loss}")
        total = sum(own)
        if len(self._losses) > 1:
            (total,) = summed(self._place, (total,), self._place.group)
        mean = total / self._replicas if own or len(self._losses) > 1 else None
        self._recorder.add_losses([] if mean is None else [mean])
        self._recorder.end(self.steps_done)
        return mean

    def finish(self) -> list[float]:
        """No step is in flight after `step`."""
        return []
