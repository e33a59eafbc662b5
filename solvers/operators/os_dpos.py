"""OS-DPOS, DPOS with operator splitting (FastT, section 5.2, algorithm 2)."""

from dataclasses import dataclass

import numpy as np

from stagewright.formulations.operators.plan import SplitChoice
from stagewright.formulations.operators.problem import Contention, OperatorProblem, Timetable
from stagewright.formulations.operators.splitting import choices_of, split_graph
from stagewright.formulations.operators.step import operator_problem
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.step_graph import StepGraph
from stagewright.solvers.operators.search import METHODS


@dataclass(frozen=True, slots=True, eq=False)
class SplitResult:
    """The chosen splits and the timetable of the graph after them; ``tried`` counts the calls."""

    splits: tuple[SplitChoice, ...]
    problem: OperatorProblem
    timetable: Timetable | None
    tried: int


def os_dpos(graph: StepGraph, cluster: Cluster, contention: Contention = "none") -> SplitResult:
    """The splits of algorithm 2, which stops at the first operator that is better left whole.

    The critical path is that of the first placement and is not computed again. Operators that
    cannot be split are passed over.
    """
    method = METHODS["dpos"]
    problem = operator_problem(graph, cluster, contention)
    found = method(problem)  # line 3
    best = SplitResult((), problem, found, 1)
    if found is None:
        return best
    path = placed_critical_path(problem, found)  # line 4
    work = problem.seconds[path, found.device[path]]
    current, tried = graph, 1
    for i in path[np.argsort(-work, kind="stable")].tolist():  # lines 5 and 7
        node = current.nodes[current.index[problem.names[i]]]
        choices = choices_of(current, node, len(cluster))
        least = best
        for choice in choices:  # line 8
            other = operator_problem(split_graph(current, [choice]), cluster, contention)
            listed = method(other)
            tried += 1
            if listed is not None and (least.timetable is None or listed.end < least.timetable.end):
                least = SplitResult((*best.splits, choice), other, listed, tried)
        if choices and least is best:
            break  # line 12
        if least is not best:
            best, current = least, split_graph(current, least.splits[-1:])  # line 10
    return SplitResult(best.splits, best.problem, best.timetable, tried)


def placed_critical_path(problem: OperatorProblem, timetable: Timetable) -> Ints:
    """The longest chain of operators and the transfers between them, as they are placed."""
    n = len(problem.names)
    maker, reader, tensor = problem.edges
    home, there = timetable.device[maker], timetable.device[reader]
    waits = problem.transfer_seconds(tensor, home, there)
    work = problem.seconds[np.arange(n), timetable.device]
    rank = work.copy()
    after = np.full(n, -1)
    for e in range(len(maker) - 1, -1, -1):  # makers descend, so that readers are done
        i, j = maker[e], reader[e]
        if work[i] + waits[e] + rank[j] > rank[i] or after[i] < 0:
            rank[i], after[i] = max(rank[i], work[i] + waits[e] + rank[j]), j
    path = [int(np.argmax(rank))]
    while after[path[-1]] >= 0:
        path.append(int(after[path[-1]]))
    return np.array(path)
