"""Compiled depth-first search over all allocations whose bound is in an interval."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stagewright.formulations.patterns.joint_patterns import JointForm
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.patterns.completion import MARGIN, UNITS, Completion, delayed, row_of

Records = NDArray[np.void]
CLOSE = 1e-9  # relative precision of the bound of an allocation
ROW = np.dtype([
    ("start", np.int64), ("group", np.int64), ("mode", np.int64), ("choice", np.int64),
    ("flight", np.int64), ("rest", np.float64), ("period", np.float64),
])  # fmt: skip
"""A stage on the search path, which starts with the last stage of the pipeline.

``choice`` counts the children of the previous row that were examined. ``flight`` and ``rest`` are
the group of the stage in 1F1B* at the trial ``period``, and the seconds of that group from the
stage on.
"""


SUMS = 7
LOAD, ALWAYS, AVERAGE, MOST, TOGETHER, FLIGHT, REST = range(SUMS)
"""Sums over the rows before each row, shape (rows + 1, G + 1, SUMS), at the longest period.

Per group its load, and the bytes that it always keeps, keeps more on average, and at its peak;
``FLIGHT`` of its last stage, and ``TOGETHER`` the bytes per microbatch of its stages of this
number. The last row holds ``FLIGHT`` and ``REST`` of the last stage of all.
"""


@njit(cache=True, error_model="numpy")
def _stage(form: JointForm, path: Records, row: int) -> Any:
    stop = path[row - 1]["start"] if row > 0 else len(form.ahead) - 1
    one = path[row]
    return form.stages[one["group"], one["mode"], one["start"], stop]


@njit(cache=True, error_model="numpy")
def _link(form: JointForm, path: Records, row: int) -> Any:
    """The transfer between this stage and the next one."""
    behind = path[row - 1]
    return form.links[path[row]["group"], behind["group"], behind["start"]]


@njit(cache=True, error_model="numpy")
def _period(form: JointForm, path: Records, last: int, length: float) -> float:
    """An upper bound on the period in an iteration of ``length`` seconds.

    The pause is at least the time of the updates of any group in the rows up to ``last``, and at
    least the average update time per group over all layers.
    """
    total = form.ahead[path[last]["start"]]["update"]
    pause = 0.0
    for r in range(last + 1):
        total += _stage(form, path, r)["update"]
        own = 0.0
        for q in range(r + 1):
            if path[q]["group"] == path[r]["group"]:
                own += _stage(form, path, q)["update"]
        pause = max(pause, own)
    period: float = (length - max(pause, total / len(form.groups))) / form.microbatches
    return period


@njit(cache=True, error_model="numpy")
def _passes(form: JointForm, path: Records, row: int, period: float, pause: float) -> bool:
    """Whether ``period`` is not refuted by the rows up to ``row``.

    Stores the group of this row in 1F1B*, which requires those of the earlier rows. ``pause`` is an
    upper bound on the part of the pause that all-reduces may use.
    """
    if period <= 0.0:
        return False
    _join(form, path, row, period)
    if not _in_time(form, path, row, period, pause):
        return False
    here = path[row]["group"]
    memory = form.groups[here]["memory"] * (1 + MARGIN)
    return bool(_bytes_on(form, path, row, here, period) <= memory)


@njit(cache=True, error_model="numpy")
def _join(form: JointForm, path: Records, row: int, period: float) -> None:
    """1F1B*: add the transfer after the stage, then the stage, to the current or a new group."""
    limit = period * (1 + MARGIN)
    flight, taken = 1, 0.0
    if row > 0:
        flight, taken = path[row - 1]["flight"], path[row - 1]["rest"]
        link = _link(form, path, row)
        seconds = link["there"] + link["back"]
        if taken + seconds > limit:
            flight, taken = flight + 1, 0.0
        taken += seconds
    work = _stage(form, path, row)["work"]
    if taken + work > limit:
        flight, taken = flight + 1, 0.0
    path[row]["flight"], path[row]["rest"] = flight, taken + work
    path[row]["period"] = period


@njit(cache=True, error_model="numpy")
def _rejoin(form: JointForm, path: Records, row: int, period: float) -> None:
    """Recompute 1F1B* for the rows before ``row`` if they are stored for another period."""
    if row > 0 and path[row - 1]["period"] != period:
        for r in range(row):
            _join(form, path, r, period)


@njit(cache=True, error_model="numpy")
def _in_time(form: JointForm, path: Records, row: int, period: float, pause: float) -> bool:
    """Check the loads of the stage's group and link, all-reduces, and two weight versions.

    The all-reduces of all earlier stages of a group run between the backward of a stage and the
    next use of its weights, or in a pause.
    """
    limit = period * (1 + MARGIN)
    here, behind = path[row]["group"], path[max(row - 1, 0)]["group"]
    load = transfers = 0.0
    for r in range(row + 1):
        one, other = path[r]["group"], path[max(r - 1, 0)]["group"]
        if one == here:
            load += _stage(form, path, r)["work"]
        if r > 0 and min(one, other) == min(here, behind) and max(one, other) == max(here, behind):
            link = _link(form, path, r)
            transfers += link["there"] + link["back"]
    if load > limit or transfers > limit:
        return False
    reduced = 0.0
    for r in range(row, -1, -1):
        if path[r]["group"] == here:
            reduced += _stage(form, path, r)["reduce"]
            kept = (path[r]["flight"] - 1) * period + path[r]["rest"]
            if kept + max(0.0, reduced - pause) > (form.microbatches + 1) * limit:
                return False
    return reduced - pause <= form.microbatches * limit


@njit(cache=True, error_model="numpy")
def _bytes_on(form: JointForm, path: Records, row: int, here: int, period: float) -> float:
    """A lower bound on the peak bytes of group ``here``, given the rows up to ``row``.

    A stage in the g-th group of 1F1B* always keeps at least g - 1 microbatches, and g during at
    least rest / T of the period. While it keeps g, so do all earlier stages of group g, as a stage
    keeps at least as many as any later stage. Some pairs of different groups must overlap as well.
    """
    always = average = most = 0.0
    for r in range(row + 1):
        if path[r]["group"] != here:
            continue
        stage = _stage(form, path, r)
        backward = stage["work"] - stage["forward"]
        always += stage["static"] + (path[r]["flight"] - 1) * stage["saved"]
        average += (stage["saved"] * path[r]["rest"] + stage["working"] * backward) / period
        together = _saved_together(form, path, r, row)
        most = max(most, together + stage["working"])
        for q in range(r):
            if path[q]["group"] == here and _must_overlap(form, path, r, q, period):
                most = max(most, together + _saved_together(form, path, q, row))
    return always + max(average, most)


@njit(cache=True, error_model="numpy")
def _saved_together(form: JointForm, path: Records, first: int, row: int) -> float:
    """Bytes of a microbatch of a stage and of earlier stages on its device in its 1F1B* group."""
    total = 0.0
    for r in range(first, row + 1):
        one, other = path[r], path[first]
        if one["group"] == other["group"] and one["flight"] == other["flight"]:
            total += _stage(form, path, r)["saved"]
    return total


@njit(cache=True, error_model="numpy")
def _must_overlap(form: JointForm, path: Records, r: int, q: int, period: float) -> bool:
    """Whether stage r and a later stage q of a lower group must be at their peaks simultaneously.

    If they keep no more than in 1F1B*, each is at its peak during at least its ``rest`` of every
    period; if one keeps more, memory does not decrease. With groups g + 1 and g, these times are
    disjoint only if the path from the forward of r to that of q leaves enough time of the period
    for q's peak, and the backward path likewise.
    """
    limit = period * (1 + MARGIN)
    if path[r]["flight"] == path[q]["flight"]:
        return False  # already counted together
    if path[r]["rest"] + path[q]["rest"] > limit:
        return True
    if path[r]["flight"] > path[q]["flight"] + 1:
        return False
    forth = back = 0.0
    for i in range(q + 1, r + 1):
        stage, link = _stage(form, path, i), _link(form, path, i)
        forth += stage["forward"] + link["there"]
        back += stage["work"] - stage["forward"] + link["back"]
    return bool(max(forth, back) + path[q]["rest"] > limit)


@njit(cache=True, error_model="numpy")
def _extends(form: JointForm, rest: Completion, path: Records, sums: Floats, row: int) -> bool:
    """Whether the stage at ``row`` and some earlier stages fit, by sums kept from row to row.

    All conditions are implied by `_passes` of complete allocations, so this only saves time. Fills
    ``sums[row + 1]``.
    """
    limit, here = rest.period * (1 + MARGIN), path[row]["group"]
    stage, own = _stage(form, path, row), sums[row, here]
    load = own[LOAD] + stage["work"]
    if load > limit:
        return False
    last = len(form.groups)
    flight, part = int(sums[row, last, FLIGHT]), sums[row, last, REST]
    if row > 0:
        link = _link(form, path, row)
        if link["there"] + link["back"] > limit:
            return False
        flight, part = delayed(flight, part, link["there"] + link["back"], limit)
    flight, part = delayed(flight, part, stage["work"], limit)
    together = stage["saved"] + (own[TOGETHER] if own[FLIGHT] == flight else 0.0)
    always = own[ALWAYS] + stage["static"] + (flight - 1) * stage["saved"]
    average = stage["saved"] * part + stage["working"] * (stage["work"] - stage["forward"])
    average = own[AVERAGE] + average / rest.period
    most = max(own[MOST], together + stage["working"])
    if always + max(average, most) > form.groups[here]["memory"] * (1 + MARGIN):
        return False
    sums[row + 1] = sums[row]
    then = sums[row + 1, here]
    then[LOAD], then[ALWAYS], then[AVERAGE] = load, always, average
    then[MOST], then[TOGETHER], then[FLIGHT] = most, together, flight
    sums[row + 1, last, FLIGHT], sums[row + 1, last, REST] = flight, part
    return path[row]["start"] == 0 or _completes(form, rest, path[row]["start"], sums[row + 1])


@njit(cache=True, error_model="numpy")
def _completes(form: JointForm, rest: Completion, stop: int, sums: Floats) -> bool:
    """Whether layers [0, stop) fit in the free memory, and in each group's free time."""
    last, limit = len(form.groups), rest.period * (1 + MARGIN)
    row = row_of(int(sums[last, FLIGHT]), sums[last, REST], rest.period)
    free, work = -rest.needed[stop, row], 0.0
    for g in range(last):
        left = form.groups[g]["memory"] * (1 + MARGIN) - sums[g, ALWAYS] - sums[g, AVERAGE]
        free += left
        units = min(UNITS, int(left / rest.unit * (1 + MARGIN)))
        work += min(limit - sums[g, LOAD], rest.placeable[stop, row, units])
    return bool(free >= 0.0 and work >= form.ahead[stop]["work"] * (1 - MARGIN))


@njit(cache=True, error_model="numpy")
def _choose(form: JointForm, rest: Completion, path: Records, sums: Floats, row: int) -> bool:
    """Take the next child at ``row``; False if there is none."""
    groups, modes = form.stages.shape[:2]
    stop = path[row - 1]["start"] if row > 0 else len(form.ahead) - 1
    while True:
        choice = path[row]["choice"]
        group = choice // modes % groups
        path[row]["choice"] = choice + 1
        path[row]["start"] = rest.starts[stop, choice // (groups * modes)]
        path[row]["group"], path[row]["mode"] = group, choice % modes
        if path[row]["start"] < 0:
            return False
        if (row == 0 or group != path[row - 1]["group"]) and _is_next(form, sums, row, group):
            return True


@njit(cache=True, error_model="numpy")
def _is_next(form: JointForm, sums: Floats, row: int, group: int) -> bool:
    """Whether all identical groups of lower number are used in earlier rows."""
    for g in range(group):
        if form.groups[g]["like"] == form.groups[group]["like"] and sums[row, g, FLIGHT] == 0:
            return False
    return True


@njit(cache=True, error_model="numpy")
def walk(
    form: JointForm, rest: Completion, path: Records, sums: Floats, row: int, low: float,
    high: float, steps: int, found: Ints, bounds: Floats,
) -> tuple[int, int]:  # fmt: skip
    """Continue the search at ``row`` for ``steps`` steps.

    Returns the number of allocations found, and the row to continue at, or -1 at the end. Found are
    the allocations that ``low`` refutes and ``high`` does not: ``found`` gets the start, group and
    mode of every row (-1 after the last), ``bounds`` the largest refuted length.
    """
    number = 0
    for _ in range(steps):
        if row < 0 or number == len(found):
            break
        if not _choose(form, rest, path, sums, row):
            row -= 1
            continue
        if not _extends(form, rest, path, sums, row):
            continue
        period = _period(form, path, row, high)
        _rejoin(form, path, row, period)
        # Earlier layers may make the pause longer.
        if _passes(form, path, row, period, high if form.updated else 0.0):
            if path[row]["start"] > 0:
                row += 1
                path[row]["choice"] = 0
            else:
                bounds[number] = _refuted(form, path, row, low, high)
                if bounds[number] >= low:
                    _write(path, row, found[number])
                    number += 1
    return number, row


@njit(cache=True, error_model="numpy")
def _write(path: Records, last: int, found: Ints) -> None:
    for r in range(len(path)):
        one, there = path[r], r <= last
        found[r, 0] = one["start"] if there else -1
        found[r, 1] = one["group"] if there else -1
        found[r, 2] = one["mode"] if there else -1


@njit(cache=True, error_model="numpy")
def _refuted(form: JointForm, path: Records, last: int, low: float, high: float) -> float:
    """The largest refuted length from ``low`` to ``high``; -1 if ``low`` is not refuted."""
    found, above, trial = -1.0, high, low
    while above - found > CLOSE * above:
        passes, period = True, _period(form, path, last, trial)
        for row in range(last + 1):
            pause = trial - form.microbatches * period if form.updated else 0.0
            passes = passes and _passes(form, path, row, period, pause)
        if passes:
            above = trial
        else:
            found = trial
        if found < 0.0:
            break
        trial = (found + above) / 2
    period = _period(form, path, last, high)
    for row in range(last + 1):
        _join(form, path, row, period)
    return found
