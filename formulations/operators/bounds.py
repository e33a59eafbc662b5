"""Lower bounds on the time of every placement and order, each from a short argument.

Memory and contention are not used: all bounds hold with and without them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stagewright.formulations.operators.plan import OperatorBound
from stagewright.formulations.operators.problem import OperatorProblem
from stagewright.formulations.prices.collectives import paced_seconds
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.units import format_bytes

CRITICAL_PATH = "critical path"
UNAVOIDABLE = "critical path with unavoidable transfers"
LOAD = "load priced by device"
INTERVALS = "load of intervals"
CP_SAT = "CP-SAT"

_INTERVAL_ENTRIES = 400_000  # operators x ends of intervals
MOST_ENDS = 64
STEPS = 50  # of Newton's method, which ends after as many steps as there are kinks
ROUNDING = 1e-12  # relative


def static_bounds(problem: OperatorProblem, prices: Floats) -> tuple[OperatorBound, ...]:
    """All bounds; ``prices`` are those of :func:`priced_load`."""
    heads, tails = windows(problem)
    fastest = problem.seconds.min(axis=1)
    unavoidable = float((heads + fastest + tails).max())
    return (
        OperatorBound(critical_path(problem), CRITICAL_PATH, "these splits"),
        OperatorBound(unavoidable, UNAVOIDABLE, "these splits"),
        OperatorBound(
            priced_load(problem, prices), LOAD, "any splits", tuple(np.asarray(prices).tolist())
        ),
        OperatorBound(
            _interval_load(problem, heads, tails, unavoidable), INTERVALS, "these splits"
        ),
    )


def critical_path(problem: OperatorProblem) -> float:
    """The longest chain, every operator on its fastest device and no transfers."""
    fastest = problem.seconds.min(axis=1).tolist()
    ends: list[float] = list(fastest)
    maker, reader, _ = problem.edges
    order = np.argsort(reader, kind="stable")
    for i, j in zip(maker[order].tolist(), reader[order].tolist(), strict=True):
        ends[j] = max(ends[j], ends[i] + fastest[j])
    return max(ends)


def priced_load(problem: OperatorProblem, prices: Sequence[float] | Floats) -> float:
    """The least cost of all work, if a second of device d costs ``prices[d]``, which sum to 1.

    In T seconds at most T can be spent on all devices together; each operator costs at least its
    cheapest device. So it is with parts of operators, which divide time and cost: the bound holds
    for plans with any splits.
    """
    paid = np.maximum(0.0, np.asarray(prices, dtype=float))
    total = float(paid.sum())
    if total == 0:
        return 0.0
    return float((problem.seconds * (paid / total)).min(axis=1).sum())


def windows(problem: OperatorProblem) -> tuple[Floats, Floats]:
    """(heads, tails): the least time before the start and after the end of each operator.

    Of the operators that j reads from, those in some set S are on the device of j, which runs them
    one after the other; the output of each other one takes at least its fastest transfer. The head
    of j is the least, over all S, of the larger of the two; S needs to be no other than the k whose
    outputs would arrive last (compare Al-Mouhamed, IEEE Trans. Software Eng. 1990). Operators of a
    group are in S. Tails are the heads of the graph reversed in time.
    """
    n = len(problem.names)
    maker, reader, tensor = problem.edges
    least = _fastest_transfers(problem)[tensor]
    least[problem.group[maker] == problem.group[reader]] = np.inf
    fastest = problem.seconds.min(axis=1)
    return (
        _heads(n, range(n), maker, reader, least, fastest),
        _heads(n, range(n - 1, -1, -1), reader, maker, least, fastest),
    )


def _fastest_transfers(problem: OperatorProblem) -> Floats:
    """Each tensor's time over the fastest pair of devices; infinity on one device."""
    apart = ~np.eye(len(problem.devices), dtype=bool)
    if not apart.any():
        return np.full(len(problem.maker), np.inf)
    links = np.unique([problem.latency[apart], problem.seconds_per_byte[apart]], axis=1)
    found: Floats = paced_seconds(problem.sent_bytes[:, None], links[1], links[0]).min(axis=1)
    return found


def _heads(
    n: int, order: range, before: Ints, after: Ints, transfer: Floats, seconds: Floats
) -> Floats:
    sources: list[dict[int, float]] = [{} for _ in range(n)]
    for i, j, wait in zip(before.tolist(), after.tolist(), transfer.tolist(), strict=True):
        sources[j][i] = max(sources[j].get(i, 0.0), wait)
    head, work = [0.0] * n, seconds.tolist()
    for j in order:
        if sources[j]:
            rows = [(head[i], work[i], wait) for i, wait in sources[j].items()]
            head[j] = _least_head(rows)
    return np.array(head)


def _least_head(rows: list[tuple[float, float, float]]) -> float:
    """The least time until all inputs, rows (head, seconds, transfer), are local or received."""
    rows = sorted(rows, key=lambda row: -(row[0] + row[1] + row[2]))
    arrivals = [*(head + work + wait for head, work, wait in rows), 0.0]
    low, high = 0, len(rows)  # arrivals fall with k, the work of the first k rises
    while low < high:
        k = (low + high) // 2
        if _one_machine(rows[:k]) >= arrivals[k]:
            high = k
        else:
            low = k + 1
    local = _one_machine(rows[:low])
    return min(max(local, arrivals[low]), arrivals[low - 1] if low else np.inf)


def _one_machine(rows: list[tuple[float, float, float]]) -> float:
    """The time at which one device has done all rows (head, seconds), each after its head."""
    end = 0.0
    for head, work, _ in sorted(rows):
        end = max(end, head) + work
    return end


def _interval_load(problem: OperatorProblem, heads: Floats, tails: Floats, lower: float) -> float:
    """The work that must be done in some interval, on all devices (Fernandez and Bussell 1973).

    Let all plans take T >= ``lower``. In [h, T - q], of length L, operator i with head r, tail s
    and least time p runs for at least min(p, L, r + p - h, s + p - q), when it is shifted as far as
    possible to either side; the sum is at most m L. The sum minus m L is concave in L and 0 at 0:
    if it is positive for T = ``lower``, L is at least its positive root.
    """
    work, m = problem.seconds.min(axis=1), len(problem.devices)
    count = max(4, min(MOST_ENDS, _INTERVAL_ENTRIES // len(work)))
    best = lower
    ends = _some(tails, count)
    for h in _some(heads, count).tolist():
        inside = np.minimum(work, heads + work - h)[:, None]
        parts = np.maximum(0.0, np.minimum(inside, (tails + work)[:, None] - ends))
        length = lower - h - ends
        is_tight = (length > 0) & (_excess(parts, length, m) > 0)
        if is_tight.any():
            root = _root(parts[:, is_tight], m)
            best = max(best, float((h + ends[is_tight] + root).max()))
    return best


def _some(values: Floats, count: int) -> Floats:
    """At most ``count`` of the values, evenly by rank."""
    every = np.unique(values)
    picked: Floats = every[np.unique(np.linspace(0, len(every) - 1, count).astype(np.int64))]
    return picked


def _excess(parts: Floats, length: Floats, m: int) -> Floats:
    found: Floats = np.minimum(parts, length).sum(axis=0) - m * length
    return found


def _root(parts: Floats, m: int) -> Floats:
    """The positive root of each column's excess, by Newton's method from above; 0 if it fails."""
    length: Floats = parts.sum(axis=0) / m
    for _ in range(STEPS):
        is_long = parts > length
        slope = m - is_long.sum(axis=0)
        short: Floats = np.where(is_long, 0.0, parts).sum(axis=0)
        better = np.where(slope > 0, short / np.maximum(slope, 1), length)
        if (better >= length).all():
            break
        length = np.minimum(length, better)
    length = length * (1 - ROUNDING)
    found: Floats = np.where(_excess(parts, length, m) >= 0, length, 0.0)
    return found


class Shortage(NamedTuple):
    """Why nothing fits in memory; ``operator`` is set if a single operator fits nowhere."""

    reason: str
    operator: str | None = None


def shortage(problem: OperatorProblem) -> Shortage | None:
    """Why no plan fits in memory, if one of these reasons holds."""
    total, room = float(problem.state_bytes.sum()), float(problem.memory.sum())
    if total > room * (1 + ROUNDING):
        sizes = f"{format_bytes(total)}, all devices together have {format_bytes(room)}"
        return Shortage(f"the state is {sizes}")
    running = problem.group_bytes[problem.group] + _working_bytes(problem)
    runs = problem.seconds.min(axis=1) > 0
    most = float(problem.memory.max())
    needs = np.where(runs, running, problem.group_bytes[problem.group])
    i = int(np.argmax(needs))
    if needs[i] > most * (1 + ROUNDING):
        name = problem.names[i]
        sizes = f"{format_bytes(float(needs[i]))}, the largest device has {format_bytes(most)}"
        return Shortage(f"operator {name!r} needs {sizes}", name)
    return None


def _working_bytes(problem: OperatorProblem) -> Floats:
    """Inputs and outputs that are in memory while an operator runs, at least."""
    n = len(problem.names)
    least = np.minimum(problem.sent_bytes, problem.held_bytes)
    _, reader, tensor = problem.edges
    made = np.bincount(problem.maker, problem.held_bytes, minlength=n)
    return np.asarray(made + np.bincount(reader, least[tensor], minlength=n), dtype=float)
