"""Jobs that arrive by a Poisson process, as in the evaluation of the thesis (section 5.7.1).

The draws are those of the public code in kind and order (github.com/stanford-futuredata/gavel),
so that a seed gives the same jobs and its published results can be compared. Sizes and durations
are also those published of other clusters and of evaluations of schedulers.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, Throughputs

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


DISTRIBUTED = (
    *(f"ResNet-18 (batch size {size})" for size in (16, 32, 64, 128, 256)),
    *(f"ResNet-50 (batch size {size})" for size in (16, 32, 64, 128)),
    *(f"Transformer (batch size {size})" for size in (16, 32, 64, 128, 256)),
    *(f"LM (batch size {size})" for size in (5, 10, 20, 40, 80)),
)
"""The models of table 5.2 that also run on several accelerators."""

MODELS = (
    *DISTRIBUTED,
    *(f"Recommendation (batch size {size})" for size in (512, 1024, 2048, 4096, 8192)),
    "A3C",
    "CycleGAN",
)
"""The 26 job types of table 5.2."""

HIGH_PRIORITY = 5.0
SLO_FACTORS = ((0.33, 1.2), (0.67, 2.0), (1.0, 10.0))
"""The SLO of a job as a multiple of its duration, by upper limits of a draw from U[0, 1)."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A Poisson process of jobs; iterating gives endlessly many jobs, named by their number.

    The first job arrives at time 0. A job has the steps that ``reference`` runs in its duration:
    10^x minutes, x from U[1.5, 3] in four of five cases and from U[3, 4] otherwise.

    ``distributed`` draws scales 1 (70 %), 2 (10 %), 4 (15 %) and 8 (5 %) for the types that run on
    several accelerators. ``priorities`` gives a fifth of the jobs a weight of 5, ``slos`` gives
    each 1.2, 2 or 10 times its duration. A mean of 0 seconds lets all jobs arrive at once.
    With ``load``, durations and scales are those of that one of ``LOADS``.
    """

    throughputs: Throughputs
    mean_interarrival_seconds: float
    seed: int = 0
    distributed: bool = False
    priorities: bool = False
    slos: bool = False
    reference: str = "v100"
    load: str | None = None

    def __post_init__(self) -> None:
        mean = self.mean_interarrival_seconds
        if not (math.isfinite(mean) and mean >= 0):
            raise InputError(
                f"mean inter-arrival time: expected seconds, not negative, got {mean!r}"
            )
        if self.load is not None and self.load not in LOADS:
            raise InputError(f"load {self.load!r} is not known; there are {', '.join(LOADS)}")
        rates = self._rates()
        scales = (1, 2, 4, 8) if self.distributed else (1,)
        for model in MODELS:
            for scale in scales if model in DISTRIBUTED else (1,):
                if rates.get((model, scale), 0.0) <= 0:
                    raise InputError(
                        f"no throughput of {model!r} on {scale} x {self.reference!r}: the "
                        "durations of generated jobs refer to it"
                    )

    def __iter__(self) -> Iterator[Job]:
        rates = self._rates()
        jobs, gaps = random.Random(self.seed + 2), random.Random(self.seed + 3)
        slos = random.Random(self.seed + 6)
        arrival, number = 0.0, 0
        while True:
            yield self._job(str(number), arrival, jobs, slos, rates)
            number += 1
            if self.mean_interarrival_seconds:
                rate = 1.0 / self.mean_interarrival_seconds
                arrival += -math.log(1.0 - gaps.random()) / rate

    def _rates(self) -> dict[tuple[str, int], float]:
        return {
            (rate.model, rate.scale): rate.steps_per_second
            for rate in self.throughputs.alone
            if rate.accelerator == self.reference
        }

    def _job(
        self,
        name: str,
        arrival: float,
        draw: random.Random,
        slos: random.Random,
        rates: dict[tuple[str, int], float],
    ) -> Job:
        """One job. The order of the draws is part of the definition of a seed's jobs."""
        if self.load is None:
            scale, duration = _scale(draw), _duration_seconds(draw)
        else:
            scale, duration = LOADS[self.load].draw(draw)
        if not self.distributed:
            scale = 1
        model = draw.choice(MODELS)
        while scale > 1 and model not in DISTRIBUTED:
            model = draw.choice(MODELS)
        weight = HIGH_PRIORITY if self.priorities and draw.uniform(0, 1) <= 0.2 else 1.0
        slo = _slo_factor(slos) * duration if self.slos else None
        return Job(name, model, duration * rates[model, scale], scale, weight, arrival, slo)


def _scale(draw: random.Random) -> int:
    r = draw.uniform(0, 1)
    if r < 0.7:
        return 1
    if r <= 0.8:
        return 2
    return 4 if r <= 0.95 else 8


def _duration_seconds(draw: random.Random) -> float:
    long = draw.random() >= 0.8
    return 60 * 10 ** (draw.uniform(3, 4) if long else draw.uniform(1.5, 3))


def _slo_factor(draw: random.Random) -> float:
    r = draw.uniform(0, 1)
    return next(factor for below, factor in SLO_FACTORS if r < below)
