"""Finish-time fairness, FIFO, SJF and early ends of a makespan, against programs over jobs."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import ModuleType

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples
from programs_over_jobs import Entries, kept
from strategies_allocation import Case, random_case

from stagewright.formulations.clusters.allocation import AllocationProblem, problem_of, throughput
from stagewright.formulations.clusters.policies import (
    fifo,
    finish_time,
    isolated,
    max_min,
    shortest_first,
)
from stagewright.formulations.clusters.polytope import group_by, polytope
from stagewright.formulations.forms.answers import Answer, Limits, Status
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.workloads.jobs import Job, PairRate, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.clusters.policies import allocate
from stagewright.solvers.clusters.policies import fifo as fifo_solver
from stagewright.solvers.clusters.policies import finish_time as finish_time_solver


def moving(problem: AllocationProblem, seed: int) -> AllocationProblem:
    """Some of the jobs run somewhere, and their next lease is hardly longer than a move."""
    rng, jobs = np.random.default_rng(seed), len(problem)
    return replace(
        problem,
        restart_seconds=rng.choice([0.0, 0.1, 1.0], jobs),
        current=rng.integers(-1, len(problem.table.workers), jobs),
        lease_seconds=rng.choice([0.5, 3.0, 30.0]),
    )


PAIRS = ("first", "second", "worker", "paired")
some = examples(12, derandomize=True)


def of_model(steps: list[float], pool: str, rates: dict[str, float]) -> AllocationProblem:
    """Jobs of one model on one accelerator each."""
    jobs = tuple(Job(f"job {n}", "a", count) for n, count in enumerate(steps))
    alone = tuple(Rate("a", 1, name, rate) for name, rate in rates.items())
    return problem_of(Workload(jobs, Throughputs(alone)), parse_pool(pool))


# Finish-time fairness.


def test_equal_jobs_finish_as_if_isolated():
    result = allocate(of_model([10.0, 10.0], "v100=1", {"v100": 1.0}), "finish-time-fairness")
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(1.0)
    assert result.bound == pytest.approx(1.0)
    assert not result.maximises


def test_a_late_job_catches_up_by_the_golden_ratio():
    """rho = (10 + 10 / x) / 20 = 10 / (1 - x) / 20, so that 1 - x^2 = x."""
    problem = replace(
        of_model([10.0, 10.0], "v100=1", {"v100": 1.0}), elapsed_seconds=np.array([10.0, 0.0])
    )
    result = allocate(problem, "finish-time-fairness")
    x = (np.sqrt(5) - 1) / 2
    assert result.objective == pytest.approx(1 / (2 * (1 - x)), rel=1e-6)
    assert throughput(problem, result.allocation) == pytest.approx([x, 1 - x], rel=1e-5)


@some
@given(random_case(max_jobs=7))
def test_no_allocation_beats_the_bound_and_one_reaches_the_objective(case: Case):
    problem = case.problem
    result, entries = allocate(problem, "finish-time-fairness"), Entries(problem)
    assert result.status is Status.OPTIMAL
    assert result.bound <= result.objective <= result.bound * (1 + 1e-6)
    reached = finish_time.ratios(problem, throughput(problem, result.allocation))
    assert reached.max() == pytest.approx(result.objective)
    assert entries.level(finish_time.needs(problem, result.objective)) >= 1 - 1e-7
    below = result.bound * (1 - 1e-5)
    if (below * finish_time.isolated_finish(problem) > problem.elapsed_seconds).all():
        assert entries.level(finish_time.needs(problem, below)) < 1


@some
@given(random_case())
def test_nobody_is_later_than_the_latest_of_the_isolated(case: Case):
    problem = case.problem
    split = finish_time.objective(problem, isolated.isolated(problem))
    result = allocate(problem, "finish-time-fairness")
    assert result.objective <= split * (1 + 1e-6)


def test_a_search_that_is_cut_short_keeps_what_it_has_proved(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(3)
    problem = of_model(list(rng.uniform(1, 50, 12)), "v100=3,k80=3", {"v100": 4.0, "k80": 1.0})
    problem = replace(problem, elapsed_seconds=rng.uniform(0, 20, 12))
    asked, whole = [], finish_time_solver.max_level

    def once(*arguments: object, **options: object) -> object:
        asked.append(arguments)
        level = whole(*arguments, **options)
        return level if len(asked) == 1 else replace(level, allocation=None)

    best = allocate(problem, "finish-time-fairness")
    monkeypatch.setattr(finish_time_solver, "max_level", once)
    result = allocate(problem, "finish-time-fairness")
    assert len(asked) == 2
    assert result.status is Status.FEASIBLE
    assert result.bound <= best.objective * (1 + 1e-9)
    assert result.objective >= best.bound
    assert result.gap > 1e-6


# First in, first out.


def test_the_first_runs_where_it_is_fastest_and_the_last_waits():
    problem = of_model([5.0, 5.0, 5.0], "k80=1,v100=1", {"k80": 1.0, "v100": 4.0})
    result = allocate(problem, "fifo")
    assert result.objective == pytest.approx(3 * 1 + 2 * 0.25)
    assert throughput(problem, result.allocation) == pytest.approx([4.0, 1.0, 0.0])


def test_a_later_job_may_join_the_first():
    workload = Workload(
        tuple(Job(name, "a", 5.0) for name in "xyz"),
        Throughputs((Rate("a", 1, "v100", 1.0),), (PairRate(("a", "a"), 1, "v100", (0.8, 0.8)),)),
    )
    problem = problem_of(workload, parse_pool("v100=1"), space_sharing=True)
    result = allocate(problem, "fifo")
    assert result.objective == pytest.approx((3 + 2) * 0.8)
    assert throughput(problem, result.allocation) == pytest.approx([0.8, 0.8, 0.0])


def sparing(problem: AllocationProblem) -> AllocationProblem:
    """Jobs on those of their counts alone on which an accelerator does most, by type and place."""
    table, alone = problem.table, problem.table.alone.copy()
    for kind, here in product(range(len(table.kinds)), table.workers):
        each = {
            worker: table.alone[kind, worker] / table.uses[kind, worker]
            for worker, other in enumerate(table.workers)
            if (other.accelerator, other.placement) == (here.accelerator, here.placement)
            and table.uses[kind, worker]
        }
        worse = [one for one, rate in each.items() if rate < max(each.values()) * (1 - 1e-9)]
        alone[kind, worse] = 0.0
    return replace(problem, table=replace(table, alone=alone))


@pytest.mark.parametrize(("policy", "order"), [("fifo", fifo), ("sjf", shortest_first)])
@some
@given(random_case(max_jobs=16))
def test_jobs_in_order_equal_the_programs_over_jobs(policy: str, order: ModuleType, case: Case):
    problem, floor = case.problem, np.zeros(len(case.problem))
    result = allocate(problem, policy)
    assert result.status is Status.OPTIMAL
    if any(job.counts for job in case.workload.jobs):
        first = sparing(problem)
        limits, value = Limits(seconds=np.inf), order.values(first)
        found = fifo_solver.most_value(first, value, floor, limits).allocation
        floor = throughput(first, found)
        assert value @ floor == pytest.approx(Entries(first).most(value, 0 * floor), rel=1e-7)
        assert (throughput(problem, result.allocation) >= floor * (1 - 1e-6) - 1e-5).all()
    elif policy == "sjf":
        floor = shortest_first.floor(problem)
        assert result.objective <= (problem.steps / problem.rates.max(axis=1)).min() * (1 + 1e-7)
        assert result.bound <= result.objective * (1 + 1e-9)
    value = order.values(problem)
    best = Entries(problem).most(value, floor * (1 - 1e-8))
    assert value @ throughput(problem, result.allocation) == pytest.approx(best, rel=1e-6)
    if result.maximises:
        assert (result.objective, result.bound) == (pytest.approx(best), pytest.approx(best))


def of_counts(steps: tuple[float, ...], rates: tuple[float, ...], gpus: int) -> AllocationProblem:
    """Jobs of one model that runs on 1, 2, 4, ... at these rates."""
    counts = tuple(2**power for power in range(len(rates)))
    alone = tuple(Rate("a", n, "v100", rate) for n, rate in zip(counts, rates, strict=True))
    jobs = tuple(Job(f"job {n}", "a", many, counts=counts) for n, many in enumerate(steps))
    return problem_of(Workload(jobs, Throughputs(alone)), parse_pool(f"v100={gpus}"))


def test_the_first_spreads_over_what_nobody_uses_better():
    """On 1, 2 and 4 a job makes 1, 1.8 and 3 steps a second."""
    reached = []
    for jobs in (1, 2, 3, 4, 6):
        problem = of_counts((9.0,) * jobs, (1.0, 1.8, 3.0), 4)
        reached.append(throughput(problem, allocate(problem, "fifo").allocation))
    expected = [[3], [2.4, 1], [1.8, 1, 1], [1] * 4, [1] * 4 + [0] * 2]
    for found, hoped in zip(reached, expected, strict=True):
        assert found == pytest.approx(hoped)


# The makespan's second stage.


def test_short_jobs_end_before_the_last():
    """One after the other on all four accelerators, instead of both until the end."""
    problem = of_counts((40.0, 120.0), (1.0, 2.0, 4.0), 4)
    result = allocate(problem, "makespan")
    assert result.objective == pytest.approx(40.0)
    assert throughput(problem, result.first) == pytest.approx([4.0, 0.0])


@some
@given(random_case(max_jobs=7))
def test_what_runs_first_delays_the_last_job_by_nothing(case: Case):
    problem = case.problem
    result = allocate(problem, "makespan")
    if result.first is None:
        return
    rates = throughput(problem, result.first)
    ends = (problem.steps[rates > 0] / rates[rates > 0]).min()
    left = problem.steps - rates * ends
    waiting = left > 1e-9 * problem.steps
    rest = 0.0
    if waiting.any():
        rest = allocate(replace(problem, steps=left).of(waiting), "makespan").objective
    assert ends + rest <= result.objective * (1 + 1e-5)


@some
@given(random_case(max_jobs=9), st.integers(0, 2**32 - 1))
def test_any_prices_bound_every_allocation(case: Case, seed: int):
    problem, rng = case.problem, np.random.default_rng(seed)
    value, floor = fifo.values(problem), np.zeros(len(problem))
    if rng.random() < 0.5:
        value, floor = shortest_first.values(problem), shortest_first.floor(problem)
    part = np.where(floor > 0, -1, rng.integers(0, 3, len(problem)))
    in_kind = np.bincount(problem.kind)[problem.kind]
    runs = np.where((in_kind > 1) & (part >= 0), part, -np.arange(len(problem)) - 1)
    some_pairs = rng.random(len(problem.table.first)) < rng.choice([0.0, 0.5, 1.0])
    table = {name: getattr(problem.table, name)[some_pairs] for name in PAIRS}
    fewer = replace(problem, table=replace(problem.table, **table))
    valid = polytope(fewer, group_by(fewer, runs))
    single = np.bincount(valid.groups.kind)[valid.groups.kind] == 1
    assume(not (single & (valid.groups.size > 1)).any())  # the solver cuts every kind in two
    form = fifo.value_program(valid, value, floor)
    duals = rng.normal(0, 1, len(form.row_upper)) * rng.integers(0, 2, len(form.row_upper))
    best = Entries(problem).most(value, floor)
    assert fifo.jobs_bound(problem, valid, form, duals, value, floor).bound >= best * (1 - 1e-9)


@pytest.mark.parametrize("answers", [1, 2])
def test_fifo_that_is_cut_short_says_so(answers: int, monkeypatch: pytest.MonkeyPatch):
    """The first answer is about which pairs to try."""
    rates = Throughputs(
        (Rate("a", 1, "v100", 4.0), Rate("a", 1, "k80", 1.0)),
        (PairRate(("a", "a"), 1, "v100", (3.0, 3.0)),),
    )
    jobs = tuple(Job(f"job {n}", "a", 1.0 + n) for n in range(59))
    problem = problem_of(Workload(jobs, rates), parse_pool("v100=7,k80=7"), space_sharing=True)
    asked, whole = [], fifo_solver.solve_form

    def some_of_them(*arguments: object) -> object:
        asked.append(arguments)
        if len(asked) > answers:
            return Answer(Status.NO_ANSWER, None, None, -np.inf, 0.0, "none")
        return whole(*arguments)

    best = allocate(problem, "fifo").objective
    monkeypatch.setattr(fifo_solver, "solve_form", some_of_them)
    result = allocate(problem, "fifo")
    if answers == 1:
        assert result.status is Status.NO_ANSWER
        assert result.allocation is None
    else:
        assert result.status is Status.FEASIBLE
        assert result.objective < best < result.bound


@examples(8, derandomize=True)
@given(random_case(max_jobs=10, space_sharing=True))
def test_pairs_that_gain_are_let_in(case: Case):
    problem = case.problem
    none = np.zeros(len(problem.table.first), dtype=bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fifo_solver, "_first_pairs", lambda *_: none.copy())
        result = allocate(problem, "fifo")
    best = Entries(problem).most(fifo.values(problem), np.zeros(len(problem)))
    assert result.objective == pytest.approx(best, rel=1e-7)


# Shortest job first.


def test_the_shortest_goes_first_and_the_next_follow():
    problem = of_model([8.0, 2.0, 4.0], "v100=1,k80=1", {"v100": 4.0, "k80": 1.0})
    result = allocate(problem, "sjf")
    assert result.objective == pytest.approx(0.5)
    assert result.bound == pytest.approx(0.5)
    assert throughput(problem, result.allocation) == pytest.approx([0.0, 4.0, 1.0])
    assert "'job 1'" in result.notes[0]


def test_the_shortest_spreads_over_what_nobody_uses_better():
    problem = of_counts((9.0, 1.0, 3.0), (1.0, 1.8, 3.0), 4)
    result = allocate(problem, "sjf")
    assert throughput(problem, result.allocation) == pytest.approx([1.0, 1.8, 1.0])
    assert result.objective == pytest.approx(1 / 3 + 3 * 1.8 / 3 + 2 / 3)


# Moves, in all policies.


@pytest.mark.parametrize(
    ("policy", "value"),
    [
        ("fifo", fifo.values),
        ("sjf", shortest_first.values),
        ("max-throughput", lambda problem: 1 / problem.rates.max(axis=1)),
        ("max-min", None),
    ],
)
@some
@given(random_case(), st.integers(0, 2**32 - 1))
def test_policies_count_the_time_of_moves(
    policy: str,
    value: Callable[[AllocationProblem], Floats] | None,
    case: Case,
    seed: int,
):
    problem = moving(case.problem, seed)
    assume(policy not in ("fifo", "sjf") or not problem.elastic)
    result, entries = allocate(problem, policy), Entries(problem)
    if value is None:
        assert result.objective == pytest.approx(entries.level(max_min.needs(problem)), rel=1e-6)
        return
    floor = np.zeros(len(problem))
    if policy == "sjf":
        shortest = (problem.steps / problem.rates.max(axis=1)).argmin()
        floor[shortest] = (problem.rates * kept(problem))[shortest].max()
    best = entries.most(value(problem), floor * (1 - 1e-8))
    assert value(problem) @ throughput(problem, result.allocation) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(
    ("rate", "steps", "moves"), [(1.04, 1e9, False), (1.06, 1e9, True), (1.06, 500.0, False)]
)
def test_a_job_moves_for_more_than_the_move_costs(rate: float, steps: float, moves: bool):
    """50 s of 1,050 until the next allocation, or of 550 until the job's end."""
    problem = of_model([steps], "v100=1,k80=1", {"v100": 1.0, "k80": rate})
    problem = replace(
        problem,
        restart_seconds=np.array([50.0]),
        current=np.array([0]),
        lease_seconds=1000.0,
    )
    for policy in ("max-min", "makespan", "fifo", "sjf", "max-throughput", "water-filling"):
        shares = allocate(problem, policy).allocation.dense(1, 2)
        assert shares == pytest.approx(np.array([[1.0 - moves, float(moves)]]), abs=1e-5)


# Common to them, and to other policies.


@pytest.mark.parametrize("policy", ["max-min", "water-filling", "makespan", "max-throughput"])
@some
@given(random_case(), st.data())
def test_one_more_accelerator_buys_no_more_than_its_price(
    policy: str, case: Case, data: st.DataObject
):
    """The price is between the slopes of the optimum to the right and to the left."""
    problem = case.problem
    result, entries, fastest = allocate(problem, policy), Entries(problem), problem.table.alone
    number = data.draw(st.integers(0, len(problem.table.counts) - 1))
    row, upper = len(problem) + number, entries.upper.copy()

    def best(more: float) -> float:
        entries.upper[row] = upper[row] + more
        if policy == "max-throughput":
            value = 1 / fastest.max(axis=1)[problem.kind]
            return entries.most(value, np.zeros(len(problem)))
        return entries.level(problem.steps if policy == "makespan" else max_min.needs(problem))

    price, step = result.one_more[number], 1e-3
    if policy == "makespan":  # seconds: the program is in 1 / T
        assert 1 / best(1.0) >= (result.bound - price) * (1 - 1e-6)
        price = 1 / (result.bound - price) - 1 / result.bound
    scale = best(0.0)
    assert (best(step) - scale) / step <= price + 1e-4 * scale
    assert price <= (scale - best(-step)) / step + 1e-4 * scale


@pytest.mark.parametrize("policy", ["finish-time-fairness", "fifo"])
@examples(6, derandomize=True)
@given(random_case(space_sharing=True, placement=False))
def test_colocation_is_never_worse(policy: str, case: Case):
    alone = problem_of(case.workload, case.pool)
    alone = replace(
        alone,
        elapsed_seconds=case.problem.elapsed_seconds,
        isolated_seconds=case.problem.isolated_seconds,
    )
    shared, apart = allocate(case.problem, policy), allocate(alone, policy)
    better = 1 if shared.maximises else -1
    assert better * (shared.objective - apart.objective) >= -2e-6 * abs(apart.objective)
