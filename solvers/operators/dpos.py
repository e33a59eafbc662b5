"""DPOS, device placement and operation sequencing (FastT, section 5.1, algorithm 1)."""

from typing import NamedTuple

import numpy as np

from stagewright.formulations.operators.problem import OperatorProblem, Timetable
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.operators.insertion import insert
from stagewright.solvers.operators.insertion_kernel import ANY
from stagewright.solvers.operators.ranks import Arrays, arrays_of, longest_path, transfers, upward


class Priorities(NamedTuple):
    """Lines 3 to 6 of algorithm 1: the list, and the critical path."""

    order: Ints
    path: Ints


def dpos(problem: OperatorProblem, held: float = 1.0) -> Timetable | None:
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
