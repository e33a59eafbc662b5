"""A layer's backward in two pieces beside autograd's whole one: seconds and bytes kept.

``python -m benchmarks split_backward [--quick]``. One thread; the two take turns, so that a
busy machine slows both, and the ratio is the median over the turns.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.executor.capture.split_backward import split_layer
from stagewright.executor.capture.split_layer import SplitLayer

WARM_UP, TURNS, QUICK_TURNS = 3, 40, 5


class TransformerBlock(nn.Module):
    """Causal attention and a feed-forward part, each after a norm and with a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """``x`` is (samples, tokens, width)."""
        parts = self.qkv(self.before(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return (x + self.down(functional.gelu(self.up(self.between(x)))),)


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms around a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """``x`` is (samples, channels, height, width)."""
        y = self.relu(self.norms[0](self.first(x)))
        return (self.relu(self.norms[1](self.second(y)) + x),)


@dataclass(frozen=True, slots=True)
class Case:
    """A layer and the shape of its input."""

    name: str
    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """A layer, its pieces, an input, and the gradient of its output."""

    layer: nn.Module
    split: SplitLayer
    x: Tensor
    gradient: Tensor


def build(case: Case) -> Built:
    """The case with random weights and values."""
    torch.manual_seed(0)
    layer, x = case.layer(), torch.randn(case.shape)
    return Built(layer, split_layer(layer, [x], [True]), x, torch.randn(case.shape))


SPEC = BenchSpec(
    "split_backward",
    build,
    (
        Case("transformer block, 64 wide", lambda: TransformerBlock(64, 4), (1, 32, 64)),
        Case("residual block, 16 wide", lambda: ResidualBlock(16), (2, 16, 16, 16)),
        Case("transformer block, 512 wide", lambda: TransformerBlock(512, 8), (4, 128, 512)),
        Case("residual block, 64 wide", lambda: ResidualBlock(64), (8, 64, 32, 32)),
    ),
)


def whole(built: Built) -> tuple[float, float]:
    """Seconds of forward and backward by autograd."""
    x = built.x.detach().requires_grad_()
    began = perf_counter()
    (y,) = built.layer(x)
    middle = perf_counter()
    torch.autograd.grad(y, [x, *built.layer.parameters()], built.gradient)
    return middle - began, perf_counter() - middle


def pieces(built: Built) -> tuple[float, float, float]:
    """Seconds of F, I and W."""
    parameters, buffers = list(built.layer.parameters()), list(built.layer.buffers())
    times = [perf_counter()]
    _, saved = built.split.forward(parameters, buffers, [built.x])
    times.append(perf_counter())
    _, kept = built.split.input_gradient(saved, [built.gradient])
    times.append(perf_counter())
    built.split.weight_gradient(kept)
    times.append(perf_counter())
    f, i, w = (after - before for before, after in pairwise(times))
    return f, i, w


def kept_bytes(built: Built) -> tuple[int, int, int]:
    """What autograd keeps after a forward, F after its own, and I for W; without the weights."""
    parameters, buffers = list(built.layer.parameters()), list(built.layer.buffers())
    own = {tensor.untyped_storage().data_ptr() for tensor in [*parameters, *buffers]}

    def size(tensors: Iterable[Tensor]) -> int:
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in own}.values())

    by_autograd: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        by_autograd.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        built.layer(built.x.detach().requires_grad_())
    _, saved = built.split.forward(parameters, buffers, [built.x])
    after_f = size([*saved.for_inputs, *saved.for_weights])
    _, kept = built.split.input_gradient(saved, [built.gradient])
    return size(by_autograd), after_f, size(kept.values)


def row(case: Case, turns: int) -> tuple[object, ...]:
    """The cells of a case: medians in ms, the median ratio, and MB."""
    built = SPEC.build(case)
    taken = [(*whole(built), *pieces(built)) for _ in range(WARM_UP + turns)][WARM_UP:]
    ratio = median(sum(times[2:]) / sum(times[:2]) for times in taken)
    milliseconds = (1e3 * median(column) for column in zip(*taken, strict=True))
    return case.name, *milliseconds, ratio, *(size / 1e6 for size in kept_bytes(built))


def tables(quick: bool = False) -> tuple[Table]:
    """One table, a row for each layer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = tuple(row(case, QUICK_TURNS if quick else TURNS) for case in SPEC.cases(quick))
    finally:
        torch.set_num_threads(threads)
    columns = (
        *("layer", "forward, ms", "backward, ms", "F, ms", "I, ms", "W, ms", "pieces to whole"),
        *("autograd keeps, MB", "F keeps, MB", "I leaves for W, MB"),
    )
    return (Table("split_backward", "Backward in two pieces, one thread", columns, rows),)
