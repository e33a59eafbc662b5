"""Encoders and towers for images of transformers: which fields of a ``config.json`` mean what.

An encoder is a part of the entry of its decoder. A tower is an entry by the type of its own
configuration, and a projector by the type of the whole model. An image has the size that the
configuration names, or else :data:`PATCHES` patches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.importers.config_fields import Cell, Field, Fields
from stagewright.graphs.importers.hf_fields import EncoderFields, ModelType
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.graphs.models.towers import Projection, Tower

_TIED: Field = ("tie_word_embeddings", True)

_T5 = ModelType(
    layers="num_decoder_layers|num_layers", hidden="d_model", heads="num_heads", groups=None,
    head_size=("d_kv", 64), bias=False, width="d_ff", gated=("feed_forward_proj", "relu"),
    epsilon=("layer_norm_epsilon", 1e-6), base=None, rotary=False, tied=_TIED,
    dropout=("dropout_rate", 0.1),
    encoder_blocks=EncoderFields(
        layers="num_layers", heads="num_heads", width="d_ff",
        scores=("relative_attention_num_buckets", 32),
    ),
)  # fmt: skip
_MT5 = replace(_T5, gated=("feed_forward_proj", "gated-gelu"))
_BART = ModelType(
    layers="decoder_layers", hidden="d_model", heads="decoder_attention_heads", groups=None,
    head_size=None, bias=True, width="decoder_ffn_dim", gated=("activation_function", "gelu"),
    mlp_bias=True, norm="layer", epsilon=None, base=None, embedding_norm=True, final_norm=False,
    positions=("max_position_embeddings", 1024), offset=2, tied=_TIED, dropout=("dropout", 0.1),
    encoder_blocks=EncoderFields(output_norm=False),
)  # fmt: skip
_MARIAN = replace(_BART, offset=0, embedding_norm=False)

ENCODER_DECODERS: dict[str, ModelType] = {
    "t5": _T5,
    "mt5": _MT5,
    "umt5": replace(
        _MT5, encoder_blocks=EncoderFields(
            layers="num_layers", heads="num_heads", width="d_ff", every=True,
            scores=("relative_attention_num_buckets", 32),
        ),
    ),
    "bart": _BART,
    "marian": _MARIAN,
    "pegasus": replace(_MARIAN, final_norm=True, encoder_blocks=EncoderFields()),
    "mbart": replace(_BART, final_norm=True, encoder_blocks=EncoderFields()),
    "m2m_100": replace(
        _MARIAN, positions=None, rotary=False, final_norm=True, encoder_blocks=EncoderFields()
    ),
    "whisper": replace(
        _MARIAN, key_bias=False, positions=("max_target_positions", 448), final_norm=True,
        dropout=("dropout", 0.0),
        encoder_blocks=EncoderFields(
            tokens=("max_source_positions", 1500), channels=("num_mel_bins", 80)
        ),
    ),
}  # fmt: skip


PATCHES = 1024
"""Patches of an image where a configuration names no size: of 448 x 448 pixels in Qwen2-VL."""


def with_encoder(of: EncoderFields, decoder: Architecture, fields: Fields) -> Architecture:
    """The decoder behind its encoder."""
    heads, width = fields.size(of.heads), fields.size(of.width)
    mixer, layers = decoder.attention, fields.layers(of.layers)
    assert isinstance(mixer, GroupedAttention)
    size = mixer.head_size * mixer.heads // heads
    tokens, channels = fields.optional_size(of.tokens), fields.optional_size(of.channels)
    tower = Tower(
        layers=layers,
        hidden=decoder.hidden,
        attention=replace(mixer, heads=heads, key_value_heads=heads, head_size=size),
        feed_forward=replace(decoder.feed_forward, width=width),
        norm="rms" if decoder.norm == "rms" else "layer",
        tokens=tokens,
        stem=tuple(_convolutions(tokens, channels, decoder.hidden)) if tokens and channels else (),
        positions=tokens or decoder.positions,
        unused_positions=None if tokens else decoder.unused_positions,
        input_norm=decoder.embedding_norm,
        output_norm=of.output_norm,
        score_table=None if of.scores is None else fields.size(of.scores),
        score_tables=of.every,
    )
    return replace(decoder, layers=layers + decoder.layers, tower=tower)


def _convolutions(tokens: int, channels: int, hidden: int) -> Iterator[Projection]:
    """Two convolutions of three frames, the second with half as many outputs (Whisper)."""
    yield Projection(2 * tokens, 3 * channels, hidden, bias=True, activation=True)
    yield Projection(tokens, 3 * hidden, hidden, bias=True, activation=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFields:
    """Fields of a tower for images; by default those of CLIP without what few others have."""

    layers: Cell = "num_hidden_layers"
    hidden: Cell = "hidden_size"
    heads: Cell = "num_attention_heads"
    width: Cell = "intermediate_size"
    ratio: Cell = None
    image: Cell = "image_size"
    patch: Cell = "patch_size"
    frames: Cell = None
    norm: Literal["layer", "rms"] = "layer"
    gated: bool = False
    bias: Field | bool = True
    output_bias: bool | None = None
    head_norms: Field | bool = False
    mlp_bias: bool = True
    patch_bias: bool = True
    class_token: bool = False
    positions: bool = True
    grid: Cell = None
    rotary: bool = False
    input_norm: bool = False
    output_norm: bool = True
    scales: bool = False
    window: Cell = None
    full: str | None = None
    required: tuple[tuple[str, bool], ...] = ()


_SIGLIP = VisionFields(required=(("vision_use_head", False),))
_QWEN2 = VisionFields(
    layers="depth", hidden="embed_dim", heads="num_heads", width=None, ratio=("mlp_ratio", 4),
    image=("image_size", None), frames=("temporal_patch_size", 2), patch=("patch_size", 14),
    patch_bias=False, positions=False, rotary=True, output_norm=False,
)  # fmt: skip

VISION: dict[str, VisionFields] = {
    "clip_vision_model": VisionFields(patch_bias=False, class_token=True, input_norm=True),
    "siglip_vision_model": _SIGLIP,
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": replace(
        _QWEN2, hidden="hidden_size", width="intermediate_size", ratio=None, norm="rms", gated=True,
        window=("window_size", 112), full="fullatt_block_indexes",
    ),
    "qwen3_vl": replace(
        _QWEN2, hidden="hidden_size", width="intermediate_size", ratio=None,
        patch=("patch_size", 16), patch_bias=True, grid=("num_position_embeddings", 2304),
    ),
    "pixtral": VisionFields(
        norm="rms", gated=True, bias=False, mlp_bias=False, patch_bias=False, positions=False,
        rotary=True, input_norm=True, output_norm=False,
    ),
    "llama4_vision_model": VisionFields(patch_bias=False, class_token=True, input_norm=True),
    "internvl_vision": VisionFields(
        bias=("attention_bias", False), output_bias=True, head_norms=("use_qk_norm", False),
        class_token=True, output_norm=False, scales=True, required=(("use_mean_pooling", True),),
    ),
    "idefics3": VisionFields(),
}  # fmt: skip
"""Towers by the type of their configuration."""

_Projector = Callable[[Fields, Fields, Tower, int], tuple[int, tuple[Projection, ...]]]
"""Of whole model and tower, and the text model's hidden size: tokens of an image, linear layers."""


def _chain(vectors: int, sizes: tuple[int, ...], *, bias: bool) -> tuple[Projection, ...]:
    """Linear layers with an activation between them."""
    return tuple(
        Projection(vectors, inputs, outputs, bias=bias, activation=place < len(sizes) - 2)
        for place, (inputs, outputs) in enumerate(pairwise(sizes))
    )


def _merged(tower: Tower, side: int) -> tuple[int, int]:
    """Vectors of an image, of side x side patches each, and the elements of a vector."""
    patches, rest = divmod(tower.stem[0].vectors, side**2)
    if rest:
        raise InputError(f"{tower.stem[0].vectors} patches are no multiple of {side} x {side}")
    return patches, side**2 * tower.hidden


def _llava(of: Fields, _: Fields, tower: Tower, hidden: int) -> Any:
    layers = of.get(("vision_feature_layer", -2))
    inputs = tower.hidden * (len(layers) if isinstance(layers, list) else 1)
    whole = of.get(("vision_feature_select_strategy", "default")) == "full"
    vectors = (tower.tokens or 0) if whole else tower.stem[0].vectors
    bias = of.flag(("multimodal_projector_bias", True))
    return vectors, _chain(vectors, (inputs, hidden, hidden), bias=bias)


def _gemma3(of: Fields, _: Fields, tower: Tower, hidden: int) -> Any:
    vectors = of.size(("mm_tokens_per_image", 256))
    only = Projection(vectors, tower.hidden, hidden, norm=tower.hidden, scales_alone=True)
    return vectors, (only,)


def _qwen2(_: Fields, vision: Fields, tower: Tower, hidden: int) -> Any:
    vectors, wide = _merged(tower, vision.size(("spatial_merge_size", 2)))
    first, *rest = _chain(vectors, (wide, wide, hidden), bias=True)
    return vectors, (replace(first, norm=tower.hidden), *rest)


def _qwen3(of: Fields, vision: Fields, tower: Tower, hidden: int) -> Any:
    vectors, (first, last) = _qwen2(of, vision, tower, hidden)
    deep = vision.get(("deepstack_visual_indexes", [8, 16, 24]))
    number = len(deep) if isinstance(deep, list) else 0
    return vectors, (first, last, *number * (replace(first, norm=first.inputs), last))


def _mistral3(of: Fields, _: Fields, tower: Tower, hidden: int) -> Any:
    vectors, wide = _merged(tower, of.size(("spatial_merge_size", 2)))
    merging = Projection(vectors, wide, tower.hidden, norm=tower.hidden)
    bias = of.flag(("multimodal_projector_bias", False))
    return vectors, (merging, *_chain(vectors, (tower.hidden, hidden, hidden), bias=bias))


def _llama4(_: Fields, vision: Fields, tower: Tower, hidden: int) -> Any:
    vectors, wide = _merged(tower, _side(vision.get(("pixel_shuffle_ratio", 0.5))))
    sizes = [vision.size((f"projector_{end}_dim", 4096)) for end in ("input", "output")]
    first, second = _chain(vectors, (wide, *sizes), bias=False)
    both = replace(first, activation=True), replace(second, activation=True)
    return vectors, (*both, Projection(vectors, sizes[1], hidden))


def _internvl(of: Fields, _: Fields, tower: Tower, hidden: int) -> Any:
    vectors, wide = _merged(tower, _side(of.get(("downsample_ratio", 0.5))))
    first, *rest = _chain(vectors, (wide, hidden, hidden), bias=True)
    return vectors, (replace(first, norm=wide), *rest)


def _idefics3(of: Fields, _: Fields, tower: Tower, hidden: int) -> Any:
    vectors, wide = _merged(tower, of.size(("scale_factor", 2)))
    return vectors, (Projection(vectors, wide, hidden),)


def _side(ratio: Any) -> int:
    """Patches of a side that become one, of the ratio by which a side shrinks."""
    if not isinstance(ratio, float) or not 0 < ratio <= 1 or (1 / ratio) % 1:
        raise InputError(f"a ratio of sides must be 1 over an integer, got {ratio!r}")
    return round(1 / ratio)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model with a tower: its projector, and the types of tower and text model if not named."""

    projector: _Projector
    vision: str
    text: str | None = None


WRAPPERS: dict[str, Wrapper] = {
    "llava": Wrapper(_llava, "clip_vision_model", "llama"),
    "gemma3": Wrapper(_gemma3, "siglip_vision_model", "gemma3_text"),
    "qwen2_vl": Wrapper(_qwen2, "qwen2_vl", "qwen2"),
    "qwen2_5_vl": Wrapper(_qwen2, "qwen2_5_vl", "qwen2"),
    "qwen3_vl": Wrapper(_qwen3, "qwen3_vl", "qwen3"),
    "qwen3_vl_moe": Wrapper(_qwen3, "qwen3_vl", "qwen3_moe"),
    "mistral3": Wrapper(_mistral3, "pixtral", "mistral"),
    "llama4": Wrapper(_llama4, "llama4_vision_model", "llama4_text"),
    "internvl": Wrapper(_internvl, "internvl_vision"),
    "idefics3": Wrapper(_idefics3, "idefics3", "llama"),
    "smolvlm": Wrapper(_idefics3, "idefics3", "llama"),
}
"""Models with a tower for images, by their type."""


def text_type(kind: str, named: Any) -> Any:
    """The type of a text model: that which a configuration names, or what it is of a wrapper."""
    own = WRAPPERS[kind].text if kind in WRAPPERS else None
    is_own = named is None or str(named).startswith(kind)
    return own if own is not None and is_own else named


def with_vision(kind: str, text: Architecture, values: dict[str, Any]) -> Architecture:
    """The text model behind the tower of its wrapper, with one image in a sample."""
    of, inner = WRAPPERS[kind], values.get("vision_config")
    if not isinstance(inner, dict):
        return replace(text, left_out=f"what {kind} has beside its text model")
    named = inner.get("model_type", of.vision)
    known = named if named in VISION else of.vision
    if named not in VISION and not str(named).startswith((of.vision, kind)):
        return replace(text, left_out=f"the {named} of {kind}")
    fields, whole = Fields(inner), Fields(values)
    with naming("vision_config"):
        tower = _tower(VISION[known], fields)
        outputs, projector = of.projector(whole, fields, tower, text.hidden)
    tower = replace(tower, outputs=outputs, projector=projector)
    return replace(text, name=kind, layers=tower.layers + text.layers, tower=tower)


def _tower(of: VisionFields, fields: Fields) -> Tower:
    for name, wanted in of.required:
        fields.require(name, wanted)
    hidden, heads = fields.size(of.hidden), fields.size(of.heads)
    if hidden % heads:
        raise InputError(f"{fields.name(of.hidden)} {hidden} is no multiple of {heads} heads")
    patch = _one(fields, of.patch)
    patches, grid = _patches(of, fields, patch), fields.optional_size(of.grid)
    tokens = patches + of.class_token
    width = fields.optional_size(of.width) or hidden * fields.size(of.ratio)
    channels = fields.size(("num_channels|in_channels|in_chans", 3))
    pixels = channels * (fields.optional_size(of.frames) or 1) * patch**2
    bias, layers = fields.flag(of.bias), fields.layers(of.layers)
    window = fields.optional_size(of.window)
    return Tower(
        layers=layers,
        hidden=hidden,
        attention=GroupedAttention(
            heads, heads, hidden // heads, bias=bias,
            output_bias=bias if of.output_bias is None else of.output_bias,
            whole_norms=fields.flag(of.head_norms),
        ),
        feed_forward=FeedForward(width, gated=of.gated, bias=of.mlp_bias),
        norm=of.norm,
        tokens=tokens,
        stem=(Projection(patches, pixels, hidden, bias=of.patch_bias),),
        positions=grid or (tokens if of.positions else None),
        rotary=of.rotary,
        vectors=1 if of.class_token else None,
        input_norm=of.input_norm,
        output_norm=of.output_norm,
        scales=of.scales,
        window=None if window is None else (window // patch) ** 2,
        full_layers=frozenset() if of.full is None else _listed(fields, of.full, layers),
    )  # fmt: skip


def _listed(fields: Fields, name: str, layers: int) -> frozenset[int]:
    """The blocks without a window; by default every eighth."""
    return fields.indices(name, layers) if name in fields.values else frozenset(range(7, layers, 8))


def _one(fields: Fields, cell: Cell) -> int:
    """A side, of two equal ones in a list."""
    value = fields.get(cell)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return Fields({fields.name(cell): value}).size(fields.name(cell))


def _patches(of: VisionFields, fields: Fields, patch: int) -> int:
    """Patches of an image."""
    if fields.get(of.image) is not None:
        return (_one(fields, of.image) // patch) ** 2
    if isinstance(of.image, str):
        raise InputError(f"{of.image} is missing; it is the side of an image in pixels")
    return fields.optional_size(of.grid) or PATCHES
