"""Programs of plans, also of stages whose layers groups of devices compute together."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import elaborate, small_problem, valid_plan
from profiles import UNSHRUNK, examples
from program_text import parse_program
from training_plans import interleaved, one_f_one_b, plan_in_order, plans, straight

from stagewright.executor.programs.lower import lower
from stagewright.executor.programs.program import (
    RECEIVES,
    SENDS,
    Instruction,
    InvalidProgram,
    Program,
    Row,
    plan_devices,
    received,
    rows,
    stages_on,
    transfers,
)
from stagewright.executor.programs.verification.verify import verify
from stagewright.formulations.checking.check import check
from stagewright.formulations.plans.actions import Action, ActionKind, B, F, parse_action
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.documents.errors import InputError

BARE = (ActionKind.REDUCE, ActionKind.UPDATE, ActionKind.RUN)
NUMBERS = st.integers(0, 10**9 - 1)


@st.composite
def instructions(draw: st.DrawFn) -> Instruction:
    kind = draw(st.sampled_from(list(ActionKind)))
    number = None if kind in BARE else draw(NUMBERS)
    peer = draw(NUMBERS) if kind in SENDS + RECEIVES else None
    may_overlap = kind in (ActionKind.WEIGHT_GRADIENT, ActionKind.REDUCE)
    stream = draw(st.sampled_from([None, "sub"])) if may_overlap else None
    return Instruction(Action(draw(NUMBERS), kind, number), peer, stream)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Every rank has something to do, as in all that is lowered: its stages' updates."""
    row = st.lists(instructions(), min_size=1, max_size=6).map(tuple)
    rows = draw(st.lists(row, min_size=1, max_size=4))
    return Program(tuple(f"d{rank}" for rank in range(len(rows))), tuple(rows))


@given(programs())
def test_what_is_printed_is_parsed_again(program: Program) -> None:
    assert parse_program(str(program), program.devices) == program
    assert parse_program(f"{program}\n", program.devices) == program


@examples(25)
@given(plans(5))
def test_lowered_programs_are_parsed_again(plan: PipelinePlan) -> None:
    program = lower(plan)
    assert parse_program(str(program), plan_devices(plan)) == program


def test_spelling() -> None:
    assert str(lower(one_f_one_b(straight([1, 1]), 1))) == (
        "0F0,0SEND_F0>1,0RECV_B0<1,0B0,0UPDATE\n1RECV_F0<0,1F0,1B0,1SEND_B0>0,1UPDATE"
    )


@pytest.mark.parametrize(
    "word",
    [
        "",
        " 0F1",
        "0F",
        "F0",
        "0X0",
        "0F01",
        "0F0>1",
        "0F0<",
        "0UPDATE0",
        "0UPDATE>1",
        "0SEND_F0",
        "0SEND_F0>",
        "0SEND_F0<1",
        "0SEND_F0>-1",
        "0SEND_F0>01",
        "0SEND_F0>1>2",
        "0SEND_F0>\N{ARABIC-INDIC DIGIT ONE}",
        "0SEND_F0>\N{SUPERSCRIPT TWO}",
        "1RECV_F0>1",
        "1RECV_F0",
        "0W0@",
        "0W0@main",
        "0B0@sub",
        "0SEND_F0@sub",
        "0SEND_F0>1@sub",
    ],
)
def test_what_is_no_instruction_is_refused_with_its_place(word: str) -> None:
    text = f"0F0,0B0\n1F0,1F1,{word},1B0"
    with pytest.raises(InputError, match=r"^rank 1, position 2: ") as refused:
        parse_program(text, ("d0", "d1"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "0F0", "0F0\n", "0F0\n1F0\n2F0"])
def test_a_program_has_a_line_per_rank(text: str) -> None:
    lines = len(text.splitlines())
    with pytest.raises(InputError, match=f"2 ranks needs as many lines, got {lines}"):
        parse_program(text, ("d0", "d1"))


@pytest.mark.parametrize(("action", "peer"), [("0F0", 1), ("0SEND_F0", None), ("1RECV_B0", None)])
def test_a_peer_belongs_to_transfers(action: str, peer: int | None) -> None:
    with pytest.raises(InputError, match=f"{action}: a peer belongs to transfers"):
        Instruction(parse_action(action), peer)


def test_ranks_are_devices_in_the_order_of_their_stages() -> None:
    plan = interleaved([Stage((s, s + 1), (f"d{1 - s % 2}",)) for s in range(4)], 2)
    assert plan_devices(plan) == ("d1", "d0")
    assert [stages_on(plan, device) for device in plan_devices(plan)] == [[0, 2], [1, 3]]


def test_transfers_between_groups() -> None:
    stages = (
        Stage((0, 1), ("a",)),
        Stage((1, 2), ("a", "b")),
        Stage((2, 3), ("a", "b")),
        Stage((3, 4), ("b", "c"), "round-robin"),
    )
    plan = PipelinePlan("", "", "", "", 2, stages, one_f_one_b(straight([1]), 1).schedule)

    def between(text: str) -> list[tuple[str, str]]:
        return list(transfers(plan, parse_action(text)))

    assert between("0SEND_F0") == [("a", "b")]
    assert between("1SEND_B0") == [("b", "a")]
    assert between("1SEND_F0") == between("2SEND_B1") == []
    assert between("2SEND_F0") == [("a", "b")]
    assert between("2SEND_F1") == [("a", "c"), ("b", "c")]
    assert between("3SEND_B1") == [("c", "a"), ("c", "b")]


@given(NUMBERS, NUMBERS)
def test_what_is_sent_forward_is_received_by_the_next_stage(s: int, m: int) -> None:
    there = received(Action(s, ActionKind.SEND_FORWARD, m))
    assert there == Action(s + 1, ActionKind.RECEIVE_FORWARD, m)
    back = received(Action(s + 1, ActionKind.SEND_BACKWARD, m))
    assert back == Action(s, ActionKind.RECEIVE_BACKWARD, m)


def two_groups() -> PipelinePlan:
    """Two replicas of a group, then a group."""
    problem = small_problem(4, 6, 2, degrees=(2,))
    stages = [
        Stage((0, 2), ("g0", "g1", "g3", "g4"), tensor=2),
        Stage((2, 4), ("g2", "g5"), tensor=2),
    ]
    return valid_plan(problem, stages)


def test_each_position_sends_to_its_own() -> None:
    program = lower(two_groups())
    verify(two_groups(), program)
    assert str(program).splitlines()[0] == (
        "0F0,0SEND_F0>4,0F1,0SEND_F1>4,0RECV_B0<4,0RECV_B1<4,0B0,0B1,0REDUCE_GRAD,0UPDATE"
    )
    peers = {
        (rank, one.peer)
        for rank, row in enumerate(program.rows)
        for one in row
        if one.peer is not None
    }
    # Ranks 0 to 3 are g0, g1, g3, g4; ranks 4 and 5 are g2 and g5.
    assert {tuple(sorted(pair)) for pair in peers} == {(0, 4), (1, 5), (2, 4), (3, 5)}


def test_a_group_has_one_share() -> None:
    first, second = rows(two_groups(), 6)
    assert first == ((0, 1, 2), (3, 4, 5))
    assert second == ((0, 1, 2, 3, 4, 5),)


@examples(40)
@given(elaborate(begins="forward", sharded=True))
def test_lowered_plans_are_right(case: tuple[PipelineProblem, PipelinePlan]) -> None:
    _, plan = case
    program = lower(plan)
    verify(plan, program)
    assert parse_program(str(program), plan_devices(plan)) == program


@st.composite
def mixtures(draw: st.DrawFn) -> list[Stage]:
    """Stages of one to four devices in any order; in turn, some may have no microbatch of two."""
    stops = [*sorted(draw(st.sets(st.integers(1, 3), max_size=2))), 4]
    found = []
    for layers in pairwise([0, *stops]):
        count = draw(st.sampled_from([1, 2, 3, 4, 4]))
        devices = tuple(draw(st.permutations(["g0", "g1", "g3", "g4"]))[:count])
        way = draw(st.sampled_from(["split", "round-robin"]))
        tensor = draw(st.sampled_from([1, 2])) if count % 2 == 0 else 1
        found.append(Stage(layers, devices, way, tensor=tensor))
    return found


@examples(150, phases=UNSHRUNK)
@given(mixtures())
def test_what_the_checker_accepts_the_verifier_does_too(stages: list[Stage]) -> None:
    problem = small_problem(4, 6, 2, degrees=(2,))
    plan = valid_plan(problem, stages)
    assert check(problem, plan) == ()
    verify(plan, lower(plan))


def test_an_all_reduce_waits_for_a_group_on_its_devices() -> None:
    """The first replica ends before 1F1, the second after it, the third computes nothing."""
    problem = small_problem(4, 6, 2, degrees=(2,))
    stages = [
        Stage((0, 2), ("g0", "g1", "g3"), "round-robin"),
        Stage((2, 4), ("g0", "g1"), tensor=2),
    ]
    plan = valid_plan(problem, stages)
    assert check(problem, plan) == ()
    program = lower(plan)
    verify(plan, program)
    first, second, third = ([str(one.action) for one in row] for row in program.rows)
    for row in (first, second):
        assert row.index("1F1") < row.index("1B1") < row.index("0REDUCE_GRAD")
    assert third == ["0REDUCE_GRAD", "0UPDATE"]


def changed(rank: int, change: Callable[[list[Instruction]], object]) -> Program:
    program = lower(two_groups())
    row = list(program.rows[rank])
    change(row)
    every = [tuple(row) if r == rank else one for r, one in enumerate(program.rows)]
    return replace(program, rows=tuple(every))


def place(row: list[Instruction], text: str) -> int:
    return [str(one) for one in row].index(text)


def exchanged(one: str, other: str) -> Callable[[list[Instruction]], None]:
    def change(row: list[Instruction]) -> None:
        i, j = place(row, one), place(row, other)
        row[i], row[j] = row[j], row[i]

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ((0, exchanged("0B0", "0B1")), "collective 2 of ranks 0 and 1 is 0B1 on rank 0 and 0B0"),
        ((1, exchanged("0F0", "0F1")), "collective 0 of ranks 0 and 1 is 0F0 on rank 0 and 0F1"),
        ((1, lambda row: row.pop(place(row, "0F1"))), "stage 0 must work on microbatch 1"),
        (
            (3, lambda row: row.pop(place(row, "0REDUCE_GRAD"))),
            "comes after 2 of 2 backwards and 0 all",
        ),
        ((1, lambda row: row.pop(place(row, "0SEND_F0>5"))), "transfer 0 of ranks 1 and 5"),
    ],
)
def test_damage_is_refused(
    damage: tuple[int, Callable[[list[Instruction]], object]], message: str
) -> None:
    with pytest.raises(InvalidProgram, match=message):
        verify(two_groups(), changed(*damage))


def test_members_that_wait_for_each_other_are_a_deadlock() -> None:
    """Rank 0 needs what rank 1 makes after the computation in which it waits for rank 0."""
    stages = [Stage((0, 1), ("a", "b"), tensor=2), Stage((1, 2), ("b",)), Stage((2, 3), ("a",))]
    ways = (range(3), F), (range(2, -1, -1), B)
    order = [Action(s, kind, m) for every, kind in ways for s in every for m in range(2)]
    orders = {
        name: [one for one in order if name in stages[one.stage].devices] for name in ("a", "b")
    }
    plan = plan_in_order(stages, 2, orders)
    program = lower(plan)
    verify(plan, program)
    first = after(program.rows[0], ("0F1", "0SEND_F1>1", "2RECV_F1<1"), "2F0")
    second = after(program.rows[1], ("1RECV_F1<0",), "1SEND_F0>0")
    with pytest.raises(InvalidProgram, match=r"deadlock: rank 0 at 2F0 .* rank 1 at 0F1 waits for"):
        verify(plan, replace(program, rows=(first, second)))


def after(row: tuple[Instruction, ...], moved: tuple[str, ...], where: str) -> Row:
    """``row`` with some instructions after another one."""
    rest = [one for one in row if str(one) not in moved]
    found = [one for one in row if str(one) in moved]
    assert len(found) == len(moved)
    at = place(rest, where) + 1
    return tuple(rest[:at] + found + rest[at:])
