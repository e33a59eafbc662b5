"""Optimizer steps as aten operators, which compute what ``torch.optim`` computes.

The bias corrections of Adam depend on the number of the step. It is a tensor here, so that one
graph serves all steps. In double precision these scalars differ from the Python floats of
torch.optim by the last bit at most, in one of a hundred steps (``pow``); rounded to single
precision they are the same. Everything else is the same to the bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stagewright.graphs.documents.errors import InputError

Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """The step of one optimizer.

    ``slots`` are the names of the tensors that it keeps per parameter, zero at first. ``scalars``
    of (step, group) advances the step and returns what all parameters use; ``update`` of (group,
    parameter, gradient, slots, scalars) changes the parameter and its slots in place. ``refused``
    are options that must be off.
    """

    slots: Callable[[Group], tuple[str, ...]]
    scalars: Callable[[Group, Tensor], list[Tensor]] | None
    update: Callable[[Group, Tensor, Tensor, list[Tensor], list[Tensor]], None]
    refused: tuple[str, ...]


def _sgd(
    group: Group, parameter: Tensor, gradient: Tensor, slots: list[Tensor], _: list[Tensor]
) -> None:
    if group["weight_decay"] != 0:
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
    if slots:  # zero at first: the first step's buffer is the gradient
        buffer = slots[0].mul_(group["momentum"]).add_(gradient)
        nesterov = group["nesterov"]
        gradient = gradient.add(buffer, alpha=group["momentum"]) if nesterov else buffer
    parameter.add_(gradient, alpha=-group["lr"])


def _adam_scalars(group: Group, step: Tensor) -> list[Tensor]:
    first, second = group["betas"]
    step = step.add_(1)
    negative_size = torch.full_like(step, -group["lr"]) / (1 - first**step)
    return [negative_size, (1 - second**step).sqrt()]


def _adam(
    group: Group,
    parameter: Tensor,
    gradient: Tensor,
    slots: list[Tensor],
    scalars: list[Tensor],
) -> None:
    (average, square), (negative_size, root) = slots, scalars
    first, second = group["betas"]
    decay = group["weight_decay"]
    if decay != 0 and group["decoupled_weight_decay"]:
        parameter = parameter.mul_(1 - group["lr"] * decay)
    elif decay != 0:
        gradient = gradient.add(parameter, alpha=decay)
    average = average.lerp_(gradient, 1 - first)
    square = square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    denominator = square.sqrt() / root + group["eps"]
    parameter.add_(average * negative_size / denominator)


SGD = Rule(
    lambda group: ("momentum_buffer",) if group["momentum"] else (),
    None,
    _sgd,
    ("dampening", "maximize", "differentiable", "fused"),
)
ADAM = Rule(
    lambda _: ("exp_avg", "exp_avg_sq"),
    _adam_scalars,
    _adam,
    ("amsgrad", "maximize", "differentiable", "fused", "capturable"),
)
RULES = {torch.optim.SGD: SGD, torch.optim.Adam: ADAM, torch.optim.AdamW: ADAM}


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of an optimizer.

    Raises
    ------
    InputError
        If it is not one of ``RULES``, or has an option that changes the step.
    """
    kind = type(optimizer)
    if kind not in RULES:
        known = ", ".join(one.__name__ for one in RULES)
        raise InputError(f"the optimizer {kind.__name__} is not captured; there are {known}")
    rule = RULES[kind]
    for group in optimizer.param_groups:
        for option in rule.refused:
            if group.get(option):
                raise InputError(
                    f"{kind.__name__} with {option}={group[option]!r} is not captured; leave it out"
                )
        if isinstance(group["lr"], Tensor):
            raise InputError(f"{kind.__name__} with a tensor as lr is not captured; give a number")
    return rule
