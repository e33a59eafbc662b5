"""List scheduling: from orders, or greedily, to the earliest start times (SPP Algorithm 1)."""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np

from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.pipelines.orders import (
    Orders,
    gpipe_orders,
    one_f_one_b_orders,
    pe_orders,
)

ListKind = Literal["pe", "gpipe", "1f1b", "eager"]
LIST_KINDS: tuple[ListKind, ...] = ("pe", "1f1b", "gpipe", "eager")

# Warm-up depths, as multiples of 1F1B's, at which the greedy rule is tried: deeper hides slower
# transfers, shallower lets backwards come earlier.
EAGER_DEPTHS = (1.0, 1.5, 2.0, 3.0, np.inf)


def list_schedule(problem: MakespanProblem, kind: ListKind) -> Timetable | None:
    """The schedule of one rule; None if the rule cannot keep the in-flight limits."""
    if kind == "eager":
        schedules = [_eager(problem, depth) for depth in EAGER_DEPTHS]
        return min(schedules, key=lambda times: times.makespan(problem))
    rules: dict[str, Callable[[MakespanProblem], Orders | None]] = {
        "pe": pe_orders,
        "gpipe": gpipe_orders,
        "1f1b": one_f_one_b_orders,
    }
    orders = rules[kind](problem)
    return None if orders is None else schedule_orders(problem, orders)


def best_list_schedule(problem: MakespanProblem) -> tuple[ListKind, Timetable]:
    """The shortest of all list schedules, and the rule that made it."""
    found = [(kind, list_schedule(problem, kind)) for kind in LIST_KINDS]
    kept = [(kind, times) for kind, times in found if times is not None]
    return min(kept, key=lambda entry: entry[1].makespan(problem))


def schedule_orders(problem: MakespanProblem, orders: Orders) -> Timetable:
    """Every stage follows its order and starts each block as soon as it is ready.

    Channels serve transfers first come, first served (Algorithm 1, lines 9-25).

    Raises
    ------
    ValueError
        If the orders wait for each other in a circle.
    """
    position = [0] * problem.stages

    def follow(stage: int, ready: "_Ready") -> str:
        if position[stage] == len(orders[stage]):
            return ""
        work = orders[stage][position[stage]]
        if not ready.has(stage, work):
            return ""
        position[stage] += 1
        return work

    return _run(problem, follow)


def _eager(problem: MakespanProblem, depth: float) -> Timetable:
    """Backwards first, forwards up to ``depth`` times 1F1B's warm-up or the in-flight limit."""
    limits = [
        min(float(limit), max(1.0, np.ceil(depth * (problem.stages - s))))
        for s, limit in enumerate(problem.in_flight)
    ]

    def choose(stage: int, ready: _Ready) -> str:
        if ready.has(stage, "B"):
            return "B"
        if ready.has(stage, "F") and ready.in_flight(stage) < limits[stage]:
            return "F"
        return ""

    return _run(problem, choose)


class _Ready:
    """Counts of arrived and started blocks per stage; microbatches pass in order."""

    def __init__(self, problem: MakespanProblem) -> None:
        self.arrived = {"F": [0] * problem.stages, "B": [0] * problem.stages}
        self.started = {"F": [0] * problem.stages, "B": [0] * problem.stages}
        self.arrived["F"][0] = problem.microbatches

    def has(self, stage: int, work: str) -> bool:
        return self.started[work][stage] < self.arrived[work][stage]

    def in_flight(self, stage: int) -> int:
        # Asked only while the stage is idle: every started backward has finished.
        return self.started["F"][stage] - self.started["B"][stage]


class _Run:
    """An event-driven run: whatever falls idle or gets work starts what ``choose`` lets it."""

    def __init__(self, problem: MakespanProblem, choose: Callable[[int, _Ready], str]) -> None:
        stages, self.last = problem.stages, problem.stages - 1
        self.choose = choose
        self.duration = {"F": problem.forward, "B": problem.backward}
        self.sending = {"F": problem.send_forward, "B": problem.send_backward}
        self.starts: dict[str, list[list[float]]] = {k: [[] for _ in range(stages)] for k in "FB"}
        self.sends: dict[str, list[list[float]]] = {k: [[] for _ in range(self.last)] for k in "FB"}
        self.ready = _Ready(problem)
        self.idle, self.free = [True] * stages, [True] * self.last
        self.waiting: list[deque[str]] = [deque() for _ in range(self.last)]
        self.events: list[tuple[float, int, bool, int, str]] = []
        self.sequence = 0

    def finish(self) -> None:
        self.start_stage(0, 0.0)
        while self.events:
            now, _, is_transfer, place, work = heapq.heappop(self.events)
            (self.sent if is_transfer else self.computed)(place, work, now)

    def push(self, time: float, is_transfer: bool, place: int, work: str) -> None:
        self.sequence += 1  # among equal times, first come first served
        heapq.heappush(self.events, (time, self.sequence, is_transfer, place, work))

    def start_stage(self, stage: int, now: float) -> None:
        work = self.choose(stage, self.ready) if self.idle[stage] else ""
        if work:
            self.idle[stage] = False
            self.ready.started[work][stage] += 1
            self.starts[work][stage].append(now)
            self.push(now + self.duration[work][stage], False, stage, work)

    def start_channel(self, channel: int, now: float) -> None:
        if self.free[channel] and self.waiting[channel]:
            work = self.waiting[channel].popleft()
            self.free[channel] = False
            self.sends[work][channel].append(now)
            self.push(now + self.sending[work][channel], True, channel, work)

    def computed(self, stage: int, work: str, now: float) -> None:
        self.idle[stage] = True
        if work == "F" and stage == self.last:
            self.ready.arrived["B"][stage] += 1
        elif work == "F" or stage > 0:
            channel = stage if work == "F" else stage - 1
            self.waiting[channel].append(work)
            self.start_channel(channel, now)
        self.start_stage(stage, now)

    def sent(self, channel: int, work: str, now: float) -> None:
        self.free[channel] = True
        target = channel + 1 if work == "F" else channel
        self.ready.arrived[work][target] += 1
        self.start_channel(channel, now)
        self.start_stage(target, now)


def _run(problem: MakespanProblem, choose: Callable[[int, _Ready], str]) -> Timetable:
    run = _Run(problem, choose)
    run.finish()
    if any(len(row) < problem.microbatches for row in run.starts["B"]):
        raise ValueError("the orders of the stages wait for each other in a circle")
    backward = np.array(run.starts["B"])
    shape = (problem.stages - 1, problem.microbatches)
    return Timetable(
        np.array(run.starts["F"]),
        backward,
        np.array(run.sends["F"]).reshape(shape),
        np.array(run.sends["B"]).reshape(shape),
        backward[:, -1] + np.array(problem.backward),
    )
