"""Sweeps start processes of their own: as many as are allowed, and none stays."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from planning_jobs import long_request
from processes import PATIENCE, descendants, job_processes, seconds_until_gone

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from killed_service import Served, serving

from stagewright.client import Client
from stagewright.graphs.documents.errors import InputError
from stagewright.service.http.limits import RequestLimits
from stagewright.service.pipelines.sweeping import SweepRequest


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
