"""Passes of lowering: sends and receives, in one order for all ranks."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from stagewright.executor.programs.program import (
    RECEIVES,
    SENDS,
    Instruction,
    Rows,
    handed,
    plan_devices,
    received,
)
from stagewright.formulations.plans.actions import Action, ActionKind, parse_action
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.models.operators.opgraph import waiting_cycle

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I = ActionKind.INPUT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD


RECEIVE_BUFFERS = 1
"""Receives that may be in flight on a boundary in addition to the one that is needed next.

The cost model's memory has room for one activation and one gradient on each side of a stage.
"""
Node = tuple[tuple[float, bool], list[tuple[int, Instruction]]]  # when, and what on which ranks


def with_transfers(plan: PipelinePlan, rows: Rows) -> Rows:
    """Add sends and receives, in an order of all ranks' actions that obeys every dependency.

    Actions that may come next are ordered by the plan's times; at equal times transfers come first,
    so that no computation delays a send. Raises InvalidPlan if there is no such order; with a cycle
    of actions that wait for each other.
    """
    start = starts(plan)
    nodes: list[Node] = []
    place: dict[tuple[int, Action], int] = {}
    for rank, row in enumerate(rows):
        for instruction in row:
            place[rank, instruction.action] = len(nodes)
            nodes.append(((start[instruction.action], True), [(rank, instruction)]))
    edges = [
        (place[rank, before.action], place[rank, after.action])
        for rank, row in enumerate(rows)
        for before, after in pairwise(row)
    ]
    arriving: defaultdict[tuple[int, ActionKind, int], list[tuple[int, int]]] = defaultdict(list)
    for sender, receiver, action in _transfers(plan):
        there = received(action)
        made, needed = _touching(place, sender, action), _touching(place, receiver, there)
        if made is None or needed is None:
            continue  # a computation is missing: `verify` has the better message
        if sender == receiver:
            edges.append((made, needed))
            continue
        pair = [(sender, Instruction(action, receiver)), (receiver, Instruction(there, sender))]
        edges += [(made, len(nodes)), (len(nodes), needed)]
        arriving[receiver, there.kind, there.stage].append((needed, len(nodes)))
        nodes.append(((start[action], False), pair))
    edges += _buffer_edges(arriving.values())
    out: Rows = [[] for _ in rows]
    for node in earliest_first([key for key, _ in nodes], edges, partial(_named, nodes)):
        for rank, instruction in nodes[node][1]:
            out[rank].append(instruction)
    return out


def _named(nodes: list[Node], i: int) -> str:
    rank, instruction = nodes[i][1][0]
    return f"{instruction} on rank {rank}"


def starts(plan: PipelinePlan) -> dict[Action, float]:
    """When each action starts; a transfer that is not in the plan follows at once."""
    start: dict[Action, float] = defaultdict(float)
    for entry in plan.actions:
        action = parse_action(entry.action)
        start[action] = max(start[action], entry.start_seconds)
    return start


def _transfers(plan: PipelinePlan) -> Iterator[tuple[int, int, Action]]:
    """Sender, receiver and SEND of every pair, also of a device with itself."""
    rank = {name: r for r, name in enumerate(plan_devices(plan))}
    last = len(plan.stages) - 1
    for s in range(last + 1):
        for m in range(plan.microbatches):
            for kind, there in ((SEND_F, s + 1), (SEND_B, s - 1)):
                if not 0 <= there <= last:
                    continue
                action = Action(s, kind, m)
                for sender, receiver in handed(plan, action):
                    yield rank[sender], rank[receiver], action


def _touching(place: dict[tuple[int, Action], int], rank: int, transfer: Action) -> int | None:
    """The computation on ``rank`` that makes the sent values, or needs the received values."""
    own = (Action(transfer.stage, kind, transfer.microbatch) for kind in _touched_by(transfer))
    found = (place.get((rank, action)) for action in own)
    return next((node for node in found if node is not None), None)


def _touched_by(transfer: Action) -> tuple[ActionKind, ...]:
    """The kinds of computations that make or need the values of a transfer."""
    forth = transfer.kind in (SEND_F, ActionKind.RECEIVE_FORWARD)
    return (F,) if forth else (B, I)


def _buffer_edges(arriving: Iterable[list[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """A transfer waits until the values received RECEIVE_BUFFERS + 1 earlier have been taken.

    Nodes of computations are numbered in their rank's order, so that sorting by them gives the
    order in which the arrivals are needed: a transfer never waits for a later one.
    """
    for pairs in arriving:
        by_need: defaultdict[int, list[int]] = defaultdict(list)
        for needed, node in sorted(pairs):
            by_need[needed].append(node)
        order = list(by_need)
        for k in range(RECEIVE_BUFFERS + 1, len(order)):
            for node in by_need[order[k]]:
                yield order[k - RECEIVE_BUFFERS - 1], node


def earliest_first(
    keys: Sequence[tuple[float, float]],
    edges: Iterable[tuple[int, int]],
    named: Callable[[int], str],
) -> list[int]:
    """Nodes in an order that obeys ``edges``; among those that are free, by ``keys``.

    Raises InvalidPlan if there is none; with a cycle of nodes as ``named``.
    """
    followers: list[list[int]] = [[] for _ in keys]
    awaited = [0] * len(keys)
    for before, after in edges:
        followers[before].append(after)
        awaited[after] += 1
    free = [(keys[i], i) for i, count in enumerate(awaited) if count == 0]
    heapq.heapify(free)
    order = []
    while free:
        _, i = heapq.heappop(free)
        order.append(i)
        for j in followers[i]:
            awaited[j] -= 1
            if awaited[j] == 0:
                heapq.heappush(free, (keys[j], j))
    if len(order) < len(keys):
        cycle = " waits for ".join(map(named, waiting_cycle(followers, awaited)))
        raise InvalidPlan(f"the plan's order is a deadlock: {cycle}")
    return order


def with_early_sends(plan: PipelinePlan, rows: Rows) -> Rows:
    """Post each send right after its values are made, or after the pair's transfer before it.

    In the plan it may have had to wait for a channel; here the backend queues it.
    """
    out: Rows = []
    for row in rows:
        moved: list[Instruction] = []
        for instruction in row:
            position = len(moved)
            if instruction.action.kind in SENDS:
                while position > 0 and not _holds_back(moved[position - 1], instruction):
                    position -= 1
            moved.insert(position, instruction)
        out.append(moved)
    return out


def _holds_back(before: Instruction, send: Instruction) -> bool:
    ours = (before.action.stage, before.action.microbatch)
    makes = before.action.kind in _touched_by(send.action) and ours == (
        send.action.stage,
        send.action.microbatch,
    )
    return makes or before.peer == send.peer


def with_early_receives(plan: PipelinePlan, rows: Rows, following: Rows | None = None) -> Rows:
    """Post each receive before the computations that its transfer may overlap.

    It moves up to the transfer before it of the same pair of ranks, and passes at most
    RECEIVE_BUFFERS computations that take values from the same boundary. Those in the rows that
    are ``following`` count, too.
    """
    out: Rows = []
    for row, rest in zip(rows, following or [[]] * len(rows), strict=True):
        moved: list[Instruction] = []
        for i, instruction in enumerate(row):
            position = len(moved)
            if instruction.action.kind in RECEIVES:
                position = _earliest_position(moved, [*row[i:], *rest])
            moved.insert(position, instruction)
        out.append(moved)
    return out


def _earliest_position(before: list[Instruction], rest: list[Instruction]) -> int:
    """How far up, into ``before``, the receive that leads ``rest`` may move."""
    receive = rest[0].action
    takers = _touched_by(receive)
    ahead = 0
    for one in rest:
        if one.action.stage == receive.stage and one.action.kind in takers:
            if one.action.microbatch == receive.microbatch:
                break
            ahead += 1
    for position in range(len(before), 0, -1):
        one = before[position - 1]
        if one.peer == rest[0].peer:
            return position
        ahead += one.action.stage == receive.stage and one.action.kind in takers
        if ahead > RECEIVE_BUFFERS:
            return position
    return 0
