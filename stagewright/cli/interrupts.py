"""Ctrl-C and SIGTERM end a search early and keep its best answer."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"
STDERR = 2
STOPPING = b"stagewright: stopping; a second signal ends it immediately\n"


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """A stop token that the first signal sets while the body runs; the second ends the process."""
    stop = threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            _end(number)
        if not sys.stderr.isatty():  # else the progress line says it
            with suppress(OSError):
                os.write(STDERR, STOPPING)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _end(number: int) -> None:
    """End immediately, without waiting for other threads, and restore the terminal."""
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), f"{SHOW_CURSOR}\n".encode())
    os._exit(128 + number)
