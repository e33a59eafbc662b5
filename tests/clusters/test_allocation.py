"""Allocations from the definitions: the checker, throughputs, server rows, groups, theorems."""

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples
from scipy.optimize import linprog
from strategies_allocation import Case, random_case, use_of

from stagewright.formulations.clusters.allocation import (
    Allocation,
    AllocationProblem,
    allocation_of_shares,
    check,
    problem_of,
    throughput,
)
from stagewright.formulations.clusters.rates import server_rows
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.workloads.jobs import Job, PairRate, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import Accelerator, Pool, parse_pool
from stagewright.solvers.clusters.policies import allocate

TIMES = ("elapsed_seconds", "isolated_seconds", "deadline_seconds")
small = examples(12, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def allocation_of(entries: list[tuple[int, int, int, float]]) -> Allocation:
    job, partner, worker, share = zip(*entries, strict=True) if entries else ((), (), (), ())
    return Allocation(
        np.array(job, dtype=np.int64),
        np.array(partner, dtype=np.int64),
        np.array(worker, dtype=np.int64),
        np.array(share, dtype=float),
    )


def entries_of(allocation: Allocation) -> list[tuple[int, int, int, float]]:
    columns = (allocation.job, allocation.partner, allocation.worker, allocation.share)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# The checker, by mutation.

# Workers: 0 v100 consolidated, 1 v100 spread, 2 k80 consolidated, 3 k80 spread.
POOL = parse_pool("v100=2x4@2.48,k80=1x4@0.45")
MODELS = (("a", 1), ("a", 1), ("b", 1), ("c", 3), ("c", 3), ("c", 3), ("d", 2))
WORKLOAD = Workload(
    tuple(Job(f"job {n}", model, 10.0, scale) for n, (model, scale) in enumerate(MODELS)),
    Throughputs(
        tuple(
            Rate(model, scale, name, 0.0 if (model, name) == ("b", "k80") else rate, rate / 2)
            for model, scale in dict.fromkeys(MODELS)
            for name, rate in (("v100", 8.0), ("k80", 4.0))
        ),
        (
            PairRate(("a", "a"), 1, "v100", (6.0, 6.0)),
            PairRate(("a", "b"), 1, "v100", (5.0, 7.0)),
            PairRate(("c", "c"), 3, "v100", (6.0, 6.0), (3.0, 3.0)),
        ),
    ),
)
PROBLEM = problem_of(WORKLOAD, POOL, space_sharing=True, placement=True)
VALID = [
    (0, 1, 0, 0.5),
    (0, 2, 0, 0.25),
    (0, -1, 2, 0.25),
    (1, -1, 2, 0.5),
    (3, 4, 0, 0.5),
    (5, -1, 1, 0.5),
    (6, -1, 3, 1.0),
]


def test_the_allocation_to_be_broken_is_valid():
    check(PROBLEM, allocation_of(VALID))


def with_entries(*added: tuple[int, int, int, float], start: int = 0) -> Allocation:
    return allocation_of([*VALID[start:], *added])


def with_values(**values: float) -> Allocation:
    """The first entry with other values."""
    broken = allocation_of(VALID)
    for name, value in values.items():
        getattr(broken, name)[0] = value
    return broken


ALONE = len(VALID)  # leaves the valid entries away
BROKEN: dict[str, tuple[Allocation, str]] = {
    "more time than there is": (with_entries((0, -1, 2, 0.1)), "'job 0' runs 1.1 of the time"),
    "more time, paired": (with_entries((0, 2, 0, 0.01)), "'job 0' runs 1.01"),
    "more time, as the second of a pair": (
        with_entries((1, -1, 2, 0.01)),
        "'job 1' runs 1.01 of the time",
    ),
    "more time in one entry": (with_values(share=1.5), "runs 2 of the time"),
    "negative": (with_values(share=-0.1), "negative or not finite"),
    "nan": (with_values(share=np.nan), "negative or not finite"),
    "infinite": (with_values(share=np.inf), "negative or not finite"),
    "no such job": (with_values(job=7), "a job is not one of the problem's"),
    "negative job": (with_values(job=-1), "a job is not one of the problem's"),
    "no such partner": (with_values(partner=7), "a partner is not one"),
    "negative partner": (with_values(partner=-2), "a partner is not one"),
    "no such worker": (with_values(worker=4), "a worker is not one"),
    "negative worker": (with_values(worker=-1), "a worker is not one"),
    "with itself": (with_values(partner=0), "itself"),
    "pair of other scales": (with_values(partner=3), "no rate together"),
    "pair without a rate": (with_values(partner=1, worker=2), "no rate together on 'k80"),
    "pair without a rate apart": (with_values(worker=1), "no rate together on 'v100 spread'"),
    "pair the wrong way round": (with_values(job=2, partner=0), "'job 2' and 'job 0' have no rate"),
    "where it does not run": (with_entries((2, -1, 2, 0.1)), "'job 2' has time where it does not"),
    "one accelerator on two servers": (
        with_entries((2, -1, 1, 0.1)),
        "'job 2' has time where it does not",
    ),
    "over capacity": (
        with_entries((3, -1, 2, 0.5), (4, -1, 2, 0.5)),
        "accelerators 'k80' are in use on average, there are 4",
    ),
    "over capacity by both placements": (
        with_entries(
            (3, -1, 0, 0.6), (4, -1, 1, 1.0), (5, -1, 1, 1.0), (6, -1, 1, 0.4), start=ALONE
        ),
        "accelerators 'v100' are in use on average, there are 8",
    ),
    "servers that jobs of 3 overfill": (
        with_entries((3, -1, 0, 0.8), (4, -1, 0, 0.8), (5, -1, 0, 0.8), start=ALONE),
        "2.4 servers of 'v100.*, there are 2",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_allocations_are_rejected(name: str):
    allocation, message = BROKEN[name]
    with pytest.raises(InvalidPlan, match=message) as raised:
        check(PROBLEM, allocation)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("column", ["job", "partner", "worker", "share"])
def test_columns_of_other_lengths_are_rejected(column: str):
    allocation = allocation_of(VALID)
    short = replace(allocation, **{column: getattr(allocation, column)[:-1]})
    with pytest.raises(InvalidPlan, match="differ in length"):
        check(PROBLEM, short)


@small
@given(random_case(space_sharing=True), seeds, st.floats(0.01, 0.5))
def test_a_policys_allocation_with_more_of_anything_is_rejected(
    case: Case, seed: int, excess: float
):
    """Every job is made to run more than all of the time, through each of its entries."""
    allocation = allocate(case.problem, "max-min").allocation
    assert allocation is not None
    entry = np.random.default_rng(seed).integers(len(allocation.share))
    share = allocation.share.copy()
    share[entry] = 1 + excess
    with pytest.raises(InvalidPlan):
        check(case.problem, replace(allocation, share=share))


# Packings of jobs onto servers: what could run at one moment.


def random_packing(
    problem: AllocationProblem, rng: np.random.Generator
) -> list[tuple[int, int, int]]:
    """(job, partner, worker) of what runs together, every job at most once."""
    table = problem.table
    free = [
        np.full(accelerator.servers, accelerator.count // accelerator.servers)
        for accelerator in table.pool.accelerators
    ]
    placed: list[tuple[int, int, int]] = []
    waiting = rng.permutation(len(problem)).tolist()
    while waiting:
        job = waiting.pop()
        choices = [(job, -1, int(worker)) for worker in np.flatnonzero(problem.rates[job])]
        for first, second, worker in zip(table.first, table.second, table.worker, strict=True):
            for other in waiting:
                for a, b in ((job, other), (other, job)):
                    if (problem.kind[a], problem.kind[b]) == (first, second):
                        choices.append((a, b, int(worker)))
        chosen = choices[rng.integers(len(choices))]
        kind = table.workers[chosen[2]]
        size = table.pool.accelerators[kind.accelerator].per_server or 0
        if took(free[kind.accelerator], size, use_of(problem, job, chosen[2]), kind.placement, rng):
            placed.append(chosen)
            waiting = [other for other in waiting if other not in chosen[:2]]
    return placed


def took(
    free: np.ndarray, size: int, scale: int, placement: str | None, rng: np.random.Generator
) -> bool:
    """Take ``scale`` accelerators from what servers have ``free``; False where they have too few.

    A consolidated job has servers of its own, and what is left over of it on one more.
    """
    if placement != "consolidated":
        owners = np.repeat(np.arange(len(free)), free)
        if len(owners) >= scale:
            np.subtract.at(free, rng.permutation(owners)[:scale], 1)
        return len(owners) >= scale
    whole, rest = divmod(scale, size)
    order = sorted(rng.permutation(len(free)).tolist(), key=lambda server: -free[server])
    own, others = order[:whole], [server for server in order[whole:] if free[server] >= rest]
    if (free[own] < size).any() or len(own) < whole or (rest and not others):
        return False
    free[own] = 0
    if rest:
        free[rng.choice(others)] -= rest
    return True


@small
@given(random_case(), seeds)
def test_what_takes_turns_on_servers_is_valid(case: Case, seed: int):
    rng = np.random.default_rng(seed)
    part = rng.dirichlet(np.ones(4))
    check(
        case.problem,
        allocation_of(
            [(*entry, time) for time in part for entry in random_packing(case.problem, rng)]
        ),
    )


@examples(40, parent=small)
@given(st.integers(2, 8), st.integers(1, 3), st.lists(st.integers(1, 20), max_size=8), seeds)
def test_no_packing_breaks_a_server_row(size: int, servers: int, scales: list[int], seed: int):
    """Jobs of 1 to 20 accelerators, on servers of 2 to 8, consolidated."""
    scales = [scale for scale in scales if scale <= size * servers] or [1]
    problem = of_scales(scales, Accelerator("v100", size * servers, size))
    rng = np.random.default_rng(seed)
    running = [entry for entry in random_packing(problem, rng) if entry[2] == 0]
    for number, parts, there in server_rows(problem.table):
        assert number == 0
        assert there == servers
        assert sum(parts[problem.kind[job], 0] for job, _, _ in running) <= servers + 1e-9


def of_scales(scales: list[int], accelerator: Accelerator) -> AllocationProblem:
    jobs = tuple(Job(f"job {n}", "a", 1.0, scale) for n, scale in enumerate(scales))
    rates = tuple(Rate("a", scale, accelerator.name, 1.0, 0.5) for scale in set(scales))
    return problem_of(Workload(jobs, Throughputs(rates)), Pool((accelerator,)), placement=True)


@pytest.mark.parametrize(("scale", "size", "servers", "fit"), [(3, 4, 3, 3), (5, 8, 2, 2)])
def test_server_rows_see_what_does_not_fit(scale: int, size: int, servers: int, fit: int):
    problem = of_scales([scale] * 4, Accelerator("v100", size * servers, size))
    assert min(there / parts[0, 0] for _, parts, there in server_rows(problem.table)) == fit


# Throughput, slowly.


def slow_throughput(case: Case, allocation: Allocation) -> np.ndarray:
    found = np.zeros(len(case.problem))
    rates = {(r.model, r.scale, r.accelerator): r for r in case.workload.throughputs.alone}
    pairs = {(r.models, r.scale, r.accelerator): r for r in case.workload.throughputs.pairs}
    for job, partner, column, share in entries_of(allocation):
        worker = case.problem.table.workers[column]
        name, spread = case.pool.names[worker.accelerator], worker.placement == "spread"
        me = case.workload.jobs[job]
        if partner < 0:
            rate = rates[me.model, worker.count or me.scale, name]
            found[job] += share * (
                rate.spread_steps_per_second if spread else rate.steps_per_second
            )
            continue
        other = case.workload.jobs[partner]
        both = pairs.get(((me.model, other.model), me.scale, name))
        swapped = pairs.get(((other.model, me.model), me.scale, name))
        if both is not None:
            x, y = both.spread_steps_per_second if spread else both.steps_per_second
        else:
            y, x = swapped.spread_steps_per_second if spread else swapped.steps_per_second
        found[job] += share * x
        found[partner] += share * y
    return found


@small
@given(random_case(), seeds)
def test_throughput_equals_the_sum_over_entries(case: Case, seed: int):
    rng = np.random.default_rng(seed)
    allocation = allocation_of(
        [(*entry, rng.random()) for _ in range(5) for entry in random_packing(case.problem, rng)]
    )
    np.testing.assert_allclose(
        throughput(case.problem, allocation), slow_throughput(case, allocation), rtol=1e-12
    )


# Groups of like jobs cost nothing: the linear program with a variable for each job.


def linear_program(problem: AllocationProblem, need: np.ndarray) -> float:
    """The most that all jobs' throughput can be of ``need``, a variable for each job and pair."""
    table, jobs = problem.table, len(problem)
    columns = [(m, -1, w, problem.rates[m, w], 0.0) for m, w in np.argwhere(problem.rates)]
    for a, b, w, (x, y) in zip(table.first, table.second, table.worker, table.paired, strict=True):
        for m in np.flatnonzero(problem.kind == a):
            columns += [(m, n, w, x, y) for n in np.flatnonzero(problem.kind == b) if m != n]
    rows, types = np.zeros((2 * jobs, len(columns) + 1)), len(table.pool.accelerators)
    of_type = np.zeros((types, len(columns) + 1))
    servers = [(parts, there, np.zeros(len(columns) + 1)) for _, parts, there in server_rows(table)]
    for column, (m, n, w, x, y) in enumerate(columns):
        for member, rate in ((m, x), (n, y)):
            if member >= 0:
                rows[member, column] = 1.0
                rows[jobs + member, column] = -rate / need[member]
        of_type[table.accelerator[w], column] = use_of(problem, m, w)
        for parts, _, row in servers:
            row[column] = parts[problem.kind[m], w]
    rows[jobs:, -1] = 1.0
    limits = [*np.ones(jobs), *np.zeros(jobs), *table.counts, *(row[1] for row in servers)]
    matrix = np.vstack([rows, of_type, *(row[2] for row in servers)])
    cost = np.zeros(len(columns) + 1)
    cost[-1] = -1.0
    return -linprog(cost, A_ub=matrix, b_ub=limits).fun


@examples(20, parent=small)
@given(random_case(max_jobs=14))
def test_groups_of_like_jobs_lose_nothing(case: Case):
    problem = case.problem
    fair = linear_program(problem, problem.weight * problem.fair_throughput())
    assert allocate(problem, "max-min").objective == pytest.approx(fair, rel=1e-7)
    fast = linear_program(problem, problem.steps)
    assert allocate(problem, "makespan").objective == pytest.approx(1 / fast, rel=1e-7)


def of_one_accelerator(jobs: tuple[Job, ...], count: int = 1) -> AllocationProblem:
    """Two of "a" together run at 3 each, of 4 alone; "a" with "b" at 4 and 1, of 4 and 2."""
    throughputs = Throughputs(
        (Rate("a", 1, "v100", 4.0), Rate("b", 1, "v100", 2.0)),
        (PairRate(("a", "a"), 1, "v100", (3.0, 3.0)), PairRate(("b", "a"), 1, "v100", (1.0, 4.0))),
    )
    return problem_of(
        Workload(jobs, throughputs), Pool((Accelerator("v100", count),)), space_sharing=True
    )


@pytest.mark.parametrize(
    ("models", "weights", "count", "expected"),
    [
        ("a", (1,), 1, 1.0),
        ("b", (2,), 1, 0.5),
        ("aa", (1, 1), 1, 0.75),
        ("aaa", (1, 1, 1), 1, 0.5),  # one of three pairs at a time
        ("aaa", (1, 1, 1), 2, 5 / 6),  # a pair and the third alone, in turn
        ("ab", (1, 1), 1, 2 / 3),  # a third of the time b is alone
        ("aa", (2, 1), 1, 3 / 7),  # 4/7 of the time together, then the first alone
    ],
)
def test_pairs_by_hand(models: str, weights: tuple[int, ...], count: int, expected: float):
    jobs = tuple(
        Job(f"job {n}", model, 1.0, weight=float(weight))
        for n, (model, weight) in enumerate(zip(models, weights, strict=True))
    )
    problem = of_one_accelerator(jobs, count)
    result = allocate(problem, "max-min")
    assert result.allocation is not None
    check(problem, result.allocation)
    reached = throughput(problem, result.allocation) / (problem.weight * problem.fair_throughput())
    assert min(reached) == pytest.approx(expected)
    assert result.objective == pytest.approx(expected)
    assert result.bound == pytest.approx(expected)


# The thesis's theorems (5.4.4), and relations between problems.


def test_the_thesis_example():
    """5.4.1: one V100, one K80, three jobs."""
    rates = {"job 0": (40.0, 10.0), "job 1": (12.0, 4.0), "job 2": (100.0, 50.0)}
    throughputs = Throughputs(
        tuple(
            Rate(model, 1, name, rate)
            for model, both in rates.items()
            for name, rate in zip(("v100", "k80"), both, strict=True)
        )
    )
    jobs = tuple(Job(name, name, 1.0) for name in rates)
    problem = problem_of(Workload(jobs, throughputs), parse_pool("v100=1,k80=1"))
    result = allocate(problem, "max-min")
    assert result.allocation is not None
    expected = [[0.4545, 0.0], [0.4545, 0.0909], [0.0909, 0.9091]]
    np.testing.assert_allclose(result.allocation.dense(3, 2), expected, atol=1e-4)
    isolated = allocation_of_shares(np.full((3, 2), 1 / 3))
    check(problem, isolated)
    gain = throughput(problem, result.allocation) / throughput(problem, isolated)
    np.testing.assert_allclose(gain, 12 / 11)  # "about 10 % higher"


@small
@given(random_case(placement=False))
def test_sharing_incentive(case: Case):
    """Nobody's objective is better where each of n jobs has 1/n of every type, by itself."""
    problem, jobs = case.problem, len(case.problem)
    share = np.zeros(problem.rates.shape)
    for job, (number, count) in product(range(jobs), enumerate(problem.table.counts)):
        parts = {  # of its time, on each number of accelerators that the job may have
            worker: count / (jobs * use_of(problem, job, worker))
            for worker in np.flatnonzero(problem.table.accelerator == number).tolist()
            if use_of(problem, job, worker)
        }
        best = max(parts, key=lambda one: problem.rates[job, one] * min(1.0, parts[one]))
        share[job, best] = parts[best]
    share /= np.maximum(1.0, share.sum(axis=1, keepdims=True))
    apart = (problem.rates * share).sum(axis=1)
    np.testing.assert_allclose(apart, problem.isolated_throughput())
    check(problem, allocation_of_shares(np.where(problem.rates > 0, share, 0.0)))
    normalised = apart / (problem.weight * problem.fair_throughput())
    assert at_least(allocate(problem, "max-min").objective, normalised.min())
    assert at_least((problem.steps / apart).max(), allocate(problem, "makespan").objective)
    together = replace(problem, isolated_seconds=problem.elapsed_seconds)
    assert at_least(1.0, allocate(together, "finish-time-fairness").objective)


@small
@given(random_case(max_jobs=4, space_sharing=False), seeds)
def test_a_choice_of_counts_is_no_worse_than_any_of_them(case: Case, seed: int):
    """Jobs held to one of their counts each: a restriction of the same problem."""
    rng = np.random.default_rng(seed)
    held = tuple(
        replace(job, scale=int(rng.choice(job.counts)), counts=()) if job.counts else job
        for job in case.workload.jobs
    )
    try:
        restricted = problem_of(
            replace(case.workload, jobs=held), case.pool, placement=case.placement
        )
    except InputError:
        assume(False)  # a job runs nowhere on the number that was drawn
    fewer, more = (allocate(problem, "makespan") for problem in (restricted, case.problem))
    assert at_least(fewer.objective, more.objective)


def test_counts_by_hand():
    """Two jobs on four accelerators that double nothing: both have two all of the time.

    On 1, 2 and 4 a job makes 1, 2 and 3 steps a second, so that 2 and 2 beat 4 in turns.
    """
    rates = tuple(Rate("a", n, "v100", rate) for n, rate in ((1, 1.0), (2, 2.0), (4, 3.0)))
    jobs = tuple(Job(name, "a", 60.0, counts=(1, 2, 4)) for name in ("x", "y"))
    problem = problem_of(Workload(jobs, Throughputs(rates)), parse_pool("v100=4"))
    result = allocate(problem, "makespan")
    assert result.objective == pytest.approx(30.0)
    assert result.bound == pytest.approx(30.0)
    lone = problem_of(Workload(jobs[:1], Throughputs(rates)), parse_pool("v100=4"))
    assert allocate(lone, "makespan").objective == pytest.approx(20.0)


def at_least(value: float | None, least: float | None) -> bool:
    assert value is not None
    assert least is not None
    return value >= least * (1 - 1e-7)


@small
@given(random_case(space_sharing=True))
def test_colocation_never_hurts(case: Case):
    alone = problem_of(case.workload, case.pool, placement=case.placement)
    assert at_least(
        allocate(case.problem, "max-min").objective, allocate(alone, "max-min").objective
    )
    assert at_least(
        allocate(alone, "makespan").objective, allocate(case.problem, "makespan").objective
    )


@small
@given(random_case(placement=False), st.integers(0, 2))
def test_one_more_accelerator_never_delays_the_last_job(case: Case, number: int):
    accelerators = list(case.pool.accelerators)
    number %= len(accelerators)
    one_more = replace(accelerators[number], count=accelerators[number].count + 1, per_server=None)
    accelerators[number] = one_more
    larger = problem_of(case.workload, Pool(tuple(accelerators)), space_sharing=case.space_sharing)
    assert at_least(
        allocate(case.problem, "makespan").objective, allocate(larger, "makespan").objective
    )


@small
@given(random_case(placement=False))
def test_the_cluster_twice_is_never_less_fair(case: Case):
    twice = Pool(
        tuple(
            replace(accelerator, count=2 * accelerator.count)
            for accelerator in case.pool.accelerators
        )
    )
    larger = problem_of(case.workload, twice, space_sharing=case.space_sharing)
    assume((larger.rates == case.problem.rates).all())  # nobody fits where they did not
    assert at_least(
        allocate(larger, "max-min").objective, allocate(case.problem, "max-min").objective
    )


@pytest.mark.parametrize(
    "policy", ["water-filling", "makespan", "finish-time-fairness", "max-throughput", "min-cost"]
)
@small
@given(random_case(), st.randoms(use_true_random=False))
def test_the_order_of_jobs_and_of_types_does_not_matter(policy: str, case: Case, rng: Random):
    jobs, types = list(case.workload.jobs), list(case.pool.accelerators)
    rng.shuffle(jobs)
    rng.shuffle(types)
    problem = problem_of(
        replace(case.workload, jobs=tuple(jobs)),
        Pool(tuple(types)),
        space_sharing=case.space_sharing,
        placement=case.placement,
    )
    order = [case.problem.names.index(name) for name in problem.names]
    times = {name: getattr(case.problem, name)[order] for name in TIMES}
    mine = allocate(replace(problem, **times), policy)
    assert mine.objective == pytest.approx(allocate(case.problem, policy).objective, rel=2e-6)


@examples(8, parent=small)
@given(random_case())
def test_rates_in_another_unit_change_times_alone(case: Case):
    table = case.problem.table
    faster = replace(
        case.problem, table=replace(table, alone=2 * table.alone, paired=2 * table.paired)
    )
    assert allocate(faster, "max-min").objective == pytest.approx(
        allocate(case.problem, "max-min").objective
    )
    assert allocate(faster, "las").objective == pytest.approx(
        allocate(case.problem, "las").objective
    )
    seconds = allocate(case.problem, "makespan").objective
    assert seconds is not None
    assert allocate(faster, "makespan").objective == pytest.approx(seconds / 2)


@pytest.mark.parametrize("aware", ["max-min", "makespan", "finish-time-fairness", "fifo", "sjf"])
@examples(8, derandomize=True)
@given(case=random_case(space_sharing=False, placement=False))
def test_aware_equals_agnostic_on_a_homogeneous_cluster(aware: str, case: Case):
    largest = max(case.pool.accelerators, key=lambda accelerator: accelerator.count)
    problem = problem_of(case.workload, Pool((largest,)))
    problem = replace(problem, elapsed_seconds=case.problem.elapsed_seconds)
    agnostic = "las" if aware == "max-min" else f"{aware}-agnostic"
    mine, other = allocate(problem, aware), allocate(problem, agnostic)
    assert mine.objective == pytest.approx(other.objective, rel=2e-6)
    assert mine.bound == pytest.approx(other.bound, rel=2e-6)


def test_a_pair_of_unequal_jobs_of_one_kind_is_not_ruled_out():
    # Steps 1 and 1.4 on one accelerator: both run together until the shorter is done.
    workload = Workload(
        (Job("short", "a", 1.0), Job("long", "a", 1.4)),
        Throughputs((Rate("a", 1, "v100", 1.0),), (PairRate(("a", "a"), 1, "v100", (0.9, 0.9)),)),
    )
    result = allocate(problem_of(workload, parse_pool("v100=1"), space_sharing=True), "makespan")
    assert result.objective == pytest.approx(1 / 0.9 + 0.4)
    assert result.gap == pytest.approx(0, abs=1e-9)


def test_a_pair_without_a_partner_counts_in_no_bound():
    workload = Workload(
        (Job("only", "a", 5.0),),
        Throughputs((Rate("a", 1, "v100", 3.0),), (PairRate(("a", "a"), 1, "v100", (8.0, 8.0)),)),
    )
    result = allocate(problem_of(workload, parse_pool("v100=1"), space_sharing=True), "sjf")
    assert result.objective == result.bound == pytest.approx(5 / 3)


def test_equal_needs_that_rounding_tells_apart_still_pair():
    workload = Workload(
        (Job("a", "a", 0.3), Job("b", "a", 0.1 + 0.2)),
        Throughputs((Rate("a", 1, "v100", 1.0),), (PairRate(("a", "a"), 1, "v100", (0.9, 0.9)),)),
    )
    result = allocate(problem_of(workload, parse_pool("v100=1"), space_sharing=True), "makespan")
    assert result.objective == pytest.approx(0.3 / 0.9)


def test_little_beside_much_is_served_too():
    workload = Workload(
        (Job("little", "a", 1e-3), Job("much", "a", 1e8)), Throughputs((Rate("a", 1, "v100", 1.0),))
    )
    result = allocate(problem_of(workload, parse_pool("v100=1")), "makespan")
    assert result.objective == pytest.approx(1e8 + 1e-3)
