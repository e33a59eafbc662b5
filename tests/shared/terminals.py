"""Commands in a terminal, and what it shows."""

import os
import pty
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress

from processes import PATIENCE


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
