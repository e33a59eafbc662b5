"""Rates of requests: so many a second of each user, and more in a burst."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stagewright.service.http.limits import TooManyError

MOST_KNOWN = 10_000  # buckets before those that are full are forgotten


@dataclass(slots=True)
class Rate:
    """A bucket of ``burst`` requests for each user, filled with ``per_second``.

    It is in the memory of this server alone, and its clock is one that nobody sets.
    """

    per_second: float
    burst: float
    clock: Callable[[], float] = time.monotonic
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, user: str) -> None:
        """Take a request out of a user's bucket; raises TooManyError if it is empty."""
        with self._lock:
            now = self.clock()
            left = self._left(user, now)
            if left < 1.0:
                raise TooManyError(
                    f"more than {self.per_second:g} requests a second",
                    (1.0 - left) / self.per_second,
                )
            if len(self._buckets) >= MOST_KNOWN:
                self._forget(now)
            self._buckets[user] = left - 1.0, now

    def _left(self, user: str, now: float) -> float:
        left, then = self._buckets.get(user, (self.burst, now))
        return min(self.burst, left + (now - then) * self.per_second)

    def _forget(self, now: float) -> None:
        """Full buckets are those of users who are not known."""
        self._buckets = {
            user: kept for user, kept in self._buckets.items() if self._left(user, now) < self.burst
        }


def seconds_to_wait(seconds: float) -> str:
    """What ``Retry-After`` says: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))
