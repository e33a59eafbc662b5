"""Start times of an order: every device follows its row and starts as early as possible.

This is the model of the schedules' papers: a transfer takes a fixed time and never waits for
another one. `channels` has channels that transfers share.
"""

from dataclasses import dataclass
from typing import Protocol

from stagewright.formulations.plans.actions import SEND_B, SEND_F, Action
from stagewright.formulations.schedules.order import F, I, Order, W
from stagewright.graphs.documents.errors import InputError

Times = tuple[float, ...]
Starts = tuple[Times, ...]


class ActionTimes(Protocol):
    """The times of computations and transfers."""

    def of(self, action: Action) -> float:
        """The time of F, B, I, W, SEND_F or SEND_B."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of S stages, in any unit of time.

    Attributes
    ----------
    forward, input_gradient, weight_gradient
        One time per stage; a whole backward takes the sum of the latter two.
    send_forward, send_backward
        Transfer times from stage s to s + 1 and back, S - 1 values. Between two stages on one
        device a transfer takes no time.

    Raises
    ------
    InputError
        If the numbers of values do not agree.
    """

    forward: Times
    input_gradient: Times
    weight_gradient: Times
    send_forward: Times
    send_backward: Times

    def __post_init__(self) -> None:
        stages = len(self.forward)
        sizes = {
            "input_gradient": stages, "weight_gradient": stages,
            "send_forward": stages - 1, "send_backward": stages - 1,
        }  # fmt: skip
        for name, size in sizes.items():
            if len(getattr(self, name)) != size:
                raise InputError(f"{name} needs {size} values, got {len(getattr(self, name))}")

    def of(self, action: Action) -> float:
        """The time of a computation, or of a transfer from its stage."""
        if action.kind is F:
            return self.forward[action.stage]
        if action.kind is I:
            return self.input_gradient[action.stage]
        if action.kind is SEND_F:
            return self.send_forward[action.stage]
        if action.kind is SEND_B:
            return self.send_backward[action.stage - 1]
        weight = self.weight_gradient[action.stage]
        return weight if action.kind is W else self.input_gradient[action.stage] + weight


def equal_times(
    stages: int,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
    transfer: float = 0.0,
) -> StageTimes:
    """The same times for all stages."""
    sends = (transfer,) * (stages - 1)
    return StageTimes(
        forward=(forward,) * stages,
        input_gradient=(input_gradient,) * stages,
        weight_gradient=(weight_gradient,) * stages,
        send_forward=sends,
        send_backward=sends,
    )


def start_times(order: Order, times: StageTimes) -> Starts:
    """The start of every computation, in the layout of ``order.rows``.

    Raises
    ------
    InputError
        If the devices deadlock; the message names a computation that waits.
    """
    return _Timing(order, times).starts()


@dataclass(frozen=True, slots=True)
class TimedOrder:
    """An order whose computations start at ``starts``, in the layout of its rows."""

    order: Order
    times: StageTimes
    starts: Starts

    def makespan(self) -> float:
        """The end of the last computation."""
        return max(end for _, end in self._spans())

    def longest_span(self) -> float:
        """The longest time from the first start to the last end of a device.

        This is the time of an iteration where iterations overlap: no device waits for the others
        before its optimizer step (Qi et al. 2024, section 4).
        """
        return max(end - start for start, end in self._spans())

    def loads(self) -> Times:
        """The time that each device computes."""
        return tuple(sum(self.times.of(action) for action in row) for row in self.order.rows)

    def idle(self) -> float:
        """Idle time as a fraction of all devices' time until the makespan."""
        whole = len(self.order.rows) * self.makespan()
        return 1 - sum(self.loads()) / whole if whole else 0.0

    def _spans(self) -> list[tuple[float, float]]:
        pairs = zip(self.order.rows, self.starts, strict=True)
        return [(at[0], at[-1] + self.times.of(row[-1])) for row, at in pairs if row]


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
        """Let a device compute until the next computation's input has not arrived."""
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
        """Hand the output of a forward or backward to the stage that needs the output."""
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
