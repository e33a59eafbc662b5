"""``config.json`` files of diffusers: transformers that take noise from latents.

A token is a patch of the latents. Absent fields have the defaults of diffusers 0.42. How long a
text is no configuration says: the tokens are those of the published training.
"""

import reprlib
from collections.abc import Callable
from typing import Any

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.config_fields import Fields
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.graphs.models.diffusion import Diffusion, Text

_SD3_TEXT = 154  # 77 of CLIP and 77 of T5: Esser et al. 2024, section B.3
_FLUX_TEXT = 512  # of T5: max_sequence_length of diffusers' FluxPipeline
_PIXART_TEXT = 300  # of T5: PixArt-Sigma (Chen et al. 2024), section 3.1; PixArt-alpha has 120


def diffusers_architecture(values: dict[str, Any]) -> Architecture:
    """The architecture of a diffusion transformer of one of the :data:`CLASSES`.

    Raises InputError for another class, and for a field that is not as the published models have
    it.
    """
    name, fields = values.get("_class_name"), Fields(values)
    if not isinstance(name, str) or name not in CLASSES:
        raise InputError(
            f"_class_name must be one of {', '.join(CLASSES)}; there is {reprlib.repr(name)}, and "
            "other diffusion transformers cannot be priced"
        )
    found = CLASSES[name](fields)
    fields.require_spelling()
    return found


def _architecture(
    name: str, layers: int, attention: GroupedAttention, patch: int, **more: Any
) -> Architecture:
    """What all have: blocks as wide as their attention, and norms without weights."""
    hidden = attention.heads * attention.head_size
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        vocabulary=patch,
        attention=attention,
        feed_forward=FeedForward(4 * hidden, gated=False, bias=True),
        norm="layer-plain",
        logits_bias=True,
        **{"rotary": False} | more,
    )


def _dit(fields: Fields) -> Architecture:
    _require(fields, "norm_type", "ada_norm_zero")
    return _patched(
        "DiTTransformer2DModel",
        fields,
        out=("out_channels", None),
        classes=fields.size(("num_embeds_ada_norm", 1000)) + 1,
    )


def _pixart(fields: Fields) -> Architecture:
    _require(fields, "norm_type", "ada_norm_single")
    sizes = fields.get(("use_additional_conditions", None))
    is_large = fields.size(("sample_size", 128)) == 128
    hidden = fields.size(("num_attention_heads", 16)) * fields.size(("attention_head_dim", 72))
    _require_hidden(fields, "cross_attention_dim", hidden)
    return _patched(
        "PixArtTransformer2DModel",
        fields,
        out=("out_channels", 8),
        text=Text(_PIXART_TEXT, fields.size("caption_channels"), joint=False),
        sizes=is_large if sizes is None else fields.flag(("use_additional_conditions", False)),
    )


def _patched(name: str, fields: Fields, out: tuple[str, Any], **more: Any) -> Architecture:
    """The fields that DiT and PixArt have alike."""
    fields.require("norm_elementwise_affine", False)
    _require(fields, "activation_fn", "gelu-approximate")
    area, channels = fields.size(("patch_size", 2)) ** 2, fields.size(("in_channels", 4))
    bias = fields.flag(("attention_bias", True))
    return _architecture(
        name,
        fields.layers(("num_layers", 28)),
        _attention(fields, 16, 72, bias=bias),
        area * (fields.optional_size(out) or channels),
        dropout=fields.is_positive(("dropout", 0.0)),
        diffusion=Diffusion(area * channels, **more),
    )


def _sd3(fields: Fields) -> Architecture:
    layers, area = fields.layers(("num_layers", 18)), fields.size(("patch_size", 2)) ** 2
    channels, norms = fields.size(("in_channels", 16)), fields.get(("qk_norm", None))
    if norms not in (None, "rms_norm"):
        raise InputError(f"qk_norm must be null or rms_norm, got {reprlib.repr(norms)}")
    attention = _attention(fields, 18, 64, head_norms=norms is not None)
    _require_hidden(fields, "caption_projection_dim", attention.heads * attention.head_size)
    return _architecture(
        "SD3Transformer2DModel",
        layers,
        attention,
        area * (fields.optional_size(("out_channels", 16)) or channels),
        diffusion=Diffusion(
            area * channels,
            text=Text(_SD3_TEXT, fields.size(("joint_attention_dim", 4096)), ends=True),
            pooled=fields.size(("pooled_projection_dim", 2048)),
            doubled=fields.indices("dual_attention_layers", layers),
        ),
    )


def _flux(fields: Fields) -> Architecture:
    single, channels = fields.layers(("num_single_layers", 38)), fields.size(("in_channels", 64))
    area = fields.size(("patch_size", 1)) ** 2
    return _architecture(
        "FluxTransformer2DModel",
        fields.layers(("num_layers", 19)) + single,
        _attention(fields, 24, 128, head_norms=True),
        area * (fields.optional_size(("out_channels", None)) or channels),
        rotary=True,
        diffusion=Diffusion(
            channels,
            text=Text(_FLUX_TEXT, fields.size(("joint_attention_dim", 4096)), single=single),
            pooled=fields.size(("pooled_projection_dim", 768)),
            guidance=fields.flag(("guidance_embeds", False)),
        ),
    )


def _attention(
    fields: Fields, heads: int, size: int, *, bias: bool = True, head_norms: bool = False
) -> GroupedAttention:
    heads = fields.size(("num_attention_heads", heads))
    size = fields.size(("attention_head_dim", size))
    return GroupedAttention(heads, heads, size, bias=bias, output_bias=True, head_norms=head_norms)


def _require_hidden(fields: Fields, name: str, hidden: int) -> None:
    if fields.size((name, 1152)) != hidden:
        raise InputError(f"{name} must be the hidden size, {hidden}")


def _require(fields: Fields, name: str, wanted: str) -> None:
    found = fields.get((name, wanted))
    if found != wanted:
        raise InputError(f"{name} must be {wanted}, got {reprlib.repr(found)}")


CLASSES: dict[str, Callable[[Fields], Architecture]] = {
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
}
"""The classes that are read, by ``_class_name``."""
