"""A disk that is full soon."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = 4096  # what a file takes at least


@contextmanager
def small_disk(folder: Path, pages: int) -> Iterator[None]:
    """A file system in memory at ``folder``, of so many pages; skips where none may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={pages * PAGE}", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system may be mounted here: {error}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def pages_of(folder: Path) -> int:
    """The pages that the files of ``folder`` take."""
    return sum(-(-path.stat().st_size // PAGE) for path in folder.rglob("*") if path.is_file())
