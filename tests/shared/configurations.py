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
FEW = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GROUPS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 12,
}  # fmt: skip
LATENT = {
    **GROUPS, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
SHORT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 90}
OTHER_FIELDS = {
    "mixtral": ROUTED,
    "qwen2_moe": FEW | {"shared_expert_intermediate_size": 20},
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
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12},
    "dots1": GROUPS | {"n_shared_experts": 1},
}  # fmt: skip
SMALL = {kind: sized(kind, 3, 32, 4, 2, 48, 90) | OTHER_FIELDS.get(kind, {}) for kind in TYPES}
SMALL |= {one: {"model_type": one, **SHORT} for one in ("gpt2", "gpt_bigcode")}
"""Every type, in sizes that ``transformers`` builds too."""
