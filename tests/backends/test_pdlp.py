from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.pdlp import solve_log_pb2
from profiles import examples
from scipy import sparse

from stagewright.formulations.clusters.allocation import check, problem_of, throughput
from stagewright.formulations.clusters.policies import max_min
from stagewright.formulations.clusters.policies.levels import level_program
from stagewright.formulations.clusters.polytope import group_by, polytope
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.duality import weak_duality_bound
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.backends.backend import UnknownStatusError, solve
from stagewright.solvers.backends.pdlp import STATUS, status_of, violation
from stagewright.solvers.clusters.levels import max_level

INF = np.inf


def linear(cost, rows, row_lower, row_upper, upper):
    n = len(cost)
    return LinearProgram(
        np.array(cost, dtype=float),
        sparse.csr_array(np.array(rows, dtype=float).reshape(-1, n)),
        np.array(row_lower, dtype=float),
        np.array(row_upper, dtype=float),
        np.zeros(n),
        np.array(upper, dtype=float),
        np.zeros(n, dtype=bool),
    )


def drawn(seed):
    """A feasible program with equations, ranges and one-sided rows, and finite columns."""
    rng = np.random.default_rng(seed)
    rows, n = rng.integers(1, 8), rng.integers(1, 10)
    matrix = rng.uniform(-1, 1, (rows, n)) * (rng.random((rows, n)) < 0.6)
    inside = matrix @ rng.uniform(0, 2, n)
    sides = rng.integers(0, 4, rows)
    lower = np.where(sides == 0, -INF, inside - (sides != 1) * rng.random(rows))
    upper = np.where(sides == 2, INF, inside + (sides != 1) * rng.random(rows))
    return linear(rng.uniform(-1, 1, n), matrix, lower, upper, np.full(n, 2.0))


@examples(30)
@given(st.integers(0, 100_000))
def test_the_optimum_is_that_of_highs(seed):
    form = drawn(seed)
    answer, other = solve(form, "pdlp"), solve(form, "highs")
    assert (answer.status, answer.backend) == (Status.OPTIMAL, "pdlp")
    assert answer.objective == pytest.approx(other.objective, abs=1e-6)
    assert answer.bound == pytest.approx(other.objective, abs=1e-6)
    assert answer.bound <= other.objective + 1e-9
    assert violation(form, answer.values) <= 1e-6
    assert ((answer.values >= form.lower) & (answer.values <= form.upper)).all()
    # With the signs turned the same duals would prove next to nothing.
    assert weak_duality_bound(form, answer.duals) == answer.bound


def test_duals_have_the_signs_of_highs():
    """min -x - y, x + 2y <= 4, 3x + y <= 6: -2.8 with duals -0.4 and -0.2."""
    form = linear([-1, -1], [[1, 2], [3, 1]], [-INF, -INF], [4, 6], [9, 9])
    for backend in ("pdlp", "highs"):
        answer = solve(form, backend)
        assert answer.values == pytest.approx([1.6, 1.2], abs=1e-6)
        assert answer.duals == pytest.approx([-0.4, -0.2], abs=1e-6)
    assert "rows are violated by up to" in solve(form, "pdlp").log


def test_how_a_program_without_an_optimum_ends():
    apart = linear([1], [[1], [1]], [3, -INF], [INF, 2], [INF])
    endless = linear([-1, 0], [[1, -1]], [-INF], [1], [INF, INF])
    both = linear([-1, 0], [[0, 1], [0, 1]], [3, -INF], [INF, 2], [INF, 9])
    for form, status, bound in (
        (apart, Status.INFEASIBLE, INF),
        (endless, Status.UNBOUNDED, -INF),
        (both, Status.INFEASIBLE, INF),
    ):
        answer = solve(form, "pdlp")
        assert (answer.status, answer.bound) == (status, bound)
        assert answer.values is None
        assert answer.objective is None


def test_without_rows_each_column_is_at_its_better_bound():
    answer = solve(linear([1, -1], [], [], [], [3, 3]), "pdlp")
    assert answer.values == pytest.approx([0, 3])
    assert answer.bound == pytest.approx(-3)


def test_a_limit_leaves_a_bound_and_no_values():
    answer = solve(max_min_program(40).form, "pdlp", Limits(1e-9))
    assert answer.status is Status.NO_ANSWER
    assert answer.values is None
    assert answer.bound <= solve(max_min_program(40).form, "highs").objective


def test_integers_are_refused():
    form = replace(drawn(0), integral=np.ones(len(drawn(0).cost), dtype=bool))
    with pytest.raises(InputError, match="'pdlp' takes no integers; use highs"):
        solve(form, "pdlp")


def test_every_reason_is_known_or_refused():
    known = 0
    for name, reason in solve_log_pb2.TerminationReason.items():
        if reason in STATUS:
            known += 1
            continue
        with pytest.raises(UnknownStatusError, match=name):
            status_of(reason)
    assert known == len(STATUS)


def test_violation_is_relative_to_the_bound():
    form = linear([1, 1], [[1, 1], [1, 0]], [-INF, 100], [10, INF], [5, 5])
    assert violation(form, np.array([5.0, 0.0])) == pytest.approx(0.95)
    form = replace(form, row_lower=np.full(2, -INF))
    assert violation(form, np.array([5.0, 5.0])) == 0
    assert violation(form, np.array([5.5, 5.5])) == pytest.approx(0.1)
    assert violation(form, np.array([-0.5, 0.0])) == pytest.approx(0.5)


def max_min_problem(jobs):
    rng = np.random.default_rng(1)
    rates = tuple(
        Rate(model, 1, accelerator, float(rng.uniform(0.5, 4)))
        for model in "klmn"
        for accelerator in ("a", "b", "c")
    )
    listed = tuple(Job(str(i), "klmn"[i % 4], 1.0, weight=1.0 + i % 3) for i in range(jobs))
    pool = parse_pool(f"a={jobs // 4},b={jobs // 4},c={jobs // 4}")
    return problem_of(Workload(listed, Throughputs(rates)), pool)


def max_min_program(jobs):
    problem = max_min_problem(jobs)
    groups = group_by(problem, np.arange(jobs))
    need = groups.total(max_min.needs(problem))
    return level_program(polytope(problem, groups), need, 10.0)


def test_max_min_over_single_jobs_and_over_classes():
    exact = max_level(max_min_problem(60), max_min.needs(max_min_problem(60)))
    program = max_min_program(60)
    answer = solve(program.form, "pdlp")
    assert -answer.objective * program.unit == pytest.approx(exact.theta, rel=1e-6)
    assert -answer.bound * program.unit == pytest.approx(exact.theta, rel=1e-6)
    problem = max_min_problem(60)
    level = max_level(problem, max_min.needs(problem), backend="pdlp", tolerance=1e-6)
    assert level.backend == "pdlp"
    check(problem, level.allocation)
    reached = throughput(problem, level.allocation) / max_min.needs(problem)
    assert reached.min() == pytest.approx(exact.theta, rel=1e-5)
