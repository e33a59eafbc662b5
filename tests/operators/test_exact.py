"""Optima against brute force, with contention and memory; the search against optima."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from operator_instances import built, cases
from operator_oracle import Case, shortest
from profiles import examples

from benchmarks.operator_graphs import SHAPES, random_problem
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.disjunctive import exact_unit
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.operators import exact
from stagewright.solvers.operators.exact import solve_exactly
from stagewright.solvers.operators.peers import dpos
from stagewright.solvers.operators.search import METHODS, best_list_schedule, search

LIMITS = Limits(seconds=60)
MOVES = 4_000


def solved(problem, monkeypatch=None):
    """The result; with ``monkeypatch`` CP-SAT begins without the search before it."""
    if monkeypatch is not None:
        monkeypatch.setattr(exact, "EVALUATIONS", 0)
        monkeypatch.setattr(exact, "best_list_schedule", lambda problem: ("none", None))
        monkeypatch.setattr(exact, "search", lambda *_: None)
    found = solve_exactly(problem, LIMITS)
    if found.timetable is not None:
        assert problem.evaluate(found.timetable) == found.cost
    return found


def check_equal(case, monkeypatch=None):
    optimum, found = shortest(case), solved(built(case), monkeypatch)
    if optimum == np.inf:
        assert found.status is Status.INFEASIBLE
        assert found.reason
    else:
        assert (found.cost, found.status) == (optimum, Status.OPTIMAL)
        assert found.bound == pytest.approx(optimum)


@examples(100)
@given(cases(most=5))
def test_equals_brute_force(case):
    check_equal(case)


@examples(100)
@given(cases(most=6, devices=2, identical=True))
def test_equals_brute_force_on_identical_devices(case):
    check_equal(case)


@examples(60)
@given(cases(most=4, devices=2, contention="exclusive"))
def test_equals_brute_force_with_contention(case):
    check_equal(case)


@examples(100)
@given(cases(most=3, devices=2, memory=True))
def test_equals_brute_force_with_memory(case):
    check_equal(case)


@examples(100)
@given(cases(most=3, devices=2, memory=True, contention="exclusive"))
def test_equals_brute_force_with_memory_and_contention(case):
    check_equal(case)


@examples(60)
@given(cases(most=4))
def test_cp_sat_alone_equals_brute_force(case):
    with pytest.MonkeyPatch.context() as patch:
        check_equal(case, patch)


@examples(60)
@given(cases(most=3, devices=2, memory=True, contention="exclusive"))
def test_cp_sat_alone_equals_brute_force_with_memory_and_contention(case):
    with pytest.MonkeyPatch.context() as patch:
        check_equal(case, patch)


@examples(100)
@given(cases(most=4, devices=2, memory=True, contention="exclusive"))
def test_what_the_search_finds_fits(case):
    problem = built(case)
    found = search(problem, 400, LIMITS)
    if found is not None:
        problem.evaluate(found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("contention", ["none", "exclusive"])
def test_the_search_is_deterministic_and_never_worse_than_dpos(shape, contention):
    for ratio in (0.1, 10):
        problem = random_problem(50, 3, 0, ratio, shape, contention, kinds=2)
        found = search(problem, MOVES, LIMITS)
        again = search(problem, MOVES, LIMITS)
        assert (found.device == again.device).all()
        assert problem.evaluate(found) == again.end <= best_list_schedule(problem)[1].end
        assert found.end <= dpos(problem).end


@pytest.mark.covering
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.1, 1, 10])
def test_the_search_is_near_the_optimum(shape, ratio):
    problem = random_problem(14, 3, 1, ratio, shape)
    found = solve_exactly(problem, LIMITS)
    assert search(problem, 200_000, LIMITS).end <= 1.02 * found.bound


def test_twice_the_times_cost_twice_and_one_more_device_never_hurts():
    problem = random_problem(8, 2, 4, 1.0, "layered")
    cost = solved(problem).cost
    twice = replace(
        problem, seconds=2 * problem.seconds, seconds_per_byte=2 * problem.seconds_per_byte
    )
    assert solved(twice).cost == pytest.approx(2 * cost, rel=1e-6)
    assert solved(random_problem(8, 3, 4, 1.0, "layered")).cost <= cost * (1 + 1e-6)


def test_hundreds_of_times_without_a_common_unit():
    """The least common multiple of the denominators of their ratios is larger than any float."""
    times = np.random.default_rng(0).uniform(1, 10, 500)
    assert exact_unit(times, float(times.sum())) is None
    assert exact_unit(times.round(), float(times.sum())) == 1


def test_infeasible_is_an_answer():
    case = Case([[1], [1]], [], [[0]], [[0]], "none", [5, 5], [9])
    found = solve_exactly(built(case), LIMITS)
    assert (found.status, found.cost, found.gap) == (Status.INFEASIBLE, None, None)
    assert found.reason == "the state is 10 B, all devices together have 9 B"


def test_a_bound_above_the_cost_is_refused(monkeypatch):
    problem = random_problem(10, 2, 0, 1.0, "layered")
    wrong = [replace(one, seconds=1e6) for one in exact.bounds_of(problem)]
    monkeypatch.setattr(exact, "bounds_of", lambda _: tuple(wrong))
    with pytest.raises(InvalidPlan, match="below the bound"):
        solve_exactly(problem, LIMITS)


def test_methods_that_hold_less_find_plans_in_small_memory():
    """o0's tensor is free when o1 has ended: all of them never are in memory together."""
    tensors = [(0, 4, 4, [1]), (1, 4, 4, [2]), (2, 4, 4, [3])]
    case = Case([[1]] * 4, tensors, [[0]], [[0]], "none", [0] * 4, [8])
    assert dpos(built(case)) is None
    for name, method in METHODS.items():
        assert built(case).evaluate(method(built(case))) == 4, name
