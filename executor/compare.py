"""A plan's prediction beside the trace of its run, and a profile corrected by it.

The first step of a trace warms the machine up and counts only where there are fewer than three.
What is measured of an action is the median over the counted steps.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from stagewright.executor.timeline import finish_seconds
from stagewright.executor.trace import Trace, TracedStep
from stagewright.formulations.actions import COMPUTE, PLANNED, Action, ActionKind, parse_action
from stagewright.formulations.plan import (
    PeriodicSchedule,
    PipelinePlan,
    Schedule,
    ScheduledAction,
)
from stagewright.graphs.chain import Chain, LayerCost
from stagewright.graphs.errors import InputError

Floats = NDArray[np.float64]
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
class Comparison:
    """Prediction beside measurement.

    An action that several devices share lasts as long as on the slowest of them, as in the cost
    model. ``iteration_seconds`` compares with the median of the ``steps`` counted steps, which
    took ``least_seconds`` to ``most_seconds``. ``update_seconds`` is the median of what the
    optimizer took, which is not predicted.
    """

    kinds: tuple[KindComparison, ...]
    stages: tuple[StageComparison, ...]
    iteration_seconds: Pair
    least_seconds: float
    most_seconds: float
    update_seconds: float
    steps: int


def compare(plan: PipelinePlan, trace: Trace) -> Comparison:
    """What ``plan`` predicted beside what ``trace`` measured.

    Raises
    ------
    InputError
        If the trace is of another plan.
    """
    entries = _pair_entries(plan, trace)
    steps = _counted(trace)
    measured = [step.iteration_seconds for step in steps]
    iteration = Pair(finish_seconds(plan), float(np.median(measured)))
    return Comparison(
        _compare_kinds(_pair_actions(entries)),
        _compare_stages(plan, entries, iteration),
        iteration,
        min(measured),
        max(measured),
        float(np.median([step.update_seconds for step in steps])),
        len(steps),
    )


def measured_plan(plan: PipelinePlan, trace: Trace) -> PipelinePlan:
    """``plan`` with the schedule of the counted step of median time, to be drawn beside it.

    Of an even number of steps it is the faster of the two in the middle.
    """
    _require_same_plan(plan, trace)
    steps = sorted(_counted(trace), key=lambda step: step.iteration_seconds)
    median = steps[(len(steps) - 1) // 2]
    return replace(plan, schedule=Schedule(median.actions), predicted=None, certificate=None)


def correct(chain: Chain, plan: PipelinePlan, trace: Trace) -> Chain:
    """``chain`` with the computing times that a run of ``plan`` suggests.

    Within a stage nothing tells the layers, sizes and device kinds apart: all their forward times
    are multiplied by the stage's measured / predicted forward time, and likewise the backward
    times, by parts where the plan has them in parts.
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


def _counted(trace: Trace) -> tuple[TracedStep, ...]:
    return trace.steps[1:] if len(trace.steps) > 2 else trace.steps


def _require_same_plan(plan: PipelinePlan, trace: Trace) -> None:
    if isinstance(plan.schedule, PeriodicSchedule):
        raise InputError(
            "the plan is periodic: its iterations overlap, where a trace has one in each step; "
            "compare a plan with a finite schedule"
        )
    if trace.digest != plan.digest:
        raise InputError(
            f"the trace is of a run of {trace.model!r} with digest {trace.digest[:12]!r}, the plan "
            f"is for {plan.model!r} with digest {plan.digest[:12]!r}: give the plan that was run"
        )
    planned = Counter(_entry(timed) for timed in plan.actions)
    for step in trace.steps:
        found = Counter(_entry(timed) for timed in step.actions)
        for word, odd in (("lacks", planned - found), ("has", found - planned)):
            if odd:
                device, action = min(odd)
                contrast = "which the plan holds" if word == "lacks" else "unlike the plan"
                raise InputError(
                    f"step {step.step} of the trace {word} {action} on {device!r}, {contrast}: "
                    "give the plan that was run"
                )


def _entry(timed: ScheduledAction) -> Entry:
    return timed.device, timed.action


def _pair_entries(plan: PipelinePlan, trace: Trace) -> dict[Entry, Pair]:
    """Seconds of every entry of the schedule."""
    _require_same_plan(plan, trace)
    predicted = _seconds(plan.actions)
    steps = [_seconds(step.actions) for step in _counted(trace)]
    table = np.array([[step[entry] for entry in predicted] for step in steps])
    medians: Floats = np.median(table, axis=0)
    return {
        entry: Pair(seconds, median)
        for (entry, seconds), median in zip(predicted.items(), medians.tolist(), strict=True)
    }


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
        if parsed[text].kind in COMPUTE
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
    """Measured / predicted for the parts of one stage's computations."""

    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float

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
        )

    def on(self, cost: LayerCost) -> LayerCost:
        return replace(
            cost,
            forward_seconds=cost.forward_seconds * self.forward,
            backward_seconds=_times(cost.backward_seconds, self.backward),
            input_gradient_seconds=_times(cost.input_gradient_seconds, self.input_gradient),
            weight_gradient_seconds=_times(cost.weight_gradient_seconds, self.weight_gradient),
        )


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor
