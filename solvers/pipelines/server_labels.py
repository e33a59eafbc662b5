"""Lists of nondominated labels of the server-aware relaxation."""

from typing import NamedTuple

import numpy as np

from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.compiled import inner

# The values of a label, in seconds but for RUNS and UP_TO.
TRIP = 0  # of 4: the way to the end of the prefix and back, then k backwards and an all-reduce
TRIPS = 4  # for the k of _before_last
FORTH = 4  # the way of one microbatch to the end of the prefix
BACK = 5  # its way back
FORWARDS = 6  # the slowest forward or transfer so far, and the same for backwards
BACKWARDS = 7
RUNS = 8  # two entries: servers that the closed runs need at least
UP_TO = 10  # two entries: devices of rank 0, and of ranks 0 and 1
VALUES = 12


class Labels(NamedTuple):
    """Nondominated labels by [last stage's sort, layers placed, devices used].

    The sort is the rank of a split stage, or the number of ranks if its devices take turns.
    ``counts`` has shape (ranks or ranks + 1, L + 1, V + 1); the others have one more axis, for N
    labels. ``room`` is the number of free devices in the server of the current run, ``pieces`` the
    pieces in which the last stage sends, ``source`` the index of the last stage among those placed.
    """

    counts: Ints
    room: Ints
    pieces: Ints
    source: Ints
    values: Floats


@inner
def _is_dominated(
    room: int, pieces: int, values: Floats, by_room: int, by_pieces: int, by: Floats
) -> bool:
    if by_room < room or by_pieces < pieces:
        return False
    for i in range(VALUES):  # noqa: SIM110 (numba has no all())
        if by[i] > values[i]:
            return False
    return True


@inner
def insert(
    labels: Labels, at: tuple[int, int, int], room: int, pieces: int, values: Floats, source: int
) -> None:
    """Add a label unless it is dominated; a full list merges it with another, which relaxes."""
    rooms, cut, known = labels.room[at], labels.pieces[at], labels.values[at]
    sources = labels.source[at]
    for i in range(labels.counts[at]):
        if _is_dominated(room, pieces, values, rooms[i], cut[i], known[i]):
            return
    kept = 0
    for i in range(labels.counts[at]):
        if not _is_dominated(rooms[i], cut[i], known[i], room, pieces, values):
            rooms[kept], cut[kept], sources[kept] = rooms[i], cut[i], sources[i]
            known[kept] = known[i]
            kept += 1
    labels.counts[at] = kept
    if kept == len(rooms):
        i = _closest(kept, room, pieces, values, rooms, cut, known)
        rooms[i], cut[i] = max(rooms[i], room), max(cut[i], pieces)
        known[i] = np.minimum(known[i], values)
        return
    rooms[kept], cut[kept], sources[kept] = room, pieces, source
    known[kept] = values
    labels.counts[at] += 1


@inner
def _closest(
    count: int, room: int, pieces: int, values: Floats, rooms: Ints, cut: Ints, known: Floats
) -> int:
    """The label that loses least by a merger."""
    chosen, least = 0, np.inf
    for i in range(count):
        loss = 0.02 * abs(cut[i] - pieces) / min(cut[i], pieces) + 0.02 * abs(rooms[i] - room)
        for k in range(VALUES):
            weight = 1.0 if k in (TRIP, FORTH, TRIPS - 1) else 0.3
            weight = 0.05 if RUNS <= k < UP_TO else weight
            loss += weight * abs(known[i, k] - values[k]) / (known[i, k] + values[k] + 1e-30)
        if loss < least:
            chosen, least = i, loss
    return chosen
