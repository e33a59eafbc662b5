"""Proof that a program carries out its plan, before any process starts.

Nothing here knows how a program was made. Proved are: every computation stands once and only
once, where it belongs; both ranks of a pair see the same transfers in the same order, and the same
all-reduces; every rank gets to the end (otherwise the cycle is shown, with the place in each rank's
row); every forward uses the version of the weights that the plan's semantics ask for, and its
backward the same; and, where the bytes are known, that every rank keeps within its memory at every
step.

A periodic program is proved for any number of iterations. What is proved by running it is every
number up to two of the iterations that repeat. From there on one more of them is done in between:
it begins as the one before began, only later, and needs nothing from those that follow, since each
iteration's transfers have both of their ends in it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product, zip_longest

from stagewright.executor.programs.program import (
    SENDS,
    Families,
    Instruction,
    PeriodicProgram,
    Program,
    Row,
    plan_devices,
    received,
    stages_on,
    transfers,
)
from stagewright.formulations.plans.actions import COMPUTE, VERSIONED, Action, ActionKind
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.documents.units import format_bytes

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE
STASH, USE, DROP = ActionKind.STASH, ActionKind.USE, ActionKind.DROP

AROUND = 3  # instructions shown on either side of the place where a rank hangs


class InvalidProgram(InvalidPlan):
    """A program that does not carry out its plan; the message names rank and instruction."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one stage on one of its devices.

    ``static_bytes`` are there all the time (weights, gradients, optimizer's state, buffers of
    transfers); ``version_bytes`` are one more version of the weights; ``saved_bytes`` is what a
    microbatch keeps from its forward on (its input alone, if the rest is computed again),
    ``working_bytes`` what it keeps besides from the begin of its backward to the end.
    """

    static_bytes: float
    version_bytes: float
    saved_bytes: float
    working_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class _Work:
    """A plan that is done ``iterations`` times, one right behind the other.

    In a periodic plan the gradients of ``families`` of stages are summed up as those of a stage's
    devices are.
    """

    plan: PipelinePlan
    iterations: int = 1
    families: Families = ()

    @property
    def microbatches(self) -> int:
        return self.iterations * self.plan.microbatches

    def iteration(self, microbatch: int | None) -> int:
        assert microbatch is not None
        return microbatch // self.plan.microbatches

    @property
    def is_measured(self) -> bool:
        """Whether every update needs all gradients, as their norm does."""
        return any(len(one) == len(self.plan.stages) for one in self.families)

    def is_shared(self, s: int) -> bool:
        return len(self.plan.stages[s].devices) > 1 or any(s in one for one in self.families)

    def brings(self, s: int) -> Iterator[tuple[int, str]]:
        """Stages and devices whose gradients an update of stage ``s`` needs."""
        for other in {s}.union(*(one for one in self.families if s in one)):
            if self.is_shared(other):
                yield from ((other, name) for name in self.plan.stages[other].devices)


def verify(
    plan: PipelinePlan,
    program: Program | PeriodicProgram,
    footprints: Sequence[Footprint] | None = None,
    memory_bytes: Sequence[float] | None = None,
    families: Families = (),
) -> None:
    """Prove that ``program`` carries out ``plan``.

    Parameters
    ----------
    program
        A periodic one for a periodic plan.
    footprints
        Per stage, if known.
    memory_bytes
        Per rank; only together with ``footprints``.
    families
        Stages whose updates need something of each other's gradients: they have a parameter in
        common, or the norm of all gradients is clipped.

    Raises
    ------
    InvalidProgram
        With the first thing that is wrong.
    """
    for part, work in _whole(plan, program, families):
        _require_ranks(plan, part)
        for rank, row in enumerate(part.rows):
            _require_computations(work, part, rank, row)
            _require_updates(work, part.devices[rank], rank, row)
        _require_same_reductions(plan, part)
        if isinstance(program, Program):
            _require_updates_at_end(part, families)
        _require_transfers(work, part)
        _Run(work, part).to_the_end()
        at_first_stage = _versions_at_first_stage(part)
        for rank, row in enumerate(part.rows):
            _require_versions(work, rank, row, at_first_stage)
        if footprints is not None and memory_bytes is not None:
            _require_memory(plan, part, footprints, memory_bytes)


def _whole(
    plan: PipelinePlan, program: Program | PeriodicProgram, families: Families
) -> Iterator[tuple[Program, _Work]]:
    """Programs from an empty pipeline to an empty one, and what each has to do."""
    if isinstance(program, Program):
        yield program, _Work(plan)
        return
    _require_ranks(plan, program)
    for iterations in range(1, len(program.segments) + 2):
        parts = [*map(program.segment, range(iterations)), program.drain(iterations)]
        for i, rows in enumerate(parts):
            _require_closed(Program(program.devices, rows), min(i + 1, iterations), plan)
        yield program.unrolled(iterations), _Work(plan, iterations, families)


def _require_closed(part: Program, given: int, plan: PipelinePlan) -> None:
    """An iteration's transfers have both ends in it, and all that is done was given by then."""
    for rank, row in enumerate(part.rows):
        for one in row:
            m = one.action.microbatch
            if one.action.kind not in VERSIONED and (m or 0) >= given * plan.microbatches:
                raise InvalidProgram(
                    f"rank {rank}: {one} is done when {given} mini-batches of "
                    f"{plan.microbatches} microbatches are given"
                )
    _require_same_sides(part)


def _require_ranks(plan: PipelinePlan, program: Program | PeriodicProgram) -> None:
    devices = plan_devices(plan)
    parts = [program.rows] if isinstance(program, Program) else program.segments + program.drains
    for rows in parts:
        if program.devices != devices or len(rows) != len(devices):
            raise InvalidProgram(
                f"the plan runs on {', '.join(devices)}, the program has {len(rows)} rows for "
                f"{', '.join(program.devices)}"
            )


def _require_computations(work: _Work, program: Program, rank: int, row: Row) -> None:
    """Each of the rank's microbatches has one F, and one B or one I and one W; nothing else."""
    plan, stands = work.plan, Counter(one.action for one in row)
    for action, count in stands.items():
        _require_belongs(work, program.devices[rank], rank, action)
        if action.kind in COMPUTE and count > 1:
            raise InvalidProgram(f"rank {rank}: {action} stands {count} times")
    for s, m in product(stages_on(plan, program.devices[rank]), range(work.microbatches)):
        if program.devices[rank] in plan.stages[s].runners(m):
            kinds = tuple(k for k in COMPUTE if Action(s, k, m) in stands)
            if kinds not in ((F, B), (F, I, W)):
                found = ", ".join(f"{s}{k}{m}" for k in kinds) or "nothing"
                raise InvalidProgram(
                    f"rank {rank}: stage {s} must work on microbatch {m} by {s}F{m} and "
                    f"{s}B{m}, or by {s}F{m}, {s}I{m} and {s}W{m}; found: {found}"
                )


def _require_belongs(work: _Work, device: str, rank: int, action: Action) -> None:
    """The stage of ``action``, and its microbatch, are the rank's."""
    plan, s, m = work.plan, action.stage, action.microbatch
    if not 0 <= s < len(plan.stages):
        raise InvalidProgram(f"rank {rank}: {action}: there are only {len(plan.stages)} stages")
    runners = plan.stages[s].devices
    if m is not None and action.kind not in VERSIONED:
        if not 0 <= m < work.microbatches:
            raise InvalidProgram(
                f"rank {rank}: {action}: there are only {work.microbatches} microbatches"
            )
        runners = plan.stages[s].runners(m)
    if device not in runners:
        raise InvalidProgram(f"rank {rank}: {action} does not run on {device}")


def _require_updates(work: _Work, device: str, rank: int, row: Row) -> None:
    """Every gradient reaches the weights: once an iteration, or once a round of backwards."""
    plan, every_round = work.plan, work.plan.weight_rule.updates_every_round
    backwards = Counter(one.action.stage for one in row if one.action.kind in (B, W))
    stages = {s: _Gradients(work, backwards[s], work.is_shared(s)) for s in stages_on(plan, device)}
    for one in row:
        found = stages[one.action.stage]
        if not found.may_follow(one.action):
            count = found.reduced if one.action.kind is REDUCE else found.updated
            raise InvalidProgram(
                f"rank {rank}: {one}, the {count}. of its stage, stands behind "
                f"{found.ready} of {found.backwards} backwards and {found.reduced} all-reduces"
            )
    for s, found in stages.items():
        wanted = backwards[s] if every_round else work.iterations
        reductions = wanted if found.is_shared else 0
        if found.updated != wanted or found.reduced != reductions:
            raise InvalidProgram(
                f"rank {rank}: with {plan.weights!r}, {backwards[s]} backwards need {wanted} times "
                f"{s}{UPDATE} and {reductions} times {s}{REDUCE}; found: {found.updated} and "
                f"{found.reduced}"
            )


def _require_updates_at_end(program: Program, families: Families) -> None:
    """What stages of a family have to do together, every rank does when all else is done."""
    together = set().union(*families)
    for rank, row in enumerate(program.rows):
        before: Instruction | None = None
        for one in row:
            if before is not None and one.action.kind not in (UPDATE, *VERSIONED):
                raise InvalidProgram(
                    f"rank {rank}: {before} needs the gradients of other stages, "
                    f"it must stand behind {one}"
                )
            if one.action.kind is UPDATE and one.action.stage in together:
                before = one


@dataclass(slots=True)
class _Gradients:
    """A stage's gradients on one rank: what was added to them, and what became of it."""

    work: _Work
    backwards: int
    is_shared: bool
    ready: int = 0
    latest: int = 0  # iteration of which there is something
    reduced: int = 0
    updated: int = 0

    def may_follow(self, action: Action) -> bool:
        """Take note of the next action; whether it may stand here.

        While an all-reduce is under way, the next iteration's gradients are summed up beside it; a
        third one would have no place.
        """
        every_round = self.work.plan.weight_rule.updates_every_round
        if action.kind in (B, W):
            self.ready += 1
            self.latest = max(self.latest, self.work.iteration(action.microbatch))
        elif action.kind is REDUCE:
            self.reduced += 1
            return self._are_of(self.reduced, every_round) and self.reduced == self.updated + 1
        elif action.kind is UPDATE:
            self.updated += 1
            beside = self.is_shared and not every_round
            is_reduced = not self.is_shared or self.reduced == self.updated
            return is_reduced and (beside or self._are_of(self.updated, every_round))
        return True

    def _are_of(self, count: int, every_round: bool) -> bool:
        """Whether all backwards of the first ``count`` iterations, or rounds, are in, and no more.

        No more of others: it would be missing in its own update.
        """
        if every_round:
            return self.ready == count
        each = self.backwards // self.work.iterations
        return self.ready == count * each and self.latest < count


def _require_same_reductions(plan: PipelinePlan, program: Program) -> None:
    """Any two ranks see the all-reduces that they share in the same order."""
    reductions = [[one for one in row if one.action.kind is REDUCE] for row in program.rows]
    for a, b in combinations([rank for rank, found in enumerate(reductions) if found], 2):
        both = {program.devices[a], program.devices[b]}
        sides = [
            [one for one in reductions[r] if both <= set(plan.stages[one.action.stage].devices)]
            for r in (a, b)
        ]
        for i, (here, there) in enumerate(zip_longest(*sides)):
            if here != there:
                raise InvalidProgram(
                    f"all-reduce {i} of ranks {a} and {b} is {here or 'missing'} on rank {a} and "
                    f"{there or 'missing'} on rank {b}"
                )


def _require_transfers(work: _Work, program: Program) -> None:
    """Every pair of ranks does all its transfers, once each, in the same order on both sides."""
    wanted = _wanted_transfers(work, program)
    for a, b, here, there in _require_same_sides(program):
        _require_once(a, b, here, wanted[a, b])
        _require_once(b, a, there, wanted[b, a])


def _require_same_sides(
    program: Program,
) -> list[tuple[int, int, list[Instruction], list[Instruction]]]:
    """Two ranks and what each has with the other; both sides in the same order."""
    sides = [_by_peer(row) for row in program.rows]
    for a, side in enumerate(sides):
        for b in side:
            if not (0 <= b < len(sides) and b != a):
                raise InvalidProgram(f"rank {a}: {side[b][0]}: there is no such peer")
    pairs = [
        (a, b, sides[a].get(b, []), sides[b].get(a, []))
        for a, b in combinations(range(len(sides)), 2)
    ]
    for a, b, here, there in pairs:
        _require_same_order(a, b, here, there)
    return pairs


def _wanted_transfers(
    work: _Work, program: Program
) -> defaultdict[tuple[int, int], Counter[Action]]:
    plan, rank = work.plan, {name: r for r, name in enumerate(program.devices)}
    wanted: defaultdict[tuple[int, int], Counter[Action]] = defaultdict(Counter)
    for s, m in product(range(len(plan.stages)), range(work.microbatches)):
        for kind, there in ((SEND_F, s + 1), (SEND_B, s - 1)):
            if 0 <= there < len(plan.stages):
                for sender, receiver in transfers(plan, Action(s, kind, m)):
                    wanted[rank[sender], rank[receiver]][Action(s, kind, m)] += 1
    return wanted


def _by_peer(row: Iterable[Instruction]) -> dict[int, list[Instruction]]:
    found: dict[int, list[Instruction]] = {}
    for one in row:
        if one.peer is not None:
            found.setdefault(one.peer, []).append(one)
    return found


def _require_once(a: int, b: int, side: Sequence[Instruction], wanted: Counter[Action]) -> None:
    found = Counter(one.action for one in side if one.action.kind in SENDS)
    for action in sorted(found | wanted):
        if found[action] != wanted[action]:
            raise InvalidProgram(
                f"{action} from rank {a} to rank {b} stands {found[action]} times, "
                f"must stand {wanted[action]} times"
            )


def _require_same_order(
    a: int, b: int, side: Sequence[Instruction], other: Sequence[Instruction]
) -> None:
    for i, (here, there) in enumerate(zip_longest(side, other)):
        if here is None or there is None or not _match(here.action, there.action):
            raise InvalidProgram(
                f"transfer {i} of ranks {a} and {b} is {here or 'missing'} on rank {a} and "
                f"{there or 'missing'} on rank {b}"
            )


def _match(here: Action, there: Action) -> bool:
    if here.kind in SENDS:
        return received(here) == there
    return there.kind in SENDS and received(there) == here


class _Run:
    """The program run without data: a rank goes on as soon as what it waits for has happened.

    Sends, receives and all-reduces are only posted. Those of a pair of ranks pass in order, each
    when both ranks have posted it, as on a NCCL stream; the weakest promise of all backends.
    """

    def __init__(self, work: _Work, program: Program) -> None:
        self.work, self.plan, self.program = work, work.plan, program
        self.rank = {name: r for r, name in enumerate(program.devices)}
        self.at = [0] * len(program.rows)
        self.done: list[Counter[Action]] = [Counter() for _ in program.rows]
        self.posted: Counter[tuple[int, int]] = Counter()
        self.turn = {
            (rank, one): i
            for rank, row in enumerate(program.rows)
            for side in _by_peer(row).values()
            for i, one in enumerate(side)
        }

    def to_the_end(self) -> None:
        """Raise InvalidProgram if not every rank gets there."""
        waiting = list(range(len(self.at)))
        while waiting:
            moved = [rank for rank in waiting if self._advance(rank)]
            waiting = [r for r in waiting if self.at[r] < len(self.program.rows[r])]
            if waiting and not moved:
                raise InvalidProgram(self._deadlock(waiting))

    def _advance(self, rank: int) -> bool:
        row, before = self.program.rows[rank], self.at[rank]
        while self.at[rank] < len(row):
            one = row[self.at[rank]]
            if next(self._awaited(rank, one.action), None) is not None:
                break
            self.done[rank][one.action] += 1
            if one.peer is not None:
                self.posted[rank, one.peer] += 1
            self.at[rank] += 1
        return self.at[rank] > before

    def _awaited(self, rank: int, action: Action) -> Iterator[tuple[int, str]]:
        """What the action still waits for: the rank that must do it, and its name."""
        s, m, kind = action.stage, action.microbatch, action.kind
        if self.work.is_measured:
            yield from self._measured(rank)
        if kind is F and s > 0:
            yield from self._arrivals(rank, Action(s - 1, SEND_F, m), (F,))
        elif kind in (B, I):
            yield from self._own(rank, s, (F,), m)
            yield from self._gradients(rank, s, m)
        elif kind is W:
            yield from self._own(rank, s, (I,), m)
        elif kind is SEND_F:
            yield from self._own(rank, s, (F,), m)
        elif kind is SEND_B:
            yield from self._own(rank, s, (B, I), m)
        elif kind is UPDATE:
            yield from self._reductions(rank, s)

    def _own(
        self, rank: int, s: int, kinds: tuple[ActionKind, ...], m: int | None
    ) -> Iterator[tuple[int, str]]:
        if not any(self.done[rank][Action(s, kind, m)] for kind in kinds):
            yield rank, f"{s}{kinds[0]}{m}"

    def _arrivals(
        self, rank: int, send: Action, makers: tuple[ActionKind, ...]
    ) -> Iterator[tuple[int, str]]:
        assert send.microbatch is not None
        device, there = self.program.devices[rank], received(send)
        senders = [v for v, target in transfers(self.plan, send) if target == device]
        runners = self.plan.stages[send.stage].runners(send.microbatch)
        if device in runners:  # and its own share, without a transfer
            yield from self._own(rank, send.stage, makers, send.microbatch)
        for sender in senders:
            peer = self.rank[sender]
            receive = Instruction(there, peer)
            if not self.done[rank][there] or self.posted[rank, peer] <= self.turn[rank, receive]:
                yield rank, str(receive)
            elif self.posted[peer, rank] <= self.turn[rank, receive]:
                yield peer, str(Instruction(send, rank))

    def _reductions(self, rank: int, s: int) -> Iterator[tuple[int, str]]:
        for other, name in self.work.brings(s):
            peer = self.rank[name]
            if self.done[peer][Action(other, REDUCE)] <= self.done[rank][Action(s, UPDATE)]:
                yield peer, f"{other}{REDUCE}"

    def _gradients(self, rank: int, s: int, m: int | None) -> Iterator[tuple[int, str]]:
        """What a backward begins with: the next stage's, or losses that are normalised together.

        That is the microbatch's alone where it is an update. Where an iteration is one, its losses
        are all known before any stage has ended its backwards.
        """
        if s < len(self.plan.stages) - 1:
            yield from self._arrivals(rank, Action(s + 1, SEND_B, m), (B, I))
        elif self.plan.weight_rule.updates_every_round:
            assert m is not None
            for name in self.plan.stages[s].runners(m):
                yield from self._own(self.rank[name], s, (F,), m)

    def _measured(self, rank: int) -> Iterator[tuple[int, str]]:
        """The all-reduces whose results a rank measures, when it has begun its last one."""
        row, at = self.program.rows[rank], self.at[rank]
        if at == 0 or row[at - 1].action.kind is not REDUCE:
            return
        own = stages_on(self.plan, self.program.devices[rank])
        begun = {self.done[rank][Action(s, REDUCE)] for s in own}
        for s in own if len(begun) == 1 else ():
            for name in self.plan.stages[s].devices:
                if self.done[self.rank[name]][Action(s, REDUCE)] < min(begun):
                    yield self.rank[name], f"{s}{REDUCE}"

    def _deadlock(self, waiting: list[int]) -> str:
        needs = {
            rank: next(self._awaited(rank, self.program.rows[rank][self.at[rank]].action))
            for rank in waiting
        }
        path = [waiting[0]]
        while needs[path[-1]][0] not in path:
            path.append(needs[path[-1]][0])
        cycle = path[path.index(needs[path[-1]][0]) :]
        steps = " ".join(
            f"rank {rank} at {self.program.rows[rank][self.at[rank]]} waits for {needs[rank][1]} "
            f"of rank {needs[rank][0]};"
            for rank in cycle
        )
        rows = "; ".join(f"rank {rank}: {self._place(rank)}" for rank in waiting)
        return f"deadlock: {steps} rows: {rows}"

    def _place(self, rank: int) -> str:
        row, at = self.program.rows[rank], self.at[rank]
        shown = [
            f">>{one}<<" if i == at else str(one)
            for i, one in enumerate(row)
            if abs(i - at) <= AROUND
        ]
        head = ["..."] if at > AROUND else []
        tail = ["..."] if at + AROUND + 1 < len(row) else []
        return ",".join([*head, *shown, *tail])


def _require_versions(
    work: _Work, rank: int, row: Row, at_first_stage: Mapping[int | None, int]
) -> None:
    """Every version that is used is held and is the right one; none is left over at the end."""
    plan, buffered = work.plan, work.plan.weight_rule.staleness > 0
    stages: defaultdict[int, _Weights] = defaultdict(lambda: _Weights(buffered))
    for one in row:
        weights = stages[one.action.stage]
        try:
            weights.after(one.action)
        except InvalidProgram as error:
            raise InvalidProgram(f"rank {rank}: {one}: {error}") from None
        if one.action.kind is F:
            right = work.iteration(one.action.microbatch) if buffered else weights.held[-1]
            if plan.weight_rule.follows_first_stage:
                right = at_first_stage[one.action.microbatch]
            if weights.used != right:
                raise InvalidProgram(
                    f"rank {rank}: {one} is computed on version {weights.used} of its weights, "
                    f"{plan.weights!r} asks for version {right}"
                )
    for s, weights in stages.items():
        weights.require_ready_again(f"rank {rank}: stage {s}")


def _versions_at_first_stage(program: Program) -> dict[int | None, int]:
    """Per microbatch, how many updates stand before the first stage's forward."""
    found = {}
    for row in program.rows:
        updates = 0
        for one in row:
            updates += one.action == Action(0, UPDATE)
            if one.action.stage == 0 and one.action.kind is F:
                found[one.action.microbatch] = updates
    return found


class _Weights:
    """The versions of a stage's weights on one rank."""

    def __init__(self, buffered: bool) -> None:
        self.buffered = buffered
        self.held = [0, 1] if buffered else [0]
        self.used = self.held[-1]
        self.stashed: int | None = None
        self.of_forward: dict[int | None, int] = {}

    def after(self, action: Action) -> None:
        kind, number = action.kind, action.microbatch
        newest = self.held[-1]
        if kind in (USE, STASH, DROP):
            if number not in self.held:
                raise InvalidProgram(f"there is no such version, only {self.held}")
            self._switch(kind, number)
        elif kind is UPDATE:
            if self.stashed != newest:
                self.held.pop()
            self.held.append(newest + 1)
            self.used = newest + 1
        elif kind is F:
            self.of_forward[number] = self.used
        elif kind in COMPUTE and self.used != self.of_forward[number]:
            raise InvalidProgram(
                f"it is computed on version {self.used} of the weights, "
                f"its forward on version {self.of_forward[number]}"
            )
        if kind in COMPUTE and self.used not in self.held:
            raise InvalidProgram(f"version {self.used} of the weights is not there any more")

    def _switch(self, kind: ActionKind, number: int) -> None:
        if kind is USE:
            self.used = number
        elif kind is STASH:
            if number in (self.stashed, *self.held[:-1]):
                raise InvalidProgram("only the newest version is kept, and only once")
            self.stashed = number
        elif number == self.held[-1]:
            raise InvalidProgram("the newest version cannot be dropped")
        else:
            self.held.remove(number)

    def require_ready_again(self, stage: str) -> None:
        """The newest version is left, buffered the one before it too, and nothing else."""
        newest = self.held[-1]
        if self.stashed == newest:
            raise InvalidProgram(f"{stage}: no {UPDATE} stands behind {STASH} of version {newest}")
        if self.held != [newest - 1, newest][not self.buffered :]:
            raise InvalidProgram(f"{stage} ends with versions {self.held}")


def peak_bytes(
    plan: PipelinePlan, row: Row, footprints: Sequence[Footprint] | Mapping[int, Footprint]
) -> tuple[float, int]:
    """The most bytes that a rank's row needs at once, and the position where it does.

    ``footprints`` are those of at least the row's own stages.
    """
    held = 0.0
    for s in {one.action.stage for one in row}:
        held += footprints[s].static_bytes
        held += footprints[s].version_bytes * plan.weight_rule.staleness
    peak, where = held, 0
    for position, one in enumerate(row):
        during, after = _bytes_at(one.action.kind, footprints[one.action.stage])
        if held + during > peak:
            peak, where = held + during, position
        held += after
    return peak, where


def _bytes_at(kind: ActionKind, footprint: Footprint) -> tuple[float, float]:
    """What an instruction needs while it runs, and what it adds for good, on top of the others."""
    saved, working, version = (
        footprint.saved_bytes,
        footprint.working_bytes,
        footprint.version_bytes,
    )
    return {
        F: (saved, saved),
        B: (working, -saved),
        I: (working, working),
        W: (0.0, -saved - working),
        STASH: (version, version),
        DROP: (0.0, -version),
    }.get(kind, (0.0, 0.0))


def _require_memory(
    plan: PipelinePlan,
    program: Program,
    footprints: Sequence[Footprint],
    memory_bytes: Sequence[float],
) -> None:
    for rank, row in enumerate(program.rows):
        need, where = peak_bytes(plan, row, footprints)
        if need > memory_bytes[rank]:
            raise InvalidProgram(
                f"rank {rank} ({program.devices[rank]}) needs {format_bytes(need)} at {row[where]} "
                f"and has {format_bytes(memory_bytes[rank])}: "
                f"{need - memory_bytes[rank]:.0f} bytes short"
            )
