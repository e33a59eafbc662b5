"""What all tests may ask for."""

import gc
import os
import secrets
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings  # noqa: TID251
from kernels import compile_together
from profiles import QUICK, REAL_FOLDERS, by_profile, leave_a_cover, mark_real
from ranks import Ranks
from searches import SHORT, searches, usual

# Before torch is imported. Threads of several workers would wait for each other by spinning, and
# would make sums in another order than ranks do, which have one.
os.environ["OMP_NUM_THREADS"] = "1"
# Before Ray is: clusters of tests take nobody else, as those that commands start.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

settings.load_profile(QUICK)  # --hypothesis-profile nightly, which is read later, overrides it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_a_cover(items)
    mark_real(items)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders of real processes, whose imports take seconds, are not read for other tests."""
    return (
        True
        if collection_path.name in REAL_FOLDERS and "not real" in config.option.markexpr
        else None
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay until the end: collections of garbage need not look through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker whether the run is one of all quick tests, which call most kernels."""
    whole = node.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    node.workerinput["whole"] = whole and "not real" in node.config.option.markexpr


def pytest_sessionstart(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", {})
    if worker.get("whole"):
        locks = session.config.rootpath / "build" / "kernels"
        compile_together(int(worker["workerid"].removeprefix("gw")), locks)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from distribution import SharedFixtures

    return SharedFixtures(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[bool]:
    """Short searches, but for tests of real processes, whose searches are those of users."""
    is_short = by_profile(True, False) and item.get_closest_marker("real") is None
    with searches(SHORT if is_short else {}):
        return (yield)


@pytest.fixture
def usual_searches() -> Iterator[None]:
    """Local searches go on for as long as they do for users."""
    with searches(usual()):
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four gloo processes; see :class:`ranks.Ranks`."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed; pip install 'stagewright[executor]'")
    with Ranks() as pool:
        yield pool
