"""Blocks in front of a decoder's, on tokens of their own: encoders, and towers for images.

A model with a tower is one chain: its embedding, the blocks of the tower, those of the decoder, its
head. Until the first block of the decoder its embedded tokens go along from block to block; behind
it go the outputs of an encoder, which every block of its decoder attends to.
"""

from dataclasses import field, replace
from typing import TYPE_CHECKING, Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, counted, require_count
from stagewright.graphs.models.mixers import GroupedAttention
from stagewright.graphs.models.operations import (
    FeedForward,
    LayerOperation,
    Operators,
    dense,
    dropout,
    elementwise,
    embedding,
    fused_attention,
    require_sizes,
)

if TYPE_CHECKING:
    from stagewright.graphs.models.architecture import Architecture


@documents.record
class Projection:
    """A linear layer before or after a tower's blocks, on so many ``vectors`` of an input.

    ``norm`` is the width of a norm before it, of scales alone or of the tower's kind; an
    ``activation`` follows it.
    """

    vectors: int
    inputs: int
    outputs: int
    bias: bool = False
    norm: int | None = None
    scales_alone: bool = False
    activation: bool = False

    def __post_init__(self) -> None:
        require_sizes(self)


@documents.record
class Tower:
    """The first ``layers`` blocks of a model, of their own width; attention is to all tokens.

    A sample has ``images`` of ``tokens`` each; an encoder's has ``tokens``, or with None as many as
    a sequence of the decoder. The ``stem`` makes tokens of the input; without one the tower uses
    the table of the decoder's embedding. ``positions`` is the size of a table of learned positions,
    of which the first ``unused_positions`` are no token's, ``vectors`` the number of other learned
    vectors, such as a class token. With ``scales`` a vector
    scales what attention and feed-forward add. ``score_table`` is the number of learned scores of
    a head by the distance of two tokens (T5), in the first block of tower and decoder or, with
    ``score_tables``, in every block.

    The ``projector`` follows the last block: it gives ``outputs`` tokens of an image, which replace
    as many of the decoder's sequence. Without outputs the decoder's blocks attend to those of the
    last block.
    """

    layers: int
    hidden: int
    attention: GroupedAttention
    feed_forward: FeedForward
    norm: Literal["layer", "rms"] = "layer"
    tokens: int | None = None
    images: int = 1
    stem: tuple[Projection, ...] = ()
    positions: int | None = None
    unused_positions: int | None = None
    rotary: bool = False
    vectors: int | None = None
    input_norm: bool = False
    output_norm: bool = False
    scales: bool = False
    score_table: int | None = None
    score_tables: bool = False
    window: int | None = None
    full_layers: frozenset[int] = field(default_factory=frozenset)
    projector: tuple[Projection, ...] = ()
    outputs: int | None = None

    def __post_init__(self) -> None:
        require_sizes(self)
        require_count(self.layers, "layers of the tower", MAX_LAYERS)

    @property
    def is_encoder(self) -> bool:
        """Whether the decoder attends to the tower's outputs."""
        return self.outputs is None

    def sequences(self, samples: int, sequence: int) -> tuple[int, int]:
        """How many sequences the tower sees, and the tokens of each."""
        return samples * self.images, self.tokens or sequence

    def require_decoder(self, of: "Architecture") -> None:
        """Raise InputError unless the model has blocks behind the tower that can attend to it."""
        if self.layers >= of.layers:
            raise InputError(f"layers ({of.layers}) are none but the tower's {self.layers}")
        if self.is_encoder and not isinstance(of.attention, GroupedAttention):
            raise InputError("a decoder with latent attention or a recurrence has no encoder")

    def says(self, sequence: int) -> str:
        """What a sample has beside its sequence, in words."""
        _, tokens = self.sequences(1, sequence)
        if self.is_encoder:
            return f"{tokens} tokens of the encoder in a sample"
        images = counted(self.images, "image", "images")
        each = f"{tokens} tokens of the tower and {self.outputs} of the sequence"
        return f"{images} in a sample, each {each}"

    def require_sequence(self, sequence: int) -> None:
        """Raise InputError if a decoder's sequence is too short or long for the tower."""
        if self.outputs is not None and self.images * self.outputs > sequence:
            raise InputError(
                f"sequence must have room for {self.images} x {self.outputs} tokens of images, got "
                f"{sequence}"
            )
        longest = None if self.positions is None else self.positions - (self.unused_positions or 0)
        if self.is_encoder and longest is not None and (self.tokens or sequence) > longest:
            raise InputError(
                f"sequence must be at most the encoder's {longest} positions, got {sequence}"
            )

    def chain(self, of: "Architecture", index: int) -> tuple["Architecture", int]:
        """The chain of equally wide blocks that a block belongs to, and the block's place in it."""
        if index < self.layers:
            return self._own(of), index
        return replace(of, tower=None, layers=of.layers - self.layers), index - self.layers

    def _own(self, of: "Architecture") -> "Architecture":
        return type(of)(
            name=of.name,
            layers=self.layers,
            hidden=self.hidden,
            vocabulary=of.vocabulary,
            attention=self.attention,
            feed_forward=self.feed_forward,
            norm=self.norm,
            rotary=self.rotary,
            window=self.window,
            full_layers=self.full_layers,
            dropout=of.dropout,
            encoder=True,
        )

    def kind(self, of: "Architecture", index: int) -> tuple[object, ...]:
        """Blocks of one kind have equal operators."""
        chain, place = self.chain(of, index)
        is_end = place == 0 and self.score_table is not None, index == self.layers - 1
        return index < self.layers, *is_end, *chain.kind(place)

    def embedded(self, of: "Architecture", samples: int, sequence: int) -> Operators:
        """The operators that make the tower's tokens."""
        number, tokens = self.sequences(samples, sequence)
        width = number * tokens * self.hidden
        chain, found = self._own(of), self._projected("stem", self.stem, of, number)
        if not self.stem:
            look_up = embedding(number * tokens, 1, self.hidden)
            found["tower tokens"] = replace(look_up, parameters=0)
        learned = {"tower positions": self.positions, "tower vectors": self.vectors}
        for name, rows in learned.items():
            if rows is not None:
                found[name] = replace(embedding(number * tokens, rows, self.hidden), kind="memory")
        if self.input_norm:
            found["tower norm"] = chain.norm_of(width, self.hidden)
        return found | ({"tower dropout": dropout(width)} if of.dropout else {})

    def block(self, of: "Architecture", index: int, samples: int, sequence: int) -> Operators:
        """The operators of a block of the tower or of the decoder behind it."""
        chain, place = self.chain(of, index)
        is_own = index < self.layers
        number, tokens = self.sequences(samples, sequence) if is_own else (samples, sequence)
        found = chain.block(place, number, tokens)
        if is_own and self.scales:
            width = number * tokens * self.hidden
            for name in ("attention scaled sum", "feed-forward scaled sum"):
                found[name] = replace(elementwise(width, saved=width), parameters=self.hidden)
        if self.score_table is not None and "attention" in found:
            found |= self._scored(found["attention"], chain, place, number * tokens**2)
        if index == self.layers - 1:
            found |= self._outputs(of, number, tokens)
        if self.is_encoder and not is_own:
            _, keys = self.sequences(samples, sequence)
            found |= crossed(chain, samples, sequence, keys, self.hidden)
        return found

    def _scored(
        self, attention: LayerOperation, chain: "Architecture", place: int, scores: int
    ) -> Operators:
        """The attention that adds learned scores, and their table in the blocks that have one."""
        heads, table = _heads(chain), self.score_table
        found = {"attention": replace(attention, moved=attention.moved + heads * scores)}
        if table is not None and (self.score_tables or place == 0):
            found["score table"] = replace(elementwise(heads * scores), parameters=table * heads)
        return found

    def _outputs(self, of: "Architecture", number: int, tokens: int) -> Operators:
        found = {}
        if self.output_norm:
            found["tower norm"] = self._own(of).norm_of(number * tokens * self.hidden, self.hidden)
        if self.is_encoder and of.dropout:
            found["tower dropout"] = dropout(number * tokens * self.hidden)
        return found | self._projected("projector", self.projector, of, number)

    def _projected(
        self, name: str, every: tuple[Projection, ...], of: "Architecture", number: int
    ) -> Operators:
        found: Operators = {}
        for place, one in enumerate(every):
            rows = number * one.vectors
            if one.norm is not None:
                before = self._own(of).norm_of(rows * one.inputs, one.norm)
                weights = one.norm if one.scales_alone else before.parameters
                found[f"{name} norm {place}"] = replace(before, parameters=weights)
            found[f"{name} {place}"] = dense(rows, one.inputs, one.outputs, bias=one.bias)
            if one.activation:
                made = rows * one.outputs
                found[f"{name} activation {place}"] = elementwise(made, saved=made)
        return found

    def kept_once(self, of: "Architecture", index: int, sequence: int) -> tuple[float, float]:
        """Elements of a sample that a stage keeps once for all its blocks of tower or decoder.

        These are learned scores, and the outputs of an encoder.
        """
        is_own = index < self.layers
        number, tokens = self.sequences(1, sequence)
        keys = tokens if is_own else sequence
        heads = _heads(self.chain(of, index)[0])
        scores = heads * keys**2 if self.score_table is not None else 0
        received = tokens * self.hidden if self.is_encoder and not is_own else 0
        return float(number * scores), float(received)

    def handed_on(self, of: "Architecture", index: int, sequence: int) -> float:
        """Elements of a sample that go along with a block's hidden states to the next block."""
        if index < self.layers:
            return float(sequence * of.hidden)
        return self.width(of, sequence) if self.is_encoder else 0.0

    def width(self, _: "Architecture", sequence: int) -> float:
        """Elements of a sample's hidden states in the tower."""
        number, tokens = self.sequences(1, sequence)
        return float(number * tokens * self.hidden)


def crossed(of: "Architecture", samples: int, sequence: int, keys: int, width: int) -> Operators:
    """The attention of a block to ``keys`` tokens of ``width``, which the stage keeps."""
    mixer, hidden = of.attention, samples * sequence * of.hidden
    assert isinstance(mixer, GroupedAttention)
    size, heads, groups = mixer.head_size, mixer.heads, mixer.key_value_heads
    both = dense(samples * keys, width, 2 * groups * size, bias=mixer.bias)
    if mixer.bias and not mixer.key_bias:
        both = replace(both, parameters=both.parameters - groups * size)
    return {
        "cross norm": of.norm_of(hidden, of.hidden),
        "cross query": dense(samples * sequence, of.hidden, heads * size, bias=mixer.bias),
        "cross key, value": replace(both, saved=0.0),
        "cross attention": fused_attention(
            samples, heads, sequence, size, key_heads=groups, keys=keys
        ),
        "cross output": dense(samples * sequence, heads * size, of.hidden, bias=mixer.output_bias),
        **({"cross dropout": dropout(hidden)} if of.dropout else {}),
        "cross sum": elementwise(hidden, operands=2),
    }


def _heads(of: "Architecture") -> int:
    return of.attention.heads if isinstance(of.attention, GroupedAttention) else 0


def with_inputs(
    of: "Architecture", *, images: int | None = None, encoder_tokens: int | None = None
) -> "Architecture":
    """The model with so many images, or tokens of its encoder, in a sample; None: as it is.

    Raises InputError if it has no such tower. Text that steers a diffusion transformer is of an
    encoder too.
    """
    tower, diffusion = of.tower, of.diffusion
    if encoder_tokens is not None and diffusion is not None and diffusion.text is not None:
        text = replace(diffusion.text, tokens=encoder_tokens)
        return with_inputs(replace(of, diffusion=replace(diffusion, text=text)), images=images)
    if images is not None:
        if tower is None or tower.is_encoder:
            raise InputError(f"images {images}: {of.name} has no tower for images; leave it out")
        tower = replace(tower, images=images)
    if encoder_tokens is not None:
        if tower is None or not tower.is_encoder or tower.stem:
            raise InputError(
                f"encoder_tokens {encoder_tokens}: {of.name} has no encoder of any number of "
                "tokens; leave it out"
            )
        tower = replace(tower, tokens=encoder_tokens)
    return replace(of, tower=tower)
