"""Patterns in terms of orders: the periods between two jobs of a device, and the least period."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np

from stagewright.formulations.patterns.one_f_one_b import groups
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.plans.actions import B, F, Operation
from stagewright.graphs.documents.arrays import Floats, Ints

MARGIN = 1e-12  # relative: rounding of sums of times


class Affine(NamedTuple):
    """``constant + sum(factor * k[pair])``: a number of periods, affine in the orders."""

    constant: int
    terms: tuple[tuple[int, int], ...] = ()  # (pair, factor)

    def at(self, orders: Ints) -> int:
        """The value for given orders."""
        return self.constant + sum(factor * int(orders[pair]) for pair, factor in self.terms)


class StartDifference(NamedTuple):
    """tau_after >= tau_before + seconds + periods * T."""

    before: int
    after: int
    seconds: float
    periods: Affine


class Instant(NamedTuple):
    """The microbatches that each stage of a device keeps just after the start of a job."""

    device: int
    stages: tuple[int, ...]
    kept: tuple[Affine, ...]
    at_work: int | None  # the stage whose backward starts


@dataclass(frozen=True)
class OrderModel:
    """The constraints on orders, which the integer programs and the exact times share.

    ``relaxed``: all-reduces may run in pauses, and updates may wait for the stage's forward.
    """

    problem: PatternProblem
    relaxed: bool = False

    @cached_property
    def summed(self) -> tuple[int, ...]:
        """The stages whose all-reduces share a device with others; numbered after the jobs."""
        return tuple(s for stages in self.problem.reducing if len(stages) > 1 for s in stages)

    @property
    def columns(self) -> int:
        """The number of start times: of jobs, then of all-reduces."""
        return len(self.problem.jobs) + len(self.summed)

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """All i < j that share a device or link; orders have shape (pairs,).

        Jobs first, sorted, then all-reduces.
        """
        found = (pair for members in self.problem.shared for pair in combinations(members, 2))
        place = {s: len(self.problem.jobs) + i for i, s in enumerate(self.summed)}
        reduces = (
            (place[s], place[r])
            for stages in self.problem.reducing
            for s, r in combinations(stages, 2)
        )
        return (*sorted(found), *reduces)

    @cached_property
    def number(self) -> Mapping[tuple[int, int], int]:
        """The index of each pair in ``pairs``."""
        return {pair: p for p, pair in enumerate(self.pairs)}

    @cached_property
    def differences(self) -> tuple[StartDifference, ...]:
        """Dependencies, exclusions, and two versions of the weights."""
        problem, jobs = self.problem, self.problem.jobs
        found = [
            StartDifference(i, i + 1, jobs[i].seconds, Affine(0)) for i in range(len(jobs) - 1)
        ]
        for p, (i, j) in enumerate(self.pairs):
            # All-reduces repeat once per iteration.
            every = 1 if i < len(jobs) else problem.microbatches
            found.append(StartDifference(i, j, self._seconds(i), Affine(0, ((p, every),))))
            found.append(StartDifference(j, i, self._seconds(j), Affine(-every, ((p, -every),))))
        limit = Affine(-problem.microbatches - 1)
        for s, reduce in enumerate(problem.reduce):
            forward, backward = self._ends_of(s)
            if problem.pause_seconds > 0 and not self.relaxed:
                forward = 0
            if s in self.summed:
                column = len(jobs) + self.summed.index(s)
                found.append(StartDifference(backward, column, jobs[backward].seconds, Affine(0)))
                found.append(StartDifference(column, forward, self._seconds(column), limit))
            else:
                took = jobs[backward].seconds + self._left(reduce)
                found.append(StartDifference(backward, forward, took, limit))
        return tuple(found)

    def _seconds(self, column: int) -> float:
        """The duration of a job or an all-reduce."""
        jobs = self.problem.jobs
        if column < len(jobs):
            return jobs[column].seconds
        return self._left(self.problem.reduce[self.summed[column - len(jobs)]])

    def _left(self, reduce: float) -> float:
        """A lower bound on the part of an all-reduce outside pauses."""
        return max(0.0, reduce - self.problem.pause_seconds) if self.relaxed else reduce

    @cached_property
    def instants(self) -> tuple[Instant, ...]:
        """The instants at which a device may reach its peak: starts of forwards and backwards."""
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

        Jobs between the forward and the backward of a stage are at most as far apart as these two.
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
        """The devices whose memory is exceeded, with the arithmetic of ``evaluate``."""
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
        # The middle of the allowed interval, so that rounding never changes the number of periods.
        return np.array(
            [
                round((starts[j] - starts[i] + (self._seconds(j) - self._seconds(i)) / 2)
                      / (pattern.period * (1 if i < len(self.problem.jobs) else m)) - 0.5)
                for i, j in self.pairs
            ],
            dtype=np.int64,
        )  # fmt: skip

    def starts_of(self, pattern: Pattern) -> tuple[float, ...]:
        """Starts of the jobs, then of the all-reduces in ``summed``, shape (columns,)."""
        reduces = self.problem.reduce_starts(pattern)
        return (*pattern.starts, *(reduces[s] for s in self.summed))

    def pattern(self, period: float, starts: Sequence[float]) -> Pattern:
        """The pattern with the given starts, shape (columns,)."""
        jobs = len(self.problem.jobs)
        if not self.summed:
            return Pattern(period, tuple(starts))
        reduces = list(self.problem.reduce_starts(Pattern(period, tuple(starts[:jobs]))))
        for s, start in zip(self.summed, starts[jobs:], strict=True):
            reduces[s] = start
        return Pattern(period, tuple(starts[:jobs]), tuple(reduces))

    def least_at(self, period: float) -> Ints:
        """Lower bounds on the orders of every pattern of ``period`` or less, shape (pairs,).

        Two starts are at least as far apart as the operations of a microbatch between them, and for
        the forward and backward of a stage as 1F1B* requires (MadPipe, Proposition 1).
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
        """The most microbatches that ``stage`` may keep if the other stages keep the fewest.

        At the start of its backward, earlier stages keep this microbatch, later ones may keep none.
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
    """One microbatch at a time: no pattern needs less memory, at any period.

    When a backward starts, every earlier stage on its device keeps that microbatch; here they keep
    no other.
    """
    starts = np.concatenate([[0.0], np.cumsum([job.seconds for job in problem.jobs])])
    period = max(float(starts[-1]), _period_floor(problem))
    return Pattern(period, tuple(starts[:-1].tolist()))


def _period_floor(problem: PatternProblem) -> float:
    """A lower bound on the period from all-reduces and offloading, for any orders."""
    reduced = (sum(problem.reduce[s] for s in stages) for stages in problem.reducing)
    return max(problem.least_seconds, max(reduced) / problem.microbatches)


def least_pattern(model: OrderModel, orders: Ints, least: float = 0.0) -> Pattern | None:
    """The least period of at least ``least`` for ``orders``, with the earliest starts.

    None if the orders are infeasible at every period.
    """
    differences = model.differences
    found = _least_period_of(
        before=np.array([one.before for one in differences]),
        after=np.array([one.after for one in differences]),
        seconds=np.array([one.seconds for one in differences]),
        periods=-np.array([one.periods.at(orders) for one in differences], dtype=float),
        least=max(least, _period_floor(model.problem)),
        slack=MARGIN * sum(job.seconds for job in model.problem.jobs),
    )
    return None if found is None else model.pattern(found[0], found[1].tolist())


def _least_period_of(
    before: Ints, after: Ints, seconds: Floats, periods: Floats, least: float, slack: float
) -> tuple[float, Floats] | None:
    """The least T of at least ``least`` with start[after] >= start[before] + seconds - periods T.

    Returns T and the earliest starts, counted from that of job 0, which must precede all others.

    The period is the maximum ratio of seconds to periods over all cycles of differences. If a
    period is infeasible, the ratio of a violated cycle is the next candidate (Lawler; Dasdan 2004).
    A candidate is never above the optimum, and there are finitely many.

    None if no period is feasible.
    """
    period = least
    while True:
        starts, cycle = _longest(before, after, seconds - periods * period, slack)
        if not cycle:
            return period, starts
        if periods[cycle].sum() <= 0:
            return None
        period = float(seconds[cycle].sum() / periods[cycle].sum())


def _longest(before: Ints, after: Ints, weights: Floats, slack: float) -> tuple[Floats, list[int]]:
    """Longest paths from job 0 (Bellman-Ford), or the arcs of a cycle of positive length."""
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
    """The arcs of a cycle of parents; empty if there is none."""
    done: set[int] = set()
    for root in range(len(parent)):
        job, place = root, dict[int, int]()
        path: list[int] = []
        while parent[job] >= 0 and job not in done:
            if job in place:
                return path[place[job] :]
            place[job] = len(path)
            path.append(parent[job])
            job = before[parent[job]]
        done.update(place)
    return []
