"""A layer's forward and backward, traced as one graph."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from stagewright.executor.capture.split_layer import autocast_cache, present, without_autocast
from stagewright.executor.capture.twins import made_once

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
