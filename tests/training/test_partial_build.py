"""Stages are made alone, and are what a plain call of the factory makes under the same seed."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import EXAMPLES
from torch import Tensor, nn

import examples.models
from stagewright.executor.training.stages import partial_build
from stagewright.executor.training.stages.partial_build import (
    CHUNK,
    SMALL_BYTES,
    CannotBuild,
    build,
    outline_of,
)

SEED, WIDTH = 5, 96


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return dict([*parameters, *model.named_buffers(remove_duplicate=False)])


def plainly(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return factory()


def assert_equal_in_parts(factory: Callable[[], nn.Module], parts: int = 3) -> None:
    """Each part of the tensors, made alone, is that of a plain call; large others have no data."""
    expected, before = tensors_of(plainly(factory)), torch.get_rng_state()
    outline = outline_of(factory, SEED)
    outlined, names = tensors_of(outline.model), list(expected)
    bounds = [len(names) * i // parts for i in range(parts + 1)]
    for start, stop in pairwise(bounds):
        wanted = outline.numbers([outlined[name] for name in names[start:stop]])
        dropped = outline.numbers(list(outlined.values())) - wanted
        made = tensors_of(build(factory, SEED, outline, dropped))
        assert list(made) == names
        for name, one in made.items():
            is_dropped = not outline.numbers([outlined[name]]).isdisjoint(dropped)
            assert one.is_meta == is_dropped or (is_dropped and one.nbytes <= SMALL_BYTES)
            assert one.is_meta or torch.equal(one, expected[name]), name
            assert type(one) is type(expected[name])
            assert (one.dtype, one.shape) == (expected[name].dtype, expected[name].shape)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_examples_equal_a_plain_call(example: Any) -> None:
    assert_equal_in_parts(example.build)


@pytest.mark.parametrize("name", ["transformer", "gpt", "llama"])
def test_models_of_the_examples_equal_a_plain_call(name: str) -> None:
    assert_equal_in_parts(getattr(examples.models, name))


class Orthogonal(nn.Module):
    """Made by a factorisation, out of place, in part, as other data, and of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.second.weight, std=0.5)
        nn.init.trunc_normal_(self.third.weight, a=1.0, b=2.0)
        with torch.no_grad():
            self.second.weight[:, :5].normal_()
            self.second.bias.data = torch.randn(WIDTH)
        self.register_buffer("order", torch.randperm(2000))
        self.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)), persistent=False)
        self.rates = [one.item() for one in torch.linspace(0, 1, 3)]


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "orthogonal": Orthogonal,
    "as float64": lambda: Orthogonal().double(),
    "recurrent": lambda: nn.Sequential(nn.LSTM(32, 32, 2), nn.Linear(32, 32)),
    "small": lambda: nn.Sequential(*(nn.Linear(3, 5) for _ in range(3))),
}


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_factories_in_their_own_ways_equal_a_plain_call(factory: Callable[[], nn.Module]) -> None:
    assert_equal_in_parts(factory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [7, 64, 65, 128, 140, 16 * 9 + 3])
def test_numbers_are_skipped_by_parts(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator is where one draw leaves it, whatever the remainder."""
    assert CHUNK % 16 == 0
    monkeypatch.setattr(partial_build, "CHUNK", 32)
    tensor = torch.empty(size, dtype=dtype)
    for draw in partial_build.CHUNKED:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            draw(tensor)
            expected = torch.rand(20)
            torch.manual_seed(SEED)
            partial_build._skip(draw, tensor)
            assert torch.equal(torch.rand(20), expected)


def test_what_another_is_computed_from_is_there_too() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.other.weight.data.copy_(self.one.weight.data * 2)

    outline = outline_of(Twice, SEED)
    every = tensors_of(outline.model)
    wanted = outline.numbers([every["other.weight"]])
    dropped = outline.numbers(list(every.values())) - wanted
    made, expected = build(Twice, SEED, outline, dropped), plainly(Twice)
    assert torch.equal(made.other.weight, expected.other.weight)
    assert not made.one.weight.is_meta
    assert made.last.weight.is_meta


def test_a_tensor_without_data_tells_the_device_that_it_would_be_on() -> None:
    seen: list[tuple[torch.device, bool]] = []

    def factory() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        seen.append((layer.weight.device, layer.weight.is_meta))
        if layer.weight.is_meta:
            return layer
        nn.init.ones_(layer.weight)
        return layer

    outline = outline_of(factory, SEED)
    build(factory, SEED, outline, outline.numbers([outline.model.weight]))
    assert seen == [(torch.device("cpu"), False)] * 2


def test_a_factory_that_reads_values_cannot_be_outlined() -> None:
    def factory() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        assert layer.weight.abs().sum().item() > 0
        return layer

    with pytest.raises(CannotBuild):
        outline_of(factory, SEED)


def test_a_factory_that_does_something_else_the_second_time_is_refused() -> None:
    calls = 0

    def factory() -> nn.Module:
        nonlocal calls
        calls += 1
        return nn.Linear(WIDTH, WIDTH + calls)

    outline = outline_of(factory, SEED)
    with pytest.raises(CannotBuild, match="differs"):
        build(factory, SEED, outline, ())


CONFIGS = {
    "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    "Llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3},
    "Bert": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3},
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM"}


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers_equal_a_plain_call(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    options: dict[str, Any] = {"vocab_size": 99, "bos_token_id": 0, "eos_token_id": 0}
    if name != "GPT2":
        options["num_attention_heads"] = 4
    config = getattr(transformers, f"{name}Config")(**options, **CONFIGS[name])
    assert_equal_in_parts(lambda: getattr(transformers, CLASSES[name])(config))
