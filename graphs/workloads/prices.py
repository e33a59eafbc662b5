"""The market of cloud instances: prices over time, and times to preemption.

Times are seconds since 1970 (UTC), prices dollars per hour of a whole instance.
"""

import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount, require_count

MAX_GPUS = 1024
HOUR = 3600.0


@documents.record
class Instance:
    """An instance type in a region or zone, with ``gpus`` GPUs of kind ``gpu``.

    ``name`` is the provider's name of the type. ``zone`` is None where the price is the region's,
    ``on_demand`` (dollars per hour) where it is not known.
    """

    provider: str
    region: str
    name: str
    gpu: str
    gpus: int
    zone: str | None = None
    on_demand: float | None = None

    def __post_init__(self) -> None:
        for field in ("provider", "region", "name", "gpu"):
            if not getattr(self, field):
                raise InputError(f"an instance has an empty {field}")
        require_count(self.gpus, f"instance {self.key!r}: gpus", MAX_GPUS)
        if self.on_demand is not None:
            require_amount(self.on_demand, f"instance {self.key!r}: on_demand")

    @property
    def key(self) -> str:
        """One name for the instance in its place: ``aws/us-east-1b/p3.2xlarge``."""
        return f"{self.provider}/{self.zone or self.region}/{self.name}"


@documents.record
class PriceSeries:
    """A step function: from ``seconds[i]`` on the instance costs ``dollars_per_hour[i]``.

    The last price holds until ``until_seconds``; before the first and from then on the price is
    not known.
    """

    instance: Instance
    seconds: tuple[float, ...]
    dollars_per_hour: tuple[float, ...]
    until_seconds: float

    def __post_init__(self) -> None:
        place = f"prices of {self.instance.key!r}: "
        if not self.seconds or len(self.seconds) != len(self.dollars_per_hour):
            raise InputError(
                f"{place}{len(self.seconds)} times and {len(self.dollars_per_hour)} prices; "
                "give at least one of each, and equally many"
            )
        for before, after in itertools.pairwise((*self.seconds, self.until_seconds)):
            if not (math.isfinite(after) and after > before):
                raise InputError(f"{place}time {after:.15g} s does not follow {before:.15g} s")
        require_amount(self.seconds[0], place + "the first time")
        for price in self.dollars_per_hour:
            require_amount(price, place + "dollars_per_hour")

    @property
    def from_seconds(self) -> float:
        """The first time at which the price is known."""
        return self.seconds[0]

    def price(self, at_seconds: float) -> float:
        """Dollars per hour at a time. Raises InputError if no price is known then."""
        self.require_cover(at_seconds, at_seconds)
        return self.dollars_per_hour[bisect_right(self.seconds, at_seconds) - 1]

    def require_cover(self, begin: float, end: float) -> None:
        """Refuse a time span in which the price is not known throughout."""
        if not self.covers(begin, end):
            raise InputError(
                f"prices of {self.instance.key!r} are known from {self.from_seconds:.15g} to "
                f"{self.until_seconds:.15g} s, not over all of {begin:.15g} to {end:.15g} s"
            )

    def covers(self, begin: float, end: float) -> bool:
        """Whether a price is known at all times from ``begin`` to ``end``."""
        return self.from_seconds <= begin and end <= self.until_seconds

    def dollars(self, begin: float, end: float) -> float:
        """Cost of the whole instance from ``begin`` to ``end``; see :meth:`require_cover`."""
        self.require_cover(begin, end)
        first = bisect_right(self.seconds, begin) - 1
        total, at = 0.0, begin
        for i in range(first, len(self.seconds)):
            stop = self.seconds[i + 1] if i + 1 < len(self.seconds) else self.until_seconds
            stop = min(stop, end)
            total += self.dollars_per_hour[i] * max(0.0, stop - at) / HOUR
            at = max(at, stop)
            if stop >= end:
                break
        return total


@documents.record
class Market:
    """The price series of all instances that can be rented."""

    series: tuple[PriceSeries, ...]
    format: Literal["stagewright-prices"] = "stagewright-prices"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not self.series:
            raise InputError("the market has no price series")
        seen = set()
        for series in self.series:
            if series.instance.key in seen:
                raise InputError(f"the prices of {series.instance.key!r} appear twice")
            seen.add(series.instance.key)

    @property
    def from_seconds(self) -> float:
        """The first time at which every price is known."""
        return max(series.from_seconds for series in self.series)

    @property
    def until_seconds(self) -> float:
        """The time until which every price is known."""
        return min(series.until_seconds for series in self.series)

    def of(self, wanted: Callable[[Instance], bool]) -> "Market":
        """The market of some instances only. Raises InputError if there are none."""
        return Market(tuple(series for series in self.series if wanted(series.instance)))


def merge(markets: Iterable[Market]) -> Market:
    """Concatenate markets; an instance may be in one of them only."""
    return Market(tuple(series for market in markets for series in market.series))


def load_market(path: str | os.PathLike[str]) -> Market:
    """Read a prices file; see :func:`documents.read` for the errors."""
    return documents.read(Market, path)


def save_market(market: Market, path: str | os.PathLike[str]) -> None:
    """Write ``market`` to ``path`` atomically."""
    documents.write(Market, market, path)


@dataclass(frozen=True, slots=True)
class Uptime:
    """A time in which ``gpus`` of kind ``gpu`` were up; ``preempted`` says how it ended.

    If false, the log or the user ended it.
    """

    provider: str
    zone: str
    gpu: str
    gpus: int
    begin_seconds: float
    end_seconds: float
    preempted: bool

    def __post_init__(self) -> None:
        place = f"{self.gpus} x {self.gpu!r} in {self.zone!r}"
        if self.end_seconds < self.begin_seconds:
            raise InputError(
                f"{place}: down at {self.end_seconds:.15g} s, before it was up at "
                f"{self.begin_seconds:.15g} s"
            )


@dataclass(frozen=True, slots=True)
class Preemptions:
    """The uptimes in availability logs."""

    uptimes: tuple[Uptime, ...]

    def of(self, provider: str, gpu: str, gpus: int | None = None) -> "Preemptions":
        """The uptimes of one kind of instance in all zones; of every size without ``gpus``."""
        return Preemptions(
            tuple(
                up
                for up in self.uptimes
                if (up.provider, up.gpu) == (provider, gpu) and gpus in (None, up.gpus)
            )
        )

    @property
    def count(self) -> int:
        """Number of preemptions."""
        return sum(up.preempted for up in self.uptimes)

    @property
    def mean_seconds(self) -> float:
        """Mean time to preemption: total uptime over number of preemptions; inf if there are none.

        This is the maximum-likelihood estimate for exponential times with censoring.
        """
        up = sum(one.end_seconds - one.begin_seconds for one in self.uptimes)
        return up / self.count if self.count else math.inf


def useful_share(
    mean_seconds_to_preemption: float,
    checkpoint_every_seconds: float,
    checkpoint_seconds: float,
    restore_seconds: float,
) -> float:
    """Expected fraction of the paid time that is progress, on an instance that may be preempted.

    A checkpoint of ``checkpoint_seconds`` is written after every ``checkpoint_every_seconds`` of
    work; a preemption loses half such an interval on average, and ``restore_seconds`` follow it
    (Young, CACM 1974; to first order in the rate of preemptions). At most 1, at least 0.
    """
    if checkpoint_every_seconds <= 0:
        raise InputError(
            f"checkpoints must be more than 0 s apart, got {checkpoint_every_seconds:g}"
        )
    writing = checkpoint_every_seconds / (checkpoint_every_seconds + checkpoint_seconds)
    lost = (checkpoint_every_seconds + checkpoint_seconds) / 2 + restore_seconds
    return writing * max(0.0, 1 - lost / mean_seconds_to_preemption)
