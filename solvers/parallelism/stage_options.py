"""Costs of every stage of a plain pipeline for any blocks, with the fewest recomputed blocks."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagewright.formulations.parallelism.cut import Layers, stage_layers
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import Parts, shares
from stagewright.formulations.parallelism.pipeline_time import Walk
from stagewright.formulations.parallelism.stage_costs import StageCosts
from stagewright.formulations.parallelism.states import tied_seconds
from stagewright.formulations.parallelism.training import TrainingProblem

Counts = Callable[[int], Sequence[int]]
"""Of so many blocks of a stage, how many may be recomputed, ascending."""


@dataclass(frozen=True, slots=True)
class Option:
    """A stage with some blocks: seconds of a microbatch, of its exchange and of its update.

    ``returned`` is the backward without ``weight``, the part that is put off.
    """

    recomputed: int
    forward: float
    returned: float
    weight: float
    reduction: float
    update: float


class StageOptions:
    """The options of a layout's stages, whatever blocks and recomputation the layout itself has.

    More recomputed blocks take longer and free memory, so that the fewest that fit are taken.
    """

    def __init__(
        self, problem: TrainingProblem, layout: Layout, memory: float, counts: Counts, walk: Walk
    ) -> None:
        self.problem, self.layout, self.memory, self.counts = problem, layout, memory, counts
        self.shares = shares(problem, layout.split)
        self.costs = StageCosts(problem, layout, self.shares)
        self.stages, self.blocks = layout.pipeline, problem.architecture.layers
        self.is_uniform = len(self.shares.kinds) == 1
        self.microbatches = layout.microbatches(problem.batch)
        parts = Parts(problem, divided_evenly(layout, self.blocks))
        self.hop, self.sending, self.is_split = parts.hop, parts.sending_seconds, parts.is_split
        self.tied = tied_seconds(problem, layout, self.shares.head)
        # The order is the same whatever the times, and so is what is kept.
        ones = np.ones(self.stages)
        self.kept = walk(
            self.stages, 1, self.microbatches, self.is_split, ones, ones, ones, 0.0, ones
        )[1]
        self._options: dict[tuple[int, int, int], Option | None] = {}
        self._bytes: dict[_Key, tuple[float, float]] = {}
        self._seconds: dict[_Key, tuple[float, float, float, float, float]] = {}

    def option(self, stage: int, start: int, count: int) -> Option | None:
        """The stage with the blocks from ``start`` on; None if they do not fit."""
        key = stage, 0 if self.is_uniform else start, count
        if key not in self._options:
            self._options[key] = self._option(*key)
        return self._options[key]

    def _option(self, stage: int, start: int, count: int) -> Option | None:
        counts = self.counts(count)
        ends = stage == 0, stage == self.stages - 1
        kept = float(self.kept[stage])
        place = bisect_left(
            counts,
            True,
            key=lambda again: self._peak((*ends, start, count, again), kept) <= self.memory,
        )
        if place == len(counts):
            return None
        key = (*ends, start, count, counts[place])
        if key not in self._seconds:
            self._seconds[key] = self._times(self._layers(key))
        forward, returned, weight, reduction, update = self._seconds[key]
        tied = self.tied if any(ends) and self.stages > 1 else 0.0
        return Option(counts[place], forward, returned, weight, reduction + tied, update)

    def _layers(self, key: "_Key") -> Layers:
        first, last, start, count, again = key
        own = self.shares.blocks[start : start + count]
        return stage_layers(self.shares, own, again, first=first, last=last)

    def _peak(self, key: "_Key", kept: float) -> float:
        """Bytes of a stage that keeps so many forwards."""
        if key not in self._bytes:
            layers = self._layers(key)
            self._bytes[key] = self.costs.memory(layers, 0.0).total, self.costs.saved(layers)
        fixed, saved = self._bytes[key]
        return fixed + kept * saved

    def _times(self, layers: Layers) -> tuple[float, float, float, float, float]:
        costs, (forward, backward) = self.costs, self.costs.seconds(layers)
        weight = costs.put_off(layers)
        return forward, backward - weight, weight, costs.reduction(layers), costs.update(layers)


_Key = tuple[bool, bool, int, int, int]
"""Layers: whether with the embedding, with the head; the first block, how many, how many again."""


def divided_evenly(layout: Layout, blocks: int) -> Layout:
    """The layout with about equally many blocks in every stage, of which none is recomputed."""
    return replace(
        layout,
        recompute="none",
        recompute_blocks=None,
        recomputed_by_stage=None,
        first_blocks=None,
        last_blocks=None,
        blocks_by_stage=even_division(layout.pipeline, blocks),
    )


def even_division(stages: int, blocks: int) -> tuple[int, ...]:
    """About equally many blocks in every stage; with fewer blocks than stages none in the ends."""
    if blocks < stages:
        inner = (1,) * (stages - 2)
        return (0, *inner, blocks - len(inner))
    return tuple(blocks // stages + (stage < blocks % stages) for stage in range(stages))
