"""Steps that a server repeats while it runs, such as deleting jobs that ended long ago."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError

from stagewright.service.jobs.store import JobStore


@dataclass
class RepeatedStep:
    """Takes a step again and again until it is stopped, in a thread.

    After a step that tells that there was nothing to do, or a store that does not answer, it waits
    for ``seconds``.
    """

    step: Callable[[], bool]
    seconds: float
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Take steps until it is stopped."""
        while not self.stopping.is_set():
            busy = False
            with contextlib.suppress(SQLAlchemyError):
                busy = self.step()
            if not busy:
                self.stopping.wait(self.seconds)


DAY = 86400.0
LOOK_SECONDS = 3600.0  # between looks for jobs that are old enough


def retention(store: JobStore, days: float) -> RepeatedStep:
    """Discards jobs so many days after their ends."""

    def discard() -> bool:
        store.discard_ended(store.clock() - days * DAY)
        return False

    return RepeatedStep(discard, LOOK_SECONDS)
