"""Masks and positions of several layers are made once where these run one after another."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training_plans as make  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from stagewright.executor.capture.twins import made_once, shared  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.actions import parse_action  # noqa: E402
from stagewright.formulations.plans.plan import Stage  # noqa: E402

pytestmark = pytest.mark.real

WIDTH, DEPTH, TOKENS, LENGTH, MICROBATCHES = 8, 6, 11, 5, 3


class Block(nn.Module):
    """Attention that sees what its mask lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor, waves: Tensor) -> Tensor:
        q, k, v = self.mix(x + waves).chunk(3, dim=-1)
        return x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Language(nn.Module):
    """A mask, waves from a buffer, and blocks that read both.

    Where tokens are ``padded`` with 0, the mask is made of them, else of sizes alone.
    """

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.padded = padded
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.register_buffer("rate", torch.rand(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(tokens.shape[1])
        causal = torch.ones(len(positions), len(positions), dtype=torch.bool).tril()
        itself = positions[None, :] == positions[:, None]
        mask = causal & ((tokens > 0)[:, None, :] | itself) if self.padded else causal
        waves = torch.cos(positions[:, None] * self.rate)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask, waves)
        scores = self.head(x)
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


class Calls(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def language(padded: bool) -> nn.Module:
    torch.manual_seed(0)
    return Language(padded)


def batch(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (2 * MICROBATCHES, LENGTH)
    tokens = torch.randint(TOKENS, shape, generator=random)
    return {"tokens": tokens, "labels": torch.randint(TOKENS, shape, generator=random)}


def plan(stages: int, recompute: Any = "none", pieces: bool = False) -> Any:
    """On one device; the model has as many layers as blocks, one before and one after them."""
    count = DEPTH + 2
    bounds = [count * s // stages for s in range(stages + 1)]
    made = [Stage((bounds[s], bounds[s + 1]), ("a",), recompute=recompute) for s in range(stages)]
    kinds = "IW" if pieces else "B"
    words = [
        word
        for m in range(MICROBATCHES)
        for word in (
            *(f"{s}F{m}" for s in range(stages)),
            *(f"{s}{kind}{m}" for s in reversed(range(stages)) for kind in kinds),
        )
    ]
    return make.plan_in_order(made, MICROBATCHES, {"a": [parse_action(word) for word in words]})


SGD = partial(torch.optim.SGD, lr=0.1)


def trained(how: Any, padded: bool = True) -> tuple[dict[str, Tensor], list[float], Counter[str]]:
    executor = Executor(how, language(padded), None, SGD, example=batch(0), device="cpu")
    losses = [executor.step(batch(i)) for i in range(3)]
    with Calls() as calls:
        losses.append(executor.step(batch(3)))
    return executor.parameters_on_first_rank(), losses, calls.counts


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("stages", [1, 4])
def test_every_stage_makes_masks_once_a_pass(stages: int, recompute: Any) -> None:
    *_, counts = trained(plan(stages, recompute))
    passes = MICROBATCHES * stages * (1 if recompute == "none" else 2)
    assert counts["aten.tril.default"] == passes
    assert counts["aten.cos.default"] == passes


@pytest.mark.parametrize(
    ("padded", "how"),
    [
        *((True, how) for how in (plan(4), plan(2, "full"), plan(2, "layer"))),
        *((padded, plan(2, pieces=True)) for padded in (True, False)),
        *((False, how) for how in (plan(4), plan(2, "layer"))),
    ],
)
def test_what_is_trained_is_what_a_plain_loop_trains(padded: bool, how: Any) -> None:
    found, losses, counts = trained(how, padded)
    if not padded and "0B0" in {entry.action for entry in how.actions}:
        # What is made of sizes and buffers was made in the first step.
        assert counts["aten.tril.default"] == counts["aten.cos.default"] == 0
    model = language(padded)
    optimizer = SGD(model.parameters())
    for i, loss in enumerate(losses):
        optimizer.zero_grad()
        pieces = [
            {name: one[2 * m : 2 * m + 2] for name, one in batch(i).items()}
            for m in range(MICROBATCHES)
        ]
        every = [model(**piece)["loss"] / MICROBATCHES for piece in pieces]
        torch.stack(every).sum().backward()
        optimizer.step()
        assert loss == pytest.approx(sum(one.item() for one in every), rel=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def test_a_pass_ends() -> None:
    calls: list[int] = []

    def made(one: int) -> tuple[int]:
        calls.append(one)
        return (one,)

    once: Callable[..., Any] = shared(made, of_inputs=True)
    with made_once():
        assert once(1) == once(1) == (1,)
        with made_once():
            assert once(2) == (2,)
        assert once(1) == (1,)
    assert once(3) == (3,)
    assert calls == [1, 2, 3]


def test_what_is_kept_is_made_again_of_others_and_after_changes() -> None:
    calls: list[int] = []

    def made(count: int, buffer: Tensor) -> tuple[Tensor]:
        calls.append(count)
        return (buffer[:count] + 1,)

    once, buffer = shared(made, of_inputs=False), torch.zeros(4)

    def taken(count: int, of: Tensor) -> Tensor:
        with made_once():
            (found,) = once(count, of)
            return found

    first = taken(3, buffer)
    assert taken(3, buffer) is first
    taken(2, buffer)
    of_other_stage = buffer.clone()
    assert taken(2, of_other_stage) is taken(2, of_other_stage)
    taken(2, buffer)  # stages in turn
    assert calls == [3, 2, 2]
    buffer.fill_(5)  # a buffer is changed
    second = taken(2, buffer)
    buffer.fill_(6)
    assert taken(2, buffer).tolist() == [7, 7]
    assert second.tolist() == [6, 6]
    taken(2, buffer).mul_(0)  # a layer changes what it was given
    assert taken(2, buffer).tolist() == [7, 7]
    with torch.inference_mode():
        assert taken(2, buffer).is_inference()
    assert not taken(2, buffer).is_inference()
