"""List scheduling on streams and links: whenever a resource is free, its least rank starts."""

import math
from collections.abc import Sequence

import numpy as np

from stagewright.formulations.backprop.problem import BackpropProblem, WindowTimes
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.pipelines.compiled import entry, inner

ROUNDING = 1e-12  # relative: chunks of work whose end is now


def list_schedule(problem: BackpropProblem, ranks: Ints, queues: Sequence[str] = ()) -> WindowTimes:
    """The schedule in which each resource runs the ready operation of the least rank.

    A resource whose name starts with one of ``queues`` serves first come, first served. Preemptible
    links suspend an operation for one of a lower rank, chunked ones at the end of a chunk. Limits
    of memory are not looked at. O(n (log n + resources)).
    """
    if len(ranks) != len(problem.operations):
        raise InputError(f"{len(problem.operations)} ranks needed, got {len(ranks)}")
    return _dispatch(problem, ranks, queues)


def improve(problem: BackpropProblem, timetable: WindowTimes, rounds: int = 5) -> WindowTimes:
    """Schedule backward by the ends, then forward by the starts, until it gets no shorter.

    Forward-backward improvement (Tormos and Lova 2001). Limits of memory are not looked at.
    """
    for _ in range(rounds):
        late = _dispatch(problem, _positions(-timetable.ends), is_reversed=True)
        other = _dispatch(problem, _positions(late.end - late.ends))
        if other.end >= timetable.end:
            break
        timetable = other
    return timetable


def _positions(values: Floats) -> Ints:
    """The rank of each value."""
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def _dispatch(
    problem: BackpropProblem, ranks: Ints, queues: Sequence[str] = (), is_reversed: bool = False
) -> WindowTimes:
    is_queue = np.array(
        [any(one.name.startswith(name) for name in queues) for one in problem.resources], bool
    )
    chunks = np.array([one.chunk_seconds for one in problem.resources], dtype=float)
    (first, after), (other, _) = problem.followers, problem.preceding
    if is_reversed:
        (first, after), (other, _) = problem.preceding, problem.followers
    ranks = np.asarray(ranks, dtype=np.int64)
    waits = np.diff(other)
    return WindowTimes(
        *run_all(problem.seconds, problem.resource, ranks, first, after, waits, chunks, is_queue)
    )


@inner
def _push(heap: Ints, size: int, item: int, keys: Ints) -> None:
    i = size
    while i > 0 and keys[heap[(i - 1) // 2]] > keys[item]:
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    heap[i] = item


@inner
def _pop(heap: Ints, size: int, keys: Ints) -> int:
    """Remove and return the least of ``size`` items."""
    least, last = int(heap[0]), heap[size - 1]
    i, count = 0, size - 1
    while 2 * i + 1 < count:
        j = 2 * i + 1
        if j + 1 < count and keys[heap[j + 1]] < keys[heap[j]]:
            j += 1
        if keys[heap[j]] >= keys[last]:
            break
        heap[i] = heap[j]
        i = j
    heap[i] = last
    return least


@entry
def run_all(  # noqa: C901 - one loop over events
    seconds: Floats,
    resource: Ints,
    ranks: Ints,
    first: Ints,
    after: Ints,
    waits: Ints,
    chunks: Floats,
    is_queue: Bools,
) -> tuple[Ints, Floats, Floats]:
    """Pieces (operation, start, finish) in the order of their ends."""
    count, places = len(seconds), len(chunks)
    keys, waits, done = ranks.copy(), waits.copy(), np.zeros(count)
    heaps = np.empty((places, count), np.int64)
    sizes = np.zeros(places, np.int64)
    running = np.full(places, -1)
    begun, stops = np.zeros(places), np.full(places, np.inf)
    finishes = stops.copy()  # if not suspended
    pieces = [(0, 0.0, 0.0) for _ in range(0)]
    ready = [i for i in range(count) if waits[i] == 0]
    ended, head, arrivals, now = ready[:0], 0, 0, 0.0
    while True:
        while len(ready) > head or len(ended) > 0:  # what takes no time ends when it is ready
            if len(ended) > 0:
                i = ended.pop()
                for e in range(first[i], first[i + 1]):
                    j = after[e]
                    waits[j] -= 1
                    if waits[j] == 0:
                        ready.append(j)
                continue
            i = ready[head]
            head += 1
            if seconds[i] > 0.0:
                r = resource[i]
                if is_queue[r]:
                    keys[i] = arrivals
                    arrivals += 1
                _push(heaps[r], sizes[r], i, keys)
                sizes[r] += 1
            else:
                pieces.append((i, now, now))
                ended.append(i)
        least = np.inf
        for r in range(places):
            if running[r] < 0 and sizes[r] > 0:
                i = _pop(heaps[r], sizes[r], keys)
                sizes[r] -= 1
                running[r], begun[r] = i, now
                stops[r] = finishes[r] = now + seconds[i] - done[i]
            elif running[r] >= 0 and sizes[r] > 0 and chunks[r] < np.inf:
                i = running[r]
                if keys[heaps[r, 0]] < keys[i]:
                    boundary = _suspension(now, begun[r], done[i], chunks[r])
                    stops[r] = min(boundary, finishes[r])
            least = min(least, stops[r])
        if least == np.inf:
            return (
                np.array([piece[0] for piece in pieces]),
                np.array([piece[1] for piece in pieces]),
                np.array([piece[2] for piece in pieces]),
            )
        now = least
        for r in range(places):
            if running[r] >= 0 and stops[r] <= now:
                i = running[r]
                running[r], stops[r] = -1, np.inf
                done[i] += now - begun[r]
                if now >= finishes[r]:
                    pieces.append((int(i), begun[r], now))
                    ended.append(i)
                else:
                    if now > begun[r]:
                        pieces.append((int(i), begun[r], now))
                    _push(heaps[r], sizes[r], i, keys)
                    sizes[r] += 1


@inner
def _suspension(now: float, begun: float, done: float, chunk: float) -> float:
    """When an operation that runs since ``begun`` reaches the end of a chunk."""
    if chunk == 0.0:
        return now
    work = done + now - begun
    return begun + chunk * math.ceil(work / chunk * (1 - ROUNDING)) - done


def insert(problem: BackpropProblem, ranks: Ints) -> WindowTimes:
    """The schedule in which operations, in the order of ranks, take the earliest gap that fits.

    An operation waits in this order for those it follows. Never suspends; O(n^2) at worst. Unlike
    :func:`list_schedule` it leaves a resource idle for an urgent operation that is not ready yet.
    """
    starts = insert_all(
        problem.seconds,
        problem.resource,
        np.asarray(ranks, dtype=np.int64),
        *problem.followers,
        np.diff(problem.preceding[0]),
        len(problem.resources),
    )
    return WindowTimes.of_starts(problem, starts)


@entry
def insert_all(  # noqa: C901 - one pass over operations
    seconds: Floats, resource: Ints, ranks: Ints, first: Ints, after: Ints, waits: Ints, places: int
) -> Floats:
    """Starts in the order of ranks, each in the earliest gap."""
    count = len(seconds)
    waits, ready, starts = waits.copy(), np.zeros(count), np.zeros(count)
    heap, size = np.empty(count, np.int64), 0
    busy, ends = np.empty((places, count)), np.empty((places, count))  # sorted per resource
    used = np.zeros(places, np.int64)
    for i in range(count):
        if waits[i] == 0:
            _push(heap, size, i, ranks)
            size += 1
    while size > 0:
        i = _pop(heap, size, ranks)
        size -= 1
        start, r = ready[i], resource[i]
        if seconds[i] > 0.0:
            at = np.searchsorted(ends[r, : used[r]], start, side="right")
            while at < used[r] and busy[r, at] < start + seconds[i]:
                start = max(start, ends[r, at])
                at += 1
            for p in range(used[r], at, -1):
                busy[r, p], ends[r, p] = busy[r, p - 1], ends[r, p - 1]
            busy[r, at], ends[r, at] = start, start + seconds[i]
            used[r] += 1
        starts[i] = start
        for e in range(first[i], first[i + 1]):
            j = after[e]
            ready[j] = max(ready[j], start + seconds[i])
            waits[j] -= 1
            if waits[j] == 0:
                _push(heap, size, j, ranks)
                size += 1
    return starts
