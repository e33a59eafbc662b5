"""Lowering of a plan of operators: a program per rank, in the order of the plan.

1. All operators and transfers in one order: by their starts, each after what it needs. All rows are
   cut from it, so both ranks of a pair have their transfers in the same order, and no rank waits
   for something that comes after its own instruction.
2. A transfer that starts while an operator runs is posted before that operator, unless this would
   change the order of a pair.
3. A value is freed after its last reader, and after its transfers have ended by the plan.
"""

from collections.abc import Iterator

from stagewright.executor.programs.operators.placed import PlacedGraph, Value
from stagewright.executor.programs.program import Instruction, Program, Rows
from stagewright.executor.programs.transfers import earliest_first
from stagewright.formulations.operators.plan import PlacedOperator, Transfer
from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.graphs.documents.errors import InvalidPlan

RUN, FREE = ActionKind.RUN, ActionKind.FREE
SEND, RECEIVE = ActionKind.SEND_OUTPUT, ActionKind.RECEIVE_OUTPUT

_Sending = tuple[Value, int]
"""A value and the rank that it is sent to."""


def lower_operators(placed: PlacedGraph) -> Program:
    """The program of one training step.

    Raises InvalidPlan if the plan lacks a transfer, or has one that nothing reads.
    """
    sendings = _sendings(placed)
    rows: Rows = [[] for _ in placed.devices]
    for item in _ordered(placed, sendings):
        if isinstance(item, int):
            rows[placed.rank[item]].append(Instruction(Action(item, RUN)))
            continue
        (n, output), target = item
        start = sendings[item].start_seconds
        source = placed.rank[n]
        _post(placed, rows[source], Instruction(Action(n, SEND, output), target), start)
        _post(placed, rows[target], Instruction(Action(n, RECEIVE, output), source), start)
    rows = [_with_frees(placed, sendings, rank, row) for rank, row in enumerate(rows)]
    return Program(placed.devices, tuple(map(tuple, rows)))


def _sendings(placed: PlacedGraph) -> dict[_Sending, Transfer]:
    """The plan's transfers."""
    ranks = {name: rank for rank, name in enumerate(placed.devices)}
    found: dict[_Sending, Transfer] = {}
    for one in placed.plan.transfers:
        value = placed.number.get(one.operator, -1), one.output
        if ranks.get(one.device, -1) not in placed.targets.get(value, ()):
            raise InvalidPlan(
                f"output {one.output} of {one.operator!r} is sent to {one.device!r}, where nothing "
                "reads it"
            )
        found[value, ranks[one.device]] = one
    for (n, output), targets in placed.targets.items():
        for target in targets:
            if ((n, output), target) not in found:
                raise InvalidPlan(
                    f"output {output} of {placed.nodes[n].name!r} is not sent to "
                    f"{placed.devices[target]!r}"
                )
    return found


def _ordered(placed: PlacedGraph, sendings: dict[_Sending, Transfer]) -> list[int | _Sending]:
    """Operators and transfers by start, each after the operators and transfers it needs."""
    items: list[int | _Sending] = [*range(len(placed.nodes)), *sendings]
    number = {item: i for i, item in enumerate(items)}
    timed: list[PlacedOperator | Transfer] = [*placed.plan.operators, *sendings.values()]
    keys = [(one.start_seconds, one.finish_seconds) for one in timed]
    edges = [(number[one], i) for i, item in enumerate(items) for one in _needs(placed, item)]
    return [items[i] for i in earliest_first(keys, edges, lambda i: str(items[i]))]


def _needs(placed: PlacedGraph, item: int | _Sending) -> Iterator[int | _Sending]:
    if not isinstance(item, int):
        yield item[0][0]
        return
    rank = placed.rank[item]
    for value in placed.awaited(item):
        maker = value[0]
        yield maker if placed.rank[maker] == rank else (value, rank)
    yield from (other for other in placed.after[item] if placed.rank[other] == rank)


def _post(placed: PlacedGraph, row: list[Instruction], one: Instruction, start: float) -> None:
    """Add a transfer to a row, before the operator that runs when it starts."""
    for at in range(len(row) - 1, -1, -1):
        other = row[at]
        n = other.action.stage
        if other.peer == one.peer or (other.action.kind is RUN and n == one.action.stage):
            break
        if other.action.kind is RUN:
            timed = placed.plan.operators[n]
            if timed.start_seconds < start < timed.finish_seconds:
                row.insert(at, one)
                return
            if timed.start_seconds < timed.finish_seconds:
                break
    row.append(one)


def _with_frees(
    placed: PlacedGraph, sendings: dict[_Sending, Transfer], rank: int, row: list[Instruction]
) -> list[Instruction]:
    """The row with every value freed once it is not needed any more."""
    last: dict[Value, int] = {}  # the position after which a value is freed
    for at, one in enumerate(row):
        n, kind, output = one.action.stage, one.action.kind, one.action.microbatch
        if kind is RUN:
            for value in (*placed.made(n), *placed.awaited(n)):
                last[value] = max(at, last.get(value, 0))
        elif kind is SEND:
            assert output is not None
            assert one.peer is not None
            finish = sendings[(n, output), one.peer].finish_seconds
            last[n, output] = max(last[n, output], _last_before(placed, row, at, finish))
    freed: dict[int, list[Instruction]] = {}
    for (n, output), at in last.items():
        if not (placed.stays((n, output)) and placed.rank[n] == rank):
            freed.setdefault(at, []).append(Instruction(Action(n, FREE, output)))
    return [each for at, one in enumerate(row) for each in (one, *freed.get(at, ()))]


def _last_before(placed: PlacedGraph, row: list[Instruction], at: int, seconds: float) -> int:
    """The last position from ``at`` on before an operator that starts at ``seconds`` or later."""
    for later in range(at + 1, len(row)):
        action = row[later].action
        starts = placed.plan.operators[action.stage].start_seconds
        if action.kind is RUN and starts >= seconds:
            return later - 1
    return len(row) - 1
