"""The quantities of a layout, by stage or by the position of a rank in the pipeline."""

from collections.abc import Callable
from functools import cached_property, lru_cache

import numpy as np

from stagewright.formulations.parallelism.cut import cut
from stagewright.formulations.parallelism.layer_times import LayerTime
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.pipeline_time import RankMemory, StageCosts
from stagewright.formulations.parallelism.schedules import (
    Schedule,
    first_forwards,
    kept_forwards,
    pairs_of_ranks,
    stages_of_ranks,
)
from stagewright.formulations.parallelism.states import tied_seconds
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import occupied_seconds, send_seconds
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.machines.groups import GroupWays, links
from stagewright.graphs.models.shards import LayerSplit, Shares, shares_of

_shares_of = lru_cache(maxsize=4096)(shares_of)


@lru_cache(maxsize=4096)
def shares(problem: TrainingProblem, split: LayerSplit) -> Shares:
    """The shares of the problem's layers, the same objects on any machines."""
    return _shares_of(
        problem.architecture,
        problem.sequence,
        split,
        problem.attention,
        by_operator=problem.memory.by_operator,
    )


@lru_cache(maxsize=4096)
def _all_forwards(
    of: Callable[..., Ints], schedule: Schedule, ranks: int, chunks: int, microbatches: int
) -> Ints:
    rank, chunk = np.arange(ranks)[:, None], np.arange(chunks)
    return of(schedule, ranks, chunks, microbatches, rank, chunk)


class Parts:
    """The quantities of a layout, by stage or by the position of a rank in the pipeline.

    Where a schedule has two copies of every stage, the ranks with the second copies do the same as
    those with the first: the positions, and the ``microbatches``, are those of one copy.
    """

    def __init__(self, problem: TrainingProblem, layout: Layout) -> None:
        self.problem, self.layout = problem, layout
        self.ranks, self.chunks = layout.positions, layout.stages // layout.positions
        self.microbatches = layout.microbatches(problem.batch) // layout.form.copies
        self.shares = shares(problem, layout.split)
        self.costs = StageCosts(problem, layout, self.shares)
        blocks = problem.architecture.layers
        self.cut = cut(
            self.shares,
            self.ranks,
            layout.blocks_of_stages(blocks),
            layout.treated_of_stages(blocks),
            layout.treatment,
            layout.form.in_v,
        )

    @property
    def stage_of(self) -> Ints:
        """(R, v) the stages of every rank."""
        return stages_of_ranks(self.ranks, self.chunks, self.layout.form.in_v)

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
        return self._of_microbatches(self.seconds[0] + self.seconds[1]) - self.overlapped

    @cached_property
    def paired(self) -> Floats:
        """(R, v) seconds of a chunk's forward beside the backward of the rank's other chunk."""
        of = self.stage_of
        if not self.layout.form.pairs:
            return np.zeros(of.shape)
        hidden = np.array([self.costs.hidden(one) for one in self.cut.stages.layers])
        both = hidden[self.cut.stages.index][of].sum(axis=1)[:, None]
        every = zip((self._alone - both).tolist(), both[:, 0].tolist(), strict=True)
        return np.array([[self.costs.beside(one, moved) for one in row] for row, moved in every])

    @property
    def _alone(self) -> Floats:
        """(R, 2) the same seconds one after the other."""
        forward, backward = (one[self.stage_of] for one in self.seconds)
        return forward + backward[:, ::-1]

    @property
    def overlapped(self) -> Floats:
        """Seconds of an iteration that every rank saves by pairs."""
        if not self.layout.form.pairs:
            return np.zeros(self.ranks)
        number = pairs_of_ranks(self.ranks, self.microbatches)
        found: Floats = (number * (self._alone - self.paired)).sum(axis=1)
        return found

    def _of_microbatches(self, of_stages: Floats) -> Floats:
        """Sums over the stages of every rank and all microbatches."""
        found: Floats = self.microbatches * of_stages[self.stage_of].sum(axis=1)
        return found

    @cached_property
    def hop(self) -> float:
        """Seconds from a stage to the next: its output, of which every tensor rank sends a part."""
        seconds = send_seconds(self._pipeline_links, self._sent_bytes)
        return self.problem.charges("pipeline transfers") * seconds

    @property
    def hops(self) -> Floats:
        """(S,) seconds from the stage before each; none where a V turns on a rank."""
        found = np.full(self.layout.stages, self.hop)
        found[0] = 0.0
        if self.layout.form.in_v and self.layout.form.copies == 1:
            found[self.ranks] = 0.0
        return found

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
        if self.layout.pipeline == 1 or not self.problem.charges("pipeline transfers"):
            return 0.0
        # Forward and backward of every chunk; the ends send once less, or twice at the ends of a V.
        times = 2 * self.chunks - (self.layout.pipeline == 2) * (1 + self.layout.form.in_v)
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
        found[[0, -1]] += tied_seconds(self.problem, self.layout, self.shares.head)
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
        hops = self.hop * np.arange(self.ranks)
        there = _before(forward + backward - weight, self.ranks) + 2 * hops
        pipeline = float((there + self.busy - self._of_microbatches(weight)).max())
        pipeline = max(pipeline, self.sending_seconds)
        last = self._first_return(forward, backward - weight) + self.busy + self.reductions
        return max(pipeline + float(self.reductions[0]), float(last.max())) + self.longest_update

    def _first_return(self, forward: Floats, returned: Floats) -> Floats:
        """For every rank, the earliest start of its first backward less its forwards until then."""
        of, last = self.stage_of, self.stage_of[:, -1]
        arrives = forward.sum() + self.hops.sum() + _after(returned + self.hops)[last]
        done = self._forwards(first_forwards)
        found: Floats = arrives - (forward[of] * done).sum(axis=1)
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
        found: Floats = (self.saved[self.stage_of] * kept).sum(axis=1)
        return found

    def _forwards(self, of: Callable[..., Ints]) -> Ints:
        """(R, v) forwards, as ``first_forwards`` or ``kept_forwards`` count them."""
        return _all_forwards(of, self.layout.schedule, self.ranks, self.chunks, self.microbatches)

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


def _after(of_stages: Floats) -> Floats:
    """Sums over the stages after every stage."""
    found: Floats = np.cumsum(of_stages[::-1])[::-1] - of_stages
    return found
