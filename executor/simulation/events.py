"""The event loop: every entry starts as soon as its dependencies have ended.

The event loop of a run in which some devices have two streams.

Every entry starts as soon as its dependencies have ended. A kernel of the sub-stream, of share b,
runs at rate min(1, (1 - a) / b) beside one of the main stream of share a, and alone at rate 1.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass

from stagewright.executor.simulation.run import Run
from stagewright.executor.simulation.waiting import edges
from stagewright.formulations.plans.actions import ON_DEVICE
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.models.operators.deadlock import waiting_cycle

DONE = 1e-12  # of an entry's seconds: what rounding leaves of it


@dataclass(slots=True)
class _Device:
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
        self._devices: defaultdict[str, _Device] = defaultdict(_Device)
        self._number = 0

    def execute(self) -> None:
        """Run until nothing can start; after a deadlock, entries are missing in ``order``."""
        for i in [i for i, count in enumerate(self._awaited) if count == 0]:
            self._start(i, 0.0)
        while self._events:
            now, number, i = heapq.heappop(self._events)
            if i not in self._run.sub or self._device(i).event == number:
                self._end(i, now)

    def _device(self, i: int) -> _Device:
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

    def _turn(self, device: _Device, now: float) -> None:
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
class Outcome:
    """Start, end and slack of every entry of a run."""

    starts: list[float]
    ends: list[float]
    slacks: list[float]


def execute(run: Run) -> Outcome:
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
    return Outcome(starts, ends, _slacks(run, followers, order, starts, ends))


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
