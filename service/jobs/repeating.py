"""What a server does again and again beside its jobs."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError


@dataclass
class Repeated:
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
