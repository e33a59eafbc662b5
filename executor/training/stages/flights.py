"""What a microbatch keeps between the computations of a stage."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from stagewright.executor.capture.split_layer import Saved, SavedForWeights

Held = tuple[dict[str, Tensor | None], str]  # where a tensor is held, and its name
Buffer = tuple[dict[str, Tensor | None], str, Tensor | None]  # its place, and itself


@dataclass(slots=True)
class LayersGraph:
    """Autograd's record of some layers: where gradients go in and where they come out."""

    leaves: tuple[Tensor, ...]
    outputs: list[GradientEdge | None]


@dataclass(slots=True)
class InFlight:
    """Tensors that a microbatch keeps between its computations; some of the fields are unset.

    ``inputs`` per layer (of the first alone under full recomputation) with copies of the
    ``buffers`` that it found, ``graphs`` of autograd, or what each layer's pieces saved.
    """

    seed: Callable[[int], int]
    inputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    buffers: list[list[Buffer]] = field(default_factory=list)
    graphs: list[LayersGraph] = field(default_factory=list)
    saved: list[Saved | LayersGraph] = field(default_factory=list)
    for_weights: list[SavedForWeights | None] = field(default_factory=list)


def held_places(registries: Iterable[dict[str, Any]]) -> list[Held]:
    """The places of a module's tensors, each once, in the order of ``named_parameters()``."""
    found: dict[int, Held] = {}
    for registry in registries:
        for name, one in registry.items():
            if one is not None:
                found.setdefault(id(one), (registry, name))
    return list(found.values())


def tensors_at(places: Iterable[Held]) -> list[Tensor]:
    """The tensors that are held at ``places`` now."""
    return [one for registry, name in places if (one := registry[name]) is not None]


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient as autograd does: the first is kept, copied if it may be shared."""
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    else:
        parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def backward_of(
    graph: LayersGraph, output_gradients: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Gradients of a record's inputs; those of parameters are added up."""
    pairs = [
        (edge, gradient)
        for edge, gradient in zip(graph.outputs, output_gradients, strict=True)
        if edge is not None and gradient is not None
    ]
    torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
    return [leaf.grad for leaf in graph.leaves]
