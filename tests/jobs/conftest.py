"""Databases of stores: SQLite, and a real PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from postgres import PostgreSQL, postgres_server

if TYPE_CHECKING:
    from stagewright.service.jobs.store import ServiceStore


@pytest.fixture
def store(tmp_path: Path) -> "Iterator[ServiceStore]":
    """A store of SQLite; tests that also run on PostgreSQL have their own."""
    from stagewright.service.jobs.store import ServiceStore

    found = ServiceStore(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    yield found
    found.close()


@pytest.fixture(scope="session")
def server() -> Iterator[PostgreSQL]:
    with postgres_server() as found:
        yield found


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    return request.getfixturevalue("server").new_database()
