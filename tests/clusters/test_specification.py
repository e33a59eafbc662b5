"""Every policy against the thesis's own statement of it, one variable per job, pair and worker."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from profiles import examples
from strategies_allocation import Case, random_case

from stagewright.formulations.clusters.allocation import (
    AllocationProblem,
    check,
    problem_of,
    throughput,
)
from stagewright.formulations.forms.answers import Status
from stagewright.graphs.workloads.jobs import Entity, Job, PairRate, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.clusters import specification
from stagewright.solvers.clusters.policies import POLICIES, allocate
from stagewright.solvers.clusters.specification import Setting, Specified, specify, specify_agnostic

Statement = Callable[[Setting], Specified | None]

AWARE: dict[str, Statement] = {
    "max-min": specification.max_min,
    "makespan": specification.makespan,
    "finish-time-fairness": specification.finish_time_fairness,
    "fifo": specification.fifo,
    "sjf": specification.shortest_job_first,
    "max-throughput": specification.max_throughput,
    "min-cost": specification.min_cost,
}
AGNOSTIC: dict[str, tuple[Statement, bool]] = {
    "las": (specification.max_min, True),
    "makespan-agnostic": (specification.makespan, False),
    "finish-time-fairness-agnostic": (specification.finish_time_fairness, False),
    "fifo-agnostic": (specification.fifo, False),
    "sjf-agnostic": (specification.shortest_job_first, False),
}
OTHERS = (
    "min-cost-slo",
    "makespan-budget",
    "water-filling",
    "water-filling-agnostic",
    "hierarchical",
)
# What these optimise, if anything, the thesis does not state as an optimisation problem.
RULES_OF_THUMB = ("isolated", "static-partition", "allox", "gandiva")

small = examples(6, derandomize=True)


def specified(case: Case) -> Setting:
    return specify(case.problem, case.workload.throughputs, space_sharing=case.space_sharing)


def agree(name: str, case: Case, expected: float, **options: float) -> None:
    result = allocate(case.problem, name, **options)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(expected, rel=1e-6)
    assert result.bound == pytest.approx(expected, rel=1e-6)
    assert result.allocation is not None
    check(case.problem, result.allocation)


def test_every_policy_is_specified():
    assert set(POLICIES) - set(RULES_OF_THUMB) == {*AWARE, *AGNOSTIC, *OTHERS}


@pytest.mark.parametrize("name", AWARE)
@small
@given(case=random_case())
def test_heterogeneity_aware(name: str, case: Case):
    case = case if POLICIES[name].pairs else without_pairs(case)
    answer = AWARE[name](specified(case))
    assert answer is not None
    agree(name, case, answer.objective)


@pytest.mark.parametrize("name", AGNOSTIC)
@small
@given(case=random_case())
def test_heterogeneity_agnostic(name: str, case: Case):
    statement, alike = AGNOSTIC[name]
    answer = statement(specify_agnostic(case.problem, case.workload.throughputs, alike=alike))
    assert answer is not None
    agree(name, case, answer.objective)


@small
@given(case=random_case())
def test_min_cost_with_deadlines(case: Case):
    answer = specification.min_cost_slo(specified(case))
    result = allocate(case.problem, "min-cost-slo")
    assert (answer is None) == any("SLO" in note for note in result.notes)
    if answer is not None:
        agree("min-cost-slo", case, answer.objective)
        least = case.problem.steps / case.problem.deadline_seconds
        assert (throughput_of("min-cost-slo", case.problem) >= least * (1 - 1e-6)).all()


@pytest.mark.parametrize("times", [0.5, 1.0, 1.3, 10.0])
@examples(3, parent=small)
@given(case=random_case())
def test_makespan_within_a_budget(times: float, case: Case):
    """Budgets of so many times what all steps cost where they cost least."""
    given_ = specified(case)
    budget = times * float(given_.cheapest_dollars_per_step() @ case.problem.steps)
    answer = specification.makespan_budget(given_, budget)
    if answer is None:
        result = allocate(case.problem, "makespan-budget", budget_dollars=budget)
        assert result.status is Status.INFEASIBLE
        assert result.allocation is None
    else:
        agree("makespan-budget", case, answer.objective, budget_dollars=budget)


@examples(4, parent=small)
@given(case=random_case(max_jobs=4))
def test_water_filling_gives_every_job_what_the_thesis_does(case: Case):
    """Unlike X, the throughputs of which none can be raised without a poorer job's loss are one."""
    answer = specification.water_filling(specified(case))
    assert answer is not None
    reached = throughput_of("water-filling", case.problem)
    np.testing.assert_allclose(reached, answer.throughput, rtol=1e-5, atol=1e-6)


@examples(4, parent=small)
@given(case=random_case(max_jobs=4, entities=True))
def test_hierarchical_gives_every_job_what_the_thesis_does(case: Case):
    answer = specification.hierarchical(specified(case))
    assert answer is not None
    reached = throughput_of("hierarchical", case.problem)
    np.testing.assert_allclose(reached, answer.throughput, rtol=1e-5, atol=1e-6)


@examples(3, parent=small)
@given(case=random_case(max_jobs=4))
def test_water_filling_of_time_alone(case: Case):
    alike = specify_agnostic(case.problem, case.workload.throughputs, alike=False)
    answer = specification.water_filling(alike)
    assert answer is not None
    allocation = allocate(case.problem, "water-filling-agnostic").allocation
    assert allocation is not None
    reached = throughput(case.problem.agnostic(), allocation)
    np.testing.assert_allclose(reached, answer.throughput, rtol=1e-5, atol=1e-6)


def throughput_of(name: str, problem: AllocationProblem) -> np.ndarray:
    allocation = allocate(problem, name).allocation
    assert allocation is not None
    return throughput(problem, allocation)


def without_pairs(case: Case) -> Case:
    plain = problem_of(case.workload, case.pool, placement=case.placement)
    return replace(case, space_sharing=False, problem=replace(case.problem, table=plain.table))


# The thesis's own examples.


def test_the_example_of_max_min():
    """5.4.1: one V100, one K80, three jobs."""
    rates = {"job 0": (40.0, 10.0), "job 1": (12.0, 4.0), "job 2": (100.0, 50.0)}
    throughputs = Throughputs(
        tuple(
            Rate(model, 1, name, rate)
            for model, both in rates.items()
            for name, rate in zip(("v100", "k80"), both, strict=True)
        )
    )
    workload = Workload(tuple(Job(name, name, 1.0) for name in rates), throughputs)
    problem = problem_of(workload, parse_pool("v100=1,k80=1"))
    answer = specification.max_min(specify(problem, throughputs))
    assert answer is not None
    np.testing.assert_allclose(
        answer.shares, [[5 / 11, 0], [5 / 11, 1 / 11], [1 / 11, 10 / 11]], atol=1e-9
    )


def of_equal_gpus(jobs: tuple[Job, ...], entities: tuple[Entity, ...] = ()) -> AllocationProblem:
    workload = Workload(jobs, EQUAL, entities)
    return problem_of(workload, parse_pool("v100=4"))


EQUAL = Throughputs((Rate("a", 1, "v100", 2.0),))


def test_the_example_of_water_filling():
    """5.4.3: weights 3, 1, 1, 1 on 4 equal GPUs: 1 and 1/3, and in the end a GPU each."""
    weights = (3.0, 1.0, 1.0, 1.0)
    problem = of_equal_gpus(
        tuple(Job(str(n + 1), "a", 1.0, weight=weight) for n, weight in enumerate(weights))
    )
    level = specification.max_min(specify(problem, EQUAL))
    assert level is not None
    assert level.objective == pytest.approx(1 / 3)
    answer = specification.water_filling(specify(problem, EQUAL))
    assert answer is not None
    np.testing.assert_allclose(answer.throughput, 2.0)


def test_the_example_of_entities():
    """Figure 5.6: a fair team of weight 1, a queue of weight 2; jobs 1 to 3, then 4 and 5."""
    entities = (Entity("product"), Entity("research", 2.0, "fifo"))
    owners = ("product", "product", "product", "research", "research")
    jobs = tuple(Job(str(n + 1), "a", 1.0, entity=owner) for n, owner in enumerate(owners))
    answer = specification.hierarchical(specify(of_equal_gpus(jobs, entities), EQUAL))
    assert answer is not None
    # Job 4 has a GPU when each of jobs 1 to 3 has a sixth of one. Then job 5 rises at twice the
    # three's rate together, until it has one as well; the three share the other two.
    np.testing.assert_allclose(answer.throughput / 2.0, [2 / 3, 2 / 3, 2 / 3, 1.0, 1.0])


def test_a_pair_takes_accelerators_once():
    throughputs = Throughputs(
        (Rate("a", 1, "v100", 2.0), Rate("b", 1, "v100", 4.0)),
        (PairRate(("b", "a"), 1, "v100", (3.0, 1.0)),),
    )
    workload = Workload((Job("0", "a", 2.0), Job("1", "b", 12.0)), throughputs)
    problem = problem_of(workload, parse_pool("v100=1@3.6"), space_sharing=True)
    given_ = specify(problem, throughputs, space_sharing=True)
    assert given_.combinations == ((0,), (1,), (1, 0))
    together = specification.max_throughput(given_)
    assert together is not None
    assert together.objective == pytest.approx(1.25)
    np.testing.assert_allclose(together.throughput, [1.0, 3.0])
    # Both for 2 s, then the other half of "b" alone; in turn they take 1 + 3 s.
    fastest = specification.makespan(given_)
    assert fastest is not None
    assert fastest.objective == pytest.approx(3.5)
    # A tenth of a cent per second.
    assert specification.makespan_budget(given_, 0.0034) is None
    within = specification.makespan_budget(given_, 0.0036)
    assert within is not None
    assert within.objective == pytest.approx(3.5)
    cheapest = specification.min_cost(given_)
    assert cheapest is not None
    assert cheapest.objective == pytest.approx(1.25)
