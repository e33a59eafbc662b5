"""Tabu search on the orders of streams and links, as in job shops.

The end of a schedule is a longest path of precedences and of neighbours on resources. It gets
shorter only if an operation leaves its place in a *block*: operations next to each other on one
resource and on that path (Nowicki and Smutnicki 1996; Balas and Vazacopoulos 1998). In each
iteration the best of some moves is made, by its estimate, whether it gets shorter or not; what a
move reversed is not reversed again for some iterations. When this gets no further, some operations
are shifted together with those before or after them, and all are scheduled anew: an order on a link
is worth changing only with the orders on the streams that feed it.
"""

from typing import NamedTuple

import numpy as np

from stagewright.formulations.backprop.problem import BackpropProblem, WindowTimes
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.backprop.list_scheduling import insert_all, run_all
from stagewright.solvers.backprop.orders_kernels import (
    NONE,
    SLACK,
    Graph,
    Orders,
    estimate,
    is_within,
    longest_path,
    may_follow,
    may_precede,
    move,
    place,
    time,
)
from stagewright.solvers.pipelines.compiled import entry, inner

_CANDIDATES = 16  # moves that are estimated in an iteration
STOP = 4  # a move goes on with all but one in so many
_TENURE = 8  # iterations for which a reversal is forbidden, and as many more at random
FORBIDDEN = 64  # reversals that are remembered
PATIENCE = 150  # iterations without a better end
HOME = 0.1  # share of shifts that begin at the best orders, FAR ones aside
FAR = 1.03  # times the best end
TURNS = 0.7  # share of shifts in which operations take the turns of others
_TURNS_AT_ONCE = 3
_DISTANCE = 10  # places on the resource, at most
_SHIFTS_AT_ONCE = 8  # other shifts are by random times
NOISE = 0.6  # their largest standard deviation, of the end
_SHIFT_COST = 8  # iterations that take as long as a shift


class _Tabu(NamedTuple):
    """Pairs (first, second): until an iteration, first must not come before second again."""

    first: Ints
    second: Ints
    until: Ints


class _Move(NamedTuple):
    """Operation ``i`` goes right after ``j``, or right before; its estimated end."""

    i: int
    j: int
    later: bool
    end: float


def tabu_search(
    problem: BackpropProblem, timetable: WindowTimes, least: float, work: int
) -> WindowTimes:
    """A timetable that ends no later than the given one; a new timetable suspends nothing.

    Stops at ``least`` seconds, or after ``work`` times of operations. Limits of memory are not
    looked at.
    """
    rank = np.empty(len(problem.operations), dtype=np.int64)
    rank[list(problem.topological)] = np.arange(len(rank))
    order = np.lexsort((rank, timetable.ends, timetable.starts))
    graph = Graph(problem.seconds, problem.resource, *problem.preceding, *problem.followers)
    iterations = work // max(1, len(rank))
    found = WindowTimes.of_starts(
        problem,
        _search(graph, order, len(problem.resources), least, iterations, np.random.default_rng(0)),
    )
    return found if found.end < timetable.end else timetable


@entry
def _search(
    graph: Graph,
    order: Ints,
    places: int,
    least: float,
    iterations: int,
    random: np.random.Generator,
) -> Floats:
    """The starts of the best schedule found; it begins with the operations in ``order``."""
    count = len(order)
    none, zeros = np.full(count, NONE), np.zeros(count)
    orders = Orders(
        none, none.copy(), zeros, zeros.copy(), zeros.copy(), zeros.copy(), order.copy(), order * 0
    )
    tabu = _Tabu(*(np.full(FORBIDDEN, NONE), np.full(FORBIDDEN, NONE), np.full(FORBIDDEN, NONE)))
    path, begins, chain = order.copy(), order.copy(), order.copy()
    place(graph, orders, order, places)
    end = best = time(graph, orders)
    starts, best_order = orders.head.copy(), order.copy()
    turn = since = 0
    while turn < iterations and best > least:
        turn += 1
        since += 1
        if since > PATIENCE:
            if random.random() < HOME or end > best * FAR:
                place(graph, orders, best_order, places)
                end = time(graph, orders)
            order = np.argsort(_shifted(graph, orders, end, places, random))
            place(graph, orders, order, places)
            end = time(graph, orders)
            tabu.until[:] = NONE
            since = 0
            turn += _SHIFT_COST
        else:
            size = longest_path(graph, orders, end, path, begins, random)
            chosen = _choose(graph, orders, tabu, path[:size], begins, chain, turn, best, random)
            if chosen.i == NONE:
                since = PATIENCE
                continue
            end = _make(graph, orders, tabu, chosen, turn, random)
        if end < best * (1 - SLACK):
            best, since = end, 0
            starts[:], best_order[:] = orders.head, orders.order
    return starts


@inner
def _choose(
    graph: Graph,
    orders: Orders,
    tabu: _Tabu,
    path: Ints,
    begins: Ints,
    chain: Ints,
    turn: int,
    best: float,
    random: np.random.Generator,
) -> _Move:
    """The best of some random moves within blocks; a forbidden one only if there is no other."""
    chosen, tried = _Move(NONE, NONE, False, np.inf), 0
    for _ in range(3 * _CANDIDATES):
        if tried >= _CANDIDATES or len(path) < 2:
            break
        p, later = int(random.integers(0, len(path))), random.integers(0, 2) == 0
        i, j = path[p], _target(graph, orders, path, begins, p, later, random)
        if j == NONE:
            continue
        tried += 1
        end = estimate(graph, orders, i, j, later, chain)
        if end >= best and _is_forbidden(orders, tabu, i, j, later, turn):
            end = np.inf
        if end < chosen.end or chosen.i == NONE:
            chosen = _Move(i, j, later, end)
    return chosen


@inner
def _target(
    graph: Graph,
    orders: Orders,
    path: Ints,
    begins: Ints,
    p: int,
    later: bool,
    random: np.random.Generator,
) -> int:
    """The operation up to which ``path[p]`` moves in its block, at random; NONE if it cannot."""
    i, j, q = int(path[p]), NONE, p
    while True:
        if later:
            q += 1
            if q == len(path) or begins[q] == 1 or not may_follow(graph, orders, i, path[q]):
                return j
        else:
            if q == 0 or begins[q] == 1 or not may_precede(graph, orders, i, path[q - 1]):
                return j
            q -= 1
        j = int(path[q])
        if random.integers(0, STOP) == 0:
            return j


@inner
def _is_forbidden(orders: Orders, tabu: _Tabu, i: int, j: int, later: bool, turn: int) -> bool:
    for t in range(FORBIDDEN):
        if tabu.until[t] > turn:
            a, b = tabu.first[t], tabu.second[t]
            if later and b == i and is_within(orders, a, i, j):
                return True
            if not later and a == i and is_within(orders, b, j, i):
                return True
    return False


@inner
def _make(
    graph: Graph, orders: Orders, tabu: _Tabu, chosen: _Move, turn: int, random: np.random.Generator
) -> float:
    """Make the move, forbid its reversal, and return the end; a cycle is undone."""
    i, j, later = chosen.i, chosen.j, chosen.later
    left, right = orders.left[i], orders.right[i]
    k = i
    while k != j:
        k = orders.right[k] if later else orders.left[k]
        slot = 0
        for t in range(FORBIDDEN):
            if tabu.until[t] < tabu.until[slot]:
                slot = t
        tabu.first[slot], tabu.second[slot] = (i, k) if later else (k, i)
        tabu.until[slot] = turn + _TENURE + random.integers(0, _TENURE)
    move(orders, i, j, later)
    end = time(graph, orders)
    if end == np.inf:
        if left != NONE:
            move(orders, i, left, True)
        else:
            move(orders, i, right, False)
        end = time(graph, orders)
    return end


@inner
def _shifted(
    graph: Graph, orders: Orders, end: float, places: int, random: np.random.Generator
) -> Floats:
    """Starts after some operations were shifted, each with those before or after it."""
    wanted, scale = orders.head.copy(), NOISE * end * random.random()
    if random.random() < TURNS:
        for _ in range(1 + random.integers(0, _TURNS_AT_ONCE)):
            _take_turn(graph, orders, wanted, SLACK * end, random)
    else:
        for _ in range(1 + random.integers(0, _SHIFTS_AT_ONCE)):
            i = random.integers(0, len(wanted))
            shift = scale * random.standard_normal()
            wanted[i] += shift
            if random.integers(0, 2) == 0:
                for e in range(graph.first_in[i], graph.first_in[i + 1]):
                    wanted[graph.before[e]] += shift
            if random.integers(0, 2) == 0:
                for e in range(graph.first_out[i], graph.first_out[i + 1]):
                    wanted[graph.after[e]] += shift
    return _scheduled(graph, wanted, places, random)


@inner
def _scheduled(graph: Graph, wanted: Floats, places: int, random: np.random.Generator) -> Floats:
    """Starts by one of the two rules at random, and forward-backward improvement."""
    if random.integers(0, 2) == 0:
        starts = _dispatched(graph, wanted, places)
    else:
        waits = np.diff(graph.first_in)
        starts = insert_all(
            graph.seconds,
            graph.resource,
            _ranks(wanted),
            graph.first_out,
            graph.after,
            waits,
            places,
        )
    back = Graph(
        graph.seconds, graph.resource, graph.first_out, graph.after, graph.first_in, graph.before
    )
    for _ in range(3):
        late = _dispatched(back, -(starts + graph.seconds), places)
        other = _dispatched(graph, -(late + graph.seconds), places)
        if (other + graph.seconds).max() >= (starts + graph.seconds).max():
            break
        starts = other
    return starts


@inner
def _take_turn(  # noqa: C901 - both directions
    graph: Graph, orders: Orders, wanted: Floats, least: float, random: np.random.Generator
) -> None:
    """Give a random operation, with its predecessors, an earlier place on its resource."""
    i = random.integers(0, len(wanted))
    if graph.seconds[i] == 0.0:
        return
    j = i
    for _ in range(1 + random.integers(0, _DISTANCE)):
        if orders.left[j] != NONE:
            j = orders.left[j]
    if random.integers(0, 2) == 0:
        wanted[i] = min(wanted[i], wanted[j] - least)
        earliest = np.inf
        for e in range(graph.first_in[j], graph.first_in[j + 1]):
            earliest = min(earliest, wanted[graph.before[e]])
        for e in range(graph.first_in[i], graph.first_in[i + 1]):
            k = graph.before[e]
            wanted[k] = min(wanted[k], earliest - least)
    else:
        wanted[j] = max(wanted[j], wanted[i] + least)
        latest = 0.0
        for e in range(graph.first_out[i], graph.first_out[i + 1]):
            latest = max(latest, wanted[graph.after[e]])
        for e in range(graph.first_out[j], graph.first_out[j + 1]):
            k = graph.after[e]
            wanted[k] = max(wanted[k], latest + least)


@inner
def _dispatched(graph: Graph, wanted: Floats, places: int) -> Floats:
    """The starts if every resource runs the ready operation that is wanted first."""
    operation, start, _ = run_all(
        graph.seconds,
        graph.resource,
        _ranks(wanted),
        graph.first_out,
        graph.after,
        np.diff(graph.first_in),
        np.full(places, np.inf),
        np.zeros(places, np.bool_),
    )
    starts = np.empty(len(wanted))
    starts[operation] = start
    return starts


@inner
def _ranks(wanted: Floats) -> Ints:
    ranks = np.empty(len(wanted), np.int64)
    ranks[np.argsort(wanted)] = np.arange(len(wanted))
    return ranks
