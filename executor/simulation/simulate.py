"""Discrete-event simulation of the order in a plan, under the cost model.

Only the order of a plan's actions on each stream and channel is read from its times. Every action
then starts as soon as its dependencies and its predecessors on its stream or channel have ended.
Memory needs no separate rule: the order of a valid plan on each device respects it.

A periodic plan is simulated for enough iterations to fill the pipeline, reach the steady state and
drain; measurements are taken in the steady state. Devices update their weights where the plan has
its pauses, and then continue at once.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from stagewright.executor.simulation.run import Run, either, prepared_run, together
from stagewright.executor.simulation.waiting import edges
from stagewright.formulations.checking.check import require_structure
from stagewright.formulations.plans.actions import BARE, COMPUTE, ON_DEVICE, PLANNED, UPDATE, B, W
from stagewright.formulations.plans.periodic import steady_microbatches
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, ScheduledAction
from stagewright.formulations.plans.timing import covered_seconds
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import require_amount
from stagewright.graphs.models.operators.opgraph import waiting_cycle

DONE = 1e-12  # of an entry's seconds: what rounding leaves of it


@dataclass(slots=True)
class _RunningDevice:
    """The entries that run in the two streams; the work that is left of the sub-stream's one.

    ``event`` is the number of the event that ends it, unless its rate changes before.
    """

    main: int | None = None
    sub: int | None = None
    left: float = 0.0
    since: float = 0.0
    rate: float = 1.0
    event: int = -1


class CoRun:
    """A run in time; ``awaited`` counts the entries that must end before each entry starts."""

    def __init__(self, run: Run, followers: list[list[int]], awaited: list[int]) -> None:
        self.starts, self.ends = [0.0] * len(run.actions), [0.0] * len(run.actions)
        self.order: list[int] = []  # by their ends
        self._run, self._followers, self._awaited = run, followers, awaited
        self._events: list[tuple[float, int, int]] = []  # when, number, entry
        self._devices: defaultdict[str, _RunningDevice] = defaultdict(_RunningDevice)
        self._number = 0

    def execute(self) -> None:
        """Run until nothing can start; after a deadlock, entries are missing in ``order``."""
        for i in [i for i, count in enumerate(self._awaited) if count == 0]:
            self._start(i, 0.0)
        while self._events:
            now, number, i = heapq.heappop(self._events)
            if i not in self._run.sub or self._device(i).event == number:
                self._end(i, now)

    def _device(self, i: int) -> _RunningDevice:
        return self._devices[self._run.plan.actions[i].device]

    def _start(self, i: int, now: float) -> None:
        self.starts[i] = now
        if i in self._run.sub:
            device = self._device(i)
            device.sub, device.left, device.since = i, self._run.seconds[i], now
            self._turn(device, now)
            return
        self._expect(i, now + self._run.seconds[i])
        if self._run.actions[i].kind in ON_DEVICE:
            device = self._device(i)
            device.main = i
            self._turn(device, now)

    def _end(self, i: int, now: float) -> None:
        self.ends[i] = now
        self.order.append(i)
        if i in self._run.sub:
            self._device(i).sub = None
        elif self._run.actions[i].kind in ON_DEVICE:
            device = self._device(i)
            device.main = None
            self._turn(device, now)
        for j in self._followers[i]:
            self._awaited[j] -= 1
            if self._awaited[j] == 0:
                self._start(j, now)

    def _turn(self, device: _RunningDevice, now: float) -> None:
        """Update the sub-stream's done work, its rate from now on, and its resulting end."""
        if device.sub is None:
            return
        device.left -= device.rate * (now - device.since)
        device.since, device.rate = now, 1.0
        if device.main is not None:
            free = 1 - self._run.shares[device.main]
            device.rate = min(1.0, free / self._run.shares[device.sub])
        if device.left <= DONE * self._run.seconds[device.sub]:
            device.event = self._expect(device.sub, now)
        elif device.rate > 0:
            device.event = self._expect(device.sub, now + device.left / device.rate)
        else:
            device.event = -1

    def _expect(self, i: int, end: float) -> int:
        """The number of the event that ends an entry."""
        self._number += 1
        heapq.heappush(self._events, (end, self._number, i))
        return self._number


class Deadlock(InvalidPlan):
    """An order that contradicts the dependencies; the message prints the cycle of actions."""


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Start, end and slack of every entry of a run."""

    starts: list[float]
    ends: list[float]
    slacks: list[float]


def execute(run: Run) -> RunTimes:
    """Start every entry as soon as possible."""
    followers: list[list[int]] = [[] for _ in run.actions]
    awaited = [0] * len(run.actions)
    for before, after in edges(run):
        followers[before].append(after)
        awaited[after] += 1
    if run.sub:
        found = CoRun(run, followers, awaited)
        found.execute()
        starts, ends, order = found.starts, found.ends, found.order
    else:
        starts, ends, order = _in_sequence(run, followers, awaited)
    if len(order) < len(run.actions):
        raise Deadlock(_cycle(run.plan, waiting_cycle(followers, awaited)))
    return RunTimes(starts, ends, _slacks(run, followers, order, starts, ends))


def _in_sequence(
    run: Run, followers: list[list[int]], awaited: list[int]
) -> tuple[list[float], list[float], list[int]]:
    """Starts, ends, and the entries that have started; ``awaited`` is counted down."""
    starts, ends = [0.0] * len(run.actions), [0.0] * len(run.actions)
    order = [i for i, count in enumerate(awaited) if count == 0]
    for i in order:  # grows during the loop
        ends[i] = starts[i] + run.seconds[i]
        for j in followers[i]:
            starts[j] = max(starts[j], ends[i])
            awaited[j] -= 1
            if awaited[j] == 0:
                order.append(j)
    return starts, ends, order


def _cycle(plan: PipelinePlan, cycle: list[int]) -> str:
    entries = (plan.actions[i] for i in cycle)
    return f"deadlock: {' waits for '.join(f'{one.action} on {one.device}' for one in entries)}"


def _with_two_streams(run: Run) -> frozenset[int]:
    """The entries on devices that use both streams."""
    names = {run.plan.actions[i].device for i in run.sub}
    return frozenset(
        i
        for i, (action, entry) in enumerate(zip(run.actions, run.plan.actions, strict=True))
        if entry.device in names and action.kind in ON_DEVICE
    )


def _slacks(
    run: Run, followers: list[list[int]], order: list[int], starts: list[float], ends: list[float]
) -> list[float]:
    """How much longer each entry may take without a longer iteration.

    On devices with two streams none: beside another kernel a short delay may become a long one.
    """
    fixed, latest_starts = _with_two_streams(run), list(starts)
    slacks = [0.0] * len(order)
    last = max(ends)
    for i in reversed(order):
        if i not in fixed:
            latest = min([last, *(latest_starts[j] for j in followers[i])])
            slacks[i], latest_starts[i] = latest - ends[i], latest - run.seconds[i]
    return slacks


@dataclass(frozen=True, slots=True)
class PeriodicRun:
    """The run of a periodic plan for this many microbatches.

    ``period_seconds`` is the time per microbatch in the steady state, with its share of the
    updates: an average in the middle of the run, over microbatches after which it repeats exactly
    if it does. ``warm_up_seconds`` is the time until every operation has started once,
    ``drain_seconds`` the time after the first operation has ended for the last time.
    """

    microbatches: int
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


def summary(run: Run, outcome: RunTimes) -> Simulation:
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


def periodic_summary(run: Run, schedule: PeriodicSchedule, outcome: RunTimes) -> Simulation:
    """Measurements in the middle of the run, and the times of warm-up and drain."""
    steady, m = steady_microbatches(schedule), run.iteration_microbatches
    middle = slice(2 * steady, run.plan.microbatches - steady)
    backwards = either(run.entries[B], run.entries[W])[0]
    through = np.array([max(outcome.ends[i] for i in done) for done in backwards[middle]])
    period = _repetition(through)
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
        PeriodicRun(run.plan.microbatches, period, *_warm_up_and_drain(run, outcome)),
    )


def _repetition(ends: Floats) -> float:
    """Seconds per microbatch, over as many as a run repeats itself after.

    ``ends`` are the ends of the same event of consecutive microbatches. Without an exact
    repetition the result is the average over all.
    """
    rounding = RELATIVE_TOLERANCE * float(ends[-1])
    for count in range(1, len(ends) // 2 + 1):
        steps = ends[count:] - ends[:-count]
        if np.ptp(steps) <= rounding:
            return float(steps[-1]) / count
    return float(ends[-1] - ends[0]) / (len(ends) - 1)


def _warm_up_and_drain(run: Run, outcome: RunTimes) -> tuple[float, float]:
    """Seconds until every operation has started once, and after one has ended for the last time."""
    rows = [row for kind in PLANNED if kind not in BARE for row in run.entries[kind] if row[0]]
    last_ends = [max(outcome.ends[i] for i in row[-1]) for row in rows]
    return (
        max(outcome.starts[i] for row in rows for i in row[0]),
        max(outcome.ends) - min(last_ends),
    )


def _per_device(
    run: Run, outcome: RunTimes, inside: Iterable[int]
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


def _covered(run: Run, outcome: RunTimes) -> dict[str, float]:
    """Per used device the time in which one of its streams computes, or both."""
    own = run.by_device()
    starts, ends = np.array(outcome.starts), np.array(outcome.ends)
    return {name: covered_seconds(starts[entries], ends[entries]) for name, entries in own.items()}


def _timed(run: Run, outcome: RunTimes) -> tuple[ScheduledAction, ...]:
    return tuple(
        replace(entry, start_seconds=start, finish_seconds=end)
        for entry, start, end in zip(run.plan.actions, outcome.starts, outcome.ends, strict=True)
    )


def simulate(
    problem: PipelineProblem,
    plan: PipelinePlan,
    *,
    jitter: float = 0.0,
    stragglers: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Simulation:
    """Run the order of ``plan``.

    Devices that exchange values within an action start and end it together, with the slowest.
    Without jitter and stragglers no action of a valid plan ends later than in the plan, and all
    times are the plan's if no action in it waits unnecessarily. Only of a plan with two streams an
    action may end later, if another one waits in the plan and leaves the device to it. Raises
    InvalidPlan if actions are missing or misplaced, or the plan answers another problem. Raises
    Deadlock if the order contradicts the dependencies. Raises InputError if a straggler is not a
    device of the cluster, or a factor or the jitter is out of range. ``jitter``: every duration is
    multiplied by a log-normal variable of mean 1 whose logarithm has this standard deviation.
    ``stragglers``: factors on the computations of some devices, by name; 2 is twice as slow.
    ``seed``: seed of the jitter.
    """
    factors = dict(stragglers or {})
    _require_options(problem, jitter, factors)
    require_structure(problem, plan)
    run = prepared_run(problem, plan, factors)
    if jitter > 0:
        normal = np.random.default_rng(seed).normal(-(jitter**2) / 2, jitter, len(run.seconds))
        seconds = [value * math.exp(draw) for value, draw in zip(run.seconds, normal, strict=True)]
        run = replace(run, seconds=seconds)
    run = together(run)
    outcome = execute(run)
    if isinstance(plan.schedule, PeriodicSchedule):
        return periodic_summary(run, plan.schedule, outcome)
    return summary(run, outcome)


def _require_options(problem: PipelineProblem, jitter: float, factors: Mapping[str, float]) -> None:
    require_amount(jitter, "jitter")
    for name, factor in factors.items():
        if name not in problem.cluster.index:
            raise InputError(f"straggler {name!r} is not a device of {problem.cluster.name!r}")
        require_amount(factor, f"straggler {name!r}: factor")
        if factor == 0:
            raise InputError(f"straggler {name!r}: factor must be positive, got 0")
