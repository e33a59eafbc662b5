"""A graph is cut into layers wherever few values pass."""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from stagewright.executor.capture.layers import CapturedLayer, LayeredModel
from stagewright.executor.capture.twins import shared
from stagewright.graphs.documents.errors import InputError

_PLAIN_METHODS = {"dim", "get_device", "item", "ndimension", "nelement", "numel", "size", "stride"}
_PLAIN_ATTRIBUTES = {"device", "dtype", "is_cuda", "layout", "ndim", "requires_grad", "shape"}
_PLAIN_LIBRARIES = {"_operator", "builtins", "math"}


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """The nodes of each layer, and the values that are alive before it and at the end.

    Nodes that are not values (sizes, parameters) are in no layer: each layer makes those it uses.
    """

    names: tuple[str, ...]
    nodes: tuple[tuple[fx.Node, ...], ...]
    alive: tuple[tuple[fx.Node, ...], ...]


NOTHING: Mapping[str, Any] = MappingProxyType({})


def cut_graph(
    model: nn.Module,
    graph: fx.Graph,
    attributes: Mapping[str, Any] = NOTHING,
    output: Callable[[tuple[Tensor, ...]], Any] | None = None,
) -> LayeredModel:
    """The layers of a model, by the graph of its calls.

    ``attributes`` are modules and tensors that the graph reads and the model does not have;
    ``output`` makes the model's result of the tensors that the graph returns, where it is not
    these.
    """
    remade = _remade(model, graph, attributes)
    results, single = _results(model, graph, remade)
    cuts = _find_cuts(model, graph, remade, results, attributes)
    read = [_remade_tensors(nodes, graph, remade) for nodes in cuts.nodes]
    together = {
        roots: _Together.of(roots, graph, remade)
        for roots, layers in Counter(read).items()
        if roots and layers > 1
    }
    modules = [
        _module(model, nodes, before, after, attributes, together.get(roots))
        for nodes, before, after, roots in zip(
            cuts.nodes, cuts.alive[:-1], cuts.alive[1:], read, strict=True
        )
    ]
    _add_unused(model, modules)
    layers = map(CapturedLayer, cuts.names, modules)
    whole = operator.itemgetter(0) if single else _same
    return LayeredModel(tuple(layers), len(cuts.alive[0]), output or whole)


def _same(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return values


def _results(
    model: nn.Module, graph: fx.Graph, remade: set[fx.Node]
) -> tuple[tuple[fx.Node, ...], bool]:
    """The values that the model returns, and whether it returns one without a tuple."""
    returned = graph.output_node().args[0]
    results = tuple(returned) if isinstance(returned, list | tuple) else (returned,)
    nodes = tuple(one for one in results if isinstance(one, fx.Node) and one not in remade)
    named = [returned, *(one.target for one in nodes)]  # tuples with names are made by calls
    if len(nodes) < len(results) or not nodes or any(hasattr(one, "_fields") for one in named):
        raise InputError(
            f"{type(model).__name__} returns {returned}; it may return a tensor or a tuple of them"
        )
    return nodes, isinstance(returned, fx.Node)


def _find_cuts(
    model: nn.Module,
    graph: fx.Graph,
    remade: set[fx.Node],
    results: tuple[fx.Node, ...],
    attributes: Mapping[str, Any],
) -> _Cuts:
    layer_of = _layer_of(graph, remade, attributes)
    count = 1 + max(layer_of.values(), default=0)
    last_use = {node: -1 for node in layer_of}
    for node, layer in [*layer_of.items(), *((result, count) for result in results)]:
        sources = [node] if layer == count else node.all_input_nodes
        for value in _values(sources, remade):
            last_use[value] = max(last_use[value], layer)
    alive = [
        tuple(node for node in layer_of if layer_of[node] < layer <= last_use[node])
        for layer in range(1, count)
    ]
    inputs = tuple(node for node in layer_of if node.op == "placeholder")
    nodes = [
        tuple(n for n in layer_of if layer_of[n] == layer and n.op != "placeholder")
        for layer in range(count)
    ]
    return _Cuts(_names(model, nodes, attributes), tuple(nodes), (inputs, *alive, results))


def _remade(model: nn.Module, graph: fx.Graph, attributes: Mapping[str, Any]) -> set[fx.Node]:
    """Nodes that every layer computes again.

    What is not a tensor, the module's own tensors, and masks and positions: tensors made of sizes,
    constants and inputs that are no floating-point numbers, which are less to pass on.
    """
    remade: set[fx.Node] = set()
    kept = _trained(model, graph) | _changed(graph) | set(_returned(graph))
    for node in graph.nodes:
        is_derived = node not in kept and _is_derived(node, remade, kept, attributes)
        if node.op == "get_attr" or is_derived or _is_plain(node, remade):
            remade.add(node)
    return remade


def _returned(graph: fx.Graph) -> tuple[fx.Node, ...]:
    return tuple(graph.output_node().all_input_nodes)


def _trained(model: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """The parameters that the graph reads."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {node for node in graph.find_nodes(op="get_attr") if str(node.target) in parameters}


def _changed(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that may be changed in place: changed nodes, and inputs that may share memory."""
    changed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node in changed or (schema is not None and schema.is_mutable):
            changed |= {node, *node.all_input_nodes}
    return changed


def _is_derived(
    node: fx.Node, remade: set[fx.Node], kept: set[fx.Node], attributes: Mapping[str, Any]
) -> bool:
    """Whether ``node`` is made without draws of ``remade`` nodes, constants and whole numbers."""
    if node.meta.get("val") is None:  # the tracer's nodes, of which nothing is known
        return False
    is_region = node.op == "call_module" and str(node.target) in attributes
    if not (is_region or isinstance(node.target, torch._ops.OpOverload)):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    return all(
        one not in kept and (one in remade or _is_whole_input(one)) for one in node.all_input_nodes
    )


def _is_whole_input(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "placeholder"
        and isinstance(value, Tensor)
        and not (value.is_floating_point() or value.is_complex())
    )


def _is_plain(node: fx.Node, remade: set[fx.Node]) -> bool:
    """Whether ``node`` is known not to be a tensor."""
    if node.meta.get("val") is not None:
        return node.op == "call_function" and isinstance(
            node.meta["val"], (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
        )
    sources = node.all_input_nodes
    of_plain = bool(sources) and all(one in remade and one.op != "get_attr" for one in sources)
    if node.op == "call_method":
        return of_plain or node.target in _PLAIN_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return of_plain or node.args[1] in _PLAIN_ATTRIBUTES
    return of_plain and getattr(node.target, "__module__", "") in _PLAIN_LIBRARIES


def _remade_tensors(
    own: Iterable[fx.Node], graph: fx.Graph, remade: set[fx.Node]
) -> tuple[fx.Node, ...]:
    """The masks and positions that the nodes of a layer read, in order."""
    read = {one for node in own for one in node.all_input_nodes if one in remade}
    return tuple(
        node
        for node in graph.nodes
        if node in read and node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Together:
    """Masks and positions that several layers read, and the function that makes these values.

    These are the model's inputs and buffers, and sizes.
    """

    roots: tuple[fx.Node, ...]
    arguments: tuple[fx.Node, ...]
    make: Callable[..., tuple[Any, ...]]

    @classmethod
    def of(cls, roots: tuple[fx.Node, ...], graph: fx.Graph, remade: set[fx.Node]) -> "_Together":
        inside = _made_of_inside(graph, remade)
        needed = set(roots)
        for node in reversed(graph.nodes):
            if node in needed and node in inside:
                needed.update(node.all_input_nodes)
        arguments = tuple(node for node in graph.nodes if node in needed and node not in inside)
        own = fx.Graph()
        made = {node: own.placeholder(node.name) for node in arguments}
        for node in graph.nodes:
            if node in needed and node in inside:
                made[node] = own.node_copy(node, made.__getitem__)
        own.output(tuple(made[node] for node in roots))
        of_inputs = any(node.op == "placeholder" for node in arguments)
        make = shared(fx.GraphModule(nn.Module(), own).forward, of_inputs=of_inputs)
        return cls(roots, arguments, make)


def _made_of_inside(graph: fx.Graph, remade: set[fx.Node]) -> set[fx.Node]:
    """The tensors that are made again by operators, and plain values made of these alone."""
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        is_own = not _is_plain(node, remade) or (sources and inside.issuperset(sources))
        if node in remade and node.op == "call_function" and is_own:
            inside.add(node)
    return inside


def _layer_of(
    graph: fx.Graph, remade: set[fx.Node], attributes: Mapping[str, Any]
) -> dict[fx.Node, int]:
    """The layer of every value, in order; nodes before the first leaf belong to the first."""
    layer_of: dict[fx.Node, int] = {}
    leaves = 0
    for node in graph.nodes:
        if node in remade or node.op == "output":
            continue
        leaves += _is_leaf(node, attributes)
        whole = node.args[0] if _takes_entry(node) else None
        layer_of[node] = layer_of[whole] if whole in layer_of else max(0, leaves - 1)
    return layer_of


def _is_leaf(node: fx.Node, attributes: Mapping[str, Any]) -> bool:
    return node.op == "call_module" and str(node.target) not in attributes


def _takes_entry(node: fx.Node) -> bool:
    """Whether ``node`` takes an entry of a tuple that is used by entries alone."""
    if not _is_getitem(node) or not isinstance(node.args[0], fx.Node):
        return False
    return all(map(_is_getitem, node.args[0].users))


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[1], int)


def _values(nodes: Iterable[fx.Node], remade: set[fx.Node]) -> Iterator[fx.Node]:
    """The values that ``nodes`` are or are made from."""
    for node in nodes:
        if node in remade:
            yield from _values(node.all_input_nodes, remade)
        else:
            yield node


def _names(
    model: nn.Module, nodes: Sequence[Sequence[fx.Node]], attributes: Mapping[str, Any]
) -> tuple[str, ...]:
    """Each layer's leaf; the second call of a leaf is ``leaf@2``."""
    calls: Counter[str] = Counter()
    names = []
    for own in nodes:
        leaves = [str(node.target) for node in own if _is_leaf(node, attributes)]
        name = leaves[0] if leaves else type(model).__name__
        calls[name] += 1
        names.append(name if calls[name] == 1 else f"{name}@{calls[name]}")
    return tuple(names)


def _module(
    model: nn.Module,
    nodes: Sequence[fx.Node],
    before: Sequence[fx.Node],
    after: Sequence[fx.Node],
    attributes: Mapping[str, Any],
    together: _Together | None,
) -> fx.GraphModule:
    """The module that computes ``nodes`` from ``before`` and returns ``after``.

    What it makes ``together`` with other layers is made once where they run one after another.
    """
    graph = fx.Graph()
    made = {node: graph.placeholder(node.name) for node in before}

    def make(node: fx.Node) -> fx.Node:
        if node not in made:
            made[node] = graph.node_copy(node, make)
        return made[node]

    if together is not None:
        found = graph.call_function(together.make, tuple(map(make, together.arguments)))
        for i, node in enumerate(together.roots):
            made[node] = graph.call_function(operator.getitem, (found, i))
            made[node].meta["val"] = node.meta["val"]
    for node in nodes:
        make(node)
    graph.output(tuple(make(node) for node in after))
    module = fx.GraphModule(_root(model, graph, attributes), graph)
    for node in graph.find_nodes(op="get_attr"):
        if str(node.target) in attributes:
            module._non_persistent_buffers_set.add(str(node.target))
        else:
            _keep_out_of_state(model, module, str(node.target))
    return module


def _root(
    model: nn.Module, graph: fx.Graph, attributes: Mapping[str, Any]
) -> nn.Module | dict[str, Any]:
    """Where a graph's modules and tensors are."""
    if not attributes:
        return model
    named = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    return {
        name: attributes[name] if name in attributes else operator.attrgetter(name)(model)
        for name in named
    }


def _keep_out_of_state(model: nn.Module, module: nn.Module, name: str) -> None:
    """Keep a tensor that is no part of the model's state out of a traced module's state dict."""
    path, _, field = name.rpartition(".")
    owner, copied = model.get_submodule(path), module.get_submodule(path)
    if owner is not copied and field in copied._buffers and not _in_state(owner, field):
        copied._non_persistent_buffers_set.add(field)


def _in_state(owner: nn.Module, field: str) -> bool:
    return field in owner._buffers and field not in owner._non_persistent_buffers_set


def _add_unused(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Add names of the state that no layer has to the layer with that tensor, or to the first."""
    states = [module.state_dict(keep_vars=True) for module in modules]
    home = {
        id(tensor): i for i, state in reversed([*enumerate(states)]) for tensor in state.values()
    }
    named: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in named.items():
        if isinstance(tensor, Tensor) and not any(name in state for state in states):
            _register(modules[home.get(id(tensor), 0)], name, tensor)


def _register(module: nn.Module, name: str, tensor: Tensor) -> None:
    *path, field = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(field, tensor)
    else:
        module.register_buffer(field, tensor)
