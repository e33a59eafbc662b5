"""The times in a plan of valid structure, next to the cost model's durations."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stagewright.formulations.plans.actions import (
    BARE,
    PLANNED,
    Action,
    ActionKind,
    B,
    F,
    I,
    W,
    WeightRule,
)
from stagewright.formulations.plans.periodic import (
    from_first,
    iteration_seconds,
    steady_microbatches,
    unrolled,
    without_pause,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, Stage
from stagewright.formulations.plans.timing import (
    Blocks,
    Split,
    durations,
    empty_blocks,
    expected_actions,
    offload_seconds,
    split_backwards,
    updated_stages,
    whole_backwards,
)
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats

Lane = tuple[int, int, int]
"""A stage, and the microbatches first, first + step, ... of it."""


@dataclass(frozen=True, eq=False)
class PlanTimes:
    """The times in a plan of valid structure, next to the cost model's durations.

    ``finishes`` are the plan's; all rules except the one on durations use starts + durations. What
    runs in a sub-stream may take longer: there the finishes count, and `streams` has the rule.
    ``problem`` has as many microbatches as the arrays; for a periodic plan these are the unrolled
    ones, not those of an iteration.
    """

    problem: PipelineProblem
    iteration_microbatches: int
    stages: tuple[Stage, ...]
    rule: WeightRule
    starts: Blocks
    finishes: Blocks
    durations: Blocks
    in_sub: Split  # the weight gradients in sub-streams, shape (S, M)
    schedule: PeriodicSchedule | None = None  # the unrolled schedule; times are without pauses
    backward_first: bool = False

    def ends(self, kind: ActionKind) -> Floats:
        """When the actions of ``kind`` end by the cost model, shape (S, M)."""
        ends = self.starts[kind] + self.durations[kind]
        if kind is not W or not self.in_sub.any():
            return ends
        return np.where(self.in_sub, self.finishes[W], ends)

    def on_stream(self, kind: ActionKind, sub: bool) -> tuple[Floats, Floats]:
        """Starts and ends of the actions in the main or the sub-stream; NaN for the others."""
        starts, ends = self.starts[kind], self.ends(kind)
        if kind is not W or not (sub or self.in_sub.any()):
            return starts, ends
        other = self.in_sub != sub
        return np.where(other, np.nan, starts), np.where(other, np.nan, ends)

    @cached_property
    def done(self) -> Floats:
        """When the backwards end, whole or in parts, shape (S, M)."""
        return np.fmax(self.ends(B), self.ends(W))

    @property
    def cost_seconds(self) -> float:
        """The iteration's time: the end of its last action, or of its periods and pause."""
        if self.schedule is None:
            return self.iteration_seconds
        return iteration_seconds(self.schedule, self.iteration_microbatches)

    @cached_property
    def iteration_seconds(self) -> float:
        """When the last action ends."""
        return max(_largest(self.ends(kind)) for kind in PLANNED)

    @cached_property
    def tolerance(self) -> float:
        """Seconds of rounding error that the rules allow.

        At most a fraction of the sum of all durations: one absurdly late action must not raise
        the tolerance for the others.
        """
        work = sum(float(np.nansum(seconds)) for seconds in self.durations.values())
        return RELATIVE_TOLERANCE * min(self.iteration_seconds, work)


def unrolled_steady(
    problem: PipelineProblem, plan: PipelinePlan, schedule: PeriodicSchedule
) -> tuple[PipelineProblem, PipelinePlan]:
    """Problem and finite plan with enough microbatches for a full steady-state period.

    Where weights change after every microbatch, those that begin before the first one has ended
    use one version, and so keep fewer than later ones: the steady state comes a microbatch's whole
    way later. With vertical sync, versions are kept for microbatches that have begun on the first
    stage only: it takes one more.
    """
    first = without_pause(from_first(schedule))
    microbatches = steady_microbatches(first)
    if plan.weight_rule.updates_every_round:
        microbatches *= 3 if plan.weight_rule.follows_first_stage else 2
    longer = replace(problem, microbatches=microbatches)
    timed = unrolled(replace(plan, schedule=first), microbatches)
    return longer, replace(timed, digest=longer.digest)


def read_times(problem: PipelineProblem, plan: PipelinePlan) -> PlanTimes:
    """The times of a plan; for a periodic plan, the times of its first microbatches."""
    if isinstance(plan.schedule, PeriodicSchedule):
        times = _read_finite(*unrolled_steady(problem, plan, plan.schedule), frozenset())
        return replace(times, iteration_microbatches=plan.microbatches, schedule=plan.schedule)
    return _read_finite(problem, plan, updated_stages(problem, plan.stages, plan.weight_rule))


def _read_finite(
    problem: PipelineProblem, plan: PipelinePlan, updated: Collection[int]
) -> PlanTimes:
    entries = {entry.action: entry for entry in plan.actions}
    starts = empty_blocks(len(plan.stages), plan.microbatches)
    finishes = empty_blocks(len(plan.stages), plan.microbatches)
    in_sub = whole_backwards(plan.stages, plan.microbatches)
    split = split_backwards(plan)
    rule = plan.weight_rule
    for action in expected_actions(plan.stages, plan.microbatches, split, updated, rule):
        entry, m = entries[str(action)], action.microbatch or 0
        starts[action.kind][action.stage, m] = entry.start_seconds
        finishes[action.kind][action.stage, m] = entry.finish_seconds
        if entry.stream == "sub":
            in_sub[action.stage, m] = True
    lasting = durations(problem, plan.stages, split, rule)
    return PlanTimes(
        problem=problem,
        iteration_microbatches=plan.microbatches,
        stages=plan.stages,
        rule=rule,
        starts=starts,
        finishes=finishes,
        durations=lasting,
        in_sub=in_sub,
        backward_first=plan.is_backward_first,
    )


def devices_by_lanes(stages: Sequence[Stage]) -> dict[tuple[Lane, ...], list[str]]:
    """The devices by their lanes: devices of the same lanes run the same actions."""
    lanes: defaultdict[str, list[Lane]] = defaultdict(list)
    for s, stage in enumerate(stages):
        for first, names in enumerate(stage.lanes):
            for name in names:
                lanes[name].append((s, first, stage.turns))
    devices: defaultdict[tuple[Lane, ...], list[str]] = defaultdict(list)
    for name, own in lanes.items():
        devices[tuple(own)].append(name)
    return devices


def host_times(times: PlanTimes, lane: Lane) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Start and end of a lane's offloads, after F, and of the reads back, before B or I."""
    s, first, step = lane
    every = (s, slice(first, None, step))
    devices = [times.problem.cluster.index[name] for name in times.stages[s].runners(first)]
    seconds = offload_seconds(times.problem, times.stages[s], devices)
    assert seconds is not None  # part of the plan's structure
    written = times.ends(F)[every]
    needed = np.fmin(times.starts[B][every], times.starts[I][every])
    return (written, written + seconds), (needed - seconds, needed)


def action_text(kind: ActionKind, stage: int, microbatch: int) -> str:
    """The text of an action; ``microbatch`` is used only where the kind has one."""
    return str(Action(stage, kind, None if kind in BARE else microbatch))


def _largest(values: Floats) -> float:
    """The largest of ``values``, ignoring NaN; 0 if all are NaN."""
    return float(np.max(values, initial=0.0, where=~np.isnan(values)))
