"""Compiled conditions that a prefix of stages must meet for a plan in time.

docs/certificates.md has them, and why each is necessary.
"""

from typing import NamedTuple

import numpy as np

from stagewright.formulations.pipelines.bounds.server_relaxation import ServerRelaxation
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.compiled import copy, lean
from stagewright.solvers.pipelines.servers.tables import FAST, ServerRest

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


WINDOWS = 8  # releases and tails that are tried
MARGIN = 1e-9


@lean
def least_schedule(
    M: int, f: float, b: float, pace: float, around: float, tails: Floats, cut: float
) -> float:
    """A lower bound on the schedule of one device or channel; stops above ``cut``.

    Forward i is released at i ``pace``, backward i ``around`` later. The k-th last backward is
    followed by tails[k], the k-th last forward by that, ``around`` - f and b. For any h and q, all
    computations with release h or later and tail q or longer take place between: h + work + q is a
    bound. If there are many microbatches, only some h and q are tried.
    """
    most: float = tails[0]
    step = max(1, M // WINDOWS)
    for by_backward in range(2):
        for i in range(0, M, step):
            head = i * pace + by_backward * around
            forwards, backwards = M - _below(head, pace, M), M - _below(head - around, pace, M)
            most = max(most, _by_tails(M, f, b, around, tails, head, forwards, backwards))
            if most > cut:
                return most
    return most


@lean
def _below(seconds: float, pace: float, most: int) -> int:
    """How many of 0, pace, 2 pace, ... are less than ``seconds``, at most ``most``."""
    if seconds <= 0:
        return 0
    return most if pace <= 0 else min(most, int(np.ceil(seconds / pace - MARGIN)))


@lean
def _by_tails(
    M: int,
    f: float,
    b: float,
    around: float,
    tails: Floats,
    head: float,
    forwards: int,
    backwards: int,
) -> float:
    """The best bound of :func:`least_schedule` for one release ``head``."""
    more, most = around - f + b, 0.0
    short_f = short_b = 0  # forwards and backwards with a tail below q
    for j in range(0, M, max(1, M // WINDOWS)):
        while short_f < M and more + tails[short_f] < tails[j]:
            short_f += 1
        while short_b < M and tails[short_b] < more + tails[j]:
            short_b += 1
        most = max(most, _window(head, forwards - short_f, f, backwards - j, b, tails[j]))
        most = max(most, _window(head, forwards - j, f, backwards - short_b, b, more + tails[j]))
    return most


@lean
def _window(head: float, forwards: int, f: float, backwards: int, b: float, tail: float) -> float:
    if forwards <= 0 and backwards <= 0:
        return 0.0
    seconds: float = head + max(forwards, 0) * f + max(backwards, 0) * b + tail
    return seconds


ALONE = 2  # how near two stages are that are not in one rack


class Loads(NamedTuple):
    """The work of shared devices by two measures: device-seconds, and long layers.

    Attributes
    ----------
    size, finish
        Of one long layer, at least: seconds of M microbatches; seconds of the all-reduce and step;
        shape (C,).
    taken
        Prefix sums of the measures of the layers, shape (2, C, L + 1).
    rings
        Prefix sums of seconds of all-reduces, shape (3, C, L + 1) by [link, choice, l].
    need
        The least of the measures for the layers from l on, shape (2, L + 1).
    back
        Of one long layer, at least: seconds of the backwards of M microbatches, shape (C,).
    ahead, astern
        The least way of a microbatch from layer l to the end without transfers, and of its
        gradient back, shape (L + 1,).
    boundary
        The least bytes per microbatch of a transfer after layer l, shape (L + 1,).
    drain
        From the first gradient that arrives at layers [l, m), and from the end of M forwards of
        these layers, the least time until all of their all-reduces end, one after the other, shape
        (3, C, L + 1, L + 1) by [link, choice, l, m].
    spare
        Room for two values.
    """

    size: Floats
    finish: Floats
    taken: Floats
    rings: Floats
    need: Floats
    back: Floats
    ahead: Floats
    astern: Floats
    boundary: Floats
    drain: Floats
    spare: Floats


class Scratch(NamedTuple):
    """The relaxed problem, tables of the remaining layers' needs, and working arrays.

    ``arrivals`` are labels after a channel, for one state. ``placed[i]`` is (index of the previous
    stage, start, stop, choice, place) of the i-th placed stage; ``steps`` counts the stages placed
    and the stages tried.
    """

    form: ServerRelaxation
    until: float
    rest: ServerRest
    loads: Loads
    labels: Labels
    arrivals: Labels
    placed: Ints
    steps: Ints
    values: Floats
    tails: Floats


@lean
def before_last(microbatches: int, i: int) -> int:
    """The number of later microbatches k of a label's i-th trip: 0, M/4, M/2, M - 1."""
    return microbatches - 1 if i == TRIPS - 1 else min(microbatches - 1, microbatches * i // 4)


@lean
def _fill_tails(microbatches: int, known: Floats, tails: Floats) -> None:
    """Set tails[k] to the least time after the k-th last backward; tails ascend."""
    step = 0
    for k in range(microbatches):
        while step + 1 < TRIPS and before_last(microbatches, step + 1) <= k:
            step += 1
        tails[k] = max(known[BACK] + k * known[BACKWARDS], known[TRIP + step] - known[FORTH])
        if k > 0:
            tails[k] = max(tails[k], tails[k - 1])


@lean
def is_late(search: Scratch, known: Floats, f: float, b: float, around: float) -> bool:
    """Whether the schedule of a device or channel after ``known`` cannot end in time."""
    M, pace, back = search.form.microbatches, max(known[FORWARDS], f), max(known[BACKWARDS], b)
    # A cheap estimate of what the windows may add; if it is too low, the bound is only weaker.
    gain = pace + back - f - b + max(0.0, known[TRIP + TRIPS - 1] - known[TRIP] - (M - 1) * b)
    gain += max(0.0, known[TRIP + 2] - known[TRIP] - (M // 2) * b)
    if pace > 0:
        gain += around * (1 - f / pace)
    if back > 0:
        gain += around * (1 - b / back)
    if known[TRIP] + M * (f + b) + gain <= search.until:
        return False
    _fill_tails(M, known, search.tails)
    slack = search.until - known[FORTH]
    late: bool = least_schedule(M, f, b, pace, around, search.tails, slack) > slack
    return late


@lean
def waits(search: Scratch, k: int, f: float, b: float, around: float, head_and_tail: float) -> bool:
    """Whether a split stage with at most k microbatches in flight cannot end in time.

    ``around`` is the time from a forward's start to its backward's. Warm-up and drain, and slots of
    microbatches in flight, as in :mod:`bounds`.
    """
    M = search.form.microbatches
    warm_up, drain = max(0.0, around - k * f), max(0.0, around - f - (k - 1) * b)
    idle = warm_up + drain if k < M else max(warm_up, drain)
    slots = -(-M // k) * (around + b)
    late: bool = head_and_tail + max(M * (f + b) + idle, slots) > search.until
    return late


@lean
def fast_left(search: Scratch, values: Floats) -> int:
    """The first index of ``rest`` for a label: how many devices of rank 0 are left."""
    most = len(search.rest.path) - 1
    return max(0, most - int(values[UP_TO]))


@lean
def exceeds(search: Scratch, values: Floats, send: float, left: int, l: int) -> bool:
    """Whether the layers from l on, after a channel of ``send``, make any plan too slow."""
    rest, last = search.rest, (search.form.microbatches - 1) * values[FORWARDS]
    q = fast_left(search, values)
    onward = 2 * send + rest.path[q, left, l]
    exceeds: bool = (
        values[TRIP + TRIPS - 1] + onward > search.until
        or values[TRIP] + last + onward > search.until
        or values[TRIP] + 2 * send + rest.fill[q, left, l] > search.until
        or values[FORTH] + send + rest.reduced[q, left, l] > search.until
    )
    return exceeds


@lean
def is_crowded(search: Scratch, known: Floats, send: float, left: int, l: int) -> bool:
    """Whether the channel after ``known`` cannot carry all microbatches in time."""
    if known[TRIP] + 2 * search.form.microbatches * send > search.until:
        return True
    around = send + search.rest.path[fast_left(search, known), left, l]
    return is_late(search, known, send, send, around)


@lean
def devices_left(form: ServerRelaxation, used: int) -> int:
    """How many devices the next stages may have."""
    return form.size if form.shared else form.size - used


@lean
def next_link(form: ServerRelaxation, values: Floats) -> int:
    """The best link that the next stage may have to the last one."""
    if form.shared:
        if values[LAST] < form.rooms[0]:
            return FAST
        return 1 if values[LAST + 1] < form.rooms[1] else ALONE
    if values[ROOM] < 0 or form.turns < len(form.devices):
        return FAST
    return 1 if values[ROOM + 1] < 0 else ALONE
