"""Small models of transformers, listed in ``any_zoo.yaml``, and their mini-batches."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from benchmarks.any_models import (
    CLASSES,
    IMAGE,
    LENGTH,
    TOKENS,
    AnyModel,
    Batch,
    captioned,
    labelled,
    masked_text,
    text,
    tokens,
    translation,
)

ROWS = yaml.safe_load(Path(__file__).with_name("any_zoo.yaml").read_text(encoding="utf-8"))
WIDTH, DEPTH, HEADS, FAR = 32, 4, 4, 64
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), WIDTH
    ),
    **dict.fromkeys(("word_embed_proj_dim", "emb_dim", "state_size", "linear_key_dim"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), DEPTH),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 64),
    **dict.fromkeys(("d_ff", "n_inner", "hidden_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size",), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions"), FAR),
    **dict.fromkeys(("max_target_positions", "max_seq_len", "n_ctx"), FAR),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k"), 2),
    **dict.fromkeys(("mask_time_prob", "mask_feature_prob"), 0.0),
    **{"num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "vocab_size": TOKENS, "rotary_dim": 4},
    **{"image_size": IMAGE, "patch_size": 8, "num_labels": CLASSES, "type_vocab_size": 2},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1},
    **{"num_channels": 3, "num_mel_bins": 8},
}
Options = dict[str, Any]
Draw = Callable[[int, torch.Generator], Batch]


def tiny(config: str, **options: Any) -> Any:
    """A configuration of `SMALL` values as far as it has them, without dropout."""
    import transformers

    kind = getattr(transformers, config)
    plain = kind()
    names = {**plain.to_dict(), **plain.attribute_map, "num_labels": CLASSES}
    drops = {name: 0.0 for name, one in names.items() if "drop" in name and type(one) is float}
    told = {plain.attribute_map.get(name, name) for name in options}
    small = {
        name: value
        for name, value in SMALL.items()
        if name in names and plain.attribute_map.get(name, name) not in told
    }
    made = kind(**{**small, **drops, **options})
    for one in (made, *(getattr(made, name) for name in made.sub_configs)):
        if one is not None:  # grouped products of matrices have no float64
            one._experts_implementation = "eager"
    return made


def silent(model: nn.Module) -> nn.Module:
    """``model`` without random draws."""
    for one in model.modules():
        if isinstance(one, nn.modules.dropout._DropoutNd):
            one.p = 0.0
        for name in ("drop_prob", "layerdrop", "p"):
            if isinstance(getattr(one, name, None), float):
                setattr(one, name, 0.0)
    return model


def of(model: str, config: str, options: Options) -> Callable[[], nn.Module]:
    """The module of a class; configurations of its parts are made when they are needed."""

    def build() -> nn.Module:
        import transformers

        made = {key: _part(one) for key, one in options.items()}
        return silent(getattr(transformers, model)(tiny(config, **made)))

    return build


def _part(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    options = dict(value)
    if "CONFIG" in options:
        return tiny(options.pop("CONFIG"), **options)
    return tiny(options.pop("PLAIN"), **options).to_dict()


def waves(n: int, generator: torch.Generator) -> Batch:
    """Sounds, and the few letters that they say."""
    return {
        "input_values": torch.randn(n, 1200, generator=generator),
        "labels": torch.randint(3, TOKENS, (n, 2), generator=generator),
    }


def spectra(n: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(CLASSES, (n,), generator=generator)
    return {"input_values": torch.randn(n, 32, 16, generator=generator), "labels": labels}


def pictured(n: int, generator: torch.Generator) -> Batch:
    """Text after an image of 16 tokens."""
    written = tokens(n, generator)
    ids = torch.cat([torch.full((n, 16), TOKENS - 1), written.clamp(max=TOKENS - 2)], dim=1)
    pixels = torch.randn(n, 3, IMAGE, IMAGE, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids.clone()}


def described(n: int, generator: torch.Generator) -> Batch:
    """Text about an image."""
    found = captioned(n, generator)
    assert isinstance(found, dict)
    return {**found, "labels": found["input_ids"].clone()} if found.pop("return_loss") else found


def questions(n: int, generator: torch.Generator) -> Batch:
    """Text about an image, and the scores of answers."""
    found = captioned(n, generator)
    assert isinstance(found, dict)
    del found["return_loss"]
    return {**found, "labels": torch.rand(n, CLASSES, generator=generator)}


def hidden_patches(n: int, generator: torch.Generator) -> Batch:
    """Images of which half of the patches, in a given order, are to be found."""
    pixels = torch.randn(n, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "noise": torch.rand(n, 16, generator=generator)}


def series(n: int, generator: torch.Generator) -> Batch:
    values = torch.randn(n, 16, 2, generator=generator)
    return {"past_values": values, "future_values": torch.randn(n, 4, 2, generator=generator)}


def dated(n: int, generator: torch.Generator) -> Batch:
    """One series each, its features of time, and what is observed."""
    past, future = 23, 4
    return {
        "past_values": torch.rand(n, past, generator=generator),
        "past_time_features": torch.rand(n, past, 2, generator=generator),
        "past_observed_mask": torch.ones(n, past),
        "future_values": torch.rand(n, future, generator=generator),
        "future_time_features": torch.rand(n, future, 2, generator=generator),
    }


def long_text(n: int, generator: torch.Generator) -> Batch:
    found = tokens(n, generator, 16)
    return {"input_ids": found, "labels": found.clone()}


def long_translation(n: int, generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(n, generator, 16), "labels": tokens(n, generator, LENGTH // 2)}


KINDS: dict[str, tuple[str, Draw, str]] = {
    "causal": ("ForCausalLM", text, ""),
    "masked": ("ForMaskedLM", masked_text, ""),
    "translation": ("ForConditionalGeneration", translation, ""),
    "labelled": ("ForImageClassification", labelled, "-hf"),
}
DRAWN: dict[str, Draw] = {
    one.__name__: one
    for one in (
        *(text, masked_text, captioned, waves, spectra, pictured, described, questions),
        *(hidden_patches, series, dated, long_text, long_translation),
    )
}


def _models() -> Iterator[AnyModel]:
    for kind, (of_kind, draw, suffix) in KINDS.items():
        for name, options in ROWS[kind].items():
            build = of(f"{name}{of_kind}", f"{name}Config", options)
            yield AnyModel(f"{name.lower()}{suffix}", "transformers", build, draw)
    for name, (model, config, batches, options) in ROWS["others"].items():
        yield AnyModel(name, "transformers", of(model, config, options), DRAWN[batches])


TRANSFORMERS = tuple(_models())
