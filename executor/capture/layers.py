"""A model as a chain of layers, under its own names."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stagewright.graphs.documents.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class CapturedLayer:
    """One layer: ``module`` takes and returns tuples of tensors, under the model's own names."""

    name: str
    module: nn.Module


@dataclass(frozen=True, slots=True, eq=False)
class LayeredModel:
    """The layers in order. The first takes ``input_count`` tensors; the last one's are the output.

    ``returns_one``: the model returns a tensor itself, where the last layer returns a tuple of
    one. It is None for a list of modules, for which it is known after the last one was called.
    """

    layers: tuple[CapturedLayer, ...]
    input_count: int
    returns_one: bool | None

    @property
    def single_output(self) -> bool:
        """Whether the loss is given a tensor, and not a tuple of them."""
        last = self.layers[-1].module
        return last.result.is_one if isinstance(last, Listed) else bool(self.returns_one)

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
        result = self.get_submodule(self.number)(*values)
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
