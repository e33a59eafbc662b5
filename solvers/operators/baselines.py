"""Placements without a schedule in mind, each listed by upward ranks with insertion."""

from collections.abc import Mapping

import networkx as nx
import numpy as np

from stagewright.formulations.operators.problem import OperatorProblem, Timetable
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.operators.arrays import arrays_of
from stagewright.solvers.operators.dpos import by_rank
from stagewright.solvers.operators.insertion import by_devices
from stagewright.solvers.operators.peers import mean_ranks
from stagewright.solvers.operators.ranks import transfers


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


def expert(problem: OperatorProblem, placement: Mapping[str, str]) -> Timetable:
    """A given placement, device by operator; raises InputError if it does not fit the problem."""
    devices = np.empty(len(problem.names), dtype=np.int64)
    index = {name: d for d, name in enumerate(problem.devices)}
    for i, name in enumerate(problem.names):
        if placement.get(name) not in index:
            raise InputError(
                f"placement of operator {name!r} must be one of {', '.join(problem.devices)}, got "
                f"{placement.get(name)!r}"
            )
        devices[i] = index[placement[name]]
        first = int(np.flatnonzero(problem.group == problem.group[i])[0])
        if devices[first] != devices[i]:
            raise InputError(
                f"placement: {name!r} must be on the device of {problem.names[first]!r}"
            )
    return _listed(problem, devices)


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


def min_cut(problem: OperatorProblem) -> Timetable:
    """Halve the graph again and again where the least is sent (Kernighan and Lin), by groups."""
    groups, readers = len(problem.group_bytes), problem.edges
    graph = nx.Graph()
    graph.add_nodes_from(range(groups))
    wait = transfers(arrays_of(problem), np.mean)
    for i, j, t in zip(*(column.tolist() for column in readers), strict=True):
        a, b = int(problem.group[i]), int(problem.group[j])
        if a != b:
            before = graph.get_edge_data(a, b, {"weight": 0.0})["weight"]
            graph.add_edge(a, b, weight=before + wait[t])
    home = np.zeros(groups, dtype=np.int64)
    _halve(graph, [*range(groups)], [*range(len(problem.devices))], home)
    return _listed(problem, home[problem.group])


def _halve(graph: nx.Graph, members: list[int], devices: list[int], home: Ints) -> None:
    if len(devices) == 1 or len(members) < 2:
        home[members] = devices[0]
        return
    one, other = nx.algorithms.community.kernighan_lin_bisection(
        graph.subgraph(members), weight="weight", seed=0
    )
    half = len(devices) // 2
    _halve(graph, sorted(one), devices[:half], home)
    _halve(graph, sorted(other), devices[half:], home)


def _listed(problem: OperatorProblem, devices: Ints) -> Timetable:
    return by_devices(problem, by_rank(mean_ranks(problem)), devices)


def _group_amounts(problem: OperatorProblem) -> Floats:
    """State and tensors of each group."""
    made = np.bincount(problem.maker, problem.held_bytes, minlength=len(problem.names))
    return np.asarray(np.bincount(problem.group, problem.state_bytes + made), dtype=float)
