"""Models and data for ``stagewright profile`` and ``stagewright run``, in plain torch.

    stagewright profile --module examples.models:transformer --data examples.models:batches \
        -o model.json

The factories take no argument. The data are the same mini-batches in every process.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Batch = tuple[Tensor, Tensor]

SAMPLES = 16  # per mini-batch
SMALL_VOCABULARY, SMALL_SEQUENCE = 256, 64
VOCABULARY, SEQUENCE = 50_304, 1024  # GPT-2's, the vocabulary rounded up to a multiple of 64
CLASSES, PIXELS = 1000, 224


class Embedding(nn.Module):
    """Token and position embedding: (n, sequence) to (n, sequence, hidden)."""

    def __init__(self, vocabulary: int, sequence: int, hidden: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(sequence, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Add token and position vectors."""
        places = torch.arange(tokens.size(1), device=tokens.device)
        return self.token(tokens) + self.position(places)


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward network, each with pre-norm."""

    tp_plan: ClassVar = {  # how a tensor degree divides it: by heads, and by inner features
        "attention_in": "colwise/3",
        "heads": "divide",
        "attention_out": "rowwise",
        "feed_forward.1": "colwise",
        "feed_forward.3": "rowwise",
    }

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
        """Map (n, sequence, hidden) to the same shape."""
        parts = self.attention_in(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    """A GPT-like transformer: embedding, blocks, head."""

    def __init__(
        self, blocks: int, hidden: int, heads: int, sequence: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, sequence, hidden)
        self.blocks = nn.ModuleList(TransformerBlock(hidden, heads) for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, (n, vocabulary, sequence)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and a gated feed-forward network."""

    tp_plan: ClassVar = {
        **dict.fromkeys(("query", "key", "value", "gate", "up"), "colwise"),
        **dict.fromkeys(("output", "down"), "rowwise"),
    }

    def __init__(self, hidden: int, heads: int, key_value_heads: int, width: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, key_value_heads * self.size, bias=False)
        self.value = nn.Linear(hidden, key_value_heads * self.size, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, sequence, hidden) to the same shape."""
        y = self.attention_norm(x)
        query, key, value = (
            part(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            _rotated(query), _rotated(key), value, is_causal=True, enable_gqa=True
        )
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        y = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions: halves of (n, heads, sequence, size) turn by angles that grow with both."""
    size, places = x.size(-1), torch.arange(x.size(-2), device=x.device)
    rates = 10_000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = places[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class TokenTable(nn.Module):
    """Token embedding, divided by rows."""

    tp_plan: ClassVar = {"token": "rowwise"}

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (n, sequence) to (n, sequence, hidden)."""
        return self.token(tokens)


class Logits(nn.Module):
    """A norm and the logits of all tokens, divided by tokens and joined."""

    tp_plan: ClassVar = {"logits": "colwise_rep"}

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.logits = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token, (n, vocabulary, sequence)."""
        return self.logits(self.norm(x)).transpose(1, 2)


class Llama(nn.Module):
    """A Llama-like transformer: embedding, blocks, head."""

    def __init__(
        self,
        blocks: int,
        hidden: int,
        heads: int,
        key_value_heads: int,
        width: int,
        vocabulary: int,
    ) -> None:
        super().__init__()
        self.embedding = TokenTable(vocabulary, hidden)
        self.blocks = nn.ModuleList(
            LlamaBlock(hidden, heads, key_value_heads, width) for _ in range(blocks)
        )
        self.head = Logits(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, (n, vocabulary, sequence)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: 1x1, 3x3 and 1x1 convolutions with a shortcut."""

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


class ResNet50(nn.Module):
    """Stem, sixteen bottleneck blocks, head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
        )
        self.blocks = nn.Sequential()
        entering = 64
        for group, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=2):
            for block in range(blocks):
                stride = 2 if group > 2 and block == 0 else 1
                name = f"conv{group}_{block + 1}"
                self.blocks.add_module(name, Bottleneck(entering, width, stride))
                entering = 4 * width
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of images (n, 3, h, w)."""
        return self.head(self.blocks(self.stem(images)))


def transformer() -> nn.Module:
    """A small GPT-like transformer: 6 blocks, 1.3 million parameters."""
    return Transformer(6, 128, 4, SMALL_SEQUENCE, SMALL_VOCABULARY)


def llama() -> nn.Module:
    """A small Llama-like transformer: 6 blocks, 1.2 million parameters."""
    return Llama(6, 128, 8, 4, 344, SMALL_VOCABULARY)


def batches() -> Iterator[Batch]:
    """Endless mini-batches for :func:`transformer`."""
    return _counting(SAMPLES, SMALL_SEQUENCE, SMALL_VOCABULARY)


def gpt() -> nn.Module:
    """The transformer of ``profiles/gpt-12x512.cpu.json``: 12 blocks, 46 million parameters."""
    return Transformer(12, 512, 8, 128, 8192)


def gpt_batches() -> Iterator[Batch]:
    """Endless mini-batches for :func:`gpt`."""
    return _counting(SAMPLES, 128, 8192)


def gpt2_medium() -> nn.Module:
    """A transformer of GPT-2 medium's size: 24 blocks, 406 million parameters."""
    return Transformer(24, 1024, 16, SEQUENCE, VOCABULARY)


def gpt2_batches() -> Iterator[Batch]:
    """Endless mini-batches for :func:`gpt2_medium`."""
    return _counting(SAMPLES, SEQUENCE, VOCABULARY)


def resnet50() -> nn.Module:
    """ResNet-50, 26 million parameters."""
    return ResNet50(CLASSES)


def images() -> Iterator[Batch]:
    """Endless mini-batches for :func:`resnet50`: one image per class, with noise."""
    random = torch.Generator().manual_seed(0)
    pictures = torch.randn(CLASSES, 3, 7, 7, generator=random)
    while True:
        classes = torch.randint(CLASSES, (SAMPLES,), generator=random)
        shown = F.interpolate(pictures[classes], size=(PIXELS, PIXELS))
        yield shown + torch.randn(shown.shape, generator=random), classes


def _counting(samples: int, sequence: int, vocabulary: int) -> Iterator[Batch]:
    """Arithmetic sequences of tokens with steps of 1 to 4; the targets are the next tokens."""
    random = torch.Generator().manual_seed(0)
    places = torch.arange(sequence + 1)
    while True:
        starts = torch.randint(vocabulary, (samples, 1), generator=random)
        steps = torch.randint(1, 5, (samples, 1), generator=random)
        tokens = (starts + steps * places) % vocabulary
        yield tokens[:, :-1], tokens[:, 1:]


def _convolution(entering: int, leaving: int, size: int, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(entering, leaving, size, stride=stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(leaving)
