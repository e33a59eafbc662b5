"""Published list schedulers on the same kernel: HEFT, CPOP, PEFT.

Topcuoglu, Hariri and Wu, IEEE Trans. Parallel Distrib. Syst. 2002; Arabnejad and Barbosa, ibid.
2014. None of them limits memory; here a device whose memory is full is passed over, as in DPOS.
"""

import heapq
from typing import NamedTuple

import numpy as np
from numba import njit

from stagewright.formulations.operators.problem import GraphTimes, OperatorProblem
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.operators.insertion import insert
from stagewright.solvers.operators.insertion_kernel import ANY
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
