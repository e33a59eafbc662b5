"""The simulator runs the order of a plan: its times, its deadlocks, its delays."""

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import elaborate, make_stages, scheduled, small_problem, valid_plan
from profiles import examples

from stagewright.executor.simulation.simulate import Deadlock, simulate
from stagewright.formulations.checking.check import check
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Schedule, Stage
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost


def at_times(plan: PipelinePlan, times: dict[str, float]) -> PipelinePlan:
    """The plan with the actions in ``times`` at other starts, as long as before."""
    actions = [
        replace(
            e,
            start_seconds=times[e.action],
            finish_seconds=times[e.action] + e.finish_seconds - e.start_seconds,
        )
        if e.action in times
        else e
        for e in plan.actions
    ]
    return replace(plan, schedule=replace(plan.schedule, actions=tuple(actions)))


def two_stages(microbatches: int = 2) -> tuple[PipelineProblem, PipelinePlan]:
    """Stages on g0 and g1, with one microbatch after the other."""
    problem = small_problem(4, 4, microbatches)
    stages = make_stages((2, 4), (1, 1), ("split", "split"))
    return problem, valid_plan(problem, stages, in_flight=(1, 1))


@examples(80)
@given(st.one_of(scheduled(), elaborate()), st.randoms(use_true_random=False))
def test_a_tight_plan_runs_at_its_own_times(case, random) -> None:  # type: ignore[no-untyped-def]
    problem, plan = case
    actions = list(plan.actions)
    random.shuffle(actions)
    shuffled = replace(plan, schedule=replace(plan.schedule, actions=tuple(actions)))
    found = simulate(problem, shuffled)
    assert found.actions == shuffled.actions
    assert found.iteration_seconds == max(e.finish_seconds for e in actions)


@examples(80)
@given(st.one_of(scheduled(waits=True), elaborate(waits=True)))
def test_needless_waits_disappear(case: tuple[PipelineProblem, PipelinePlan]) -> None:
    problem, plan = case
    found = simulate(problem, plan)
    for ran, planned in zip(found.actions, plan.actions, strict=True):
        assert (ran.action, ran.device) == (planned.action, planned.device)
        assert ran.start_seconds <= planned.start_seconds
    tight = replace(plan, schedule=replace(plan.schedule, actions=found.actions))
    assert check(problem, tight) == ()
    assert simulate(problem, tight) == found


@examples(40)
@given(st.one_of(scheduled(), elaborate()), st.floats(1, 3), st.data())
def test_a_straggler_delays_and_its_slack_says_by_how_much(
    case: tuple[PipelineProblem, PipelinePlan], factor: float, data: st.DataObject
) -> None:
    problem, plan = case
    used = [name for stage in plan.stages for name in stage.devices]
    slow = data.draw(st.sampled_from(used))
    before = simulate(problem, plan)
    after = simulate(problem, plan, stragglers={slow: factor})
    added = (factor - 1) * (before.iteration_seconds - before.idle_seconds[slow])
    grown = after.iteration_seconds - before.iteration_seconds
    rounding = 1e-9 * after.iteration_seconds
    assert -rounding <= grown <= added + rounding
    assert min(before.slack_seconds.values()) >= -rounding
    if added <= before.slack_seconds[slow]:
        assert grown <= rounding
    for early, late in zip(before.actions, after.actions, strict=True):
        assert late.start_seconds >= early.start_seconds - rounding


def test_a_single_device_by_hand() -> None:
    layer = Layer("l", 1e6, (LayerCost(840, 1.0, 1e6, 1e6, 2.0),))
    problem = PipelineProblem(
        Chain("c", "test", 840, (layer,)), uniform_servers(1, 1, Link(1e9)), 3
    )
    plan = valid_plan(problem, [Stage((0, 1), ("s0g0",))])
    found = simulate(problem, plan, stragglers={"s0g0": 2.0})
    assert found.iteration_seconds == 18
    assert found.idle_seconds == {"s0g0": 0}
    assert found.slack_seconds == {"s0g0": 0}


def test_the_wait_for_the_other_stage_is_idle_time_and_slack() -> None:
    """F 1 s on both devices, B 2 s, transfers 1 s; two devices, one microbatch: F f F B b B."""
    layers = tuple(Layer(f"l{i}", 1e6, (LayerCost(840, 1.0, 0, 1e9, 2.0),)) for i in range(2))
    cluster = uniform_servers(1, 2, Link(1e9))
    problem = PipelineProblem(Chain("c", "test", 840, layers), cluster, 1)
    plan = valid_plan(problem, [Stage((0, 1), ("s0g0",)), Stage((1, 2), ("s0g1",))])
    found = simulate(problem, plan)
    assert found.iteration_seconds == 8
    assert found.idle_seconds == {"s0g0": 5, "s0g1": 5}
    assert found.slack_seconds == {"s0g0": 0, "s0g1": 0}


def test_turns_leave_slack_to_the_device_with_fewer_microbatches() -> None:
    problem = small_problem(2, 2, 3)
    plan = valid_plan(problem, make_stages((2,), (2,), ("round-robin",)))
    found = simulate(problem, plan)
    forward, backward = problem.compute_seconds(0, 2, [1])
    assert found.slack_seconds["g0"] == pytest.approx(0)
    assert found.slack_seconds["g1"] == pytest.approx(forward + backward)


def test_only_the_order_in_the_plan_matters() -> None:
    problem, plan = two_stages(3)
    stretched = [
        replace(e, start_seconds=5 * e.start_seconds + 1, finish_seconds=7 * e.finish_seconds + 1)
        for e in plan.actions
    ]
    found = simulate(problem, replace(plan, schedule=Schedule(tuple(stretched))))
    assert found.actions == plan.actions


def test_a_deadlock_on_one_device_prints_its_cycle() -> None:
    problem, plan = two_stages()
    with pytest.raises(Deadlock, match=r"^deadlock: (1[FB]0 on g1)( waits for 1[FB]0 on g1){2}$"):
        simulate(problem, at_times(plan, {"1B0": 0.0}))


def test_a_deadlock_across_devices_prints_its_cycle() -> None:
    """Stage 0 goes F0 B0 F1 B1, stage 1 wants F1 before B0."""
    problem, plan = two_stages()
    start = {e.action: e.start_seconds for e in plan.actions}
    with pytest.raises(Deadlock) as caught:
        simulate(problem, at_times(plan, {"1F1": start["1B0"] - 1e-6}))
    steps = str(caught.value).removeprefix("deadlock: ").split(" waits for ")
    assert steps[0] == steps[-1]
    assert set(steps) == {
        "1F1 on g1", "0SEND_F1 on g0", "0F1 on g0", "0B0 on g0", "1SEND_B0 on g1", "1B0 on g1",
    }  # fmt: skip
    assert ("1SEND_B0 on g1", "1B0 on g1") in pairwise(steps)


def test_a_deadlock_on_a_channel_prints_its_cycle() -> None:
    """The channel would carry the gradient before the activation that it depends on."""
    problem, plan = two_stages()
    with pytest.raises(Deadlock, match="1SEND_B0 on g1") as caught:
        simulate(problem, at_times(plan, {"1SEND_B0": 0.0}))
    assert "0SEND_F0 on g0" in str(caught.value)
    assert isinstance(caught.value, InvalidPlan)


@pytest.mark.parametrize("seconds", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("way", ["split", "round-robin"])
def test_actions_that_last_no_time_keep_their_order(
    way: Literal["split", "round-robin"], seconds: tuple[float, float]
) -> None:
    """Free transfers and computations: ties everywhere, listed backwards."""
    costs = (LayerCost(840, seconds[0], 1e6, 0.0, seconds[1]),)
    layers = tuple(Layer(f"l{i}", 0.0, costs) for i in range(2))
    problem = PipelineProblem(Chain("c", "test", 840, layers), uniform_servers(1, 4, Link(1e9)), 3)
    stages = [Stage((0, 1), ("s0g0", "s0g1"), way), Stage((1, 2), ("s0g2",))]
    plan = valid_plan(problem, stages)
    backwards = replace(plan, schedule=Schedule(plan.actions[::-1]))
    assert check(problem, backwards) == ()
    assert simulate(problem, backwards).actions == backwards.actions


@pytest.mark.parametrize("seconds", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
def test_parts_that_last_no_time_keep_their_order(seconds: tuple[float, float]) -> None:
    """Stages 0 and 2 share a device; forwards and transfers are free too."""
    costs = (LayerCost(840, 0.0, 1e6, 0.0, None, *seconds),)
    layers = tuple(Layer(f"l{i}", 0.0, costs) for i in range(3))
    problem = PipelineProblem(Chain("c", "test", 840, layers), uniform_servers(1, 2, Link(1e9)), 3)
    stages = [Stage((i, i + 1), (f"s0g{i % 2}",)) for i in range(3)]
    split = [(s, m) for s in range(3) for m in range(3)]
    plan = valid_plan(problem, stages, split=split)
    backwards = replace(plan, schedule=Schedule(plan.actions[::-1]))
    assert check(problem, backwards) == ()
    assert simulate(problem, backwards).actions == backwards.actions


def test_a_weight_gradient_before_its_input_gradient_is_a_deadlock() -> None:
    problem = small_problem(4, 4, 2, parts=True)
    stages = make_stages((2, 4), (1, 1), ("split", "split"))
    plan = valid_plan(problem, stages, in_flight=(1, 1), split=[(1, 0)])
    start = {e.action: e.start_seconds for e in plan.actions}
    message = r"^deadlock: (1[IW]0 on g1)( waits for 1[IW]0 on g1){2}$"
    with pytest.raises(Deadlock, match=message):
        simulate(problem, at_times(plan, {"1W0": start["1I0"] - 1e-6}))


def test_the_devices_of_a_group_start_together_though_one_is_busy_elsewhere() -> None:
    """The slow g0 has more to do for stage 0 while g1 would be free for stage 2."""
    problem = small_problem(4, 4, 3)
    stages = [Stage((0, 2), ("g0",)), Stage((2, 3), ("g1",)), Stage((3, 4), ("g0", "g1"))]
    found = simulate(problem, valid_plan(problem, stages), stragglers={"g0": 3.0})
    starts = {(e.action, e.device): e.start_seconds for e in found.actions}
    for m in range(3):
        assert starts[f"2F{m}", "g0"] == starts[f"2F{m}", "g1"]
        assert starts[f"2B{m}", "g0"] == starts[f"2B{m}", "g1"]


def test_what_is_handed_over_stays_on_its_device() -> None:
    """Two stages on the same two devices: the quick one waits for the slow one at the end only."""
    problem = small_problem(4, 4, 1)
    stages = [Stage((0, 2), ("g0", "g1")), Stage((2, 4), ("g0", "g1"))]
    found = simulate(problem, valid_plan(problem, stages), stragglers={"g1": 3.0})
    times = {(e.action, e.device): e for e in found.actions}
    for name in ("g0", "g1"):
        way = [times[text, name] for text in ("0F0", "1F0", "1B0", "0B0")]
        for one, other in pairwise(way):
            assert other.start_seconds == one.finish_seconds
    assert times["0REDUCE_GRAD", "g0"].start_seconds == times["0B0", "g1"].finish_seconds


def test_jitter_is_drawn_from_the_seed_and_has_mean_one() -> None:
    problem, plan = two_stages(4)
    runs = [simulate(problem, plan, jitter=0.5, seed=seed) for seed in range(100)]
    assert simulate(problem, plan, jitter=0.5, seed=0) == runs[0]
    assert len({run.iteration_seconds for run in runs}) == 100
    lasts = [
        sum(e.finish_seconds - e.start_seconds for e in actions)
        for actions in (plan.actions, *(run.actions for run in runs))
    ]
    assert sum(lasts[1:]) / 100 == pytest.approx(lasts[0], rel=0.05)
    # One microbatch at a time: the jittered iteration is a sum along the only path.
    assert runs[0].iteration_seconds == pytest.approx(lasts[1])


def test_the_devices_of_a_split_stage_wait_for_their_slowest() -> None:
    problem = small_problem(4, 4, 1)
    plan = valid_plan(problem, make_stages((2, 4), (2, 1), ("split", "split")))
    found = simulate(problem, plan, stragglers={"g1": 3.0})
    times = {(e.action, e.device): e for e in found.actions}
    slow = times["0F0", "g1"].finish_seconds
    assert slow == pytest.approx(3 * times["0F0", "g0"].finish_seconds)
    assert times["0SEND_F0", "g0"].start_seconds == slow


def test_each_device_of_the_last_stage_goes_on_from_its_own_forward() -> None:
    problem = small_problem(2, 2, 1)
    plan = valid_plan(problem, make_stages((2,), (2,), ("split",)))
    zigzag = sorted(plan.actions, key=lambda e: (e.device == "g0") == ("F" in e.action))
    found = simulate(problem, replace(plan, schedule=Schedule(tuple(zigzag))),
                     stragglers={"g1": 3.0})  # fmt: skip
    times = {(e.action, e.device): e for e in found.actions}
    for name in ("g0", "g1"):
        assert times["0B0", name].start_seconds == times["0F0", name].finish_seconds
    assert times["0REDUCE_GRAD", "g0"].start_seconds == times["0B0", "g1"].finish_seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jitter": -0.1}, "jitter must be finite and not negative"),
        ({"jitter": float("nan")}, "jitter must be finite and not negative"),
        ({"stragglers": {"g9": 2.0}}, "straggler 'g9' is not a device of 'small'"),
        ({"stragglers": {"g0": 0.0}}, "straggler 'g0': factor must be positive"),
        ({"stragglers": {"g0": -1.0}}, "straggler 'g0': factor must be finite and not negative"),
    ],
)
def test_options_out_of_range_are_refused(options, message: str) -> None:  # type: ignore[no-untyped-def]
    problem, plan = two_stages()
    with pytest.raises(InputError, match=message):
        simulate(problem, plan, **options)


def test_an_incomplete_plan_is_refused() -> None:
    problem, plan = two_stages()
    with pytest.raises(InvalidPlan, match="missing: "):
        simulate(problem, replace(plan, schedule=Schedule(plan.actions[1:])))
    with pytest.raises(InvalidPlan, match="digest: "):
        simulate(small_problem(4, 4, 2, memory_bytes=8e9), plan)
