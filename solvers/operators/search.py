"""Search for placements and orders: the best list schedule, then simulated annealing."""

from collections.abc import Callable
from time import perf_counter

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.operators.bounds import windows
from stagewright.formulations.operators.problem import GraphTimes, OperatorProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Ints
from stagewright.solvers.operators.greedy import data_parallel, m_etf, m_sct, m_topo, single
from stagewright.solvers.operators.insertion import (
    by_devices,
    cpop,
    dpos,
    heft,
    keeps_memory,
    peaks,
    peft,
)
from stagewright.solvers.operators.ranks import arrays_of
from stagewright.solvers.operators.search_kernels import anneal

Method = Callable[[OperatorProblem], GraphTimes | None]

SHARES = (1.0, 0.5, 0.0)  # of tensors that count as in memory all the time
FREED = (-1.0, -0.8, -0.6)  # where that finds nothing: shares of the memory, see ``insert``
FEW = 60  # operators up to which a search goes far from its start
FIRST, SPREAD = 0.5, 6.0  # temperatures as shares of the time: of few operators; of others, over n
_WORK = 300_000_000  # operators in all moves
HALF = 0.5  # of the memory: with less in use, moves do not look at it
ROUNDS = 8  # the first from the best list schedule, each other one from the best so far
SMALL = 2000  # operators up to which the slow greedy schedulers are among the first


Tell = Callable[[float], None]
"""Is told the seconds of the best timetable so far."""


def to_nobody(_: float) -> None:
    """Report progress to nobody."""


def first_of(
    method: Callable[[OperatorProblem, float], GraphTimes | None], *ways: tuple[float, ...]
) -> Method:
    """``method`` with each of the first ``ways`` to count memory, else each of the next.

    The shortest timetable that keeps the memory.
    """

    def run(problem: OperatorProblem) -> GraphTimes | None:
        for some in ways:
            held = some[: 1 if is_roomy(problem) else None]
            found = shortest(problem, [method(problem, one) for one in held])
            if found is not None:
                return found
        return None

    return run


def _in_memory(method: Callable[[OperatorProblem], GraphTimes]) -> Method:
    """``method`` if its timetable keeps the memory."""
    return lambda problem: shortest(problem, [method(problem)])


METHODS: dict[str, Method] = {
    "dpos": first_of(dpos, SHARES, FREED),
    "heft": first_of(heft, SHARES, FREED),
    "cpop": first_of(cpop, SHARES, FREED),
    "peft": first_of(peft, SHARES, FREED),
    "m-etf": first_of(m_etf, SHARES),
    "m-sct": first_of(m_sct, SHARES),
    "m-topo": _in_memory(m_topo),
    "data-parallel": _in_memory(data_parallel),
    "single": _in_memory(single),
}
SLOW = ("m-etf", "m-sct")


def shortest(
    problem: OperatorProblem, found: list[GraphTimes | None] | tuple[GraphTimes | None, ...]
) -> GraphTimes | None:
    """The shortest timetable that keeps the memory; None without one."""
    arrays = arrays_of(problem)
    for one in sorted((one for one in found if one is not None), key=lambda one: one.end):
        if keeps_memory(arrays, one):
            return one
    return None


def best_list_schedule(problem: OperatorProblem) -> tuple[str, GraphTimes | None]:
    """The shortest timetable of all methods, and the name of its method."""
    named = {
        name: method(problem)
        for name, method in METHODS.items()
        if name not in SLOW or len(problem.names) <= SMALL
    }
    best = shortest(problem, [*named.values()])
    return next((name for name, one in named.items() if one is best), "none"), best


def search(
    problem: OperatorProblem,
    evaluations: int,
    limits: Limits,
    start: GraphTimes | None = None,
    lower: float = 0.0,
    tell: Tell = to_nobody,
) -> GraphTimes | None:
    """The best timetable of ``evaluations`` moves; None if nothing fits in memory.

    Never longer than ``start``, which without memory limits is the best list schedule by default.
    Of large graphs there are fewer moves, all of them nearer to the start. Deterministic by seed
    and evaluations, unless the limits end it first. It also ends when
    ``lower``, a proved bound, is reached. ``tell`` is called with the seconds of the best.
    """
    began = perf_counter()
    if start is None:
        _, start = best_list_schedule(problem)
    best = start
    if best is not None:
        tell(best.end)
    seed = single(problem) if start is None else start
    order, home = seed.order, _homes(problem, seed.device)
    arrays, (_, tails) = arrays_of(problem), windows(problem)
    limited = start is None or bool((peaks(arrays, start) > HALF * problem.memory).any())
    n = len(problem.names)
    moves, first = min(evaluations, _WORK // n) // ROUNDS, FIRST if n <= FEW else SPREAD / n
    for number in range(ROUNDS):
        if limits.left(perf_counter() - began) == 0:
            break
        if best is not None and best.end <= lower * (1 + RELATIVE_TOLERANCE):
            break
        order, home = anneal(
            arrays,
            _topological(problem, order),
            home,
            tails,
            moves,
            np.random.default_rng((limits.seed, number)),
            limited,
            first / (1 + number // 2),
        )
        found = by_devices(problem, order, home[problem.group])
        limited = limited or not keeps_memory(arrays, found)
        best = shortest(problem, [best, found])
        if best is not None:
            tell(best.end)
            order, home = best.order, _homes(problem, best.device)
    return best


def _topological(problem: OperatorProblem, order: Ints) -> Ints:
    """``order`` where operators of the same start that take no time follow their makers."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    maker, reader, _ = problem.edges
    if (place[maker] < place[reader]).all():
        return order
    rank = place.tolist()
    for i, j in sorted(zip(maker.tolist(), reader.tolist(), strict=True), key=lambda e: e[1]):
        rank[j] = max(rank[j], rank[i])
    return np.lexsort((np.arange(len(order)), np.array(rank)))


def _homes(problem: OperatorProblem, device: Ints) -> Ints:
    home = np.zeros(len(problem.group_bytes), dtype=np.int64)
    home[problem.group] = device
    return home


def is_roomy(problem: OperatorProblem) -> bool:
    """Whether every device holds everything at once."""
    total = problem.state_bytes.sum() + problem.sent_bytes.sum() + problem.held_bytes.sum()
    return bool(total <= problem.memory.min())
