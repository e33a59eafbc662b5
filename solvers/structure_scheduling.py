"""List schedules of any finite structure: greedy, in time, by priorities, within memory.

Whatever falls idle starts the most urgent computation that is ready and fits in memory. It never
gets stuck: on every device the first unfinished microbatch, its leader, may always go on, for
enough memory to finish it is kept free of the others. As the first unfinished microbatch of all is
the leader wherever it still has to go, something can always be done.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stagewright.formulations.actions import ActionKind
from stagewright.formulations.check import Blocks
from stagewright.formulations.structure import Endings, Work, device_loads

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ForwardOrder = Literal["oldest", "deepest", "broad", "chunks"]
BackwardOrder = Literal["oldest", "broad", "chunks", "newest"]
Urgency = Literal["BFW", "BWF", "WBF", "FBW"]

# Kinds of events; the first five are also rows of `Work.seconds`.
FORWARD, BACKWARD, WEIGHTS, SEND_F, SEND_B, WRITTEN, READ, WAKE = range(8)


@dataclass(frozen=True, slots=True)
class Rule:
    """How urgent computations are, and how many microbatches may be in flight.

    ``depth`` counts in what it takes to keep the busiest device busy: 1 is 1F1B's warm-up.
    ``urgency`` puts the kinds in order, the most urgent first. Within a kind ``forward`` and
    ``backward`` decide: by microbatch (oldest or newest first), by the last stage (deepest) or the
    first (broad), or round after round of as many microbatches as there are devices (chunks).
    """

    depth: float = math.inf
    urgency: Urgency = "BFW"
    forward: ForwardOrder = "oldest"
    backward: BackwardOrder = "oldest"


DEPTHS = (1.0, 1.5, 2.0, 3.0, math.inf)


@dataclass(frozen=True, slots=True, eq=False)
class StructureSchedule:
    """Start times of all actions, and when the last one ends."""

    starts: Blocks
    seconds: float


def rules_for(work: Work, thorough: bool = True) -> list[Rule]:
    """The rules that are worth trying for a structure, the most promising ones first."""
    shared = bool((np.diff(work.places_first) > 1).any())
    urgencies: list[Urgency] = ["BFW", "BWF", "WBF"] if work.split.any() else ["BFW"]
    rules = [Rule(depth, kinds) for kinds in urgencies for depth in DEPTHS]
    rules.append(Rule(urgency="FBW"))
    rules.append(Rule(urgency="FBW", backward="newest"))
    if shared:
        orders: list[tuple[ForwardOrder, BackwardOrder]] = [
            ("chunks", "chunks"), ("deepest", "broad"), ("broad", "chunks"), ("broad", "newest"),
        ]  # fmt: skip
        for forward, backward in orders:
            rules += [Rule(depth, kinds, forward, backward) for kinds in urgencies[:2]
                      for depth in DEPTHS]  # fmt: skip
            rules.append(Rule(math.inf, "FBW", forward, backward))
    return rules if thorough else rules[:: max(1, len(rules) // 6)]


def best_schedule(
    work: Work, endings: Endings, rules: Sequence[Rule], ceiling: float = math.inf
) -> StructureSchedule | None:
    """The shortest schedule of ``rules`` if it is below ``ceiling``, else None."""
    best: StructureSchedule | None = None
    scale = _latencies(work)
    for rule in rules:
        starts = list_schedule(work, rule, scale)
        finishes = _finish(work, endings, starts)
        if finishes[2] < ceiling:
            ceiling = finishes[2]
            best = StructureSchedule(_blocks(work, starts, *finishes[:2]), ceiling)
    return best


def list_schedule(work: Work, rule: Rule, scale: Floats) -> Floats:
    """Start times of computations and transfers by one rule, shape (5, S, M)."""
    turns = np.bincount(work.stage)
    most = np.ceil(rule.depth * scale / turns - 1e-9) if rule.depth < math.inf else scale * 0 + 1e9
    limits = np.maximum(1, np.minimum(most, work.lane.shape[1])).astype(np.int64)[work.stage]
    return np.asarray(_list_schedule(work, _keys(work, rule), limits))


def _latencies(work: Work) -> Floats:
    """How many microbatches are in flight at a stage when the busiest device never waits, (S,)."""
    stages, microbatches = work.lane.shape
    per_stage = work.seconds[[0, 1, 3]].mean(axis=2).sum(axis=0)
    per_stage[1:] += work.seconds[4, 1:].mean(axis=1)
    latency = np.cumsum(per_stage[::-1])[::-1]
    busiest = float(device_loads(work).max()) / microbatches
    return latency / busiest if busiest > 0 else np.full(stages, float(stages))


def _keys(work: Work, rule: Rule) -> Floats:
    """The urgency of F, B or I, and W, shape (3, S, M); the least comes first."""
    stages, count = work.lane.shape
    s, m = np.arange(stages)[:, None], np.arange(count)[None, :]
    depth = int(np.diff(work.places_first).max())
    round_ = max(1, stages // depth)

    def chunks(position: Ints) -> Ints:
        return ((m // round_) * stages + position) * round_ + m % round_

    last = stages - 1 - s
    forward = {
        "oldest": m * stages + last, "deepest": last * count + m, "broad": s * count + m,
        "chunks": chunks(s),
    }[rule.forward]  # fmt: skip
    backward = {
        "oldest": m * stages + s, "broad": s * count + m, "chunks": chunks(last),
        "newest": (count - 1 - m) * stages + last,
    }[rule.backward]  # fmt: skip
    weights = m * stages + last
    size = float(2 * stages * (count + round_))
    return np.stack([
        rule.urgency.index(kind) * size + order
        for kind, order in (("F", forward), ("B", backward), ("W", weights))
    ])  # fmt: skip


def _finish(work: Work, endings: Endings, starts: Floats) -> tuple[Floats, Floats, float]:
    """When all-reduces and optimizer's steps start, and when the last action ends.

    All-reduces begin in the order in which their backwards are done, steps in that of their
    all-reduces, behind all other computations of a device.
    """
    ends = starts + work.seconds
    backwards = np.where(work.split[:, None], ends[WEIGHTS], ends[BACKWARD])
    done = backwards.max(axis=1)
    reduces, updates = np.full(len(done), np.nan), np.full(len(done), np.nan)
    free, busy = np.zeros(len(work.room)), np.zeros(len(work.room))
    for s in np.argsort(done, kind="stable"):
        group = list(endings.devices[s])
        busy[group] = np.maximum(busy[group], done[s])
        if not np.isnan(endings.reduce[s]):
            reduces[s] = max(float(free[group].max()), done[s])
            free[group] = done[s] = reduces[s] + endings.reduce[s]
    for s in np.argsort(done, kind="stable"):
        if not np.isnan(endings.update[s]):
            group = list(endings.devices[s])
            updates[s] = max(float(busy[group].max()), done[s])
            busy[group] = done[s] = updates[s] + endings.update[s]
    return reduces, updates, float(done.max())


def _blocks(work: Work, starts: Floats, reduces: Floats, updates: Floats) -> Blocks:
    split = work.split[:, None]
    return {
        ActionKind.FORWARD: starts[FORWARD],
        ActionKind.BACKWARD: np.where(split, np.nan, starts[BACKWARD]),
        ActionKind.INPUT_GRADIENT: np.where(split, starts[BACKWARD], np.nan),
        ActionKind.WEIGHT_GRADIENT: np.where(split, starts[WEIGHTS], np.nan),
        ActionKind.SEND_FORWARD: starts[SEND_F],
        ActionKind.SEND_BACKWARD: starts[SEND_B],
        ActionKind.REDUCE: reduces[:, None],
        ActionKind.UPDATE: updates[:, None],
    }


class _Run(NamedTuple):
    """The state of a run: what has started, waits, is free, and is held in memory.

    Queues hold microbatches, as heaps by urgency: 4 per lane (F, B or I, W, and reads from the
    host), then one per channel, which is first come, first served.
    """

    starts: Floats  # (5, S, M)
    queue: Ints  # (queues, M)
    length: Ints  # (queues,)
    order: Floats  # urgencies by kind (4, S, M)
    channel_stage: Ints  # the stage in front of a channel
    channel_queue: Ints  # (channels, 2 M): microbatches, from M on their gradients
    channel_ends: Ints  # (channels, 2): begin and end of what waits
    channel_free: NDArray[np.bool_]
    idle: NDArray[np.bool_]  # (V,)
    leader: Ints  # (V,)
    left: Ints  # (V, M): stages of a microbatch that a device has not finished
    others: Floats  # (V,): bytes that are held for other microbatches than the leader
    held: Floats  # (S, M)
    in_flight: Ints  # (N,)
    limits: Ints  # (N,)
    write_free: Floats  # (V,)
    last_read: Floats  # (V,): when the last backward began whose activations were read
    waiting: NDArray[np.bool_]  # (S, M): a backward is due, its activations are still written
    written: NDArray[np.bool_]  # (S, M)
    dirty: NDArray[np.bool_]  # (N,): lanes for which something may have changed


@njit(cache=True)
def _list_schedule(work: Work, keys: Floats, limits: Ints) -> Floats:
    run = _new_run(work, keys, limits)
    size = work.lane.size
    events = [(0.0, 0, 0)]
    events.pop()
    for m in range(work.lane.shape[1]):
        _offer(work, run, FORWARD, 0, m)
    number = _start_all(work, run, events, 0.0, 0)
    while len(events) > 0:
        now = events[0][0]
        while len(events) > 0 and events[0][0] <= now:
            code = heapq.heappop(events)[2]
            kind = min(code // size, WAKE)  # whose number of a lane may be the larger
            rest = code - kind * size
            s, m = rest // work.lane.shape[1], rest % work.lane.shape[1]
            number = _happen(work, run, events, now, number, kind, s, m)
        number = _start_all(work, run, events, now, number)
    return run.starts


@njit(cache=True)
def _new_run(work: Work, keys: Floats, limits: Ints) -> _Run:
    stages, count = work.lane.shape
    lanes, devices = len(work.stage), len(work.room)
    channels = work.channel.max() + 1
    channel_stage = np.zeros(channels, dtype=np.int64)
    left = np.zeros((devices, count), dtype=np.int64)
    for s in range(stages):
        for m in range(count):
            if work.channel[s, m] >= 0:
                channel_stage[work.channel[s, m]] = s
            n = work.lane[s, m]
            for v in work.members[work.members_first[n] : work.members_first[n + 1]]:
                left[v, m] += 1
    order = np.zeros((4, stages, count))
    order[:3] = keys
    order[3] = keys[1]
    run = _Run(
        np.full((5, stages, count), np.nan),
        np.zeros((4 * lanes, count), dtype=np.int64),
        np.zeros(4 * lanes, dtype=np.int64),
        order,
        channel_stage,
        np.zeros((channels, 2 * count), dtype=np.int64),
        np.zeros((channels, 2), dtype=np.int64),
        np.ones(channels, dtype=np.bool_),
        np.ones(devices, dtype=np.bool_),
        np.zeros(devices, dtype=np.int64),
        left,
        np.zeros(devices),
        np.zeros((stages, count)),
        np.zeros(lanes, dtype=np.int64),
        limits,
        np.zeros(devices),
        np.full(devices, -np.inf),
        np.zeros((stages, count), dtype=np.bool_),
        np.zeros((stages, count), dtype=np.bool_),
        np.zeros(lanes, dtype=np.bool_),
    )
    for v in range(devices):
        _lead(work, run, v)
    return run


@njit(cache=True)
def _lead(work: Work, run: _Run, v: int) -> None:
    """The next leader of a device, if the present one is done; its bytes no longer count."""
    count = work.lane.shape[1]
    now = run.leader[v]
    while now < count and run.left[v, now] == 0:
        now += 1
    run.leader[v] = now
    if now < count:
        for n in work.places[work.places_first[v] : work.places_first[v + 1]]:
            s = work.stage[n]
            if work.lane[s, now] == n:
                run.others[v] -= run.held[s, now]


@njit(cache=True)
def _happen(
    work: Work, run: _Run, events: list[tuple[float, int, int]], now: float, number: int,
    kind: int, s: int, m: int,
) -> int:  # fmt: skip
    """What follows the end of an action; gives the number of the next event."""
    stages, count = work.lane.shape
    if kind == SEND_F or kind == SEND_B:
        channel = work.channel[s, m] if kind == SEND_F else work.channel[s - 1, m]
        run.channel_free[channel] = True
        if kind == SEND_F:
            _offer(work, run, FORWARD, s + 1, m)
        else:
            _offer_backward(work, run, s - 1, m)
        return _send(work, run, events, now, number, channel)
    if kind == WAKE:
        run.dirty[s * count + m] = True
        return number
    n = work.lane[s, m]
    _touch(work, run, n)
    if kind == READ:
        _offer(work, run, BACKWARD, s, m)
        return number
    if kind == WRITTEN:
        _hold(work, run, s, m, -work.offloaded[n])
        run.written[s, m] = True
        if run.waiting[s, m]:
            _offer(work, run, READ, s, m)
        return number
    _set_idle(work, run, n, True)
    if kind == FORWARD:
        if work.offload[n] > 0:
            number = _push(work, events, now + work.offload[n], number, WRITTEN, s, m)
            for v in work.members[work.members_first[n] : work.members_first[n + 1]]:
                run.write_free[v] = now + work.offload[n]
        if s == stages - 1:
            _offer_backward(work, run, s, m)
        elif work.channel[s, m] < 0:
            _offer(work, run, FORWARD, s + 1, m)
        else:
            number = _queue_send(work, run, events, now, number, work.channel[s, m], m)
        return number
    if kind == WEIGHTS or not work.split[s]:
        _release(work, run, s, m)
    if kind == BACKWARD:
        if work.split[s]:
            _offer(work, run, WEIGHTS, s, m)
        if s > 0 and work.channel[s - 1, m] < 0:
            _offer_backward(work, run, s - 1, m)
        elif s > 0:
            number = _queue_send(work, run, events, now, number, work.channel[s - 1, m], m + count)
    return number


@njit(cache=True)
def _push(
    work: Work, events: list[tuple[float, int, int]], time: float, number: int,
    kind: int, s: int, m: int,
) -> int:  # fmt: skip
    code = (kind * work.lane.shape[0] + s) * work.lane.shape[1] + m
    heapq.heappush(events, (time, number, code))  # among equal times, first come first served
    return number + 1


@njit(cache=True)
def _touch(work: Work, run: _Run, n: int) -> None:
    """What shares a device with lane n may be able to start."""
    for other in work.near[work.near_first[n] : work.near_first[n + 1]]:
        run.dirty[other] = True


@njit(cache=True)
def _set_idle(work: Work, run: _Run, n: int, idle: bool) -> None:
    for v in work.members[work.members_first[n] : work.members_first[n + 1]]:
        run.idle[v] = idle


@njit(cache=True)
def _hold(work: Work, run: _Run, s: int, m: int, bytes_: float) -> None:
    """Memory of microbatch m at stage s grows by ``bytes_``."""
    n = work.lane[s, m]
    run.held[s, m] += bytes_
    for v in work.members[work.members_first[n] : work.members_first[n + 1]]:
        if run.leader[v] != m:
            run.others[v] += bytes_


@njit(cache=True)
def _release(work: Work, run: _Run, s: int, m: int) -> None:
    """The backward of m has ended at stage s."""
    n = work.lane[s, m]
    _hold(work, run, s, m, -run.held[s, m])
    run.in_flight[n] -= 1
    for v in work.members[work.members_first[n] : work.members_first[n + 1]]:
        run.left[v, m] -= 1
        if run.leader[v] == m and run.left[v, m] == 0:
            _lead(work, run, v)


@njit(cache=True)
def _offer_backward(work: Work, run: _Run, s: int, m: int) -> None:
    """B or I is due; activations that are offloaded must be read first."""
    if work.offload[work.lane[s, m]] == 0:
        _offer(work, run, BACKWARD, s, m)
    elif run.written[s, m]:
        _offer(work, run, READ, s, m)
    else:
        run.waiting[s, m] = True


@njit(cache=True)
def _offer(work: Work, run: _Run, kind: int, s: int, m: int) -> None:
    """Microbatch m may do this at stage s: it waits in its lane's queue, a heap."""
    n = work.lane[s, m]
    row = 3 if kind == READ else kind
    q = 4 * n + row
    run.dirty[n] = True
    keys, heap = run.order[row, s], run.queue[q]
    i = run.length[q]
    run.length[q] += 1
    while i > 0 and keys[heap[(i - 1) // 2]] > keys[m]:
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    heap[i] = m


@njit(cache=True)
def _take(work: Work, run: _Run, q: int, m: int) -> None:
    """Microbatch m leaves its queue."""
    keys, heap = run.order[q % 4, work.stage[q // 4]], run.queue[q]
    run.length[q] -= 1
    size = run.length[q]
    i = 0
    while heap[i] != m:
        i += 1
    if i == size:
        return
    last = heap[size]
    while i > 0 and keys[heap[(i - 1) // 2]] > keys[last]:
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and keys[heap[child + 1]] < keys[heap[child]]:
            child += 1
        if keys[heap[child]] >= keys[last]:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = last


@njit(cache=True)
def _queue_send(
    work: Work, run: _Run, events: list[tuple[float, int, int]], now: float, number: int,
    channel: int, item: int,
) -> int:  # fmt: skip
    run.channel_queue[channel, run.channel_ends[channel, 1]] = item
    run.channel_ends[channel, 1] += 1
    return _send(work, run, events, now, number, channel)


@njit(cache=True)
def _send(
    work: Work, run: _Run, events: list[tuple[float, int, int]], now: float, number: int,
    channel: int,
) -> int:  # fmt: skip
    """The next transfer of a channel, if it is free and something waits."""
    begin, end = run.channel_ends[channel]
    if begin == end or not run.channel_free[channel]:
        return number
    run.channel_free[channel] = False
    run.channel_ends[channel, 0] += 1
    item, count = run.channel_queue[channel, begin], work.lane.shape[1]
    s, m, kind = run.channel_stage[channel], item, SEND_F
    if item >= count:
        s, m, kind = s + 1, item - count, SEND_B
    run.starts[kind, s, m] = now
    return _push(work, events, now + work.seconds[kind, s, m], number, kind, s, m)


@njit(cache=True)
def _start_all(
    work: Work, run: _Run, events: list[tuple[float, int, int]], now: float, number: int
) -> int:
    """Start what can start, the most urgent first."""
    while True:
        best, urgency = -1, np.inf
        chosen = -1
        for n in np.flatnonzero(run.dirty):
            number = _read(work, run, events, now, number, n)
            if not _is_idle(work, run, n):
                continue
            for row in range(3):
                m, wake = _candidate(work, run, n, row, now)
                if wake < np.inf:
                    number = _push(
                        work, events, wake, number, WAKE,
                        n // work.lane.shape[1], n % work.lane.shape[1],
                    )  # fmt: skip
                if m >= 0 and run.order[row, work.stage[n], m] < urgency:
                    best, urgency, chosen = 4 * n + row, run.order[row, work.stage[n], m], m
        if best < 0:
            break
        number = _start(work, run, events, now, number, best, chosen)
    run.dirty[:] = False
    return number


@njit(cache=True)
def _is_idle(work: Work, run: _Run, n: int) -> bool:
    for v in work.members[work.members_first[n] : work.members_first[n + 1]]:
        if not run.idle[v]:
            return False
    return True


@njit(cache=True)
def _candidate(work: Work, run: _Run, n: int, row: int, now: float) -> tuple[int, float]:
    """The microbatch that a queue may start now (-1: none), or when it is to be asked again."""
    q = 4 * n + row
    if run.length[q] == 0:
        return -1, np.inf
    m = run.queue[q, 0]
    if row != WEIGHTS and not _fits(work, run, n, row, m):
        m = _leader(work, run, q)
        if m < 0:
            return -1, np.inf
    if work.offload[n] == 0 or row == WEIGHTS:
        return m, np.inf
    s, earliest = work.stage[n], now
    for v in work.members[work.members_first[n] : work.members_first[n + 1]]:
        if row == FORWARD:  # it is written as soon as it ends
            earliest = max(earliest, run.write_free[v] - work.seconds[FORWARD, s, m])
        else:
            earliest = max(earliest, run.last_read[v] + work.offload[n])
    if earliest > now:
        return -1, earliest
    return m, np.inf


@njit(cache=True)
def _leader(work: Work, run: _Run, q: int) -> int:
    """The microbatch in a queue that leads on all devices of its lane, -1 if there is none."""
    n = q // 4
    first = work.members_first[n]
    m = run.leader[work.members[first]]
    for v in work.members[first : work.members_first[n + 1]]:
        if run.leader[v] != m:
            return -1
    for i in range(run.length[q]):
        if run.queue[q, i] == m:
            return int(m)
    return -1


@njit(cache=True)
def _fits(work: Work, run: _Run, n: int, row: int, m: int) -> bool:
    """Whether limits and memory let m start: F takes what is kept, B or I what is kept again."""
    need = work.again[n]
    if row == FORWARD:
        need = work.kept[n] + work.offloaded[n]
    elif row == 3:
        need = work.offloaded[n]
    leads = True
    for v in work.members[work.members_first[n] : work.members_first[n + 1]]:
        if run.leader[v] != m:
            leads = False
            if need > 0 and run.others[v] + need > work.room[v] - work.alone[v]:
                return False
    return leads or row != FORWARD or run.in_flight[n] < run.limits[n]


@njit(cache=True)
def _read(
    work: Work, run: _Run, events: list[tuple[float, int, int]], now: float, number: int, n: int
) -> int:
    """Begin to read activations from the host for the next backward, if there is memory."""
    q = 4 * n + 3
    while run.length[q] > 0:
        m = run.queue[q, 0]
        if not _fits(work, run, n, 3, m):
            m = _leader(work, run, q)
        if m < 0:
            break
        _take(work, run, q, m)
        _hold(work, run, work.stage[n], m, work.offloaded[n])
        number = _push(work, events, now + work.offload[n], number, READ, work.stage[n], m)
    return number


@njit(cache=True)
def _start(
    work: Work, run: _Run, events: list[tuple[float, int, int]], now: float, number: int,
    q: int, m: int,
) -> int:  # fmt: skip
    n, row = q // 4, q % 4
    s = work.stage[n]
    _take(work, run, q, m)
    _set_idle(work, run, n, False)
    run.starts[row, s, m] = now
    if row == FORWARD:
        run.in_flight[n] += 1
        _hold(work, run, s, m, work.kept[n] + work.offloaded[n])
    elif row == BACKWARD:
        _hold(work, run, s, m, work.again[n])
        if work.offload[n] > 0:
            for v in work.members[work.members_first[n] : work.members_first[n + 1]]:
                run.last_read[v] = now
    return _push(work, events, now + work.seconds[row, s, m], number, row, s, m)
