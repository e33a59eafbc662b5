"""DPOS, device placement and operation sequencing (FastT, section 5.1, algorithm 1)."""

import numpy as np

from stagewright.formulations.operators.problem import OperatorProblem, Timetable
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.operators.arrays import arrays_of
from stagewright.solvers.operators.insertion import ANY, insert
from stagewright.solvers.operators.ranks import followers, transfers, upward


def dpos(problem: OperatorProblem, held: float = 1.0) -> Timetable | None:
    """The timetable of algorithm 1; None if it finds no device with enough memory.

    ``held`` is the share of tensors that count as in memory for the whole step, as in
    :func:`insert`; the paper's memory need of an operator is constant too.
    """
    ranks = max_ranks(problem)  # lines 3 and 4
    devices = np.full(len(ranks), ANY)
    path = critical_path(problem, ranks)
    devices[path] = critical_devices(problem, path, held)  # line 5
    return insert(problem, by_rank(ranks), devices, held=held)  # lines 6 to 22


def max_ranks(problem: OperatorProblem) -> Floats:
    """rank_u with the largest times over devices and pairs of devices."""
    found: Floats = upward(
        arrays_of(problem), problem.seconds.max(axis=1), transfers(problem, np.max)
    )
    return found


def by_rank(ranks: Floats) -> Ints:
    """The operators by descending rank; of equal ranks the first in topological order."""
    return np.argsort(-ranks, kind="stable")


def critical_path(problem: OperatorProblem, ranks: Floats) -> Ints:
    """From the entry of the largest rank always on to the follower of the largest rank."""
    path = [int(np.argmax(ranks))]
    while len(after := followers(problem, path[-1])):
        path.append(int(after[np.argmax(ranks[after])]))
    return np.array(path)


def critical_devices(problem: OperatorProblem, path: Ints, held: float) -> Ints:
    """A device for each operator of the critical path, ANY where none has the memory.

    As much as fits of what is left of the path goes to the device where its average time is the
    least; when that is full the next device is chosen.
    """
    found = np.full(len(path), ANY)
    need = _path_bytes(problem, path, held)
    free = set(range(len(problem.devices)))
    at = 0
    while at < len(path) and free:
        sums = np.cumsum(need[at:])
        fits = {d: int(np.searchsorted(sums, problem.memory[d], side="right")) for d in free}
        usable = [d for d in sorted(free) if fits[d]]
        if not usable:
            break
        means = [problem.seconds[path[at : at + fits[d]], d].mean() for d in usable]
        best = usable[int(np.argmin(means))]
        found[at : at + fits[best]] = best
        at += fits[best]
        free.remove(best)
    return found


def _path_bytes(problem: OperatorProblem, path: Ints, held: float) -> Floats:
    """Bytes of each operator of the path: the state of its group, once, and its tensors."""
    made = np.bincount(problem.maker, problem.held_bytes, minlength=len(problem.names))
    _, first = np.unique(problem.group[path], return_index=True)
    state = np.zeros(len(path))
    state[first] = problem.group_bytes[problem.group[path[first]]]
    need: Floats = state + held * made[path]
    return need
