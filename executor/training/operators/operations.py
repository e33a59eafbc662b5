"""The operators of a placed graph on real tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from stagewright.executor.capture.steps.document import operators, selected
from stagewright.executor.capture.steps.parts import captured_outputs, cut, joined, run_part
from stagewright.executor.capture.steps.step import CapturedStep
from stagewright.executor.programs.operators.placed import PlacedGraph, Value, place_graph
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.models.operators.data_parallel import Weights, data_parallel


def replicas_of(plan: OperatorPlan) -> int:
    """The replicas of the model that a plan trains; see ``graphs.models.data_parallel``."""
    inputs = [one.operator for one in plan.operators if one.role == "input"]
    return max(replica_of(name) for name in inputs) + 1 if inputs else 1


def replica_of(name: str) -> int:
    """The replica of the operator ``name``."""
    return int(name.partition("@")[2] or 0)


def planned_graph(plan: OperatorPlan, step: CapturedStep) -> PlacedGraph:
    """The captured step of one replica as the graph that was planned.

    Raises InputError if it is another graph; times and lines may differ. Raises InvalidPlan if the
    plan does not place every operator once.
    """
    graph = data_parallel(step.graph, replicas_of(plan), _weights_of(plan))
    if graph.structure() == plan.structure:
        return place_graph(plan, graph)
    try:
        place_graph(plan, graph)
        fault = "shapes, types or orders differ"
    except InvalidPlan as error:
        fault = str(error)
    raise InputError(
        f"model, mini-batch, loss and optimizer are not those of {plan.model!r} as it was planned "
        f"({fault}); capture and plan them, or give the same (unless told, `capture` takes the "
        "optimizer adamw and `run` sgd)"
    )


def _weights_of(plan: OperatorPlan) -> Weights:
    if any(one.role == "state" and "@" in one.operator for one in plan.operators):
        return "mirrored"
    return "accumulated" if any("@sum" in one.operator for one in plan.operators) else "shared"


def losses(step: CapturedStep, placed: PlacedGraph) -> list[Value]:
    """The values of the replicas' losses."""
    *_, output = step.module.graph.nodes
    node, number = selected(output.args[0][0])
    return [
        _value(placed, node.name, number, replica) for replica in range(replicas_of(placed.plan))
    ]


def _value(placed: PlacedGraph, name: str, number: int, replica: int) -> Value:
    """An output of the captured graph in the placed one: copied or joined."""
    for one in (f"{name}@{replica}", name):
        if one in placed.number:
            return placed.number[one], number
        if f"{one}/join{number}" in placed.number:
            return placed.number[f"{one}/join{number}"], 0
    raise AssertionError(f"{name} is in the graph")


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shape, strides and type of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Tensor) -> "TensorLayout":
        """The layout of ``value``."""
        return cls(tuple(value.shape), value.stride(), value.dtype)

    @property
    def _order(self) -> list[int]:
        """The dimensions from the widest stride to the closest."""
        return sorted(range(len(self.shape)), key=lambda i: -self.strides[i])

    @property
    def _once(self) -> tuple[int, ...]:
        """The shape with every expanded dimension reduced to 1."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple(min(1, size) if stride == 0 else size for size, stride in pairs)

    def packed(self, value: Tensor) -> Tensor:
        """The elements of ``value`` in a row."""
        for i, size in enumerate(self._once):
            value = value.narrow(i, 0, size)
        return value.permute(self._order).contiguous().view(-1)

    def room(self, device: torch.device) -> Tensor:
        """Memory for the packed tensor."""
        return torch.empty(torch.Size(self._once).numel(), dtype=self.dtype, device=device)

    def unpacked(self, row: Tensor) -> Tensor:
        """A tensor of this layout from its elements in a row."""
        order = self._order
        ordered = row.view([self._once[i] for i in order])
        found = ordered.permute(sorted(range(len(order)), key=order.__getitem__))
        found = found.expand(self.shape)
        if found.stride() == self.strides or 0 in self.shape:
            return found
        return torch.empty_strided(
            self.shape, self.strides, dtype=self.dtype, device=row.device
        ).copy_(found)


END = TensorLayout((1,), (1,), torch.uint8)
"""Of the value that says that an operator has ended."""


Values = list[Tensor | None]
Operation = Callable[[Sequence[Tensor]], Values]


class Operations:
    """The computations of a placed graph's operators.

    ``step``: the captured step whose nodes they are; copies of replicas are called ``NAME@r``.
    """

    def __init__(self, placed: PlacedGraph, step: CapturedStep) -> None:
        self._placed, self._replicas = placed, replicas_of(placed.plan)
        self._captured = {node.name: node for node in operators(step.module.graph)}
        values = (node.meta["val"] for node in step.module.graph.nodes if "val" in node.meta)
        self._mode = next(one.fake_mode for one in values if isinstance(one, FakeTensor))
        self._fakes: dict[int, Values] = {}

    def captured(self, name: str) -> fx.Node:
        """The captured node of an operator, of its parts and of its copies."""
        return self._captured[name.partition("/")[0].partition("@")[0]]

    def operation(self, n: int) -> Operation:
        """The function of operator ``n`` from its inputs to its outputs."""
        node = self._placed.nodes[n]
        whole, _, part = node.name.partition("/")
        if whole not in self._placed.divided or not part:
            if node.operator in ("mean", "all_reduce"):
                return partial(_mean, copies=len(node.outputs))
            if node.operator in ("accumulate", "scale"):
                return partial(_added, over=self._replicas if node.operator == "scale" else 1)
            return partial(run_part, self.captured(node.name))
        split, parts = self._placed.divided[whole]
        if node.operator == "cut":
            axis = split.inputs[int(part.removeprefix("cut"))]
            return lambda inputs: list(cut(inputs[0], axis, parts))
        if node.operator in ("add", "concatenate"):
            number = int(part.removeprefix("join"))
            one = self.captured(node.name)
            return lambda inputs: [joined(one, number, inputs, split.outputs[number])]
        return partial(run_part, self.captured(node.name))

    def draws(self, n: int) -> bool:
        """Whether an operator draws random numbers."""
        node = self._placed.nodes[n]
        if not node.operator.startswith("aten."):
            return False
        target: Any = self.captured(node.name).target
        return torch.Tag.nondeterministic_seeded in target.tags

    def layout(self, value: Value) -> TensorLayout:
        """The layout of a value that is sent."""
        n, output = value
        if value == self._placed.end(n):
            return END
        found = self._fake(n)[output]
        assert found is not None
        # A piece would have the strides of the whole: a copy needs no room for the other pieces.
        return TensorLayout.of(
            found.contiguous() if self._placed.nodes[n].operator == "cut" else found
        )

    def _fake(self, n: int) -> Values:
        """The outputs of an operator without values."""
        if n not in self._fakes:
            name = self._placed.nodes[n].name
            if "/" not in name and name.partition("@")[0] in self._captured:
                self._fakes[n] = captured_outputs(self.captured(name))
            else:
                given = [self._fake(maker)[output] for maker, output in self._placed.inputs[n]]
                with self._mode:
                    self._fakes[n] = self.operation(n)(given)  # type: ignore[arg-type]
        return self._fakes[n]


def _added(inputs: Sequence[Tensor], over: int) -> Values:
    """The sum of gradients, over a number of replicas."""
    total = reduce(torch.add, inputs)
    return [total / over if over > 1 else total]


def _mean(inputs: Sequence[Tensor], copies: int) -> Values:
    """The mean of the replicas' gradients, added up in their order."""
    return [reduce(torch.add, inputs) / len(inputs)] * copies
