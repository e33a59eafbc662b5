"""The makespan problem with memory over time and other objectives, against brute force."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makespan_oracle import optimal_timetable
from memory_oracle import least_cost
from profiles import examples
from strategies import random_memory_makespan

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.pipelines.bounds.memory import ROUNDS
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable, memory_excess
from stagewright.formulations.pipelines.makespan_models import ByIntervals
from stagewright.formulations.schedules.order import F
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.solvers.backends.backend import solve, solve_intervals
from stagewright.solvers.pipelines.list_scheduling import schedule_order
from stagewright.solvers.pipelines.rows.annealing import MEAN, anneal_rows
from stagewright.solvers.pipelines.rows.kernels import SPREAD, time_rows
from stagewright.solvers.pipelines.rows.rules import drawn_rule
from stagewright.solvers.pipelines.rows.search import RowSearch, run_together
from stagewright.solvers.pipelines.scheduling import generated, solve_schedule

LIMITS = Limits(seconds=20, threads=2)
SLACK = 1 + 1e-9

quick = examples(40)


def line(microbatches, **changes):
    """Two stages on two devices; F, I, W take 1 and a microbatch takes 2, given back in halves."""
    problem = MakespanProblem(
        microbatches=microbatches,
        forward=(1.0, 1.0),
        backward=(1.0, 1.0),
        send_forward=(0.0,),
        send_backward=(0.0,),
        reduce=(0.0, 0.0),
        in_flight=(microbatches,) * 2,
        weight_gradient=(1.0, 1.0),
        saved=((2.0, 1.0, 1.0),) * 2,
        memory=(4.0, 4.0),
    )
    return replace(problem, **changes)


# F F . I F I W W W F ... on the first device: by hand, memory 2, 4, 4, 3, ...
HAND = Timetable(
    forward=np.array([[0.0, 1.0], [1.0, 3.0]]),
    backward=np.array([[3.0, 5.0], [2.0, 4.0]]),
    send_forward=np.array([[1.0, 2.0]]),
    send_backward=np.array([[3.0, 5.0]]),
    reduce=np.array([7.0, 7.0]),
    weight_gradient=np.array([[4.0, 6.0], [5.0, 6.0]]),
)


# The problem


def test_evaluation_by_hand():
    problem = line(2)
    assert problem.evaluate(HAND) == 7
    assert replace(problem, objective="span").evaluate(HAND) == 7
    moved = replace(
        HAND,
        forward=np.array([[0.5, 1.5], [1.5, 3.5]]),
        send_forward=np.array([[1.5, 2.5]]),
        backward=np.array([[3.5, 5.5], [2.5, 4.5]]),
        send_backward=np.array([[3.5, 5.5]]),
        weight_gradient=np.array([[4.5, 6.5], [5.5, 6.5]]),
        reduce=np.array([7.5, 7.5]),
    )
    assert HAND.span(problem) == 7
    assert replace(problem, reduce=(0.0, 2.0)).evaluate(moved) == 9.5
    span = replace(problem, objective="span")
    assert span.evaluate(moved) == 7  # 0.5 to 7.5 and 1.5 to 7.5
    assert replace(span, reduce=(0.0, 2.0)).evaluate(moved) == 8  # 1.5 to 9.5


def test_memory_is_named_with_device_and_time():
    with pytest.raises(InvalidPlan, match="device 0: 4 in memory at 1, the limit is 3"):
        line(2, memory=(3.0, 4.0)).evaluate(HAND)
    # Stage 1 starts its second forward when the first I has ended: 1 + 2.
    with pytest.raises(InvalidPlan, match="device 1: 3 in memory at 3, the limit is 2"):
        line(2, memory=(4.0, 2.0)).evaluate(HAND)
    assert line(2, memory=(4.0, 3.0)).evaluate(HAND) == 7


def test_directions_of_a_channel():
    """Two microbatches on their way in both directions at once."""
    problem = line(2, send_forward=(2.0,), send_backward=(2.0,))
    timetable = replace(
        HAND,
        forward=np.array([[0.0, 2.0], [3.0, 5.5]]),
        send_forward=np.array([[1.0, 3.5]]),
        backward=np.array([[7.0, 9.5], [4.0, 6.5]]),
        send_backward=np.array([[5.0, 7.5]]),
        weight_gradient=np.array([[8.0, 10.5], [7.5, 8.5]]),
        reduce=np.array([11.5, 9.5]),
    )
    with pytest.raises(InvalidPlan, match="channel 0-1: SEND_B0 starts before SEND_F1 ends"):
        problem.evaluate(timetable)
    assert replace(problem, duplex="full").evaluate(timetable) == 11.5


@quick
@given(random_memory_makespan(), st.integers(0, 2**31))
def test_memory_in_use_against_a_clock(problem, seed):
    """At every instant, from the definition."""
    random = np.random.default_rng(seed)
    unlimited = replace(problem, memory=tuple(1e9 for _ in problem.memory))
    search = RowSearch(unlimited, seed)
    search._dispatch(drawn_rule(*search.sizes, random))
    search.first()
    times = search.timetable()
    last = times.last_computation + np.array(problem.last_computation)[:, None]
    early = times.backward + np.array(problem.backward)[:, None]
    broken = []
    for d, limit in enumerate(problem.memory):
        for now in np.unique(times.forward):
            used = 0.0
            for s in problem.stages_on(d):
                taken, first, rest = problem.saved[s]
                for m in range(problem.microbatches):
                    used += taken * (times.forward[s, m] <= now)
                    if problem.is_split:
                        used -= first * (early[s, m] <= now) + rest * (last[s, m] <= now)
                    else:
                        used -= taken * (last[s, m] <= now)
            if used > limit:
                broken.append((d, now))
    excess = memory_excess(problem, times)
    assert (excess is None) == (not broken)
    if excess is not None:
        assert excess[:2] == broken[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"saved": ((2.0, 1.0, 1.0),)}, "saved needs 2 values, got 1"),
        ({"memory": ()}, "memory needs 2 values, got 0"),
        ({"memory": (4.0, 1.0)}, r"memory\[1\] must be at least 2.0, one microbatch"),
        ({"saved": ((2.0, 1.0, 1.0), (2.0, 1.0, 0.0))}, r"saved\[1\] must give back 2.0"),
        ({"saved": ((2.0, 1.0, 1.0), (2.0, 2.0))}, r"saved\[1\] needs 3 values, got 2"),
        ({"saved": ((2.0, 3.0, -1.0),) * 2}, r"saved\[0\]"),
        ({"objective": "time"}, "objective must be makespan or span, got 'time'"),
        ({"duplex": "simplex"}, "duplex must be half or full, got 'simplex'"),
    ],
)
def test_bad_input_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        line(2, **changes)


# The optimum


@quick
@given(random_memory_makespan())
def test_both_oracles_agree_on_makespans(problem):
    problem = replace(problem, objective="makespan")
    assert problem.evaluate(optimal_timetable(problem)) == least_cost(problem)


@examples(60)
@given(random_memory_makespan(max_microbatches=4))
def test_no_bound_exceeds_the_optimum(problem):
    optimum = least_cost(problem)
    for bound in schedule_bounds(problem):
        assert bound.seconds <= optimum * SLACK, bound.proved_by


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_microbatches_that_fill_the_memory_pass_one_after_another(objective):
    # F, two stages on, F I, then I and W: 5 seconds each, and nothing is given back before W.
    problem = line(3, memory=(2.0, 2.0), saved=((2.0, 0.0, 2.0),) * 2, objective=objective)
    assert dict((b.proved_by, b.seconds) for b in schedule_bounds(problem))[ROUNDS] == 15
    assert solve_schedule(problem, "optimal", LIMITS).cost == 15


@quick
@given(random_memory_makespan())
def test_intervals_reach_the_optimum(problem):
    search = RowSearch(problem, seed=0)
    search.first()
    model = ByIntervals(problem, search.timetable())
    answer = solve(model.apply(), limits=LIMITS)
    assert answer.status is Status.OPTIMAL
    assert answer.objective == least_cost(problem)
    assert problem.evaluate(model.invert(answer.values)) == answer.objective


@examples(20)
@given(random_memory_makespan())
def test_solutions_are_optimal(problem):
    result = solve_schedule(problem, "optimal", Limits(seconds=1, threads=2))
    assert result.cost == problem.evaluate(result.timetable)
    if result.status is Status.OPTIMAL:
        assert result.cost == least_cost(problem)


# The searches


@quick
@given(random_memory_makespan(max_stages=5, max_microbatches=5, max_devices=3), st.integers(0, 99))
def test_rows_of_any_rule_keep_every_limit(problem, seed):
    search, random = RowSearch(problem, seed), np.random.default_rng(seed)
    search._dispatch(drawn_rule(*search.sizes, random).changed(search.count, random))
    search.first()
    assert problem.evaluate(search.timetable()) * SLACK >= search.cost * (problem.duplex == "full")


@quick
@given(random_memory_makespan(max_stages=5, max_microbatches=5, max_devices=3), st.integers(0, 99))
def test_annealed_rows_keep_every_limit_and_are_no_worse(problem, seed):
    search = RowSearch(problem, seed)
    search.first()
    before = search.best_cost
    rows = search.best.copy()
    found = anneal_rows(search.times, rows, search.bounds, (1.0, 0.01), 200, search.random)
    timed = time_rows(search.times, rows, search.bounds, search.starts)
    cost = search._objective()
    assert found == pytest.approx(cost + MEAN * (timed - cost) / SPREAD, rel=1e-6)
    search.best[:] = rows
    assert problem.evaluate(search.timetable()) >= 0
    search._annealed(rows, 0.01)
    search._shifted(iter([True] * 5 + [False]).__next__)
    assert search.best_cost <= before
    problem.evaluate(search.timetable())


@examples(5)
@given(random_memory_makespan(max_stages=4, max_microbatches=4), st.integers(1, 3))
def test_searches_in_several_threads_take_the_best_rows(problem, threads):
    costs = []
    search = RowSearch(problem, 0, costs.append)
    search.first()
    before = search.best_cost
    run_together(search, 0.0, Limits(seconds=0.05, threads=threads))
    assert search.best_cost <= before
    assert costs == sorted(costs, reverse=True)
    problem.evaluate(search.timetable())


@examples(30)
@given(random_memory_makespan(max_stages=4, max_microbatches=6, max_devices=4))
def test_published_schedules_that_fit_keep_every_limit(problem):
    for name, order in generated(problem):
        assert order.microbatches == problem.microbatches, name
        problem.evaluate(schedule_order(problem, order))


def test_published_schedules_are_found_by_placement():
    whole = line(4, weight_gradient=None, memory=(4.0, 4.0))
    assert "1f1b" in dict(generated(whole))
    assert "gpipe" not in dict(generated(whole))
    split = dict(generated(line(4, memory=(8.0, 8.0))))
    assert {"zero-bubble heuristic", "gpipe", "1f1b", "zb-h1", "zb-h2"} <= split.keys()
    assert all(order.is_split for order in split.values())
    assert sum(one.kind is F for one in split["1f1b"].rows[0]) == 4


def test_rules_that_do_not_fit_in_memory_have_no_schedule():
    problem = line(4, memory=(4.0, 4.0))
    assert solve_schedule(problem, "gpipe", LIMITS).status is Status.INFEASIBLE
    result = solve_schedule(problem, "1f1b", LIMITS)
    assert result.cost == problem.evaluate(result.timetable)


def test_other_backends_refuse_memory():
    form = ByIntervals(line(2), HAND).apply()
    with pytest.raises(InputError, match="backend 'highs' takes neither memory nor spans"):
        solve_intervals(form, Limits(seconds=1, backend="highs"))


@examples(20)
@given(random_memory_makespan(max_stages=3, max_microbatches=3), st.integers(2, 5))
def test_more_memory_never_hurts_and_times_scale(problem, factor):
    cost = least_cost(problem)
    roomy = replace(problem, memory=tuple(2 * limit for limit in problem.memory))
    assert least_cost(roomy) <= cost
    kinds = ("forward", "backward", "send_forward", "send_backward", "reduce", "weight_gradient")
    scaled = replace(
        problem,
        **{
            name: tuple(factor * time for time in getattr(problem, name))
            for name in kinds
            if getattr(problem, name) is not None
        },
    )
    bounds = zip(schedule_bounds(problem), schedule_bounds(scaled), strict=True)
    for one, other in bounds:
        assert other.seconds == pytest.approx(factor * one.seconds)
