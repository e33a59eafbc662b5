"""Actions print and parse as text, in one spelling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.formulations.plans.actions import Action, ActionKind, parse_action
from stagewright.graphs.documents.errors import InputError

BARE = (ActionKind.REDUCE, ActionKind.UPDATE, ActionKind.RUN)
NUMBERS = st.integers(0, 999_999_999)
ACTIONS = st.one_of(
    st.builds(
        Action, NUMBERS, st.sampled_from([kind for kind in ActionKind if kind not in BARE]), NUMBERS
    ),
    st.builds(Action, NUMBERS, st.sampled_from(BARE)),
)


@given(ACTIONS)
def test_text_and_back(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(st.one_of(st.text(), st.from_regex(r"\d{0,3}(F|B|SEND_F|REDUCE_GRAD)\d{0,3}\s?")))
def test_what_parses_prints_the_same(text: str) -> None:
    try:
        action = parse_action(text)
    except InputError:
        return
    assert str(action) == text


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, ActionKind.FORWARD, 0)),
        ("1B13", Action(1, ActionKind.BACKWARD, 13)),
        ("10SEND_F2", Action(10, ActionKind.SEND_FORWARD, 2)),
        ("3SEND_B0", Action(3, ActionKind.SEND_BACKWARD, 0)),
        ("0REDUCE_GRAD", Action(0, ActionKind.REDUCE)),
        ("1I3", Action(1, ActionKind.INPUT_GRADIENT, 3)),
        ("1W3", Action(1, ActionKind.WEIGHT_GRADIENT, 3)),
        ("2RECV_F0", Action(2, ActionKind.RECEIVE_FORWARD, 0)),
        ("2RECV_B0", Action(2, ActionKind.RECEIVE_BACKWARD, 0)),
        ("4UPDATE", Action(4, ActionKind.UPDATE)),
        ("4STASH1", Action(4, ActionKind.STASH, 1)),
        ("4USE1", Action(4, ActionKind.USE, 1)),
        ("4DROP1", Action(4, ActionKind.DROP, 1)),
    ],
)
def test_the_spelling_of_the_schedule_files(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    ["", "F", "2F", "F0", "2X0", "2f0", "-1F0", "1F-1", "2F0 ", " 2F0", "2F0\n", "02F0", "2F00",
     "2SEND0", "2SEND_F", "2REDUCE_GRAD0", "\u0662F0", "2F" + 5000 * "1"],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_action(text)


def test_a_microbatch_belongs_to_all_but_a_reduce_and_an_update() -> None:
    with pytest.raises(InputError, match="a microbatch or version belongs to every action"):
        Action(0, ActionKind.FORWARD)
    with pytest.raises(InputError, match="0REDUCE_GRAD1: a microbatch"):
        Action(0, ActionKind.REDUCE, 1)
