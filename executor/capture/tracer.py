"""The graph of the calls that a model makes, traced with torch.fx."""

import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from stagewright.executor.capture.python_state import attributes_kept, described, snapshot
from stagewright.graphs.documents.errors import InputError

_CONSTANT = "_tensor_constant"  # what torch.fx calls a tensor without a name
CURE = "pass a list of modules, one per layer"
_CALL = nn.Module.__call__  # torch.fx replaces it while it traces
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Functions that make tensors from sizes; torch.fx sees only calls with a tensor.
_MAKERS = (
    *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "tensor", "zeros"),
)


def trace_twice(model: nn.Module) -> fx.Graph:
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
        """An assertion counts as true; every other decision over a value is refused."""
        asker = inspect.currentframe()
        for _ in range(2):  # Proxy.__bool__, and its caller
            asker = asker.f_back if asker else None
        passing = _that_passes(asker) if asker else None
        return super().to_bool(obj) if passing is None else passing


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


def _that_passes(frame: FrameType) -> bool | None:
    """The truth value with which the assertion at ``frame`` passes; None without an assertion."""
    instructions = list(dis.get_instructions(frame.f_code))
    rest = [one for one in instructions if one.offset >= frame.f_lasti and one.opname != "CACHE"]
    if rest[0].opname in ("TO_BOOL", "COMPARE_OP"):  # which come before the jump since 3.13
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
