"""Clusters solved in parts: the whole is valid, and the bound from prices holds and is tight."""

from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from scipy.optimize import linprog
from strategies_allocation import Case, random_case, use_of

from stagewright.formulations.clusters.allocation import AllocationProblem, check, problem_of
from stagewright.formulations.clusters.rates import server_rows
from stagewright.formulations.forms.answers import Status
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, PairRate, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.service.clusters.allocating import on_ray
from stagewright.solvers.clusters.partitioned import (
    POLICIES,
    Solved,
    allocate_partitioned,
    deal,
    in_process,
    price_bound,
)
from stagewright.solvers.clusters.policies import allocate

small = examples(25, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
cases = random_case(space_sharing=False)


def different_jobs(count: int, seed: int = 0) -> AllocationProblem:
    """No two jobs have the same rates; two types, fewer accelerators than jobs ask for."""
    rng = np.random.default_rng(seed)
    jobs = tuple(
        Job(str(n), f"m{n}", float(rng.uniform(50, 150)), int(rng.choice((1, 1, 2))))
        for n in range(count)
    )
    rates = tuple(
        Rate(job.model, job.scale, name, float(rng.lognormal(mean, 0.3)))
        for job in jobs
        for name, mean in (("v100", 1.0), ("k80", 0.0))
    )
    pool = parse_pool(f"v100={count // 4},k80={count // 4}")
    return problem_of(Workload(jobs, Throughputs(rates)), pool)


def surrogate_optimum(problem: AllocationProblem, need: Floats, prices: Floats) -> float:
    """Max theta over all shares of time, the resources' rows replaced by their sum in prices."""
    table, (jobs, workers) = problem.table, problem.rates.shape
    types = len(table.counts)
    uses = [[use_of(problem, job, worker) for worker in range(workers)] for job in range(jobs)]
    cost = prices[:types][table.accelerator] * np.array(uses)
    worth = float(prices[:types] @ table.counts)
    for price, (_, parts, servers) in zip(prices[types:], server_rows(table), strict=True):
        cost += price * parts[problem.kind]
        worth += float(price * servers)
    of_job = np.kron(np.eye(jobs), np.ones(workers))
    rows = np.block(
        [
            [of_job, np.zeros((jobs, 1))],
            [-of_job * problem.rates.reshape(-1), need[:, None]],
            [cost.reshape(1, -1), np.zeros((1, 1))],
        ]
    )
    limits = np.concatenate([np.ones(jobs), np.zeros(jobs), [worth]])
    found = linprog(np.append(np.zeros(jobs * workers), -1.0), A_ub=rows, b_ub=limits)
    return float(-found.fun)


@small
@given(cases, seeds)
def test_the_bound_is_the_optimum_under_one_budget(case: Case, seed: int):
    problem = case.problem
    rng = np.random.default_rng(seed)
    count = len(problem.table.counts) + len(server_rows(problem.table))
    prices = rng.integers(0, 4, count) / 2.0
    for policy in POLICIES.values():
        need = policy.need(problem)
        expected = surrogate_optimum(problem, need, prices)
        assert price_bound(problem, need, prices) == pytest.approx(expected, rel=1e-6)


@small
@given(cases, seeds)
def test_no_prices_bound_below_the_optimum(case: Case, seed: int):
    problem = case.problem
    count = len(problem.table.counts) + len(server_rows(problem.table))
    prices = np.random.default_rng(seed).uniform(0, 1, count)
    optimum = allocate(problem, "max-min").objective
    need = POLICIES["max-min"].need(problem)
    assert optimum is not None
    assert price_bound(problem, need, prices) >= optimum * (1 - 1e-9)


@small
@given(cases, st.sampled_from(sorted(POLICIES)))
def test_one_part_is_the_whole(case: Case, policy: str):
    whole = allocate(case.problem, policy)
    part = allocate_partitioned(case.problem, policy, 1, spread=in_process)
    assert part.objective == pytest.approx(whole.objective, rel=1e-5)
    assert part.gap is not None
    assert part.gap < 1e-5


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("parts", [2, 5])
def test_parts_are_valid_and_their_loss_is_within_the_gap(policy: str, parts: int):
    problem = different_jobs(120)
    best = allocate(problem, policy).objective
    result = allocate_partitioned(problem, policy, parts, spread=in_process)
    assert result.allocation is not None
    assert result.objective is not None
    assert result.bound is not None
    assert best is not None
    assert result.gap is not None
    check(problem, result.allocation)
    worst_to_best = [result.objective, best, result.bound]
    worst_to_best = worst_to_best if result.maximises else worst_to_best[::-1]
    for worse, better in pairwise(worst_to_best):
        assert worse <= better * (1 + 1e-7)
    assert result.gap < 0.1
    assert result.status is Status.FEASIBLE


def test_placement_is_solved_in_parts_too():
    rates = tuple(Rate(f"m{n}", 3, "v100", 4.0 + n / 10, 2.0) for n in range(12))
    jobs = tuple(Job(str(n), f"m{n}", 10.0, 3) for n in range(12))
    problem = problem_of(Workload(jobs, Throughputs(rates)), parse_pool("v100=4x4"), placement=True)
    best = allocate(problem, "max-min").objective
    result = allocate_partitioned(problem, "max-min", 3, spread=in_process)
    assert best is not None
    assert result.objective is not None
    assert result.bound is not None
    assert result.objective <= best * (1 + 1e-7)
    assert best <= result.bound * (1 + 1e-7)
    assert result.gap is not None
    assert result.gap < 0.05


@small
@given(st.integers(1, 12), seeds)
def test_every_job_is_dealt_once_and_evenly(parts: int, seed: int):
    problem = different_jobs(30)
    split = deal(problem, problem.steps, parts, seed)
    assert np.sort(np.concatenate(split)).tolist() == list(range(30))
    assert max(map(len, split)) - min(map(len, split)) <= 1
    again = deal(problem, problem.steps, parts, seed)
    assert all((one == other).all() for one, other in zip(split, again, strict=True))


def test_bad_questions_are_refused():
    problem = different_jobs(8)
    with pytest.raises(InputError, match="'fifo' is not solved in parts; max-min, makespan are"):
        allocate_partitioned(problem, "fifo", 2)
    with pytest.raises(InputError, match="from 1 to the number of jobs, 8, got 9"):
        allocate_partitioned(problem, "max-min", 9)
    pair = PairRate(("a", "a"), 1, "v100", (3.0, 3.0))
    shared = problem_of(
        Workload(
            (Job("0", "a", 1.0), Job("1", "a", 1.0)),
            Throughputs((Rate("a", 1, "v100", 4.0),), (pair,)),
        ),
        parse_pool("v100=1"),
        space_sharing=True,
    )
    with pytest.raises(InputError, match="jobs that share accelerators are not solved in parts"):
        allocate_partitioned(shared, "max-min", 2)


def test_a_part_without_an_answer_leaves_none():
    def first_fails(run, parts, limits):
        return [Solved(Status.NO_ANSWER, None, np.zeros(2)), *in_process(run, parts[1:], limits)]

    result = allocate_partitioned(different_jobs(20), "max-min", 2, spread=first_fails)
    assert result.status is Status.NO_ANSWER
    assert result.allocation is None
    assert result.gap is None


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_gives_what_one_process_gives():
    problem = different_jobs(40)
    here = allocate_partitioned(problem, "makespan", 2, spread=in_process)
    there = allocate_partitioned(problem, "makespan", 2, spread=on_ray)
    assert there.objective == here.objective
    assert replace(there, seconds=0.0).bound == here.bound
