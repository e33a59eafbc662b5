"""List scheduling on streams and links (the least rank first), and by regions (algorithm 1)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.formulations.backprop.orders import reverse_first_k
from stagewright.formulations.backprop.problem import BackpropProblem, WindowTimes
from stagewright.formulations.backprop.regions import Regions, Streams, regions_of
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


@dataclass(frozen=True, slots=True, eq=False)
class ReversedLayers:
    """The best ``k`` that was tried, its timetable, and how many values were tried."""

    k: int
    timetable: WindowTimes
    tried: int


Order = Callable[[BackpropProblem, int], Ints]


def reverse_search(
    problem: BackpropProblem, most: int, order: Order = reverse_first_k
) -> ReversedLayers:
    """Section 5.1's search for k from 0 to ``most``: a grid, halved around its best value.

    It assumes that throughput is about concave in k. With the order
    ``fast_forward`` it finds k of section 6, which the paper leaves open: of data and pipeline
    parallelism together, the first k layers are reversed and the others fast-forwarded.
    """
    found: dict[int, WindowTimes] = {}

    def time(k: int) -> float:
        if k not in found:
            found[k] = list_schedule(problem, order(problem, k))
        return found[k].end

    step = max(1, most // 10)
    best = min((*range(0, most, step), most), key=time)
    while step > 1:
        low, high = max(0, best - step), min(most, best + step)
        step = (step + 1) // 2
        best = min((best, *range(low, high + 1, step)), key=time)
    return ReversedLayers(best, found[best], len(found))


@dataclass(frozen=True, slots=True, eq=False)
class StreamResult:
    """An order of the weight gradients with its timetable by the model of overlap.

    ``bound`` holds for every order of the sub-stream.
    """

    order: tuple[int, ...]
    timetable: WindowTimes
    cost: float
    bound: float


def joint_schedule(regions: Regions, prescheduled: int = 0) -> list[list[int]]:
    """Algorithm 1: the layers whose weight gradients run in each region, in order.

    The pair of region and weight gradient with the highest speed-up comes first, the one that is
    ready first among equal ones. A region closes when its main kernels are covered; what is left
    then runs in the last region before its forward. In the first ``prescheduled`` regions weight
    gradients run as soon as they are ready.
    """
    count, size = regions.sub.shape
    plan: list[list[int]] = [[] for _ in range(size)]
    now, is_left = np.zeros(size), np.full(count, True)
    by_ready = np.lexsort((regions.offset, regions.ready))  # breaks ties
    for k in by_ready[regions.ready[by_ready] < prescheduled].tolist():
        plan[regions.ready[k]].append(k + 1)
        is_left[k] = False
    best = [_best(regions, by_ready, is_left, i, 0.0) for i in range(size)]
    open_ = set(range(prescheduled, size))
    while True:
        i = min(open_, key=lambda i: (best[i].wait, -best[i].speedup, i), default=-1)
        if i < 0 or math.isinf(best[i].wait):
            break
        k = best[i].kernel
        plan[i].append(k + 1)
        is_left[k] = False
        now[i] += best[i].wait + regions.sub[k, i]
        if now[i] >= regions.main[i]:
            open_.remove(i)
        for j in open_:
            if j == i or best[j].kernel == k:
                best[j] = _best(regions, by_ready, is_left, j, now[j])
    for k in by_ready[is_left[by_ready]].tolist():
        plan[regions.last[k]].append(k + 1)
    return plan


class _RegionChoice(NamedTuple):
    """The weight gradient that a region runs next, and how long the region waits for it."""

    wait: float
    speedup: float
    kernel: int


def _best(regions: Regions, by_ready: Ints, is_left: Bools, i: int, now: float) -> _RegionChoice:
    """The weight gradient that region i runs next: the first ready, then the best speed-up."""
    offset = np.where(regions.ready == i, regions.offset, 0.0)
    may = is_left & (regions.ready <= i) & (regions.last >= i) & (offset < regions.main[i])
    own = by_ready[may[by_ready]]
    if len(own) == 0:
        return _RegionChoice(math.inf, 0.0, -1)
    waits = np.maximum(0.0, offset[own] - now)
    wait = waits.min()
    soon = own[waits == wait]
    k = int(soon[np.argmax(regions.speedup[soon, i])])
    return _RegionChoice(float(wait), float(regions.speedup[k, i]), k)


def schedule_streams(streams: Streams, ends: tuple[int, ...]) -> StreamResult:
    """Algorithm 1 on regions that stop before main kernels ``ends``.

    The paper preschedules as few regions as fit in memory; here the fastest number, by the model of
    overlap, for a plan whose memory is checked.

    Raises InputError if it does not fit in ``memory`` bytes for any number of prescheduled regions.
    """
    regions, found = regions_of(streams, ends), list[StreamResult]()
    for prescheduled in range(len(ends) + 1):
        order = tuple(k for one in joint_schedule(regions, prescheduled) for k in one)
        timetable = streams.timetable(order)
        bound = min(streams.bound(), timetable.end)
        found.append(StreamResult(order, timetable, timetable.end, bound))
    return min(found, key=lambda one: one.cost)
