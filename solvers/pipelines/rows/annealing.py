"""Simulated annealing on the rows of devices: a computation moves to another place of its row.

Only the starts that a move changes are computed again, in the order of their former times. A move
is given up as soon as it is known to cost too much: when a computation starts so late that the work
after it on its device ends too late.
"""

from typing import NamedTuple

import numpy as np

from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.compiled import copy, entry, inner, lean, refer
from stagewright.solvers.pipelines.rows.kernels import (
    NONE,
    SLACK,
    RowTimes,
    stays_within,
    time_rows,
)

_REACH = 4.0  # mean distance of a move
MEAN = 0.1  # weight of the mean of all devices beside the objective
VISITS = 3  # of each computation on average, after which a move is given up


class _Sequence(NamedTuple):
    """N computations, numbered code x M + microbatch.

    Per place: ``at`` its computation, ``level`` the memory in use from then on, ``work`` the time
    of the computation and all after it in its row. Per computation: ``place`` and ``starts``.
    Per code: ``seconds``, ``change`` of memory, ``device``, the code ``before`` it with the ``lag``
    as in ``RowTimes``, and the code ``after`` it on another device.
    """

    at: Ints
    level: Floats
    work: Floats
    place: Ints
    starts: Floats
    seconds: Floats
    change: Floats
    device: Ints
    before: Ints
    lag: Floats
    after: Ints


class _Changes(NamedTuple):
    """Heap of computations to time again, by former start, and a record of changes for undoing."""

    heap: Ints
    keys: Floats
    waits: Ints  # whether a computation is in the heap
    changed: Ints
    former: Floats
    stamp: Ints  # the last move that changed a computation


@entry
def anneal_rows(
    times: RowTimes, rows: Ints, bounds: Ints, heats: tuple[float, float], steps: int,
    random: np.random.Generator,
) -> float:  # fmt: skip
    """Change ``rows`` by random moves into the best rows found; their cost.

    A move that costs x more is kept with probability exp(-x / heat); the heat falls from the first
    to the second of ``heats``. Costs are the objective plus ``MEAN`` times the mean over devices.
    """
    starts = np.zeros((times.seconds.size, times.microbatches))
    if time_rows(times, rows, bounds, starts) == np.inf:
        return np.inf
    size = len(rows)
    changes = _Changes(
        np.zeros(size, np.int64), np.zeros(size), np.zeros(size, np.int64),
        np.zeros(size, np.int64), np.zeros(size), np.zeros(size, np.int64),
    )  # fmt: skip
    sequence = _sequence(times, rows, bounds, starts)
    least: float = _anneal(times, sequence, changes, rows, bounds, heats, steps, random)
    return least


@inner
def _anneal(
    times: RowTimes, sequence: _Sequence, changes: _Changes, rows: Ints, bounds: Ints,
    heats: tuple[float, float], steps: int, random: np.random.Generator,
) -> float:  # fmt: skip
    """As :func:`anneal_rows`, from ``rows`` that do not deadlock."""
    times, sequence, changes = refer(times), refer(sequence), refer(changes)
    size, count = len(rows), times.microbatches
    end, flying = np.zeros(len(bounds) - 1), np.zeros(len(times.tails), np.int64)
    limited = False
    for s in range(len(times.tails)):
        limited = limited or times.in_flight[s] < count
    least, mean = _cost_of(sequence, times, bounds, end)
    best, now, heat = np.empty(size, np.int64), least, heats[0]
    copy(rows, 0, size, best)
    fall = (heats[1] / heats[0]) ** (1.0 / steps)
    for step in range(1, steps + 1):
        heat *= fall
        i = int(random.integers(0, size))
        d = sequence.device[sequence.at[i] // count]
        away = 1 + int(random.exponential(_REACH))
        j = i + away if random.random() < 0.5 else i - away
        j = _allowed(sequence, i, min(max(bounds[d], j), bounds[d + 1] - 1), count)
        if i == j or not _fits(sequence, i, j, times.memory[d] * (1 + SLACK), count):
            continue
        _move(sequence, rows, i, j, count)
        if not limited or stays_within(times, rows, bounds[d], bounds[d + 1], d, flying):
            most = now - heat * np.log(1.0 - random.random())
            until = most - MEAN * mean  # the mean changes little
            number = _propagate(sequence, changes, bounds, times.span, i, j, until, step, count)
            found, its = (np.inf, np.inf) if number < 0 else _cost_of(sequence, times, bounds, end)
            if found <= most:
                now, mean = found, its
                if now < least:
                    least = now
                    copy(rows, 0, size, best)
                continue
            for k in range(number if number >= 0 else -number - 1):
                sequence.starts[changes.changed[k]] = changes.former[k]
        _move(sequence, rows, j, i, count)
    copy(best, 0, size, rows)
    return least


@inner
def _sequence(times: RowTimes, rows: Ints, bounds: Ints, starts: Floats) -> _Sequence:
    stages, count, size = len(times.tails), times.microbatches, len(rows)
    codes = times.seconds.size
    at, place = np.zeros(size, np.int64), np.zeros(size, np.int64)
    level, work = np.zeros(size), np.zeros(size)
    seconds, change = np.zeros(codes), np.zeros(codes)
    device, after = np.zeros(codes, np.int64), np.zeros(codes, np.int64)
    for code in range(codes):
        kind, s = code // stages, code % stages
        seconds[code], change[code] = times.seconds[kind, s], times.change[kind, s]
        device[code], after[code] = times.device[s], NONE
    for code in range(codes):
        other = times.before[code]
        if other != NONE and device[other] != device[code]:
            after[other] = code
    done = np.zeros(codes, np.int64)
    for d in range(len(bounds) - 1):
        used = 0.0
        for k in range(bounds[d], bounds[d + 1]):
            code = rows[k]
            used += change[code]
            at[k] = code * count + done[code]
            place[at[k]], level[k] = k, used
            done[code] += 1
        left = 0.0
        for k in range(bounds[d + 1] - 1, bounds[d] - 1, -1):
            left += seconds[rows[k]]
            work[k] = left
    return _Sequence(
        at, level, work, place, starts.reshape(-1), seconds, change, device,
        times.before, times.lag, after,
    )  # fmt: skip


@lean
def _allowed(sequence: _Sequence, i: int, j: int, count: int) -> int:
    """The place nearest to j that place i's computation can move to.

    It passes no computation of its code, nor one of its microbatch right before or after it.
    """
    code, m = sequence.at[i] // count, sequence.at[i] % count
    step = 1 if i < j else -1
    k = i
    while k != j:
        other = sequence.at[k + step]
        its, same = other // count, other % count == m
        if its == code:
            break
        if same and (sequence.before[its] == code if step > 0 else sequence.before[code] == its):
            break
        k += step
    return k


@lean
def _fits(sequence: _Sequence, i: int, j: int, limit: float, count: int) -> bool:
    """Whether there is memory for a move from place i to place j.

    Only forwards need to be looked at, as nothing else takes memory.
    """
    change, level = sequence.change[sequence.at[i] // count], sequence.level
    if i < j and change < 0:
        for k in range(i + 1, j + 1):
            if sequence.change[sequence.at[k] // count] > 0 and level[k] - change > limit:
                return False
    elif i > j and change > 0:
        if level[j] - sequence.change[sequence.at[j] // count] + change > limit:
            return False
        for k in range(j, i):
            if sequence.change[sequence.at[k] // count] > 0 and level[k] + change > limit:
                return False
    return True


@lean
def _move(sequence: _Sequence, rows: Ints, i: int, j: int, count: int) -> None:
    """Move the computation of place i to place j; those between shift by one."""
    at, level, work = sequence.at, sequence.level, sequence.work
    moved = at[i]
    code = moved // count
    seconds, change = sequence.seconds[code], sequence.change[code]
    if i < j:
        whole, total = level[j], work[j] - sequence.seconds[at[j] // count] + seconds
    else:
        whole, total = level[j] - sequence.change[at[j] // count] + change, work[j]
    step = 1 if i < j else -1
    for k in range(i, j, step):
        at[k], level[k] = at[k + step], level[k + step] - step * change
        work[k], rows[k] = work[k + step] + step * seconds, rows[k + step]
        sequence.place[at[k]] = k
    at[j], level[j], work[j], rows[j] = moved, whole, total, code
    sequence.place[moved] = j


@lean
def _propagate(
    sequence: _Sequence, changes: _Changes, bounds: Ints, span: bool, i: int, j: int, most: float,
    step: int, count: int,
) -> int:  # fmt: skip
    """Time again all computations that a move from place i to place j changes.

    Returns the number of computations with other starts, or -1 less than it if the cost is more
    than ``most``. If computations wait for each other in a circle, that is found in this way.
    """
    d = sequence.device[sequence.at[i] // count]
    size, number = 0, 0
    for k in (min(i, j), j, j + 1, max(i, j) + 1):
        if k < bounds[d + 1]:
            size = _push(sequence, changes, size, sequence.at[k])
    visits = 0
    while size:
        one = changes.heap[0]
        size = _pop(changes, size)
        d, k = sequence.device[one // count], sequence.place[one]
        start = _start(sequence, bounds[d], one, count)
        former = sequence.starts[one]
        if start == former:
            continue
        if changes.stamp[one] != step:
            changes.stamp[one], changes.changed[number] = step, one
            changes.former[number] = former
            number += 1
        sequence.starts[one] = start
        visits += 1
        began = sequence.starts[sequence.at[bounds[d]]] if span else 0.0
        if start + sequence.work[k] - began > most or visits > VISITS * len(sequence.at):
            for other in range(size):
                changes.waits[changes.heap[other]] = 0
            return -1 - number
        size = _push_next(sequence, changes, size, one, bounds[d + 1], count)
    return number


@lean
def _push_next(
    sequence: _Sequence, changes: _Changes, size: int, one: int, end: int, count: int
) -> int:
    """Push the computations after one, in its row up to place ``end`` and on another device."""
    following = sequence.place[one] + 1
    if following < end:
        size = _push(sequence, changes, size, sequence.at[following])
    after = sequence.after[one // count]
    return size if after == NONE else _push(sequence, changes, size, after * count + one % count)


@lean
def _start(sequence: _Sequence, begin: int, one: int, count: int) -> float:
    """The earliest start of a computation, in the row from place ``begin``."""
    code, k, start = one // count, sequence.place[one], 0.0
    if k > begin:
        other = sequence.at[k - 1]
        start = sequence.starts[other] + sequence.seconds[other // count]
    before = sequence.before[code]
    if before != NONE:
        start = max(start, sequence.starts[before * count + one % count] + sequence.lag[code])
    return start


@lean
def _push(sequence: _Sequence, changes: _Changes, size: int, one: int) -> int:
    """Put a computation into the heap, if it is not there; the new size."""
    if changes.waits[one]:
        return size
    changes.waits[one] = 1
    heap, keys, key, k = changes.heap, changes.keys, sequence.starts[one], size
    while k > 0 and keys[(k - 1) // 2] > key:
        heap[k], keys[k] = heap[(k - 1) // 2], keys[(k - 1) // 2]
        k = (k - 1) // 2
    heap[k], keys[k] = one, key
    return size + 1


@lean
def _pop(changes: _Changes, size: int) -> int:
    """Remove the first computation of the heap; the new size."""
    heap, keys = changes.heap, changes.keys
    changes.waits[heap[0]] = 0
    size -= 1
    last, key, k = heap[size], keys[size], 0
    while 2 * k + 1 < size:
        child = 2 * k + 1
        if child + 1 < size and keys[child + 1] < keys[child]:
            child += 1
        if keys[child] >= key:
            break
        heap[k], keys[k] = heap[child], keys[child]
        k = child
    heap[k], keys[k] = last, key
    return size


@lean
def _cost_of(
    sequence: _Sequence, times: RowTimes, bounds: Ints, end: Floats
) -> tuple[float, float]:
    """The cost and the mean over the devices; ``end`` (D,) is overwritten."""
    stages, count, devices = len(times.tails), times.microbatches, len(end)
    first = len(sequence.seconds) - stages
    end[:] = 0.0
    for s in range(stages):
        d, code = times.device[s], first + s
        finish = sequence.starts[(code + 1) * count - 1] + sequence.seconds[code] + times.tails[s]
        end[d] = max(end[d], finish)
    most, mean = 0.0, 0.0
    for d in range(devices):
        taken = end[d] - (sequence.starts[sequence.at[bounds[d]]] if times.span else 0.0)
        most = max(most, taken)
        mean += taken / devices
    return most + MEAN * mean, mean
