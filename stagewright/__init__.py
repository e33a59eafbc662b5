"""Stagewright: planner of distributed training whose every answer carries a certificate.

Examples
--------
>>> import stagewright
>>> from stagewright.graphs.machines.cluster import Link, uniform_servers
>>> from stagewright.graphs.models.analytic import analytic_model
>>> cluster = uniform_servers(1, 2, Link(100e9))
>>> result = stagewright.plan(analytic_model("vgg19"), cluster, microbatches=4, planner="dp")
>>> result.status.value
'feasible'
"""

import importlib
from typing import TYPE_CHECKING

from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagewright.executor.simulation.results import Simulation
    from stagewright.formulations.checking.proofs import Verdict
    from stagewright.formulations.checking.violations import Violation
    from stagewright.formulations.forms.answers import StopToken
    from stagewright.formulations.plans.pipeline import PipelineProblem
    from stagewright.formulations.plans.plan import PipelinePlan, load_plan, save_plan
    from stagewright.graphs.machines.cluster import Cluster, load_cluster, save_cluster
    from stagewright.graphs.models.chain import Chain, load_model, save_model
    from stagewright.graphs.workloads.jobs import Workload, load_workload
    from stagewright.graphs.workloads.pool import Pool, parse_pool
    from stagewright.solvers.clusters.policies import AllocationResult
    from stagewright.solvers.planners.proposal import Choices
    from stagewright.solvers.planning import Result

__all__ = [
    "InputError",
    "allocate",
    "check",
    "check_proofs",
    "load_cluster",
    "load_model",
    "load_plan",
    "load_workload",
    "parse_pool",
    "plan",
    "save_cluster",
    "save_model",
    "save_plan",
    "simulate",
]

# Loaded when first asked for, so that ``import stagewright`` stays quick.
_LAZY = {
    "load_cluster": "stagewright.graphs.machines.cluster",
    "load_model": "stagewright.graphs.models.chain",
    "load_plan": "stagewright.formulations.plans.plan",
    "load_workload": "stagewright.graphs.workloads.jobs",
    "parse_pool": "stagewright.graphs.workloads.pool",
    "save_cluster": "stagewright.graphs.machines.cluster",
    "save_model": "stagewright.graphs.models.chain",
    "save_plan": "stagewright.formulations.plans.plan",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'stagewright' has no attribute {name!r}")


def plan(
    chain: "Chain",
    cluster: "Cluster",
    microbatches: int = 8,
    planner: str = "auto",
    time_limit: float = 10.0,
    *,
    threads: int = 1,
    seed: int = 0,
    memory_limit_bytes: float | None = None,
    choices: "Choices | None" = None,
    stop: "StopToken | None" = None,
) -> "Result":
    """Plan one training iteration of ``chain`` on ``cluster``.

    Parameters
    ----------
    chain, cluster
        What is trained and on what; see :func:`load_model` and :func:`load_cluster`.
    microbatches
        Microbatches in an iteration.
    planner
        ``auto`` (the portfolio) or one that ``stagewright planners`` lists.
    time_limit
        Seconds.
    threads, seed
        For the solvers; one thread makes a run repeatable.
    memory_limit_bytes
        What a device may use of its memory; None: all of it.
    choices
        Recomputation and offloading; for the planners ``1f1b-star`` and ``madpipe`` also a group
        size and a period (:class:`~stagewright.solvers.planners.proposal.Choices`).
    stop
        Ends the search within about a second once it is set, by another thread or a signal
        handler: a :class:`threading.Event`, or what has its ``is_set()``. The best checked plan so
        far is the answer then, with the status ``interrupted``. Without a token Ctrl-C raises
        KeyboardInterrupt, as everywhere, and what was found is lost.

    Returns
    -------
    Result
        Status, plan, cost, proved bound and gap. Infeasible is an answer, not an error.

    Raises
    ------
    InputError
        If an argument cannot be planned: one line that says what and why.
    """
    from stagewright.formulations.forms.answers import Limits, require_limits
    from stagewright.graphs.documents.units import require_type
    from stagewright.solvers.planners.proposal import Choices
    from stagewright.solvers.planning import plan as solve

    limits = require_limits(Limits(time_limit, threads, seed, stop))
    require_type(planner, str, "planner")
    if choices is not None:
        require_type(choices, Choices, "choices")
    problem = _problem(chain, cluster, microbatches, memory_limit_bytes)
    return solve(problem, planner, limits, choices=choices)


def check(plan: "PipelinePlan", chain: "Chain", cluster: "Cluster") -> "tuple[Violation, ...]":
    """Every rule that ``plan`` breaks as an answer for ``chain`` on ``cluster``; none if valid."""
    from stagewright.formulations.checking.check import check as check_plan

    return check_plan(_problem_of(plan, chain, cluster), plan)


def check_proofs(
    plan: "PipelinePlan", chain: "Chain", cluster: "Cluster", time_limit: float = 60.0
) -> "tuple[Verdict, ...]":
    """What becomes of every bound and guarantee of a valid plan when it is proved again.

    ``verified``, ``refuted``, or ``claimed`` where the search behind it does not end within
    ``time_limit`` seconds. :func:`check` verifies those that need no search.
    """
    from stagewright.formulations.forms.answers import Limits
    from stagewright.formulations.plans.pipeline import PipelineProblem
    from stagewright.solvers.proofs import check_with_proofs

    problem = PipelineProblem(chain, cluster, plan.microbatches, plan.memory_limit_bytes)
    return check_with_proofs(problem, plan, Limits(time_limit))[1]


def simulate(
    plan: "PipelinePlan",
    chain: "Chain",
    cluster: "Cluster",
    *,
    jitter: float = 0.0,
    stragglers: "Mapping[str, float] | None" = None,
    seed: int = 0,
) -> "Simulation":
    """Run the order of ``plan`` under the cost model; see :mod:`simulate`."""
    from collections.abc import Mapping

    from stagewright.executor.simulation.simulate import simulate as simulate_plan
    from stagewright.graphs.documents.units import require_seed, require_type

    require_seed(seed, "seed")
    if stragglers is not None:
        require_type(stragglers, Mapping, "stragglers")
    problem = _problem_of(plan, chain, cluster)
    return simulate_plan(problem, plan, jitter=jitter, stragglers=stragglers, seed=seed)


def allocate(
    workload: "Workload",
    pool: "Pool",
    policy: str = "water-filling",
    *,
    space_sharing: bool = False,
    placement: bool = False,
    budget_dollars: float | None = None,
    time_limit: float = 60.0,
    backend: str | None = None,
) -> "AllocationResult":
    """Divide the accelerators of ``pool`` among the jobs of ``workload``.

    Parameters
    ----------
    workload, pool
        See :func:`load_workload` and :func:`parse_pool`.
    policy
        One that ``stagewright policies`` lists. With the default no job can have more without
        another having less; ``max-min`` is faster and may leave accelerators idle.
    space_sharing
        Two jobs may run on the same accelerators at once.
    placement
        Jobs on several accelerators may have one server's, or any, at different rates.
    budget_dollars
        For the policy ``makespan-budget``.
    time_limit
        Seconds.
    backend
        Solver of the linear programs, such as ``pulp-cbc``; ``cvxpy`` solves the policy's program
        as the thesis states it, with duals, for small clusters.

    Returns
    -------
    AllocationResult
        Status, allocation, objective, proved bound and gap. Infeasible is an answer.

    Raises
    ------
    InputError
        If a throughput is missing, a job fits nowhere, or the policy lacks what it needs.
    """
    from stagewright.formulations.clusters.allocation import problem_of
    from stagewright.formulations.forms.answers import Limits, require_limits
    from stagewright.graphs.documents.units import require_amount, require_type
    from stagewright.graphs.workloads.jobs import Workload
    from stagewright.graphs.workloads.pool import Pool
    from stagewright.solvers.clusters.policies import allocate as solve

    for value, kind, name in (
        (workload, Workload, "workload"), (pool, Pool, "pool"), (policy, str, "policy"),
        (space_sharing, bool, "space_sharing"), (placement, bool, "placement"),
    ):  # fmt: skip
        require_type(value, kind, name)
    if budget_dollars is not None:
        require_amount(budget_dollars, "budget_dollars")
    limits = require_limits(Limits(time_limit))
    problem = problem_of(workload, pool, space_sharing=space_sharing, placement=placement)
    return solve(problem, policy, limits, budget_dollars=budget_dollars, backend=backend)


def _problem(
    chain: "Chain", cluster: "Cluster", microbatches: int, memory_limit_bytes: float | None
) -> "PipelineProblem":
    """The planning problem, of arguments that may be anything."""
    from stagewright.formulations.plans.pipeline import PipelineProblem
    from stagewright.graphs.documents.units import require_amount, require_type
    from stagewright.graphs.machines.cluster import Cluster
    from stagewright.graphs.models.chain import Chain

    require_type(chain, Chain, "chain")
    require_type(cluster, Cluster, "cluster")
    if memory_limit_bytes is not None:
        require_amount(memory_limit_bytes, "memory_limit_bytes")
    return PipelineProblem(chain, cluster, microbatches, memory_limit_bytes)


def _problem_of(plan: "PipelinePlan", chain: "Chain", cluster: "Cluster") -> "PipelineProblem":
    """The problem of the plan's number of microbatches."""
    from stagewright.formulations.plans.plan import PipelinePlan
    from stagewright.graphs.documents.units import require_type

    require_type(plan, PipelinePlan, "plan")
    return _problem(chain, cluster, plan.microbatches, plan.memory_limit_bytes)
