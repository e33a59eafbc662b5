"""Layers that torch compiles train as they are."""

from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training_plans as make  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan  # noqa: E402


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
