"""OS-DPOS, DPOS with operator splitting (FastT, section 5.2, algorithm 2).

Line 8 runs algorithm 1 for every way to divide an operator. What it gives is computed without most
of the work: the arrays are divided in place of the document; the list is the same up to some
operator, and so are the devices and times before it; and a list ends when it cannot be shorter than
the best one. The answer is that of algorithm 2.
"""

from dataclasses import dataclass, field

import numpy as np

from stagewright.formulations.operators.plan import SplitChoice, operator_problem
from stagewright.formulations.operators.problem import Contention, GraphTimes, OperatorProblem
from stagewright.formulations.operators.splitting import choices_of, split_graph
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.operators.step_graph import StepGraph
from stagewright.solvers.operators.dividing import OperatorDivision, Places, divided
from stagewright.solvers.operators.insertion import (
    NEVER,
    NOTHING,
    Listing,
    given_devices,
    keeps_memory,
    listed,
    priorities,
    timetable,
)
from stagewright.solvers.operators.insertion_kernel import ANY, Cutoff, Known
from stagewright.solvers.operators.ranks import Arrays, arrays_of, upward
from stagewright.solvers.operators.search import FREED, SHARES

ROUNDING = 1e-9  # relative: of sums of times


@dataclass(frozen=True, slots=True, eq=False)
class SplitResult:
    """The chosen splits and the timetable of the graph after them; ``tried`` counts the calls."""

    splits: tuple[SplitChoice, ...]
    problem: OperatorProblem
    timetable: GraphTimes | None
    tried: int


@dataclass(frozen=True, slots=True)
class _DposRun:
    """Algorithm 1 on ``arrays``, with each of ``ways`` to count memory as far as necessary."""

    arrays: Arrays
    order: Ints
    devices: tuple[Ints, ...] = ()
    listings: tuple[Listing, ...] = ()
    timetable: GraphTimes | None = None


@dataclass(slots=True)
class _SplitSearch:
    """The state of OS-DPOS: the best run so far, and its splits."""

    places: Places
    ways: tuple[float, ...]
    best: _DposRun
    splits: list[SplitChoice] = field(default_factory=list)
    tried: int = 1


def os_dpos(graph: StepGraph, cluster: Cluster, contention: Contention = "none") -> SplitResult:
    """The splits of algorithm 2, which stops at the first operator that is better left whole.

    Memory is counted for all lists as for the first one. The critical path is that of the first
    placement and is not computed again. Operators that cannot be split are passed over.
    """
    problem = operator_problem(graph, cluster, contention)
    for ways in (SHARES, FREED):
        first = _run(arrays_of(problem), ways)  # line 3
        if first.timetable is not None:
            break
    else:
        return SplitResult((), problem, None, 1)
    path = placed_critical_path(problem, first.timetable)  # line 4
    work = problem.seconds[path, first.timetable.device[path]]
    state = _SplitSearch(Places(graph, cluster), ways, first)
    for i in path[np.argsort(-work, kind="stable")].tolist():  # lines 5 and 7
        choices = choices_of(graph, graph.nodes[i], len(cluster))
        if choices and not _improve(state, choices):
            break  # line 12
    if state.splits:
        problem = operator_problem(split_graph(graph, state.splits), cluster, contention)
    return SplitResult(tuple(state.splits), problem, state.best.timetable, state.tried)


def _improve(state: _SplitSearch, choices: list[SplitChoice]) -> bool:
    """Divide an operator along its best dimension, if that is faster (lines 8 to 10)."""
    least, chosen = state.best, None
    for choice in choices:
        division = state.places.division(state.best.arrays, choice)
        arrays = divided(state.best.arrays, division)
        found = _run(arrays, state.ways, least, state.best, division)
        state.tried += 1
        if found.timetable is not None:
            least, chosen = found, (choice, division)
    if chosen is None:
        return False
    state.best = least
    state.splits.append(chosen[0])
    state.places.divide(chosen[0].operator, chosen[1])
    return True


def _run(
    arrays: Arrays,
    ways: tuple[float, ...],
    least: _DposRun | None = None,
    before: _DposRun | None = None,
    division: OperatorDivision | None = None,
) -> _DposRun:
    """Algorithm 1 on ``arrays``; without a timetable if not shorter than that of run ``least``.

    ``before`` is the run on the arrays before the ``division``.
    """
    order, path = priorities(arrays)
    most, cutoff = np.inf, NEVER
    if least is not None and least.timetable is not None:
        most = least.timetable.end
        fastest = arrays.seconds.min(axis=1)
        lengths = upward(arrays, fastest, np.zeros(len(arrays.maker)))
        if lengths.max() > most * (1 + ROUNDING):
            return _DposRun(arrays, order)
        cutoff = Cutoff(most * (1 + ROUNDING), lengths - fastest)
    best: GraphTimes | None = None
    devices: list[Ints] = []
    listings: list[Listing] = []
    for number, held in enumerate(ways):
        devices.append(given_devices(arrays, path, held))
        is_less = number > 0 and held >= 0
        if is_less and not listings[-1].is_full and (devices[-1] == devices[-2]).all():
            listings.append(listings[-1])  # less memory in use changes nothing
            continue
        known = NOTHING
        if before is not None and division is not None:
            known = _known(before, number, division, order, devices[-1])
        found = listed(arrays, order, devices[-1], held, known=known, cutoff=cutoff)
        listings.append(found)
        if found.is_done:
            one = timetable(arrays, found.device, found.start, found.sent_start)
            if one.end < most and keeps_memory(arrays, one):
                best, most = one, one.end
                cutoff = Cutoff(most * (1 + ROUNDING), cutoff.tails)
    return _DposRun(arrays, order, tuple(devices), tuple(listings), best)


def _known(
    before: _DposRun, number: int, division: OperatorDivision, order: Ints, devices: Ints
) -> Known:
    """The beginning of the list after a division, as far as it equals the list before."""
    old, at = before.listings[number], division.at
    place = np.arange(len(before.order))
    place[at + 1 :] += division.more
    place[at] = ANY
    listed_before = before.order[: old.done]
    same = (place[listed_before] == order[: old.done]) & (
        before.devices[number][listed_before] == devices[order[: old.done]]
    )
    count = len(same) if same.all() else int(np.argmin(same))
    new = np.zeros(division.more, dtype=np.int64)
    return Known(
        count,
        old.is_full,
        np.concatenate([old.device[: at + 1], new, old.device[at + 1 :]]),
        np.concatenate([old.start[: at + 1], new.astype(float), old.start[at + 1 :]]),
    )


def placed_critical_path(problem: OperatorProblem, timetable: GraphTimes) -> Ints:
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
