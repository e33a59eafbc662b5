"""The backward of a layer in two: the gradient of its inputs (I) and that of its weights (W).

The layer's forward and backward are traced together, once, on fake tensors: nothing is drawn at
random and no buffer changes. The graph is cut in three. F is what the forward ran, I what the
gradients of the inputs need beyond it, W the rest of what the gradients of the parameters need:
nothing is computed twice, whatever the layer computes. A value that crosses a cut is handed
over; a parameter that crosses is the tensor the caller gave, so each microbatch may bring its own
version of the weights.
"""

from collections.abc import Sequence
from traceback import walk_tb

from torch import Tensor, nn

from stagewright.executor.capture.graph_cut import cut_joint
from stagewright.executor.capture.joint_graph import JointModule, trace_joint
from stagewright.executor.capture.python_state import attributes_kept
from stagewright.executor.capture.split_layer import CannotSplit, SplitLayer, is_dense, layout_of


def split_layer(
    module: nn.Module,
    inputs: Sequence[Tensor],
    input_needs_gradient: Sequence[bool],
    output_has_gradient: Sequence[bool] | None = None,
    name: str = "",
) -> SplitLayer:
    """Trace a layer and cut it into F, I and W.

    The pieces hold for the shapes and types of ``inputs``, the module's mode (training or not),
    and the caller's autocast, which are the key of a cache of them.

    Parameters
    ----------
    module
        Takes ``inputs`` by position and returns a tuple of tensors.
    inputs
        Examples; only their shapes, strides, types and devices are read.
    input_needs_gradient
        Whether I computes a gradient, for each input. With none, I is empty and W the backward.
    output_has_gradient
        Whether I is given a gradient, for each output; by default all that depend on an input
        that needs a gradient or on a parameter.
    name
        The layer's name in errors, where none of its parts can be named.

    Raises
    ------
    CannotSplit
        If the layer has hooks, which tracing would call only once, or cannot be traced, or its
        backward draws random numbers or reads tensors that a later forward changes.
    """
    name = name or type(module).__name__
    for place, part in module.named_modules():
        if _has_hooks(part):
            raise CannotSplit(place or name, "it has hooks")
    examples = [value if is_dense(value) else value.contiguous() for value in inputs]
    joint = JointModule(module, tuple(input_needs_gradient), output_has_gradient)
    try:
        with attributes_kept(module):
            traced = trace_joint(joint, examples)
    except Exception as error:  # tracing runs the layer's own code, which raises anything
        raise CannotSplit(_place(module, error) or name, _one_line(error)) from error
    return cut_joint(traced, module, tuple(map(layout_of, examples)), name)


def _has_hooks(module: nn.Module) -> bool:
    of_module = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    own = module.parameters(recurse=False)
    return any(of_module) or any(one._backward_hooks for one in own)


def _place(module: nn.Module, error: Exception) -> str:
    """The innermost part of ``module`` whose code raised ``error``; empty for itself."""
    names = {id(part): place for place, part in module.named_modules()}
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    found = (names.get(id(frame.f_locals.get("self"))) for frame in frames)
    return next((place for place in reversed([*found]) if place is not None), "")


def _one_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
