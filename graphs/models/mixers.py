"""What mixes the tokens in a block of a transformer: attention or a recurrence."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Tag

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operations import (
    Operators,
    dense,
    elementwise,
    fused_attention,
    norm,
    require_sizes,
)
from stagewright.graphs.models.recurrences import (
    RECURRENT,
    Recurrence,
    SelectiveScan,
    ShortConvolution,
    recurred,
)

if TYPE_CHECKING:
    from stagewright.graphs.models.architecture import Architecture


@documents.record
class GroupedAttention:
    """Attention in which every key-value head serves ``heads / key_value_heads`` query heads.

    ``bias`` is of the projections to queries, keys and values, ``output_bias`` of the one back.
    ``head_norms``: a norm over each head of queries and of keys, as in Qwen3; with ``whole_norms``
    every head has its own weights, whether the norm is over a head (Cohere) or all (OLMo 2).
    ``sinks``: a learned score per head beside those of the tokens (GPT-OSS). ``gate``: the query's
    projection makes a gate of the output too (Qwen3-Next). Without ``key_bias`` the projection to
    keys has no bias where the others have one (Whisper).
    """

    heads: int
    key_value_heads: int
    head_size: int
    bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    sinks: bool = False
    gate: bool = False
    key_bias: bool = True

    def __post_init__(self) -> None:
        require_sizes(self)
        if self.heads % self.key_value_heads:
            raise InputError(
                f"heads ({self.heads}) must be a multiple of key_value_heads "
                f"({self.key_value_heads})"
            )


@documents.record
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), as it is trained.

    Keys and values are projections of a latent vector of ``key_value_rank``, queries of one of
    ``query_rank`` (None: of the input). A head has ``plain_size + rotary_size`` elements of queries
    and keys, and ``value_size`` of values; all heads share the rotary part of the keys. ``bias``
    is of the projections to the latent vectors and of the one back.
    """

    heads: int
    key_value_rank: int
    plain_size: int
    rotary_size: int
    value_size: int
    query_rank: int | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        require_sizes(self)

    @property
    def key_size(self) -> int:
        """Elements of a head's query or key."""
        return self.plain_size + self.rotary_size


AnyAttention: TypeAlias = LatentAttention | GroupedAttention

AnyMixer = Annotated[
    Annotated[LatentAttention, Tag("latent")]
    | Annotated[GroupedAttention, Tag("grouped")]
    | Annotated[Recurrence, Tag("recurrence")]
    | Annotated[SelectiveScan, Tag("selective")]
    | Annotated[ShortConvolution, Tag("convolution")],
    documents.told_by(
        {
            "key_value_rank": "latent",
            "rule": "recurrence",
            "step_rank": "selective",
            "kernel": "convolution",
        },
        "grouped",
    ),
]
"""A mixer; documents tell it by a field that no other has."""


def mixed(
    mixer: AnyMixer, of: "Architecture", samples: int, sequence: int, window: int | None
) -> Operators:
    """The operators of a mixer in a block of a model."""
    if isinstance(mixer, RECURRENT):
        return recurred(mixer, of.hidden, samples, sequence)
    if isinstance(mixer, LatentAttention):
        return _latent_attention(mixer, of, samples, sequence, window)
    return _grouped_attention(mixer, of, samples, sequence, window)


def _grouped_attention(
    mixer: GroupedAttention, of: "Architecture", samples: int, sequence: int, window: int | None
) -> Operators:
    rows, heads = samples * sequence, mixer.heads + mixer.key_value_heads
    size = mixer.head_size
    inputs = (heads + mixer.key_value_heads + (mixer.heads if mixer.gate else 0)) * size
    inward = dense(rows, of.hidden, inputs, bias=mixer.bias)
    unbiased = 0 if mixer.key_bias or not mixer.bias else mixer.key_value_heads * size
    found = {"query, key, value": replace(inward, parameters=inward.parameters - unbiased)}
    if mixer.head_norms:  # two norms, of as many parameters as a head has elements
        found["head norms"] = of.norm_of(rows * heads * size, 2 * size)
    if mixer.whole_norms:
        found["head norms"] = norm(rows * heads * size, heads * size, bias=False)
    if mixer.sinks:
        found["sinks"] = replace(elementwise(0), parameters=mixer.heads)
    if of.positions is None and of.rotary:
        found["rotary"] = elementwise(rows * heads * size)
    found["attention"] = fused_attention(
        samples, mixer.heads, sequence, size, key_heads=mixer.key_value_heads, window=window,
        causal=of.is_causal, chunked=of.chunked,
    )  # fmt: skip
    width = mixer.heads * size
    if mixer.gate:  # keeps the attention's output, and the sigmoid
        found["attention scale"] = elementwise(rows * width, operands=2, saved=2 * rows * width)
    found["output"] = dense(rows, width, of.hidden, bias=mixer.output_bias)
    return found


def _latent_attention(
    mixer: LatentAttention, of: "Architecture", samples: int, sequence: int, window: int | None
) -> Operators:
    rows, queries = samples * sequence, mixer.heads * mixer.key_size
    latent = mixer.key_value_rank + mixer.rotary_size
    down = dense(rows, of.hidden, (mixer.query_rank or queries) + latent, bias=False)
    biases = (latent + (mixer.query_rank or 0)) if mixer.bias else 0
    found = {"latent": replace(down, parameters=down.parameters + biases)}
    if mixer.query_rank is not None:
        found["query norm"] = of.norm_of(rows * mixer.query_rank, mixer.query_rank)
        found["query"] = dense(rows, mixer.query_rank, queries, bias=False)
    found["key-value norm"] = of.norm_of(rows * mixer.key_value_rank, mixer.key_value_rank)
    keys = mixer.heads * (mixer.plain_size + mixer.value_size)
    found["key, value"] = dense(rows, mixer.key_value_rank, keys, bias=False)
    # Rotates queries and the shared keys, and writes the keys of all heads.
    found["rotary"] = elementwise(rows * mixer.heads * (mixer.key_size + mixer.rotary_size))
    found["attention"] = fused_attention(
        samples, mixer.heads, sequence, mixer.key_size, value=mixer.value_size, window=window,
        causal=of.is_causal,
    )  # fmt: skip
    found["output"] = dense(rows, mixer.heads * mixer.value_size, of.hidden, bias=mixer.bias)
    return found
