"""Small configurations of every model type that is read."""

from stagewright.graphs.importers.hf_types import TYPES


def sized(kind, layers, hidden, heads, groups, inner, vocabulary, **others):
    """The fields that most configurations have."""
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": inner,
        "vocab_size": vocabulary, **others,
    }  # fmt: skip


ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
FEW = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    **GROUPS, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
SHORT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 90}
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
DELTA = {
    "head_dim": 8, "full_attention_interval": 2, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 20}
OTHER_FIELDS = {
    "mixtral": ROUTED,
    "qwen2_moe": FEW | SHARED,
    "qwen3": {"head_dim": 16},
    "qwen3_moe": FEW,
    "gpt_oss": ROUTED,
    "phimoe": ROUTED,
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size_mlp": 40,
                    "interleave_moe_layer_step": 2},
    "glm4_moe": GROUPS,
    "glm4_moe_lite": LATENT,
    "deepseek_v2": LATENT | {"first_k_dense_replace": 1},
    "deepseek_v3": LATENT | {"num_hidden_layers": 4},
    "kimi_k2": LATENT | {"num_hidden_layers": 4},
    "minimax_m2": ROUTED,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": ROUTED,
    "granitemoeshared": ROUTED | {"shared_intermediate_size": 20},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": SHORT,
    "gptj": SHORT | {"rotary_dim": 4},
    "codegen": SHORT | {"rotary_dim": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "mamba": {"intermediate_size": 64, "state_size": 6},
    "falcon_mamba": {"intermediate_size": 64, "state_size": 6},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 16},
    "qwen3_next": FEW | DELTA | SHARED | {"mlp_only_layers": [1]},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": FEW | DELTA | SHARED,
    "kimi_linear": {
        "num_hidden_layers": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 5, "linear_num_heads": 4, "linear_head_dim": 6,
        "num_key_value_heads": 4,
    },
    "minimax": ROUTED | {"block_size": 8},
    "nemotron_h": GROUPS | {
        "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4, "head_dim": 8,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2,
        "chunk_size": 16, "moe_shared_expert_intermediate_size": 20,
    },
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": ROUTED | MAMBA2 | {
        "shared_intermediate_size": 20, "layer_types": ["mamba", "attention", "mamba"],
    },
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 64, "head_dim": 8},
    "jamba": {
        "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 6,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "lfm2_moe": FEW | {"layer_types": ["conv", "full_attention", "conv"]},
    "dots1": GROUPS | {"n_shared_experts": 1},
}  # fmt: skip
ENCODED = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "vocab_size": 90,
}  # fmt: skip
SCORED = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3,
          "num_heads": 4, "vocab_size": 90}  # fmt: skip
SMALL = {kind: sized(kind, 3, 32, 4, 2, 48, 90) | OTHER_FIELDS.get(kind, {}) for kind in TYPES}
SMALL |= {one: {"model_type": one, **SHORT} for one in ("gpt2", "gpt_bigcode")}
ENCODERS = {kind for kind, of in TYPES.items() if of.encoder_blocks is not None}
SMALL |= {
    kind: {"model_type": kind, **(SCORED if TYPES[kind].encoder_blocks.scores else ENCODED)}
    for kind in ENCODERS
}
SMALL["marian"] |= {"decoder_vocab_size": 90}
"""Every type, in sizes that ``transformers`` builds too."""
