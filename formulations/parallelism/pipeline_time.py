"""Costs of a pipeline's stages, and start to finish of a flushed pipeline in a schedule's order.

:func:`walk` is plain Python that Numba can compile as it is; solvers do so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from stagewright.formulations.parallelism.cut import Layers
from stagewright.formulations.parallelism.layer_times import LayerTime, share_time
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.schedules import (
    FORWARD,
    INPUT,
    PAIRED,
    WEIGHT,
    WHOLE,
    Codes,
)
from stagewright.formulations.parallelism.states import (
    Exchange,
    Held,
    exchange,
    held,
    states,
    update_seconds,
)
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import link_seconds
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.models.modules import OFFLOAD
from stagewright.graphs.models.shards import LayerShare, LayerSplit, Recompute, Shares


@documents.record
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
        """The peak bytes of all kinds together."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.buffers
            + self.reserve
        )


@dataclass(frozen=True, slots=True)
class TreatedLayer:
    """A layer on a microbatch: its times, the bytes that a forward makes, and those that it keeps.

    Its backward holds ``held_again`` bytes in addition to those kept: repeated activations, and the
    gradient of the logits; where activations are offloaded, those of a block on its way beside the
    blocks that are kept.
    """

    time: LayerTime
    made: float
    kept: float
    held_again: float


@lru_cache(maxsize=256)
def _known_layers(
    problem: TrainingProblem, split: LayerSplit, samples: int, put_off: bool, offloads: bool
) -> dict[tuple[LayerShare, Recompute], TreatedLayer]:
    """The layers that were computed, of all layouts that have them alike; at first none."""
    return {}


class StageCosts:
    """Times (s) and bytes of layers in a layout, wherever its stages begin and end."""

    def __init__(self, problem: TrainingProblem, layout: Layout, of: Shares) -> None:
        self.problem, self.layout, self.width = problem, layout, of.widest
        self._known = _known_layers(
            problem, layout.split, layout.microbatch, self.is_split, layout.offload_blocks > 0
        )
        self._exchanges: dict[Held, Exchange] = {}

    @property
    def is_split(self) -> bool:
        """Whether backwards are split in two."""
        return self.layout.form.is_split

    def of(self, share: LayerShare, treatment: Recompute) -> TreatedLayer:
        """A layer, as its activations are treated."""
        if (share, treatment) not in self._known:
            self._known[share, treatment] = self._of(share, treatment)
        return self._known[share, treatment]

    def _of(self, share: LayerShare, treatment: Recompute) -> TreatedLayer:
        layout, processor = self.layout, self.problem.processor
        samples, whole = layout.microbatch, processor.saved_bytes(share, "none")
        kept = samples * processor.saved_bytes(share, treatment)
        again = max(0.0, samples * (whole + processor.gradient_of_loss(share)) - kept)
        return TreatedLayer(
            time=share_time(self.problem, share, layout.split, samples, treatment, self.is_split),
            made=samples * whole,
            kept=kept,
            held_again=samples * whole if layout.offload_blocks and share.is_block else again,
        )

    def held(self, layers: Layers) -> Held:
        """The parameters of the layers; in a V one rank has the embedding and the head."""
        return held(layers, tied=self.layout.pipeline > 1 and not self.layout.form.in_v)

    def seconds(self, layers: Layers) -> tuple[float, float]:
        """Forward and backward, with ZeRO's exchanges and copies as far as they are seen."""
        once, copied = self._exchange(self.held(layers)), self._copied_seconds(layers)
        later = self.put_off(layers)
        forward = self.beside(self._forward(layers), once.each_forward)
        backward = self.beside(self._backward(layers) - later, once.each_backward) + later
        if not copied:
            return forward, backward
        # What goes to other servers shares the device's link to the host.
        shared = self.problem.fabric.devices > self.problem.fabric.per_server
        return (
            max(forward, copied + shared * once.each_forward),
            max(backward, copied + shared * once.each_backward),
        )

    def _copied_seconds(self, layers: Layers) -> float:
        """Activations on their way to the host, or back, spread over the whole forward or backward.

        Transformer Engine spreads them so (pytorch/cpu_offload.py: ``layer_window_map``), and the
        device's copy engines move them.
        """
        host = self.problem.fabric.host_bytes_per_second
        if host is None:
            return 0.0
        moved = sum(n * self.of(one, kind).made for one, kind, n in layers if kind == OFFLOAD)
        return self.problem.charges("activation offload") * link_seconds(moved, host)

    def put_off(self, layers: Layers) -> float:
        """The part of the backward that is put off."""
        return sum(n * self.of(one, kind).time.weight for one, kind, n in layers)

    def _forward(self, layers: Layers) -> float:
        return sum(n * self.of(one, kind).time.forward for one, kind, n in layers)

    def _backward(self, layers: Layers) -> float:
        return sum(n * self.of(one, kind).time.backward for one, kind, n in layers)

    def hidden(self, layers: Layers) -> float:
        """Seconds of a forward, and of a backward, that a pair hides: those to experts and back."""
        if not self.layout.form.pairs:
            return 0.0
        return sum(n * self.of(one, kind).time.dispatched for one, kind, n in layers)

    def beside(self, work: float, moved: float) -> float:
        """Seconds of work and of an exchange that runs beside or after the work."""
        if not self.problem.overlap:
            return work + moved
        return max(work, moved) + self.problem.reached.contention * min(work, moved)

    def _exchange(self, of: Held) -> Exchange:
        if of not in self._exchanges:
            self._exchanges[of] = exchange(self.problem, self.layout, of)
        return self._exchanges[of]

    def reduction(self, layers: Layers) -> float:
        """Seconds that the exchange of a rank's gradients and updated weights adds to an iteration.

        They run beside the last backward and the next forward, but for one layer's.
        """
        of = self.held(layers)
        once = self._exchange(of)
        if not self.problem.overlap:
            return once.gradients + once.weights
        forward, backward = self._forward(layers), self._backward(layers)
        gradients = max(once.gradients - backward, once.gradients / of.layers)
        weights = max(once.weights - forward, once.weights / of.layers)
        # What has nothing to run beside takes at most as long as if nothing ran beside anything.
        alone = min(once.alone_forward, forward) + min(once.alone_backward, backward)
        return alone + gradients + weights

    def update(self, layers: Layers) -> float:
        """A rank's step of the optimizer."""
        return update_seconds(self.problem, self.layout, self.held(layers))

    def saved(self, layers: Layers) -> float:
        """Bytes that a forward keeps."""
        elements = sum(size for _, size in {one.kept_once for one, _, _ in layers})
        each = self.problem.precision.activation_bytes * (1 + self.problem.memory.slack)
        return self.layout.microbatch * elements * each + sum(
            n * self.of(one, kind).kept for one, kind, n in layers
        )

    def memory(self, layers: Layers, activations: float) -> RankMemory:
        """The peak of a rank whose forwards keep ``activations`` at most."""
        of = self.held(layers)
        kept = states(self.problem, self.layout, of)
        return RankMemory(
            weights=kept.weights,
            gradients=kept.gradients,
            optimizer=kept.optimizer,
            activations=activations,
            buffers=max(self.of(one, kind).held_again for one, kind, _ in layers)
            + self._gathered_bytes(of),
            reserve=self.problem.reserve_bytes,
        )

    def _gathered_bytes(self, of: Held) -> float:
        """Bytes gathered for a layer: with ZeRO its weights, and the hidden states of all ranks."""
        precision, layout, memory = self.problem.precision, self.layout, self.problem.memory
        trained = of.trained.shared + of.trained.expert
        bucket = min(memory.bucket_parameters, trained) if layout.zero else 0.0
        gathered = 2 * bucket * precision.weight_bytes
        if memory.layer_gradients:
            gathered += of.trained.largest * precision.weight_bytes
        if layout.zero >= 2:
            gathered += of.trained.largest * precision.gradient_bytes
        if layout.zero == 3:
            gathered += 2 * of.every.largest * precision.weight_bytes
        if layout.sequence_parallel:
            gathered += self.width * layout.microbatch * precision.activation_bytes
        return gathered * (1 + memory.slack)


Walk: TypeAlias = Callable[
    [Codes, Ints, int, Floats, Floats, Floats, Floats, Floats, Floats], tuple[Floats, Floats]
]


def walk(  # noqa: C901 - one flat pass, which is compiled
    codes: Codes,
    stage_of: Ints,
    microbatches: int,
    forward: Floats,
    backward: Floats,
    weight: Floats,
    paired: Floats,
    hops: Floats,
    saved: Floats,
) -> tuple[Floats, Floats]:
    """Per rank, when its last computation ends (s), and the most that its forwards keep (bytes).

    ``codes`` are those of `schedules.order_codes`, ``stage_of`` (R, v) the stages of ranks. Every
    computation starts as soon as the one before it on its rank is done and its input has arrived. A
    forward and the backward beside it start and end together. A forward's activations are freed
    when the last of its gradients is done.

    ``forward``, ``backward``, ``weight``: (S,) seconds of every stage; ``weight`` is the weight
    gradients' part of the backward. ``paired``: (R, v) seconds of a chunk's forward together with
    the backward of the rank's other chunk. ``hops``: (S,) seconds from the stage before each.
    ``saved``: (S,) bytes that a forward keeps.
    """
    ranks, chunks = stage_of.shape
    stages, steps = ranks * chunks, codes.shape[1]
    forward_end = np.full((stages, microbatches), -1.0)
    backward_end = np.full((stages, microbatches), -1.0)
    next_f = np.zeros((ranks, chunks), dtype=np.int64)
    next_b = np.zeros((ranks, chunks), dtype=np.int64)
    place = np.zeros(ranks, dtype=np.int64)
    clock, kept, most = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while place[rank] < steps and codes[rank, place[rank]] >= 0:
                code = codes[rank, place[rank]]
                kind, chunk = code // chunks, code % chunks
                other = 1 - chunk if kind == PAIRED else chunk
                stage, back = stage_of[rank, chunk], stage_of[rank, other]
                is_forward = kind in (FORWARD, PAIRED)
                is_backward = kind in (INPUT, WHOLE, PAIRED)
                ready = 0.0
                if is_forward and stage > 0:
                    ready = forward_end[stage - 1, next_f[rank, chunk]]
                    if ready < 0:
                        break
                    ready += hops[stage]
                if is_backward:
                    arrived = forward_end[back, next_b[rank, other]]
                    if back < stages - 1:
                        arrived = backward_end[back + 1, next_b[rank, other]]
                    if arrived < 0:
                        break
                    ready = max(ready, arrived + (hops[back + 1] if back < stages - 1 else 0.0))
                if kind == FORWARD:
                    seconds = forward[stage]
                elif kind == PAIRED:
                    seconds = paired[rank, chunk]
                elif kind == WEIGHT:
                    seconds = weight[stage]
                else:
                    seconds = backward[stage] - (weight[stage] if kind == INPUT else 0.0)
                clock[rank] = max(clock[rank], ready) + seconds
                if is_forward:
                    forward_end[stage, next_f[rank, chunk]] = clock[rank]
                    next_f[rank, chunk] += 1
                    kept[rank] += saved[stage]
                    most[rank] = max(most[rank], kept[rank])
                if is_backward:
                    backward_end[back, next_b[rank, other]] = clock[rank]
                    next_b[rank, other] += 1
                if kind in (WEIGHT, WHOLE, PAIRED):
                    kept[rank] -= saved[back]
                place[rank] += 1 + (kind == PAIRED)
                moved = True
    return clock, most
