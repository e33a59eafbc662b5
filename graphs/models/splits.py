"""Which degrees divide a transformer, and the model on one tensor rank."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import (
    Architecture,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    Variant,
)
from stagewright.graphs.models.mixers import AnyMixer
from stagewright.graphs.models.recurrences import (
    RECURRENT,
    Recurrence,
    SelectiveScan,
    ShortConvolution,
)
from stagewright.graphs.models.towers import Tower

if TYPE_CHECKING:
    from stagewright.graphs.models.shards import LayerSplit


def require_split(architecture: Architecture, sequence: int, split: "LayerSplit") -> None:
    """Raise in one line, with the nearest values that work, where a size is not divisible.

    Raises InputError if ``tensor`` does not divide the heads or a width, if key-value heads and
    ``tensor`` do not divide one another, if ``context`` does not divide the sequence or a block has
    a recurrence, or if ``expert`` does not divide the experts.
    """
    if architecture.tower is not None:
        _, tokens = architecture.tower.sequences(1, sequence)
        _require_own_split(tokens, "tokens of an encoder or a tower", split)
    if architecture.diffusion is not None and architecture.diffusion.text is not None:
        _require_own_split(architecture.diffusion.text.tokens, "tokens of the text", split)
    for size, what in _tensor_sizes(architecture):
        _require_divides(split.tensor, size, "tensor degree", what)
    for mixer in _every_mixer(architecture):
        _require_mixer(mixer, split)
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


@lru_cache(maxsize=1024)
def mixers_of(architecture: Architecture) -> tuple[AnyMixer, ...]:
    """The different mixers of a model's blocks."""
    every = (architecture.parts(index).mixers for index in range(architecture.layers))
    return tuple(dict.fromkeys(chain.from_iterable(every)))


def _every_mixer(architecture: Architecture) -> Iterable[AnyMixer]:
    """The mixers of the blocks, and the common one, which no block may have."""
    return dict.fromkeys((architecture.attention, *mixers_of(architecture)))


def _require_mixer(mixer: AnyMixer, split: "LayerSplit") -> None:
    """Raise InputError where tensor ranks cannot share a mixer, or context ranks its sequence."""
    if isinstance(mixer, RECURRENT) and split.context > 1:
        raise InputError(
            f"context degree {split.context}: a recurrence passes its state along the sequence; it "
            "must be 1"
        )
    if isinstance(mixer, SelectiveScan) and split.tensor > 1:
        raise InputError(
            f"tensor degree {split.tensor}: a selective scan has no heads to divide; it must be 1"
        )
    shared = {GroupedAttention: "key_value_heads", Recurrence: "groups"}.get(type(mixer))
    heads = 1 if shared is None else getattr(mixer, shared)
    if heads % split.tensor and split.tensor % heads:
        what = "key-value heads" if shared == "key_value_heads" else "groups of heads"
        raise InputError(
            f"tensor degree {split.tensor} and {heads} {what}: one must divide the other"
        )


def _require_own_split(tokens: int, what: str, split: "LayerSplit") -> None:
    if split.context > 1:
        raise InputError(
            f"context degree {split.context}: the {what} are not divided; it must be 1"
        )
    if split.sequence_parallel:
        _require_divides(split.tensor, tokens, "tensor degree with sequence parallelism", what)


def _tensor_sizes(architecture: Architecture) -> Iterable[tuple[int, str]]:
    for mixer in _every_mixer(architecture):
        if isinstance(mixer, ShortConvolution):
            yield mixer.width, "channels of a convolution"
        elif not isinstance(mixer, SelectiveScan):
            yield mixer.heads, "heads"
    for width in {one.width for one in _feed_forwards(architecture)}:
        yield width, "elements of the feed-forward"
    if architecture.experts is not None and architecture.experts.shared_width is not None:
        yield architecture.experts.shared_width, "elements of the shared experts"
    if architecture.tuning is not None and architecture.tuning.rank is not None:
        yield architecture.tuning.rank, "rows of a LoRA adapter"
        yield architecture.hidden, "elements of a hidden state, the outputs of LoRA adapters"


def _feed_forwards(architecture: Architecture) -> Iterable[FeedForward]:
    own = [one.feed_forward for one in (*architecture.variants, architecture.tower) if one]
    return (architecture.feed_forward, *(one for one in own if one is not None))


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
    experts, tuning = architecture.experts, architecture.tuning
    if experts is not None and experts.shared_width is not None:
        experts = replace(experts, shared_width=experts.shared_width // tensor)
    return replace(
        architecture,
        attention=_narrow_mixer(architecture.attention, tensor),
        feed_forward=_narrow_width(architecture.feed_forward, tensor),
        experts=experts,
        vocabulary=-(-architecture.vocabulary // tensor),
        tuning=None if tuning is None else replace(tuning, ranks=tensor),
        variants=tuple(_narrow_variant(one, tensor) for one in architecture.variants),
        tower=None if architecture.tower is None else _narrow_tower(architecture.tower, tensor),
    )


def _narrow_tower(tower: Tower, tensor: int) -> Tower:
    """The tower on a tensor rank; what is before and after its blocks stays whole."""
    heads = tower.attention.heads // tensor
    return replace(
        tower,
        attention=replace(tower.attention, heads=heads, key_value_heads=heads),
        feed_forward=_narrow_width(tower.feed_forward, tensor),
    )


def _narrow_variant(of: Variant, tensor: int) -> Variant:
    mixers, own = of.mixers, of.feed_forward
    return replace(
        of,
        mixers=mixers if mixers is None else tuple(_narrow_mixer(one, tensor) for one in mixers),
        feed_forward=own if own is None else _narrow_width(own, tensor),
    )


def _narrow_width(of: FeedForward, tensor: int) -> FeedForward:
    return replace(of, width=of.width // tensor)


def _narrow_mixer(mixer: AnyMixer, tensor: int) -> AnyMixer:
    if isinstance(mixer, GroupedAttention):
        groups = max(1, mixer.key_value_heads // tensor)
        # One that no block has may have fewer heads than there are ranks.
        return replace(mixer, heads=max(1, mixer.heads // tensor), key_value_heads=groups)
    if isinstance(mixer, Recurrence):
        groups = max(1, mixer.groups // tensor)
        return replace(mixer, heads=mixer.heads // tensor, groups=groups)
    if isinstance(mixer, LatentAttention):
        return replace(mixer, heads=mixer.heads // tensor)
    return replace(mixer, width=mixer.width // tensor)
