"""Lower bounds and optima of placed operators against brute force, and the benchmark."""

from dataclasses import replace
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
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.models import exact_unit
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
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.operators import exact
from stagewright.solvers.operators.exact import solve_exactly
from stagewright.solvers.operators.insertion import dpos
from stagewright.solvers.operators.ranks import bounds_of, load_prices
from stagewright.solvers.operators.search import METHODS, best_list_schedule, search

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
