"""Programs that are broken in every way that came to mind must all be refused."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random
from typing import ClassVar

import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from profiles import examples
from program_text import parse_program
from training_plans import (
    gpipe,
    one_f_one_b,
    overlapping,
    periodic_plans,
    plan_in_order,
    plans,
    straight,
    zero_bubble_h1,
)

from stagewright.executor.programs.lower import lower
from stagewright.executor.programs.memory import Footprint, peak_bytes
from stagewright.executor.programs.periodic import lower_any, lower_periodic
from stagewright.executor.programs.program import (
    RECEIVES,
    SENDS,
    Instruction,
    InvalidProgram,
    PeriodicProgram,
    Program,
    Row,
    plan_devices,
    received,
    stages_on,
)
from stagewright.executor.programs.verification.verify import verify
from stagewright.formulations.plans.actions import COMPUTE, VERSIONED, Action, ActionKind, Weights
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, Stage

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE
STASH, USE, DROP = ActionKind.STASH, ActionKind.USE, ActionKind.DROP

KINDS = "|".join(sorted(ActionKind, key=len, reverse=True))


def refusal(plan: PipelinePlan, program: Program) -> str:
    """The message, in one line that names a rank and an instruction or a stage."""
    with pytest.raises(InvalidProgram) as refused:
        verify(plan, program)
    message = str(refused.value)
    assert "\n" not in message
    assert re.search(r"\branks? \d", message), message
    assert re.search(rf"\d({KINDS})|stage \d", message), message
    return message


def written(plan: PipelinePlan, *rows: str) -> Program:
    """A program of ``plan``, its instructions with spaces between."""
    return parse_program("\n".join(",".join(row.split()) for row in rows), plan_devices(plan))


# --- Mutations --------------------------------------------------------------------------------
# Each gives all the programs that differ from a right one in one place.

Mutation = Callable[[PipelinePlan, Program], Iterator[Program]]
MUTATIONS: dict[str, Mutation] = {}


def mutation(change: Mutation) -> Mutation:
    MUTATIONS[change.__name__] = change
    return change


def places(program: Program, *kinds: ActionKind) -> Iterator[tuple[int, int, Instruction]]:
    """Rank, position and instruction of all, or of those of ``kinds``."""
    for rank, row in enumerate(program.rows):
        for i, one in enumerate(row):
            if not kinds or one.action.kind in kinds:
                yield rank, i, one


def edited(program: Program, rank: int, start: int, stop: int, *instead: Instruction) -> Program:
    """``program`` with other instructions in place of [start, stop) of a rank's row."""
    row = program.rows[rank]
    return with_row(program, rank, (*row[:start], *instead, *row[stop:]))


def with_row(program: Program, rank: int, row: Row) -> Program:
    return replace(program, rows=(*program.rows[:rank], row, *program.rows[rank + 1 :]))


def moved(program: Program, rank: int, here: int, there: int) -> Program:
    """The instruction at ``here`` comes to stand before the one that was at ``there``."""
    one = program.rows[rank][here]
    if here < there:
        return edited(edited(program, rank, there, there, one), rank, here, here + 1)
    return edited(edited(program, rank, here, here + 1), rank, there, there, one)


def exchanged(program: Program, rank: int, i: int, j: int) -> Program:
    row = list(program.rows[rank])
    row[i], row[j] = row[j], row[i]
    return with_row(program, rank, tuple(row))


def position(row: Row, action: Action) -> int | None:
    return next((i for i, one in enumerate(row) if one.action == action), None)


def bare(stage: int, kind: ActionKind, number: int | None = None) -> Instruction:
    return Instruction(Action(stage, kind, number))


@mutation
def any_instruction_is_missing(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, _ in places(program):
        yield edited(program, rank, i, i + 1)


@mutation
def any_instruction_stands_twice(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program):
        if one.action.kind is not USE:  # the version that is used already may be used
            yield edited(program, rank, i, i, one)


@mutation
def any_instruction_stands_again_at_the_end(
    plan: PipelinePlan, program: Program
) -> Iterator[Program]:
    for rank, _, one in places(program):
        if one.action.kind is not USE:
            end = len(program.rows[rank])
            yield edited(program, rank, end, end, one)


@mutation
def of_another_stage(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program):
        for s in {-1, one.action.stage - 1, one.action.stage + 1, len(plan.stages)}:
            other = replace(one, action=replace(one.action, stage=s))
            yield edited(program, rank, i, i + 1, other)


@mutation
def of_another_microbatch_or_version(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program):
        m = one.action.microbatch
        for other in {-1, m - 1, m + 1, plan.microbatches, 999} - {m} if m is not None else ():
            action = replace(one.action, microbatch=other)
            yield edited(program, rank, i, i + 1, replace(one, action=action))


@mutation
def of_another_kind(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for kinds in (COMPUTE, SENDS + RECEIVES, (REDUCE, UPDATE), VERSIONED):
        for rank, i, one in places(program, *kinds):
            for kind in set(kinds) - {one.action.kind}:
                other = replace(one, action=replace(one.action, kind=kind))
                yield edited(program, rank, i, i + 1, other)


@mutation
def both_whole_and_halves(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program, B):
        s, m = one.action.stage, one.action.microbatch
        halves = (bare(s, I, m), bare(s, W, m))
        yield edited(program, rank, i, i, *halves)
        yield edited(program, rank, i, i, halves[0])
        yield edited(program, rank, i + 1, i + 1, halves[1])
    for rank, i, one in places(program, I, W):
        whole = bare(one.action.stage, B, one.action.microbatch)
        yield edited(program, rank, i, i + 1, whole)
        yield edited(program, rank, i, i, whole)


@mutation
def computed_on_another_rank(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program, *COMPUTE):
        for other in range(len(program.rows)):
            if other != rank:
                end = len(program.rows[other])
                added = edited(program, other, end, end, one)
                yield added
                yield edited(added, rank, i, i + 1)


@mutation
def backward_before_forward(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program, B, I, W):
        before = (I,) if one.action.kind is W else (F,)
        for kind in before:
            there = position(program.rows[rank], replace(one.action, kind=kind))
            assert there is not None
            yield moved(program, rank, i, there)
            yield exchanged(program, rank, i, there)


def makers(send: Action) -> list[Action]:
    kinds = (F,) if send.kind is ActionKind.SEND_FORWARD else (B, I)
    return [replace(send, kind=kind) for kind in kinds]


def takers(receive: Action) -> list[Action]:
    kinds = (F,) if receive.kind is ActionKind.RECEIVE_FORWARD else (B, I)
    return [replace(receive, kind=kind) for kind in kinds]


@mutation
def sent_before_it_is_made(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program, *SENDS):
        for maker in makers(one.action):
            there = position(program.rows[rank], maker)
            if there is not None:
                yield moved(program, rank, i, there)


@mutation
def received_after_it_is_needed(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program, *RECEIVES):
        for taker in takers(one.action):
            there = position(program.rows[rank], taker)
            if there is not None:
                yield moved(program, rank, i, there + 1)


@mutation
def transfers_exchanged_on_one_side(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, row in enumerate(program.rows):
        for peer in {one.peer for one in row} - {None}:
            of_pair = [i for i, one in enumerate(row) if one.peer == peer]
            for i, j in pairwise(of_pair):
                yield exchanged(program, rank, i, j)


@mutation
def transfer_missing_or_twice_on_both_sides(
    plan: PipelinePlan, program: Program
) -> Iterator[Program]:
    for rank, i, one in places(program, *SENDS):
        assert one.peer is not None
        there = Instruction(received(one.action), rank)
        j = program.rows[one.peer].index(there)
        yield edited(edited(program, rank, i, i + 1), one.peer, j, j + 1)
        yield edited(edited(program, rank, i, i, one), one.peer, j, j, there)


@mutation
def with_another_peer(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program, *SENDS, *RECEIVES):
        for peer in {-1, *range(len(program.rows) + 1)} - {one.peer}:
            yield edited(program, rank, i, i + 1, replace(one, peer=peer))


@mutation
def reduced_or_updated_too_early(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program, REDUCE, UPDATE):
        row = program.rows[rank]
        backwards = [
            j
            for j, other in enumerate(row[:i])
            if other.action.stage == one.action.stage and other.action.kind in (B, W, REDUCE)
        ]
        if backwards:
            yield moved(program, rank, i, backwards[-1])


@mutation
def updated_too_late(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    """Behind the next backward, where a round of its own is due."""
    for rank, i, one in places(program, REDUCE, UPDATE):
        for j, other in enumerate(program.rows[rank][i:], i):
            if other.action.stage == one.action.stage and other.action.kind in (B, W):
                yield moved(program, rank, i, j + 1)
                break


@mutation
def reduced_after_the_update(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program, REDUCE):
        row = program.rows[rank]
        update = next(j for j in range(i, len(row)) if row[j] == bare(one.action.stage, UPDATE))
        yield moved(program, rank, i, update + 1)


@mutation
def kept_or_dropped_besides(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, row in enumerate(program.rows):
        for s in {one.action.stage for one in row}:
            for i in range(len(row) + 1):
                for kind in (STASH, DROP):
                    for version in range(plan.microbatches + 2):
                        yield edited(program, rank, i, i, bare(s, kind, version))


@mutation
def computed_on_another_version(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, row in enumerate(program.rows):
        used: dict[int, int] = {}
        updated: Counter[int] = Counter()
        for i, one in enumerate(row):
            s = one.action.stage
            newest = updated[s] + (plan.weights == "double-buffer")
            if one.action.kind is UPDATE:
                updated[s] += 1
                used.pop(s, None)
            elif one.action.kind is USE:
                assert one.action.microbatch is not None
                used[s] = one.action.microbatch
            elif one.action.kind in COMPUTE:
                for version in set(range(plan.microbatches + 2)) - {used.get(s, newest)}:
                    yield edited(program, rank, i, i, bare(s, USE, version))


@mutation
def dropped_too_early(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, i, one in places(program, DROP):
        last = i - 1
        while last >= 0 and program.rows[rank][last].action.stage != one.action.stage:
            last -= 1
        if last >= 0 and program.rows[rank][last].action.kind in COMPUTE:
            yield moved(program, rank, i, last)


@mutation
def updated_on_a_foreign_rank(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for rank, row in enumerate(program.rows):
        for s, stage in enumerate((*plan.stages, None)):
            if stage is None or program.devices[rank] not in stage.devices:
                for one in (bare(s, UPDATE), bare(s, REDUCE), bare(s, USE, 0), bare(s, STASH, 0)):
                    yield edited(program, rank, len(row), len(row), one)


@mutation
def rows_exchanged(plan: PipelinePlan, program: Program) -> Iterator[Program]:
    for a, here in enumerate(program.rows):
        for b, there in enumerate(program.rows[:a]):
            if Counter(here) != Counter(there):
                yield with_row(with_row(program, a, there), b, here)


@examples(60, quick=6)
@given(plans(5), st.randoms(use_true_random=False))
def test_mutants_are_refused(plan: PipelinePlan, random: Random) -> None:
    program = lower(plan)
    verify(plan, program)
    for name, change in MUTATIONS.items():
        mutants = list(change(plan, program))
        for mutant in random.sample(mutants, min(len(mutants), 6)):
            note(f"{name}:\n{mutant}")
            refusal(plan, mutant)


KNOWN = {
    "flush": one_f_one_b([Stage((0, 1), ("a", "b")), Stage((1, 2), ("c",))], 2),
    "turns": one_f_one_b([Stage((0, 1), ("a",)), Stage((1, 2), ("b", "c"), "round-robin")], 3),
    "halves": zero_bubble_h1(straight([1, 1, 1]), 2),
    "stash": one_f_one_b(straight([1, 1, 1]), 3, "stash"),
    "sync": one_f_one_b(straight([1, 1]), 3, "stash+vertical-sync"),
    "buffered": one_f_one_b([Stage((0, 1), ("a", "b")), Stage((1, 2), ("c",))], 2, "double-buffer"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_every_mutant_of_a_known_schedule_is_refused(name: str) -> None:
    plan = KNOWN[name]
    program = lower(plan)
    accepted = [
        f"{name}:\n{mutant}"
        for name, change in MUTATIONS.items()
        for mutant in change(plan, program)
        if is_accepted(plan, mutant)
    ]
    assert accepted == []


def is_accepted(plan: PipelinePlan, program: Program) -> bool:
    try:
        verify(plan, program)
    except InvalidProgram:
        return False
    return True


def test_every_mutation_applies_somewhere() -> None:
    applied = {
        name
        for name, change in MUTATIONS.items()
        for plan in KNOWN.values()
        if next(change(plan, lower(plan)), None) is not None
    }
    assert applied == MUTATIONS.keys()


# --- Harmless changes -------------------------------------------------------------------------


def test_receives_may_be_posted_earlier_or_later() -> None:
    plan = one_f_one_b(straight([1, 1]), 2)
    late = written(
        plan,
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0UPDATE",
        "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1UPDATE",
    )
    early = written(
        plan,
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0RECV_B1<1 0B0 0B1 0UPDATE",
        "1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1UPDATE",
    )
    assert early == lower(plan)
    verify(plan, late)
    verify(plan, early)


@examples(30)
@given(plans(5))
def test_a_version_may_be_dropped_late_kept_early_and_named_again(plan: PipelinePlan) -> None:
    program = lower(plan)
    for rank, i, one in places(program, *VERSIONED):
        row = program.rows[rank]
        if one.action.kind is USE:
            verify(plan, edited(program, rank, i, i, one))
        elif one.action.kind is DROP:
            verify(plan, moved(program, rank, i, len(row)))
        elif row[i - 1].action.kind is not UPDATE:
            verify(plan, moved(program, rank, i, i - 1))


# --- Against what a program means -------------------------------------------------------------


class Broken(Exception):  # noqa: N818 - no error of the code under test
    """The run goes wrong, or stops before its end."""


class Meaning:
    """A program run on symbols: what each rank's weights are made of in the end.

    Every value is a number that stands for how it was made; one book for all runs, so that equal
    numbers of two runs are made alike.
    """

    book: ClassVar[dict[object, int]] = {}

    def __init__(self, plan: PipelinePlan, program: Program) -> None:
        self.plan, self.program = plan, program
        first = [("old", 0), ("new", 1)] if plan.weights == "double-buffer" else [("new", 0)]
        ranks = range(len(program.rows))
        self.values: list[dict[object, int]] = [{} for _ in ranks]
        self.posted: dict[tuple[int, int], list[tuple[Action, int | None]]] = defaultdict(list)
        self.reduced: dict[tuple[int, frozenset[str]], list[tuple[int, object]]] = defaultdict(list)
        self.at = [0 for _ in ranks]
        mine = [(r, s) for r, d in enumerate(program.devices) for s in stages_on(plan, d)]
        self.held = {k: {v: self.name(k[1], what) for what, v in first} for k in mine}
        self.used = {k: first[-1][1] for k in mine}
        self.kept = dict.fromkeys(mine, False)
        self.gradients: dict[tuple[int, int], list[int]] = {k: [] for k in mine}
        self.beside: dict[tuple[int, int], list[int]] | None = None
        if isinstance(plan.schedule, PeriodicSchedule):
            self.beside = {k: [] for k in mine}
        self.updates = dict.fromkeys(mine, 0)

    def name(self, *how: object) -> int:
        return self.book.setdefault(how, len(self.book))

    def at_the_end(self) -> object:
        moved = True
        while moved:
            moved = any([self.advance(rank) for rank in range(len(self.at))])
        if self.at != [len(row) for row in self.program.rows]:
            raise Broken
        if any(self.kept.values()) or any(self.gradients.values()):
            raise Broken
        if any((self.beside or {}).values()):
            raise Broken
        for a, b in combinations(range(len(self.at)), 2):
            if self.calls(a, b) != self.calls(b, a):
                raise Broken
        return {key: [held[v] for v in sorted(held)] for key, held in self.held.items()}

    def calls(self, rank: int, other: int) -> list[Action]:
        """The all-reduces that a rank shares with another: NCCL wants them in one order."""
        actions = [one.action for one in self.program.rows[rank] if one.action.kind is REDUCE]
        device = self.program.devices[other]
        return [action for action in actions if device in self.plan.stages[action.stage].devices]

    def advance(self, rank: int) -> bool:
        """One instruction more, if what it needs has come."""
        if self.at[rank] == len(self.program.rows[rank]):
            return False
        one = self.program.rows[rank][self.at[rank]]
        if not self.run(rank, one):
            return False
        self.at[rank] += 1
        return True

    def run(self, rank: int, one: Instruction) -> bool:
        kind, key = one.action.kind, (rank, one.action.stage)
        if one.peer is not None:
            self.post(rank, one)
        elif kind in COMPUTE:
            return self.compute(rank, one.action)
        elif kind is REDUCE:
            group = frozenset(self.plan.stages[one.action.stage].devices)
            self.reduced[rank, group].append((key[1], tuple(sorted(self.gradients[key]))))
            if self.beside is not None:
                if self.beside[key]:
                    raise Broken
                self.beside[key], self.gradients[key] = self.gradients[key], []
        elif kind is UPDATE:
            return self.update(rank, one.action.stage)
        else:
            self.switch(key, one.action)
        return True

    def post(self, rank: int, one: Instruction) -> None:
        assert one.peer is not None
        value = None
        if one.action.kind in SENDS:
            made = [self.values[rank].get(maker) for maker in makers(one.action)]
            value = next((v for v in made if v is not None), None)
            if value is None:
                raise Broken
        self.posted[rank, one.peer].append((one.action, value))

    def arrived(self, rank: int, action: Action) -> tuple[int, ...] | None:
        """All devices' shares of what ``action`` takes in, or None if they are not there yet."""
        step = -1 if action.kind is F else 1
        s, m = action.stage + step, action.microbatch
        assert m is not None
        if not 0 <= s < len(self.plan.stages):
            return () if action.kind is F or self.is_normalised(action) else None
        way = ActionKind.SEND_FORWARD if action.kind is F else ActionKind.SEND_BACKWARD
        send = Action(s, way, m)
        senders = self.plan.stages[s].runners(m)
        if senders == self.plan.stages[action.stage].runners(m):
            senders = (self.program.devices[rank],)
        found: list[int] = []
        for sender in map(self.program.devices.index, senders):
            if sender == rank:
                own = [self.values[rank].get(maker) for maker in makers(send)]
                found += [v for v in own if v is not None][:1]
            else:
                found += self.passed(rank, sender, send)
        return tuple(found) if len(found) == len(senders) else None

    def is_normalised(self, action: Action) -> bool:
        """Whether a backward of the last stage may divide by what all its devices' losses count."""
        if not self.plan.weights.startswith("stash"):
            return True
        runners = self.plan.stages[action.stage].runners(action.microbatch or 0)
        ranks = map(self.program.devices.index, runners)
        return all(replace(action, kind=F) in self.values[rank] for rank in ranks)

    def passed(self, rank: int, sender: int, send: Action) -> list[int]:
        """What of a pair's stream has passed: both sides have posted it."""
        for here, there in zip(self.posted[rank, sender], self.posted[sender, rank], strict=False):
            sent, taken = (there, here) if there[0].kind in SENDS else (here, there)
            if taken[0].kind not in RECEIVES or received(sent[0]) != taken[0]:
                raise Broken
            if sent is there and sent[0] == send:
                assert sent[1] is not None
                return [sent[1]]
        return []

    def compute(self, rank: int, action: Action) -> bool:
        s, m, values = action.stage, action.microbatch, self.values[rank]
        weights = self.held[rank, s].get(self.used[rank, s])
        forward, halfway = values.get(Action(s, F, m)), values.get(Action(s, I, m))
        if weights is None or (action.kind is W and halfway is None):
            raise Broken
        if action.kind is W:
            self.gradients[rank, s].append(self.name(forward, halfway, weights))
            return True
        incoming = self.arrived(rank, action)
        if incoming is None:
            return False
        if action.kind in (B, I) and forward is None:
            raise Broken
        lane = self.plan.stages[s].devices.index(self.program.devices[rank])
        values[action] = self.name(action.kind is F, s, m, lane, forward, incoming, weights)
        if action.kind is B:
            self.gradients[rank, s].append(self.name(forward, values[action], weights))
        return True

    def update(self, rank: int, s: int) -> bool:
        key, devices = (rank, s), self.plan.stages[s].devices
        gradients = self.gradients
        if self.beside is not None and len(devices) > 1:
            gradients = self.beside
        total = tuple(sorted(gradients[key]))
        if len(devices) > 1:
            calls = [
                self.reduced[self.program.devices.index(device), frozenset(devices)]
                for device in devices
            ]
            own = self.reduced[rank, frozenset(devices)]
            mine = [i for i, (stage, _) in enumerate(own) if stage == s]
            if len(mine) != self.updates[key] + 1 or own[mine[-1]][1] != total:
                raise Broken  # not reduced, or gradients came in the meantime
            if any(len(of_rank) <= mine[-1] for of_rank in calls):
                return False
            if any(of_rank[mine[-1]][0] != s for of_rank in calls):
                raise Broken
            total = tuple(of_rank[mine[-1]][1] for of_rank in calls)  # type: ignore[misc]
        newest = max(self.held[key])
        self.held[key][newest + 1] = self.name(self.held[key][newest], total)
        if not self.kept[key]:
            del self.held[key][newest]
        self.kept[key], gradients[key] = False, []
        self.used[key] = newest + 1
        self.updates[key] += 1
        return True

    def switch(self, key: tuple[int, int], action: Action) -> None:
        held, version = self.held[key], action.microbatch
        newest = version == max(held)
        if version not in held or action.kind is (DROP if newest else STASH):
            raise Broken
        if action.kind is USE:
            self.used[key] = version
        elif action.kind is STASH:
            self.kept[key] = True
        else:
            del held[version]


def means(plan: PipelinePlan, program: Program) -> object:
    try:
        return Meaning(plan, program).at_the_end()
    except Broken:
        return None


def test_a_backward_waits_for_the_losses_on_all_devices_of_the_last_stage() -> None:
    """Rank 3 needs rank 0's 1F1 for 1B1; rank 0 comes there after rank 2, which rank 3 blocks."""
    stages = [Stage((0, 1), ("d0", "d1", "d3")), Stage((1, 5), ("d0", "d2"))]
    first = [Action(0, F, 0), Action(0, F, 1), Action(0, B, 0), Action(0, B, 1)]
    last = [Action(1, F, 0), Action(1, B, 0), Action(1, F, 1), Action(1, B, 1)]
    both = [*first[:2], *last[:2], first[2], *last[2:], first[3]]
    orders = {"d0": both, "d1": first, "d2": last, "d3": first}
    plan = plan_in_order(stages, 2, orders, "stash+vertical-sync")
    program = lower(plan)
    row = program.rows[3]
    here = row.index(Instruction(Action(1, ActionKind.SEND_BACKWARD, 0), 2))
    mutant = moved(program, 3, here, row.index(bare(1, B, 1)) + 1)
    assert means(plan, program) is not None
    assert means(plan, mutant) is None
    assert "rank 3 at 1B1 waits for 1F1 of rank 0" in refusal(plan, mutant)


@examples(60)
@given(plans(5), st.randoms(use_true_random=False))
def test_a_program_is_accepted_if_and_only_if_it_means_the_same(
    plan: PipelinePlan, random: Random
) -> None:
    """One instruction is moved; no computation where the weights change within the iteration.

    There another order of backwards is another training, as right as the plan's.
    """
    program = lower(plan)
    right = means(plan, program)
    assert right is not None
    for _ in range(30):
        rank = random.randrange(len(program.rows))
        row = program.rows[rank]
        here, there = random.randrange(len(row)), random.randrange(len(row) + 1)
        if plan.weights.startswith("stash") and row[here].action.kind in COMPUTE:
            continue
        mutant = moved(program, rank, here, there)
        assert is_accepted(plan, mutant) == (means(plan, mutant) == right), f"{mutant}"


def takes_whole_turns(plan: PipelinePlan) -> bool:
    """Whether microbatches counted over iterations are on the devices of those of one."""
    return all(plan.microbatches % stage.turns == 0 for stage in plan.stages)


BETWEEN_LOSSES = plans(4, weights=["flush"], begins="backward", max_microbatches=3)


@examples(50, quick=3)
@given(
    periodic_plans(4, max_microbatches=3) | BETWEEN_LOSSES.filter(takes_whole_turns),
    st.randoms(use_true_random=False),
)
def test_a_periodic_program_is_accepted_if_and_only_if_it_means_the_same(
    plan: PipelinePlan, random: Random
) -> None:
    """One instruction is moved, for two iterations more than `verify` runs through.

    No computation where weights change after every microbatch, as above.
    """
    program = lower_any(plan)
    assert isinstance(program, PeriodicProgram)
    verify(plan, program)
    many = range(1, len(program.segments) + 4)
    right = [means_in(plan, program, iterations) for iterations in many]
    assert None not in right
    for _ in range(12):
        parts = program.segments + program.drains
        which, rank = random.randrange(len(parts)), random.randrange(len(program.devices))
        row = parts[which][rank]
        if row:
            here, there = random.randrange(len(row)), random.randrange(len(row) + 1)
            if plan.weights.startswith("stash") and row[here].action.kind in COMPUTE:
                continue
            moved_row = moved(Program(("",), (row,)), 0, here, there).rows[0]
            mutant = with_part(program, which, rank, moved_row)
            meant = [means_in(plan, mutant, iterations) for iterations in many]
            assert is_accepted(plan, mutant) == (meant == right), f"{mutant}"


TIED = (
    pytest.param(
        2, 0, "0DROP0,0STASH1,0UPDATE,0F4", "0F4,0DROP0,0STASH1,0UPDATE",
        "0F4 is computed on version 0 of its weights, 'double-buffer' asks for version 2",
        id="update",
    ),
    pytest.param(
        2, 1, "1UPDATE,1REDUCE_GRAD", "1UPDATE",
        "1UPDATE, number 2 of its stage, comes after 6 of 6 backwards and 1", id="missing",
    ),
    pytest.param(
        2, 1, "1DROP0,1STASH1,1UPDATE,1REDUCE_GRAD", "1REDUCE_GRAD,1DROP0,1STASH1,1UPDATE",
        "1REDUCE_GRAD, number 2 of its stage, comes after 4 of", id="a third gradient",
    ),
    pytest.param(
        3, 1, ",1SEND_B1>0,1REDUCE_GRAD,1DROP0,1STASH1,1UPDATE",
        ",1REDUCE_GRAD,1DROP0,1STASH1,1UPDATE,1SEND_B1>0",
        "rank 1 at 1UPDATE waits for 0REDUCE_GRAD of rank 0", id="deadlock",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("which", "rank", "old", "new", "message"), TIED)
def test_stages_that_share_a_parameter_wait_for_each_other(
    which: int, rank: int, old: str, new: str, message: str
) -> None:
    plan, families = overlapping(straight([1, 1]), 2), [frozenset((0, 1))]
    with pytest.raises(InvalidProgram, match="after 2 of 2 backwards and 0 all-reduces"):
        verify(plan, lower_periodic(plan), families=families)
    program = lower_periodic(plan, families)
    verify(plan, program, families=families)
    row = ",".join(map(str, (program.segments + program.drains)[which][rank]))
    assert old in row, row
    changed = parse_program(row.replace(old, new, 1), ("",)).rows[0]
    with pytest.raises(InvalidProgram, match=message):
        verify(plan, with_part(program, which, rank, changed), families=families)


def means_in(plan: PipelinePlan, program: PeriodicProgram, iterations: int) -> object:
    whole = replace(plan, microbatches=iterations * plan.microbatches)
    return means(whole, program.unrolled(iterations))


def with_part(program: PeriodicProgram, which: int, rank: int, row: Row) -> PeriodicProgram:
    """Another row in one of the segments, which are counted first, or of the drains."""
    parts = [list(rows) for rows in program.segments + program.drains]
    parts[which][rank] = row
    changed = tuple(map(tuple, parts))
    count = len(program.segments)
    return replace(program, segments=changed[:count], drains=changed[count:])


@pytest.mark.parametrize(
    ("which", "rank", "old", "new", "message"),
    [
        pytest.param(
            2, 0, "0USE1,0B2", "0B2", "0B2: it is computed on version 2 of the weights",
            id="version",
        ),
        pytest.param(
            2, 0, "0F4,0SEND_F4>1,0RECV_B3<1", "0RECV_B3<1,0F4,0SEND_F4>1",
            "transfer 0 of ranks 0 and 1 is 0RECV_B3<1 on rank 0 and 1RECV_F4<0 on rank 1",
            id="order of a pair",
        ),
        pytest.param(
            2, 0, "0F5", "0F6", "0F6 is done when 3 mini-batches of 2 microbatches are given",
            id="not given yet",
        ),
        pytest.param(2, 1, "1DROP1,", "", "stage 1 ends with versions", id="third version"),
        pytest.param(
            2, 1, ",1DROP1,1STASH2,1UPDATE", "",
            "1UPDATE, number 2 of its stage, comes after 6 of 6 backwards", id="update",
        ),
        pytest.param(
            5, 0, ",0B5", "", "rank 0: stage 0 must work on microbatch 5", id="drain",
        ),
    ],
)  # fmt: skip
def test_what_would_go_wrong_only_when_it_repeats(
    which: int, rank: int, old: str, new: str, message: str
) -> None:
    plan = overlapping(straight([1, 1]), 2)
    program = lower_periodic(plan)
    assert len(program.segments) == 3
    row = ",".join(map(str, (program.segments + program.drains)[which][rank]))
    assert old in row, row
    changed = parse_program(row.replace(old, new, 1), ("",)).rows[0]
    with pytest.raises(InvalidProgram, match=message):
        verify(plan, with_part(program, which, rank, changed))


# --- Ranks, order, deadlock -------------------------------------------------------------------


def test_a_row_is_lost() -> None:
    plan = one_f_one_b(straight([1, 1]), 1)
    program = lower(plan)
    fewer = replace(program, rows=program.rows[:1])
    with pytest.raises(InvalidProgram, match=r"the plan runs on d0, d1, the program has 1 rows"):
        verify(plan, fewer)
    with pytest.raises(InvalidProgram, match=r"the plan runs on d0, d1, .* for d1, d0"):
        verify(plan, replace(program, devices=("d1", "d0")))


TWO = [Stage((0, 1), ("a",)), Stage((1, 2), ("b",))]


def test_a_rank_that_waits_for_itself() -> None:
    plan = one_f_one_b(TWO, 1)
    program = written(
        plan, "0F0 0SEND_F0>1 0RECV_B0<1 0B0 0UPDATE", "1F0 1RECV_F0<0 1B0 1SEND_B0>0 1UPDATE"
    )
    message = refusal(plan, program)
    assert message.startswith("deadlock: rank 1 at 1F0 waits for 1RECV_F0<0 of rank 1; rows: ")


def test_a_deadlock_is_shown_with_its_cycle_and_places() -> None:
    """Every pair agrees on its order, but rank 1 takes first what rank 0 makes last."""
    stages = [Stage((s, s + 1), (device,)) for s, device in enumerate("abca")]
    plan = replace(one_f_one_b(TWO, 2), stages=tuple(stages))
    rank_0 = (
        "0F0 0SEND_F0>1 3RECV_F0<2 3F0 3B0 3SEND_B0>2 0F1 0SEND_F1>1 3RECV_F1<2 3F1 3B1 "
        "3SEND_B1>2 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0UPDATE 3UPDATE"
    )
    rank_1 = (
        "1RECV_F0<0 1RECV_F1<0 1F1 1F0 1SEND_F0>2 1SEND_F1>2 1RECV_B0<2 1B0 1SEND_B0>0 "
        "1RECV_B1<2 1B1 1SEND_B1>0 1UPDATE"
    )
    rank_2 = (
        "2RECV_F0<1 2F0 2SEND_F0>0 2RECV_B0<0 2RECV_F1<1 2F1 2SEND_F1>0 2RECV_B1<0 2B0 "
        "2SEND_B0>1 2B1 2SEND_B1>1 2UPDATE"
    )
    in_turn = rank_1.replace("1F1 1F0 1SEND_F0>2", "1F0 1SEND_F0>2 1F1")
    verify(plan, written(plan, rank_0, in_turn, rank_2))
    assert refusal(plan, written(plan, rank_0, rank_1, rank_2)) == (
        "deadlock: rank 0 at 3F0 waits for 2SEND_F0>0 of rank 2; rank 2 at 2F0 waits for "
        "1SEND_F0>2 of rank 1; rank 1 at 1F1 waits for 0SEND_F1>1 of rank 0; rows: "
        "rank 0: 0F0,0SEND_F0>1,3RECV_F0<2,>>3F0<<,3B0,3SEND_B0>2,0F1,...; "
        "rank 1: 1RECV_F0<0,1RECV_F1<0,>>1F1<<,1F0,1SEND_F0>2,1SEND_F1>2,...; "
        "rank 2: 2RECV_F0<1,>>2F0<<,2SEND_F0>0,2RECV_B0<0,2RECV_F1<1,..."
    )


def test_a_deadlock_by_an_all_reduce() -> None:
    """Rank 0 updates stage 0 before it sends what rank 1 needs for its part of the gradient."""
    stages = (Stage((0, 1), ("a", "b"), "round-robin"), Stage((1, 2), ("a",)))
    plan = replace(one_f_one_b(TWO, 2), stages=stages)
    begin, end = "0F0 1F0 1B0 0B0", "1RECV_F1<1 1F1 1B1 1SEND_B1>1"
    other = "0F1 0SEND_F1>0 0RECV_B1<0 0B1 0REDUCE_GRAD 0UPDATE"
    verify(plan, written(plan, f"{begin} 0REDUCE_GRAD {end} 0UPDATE 1UPDATE", other))
    message = refusal(plan, written(plan, f"{begin} 0REDUCE_GRAD 0UPDATE {end} 1UPDATE", other))
    assert message.startswith(
        "deadlock: rank 0 at 0UPDATE waits for 0REDUCE_GRAD of rank 1; "
        "rank 1 at 0B1 waits for 1SEND_B1>1 of rank 0; rows: rank 0: ...,"
    )
    assert message.count(">>") == message.count("<<") == 2


def test_all_reduces_that_are_shared_stand_in_one_order() -> None:
    """Stages on the same devices share a process group: its calls match by their order."""
    stages = (Stage((0, 1), ("a", "b")), Stage((1, 2), ("a", "b")))
    plan = replace(one_f_one_b(TWO, 1), stages=stages)
    one = "0F0 1F0 1B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD 0UPDATE 1UPDATE"
    other = "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0UPDATE 1UPDATE"
    verify(plan, written(plan, one, one))
    verify(plan, written(plan, other, other))
    assert refusal(plan, written(plan, one, other)) == (
        "collective 0 of ranks 0 and 1 is 0REDUCE_GRAD on rank 0 and 1REDUCE_GRAD on rank 1"
    )


# --- Updates ----------------------------------------------------------------------------------

ONE = [Stage((0, 1), ("a",))]


@pytest.mark.parametrize("weights", ["flush", "double-buffer"])
def test_a_whole_microbatch_behind_the_update(weights: Weights) -> None:
    plan = one_f_one_b(ONE, 2, weights)
    program = written(plan, "0F0 0B0 0UPDATE 0F1 0B1")
    assert "0UPDATE, number 1 of its stage, comes after 1 of 2 backwards" in refusal(plan, program)


def test_a_whole_microbatch_behind_the_all_reduce() -> None:
    plan = one_f_one_b([Stage((0, 1), ("a", "b"))], 2)
    row = "0F0 0B0 0REDUCE_GRAD 0F1 0B1 0UPDATE"
    message = refusal(plan, written(plan, row, row))
    assert "rank 0: 0REDUCE_GRAD, number 1 of its stage, comes after 1 of 2 backwards" in message


@pytest.mark.parametrize("weights", ["stash", "stash+vertical-sync"])
def test_one_update_for_two_rounds(weights: Weights) -> None:
    plan = one_f_one_b(ONE, 2, weights)
    verify(plan, written(plan, "0F0 0B0 0UPDATE 0F1 0B1 0UPDATE"))
    refusal(plan, written(plan, "0F0 0B0 0F1 0B1 0UPDATE"))
    refusal(plan, written(plan, "0F0 0B0 0F1 0B1 0UPDATE 0UPDATE"))


def test_an_all_reduce_of_a_stage_on_one_device() -> None:
    plan = one_f_one_b(ONE, 1)
    message = refusal(plan, written(plan, "0F0 0B0 0REDUCE_GRAD 0UPDATE"))
    assert "1 times 0UPDATE and 0 times 0REDUCE_GRAD; found: 1 and 1" in message


def test_turns_that_do_not_come_round() -> None:
    """Rank 0 would wait for an all-reduce that rank 1 has no gradient for."""
    plan = one_f_one_b([Stage((0, 1), ("a", "b"), "round-robin")], 3, "stash")
    row = "0F0 0B0 0REDUCE_GRAD 0UPDATE 0F2 0B2 0REDUCE_GRAD 0UPDATE"
    message = refusal(plan, written(plan, row, "0F1 0B1 0REDUCE_GRAD 0UPDATE"))
    assert message == (
        "collective 1 of ranks 0 and 1 is 0REDUCE_GRAD on rank 0 and missing on rank 1"
    )


def test_the_version_before_the_newest_is_left_of_a_double_buffer() -> None:
    plan = one_f_one_b(ONE, 1, "double-buffer")
    verify(plan, written(plan, "0USE0 0F0 0B0 0DROP0 0STASH1 0UPDATE"))
    message = refusal(plan, written(plan, "0USE0 0F0 0B0 0UPDATE"))
    assert message == "rank 0: stage 0 ends with versions [0, 2]"


def test_a_version_that_is_kept_for_no_update() -> None:
    plan = one_f_one_b(ONE, 1)
    message = refusal(plan, written(plan, "0F0 0B0 0UPDATE 0STASH1"))
    assert message == "rank 0: stage 0: no UPDATE follows STASH of version 1"


def test_vertical_sync_asks_for_the_first_stages_version() -> None:
    """Both rows are right under stashing alone, where stage 1 uses its newest version."""
    sync, stash = (one_f_one_b(TWO, 3, how) for how in ("stash+vertical-sync", "stash"))
    verify(stash, lower(stash))
    message = refusal(sync, lower(stash))
    assert message == (
        "rank 1: 1F1 is computed on version 1 of its weights, "
        "'stash+vertical-sync' asks for version 0"
    )


# --- What torch.distributed.pipelining's own validators let through ---------------------------

RIGHT = ("0F0 0SEND_F0>1 0RECV_B0<1 0B0 0UPDATE", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1UPDATE")


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        pytest.param(0, "0F0", "0F0 0F0", "rank 0: 0F0 appears 2 times", id="duplicated"),
        pytest.param(1, "1B0", "1B0 1B0", "rank 1: 1B0 appears 2 times", id="duplicated backward"),
        pytest.param(1, "1B0", "1I0 1B0 1W0", "found: 1F0, 1B0, 1I0, 1W0", id="B beside I and W"),
        pytest.param(1, "1B0", "1I0", "found: 1F0, 1I0", id="I without W"),
        pytest.param(0, "0B0", "", "found: 0F0", id="missing backward"),
        pytest.param(0, "0F0", "0F0 0F1", "0F1: there are only 1 microbatches", id="microbatch"),
        pytest.param(1, "1F0", "1F0 2F0", "2F0: there are only 2 stages", id="stage"),
        pytest.param(0, "0F0", "0F0 1F0", "rank 0: 1F0 does not run on a", id="wrong rank"),
        pytest.param(0, "0UPDATE", "", "found: 0 and 0", id="missing update"),
    ],
)
def test_what_torch_lets_through(rank: int, old: str, new: str, message: str) -> None:
    plan = one_f_one_b(TWO, 1)
    verify(plan, written(plan, *RIGHT))
    rows = list(RIGHT)
    rows[rank] = rows[rank].replace(old, new, 1)
    assert message in refusal(plan, written(plan, *rows))


def test_a_microbatch_that_is_missing_everywhere() -> None:
    plan = replace(one_f_one_b(TWO, 1), microbatches=2)
    message = "rank 0: stage 0 must work on microbatch 1 by 0F1 and 0B1, or by .*; found: nothing"
    assert re.search(message, refusal(plan, written(plan, *RIGHT)))


# --- Memory -----------------------------------------------------------------------------------

FOOTPRINTS = (
    Footprint(static_bytes=1000, version_bytes=100, saved_bytes=10, working_bytes=3),
    Footprint(static_bytes=2000, version_bytes=200, saved_bytes=20, working_bytes=5),
    Footprint(static_bytes=4000, version_bytes=400, saved_bytes=40, working_bytes=7),
)


@pytest.mark.parametrize(
    ("plan", "peaks"),
    [
        # Stage s of three holds 3 - s microbatches, one of them in its backward.
        (one_f_one_b(straight([1, 1, 1]), 5), [1000 + 33, 2000 + 45, 4000 + 47]),
        (gpipe(straight([1, 1, 1]), 5), [1000 + 53, 2000 + 105, 4000 + 207]),
        # Weight gradients that wait keep their microbatch, and what its backward works on.
        (zero_bubble_h1(straight([1, 1, 1]), 5), [1000 + 33, 2000 + 20 * 3 + 5 * 2, 4000 + 141]),
        # 3 - s versions, that is 2 - s besides the newest, and all of them while F is ahead.
        (one_f_one_b(straight([1, 1, 1]), 5, "stash"), [1000 + 233, 2000 + 245, 4000 + 47]),
        # One version besides the newest, which goes as the microbatches have gone.
        (one_f_one_b(straight([1, 1]), 3, "double-buffer"), [1000 + 123, 2000 + 225]),
    ],
)
def test_peaks_by_hand(plan: PipelinePlan, peaks: list[float]) -> None:
    program = lower(plan)
    found = [peak_bytes(plan, row, FOOTPRINTS)[0] for row in program.rows]
    assert found == peaks
    verify(plan, program, FOOTPRINTS, peaks)
    for rank, peak in enumerate(peaks):
        short = [*peaks[:rank], peak - 1, *peaks[rank + 1 :]]
        with pytest.raises(InvalidProgram) as refused:
            verify(plan, program, FOOTPRINTS, short)
        where = program.rows[rank][peak_bytes(plan, program.rows[rank], FOOTPRINTS)[1]]
        message = str(refused.value)
        assert message.startswith(f"rank {rank} (d{rank}) needs ")
        assert f" at {where} and has " in message
        assert message.endswith(": 1 bytes short")


@pytest.mark.parametrize(("gradient_bytes", "peak"), [(8, 1000 + 53), (30, 1000 + 40 + 30 + 3)])
def test_gradients_are_there_from_the_first_backward_on(gradient_bytes: int, peak: int) -> None:
    """Five microbatches are saved before the first backward, and four during the second."""
    plan = gpipe(straight([1, 1, 1]), 5)
    first = replace(FOOTPRINTS[0], gradient_bytes=gradient_bytes)
    row = lower(plan).rows[0]
    assert peak_bytes(plan, row, (first, *FOOTPRINTS[1:]))[0] == peak
    twice = peak_bytes(plan, (*row, *row), (first, *FOOTPRINTS[1:]))[0]
    assert twice == peak  # an update has released the first ones


@examples(40)
@given(plans(5), st.data())
def test_peaks_equal_a_walk_over_what_is_alive(plan: PipelinePlan, data: st.DataObject) -> None:
    size = st.integers(0, 50)
    footprints = [
        Footprint(*(float(data.draw(size)) for _ in range(4))) for _ in range(len(plan.stages))
    ]
    for row in lower(plan).rows:
        needs = [alive(plan, row, i, footprints) for i in range(len(row))]
        peak, where = peak_bytes(plan, row, footprints)
        assert peak == max(needs)
        assert needs[where] == peak


def alive(plan: PipelinePlan, row: Row, now: int, footprints: list[Footprint]) -> float:
    """Bytes while instruction ``now`` runs, each thing by when it comes and goes."""
    total = 0.0
    for s in {one.action.stage for one in row}:
        mine = [(i, one.action) for i, one in enumerate(row) if one.action.stage == s]
        footprint = footprints[s]
        saved = sum(i <= now for i, a in mine if a.kind is F)
        saved -= sum(i < now for i, a in mine if a.kind in (B, W))
        working = sum(i <= now for i, a in mine if a.kind is I)
        working -= sum(i < now for i, a in mine if a.kind is W)
        working += sum(i == now for i, a in mine if a.kind is B)
        versions = int(plan.weights == "double-buffer")
        versions += sum(i <= now for i, a in mine if a.kind is STASH)
        versions -= sum(i < now for i, a in mine if a.kind is DROP)
        total += footprint.static_bytes + saved * footprint.saved_bytes
        total += working * footprint.working_bytes + versions * footprint.version_bytes
    return total


def test_a_loss_that_is_normalised_over_devices_waits_for_all_of_them() -> None:
    plan = gpipe([Stage((0, 1), ("d0", "d1"))], 2)
    plan = replace(plan, weights="stash")
    rows = [f"0F{m} 0B{m} 0REDUCE_GRAD 0UPDATE" for m in (0, 1)]
    verify(plan, written(plan, *[" ".join(rows)] * 2))
    crossed = written(plan, " ".join(rows), " ".join(reversed(rows)))
    assert "rank 0 at 0B0 waits for 0F0 of rank 1; rank 1 at 0B1 waits for 0F1 of rank 0" in (
        refusal(plan, crossed)
    )


def test_for_a_norm_every_stage_gives_its_gradients() -> None:
    plan = overlapping([Stage((0, 1), ("d0", "d1")), Stage((1, 2), ("d2",))], 2)
    families = [frozenset((0, 1))]
    program = lower_periodic(plan, families)
    verify(plan, program, families=families)
    given = {one.action.stage for row in program.segments[-1] for one in row
             if one.action.kind is REDUCE}  # fmt: skip
    assert given == {0, 1}
    with pytest.raises(InvalidProgram, match="0 all-reduces"):
        verify(plan, lower_periodic(plan), families=families)
