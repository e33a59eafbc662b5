"""The registry of policies, and the function that solves a policy's allocation problem."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from time import perf_counter

from stagewright.formulations.clusters.allocation import AllocationProblem, check
from stagewright.formulations.clusters.policies.allox import require_single
from stagewright.formulations.clusters.policies.cost import positive_prices, prices, require_budget
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backends.backend import BACKENDS, UnknownStatusError
from stagewright.solvers.clusters.answer import AllocationResult

Solve = Callable[..., AllocationResult]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy: ``aware`` ones know how fast each job runs on each type of accelerator.

    ``pairs`` says that it can let jobs share accelerators, ``budget`` that it spends one,
    ``fills`` that accelerators which no share claims go to jobs that would be idle. ``needs``
    refuses a problem that lacks what the policy needs.
    """

    name: str
    summary: str
    module: str
    aware: bool = True
    pairs: bool = True
    budget: bool = False
    fills: bool = True
    needs: Callable[[AllocationProblem], object] | None = None

    def seen(self, problem: AllocationProblem) -> AllocationProblem:
        """``problem`` as the policy sees it."""
        return problem if self.aware else problem.agnostic()

    def solve(
        self, problem: AllocationProblem, limits: Limits, budget_dollars: float | None
    ) -> AllocationResult:
        """Answer ``problem``; the module is imported when first asked."""
        run: Solve = import_module(f"stagewright.solvers.clusters.policies.{self.module}").solve
        seen = self.seen(problem)
        return run(seen, limits, budget_dollars) if self.budget else run(seen, limits)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("max-min", "raise the least normalised throughput (LAS)", "max_min"),
        Policy("las", "max-min of time alone, all accelerators alike", "max_min", aware=False),
        Policy("makespan", "finish the last job as early as possible", "makespan"),
        Policy("makespan-agnostic", "makespan, all accelerators alike", "makespan", aware=False),
        Policy("finish-time-fairness", "least delay relative to 1/n of the cluster", "finish_time"),
        Policy(
            "finish-time-fairness-agnostic",
            "finish-time-fairness, all accelerators alike",
            "finish_time",
            aware=False,
        ),
        Policy("fifo", "earlier jobs run where they are fastest", "fifo", fills=False),
        Policy("fifo-agnostic", "fifo, all accelerators alike", "fifo", aware=False, fills=False),
        Policy(
            "sjf", "who is done soonest runs where it is fastest", "shortest_first", fills=False
        ),
        Policy(
            "sjf-agnostic",
            "sjf, all accelerators alike",
            "shortest_first",
            aware=False,
            fills=False,
        ),
        Policy("isolated", "1/n of every type for each job", "isolated", pairs=False),
        Policy(
            "static-partition",
            "a fixed part of every type for each entity, by weight",
            "static_partition",
            pairs=False,
            fills=False,
        ),
        Policy(
            "allox",
            "queues of least mean completion time",
            "allox",
            pairs=False,
            fills=False,
            needs=require_single,
        ),
        Policy("gandiva", "equal time for jobs and random pairs", "gandiva"),
        Policy(
            "water-filling", "max-min, then raise all others as far as they go", "water_filling"
        ),
        Policy(
            "water-filling-agnostic", "water-filling of time alone", "water_filling", aware=False
        ),
        Policy(
            "hierarchical", "water-filling by the weights of a tree of entities", "hierarchical"
        ),
        Policy("max-throughput", "most throughput in total, each job by its best", "throughput"),
        Policy(
            "min-cost", "most work for each dollar", "min_cost", fills=False, needs=positive_prices
        ),
        Policy(
            "min-cost-slo",
            "most work for each dollar while SLOs are met",
            "min_cost_slo",
            fills=False,
            needs=positive_prices,
        ),
        Policy(
            "makespan-budget",
            "makespan within --budget",
            "makespan_budget",
            budget=True,
            fills=False,
            needs=prices,
        ),
    )
}


_WRITTEN_OUT = "cvxpy"
"""The backend that solves a policy's program as the thesis states it."""

DEFAULT = "water-filling"
"""Of the policies without a goal of their own the one that leaves nothing to give away."""


def policy_named(name: str) -> Policy:
    """The policy, or an InputError that lists them."""
    if name not in POLICIES:
        raise InputError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]


def require_policy(
    problem: AllocationProblem,
    policy: str,
    budget_dollars: float | None = None,
    backend: str | None = None,
) -> Policy:
    """The policy called ``name``; raises, before any work, if it does not support the problem.

    Raises
    ------
    InputError
        If there is no such policy or backend, it spends no budget, or the jobs lack what it needs.
    """
    chosen = policy_named(policy)
    if len(problem.table.paired) and not chosen.pairs:
        raise InputError(f"policy {policy!r} does not share accelerators: leave out space sharing")
    if budget_dollars is not None and not chosen.budget:
        spending = ", ".join(one.name for one in POLICIES.values() if one.budget)
        raise InputError(f"policy {policy!r} spends no budget; {spending} does")
    if chosen.budget:
        require_budget(budget_dollars)
    if chosen.needs is not None:
        chosen.needs(problem)
    _require_backend(chosen, backend)
    if backend == _WRITTEN_OUT:
        # CVXPY is slow to import.
        from stagewright.solvers.clusters.specification.setting import require_small

        require_small(problem)
    return chosen


def allocate(
    problem: AllocationProblem,
    policy: str = DEFAULT,
    limits: Limits | None = None,
    *,
    budget_dollars: float | None = None,
    backend: str | None = None,
) -> AllocationResult:
    """Allocate by ``policy``, and check the allocation.

    ``backend``: one that accepts linear programs; ``cvxpy`` solves the policy's program as the
    thesis states it, for small clusters. None is the quickest.

    Raises InputError if there is no such policy or backend, it spends no budget, the jobs lack what
    it needs, or their numbers are too far apart for the solver.
    """
    began = perf_counter()
    chosen = require_policy(problem, policy, budget_dollars, backend)
    limits = limits or Limits(seconds=math.inf)
    try:
        if backend == _WRITTEN_OUT:
            result = _written_out(chosen, problem, limits, budget_dollars)
        else:
            result = chosen.solve(problem, replace(limits, backend=backend), budget_dollars)
    except UnknownStatusError as error:
        raise InputError(
            f"policy {policy!r}: {error}; bring the jobs' rates, steps and weights closer together"
        ) from error
    if result.allocation is not None:
        check(problem, result.allocation)
    if result.first is not None:
        check(problem, result.first)
    return replace(result, policy=policy, seconds=perf_counter() - began)


def _require_backend(policy: Policy, name: str | None) -> None:
    """Refuse a backend that the policy cannot use, with the list of usable backends."""
    usable = [one.name for one in BACKENDS.values() if one.accepts is LinearProgram]
    if name is None or name in usable:
        return
    # CVXPY is slow to import.
    from stagewright.solvers.clusters.specification.reference import STATEMENTS

    if policy.module not in STATEMENTS:
        usable.remove(_WRITTEN_OUT)
    wrong = "solves no linear programs" if name in BACKENDS else "is unknown"
    raise InputError(f"backend {name!r} {wrong}; use {' or '.join(usable)}")


def _written_out(
    policy: Policy, problem: AllocationProblem, limits: Limits, budget_dollars: float | None
) -> AllocationResult:
    # CVXPY is slow to import.
    from stagewright.solvers.clusters.specification.reference import written_out

    return written_out(policy.seen(problem), policy.name, policy.module, limits, budget_dollars)


__all__ = [
    "DEFAULT",
    "POLICIES",
    "AllocationResult",
    "Policy",
    "Status",
    "allocate",
    "policy_named",
]
