"""Sweeps leave no process behind; servers and jobs that are killed lose nothing."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from killed_service import Kills, Served, require_free, require_kept, serving, submitting
from planning_jobs import long_request
from postgres import postgres_server
from processes import PATIENCE, descendants, job_processes, seconds_until_gone

from benchmarks import service, service_faults, service_week
from stagewright.client import Client
from stagewright.graphs.documents.errors import InputError
from stagewright.service.http.limits import RequestLimits
from stagewright.service.pipelines.sweeping import SweepRequest

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")


def sweep(**changes: Any) -> str:
    """A sweep of plans that are searched for until they are stopped, two at a time."""
    given = json.loads(long_request())
    names = ("chain", "cluster", "time_limit")
    kept = {name: given[name] for name in names} | {"planners": ["general"], "workers": 2}
    return json.dumps(kept | {"microbatches": [8, 12, 16]} | changes)


def test_a_sweep_has_no_more_processes_than_a_search_has_threads() -> None:
    most = RequestLimits().threads
    RequestLimits().require_modest(SweepRequest.parse(sweep(workers=most)))
    with pytest.raises(InputError, match=f"workers: at most {most} here, got {most + 1}"):
        RequestLimits().require_modest(SweepRequest.parse(sweep(workers=most + 1)))


def of_a_sweep(served: Served) -> tuple[set[int], int]:
    """The processes of the running sweep, and the one that started the others."""
    ends = time.monotonic() + PATIENCE
    while len(found := job_processes(served.pid)) < 3:
        assert time.monotonic() < ends, found
        time.sleep(0.05)
    [leader] = [one for one in found if descendants(one) & found]
    return descendants(leader) | {leader}, leader


@pytest.mark.slow
@pytest.mark.parametrize("what", ["server", "leader", "aborted"])
def test_no_process_of_a_sweep_stays(tmp_path: Path, what: str) -> None:
    store = str(tmp_path / "jobs.sqlite")
    with serving(store, tmp_path, workers=1) as served, Client(served.url) as client:
        job = client.submit("sweep", sweep()).id
        started, leader = of_a_sweep(served)
        if what == "server":
            served.kill()
        elif what == "leader":
            os.kill(leader, signal.SIGKILL)
            assert client.wait(job, PATIENCE).stopped_by == "lost"
        else:
            client.abort(job)
            assert client.wait(job, PATIENCE).stopped_by == "user"
        seconds_until_gone(started)


pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")


def test_nothing_is_lost_when_servers_and_jobs_are_killed(tmp_path: Path) -> None:
    path, own, kills = tmp_path / "jobs.sqlite", random.Random(3), Kills()
    with serving(str(path), tmp_path) as served:
        with submitting([served.url], clients=1, pause=0.8, small=True) as accepted:
            for what in ("job", "server"):
                time.sleep(own.uniform(0.5, 1.5))
                kills.one(served, what, lambda: require_free(path))
        require_kept(served.url, accepted)
    assert accepted.jobs
    require_free(path)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["restarted", "killed"])
def test_nothing_is_lost_by_faults_of_two_servers(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_faults, "RESTARTS", 4)
    monkeypatch.setattr(service_faults, "KILLS", 8)
    with postgres_server() as server:
        found = service_faults.faulty(server.new_database(), getattr(service_faults, fault), 2)
    assert found["accepted"]
    assert (found["lost"], found["twice"]) == (0, 0)


@pytest.mark.slow
def test_equal_users_have_their_jobs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "USERS", 20)
    monkeypatch.setattr(service, "EACH", 5)
    with postgres_server() as server:
        found = service.taken(server.new_database())
    assert (found["users"], found["jobs"]) == (20, 100)
    assert (found["lost"], found["twice"], found["failed"]) == (0, 0, 0)


@pytest.mark.slow
def test_a_week_with_retention_keeps_the_jobs_of_its_last_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_week, "MINUTES", 0.5)
    week = service_week.lived(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    late = [one for one in week.samples if one.days > 3.0]
    assert week.done["submitted"] > 2 * max(one.jobs for one in late)
    assert max(one.files for one in late) < 100
