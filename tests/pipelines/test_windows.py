"""The search in windows never refutes a target that a schedule meets, and finds the optimum."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makespan_oracle import brute_force_makespan, optimal_timetable
from profiles import examples
from strategies import random_makespan, random_placed_makespan

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.blocks import NONE, block_starts, blocks_of
from stagewright.formulations.pipelines.bounds.stages import longest_paths
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.pipelines.windows import Span, spans, window
from stagewright.solvers.pipelines.list_scheduling import best_list_schedule
from stagewright.solvers.pipelines.windows.search import Effort, WindowSearch, search_windows

CLOSE = 1e-9
EFFORTS = {
    "exact": Effort(10**6, 10**6, 10**6),
    "all merged": Effort(10**6, 1, 1),
    "few states": Effort(40, 2, 2),
}

# The slowest two of five stages, with 1F1B's limits in flight.
UNEQUAL = MakespanProblem(
    8,
    (4.0, 9.0, 5.0, 8.0, 3.0),
    (8.0, 15.0, 9.0, 17.0, 5.0),
    (2.0, 3.0, 1.0, 4.0),
    (3.0, 1.0, 4.0, 2.0),
    (0.0, 20.0, 0.0, 0.0, 9.0),
    (5, 4, 3, 2, 1),
)

# Transfers take longer than computations; CP-SAT proves that the least makespan is 786.
SLOW_CHANNELS = MakespanProblem(
    8,
    (17.0, 14.0, 12.0, 9.0),
    (30.0, 21.0, 18.0, 13.0),
    (15.0, 35.0, 30.0),
    (38.0, 25.0, 28.0),
    (29.0, 21.0, 18.0, 16.0),
    (5, 4, 3, 2),
)


def whole(problem):
    return replace(problem, weight_gradient=None)


def least(problem):
    return problem.evaluate(optimal_timetable(problem))


def heads_and_tails(problem):
    blocks, count = blocks_of(problem), problem.microbatches
    tails = longest_paths(blocks.reversed(), count)[::-1, ::-1]
    return blocks, longest_paths(blocks, count), tails


@pytest.mark.parametrize("effort", EFFORTS)
@examples(150, derandomize=True)
@given(random_makespan() | random_placed_makespan().map(whole), st.floats(0.7, 1.4))
def test_no_bound_exceeds_the_optimum(effort, problem, factor):
    optimum = least(problem)
    search = WindowSearch(problem, factor * optimum, EFFORTS[effort])
    assert search.bound() <= optimum * (1 + CLOSE)
    found = search.schedule()
    assert found.bound <= optimum * (1 + CLOSE)
    if found.timetable is not None:
        cost = problem.evaluate(found.timetable)
        assert optimum * (1 - CLOSE) <= cost <= max(factor, 1) * optimum * (1 + CLOSE)


@examples(100, derandomize=True)
@given(random_makespan() | random_placed_makespan().map(whole))
def test_an_exact_search_decides_every_target(problem):
    optimum = least(problem)
    if optimum > 0:
        below = WindowSearch(problem, optimum * (1 - 1e-6), EFFORTS["exact"])
        assert max(below.bound(), below.schedule().bound) == below.target
        assert below.schedule().timetable is None
        found = WindowSearch(problem, optimum, EFFORTS["exact"]).schedule()
        assert problem.evaluate(found.timetable) == pytest.approx(optimum)


@examples(60, derandomize=True)
@given(random_makespan(max_stages=2, max_microbatches=4), st.floats(0.1, 10))
def test_the_rounds_reach_the_optimum(problem, factor):
    times = ("forward", "backward", "send_forward", "send_backward", "reduce")
    problem = replace(
        problem, **{name: tuple(factor * t for t in getattr(problem, name)) for name in times}
    )
    optimum = brute_force_makespan(problem, fifo=True)
    first = best_list_schedule(problem)[1].makespan(problem)
    found = search_windows(problem, first, 0.0, Limits(seconds=60))
    cost = first if found.timetable is None else problem.evaluate(found.timetable)
    assert cost == pytest.approx(optimum)
    assert found.bound == pytest.approx(optimum)


def test_a_window_keeps_its_stages_and_replaces_the_others_by_a_detour():
    blocks, heads, tails = heads_and_tails(UNEQUAL)
    form = window(blocks, Span(1, 3), heads, tails)
    assert form.rows.tolist() == [2, 3, 4, NONE, 13, 14, 15]
    assert form.durations.tolist() == [9, 3, 5, 1 + 8 + 4 + 3 + 5 + 2 + 17 + 4, 9, 1, 15]
    assert form.occupied.tolist() == [9, 3, 5, 17, 9, 1, 15]
    assert len(set(form.machines.tolist())) == 4
    assert form.machines[[0, 1, 2]].tolist() == form.machines[[6, 5, 4]].tolist()
    assert form.limits.tolist() == [4, NONE, 3, NONE, NONE, NONE, NONE]
    assert form.freeing[[0, 2]].tolist() == [6, 4]
    assert (form.heads[3] == heads[5]).all()
    assert (form.tails[3] == tails[12]).all()


def test_windows_of_all_lengths():
    assert list(spans(3)) == [(2, 3), (1, 2), (0, 1), (1, 3), (0, 2), (0, 3)]


def test_raised_heads_and_tails_hold_in_the_best_schedule():
    best = search_windows(UNEQUAL, 1e3, 0.0, Limits(seconds=60)).timetable
    search = WindowSearch(UNEQUAL, best.makespan(UNEQUAL), Effort())
    blocks, heads, tails = search.ahead.blocks, search.ahead.heads.copy(), search.ahead.tails.copy()
    search.bound()
    assert (search.ahead.heads > heads).any()
    assert (search.ahead.tails > tails).any()
    starts = block_starts(UNEQUAL, best)
    assert (starts >= search.ahead.heads).all()
    ends = starts + blocks.durations[:, None]
    assert (ends + search.ahead.tails <= best.makespan(UNEQUAL)).all()


def test_a_schedule_of_the_target_keeps_it():
    best = search_windows(UNEQUAL, 1e3, 0.0, Limits(seconds=60))
    assert UNEQUAL.evaluate(best.timetable) == best.bound
    starts = best.timetable.forward
    assert (np.diff(starts, axis=1) > 0).all()


def test_few_states_suffice_where_transfers_take_long():
    few = Effort(300, 4, 1)
    below = WindowSearch(SLOW_CHANNELS, 786 * (1 - 1e-6), few)
    assert below.bound() == below.target
    assert WindowSearch(SLOW_CHANNELS, 786, few).bound() <= 786


def test_no_time_proves_nothing():
    assert search_windows(UNEQUAL, 1e3, 7.0, Limits(seconds=0.0)) == (7.0, None)
