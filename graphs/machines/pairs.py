"""The links of all pairs of devices: as dense tables, or by the nested groups of the devices.

In most clusters a link depends only on the smallest group that has both devices: a server, a rack,
or the cluster. Questions about many pairs are then answered by counting, in time and memory
proportional to the number of devices. Dense tables of 10,000 devices take 1.6 GB.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from stagewright.graphs.documents.arrays import Bools, Floats, Ints

if TYPE_CHECKING:  # takes as long to import as all else that a short command needs
    from scipy import sparse


class Pairs(Protocol):
    """Bandwidth (bytes/s) and latency (s) of every ordered pair of V devices."""

    def slowest(self, ones: Sequence[int], others: Sequence[int]) -> tuple[float, float]:
        """Least bandwidth and largest latency from a device to another one; inf and 0 if none."""

    def best_between(self, groups: Ints) -> tuple[float, float] | None:
        """Largest bandwidth and least latency of devices in different groups, shape (V,)."""

    def block(self, ones: Sequence[int], others: Sequence[int]) -> tuple[Floats, Floats]:
        """Bandwidths and latencies, shape (ones, others); inf and 0 from a device to itself."""

    def bandwidths(self) -> Floats:
        """All different bandwidths, ascending."""

    def components(self, bandwidth: float) -> Ints:
        """The components of the links above ``bandwidth``, shape (V,), by their first devices."""

    def nearest(self) -> tuple[Floats, Floats]:
        """The n-th largest bandwidth and n-th least latency, both directions, (V - 1,) by n.

        Of the device for which they are best.
        """


@dataclass(frozen=True, slots=True)
class DensePairs:
    """Tables of shape (V, V); the bandwidths have inf on their diagonal, the latencies 0."""

    bandwidth: Floats
    latency: Floats

    def slowest(self, ones: Sequence[int], others: Sequence[int]) -> tuple[float, float]:
        """As in :class:`Pairs`."""
        bandwidth, latency = self.block(ones, others)
        return float(bandwidth.min()), float(latency.max())

    def best_between(self, groups: Ints) -> tuple[float, float] | None:
        """As in :class:`Pairs`."""
        apart = np.not_equal.outer(groups, groups)
        if not apart.any():
            return None
        return float(self.bandwidth[apart].max()), float(self.latency[apart].min())

    def block(self, ones: Sequence[int], others: Sequence[int]) -> tuple[Floats, Floats]:
        """As in :class:`Pairs`."""
        grid = np.ix_(ones, others)
        return self.bandwidth[grid], self.latency[grid]

    def bandwidths(self) -> Floats:
        """As in :class:`Pairs`."""
        return np.unique(self.bandwidth[self._apart])

    def components(self, bandwidth: float) -> Ints:
        """As in :class:`Pairs`."""
        return _components(self.bandwidth > bandwidth)

    def nearest(self) -> tuple[Floats, Floats]:
        """As in :class:`Pairs`."""
        size = len(self.bandwidth)
        width = np.minimum(self.bandwidth, self.bandwidth.T)[self._apart].reshape(size, -1)
        late = np.maximum(self.latency, self.latency.T)[self._apart].reshape(size, -1)
        return np.sort(width, axis=1)[:, ::-1].max(axis=0), np.sort(late, axis=1).min(axis=0)

    @property
    def _apart(self) -> Bools:
        return ~np.eye(len(self.bandwidth), dtype=bool)


@dataclass(frozen=True, slots=True)
class NestedPairs:
    """Links of nested groups of devices.

    ``groups``: the number of every device's group, shape (K + 1, V) from the devices themselves to
    the group of all; every grouping is a union of groups of the one before. ``bandwidth``,
    ``latency``: entry k is the link of devices in one group of ``groups[k + 1]``, but not of
    ``groups[k]``; shape (K,).
    """

    groups: Ints
    bandwidth: Floats
    latency: Floats

    def slowest(self, ones: Sequence[int], others: Sequence[int]) -> tuple[float, float]:
        """As in :class:`Pairs`."""
        here, there = self.groups[:, ones], self.groups[:, others]
        # So many pairs share a group.
        shared = [
            np.bincount(a) @ np.bincount(b, minlength=int(a.max()) + 1)[: int(a.max()) + 1]
            for a, b in zip(here, there, strict=True)
        ]
        occurs = np.diff(shared) > 0
        bandwidth = self.bandwidth.min(initial=np.inf, where=occurs)
        return float(bandwidth), float(self.latency.max(initial=0.0, where=occurs))

    def best_between(self, groups: Ints) -> tuple[float, float] | None:
        """As in :class:`Pairs`."""
        size = len(groups)
        every = np.diff([_same(grouping) for grouping in self.groups])
        inside = np.diff([_same(grouping * size + groups) for grouping in self.groups])
        occurs = every > inside
        if not occurs.any():
            return None
        return float(self.bandwidth[occurs].max()), float(self.latency[occurs].min())

    def block(self, ones: Sequence[int], others: Sequence[int]) -> tuple[Floats, Floats]:
        """As in :class:`Pairs`."""
        here, there = self.groups[:, ones], self.groups[:, others]
        apart = np.zeros((len(ones), len(others)), dtype=np.int8)
        for a, b in zip(here, there, strict=True):
            apart += np.not_equal.outer(a, b)
        return np.append(np.inf, self.bandwidth)[apart], np.append(0.0, self.latency)[apart]

    def bandwidths(self) -> Floats:
        """As in :class:`Pairs`."""
        every = np.diff([_same(grouping) for grouping in self.groups])
        return np.unique(self.bandwidth[every > 0])

    def components(self, bandwidth: float) -> Ints:
        """As in :class:`Pairs`."""
        from scipy import sparse

        rows, columns = zip(*self._joined(bandwidth), strict=True)
        ends = np.concatenate(rows), np.concatenate(columns)
        links = sparse.coo_array((np.ones(len(ends[0])), ends), shape=2 * self.groups.shape[1:])
        return _components(links)

    def nearest(self) -> tuple[Floats, Floats]:
        """As in :class:`Pairs`."""
        sizes = [np.bincount(grouping)[grouping] for grouping in self.groups]
        counts = np.unique(np.diff(sizes, axis=0).T, axis=0)  # of other devices, by link
        wide, quick = np.argsort(-self.bandwidth), np.argsort(self.latency)
        widths = [np.repeat(self.bandwidth[wide], one[wide]) for one in counts]
        latencies = [np.repeat(self.latency[quick], one[quick]) for one in counts]
        return np.max(widths, axis=0), np.min(latencies, axis=0)

    def _joined(self, bandwidth: float) -> Iterator[tuple[Ints, Ints]]:
        """Pairs with the components of all links above ``bandwidth``.

        The links between two or more inner groups of one outer group connect all its devices.
        """
        devices = np.arange(self.groups.shape[1])
        yield devices, devices
        for (inner, outer), width in zip(pairwise(self.groups), self.bandwidth, strict=True):
            if width > bandwidth:
                first = np.unique(outer, return_index=True)[1][outer]
                parted = np.zeros(len(devices), dtype=bool)
                np.logical_or.at(parted, outer, inner != inner[first])
                yield devices[parted[outer]], first[parted[outer]]


def _same(groups: Ints) -> int:
    """The ordered pairs in the same group, pairs of a device with itself included."""
    return int((np.unique(groups, return_counts=True)[1] ** 2).sum())


def _components(links: "Bools | sparse.coo_array") -> Ints:
    from scipy.sparse import csgraph

    return np.asarray(csgraph.connected_components(links, directed=False)[1], dtype=np.int64)
