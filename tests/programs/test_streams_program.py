"""Programs with sub-streams: what waits for what, and damage that is refused."""

from dataclasses import replace
from typing import Any

import pytest
import training_plans as make
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from program_text import parse_program
from races import Clocks, in_two_streams

from stagewright.executor.programs.periodic import lower_any
from stagewright.executor.programs.program import (
    Instruction,
    InvalidProgram,
    PeriodicProgram,
    Row,
    waits,
)
from stagewright.executor.programs.verification.verify import verify
from stagewright.formulations.plans.actions import ActionKind, parse_action
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.documents.errors import InputError

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE


def window(plan: PipelinePlan) -> PeriodicProgram:
    program = lower_any(plan)
    assert isinstance(program, PeriodicProgram)
    return program


def alone(text: str, devices: str = "a") -> PipelinePlan:
    """A stage per layer; all weight gradients in the sub-stream."""
    order = [parse_action(word) for word in text.split()]
    stages = [Stage((i, i + 1), tuple(devices)) for i in range(1 + max(a.stage for a in order))]
    microbatches = 1 + max(a.microbatch or 0 for a in order)
    orders = dict.fromkeys(devices, order)
    return in_two_streams(make.plan_in_order(stages, microbatches, orders, begins="backward"))


def test_a_weight_gradient_waits_for_its_input_gradient_and_an_update_for_it() -> None:
    row = window(alone("1I0 0I0 1W0 0W0 0F0 1F0")).segments[1][0]
    words = [str(one) for one in row]
    assert words == ["1I0", "0I0", "1W0@sub", "0W0@sub", "0UPDATE", "0F1", "1UPDATE", "1F1"]
    awaited = {words[i]: words[e] for i, e in enumerate(waits(row)) if e is not None}
    assert awaited == {"1W0@sub": "1I0", "0W0@sub": "0I0", "0UPDATE": "0W0@sub"}


def test_gradients_of_a_stage_are_added_in_one_stream_at_a_time() -> None:
    """The whole backward of another microbatch adds to the same gradients."""
    row = window(alone("0I0 0B1 0W0 0I2 0W2 0B3 0F0 0F1 0F2 0F3")).segments[1][0]
    words = [str(one) for one in row]
    awaited = {words[i]: words[e] for i, e in enumerate(waits(row)) if e is not None}
    assert awaited == {"0W0@sub": "0B1", "0W2@sub": "0I2", "0B3": "0W2@sub"}


def test_an_all_reduce_follows_its_weight_gradients_into_the_sub_stream() -> None:
    row = window(alone("1I0 1W0 0B0 0F0 1F0", "ab")).segments[1][0]
    words = [str(one) for one in row]
    assert words[:3] == ["1I0", "1W0@sub", "1REDUCE_GRAD@sub"]
    awaited = {words[i]: words[e] for i, e in enumerate(waits(row)) if e is not None}
    assert awaited == {"1W0@sub": "1I0", "1UPDATE": "1REDUCE_GRAD@sub"}


# --- Random plans -----------------------------------------------------------------------------


def accesses(one: Instruction) -> list[tuple[Any, bool]]:
    """What an instruction reads (False) and writes (True), by the definitions of the actions."""
    s, m = one.action.stage, one.action.microbatch
    weights, gradients = ("weights", s), ("gradients", s)
    return {
        F: [(weights, False), (("kept", s, m), True)],
        B: [(weights, False), (("kept", s, m), True), (gradients, True)],
        I: [(weights, False), (("kept", s, m), True), (("handed over", s, m), True)],
        W: [(weights, False), (("handed over", s, m), True), (gradients, True)],
        REDUCE: [(gradients, True)],
        UPDATE: [(gradients, True), (weights, True)],
    }.get(one.action.kind, [])


def races(row: Row, repetitions: int = 2, dropped: int | None = None) -> list[str]:
    """Races of a row that is carried out again and again."""
    clocks = Clocks(dropped=() if dropped is None else (dropped,))
    events = waits(row)
    for _ in range(repetitions):
        for i, (one, event) in enumerate(zip(row, events, strict=True)):
            if one.stream is not None:
                clocks.now = 1
            if event is not None:
                clocks.wait(event)
            for datum, writes in accesses(one):
                clocks.access(datum, str(one), writes=writes)
            clocks.record(i)
            clocks.now = 0
    return clocks.races


@st.composite
def streamed_plans(draw: st.DrawFn) -> PipelinePlan:
    plan = draw(make.plans(5, weights=["flush"], begins="backward", max_microbatches=4))
    if draw(st.booleans()):
        plan = make.with_steps(plan)
    words = sorted({one.action for one in plan.actions if "W" in one.action})
    return in_two_streams(plan, draw(st.sets(st.sampled_from(words))) if words else ())


@examples(100)
@given(streamed_plans())
def test_random_plans_have_no_race_and_need_every_wait(plan: PipelinePlan) -> None:
    program = lower_any(plan)
    assert isinstance(program, PeriodicProgram)
    verify(plan, program)
    for row in (*program.segments[1], *program.drains[1]):
        assert races(row) == []
        for event in {one for one in waits(row) if one is not None}:
            assert races(row, dropped=event), f"{row[event]} is awaited in vain"


def test_one_stream_waits_for_nothing() -> None:
    plan = make.plan_in_order(
        [Stage((0, 1), ("a",))], 1, {"a": [parse_action(w) for w in ("0I0", "0W0", "0F0")]},
        begins="backward",
    )  # fmt: skip
    assert set(waits(window(plan).segments[1][0])) == {None}


# --- Damage -----------------------------------------------------------------------------------

DAMAGES = {
    "another stream than the plan's": ("1W0@sub", "1W0", "1W0 must be in the sub-stream"),
    "a stream that the plan lacks": ("2W0", "2W0@sub", "2W0@sub must be in the main stream"),
    "an all-reduce in the other stream": (
        "1REDUCE_GRAD@sub", "1REDUCE_GRAD", "1REDUCE_GRAD must be in the sub-stream"),
    "a weight gradient before its input gradient": (
        "1I0,1W0@sub", "1W0@sub,1I0", "1W0@sub in the sub-stream comes before 1I0"),
    "no update in the row": ("1UPDATE", "0UPDATE", "no 1UPDATE waits for 1W0@sub"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused(name: str) -> None:
    plan = alone("2I0 2W0 1I0 1W0 0I0 0W0 0F0 1F0 2F0", "ab")
    plan = in_two_streams(
        replace(plan, schedule=replace(plan.schedule, actions=tuple(
            replace(one, stream=None) for one in plan.actions))),
        {"1W0", "0W0"},
    )  # fmt: skip
    program = window(plan)
    verify(plan, program)
    old, new, message = DAMAGES[name]
    lines = "\n".join(",".join(map(str, row)) for row in program.segments[1])
    assert old in lines
    damaged = parse_program(lines.replace(old, new), program.devices).rows
    with pytest.raises(InvalidProgram, match=message):
        verify(plan, replace(program, segments=(program.segments[0], damaged)))


def test_only_weight_gradients_between_losses_are_in_sub_streams() -> None:
    stage = [Stage((0, 1), ("a",))]
    plan = make.plan_in_order(stage, 1, {"a": [parse_action(w) for w in ("0F0", "0I0", "0W0")]})
    plan = in_two_streams(plan)
    with pytest.raises(InvalidProgram, match="0W0 on a is in the sub-stream: only weight"):
        verify(plan, lower_any(plan))
    with pytest.raises(InputError, match="0F0: only weight gradients and their all-reduces"):
        Instruction(parse_action("0F0"), stream="sub")
