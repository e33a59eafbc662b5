"""Jobs on a Ray cluster: answers, stops, limits, sweeps of tasks, and machines that are lost."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import refused
from planning_jobs import TWO_JOBS, long_request, plan_request
from processes import PATIENCE

pytest.importorskip("sqlalchemy")
pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("fastapi", reason="the service is not installed")

from stagewright.executor.clusters.ray_ranks import connected
from stagewright.graphs.documents.errors import InputError
from stagewright.service.http.limits import RequestLimits
from stagewright.service.jobs.kinds import parse_request
from stagewright.service.jobs.queue import MOST_ATTEMPTS
from stagewright.service.jobs.records import JobEnding, ServiceJob, State, StoppedBy
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.workers.processes import JobProcess, Look, MachineLostError, on_ray
from stagewright.service.workers.worker import JobLimits, Worker

LEASE_SECONDS = 2.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without CPUs, to which machines are added."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield found
    found.shutdown()


STRANGER = """
import ray, sys
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print("connected", ray.nodes()[0]["Alive"])
"""
OWNER = f"""
import os, subprocess, sys
from stagewright.executor.clusters.ray_ranks import connected
with connected({{}}, None) as ray:
    address = ray.get_runtime_context().gcs_address
    own = dict(os.environ)
    others = {{name: value for name, value in own.items() if not name.startswith("RAY_AUTH")}}
    wrong = own | {{"RAY_AUTH_TOKEN": "0" * 64}}
    for environment in (own, others, wrong):
        command = [sys.executable, "-c", {STRANGER!r}, address]
        print(subprocess.run(command, env=environment, capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
def test_a_cluster_that_is_started_here_takes_nobody_without_its_token() -> None:
    """Ray listens at every address, whatever it is told."""
    environment = {name: value for name, value in os.environ.items() if "RAY" not in name}
    run = subprocess.run(
        [sys.executable, "-c", OWNER], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["connected", "True"]


def test_ray_without_tokens_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))  # type: ignore[arg-type]
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(InputError, match="set RAY_AUTH_MODE=token before"), connected({}, None):
        pass


def sweep_request(**changes: object) -> str:
    given = json.loads(plan_request())
    sizes = {"microbatches": [2, 4], "planners": ["dp"]}
    return json.dumps({name: given[name] for name in ("chain", "cluster")} | sizes | changes)


def awaited(store: ServiceStore, job: str, *states: State, losses: int = 0) -> ServiceJob:
    """The job in one of the states, by default with a plan."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        found = store.get(job)
        assert found is not None
        there = found.state in states or (not states and found.document is not None)
        if there and found.losses >= losses:
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
        "queued", "solving", *["queued", "solving"] * MOST_ATTEMPTS, "failed",
    ]  # fmt: skip
    assert (found.losses, found.attempts) == (1, MOST_ATTEMPTS)
    assert found.reason == "its process ended with exit code 3"


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
    awaited(store, job.id, State.SOLVING, losses=1)
    store.ask(job.id, JobEnding.STOP)
    assert awaited(store, job.id, State.FEASIBLE).losses == 1


def _exceed(store: ServiceStore, worker: Worker) -> None:
    worker.limits = JobLimits(memory_bytes=1e6)
    job, _ = store.submit("ann", "plan", long_request(seed=3))
    found = awaited(store, job.id, State.FEASIBLE, State.FAILED)
    assert found.stopped_by is StoppedBy.MEMORY
