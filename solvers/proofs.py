"""Verification of bounds from searches, by running the searches again.

``formulations.checking.proofs`` verifies all other bounds.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from time import monotonic
from typing import NamedTuple

from stagewright.formulations.checking.check import PROOF, check, refutations
from stagewright.formulations.checking.order import Violation
from stagewright.formulations.checking.proofs import (
    ARGUMENTS,
    ROUNDING,
    Verdict,
    of_bounds,
    of_degree_1,
    verdicts,
)
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.joint_patterns import ALLOCATIONS, JointPatterns
from stagewright.formulations.patterns.pattern_models import PATTERN
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.patterns.periodic_bounds import iteration_bounds
from stagewright.formulations.pipelines.bounds import server_relaxation
from stagewright.formulations.pipelines.bounds.relaxation import FILL_AND_DRAIN, WIDE_FILL_AND_DRAIN
from stagewright.formulations.pipelines.bppm import LEMMA_1
from stagewright.formulations.pipelines.grouped_stages import relaxed_schedule, scheduling_of
from stagewright.formulations.pipelines.joint import JOINT_SEARCH
from stagewright.formulations.pipelines.makespan_models import CP_SAT
from stagewright.formulations.pipelines.windows import WINDOWS
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, PipelinePlan
from stagewright.formulations.plans.plan_class import PATTERNS, class_of
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.patterns.joint_patterns import joint_optimum
from stagewright.solvers.patterns.pattern import best_pattern
from stagewright.solvers.pipelines.list_scheduling import list_schedule
from stagewright.solvers.pipelines.relaxation import fill_and_drain_bound, is_fill_and_drain_bound
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.servers.relaxation import (
    ServerBounds,
    is_server_bound,
    server_bound,
)
from stagewright.solvers.planners.exact import exact
from stagewright.solvers.planners.periodic.search import interchangeable

MARGIN = 1e-6  # relative; the searches ignore smaller improvements


class Proof(NamedTuple):
    """The result of a search: every plan takes at least ``bound``, one takes ``cost`` (or inf).

    Both are seconds of an iteration. ``complete``: the argument cannot prove more than ``bound``.
    """

    bound: float
    cost: float = inf
    complete: bool = False


_Rerun = Callable[[PipelineProblem, PipelinePlan, Bound, Limits], Proof | None]


def check_with_proofs(
    problem: PipelineProblem, plan: PipelinePlan, limits: Limits | None
) -> tuple[tuple[Violation, ...], tuple[Verdict, ...]]:
    """Every broken rule, and the verdicts on bounds and guarantees of an otherwise valid plan.

    With ``limits`` the searches that proved the bounds run again.
    """
    broken = check(problem, plan)
    if any(one.rule != PROOF for one in broken) or plan.certificate is None:
        return broken, ()
    if limits is None:
        return broken, verdicts(problem, plan)
    found = prove(problem, plan, limits)
    return refutations(found), found


def prove(problem: PipelineProblem, plan: PipelinePlan, limits: Limits) -> tuple[Verdict, ...]:
    """The verdicts on the certificate of a valid plan; runs searches again within ``limits``.

    A bound stays claimed if its search does not reach it in the remaining time.
    """
    assert plan.certificate is not None
    ends, plain = monotonic() + limits.seconds, of_bounds(problem, plan)
    found = []
    for one in verdicts(problem, plan):
        left = replace(limits, seconds=max(0.0, ends - monotonic()))
        kind, number = one.place.rstrip("]").split("[")
        if one.verdict != "claimed":
            found.append(one)
        elif kind == "bounds":
            subject = of_degree_1(problem, plain, plan.certificate.bounds[int(number)])
            found.append(_again(*subject, plan, one, left))
        else:
            found.append(_guarantee_again(plain, plan, one, int(number)))
    return tuple(found)


def _again(
    problem: PipelineProblem, bound: Bound, plan: PipelinePlan, claim: Verdict, limits: Limits
) -> Verdict:
    proof = _RERUNS[bound.proved_by](problem, plan, bound, limits)
    if proof is None:
        return replace(claim, verdict="refuted", reason="the argument does not apply")
    if bound.seconds <= proof.bound * (1 + MARGIN):
        return replace(claim, verdict="verified", reason="proved again")
    if bound.seconds > proof.cost * (1 + MARGIN):
        reason = f"a plan that it bounds takes {proof.cost:.9g} s"
        return replace(claim, verdict="refuted", reason=reason)
    if proof.complete:
        reason = f"the argument gives {proof.bound:.9g} s"
        return replace(claim, verdict="refuted", reason=reason)
    return replace(
        claim, reason=f"not finished: {proof.bound:.9g} s proved in {limits.seconds:.3g} s"
    )


def _guarantee_again(
    problem: PipelineProblem, plan: PipelinePlan, claim: Verdict, number: int
) -> Verdict:
    """Verify Lemma 1: the cost is that of PE's schedule."""
    assert plan.certificate is not None
    stated = plan.certificate.guarantees[number]
    scheduling = scheduling_of(problem, stated.stages)
    assert stated.theorem == LEMMA_1
    assert scheduling is not None
    times = list_schedule(scheduling, "pe")
    seconds = inf if times is None else times.makespan(scheduling)
    if abs(seconds - stated.cost_seconds) <= ROUNDING * seconds:
        return replace(claim, verdict="verified", reason="PE's schedule computed again")
    return replace(claim, verdict="refuted", reason=f"PE's schedule takes {seconds:.9g} s")


def _fill_and_drain(
    problem: PipelineProblem, plan: PipelinePlan, bound: Bound, limits: Limits
) -> Proof:
    """Verify the bound by one pass of the dynamic program, for each size of equal groups."""
    wide, sizes = bound.proved_by == WIDE_FILL_AND_DRAIN, bound.plans.equal_groups
    if is_fill_and_drain_bound(problem, bound.seconds * (1 - ROUNDING), wide, sizes):
        return Proof(bound.seconds)
    return Proof(fill_and_drain_bound(problem, bound.seconds, wide, sizes), complete=True)


def _servers(problem: PipelineProblem, plan: PipelinePlan, bound: Bound, limits: Limits) -> Proof:
    """Verify the bound by one search over labels."""
    plans = ARGUMENTS[bound.proved_by].plans
    if is_server_bound(problem, bound.seconds * (1 - ROUNDING), plans):
        return Proof(bound.seconds)
    return Proof(server_bound(problem, bound.seconds, limits.seconds, plans))


def _relaxed_tree(
    problem: PipelineProblem, plan: PipelinePlan, bound: Bound, limits: Limits
) -> Proof:
    """Verify the bound by one tree."""
    searched = ServerBounds(problem)
    if searched.proves_by_branching(bound.seconds * (1 - ROUNDING), limits.seconds):
        return Proof(bound.seconds)
    return Proof(searched.low)


def _joint(problem: PipelineProblem, plan: PipelinePlan, bound: Bound, limits: Limits) -> Proof:
    answer = exact(problem, limits)
    return Proof(answer.bound_seconds, answer.cost_seconds or inf)


def _schedule(
    problem: PipelineProblem, plan: PipelinePlan, bound: Bound, limits: Limits
) -> Proof | None:
    scheduling = relaxed_schedule(problem, plan.stages, bound.plans.split_backward)
    if scheduling is None:
        return None
    answer = solve_schedule(scheduling, "optimal", limits)
    return Proof(answer.bound, answer.cost or inf)


def _pattern(
    problem: PipelineProblem, plan: PipelinePlan, bound: Bound, limits: Limits
) -> Proof | None:
    if not PATTERNS.contains(class_of(plan)):
        return None
    asked = pattern_problem(problem, plan.stages)
    answer = best_pattern(asked, limits)
    period = answer.period if answer.period is not None else inf
    return Proof(asked.iteration_seconds(answer.bound), asked.iteration_seconds(period))


def _allocations(
    problem: PipelineProblem, plan: PipelinePlan, bound: Bound, limits: Limits
) -> Proof | None:
    """Verify the bound by the joint search for every group size, or by cheap bounds."""
    sizes = bound.plans.equal_groups
    if sizes is None:
        return None
    least = cost = inf
    for size in sizes:
        low = max(
            one.seconds
            for one in iteration_bounds(problem, size)
            if one.plans.contains(replace(bound.plans, equal_groups=(size,)))
        )
        if low < bound.seconds:
            groups = _groups(problem, size)
            if groups is None:
                return None
            question = JointPatterns(problem, groups, bound.plans.recompute)
            answer = joint_optimum(question, limits)
            low = max(low, answer.bound)
            if answer.cost is not None:
                cost = min(cost, answer.cost)
        least = min(least, low)
    return Proof(least, cost)


def _groups(problem: PipelineProblem, size: int) -> tuple[tuple[int, ...], ...] | None:
    """Groups of ``size`` devices; None if it matters which devices form a group."""
    if size > 1 and not interchangeable(problem, size):
        return None
    order = recursive_device_order(problem.cluster)
    last = len(order) - len(order) % size
    return tuple(tuple(sorted(order[i : i + size])) for i in range(0, last, size))


_RERUNS: dict[str, _Rerun] = {
    FILL_AND_DRAIN: _fill_and_drain,
    WIDE_FILL_AND_DRAIN: _fill_and_drain,
    server_relaxation.SERVERS: _servers,
    server_relaxation.SERVERS_AND_TURNS: _servers,
    server_relaxation.SHARED_SERVERS: _servers,
    server_relaxation.SPLIT_SERVERS: _servers,
    server_relaxation.RELAXED_TREE: _relaxed_tree,
    JOINT_SEARCH: _joint,
    CP_SAT: _schedule,
    WINDOWS: _schedule,
    PATTERN: _pattern,
    ALLOCATIONS: _allocations,
}
