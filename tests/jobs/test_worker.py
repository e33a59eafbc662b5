"""Workers and the processes of jobs: answers, stops, limits, and what is left of the killed."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from planning_jobs import TWO_JOBS, long_request, plan_request
from processes import PATIENCE, started_from_now_on

pytest.importorskip("sqlalchemy")

from sqlalchemy.exc import OperationalError

from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents import documents
from stagewright.service.jobs.queue import MOST_ATTEMPTS, Queue, QueueRules
from stagewright.service.jobs.records import JobEnding, ServiceJob, State, StoppedBy
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.workers import processes
from stagewright.service.workers.processes import _resident_bytes
from stagewright.service.workers.worker import JobLimits, Worker

Children = Callable[[], set[BaseProcess]]


@contextmanager
def working(
    store: ServiceStore, limits: JobLimits | None = None, rules: QueueRules | None = None
) -> Iterator[Worker]:
    given = limits or JobLimits(), rules or QueueRules()
    worker = Worker(store, *given, lease_seconds=2.0, poll_seconds=0.05)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def awaited(store: ServiceStore, job: str, what: Callable[[ServiceJob], bool]) -> ServiceJob:
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        found = store.get(job)
        assert found is not None
        if what(found):
            return found
        time.sleep(0.05)
    raise AssertionError(found)


def ended(store: ServiceStore, job: str) -> ServiceJob:
    return awaited(store, job, lambda one: one.has_ended)


def begun(store: ServiceStore, job: str) -> ServiceJob:
    """The job when it has a plan."""
    return awaited(store, job, lambda one: one.document is not None)


@pytest.fixture
def children() -> Children:
    return started_from_now_on()


def test_jobs_of_different_kinds_are_answered(store: ServiceStore, children: Children) -> None:
    plan, _ = store.submit("ann", "plan", plan_request())
    shop, _ = store.submit("ann", "jobshop", TWO_JOBS)
    wrong, _ = store.submit("ann", "plan", plan_request(planner="no such planner"))
    with working(store):
        found = ended(store, plan.id)
        assert found.state in (State.OPTIMAL, State.FEASIBLE)
        assert found.document is not None
        made = documents.parse(PipelinePlan, found.document, "plan")
        assert made.certificate.cost_seconds == found.cost
        assert json.loads(found.answer)["cost_seconds"] == found.cost
        solved = ended(store, shop.id)
        assert (solved.state, json.loads(solved.answer)["makespan"]) == (State.OPTIMAL, 6)
        refused = ended(store, wrong.id)
        assert refused.state is State.FAILED
        assert "unknown planner 'no such planner'" in refused.reason
    assert children() == set()


def test_a_stopped_job_keeps_its_best_plan_and_an_aborted_one_has_none(
    store: ServiceStore, children: Children
) -> None:
    job, _ = store.submit("ann", "plan", long_request())
    other, _ = store.submit("ann", "plan", long_request(seed=1))
    with working(store):
        begun(store, job.id)
        store.ask(job.id, JobEnding.STOP)
        found = ended(store, job.id)
        assert (found.state, found.stopped_by) == (State.FEASIBLE, StoppedBy.USER)
        assert found.document is not None
        begun(store, other.id)
        store.ask(other.id, JobEnding.ABORT)
        found = ended(store, other.id)
        assert (found.state, found.stopped_by) == (State.FAILED, StoppedBy.USER)
    assert children() == set()


def test_a_killed_process_leaves_its_best_plan(store: ServiceStore, children: Children) -> None:
    job, _ = store.submit("ann", "plan", long_request())
    with working(store):
        begun(store, job.id)
        for attempt in range(1, MOST_ATTEMPTS + 1):
            tried = awaited(store, job.id, lambda one, now=attempt: one.attempts == now)
            assert tried.document is not None
            awaited(store, job.id, lambda _: bool(children()))
            for process in children():
                process.kill()
        found = ended(store, job.id)
    assert (found.state, found.stopped_by) == (State.FEASIBLE, StoppedBy.LOST)
    assert found.document is not None
    assert "exit code -9" in found.reason
    assert children() == set()


def test_a_job_with_a_plan_gives_way_to_one_without_and_goes_on(
    store: ServiceStore, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagewright.service.jobs.queue._LOOKED_SECONDS", 0.0)
    long, _ = store.submit("ann", "plan", long_request(), limit_seconds=600.0)
    with working(store, rules=QueueRules(preempt_seconds=0.5)):
        begun(store, long.id)
        short, _ = store.submit("bob", "jobshop", TWO_JOBS)
        assert ended(store, short.id).state is State.OPTIMAL
        again = awaited(store, long.id, lambda one: one.state is State.SOLVING)
        assert again.document is not None
        assert again.attempts == 1
        assert 0.0 < again.spent_seconds < 600.0
        store.ask(long.id, JobEnding.STOP)
        assert ended(store, long.id).state is State.FEASIBLE
    names = [one.name for one in store.events(long.id) if one.name != "progress"]
    assert names == ["queued", "solving", "queued", "solving", "asked", "feasible"]
    assert children() == set()


def test_a_stopped_worker_gives_its_job_back(store: ServiceStore, children: Children) -> None:
    """The next one finds the best plan so far; neither counts as an attempt."""
    job, _ = store.submit("ann", "plan", long_request())
    for _ in range(2):
        with working(store) as worker:
            begun(store, job.id)
            awaited(store, job.id, lambda one: one.state is State.SOLVING)
            worker.stop(0.2)
        found = store.get(job.id)
        assert found is not None
        assert (found.state, found.attempts) == (State.QUEUED, 0)
        assert found.document is not None
        assert children() == set()


def test_a_worker_that_drains_ends_its_job_and_begins_no_other(store: ServiceStore) -> None:
    shop, _ = store.submit("ann", "jobshop", TWO_JOBS)
    with working(store) as worker:
        awaited(store, shop.id, lambda one: one.state is State.SOLVING)
        later, _ = store.submit("ann", "plan", plan_request())
        worker.stop(PATIENCE)
        assert ended(store, shop.id).state is State.OPTIMAL
    waiting = store.get(later.id)
    assert waiting is not None
    assert waiting.state is State.QUEUED


def test_a_job_that_the_kernel_kills_for_memory_says_so(
    store: ServiceStore, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([0, *[1] * 1000])
    monkeypatch.setattr(processes, "_kills_for_memory", lambda: next(kills))
    job, _ = store.submit("ann", "plan", long_request())
    with working(store, JobLimits(memory_bytes=3e9)):
        awaited(store, job.id, lambda _: bool(children()))
        for process in children():
            process.kill()
        found = ended(store, job.id)
    assert (found.state, found.stopped_by, found.attempts) == (State.FAILED, StoppedBy.MEMORY, 1)
    assert "killed for lack of memory" in found.reason
    assert "may have 3e+09 (serve --memory-limit)" in found.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "by"),
    [
        (JobLimits(seconds=8.0, grace_seconds=5.0), StoppedBy.TIME),
        (JobLimits(memory_bytes=2e7), StoppedBy.MEMORY),
    ],
)
def test_limits_end_a_job(
    store: ServiceStore, children: Children, limits: JobLimits, by: StoppedBy
) -> None:
    job, _ = store.submit("ann", "plan", long_request())
    with working(store, limits):
        found = ended(store, job.id)
        assert found.stopped_by is by
    assert children() == set()


def test_the_memory_of_a_process_is_that_of_all_that_it_started() -> None:
    child = "held = bytes(range(256)) * 400_000; print(flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{child}'])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        held = _resident_bytes(process.pid)
        process.communicate(b"\n")
    assert 1e8 < held < 2e8
    assert _resident_bytes(process.pid) == 0.0


@pytest.mark.slow
def test_a_killed_worker_leaves_no_process_and_another_takes_its_job(
    store: ServiceStore, tmp_path: Path
) -> None:
    job, _ = store.submit("ann", "plan", long_request())
    program = (
        "import sys; from stagewright.service.jobs.store import ServiceStore; "
        "from stagewright.service.workers.worker import Worker; "
        "Worker(ServiceStore(sys.argv[1]), lease_seconds=2.0).run()"
    )
    url = f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    other = subprocess.Popen([sys.executable, "-c", program, url])
    begun(store, job.id)
    grandchildren = subprocess.run(
        ["pgrep", "-P", str(other.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    assert grandchildren
    other.kill()
    other.wait()
    ends = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{pid}").exists() for pid in grandchildren):
        assert time.monotonic() < ends
        time.sleep(0.1)
    with working(store):
        again = awaited(store, job.id, lambda one: one.losses == 1 and one.state is State.SOLVING)
        assert again.document is not None  # the best plan of the first worker
        store.ask(job.id, JobEnding.STOP)
        assert ended(store, job.id).state is State.FEASIBLE


@pytest.mark.slow
def test_a_store_that_does_not_answer_for_a_while_ends_no_worker(
    store: ServiceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter(range(2))
    renewed = Queue.renew

    def renew(queue: Queue, *lease: Any) -> JobEnding | None:
        if next(failures, None) is not None:
            raise OperationalError("renew", {}, Exception("the server is restarted"))
        return renewed(queue, *lease)

    monkeypatch.setattr(Queue, "renew", renew)
    job, _ = store.submit("ann", "plan", long_request())
    with working(store):
        begun(store, job.id)
        store.ask(job.id, JobEnding.STOP)
        assert ended(store, job.id).state is State.FEASIBLE
    assert next(failures, None) is None  # the store had failed


@pytest.mark.slow
def test_once_all_kernels_are_compiled_no_kind_of_job_compiles_any(tmp_path: Path) -> None:
    """As in an image: built by one process, for any CPU, and used by others."""
    code = "from stagewright.service.workers.kernels import compile_all; print(compile_all())"
    kept = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": "generic"}
    command = [sys.executable, "-c", code]
    first, again = (
        subprocess.run(command, env=kept, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    )
    assert int(first) > 100
    assert int(again) == 0
