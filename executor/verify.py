"""Proof that a program carries out its plan, before any process starts.

Nothing here knows how a program was made. Proved are: every computation stands once and only
once, where it belongs; both ranks of a pair see the same transfers in the same order, and the same
all-reduces; every rank gets to the end (otherwise the cycle is shown, with the place in each rank's
row); every forward uses the version of the weights that the plan's semantics ask for, and its
backward the same; and, where the bytes are known, that every rank keeps within its memory at every
step.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product, zip_longest

from stagewright.executor.program import (
    SENDS,
    Instruction,
    Program,
    Row,
    plan_devices,
    received,
    stages_on,
    transfers,
)
from stagewright.formulations.actions import COMPUTE, VERSIONED, Action, ActionKind
from stagewright.formulations.plan import InvalidPlan, PipelinePlan, updates_every_round
from stagewright.graphs.units import format_bytes

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


def verify(
    plan: PipelinePlan,
    program: Program,
    footprints: Sequence[Footprint] | None = None,
    memory_bytes: Sequence[float] | None = None,
) -> None:
    """Prove that ``program`` carries out ``plan``.

    Parameters
    ----------
    footprints
        Per stage, if known.
    memory_bytes
        Per rank; only together with ``footprints``.

    Raises
    ------
    InvalidProgram
        With the first thing that is wrong.
    """
    _require_ranks(plan, program)
    for rank, row in enumerate(program.rows):
        _require_computations(plan, program, rank, row)
        _require_updates(plan, program.devices[rank], rank, row)
    _require_same_reductions(plan, program)
    _require_transfers(plan, program)
    _Run(plan, program).to_the_end()
    at_first_stage = _versions_at_first_stage(program)
    for rank, row in enumerate(program.rows):
        _require_versions(plan, rank, row, at_first_stage)
    if footprints is not None and memory_bytes is not None:
        _require_memory(plan, program, footprints, memory_bytes)


def _require_ranks(plan: PipelinePlan, program: Program) -> None:
    devices = plan_devices(plan)
    if program.devices != devices or len(program.rows) != len(devices):
        raise InvalidProgram(
            f"the plan runs on {', '.join(devices)}, the program has {len(program.rows)} rows for "
            f"{', '.join(program.devices)}"
        )


def _require_computations(plan: PipelinePlan, program: Program, rank: int, row: Row) -> None:
    """Each of the rank's microbatches has one F, and one B or one I and one W; nothing else."""
    stands = Counter(one.action for one in row)
    for action, count in stands.items():
        _require_belongs(plan, program.devices[rank], rank, action)
        if action.kind in COMPUTE and count > 1:
            raise InvalidProgram(f"rank {rank}: {action} stands {count} times")
    for s, m in product(stages_on(plan, program.devices[rank]), range(plan.microbatches)):
        if program.devices[rank] in plan.stages[s].runners(m):
            kinds = tuple(k for k in COMPUTE if Action(s, k, m) in stands)
            if kinds not in ((F, B), (F, I, W)):
                found = ", ".join(f"{s}{k}{m}" for k in kinds) or "nothing"
                raise InvalidProgram(
                    f"rank {rank}: stage {s} must work on microbatch {m} by {s}F{m} and "
                    f"{s}B{m}, or by {s}F{m}, {s}I{m} and {s}W{m}; found: {found}"
                )


def _require_belongs(plan: PipelinePlan, device: str, rank: int, action: Action) -> None:
    """The stage of ``action``, and its microbatch, are the rank's."""
    s, m = action.stage, action.microbatch
    if not 0 <= s < len(plan.stages):
        raise InvalidProgram(f"rank {rank}: {action}: there are only {len(plan.stages)} stages")
    runners = plan.stages[s].devices
    if m is not None and action.kind not in VERSIONED:
        if not 0 <= m < plan.microbatches:
            raise InvalidProgram(
                f"rank {rank}: {action}: there are only {plan.microbatches} microbatches"
            )
        runners = plan.stages[s].runners(m)
    if device not in runners:
        raise InvalidProgram(f"rank {rank}: {action} does not run on {device}")


def _require_updates(plan: PipelinePlan, device: str, rank: int, row: Row) -> None:
    """Every gradient reaches the weights: once an iteration, or once a round of backwards."""
    every_round = updates_every_round(plan.weights)
    backwards = Counter(one.action.stage for one in row if one.action.kind in (B, W))
    ready: Counter[int] = Counter()
    done: Counter[Action] = Counter()
    for one in row:
        s, kind = one.action.stage, one.action.kind
        ready[s] += kind in (B, W)
        if kind in (REDUCE, UPDATE):
            done[one.action] += 1
            due = done[one.action] if every_round else backwards[s]
            reduced = done[Action(s, REDUCE)]
            unreduced = len(plan.stages[s].devices) > 1 and reduced < done[one.action]
            if ready[s] != due or unreduced:
                raise InvalidProgram(
                    f"rank {rank}: {one}, the {done[one.action]}. of its stage, stands behind "
                    f"{ready[s]} of {backwards[s]} backwards and {reduced} all-reduces"
                )
    for s in stages_on(plan, device):
        wanted = backwards[s] if every_round else 1
        reduced, updated = done[Action(s, REDUCE)], done[Action(s, UPDATE)]
        reductions = wanted if len(plan.stages[s].devices) > 1 else 0
        if updated != wanted or reduced != reductions:
            raise InvalidProgram(
                f"rank {rank}: with {plan.weights!r}, {backwards[s]} backwards need {wanted} times "
                f"{s}{UPDATE} and {reductions} times {s}{REDUCE}; found: {updated} and {reduced}"
            )


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


def _require_transfers(plan: PipelinePlan, program: Program) -> None:
    """Every pair of ranks does all its transfers, once each, in the same order on both sides."""
    wanted = _wanted_transfers(plan, program)
    sides = [_by_peer(row) for row in program.rows]
    for a, side in enumerate(sides):
        for b in side:
            if not (0 <= b < len(sides) and b != a):
                raise InvalidProgram(f"rank {a}: {side[b][0]}: there is no such peer")
    for a, b in combinations(range(len(sides)), 2):
        here, there = sides[a].get(b, []), sides[b].get(a, [])
        _require_same_order(a, b, here, there)
        _require_once(a, b, here, wanted[a, b])
        _require_once(b, a, there, wanted[b, a])


def _wanted_transfers(
    plan: PipelinePlan, program: Program
) -> defaultdict[tuple[int, int], Counter[Action]]:
    rank = {name: r for r, name in enumerate(program.devices)}
    wanted: defaultdict[tuple[int, int], Counter[Action]] = defaultdict(Counter)
    for s, m in product(range(len(plan.stages)), range(plan.microbatches)):
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

    def __init__(self, plan: PipelinePlan, program: Program) -> None:
        self.plan, self.program = plan, program
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
        if kind is F and s > 0:
            yield from self._arrivals(rank, Action(s - 1, SEND_F, m), (F,))
        elif kind in (B, I):
            yield from self._own(rank, s, (F,), m)
            if s < len(self.plan.stages) - 1:
                yield from self._arrivals(rank, Action(s + 1, SEND_B, m), (B, I))
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
        devices = self.plan.stages[s].devices
        for name in devices if len(devices) > 1 else ():
            peer = self.rank[name]
            if self.done[peer][Action(s, REDUCE)] <= self.done[rank][Action(s, UPDATE)]:
                yield peer, f"{s}{REDUCE}"

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
    plan: PipelinePlan, rank: int, row: Row, at_first_stage: Mapping[int | None, int]
) -> None:
    """Every version that is used is held and is the right one; none is left over at the end."""
    buffered = plan.weights == "double-buffer"
    stages: defaultdict[int, _Weights] = defaultdict(lambda: _Weights(buffered))
    for one in row:
        weights = stages[one.action.stage]
        try:
            weights.after(one.action)
        except InvalidProgram as error:
            raise InvalidProgram(f"rank {rank}: {one}: {error}") from None
        if one.action.kind is F:
            right = 0 if buffered else weights.held[-1]
            if plan.weights == "stash+vertical-sync":
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
        held += footprints[s].version_bytes * (plan.weights == "double-buffer")
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
