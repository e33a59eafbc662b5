"""Policies with costs against programs over single jobs, stated here from the definitions."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from programs_over_jobs import Entries
from scipy.optimize import linprog
from strategies_allocation import random_case, use_of

from stagewright.formulations.clusters.allocation import AllocationProblem, problem_of, throughput
from stagewright.formulations.clusters.policies import cost
from stagewright.formulations.clusters.polytope import group_by, polytope
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, PairRate, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.clusters.policies import POLICIES, allocate

HOUR = 3600.0


def problem(rates, jobs, pool, pairs=()):
    """``rates`` is {model: {accelerator: steps per second}}; the scale is the jobs' own."""
    scales = {job.model: job.scale for job in jobs}
    alone = tuple(
        Rate(model, scales.get(model, 1), accelerator, rate)
        for model, row in rates.items()
        for accelerator, rate in row.items()
    )
    workload = Workload(tuple(jobs), Throughputs(alone, tuple(pairs)))
    return problem_of(workload, parse_pool(pool), space_sharing=bool(pairs))


class Columns(Entries):
    """What each column costs an hour, and the work it does at the least cost of a step."""

    def __init__(self, asked: AllocationProblem):
        super().__init__(asked)
        table = asked.table
        price = [table.pool.accelerators[one].dollars_per_hour for one in table.accelerator]
        use = [[use_of(asked, job, w) for w in range(len(price))] for job in range(len(asked))]
        of = np.array(use) * price
        self.cost = np.array([of[job, worker] for job, _, worker, *_ in self.columns])
        runs = asked.rates > 0
        cheapest = np.where(runs, of / np.where(runs, asked.rates, 1.0), np.inf).min(axis=1)
        self.work = cheapest @ self.rate

    def best_ratio(self, floor):
        """Dinkelbach's iteration (1967)."""
        x = self.least(self.cost, floor).x
        x = self.least(-self.work, floor).x if self.cost @ x < 1e-9 else x
        while True:
            ratio = self.work @ x / (self.cost @ x)
            answer = self.least(ratio * self.cost - self.work, floor)
            if -answer.fun <= 1e-8 * (self.cost @ x):
                return ratio
            x = answer.x


def test_throughput_counts_a_job_by_its_best_and_not_by_its_steps():
    quick, slow = Job("quick", "tiny", 1.0), Job("slow", "huge", 1.0)
    rates = {"tiny": {"a": 1000.0, "b": 900.0}, "huge": {"a": 1.0, "b": 0.1}}
    result = allocate(problem(rates, [quick, slow], "a=1,b=1"), "max-throughput")
    assert result.objective == pytest.approx(1.9)


@examples(15)
@given(random_case())
def test_cost_is_the_ratio_of_the_best_columns_and_then_the_most_work(case):
    asked = case.problem
    columns = Columns(asked)
    ratios = columns.work / columns.cost
    result = allocate(asked, "min-cost")
    assert result.objective == pytest.approx(ratios.max(), rel=2e-9)
    assert result.bound == pytest.approx(ratios.max(), rel=1e-8)
    efficient = np.where(ratios >= ratios.max() * (1 - 1e-9), columns.work, -1e6)
    least = cost.least_cost(asked)[asked.kind]
    work = least @ throughput(asked, result.allocation)
    assert work >= -columns.least(-efficient, np.zeros(len(asked))).fun * (1 - 1e-6)
    if not case.space_sharing:
        assert ratios.max() == pytest.approx(1)
        assert result.objective <= 1 + 1e-12


def test_a_job_runs_where_its_steps_are_cheapest_and_waits_otherwise():
    rates = {"k": {"new": 4.0, "old": 1.5}, "l": {"new": 4.0, "old": 0.5}}
    jobs = [Job("0", "k", 1.0), Job("1", "k", 1.0), Job("2", "l", 1.0)]
    asked = problem(rates, jobs, "new=3@3,old=1@1")
    result = allocate(asked, "min-cost")
    assert throughput(asked, result.allocation) == pytest.approx([0.75, 0.75, 4], rel=1e-6)
    assert cost.dollars_per_hour(asked, result.allocation) == pytest.approx(4, rel=1e-6)
    assert result.notes == ()
    asked = problem(rates, jobs, "new=3@9,old=1@1")
    dear = allocate(asked, "min-cost")
    assert cost.dollars_per_hour(asked, dear.allocation) == pytest.approx(1, rel=1e-6)
    assert re.fullmatch(r"[12] of 3 jobs wait: what is free now .*", dear.notes[0])


def test_a_pair_pays_once():
    pair = PairRate(("k", "k"), 1, "a", (0.9, 0.9))
    asked = problem({"k": {"a": 1.0}}, [Job("0", "k", 1), Job("1", "k", 1)], "a=5@2", [pair])
    result = allocate(asked, "min-cost")
    assert result.objective == pytest.approx(1.8)
    assert cost.dollars_per_hour(asked, result.allocation) == pytest.approx(2)
    hours = allocate(asked, "makespan-budget", budget_dollars=2 / HOUR / 0.9)
    assert hours.objective == pytest.approx(1 / 0.9)


def test_placement_has_prices_too():
    jobs = [Job(str(i), "k", 100.0, scale=2) for i in range(3)]
    rate = Rate("k", 2, "a", 2.0, spread_steps_per_second=1.0)
    workload = Workload(tuple(jobs), Throughputs((rate,)))
    asked = problem_of(workload, parse_pool("a=2x3@1"), placement=True)
    # A server of three holds one job of two at once: two of the three run on servers of their own.
    result = allocate(asked, "min-cost")
    assert result.objective == pytest.approx(1)
    assert throughput(asked, result.allocation).sum() == pytest.approx(4, rel=1e-6)
    spread = allocate(asked, "max-throughput")
    assert spread.objective == pytest.approx(2.5)
    hasty = allocate(asked, "makespan-budget", budget_dollars=1e3)
    assert hasty.objective == pytest.approx(60)
    assert hasty.gap == pytest.approx(0, abs=1e-8)


@examples(15)
@given(random_case())
def test_of_slos_that_do_not_fit_the_least_is_missing(case):
    asked = case.problem
    columns, need = Columns(asked), cost.needs(asked)
    need[cost.too_fast(asked)] = 0.0
    result = allocate(asked, "min-cost-slo")
    asking = np.flatnonzero(need)
    if not len(asking):
        return
    short = linprog(
        np.concatenate([np.zeros(len(columns.cost)), np.ones(len(asking))]),
        np.block(
            [
                [columns.rows, np.zeros((len(columns.rows), len(asking)))],
                [-columns.rate[asking] / need[asking, None], -np.eye(len(asking))],
            ]
        ),
        np.concatenate([columns.upper, -np.ones(len(asking))]),
    ).fun
    part = np.minimum(1, throughput(asked, result.allocation)[asking] / need[asking])
    assert (1 - part).sum() <= short + 1e-5
    named = [note.split("'")[1] for note in result.notes if "together" in note]
    assert named == [asked.names[job] for job in asking[part < 1 - 1e-6]]


def test_few_jobs_are_short_by_much_and_named():
    jobs = [Job(str(i), "k", steps=HOUR, slo_seconds=HOUR) for i in range(3)]
    asked = problem({"k": {"a": 1.0}}, jobs, "a=2@1")
    result = allocate(asked, "min-cost-slo")
    assert result.status is Status.OPTIMAL
    assert sorted(throughput(asked, result.allocation)) == pytest.approx([0, 1, 1], abs=1e-6)
    (note,) = (note for note in result.notes if "SLO" in note)
    assert re.fullmatch(
        r"job '\d': needs 1 steps/s to meet its SLO in 1 h, "
        "gets 0 at best together with the others",
        note,
    )


def test_an_slo_beyond_every_accelerator_or_in_the_past_is_named():
    jobs = [
        Job("fast", "k", steps=7 * HOUR, slo_seconds=2 * HOUR),
        Job("late", "k", steps=HOUR, slo_seconds=HOUR),
        Job("fine", "k", steps=HOUR, slo_seconds=2 * HOUR),
    ]
    asked = problem({"k": {"a": 3.0}}, jobs, "a=1@1")
    asked = replace(asked, deadline_seconds=np.array([2 * HOUR, -HOUR / 2, 2 * HOUR]))
    result = allocate(asked, "min-cost-slo")
    assert result.notes[:2] == (
        "job 'fast': needs 3.5 steps/s to meet its SLO in 2 h, no accelerator is fast enough "
        "(at best 3: no SLO below 2.33 h can be met); served as if it had none",
        "job 'late': its SLO passed 0.5 h ago; served as if it had none",
    )
    reached = throughput(asked, result.allocation)
    assert reached[2] >= 0.5 * (1 - 1e-6)
    assert reached.sum() == pytest.approx(3)


def test_slos_of_many_jobs_are_grouped_without_loss():
    """Needs within a factor of 1.5 on scarce fast accelerators: groups must split."""
    rng = np.random.default_rng(0)
    jobs = [
        Job(str(i), "k", steps=1000.0, slo_seconds=float(1000 / rng.uniform(1, 3.9)))
        for i in range(60)
    ]
    asked = problem({"k": {"fast": 4.0, "slow": 1.0}}, jobs, "fast=37@9,slow=40@1")
    need = cost.needs(asked)
    result = allocate(asked, "min-cost-slo")
    assert (throughput(asked, result.allocation) >= need * (1 - 1e-6)).all()
    assert result.objective == pytest.approx(Columns(asked).best_ratio(need), rel=1e-6)
    assert result.gap <= 1e-7


@pytest.mark.parametrize("enough", [False, True])
@examples(8)
@given(random_case(), st.floats(1e-4, 1))
def test_the_makespan_within_a_budget_is_that_of_the_bisection(enough, case, share):
    """Thesis 6.4.3: M is feasible if what M needs costs at most B / M an hour."""
    asked = replace(case.problem, steps=1e4 * case.problem.steps)  # far above tolerances
    columns = Columns(asked)

    def dollars(makespan):
        answer = columns.least(columns.cost, asked.steps / makespan)
        return answer.fun * makespan / HOUR if answer.status == 0 else math.inf

    least = dollars(1e7)
    limit = (1 + 2 * share if enough else 1 - share / 2) * least
    result = allocate(asked, "makespan-budget", budget_dollars=limit)
    if not enough:
        assert result.status is Status.INFEASIBLE
        assert f"cost at least ${least:.3g}"[:-1] in result.notes[0]
    else:
        assert result.gap <= 2e-8
        assert dollars(result.objective * (1 + 1e-5)) <= limit * (1 + 1e-5)
        assert dollars(result.objective * (1 - 1e-4)) > limit * (1 - 1e-9)
        hours = result.objective / HOUR
        spent = hours * cost.dollars_per_hour(asked, result.allocation)
        assert spent <= limit * (1 + 1e-6)
        assert spent == pytest.approx(dollars(result.objective * (1 + 1e-9)), rel=1e-4)


@examples(6)
@given(random_case(space_sharing=False))
def test_a_larger_budget_is_never_slower_and_a_boundless_one_is_makespan(case):
    asked = case.problem
    found = [
        allocate(asked, "makespan-budget", budget_dollars=dollars).objective or math.inf
        for dollars in (0.5, 2, 8, 1e6)
    ]
    assert all(after <= before * (1 + 1e-8) for before, after in pairwise(found))
    assert found[-1] == pytest.approx(allocate(asked, "makespan").objective, rel=1e-7)
    assert found[-1] >= cost.unit_seconds(asked) * (1 - 1e-9)


def test_a_budget_that_is_too_small_names_one_that_is_not():
    jobs = [Job(str(i), "k", steps=3 * HOUR) for i in range(4)]
    asked = problem({"k": {"new": 3.0, "old": 1.0}}, jobs, "new=2@6,old=1@1")
    refused = allocate(asked, "makespan-budget", budget_dollars=5)
    assert refused.status is Status.INFEASIBLE
    assert refused.allocation is None
    least, hours = re.search(r"at least \$([\d.]+), .* after ([\d.]+) h", refused.notes[0]).groups()
    assert (float(least), float(hours)) == pytest.approx((12, 12), rel=1e-4)
    granted = allocate(asked, "makespan-budget", budget_dollars=float(least) * (1 + 1e-5))
    assert granted.objective == pytest.approx(12 * HOUR, rel=1e-3)


def test_steps_of_many_jobs_are_grouped_without_loss():
    rng = np.random.default_rng(3)
    jobs = [Job(str(i), "k", steps=float(rng.uniform(1e4, 9e4))) for i in range(40)]
    asked = problem({"k": {"fast": 4.0, "slow": 1.0}}, jobs, "fast=9@9,slow=40@1")
    result = allocate(asked, "makespan-budget", budget_dollars=900)
    columns = Columns(asked)
    assert result.gap <= 1e-8
    for makespan, fits in ((result.objective * 1.00001, True), (result.objective * 0.9999, False)):
        answer = columns.least(columns.cost, asked.steps / makespan)
        within = answer.status == 0 and answer.fun * makespan / HOUR <= 900 * (1 + 1e-6)
        assert within == fits


@pytest.mark.parametrize(
    ("policy", "pool", "message"),
    [
        ("min-cost", "a=2", r"'a' has no price: .* for example a=2@2.48"),
        ("min-cost-slo", "a=2", "'a' has no price"),
        ("min-cost", "a=2@0", "'a' costs nothing"),
        ("makespan-budget", "a=2@1", "needs a budget"),
    ],
)
def test_what_is_missing_is_named(policy, pool, message):
    asked = problem({"k": {"a": 1.0}}, [Job("0", "k", 1.0)], pool)
    with pytest.raises(InputError, match=message):
        allocate(asked, policy)


@pytest.mark.parametrize(
    ("policy", "dollars"), [("min-cost", None), ("min-cost-slo", None), ("makespan-budget", 9.0)]
)
def test_without_time_there_is_no_answer(policy, dollars):
    asked = problem({"k": {"a": 3.0}}, [Job("0", "k", 1.0, slo_seconds=9.0)], "a=1@1")
    result = allocate(asked, policy, Limits(0.0), budget_dollars=dollars)
    assert (result.status, result.allocation) == (Status.NO_ANSWER, None)


@pytest.mark.parametrize(("dollars", "message"), [(0.0, "more than zero"), (-1.0, "not negative")])
def test_a_budget_is_positive(dollars, message):
    asked = problem({"k": {"a": 1.0}}, [Job("0", "k", 1.0)], "a=1@1")
    with pytest.raises(InputError, match=message):
        allocate(asked, "makespan-budget", budget_dollars=dollars)
    with pytest.raises(InputError, match="spends no budget"):
        allocate(asked, "min-cost", budget_dollars=1.0)
    assert [one.name for one in POLICIES.values() if one.budget] == ["makespan-budget"]


def test_free_accelerators_need_no_budget_beyond_a_cent():
    asked = problem({"k": {"a": 1.0, "b": 9.0}}, [Job("0", "k", 90.0)], "a=1@0,b=1@9")
    assert allocate(asked, "makespan-budget", budget_dollars=1e-9).objective == pytest.approx(
        90, rel=1e-5
    )


@examples(10)
@given(random_case())
def test_the_ratio_bound_holds_for_optimal_values_inside_its_columns(case):
    """The bound leans on finite columns: some best allocation must be within them."""
    asked = case.problem
    need = cost.needs(asked)
    if Columns(asked).least(np.zeros(len(Columns(asked).cost)), need).status != 0:
        need = np.zeros(len(asked))
    valid = polytope(asked, group_by(asked, np.arange(len(asked))))
    relaxed = cost.ratio_program(cost.costed(valid, need)).relaxed
    answer = solve(relaxed)
    assert -answer.objective >= Columns(asked).best_ratio(need) * (1 - 1e-7)
