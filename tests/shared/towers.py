"""Small configurations of models with an encoder or a tower in front, as transformers has them."""

from configurations import ROUTED, sized

TEXT = sized("llama", 3, 32, 4, 2, 48, 90, head_dim=8)
SIDES = {"image_size": 56, "patch_size": 14, "hidden_size": 32, "intermediate_size": 48,
         "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
DEEP = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48,
        "out_hidden_size": 32}  # fmt: skip


def wrapped(kind, text, vision, **others):
    """A model with a tower of images of 4 x 4 patches."""
    inner = TEXT | {"model_type": text}
    return {"model_type": kind, "text_config": inner, "vision_config": vision, **others}


# Parameters, and FLOPs of a forward of one sample of 16 tokens, as transformers' modules have them.
COUNTED = {
    "llava": (
        wrapped("llava", "llama", SIDES | {"model_type": "clip_vision_model"}), 65_664, 2_156_800,
    ),
    "gemma3": (
        wrapped(
            "gemma3", "gemma3_text",
            SIDES | {"model_type": "siglip_vision_model", "vision_use_head": False},
            mm_tokens_per_image=4,
        ), 61_872, 2_062_336,
    ),
    "mistral3": (
        wrapped("mistral3", "mistral", SIDES | {"model_type": "pixtral"},
                tie_word_embeddings=False), 71_584, 2_201_600,
    ),
    "llama4": (
        wrapped(
            "llama4", "llama4_text",
            SIDES | {
                "intermediate_size": 128, "vision_output_dim": 24, "projector_input_dim": 24,
                "projector_output_dim": 24,
            },
        ), 134_048, 4_256_512,
    ),
    "internvl": (
        wrapped("internvl", "qwen2", SIDES | {"image_size": [56, 56], "patch_size": [14, 14]},
                tie_word_embeddings=False), 69_024, 2_132_224,
    ),
    "idefics3": (wrapped("idefics3", "llama", SIDES), 67_552, 2_086_912),
    "qwen2_vl": (
        wrapped(
            "qwen2_vl", "qwen2_vl_text",
            {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2,
             "image_size": 56},
        ), 104_640, 2_885_632,
    ),
    "qwen2_5_vl": (
        wrapped(
            "qwen2_5_vl", "qwen2_5_vl_text",
            DEEP | {"window_size": 28, "fullatt_block_indexes": [1], "image_size": 56},
        ), 105_568, 2_893_824,
    ),
    "qwen3_vl": (
        wrapped(
            "qwen3_vl", "qwen3_vl_text",
            DEEP | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        ), 135_376, 3_352_576,
    ),
}  # fmt: skip
COUNTED["llama4"][0]["text_config"] |= ROUTED | {
    "intermediate_size_mlp": 40,
    "num_experts_per_tok": 4,
}
