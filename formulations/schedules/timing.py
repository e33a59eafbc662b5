"""Start times of an order: every device follows its row and starts as early as possible.

This is the model of the schedules' papers: a transfer takes a fixed time and never waits for
another one. `channels` has channels that transfers share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from stagewright.formulations.plans.actions import SEND_B, SEND_F, Action
from stagewright.formulations.schedules.order import B, Device, F, I, Order, W
from stagewright.graphs.documents.errors import InputError

ONE_MICROBATCH = "one microbatch of every stage"
"""The argument of the bound that :meth:`ActivationMemory.least` is."""


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """Memory of a microbatch on each of S stages, and the limit of each device, in any unit.

    Attributes
    ----------
    saved
        From the forward to the input gradient, per stage; a whole backward gives it back.
    kept
        From the input gradient to the weight gradient, per stage; at most ``saved``.
    limit
        For all microbatches of all stages together, per device.

    Raises
    ------
    InputError
        If a stage keeps more than it saves.
    """

    saved: tuple[float, ...]
    kept: tuple[float, ...]
    limit: tuple[float, ...]

    def __post_init__(self) -> None:
        for s, (saved, kept) in enumerate(zip(self.saved, self.kept, strict=True)):
            if not 0 <= kept <= saved:
                raise InputError(f"kept[{s}] must be 0 to {saved} (saved[{s}]), got {kept}")

    def require_room(self, device: Device) -> None:
        """Refuse a limit below one microbatch of every stage on a device.

        Raises InputError with the least limit that works.
        """
        for d, (least, limit) in enumerate(zip(self.least(device), self.limit, strict=True)):
            if limit < least:
                raise InputError(
                    f"limit[{d}] must be at least {least}, one microbatch of the stages on device "
                    f"{d}, got {limit}"
                )

    def least(self, device: Device) -> tuple[float, ...]:
        """Memory of one microbatch of all stages of a device, per device."""
        least = [0.0] * len(self.limit)
        for home, saved in zip(device, self.saved, strict=True):
            least[home] += saved
        return tuple(least)

    def within(self, microbatches: int, device: Device) -> "ActivationMemory":
        """The memory with limits of at most so many microbatches of all stages of a device."""
        most = zip(self.limit, self.least(device), strict=True)
        return replace(self, limit=tuple(min(limit, microbatches * one) for limit, one in most))

    def peaks(self, order: Order) -> tuple[float, ...]:
        """The largest amount that each device holds at one time."""
        return tuple(self._peak(row) for row in order.rows)

    def _peak(self, row: Sequence[Action]) -> float:
        changes = {
            F: self.saved,
            I: [kept - saved for saved, kept in zip(self.saved, self.kept, strict=True)],
            B: [-saved for saved in self.saved],
            W: [-kept for kept in self.kept],
        }
        levels = accumulate(changes[one.kind][one.stage] for one in row)
        return max(levels, default=0.0)


def activations(device: Device, limit: float) -> ActivationMemory:
    """A limit in microbatches of a stage on every device; all is kept until the weight gradient."""
    ones = (1.0,) * len(device)
    return ActivationMemory(ones, ones, (float(limit),) * (1 + max(device)))


Times = tuple[float, ...]
Starts = tuple[Times, ...]


class ActionTimes(Protocol):
    """The times of computations and transfers."""

    def of(self, action: Action) -> float:
        """The time of F, B, I, W, SEND_F or SEND_B."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of S stages, in any unit of time.

    ``forward``, ``input_gradient``, ``weight_gradient``: one time per stage; a whole backward takes
    the sum of the latter two. ``send_forward`` and ``send_backward``: transfer times from stage s
    to s + 1 and back, S - 1 values. Between two stages on one device a transfer takes no time.

    Raises InputError if the numbers of values do not agree.
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
