"""Which degrees divide a transformer, and the model on one tensor rank."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import (
    Architecture,
    GroupedAttention,
    LatentAttention,
)

if TYPE_CHECKING:
    from stagewright.graphs.models.shards import LayerSplit


def require_split(architecture: Architecture, sequence: int, split: "LayerSplit") -> None:
    """Raise in one line, with the nearest values that work, where a size is not divisible.

    Raises InputError if ``tensor`` does not divide the heads or a width, if key-value heads and
    ``tensor`` do not divide one another, if ``context`` does not divide the sequence, ``expert``
    the experts.
    """
    attention = architecture.attention
    for size, what in _tensor_sizes(architecture):
        _require_divides(split.tensor, size, "tensor degree", what)
    if isinstance(attention, GroupedAttention):
        heads = attention.key_value_heads
        if heads % split.tensor and split.tensor % heads:
            raise InputError(
                f"tensor degree {split.tensor} and {heads} key-value heads: one must divide the "
                "other"
            )
    _require_divides(split.context, sequence, "context degree", "tokens of a sequence")
    if split.sequence_parallel:
        tokens = sequence // split.context
        _require_divides(
            split.tensor, tokens, "tensor degree with sequence parallelism", "tokens of a rank"
        )
    if architecture.experts is None and split.expert > 1:
        raise InputError(f"expert degree {split.expert}: the model has no experts; it must be 1")
    experts = 1 if architecture.experts is None else architecture.experts.number
    _require_divides(split.expert, experts, "expert degree", "experts")
    if experts > 1 and split.tensor > 1 and not split.sequence_parallel:
        raise InputError(
            "experts with tensor parallelism need sequence parallelism, which divides the tokens "
            "among the tensor ranks before they are routed"
        )


def _tensor_sizes(architecture: Architecture) -> Iterable[tuple[int, str]]:
    yield architecture.attention.heads, "heads"
    yield architecture.feed_forward.width, "elements of the feed-forward"
    if architecture.experts is not None and architecture.experts.shared_width is not None:
        yield architecture.experts.shared_width, "elements of the shared experts"
    if architecture.tuning is not None and architecture.tuning.rank is not None:
        yield architecture.tuning.rank, "rows of a LoRA adapter"
        yield architecture.hidden, "elements of a hidden state, the outputs of LoRA adapters"


def _require_divides(degree: int, size: int, what: str, of: str) -> None:
    if size % degree:
        near = nearest_divisors(size, degree)
        raise InputError(
            f"{what} {degree} does not divide {size} {of}; the nearest are "
            f"{' and '.join(map(str, near))}"
        )


def nearest_divisors(size: int, degree: int) -> tuple[int, ...]:
    """The divisors of ``size`` next below and above ``degree``."""
    below = next(one for one in range(min(degree, size), 0, -1) if size % one == 0)
    above = next((one for one in range(degree, size + 1) if size % one == 0), None)
    return tuple(sorted({below, *([above] if above else [])}))


def narrow(architecture: Architecture, tensor: int) -> Architecture:
    """The model on one of ``tensor`` ranks: part of heads, feed-forwards, padded vocabulary."""
    attention: GroupedAttention | LatentAttention
    if isinstance(architecture.attention, GroupedAttention):
        grouped = architecture.attention
        attention = replace(
            grouped,
            heads=grouped.heads // tensor,
            key_value_heads=max(1, grouped.key_value_heads // tensor),
        )
    else:
        attention = replace(architecture.attention, heads=architecture.attention.heads // tensor)
    experts, feed_forward = architecture.experts, architecture.feed_forward
    tuning = architecture.tuning
    if experts is not None and experts.shared_width is not None:
        experts = replace(experts, shared_width=experts.shared_width // tensor)
    return replace(
        architecture,
        attention=attention,
        feed_forward=replace(feed_forward, width=feed_forward.width // tensor),
        experts=experts,
        vocabulary=-(-architecture.vocabulary // tensor),
        tuning=None if tuning is None else replace(tuning, ranks=tensor),
    )
