"""Every policy against the thesis's own statement of it, one variable per job, pair and worker."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from profiles import examples
from specified import specify, specify_agnostic
from strategies_allocation import Case, random_case

from stagewright.formulations.clusters.allocation import (
    AllocationProblem,
    check,
    problem_of,
    throughput,
)
from stagewright.formulations.clusters.rates import server_rows
from stagewright.formulations.forms.answers import Answer, Status
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Entity, Job, PairRate, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.backends.backend import BACKENDS, Run
from stagewright.solvers.clusters.policies import POLICIES, allocate
from stagewright.solvers.clusters.specification import statements
from stagewright.solvers.clusters.specification.setting import RateSetting, Specified

Statement = Callable[[RateSetting], Specified | Status]

AWARE: dict[str, Statement] = {
    "max-min": statements.max_min,
    "makespan": statements.makespan,
    "finish-time-fairness": statements.finish_time_fairness,
    "fifo": statements.fifo,
    "sjf": statements.shortest_job_first,
    "max-throughput": statements.max_throughput,
    "min-cost": statements.min_cost,
}
AGNOSTIC: dict[str, tuple[Statement, bool]] = {
    "las": (statements.max_min, True),
    "makespan-agnostic": (statements.makespan, False),
    "finish-time-fairness-agnostic": (statements.finish_time_fairness, False),
    "fifo-agnostic": (statements.fifo, False),
    "sjf-agnostic": (statements.shortest_job_first, False),
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
# Where jobs choose among counts, which the thesis's do not.
IN_TWO_PASSES = ("fifo", "fifo-agnostic", "sjf", "sjf-agnostic")

small = examples(6, derandomize=True)


def specified(case: Case) -> RateSetting:
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
    assume(not (name in IN_TWO_PASSES and case.problem.elastic))
    answer = AWARE[name](specified(case))
    assert isinstance(answer, Specified)
    agree(name, case, answer.objective)


@pytest.mark.parametrize("name", AGNOSTIC)
@small
@given(case=random_case())
def test_heterogeneity_agnostic(name: str, case: Case):
    assume(not (name in IN_TWO_PASSES and case.problem.elastic))
    statement, alike = AGNOSTIC[name]
    answer = statement(specify_agnostic(case.problem, case.workload.throughputs, alike=alike))
    assert isinstance(answer, Specified)
    agree(name, case, answer.objective)


@small
@given(case=random_case())
def test_min_cost_with_deadlines(case: Case):
    answer = statements.min_cost_slo(specified(case))
    result = allocate(case.problem, "min-cost-slo")
    met = isinstance(answer, Specified)
    assert met != any("SLO" in note for note in result.notes)
    if met:
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
    answer = statements.makespan_budget(replace(given_, budget_dollars=budget))
    if answer is Status.INFEASIBLE:
        result = allocate(case.problem, "makespan-budget", budget_dollars=budget)
        assert result.status is Status.INFEASIBLE
        assert result.allocation is None
    else:
        assert isinstance(answer, Specified)
        agree("makespan-budget", case, answer.objective, budget_dollars=budget)


@examples(4, parent=small)
@given(case=random_case(max_jobs=4))
def test_water_filling_gives_every_job_what_the_thesis_does(case: Case):
    """Unlike X, the throughputs of which none can be raised without a poorer job's loss are one."""
    answer = statements.water_filling(specified(case))
    assert isinstance(answer, Specified)
    reached = throughput_of("water-filling", case.problem)
    np.testing.assert_allclose(reached, answer.throughput, rtol=1e-5, atol=1e-6)


@examples(4, parent=small)
@given(case=random_case(max_jobs=4, entities=True))
def test_hierarchical_gives_every_job_what_the_thesis_does(case: Case):
    answer = statements.hierarchical(specified(case))
    assert isinstance(answer, Specified)
    reached = throughput_of("hierarchical", case.problem)
    np.testing.assert_allclose(reached, answer.throughput, rtol=1e-5, atol=1e-6)


@examples(3, parent=small)
@given(case=random_case(max_jobs=4))
def test_water_filling_of_time_alone(case: Case):
    alike = specify_agnostic(case.problem, case.workload.throughputs, alike=False)
    answer = statements.water_filling(alike)
    assert isinstance(answer, Specified)
    allocation = allocate(case.problem, "water-filling-agnostic").allocation
    assert allocation is not None
    reached = throughput(case.problem.agnostic(), allocation)
    np.testing.assert_allclose(reached, answer.throughput, rtol=1e-5, atol=1e-6)


# The same programs as a backend of ``allocate``.


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in RULES_OF_THUMB])
@examples(4, parent=small)
@given(case=random_case(max_jobs=4, entities=True))
def test_the_reference_answers_as_the_policy_does(name: str, case: Case):
    case = case if POLICIES[name].pairs else without_pairs(case)
    options: dict[str, float] = {}
    if POLICIES[name].budget:
        options["budget_dollars"] = 10.0
    quick = allocate(case.problem, name, **options)
    written_out = allocate(case.problem, name, backend="cvxpy", **options)
    assert (written_out.policy, written_out.maximises) == (name, quick.maximises)
    if written_out.status is Status.INFEASIBLE:
        assert quick.allocation is None or any("SLO" in note for note in quick.notes)
    else:
        assert written_out.status is Status.OPTIMAL
        assert written_out.allocation is not None
        assert written_out.objective == pytest.approx(quick.objective, rel=1e-6)
        assert written_out.gap < 1e-6


@pytest.mark.parametrize("name", ["max-min", "fifo", "max-throughput"])
@small
@given(case=random_case())
def test_the_duals_of_the_reference_prove_its_objective(name: str, case: Case):
    """Only equations 5.1 to 5.3 have right-hand sides, so that their worth is the optimum."""
    found = allocate(case.problem, name, backend="cvxpy")
    assert found.duals is not None
    table = case.problem.table
    servers = np.array([count for _, _, count in server_rows(table)])
    worth = found.duals.time.sum() + found.duals.accelerators @ table.counts
    assert worth + found.duals.servers @ servers == pytest.approx(found.objective, rel=1e-6)
    assert (found.duals.accelerators >= -1e-9).all()


@pytest.mark.parametrize("name", RULES_OF_THUMB)
def test_what_the_thesis_does_not_state_is_refused(name: str):
    with pytest.raises(InputError, match=f"policy '{name}' has no program to write out"):
        allocate(of_equal_gpus((Job("1", "a", 1.0),)), name, backend="cvxpy")


def test_too_many_jobs_to_write_out_are_refused():
    jobs = tuple(Job(str(n), "a", 1.0) for n in range(2000))
    throughputs = replace(EQUAL, pairs=(PairRate(("a", "a"), 1, "v100", (1.5, 1.5)),))
    problem = problem_of(Workload(jobs, throughputs), parse_pool("v100=4"), space_sharing=True)
    with pytest.raises(InputError, match="2000 jobs and their 4000000 pairs are too many"):
        allocate(problem, "max-min", backend="cvxpy")


@pytest.mark.parametrize("name", ["max-min", "water-filling", "fifo", "min-cost", "allox"])
@examples(4, parent=small)
@given(case=random_case(max_jobs=4))
def test_another_solver_answers_alike(name: str, case: Case):
    """CBC; by default it is HiGHS, under whichever name."""
    case = case if POLICIES[name].pairs else without_pairs(case)
    assume(name != "allox" or (case.problem.scale == 1).all())
    used: list[str] = []

    def run(run_one: Run, solver: str, *asked: Any) -> Answer[Any]:
        used.append(solver)
        return run_one(*asked)

    with pytest.MonkeyPatch.context() as patch:
        for key, one in BACKENDS.items():
            patch.setitem(BACKENDS, key, replace(one, run=partial(run, one.run, one.solver)))
        objective = allocate(case.problem, name).objective
        solvers, used[:] = set(used), []
        other = allocate(case.problem, name, backend="pulp-cbc")
    assert (solvers, set(used)) == ({"HiGHS"}, {"CBC"})
    assert other.objective == pytest.approx(objective, rel=1e-6)


def test_a_backend_that_there_is_not_is_refused():
    problem = of_equal_gpus((Job("1", "a", 1.0),))
    with pytest.raises(InputError, match="backend 'gurobi' is unknown"):
        allocate(problem, "max-min", backend="gurobi")
    with pytest.raises(InputError, match="'cp-sat' solves no linear programs; use highs"):
        allocate(problem, "gandiva", backend="cp-sat")


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
    answer = statements.max_min(specify(problem, throughputs))
    assert isinstance(answer, Specified)
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
    level = statements.max_min(specify(problem, EQUAL))
    assert isinstance(level, Specified)
    assert level.objective == pytest.approx(1 / 3)
    answer = statements.water_filling(specify(problem, EQUAL))
    assert isinstance(answer, Specified)
    np.testing.assert_allclose(answer.throughput, 2.0)


def test_the_example_of_entities():
    """Figure 5.6: a fair team of weight 1, a queue of weight 2; jobs 1 to 3, then 4 and 5."""
    entities = (Entity("product"), Entity("research", 2.0, "fifo"))
    owners = ("product", "product", "product", "research", "research")
    jobs = tuple(Job(str(n + 1), "a", 1.0, entity=owner) for n, owner in enumerate(owners))
    answer = statements.hierarchical(specify(of_equal_gpus(jobs, entities), EQUAL))
    assert isinstance(answer, Specified)
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
    together = statements.max_throughput(given_)
    assert isinstance(together, Specified)
    assert together.objective == pytest.approx(1.25)
    np.testing.assert_allclose(together.throughput, [1.0, 3.0])
    # Both for 2 s, then the other half of "b" alone; in turn they take 1 + 3 s.
    fastest = statements.makespan(given_)
    assert isinstance(fastest, Specified)
    assert fastest.objective == pytest.approx(3.5)
    # A tenth of a cent per second.
    assert statements.makespan_budget(replace(given_, budget_dollars=0.0034)) is Status.INFEASIBLE
    within = statements.makespan_budget(replace(given_, budget_dollars=0.0036))
    assert isinstance(within, Specified)
    assert within.objective == pytest.approx(3.5)
    cheapest = statements.min_cost(given_)
    assert isinstance(cheapest, Specified)
    assert cheapest.objective == pytest.approx(1.25)
