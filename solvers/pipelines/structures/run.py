"""Event-driven simulation that schedules the actions of a structure within memory."""

import heapq
import math
from collections import deque
from dataclasses import dataclass

from stagewright.formulations.plans.structure import Work

# Kinds of events; the first five index rows of `Work.seconds`, the first three rows of queues.
FORWARD, BACKWARD, WEIGHTS, SEND_F, SEND_B, WRITTEN, READ, WAKE = range(8)
_READ_ROW = 3  # a lane's queue of reads from the host


@dataclass(frozen=True, slots=True)
class WorkLists:
    """A structure's work as lists, which have faster element access than arrays.

    Devices with the same lanes and the same room are always in the same state, so one stands for
    all of them; ``alike`` has its number for every device of the cluster.
    """

    seconds: list[list[list[float]]]
    split: list[bool]
    lane: list[list[int]]
    channel: list[list[int]]
    stage: list[int]
    members: list[list[int]]
    near: list[list[int]]
    places: list[list[int]]
    kept: list[float]
    again: list[float]
    offloaded: list[float]
    offload: list[float]
    room: list[float]
    spare: list[float]  # bytes of every device for microbatches other than its leader
    alike: list[int]

    @classmethod
    def of(cls, work: Work) -> "WorkLists":
        """The lists of ``work``."""
        room, spare = work.room.tolist(), (work.room - work.alone).tolist()
        states = [*zip(map(tuple, work.places), room, spare, strict=True)]
        number = {state: k for k, state in enumerate(dict.fromkeys(states))}
        alike = [number[state] for state in states]
        members = [[*dict.fromkeys(alike[v] for v in devices)] for devices in work.members]
        return cls(
            work.seconds.tolist(), work.split.tolist(), work.lane.tolist(), work.channel.tolist(),
            work.stage.tolist(), members, work.near, [list(places) for places, _, _ in number],
            work.kept.tolist(), work.again.tolist(), work.offloaded.tolist(),
            work.offload.tolist(), [one for _, one, _ in number], [one for _, _, one in number],
            alike,
        )  # fmt: skip


class ListRun:
    """State of the simulation: started actions, queues, idle resources and bytes in memory.

    Every lane has queues for F, B or I, W, and for reads from the host: heaps by priority. Channels
    are first come, first served.
    """

    def __init__(self, work: WorkLists, keys: list[list[list[float]]], limits: list[int]) -> None:
        stages, count = len(work.lane), len(work.lane[0])
        lanes, devices = len(work.stage), len(work.places)
        channels = 1 + max(map(max, work.channel))
        self.work, self.limits, self.count, self.last = work, limits, count, stages - 1
        self.keys = [*keys, keys[BACKWARD]]
        self.starts = [[[math.nan] * count for _ in range(stages)] for _ in range(5)]
        self.queues: list[list[list[tuple[float, int]]]] = [
            [[] for _ in range(4)] for _ in range(lanes)
        ]
        self.sending: list[deque[tuple[int, int, int]]] = [deque() for _ in range(channels)]
        self.free = [True] * channels
        self.idle = [True] * devices
        self.left = [[0] * count for _ in range(devices)]  # stages that are not finished
        for row in work.lane:
            for m, n in enumerate(row):
                for v in work.members[n]:
                    self.left[v][m] += 1
        self.leader = [0] * devices
        self.kept = [[0.0] * count for _ in range(stages)]
        self.others = [0.0] * devices  # bytes of microbatches other than the leader
        self.total, self.peak = [0.0] * devices, [0.0] * devices
        self.in_flight = [0] * lanes
        self.write_free = [0.0] * devices
        self.last_read = [-math.inf] * devices
        self.written: set[tuple[int, int]] = set()
        self.waiting: set[tuple[int, int]] = set()  # backwards with activations still being written
        self.dirty: set[int] = set()  # lanes for which something may have changed
        self.events: list[tuple[float, int, int, int, int]] = []
        self.number = 0
        for v in range(devices):
            self._lead(v)

    def finish(self, ceiling: float) -> list[list[list[float]]] | None:
        """Start times of computations and transfers by kind, stage and microbatch.

        None if the last one ends after ``ceiling``; the simulation stops as soon as that is known.
        """
        for m in range(self.count):
            self._offer(FORWARD, 0, m)
        self._start_all(0.0)
        events, happen = self.events, (
            self._forwarded, self._differentiated, self._weighted, self._sent_forward,
            self._sent_back, self._is_written, self._is_read, self._wake,
        )  # fmt: skip
        while events:
            now = events[0][0]
            if now > ceiling:
                return None
            while events and events[0][0] <= now:
                _, _, kind, s, m = heapq.heappop(events)
                happen[kind](now, s, m)
            self._start_all(now)
        return self.starts

    def _push(self, time: float, kind: int, s: int, m: int) -> None:
        self.number += 1  # among equal times, first come first served
        heapq.heappush(self.events, (time, self.number, kind, s, m))

    def _offer(self, row: int, s: int, m: int) -> None:
        """Queue microbatch m at stage s."""
        n = self.work.lane[s][m]
        self.dirty.add(n)
        heapq.heappush(self.queues[n][row], (self.keys[row][s][m], m))

    def _offer_backward(self, s: int, m: int) -> None:
        """Queue B or I; offloaded activations must be read first."""
        if self.work.offload[self.work.lane[s][m]] < 0:
            self._offer(BACKWARD, s, m)
        elif (s, m) in self.written:
            self._offer(_READ_ROW, s, m)
        else:
            self.waiting.add((s, m))

    # Handlers of the end of an action.

    def _forwarded(self, now: float, s: int, m: int) -> None:
        n = self._released(s, m)
        seconds = self.work.offload[n]
        if seconds >= 0:
            self._push(now + seconds, WRITTEN, s, m)
            for v in self.work.members[n]:
                self.write_free[v] = now + seconds
        if s == self.last:
            self._offer_backward(s, m)
        elif self.work.channel[s][m] < 0:
            self._offer(FORWARD, s + 1, m)
        else:
            self._send(now, self.work.channel[s][m], (SEND_F, s, m))

    def _differentiated(self, now: float, s: int, m: int) -> None:
        self._released(s, m)
        if self.work.split[s]:
            self._offer(WEIGHTS, s, m)
        else:
            self._forget(s, m)
        if s > 0 and self.work.channel[s - 1][m] < 0:
            self._offer_backward(s - 1, m)
        elif s > 0:
            self._send(now, self.work.channel[s - 1][m], (SEND_B, s, m))

    def _weighted(self, now: float, s: int, m: int) -> None:
        self._released(s, m)
        self._forget(s, m)

    def _sent_forward(self, now: float, s: int, m: int) -> None:
        self._offer(FORWARD, s + 1, m)
        self._next_send(now, self.work.channel[s][m])

    def _sent_back(self, now: float, s: int, m: int) -> None:
        self._offer_backward(s - 1, m)
        self._next_send(now, self.work.channel[s - 1][m])

    def _is_written(self, now: float, s: int, m: int) -> None:
        n = self.work.lane[s][m]
        self.dirty.update(self.work.near[n])
        self._hold(s, m, -self.work.offloaded[n])
        self.written.add((s, m))
        if (s, m) in self.waiting:
            self._offer(_READ_ROW, s, m)

    def _is_read(self, now: float, s: int, m: int) -> None:
        self._offer(BACKWARD, s, m)

    def _wake(self, now: float, n: int, _: int) -> None:
        self.dirty.add(n)

    def _released(self, s: int, m: int) -> int:
        """Mark the runners as idle; returns their lane."""
        n = self.work.lane[s][m]
        for v in self.work.members[n]:
            self.idle[v] = True
        self.dirty.update(self.work.near[n])
        return n

    def _send(self, now: float, channel: int, item: tuple[int, int, int]) -> None:
        self.sending[channel].append(item)
        if self.free[channel]:
            self._next_send(now, channel)

    def _next_send(self, now: float, channel: int) -> None:
        waiting = self.sending[channel]
        self.free[channel] = not waiting
        if waiting:
            kind, s, m = waiting.popleft()
            self.starts[kind][s][m] = now
            self._push(now + self.work.seconds[kind][s][m], kind, s, m)

    # Memory.

    def _lead(self, v: int) -> None:
        """Choose the next leader of a device if the current one has finished."""
        left, m = self.left[v], self.leader[v]
        while m < self.count and left[m] == 0:
            m += 1
        self.leader[v] = m
        if m < self.count:
            for n in self.work.places[v]:
                s = self.work.stage[n]
                if self.work.lane[s][m] == n:
                    self.others[v] -= self.kept[s][m]

    def _hold(self, s: int, m: int, more: float) -> None:
        """Add ``more`` bytes to those kept for microbatch m at stage s."""
        if more == 0:
            return
        self.kept[s][m] += more
        for v in self.work.members[self.work.lane[s][m]]:
            self.total[v] += more
            self.peak[v] = max(self.peak[v], self.total[v])
            if self.leader[v] != m:
                self.others[v] += more

    def _forget(self, s: int, m: int) -> None:
        """Free the bytes of microbatch m at stage s after its backward."""
        n = self.work.lane[s][m]
        self._hold(s, m, -self.kept[s][m])
        self.in_flight[n] -= 1
        for v in self.work.members[n]:
            self.left[v][m] -= 1
            if self.leader[v] == m and self.left[v][m] == 0:
                self._lead(v)

    def _fits(self, n: int, need: float, m: int, limited: bool) -> bool:
        """Whether memory and the in-flight limit allow m to start on lane n."""
        leads = True
        for v in self.work.members[n]:
            if need > 0 and self.total[v] + need > self.work.room[v]:
                return False  # until a W or a transfer to the host ends
            if self.leader[v] != m:
                leads = False
                if need > 0 and self.others[v] + need > self.work.spare[v]:
                    return False
        return leads or not limited or self.in_flight[n] < self.limits[n]

    # Starts.

    def _start_all(self, now: float) -> None:
        """Start all actions that can start, the most urgent first."""
        found: dict[int, tuple[float, int, int, int]] = {}
        changed = [*self.dirty]
        self.dirty.clear()
        while changed:
            for n in changed:
                urgent = self._most_urgent(n, now)
                if urgent is not None:
                    found[n] = urgent
                else:
                    found.pop(n, None)
            if not found:
                return
            _, started, row, m = min(found.values())
            self._start(now, started, row, m)
            changed = [n for n in self.work.near[started] if n in found]
            if not changed:
                return

    def _most_urgent(self, n: int, now: float) -> tuple[float, int, int, int] | None:
        """The action that lane n can start now: priority, lane, row and microbatch."""
        if self.work.offload[n] >= 0:
            self._read(n, now)
        idle = self.idle
        for v in self.work.members[n]:
            if not idle[v]:
                return None
        best = None
        for row in (FORWARD, BACKWARD, WEIGHTS):
            if self.queues[n][row] and (m := self._candidate(n, row, now)) >= 0:
                found = (self.keys[row][self.work.stage[n]][m], n, row, m)
                if best is None or found < best:
                    best = found
        return best

    def _candidate(self, n: int, row: int, now: float) -> int:
        """The microbatch that can start now from a queue, -1 if there is none."""
        if row == WEIGHTS:
            return self.queues[n][row][0][1]
        work = self.work
        need = work.kept[n] + work.offloaded[n] if row == FORWARD else work.again[n]
        m = self._first_fit(n, row, need)
        if m < 0 or work.offload[n] < 0:
            return m
        seconds = work.seconds[FORWARD][work.stage[n]][m]
        earliest = max(
            # Writes to the host start when the forward ends; reads are sequential.
            self.write_free[v] - seconds if row == FORWARD else self.last_read[v] + work.offload[n]
            for v in work.members[n]
        )
        if earliest <= now:
            return m
        self._push(earliest, WAKE, n, 0)
        return -1

    def _first_fit(self, n: int, row: int, need: float) -> int:
        """The most urgent microbatch of a queue if it fits, else the leader if it is queued."""
        m = self.queues[n][row][0][1]
        if self._fits(n, need, m, row == FORWARD):
            return m
        m = self.leader[self.work.members[n][0]]
        waits = any(other == m for _, other in self.queues[n][row])
        return m if waits and self._fits(n, need, m, row == FORWARD) else -1

    def _take(self, n: int, row: int, m: int) -> None:
        queue = self.queues[n][row]
        if queue[0][1] == m:
            heapq.heappop(queue)
        else:
            queue.remove((self.keys[row][self.work.stage[n]][m], m))
            heapq.heapify(queue)

    def _read(self, n: int, now: float) -> None:
        """Read activations from the host for the next backwards while memory allows."""
        work = self.work
        while (
            self.queues[n][_READ_ROW]
            and (m := self._first_fit(n, _READ_ROW, work.offloaded[n])) >= 0
        ):
            self._take(n, _READ_ROW, m)
            self._hold(work.stage[n], m, work.offloaded[n])
            self._push(now + work.offload[n], READ, work.stage[n], m)

    def _start(self, now: float, n: int, row: int, m: int) -> None:
        work, s = self.work, self.work.stage[n]
        self._take(n, row, m)
        for v in work.members[n]:
            self.idle[v] = False
        self.starts[row][s][m] = now
        if row == FORWARD:
            self.in_flight[n] += 1
            self._hold(s, m, work.kept[n] + work.offloaded[n])
        elif row == BACKWARD:
            self._hold(s, m, work.again[n])
            if work.offload[n] >= 0:
                for v in work.members[n]:
                    self.last_read[v] = now
        self._push(now + work.seconds[row][s][m], row, s, m)
