"""The search for MadPipe's least period, by an exact dynamic program over labels.

The program decides whether an allocation with period T exists. It places stages from the last to
the first. The state is the number of layers and of normal groups left; each state has labels: the
delay V so far, and the special group's load, resident bytes and peak bytes. (+) is increasing in V,
so a label dominates another if none of its values is larger. If a state has more labels than fit in
its array, either new labels are dropped, or two are merged into one with the smaller of their
values. Dropping loses allocations, so it can only prove a period feasible; merging adds allocations
that do not exist, so it can only prove a period infeasible.

A label is also removed if the remaining layers require more of the special group than is left,
according to a table that ignores delays (``Need``).
"""

import math
import time
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.joint_patterns import (
    AllocationTables,
    Placed,
    all_periods,
    contiguous,
    latest_ends,
)
from stagewright.formulations.patterns.madpipe import StageAllocationProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.units import format_bytes
from stagewright.solvers.patterns.madpipe_kernels import (
    FAR,
    FIELDS,
    OWNERS,
    PARENT,
    PARTS,
    SPECIAL,
    begin,
    needs_of,
    pass_layer,
)
from stagewright.solvers.patterns.madpipe_labels import MadPipeLabels, Pass

_MOST_GROUPS = 16  # for which Need has rows; the last row is for all larger ones
_FIRST_LABELS = 32  # per state
_MORE_LABELS = 8
LABEL_BYTES = 1e9
STEPS_PER_SECOND = 3e7
UNLIMITED = Limits(math.inf)


class PassOutcome(Enum):
    """Outcome of a pass: an allocation, a proof that none exists, or neither."""

    FOUND = 0
    NONE = 1
    OPEN = 2


@dataclass
class AllocationProgram:
    """The exact program with ``room`` labels per state; passes reuse its arrays."""

    form: AllocationTables
    room: int
    merging: bool = False
    labels: MadPipeLabels = field(init=False)

    def __post_init__(self) -> None:
        states = self.form.seconds.shape[-1] * (len(self.form.normal) + 1) * OWNERS
        self.labels = MadPipeLabels(
            np.empty((states, self.room, FIELDS), dtype=np.int64),
            np.zeros(states, dtype=np.int64),
            np.zeros(2, dtype=np.int64),
        )

    def test(
        self, period: int, steps: float = math.inf, limits: Limits = UNLIMITED
    ) -> tuple[PassOutcome, list[Placed]]:
        """Search for an allocation with ``period``; stops after a number of comparisons.

        Of ``limits``, only the stop token is checked, after each layer.
        """
        # Without a special group the tables only determine which layers can be placed.
        rows = min(self.form.versions, _MOST_GROUPS) * PARTS if self.form.special >= 0 else 1
        need = needs_of(self.form, period, rows)._replace(delay=latest_ends(self.form))
        most = int(min(steps, float(FAR)))
        label = self._reach(Pass(self.form, need, period, self.labels, self.merging, most), limits)
        if label >= 0 and not self.merging:
            return PassOutcome.FOUND, self._placed(label)
        open_ended = label >= 0 or self.labels.work[0] > most or limits.stopped()
        dropped = not self.merging and self.labels.work[1] > 0
        return (PassOutcome.OPEN if open_ended or dropped else PassOutcome.NONE), []

    def _reach(self, this: Pass, limits: Limits) -> int:
        """A label of 0 layers left with all loads at most the period; -1 if none is reached."""
        begin(self.form, self.labels)
        for layer in range(self.form.seconds.shape[-1] - 1, 0, -1):
            label: int = pass_layer(this, layer)
            if label >= 0 or self.labels.work[0] > this.steps or limits.stopped():
                return label
        return -1

    def _placed(self, label: int) -> list[Placed]:
        """The stages of a label of 0 layers left, from the first stage."""
        left = len(self.form.normal) + 1
        layers, found = self.form.seconds.shape[-1] - 1, []
        state, column = divmod(label, self.room)
        while state // (OWNERS * left) < layers:
            parent, choice = self.labels.rows[state, column, PARENT:].tolist()
            start, (p, owner) = state // (OWNERS * left), divmod(state % (OWNERS * left), OWNERS)
            group = self.form.special if owner == SPECIAL else int(self.form.normal[p])
            state, column = divmod(parent, self.room)
            found.append(Placed(start, state // (OWNERS * left), group, choice))
        return found


def _label_rooms(form: AllocationTables) -> list[int]:
    """Labels per state for successive tries; a single one suffices without a special group."""
    if form.special < 0:
        return [1]
    states = form.seconds.shape[-1] * (len(form.normal) + 1) * OWNERS
    most = max(_FIRST_LABELS, int(LABEL_BYTES / (FIELDS * 8 * states)))
    rooms = [_FIRST_LABELS]
    while rooms[-1] < most:
        rooms.append(min(most, rooms[-1] * _MORE_LABELS))
    return rooms


NEAR = 1e-3  # below this ratio a bracket is narrowed by testing just below its upper end
_PROVING = 1 / 3  # share of the time reserved for the bound


@dataclass(frozen=True, slots=True)
class AllocationAnswer:
    """The least period found, ``stages`` for it, and a proved bound on it; in seconds.

    ``bound`` holds for all allocations with this special group, with lower bounds on their memory;
    ``exact``: it equals ``period`` up to a tick. If no allocation fits or none was found,
    ``stages`` is None, the period is infinite, and ``reason`` is given.
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
    """The allocation of least period, by bisection with the exact program."""
    search = PeriodBracket(question, limits or Limits())
    if question.special is not None:
        search.try_contiguous()
    search.solve()
    return search.answer()


def allocate(
    question: StageAllocationProblem, period: float, limits: Limits | None = None
) -> tuple[Stage, ...] | None:
    """Stages with a period of ``period`` seconds; None if none exist or none were found in time."""
    began, limits = time.perf_counter(), limits or Limits()
    ticks = min(round(period / question.tick), all_periods(question.tables))
    for room in _label_rooms(question.tables):
        left = limits.left(time.perf_counter() - began)
        program = AllocationProgram(question.tables, room)
        outcome, placed = program.test(ticks, left * STEPS_PER_SECOND, limits)
        if outcome is PassOutcome.FOUND:
            return question.stages(placed)
        if outcome is PassOutcome.NONE or left <= 0:
            return None
    return None


@dataclass
class PeriodBracket:
    """A bracket of the least period in ticks: ``low`` is infeasible, ``best`` attains ``high``."""

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
        """Start from the best allocation in which the special group has one stage; this is fast."""
        program = AllocationProgram(contiguous(self.question.tables), 1)
        low = self.low
        self._narrow(program)
        self.low, self.infeasible = low, False

    def solve(self) -> None:
        """Run passes with more and more labels per state, until the bracket is closed."""
        self.end = self.begun + (1 - _PROVING) * self.limits.seconds
        for room in _label_rooms(self.question.tables):
            self._narrow(AllocationProgram(self.question.tables, room))
            if self._done() or self._left() <= 0:
                break
        if not self._done():
            self.end = self.begun + self.limits.seconds
            self._raise_bound()

    def answer(self) -> AllocationAnswer:
        """The answer at this point."""
        tick = self.question.tick
        if self.high is None:
            reason = (
                _shortage(self.question)
                if self.infeasible
                else f"{self.limits.end} came before any allocation was found"
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
        """Test just below ``high``; while that succeeds, bisect the bracket."""
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
        """Double the period until an allocation is found or larger periods make no difference."""
        most = all_periods(self.question.tables)
        period = max(1, self.low)
        while self.high is None and period < most and self._left() > 0:
            period = min(2 * period, most)
            self._test(program, period)

    def _test(self, program: AllocationProgram, period: int) -> bool:
        outcome, placed = program.test(period, self._left() * STEPS_PER_SECOND, self.limits)
        if outcome is PassOutcome.FOUND:
            self.high, self.best = self.question.evaluate(placed), placed
            assert self.high <= period
        elif outcome is PassOutcome.NONE:
            self.low = max(self.low, period)
            self.infeasible = period == all_periods(self.question.tables)
        return outcome is PassOutcome.FOUND

    def _raise_bound(self) -> None:
        """Raise the lower bound with merged labels, where dropped labels decide nothing."""
        program = AllocationProgram(
            self.question.tables, _FIRST_LABELS * _MORE_LABELS, merging=True
        )
        high = self.high or all_periods(self.question.tables)
        while high - self.low > NEAR * high and self._left() > 0:
            middle = (self.low + high) // 2
            outcome, _ = program.test(middle, self._left() * STEPS_PER_SECOND, self.limits)
            if outcome is PassOutcome.NONE:
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
    """A lower bound on the period: the least work of every layer, averaged over all groups."""
    layers = np.arange(form.seconds.shape[-1] - 1)
    fastest = form.seconds[:, :, layers + 1, layers].min(axis=(0, 1))
    return max(int(fastest.max()), -(-int(fastest.sum()) // len(form.sort)))


def _shortage(question: StageAllocationProblem) -> str:
    """The message that names the additional bytes per group that are needed at any period."""
    form = question.tables
    most, (low, high) = all_periods(form), (0, int(form.memory.max()) // 8 + 1)
    while _fits_with(form, low + high, most) is PassOutcome.NONE and low + high < FAR // 64:
        low, high = low + high, 2 * high
    while high > low / 64 and high > 1:
        high //= 2
        if _fits_with(form, low + high, most) is PassOutcome.NONE:
            low += high
    return (
        "not even one microbatch at a time fits in memory: "
        f"every group needs at least {format_bytes((low + 1) * question.byte)} more"
    )


def _fits_with(form: AllocationTables, more: int, period: int) -> PassOutcome:
    wider = form._replace(memory=form.memory + more)
    return AllocationProgram(wider, _FIRST_LABELS * _MORE_LABELS, merging=form.special >= 0).test(
        period
    )[0]
