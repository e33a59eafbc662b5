"""What the benchmark of placed operators claims holds on its small cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_instances import built, cases
from operator_oracle import Case, shortest
from profiles import examples

from benchmarks import fastt, operators
from benchmarks.fastt_paper import SPLIT_GAIN, STRATEGY_SECONDS, STRONG, WEAK
from benchmarks.ready_queue import by_place, fifo, from_queues
from stagewright.formulations.forms.answers import Limits


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
