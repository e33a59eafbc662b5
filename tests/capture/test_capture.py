import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import EXAMPLES, Asserts, Example, Feed, UsedTwice, WithBatchNorm, vectors
from profiles import examples
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.tracing import capture
from stagewright.graphs.documents.errors import InputError

WIDTH = 6


def run(layered: LayeredModel, *inputs: Tensor, cut: bool = False) -> tuple[Tensor, ...]:
    """The layers in order; with ``cut`` every layer starts from detached copies."""
    values = inputs
    for layer in layered.layers:
        if cut:
            values = tuple(v.detach().requires_grad_(v.is_floating_point()) for v in values)
        values = layer.module(*values)
        assert isinstance(values, tuple)
        assert all(isinstance(value, Tensor) for value in values)
    return values


def returned(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
    result = model(*inputs)
    return result if isinstance(result, tuple) else (result,)


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    return sum((output.sin().sum() for output in outputs), torch.zeros(()))


def assert_same(model: nn.Module, *inputs: Tensor) -> LayeredModel:
    """Running the layers equals running the module, bit for bit; together they hold its state."""
    model.double().train()
    inputs = tuple(one.double() if one.is_floating_point() else one for one in inputs)
    twin = copy.deepcopy(model)
    layered = capture(model)
    torch.manual_seed(3)
    expected = returned(twin, *inputs)
    torch.manual_seed(3)
    outputs = run(layered, *inputs)
    assert len(outputs) == len(expected)
    assert all(map(torch.equal, outputs, expected))
    loss(expected).backward()
    loss(outputs).backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
    assert_whole_state(layered, model, twin)
    run(layered, *inputs, cut=True)  # a cut may stand before every layer
    return layered


def assert_whole_state(layered: LayeredModel, model: nn.Module, twin: nn.Module) -> None:
    state: dict[str, Tensor] = {}
    for layer in layered.layers:
        state |= layer.module.state_dict()
    expected = twin.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    parameters = layered.parameters_by_name()
    named = [name for names in parameters for name in names]
    assert sorted(named) == sorted(dict(model.named_parameters(remove_duplicate=False)))
    assert set(map(id, parameters.values())) == set(map(id, model.parameters()))
    buffers = [name for names in layered.buffers_by_name() for name in names]
    assert set(buffers) == expected.keys() - set(named)


def carried(layered: LayeredModel, *values: Tensor) -> list[int]:
    """How many values pass after each layer."""
    counts = []
    for layer in layered.layers:
        values = layer.module(*values)
        counts.append(len(values))
    return counts


def names(layered: LayeredModel) -> list[str]:
    return [layer.name for layer in layered.layers]


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_layers_in_order_are_the_module(example: Example) -> None:
    inputs, _ = example.batch(7, 1)
    layered = assert_same(example.build(), inputs)
    assert isinstance(layered.result(inputs), torch.Tensor)
    assert layered.input_count == 1
    assert len(layered) > 3


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_capture_reads_no_values(example: Example) -> None:
    with torch.device("meta"):
        model = example.build()
    layered = capture(model)
    assert names(layered) == names(capture(example.build()))
    assert all(parameter.is_meta for parameter in layered.parameters_by_name().values())


def test_a_module_called_twice_makes_two_layers_of_one_module() -> None:
    layered = capture(UsedTwice())
    assert names(layered) == ["shared", "between", "shared@2", "head"]
    first, _, second, _ = (layer.module for layer in layered.layers)
    assert first.get_submodule("shared") is second.get_submodule("shared")
    assert len(layered.parameters_by_name()) == len(list(UsedTwice().parameters()))


def test_a_tied_parameter_is_one_object_under_two_names() -> None:
    layered = capture(EXAMPLES["tied-transformer"].build())
    assert ("token.weight", "head.weight") in layered.parameters_by_name()


def test_buffers_are_found_once_by_name() -> None:
    found = capture(WithBatchNorm()).buffers_by_name()
    assert ("norm.running_mean",) in found
    assert ("rest.1.num_batches_tracked",) in found
    assert len(found) == 6


class Skips(nn.Module):
    """As in a U-Net: the way up takes what the way down left, in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Feed() for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        left = []
        for down in self.down:
            x = down(x)
            left.append(x)
        for up in self.up:
            x = up(torch.cat([x, left.pop()], dim=1))
        return x


def test_skips_over_many_layers() -> None:
    layered = assert_same(Skips(), vectors(5)[0])
    assert names(layered) == [f"down.{i}" for i in range(3)] + [f"up.{i}" for i in range(3)]
    assert carried(layered, vectors(2)[0].double()) == [
        1,
        2,
        3,
        2,
        1,
        1,
    ]  # joined before the way up


class ManyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(
        self, a: Tensor, b: Tensor, mask: Tensor | None = None, power: int = 2, *, sign: int = -1
    ) -> tuple[Tensor, Tensor]:
        if mask is not None:
            a = a * mask
        left = self.left(a)
        return sign * left**power, self.right(b) * self.scale + a.shape[1]


def test_inputs_are_the_arguments_without_default_and_outputs_may_be_many() -> None:
    layered = assert_same(ManyInputs(), *(vectors(3, seed)[0] for seed in range(2)))
    assert names(layered) == ["left", "right"]
    assert layered.input_count == 2
    assert isinstance(layered.result((torch.zeros(1),) * 2), tuple)
    assert "scale" in layered.layers[1].module.state_dict()
    assert "scale" not in layered.layers[0].module.state_dict()
    assert "unused" in layered.layers[0].module.state_dict()


class Sizes(nn.Module):
    """Numbers, a buffer and a constant that later layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("ramp", torch.arange(6.0), persistent=False)
        self.register_buffer("kept", torch.arange(6.0))
        self.loose = torch.full((WIDTH,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        n, width = x.shape
        half = n // 2
        x = self.first(x)
        x = self.second(x).view(half, 2, width) / width
        low, high = x.chunk(2, dim=1)
        x = self.last(low + self.ramp.to(x.dtype) + self.kept.to(x.dtype))
        return x.reshape(half, width) * self.loose + high[:, 0] + torch.zeros(half, 1)


def test_sizes_are_computed_again_where_they_are_needed() -> None:
    layered = assert_same(Sizes(), vectors(4)[0])
    assert ("kept",) in layered.buffers_by_name()


class Recurrent(nn.Module):
    """A leaf that returns a nest of tuples, of which later layers take single entries."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        states, (hidden, _) = self.lstm(x)
        parts = states.split(1)
        return self.head(self.between(parts[0]) + hidden) * parts[1]


def test_tuples_are_taken_apart_before_a_cut() -> None:
    assert_same(Recurrent(), vectors(10)[0].view(2, 5, WIDTH))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Feed(), nn.ReLU(inplace=True), Feed())
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.blocks(x)


class Nested(nn.Module):
    """As in a ResNet: containers of blocks in modules of their own, and one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.stages = nn.ModuleDict({"a": Stage(), "b": Stage()})
        self.alias = self.stages["b"]
        self.never_called = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages.values():
            x = stage(x)
        return x


def test_modules_that_hold_blocks_are_descended_into() -> None:
    layered = assert_same(Nested(), vectors(3)[0])
    inner = [f"stages.{stage}.blocks.{i}" for stage in "ab" for i in range(3)]
    assert names(layered) == ["stem", *inner]


class MutatesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.relu(x)) + x  # x is what the ReLU made of it


def test_a_value_changed_in_place_is_the_changed_one_afterwards() -> None:
    assert_same(MutatesInPlace(), vectors(4)[0])


def test_a_sequence_is_a_layer_per_child() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Sequential(Feed(), Feed()))
    layered = assert_same(model, vectors(3)[0])
    assert names(layered) == ["0", "1", "2.0", "2.1"]


def test_a_single_module_of_torch_is_one_layer() -> None:
    assert names(assert_same(nn.Linear(WIDTH, 2), vectors(3)[0])) == ["Linear"]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feed = Feed()

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return self.feed(x) + skip, skip


@pytest.mark.parametrize("wrap", [list, tuple, nn.ModuleList])
def test_a_list_of_modules_is_a_layer_each(wrap: type) -> None:
    modules = [Pair(), Pair()]
    whole = nn.ModuleList(modules)
    layered = capture(wrap(modules))
    assert names(layered) == ["0", "1"]
    assert layered.input_count == 2
    assert layered.layers[1].module.state_dict().keys() <= whole.state_dict().keys()
    x, y = vectors(3)[0], vectors(3, 1)[0]
    expected = modules[1](*modules[0](x, y))
    assert all(map(torch.equal, run(layered, x, y), expected))


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Feed()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) if x.sum() > 0 else x


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Decides()
        self.more = nn.ModuleList([self.inner])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_assertions_hold() -> None:
    assert_same(Asserts(), vectors(3)[0])


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)


class ByKeyword(nn.Linear):
    def forward(self, x: Tensor, *, power: int) -> Tensor:
        return super().forward(x) ** power


class ReturnsDict(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": super().forward(x)}


class ReturnsSize(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return super().forward(x), x.size(0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Decides(), ["Decides cannot be traced", "control flow", "list of modules"]),
        (Holder(), ["Holder cannot be traced in 'inner'", "list of modules"]),
        (WithoutGradient(), ["WithoutGradient turns gradients", "list of modules"]),
        (ByKeyword(WIDTH, 1), ["ByKeyword.forward", "'power'", "default"]),
        (ReturnsDict(WIDTH, 1), ["ReturnsDict returns", "tuple"]),
        (ReturnsSize(WIDTH, 1), ["ReturnsSize returns", "tuple"]),
        (nn.ModuleDict({"a": Feed()}), ["ModuleDict cannot be traced", "list of modules"]),
        ([], ["empty"]),
        ([Feed(), 3], ["entry 1", "int"]),
        (torch.relu, ["not a torch module"]),
    ],
)
def test_what_cannot_be_captured_is_refused_in_one_line(model: object, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        capture(model)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


class Drawn(nn.Module):
    """A random graph: each block takes the sum of some values before it."""

    def __init__(self, sources: list[set[int]], modules: list[int], returned: set[int]) -> None:
        super().__init__()
        self.sources, self.chosen, self.returned = sources, modules, returned
        self.pool = nn.ModuleList(
            [Feed(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.4)]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for sources, chosen in zip(self.sources, self.chosen, strict=True):
            values.append(self.pool[chosen](sum(values[i] for i in sorted(sources))))
        return tuple(values[i].tanh() for i in sorted(self.returned))


@st.composite
def drawn_models(draw: st.DrawFn) -> Drawn:
    depth = draw(st.integers(1, 6))
    sources = [draw(st.sets(st.integers(0, i), min_size=1, max_size=3)) for i in range(depth)]
    modules = draw(st.lists(st.integers(0, 3), min_size=depth, max_size=depth))
    results = draw(st.sets(st.integers(1, depth), min_size=1, max_size=2))
    return Drawn(sources, modules, results)


@examples(25)
@given(model=drawn_models(), seed=st.integers(0, 9))
def test_any_graph_of_blocks_is_captured(model: Drawn, seed: int) -> None:
    assert_same(model, vectors(4, seed)[0].requires_grad_())


def test_values_that_nobody_needs_do_not_pass() -> None:
    # The first block's output is trunk and skip in one value until the second block adds to it;
    # the last block's layer ends with both joined for the head.
    layered = capture(EXAMPLES["residual-mlp"].build())
    assert carried(layered, vectors(2)[0]) == [1, 1, 2, 2, 1, 1]


def test_every_module_keeps_its_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH).eval(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    for form in (model, list(model)):
        layered = capture(form)
        modes = [m.training for layer in layered.layers for m in layer.module.modules()
                 if isinstance(m, nn.BatchNorm1d | nn.Dropout)]  # fmt: skip
        assert modes == [False, True]
    torch.manual_seed(0)
    (dropped,) = run(layered, torch.ones(4, WIDTH))
    torch.manual_seed(0)
    assert torch.equal(dropped, F.dropout(model[1](model[0](torch.ones(4, WIDTH))), 0.5))
