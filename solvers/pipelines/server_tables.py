"""Compiled tables of the server-aware relaxation: what layers before and after a cut need at least.

They are in one file because numba recompiles a cached kernel only if the kernel's own file changes.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from stagewright.formulations.pipelines.server_relaxation import ServerRelaxation
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.compiled import inner

FAST = 0  # the best link


class Before(NamedTuple):
    """What the first l layers need at least on at most d devices, shape (V + 1, L + 1) by [d, l].

    If devices are shared, the tables are filled for d = V alone: all devices may be used again.
    ``path`` is the way of one microbatch there and back, ``forth`` its way there.
    """

    path: Floats
    forth: Floats


class Rest(NamedTuple):
    """What the layers from l on need at least on at most d devices, of which q have rank 0.

    The shape is (q + 1, V + 1, L + 1) by [q, d, l], for all q or for q = 0, which then stands for
    any number. If devices are shared, the tables are filled for d = V alone.
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


@inner
def least_link(form: ServerRelaxation, c: int) -> int:
    """The best links that all devices of choice c may have: of a server, a rack, or between."""
    link = 0
    while link < len(form.rooms) and form.devices[c] > form.rooms[link]:
        link += 1
    return link


@inner
def _next_link(form: ServerRelaxation, c: int) -> int:
    """The best link from a split stage of choice c to the next one, which needs room, too."""
    link = 0
    while link < len(form.rooms) and form.devices[c] >= form.rooms[link]:
        link += 1
    return link


@inner
def _stage(form: ServerRelaxation, c: int, start: int, stop: int) -> _Stage:
    f = form.forward[c, stop] - form.forward[c, start]
    both = f + form.gradient[c, stop] - form.gradient[c, start]
    work = form.rounds[c] * (f + form.backward[c, stop] - form.backward[c, start])
    link = least_link(form, c)
    weights = form.parameters[stop] - form.parameters[start]
    finish = form.ring[link, c] * weights + form.ring_latency[link, c]
    finish += form.update[c, stop] - form.update[c, start]
    return _Stage(f, both, form.rounds[c] * both, work, finish)


@inner
def send_seconds(form: ServerRelaxation, l: int, pieces: int, link: int) -> float:
    """Seconds of a transfer before layer l in at most ``pieces`` pieces."""
    size = form.boundary[l] * form.share[min(form.samples, pieces)]
    seconds: float = size * form.seconds_per_byte[link] + form.latency[link]
    return seconds


@njit(cache=True, error_model="numpy")
def fill_before(form: ServerRelaxation, until: float, before: Before) -> None:
    """Fill ``before``, with stages that alone stay within ``until``."""
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


@inner
def _add_all_stages(
    form: ServerRelaxation, until: float, used: int, l: int, before: Before
) -> None:
    """Extend the first l layers on ``used`` devices by every stage."""
    for c in range(len(form.devices)):
        if form.shared or used + form.devices[c] <= form.size:
            _add_stages(form, until, used, l, c, before)


@inner
def _add_stages(
    form: ServerRelaxation, until: float, used: int, l: int, c: int, before: Before
) -> None:
    """Extend the first l layers on ``used`` devices by every stage of choice c."""
    send = send_seconds(form, l, form.pieces[c] * used, FAST) if l > 0 else 0.0
    head, forth = before.path[used, l] + 2 * send, before.forth[used, l] + send
    d = used if form.shared else used + form.devices[c]
    for m in range(l + 1, form.forward.shape[1]):
        stage = _stage(form, c, l, m)
        if head + stage.sent > until or forth + stage.work > until:
            return
        if form.limit[c, l, m] > 0 and (form.shared or forth + stage.work + stage.finish <= until):
            before.path[d, m] = min(before.path[d, m], head + stage.both)
            before.forth[d, m] = min(before.forth[d, m], forth + stage.forward)


@njit(cache=True, error_model="numpy")
def fill_rest(form: ServerRelaxation, until: float, before: Before, rest: Rest) -> None:
    """Fill ``rest``, with stages that stay within ``until`` after the least way ``before``."""
    layers = form.forward.shape[1] - 1
    for table in (rest.path, rest.fill, rest.reduced):
        table[:] = np.inf
        table[:, :, layers] = 0.0
    for q in range(len(rest.path)):
        for d in range(form.size if form.shared else 1, form.size + 1):
            for l in range(layers - 1, -1, -1):
                _fill_entry(form, until, before, (q, d, l), rest)


@inner
def _fill_entry(
    form: ServerRelaxation, until: float, before: Before, at: tuple[int, int, int], rest: Rest
) -> None:
    q, d, l = at
    for table in (rest.path, rest.fill, rest.reduced):
        table[at] = table[q, d - 1, l]
    if before.path[_devices_before(form, d), l] < np.inf:
        for c in range(len(form.devices)):
            if form.devices[c] <= d:
                _put_first(form, until, before, at, c, rest)


@inner
def _devices_before(form: ServerRelaxation, d: int) -> int:
    """How many devices the layers before may use if there are d for the rest."""
    return form.size if form.shared else form.size - d


@inner
def _rest_after(form: ServerRelaxation, c: int, q: int, most: int) -> int:
    """The first index of ``rest`` after a stage of choice c; negative if it is not possible.

    ``most`` is the largest first index: if it is 0, devices of rank 0 are not counted.
    """
    counted = most > 0 and c < form.turns and form.rank[c] == 0
    return q - form.devices[c] if counted else q


@inner
def _put_first(
    form: ServerRelaxation,
    until: float,
    before: Before,
    at: tuple[int, int, int],
    c: int,
    rest: Rest,
) -> None:
    """Improve the entries [q, d, l] by every first stage of choice c."""
    q, d, l = at
    layers, left = form.forward.shape[1] - 1, d if form.shared else d - form.devices[c]
    after = _rest_after(form, c, q, len(rest.path) - 1)
    if after < 0:
        return
    behind = _devices_before(form, d)
    head, forth = before.path[behind, l], before.forth[behind, l]
    wide = form.turns < len(form.devices)
    link = FAST if wide else _next_link(form, c)
    crossings = 1 if wide else form.microbatches
    for m in range(l + 1, layers + 1):
        stage = _stage(form, c, l, m)
        if head + stage.sent > until or forth + stage.work > until:
            return
        finish = 0.0 if form.shared else stage.finish
        if forth + stage.work + finish > until:
            return
        if form.limit[c, l, m] == 0 or (m < layers and left == 0):
            continue
        send = send_seconds(form, m, form.pieces[c] * left, link) if m < layers else 0.0
        around = max(2 * send + rest.fill[after, left, m], 2 * crossings * send)
        onward = stage.forward + send + rest.reduced[after, left, m]
        rest.path[at] = min(rest.path[at], stage.both + 2 * send + rest.path[after, left, m])
        rest.fill[at] = min(rest.fill[at], max(stage.sent, stage.both + around))
        rest.reduced[at] = min(rest.reduced[at], max(stage.work + finish, onward))
