"""Gradients end with the update, except where they are needed again; compiled layers train."""

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import training_plans as make
from models import EXAMPLES, Example
from ranks import Ranks
from torch import Tensor, nn

from stagewright.executor.capture.tracing import capture
from stagewright.executor.training.runtime import Executor
from stagewright.executor.training.stages.learning_rates import FlatGradients, ReleasedGradients
from stagewright.executor.training.stages.weights import Weights
from stagewright.formulations.plans.plan import PipelinePlan


class Watching(torch.optim.SGD):
    """Remembers the gradients of its last step, and keeps none alive."""

    seen: list["weakref.ref[Tensor]"]

    def step(self, closure: Any = None) -> Any:
        every = [one for group in self.param_groups for one in group["params"]]
        self.seen = [weakref.ref(one.grad) for one in every if one.grad is not None]
        assert self.seen
        return super().step(closure)


def held(_: Any, rank: int, plan: Any, model: Any, batch: Any) -> tuple[int, int]:
    """Gradients that exist after a step, and that the optimizers' steps have seen."""
    executor = Executor(plan, model, optimizer=partial(Watching, lr=0.1), dtype=torch.float64)
    for _ in range(2):
        executor.step(*batch)
    seen = [one for optimizer in executor.optimizers for one in optimizer.seen]  # type: ignore
    return sum(one() is not None for one in seen), len(seen)


@pytest.mark.parametrize("name", ["residual-mlp", "tied-transformer"])
def test_no_gradient_is_held_after_a_step(ranks: Ranks, name: str) -> None:
    example: Example = EXAMPLES[name]
    layers = len(capture(example.build()).layers)
    plan = make.one_f_one_b(make.straight([2, layers - 2]), 3, "flush")
    batch = tuple(x.double() if x.is_floating_point() else x for x in example.batch(6, 0))
    for alive, seen in ranks.run(held, 2, plan, example.build().double(), batch):
        assert seen > 0
        assert alive == 0


def test_gradients_of_two_versions_are_kept(ranks: Ranks) -> None:
    example = EXAMPLES["residual-mlp"]
    layers = len(capture(example.build()).layers)
    plan = make.one_f_one_b(make.straight([2, layers - 2]), 3, "double-buffer")
    batch = tuple(x.double() if x.is_floating_point() else x for x in example.batch(6, 0))
    for alive, seen in ranks.run(held, 2, plan, example.build().double(), batch):
        assert alive == seen > 0


def test_a_parameter_without_a_gradient_gets_zeros_where_the_optimizer_steps() -> None:
    """Weight decay acts on it, as with gradients that are kept."""
    results = []
    for released in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        names = {name: name for name, _ in layer.named_parameters()}
        decaying = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
        weights = Weights([layer], names, (), decaying, 1, released=released)
        before = layer.bias.detach().clone()
        layer.weight.sum().backward()
        weights.update(0.5)
        assert not torch.equal(layer.bias, before)
        results.append([one.detach().clone() for one in layer.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [FlatGradients, ReleasedGradients])
def test_what_is_left_out_has_no_gradient_and_tied_ones_are_no_parts(kind: Any) -> None:
    parameters = [nn.Parameter(torch.ones(size)) for size in (2, 3, 4)]
    gradients = kind(parameters, {1})
    gradients.leave_out({0})
    gradients.leave_out(set())
    gradients.receive(parameters)
    sum(one.sum() for one in parameters).backward()  # type: ignore[union-attr]
    gradients.scale(2.0)
    gradients.hand_over(parameters)
    assert [None if one is None else one.tolist() for one in gradients.views] == [
        None,
        [2.0] * 3,
        [2.0] * 4,
    ]
    assert parameters[0].grad is None
    assert sum(one.numel() for one in gradients.parts if one is not None) in (4, 6)
    gradients.clear()
    gradients.receive(parameters)
    assert all(one.grad is None or not one.grad.any() for one in parameters)


class Dropping(nn.Module):
    """A linear layer with a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.inner(x)), 0.25, self.training)


def squared(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def trained(plan: PipelinePlan, *, compiled: bool) -> tuple[dict[str, Tensor], list[float | None]]:
    executor = Executor(
        plan,
        lambda: nn.Sequential(Dropping(), Dropping(), nn.Linear(6, 2)),
        squared,
        partial(torch.optim.SGD, lr=0.1),
        dtype=torch.float64,
        compile=compiled,
    )
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, width, generator=generator) for width in (6, 2))
    losses = [executor.step(x.double(), y.double()) for _ in range(3)]
    state = executor.parameters_on_first_rank()
    assert state is not None
    return state, losses


@pytest.mark.slow  # torch writes and compiles C++ for each layer
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_compiled_layers_draw_and_train_as_they_are(recompute: str) -> None:
    plan = make.one_f_one_b(make.straight([3]), 2)
    stages = tuple(replace(stage, recompute=recompute) for stage in plan.stages)
    plan = replace(plan, stages=stages)
    (expected, losses), (found, same) = (trained(plan, compiled=one) for one in (False, True))
    assert same == pytest.approx(losses, rel=1e-12)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=1e-12)
