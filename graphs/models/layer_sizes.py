"""Parameters and activations of a model's layers on one rank of a tensor group."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount, require_count

VOCABULARY_MULTIPLE = 128
"""Megatron-LM pads the vocabulary so that every rank's part is a multiple of this."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Parameters and activations of each layer on one of ``tensor`` ranks, in forward order.

    ``parameters`` are numbers of elements; ``saved_bytes`` are kept from the forward to the
    backward for every sample, ``output_bytes`` are the whole output of a sample (not a rank's part
    of it).
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    tensor: int
    parameters: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        require_count(self.tensor, "tensor", 1 << 20)
        for name in ("parameters", "saved_bytes", "output_bytes"):
            values = getattr(self, name)
            if len(values) != len(self.parameters):
                raise InputError(
                    f"tensor degree {self.tensor}: {name} has {len(values)} layers, parameters "
                    f"{len(self.parameters)}"
                )
            for layer, value in enumerate(values):
                require_amount(value, f"tensor degree {self.tensor}: {name}[{layer}]")


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder as Megatron-LM's implementation trains it: embedding, blocks, head; not tied.

    Attention is unfused (the matrix of scores is kept, in ``element_bytes``), the feed-forward's
    activation is a ReLU, which keeps its output alone, nothing is dropped, positions are learned.
    """

    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocabulary: int
    sequence: int
    element_bytes: int = 4

    def sizes(self, tensor: int) -> LayerSizes:
        """The sizes on one of ``tensor`` ranks.

        A block keeps three h-wide activations per token on every rank (the norms' outputs and the
        sum between them), and divided among the ranks queries, keys, values, the attention's
        output, the feed-forward's activations and the scores of the heads (Korthikanti et al. 2022,
        section 4.1, in one precision and without masks). The head keeps its input, the logits and
        their softmax.

        Raises
        ------
        InputError
            If ``tensor`` does not divide the heads and the feed-forward.
        """
        for size, what in ((self.heads, "heads"), (self.feed_forward, "feed_forward")):
            if size % tensor:
                raise InputError(f"tensor degree {tensor} does not divide {size} {what}")
        h, s = self.hidden, self.sequence
        multiple = VOCABULARY_MULTIPLE * tensor
        words = -(-self.vocabulary // multiple) * multiple // tensor
        divided = h * (3 * h + 3) + h * h + 2 * h * self.feed_forward + self.feed_forward
        block = divided / tensor + 6 * h  # whole: two norms and the biases after the reductions
        width = 4 * h + self.feed_forward + self.heads * s
        saved = 3 * h + width / tensor
        inner = self.layers
        return LayerSizes(
            tensor,
            parameters=(words * h + s * h, *([block] * inner), words * h + 2 * h),
            saved_bytes=tuple(
                s * self.element_bytes * each for each in (h, *([saved] * inner), h + 2 * words)
            ),
            output_bytes=tuple(
                float(s * self.element_bytes * each)
                for each in (h, *([h] * inner), self.vocabulary)
            ),
        )


OPT_350M = Decoder(
    layers=24, hidden=1024, heads=16, feed_forward=4096, vocabulary=50272, sequence=2048
)
"""OPT-350M as Sailor trains it in fp32: tables are as wide as the hidden states, not 512."""
