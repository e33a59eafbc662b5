"""Proof that a program of operators computes one step of its graph, before any process starts.

The verifier knows the graph, the plan's devices and no planner. It proves that every operator runs
exactly once, on its rank; that what it reads is there, made or received, and not freed; that it
comes after what reads the memory that it changes; that views are on the rank of their memory; that
every value is sent once to every rank that needs it, in the same order on both sides; that all
ranks end; and that everything but the states is freed.
"""

from collections.abc import Iterator

from stagewright.executor.programs.memory import RowProgress
from stagewright.executor.programs.operators.placed import PlacedGraph, Value
from stagewright.executor.programs.program import Instruction, InvalidProgram, Program
from stagewright.executor.programs.verification.transfers import require_transfers
from stagewright.formulations.plans.actions import OF_OPERATORS, Action, ActionKind

RUN, FREE = ActionKind.RUN, ActionKind.FREE
SEND, RECEIVE = ActionKind.SEND_OUTPUT, ActionKind.RECEIVE_OUTPUT


def verify_operators(placed: PlacedGraph, program: Program) -> None:
    """Prove that ``program`` carries out a step of ``placed``.

    Raises InvalidProgram with the first violation found.
    """
    if program.devices != placed.devices or len(program.rows) != len(placed.devices):
        raise InvalidProgram(f"the plan's devices are {', '.join(placed.devices)}")
    _require_memory_shared(placed)
    for rank, row in enumerate(program.rows):
        holding = _Holding(placed, rank)
        for one in row:
            holding.follow(one)
        holding.require_end()
    wanted = (
        (placed.rank[n], target, Action(n, SEND, output))
        for (n, output), targets in placed.targets.items()
        for target in targets
    )
    require_transfers(program, wanted)
    OperatorProgress(placed, program).to_the_end()


def _require_memory_shared(placed: PlacedGraph) -> None:
    """Require operators that share memory with a node, or change its state, on its rank."""
    for n, node in enumerate(placed.nodes):
        shares = any(output.shared for output in node.outputs)
        bases = ([node.beside] if node.beside else []) + ([node.inputs[0][0]] if shares else [])
        for base in bases:
            if placed.rank[placed.number[base]] != placed.rank[n]:
                raise InvalidProgram(f"{node.name!r} is not on the device of {base!r}")


class _Holding:
    """The values that a rank holds while the verifier follows its row."""

    def __init__(self, placed: PlacedGraph, rank: int) -> None:
        self.placed, self.rank = placed, rank
        self.here: set[Value] = set()
        self.freed: set[Value] = set()
        self.ran: set[int] = set()

    def follow(self, one: Instruction) -> None:
        """Carry out an instruction; raises InvalidProgram if it cannot be."""
        n, kind, output = one.action.stage, one.action.kind, one.action.microbatch
        if kind not in OF_OPERATORS or not 0 <= n < len(self.placed.nodes):
            raise self._wrong(one, "is no action of an operator of the plan")
        if kind is RUN:
            self._run(one, n)
            return
        assert output is not None
        value = n, output
        if kind is RECEIVE:
            self._receive(one, value)
            return
        self._require_here(one, value)
        if kind is SEND and self.placed.rank[n] != self.rank:
            raise self._wrong(one, "sends what another rank makes")
        if kind is FREE:
            if self.placed.stays(value) and self.placed.rank[n] == self.rank:
                raise self._wrong(one, "frees a state")
            self.here.remove(value)
            self.freed.add(value)

    def _run(self, one: Instruction, n: int) -> None:
        if self.placed.rank[n] != self.rank:
            raise self._wrong(one, f"belongs to {self.placed.devices[self.placed.rank[n]]}")
        if n in self.ran:
            raise self._wrong(one, "appears twice")
        for value in self.placed.awaited(n):
            self._require_here(one, value)
        for other in self.placed.after[n]:
            if self.placed.rank[other] == self.rank and other not in self.ran:
                raise self._wrong(one, f"must come after {self._named(other)}")
        self.ran.add(n)
        self.here.update(self.placed.made(n))

    def _receive(self, one: Instruction, value: Value) -> None:
        if value in self.here or value in self.freed:
            raise self._wrong(one, "receives again what has been here")
        if self.placed.rank[value[0]] != one.peer:
            raise self._wrong(one, f"receives from rank {one.peer} what another rank makes")
        self.here.add(value)

    def _require_here(self, one: Instruction, value: Value) -> None:
        if value not in self.here:
            fault = "has been freed" if value in self.freed else "is not here"
            raise self._wrong(one, f"output {value[1]} of {self._named(value[0])} {fault}")

    def require_end(self) -> None:
        """All operators of the rank have run, and only states are left."""
        for n, rank in enumerate(self.placed.rank):
            if rank == self.rank and n not in self.ran:
                raise InvalidProgram(f"rank {self.rank}: {self._named(n)} does not run")
        for value in sorted(self.here):
            if not (self.placed.stays(value) and self.placed.rank[value[0]] == self.rank):
                name = self._named(value[0])
                raise InvalidProgram(f"rank {self.rank}: output {value[1]} of {name} is not freed")

    def _named(self, n: int) -> str:
        return f"{n} ({self.placed.nodes[n].name})"

    def _wrong(self, one: Instruction, fault: str) -> InvalidProgram:
        n = one.action.stage
        name = f" ({self.placed.nodes[n].name})" if 0 <= n < len(self.placed.nodes) else ""
        return InvalidProgram(f"rank {self.rank}: {one}{name}: {fault}")


class OperatorProgress(RowProgress):
    """Progress of a program of operators: the conditions that instructions wait for."""

    def __init__(self, placed: PlacedGraph, program: Program) -> None:
        super().__init__(program)
        self.placed = placed

    def _awaited(self, rank: int, action: Action) -> Iterator[tuple[int, str]]:
        """The transfers that an operator or a free waits for: its receives, or a value's sends."""
        if action.kind is RUN:
            for value in self.placed.awaited(action.stage):
                if self.placed.rank[value[0]] != rank:
                    yield from self._transfer(rank, value, rank)
        elif action.kind is FREE:
            assert action.microbatch is not None
            value = action.stage, action.microbatch
            if self.placed.rank[action.stage] == rank:
                for target in self.placed.targets.get(value, ()):
                    yield from self._transfer(rank, value, target)
            else:
                yield from self._transfer(rank, value, rank)

    def _transfer(self, rank: int, value: Value, target: int) -> Iterator[tuple[int, str]]:
        """The missing side of a transfer, seen from one of its ranks."""
        source = self.placed.rank[value[0]]
        send = Instruction(Action(value[0], SEND, value[1]), target)
        receive = Instruction(Action(value[0], RECEIVE, value[1]), source)
        if rank == source:
            yield from self._unfinished(rank, send, receive)
        else:
            yield from self._unfinished(rank, receive, send)
