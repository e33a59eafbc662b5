"""Jobs are kept for so long after their ends."""

from stagewright.service.jobs.repeating import Repeated
from stagewright.service.jobs.store import Store

DAY = 86400.0
LOOK_SECONDS = 3600.0  # between looks for jobs that are old enough


def retention(store: Store, days: float) -> Repeated:
    """Discards jobs so many days after their ends."""

    def discard() -> bool:
        store.discard_ended(store.clock() - days * DAY)
        return False

    return Repeated(discard, LOOK_SECONDS)
