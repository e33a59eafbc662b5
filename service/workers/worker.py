"""A worker: claims jobs of the store and answers each in a process with limits."""

import contextlib
import math
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field, replace

from sqlalchemy.exc import DataError, SQLAlchemyError

from stagewright.service import tracing
from stagewright.service.jobs.kinds import rest_of
from stagewright.service.jobs.overview import Presence, queued_at
from stagewright.service.jobs.queue import MOST_ATTEMPTS, JobLeaseLostError, Queue, QueueRules
from stagewright.service.jobs.records import JobEnd, JobEnding, ServiceJob, State, StoppedBy
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.jobs.upkeep import RepeatedStep
from stagewright.service.tracing import JOB_ENDS, LOST, RUNS, WAITS
from stagewright.service.workers.processes import (
    Begun,
    Better,
    LocalProcess,
    Look,
    MachineLostError,
    Start,
)

# More than a worker may wait for the store: silent for longer, its thread hangs.
SILENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What a job may use.

    ``seconds`` is the longest that a job may take, whatever it asks for, and ``grace_seconds`` how
    long it has to end when it is asked to. ``memory_bytes`` is resident, of its process.
    """

    seconds: float = 3600.0
    grace_seconds: float = 10.0
    memory_bytes: float = 8e9


@dataclass
class Worker:
    """Answers one job after another until it is stopped.

    ``lease_seconds``: a job whose worker is silent for so long is another's. ``poll_seconds`` is
    the time between looks at a running job, ``look_seconds`` that between looks at the queue when
    nothing is told of it. ``start`` decides where processes of jobs are.
    """

    store: ServiceStore
    limits: JobLimits = JobLimits()
    rules: QueueRules = field(default_factory=QueueRules)
    lease_seconds: float = 15.0
    poll_seconds: float = 0.2
    look_seconds: float = 2.0
    start: Start = LocalProcess
    name: str = field(
        default_factory=lambda: f"{socket.gethostname()[:20]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    )
    stopping: threading.Event = field(default_factory=threading.Event)
    drained_at: float = math.inf  # on the clock of `time.monotonic`, as is `seen`
    seen: float = field(default_factory=time.monotonic)
    queue: Queue = field(init=False)
    presence: Presence = field(init=False)
    _woken: threading.Event = field(init=False, default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.queue = Queue(self.store, self.rules)
        self.presence = Presence(self.store, self.name, self.lease_seconds / 4)

    def run(self) -> None:
        """Claim and answer jobs; a store that does not answer is asked again."""
        turns = RepeatedStep(self._answer_next, self.look_seconds, self.stopping, self._woken)
        with self.store.signals.subscribed(self._woken.set, name=State.QUEUED):
            try:
                turns.run()
            finally:
                self.presence.leave()

    def silent_seconds(self) -> float:
        """How long ago its thread was last seen to go on; 0 of one that is asked to end."""
        return 0.0 if self.stopping.is_set() else time.monotonic() - self.seen

    def stop(self, drain_seconds: float = 0.0) -> None:
        """End `run`: no job is begun, and one that has not ended in so long is queued again.

        It keeps its best answer, and the attempt is not counted. Called again, it may only end
        sooner.
        """
        self.drained_at = min(self.drained_at, time.monotonic() + drain_seconds)
        self.stopping.set()
        self._woken.set()

    def _answer_next(self) -> bool:
        """Answer the next job, and those to which it gives way; whether there was one.

        After a defect its lease runs out.
        """
        self.presence.tell()
        self.seen = time.monotonic()
        LOST.inc(self.queue.expire())
        found = job = self.queue.claim(self.name, self.lease_seconds)
        while job is not None:
            self.store.sign(job)
            job = self.answer(job)
        return found is not None

    def answer(self, job: ServiceJob) -> ServiceJob | None:
        """Answer a job that is claimed; what happens to the lease and the store ends it.

        Another one, if this one gave way to it: that is claimed too.
        """
        whose, facts = (job.kind, job.user_class or "unknown"), _facts(job)
        queued, begun = self._queued(job), job.started or job.created
        WAITS.labels(*whose).observe(max(0.0, begun - queued))
        tracing.record("queue", job.trace, queued, begun, **facts)
        with (
            RUNS.labels(*whose).time(),
            tracing.span("job", job.trace, worker=self.name, attempt=job.attempts, **facts),
        ):
            return self._answer(job)

    def _answer(self, job: ServiceJob) -> ServiceJob | None:
        try:
            run = _JobRun(self, job)
        except OSError:  # no process can be started now: the lease runs out
            self.stopping.wait(self.poll_seconds)
            return None
        try:
            with self.store.signals.subscribed(run.asked.set, job=job.id, name="asked"):
                run.until_done()
        except (JobLeaseLostError, MachineLostError):
            # Another worker has the job, and what this one found does not count; or its lease runs
            # out, and it is queued again as if this worker were lost.
            tracing.fail()
        finally:
            run.process.kill()
            run.trace()
        return run.gave_way_to

    def _queued(self, job: ServiceJob) -> float:
        """When a job was queued, the last time."""
        with contextlib.suppress(SQLAlchemyError):
            return queued_at(self.store, job.id) or job.created
        return job.created


def _facts(job: ServiceJob) -> dict[str, str | None]:
    """What spans say of a job."""
    return {"job": job.id, "kind": job.kind, "user_class": job.user_class}


class _JobRun:
    """One job in its process."""

    def __init__(self, worker: Worker, job: ServiceJob) -> None:
        self.worker, self.job = worker, job
        self.process = worker.start(job.kind, rest_of(job))
        now = time.monotonic()
        self.doing, self.doing_since = "start", time.time()
        self.ends = now + worker.limits.seconds
        self.renewed = self.searching = now
        self.has_begun = False
        self.kill_at: float | None = None
        self.stopped_by: StoppedBy | None = None
        self.aborted, self.most_bytes = False, 0.0
        self.gave_way_to: ServiceJob | None = None
        self.asked = threading.Event()
        self.asked.set()  # perhaps between its claim and now

    def until_done(self) -> None:
        """Pass on what the process tells, and end it if it must."""
        while True:
            self.worker.seen = time.monotonic()
            seen = self.process.look(self.worker.poll_seconds)
            if isinstance(seen.told, JobEnd):
                self._finish(seen.told)
                return
            if isinstance(seen.told, Begun):
                self.trace("solve")
            elif seen.told is not None:
                self._write(seen.told)
            elif seen.exit_code is not None:
                self._end_without_outcome(seen)
                return
            self._watch(seen.resident_bytes)
            if self.gave_way_to is not None:
                return
            if self.kill_at is None and time.monotonic() > self.worker.drained_at:
                self.process.kill()
                self._give_back("its server was stopped", counted=False)
                return

    def trace(self, next_doing: str = "") -> None:
        """End the span of what the process does: it starts, then it solves."""
        now = time.time()
        tracing.record(self.doing, tracing.current(), self.doing_since, now, **_facts(self.job))
        self.doing, self.doing_since = next_doing, now

    def _write(self, better: Better) -> None:
        if not (self.has_begun or better.doing):  # until now it started, and compiled kernels
            self.has_begun, self.searching = True, time.monotonic()
        with contextlib.suppress(SQLAlchemyError):  # the next one may be stored
            self.worker.queue.improve(
                self.job.id, self.worker.name, better.cost, better.bound, better.document,
                better.plans, better.doing,
            )  # fmt: skip

    def _watch(self, resident_bytes: float) -> None:
        """Renew the lease of the job, and end its process on the user's wish or over a limit."""
        now, limits = time.monotonic(), self.worker.limits
        self.most_bytes = max(self.most_bytes, resident_bytes)
        self.worker.presence.tell(resident_bytes)
        if self.asked.is_set() or now - self.renewed > self.worker.lease_seconds / 4:
            self.asked.clear()
            with contextlib.suppress(SQLAlchemyError):  # asked again at the next look
                mine = (self.job.id, self.worker.name, self.worker.lease_seconds)
                self._hear(self.worker.queue.renew(*mine))
                self.renewed = now
                if self.kill_at is None and not self.worker.stopping.is_set():
                    searched = now - self.searching
                    self.gave_way_to = self.worker.queue.give_way(*mine, searched)
        if now > self.ends and self.kill_at is None:
            self._ask_to_stop(StoppedBy.TIME)
        if resident_bytes > limits.memory_bytes:
            self.stopped_by = StoppedBy.MEMORY
            self.process.kill()
        if self.kill_at is not None and now > self.kill_at:
            self.process.kill()

    def _hear(self, asked: JobEnding | None) -> None:
        if asked is JobEnding.ABORT:
            self.aborted, self.stopped_by = True, StoppedBy.USER
            self.process.kill()
        elif asked is JobEnding.STOP and self.kill_at is None:
            self._ask_to_stop(StoppedBy.USER)

    def _ask_to_stop(self, why: StoppedBy) -> None:
        self.stopped_by = why
        self.kill_at = time.monotonic() + self.worker.limits.grace_seconds
        self.process.stop()

    def _finish(self, outcome: JobEnd) -> None:
        """Store how the job ended; try again while the store does not answer."""
        while True:
            self.worker.seen = time.monotonic()
            try:
                told = outcome if self.aborted else self._told(outcome)
                self.worker.queue.finish(self.job.id, self.worker.name, told)
                JOB_ENDS.labels(self.job.kind, told.state).inc()
                tracing.tell(state=told.state.value, stopped_by=told.stopped_by)
                if told.state is State.FAILED:
                    tracing.fail()
                return
            except (DataError, ValueError):  # it will never take this: no text of a database
                outcome = JobEnd(State.FAILED, reason="its answer cannot be stored")
            except SQLAlchemyError:
                time.sleep(self.worker.poll_seconds)
                if time.monotonic() > self.worker.drained_at:
                    return  # the lease runs out, and the best plan so far stays

    def _told(self, outcome: JobEnd) -> JobEnd:
        """How the job ended and what stopped it; feasible if an earlier worker found a plan."""
        if outcome.stopped_by is None:
            return outcome
        told = replace(outcome, stopped_by=self.stopped_by or outcome.stopped_by)
        if told.state is State.FAILED and self._has_plan():
            return replace(told, state=State.FEASIBLE)
        return told

    def _has_plan(self) -> bool:
        kept = self.worker.store.get(self.job.id)
        return kept is not None and kept.document is not None

    def _end_without_outcome(self, seen: Look) -> None:
        """End a job whose process ended without an answer, or try it again."""
        if seen.out_of_memory and self.stopped_by is None:
            self.stopped_by = StoppedBy.MEMORY
        limit, held = self.worker.limits.memory_bytes, self.most_bytes
        reasons = {
            StoppedBy.USER: "ended by the user",
            StoppedBy.TIME: "ended at its time limit",
            StoppedBy.MEMORY: f"its process took more than {limit:.3g} bytes of memory"
            if held > limit
            else f"its process was killed for lack of memory on its machine: it held {held:.3g} "
            f"bytes when last seen, and may have {limit:.3g} (serve --memory-limit)",
            StoppedBy.LOST: f"its process ended with exit code {seen.exit_code}",
        }
        by = self.stopped_by or StoppedBy.LOST
        if by is StoppedBy.LOST and self.job.attempts < MOST_ATTEMPTS:
            self._give_back(reasons[by], counted=True)
        else:
            self._finish(JobEnd(State.FAILED, reason=reasons[by], stopped_by=by))

    def _give_back(self, reason: str, *, counted: bool) -> None:
        """Queue the job again; where the store does not answer, its lease runs out."""
        tracing.tell(state=State.QUEUED.value)
        with contextlib.suppress(SQLAlchemyError):
            self.worker.queue.give_back(self.job.id, self.worker.name, reason, counted=counted)
