"""Operations on a plan: summarise, check, simulate, compare with a run."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stagewright.formulations.forms.answers import StopToken
from stagewright.formulations.plans.plan import Certificate, PipelinePlan
from stagewright.formulations.plans.plan_class import PlanClass
from stagewright.service.pipelines.answers import (
    CheckAnswer,
    CompareAnswer,
    ExplanationAnswer,
    IterationAnswer,
    PeriodAnswer,
    PlanSummary,
    SimulateAnswer,
)
from stagewright.service.pipelines.requests import CheckRequest, CompareRequest, SimulateRequest

if TYPE_CHECKING:
    from stagewright.executor.measuring.causes import Explanation


def summary(plan: PipelinePlan) -> PlanSummary:
    """The main numbers of a plan and its certificate."""
    return PlanSummary(**summary_fields(plan))


def summary_fields(plan: PipelinePlan | None) -> dict[str, Any]:
    """The fields of a summary; none without a plan."""
    if plan is None:
        return {}
    fields: dict[str, Any] = {
        "planner": plan.planner,
        "stages": plan.stages,
        "period_seconds": getattr(plan.schedule, "period_seconds", None),
    }
    if plan.predicted is not None:
        peaks = plan.predicted.peak_memory_bytes
        fields |= {
            "bubble": plan.predicted.bubble,
            "peak_memory_bytes": max(peaks.values()),
            "peak_memory_bytes_per_device": peaks,
        }
    if plan.certificate is not None:
        fields |= _certificate_fields(plan.certificate)
    return fields


def _certificate_fields(certificate: Certificate) -> dict[str, Any]:
    shared = ("cost_seconds", "bound_seconds", "gap", "proved_by")
    scoped = [
        f"{scope}_{name}"
        for scope in ("every", "schedule")
        for name in ("bound_seconds", "gap", "proved_by")
    ]
    return {
        **{name: getattr(certificate, name) for name in shared},
        **{name: getattr(certificate, name, None) for name in scoped},
        "plans": class_object(certificate.plans),
        "schedule_plans": class_object(certificate.schedule_plans),
        "guarantees": certificate.guarantees,
    }


def class_object(plans: PlanClass | None) -> dict[str, Any] | None:
    """A class of plans, feature by feature, and in words."""
    return None if plans is None else {**asdict(plans), "text": str(plans)}


def check(request: CheckRequest, stop: StopToken | None = None) -> CheckAnswer:
    """Every rule that the plan breaks, and whether its proofs hold."""
    from stagewright.formulations.checking.check import predict
    from stagewright.solvers.proofs import check_with_proofs

    limits = request.limits(stop) if request.proofs else None
    violations, verdicts = check_with_proofs(request.problem, request.plan, limits)
    cost = None if violations else predict(request.problem, request.plan).iteration_seconds
    return CheckAnswer(
        status="invalid" if violations else "valid",
        cost_seconds=cost,
        violations=violations,
        proofs=verdicts,
        found=tuple(violations),
        verdicts=tuple(verdicts),
    )


def simulate(request: SimulateRequest) -> SimulateAnswer:
    """Run the order of a plan.

    Raises
    ------
    InvalidPlan
        If the order cannot be run; the message names what is wrong with it.
    """
    from stagewright.executor.drawing.periods import iteration_seconds
    from stagewright.executor.simulation.simulate import simulate as run

    options = {"jitter": request.jitter, "stragglers": request.stragglers, "seed": request.seed}
    found = run(request.problem, request.plan, **options)  # type: ignore[arg-type]
    planned, periodic = iteration_seconds(request.plan), found.periodic
    of_period = ("period_seconds", "warm_up_seconds", "drain_seconds", "microbatches")
    return SimulateAnswer.of(
        found,
        plan_seconds=planned,
        slowdown=found.iteration_seconds / planned if planned else 1.0,
        **{name: periodic and getattr(periodic, name) for name in of_period},
        **options,
        simulation=found,
    )


def compare(request: CompareRequest) -> CompareAnswer:
    """A plan's prediction and what a run of it measured."""
    from stagewright.executor.measuring.compare import compare as measure

    found = measure(request.plan, request.trace)
    period = found.period
    return CompareAnswer.of(
        found,
        request.trace,
        iteration_seconds=IterationAnswer.of(
            found.iteration_seconds, least=found.least_seconds, most=found.most_seconds
        ),
        period_seconds=period and PeriodAnswer.of(period.seconds, period),
        kinds={one.kind.value: one for one in found.kinds},
        explanation=found.explanation and _explanation(found.explanation),
        comparison=found,
    )


def _explanation(found: "Explanation") -> ExplanationAnswer:
    return ExplanationAnswer.of(found, largest=found.largest and found.largest.name)
