"""A layer as three graphs: forward, input gradient and weight gradient."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from stagewright.graphs.documents.errors import InputError

T = TypeVar("T")


class CannotSplit(InputError):  # noqa: N818 - named as InvalidPlan is
    """A backward that is only whole: ``where`` names the module, ``reason`` says why."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            f"{where}: its backward cannot be split into input and weight gradients: {reason}"
        )
        self.where = where
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TracedLayout:
    """The shape and strides that the pieces were traced for."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def laid_out(self, tensor: Tensor) -> Tensor:
        """``tensor`` itself where its strides fit, else a copy.

        Raises InputError if shape or type differ.
        """
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise InputError(
                f"layer was split for {self.dtype} {tuple(self.shape)}, "
                f"got {tensor.dtype} {tuple(tensor.shape)}: split it again for these inputs"
            )
        if tensor.stride() == self.stride or self._fits(tensor.stride()):
            return tensor
        return self._empty().copy_(tensor)

    def zeros(self) -> Tensor:
        """The gradient of an output that nothing uses."""
        return self._empty().zero_()

    def _fits(self, stride: Sequence[int]) -> bool:
        # The stride of a dimension with one entry means nothing.
        pairs = zip(self.shape, self.stride, stride, strict=True)
        return all(size == 1 or ours == given for size, ours, given in pairs)

    def _empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Saved:
    """Values that F keeps for I and W; ``input_gradient`` consumes them."""

    for_inputs: list[Tensor]
    for_weights: list[Tensor]


@dataclass(frozen=True, slots=True)
class SavedForWeights:
    """Values that F and I keep for W; ``weight_gradient`` consumes them."""

    values: list[Tensor]


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """F, I and W of one layer for inputs of one shape; see :func:`split_layer`.

    ``input_gradients`` and ``weight_gradients`` say which inputs and parameters get a gradient;
    ``output_layouts`` has an entry for each output, ``None`` where I takes no gradient.
    """

    f: GraphModule
    i: GraphModule
    w: GraphModule
    input_layouts: tuple[TracedLayout, ...]
    output_layouts: tuple[TracedLayout | None, ...]
    input_gradients: tuple[bool, ...]
    weight_gradients: tuple[bool, ...]
    kept_for_inputs: int

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Saved]:
        """The layer's outputs, and the values that its backward needs.

        ``parameters`` and ``buffers`` are in the order of the module's ``named_parameters()`` and
        ``named_buffers()``; buffers change in place as in the module. An input that is not
        used is returned unchanged, and inputs and parameters must not change until W ran.
        """
        laid_out = [
            layout.laid_out(value) for layout, value in zip(self.input_layouts, inputs, strict=True)
        ]
        values = run_piece(self.f, [*parameters, *buffers, *laid_out], grad_mode=True)
        outputs, kept = parted(values, len(self.output_layouts))
        for_inputs, for_weights = parted(kept, self.kept_for_inputs)
        return tuple(outputs), Saved(for_inputs, for_weights)

    def input_gradient(
        self, saved: Saved, output_gradients: Sequence[Tensor | None]
    ) -> tuple[tuple[Tensor | None, ...], SavedForWeights]:
        """The gradient of each input (``None`` without one), and the values that W needs.

        An output gradient that is ``None`` counts as zero. The results may share memory with each
        other and with the output gradients: nothing here may be changed in place before W ran.
        """
        given = [
            layout.zeros() if gradient is None else layout.laid_out(gradient)
            for layout, gradient in zip(self.output_layouts, output_gradients, strict=True)
            if layout is not None
        ]
        values = [*saved.for_inputs, *given]
        del given
        saved.for_inputs.clear()
        gradients, kept = parted(run_piece(self.i, values), sum(self.input_gradients))
        for_weights = [*saved.for_weights, *kept]
        saved.for_weights.clear()
        return _spread(gradients, self.input_gradients), SavedForWeights(for_weights)

    def weight_gradient(self, saved: SavedForWeights) -> tuple[Tensor | None, ...]:
        """The gradient of each parameter, ``None`` where there is none; each has its own memory."""
        return _spread(run_piece(self.w, saved.values), self.weight_gradients)


class _Boxed(CodeGen):
    """Code that takes its values in one list and clears it, so that each is freed when used."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: object) -> str:
        names = ", ".join(name.partition(":")[0] for name in free_vars)
        unpack = f"[{names}] = boxed\n    boxed.clear()"
        return f"def forward(self, boxed){maybe_return_annotation}:\n    {unpack}"


def make_piece(
    traced: GraphModule, starts: list[Node], nodes: list[Node], results: list[Node]
) -> GraphModule:
    """A graph from ``starts`` to ``results``."""
    graph = Graph()
    graph.set_codegen(_Boxed())
    copies = {start: graph.placeholder(start.name) for start in starts}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta.clear()
    graph.output([copies[node] for node in results])
    return GraphModule(traced, graph)


def run_piece(piece: GraphModule, values: list[Tensor], grad_mode: bool = False) -> list[Tensor]:
    """Run a piece; it empties ``values``."""
    # The trace holds what runs below autograd, and what autocast casts. Grad mode is that of an
    # ordinary forward or backward, as some kernels ask for it (oneDNN's LSTM).
    below = torch._C._AutoDispatchBelowAutograd()
    with below, torch.set_grad_enabled(grad_mode), without_autocast(values):
        results: list[Tensor] = piece.forward(values)
    return results


def without_autocast(values: Iterable[object]) -> ExitStack:
    """Switch autocast off on the devices of ``values``."""
    stack = ExitStack()
    for device in {value.device.type for value in values if isinstance(value, Tensor)}:
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


@contextmanager
def autocast_cache() -> Iterator[None]:
    """Cast a weight once where it is used twice, as outside of tracing."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


def parted(values: list[T], count: int) -> tuple[list[T], list[T]]:
    """The first ``count`` values, and the others."""
    return values[:count], values[count:]


def present(values: Iterable[T | None]) -> list[T]:
    """The values that are not None."""
    return [value for value in values if value is not None]


def _spread(values: Iterable[T], places: Sequence[bool]) -> tuple[T | None, ...]:
    left = iter(values)
    return tuple(next(left) if place else None for place in places)


def layout_of(tensor: Tensor) -> TracedLayout:
    """The layout of a tensor."""
    return TracedLayout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def is_dense(tensor: Tensor) -> bool:
    """Whether no entries share memory and no gaps lie between them."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
