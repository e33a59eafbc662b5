"""Multi-token prediction: blocks behind a decoder's that predict the tokens after the next one.

Each takes the hidden states of the one before and the embeddings of the next tokens, both after a
norm, through a linear layer (DeepSeek-V3, 2024, section 2.2). It is a copy of the model's last
block; embedding and logits are the model's own.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from stagewright.graphs.models.feed_forwards import Operators
from stagewright.graphs.models.operations import LayerOperation, dense, embedding

if TYPE_CHECKING:
    from stagewright.graphs.models.architecture import Architecture


def entered(of: "Architecture", samples: int, sequence: int) -> Operators:
    """The operators of all these blocks before and after what the model's last block has too."""
    rows = samples * sequence
    width = rows * of.hidden
    table = embedding(rows, of.vocabulary, of.hidden, tied=True)
    once = {
        # Tied logits count the table already.
        "next tokens": replace(table, tied_parameters=0) if of.tied else table,
        "next norm 1": of.norm_of(width, of.hidden),
        "next norm 2": of.norm_of(width, of.hidden),
        "next projection": dense(rows, 2 * of.hidden, of.hidden, bias=False),
        "next final norm": of.norm_of(width, of.hidden),
    }
    return times(once, of.next_tokens or 0)


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
