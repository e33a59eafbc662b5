"""Tensors in the place of others: what Python knows of a parameter goes with it."""

import copy
from typing import Any

import torch
from torch import Tensor, nn


def twin(tensor: Tensor, values: Tensor) -> Tensor:
    """A tensor of ``values`` with the class, the attributes and the hooks of ``tensor``."""
    made = values
    if isinstance(tensor, nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), values, tensor.requires_grad)
    vars(made).update(vars(tensor))
    if tensor.requires_grad:
        for hook in (tensor._backward_hooks or {}).values():
            made.register_hook(hook)
    return made


def twins(modules: list[nn.Module]) -> list[nn.Module]:
    """A deep copy of ``modules``, which torch would make without attributes and hooks."""
    whole = nn.ModuleList(modules)
    memo = {
        id(one): twin(one, one.detach().clone()) for one in [*whole.parameters(), *whole.buffers()]
    }
    return copy.deepcopy(modules, dict[int, Any](memo))
