"""The service as people run it: the command, its clients, and its end."""

import asyncio
import signal
from pathlib import Path

import pytest
from commands import answered, refused
from planning_jobs import TWO_JOBS, long_request
from plans import small_problem
from processes import PATIENCE
from served import served

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from stagewright.client import AsyncClient, Client, ServiceError


def test_both_clients_get_plans_of_a_server(tmp_path: Path) -> None:
    problem = small_problem(layers=3, devices=2)
    asked = {"microbatches": 2, "time_limit": 2.0}

    async def ask(url: str) -> None:
        async with AsyncClient(url) as client:
            job = await client.submit("jobshop", TWO_JOBS)
            assert (await client.wait(job.id)).state == "optimal"
            assert (await client.answer(job.id)).json_object()["makespan"] == 6
            names = [one.name async for one in client.events(job.id)]
            assert (names[0], names[-1]) == ("queued", "optimal")
            with pytest.raises(ServiceError, match="the job has ended"):
                await client.stop(job.id)

    with served(tmp_path) as (url, process), Client(url) as client:
        job = client.plan(problem.chain, problem.cluster, key="once", **asked)
        again = client.plan(problem.chain, problem.cluster, key="once", **asked)
        assert again.id == job.id
        found = client.wait(job.id, PATIENCE)
        assert found.state in ("optimal", "feasible")
        plan = client.document(job.id)
        assert plan.certificate.cost_seconds == found.cost
        assert client.answer(job.id).plan == plan
        assert next(one.name for one in client.events(job.id)) == "queued"
        with pytest.raises(ServiceError, match="microbatches must be at least 1") as refusal:
            client.plan(problem.chain, problem.cluster, microbatches=0)
        assert refusal.value.status == 422
        asyncio.run(ask(url))
    assert process.returncode == 0


@pytest.mark.slow
def test_a_server_that_ends_keeps_the_best_plan_of_its_job(tmp_path: Path) -> None:
    ended = served(tmp_path, number=signal.SIGTERM)
    with ended as (url, process), Client(url) as client:
        job = client.submit("plan", long_request()).id
        while not client.job(job).has_document:
            pass
    assert process.returncode == 0
    with served(tmp_path, "--workers", "0") as (url, _), Client(url) as client:
        found = client.job(job)
        assert (found.state, found.stopped_by) == ("feasible", "lost")
        assert client.document(job).stages


def test_others_are_served_only_with_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "make one first" in refused("serve", "--host", "0.0.0.0", "--port", 0)
    assert "--rate must be more than 0" in refused("serve", "--rate", 0)
    assert "--port" in refused("serve", "--port", 99999)
    assert "--workers" in refused("serve", "--workers", -1)
    assert "--memory-limit must be at least 100MB" in refused("serve", "--memory-limit", "8MB")
    hook = ("serve", "--webhook-origin", "https://ci.example.com")
    assert "set STAGEWRIGHT_WEBHOOK_SECRET" in refused(*hook)
    assert "--scope 'all' must be one of read" in refused("token", "ann", "--scope", "all")
    token = answered("token", "ann", "--scope", "submit").strip()
    with served(tmp_path) as (url, _):
        with Client(url) as nobody, pytest.raises(ServiceError, match="a token is needed"):
            nobody.job("x")
        with Client(url, token) as client, pytest.raises(ServiceError, match="there is no job"):
            client.job("x")
    assert answered("token", "ann", "--revoke").strip() == "1 token deleted"
