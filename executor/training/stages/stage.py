"""The computations of one stage on one rank: forward, whole backward, or its two parts.

Layers run in sequence. Every layer that draws random numbers is seeded before, so that a
recomputed forward draws the same, and so that no cut changes the draws. A replica
that has some of the samples draws for all of them and takes its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from stagewright.executor.capture.draws import DrawsOfShare, WholeDraw
from stagewright.executor.capture.layers import CapturedLayer
from stagewright.executor.capture.shapes import LayerTrace, Value
from stagewright.executor.capture.split_backward import split_layer
from stagewright.executor.capture.split_layer import CannotSplit, Saved, SavedForWeights, SplitLayer
from stagewright.executor.capture.twins import made_once
from stagewright.executor.programs.memory import Footprint
from stagewright.executor.programs.program import Samples
from stagewright.executor.training.stages.division import (
    Held,
    InFlight,
    LayersGraph,
    add_gradient,
    backward_of,
    compiled_layer,
    held_places,
    tensors_at,
)

Tensors = tuple[Tensor, ...]
Gradients = Sequence[Tensor | None]
Seed = Callable[[int], int]  # of the stage's i-th layer


@dataclass(frozen=True, slots=True)
class StageLayer:
    """A layer of a stage, the values that enter it, and its trace."""

    captured: CapturedLayer
    inputs: tuple[Value, ...]
    trace: LayerTrace


@dataclass(frozen=True, slots=True)
class SampleShare:
    """The samples ``rows`` of a microbatch of ``samples`` that one of the stage's devices has.

    ``draws`` are those of each layer for all samples, None where a share cannot take its rows of
    them: what such a layer draws depends on the ``lane``, the device's place among them.
    """

    rows: Samples
    samples: int
    lane: int
    draws: tuple[tuple[WholeDraw, ...] | None, ...]


class StageComputation:
    """A sequence of layers on one device.

    ``recompute`` and ``offload`` as in the plan. Microbatches in ``split`` have their backward in
    two parts. ``autocast`` is the type of its computations, None for the parameters' type.
    ``share`` says which samples it works on, None for all in order. ``compiled``: forwards and
    whole backwards of its layers are compiled by torch; parts of backwards are not.
    """

    def __init__(
        self,
        layers: Sequence[StageLayer],
        recompute: Literal["none", "full", "layer"],
        device: torch.device,
        autocast: torch.dtype | None,
        *,
        offload: bool = False,
        share: SampleShare | None = None,
        compiled: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        modules = [layer.captured.module for layer in layers]
        self._calls: list[Callable[..., Tensors]] = (
            [compiled_layer(module) for module in modules]
            if compiled
            else [module.forward for module in modules]  # they are ours, and have no hooks
        )
        self.recompute = recompute
        self.offload = offload
        self.device = device
        self.autocast = autocast
        self._pieces: dict[int, SplitLayer | None] = {}
        # Of the layers in pieces; versions of the weights change what is held there.
        self._parameters: dict[int, list[Held]] = {}
        self._own_buffers: dict[int, list[Held]] = {}
        self._flights: dict[int, InFlight] = {}
        self._share = share
        self._buffers = self._find_buffers()

    def _find_buffers(self) -> list[list[Held]]:
        """Per layer, where it holds a buffer that some layer of the stage changes."""
        every = [
            [
                (module._buffers, name)
                for module in layer.captured.module.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
            for layer in self.layers
        ]
        changing = {
            id(held[name])
            for layer, places in zip(self.layers, every, strict=True)
            for held, name in places
            if layer.trace.changes
        }
        return [[one for one in places if id(one[0][one[1]]) in changing] for places in every]

    @property
    def trained(self) -> tuple[bool, ...]:
        """Which of the stage's outputs depend on a parameter that is trained."""
        return tuple(value.gradient for value in self.layers[-1].trace.outputs)

    def footprint(self) -> Footprint:
        """The stage's least memory: the optimizer's state is unknown before the first step.

        The working memory of a running layer is not counted either.
        """
        tensors = [one for layer in self.layers for one in layer.captured.module.parameters()]
        own = {id(one): one for one in tensors}.values()
        weights = sum(one.nbytes for one in own)
        saved = [layer.trace.saved_bytes for layer in self.layers]
        inputs = [sum(value.bytes for value in layer.inputs) for layer in self.layers]
        gradients = sum(one.nbytes for one in own if one.requires_grad)
        kept, working = {
            "none": (sum(saved), 0),
            "full": (inputs[0], sum(saved)),
            "layer": (sum(inputs), max(saved)),
        }[self.recompute]
        if self.offload:
            kept, working = 0, sum(saved)
        return Footprint(weights, weights, kept, working, gradients)

    def split(self, *, required_from: int | None = None) -> None:
        """Prepare for backwards in two parts.

        A layer that cannot be split keeps a whole one, as a part of I. If ``required_from``, the
        number of the stage's first layer, is given, CannotSplit names it and the module instead.
        """
        for i, layer in enumerate(self.layers):
            if i in self._pieces:
                continue
            modules = [*layer.captured.module.modules()]
            self._parameters[i] = held_places([one._parameters for one in modules])
            self._own_buffers[i] = held_places([one._buffers for one in modules])
            try:
                self._pieces[i] = self._split_layer(i)
            except CannotSplit as error:
                if required_from is not None:
                    raise CannotSplit(
                        f"layer {required_from + i} (module {error.where})",
                        f"{error.reason}; plan whole backwards for its stage",
                    ) from error
                self._pieces[i] = None

    def _split_layer(self, i: int) -> SplitLayer:
        layer = self.layers[i]
        examples = [
            torch.empty(value.shape, dtype=value.dtype, device=self.device)
            for value in layer.inputs
        ]
        with self.cast():
            return split_layer(
                layer.captured.module,
                examples,
                [value.gradient for value in layer.inputs],
                [value.gradient for value in layer.trace.outputs],
                name=layer.captured.name,
            )

    def forward(
        self, microbatch: int, inputs: Tensors, seed: Seed, in_two: bool, attached: bool = False
    ) -> Tensors:
        """Outputs of the stage; ``in_two`` if the backward will come as I and W.

        ``attached`` ones have the graph of autograd, for `backward_of`. Only a whole backward
        without recomputation has it.
        """
        flight = self._flights[microbatch] = InFlight(seed)
        if self.recompute == "none":
            return self._run(flight, inputs, in_two, attached)
        if self.recompute == "full":
            self._keep(flight, range(len(self.layers)), inputs)
        with torch.no_grad(), self.cast(), made_once():
            for i in range(len(self.layers)):
                if self.recompute == "layer":
                    self._keep(flight, range(i, i + 1), inputs)
                inputs = self._layer(i, inputs, seed)
        return inputs

    def evaluate(self, inputs: Tensors, seed: Seed) -> Tensors:
        """Outputs of the stage, of which nothing is kept for a backward."""
        with torch.no_grad(), self.cast(), made_once():
            for i in range(len(self.layers)):
                inputs = self._layer(i, inputs, seed)
        return inputs

    @made_once()
    def backward(self, microbatch: int, output_gradients: Gradients) -> Gradients:
        """The whole backward: gradients of the stage's inputs; the weights' are summed up."""
        flight = self._flights.pop(microbatch)
        if self.recompute == "layer":
            for i in reversed(range(len(self.layers))):
                single = range(i, i + 1)
                with self._again(flight):
                    graph, _ = self._record(single, flight.inputs.pop(), flight.seed)
                output_gradients = backward_of(graph, output_gradients)
            return output_gradients
        if self.recompute == "full":
            with self._again(flight):
                self._run(flight, flight.inputs.pop(), in_two=False)
        return backward_of(flight.graphs.pop(), output_gradients)

    def backward_of(self, microbatch: int, loss: Tensor, scale: Tensor) -> Gradients:
        """The whole backward of ``scale`` times a loss of attached outputs, as `backward`."""
        graph = self._flights.pop(microbatch).graphs.pop()
        torch.autograd.backward(loss, scale)
        return [leaf.grad for leaf in graph.leaves]

    def input_gradient(self, microbatch: int, output_gradients: Gradients) -> Gradients:
        """I: gradients of the stage's inputs alone."""
        flight = self._flights[microbatch]
        if self.recompute == "full":
            with self._again(flight):
                self._run(flight, flight.inputs.pop(), in_two=True)
        for i in reversed(range(len(self.layers))):
            output_gradients = self._input_gradient_of(i, flight, output_gradients)
        return output_gradients

    def _input_gradient_of(
        self, i: int, flight: InFlight, output_gradients: Gradients
    ) -> Gradients:
        """I of one layer; a layer without pieces does its whole backward."""
        if self.recompute == "layer":
            with self._again(flight):
                self._run_layer(flight, i, flight.inputs.pop())
        saved = flight.saved.pop()
        if isinstance(saved, LayersGraph):
            flight.for_weights.append(None)
            return backward_of(saved, output_gradients)
        pieces = self._pieces[i]
        assert pieces is not None
        output_gradients, rest = pieces.input_gradient(saved, output_gradients)
        flight.for_weights.append(rest)
        return output_gradients

    def held(self) -> Iterator[Tensor]:
        """Tensors that forwards in pieces have kept for backwards or recomputation."""
        for flight in self._flights.values():
            yield from chain.from_iterable(flight.inputs)
            kept = chain.from_iterable(flight.buffers)
            yield from (one for *_, one in kept if one is not None)
            for saved in flight.saved:
                assert isinstance(saved, Saved)
                yield from (*saved.for_inputs, *saved.for_weights)

    def for_weights(self, microbatch: int) -> Iterator[Tensor]:
        """Tensors that `weight_gradient` will read, besides weights."""
        for saved in self._flights[microbatch].for_weights:
            yield from saved.values if saved is not None else ()

    def weight_gradient(self, microbatch: int) -> None:
        """W: the weights' gradients are summed up."""
        flight = self._flights.pop(microbatch)
        for i, saved in enumerate(reversed(flight.for_weights)):
            if saved is not None:
                self._weight_gradient_of(i, saved)

    def _weight_gradient_of(self, i: int, saved: SavedForWeights) -> None:
        """W of one layer."""
        pieces = self._pieces[i]
        assert pieces is not None
        found = pieces.weight_gradient(saved)
        for parameter, gradient in zip(tensors_at(self._parameters[i]), found, strict=True):
            if gradient is not None:
                add_gradient(parameter, gradient)

    @made_once()
    def _run(
        self, flight: InFlight, inputs: Tensors, in_two: bool, attached: bool = False
    ) -> Tensors:
        if not in_two:
            graph, outputs = self._record(range(len(self.layers)), inputs, flight.seed)
            flight.graphs.append(graph)
            return outputs if attached else tuple(one.detach() for one in outputs)
        for i in range(len(self.layers)):
            inputs = self._run_layer(flight, i, inputs)
        return inputs

    def _run_layer(self, flight: InFlight, i: int, inputs: Tensors) -> Tensors:
        """One layer by its pieces, or by autograd where it has none."""
        pieces = self._pieces[i]
        if pieces is None:
            graph, outputs = self._record(range(i, i + 1), inputs, flight.seed)
            flight.saved.append(graph)
            return tuple(one.detach() for one in outputs)
        weights, buffers = tensors_at(self._parameters[i]), tensors_at(self._own_buffers[i])
        with self._drawing(i, flight.seed):
            outputs, saved = pieces.forward(weights, buffers, inputs)
        flight.saved.append(saved)
        return outputs

    def _record(self, layers: range, inputs: Tensors, seed: Seed) -> tuple[LayersGraph, Tensors]:
        """Run ``layers`` under autograd; the outputs have its graph."""
        leaves = tuple(
            one.detach().requires_grad_(value.gradient)
            for one, value in zip(inputs, self.layers[layers[0]].inputs, strict=True)
        )
        values = leaves
        with torch.enable_grad(), self.cast(), self._offloading():
            for i in layers:
                values = self._layer(i, values, seed)
        edges = [get_gradient_edge(one) if one.requires_grad else None for one in values]
        return LayersGraph(leaves, edges), values

    @contextmanager
    def _offloading(self) -> Iterator[None]:
        """Move tensors that autograd saves to the host, except weights; fetch them as needed."""
        if not self.offload:
            yield
            return
        held = [one for layer in self.layers for one in layer.captured.module.parameters()]
        weights = {one.untyped_storage().data_ptr() for one in held}

        def keep(one: Tensor) -> Tensor:
            if one.untyped_storage().data_ptr() in weights:
                return one
            host = torch.empty_like(one, device="cpu", pin_memory=one.is_cuda)
            return host.copy_(one, non_blocking=True)

        def fetch(one: Tensor) -> Tensor:
            return one.to(self.device, non_blocking=True)

        with torch.autograd.graph.saved_tensors_hooks(keep, fetch):
            yield

    def _layer(self, i: int, inputs: Tensors, seed: Seed) -> Tensors:
        if self._share is None and not self.layers[i].trace.random:
            return self._calls[i](*inputs)
        with self._drawing(i, seed):
            return self._calls[i](*inputs)

    @contextmanager
    def _drawing(self, i: int, seed: Seed) -> Iterator[None]:
        """Seed layer ``i``: its draws for a sample are the same on whichever device."""
        share = self._share
        draws = None if share is None else share.draws[i]
        if self.layers[i].trace.random:
            own = 0 if share is None or draws is not None else share.lane
            torch.default_generator.manual_seed(seed(i) + own)
            if self.device.type == "cuda":
                torch.cuda.default_generators[self.device.index].manual_seed(seed(i) + own)
        if share is None or not draws:
            yield
            return
        with DrawsOfShare(share.rows, share.samples, draws):
            yield

    def cast(self) -> AbstractContextManager[Any]:
        """The context of mixed precision; without effect if ``autocast`` is None."""
        if self.autocast is None and not torch.is_autocast_enabled(self.device.type):
            return nullcontext()
        return torch.autocast(
            self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        )

    def _keep(self, flight: InFlight, layers: range, inputs: Tensors) -> None:
        """Keep the inputs of ``layers``, and the buffers that change, to recompute them."""
        flight.inputs.append(inputs)
        now = [(held, name, held[name]) for i in layers for held, name in self._buffers[i]]
        copies = {id(one): one.clone() for _, _, one in now if one is not None}
        flight.buffers.append([(held, name, copies.get(id(one))) for held, name, one in now])

    @contextmanager
    def _again(self, flight: InFlight) -> Iterator[None]:
        """Let a recomputed forward begin with the buffers of the first one.

        It gets copies, so that no buffer changes twice. To restore the values afterwards would not
        do: autograd may have saved the buffers.
        """
        kept = flight.buffers.pop()
        before = [(held, name, held[name]) for held, name, _ in kept]
        for held, name, buffer in kept:
            held[name] = buffer
        try:
            yield
        finally:
            for held, name, buffer in before:
                held[name] = buffer
