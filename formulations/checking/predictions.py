"""A plan's predictions: computed from its actions, and compared with those in the document."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stagewright.formulations.checking.peaks import peaks
from stagewright.formulations.checking.times import Lane, PlanTimes, devices_by_lanes
from stagewright.formulations.checking.violations import Violation
from stagewright.formulations.plans.actions import COMPUTE, UPDATE
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Predicted, Stage
from stagewright.formulations.plans.shards import exchanged_rounds
from stagewright.formulations.plans.timing import (
    are_sent,
    covered_seconds,
    reduce_bytes,
    transfer_bytes,
)
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.plans.weight_rules import WeightRule
from stagewright.graphs.documents.arrays import Floats


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
            len(names) * covered_seconds(*_computed(times, lanes))
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
    sent = [sum(are_sent(stages, s, problem.microbatches)) for s in range(len(stages) - 1)]
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
        * reduce_bytes(problem, stage)
        for s, stage in enumerate(stages)
        if stage.replicas > 1
    }
    return crossing | reduced


def _both_ways(problem: PipelineProblem, one: Stage, other: Stage) -> float:
    return transfer_bytes(problem, one, other) + transfer_bytes(problem, other, one)


def broken_prediction(computed: Predicted, stated: Predicted) -> Iterator[Violation]:
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
