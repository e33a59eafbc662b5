"""Rounds: their rules hold whatever the target, and over time each job has its share."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from strategies_allocation import Case, random_case, use_of

from stagewright.executor.clusters.rounds import Assignment, Mechanism
from stagewright.formulations.clusters.allocation import (
    RESTARTS,
    Allocation,
    AllocationProblem,
    allocation_of_shares,
    problem_of,
)
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.workloads.jobs import Job, PairRate, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import Accelerator, Pool, parse_pool
from stagewright.solvers.clusters.policies import allocate

ROUND = 10.0


def target_of(case: Case) -> Allocation:
    found = allocate(case.problem, "max-min").allocation
    assert found is not None
    return found


def started(case: Case, target: Allocation, seed: int | None = None) -> Mechanism:
    shuffle = None if seed is None else random.Random(seed)
    mechanism = Mechanism(case.problem.table, ROUND, shuffle=shuffle)
    mechanism.reset(case.problem, target, range(100, 100 + len(case.problem)))
    return mechanism


def run(mechanism: Mechanism, rounds: int) -> list[tuple[Assignment, ...]]:
    found = []
    for _ in range(rounds):
        found.append(mechanism.schedule())
        for assignment in found[-1]:
            mechanism.account(assignment, ROUND)
    return found


def taken(problem: AllocationProblem, scheduled: tuple[Assignment, ...]) -> list[list[int]]:
    """The accelerators in use, by type."""
    used: list[list[int]] = [[] for _ in problem.table.counts]
    for assignment in scheduled:
        used[problem.table.workers[assignment.worker].accelerator] += assignment.accelerators
    return used


@given(random_case(), st.integers(0, 3))
@examples(40)
def test_rules_of_a_round(case: Case, seed: int) -> None:
    problem, table = case.problem, case.problem.table
    target = target_of(case)
    before: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
    pairs = {
        (a + 100, b + 100, w)
        for a, b, w in zip(target.job, target.partner, target.worker, strict=True)
    }
    for scheduled in run(started(case, target, seed), 6):
        jobs = [job - 100 for assignment in scheduled for job in assignment.jobs]
        assert len(set(jobs)) == len(jobs)
        used = taken(problem, scheduled)
        for numbers, count in zip(used, table.counts, strict=True):
            assert len(set(numbers)) == len(numbers)
            assert set(numbers) <= set(range(count))
        for assignment in scheduled:
            first = assignment.jobs[0] - 100
            assert len(assignment.accelerators) == use_of(problem, first, assignment.worker)
            if len(assignment.jobs) == 2:
                assert (*assignment.jobs, assignment.worker) in pairs
            else:
                assert problem.rates[first, assignment.worker] > 0
            key = (assignment.jobs, assignment.worker)
            assert assignment.renewed == (before.get(key) == assignment.accelerators)
            check_servers(problem, assignment)
        for job in set(range(len(problem))) - set(jobs):
            check_fits_nowhere(problem, job, used)
        before = {(one.jobs, one.worker): one.accelerators for one in scheduled}


def check_servers(problem: AllocationProblem, assignment: Assignment) -> None:
    worker = problem.table.workers[assignment.worker]
    size = problem.table.pool.accelerators[worker.accelerator].per_server
    if worker.placement == "consolidated":
        assert size is not None
        servers = {number // size for number in assignment.accelerators}
        assert len(servers) == -(-len(assignment.accelerators) // size)


def check_fits_nowhere(problem: AllocationProblem, job: int, used: list[list[int]]) -> None:
    """Nothing that could run idles; one that needs a server of its own may find none."""
    for column, worker in enumerate(problem.table.workers):
        rate, count = problem.rates[job, column], use_of(problem, job, column)
        free = problem.table.counts[worker.accelerator] - len(used[worker.accelerator])
        if rate > 0 and (worker.placement != "consolidated" or count == 1):
            assert count > free


@st.composite
def full_target(draw: st.DrawFn) -> tuple[AllocationProblem, Allocation]:
    """Single-accelerator jobs whose target leaves no accelerator idle."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    jobs = sum(counts) + draw(st.integers(0, 4))
    shares = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).random((jobs, len(counts)))
    for _ in range(300):
        shares *= counts / shares.sum(axis=0)
        shares /= np.maximum(1.0, shares.sum(axis=1, keepdims=True))
    names = [f"type{number}" for number in range(len(counts))]
    pool = Pool(tuple(Accelerator(name, count) for name, count in zip(names, counts, strict=True)))
    rates = Throughputs(tuple(Rate("m", 1, name, 1.0) for name in names))
    listed = tuple(Job(str(number), "m", 1.0) for number in range(jobs))
    return problem_of(Workload(listed, rates), pool), allocation_of_shares(shares)


@given(full_target())
@examples(20)
def test_single_accelerators_get_their_shares(case: tuple[AllocationProblem, Allocation]) -> None:
    """The greedy choice stays within a few per cent.

    Where a target leaves accelerators idle, jobs get more of those and less of others.
    """
    problem, target = case
    mechanism = Mechanism(problem.table, ROUND)
    mechanism.reset(problem, target, range(len(problem)))
    run(mechanism, 200)
    found = mechanism.deviation()
    assert found.mean < 0.03
    assert found.shortfall < 0.1


@given(random_case(), st.integers(0, 3), st.integers(0, 2**32 - 1))
@examples(40)
def test_a_lease_lasts_until_its_restart_is_a_small_part(case: Case, seed: int, costs: int) -> None:
    restart = np.random.default_rng(costs).choice([0.0, 0.4, 1.0, 2.5], len(case.problem))
    case = replace(case, problem=replace(case.problem, restart_seconds=restart))
    lasted: dict[tuple[tuple[int, ...], int], float] = {}
    for scheduled in run(started(case, target_of(case), seed), 30):
        renewed = {(one.jobs, one.worker) for one in scheduled if one.renewed}
        for key, seconds in lasted.items():
            most = max(restart[job - 100] for job in key[0])
            assert key in renewed or seconds >= most / RESTARTS
        lasted = {
            (one.jobs, one.worker): ROUND + lasted.get((one.jobs, one.worker), 0.0) * one.renewed
            for one in scheduled
        }


@given(random_case(), st.integers(0, 3))
@examples(20)
def test_same_rounds_again(case: Case, seed: int) -> None:
    target = target_of(case)
    assert run(started(case, target, seed), 4) == run(started(case, target, seed), 4)


def figure_5_7() -> tuple[AllocationProblem, Allocation]:
    """Three jobs on a V100 and a K80, the first and the second also together on the V100."""
    rates = tuple(Rate(m, 1, a, 1.0) for m in ("a", "b", "c") for a in ("v100", "k80"))
    together = (PairRate(("a", "b"), 1, "v100", (0.9, 0.9)),)
    jobs = tuple(Job(name, name, 100.0) for name in ("a", "b", "c"))
    problem = problem_of(
        Workload(jobs, Throughputs(rates, together)), parse_pool("v100=1,k80=1"), space_sharing=True
    )
    target = Allocation(
        np.array([0, 0, 1, 2, 2]),
        np.array([1, -1, -1, -1, -1]),
        np.array([0, 1, 1, 0, 1]),
        np.array([0.6, 0.2, 0.2, 0.4, 0.6]),
    )
    return problem, target


def test_pairs_listed_twice_count_once() -> None:
    problem, target = figure_5_7()
    split = Allocation(
        np.append(target.job, 0),
        np.append(target.partner, 1),
        np.append(target.worker, 0),
        np.append(target.share * np.where(target.partner == 1, 0.5, 1.0), 0.3),
    )
    found = []
    for listed in (target, split):
        mechanism = Mechanism(problem.table, ROUND)
        mechanism.reset(problem, listed, (7, 8, 9))
        found.append(run(mechanism, 20))
    assert found[0] == found[1]


def test_pairs_have_their_share_and_conflict_with_their_jobs() -> None:
    problem, target = figure_5_7()
    mechanism = Mechanism(problem.table, ROUND)
    mechanism.reset(problem, target, (7, 8, 9))
    rounds = run(mechanism, 100)
    together = sum(one.jobs == (7, 8) for scheduled in rounds for one in scheduled)
    assert together == pytest.approx(60, abs=2)
    assert mechanism.deviation().share == pytest.approx(np.zeros((3, 2)), abs=0.03)


def test_removed_jobs_and_lost_accelerators_are_left_out() -> None:
    problem, target = figure_5_7()
    mechanism = Mechanism(problem.table, ROUND)
    mechanism.reset(problem, target, (7, 8, 9))
    mechanism.remove(7)
    mechanism.remove(7)
    assert mechanism.jobs == (8, 9)
    mechanism.lose(0, (0,))
    assert mechanism.available(0) == 0
    for scheduled in run(mechanism, 5):
        assert [one.worker for one in scheduled] == [1]
        assert scheduled[0].jobs in ((8,), (9,))
    mechanism.restore(0, (0,))
    assert {one.worker for one in mechanism.schedule()} == {0, 1}


def test_leases_are_renewed_in_place() -> None:
    problem, _ = figure_5_7()
    mechanism = Mechanism(problem.table, ROUND)
    shares = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    mechanism.reset(problem, allocation_of_shares(shares), (1, 2, 3))
    first, second = run(mechanism, 2)
    assert not any(one.renewed for one in first)
    assert all(one.renewed for one in second)
    assert [one.accelerators for one in first] == [one.accelerators for one in second]
    mechanism.reset(problem, allocation_of_shares(shares), (1, 2, 4))
    assert all(one.renewed for one in mechanism.schedule())


def test_larger_jobs_are_placed_first_and_on_one_server() -> None:
    rates = tuple(Rate("m", scale, "v100", 1.0) for scale in (1, 2, 4))
    jobs = tuple(Job(str(n), "m", 9.0, scale) for n, scale in enumerate((1, 2, 1, 4)))
    problem = problem_of(Workload(jobs, Throughputs(rates)), parse_pool("v100=2x4"))
    mechanism = Mechanism(problem.table, ROUND)
    mechanism.reset(problem, allocation_of_shares(np.ones((4, 1))), range(4))
    (scheduled,) = run(mechanism, 1)
    places = {one.jobs[0]: one.accelerators for one in scheduled}
    assert places == {3: (0, 1, 2, 3), 1: (4, 5), 0: (6,), 2: (7,)}


def test_what_earlier_targets_owe_decides_who_fills_idle_accelerators() -> None:
    problem, _ = figure_5_7()
    mechanism = Mechanism(problem.table, ROUND)
    mechanism.reset(
        problem, allocation_of_shares(np.array([[0, 0], [0.5, 0], [1.0, 0]])), (1, 2, 3)
    )
    owed = mechanism.schedule()
    for assignment in owed:
        if assignment.jobs == (3,):
            mechanism.account(assignment, 100.0)
    mechanism.reset(problem, allocation_of_shares(np.zeros((3, 2))), (1, 2, 3))
    assert mechanism.schedule()[0].jobs == (2,)
    strict = Mechanism(problem.table, ROUND, fill=False)
    strict.reset(problem, allocation_of_shares(np.zeros((3, 2))), (1, 2, 3))
    assert strict.schedule() == ()


def test_ids_name_the_problems_jobs_one_to_one() -> None:
    problem, target = figure_5_7()
    with pytest.raises(InvalidPlan, match="3 jobs have 2 different ids"):
        Mechanism(problem.table, ROUND).reset(problem, target, (1, 1, 2))
