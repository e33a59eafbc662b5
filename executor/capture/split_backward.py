"""The backward of a layer in two: the gradient of its inputs (I) and that of its weights (W).

The layer's forward and backward are traced together, once, on fake tensors: nothing is drawn at
random and no buffer changes. The graph is cut in three. F is what the forward ran, I what the
gradients of the inputs need beyond it, W the rest of what the gradients of the parameters need:
nothing is computed twice, whatever the layer computes. A value that crosses a cut is handed
over; a parameter that crosses is the tensor the caller gave, so each microbatch may bring its own
version of the weights.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.graph import CodeGen

from stagewright.executor.capture.python_state import attributes_kept
from stagewright.graphs.documents.errors import InputError

T = TypeVar("T")

aten = torch.ops.aten

# When a node of the traced graph was recorded, as Node.meta["phase"].
FORWARD, COPY, OUTPUT_GRADIENT = "forward", "copy of an input", "output gradient"


class CannotSplit(InputError):  # noqa: N818 - named as InvalidPlan is
    """A layer whose backward stays whole, and why."""

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(f"layer {layer}: its backward stays whole: {reason}")
        self.layer = layer
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Layout:
    """What the pieces were traced for: they hold for this shape and these strides only."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def laid_out(self, tensor: Tensor) -> Tensor:
        """``tensor`` itself where its strides fit, else a copy.

        Raises
        ------
        InputError
            If shape or type is another.
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
    """What F keeps for I and for W; ``input_gradient`` uses it up."""

    for_inputs: list[Tensor]
    for_weights: list[Tensor]


@dataclass(frozen=True, slots=True)
class SavedForWeights:
    """What F and I keep for W; ``weight_gradient`` uses it up."""

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
    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout | None, ...]
    input_gradients: tuple[bool, ...]
    weight_gradients: tuple[bool, ...]
    kept_for_inputs: int

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Saved]:
        """The layer's outputs, and what its backward needs.

        ``parameters`` and ``buffers`` stand as in the module's ``named_parameters()`` and
        ``named_buffers()``; buffers change in place as in the module. An input that passes by is
        returned as it is, and inputs and parameters must stay as they are until W ran.
        """
        laid_out = [
            layout.laid_out(value) for layout, value in zip(self.input_layouts, inputs, strict=True)
        ]
        values = _run(self.f, [*parameters, *buffers, *laid_out], grad_mode=True)
        outputs, kept = _parted(values, len(self.output_layouts))
        for_inputs, for_weights = _parted(kept, self.kept_for_inputs)
        return tuple(outputs), Saved(for_inputs, for_weights)

    def input_gradient(
        self, saved: Saved, output_gradients: Sequence[Tensor | None]
    ) -> tuple[tuple[Tensor | None, ...], SavedForWeights]:
        """The gradient of each input, ``None`` where there is none, and what W needs.

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
        gradients, kept = _parted(_run(self.i, values), sum(self.input_gradients))
        for_weights = [*saved.for_weights, *kept]
        saved.for_weights.clear()
        return _spread(gradients, self.input_gradients), SavedForWeights(for_weights)

    def weight_gradient(self, saved: SavedForWeights) -> tuple[Tensor | None, ...]:
        """The gradient of each parameter, ``None`` where there is none; each has its own memory."""
        return _spread(_run(self.w, saved.values), self.weight_gradients)


def split_layer(
    module: nn.Module,
    inputs: Sequence[Tensor],
    input_needs_gradient: Sequence[bool],
    output_has_gradient: Sequence[bool] | None = None,
    name: str = "",
) -> SplitLayer:
    """Trace a layer and cut it into F, I and W.

    The pieces hold for the shapes and types of ``inputs``, the module's mode (training or not),
    and the caller's autocast: who keeps them keeps them by these.

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
        The layer's name in errors.

    Raises
    ------
    CannotSplit
        If the layer has hooks, which tracing would call once and for all, or cannot be traced, or
        its backward draws random numbers or reads what a later forward changes.
    """
    name = name or type(module).__name__
    if _has_hooks(module):
        raise CannotSplit(name, "it has hooks")
    examples = [value if _is_dense(value) else value.contiguous() for value in inputs]
    joint = _Joint(module, tuple(input_needs_gradient), output_has_gradient)
    try:
        with attributes_kept(module):
            traced = _trace(joint, examples)
    except Exception as error:  # tracing runs the layer's own code, which raises anything
        raise CannotSplit(name, _one_line(error)) from error
    return _cut_graph(traced, module, tuple(map(_layout, examples)), name)


def _has_hooks(layer: nn.Module) -> bool:
    of_modules = (
        hooks
        for module in layer.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )
    return any(of_modules) or any(one._backward_hooks for one in layer.parameters())


class _Joint(nn.Module):
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
            with _autocast_cache():
                outputs = self._outputs(copies)
        _mark(FORWARD)
        ends = self._ends(outputs)
        output_gradients = [None if end is None else torch.empty_like(end) for end in ends]
        _mark(OUTPUT_GRADIENT)
        with _without_autocast(outputs):
            gradients = _gradients(_present(ends), [*values, *weights], _present(output_gradients))
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


def _trace(joint: _Joint, inputs: list[Tensor]) -> GraphModule:
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


def _cut_graph(
    traced: GraphModule, module: nn.Module, input_layouts: tuple[Layout, ...], name: str
) -> SplitLayer:
    parameters = len(list(module.parameters()))
    graph = traced.graph
    _drop_aliases(graph)
    _split_convolutions(graph)
    results = list(cast(Sequence[Node | None], graph.output_node().args[0]))
    results, weight_gradients = _parted(results, len(results) - parameters)
    results, input_gradients = _parted(results, len(results) - len(input_layouts))
    outputs, output_gradients = _parted(results, len(results) // 2)
    weight_gradients = _own(graph, weight_gradients, _present(input_gradients))
    cut = _Cut.of(graph, _present(input_gradients), _present(weight_gradients))
    for reason in _reasons_against(traced, module, cut):
        raise CannotSplit(name, reason)
    starts = list(graph.find_nodes(op="placeholder"))
    f_to_i, f_to_w, i_to_w = cut.kept()
    return SplitLayer(
        _piece(traced, starts, cut.f, [*_present(outputs), *f_to_i, *f_to_w]),
        _piece(
            traced,
            [*f_to_i, *_present(output_gradients)],
            cut.i,
            [*_present(input_gradients), *i_to_w],
        ),
        _piece(traced, [*f_to_w, *i_to_w], cut.w, _present(weight_gradients)),
        input_layouts,
        tuple(None if node is None else _layout(node.meta["val"]) for node in output_gradients),
        tuple(gradient is not None for gradient in input_gradients),
        tuple(gradient is not None for gradient in weight_gradients),
        len(f_to_i),
    )


def _drop_aliases(graph: Graph) -> None:
    """Take out what only autograd needed: ``detach``, and copies of inputs that are not written."""
    written = {storage for node in graph.nodes for storage in _written(node)}
    for node in list(graph.nodes):
        unused_copy = _phase(node) == COPY and not written & _storages(node)
        if unused_copy or node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _split_convolutions(graph: Graph) -> None:
    """Make two nodes of each that computes both gradients of a convolution.

    The kernels of the two gradients are apart; only the operator is one.
    """
    for node in list(
        graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    ):
        *args, (for_input, for_weight, for_bias) = node.args
        if not for_input or not (for_weight or for_bias):
            continue
        with graph.inserting_before(node):
            weights = graph.node_copy(node)
        node.args = (*args, [True, False, False])
        weights.args = (*args, [False, for_weight, for_bias])
        for element in list(node.users):
            if element.args[1] > 0:
                element.replace_input_with(node, weights)


def _own(
    graph: Graph, gradients: list[Node | None], input_gradients: list[Node]
) -> list[Node | None]:
    """The gradients, with a copy of each that shares memory with what others hold.

    So that the caller may add to them in place, as autograd's own accumulation lets it.
    """
    held = [node for node in graph.nodes if _phase(node)] + input_gradients
    taken = {storage for node in held for storage in _storages(node)}
    owned: list[Node | None] = []
    for gradient in gradients:
        if gradient is None or _is_alone(gradient, taken):
            owned.append(gradient)
        else:
            with graph.inserting_before(graph.output_node()):
                owned.append(graph.call_function(aten.clone.default, (gradient,)))
        if gradient is not None:
            taken |= _storages(gradient)
    return owned


def _is_alone(node: Node, taken: set[int]) -> bool:
    return _is_dense(node.meta["val"]) and not _storages(node) & taken


@dataclass(frozen=True, slots=True)
class _Cut:
    """The nodes of F, I and W, each in the order of the trace."""

    f: list[Node]
    i: list[Node]
    w: list[Node]
    input_gradients: list[Node]
    weight_gradients: list[Node]

    @classmethod
    def of(cls, graph: Graph, input_gradients: list[Node], weight_gradients: list[Node]) -> "_Cut":
        backward = {node for node in graph.nodes if node.op != "output" and _phase(node) is None}
        forward = {node for node in graph.nodes if _phase(node) in (FORWARD, COPY)}
        needed = _needed(graph)
        writers = [node for node in backward if _written(node)]
        i = _closed(input_gradients, needed, backward)
        w = _closed([*weight_gradients, *writers], needed, backward) - i
        order = list(graph.nodes)
        return cls(
            [node for node in order if node in forward and node.op != "placeholder"],
            [node for node in order if node in i],
            [node for node in order if node in w],
            input_gradients,
            weight_gradients,
        )

    def kept(self) -> tuple[list[Node], list[Node], list[Node]]:
        """What crosses: from F to I, from F to W, and from I (or the caller) to W."""
        into_i = _read(self.i, self.input_gradients)
        into_w = _read(self.w, self.weight_gradients)
        forward = (FORWARD, COPY)
        return (
            [node for node in into_i if _phase(node) in forward],
            [node for node in into_w if _phase(node) in forward],
            [node for node in into_w if _phase(node) not in forward],
        )


def _read(piece: list[Node], results: list[Node]) -> list[Node]:
    """What a piece reads or returns without computing it."""
    inside = set(piece)
    read = [argument for node in piece for argument in node.all_input_nodes]
    return [node for node in dict.fromkeys([*read, *results]) if node not in inside]


def _closed(roots: Iterable[Node], needed: dict[Node, set[Node]], within: set[Node]) -> set[Node]:
    """The nodes of ``within`` that ``roots`` need, and every element of a tuple among them.

    All elements, as handing over the tuple for one would keep the others too.
    """
    found: set[Node] = set()
    open_nodes = [node for node in roots if node in within]
    while open_nodes:
        node = open_nodes.pop()
        if node in found:
            continue
        found.add(node)
        elements = [user for user in node.users if user.target is operator.getitem]
        open_nodes += [other for other in [*needed[node], *elements] if other in within]
    return found


def _needed(graph: Graph) -> dict[Node, set[Node]]:
    """What must have run before each node: its arguments, and what writes in place demand.

    A node runs after the last write to its storage, and a write after all that used the storage.
    """
    needed: dict[Node, set[Node]] = {}
    last_write: dict[int, Node] = {}
    users: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        arguments = node.all_input_nodes
        touched = {storage for other in [node, *arguments] for storage in _storages(other)}
        written = _written(node)
        needed[node] = {*arguments, *(last_write[s] for s in touched if s in last_write)}
        needed[node].update(user for storage in written for user in users[storage])
        last_write.update(dict.fromkeys(written, node))
        for storage in touched:
            users[storage].append(node)
    return needed


def _storages(node: Node) -> set[int]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return {_storage(value) for value in values if isinstance(value, Tensor)}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(node: Node) -> set[int]:
    """The storages that a node changes in place, by its operator's schema."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return set()
    named = {a.name: a.alias_info for a in node.target._schema.arguments}
    given = dict(zip(named, node.args, strict=False)) | node.kwargs
    changed = [given[name] for name, info in named.items() if info and info.is_write]
    return {s for argument in changed for other in _nodes(argument) for s in _storages(other)}


def _reasons_against(traced: GraphModule, module: nn.Module, cut: _Cut) -> Iterator[str]:
    """Why the pieces would not do what the layer does."""
    owned = {_storage(tensor): name for name, tensor in module.named_parameters()}
    owned |= {_storage(tensor): name for name, tensor in module.named_buffers()}
    for node in traced.graph.find_nodes(op="get_attr"):
        constant = getattr(traced, str(node.target))
        if isinstance(constant, Tensor) and _storage(constant) in owned:
            yield f"its forward reads {owned[_storage(constant)]} past its name"
    for node in [*cut.i, *cut.w]:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            yield f"its backward draws random numbers ({node.target})"
    starts = {s for n in traced.graph.find_nodes(op="placeholder") for s in _storages(n)}
    changed = {s for node in cut.f for s in _written(node)} & starts
    if any(_storages(node) & changed for kept in cut.kept() for node in kept):
        yield "its backward reads a parameter or buffer that its forward changes"


class _Boxed(CodeGen):
    """Code that takes its values in one list and clears it, so that each is freed when used."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: object) -> str:
        names = ", ".join(name.partition(":")[0] for name in free_vars)
        unpack = f"[{names}] = boxed\n    boxed.clear()"
        return f"def forward(self, boxed){maybe_return_annotation}:\n    {unpack}"


def _piece(
    traced: GraphModule, starts: list[Node], nodes: list[Node], results: list[Node]
) -> GraphModule:
    graph = Graph()
    graph.set_codegen(_Boxed())
    copies = {start: graph.placeholder(start.name) for start in starts}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta.clear()
    graph.output([copies[node] for node in results])
    return GraphModule(traced, graph)


def _run(piece: GraphModule, values: list[Tensor], grad_mode: bool = False) -> list[Tensor]:
    # The trace holds what runs below autograd, and what autocast casts. Grad mode is that of an
    # ordinary forward or backward, as some kernels ask for it (oneDNN's LSTM).
    below = torch._C._AutoDispatchBelowAutograd()
    with below, torch.set_grad_enabled(grad_mode), _without_autocast(values):
        results: list[Tensor] = piece.forward(values)
    return results


def _without_autocast(values: Iterable[object]) -> ExitStack:
    stack = ExitStack()
    for device in {value.device.type for value in values if isinstance(value, Tensor)}:
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


@contextmanager
def _autocast_cache() -> Iterator[None]:
    """Cast a weight once where it is used twice, as outside of tracing."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


def _phase(node: Node) -> str | None:
    return node.meta.get("phase")


def _nodes(argument: object) -> list[Node]:
    listed = argument if isinstance(argument, (list, tuple)) else [argument]
    return [node for node in listed if isinstance(node, Node)]


def _parted(values: list[T], count: int) -> tuple[list[T], list[T]]:
    return values[:count], values[count:]


def _present(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]


def _spread(values: Iterable[T], places: Sequence[bool]) -> tuple[T | None, ...]:
    left = iter(values)
    return tuple(next(left) if place else None for place in places)


def _layout(tensor: Tensor) -> Layout:
    return Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _is_dense(tensor: Tensor) -> bool:
    """Whether no entries share memory and no gaps lie between them."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _one_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
