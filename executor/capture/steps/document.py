"""The document of a captured graph, which planners of operators read.

The dimensions along which aten operators can be divided without changing their results.

A rule says which axis of each tensor argument is cut, and along which axis the parts' outputs are
concatenated; None among the arguments means that every part reads all of it, None among the outputs
that the parts are added. What has no rule here cannot be divided: views, which cost nothing;
operators that draw, as parts would draw other numbers; batch norm over the batch; means of losses.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from stagewright.graphs.models.operators.step_graph import Node, Output, Split, StepGraph

aten = torch.ops.aten
SUM = 2  # a loss's reduction

Axes = tuple[int | None, ...]
Dimension = Literal["batch", "channel"]
Found = tuple[Dimension, dict[int, int], Axes]
"""Dimension, axis by the number of the argument that is cut, axes of the outputs."""


def splits_of(node: fx.Node) -> tuple[Split, ...]:
    """The splits of an operator; its inputs are the tensors among its arguments, in order."""
    if node.op != "call_function" or node.meta["role"] == "update" or node.kwargs.get("out"):
        return ()
    values = fx.node.map_arg(node.args, lambda one: one.meta["val"])
    rule = RULES.get(node.target) or (_pointwise if _is_pointwise(node) else None)
    if rule is None or any(isinstance(one, Tensor) for one in tree_flatten(node.kwargs)[0]):
        return ()
    return tuple(
        Split(dimension, size, _inputs(values, cut), outputs)
        for dimension, cut, outputs in rule(values, node)
        if (size := _size(values, cut)) > 1
    )


def _inputs(values: Any, cut: dict[int, int]) -> Axes:
    """The axis of every tensor; tensors of a list are cut alike, but for empty ones of one axis."""
    axes: list[int | None] = []
    for number, value in enumerate(values):
        tensors = [one for one in tree_flatten(value)[0] if isinstance(one, Tensor)]
        axes += [cut.get(number) if _is_cut(value, one) else None for one in tensors]
    return tuple(axes)


def _is_cut(value: Any, tensor: Tensor) -> bool:
    """Whether a tensor of an argument is cut; ``cat`` takes empty ones of one axis among others."""
    return not isinstance(value, list | tuple) or tensor.shape != (0,)


def _size(values: Any, cut: dict[int, int]) -> int:
    number, axis = next(iter(cut.items()), (0, 0))
    given = values[number] if isinstance(values[number], list | tuple) else [values[number]]
    sizes = [int(one.shape[axis]) for one in given if _is_cut(values[number], one)] if cut else []
    return sizes[0] if sizes else 0


def _is_pointwise(node: fx.Node) -> bool:
    target: Any = node.target
    drawing = torch.Tag.nondeterministic_seeded in target.tags
    return torch.Tag.pointwise in target.tags and not target._schema.is_mutable and not drawing


def _pointwise(values: Any, node: fx.Node) -> Iterator[Found]:
    """Any axis of the output; arguments that are broadcast along it are read by every part."""
    shape = node.meta["val"].shape
    for dimension, axis in _dimensions(len(shape)):
        cut = {}
        for number, value in enumerate(values):
            own = axis - len(shape) + value.dim() if isinstance(value, Tensor) else -1
            if own >= 0 and value.shape[own] == shape[axis]:
                cut[number] = own
        if shape[axis] > 1:
            yield dimension, cut, (axis,)


def _dimensions(dims: int) -> list[tuple[Dimension, int]]:
    """Axis 0, and axis 1; of sequences of vectors the last."""
    axes: list[tuple[Dimension, int]] = [("batch", 0), ("channel", 2 if dims == 3 else 1)]
    return axes[:dims]


def _mm(values: Any, node: fx.Node) -> Iterator[Found]:
    """The gradient of a weight is a product over the batch, with the outputs transposed."""
    source: Any = node.args[0]
    if source.target is aten.t.default and node.meta["role"] == "backward":
        yield "batch", {0: 1, 1: 0}, (None,)
        yield "channel", {0: 0}, (0,)
    else:
        yield "batch", {0: 0}, (0,)
        yield "channel", {1: 1}, (1,)


def _addmm(values: Any, node: fx.Node) -> Iterator[Found]:
    added, last = values[0], values[0].dim() - 1
    rows = {0: 0} if last == 1 and added.shape[0] > 1 else {}
    yield "batch", {1: 0, **rows}, (0,)
    columns = {0: last} if last >= 0 and added.shape[last] > 1 else {}
    yield "channel", {2: 1, **columns}, (1,)


def _bmm(values: Any, node: fx.Node) -> Iterator[Found]:
    yield "batch", {0: 0, 1: 0}, (0,)
    yield "channel", {1: 2}, (2,)


def _convolution(values: Any, node: fx.Node) -> Iterator[Found]:
    _, _, bias, _, _, _, transposed, _, groups = values
    if values[0].dim() > 2 and groups == 1:
        yield "batch", {0: 0}, (0,)
        yield "channel", {1: int(transposed)} | ({2: 0} if bias is not None else {}), (1,)


def _convolution_backward(values: Any, node: fx.Node) -> Iterator[Found]:
    """Channels are those of the output; every part has a share of the input's gradient."""
    transposed, groups, mask = values[7], values[9], values[10]
    if groups == 1:
        own = int(transposed)
        yield "batch", {0: 0, 1: 0}, _present(mask, (0, None, None))
        yield "channel", {0: 1, 2: own}, _present(mask, (None, own, 0))


def _present(mask: list[bool], axes: Axes) -> Axes:
    return tuple(axis if made else None for made, axis in zip(mask, axes, strict=True))


def _batch_norm(values: Any, node: fx.Node) -> Iterator[Found]:
    """Its statistics are over the batch, and separate for each channel."""
    if values[5]:
        given = {i: 0 for i in range(1, 5) if values[i] is not None}
        yield "channel", {0: 1, **given}, (1, 0, 0, 0, 0)


def _batch_norm_backward(values: Any, node: fx.Node) -> Iterator[Found]:
    if values[7]:
        given = {i: 0 for i in range(2, 7) if values[i] is not None}
        yield "channel", {0: 1, 1: 1, **given}, _present(values[9], (1, 0, 0))


def _layer_norm(values: Any, node: fx.Node) -> Iterator[Found]:
    if values[0].dim() > len(values[1]):
        yield "batch", {0: 0}, (0, 0, 0)


def _layer_norm_backward(values: Any, node: fx.Node) -> Iterator[Found]:
    if values[0].dim() > len(values[2]):
        yield "batch", {0: 0, 1: 0, 3: 0, 4: 0}, _present(values[7], (0, None, None))


def _images(*numbers: int, outputs: int = 1) -> Callable[[Any, fx.Node], Iterator[Found]]:
    """A rule for operators that treat every channel of every image alike."""

    def rule(values: Any, node: fx.Node) -> Iterator[Found]:
        if values[0].dim() == 4:
            yield "batch", dict.fromkeys(numbers, 0), (0,) * outputs
            yield "channel", dict.fromkeys(numbers, 1), (1,) * outputs

    return rule


def _along(position: int, *numbers: int) -> Callable[[Any, fx.Node], Iterator[Found]]:
    """A rule for operators that combine one axis, which argument ``position`` names."""

    def rule(values: Any, node: fx.Node) -> Iterator[Found]:
        dims = node.meta["val"].dim()
        combined = (values[position] if len(values) > position else 0) % max(1, dims)
        for dimension, axis in _dimensions(dims):
            if axis != combined:
                yield dimension, dict.fromkeys(numbers, axis), (axis,)

    return rule


def _sum(values: Any, node: fx.Node) -> Iterator[Found]:
    yield from _reduction(values, adds=True)


def _mean(values: Any, node: fx.Node) -> Iterator[Found]:
    yield from _reduction(values, adds=False)


def _reduction(values: Any, *, adds: bool) -> Iterator[Found]:
    """Split a reduction along an axis that remains or, for a sum, along a summed axis."""
    x, axes = values[0], values[1] or range(values[0].dim())
    reduced = {axis % x.dim() for axis in axes}
    kept = len(values) > 2 and values[2]
    for dimension, axis in _dimensions(x.dim()):
        if axis not in reduced:
            yield dimension, {0: axis}, (axis - (0 if kept else sum(i < axis for i in reduced)),)
        elif adds:
            yield dimension, {0: axis}, (None,)


def _embedding(values: Any, node: fx.Node) -> Iterator[Found]:
    if values[1].dim():
        yield "batch", {1: 0}, (0,)
    yield "channel", {0: 1}, (values[1].dim(),)


def _embedding_backward(values: Any, node: fx.Node) -> Iterator[Found]:
    if not values[4]:  # gradients scaled by how often an index occurs in the whole batch
        yield "batch", {0: 0, 1: 0}, (None,)
        yield "channel", {0: values[0].dim() - 1}, (1,)


def _nll(values: Any, node: fx.Node) -> Iterator[Found]:
    if values[3] == SUM and values[0].dim() > 1:
        yield "batch", {0: 0, 1: 0}, (None, None)


def _nll_backward(values: Any, node: fx.Node) -> Iterator[Found]:
    """A mean's gradient is divided by the total weight, which is an argument."""
    if values[4] and values[1].dim() > 1:
        yield "batch", {1: 0, 2: 0}, (0,)


def _attention(values: Any, node: fx.Node) -> Iterator[Found]:
    """Samples and heads are independent, without dropout."""
    if len(values) < 4 or not values[3]:
        yield "batch", dict.fromkeys(range(3), 0), (0, 0)
        yield "channel", dict.fromkeys(range(3), 1), (1, 1)


def _attention_backward(values: Any, node: fx.Node) -> Iterator[Found]:
    if not values[6]:
        yield "batch", dict.fromkeys(range(6), 0), (0, 0, 0)
        yield "channel", dict.fromkeys(range(6), 1), (1, 1, 1)


RULES: dict[Any, Callable[[Any, fx.Node], Iterator[Found]]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.max_pool2d_with_indices.default: _images(0, outputs=2),
    aten.max_pool2d_with_indices_backward.default: _images(0, 1, 7),
    aten.avg_pool2d.default: _images(0),
    aten.avg_pool2d_backward.default: _images(0, 1),
    aten._adaptive_avg_pool2d.default: _images(0),
    aten._adaptive_avg_pool2d_backward.default: _images(0, 1),
    aten._softmax.default: _along(1, 0),
    aten._softmax_backward_data.default: _along(2, 0, 1),
    aten._log_softmax.default: _along(1, 0),
    aten._log_softmax_backward_data.default: _along(2, 0, 1),
    aten.cat.default: _along(1, 0),
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _mean,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss2d_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss2d_backward.default: _nll_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.native_dropout_backward.default: _pointwise,
    aten.clone.default: _pointwise,
}


VIEWS = (torch.ops.aten._unsafe_view.default,)  # views whose schema does not say so


def step_graph(name: str, graph: fx.Graph, samples: int) -> StepGraph:
    """The operators of ``graph``, a step on ``samples`` samples, without seconds."""
    return StepGraph(name, "captured, without costs", samples, tuple(_nodes(graph)))


def _nodes(graph: fx.Graph) -> Iterator[Node]:
    memory: dict[fx.Node, fx.Node] = {}  # the node whose memory a node's result is in
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in operators(graph):
        given = [one for one, _ in tensor_inputs(node)]
        shares = bool(given) and (is_view(node) or is_in_place(node))
        memory[node] = memory[given[0]] if shares else node
        yield Node(
            name=node.name,
            operator=operator_name(node),
            role=node.meta["role"],
            inputs=tuple((one.name, number) for one, number in tensor_inputs(node)),
            outputs=tuple(_output(one, shares) for one in results_of(node)),
            state_bytes=bytes_of(node.meta["val"]) if node.meta["role"] == "state" else 0.0,
            beside=given[0].name if shares else node.meta.get("beside"),
            after=tuple(_overtaken(node, given, readers[memory[node]])),
            splits=() if shares else splits_of(node),
            line=node.meta.get("line"),
        )
        for one in dict.fromkeys(given):
            readers[memory[one]].append(node)


def operators(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of the document: inputs, states and calls, without the selection of outputs."""
    for node in graph.nodes:
        if node.op != "output" and node.target is not operator.getitem:
            yield node


def tensor_inputs(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """(operator, number of its output) of every tensor in the arguments, in their order."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return [selected(one) for one in found]


def selected(node: fx.Node) -> tuple[fx.Node, int]:
    """(operator, number of its output) that a node stands for."""
    if node.target is operator.getitem:
        source, number = node.args
        return source, number  # type: ignore[return-value]
    return node, 0


def operator_name(node: fx.Node) -> str:
    """The operator of a node, such as ``aten.mm``; the kind of an input or a state."""
    if node.op == "placeholder":
        return str(node.meta["role"])
    return str(node.target.overloadpacket)  # type: ignore[union-attr]


def results_of(node: fx.Node) -> list[Tensor | None]:
    """The tensors that a node makes; None for an output that is left out."""
    value: Any = node.meta["val"]
    return list(value) if isinstance(value, list | tuple) else [value]


def is_view(node: fx.Node) -> bool:
    """Whether the results share the memory of the first input."""
    if node.op == "placeholder":
        return False
    returned = node.target._schema.returns  # type: ignore[union-attr]
    shares = bool(returned) and returned[0].alias_info is not None
    return node.target in VIEWS or (shares and not is_in_place(node))


def is_in_place(node: fx.Node) -> bool:
    """Whether the node changes its first input."""
    return node.op == "call_function" and bool(node.target._schema.is_mutable)  # type: ignore[union-attr]


def _overtaken(node: fx.Node, given: list[fx.Node], readers: list[fx.Node]) -> list[str]:
    """Readers of the memory that ``node`` changes, which must run before ``node``."""
    if not is_in_place(node):
        return []
    return [one.name for one in readers if one not in given]


def _output(value: Tensor | None, shared: bool) -> Output:
    if value is None:
        return Output(0.0)
    return Output(bytes_of(value), tuple(value.shape), shared)


def bytes_of(value: Tensor) -> float:
    """Bytes of the different elements: an expanded dimension counts once."""
    strides = zip(value.shape, value.stride(), strict=True)
    sizes = [size for size, stride in strides if stride != 0 or size == 0]
    count = 1
    for size in sizes:
        count *= size
    return float(count * value.element_size())
