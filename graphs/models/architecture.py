"""Transformers by their architecture: parameters, and the operators of a forward.

A :class:`Architecture` is a chain of an embedding, blocks and a head. Projections of one input
count as one operator (query, key and value; gate and up), so that the input that they keep counts
once.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import ConfigDict

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_count
from stagewright.graphs.models.feed_forwards import (
    Experts,
    FeedForward,
    Operators,
    fed,
    mixture,
)
from stagewright.graphs.models.mixers import AnyMixer, GroupedAttention, LatentAttention, mixed
from stagewright.graphs.models.operations import (
    LayerOperation,
    dense,
    dropout,
    elementwise,
    embedding,
    loss,
    norm,
)
from stagewright.graphs.models.sizes import require_number, require_sizes
from stagewright.graphs.models.tuning import Tuning, require_tuning, tuned_block, tuned_end

__all__ = [
    "Architecture",
    "Experts",
    "FeedForward",
    "GroupedAttention",
    "LatentAttention",
    "Operators",
]


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
    has and the layers have not. ``rotary_base`` and ``norm_epsilon`` change no cost: they are for
    exports, None if not known, as the ``traits`` are that a plain Llama or GPT lacks, in words.
    ``tuning``: which weights are trained, None for all.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    name: str
    layers: int
    hidden: int
    vocabulary: int
    attention: AnyMixer
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
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        require_sizes(self)
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
        require_number(sequence, "sequence")
        if self.positions is not None and sequence > self.positions:
            raise InputError(
                f"sequence must be at most the {self.positions} learned positions, got {sequence}"
            )

    def operators(self, samples: int, sequence: int) -> dict[str, Operators]:
        """The operators of a forward of ``samples`` sequences of ``sequence`` tokens, by layer.

        Raises InputError if there are fewer learned positions than tokens in a sequence.
        """
        require_number(samples, "samples")
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

    def norm_of(self, elements: int, width: int) -> LayerOperation:
        """A norm of the model's kind on vectors of ``width`` elements."""
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
            found["norm"] = self.norm_of(width, self.hidden)
        return tuned_end(self, "embedding", found | self._dropped("dropout", width))

    def block(self, index: int, samples: int, sequence: int) -> Operators:
        """The operators of the block (counted from 0)."""
        rows = samples * sequence
        width, window = rows * self.hidden, None if index in self.full_layers else self.window
        sparse = self.experts if self.is_sparse(index) else None
        plain = fed("feed-forward", self.feed_forward, self.hidden, rows)
        found = {
            **{f"norm {i + 1}": self.norm_of(width, self.hidden) for i in range(self.block_norms)},
            **mixed(self.attention, self, samples, sequence, window),
            **self._dropped("attention dropout", width),
            "attention sum": elementwise(width, operands=2),
            **(plain if sparse is None else mixture(sparse, self.hidden, rows)),
            **self._dropped("feed-forward dropout", width),
            "feed-forward sum": elementwise(width, operands=2),
        }
        if self.parallel:  # the first norm, or product, counts the input that both keep
            shared = "norm 2" if self.block_norms > 1 else "feed-forward in"
            found[shared] = replace(found[shared], saved=0.0)
        return tuned_block(self, index, rows, found)

    def head(self, rows: int) -> Operators:
        """The operators of the head and the loss of ``rows`` tokens."""
        width, found = rows * self.hidden, {}
        if self.encoder:
            found["transform"] = dense(rows, self.hidden, self.hidden)
            found["activation"] = elementwise(width, saved=width)
        found["norm"] = self.norm_of(width, self.hidden)
        logits = dense(rows, self.hidden, self.vocabulary, bias=False, tied=self.tied)
        biases = self.vocabulary if self.encoder or self.logits_bias else 0
        found["logits"] = replace(logits, parameters=logits.parameters + biases)
        found["loss"] = loss(rows * self.vocabulary)
        return tuned_end(self, "head", found)
