"""Processes as ``/proc`` tells of them, commands in a terminal, and a disk that is full soon."""

import contextlib
import multiprocessing
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

PATIENCE = 600.0  # seconds, on a busy machine that compiles its kernels first


def started_from_now_on() -> Callable[[], set[BaseProcess]]:
    """Tells which processes this one has started since, and still run: not those of other tests."""
    others = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - others


def is_alive(pid: int) -> bool:
    """Whether there is such a process that still runs: one that has ended may await its parent."""
    return _state(pid)[0] not in ("", "Z", "X")


def descendants(pid: int) -> set[int]:
    """The processes that one started, and those that these started."""
    parents = {one: _state(one)[1] for one in _pids()}
    found, new = set[int](), {pid}
    while new:
        new = {one for one, parent in parents.items() if parent in new} - found
        found |= new
    return found


def job_processes(pid: int) -> set[int]:
    """Those descendants that answer jobs."""
    return {one for one in descendants(pid) if b"spawn_main" in _command(one)}


def holders(path: Path) -> set[int]:
    """The processes that have the file open, or one beside it whose name begins with its name."""
    found = set()
    for pid in _pids():
        with contextlib.suppress(OSError):
            for one in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(one.readlink()).startswith(str(path)):
                        found.add(pid)
    return found


def seconds_until_gone(pids: set[int]) -> float:
    """How long it takes until none of them is alive; AssertionError if one stays."""
    began = time.monotonic()
    while left := {one for one in pids if is_alive(one)}:
        assert time.monotonic() - began < PATIENCE, f"still there: {left}"
        time.sleep(0.02)
    return time.monotonic() - began


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return 1024 * int(_status(pid, "VmRSS"))


def threads(pid: int) -> int:
    """Its threads."""
    return int(_status(pid, "Threads"))


def open_files(pid: int) -> int:
    """Its open files and sockets."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _status(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


def _pids() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal()]


def _state(pid: int) -> tuple[str, int]:
    """Its state and its parent."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def in_a_terminal(arguments: list[str]) -> tuple[subprocess.Popen[bytes], list[str]]:
    """A real process whose standard error is a pseudo-terminal, and what that shows so far."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "stagewright", *arguments],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(theirs)
    shown: list[str] = []

    def read() -> None:
        with suppress(OSError):  # the process has ended
            while data := os.read(ours, 4096):
                shown.append(data.decode(errors="replace"))

    threading.Thread(target=read, daemon=True).start()
    return process, shown


def wait_for(shown: list[str], pattern: str) -> str:
    """What is shown once ``pattern`` is there."""
    ends = time.monotonic() + PATIENCE
    while not re.search(pattern, "".join(shown)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert re.search(pattern, "".join(shown)), "".join(shown)[-2000:]
    return "".join(shown)


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
