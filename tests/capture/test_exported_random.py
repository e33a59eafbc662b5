"""Random models: whatever lies between their blocks, layers in order are the model.

A model is a list of steps over its state: the hidden value, values kept for later, a mask, and what
is counted. The reference is the model itself, called on inputs of other sizes than its example. One
that computes otherwise with a single sample is refused.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from exported import WIDTH, WORDS, Batch, Block, captured, run, words
from hypothesis import given
from profiles import examples
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stagewright.graphs.documents.errors import InputError


@dataclass
class State:
    """What the steps of a forward work on."""

    ids: Tensor
    x: Tensor
    mask: Tensor
    kept: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def block(model: "Random", state: State, number: int) -> None:
    state.x = model.blocks[number % len(model.blocks)](state.x, mask=state.mask, scale=0.5)


def keep(_: "Random", state: State, number: int) -> None:
    state.kept.append(state.x if number % 2 else state.x[:, :, : 1 + number % WIDTH])


def recall(_: "Random", state: State, number: int) -> None:
    if state.kept:
        one = state.kept[number % len(state.kept)]
        state.x = state.x + F.pad(one, (0, WIDTH - one.shape[-1]))


def add_in_place(model: "Random", state: State, number: int) -> None:
    state.x = state.x.clone()
    state.x[:, :1] += model.places[number % WIDTH]


def scale_in_place(_: "Random", state: State, number: int) -> None:
    state.x = state.x * 1.0
    state.x.mul_(0.5 + number / 10)


def narrow_mask(_: "Random", state: State, number: int) -> None:
    state.mask = state.mask & (state.ids != number % WORDS)[:, None, :]


def change_mask(_: "Random", state: State, number: int) -> None:
    state.mask = state.mask.clone()
    state.mask[:, :, number % 2] = True


def use_sizes(_: "Random", state: State, number: int) -> None:
    state.sizes.append(state.x.shape[1] + number)
    state.x = state.x / state.sizes[-1]


def positions(model: "Random", state: State, number: int) -> None:
    places = torch.arange(state.ids.shape[1], device=state.ids.device).to(state.x.dtype)
    state.x = state.x + torch.outer(places.cos(), model.places) * (number + 1)


def parameter(model: "Random", state: State, _: int) -> None:
    state.x = state.x * model.factor


def turn(_: "Random", state: State, number: int) -> None:
    state.x = state.x.flip(1) if number % 2 else state.x.transpose(1, 2).reshape(state.x.shape)


def without_gradient(_: "Random", state: State, __: int) -> None:
    with torch.no_grad():
        norm = state.x.norm(dim=-1, keepdim=True) + 1
    state.x = state.x / norm


STEPS: list[Callable[["Random", State, int], None]] = [
    *(block, block, block, keep, recall, add_in_place, scale_in_place, narrow_mask, change_mask),
    *(use_sizes, positions, parameter, turn, without_gradient),
]


class Random(nn.Module):
    """Embedding, steps, head and loss."""

    def __init__(self, steps: list[tuple[int, int]], blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("places", torch.linspace(0, 1, WIDTH), persistent=False)
        self.steps = steps

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        state = State(ids, self.table(ids), mask[None])
        for kind, number in self.steps:
            STEPS[kind](self, state, number)
        loss = F.cross_entropy(self.head(state.x).mT, labels)
        return {"loss": loss + state.mask.float().mean(), "kept": state.kept}


@examples(60, quick=3)
@given(
    st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9)), max_size=12),
    st.integers(2, 3),
    st.integers(0, 1000),
)
def test_random_models(steps: list[tuple[int, int]], blocks: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = Random(steps, blocks).double()
    untouched = deepcopy(model)
    layered = captured(model, words(seed, samples=3, length=4))
    for samples, length in ((3, 4), (2, 6), (1, 3)):
        batch = words(seed + samples, samples=samples, length=length)
        shapes = [tuple(one.shape) for one in batch.values()]
        found, expected = run(layered.sized(shapes), batch), untouched(**batch)["loss"]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        gradients = zip(
            torch.autograd.grad(found, list(model.parameters()), allow_unused=True),
            torch.autograd.grad(expected, list(untouched.parameters()), allow_unused=True),
            strict=True,
        )
        for one, other in gradients:
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


class SeveralOnly(nn.Module):
    """Asks whether it has one sample, as masks of attention do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.table(ids)
        if ids.shape[0] != 1:
            hidden = hidden * 2
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), labels)


def test_one_sample_is_refused_with_the_remedy() -> None:
    layered = captured(SeveralOnly(), words(0))
    layered.require_sizes(shapes(words(1, samples=3)))
    with pytest.raises(InputError, match=r"!= 1 does not hold; give every replica at least two"):
        layered.require_sizes(shapes(words(1, samples=1)))


def shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in batch.values()]
