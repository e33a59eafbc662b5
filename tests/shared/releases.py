"""Releases of frameworks that tests read our exports with, where they are installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import pytest


def require_release(package: str, release: str) -> None:
    """Skip unless ``package`` is installed in ``release`` (its first numbers)."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    if found.split(".")[: release.count(".") + 1] != release.split("."):
        pytest.skip(f"needs {package} {release}, installed is {found}")


@contextmanager
def alone(rank: int, count: int) -> Iterator[None]:
    """This process as a rank of a job, where communication does nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
