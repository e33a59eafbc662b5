"""The integer tables of a stage allocation problem, which MadPipe's dynamic programs read."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.graphs.documents.arrays import Ints

RESOLUTION = 44  # all times together are at most 2**44 ticks
BYTE_RESOLUTION = 52  # and all bytes, of all microbatches in flight, 2**52 units
FORBIDDEN = 1 << 45  # ticks of an infeasible stage


class Placed(NamedTuple):
    """Layers [start, stop) on a group; ``choice`` is an index into the problem's ``recompute``."""

    start: int
    stop: int
    group: int
    choice: int


class AllocationTables(NamedTuple):
    """The problem in integers; G groups of K types, R recomputation modes, L layers.

    Attributes
    ----------
    sort
        The row of ``seconds`` ... ``static`` for every group, shape (G,).
    seconds
        U(k, l): ticks of forward and backward of layers [k, l), shape (K, R, L + 1, L + 1);
        FORBIDDEN where they cannot form a stage.
    saved, working
        Bytes per microbatch in flight, and additional bytes during a backward, in the same shape.
        All bytes are in units (`StageAllocationProblem.byte`).
    static
        Bytes that are resident at all times, shape (K, L + 1, L + 1).
    transfer
        C(l): ticks of the transfers in both directions between layer l - 1 on one group and layer
        l on another, shape (G, G, L + 1); 0 within a group.
    reduce
        Ticks of the all-reduce of layers [k, l), shape (G, L + 1, L + 1).
    memory
        Bytes per group, shape (G,).
    normal
        The normal groups in order, shape (N,).
    skips
        Whether plans may use normal group j and leave out groups that follow it; False where the
        next group is identical. Shape (N,).
    special
        The special group, or -1.
    versions
        The largest number of microbatches in flight, m + 1.
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
    """The same problem with the special group as a normal group at its position."""
    everyone = tables._replace(normal=np.arange(len(tables.sort)), special=-1)
    return everyone._replace(skips=worth_skipping(everyone))


def all_periods(tables: AllocationTables) -> int:
    """A period above which feasibility is constant: all operations in sequence, an all-reduce."""
    return int(longest_delays(tables)[-1] + tables.reduce.max())


def longest_delays(tables: AllocationTables) -> Ints:
    """Upper bounds on the delay of layers [0, l), shape (L + 1,): each a stage of slowest type."""
    layers = np.arange(tables.seconds.shape[-1] - 1)
    single = tables.seconds[:, :, layers + 1, layers]
    slowest = np.where(single < FORBIDDEN, single, 0).max(axis=(0, 1))
    crossing = tables.transfer.max(axis=(0, 1))
    return np.asarray(np.cumsum(np.append(0, slowest)) + np.cumsum(crossing))


def worth_skipping(tables: AllocationTables) -> NDArray[np.bool_]:
    """Whether each normal group differs from the next one, shape (N,).

    A plan that uses a group and leaves out an identical next group can use the next one instead.
    """
    pairs = pairwise(tables.normal.tolist())
    return np.array([not _equals(tables, a, b) for a, b in pairs] + [False], dtype=np.bool_)


def _equals(tables: AllocationTables, a: int, b: int) -> bool:
    """Whether the neighbouring normal groups a and b have identical tables."""
    transfer = tables.transfer
    before = [x for x in range(len(tables.sort)) if x < a or x == tables.special]
    after = [x for x in range(len(tables.sort)) if x > b or x == tables.special]
    return bool(
        tables.sort[a] == tables.sort[b]
        and tables.memory[a] == tables.memory[b]
        and np.array_equal(tables.reduce[a], tables.reduce[b])
        and np.array_equal(transfer[before, a], transfer[before, b])
        and np.array_equal(transfer[a, after], transfer[b, after])
    )


def layer_sums(values: NDArray[Any]) -> NDArray[Any]:
    """out[l, k] = the sum of values[k:l], 0 where l <= k; shape (L + 1, L + 1)."""
    sums = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
    return np.tril(np.subtract.outer(sums, sums))
