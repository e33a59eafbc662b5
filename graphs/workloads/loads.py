"""Jobs' sizes and durations as published of clusters and of evaluations of schedulers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

_HOUR = 3600.0
_Quantiles = tuple[tuple[float, float], ...]
"""Shares of jobs that are not longer, and hours; between two of them hours are log-uniform."""


@dataclass(frozen=True, slots=True)
class Load:
    """Durations of jobs by their numbers of accelerators.

    ``shares`` are the parts of jobs on so many accelerators. ``hours`` draws a job's, on the
    accelerators that it asks for. ``source`` has the figures, ``assumed`` is not published.
    """

    source: str
    assumed: str
    shares: dict[int, float]
    hours: Callable[[Random, int], float]

    def draw(self, random: Random) -> tuple[int, float]:
        """The number of accelerators of a job, and its seconds on them."""
        (scale,) = random.choices([*self.shares], [*self.shares.values()])
        return scale, _HOUR * self.hours(random, scale)


def _within(random: Random, quantiles: _Quantiles) -> float:
    part = random.random()
    at = next(i for i, (share, _) in enumerate(quantiles) if part < share)
    (before, least), (share, most) = quantiles[at - 1 : at + 1]
    return least * float((most / least) ** ((part - before) / (share - before)))


def _philly(random: Random, scale: int) -> float:
    shares = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
    hours = {
        1: (1.0, 1.2, 1.6, 2.98, 8.79, 38.92, 106.35, 512.67, 1443.38),
        2: (1.02, 3.56, 9.15, 28.24, 91.53, 162.32, 228.28, 504.99, 1430.6),
        4: (1.0, 2.17, 4.75, 19.89, 49.43, 110.69, 226.86, 569.59, 1440.81),
        8: (1.0, 2.07, 4.25, 17.94, 60.53, 149.3, 240.48, 615.01, 1440.96),
    }
    return _within(random, tuple(zip(shares, hours[scale], strict=True)))


def _helios(random: Random, _: int) -> float:
    median, mean, longest = 206.0, 6652.0, 50 * 86_400.0
    drawn = random.lognormvariate(math.log(median), math.sqrt(2 * math.log(mean / median)))
    return min(drawn, longest) / _HOUR


def _sia(random: Random, scale: int) -> float:
    sizes = ((0.0, 0.1), (0.72, 1.0), (0.92, 10.0), (0.98, 100.0), (1.0, 1000.0))
    return _within(random, sizes) / scale  # of GPU time


def _shockwave(random: Random, _: int) -> float:
    return _within(random, ((0.0, 0.2), (0.72, 1.14), (0.92, 2.6), (0.97, 4.54), (1.0, 5.0)))


LOADS = {
    "philly": Load(
        "Jeon et al., ATC 2019: quantiles of the 33,192 jobs of an hour or longer in the public "
        "trace, as Gavel has them",
        "hours are log-uniform between the quantiles",
        {1: 0.7624, 2: 0.02, 4: 0.0927, 8: 0.1249},
        _philly,
    ),
    "helios": Load(
        "Hu et al., SC 2021: jobs last 6,652 s on average, 206 s in the median, 50 days at most, "
        "and have 3.72 GPUs on average",
        "the figures were not checked against the paper; durations are lognormal, whatever the "
        "number, cut at the longest, so of 6,150 s on average; half of the jobs have one GPU, none "
        "more than 8",
        {1: 0.5, 2: 0.06, 4: 0.105, 8: 0.335},
        _helios,
    ),
    "sia": Load(
        "Jayaram Subramanya et al., SOSP 2023, whose jobs have the sizes of Qiao et al., OSDI "
        "2021: 72 % up to 1 GPU-hour, 20 % up to 10, 6 % up to 100, 2 % up to 1000",
        "the GPU-hours were not checked against the papers; they are log-uniform within a class, "
        "from 0.1; the numbers of GPUs are those of Gavel",
        {1: 0.7, 2: 0.1, 4: 0.15, 8: 0.05},
        _sia,
    ),
    "shockwave": Load(
        "Zheng et al., NSDI 2023, and its public generator: 0.2 to 5 hours, of whose range the "
        "first fifth has 72 % of the jobs, the next 30 % have 20 %, the next 40 % 5 %",
        "log-uniform within a class",
        {1: 0.6, 2: 0.3, 4: 0.09, 8: 0.01},
        _shockwave,
    ),
}
"""Published loads by name. None has arrivals: a Poisson process in their place is assumed."""
