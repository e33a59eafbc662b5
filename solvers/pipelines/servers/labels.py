"""Lists of nondominated labels of the server-aware relaxation."""

from typing import NamedTuple

import numpy as np

from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.compiled import copy, lean

# The values of a label: the less, the better. In seconds unless they say what they count.
TRIP = 0  # of 4: the way to the end of the prefix and back, then k backwards and an all-reduce
TRIPS = 4  # for the k of _before_last
FORTH = 4  # the way of one microbatch to the end of the prefix
BACK = 5  # its way back
FORWARDS = 6  # the slowest forward or transfer so far, and the same for backwards
BACKWARDS = 7
RUNS = 8  # two entries each for servers and racks: how many the closed runs need at least
UP_TO = 12  # two entries: devices of rank 0, and of ranks 0 and 1
ROOM = 14  # negative: free devices in the server of the current run, then in its rack
PIECES = 16  # negative: in which the last stage sends
VALUES = 17
# More values if devices may be shared.
LAST = 17  # two entries: devices of the last stage, if all are in one server, or rack; or AFAR
LOAD = 19  # two entries: how much more the stages need than the used devices can do
LOADS = 2
CLOSED = 21  # devices whose last stage is placed
BEHIND = 22  # how many more long layers there are than these devices can do backwards
FREE = 23  # four entries, negative: the most seconds that a group has left, and another group,
# for computations, and the same for all-reduces
OPENED = 27  # bits of the choices of groups, then of those of two groups; the more, the better
BITS = 24  # of choices; of more, several have the same bit
SHARED_VALUES = 28
AFAR = 1e9


class Labels(NamedTuple):
    """Nondominated labels by [last stage's sort, layers placed, devices used].

    The sort is the rank of a split stage, or the number of ranks if its devices take turns; if
    devices are shared, it is the choice.
    ``counts`` has shape (sorts, L + 1, V + 1); the others have one more axis, for N
    labels. ``source`` is the index of the last stage among those placed.
    """

    counts: Ints
    source: Ints
    values: Floats


@lean
def _is_dominated(values: Floats, by: Floats) -> bool:
    for i in range(min(len(values), OPENED)):
        if by[i] > values[i]:
            return False
    return len(values) == VALUES or bool(int(values[OPENED]) & ~int(by[OPENED]) == 0)


@lean
def insert(labels: Labels, at: tuple[int, int, int], values: Floats, source: int) -> None:
    """Add a label unless it is dominated; a full list merges it with another, which relaxes."""
    known, sources = labels.values[at], labels.source[at]
    for i in range(labels.counts[at]):
        if _is_dominated(values, known[i]):
            return
    kept = 0
    for i in range(labels.counts[at]):
        if not _is_dominated(known[i], values):
            sources[kept] = sources[i]
            copy(known[i], 0, len(values), known[kept])
            kept += 1
    labels.counts[at] = kept
    if kept == len(sources):
        i = _closest(kept, values, known)
        for k in range(len(values)):
            if k == OPENED:
                known[i, k] = int(known[i, k]) | int(values[k])
            else:
                known[i, k] = min(known[i, k], values[k])
        return
    sources[kept] = source
    copy(values, 0, len(values), known[kept])
    labels.counts[at] += 1


@lean
def _closest(count: int, values: Floats, known: Floats) -> int:
    """The label that loses least by a merger."""
    chosen, least = 0, np.inf
    for i in range(count):
        loss = 0.0
        for k in range(len(values)):
            apart = abs(known[i, k] - values[k])
            if ROOM <= k < PIECES:
                loss += (0.02 if len(values) == VALUES else 0.5) * apart
            elif k == OPENED:
                loss += min(apart, 1.0)
            else:
                loss += _weight(k) * apart / (abs(known[i, k]) + abs(values[k]) + 1e-30)
        if loss < least:
            chosen, least = i, loss
    return chosen


@lean
def _weight(k: int) -> float:
    """How much a relative difference in the k-th value matters."""
    if k in (TRIP, FORTH, TRIPS - 1) or k >= LOAD:
        return 1.0
    return 0.05 if RUNS <= k < UP_TO or k == PIECES else 0.3
