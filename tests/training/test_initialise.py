import copy
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from models import EXAMPLES, Example, Feed, TiedTransformer, WithBatchNorm
from torch import Tensor, nn

from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.training.stages.initialise import initialise
from stagewright.executor.training.stages.seeding import layer_seed, module_seed
from stagewright.graphs.documents.errors import InputError

Build = Callable[[], nn.Module]


def drawn(build: Build, wanted: set[int], seed: int = 5, *, piecemeal: bool) -> LayeredModel:
    room = 0.0 if piecemeal else float("inf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return initialise(build, wanted, seed=seed, available_bytes=room, ranks_on_host=2)


def state(layered: LayeredModel, index: int) -> dict[str, Tensor]:
    return dict(layered.layers[index].module.state_dict())


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_what_fits_is_what_the_factory_makes(example: Example) -> None:
    before = torch.get_rng_state()
    layered = drawn(example.build, {0, 2}, piecemeal=False)
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


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_what_does_not_fit_is_drawn_alike_wherever_it_is_drawn(example: Example) -> None:
    whole = drawn(example.build, set(range(20)), piecemeal=True)
    other = drawn(example.build, set(range(20)), seed=6, piecemeal=True)
    tensors = list(whole.parameters_by_name().values())
    assert not any(tensor.is_meta or tensor.isnan().any() for tensor in tensors)
    assert not all(map(torch.equal, tensors, other.parameters_by_name().values()))
    for index in range(len(whole)):
        alone = drawn(example.build, {index}, piecemeal=True)
        assert_equal(state(alone, index), state(whole, index))
        assert len(alone.parameters_by_name()) == len(whole.parameters_by_name())
        assert all(isinstance(p, nn.Parameter) for p in alone.layers[index].module.parameters())


def test_batch_norm_is_drawn_as_it_is_made() -> None:
    made = state(drawn(WithBatchNorm, {1}, piecemeal=True), 1)
    assert_equal(made, {f"norm.{k}": v for k, v in nn.BatchNorm1d(6).state_dict().items()})


def test_ranks_follow_what_all_of_them_can_do() -> None:
    asked: list[bool] = []

    def agree(fits: bool) -> bool:
        asked.append(fits)
        return False

    with pytest.warns(UserWarning, match="reset_parameters"):
        refused = initialise(TiedTransformer, {0}, agree=agree, available_bytes=1e12)
    assert asked == [True]
    assert_equal(state(refused, 0), state(drawn(TiedTransformer, {0}, 0, piecemeal=True), 0))
    size = sum(tensor.nbytes for tensor in TiedTransformer().parameters())
    for room, fits in ((3 * size, True), (3 * size - 1, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            initialise(TiedTransformer, {0}, agree=agree, available_bytes=room, ranks_on_host=3)
        assert asked[-1] == fits


def test_this_host_has_room_for_a_small_model() -> None:
    layered = initialise(TiedTransformer, {0}, seed=3)
    assert_equal(state(layered, 0), state(drawn(TiedTransformer, {0}, 3, piecemeal=False), 0))


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


class Unready(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.shift


class HalfReady(Unready):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@pytest.mark.parametrize(
    ("kind", "words"), [(Unready, "sets scale, shift,"), (HalfReady, "sets shift,")]
)
def test_a_module_that_cannot_draw_its_own_is_named(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(InputError, match=f"{kind.__name__} '1' .*{words}"):
        drawn(lambda: nn.Sequential(nn.Linear(3, 3), kind()), {1}, piecemeal=True)


def test_a_factory_that_needs_values_is_called_for_real() -> None:
    def factory() -> nn.Module:
        layer = nn.Linear(3, 3)
        assert layer.weight.abs().sum().item() > 0
        return layer

    made = drawn(factory, {0}, piecemeal=True)
    torch.manual_seed(5)
    assert_equal(state(made, 0), dict(nn.Linear(3, 3).state_dict()))


def test_seeds_are_the_same_in_every_process_and_differ() -> None:
    assert layer_seed(1, 2, 3, 4) == 6166540439935100110
    assert module_seed(1, "head") == 9164393355235408334
    places = list(itertools.product(range(3), repeat=4))
    seeds = {layer_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
