"""Parameters and activations of a decoder as Megatron-LM trains it."""

from dataclasses import dataclass

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.layer_profiles import LayerSizes

VOCABULARY_MULTIPLE = 128
"""Megatron-LM pads the vocabulary so that every rank's part is a multiple of this."""


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
