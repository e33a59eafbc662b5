"""Jobs are kept for so long after their ends."""

import contextlib
import threading
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError

from stagewright.service.jobs.store import Store

DAY = 86400.0
LOOK_SECONDS = 3600.0  # between looks for jobs that are old enough


@dataclass
class Retention:
    """Discards jobs ``days`` after their ends, until it is stopped."""

    store: Store
    days: float
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Discard what is old now, and again every hour."""
        while not self.stopping.is_set():
            with contextlib.suppress(SQLAlchemyError):  # at the next look
                self.store.discard_ended(self.store.clock() - self.days * DAY)
            self.stopping.wait(LOOK_SECONDS)
