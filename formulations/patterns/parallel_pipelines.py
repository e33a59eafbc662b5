"""Parallel pipelines of PipeDream-2BW and PipeDream-Flush (Narayanan's thesis, section 3.3).

A configuration has ``depth`` stages with ``width`` replicas each. Microbatch k of a pipeline, from
1, uses version max(floor((k - 1) / m) - 1, 0) of the weights (3.2.1); here m is any whole number of
at least ``depth``, of which the thesis writes the multiples g * depth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stagewright.formulations.pipelines.bppm import prefix_sums
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain

Recomputation = Literal["none", "full"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """``width`` pipelines of ``depth`` stages.

    Each pipeline runs ``microbatches`` of ``microbatch_size`` samples between two updates.
    """

    width: int
    depth: int
    microbatch_size: int
    microbatches: int
    recompute: Recomputation = "none"

    @property
    def samples(self) -> int:
        """Samples that the replicas of a stage process at a time."""
        return self.width * self.microbatch_size

    @property
    def batch(self) -> int:
        """Samples between two updates."""
        return self.samples * self.microbatches

    @property
    def accumulation(self) -> float:
        """The thesis's g = B / (d p b), whole where ``depth`` divides ``microbatches``."""
        return self.microbatches / self.depth

    def __str__(self) -> str:
        again = "" if self.recompute == "none" else ", recomputed"
        return (
            f"d={self.width} p={self.depth} b={self.microbatch_size} m={self.microbatches} "
            f"(g={self.accumulation:g}){again}"
        )


@dataclass(frozen=True, slots=True)
class Line:
    """The configurations that differ in their depth only, which is 1 to ``most``."""

    width: int
    microbatch_size: int
    microbatches: int
    recompute: Recomputation
    most: int

    def at(self, depth: int) -> Configuration:
        """The configuration of that depth."""
        return Configuration(
            self.width, depth, self.microbatch_size, self.microbatches, self.recompute
        )


@dataclass(frozen=True, slots=True)
class Family:
    """The configurations of a batch on ``devices`` devices; a stage has at least one of ``layers``.

    Attributes
    ----------
    batch
        Samples between two updates.
    samples
        What the replicas of a stage may process at a time; those that divide the batch are used.
    width
        The number of replicas; None: any.
    least_samples
        The least that a device may process at a time.
    """

    batch: int
    devices: int
    layers: int
    samples: tuple[int, ...]
    width: int | None = None
    least_samples: int = 1
    recompute: tuple[Recomputation, ...] = ("none", "full")

    def lines(self) -> Iterator[Line]:
        """All configurations with d p <= devices, d b m = batch and m >= p."""
        for samples in self.samples:
            if self.batch % samples:
                continue
            m = self.batch // samples
            for width in divisors(samples) if self.width is None else (self.width,):
                size, rest = divmod(samples, width)
                most = min(self.devices // width, self.layers, m)
                if rest == 0 and size >= self.least_samples and most > 0:
                    for recompute in self.recompute:
                        yield Line(width, size, m, recompute, most)


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """The stages of every depth in sequence: those of depth p begin at ``first[p - 1]``."""

    start: Ints
    stop: Ints
    first: Ints

    @classmethod
    def of(cls, cuts: list[Ints]) -> "Stages":
        """The stages of the cuts of depth 1, 2, ..., each from 0 to the number of layers."""
        lengths = [len(one) - 1 for one in cuts]
        return cls(
            np.concatenate([one[:-1] for one in cuts]),
            np.concatenate([one[1:] for one in cuts]),
            np.cumsum([0, *lengths[:-1]]),
        )

    @property
    def depth(self) -> Ints:
        """The depth of the pipeline of every stage."""
        return np.repeat(np.arange(1, len(self.first) + 1), np.diff([*self.first, len(self.start)]))

    def sums(self, per_layer: Floats) -> Floats:
        """The sum over the layers of every stage."""
        sums = prefix_sums(per_layer)
        return np.asarray(sums[self.stop] - sums[self.start])

    def most(self, per_stage: Floats) -> Floats:
        """The largest value of each depth, shape (P,)."""
        return np.asarray(np.maximum.reduceat(per_stage, self.first))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def samples_of(chain: Chain, batch: int) -> tuple[int, ...]:
    """The measured numbers of samples of ``chain``, between the least and the most, in ``batch``.

    Raises
    ------
    InputError
        If no number of samples divides the batch; names the nearest batches that work.
    """
    if batch < 1:
        raise InputError(f"the batch must be at least 1 sample, got {batch}")
    measured = [[cost.microbatch_size for cost in layer.costs_at(1)] for layer in chain.layers]
    least, most = max(map(min, measured)), min(map(max, measured))

    def fitting(samples: int) -> tuple[int, ...]:
        return tuple(n for n in divisors(samples) if least <= n <= most)

    found = fitting(batch)
    if not found:
        near = [step for step in range(1, most + 1) for step in (batch - step, batch + step)]
        working = sorted([one for one in near if one > 0 and fitting(one)][:2])
        sizes = f"{least}" if least == most else f"{least} to {most}"
        raise InputError(
            f"a batch of {batch} samples is no whole number of microbatches of {sizes} samples, "
            f"for which model {chain.name!r} has costs: use a batch of "
            f"{' or '.join(map(str, working))}, or measure other sizes"
        )
    return found
