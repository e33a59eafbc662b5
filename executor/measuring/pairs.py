"""Predicted and measured times per action."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import chain as joined
from itertools import pairwise
from typing import TypeVar

import numpy as np

from stagewright.executor.drawing.periods import drawn
from stagewright.executor.programs.program import moved_action
from stagewright.executor.programs.trace import Trace, TracedStep, planned_updates
from stagewright.formulations.plans.actions import COMPUTE, Action, ActionKind, parse_action
from stagewright.formulations.plans.periodic import finite_run
from stagewright.formulations.plans.plan import PipelinePlan, Schedule, ScheduledAction
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError

T = TypeVar("T")


Entry = tuple[str, str]  # device and action, which identify an entry of a schedule


BACKWARD = tuple(kind for kind in COMPUTE if kind is not ActionKind.FORWARD)


@dataclass(frozen=True, slots=True)
class Pair:
    """A predicted and a measured value, in seconds or as a fraction."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured / predicted; None if the prediction is 0."""
        return self.measured / self.predicted if self.predicted else None

    def plus(self, other: "Pair") -> "Pair":
        """The sums of both values."""
        return Pair(self.predicted + other.predicted, self.measured + other.measured)

    def part(self, count: int) -> "Pair":
        """Both values divided by ``count``."""
        return Pair(self.predicted / count, self.measured / count)


def counted_steps(steps: Sequence[T]) -> Sequence[T]:
    """The steps that count: all but the first, a warm-up, if a trace has at least three steps."""
    return steps[1:] if len(steps) > 2 else steps


def median_step(trace: Trace) -> TracedStep:
    """The counted step of median time; for an even number the faster of the two in the middle."""
    steps = sorted(counted_steps(trace.steps), key=lambda step: step.iteration_seconds)
    return steps[(len(steps) - 1) // 2]


def steps_in_the_middle(steps: Sequence[TracedStep]) -> Sequence[TracedStep]:
    """The middle half by time, at least one."""
    ordered = sorted(steps, key=lambda step: step.iteration_seconds)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def _planned(plan: PipelinePlan, actions: Iterable[ScheduledAction]) -> Iterable[ScheduledAction]:
    """A run's actions without the optimizer steps that are not in the plan."""
    held = planned_updates(plan)
    return (
        timed
        for timed in actions
        if timed.action in held or parse_action(timed.action).kind is not ActionKind.UPDATE
    )


def _entry(timed: ScheduledAction) -> Entry:
    return timed.device, timed.action


def pair_entries(plan: PipelinePlan, trace: Trace) -> dict[Entry, Pair]:
    """Seconds of every entry of the schedule."""
    require_same_plan(plan, trace)
    predicted = _seconds(finite_run(plan, 1).actions)
    steps = [_seconds(actions) for actions in _iterations(plan, trace)]
    table = np.array([[step[entry] for entry in predicted] for step in steps])
    medians: Floats = np.median(table, axis=0)
    return {
        entry: Pair(seconds, median)
        for (entry, seconds), median in zip(predicted.items(), medians.tolist(), strict=True)
    }


def _iterations(plan: PipelinePlan, trace: Trace) -> Sequence[Sequence[ScheduledAction]]:
    """The actions of each counted iteration, with microbatches numbered from 0."""
    if not plan.is_periodic:
        return [step.actions for step in counted_steps(trace.steps)]
    return counted_steps(list(joined.from_iterable(_cut(plan, step) for step in trace.steps)))


def _cut(plan: PipelinePlan, run: TracedStep) -> Iterable[Sequence[ScheduledAction]]:
    """The iterations of a periodic plan's run."""
    found: dict[int, list[ScheduledAction]] = defaultdict(list)
    for microbatch, timed in _numbered(plan, run):
        iteration = microbatch // plan.microbatches
        found[iteration].append(_earlier(timed, iteration * plan.microbatches))
    return [found[i] for i in sorted(found)]


def _numbered(plan: PipelinePlan, run: TracedStep) -> list[tuple[int, ScheduledAction]]:
    """A run's actions with microbatches; all-reduces and updates get their iteration's last."""
    sums: Counter[Entry] = Counter()
    numbered = []
    for timed in sorted(run.actions, key=lambda timed: timed.start_seconds):
        microbatch = parse_action(timed.action).microbatch
        if microbatch is None:
            sums[_entry(timed)] += 1
            microbatch = sums[_entry(timed)] * plan.microbatches - 1
        numbered.append((microbatch, timed))
    return numbered


def _earlier(timed: ScheduledAction, microbatches: int, seconds: float = 0.0) -> ScheduledAction:
    """The same action with times and microbatches relative to later ones."""
    return replace(
        timed,
        action=str(moved_action(parse_action(timed.action), -1, microbatches)),
        start_seconds=timed.start_seconds - seconds,
        finish_seconds=timed.finish_seconds - seconds,
    )


def _end_of_run(plan: PipelinePlan, run: TracedStep) -> PipelinePlan:
    """The last microbatches of a run, as many as a drawing of a periodic plan has."""
    assert run.iterations is not None
    microbatches = run.iterations * plan.microbatches
    count = min(microbatches, drawn(plan).microbatches)
    last = [timed for m, timed in _numbered(plan, run) if m >= microbatches - count]
    begin = min(timed.start_seconds for timed in last)
    actions = tuple(_earlier(timed, microbatches - count, begin) for timed in last)
    return replace(
        plan, microbatches=count, schedule=Schedule(actions), predicted=None, certificate=None
    )


def _seconds(actions: Iterable[ScheduledAction]) -> dict[Entry, float]:
    return {_entry(timed): timed.finish_seconds - timed.start_seconds for timed in actions}


def pair_actions(entries: dict[Entry, Pair]) -> dict[Action, Pair]:
    """Seconds of every action on its slowest device."""
    found: dict[str, Pair] = {}
    for (_, text), pair in entries.items():
        other = found.get(text, pair)
        found[text] = Pair(max(pair.predicted, other.predicted), max(pair.measured, other.measured))
    return {parse_action(text): pair for text, pair in found.items()}


def sum_by(pairs: Iterable[tuple[Hashable, Pair]]) -> dict[Hashable, Pair]:
    """Sums of the pairs with equal keys."""
    sums: dict[Hashable, Pair] = defaultdict(lambda: Pair(0.0, 0.0))
    for key, pair in pairs:
        sums[key] = sums[key].plus(pair)
    return sums


class MeasuredStageTimes:
    """Seconds that each stage spends on each kind of action, on the slowest devices."""

    def __init__(self, actions: dict[Action, Pair]) -> None:
        self._sums = sum_by(((one.stage, one.kind), pair) for one, pair in actions.items())

    def of(self, stage: int, *kinds: ActionKind) -> Pair:
        """Seconds of the stage's actions of these kinds together."""
        return reduce(Pair.plus, (self._sums[stage, kind] for kind in kinds))


def require_same_plan(plan: PipelinePlan, trace: Trace) -> None:
    """Refuse a trace of another plan of the same problem, or of another problem."""
    if trace.digest != plan.digest:
        raise InputError(
            f"the trace is of a run of {trace.model!r} with digest {trace.digest[:12]!r}, the plan "
            f"is for {plan.model!r} with digest {plan.digest[:12]!r}: give the plan that was run"
        )
    expected = cache(
        lambda iterations: Counter(map(_entry, finite_run(plan, iterations or 1).actions))
    )
    neighbours = [] if plan.is_periodic else _neighbours(plan)
    for step in trace.steps:
        require_same_kind(plan, step)
        found = Counter(map(_entry, _planned(plan, step.actions)))
        planned = expected(step.iterations)
        for word, odd in (("lacks", planned - found), ("has", found - planned)):
            if odd:
                device, action = min(odd)
                contrast = "which the plan has" if word == "lacks" else "unlike the plan"
                raise InputError(
                    f"step {step.step} of the trace {word} {action} on {device!r}, {contrast}: "
                    "give the plan that was run"
                )
        _require_order(neighbours, step)


def _neighbours(plan: PipelinePlan) -> list[tuple[Entry, Entry]]:
    """The computations that follow each other on a device, and in a stream of it."""
    rows = defaultdict[tuple[str, str | None], list[ScheduledAction]](list)
    for timed in sorted(plan.actions, key=lambda timed: timed.start_seconds):
        if parse_action(timed.action).kind in COMPUTE:
            rows[timed.device, timed.stream].append(timed)
    return [
        (_entry(one), _entry(other))
        for row in rows.values()
        for one, other in pairwise(row)
        if one.start_seconds < other.start_seconds
    ]


def _require_order(neighbours: Iterable[tuple[Entry, Entry]], step: TracedStep) -> None:
    """Refuse a step whose devices compute in another order than the plan's."""
    starts = {_entry(timed): timed.start_seconds for timed in step.actions}
    for one, other in neighbours:
        if starts[other] < starts[one]:
            (device, before), (_, action) = one, other
            raise InputError(
                f"step {step.step} of the trace has {action} before {before} on {device!r}, unlike "
                "the plan: give the plan that was run"
            )


def require_same_kind(plan: PipelinePlan, step: TracedStep) -> None:
    """Refuse a trace of another kind of schedule."""
    kinds = "finite", "periodic"
    planned, found = plan.is_periodic, step.iterations is not None
    if planned != found:
        raise InputError(
            f"step {step.step} of the trace is of a {kinds[found]} plan, this one is "
            f"{kinds[planned]}: give the plan that was run"
        )
