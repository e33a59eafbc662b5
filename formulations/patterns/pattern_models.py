"""The periodic scheduling problem as integer programs, and the exact times for given orders.

Notation: job i starts at tau_i for microbatch 0 and takes d_i; T is the period. For two jobs i < j
(in the order of ``PatternProblem.jobs``) on one device or link, the *order* k_ij counts the whole
periods between their starts, k_ij = floor((tau_j - tau_i) / T), and they exclude each other exactly
if d_i <= tau_j - tau_i - k_ij T <= T - d_j. Everything that is kept in memory depends on the orders
alone, and linearly: just after the start of job i its device keeps of stage s as many microbatches
as k(F_s, i) - k(B_s, i), where k_ji = -1 - k_ij and k_ii = 0, and one more if i is B_s itself.

Divided by T, the model is linear in tau / T, the rate 1 / T and the orders (:class:`ByRate`, after
MadPipe 4.3, with exact orders in place of big M). At a given T it is a pure integer program
(:class:`AtPeriod`). For given orders the least T is a maximum cycle ratio (:func:`least_pattern`).
Scaling all starts with T shows that what is feasible at T is feasible at every larger period.

All-reduces that share a device take turns as well, once per iteration of m periods: behind the jobs
they have starts sigma of their own, and their orders count whole iterations. With a pause they may
go on in it, which the integer programs forgive (``relaxed``): what they prove holds for all plans;
the exact times that are computed for their orders leave the pause alone.

Jobs that last no time are taken one after another too, in the order of a microbatch's way.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.patterns.one_f_one_b import groups
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.plans.actions import ActionKind, Operation
from stagewright.graphs.documents.arrays import Floats, Ints

F, B = ActionKind.FORWARD, ActionKind.BACKWARD

MARGIN = 1e-12  # relative: rounding of sums of times
BYTE_UNITS = 2**36  # in which a device's room is measured in integers
SCALE = 2.0**10  # of rows and costs: MILP solvers allow absolute errors of 1e-6 in them

PATTERN = "integer program of the pattern"


class Affine(NamedTuple):
    """``constant + sum(factor * k[pair])``: whole periods, in terms of the orders."""

    constant: int
    terms: tuple[tuple[int, int], ...] = ()  # (pair, factor)

    def at(self, orders: Ints) -> int:
        """The value for given orders."""
        return self.constant + sum(factor * int(orders[pair]) for pair, factor in self.terms)


class Difference(NamedTuple):
    """tau_after >= tau_before + seconds + periods * T."""

    before: int
    after: int
    seconds: float
    periods: Affine


class Instant(NamedTuple):
    """Just after the start of a job: how many microbatches each of the device's stages keeps."""

    device: int
    stages: tuple[int, ...]
    kept: tuple[Affine, ...]
    at_work: int | None  # the stage whose backward starts


@dataclass(frozen=True)
class OrderModel:
    """The problem in terms of orders: what every formulation and the exact times share.

    ``relaxed``: all-reduces may go on in pauses, and the updates may wait for the stage's forward.
    """

    problem: PatternProblem
    relaxed: bool = False

    @cached_property
    def summed(self) -> tuple[int, ...]:
        """The stages whose all-reduces take turns with others; they are numbered after the jobs."""
        return tuple(s for stages in self.problem.reducing if len(stages) > 1 for s in stages)

    @property
    def columns(self) -> int:
        """How many starts there are: of jobs, then of all-reduces."""
        return len(self.problem.jobs) + len(self.summed)

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """All i < j that share a device or link; orders have shape (pairs,).

        Jobs first, sorted, then all-reduces.
        """
        found = (pair for members in self.problem.shared for pair in combinations(members, 2))
        place = {s: len(self.problem.jobs) + i for i, s in enumerate(self.summed)}
        turns = (
            (place[s], place[r])
            for stages in self.problem.reducing
            for s, r in combinations(stages, 2)
        )
        return (*sorted(found), *turns)

    @cached_property
    def number(self) -> Mapping[tuple[int, int], int]:
        """Where a pair stands in ``pairs``."""
        return {pair: p for p, pair in enumerate(self.pairs)}

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Dependencies, exclusions, and two versions of the weights."""
        problem, jobs = self.problem, self.problem.jobs
        found = [Difference(i, i + 1, jobs[i].seconds, Affine(0)) for i in range(len(jobs) - 1)]
        for p, (i, j) in enumerate(self.pairs):
            # All-reduces come again after an iteration.
            every = 1 if i < len(jobs) else problem.microbatches
            found.append(Difference(i, j, self._seconds(i), Affine(0, ((p, every),))))
            found.append(Difference(j, i, self._seconds(j), Affine(-every, ((p, -every),))))
        limit = Affine(-problem.microbatches - 1)
        for s, reduce in enumerate(problem.reduce):
            forward, backward = self._ends_of(s)
            if problem.pause_seconds > 0 and not self.relaxed:
                forward = 0
            if s in self.summed:
                turn = len(jobs) + self.summed.index(s)
                found.append(Difference(backward, turn, jobs[backward].seconds, Affine(0)))
                found.append(Difference(turn, forward, self._seconds(turn), limit))
            else:
                took = jobs[backward].seconds + self._left(reduce)
                found.append(Difference(backward, forward, took, limit))
        return tuple(found)

    def _seconds(self, column: int) -> float:
        """What a job or an all-reduce takes."""
        jobs = self.problem.jobs
        if column < len(jobs):
            return jobs[column].seconds
        return self._left(self.problem.reduce[self.summed[column - len(jobs)]])

    def _left(self, reduce: float) -> float:
        """What of an all-reduce is outside of pauses, at least."""
        return max(0.0, reduce - self.problem.pause_seconds) if self.relaxed else reduce

    @cached_property
    def instants(self) -> tuple[Instant, ...]:
        """The instants at which a device may keep the most: starts of forwards, or of work."""
        found = []
        for device in range(len(self.problem.room_bytes)):
            stages = tuple(self.problem.stages_on(device))
            for s in stages:
                forward, backward = self._ends_of(s)
                kept = tuple(self._kept(r, forward) for r in stages)
                found.append(Instant(device, stages, kept, None))
                if self.problem.kept[s].working_bytes > 0:
                    kept = tuple(self._kept(r, backward) for r in stages)
                    found.append(Instant(device, stages, kept, s))
        return tuple(found)

    @cached_property
    def most(self) -> Ints:
        """Upper bounds on the orders from memory and versions, shape (pairs,).

        Jobs between the forward and the backward of a stage are no further apart than these two.
        """
        limits = []
        for s in range(len(self.problem.forward)):
            forward, backward = self._ends_of(s)
            limits.append((forward, backward, self._most_in_flight(s) - 1))
        return np.array(
            [
                min(limit for first, last, limit in limits if first <= i and j <= last)
                if j < len(self.problem.jobs)
                else 1  # all-reduces of an iteration are less than m + 1 periods apart
                for i, j in self.pairs
            ],
            dtype=np.int64,
        )

    def overfull(self, orders: Ints) -> list[int]:
        """The devices whose memory does not suffice, in the arithmetic of ``evaluate``."""
        devices = {
            instant.device
            for instant in self.instants
            if self._bytes(
                instant.stages, [kept.at(orders) for kept in instant.kept], instant.at_work
            )
            > self.problem.room_bytes[instant.device]
        }
        return sorted(devices)

    def orders_of(self, pattern: Pattern) -> Ints:
        """The orders of a valid pattern, shape (pairs,)."""
        starts, m = self.starts_of(pattern), self.problem.microbatches
        # From the middle of what is allowed: no rounding counts a period too many or too few.
        return np.array(
            [
                round((starts[j] - starts[i] + (self._seconds(j) - self._seconds(i)) / 2)
                      / (pattern.period * (1 if i < len(self.problem.jobs) else m)) - 0.5)
                for i, j in self.pairs
            ],
            dtype=np.int64,
        )  # fmt: skip

    def starts_of(self, pattern: Pattern) -> tuple[float, ...]:
        """Starts of the jobs, and of the all-reduces that take turns, shape (columns,)."""
        reduces = self.problem.reduce_starts(pattern)
        return (*pattern.starts, *(reduces[s] for s in self.summed))

    def pattern(self, period: float, starts: Sequence[float]) -> Pattern:
        """The pattern with these starts, shape (columns,)."""
        jobs = len(self.problem.jobs)
        if not self.summed:
            return Pattern(period, tuple(starts))
        reduces = list(self.problem.reduce_starts(Pattern(period, tuple(starts[:jobs]))))
        for s, start in zip(self.summed, starts[jobs:], strict=True):
            reduces[s] = start
        return Pattern(period, tuple(starts[:jobs]), tuple(reduces))

    def least_at(self, period: float) -> Ints:
        """Lower bounds on the orders of every pattern of ``period`` or less, shape (pairs,).

        Between two starts lies all that a microbatch passes, and, around a stage, what 1F1B*
        keeps at least (MadPipe, Proposition 1).
        """
        passed = np.concatenate([[0.0], np.cumsum([job.seconds for job in self.problem.jobs])])
        least = np.array(
            [
                max(0, math.ceil((passed[j + 1] - passed[i]) / period - MARGIN * len(passed)) - 1)
                if j < len(self.problem.jobs)
                else -2
                for i, j in self.pairs
            ],
            dtype=np.int64,
        )
        for s, group in enumerate(groups(self.problem, period * (1 + MARGIN))):
            pair = self.number[self._ends_of(s)]
            least[pair] = max(least[pair], group - 1)
        return least

    def _ends_of(self, stage: int) -> tuple[int, int]:
        position = self.problem.position
        return position[Operation(stage, F)], position[Operation(stage, B)]

    def _order(self, i: int, j: int) -> Affine:
        """k_ij for any two jobs of a device."""
        if i == j:
            return Affine(0)
        if i < j:
            return Affine(0, ((self.number[i, j], 1),))
        return Affine(-1, ((self.number[j, i], -1),))

    def _kept(self, stage: int, job: int) -> Affine:
        """Microbatches that ``stage`` keeps just after the start of ``job``."""
        forward, backward = self._ends_of(stage)
        begun, ended = self._order(forward, job), self._order(backward, job)
        constant = begun.constant - ended.constant + (job == backward)
        return Affine(constant, (*begun.terms, *((pair, -sign) for pair, sign in ended.terms)))

    def _bytes(self, stages: tuple[int, ...], kept: Sequence[int], at_work: int | None) -> float:
        total = 0.0
        for s, count in zip(stages, kept, strict=True):
            one = self.problem.kept[s]
            total += count * one.saved_bytes + (s == at_work) * one.working_bytes
        return total

    def _most_in_flight(self, stage: int) -> int:
        """How many microbatches ``stage`` may keep when the others of its device keep the least.

        At the start of its backward, earlier stages keep this microbatch, later ones may be empty.
        """
        device = self.problem.devices[stage]
        stages, room = tuple(self.problem.stages_on(device)), self.problem.room_bytes[device]
        saved = self.problem.kept[stage].saved_bytes
        most = self.problem.microbatches + 1
        if saved > 0:
            most = min(most, int(max(room, 0.0) / saved) + 1)
        while most > 1:
            kept = [most if s == stage else int(s < stage) for s in stages]
            if self._bytes(stages, kept, stage) <= room:
                break
            most -= 1
        return most


def sequential(problem: PatternProblem) -> Pattern:
    """One microbatch after the other: no pattern keeps less, at any period.

    When a stage's backward starts, every stage before it on its device keeps that microbatch too;
    here they keep no other.
    """
    starts = np.concatenate([[0.0], np.cumsum([job.seconds for job in problem.jobs])])
    period = max(float(starts[-1]), period_floor(problem))
    return Pattern(period, tuple(starts[:-1].tolist()))


def period_floor(problem: PatternProblem) -> float:
    """What all-reduces and offloading ask of the period, whatever the orders."""
    reduced = (sum(problem.reduce[s] for s in stages) for stages in problem.reducing)
    return max(problem.least_seconds, max(reduced) / problem.microbatches)


def least_pattern(model: OrderModel, orders: Ints, least: float = 0.0) -> Pattern | None:
    """The least period for ``orders``, ``least`` or more, with the earliest starts.

    The period is the largest ratio of seconds to periods over all cycles of differences. From a
    period that is too short, the ratio of any cycle that it breaks is the next one to try
    (Lawler; Dasdan 2004): it is never too long, and there are finitely many.

    None if the orders contradict each other at every period.
    """
    differences = model.differences
    before = np.array([one.before for one in differences])
    after = np.array([one.after for one in differences])
    seconds = np.array([one.seconds for one in differences])
    turns = -np.array([one.periods.at(orders) for one in differences], dtype=float)
    slack = MARGIN * sum(job.seconds for job in model.problem.jobs)
    period = max(least, period_floor(model.problem))
    while True:
        starts, cycle = _longest(before, after, seconds - turns * period, slack)
        if not cycle:
            return model.pattern(period, starts.tolist())
        if turns[cycle].sum() <= 0:
            return None
        period = float(seconds[cycle].sum() / turns[cycle].sum())


def _longest(before: Ints, after: Ints, weights: Floats, slack: float) -> tuple[Floats, list[int]]:
    """Longest ways from job 0 (Bellman-Ford), or the arcs of a cycle that is longer than 0."""
    jobs = int(after.max(initial=0)) + 1
    starts, parent = np.full(jobs, -np.inf), np.full(jobs, -1)
    starts[0] = 0.0
    while True:
        reached = starts[before] + weights
        order = np.argsort(reached, kind="stable")
        last = np.full(jobs, -1)
        last[after[order]] = order  # the longest is written last
        longer = (last >= 0) & (reached[last] > starts + slack)
        if not longer.any():
            return starts, []
        starts[longer], parent[longer] = reached[last[longer]], last[longer]
        cycle = _cycle(before.tolist(), parent.tolist())
        if cycle:
            return starts, cycle


def _cycle(before: list[int], parent: list[int]) -> list[int]:
    """The arcs of a cycle of parents, if there is one."""
    done: set[int] = set()
    for root in range(len(parent)):
        job, place = root, dict[int, int]()
        way: list[int] = []
        while parent[job] >= 0 and job not in done:
            if job in place:
                return way[place[job] :]
            place[job] = len(way)
            way.append(parent[job])
            job = before[parent[job]]
        done.update(place)
    return []


@dataclass(frozen=True)
class AtPeriod:
    """Whether there is a pattern of ``period``: a pure integer program without costs.

    All seconds of the problem and the period must be integers, as :func:`in_ticks` makes them.
    Columns are the starts, then the orders. Bytes are rounded down to a share of ``rooms``.
    """

    model: OrderModel
    period: int
    rooms: tuple[float, ...]

    def apply(self) -> LinearProgram:
        """The form; all of it is integers."""
        model, period = self.model, self.period
        jobs = model.columns
        rows = _Rows()
        for one in model.differences:
            terms = [(one.after, 1.0), (one.before, -1.0)]
            terms += [(jobs + pair, -float(sign * period)) for pair, sign in one.periods.terms]
            rows.add(terms, one.seconds + one.periods.constant * period, math.inf)
        _add_memory(rows, model, self.rooms)
        _add_triples(rows, model)
        _add_nested(rows, model, period)
        least, most = order_bounds(model, period, period)
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
    """The problem in whole ticks of ``unit`` seconds, everything rounded down.

    If the problem has a pattern of period T, this one has a pattern of ceil(T / unit) ticks with
    whole starts: for the same orders, a cycle of differences asks for no more than before, and
    differences of whole lengths have whole solutions. What is infeasible here proves that the
    problem's period is longer. A pattern of this one may be too short by the rounding.
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
    """The largest rate at which microbatches can follow each other: a mixed-integer program.

    Columns are the starts in periods, the orders, and ``shortest`` / T at most 1. ``shortest`` and
    ``longest`` are periods between which the optimum is known to lie.
    """

    model: OrderModel
    shortest: float
    longest: float
    rooms: tuple[float, ...]

    def apply(self) -> LinearProgram:
        """The form; it minimises the negative rate, times ``SCALE``."""
        model = self.model
        jobs, rate = model.columns, model.columns + len(model.pairs)
        rows = _Rows(SCALE)
        for one in model.differences:
            terms = [(one.after, 1.0), (one.before, -1.0), (rate, -one.seconds / self.shortest)]
            terms += [(jobs + pair, -float(sign)) for pair, sign in one.periods.terms]
            rows.add(terms, one.periods.constant, math.inf)
        _add_memory(rows, model, self.rooms, BYTE_UNITS)
        _add_triples(rows, model)
        least, most = order_bounds(model, self.shortest, self.longest)
        latest = np.array(latest_starts(model, self.shortest)) / self.shortest
        return rows.form(
            cost=np.r_[np.zeros(rate), -SCALE],
            lower=np.r_[np.zeros(jobs), least, self.shortest / self.longest],
            upper=np.r_[latest, most, 1.0],
            integral=np.r_[np.zeros(jobs), np.ones(len(least)), 0.0].astype(bool),
        )

    def period(self, objective: float) -> float:
        """The period that a value of the objective, or a bound on it, stands for."""
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
    """How late each job need start in a pattern of ``period``.

    No job waits a period or more for its turn: else it and all jobs after it could come a period
    earlier, which changes but the indices of microbatches, and keeps no more of them. Where
    all-reduces take turns, that would change their turns: then all are done within the m + 1
    periods that weights allow, and all-reduces before the weights of a last forward are needed.
    """
    if model.summed:
        jobs, most = len(model.problem.jobs), (model.problem.microbatches + 1) * period
        return [most] * jobs + [2 * most] * (model.columns - jobs)
    passed = np.concatenate([[0.0], np.cumsum([job.seconds for job in model.problem.jobs[:-1]])])
    return [float(seconds + i * period) for i, seconds in enumerate(passed)]


def order_bounds(model: OrderModel, shortest: float, longest: float) -> tuple[Ints, Ints]:
    """Bounds on the orders of patterns, as in `latest_starts`, with a period between the two."""
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


class _Rows:
    """Rows of a linear program, one after the other, all multiplied by ``scale``."""

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
        # Entries at one place are added up.
        matrix = sparse.coo_array((self._scale * value, (row, column)), shape=shape).tocsr()
        least, most = self._scale * np.array(self._lower), self._scale * np.array(self._upper)
        return LinearProgram(cost, matrix, least, most, lower, upper, integral)


def _add_memory(rows: _Rows, model: OrderModel, rooms: tuple[float, ...], units: int = 1) -> None:
    """What the stages of a device keep fits at every instant.

    Bytes count in shares of the room, ``BYTE_UNITS`` of which are 1 / ``units``, rounded down.
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
        rows.add(terms, -math.inf, (BYTE_UNITS - total) / units)


def _share(size: float, room: float) -> int:
    return math.floor(size / room * BYTE_UNITS) if size > 0 else 0


def _add_triples(rows: _Rows, model: OrderModel) -> None:
    """Orders of three jobs agree: k_ab + k_bc <= k_ac <= k_ab + k_bc + 1."""
    jobs = model.columns
    for members in model.problem.shared:
        for a, b, c in combinations(members, 3):
            ab, bc, ac = (jobs + model.number[pair] for pair in ((a, b), (b, c), (a, c)))
            rows.add([(ac, 1.0), (ab, -1.0), (bc, -1.0)], 0.0, 1.0)


def _add_nested(rows: _Rows, model: OrderModel, period: float) -> None:
    """A stage or transfer has more in flight than those behind it, as in 1F1B*.

    Between the starts of job i and of its way back lie those of j and of its way back; all that a
    microbatch passes besides, U, takes its time: k_i >= k_j + ceil(U / T) - 1.
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
