"""The pattern of least period for given stages, with a proved bound (MadPipe section 4.3).

Bounds and list schedules come first; if they coincide, the pattern is optimal. Otherwise a solver
searches for the orders of the jobs, and the exact times are computed from these orders. So patterns
satisfy every rule and reported bounds are proved, independent of a solver's tolerances.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

from stagewright.formulations.forms.answers import Limits, Status, silent
from stagewright.formulations.patterns.one_f_one_b import pattern_load_bound, period_bound
from stagewright.formulations.patterns.order_model import OrderModel, least_pattern, sequential
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.patterns.pattern_models import AtPeriod, ByRate, in_ticks
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backends.backend import solve

PROVED = 1e-6  # relative gap below which a period is called optimal
LONGER = (1.0, 1.05, 1.2, 1.5)  # times the lower bound: periods of list schedules
TICKS = 30  # log2 of CP-SAT's longest period
_LESS_ROOM = 1 - 1e-7  # factor of memory after a solver's orders exceed it within tolerance
SAFETY = 1e-7  # relative: solvers' bounds are rounded, most of all those read as text
MARGIN = 1e-12  # of the period: rounding in list schedules


@dataclass(frozen=True, slots=True)
class PatternAnswer:
    """The best pattern found, checked, with its proved bound.

    ``pattern`` and ``period`` are None, and ``bound`` infinite, if no period is feasible. ``bound``
    is in seconds; ``proved_by`` names the argument or the solver that proves it.
    """

    pattern: Pattern | None
    period: float | None
    bound: float
    status: Status
    proved_by: str
    seconds: float


def best_pattern(
    problem: PatternProblem,
    limits: Limits,
    *,
    backend: str | None = None,
    lower_seconds: float = 0.0,
) -> PatternAnswer:
    """The pattern of least period, or the best within ``limits``.

    ``backend``: ``highs``, ``pulp-cbc`` or ``cvxpy`` for the mixed-integer program, ``cp-sat`` for
    a search over periods. None: the backend of ``limits``, or else ``auto``, which is the fastest,
    HiGHS. ``lower_seconds``: A period that is known to be a lower bound.

    Raises InvalidPlan if ``upper`` breaks a rule.

    Raises
    ------
    InputError
        If there is no such backend, or no operation takes time.
    """
    backend = backend or limits.backend or "auto"
    require_pattern_backend(backend)
    began = perf_counter()
    search = _PatternSearch(problem, limits, began)
    first = sequential(problem)
    if first.period <= 0:
        raise InputError("a pattern needs an operation of positive duration")
    if search.model.overfull(search.model.orders_of(first)):
        seconds = perf_counter() - began
        return PatternAnswer(None, None, math.inf, Status.INFEASIBLE, "memory", seconds)
    search.prove(search.load, "load")
    search.prove(period_bound(problem), "memory of 1F1B*")
    search.prove(lower_seconds, "given bound")
    search.offer(first)
    _list_schedules(search)
    if not search.closed:
        BACKENDS[backend](search)
    return search.answer()


@dataclass
class _PatternSearch:
    """The state of a search: the best pattern and the best bound so far."""

    problem: PatternProblem
    limits: Limits
    began: float
    bound: float = 0.0
    proved_by: str = ""
    best: Pattern | None = None
    load: float = field(init=False)
    model: OrderModel = field(init=False)
    relaxed: OrderModel = field(init=False)  # the model for solvers, see `OrderModel`
    rooms: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.load = pattern_load_bound(self.problem)
        self.model, self.rooms = OrderModel(self.problem), self.problem.room_bytes
        self.relaxed = replace(self.model, relaxed=True)

    @property
    def period(self) -> float:
        """The best period so far."""
        return math.inf if self.best is None else self.best.period

    @property
    def closed(self) -> bool:
        """Whether the best pattern is proved optimal."""
        return self.period <= self.bound * (1 + PROVED)

    @property
    def left(self) -> Limits:
        """The remaining limits."""
        return replace(self.limits, seconds=self.limits.left(perf_counter() - self.began))

    def offer(self, pattern: Pattern) -> None:
        """Check a pattern and keep it if it is the best."""
        if self.problem.evaluate(pattern) < self.period:
            self.best = pattern

    def prove(self, bound: float, proved_by: str) -> None:
        """Keep a lower bound if it is the best."""
        if bound > self.bound:
            self.bound, self.proved_by = bound, proved_by

    def admit(self, orders: Ints) -> bool:
        """Offer the exact pattern of a solver's orders; if none fits, reduce room, return False.

        With reduced room, an optimum is not a bound any more; see :attr:`exact`.
        """
        full = self.model.overfull(orders)
        if full:
            self.rooms = tuple(
                room * _LESS_ROOM if device in full else room
                for device, room in enumerate(self.rooms)
            )
            return False
        pattern = least_pattern(self.model, orders, self.load)
        if pattern is not None:
            self.offer(pattern)
        return True

    @property
    def exact(self) -> bool:
        """Whether solvers use the full memory."""
        return self.rooms == self.problem.room_bytes

    def answer(self) -> PatternAnswer:
        """The answer at this point."""
        status = Status.OPTIMAL if self.closed else Status.FEASIBLE
        bound, seconds = min(self.bound, self.period), perf_counter() - self.began
        return PatternAnswer(self.best, self.period, bound, status, self.proved_by, seconds)


def _by_rate(search: _PatternSearch, backend: str, name: str) -> None:
    """The mixed-integer program of the rate on a backend, whose solver has the name."""
    assert search.best is not None
    while not search.closed:
        model = ByRate(search.relaxed, search.bound, search.period, search.rooms)
        form = replace(model.apply(), hint=model.hint(search.best))
        answer = solve(form, backend, search.left)
        if search.exact:
            # No pattern is as short as the best one, so that is optimal.
            infeasible = answer.status is Status.INFEASIBLE
            bound = search.period if infeasible else model.period(answer.bound)
            search.prove(bound * (1 - SAFETY), name)
        if answer.values is None or search.admit(model.invert(answer.values)):
            return


def _by_periods(search: _PatternSearch) -> None:
    """Bisection over periods with CP-SAT, starting at the lower bound."""
    from stagewright.solvers.backends.cpsat import run_integers  # CP-SAT is slow to import

    unit = math.ldexp(1.0, math.frexp(search.period)[1] - TICKS)
    model = OrderModel(in_ticks(search.problem, unit), relaxed=True)
    # ``high`` ticks are feasible; ``low`` ticks or less are not known to be.
    low, high = math.ceil(search.bound / unit) - 1, math.ceil(search.period / unit)
    period = low + 1
    while low + 1 < high and not search.closed:
        form = AtPeriod(model, period, search.rooms)
        answer = run_integers(form.apply(), search.left, silent)
        if answer.status is Status.INFEASIBLE:
            low = period
            if search.exact:
                search.prove(period * unit, "CP-SAT")
        elif answer.values is None:
            return
        elif search.admit(form.invert(answer.values)):
            high = _least_ticks(model, form.invert(answer.values))
        period = (low + high) // 2


def _least_ticks(model: OrderModel, orders: Ints) -> int:
    """The least feasible number of ticks for ``orders``, which must be feasible at some."""
    pattern = least_pattern(model, orders)
    assert pattern is not None
    return math.ceil(pattern.period * (1 - MARGIN))


BACKENDS: dict[str, Callable[[_PatternSearch], None]] = {
    "auto": partial(_by_rate, backend="highs", name="HiGHS"),
    "highs": partial(_by_rate, backend="highs", name="HiGHS"),
    "pulp-cbc": partial(_by_rate, backend="pulp-cbc", name="CBC"),
    "cvxpy": partial(_by_rate, backend="cvxpy", name="HiGHS"),
    "cp-sat": _by_periods,
}


def require_pattern_backend(name: str | None) -> None:
    """Refuse a backend that takes no patterns; None is the default."""
    if name is not None and name not in BACKENDS:
        raise InputError(f"backend {name!r} solves no patterns; use {' or '.join(BACKENDS)}")


def _list_schedules(search: _PatternSearch) -> None:
    """Offer list schedules of increasing periods until one fits; longer ones are rarely better."""
    for longer in LONGER:
        fits = False
        for backward_first in (True, False):
            pattern = list_pattern(search.problem, search.bound * longer, backward_first)
            orders = None if pattern is None else search.model.orders_of(pattern)
            if orders is None or search.model.overfull(orders):
                continue
            least = least_pattern(search.model, orders, search.load)
            if least is not None:
                fits = True
                search.offer(least)
        if fits:
            return


def list_pattern(problem: PatternProblem, period: float, backward_first: bool) -> Pattern | None:
    """Schedule the operations into a period one by one, from the last stage to the first.

    Every forward is as late, every backward as early as its device or link allows, so that few
    microbatches are in flight; with one stage per device this gives the groups of 1F1B*. None if
    there is no place for an operation; memory is not checked.
    """
    jobs = problem.jobs
    busy: list[list[tuple[float, float]]] = [[] for _ in problem.shared]
    starts = [0.0] * len(jobs)
    begin, end = 0.0, 0.0  # of all operations so far, for one microbatch
    for i in reversed(range(len(jobs) // 2)):
        back = len(jobs) - 1 - i
        for job in (back, i) if backward_first else (i, back):
            seconds, taken = jobs[job].seconds, busy[jobs[job].resource]
            at = end if job == back else begin - seconds
            place = _place(taken, at, seconds, period, later=job == back)
            if place is None:
                return None
            starts[job] = place
            taken.append((place, seconds))
        begin, end = starts[i], starts[back] + jobs[back].seconds
    return Pattern(period, tuple(start - starts[0] for start in starts))


def _place(
    taken: list[tuple[float, float]], at: float, seconds: float, period: float, later: bool
) -> float | None:
    """The first free place at ``at`` or later, or the last one at ``at`` or earlier."""
    for _ in range(2 * len(taken) + 1):
        clash = next((one for one in taken if _clash(*one, at, seconds, period)), None)
        if clash is None:
            return at
        begin, length = clash
        if later:
            at += (begin + length - at) % period
        else:
            at -= (at + seconds - begin) % period
    return None


def _clash(begin: float, length: float, at: float, seconds: float, period: float) -> bool:
    """Whether two operations overlap, each repeated with the period."""
    slack = MARGIN * period
    return (at - begin) % period < length - slack or (begin - at) % period < seconds - slack
