"""A plan's prediction beside the trace of its run, and a profile corrected by it.

The first step of a trace warms the machine up and counts only where there are fewer than three.
What is measured of an action is the median over the counted steps.

The iterations of a periodic plan count as steps do, though they overlap. How fast they follow one
another is measured where the pipeline is full, by when microbatches have ended.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import chain as joined
from typing import TypeVar

import numpy as np

from stagewright.executor.drawing.timeline import drawn, iteration_seconds
from stagewright.executor.programs.program import moved_action
from stagewright.executor.programs.trace import Trace, TracedStep, planned_updates
from stagewright.formulations.plans.actions import (
    COMPUTE,
    ON_DEVICE,
    PLANNED,
    Action,
    ActionKind,
    parse_action,
)
from stagewright.formulations.plans.periodic import steady_microbatches
from stagewright.formulations.plans.plan import (
    PeriodicSchedule,
    PipelinePlan,
    Schedule,
    ScheduledAction,
)
from stagewright.formulations.plans.unrolling import unroll_run
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain, LayerCost

T = TypeVar("T")
Entry = tuple[str, str]  # device and action: what names an entry of a schedule

BACKWARD = tuple(kind for kind in COMPUTE if kind is not ActionKind.FORWARD)


@dataclass(frozen=True, slots=True)
class Pair:
    """A predicted figure and the measured one, in seconds or as a share."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured / predicted; None where nothing was predicted."""
        return self.measured / self.predicted if self.predicted else None

    def plus(self, other: "Pair") -> "Pair":
        """The sums of both figures."""
        return Pair(self.predicted + other.predicted, self.measured + other.measured)

    def part(self, count: int) -> "Pair":
        """Both figures divided by ``count``."""
        return Pair(self.predicted / count, self.measured / count)


@dataclass(frozen=True, slots=True)
class KindComparison:
    """The ``count`` actions of one kind, by the mean of their seconds."""

    kind: ActionKind
    count: int
    seconds: Pair


@dataclass(frozen=True, slots=True)
class StageComparison:
    """One stage: the mean times of a microbatch, and the share of the iteration it computes."""

    stage: int
    devices: tuple[str, ...]
    forward_seconds: Pair
    backward_seconds: Pair
    busy: Pair


@dataclass(frozen=True, slots=True)
class PeriodComparison:
    """The mean time of a periodic plan's microbatches, of so many measured in the steady run.

    That is its period, and a microbatch's share of the pause.
    """

    seconds: Pair
    microbatches: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Prediction beside measurement.

    An action that several devices share lasts as long as on the slowest of them, as in the cost
    model. ``iteration_seconds`` compares with the median of the ``steps`` counted steps, which
    took ``least_seconds`` to ``most_seconds``. ``update_seconds`` is what the optimizer's steps
    take on the device where they take longest, measured in the median; nothing is predicted where
    the profile did not tell, or an update belongs to a backward.

    Of a periodic plan ``steps`` counts iterations, and an iteration takes as many measured periods
    as it has microbatches; as many microbatches in a row took the least and the most seconds.
    """

    kinds: tuple[KindComparison, ...]
    stages: tuple[StageComparison, ...]
    iteration_seconds: Pair
    least_seconds: float
    most_seconds: float
    update_seconds: Pair
    steps: int
    period: PeriodComparison | None = None


def compare(plan: PipelinePlan, trace: Trace) -> Comparison:
    """What ``plan`` predicted beside what ``trace`` measured.

    Raises
    ------
    InputError
        If the trace is of another plan, or of runs that are too short to show its period.
    """
    entries = _pair_entries(plan, trace)
    steps, period = _counted(trace.steps), None
    measured = [step.iteration_seconds for step in steps]
    count, seconds = len(steps), float(np.median(measured))
    if isinstance(plan.schedule, PeriodicSchedule):
        period, measured = _compare_period(plan, plan.schedule, trace)
        count, seconds = len(_iterations(plan, trace)), plan.microbatches * period.seconds.measured
    iteration = Pair(iteration_seconds(plan), seconds)
    updates = [step.update_seconds / (step.iterations or 1) for step in steps]
    return Comparison(
        _compare_kinds(_pair_actions(entries)),
        _compare_stages(plan, entries, iteration),
        iteration,
        min(measured),
        max(measured),
        Pair(_predicted_update(plan), float(np.median(updates))),
        count,
        period,
    )


def measured_plan(plan: PipelinePlan, trace: Trace) -> PipelinePlan:
    """``plan`` with the schedule of the counted step of median time, to be drawn beside it.

    Of an even number of steps it is the faster of the two in the middle. Of a periodic plan it is
    the end of the longest run: the last microbatches, as many as are drawn of the plan.
    """
    _require_same_plan(plan, trace)
    if isinstance(plan.schedule, PeriodicSchedule):
        return _end_of_run(plan, max(trace.steps, key=lambda step: step.iterations or 0))
    steps = sorted(_counted(trace.steps), key=lambda step: step.iteration_seconds)
    median = steps[(len(steps) - 1) // 2]
    return replace(plan, schedule=Schedule(median.actions), predicted=None, certificate=None)


def correct(chain: Chain, plan: PipelinePlan, trace: Trace) -> Chain:
    """``chain`` with the computing times that a run of ``plan`` suggests.

    Within a stage nothing tells the layers, sizes and device kinds apart: all their forward times
    are multiplied by the stage's measured / predicted forward time, and likewise the backward
    times, by parts where the plan has them in parts, and the time of the optimizer's step.
    """
    times = _StageTimes(_pair_actions(_pair_entries(plan, trace)))
    _require_model(chain, plan)
    layers = []
    for s, stage in enumerate(plan.stages):
        factors = _Factors.of(s, times)
        layers += [
            replace(layer, costs=tuple(factors.on(cost) for cost in layer.costs))
            for layer in chain.layers[slice(*stage.layers)]
        ]
    source = f"{chain.source}, corrected by a measured run on {trace.machine}"
    return replace(chain, source=source, layers=tuple(layers))


def _counted(steps: Sequence[T]) -> Sequence[T]:
    return steps[1:] if len(steps) > 2 else steps


def _require_same_plan(plan: PipelinePlan, trace: Trace) -> None:
    if trace.digest != plan.digest:
        raise InputError(
            f"the trace is of a run of {trace.model!r} with digest {trace.digest[:12]!r}, the plan "
            f"is for {plan.model!r} with digest {plan.digest[:12]!r}: give the plan that was run"
        )
    expected = cache(lambda iterations: Counter(map(_entry, _run(plan, iterations).actions)))
    for step in trace.steps:
        _require_same_kind(plan, step)
        found = Counter(map(_entry, _planned(plan, step.actions)))
        planned = expected(step.iterations)
        for word, odd in (("lacks", planned - found), ("has", found - planned)):
            if odd:
                device, action = min(odd)
                contrast = "which the plan holds" if word == "lacks" else "unlike the plan"
                raise InputError(
                    f"step {step.step} of the trace {word} {action} on {device!r}, {contrast}: "
                    "give the plan that was run"
                )


def _planned(plan: PipelinePlan, actions: Iterable[ScheduledAction]) -> Iterable[ScheduledAction]:
    """What a run did, but for the optimizer's steps that the plan does not hold."""
    held = planned_updates(plan)
    return (
        timed
        for timed in actions
        if timed.action in held or parse_action(timed.action).kind is not ActionKind.UPDATE
    )


def _predicted_update(plan: PipelinePlan) -> float:
    if isinstance(plan.schedule, PeriodicSchedule):
        return plan.schedule.pause_seconds
    held, by_device = planned_updates(plan), defaultdict[str, float](float)
    for timed in plan.actions if held else ():
        if timed.action in held:
            by_device[timed.device] += timed.finish_seconds - timed.start_seconds
    return max(by_device.values(), default=0.0)


def _require_same_kind(plan: PipelinePlan, step: TracedStep) -> None:
    kinds = "finite", "periodic"
    planned, found = isinstance(plan.schedule, PeriodicSchedule), step.iterations is not None
    if planned != found:
        raise InputError(
            f"step {step.step} of the trace is of a {kinds[found]} plan, this one is "
            f"{kinds[planned]}: give the plan that was run"
        )


def _run(plan: PipelinePlan, iterations: int | None) -> PipelinePlan:
    """The finite plan that does so many iterations of a periodic one; a finite plan is its own."""
    return plan if iterations is None else unroll_run(plan, iterations * plan.microbatches)


def _entry(timed: ScheduledAction) -> Entry:
    return timed.device, timed.action


def _pair_entries(plan: PipelinePlan, trace: Trace) -> dict[Entry, Pair]:
    """Seconds of every entry of the schedule."""
    _require_same_plan(plan, trace)
    is_periodic = isinstance(plan.schedule, PeriodicSchedule)
    predicted = _seconds(_run(plan, 1 if is_periodic else None).actions)
    steps = [_seconds(actions) for actions in _iterations(plan, trace)]
    table = np.array([[step[entry] for entry in predicted] for step in steps])
    medians: Floats = np.median(table, axis=0)
    return {
        entry: Pair(seconds, median)
        for (entry, seconds), median in zip(predicted.items(), medians.tolist(), strict=True)
    }


def _iterations(plan: PipelinePlan, trace: Trace) -> Sequence[Sequence[ScheduledAction]]:
    """What was done in each iteration that counts, its microbatches counted from 0."""
    if not isinstance(plan.schedule, PeriodicSchedule):
        return [step.actions for step in _counted(trace.steps)]
    return _counted(list(joined.from_iterable(_cut(plan, step) for step in trace.steps)))


def _cut(plan: PipelinePlan, run: TracedStep) -> Iterable[Sequence[ScheduledAction]]:
    """The iterations of a periodic plan's run."""
    found: dict[int, list[ScheduledAction]] = defaultdict(list)
    for microbatch, timed in _numbered(plan, run):
        iteration = microbatch // plan.microbatches
        found[iteration].append(_earlier(timed, iteration * plan.microbatches))
    return [found[i] for i in sorted(found)]


def _numbered(plan: PipelinePlan, run: TracedStep) -> list[tuple[int, ScheduledAction]]:
    """A run's actions with their microbatches; what has none has the last of its iteration."""
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
    """The same action with times and microbatches that count from a later one."""
    return replace(
        timed,
        action=str(moved_action(parse_action(timed.action), -1, microbatches)),
        start_seconds=timed.start_seconds - seconds,
        finish_seconds=timed.finish_seconds - seconds,
    )


def _end_of_run(plan: PipelinePlan, run: TracedStep) -> PipelinePlan:
    """The last microbatches of a run, as many as are drawn of a periodic plan."""
    assert run.iterations is not None
    microbatches = run.iterations * plan.microbatches
    count = min(microbatches, drawn(plan).microbatches)
    last = [timed for m, timed in _numbered(plan, run) if m >= microbatches - count]
    begin = min(timed.start_seconds for timed in last)
    actions = tuple(_earlier(timed, microbatches - count, begin) for timed in last)
    return replace(
        plan,
        microbatches=count,
        schedule=Schedule(actions),
        predicted=None,
        certificate=None,
    )


def _compare_period(
    plan: PipelinePlan, schedule: PeriodicSchedule, trace: Trace
) -> tuple[PeriodComparison, list[float]]:
    """The period over all runs that show it, and what every m microbatches in a row took.

    As `simulate` does, a run is given time to settle, and its end is left out.
    """
    steady, m = steady_microbatches(schedule), plan.microbatches
    ends = [_ends(plan, run)[2 * steady : -steady] for run in trace.steps]
    shown = [one for one in ends if len(one) > m]
    if not shown:
        most, least = max(run.iterations or 0 for run in trace.steps), 3 * steady // m + 2
        raise InputError(
            f"the trace has no more than {most} iterations between two drains, too few to show "
            f"the period: train on at least {least} in a row"
        )
    # Whole iterations, as the pause is not between any two microbatches.
    counts = [(len(one) - 1) // m * m for one in shown]
    total = sum(float(one[n] - one[0]) for one, n in zip(shown, counts, strict=True))
    in_a_row: list[float] = np.concatenate([one[m:] - one[:-m] for one in shown]).tolist()
    mean = Pair(schedule.period_seconds + schedule.pause_seconds / m, total / sum(counts))
    return PeriodComparison(mean, sum(counts)), in_a_row


def _ends(plan: PipelinePlan, run: TracedStep) -> Floats:
    """When each microbatch of a run was through: at the end of the first stage's backward."""
    assert run.iterations is not None
    ends: Floats = np.zeros(run.iterations * plan.microbatches)
    for timed in run.actions:
        action = parse_action(timed.action)
        if action.stage == 0 and action.kind in BACKWARD and action.microbatch is not None:
            ends[action.microbatch] = max(ends[action.microbatch], timed.finish_seconds)
    return ends


def _seconds(actions: Iterable[ScheduledAction]) -> dict[Entry, float]:
    return {_entry(timed): timed.finish_seconds - timed.start_seconds for timed in actions}


def _pair_actions(entries: dict[Entry, Pair]) -> dict[Action, Pair]:
    """Seconds of every action on its slowest device."""
    found: dict[str, Pair] = {}
    for (_, text), pair in entries.items():
        other = found.get(text, pair)
        found[text] = Pair(max(pair.predicted, other.predicted), max(pair.measured, other.measured))
    return {parse_action(text): pair for text, pair in found.items()}


def _compare_kinds(actions: dict[Action, Pair]) -> tuple[KindComparison, ...]:
    counts = Counter(action.kind for action in actions)
    totals = _sum_by((action.kind, pair) for action, pair in actions.items())
    return tuple(
        KindComparison(kind, counts[kind], totals[kind].part(counts[kind]))
        for kind in PLANNED
        if counts[kind]
    )


def _compare_stages(
    plan: PipelinePlan, entries: dict[Entry, Pair], iteration: Pair
) -> tuple[StageComparison, ...]:
    times = _StageTimes(_pair_actions(entries))
    parsed = {text: parse_action(text) for _, text in entries}
    work = _sum_by(
        (parsed[text].stage, pair)
        for (_, text), pair in entries.items()
        if parsed[text].kind in ON_DEVICE
    )
    compared = []
    for s, stage in enumerate(plan.stages):
        share = work[s].part(len(stage.devices))
        busy = Pair(
            share.predicted / (iteration.predicted or 1.0),
            share.measured / (iteration.measured or 1.0),
        )
        forward = times.of(s, ActionKind.FORWARD).part(plan.microbatches)
        backward = times.of(s, *BACKWARD).part(plan.microbatches)
        compared.append(StageComparison(s, stage.devices, forward, backward, busy))
    return tuple(compared)


def _sum_by(pairs: Iterable[tuple[Hashable, Pair]]) -> dict[Hashable, Pair]:
    sums: dict[Hashable, Pair] = defaultdict(lambda: Pair(0.0, 0.0))
    for key, pair in pairs:
        sums[key] = sums[key].plus(pair)
    return sums


class _StageTimes:
    """Seconds that each stage spends on each kind of action, on the slowest devices."""

    def __init__(self, actions: dict[Action, Pair]) -> None:
        self._sums = _sum_by(((one.stage, one.kind), pair) for one, pair in actions.items())

    def of(self, stage: int, *kinds: ActionKind) -> Pair:
        return reduce(Pair.plus, (self._sums[stage, kind] for kind in kinds))


def _require_model(chain: Chain, plan: PipelinePlan) -> None:
    starts = [stage.layers[0] for stage in plan.stages]
    stops = [stage.layers[1] for stage in plan.stages]
    if chain.name != plan.model or starts != [0, *stops[:-1]] or stops[-1] != len(chain):
        raise InputError(
            f"the plan cuts {plan.model!r} into layers up to {stops[-1]}, the model is "
            f"{chain.name!r} with {len(chain)} layers: give the model that was planned"
        )


@dataclass(frozen=True, slots=True)
class _Factors:
    """Measured / predicted for the parts of one stage's computations, and its update."""

    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float
    update: float

    @classmethod
    def of(cls, s: int, times: _StageTimes) -> "_Factors":
        def factor(*kinds: ActionKind, otherwise: float = 1.0) -> float:
            ratio = times.of(s, *kinds).ratio
            return otherwise if ratio is None else ratio

        backward = factor(*BACKWARD)
        return cls(
            factor(ActionKind.FORWARD),
            backward,
            factor(ActionKind.INPUT_GRADIENT, otherwise=backward),
            factor(ActionKind.WEIGHT_GRADIENT, otherwise=backward),
            factor(ActionKind.UPDATE),
        )

    def on(self, cost: LayerCost) -> LayerCost:
        return replace(
            cost,
            forward_seconds=cost.forward_seconds * self.forward,
            backward_seconds=_times(cost.backward_seconds, self.backward),
            input_gradient_seconds=_times(cost.input_gradient_seconds, self.input_gradient),
            weight_gradient_seconds=_times(cost.weight_gradient_seconds, self.weight_gradient),
            update_seconds=_times(cost.update_seconds, self.update),
        )


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor
