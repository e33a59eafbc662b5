"""Calls of solver libraries that end early when the stop token is set."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from stagewright.formulations.forms.answers import Limits

T = TypeVar("T")

LOOK_SECONDS = 0.1  # interval between checks of the stop token


def run_stoppable(call: Callable[[], T], halt: Callable[[], object], limits: Limits) -> T:
    """The result of ``call``, which ``halt`` ends early once ``limits`` says stop.

    The call runs in another thread, so that this one can react: signals are handled while it waits,
    and a KeyboardInterrupt halts the call and is raised.
    """
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call)
        try:
            while not wait([running], LOOK_SECONDS).done:
                if limits.stopped():
                    halt()
            return running.result()
        finally:
            while not wait([running], LOOK_SECONDS).done:
                halt()  # repeatedly: a solver that is still starting ignores it
