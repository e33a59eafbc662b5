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
from dataclasses import dataclass
from traceback import walk_tb
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from stagewright.executor.capture.python_state import attributes_kept
from stagewright.executor.capture.split_layer import (
    CannotSplit,
    JointModule,
    SplitLayer,
    TracedLayout,
    is_dense,
    layout_of,
    make_piece,
    parted,
    phase_of,
    present,
    trace_joint,
)

FORWARD, COPY = "forward", "copy of an input"


aten = torch.ops.aten


def cut_joint(
    traced: GraphModule, module: nn.Module, input_layouts: tuple[TracedLayout, ...], name: str
) -> SplitLayer:
    """The three pieces of a traced layer."""
    parameters = len(list(module.parameters()))
    graph = traced.graph
    _drop_aliases(graph)
    _split_convolutions(graph)
    results = list(cast(Sequence[Node | None], graph.output_node().args[0]))
    results, weight_gradients = parted(results, len(results) - parameters)
    results, input_gradients = parted(results, len(results) - len(input_layouts))
    outputs, output_gradients = parted(results, len(results) // 2)
    weight_gradients = own_node(graph, weight_gradients, present(input_gradients))
    cut = _Cut.of(graph, present(input_gradients), present(weight_gradients))
    for reason in _reasons_against(traced, module, cut):
        raise CannotSplit(name, reason)
    starts = list(graph.find_nodes(op="placeholder"))
    f_to_i, f_to_w, i_to_w = cut.kept()
    return SplitLayer(
        make_piece(traced, starts, cut.f, [*present(outputs), *f_to_i, *f_to_w]),
        make_piece(
            traced,
            [*f_to_i, *present(output_gradients)],
            cut.i,
            [*present(input_gradients), *i_to_w],
        ),
        make_piece(traced, [*f_to_w, *i_to_w], cut.w, present(weight_gradients)),
        input_layouts,
        tuple(None if node is None else layout_of(node.meta["val"]) for node in output_gradients),
        tuple(gradient is not None for gradient in input_gradients),
        tuple(gradient is not None for gradient in weight_gradients),
        len(f_to_i),
    )


def _drop_aliases(graph: Graph) -> None:
    """Remove nodes that only autograd needed: ``detach``, and copies of inputs not written to."""
    written = {storage for node in graph.nodes for storage in _written(node)}
    for node in list(graph.nodes):
        unused_copy = phase_of(node) == COPY and not written & _storages(node)
        if unused_copy or node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _split_convolutions(graph: Graph) -> None:
    """Make two nodes of each that computes both gradients of a convolution.

    The kernels of the two gradients are separate; only the operator is shared.
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


def own_node(
    graph: Graph, gradients: list[Node | None], input_gradients: list[Node]
) -> list[Node | None]:
    """The gradients, with a copy of each that shares memory with other tensors.

    The caller may then add to them in place, as with autograd's own accumulation.
    """
    held = [node for node in graph.nodes if phase_of(node)] + input_gradients
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
    return is_dense(node.meta["val"]) and not _storages(node) & taken


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
        backward = {node for node in graph.nodes if node.op != "output" and phase_of(node) is None}
        forward = {node for node in graph.nodes if phase_of(node) in (FORWARD, COPY)}
        needed = needed_by(graph)
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
        """The values that pass from F to I, from F to W, and from I (or the caller) to W."""
        into_i = _read(self.i, self.input_gradients)
        into_w = _read(self.w, self.weight_gradients)
        forward = (FORWARD, COPY)
        return (
            [node for node in into_i if phase_of(node) in forward],
            [node for node in into_w if phase_of(node) in forward],
            [node for node in into_w if phase_of(node) not in forward],
        )


def _read(piece: list[Node], results: list[Node]) -> list[Node]:
    """The values that a piece reads or returns without computing them."""
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


def needed_by(graph: Graph) -> dict[Node, set[Node]]:
    """The nodes that must run before each node: its arguments, and in-place writes.

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


def _aliased(node: Node) -> Iterator[tuple[Node, bool]]:
    """The arguments whose memory a node returns or changes in place, and whether it changes it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    named = {a.name: a.alias_info for a in node.target._schema.arguments}
    given = dict(zip(named, node.args, strict=False)) | node.kwargs
    for name, info in named.items():
        for other in nodes_in(given.get(name)) if info else ():
            yield other, bool(info and info.is_write)


def _written(node: Node) -> set[int]:
    """The storages that a node changes in place, by its operator's schema."""
    return {s for other, is_write in _aliased(node) if is_write for s in _storages(other)}


def _reasons_against(traced: GraphModule, module: nn.Module, cut: _Cut) -> Iterator[str]:
    """Why the pieces would compute something else than the layer."""
    owned = {_storage(tensor): name for name, tensor in module.named_parameters()}
    owned |= {_storage(tensor): name for name, tensor in module.named_buffers()}
    for node in traced.graph.find_nodes(op="get_attr"):
        constant = getattr(traced, str(node.target))
        if isinstance(constant, Tensor) and _storage(constant) in owned:
            yield f"its forward reads {owned[_storage(constant)]} past its name"
    for node in [*cut.i, *cut.w]:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            yield f"its backward draws random numbers ({node.target})"
    written = {storage for node in cut.f for storage in _written(node)}
    changing = [node for node in cut.f if written & _storages(node)]
    if any(other.op == "get_attr" for node in changing for other, _ in _aliased(node)):
        # A mask that layers share is one, and would change with every microbatch.
        yield "its forward changes a tensor in place that is no parameter or buffer"
    starts = {s for n in traced.graph.find_nodes(op="placeholder") for s in _storages(n)}
    changed = written & starts
    if any(_storages(node) & changed for kept in cut.kept() for node in kept):
        yield "its backward reads a parameter or buffer that its forward changes"


def nodes_in(argument: object) -> list[Node]:
    """The nodes in an argument of a node."""
    listed = argument if isinstance(argument, (list, tuple)) else [argument]
    return [node for node in listed if isinstance(node, Node)]


def split_layer(
    module: nn.Module,
    inputs: Sequence[Tensor],
    input_needs_gradient: Sequence[bool],
    output_has_gradient: Sequence[bool] | None = None,
    name: str = "",
) -> SplitLayer:
    """Trace a layer and cut it into F, I and W.

    The pieces hold for the shapes and types of ``inputs``, the module's mode (training or not), and
    the caller's autocast, which are the key of a cache of them. Raises CannotSplit if the layer has
    hooks, which tracing would call only once, or cannot be traced, or its backward draws random
    numbers or reads tensors that a later forward changes. ``module``: takes ``inputs`` by position
    and returns a tuple of tensors. ``inputs``: examples; only their shapes, strides, types and
    devices are read. ``input_needs_gradient``: whether I computes a gradient, for each input. With
    none, I is empty and W the backward. ``output_has_gradient``: whether I is given a gradient, for
    each output; by default all that depend on an input that needs a gradient or on a parameter.
    ``name``: the layer's name in errors, where none of its parts can be named.
    """
    name = name or type(module).__name__
    for place, part in module.named_modules():
        if _has_hooks(part):
            raise CannotSplit(place or name, "it has hooks")
    examples = [value if is_dense(value) else value.contiguous() for value in inputs]
    joint = JointModule(module, tuple(input_needs_gradient), output_has_gradient)
    try:
        with attributes_kept(module, finds_caches=False):
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
