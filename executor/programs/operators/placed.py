"""The operators of a plan by rank, their inputs, and the values to be sent.

In traces an operator is called by its number in the plan: ``12RUN`` is the plan's operator 12,
``12SEND_O0`` the transfer of its output 0.

Lowering of a plan of operators: a program per rank, in the order of the plan.

1. All operators and transfers in one order: by their starts, each after what it needs. All rows are
   cut from it, so both ranks of a pair have their transfers in the same order, and no rank waits
   for something that comes after its own instruction.
2. A transfer that starts while an operator runs is posted before that operator, unless this would
   change the order of a pair.
3. A value is freed after its last reader, and after its transfers have ended by the plan.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from stagewright.executor.programs.program import Instruction, Program, Rows
from stagewright.executor.programs.trace import RankAction, TracedStep
from stagewright.executor.programs.transfers import earliest_first
from stagewright.formulations.operators.check import divided_graph
from stagewright.formulations.operators.plan import (
    OperatorPlan,
    PlacedOperator,
    SplitChoice,
    Transfer,
)
from stagewright.formulations.plans.actions import Action, ActionKind, parse_action
from stagewright.formulations.plans.plan import ScheduledAction
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.models.operators.step_graph import Node, Split, StepGraph

Value = tuple[int, int]
"""Number of an operator and of its output; the one after its last output says that it has ended."""


@dataclass(frozen=True)
class PlacedGraph:
    """The operators of a plan by their number there, and the values that they read.

    Rank r is ``devices[r]``: the devices in the order in which the plan starts to use them.
    ``divided`` are the split and the number of parts of every operator that the plan divides.
    """

    plan: OperatorPlan
    devices: tuple[str, ...]
    nodes: tuple[Node, ...]
    rank: tuple[int, ...]
    divided: dict[str, tuple[Split, int]]

    @cached_property
    def number(self) -> dict[str, int]:
        """The operators' numbers by name."""
        return {node.name: n for n, node in enumerate(self.nodes)}

    @cached_property
    def inputs(self) -> tuple[tuple[Value, ...], ...]:
        """For each operator, the tensors that it reads, in the order of its arguments."""
        return tuple(
            tuple((self.number[name], output) for name, output in node.inputs)
            for node in self.nodes
        )

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, the operators that must have ended before it starts."""
        return tuple(tuple(self.number[name] for name in node.after) for node in self.nodes)

    def end(self, n: int) -> Value:
        """The value that says that an operator has ended."""
        return n, len(self.nodes[n].outputs)

    def awaited(self, n: int) -> Iterator[Value]:
        """The values that must be on the rank of operator ``n`` before it starts.

        The ends of operators on the same rank are not among them: they are in its row.
        """
        yield from self.inputs[n]
        for other in self.after[n]:
            if self.rank[other] != self.rank[n]:
                yield self.end(other)

    @cached_property
    def targets(self) -> dict[Value, tuple[int, ...]]:
        """The ranks to which each value is sent: once to every other rank that reads it."""
        found: dict[Value, set[int]] = {}
        for n in range(len(self.nodes)):
            for value in self.awaited(n):
                if self.rank[value[0]] != self.rank[n]:
                    found.setdefault(value, set()).add(self.rank[n])
        return {value: tuple(sorted(ranks)) for value, ranks in found.items()}

    def made(self, n: int) -> list[Value]:
        """The values of operator ``n``; its end only if it is sent."""
        every = [(n, output) for output in range(len(self.nodes[n].outputs))]
        return every + [self.end(n)] * (self.end(n) in self.targets)

    def stays(self, value: Value) -> bool:
        """Whether a value is a state, which its rank keeps from step to step."""
        return self.nodes[value[0]].role == "state" and value != self.end(value[0])


def devices_of(plan: OperatorPlan) -> tuple[str, ...]:
    """The devices that run operators, in the order in which the plan starts to use them."""
    return tuple(dict.fromkeys(one.device for one in plan.operators))


def place_graph(plan: OperatorPlan, graph: StepGraph) -> PlacedGraph:
    """The operators of ``graph``, divided and placed by ``plan``.

    Raises InvalidPlan if the plan does not place every operator of the graph after its splits
    exactly once.
    """
    split = divided_graph(graph, plan)
    names = [one.operator for one in plan.operators]
    for name in names:
        if name not in split.index:
            raise InvalidPlan(f"the plan places {name!r}, which is not in graph {graph.name!r}")
    missing = split.index.keys() - set(names)
    if missing or len(names) != len(split):
        reason = f"does not place {min(missing)!r}" if missing else "places an operator twice"
        raise InvalidPlan(f"the plan {reason}; it is of another graph than {graph.name!r}")
    devices = devices_of(plan)
    ranks = {name: rank for rank, name in enumerate(devices)}
    return PlacedGraph(
        plan,
        devices,
        tuple(split.nodes[split.index[name]] for name in names),
        tuple(ranks[one.device] for one in plan.operators),
        {one.operator: (_split(graph, one), one.parts) for one in plan.splits},
    )


def _split(graph: StepGraph, choice: SplitChoice) -> Split:
    splits = graph.nodes[graph.index[choice.operator]].splits
    return next(one for one in splits if one.dimension == choice.dimension)


def traced_operators(
    placed: PlacedGraph, step: int, records: Iterable[RankAction], loss: float | None = None
) -> TracedStep:
    """One step from the records of all ranks, in any order.

    A transfer lasts from its sending to its receipt.
    """
    devices = placed.devices
    actions, sent, received = [], {}, {}
    updates = [0.0] * len(devices)
    for one in records:
        action = parse_action(one.action)
        if action.kind is RUN:
            times = one.start_seconds, one.finish_seconds
            actions.append(ScheduledAction(devices[one.rank], one.action, *times))
            if placed.nodes[action.stage].role == "update":
                updates[one.rank] += one.finish_seconds - one.start_seconds
        elif action.kind is SEND:
            assert one.peer is not None
            sent[action.stage, action.microbatch, one.rank, one.peer] = one
        else:
            assert one.peer is not None
            received[action.stage, action.microbatch, one.peer, one.rank] = one
    for place, one in sent.items():
        source, target = devices[place[2]], devices[place[3]]
        # The ranks' clocks agree to microseconds only; nothing is received before it is sent.
        finish = max(one.start_seconds, received[place].finish_seconds)
        actions.append(
            ScheduledAction(
                source, one.action, one.start_seconds, finish, (source,), (target,), one.bytes
            )
        )
    actions.sort(key=lambda one: (one.start_seconds, one.finish_seconds, one.device, one.action))
    known = loss if loss is not None and math.isfinite(loss) else None
    end = max(one.finish_seconds for one in actions)
    return TracedStep(step, end, max(updates), tuple(actions), known)


def scheduled_operators(plan: OperatorPlan) -> tuple[ScheduledAction, ...]:
    """The plan's operators and transfers as actions, by ascending start."""
    number = {one.operator: n for n, one in enumerate(plan.operators)}
    device = {one.operator: one.device for one in plan.operators}
    actions = [
        ScheduledAction(one.device, str(Action(n, RUN)), one.start_seconds, one.finish_seconds)
        for n, one in enumerate(plan.operators)
    ]
    actions += [
        ScheduledAction(
            device[one.operator],
            str(Action(number[one.operator], SEND, one.output)),
            one.start_seconds,
            one.finish_seconds,
            (device[one.operator],),
            (one.device,),
        )
        for one in plan.transfers
    ]
    return tuple(sorted(actions, key=lambda one: (one.start_seconds, one.finish_seconds)))


def with_times(plan: OperatorPlan, step: TracedStep) -> OperatorPlan:
    """``plan`` with the times of a traced step, to be drawn next to it; without its certificate.

    Operators keep their places in the plan, as their numbers are; inputs and states take no time.
    """
    operators: dict[int, PlacedOperator] = {}
    transfers: list[Transfer] = []
    for one in step.actions:
        action, times = parse_action(one.action), (one.start_seconds, one.finish_seconds)
        if action.kind not in (RUN, SEND) or action.stage >= len(plan.operators):
            raise InputError(f"step {step.step}: {one.action} is no action of the plan's operators")
        name = plan.operators[action.stage].operator
        if action.kind is RUN and plan.operators[action.stage].role in ("input", "state"):
            continue
        if action.kind is RUN:
            operators[action.stage] = replace(
                plan.operators[action.stage], start_seconds=times[0], finish_seconds=times[1]
            )
        else:
            assert action.microbatch is not None
            assert one.targets is not None
            transfers.append(Transfer(name, action.microbatch, one.targets[0], *times))
    placed = tuple(operators.get(n, one) for n, one in enumerate(plan.operators))
    return replace(plan, operators=placed, transfers=tuple(transfers), certificate=None)


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
