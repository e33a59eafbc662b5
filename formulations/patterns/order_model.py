"""A pattern in terms of orders: by how many periods one job of a device runs before another."""

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
from stagewright.graphs.documents.arrays import Ints

MARGIN = 1e-12  # relative: rounding of sums of times


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
