"""A torch module as a chain of layers; run in order they are the module.

A layer takes every value that is alive before it and returns a tuple of every value alive after
it, so that the chain may be cut between any two layers: skip connections pass through the layers
that they skip. A value that is not a tensor, such as a size, does not pass; the layers that need it
compute it again.

A layer is a leaf of the module tree with the functions called after it. The module itself and every
module that holds blocks are descended into; blocks are modules other than torch's own in a
ModuleList, ModuleDict or Sequential.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from stagewright.executor.capture.cutting import cut_graph
from stagewright.executor.capture.exported.conversion import (
    CONTAINERS,
    Exported,
    holds_closed_blocks,
)
from stagewright.executor.capture.exported.exporting import Example, export
from stagewright.executor.capture.layers import CapturedLayer, LayeredModel, Listed, plans_in
from stagewright.executor.capture.places import deciding, passing, shown, unchecked
from stagewright.executor.capture.python_state import (
    attributes_kept,
    described,
    first_step,
    is_in_place,
    made_plain,
    plain_state,
    require_plain_tensors,
    snapshot,
)
from stagewright.executor.capture.shapes import require_tensors, values_of
from stagewright.graphs.documents.errors import InputError

_CONSTANT = "_tensor_constant"  # what torch.fx calls a tensor without a name
CURE = "pass a list of modules, one per layer"
_CALL = nn.Module.__call__  # torch.fx replaces it while it traces
# Functions that make tensors from sizes; torch.fx sees only calls with a tensor.
_MAKERS = (
    *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "tensor", "zeros"),
)


def trace_twice(model: nn.Module) -> tuple[fx.Graph, tuple[str, ...]]:
    """The graph of ``model``, if it does not depend on how often the model was called.

    With it the lines of checks that count as passed.
    """
    before, tracer = snapshot(model), _Tracer()
    with attributes_kept(model):
        graph = tracer.capture(model)
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
    return graph, tuple(dict.fromkeys(tracer.passed))


def _constants(model: nn.Module) -> dict[str, Any]:
    """The tensors without a name that torch.fx found in a forward."""
    return {name: value for name, value in vars(model).items() if name.startswith(_CONSTANT)}


def _text(graph: fx.Graph, model: nn.Module) -> list[str]:
    """The graph's nodes by number, and its constants by value."""
    number: dict[fx.Node, str] = {node: f"node {i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        target = node.target
        if node.op == "get_attr" and str(target).startswith(_CONSTANT):
            target = repr(getattr(model, str(target)).tolist())
        given = fx.node.map_arg((node.args, node.kwargs), lambda one: number.get(one, "left"))
        lines.append(f"{node.op} {target} {given}")
    return lines


class _Tracer(fx.Tracer):
    """A tracer of torch.fx that does not trace into leaf modules."""

    # A buffer or parameter that the root uses itself is a node, so that it goes where it is used.
    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.failed_in = ""
        self.passed: list[str] = []
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
        return not holds_blocks(m)

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
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in inputs_of(self.root)]
        return _called, [self.root, *inputs]

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:  # torch.fx would leave it out silently
            raise InputError(
                f"{type(self.root).__name__} turns gradients or autocast on or off between its "
                f"layers, which is not captured; do that inside a separate module, or {CURE}"
            )
        return super().create_node(kind, *args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A check counts as passed; every other decision over a value is refused."""
        asker = deciding(inspect.currentframe())
        passed = passing(asker) if asker else None
        if asker is None or passed is None:
            return super().to_bool(obj)
        self.passed.append(shown(asker))
        return passed


def _called(module: nn.Module, *inputs: Any) -> Any:
    """Call ``module`` with its forward hooks, which torch.fx passes over in the root."""
    return _CALL(module, *inputs)


def inputs_of(module: nn.Module) -> list[str]:
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


def holds_blocks(module: nn.Module) -> bool:
    """Whether a module consists of modules that are not torch's own."""
    return any(
        not type(child).__module__.startswith("torch.nn.")
        for container in module.modules()
        if isinstance(container, CONTAINERS)
        for child in container.children()
    )


def _modes() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return (torch.is_grad_enabled(), *autocast)


@contextmanager
def _makers_recorded(tracer: fx.Tracer) -> Iterator[None]:
    """While the body runs, tensors made from sizes become nodes instead of constants."""
    originals = {name: getattr(torch, name) for name in _MAKERS}

    def recorded(maker: Callable[..., Tensor]) -> Callable[..., Any]:
        return lambda *args, **kwargs: tracer.create_proxy("call_function", maker, args, kwargs)

    try:
        for name, maker in originals.items():
            setattr(torch, name, recorded(maker))
        yield
    finally:
        for name, maker in originals.items():
            setattr(torch, name, maker)


def replace_in_place(model: nn.Module, graph: fx.Graph) -> None:
    """Make ReLU(inplace=True) and the like return a new value, as a cut may precede them."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    calls = [node for node in graph.nodes if node.op == "call_module" and node.all_input_nodes]
    modules = [model.get_submodule(str(node.target)) for node in calls]
    made_new = []
    for node, module in zip(calls, modules, strict=True):
        changed = node.all_input_nodes[0]
        if is_in_place(module):
            changed.replace_all_uses_with(
                node, lambda user, after=position[node]: position[user] > after
            )
        if is_in_place(first_step(module)) and (
            module is first_step(module) or len(changed.users) == 1
        ):
            made_new.append(first_step(module))
    for module in made_new:
        module.inplace = False


def capture(
    model: nn.Module | Sequence[nn.Module],
    example: Example | None = None,
    like: LayeredModel | None = None,
) -> LayeredModel:
    """Split ``model``, a module or a list of modules, into layers; every module keeps its mode.

    The layers share the parameters and buffers of ``model``, which may live on any device, meta
    included. Without an ``example`` those of a module's arguments that have no default are its
    inputs. With one, a module that cannot be traced symbolically, or is called with other things
    than tensors by position, is exported for it; or the export of ``like`` is taken, the capture of
    a model that the same factory made. Raises InputError if the module cannot be traced, because
    its path of execution depends on data, or if the layers would differ from it: it keeps Python
    state, or has hooks that would not be called.
    """
    model = made_plain(model)
    if isinstance(model, list | tuple | nn.ModuleList):
        found = _capture_list(list(model))
        plans = plans_in(nn.ModuleList(model))
    elif isinstance(model, nn.Module):
        require_plain_tensors(model)
        _require_no_backward_hooks(model)
        same = None if like is None or like.of is None else like.of(model)
        found = same or (_traced(model) if example is None else _for_example(model, example))
        plans = plans_in(model)
    else:
        raise InputError(f"the model is a {type(model).__name__}, not a torch module or a list")
    return replace(_require_whole_gradients(found), plans=plans)


def _for_example(model: nn.Module, example: Example) -> LayeredModel:
    """The model traced or exported, the better way first; only a traced model takes any size."""
    if not example.signature.is_positional:
        return _exported(model, example, "its inputs are not tensors by position alone")
    if example.takes_loss:
        return _exported(model, example, "it computes its loss")
    if holds_closed_blocks(model):
        with suppress(InputError):
            return _exported(model, example, "blocks are within a module of torch's own")
        return _traced(model)
    try:
        found = _traced(model)
        values = values_of(example.tensors, len(example.tensors[0]))
        require_tensors(found.layers, values, example.device, example.dtype)
    except InputError as error:
        return _exported(model, example, f"traced by torch.fx, {error}".removesuffix(f"; {CURE}"))
    return found


def _traced(model: nn.Module) -> LayeredModel:
    graph, passed = trace_twice(model)
    replace_in_place(model, graph)
    notes = ("captured by torch.fx, for inputs of any size", *map(unchecked, passed))
    return replace(cut_graph(model, graph), notes=notes)


def _exported(model: nn.Module, example: Example, reason: str) -> LayeredModel:
    return _cut(model, example, export(model, example), reason)


def _cut(model: nn.Module, example: Example, found: Exported, reason: str) -> LayeredModel:
    """The layers of a model by its exported graph, or by that of a model like it."""
    layers = cut_graph(model, found.graph, found.attributes, found.output)
    known = plain_state(model)

    def again(shapes: Sequence[tuple[int, ...]]) -> LayeredModel:
        pairs = zip(shapes, example.tensors, strict=True)
        tensors = tuple(torch.empty(shape, dtype=one.dtype, device="meta") for shape, one in pairs)
        return _exported(model, replace(example, tensors=tensors), reason)

    def of(other: nn.Module) -> LayeredModel | None:
        return _cut(other, example, found, reason) if plain_state(other) == known else None

    return replace(
        layers,
        notes=(f"captured by torch.export: {reason}", *found.notes),
        signature=example.signature,
        guards=found.guards,
        again=again,
        of=None if found.holds_tensors else of,
    )


def _capture_list(modules: list[nn.Module]) -> LayeredModel:
    if not modules:
        raise InputError("the list of modules is empty; it needs one module per layer")
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise InputError(f"entry {number} of the list of modules is a {kind}, not a module")
        require_plain_tensors(module, f"{number}.")
        if is_in_place(first_step(module)):  # there may be a cut before it
            first_step(module).inplace = False
    layers = [CapturedLayer(str(i), Listed(i, module)) for i, module in enumerate(modules)]
    inputs = inputs_of(modules[0])
    return LayeredModel(tuple(layers), max(1, len(inputs)), output=None)


def _require_no_backward_hooks(model: nn.Module) -> None:
    """Refuse backward hooks of modules that are cut into layers."""
    for name, module in model.named_modules():
        if (module is model or holds_blocks(module)) and (
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
