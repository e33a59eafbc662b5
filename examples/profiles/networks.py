"""A GPT-like transformer and a ResNet-50, in plain torch, as lists of layers in order.

The last layer ends in the loss, so that its backward starts from a single number.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True, slots=True)
class Network:
    """``layers`` by name, in order; ``samples(n)`` makes an input of n samples."""

    name: str
    layers: dict[str, nn.Module]
    samples: Callable[[int], Tensor]
    optimizer_bytes_per_parameter_byte: float


class Embedding(nn.Module):
    """Tokens (n, sequence) to vectors (n, sequence, hidden)."""

    def __init__(self, vocabulary: int, sequence: int, hidden: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Parameter(torch.zeros(sequence, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """Add up token and position vectors."""
        return self.token(tokens) + self.position


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward network, each after its norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention_in = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.GELU(),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shape (n, sequence, hidden), in and out."""
        parts = self.attention_in(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class Classifier(nn.Module):
    """The last layer: scores over ``classes`` and the cross entropy against fixed targets."""

    def __init__(self, before: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.before = before
        self.scores = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The mean loss, one number."""
        scores = self.scores(self.before(x)).flatten(0, -2)
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=x.device))


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: 1x1, 3x3 and 1x1 convolutions around a shortcut."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        leaving = 4 * width
        self.residual = nn.Sequential(
            *_convolution(entering, width, 1, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, leaving, 1, 1),
        )
        same = entering == leaving and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_convolution(entering, leaving, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, entering, h, w) to (n, 4 width, h / stride, w / stride)."""
        return F.relu(self.residual(x) + self.shortcut(x))


def gpt(
    layers: int = 12,
    hidden: int = 512,
    heads: int = 8,
    sequence: int = 128,
    vocabulary: int = 8192,
) -> Network:
    """A GPT-like transformer: embedding, blocks, head."""
    blocks = {f"block{i}": TransformerBlock(hidden, heads) for i in range(layers)}
    return Network(
        f"gpt-{layers}x{hidden}",
        {
            "embedding": Embedding(vocabulary, sequence, hidden),
            **blocks,
            "head": Classifier(nn.LayerNorm(hidden), hidden, vocabulary),
        },
        lambda n: torch.randint(vocabulary, (n, sequence)),
        optimizer_bytes_per_parameter_byte=2.0,
    )


def resnet50(classes: int = 1000, pixels: int = 224) -> Network:
    """ResNet-50: stem, sixteen bottleneck blocks, head."""
    layers: dict[str, nn.Module] = {
        "stem": nn.Sequential(
            *_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
        )
    }
    entering = 64
    for group, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=2):
        for block in range(blocks):
            stride = 2 if group > 2 and block == 0 else 1
            layers[f"conv{group}_{block + 1}"] = Bottleneck(entering, width, stride)
            entering = 4 * width
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    layers["head"] = Classifier(pool, entering, classes)
    return Network(
        "resnet50",
        layers,
        lambda n: torch.randn(n, 3, pixels, pixels),
        optimizer_bytes_per_parameter_byte=1.0,
    )


def _convolution(entering: int, leaving: int, size: int, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(entering, leaving, size, stride=stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(leaving)
