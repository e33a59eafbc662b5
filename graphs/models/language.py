"""Language models: Transformer, BERT, XLNet, GPT.

Attention is ``fused`` (one kernel that keeps no matrix of scores) or ``materialized`` (separate
operations, as in 2019). Tied tables (logits that reuse the embedding) are parameters of the first
layer that uses them, and tied parameters of every later layer.
"""

from dataclasses import dataclass, replace
from typing import Literal

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operations import (
    LayerOperation,
    LayerWork,
    dense,
    dropout,
    elementwise,
    embedding,
    fused_attention,
    layer,
    loss,
    norm,
    product,
)

Attention = Literal["fused", "materialized"]


@dataclass(frozen=True, slots=True)
class _Heads:
    """What an attention is made for: sequences of a microbatch, heads, and how it is computed."""

    samples: int
    sequence: int
    hidden: int
    number: int
    attention: Attention
    causal: bool = False

    @property
    def rows(self) -> int:
        """Tokens of the microbatch."""
        return self.samples * self.sequence

    @property
    def scores(self) -> int:
        """Elements of the matrices of scores."""
        return self.samples * self.number * self.sequence * self.sequence

    @property
    def size(self) -> int:
        """Elements of a head."""
        if self.hidden % self.number:
            raise InputError(f"hidden ({self.hidden}) must be a multiple of heads ({self.number})")
        return self.hidden // self.number


def gpt(
    samples: int,
    *,
    layers: int = 24,
    hidden: int = 2304,
    heads: int = 24,
    sequence: int = 2048,
    vocabulary: int = 51200,
    attention: Attention = "fused",
) -> tuple[LayerWork, ...]:
    """GPT: learned positions, norms before each half, logits tied to the embedding.

    Parameters are those of the thesis's equation 4.3 and the final norm's 2h, FLOPs those of its
    equation 4.2 (a quarter of it is the forward). The defaults are the first row of its
    table 4.1, the model of 1.7 billion parameters.
    """
    rows = samples * sequence
    width = rows * hidden
    start = [
        embedding(rows, vocabulary, hidden),
        embedding(rows, sequence, hidden),
        elementwise(width, operands=2),
        dropout(width),
    ]
    block = [
        norm(width, hidden),
        *_self_attention(_Heads(samples, sequence, hidden, heads, attention, causal=True)),
        norm(width, hidden),
        *_feed_forward(rows, hidden, 4 * hidden),
    ]
    end = [norm(width, hidden), *_tied_logits(rows, hidden, vocabulary)]
    return (
        layer("embedding", width, start, differentiable=False),
        *(layer(f"layer{i}", width, block) for i in range(1, layers + 1)),
        layer("logits", rows * vocabulary, end),
    )


def bert(
    samples: int,
    *,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    sequence: int = 384,
    vocabulary: int = 30522,
    attention: Attention = "fused",
) -> tuple[LayerWork, ...]:
    """BERT for question answering: embeddings, transformer layers, pooler, span head.

    With 24 layers these are the 27 of SPP section V-B. The pooler reads only the first token and
    passes the others on. There are 512 learned positions or ``sequence``, whichever is more.
    """
    rows = samples * sequence
    width = rows * hidden
    start = [
        embedding(rows, vocabulary, hidden),
        embedding(rows, max(512, sequence), hidden),
        embedding(rows, 2, hidden),
        elementwise(width, operands=3),
        norm(width, hidden),
        dropout(width),
    ]
    block = [
        *_self_attention(_Heads(samples, sequence, hidden, heads, attention)),
        norm(width, hidden),
        *_feed_forward(rows, hidden, 4 * hidden),
        norm(width, hidden),
    ]
    pooled = samples * hidden
    pooler = [dense(samples, hidden, hidden), elementwise(pooled, saved=pooled)]
    return (
        layer("embedding", width, start, differentiable=False),
        *(layer(f"layer{i}", width, block) for i in range(1, layers + 1)),
        layer("pooler", width + pooled, pooler),
        layer("head", 2 * rows, [dense(rows, hidden, 2)]),
    )


def xlnet(
    samples: int,
    *,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    sequence: int = 384,
    vocabulary: int = 32000,
    attention: Attention = "fused",
) -> tuple[LayerWork, ...]:
    """XLNet for question answering: one stream, relative positions in every attention.

    XLNet-large has 360 million parameters by this count and as published; SPP's table II has
    550 million without an explanation.
    """
    rows = samples * sequence
    width = rows * hidden
    start = [embedding(rows, vocabulary, hidden), dropout(width)]
    block = [
        *_relative_attention(_Heads(samples, sequence, hidden, heads, attention)),
        norm(width, hidden),
        *_feed_forward(rows, hidden, 4 * hidden),
        norm(width, hidden),
    ]
    return (
        layer("embedding", width, start, differentiable=False),
        *(layer(f"layer{i}", width, block) for i in range(1, layers + 1)),
        layer("head", 2 * rows, [dense(rows, hidden, 2)]),
    )


def transformer(
    samples: int,
    *,
    layers: int = 6,
    hidden: int = 512,
    heads: int = 8,
    sequence: int = 256,
    vocabulary: int = 37000,
    attention: Attention = "fused",
) -> tuple[LayerWork, ...]:
    """The encoder-decoder Transformer, with one table for both embeddings and the logits.

    The base model has 63 million parameters (65 as published), 44 of them outside the table.
    SPP's table II has 55, which corresponds to a table of 21,000 words. Every decoder layer reads
    the encoder's output, so every one of them also passes it on. SPP does not give the sequence
    length; with 256 a microbatch of 32 trains in 11 GB, as in its table III.
    """
    rows = samples * sequence
    width = rows * hidden
    lookup = [elementwise(width, operands=2), dropout(width)]
    rest = [norm(width, hidden), *_feed_forward(rows, hidden, 4 * hidden), norm(width, hidden)]
    each = _Heads(samples, sequence, hidden, heads, attention)
    encoder = [*_self_attention(each), *rest]
    decoder = [
        *_self_attention(replace(each, causal=True)),
        *rest,
        *_cross_attention(each),
        norm(width, hidden),
    ]
    source = embedding(rows, vocabulary, hidden)
    target = embedding(rows, vocabulary, hidden, tied=True)
    return (
        layer("source", width, [source, *lookup], differentiable=False),
        *(layer(f"encoder{i}", width, encoder) for i in range(1, layers + 1)),
        layer("target", 2 * width, [target, *lookup], differentiable=False),
        *(layer(f"decoder{i}", 2 * width, decoder) for i in range(1, layers)),
        layer(f"decoder{layers}", width, decoder),
        layer("logits", rows * vocabulary, _tied_logits(rows, hidden, vocabulary)),
    )


def _self_attention(of: _Heads) -> list[LayerOperation]:
    return [
        dense(of.rows, of.hidden, 3 * of.hidden),
        *_attend(of),
        *_projection(of.rows, of.hidden, of.hidden),
    ]


def _cross_attention(of: _Heads) -> list[LayerOperation]:
    return [
        dense(of.rows, of.hidden, of.hidden),
        dense(of.rows, of.hidden, 2 * of.hidden),
        *_attend(of),
        *_projection(of.rows, of.hidden, of.hidden),
    ]


def _relative_attention(of: _Heads) -> list[LayerOperation]:
    """Transformer-XL's attention: the scores have a term from 2s relative positions.

    Its three biases and two segment embeddings per head are 5h parameters. With fused attention
    that term is a bias, kept as a matrix of the scores' size.
    """
    biases = LayerOperation("memory", 0.0, 4 * of.rows * of.hidden, parameters=5 * of.hidden)
    if of.attention == "fused":  # the shift of the relative term writes the bias
        kernel = fused_attention(of.samples, of.number, of.sequence, of.size, bias=True)
        attended = [elementwise(of.scores), kernel]
    else:
        attended = [elementwise(of.scores, operands=2), *_attend(of)]
    return [
        dense(of.rows, of.hidden, 3 * of.hidden, bias=False),
        dense(2 * of.sequence, of.hidden, of.hidden, bias=False),
        biases,
        product(of.samples * of.number, of.sequence, of.size, 2 * of.sequence),
        *attended,
        *_projection(of.rows, of.hidden, of.hidden, bias=False),
    ]


def _attend(of: _Heads) -> list[LayerOperation]:
    """Scores, mask, softmax, dropout, and the weighted values."""
    if of.attention == "fused":
        return [fused_attention(of.samples, of.number, of.sequence, of.size, causal=of.causal)]
    return [
        product(of.samples * of.number, of.sequence, of.size, of.sequence),
        elementwise(of.scores),
        elementwise(of.scores, saved=of.scores),
        dropout(of.scores),
        product(of.samples * of.number, of.sequence, of.sequence, of.size),
    ]


def _projection(rows: int, inputs: int, outputs: int, *, bias: bool = True) -> list[LayerOperation]:
    """Back to the residual stream: linear, dropout, addition."""
    elements = rows * outputs
    return [
        dense(rows, inputs, outputs, bias=bias),
        dropout(elements),
        elementwise(elements, operands=2),
    ]


def _feed_forward(rows: int, hidden: int, inner: int) -> list[LayerOperation]:
    return [
        dense(rows, hidden, inner),
        elementwise(rows * inner, saved=rows * inner),
        *_projection(rows, inner, hidden),
    ]


def _tied_logits(rows: int, hidden: int, vocabulary: int) -> list[LayerOperation]:
    """Logits by the embedding's table, and their softmax in the loss."""
    scores = rows * vocabulary
    return [dense(rows, hidden, vocabulary, tied=True), loss(scores)]
