"""Operators run from ready queues, as a framework's executor does without a planned order."""

import heapq
from collections.abc import Callable

import numpy as np

from stagewright.formulations.operators.problem import GraphTimes, OperatorProblem
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.operators.insertion import timetable
from stagewright.solvers.operators.ranks import arrays_of

Key = Callable[[int, float], float]
"""The priority of an operator that is ready at a time; the least runs first."""


def fifo(_operator: int, ready: float) -> float:
    """What is ready first runs first."""
    return ready


def by_place(order: Ints) -> Key:
    """What comes first in ``order`` runs first."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return lambda operator, _ready: float(place[operator])


def from_queues(problem: OperatorProblem, device: Ints, key: Key) -> GraphTimes:
    """Each device runs the ready operator of the least key, and never waits for a better one.

    Transfers start when their tensors are made (no contention).
    """
    n, m = len(problem.names), len(problem.devices)
    waits = np.diff(problem.inputs[0]).tolist()
    home = device.tolist()
    work = problem.seconds[np.arange(n), device].tolist()
    start, free = np.zeros(n), [0.0] * m
    sent_start = np.full((len(problem.maker), m), np.nan)
    queues: list[list[tuple[float, int]]] = [[] for _ in range(m)]
    arrivals = [(0.0, i) for i in range(n) if not waits[i]]  # of the last input of an operator
    ready = [0.0] * n
    ends: list[tuple[float, int]] = []
    while arrivals or ends:
        now = min(one[0][0] for one in (arrivals, ends) if one)
        while ends and ends[0][0] <= now:
            _, i = heapq.heappop(ends)
            _send(problem, i, now, home, sent_start, waits, ready, arrivals)
        while arrivals and arrivals[0][0] <= now:
            _, i = heapq.heappop(arrivals)
            if work[i]:
                heapq.heappush(queues[home[i]], (key(i, now), i))
            else:
                start[i] = now
                _send(problem, i, now, home, sent_start, waits, ready, arrivals)
        if ends and ends[0][0] <= now:
            continue
        for d in range(m):
            if queues[d] and free[d] <= now:
                _, i = heapq.heappop(queues[d])
                start[i], free[d] = now, now + work[i]
                heapq.heappush(ends, (free[d], i))
    return timetable(arrays_of(problem), device, start, sent_start)


def _send(
    problem: OperatorProblem,
    i: int,
    now: float,
    home: list[int],
    sent_start: Floats,
    waits: list[int],
    ready: list[float],
    arrivals: list[tuple[float, int]],
) -> None:
    """The outputs of operator i go to their readers."""
    for t in range(problem.first_output[i], problem.first_output[i + 1]):
        for j in problem.reader[problem.first_reader[t] : problem.first_reader[t + 1]].tolist():
            d, at = home[j], now
            if d != home[i]:
                sent_start[t, d] = now
                rate = problem.seconds_per_byte[home[i], d]
                at += problem.latency[home[i], d] + problem.sent_bytes[t] * rate
            ready[j] = max(ready[j], at)
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(arrivals, (ready[j], j))
