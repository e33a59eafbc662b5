"""A torch module as a chain of layers; run in order they are the module.

A layer takes every value that is alive before it and returns a tuple of every value alive after
it, so that the chain may be cut between any two layers: skip connections pass by the layers that
they skip. A value that is no tensor, such as a size, does not pass; the layers that need it compute
it again.

A layer is a leaf of the module tree with the functions called after it. The module itself and every
module that holds blocks are descended into; blocks are modules other than torch's own that stand in
a ModuleList, ModuleDict or Sequential.
"""

import dis
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from stagewright.executor.capture.python_state import attributes_kept, described, snapshot
from stagewright.graphs.documents.errors import InputError

CONSTANT = "_tensor_constant"  # what torch.fx calls a tensor without a name
CURE = "pass a list of modules, one per layer"
CALL = nn.Module.__call__  # torch.fx replaces it while it traces
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Functions that make tensors from sizes; torch.fx sees those alone that are given a tensor.
MAKERS = (
    *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "tensor", "zeros"),
)
PLAIN_METHODS = {"dim", "get_device", "item", "ndimension", "nelement", "numel", "size", "stride"}
PLAIN_ATTRIBUTES = {"device", "dtype", "is_cuda", "layout", "ndim", "requires_grad", "shape"}
PLAIN_LIBRARIES = {"_operator", "builtins", "math"}


@dataclass(frozen=True, slots=True, eq=False)
class CapturedLayer:
    """One layer: ``module`` takes and returns tuples of tensors, under the model's own names."""

    name: str
    module: nn.Module


@dataclass(frozen=True, slots=True, eq=False)
class LayeredModel:
    """The layers in order. The first takes ``input_count`` tensors; the last one's are the output.

    ``returns_one``: the model returns a tensor itself, where the last layer returns a tuple of
    one. It is None for a list of modules, of which this is known once the last one was called.
    """

    layers: tuple[CapturedLayer, ...]
    input_count: int
    returns_one: bool | None

    @property
    def single_output(self) -> bool:
        """Whether the loss is given a tensor, and not a tuple of them."""
        last = self.layers[-1].module
        return last.result.is_one if isinstance(last, _Listed) else bool(self.returns_one)

    def __len__(self) -> int:
        return len(self.layers)

    def parameters_by_name(self) -> dict[tuple[str, ...], nn.Parameter]:
        """Every parameter once, with all its names."""
        modules = [layer.module for layer in self.layers]
        return _by_names(
            pair for m in modules for pair in m.named_parameters(remove_duplicate=False)
        )

    def buffers_by_name(self) -> dict[tuple[str, ...], Tensor]:
        """Every buffer that belongs to the state once, with all its names."""
        modules = [layer.module for layer in self.layers]
        return _by_names(
            (name, buffer)
            for module in modules
            for kept in [module.state_dict(keep_vars=True)]
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if name in kept
        )


def capture(model: nn.Module | Sequence[nn.Module]) -> LayeredModel:
    """Split ``model``, a module or a list of modules, into layers; every module keeps its mode.

    The layers share the parameters and buffers of ``model``, which may live on any device, meta
    included. Of a module's arguments, those without a default are the inputs.

    Raises
    ------
    InputError
        If the module cannot be traced, because its path of execution depends on data, or if the
        layers would not do all that it does: keep Python state, call its hooks.
    """
    if isinstance(model, list | tuple | nn.ModuleList):
        return _require_whole_gradients(_capture_list(list(model)))
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}, not a torch module or a list")
    _require_plain_tensors(model)
    _require_no_backward_hooks(model)
    graph = _trace_twice(model)
    _replace_in_place(model, graph)
    return _require_whole_gradients(_cut(model, graph))


# A list of modules


@dataclass(slots=True)
class _Result:
    """Whether a module's last result was a tensor, and not a tuple of them."""

    is_one: bool = True


class _Listed(nn.Module):
    """One module of a list, under its number."""

    def __init__(self, number: int, module: nn.Module) -> None:
        super().__init__()
        self.number = str(number)
        self.result = _Result()
        self.add_module(self.number, module)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        result = self.get_submodule(self.number)(*values)
        self.result.is_one = isinstance(result, Tensor)
        results = (result,) if self.result.is_one else result
        if type(results) not in (list, tuple) or not all(isinstance(r, Tensor) for r in results):
            raise InputError(
                f"layer {self.number!r} returns a {_kind(result)}; it may return a tensor or a "
                "tuple of them"
            )
        return tuple(results)


def _kind(result: Any) -> str:
    if type(result) not in (list, tuple):
        return type(result).__name__
    kinds = ", ".join(type(one).__name__ for one in result)
    return f"{type(result).__name__} of {kinds or 'nothing'}"


def _capture_list(modules: list[nn.Module]) -> LayeredModel:
    if not modules:
        raise InputError("the list of modules is empty; it needs one module per layer")
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise InputError(f"entry {number} of the list of modules is a {kind}, not a module")
        _require_plain_tensors(module, f"{number}.")
        if _is_in_place(_first(module)):  # a cut may stand before it
            _first(module).inplace = False
    layers = [CapturedLayer(str(i), _Listed(i, module)) for i, module in enumerate(modules)]
    inputs = _inputs(modules[0])
    return LayeredModel(tuple(layers), max(1, len(inputs)), returns_one=None)


# What a model may not have


def _require_plain_tensors(model: nn.Module, prefix: str = "") -> None:
    """Refuse what would not hold for the copy of a parameter that trains in its place."""
    for name, one in model.named_parameters():
        if is_lazy(one):
            raise InputError(
                f"parameter {prefix + name!r} has no shape yet; call the model once before"
            )
        if one._post_accumulate_grad_hooks:
            raise InputError(
                f"parameter {prefix + name!r} has a hook that runs after its gradient is "
                "accumulated; gradients are summed up over microbatches and devices first: remove "
                "the hook"
            )


def _require_no_backward_hooks(model: nn.Module) -> None:
    """Refuse backward hooks of modules that are cut into layers."""
    for name, module in model.named_modules():
        if (module is model or _holds_blocks(module)) and (
            module._backward_hooks or module._backward_pre_hooks
        ):
            path = f" {name!r}" if name else ""
            raise InputError(
                f"{type(module).__name__}{path} has a backward hook, but is cut into layers; put "
                "the hook on a module within, or pass a list of modules"
            )


def _require_whole_gradients(model: LayeredModel) -> LayeredModel:
    """``model``, unless a parameter has a hook that would be given its gradient layer by layer."""
    users = Counter(id(one) for layer in model.layers for one in layer.module.parameters())
    for names, one in model.parameters_by_name().items():
        if one._backward_hooks and users[id(one)] > 1:
            raise InputError(
                f"parameter {names[0]!r} has a hook and is used in {users[id(one)]} layers, each "
                "of which would call it with a part of the gradient; remove the hook"
            )
    return model


# Tracing


def _trace_twice(model: nn.Module) -> fx.Graph:
    """The graph of ``model``, if it does not depend on how often the model was called."""
    before = snapshot(model)
    with attributes_kept(model):
        graph = _Tracer().capture(model)
        once, constants = snapshot(model), _constants(model)
        try:
            again = _Tracer().capture(model)
        except InputError as error:
            raise InputError(
                f"{type(model).__name__} can be traced once but not twice: its forward reads what "
                f"an earlier one has left; {CURE}"
            ) from error
        moving = before.changed(once) & once.changed(snapshot(model))
        if moving:
            raise InputError(
                f"the forward changes {described(model, min(moving))}: it would keep the value "
                "that it has when it is traced"
            )
        if _text(graph, model) != _text(again, model):
            raise InputError(
                f"{type(model).__name__} computes something else when it is traced again: its "
                "forward depends on Python state, which would keep its first value; keep what "
                "changes in a buffer"
            )
    for name, constant in constants.items():
        setattr(model, name, constant)
    return graph


def _constants(model: nn.Module) -> dict[str, Any]:
    """The tensors without a name that torch.fx found in a forward."""
    return {name: value for name, value in vars(model).items() if name.startswith(CONSTANT)}


def _text(graph: fx.Graph, model: nn.Module) -> list[str]:
    """The graph's nodes by number, and its constants by value."""
    number: dict[fx.Node, str] = {node: f"node {i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        target = node.target
        if node.op == "get_attr" and str(target).startswith(CONSTANT):
            target = repr(getattr(model, str(target)).tolist())
        given = fx.node.map_arg((node.args, node.kwargs), lambda one: number.get(one, "left"))
        lines.append(f"{node.op} {target} {given}")
    return lines


class _Tracer(fx.Tracer):
    """torch.fx, stopping at leaves."""

    # A buffer or parameter that the root uses itself is a node, so that it goes where it is used.
    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.failed_in = ""
        self.modes = _modes()

    def capture(self, model: nn.Module) -> fx.Graph:
        name = type(model).__name__
        try:
            with _makers_recorded(self):
                graph = self.trace(model)
        except InputError:
            raise
        except Exception as error:  # whatever the module's own code raises on a symbolic value
            place = f" in {self.failed_in!r}" if self.failed_in else ""
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"{name} cannot be traced{place}: {type(error).__name__}: {reason}; {CURE}"
            ) from error
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not _holds_blocks(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or self.path_of_module(m)
            raise

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in _inputs(self.root)]
        return _called, [self.root, *inputs]

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:  # torch.fx would leave it out without a word
            raise InputError(
                f"{type(self.root).__name__} turns gradients or autocast on or off between its "
                f"layers, which is not captured; do that inside a module of its own, or {CURE}"
            )
        return super().create_node(kind, *args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """An assertion counts as true; every other decision over a value is refused."""
        asker = inspect.currentframe()
        for _ in range(2):  # Proxy.__bool__, and who asked it
            asker = asker.f_back if asker else None
        passing = _that_passes(asker) if asker else None
        return super().to_bool(obj) if passing is None else passing


def _called(module: nn.Module, *inputs: Any) -> Any:
    """Call ``module`` with its forward hooks, which torch.fx passes over in the root."""
    return CALL(module, *inputs)


def _inputs(module: nn.Module) -> list[str]:
    """The arguments of a module's forward that have no default, by name."""
    wanted = [
        one
        for one in inspect.signature(module.forward).parameters.values()
        if one.default is inspect.Parameter.empty
    ]
    for one in wanted:
        if one.kind is inspect.Parameter.KEYWORD_ONLY:
            raise InputError(
                f"{type(module).__name__}.forward needs {one.name!r} by keyword, inputs are passed "
                "by position; give it a default"
            )
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in wanted if one.kind in by_position]


def _holds_blocks(module: nn.Module) -> bool:
    return any(
        not type(child).__module__.startswith("torch.nn.")
        for container in module.modules()
        if isinstance(container, CONTAINERS)
        for child in container.children()
    )


def _modes() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return (torch.is_grad_enabled(), *autocast)


def _that_passes(frame: FrameType) -> bool | None:
    """The answer with which the assertion that ``frame`` stands at passes; None at no assertion."""
    instructions = list(dis.get_instructions(frame.f_code))
    rest = [one for one in instructions if one.offset >= frame.f_lasti and one.opname != "CACHE"]
    if rest[0].opname in ("TO_BOOL", "COMPARE_OP"):  # which stand before the jump since 3.13
        rest = rest[1:]
    jump, following = rest[:2]
    if "JUMP" not in jump.opname:
        return None
    target = next((one for one in instructions if one.offset == jump.argval), None)
    if _raises_assertion(following):
        return "IF_TRUE" in jump.opname
    return "IF_FALSE" in jump.opname if target and _raises_assertion(target) else None


def _raises_assertion(instruction: dis.Instruction) -> bool:
    return "ASSERTION_ERROR" in instruction.opname or "AssertionError" in instruction.argrepr


@contextmanager
def _makers_recorded(tracer: fx.Tracer) -> Iterator[None]:
    """While the body runs, tensors made from sizes become nodes instead of constants."""
    originals = {name: getattr(torch, name) for name in MAKERS}

    def recorded(maker: Callable[..., Tensor]) -> Callable[..., Any]:
        return lambda *args, **kwargs: tracer.create_proxy("call_function", maker, args, kwargs)

    try:
        for name, maker in originals.items():
            setattr(torch, name, recorded(maker))
        yield
    finally:
        for name, maker in originals.items():
            setattr(torch, name, maker)


def _replace_in_place(model: nn.Module, graph: fx.Graph) -> None:
    """Let ReLU(inplace=True) and its like make a new value, since a cut may stand before them."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    calls = [node for node in graph.nodes if node.op == "call_module" and node.all_input_nodes]
    modules = [model.get_submodule(str(node.target)) for node in calls]
    made_new = []
    for node, module in zip(calls, modules, strict=True):
        changed = node.all_input_nodes[0]
        if _is_in_place(module):
            changed.replace_all_uses_with(
                node, lambda user, after=position[node]: position[user] > after
            )
        if _is_in_place(_first(module)) and (module is _first(module) or len(changed.users) == 1):
            made_new.append(_first(module))
    for module in made_new:
        module.inplace = False


def _first(module: nn.Module) -> Any:
    """``module``, or of modules in sequence the one that is given the input."""
    while isinstance(module, nn.Sequential) and len(module):
        if type(module).forward is not nn.Sequential.forward:
            break
        module = module[0]
    return module


def _is_in_place(module: nn.Module) -> bool:
    return getattr(module, "inplace", False) is True


# Cutting


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """Which nodes each layer computes, and which values are alive before it and at the end.

    Nodes that are no values (sizes, parameters) are in no layer: each layer makes those it uses.
    """

    names: tuple[str, ...]
    nodes: tuple[tuple[fx.Node, ...], ...]
    alive: tuple[tuple[fx.Node, ...], ...]


def _cut(model: nn.Module, graph: fx.Graph) -> LayeredModel:
    remade = _remade(graph)
    results, single = _results(model, graph, remade)
    cuts = _find_cuts(model, graph, remade, results)
    modules = [
        _module(model, nodes, before, after)
        for nodes, before, after in zip(cuts.nodes, cuts.alive[:-1], cuts.alive[1:], strict=True)
    ]
    _add_unused(model, modules)
    layers = map(CapturedLayer, cuts.names, modules)
    return LayeredModel(tuple(layers), len(cuts.alive[0]), single)


def _results(
    model: nn.Module, graph: fx.Graph, remade: set[fx.Node]
) -> tuple[tuple[fx.Node, ...], bool]:
    """The values that the model returns, and whether it returns one without a tuple."""
    returned = graph.output_node().args[0]
    results = tuple(returned) if isinstance(returned, list | tuple) else (returned,)
    nodes = tuple(one for one in results if isinstance(one, fx.Node) and one not in remade)
    if len(nodes) < len(results) or not nodes or hasattr(returned, "_fields"):
        raise InputError(
            f"{type(model).__name__} returns {returned}; it may return a tensor or a tuple of them"
        )
    return nodes, isinstance(returned, fx.Node)


def _find_cuts(
    model: nn.Module, graph: fx.Graph, remade: set[fx.Node], results: tuple[fx.Node, ...]
) -> _Cuts:
    layer_of = _layer_of(graph, remade)
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
    return _Cuts(_names(model, nodes), tuple(nodes), (inputs, *alive, results))


def _remade(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that every layer makes for itself: what is no tensor, and the module's own tensors."""
    remade: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or _is_plain(node, remade):
            remade.add(node)
    return remade


def _is_plain(node: fx.Node, remade: set[fx.Node]) -> bool:
    """Whether ``node`` is known to be no tensor."""
    sources = node.all_input_nodes
    of_plain = bool(sources) and all(one in remade and one.op != "get_attr" for one in sources)
    if node.op == "call_method":
        return of_plain or node.target in PLAIN_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return of_plain or node.args[1] in PLAIN_ATTRIBUTES
    return of_plain and getattr(node.target, "__module__", "") in PLAIN_LIBRARIES


def _layer_of(graph: fx.Graph, remade: set[fx.Node]) -> dict[fx.Node, int]:
    """The layer of every value, in order; what is before the first leaf belongs to the first."""
    layer_of: dict[fx.Node, int] = {}
    leaves = 0
    for node in graph.nodes:
        if node in remade or node.op == "output":
            continue
        leaves += node.op == "call_module"
        whole = node.args[0] if _takes_entry(node) else None
        layer_of[node] = layer_of[whole] if whole in layer_of else max(0, leaves - 1)
    return layer_of


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


def _names(model: nn.Module, nodes: Sequence[Sequence[fx.Node]]) -> tuple[str, ...]:
    """Each layer's leaf; the second call of a leaf is ``leaf@2``."""
    calls: Counter[str] = Counter()
    names = []
    for own in nodes:
        leaves = [str(node.target) for node in own if node.op == "call_module"]
        name = leaves[0] if leaves else type(model).__name__
        calls[name] += 1
        names.append(name if calls[name] == 1 else f"{name}@{calls[name]}")
    return tuple(names)


def _module(
    model: nn.Module,
    nodes: Sequence[fx.Node],
    before: Sequence[fx.Node],
    after: Sequence[fx.Node],
) -> fx.GraphModule:
    """The module that computes ``nodes`` from ``before`` and returns ``after``."""
    graph = fx.Graph()
    made = {node: graph.placeholder(node.name) for node in before}

    def make(node: fx.Node) -> fx.Node:
        if node not in made:
            made[node] = graph.node_copy(node, make)
        return made[node]

    for node in nodes:
        make(node)
    graph.output(tuple(make(node) for node in after))
    module = fx.GraphModule(model, graph)
    for node in graph.find_nodes(op="get_attr"):
        _keep_out_of_state(model, module, str(node.target))
    return module


def _keep_out_of_state(model: nn.Module, module: nn.Module, name: str) -> None:
    """torch.fx registers every tensor as part of the state; undo it for those that are not."""
    path, _, field = name.rpartition(".")
    owner, copied = model.get_submodule(path), module.get_submodule(path)
    if owner is not copied and field in copied._buffers and not _in_state(owner, field):
        copied._non_persistent_buffers_set.add(field)


def _in_state(owner: nn.Module, field: str) -> bool:
    return field in owner._buffers and field not in owner._non_persistent_buffers_set


def _add_unused(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Give names of the state that no layer has to the layer with that tensor, or to the first."""
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


def _by_names(pairs: Iterable[tuple[str, Any]]) -> dict[tuple[str, ...], Any]:
    names: dict[int, dict[str, None]] = {}
    tensors: dict[int, Any] = {}
    for name, tensor in pairs:
        names.setdefault(id(tensor), {})[name] = None
        tensors[id(tensor)] = tensor
    return {tuple(names[key]): tensor for key, tensor in tensors.items()}
