"""The interpreter of a rank's row of operators, made into calls once.

How a tensor is sent, so that its copy has the same strides.

Kernels add up in another order if strides differ: with them, a copy gives the same results to the
bit. An expanded dimension is sent once, and elements that a view leaves out are not sent.
"""

from collections.abc import Callable, Mapping, Sequence
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
from stagewright.executor.programs.program import Instruction, Row
from stagewright.executor.programs.trace import RankAction
from stagewright.executor.programs.verification.transfers import by_peer
from stagewright.executor.training.interpreter.exchange import Messages
from stagewright.executor.training.interpreter.recorder import Recorder, carry_out
from stagewright.executor.training.ranks.rank import RankPlace
from stagewright.executor.training.stages.weights import operator_seed
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.models.operators.step_graph import Weights, data_parallel


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


RUN, FREE = ActionKind.RUN, ActionKind.FREE
SEND, RECEIVE = ActionKind.SEND_OUTPUT, ActionKind.RECEIVE_OUTPUT


class OperatorInterpreter:
    """One rank's row.

    ``states``: the values of this rank's states by the numbers of their operators; they are
    changed. ``kept``: values of single numbers that this rank makes and a step returns.
    """

    def __init__(
        self,
        place: RankPlace,
        placed: PlacedGraph,
        row: Row,
        operations: Operations,
        states: Mapping[int, Tensor],
        kept: Sequence[Value],
        seed: int,
    ) -> None:
        self._place, self._placed, self._states, self._seed = place, placed, states, seed
        self._operations = operations
        self._kept = kept
        self._keepers = {n for n, _ in kept}
        self._layouts = self._sent_layouts(row)
        self._values: dict[Value, Tensor | None] = {}
        self._messages = Messages(place)
        self._recorder = Recorder(place, self._messages, len(row) + 1, self._needed)
        self._inputs: Mapping[int, Tensor] = {}
        self._results: dict[Value, Tensor] = {}
        self._step = 0
        tags = {one: i for side in by_peer(row).values() for i, one in enumerate(side)}
        self._calls = [(one, self._call(one, tags.get(one, 0))) for one in row]

    def _sent_layouts(self, row: Row) -> dict[Value, TensorLayout]:
        """The layouts of the values that this rank sends and receives."""
        values = {
            (one.action.stage, one.action.microbatch or 0) for one in row if one.peer is not None
        }
        return {value: self._operations.layout(value) for value in values}

    def run(
        self, inputs: Mapping[int, Tensor], step: int, records: list[RankAction] | None = None
    ) -> list[float]:
        """One step on the mini-batch's tensors by operator: the numbers that are kept.

        The times of instructions are added to ``records``, in seconds of this process's clock.
        Raises OutOfMemory naming operator and device.
        """
        self._inputs, self._step, self._results = inputs, step, {}
        record = None if records is None else partial(self._recorder.record, records)
        with torch.no_grad():
            carry_out(self._calls, record, self._named, step)
        self._values.clear()  # only states are left
        return [self._results[value].item() for value in self._kept]

    def _named(self, one: Instruction) -> str:
        return f"{self._place.name}: operator {self._placed.nodes[one.action.stage].name!r}"

    def _needed(self, action: Action) -> list[Action]:
        """The receipts that an operator waits for."""
        awaited = self._placed.awaited(action.stage) if action.kind is RUN else ()
        return [Action(n, RECEIVE, output) for n, output in awaited]

    # Instructions as calls

    def _call(self, one: Instruction, tag: int) -> Callable[[], None]:
        """The function that carries out an instruction, with all that is known beforehand."""
        n, kind, output = one.action.stage, one.action.kind, one.action.microbatch
        if kind is RUN:
            return self._operator(n)
        assert output is not None
        value = n, output
        if kind is FREE:
            return partial(self._free, value)
        assert one.peer is not None
        transfer = self._send if kind is SEND else self._receive
        return partial(transfer, value, self._layouts[value], one.peer, tag)

    def _operator(self, n: int) -> Callable[[], None]:
        node, (*made,) = self._placed.nodes[n], self._placed.made(n)
        if node.role == "state":
            return lambda: self._made(n, made, [self._states[n]])
        if node.role == "input":
            return lambda: self._made(n, made, [self._inputs[n]])
        operation, read = self._operations.operation(n), self._placed.inputs[n]
        awaited = [value for value in self._placed.awaited(n) if value in self._layouts]
        draws, generator = self._operations.draws(n), _generator(self._place.device)

        def compute() -> None:
            for value in awaited:
                self._arrive(value)
            if draws:
                generator.manual_seed(operator_seed(self._seed, self._step, node.name))
            inputs = [self._values[value] for value in read]
            self._made(n, made, operation(inputs))  # type: ignore[arg-type]

        return compute

    def _made(self, n: int, made: Sequence[Value], values: Sequence[Tensor | None]) -> None:
        self._values.update(zip(made, values, strict=False))
        if len(made) > len(self._placed.nodes[n].outputs):
            self._values[self._placed.end(n)] = END.room(self._place.device)
        if n in self._keepers:
            self._results.update(
                ((n, output), one) for output, one in enumerate(values) if one is not None
            )

    def _send(self, value: Value, layout: TensorLayout, peer: int, tag: int) -> None:
        one = self._values[value]
        assert one is not None
        packed = layout.packed(one).to(self._place.wire)
        self._messages.post(Action(value[0], SEND, value[1]), packed, peer, tag)

    def _receive(self, value: Value, layout: TensorLayout, peer: int, tag: int) -> None:
        action = Action(value[0], RECEIVE, value[1])
        room = layout.room(self._place.wire)
        self._messages.expect(action, room, [room], peer, tag)

    def _arrive(self, value: Value) -> None:
        """Wait for a value, if it is not here already."""
        for arrival in self._messages.taken(Action(value[0], RECEIVE, value[1])):
            (room,) = arrival.values
            assert room is not None
            self._values[value] = self._layouts[value].unpacked(room.to(self._place.device))

    def _free(self, value: Value) -> None:
        """Forget a value; its memory is in use until its sends have ended."""
        self._messages.release(Action(value[0], SEND, value[1]))
        del self._values[value]


def _generator(device: torch.device) -> torch.Generator:
    """The random generator of a device; ``torch.manual_seed`` would seed every device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator
