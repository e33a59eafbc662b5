"""Activation memory of schedules: amounts that computations add and free, limits of devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import B, F, I, Order, W
from stagewright.formulations.schedules.placements import Device
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

        Raises
        ------
        InputError
            With the least limit that works.
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
