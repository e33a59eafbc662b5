"""The most bytes on each device, as the checker's rules count them, compiled."""

import numpy as np
from numba import njit

from stagewright.formulations.operators.problem import Timetable
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.operators.ranks import Arrays


def keeps_memory(arrays: Arrays, found: Timetable) -> bool:
    """Whether no device holds more than its memory at any time."""
    most = peaks(arrays, found)
    return bool((most <= arrays.memory * (1 + RELATIVE_TOLERANCE)).all())


def peaks(arrays: Arrays, found: Timetable) -> Floats:
    """The most bytes on each device, shape (m,)."""
    slack = RELATIVE_TOLERANCE * found.end
    most: Floats = _peaks(
        arrays,
        found.device,
        found.start,
        found.finish,
        found.sent,
        found.target,
        found.sent_start,
        found.sent_finish,
        slack,
    )
    return most


@njit(cache=True, error_model="numpy")
def _peaks(  # noqa: C901 - one pass over tensors
    a: Arrays,
    device: Ints,
    start: Floats,
    finish: Floats,
    sent: Ints,
    target: Ints,
    sent_start: Floats,
    sent_finish: Floats,
    slack: float,
) -> Floats:
    m, tensors = len(a.memory), len(a.maker)
    last = np.zeros((tensors, m))  # when nothing on a device needs a tensor any more
    for t in range(tensors):
        last[t, device[a.maker[t]]] = finish[a.maker[t]]
        for e in range(a.first_reader[t], a.first_reader[t + 1]):
            j = a.reader[e]
            last[t, device[j]] = max(last[t, device[j]], finish[j])
    for k in range(len(sent)):
        h = device[a.maker[sent[k]]]
        last[sent[k], h] = max(last[sent[k], h], sent_finish[k])
    most = len(sent) + tensors
    times, changes = np.empty(2 * most), np.empty(2 * most)
    where, count = np.empty(2 * most, np.int64), 0
    for k in range(most):
        if k < len(sent):
            t, d, begin = sent[k], target[k], sent_start[k]
            amount = a.sent_bytes[t]
        else:
            t = k - len(sent)
            d, begin = device[a.maker[t]], start[a.maker[t]]
            amount = a.held_bytes[t]
        if last[t, d] > begin and amount > 0.0:
            times[count], changes[count], where[count] = begin + 2 * slack, amount, d
            times[count + 1], changes[count + 1], where[count + 1] = last[t, d], -amount, d
            count += 2
    now = np.zeros(m)
    group = np.zeros(len(a.group_bytes), np.bool_)
    for i in range(len(device)):
        if not group[a.group[i]]:
            group[a.group[i]] = True
            now[device[i]] += a.group_bytes[a.group[i]]
    peak = now.copy()
    for k in np.argsort(times[:count], kind="mergesort"):
        d = where[k]
        now[d] += changes[k]
        peak[d] = max(peak[d], now[d])
    return peak
