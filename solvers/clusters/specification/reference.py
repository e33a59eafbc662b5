"""The written-out reference of a policy: ``allocate`` with the backend ``cvxpy``."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.clusters.policies import (
    cost,
    fifo,
    finish_time,
    makespan,
    max_min,
    shortest_first,
    throughput,
    water_filling,
)
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.specification import statements
from stagewright.solvers.clusters.specification.setting import RateSetting, Specified, setting


@dataclass(frozen=True, slots=True)
class Statement:
    """The thesis's program of a policy, and the policy's objective of an allocation."""

    program: Callable[[RateSetting], Specified | Status]
    objective: Callable[[AllocationProblem, Allocation], float]
    maximises: bool = True


def _least(problem: AllocationProblem, allocation: Allocation) -> float:
    return water_filling.objective(problem, allocation, water_filling.tree(problem))


# By the module that answers the policy.
STATEMENTS: dict[str, Statement] = {
    "max_min": Statement(statements.max_min, max_min.objective),
    "makespan": Statement(statements.makespan, makespan.objective, maximises=False),
    "finish_time": Statement(
        statements.finish_time_fairness, finish_time.objective, maximises=False
    ),
    "fifo": Statement(statements.fifo, fifo.objective),
    "shortest_first": Statement(
        statements.shortest_job_first, shortest_first.objective, maximises=False
    ),
    "water_filling": Statement(statements.water_filling, max_min.objective),
    "hierarchical": Statement(statements.hierarchical, _least),
    "throughput": Statement(statements.max_throughput, throughput.objective),
    "min_cost": Statement(statements.min_cost, cost.objective),
    "min_cost_slo": Statement(statements.min_cost_slo, cost.objective),
    "makespan_budget": Statement(statements.makespan_budget, makespan.objective, maximises=False),
}


def written_out(
    problem: AllocationProblem,
    policy: str,
    module: str,
    limits: Limits,
    budget_dollars: float | None,
) -> AllocationResult:
    """The optimum of ``policy``, which ``module`` answers, as the thesis states it.

    Raises
    ------
    InputError
        If the thesis states no program for it, or the problem is too large.
    """
    if module not in STATEMENTS:
        raise InputError(f"policy {policy!r} has no program to write out: leave out the backend")
    chosen = STATEMENTS[module]
    found = chosen.program(setting(problem, limits, budget_dollars))
    if not isinstance(found, Specified):
        notes = ("no valid allocation satisfies the program",) * (found is Status.INFEASIBLE)
        return AllocationResult(found, None, None, None, None, chosen.maximises, notes=notes)
    allocation = allocation_of(found)
    return AllocationResult(
        Status.OPTIMAL,
        chosen.objective(problem, allocation),
        found.objective,
        allocation,
        f"the written-out program ({found.solver})",
        chosen.maximises,
        duals=found.duals,
    )


def allocation_of(found: Specified) -> Allocation:
    """The allocation X as a list of shares."""
    combination, worker = np.nonzero(found.shares > 0)
    share = found.shares[combination, worker]
    chosen = [found.combinations[number] for number in combination]
    job = np.array([members[0] for members in chosen], dtype=np.int64)
    partner = np.array([members[1] if len(members) > 1 else -1 for members in chosen])
    return Allocation(job, partner.astype(np.int64), worker, share)
