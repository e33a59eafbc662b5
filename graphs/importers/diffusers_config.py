"""``config.json`` files of diffusers: transformers that take noise from latents."""

import reprlib
from typing import Any

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.config_fields import Fields
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.graphs.models.diffusion import Diffusion

DIT = "DiTTransformer2DModel"


def diffusers_architecture(values: dict[str, Any]) -> Architecture:
    """The architecture of a diffusion transformer of the class ``DiTTransformer2DModel``.

    A token is a patch of the latents. Absent fields have the defaults of diffusers 0.42. Raises
    InputError for another class.
    """
    name, fields = values.get("_class_name"), Fields(values)
    if name != DIT or fields.get(("norm_type", "ada_norm_zero")) != "ada_norm_zero":
        raise InputError(
            f"_class_name must be {DIT}, with norm_type ada_norm_zero; there is "
            f"{reprlib.repr(name)}, and other diffusion transformers cannot be priced"
        )
    heads = fields.size(("num_attention_heads", 16))
    size, channels = fields.size(("attention_head_dim", 72)), fields.size(("in_channels", 4))
    area, bias = fields.size(("patch_size", 2)) ** 2, fields.flag(("attention_bias", True))
    return Architecture(
        name=DIT,
        layers=fields.layers(("num_layers", 28)),
        hidden=heads * size,
        vocabulary=area * (fields.optional_size(("out_channels", None)) or channels),
        attention=GroupedAttention(heads, heads, size, bias=bias, output_bias=True),
        feed_forward=FeedForward(4 * heads * size, gated=False, bias=True),
        norm="layer-plain",
        rotary=False,
        logits_bias=True,
        dropout=fields.is_positive(("dropout", 0.0)),
        diffusion=Diffusion(area * channels, fields.size(("num_embeds_ada_norm", 1000)) + 1),
    )
