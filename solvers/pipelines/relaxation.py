"""The bound of :mod:`relaxation`, computed by bisection over a dynamic program."""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stagewright.formulations.pipelines.bounds.relaxation import Relaxation, relax
from stagewright.formulations.pipelines.bppm import cheapest_work
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.compiled import lean, lean_entry, paced, refer, ring_pace

PRECISION = 1e-3  # relative width at which the bisection stops
STEPS = 2e9  # of a pass, above which only the load bound is used
STEP_SECONDS = 3e-9  # predicted, of each
MARGIN = 1e-9


def relaxed_load_bound(problem: PipelineProblem, split: bool = False) -> float:
    """The load bound M sum(work) / V: every iteration does at least this work.

    ``split``: backwards may be in parts, if these take less time.
    """
    total = float(cheapest_work(problem, split).sum())
    return problem.microbatches * total / len(problem.cluster)


def fill_and_drain_bound(
    problem: PipelineProblem,
    incumbent: float,
    wide: bool = False,
    sizes: tuple[int, ...] | None = None,
) -> float:
    """A lower bound on all plans of the class, at most ``incumbent`` (any known time).

    The relaxation covers every number of stages, replication and order. If its tables would be too
    large, the load bound is returned. The class is DISJOINT_SPLIT, or DISJOINT_WHOLE if ``wide``,
    with all stages on the same number of devices, one of ``sizes``, if these are given.
    """
    return FillAndDrain(problem, wide, sizes).bound(incumbent)


def is_fill_and_drain_bound(
    problem: PipelineProblem,
    seconds: float,
    wide: bool = False,
    sizes: tuple[int, ...] | None = None,
) -> bool:
    """Whether the relaxation proves that no plan of the class takes less than ``seconds``."""
    return FillAndDrain(problem, wide, sizes).proves(seconds)


@dataclass
class FillAndDrain:
    """The relaxation's value, between ``low`` (proved) and ``high``, narrowed by every question.

    ``sizes`` are the numbers of devices that all stages alike may have; None: any, each its own.
    """

    problem: PipelineProblem
    wide: bool = False
    sizes: tuple[int, ...] | None = None
    low: float = field(init=False)
    high: float = field(init=False, default=math.inf)

    def __post_init__(self) -> None:
        self.low = relaxed_load_bound(self.problem)

    @property
    def pass_seconds(self) -> float:
        """The predicted seconds of one pass."""
        return self._steps * STEP_SECONDS

    def bound(self, incumbent: float, seconds: float = math.inf) -> float:
        """The bound, at most ``incumbent``; passes that do not fit in ``seconds`` are left out."""
        while self.low < incumbent and self.high > min(incumbent, self.low * (1 + PRECISION)):
            seconds -= self.pass_seconds
            if seconds < 0 or self._steps > STEPS:
                break
            self.proves(incumbent if self.high > incumbent else (self.low + self.high) / 2)
        return min(self.low, incumbent)

    def proves(self, seconds: float) -> bool:
        """Whether no plan takes less than ``seconds``, by at most one pass."""
        if self.low < seconds < self.high and self._steps <= STEPS:
            size = len(self.problem.cluster)
            if any(
                _fits_under(self._form, size, seconds, self.wide, equal)
                for equal in self.sizes or (0,)
            ):
                self.high = seconds
            else:
                self.low = seconds
        return seconds <= self.low

    @cached_property
    def _form(self) -> Relaxation:
        return relax(self.problem)

    @cached_property
    def _steps(self) -> float:
        """The stages that a pass places at most: starts, ends, devices before, and devices."""
        size, count = len(self.problem.cluster), self.problem.microbatches
        numbers = min(size, int(self.problem.replicas_per_layer.max()))
        if self.wide:  # ceil(M / r) has at most 2 sqrt(M) values
            numbers = 2 * (numbers + min(size, 2 * math.isqrt(count) + 1))
        return float(len(self.problem.chain) ** 2 / 2 * size * numbers)


def _fits_under(form: Relaxation, size: int, limit: float, wide: bool, equal: int) -> bool:
    """Whether some relaxed plan on ``size`` devices takes at most ``limit``, up to rounding.

    All its stages have ``equal`` devices (0: each its own number).

    way[k, i, l] is the least time of forward and backward through stages with the first l layers on
    i devices, there[k, i, l] that of the forward. The two are minimised separately, which is a
    further relaxation. The last stage is split (k = 0) or round-robin (k = 1).
    """
    layers, replicas = form.forward.shape[1] - 1, form.forward.shape[0] - 1
    way = np.full((2, size + 1, layers + 1), np.inf)
    there = np.full((2, size + 1, layers + 1), np.inf)
    way[0, 0, 0] = there[0, 0, 0] = 0.0
    numbers = _numbers(min(size, replicas), equal), _turns(form.microbatches, size, equal)
    _place_all(form, size, limit * (1 + MARGIN), numbers, wide, way, there)
    return bool(np.isfinite(way[:, :, layers]).any())


@lean_entry
def _place_all(
    form: Relaxation,
    size: int,
    limit: float,
    numbers: tuple[Ints, Ints],
    wide: bool,
    way: Floats,
    there: Floats,
) -> None:
    """Place all stages: split on the first ``numbers`` of devices, or round-robin on the second."""
    form = refer(form)
    for used in range(size):
        for last in range(2):
            for before in range(form.forward.shape[1] - 1):
                if way[last, used, before] == np.inf:
                    continue
                for kind in range(2 if wide else 1):
                    for r in numbers[kind]:
                        if r > size - used:
                            break
                        _place(form, limit, used, r, before, last, kind, wide, way, there)


def _numbers(most: int, equal: int) -> Ints:
    """The numbers of devices up to ``most``, or only ``equal`` if that is not 0."""
    numbers: Ints = np.arange(1, most + 1)
    return numbers if equal == 0 else numbers[numbers == equal]


def _turns(microbatches: int, size: int, equal: int) -> Ints:
    """The least numbers of devices, from 2 on, for each number of rounds of their microbatches.

    More devices for the same number of rounds only lengthen the all-reduce. Only ``equal`` if that
    is not 0.
    """
    if equal > 0:
        return _numbers(size, equal)[: int(equal > 1)]
    numbers = np.arange(2, min(size, microbatches) + 1)
    rounds = -(-microbatches // numbers)
    turns: Ints = numbers[(numbers == 2) | (rounds < -(-microbatches // (numbers - 1)))]
    return turns


@lean
def _place(
    form: Relaxation,
    limit: float,
    used: int,
    r: int,
    before: int,
    last: int,
    kind: int,
    wide: bool,
    way: Floats,
    there: Floats,
) -> None:
    """Place every stage on r devices that starts after layer ``before`` and is under the limit.

    ``kind`` is that of the stage, ``last`` that of the previous one: 0 split, 1 round-robin. Some
    device of a round-robin stage has ceil(M / r) whole microbatches; it has several channels, each
    with at least one microbatch.
    """
    M = form.microbatches
    shares, rounds, crossing = (r, M, M) if kind == 0 else (1, -(-M // r), 1)
    # The channel before the stage: at best every device used so far sends.
    once = 0.0
    if used > 0:
        pieces = shares * (used if last == 0 else 1)
        share = -(-form.samples // pieces) / form.samples
        sent = form.boundary[before] * share
        once = paced(sent, form.seconds_per_byte, form.latency)
    if last == 1:
        crossing = 1
    if 2 * crossing * once + there[last, used, before] > limit:
        return
    head, forth = way[last, used, before] + 2 * once, there[last, used, before] + once
    ring, ring_latency = ring_pace(r, form.seconds_per_byte, form.latency)
    largest = 0.0
    for l in range(before + 1, way.shape[2]):
        f = form.forward[shares, l] - form.forward[shares, before]
        x = f + form.backward[shares, l] - form.backward[shares, before]
        weights = form.parameters[l] - form.parameters[before]
        reduced = paced(weights, ring, ring_latency)
        finish = reduced + form.update[l] - form.update[before]
        saved = form.saved[shares, l] - form.saved[shares, before]
        if wide:  # layer-wise recomputation keeps the activations of one layer at a time
            largest = max(largest, form.saved[shares, l] - form.saved[shares, l - 1])
            saved = largest * (1 - MARGIN)
        if (
            head + rounds * x > limit
            or forth + rounds * x + finish > limit
            or form.first[shares, l] > before
            or form.state_factor[r] * weights + saved > form.memory
        ):
            return
        way[kind, used + r, l] = min(way[kind, used + r, l], head + x)
        there[kind, used + r, l] = min(there[kind, used + r, l], forth + f)
