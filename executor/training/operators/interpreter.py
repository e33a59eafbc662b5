"""The interpreter of a rank's row of operators, made into calls once."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from stagewright.executor.programs.operators.placed import PlacedGraph, Value
from stagewright.executor.programs.program import Instruction, Row
from stagewright.executor.programs.trace import RankAction
from stagewright.executor.programs.verification.transfers import by_peer
from stagewright.executor.training.interpreter.exchange import Messages
from stagewright.executor.training.interpreter.recorder import Recorder, carry_out
from stagewright.executor.training.operators.operations import END, Operations, TensorLayout
from stagewright.executor.training.ranks.rank import RankPlace
from stagewright.executor.training.stages.seeding import operator_seed
from stagewright.formulations.plans.actions import Action, ActionKind

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
        self._messages.expect(action, [layout.room(self._place.wire)], peer, tag)

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
