"""F, I and W of a layer together are its forward and backward: same values, nothing twice."""

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stagewright.executor.capture.split_backward import split_layer
from stagewright.executor.capture.split_layer import CannotSplit, SplitLayer
from stagewright.executor.capture.twins import shared
from stagewright.graphs.documents.errors import InputError

SEED = 7
CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


class Layer(nn.Module):
    """A function of modules and inputs as a layer: positional values in, a tuple out."""

    def __init__(self, compute: Callable[..., object], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            elif isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            else:
                self.register_buffer(name, part)
        self.compute = compute

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        results = self.compute(self, *values)
        return results if isinstance(results, tuple) else (results,)


class Block(nn.Module):
    """A transformer block with causal attention and dropout."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        parts = self.qkv(self.before(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return (x + self.dropout(self.down(functional.gelu(self.up(self.between(x))))),)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def written_slice(layer: Layer, x: Tensor) -> Tensor:
    y = layer.a(x)
    y[:, 1:3] += x[:, :2]
    view = y.view(-1)
    view.mul_(2)
    return y.sin()


def in_place_on_input(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    return layer.a(x.relu_()), x


def set_anew(layer: Layer, x: Tensor) -> Tensor:
    layer.seen = layer.seen * 0.9 + x.detach().mean(0)
    return x * layer.seen * layer.w


class Doubled(torch.autograd.Function):
    """A backward that works in place on its own values."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        for_input = gradient.clone()
        product = for_input * x
        view = for_input.view(-1)
        view.mul_(2)
        for_input.mul_(weight)
        view.div_(2)
        product.add_(0)
        return for_input, product.sum(0)


def cases() -> dict[str, tuple[Layer | Block, list[Tensor]]]:
    torch.manual_seed(0)
    linear, norm = nn.Linear(6, 6), nn.LayerNorm(6)
    embedding = nn.Embedding(5, 6)
    ids = torch.randint(5, (3, 4))
    frozen = nn.Linear(6, 6)
    frozen.weight.requires_grad_(False)
    images = draw(4, 3, 8, 8)
    w = nn.Parameter(torch.rand(6))
    found = {
        "linear": (Layer(lambda m, x: m.a(x), a=linear), [draw(3, 6)]),
        "twice": (Layer(lambda m, x: m.a(m.n(m.a(m.n(x)).relu())), a=linear, n=norm), [draw(3, 6)]),
        "tied": (Layer(lambda m, i: functional.relu(m.a(i)) @ m.a.weight.T, a=embedding), [ids]),
        "frozen": (Layer(lambda m, x: m.a(x), a=frozen), [draw(3, 6)]),
        "unused": (Layer(lambda m, x: m.a(x), a=linear, b=nn.Linear(2, 2)), [draw(3, 6)]),
        "no parameters": (Layer(lambda m, x: functional.gelu(x) * x.tanh()), [draw(3, 6)]),
        "passing by": (
            Layer(lambda m, x, y, i: (x, m.a(x) * y, i, y, x), a=linear),
            [draw(3, 6), draw(3, 6), ids],
        ),
        "transposed": (
            Layer(lambda m, x, y: (m.a(x.transpose(0, 1)), y.reshape(-1)), a=linear),
            [draw(4, 3, 6).transpose(0, 1), draw(4, 5).t()],
        ),
        "expanded": (Layer(lambda m, x: m.a(x.reshape(-1)), a=linear), [draw(1, 1).expand(2, 3)]),
        "maximum": (Layer(lambda m, x: m.a(x).max(dim=1), a=linear), [draw(3, 6)]),
        "written slice": (Layer(written_slice, a=linear), [draw(3, 6)]),
        "in place": (
            Layer(lambda m, x: m.r(m.a(m.r(m.a(x)))), a=linear, r=nn.ReLU(inplace=True)),
            [draw(3, 6)],
        ),
        "in place on input": (Layer(in_place_on_input, a=linear), [draw(3, 6)]),
        "set anew": (Layer(set_anew, w=w, seen=torch.zeros(6)), [draw(3, 6)]),
        "shared gradients": (
            Layer(
                lambda m, x: (x + m.v + m.u, m.w.sum()), u=w, v=nn.Parameter(draw(6)), w=frozen.bias
            ),
            [draw(6)],
        ),
        "custom": (Layer(lambda m, x: Doubled.apply(x, m.w), w=w), [draw(3, 6)]),
        "weight norm": (Layer(lambda m, x: m.a(x), a=weight_norm(nn.Linear(6, 6))), [draw(3, 6)]),
        "checkpoint": (
            Layer(lambda m, x: checkpoint(m.a, x, use_reentrant=False), a=linear),
            [draw(3, 6)],
        ),
        "convolution": (
            Layer(
                lambda m, x: x + m.d(functional.relu(m.b(m.c(x)), inplace=True)),
                c=nn.Conv2d(3, 5, 3, padding=1),
                b=nn.BatchNorm2d(5),
                d=nn.ConvTranspose2d(5, 3, 3, padding=1),
            ),
            [images],
        ),
        "channels last": (
            Layer(lambda m, x: m.c(x).flatten(1), c=nn.Conv2d(3, 4, 3, groups=1, bias=False)),
            [images.to(memory_format=torch.channels_last)],
        ),
        "pooling": (
            Layer(lambda m, x: m.g(functional.max_pool2d(x, 2)), g=nn.GroupNorm(1, 3)),
            [images],
        ),
        "lstm": (
            Layer(lambda m, x: m.a(x)[0], a=nn.LSTM(6, 4, 2, batch_first=True)),
            [draw(2, 3, 6)],
        ),
        "attention": (
            Layer(
                lambda m, x: m.a(x, x, x, need_weights=False)[0],
                a=nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True),
            ),
            [draw(2, 3, 6)],
        ),
        "block": (Block(8, 2), [draw(2, 5, 8)]),
        "encoder": (
            Layer(lambda m, x: m.a(x), a=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
            [draw(2, 5, 8)],
        ),
    }
    return {name: (layer.double(), inputs) for name, (layer, inputs) in found.items()}


CASES = cases()


def needs(inputs: Sequence[Tensor]) -> list[bool]:
    return [value.is_floating_point() for value in inputs]


def by_autograd(
    layer: nn.Module, inputs: Sequence[Tensor], need: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
    """Outputs, the gradients given for them, those of the inputs, those of the parameters."""
    torch.manual_seed(SEED)
    leaves = [x.detach().clone().requires_grad_(n) for x, n in zip(inputs, need, strict=True)]
    outputs = layer(*(leaf.clone() for leaf in leaves))
    upstream = [torch.randn_like(y) if y.requires_grad else None for y in outputs]
    wanted = [x for x in [*leaves, *layer.parameters()] if x.requires_grad]
    ends = [y for y in outputs if y.requires_grad]
    given = [gradient for gradient in upstream if gradient is not None]
    computed = torch.autograd.grad(ends, wanted, given, allow_unused=True) if ends else ()
    found = {id(x): gradient for x, gradient in zip(wanted, computed, strict=bool(ends))}
    gradients = [found.get(id(x)) for x in [*leaves, *layer.parameters()]]
    return list(outputs), upstream, gradients[: len(inputs)], gradients[len(inputs) :]


def by_pieces(
    split: SplitLayer, layer: nn.Module, inputs: Sequence[Tensor], upstream: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]:
    torch.manual_seed(SEED)
    outputs, saved = split.forward(list(layer.parameters()), list(layer.buffers()), inputs)
    for_inputs, kept = split.input_gradient(saved, upstream)
    return list(outputs), list(for_inputs), list(split.weight_gradient(kept))


def assert_same(found: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> None:
    assert [x is None for x in found] == [x is None for x in right]
    for ours, theirs in zip(found, right, strict=True):
        if ours is not None:
            assert torch.equal(ours, theirs)


def check(layer: nn.Module, inputs: list[Tensor], need: Sequence[bool]) -> SplitLayer:
    """Split a layer and compare it with autograd, bit by bit; its buffers too."""
    eager = copy.deepcopy(layer)
    inputs_before = [x.clone() for x in inputs]
    state_before, generator_before = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    split = split_layer(layer, inputs, need)
    assert torch.equal(torch.get_rng_state(), generator_before)
    assert_same(list(layer.state_dict().values()), list(state_before.values()))
    outputs, upstream, *right = by_autograd(eager, inputs, need)
    found, *gradients = by_pieces(split, layer, inputs, upstream)
    assert_same(found, outputs)
    assert_same(gradients[0], right[0])
    assert_same(gradients[1], right[1])
    assert_same(list(layer.state_dict().values()), list(eager.state_dict().values()))
    assert_same(inputs, inputs_before)
    return split


@pytest.mark.parametrize("name", CASES)
def test_pieces_compute_what_autograd_does(name: str):
    layer, inputs = CASES[name]
    check(layer, inputs, needs(inputs))


WITH_PARAMETERS = [name for name, (layer, _) in CASES.items() if list(layer.parameters())]


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_first_layer_has_all_in_w(name: str):
    layer, inputs = CASES[name]
    split = check(layer, inputs, [False] * len(inputs))
    assert computed(split.i) == []


def test_layer_without_parameters_has_nothing_in_w():
    layer, inputs = CASES["no parameters"]
    assert computed(split_layer(layer, inputs, [True]).w) == []


def computed(*pieces: GraphModule) -> list[Node]:
    return [node for piece in pieces for node in piece.graph.nodes if node.op == "call_function"]


class Counting(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[object] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def work(counts: Counter[OpOverload]) -> Counter[OpOverload]:
    """Without views and copies, and with sums in place, which a trace does not hold, as sums."""
    result = Counter({target: n for target, n in counts.items() if not target.is_view})
    del result[torch.ops.aten.clone.default]
    result[torch.ops.aten.add.Tensor] += result.pop(torch.ops.aten.add_.Tensor, 0)
    return result


@pytest.fixture(scope="module")
def split_case() -> Callable[[str], SplitLayer]:
    """Cases by name, each of which is split once."""
    return cache(lambda name: split_layer(*CASES[name], needs(CASES[name][1])))


# Where slices are written, autograd goes another way through the views when it is traced.
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"written slice"}))
def test_nothing_is_computed_twice(name: str, split_case: Callable[[str], SplitLayer]):
    layer, inputs = CASES[name]
    split = split_case(name)
    nodes = computed(split.f, split.i, split.w)
    assert len({node.name for node in nodes}) == len(nodes)
    ours = work(Counter(node.target for node in nodes if isinstance(node.target, OpOverload)))
    halves = [node.args[-1] for node in nodes if node.target == CONVOLUTION_BACKWARD]
    ours[CONVOLUTION_BACKWARD] -= halves.count([True, False, False])
    with Counting() as eager:
        by_autograd(copy.deepcopy(layer), inputs, needs(inputs))
    assert ours - work(eager.counts) == Counter()


def test_convolution_is_cut_though_one_operator_computes_both_gradients():
    layer, inputs = CASES["convolution"]
    split = split_layer(layer, inputs, [True])
    masks = [
        [node.args[-1] for node in computed(piece) if node.target == CONVOLUTION_BACKWARD]
        for piece in (split.i, split.w)
    ]
    assert masks == [[[True, False, False]] * 2, [[False, True, True]] * 2]


class Random(nn.Module):
    """A few operations on a pool of values, its parts used any number of times."""

    def __init__(self, steps: Sequence[tuple[int, int, int]], outputs: int) -> None:
        super().__init__()
        self.steps, self.outputs = steps, outputs
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)])
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        pool = list(values)
        for operation, left, right in self.steps:
            x, y = pool[left % len(pool)], pool[right % len(pool)]
            pool.append(self.apply_one(operation, x, y))
        return tuple(pool[-self.outputs :])

    def apply_one(self, operation: int, x: Tensor, y: Tensor) -> Tensor:
        return (
            lambda: self.parts[0](x),
            lambda: self.parts[1](x),
            lambda: self.parts[2](x),
            lambda: x * y,
            lambda: x @ y.T @ self.parts[0].weight[:3],
            lambda: x * self.weight,
            lambda: functional.dropout(x, 0.4),
            lambda: x.tanh().detach() + y,
            lambda: x.relu_(),
            lambda: x.add_(y),
            lambda: x[:, :2].mul_(2).sum(1, keepdim=True) + y,
            lambda: torch.cat([x[:1], y[1:]]),
        )[operation]()


@examples(40)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9), st.integers(0, 9)), max_size=8),
    st.integers(1, 3),
    st.tuples(st.booleans(), st.booleans()),
)
def test_random_layers(steps: list[tuple[int, int, int]], outputs: int, need: tuple[bool, bool]):
    torch.manual_seed(0)
    layer, inputs = Random(steps, outputs).double(), [draw(3, 4), draw(3, 4)]
    try:
        by_autograd(copy.deepcopy(layer), inputs, need)
    except RuntimeError:  # a value that the backward needs was overwritten
        with pytest.raises(CannotSplit):
            split_layer(layer, inputs, need)
    else:
        check(layer, inputs, need)


def test_each_microbatch_brings_its_own_weights():
    torch.manual_seed(0)
    layers = [Block(8, 2).double() for _ in range(2)]
    inputs = [[draw(2, 5, 8)] for _ in layers]
    split = split_layer(layers[0], inputs[0], [True])
    right = [by_autograd(layer, x, [True]) for layer, x in zip(layers, inputs, strict=True)]
    saved = []
    for layer, x in zip(layers, inputs, strict=True):
        torch.manual_seed(SEED)
        saved.append(split.forward(list(layer.parameters()), [], x)[1])
    kept = [split.input_gradient(s, r[1]) for s, r in zip(saved, right, strict=True)]
    for (for_inputs, rest), (_, _, by_input, by_weight) in reversed(
        list(zip(kept, right, strict=True))
    ):
        assert_same(for_inputs, by_input)
        assert_same(split.weight_gradient(rest), by_weight)


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_weight_gradients_have_their_own_memory(name: str, split_case: Callable[[str], SplitLayer]):
    layer, inputs = CASES[name]
    split = split_case(name)
    _, upstream, by_input, by_weight = by_autograd(copy.deepcopy(layer), inputs, needs(inputs))
    _, for_inputs, for_weights = by_pieces(split, copy.deepcopy(layer), inputs, upstream)
    for gradient in for_weights:
        if gradient is not None:
            gradient.add_(gradient)
    assert_same(for_weights, [None if g is None else 2 * g for g in by_weight])
    assert_same(for_inputs, by_input)


def kept_bytes(tensors: Sequence[Tensor], beside: Sequence[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    own = {tensor.untyped_storage().data_ptr() for tensor in beside}
    return sum(size for start, size in storages.items() if start not in own)


@pytest.mark.parametrize("name", CASES)
def test_f_keeps_no_more_than_autograd(name: str, split_case: Callable[[str], SplitLayer]):
    layer, inputs = CASES[name]
    split = split_case(name)
    own = [*layer.parameters(), *layer.buffers()]
    by_autograd: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        by_autograd.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(*(x.detach().requires_grad_(x.is_floating_point()).clone() for x in inputs))
    _, saved = split.forward(list(layer.parameters()), list(layer.buffers()), inputs)
    assert kept_bytes([*saved.for_inputs, *saved.for_weights], own) <= kept_bytes(by_autograd, own)


def test_i_frees_what_w_does_not_need():
    layer, inputs = Block(8, 2).double(), [draw(2, 5, 8)]
    split = split_layer(layer, inputs, [True])
    (output,), saved = split.forward(list(layer.parameters()), [], inputs)
    gc.disable()
    try:
        passed = [*layer.parameters(), *inputs]
        kept_by_f = [t for t in saved.for_inputs if all(t is not other for other in passed)]
        references = [weakref.ref(tensor) for tensor in kept_by_f]
        del kept_by_f
        _, kept = split.input_gradient(saved, [torch.ones_like(output)])
        alive = [reference() for reference in references]
        assert None in alive
        assert all(any(t is value for value in kept.values) for t in alive if t is not None)
        last = weakref.ref(kept.values[-1])
        split.weight_gradient(kept)
        assert last() is None
    finally:
        gc.enable()


class Living(TorchDispatchMode):
    """Counts how many of some tensors live at each operator."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.references = [weakref.ref(tensor) for tensor in tensors]
        self.counts: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts.append(sum(reference() is not None for reference in self.references))
        return func(*args, **(kwargs or {}))


def test_i_frees_while_it_runs():
    layer = Layer(lambda m, x: x.sin().exp().tanh().sigmoid().exp())
    x = draw(3)
    split = split_layer(layer, [x], [True])
    saved = split.forward([], [], [x])[1]
    with Living([tensor for tensor in saved.for_inputs if tensor is not x]) as living:
        split.input_gradient(saved, [draw(3)])
    assert living.counts[0] == 4
    assert living.counts == sorted(living.counts, reverse=True)
    assert living.counts[-1] == 0


@pytest.mark.parametrize("name", ["linear", "in place", "convolution", "attention", "block"])
def test_autocast(name: str):
    layer, inputs = cases()[name]
    layer, inputs = layer.float(), [x.float() for x in inputs]
    eager = copy.deepcopy(layer)

    def forward(*values: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return tuple(eager(*values))

    with torch.autocast("cpu", torch.bfloat16):
        split = split_layer(layer, inputs, [True])
    outputs, upstream, by_input, by_weight = by_autograd(
        Layer(lambda _, x: forward(x), e=eager), inputs, [True]
    )
    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found, *gradients = by_pieces(split, copy.deepcopy(layer), inputs, upstream)
        assert_same(found, outputs)
        assert_same(gradients[0], by_input)
        assert_same(gradients[1], by_weight)


def test_output_without_gradient():
    layer, inputs = CASES["passing by"]
    outputs, upstream, *_ = by_autograd(layer, inputs, needs(inputs))
    zeros = [None, upstream[1], None, torch.zeros_like(outputs[3]), None]
    split = split_layer(layer, inputs, needs(inputs))
    _, *by_none = by_pieces(split, layer, inputs, zeros)
    only = split_layer(layer, inputs, needs(inputs), [False, True, False, False, False])
    _, *by_fewer = by_pieces(only, layer, inputs, zeros)
    leaves = [x.requires_grad_(n) for x, n in zip(inputs, needs(inputs), strict=True)]
    right = torch.autograd.grad(layer(*leaves)[1], [*leaves[:2], *layer.parameters()], upstream[1])
    for gradients in (by_none, by_fewer):
        assert_same([*gradients[0][:2], *gradients[1]], right)


def test_other_strides_than_those_traced():
    layer = Layer(lambda m, x: m.a(x).reshape(-1).view(4, 6), a=nn.Linear(4, 4)).double()
    x = draw(6, 4)
    split = split_layer(layer, [x], [True])
    outputs, upstream, *right = by_autograd(layer, [x], [True])
    turned = [t.t().contiguous().t() for t in (x, upstream[0])]
    found, *gradients = by_pieces(split, layer, turned[:1], turned[1:])
    for ours, theirs in zip([found, *gradients], [outputs, *right], strict=True):
        assert_same(ours, theirs)


def test_other_shape_or_type_is_refused():
    layer, inputs = CASES["linear"]
    split = split_layer(layer, inputs, [True])
    for wrong in (draw(4, 6), inputs[0].detach().float()):
        with pytest.raises(InputError, match=r"split for torch.float64 \(3, 6\), got .*: split it"):
            split.forward(list(layer.parameters()), [], [wrong])


def cached(layer: Layer, x: Tensor) -> Tensor:
    if not hasattr(layer, "angles"):
        layer.angles = torch.arange(6.0, dtype=torch.float64)
    return layer.a(x * layer.angles.cos())


def test_tracing_leaves_no_cache_behind():
    layer = Layer(cached, a=nn.Linear(6, 6)).double()
    split_layer(layer, [draw(3, 6)], [True])
    assert not hasattr(layer, "angles")
    check(layer, [draw(3, 6)], [True])


LINEAR = nn.Linear(6, 6).double()
WEIGHT = LINEAR.weight


def moving_average(layer: Layer, x: Tensor) -> Tensor:
    layer.seen.mul_(0.9).add_(x.detach().mean(0))
    return x * layer.seen


KEPT = torch.zeros(6)
TRIANGLE = shared(lambda size: (torch.ones(size, size).tril(),), of_inputs=False)


def test_what_is_made_of_sizes_is_a_constant_of_the_pieces():
    layer = Layer(lambda m, x: m.a(x) @ TRIANGLE(x.shape[1])[0], a=nn.Linear(6, 6))
    pieces = split_layer(layer, [torch.ones(3, 6)], [True])
    assert pieces.f.graph.find_nodes(op="call_function", target=torch.ops.aten.tril.default) == []
    check(layer, [torch.ones(3, 6)], [True])


@pytest.mark.parametrize(
    ("compute", "parts", "reason"),
    [
        (lambda m, x: x + KEPT[2:3].add_(1), {}, "changes a tensor in place that is no"),
        (lambda m, x: x if x.sum() > 0 else -x, {}, "data"),
        (lambda m, x: (x, 3), {}, "output 1 is a int, not a tensor"),
        (lambda m, x: x * WEIGHT, {"a": LINEAR}, "reads a.weight past its name"),
        (
            lambda m, x: checkpoint(functional.dropout, m.a(x), use_reentrant=False),
            {"a": LINEAR},
            "draws random numbers",
        ),
        (moving_average, {"seen": torch.zeros(6)}, "that its forward changes"),
        (lambda m, x: torch.from_numpy(x.numpy()), {}, "numpy"),
    ],
)
def test_what_cannot_be_split_says_so(compute, parts, reason: str):
    layer = Layer(compute, **copy.copy(parts)).double()
    with pytest.raises(CannotSplit, match=reason) as caught:
        split_layer(layer, [draw(6, 6)], [True], name="third")
    assert str(caught.value).startswith("third: its backward cannot be split into ")
    assert "\n" not in str(caught.value)
