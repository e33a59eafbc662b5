"""Servers and processes of jobs that are killed, or restarted, at random moments lose nothing."""

import random
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from killed_service import Kills, require_free, require_kept, serving, submitting
from postgres import postgres_server

from benchmarks import service, service_faults, service_week


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
