"""Captured steps next to the plain training loop."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stagewright.executor.capture.steps.joint import identifier
from stagewright.executor.capture.steps.step import CapturedStep, capture_step
from stagewright.executor.training.losses import read_loss

STEPS = 3


def plain_loop(
    model: nn.Module, batch: tuple[Any, Any], loss: Any, optimizer: Any
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Losses and gradients of the steps of ``model``, which is trained."""
    stepping = optimizer(model.parameters())
    inputs = batch[0] if isinstance(batch[0], tuple) else batch[:1]
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        stepping.zero_grad()
        total, count = read_loss(loss(model(*inputs), batch[1]))
        value = total if count is None else total / count
        value.backward()
        gradients = {
            name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
        }
        found.append((value.detach(), gradients))
        stepping.step()
    return found


def assert_equal_to_loop(
    model: nn.Module,
    batch: tuple[Any, Any],
    loss: Any = F.cross_entropy,
    optimizer: Any = torch.optim.AdamW,
    same: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> CapturedStep:
    """Losses, gradients, parameters and buffers of several steps are those of the plain loop."""
    step = capture_step(model, batch, loss=loss, optimizer=optimizer)
    states = {name: one.clone() for name, one in step.states.items()}
    twin = copy.deepcopy(model)
    for number, (value, gradients) in enumerate(plain_loop(twin, batch, loss, optimizer)):
        torch.manual_seed(number)
        found, by_name = step.run(states, batch)
        assert same(found, value)
        assert by_name.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert same(by_name[name], gradient), name
    for name, one in [*twin.named_parameters(), *twin.named_buffers()]:
        assert same(states[identifier(name)], one), name
    return step
