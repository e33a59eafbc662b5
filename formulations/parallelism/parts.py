"""The quantities of a layout, by stage or by the position of a rank in the pipeline."""

import copy
from collections.abc import Callable
from functools import cached_property, lru_cache

import numpy as np

from stagewright.formulations.parallelism.cut import cut
from stagewright.formulations.parallelism.layer_times import LayerTime
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.pipeline_time import (
    RankMemory,
    StageCosts,
    first_forwards,
    kept_forwards,
)
from stagewright.formulations.parallelism.states import tied_seconds
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import occupied_seconds, send_seconds
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.machines.groups import GroupWays, links
from stagewright.graphs.models.shards import LayerSplit, Shares, shares_of


@lru_cache(maxsize=4096)
def shares(problem: TrainingProblem, split: LayerSplit) -> Shares:
    """The shares of the problem's layers."""
    return shares_of(
        problem.architecture,
        problem.sequence,
        split,
        problem.attention,
        by_operator=problem.memory.by_operator,
    )


@lru_cache(maxsize=4096)
def _all_forwards(
    of: Callable[..., Ints], pipeline: int, chunks: int, microbatches: int, split: bool
) -> Ints:
    ranks, each = np.arange(pipeline), np.arange(chunks)[:, None]
    return of(pipeline, chunks, microbatches, split, ranks, each)


class Parts:
    """The quantities of a layout, by stage or by the position of a rank in the pipeline."""

    def __init__(self, problem: TrainingProblem, layout: Layout) -> None:
        self.problem, self.layout = problem, layout
        self.microbatches = layout.microbatches(problem.batch)
        self.shares = shares(problem, layout.split)
        self.costs = StageCosts(problem, layout, self.shares)
        blocks = problem.architecture.layers
        self.cut = cut(
            self.shares,
            layout.pipeline,
            layout.blocks_of_stages(blocks),
            layout.treated_of_stages(blocks),
            layout.treatment,
        )

    def varied(self, layout: Layout) -> "Parts":
        """The parts of a layout that differs in ZeRO, offload or placement alone."""
        found = copy.copy(self)
        found.layout, found.costs = layout, StageCosts(self.problem, layout, self.shares)
        for name in ("seconds", "busy", "hop", "reductions", "longest_update"):
            found.__dict__.pop(name, None)
        return found

    @property
    def is_split(self) -> bool:
        """Whether backwards are split in two."""
        return self.costs.is_split

    @cached_property
    def weight_seconds(self) -> Floats:
        """The part of every stage's backward that is put off."""
        each = [self.costs.put_off(stage) for stage in self.cut.stages.layers]
        found: Floats = np.array(each)[self.cut.stages.index]
        return found

    @cached_property
    def seconds(self) -> tuple[Floats, Floats]:
        """Forward and backward of every stage, with ZeRO's exchanges as far as they are seen."""
        each = [self.costs.seconds(stage) for stage in self.cut.stages.layers]
        found: Floats = np.array(each)[self.cut.stages.index]
        return found[:, 0], found[:, 1]

    def _by_rank(self, of_kind: Callable[[int], float]) -> Floats:
        """A quantity of every rank, computed once for ranks with equal stages."""
        each = [of_kind(kind) for kind in range(len(self.cut.ranks.layers))]
        found: Floats = np.array(each)[self.cut.ranks.index]
        return found

    @cached_property
    def busy(self) -> Floats:
        """Seconds of computation of every rank in an iteration."""
        return self._of_microbatches(self.seconds[0] + self.seconds[1])

    def _of_microbatches(self, of_stages: Floats) -> Floats:
        """Sums over the stages of every rank and all microbatches."""
        each = of_stages.reshape(self.layout.chunks, self.layout.pipeline)
        found: Floats = self.microbatches * each.sum(axis=0)
        return found

    @cached_property
    def hop(self) -> float:
        """Seconds from a stage to the next: its output, of which every tensor rank sends a part."""
        seconds = send_seconds(self._pipeline_links, self._sent_bytes)
        return self.problem.charges("pipeline transfers") * seconds

    @property
    def _pipeline_links(self) -> GroupWays:
        return links(self.problem.fabric, self.layout.pipeline_group)

    @property
    def _sent_bytes(self) -> float:
        width = self.shares.sent / self.layout.tensor
        return self.layout.microbatch * width * self.problem.precision.activation_bytes

    @property
    def sending_seconds(self) -> float:
        """Seconds in which a rank's link is busy sending to other stages."""
        pipeline, chunks = self.layout.pipeline, self.layout.chunks
        if pipeline == 1 or not self.problem.charges("pipeline transfers"):
            return 0.0
        # Forward and backward of every chunk; the ends send once less.
        times = 2 * chunks - (pipeline == 2)
        each = occupied_seconds(self._pipeline_links, self._sent_bytes)
        return self.microbatches * times * each

    @cached_property
    def saved(self) -> Floats:
        """Bytes that every stage's forward keeps."""
        each = [self.costs.saved(stage) for stage in self.cut.stages.layers]
        found: Floats = np.array(each)[self.cut.stages.index]
        return found

    @cached_property
    def reductions(self) -> Floats:
        """Seconds that the exchange of gradients and of updated weights adds on every rank.

        They run beside the last backward and the next forward, but for one layer's.
        """
        layers = self.cut.ranks.layers
        found = self._by_rank(lambda kind: self.costs.reduction(layers[kind]))
        if self.layout.pipeline > 1:
            tied = tied_seconds(self.problem, self.layout, self.shares.head)
            found[[0, -1]] += tied
        return found

    @cached_property
    def longest_update(self) -> float:
        """Seconds of the slowest rank's step of the optimizer."""
        return max(map(self.costs.update, self.cut.ranks.layers))

    @property
    def least_seconds(self) -> float:
        """A lower bound on an iteration, of which only the waiting in the pipeline is missing.

        Rank r computes nothing before the stages 0 to r - 1 have done their first forward. Its last
        backward (or input gradient) is of a stage with at least r stages before it, whose follow,
        and rank 0 then exchanges its gradients. So an iteration takes at least these and all that
        rank r computes, without its weight gradients where backwards are split.

        Its first backward comes when the first microbatch has passed all stages and come back.
        Until then rank r has done the forwards of its warm-up and one more; the rest, and its
        exchange, follow.
        """
        forward, backward = self.seconds
        weight = self.weight_seconds
        hops = self.hop * np.arange(self.layout.pipeline)
        there = _before(forward + backward - weight, self.layout.pipeline) + 2 * hops
        pipeline = float((there + self.busy - self._of_microbatches(weight)).max())
        pipeline = max(pipeline, self.sending_seconds)
        last = self._first_return(forward, backward - weight) + self.busy + self.reductions
        return max(pipeline + float(self.reductions[0]), float(last.max())) + self.longest_update

    def _first_return(self, forward: Floats, returned: Floats) -> Floats:
        """For every rank, the earliest start of its first backward less its forwards until then."""
        layout, ranks = self.layout, np.arange(self.layout.pipeline)
        arrives = (
            forward.sum()
            + self.hop * (layout.stages - 1)
            + (np.cumsum(returned[::-1])[::-1][-layout.pipeline :] - returned[-layout.pipeline :])
            + self.hop * (layout.pipeline - 1 - ranks)
        )
        done = self._forwards(first_forwards)
        found: Floats = arrives - (forward.reshape(done.shape) * done).sum(axis=0)
        return found

    @property
    def least_bytes(self) -> float:
        """A lower bound on peak bytes: the bytes kept after the warm-up and one forward."""
        layers = self.cut.ranks.layers
        fixed = self._by_rank(lambda kind: self.costs.memory(layers[kind], 0.0).total)
        return float((fixed + self._least_kept).max())

    @cached_property
    def _least_kept(self) -> Floats:
        kept = self._forwards(kept_forwards)
        found: Floats = (self.saved.reshape(kept.shape) * kept).sum(axis=0)
        return found

    def _forwards(self, of: Callable[..., Ints]) -> Ints:
        """(chunks, ranks) forwards, as ``first_forwards`` or ``kept_forwards`` count them."""
        layout = self.layout
        return _all_forwards(of, layout.pipeline, layout.chunks, self.microbatches, self.is_split)

    def of_time(self, rank: int, part: Callable[[LayerTime], float]) -> float:
        """Seconds of a part of a rank's layers in an iteration, without ZeRO's exchanges."""
        layers = self.cut.ranks.layers[self.cut.ranks.index[rank]]
        each: float = sum(n * part(self.costs.of(one, kind).time) for one, kind, n in layers)
        return self.microbatches * each

    def memory(self, rank: int, activations: float) -> RankMemory:
        """The peak of a rank whose forwards keep ``activations`` at most."""
        layers = self.cut.ranks.layers[self.cut.ranks.index[rank]]
        return self.costs.memory(layers, activations)


def _before(of_stages: Floats, ranks: int) -> Floats:
    """Sums over the stages before every rank's first one."""
    found: Floats = np.concatenate(([0.0], np.cumsum(of_stages)))[:ranks]
    return found
