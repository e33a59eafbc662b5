import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from models import EXAMPLES, Example, Feed, WithBatchNorm
from torch import Tensor, nn

from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.training.stages.initialise import initialise
from stagewright.executor.training.stages.weights import layer_seed

Build = Callable[[], nn.Module]


def drawn(build: Build, wanted: set[int], seed: int = 5) -> LayeredModel:
    return initialise(build, wanted, seed=seed)


def state(layered: LayeredModel, index: int) -> dict[str, Tensor]:
    return dict(layered.layers[index].module.state_dict())


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_a_stage_is_what_the_factory_makes(example: Example) -> None:
    before = torch.get_rng_state()
    layered = drawn(example.build, {0, 2})
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    expected = example.build().state_dict()
    for index in (0, 2):
        for name, tensor in state(layered, index).items():
            assert torch.equal(tensor, expected[name])
    held = {id(t) for i in (0, 2) for t in layered.layers[i].module.parameters()}
    for index in range(len(layered)):
        for parameter in layered.layers[index].module.parameters():
            assert parameter.is_meta == (id(parameter) not in held)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_given_module_is_copied_and_left_alone(as_list: bool) -> None:
    model = WithBatchNorm().eval()
    given = [Feed(), model] if as_list else model
    twin = copy.deepcopy(given)
    layered = initialise(given, {1}, dtype=torch.float64)
    for parameter in layered.layers[1].module.parameters():
        assert parameter.dtype == torch.float64
        with torch.no_grad():
            parameter += 1
    assert all(p.is_meta for p in layered.layers[0].module.parameters())
    assert_equal(model.state_dict(), (twin[1] if as_list else twin).state_dict())
    assert not model.training
    assert model.relu.inplace


def test_integer_buffers_keep_their_type() -> None:
    layered = initialise(WithBatchNorm(), {1}, dtype=torch.bfloat16)
    types = {name: tensor.dtype for name, tensor in state(layered, 1).items()}
    assert types["norm.num_batches_tracked"] == torch.int64
    assert types["norm.running_mean"] == torch.bfloat16


def test_a_factory_that_needs_values_is_called_for_real() -> None:
    def factory() -> nn.Module:
        layer = nn.Linear(3, 3)
        assert layer.weight.abs().sum().item() > 0
        return layer

    made = drawn(factory, {0})
    torch.manual_seed(5)
    assert_equal(state(made, 0), dict(nn.Linear(3, 3).state_dict()))


def test_seeds_are_the_same_in_every_process_and_differ() -> None:
    assert layer_seed(1, 2, 3, 4) == 6166540439935100110
    places = list(itertools.product(range(3), repeat=4))
    seeds = {layer_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
