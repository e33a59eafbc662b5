"""Transformers by their architecture: parameters, and the operators of a forward.

A :class:`Architecture` is a chain of an embedding, blocks and a head. Projections of one input
count as one operator (query, key and value; gate and up), so that the input that they keep counts
once.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Tag

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_count
from stagewright.graphs.models.operations import (
    LayerOperation,
    dense,
    dropout,
    elementwise,
    embedding,
    feed_forward,
    fused_attention,
    loss,
    norm,
)
from stagewright.graphs.models.stated import NOTHING, Stated
from stagewright.graphs.models.tuning import Tuning, require_tuning, tuned_block, tuned_end

MAX_SIZE = 10**9  # of anything that is counted: far above any model, products fit in a float

Operators = dict[str, LayerOperation]


def _require_sizes(record: object) -> None:
    """Every integer of a dataclass is from 1 to MAX_SIZE; zero is spelled None."""
    for one in fields(record):  # type: ignore[arg-type]
        value = getattr(record, one.name)
        if isinstance(value, int) and not isinstance(value, bool):
            _require_number(value, one.name)


def _require_number(value: int, name: str) -> None:
    if value < 1:
        raise InputError(f"{name} must be at least 1, got {value}")
    require_count(value, name, MAX_SIZE)


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Attention in which every key-value head serves ``heads / key_value_heads`` query heads.

    ``bias`` is of the projections to queries, keys and values, ``output_bias`` of the one back.
    ``head_norms``: a norm over each head of queries and of keys, as in Qwen3; with ``whole_norms``
    every head has its own weights, whether the norm is over a head (Cohere) or all (OLMo 2).
    ``sinks``: a learned score per head beside those of the tokens (GPT-OSS).
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    heads: int
    key_value_heads: int
    head_size: int
    bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        _require_sizes(self)
        if self.heads % self.key_value_heads:
            raise InputError(
                f"heads ({self.heads}) must be a multiple of key_value_heads "
                f"({self.key_value_heads})"
            )


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), as it is trained.

    Keys and values are projections of a latent vector of ``key_value_rank``, queries of one of
    ``query_rank`` (None: of the input). A head has ``plain_size + rotary_size`` elements of queries
    and keys, and ``value_size`` of values; all heads share the rotary part of the keys. ``bias``
    is of the projections to the latent vectors and of the one back.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    heads: int
    key_value_rank: int
    plain_size: int
    rotary_size: int
    value_size: int
    query_rank: int | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        _require_sizes(self)

    @property
    def key_size(self) -> int:
        """Elements of a head's query or key."""
        return self.plain_size + self.rotary_size


_AnyAttention = Annotated[
    Annotated[LatentAttention, Tag("latent")] | Annotated[GroupedAttention, Tag("grouped")],
    documents.told_by("key_value_rank", "latent", "grouped"),
]


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Two linear layers, or if ``gated`` act(gate) * up, then down; a ``relu`` keeps its output."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    width: int
    gated: bool = True
    bias: bool = False
    relu: bool = False

    def __post_init__(self) -> None:
        _require_sizes(self)


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated feed-forwards, of which a router chooses some for every token.

    ``shared_width`` is the width of all shared experts together, which every token passes through
    (None: there are none); with ``shared_gate`` their output is scaled by a learned gate. The
    ``dense_layers`` (counted from 0) have the plain feed-forward instead. ``bias`` is of the
    experts that are chosen, ``router_bias`` one number per expert.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    number: int
    per_token: int
    width: int
    shared_width: int | None = None
    shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()
    bias: bool = False
    router_bias: bool = False

    def __post_init__(self) -> None:
        _require_sizes(self)
        if self.per_token > self.number:
            raise InputError(f"{self.per_token} experts per token, but there are {self.number}")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder, or BERT's encoder with the head of its masked language model.

    ``block_norms`` norms are in a block, layer norms with all weights, with scales alone, or with
    none. In a ``parallel`` block attention and feed-forward have one input. ``positions`` is the
    size of the table of learned positions (None: ``rotary``, or with ALiBi neither), ``segments``
    that of token types. ``tied``: the head uses the embedding's table. A ``window`` limits the
    attention of all but the ``full_layers`` (counted from 0), to the last tokens or, if
    ``chunked``, to those of a chunk of the sequence. ``dropout``: whether hidden activations are
    dropped, which keeps masks.

    An ``encoder`` has a norm after the embedding in place of the final one, and its head is a
    linear layer, an activation, a norm, and logits with biases. ``left_out`` names what the model
    has and the layers have not. ``rotary_base``, ``norm_epsilon`` (None if not known) and what is
    ``stated`` change no cost: they are for exports, as the ``traits`` are that a plain Llama or GPT
    lacks, in words.
    ``tuning``: which weights are trained, None for all.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    name: str
    layers: int
    hidden: int
    vocabulary: int
    attention: _AnyAttention
    feed_forward: FeedForward
    experts: Experts | None = None
    norm: Literal["layer", "rms", "layer-scale", "layer-plain"] = "rms"
    block_norms: int = 2
    parallel: bool = False
    embedding_norm: bool = False
    logits_bias: bool = False
    rotary: bool = True
    positions: int | None = None
    segments: int | None = None
    tied: bool = False
    window: int | None = None
    full_layers: frozenset[int] = frozenset()
    chunked: bool = False
    dropout: bool = False
    encoder: bool = False
    left_out: str | None = None
    rotary_base: float | None = None
    norm_epsilon: float | None = None
    traits: tuple[str, ...] = ()
    stated: Stated = NOTHING
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        _require_sizes(self)
        require_count(self.layers, "layers", MAX_LAYERS)
        if self.tuning is not None:
            require_tuning(self, self.tuning)
        for name in ("rotary_base", "norm_epsilon"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise InputError(f"{name} must be finite and above 0, got {value}")

    def is_sparse(self, index: int) -> bool:
        """Whether the block (counted from 0) has experts."""
        return self.experts is not None and index not in self.experts.dense_layers

    def require_sequence(self, sequence: int) -> None:
        """Raise InputError if a sequence cannot have so many tokens."""
        _require_number(sequence, "sequence")
        if self.positions is not None and sequence > self.positions:
            raise InputError(
                f"sequence must be at most the {self.positions} learned positions, got {sequence}"
            )

    def operators(self, samples: int, sequence: int) -> dict[str, Operators]:
        """The operators of a forward of ``samples`` sequences of ``sequence`` tokens, by layer.

        Raises InputError if there are fewer learned positions than tokens in a sequence.
        """
        _require_number(samples, "samples")
        self.require_sequence(sequence)
        blocks = {f"block{i}": self.block(i, samples, sequence) for i in range(self.layers)}
        rows = samples * sequence
        return {"embedding": self.embedding(rows), **blocks, "head": self.head(rows)}

    def flops(self, samples: int, sequence: int) -> dict[str, dict[str, float]]:
        """FLOPs of a forward, by layer and operator; see :meth:`operators`."""
        return {
            name: {operator: one.flops for operator, one in operators.items()}
            for name, operators in self.operators(samples, sequence).items()
        }

    def parameters(self) -> dict[str, int]:
        """Parameters by layer; a tied table counts in the embedding."""
        return {
            name: int(sum(one.parameters for one in operators.values()))
            for name, operators in self.operators(1, 1).items()
        }

    def _norm(self, elements: int, width: int) -> LayerOperation:
        found = norm(elements, width, bias=self.norm == "layer")
        return replace(found, parameters=0) if self.norm == "layer-plain" else found

    def _dropped(self, name: str, elements: int) -> Operators:
        return {name: dropout(elements)} if self.dropout else {}

    def kind(self, index: int) -> tuple[bool, ...]:
        """Blocks of one kind have equal operators.

        It is with experts or not, with a window or not, frozen or not, and before the first block
        that is trained, this block, or after it.
        """
        kind = self.is_sparse(index), self.window is not None and index not in self.full_layers
        if self.tuning is None:
            return kind
        first = self.tuning.first_trained(self.layers)
        return *kind, index in self.tuning.blocks, index < first, index == first

    def embedding(self, rows: int) -> Operators:
        """The operators of the embedding of ``rows`` tokens."""
        tables = {"tokens": self.vocabulary, "positions": self.positions, "segments": self.segments}
        found = {
            name: embedding(rows, entries, self.hidden)
            for name, entries in tables.items()
            if entries is not None
        }
        width = rows * self.hidden
        if len(found) > 1:
            found["sum"] = elementwise(width, operands=len(found))
        if self.encoder or self.embedding_norm:
            found["norm"] = self._norm(width, self.hidden)
        return tuned_end(self, "embedding", found | self._dropped("dropout", width))

    def block(self, index: int, samples: int, sequence: int) -> Operators:
        """The operators of the block (counted from 0)."""
        rows = samples * sequence
        width, window = rows * self.hidden, None if index in self.full_layers else self.window
        if isinstance(self.attention, LatentAttention):
            attention = self._latent_attention(self.attention, samples, sequence, window)
        else:
            attention = self._grouped_attention(self.attention, samples, sequence, window)
        sparse = self.experts if self.is_sparse(index) else None
        fed = self._fed("feed-forward", rows, self.feed_forward)
        found = {
            **{f"norm {i + 1}": self._norm(width, self.hidden) for i in range(self.block_norms)},
            **attention,
            **self._dropped("attention dropout", width),
            "attention sum": elementwise(width, operands=2),
            **(fed if sparse is None else self._mixture(sparse, rows)),
            **self._dropped("feed-forward dropout", width),
            "feed-forward sum": elementwise(width, operands=2),
        }
        if self.parallel:  # the first norm, or product, counts the input that both keep
            shared = "norm 2" if self.block_norms > 1 else "feed-forward in"
            found[shared] = replace(found[shared], saved=0.0)
        return tuned_block(self, index, rows, found)

    def _grouped_attention(
        self, of: GroupedAttention, samples: int, sequence: int, window: int | None
    ) -> Operators:
        rows, heads = samples * sequence, of.heads + of.key_value_heads
        size = of.head_size
        inputs = (heads + of.key_value_heads) * size
        found = {"query, key, value": dense(rows, self.hidden, inputs, bias=of.bias)}
        if of.head_norms:  # two norms, of as many parameters as a head has elements
            found["head norms"] = self._norm(rows * heads * size, 2 * size)
        if of.whole_norms:
            found["head norms"] = norm(rows * heads * size, heads * size, bias=False)
        if of.sinks:
            found["sinks"] = replace(elementwise(0), parameters=of.heads)
        if self.positions is None and self.rotary:
            found["rotary"] = elementwise(rows * heads * size)
        found["attention"] = fused_attention(
            samples, of.heads, sequence, size, key_heads=of.key_value_heads, window=window,
            causal=not self.encoder, chunked=self.chunked,
        )  # fmt: skip
        found["output"] = dense(rows, of.heads * size, self.hidden, bias=of.output_bias)
        return found

    def _latent_attention(
        self, of: LatentAttention, samples: int, sequence: int, window: int | None
    ) -> Operators:
        rows, queries = samples * sequence, of.heads * of.key_size
        latent = of.key_value_rank + of.rotary_size
        down = dense(rows, self.hidden, (of.query_rank or queries) + latent, bias=False)
        biases = (latent + (of.query_rank or 0)) if of.bias else 0
        found = {"latent": replace(down, parameters=down.parameters + biases)}
        if of.query_rank is not None:
            found["query norm"] = self._norm(rows * of.query_rank, of.query_rank)
            found["query"] = dense(rows, of.query_rank, queries, bias=False)
        found["key-value norm"] = self._norm(rows * of.key_value_rank, of.key_value_rank)
        keys = of.heads * (of.plain_size + of.value_size)
        found["key, value"] = dense(rows, of.key_value_rank, keys, bias=False)
        # Rotates queries and the shared keys, and writes the keys of all heads.
        found["rotary"] = elementwise(rows * of.heads * (of.key_size + of.rotary_size))
        found["attention"] = fused_attention(
            samples, of.heads, sequence, of.key_size, value=of.value_size, window=window,
            causal=not self.encoder,
        )  # fmt: skip
        found["output"] = dense(rows, of.heads * of.value_size, self.hidden, bias=of.bias)
        return found

    def _fed(self, name: str, rows: int, of: FeedForward, experts: int = 1) -> Operators:
        return feed_forward(
            name, rows, self.hidden, of.width, gated=of.gated, bias=of.bias, experts=experts,
            relu=of.relu,
        )  # fmt: skip

    def _mixture(self, experts: Experts, rows: int) -> Operators:
        """Tokens are spread evenly over the experts; each is copied to those chosen for it."""
        chosen, width = rows * experts.per_token, rows * self.hidden
        each = FeedForward(experts.width, bias=experts.bias)
        return {
            "router": dense(rows, self.hidden, experts.number, bias=experts.router_bias),
            "routing": elementwise(rows * experts.number, saved=rows * experts.number),
            "dispatch": elementwise(chosen * self.hidden),
            **self._fed("experts", chosen, each, experts.number),
            "combine": elementwise(width, operands=experts.per_token, saved=chosen * self.hidden),
            **self._shared_experts(experts, rows),
        }

    def _shared_experts(self, experts: Experts, rows: int) -> Operators:
        if experts.shared_width is None:
            return {}
        width = rows * self.hidden
        found = self._fed("shared", rows, FeedForward(experts.shared_width))
        if experts.shared_gate:
            found["shared score"] = dense(rows, self.hidden, 1, bias=False)
            found["shared scale"] = elementwise(width, saved=width)
        for name in ("shared in", "shared score"):  # the router counts the input that they keep
            if name in found:
                found[name] = replace(found[name], saved=0.0)
        found["shared sum"] = elementwise(width, operands=2)
        return found

    def head(self, rows: int) -> Operators:
        """The operators of the head and the loss of ``rows`` tokens."""
        width, found = rows * self.hidden, {}
        if self.encoder:
            found["transform"] = dense(rows, self.hidden, self.hidden)
            found["activation"] = elementwise(width, saved=width)
        found["norm"] = self._norm(width, self.hidden)
        logits = dense(rows, self.hidden, self.vocabulary, bias=False, tied=self.tied)
        biases = self.vocabulary if self.encoder or self.logits_bias else 0
        found["logits"] = replace(logits, parameters=logits.parameters + biases)
        found["loss"] = loss(rows * self.vocabulary)
        return tuned_end(self, "head", found)
