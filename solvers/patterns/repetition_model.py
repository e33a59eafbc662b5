"""CP-SAT's model of a repetition of one length and period, and the exact times of its orders.

Times are integer ticks. If the problem has a repetition of period T, the one with all times rounded
down to ticks has one of ceil(T) ticks: for the same orders no cycle of differences becomes longer,
and integer differences have integer solutions. So infeasibility is a proof for the problem itself.
With times rounded up, what is found has at most the period of the model.

Block i of microbatch q starts at x + P h: a *phase* x in [0, P) and a number h of *turns*. Two
blocks i, j of a resource do not overlap if and only if

    x_i + d_i <= x_j and x_j + d_j <= x_i + P, or the same with i and j exchanged.

Which of the two holds is their *order*. Just after the start of block j, a room has begun block f
[f before j or f = j] - h_f - 1 times since the start of the period, and ended block l
[l before j] - h_l - 1 times. (A block that runs into the next period is no exception: no other of
its resource starts in the meantime.)

Normal form. Take a block j and its successors, and let each of them process the next microbatch at
its times. If start_j - end_i >= P for all arcs (i, j) that enter the set from outside, this keeps
``before``. The rooms hold the same or less, since the set of a holding's first block contains its
last block. The total slack of the arcs decreases by whole microbatches, so this ends. Hence some
repetition of least period has start_j - end_i < P for every arc that alone enters the set of j. The
same argument for any set of blocks that contains its successors bounds all starts by the sum of the
times and n - 1 periods after the first start of a microbatch.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np
from ortools.sat.python import cp_model

from stagewright.formulations.patterns.least_pattern import least_period_of
from stagewright.formulations.patterns.repetition import Repetition, RepetitionProblem, Room
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Ints

UNITS = 2**20  # of a capacity, unless its amounts are multiples of a larger unit
MARGIN = 1e-12  # relative: rounding of quotients
SCALES = 1000

Copy = tuple[int, int]  # microbatch of the period, block


@dataclass(frozen=True)
class AtPeriod:
    """A repetition of ``length`` microbatches in ``period`` ticks of ``unit`` seconds.

    ``cautious``: times and amounts are rounded up, so that what is found fits and has at most this
    period. Otherwise they are rounded down, so that infeasibility is a proof.
    """

    problem: RepetitionProblem
    length: int
    period: int
    unit: float
    cautious: bool = False

    @cached_property
    def ticks(self) -> tuple[int, ...]:
        """Time of each block in ticks."""
        quotients = (one / self.unit for one in self.problem.seconds)
        if self.cautious:
            return tuple(math.ceil(one * (1 - MARGIN)) for one in quotients)
        return tuple(math.floor(one * (1 + MARGIN)) for one in quotients)

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """All blocks of a period; the rows of an answer."""
        blocks = range(len(self.ticks))
        return tuple((q, i) for q in range(self.length) for i in blocks)

    def apply(
        self, shortest: Repetition | None = None
    ) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
        """The model, and its starts in the order of ``copies``.

        ``shortest``: minimise the time from the first start to the last end of the k microbatches;
        this repetition is a hint.
        """
        model = cp_model.CpModel()
        latest = sum(self.ticks) + (len(self.ticks) + 1) * self.period
        starts = {copy: model.new_int_var(0, latest, "start") for copy in self.copies}
        build = _Build(self, model, starts)
        build.add_precedences()
        build.add_sequence()
        build.add_exclusions()
        build.add_rooms()
        if shortest is not None:
            end = model.new_int_var(0, latest + max(self.ticks), "end")
            for (_, i), start in starts.items():
                model.add(end >= start + self.ticks[i])
            model.minimize(end)
            build.hint(shortest)
        return model, [starts[copy] for copy in self.copies]

    def invert(self, values: Ints) -> Repetition | None:
        """The repetition of least period with the orders in ``values``; None if there is none."""
        starts = dict(zip(self.copies, values.tolist(), strict=True))
        return least_repetition(self, starts)

    def amounts(self, room: Room) -> tuple[tuple[int, ...], int]:
        """The amounts of a room and its capacity, in whole units."""
        values = [one.amount for one in room.holdings]
        scale = common_scale(values)
        if scale is not None and room.capacity * scale <= UNITS:
            capacity = math.floor(room.capacity * scale * (1 + RELATIVE_TOLERANCE))
            return tuple(round(value * scale) for value in values), capacity
        unit = room.capacity / UNITS
        if self.cautious:
            return tuple(math.ceil(value / unit * (1 - MARGIN)) for value in values), UNITS
        unit *= 1 + RELATIVE_TOLERANCE  # what the problem tolerates must be possible here too
        return tuple(math.floor(value / unit) for value in values), UNITS


class _Build:
    """The model under construction: one method per family of constraints."""

    def __init__(
        self, form: AtPeriod, model: cp_model.CpModel, starts: dict[Copy, cp_model.IntVar]
    ) -> None:
        self.form, self.model, self.starts = form, model, starts
        self.problem, self.ticks, self.period = form.problem, form.ticks, form.period
        most = sum(self.ticks) // self.period + len(self.ticks) + 1
        self.phases, self.turns = {}, {}
        for copy, start in starts.items():
            self.phases[copy] = model.new_int_var(0, self.period - 1, "phase")
            self.turns[copy] = model.new_int_var(0, most, "turn")
            model.add(start == self.phases[copy] + self.period * self.turns[copy])
        self.earlier: dict[tuple[Copy, Copy], cp_model.LinearExpr] = {}  # 1 or 0

    def add_precedences(self) -> None:
        """The order within a microbatch, in normal form."""
        entering = _entering(self.problem)
        for q, starts in self._microbatches():
            for i, j in self.problem.before:
                self.model.add(starts[j] >= starts[i] + self.ticks[i])
                self.model.add(self.turns[q, j] >= self.turns[q, i])
                if entering[j] == 1:
                    self.model.add(starts[j] < starts[i] + self.ticks[i] + self.period)

    def add_sequence(self) -> None:
        """Every block processes the microbatches in order; a first one starts with the period."""
        for i, seconds in enumerate(self.ticks):
            row = [self.starts[q, i] for q in range(self.form.length)]
            least = seconds if self.problem.resources[i] else 0
            for one, following in pairwise((*row, row[0] + self.period)):
                if len(row) > 1:
                    self.model.add(one + least <= following)
        self.model.add(self.phases[0, 0] == 0)
        followers = {j for _, j in self.problem.before}
        for part in self.problem.parts:  # each of which may be shifted by whole periods
            sources = [i for i in part if i not in followers]
            if len(sources) == 1:
                self.model.add(self.turns[0, sources[0]] == 0)

    def add_exclusions(self) -> None:
        """A resource processes one block at a time."""
        done: set[tuple[Copy, Copy]] = set()
        for members in self.problem.shared.values():
            copies = [(q, i) for q in range(self.form.length) for i in members]
            for one, other in combinations(copies, 2):
                if (one, other) not in done:
                    done.add((one, other))
                    self._exclude(one, other)
            intervals = []
            for copy in copies:
                for shift in (0, self.period):
                    start = self.phases[copy] + shift
                    seconds = self.ticks[copy[1]]
                    intervals.append(self.model.new_fixed_size_interval_var(start, seconds, ""))
            self.model.add_no_overlap(intervals)

    def _exclude(self, one: Copy, other: Copy) -> None:
        first = self.model.new_bool_var("order")
        self.earlier[one, other], self.earlier[other, one] = first, 1 - first
        for copy, following, order in ((one, other, first), (other, one, first.negated())):
            start, then = self.phases[copy], self.phases[following]
            self.model.add(start + self.ticks[copy[1]] <= then).only_enforce_if(order)
            end = then + self.ticks[following[1]]
            self.model.add(end <= start + self.period).only_enforce_if(order)

    def add_rooms(self) -> None:
        """What each room holds just after the start of a holding, and on average."""
        for room in self.problem.rooms:
            if math.isinf(room.capacity):
                continue
            amounts, capacity = self.form.amounts(room)
            for copy in {(q, one.first) for q in range(self.form.length) for one in room.holdings}:
                self.model.add(self._held(room, amounts, copy) <= capacity)
            self._add_averages(room, amounts, capacity)

    def _held(self, room: Room, amounts: tuple[int, ...], instant: Copy) -> cp_model.LinearExprT:
        terms = []
        for one, amount in zip(room.holdings, amounts, strict=True):
            for q in range(self.form.length):
                first, last = (q, one.first), (q, one.last)
                begun = 1 if first == instant else self.earlier[first, instant]
                ended = 0 if last == instant else self.earlier[last, instant]
                terms.append(amount * (self.turns[last] - self.turns[first] + begun - ended))
        return cp_model.LinearExpr.sum(terms)

    def _add_averages(self, room: Room, amounts: tuple[int, ...], capacity: int) -> None:
        """Redundant: amounts times the time they are held; g of one amount at a time."""
        total = []
        for one, amount in zip(room.holdings, amounts, strict=True):
            seconds = self.ticks[one.last]
            spans = [
                self.starts[q, one.last] + seconds - self.starts[q, one.first]
                for q in range(self.form.length)
            ]
            total += [amount * span for span in spans]
            if amount:
                most = capacity // amount * self.period
                self.model.add(cp_model.LinearExpr.sum(spans) <= most)
        self.model.add(cp_model.LinearExpr.sum(total) <= capacity * self.period)

    def hint(self, known: Repetition) -> None:
        """Start from the orders of ``known``, at the period of the model."""
        origin = known.starts[0][0]
        scale = self.period / known.period
        for (q, i), start in self.starts.items():
            tick = round((known.starts[q][i] - origin) * scale)
            self.model.add_hint(start, tick)
            self.model.add_hint(self.phases[q, i], tick % self.period)
            self.model.add_hint(self.turns[q, i], tick // self.period)

    def _microbatches(self) -> Iterator[tuple[int, list[cp_model.IntVar]]]:
        blocks = range(len(self.ticks))
        for q in range(self.form.length):
            yield q, [self.starts[q, i] for i in blocks]


def common_scale(values: Iterable[float]) -> int | None:
    """The least whole number up to ``SCALES`` that makes all values integers; None: there is none.

    Integers are then exact to the rounding of the values.
    """
    array = np.array(list(values))
    for scale in range(1, SCALES + 1):
        scaled = array * scale
        if (np.abs(scaled - np.round(scaled)) <= MARGIN * scaled).all():
            return scale
    return None


def _entering(problem: RepetitionProblem) -> list[int]:
    """Per block the number of arcs that enter it or its successors from outside."""
    found = []
    for j in range(len(problem.seconds)):
        inside = problem.successors(j)
        found.append(sum(i not in inside and k in inside for i, k in problem.before))
    return found


def least_repetition(form: AtPeriod, starts: dict[Copy, int]) -> Repetition | None:
    """The least period at which the orders of ``starts`` are kept, with the earliest starts.

    The orders are the whole numbers of periods between the starts of two blocks of a resource, of
    which only those of neighbours in the period are needed.
    """
    problem, node = form.problem, {copy: 1 + c for c, copy in enumerate(form.copies)}
    arcs = [(0, node[copy], 0.0, 0) for copy in form.copies]
    for q in range(form.length):
        arcs += [(node[q, i], node[q, j], problem.seconds[i], 0) for i, j in problem.before]
    for members in problem.shared.values():
        ring = sorted(
            (starts[q, i] % form.period, starts[q, i] // form.period, (q, i))
            for q in range(form.length)
            for i in members
        )
        _, turn, copy = ring[0]
        for (_, a, one), (_, b, other) in pairwise((*ring, (0, turn - 1, copy))):
            arcs.append((node[one], node[other], problem.seconds[one[1]], b - a))
    before, after, seconds, turns = (np.array(column) for column in zip(*arcs, strict=True))
    total = sum(problem.seconds)
    # start[other] - b P >= start[one] - a P + seconds
    found = least_period_of(before, after, seconds, -turns.astype(float), 0.0, MARGIN * total)
    if found is None:
        return None
    period, times = found
    n = len(problem.seconds)
    rows = times[1:].reshape(form.length, n).tolist()
    return Repetition(period, tuple(tuple(row) for row in rows))
