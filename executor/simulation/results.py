"""What a simulation tells: times, idle devices, slack, and of a periodic plan its steady state."""

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
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats


@dataclass(frozen=True, slots=True)
class PeriodicRun:
    """What a periodic plan's run of this many microbatches was like.

    ``period_seconds`` is what a microbatch takes once the run repeats itself, with its share of the
    updates: on average over ``measured_microbatches`` in its middle, those after which it repeats
    exactly if it does. ``warm_up_seconds`` last until every operation has begun for the first time,
    and ``drain_seconds`` from when one of them has ended for the last time.
    """

    microbatches: int
    measured_microbatches: int
    period_seconds: float
    warm_up_seconds: float
    drain_seconds: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened: the plan's actions, in the plan's listing, at their simulated times.

    ``idle_seconds`` is each used device's time without computation. ``slack_seconds`` is by how
    much one of its computations may last longer without a longer iteration: 0 for a device on a
    critical path.

    Of a periodic plan the actions are those of a run, ``periodic`` tells of which; the iteration is
    as many measured periods as it has microbatches, and idle is what a device is in it. Slack is by
    how much a computation in the middle of the run may last longer without a later end of the run.
    """

    iteration_seconds: float
    actions: tuple[ScheduledAction, ...]
    idle_seconds: dict[str, float]
    slack_seconds: dict[str, float]
    periodic: PeriodicRun | None = None


def summary(run: Run, outcome: Outcome) -> Simulation:
    """What a finite plan's run tells."""
    iteration = max(outcome.ends)
    busy, slack = _per_device(run, outcome, range(len(run.actions)))
    return Simulation(
        iteration,
        _timed(run, outcome),
        {name: iteration - seconds for name, seconds in busy.items()},
        {name: min(iteration, seconds) for name, seconds in slack.items()},
    )


def periodic_summary(run: Run, schedule: PeriodicSchedule, outcome: Outcome) -> Simulation:
    """What is measured in the middle of the run, and how long it takes to begin and to end."""
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
        # What is computed of these microbatches may lie outside of the measured time.
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

    ``ends`` are those of equal events of microbatches one after another. Where nothing repeats
    itself exactly it is the average over all.
    """
    rounding = RELATIVE_TOLERANCE * float(ends[-1])
    for count in range(1, len(ends) // 2 + 1):
        steps = ends[count:] - ends[:-count]
        if np.ptp(steps) <= rounding:
            return count, float(steps[-1]) / count
    count = len(ends) - 1
    return count, float(ends[-1] - ends[0]) / count


def _warm_up_and_drain(run: Run, outcome: Outcome) -> tuple[float, float]:
    """Until everything has begun once, and from when something has ended for good, in seconds."""
    rows = [row for kind in PLANNED if kind not in BARE for row in run.entries[kind] if row[0]]
    last_ends = [max(outcome.ends[i] for i in row[-1]) for row in rows]
    return (
        max(outcome.starts[i] for row in rows for i in row[0]),
        max(outcome.ends) - min(last_ends),
    )


def _per_device(
    run: Run, outcome: Outcome, inside: Iterable[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """Per used device the sum of its computations among the entries ``inside``, and their slack."""
    used = [name for stage in run.plan.stages for name in stage.devices]
    busy, slack = dict.fromkeys(used, 0.0), dict.fromkeys(used, math.inf)
    for i in inside:
        if run.actions[i].kind in ON_DEVICE:
            device = run.plan.actions[i].device
            busy[device] += run.seconds[i]
            slack[device] = min(slack[device], outcome.slacks[i])
    return busy, slack


def _timed(run: Run, outcome: Outcome) -> tuple[ScheduledAction, ...]:
    return tuple(
        replace(entry, start_seconds=start, finish_seconds=end)
        for entry, start, end in zip(run.plan.actions, outcome.starts, outcome.ends, strict=True)
    )
