"""List scheduling: from orders, or greedily, to the earliest start times (SPP Algorithm 1)."""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np

from stagewright.formulations.makespan import MakespanProblem, Timetable
from stagewright.formulations.orders import (
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


def _run(problem: MakespanProblem, choose: Callable[[int, _Ready], str]) -> Timetable:
    """Event-driven run: whenever a stage or channel falls idle or work arrives, start what can."""
    stages, last = problem.stages, problem.stages - 1
    duration = {"F": problem.forward, "B": problem.backward}
    sending = {"F": problem.send_forward, "B": problem.send_backward}
    starts: dict[str, list[list[float]]] = {k: [[] for _ in range(stages)] for k in "FB"}
    sends: dict[str, list[list[float]]] = {k: [[] for _ in range(last)] for k in "FB"}
    ready = _Ready(problem)
    idle, free = [True] * stages, [True] * last
    waiting: list[deque[str]] = [deque() for _ in range(last)]
    events: list[tuple[float, int, str, int, str]] = []
    sequence = 0

    def push(time: float, what: str, place: int, work: str) -> None:
        nonlocal sequence
        sequence += 1
        heapq.heappush(events, (time, sequence, what, place, work))

    def start_stage(stage: int, now: float) -> None:
        work = choose(stage, ready) if idle[stage] else ""
        if work:
            idle[stage] = False
            ready.started[work][stage] += 1
            starts[work][stage].append(now)
            push(now + duration[work][stage], "computed", stage, work)

    def start_channel(channel: int, now: float) -> None:
        if free[channel] and waiting[channel]:
            work = waiting[channel].popleft()
            free[channel] = False
            sends[work][channel].append(now)
            push(now + sending[work][channel], "sent", channel, work)

    def computed(stage: int, work: str, now: float) -> None:
        idle[stage] = True
        if work == "F" and stage == last:
            ready.arrived["B"][stage] += 1
        elif work == "F" or stage > 0:
            channel = stage if work == "F" else stage - 1
            waiting[channel].append(work)
            start_channel(channel, now)
        start_stage(stage, now)

    def sent(channel: int, work: str, now: float) -> None:
        free[channel] = True
        target = channel + 1 if work == "F" else channel
        ready.arrived[work][target] += 1
        start_channel(channel, now)
        start_stage(target, now)

    start_stage(0, 0.0)
    while events:
        now, _, what, place, work = heapq.heappop(events)
        (computed if what == "computed" else sent)(place, work, now)
    if any(len(row) < problem.microbatches for row in starts["B"]):
        raise ValueError("the orders of the stages wait for each other in a circle")
    backward = np.array(starts["B"])
    return Timetable(
        np.array(starts["F"]),
        backward,
        np.array(sends["F"]).reshape(last, problem.microbatches),
        np.array(sends["B"]).reshape(last, problem.microbatches),
        backward[:, -1] + np.array(problem.backward),
    )
