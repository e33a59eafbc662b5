"""Simulate a cluster: jobs arrive, policies allocate, rounds run, jobs complete.

The rules are those of the simulator of the thesis (Narayanan 2021, section 5.7.3, and the public
code of Gavel): a job runs whole steps in a round, a round ends when the last of its jobs stops,
allocations are recomputed when jobs have arrived or completed, but not too often. Differences:

* accelerators are not kept idle for a job that has arrived since the last allocation;
* a job that shares accelerators ends with its own last step, not with its partner's;
* the time of shared accelerators is paid once;
* a job that starts on other accelerators takes its ``move_seconds`` before its next step;
* a distributed job with fewer steps left than accelerators runs them, instead of being dropped.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stagewright.executor.clusters.rates import (
    DownAccelerators,
    Outage,
    Peekable,
    RatePlace,
    corrected,
    place_of_rate,
)
from stagewright.executor.clusters.rounds import Assignment, Mechanism
from stagewright.executor.clusters.timeline import (
    HOUR,
    ActiveJob,
    ClusterRules,
    ClusterTimeline,
    Reset,
    SimulatedJob,
    TimelineRound,
    quota_of,
    table_of,
)
from stagewright.formulations.clusters.allocation import (
    Allocation,
    AllocationProblem,
    accelerators_of_jobs,
    throughput,
)
from stagewright.formulations.clusters.rates import RateTable
from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Entity, Job, Throughputs, counts_of
from stagewright.graphs.workloads.pool import Pool

Allocate = Callable[[AllocationProblem], Allocation]

DONE = 1e-12  # fraction of a job's steps that rounding may leave


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The state of a simulation at an allocation."""

    seconds: float
    arrived: int
    completed: int
    active: int


OnProgress = Callable[[ClusterState], None]


def simulate_cluster(
    jobs: Iterable[Job],
    throughputs: Throughputs,
    pool: Pool,
    allocate: Allocate,
    rules: ClusterRules | None = None,
    *,
    window: range | None = None,
    entities: tuple[Entity, ...] = (),
    failures: Iterable[Outage] = (),
    predicted: Throughputs | None = None,
    keep_assignments: bool = False,
    on_progress: OnProgress | None = None,
    stop: StopToken | None = None,
) -> ClusterTimeline:
    """Run ``jobs``, which may be endless, under the policy ``allocate``.

    Raises InputError if jobs are not in order of arrival, one has no throughput, or no job can run
    any more. ``window``: numbers of the jobs, by arrival, whose completion ends the simulation
    (default: all). ``failures``: in order of their start. A job whose accelerator fails loses the
    round's steps. ``predicted``: what the policy takes each throughput for until a job, alone on
    its accelerators, has made a step at it. ``keep_assignments``: keep the assignments of every
    round. ``stop``: ends the simulation after the current round once it is set.
    """
    rules = rules or ClusterRules()
    if window is None:
        jobs = tuple(jobs)
    elastic = [job.kind for job in jobs if job.counts] if isinstance(jobs, Sequence) else []
    table = table_of(throughputs, pool, rules, elastic)
    believed = table if predicted is None else table_of(predicted, pool, rules, elastic)
    run = _ClusterRun(jobs, table, believed, allocate, rules, entities, failures, window)
    return run.run(keep_assignments, on_progress, stop)


class _ClusterRun:
    def __init__(
        self,
        jobs: Iterable[Job],
        table: RateTable,
        believed: RateTable,
        allocate: Allocate,
        rules: ClusterRules,
        entities: tuple[Entity, ...],
        failures: Iterable[Outage],
        window: range | None,
    ) -> None:
        self.table, self.believed, self.allocate, self.rules = table, believed, allocate, rules
        self.corrected: list[RatePlace] = []
        self.entities, self.window = entities, window
        self.entity_of = {entity.name: number for number, entity in enumerate(entities)}
        self.coming = Peekable(enumerate(jobs))
        shuffle = None if rules.shuffle_seed is None else random.Random(rules.shuffle_seed)
        self.mechanism = Mechanism(table, rules.round_seconds, fill=rules.fill, shuffle=shuffle)
        self.out_of_order = DownAccelerators(failures, self.mechanism)
        self.active: dict[int, ActiveJob] = {}
        self.outcomes: list[SimulatedJob | None] = []
        self.completed = 0
        self.now = 0.0
        self.measured = 0 if window is None else window.start
        self.last_reset: float | None = None
        self.changed = False
        self.isolated: dict[int, float] = {}
        self.speeds: dict[int, float] = {}
        self.usage: dict[int, Floats] = {}
        self.rounds: list[TimelineRound] = []
        self.resets: list[Reset] = []
        self.busy = np.zeros(len(table.counts))
        self.renewals = self.renewable = self.leases = 0
        self.type_of = table.accelerator.tolist()
        quota = partial(quota_of, seconds=rules.round_seconds)
        self.alone = [[quota(rate) for rate in rates] for rates in table.alone.tolist()]
        self.paired = {
            (int(first), int(second), int(worker)): [quota(float(rate)) for rate in rates]
            for first, second, worker, rates in zip(
                table.first, table.second, table.worker, table.paired, strict=True
            )
        }

    def run(
        self, keep_assignments: bool, on_progress: OnProgress | None, stop: StopToken | None
    ) -> ClusterTimeline:
        while True:
            self.arrivals()
            self.changed |= self.out_of_order.update(self.now)
            if self.finished() or is_stopped(stop):
                break
            if self.due():
                self.reset()
                if on_progress is not None:
                    counts = len(self.outcomes), self.completed, len(self.active)
                    on_progress(ClusterState(self.now, *counts))
            if self.rules.ideal:
                self.flow()
            else:
                self.round(keep_assignments)
        return self.timeline()

    def arrivals(self) -> None:
        """Add the jobs that have arrived; they enter between rounds."""
        while (first := self.coming.peek()) and first[1].arrival_seconds <= self.now:
            number, job = next(self.coming)
            kind = self.table.index.get(job.kind)
            if kind is None:
                counts = " or ".join(map(str, counts_of(job.kind)))
                raise InputError(
                    f"job {job.name!r}: {job.model!r} on {counts} accelerators cannot run in "
                    "this cluster, or some of its rates are missing"
                )
            self.active[number] = ActiveJob(number, job, kind, job.steps)
            self.outcomes.append(None)
            self.changed = True

    def finished(self) -> bool:
        is_empty = not self.active and self.coming.peek() is None
        if self.window is None:
            return is_empty
        while self.measured < min(self.window.stop, len(self.outcomes)):
            if self.outcomes[self.measured] is None:
                return False
            self.measured += 1
        return self.measured == self.window.stop or is_empty

    def due(self) -> bool:
        """Whether a new allocation is due."""
        if not self.changed or not self.active:
            return False
        return (
            not self.last_reset  # the public code does not count a reset at time 0
            or self.now - self.last_reset >= self.rules.reset_seconds
        )

    def reset(self) -> None:
        """Allocate for the jobs in the cluster."""
        self.settle()
        table = self.out_of_order.working(self.believed)
        members = [one for one in self.active.values() if table.alone[one.kind].any()]
        before = self.mechanism.deviation()
        self.resets.append(Reset(self.now, len(members), before.shortfall, before.mean))
        if members:
            problem = self.problem(table, members)
            allocation = self.allocate(problem)
            numbers = [one.number for one in members]
            self.mechanism.reset(problem, allocation, numbers)
            true = replace(problem, table=self.out_of_order.working(self.table))
            self.isolated = dict(zip(numbers, true.isolated_throughput().tolist(), strict=True))
            if self.rules.ideal:
                self.speeds = dict(
                    zip(numbers, throughput(problem, allocation).tolist(), strict=True)
                )
                self.usage = dict(
                    zip(numbers, accelerators_of_jobs(problem, allocation), strict=True)
                )
        self.last_reset = self.now
        self.changed = False

    def settle(self) -> None:
        """Convert the steps since the last allocation to seconds on 1/n of the cluster."""
        for one in self.active.values():
            self.settle_one(one)

    def settle_one(self, one: ActiveJob) -> None:
        if one.since_reset:
            one.isolated_seconds += one.since_reset / self.isolated[one.number]
            one.since_reset = 0.0

    def problem(self, table: RateTable, members: list[ActiveJob]) -> AllocationProblem:
        jobs = [one.job for one in members]
        arrival = np.array([job.arrival_seconds for job in jobs])
        slo = np.array([math.inf if job.slo_seconds is None else job.slo_seconds for job in jobs])
        return AllocationProblem(
            tuple(job.name for job in jobs),
            table,
            np.array([one.kind for one in members], dtype=np.int64),
            np.array([job.weight for job in jobs]),
            np.array([one.left for one in members]),
            self.now - arrival,
            np.array([one.isolated_seconds for one in members]),
            arrival + slo - self.now,
            np.array([job.move_seconds for job in jobs]),
            self.mechanism.held([one.number for one in members]),
            np.array([self.entity_of.get(job.entity or "", -1) for job in jobs], dtype=np.int64),
            self.entities,
            math.inf if self.rules.ideal else self.rules.reset_seconds,
        )

    def round(self, keep_assignments: bool) -> None:
        """Run one round, or wait for the next event if nothing can run."""
        assignments = self.mechanism.schedule()
        if not assignments:
            self.wait()
            return
        self.renewable += self.leases
        self.renewals += sum(one.renewed for one in assignments)
        plans = [self.plan(assignment) for assignment in assignments]
        start = self.now
        lengths = [max(seconds for _, seconds in plan) for plan in plans]
        self.now = start + max(lengths)
        active = len(self.active)
        failed = self.out_of_order.before(self.now)
        self.changed |= bool(failed)
        busy = [0.0] * len(self.busy)
        for assignment, plan, seconds in zip(assignments, plans, lengths, strict=True):
            kind = self.type_of[assignment.worker]
            busy[kind] += len(assignment.accelerators) * seconds
            self.mechanism.account(assignment, seconds)
            hit = failed and any(
                failed.get((kind, number), math.inf) < start + seconds
                for number in assignment.accelerators
            )
            if not hit:
                self.advance(assignment, plan, start)
        self.leases = sum(any(job in self.active for job in one.jobs) for one in assignments)
        self.busy += busy
        length = self.now - start
        self.rules.require_one_more(len(self.rounds))
        shares = tuple(seconds / length for seconds in busy)
        kept = assignments if keep_assignments else ()
        self.rounds.append(TimelineRound(start, self.now, active, shares, kept))

    def plan(self, assignment: Assignment) -> list[tuple[float, float]]:
        """Steps of each job of the assignment, and their seconds."""
        members = [self.active[job] for job in assignment.jobs]
        if len(members) == 1:
            quotas = [self.alone[members[0].kind][assignment.worker]]
        else:
            quotas = self.paired[members[0].kind, members[1].kind, assignment.worker]
        return [
            one.plan(quota, assignment.renewed, self.rules.round_seconds)
            for one, quota in zip(members, quotas, strict=True)
        ]

    def advance(
        self, assignment: Assignment, plan: list[tuple[float, float]], start: float
    ) -> None:
        for job, (steps, seconds) in zip(assignment.jobs, plan, strict=True):
            one = self.active[job]
            if steps and len(assignment.jobs) == 1:
                self.measure(one.kind, assignment.worker)
            self.proceed(one, steps, start + seconds)

    def measure(self, kind: int, worker: int) -> None:
        """Let the policy know a rate; a new allocation is due if it took it for another."""
        known = corrected(self.believed, self.table, kind, worker)
        if known is not self.believed:
            self.believed, self.changed = known, True
            self.corrected.append(place_of_rate(self.table, kind, worker))

    def proceed(self, one: ActiveJob, steps: float, finish: float) -> None:
        """Count the steps of a job, which may be its last ones."""
        one.left -= steps
        one.since_reset += steps
        if one.left > DONE * one.job.steps:
            return
        self.settle_one(one)
        self.outcomes[one.number] = SimulatedJob(one.job, finish, one.isolated_seconds)
        del self.active[one.number]
        self.mechanism.remove(one.number)
        self.completed += 1
        self.changed = True

    def wait(self) -> None:
        """Advance to the next event."""
        times = self.events()
        if self.changed and self.active:
            times.append((self.last_reset or self.now) + self.rules.reset_seconds)
        later = [time for time in times if time > self.now]
        if not later:
            names = ", ".join(repr(one.job.name) for one in self.active.values())
            raise InputError(
                f"no job can run, and no job arrives or accelerator returns; waiting: {names}"
            )
        self.now = min(later)

    def events(self) -> list[float]:
        """Times of the next arrival, failure and repair."""
        times = self.out_of_order.events()
        if (following := self.coming.peek()) is not None:
            times.append(following[1].arrival_seconds)
        return times

    def flow(self) -> None:
        """Run all jobs at their shares until the next event."""
        ends = {
            number: self.now + self.active[number].left / speed
            for number, speed in self.speeds.items()
            if speed > 0 and number in self.active
        }
        if not ends:
            self.wait()
            return
        times = [*self.events(), *ends.values()]
        if self.changed and self.last_reset:
            times.append(self.last_reset + self.rules.reset_seconds)
        start = self.now
        self.now = min((time for time in times if time > start), default=start)
        length = self.now - start
        for number, end in ends.items():
            one = self.active[number]
            steps = one.left if end <= self.now else min(one.left, self.speeds[number] * length)
            self.proceed(one, steps, end)
        busy = sum((self.usage[number] for number in ends), np.zeros(len(self.busy)))
        self.busy += busy * length
        self.rounds.append(TimelineRound(start, self.now, len(ends), tuple(busy.tolist())))

    def timeline(self) -> ClusterTimeline:
        self.settle()
        for one in self.active.values():
            self.outcomes[one.number] = SimulatedJob(one.job, None, one.isolated_seconds)
        pool = self.table.pool
        prices = [accelerator.dollars_per_hour for accelerator in pool.accelerators]
        dollars = None
        if None not in prices:
            hours = self.busy / HOUR
            dollars = float(sum(price * part for price, part in zip(prices, hours, strict=True)))
        return ClusterTimeline(
            pool,
            tuple(self.type_of),
            tuple(outcome for outcome in self.outcomes if outcome is not None),
            tuple(self.rounds),
            tuple(self.resets),
            self.now,
            tuple(self.busy.tolist()),
            dollars,
            self.renewals,
            self.renewable,
            interrupted=not self.finished(),
            corrected=tuple(self.corrected),
        )
