"""Programs of plans between two losses: the rows by hand, and damage that is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import training_plans as make
from hypothesis import given
from profiles import examples
from program_text import parse_program

from stagewright.executor.programs.periodic import lower_any
from stagewright.executor.programs.program import (
    Instruction,
    InvalidProgram,
    PeriodicProgram,
    Program,
    ProgramRows,
)
from stagewright.executor.programs.verification.verify import verify
from stagewright.formulations.plans.actions import ActionKind, parse_action
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.documents.errors import InvalidPlan

F, UPDATE, REDUCE = ActionKind.FORWARD, ActionKind.UPDATE, ActionKind.REDUCE
Damage = Callable[[PeriodicProgram], PeriodicProgram]


def parallel(text: str, layers: int = 2) -> PipelinePlan:
    """Data parallelism on two devices, a stage per layer, one order for both."""
    order = [parse_action(word) for word in text.split()]
    stages = [Stage((i, i + 1), ("a", "b")) for i in range(layers)]
    return make.plan_in_order(stages, 1, {"a": order, "b": order}, begins="backward")


def text(rows: ProgramRows) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


def test_an_update_waits_as_long_as_it_may() -> None:
    program = lower_any(parallel("1I0 1W0 0I0 0W0 0F0 1F0"))
    assert isinstance(program, PeriodicProgram)
    last = "1I0 1W0 1REDUCE_GRAD 0I0 0W0 0REDUCE_GRAD 0UPDATE {}1UPDATE{}"
    assert text(program.segments[0]) == ["0F0 1F0"] * 2
    assert text(program.segments[1]) == [last.format("0F1 ", " 1F1")] * 2
    assert text(program.drains[0]) == [last.format("", "")] * 2
    assert (
        text(program.segment(3))
        == ["1I2 1W2 1REDUCE_GRAD 0I2 0W2 0REDUCE_GRAD 0UPDATE 0F3 1UPDATE 1F3"] * 2
    )
    assert text(program.drain(3))[0].startswith("1I2 1W2 1REDUCE_GRAD")


def test_all_reduces_are_in_the_plans_order_on_all_ranks() -> None:
    program = lower_any(parallel("2I0 1I0 0I0 0W0 1W0 2W0 0F0 1F0 2F0", 3))
    assert (
        text(program.segments[1])
        == [
            "2I0 1I0 0I0 0W0 0REDUCE_GRAD 1W0 1REDUCE_GRAD 2W0 2REDUCE_GRAD "
            "0UPDATE 0F1 1UPDATE 1F1 2UPDATE 2F1"
        ]
        * 2
    )


def test_a_planned_step_is_where_the_plan_has_it() -> None:
    """The second stage's step in the middle of the first's backward, as soon as it can be."""
    plan = parallel("1I0 1W0 0I0 0W0 0F0 1F0")
    program = lower_any(make.with_steps(plan))
    assert text(program.segments[1])[0] == (
        "1I0 1W0 1REDUCE_GRAD 0I0 1UPDATE 0W0 0REDUCE_GRAD 0UPDATE 0F1 1F1"
    )


def test_transfers_of_both_mini_batches_stay_in_one_order() -> None:
    stages = [Stage((0, 1), ("a",)), Stage((1, 2), ("b",))]
    orders = {
        name: [parse_action(word) for word in words.split()]
        for name, words in (("a", "0B0 0B1 0F0 0F1"), ("b", "1B0 1B1 1F0 1F1"))
    }
    plan = make.plan_in_order(stages, 2, orders, begins="backward")
    program = lower_any(plan)
    assert text(program.segments[1]) == [
        "0RECV_B0<1 0RECV_B1<1 0B0 0B1 0UPDATE 0F2 0SEND_F2>1 0F3 0SEND_F3>1",
        "1B0 1SEND_B0>0 1B1 1SEND_B1>0 1RECV_F2<0 1RECV_F3<0 1UPDATE 1F2 1F3",
    ]
    verify(plan, program)


@examples(60)
@given(make.plans(5, weights=["flush"], begins="backward"))
def test_random_orders_become_verified_programs(plan: PipelinePlan) -> None:
    for one in (plan, make.with_steps(plan)):
        verify(one, lower_any(one))


def test_what_a_plan_between_two_losses_excludes() -> None:
    plan = parallel("1B0 0B0 0F0 1F0")
    with pytest.raises(InvalidPlan, match=r"stages 0, 1 need each other's gradients"):
        lower_any(plan, [frozenset({0, 1})])
    with pytest.raises(InvalidPlan, match="'double-buffer' weights, a plan between two losses"):
        lower_any(replace(plan, weights="double-buffer"))


# --- Damage -----------------------------------------------------------------------------------


def damaged(change: Callable[[list[str]], list[str]], ranks: tuple[int, ...] = (0, 1)) -> Damage:
    """Change the words of the repeating rows of some ranks, and of the last drain alike."""

    def damage(program: PeriodicProgram) -> PeriodicProgram:
        def changed(rows: ProgramRows) -> ProgramRows:
            lines = [
                ",".join(change(line.split()) if r in ranks else line.split())
                for r, line in enumerate(text(rows))
            ]
            return parse_program("\n".join(lines), program.devices).rows

        segments = (program.segments[0], changed(program.segments[1]))
        return replace(program, segments=segments)

    return damage


def moved(word: str, before: str) -> Callable[[list[str]], list[str]]:
    def change(words: list[str]) -> list[str]:
        rest = [one for one in words if one != word]
        at = rest.index(before)
        return [*rest[:at], word, *rest[at:]]

    return change


def without(word: str) -> Callable[[list[str]], list[str]]:
    return lambda words: [one for one in words if one != word]


def renamed(word: str, name: str) -> Callable[[list[str]], list[str]]:
    return lambda words: [name if one == word else one for one in words]


DAMAGES: dict[str, tuple[str, Damage]] = {
    "a forward before its update": ("version", damaged(moved("1F1", "1UPDATE"))),
    "on one rank only": ("version", damaged(moved("1F1", "1UPDATE"), (1,))),
    "an update before its all-reduce": ("comes after", damaged(moved("0UPDATE", "0REDUCE_GRAD"))),
    "an all-reduce before the last gradient": (
        "comes after", damaged(moved("1REDUCE_GRAD", "1W0"))),
    "all-reduces in another order on a rank": (
        "collective 0", damaged(moved("1REDUCE_GRAD", "0UPDATE"), (1,))),
    "an update left out": ("comes after|version", damaged(without("1UPDATE"))),
    "an all-reduce left out": ("comes after", damaged(without("0REDUCE_GRAD"))),
    "a weight gradient left out": ("comes after|must work", damaged(without("0W0"))),
    "a forward left out": ("must work", damaged(without("1F1"))),
    "a forward of the same mini-batch": ("appears 2 times|version", damaged(renamed("1F1", "1F0"))),
    "a forward of a later mini-batch": ("is done when", damaged(renamed("1F1", "1F2"))),
    "no first forwards": (
        "must work", lambda program: replace(program, segments=(((), ()), program.segments[1]))),
    "no last backwards": (
        "must work", lambda program: replace(program, drains=(((), ()), ((), ())))),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused(name: str) -> None:
    plan = parallel("1I0 1W0 0I0 0W0 0F0 1F0")
    program = lower_any(plan)
    assert isinstance(program, PeriodicProgram)
    verify(plan, program)
    message, damage = DAMAGES[name]
    with pytest.raises(InvalidProgram, match=message):
        verify(plan, damage(program))


def test_the_program_of_a_single_window_is_refused() -> None:
    """A window's backwards are of forwards before it."""
    plan = parallel("1B0 0B0 0F0 1F0")
    rows = lower_any(plan).segments[1]
    with pytest.raises(InvalidPlan):
        verify(plan, Program(("a", "b"), rows))
    assert all(isinstance(one, Instruction) for row in rows for one in row)
