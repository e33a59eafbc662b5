"""Start to finish of a flushed pipeline: (interleaved) 1F1B, or with zero bubbles.

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

    @property
    def is_split(self) -> bool:
        """Whether backwards are split in two."""
        return self.layout.schedule == "zero-bubble"

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
        """The parameters of the layers."""
        return held(layers, tied=self.layout.pipeline > 1)

    def seconds(self, layers: Layers) -> tuple[float, float]:
        """Forward and backward, with ZeRO's exchanges and copies as far as they are seen."""
        once, copied = self._exchange(self.held(layers)), self._copied_seconds(layers)
        later = self.put_off(layers)
        forward = self._beside(self._forward(layers), once.each_forward)
        backward = self._beside(self._backward(layers) - later, once.each_backward) + later
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

    def _beside(self, work: float, moved: float) -> float:
        """Seconds of work and of an exchange that runs beside or after the work."""
        if not self.problem.overlap:
            return work + moved
        return max(work, moved) + self.problem.reached.contention * min(work, moved)

    def _exchange(self, of: Held) -> Exchange:
        return exchange(self.problem, self.layout, of)

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


def first_forwards(
    ranks: Ints | int,
    chunks: Ints | int,
    microbatches: Ints | int,
    split: bool,
    rank: Ints,
    chunk: Ints,
    behind: Ints | int = 0,
) -> Ints:
    """How many forwards of a chunk are among the first W of a rank.

    W are the warm-up and one more, after which comes the first backward, and ``behind`` more. The
    forwards go through the chunks in groups of P microbatches. All arguments broadcast.
    """
    ahead = ranks - rank - 1
    several = (ahead if split else 2 * ahead) + (chunks - 1) * ranks
    done = np.where(np.equal(chunks, 1), ahead, several) + 1 + behind
    done = np.minimum(done, microbatches * chunks)
    groups, rest = np.divmod(done, ranks * chunks)
    mixed = groups * ranks + np.clip(rest - chunk * ranks, 0, ranks)
    found: Ints = np.where(np.equal(chunks, 1), done, mixed)
    return found


def kept_forwards(
    ranks: Ints | int,
    chunks: Ints | int,
    microbatches: Ints | int,
    split: bool,
    rank: Ints,
    chunk: Ints,
) -> Ints:
    """How many forwards of a chunk a rank keeps at the least when it frees the first.

    With ``split`` backwards the first weight gradient is put off by as many as the rank's number.
    """
    behind = rank if split else 0
    return first_forwards(ranks, chunks, microbatches, split, rank, chunk, behind)


Walk: TypeAlias = Callable[
    [int, int, int, bool, Floats, Floats, Floats, float, Floats], tuple[Floats, Floats]
]


def walk(  # noqa: C901 - one flat pass, which is compiled
    ranks: int,
    chunks: int,
    microbatches: int,
    split: bool,
    forward: Floats,
    backward: Floats,
    weight: Floats,
    hop: float,
    saved: Floats,
) -> tuple[Floats, Floats]:
    """Per rank, when its last computation ends (s), and the most that its forwards keep (bytes).

    Stage s is chunk s // P on rank s mod P. The order is Megatron-LM's (interleaved) 1F1B
    (Narayanan et al. 2021, section 2.2; ``schedules.interleaved``), or with ``split`` backwards
    that of ZB-H1 (Qi et al. 2024, section 2.3; ``schedules.zero_bubble``): rank r puts off its
    weight gradients by r. Every computation starts as soon as the one before it on its rank is done
    and its input has arrived, ``hop`` seconds after it was made. A forward's activations are freed
    when the last of its gradients is done.

    ``forward``, ``backward``, ``weight``: (P * v,) seconds of every stage; ``weight`` is the weight
    gradients' part of the backward. ``saved``: (P * v,) bytes that a forward keeps.
    """
    stages, passes = ranks * chunks, microbatches * chunks
    forward_end = np.full((stages, microbatches), -1.0)
    backward_end = np.full((stages, microbatches), -1.0)
    next_f = np.zeros(ranks, dtype=np.int64)
    next_b = np.zeros(ranks, dtype=np.int64)
    next_w = np.zeros(ranks, dtype=np.int64)
    clock, kept, most = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    left = (3 if split else 2) * passes * ranks
    while left > 0:
        for rank in range(ranks):
            ahead, behind = ranks - rank - 1, rank
            if chunks > 1:
                ahead = (ahead if split else 2 * ahead) + (chunks - 1) * ranks
            while True:
                # Forwards run ``ahead`` of backwards, and weight gradients ``behind`` them.
                if next_f[rank] < passes and next_f[rank] < ahead:
                    kind = 0
                elif split and next_w[rank] < next_b[rank] - behind:
                    kind = 2
                elif next_f[rank] < passes and next_f[rank] <= ahead + next_b[rank]:
                    kind = 0
                elif next_b[rank] < passes:
                    kind = 1
                elif split and next_w[rank] < passes:
                    kind = 2
                else:
                    break
                turn = next_f[rank] if kind == 0 else next_b[rank] if kind == 1 else next_w[rank]
                chunk, microbatch = 0, turn
                if chunks > 1:
                    group, within = turn // stages, turn % stages
                    chunk, microbatch = within // ranks, group * ranks + within % ranks
                    if kind > 0:
                        chunk = chunks - 1 - chunk
                stage = chunk * ranks + rank
                if kind == 0:
                    ready = 0.0
                    if stage > 0:
                        ready = forward_end[stage - 1, microbatch]
                        if ready < 0:
                            break
                        ready += hop
                    clock[rank] = max(clock[rank], ready) + forward[stage]
                    forward_end[stage, microbatch] = clock[rank]
                    next_f[rank] += 1
                    kept[rank] += saved[stage]
                    most[rank] = max(most[rank], kept[rank])
                elif kind == 1:
                    ready = forward_end[stage, microbatch]
                    if stage < stages - 1:
                        ready = backward_end[stage + 1, microbatch]
                        if ready < 0:
                            break
                        ready += hop
                    own = backward[stage] - (weight[stage] if split else 0.0)
                    clock[rank] = max(clock[rank], ready) + own
                    backward_end[stage, microbatch] = clock[rank]
                    next_b[rank] += 1
                    if not split:
                        kept[rank] -= saved[stage]
                else:
                    clock[rank] += weight[stage]
                    next_w[rank] += 1
                    kept[rank] -= saved[stage]
                left -= 1
    return clock, most
