"""Modules that an export does not trace into: each call of a module is one operator."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from stagewright.executor.capture.layers import BETWEEN
from stagewright.executor.capture.shapes import Sizes, elsewhere, in_example, valued, valued_all
from stagewright.executor.capture.signature import PLAIN, TENSOR, ValueStructure, taken_apart
from stagewright.graphs.documents.errors import InputError

FUNCTIONS = ("ctc_loss",)  # of torch.nn.functional, whose operators have no rule for shapes
SYMBOLS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_RUNNING: dict[int, "WholeCall"] = {}  # the calls of exports that are under way

_LIBRARY = torch.library.Library("stagewright", "DEF")
_LIBRARY.define("call(int number, Tensor[] tensors, SymInt[] sizes, Tensor[] trained) -> Tensor[]")


def _run(
    number: int, tensors: list[Tensor], sizes: list[Any], trained: list[Tensor]
) -> list[Tensor]:
    return _RUNNING[number].run(tensors, sizes)


def _no_backward(context: Any, *gradients: Tensor) -> None:
    raise InputError("the forward computes gradients of its own layers, which is not captured")


torch.library.register_fake("stagewright::call", _run)
# Its results need a gradient where an argument or a parameter does, as in a real step.
torch.library.register_autograd("stagewright::call", _no_backward)
OPERATOR = torch.ops.stagewright.call.default


@dataclass(slots=True, eq=False)
class WholeCall:
    """One call of a module.

    ``leaves`` and ``spec`` are its arguments, taken apart; ``returned`` is the structure of what it
    returns. ``has_hooks_within``: modules within have hooks, which may hand on tensors beside its
    results.
    """

    number: int
    name: str
    module: nn.Module
    leaves: list[Any]
    spec: pytree.TreeSpec
    forward: Callable[[Mapping[str, Tensor], tuple[Any, ...], dict[str, Any]], Any]
    fakes: Mapping[str, Tensor]
    returned: ValueStructure | None = None
    has_hooks_within: bool = False

    def arguments(self, tensors: Any, sizes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its arguments with ``tensors`` and ``sizes`` in their places."""
        given, varying = iter(tensors), iter(sizes)
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(
            [
                next(given)
                if isinstance(one, Tensor)
                else next(varying)
                if isinstance(one, torch.SymInt)
                else one
                for one in self.leaves
            ],
            self.spec,
        )
        return found

    def run(self, tensors: list[Tensor], sizes: list[Any]) -> list[Tensor]:
        """Call the module on tensors without data; its tensors, which share no memory."""
        try:
            result = self._forward(tensors, sizes)
        except Exception:  # of the module's code, of any kind
            result = self._by_values(tensors, sizes)
        returned, self.returned = taken_apart(result)
        for one in self.returned.leaves:
            if one is not TENSOR and not isinstance(one, (*PLAIN, *SYMBOLS)):
                raise InputError(
                    f"{self.name!r} returns a {type(one).__name__}; it may return tensors, plain "
                    "values, and tuples, lists and dicts of them"
                )
        self.has_hooks_within = any(
            inner._forward_hooks for inner in self.module.modules() if inner is not self.module
        )
        return [one.clone() for one in returned]

    def _forward(self, tensors: list[Tensor], sizes: list[Any]) -> Any:
        arguments, keywords = self.arguments(tensors, sizes)
        mode = detect_fake_mode(tensors)
        environment = None if mode is None else mode.shape_env
        if environment is None:
            return self.forward(self.fakes, arguments, keywords)
        with environment.ignore_fresh_unbacked_symbols():
            return self.forward(self.fakes, arguments, keywords)

    def _by_values(self, tensors: list[Tensor], sizes: list[Any]) -> Any:
        """The result of a call with values; the sizes of the arguments return in it."""
        varying = [*sizes, *(size for tensor in tensors for size in tensor.shape)]
        here, spec = pytree.tree_flatten(self._valued(tensors, sizes, in_example))
        other = elsewhere(varying)
        try:
            there = pytree.tree_leaves(self._valued(tensors, sizes, other))
        except Exception:  # of the module's code: it takes these sizes alone
            there, other = here, in_example
        if any(isinstance(one, int | float) for one in here):
            raise InputError(
                f"{self.name!r} returns a number and needs the values of its inputs, on which the "
                "number may depend; return it as a tensor"
            )
        known = {(in_example(one), other(one)): one for one in reversed(varying)}
        leaves = [
            _outline(one, another, known) if isinstance(one, Tensor) else one
            for one, another in zip(here, there, strict=True)
        ]
        return pytree.tree_unflatten(leaves, spec)

    def _valued(self, tensors: list[Tensor], sizes: list[Any], sized: Sizes) -> Any:
        with unset_fake_temporarily(), torch.no_grad():
            given = [valued(one, sized) for one in tensors]
            arguments, keywords = self.arguments(given, map(sized, sizes))
            return self.forward(valued_all(self.fakes), arguments, keywords)


def _outline(one: Tensor, another: Tensor, known: Mapping[tuple[int, int], Any]) -> Tensor:
    """A tensor without data for one of two runs: its sizes are ``known`` symbols, or fixed."""
    pairs = zip(one.shape, another.shape, strict=True)
    shape = [known.get(pair, pair[0]) for pair in pairs]
    return torch.empty(shape, dtype=one.dtype, device=one.device)


class Called(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        return self.function(*args, **kwargs)


def _function(called: Called) -> Callable[..., Any]:
    @functools.wraps(called.function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    return call


@contextmanager
def called_whole(
    modules: Mapping[str, nn.Module], fakes: Mapping[int, Tensor]
) -> Iterator[list[WholeCall]]:
    """While the body runs, calls of ``modules`` are operators; yields the calls, as they come.

    So are calls of `FUNCTIONS`.

    ``fakes`` are tensors without data for those of the modules, by the ids of the modules' own.
    """
    calls: list[WholeCall] = []
    kinds = {id(module): type(module) for module in modules.values()}
    first = max(_RUNNING, default=-1) + 1
    try:
        for name, module in modules.items():
            module.__class__ = _whole(name, module, _fakes_of(module, fakes), calls, first)
        with ExitStack() as stack:
            for name in FUNCTIONS:
                called = Called(getattr(F, name))
                called.__class__ = _whole(BETWEEN + name, called, {}, calls, first)
                stack.enter_context(patch.object(F, name, _function(called)))
            yield calls
    finally:
        for module in modules.values():
            module.__class__ = kinds[id(module)]
        for call in calls:
            _RUNNING.pop(call.number, None)


def _fakes_of(module: nn.Module, fakes: Mapping[int, Tensor]) -> dict[str, Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {name: fakes[id(one)] for name, one in [*parameters, *buffers]}


def _whole(
    name: str, module: nn.Module, fakes: dict[str, Tensor], calls: list[WholeCall], first: int
) -> type:
    """A class for ``module`` whose call is one operator."""
    kind, known = type(module), set(module._forward_hooks)

    def forward(state: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole, module.__class__ = module.__class__, kind
        hooks = module._forward_hooks
        module._forward_hooks = _without(hooks, _handing_on(module, known))
        try:
            with _unseen():
                return functional_call(module, dict(state), args, kwargs, tie_weights=False)
        finally:
            module.__class__, module._forward_hooks = whole, hooks

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [one if isinstance(one, torch.SymInt) else fixed(one) for one in leaves]
        _require_known(name, leaves)
        made = WholeCall(first + len(calls), name, module, leaves, spec, forward, fakes)
        _RUNNING[made.number] = made
        calls.append(made)
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        sizes = [one for one in leaves if isinstance(one, torch.SymInt)]
        trained = [one for one in self.parameters() if one.requires_grad][:1]
        returned = OPERATOR(made.number, tensors, sizes, trained)
        assert made.returned is not None
        given = [*sizes, *(size for tensor in tensors for size in tensor.shape)]
        result = pytree.tree_map(lambda one: fixed(one, given), made.returned.holding(returned))
        for key in _handing_on(self, known):
            changed = self._forward_hooks[key](self, args, result)
            result = result if changed is None else changed
        return result

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def fixed(one: Any, known: Sequence[Any] = ()) -> Any:
    """``one``, of which a size or a condition on sizes is that of the example from now on.

    A size in ``known``, which the graph has, stays as it is.
    """
    plain = SYMBOLS.get(type(one))
    if plain is None:
        return one
    varying = [size for size in known if isinstance(size, torch.SymInt)]
    equal = [size for size in varying if size.node.expr == one.node.expr]
    return equal[0] if equal else plain(one)


@contextmanager
def _unseen() -> Iterator[None]:
    """Keep the export from tracking calls of inner modules, which breaks if a call fails."""
    followed = nn.Module.__call__
    nn.Module.__call__ = fx._symbolic_trace._orig_module_call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = followed  # type: ignore[method-assign]


def _require_known(name: str, leaves: list[Any]) -> None:
    for one in leaves:
        if not isinstance(one, (Tensor, torch.SymInt, *PLAIN)):
            raise InputError(
                f"{name!r} is given a {type(one).__name__}, which cannot pass from stage to stage; "
                "it may be given tensors, plain values, and tuples, lists and dicts of them"
            )


# Hooks by which a module's result is handed on beside its own: those that the model sets while it
# runs, and those of transformers (the logits of routers), which stay. They run on the operator's
# results, and so become part of the graph.


def _handing_on(module: nn.Module, known: Collection[int]) -> list[int]:
    return [
        key
        for key, hook in module._forward_hooks.items()
        if key not in known or getattr(hook, "__module__", "").startswith("transformers.")
    ]


def _without(hooks: Any, keys: Collection[int]) -> Any:
    kept = type(hooks)()
    kept.update({key: hook for key, hook in hooks.items() if key not in keys})
    return kept
