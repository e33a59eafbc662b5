"""A model's own plan (``tp_plan``) of dividing layers among the devices of a tensor group.

A module says it by an attribute ``tp_plan``, the name that transformers uses. A model of
transformers has the plan of its architecture, with those of the models within; where the library
has none for an architecture, there may be one here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

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
