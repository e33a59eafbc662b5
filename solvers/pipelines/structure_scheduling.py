"""List schedules of any finite structure: greedy, in time, by priorities, within memory.

Whatever falls idle starts the most urgent computation that is ready and fits in memory. It never
gets stuck: on every device the first unfinished microbatch, its leader, may always go on, for
enough memory to finish it is kept free of the others. As the first unfinished microbatch of all is
the leader wherever it still has to go, something can always be done.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.structure import Endings, Work, device_loads
from stagewright.formulations.plans.timing import Blocks
from stagewright.graphs.documents.arrays import Floats, Ints

ForwardOrder = Literal["oldest", "deepest", "broad", "chunks"]
BackwardOrder = Literal["oldest", "broad", "chunks", "newest"]
Urgency = Literal["BFW", "BWF", "WBF", "FBW"]

# Kinds of events; the first five are also rows of `Work.seconds`, the first three of queues.
FORWARD, BACKWARD, WEIGHTS, SEND_F, SEND_B, WRITTEN, READ, WAKE = range(8)
READ_ROW = 3  # a lane's queue of reads from the host
EQUAL = 1e-9  # relative; schedules that differ by less are equally long
ROUNDING = 1e-9
FIRST_RULES = 6


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
    fullest: float  # the largest share of its memory that a device needs
    rule: Rule


def rules_for(work: Work) -> list[Rule]:
    """The rules that are worth trying for a structure.

    The first ``FIRST_RULES`` are of all sorts: where they come nowhere near, the others do not
    either.
    """
    shared = max(map(len, work.places)) > 1
    urgencies: list[Urgency] = ["BFW", "BWF", "WBF"] if work.split.any() else ["BFW"]
    orders: list[tuple[ForwardOrder, BackwardOrder]] = [("oldest", "oldest")]
    if shared:
        orders = [("chunks", "chunks"), ("oldest", "oldest"), ("deepest", "broad"),
                  ("broad", "chunks"), ("broad", "newest")]  # fmt: skip
    first = [Rule(depth, kinds, *orders[0]) for kinds in urgencies[:2] for depth in (1.0, 1.5)]
    first += [Rule(2.0, urgencies[0], *orders[-1]), Rule(math.inf, "FBW", *orders[0])]
    rules = [
        Rule(depth, kinds, *order) for order in orders for kinds in urgencies for depth in DEPTHS
    ]
    rules += [Rule(math.inf, "FBW", *order) for order in orders]
    rules.append(Rule(math.inf, "FBW", backward="newest"))
    return list(dict.fromkeys([*first, *rules]))


def best_schedule(
    work: Work,
    endings: Endings,
    rules: Sequence[Rule],
    ceiling: float = math.inf,
    bound: float = 0.0,
    near: float = math.inf,
    over: Callable[[], bool] = lambda: False,
) -> StructureSchedule | None:
    """The shortest schedule of ``rules`` if it is below ``ceiling``, else None.

    Of schedules that are equally long the one that needs less memory. A schedule that meets
    ``bound`` ends the search; so do the first rules, if none of theirs is below ``near``, and the
    time, if it is ``over``.
    """
    best: StructureSchedule | None = None
    lists, scale = _Lists.of(work), _latencies(work)
    for i, rule in enumerate(rules):
        if over():
            break
        if i == FIRST_RULES and (best.seconds if best else ceiling) > near:
            break
        run = _Run(lists, _keys(work, rule).tolist(), _limits(work, rule, scale))
        found = run.finish(ceiling * (1 + EQUAL))
        if found is None:
            continue
        starts = np.array(found)
        reduces, updates, seconds = _finish(work, endings, starts)
        fullest = _fullest(work, run.peak)
        shorter = seconds < ceiling * (1 - EQUAL)
        equal = best is not None and seconds <= ceiling * (1 + EQUAL)
        if shorter or (best and equal and fullest < best.fullest):
            ceiling = min(ceiling, seconds)
            blocks = _blocks(work, starts, reduces, updates)
            best = StructureSchedule(blocks, seconds, fullest, rule)
            if seconds <= bound * (1 + EQUAL):
                break
    return best


def _fullest(work: Work, peaks: Sequence[float]) -> float:
    """The largest share of its memory that a device needs."""
    return float(((np.array(peaks) + work.memory - work.room) / work.memory).max())


def _limits(work: Work, rule: Rule, scale: Floats) -> list[int]:
    """How many microbatches may be in flight on every lane."""
    count = work.lane.shape[1]
    if rule.depth == math.inf:
        return [count] * len(work.stage)
    most = np.ceil(rule.depth * scale / np.bincount(work.stage) - ROUNDING)
    return [int(each) for each in np.clip(most, 1, count)[work.stage]]


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
    depth = max(map(len, work.places))
    round_ = max(1, stages // depth)

    def chunks(position: Ints) -> Ints:
        return np.asarray(((m // round_) * stages + position) * round_ + m % round_)

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


@dataclass(frozen=True, slots=True)
class _Lists:
    """A structure's work as lists, which are quicker than arrays entry by entry."""

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
    spare: list[float]  # of every device, for others than its leader

    @classmethod
    def of(cls, work: Work) -> "_Lists":
        return cls(
            work.seconds.tolist(), work.split.tolist(), work.lane.tolist(), work.channel.tolist(),
            work.stage.tolist(), work.members, work.near, work.places, work.kept.tolist(),
            work.again.tolist(), work.offloaded.tolist(), work.offload.tolist(),
            work.room.tolist(), (work.room - work.alone).tolist(),
        )  # fmt: skip


class _Run:
    """An event-driven run: what has started, what waits, what is free, what is held in memory.

    Every lane has queues for F, B or I, W, and for reads from the host: heaps by urgency. Channels
    are first come, first served.
    """

    def __init__(self, work: _Lists, keys: list[list[list[float]]], limits: list[int]) -> None:
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
        self.left = [[0] * count for _ in range(devices)]  # stages that are not done
        for row in work.lane:
            for m, n in enumerate(row):
                for v in work.members[n]:
                    self.left[v][m] += 1
        self.leader = [0] * devices
        self.held = [[0.0] * count for _ in range(stages)]
        self.others = [0.0] * devices  # bytes held for other microbatches than the leader
        self.total, self.peak = [0.0] * devices, [0.0] * devices
        self.in_flight = [0] * lanes
        self.write_free = [0.0] * devices
        self.last_read = [-math.inf] * devices
        self.written: set[tuple[int, int]] = set()
        self.waiting: set[tuple[int, int]] = set()  # backwards whose activations are not written
        self.dirty: set[int] = set()  # lanes for which something may have changed
        self.events: list[tuple[float, int, int, int, int]] = []
        self.number = 0
        for v in range(devices):
            self.lead(v)

    def finish(self, ceiling: float) -> list[list[list[float]]] | None:
        """Start times of computations and transfers by kind, stage and microbatch.

        None as soon as it is clear that the last one ends after ``ceiling``.
        """
        for m in range(self.count):
            self.offer(FORWARD, 0, m)
        self.start_all(0.0)
        events, happen = self.events, (
            self.forwarded, self.differentiated, self.weighted, self.sent_forward, self.sent_back,
            self.is_written, self.is_read, self.wake,
        )  # fmt: skip
        while events:
            now = events[0][0]
            if now > ceiling:
                return None
            while events and events[0][0] <= now:
                _, _, kind, s, m = heapq.heappop(events)
                happen[kind](now, s, m)
            self.start_all(now)
        return self.starts

    def push(self, time: float, kind: int, s: int, m: int) -> None:
        self.number += 1  # among equal times, first come first served
        heapq.heappush(self.events, (time, self.number, kind, s, m))

    def offer(self, row: int, s: int, m: int) -> None:
        """Microbatch m may do this at stage s."""
        n = self.work.lane[s][m]
        self.dirty.add(n)
        heapq.heappush(self.queues[n][row], (self.keys[row][s][m], m))

    def offer_backward(self, s: int, m: int) -> None:
        """B or I is due; activations that are offloaded must be read first."""
        if self.work.offload[self.work.lane[s][m]] < 0:
            self.offer(BACKWARD, s, m)
        elif (s, m) in self.written:
            self.offer(READ_ROW, s, m)
        else:
            self.waiting.add((s, m))

    # What follows the end of an action.

    def forwarded(self, now: float, s: int, m: int) -> None:
        n = self.released(s, m)
        seconds = self.work.offload[n]
        if seconds >= 0:
            self.push(now + seconds, WRITTEN, s, m)
            for v in self.work.members[n]:
                self.write_free[v] = now + seconds
        if s == self.last:
            self.offer_backward(s, m)
        elif self.work.channel[s][m] < 0:
            self.offer(FORWARD, s + 1, m)
        else:
            self.send(now, self.work.channel[s][m], (SEND_F, s, m))

    def differentiated(self, now: float, s: int, m: int) -> None:
        self.released(s, m)
        if self.work.split[s]:
            self.offer(WEIGHTS, s, m)
        else:
            self.forget(s, m)
        if s > 0 and self.work.channel[s - 1][m] < 0:
            self.offer_backward(s - 1, m)
        elif s > 0:
            self.send(now, self.work.channel[s - 1][m], (SEND_B, s, m))

    def weighted(self, now: float, s: int, m: int) -> None:
        self.released(s, m)
        self.forget(s, m)

    def sent_forward(self, now: float, s: int, m: int) -> None:
        self.offer(FORWARD, s + 1, m)
        self.next_send(now, self.work.channel[s][m])

    def sent_back(self, now: float, s: int, m: int) -> None:
        self.offer_backward(s - 1, m)
        self.next_send(now, self.work.channel[s - 1][m])

    def is_written(self, now: float, s: int, m: int) -> None:
        n = self.work.lane[s][m]
        self.dirty.update(self.work.near[n])
        self.hold(s, m, -self.work.offloaded[n])
        self.written.add((s, m))
        if (s, m) in self.waiting:
            self.offer(READ_ROW, s, m)

    def is_read(self, now: float, s: int, m: int) -> None:
        self.offer(BACKWARD, s, m)

    def wake(self, now: float, n: int, _: int) -> None:
        self.dirty.add(n)

    def released(self, s: int, m: int) -> int:
        """The runners are idle again; gives their lane."""
        n = self.work.lane[s][m]
        for v in self.work.members[n]:
            self.idle[v] = True
        self.dirty.update(self.work.near[n])
        return n

    def send(self, now: float, channel: int, item: tuple[int, int, int]) -> None:
        self.sending[channel].append(item)
        if self.free[channel]:
            self.next_send(now, channel)

    def next_send(self, now: float, channel: int) -> None:
        waiting = self.sending[channel]
        self.free[channel] = not waiting
        if waiting:
            kind, s, m = waiting.popleft()
            self.starts[kind][s][m] = now
            self.push(now + self.work.seconds[kind][s][m], kind, s, m)

    # Memory.

    def lead(self, v: int) -> None:
        """The next leader of a device, if the present one is done; its bytes no longer count."""
        left, m = self.left[v], self.leader[v]
        while m < self.count and left[m] == 0:
            m += 1
        self.leader[v] = m
        if m < self.count:
            for n in self.work.places[v]:
                s = self.work.stage[n]
                if self.work.lane[s][m] == n:
                    self.others[v] -= self.held[s][m]

    def hold(self, s: int, m: int, more: float) -> None:
        """What is held for microbatch m at stage s grows by ``more`` bytes."""
        if more == 0:
            return
        self.held[s][m] += more
        for v in self.work.members[self.work.lane[s][m]]:
            self.total[v] += more
            self.peak[v] = max(self.peak[v], self.total[v])
            if self.leader[v] != m:
                self.others[v] += more

    def forget(self, s: int, m: int) -> None:
        """The backward of m has ended at stage s."""
        n = self.work.lane[s][m]
        self.hold(s, m, -self.held[s][m])
        self.in_flight[n] -= 1
        for v in self.work.members[n]:
            self.left[v][m] -= 1
            if self.leader[v] == m and self.left[v][m] == 0:
                self.lead(v)

    def fits(self, n: int, need: float, m: int, limited: bool) -> bool:
        """Whether memory, and the limit in flight, let m start on lane n."""
        leads = True
        for v in self.work.members[n]:
            if need > 0 and self.total[v] + need > self.work.room[v]:
                return False  # until a W, or a transfer to the host, is done
            if self.leader[v] != m:
                leads = False
                if need > 0 and self.others[v] + need > self.work.spare[v]:
                    return False
        return leads or not limited or self.in_flight[n] < self.limits[n]

    # Starts.

    def start_all(self, now: float) -> None:
        """Start what can start, the most urgent first."""
        found: dict[int, tuple[float, int, int, int]] = {}
        changed = [*self.dirty]
        self.dirty.clear()
        while changed:
            for n in changed:
                urgent = self.most_urgent(n, now)
                if urgent is not None:
                    found[n] = urgent
                else:
                    found.pop(n, None)
            if not found:
                return
            _, started, row, m = min(found.values())
            self.start(now, started, row, m)
            changed = [n for n in self.work.near[started] if n in found]
            if not changed:
                return

    def most_urgent(self, n: int, now: float) -> tuple[float, int, int, int] | None:
        """What lane n would start now: urgency, lane, row and microbatch."""
        if self.work.offload[n] >= 0:
            self.read(n, now)
        idle = self.idle
        for v in self.work.members[n]:
            if not idle[v]:
                return None
        best = None
        for row in (FORWARD, BACKWARD, WEIGHTS):
            if self.queues[n][row] and (m := self.candidate(n, row, now)) >= 0:
                found = (self.keys[row][self.work.stage[n]][m], n, row, m)
                if best is None or found < best:
                    best = found
        return best

    def candidate(self, n: int, row: int, now: float) -> int:
        """The microbatch that a queue may start now, -1 if there is none."""
        if row == WEIGHTS:
            return self.queues[n][row][0][1]
        work = self.work
        need = work.kept[n] + work.offloaded[n] if row == FORWARD else work.again[n]
        m = self.first_fit(n, row, need)
        if m < 0 or work.offload[n] < 0:
            return m
        seconds = work.seconds[FORWARD][work.stage[n]][m]
        earliest = max(
            # What ends is written at once; what is read comes one after the other.
            self.write_free[v] - seconds if row == FORWARD else self.last_read[v] + work.offload[n]
            for v in work.members[n]
        )
        if earliest <= now:
            return m
        self.push(earliest, WAKE, n, 0)
        return -1

    def first_fit(self, n: int, row: int, need: float) -> int:
        """The most urgent microbatch of a queue if it fits, else the leader if it waits there."""
        m = self.queues[n][row][0][1]
        if self.fits(n, need, m, row == FORWARD):
            return m
        m = self.leader[self.work.members[n][0]]
        waits = any(other == m for _, other in self.queues[n][row])
        return m if waits and self.fits(n, need, m, row == FORWARD) else -1

    def take(self, n: int, row: int, m: int) -> None:
        queue = self.queues[n][row]
        if queue[0][1] == m:
            heapq.heappop(queue)
        else:
            queue.remove((self.keys[row][self.work.stage[n]][m], m))
            heapq.heapify(queue)

    def read(self, n: int, now: float) -> None:
        """Read activations from the host for the next backwards, as far as there is memory."""
        work = self.work
        while (
            self.queues[n][READ_ROW] and (m := self.first_fit(n, READ_ROW, work.offloaded[n])) >= 0
        ):
            self.take(n, READ_ROW, m)
            self.hold(work.stage[n], m, work.offloaded[n])
            self.push(now + work.offload[n], READ, work.stage[n], m)

    def start(self, now: float, n: int, row: int, m: int) -> None:
        work, s = self.work, self.work.stage[n]
        self.take(n, row, m)
        for v in work.members[n]:
            self.idle[v] = False
        self.starts[row][s][m] = now
        if row == FORWARD:
            self.in_flight[n] += 1
            self.hold(s, m, work.kept[n] + work.offloaded[n])
        elif row == BACKWARD:
            self.hold(s, m, work.again[n])
            if work.offload[n] >= 0:
                for v in work.members[n]:
                    self.last_read[v] = now
        self.push(now + work.seconds[row][s][m], row, s, m)
