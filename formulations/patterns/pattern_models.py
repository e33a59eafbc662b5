"""The periodic scheduling problem as integer programs, and the exact times for given orders.

Notation: job i starts at tau_i for microbatch 0 and takes d_i; T is the period. For two jobs i < j
(in the order of ``PatternProblem.jobs``) on one device or link, the *order* k_ij is the number of
whole periods between their starts, k_ij = floor((tau_j - tau_i) / T). The jobs do not overlap if
and only if d_i <= tau_j - tau_i - k_ij T <= T - d_j. The microbatches in memory are linear in the
orders: just after the start of job i, its device keeps k(F_s, i) - k(B_s, i) microbatches of stage
s, where k_ji = -1 - k_ij and k_ii = 0, and one more if i is B_s itself.

Divided by T, the model is linear in tau / T, the rate 1 / T and the orders (:class:`ByRate`, after
MadPipe 4.3, with exact orders in place of big M). At a given T it is a pure integer program
(:class:`AtPeriod`). For given orders the least T is a maximum cycle ratio (:func:`least_pattern`).
A pattern that is feasible at T is feasible at every larger period, with all starts scaled by T.

All-reduces that share a device do not overlap either; they run once per iteration of m periods.
Their starts sigma are additional columns after those of the jobs, and their orders count whole
iterations. All-reduces may overlap with a pause. The integer programs allow that (``relaxed``), so
their bounds hold for all plans; the exact times for given orders do not use the pause.

Jobs of zero duration are ordered too, in the order in which a microbatch passes them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.patterns.order_model import MARGIN, OrderModel
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.graphs.documents.arrays import Floats, Ints

_BYTE_UNITS = 2**36  # units per available bytes of a device, for integer rows
SCALE = 2.0**10  # factor of rows and costs: MILP solvers allow absolute errors of 1e-6 in them
PATTERN = "integer program of the pattern"


@dataclass(frozen=True)
class AtPeriod:
    """Feasibility of a pattern of ``period``: a pure integer program without costs.

    All times of the problem and the period must be integers, as returned by :func:`in_ticks`.
    Columns are the starts, then the orders. Bytes are rounded down to a fraction of ``rooms``.
    """

    model: OrderModel
    period: int
    rooms: tuple[float, ...]

    def apply(self) -> LinearProgram:
        """The integer program."""
        model, period = self.model, self.period
        jobs = model.columns
        rows = _ScaledRows()
        for one in model.differences:
            terms = [(one.after, 1.0), (one.before, -1.0)]
            terms += [(jobs + pair, -float(sign * period)) for pair, sign in one.periods.terms]
            rows.add(terms, one.seconds + one.periods.constant * period, math.inf)
        _add_memory(rows, model, self.rooms)
        _add_triples(rows, model)
        _add_nested(rows, model, period)
        least, most = _order_bounds(model, period, period)
        return rows.form(
            cost=np.zeros(jobs + len(least)),
            lower=np.r_[np.zeros(jobs), least],
            upper=np.r_[latest_starts(model, period), most],
            integral=np.ones(jobs + len(least), dtype=bool),
        )

    def invert(self, values: Floats) -> Ints:
        """The orders in an answer."""
        orders: Floats = values[self.model.columns :]
        return np.round(orders).astype(np.int64)


def in_ticks(problem: PatternProblem, unit: float) -> PatternProblem:
    """The problem in integer ticks of ``unit`` seconds, with all times rounded down.

    If the problem has a pattern of period T, the rounded problem has one of ceil(T / unit) ticks
    with integer starts: for the same orders, no cycle of differences becomes longer, and difference
    constraints with integer lengths have integer solutions. So infeasibility in ticks is a proof
    for the problem itself, while a pattern in ticks may be too short by the rounding.
    """

    def ticks(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(np.floor(np.array(seconds) / unit).tolist())

    return replace(
        problem,
        forward=ticks(problem.forward),
        backward=ticks(problem.backward),
        there=ticks(problem.there),
        back=ticks(problem.back),
        reduce=ticks(problem.reduce),
        least_seconds=math.floor(problem.least_seconds / unit),
        pause_seconds=math.ceil(problem.pause_seconds / unit),
    )


@dataclass(frozen=True)
class ByRate:
    """The maximum rate of microbatches, 1 / T, as a mixed-integer program.

    Columns are the starts in periods, the orders, and ``shortest`` / T <= 1. The optimal period is
    known to be between ``shortest`` and ``longest``.
    """

    model: OrderModel
    shortest: float
    longest: float
    rooms: tuple[float, ...]

    def apply(self) -> LinearProgram:
        """The program, which minimises the negative rate, times ``SCALE``."""
        model = self.model
        jobs, rate = model.columns, model.columns + len(model.pairs)
        rows = _ScaledRows(SCALE)
        for one in model.differences:
            terms = [(one.after, 1.0), (one.before, -1.0), (rate, -one.seconds / self.shortest)]
            terms += [(jobs + pair, -float(sign)) for pair, sign in one.periods.terms]
            rows.add(terms, one.periods.constant, math.inf)
        _add_memory(rows, model, self.rooms, _BYTE_UNITS)
        _add_triples(rows, model)
        _add_nested(rows, model, self.longest)
        least, most = _order_bounds(model, self.shortest, self.longest)
        latest = np.array(latest_starts(model, self.shortest)) / self.shortest
        return rows.form(
            cost=np.r_[np.zeros(rate), -SCALE],
            lower=np.r_[np.zeros(jobs), least, self.shortest / self.longest],
            upper=np.r_[latest, most, 1.0],
            integral=np.r_[np.zeros(jobs), np.ones(len(least)), 0.0].astype(bool),
        )

    def period(self, objective: float) -> float:
        """The period for a value of the objective, or for a bound on it."""
        return self.shortest * SCALE / -objective

    def hint(self, pattern: Pattern) -> Floats:
        """The columns of a known pattern."""
        starts = np.array(self.model.starts_of(pattern)) / pattern.period
        orders, rate = self.model.orders_of(pattern), self.shortest / pattern.period
        return np.concatenate([starts, orders, [rate]])

    def invert(self, values: Floats) -> Ints:
        """The orders in an answer."""
        orders: Floats = values[self.model.columns : -1]
        return np.round(orders).astype(np.int64)


def latest_starts(model: OrderModel, period: float) -> list[float]:
    """Upper bounds on the start of each job in some pattern of ``period``.

    No job waits for a period or more: otherwise it and all later jobs could start a period earlier,
    which only changes the indices of microbatches and keeps no more of them. Where all-reduces
    share a device, that shift would change their order. Then all jobs end within the m + 1 periods
    of the weight versions, and all-reduces end before the weights of a last forward are needed.
    """
    if model.summed:
        jobs, most = len(model.problem.jobs), (model.problem.microbatches + 1) * period
        return [most] * jobs + [2 * most] * (model.columns - jobs)
    passed = np.concatenate([[0.0], np.cumsum([job.seconds for job in model.problem.jobs[:-1]])])
    return [float(seconds + i * period) for i, seconds in enumerate(passed)]


def _order_bounds(model: OrderModel, shortest: float, longest: float) -> tuple[Ints, Ints]:
    """Bounds on the orders for periods from ``shortest`` to ``longest``; see `latest_starts`."""
    if model.summed:
        return model.least_at(longest), model.most
    latest = latest_starts(model, shortest)
    jobs = model.problem.jobs
    apart = np.array(
        [
            math.floor((latest[j] - latest[i] - jobs[i].seconds) / shortest + MARGIN * len(jobs))
            for i, j in model.pairs
        ],
        dtype=np.int64,
    )
    return model.least_at(longest), np.minimum(model.most, apart)


class _ScaledRows:
    """Collects the rows of a linear program, multiplied by ``scale``."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._entries: list[tuple[int, int, float]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def add(self, terms: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        row = len(self._lower)
        self._entries += [(row, column, value) for column, value in terms]
        self._lower.append(lower)
        self._upper.append(upper)

    def form(
        self, cost: Floats, lower: Floats, upper: Floats, integral: NDArray[np.bool_]
    ) -> LinearProgram:
        row, column, value = (np.array(part) for part in zip(*self._entries, strict=True))
        shape = (len(self._lower), len(cost))
        # Duplicate entries are summed.
        matrix = sparse.coo_array((self._scale * value, (row, column)), shape=shape).tocsr()
        least, most = self._scale * np.array(self._lower), self._scale * np.array(self._upper)
        return LinearProgram(cost, matrix, least, most, lower, upper, integral)


def _add_memory(
    rows: _ScaledRows, model: OrderModel, rooms: tuple[float, ...], units: int = 1
) -> None:
    """The activations of a device fit in its memory at every instant.

    Bytes are whole multiples of 1 / ``_BYTE_UNITS`` of the available ones, rounded down; rows are
    divided by ``units``.
    """
    jobs = model.columns
    for instant in model.instants:
        room = rooms[instant.device]
        terms, total = list[tuple[int, float]](), 0
        for s, count in zip(instant.stages, instant.kept, strict=True):
            kept = model.problem.kept[s]
            saved = _share(kept.saved_bytes, room)
            total += saved * count.constant
            total += (s == instant.at_work) * _share(kept.working_bytes, room)
            terms += [(jobs + pair, sign * saved / units) for pair, sign in count.terms]
        rows.add(terms, -math.inf, (_BYTE_UNITS - total) / units)


def _share(size: float, room: float) -> int:
    return math.floor(size / room * _BYTE_UNITS) if size > 0 else 0


def _add_triples(rows: _ScaledRows, model: OrderModel) -> None:
    """The orders of three jobs are consistent: k_ab + k_bc <= k_ac <= k_ab + k_bc + 1."""
    jobs = model.columns
    for members in model.problem.shared:
        for a, b, c in combinations(members, 3):
            ab, bc, ac = (jobs + model.number[pair] for pair in ((a, b), (b, c), (a, c)))
            rows.add([(ac, 1.0), (ab, -1.0), (bc, -1.0)], 0.0, 1.0)


def _add_nested(rows: _ScaledRows, model: OrderModel, period: float) -> None:
    """A stage or transfer has at least as many microbatches in flight as later ones, as in 1F1B*.

    Job j and its backward are between job i and its backward. The other operations of a microbatch
    in that interval take time U in total, so k_i >= k_j + ceil(U / T) - 1, also for shorter
    periods than T. The integer programs imply this only where orders are integers.
    """
    jobs, columns = model.problem.jobs, model.columns
    last = len(jobs) - 1
    for i in range(len(jobs) // 2):
        seconds = jobs[i].seconds + jobs[last - i].seconds
        before = 0
        for j in range(i + 1, len(jobs) // 2):
            seconds += jobs[j].seconds + jobs[last - j].seconds
            more = math.ceil(seconds / period * (1 - MARGIN)) - 1
            if more > before or j == i + 1:
                outer, inner = model.number[i, last - i], model.number[j, last - j]
                rows.add([(columns + outer, 1.0), (columns + inner, -1.0)], more, math.inf)
            before = more
