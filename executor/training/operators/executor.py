"""One rank of a plan of operators: the counterpart of `runtime.Executor` for pipelines."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stagewright.executor.capture.steps.factories import share_of
from stagewright.executor.capture.steps.step import CapturedStep, capture_step
from stagewright.executor.programs.operators.lower import lower_operators
from stagewright.executor.programs.operators.placed import PlacedGraph, devices_of
from stagewright.executor.programs.operators.trace import traced_operators
from stagewright.executor.programs.operators.verify import verify_operators
from stagewright.executor.programs.trace import Trace
from stagewright.executor.training.interpreter.last_stage import NonFiniteLoss
from stagewright.executor.training.losses import Loss
from stagewright.executor.training.operators.interpreter import OperatorInterpreter
from stagewright.executor.training.operators.operations import (
    Operations,
    losses,
    planned_graph,
    replica_of,
    replicas_of,
)
from stagewright.executor.training.ranks.groups import gathered, summed
from stagewright.executor.training.ranks.rank import Place, this_place
from stagewright.executor.training.stages.initialise import Model
from stagewright.executor.training.stages.weights import MakeOptimizer
from stagewright.executor.training.trace_recorder import Recording, meet, records_since, trace_of
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.graphs.documents.errors import InputError

MODEL, OTHER = "model.", "state."  # what the keys of a checkpoint start with


@dataclass(frozen=True, eq=False)
class States:
    """A rank's states.

    Attributes
    ----------
    values
        By the number of their operator; steps change them.
    first
        The states of the first replica, where every replica has states of its own.
    keys
        The keys in a checkpoint by number: ``model.PATH`` of parameters and buffers, ``state.PATH``
        of the rest. Replicas have the same keys.
    paths
        The first path of every parameter and buffer in the model's state dict, by each of its
        paths.
    """

    values: Mapping[int, Tensor]
    first: frozenset[int]
    keys: Mapping[int, str]
    paths: Mapping[str, str]

    @classmethod
    def of(
        cls, place: Place, placed: PlacedGraph, model: nn.Module, step: CapturedStep
    ) -> "States":
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

    def saved(self) -> dict[str, Tensor]:
        """The tensors that this rank writes to a checkpoint; each key is written by one rank."""
        return {self.keys[n]: self.values[n] for n in sorted(self.first)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint's tensors into states; raises InputError if a tensor is missing."""
        for n, key in self.keys.items():
            if key not in tensors:
                raise InputError(f"the checkpoint has no {key!r}")
            self.values[n].copy_(tensors[key])

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Parameters and buffers of the rank by their first path."""
        return {
            key.removeprefix(MODEL): value
            for key, value in self.saved().items()
            if key.startswith(MODEL)
        }


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

    Attributes
    ----------
    kinds
        Shape and type of every tensor of a replica's share.
    leaves
        Replica and number of the tensor by the number of the operator.
    """

    replicas: int
    device: torch.device
    kinds: tuple[tuple[torch.Size, torch.dtype], ...]
    leaves: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, place: Place, placed: PlacedGraph, batch: tuple[Any, Any]) -> "Inputs":
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


class OperatorExecutor:
    """One rank of a plan, among the processes of torch's default group; alone if there is none.

    Parameters
    ----------
    plan
        Rank r is the r-th device in the order in which the plan uses them.
    model
        A function without arguments that makes the module; every rank makes it, with the same
        ``seed``, and keeps the states that are placed on its device.
    batch
        A mini-batch like those that `step` is given.
    loss, optimizer
        As for the capture of the graph that was planned.
    seed
        For the parameters, and for operators that draw: an operator draws the same numbers on
        every device.

    Raises
    ------
    InputError
        If model and mini-batch are not what was planned, or the plan needs another number of
        processes.
    InvalidPlan
        If the plan cannot be carried out.
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
        self._placed, self._replicas = placed, replicas
        self._states = States.of(self._place, placed, module, step)
        self._inputs = Inputs.of(self._place, placed, batch)
        values = losses(step, placed)
        self._losses = {placed.rank[n] for n, _ in values}
        self._interpreter = OperatorInterpreter(
            self._place,
            placed,
            program.rows[self.rank],
            Operations(placed, step),
            self._states.values,
            [value for value in values if placed.rank[value[0]] == self.rank],
            seed,
        )
        self._dtype = next(module.parameters()).dtype
        self._recordings: list[Recording] | None = [] if trace else None

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self._place.number

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return len(self._place.devices)

    @property
    def reporter(self) -> int:
        """A rank that knows the losses."""
        return min(self._losses)

    def step(self, inputs: Any, targets: Any) -> float | None:
        """One step on a mini-batch, the same on every rank.

        Returns
        -------
        float or None
            The mean loss, on ranks that make one of a replica.

        Raises
        ------
        InputError
            If the tensors are not as planned.
        NonFiniteLoss, OutOfMemory
        """
        given = self._inputs.read((inputs, targets))
        if self._recordings is not None:
            meet(self._place.group)
            self._recordings.append(Recording(self.steps_done, [time.perf_counter()]))
        records = self._recordings[-1].records if self._recordings else None
        device = self._place.device
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            own = self._interpreter.run(given, self.steps_done, records)
        self.steps_done += 1
        for loss in own:
            if not math.isfinite(loss):
                raise NonFiniteLoss(f"step {self.steps_done}: the loss is {loss}")
        total = sum(own)
        if len(self._losses) > 1:
            (total,) = summed(self._place, (total,), self._place.group)
        elif not own:
            return None
        mean = total / self._replicas
        if self._recordings:
            self._recordings[-1].losses.append(mean)
        return mean

    def finish(self) -> list[float]:
        """No step is in flight after `step`."""
        return []

    # State and traces

    def state(self) -> dict[str, Tensor]:
        """The share of a checkpoint that this rank writes; each key is written by one rank.

        ``model.NAME`` are parameters and buffers, ``state.NAME`` the rest. The next step changes
        these tensors.
        """
        return self._states.saved()

    def wanted(self, keys: Iterable[str]) -> list[str]:
        """Which entries of a checkpoint belong to this rank's operators."""
        own = set(self._states.keys.values())
        return [key for key in keys if key in own]

    def load_state(self, tensors: Mapping[str, Tensor], steps_done: int) -> None:
        """Continue a run that wrote ``tensors`` (`wanted` says which) after its steps.

        Raises
        ------
        InputError
            If a tensor of this rank is missing.
        """
        self._states.load(tensors)
        self.steps_done = steps_done

    def parameters_on_first_rank(self) -> dict[str, Tensor] | None:
        """The model's state dict on rank 0, None on the others; all ranks call it."""
        own = {path: one.to("cpu", copy=True) for path, one in self._states.parameters.items()}
        shares = gathered(self._place, own)
        if shares is None:
            return None
        whole = {path: value for share in shares for path, value in share.items()}
        return {path: whole[first] for path, first in self._states.paths.items()}

    def trace_on_first_rank(self) -> Trace | None:
        """When everything ran in the steps so far, on rank 0; None on the others.

        All ranks call it.
        """
        shares = gathered(self._place, self._recordings or [])
        if shares is None:
            return None
        loss = shares[self.reporter]
        steps = tuple(
            traced_operators(
                self._placed,
                own.step,
                [
                    record
                    for share in shares
                    for record in records_since(share[i].begin(own), share[i].records)
                ],
                loss[i].loss,
            )
            for i, own in enumerate(shares[0])
        )
        return trace_of(self._place, self.plan.digest, self.plan.model, self._dtype, steps)
