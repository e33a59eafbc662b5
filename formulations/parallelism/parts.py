"""The quantities of a layout, by stage or by the position of a rank in the pipeline."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from stagewright.formulations.parallelism.cut import Layers, cut
from stagewright.formulations.parallelism.exchanges import occupied_seconds, send_seconds
from stagewright.formulations.parallelism.layer_times import LayerTime, share_time
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.pipeline_time import first_forwards, kept_forwards
from stagewright.formulations.parallelism.states import (
    Exchange,
    Held,
    exchange,
    held,
    states,
    tied_seconds,
    update_seconds,
)
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.machines.groups import Links, links
from stagewright.graphs.models.shards import Share, Shares, Split, shares_of


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak bytes of the ranks of one position in the pipeline."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    reserve: float

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.buffers
            + self.reserve
        )


@lru_cache(maxsize=4096)
def shares(problem: TrainingProblem, split: Split) -> Shares:
    """The shares of the problem's layers."""
    return shares_of(problem.architecture, problem.sequence, split, problem.attention)


class Parts:
    """The quantities of a layout, by stage or by the position of a rank in the pipeline."""

    def __init__(self, problem: TrainingProblem, layout: Layout) -> None:
        self.problem, self.layout = problem, layout
        self.microbatches = layout.microbatches(problem.batch)
        self.shares = shares(problem, layout.split)
        blocks = layout.blocks_of_stages(problem.architecture.layers)
        self.cut = cut(self.shares, layout.pipeline, blocks, layout.recompute_blocks)
        self.held = [held(of, tied=layout.pipeline > 1) for of in self.cut.ranks.layers]

    def varied(self, layout: Layout) -> "Parts":
        """The parts of a layout that differs in ZeRO, offload or placement alone."""
        found = copy.copy(self)
        found.layout = layout
        for name in ("seconds", "busy", "hop", "reductions", "longest_update"):
            found.__dict__.pop(name, None)
        return found

    def time(self, share: Share, again: bool) -> LayerTime:
        """The layer's times, if it is ``again`` computed in the backward or not."""
        recompute = self.layout.recompute if again else "none"
        layout = self.layout
        return share_time(
            self.problem, share, layout.split, layout.microbatch, recompute, self.is_split
        )

    @property
    def is_split(self) -> bool:
        """Whether backwards are split in two."""
        return self.layout.schedule == "zero-bubble"

    @cached_property
    def weight_seconds(self) -> Floats:
        """The part of every stage's backward that is put off."""
        each = [self._put_off(stage) for stage in self.cut.stages.layers]
        found: Floats = np.array(each)[self.cut.stages.index]
        return found

    @cached_property
    def seconds(self) -> tuple[Floats, Floats]:
        """Forward and backward of every stage, with ZeRO's exchanges as far as they are seen."""
        forward, backward = [], []
        for stage in self.cut.stages.layers:
            once = self._exchange(held(stage, tied=self.layout.pipeline > 1))
            forward.append(self._beside(self._forward(stage), once.each_forward))
            later = self._put_off(stage)
            back = self._beside(self._backward(stage) - later, once.each_backward)
            backward.append(back + later)
        index = self.cut.stages.index
        return np.array(forward)[index], np.array(backward)[index]

    def _forward(self, layers: Layers) -> float:
        return sum(n * self.time(one, again).forward for one, again, n in layers)

    def _backward(self, layers: Layers) -> float:
        return sum(n * self.time(one, again).backward for one, again, n in layers)

    def _put_off(self, layers: Layers) -> float:
        return sum(n * self.time(one, again).weight for one, again, n in layers)

    def _beside(self, work: float, moved: float) -> float:
        """Work with an exchange that runs beside it, or after it."""
        return max(work, moved) if self.problem.overlap else work + moved

    def _by_rank(self, of_kind: Callable[[int], float]) -> Floats:
        """A quantity of every rank, which is the same for ranks of one kind."""
        each = [of_kind(kind) for kind in range(len(self.held))]
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
        return send_seconds(self._pipeline_links, self._sent_bytes)

    @property
    def _pipeline_links(self) -> Links:
        return links(self.problem.fabric, self.layout.pipeline_group)

    @property
    def _sent_bytes(self) -> float:
        width = self.shares.kinds[0].width / self.layout.tensor
        return self.layout.microbatch * width * self.problem.precision.activation_bytes

    @property
    def sending_seconds(self) -> float:
        """Seconds in which a rank's link is busy with what it sends to other stages."""
        pipeline, chunks = self.layout.pipeline, self.layout.chunks
        if pipeline == 1:
            return 0.0
        # Forward and backward of every chunk; the ends send once less.
        times = 2 * chunks - (pipeline == 2)
        each = occupied_seconds(self._pipeline_links, self._sent_bytes)
        return self.microbatches * times * each

    @cached_property
    def saved(self) -> Floats:
        """Bytes that every stage's forward keeps."""
        each = [
            sum(n * self._saved(one, again) for one, again, n in stage)
            for stage in self.cut.stages.layers
        ]
        found: Floats = np.array(each)[self.cut.stages.index]
        return found

    def _saved(self, share: Share, again: bool) -> float:
        size = self.problem.precision.activation_bytes
        recompute = self.layout.recompute if again else "none"
        return self.layout.microbatch * share.saved_bytes(size, recompute)

    def _exchange(self, of: Held) -> Exchange:
        return exchange(self.problem, self.layout, of)

    @cached_property
    def reductions(self) -> Floats:
        """Seconds that the exchange of gradients and of updated weights adds on every rank.

        They run beside the last backward and the next forward, but for one layer's.
        """
        found = self._by_rank(self._reduction)
        if self.layout.pipeline > 1:
            tied = tied_seconds(self.problem, self.layout, self.shares.head)
            found[[0, -1]] += tied
        return found

    def _reduction(self, kind: int) -> float:
        once = self._exchange(self.held[kind])
        if not self.problem.overlap:
            return once.gradients + once.weights
        layers, count = self.cut.ranks.layers[kind], self.held[kind].layers
        forward, backward = self._forward(layers), self._backward(layers)
        gradients = max(once.gradients - backward, once.gradients / count)
        weights = max(once.weights - forward, once.weights / count)
        # What has nothing to run beside takes at most as long as if nothing ran beside anything.
        alone = min(once.alone_forward, forward) + min(once.alone_backward, backward)
        return alone + gradients + weights

    @cached_property
    def longest_update(self) -> float:
        """Seconds of the slowest rank's step of the optimizer."""
        return max(update_seconds(self.problem, self.layout, one) for one in self.held)

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
        """When every rank's first backward can begin, less its forwards until then."""
        layout, ranks = self.layout, np.arange(self.layout.pipeline)
        arrives = (
            forward.sum()
            + self.hop * (layout.stages - 1)
            + (np.cumsum(returned[::-1])[::-1][-layout.pipeline :] - returned[-layout.pipeline :])
            + self.hop * (layout.pipeline - 1 - ranks)
        )
        chunks = np.arange(layout.chunks)[:, None]
        done = first_forwards(
            layout.pipeline, layout.chunks, self.microbatches, self.is_split, ranks, chunks
        )
        found: Floats = arrives - (forward.reshape(done.shape) * done).sum(axis=0)
        return found

    @property
    def least_bytes(self) -> float:
        """A lower bound on the peak: what is kept after the warm-up and one forward."""
        fixed = self._by_rank(lambda kind: self._memory(kind, 0.0).total)
        return float((fixed + self._least_kept).max())

    @cached_property
    def _least_kept(self) -> Floats:
        layout = self.layout
        ranks, chunks = np.arange(layout.pipeline), np.arange(layout.chunks)[:, None]
        kept = kept_forwards(
            layout.pipeline, layout.chunks, self.microbatches, self.is_split, ranks, chunks
        )
        found: Floats = (self.saved.reshape(kept.shape) * kept).sum(axis=0)
        return found

    def worked(self, rank: int) -> float:
        """Seconds of forwards and backwards of a rank, without what ZeRO adds."""
        return self._of_time(rank, lambda one: one.forward + one.backward)

    def exchanged(self, rank: int) -> float:
        """Seconds of tensor, context and expert exchanges of a rank in an iteration."""
        return self._of_time(rank, lambda one: one.exchange)

    def repeated(self, rank: int) -> float:
        """Seconds of recomputation of a rank in an iteration."""
        return self._of_time(rank, lambda one: one.repeated)

    def _of_time(self, rank: int, part: Callable[[LayerTime], float]) -> float:
        layers = self.cut.ranks.layers[self.cut.ranks.index[rank]]
        each: float = sum(n * part(self.time(one, again)) for one, again, n in layers)
        return self.microbatches * each

    def memory(self, rank: int, activations: float) -> RankMemory:
        """The peak of a rank whose forwards keep ``activations`` at most."""
        return self._memory(int(self.cut.ranks.index[rank]), activations)

    def _memory(self, kind: int, activations: float) -> RankMemory:
        total = self.held[kind]
        kept = states(self.problem, self.layout, total)
        repeated = max(
            self._repeated_bytes(one, again) for one, again, _ in self.cut.ranks.layers[kind]
        )
        return RankMemory(
            weights=kept.weights,
            gradients=kept.gradients,
            optimizer=kept.optimizer,
            activations=activations,
            buffers=repeated + self._gathered_bytes(total),
            reserve=self.problem.reserve_bytes,
        )

    def _repeated_bytes(self, share: Share, again: bool) -> float:
        """What a layer's backward holds beyond what its forward keeps.

        These are repeated activations, and the gradient of the logits.
        """
        size = self.problem.precision.activation_bytes
        samples = self.layout.microbatch
        whole = samples * (share.saved_bytes(size, "none") + share.gradient_bytes)
        return max(0.0, whole - self._saved(share, again))

    def _gathered_bytes(self, of: Held) -> float:
        """What is gathered for a layer: with ZeRO its weights, the hidden states of all ranks."""
        precision, layout = self.problem.precision, self.layout
        gathered = 0.0
        if layout.zero >= 2:
            gathered += of.largest * precision.gradient_bytes
        if layout.zero == 3:
            gathered += 2 * of.largest * precision.weight_bytes
        if layout.sequence_parallel:
            width = self.shares.kinds[0].width * layout.microbatch
            gathered += width * precision.activation_bytes
        return gathered


def _before(of_stages: Floats, ranks: int) -> Floats:
    """Sums over the stages before every rank's first one."""
    found: Floats = np.concatenate(([0.0], np.cumsum(of_stages)))[:ranks]
    return found
