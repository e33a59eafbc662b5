"""A pytest plugin: CPU seconds of every test, as lines of ``build/durations/WORKER.csv``."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path("build/durations")
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[bool]:
    """Seconds of this process and of child processes that have ended; fixtures count as well."""
    start = _seconds()
    try:
        return (yield)
    finally:
        FOLDER.mkdir(parents=True, exist_ok=True)
        suite = "real" if item.get_closest_marker("real") else "quick"
        with (FOLDER / f"{WORKER}.csv").open("a", encoding="utf-8") as file:
            file.write(f"{suite},{item.nodeid.partition('::')[0]},{_seconds() - start:.2f}\n")


def _seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
