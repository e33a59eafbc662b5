"""Placements without a schedule in mind, each listed by upward ranks with insertion."""

import numpy as np

from stagewright.formulations.operators.problem import OperatorProblem, Timetable
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.operators.dpos import by_rank
from stagewright.solvers.operators.insertion import by_devices
from stagewright.solvers.operators.peers import mean_ranks


def single(problem: OperatorProblem) -> Timetable:
    """All operators on the one device that runs them all in the least time."""
    device = int(np.argmin(problem.seconds.sum(axis=0)))
    return _listed(problem, np.full(len(problem.names), device))


def data_parallel(problem: OperatorProblem) -> Timetable:
    """Every replica on its device, the next one after the last on the first again."""
    return _listed(problem, replica_numbers(problem) % len(problem.devices))


def replica_numbers(problem: OperatorProblem) -> Ints:
    """The replica of every operator; 0 for shared states, means, updates and their companions."""
    marks = [name.partition("/")[0].rpartition("@")[2] for name in problem.names]
    own = np.array([int(one) if one.isdigit() else 0 for one in marks])
    _, first = np.unique(problem.group, return_index=True)
    return own[first][problem.group]


def m_topo(problem: OperatorProblem) -> Timetable:
    """Fill one device after the other in topological order (Baechi, section 3.1).

    Each takes an equal part of all bytes and the largest group, or what its memory holds.
    """
    amount = _group_amounts(problem)
    cap = np.minimum(problem.memory, amount.sum() / len(problem.memory) + amount.max())
    home = np.zeros(len(amount), dtype=np.int64)
    d, filled = 0, 0.0
    for group in dict.fromkeys(problem.group.tolist()):
        if filled + amount[group] > cap[d] and d + 1 < len(cap):
            d, filled = d + 1, 0.0
        home[group] = d
        filled += amount[group]
    return _listed(problem, home[problem.group])


def _listed(problem: OperatorProblem, devices: Ints) -> Timetable:
    return by_devices(problem, by_rank(mean_ranks(problem)), devices)


def _group_amounts(problem: OperatorProblem) -> Floats:
    """State and tensors of each group."""
    made = np.bincount(problem.maker, problem.held_bytes, minlength=len(problem.names))
    return np.asarray(np.bincount(problem.group, problem.state_bytes + made), dtype=float)
