"""What the blocks of a transformer have: mixers of tokens, a feed-forward or experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.mixers import AnyAttention, AnyMixer
from stagewright.graphs.models.operations import Experts, FeedForward
from stagewright.graphs.models.recurrences import RECURRENT


@documents.record
class Variant:
    """Blocks (counted from 0) that are not as the others of the model, and what they have.

    ``mixers`` of one input, whose outputs are added; none in a block that is a feed-forward alone.
    None stands for the others' ``attention`` or ``feed_forward``. A block without ``fed`` has
    neither feed-forward nor experts; one with a ``feed_forward`` of its own has no experts.
    """

    blocks: frozenset[int]
    mixers: tuple[AnyMixer, ...] | None = None
    feed_forward: FeedForward | None = None
    fed: bool = True


def require_variants(variants: Sequence[Variant], layers: int) -> None:
    """Raise InputError where a block is not in the model, named twice, or cannot be made."""
    seen: set[int] = set()
    for one in variants:
        outside = {index for index in one.blocks if not 0 <= index < layers}
        wrong = sorted(outside | (one.blocks & seen))
        if wrong:
            raise InputError(
                f"variants: block {wrong[0]} must be from 0 to {layers - 1}, and in one variant"
            )
        if one.mixers == () and not one.fed:
            raise InputError("variants: a block must have a mixer or a feed-forward")
        recurrent = [isinstance(mixer, RECURRENT) for mixer in one.mixers or ()]
        if len({*recurrent}) < len(recurrent):
            raise InputError("variants: mixers of one block must be an attention and a recurrence")
        seen |= one.blocks


@dataclass(frozen=True, slots=True)
class Block:
    """What a block has: mixers, a feed-forward or experts or neither, and attention's window."""

    mixers: tuple[AnyMixer, ...]
    feed_forward: FeedForward | None
    experts: Experts | None
    window: int | None = None

    @property
    def attention(self) -> AnyAttention | None:
        """The attention among the mixers, if there is one."""
        every = (one for one in self.mixers if not isinstance(one, RECURRENT))
        return next(every, None)

    @property
    def is_fed(self) -> bool:
        """Whether it has a feed-forward or experts."""
        return self.feed_forward is not None or self.experts is not None


def fields_of(blocks: Sequence[Block], plain: FeedForward) -> dict[str, Any]:
    """The fields of an :class:`Architecture` with these blocks, windows aside.

    The attention, feed-forward and experts of the first blocks that have one are the common ones,
    ``plain`` is the feed-forward where no block has one. Raises InputError if no block mixes
    tokens.
    """
    every = [one.attention or mixer for one in blocks for mixer in one.mixers]
    if not every:
        raise InputError("a model needs a block that mixes tokens, by attention or a recurrence")
    attention = next((one.attention for one in blocks if one.attention), every[0])
    dense = next((one.feed_forward for one in blocks if one.feed_forward), plain)
    experts = next((one.experts for one in blocks if one.experts), None)
    if experts is not None:
        without = frozenset(index for index, one in enumerate(blocks) if one.experts is None)
        experts = replace(experts, dense_layers=without)
    others: dict[Variant, set[int]] = {}
    for index, one in enumerate(blocks):
        variant = Variant(
            blocks=frozenset(),
            mixers=None if one.mixers == (attention,) else one.mixers,
            feed_forward=None if one.feed_forward in (None, dense) else one.feed_forward,
            fed=one.is_fed,
        )
        others.setdefault(variant, set()).add(index)
    others.pop(Variant(blocks=frozenset()), None)
    variants = tuple(replace(one, blocks=frozenset(which)) for one, which in others.items())
    return {
        "attention": attention, "feed_forward": dense, "experts": experts, "variants": variants,
    }  # fmt: skip
