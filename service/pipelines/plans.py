"""Operations on a plan: summarise, check, simulate, compare with a run."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stagewright.formulations.forms.answers import StopToken
from stagewright.formulations.plans.plan import Certificate, PipelinePlan
from stagewright.formulations.plans.plan_class import PlanClass
from stagewright.service.pipelines.answers import (
    CauseAnswer,
    CheckAnswer,
    CompareAnswer,
    DeviceShareAnswer,
    ExplanationAnswer,
    GuaranteeAnswer,
    IterationAnswer,
    KindAnswer,
    MemoryAnswer,
    PairAnswer,
    PeriodAnswer,
    PlanSummary,
    SimulateAnswer,
    StageAnswer,
    StageComparisonAnswer,
    StageShareAnswer,
    VerdictAnswer,
    ViolationAnswer,
    fields_of,
)
from stagewright.service.pipelines.requests import CheckRequest, CompareRequest, SimulateRequest

if TYPE_CHECKING:
    from stagewright.executor.measuring.causes import Explanation
    from stagewright.executor.measuring.compare import MemoryComparison


def summary(plan: PipelinePlan) -> PlanSummary:
    """A plan and its certificate in figures."""
    return PlanSummary(**summary_fields(plan))


def summary_fields(plan: PipelinePlan | None) -> dict[str, Any]:
    """The fields of a summary; none without a plan."""
    if plan is None:
        return {}
    fields: dict[str, Any] = {
        "planner": plan.planner,
        "stages": [_stage(plan, number) for number in range(len(plan.stages))],
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


def _stage(plan: PipelinePlan, number: int) -> StageAnswer:
    stage = plan.stages[number]
    return StageAnswer(
        layers=stage.layers,
        devices=stage.devices,
        replication=stage.replication,
        recompute=stage.recompute,
        offload=stage.offload,
        tensor=stage.tensor,
        shards=stage.shards,
    )


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
        "guarantees": [
            GuaranteeAnswer(
                theorem=one.theorem, premise=one.premise, seconds=one.seconds, holds=one.holds
            )
            for one in certificate.guarantees
        ],
    }


def class_object(plans: PlanClass | None) -> dict[str, Any] | None:
    """A class of plans, feature by feature, and in words."""
    return None if plans is None else {**asdict(plans), "text": str(plans)}


def check(request: CheckRequest, stop: StopToken | None = None) -> CheckAnswer:
    """Every rule that the plan breaks, and what becomes of its proofs."""
    from stagewright.formulations.checking.check import predict
    from stagewright.solvers.proofs import check_with_proofs

    limits = request.limits(stop) if request.proofs else None
    violations, verdicts = check_with_proofs(request.problem, request.plan, limits)
    cost = None if violations else predict(request.problem, request.plan).iteration_seconds
    return CheckAnswer(
        status="invalid" if violations else "valid",
        cost_seconds=cost,
        violations=tuple(
            ViolationAnswer(rule=one.rule, place=one.place, message=one.message)
            for one in violations
        ),
        proofs=tuple(VerdictAnswer(**asdict(one)) for one in verdicts),
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
    return SimulateAnswer(
        iteration_seconds=found.iteration_seconds,
        plan_seconds=planned,
        slowdown=found.iteration_seconds / planned if planned else 1.0,
        period_seconds=periodic and periodic.period_seconds,
        warm_up_seconds=periodic and periodic.warm_up_seconds,
        drain_seconds=periodic and periodic.drain_seconds,
        microbatches=periodic and periodic.microbatches,
        idle_seconds=found.idle_seconds,
        slack_seconds=found.slack_seconds,
        **options,
        simulation=found,
    )


def compare(request: CompareRequest) -> CompareAnswer:
    """A plan's prediction and what a run of it measured."""
    from stagewright.executor.measuring.compare import compare as measure

    found, run = measure(request.plan, request.trace), request.trace
    period = found.period
    return CompareAnswer(
        machine=run.machine,
        backend=run.backend,
        world_size=run.world_size,
        dtype=run.dtype,
        steps=found.steps,
        iteration_seconds=IterationAnswer(
            **fields_of(found.iteration_seconds), least=found.least_seconds, most=found.most_seconds
        ),
        period_seconds=period
        and PeriodAnswer(**fields_of(period.seconds), microbatches=period.microbatches),
        update_seconds=PairAnswer(**fields_of(found.update_seconds)),
        kinds={
            one.kind.value: KindAnswer(
                count=one.count, seconds=PairAnswer(**fields_of(one.seconds))
            )
            for one in found.kinds
        },
        stages=tuple(
            StageComparisonAnswer(
                devices=one.devices,
                forward_seconds=PairAnswer(**fields_of(one.forward_seconds)),
                backward_seconds=PairAnswer(**fields_of(one.backward_seconds)),
                busy=PairAnswer(**fields_of(one.busy)),
            )
            for one in found.stages
        ),
        memory=found.memory and _memory(found.memory),
        explanation=found.explanation and _explanation(found.explanation),
        comparison=found,
    )


def _memory(found: "MemoryComparison") -> MemoryAnswer:
    peaks = {name: PairAnswer(**fields_of(peak)) for name, peak in found.peak_bytes.items()}
    return MemoryAnswer(kind=found.kind, peak_bytes=peaks)


def _explanation(found: "Explanation") -> ExplanationAnswer:
    causes = tuple(
        CauseAnswer(
            name=one.name,
            seconds=one.seconds,
            work_seconds=one.work and PairAnswer(**fields_of(one.work)),
            stages=tuple(
                StageShareAnswer(
                    stage=share.stage,
                    seconds=share.seconds,
                    work_seconds=PairAnswer(**fields_of(share.work)),
                )
                for share in one.stages
            ),
            devices=tuple(DeviceShareAnswer(**asdict(share)) for share in one.devices),
        )
        for one in found.causes
    )
    return ExplanationAnswer(
        causes=causes,
        rest_seconds=found.rest_seconds,
        largest=found.largest and found.largest.name,
        without_waits_seconds=found.without_waits_seconds,
    )
