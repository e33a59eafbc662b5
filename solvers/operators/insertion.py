"""List scheduling with insertion: operators in a given order take the earliest idle time that fits.

What DPOS and its peers have in common. HEFT and CPOP: Topcuoglu, Hariri and Wu, IEEE Trans.
Parallel Distrib. Syst. 2002; PEFT: Arabnejad and Barbosa, ibid. 2014. None of them limits memory;
here a device whose memory is full is passed over, as in DPOS.
"""

import heapq
from typing import NamedTuple

import numpy as np
from numba import njit

from stagewright.formulations.operators.problem import GraphTimes, OperatorProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.prices.collectives import paced_seconds
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.solvers.operators.insertion_kernel import ANY, Cutoff, Known, place
from stagewright.solvers.operators.ranks import (
    Arrays,
    arrays_of,
    downward,
    followers,
    longest_path,
    transfers,
    upward,
)


class Priorities(NamedTuple):
    """Lines 3 to 6 of algorithm 1: the list, and the critical path."""

    order: Ints
    path: Ints


def dpos(problem: OperatorProblem, held: float = 1.0) -> GraphTimes | None:
    """The timetable of algorithm 1; None if it finds no device with enough memory.

    ``held`` is the share of tensors that count as in memory for the whole step, as in
    :func:`insert`; the paper's memory need of an operator is constant too.
    """
    arrays = arrays_of(problem)
    found = priorities(arrays)
    return insert(problem, found.order, given_devices(arrays, found.path, held), held=held)


def priorities(arrays: Arrays) -> Priorities:
    """Priorities of operators: rank_u with the largest times over devices and pairs of devices."""
    ranks = upward(arrays, arrays.seconds.max(axis=1), transfers(arrays, np.max))
    return Priorities(by_rank(ranks), longest_path(arrays, ranks))


def given_devices(arrays: Arrays, path: Ints, held: float) -> Ints:
    """The critical-path devices (line 5), ANY for all other operators."""
    devices = np.full(len(arrays.seconds), ANY)
    devices[path] = critical_devices(arrays, path, held)
    return devices


def by_rank(ranks: Floats) -> Ints:
    """The operators by descending rank; of equal ranks the first in topological order."""
    return np.argsort(-ranks, kind="stable")


def critical_devices(arrays: Arrays, path: Ints, held: float) -> Ints:
    """A device for each operator of the critical path, ANY where none has the memory.

    As much as fits of what is left of the path goes to the device where its average time is the
    least; when that is full the next device is chosen.
    """
    found = np.full(len(path), ANY)
    need = _path_bytes(arrays, path, held)
    free = set(range(len(arrays.memory)))
    at = 0
    while at < len(path) and free:
        sums = np.cumsum(need[at:])
        fits = {d: int(np.searchsorted(sums, arrays.memory[d], side="right")) for d in free}
        usable = [d for d in sorted(free) if fits[d]]
        if not usable:
            break
        means = [arrays.seconds[path[at : at + fits[d]], d].mean() for d in usable]
        best = usable[int(np.argmin(means))]
        found[at : at + fits[best]] = best
        at += fits[best]
        free.remove(best)
    return found


def _path_bytes(arrays: Arrays, path: Ints, held: float) -> Floats:
    """Bytes of each operator of the path: the state of its group, once, and its tensors."""
    made = np.bincount(arrays.maker, arrays.held_bytes, minlength=len(arrays.seconds))
    _, first = np.unique(arrays.group[path], return_index=True)
    state = np.zeros(len(path))
    state[first] = arrays.group_bytes[arrays.group[path[first]]]
    need: Floats = state + max(0.0, held) * made[path]
    return need


EQUAL = 1e-9  # relative: priorities of the operators on a critical path of CPOP


def heft(problem: OperatorProblem, held: float = 1.0) -> GraphTimes | None:
    """Heterogeneous earliest finish time: by mean upward ranks, where each ends first."""
    order = by_rank(mean_ranks(problem))
    return insert(problem, order, np.full(len(order), ANY), held=held)


def mean_ranks(problem: OperatorProblem) -> Floats:
    """rank_u with the mean times over devices and pairs of devices."""
    arrays = arrays_of(problem)
    found: Floats = upward(arrays, problem.seconds.mean(axis=1), transfers(arrays, np.mean))
    return found


def cpop(problem: OperatorProblem, held: float = 1.0) -> GraphTimes | None:
    """Critical path on a processor: the path on the device that is fastest for all of it."""
    arrays = arrays_of(problem)
    seconds, mean = problem.seconds.mean(axis=1), transfers(arrays, np.mean)
    priority = upward(arrays, seconds, mean) + downward(arrays, seconds, mean)
    path = _critical(problem, priority)
    devices = np.full(len(seconds), ANY)
    devices[path] = int(np.argmin(problem.seconds[path].sum(axis=0)))
    return insert(problem, _ready_order(problem, priority), devices, held=held)


def _critical(problem: OperatorProblem, priority: Floats) -> list[int]:
    """The critical path: from an entry, always to a successor of the same, largest priority."""
    first, _ = problem.inputs
    entries = np.flatnonzero(np.diff(first) == 0)
    path = [int(entries[np.argmax(priority[entries])])]
    least = priority[path[0]] * (1 - EQUAL)
    while len(after := followers(problem, path[-1])):
        best = int(after[np.argmax(priority[after])])
        if priority[best] < least:
            break
        path.append(best)
    return path


def peft(problem: OperatorProblem, held: float = 1.0) -> GraphTimes | None:
    """Predict earliest finish time: devices by a table of optimistic costs to the end."""
    arrays = arrays_of(problem)
    table = optimistic_costs(arrays, transfers(arrays, np.mean))
    order = _ready_order(problem, table.mean(axis=1))
    return insert(problem, order, np.full(len(order), ANY), lookahead=table, held=held)


@njit(cache=True)
def optimistic_costs(arrays: Arrays, transfer: Floats) -> Floats:
    """Least seconds after each operator on each device to the end (equation 5), shape (n, m)."""
    n, m = arrays.seconds.shape
    table = np.zeros((n, m))
    for i in range(n - 1, -1, -1):
        for t in range(arrays.first_output[i], arrays.first_output[i + 1]):
            for e in range(arrays.first_reader[t], arrays.first_reader[t + 1]):
                j = arrays.reader[e]
                costs = table[j] + arrays.seconds[j]
                away = costs.min() + transfer[t]
                for d in range(m):
                    table[i, d] = max(table[i, d], min(costs[d], away))
    return table


def _ready_order(problem: OperatorProblem, priority: Floats) -> Ints:
    """The list in which the ready operator of the largest priority always comes next."""
    maker, reader, _ = problem.edges
    waits = np.bincount(reader, minlength=len(priority)).tolist()
    order: list[int] = []
    ready = [(-priority[i], i) for i, count in enumerate(waits) if count == 0]
    heapq.heapify(ready)
    first = np.searchsorted(maker, np.arange(len(waits) + 1)).tolist()
    readers = reader.tolist()
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for j in readers[first[i] : first[i + 1]]:
            waits[j] -= 1
            if waits[j] == 0:
                heapq.heappush(ready, (-priority[j], j))
    return np.array(order)


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
