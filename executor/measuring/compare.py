"""Compare a plan's predictions with the trace of its run.

The first step of a trace is a warm-up, counted only if there are fewer than three steps. The
measured time of an action is the median over the counted steps.

The iterations of a periodic plan count as steps, though they overlap. Their period is measured
while the pipeline is full, by the ends of microbatches.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stagewright.executor.drawing.periods import iteration_seconds
from stagewright.executor.measuring.causes import Explanation, explain
from stagewright.executor.measuring.pairs import (
    BACKWARD,
    Entry,
    MeasuredStageTimes,
    Pair,
    _end_of_run,
    _iterations,
    counted_steps,
    median_step,
    pair_actions,
    pair_entries,
    require_same_plan,
    sum_by,
)
from stagewright.executor.programs.trace import (
    MeasuredMemory,
    MemoryKind,
    Trace,
    TracedStep,
    planned_updates,
)
from stagewright.formulations.plans.actions import (
    ON_DEVICE,
    PLANNED,
    Action,
    ActionKind,
    B,
    F,
    I,
    W,
    parse_action,
)
from stagewright.formulations.plans.periodic import steady_microbatches
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan
from stagewright.formulations.plans.timing import message_seconds
from stagewright.formulations.prices.collectives import message_price
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain, LayerCost


def correct(chain: Chain, plan: PipelinePlan, trace: Trace) -> Chain:
    """``chain`` with compute times scaled to a run of ``plan``.

    A run measures stages, not layers: all forward times of a stage's layers (of all sizes and
    device kinds, at the stage's tensor degree) are multiplied by the stage's measured / predicted
    forward time, and likewise the backward times, by parts if the plan splits them, and the time
    of the optimizer step. What a plan adds for messages is not a layer's.
    """
    _require_model(chain, plan)
    actions = pair_actions(pair_entries(plan, trace))
    times = MeasuredStageTimes(dict(_without_messages(chain, plan, actions)))
    layers = []
    for s, stage in enumerate(plan.stages):
        factors = _factors(s, times)
        layers += [
            replace(
                layer,
                costs=tuple(
                    _scaled(cost, factors) if cost.degree == stage.tensor else cost
                    for cost in layer.costs
                ),
            )
            for layer in chain.layers[slice(*stage.layers)]
        ]
    source = f"{chain.source}, corrected by a measured run on {trace.machine}"
    reference = trace.reference_seconds
    return replace(chain, source=source, layers=tuple(layers), reference_seconds=reference)


def _without_messages(
    chain: Chain, plan: PipelinePlan, actions: dict[Action, Pair]
) -> Iterator[tuple[Action, Pair]]:
    """Actions with the predicted seconds of their layers alone."""
    size = plan.microbatch_size or chain.microbatch_size

    price = plan.message_seconds, plan.message_bytes_per_second

    def of_message(stop: int, senders: int, receivers: int) -> float:
        costs = chain.layers[stop - 1].costs
        whole = size * max(cost.output_bytes / cost.microbatch_size for cost in costs)
        return message_price(whole, size, senders * receivers, *price)

    forward, backward = message_seconds(plan.stages, plan.microbatches, of_message)
    seconds = {F: forward, B: backward, I: backward}
    for action, pair in actions.items():
        if action.kind in seconds:
            of_stage = seconds[action.kind][action.stage]
            own = float(of_stage[(action.microbatch or 0) % len(of_stage)])
            pair = replace(pair, predicted=max(0.0, pair.predicted - own))
        yield action, pair


def _require_model(chain: Chain, plan: PipelinePlan) -> None:
    starts = [stage.layers[0] for stage in plan.stages]
    stops = [stage.layers[1] for stage in plan.stages]
    if chain.name != plan.model or starts != [0, *stops[:-1]] or stops[-1] != len(chain):
        raise InputError(
            f"the plan cuts {plan.model!r} into layers up to {stops[-1]}, the model is "
            f"{chain.name!r} with {len(chain)} layers: give the model that was planned"
        )


def _factors(s: int, times: MeasuredStageTimes) -> dict[str, float]:
    """Measured / predicted for the parts of one stage's computations, and its update."""

    def factor(*kinds: ActionKind, otherwise: float = 1.0) -> float:
        ratio = times.of(s, *kinds).ratio
        return otherwise if ratio is None else ratio

    backward = factor(*BACKWARD)
    return {
        "forward_seconds": factor(F),
        "backward_seconds": backward,
        "input_gradient_seconds": factor(I, otherwise=backward),
        "weight_gradient_seconds": factor(W, otherwise=backward),
        "update_seconds": factor(ActionKind.UPDATE),
    }


def _scaled(cost: LayerCost, factors: dict[str, float]) -> LayerCost:
    times = {name: getattr(cost, name) for name in factors}
    known: dict[str, Any] = {
        name: seconds * factors[name] for name, seconds in times.items() if seconds is not None
    }
    return replace(cost, **known)


@dataclass(frozen=True, slots=True)
class KindComparison:
    """The mean seconds of the ``count`` actions of one kind."""

    kind: ActionKind
    count: int
    seconds: Pair


@dataclass(frozen=True, slots=True)
class StageComparison:
    """One stage: mean times per microbatch, and the fraction of the iteration it computes."""

    stage: int
    devices: tuple[str, ...]
    forward_seconds: Pair
    backward_seconds: Pair
    busy: Pair


@dataclass(frozen=True, slots=True)
class PeriodComparison:
    """The mean time per microbatch of a periodic plan, measured in the steady state.

    It is the period plus a microbatch's share of the pause.
    """

    seconds: Pair
    microbatches: int


@dataclass(frozen=True, slots=True)
class MemoryComparison:
    """Predicted and measured peak memory of each device, in bytes by name."""

    kind: MemoryKind
    peak_bytes: dict[str, Pair]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predicted and measured times.

    An action that several devices share lasts as long as on the slowest of them, as in the cost
    model. ``iteration_seconds`` compares with the median of the ``steps`` counted steps, which
    took ``least_seconds`` to ``most_seconds``; ``explanation`` has the causes of the difference.
    ``reference_seconds`` are those of the same small computation, beside the profile and beside the
    run (None: not both are known).
    ``update_seconds`` is the time of the optimizer steps on the device where it is longest,
    measured as a median; the prediction is 0 if the profile has no update times, or updates are
    part of backwards.

    For a periodic plan ``steps`` counts iterations, and an iteration is one measured period per
    microbatch; the least and most seconds are those of as many consecutive microbatches.
    """

    kinds: tuple[KindComparison, ...]
    stages: tuple[StageComparison, ...]
    iteration_seconds: Pair
    least_seconds: float
    most_seconds: float
    update_seconds: Pair
    steps: int
    period: PeriodComparison | None = None
    memory: MemoryComparison | None = None
    explanation: Explanation | None = None
    reference_seconds: Pair | None = None

    @property
    def equal_speed_ratio(self) -> float | None:
        """Measured / predicted seconds on a machine as fast as when it was profiled, if known.

        The measured ones are without waits for a core, where these are known.
        """
        whole, speed, found = self.iteration_seconds, self.reference_seconds, self.explanation
        if speed is None or not whole.predicted:
            return None
        calm = None if found is None else found.without_waits_seconds
        seconds = whole.measured if calm is None else calm
        return seconds / whole.predicted * speed.predicted / speed.measured


def compare(plan: PipelinePlan, trace: Trace) -> Comparison:
    """Compare the predictions of ``plan`` with the measurements in ``trace``.

    Raises InputError if the trace is of another plan, or its runs are too short to measure the
    period.
    """
    entries = pair_entries(plan, trace)
    steps, period = counted_steps(trace.steps), None
    measured = [step.iteration_seconds for step in steps]
    count, seconds = len(steps), float(np.median(measured))
    if isinstance(plan.schedule, PeriodicSchedule):
        period, measured = _compare_period(plan, plan.schedule, trace)
        count, seconds = len(_iterations(plan, trace)), plan.microbatches * period.seconds.measured
    iteration = Pair(iteration_seconds(plan), seconds)
    updates = [step.update_seconds / (step.iterations or 1) for step in steps]
    update = Pair(_predicted_update(plan), float(np.median(updates)))
    before, now = plan.reference_seconds, trace.reference_seconds
    return Comparison(
        kinds=_compare_kinds(pair_actions(entries)),
        stages=_compare_stages(plan, entries, iteration),
        iteration_seconds=iteration,
        least_seconds=min(measured),
        most_seconds=max(measured),
        update_seconds=update,
        steps=count,
        period=period,
        memory=_compare_memory(plan, trace.memory),
        explanation=explain(plan, trace, iteration, update),
        reference_seconds=None if before is None or now is None else Pair(before, now),
    )


def measured_plan(plan: PipelinePlan, trace: Trace) -> PipelinePlan:
    """``plan`` with the schedule of the counted step of median time, to be drawn next to it.

    For a periodic plan it is the end of the longest run: as many of the last microbatches as are
    drawn of the plan.
    """
    require_same_plan(plan, trace)
    if isinstance(plan.schedule, PeriodicSchedule):
        return _end_of_run(plan, max(trace.steps, key=lambda step: step.iterations or 0))
    schedule = replace(plan.schedule, actions=median_step(trace).actions)
    return replace(plan, schedule=schedule, predicted=None, certificate=None)


def _compare_memory(plan: PipelinePlan, measured: MeasuredMemory | None) -> MemoryComparison | None:
    """The memory of all devices compared; None unless every device has both values."""
    predicted = {} if plan.predicted is None else plan.predicted.peak_memory_bytes
    if measured is None or not predicted.keys() <= measured.peak_bytes.keys():
        return None
    peaks = {name: Pair(bytes_, measured.peak_bytes[name]) for name, bytes_ in predicted.items()}
    return MemoryComparison(measured.kind, peaks) if peaks else None


def _predicted_update(plan: PipelinePlan) -> float:
    if isinstance(plan.schedule, PeriodicSchedule):
        return plan.schedule.pause_seconds
    held, by_device = planned_updates(plan), defaultdict[str, float](float)
    for timed in plan.actions if held else ():
        if timed.action in held:
            by_device[timed.device] += timed.finish_seconds - timed.start_seconds
    return max(by_device.values(), default=0.0)


def _compare_period(
    plan: PipelinePlan, schedule: PeriodicSchedule, trace: Trace
) -> tuple[PeriodComparison, list[float]]:
    """The period over all runs long enough, and the times of every m consecutive microbatches.

    As in `simulate`, the beginning and the end of a run are left out.
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
    # Whole iterations, since the pause is not between every two microbatches.
    counts = [(len(one) - 1) // m * m for one in shown]
    total = sum(float(one[n] - one[0]) for one, n in zip(shown, counts, strict=True))
    in_a_row: list[float] = np.concatenate([one[m:] - one[:-m] for one in shown]).tolist()
    mean = Pair(schedule.period_seconds + schedule.pause_seconds / m, total / sum(counts))
    return PeriodComparison(mean, sum(counts)), in_a_row


def _ends(plan: PipelinePlan, run: TracedStep) -> Floats:
    """End of each microbatch of a run: the end of the first stage's backward."""
    assert run.iterations is not None
    ends: Floats = np.zeros(run.iterations * plan.microbatches)
    for timed in run.actions:
        action = parse_action(timed.action)
        if action.stage == 0 and action.kind in BACKWARD and action.microbatch is not None:
            ends[action.microbatch] = max(ends[action.microbatch], timed.finish_seconds)
    return ends


def _compare_kinds(actions: dict[Action, Pair]) -> tuple[KindComparison, ...]:
    counts = Counter(action.kind for action in actions)
    totals = sum_by((action.kind, pair) for action, pair in actions.items())
    return tuple(
        KindComparison(kind, counts[kind], totals[kind].part(counts[kind]))
        for kind in PLANNED
        if counts[kind]
    )


def _compare_stages(
    plan: PipelinePlan, entries: dict[Entry, Pair], iteration: Pair
) -> tuple[StageComparison, ...]:
    times = MeasuredStageTimes(pair_actions(entries))
    parsed = {text: parse_action(text) for _, text in entries}
    work = sum_by(
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
