"""Jobs are stopped at once: behind a full queue, after a loss of memory, and no others with them.

What went wrong so in SkyPilot's job queue.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from planning_jobs import TWO_JOBS, long_request
from processes import PATIENCE, holders, job_processes, open_files

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

import httpx
from killed_service import Served, serving

from stagewright.client import Client, JobState, ServiceError
from stagewright.service.jobs.rows import CONNECTIONS

STREAMS = 1000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("cancelling")
    with serving(str(folder / "jobs.sqlite"), folder, workers=1) as found:
        yield found


def begun(client: Client, job: str) -> JobState:
    """The job when it has a plan."""
    while not (found := client.job(job)).has_document:
        assert not found.has_ended, found
        time.sleep(0.05)
    return found


def test_stops_are_heard_behind_a_full_queue(served: Served) -> None:
    with Client(served.url) as client:
        running = client.submit("plan", long_request(seed=1)).id
        queued = [client.submit("plan", long_request(seed=n)).id for n in range(2, 20)]
        begun(client, running)
        stopped = client.stop(queued[-1])
        assert (stopped.state, stopped.stopped_by) == ("failed", "user")
        assert client.job(queued[0]).state == "queued"
        for prefix in (queued[0][:8], queued[0][:31], queued[0] + "0", queued[0].upper(), "%"):
            with pytest.raises(ServiceError) as refusal:
                client.stop(prefix)
            assert refusal.value.status in (404, 422)
        assert client.job(queued[0]).state == "queued"
        assert client.job(running).state == "solving"
        for job in queued[1:-1]:
            assert client.stop(job).state == "failed"
        client.stop(running)
        found = client.wait(running, PATIENCE)
        assert (found.state, found.stopped_by) == ("feasible", "user")
        assert client.document(running).stages
        client.abort(queued[0])
        assert client.wait(queued[0], PATIENCE).stopped_by == "user"


@pytest.mark.slow
def test_a_job_that_was_killed_for_its_memory_is_stopped_and_tried_again(tmp_path: Path) -> None:
    store = str(tmp_path / "jobs.sqlite")
    limit = ("--memory-limit", "100MB")
    with serving(store, tmp_path, workers=1, options=limit) as served, Client(served.url) as client:
        job = client.submit("jobshop", TWO_JOBS).id
        found = client.wait(job, PATIENCE)
        assert (found.state, found.stopped_by) == ("failed", "memory")
        with pytest.raises(ServiceError, match="the job has ended"):
            client.stop(job)
        other = client.submit("jobshop", TWO_JOBS.replace("]]]}", ']]], "seed": 1}')).id
        assert client.wait(other, PATIENCE).stopped_by == "memory"  # the worker lives
        assert not job_processes(served.pid)
    with serving(store, tmp_path, workers=1) as served, Client(served.url) as client:
        httpx.post(f"{served.url}/v1/jobs/{job}/retry", timeout=PATIENCE).raise_for_status()
        assert client.wait(job, PATIENCE).state == "optimal"
        assert client.job(other).state == "failed"


@pytest.mark.slow
def test_a_killed_server_leaves_nobody_at_the_database(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    with serving(str(path), tmp_path) as served, Client(served.url) as client:
        begun(client, client.submit("plan", long_request()).id)
        assert holders(path) == {served.pid}  # not the processes of jobs
        served.kill()
        assert not holders(path)


@pytest.mark.slow
def test_a_thousand_streams_leave_room_for_others(tmp_path: Path) -> None:
    with serving(str(tmp_path / "jobs.sqlite"), tmp_path, workers=0) as served:
        asyncio.run(_stream_and_work(served))
        assert "Traceback" not in served.errors


async def _stream_and_work(served: Served) -> None:
    limits = httpx.Limits(max_connections=None)
    patience = httpx.Timeout(PATIENCE)
    async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=patience) as client:
        job = (await client.post("/v1/jobshop", content=TWO_JOBS)).json()["id"]
        before, opened = open_files(served.pid), Counter[str]()
        streams = [asyncio.create_task(_names(client, job, opened)) for _ in range(STREAMS)]
        while opened["queued"] < STREAMS:
            await asyncio.sleep(0.1)
        for number in range(20):
            text = json.dumps(json.loads(TWO_JOBS) | {"seed": number})
            new = (await client.post("/v1/jobshop", content=text)).raise_for_status().json()
            (await client.get(f"/v1/jobs/{new['id']}")).raise_for_status()
        (await client.get("/health/ready")).raise_for_status()
        (await client.delete(f"/v1/jobs/{job}")).raise_for_status()
        for names in await asyncio.gather(*streams):
            assert names == ["queued", "failed"]
    ends = time.monotonic() + PATIENCE
    while open_files(served.pid) > before + 3 * CONNECTIONS:  # SQLite opens three files for each
        assert time.monotonic() < ends, open_files(served.pid)
        await asyncio.sleep(0.1)


async def _names(client: httpx.AsyncClient, job: str, opened: Counter[str]) -> list[str]:
    """The names of a stream's events."""
    names = []
    async with client.stream("GET", f"/v1/jobs/{job}/events") as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
                opened[names[-1]] += 1
    return names
