"""Plans between two losses with I and W: what cannot be split is refused by its module's name."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training  # noqa: E402
import training_plans as make  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from stagewright.executor.capture.split_layer import CannotSplit  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.actions import parse_action  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402

WIDTH = 4
SGD = partial(torch.optim.SGD, lr=0.1)


class Joint(torch.autograd.Function):
    """A product whose two gradients are computed together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Noisy(torch.autograd.Function):
    """Its backward draws random numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient + 0 * torch.rand_like(gradient)


class Attention(nn.Module):
    """A part of a layer that computes ``function(self, x)``."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Block(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.attn, self.norm = Attention(function), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.attn(x))


def model(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(function))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks).double()


def plan(*words: str) -> PipelinePlan:
    order = [parse_action(word) for word in words]
    return make.plan_in_order([Stage((0, 3), ("a",))], 1, {"a": order}, begins="backward")


SPLIT, WHOLE = plan("0I0", "0W0", "0F0"), plan("0B0", "0F0")


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [
        (torch.rand(4, WIDTH, dtype=torch.float64), torch.randint(WIDTH, (4,))) for _ in range(3)
    ]


def train(how: PipelinePlan, one: nn.Module) -> dict[str, Tensor]:
    executor = Executor(how, one, nn.functional.cross_entropy, SGD, dtype=torch.float64)
    for batch in batches():
        executor.step(*batch)
    executor.finish()
    found = executor.parameters_on_first_rank()
    assert found is not None
    return found


def hooked(module: nn.Module) -> nn.Module:
    module.register_full_backward_hook(lambda *_: None)
    return module


def checks_itself(module: Any, x: Tensor) -> Tensor:
    if torch.fx.experimental.proxy_tensor.get_proxy_mode() is not None:
        raise RuntimeError("cannot be traced")
    return x @ module.weight


REFUSED = {
    "random numbers": (lambda m, x: Noisy.apply(x @ m.weight), "1.1", "draws random numbers"),
    "a hook": (lambda m, x: x @ m.weight, "1.1.attn", "it has hooks"),
    "refuses to be traced": (checks_itself, "1.1.attn", "cannot be traced"),
    "parameter changed": (
        lambda m, x: x @ m.weight.data.mul_(1.0) + x @ m.weight, "1.1",
        "reads a parameter or buffer that its forward changes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_named_and_trains_with_whole_backwards(name: str) -> None:
    function, module, reason = REFUSED[name]
    one = model(function)
    if name == "a hook":
        hooked(one.get_submodule(module))
    start = f"layer 2 (module {module}): its backward cannot be split into input and weight"
    end = "; plan whole backwards for its stage"
    with pytest.raises(CannotSplit, match=f"{re.escape(start)}.*{reason}.*{end}") as caught:
        train(SPLIT, one)
    assert "\n" not in str(caught.value)
    expected = training.train(WHOLE, one, batches(), nn.functional.cross_entropy, SGD).state
    torch.testing.assert_close(train(WHOLE, one), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda m, x: Joint.apply(x, m.weight), id="a function with one backward"),
        pytest.param(lambda m, x: (x @ m.weight).relu() @ m.weight, id="a parameter used twice"),
        pytest.param(lambda m, x: (x @ m.weight).relu_() + x, id="in place"),
        pytest.param(lambda m, x: torch.where(x > 0, x, -x) @ m.weight, id="chosen by data"),
    ],
)
def test_unusual_layers_are_split(function: Callable[[Any, Tensor], Tensor]) -> None:
    one = model(function)
    expected = training.train(SPLIT, one, batches(), nn.functional.cross_entropy, SGD).state
    torch.testing.assert_close(train(SPLIT, one), expected, rtol=1e-9, atol=1e-12)
