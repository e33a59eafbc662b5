"""Results of a simulation: times, idle devices, slack, and the steady state of a periodic plan."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from stagewright.executor.simulation.events import Outcome
from stagewright.executor.simulation.run import Run, either
from stagewright.formulations.plans.actions import BARE, COMPUTE, ON_DEVICE, PLANNED, UPDATE, B, W
from stagewright.formulations.plans.periodic import steady_microbatches
from stagewright.formulations.plans.plan import PeriodicSchedule, ScheduledAction
from stagewright.formulations.plans.timing import covered_seconds
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats


@dataclass(frozen=True, slots=True)
class PeriodicRun:
    """The run of a periodic plan for this many microbatches.

    ``period_seconds`` is the time per microbatch in the steady state, with its share of the
    updates: an average over ``measured_microbatches`` in the middle of the run, after which it
    repeats exactly if it does. ``warm_up_seconds`` is the time until every operation has started
    once, ``drain_seconds`` the time after the first operation has ended for the last time.
    """

    microbatches: int
    measured_microbatches: int
    period_seconds: float
    warm_up_seconds: float
    drain_seconds: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The plan's actions, in the plan's order, at their simulated times.

    ``idle_seconds`` is each used device's time without computation. ``slack_seconds`` is how much
    longer one of its computations may take without a longer iteration: 0 for a device on a
    critical path, and for a device with two streams, where a short delay may become long.

    For a periodic plan the actions are those of the run described by ``periodic``; the iteration
    is one measured period per microbatch, and idle times are per iteration. Slack is how much
    longer a computation in the middle of the run may take without a later end of the run.
    """

    iteration_seconds: float
    actions: tuple[ScheduledAction, ...]
    idle_seconds: dict[str, float]
    slack_seconds: dict[str, float]
    periodic: PeriodicRun | None = None


def summary(run: Run, outcome: Outcome) -> Simulation:
    """The results of a finite plan's run."""
    iteration = max(outcome.ends)
    busy, slack = _per_device(run, outcome, range(len(run.actions)))
    if run.sub:
        busy = _covered(run, outcome)
    return Simulation(
        iteration,
        _timed(run, outcome),
        {name: max(0.0, iteration - seconds) for name, seconds in busy.items()},
        {name: min(iteration, seconds) for name, seconds in slack.items()},
    )


def periodic_summary(run: Run, schedule: PeriodicSchedule, outcome: Outcome) -> Simulation:
    """Measurements in the middle of the run, and the times of warm-up and drain."""
    steady, m = steady_microbatches(schedule), run.iteration_microbatches
    middle = slice(2 * steady, run.plan.microbatches - steady)
    backwards = either(run.entries[B], run.entries[W])[0]
    through = np.array([max(outcome.ends[i] for i in done) for done in backwards[middle]])
    repeats_after, period = _repetition(through)
    rows = (row[middle] for kind in COMPUTE for row in run.entries[kind])
    inside = chain.from_iterable(chain.from_iterable(rows))
    busy, slack = _per_device(run, outcome, inside)
    updates, _ = _per_device(
        run, outcome, chain.from_iterable(row[0] for row in run.entries[UPDATE])
    )
    iterations = run.plan.microbatches // m
    return Simulation(
        m * period,
        _timed(run, outcome),
        # Computations of these microbatches may be outside of the measured time.
        {
            name: max(0.0, m * (period - all_ / len(through)) - updates[name] / iterations)
            for name, all_ in busy.items()
        },
        slack,
        PeriodicRun(
            run.plan.microbatches, repeats_after, period, *_warm_up_and_drain(run, outcome)
        ),
    )


def _repetition(ends: Floats) -> tuple[int, float]:
    """After how many microbatches a run repeats itself, and the seconds per microbatch.

    ``ends`` are the ends of the same event of consecutive microbatches. Without an exact
    repetition the result is the average over all.
    """
    rounding = RELATIVE_TOLERANCE * float(ends[-1])
    for count in range(1, len(ends) // 2 + 1):
        steps = ends[count:] - ends[:-count]
        if np.ptp(steps) <= rounding:
            return count, float(steps[-1]) / count
    count = len(ends) - 1
    return count, float(ends[-1] - ends[0]) / count


def _warm_up_and_drain(run: Run, outcome: Outcome) -> tuple[float, float]:
    """Seconds until every operation has started once, and after one has ended for the last time."""
    rows = [row for kind in PLANNED if kind not in BARE for row in run.entries[kind] if row[0]]
    last_ends = [max(outcome.ends[i] for i in row[-1]) for row in rows]
    return (
        max(outcome.starts[i] for row in rows for i in row[0]),
        max(outcome.ends) - min(last_ends),
    )


def _per_device(
    run: Run, outcome: Outcome, inside: Iterable[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """Per used device the total time and the slack of its computations among those ``inside``."""
    used = [name for stage in run.plan.stages for name in stage.devices]
    busy, slack = dict.fromkeys(used, 0.0), dict.fromkeys(used, math.inf)
    for i in inside:
        if run.actions[i].kind in ON_DEVICE:
            device = run.plan.actions[i].device
            busy[device] += run.seconds[i]
            slack[device] = min(slack[device], outcome.slacks[i])
    return busy, slack


def _covered(run: Run, outcome: Outcome) -> dict[str, float]:
    """Per used device the time in which one of its streams computes, or both."""
    own: dict[str, list[int]] = {name: [] for stage in run.plan.stages for name in stage.devices}
    for i, action in enumerate(run.actions):
        if action.kind in ON_DEVICE:
            own[run.plan.actions[i].device].append(i)
    starts, ends = np.array(outcome.starts), np.array(outcome.ends)
    return {name: covered_seconds(starts[entries], ends[entries]) for name, entries in own.items()}


def _timed(run: Run, outcome: Outcome) -> tuple[ScheduledAction, ...]:
    return tuple(
        replace(entry, start_seconds=start, finish_seconds=end)
        for entry, start, end in zip(run.plan.actions, outcome.starts, outcome.ends, strict=True)
    )
