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
from enum import Enum
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.madpipe import (
    AllocationProblem,
    AllocationTables,
    Placed,
    all_periods,
    behind,
    contiguous,
)
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes

SPECIAL, OPEN, CLOSED = 0, 1, 2  # owner of the stage placed last; see _reach
OWNERS = 3
DELAY, LOAD, HELD, GROUP, PEAK, PARENT, CHOICE = range(7)  # the fields of a label
FIELDS = 7
SHIFT = 46  # a delay is (group << SHIFT) + rest
REST = (1 << SHIFT) - 1
FAR = np.int64(1) << 60
MOST_GROUPS = 16  # for which Need has rows; the last one serves all above
PARTS = 4  # rows per period
MARGIN = 1e-9  # rounding may not refuse what just fits

FIRST_LABELS = 32  # per state
MORE_LABELS = 8
LABEL_BYTES = 1e9
EFFORT = 4  # comparisons that take as long as looking at one stage
STEPS_PER_SECOND = 3e7
UNLIMITED = Limits(math.inf)
NEAR = 1e-3  # a bracket of this ratio is narrowed by looking just below its upper end
PROVING = 1 / 3  # of the time is kept for the bound


class Labels(NamedTuple):
    """The labels of every state, shape (states, room, 7), and their number, shape (states,).

    State (l, p, o) has l layers and p normal groups left; o tells of the stage placed last, see
    ``_reach``. A label's fields are those of ``Label``, the label that it comes from (its state
    times the room, plus its column), and how the stage between them is recomputed. ``work`` counts
    comparisons, and labels that found no room.
    """

    rows: Ints
    filled: Ints
    work: Ints


class Label(NamedTuple):
    """One label: the delay, and what the special group does and keeps so far.

    ``load`` in ticks; in bytes ``held``, what its stages keep at all times; ``group``, what it
    keeps while the stages of the delay's group are at their peak; ``peak``, at any time.
    """

    delay: int
    load: int
    held: int
    group: int
    peak: int


class Need(NamedTuple):
    """What layers [0, l) on p normal groups and the special one ask of the special one at least.

    ``load`` and ``held`` each at its least, ``both`` the least sum of the two as shares of the
    period and the memory; shape (rows, N + 1, L + 1), where a row stands for delays behind [0, l)
    of one part of a period. ``delay`` and ``most`` are at most what [0, l) can add to the delay and
    the special load, ``crossing`` is C(l) at its least between two groups, shape (L + 1,).
    """

    load: Ints
    held: Ints
    both: Floats
    delay: Ints
    most: Ints
    crossing: Ints


class Outcome(Enum):
    """Of one pass: an allocation, a proof that there is none, or neither."""

    FOUND = 0
    NONE = 1
    OPEN = 2


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


def least_period(question: AllocationProblem, limits: Limits | None = None) -> AllocationAnswer:
    """The allocation of least period, by exact passes at periods that are halved between."""
    search = _Search(question, limits or Limits())
    if question.special is not None:
        search.try_contiguous()
    search.solve()
    return search.answer()


def allocate(
    question: AllocationProblem, period: float, limits: Limits | None = None
) -> tuple[Stage, ...] | None:
    """Stages that keep ``period`` seconds; None if there are none, or none found in the time."""
    began, limits = time.perf_counter(), limits or Limits()
    ticks = min(round(period / question.tick), all_periods(question.tables))
    for room in _rooms(question.tables):
        left = limits.left(time.perf_counter() - began)
        program = Program(question.tables, room)
        outcome, placed = program.test(ticks, left * STEPS_PER_SECOND, limits)
        if outcome is Outcome.FOUND:
            return question.stages(placed)
        if outcome is Outcome.NONE or left <= 0:
            return None
    return None


@dataclass(frozen=True, slots=True)
class Grid:
    """How many values, from 0 on, stand for the special load, its memory, and V (MadPipe 5.1)."""

    loads: int = 101
    memories: int = 11
    delays: int = 51

    def __post_init__(self) -> None:
        if min(self.loads, self.memories, self.delays) < 2:
            raise InputError(f"a grid needs at least two values of each, got {self}")


@dataclass(frozen=True, slots=True)
class GridAnswer:
    """What MadPipe's first phase finds: the target period, the period expected there, in seconds.

    ``stages`` is None, and both are infinite, if no target had an allocation.
    """

    target: float
    period: float
    stages: tuple[Stage, ...] | None
    seconds: float


def by_grid(question: AllocationProblem, grid: Grid | None = None, passes: int = 10) -> GridAnswer:
    """MadPipe's own first phase: MadPipe-DP on a grid, and Algorithm 1 around it (MadPipe 4.2).

    As printed: the special group keeps g - 1 microbatches of each stage, C is paid between its own
    stages too, and nothing is said of versions. Loads and bytes are rounded up to the grid, from
    0 to U(1, L) and to M; so are delays, from 0 to U(1, L) + sum C, and the last value stands for
    all above.

    Raises
    ------
    InputError
        If the question is none of the paper's: no special group, groups of several devices or
        unequal ones, unequal links, or recomputation.
    """
    begun = time.perf_counter()
    _require_printed(question)
    form, tick = question.tables, question.tick
    raster = _raster(form, grid or Grid())
    everything = float(form.seconds[0, 0, -1, 0])
    low, high = everything / len(question.groups), everything + float(raster.crossing.sum())
    best: tuple[float, float, float, list[Placed]] = (math.inf, math.inf, math.inf, [])
    target = low
    for _ in range(passes):
        # No allocation of a period above ``high`` changes what follows.
        period, placed = _madpipe_dp(form, raster, target, high)
        best = min(best, (max(period, target), target, period, placed))
        low = max(low, min(period, target))
        high = min(high, max(period, target))
        target = (low + high) / 2
    _, target, period, placed = best
    seconds = time.perf_counter() - begun
    if not placed:
        return GridAnswer(math.inf, math.inf, None, seconds)
    return GridAnswer(target * tick, period * tick, question.stages(placed), seconds)


def madpipe_dp(
    question: AllocationProblem, target: float, grid: Grid | None = None
) -> tuple[float, tuple[Stage, ...] | None]:
    """MadPipe-DP: the least period on the grid where memory is counted at the ``target`` period.

    Both in seconds; infinite, without stages, if nothing fits. Grid and refusals as in ``by_grid``.
    """
    _require_printed(question)
    form, tick = question.tables, question.tick
    period, placed = _madpipe_dp(form, _raster(form, grid or Grid()), target / tick, math.inf)
    return period * tick, question.stages(placed) if placed else None


@dataclass
class Program:
    """The exact program, with room for so many labels per state, used again by every pass."""

    form: AllocationTables
    room: int
    merging: bool = False
    labels: Labels = field(init=False)

    def __post_init__(self) -> None:
        states = self.form.seconds.shape[-1] * (len(self.form.normal) + 1) * OWNERS
        self.labels = Labels(
            np.empty((states, self.room, FIELDS), dtype=np.int64),
            np.zeros(states, dtype=np.int64),
            np.zeros(2, dtype=np.int64),
        )

    def test(
        self, period: int, steps: float = math.inf, limits: Limits = UNLIMITED
    ) -> tuple[Outcome, list[Placed]]:
        """Whether an allocation keeps ``period``; gives up after so many comparisons.

        Of ``limits``, which are looked at between two layers, only the stop token counts.
        """
        # Without a special group the tables only tell what can be placed at all.
        rows = min(self.form.versions, MOST_GROUPS) * PARTS if self.form.special >= 0 else 1
        need = _needs(self.form, period, rows)
        need = need._replace(delay=behind(self.form))
        most = int(min(steps, float(FAR)))
        label = self._reach(need, period, most, limits)
        if label >= 0 and not self.merging:
            return Outcome.FOUND, self._placed(label)
        open_ended = label >= 0 or self.labels.work[0] > most or limits.stopped()
        dropped = not self.merging and self.labels.work[1] > 0
        return (Outcome.OPEN if open_ended or dropped else Outcome.NONE), []

    def _reach(self, need: Need, period: int, steps: int, limits: Limits) -> int:
        """A label of 0 layers left with every load at most ``period``; -1 if none was reached."""
        _begin(self.form, self.labels)
        for layer in range(self.form.seconds.shape[-1] - 1, 0, -1):
            label: int = _reach(self.form, need, period, self.labels, self.merging, steps, layer)
            if label >= 0 or self.labels.work[0] > steps or limits.stopped():
                return label
        return -1

    def _placed(self, label: int) -> list[Placed]:
        """The stages that led to a label of 0 layers, from the first."""
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


@dataclass
class _Search:
    """The bracket of the least period, in ticks: none at ``low`` or below, ``best`` at ``high``."""

    question: AllocationProblem
    limits: Limits
    low: int = field(init=False)
    high: int | None = field(init=False, default=None)
    best: list[Placed] = field(init=False, default_factory=list)
    begun: float = field(init=False)
    end: float = field(init=False, default=math.inf)
    infeasible: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.begun = time.perf_counter()
        self.low = _load_bound(self.question.tables) - 1

    def try_contiguous(self) -> None:
        """Take the best allocation that gives the special group one stage; a matter of moments."""
        program = Program(contiguous(self.question.tables), 1)
        low = self.low
        self._narrow(program)
        self.low, self.infeasible = low, False

    def solve(self) -> None:
        """Pass after pass with more room for labels, until one leaves nothing open."""
        self.end = self.begun + (1 - PROVING) * self.limits.seconds
        for room in _rooms(self.question.tables):
            self._narrow(Program(self.question.tables, room))
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

    def _narrow(self, program: Program) -> None:
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

    def _climb(self, program: Program) -> None:
        """Double the period until something is found, or nothing changes any more."""
        most = all_periods(self.question.tables)
        period = max(1, self.low)
        while self.high is None and period < most and self._left() > 0:
            period = min(2 * period, most)
            self._test(program, period)

    def _test(self, program: Program, period: int) -> bool:
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
        program = Program(self.question.tables, FIRST_LABELS * MORE_LABELS, merging=True)
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


def _rooms(form: AllocationTables) -> list[int]:
    """Labels per state, for one try after another; without a special group one is all there is."""
    if form.special < 0:
        return [1]
    states = form.seconds.shape[-1] * (len(form.normal) + 1) * OWNERS
    most = max(FIRST_LABELS, int(LABEL_BYTES / (FIELDS * 8 * states)))
    rooms = [FIRST_LABELS]
    while rooms[-1] < most:
        rooms.append(min(most, rooms[-1] * MORE_LABELS))
    return rooms


def _load_bound(form: AllocationTables) -> int:
    """No period is shorter: every layer where and as it is quickest, shared by all groups."""
    layers = np.arange(form.seconds.shape[-1] - 1)
    quickest = form.seconds[:, :, layers + 1, layers].min(axis=(0, 1))
    return max(int(quickest.max()), -(-int(quickest.sum()) // len(form.sort)))


def _shortage(question: AllocationProblem) -> str:
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
    return Program(wider, FIRST_LABELS * MORE_LABELS, merging=form.special >= 0).test(period)[0]


@njit(cache=True)
def _begin(form: AllocationTables, labels: Labels) -> None:
    """The one label of all layers left."""
    labels.filled[:] = 0
    labels.work[:] = 0
    start = _state(form, form.seconds.shape[-1] - 1, len(form.normal), SPECIAL)
    labels.filled[start] = 1
    labels.rows[start, 0, DELAY] = np.int64(1) << SHIFT
    labels.rows[start, 0, LOAD : PEAK + 1] = 0


@njit(cache=True)
def _reach(
    form: AllocationTables,
    need: Need,
    period: int,
    labels: Labels,
    merging: bool,
    steps: int,
    l: int,
) -> int:
    """Pass the states of ``l`` layers left; a label of 0 layers left, or -1 if none was reached.

    States are passed from many layers left to few. The stage placed last is the special group's,
    or the normal group's p (the first p are left); then the special group may be in front of it
    (``OPEN``), or may not, as their link has no time left for that beside the special group behind
    it (``CLOSED``).
    """
    for p in range(len(form.normal) + 1):
        for o in range(OWNERS):
            state = _state(form, l, p, o)
            for column in range(labels.filled[state]):
                end = _extend(form, need, period, labels, merging, state, column)
                if end >= 0 or labels.work[0] > steps:
                    return end
    return -1


@njit(cache=True)
def _state(form: AllocationTables, l: int, p: int, o: int) -> int:
    state: int = (l * (len(form.normal) + 1) + p) * OWNERS + o
    return state


@njit(cache=True)
def _add(delay: int, ticks: int, period: int) -> int:
    """V (+) y (MadPipe 4.2.2), see ``delayed``."""
    if (delay & REST) + ticks <= period:
        return delay + ticks
    return (((delay >> SHIFT) + 1) << SHIFT) + ticks


@njit(cache=True)
def _extend(
    form: AllocationTables,
    need: Need,
    period: int,
    labels: Labels,
    merging: bool,
    state: int,
    column: int,
) -> int:
    """Place every stage that may stand in front of a label; a label of 0 layers left, or -1."""
    left, o = divmod(state, OWNERS)
    l, p = divmod(left, len(form.normal) + 1)
    owner = form.special if o == SPECIAL else form.normal[p]
    if l == form.seconds.shape[-1] - 1:
        owner = -1
    end = -1
    for j in range(p - 1, -1, -1):
        if end < 0 and (j == p - 1 or form.skips[j]):
            end = _place_normal(form, need, period, labels, merging, state, column, l, j, owner)
    if end < 0 and form.special >= 0 and o != CLOSED:
        end = _place_special(form, need, period, labels, merging, state, column, l, p, owner)
    return end


@njit(cache=True)
def _place_normal(
    form: AllocationTables,
    need: Need,
    period: int,
    labels: Labels,
    merging: bool,
    state: int,
    column: int,
    l: int,
    j: int,
    owner: int,
) -> int:
    """Stages [k, l) on normal group j, for all k."""
    group = form.normal[j]
    sort = form.sort[group]
    crossing = form.transfer[group, owner, l] if owner >= 0 else 0
    if crossing > period:
        return -1
    shared = crossing if owner >= 0 and owner == form.special else -1
    before = _label(labels, state, column)
    delay = _add(before.delay, crossing, period)
    for c in range(form.seconds.shape[1]):
        for k in range(l - 1, -1, -1):
            labels.work[0] += EFFORT
            if form.seconds[sort, c, l, k] > period:
                break
            through = _add(delay, form.seconds[sort, c, l, k], period)
            flight = through >> SHIFT
            allowed = _in_time(form, period, group, k, l, through)
            if not (allowed and _fits(form, group, c, k, l, flight)):
                continue
            at_peak = before.group if flight == before.delay >> SHIFT else before.held
            label = Label(through, before.load, before.held, at_peak, before.peak)
            if _hopeless(form, need, period, k, j, need.crossing[k], label):
                continue
            o = CLOSED if _link_full(form, period, shared, group, k) else OPEN
            target = _state(form, k, j, o)
            _keep(form, need, period, labels, merging, target, k, label, (state, column, c))
            if k == 0:
                end: int = target * labels.rows.shape[1]
                return end
    return -1


@njit(cache=True)
def _place_special(
    form: AllocationTables,
    need: Need,
    period: int,
    labels: Labels,
    merging: bool,
    state: int,
    column: int,
    l: int,
    p: int,
    owner: int,
) -> int:
    """Stages [k, l) on the special group, for all k, with p normal groups left."""
    group = form.special
    sort = form.sort[group]
    crossing = form.transfer[group, owner, l] if owner >= 0 else 0
    if crossing > period:
        return -1
    before = _label(labels, state, column)
    delay = _add(before.delay, crossing, period)
    for c in range(form.seconds.shape[1]):
        for k in range(l - 1, -1, -1):
            labels.work[0] += EFFORT
            load = before.load + form.seconds[sort, c, l, k]
            if load > period:
                break
            through = _add(delay, form.seconds[sort, c, l, k], period)
            if not _in_time(form, period, group, k, l, through):
                continue
            saved, flight = form.saved[sort, c, l, k], through >> SHIFT
            more = form.static[sort, l, k] + (flight - 1) * saved
            # The later stages of its group reach their peak while it is at its own.
            later = before.group - before.held if flight == before.delay >> SHIFT else 0
            held = before.held + more
            at_peak = held + saved + max(later, form.working[sort, c, l, k])
            label = Label(through, load, held, at_peak, max(before.peak + more, at_peak))
            if _hopeless(form, need, period, k, p, 0, label):
                continue
            target = _state(form, k, p, SPECIAL)
            _keep(form, need, period, labels, merging, target, k, label, (state, column, c))
            if k == 0:
                end: int = target * labels.rows.shape[1]
                return end
    return -1


@njit(cache=True)
def _label(labels: Labels, state: int, column: int) -> Label:
    row = labels.rows[state, column]
    return Label(row[DELAY], row[LOAD], row[HELD], row[GROUP], row[PEAK])


@njit(cache=True)
def _in_time(form: AllocationTables, period: int, group: int, k: int, l: int, delay: int) -> bool:
    """Two versions of the weights suffice, the all-reduce included (rule ``versions``)."""
    left = form.versions + 1 - (delay >> SHIFT)
    if left < 1:
        return False
    reduce = form.reduce[group, l, k]
    if reduce == 0:
        return True
    fits: bool = (
        -(-reduce // (form.versions - 1)) <= period
        and -(-((delay & REST) + reduce) // left) <= period
    )
    return fits


@njit(cache=True)
def _fits(form: AllocationTables, group: int, c: int, k: int, l: int, flight: int) -> bool:
    """Whether stage [k, l) alone on a group has memory for ``flight`` microbatches."""
    sort = form.sort[group]
    kept = flight * form.saved[sort, c, l, k] + form.working[sort, c, l, k]
    fits: bool = form.static[sort, l, k] + kept <= form.memory[group]
    return fits


@njit(cache=True)
def _link_full(form: AllocationTables, period: int, shared: int, group: int, k: int) -> bool:
    """Whether the special group cannot stand in front of ``group`` too, at layer k.

    ``shared`` are the ticks that it takes of their link standing behind; -1: it does not.
    """
    full: bool = shared >= 0 and shared + form.transfer[form.special, group, k] > period
    return full


@njit(cache=True)
def _hopeless(
    form: AllocationTables, need: Need, period: int, k: int, p: int, crossing: int, label: Label
) -> bool:
    """Whether layers [0, k) ask for more of the special group than the label leaves of it.

    They come behind ``crossing`` at least.
    """
    row = _row(need, period, _add(label.delay, crossing, period))
    if label.load + need.load[row, p, k] > period:
        return True
    if form.special < 0:
        return False
    memory = form.memory[form.special]
    used = label.load / period + label.held / memory
    hopeless: bool = (
        label.peak + need.held[row, p, k] > memory or used + need.both[row, p, k] > 2 + MARGIN
    )
    return hopeless


@njit(cache=True)
def _keep(
    form: AllocationTables,
    need: Need,
    period: int,
    labels: Labels,
    merging: bool,
    state: int,
    k: int,
    label: Label,
    source: tuple[int, int, int],
) -> None:
    """Add a label to a state of k layers left, unless another is as good; remove what is worse."""
    load = 0 if label.load + need.most[k] <= period else label.load
    delay = label.delay
    if (delay & REST) + need.delay[k] <= period:
        delay = (delay >> SHIFT) << SHIFT
    label = Label(delay, load, label.held, label.group, label.peak)
    if _covered(labels, state, label):
        return
    _remove_worse(labels, state, label)
    count, rows = labels.filled[state], labels.rows
    if count == rows.shape[1]:
        labels.work[1] += 1
        if merging:
            _merge(form, period, labels, state, label)
        return
    rows[state, count, DELAY] = label.delay
    rows[state, count, LOAD] = label.load
    rows[state, count, HELD] = label.held
    rows[state, count, GROUP] = label.group
    rows[state, count, PEAK] = label.peak
    rows[state, count, PARENT] = source[0] * rows.shape[1] + source[1]
    rows[state, count, CHOICE] = source[2]
    labels.filled[state] = count + 1


@njit(cache=True)
def _covered(labels: Labels, state: int, label: Label) -> bool:
    """Whether some label of the state is as good; the newest are the likeliest.

    Where its delay is of an earlier group, the peak of that group says nothing: a further stage of
    it counts a microbatch less than in the label's group, which is what it adds to the peak.
    """
    rows, count = labels.rows, labels.filled[state]
    for i in range(count - 1, -1, -1):
        if rows[state, i, DELAY] <= label.delay and rows[state, i, LOAD] <= label.load:
            less = rows[state, i, HELD] <= label.held and rows[state, i, PEAK] <= label.peak
            earlier = rows[state, i, DELAY] >> SHIFT < label.delay >> SHIFT
            if less and (earlier or rows[state, i, GROUP] <= label.group):
                labels.work[0] += count - i
                return True
    labels.work[0] += 2 * count + 1
    return False


@njit(cache=True)
def _remove_worse(labels: Labels, state: int, label: Label) -> None:
    """Remove the state's labels than which this one is as good, see ``_covered``."""
    rows, count = labels.rows, labels.filled[state]
    i = 0
    while i < count:
        if (
            label.delay <= rows[state, i, DELAY]
            and label.load <= rows[state, i, LOAD]
            and label.held <= rows[state, i, HELD]
            and label.peak <= rows[state, i, PEAK]
            and (
                label.group <= rows[state, i, GROUP]
                or label.delay >> SHIFT < rows[state, i, DELAY] >> SHIFT
            )
        ):
            count -= 1
            for j in range(FIELDS):
                rows[state, i, j] = rows[state, count, j]
        else:
            i += 1
    labels.filled[state] = count


@njit(cache=True)
def _merge(form: AllocationTables, period: int, labels: Labels, state: int, label: Label) -> None:
    """Lower the label that differs least, in periods and in memories, to the smaller figures."""
    rows, memory = labels.rows, form.memory[form.special]
    own = (label.delay >> SHIFT) * period + (label.delay & REST)
    least, nearest = np.inf, 0
    for i in range(labels.filled[state]):
        delay = rows[state, i, DELAY]
        delay = (delay >> SHIFT) * period + (delay & REST)
        seconds = abs(delay - own) + abs(rows[state, i, LOAD] - label.load)
        more = abs(rows[state, i, HELD] - label.held) + abs(rows[state, i, PEAK] - label.peak)
        if seconds / period + more / memory < least:
            least, nearest = seconds / period + more / memory, i
    rows[state, nearest, DELAY] = min(label.delay, rows[state, nearest, DELAY])
    rows[state, nearest, LOAD] = min(label.load, rows[state, nearest, LOAD])
    rows[state, nearest, HELD] = min(label.held, rows[state, nearest, HELD])
    rows[state, nearest, GROUP] = min(label.group, rows[state, nearest, GROUP])
    rows[state, nearest, PEAK] = min(label.peak, rows[state, nearest, PEAK])


@njit(cache=True)
def _needs(form: AllocationTables, period: int, rows: int) -> Need:
    """The tables of ``Need``, by the recurrence over the last stage of [0, l)."""
    layers, count = form.seconds.shape[-1] - 1, len(form.normal)
    shape = (rows, count + 1, layers + 1)
    load, held = np.full(shape, FAR), np.full(shape, FAR)
    both = np.full(shape, np.inf)
    most = np.zeros(layers + 1, dtype=np.int64)
    need = Need(load, held, both, most, most, _least_crossing(form))
    load[:, :, 0] = held[:, :, 0] = 0
    both[:, :, 0] = 0.0
    for l in range(1, layers + 1):
        for p in range(count + 1):
            for v in range(rows):
                if p > 0:
                    _need_of_normal(form, period, need, v, p, l)
                if form.special >= 0:
                    _need_of_special(form, period, need, v, p, l)
    if form.special >= 0:
        for l in range(layers):
            most[l + 1] = most[l] + form.seconds[form.sort[form.special], :, l + 1, l].max()
    return need


@njit(cache=True)
def _least_crossing(form: AllocationTables) -> Ints:
    """C(l) at its least between two groups, shape (L + 1,)."""
    least = np.zeros(form.seconds.shape[-1], dtype=np.int64)
    for l in range(1, len(least) - 1):
        least[l] = REST
        for a in range(len(form.sort)):
            for b in range(len(form.sort)):
                if a < b or (a != b and (a == form.special or b == form.special)):
                    least[l] = min(least[l], form.transfer[a, b, l])
        if least[l] == REST:
            least[l] = 0
    return least


@njit(cache=True)
def _row(need: Need, period: int, delay: int) -> int:
    """The row of the tables for a delay, rounded down."""
    part = min((delay & REST) * PARTS // max(period, 1), PARTS - 1)
    row: int = min(((delay >> SHIFT) - 1) * PARTS + part, need.load.shape[0] - 1)
    return row


@njit(cache=True)
def _delay(period: int, row: int) -> int:
    """The delay that a row stands for."""
    delay: int = ((row // PARTS + 1) << SHIFT) + -(-(row % PARTS) * period // PARTS)
    return delay


@njit(cache=True)
def _need_of_normal(
    form: AllocationTables, period: int, need: Need, v: int, p: int, l: int
) -> None:
    """With normal group p - 1 unused, or for any stage [k, l) on it."""
    load, held, both = need.load[v, p - 1, l], need.held[v, p - 1, l], need.both[v, p - 1, l]
    group = form.normal[p - 1]
    sort = form.sort[group]
    before = _delay(period, v)
    for c in range(form.seconds.shape[1]):
        for k in range(l - 1, -1, -1):
            if form.seconds[sort, c, l, k] > period:
                break
            delay = _add(before, form.seconds[sort, c, l, k], period)
            if _fits(form, group, c, k, l, delay >> SHIFT):
                row = _row(need, period, _add(delay, need.crossing[k], period))
                load = min(load, need.load[row, p - 1, k])
                held = min(held, need.held[row, p - 1, k])
                both = min(both, need.both[row, p - 1, k])
    need.load[v, p, l], need.held[v, p, l], need.both[v, p, l] = load, held, both


@njit(cache=True)
def _need_of_special(
    form: AllocationTables, period: int, need: Need, v: int, p: int, l: int
) -> None:
    """For any stage [k, l) on the special group."""
    load, held, both = need.load[v, p, l], need.held[v, p, l], need.both[v, p, l]
    sort, memory = form.sort[form.special], form.memory[form.special]
    before = _delay(period, v)
    for c in range(form.seconds.shape[1]):
        for k in range(l - 1, -1, -1):
            seconds = form.seconds[sort, c, l, k]
            if seconds > period:
                break
            delay = _add(before, seconds, period)
            row = _row(need, period, delay)
            bytes_ = form.static[sort, l, k] + ((delay >> SHIFT) - 1) * form.saved[sort, c, l, k]
            load = min(load, need.load[row, p, k] + seconds)
            held = min(held, need.held[row, p, k] + bytes_)
            both = min(both, need.both[row, p, k] + seconds / period + bytes_ / memory)
    need.load[v, p, l], need.held[v, p, l], need.both[v, p, l] = load, held, both


class Raster(NamedTuple):
    """The grid: values per dimension, and the step between two of them, in ticks and bytes.

    ``crossing`` is C(l) between any two stages, shape (L + 1,).
    """

    loads: int
    memories: int
    delays: int
    load: float
    memory: float
    delay: float
    crossing: Floats


def _require_printed(question: AllocationProblem) -> None:
    form = question.tables
    if question.special is None:
        raise InputError("by_grid: special must name a group; the grid is for its load and memory")
    if question.recompute != ("none",):
        raise InputError(f"by_grid: recompute must be ('none',), got {question.recompute}")
    apart = [
        form.transfer[a, b]
        for a, b in np.ndindex(len(form.sort), len(form.sort))
        if a < b or (a != b and form.special in (a, b))
    ]
    even = len(set(form.sort)) == len(set(form.memory)) == 1 and len(question.groups[0]) == 1
    if not even or any(not np.array_equal(one, apart[0]) for one in apart):
        raise InputError("by_grid: groups must be single equal devices with equal links")


def _raster(form: AllocationTables, grid: Grid) -> Raster:
    crossing = form.transfer.max(axis=(0, 1)).astype(np.float64)
    everything = float(form.seconds[0, 0, -1, 0])
    return Raster(
        grid.loads,
        grid.memories,
        grid.delays,
        max(1.0, everything) / (grid.loads - 1),
        float(form.memory[0]) / (grid.memories - 1),
        max(1.0, everything + float(crossing.sum())) / (grid.delays - 1),
        crossing,
    )


def _madpipe_dp(
    form: AllocationTables, raster: Raster, target: float, ceiling: float
) -> tuple[float, list[Placed]]:
    """T(L, P - 1, 0, 0, 0) and its allocation; infinite if it is above ``ceiling``."""
    layers, groups = form.seconds.shape[-1] - 1, len(form.normal)
    size = (groups + 1) * raster.loads * raster.memories * raster.delays
    reached = np.zeros((layers + 1, size), dtype=np.bool_)
    periods = np.empty((layers + 1, size))
    state = groups * raster.loads * raster.memories * raster.delays
    _grid_reach(form, raster, target, ceiling, state, reached)
    _grid_solve(form, raster, target, ceiling, reached, periods)
    period, l = float(periods[layers, state]), layers
    found: list[Placed] = []
    while l > 0 and period < math.inf:
        p = state // (raster.loads * raster.memories * raster.delays)
        _, k, special, following = _grid_best(form, raster, target, ceiling, periods, l, state)
        group = form.special if special else int(form.normal[p - 1])
        found.append(Placed(k, l, group, 0))
        l, state = k, following
    return period, found[::-1]


@njit(cache=True)
def _grid_reach(
    form: AllocationTables,
    raster: Raster,
    target: float,
    ceiling: float,
    start: int,
    reached: NDArray[np.bool_],
) -> None:
    """Mark the states that T(L, P - 1, 0, 0, 0) asks for."""
    layers = reached.shape[0] - 1
    reached[layers, start] = True
    for l in range(layers, 0, -1):
        states: Ints = np.flatnonzero(reached[l])
        for state in states:
            for k in range(l - 1, -1, -1):
                if form.seconds[0, 0, l, k] > ceiling:
                    break
                normal, special = _grid_stage(form, raster, target, ceiling, k, l, state)
                if normal >= 0:
                    reached[k, normal] = True
                if special >= 0:
                    reached[k, special] = True


@njit(cache=True)
def _grid_solve(
    form: AllocationTables,
    raster: Raster,
    target: float,
    ceiling: float,
    reached: NDArray[np.bool_],
    periods: Floats,
) -> None:
    """T of every state that is asked for, from few layers to many."""
    states: Ints = np.flatnonzero(reached[0])
    for state in states:
        periods[0, state] = _grid_load(raster, state)
    for l in range(1, reached.shape[0]):
        asked: Ints = np.flatnonzero(reached[l])
        for state in asked:
            best = _grid_best(form, raster, target, ceiling, periods, l, state)
            periods[l, state] = best[0]


@njit(cache=True)
def _grid_load(raster: Raster, state: int) -> float:
    """The special load t_P of a state."""
    load: float = state // (raster.memories * raster.delays) % raster.loads * raster.load
    return load


@njit(cache=True)
def _grid_best(
    form: AllocationTables,
    raster: Raster,
    target: float,
    ceiling: float,
    periods: Floats,
    l: int,
    state: int,
) -> tuple[float, int, bool, int]:
    """T of a state, the first layer k of its last stage, whether that is special, and what is left.

    The least of T_N(k) and T_S(k) over all k (MadPipe 4.2.2).
    """
    best, first, is_special, following = np.inf, 0, True, 0
    for k in range(l - 1, -1, -1):
        seconds = form.seconds[0, 0, l, k]
        if seconds > ceiling:
            break
        normal, special = _grid_stage(form, raster, target, ceiling, k, l, state)
        if normal >= 0:
            period = max(seconds, raster.crossing[k], periods[k, normal])
            if period < best:
                best, first, is_special, following = period, k, False, normal
        if special >= 0:
            load = _grid_load(raster, state) + seconds
            period = max(load, raster.crossing[k], periods[k, special])
            if period < best:
                best, first, is_special, following = period, k, True, special
    return best, first, is_special, following


@njit(cache=True)
def _grid_stage(
    form: AllocationTables,
    raster: Raster,
    target: float,
    ceiling: float,
    k: int,
    l: int,
    state: int,
) -> tuple[int, int]:
    """The states behind stage [k, l) on a normal group, and on the special one; -1: not feasible.

    Without a normal group left, the special one takes all layers (p = 0).
    """
    state, v = divmod(state, raster.delays)
    state, m = divmod(state, raster.memories)
    p, t = divmod(state, raster.loads)
    if raster.crossing[k] > ceiling or (p == 0 and k > 0):
        return -1, -1
    seconds, delay = form.seconds[0, 0, l, k], v * raster.delay
    flight = math.ceil((delay + seconds) / target - MARGIN)
    behind = _printed_add(_printed_add(delay, seconds, target), raster.crossing[k], target)
    v = min(_up(behind, raster.delay), raster.delays - 1)
    normal = special = -1
    static, saved = form.static[0, l, k], form.saved[0, 0, l, k]
    if p > 0 and static + flight * saved <= form.memory[0]:
        normal = ((p - 1) * raster.loads + t) * raster.memories + m
        normal = normal * raster.delays + v
    load = t * raster.load + seconds
    held = _up(m * raster.memory + static + (flight - 1) * saved, raster.memory)
    if load <= ceiling and held < raster.memories:
        t = min(_up(load, raster.load), raster.loads - 1)
        special = ((p * raster.loads + t) * raster.memories + held) * raster.delays + v
    return normal, special


@njit(cache=True)
def _printed_add(delay: float, seconds: float, target: float) -> float:
    """V (+) y as it is printed (MadPipe 4.2.2)."""
    groups = math.ceil(delay / target - MARGIN)
    if groups == math.ceil((delay + seconds) / target - MARGIN):
        return delay + seconds
    return target * groups + seconds


@njit(cache=True)
def _up(value: float, step: float) -> int:
    """The position of the first value of the grid that is no less."""
    return math.ceil(value / step - MARGIN)
