"""Diffusion transformers: tokens are patches of latents, and vectors of a sample steer the blocks.

A linear layer makes vectors of a sample's embedded time step, and of its class or text, which scale
and shift the outputs of norms and scale what attention and feed-forward add. Of four kinds:

* DiT (Peebles and Xie 2023, section 3.2): every block embeds the step and the class, six vectors;
* PixArt (Chen et al. 2023, section 2.3): one linear layer makes the vectors of all blocks, each of
  which adds a table, and patches attend to the text's tokens;
* MMDiT (Esser et al. 2024, section 4; Stable Diffusion 3): text goes through the blocks too, with
  weights of its own, and patches and text attend to both;
* Flux: MMDiT whose last blocks have both in one stream, attention and feed-forward of one input.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.mixers import GroupedAttention
from stagewright.graphs.models.operations import (
    LayerOperation,
    Operators,
    dense,
    elementwise,
    embedding,
    require_sizes,
)
from stagewright.graphs.models.towers import crossed

if TYPE_CHECKING:
    from stagewright.graphs.models.architecture import Architecture

_ATTENTION = (
    "query, key, value", "head norms", "attention", "output", "attention sum", "steered sum 1",
)  # fmt: skip
_HALF = ("query, key, value", "head norms", "norm 1")  # of a text that ends with the attention


@documents.record
class Text:
    """The ``tokens`` of a sample's text, each a vector of ``width`` that another model made.

    ``joint`` text goes through the blocks; its last block may end with the attention. The last
    ``single`` blocks have one stream of text and patches, with the weights of one.
    """

    tokens: int
    width: int
    joint: bool = True
    ends: bool = False
    single: int | None = None

    def __post_init__(self) -> None:
        require_sizes(self)


@documents.record
class Diffusion:
    """Inputs of a diffusion transformer: elements of a patch, and of a time step; classes or text.

    ``pooled`` is the width of a vector of the whole text. With ``guidance`` its scale is embedded
    as the step is, with ``sizes`` the height, width and ratio of an image, each in a third of the
    hidden size. The ``doubled`` blocks have a second attention, of patches alone (SD 3.5).
    """

    patch: int
    classes: int | None = None
    step_size: int = 256
    text: Text | None = None
    pooled: int | None = None
    guidance: bool = False
    sizes: bool = False
    doubled: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        require_sizes(self)

    @property
    def layers(self) -> int:
        """Blocks in front of those of a decoder, as a tower has them: none."""
        return 0

    @property
    def beside(self) -> int:
        """Tokens of a text that go through the blocks."""
        return self.text.tokens if self.text is not None and self.text.joint else 0

    def kind(self, of: "Architecture", index: int) -> Hashable:
        """Blocks of one kind have equal operators."""
        return self._is_single(of, index), index in self.doubled, self._ends(of, index)

    def _is_single(self, of: "Architecture", index: int) -> bool:
        return self.text is not None and index >= of.layers - (self.text.single or 0)

    def _ends(self, of: "Architecture", index: int) -> bool:
        return self.text is not None and self.text.ends and index == of.layers - 1

    def embedded(self, of: "Architecture", samples: int, sequence: int) -> Operators:
        """The operators that make tokens of patches and text, and embed what all blocks share."""
        rows, hidden = samples * sequence, of.hidden
        found = {"patches": dense(rows, self.patch, hidden)}
        if not of.rotary:
            found["positions sum"] = elementwise(rows * hidden, operands=2)
        if self.text is None:
            return found
        words = samples * self.text.tokens
        found |= self._sample_embedded(of, samples)
        found["text in"] = dense(words, self.text.width, hidden)
        if not self.text.joint:
            found["text activation"] = elementwise(words * hidden, saved=words * hidden)
            found["text out"] = dense(words, hidden, hidden)
            found |= _vectors(samples, hidden, 6)
        return found

    def _sample_embedded(self, of: "Architecture", samples: int) -> Operators:
        vectors = samples * of.hidden
        found = _perceptron("step", samples, self.step_size, of.hidden)
        if self.guidance:
            found |= _perceptron("guidance", samples, self.step_size, of.hidden)
        if self.pooled is not None:
            found |= _perceptron("pooled", samples, self.pooled, of.hidden)
        if self.sizes:
            found |= _perceptron("size", 2 * samples, self.step_size, of.hidden // 3)
            found |= _perceptron("ratio", samples, self.step_size, of.hidden // 3)
        if self.classes is not None:
            found["class"] = embedding(samples, self.classes, of.hidden)
        return {**found, "vectors sum": elementwise(vectors, operands=2)}

    def block(self, of: "Architecture", index: int, samples: int, sequence: int) -> Operators:
        """The operators of a block."""
        plain = replace(of, diffusion=None, encoder=True, tuning=None)
        rows = samples * sequence * of.hidden
        if self.text is None:
            found = plain.block(index, samples, sequence) | self._sample_embedded(of, samples)
            return found | _vectors(samples, of.hidden, 6) | _steered(4, rows)
        if not self.text.joint:
            tokens = self.text.tokens
            attended = crossed(plain, samples, sequence, tokens, of.hidden)
            del attended["cross norm"]
            found = plain.block(index, samples, sequence) | attended
            return found | _tabled(samples, of.hidden, 6) | _steered(4, rows)
        return self._joint(plain, index, samples, sequence)

    def _joint(self, of: "Architecture", index: int, samples: int, sequence: int) -> Operators:
        assert self.text is not None
        words, width = self.text.tokens, samples * of.hidden
        if self._is_single(of, index):  # one product writes what attention and feed-forward add
            attention = replace(_heads(of), output_bias=False)
            of = replace(of, parallel=True, block_norms=1, attention=attention)
            found = _stream(of, index, samples, sequence + words)
            found |= _steered(2, width * (sequence + words)) | _vectors(samples, of.hidden, 3)
            return found | _joined(of, samples * (sequence + words))
        ends, doubled = self._ends(of, index), index in self.doubled
        image = _stream(of, index, samples, sequence) | _steered(4, width * sequence)
        text = _stream(of, index, samples, words)
        if ends:
            text = {name: text[name] for name in _HALF if name in text}
        found = _added(image, text | _steered(1 if ends else 4, width * words))
        found["attention"] = of.block(index, samples, sequence + words)["attention"]
        if doubled:
            again = {name: image[name] for name in _ATTENTION if name in image}
            found = _added(found, again)
        numbers = 6 + (3 if doubled else 0) + (2 if ends else 6)
        found |= _vectors(samples, of.hidden, numbers)
        return found | _joined(of, samples * (sequence + words))

    def ended(self, of: "Architecture", samples: int, sequence: int) -> Operators:
        """The operators of a head before its last product; without a text it embeds anew."""
        hidden = of.hidden
        steered = _steered(1, samples * sequence * hidden)
        if self.text is None:
            again = self._sample_embedded(of, samples)
            embedded = {name: replace(one, parameters=0) for name, one in again.items()}
            return embedded | _vectors(samples, hidden, 2) | steered
        if self.text.joint:
            return _vectors(samples, hidden, 2) | steered
        return _tabled(samples, hidden, 2) | steered

    def kept_once(self, of: "Architecture", _: int, __: int) -> tuple[float, float]:
        """Elements of a sample that a stage keeps once: as of a tower, the text attended to."""
        if self.text is None or self.text.joint:
            return 0.0, 0.0
        return 0.0, float(self.text.tokens * of.hidden)

    def handed_on(self, of: "Architecture", index: int, sequence: int) -> float:
        """Elements of a sample that go along with a block's output: vectors, text attended to."""
        if self.text is None:
            return 0.0
        vectors = 1 if self.text.joint else 7  # of which the head takes the first
        return sum(self.kept_once(of, index, sequence)) + vectors * of.hidden

    def width(self, of: "Architecture", sequence: int) -> float:
        """Elements of a sample that go along with the embedded patches."""
        return self.beside * of.hidden + self.handed_on(of, 0, sequence)

    def require_fused(self, name: str) -> None:
        """Raise InputError where attention in several kernels is not priced."""
        if self.doubled:
            raise InputError(
                f"{name} has blocks of two attentions: their matrices of scores are not priced; "
                "choose fused attention"
            )


def _perceptron(name: str, rows: int, inputs: int, width: int) -> Operators:
    """Two linear layers that embed a number, or a vector, of a sample."""
    return {
        f"{name} in": dense(rows, inputs, width),
        f"{name} activation": elementwise(rows * width, saved=rows * width),
        f"{name} out": dense(rows, width, width),
    }


def _vectors(samples: int, hidden: int, number: int) -> Operators:
    """So many vectors of a sample, of its embedding."""
    width = samples * hidden
    return {
        "vectors activation": elementwise(width, saved=width),
        "vectors": dense(samples, hidden, number * hidden),
    }


def _tabled(samples: int, hidden: int, number: int) -> Operators:
    """So many vectors of a sample, to which a table is added."""
    added = elementwise(samples * number * hidden, operands=2)
    return {"vectors sum": replace(added, parameters=number * hidden)}


def _steered(number: int, width: int) -> Operators:
    """Products with a sample's vectors, which keep what they scale."""
    made = elementwise(width, operands=2, saved=width)
    return {f"steered sum {place}": made for place in range(1, number + 1)}


def _stream(of: "Architecture", index: int, samples: int, tokens: int) -> Operators:
    """A block on so many tokens; norms of heads have scales, though those of blocks have none."""
    found = of.block(index, samples, tokens)
    if "head norms" in found:
        weights = 2 * _heads(of).head_size
        found["head norms"] = replace(found["head norms"], parameters=weights)
    return found


def _joined(of: "Architecture", rows: int) -> Operators:
    """Copies of queries, keys and values of text and patches, and of the attention's output."""
    width = rows * _heads(of).heads * _heads(of).head_size
    return {"joined": elementwise(4 * width, saved=width)}


def _heads(of: "Architecture") -> GroupedAttention:
    assert isinstance(of.attention, GroupedAttention)
    return of.attention


def _added(one: Operators, other: Operators) -> Operators:
    """The operators of two streams, each with weights of its own."""
    both = {name: _sum(one[name], other[name]) for name in one.keys() & other.keys()}
    return one | other | both


def _sum(one: LayerOperation, other: LayerOperation) -> LayerOperation:
    names = ("flops", "moved", "parameters", "saved", "saved_bytes")
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in names})
