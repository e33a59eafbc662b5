"""Time and memory of the layers of a stage, or of all stages of a rank, in a layout."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

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
from stagewright.graphs.documents import documents
from stagewright.graphs.models.shards import Share, Shares


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
        """The peak bytes of all kinds together."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.buffers
            + self.reserve
        )


class StageCosts:
    """Times (s) and bytes of layers in a layout, wherever its stages begin and end."""

    def __init__(self, problem: TrainingProblem, layout: Layout, of: Shares) -> None:
        self.problem, self.layout, self.width = problem, layout, of.kinds[0].width

    @property
    def is_split(self) -> bool:
        """Whether backwards are split in two."""
        return self.layout.schedule == "zero-bubble"

    def time(self, share: Share, again: bool) -> LayerTime:
        """The layer's times; with ``again`` the backward includes a second forward."""
        recompute = self.layout.recompute if again else "none"
        layout = self.layout
        return share_time(
            self.problem, share, layout.split, layout.microbatch, recompute, self.is_split
        )

    def held(self, layers: Layers) -> Held:
        """The parameters of the layers."""
        return held(layers, tied=self.layout.pipeline > 1)

    def seconds(self, layers: Layers) -> tuple[float, float]:
        """Forward and backward, with ZeRO's exchanges as far as they are seen."""
        once = self._exchange(self.held(layers))
        later = self.put_off(layers)
        forward = self._beside(self._forward(layers), once.each_forward)
        return forward, self._beside(self._backward(layers) - later, once.each_backward) + later

    def put_off(self, layers: Layers) -> float:
        """The part of the backward that is put off."""
        return sum(n * self.time(one, again).weight for one, again, n in layers)

    def _forward(self, layers: Layers) -> float:
        return sum(n * self.time(one, again).forward for one, again, n in layers)

    def _backward(self, layers: Layers) -> float:
        return sum(n * self.time(one, again).backward for one, again, n in layers)

    def _beside(self, work: float, moved: float) -> float:
        """Seconds of work and of an exchange that runs beside or after the work."""
        return max(work, moved) if self.problem.overlap else work + moved

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
        return sum(n * self._saved(one, again) for one, again, n in layers)

    def _saved(self, share: Share, again: bool) -> float:
        size = self.problem.precision.activation_bytes
        recompute = self.layout.recompute if again else "none"
        return self.layout.microbatch * share.saved_bytes(size, recompute)

    def memory(self, layers: Layers, activations: float) -> RankMemory:
        """The peak of a rank whose forwards keep ``activations`` at most."""
        of = self.held(layers)
        kept = states(self.problem, self.layout, of)
        return RankMemory(
            weights=kept.weights,
            gradients=kept.gradients,
            optimizer=kept.optimizer,
            activations=activations,
            buffers=self._repeated_most(layers) + self._gathered_bytes(of),
            reserve=self.problem.reserve_bytes,
        )

    def _repeated_most(self, layers: Layers) -> float:
        return max(self._repeated_bytes(one, again) for one, again, _ in layers)

    def _repeated_bytes(self, share: Share, again: bool) -> float:
        """Bytes that a layer's backward holds in addition to those kept from the forward.

        These are repeated activations, and the gradient of the logits.
        """
        size = self.problem.precision.activation_bytes
        samples = self.layout.microbatch
        whole = samples * (share.saved_bytes(size, "none") + share.gradient_bytes)
        return max(0.0, whole - self._saved(share, again))

    def _gathered_bytes(self, of: Held) -> float:
        """Bytes gathered for a layer: with ZeRO its weights, and the hidden states of all ranks."""
        precision, layout = self.problem.precision, self.layout
        gathered = 0.0
        if layout.zero >= 2:
            gathered += of.largest * precision.gradient_bytes
        if layout.zero == 3:
            gathered += 2 * of.largest * precision.weight_bytes
        if layout.sequence_parallel:
            gathered += self.width * layout.microbatch * precision.activation_bytes
        return gathered
