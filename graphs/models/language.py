"""Language models: Transformer, BERT, XLNet, GPT.

Attention is ``fused`` (one kernel that keeps no matrix of scores) or ``materialized`` (separate
operations, as in 2019). Tied tables (logits that reuse the embedding) are parameters of the first
layer that uses them, and tied parameters of every later layer.
"""

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
        *_self_attention(samples, sequence, hidden, heads, attention, causal=True),
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
        *_self_attention(samples, sequence, hidden, heads, attention),
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
        *_relative_attention(samples, sequence, hidden, heads, attention),
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
    encoder = [*_self_attention(samples, sequence, hidden, heads, attention), *rest]
    decoder = [
        *_self_attention(samples, sequence, hidden, heads, attention, causal=True),
        *rest,
        *_cross_attention(samples, sequence, hidden, heads, attention),
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


def _self_attention(
    samples: int,
    sequence: int,
    hidden: int,
    heads: int,
    attention: Attention,
    *,
    causal: bool = False,
) -> list[LayerOperation]:
    rows = samples * sequence
    return [
        dense(rows, hidden, 3 * hidden),
        *_attend(samples, sequence, hidden, heads, attention, causal=causal),
        *_projection(rows, hidden, hidden),
    ]


def _cross_attention(
    samples: int, sequence: int, hidden: int, heads: int, attention: Attention
) -> list[LayerOperation]:
    rows = samples * sequence
    return [
        dense(rows, hidden, hidden),
        dense(rows, hidden, 2 * hidden),
        *_attend(samples, sequence, hidden, heads, attention),
        *_projection(rows, hidden, hidden),
    ]


def _relative_attention(
    samples: int, sequence: int, hidden: int, heads: int, attention: Attention
) -> list[LayerOperation]:
    """Transformer-XL's attention: the scores have a term from 2s relative positions.

    Its three biases and two segment embeddings per head are 5h parameters. With fused attention
    that term is a bias, kept as a matrix of the scores' size.
    """
    rows, head = samples * sequence, _head_width(hidden, heads)
    scores = samples * heads * sequence * sequence
    biases = LayerOperation("memory", 0.0, 4 * rows * hidden, parameters=5 * hidden)
    if attention == "fused":  # the shift of the relative term writes the bias
        kernel = fused_attention(samples, heads, sequence, head, bias=True)
        attended = [elementwise(scores), kernel]
    else:
        attended = [
            elementwise(scores, operands=2),
            *_attend(samples, sequence, hidden, heads, attention),
        ]
    return [
        dense(rows, hidden, 3 * hidden, bias=False),
        dense(2 * sequence, hidden, hidden, bias=False),
        biases,
        product(samples * heads, sequence, head, 2 * sequence),
        *attended,
        *_projection(rows, hidden, hidden, bias=False),
    ]


def _attend(
    samples: int,
    sequence: int,
    hidden: int,
    heads: int,
    attention: Attention,
    *,
    causal: bool = False,
) -> list[LayerOperation]:
    """Scores, mask, softmax, dropout, and the weighted values."""
    head = _head_width(hidden, heads)
    if attention == "fused":
        return [fused_attention(samples, heads, sequence, head, causal=causal)]
    scores = samples * heads * sequence * sequence
    return [
        product(samples * heads, sequence, head, sequence),
        elementwise(scores),
        elementwise(scores, saved=scores),
        dropout(scores),
        product(samples * heads, sequence, sequence, head),
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


def _head_width(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise InputError(f"hidden ({hidden}) must be a multiple of heads ({heads})")
    return hidden // heads
