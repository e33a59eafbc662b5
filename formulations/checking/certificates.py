"""A plan's certificate: the best of the bounds that apply to the plan, and their gaps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from stagewright.formulations.plans.plan import Bound, Certificate, Guarantee
from stagewright.formulations.plans.plan_class import EVERY_PLAN, PlanClass, every_of_degree
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.errors import InvalidPlan

BOUND_ROUNDING = 1e-6  # relative; a bound further above the cost is a bug
EQUAL = 1e-9  # relative; bounds closer than this are equal


def certificate(
    plans: PlanClass, cost: float, bounds: Sequence[Bound], guarantees: Sequence[Guarantee] = ()
) -> Certificate:
    """The certificate of a plan whose smallest class is ``plans`` and that takes ``cost`` seconds.

    ``bounds`` must contain one of scope ``problem`` on every plan (:func:`widest`), so that plans
    with shards or several tensor degrees have no certificate.

    Raises InvalidPlan if no bound applies to this plan, none is on every plan, or one exceeds the
    plan's cost: a bug of Stagewright.
    """
    # An infinite bound says that its class is empty; it does not contain this plan.
    kept = tuple(_capped(bound, plans, cost) for bound in bounds if bound.seconds < math.inf)
    own = [bound for bound in kept if bound.plans.contains(plans)]
    whole = [bound for bound in own if bound.scope == "problem"]
    if not whole:
        raise InvalidPlan(f"no bound is about {plans.phrase('a')}")
    on_every = [bound for bound in whole if bound.plans in widest(plans)]
    if not on_every:
        raise InvalidPlan(
            f"no bound about {plans.phrase('a')} is about {EVERY_PLAN}, which a certificate needs"
        )
    best, schedule, every = best_of(whole), best_of(own), best_of(on_every)
    return Certificate(
        cost_seconds=cost,
        bound_seconds=best.seconds,
        gap=gap(cost, best.seconds),
        proved_by=best.proved_by,
        plans=best.plans,
        every_bound_seconds=every.seconds,
        every_gap=gap(cost, every.seconds),
        every_proved_by=every.proved_by,
        schedule_bound_seconds=schedule.seconds,
        schedule_gap=gap(cost, schedule.seconds),
        schedule_proved_by=schedule.proved_by,
        schedule_plans=schedule.plans,
        bounds=kept,
        guarantees=tuple(guarantees),
    )


def widest(plans: PlanClass) -> tuple[PlanClass, ...]:
    """Every plan of the tensor degree of ``plans``; none if there are several degrees."""
    return () if plans.degree is None else (every_of_degree(plans.degree),)


def best_of(bounds: Sequence[Bound]) -> Bound:
    """The largest bound; among equal bounds the first for the largest class."""
    most = max(bound.seconds for bound in bounds)
    equal = [bound for bound in bounds if math.isclose(bound.seconds, most, rel_tol=EQUAL)]
    best = equal[0]
    for bound in equal:
        if bound.plans != best.plans and bound.plans.contains(best.plans):
            best = bound
    return best


def gap(cost: float, bound: float) -> float:
    """(cost - bound) / cost; 0 for a plan that takes no time, and within the last bit."""
    return (cost - bound) / cost if cost - bound > 1e-15 * cost else 0.0


class Headline(NamedTuple):
    """One of the certificate's main bounds: its scope, value and argument."""

    plans: str
    seconds: float
    gap: float
    proved_by: str


def headlines(stated: Certificate) -> tuple[Headline, ...]:
    """The bounds over the plan's class, over every plan, and over its stages' schedules."""
    own = Headline(str(stated.plans), stated.bound_seconds, stated.gap, stated.proved_by)
    (plans,) = widest(stated.plans)
    every = Headline(
        str(plans), stated.every_bound_seconds, stated.every_gap, stated.every_proved_by
    )
    schedule = Headline(
        stated.schedule_plans.schedule_phrase(),
        stated.schedule_bound_seconds,
        stated.schedule_gap,
        stated.schedule_proved_by,
    )
    return (own, schedule) if stated.plans == plans else (own, every, schedule)


def faults(
    stated: Certificate, plans: PlanClass, cost: float, tolerance: float
) -> Iterator[tuple[str, str]]:
    """Place and message of everything in the certificate that does not follow from its bounds.

    ``plans`` is the smallest class of the plan, ``cost`` its time.
    """
    if not abs(stated.cost_seconds - cost) <= tolerance:
        yield "cost_seconds", f"says {stated.cost_seconds}, the actions give {cost}"
    for i, bound in enumerate(stated.bounds):
        most = cost + tolerance if bound.plans.contains(plans) else math.inf
        if not 0 <= bound.seconds <= most:
            yield (
                f"bounds[{i}]",
                f"{bound.seconds} by {bound.proved_by} is not a lower bound on {cost}",
            )
    for i, one in enumerate(stated.guarantees):
        excess = one.cost_seconds - one.seconds
        # Within the rounding either answer is right.
        if not abs(excess) <= tolerance and one.holds != (excess < 0):
            yield (
                f"guarantees[{i}]",
                f"holds is {one.holds}, the cost is {one.cost_seconds} and {one.theorem} promises "
                f"{one.seconds}",
            )
    yield from _headline_faults(stated, plans, cost, tolerance)


def _headline_faults(
    stated: Certificate, plans: PlanClass, cost: float, tolerance: float
) -> Iterator[tuple[str, str]]:
    """Each headline is the best listed bound of its scope, and its gap follows from it."""
    own = [bound for bound in stated.bounds if bound.plans.contains(plans)]
    whole = [bound for bound in own if bound.scope == "problem"]
    every = [bound for bound in whole if bound.plans in widest(plans)]
    same = [bound for bound in whole if bound.plans == stated.plans]
    of_schedule = [bound for bound in own if bound.plans == stated.schedule_plans]
    for prefix, listed, rivals in (
        ("", same, whole),
        ("every_", every, every),
        ("schedule_", of_schedule, own),
    ):
        seconds = getattr(stated, f"{prefix}bound_seconds")
        proved_by = getattr(stated, f"{prefix}proved_by")
        if (seconds, proved_by) not in [(bound.seconds, bound.proved_by) for bound in listed]:
            yield (
                f"{prefix}bound_seconds",
                f"{seconds} by {proved_by} is not among the listed bounds of this scope",
            )
        if any(bound.seconds > seconds + tolerance for bound in rivals):
            yield f"{prefix}bound_seconds", f"{seconds} is not the best of the bounds"
        stated_gap, right = getattr(stated, f"{prefix}gap"), gap(cost, seconds)
        if not abs(stated_gap - right) <= RELATIVE_TOLERANCE:
            yield f"{prefix}gap", f"says {stated_gap}, the bound gives {right}"


def _capped(bound: Bound, plans: PlanClass, cost: float) -> Bound:
    """A bound that equals the cost may exceed it by the rounding of its sums."""
    if not bound.plans.contains(plans):
        return bound
    if bound.seconds > cost * (1 + BOUND_ROUNDING):
        raise InvalidPlan(
            f"the cost of {cost} s is below {bound.seconds} s, a bound by {bound.proved_by}"
        )
    return replace(bound, seconds=min(bound.seconds, cost))
