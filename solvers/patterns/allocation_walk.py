"""Compiled depth-first search over all allocations whose bound is in an interval."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stagewright.formulations.patterns.joint_patterns import JointForm
from stagewright.graphs.documents.arrays import Floats, Ints

Records = NDArray[np.void]
MARGIN = 1e-9  # relative; rounding must not refute a period that is just feasible
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
    if _bytes_on(form, path, row, here, period) > memory:
        return False
    return path[row]["start"] == 0 or _rest_passes(form, path, row, period)


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
def _rest_passes(form: JointForm, path: Records, row: int, period: float) -> bool:
    """Whether the earlier layers fit in time and memory, averaged over all groups."""
    ahead = form.ahead[path[row]["start"]]
    idle = free = 0.0
    for one in form.groups:
        idle += period * (1 + MARGIN)
        free += one["memory"] * (1 + MARGIN)
    for r in range(row + 1):
        stage = _stage(form, path, r)
        kept = (path[r]["flight"] - 1) * period + path[r]["rest"]
        backward = stage["work"] - stage["forward"]
        idle -= stage["work"]
        free -= stage["static"]
        free -= (stage["saved"] * kept + stage["working"] * backward) / period
    delay = (path[row]["flight"] - 1) * period + path[row]["rest"]
    delay += form.sends[path[row]["group"], path[row]["start"]]
    kept = ahead["saved"] * delay + ahead["kept"]
    return bool(ahead["work"] <= idle and ahead["static"] + kept / period <= free)


@njit(cache=True, error_model="numpy")
def _choose(form: JointForm, path: Records, row: int) -> bool:
    """Take the next child at ``row``, identical groups in order; False if there is none."""
    groups, modes = form.stages.shape[:2]
    stop = path[row - 1]["start"] if row > 0 else len(form.ahead) - 1
    while path[row]["choice"] < stop * groups * modes:
        choice = path[row]["choice"]
        group = choice // modes % groups
        path[row]["choice"] = choice + 1
        path[row]["start"] = stop - 1 - choice // (groups * modes)
        path[row]["group"], path[row]["mode"] = group, choice % modes
        if (row == 0 or group != path[row - 1]["group"]) and _is_next(form, path, row):
            return True
    return False


@njit(cache=True, error_model="numpy")
def _is_next(form: JointForm, path: Records, row: int) -> bool:
    """Whether all identical groups of lower number are used in earlier rows."""
    group = path[row]["group"]
    for g in range(group):
        used = form.groups[g]["like"] != form.groups[group]["like"]
        for r in range(row):
            used = used or path[r]["group"] == g
        if not used:
            return False
    return True


@njit(cache=True, error_model="numpy")
def walk(
    form: JointForm, path: Records, row: int, low: float, high: float, steps: int,
    found: Ints, bounds: Floats,
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
        if not _choose(form, path, row):
            row -= 1
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
                    for r in range(len(path)):
                        one, there = path[r], r <= row
                        found[number, r, 0] = one["start"] if there else -1
                        found[number, r, 1] = one["group"] if there else -1
                        found[number, r, 2] = one["mode"] if there else -1
                    number += 1
    return number, row


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
