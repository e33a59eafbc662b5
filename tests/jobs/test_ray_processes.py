"""Jobs on a Ray cluster: answers, stops, limits, sweeps of tasks, and machines that are lost."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import refused
from planning_jobs import TWO_JOBS, long_request, plan_request
from processes import PATIENCE

pytest.importorskip("sqlalchemy")
pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("fastapi", reason="the service is not installed")

from stagewright.graphs.documents.errors import InputError
from stagewright.service.http.limits import RequestLimits
from stagewright.service.jobs.kinds import parse_request
from stagewright.service.jobs.records import JobEnding, ServiceJob, State, StoppedBy
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.workers.processes import JobProcess, Look, MachineLostError, on_ray
from stagewright.service.workers.worker import JobLimits, Worker

LEASE_SECONDS = 2.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServiceStore]:
    found = ServiceStore(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    yield found
    found.close()


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without CPUs, to which machines are added."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield found
    found.shutdown()


def sweep_request(**changes: object) -> str:
    given = json.loads(plan_request())
    sizes = {"microbatches": [2, 4], "planners": ["dp"]}
    return json.dumps({name: given[name] for name in ("chain", "cluster")} | sizes | changes)


def awaited(store: ServiceStore, job: str, *states: State, attempts: int = 1) -> ServiceJob:
    """The job in one of the states, by default with a plan."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        found = store.get(job)
        assert found is not None
        there = found.state in states or (not states and found.document is not None)
        if there and found.attempts >= attempts:
            return found
        time.sleep(0.05)
    raise AssertionError((found.state, found.reason))


class Gone(JobProcess):
    """A process whose machine is lost the first time, and which then refuses its job."""

    seen = 0

    def look(self, seconds: float) -> Look:
        type(self).seen += 1
        if type(self).seen == 1:
            raise MachineLostError
        return Look(None, 3, 0.0)

    def stop(self) -> None: ...

    def kill(self) -> None: ...


def test_a_lost_machine_leaves_the_job_to_the_lease(store: ServiceStore) -> None:
    job, _ = store.submit("ann", "jobshop", TWO_JOBS)
    worker = Worker(store, lease_seconds=0.5, poll_seconds=0.05, start=lambda *_: Gone())
    thread = threading.Thread(target=worker.run)
    thread.start()
    found = awaited(store, job.id, State.FAILED)
    worker.stop()
    thread.join(PATIENCE)
    assert [one.name for one in store.events(job.id)] == [
        "queued", "solving", "queued", "solving", "failed",
    ]  # fmt: skip
    assert (found.attempts, found.reason) == (2, "its process ended with exit code 3")


def test_sweeps_go_to_ray_only_where_jobs_do() -> None:
    here, there = RequestLimits(), RequestLimits(ray=True)
    asked = parse_request("sweep", sweep_request(engine="ray"))
    there.require_modest(asked)
    with pytest.raises(InputError, match="sweeps of this service run on its own machine"):
        here.require_modest(asked)
    with pytest.raises(InputError, match="connect to no other cluster"):
        there.require_modest(parse_request("sweep", sweep_request(engine="ray", address="a:1")))


def test_options_of_ray_are_refused_in_a_line(tmp_path: Path) -> None:
    options = ["serve", "--store", tmp_path / "jobs.sqlite", "--port", 0]
    assert "--address goes with --engine ray" in refused(*options, "--address", "127.0.0.1:1")
    line = refused(*options, "--engine", "ray", "--address", "127.0.0.1:1")
    assert "no Ray cluster at '127.0.0.1:1'" in line


@pytest.mark.slow
def test_jobs_are_solved_on_a_cluster(store: ServiceStore, cluster: Any) -> None:
    node = cluster.add_node(num_cpus=2)
    with on_ray(cluster.address) as start:
        limits = JobLimits(memory_bytes=2e9)
        worker = Worker(store, limits, lease_seconds=LEASE_SECONDS, poll_seconds=0.05, start=start)
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            _answer(store)
            _sweep(store)
            _stop(store)
            _lose(store, cluster, node)
            _exceed(store, worker)
        finally:
            worker.stop()
            thread.join(PATIENCE)
    assert not thread.is_alive()


def _answer(store: ServiceStore) -> None:
    job, _ = store.submit("ann", "jobshop", TWO_JOBS)
    found = awaited(store, job.id, State.OPTIMAL, State.FAILED)
    assert found.answer is not None, found.reason
    assert json.loads(found.answer)["makespan"] == 6
    wrong, _ = store.submit("ann", "plan", plan_request(planner="none"))
    assert "unknown planner 'none'" in awaited(store, wrong.id, State.FAILED).reason


def _sweep(store: ServiceStore) -> None:
    """Its tasks are on the cluster that its own process is on."""
    job, _ = store.submit("ann", "sweep", sweep_request(engine="ray"))
    found = awaited(store, job.id, State.OPTIMAL, State.FAILED)
    assert found.answer is not None, found.reason
    rows = json.loads(found.answer)["rows"]
    assert [row["status"] for row in rows] == ["feasible"] * 2


def _stop(store: ServiceStore) -> None:
    job, _ = store.submit("ann", "plan", long_request())
    awaited(store, job.id)
    store.ask(job.id, JobEnding.STOP)
    found = awaited(store, job.id, State.FEASIBLE, State.FAILED)
    assert (found.state, found.stopped_by) == (State.FEASIBLE, StoppedBy.USER)
    other, _ = store.submit("ann", "plan", long_request(seed=1))
    awaited(store, other.id)
    store.ask(other.id, JobEnding.ABORT)
    assert awaited(store, other.id, State.FAILED).stopped_by is StoppedBy.USER


def _lose(store: ServiceStore, cluster: Any, node: Any) -> None:
    """The job of a machine that is gone is queued again, and is solved on another one."""
    job, _ = store.submit("ann", "plan", long_request(seed=2))
    awaited(store, job.id)
    cluster.add_node(num_cpus=2)
    cluster.remove_node(node, allow_graceful=False)
    awaited(store, job.id, State.SOLVING, attempts=2)
    store.ask(job.id, JobEnding.STOP)
    assert awaited(store, job.id, State.FEASIBLE).attempts == 2


def _exceed(store: ServiceStore, worker: Worker) -> None:
    worker.limits = JobLimits(memory_bytes=1e6)
    job, _ = store.submit("ann", "plan", long_request(seed=3))
    found = awaited(store, job.id, State.FEASIBLE, State.FAILED)
    assert found.stopped_by is StoppedBy.MEMORY
