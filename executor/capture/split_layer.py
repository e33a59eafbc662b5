"""A layer as three graphs, forward, input and weight gradient; or its two passes as one graph."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.graph import CodeGen

from stagewright.executor.capture.twins import made_once
from stagewright.graphs.documents.errors import InputError

FORWARD, COPY, OUTPUT_GRADIENT = "forward", "copy of an input", "output gradient"


class JointModule(nn.Module):
    """Forward and backward of a layer in one.

    A module around the layer, as a backward that recomputes reads the layer's weights too.
    """

    def __init__(
        self,
        layer: nn.Module,
        input_needs_gradient: tuple[bool, ...],
        output_has_gradient: Sequence[bool] | None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.input_needs_gradient = input_needs_gradient
        self.output_has_gradient = output_has_gradient

    def forward(self, weights: list[Tensor], values: list[Tensor]) -> list[Tensor | None]:
        """Outputs, their gradients, gradients of the inputs and of the weights, in one list."""
        with torch.enable_grad():
            # In-place operations refuse leaves, and must not change the caller's values.
            copies = [value.clone() for value in values]
            _mark(COPY)
            with autocast_cache(), made_once():
                outputs = self._outputs(copies)
        _mark(FORWARD)
        ends = self._ends(outputs)
        output_gradients = [None if end is None else torch.empty_like(end) for end in ends]
        _mark(OUTPUT_GRADIENT)
        with without_autocast(outputs):
            gradients = _gradients(present(ends), [*values, *weights], present(output_gradients))
        return [*outputs, *output_gradients, *gradients]

    def _outputs(self, values: list[Tensor]) -> tuple[Tensor, ...]:
        buffers = dict(self.layer.named_buffers())
        outputs = self.layer(*values)
        for name, now in self.layer.named_buffers():
            if now is not buffers[name]:  # set anew instead of changed in place
                buffers[name].copy_(now.detach())
        for number, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                raise TypeError(f"output {number} is a {type(output).__name__}, not a tensor")
        return tuple(outputs)

    def _ends(self, outputs: tuple[Tensor, ...]) -> list[Tensor | None]:
        given = self.output_has_gradient
        given = [True] * len(outputs) if given is None else given
        pairs = zip(outputs, given, strict=True)
        return [output if used and output.requires_grad else None for output, used in pairs]


def trace_joint(joint: JointModule, inputs: list[Tensor]) -> GraphModule:
    """The graph of a forward and its backward, its nodes marked by phase."""
    wanted = [parameter.requires_grad for parameter in joint.parameters()]
    names = [name for name, _ in joint.named_parameters()]
    buffer_names = [name for name, _ in joint.named_buffers()]

    def run(
        parameters: list[Tensor], buffers: list[Tensor], inputs: list[Tensor]
    ) -> list[Tensor | None]:
        weights = _leaves(parameters, wanted)
        values = _leaves(inputs, joint.input_needs_gradient)
        _mark(FORWARD)
        state = dict(zip([*names, *buffer_names], [*weights, *buffers], strict=True))
        results: list[Tensor | None] = torch.func.functional_call(joint, state, (weights, values))
        return results

    trace = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)
    return trace(list(joint.parameters()), list(joint.buffers()), inputs)


def _leaves(tensors: Sequence[Tensor], need_gradient: Sequence[bool]) -> list[Tensor]:
    pairs = zip(tensors, need_gradient, strict=True)
    return [tensor.detach().requires_grad_(needed) for tensor, needed in pairs]


def _gradients(
    ends: list[Tensor], leaves: list[Tensor], output_gradients: list[Tensor]
) -> list[Tensor | None]:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not ends or not wanted:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(ends, wanted, output_gradients, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _mark(phase: str) -> None:
    """Put all nodes recorded since the last mark into ``phase``."""
    mode = get_proxy_mode()
    assert mode is not None, "only called while tracing"
    for node in mode.tracer.graph.nodes:
        node.meta.setdefault("phase", phase)


def phase_of(node: Node) -> str | None:
    """The phase in which a node was traced."""
    return node.meta.get("phase")


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
