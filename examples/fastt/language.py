"""The language models of FastT's table 1 (Middleware 2020), in plain torch; sizes as published.

stagewright capture --module examples.fastt.language:bert_large \
        --data examples.fastt.language:bert_batches --mini-batch 16 -o bert-large.json
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


class RNNLM(nn.Module):
    """Two layers of LSTM between an embedding and a softmax (Zaremba et al. 2014, large)."""

    def __init__(self, vocabulary: int = 10_000, hidden: int = 1500, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.dropout = nn.Dropout(0.65)
        self.recurrent = nn.LSTM(hidden, hidden, layers, batch_first=True, dropout=0.65)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, (n, vocabulary, sequence)."""
        x, _ = self.recurrent(self.dropout(self.embedding(tokens)))
        return self.head(self.dropout(x)).transpose(1, 2)


class Bahdanau(nn.Module):
    """Additive attention: every query against every key."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Contexts (n, queries, hidden)."""
        mixed = torch.tanh(self.query(queries).unsqueeze(2) + self.key(keys).unsqueeze(1))
        return self.score(mixed).squeeze(-1).softmax(-1) @ keys


class GNMT(nn.Module):
    """Encoder and decoder of LSTM layers (Wu et al. 2016).

    As in NVIDIA's and TensorFlow's ``gnmt_v2`` the first decoder layer asks for the contexts, which
    all later layers and the softmax read. The first encoder layer reads in both directions.
    """

    def __init__(self, vocabulary: int = 32_000, hidden: int = 1024, layers: int = 4) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, hidden)
        self.target = nn.Embedding(vocabulary, hidden)
        self.dropout = nn.Dropout(0.2)
        self.both_ways = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)
        self.encoder = nn.ModuleList(
            nn.LSTM(hidden if i else 2 * hidden, hidden, batch_first=True)
            for i in range(layers - 1)
        )
        self.asking = nn.LSTM(hidden, hidden, batch_first=True)
        self.attention = Bahdanau(hidden)
        self.decoder = nn.ModuleList(
            nn.LSTM(2 * hidden, hidden, batch_first=True) for _ in range(layers - 1)
        )
        self.head = nn.Linear(2 * hidden, vocabulary)

    def forward(self, sources: Tensor, targets: Tensor) -> Tensor:
        """Logits of the next target token, (n, vocabulary, target length)."""
        keys, _ = self.both_ways(self.dropout(self.source(sources)))
        for i, layer in enumerate(self.encoder):
            read, _ = layer(self.dropout(keys))
            keys = read + keys if i else read
        x, _ = self.asking(self.dropout(self.target(targets)))
        contexts = self.attention(x, keys)
        for i, layer in enumerate(self.decoder):
            read, _ = layer(torch.cat([self.dropout(x), contexts], dim=-1))
            x = read + x if i else read
        return self.head(torch.cat([x, contexts], dim=-1)).transpose(1, 2)


class Attention(nn.Module):
    """Attention of several heads by matrix products, as in the frameworks of 2020."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (n, sequence, hidden) to the same shape; ``mask`` is true where none may look."""
        query, key, value = (
            projection(one).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection, one in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        scores = query @ key.transpose(-2, -1) / query.size(-1) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        mixed = self.dropout(scores.softmax(-1)) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, attention to a memory if there is one, and a feed-forward network; post-norm."""

    def __init__(
        self, hidden: int, heads: int, *, crossing: bool = False, activation: type[nn.Module]
    ) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention(hidden, heads, 0.1) for _ in range(1 + crossing))
        self.feed = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), activation(), nn.Linear(4 * hidden, hidden)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2 + crossing))
        self.dropout = nn.Dropout(0.1)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Map (n, sequence, hidden) to the same shape."""
        x = self.norms[0](x + self.dropout(self.attentions[0](x, x, mask)))
        if memory is not None:
            x = self.norms[1](x + self.dropout(self.attentions[1](x, memory)))
        return self.norms[-1](x + self.dropout(self.feed(x)))


class Embedding(nn.Module):
    """Token and position embedding with dropout."""

    def __init__(self, vocabulary: int, sequence: int, hidden: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(sequence, hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (n, sequence) to vectors (n, sequence, hidden)."""
        places = torch.arange(tokens.size(1), device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(places))


class Translating(nn.Module):
    """The Transformer (Vaswani et al. 2017, base), with one table for both languages and logits."""

    def __init__(
        self,
        vocabulary: int = 33_708,
        hidden: int = 512,
        heads: int = 8,
        layers: int = 6,
        sequence: int = 256,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, sequence, hidden)
        self.encoder = nn.ModuleList(
            Block(hidden, heads, activation=nn.ReLU) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            Block(hidden, heads, crossing=True, activation=nn.ReLU) for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embedding.token.weight

    def forward(self, sources: Tensor, targets: Tensor) -> Tensor:
        """Logits of the next target token, (n, vocabulary, target length)."""
        memory = self.embedding(sources)
        for block in self.encoder:
            memory = block(memory)
        length = targets.size(1)
        later = torch.ones(length, length, dtype=torch.bool, device=targets.device).triu(1)
        x = self.embedding(targets)
        for block in self.decoder:
            x = block(x, memory, later)
        return self.head(x).transpose(1, 2)


class BERT(nn.Module):
    """BERT (Devlin et al. 2019) with the head of its masked language model."""

    def __init__(
        self,
        vocabulary: int = 30_522,
        hidden: int = 1024,
        heads: int = 16,
        layers: int = 24,
        sequence: int = 512,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, sequence, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, activation=nn.GELU) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.head = nn.Linear(hidden, vocabulary)
        self.head.weight = self.embedding.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every token, (n, vocabulary, sequence)."""
        x = self.norm(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.transform(x)).transpose(1, 2)


def rnnlm() -> nn.Module:
    """RNNLM, 66 million parameters."""
    return RNNLM()


def gnmt4() -> nn.Module:
    """GNMT with four layers, 226 million parameters."""
    return GNMT()


def transformer() -> nn.Module:
    """Transformer base, 62 million parameters."""
    return Translating()


def bert_large() -> nn.Module:
    """BERT-large, 335 million parameters."""
    return BERT()


def rnnlm_batches() -> Iterator[Pair]:
    """Mini-batches of 35 tokens for :func:`rnnlm`."""
    return _texts(10_000, 35)


def bert_batches() -> Iterator[Pair]:
    """Mini-batches of 64 tokens, FastT's limit, for :func:`bert_large`."""
    return _texts(30_522, 64)


def gnmt_batches() -> Iterator[tuple[Pair, Tensor]]:
    """Mini-batches of sentences with 30 tokens for :func:`gnmt4`."""
    return _translations(32_000, 30)


def transformer_batches() -> Iterator[tuple[Pair, Tensor]]:
    """Mini-batches of sentences with 64 tokens for :func:`transformer`: 4096 tokens are 64."""
    return _translations(33_708, 64)


def _texts(vocabulary: int, length: int) -> Iterator[Pair]:
    random = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(vocabulary, (2, length + 1), generator=random)
        yield tokens[:, :-1], tokens[:, 1:]


def _translations(vocabulary: int, length: int) -> Iterator[tuple[Pair, Tensor]]:
    sources, targets = _texts(vocabulary, length), _texts(vocabulary, length)
    for (source, _), (given, expected) in zip(sources, targets, strict=False):
        yield (source, given), expected
