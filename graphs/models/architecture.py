"""Transformers by their architecture: parameters, and the operators of a forward.

A :class:`Architecture` is a chain of an embedding, blocks and a head. A block has a mixer of tokens
and a feed-forward or experts; :class:`Variant` says which blocks are not as the others. Projections
of one input count as one operator (query, key and value; gate and up), so that the input that they
keep counts once.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_count, require_positive
from stagewright.graphs.models.blocks import Block, Variant, fields_of, require_variants
from stagewright.graphs.models.diffusion import Diffusion
from stagewright.graphs.models.mixers import (
    AnyAttention,
    AnyMixer,
    GroupedAttention,
    LatentAttention,
    mixed,
)
from stagewright.graphs.models.operations import (
    Experts,
    FeedForward,
    LayerOperation,
    Operators,
    dense,
    dropout,
    elementwise,
    embedding,
    fed,
    loss,
    mixture,
    norm,
    require_number,
    require_sizes,
)
from stagewright.graphs.models.stated import NOTHING, Stated
from stagewright.graphs.models.towers import Tower
from stagewright.graphs.models.tuning import Tuning, require_tuning, tuned_block, tuned_end

__all__ = [
    "Architecture",
    "Block",
    "Experts",
    "FeedForward",
    "GroupedAttention",
    "LatentAttention",
    "Operators",
    "Variant",
    "fields_of",
]


@documents.record
class Architecture:
    """A decoder, or BERT's encoder with the head of its masked language model.

    ``attention`` mixes the tokens: it may be a recurrence too. ``variants`` are blocks that have
    something else. ``block_norms`` norms are in a block, layer norms with all weights, with scales
    alone, or with none; a block that is a mixer or a feed-forward alone has half of them. In a
    ``parallel`` block attention and feed-forward have one input. ``positions`` is the size of the
    table of learned positions (None: ``rotary``, or with ALiBi neither), of which the first
    ``unused_positions`` are no token's (OPT, BART), ``segments`` that of token types. ``tied``: the
    head uses the embedding's table. A ``window`` limits the attention of all but the
    ``full_layers`` (counted from 0), to the last tokens or, if ``chunked``, to those of a
    chunk of the sequence. ``dropout``: whether hidden activations are dropped, which keeps masks.

    The first of the ``layers`` are those of a ``tower``, if there is one; sets of layers count from
    the first behind it. ``next_tokens`` blocks that predict further tokens are in the head, with
    the logits of each. ``final_norm``: whether the head has a norm. With ``diffusion`` tokens are
    patches of latents, and the head predicts the ``vocabulary`` elements of one.

    An ``encoder`` has a norm after the embedding in place of the final one, and its head is a
    linear layer, an activation, a norm, and logits with biases. ``left_out`` names what the model
    has and the layers have not. ``rotary_base``, ``norm_epsilon`` (None if not known) and what is
    ``stated`` change no cost: they are for exports, as the ``traits`` are that a plain Llama or GPT
    lacks, in words.
    ``tuning``: which weights are trained, None for all.
    """

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
    unused_positions: int | None = None
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
    variants: tuple[Variant, ...] = ()
    tower: Tower | None = None
    next_tokens: int | None = None
    final_norm: bool = True
    diffusion: Diffusion | None = None

    def __post_init__(self) -> None:
        require_sizes(self)
        require_count(self.layers, "layers", MAX_LAYERS)
        require_variants(self.variants, self.layers)
        if self.tuning is not None:
            require_tuning(self, self.tuning)
        if self.tower is not None:
            self.tower.require_decoder(self)
        for name in ("rotary_base", "norm_epsilon"):
            require_positive(getattr(self, name), name)

    def parts(self, index: int) -> Block:
        """What the block (counted from 0) has."""
        if self.tower is not None:
            chain, place = self.chain(index)
            return chain.parts(place)
        own = next((one for one in self.variants if index in one.blocks), None)
        limited = None if index in self.full_layers else self.window
        sparse = self.experts is not None and index not in self.experts.dense_layers
        mixers: tuple[AnyMixer, ...] = (self.attention,)
        feed_forward = self.feed_forward
        if own is not None:
            mixers = mixers if own.mixers is None else own.mixers
            sparse = sparse and own.fed and own.feed_forward is None
            feed_forward = own.feed_forward or feed_forward
        has_dense = not sparse and (own is None or own.fed)
        block = Block(
            mixers=mixers,
            feed_forward=feed_forward if has_dense else None,
            experts=self.experts if sparse else None,
            window=limited,
        )
        return block if block.attention is not None else replace(block, window=None)

    @property
    def first_attention(self) -> AnyAttention:
        """The attention of the first block that has one. Raises InputError if none has."""
        for index in range(self.layers):
            attention = self.parts(index).attention
            if attention is not None:
                return attention
        raise InputError(f"{self.name} has no attention")

    def is_sparse(self, index: int) -> bool:
        """Whether the block (counted from 0) has experts."""
        return self.parts(index).experts is not None

    def chain(self, index: int) -> tuple["Architecture", int]:
        """The chain of equally wide blocks of a block, and the block's place in it."""
        return (self, index) if self.tower is None else self.tower.chain(self, index)

    @property
    def longest(self) -> int | None:
        """The longest sequence, if positions are learned."""
        return None if self.positions is None else self.positions - (self.unused_positions or 0)

    def require_sequence(self, sequence: int) -> None:
        """Raise InputError if a sequence cannot have so many tokens."""
        require_number(sequence, "sequence")
        if self.longest is not None and sequence > self.longest:
            raise InputError(
                f"sequence must be at most the {self.longest} learned positions, got {sequence}"
            )
        if self.tower is not None:
            self.tower.require_sequence(sequence)

    def operators(self, samples: int, sequence: int) -> dict[str, Operators]:
        """The operators of a forward of ``samples`` sequences of ``sequence`` tokens, by layer.

        Raises InputError if there are fewer learned positions than tokens in a sequence.
        """
        require_number(samples, "samples")
        self.require_sequence(sequence)
        return self._operators(samples, sequence)

    def _operators(self, samples: int, sequence: int) -> dict[str, Operators]:
        found = {"embedding": self.embedding(samples, sequence)}
        found |= {f"block{i}": self.block(i, samples, sequence) for i in range(self.layers)}
        return found | {"head": self.head(samples, sequence)}

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
            for name, operators in self._operators(1, 1).items()
        }

    def routed_parameters(self) -> int:
        """Parameters of the experts among which routers choose."""
        every = (pair for one in self._operators(1, 1).values() for pair in one.items())
        return int(sum(one.parameters for name, one in every if name.startswith("experts")))

    @property
    def is_causal(self) -> bool:
        """Whether a token attends to itself and those before it alone."""
        return not self.encoder and self.diffusion is None

    def norm_of(self, elements: int, width: int) -> LayerOperation:
        """A norm of the model's kind on vectors of ``width`` elements."""
        found = norm(elements, width, bias=self.norm == "layer")
        return replace(found, parameters=0) if self.norm == "layer-plain" else found

    def _dropped(self, name: str, elements: int) -> Operators:
        return {name: dropout(elements)} if self.dropout else {}

    def kind(self, index: int) -> tuple[Hashable, ...]:
        """Blocks of one kind have equal operators.

        They have the same parts, are frozen or not, and come before the first block that is
        trained, are that block, or come after it.
        """
        if self.tower is not None:
            return self.tower.kind(self, index)
        own: tuple[Hashable, ...] = (self.parts(index),)
        if self.diffusion is not None:
            own = (*own, self.diffusion.kind(self, index))
        if self.tuning is None:
            return own
        first = self.tuning.first_trained(self.layers)
        return *own, index in self.tuning.blocks, index < first, index == first

    def embedding(self, samples: int, sequence: int) -> Operators:
        """The operators of the embedding, and of that of a tower."""
        rows = samples * sequence
        if self.diffusion is not None:
            return tuned_end(self, "embedding", self.diffusion.embedded(self, samples, sequence))
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
        found |= self._dropped("dropout", width)
        if self.tower is not None:
            found |= self.tower.embedded(self, samples, sequence)
        return tuned_end(self, "embedding", found)

    def block(self, index: int, samples: int, sequence: int) -> Operators:
        """The operators of the block (counted from 0)."""
        if self.tower is not None:
            return self.tower.block(self, index, samples, sequence)
        rows, parts = samples * sequence, self.parts(index)
        if self.diffusion is not None:
            return tuned_block(
                self, index, rows, self.diffusion.block(self, index, samples, sequence)
            )
        found = self._norms(parts, rows * self.hidden)
        found |= self._mixed(parts, samples, sequence) | self._fed(parts, rows)
        if self.parallel and parts.mixers and parts.is_fed:
            # The first norm, or product, counts the input that both keep.
            product = "router" if parts.experts else "feed-forward in"
            shared = "norm 2" if self.block_norms > 1 else product
            found[shared] = replace(found[shared], saved=0.0)
        return tuned_block(self, index, rows, found)

    def _mixed(self, parts: Block, samples: int, sequence: int) -> Operators:
        found: Operators = {}
        for mixer in parts.mixers:
            added = mixed(mixer, self, samples, sequence, parts.window)
            if found:  # the first mixer counts the input that both keep
                product = next(iter(added))
                added[product] = replace(added[product], saved=0.0)
            found |= added
        if parts.mixers:
            width = samples * sequence * self.hidden
            found |= self._dropped("attention dropout", width)
            found["attention sum"] = elementwise(width, operands=1 + len(parts.mixers))
        return found

    def _fed(self, parts: Block, rows: int) -> Operators:
        if parts.experts is not None:
            found = mixture(parts.experts, self.hidden, rows)
        elif parts.feed_forward is not None:
            found = fed("feed-forward", parts.feed_forward, self.hidden, rows)
        else:
            return {}
        found |= self._dropped("feed-forward dropout", rows * self.hidden)
        found["feed-forward sum"] = elementwise(rows * self.hidden, operands=2)
        return found

    def _norms(self, parts: Block, width: int) -> Operators:
        numbers = range(1, self.block_norms + 1)
        half = self.block_norms // 2
        if not parts.mixers:
            numbers = numbers[half:]
        elif not parts.is_fed:
            numbers = numbers[: max(1, half)]
        return {f"norm {number}": self.norm_of(width, self.hidden) for number in numbers}

    def head(self, samples: int, sequence: int) -> Operators:
        """The operators of the head and the loss."""
        found, rows, width = Operators(), samples * sequence, samples * sequence * self.hidden
        if self.encoder:
            found["transform"] = dense(rows, self.hidden, self.hidden)
            found["activation"] = elementwise(width, saved=width)
        if self.final_norm:
            found["norm"] = self.norm_of(width, self.hidden)
        if self.diffusion is not None:
            found |= self.diffusion.ended(self, samples, sequence)
        if self.next_tokens is not None:
            block = self.block(self.layers - 1, samples, sequence)
            found |= self._next_tokens(samples, sequence) | times(block, self.next_tokens)
            rows *= 1 + self.next_tokens
        logits = dense(rows, self.hidden, self.vocabulary, bias=False, tied=self.tied)
        biases = self.vocabulary if self.encoder or self.logits_bias else 0
        found["logits"] = replace(logits, parameters=logits.parameters + biases)
        found["loss"] = loss(rows * self.vocabulary)
        return tuned_end(self, "head", found)

    def _next_tokens(self, samples: int, sequence: int) -> Operators:
        """What the blocks that predict further tokens have beside those of the last block.

        Each takes the hidden states of the one before and the embeddings of the next tokens, both
        after a norm, through a linear layer (DeepSeek-V3, 2024, section 2.2); embedding and logits
        are the model's own.
        """
        rows = samples * sequence
        width = rows * self.hidden
        table = embedding(rows, self.vocabulary, self.hidden, tied=True)
        once = {
            # Tied logits count the table already.
            "next tokens": replace(table, tied_parameters=0) if self.tied else table,
            "next norm 1": self.norm_of(width, self.hidden),
            "next norm 2": self.norm_of(width, self.hidden),
            "next projection": dense(rows, 2 * self.hidden, self.hidden, bias=False),
            "next final norm": self.norm_of(width, self.hidden),
        }
        return times(once, self.next_tokens or 0)


def times(operators: Operators, number: int) -> Operators:
    """The operators of so many equal blocks; a table that they share counts once."""
    return {name: _times(one, number) for name, one in operators.items()}


def _times(one: LayerOperation, number: int) -> LayerOperation:
    return replace(
        one,
        flops=number * one.flops,
        moved=number * one.moved,
        parameters=number * one.parameters,
        saved=number * one.saved,
        saved_bytes=number * one.saved_bytes,
    )
