"""The arguments that bounds and guarantees may name, and the check of each.

A bound names an argument and a class of plans. The argument must be known, and proved for that
class; where it is cheap its value is recomputed, from the problem and the plan's stages alone.
A bound proved by a search is *claimed*: :mod:`stagewright.solvers.proofs` runs the search again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from stagewright.formulations.backprop.models import TWO_STREAMS, two_streams_bound
from stagewright.formulations.backprop.of_stages import (
    BETWEEN_LOSSES,
    ORDERS_BETWEEN_LOSSES,
    SEARCHED_BETWEEN_LOSSES,
    stage_bounds,
)
from stagewright.formulations.patterns.joint_patterns import ALLOCATIONS
from stagewright.formulations.patterns.one_f_one_b import (
    PATTERN_LOAD,
    PATTERN_MEMORY,
)
from stagewright.formulations.patterns.pattern_models import PATTERN
from stagewright.formulations.patterns.pattern_problems import load_seconds, memory_seconds
from stagewright.formulations.patterns.periodic_bounds import NAMES as OF_PERIODS
from stagewright.formulations.patterns.periodic_bounds import iteration_bounds
from stagewright.formulations.pipelines import bppm
from stagewright.formulations.pipelines.bounds import every_plan, server_relaxation
from stagewright.formulations.pipelines.bounds.devices import EDGE_FINDING, verified_bound
from stagewright.formulations.pipelines.bounds.memory import MEMORY_NAMES
from stagewright.formulations.pipelines.bounds.memory_of_plans import (
    MEMORY_LOAD,
    MEMORY_PATH,
    memory_load_bound,
    memory_path_bound,
)
from stagewright.formulations.pipelines.bounds.relaxation import FILL_AND_DRAIN, WIDE_FILL_AND_DRAIN
from stagewright.formulations.pipelines.bounds.stages import NAMES as OF_SCHEDULES
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.pipelines.bounds.tensor_groups import best_groups, of_groups
from stagewright.formulations.pipelines.grouped_stages import relaxed_schedule, scheduling_of
from stagewright.formulations.pipelines.joint import JOINT_SEARCH
from stagewright.formulations.pipelines.makespan_models import CP_SAT
from stagewright.formulations.pipelines.windows import WINDOWS
from stagewright.formulations.plans.actions import WEIGHT_RULES, WeightRule
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Guarantee, PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import (
    DISJOINT_SPLIT,
    DISJOINT_WHOLE,
    EVERY_BACKWARD_FIRST,
    EVERY_FINITE,
    EVERY_PATTERN,
    EVERY_PERIODIC,
    EVERY_PLAN,
    OFFLOADING_PATTERNS,
    PATTERNS,
    SEARCHED_ALLOCATIONS,
    SHARED_SPLIT,
    SHARED_WHOLE,
    PlanClass,
    class_of,
)
from stagewright.graphs.documents.errors import InputError

ROUNDING = 1e-9  # relative; sums of the same numbers in another order

Value = Callable[[PipelineProblem, PipelinePlan, Bound], float | None]
"""The bound that an argument proves, in seconds; None where it does not apply."""


@dataclass(frozen=True, slots=True)
class Argument:
    """The scope and the largest class of plans that an argument is proved for; its value.

    ``value`` is None where only a search can find it.
    """

    scope: Literal["problem", "schedule"]
    plans: PlanClass
    value: Value | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a bound or a guarantee.

    ``verified``: the named argument gives it. ``claimed``: not recomputed. ``refuted``: the
    argument gives less, does not apply, or is not known; ``reason`` says which.
    """

    place: str
    name: str
    seconds: float
    verdict: Literal["verified", "claimed", "refuted"]
    reason: str = ""


def verdicts(problem: PipelineProblem, plan: PipelinePlan) -> tuple[Verdict, ...]:
    """Check every bound and guarantee in the certificate of a valid plan whose check is cheap."""
    if plan.certificate is None:
        return ()
    plain = of_bounds(problem, plan)
    return (
        *(
            _of_bound(*of_degree_1(problem, plain, one), plan, i)
            for i, one in enumerate(plan.certificate.bounds)
        ),
        *(_of_guarantee(plain, plan, i, one) for i, one in enumerate(plan.certificate.guarantees)),
    )


def of_bounds(problem: PipelineProblem, plan: PipelinePlan) -> PipelineProblem:
    """The problem that bounds are about: without useless devices, unless the plan uses them."""
    fewer = every_plan.without_useless(problem)
    used = {name for stage in plan.stages for name in stage.devices}
    return fewer if used <= fewer.cluster.index.keys() else problem


def of_degree_1(
    problem: PipelineProblem, plain: PipelineProblem, bound: Bound
) -> tuple[PipelineProblem, Bound]:
    """The problem and the bound of which one on plans of a tensor degree t speaks.

    ``plain`` is the problem of bounds on plans of degree 1. A bound that holds for no groups of t
    devices stays as it is, which no argument gives.
    """
    degree = bound.plans.degree
    inner = None if degree in (1, None) else of_groups(bound.plans, degree)
    if inner is None or bound.scope != "problem":
        return plain, bound
    try:
        groups = best_groups(problem, degree)
    except InputError:
        return plain, bound
    return every_plan.without_useless(groups), replace(bound, plans=inner)


def judged(place: str, bound: Bound, value: float) -> Verdict:
    """The verdict on a bound whose argument proves ``value`` seconds."""
    if bound.seconds <= value * (1 + ROUNDING):
        return Verdict(place, bound.proved_by, bound.seconds, "verified")
    reason = f"the argument gives {value:.9g} s"
    return Verdict(place, bound.proved_by, bound.seconds, "refuted", reason)


def _of_bound(problem: PipelineProblem, bound: Bound, plan: PipelinePlan, i: int) -> Verdict:
    place, argument = f"bounds[{i}]", ARGUMENTS.get(bound.proved_by)
    reason = _why_not(argument, bound) if argument else "the argument is not known"
    if argument is None or reason:
        return Verdict(place, bound.proved_by, bound.seconds, "refuted", reason)
    if argument.value is None:
        return Verdict(place, bound.proved_by, bound.seconds, "claimed")
    value = argument.value(problem, plan, bound)
    if value is None:
        reason = "the argument does not apply to these stages"
        return Verdict(place, bound.proved_by, bound.seconds, "refuted", reason)
    found = judged(place, bound, value)
    if found.verdict == "refuted" and _may_be_of_search(bound):
        return Verdict(place, bound.proved_by, bound.seconds, "claimed")
    return found


def _why_not(argument: Argument, bound: Bound) -> str:
    """Why the argument is not one for such a bound; empty if it is."""
    if bound.scope != argument.scope:
        return f"the argument is about the {argument.scope}, not the {bound.scope}"
    if not argument.plans.contains(bound.plans):
        return f"proved for {argument.plans} only"
    if bound.witness and bound.proved_by != every_plan.LOAD:
        return "the argument has no witness"
    return ""


def _may_be_of_search(bound: Bound) -> bool:
    """Whether the bound is a minimum over microbatch sizes, of which a search proved some."""
    return bound.proved_by in OF_PERIODS and bound.plans.merged


def _of_guarantee(problem: PipelineProblem, plan: PipelinePlan, i: int, one: Guarantee) -> Verdict:
    def verdict(found: Literal["verified", "claimed", "refuted"], reason: str = "") -> Verdict:
        return Verdict(f"guarantees[{i}]", one.theorem, one.seconds, found, reason)

    scheduling = scheduling_of(problem, one.stages) if one.stages else None
    if one.theorem not in (bppm.LEMMA_1, bppm.THEOREM_1):
        return verdict("refuted", "the theorem is not known")
    if scheduling is None:
        return verdict("refuted", "the theorem does not apply to its stages")
    lemma = one.theorem == bppm.LEMMA_1
    premise = bppm.LEMMA_1_PREMISE if lemma else bppm.theorem1_premise(problem)
    right = bppm.lemma1_seconds(scheduling) if lemma else bppm.theorem1_seconds(problem, scheduling)
    if one.premise != premise:
        return verdict("refuted", f"its premise is: {premise}")
    if not math.isclose(one.seconds, right, rel_tol=ROUNDING):
        return verdict("refuted", f"the formula gives {right:.9g} s")
    if lemma:  # its cost is that of another schedule
        return verdict("claimed", "the formula is right; the cost is that of PE's schedule")
    assert plan.certificate is not None
    if not math.isclose(one.cost_seconds, plan.certificate.cost_seconds, rel_tol=ROUNDING):
        return verdict("refuted", "its cost is not the plan's")
    return verdict("verified")


def _finite(bound_of: Callable[[PipelineProblem, bool], float]) -> Value:
    """A bound on finite plans, larger if backwards may not be split."""
    return lambda problem, plan, bound: bound_of(problem, not bound.plans.split_backward)


def _without_offloading(bound_of: Callable[[PipelineProblem], float]) -> Value:
    """A bound on finite plans that does not apply to those that offload."""

    def value(problem: PipelineProblem, plan: PipelinePlan, bound: Bound) -> float | None:
        hosts = {one.host_bytes_per_second for one in problem.cluster.devices}
        return None if bound.plans.offload and hosts != {None} else bound_of(problem)

    return value


def _by_streams(bound_of: Callable[[PipelineProblem, Literal[1, 2]], float]) -> Value:
    """A bound on every plan, larger if devices have one stream."""
    return lambda problem, plan, bound: bound_of(problem, bound.plans.streams)


def _of_load(problem: PipelineProblem, plan: PipelinePlan, bound: Bound) -> float | None:
    if len(bound.witness) != len(problem.kinds):
        return None
    return every_plan.priced_load_bound(problem, np.array(bound.witness), bound.plans.streams)


def _of_schedule(problem: PipelineProblem, plan: PipelinePlan, bound: Bound) -> float | None:
    scheduling = relaxed_schedule(problem, plan.stages, bound.plans.split_backward)
    known = () if scheduling is None else schedule_bounds(scheduling)
    return next((one.seconds for one in known if one.proved_by == bound.proved_by), None)


def _between_losses(problem: PipelineProblem, plan: PipelinePlan, bound: Bound) -> float | None:
    known = stage_bounds(problem, plan.stages)
    return next((one.seconds for one in known if one.proved_by == bound.proved_by), None)


def _of_devices(problem: PipelineProblem, plan: PipelinePlan, bound: Bound) -> float:
    return verified_bound(problem, plan.stages, bound.plans.split_backward, bound.seconds)


def _of_patterns(
    plans: PlanClass, seconds: Callable[[PipelineProblem, Sequence[Stage], WeightRule], float]
) -> Value:
    """A bound on patterns of the plan's stages, which holds if the plan is one of ``plans``."""

    def value(problem: PipelineProblem, plan: PipelinePlan, bound: Bound) -> float | None:
        if not plans.contains(class_of(plan)) or len(bound.plans.weights) > 1:
            return None
        return seconds(problem, plan.stages, WEIGHT_RULES[bound.plans.weights[0]])

    return value


def _of_periods(problem: PipelineProblem, plan: PipelinePlan, bound: Bound) -> float | None:
    """The argument's bound on one size; of several, the least of the best cheap bound of each."""
    sizes = bound.plans.equal_groups
    if sizes is None:
        return None
    known = [
        [
            one.seconds
            for one in iteration_bounds(problem, size)
            if one.plans.contains(replace(bound.plans, equal_groups=(size,)))
            and (len(sizes) > 1 or one.proved_by == bound.proved_by)
        ]
        for size in sizes
    ]
    return min(map(max, known)) if all(known) else None


ARGUMENTS: dict[str, Argument] = {
    every_plan.LOAD: Argument("problem", EVERY_PLAN, _of_load),
    every_plan.LAYER: Argument("problem", EVERY_PLAN, _by_streams(every_plan.layer_bound)),
    every_plan.COPIES: Argument("problem", EVERY_PLAN, _by_streams(every_plan.copies_bound)),
    every_plan.PATH: Argument("problem", EVERY_FINITE, _finite(every_plan.path_bound)),
    every_plan.LAYER_PATH: Argument("problem", EVERY_FINITE, _finite(every_plan.layer_path_bound)),
    MEMORY_LOAD: Argument("problem", EVERY_FINITE, _without_offloading(memory_load_bound)),
    MEMORY_PATH: Argument("problem", EVERY_FINITE, _without_offloading(memory_path_bound)),
    TWO_STREAMS: Argument(
        "problem", EVERY_BACKWARD_FIRST, lambda problem, plan, bound: two_streams_bound(problem)
    ),
    FILL_AND_DRAIN: Argument("problem", DISJOINT_SPLIT),
    WIDE_FILL_AND_DRAIN: Argument("problem", DISJOINT_WHOLE),
    server_relaxation.SERVERS: Argument("problem", DISJOINT_SPLIT),
    server_relaxation.SERVERS_AND_TURNS: Argument("problem", DISJOINT_WHOLE),
    server_relaxation.SHARED_SERVERS: Argument("problem", SHARED_WHOLE),
    server_relaxation.SPLIT_SERVERS: Argument("problem", SHARED_SPLIT),
    server_relaxation.RELAXED_TREE: Argument("problem", DISJOINT_SPLIT),
    JOINT_SEARCH: Argument("problem", DISJOINT_SPLIT),
    CP_SAT: Argument("schedule", SHARED_SPLIT),
    WINDOWS: Argument("schedule", SHARED_WHOLE),
    **{
        name: Argument("schedule", SHARED_SPLIT, _of_schedule)
        for name in (*OF_SCHEDULES, *MEMORY_NAMES)
    },
    EDGE_FINDING: Argument("schedule", EVERY_FINITE, _of_devices),
    **{name: Argument("problem", EVERY_PERIODIC, _of_periods) for name in OF_PERIODS},
    **{
        name: Argument("schedule", ORDERS_BETWEEN_LOSSES, _between_losses)
        for name in BETWEEN_LOSSES.values()
    },
    SEARCHED_BETWEEN_LOSSES: Argument("schedule", ORDERS_BETWEEN_LOSSES),
    ALLOCATIONS: Argument("problem", SEARCHED_ALLOCATIONS),
    PATTERN: Argument("schedule", PATTERNS),
    PATTERN_LOAD: Argument(
        "schedule", OFFLOADING_PATTERNS, _of_patterns(OFFLOADING_PATTERNS, load_seconds)
    ),
    PATTERN_MEMORY: Argument(
        "schedule", EVERY_PATTERN, _of_patterns(EVERY_PATTERN, memory_seconds)
    ),
}
