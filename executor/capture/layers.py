"""A model as a chain of layers, with the model's names of modules.

A model's own plan of dividing layers among the devices of a tensor group is an attribute
``tp_plan``, the name that transformers uses. A model of transformers has the plan of its
architecture, with those of the models within; where the library has none, there may be one here.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from stagewright.executor.capture.signature import Signature
from stagewright.graphs.documents.errors import InputError

# By the class of a block. Its query, key and value are side by side in one layer.
PLANS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "transformers.models.gpt2.modeling_gpt2.GPT2Block": {
            "attn.c_attn": "colwise/3",
            "attn.split_size": "divide",
            "attn.c_proj": "rowwise",
            "mlp.c_fc": "colwise",
            "mlp.c_proj": "rowwise",
        }
    }
)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The plan of a module called ``path`` in the model, of class ``kind``; not yet looked at.

    ``is_of_architecture``: it is a model of transformers', whose plan may name what this one
    has not.
    """

    path: str
    kind: str
    rules: Any
    is_of_architecture: bool

    def __str__(self) -> str:
        return f"tp_plan of {self.kind}" + (f" {self.path!r}" if self.path else "")

    def inner(self, name: str) -> str | None:
        """The name within the module of the model's parameter ``name``; None outside the module."""
        if not self.path:
            return name
        if name == self.path:
            return ""
        return name.removeprefix(f"{self.path}.") if name.startswith(f"{self.path}.") else None


def plans_in(model: nn.Module) -> tuple[TensorPlan, ...]:
    """The plans of ``model`` and of the modules in it, outer ones first."""
    found: list[TensorPlan] = []
    for path, module in model.named_modules():
        is_of_architecture = "_tp_plan" in vars(module)
        if is_of_architecture and _is_within(path, found):
            continue  # the outer model's plan has its rules, or is the user's in its place
        rules = _rules_of(module, is_of_architecture)
        if rules is not None:
            found.append(TensorPlan(path, type(module).__name__, rules, is_of_architecture))
    return tuple(found)


def _rules_of(module: nn.Module, is_of_architecture: bool) -> Any:
    rules = getattr(module, "tp_plan", None)
    if is_of_architecture and not rules:
        return None
    return PLANS.get(class_of(module)) if rules is None else rules


def _is_within(path: str, found: list[TensorPlan]) -> bool:
    """Whether a module is in a model of transformers that has a plan."""
    return any(one.is_of_architecture and one.inner(path) is not None for one in found)


def class_of(module: nn.Module) -> str:
    """The class of a module, with where it is defined."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


_SEVERAL_SAMPLES = re.compile(r"L\['tensors'\]\[\d+\]\.size\(\)\[0\] != 1")
_FIXED_SAMPLES = re.compile(r"L\['tensors'\]\[\d+\]\.size\(\)\[0\] == \d+")
BETWEEN = "_between_"  # begins the names, within a layer, of what the model has not under a name


@dataclass(frozen=True, slots=True, eq=False)
class CapturedLayer:
    """One layer: ``module`` takes and returns tuples of tensors, under the model's own names."""

    name: str
    module: nn.Module


@dataclass(frozen=True, slots=True, eq=False)
class LayeredModel:
    """The layers in order. The first takes ``input_count`` tensors.

    ``output`` makes the model's result of the last layer's tensors; it is None for a list of
    modules, whose last one shows its result when it is called. ``signature`` is how the model
    is called, None if with tensors by position. ``guards`` are conditions on the sizes of its
    inputs, in Python, under which the layers are the model; see `require_sizes`. ``again`` captures
    it for inputs of other shapes; ``of`` gives the layers of another model that is captured alike,
    None where that is not known. ``plans`` say how a group of devices divides it. ``evaluation``
    is the model as it is in evaluation, with the same blocks and tensors, if that was asked for.
    ``notes`` say in lines how the model was captured, and what the layers leave out.
    """

    layers: tuple[CapturedLayer, ...]
    input_count: int
    output: Callable[[tuple[Tensor, ...]], Any] | None
    signature: Signature | None = None
    guards: tuple[str, ...] = ()
    again: "Callable[[Sequence[tuple[int, ...]]], LayeredModel] | None" = None
    of: "Callable[[nn.Module], LayeredModel | None] | None" = None
    plans: tuple[TensorPlan, ...] = ()
    evaluation: "LayeredModel | None" = None
    notes: tuple[str, ...] = ()

    def result(self, values: tuple[Tensor, ...]) -> Any:
        """The model's result, which the loss is given, made of the last layer's tensors."""
        last = self.layers[-1].module
        if isinstance(last, Listed):
            return values[0] if last.result.is_one else values
        assert self.output is not None
        return self.output(values)

    def require_called(self, given: Signature) -> None:
        """Refuse inputs that are given otherwise than the model was captured for."""
        if self.signature is not None:
            self.signature.require_same(given)
        elif not given.is_positional:
            raise InputError(
                "the model was captured for tensors by position; give an example of its inputs "
                "to capture it for others"
            )

    def require_divisible(self) -> None:
        """Refuse to divide the samples of a microbatch where the model fixes their number.

        It then computes with it, as a loss that compares samples.
        """
        for guard in self.guards:
            if _FIXED_SAMPLES.fullmatch(guard):
                raise InputError(
                    f"the model computes with the number of its samples ({self._shown(guard)}), as "
                    "a loss that compares them, so that replicas cannot divide a microbatch; plan "
                    "replicas that take whole ones (round-robin)"
                )

    def sized(self, inputs: Sequence[tuple[int, ...]]) -> "LayeredModel":
        """The layers for inputs of these shapes, with the same tensors and blocks.

        Raises InputError if they hold for other sizes only, and cannot be captured for these.
        """
        if self._unmet(inputs) is None:
            return self
        if self.again is None:
            self.require_sizes(inputs)
            return self
        return self.computing(self.again(inputs), f"for inputs of {', '.join(map(str, inputs))}")

    def computing(self, other: "LayeredModel", when: str) -> "LayeredModel":
        """These blocks with the operators between blocks from another capture of the same model.

        Raises InputError if it has other layers; ``when`` says of what it is a capture.
        """
        self.require_same_layers(other, when)
        layers = tuple(
            CapturedLayer(own.name, _moved(own.module, found.module))
            for own, found in zip(self.layers, other.layers, strict=True)
        )
        return replace(self, layers=layers, output=other.output, guards=other.guards)

    def require_same_layers(self, other: "LayeredModel", when: str) -> None:
        """Refuse another capture of the model that has other layers."""
        for i, (own, found) in enumerate(zip_longest(self.layers, other.layers)):
            known, now = (None if one is None else _outside(one) for one in (own, found))
            if known != now or _lacks(own.module, found.module):
                raise InputError(
                    f"{when} the model has other layers than those that it was captured with: "
                    f"layer {i} is {_told(now)}, not {_told(known)}"
                    if known != now
                    else f"{when} layer {own.name!r} reads what it otherwise does not"
                )

    def require_sizes(self, inputs: Sequence[tuple[int, ...]]) -> None:
        """Refuse inputs of shapes for which the layers were not captured."""
        guard = self._unmet(inputs)
        if guard is None:
            return
        remedy = "give mini-batches of one shape, and replicas whole microbatches (round-robin)"
        if _SEVERAL_SAMPLES.fullmatch(guard):
            remedy = "give every replica at least two samples of a microbatch"
        raise InputError(
            f"inputs of shapes {', '.join(map(str, inputs))} differ from those for which the model "
            f"was captured: {self._shown(guard)} does not hold; {remedy}"
        )

    def _unmet(self, inputs: Sequence[tuple[int, ...]]) -> str | None:
        """The first condition that shapes do not fulfil."""
        sizes = {"tensors": [_Sized(shape) for shape in inputs]}
        # Written by torch.export, of sizes alone, with functions of these modules.
        known = {"L": sizes, "math": math, "torch": torch}
        return next((guard for guard in self.guards if not eval(guard, dict(known))), None)

    def _shown(self, guard: str) -> str:
        names = self.signature.names if self.signature else ()
        for i, name in enumerate(names):
            guard = guard.replace(f"L['tensors'][{i}]", name)
        return guard.replace(".size()", ".shape")

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


def _outside(layer: CapturedLayer) -> tuple[str, int | None]:
    """A layer's name and the number of its inputs, which is None for a module of a list."""
    module = layer.module
    if not isinstance(module, fx.GraphModule):
        return layer.name, None
    return layer.name, len(module.graph.find_nodes(op="placeholder"))


def _told(outside: tuple[str, int | None] | None) -> str:
    if outside is None:
        return "missing"
    name, inputs = outside
    return repr(name) if inputs is None else f"{name!r} of {inputs} values"


def _read(module: nn.Module) -> set[str]:
    """The names of modules and tensors that a layer reads."""
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    return {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}


def _lacks(own: nn.Module, other: nn.Module) -> bool:
    """Whether a layer lacks an attribute that another capture of the layer reads."""
    names = (name for name in _read(other) if not name.startswith(BETWEEN))
    try:
        for name in names:
            attrgetter(name)(own)
    except AttributeError:
        return True
    return False


def _moved(own: nn.Module, other: nn.Module) -> nn.Module:
    """The operators of ``other`` between the blocks and with the tensors of ``own``."""
    if not isinstance(other, fx.GraphModule):  # a module of a list is itself
        return own
    names = _read(other)
    root = {name: attrgetter(name)(other if name.startswith(BETWEEN) else own) for name in names}
    moved = fx.GraphModule(root, other.graph)
    moved.training = own.training
    return moved


@dataclass(frozen=True, slots=True)
class _Sized:
    """Stand-in for a tensor with a size alone, which is all that guards read."""

    shape: tuple[int, ...]

    def size(self) -> tuple[int, ...]:
        return self.shape


@dataclass(slots=True)
class _Result:
    """Whether a module's last result was a tensor, and not a tuple of them."""

    is_one: bool = True


class Listed(nn.Module):
    """One module of a list, under its number."""

    def __init__(self, number: int, module: nn.Module) -> None:
        super().__init__()
        self.number = str(number)
        self.result = _Result()
        self.add_module(self.number, module)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The module's result as a tuple."""
        result = getattr(self, self.number)(*values)
        self.result.is_one = isinstance(result, Tensor)
        results = (result,) if self.result.is_one else result
        if type(results) not in (list, tuple) or not all(isinstance(r, Tensor) for r in results):
            raise InputError(
                f"layer {self.number!r} returns a {kind_of(result)}; it may return a tensor or a "
                "tuple of them"
            )
        return tuple(results)


def kind_of(result: Any) -> str:
    """The kind of a module's result, in words."""
    if type(result) not in (list, tuple):
        return type(result).__name__
    kinds = ", ".join(type(one).__name__ for one in result)
    return f"{type(result).__name__} of {kinds or 'nothing'}"


def _by_names(pairs: Iterable[tuple[str, Any]]) -> dict[tuple[str, ...], Any]:
    names: dict[int, dict[str, None]] = {}
    tensors: dict[int, Any] = {}
    for name, tensor in pairs:
        names.setdefault(id(tensor), {})[name] = None
        tensors[id(tensor)] = tensor
    return {tuple(names[key]): tensor for key, tensor in tensors.items()}
