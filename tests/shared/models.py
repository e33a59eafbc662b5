"""Small torch modules for tests, and batches for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH = 6
VOCABULARY = 11
SEQUENCE = 5
CLASSES = 4


class ResidualMLP(nn.Module):
    """Every block is added to its input, and the first block's output skips to the head."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Feed() for _ in range(depth))
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        early = self.blocks[0](x)
        x = early
        for block in self.blocks[1:]:
            x = x + block(x)
        return self.head(torch.cat([x, early], dim=-1))


class Feed(nn.Module):
    """A norm, a wider layer and back; the norm is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.back = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.back(F.gelu(self.wide(self.norm(x)))))


class Attending(nn.Module):
    """A block of a transformer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.feed = Feed()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + self.dropout(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.dropout(self.feed(x))


class TiedTransformer(nn.Module):
    """A tiny GPT; the head's weight is the embedding's."""

    def __init__(self, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(SEQUENCE, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Attending(dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        _, length = tokens.size()
        assert length <= SEQUENCE, f"{length} tokens"
        places = torch.arange(length, device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


class WithBatchNorm(nn.Module):
    """Two norms over the batch, with ReLUs that work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.rest = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rest(self.relu(self.norm(self.first(x)))))


class UsedTwice(nn.Module):
    """One block at two depths, with another between them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Feed()
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.between(self.shared(x)))
        return self.head(self.shared(x) + x)


class Asserts(nn.Module):
    """Asks for the shape of its input. (In a test file pytest would rewrite the assertions.)"""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert x.size(1) == WIDTH
        assert not x.size(1) > WIDTH, "too wide"
        assert x.size(0) < 9 and x.dim() == 2, f"{x.size(0)} samples"  # noqa: PT018
        return self.layer(x)


@dataclass(frozen=True)
class Example:
    """``build()`` makes the module, ``batch(n, seed)`` its inputs and targets of n samples."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]


def vectors(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, WIDTH, generator=random)
    return inputs, torch.randint(CLASSES, (samples,), generator=random)


def tokens(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCABULARY, (samples, SEQUENCE + 1), generator=random)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def dropping_transformer() -> nn.Module:
    return TiedTransformer(dropout=0.3)


EXAMPLES = {
    "residual-mlp": Example(ResidualMLP, vectors),
    "tied-transformer": Example(TiedTransformer, tokens),
    "dropping-transformer": Example(dropping_transformer, tokens),
    "batch-norm": Example(WithBatchNorm, vectors),
    "used-twice": Example(UsedTwice, vectors),
}


def token_batches() -> list[tuple[Tensor, Tensor]]:
    return [tokens(8, seed) for seed in range(3)]
