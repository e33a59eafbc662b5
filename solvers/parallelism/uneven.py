"""Lower bounds on pipelines that are not nearly even, by groups of divisions.

A group has p ranks, v chunks and w blocks in every stage but the first and the last, which have any
of the others. A pipeline takes at least as long as each of its ranks by ``Choice.filled``, and so
at least as long as the mean of two of them. The mean of the first and the last rank depends on the
blocks of both, whatever the first has of them: on what the (p v - 2) w blocks between the ends,
which are in a row, leave of the model. The last rank but one has v stages of w blocks.

Thousands of divisions are ruled out in a few operations on arrays of groups. Those that are left
are bounded by their own first and last ranks, and then by all ranks, as the nearly even ones are.
"""

from functools import cached_property

import numpy as np

from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.solvers.parallelism.choices import Choice
from stagewright.solvers.parallelism.divisions import DivisionGroups, DivisionTable, replicas

ROUNDING = 1e-12  # the sums of the layouts are in another order


class _BlockSums:
    """Sums of a quantity of the layers over blocks in a row."""

    def __init__(self, of_layers: Floats) -> None:
        self.ends = float(of_layers[0]), float(of_layers[-1])
        self.total = float(of_layers.sum())
        self.before = np.concatenate(([0.0], np.cumsum(of_layers[1:-1])))
        self.are_alike = bool((of_layers[1:-1] == of_layers[1]).all())

    @cached_property
    def _sums(self) -> Floats:
        """(L + 1, L + 1) sums of n blocks from the i-th on; nan where there are not as many."""
        size = len(self.before)
        stops = np.add.outer(np.arange(size), np.arange(size))
        sums = self.before[np.minimum(stops, size - 1)] - self.before
        return np.where(stops < size, sums, np.nan)

    @cached_property
    def _least(self) -> Floats:
        found: Floats = np.fmin.accumulate(self._sums[:, ::-1], axis=1)[:, ::-1]
        return found

    @cached_property
    def _most(self) -> Floats:
        found: Floats = self.before if self.are_alike else np.nanmax(self._sums, axis=1)
        return found

    def least(self, number: Ints, start: Ints | int = 0) -> Floats:
        """The least sum of ``number`` consecutive blocks that begin at ``start`` or later."""
        found: Floats = self.before[number] if self.are_alike else self._least[number, start]
        return found

    def without(self, number: Ints) -> Floats:
        """The least sum of all layers without ``number`` consecutive blocks."""
        found: Floats = self.total - self._most[number]
        return found


def least_seconds(choice: Choice, samples: int, groups: DivisionGroups) -> Floats:
    """A bound on all divisions of every group; infinite where none is allowed."""
    m, allowed = _allowed(choice, samples, groups)
    found = np.full(len(m), np.inf)
    if allowed.any():
        bound = _Bound(choice, samples, groups.only(allowed), m[allowed])
        found[allowed] = bound.seconds * (1 - ROUNDING)
    return found


def least_of_ends(choice: Choice, samples: int, table: DivisionTable) -> Floats:
    """A bound on every division by its first and last rank; infinite where it is not allowed."""
    m, allowed = _allowed(choice, samples, table)
    work = choice.bounds.family.work(samples, choice.least, choice.schedule)
    total, returned = _BlockSums(work.total), _BlockSums(work.total - work.weight)
    p, w, first, inner = table.pipeline, table.middle, table.first, table.chunks - 1
    before_last = first + (p - 2) * w
    way = returned.ends[0] + returned.before[before_last]
    if table.in_v:
        # The first rank has the first and the last stage, the last rank two between them.
        blocks = sum(total.ends) + total.before[first]
        blocks = blocks + total.before[-1] - total.before[table.layers - table.last]
        there = 2 * returned.least(w, before_last)
    else:
        blocks = total.ends[0] + total.before[first] + inner * total.least(w, first * (inner > 0))
        there = returned.ends[1] + returned.before[-1] - returned.before[table.layers - table.last]
        there = there + inner * returned.least(w, before_last * (inner > 0))
    found = np.maximum(m * blocks, way + m * there) * (1 - ROUNDING)
    return np.where(allowed, found, np.inf)


def _allowed(
    choice: Choice, samples: int, of: DivisionGroups | DivisionTable
) -> tuple[Ints, Bools]:
    """Microbatches of every replica, and whether there can be so many, and the experts divided."""
    family = choice.bounds.family
    data, m, allowed = replicas(
        of.pipeline, of.chunks, family.left, family.problem.batch, samples, choice.schedule
    )
    return m, allowed & family.can_divide_experts(data, choice.schedule)


class _Bound:
    """Arrays by group; ``m`` microbatches of each replica."""

    def __init__(self, choice: Choice, samples: int, groups: DivisionGroups, m: Ints) -> None:
        work = choice.bounds.family.work(samples, choice.least, choice.schedule)
        self.p, self.v, self.w, self.m = groups.pipeline, groups.chunks, groups.middle, m
        self.in_v = groups.in_v
        self.forward = _BlockSums(work.forward)
        self.returned = _BlockSums(work.total - work.weight)
        self.backward = _BlockSums(work.total - work.weight - work.forward)
        self.weight = _BlockSums(work.weight)
        self.total = _BlockSums(work.total)
        self.hop = choice.bounds.family.hop_seconds(groups.pipeline, samples, choice.schedule)

    @property
    def seconds(self) -> Floats:
        plain = np.where(self.v == 1, self._plain_ends, self._interleaved_ends)
        return np.maximum(plain, np.where(self.p > 2, self._middle, 0.0))

    @property
    def _between(self) -> Ints:
        """The blocks of all stages but the first and the last."""
        found: Ints = (self.p * self.v - 2) * self.w
        return found

    @property
    def _plain_ends(self) -> Floats:
        """A bound for plain pipelines: the mean of the first rank's and the last rank's bounds."""
        n, m = self._between, self.m
        both = (m - np.minimum(self.p, m)) * self.forward.without(n)
        both += (m - 1) * self.backward.without(n) + self.returned.total
        there = self.returned.total + 2 * (self.p - 1) * self.hop
        here = self.forward.total + m * self.weight.without(n)
        found: Floats = (both + np.maximum(there, here)) / 2
        return found

    @property
    def _interleaved_ends(self) -> Floats:
        """The same, from the first rank's first forward."""
        others = 2 * (self.v - 1)
        way = self.returned.ends[0] + self.returned.before[(self.p - 2) * self.w]
        there = self.m * (
            self.returned.without(self._between) + others * self.returned.least(self.w)
        )
        busy = self.m * (self.total.without(self._between) + others * self.total.least(self.w))
        found: Floats = np.maximum(there + way + 2 * (self.p - 1) * self.hop, busy) / 2
        if self.in_v:  # the first rank has both ends
            return np.maximum(found, self.m * self.total.without(self._between))
        return found

    @property
    def _middle(self) -> Floats:
        """A bound by the last rank but one: its work, with the way to it and back."""
        start = np.maximum(self.p - 3, 0) * self.w
        stages, hops = self.m * self.v, (self.p - 2) * self.hop
        there = self.returned.ends[0] + self.returned.before[start] + 2 * hops
        here = self.forward.ends[0] + self.forward.before[start] + hops
        found: Floats = np.maximum(
            there + stages * self.returned.least(self.w, start),
            here + stages * self.total.least(self.w, start),
        )
        return found
