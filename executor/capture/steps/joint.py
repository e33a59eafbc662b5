"""Forward, loss and backward of a module as one functional graph of aten operators, or why not."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.fx import traceback as fx_traceback
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from stagewright.executor.capture.draws import storage_of
from stagewright.executor.capture.places import line_of
from stagewright.executor.capture.python_state import (
    Snapshot,
    attributes_kept,
    described,
    require_plain_tensors,
    snapshot,
)
from stagewright.executor.capture.steps.modes import LayerByLayer, lines_marked
from stagewright.executor.training.losses import Loss, read_loss
from stagewright.graphs.documents.errors import InputError

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (
        DataDependentOutputException,
        "reads a value of a tensor ({}), but a graph has one path for all values",
    ),
    (
        DynamicOutputShapeException,
        "makes a tensor whose shape depends on values ({}), but a graph has fixed shapes",
    ),
)

_ATTRIBUTE = "changes a tensor that is neither a parameter nor a buffer; register it as a buffer"
TEXTS = {
    "Unexpected fake buffer": _ATTRIBUTE,
    "expected to have an entirely functional graph": _ATTRIBUTE,
}
"""Parts of torch's messages, which say it in terms of its own graphs."""


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """Turn an exception that tracing raises into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the user's code may raise anything when it is traced
        place = line_of(error.__traceback__) or type(model).__name__
        raise InputError(f"{place}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason.format(" ".join(str(error.args[0]).split()))
    for text, reason in TEXTS.items():
        if text in str(error):
            return reason
    first = str(error).strip().partition("\n")[0]
    return f"the step cannot be traced: {type(error).__name__}: {first}"


def require_separate_tensors(model: nn.Module) -> None:
    """Refuse hooks of parameters, which a graph has not, and tensors that share memory.

    A tensor under two names is one state; two tensors in the same memory would be two.
    """
    require_plain_tensors(model)
    for name, one in model.named_parameters():
        if one._backward_hooks:
            raise InputError(f"parameter {name!r} has a hook on its gradient; remove the hook")
    named = [*model.named_parameters(), *model.named_buffers()]
    spans = sorted((storage_of(one), *_span(one), name) for name, one in named if one.numel())
    for (storage, _, end, name), (other, start, _, later) in pairwise(spans):
        if storage == other and start < end:
            raise InputError(
                f"{name!r} and {later!r} share memory but are different tensors: make one of them "
                "a name of the other, or a copy"
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte in the storage."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    start = int(tensor.storage_offset())
    end = start + sum((int(size) - 1) * int(stride) for size, stride in sizes) + 1
    return start * tensor.itemsize, end * tensor.itemsize


def require_dense(gradients: Mapping[str, fx.Node]) -> None:
    """Refuse sparse gradients, which an optimizer applies in another way."""
    for path, node in gradients.items():
        if node.meta["val"].layout != torch.strided:
            raise InputError(f"the gradient of {path!r} is sparse; make it with sparse=False")


aten = torch.ops.aten
_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)


@dataclass(slots=True)
class JointGraph:
    """A functional graph with the roles of its nodes (parameter, input, loss, ...).

    ``states`` and their ``values`` are by path in the model. ``written`` has the nodes that make
    the new values of buffers; parameters without a gradient are not in ``gradients``. Every node
    has its role and, if it is known, its line in ``meta``.
    """

    graph: fx.Graph
    states: dict[str, fx.Node] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)
    gradients: dict[str, fx.Node] = field(default_factory=dict)
    written: dict[str, fx.Node] = field(default_factory=dict)
    loss: fx.Node | None = None


class Objective(nn.Module):
    """The loss of a model on flat inputs and targets."""

    def __init__(self, model: nn.Module, loss: Loss, spec: Any) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.spec = spec
        self.after: list[Snapshot] = []
        self.seconds = _second_names(model)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once: AOTAutograd asks for all names, and would trace each of them."""
        return super().named_parameters()

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        """Every buffer once."""
        return super().named_buffers()

    def forward(self, *flat: Tensor) -> Tensor:
        """The number that is differentiated: a mean, or a sum over its count."""
        inputs, targets = tree_unflatten(list(flat), self.spec)
        given = inputs if isinstance(inputs, list | tuple) else (inputs,)
        with LayerByLayer(), lines_marked(self.model):
            again = {path: _tensor(self.model, first) for path, first in self.seconds.items()}
            buffers = dict(self.model.named_buffers())
            outputs = functional_call(self.model, again, given)
            for path, now in self.model.named_buffers():
                if now is not buffers[path]:  # set anew instead of changed in place
                    buffers[path].copy_(now.detach())
            total, count = read_loss(self.loss(outputs, targets))
            result = total if count is None else total / count
        self.after.append(snapshot(self.model))
        return result


def _second_names(model: nn.Module) -> dict[str, str]:
    """The first name of parameters and buffers that have several, by the others."""
    first: dict[int, str] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    firsts = {path: first.setdefault(id(one), path) for path, one in named}
    return {path: one for path, one in firsts.items() if path != one}


def _tensor(model: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), name)
    return found


def trace_joint(model: nn.Module, loss: Loss, batch: tuple[Any, Any]) -> JointGraph:
    """Trace by AOTAutograd, which makes in-place operators functional.

    ``batch`` is (inputs, targets); no values are read, so that its tensors and the model's may be
    fake. Raises InputError if the step depends on values, or changes Python state.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InputError("a mini-batch is a pair (inputs, targets)")
    flat, spec = tree_flatten(batch)
    if not all(isinstance(one, Tensor) for one in flat):
        raise InputError("a mini-batch has something other than tensors")
    if not flat or not flat[0].dim():
        raise InputError("the first tensor of a mini-batch has no samples in axis 0")
    require_separate_tensors(model)
    objective = Objective(model, loss, spec)
    mode = fake_mode([*model.parameters(), *model.buffers(), *flat])
    fakes = tree_map_only(Tensor, lambda one: _fake(mode, one), flat)
    before = snapshot(model)
    with attributes_kept(model), ExitStack() as stack, refusing(model):
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # anomaly detection, by which AOTAutograd finds lines
        traced = aot_export_joint_with_descriptors(stack, objective, tuple(fakes)).graph_module
    _require_stateless(model, [before, *objective.after])
    found = _read(traced)
    require_dense(found.gradients)
    named = [*objective.named_parameters(), *objective.named_buffers()]
    found.values |= {state_name(path): one for path, one in named}
    return found


def fake_mode(tensors: Sequence[Tensor]) -> FakeTensorMode:
    """The mode of the first fake tensor among ``tensors``, or a new one."""
    modes = (one.fake_mode for one in tensors if isinstance(one, FakeTensor))
    return next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


def _require_stateless(model: nn.Module, values: Sequence[Snapshot]) -> None:
    """Refuse attributes that every forward changes: the graph would have their first values.

    Those of torch's own modules are caches, as of the weights that an LSTM passes on.
    """
    changes = [one.changed(other) for one, other in pairwise(values)]
    modules = dict(model.named_modules())
    moving = {
        (path, name)
        for path, name in set.intersection(*changes)
        if not name or not type(modules[path]).__module__.startswith("torch.")
    }
    if moving:
        raise InputError(
            f"the forward changes {described(model, min(moving))}: a graph would not change it"
        )


def _read(traced: fx.GraphModule) -> JointGraph:
    """The traced graph with named placeholders, without tangents and identities."""
    found = JointGraph(fx.Graph())
    new: dict[fx.Node, Any] = {}
    *nodes, output = traced.graph.nodes
    results = list(zip(output.args[0], output.meta["desc"], strict=True))
    loss = next(node for node, what in results if isinstance(what, PlainAOTOutput))
    for node in nodes:
        if node.op == "placeholder":
            new[node] = _placeholder(found, node)
        elif node.op == "get_attr":
            new[node] = _constant(found, node, traced)
        elif node.target in _IDENTITIES:
            new[node] = new[node.args[0]]
        else:
            new[node] = found.graph.node_copy(node, new.__getitem__)
            _mark(new[node], node)
        if node is loss:
            new |= _tangents(found, new[node], nodes)
    for node, what in results:
        if node is not None:
            _assign(found, new[node], what)
    return found


def _placeholder(found: JointGraph, node: fx.Node) -> fx.Node | None:
    what: AOTInput = node.meta["desc"]
    if isinstance(what, TangentAOTInput):
        return None
    if not isinstance(what, ParamAOTInput | BufferAOTInput | PlainAOTInput):
        raise InputError(f"an input of the step cannot be captured: {what.expr()}")
    if isinstance(what, PlainAOTInput):
        made = found.graph.placeholder(f"input_{what.idx}")
        found.inputs.append(made)
    else:
        path = state_name(what.target)
        made = found.graph.placeholder(identifier(path))
        found.states[path] = made
    made.meta["val"] = node.meta["val"]
    made.meta["role"] = "input" if isinstance(what, PlainAOTInput) else "state"
    return made


def identifier(path: str) -> str:
    """A path of a module's tensor as the name of a node."""
    return re.sub(r"\W|^(?=\d)", "_", path)


def state_name(path: str) -> str:
    """The user's name of a parameter or buffer of :class:`Objective`."""
    return path.removeprefix("model.")


def _constant(found: JointGraph, node: fx.Node, traced: fx.GraphModule) -> fx.Node:
    """A tensor that is no parameter or buffer of the model, but found in its code."""
    value = getattr(traced, str(node.target))
    with found.graph.inserting_before(found.inputs[0]):
        made = found.graph.placeholder(str(node.target))
    made.meta |= {"val": value, "role": "state"}
    found.states[str(node.target)] = made
    found.values[str(node.target)] = value
    return made


def _tangents(found: JointGraph, loss: fx.Node, nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The gradient of the loss by itself, as autograd makes it."""
    made = found.graph.call_function(aten.ones_like.default, (loss,))
    made.meta |= {"val": torch.ones_like(loss.meta["val"]), "role": "backward"}
    made.meta["line"] = loss.meta.get("line")
    return {
        node: made
        for node in nodes
        if node.op == "placeholder" and isinstance(node.meta["desc"], TangentAOTInput)
    }


def _mark(made: fx.Node, traced: fx.Node) -> None:
    """Keep of ``meta`` the value, the role and the line."""
    tag = traced.meta.get("partitioner_tag", "is_forward")
    line = traced.meta.get("stack_trace")
    made.meta = {
        "val": traced.meta.get("val"),
        "role": "backward" if "backward" in tag else "forward",
        "line": line.partition(fx_traceback.GRADIENT_ACC_SPECIAL_STACK)[0] if line else None,
    }


def _assign(found: JointGraph, node: fx.Node, what: AOTOutput) -> None:
    """Record the role of a result of the step."""
    if isinstance(what, PlainAOTOutput):
        found.loss = node
    elif isinstance(what, GradAOTOutput) and isinstance(what.grad_of, ParamAOTInput):
        found.gradients[state_name(what.grad_of.target)] = node
    elif isinstance(what, InputMutationAOTOutput) and isinstance(
        what.mutated_input, BufferAOTInput
    ):
        found.written[state_name(what.mutated_input.target)] = node
    elif isinstance(what, InputMutationAOTOutput):
        raise InputError(f"the forward changes {_told(what.mutated_input)} in place; copy it first")
    else:
        raise InputError(f"a result of the step cannot be captured: {what.expr()}")


def _told(what: AOTInput) -> str:
    if isinstance(what, ParamAOTInput):
        return f"the parameter {state_name(what.target)!r}"
    return f"tensor {what.idx} of the mini-batch" if isinstance(what, PlainAOTInput) else "an input"
