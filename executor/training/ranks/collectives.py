"""Small values that all ranks of a job bring together."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stagewright.executor.training.ranks.rank import Place

T = TypeVar("T")


def gathered(place: Place, own: T) -> list[T] | None:
    """Every rank's value, on rank 0; None on the other ranks. All ranks call this function."""
    if place.group is None:
        return [own]
    shares: list[Any] | None = [None] * len(place.devices) if place.number == 0 else None
    dist.gather_object(own, shares, group=place.group, group_dst=0)
    return shares


def summed(
    place: Place, values: tuple[float, ...], group: dist.ProcessGroup | None
) -> tuple[float, ...]:
    """The sums of ``values`` over the processes of ``group``; None is this process alone."""
    if group is None:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=place.wire)
    dist.all_reduce(total, group=group)
    return tuple(total.tolist())
