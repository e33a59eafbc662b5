"""The repetition of least period per microbatch, with a bound that says of which lengths it is.

Bounds from load and rooms hold for every repetition. For each length k, CP-SAT then decides whether
there is one of a given period, first of the bound itself. What it finds gets its exact times from
its orders; where it finds none, a longer period is tried, by bisection.
"""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from time import perf_counter

from ortools.sat.python import cp_model

from stagewright.formulations.forms.answers import Limits, Status, settled, silent
from stagewright.formulations.patterns.repetition import Repetition, RepetitionProblem
from stagewright.formulations.patterns.repetition_bounds import PaceBound, pace_bounds
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backends.cpsat import run_model
from stagewright.solvers.patterns.repetition_model import AtPeriod, common_scale

LENGTHS = (1, 2, 3, 4)
SOLVER = "CP-SAT"
PROVED = 1e-6  # relative gap below which a period is called optimal
COARSE = 24  # at most so many ticks of the longest block, to begin with
LESS = 0.03  # relative: by so much the load that coarse ticks round up becomes less
FINE = 2**24  # ticks of the least period where times have no common unit; a gap below PROVED
DENOMINATORS = 10**6
MARGIN = 1e-12  # relative: rounding of sums of times
SHARE = 0.7  # of the time that is left, for each length but the last
ATTEMPT = 0.25  # of the time, for each period
TOO_SHORT = 0.02  # share of the time with which no further attempt is made
LONGER = 0.06  # relative: by how much more than a bound a period is, where none is known


@dataclass(frozen=True, slots=True, eq=False)
class RepetitionAnswer:
    """The best repetition found, checked, with proved bounds on the period per microbatch.

    Attributes
    ----------
    repetition, pace
        The repetition and its period per microbatch; None if none was found.
    bound
        No repetition of the ``lengths`` has a smaller pace. Infinite if no period is feasible.
    general
        No repetition of any length has a smaller pace, by ``general.proved_by``.
    bounds
        The bound of every length, which holds for repetitions of exactly so many microbatches.
    status
        ``optimal`` if ``pace`` equals ``bound``, up to a relative difference of ``PROVED``: then
        the repetition is best among those of the ``lengths``, and among all if ``is_general``.
    """

    repetition: Repetition | None
    pace: float | None
    bound: float
    general: PaceBound
    bounds: tuple[PaceBound, ...]
    lengths: tuple[int, ...]
    status: Status
    seconds: float

    @property
    def is_general(self) -> bool:
        """Whether no repetition of any length, nor any endless schedule, is faster."""
        return self.pace is not None and self.pace <= self.general.seconds * (1 + PROVED)


def best_repetition(
    problem: RepetitionProblem, limits: Limits, lengths: tuple[int, ...] = LENGTHS
) -> RepetitionAnswer:
    """The repetition of least period per microbatch, of any of the ``lengths``, within ``limits``.

    The lengths are searched one after the other; all are, until the pace equals a bound that holds
    for every length.

    Raises
    ------
    InputError
        If there is no length, or one below 1.
    """
    if not lengths or min(lengths) < 1:
        raise InputError(f"lengths must be at least 1, got {lengths}")
    began = perf_counter()
    general = pace_bounds(problem)[0]
    found: Repetition | None = None
    bounds = []
    for number, length in enumerate(lengths):
        left = limits.left(perf_counter() - began)
        share = 1.0 if number == len(lengths) - 1 else SHARE
        search = _LengthSearch(problem, length, general, replace(limits, seconds=share * left))
        if found is not None:
            search.best, search.ceiling = found, found.pace * length
        search.run()
        found = search.best
        bounds.append(PaceBound(search.bound / length, search.proved_by, length))
        if found is not None and found.pace <= general.seconds * (1 + PROVED):
            break
    pace = None if found is None else problem.evaluate(found)
    proved = {one.length: one.seconds for one in bounds}
    bound = min(proved.get(length, general.seconds) for length in lengths)
    if pace is not None:
        bound = min(bound, pace)
    return RepetitionAnswer(
        repetition=found,
        pace=pace,
        bound=bound,
        general=general,
        bounds=tuple(bounds),
        lengths=lengths,
        status=_status(pace, bound, limits),
        seconds=perf_counter() - began,
    )


def _status(pace: float | None, bound: float, limits: Limits) -> Status:
    if math.isinf(bound):
        return Status.INFEASIBLE
    return settled(limits.status(found=pace is not None), pace, bound, PROVED)


@dataclass
class _LengthSearch:
    """The best repetition and the bound of one length; periods are of ``length`` microbatches.

    ``ceiling`` is a period from which on repetitions are of no interest.
    """

    problem: RepetitionProblem
    length: int
    general: PaceBound
    limits: Limits
    best: Repetition | None = None
    ceiling: float = math.inf
    bound: float = field(init=False)
    proved_by: str = field(init=False)
    longest: float = field(init=False)
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.bound, self.proved_by = self.length * self.general.seconds, self.general.proved_by
        # Orders that are feasible at any period are so at the sum of all times.
        self.longest = self.length * sum(self.problem.seconds)
        if self.bound > self.longest * (1 + PROVED):
            self.bound = math.inf
        self.began = perf_counter()

    @property
    def closed(self) -> bool:
        """Whether nothing below the ceiling is left."""
        return self.ceiling <= self.bound * (1 + PROVED) or math.isinf(self.bound)

    def run(self) -> None:
        """Search with times rounded up to coarse ticks, then decide in ticks that prove it."""
        if self.closed:
            return
        least, scale = min(self.problem.seconds), common_scale(self.problem.seconds)
        if scale is None or self.bound * scale > FINE:
            scale, exact = None, min(least, self.bound / FINE)
        else:
            exact = 1 / scale
        load = math.inf
        for parts in range(1, COARSE + 1):
            unit = max(self.problem.seconds) / parts
            rounded = unit * self._load(unit, cautious=True)
            if unit > exact * (1 + MARGIN) and rounded < load * (1 - LESS):
                load = rounded
                self._bisect(unit, cautious=True)
        self._bisect(exact)
        if scale is not None:
            self._settle(exact)

    def _bisect(self, unit: float, cautious: bool = False) -> None:
        """Bisect in ticks of ``unit``; ``cautious``: of times rounded up, which proves nothing."""
        low = max(_up(self.bound / unit), self._load(unit, cautious)) - 1  # nothing up to it
        high = _up(min(self.ceiling, self.longest) / unit)
        if math.isinf(self.ceiling):
            high += 1 + cautious * self.length * len(self.problem.seconds)
        period, longer = low + 1, LONGER
        while low + 1 < high and not self.closed and not self._ended:
            status, repetition = self._at(period, unit, cautious)
            if repetition is not None:
                self._offer(repetition)
                high = min(period, _up(repetition.period / unit))
            else:
                if status is Status.INFEASIBLE:
                    self._prove(period * unit if period * unit < self.longest else math.inf)
                low = period
            period = (low + high) // 2
            if math.isinf(self.ceiling):
                period, longer = min(period, math.ceil(low * (1 + longer))), 2 * longer

    def _load(self, unit: float, cautious: bool) -> int:
        """Ticks of the resource with most work."""
        ticks = AtPeriod(self.problem, self.length, 1, unit, cautious).ticks
        shared = self.problem.shared.values()
        return self.length * max(sum(ticks[i] for i in members) for members in shared)

    def _settle(self, unit: float) -> None:
        """Decide whether there is a period below the ceiling, if times are multiples of ``unit``.

        The least period of some orders is the time of a cycle of differences, which passes every
        block at most once, divided by a whole number of periods. So this number is at most
        ``most``, and two such periods differ by unit / most**2 or more.
        """
        while not self.closed and not self._ended and not math.isinf(self.ceiling):
            most = int(self.longest / self.bound * (1 + MARGIN))
            other = Fraction(self.ceiling / unit).limit_denominator(DENOMINATORS).denominator
            tick = unit / (most * max(most, other))
            if self.ceiling > FINE * tick:  # too many for CP-SAT's integers
                return
            status, repetition = self._at(_up(self.ceiling / tick) - 1, tick, cautious=False)
            if status is Status.INFEASIBLE:
                self._prove(self.ceiling)
            elif repetition is None:
                return
            else:
                self._offer(repetition)

    def _at(self, period: int, unit: float, cautious: bool) -> tuple[Status, Repetition | None]:
        """A repetition whose rounded times have this period; infeasible if proved so."""
        for careful in (True,) if cautious else (False, True):
            form = AtPeriod(self.problem, self.length, period, unit, careful)
            left = self.limits.left(perf_counter() - self.began)
            seconds = min(left, ATTEMPT * self.limits.seconds)
            status, repetition = solve_at(form, replace(self.limits, seconds=seconds))
            if status is Status.INFEASIBLE and careful:
                return Status.NO_ANSWER, None
            if repetition is None or self.problem.fits(repetition):
                return status, repetition
        return Status.NO_ANSWER, None

    @property
    def _ended(self) -> bool:
        left = self.limits.left(perf_counter() - self.began)
        return left <= TOO_SHORT * self.limits.seconds

    def _offer(self, repetition: Repetition) -> None:
        if self.problem.evaluate(repetition) * self.length < self.ceiling:
            self.best, self.ceiling = repetition, repetition.period

    def _prove(self, bound: float) -> None:
        if bound > self.bound:
            self.bound, self.proved_by = bound, SOLVER


def solve_at(
    form: AtPeriod, limits: Limits, shortest: Repetition | None = None
) -> tuple[Status, Repetition | None]:
    """CP-SAT's answer to a form: its status, and the exact repetition of the orders found.

    ``shortest``: a known repetition, from which to start to minimise the time from the first start
    to the last end of a period's microbatches.
    """
    if limits.seconds <= 0:
        return Status.NO_ANSWER, None
    model, starts = form.apply(shortest)
    solver = cp_model.CpSolver()
    if limits.threads == 1:  # the linear relaxation of orders is weak
        solver.parameters.linearization_level = 0
    answer = run_model(model, starts, solver, limits, silent, perf_counter())
    return answer.status, None if answer.values is None else form.invert(answer.values)


def _up(ticks: float) -> int:
    """The least whole number that is not below ``ticks``, but for rounding."""
    return math.ceil(ticks * (1 - MARGIN))
