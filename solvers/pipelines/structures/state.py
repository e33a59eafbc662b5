"""State of the compiled simulation of list schedules: events, queues and bytes in memory."""

from typing import NamedTuple

import numpy as np

from stagewright.formulations.plans.structure import Work
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.solvers.pipelines.compiled import lean

# Kinds of events; the first five index rows of `Work.seconds`, the first three rows of queues.
FORWARD, BACKWARD, WEIGHTS, SEND_F, SEND_B, WRITTEN, READ = range(7)
READ_ROW = 3  # a lane's queue of reads from the host
NONE = -1
EVENTS, NUMBER, DIRTY, READY = range(4)  # counts of a run


class ListWork(NamedTuple):
    """A structure's work for the kernel.

    Devices with the same lanes and the same room are always in the same state, so one stands for
    all of them; ``alike`` has its number for every device of the cluster. ``members``, ``near`` and
    ``places`` are lists one after the other; that of n is from ``member_ends[n]``, ... to the next.
    """

    seconds: Floats
    split: Bools
    lane: Ints
    channel: Ints
    stage: Ints
    member_ends: Ints
    members: Ints
    near_ends: Ints
    near: Ints
    place_ends: Ints
    places: Ints
    kept: Floats
    again: Floats
    offloaded: Floats
    offload: Floats
    room: Floats
    spare: Floats  # bytes of every device for microbatches other than its leader
    alike: Ints

    @classmethod
    def of(cls, work: Work, merges: bool = True) -> "ListWork":
        """The arrays of ``work``; unless it ``merges``, every device stands for itself."""
        room, spare = work.room.tolist(), (work.room - work.alone).tolist()
        own = range(len(room)) if not merges else [0] * len(room)
        states = [*zip(map(tuple, work.places), room, spare, own, strict=True)]
        number = {state: k for k, state in enumerate(dict.fromkeys(states))}
        alike = [number[state] for state in states]
        members = [[*dict.fromkeys(alike[v] for v in devices)] for devices in work.members]
        arrays = (
            work.seconds, work.split, work.lane, work.channel, work.stage, *_joined(members),
            *_joined(work.near), *_joined([[*places] for places, *_ in number]), work.kept,
            work.again, work.offloaded, work.offload, np.array([one for _, one, *_ in number]),
            np.array([one for _, _, one, _ in number]), np.array(alike),
        )  # fmt: skip
        # The kernel is compiled for contiguous arrays.
        return cls(*map(np.ascontiguousarray, arrays))


def _joined(lists: list[list[int]]) -> tuple[Ints, Ints]:
    ends = np.cumsum([0, *map(len, lists)])
    return ends, np.array([one for each in lists for one in each], np.int64)


class RunState(NamedTuple):
    """State of the simulation: started actions, queues, idle resources and bytes in memory."""

    keys: Floats  # (3, S, M)
    limits: Ints  # (N,)
    starts: Floats  # (5, S, M)
    counts: Ints
    queue: Ints  # (N, 4, M) microbatches from ``first`` to ``last``, the most urgent first
    first: Ints
    last: Ints
    time: Floats  # of events, a heap, with their number, kind, stage and microbatch
    event: Ints
    free: Bools  # channels, with lists of sends that wait
    oldest: Ints
    newest: Ints
    following: Ints  # (2 S M,)
    idle: Bools  # devices
    left: Ints  # (V, M) stages that are not finished
    leader: Ints
    others: Floats  # bytes of microbatches other than the leader
    total: Floats
    peak: Floats
    held: Floats  # (S, M)
    in_flight: Ints  # (N,)
    write_free: Floats
    last_read: Floats
    wake: Floats  # (N,) when a lane that waits for the host is looked at again
    written: Bools  # (S, M)
    waiting: Bools  # backwards with activations still being written
    is_dirty: Bools  # (N,) lanes for which something may have changed
    dirty: Ints
    is_ready: Bools  # (N,) lanes that can start a computation, its priority, row and microbatch
    ready: Ints
    urgency: Floats
    choice: Ints  # (N, 2)
    offloads: bool


# Events: a heap by time; among equal times, first come first served.


@lean
def _is_before(run: RunState, i: int, j: int) -> bool:
    if run.time[i] != run.time[j]:
        return bool(run.time[i] < run.time[j])
    return bool(run.event[i, 0] < run.event[j, 0])


@lean
def _swap(run: RunState, i: int, j: int) -> None:
    run.time[i], run.time[j] = run.time[j], run.time[i]
    for k in range(4):
        run.event[i, k], run.event[j, k] = run.event[j, k], run.event[i, k]


@lean
def push(run: RunState, time: float, kind: int, s: int, m: int) -> None:
    """Add an event."""
    i = run.counts[EVENTS]
    run.counts[EVENTS] += 1
    run.counts[NUMBER] += 1
    run.time[i], run.event[i, 0] = time, run.counts[NUMBER]
    run.event[i, 1], run.event[i, 2], run.event[i, 3] = kind, s, m
    while i and _is_before(run, i, (i - 1) // 2):
        _swap(run, i, (i - 1) // 2)
        i = (i - 1) // 2


@lean
def pop(run: RunState) -> None:
    """Remove the first event."""
    run.counts[EVENTS] -= 1
    size, i = run.counts[EVENTS], 0
    _swap(run, 0, size)
    while 2 * i + 1 < size:
        least = 2 * i + 1
        if least + 1 < size and _is_before(run, least + 1, least):
            least += 1
        if not _is_before(run, least, i):
            return
        _swap(run, i, least)
        i = least


# Queues.


@lean
def urgency_of(run: RunState, row: int, s: int, m: int) -> float:
    """The priority in a queue; the least value comes first."""
    return float(run.keys[BACKWARD if row == READ_ROW else row, s, m])


@lean
def offer(work: ListWork, run: RunState, row: int, s: int, m: int) -> None:
    """Queue microbatch m at stage s."""
    n = work.lane[s, m]
    touch(run, n)
    k, key = run.last[n, row], urgency_of(run, row, s, m)
    while k > run.first[n, row]:
        other = run.queue[n, row, k - 1]
        its = urgency_of(run, row, s, other)
        if its < key or (its == key and other < m):
            break
        run.queue[n, row, k] = other
        k -= 1
    run.queue[n, row, k] = m
    run.last[n, row] += 1


@lean
def take(run: RunState, n: int, row: int, m: int) -> None:
    """Remove microbatch m from a queue."""
    k = run.first[n, row]
    while run.queue[n, row, k] != m:
        k += 1
    while k > run.first[n, row]:
        run.queue[n, row, k] = run.queue[n, row, k - 1]
        k -= 1
    run.first[n, row] += 1


@lean
def offer_backward(work: ListWork, run: RunState, s: int, m: int) -> None:
    """Queue B or I; offloaded activations must be read first."""
    if work.offload[work.lane[s, m]] < 0:
        offer(work, run, BACKWARD, s, m)
    elif run.written[s, m]:
        offer(work, run, READ_ROW, s, m)
    else:
        run.waiting[s, m] = True


@lean
def touch(run: RunState, n: int) -> None:
    """Look at lane n again."""
    if not run.is_dirty[n]:
        run.is_dirty[n] = True
        run.dirty[run.counts[DIRTY]] = n
        run.counts[DIRTY] += 1


# Memory.


@lean
def lead(work: ListWork, run: RunState, v: int) -> None:
    """Choose the next leader of a device if the current one has finished."""
    m, count = run.leader[v], run.left.shape[1]
    while m < count and run.left[v, m] == 0:
        m += 1
    run.leader[v] = m
    if m < count:
        for i in range(work.place_ends[v], work.place_ends[v + 1]):
            s = work.stage[work.places[i]]
            if work.lane[s, m] == work.places[i]:
                run.others[v] -= run.held[s, m]


@lean
def hold(work: ListWork, run: RunState, s: int, m: int, more: float) -> None:
    """Add ``more`` bytes to those kept for microbatch m at stage s."""
    if more == 0:
        return
    run.held[s, m] += more
    n = work.lane[s, m]
    for i in range(work.member_ends[n], work.member_ends[n + 1]):
        v = work.members[i]
        run.total[v] += more
        run.peak[v] = max(run.peak[v], run.total[v])
        if run.leader[v] != m:
            run.others[v] += more


@lean
def forget(work: ListWork, run: RunState, s: int, m: int) -> None:
    """Free the bytes of microbatch m at stage s after its backward."""
    n = work.lane[s, m]
    hold(work, run, s, m, -run.held[s, m])
    run.in_flight[n] -= 1
    for i in range(work.member_ends[n], work.member_ends[n + 1]):
        v = work.members[i]
        run.left[v, m] -= 1
        if run.leader[v] == m and run.left[v, m] == 0:
            lead(work, run, v)


@lean
def fits(work: ListWork, run: RunState, n: int, need: float, m: int, limited: bool) -> bool:
    """Whether memory and the in-flight limit allow m to start on lane n."""
    leads = True
    for i in range(work.member_ends[n], work.member_ends[n + 1]):
        v = work.members[i]
        if need > 0 and run.total[v] + need > work.room[v]:
            return False  # until a W or a transfer to the host ends
        if run.leader[v] != m:
            leads = False
            if need > 0 and run.others[v] + need > work.spare[v]:
                return False
    return leads or not limited or bool(run.in_flight[n] < run.limits[n])
