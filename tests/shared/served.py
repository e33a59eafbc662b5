"""The service as people run it: the command, in a process of its own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import PATIENCE


@contextmanager
def served(
    folder: Path, *options: str, number: int = signal.SIGINT
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server at a free port, in a process of its own; its address."""
    command = [sys.executable, "-m", "stagewright", "serve", "--port", "0", *options]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        told = re.fullmatch(r"serving at (http://\S+)\n", process.stdout.readline())
        assert told is not None
        try:
            yield told[1], process
        finally:
            process.send_signal(number)
            process.wait(PATIENCE)
