"""Compiled conditions for devices that stages share; docs/certificates.md has them.

Neighbouring stages on the same devices are one stage here. A group of devices works from the first
arrival there to the end, and on backwards from the first gradient on that arrives at its last
stage. Both limit the layers that the groups can have together.
"""

import numpy as np

from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.compiled import lean, paced
from stagewright.solvers.pipelines.servers.conditions import (
    BACK,
    BEHIND,
    CLOSED,
    FORTH,
    FREE,
    LOAD,
    LOADS,
    Scratch,
    next_link,
)
from stagewright.solvers.pipelines.servers.tables import send_seconds

MARGIN = 1e-9
_COUNT_SLACK = 1e-5  # of the layers that a group can have


@lean
def _capacity(search: Scratch, known: Floats, i: int, c: int) -> float:
    """Work that devices of choice c, reached at layer l after ``known``, can do by measure i.

    After the last computation, there is the way back, and the all-reduce and step of the layers
    that are counted. If backwards may be split, the last computation may be a weight gradient,
    after which nothing is sent.
    """
    loads = search.loads
    tail = 0.0 if search.form.splits else known[BACK]
    if i == 0:
        most: float = search.form.devices[c] * max(0.0, search.until - known[FORTH] - tail)
        return most
    tail = max(tail, loads.finish[c])
    return _count(search.until - known[FORTH] - tail, loads.size[c])


@lean
def _count(seconds: float, size: float) -> float:
    """How many times ``size`` fits in ``seconds``."""
    if size <= 0:
        return np.inf
    count: float = np.floor(max(0.0, seconds) / size + _COUNT_SLACK)
    return count


@lean
def look_ahead(search: Scratch, known: Floats, free: int) -> None:
    """Set ``spare`` to the work that ``free`` devices reached after ``known`` can do."""
    for i in range(LOADS):
        most = 0.0
        for c in range(len(search.form.devices)):
            most = max(most, _capacity(search, known, i, c) / search.form.devices[c])
        search.loads.spare[i] = free * most


@lean
def is_overloaded(
    search: Scratch, known: Floats, l: int, m: int, c: int, link: int, again: bool
) -> bool:
    """Whether shared devices cannot take layers [l, m), and the rest, in time; sets the loads.

    The all-reduces use ``link``.
    """
    loads, values = search.loads, search.values
    over, last = False, m == search.form.forward.shape[1] - 1
    for i in range(LOADS):
        values[LOAD + i] = known[LOAD + i] + loads.taken[i, c, m] - loads.taken[i, c, l]
        if not again:
            values[LOAD + i] -= _capacity(search, known, i, c)
        spare = 0.0 if last else loads.spare[i]
        over = over or values[LOAD + i] + loads.need[i, m] > spare + MARGIN * loads.need[i, 0]
    if over:
        return True
    seconds = (loads.taken[0, c, m] - loads.taken[0, c, l]) / search.form.devices[c]
    rings = loads.rings[link, c, m] - loads.rings[link, c, l]
    arrival = known[FORTH] if search.form.splits else known[FORTH] + known[BACK]
    turn = known[FORTH] + loads.ahead[l]  # no all-reduce begins before
    return not (
        _is_free(search, known, FREE, seconds, arrival, again)
        and _is_free(search, known, FREE + 2, rings, turn, again)
    )


@lean
def _is_free(
    search: Scratch, known: Floats, at: int, seconds: float, lost: float, again: bool
) -> bool:
    """Whether a group has ``seconds`` left; sets the values ``at`` of the freest two.

    A new group has all time but what is ``lost``. Where only the freest group has enough left, it
    has less afterwards. Otherwise it is not known which group the stage is on.
    """
    values, first, second = search.values, -known[at], -known[at + 1]
    left = first - seconds
    if not again:
        left = search.until - lost - seconds
        first, second = max(first, left), max(second, min(first, left))
    elif seconds > second + MARGIN * search.until:
        first, second = max(left, second), min(left, second)
    values[at], values[at + 1] = -first, -second
    return bool(left >= -MARGIN * search.until)


@lean
def reduces_late(
    search: Scratch, known: Floats, l: int, m: int, c: int, link: int, around: float
) -> bool:
    """Whether the all-reduces of layers [l, m) cannot end in time.

    ``around`` is the least time from the arrival to the first gradient that arrives.
    """
    form = search.form
    forwards = form.microbatches * (form.forward[c, m] - form.forward[c, l])
    drain = search.loads.drain[link, c, l, m]
    late: bool = known[FORTH] + max(around, forwards) + drain > search.until
    return late


@lean
def _backwards(search: Scratch, around: float, c: int) -> float:
    """How many long layers' backwards devices of choice c can do ``around`` after the start."""
    loads = search.loads
    return _count(search.until - around - loads.finish[c], loads.back[c])


@lean
def _transfers(search: Scratch, behind: float, l: int, free: float) -> float:
    """The least transfers of a microbatch between groups that do ``behind`` long layers.

    Their last stages come after layer l, and they have ``free`` devices together. Between two of
    them a microbatch is sent once at least. A group that takes part leaves enough devices for the
    rest. If it has more than half of a server, the other one is in another server.
    """
    form, loads, first = search.form, search.loads, search.values[FORTH] + search.loads.ahead[l]
    best = 0.0
    for k in range(len(form.devices)):
        best = max(best, _backwards(search, first, k) / form.devices[k])
    most, pieces, smallest = 0.0, 0, form.size
    for k in range(len(form.devices)):
        done, others = _backwards(search, first, k), free - form.devices[k]
        if others >= 0 and done + others * best >= behind - MARGIN:
            most, pieces = max(most, done), max(pieces, form.pieces[k])
            smallest = min(smallest, form.devices[k])
    if most == 0 or behind <= most:
        return 0.0
    link = 0
    while link < len(form.rooms) and 2 * smallest > form.rooms[link]:
        link += 1
    size, pace, latency = loads.boundary[l], form.seconds_per_byte[link], form.latency[link]
    # Through larger groups in between, in more pieces, it is sent at least twice.
    piece = size * form.share[min(form.samples, pieces * pieces)]
    once = paced(piece, pace, latency)
    twice = 2 * paced(size * form.share[form.samples], pace, latency)
    sent: float = (np.ceil(behind / most - _COUNT_SLACK) - 1) * min(once, twice)
    return sent


@lean
def may_close(search: Scratch, known: Floats, l: int, m: int, c: int, last: bool) -> bool:
    """Whether the backwards of all long layers can be done in time; sets the values for it.

    ``last``: layers [l, m) are the last long ones of their devices, so that the first of these
    backwards are theirs.
    """
    form, loads, values = search.form, search.loads, search.values
    values[CLOSED] = known[CLOSED]
    values[BEHIND] = known[BEHIND] + loads.taken[1, c, m] - loads.taken[1, c, l]
    if last:
        if values[BEHIND] == known[BEHIND]:
            return False
        around = values[FORTH]
        values[CLOSED] += form.devices[c]
        if m < form.forward.shape[1] - 1:
            send = send_seconds(form, m, form.pieces[c] * form.size, next_link(form, values))
            path = search.rest.path[0, form.size, m]
            around += 2 * send
            behind = values[BEHIND] + loads.need[1, m] - _backwards(search, around + path, c)
            sends = _transfers(search, behind, m, form.size - values[CLOSED])
            around += max(path, loads.ahead[m] + loads.astern[m] + 2 * sends)
        values[BEHIND] -= _backwards(search, around, c)
    most, free = 0.0, form.size - values[CLOSED]
    if m < form.forward.shape[1] - 1:
        for k in range(len(form.devices)):
            later = _backwards(search, values[FORTH] + loads.ahead[m], k)
            most = max(most, later / form.devices[k])
    return bool(free >= 0 and values[BEHIND] + loads.need[1, m] <= free * most + MARGIN)
