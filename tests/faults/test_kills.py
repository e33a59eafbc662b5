"""Servers and processes of jobs that are killed at random moments lose nothing."""

import random
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from killed_service import Kills, require_free, require_kept, serving, submitting


def test_nothing_is_lost_when_servers_and_jobs_are_killed(tmp_path: Path) -> None:
    path, own, kills = tmp_path / "jobs.sqlite", random.Random(3), Kills()
    with serving(str(path), tmp_path) as served:
        with submitting(served.url, clients=1, pause=0.8, small=True) as accepted:
            for what in ("job", "server"):
                time.sleep(own.uniform(0.5, 1.5))
                kills.one(served, what, lambda: require_free(path))
        require_kept(served.url, accepted)
    assert accepted.jobs
    require_free(path)
