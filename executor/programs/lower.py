"""Lowering: a plan becomes a program per rank, by small passes.

1. `computations`: every rank's computations in the plan's order.
2. `with_transfers`: sends behind what makes them, receives before what needs them. All ranks' rows
   are cut from one order of the whole iteration, so both ranks of a pair see their transfers in
   the same order, and no rank waits for what itself holds back.
3. `with_early_sends`, `with_early_receives`: what may be under way is posted before computations
   that it need not wait for.
4. `with_reductions`: the all-reduce of a stage behind its last backward, in the plan's order.
5. `with_updates`: the optimizer's steps, where the plan has them.
6. `with_versions`: which version of the weights a computation uses, and what is kept for it.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from stagewright.executor.programs.program import (
    RECEIVES,
    SENDS,
    Families,
    Instruction,
    Program,
    plan_devices,
    received,
    stages_on,
    transfers,
)
from stagewright.formulations.plans.actions import (
    COMPUTE,
    Action,
    ActionKind,
    along_way,
    parse_action,
)
from stagewright.formulations.plans.plan import PipelinePlan, ScheduledAction
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.models.precedence import find_cycle

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD

RECEIVE_BUFFERS = 1
"""Receives that may be under way on a boundary besides the one that is needed next.

The cost model's memory has room for one activation and one gradient on each side of a stage.
"""

Rows = list[list[Instruction]]
Node = tuple[tuple[float, bool], list[tuple[int, Instruction]]]  # when, and what on which ranks


def lower(plan: PipelinePlan, families: Families = ()) -> Program:
    """The program that carries out one iteration of ``plan``.

    Parameters
    ----------
    families
        Stages whose updates need something of each other's gradients.

    Raises
    ------
    InvalidPlan
        If the order in the plan contradicts its dependencies, or its weights cannot be kept as it
        asks. Everything else is `verify`'s to find.
    """
    rows = computations(plan)
    rows = with_transfers(plan, rows)
    rows = with_early_sends(plan, rows)
    rows = with_early_receives(plan, rows)
    rows = with_reductions(plan, rows)
    rows = with_updates(plan, rows, families)
    rows = with_versions(plan, rows)
    return Program(plan_devices(plan), tuple(map(tuple, rows)))


def computations(plan: PipelinePlan) -> Rows:
    """Every rank's computations, by their start in the plan."""
    rank = {name: r for r, name in enumerate(plan_devices(plan))}
    rows: Rows = [[] for _ in rank]
    entries = [(parse_action(entry.action), entry) for entry in plan.actions]
    for action, entry in sorted(entries, key=lambda pair: _in_time(*pair)):
        if action.kind in COMPUTE:
            if entry.device not in rank:
                raise InvalidPlan(f"{action} stands on {entry.device!r}, which is in no stage")
            rows[rank[entry.device]].append(Instruction(action))
    return rows


def _in_time(action: Action, entry: ScheduledAction) -> tuple[float, float, int, int]:
    return (entry.start_seconds, entry.finish_seconds, *along_way(action))


def with_transfers(plan: PipelinePlan, rows: Rows) -> Rows:
    """Add sends and receives, in an order of all ranks' actions that obeys every dependency.

    Among what may come next, the plan's times decide; at one instant transfers go first, so that no
    computation holds up what is ready to be sent.

    Raises
    ------
    InvalidPlan
        If there is no such order; with a cycle of actions that wait for each other.
    """
    start = _starts(plan)
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
            continue  # a computation is missing, which `verify` tells better
        if sender == receiver:
            edges.append((made, needed))
            continue
        pair = [(sender, Instruction(action, receiver)), (receiver, Instruction(there, sender))]
        edges += [(made, len(nodes)), (len(nodes), needed)]
        arriving[receiver, there.kind, there.stage].append((needed, len(nodes)))
        nodes.append(((start[action], False), pair))
    edges += _buffer_edges(arriving.values())
    out: Rows = [[] for _ in rows]
    for node in _sorted(nodes, edges):
        for rank, instruction in nodes[node][1]:
            out[rank].append(instruction)
    return out


def _starts(plan: PipelinePlan) -> dict[Action, float]:
    """When each action starts; a transfer that does not stand in the plan follows at once."""
    start: dict[Action, float] = defaultdict(float)
    for entry in plan.actions:
        action = parse_action(entry.action)
        start[action] = max(start[action], entry.start_seconds)
    return start


def _transfers(plan: PipelinePlan) -> Iterator[tuple[int, int, Action]]:
    """Sender, receiver and SEND of every pair, also of a device with itself."""
    rank = {name: r for r, name in enumerate(plan_devices(plan))}
    last = len(plan.stages) - 1
    for s, stage in enumerate(plan.stages):
        for m in range(plan.microbatches):
            for kind, there in ((SEND_F, s + 1), (SEND_B, s - 1)):
                if not 0 <= there <= last:
                    continue
                action = Action(s, kind, m)
                both = set(stage.runners(m)) & set(plan.stages[there].runners(m))
                for sender, receiver in [*transfers(plan, action), *((v, v) for v in both)]:
                    yield rank[sender], rank[receiver], action


def _touching(place: dict[tuple[int, Action], int], rank: int, transfer: Action) -> int | None:
    """The node of the computation on ``rank`` that makes what it sends, or needs what it gets."""
    own = (Action(transfer.stage, kind, transfer.microbatch) for kind in _touched_by(transfer))
    found = (place.get((rank, action)) for action in own)
    return next((node for node in found if node is not None), None)


def _touched_by(transfer: Action) -> tuple[ActionKind, ...]:
    """The kinds of computations that make or need what a transfer carries."""
    forth = transfer.kind in (SEND_F, ActionKind.RECEIVE_FORWARD)
    return (F,) if forth else (B, I)


def _buffer_edges(arriving: Iterable[list[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """A transfer waits until what arrived RECEIVE_BUFFERS + 1 before it has been taken.

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


def _sorted(nodes: list[Node], edges: Iterable[tuple[int, int]]) -> list[int]:
    """Nodes in an order that obeys ``edges``, earliest first among those that are free."""
    followers: list[list[int]] = [[] for _ in nodes]
    awaited = [0] * len(nodes)
    for before, after in edges:
        followers[before].append(after)
        awaited[after] += 1
    free = [(nodes[i][0], i) for i, count in enumerate(awaited) if count == 0]
    heapq.heapify(free)
    order = []
    while free:
        _, i = heapq.heappop(free)
        order.append(i)
        for j in followers[i]:
            awaited[j] -= 1
            if awaited[j] == 0:
                heapq.heappush(free, (nodes[j][0], j))
    if len(order) < len(nodes):
        raise InvalidPlan(_cycle(nodes, find_cycle(followers, awaited)))
    return order


def _cycle(nodes: list[Node], cycle: list[int]) -> str:
    firsts = (nodes[i][1][0] for i in cycle)
    names = (f"{instruction} on rank {rank}" for rank, instruction in firsts)
    return f"the plan's order is a deadlock: {' waits for '.join(names)}"


def with_early_sends(plan: PipelinePlan, rows: Rows) -> Rows:
    """Post each send behind what makes its values, or the transfer before it of the same pair.

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


def with_early_receives(plan: PipelinePlan, rows: Rows, behind: Rows | None = None) -> Rows:
    """Post each receive before the computations that its transfer may overlap.

    It moves up, but stays behind the transfer before it of the same pair of ranks, and passes no
    more than RECEIVE_BUFFERS computations that take what arrives on the same boundary. Such may
    also stand ``behind`` the rows.
    """
    out: Rows = []
    for row, rest in zip(rows, behind or [[]] * len(rows), strict=True):
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


def with_reductions(plan: PipelinePlan, rows: Rows) -> Rows:
    """Add the all-reduce of every stage on several devices behind its last backward on a rank.

    What that backward sends goes before it. Ranks see the all-reduces that they share in one
    order, the plan's. Where a stage's weights change within the iteration, one stands behind every
    backward.
    """
    shared = {s for s, stage in enumerate(plan.stages) if len(stage.devices) > 1}
    if plan.weight_rule.updates_every_round:
        return [list(_behind_backwards(row, ActionKind.REDUCE, shared)) for row in rows]
    start = _starts(plan)
    order = sorted(shared, key=lambda s: (start[Action(s, ActionKind.REDUCE)], s))
    out = [list(row) for row in rows]
    for device, row in zip(plan_devices(plan), out, strict=True):
        last = 0
        for s in (s for s in order if device in plan.stages[s].devices):
            ends = [i + 1 for i, one in enumerate(row) if _ends_backward(one, s)]
            last = max([last, *ends])
            while last < len(row) and row[last].action.kind in SENDS:
                last += 1
            row.insert(last, Instruction(Action(s, ActionKind.REDUCE)))
            last += 1
    return out


def with_updates(plan: PipelinePlan, rows: Rows, families: Families = ()) -> Rows:
    """Add the optimizer's steps: where the plan has them, or behind every round of backwards.

    A round is a microbatch, or as many as the stage's devices take in turn: one for each device. A
    step that is not in the plan, or that needs the gradients of a family, is at the iteration's
    end.
    """
    if plan.weight_rule.updates_every_round:
        _require_whole_rounds(plan)
        every = range(len(plan.stages))
        return [list(_behind_backwards(row, ActionKind.UPDATE, every)) for row in rows]
    together, start = set().union(*families), _starts(plan)
    planned = {
        s: inf if s in together else start.get(Action(s, ActionKind.UPDATE), inf)
        for s in range(len(plan.stages))
    }
    out = []
    for device, row in zip(plan_devices(plan), rows, strict=True):
        due = sorted(stages_on(plan, device), key=lambda s: (planned[s], s))
        before = [(_place_of_update(row, s, start, planned[s]), s) for s in due]
        out.append(
            [
                one
                for i in range(len(row) + 1)
                for one in (
                    *(Instruction(Action(s, ActionKind.UPDATE)) for at, s in before if at == i),
                    *row[i : i + 1],
                )
            ]
        )
    return out


def _place_of_update(
    row: list[Instruction], stage: int, start: Mapping[Action, float], seconds: float
) -> int:
    """The position in ``row`` of the first computation that an update at ``seconds`` precedes."""
    own = (i for i, one in enumerate(row) if _ends_backward(one, stage) or _reduces(one, stage))
    for i in range(max(own, default=-1) + 1, len(row)):
        if row[i].action.kind in COMPUTE and start[row[i].action] >= seconds:
            return i
    return len(row)


def _reduces(instruction: Instruction, stage: int) -> bool:
    return instruction.action == Action(stage, ActionKind.REDUCE)


def _require_whole_rounds(plan: PipelinePlan) -> None:
    for s, stage in enumerate(plan.stages):
        turns = stage.turns
        if plan.microbatches % turns:
            raise InvalidPlan(
                f"stage {s}: {turns} devices take turns and update together, so that with "
                f"{plan.weights!r} the microbatches must be a multiple of {turns}, "
                f"got {plan.microbatches}"
            )


def _require_equal_turns(plan: PipelinePlan) -> None:
    first = plan.stages[0].turns
    for s, stage in enumerate(plan.stages):
        if stage.turns != first:
            raise InvalidPlan(
                f"stage {s} takes turns among {stage.turns}, stage 0 among {first}: with "
                "'stash+vertical-sync' every stage must make a version as often as the first"
            )


def _ends_backward(instruction: Instruction, stage: int) -> bool:
    return instruction.action.stage == stage and instruction.action.kind in (B, W)


def _behind_backwards(
    row: Iterable[Instruction], kind: ActionKind, stages: Container[int]
) -> Iterator[Instruction]:
    """``row`` with an action of ``kind`` behind every end of a backward of ``stages``.

    What the backward sends, and the all-reduce for an update, goes before it.
    """
    due: list[Instruction] = []
    for instruction in row:
        if instruction.action.kind not in (*SENDS, ActionKind.REDUCE):
            yield from due
            due = []
        yield instruction
        s = instruction.action.stage
        if s in stages and _ends_backward(instruction, s):
            due.append(Instruction(Action(s, kind)))
    yield from due


def with_versions(plan: PipelinePlan, rows: Rows) -> Rows:
    """Say which version of the weights is computed on, kept beside a newer one, and dropped.

    Versions are numbered from the oldest that an iteration begins with: the only one, or for
    ``double-buffer`` the one before the last update. An update leaves the newest in use.

    Raises
    ------
    InvalidPlan
        If a stage would need a version that it does not have.
    """
    if not plan.weight_rule.keeps_versions:
        return rows
    out = []
    for rank, row in enumerate(rows):
        required = required_versions(plan, rows, rank)
        uses = {
            i: required[Action(one.action.stage, F, one.action.microbatch)]
            for i, one in enumerate(row)
            if one.action.kind in COMPUTE
        }
        walk = _Versions(row, uses, plan.weight_rule.staleness > 0)
        out.append([one for i in range(len(row)) for one in walk.around(i)])
    return out


def required_versions(plan: PipelinePlan, rows: Rows, rank: int) -> dict[Action, int]:
    """The version that each forward on ``rank`` must use, by what ``plan.weights`` means."""
    if plan.weight_rule.staleness > 0:
        return {one.action: 0 for one in rows[rank] if one.action.kind is F}
    own = _newest_at_forwards(rows[rank])
    if not plan.weight_rule.follows_first_stage:
        return own
    _require_equal_turns(plan)
    first: dict[int | None, int] = {}
    for row in rows[: len(plan.stages[0].devices)]:  # the first stage's ranks are the first
        for action, version in _newest_at_forwards(row).items():
            if action.stage == 0:
                first[action.microbatch] = version
    return {action: first[action.microbatch] for action in own}


def _newest_at_forwards(row: Iterable[Instruction]) -> dict[Action, int]:
    updates: Counter[int] = Counter()
    found = {}
    for one in row:
        if one.action.kind is ActionKind.UPDATE:
            updates[one.action.stage] += 1
        elif one.action.kind is F:
            found[one.action] = updates[one.action.stage]
    return found


@dataclass
class _Versions:
    """The weights of a rank's stages while its row is walked through."""

    row: list[Instruction]
    uses: dict[int, int]
    buffered: bool

    def __post_init__(self) -> None:
        self.last_use = {(self.row[i].action.stage, v): i for i, v in self.uses.items()}
        first = int(self.buffered)
        self.newest = {one.action.stage: first for one in self.row}
        self.current = dict(self.newest)

    def around(self, i: int) -> Iterator[Instruction]:
        """Instruction ``i`` of the row with the switches around it."""
        if i in self.uses:
            yield from self._around_computation(i, self.uses[i])
        elif self.row[i].action.kind is ActionKind.UPDATE:
            yield from self._around_update(i)
        else:
            yield self.row[i]

    def _around_computation(self, i: int, version: int) -> Iterator[Instruction]:
        s = self.row[i].action.stage
        if version > self.newest[s]:
            raise InvalidPlan(
                f"{self.row[i].action} needs version {version} of its weights, "
                f"the newest that there is by then is {self.newest[s]}"
            )
        if version != self.current[s]:
            yield Instruction(Action(s, ActionKind.USE, version))
            self.current[s] = version
        yield self.row[i]
        if version != self.newest[s] and self.last_use[s, version] == i:
            yield Instruction(Action(s, ActionKind.DROP, version))

    def _around_update(self, i: int) -> Iterator[Instruction]:
        s = self.row[i].action.stage
        if self.buffered and (s, 0) not in self.last_use:  # a device without a microbatch
            yield Instruction(Action(s, ActionKind.DROP, 0))
        if self.buffered or self.last_use.get((s, self.newest[s]), -1) > i:
            yield Instruction(Action(s, ActionKind.STASH, self.newest[s]))
        yield self.row[i]
        self.newest[s] += 1
        self.current[s] = self.newest[s]
