"""Ctrl-C and SIGTERM end a search early and keep its best answer; a second one ends any command."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"
_STDERR = 2
_STOPPING = b"stagewright: stopping; a second signal ends it immediately\n"


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """A stop token that the first signal sets while the body runs; the second ends the process."""
    stop = threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        _let_the_next_end()
        with suppress(OSError):
            # On a terminal, the progress line says it; the next signal leaves no time for the rest.
            os.write(_STDERR, _SHOW_CURSOR if sys.stderr.isatty() else _STOPPING)
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


def interrupt_once() -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt, as Python does, and the second end at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        _let_the_next_end()
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)


def _let_the_next_end() -> None:
    """Let the kernel end this process at the next signal.

    A handler of Python would wait for a library that computes.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
