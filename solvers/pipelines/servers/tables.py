"""Compiled tables of the server-aware relaxation: least needs of layers around a cut.

They are in one file because numba recompiles a cached kernel only if the kernel's own file changes.
"""

from typing import NamedTuple

import numpy as np

from stagewright.formulations.pipelines.bounds.server_relaxation import ServerRelaxation
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.compiled import lean, lean_entry, paced, refer

FAST = 0  # the best link


class Before(NamedTuple):
    """Least needs of the first l layers on at most d devices, shape (V + 1, L + 1) by [d, l].

    If devices are shared, the tables are filled for d = V alone: all devices may be used again.
    ``path`` is the way of one microbatch there and back, ``forth`` its way there.
    """

    path: Floats
    forth: Floats


class ServerRest(NamedTuple):
    """Least needs of the layers from l on, on at most d devices, of which q have rank 0.

    The shape is (q + 1, V + 1, L + 1) by [q, d, l], for all q or for q = 0, which then stands for
    any number.
    ``path`` is the way of one microbatch there and back; ``fill`` the largest, over stages and
    channels, of the way to it and back and M microbatches on it; ``reduced`` the same with the way
    there alone, and the all-reduce and the optimizer's step of a stage. inf if nothing fits.
    """

    path: Floats
    fill: Floats
    reduced: Floats


class _Stage(NamedTuple):
    """Seconds of a stage: forward, both ways, all microbatches, all-reduce and step.

    ``sent`` ends when the gradients of all microbatches can be sent, ``work`` with the last one.
    """

    forward: float
    both: float
    sent: float
    work: float
    finish: float


@lean
def least_link(form: ServerRelaxation, c: int) -> int:
    """The best links that all devices of choice c may have: of a server, a rack, or between."""
    link = 0
    while link < len(form.rooms) and form.devices[c] > form.rooms[link]:
        link += 1
    return link


@lean
def _next_link(form: ServerRelaxation, c: int) -> int:
    """The best link from a split stage of choice c to the next one, which needs room, too."""
    link = 0
    while link < len(form.rooms) and form.devices[c] >= form.rooms[link]:
        link += 1
    return link


@lean
def _stage(form: ServerRelaxation, c: int, start: int, stop: int) -> _Stage:
    f = form.forward[c, stop] - form.forward[c, start]
    both = f + form.gradient[c, stop] - form.gradient[c, start]
    work = form.rounds[c] * (f + form.backward[c, stop] - form.backward[c, start])
    link = least_link(form, c)
    weights = form.parameters[stop] - form.parameters[start]
    finish = paced(weights, form.ring[link, c], form.ring_latency[link, c])
    finish += form.update[c, stop] - form.update[c, start]
    return _Stage(f, both, form.rounds[c] * both, work, finish)


@lean
def send_seconds(form: ServerRelaxation, l: int, pieces: int, link: int) -> float:
    """Seconds of a transfer before layer l in at most ``pieces`` pieces."""
    size = form.boundary[l] * form.share[min(form.samples, pieces)]
    seconds: float = paced(size, form.seconds_per_byte[link], form.latency[link])
    return seconds


@lean_entry
def fill_before(form: ServerRelaxation, until: float, before: Before) -> None:
    """Fill ``before``, with stages that alone stay within ``until``."""
    form, before = refer(form), refer(before)
    layers = form.forward.shape[1] - 1
    before.path[:] = np.inf
    before.forth[:] = np.inf
    before.path[0, 0] = before.forth[0, 0] = 0.0
    if form.shared:
        before.path[form.size, 0] = before.forth[form.size, 0] = 0.0
        for l in range(layers):
            _add_all_stages(form, until, form.size, l, before)
        return
    for used in range(form.size):
        for l in range(layers if used > 0 else 1):
            if before.path[used, l] < np.inf and (l > 0) == (used > 0):
                _add_all_stages(form, until, used, l, before)
        for l in range(layers + 1):
            before.path[used + 1, l] = min(before.path[used + 1, l], before.path[used, l])
            before.forth[used + 1, l] = min(before.forth[used + 1, l], before.forth[used, l])


@lean
def _add_all_stages(
    form: ServerRelaxation, until: float, used: int, l: int, before: Before
) -> None:
    """Extend the first l layers on ``used`` devices by every stage."""
    for c in range(len(form.devices)):
        if form.shared or used + form.devices[c] <= form.size:
            _add_stages(form, until, used, l, c, before)


@lean
def _add_stages(
    form: ServerRelaxation, until: float, used: int, l: int, c: int, before: Before
) -> None:
    """Extend the first l layers on ``used`` devices by every stage of choice c."""
    send = send_seconds(form, l, form.pieces[c] * used, FAST) if l > 0 else 0.0
    head, forth = before.path[used, l] + 2 * send, before.forth[used, l] + send
    d = used if form.shared else used + form.devices[c]
    for m in range(l + 1, form.forward.shape[1]):
        stage = _stage(form, c, l, m)
        finish = 0.0 if form.shared else stage.finish
        if head + stage.sent > until or forth + stage.work + finish > until:
            return
        if form.limit[c, l, m] > 0:
            before.path[d, m] = min(before.path[d, m], head + stage.both)
            before.forth[d, m] = min(before.forth[d, m], forth + stage.forward)


@lean_entry
def fill_rest(form: ServerRelaxation, until: float, before: Before, rest: ServerRest) -> None:
    """Fill ``rest``, with stages that stay within ``until`` after the least way ``before``.

    Its entries are [q, l, d] here, so that the loop over d, which is the longest, is over
    neighbours.
    """
    layers, counted, given = form.forward.shape[1] - 1, len(rest.path), refer(rest)
    form, before = refer(form), refer(before)
    for table in rest:
        table[:] = np.inf
        table[:, layers] = 0.0
    for l in range(layers - 1, -1, -1):
        for q in range(counted):
            for c in range(len(form.devices)):
                _put_first(form, until, before, q, l, c, given)
            for table in rest:
                for d in range(1, form.size + 1):
                    table[q, l, d] = min(table[q, l, d], table[q, l, d - 1])


@lean_entry
def fill_shared_rest(
    form: ServerRelaxation, until: float, before: Before, drain: Floats, rest: ServerRest
) -> None:
    """Fill ``rest`` where every stage may use all devices; ``drain`` is that of the loads.

    Neighbouring stages on the same devices are one here, so that only ``drain`` has all-reduces.
    """
    form, before = refer(form), refer(before)
    size, layers = form.size, form.forward.shape[1] - 1
    for table in (rest.path, rest.fill, rest.reduced):
        table[:] = np.inf
        table[0, size, layers] = 0.0
    path, fill, reduced = rest.path[0, size], rest.fill[0, size], rest.reduced[0, size]
    for l in range(layers - 1, -1, -1):
        head, forth = before.path[size, l], before.forth[size, l]
        for c in range(len(form.devices)):
            for m in range(l + 1, layers + 1):
                stage = _stage(form, c, l, m)
                if head + stage.sent > until or forth + stage.work > until:
                    break
                if form.limit[c, l, m] == 0:
                    continue
                send = 0.0
                if m < layers:
                    send = send_seconds(form, m, form.pieces[c] * size, _next_link(form, c))
                around = max(2 * send + fill[m], 2 * form.microbatches * send)
                path[l] = min(path[l], stage.both + 2 * send + path[m])
                fill[l] = min(fill[l], max(stage.sent, stage.both + around))
                onward = stage.forward + send + reduced[m]
                turn = max(stage.forward + 2 * send + path[m], form.microbatches * stage.forward)
                reduces = turn + drain[least_link(form, c), c, l, m]
                reduced[l] = min(reduced[l], max(stage.work, onward, reduces))


@lean
def _rest_after(form: ServerRelaxation, c: int, q: int, most: int) -> int:
    """The first index of ``rest`` after a stage of choice c; negative if it is not possible.

    ``most`` is the largest first index: if it is 0, devices of rank 0 are not counted.
    """
    counted = most > 0 and c < form.turns and form.rank[c] == 0
    return q - form.devices[c] if counted else q


@lean
def _put_first(
    form: ServerRelaxation, until: float, before: Before, q: int, l: int, c: int, rest: ServerRest
) -> None:
    """Improve the entries [q, l, d] by every first stage of choice c; ``rest`` is by [q, l, d]."""
    layers, r = form.forward.shape[1] - 1, form.devices[c]
    after = _rest_after(form, c, q, len(rest.path) - 1)
    if after < 0:
        return
    last = form.size  # the largest d; more devices after the cut leave fewer, and slower, before it
    while last >= r and before.path[form.size - last, l] == np.inf:
        last -= 1
    for m in range(l + 1, layers + 1):
        stage = _stage(form, c, l, m)
        while last >= r and (
            before.path[form.size - last, l] + stage.work > until
            or before.forth[form.size - last, l] + stage.work + stage.finish > until
        ):
            last -= 1
        if last < r:
            return
        if form.limit[c, l, m] > 0:
            _put_all(form, stage, c, last - r, (after, m), (q, l), rest)


@lean
def _put_all(
    form: ServerRelaxation,
    stage: _Stage,
    c: int,
    most: int,
    after: tuple[int, int],
    at: tuple[int, int],
    rest: ServerRest,
) -> None:
    """Improve the entries ``at`` by a stage of choice c, with up to ``most`` devices after it."""
    r, m = form.devices[c], after[1]
    if m == form.forward.shape[1] - 1:
        _put(stage, 0.0, 1, 0, 1, r, after, at, rest)
        return
    wide = form.turns < len(form.devices)
    link = FAST if wide else _next_link(form, c)
    crossings = 1 if wide else form.microbatches
    left = 1
    # With more pieces than samples, a transfer takes no less.
    while left <= most and form.pieces[c] * left < form.samples:
        send = send_seconds(form, m, form.pieces[c] * left, link)
        _put(stage, send, crossings, left, left + 1, r, after, at, rest)
        left += 1
    send = send_seconds(form, m, form.samples, link)
    _put(stage, send, crossings, left, most + 1, r, after, at, rest)


@lean
def _put(
    stage: _Stage,
    send: float,
    crossings: int,
    low: int,
    high: int,
    r: int,
    after: tuple[int, int],
    at: tuple[int, int],
    rest: ServerRest,
) -> None:
    """Improve the entries ``at`` by the stage on r devices, with low ... high - 1 devices after it.

    ``send`` is the time of a transfer to the next stage.
    """
    both, forth = stage.both + 2 * send, stage.forward + send
    least = max(stage.work, stage.both + 2 * crossings * send)
    path, fill, reduced = rest.path[after], rest.fill[after], rest.reduced[after]
    into_path, into_fill, into_reduced = rest.path[at], rest.fill[at], rest.reduced[at]
    for left in range(low, high):
        d = left + r
        into_path[d] = min(into_path[d], both + path[left])
        into_fill[d] = min(into_fill[d], max(least, stage.both + (2 * send + fill[left])))
        longest = max(stage.work + stage.finish, forth + reduced[left])
        into_reduced[d] = min(into_reduced[d], longest)
