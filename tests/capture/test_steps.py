"""A captured step computes what the plain loop computes, and says what it cannot capture."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import EXAMPLES, ResidualMLP, TiedTransformer, vectors
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stagewright.executor.capture.steps.joint import identifier
from stagewright.executor.capture.steps.step import CapturedStep, capture_step

STEPS = 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.02),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95)),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def plain_loop(
    model: nn.Module, batch: tuple[Any, Any], loss: Any, optimizer: Any
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Losses and gradients of three steps of ``model``, which is trained."""
    stepping = optimizer(model.parameters())
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        stepping.zero_grad()
        value = loss(model(batch[0]), batch[1])
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
    optimizer: Any = OPTIMIZERS["adamw"],
    same: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> CapturedStep:
    """Losses, gradients, parameters and buffers of three steps are those of the plain loop."""
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_of_an_optimizer_are_those_of_torch(optimizer: Any, dtype: torch.dtype) -> None:
    model = ResidualMLP().to(dtype)
    inputs = vectors(7)[0].to(dtype)
    assert_equal_to_loop(model, (inputs, torch.arange(7) % 4), optimizer=optimizer)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_steps_of_an_example_are_those_of_the_loop(example: Any) -> None:
    assert_equal_to_loop(example.build(), example.batch(4, 1))


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(weight=torch.rand(11))])
def test_dropout_draws_what_the_loop_draws(loss: Any) -> None:
    tokens = torch.arange(15).view(3, 5) % 11
    assert_equal_to_loop(TiedTransformer(2, dropout=0.5), (tokens, tokens), loss)
