"""Groups of ranks on a fabric, and the links over which they exchange.

A group is given by its dimensions, inner ones first: (stride, size) is ``size`` ranks, ``stride``
apart. The fabric is full of such groups; the slowest of them decides.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

import numpy as np

from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.machines.fabric import Fabric, Level

Group = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Crossed:
    """A level whose links a group uses.

    ``way_out`` members at least share the way out of a unit of the next lower level. Of the other
    members of a group every rank reaches at most the part ``share`` over this level. ``hops`` of
    the size - 1 from the first to the last member of a ring are between units of this level.
    """

    level: Level
    way_out: int
    share: float
    hops: int


@dataclass(frozen=True, slots=True)
class CrossedLevels:
    """The levels that a group crosses, the inner ones first; at least one."""

    crossed: tuple[Crossed, ...]

    @property
    def latency_seconds(self) -> float:
        """The longest latency of the levels."""
        return max(one.level.latency_seconds for one in self.crossed)

    @property
    def ring_latency_seconds(self) -> float:
        """The latencies of all hops from the first to the last member of a ring."""
        return sum(one.hops * one.level.latency_seconds for one in self.crossed)

    @property
    def ring_bytes_per_second(self) -> float:
        """Bandwidth per rank of rings through the group: all members' links leave a unit."""
        return min(one.way_out * one.level.bytes_per_second for one in self.crossed)

    @property
    def pair_bytes_per_second(self) -> float:
        """Bandwidth from a member to the next, over the slowest link between two neighbours."""
        return min(one.level.bytes_per_second for one in self.crossed)


@dataclass(frozen=True, slots=True)
class GroupWays:
    """The different ways of the groups of ``size`` ranks; none if a group is one rank."""

    size: int
    ways: tuple[CrossedLevels, ...]


@lru_cache(maxsize=1 << 14)
def links(fabric: Fabric, group: Group) -> GroupWays:
    """The links of a group's ranks."""
    size = prod(k for _, k in group)
    if size == 1:
        return GroupWays(1, ())
    inside = [_inside(group, level.devices) for level in fabric.levels]
    if None in inside:
        return GroupWays(size, _counted(fabric, _numbers(fabric.devices, group), size))
    found, lower = [], 1
    for level, here in zip(fabric.levels, inside, strict=True):
        assert here is not None
        if here > lower:
            hops = size // lower - size // here
            found.append(Crossed(level, lower, (here - lower) / (size - 1), hops))
        lower = here
    return GroupWays(size, (CrossedLevels(tuple(found)),))


@lru_cache(maxsize=1 << 12)
def ends(fabric: Fabric, stride: int, size: int) -> GroupWays:
    """The links between the first and the last rank of a group."""
    if size == 1:
        return GroupWays(1, ())
    numbers = _numbers(fabric.devices, ((stride, size),))
    place = np.arange(fabric.devices) // stride % size
    numbers[(place > 0) & (place < size - 1)] = -1
    return GroupWays(2, _counted(fabric, numbers, 2))


def _inside(group: Group, devices: int) -> int | None:
    """Members of a group in each unit that has members; None if these numbers differ."""
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


def _counted(fabric: Fabric, numbers: Ints, size: int) -> tuple[CrossedLevels, ...]:
    """The same by counting all groups; ``numbers`` are negative for ranks in none."""
    ranks = np.flatnonzero(numbers >= 0)
    _, group = np.unique(numbers[ranks], return_inverse=True)
    sizes = [1, *(level.devices for level in fabric.levels)]
    units = [_units(group * fabric.devices + ranks // one, fabric.devices) for one in sizes]
    columns = []
    for (members, lower), (near, here) in pairwise(units):
        far = near - members
        # Per group: the fewest members of a unit that is left, and the most that a rank reaches.
        way_out = np.full(group.max() + 1, fabric.devices)
        np.minimum.at(way_out, group[far > 0], members[far > 0])
        most = np.zeros(len(way_out), dtype=np.int64)
        np.maximum.at(most, group, far)
        # A ring passes through the members of one unit after the other.
        columns += [way_out, most, lower - here]
    return tuple(_way(fabric, row, size) for row in np.unique(np.stack(columns, axis=1), axis=0))


def _way(fabric: Fabric, row: Ints, size: int) -> CrossedLevels:
    found = []
    for level, (way_out, far, hops) in zip(fabric.levels, row.reshape(-1, 3), strict=True):
        if far:
            found.append(Crossed(level, int(way_out), float(far) / (size - 1), int(hops)))
    return CrossedLevels(tuple(found))


def _units(keys: Ints, devices: int) -> tuple[Ints, Ints]:
    """Members of every member's unit, and units of every group, of keys group x devices + unit."""
    units, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return counts[place], np.bincount(units // devices)
