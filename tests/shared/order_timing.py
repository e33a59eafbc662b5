"""Start times of an order by its rows alone: a second timer, beside those of the product."""

from itertools import accumulate

from stagewright.formulations.schedules.order import B, F, I, Order, W
from stagewright.formulations.schedules.timing import StageTimes, Starts, TimedOrder
from stagewright.graphs.documents.errors import InputError


def start_times(order: Order, times: StageTimes) -> Starts:
    """The start of every computation, in the layout of ``order.rows``.

    Raises
    ------
    InputError
        If the devices deadlock; the message names a computation that waits.
    """
    return _Timing(order, times).starts()


def timed(order: Order, times: StageTimes) -> TimedOrder:
    """The order with its earliest start times."""
    return TimedOrder(order, times, start_times(order, times))


def makespan(order: Order, times: StageTimes) -> float:
    """The end of the last computation."""
    return timed(order, times).makespan()


def longest_span(order: Order, times: StageTimes) -> float:
    """The longest time from the first start to the last end of a device."""
    return timed(order, times).longest_span()


def bubble(order: Order, times: StageTimes) -> float:
    """Idle time as a fraction of all devices' time until the makespan."""
    return timed(order, times).idle()


class _Timing:
    """The devices' progress: which computations have an end, and who waits for which."""

    def __init__(self, order: Order, times: StageTimes) -> None:
        self.order, self.times = order, times
        self.last = len(order.paths[0]) - 1
        self.begun: list[list[float]] = [[] for _ in order.rows]
        self.clock = [0.0] * len(order.rows)
        self.arrival: dict[tuple[bool, int, int], float] = {}  # by (forward?, stage, microbatch)
        self.waiting: dict[tuple[bool, int, int], int] = {}

    def starts(self) -> Starts:
        ready = [*range(len(self.order.rows))]
        while ready:
            self._run(ready.pop(), ready)
        for row, begun in zip(self.order.rows, self.begun, strict=True):
            if len(begun) < len(row):
                raise InputError(
                    f"deadlock: the devices wait for each other, one of them at {row[len(begun)]}"
                )
        return tuple(map(tuple, self.begun))

    def _run(self, device: int, ready: list[int]) -> None:
        """Let a device compute until something that it needs has not arrived."""
        row, begun, arrival = self.order.rows[device], self.begun[device], self.arrival
        now = self.clock[device]
        for k in range(len(begun), len(row)):
            action = row[k]
            stage, kind, m = action.stage, action.kind, action.microbatch or 0
            if kind is not W and (stage or kind is not F):
                need = (kind is F, stage, m)
                if need not in arrival:
                    self.waiting[need] = device
                    break
                now = max(now, arrival[need])
            begun.append(now)
            now += self.times.of(action)
            if kind is not W:
                self._deliver(kind is F, stage, m, now, ready)
        self.clock[device] = now

    def _deliver(self, forward: bool, stage: int, m: int, now: float, ready: list[int]) -> None:
        """What a forward or backward makes, at the stage that needs it."""
        if forward and stage == self.last:
            need, delay = (False, stage, m), 0.0
        elif forward:
            need, delay = (True, stage + 1, m), self.times.send_forward[stage]
        elif stage:
            need, delay = (False, stage - 1, m), self.times.send_backward[stage - 1]
        else:
            return
        path = self.order.paths[self.order.path_of[m]]
        self.arrival[need] = now + (delay if path[stage] != path[need[1]] else 0.0)
        if need in self.waiting:
            ready.append(self.waiting.pop(need))


def most_on_device(order: Order) -> tuple[int, ...]:
    """The largest number of microbatches in flight of all stages of each device together."""
    steps = {F: 1, B: -1, I: 0, W: -1}
    levels = (accumulate(steps[one.kind] for one in row) for row in order.rows)
    return tuple(max(one, default=0) for one in levels)
