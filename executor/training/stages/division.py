"""What a microbatch keeps between computations, and parameters divided among replicas.

Parameters are next to each other in memory, divided into equal parts among replicas.

Numbers are divided, as by ZeRO and FSDP, and not whole parameters: all parts are equal, whatever
the sizes of the parameters are, and one collective moves all of them. The price is an optimizer
that sees parts of parameters, flattened.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from stagewright.executor.capture.split_layer import Saved, SavedForWeights
from stagewright.formulations.plans.shards import ALIGNMENT

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


def compiled_layer(module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """A layer compiled by torch, which draws what the layer itself would draw."""
    from torch._inductor import config

    config.fallback_random = True
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(module)
    return compiled


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers [start, stop) of a parameter, at ``at`` in a replica's part of a `Flat`."""

    parameter: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Flat:
    """Parameters of one type, by their positions, and how many numbers each has.

    They are divided among ``replicas``, of which this one is number ``place``.
    """

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    replicas: int
    place: int

    @property
    def part(self) -> int:
        """Numbers of a replica, padding included: as ``formulations.plans.shards.part_bytes``."""
        unit = max(1, ALIGNMENT // self.dtype.itemsize)
        return -(-sum(self.sizes) // (unit * self.replicas)) * unit

    def zeros(self, device: torch.device) -> Tensor:
        """Zeros for all numbers of all replicas."""
        return torch.zeros(self.replicas * self.part, dtype=self.dtype, device=device)

    def own(self, whole: Tensor) -> Tensor:
        """The part of this replica, a view."""
        return whole[self.place * self.part : (self.place + 1) * self.part]

    def views(self, whole: Tensor, parameters: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """The place of every parameter in ``whole``, in the parameter's shape."""
        parts = whole[: sum(self.sizes)].split(list(self.sizes))
        return [
            (i, one.view(parameters[i].shape)) for i, one in zip(self.members, parts, strict=True)
        ]

    def pieces(self) -> list[Piece]:
        """The pieces of every parameter in this replica's part."""
        begin, end = self.place * self.part, (self.place + 1) * self.part
        stops = accumulate(self.sizes)
        found = []
        for i, size, last in zip(self.members, self.sizes, stops, strict=True):
            first = last - size
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                found.append(Piece(i, start - first, stop - first, start - begin))
        return found


def divided(
    parameters: Sequence[nn.Parameter], units: Sequence[Collection[int]], replicas: int, place: int
) -> list[Flat]:
    """The parameters of every unit, by their positions, and of every type in it."""
    found = []
    for unit in units:
        for dtype in dict.fromkeys(parameters[i].dtype for i in unit):
            members = tuple(i for i in unit if parameters[i].dtype == dtype)
            sizes = tuple(parameters[i].numel() for i in members)
            if sum(sizes):
                found.append(Flat(members, sizes, dtype, replicas, place))
    return found


class PieceGradients:
    """The gradients of this replica's pieces of parameters.

    ``parts`` hold them. Where the whole gradients are kept between backwards, these are in
    ``whole``, with ``views`` of some of ``count`` parameters, by position.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        pieces: Sequence[tuple[Piece, nn.Parameter, Tensor]],
        count: int,
        whole: Sequence[Tensor],
        views: Sequence[tuple[int, Tensor]],
    ) -> None:
        self.parts, self._pieces, self._whole = list(parts), pieces, whole
        found = dict(views)
        self.views: list[Tensor | None] = [found.get(i) for i in range(count)]
        self.left_out: set[int] = set()

    def leave_out(self, left_out: Collection[int]) -> None:
        """Give no gradient to the parameters at these positions."""
        self.left_out |= {*left_out}
        self.views = [None if i in left_out else view for i, view in enumerate(self.views)]

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all numbers by a factor."""
        for one in self.parts:
            one.mul_(factor)

    def receive(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let backwards add to the views."""
        for one, view in zip(parameters, self.views, strict=True):
            one.grad = view

    def hand_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let an optimizer find the gradients of the pieces."""
        for piece, one, gradient in self._pieces:
            one.grad = None if piece.parameter in self.left_out else gradient

    def clear(self) -> None:
        """Set all numbers to zero."""
        for one in self._whole or self.parts:
            one.zero_()
