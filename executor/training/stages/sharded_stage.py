"""The computations of a stage whose replicas divide gradients, or weights too, by layers."""

from typing import Any

from stagewright.executor.capture.split_layer import SavedForWeights, SplitLayer
from stagewright.executor.capture.twins import made_once
from stagewright.executor.training.stages.division import InFlight, backward_of
from stagewright.executor.training.stages.sharded_weights import GradientShards
from stagewright.executor.training.stages.stage import Gradients, Seed, StageComputation, Tensors


class ShardedComputation(StageComputation):
    """A stage of which every replica has a part of the gradients, or of the ``weights`` too.

    Each layer has its own record of autograd, so that what is divided is whole only while it
    computes. Backwards begin at the stage's outputs, which are never attached. In two parts, I
    gathers a layer's weights and W sums up its gradients; a layer without pieces does both in I,
    and one whose weight gradients need its weights (as without an input gradient) gathers in W.
    """

    def __init__(self, *given: Any, weights: GradientShards, **options: Any) -> None:
        super().__init__(*given, **options)
        self._weights = weights

    def _layer(self, i: int, inputs: Tensors, seed: Seed) -> Tensors:
        with self._weights.gathered(i):
            return super()._layer(i, inputs, seed)

    def _split_layer(self, i: int) -> SplitLayer:
        with self._weights.in_memory(i):
            return super()._split_layer(i)

    def _run_layer(self, flight: InFlight, i: int, inputs: Tensors) -> Tensors:
        with self._weights.gathered(i):
            return super()._run_layer(flight, i, inputs)

    @made_once()
    def _run(self, flight: Any, inputs: Tensors, in_two: bool, attached: bool = False) -> Tensors:
        if in_two:
            return super()._run(flight, inputs, in_two)
        for i in range(len(self.layers)):
            graph, outputs = self._record(range(i, i + 1), inputs, flight.seed)
            flight.graphs.append(graph)
            inputs = tuple(one.detach() for one in outputs)
        return inputs

    @made_once()
    def backward(self, microbatch: int, output_gradients: Gradients) -> Gradients:
        """The whole backward: gradients of the stage's inputs; parts of the weights' are added."""
        flight = self._flights.pop(microbatch)
        if self.recompute == "full":
            with self._again(flight):
                self._run(flight, flight.inputs.pop(), in_two=False)
        for i in reversed(range(len(self.layers))):
            with self._weights.summed(i):
                if self.recompute == "layer":
                    with self._again(flight):
                        graph, _ = self._record(range(i, i + 1), flight.inputs.pop(), flight.seed)
                else:
                    graph = flight.graphs.pop()
                output_gradients = backward_of(graph, output_gradients)
        return output_gradients

    def _input_gradient_of(
        self, i: int, flight: InFlight, output_gradients: Gradients
    ) -> Gradients:
        is_whole = self._pieces[i] is None
        with self._weights.summed(i) if is_whole else self._weights.gathered(i):
            return super()._input_gradient_of(i, flight, output_gradients)

    def _weight_gradient_of(self, i: int, saved: SavedForWeights) -> None:
        needed = self._weights.are_among(saved.values, i)
        with self._weights.summed(i, gathers=needed):
            super()._weight_gradient_of(i, saved)
