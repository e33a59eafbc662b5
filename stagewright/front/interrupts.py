"""A search that is ended by hand, in a notebook or an interactive session."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stagewright.formulations.forms.answers import StopToken


@contextmanager
def stopped_by_hand(given: StopToken | None) -> Iterator[StopToken | None]:
    """The ``given`` token; without one, in an interactive session, one that Ctrl-C sets.

    A second Ctrl-C raises KeyboardInterrupt.
    """
    is_ours = (
        given is None
        and hasattr(sys, "ps1")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield given
        return
    stop = threading.Event()

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
