"""List scheduling with insertion: operators in a given order take the earliest idle time that fits.

What DPOS and its peers have in common.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from stagewright.formulations.operators.problem import GraphTimes, OperatorProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.prices.collectives import paced_seconds
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.solvers.operators.insertion_kernel import ANY, Cutoff, Known, place
from stagewright.solvers.operators.ranks import Arrays, arrays_of


def keeps_memory(arrays: Arrays, found: GraphTimes) -> bool:
    """Whether no device holds more than its memory at any time."""
    most = peaks(arrays, found)
    return bool((most <= arrays.memory * (1 + RELATIVE_TOLERANCE)).all())


def peaks(arrays: Arrays, found: GraphTimes) -> Floats:
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


def insert(
    problem: OperatorProblem,
    order: Ints,
    devices: Ints,
    *,
    lookahead: Floats | None = None,
    held: float | None = 1.0,
) -> GraphTimes | None:
    """The timetable of a list, or None if an operator fits in no device's memory.

    Parameters
    ----------
    order
        All operators, each after those that it reads from.
    devices
        The device of each operator, or ``ANY``: the one where it ends first. A device whose memory
        is full is not taken, even if it is given.
    lookahead
        Seconds that are added to the end of each operator on each device when a device is chosen.
    held
        The share of tensors and copies that counts as in memory for the whole step, next to the
        state. With 1 nothing can exceed the memory at any time. Below 0: a tensor counts until all
        its readers are listed, which is another order than that in time, so that only the share
        -``held`` of the memory is used. None: memory is not looked at.

    Sources without time, such as parameters, are placed with the first of their readers.
    """
    arrays = arrays_of(problem)
    if held is None:
        arrays, held = arrays._replace(memory=np.full(len(problem.devices), np.inf)), 0.0
    found = listed(arrays, order, devices, held, lookahead=lookahead)
    if not found.is_done:
        return None
    return timetable(arrays, found.device, found.start, found.sent_start)


class Listing(NamedTuple):
    """The result of listing operators by the compiled kernel.

    ``done`` operators of the list have their ``device`` and ``start``, all if it ``is_done``. It
    ``is_full`` if some device was passed over because of its memory. ``sent_start`` has shape
    (T, m), NaN where nothing is sent.
    """

    is_done: bool
    done: int
    is_full: bool
    device: Ints
    start: Floats
    sent_start: Floats


NOTHING = Known(0, False, np.zeros(0, dtype=np.int64), np.zeros(0))


NEVER = Cutoff(np.inf, np.zeros(0))


def listed(
    arrays: Arrays,
    order: Ints,
    devices: Ints,
    held: float,
    *,
    lookahead: Floats | None = None,
    known: Known = NOTHING,
    cutoff: Cutoff = NEVER,
) -> Listing:
    """As :func:`insert`, on arrays, from a ``known`` beginning and up to a ``cutoff``."""
    if lookahead is None:
        lookahead = np.zeros((0, 0))
    is_source = sources(arrays) & (devices == ANY)
    return Listing(*place(arrays, order, devices, is_source, lookahead, held, known, cutoff))


def by_devices(problem: OperatorProblem, order: Ints, devices: Ints) -> GraphTimes:
    """The timetable of a list whose devices are all given; memory is not looked at."""
    found = insert(problem, order, devices, held=None)
    if found is None or (found.device != devices).any():
        raise AssertionError("operators with a given device are never moved")
    return found


def timetable(arrays: Arrays, device: Ints, start: Floats, sent_start: Floats) -> GraphTimes:
    """The timetable of starts; ``sent_start`` has shape (T, m), NaN where nothing is sent."""
    sent, target = np.nonzero(~np.isnan(sent_start))
    begin = sent_start[sent, target]
    source = device[arrays.maker[sent]]
    pair = source, target
    runs = paced_seconds(
        arrays.sent_bytes[sent], arrays.seconds_per_byte[pair], arrays.latency[pair]
    )
    return GraphTimes(
        device=device,
        start=start,
        finish=start + arrays.seconds[np.arange(len(device)), device],
        sent=sent,
        target=target,
        sent_start=begin,
        sent_finish=begin + runs,
    )


def sources(arrays: Arrays) -> Bools:
    """Operators that take no time anywhere and read nothing."""
    timeless: Bools = (arrays.seconds == 0).all(axis=1) & (np.diff(arrays.first_input) == 0)
    return timeless
