"""Rounds: place jobs so that over time each receives its share of an allocation.

Narayanan, PhD thesis (2021), section 5.5 and algorithm 2. A job's (or pair's) priority on a type of
accelerator is its target share over the fraction of that type's time it has received; each round
takes jobs by priority while they fit, and no job twice. The simulation and the runtime use the same
object: it has no clock and is given the seconds that jobs ran.

A move costs a job its restart (``restart_seconds``). So a job that was moved comes before all
others where it is, until its lease is so long that the restart was a small part of it.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.executor.clusters.places import FreeServers
from stagewright.formulations.clusters.allocation import RESTARTS, Allocation, AllocationProblem
from stagewright.formulations.clusters.rates import RateTable
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.documents.errors import InvalidPlan

_Key = tuple[tuple[int, ...], int]  # a job or pair by id, and its worker type


@dataclass(frozen=True, slots=True)
class Assignment:
    """A job, or two that share, on accelerators for one round.

    ``worker`` is the worker type; ``accelerators`` are numbered within their type, server by
    server. ``renewed`` says that the jobs had the same accelerators in the round before. Jobs of a
    pair are in the order of their kinds in the rate table.
    """

    jobs: tuple[int, ...]
    worker: int
    accelerators: tuple[int, ...]
    renewed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Deviation:
    """The difference of the time received since the target was set from the target.

    ``share`` is the received share of each of ``jobs`` minus its target, by worker type, shape
    (jobs, workers): above zero where a job received time that no target claimed. ``shortfall`` is
    the largest deficit, ``mean`` the mean of the absolute differences.
    """

    jobs: tuple[int, ...]
    share: Floats
    shortfall: float
    mean: float


@dataclass(frozen=True, slots=True, eq=False)
class _Queue:
    """Entries of one accelerator type: each is a job, or a pair, on a worker type.

    ``received`` are the seconds since the reset plus half a round; ``owed`` are the seconds of
    earlier targets that rounds did not provide; a lease lasts at least ``least_seconds``.
    """

    first: Ints
    second: Ints
    worker: Ints
    scale: Ints
    share: Floats
    received: Floats
    owed: Floats
    least_seconds: Floats
    alive: Bools
    keys: list[_Key]
    sizes: list[
        tuple[bool, int]
    ]  # sort key: whether it is spread over servers, and minus its scale


class Mechanism:
    """Turns a target allocation into rounds.

    ``round_seconds``: length of a round; at a reset half of it counts as received by each job, to
    avoid a division by zero in the first rounds. ``fill``: give accelerators that no target claims
    to idle jobs, first to those that earlier targets owe most. Not for policies with an order of
    jobs, such as FIFO. ``shuffle``: draws the order in which the types of accelerators are filled,
    for policies that do not distinguish types; without it they are filled in the pool's order.
    """

    def __init__(
        self,
        table: RateTable,
        round_seconds: float,
        *,
        fill: bool = True,
        shuffle: random.Random | None = None,
    ) -> None:
        self.table = table
        self.round_seconds = round_seconds
        self.fill = fill
        self.shuffle = shuffle
        self._placement = [worker.placement for worker in table.workers]
        self._lost: list[set[int]] = [set() for _ in table.pool.accelerators]
        self._owed: dict[_Key, float] = {}
        self._last: dict[_Key, Assignment] = {}
        self._leased: dict[_Key, float] = {}  # seconds of the current leases
        self._staying: tuple[Bools, ...] = ()  # entries of each queue, of this round
        self._settled: Bools = np.zeros(1, dtype=bool)  # their jobs; the last is none's
        self._ids: tuple[int, ...] = ()
        self._row: dict[int, int] = {}
        self._queues: tuple[_Queue, ...] = ()
        self._place: dict[_Key, tuple[_Queue, int]] = {}
        self._elapsed = 0.0
        self._longest = 0.0

    @property
    def jobs(self) -> tuple[int, ...]:
        """Ids of the jobs that are in the target and have not been removed, in order."""
        return tuple(job for job in self._ids if job in self._row)

    def reset(self, problem: AllocationProblem, allocation: Allocation, ids: Sequence[int]) -> None:
        """A new target: ``ids[m]`` names the problem's job m; other jobs are forgotten."""
        if len(set(ids)) < len(problem) or len(ids) != len(problem):
            raise InvalidPlan(f"{len(problem)} jobs have {len(set(ids))} different ids")
        self._settle()
        self._ids = tuple(ids)
        self._row = {job: row for row, job in enumerate(self._ids)}
        self._elapsed = 0.0
        alone = allocation.partner < 0
        shares = np.zeros((len(problem), len(self.table.workers)))
        np.add.at(
            shares, (allocation.job[alone], allocation.worker[alone]), allocation.share[alone]
        )
        pairs = _pairs(allocation)
        runs = self.table.alone[problem.kind] > 0
        self._queues = tuple(
            self._queue(
                problem, np.flatnonzero(self.table.accelerator == number), runs, shares, pairs
            )
            for number in range(len(self.table.pool.accelerators))
        )
        self._place = {
            key: (queue, at) for queue in self._queues for at, key in enumerate(queue.keys)
        }

    def _queue(
        self,
        problem: AllocationProblem,
        workers: Ints,
        runs: Bools,
        shares: Floats,
        pairs: tuple[Ints, Ints, Ints, Floats],
    ) -> _Queue:
        """Every job on every one of ``workers`` where it runs, and the target's pairs there."""
        row, column = np.nonzero(runs[:, workers])
        here = np.isin(pairs[2], workers)
        first = np.concatenate([row, pairs[0][here]]).astype(np.int64)
        second = np.concatenate([np.full(len(row), -1), pairs[1][here]]).astype(np.int64)
        worker = np.concatenate([workers[column], pairs[2][here]]).astype(np.int64)
        uses, restart = problem.uses[first, worker], problem.restart_seconds / RESTARTS
        queue = _Queue(
            first,
            second,
            worker,
            uses,
            np.concatenate([shares[row, workers[column]], pairs[3][here]]),
            np.full(len(first), self.round_seconds / 2),
            np.zeros(len(first)),
            np.maximum(restart[first], np.where(second < 0, 0.0, restart[second])),
            np.ones(len(first), dtype=bool),
            [
                ((self._ids[a],) if b < 0 else (self._ids[a], self._ids[b]), on)
                for a, b, on in zip(first.tolist(), second.tolist(), worker.tolist(), strict=True)
            ],
            [
                (self._placement[on] == "spread", -scale)
                for on, scale in zip(worker.tolist(), uses.tolist(), strict=True)
            ],
        )
        queue.owed[:] = [self._owed.get(key, 0.0) for key in queue.keys]
        return queue

    def _settle(self) -> None:
        """Record the differences of received time from the target that ends."""
        self._count_round()
        self._owed = {}
        for queue in self._queues:
            had = queue.received - self.round_seconds / 2
            owed = queue.owed + queue.share * self._elapsed - had
            for at in np.flatnonzero(queue.alive).tolist():
                self._owed[queue.keys[at]] = float(owed[at])

    def resume(
        self,
        last: Sequence[tuple[Assignment, float]],
        received: Mapping[_Key, float],
        elapsed_seconds: float,
    ) -> None:
        """Go on from a round that another mechanism made, with the seconds of each lease of it.

        Under the present target, jobs have ``received`` so many seconds of ``elapsed_seconds``.
        """
        self._last = {(one.jobs, one.worker): one for one, _ in last}
        self._leased = {(one.jobs, one.worker): seconds for one, seconds in last}
        self._elapsed = elapsed_seconds
        for key in received.keys() & self._place.keys():
            queue, at = self._place[key]
            queue.received[at] += received[key]

    def held(self, ids: Sequence[int]) -> Ints:
        """The worker type that each of ``ids`` has in this round, or -1."""
        worker = {job: one.worker for one in self._last.values() for job in one.jobs}
        return np.array([worker.get(job, -1) for job in ids], dtype=np.int64)

    def remove(self, job: int) -> None:
        """Remove a job: it and its pairs are not scheduled again."""
        if job not in self._row:
            return  # it arrived after the target was set
        row = self._row.pop(job)
        for queue in self._queues:
            queue.alive[(queue.first == row) | (queue.second == row)] = False

    def lose(self, accelerator: int, numbers: Iterable[int]) -> None:
        """Do not schedule on these accelerators until :meth:`restore`.

        ``accelerator`` is the type's position in the pool, ``numbers`` are those of assignments.
        """
        self._lost[accelerator].update(numbers)

    def restore(self, accelerator: int, numbers: Iterable[int]) -> None:
        """Schedule on these accelerators again."""
        self._lost[accelerator].difference_update(numbers)

    def available(self, accelerator: int) -> int:
        """The number of working accelerators of a type."""
        return self.table.pool.accelerators[accelerator].count - len(self._lost[accelerator])

    def account(self, assignment: Assignment, seconds: float) -> None:
        """Record that the assignment ran for ``seconds``, which may differ from a round."""
        self._longest = max(self._longest, seconds)
        key = assignment.jobs, assignment.worker
        self._leased[key] = seconds + (self._leased.get(key, 0.0) if assignment.renewed else 0.0)
        place = self._place.get(key)
        if place is not None:
            queue, at = place
            queue.received[at] += seconds

    def _count_round(self) -> None:
        self._elapsed += self._longest
        self._longest = 0.0

    def schedule(self) -> tuple[Assignment, ...]:
        """The next round, in order of the pool's accelerators and then of placing."""
        self._count_round()
        order = list(range(len(self._queues)))
        if self.shuffle is not None:
            self.shuffle.shuffle(order)
        taken = np.zeros(len(self._ids), dtype=bool)
        self._staying = tuple(map(self._stays, self._queues))
        self._settled = np.zeros(len(self._ids) + 1, dtype=bool)
        for queue, stays in zip(self._queues, self._staying, strict=True):
            self._settled[queue.first[stays]] = self._settled[queue.second[stays]] = True
        self._settled[-1] = False
        assigned: dict[int, list[Assignment]] = {}
        for number in order:
            assigned[number] = self._fill(number, taken)
        found = tuple(one for number in sorted(assigned) for one in assigned[number])
        self._last = {(one.jobs, one.worker): one for one in found}
        self._leased = {key: time for key, time in self._leased.items() if key in self._last}
        return found

    def _fill(self, number: int, taken: Bools) -> list[Assignment]:
        """The round of an accelerator type; its jobs are marked as taken."""
        queue = self._queues[number]
        barred: set[int] = set()
        while True:
            chosen = self._choose(number, taken, barred)
            placed, failed = self._placed(number, queue, chosen)
            if not failed:
                break
            # An entry that fits on no single server is replaced by others, or by its spread form.
            barred |= failed
        for at in chosen:
            taken[queue.first[at]] = True
            if queue.second[at] >= 0:
                taken[queue.second[at]] = True
        return placed

    def _choose(self, number: int, taken: Bools, barred: set[int]) -> list[int]:
        """Algorithm 2: entries by priority while they fit, no job twice."""
        queue, stays, room = self._queues[number], self._staying[number], self.available(number)
        eligible = queue.alive & ~taken[queue.first] & ~((queue.second >= 0) & taken[queue.second])
        if not self.fill:
            eligible &= queue.share > 0
        others = ~self._settled[queue.first] & ~self._settled[queue.second]
        eligible = stays | (eligible & others)
        candidates = np.flatnonzero(eligible)
        # X / f with f = t / sum of t: the sum is equal for all of a type, so it is left out.
        priority = queue.share[candidates] / queue.received[candidates]
        by_priority = np.lexsort(
            (
                -queue.share[candidates],
                -queue.owed[candidates],
                -priority,
                ~stays[candidates],
            )
        )
        ordered = candidates[by_priority]
        used: set[int] = set()
        chosen = []
        for at, first, second, scale in zip(
            ordered.tolist(),
            queue.first[ordered].tolist(),
            queue.second[ordered].tolist(),
            queue.scale[ordered].tolist(),
            strict=True,
        ):
            if scale > room or first in used or second in used or at in barred:
                continue
            chosen.append(at)
            used.update((first, second) if second >= 0 else (first,))
            room -= scale
            if room == 0:
                break
        return chosen

    def _stays(self, queue: _Queue) -> Bools:
        """Which entries have a lease that is still too short for another move."""
        if not queue.least_seconds.any():
            return np.zeros(len(queue.keys), dtype=bool)
        leased = np.array([self._leased.get(key, np.inf) for key in queue.keys])
        return np.asarray(queue.alive & (leased < queue.least_seconds))

    def _placed(
        self, number: int, queue: _Queue, chosen: list[int]
    ) -> tuple[list[Assignment], set[int]]:
        """Accelerators for the chosen entries, and the entries that fit on no single server.

        Those that stay come first, then jobs that need one server, then by decreasing size; among
        equal sizes first those that keep their accelerators.
        """
        servers = FreeServers(
            self.table.pool.accelerators[number].count,
            self.table.pool.accelerators[number].per_server,
            self._lost[number],
        )
        classes: dict[tuple[bool, bool, int], list[int]] = {}
        for at in chosen:
            classes.setdefault((not self._staying[number][at], *queue.sizes[at]), []).append(at)
        placed: list[Assignment] = []
        failed: set[int] = set()
        for (*_, size), members in sorted(classes.items()):
            left = []
            for at in members:
                key = queue.keys[at]
                last = self._last.get(key)
                if last is not None and servers.take(last.accelerators):
                    kept = last if last.renewed else Assignment(*key, last.accelerators, True)
                    placed.append(kept)
                else:
                    left.append((at, key))
            for at, key in left:
                found = servers.place(-size, self._placement[key[1]] == "consolidated")
                if found is None:
                    failed.add(at)
                else:
                    placed.append(Assignment(*key, found, False))
        return placed, failed

    def deviation(self) -> Deviation:
        """Deviation of the rounds recorded since the last reset from the target."""
        elapsed = self._elapsed + self._longest
        shape = (len(self._ids), len(self.table.workers))
        had, target = np.zeros(shape), np.zeros(shape)
        for queue in self._queues:
            seconds = queue.received - self.round_seconds / 2
            for rows in (queue.first, queue.second):
                there = rows >= 0
                np.add.at(had, (rows[there], queue.worker[there]), seconds[there])
                np.add.at(target, (rows[there], queue.worker[there]), queue.share[there])
        share = had / elapsed - target if elapsed else np.zeros(shape)
        kept = [self._row[job] for job in self.jobs]
        share = share[kept]
        return Deviation(
            self.jobs,
            share,
            float(max(0.0, -share.min(initial=0.0))),
            float(np.abs(share).mean()) if share.size else 0.0,
        )


def _pairs(allocation: Allocation) -> tuple[Ints, Ints, Ints, Floats]:
    """Job, partner, worker type and share of the pairs, each once."""
    paired = allocation.partner >= 0
    listed = np.column_stack([allocation.job, allocation.partner, allocation.worker])[paired]
    found, at = np.unique(listed, axis=0, return_inverse=True)
    share = np.zeros(len(found))
    np.add.at(share, at.reshape(-1), allocation.share[paired])
    return found[:, 0], found[:, 1], found[:, 2], share
