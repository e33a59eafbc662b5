"""Small models of transformers: a class, its mini-batches, and what of it is not as `SMALL`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.any_models import (
    CLASSES,
    IMAGE,
    TOKENS,
    AnyModel,
    Batch,
    captioned,
    labelled,
    masked_text,
    text,
    translation,
)
from benchmarks.any_zoo_batches import (
    dated,
    described,
    hidden_patches,
    long_text,
    long_translation,
    pictured,
    questions,
    series,
    spectra,
    waves,
)

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
    """The module of a class; options that are functions are made when they are needed."""

    def build() -> nn.Module:
        import transformers

        made = {key: one() if callable(one) else one for key, one in options.items()}
        return silent(getattr(transformers, model)(tiny(config, **made)))

    return build


SPEECH: Options = {
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "ctc_zero_infinity": True,
}
FIRST: Options = {"decoder_start_token_id": 0}
STAGES: Options = {"hidden_sizes": [16, 24, 32, 40], "depths": [1, 2, 2, 1], "patch_size": 2}
SWIN: Options = {
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "patch_size": 2,
    "image_size": IMAGE,
}
TEXT_TOWER: Options = {"eos_token_id": TOKENS - 1}
TIMES: Options = {
    "prediction_length": 4,
    "context_length": 16,
    "num_time_features": 2,
    "lags_sequence": [1, 2, 7],
}
MLA: Options = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}


def sub(config: str, **options: Any) -> Callable[[], Any]:
    """A part's configuration, made when it is needed."""
    return lambda: tiny(config, **options)


Row = tuple[str, str, Callable[[int, torch.Generator], Batch], Options]

# Decoders, of which the name of the configuration is that of the model.
CAUSAL: dict[str, Options] = {
    "GPTNeo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "GPTNeoX": {},
    "GPTJ": {},
    "OPT": {},
    "Bloom": {},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "Mpt": {},
    "StableLm": {},
    "CodeGen": {},
    "Olmo2": {},
    "Cohere": {},
    "Exaone4": {},
    "Glm4": {},
    "Qwen2Moe": {},
    "DeepseekV3": MLA,
    "GptOss": {},
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 4},
    "RecurrentGemma": {
        "lru_width": WIDTH,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "use_mamba_kernels": False,
    },
}
MASKED: dict[str, Options] = {
    "DistilBert": {},
    "Albert": {},
    "Deberta": {},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "MPNet": {},
    "MobileBert": {"intra_bottleneck_size": 16, "true_hidden_size": 16},
    "ConvBert": {},
    "RoFormer": {},
    "ModernBert": {"global_attn_every_n_layers": 2},
    "Nystromformer": {"segment_means_seq_len": 8, "num_landmarks": 8},
}
SEQ2SEQ: dict[str, Options] = {
    "Bart": {},
    "M2M100": {},
    "MT5": FIRST,
    "SwitchTransformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, **FIRST},
}
IMAGES: dict[str, Options] = {
    "Beit": {"use_relative_position_bias": True},
    "Dinov2": {},
    "Swin": SWIN,
    "Swinv2": SWIN,
    "ConvNext": STAGES,
    "ResNet": {"hidden_sizes": [16, 24, 32, 40], "depths": [1, 2, 2, 1], "embedding_size": 16},
    "MobileViT": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32]},
    "Segformer": {
        "hidden_sizes": [8, 16, 16, 32],
        "num_attention_heads": [1, 2, 2, 4],
        "depths": [1, 1, 1, 1],
    },
    "Pvt": {
        "hidden_sizes": [8, 16, 16, 32],
        "num_attention_heads": [1, 2, 2, 4],
        "depths": [1, 1, 1, 1],
        "patch_sizes": [4, 2, 2, 2],
    },
}
OTHERS: dict[str, Row] = {
    "funnel": (
        "FunnelForMaskedLM",
        "FunnelConfig",
        masked_text,
        {"block_sizes": [1, 1, 1], "num_decoder_layers": 1},
    ),
    "fnet": ("FNetForMaskedLM", "FNetConfig", text, {}),
    "xlnet": ("XLNetLMHeadModel", "XLNetConfig", text, {}),
    "longformer": ("LongformerForMaskedLM", "LongformerConfig", text, {"attention_window": 4}),
    "big-bird": (
        "BigBirdForMaskedLM",
        "BigBirdConfig",
        long_text,
        {"attention_type": "original_full"},
    ),
    "ctrl": ("CTRLLMHeadModel", "CTRLConfig", text, {"dff": 64}),
    "led": (
        "LEDForConditionalGeneration",
        "LEDConfig",
        long_translation,
        {
            "attention_window": 4,
            "max_encoder_position_embeddings": FAR,
            "max_decoder_position_embeddings": FAR,
        },
    ),
    "longt5": (
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        long_translation,
        {"local_radius": 4, **FIRST},
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", waves, SPEECH),
    "hubert": ("HubertForCTC", "HubertConfig", waves, SPEECH),
    "wavlm": ("WavLMForCTC", "WavLMConfig", waves, {**SPEECH, "num_buckets": 8}),
    "audio-spectrogram": (
        "ASTForAudioClassification",
        "ASTConfig",
        spectra,
        {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
    ),
    "vit-mae": (
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        hidden_patches,
        {
            "decoder_hidden_size": WIDTH,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": HEADS,
            "decoder_intermediate_size": 64,
            "mask_ratio": 0.5,
        },
    ),
    "siglip": (
        "SiglipModel",
        "SiglipConfig",
        captioned,
        {
            "text_config": lambda: tiny("SiglipTextConfig", projection_size=WIDTH).to_dict(),
            "vision_config": lambda: tiny("SiglipVisionConfig").to_dict(),
        },
    ),
    "git": (
        "GitForCausalLM",
        "GitConfig",
        described,
        {"vision_config": lambda: tiny("GitVisionConfig").to_dict()},
    ),
    "vilt": ("ViltForQuestionAnswering", "ViltConfig", questions, {"max_image_length": -1}),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        pictured,
        {
            "text_config": sub("LlamaConfig"),
            "vision_config": sub("CLIPVisionConfig"),
            "image_token_index": TOKENS - 1,
            "image_token_id": TOKENS - 1,
        },
    ),
    "patchtst": (
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        series,
        {
            "num_input_channels": 2,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
        },
    ),
    "patchtsmixer": (
        "PatchTSMixerForPrediction",
        "PatchTSMixerConfig",
        series,
        {
            "num_input_channels": 2,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
        },
    ),
    "time-series": (
        "TimeSeriesTransformerForPrediction",
        "TimeSeriesTransformerConfig",
        dated,
        TIMES,
    ),
}


def _rows() -> dict[str, Row]:
    return {
        **{
            one.lower(): (f"{one}ForCausalLM", f"{one}Config", text, options)
            for one, options in CAUSAL.items()
        },
        **{
            one.lower(): (f"{one}ForMaskedLM", f"{one}Config", masked_text, options)
            for one, options in MASKED.items()
        },
        **{
            one.lower(): (f"{one}ForConditionalGeneration", f"{one}Config", translation, options)
            for one, options in SEQ2SEQ.items()
        },
        **{
            f"{one.lower()}-hf": (f"{one}ForImageClassification", f"{one}Config", labelled, options)
            for one, options in IMAGES.items()
        },
        **OTHERS,
    }


TRANSFORMERS = tuple(
    AnyModel(name, "transformers", of(model, config, options), draw)
    for name, (model, config, draw, options) in _rows().items()
)
