"""Makespans with several stages on a device and split backwards, against every order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from makespan_oracle import brute_force_makespan, optimal_timetable
from profiles import examples
from strategies import random_makespan, random_placed_makespan

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.pipelines.blocks import blocks_of, timetable_of
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.pipelines.makespan_models import ByIntervals
from stagewright.formulations.pipelines.windows import order_of_times
from stagewright.formulations.plans.actions import parse_action
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT
from stagewright.formulations.schedules.order import Order
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.pipelines.forward_backward import dispatch, improve, rules_of
from stagewright.solvers.pipelines.list_scheduling import (
    LIST_KINDS,
    best_list_schedule,
    list_schedule,
    schedule_order,
)
from stagewright.solvers.pipelines.scheduling import solve_schedule

LIMITS = Limits(seconds=20, threads=2)
SLACK = 1 + 1e-9

quick = examples(40)

# Two stages on each of two devices, in the shape of a V, and split backwards.
PLACED = MakespanProblem(
    microbatches=3,
    forward=(2.0, 3.0, 2.0, 1.0),
    backward=(3.0, 2.0, 4.0, 2.0),
    send_forward=(1.0, 0.0, 2.0),
    send_backward=(2.0, 0.0, 1.0),
    reduce=(5.0, 0.0, 3.0, 0.0),
    in_flight=(3, 2, 2, 2),
    device=(0, 1, 1, 0),
    weight_gradient=(2.0, 1.0, 3.0, 1.0),
)


INTERLOCKED = ("0F0", "0I0", "0F1", "0W0", "0I1", "0W1")  # F of 1 between I and W of 0


def ones(**changes):
    """Two stages on one device, one microbatch, everything takes 1; the sends none."""
    problem = MakespanProblem(
        microbatches=1,
        forward=(1.0, 1.0),
        backward=(1.0, 1.0),
        send_forward=(0.0,),
        send_backward=(0.0,),
        reduce=(0.0, 0.0),
        in_flight=(1, 1),
        device=(0, 0),
    )
    return replace(problem, **changes)


# The oracle


# The next forward waits for a weight gradient that starts and ends when the forward starts.
INSTANT_WEIGHT_GRADIENTS = MakespanProblem(
    2, (1.0, 1.0), (1.0, 1.0), (0.0,), (0.0,), (0.0, 0.0), (1, 1), (0, 0), (0.0, 0.0)
)


@quick
@given(random_makespan())
def test_the_timetable_is_as_long_as_the_oracle_says(problem):
    timetable = optimal_timetable(problem)
    assert problem.evaluate(timetable) == pytest.approx(brute_force_makespan(problem))


def test_the_oracle_by_hand():
    # One device has all the work; W of stage 1 waits until the end, and its all-reduce does too.
    problem = ones(weight_gradient=(1.0, 1.0), reduce=(3.0, 0.0))
    timetable = optimal_timetable(problem)
    assert problem.evaluate(timetable) == 5 + 3
    # Of two microbatches the second F fits between I and W only if two may be in flight.
    two = ones(microbatches=2, device=(0, 1), weight_gradient=(4.0, 4.0))
    assert problem.evaluate(timetable) < two.evaluate(optimal_timetable(two))
    apart = replace(two, in_flight=(2, 2))
    assert apart.evaluate(optimal_timetable(apart)) < two.evaluate(optimal_timetable(two))


# The solvers


@quick
@given(random_placed_makespan())
def test_intervals_reach_the_optimum(problem):
    optimum = problem.evaluate(optimal_timetable(problem))
    model = ByIntervals(problem, best_list_schedule(problem)[1])
    answer = solve(model.apply(), limits=LIMITS)
    assert answer.status is Status.OPTIMAL
    assert answer.objective == optimum
    assert problem.evaluate(model.invert(answer.values)) == optimum


@examples(60)
@given(random_placed_makespan())
def test_no_bound_exceeds_the_optimum(problem):
    optimum = problem.evaluate(optimal_timetable(problem))
    for bound in schedule_bounds(problem):
        assert bound.seconds <= optimum * SLACK, bound.proved_by


@quick
@given(random_placed_makespan(max_stages=2, max_microbatches=5, max_devices=1))
def test_bounds_of_one_device_hold_with_more_microbatches(problem):
    result = solve_schedule(problem, "optimal", LIMITS)
    assert result.status is Status.OPTIMAL
    assert max(bound.seconds for bound in result.bounds) <= result.cost * SLACK


@quick
@given(random_placed_makespan())
def test_list_schedules_keep_every_rule(problem):
    optimum = problem.evaluate(optimal_timetable(problem))
    for kind in LIST_KINDS:
        timetable = list_schedule(problem, kind)
        if timetable is None:
            assert kind in ("gpipe", "1f1b")
        else:
            assert problem.evaluate(timetable) * SLACK >= optimum


@quick
@given(random_placed_makespan(max_stages=4, max_microbatches=4), st.sampled_from(LIST_KINDS))
@example(INSTANT_WEIGHT_GRADIENTS, "pe")
def test_the_order_of_a_timetable_gives_it_again(problem, kind):
    timetable = list_schedule(problem, kind)
    if timetable is not None:
        again = schedule_order(problem, order_of_times(problem, timetable))
        assert problem.evaluate(again) == problem.evaluate(timetable)


@quick
@given(random_placed_makespan(max_stages=4, max_microbatches=4), st.integers(0, 2**31))
def test_dispatch_keeps_every_rule(problem, seed):
    blocks, random = blocks_of(problem), np.random.default_rng(seed)
    priority = random.random((len(blocks.durations), problem.microbatches))
    starts = dispatch(rules_of(blocks), priority, random.random())
    problem.evaluate(timetable_of(problem, starts))


@examples(20)
@given(random_placed_makespan(max_stages=4, max_microbatches=5))
def test_improvement_never_worsens(problem):
    incumbent = list_schedule(problem, "eager")
    better = improve(problem, incumbent, target=0.0, limits=Limits(0.02))
    assert problem.evaluate(better) <= problem.evaluate(incumbent)


def test_a_v_of_stages_is_solved():
    result = solve_schedule(PLACED, "optimal", LIMITS)
    assert result.status is Status.OPTIMAL
    assert result.cost == PLACED.evaluate(result.timetable)
    plans = result.bounds[0].plans
    assert (plans.sharing, plans.split_backward) == ("groups", True)
    assert plans.contains(DISJOINT_SPLIT)


def test_interleaving_is_optimal_for_equal_stages():
    stages, microbatches = 4, 4
    problem = MakespanProblem(
        microbatches=microbatches,
        forward=(1.0,) * stages,
        backward=(2.0,) * stages,
        send_forward=(0.0,) * 3,
        send_backward=(0.0,) * 3,
        reduce=(0.0,) * stages,
        in_flight=(4,) * stages,
        device=(0, 1, 0, 1),
    )
    result = solve_schedule(problem, "1f1b", LIMITS)
    assert result.status is Status.OPTIMAL  # by the busiest device's bound
    assert result.cost == 2 * 3 * microbatches + 3
    assert solve_schedule(replace(problem, in_flight=(1,) * 4), "1f1b", LIMITS).timetable is None
    assert solve_schedule(replace(problem, microbatches=3), "1f1b", LIMITS).timetable is None


# Relations


@examples(25)
@given(random_placed_makespan())
def test_split_backwards_never_take_longer_than_whole_ones(problem):
    weights = problem.weight_gradient or (1.0,) * problem.stages
    split = replace(problem, weight_gradient=weights)
    joined = np.add(problem.backward, weights)
    whole = replace(problem, backward=tuple(joined.tolist()), weight_gradient=None)
    costs = [solve_schedule(one, "optimal", LIMITS).cost for one in (split, whole)]
    assert costs[0] <= costs[1] * SLACK


@examples(25)
@given(random_makespan(max_microbatches=2))
def test_a_device_for_each_stage_is_never_worse_than_one_for_all(problem):
    nothing = (0.0,) * (problem.stages - 1)
    apart = replace(problem, send_forward=nothing, send_backward=nothing)
    together = replace(apart, device=(0,) * problem.stages)
    costs = [solve_schedule(one, "optimal", LIMITS).cost for one in (apart, together)]
    assert costs[0] <= costs[1] * SLACK
    work = sum(problem.forward) + sum(problem.backward)
    assert costs[1] * SLACK >= problem.microbatches * work


# Broken timetables and problems


STARTS = ("forward", "backward", "weight_gradient", "send_forward", "send_backward", "reduce")


@pytest.mark.parametrize("shift", [-1e3, 1e3, np.nan])
@pytest.mark.parametrize("name", STARTS)
def test_every_start_that_is_moved_far_is_rejected(name, shift):
    problem = replace(PLACED, reduce=(5.0, 1.0, 3.0, 1.0))  # something follows every block
    timetable = list_schedule(problem, "eager")
    starts = getattr(timetable, name)
    for place in np.ndindex(starts.shape):
        broken = starts.copy()
        broken[place] += shift
        if (name, shift) == ("reduce", 1e3):
            late = problem.evaluate(replace(timetable, reduce=broken))
            assert late > problem.evaluate(timetable) + 900
        else:
            with pytest.raises(InvalidPlan):
                problem.evaluate(replace(timetable, **{name: broken}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Stage 1's forward in the middle of stage 0's, on the same device.
        ({"forward": [[0.0], [0.5]], "send_forward": [[0.5]]}, "SEND_F starts before F"),
        ({"forward": [[0.0], [4.0]], "backward": [[6.0], [5.0]]}, "SEND_B starts before next"),
        ({"weight_gradient": [[5.0], [2.5]]}, "W starts before I ends"),
        ({"weight_gradient": [[4.0], [3.0]]}, "device 0: 1W0 starts before 0I0 ends"),
        ({"reduce": [2.0, 6.0]}, "all-reduce starts before the last"),
        ({"weight_gradient": None}, "backwards are split"),
    ],
)
def test_what_is_broken_is_named(changes, message):
    problem = ones(weight_gradient=(1.0, 1.0), reduce=(2.0, 2.0))
    timetable = optimal_timetable(problem)
    arrays = {
        "forward": np.array([[0.0], [1.0]]),
        "send_forward": np.array([[1.0]]),
        "backward": np.array([[3.0], [2.0]]),
        "send_backward": np.array([[3.0]]),
        "weight_gradient": np.array([[4.0], [5.0]]),
        "reduce": np.array([5.0, 6.0]),
    }
    timetable = replace(timetable, **arrays)
    assert problem.evaluate(timetable) == 8
    changed = {n: v if v is None else np.array(v) for n, v in changes.items()}
    with pytest.raises(InvalidPlan, match=message):
        problem.evaluate(replace(timetable, **changed))


def test_weight_gradients_count_as_in_flight():
    one = MakespanProblem(2, (1.0,), (1.0,), (), (), (0.0,), (2,), weight_gradient=(1.0,))
    timetable = schedule_order(one, Order((tuple(map(parse_action, INTERLOCKED)),)))
    assert one.evaluate(timetable) == 6
    with pytest.raises(InvalidPlan, match="2 microbatches in flight, the limit is 1"):
        replace(one, in_flight=(1,)).evaluate(timetable)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": (0,)}, "device needs 2 values"),
        ({"device": (1, 0)}, r"device\[0\] must be an integer from 0 to 0"),
        ({"device": (0, 2)}, "in order of first use"),
        ({"device": (0, 0.5)}, "an integer"),
        ({"send_forward": (1.0,)}, "stages 0 and 1 must take no time"),
        ({"weight_gradient": (1.0,)}, "weight_gradient needs 2 values"),
        ({"weight_gradient": (1.0, -1.0)}, "not negative"),
    ],
)
def test_problems_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(InputError, match=message) as error:
        ones(**changes)
    assert "\n" not in str(error.value)


# The bounds by hand


def found(problem):
    return {bound.proved_by: bound.seconds for bound in schedule_bounds(problem)}


def test_a_device_does_all_its_stages():
    # Device 0 has stages 0 and 3, 3 * (2 + 3 + 2 and 1 + 2 + 1) of work with W; stage 3 has no
    # all-reduce to wait for. Device 1 starts after F of 2 and a transfer of 1, its work is
    # 3 * (3 + 2 + 1 and 2 + 4 + 3), or 3 * (3 + 2 and 2 + 4) until its last I, after which follow
    # at least a transfer of 2, I of 3, W of 2 and the all-reduce of 5.
    assert found(replace(PLACED, in_flight=(3,) * 4))["busiest device"] == 3 + 3 * 15
    # Without W until the last I: 3 + 33 + 12 = 48, as long as with it.
    lighter = replace(PLACED, weight_gradient=(2.0, 0.0, 0.0, 1.0))
    assert found(lighter)["busiest device"] == 3 + 33 + 2 + 3 + 2 + 5


def test_a_slot_is_held_until_the_weight_gradient_ends():
    # Two stages of F = I = W = 1 on two devices, one slot: F0 F1 I1 I0 W0 in turn.
    problem = ones(microbatches=3, device=(0, 1), weight_gradient=(1.0, 1.0))
    assert found(problem)["in-flight slots"] == 3 * 5
    assert problem.evaluate(optimal_timetable(problem)) == 15


def test_weight_gradients_fill_the_drain():
    # Stage 0 of two sends 1 of 3 microbatches ahead: between F and I lie 1 + 3 + 4 + 4 + 3 = 15.
    # Until the last W it works 3 * (1 + 4 + 2) and waits 15 - 1 at the start and at the end.
    problem = ones(
        microbatches=3,
        forward=(1.0, 4.0),
        backward=(4.0, 4.0),
        send_forward=(3.0,),
        send_backward=(3.0,),
        device=(0, 1),
        weight_gradient=(2.0, 2.0),
    )
    assert found(problem)["warm-up and drain"] == 3 * 7 + 14 + 14
    # With two slots, one other W and I are in the last wait; without W until the last I, which W
    # of 2 follows: 3 * 5 + (15 - 2) + (15 - 1 - 4) + 2 = 40, as 3 * 7 + (15 - 2) + (15 - 1 - 6).
    two = replace(problem, in_flight=(2, 2))
    assert found(two)["warm-up and drain"] == 42
