"""What workers leave when they are lost at a bad moment."""

import contextlib
import errno
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from planning_jobs import TWO_JOBS, Clock, long_request
from processes import PATIENCE, started_from_now_on

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

import httpx
from sqlalchemy.exc import OperationalError

from stagewright.service.jobs.queue import LOSS_PAUSES, JobLeaseLostError, Queue
from stagewright.service.jobs.records import JobEnd, JobEnding, ServiceJob, State, StoppedBy
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.tracing import Lines
from stagewright.service.workers import processes
from stagewright.service.workers.worker import Worker

LEASE = 15.0
HOUR = 3600.0


@pytest.fixture
def clock() -> Clock:
    return Clock(1e6)


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[ServiceStore]:
    found = ServiceStore(f"sqlite:///{tmp_path / 'jobs.sqlite'}", clock)
    yield found
    found.close()


@pytest.fixture
def queue(store: ServiceStore) -> Queue:
    return Queue(store)


@pytest.fixture
def children() -> Callable[[], set[BaseProcess]]:
    return started_from_now_on()


def lost(store: ServiceStore, queue: Queue, clock: Clock, **best: Any) -> ServiceJob:
    """A job whose first worker was lost, when it had found a plan."""
    job, _ = store.submit("ann", "plan", "{}")
    assert queue.claim("first", LEASE) is not None
    queue.improve(job.id, "first", document="good plan", **{"cost": 2.0, "bound": 1.0} | best)
    clock.now += 2 * LEASE
    assert queue.expire() == 1
    return job


def found(store: ServiceStore, job: ServiceJob) -> ServiceJob:
    one = store.get(job.id)
    assert one is not None
    return one


# --- The best plan so far survives -------------------------------------------------------------


def test_a_job_that_is_stopped_while_it_waits_for_its_next_worker_keeps_its_plan(
    store: ServiceStore, queue: Queue, clock: Clock
) -> None:
    job = lost(store, queue, clock)
    stopped = store.ask(job.id, JobEnding.STOP)
    assert (stopped.state, stopped.stopped_by) == (State.FEASIBLE, StoppedBy.USER)
    assert stopped.document == "good plan"
    assert store.events(job.id)[-1].name == State.FEASIBLE


def test_an_aborted_job_has_no_answer_wherever_it_was(
    store: ServiceStore, queue: Queue, clock: Clock
) -> None:
    waiting = lost(store, queue, clock)
    assert store.ask(waiting.id, JobEnding.ABORT).state is State.FAILED
    solving = lost(store, queue, clock)
    assert queue.claim("second", LEASE) is not None
    store.ask(solving.id, JobEnding.ABORT)
    clock.now += 2 * LEASE
    queue.expire()
    assert (found(store, solving).state, found(store, solving).stopped_by) == (
        State.FAILED, StoppedBy.USER,
    )  # fmt: skip


def test_a_worse_answer_of_the_next_worker_does_not_replace_the_plan(
    store: ServiceStore, queue: Queue, clock: Clock
) -> None:
    job = lost(store, queue, clock)
    assert queue.claim("second", LEASE) is not None
    worse = JobEnd(
        State.FEASIBLE, answer="{}", document="worse plan", stopped_by=StoppedBy.TIME, cost=3.0,
        bound=0.5,
    )  # fmt: skip
    queue.finish(job.id, "second", worse)
    kept = found(store, job)
    assert (kept.state, kept.stopped_by) == (State.FEASIBLE, StoppedBy.TIME)
    assert (kept.cost, kept.document, kept.answer) == (2.0, "good plan", None)


def test_a_weaker_bound_of_the_next_worker_does_not_replace_the_bound(
    store: ServiceStore, queue: Queue, clock: Clock
) -> None:
    job = lost(store, queue, clock)
    assert queue.claim("second", LEASE) is not None
    for weaker in (None, 0.5):
        queue.improve(job.id, "second", None, weaker)
        assert found(store, job).bound == 1.0
    queue.improve(job.id, "second", None, 1.5)
    assert found(store, job).bound == 1.5


# --- Clocks that jump --------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [HOUR, 24 * HOUR])
def test_a_clock_set_forward_gives_the_job_to_one_other_worker(
    store: ServiceStore, queue: Queue, clock: Clock, jump: float
) -> None:
    job, _ = store.submit("ann", "plan", "{}")
    assert queue.claim("first", LEASE) is not None
    clock.now += jump
    assert queue.expire() == 1
    assert queue.claim("second", LEASE) is not None
    assert queue.claim("third", LEASE) is None
    for heard in (
        lambda: queue.renew(job.id, "first", LEASE),
        lambda: queue.improve(job.id, "first", 1.0, 1.0, "late"),
        lambda: queue.finish(job.id, "first", JobEnd(State.OPTIMAL, document="late")),
    ):
        with pytest.raises(JobLeaseLostError):
            heard()
    queue.finish(job.id, "second", JobEnd(State.OPTIMAL, document="plan"))
    assert found(store, job).document == "plan"


def test_a_worker_that_renews_first_keeps_its_job_when_the_clock_is_set_forward(
    store: ServiceStore, queue: Queue, clock: Clock
) -> None:
    job, _ = store.submit("ann", "plan", "{}")
    assert queue.claim("first", LEASE) is not None
    clock.now += HOUR
    assert queue.renew(job.id, "first", LEASE) is None
    assert queue.expire() == 0


@pytest.mark.parametrize("jump", [HOUR, 24 * HOUR])
def test_a_clock_set_back_disturbs_no_live_worker_and_delays_a_lost_job(
    store: ServiceStore, queue: Queue, clock: Clock, jump: float
) -> None:
    live, _ = store.submit("ann", "plan", "{}")
    clock.now += 1.0
    dead, _ = store.submit("bob", "plan", "{}")
    assert queue.claim("live", LEASE) is not None
    assert queue.claim("dead", LEASE) is not None
    clock.now -= jump
    assert queue.renew(live.id, "live", LEASE) is None
    assert queue.expire() == 0
    clock.now += jump + 2 * LEASE  # what a lost job waits, as the documentation says
    queue.renew(live.id, "live", LEASE)
    assert queue.expire() == 1
    assert found(store, dead).state is State.QUEUED
    later, _ = store.submit("cat", "plan", "{}")
    claimed = {getattr(queue.claim(f"w{i}", LEASE), "id", None) for i in range(3)}
    assert claimed == {dead.id, later.id, None}


def test_jumps_to_and_fro_end_every_job(store: ServiceStore, queue: Queue, clock: Clock) -> None:
    jobs = [store.submit("ann", "plan", str(i))[0] for i in range(6)]
    for jump in (HOUR, -HOUR, 24 * HOUR, -24 * HOUR, 0.0) * (len(LOSS_PAUSES) + 1):
        queue.expire()
        queue.claim(f"lost at {clock.now}", LEASE)
        clock.now += jump
    clock.now += 25 * HOUR
    queue.expire()
    clock.now += max(LOSS_PAUSES)
    while (job := queue.claim("w", LEASE)) is not None:
        queue.finish(job.id, "w", JobEnd(State.OPTIMAL, answer="{}"))
    assert all(found(store, one).has_ended for one in jobs)
    for one in jobs:
        numbers = [event.number for event in store.events(one.id)]
        assert numbers == sorted(set(numbers))


# --- Workers -----------------------------------------------------------------------------------


@contextlib.contextmanager
def working(worker: Worker) -> Iterator[None]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(60.0)
        assert not thread.is_alive()


def ended(store: ServiceStore, job: ServiceJob) -> ServiceJob:
    ends = time.monotonic() + PATIENCE
    while not (one := found(store, job)).has_ended:
        assert time.monotonic() < ends, one
        time.sleep(0.05)
    return one


def test_an_outcome_that_is_told_at_the_last_moment_counts(
    store: ServiceStore, children: Callable[[], set[BaseProcess]], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = processes._received
    silent = iter([True])

    def received(connection: Any, seconds: float) -> Any:
        """Silence, as long as the process has not ended; then what it told."""
        if next(silent, False):
            connection.poll(120.0)
            while children():
                time.sleep(0.02)
            return None
        return heard(connection, seconds)

    monkeypatch.setattr(processes, "_received", received)
    job, _ = store.submit("ann", "jobshop", TWO_JOBS)
    with working(Worker(store, poll_seconds=0.05)):
        assert ended(store, job).state is State.OPTIMAL


def test_a_worker_lives_on_when_no_process_can_be_started(
    store: ServiceStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, refused = SpawnProcess.start, threading.Event()

    def start(process: SpawnProcess) -> None:
        if not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        started(process)

    monkeypatch.setattr(SpawnProcess, "start", start)
    job, _ = store.submit("ann", "jobshop", TWO_JOBS)
    with working(Worker(store, poll_seconds=0.05)):
        assert refused.wait(60.0)
        clock.now += 2 * LEASE
        assert ended(store, job).state is State.OPTIMAL


def test_an_answer_that_the_store_refuses_fails_its_job_alone(
    store: ServiceStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, spoilt = processes._received, iter([True])

    def received(connection: Any, seconds: float) -> Any:
        told = heard(connection, seconds)
        if isinstance(told, JobEnd) and next(spoilt, False):
            return replace(told, reason="half a character: \ud800")
        return told

    monkeypatch.setattr(processes, "_received", received)
    job, _ = store.submit("ann", "jobshop", TWO_JOBS)
    clock.now += 1.0
    other, _ = store.submit("ann", "jobshop", TWO_JOBS.replace("]]]}", ']]], "seed": 1}'))
    with working(Worker(store, poll_seconds=0.05)):
        failed = ended(store, job)
        assert failed.state is State.FAILED
        assert "cannot be stored" in failed.reason
        assert ended(store, other).state is State.OPTIMAL


def test_a_worker_can_be_stopped_while_the_store_does_not_answer(
    store: ServiceStore, children: Callable[[], set[BaseProcess]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def fail(queue: Queue, *told: Any) -> None:
        asked.set()
        raise OperationalError("any", {}, Exception("the server is gone"))

    for name in ("renew", "improve", "finish"):
        monkeypatch.setattr(Queue, name, fail)
    store.submit("ann", "plan", long_request())
    with working(Worker(store, lease_seconds=1.0, poll_seconds=0.05)):
        assert asked.wait(120.0)
    assert not children()


# --- Threads that end or hang --------------------------------------------------------------------


class Answers:
    """A process that tells its answer at once."""

    def look(self, _: float) -> processes.Look:
        return processes.Look(JobEnd(State.OPTIMAL, answer="{}"), None, 0.0)

    def kill(self) -> None:
        """Nothing is left of it."""


def test_a_defect_under_a_job_ends_neither_its_worker_nor_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = iter([True])

    def start(kind: str, request: str) -> Any:
        if next(started, False):
            raise RuntimeError("seeded")
        return Answers()

    with closing(ServiceStore(f"sqlite:///{tmp_path / 'real.sqlite'}")) as store:
        job, _ = store.submit("ann", "jobshop", TWO_JOBS)
        worker = Worker(store, lease_seconds=0.2, look_seconds=0.1, start=start)
        thread = threading.Thread(target=worker.run)
        thread.start()
        ends = time.monotonic() + PATIENCE
        while not found(store, job).has_ended and time.monotonic() < ends:
            time.sleep(0.05)
        worker.stop()
        thread.join(PATIENCE)
        assert found(store, job).state is State.OPTIMAL
        assert worker.silent_seconds() == 0.0
    (told,) = [one for one in caplog.records if one.exc_info]
    as_json = json.loads(Lines(as_json=True).format(told))
    assert as_json["what"] == "a step of a server failed"
    assert "RuntimeError: seeded" in as_json["error"]


# A worker hangs, as when a process is frozen within what it tells. The server may end itself when
# there is a file of that name.
HANGS = """
import os, pathlib, runpy, threading, types
from stagewright.service.http import health, server
from stagewright.service.tracing import Lines
from stagewright.service.workers import processes
health.SILENT_SECONDS = server.SILENT_SECONDS = 0.5
server.os = types.SimpleNamespace(_exit=lambda n: pathlib.Path("may-end").exists() and os._exit(n))
processes.LocalProcess.look = lambda *_: threading.Event().wait()
runpy.run_module("stagewright", run_name="__main__")
"""


def test_a_server_whose_worker_hangs_is_not_live_and_ends(tmp_path: Path) -> None:
    with closing(ServiceStore(f"sqlite:///{tmp_path / 'jobs'}")) as store:
        store.submit("ann", "jobshop", TWO_JOBS)
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, "serve", "--port", "0", "--store", "jobs"], cwd=tmp_path,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as hung:  # fmt: skip
        assert hung.stdout is not None
        url = hung.stdout.readline().split()[-1]
        ends = time.monotonic() + PATIENCE
        while (told := httpx.get(f"{url}/health/live", trust_env=False, timeout=60)).is_success:
            assert time.monotonic() < ends
        assert (told.status_code, told.headers["Retry-After"]) == (503, "60")
        assert "a worker of this server hangs" in told.json()["detail"]
        assert httpx.get(f"{url}/health/ready", trust_env=False, timeout=60).is_success
        (tmp_path / "may-end").touch()
        _, said = hung.communicate(timeout=PATIENCE)
        assert hung.returncode == 1
        assert set(said.splitlines()) == {"a worker hangs: the server ends"}
