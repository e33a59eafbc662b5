"""The prediction of PipeDream's recurrence beside the checked plan's time, by cause."""

from collections.abc import Sequence
from itertools import pairwise

from stagewright.formulations.patterns.one_f_one_b import pattern_load_bound
from stagewright.formulations.patterns.pattern import PatternProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.timing import compute_seconds, reduce_seconds, update_seconds
from stagewright.graphs.documents.units import format_seconds

SMALL = 0.005  # of the plan's time: no cause that is worth a word


def explain_pattern(
    predicted: float,
    problem: PipelineProblem,
    stages: Sequence[Stage],
    asked: PatternProblem,
    period: float,
) -> str:
    """One line on a periodic plan, in which every microbatch has an all-reduce and an update.

    The changes, in seconds per microbatch, add up: whole samples instead of equal shares, the
    devices and links that the stages have, and recomputation; the all-reduce and the update after
    the backward, and the transfers that share a channel; and a longer period because of memory.
    """
    computed, moved = _loads(problem, stages)
    reduced = [reduce_seconds(problem, stage) for stage in stages]
    overlapped, load = max(*computed, *moved, *reduced), pattern_load_bound(asked)
    causes = (
        ("whole samples, links and recomputation of the stages", overlapped - predicted),
        ("all-reduce and update after the backward, shared channels", load - overlapped),
        ("memory", period - load),
    )
    seen = [
        f"{name} {'+' if change > 0 else '-'}{format_seconds(abs(change))}"
        for name, change in causes
        if abs(change) > SMALL * period
    ]
    because = f", because: {', '.join(seen)}" if seen else ""
    return f"{_predicted(predicted)}{format_seconds(period)}{because}"


def explain_iteration(
    predicted: float, problem: PipelineProblem, stages: Sequence[Stage], iteration: float
) -> str:
    """One line on a finite plan, in which an iteration has one all-reduce and one update.

    Its seconds per microbatch are those of the slowest device or channel, of the longest all-reduce
    with its update, divided among the microbatches, and the rest.
    """
    computed, moved = _loads(problem, stages)
    each = iteration / problem.microbatches
    load = min(max(*computed, *moved), each)
    ends = [reduce_seconds(problem, one) + update_seconds(problem, one) for one in stages]
    ending = min(max(ends) / problem.microbatches, each - load)
    parts = (
        ("slowest device or channel", load),
        ("all-reduce and update", ending),
        ("filling, draining and waiting", each - load - ending),
    )
    seen = [f"{name} {format_seconds(part)}" for name, part in parts if part > SMALL * each]
    return f"{_predicted(predicted)}{format_seconds(each)}, of which {', '.join(seen)}"


def _predicted(seconds: float) -> str:
    return f"PipeDream's recurrence: {format_seconds(seconds)} per microbatch, checked: "


def _loads(problem: PipelineProblem, stages: Sequence[Stage]) -> tuple[list[float], list[float]]:
    """Seconds of computation of each stage, and of both ways of each channel."""
    groups = [[problem.cluster.index[name] for name in stage.devices] for stage in stages]
    computed = [
        sum(compute_seconds(problem, stage, devices))
        for stage, devices in zip(stages, groups, strict=True)
    ]
    moved = [
        sum(problem.transfer_seconds(stage.layers[1], *pair))
        for stage, pair in zip(stages, pairwise(groups), strict=False)
    ]
    return computed, [0.0, *moved]
