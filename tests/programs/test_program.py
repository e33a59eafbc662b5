import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from program_text import parse_program
from training_plans import interleaved, one_f_one_b, plans, straight

from stagewright.executor.programs.lower import lower
from stagewright.executor.programs.program import (
    RECEIVES,
    SENDS,
    Instruction,
    Program,
    plan_devices,
    received,
    stages_on,
    transfers,
)
from stagewright.formulations.plans.actions import Action, ActionKind, parse_action
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
