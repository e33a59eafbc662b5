"""Compiled event-driven simulation that schedules the actions of a structure within memory.

Every lane has queues for F, B or I, W, and for reads from the host, sorted by priority. Channels
are first come, first served.
"""

import math

import numpy as np

from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.compiled import lean, lean_entry, refer
from stagewright.solvers.pipelines.structures.state import (
    BACKWARD,
    DIRTY,
    EVENTS,
    FORWARD,
    NONE,
    READ,
    READ_ROW,
    READY,
    SEND_B,
    SEND_F,
    WEIGHTS,
    WRITTEN,
    ListWork,
    RunState,
    fits,
    forget,
    hold,
    lead,
    offer,
    offer_backward,
    pop,
    push,
    take,
    touch,
    urgency_of,
)


def list_schedule(
    work: ListWork, keys: Floats, limits: Ints, ceiling: float
) -> tuple[bool, Floats, Floats]:
    """Schedule by priorities ``keys`` with at most ``limits`` microbatches in flight on each lane.

    Returns
    -------
    Whether the last computation or transfer ends by ``ceiling`` (the simulation stops as soon as it
    does not), the starts by kind, stage and microbatch, and the most bytes of every device.
    """
    stages, count = work.lane.shape
    lanes, devices, channels = len(work.stage), len(work.room), 1 + work.channel.max()
    most = lanes + channels + 2 * stages * count
    run = RunState(
        keys, limits, np.full((5, stages, count), np.nan), np.zeros(4, np.int64),
        np.zeros((lanes, 4, count), np.int64), np.zeros((lanes, 4), np.int64),
        np.zeros((lanes, 4), np.int64), np.zeros(most), np.zeros((most, 4), np.int64),
        np.ones(channels, np.bool_), np.full(channels, NONE), np.full(channels, NONE),
        np.full(2 * stages * count, NONE), np.ones(devices, np.bool_),
        np.zeros((devices, count), np.int64), np.zeros(devices, np.int64), np.zeros(devices),
        np.zeros(devices), np.zeros(devices), np.zeros((stages, count)),
        np.zeros(lanes, np.int64), np.zeros(devices), np.full(devices, -np.inf),
        np.full(lanes, np.inf), np.zeros((stages, count), np.bool_),
        np.zeros((stages, count), np.bool_), np.zeros(lanes, np.bool_), np.zeros(lanes, np.int64),
        np.zeros(lanes, np.bool_), np.zeros(lanes, np.int64), np.zeros(lanes),
        np.zeros((lanes, 2), np.int64), bool(work.offload.max() >= 0),
    )  # fmt: skip
    return _simulate(work, run, ceiling), run.starts, run.peak


@lean_entry
def _simulate(work: ListWork, run: RunState, ceiling: float) -> bool:
    work, run = refer(work), refer(run)
    _begin(work, run)
    now = 0.0
    while now < math.inf:
        if now > ceiling:
            return False
        while run.counts[EVENTS] and run.time[0] <= now:
            kind, s, m = run.event[0, 1], run.event[0, 2], run.event[0, 3]
            pop(run)
            _happen(work, run, now, kind, s, m)
        _start_all(work, run, now)
        now = run.time[0] if run.counts[EVENTS] else math.inf
        if run.offloads:
            now = _woken(run, now)
    return True


@lean
def _begin(work: ListWork, run: RunState) -> None:
    """Choose leaders, and offer all microbatches to the first stage."""
    for s in range(run.held.shape[0]):
        for m in range(run.held.shape[1]):
            n = work.lane[s, m]
            for i in range(work.member_ends[n], work.member_ends[n + 1]):
                run.left[work.members[i], m] += 1
    for v in range(len(run.leader)):
        lead(work, run, v)
    for m in range(run.held.shape[1]):
        offer(work, run, FORWARD, 0, m)


@lean
def _woken(run: RunState, now: float) -> float:
    """The next time at which something happens; lanes that waited for it are looked at again."""
    for n in range(len(run.wake)):
        now = min(now, run.wake[n])
    for n in range(len(run.wake)):
        if run.wake[n] <= now:
            run.wake[n] = math.inf
            touch(run, n)
    return now


# Ends of actions.


@lean
def _happen(work: ListWork, run: RunState, now: float, kind: int, s: int, m: int) -> None:
    """The end of an action."""
    if kind == FORWARD:
        _forwarded(work, run, now, s, m)
    elif kind == BACKWARD:
        _differentiated(work, run, now, s, m)
    elif kind == WEIGHTS:
        _released(work, run, s, m)
        forget(work, run, s, m)
    elif kind == SEND_F:
        offer(work, run, FORWARD, s + 1, m)
        _next_send(work, run, now, work.channel[s, m])
    elif kind == SEND_B:
        offer_backward(work, run, s - 1, m)
        _next_send(work, run, now, work.channel[s - 1, m])
    elif kind == READ:
        offer(work, run, BACKWARD, s, m)
    else:
        n = _touched(work, run, s, m)
        hold(work, run, s, m, -work.offloaded[n])
        run.written[s, m] = True
        if run.waiting[s, m]:
            offer(work, run, READ_ROW, s, m)


@lean
def _forwarded(work: ListWork, run: RunState, now: float, s: int, m: int) -> None:
    n = _released(work, run, s, m)
    seconds = work.offload[n]
    if seconds >= 0:
        push(run, now + seconds, WRITTEN, s, m)
        for i in range(work.member_ends[n], work.member_ends[n + 1]):
            run.write_free[work.members[i]] = now + seconds
    if s == len(work.lane) - 1:
        offer_backward(work, run, s, m)
    elif work.channel[s, m] == NONE:
        offer(work, run, FORWARD, s + 1, m)
    else:
        _send(work, run, now, work.channel[s, m], SEND_F, s, m)


@lean
def _differentiated(work: ListWork, run: RunState, now: float, s: int, m: int) -> None:
    _released(work, run, s, m)
    if work.split[s]:
        offer(work, run, WEIGHTS, s, m)
    else:
        forget(work, run, s, m)
    if s > 0 and work.channel[s - 1, m] == NONE:
        offer_backward(work, run, s - 1, m)
    elif s > 0:
        _send(work, run, now, work.channel[s - 1, m], SEND_B, s, m)


@lean
def _touched(work: ListWork, run: RunState, s: int, m: int) -> int:
    """Mark the lanes near those of a computation; returns its lane."""
    n = work.lane[s, m]
    for i in range(work.near_ends[n], work.near_ends[n + 1]):
        touch(run, work.near[i])
    return int(n)


@lean
def _released(work: ListWork, run: RunState, s: int, m: int) -> int:
    """Mark the runners as idle; returns their lane."""
    n = _touched(work, run, s, m)
    for i in range(work.member_ends[n], work.member_ends[n + 1]):
        run.idle[work.members[i]] = True
    return n


@lean
def _send(work: ListWork, run: RunState, now: float, c: int, kind: int, s: int, m: int) -> None:
    """Queue a transfer on channel c, as a number of its kind, stage and microbatch."""
    item = ((kind - SEND_F) * len(work.lane) + s) * work.lane.shape[1] + m
    if run.oldest[c] == NONE:
        run.oldest[c] = item
    else:
        run.following[run.newest[c]] = item
    run.newest[c] = item
    if run.free[c]:
        _next_send(work, run, now, c)


@lean
def _next_send(work: ListWork, run: RunState, now: float, c: int) -> None:
    item, (stages, count) = run.oldest[c], work.lane.shape
    run.free[c] = item == NONE
    if item != NONE:
        run.oldest[c] = run.following[item]
        kind, s, m = SEND_F + item // (stages * count), item // count % stages, item % count
        run.starts[kind, s, m] = now
        push(run, now + work.seconds[kind, s, m], kind, s, m)


# Starts.


@lean
def _start_all(work: ListWork, run: RunState, now: float) -> None:
    """Start all actions that can start, the most urgent first."""
    for k in range(run.counts[DIRTY]):
        n = run.dirty[k]
        run.is_dirty[n] = False
        if _finds_urgent(work, run, n, now):
            run.is_ready[n] = True
            run.ready[run.counts[READY]] = n
            run.counts[READY] += 1
    run.counts[DIRTY] = 0
    while run.counts[READY]:
        started = _most_urgent(run)
        _start(work, run, now, started, run.choice[started, 0], run.choice[started, 1])
        for i in range(work.near_ends[started], work.near_ends[started + 1]):
            n = work.near[i]
            run.is_ready[n] = run.is_ready[n] and _finds_urgent(work, run, n, now)
        left = 0
        for k in range(run.counts[READY]):
            if run.is_ready[run.ready[k]]:
                run.ready[left] = run.ready[k]
                left += 1
        run.counts[READY] = left


@lean
def _most_urgent(run: RunState) -> int:
    """The lane with the most urgent action of those that can start."""
    found = run.ready[0]
    for k in range(1, run.counts[READY]):
        n = run.ready[k]
        key, least = run.urgency[n], run.urgency[found]
        if key < least or (key == least and n < found):
            found = n
    return int(found)


@lean
def _finds_urgent(work: ListWork, run: RunState, n: int, now: float) -> bool:
    """Whether lane n can start an action now; notes its priority, row and microbatch."""
    if work.offload[n] >= 0:
        _read(work, run, n, now)
    for i in range(work.member_ends[n], work.member_ends[n + 1]):
        if not run.idle[work.members[i]]:
            return False
    is_found = False
    for row in range(3):
        if run.first[n, row] == run.last[n, row]:
            continue
        m = _candidate(work, run, n, row, now)
        if m != NONE:
            key = urgency_of(run, row, work.stage[n], m)
            if not is_found or key < run.urgency[n]:
                is_found, run.urgency[n] = True, key
                run.choice[n, 0], run.choice[n, 1] = row, m
    return is_found


@lean
def _candidate(work: ListWork, run: RunState, n: int, row: int, now: float) -> int:
    """The microbatch that can start now from a queue, NONE if there is none."""
    if row == WEIGHTS:
        return int(run.queue[n, row, run.first[n, row]])
    need = work.kept[n] + work.offloaded[n] if row == FORWARD else work.again[n]
    m = _first_fit(work, run, n, row, need)
    if m == NONE or work.offload[n] < 0:
        return m
    seconds, earliest = work.seconds[FORWARD, work.stage[n], m], -math.inf
    for i in range(work.member_ends[n], work.member_ends[n + 1]):
        v = work.members[i]
        # Writes to the host start when the forward ends; reads are sequential.
        if row == FORWARD:
            earliest = max(earliest, run.write_free[v] - seconds)
        else:
            earliest = max(earliest, run.last_read[v] + work.offload[n])
    if earliest <= now:
        return m
    run.wake[n] = min(run.wake[n], earliest)
    return NONE


@lean
def _first_fit(work: ListWork, run: RunState, n: int, row: int, need: float) -> int:
    """The most urgent microbatch of a queue if it fits, else the leader if it is queued."""
    m = run.queue[n, row, run.first[n, row]]
    if fits(work, run, n, need, m, row == FORWARD):
        return int(m)
    m = run.leader[work.members[work.member_ends[n]]]
    for k in range(run.first[n, row], run.last[n, row]):
        if run.queue[n, row, k] == m and fits(work, run, n, need, m, row == FORWARD):
            return int(m)
    return NONE


@lean
def _read(work: ListWork, run: RunState, n: int, now: float) -> None:
    """Read activations from the host for the next backwards while memory allows."""
    while run.first[n, READ_ROW] < run.last[n, READ_ROW]:
        m = _first_fit(work, run, n, READ_ROW, work.offloaded[n])
        if m == NONE:
            return
        take(run, n, READ_ROW, m)
        hold(work, run, work.stage[n], m, work.offloaded[n])
        push(run, now + work.offload[n], READ, work.stage[n], m)


@lean
def _start(work: ListWork, run: RunState, now: float, n: int, row: int, m: int) -> None:
    s = work.stage[n]
    take(run, n, row, m)
    for i in range(work.member_ends[n], work.member_ends[n + 1]):
        run.idle[work.members[i]] = False
    run.starts[row, s, m] = now
    if row == FORWARD:
        run.in_flight[n] += 1
        hold(work, run, s, m, work.kept[n] + work.offloaded[n])
    elif row == BACKWARD:
        hold(work, run, s, m, work.again[n])
        if work.offload[n] >= 0:
            for i in range(work.member_ends[n], work.member_ends[n + 1]):
                run.last_read[work.members[i]] = now
    push(run, now + work.seconds[row, s, m], row, s, m)
