"""Compiled search of the server-aware relaxation, by labels of the prefixes of stages.

After a change of the other kernels of this folder, change this file, too: numba recompiles a cached
kernel only if the kernel's own file changes.
"""

import numpy as np

from stagewright.formulations.pipelines.bounds.server_relaxation import (
    APART,
    WITHIN,
    Place,
    ServerRelaxation,
)
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.compiled import copy, lean, lean_entry, paced, refer
from stagewright.solvers.pipelines.servers.conditions import (
    AFAR,
    ALONE,
    BACK,
    BACKWARDS,
    BITS,
    FORTH,
    FORWARDS,
    LAST,
    OPENED,
    PIECES,
    ROOM,
    RUNS,
    TRIP,
    TRIPS,
    UP_TO,
    Scratch,
    before_last,
    devices_left,
    exceeds,
    fast_left,
    insert,
    is_crowded,
    is_late,
    next_link,
    waits,
)
from stagewright.solvers.pipelines.servers.sharing import (
    is_overloaded,
    look_ahead,
    may_close,
    reduces_late,
)
from stagewright.solvers.pipelines.servers.tables import FAST, least_link, send_seconds

TAKES_TURNS = int(Place.TAKES_TURNS)
NONE, GAVE_UP = -1, -2
MARGIN = 1e-9


@lean
def _arrive(search: Scratch, state: tuple[int, int, int], apart: int, c: int, again: bool) -> None:
    """Collect the labels after the channel from ``state`` to a stage of choice c.

    ``apart`` is 0 if the stage is in the same server, 1 if in the same rack, otherwise ALONE;
    ``again``: on devices that have stages already.
    """
    last, l, used = state
    form, labels, values = search.form, search.labels, search.values
    left = devices_left(form, used)
    several = (not form.shared and last == len(form.available)) or c >= form.turns
    other = c % BITS + (BITS if last == c else 0)  # another group than that of the last stage
    search.arrivals.counts[0, 0, 0] = 0
    for i in range(labels.counts[last, l, used]):
        known = labels.values[last, l, used, i]
        if again and not int(known[OPENED]) >> other & 1:
            continue
        if apart < ALONE and not _has_room(form, known, apart, c, again):
            continue
        copy(known, 0, len(known), values)
        for level in range(apart):
            _close(form, known, level, values)
        send = 0.0
        if used > 0:
            pieces = form.pieces[c] * int(-known[PIECES])
            send = send_seconds(form, l, pieces, FAST if several else apart)
            _cross(search, known, send, several)
        if exceeds(search, values, 0.0, left, l):
            continue
        if used > 0 and not several and is_crowded(search, known, send, left, l):
            continue
        values[PIECES] = -1.0
        insert(search.arrivals, (0, 0, 0), values, labels.source[last, l, used, i])


@lean
def _has_room(form: ServerRelaxation, known: Floats, apart: int, c: int, again: bool) -> bool:
    """Whether the server (0) or rack (1) of the last stage has room for a stage of choice c."""
    if form.shared and known[LAST + apart] + form.devices[c] > form.rooms[apart]:
        return False
    return again or bool(-known[ROOM + apart] >= form.devices[c])


@lean
def _close(form: ServerRelaxation, known: Floats, level: int, values: Floats) -> None:
    """Close the run in a server (level 0) or a rack (1), and start an empty one."""
    room, at = int(-known[ROOM + level]), RUNS + 2 * level
    if room > 0:
        for k in range(2):
            values[at + k] += form.packing[level, k, form.rooms[level] - room]
    values[ROOM + level] = -form.rooms[level]


@lean
def _cross(search: Scratch, known: Floats, send: float, several: bool) -> None:
    """Add a channel to ``search.values``.

    Devices that take turns have ``several``, one each; how many microbatches pass it is not known.
    """
    M, values = search.form.microbatches, search.values
    for k in range(TRIPS):
        values[TRIP + k] = known[TRIP + k] + 2 * send
        if not several:
            later = known[TRIP] + (2 + before_last(M, k)) * send
            values[TRIP + k] = max(values[TRIP + k], later)
    values[FORTH] = known[FORTH] + send
    values[BACK] = known[BACK] + send
    if not several:
        values[FORWARDS] = max(known[FORWARDS], send)
        values[BACKWARDS] = max(known[BACKWARDS], send)


@lean
def _most_in_turns(microbatches: int, rounds: int) -> int:
    """The most devices among which one has ``rounds`` of the microbatches."""
    return microbatches if rounds == 1 else -(-microbatches // (rounds - 1)) - 1


@lean
def _extend(
    search: Scratch, known: Floats, f: float, b: float, i: float, finish: float, most: int
) -> None:
    """Set ``search.values`` after one more stage, in which at most ``most`` devices take turns.

    Of k + 1 microbatches some device has at least k // most + 1. The gradient is sent after i.
    """
    values = search.values
    for k in range(TRIPS):
        later = before_last(search.form.microbatches, k) // most * b
        values[TRIP + k] = max(known[TRIP + k] + i, known[FORTH] + finish + later + b) + f
    values[FORTH], values[BACK] = known[FORTH] + f, known[BACK] + i
    values[FORWARDS], values[BACKWARDS] = known[FORWARDS], known[BACKWARDS]
    if most == 1:
        values[FORWARDS] = max(known[FORWARDS], f)
        values[BACKWARDS] = max(known[BACKWARDS], i)


@lean
def _count(form: ServerRelaxation, known: Floats, c: int, again: bool, values: Floats) -> bool:
    """Count the new devices of choice c in ``values`` by rank; return whether enough exist."""
    copy(known, UP_TO, ROOM, values)
    enough = True
    if c < form.turns and not again:
        for rank in range(form.rank[c], len(form.available) - 1):
            values[UP_TO + rank] += form.devices[c]
            enough = enough and values[UP_TO + rank] <= form.available[rank]
    return enough


@lean
def _settle(
    form: ServerRelaxation, known: Floats, c: int, place: int, again: bool, values: Floats
) -> bool:
    """Take the room of a stage from its server and rack; whether the runs still fit."""
    copy(known, RUNS, UP_TO, values)
    values[PIECES] = -form.pieces[c]
    fits = True
    for level in range(len(form.rooms)):
        values[ROOM + level] = 0.0
        if form.shared:
            values[LAST + level] = form.devices[c] if WITHIN[place] <= level else AFAR
        if again and WITHIN[place] <= level:
            values[ROOM + level] = known[ROOM + level]
        elif c < form.turns and WITHIN[place] <= level:
            room, at = int(-known[ROOM + level]) - form.devices[c], RUNS + 2 * level
            if room < 0:  # a server may have room, and its rack none
                return False
            taken = form.packing[level, :, form.rooms[level] - room]
            most = max(known[at] + taken[0], known[at + 1] + taken[1])
            fits = fits and most <= form.groups[level] + MARGIN
            values[ROOM + level] = -room
            if room == 0:
                values[at] += taken[0]
                values[at + 1] += taken[1]
    return fits


@lean
def _place(
    search: Scratch, state: tuple[int, int, int], place: int, c: int, arrival: int, again: bool
) -> bool:
    """Place every stage of choice c after an arrival; whether one ends with the last layer."""
    form, steps, layers = search.form, search.steps, search.form.forward.shape[1] - 1
    known = search.arrivals.values[0, 0, 0, arrival]
    source = search.arrivals.source[0, 0, 0, arrival]
    if not _settle(form, known, c, place, again, search.values):
        return False
    if not _count(form, known, c, again, search.values):
        return False
    used, turned = state[2] + (0 if again else form.devices[c]), place == TAKES_TURNS
    if form.shared:
        search.values[OPENED] = _opened(int(known[OPENED]), c, again)
        look_ahead(search, known, form.size - used)
    link, finish = least_link(form, c) if turned else WITHIN[place], np.inf
    sort = c if form.shared else len(form.available) if turned else form.rank[c]
    for m in range(state[1] + 1, layers + 1):
        steps[1] += 1
        finish = _finish(form, link, c, state[1], m, finish)
        fits, ends = _try(search, known, state[1], m, c, finish, used, link)
        if ends:
            return False
        if not fits or (form.shared and is_overloaded(search, known, state[1], m, c, link, again)):
            continue
        _remember(search, source, state[1], m, c, place)
        if _keep(search, known, state[1], (sort, m, used), c) and m == layers:
            return True
    return False


@lean
def _opened(bits: int, c: int, again: bool) -> int:
    """The bits of a label's groups after a stage of choice c; a third group changes nothing."""
    if again:
        return bits
    at = c % BITS
    return bits | 1 << (at + BITS * (bits >> at & 1))


@lean
def _keep(search: Scratch, known: Floats, l: int, at: tuple[int, int, int], c: int) -> bool:
    """Insert the label of the stage from layer l to ``at``; whether there is one.

    If devices are shared, one for devices that have no more long layers, and one for others.
    """
    kept, shared = False, search.form.shared
    for last in range(2 if shared else 1):
        if not shared or may_close(search, known, l, at[1], c, last == 1):
            insert(search.labels, at, search.values, search.steps[0] - 1)
            kept = True
    return kept


@lean
def _finish(form: ServerRelaxation, link: int, c: int, l: int, m: int, before: float) -> float:
    """Seconds of the all-reduce and step after layers [l, m); ``before``: after [l, m - 1).

    Neighbouring stages on the same shared devices are one here, although each has an all-reduce of
    its own. After the last computation, there is that of one layer at least.
    """
    start = m - 1 if form.shared else l
    weights = form.parameters[m] - form.parameters[start]
    seconds: float = paced(weights, form.ring[link, c], form.ring_latency[link, c])
    seconds += form.update[c, m] - form.update[c, start]
    return min(before, seconds) if form.shared else seconds


@lean
def _remember(search: Scratch, source: int, start: int, stop: int, c: int, place: int) -> None:
    """Note a placed stage, if there is room for it."""
    index = search.steps[0]
    if index < len(search.placed):
        entry = search.placed[index]
        entry[0], entry[1], entry[2], entry[3], entry[4] = source, start, stop, c, place
    search.steps[0] += 1


@lean
def _try(
    search: Scratch, known: Floats, l: int, m: int, c: int, finish: float, used: int, link: int
) -> tuple[bool, bool]:
    """Whether layers [l, m) may be a stage; whether none from l to m or further can be.

    ``search.values`` are those of the label after it. The all-reduces use ``link``.
    """
    form, turned = search.form, c >= search.form.turns
    f = form.forward[c, m] - form.forward[c, l]
    b = form.backward[c, m] - form.backward[c, l]
    i = form.gradient[c, m] - form.gradient[c, l]
    sent, work = form.rounds[c] * (f + i), form.rounds[c] * (f + b)
    least = 0.0 if form.shared else finish  # the finish of a longer stage
    if known[TRIP] + sent > search.until or known[FORTH] + work + least > search.until:
        return False, True
    _extend(
        search, known, f, b, i, finish,
        _most_in_turns(form.microbatches, form.rounds[c]) if turned else 1,
    )  # fmt: skip
    if known[FORTH] + work + finish > search.until:
        return False, False
    left, last = devices_left(form, used), m == form.forward.shape[1] - 1
    if form.limit[c, l, m] == 0 or (left == 0 and not last):
        return False, False
    if last:
        late = form.shared and reduces_late(search, known, l, m, c, link, f)
        return not (late or exceeds(search, search.values, 0.0, left, m)), False
    send = send_seconds(form, m, form.pieces[c] * left, next_link(form, search.values))
    if exceeds(search, search.values, send, left, m):
        return False, False
    around = f + 2 * send + search.rest.path[fast_left(search, search.values), left, m]
    if form.shared and reduces_late(search, known, l, m, c, link, around):
        return False, False
    late = not turned and (
        waits(search, form.limit[c, l, m], f, i, around, known[TRIP])
        or is_late(search, known, f, i, around)
    )
    return not late, False


@lean
def _expand(search: Scratch, state: tuple[int, int, int]) -> bool:
    """Place every next stage after the labels of ``state``; whether a plan is complete."""
    form, used = search.form, state[2]
    for c in range(len(form.devices)):
        for apart in range(ALONE + 1):
            if not _may_follow(form, state, apart, c):
                continue
            free = used + form.devices[c] <= form.size
            if free and _place_after(search, state, apart, c, False):
                return True
            known = form.shared and form.devices[c] <= used
            if known and _place_after(search, state, apart, c, True):
                return True
    return False


@lean
def _may_follow(form: ServerRelaxation, state: tuple[int, int, int], apart: int, c: int) -> bool:
    """Whether a stage of choice c may be so far ``apart`` from the last one of ``state``.

    Where devices take turns, before or after, runs end.
    """
    last, _, used = state
    turned = not form.shared and last == len(form.available)
    if used == 0 or turned or c >= form.turns:
        return apart == ALONE
    if apart == 0:
        return bool(form.together[form.rank[last] if form.shared else last, form.rank[c]])
    return apart < ALONE or form.groups[1] > 1


@lean
def _place_after(
    search: Scratch, state: tuple[int, int, int], apart: int, c: int, again: bool
) -> bool:
    """Place the stages of choice c at all places as far ``apart``: their channel is the same."""
    form = search.form
    _arrive(search, state, apart, c, again)
    for arrival in range(search.arrivals.counts[0, 0, 0]):
        if c >= form.turns:
            if _place(search, state, TAKES_TURNS, c, arrival, False):
                return True
            continue
        for place in range(TAKES_TURNS):
            allowed = form.places[state[1]] >> place & 1 and APART[place] == apart
            possible = allowed and _may_be(form, WITHIN[place], c)
            if possible and _place(search, state, place, c, arrival, again):
                return True
    return False


@lean
def _may_be(form: ServerRelaxation, within: int, c: int) -> bool:
    """Whether a stage of choice c may be in one server (0), in one rack (1), or in several.

    A choice of one device may stand for more of them.
    """
    if within < ALONE and form.devices[c] > form.rooms[within]:
        return False
    return bool(within == 0 or (form.groups[within - 1] > 1 and form.pieces[c] > 1))


@lean_entry
def find(search: Scratch, most: float) -> int:
    """The index of the last stage of a relaxed plan in time.

    NONE if there is none, GAVE_UP after ``most`` steps without an answer.
    """
    search = refer(search)
    form, labels = search.form, search.labels
    labels.counts[:] = 0
    labels.counts[0, 0, 0] = 1
    labels.source[0, 0, 0, 0] = NONE
    labels.values[0, 0, 0, 0] = 0.0
    search.steps[:] = 0
    for used in range(form.size + form.shared):
        for l in range(form.forward.shape[1] - 1):
            if search.steps[1] > most:
                return GAVE_UP
            for last in range(len(labels.counts)):
                if labels.counts[last, l, used] > 0 and _expand(search, (last, l, used)):
                    return int(search.steps[0]) - 1
    return NONE
