"""Check every rule of a pipeline plan from its definition, independent of all planners.

Rules that need no times come first: the plan answers this problem, its stages cover the layers
(`frame`), and every action appears once (`expected`). Then the times: durations and dependencies
(`order`), no overlap on a stream or a channel (`overlaps`), the speed beside the main stream
(`streams`), memory at every instant (`peaks`), the
rules across iterations (`periodic_rules`), and the plan's own predictions and certificate
(`predictions`, `certificates`, `proofs`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stagewright.formulations.checking.certificates import faults
from stagewright.formulations.checking.expected import broken_actions, overlaps
from stagewright.formulations.checking.frame import broken_frame
from stagewright.formulations.checking.order import (
    Violation,
    broken_dependencies,
    broken_durations,
    broken_sub_streams,
)
from stagewright.formulations.checking.peaks import memory_exceeded, peaks
from stagewright.formulations.checking.periodic_rules import broken_iterations, broken_pattern
from stagewright.formulations.checking.proofs import Verdict, verdicts
from stagewright.formulations.checking.times import (
    Lane,
    PlanTimes,
    devices_by_lanes,
    read_times,
    unrolled_steady,
)
from stagewright.formulations.plans import timing
from stagewright.formulations.plans.actions import COMPUTE, UPDATE, WeightRule
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, Predicted, Stage
from stagewright.formulations.plans.plan_class import class_of
from stagewright.formulations.plans.shards import exchanged_rounds
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InvalidPlan


def predicted(times: PlanTimes) -> Predicted:
    """Predictions of the cost model for a plan with these times."""
    devices = len({name for stage in times.stages for name in stage.devices})
    cost = times.cost_seconds
    found = tuple(peaks(times))
    problem = replace(times.problem, microbatches=times.iteration_microbatches)
    return Predicted(
        iteration_seconds=cost,
        bubble=1 - _busy(times) / (devices * cost) if cost > 0 else 0.0,
        peak_memory_bytes={name: static + saved for name, static, saved in found},
        link_bytes=_link_bytes(problem, times.stages, times.rule),
        capacity_bytes={
            name: float(problem.memory_bytes[problem.cluster.index[name]]) for name, _, _ in found
        },
    )


def _busy(times: PlanTimes) -> float:
    """Seconds in which devices compute, of all devices; two streams at once count once."""
    if times.in_sub.any():
        return sum(
            len(names) * timing.covered_seconds(*_computed(times, lanes))
            for lanes, names in devices_by_lanes(times.stages).items()
        )
    shares = np.array([len(stage.runners(0)) for stage in times.stages])
    busy = float(shares @ sum(np.nansum(times.durations[kind], axis=1) for kind in COMPUTE))
    busy *= times.iteration_microbatches / times.problem.microbatches
    every = np.array([len(stage.devices) for stage in times.stages])
    busy += float(every @ np.nansum(times.durations[UPDATE], axis=1))
    return busy


def _computed(times: PlanTimes, lanes: Sequence[Lane]) -> tuple[Floats, Floats]:
    """Starts and ends of the computations of devices with these lanes, in both streams."""
    rows = [(kind, lane) for kind in COMPUTE for lane in lanes]
    rows += [(UPDATE, (s, 0, 1)) for s, _, _ in lanes]
    starts = [times.starts[kind][s, m::step] for kind, (s, m, step) in rows]
    ends = [times.ends(kind)[s, m::step] for kind, (s, m, step) in rows]
    return np.concatenate(starts), np.concatenate(ends)


def _link_bytes(
    problem: PipelineProblem, stages: Sequence[Stage], rule: WeightRule
) -> dict[str, float]:
    """Bytes per iteration between neighbouring stages ("0-1"), and reduced in a stage ("0").

    A reduce-scatter or an all-gather of a stage counts as half of an all-reduce.
    """
    # A microbatch crosses a boundary twice: its activations, and their gradient.
    sent = [sum(timing.are_sent(stages, s, problem.microbatches)) for s in range(len(stages) - 1)]
    crossing = {
        f"{s}-{s + 1}": count * _both_ways(problem, stages[s], stages[s + 1])
        for s, count in enumerate(sent)
        if count > 0
    }
    sums = problem.microbatches if rule.updates_every_round else 1
    reduced = {
        str(s): sums
        * exchanged_rounds(stage, problem.microbatches)
        / 2
        * timing.reduce_bytes(problem, stage)
        for s, stage in enumerate(stages)
        if stage.replicas > 1
    }
    return crossing | reduced


def _both_ways(problem: PipelineProblem, one: Stage, other: Stage) -> float:
    return timing.transfer_bytes(problem, one, other) + timing.transfer_bytes(problem, other, one)


def _broken_prediction(computed: Predicted, stated: Predicted) -> Iterator[Violation]:
    """The predictions in the plan follow from its actions."""
    if not math.isclose(
        stated.iteration_seconds, computed.iteration_seconds, rel_tol=RELATIVE_TOLERANCE
    ):
        yield _misstated("iteration_seconds", stated.iteration_seconds, computed.iteration_seconds)
    if not abs(stated.bubble - computed.bubble) <= RELATIVE_TOLERANCE:
        yield _misstated("bubble", stated.bubble, computed.bubble)
    fields = ["peak_memory_bytes", "link_bytes"]
    if stated.capacity_bytes:
        fields.append("capacity_bytes")
    for field in fields:
        right, found = getattr(computed, field), getattr(stated, field)
        for name in sorted(right.keys() ^ found.keys()):
            yield Violation("predicted", f"predicted.{field}", f"{name} is missing or superfluous")
        for name in right:
            if name in found and not math.isclose(
                found[name], right[name], rel_tol=RELATIVE_TOLERANCE
            ):
                yield _misstated(f"{field}.{name}", found[name], right[name])


def _misstated(place: str, found: float, right: float) -> Violation:
    return Violation("predicted", f"predicted.{place}", f"says {found}, the actions give {right}")


PROOF = "proof"  # the rule that a refuted bound or guarantee breaks


def check(problem: PipelineProblem, plan: PipelinePlan) -> tuple[Violation, ...]:
    """Every broken rule, none if ``plan`` is a valid answer to ``problem``.

    Times are compared with a tolerance of ``RELATIVE_TOLERANCE`` of the iteration. Rules on times
    are checked only if the structure is valid, and the proofs in the certificate only if everything
    else is. A periodic plan is unrolled, without its pauses, for as many microbatches as it takes
    to reach one full steady-state period.
    """
    found = structure(problem, plan) or tuple(_broken_times(read_times(problem, plan), plan))
    return found or refutations(verdicts(problem, plan))


def refutations(found: Sequence[Verdict]) -> tuple[Violation, ...]:
    """The bounds and guarantees that do not follow from their arguments, as broken rules."""
    return tuple(
        Violation(
            PROOF,
            f"certificate.{one.place}",
            f"{one.seconds:.9g} s by {one.name!r} is refuted: {one.reason}",
        )
        for one in found
        if one.verdict == "refuted"
    )


def require_valid(problem: PipelineProblem, plan: PipelinePlan) -> float:
    """The iteration time in seconds, recomputed from the starts and the cost model.

    Raises InvalidPlan with the first broken rule.
    """
    require_structure(problem, plan)
    times = read_times(problem, plan)
    for violation in _broken_times(times, plan):
        raise InvalidPlan(str(violation))
    return times.cost_seconds


def predict(problem: PipelineProblem, plan: PipelinePlan) -> Predicted:
    """Predictions of the cost model for the plan, computed from its actions.

    Raises
    ------
    InvalidPlan
        If actions are missing or misplaced. Start and finish times are not checked.
    """
    require_structure(problem, plan)
    return predicted(read_times(problem, plan))


def structure(problem: PipelineProblem, plan: PipelinePlan) -> tuple[Violation, ...]:
    """The broken rules that need no times."""
    if isinstance(plan.schedule, PeriodicSchedule):
        broken = tuple(broken_frame(problem, plan)) or tuple(broken_pattern(plan, plan.schedule))
        return broken or tuple(
            broken_actions(*unrolled_steady(problem, plan, plan.schedule), frozenset())
        )
    broken = tuple(broken_frame(problem, plan))
    updated = (
        timing.updated_stages(problem, plan.stages, plan.weight_rule) if not broken else frozenset()
    )
    return broken or tuple(broken_actions(problem, plan, updated))


def require_structure(problem: PipelineProblem, plan: PipelinePlan) -> None:
    """Raise InvalidPlan with the first broken rule that needs no times."""
    for violation in structure(problem, plan):
        raise InvalidPlan(str(violation))


def _broken_times(times: PlanTimes, plan: PipelinePlan) -> Iterator[Violation]:
    yield from broken_durations(times)
    yield from broken_sub_streams(times)
    yield from broken_dependencies(times)
    yield from overlaps(times)
    yield from memory_exceeded(times)
    if times.schedule is not None:
        yield from broken_iterations(times.problem, plan, times.schedule, times.tolerance)
    if plan.predicted is not None:
        yield from _broken_prediction(predicted(times), plan.predicted)
    yield from _broken_certificate(times, plan)


def _broken_certificate(times: PlanTimes, plan: PipelinePlan) -> Iterator[Violation]:
    """The certificate is about this plan's cost, and its arithmetic is right."""
    if plan.certificate is None:
        return
    for place, message in faults(
        plan.certificate, class_of(plan), times.cost_seconds, times.tolerance
    ):
        yield Violation("certificate", f"certificate.{place}", message)
