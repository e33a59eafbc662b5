"""Lower bounds against brute force, hand-made cases where each is the best, wrong prices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_instances import built, cases
from operator_oracle import Case, shortest
from profiles import examples

from benchmarks.operator_graphs import SHAPES, random_problem
from stagewright.formulations.operators import bounds
from stagewright.formulations.operators.bounds import (
    CRITICAL_PATH,
    INTERVALS,
    LOAD,
    UNAVOIDABLE,
    Shortage,
    priced_load,
    shortage,
)
from stagewright.solvers.operators.bounds import bounds_of, load_prices
from stagewright.solvers.operators.peers import dpos

APART = [[0, 1], [1, 0]]


def named(problem):
    return {one.proved_by: one.seconds for one in bounds_of(problem)}


@examples(300)
@given(cases(most=5))
def test_bounds_are_no_longer_than_the_optimum(case):
    optimum = shortest(case)
    for name, seconds in named(built(case)).items():
        assert seconds <= optimum * (1 + 1e-9), name


@examples(300)
@given(cases(most=6, devices=2, identical=True))
def test_bounds_on_identical_devices(case):
    optimum = shortest(case)
    for name, seconds in named(built(case)).items():
        assert seconds <= optimum * (1 + 1e-9), name


@examples(100)
@given(cases(most=3, devices=2, contention="exclusive", memory=True))
def test_a_shortage_is_a_proof(case):
    if shortage(built(case)) is not None:
        assert shortest(case) == np.inf


@examples(100)
@given(cases(most=5), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_any_prices_give_a_bound(case, prices):
    assert priced_load(built(case), prices[: case.m]) <= shortest(case) * (1 + 1e-9)


def case_of(seconds, edges, amount=9):
    n = len(seconds)
    tensors = [(i, amount, 0, [j for a, j in edges if a == i]) for i in range(n)]
    return Case([[s, s] for s in seconds], tensors, [[0, 0], [0, 0]], APART)


@pytest.mark.parametrize(
    ("case", "best", "optimum"),
    [
        (case_of([3, 3, 3], [(0, 1), (1, 2)]), CRITICAL_PATH, 9),
        (case_of([2, 2, 2, 2], []), LOAD, 4),
        # Both inputs of the last are heavy: either all are on one device, or one is sent.
        (case_of([3, 3, 1], [(0, 2), (1, 2)]), UNAVOIDABLE, 7),
        # Four operators of 2 s between the first and the last.
        (case_of([1, 2, 2, 2, 2, 1], [(0, 1), (0, 2), (0, 3), (0, 4), (1, 5), (2, 5), (3, 5),
            (4, 5)], 0), INTERVALS, 6),
    ],
)  # fmt: skip
def test_each_is_the_best_somewhere(case, best, optimum):
    found = named(built(case))
    assert found[best] == pytest.approx(optimum) == shortest(case)
    simple = (CRITICAL_PATH, LOAD, UNAVOIDABLE, INTERVALS)
    assert all(found[name] < optimum for name in simple[: simple.index(best)])


def test_prices_of_kinds():
    """One operator is fast on the first device only: all work there would take 4 s."""
    seconds = np.array([[1.0, 100], [1, 100], [1, 1], [1, 1]])
    case = Case(seconds.tolist(), [], [[0, 0], [0, 0]], APART)
    assert named(built(case))[LOAD] == pytest.approx(2)
    one_fast = Case([[1, 3], [1, 3], [1, 3], [1, 3]], [], [[0, 0], [0, 0]], APART)
    assert load_prices(built(one_fast)).tolist() == pytest.approx([0.75, 0.25])
    assert named(built(one_fast))[LOAD] == pytest.approx(3)


@pytest.mark.parametrize("shape", SHAPES)
def test_bounds_of_large_graphs(shape):
    for ratio in (0.1, 10):
        problem = random_problem(600, 4, 1, ratio, shape, kinds=2)
        found = named(problem)
        assert found[CRITICAL_PATH] <= found[UNAVOIDABLE] <= found[INTERVALS]
        assert max(found.values()) <= dpos(problem).end


def test_fewer_ends_of_intervals_give_a_weaker_bound(monkeypatch):
    problem = random_problem(60, 3, 0, 0.1, "layered")
    best = named(problem)[INTERVALS]
    monkeypatch.setattr(bounds, "MOST_ENDS", 5)
    assert named(problem)[INTERVALS] <= best


def test_shortages_are_named():
    case = Case([[1, 1], [1, 1]], [(0, 2, 2, [1])], [[0, 0], [0, 0]], APART, "none", [5, 5], [6, 3])
    assert shortage(built(case)).reason == "the state is 10 B, all devices together have 9 B"
    case.memory = [6, 6]
    assert shortage(built(case)) == Shortage(
        "operator 'o0' needs 7 B, the largest device has 6 B", "o0"
    )
    case.memory = [7, 7]
    assert shortage(built(case)) is None
