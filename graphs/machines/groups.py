"""Groups of ranks on a fabric, and the links over which they exchange.

A group is given by its dimensions, inner ones first: (stride, size) is ``size`` ranks, ``stride``
apart. The fabric is full of such groups; the slowest of them decides.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod

import numpy as np

from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.machines.fabric import Fabric, Level

Group = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Crossed:
    """A level whose links a group uses.

    ``way_out`` members at least share the way out of a unit of the next lower level. Of the other
    members of a group every rank reaches at most the part ``share`` over this level.
    """

    level: Level
    way_out: int
    share: float


@dataclass(frozen=True, slots=True)
class Links:
    """The levels that a group of ``size`` ranks crosses, the inner ones first."""

    size: int
    crossed: tuple[Crossed, ...]

    @property
    def latency_seconds(self) -> float:
        """The longest latency of the levels."""
        return max((one.level.latency_seconds for one in self.crossed), default=0.0)

    @property
    def ring_bytes_per_second(self) -> float:
        """Of rings through the group, per rank: a unit is left by all its members' links."""
        ways = (one.way_out * one.level.bytes_per_second for one in self.crossed)
        return min(ways, default=inf)

    @property
    def pair_bytes_per_second(self) -> float:
        """From one member to the next, over the slowest link between two neighbours."""
        return min((one.level.bytes_per_second for one in self.crossed), default=inf)


@lru_cache(maxsize=1 << 14)
def links(fabric: Fabric, group: Group) -> Links:
    """The links of a group's ranks."""
    size = prod(k for _, k in group)
    if size == 1:
        return Links(1, ())
    inside = [_inside(group, level.devices) for level in fabric.levels]
    if None in inside:
        return Links(size, _counted(fabric, _numbers(fabric.devices, group), size))
    found, lower = [], 1
    for level, here in zip(fabric.levels, inside, strict=True):
        assert here is not None
        if here > lower:
            found.append(Crossed(level, lower, (here - lower) / (size - 1)))
        lower = here
    return Links(size, tuple(found))


@lru_cache(maxsize=1 << 12)
def ends(fabric: Fabric, stride: int, size: int) -> Links:
    """The links between the first and the last rank of a group."""
    if size == 1:
        return Links(1, ())
    numbers = _numbers(fabric.devices, ((stride, size),))
    place = np.arange(fabric.devices) // stride % size
    numbers[(place > 0) & (place < size - 1)] = -1
    return Links(2, _counted(fabric, numbers, 2))


def _inside(group: Group, devices: int) -> int | None:
    """How many members of every group are in each unit that has any; None if they differ."""
    found = 1
    for stride, size in group:
        if devices % (stride * size) == 0:
            found *= size
        elif devices % stride == 0 and size % (devices // stride) == 0:
            found *= devices // stride
        elif stride % devices:
            return None
    return found


def _numbers(devices: int, group: Group) -> Ints:
    """The first rank of every rank's group."""
    ranks = np.arange(devices)
    first = ranks.copy()
    for stride, size in group:
        first -= ranks // stride % size * stride
    return first


def _counted(fabric: Fabric, numbers: Ints, size: int) -> tuple[Crossed, ...]:
    """The same by counting all groups; ``numbers`` are negative for ranks in none."""
    ranks = np.flatnonzero(numbers >= 0)
    group, found, inner = numbers[ranks], [], 1
    for level in fabric.levels:
        members = _sizes(group * fabric.devices + ranks // inner)
        around = _sizes(group * fabric.devices + ranks // level.devices)
        if (around > members).any():
            way_out = int(members[around > members].min())
            share = float((around - members).max()) / (size - 1)
            found.append(Crossed(level, way_out, share))
        inner = level.devices
    return tuple(found)


def _sizes(keys: Ints) -> Ints:
    """How often every key appears."""
    _, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    found: Ints = counts[place]
    return found
