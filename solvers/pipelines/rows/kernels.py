"""Compiled timing and dispatching of the rows of devices, with memory.

A *row* is the sequence of computations of a device, as codes kind x S + stage: forwards (kind 0),
backwards or input gradients (1), weight gradients (2). Every stage takes its microbatches in order,
so that the codes say all. Transfers take their time and never wait for each other.
"""

from typing import NamedTuple

import numpy as np

from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.compiled import copy, entry, lean, least_index, refer

NONE = -1
FORWARD, BACKWARD, WEIGHT = range(3)
SLACK = 1e-9  # relative, on memory
SPREAD = 1e-3  # weight of the mean of all devices beside the objective
FIRST = 1e15  # urgency of a weight gradient that must come first


class RowTimes(NamedTuple):
    """The problem as arrays: S stages, D devices, K = 2 or 3 kinds of computations.

    ``seconds`` (K, S); ``before`` (K x S,) the code that a code waits for, or ``NONE``, and ``lag``
    from that one's start, with any transfer; ``tails`` (S,) follow the last computation; ``device``
    (S,); ``own`` (D, stages) the stages of each device, filled up with ``NONE``; ``change`` (K, S)
    of the memory in use, ``memory`` (D,); ``in_flight`` (S,); ``span`` whether devices count from
    their first start.
    """

    seconds: Floats
    before: Ints
    lag: Floats
    tails: Floats
    device: Ints
    own: Ints
    change: Floats
    memory: Floats
    in_flight: Ints
    microbatches: int
    span: bool


class RowRule(NamedTuple):
    """How ``dispatch_rows`` chooses: ``urgency`` (K x S, M), the least first.

    ``eagerness`` 0 takes only what can start first, 1 waits up to the shortest end. Stage s has at
    most ``depth[s]`` microbatches between F and I; weight gradients come first if more than
    ``pending[d]`` wait on a device, and if ``clears`` and memory holds up a forward.
    """

    urgency: Floats
    depth: Ints
    pending: Ints
    eagerness: float
    clears: bool


@entry
def time_rows(times: RowTimes, rows: Ints, bounds: Ints, starts: Floats) -> float:
    """Fill ``starts`` (K x S, M) with the earliest starts of ``rows``, and return their cost.

    Device d has ``rows[bounds[d] : bounds[d + 1]]``. The cost is the objective plus ``SPREAD``
    times the mean over the devices; inf if they deadlock.
    """
    times = refer(times)
    seconds, device, stages = times.seconds, times.device, len(times.tails)
    devices, last_kind = len(bounds) - 1, len(times.seconds) - 1
    done, place = np.zeros(len(starts), np.int64), np.zeros(devices, np.int64)
    free, first, end = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    waits, stack, size = np.zeros(devices, np.bool_), np.zeros(devices, np.int64), devices
    copy(bounds, 0, devices, place)
    _count_down(stack)
    first[:] = np.inf
    while size:
        size -= 1
        d = stack[size]
        while place[d] < bounds[d + 1]:
            code = rows[place[d]]
            ready = _arrival(code, done, starts, times.before, times.lag)
            if ready == np.inf:
                break
            kind, s = code // stages, code % stages
            start = max(ready, free[d])
            starts[code, done[code]] = start
            free[d] = start + seconds[kind, s]
            done[code] += 1
            place[d] += 1
            first[d] = min(first[d], start)
            if kind == last_kind:
                end[d] = max(end[d], free[d] + times.tails[s])
            following = _following(code, stages)
            if following != NONE and waits[device[following]]:
                waits[device[following]] = False
                stack[size] = device[following]
                size += 1
        waits[d] = True
    for d in range(devices):
        if place[d] < bounds[d + 1]:
            return np.inf
    return _cost(first, end, times.span)


@entry
def dispatch_rows(
    times: RowTimes, rule: RowRule, rows: Ints, bounds: Ints, starts: Floats
) -> float:
    """Fill ``rows`` and ``starts`` by a rule, and return the cost as ``time_rows`` does.

    Of all devices the one with the earliest possible end of a computation is next (Giffler and
    Thompson 1960). It takes the most urgent of the computations that can start early enough.
    """
    times = refer(times)
    seconds, device, stages = times.seconds, times.device, len(times.tails)
    devices, last_kind = len(bounds) - 1, len(times.seconds) - 1
    done, place = np.zeros(len(starts), np.int64), np.zeros(devices, np.int64)
    free, first, end = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    used, pending = np.zeros(devices), np.zeros(devices, np.int64)
    ends, held_up = np.zeros(devices), np.zeros(devices, np.bool_)
    ready, woken = np.zeros(len(starts)), np.zeros(devices, np.bool_)
    copy(bounds, 0, devices, place)
    first[:], ready[:], woken[:] = np.inf, np.inf, True
    for _ in range(len(rows)):
        for d in range(devices):
            if woken[d]:
                ends[d], held_up[d] = _look(
                    d, times, rule.depth, done, starts, free[d], used[d], ready
                )
                woken[d] = False
        d = least_index(ends)
        if ends[d] == np.inf:
            return np.inf
        weights_first = (rule.clears and held_up[d]) or pending[d] > rule.pending[d]
        code = _choice(
            times.own[d], rule.urgency, rule.eagerness, done, ready, free[d], ends[d],
            weights_first, stages, last_kind,
        )  # fmt: skip
        kind, s = code // stages, code % stages
        start = max(ready[code], free[d])
        starts[code, done[code]] = start
        free[d] = start + seconds[kind, s]
        used[d] += times.change[kind, s]
        pending[d] += 1 if kind == BACKWARD else NONE if kind == WEIGHT else 0
        done[code] += 1
        rows[place[d]] = code
        place[d] += 1
        first[d] = min(first[d], start)
        if kind == last_kind:
            end[d] = max(end[d], free[d] + times.tails[s])
        woken[d] = True
        following = _following(code, stages)
        if following != NONE:
            woken[device[following]] = True
    return _cost(first, end, times.span)


@entry
def keeps_limits(times: RowTimes, rows: Ints, start: int, stop: int, d: int) -> bool:
    """Whether the row ``rows[start:stop]`` of device d stays within memory and in-flight limits."""
    flying = np.zeros(len(times.tails), np.int64)
    kept: bool = stays_within(refer(times), rows, start, stop, d, flying)
    return kept


@lean
def _count_down(values: Ints) -> None:
    """Fill ``values`` with n - 1, ..., 0."""
    for k in range(len(values)):
        values[k] = len(values) - 1 - k


@lean
def stays_within(times: RowTimes, rows: Ints, start: int, stop: int, d: int, flying: Ints) -> bool:
    """As :func:`keeps_limits`; ``flying`` has room for a number of each stage."""
    change, limits, stages = times.change, times.in_flight, len(times.tails)
    used, limit = 0.0, times.memory[d] * (1 + SLACK)
    flying[:], last_kind = 0, len(change) - 1
    for k in range(start, stop):
        kind, s = rows[k] // stages, rows[k] % stages
        used += change[kind, s]
        if kind == FORWARD:
            flying[s] += 1
            if used > limit or flying[s] > limits[s]:
                return False
        elif kind == last_kind:
            flying[s] -= 1
    return True


@lean
def _arrival(code: int, done: Ints, starts: Floats, before: Ints, lag: Floats) -> float:
    """Time at which the next microbatch of ``code`` has its input; inf if that is not known yet."""
    m, other = done[code], before[code]
    if m == starts.shape[1]:
        return np.inf
    if other == NONE:
        return 0.0
    return float(starts[other, m] + lag[code]) if done[other] > m else np.inf


@lean
def _following(code: int, stages: int) -> int:
    """The stage whose device may go on when a computation of ``code`` is done; NONE: its own."""
    kind, s = code // stages, code % stages
    if kind == FORWARD and s < stages - 1:
        return s + 1
    return s - 1 if kind == BACKWARD and s > 0 else NONE


@lean
def _look(
    d: int, times: RowTimes, depth: Ints, done: Ints, starts: Floats, free: float, used: float,
    ready: Floats,
) -> tuple[float, bool]:  # fmt: skip
    """Update ``ready`` of a device; its first possible end, and whether memory holds it up.

    Memory holds up a device if a forward that could start by this end has no room.
    """
    stages, kinds = len(times.tails), len(times.seconds)
    end, waiting = np.inf, np.inf
    for s in times.own[d]:
        if s == NONE:
            break
        for kind in range(kinds):
            code = kind * stages + s
            at = _arrival(code, done, starts, times.before, times.lag)
            if kind == FORWARD and at < np.inf:
                flying = done[s] - done[(kinds - 1) * stages + s]
                if done[s] - done[stages + s] >= depth[s] or flying >= times.in_flight[s]:
                    at = np.inf
                elif not _has_room(d, s, times, done, used):
                    waiting = min(waiting, at)
                    at = np.inf
            ready[code] = at
            end = min(end, max(at, free) + times.seconds[kind, s])
    return end, waiting <= end


@lean
def _has_room(d: int, s: int, times: RowTimes, done: Ints, used: float) -> bool:
    """Whether a forward of stage s fits, and after it the oldest microbatch on the device too.

    Microbatches that have not passed the device's last stage forward must leave room for the oldest
    of them there: then it always ends, and no device waits for memory forever.
    """
    limit = times.memory[d] * (1 + SLACK)
    if used + times.change[FORWARD, s] > limit:
        return False
    last = s
    for other in times.own[d]:
        last = max(last, other)
    oldest, needed = done[last], 0.0
    for other in times.own[d]:
        if other != NONE:
            passed = done[other] + (other == s) - oldest
            needed += max(passed, 1) * times.change[FORWARD, other]
    return s == last or needed <= limit


@lean
def _choice(
    own: Ints, urgency: Floats, eagerness: float, done: Ints, ready: Floats, free: float,
    end: float, weights_first: bool, stages: int, last_kind: int,
) -> int:  # fmt: skip
    """The most urgent computation of a device; of equal ones the one that can start first."""
    first = np.inf
    for s in own:
        for kind in range(last_kind + 1):
            if s != NONE:
                first = min(first, max(ready[kind * stages + s], free))
    admitted = min(first + eagerness * (end - first), end)
    chosen, least, start = NONE, np.inf, np.inf
    for s in own:
        for kind in range(last_kind + 1):
            code = kind * stages + s
            if s == NONE or max(ready[code], free) > admitted:
                continue
            value = urgency[code, done[code]] - FIRST * (weights_first and kind == WEIGHT)
            at = max(ready[code], free)
            if chosen == NONE or value < least or (value == least and at < start):
                chosen, least, start = code, value, at
    return chosen


@lean
def _cost(first: Floats, end: Floats, span: bool) -> float:
    """The longest time of a device, and a little of the mean."""
    most, mean = 0.0, 0.0
    for d in range(len(end)):
        taken = end[d] - first[d] if span else end[d]
        most = max(most, taken)
        mean += taken / len(end)
    return most + SPREAD * mean
