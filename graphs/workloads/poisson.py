"""Jobs that arrive by a Poisson process, as in the evaluation of the thesis (section 5.7.1).

The draws are those of the public code in kind and order (github.com/stanford-futuredata/gavel),
so that a seed gives the same jobs and its published results can be compared.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, Throughputs
from stagewright.graphs.workloads.loads import LOADS

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
