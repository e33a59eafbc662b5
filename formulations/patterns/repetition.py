"""Repetitions: periodic schedules of k microbatches, for any blocks of work on shared resources.

A microbatch is a partial order of *blocks*. A block occupies one or several resources (devices,
channels) for a fixed time. *Holdings* take room in a store, such as the memory of a device, from
the start of one block to the end of a later one. A repetition of length k gives the starts of k
consecutive microbatches; the same starts follow one period later for the next k, and so on.

Tessel (Lin et al., HPCA 2024) searches such a piece for k = 1 and calls it the repetend. MadPipe's
`PatternProblem` is the case k = 1 of a chain with whole backwards; it adds all-reduces, versions
of weights and working memory, which have no place here.

Microbatches are identical, so in some repetition of least period every block processes them in the
order of their indices: sort the starts of each block, as in `makespan`. The constraints count
starts and ends only, so they still hold.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from stagewright.formulations.patterns.pattern import TOLERANCE, overlaps
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.errors import InputError, InvalidPlan


@dataclass(frozen=True, slots=True)
class Holding:
    """``amount`` is held from the start of block ``first`` to the end of block ``last``."""

    first: int
    last: int
    amount: float


@dataclass(frozen=True, slots=True)
class Room:
    """At most ``capacity`` is held at a time by all microbatches together.

    All blocks of the holdings share a resource, so they do not overlap. What a block gives back at
    its end could as well be given back at its start.
    """

    name: str
    capacity: float
    holdings: tuple[Holding, ...]


@dataclass(frozen=True)
class RepetitionProblem:
    """Repeat the blocks of a microbatch with the least period per microbatch.

    Attributes
    ----------
    names
        A name per block, shape (n,).
    seconds
        Time per block, positive, in any unit; shape (n,).
    resources
        The resources that each block occupies, shape (n,) of any sizes; a block without any delays
        those after it only.
    before
        Pairs (i, j): in every microbatch block j starts when block i has ended, or later. Blocks
        are numbered in such an order: i < j.
    rooms
        What is limited over time.
    """

    names: tuple[str, ...]
    seconds: tuple[float, ...]
    resources: tuple[tuple[int, ...], ...]
    before: tuple[tuple[int, int], ...]
    rooms: tuple[Room, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.seconds)
        if n == 0 or (len(self.names), len(self.resources)) != (n, n):
            raise InputError("a repetition needs one name, time and list of resources per block")
        if not any(self.resources):
            raise InputError("a repetition needs a block that occupies a resource")
        for name, seconds in zip(self.names, self.seconds, strict=True):
            if not (math.isfinite(seconds) and seconds > 0):
                raise InputError(f"block {name} must take a positive time, got {seconds}")
        for i, j in self.before:
            if not 0 <= i < j < n:
                raise InputError(f"before needs pairs i < j of blocks 0 to {n - 1}, got {(i, j)}")
        for room in self.rooms:
            self._require_room(room)

    def _require_room(self, room: Room) -> None:
        blocks = {i for one in room.holdings for i in (one.first, one.last)}
        if not blocks <= {*range(len(self.seconds))}:
            raise InputError(f"room {room.name} has holdings of unknown blocks")
        if blocks and not set.intersection(*(set(self.resources[i]) for i in blocks)):
            raise InputError(f"room {room.name} needs a resource that all its blocks occupy")
        for one in room.holdings:
            if self.path_seconds(one.first, one.last) is None:
                pair = f"{self.names[one.first]} to {self.names[one.last]}"
                raise InputError(f"room {room.name}: {pair} is held, but has no path of before")
            if not (math.isfinite(one.amount) and one.amount >= 0):
                raise InputError(f"room {room.name} has an amount of {one.amount}")

    @cached_property
    def shared(self) -> dict[int, tuple[int, ...]]:
        """The blocks that occupy each resource."""
        used = sorted({r for resources in self.resources for r in resources})
        blocks = range(len(self.seconds))
        return {r: tuple(i for i in blocks if r in self.resources[i]) for r in used}

    @cached_property
    def _paths(self) -> tuple[dict[int, float], ...]:
        """Per block i the blocks j from it on, with the longest time from i's start to j's end."""
        longest = [{i: seconds} for i, seconds in enumerate(self.seconds)]
        for i, j in sorted(self.before, reverse=True):
            for last, seconds in longest[j].items():
                longest[i][last] = max(self.seconds[i] + seconds, longest[i].get(last, 0.0))
        return tuple(longest)

    def path_seconds(self, first: int, last: int) -> float | None:
        """The least time from the start of ``first`` to the end of ``last``; None: no path."""
        return self._paths[first].get(last)

    def successors(self, block: int) -> frozenset[int]:
        """The block and all that follow it."""
        return frozenset(self._paths[block])

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of each part that no arc of ``before`` joins to another."""
        n = len(self.seconds)
        first, last = np.array(self.before, dtype=int).reshape(-1, 2).T
        arcs = sparse.coo_array((np.ones(len(first)), (first, last)), shape=(n, n))
        count, labels = csgraph.connected_components(arcs, directed=False)
        return tuple(tuple(np.flatnonzero(labels == part).tolist()) for part in range(count))

    def evaluate(self, repetition: "Repetition") -> float:
        """Check every rule and return the period per microbatch.

        Raises
        ------
        InvalidPlan
            If a rule is broken; the message names the first one.
        """
        for problem in self._broken(repetition):
            raise InvalidPlan(problem)
        return repetition.pace

    def _broken(self, repetition: "Repetition") -> Iterator[str]:
        n, period = len(self.seconds), repetition.period
        flat = [start for starts in repetition.starts for start in starts]
        if not flat or any(len(starts) != n for starts in repetition.starts):
            yield f"a repetition needs {n} starts per microbatch"
            return
        if not (math.isfinite(period) and period > 0 and all(map(math.isfinite, flat))):
            yield "a repetition needs a positive period and finite starts"
            return
        slack = self._slack(repetition)
        for q, starts in enumerate(repetition.starts):
            for i, j in self.before:
                if starts[j] < starts[i] + self.seconds[i] - slack:
                    yield f"{self.names[j]} of microbatch {q} starts before {self.names[i]} ends"
        for members in self.shared.values():
            occupied = {
                f"{self.names[i]} of microbatch {q}": (starts[i], self.seconds[i])
                for q, starts in enumerate(repetition.starts)
                for i in members
            }
            yield from overlaps(occupied, period, slack)
        yield from self._overfull(repetition)

    def peak(self, repetition: "Repetition", room: Room) -> float:
        """The most that is held at a time."""
        return self._peak(repetition, room, self._slack(repetition))

    def fits(self, repetition: "Repetition") -> bool:
        """Whether no room holds more than its capacity."""
        return not any(self._overfull(repetition))

    def _slack(self, repetition: "Repetition") -> float:
        flat = [start for starts in repetition.starts for start in starts]
        return TOLERANCE * (repetition.period + max(flat) - min(flat) + max(self.seconds))

    def _overfull(self, repetition: "Repetition") -> Iterator[str]:
        for room in self.rooms:
            most = self.peak(repetition, room)
            if most > room.capacity * (1 + RELATIVE_TOLERANCE):
                yield f"room {room.name} holds {most:g}, its capacity is {room.capacity:g}"

    def _peak(self, repetition: "Repetition", room: Room, slack: float) -> float:
        """The peak is just after the start of a first block; times within ``slack`` are equal."""
        period, most = repetition.period, 0.0
        instants = {starts[one.first] for starts in repetition.starts for one in room.holdings}
        for instant in instants:
            total = 0.0
            for starts in repetition.starts:
                for one in room.holdings:
                    end = starts[one.last] + self.seconds[one.last]
                    begun = math.floor((instant - starts[one.first] + slack) / period)
                    ended = math.floor((instant - end + slack) / period)
                    total += (begun - ended) * one.amount
            most = max(most, total)
        return most


@dataclass(frozen=True, slots=True)
class Repetition:
    """The starts of k microbatches, shape (k, n); microbatch m + k starts ``period`` after m."""

    period: float
    starts: tuple[tuple[float, ...], ...]

    @property
    def length(self) -> int:
        """The number k of microbatches of a period."""
        return len(self.starts)

    @property
    def pace(self) -> float:
        """The period per microbatch."""
        return self.period / len(self.starts)
