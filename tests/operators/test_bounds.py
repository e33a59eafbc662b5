"""Lower bounds against brute force, the chain that a time is the sum of, and the benchmark."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_instances import built, cases
from operator_oracle import Case, shortest
from profiles import examples

from benchmarks import fastt, operators
from benchmarks.fastt_paper import SPLIT_GAIN, STRATEGY_SECONDS, STRONG, WEAK
from benchmarks.operator_graphs import SHAPES, random_problem
from benchmarks.ready_queue import by_place, fifo, from_queues
from stagewright.formulations.forms.answers import Limits
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
from stagewright.formulations.operators.check import critical_chain
from stagewright.solvers.operators.bounds import bounds_of, load_prices
from stagewright.solvers.operators.peers import dpos
from stagewright.solvers.operators.search import METHODS

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


@pytest.mark.parametrize("method", ["dpos", "heft", "m-etf"])
@examples(60)
@given(case=cases(most=6))
def test_the_chain_is_as_long_as_the_plan(method, case):
    problem = built(case)
    found = METHODS[method](problem)
    chain = critical_chain(problem, found)
    assert found.finish[chain[-1]] == found.end
    spent = sum(float(found.finish[i] - found.start[i]) for i in chain)
    for i, j in pairwise(chain):
        spent += link(problem, found, i, j)
    assert spent == pytest.approx(found.end)


def link(problem, found, i, j):
    """Seconds of the transfer between two of the chain; fails if j did not wait for i."""
    if found.device[i] == found.device[j]:
        assert found.finish[i] == pytest.approx(found.start[j])
        return 0.0
    maker, reader, tensor = problem.edges
    read = set(tensor[(maker == i) & (reader == j)].tolist())
    seconds = [
        float(finish - start)
        for t, target, start, finish in zip(
            found.sent, found.target, found.sent_start, found.sent_finish, strict=True
        )
        if int(t) in read and target == found.device[j] and np.isclose(finish, found.start[j])
    ]
    assert seconds
    return seconds[0]


def test_a_transfer_that_waits_for_another_follows_what_was_sent_before():
    # Both outputs of 0 and 1 go from device 0 to device 1; the second waits for the first.
    case = Case(
        [[1, 9], [1, 9], [20, 1], [20, 1]],
        [(0, 5, 5, [2]), (1, 5, 5, [3])],
        [[0, 0], [0, 0]],
        [[0, 1], [1, 0]],
        contention="exclusive",
    )
    problem = built(case)
    found = METHODS["heft"](problem)
    assert found.end == 12
    names = [problem.names[i] for i in critical_chain(problem, found)]
    assert names == ["o0", "o3"]


def rows(table, method):
    return [row for row in table.rows if row[1] == method]


@pytest.mark.slow
def test_search_is_within_two_percent(monkeypatch):
    monkeypatch.setattr(operators, "LIMITS", Limits(seconds=5))
    table = operators.study_table(quick=True)
    assert [row[-1] for row in rows(table, "search")] == [4, 4]  # of four


@pytest.mark.slow
def test_times_and_peers_have_a_row_per_method():
    timed = operators.time_table(quick=True)
    assert [row[0] for row in timed.rows][:2] == ["dpos, once", "dpos"]
    compared = operators.peer_table(quick=True)
    for shape in operators.SHAPES:
        costs = {row[1]: row[2] for row in compared.rows if row[0] == shape}
        bound = costs.pop("bound")
        assert min(costs.values()) == costs["search"] >= bound * (1 - 1e-9)


@examples(100)
@given(cases(), st.randoms(use_true_random=False))
def test_ready_queues_keep_the_rules(case, random):
    problem = built(case)
    optimum = shortest(case)
    homes = [random.randrange(case.m) for _ in problem.group_bytes]
    device = np.array(homes)[problem.group]
    order = np.array(random.sample(range(case.n), case.n))
    for key in (fifo, by_place(order)):
        assert problem.evaluate(from_queues(problem, device, key)) >= optimum


def test_a_queue_takes_what_is_first():
    """Two operators of 3 s and 2 s that are ready at 0; then one that reads the second."""
    case = Case([[3, 3], [2, 2], [4, 4]], [(1, 0, 0, [2])], [[0, 0]] * 2, [[0, 1], [1, 0]])
    problem = built(case)
    device = np.zeros(3, dtype=np.int64)
    assert from_queues(problem, device, fifo).start.tolist() == [0, 3, 5]
    given_order = by_place(np.array([1, 2, 0]))
    assert from_queues(problem, device, given_order).start.tolist() == [6, 0, 2]


def test_the_papers_tables_have_all_models():
    for table in (STRONG, WEAK, STRATEGY_SECONDS, SPLIT_GAIN):
        assert table.keys() == fastt.MODELS.keys()


@pytest.mark.slow
def test_fastt_on_its_smallest_model():
    strong, weak, gains, orders, seconds = fastt.tables(quick=True)
    for _, _, base, listed, searched, *_, gap in strong.rows:
        assert searched <= min(base, listed) * (1 + 1e-9)
        assert 0 <= float(gap.rstrip("%")) < 100
    assert [row[1] for row in weak.rows] == ["2", "4"]
    assert all(some <= none for *_, none, some, _, _, _, _ in gains.rows)
    assert [row[1] for row in orders.rows] == ["replicas", "model"]
    assert len(seconds.rows[0]) == len(seconds.columns)
