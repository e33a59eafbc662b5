"""Time and memory of a layout, from first principles."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from stagewright.formulations.parallelism.exchanges import send_seconds
from stagewright.formulations.parallelism.layer_times import LayerTime, layer_time
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.pipeline_time import Walk, walk
from stagewright.formulations.parallelism.rules import require_layout
from stagewright.formulations.parallelism.states import (
    Exchange,
    Held,
    States,
    exchange,
    held,
    states,
    tied_seconds,
    update_seconds,
)
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.models.shards import Share, Shares, Split, shares_of


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak bytes of the ranks of one position in the pipeline."""

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


@dataclass(frozen=True)
class Estimate:
    """What a layout takes; lists are by the position in the pipeline.

    ``pipeline_seconds`` is the makespan of all microbatches; ``exchange_seconds`` of it are
    communication on the slowest rank. ``gradient_seconds`` and ``update_seconds`` follow.
    """

    layout: Layout
    microbatches: int
    seconds: float
    pipeline_seconds: float
    bubble_seconds: float
    tensor_seconds: float
    repeated_seconds: float
    gradient_seconds: float
    update_seconds: float
    memory: tuple[RankMemory, ...]
    memory_bytes: float
    model_flops_per_second: float
    mfu: float

    @property
    def peak_bytes(self) -> float:
        """The most that any rank holds."""
        return max(one.total for one in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank's peak is within its memory."""
        return self.peak_bytes <= self.memory_bytes


def evaluate(problem: TrainingProblem, layout: Layout, run: Walk = walk) -> Estimate:
    """Time and memory of a layout, whether or not it fits.

    ``run`` is :func:`walk` or a compiled form of it.

    Raises
    ------
    InputError
        If a rule of the layout does not hold for this model, batch or fabric.
    """
    require_layout(problem, layout)
    parts = _Parts(problem, layout)
    forward, backward = parts.seconds
    finish, kept = run(
        layout.pipeline,
        layout.chunks,
        parts.microbatches,
        forward,
        backward,
        parts.hop,
        parts.saved,
    )
    ends = [finish[r] + parts.reduction(r) for r in range(layout.pipeline)]
    updates = [parts.update(r) for r in range(layout.pipeline)]
    makespan, busiest = float(finish.max()), int(np.argmax(parts.busy))
    seconds = max(ends) + max(updates)
    rate = problem.model_flops / seconds
    return Estimate(
        layout=layout,
        microbatches=parts.microbatches,
        seconds=seconds,
        pipeline_seconds=makespan,
        bubble_seconds=makespan - float(parts.busy[busiest]),
        tensor_seconds=parts.exchanged(busiest),
        repeated_seconds=parts.repeated(busiest),
        gradient_seconds=max(ends) - makespan,
        update_seconds=max(updates),
        memory=tuple(parts.memory(r, float(kept[r])) for r in range(layout.pipeline)),
        memory_bytes=problem.fabric.memory_bytes,
        model_flops_per_second=rate,
        mfu=rate / (problem.peak_flops * problem.fabric.devices),
    )


@lru_cache(maxsize=4096)
def shares(problem: TrainingProblem, split: Split) -> Shares:
    """The shares of the problem's layers."""
    return shares_of(problem.architecture, problem.sequence, split, problem.attention)


class _Parts:
    """The quantities of a layout, by stage or by the position of a rank in the pipeline."""

    def __init__(self, problem: TrainingProblem, layout: Layout) -> None:
        self.problem, self.layout = problem, layout
        self.microbatches = layout.microbatches(problem.batch)
        self.shares = shares(problem, layout.split)
        blocks = layout.blocks_of_stages(problem.architecture.layers)
        self.stages = _divide(self.shares, blocks)

    def time(self, share: Share) -> LayerTime:
        """The layer's times; equal layers are equal objects."""
        if id(share) not in self._times:
            self._times[id(share)] = layer_time(
                self.problem,
                share,
                self.layout.split,
                self.layout.microbatch,
                self.layout.recompute,
            )
        return self._times[id(share)]

    @cached_property
    def _times(self) -> dict[int, LayerTime]:
        return {}

    @cached_property
    def seconds(self) -> tuple[Floats, Floats]:
        """Forward and backward of every stage, with ZeRO's exchanges as far as they are seen."""
        forward, backward = [], []
        for stage in self.stages:
            once = self._exchange(stage)
            ahead = sum(self.time(one).forward for one in stage)
            back = sum(self.time(one).backward for one in stage)
            forward.append(self._beside(ahead, once.each_forward))
            backward.append(self._beside(back, once.each_backward))
        return np.array(forward), np.array(backward)

    def _beside(self, work: float, moved: float) -> float:
        """Work with an exchange that runs beside it, or after it."""
        return max(work, moved) if self.problem.overlap else work + moved

    @property
    def busy(self) -> Floats:
        """Seconds of computation of every rank in an iteration."""
        forward, backward = self.seconds
        each = (forward + backward).reshape(self.layout.chunks, self.layout.pipeline)
        busy: Floats = self.microbatches * each.sum(axis=0)
        return busy

    @property
    def hop(self) -> float:
        """Seconds from a stage to the next: its output, of which every tensor rank sends a part."""
        layout = self.layout
        width = self.shares.kinds[0].width / layout.tensor
        size = self.problem.precision.activation_bytes
        return send_seconds(
            self.problem.fabric,
            layout.pipeline_stride,
            layout.pipeline,
            layout.microbatch * width * size,
        )

    @property
    def saved(self) -> Floats:
        """Bytes that every stage's forward keeps."""
        return np.array([sum(map(self._saved, stage)) for stage in self.stages])

    def _saved(self, share: Share) -> float:
        size = self.problem.precision.activation_bytes
        return self.layout.microbatch * share.saved_bytes(size, self.layout.recompute)

    def _of_rank(self, rank: int) -> list[Share]:
        return [one for stage in self.stages[rank :: self.layout.pipeline] for one in stage]

    def _held(self, of: list[Share]) -> Held:
        return held(of, tied=self.layout.pipeline > 1)

    def _exchange(self, of: list[Share]) -> Exchange:
        return exchange(self.problem, self.layout, self._held(of))

    def reduction(self, rank: int) -> float:
        """Seconds that the exchange of gradients and of updated weights adds to an iteration.

        They run beside the last backward and the next forward, but for one layer's.
        """
        of = self._of_rank(rank)
        once = self._exchange(of)
        tied = 0.0
        if rank in (0, self.layout.pipeline - 1):
            tied = tied_seconds(self.problem, self.layout, self.shares.head)
        if not self.problem.overlap:
            return once.gradients + once.weights + tied
        last = sum(self.time(one).backward for one in of)
        first = sum(self.time(one).forward for one in of)
        return (
            max(once.gradients - last, once.gradients / len(of))
            + max(once.weights - first, once.weights / len(of))
            + tied
        )

    def update(self, rank: int) -> float:
        """Seconds of the optimizer's step of a rank."""
        return update_seconds(self.problem, self.layout, self._held(self._of_rank(rank)))

    def exchanged(self, rank: int) -> float:
        """Seconds of tensor, context and expert exchanges of a rank in an iteration."""
        return self.microbatches * sum(self.time(one).exchange for one in self._of_rank(rank))

    def repeated(self, rank: int) -> float:
        """Seconds of recomputation of a rank in an iteration."""
        return self.microbatches * sum(self.time(one).repeated for one in self._of_rank(rank))

    def memory(self, rank: int, activations: float) -> RankMemory:
        """The peak of a rank whose forwards keep ``activations`` at most."""
        of = self._of_rank(rank)
        total = self._held(of)
        kept: States = states(self.problem, self.layout, total)
        return RankMemory(
            weights=kept.weights,
            gradients=kept.gradients,
            optimizer=kept.optimizer,
            activations=activations,
            buffers=max(map(self._repeated_bytes, of)) + self._gathered_bytes(total),
            reserve=self.problem.reserve_bytes,
        )

    def _repeated_bytes(self, share: Share) -> float:
        """What a layer's backward holds beyond what its forward keeps: the repeated activations."""
        size = self.problem.precision.activation_bytes
        whole = self.layout.microbatch * share.saved_bytes(size, "none")
        return max(0.0, whole - self._saved(share))

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


def _divide(of: Shares, blocks: tuple[int, ...]) -> list[list[Share]]:
    """The layers of every stage: the embedding in the first, the head in the last."""
    found, start = [], 0
    for count in blocks:
        found.append([of.kinds[kind] for kind in of.blocks[start : start + count]])
        start += count
    found[0].insert(0, of.embedding)
    found[-1].append(of.head)
    return found
