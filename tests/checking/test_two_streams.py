"""Two streams of a device: the rule from the definition, broken plans, an integration in steps."""

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from streams import device_problem, plan_of_orders, random_order, two_stream_plan

from stagewright.formulations.checking.check import check
from stagewright.formulations.plans.actions import parse_action
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    PipelinePlan,
    ScheduledAction,
    Stage,
    load_plan,
    save_plan,
)
from stagewright.formulations.plans.plan_class import EVERY_PLAN, ONE_STREAM, class_of
from stagewright.formulations.plans.timing import kernel_shares
from stagewright.graphs.documents.errors import InputError, InvalidPlan

MAIN = "2I0 1I0 0I0 0UPDATE 0F0 1UPDATE 1F0 2UPDATE 2F0"
SUB = "2W0 0W0 1W0"
USUAL = "2I0 2W0 1I0 1W0 0I0 0W0 0UPDATE 0F0 1UPDATE 1F0 2UPDATE 2F0"

Damage = Callable[[PipelinePlan], PipelinePlan]


def problem() -> PipelineProblem:
    """Layers of F 2, I 2, W 2 s; beside I (half of the device) W runs at rate 1/2."""
    shares = [(0.75, 0.5, 1.0)] * 3
    return device_problem([(2.0, 2.0, 2.0)] * 3, shares, updates=(1.0, 1.0, 1.0))


def base() -> PipelinePlan:
    return two_stream_plan(problem(), MAIN, SUB)


def entry(plan: PipelinePlan, text: str) -> ScheduledAction:
    return next(one for one in plan.actions if one.action == text)


def changed(text: str, **changes: float | str | None) -> Damage:
    def damage(plan: PipelinePlan) -> PipelinePlan:
        actions = [replace(one, **changes) if one.action == text else one for one in plan.actions]
        schedule = replace(plan.schedule, actions=tuple(actions))
        return replace(plan, schedule=schedule, predicted=None)

    return damage


def test_by_hand() -> None:
    """2W0 beside 1I0 and 0I0 at half speed; 0W0 alone; 1W0 waits for the step, then at 1/4."""
    plan = base()
    assert check(problem(), plan) == ()
    times = {one.action: (one.start_seconds, one.finish_seconds) for one in plan.actions}
    assert times["2W0"] == (2, 6)
    assert times["0W0"] == (6, 8)
    assert times["0UPDATE"] == (8, 9)
    assert times["0F0"] == (9, 11)
    assert times["1W0"] == (8, 12.5)  # 1 s nothing, 2 s at 1/4, 1.5 s alone
    assert times["2F0"] == (16.5, 18.5)
    assert plan.predicted.iteration_seconds == 18.5
    assert plan.predicted.bubble == 0
    assert {one.action for one in plan.actions if one.stream} == {"0W0", "1W0", "2W0"}


DAMAGES: dict[str, tuple[str, Damage]] = {
    "ends before its work is done": ("duration", changed("2W0", finish_seconds=5.5)),
    "ends as if alone": ("duration", changed("2W0", finish_seconds=4.0)),
    "ends after its work is done": ("duration", changed("2W0", finish_seconds=6.5)),
    "ends where it does not run": ("duration", changed("0W0", finish_seconds=8.5)),
    "shifted to where it is slower": (
        "duration", changed("1W0", start_seconds=8.5, finish_seconds=13.0)),
    "shifted to before its gradient": (
        "dependency", changed("2W0", start_seconds=1.0, finish_seconds=5.5)),
    "two at once": ("overlap", changed("0W0", start_seconds=5.5, finish_seconds=7.75)),
    "in the main stream": ("overlap", changed("2W0", stream=None)),
    "in the main stream, as long as there": (
        "overlap", changed("2W0", stream=None, finish_seconds=4.0)),
    "an input gradient beside": ("stream", changed("1I0", stream="sub")),
    "a forward beside": ("stream", changed("1F0", stream="sub")),
    "a step beside": ("stream", changed("1UPDATE", stream="sub")),
    "a step before its gradient": (
        "dependency", changed("1UPDATE", start_seconds=11.0, finish_seconds=12.0)),
    "called forward first": ("stream", lambda plan: replace(
        plan, schedule=replace(plan.schedule, begins="forward"))),
    "busier than it is": ("predicted", lambda plan: replace(
        plan, predicted=replace(plan.predicted, bubble=0.1))),
    "other shares": ("digest", lambda plan: replace(plan, digest=device_problem(
        [(2.0, 2.0, 2.0)] * 3, [(0.5, 0.5, 1.0)] * 3, updates=(1.0,) * 3).digest)),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_rejected(name: str) -> None:
    rule, damage = DAMAGES[name]
    assert rule in {one.rule for one in check(problem(), damage(base()))}


def test_shares_belong_to_the_problem() -> None:
    """The same plan beside larger kernels: its weight gradients are slower."""
    larger = device_problem([(2.0, 2.0, 2.0)] * 3, [(0.75, 0.75, 1.0)] * 3, updates=(1.0,) * 3)
    plan = replace(base(), digest=larger.digest)
    assert "duration" in {one.rule for one in check(larger, plan)}
    unknown = device_problem([(2.0, 2.0, 2.0)] * 3, [(None,) * 3] * 3, updates=(1.0,) * 3)
    assert check(unknown, replace(base(), digest=unknown.digest))
    assumed = replace(unknown, assumed_share=0.5)
    assert assumed.digest != unknown.digest
    assert check(assumed, two_stream_plan(assumed, MAIN, SUB)) == ()


def test_classes_say_how_many_streams() -> None:
    two, one = class_of(base()), class_of(two_stream_plan(problem(), USUAL, ""))
    assert (two.streams, one.streams) == (2, 1)
    assert EVERY_PLAN.contains(two)
    assert not ONE_STREAM.contains(two)
    assert ONE_STREAM.contains(one)
    assert "one stream on every device" in str(ONE_STREAM)


def test_a_plan_is_read_as_it_was_written(tmp_path) -> None:
    assumed = device_problem([(2.0, 2.0, 2.0)] * 3, [(None, None, None)] * 3, assumed=0.5)
    plan = two_stream_plan(assumed, "2I0 1I0 0I0 0F0 1F0 2F0", SUB)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert plan.assumed_share == 0.5


def test_orders_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(InvalidPlan, match="the streams wait for each other"):
        two_stream_plan(problem(), "2I0 1I0 0I0 1W0 0UPDATE 0F0 1UPDATE 1F0 2UPDATE 2F0 2W0", "0W0")
    with pytest.raises(InputError, match="lacks 1W0"):
        two_stream_plan(problem(), MAIN, "2W0 0W0")


def test_devices_that_split_a_weight_gradient_run_the_same_stages() -> None:
    """On both devices of a replicated stage it runs at the same speed only then."""
    wide = device_problem([(2.0, 2.0, 2.0)] * 2, [(0.5,) * 3] * 2, devices=2)
    assert wide.most_replicas(0, 2) == 1  # round-robin replicas
    pair = ("s0g0", "s0g1")
    alike = [Stage((i, i + 1), pair, "round-robin") for i in range(2)]
    assert stream_faults(wide, alike) == set()
    odd = [Stage((0, 1), pair), Stage((1, 2), ("s0g0",))]
    assert "stream" in stream_faults(wide, odd)


def stream_faults(wide: PipelineProblem, stages: list[Stage]) -> set[str]:
    """The rules of streams that a plan with 0W0 in the sub-stream breaks."""
    names = [(text, name) for s, stage in enumerate(stages) for name in stage.runners(0)
             for text in (f"{s}I0", f"{s}W0", f"{s}F0")]  # fmt: skip
    actions = tuple(
        ScheduledAction(name, text, 0.0, 1.0, stream="sub" if text == "0W0" else None)
        for text, name in names
    )
    one = two_stream_plan(problem(), MAIN, SUB)
    plan = replace(
        one, digest=wide.digest, stages=tuple(stages), layers=None,
        schedule=replace(one.schedule, actions=actions),
    )  # fmt: skip
    return {found.rule for found in check(wide, plan)} & {"stream", "replicas"}


# --- An integration in small steps says the same -------------------------------------------------

STEP = Fraction(1, 16)


def work_done(plan: PipelinePlan, given: PipelineProblem, text: str) -> Fraction:
    """Seconds of work of a weight gradient, step by step; all times must be multiples of STEP."""
    shares = [kernel_shares(given, stage) for stage in plan.stages]
    own, done = entry(plan, text), Fraction(0)
    at, sub = Fraction(own.start_seconds), shares[parse_action(text).stage][parse_action(text).kind]
    while at < own.finish_seconds:
        main = [
            shares[parse_action(one.action).stage][parse_action(one.action).kind]
            for one in plan.actions
            if one.stream is None and one.start_seconds <= at < one.finish_seconds
        ]
        beside = Fraction(max(main, default=0.0))
        done += STEP * min(Fraction(1), (1 - beside) / Fraction(sub))
        at += STEP
    return done


@st.composite
def devices(draw: st.DrawFn) -> PipelineProblem:
    count = draw(st.integers(1, 3))
    seconds = st.integers(0, 3).map(float)
    # Rates are 1, 1/2 and 0, so that all times are multiples of a small step.
    share = st.sampled_from([(0.5, 0.5, 1.0), (1.0, 0.5, 0.5), (0.5, 1.0, 1.0), (0.5, 0.5, 0.5)])
    return device_problem(
        draw(st.lists(st.tuples(seconds, seconds, seconds), min_size=count, max_size=count)),
        draw(st.lists(share, min_size=count, max_size=count)),
        draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=count, max_size=count)),
        draw(st.integers(1, 2)),
    )


@examples(40)
@given(devices(), st.randoms(use_true_random=False))
def test_an_integration_in_steps_agrees(given_problem: PipelineProblem, chance: random.Random):
    for main, sub in (random_order(given_problem, chance) for _ in range(5)):
        try:
            plan = plan_of_orders(given_problem, main, sub)
        except InvalidPlan:  # the streams wait for each other
            continue
        assert check(given_problem, plan) == ()
        for one in (one for one in plan.actions if one.stream):
            right = Fraction(given_problem.gradient_seconds(
                *plan.stages[parse_action(one.action).stage].layers, [0])[1])  # fmt: skip
            assert work_done(plan, given_problem, one.action) == right
            late = chance.choice((-0.5, 0.5, 1.0))
            moved = changed(one.action, finish_seconds=one.finish_seconds + late)(plan)
            if one.finish_seconds + late < one.start_seconds:
                continue
            differs = work_done(moved, given_problem, one.action) != right
            found = {v.rule for v in check(given_problem, moved)}
            assert "duration" in found or not differs
