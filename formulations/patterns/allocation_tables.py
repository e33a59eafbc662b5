"""An allocation of stages in whole numbers: the tables that MadPipe's programs and prices read."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.graphs.documents.arrays import Ints

RESOLUTION = 44  # all times together are at most 2**44 ticks
BYTE_RESOLUTION = 52  # and all bytes, of all microbatches in flight, 2**52 units
FORBIDDEN = 1 << 45  # ticks of a stage that may not be


class Placed(NamedTuple):
    """Layers [start, stop) on a group; ``choice`` is a position in the question's recompute."""

    start: int
    stop: int
    group: int
    choice: int


class AllocationTables(NamedTuple):
    """The question in whole numbers; G groups of K sorts, R ways to recompute, L layers.

    Attributes
    ----------
    sort
        The row of ``seconds`` ... ``static`` for every group, shape (G,).
    seconds
        U(k, l): ticks of forward and backward of layers [k, l), shape (K, R, L + 1, L + 1);
        FORBIDDEN where these can be no stage.
    saved, working
        Bytes per microbatch in flight, and besides during a backward, shaped likewise. They and all
        other bytes are in units (`StageAllocationProblem.byte`).
    static
        Bytes held all the time, shape (K, L + 1, L + 1).
    transfer
        C(l): ticks there and back between layer l - 1 on one group and layer l on another, shape
        (G, G, L + 1); 0 from a group to itself.
    reduce
        Ticks of the all-reduce of layers [k, l), shape (G, L + 1, L + 1).
    memory
        Bytes per group, shape (G,).
    normal
        The normal groups in order, shape (N,).
    skips
        Whether to look at plans that use normal group j and none of some that follow it; not where
        the next one is its equal in everything. Shape (N,).
    special
        The special group, or -1.
    versions
        Most microbatches in flight, m + 1.
    """

    sort: Ints
    seconds: Ints
    saved: Ints
    working: Ints
    static: Ints
    transfer: Ints
    reduce: Ints
    memory: Ints
    normal: Ints
    skips: NDArray[np.bool_]
    special: int
    versions: int


def contiguous(tables: AllocationTables) -> AllocationTables:
    """The same question where the special group is one among the others, in its place."""
    everyone = tables._replace(normal=np.arange(len(tables.sort)), special=-1)
    return everyone._replace(skips=worth_skipping(everyone))


def all_periods(tables: AllocationTables) -> int:
    """A period above which nothing changes any more: everything in sequence, and an all-reduce."""
    return int(behind(tables)[-1] + tables.reduce.max())


def behind(tables: AllocationTables) -> Ints:
    """At most what layers [0, l) can add to a delay, shape (L + 1,): slowest, a stage each."""
    layers = np.arange(tables.seconds.shape[-1] - 1)
    single = tables.seconds[:, :, layers + 1, layers]
    slowest = np.where(single < FORBIDDEN, single, 0).max(axis=(0, 1))
    crossing = tables.transfer.max(axis=(0, 1))
    return np.asarray(np.cumsum(np.append(0, slowest)) + np.cumsum(crossing))


def worth_skipping(tables: AllocationTables) -> NDArray[np.bool_]:
    """Per normal group whether it is no equal of the next one, shape (N,).

    A plan that uses a group and not its equal behind it may as well use that one instead.
    """
    pairs = pairwise(tables.normal.tolist())
    return np.array([not _equals(tables, a, b) for a, b in pairs] + [False], dtype=np.bool_)


def _equals(tables: AllocationTables, a: int, b: int) -> bool:
    """Whether normal groups a and b, neighbours in the order, are alike in all that counts."""
    transfer = tables.transfer
    before = [x for x in range(len(tables.sort)) if x < a or x == tables.special]
    behind = [x for x in range(len(tables.sort)) if x > b or x == tables.special]
    return bool(
        tables.sort[a] == tables.sort[b]
        and tables.memory[a] == tables.memory[b]
        and np.array_equal(tables.reduce[a], tables.reduce[b])
        and np.array_equal(transfer[before, a], transfer[before, b])
        and np.array_equal(transfer[a, behind], transfer[b, behind])
    )


def range_sums(values: NDArray[Any]) -> NDArray[Any]:
    """out[l, k] = the sum of values[k:l], 0 where l <= k; shape (L + 1, L + 1)."""
    sums = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
    return np.tril(np.subtract.outer(sums, sums))
