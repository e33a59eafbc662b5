"""Water filling, over one level and over trees of entities (thesis 5.4.3)."""

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from profiles import examples
from scipy.optimize import linprog
from strategies_allocation import Case, random_case, use_of

import stagewright
from stagewright.formulations.clusters.allocation import (
    AllocationProblem,
    accelerators_in_use,
    allocation_of_shares,
    problem_of,
    throughput,
)
from stagewright.formulations.clusters.policies import max_min, water_filling
from stagewright.formulations.clusters.polytope import group_by
from stagewright.formulations.clusters.rates import server_rows
from stagewright.formulations.forms.answers import Answer, Limits, Status
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.workloads.jobs import Discipline, Entity, Job, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.clusters.policies import allocate
from stagewright.solvers.clusters.policies import water_filling as filling

ALIKE = Throughputs((Rate("model", 1, "gpu", 1.0),))


def alike(gpus: int, jobs: list[tuple[str | None, float]], *entities: Entity) -> AllocationProblem:
    """Equal jobs on equal GPUs: (entity, weight) of each."""
    return problem_of(
        Workload(
            tuple(
                Job(str(number), "model", 1.0, weight=weight, entity=entity)
                for number, (entity, weight) in enumerate(jobs)
            ),
            ALIKE,
            entities,
        ),
        parse_pool(f"gpu={gpus}"),
    )


def duals(form: LinearProgram) -> Floats | None:
    return solve(form, limits=Limits(seconds=math.inf)).duals


def test_thesis_example_ends_with_a_gpu_for_each_job():
    problem = alike(4, [(None, 3.0), (None, 1.0), (None, 1.0), (None, 1.0)])
    result = allocate(problem, "water-filling")
    assert result.status is Status.OPTIMAL
    assert result.allocation is not None
    assert result.levels is not None
    assert_allclose(throughput(problem, result.allocation), 1.0, atol=1e-9)
    assert result.levels.tolist() == [1, 2, 2, 2]
    # The first round ends where job 0 has its GPU and the others a third.
    assert result.objective == pytest.approx(1 / 3)
    assert result.bound == pytest.approx(1 / 3)


# Figure 5.6, with the product team's jobs 0 to 2 under fairness and the research team's under fifo.
PRODUCT, RESEARCH = Entity("product", 1.0), Entity("research", 1.0, "fifo")
TEAMS = [("product", 1.0)] * 3 + [("research", 1.0)] * 2


def test_weights_of_stuck_jobs_go_where_figure_5_6_says():
    needs = water_filling.tree(alike(3, TEAMS, PRODUCT, RESEARCH))
    nobody = np.zeros(5, dtype=bool)
    fourth, second = nobody.copy(), nobody.copy()
    fourth[3] = second[1] = True
    assert_allclose(needs(nobody), [1 / 3, 1 / 3, 1 / 3, 1, 0])
    assert_allclose(needs(fourth), [1 / 3, 1 / 3, 1 / 3, 0, 1])
    assert_allclose(needs(second), [1 / 2, 0, 1 / 2, 1, 0])


def test_fifo_passes_on_what_its_first_job_cannot_use():
    problem = alike(3, TEAMS, PRODUCT, RESEARCH)
    result = allocate(problem, "hierarchical")
    assert result.status is Status.OPTIMAL
    assert result.allocation is not None
    assert result.levels is not None
    # Job 3 fills a GPU while the product team has one; the third GPU is shared in halves.
    assert_allclose(throughput(problem, result.allocation), [0.5, 0.5, 0.5, 1, 0.5], atol=1e-9)
    assert result.levels.tolist() == [2, 2, 2, 1, 2]


def test_fairness_divides_what_a_stuck_job_leaves():
    jobs = [("product", 1.0), ("product", 4.0), ("product", 1.0), *TEAMS[3:]]
    problem = alike(3, jobs, replace(PRODUCT, weight=3.0), RESEARCH)
    result = allocate(problem, "hierarchical")
    assert result.status is Status.OPTIMAL
    assert result.allocation is not None
    assert result.levels is not None
    # At theta 1/2 job 1 has a GPU, jobs 0 and 2 a quarter each, job 3 a half; then jobs 0 and 2
    # rise by 3/2 each and job 3 by 1 until the third GPU is gone. Job 4 waits in vain.
    expected = [0.25 + 1.5 / 4, 1.0, 0.25 + 1.5 / 4, 0.5 + 1 / 4, 0.0]
    assert_allclose(throughput(problem, result.allocation), expected, atol=1e-9)
    assert result.levels.tolist() == [2, 1, 2, 2, 2]


def test_an_exhausted_entity_leaves_its_weight_to_its_siblings():
    entities = (
        Entity("y", parent="a"),
        Entity("x", parent="a"),
        Entity("a", parent="company"),
        Entity("b", parent="company"),
        Entity("company", 7.0),
    )
    problem = alike(5, [("x", 1.0)] + [("y", 2.0)] * 3 + [("b", 1.0)] * 4, *entities)
    result = allocate(problem, "hierarchical")
    assert result.status is Status.OPTIMAL
    assert result.allocation is not None
    assert result.levels is not None
    # a and b have 2 GPUs each when x's job has its own; of the fifth, y gets as much as b.
    expected = [1.0] + [1 / 3 + 1 / 6] * 3 + [1 / 2 + 1 / 8] * 4
    assert_allclose(throughput(problem, result.allocation), expected, atol=1e-9)
    assert result.levels.tolist() == [1] + [2] * 7


def test_without_entities_the_tree_is_water_filling():
    problem = alike(3, [(None, weight) for weight in (5.0, 1.0, 2.0, 1.0)])
    one, other = (allocate(problem, policy) for policy in ("water-filling", "hierarchical"))
    assert one.allocation is not None
    assert other.allocation is not None
    assert_allclose(throughput(problem, one.allocation), throughput(problem, other.allocation))


def test_agnostic_water_filling_knows_time_alone():
    rates = (Rate("model", 1, "fast", 10.0), Rate("model", 1, "slow", 1.0))
    jobs = tuple(
        Job(str(number), "model", 1.0, weight=weight) for number, weight in ((0, 2), (1, 1))
    )
    problem = problem_of(Workload(jobs, Throughputs(rates)), parse_pool("fast=1,slow=1"))
    result = allocate(problem, "water-filling-agnostic")
    assert result.allocation is not None
    time = result.allocation.dense(2, 2).sum(axis=1)
    assert_allclose(time, 1.0, atol=1e-9)
    assert result.objective == pytest.approx(1 / 2)  # of time by weight, in the first round


def test_a_limit_of_no_time_is_an_answer_without_an_allocation():
    problem = alike(3, TEAMS, PRODUCT, RESEARCH)
    result = allocate(problem, "hierarchical", Limits(seconds=0.0))
    assert result.status is not Status.OPTIMAL
    assert result.proved_by is None


@st.composite
def problems(draw: st.DrawFn) -> AllocationProblem:
    """Small problems without placement, perhaps in a tree of entities."""
    problem = draw(random_case(placement=False)).problem
    if draw(st.booleans()):
        return problem
    disciplines = st.sampled_from(["fairness", "fifo"])
    entities = (
        Entity("below", 1.5, draw(disciplines), "top"),
        Entity("beside", 1.0, "fairness", "top"),
        Entity("other", 1.0, draw(disciplines)),
        Entity("top", draw(st.sampled_from([1.0, 2.5]))),
    )
    owner = st.lists(st.integers(0, 2), min_size=len(problem), max_size=len(problem))
    return replace(problem, entity=np.array(draw(owner)), entities=entities)


class Dense:
    """The valid allocations from their definition, a column for each job or pair of jobs."""

    def __init__(self, problem: AllocationProblem) -> None:
        jobs, workers = problem.rates.shape
        types, servers = problem.table.counts, server_rows(problem.table)
        rates, times, uses = [], [], []

        def add(worker: int, members: tuple[int, ...], speeds: tuple[float, ...]) -> None:
            rate, time, use = np.zeros(jobs), np.zeros(jobs), np.zeros(len(types) + len(servers))
            rate[list(members)], time[list(members)] = speeds, 1.0
            use[problem.table.accelerator[worker]] = use_of(problem, members[0], worker)
            for row, (_, parts, _) in enumerate(servers, start=len(types)):
                use[row] = parts[problem.kind[members[0]], worker]
            rates.append(rate)
            times.append(time)
            uses.append(use)

        for job in range(jobs):
            for worker in range(workers):
                add(worker, (job,), (problem.rates[job, worker],))
        table = problem.table
        for job, other in combinations(range(jobs), 2):
            low, high = sorted((job, other), key=lambda member: problem.kind[member])
            found = (table.first == problem.kind[low]) & (table.second == problem.kind[high])
            for row in np.flatnonzero(found):
                both = table.paired[row]
                add(int(table.worker[row]), (low, high), tuple(both))
        self.rate = np.array(rates).T
        self.rows = np.vstack([np.array(times).T, np.array(uses).T])
        self.limits = np.concatenate([np.ones(jobs), types, [most for _, _, most in servers]])

    def most(self, cost: Floats, floor: Floats, need: Floats | None = None) -> float:
        """The largest cost @ throughput + theta with throughput >= floor + theta * need."""
        rise = np.zeros(len(floor)) if need is None else need
        found = linprog(
            -np.append(cost @ self.rate, need is not None),
            np.vstack(
                [
                    np.column_stack([self.rows, np.zeros(len(self.rows))]),
                    np.column_stack([-self.rate, rise]),
                ]
            ),
            np.concatenate([self.limits, -floor + 1e-10]),
            bounds=[(0, None)] * self.rate.shape[1] + [(0, None if need is not None else 0)],
        )
        assert found.success
        return float(-found.fun)


def progressive_filling(problem: AllocationProblem) -> Floats:
    """Round by round, each job tried on its own."""
    dense = Dense(problem)
    needs = water_filling.tree(problem)
    floor, stuck = np.zeros(len(problem)), np.zeros(len(problem), dtype=bool)
    while not stuck.all():
        need = needs(stuck)
        floor = floor + dense.most(np.zeros(len(problem)), floor, need) * need
        for job in np.flatnonzero(~stuck):
            stuck[job] = dense.most(np.eye(len(problem))[job], floor) <= floor[job] + 1e-6
    return floor


@examples(30, derandomize=True)
@given(problems())
def test_progressive_filling_of_single_jobs_agrees(problem: AllocationProblem):
    result = allocate(problem, "hierarchical")
    assert result.status is Status.OPTIMAL, result.notes
    assert result.allocation is not None
    expected = progressive_filling(problem)
    assert_allclose(throughput(problem, result.allocation), expected, atol=1e-5)


@examples(15, derandomize=True)
@given(problems())
def test_no_job_can_gain_unless_another_loses(problem: AllocationProblem):
    result = allocate(problem, "water-filling")
    assert result.status is Status.OPTIMAL, result.notes
    assert result.allocation is not None
    reached = throughput(problem, result.allocation)
    ones = np.ones(len(problem))
    assert Dense(problem).most(ones, reached) <= reached.sum() + 1e-5
    # The worst-off job has what max-min fairness gives it.
    assert result.objective == pytest.approx(allocate(problem, "max-min").objective, rel=1e-6)
    assert result.objective == pytest.approx(max_min.objective(problem, result.allocation))


@examples(40, derandomize=True)
@given(random_case())
def test_the_default_leaves_nothing_to_give_away(case: Case):
    pairs = case.space_sharing and bool(case.workload.throughputs.pairs)
    result = stagewright.allocate(
        case.workload, case.pool, space_sharing=pairs, placement=case.placement
    )
    assert result.status is Status.OPTIMAL, result.notes
    assert result.allocation is not None
    reached = throughput(case.problem, result.allocation)
    # No job can be given more without another getting less than it has.
    dense = Dense(case.problem)
    for job in range(len(reached)):
        gain = dense.most(np.eye(len(reached))[job], reached) - reached[job]
        assert gain <= 1e-4, case.problem.names[job]


def test_the_default_uses_what_max_min_leaves_idle():
    rates = (Rate("slow", 1, "gpu", 1.0), Rate("quick", 1, "gpu", 1.0), Rate("quick", 1, "old", 1))
    jobs = (Job("slow", "slow", 1.0, weight=4.0), *(Job(str(n), "quick", 1.0) for n in range(4)))
    workload = Workload(jobs, Throughputs((*rates, Rate("slow", 1, "old", 0.0))))
    pool = parse_pool("gpu=1,old=16")
    result = stagewright.allocate(workload, pool)
    assert result.allocation is not None
    problem = problem_of(workload, pool)
    assert_allclose(throughput(problem, result.allocation), 1.0, atol=1e-6)
    assert_allclose(accelerators_in_use(problem, result.allocation), [1.0, 4.0], atol=1e-6)
    first = allocate(problem, "max-min").allocation
    assert first is not None
    assert accelerators_in_use(problem, first)[1] < 3.9


@examples(15, derandomize=True)
@given(problems(), st.data())
def test_a_share_moved_from_job_to_job_is_refused(problem: AllocationProblem, data: st.DataObject):
    if len(problem) < 2:
        return
    needs = water_filling.tree(problem)
    result = allocate(problem, "hierarchical")
    assert result.allocation is not None
    assert result.levels is not None
    levels = result.levels.astype(int)
    assert water_filling.verify(problem, result.allocation, levels, needs, duals) is None
    entry = data.draw(st.integers(0, len(result.allocation.share) - 1))
    moved = result.allocation.share.copy()
    moved[entry] *= 0.9
    changed = replace(result.allocation, share=moved)
    assert water_filling.verify(problem, changed, levels, needs, duals) is not None
    # Fewer levels claim that jobs rose together; a level of its own that others below let it rise.
    if levels.max() > 1:
        merged = np.ones_like(levels)
        assert water_filling.verify(problem, result.allocation, merged, needs, duals) is not None


@examples(15, derandomize=True)
@given(problems())
def test_no_allocation_is_beyond_a_cut_or_a_cap(problem: AllocationProblem):
    need = max_min.needs(problem)
    groups = group_by(problem, water_filling.key(need))
    rows = water_filling.rows(problem, groups)
    form = rows.raising(groups.total(need) / groups.size, np.zeros(len(groups)))
    answer = solve(form)
    assert answer.objective is not None
    assert answer.duals is not None
    dense, nothing = Dense(problem), np.zeros(len(problem))
    for cut in (rows.cut(answer.duals), water_filling.cut_of_accelerators(problem)):
        assert dense.most(cut.weight, nothing) <= cut.most * (1 + 1e-6)
    # While all jobs keep what the round gives them.
    floor = -answer.objective * need
    cap = water_filling.caps(problem, rows.time_left(form, answer.duals, 1e-9)[groups.of_job])
    for job in range(len(problem)):
        assert dense.most(np.eye(len(problem))[job], floor) <= cap[job] + 1e-4


def distinct(
    seed: int, count: int, counts: tuple[int, ...], discipline: Discipline
) -> AllocationProblem:
    """No two jobs are alike; of one type of accelerator there are enough."""
    rng = np.random.default_rng(seed)
    speeds = rng.lognormal(0, 1, (count, 3)) * (rng.random((count, 3)) > 0.3) + [0, 0, 0.1]
    rates = tuple(
        Rate(str(job), n, name, float(speed * n**0.8))
        for job, of_job in enumerate(speeds)
        for name, speed in zip("abc", of_job, strict=True)
        for n in counts
    )
    jobs = tuple(
        Job(str(job), str(job), 1.0, weight=float(weight), entity="xy"[job % 2], counts=counts)
        for job, weight in enumerate(rng.lognormal(0, 1, count))
    )
    entities = Entity("x", 2.0, discipline), Entity("y", 1.0)
    pool = parse_pool(f"a={count // 8},b={count // 4},c={2 * count}")
    return problem_of(Workload(jobs, Throughputs(rates), entities), pool)


@pytest.mark.parametrize(("counts", "discipline"), [((1,), "fifo"), ((1, 2), "fairness")])
def test_distinct_jobs_get_what_rounds_of_single_jobs_give_them(
    counts: tuple[int, ...], discipline: Discipline
):
    problem = distinct(1, 8, counts, discipline)
    result = allocate(problem, "hierarchical")
    assert result.status is Status.OPTIMAL, result.notes
    assert result.allocation is not None
    expected = progressive_filling(problem)
    assert_allclose(throughput(problem, result.allocation), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("discipline", ["fairness", "fifo"])
def test_few_programs_prove_many_levels(discipline: Discipline, monkeypatch: pytest.MonkeyPatch):
    programs = []

    def counted(form: LinearProgram, **options: Any) -> Answer[Floats]:
        programs.append(form)
        return solve(form, **options)

    monkeypatch.setattr(filling, "solve_form", counted)
    result = allocate(distinct(2, 100, (1,), discipline), "hierarchical")
    assert result.status is Status.OPTIMAL, result.notes
    assert result.levels is not None
    levels = set(result.levels)
    assert levels == set(range(1, len(levels) + 1))
    assert 4 * len(programs) < len(levels)


def test_a_level_that_stops_early_is_refused():
    problem = alike(4, [(None, 3.0), (None, 1.0), (None, 1.0), (None, 1.0)])
    early = allocation_of_shares(np.array([[1.0], [1 / 3], [1 / 3], [1 / 3]]))
    wrong = water_filling.verify(
        problem, early, np.ones(4, dtype=int), water_filling.flat(problem), duals
    )
    assert wrong is not None
    assert "may gain 2" in wrong


def test_unequal_jobs_of_one_level_are_refused():
    problem = alike(1, [(None, 1.0), (None, 1.0)])
    unfair = allocation_of_shares(np.array([[0.4], [0.6]]))
    wrong = water_filling.verify(
        problem, unfair, np.ones(2, dtype=int), water_filling.flat(problem), duals
    )
    assert wrong is not None
    assert "off the others" in wrong


def test_levels_without_a_proof_are_not_optimal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(water_filling, "verify", lambda *_: "a job may gain")
    result = allocate(alike(2, [(None, 1.0)] * 3), "water-filling")
    assert result.status is Status.FEASIBLE
    assert result.proved_by is None
    assert any("a job may gain" in note for note in result.notes)
