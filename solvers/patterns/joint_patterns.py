"""The exact joint optimum of periodic plans: allocations by a compiled walk, patterns best-first.

A walk goes through all allocations, from the last stage backwards, and leaves out those that a
trial length of the iteration refutes. The pause that the updates of an allocation need leaves its
microbatches a period each. What is feasible at some period is feasible at every longer one (scale
all starts), so a refuted length is a lower bound. Allocations come in windows of their bounds, and
the least bounds have their patterns solved first.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress, Status, silent
from stagewright.formulations.patterns.joint_patterns import JointForm, JointPatterns
from stagewright.formulations.patterns.one_f_one_b import load_bound as least_load
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem, PatternProblems
from stagewright.formulations.patterns.pattern_models import ByRate, OrderModel, least_pattern
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.patterns.pattern import SAFETY, best_pattern

Records = NDArray[np.void]

PRECISION = 2e-7  # relative; plans that are better by less are not looked for
BEGINNING = 0.6  # share of the time limit in which the first window is looked for, and
TRIAL = 0.1  # for one trial of that
STEP = 0.005  # relative width of the first window of bounds; every further one is
WIDER = 1.5  # times as wide
FIRST_SECONDS = 1.0  # the first time limit for a pattern; every further turn has
GROWTH = 4.0  # times the last one's
STEPS = 100_000  # of a walk at a time, some tenths of a second
BATCH = 1024  # allocations at a time
MARGIN = 1e-9  # relative; rounding may not refute a period that just suffices
CLOSE = 1e-9  # relative, of the bound of an allocation
DONE = (Status.OPTIMAL, Status.INFEASIBLE)


@dataclass(frozen=True, slots=True, eq=False)
class JointAnswer:
    """The best plan that was found, and a proved bound on the iteration of every plan, in seconds.

    ``stages`` and the rest are None if nothing was found in time, or nothing fits: then ``bound``
    is inf. ``complete`` says that the search ended by itself. ``allocations`` counts those whose
    bound had to be compared with the best plan, ``solves`` the calls for their patterns.
    """

    stages: tuple[Stage, ...] | None
    pattern: Pattern | None
    cost: float | None
    bound: float
    complete: bool
    allocations: int
    solves: int

    @property
    def period(self) -> float | None:
        """The pattern's period."""
        return None if self.pattern is None else self.pattern.period


def joint_optimum(
    question: JointPatterns,
    limits: Limits,
    on_progress: OnProgress = silent,
    incumbent: tuple[tuple[Stage, ...], Pattern] | None = None,
) -> JointAnswer:
    """The shortest iteration over all allocations and patterns.

    Every layer has one group; neighbouring layers of one group are one stage, whose forward is done
    in one piece and its backward too (MadPipe's stages); nothing is offloaded. For short chains: 10
    layers on 4 groups take seconds, 18 layers half a minute. ``incumbent`` is a plan that is known.

    Raises
    ------
    InvalidPlan
        If the incumbent breaks a rule.
    """
    search = _Search(question, limits, on_progress, incumbent)
    complete = search.run()
    stages, pattern = search.best or (None, None)
    cost = search.cost if search.best else None
    counts = (search.allocations, search.solves)
    return JointAnswer(stages, pattern, cost, search.bound(), complete, *counts)


class _Window(NamedTuple):
    """All allocations whose bounds lie between two lengths of the iteration."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """An allocation that waits for its pattern: start, group and mode of the stages, shape (N, 3).

    From the last stage on; -1 behind the first.
    """

    rows: Ints


class _Found(NamedTuple):
    """A pattern if there is one, a bound on its period, and whether there is nothing to add."""

    pattern: Pattern | None
    bound: float
    done: bool


class _Search:
    """Windows and candidates in a heap.

    First come those that have been left open least often (``turn``), then the least bounds.
    """

    def __init__(
        self,
        question: JointPatterns,
        limits: Limits,
        on_progress: OnProgress,
        incumbent: tuple[tuple[Stage, ...], Pattern] | None,
    ) -> None:
        self.question, self.limits, self.on_progress = question, limits, on_progress
        self.began = perf_counter()
        self.cost = math.inf
        self.best: tuple[tuple[Stage, ...], Pattern] | None = None
        self.allocations = self.solves = 0
        self._problems = PatternProblems(question.problem)
        self._heap: list[tuple[int, float, int, _Window | _Candidate]] = []
        self._number = count()
        self._closed = math.inf  # the least bound of all that was dismissed
        if incumbent is not None:
            self._offer(*incumbent)
        self._longest = longest_iteration(question.form)

    def run(self) -> bool:
        """Search until nothing is left (True) or the time is over."""
        self._begin()
        while self._heap:
            turn, bound, _, item = heapq.heappop(self._heap)
            if bound >= self._ceiling():
                self._close(bound)
            elif self._left() <= 0:
                self._push(bound, item, turn)
                return False
            elif isinstance(item, _Candidate):
                self._solve(item, bound, turn)
            else:
                self._open(item, bound)
        return True

    def bound(self) -> float:
        """No plan has a shorter iteration than this, up to that of the best."""
        waiting = min((entry[1] for entry in self._heap), default=math.inf)
        return min(self._closed, waiting, self.cost)

    def _begin(self) -> None:
        """Push the first window in which there is any allocation, by bisection.

        Where that takes too long at the longest iteration, or at one in between, shorter ones are
        tried, each for a share of the time: what is refuted is a bound all the same.
        """
        low, high = load_bound(self.question.form), min(self._longest, self._ceiling())
        in_time, known = self._first(high, TRIAL)
        if in_time and known is None:
            self._close(high if high < self._longest else math.inf)
            return
        slow = not in_time
        while high > low * (1 + STEP) and self._left() > (1 - BEGINNING) * self.limits.seconds:
            middle = math.sqrt(low * high)
            in_time, rows = self._first(middle, TRIAL)
            slow |= not in_time
            if in_time and rows is None:
                low = middle
            else:
                high, known = middle, known if rows is None else rows
        if known is not None and slow:
            # The first window will take long: this is something to begin with.
            self._push(low, _Candidate(known))
        self._push(low, _Window(0.0, high))

    def _first(self, length: float, share: float) -> tuple[bool, Ints | None]:
        """An allocation that ``length`` does not refute; False if there is no time to say.

        ``share`` is that of the whole time which may be used.
        """
        until = max(0.0, self._left() - share * self.limits.seconds)
        for _, rows in allocations(self.question.form, 0.0, length, 1):
            if rows is not None:
                return True, rows
            if self._left() <= until:
                return False, None
        return True, None

    def _open(self, window: _Window, least: float) -> None:
        """Push all allocations of the window, and the next window; or itself, where time is up."""
        low, high = window.low, min(window.high, self._ceiling())
        for bound, rows in allocations(self.question.form, low, high):
            if rows is not None:
                self.allocations += 1
                self._push(bound, _Candidate(rows))
            elif self._left() <= 0:
                self._push(least, window)
                return
        if high < self._longest:
            width = max(STEP * high, WIDER * (high - least))
            self._push(high, _Window(high, min(high + width, self._longest)))

    def _solve(self, candidate: _Candidate, bound: float, turn: int) -> None:
        """The candidate's pattern, or a proof that it is no better, for a limited time."""
        stages = stages_of(self.question, candidate.rows)
        problem = self._problems.of(stages)
        seconds = min(self._left(), FIRST_SECONDS * GROWTH**turn)
        limits = replace(self.limits, seconds=seconds)
        self.solves += 1
        low = max(least_load(problem), problem.period_of(bound))
        high = problem.period_of(self.cost)
        found = _Found(None, low, True) if low >= high else _below(problem, low, high, limits)
        if found is None:
            answer = best_pattern(problem, limits, lower_seconds=low)
            found = _Found(answer.pattern, answer.bound, answer.status in DONE)
        bound = max(bound, problem.iteration_seconds(found.bound))
        if found.pattern is not None and found.pattern.period < high:
            self._offer(stages, found.pattern, bound)
        if found.done:
            self._close(bound)
        else:
            self._push(bound, candidate, turn + 1)

    def _offer(self, stages: tuple[Stage, ...], pattern: Pattern, bound: float = 0.0) -> None:
        """Keep a plan as the best; ``bound`` is that of its allocation."""
        problem = self._problems.of(stages)
        self.cost = problem.iteration_seconds(problem.evaluate(pattern))
        self.best = stages, pattern
        elapsed = perf_counter() - self.began
        self.on_progress(Progress(elapsed, self.cost, min(bound, self.bound())))

    def _push(self, bound: float, item: _Window | _Candidate, turn: int = 0) -> None:
        if bound >= self._ceiling():
            self._close(bound)
        else:
            heapq.heappush(self._heap, (turn, bound, next(self._number), item))

    def _close(self, bound: float) -> None:
        self._closed = min(self._closed, bound)

    def _ceiling(self) -> float:
        return self.cost * (1 - PRECISION)

    def _left(self) -> float:
        return self.limits.left(perf_counter() - self.began)


def _below(problem: PatternProblem, low: float, high: float, limits: Limits) -> _Found | None:
    """The best pattern with a period between the two, ``high`` included, where there is one.

    None if this question says nothing: ``high`` is inf, or the pattern overstepped the memory
    within the solver's tolerance, or is none where all-reduces leave the pause alone.
    """
    if high == math.inf:
        return None
    model = OrderModel(problem)
    rate = ByRate(replace(model, relaxed=True), low, high, problem.room_bytes)
    answer = solve(rate.apply(), "highs", limits)
    if answer.status is Status.INFEASIBLE:
        return _Found(None, high * (1 - SAFETY), True)
    bound = rate.period(answer.bound) * (1 - SAFETY)
    if answer.values is None:
        return _Found(None, bound, False)
    orders = rate.invert(answer.values)
    if model.overfull(orders):
        return None
    pattern = least_pattern(model, orders, low)
    if pattern is None:
        return None  # the pause was of use to an all-reduce
    return _Found(pattern, bound, answer.status is Status.OPTIMAL)


def stages_of(question: JointPatterns, rows: Ints) -> tuple[Stage, ...]:
    """The stages of an allocation, in the order of the layers."""
    placed = [row.tolist() for row in rows if row[0] >= 0]
    stops = [len(question.problem.chain), *(start for start, *_ in placed)]
    found = [
        question.stage(start, stop, group, mode)
        for (start, group, mode), stop in zip(placed, stops, strict=False)
    ]
    return tuple(found[::-1])


def load_bound(form: JointForm) -> float:
    """All groups together do every layer once a period, and its update once an iteration."""
    whole = form.ahead[-1]
    return float(form.microbatches * whole["work"] + whole["update"]) / len(form.groups)


def longest_iteration(form: JointForm) -> float:
    """An iteration in which every allocation does one microbatch after the other."""
    layers = range(len(form.ahead) - 1)
    longest = {
        name: sum(_longest(form.stages[name][:, :, l, l + 1]) for l in layers)
        for name in ("work", "reduce", "update")
    }
    sends = form.links["there"] + form.links["back"]
    # The latency of an all-reduce is there once for each stage, at most one for each layer.
    period = longest["work"] + float(sends.max(axis=(0, 1)).sum()) + longest["reduce"]
    return form.microbatches * period + longest["update"]


def _longest(seconds: Floats) -> float:
    return float(seconds.max(initial=0.0, where=np.isfinite(seconds)))


def allocations(
    form: JointForm, low: float, high: float, batch: int = BATCH
) -> Iterator[tuple[float, Ints | None]]:
    """All allocations that ``low`` refutes and ``high`` does not, with the bound of each.

    Now and then None in place of one, so that time can be looked at.
    """
    layers = len(form.ahead) - 1
    path = np.zeros(layers, dtype=ROW)
    found, bounds = np.empty((batch, layers, 3), dtype=np.int64), np.empty(batch)
    row = 0
    while row >= 0:
        number, row = _walk(form, path, row, low, high, STEPS, found, bounds)
        yield from ((float(bounds[i]), found[i].copy()) for i in range(number))
        yield low, None


ROW = np.dtype([
    ("start", np.int64), ("group", np.int64), ("mode", np.int64), ("choice", np.int64),
    ("flight", np.int64), ("rest", np.float64), ("period", np.float64),
])  # fmt: skip
"""A stage of a path, which begins with the last stage, and where the walk stands.

``choice`` counts the children of the row before that were looked at. ``flight`` and ``rest`` are
what 1F1B* gives the stage at the trial ``period``: its group, and the seconds of the group from it
on.
"""


@njit(cache=True, error_model="numpy")
def _stage(form: JointForm, path: Records, row: int) -> Any:
    stop = path[row - 1]["start"] if row > 0 else len(form.ahead) - 1
    one = path[row]
    return form.stages[one["group"], one["mode"], one["start"], stop]


@njit(cache=True, error_model="numpy")
def _link(form: JointForm, path: Records, row: int) -> Any:
    """The transfer between this stage and the one behind it."""
    behind = path[row - 1]
    return form.links[path[row]["group"], behind["group"], behind["start"]]


@njit(cache=True, error_model="numpy")
def _period(form: JointForm, path: Records, last: int, length: float) -> float:
    """The period that an iteration of ``length`` leaves to the microbatches, at most.

    The pause has time for the updates of any group of the rows up to ``last``, and for those of all
    layers when all groups share them.
    """
    total = form.ahead[path[last]["start"]]["update"]
    pause = 0.0
    for r in range(last + 1):
        total += _stage(form, path, r)["update"]
        own = 0.0
        for q in range(r + 1):
            if path[q]["group"] == path[r]["group"]:
                own += _stage(form, path, q)["update"]
        pause = max(pause, own)
    period: float = (length - max(pause, total / len(form.groups))) / form.microbatches
    return period


@njit(cache=True, error_model="numpy")
def _passes(form: JointForm, path: Records, row: int, period: float, pause: float) -> bool:
    """Whether nothing refutes ``period``, given the rows up to ``row``, of which it is the last.

    Notes what 1F1B* gives this row, for which those of the rows before must be there. ``pause`` is
    at most what all-reduces may take of the pause.
    """
    if period <= 0.0:
        return False
    _join(form, path, row, period)
    if not _in_time(form, path, row, period, pause):
        return False
    here = path[row]["group"]
    memory = form.groups[here]["memory"] * (1 + MARGIN)
    if _bytes_on(form, path, row, here, period) > memory:
        return False
    return path[row]["start"] == 0 or _rest_passes(form, path, row, period)


@njit(cache=True, error_model="numpy")
def _join(form: JointForm, path: Records, row: int, period: float) -> None:
    """1F1B*: the transfer behind the stage, and the stage, join a group or begin the next one."""
    limit = period * (1 + MARGIN)
    flight, taken = 1, 0.0
    if row > 0:
        flight, taken = path[row - 1]["flight"], path[row - 1]["rest"]
        link = _link(form, path, row)
        seconds = link["there"] + link["back"]
        if taken + seconds > limit:
            flight, taken = flight + 1, 0.0
        taken += seconds
    work = _stage(form, path, row)["work"]
    if taken + work > limit:
        flight, taken = flight + 1, 0.0
    path[row]["flight"], path[row]["rest"] = flight, taken + work
    path[row]["period"] = period


@njit(cache=True, error_model="numpy")
def _rejoin(form: JointForm, path: Records, row: int, period: float) -> None:
    """1F1B* for the rows before ``row``, where they were joined at another period."""
    if row > 0 and path[row - 1]["period"] != period:
        for r in range(row):
            _join(form, path, r, period)


@njit(cache=True, error_model="numpy")
def _in_time(form: JointForm, path: Records, row: int, period: float, pause: float) -> bool:
    """The loads of the stage's group and link, the all-reduces, and two versions of the weights.

    The all-reduces of all earlier stages of a group go on between the backward of a stage and when
    its weights are needed, or in a pause.
    """
    limit = period * (1 + MARGIN)
    here, behind = path[row]["group"], path[max(row - 1, 0)]["group"]
    load = transfers = 0.0
    for r in range(row + 1):
        one, other = path[r]["group"], path[max(r - 1, 0)]["group"]
        if one == here:
            load += _stage(form, path, r)["work"]
        if r > 0 and min(one, other) == min(here, behind) and max(one, other) == max(here, behind):
            link = _link(form, path, r)
            transfers += link["there"] + link["back"]
    if load > limit or transfers > limit:
        return False
    reduced = 0.0
    for r in range(row, -1, -1):
        if path[r]["group"] == here:
            reduced += _stage(form, path, r)["reduce"]
            kept = (path[r]["flight"] - 1) * period + path[r]["rest"]
            if kept + max(0.0, reduced - pause) > (form.microbatches + 1) * limit:
                return False
    return reduced - pause <= form.microbatches * limit


@njit(cache=True, error_model="numpy")
def _bytes_on(form: JointForm, path: Records, row: int, here: int, period: float) -> float:
    """What group ``here`` needs at least, given the rows up to ``row``.

    A stage in the g-th group of 1F1B* never keeps less than g - 1 microbatches, and g at least
    during rest / T of the period. While it keeps g, so do all stages before it of group g, as a
    stage keeps no less than any behind it. Some pairs of different groups must overlap as well.
    """
    always = average = most = 0.0
    for r in range(row + 1):
        if path[r]["group"] != here:
            continue
        stage = _stage(form, path, r)
        backward = stage["work"] - stage["forward"]
        always += stage["static"] + (path[r]["flight"] - 1) * stage["saved"]
        average += (stage["saved"] * path[r]["rest"] + stage["working"] * backward) / period
        together = _saved_together(form, path, r, row)
        most = max(most, together + stage["working"])
        for q in range(r):
            if path[q]["group"] == here and _must_overlap(form, path, r, q, period):
                most = max(most, together + _saved_together(form, path, q, row))
    return always + max(average, most)


@njit(cache=True, error_model="numpy")
def _saved_together(form: JointForm, path: Records, first: int, row: int) -> float:
    """One microbatch of a stage, and of those before it on its device in its group of 1F1B*."""
    total = 0.0
    for r in range(first, row + 1):
        one, other = path[r], path[first]
        if one["group"] == other["group"] and one["flight"] == other["flight"]:
            total += _stage(form, path, r)["saved"]
    return total


@njit(cache=True, error_model="numpy")
def _must_overlap(form: JointForm, path: Records, r: int, q: int, period: float) -> bool:
    """Whether stage r and a stage q behind it, of a lower group, keep their most at one instant.

    If they keep no more than in 1F1B*, each keeps its most during its ``rest`` or more of every
    period; if one keeps more, that takes no less memory. For these times to be disjoint with groups
    g + 1 and g, the way from the forward of r to that of q must end before the period has no room
    for the time of q, and the way back likewise.
    """
    limit = period * (1 + MARGIN)
    if path[r]["flight"] == path[q]["flight"]:
        return False  # counted as one already
    if path[r]["rest"] + path[q]["rest"] > limit:
        return True
    if path[r]["flight"] > path[q]["flight"] + 1:
        return False
    forth = back = 0.0
    for i in range(q + 1, r + 1):
        stage, link = _stage(form, path, i), _link(form, path, i)
        forth += stage["forward"] + link["there"]
        back += stage["work"] - stage["forward"] + link["back"]
    return bool(max(forth, back) + path[q]["rest"] > limit)


@njit(cache=True, error_model="numpy")
def _rest_passes(form: JointForm, path: Records, row: int, period: float) -> bool:
    """Whether the layers in front can find time and memory, on average over all groups."""
    ahead = form.ahead[path[row]["start"]]
    idle = free = 0.0
    for one in form.groups:
        idle += period * (1 + MARGIN)
        free += one["memory"] * (1 + MARGIN)
    for r in range(row + 1):
        stage = _stage(form, path, r)
        kept = (path[r]["flight"] - 1) * period + path[r]["rest"]
        backward = stage["work"] - stage["forward"]
        idle -= stage["work"]
        free -= stage["static"]
        free -= (stage["saved"] * kept + stage["working"] * backward) / period
    delay = (path[row]["flight"] - 1) * period + path[row]["rest"]
    delay += form.sends[path[row]["group"], path[row]["start"]]
    kept = ahead["saved"] * delay + ahead["kept"]
    return bool(ahead["work"] <= idle and ahead["static"] + kept / period <= free)


@njit(cache=True, error_model="numpy")
def _choose(form: JointForm, path: Records, row: int) -> bool:
    """Take the next child at ``row``; False if there is none. Equal groups are used in order."""
    groups, modes = form.stages.shape[:2]
    stop = path[row - 1]["start"] if row > 0 else len(form.ahead) - 1
    while path[row]["choice"] < stop * groups * modes:
        choice = path[row]["choice"]
        group = choice // modes % groups
        path[row]["choice"] = choice + 1
        path[row]["start"] = stop - 1 - choice // (groups * modes)
        path[row]["group"], path[row]["mode"] = group, choice % modes
        if (row == 0 or group != path[row - 1]["group"]) and _is_next(form, path, row):
            return True
    return False


@njit(cache=True, error_model="numpy")
def _is_next(form: JointForm, path: Records, row: int) -> bool:
    """Whether all equal groups of lower number are used by the rows before."""
    group = path[row]["group"]
    for g in range(group):
        used = form.groups[g]["like"] != form.groups[group]["like"]
        for r in range(row):
            used = used or path[r]["group"] == g
        if not used:
            return False
    return True


@njit(cache=True, error_model="numpy")
def _walk(
    form: JointForm, path: Records, row: int, low: float, high: float, steps: int,
    found: Ints, bounds: Floats,
) -> tuple[int, int]:  # fmt: skip
    """Go on at ``row`` for some steps; how many were found, and the row to go on at, or -1.

    Found are the allocations that ``high`` does not refute and ``low`` does: start, group and mode
    of every row in ``found`` (-1 behind the last), and the largest refuted length in ``bounds``.
    """
    number = 0
    for _ in range(steps):
        if row < 0 or number == len(found):
            break
        if not _choose(form, path, row):
            row -= 1
            continue
        period = _period(form, path, row, high)
        _rejoin(form, path, row, period)
        # What comes in front may make the pause longer.
        if _passes(form, path, row, period, high if form.updated else 0.0):
            if path[row]["start"] > 0:
                row += 1
                path[row]["choice"] = 0
            else:
                bounds[number] = _refuted(form, path, row, low, high)
                if bounds[number] >= low:
                    for r in range(len(path)):
                        one, there = path[r], r <= row
                        found[number, r, 0] = one["start"] if there else -1
                        found[number, r, 1] = one["group"] if there else -1
                        found[number, r, 2] = one["mode"] if there else -1
                    number += 1
    return number, row


@njit(cache=True, error_model="numpy")
def _refuted(form: JointForm, path: Records, last: int, low: float, high: float) -> float:
    """The largest refuted length from ``low`` to ``high``; -1 if ``low`` is not refuted."""
    found, above, trial = -1.0, high, low
    while above - found > CLOSE * above:
        passes, period = True, _period(form, path, last, trial)
        for row in range(last + 1):
            pause = trial - form.microbatches * period if form.updated else 0.0
            passes = passes and _passes(form, path, row, period, pause)
        if passes:
            above = trial
        else:
            found = trial
        if found < 0.0:
            break
        trial = (found + above) / 2
    period = _period(form, path, last, high)
    for row in range(last + 1):
        _join(form, path, row, period)
    return found
