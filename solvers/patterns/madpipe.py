"""MadPipe's dynamic program, exact (labels) and as the paper has it (a grid), and its search.

The exact program asks whether an allocation keeps a period T. It places stages from the last to the
first and keeps, for every number of layers and of normal groups left, labels: the delay V so far,
the special group's load, its bytes, and its bytes at the peak. (+) grows with V, so a label that is
nowhere larger than another makes that one superfluous. Where a state has more labels than there is
room for, either the new ones are dropped, which only overlooks allocations, or two are merged into
one with the smaller of their figures, which only invents some: the first proves that a period can
be kept, the second that it cannot.

A label also goes where the layers left need more of the special group than it has left, by a table
that knows nothing of delays (``Need``).
"""

import math
import time
from dataclasses import dataclass, field

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.allocation_tables import (
    AllocationTables,
    Placed,
    all_periods,
    contiguous,
)
from stagewright.formulations.patterns.madpipe import StageAllocationProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.units import format_bytes
from stagewright.solvers.patterns.madpipe_kernels import FAR
from stagewright.solvers.patterns.madpipe_program import (
    FIRST_LABELS,
    MORE_LABELS,
    STEPS_PER_SECOND,
    AllocationProgram,
    Outcome,
    label_rooms,
)

NEAR = 1e-3  # a bracket of this ratio is narrowed by looking just below its upper end
PROVING = 1 / 3  # of the time is kept for the bound


@dataclass(frozen=True, slots=True)
class AllocationAnswer:
    """The least period found, ``stages`` for it, and a proved bound on it; in seconds.

    ``bound`` holds for all allocations with this special group, by what their memory needs at
    least; ``exact`` says that it equals ``period``, to a tick. ``stages`` is None, the period
    infinite, and ``reason`` given if nothing fits, or nothing was found.
    """

    stages: tuple[Stage, ...] | None
    period: float
    bound: float
    exact: bool
    seconds: float
    reason: str = ""


def least_period(
    question: StageAllocationProblem, limits: Limits | None = None
) -> AllocationAnswer:
    """The allocation of least period, by exact passes at periods that are halved between."""
    search = PeriodBracket(question, limits or Limits())
    if question.special is not None:
        search.try_contiguous()
    search.solve()
    return search.answer()


def allocate(
    question: StageAllocationProblem, period: float, limits: Limits | None = None
) -> tuple[Stage, ...] | None:
    """Stages that keep ``period`` seconds; None if there are none, or none found in the time."""
    began, limits = time.perf_counter(), limits or Limits()
    ticks = min(round(period / question.tick), all_periods(question.tables))
    for room in label_rooms(question.tables):
        left = limits.left(time.perf_counter() - began)
        program = AllocationProgram(question.tables, room)
        outcome, placed = program.test(ticks, left * STEPS_PER_SECOND, limits)
        if outcome is Outcome.FOUND:
            return question.stages(placed)
        if outcome is Outcome.NONE or left <= 0:
            return None
    return None


@dataclass
class PeriodBracket:
    """The bracket of the least period, in ticks: none at ``low`` or below, ``best`` at ``high``."""

    question: StageAllocationProblem
    limits: Limits
    low: int = field(init=False)
    high: int | None = field(init=False, default=None)
    best: list[Placed] = field(init=False, default_factory=list)
    begun: float = field(init=False)
    end: float = field(init=False, default=math.inf)
    infeasible: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.begun = time.perf_counter()
        self.low = _load_ticks(self.question.tables) - 1

    def try_contiguous(self) -> None:
        """Take the best allocation that gives the special group one stage; a matter of moments."""
        program = AllocationProgram(contiguous(self.question.tables), 1)
        low = self.low
        self._narrow(program)
        self.low, self.infeasible = low, False

    def solve(self) -> None:
        """Pass after pass with more room for labels, until one leaves nothing open."""
        self.end = self.begun + (1 - PROVING) * self.limits.seconds
        for room in label_rooms(self.question.tables):
            self._narrow(AllocationProgram(self.question.tables, room))
            if self._done() or self._left() <= 0:
                break
        if not self._done():
            self.end = self.begun + self.limits.seconds
            self._raise_bound()

    def answer(self) -> AllocationAnswer:
        """What was found and proved."""
        tick = self.question.tick
        if self.high is None:
            reason = (
                _shortage(self.question)
                if self.infeasible
                else f"{self.limits.end} came before anything was found"
            )
            bound = math.inf if self.infeasible else (self.low + 1) * tick
            return AllocationAnswer(None, math.inf, bound, self.infeasible, self._seconds(), reason)
        return AllocationAnswer(
            self.question.stages(self.best),
            self.high * tick,
            (self.low + 1) * tick,
            self.low == self.high - 1,
            self._seconds(),
        )

    def _narrow(self, program: AllocationProgram) -> None:
        """Look just below what is known, and as long as that succeeds halve the bracket."""
        if self.high is None:
            self._climb(program)
        while self.high is not None and self.low < self.high - 1 and self._left() > 0:
            if not self._test(program, self.high - 1):
                return
            low = self.low
            while self.high - low > NEAR * self.high and self._left() > 0:
                middle = (low + self.high) // 2
                if not self._test(program, middle):
                    low = middle

    def _climb(self, program: AllocationProgram) -> None:
        """Double the period until something is found, or nothing changes any more."""
        most = all_periods(self.question.tables)
        period = max(1, self.low)
        while self.high is None and period < most and self._left() > 0:
            period = min(2 * period, most)
            self._test(program, period)

    def _test(self, program: AllocationProgram, period: int) -> bool:
        outcome, placed = program.test(period, self._left() * STEPS_PER_SECOND, self.limits)
        if outcome is Outcome.FOUND:
            self.high, self.best = self.question.evaluate(placed), placed
            assert self.high <= period
        elif outcome is Outcome.NONE:
            self.low = max(self.low, period)
            self.infeasible = period == all_periods(self.question.tables)
        return outcome is Outcome.FOUND

    def _raise_bound(self) -> None:
        """Prove with merged labels what the labels kept apart left open."""
        program = AllocationProgram(self.question.tables, FIRST_LABELS * MORE_LABELS, merging=True)
        high = self.high or all_periods(self.question.tables)
        while high - self.low > NEAR * high and self._left() > 0:
            middle = (self.low + high) // 2
            outcome, _ = program.test(middle, self._left() * STEPS_PER_SECOND, self.limits)
            if outcome is Outcome.NONE:
                self.low = middle
            else:
                high = middle

    def _done(self) -> bool:
        return self.infeasible or (self.high is not None and self.low == self.high - 1)

    def _seconds(self) -> float:
        return time.perf_counter() - self.begun

    def _left(self) -> float:
        return 0.0 if self.limits.stopped() else self.end - time.perf_counter()


def _load_ticks(form: AllocationTables) -> int:
    """No period is shorter: every layer where and as it is quickest, shared by all groups."""
    layers = np.arange(form.seconds.shape[-1] - 1)
    quickest = form.seconds[:, :, layers + 1, layers].min(axis=(0, 1))
    return max(int(quickest.max()), -(-int(quickest.sum()) // len(form.sort)))


def _shortage(question: StageAllocationProblem) -> str:
    """How many bytes every group would need besides, at least, at the longest period."""
    form = question.tables
    most, (low, high) = all_periods(form), (0, int(form.memory.max()) // 8 + 1)
    while _fits_with(form, low + high, most) is Outcome.NONE and low + high < FAR // 64:
        low, high = low + high, 2 * high
    while high > low / 64 and high > 1:
        high //= 2
        if _fits_with(form, low + high, most) is Outcome.NONE:
            low += high
    return (
        "even a microbatch at a time does not fit in memory: "
        f"every group would need at least {format_bytes((low + 1) * question.byte)} more"
    )


def _fits_with(form: AllocationTables, more: int, period: int) -> Outcome:
    wider = form._replace(memory=form.memory + more)
    return AllocationProgram(wider, FIRST_LABELS * MORE_LABELS, merging=form.special >= 0).test(
        period
    )[0]
