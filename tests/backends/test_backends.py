import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from scipy import sparse

from stagewright.formulations.forms.answers import Limits, Progress, Status
from stagewright.formulations.forms.models import Intervals, LinearProgram, weak_duality_bound
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backends.backend import BACKENDS, UnknownStatusError, solve

LINEAR = [name for name, backend in BACKENDS.items() if backend.accepts is LinearProgram]
INF = np.inf


def linear(cost, rows, row_lower, row_upper, upper, integral=True, lower=None):
    n = len(cost)
    return LinearProgram(
        cost=np.array(cost, dtype=float),
        matrix=sparse.csr_array(np.array(rows, dtype=float).reshape(-1, n)),
        row_lower=np.array(row_lower, dtype=float),
        row_upper=np.array(row_upper, dtype=float),
        lower=np.array([0.0] * n if lower is None else lower),
        upper=np.array(upper, dtype=float),
        integral=np.full(n, integral),
    )


def knapsack(integral=True):
    """max 5x + 4y + 3z, 2x + 3y + z <= 5, 4x + y + 2z <= 11, 3x + 4y + 2z <= 8: 13 at (2, 0, 1)."""
    return linear(
        [-5, -4, -3], [[2, 3, 1], [4, 1, 2], [3, 4, 2]], [-INF] * 3, [5, 11, 8], [INF] * 3, integral
    )


def hard(n=40):
    """Market split: an integer feasibility problem in which even small cases take very long."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 100, (6, n)).astype(float)
    half = np.floor(rows.sum(axis=1) / 2)
    slack = np.hstack([np.eye(6), -np.eye(6)])
    return LinearProgram(
        cost=np.r_[np.zeros(n), np.ones(12)],
        matrix=sparse.csr_array(np.hstack([rows, slack])),
        row_lower=half,
        row_upper=half,
        lower=np.zeros(n + 12),
        upper=np.r_[np.ones(n), np.full(12, INF)],
        integral=np.r_[np.ones(n, dtype=bool), np.zeros(12, dtype=bool)],
    )


@pytest.mark.parametrize("backend", LINEAR)
@pytest.mark.parametrize("integral", [True, False])
def test_known_optimum(backend, integral):
    answer = solve(knapsack(integral), backend)
    assert answer.status is Status.OPTIMAL
    assert answer.backend == backend
    assert answer.objective == pytest.approx(-13)
    assert answer.bound == pytest.approx(-13)
    assert answer.values == pytest.approx([2, 0, 1], abs=1e-6)


@st.composite
def feasible_linear(draw):
    """A bounded program without integers, with a point that its rows are built around."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, n = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    matrix = rng.integers(-3, 4, (rows, n)).astype(float)
    around = matrix @ rng.integers(0, 5, n)
    slack = rng.choice((0.0, 1.0, INF), (2, rows))
    slack[0, slack.min(axis=0) == INF] = 1.0
    return linear(
        rng.integers(-5, 6, n), matrix, around - slack[0], around + slack[1], [9.0] * n, False
    )


@pytest.mark.parametrize("seed", [3814, 3859])
def test_interior_points_that_only_come_close_are_completed(seed):
    """HiGHS ends these with no status unless a crossover follows."""
    rng = np.random.default_rng(seed)
    matrix = rng.integers(-3, 4, (3, 3)).astype(float)
    around = matrix @ rng.integers(0, 5, 3)
    slack = rng.choice((0.0, 1.0, INF), (2, 3))
    slack[0, slack.min(axis=0) == INF] = 1.0
    cost = rng.integers(-5, 6, 3)
    form = linear(cost, matrix, around - slack[0], around + slack[1], [9.0] * 3, False)
    answer = solve(form, "highs-ipm")
    assert answer.objective == pytest.approx(solve(form, "highs").objective)


@pytest.mark.parametrize("backend", LINEAR)
@examples(15)
@given(form=feasible_linear())
def test_duals_prove_the_optimum(backend, form):
    answer = solve(form, backend)
    assert answer.status is Status.OPTIMAL
    assert answer.duals is not None
    # CBC writes numbers with eight digits.
    assert answer.objective == pytest.approx(solve(form).objective, abs=1e-5)
    assert weak_duality_bound(form, answer.duals) == pytest.approx(answer.objective, abs=1e-5)


@pytest.mark.parametrize("backend", LINEAR)
def test_integrality_matters(backend):
    # max x + y, 2x + 2y <= 3: 1.5 in reals, 1 in integers
    form = linear([-1, -1], [[2, 2]], [-INF], [3], [1, 1])
    assert solve(form, backend).objective == pytest.approx(-1)
    relaxed = replace(form, integral=np.array([False, False]))
    assert solve(relaxed, backend).objective == pytest.approx(-1.5)


@pytest.mark.parametrize("backend", LINEAR)
@pytest.mark.parametrize("integral", [True, False])
def test_rows_with_two_limits_equations_and_negative_bounds(backend, integral):
    form = linear([1, 1], [[1, 1], [1, -1]], [-5, 3], [5, 3], [INF, INF], integral, [-10.0, -10.0])
    answer = solve(form, backend)
    assert answer.objective == pytest.approx(-5)
    assert answer.values == pytest.approx([-1, -4])


@pytest.mark.parametrize("backend", LINEAR)
def test_a_column_without_cost_or_row_keeps_its_bounds(backend):
    answer = solve(linear([1, 0], [[1, 0]], [1], [2], [9, 9], lower=[0.0, 3.0]), backend)
    assert answer.values is not None
    assert answer.values[0] == pytest.approx(1)
    assert 3 <= answer.values[1] <= 9


@pytest.mark.parametrize("backend", LINEAR)
@pytest.mark.parametrize("integral", [True, False])
def test_infeasible(backend, integral):
    # 2x = 2y + 1 has no integer solution; x = y + 1 with x <= 3 <= y has no solution at all
    form = linear([1, 1], [[2, -2]], [1], [1], [3, 3], integral)
    if not integral:
        form = linear([1, 1], [[1, -1]], [1], [1], [3, INF], integral, [0.0, 3.0])
    answer = solve(form, backend)
    assert answer.status is Status.INFEASIBLE
    assert answer.values is None
    assert answer.objective is None
    assert answer.bound == INF


@pytest.mark.parametrize("backend", LINEAR)
@pytest.mark.parametrize("integral", [True, False])
def test_unbounded(backend, integral):
    answer = solve(linear([-1, 0], [[1, -1]], [-INF], [1], [INF, INF], integral), backend)
    assert answer.status is Status.UNBOUNDED
    assert answer.values is None
    assert answer.bound == -INF


@pytest.mark.parametrize("backend", LINEAR)
def test_a_run_that_stops_early_is_not_called_optimal(backend):
    answer = solve(hard(), backend, Limits(seconds=0.2))
    assert answer.status in (Status.FEASIBLE, Status.NO_ANSWER)
    assert (answer.values is None) == (answer.status is Status.NO_ANSWER)
    if answer.objective is not None:
        assert answer.bound < answer.objective


def test_cbc_gives_no_bound_that_it_did_not_prove():
    assert solve(hard(), "pulp-cbc", Limits(seconds=0.2)).bound == -INF


@pytest.mark.parametrize("backend", ["highs", "pulp-cbc"])
def test_a_hint_is_a_first_answer(backend):
    form = hard()
    x = np.zeros(40)
    short = form.row_lower
    hinted = replace(form, hint=np.r_[x, short, np.zeros(6)])
    answer = solve(hinted, backend, Limits(seconds=0.5))
    assert answer.objective is not None
    assert answer.objective <= short.sum()


def test_highs_reports_progress_and_keeps_its_log():
    steps: list[Progress] = []
    answer = solve(hard(), "highs", Limits(seconds=0.5), steps.append)
    assert steps
    assert tuple(steps) == answer.progress
    assert "HiGHS" in answer.log


def two_machines(**changes):
    """Two jobs (A 3, B 2) and (B 2, A 4): 7 at the least, as machine A alone is busy for 7."""
    form = Intervals(
        durations=np.array([3, 2, 2, 4]),
        machines=(np.array([0, 3]), np.array([1, 2])),
        before=np.array([[0, 1], [2, 3]]),
        tails=np.zeros(4, dtype=np.int64),
        horizon=11,
    )
    return replace(form, **changes)


def test_intervals():
    answer = solve(two_machines())
    assert (answer.status, answer.objective, answer.bound) == (Status.OPTIMAL, 7, 7)
    assert answer.values is not None
    assert answer.values[[0, 3]].tolist() == [0, 3]
    assert answer.progress
    assert "CpSolverResponse" in answer.log


def test_tails_follow_ends():
    assert solve(two_machines(tails=np.array([0, 9, 0, 0]), horizon=20)).objective == 3 + 2 + 9


def test_the_horizon_is_a_constraint():
    answer = solve(two_machines(horizon=6))
    assert (answer.status, answer.values, answer.bound) == (Status.INFEASIBLE, None, INF)
    assert solve(two_machines(horizon=7, lower_bound=8)).status is Status.INFEASIBLE


def test_an_interval_without_length_may_not_lie_inside_another():
    # The empty interval comes after one of length 2: at 2 it would lie inside [0, 4).
    form = two_machines(
        durations=np.array([4, 0, 2]),
        machines=(np.array([0, 1]),),
        before=np.array([[2, 1]]),
        tails=np.array([3, 5, 0]),
    )
    assert solve(form).objective == 9
    assert solve(replace(form, machines=())).objective == 7


def test_a_hint_is_the_first_incumbent():
    hint = np.array([0, 3, 0, 3])
    answer = solve(two_machines(hint=hint, horizon=7), limits=Limits(threads=1))
    assert answer.progress[0].objective == 7


def test_no_time_is_no_answer():
    n, rng = 120, np.random.default_rng(0)
    form = Intervals(
        durations=rng.integers(1, 99, n),
        machines=tuple(rng.permutation(n).reshape(6, -1)),
        before=np.zeros((0, 2), dtype=np.int64),
        tails=np.zeros(n, dtype=np.int64),
        horizon=10_000,
        lower_bound=3,
    )
    answer = solve(form, limits=Limits(seconds=0.0))
    assert (answer.status, answer.values, answer.objective) == (Status.NO_ANSWER, None, None)
    assert answer.bound >= 3


def test_a_form_that_a_backend_cannot_take_is_one_clear_line():
    with pytest.raises(
        InputError, match="'cp-sat' accepts Intervals, not LinearProgram; use highs"
    ):
        solve(knapsack(), "cp-sat")
    with pytest.raises(InputError, match="unknown backend 'gurobi'; there are cp-sat, highs"):
        solve(knapsack(), "gurobi")
    with pytest.raises(InputError, match="no backend accepts str"):
        solve("x")


def test_an_unknown_status_is_an_error(monkeypatch):
    from stagewright.solvers.backends import cpsat, cvxpy_linear, highs, pulp_milp

    monkeypatch.setattr(cpsat, "STATUS", {})
    monkeypatch.setattr(highs, "STATUS", {})
    monkeypatch.setattr(pulp_milp, "CBC_STATUS", {})
    monkeypatch.setattr(cvxpy_linear, "STATUS", {})
    with pytest.raises(UnknownStatusError, match="OPTIMAL"):
        solve(two_machines())
    for backend in LINEAR:
        with pytest.raises(UnknownStatusError, match="ended with"):
            solve(knapsack(), backend)


def test_solver_libraries_are_imported_when_they_run():
    code = (
        "import sys, stagewright.solvers.backends.backend; "
        "print(sorted({'ortools', 'pulp', 'highspy', 'cvxpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
