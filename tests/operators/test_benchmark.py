"""What the benchmark of placed operators claims holds on its small cases."""

import pytest

from benchmarks import operators
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
