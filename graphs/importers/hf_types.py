"""The model types of transformers that are read: which fields of a ``config.json`` mean what.

A type is an entry; see ``hf_fields``. Names and defaults are those of the configuration classes of
the ``transformers`` package (compared with its release 5). Fields that change neither parameters
nor operators are not read.
"""

from dataclasses import replace

from stagewright.graphs.importers import hf_fields
from stagewright.graphs.importers.config_fields import Field
from stagewright.graphs.importers.hf_fields import ExpertFields, ModelType
from stagewright.graphs.importers.hf_towers import ENCODER_DECODERS
from stagewright.graphs.models import traits

_GELU = "GELU gates"
_UNROTATED = "blocks without rotary positions"
_SCALES = "factors of embeddings, residuals and logits"
_TIED: Field = ("tie_word_embeddings", True)
_DROPPED: Field = ("resid_pdrop", 0.0)
_EPSILON: Field = ("rms_norm_eps", 1e-5)
_LAYER_EPSILON: Field = ("layer_norm_eps", 1e-5)
_WINDOW: Field = ("sliding_window", 4096)
_HALF: Field = ("partial_rotary_factor", 0.5)
_NORMED: Field = ("norm_topk_prob", False)
_QWEN_WINDOW = (("use_sliding_window", False, {"window": _WINDOW}),)

_LLAMA = ModelType(mlp_bias=("mlp_bias", False))
_MISTRAL = ModelType(bias=False, groups=("num_key_value_heads", 8), window=_WINDOW)
_QWEN2 = ModelType(
    groups=("num_key_value_heads", 32), bias=True, output_bias=False,
    pattern=("max_window_layers", 28), when=_QWEN_WINDOW,
)  # fmt: skip
_QWEN3 = replace(
    _QWEN2, head_size=("head_dim", 128), bias=("attention_bias", False), output_bias=None,
    head_norms=True,
)  # fmt: skip
_QWEN_EXPERTS = ExpertFields(
    number="num_experts|num_local_experts", dense=("decoder_sparse_step", 1), normalized=_NORMED
)
_QWEN_SHARED_EXPERTS = replace(_QWEN_EXPERTS, shared="shared_expert_intermediate_size", gate=True)
_GEMMA = ModelType(
    groups=("num_key_value_heads", 16), head_size=("head_dim", 256), tied=_TIED,
    traits=(_GELU, "scaled embeddings"), required=(("use_bidirectional_attention", False),),
)  # fmt: skip
_GEMMA2 = replace(
    _GEMMA, groups=("num_key_value_heads", 4), norms=4, window=_WINDOW, pattern=2,
    traits=(*_GEMMA.traits, "capped scores"),
)  # fmt: skip
_LATENT: tuple[Field, Field, Field, Field, Field] = (
    ("q_lora_rank", 1536), ("kv_lora_rank", 512), ("qk_nope_head_dim", 128),
    ("qk_rope_head_dim", 64), ("v_head_dim", 128),
)  # fmt: skip
_DEEPSEEK_EXPERTS = ExpertFields(
    number="n_routed_experts", shared=("n_shared_experts", 1), each=True,
    dense=("first_k_dense_replace", 3), scores="sigmoid", normalized=("norm_topk_prob", True),
    groups=("n_group", 8), chosen_groups=("topk_group", 4), scale=("routed_scaling_factor", 2.5),
    choice_bias=True, loss=None,
)  # fmt: skip
_DEEPSEEK_V2_EXPERTS = replace(
    _DEEPSEEK_EXPERTS, shared=("n_shared_experts", 2), dense=("first_k_dense_replace", 0),
    scores="softmax", normalized=False, groups=("n_group", None),
    chosen_groups=("topk_group", None), scale=("routed_scaling_factor", 1.0), choice_bias=False,
)  # fmt: skip
_GLM_EXPERTS = replace(
    _DEEPSEEK_EXPERTS, dense=("first_k_dense_replace", 1), groups=("n_group", 1),
    chosen_groups=("topk_group", 1), scale=("routed_scaling_factor", 1.0),
)  # fmt: skip
_DEEPSEEK_V3 = ModelType(latent=_LATENT, experts=_DEEPSEEK_EXPERTS)
_GPT2 = ModelType(
    layers="n_layer|num_hidden_layers", hidden="n_embd|hidden_size",
    heads="n_head|num_attention_heads", groups=None, head_size=None,
    bias=True, width=("n_inner", None), gated=False, mlp_bias=True, norm="layer",
    epsilon=("layer_norm_epsilon", 1e-5), base=None, positions=("n_positions", 1024), tied=_TIED,
    dropout=("resid_pdrop", 0.1), required=(("add_cross_attention", False),),
)  # fmt: skip
_GPTJ = replace(
    _GPT2, bias=False, norms=1, parallel=True, positions=None, logits_bias=True, dropout=_DROPPED,
    tied=("tie_word_embeddings", False), traits=(traits.ADJACENT, traits.PARTLY_ROTATED),
    required=(),
)  # fmt: skip
_GLM = ModelType(
    bias=("attention_bias", True), output_bias=False, groups=("num_key_value_heads", 2),
    head_size=("head_dim", 128), epsilon=("rms_norm_eps", 1.5625e-7), rotary_part=_HALF,
    traits=(traits.ADJACENT,),
)  # fmt: skip
_OLMO2 = ModelType(
    head_size=None, whole_norms=True, epsilon=_EPSILON, traits=(traits.NORMS_AFTER,),
)  # fmt: skip
_GRANITE_EXPERTS = ExpertFields(
    number=("num_local_experts", 8), per_token=("num_experts_per_tok", 2),
    width="intermediate_size",
)  # fmt: skip
_GRANITE = ModelType(head_size=None, mlp_bias=("mlp_bias", False), traits=(_SCALES,))
_COHERE = ModelType(
    head_size=None, whole_norms=("use_qk_norm", False), norm="layer-scale", norms=1, parallel=True,
    epsilon=_LAYER_EPSILON, base=("rope_theta", 5e5), tied=_TIED,
    traits=(traits.ADJACENT, "a factor of logits"),
)  # fmt: skip
_ERNIE = ModelType(
    bias=("use_bias", False), mlp_bias=("use_bias", False), epsilon=_EPSILON,
    base=("rope_theta", 5e5), tied=_TIED, traits=(traits.ADJACENT,),
)  # fmt: skip
_MIXTRAL_EXPERTS = ExpertFields(number="num_local_experts|num_experts", width="intermediate_size")
_OLMO_EXPERTS = ExpertFields(
    number="num_experts", width="intermediate_size", normalized=_NORMED,
    loss=("router_aux_loss_coef", 0.01),
)  # fmt: skip

_QWEN3_HYBRID = replace(
    _QWEN3, head_size=("head_dim", 256), gate=True, pattern=None, when=(),
    rotary_part=("partial_rotary_factor", 0.25), recurrent=hf_fields.DELTA,
    traits=(traits.ADDED_ONE,),
)  # fmt: skip
TYPES: dict[str, ModelType] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": replace(
        _MISTRAL, window=("sliding_window", None), base=("rope_theta", 1e6),
        epsilon=_EPSILON, experts=_MIXTRAL_EXPERTS,
    ),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(
        _QWEN2, groups=("num_key_value_heads", 16), bias=("qkv_bias", True),
        alternates=True, experts=_QWEN_SHARED_EXPERTS,
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(
        _QWEN3, groups=("num_key_value_heads", 4), head_size=("head_dim", None), pattern=None,
        experts=_QWEN_EXPERTS,
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2, layers=("num_hidden_layers", 26), hidden=("hidden_size", 2304),
        heads=("num_attention_heads", 8), vocabulary=("vocab_size", 262_208),
        width=("intermediate_size", 9216), head_norms=True, base=("rope_theta", 1e6),
        pattern=("sliding_window_pattern", 6),
        traits=(*_GEMMA.traits, "two bases of rotary positions"),
    ),
    "gpt_oss": ModelType(
        groups=("num_key_value_heads", 8), head_size=("head_dim", 64),
        bias=("attention_bias", True), sinks=True, epsilon=_EPSILON, base=("rope_theta", 150_000.0),
        window=("sliding_window", 128), pattern=2,
        experts=replace(_MIXTRAL_EXPERTS, bias=True, router_bias=True), traits=(traits.CLAMPED,),
    ),
    "phi": ModelType(
        head_size=None, bias=True, head_norms=("qk_layernorm", False), gated=False, mlp_bias=True,
        norm="layer", norms=1, parallel=True,
        epsilon=_LAYER_EPSILON, rotary_part=_HALF, logits_bias=True, dropout=_DROPPED,
    ),
    "phi3": ModelType(
        head_size=None, bias=False, epsilon=_EPSILON, window=("sliding_window", None),
        rotary_part=("partial_rotary_factor", 1.0), dropout=_DROPPED,
    ),
    "phimoe": ModelType(
        groups=("num_key_value_heads", 8), head_size=None, norm="layer",
        epsilon=_EPSILON, base=("rope_theta", 1e6), window=("sliding_window", None),
        logits_bias=("lm_head_bias", False), experts=_MIXTRAL_EXPERTS,
        traits=("sparse mixing of experts",),
    ),
    "llama4_text": ModelType(
        groups=("num_key_value_heads", 8), head_size=("head_dim", 128),
        width="intermediate_size_mlp", epsilon=_EPSILON, base=("rope_theta", 5e5),
        window=("attention_chunk_size", 8192), chunked=True, pattern=("no_rope_layer_interval", 4),
        experts=ExpertFields(
            number="num_local_experts", width="intermediate_size", shared="intermediate_size",
            scores="sigmoid", normalized=False,
            dense=("interleave_moe_layer_step", 1),
        ),
        traits=(
            _UNROTATED, traits.ADJACENT, "norms of heads without weights",
            "experts that scale their inputs",
        ),
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "glm4_moe": ModelType(
        groups=("num_key_value_heads", 8), output_bias=False, head_norms=("use_qk_norm", False),
        epsilon=_EPSILON, rotary_part=_HALF, experts=_GLM_EXPERTS,
    ),
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3, epsilon=_EPSILON,
        latent=(
            ("q_lora_rank", 768), ("kv_lora_rank", 512), ("qk_nope_head_dim", 192),
            ("qk_rope_head_dim", 64), ("v_head_dim", 256),
        ),
        experts=replace(
            _GLM_EXPERTS, dense=("mlp_layer_types", None), scale=("routed_scaling_factor", 1.8)
        ),
    ),
    "deepseek_v2": ModelType(
        latent=_LATENT, experts=_DEEPSEEK_V2_EXPERTS, required=(("mlp_bias", False),)
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "minimax_m2": ModelType(
        bias=False, groups=("num_key_value_heads", 8), head_size=("head_dim", 128),
        whole_norms=True, base=("rope_theta", 5e6),
        experts=replace(_MIXTRAL_EXPERTS, scores="sigmoid", choice_bias=True),
    ),
    "olmo": ModelType(head_size=None, norm="layer-plain", epsilon=None),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, base=("rope_theta", 5e5), window=_WINDOW, pattern=4),
    "olmoe": replace(_OLMO2, experts=_OLMO_EXPERTS, traits=()),
    "flex_olmo": replace(
        _OLMO2, epsilon=("rms_norm_eps", 1e-6), base=("rope_theta", 5e5), experts=_OLMO_EXPERTS
    ),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, mlp_bias=False, experts=_GRANITE_EXPERTS),
    "granitemoeshared": replace(
        _GRANITE, mlp_bias=False,
        experts=replace(_GRANITE_EXPERTS, shared=("shared_intermediate_size", None)),
    ),
    "nemotron": ModelType(
        gated=False, mlp_bias=("mlp_bias", False), norm="layer", epsilon=("norm_eps", 1e-5),
        rotary_part=_HALF, traits=(traits.SQUARED_RELU, traits.ADDED_ONE),
    ),
    "falcon": ModelType(
        layers="num_hidden_layers|n_layer", heads="num_attention_heads|n_head", groups=1,
        head_size=None, bias=("bias", False), width=("ffn_hidden_size", None), gated=False,
        mlp_bias=("bias", False),
        norm="layer", norms=1, parallel=True, epsilon=("layer_norm_epsilon", 1e-5), tied=_TIED,
        dropout=("hidden_dropout", 0.0),
        when=(
            ("multi_query", True, {"groups": None}),
            ("parallel_attn", True, {"parallel": False, "norms": 2}),
            (
                "new_decoder_architecture", False,
                {"groups": ("num_kv_heads", None), "norms": ("num_ln_in_parallel_attn", 2)},
            ),
            ("alibi", False, {"rotary": False, "traits": (traits.ALIBI,)}),
        ),
    ),
    "bloom": replace(
        _GPT2, hidden="hidden_size|n_embed", heads="n_head|num_attention_heads", width=None,
        embedding_norm=True, rotary=False, positions=None, dropout=("hidden_dropout", 0.0),
        traits=(traits.ALIBI,), required=(("apply_residual_connection_post_layernorm", False),),
    ),
    "opt": ModelType(
        groups=None, head_size=None, bias=("enable_bias", True), width="ffn_dim", gated=False,
        mlp_bias=("enable_bias", True), norm="layer", epsilon=None, base=None,
        positions=("max_position_embeddings", 2048), offset=2, tied=_TIED, dropout=("dropout", 0.1),
        relu=True,
        required=(
            ("_remove_final_layer_norm", False), ("do_layer_norm_before", True),
            ("layer_norm_elementwise_affine", True),
        ),
    ),
    "stablelm": ModelType(
        head_size=None, bias=("use_qkv_bias", False), output_bias=False,
        whole_norms=("qk_layernorm", False), norm="layer", epsilon=_LAYER_EPSILON,
        rotary_part=("partial_rotary_factor", 0.25), dropout=("hidden_dropout", 0.0),
        when=(("use_parallel_residual", False, {"parallel": True, "norms": 1}),),
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE, whole_norms=False, base=("rope_theta", 10_000.0), window=_WINDOW,
        pattern=("sliding_window_pattern", 4), traits=(*_COHERE.traits, _UNROTATED),
    ),
    "starcoder2": ModelType(
        groups=("num_key_value_heads", 2), head_size=None, bias=("use_bias", True), gated=False,
        mlp_bias=("use_bias", True), norm="layer", epsilon=("norm_epsilon", 1e-5),
        window=("sliding_window", None), tied=_TIED, dropout=("residual_dropout", 0.0),
    ),
    "gpt_neox": ModelType(
        groups=None, head_size=None, bias=("attention_bias", True), gated=False, mlp_bias=True,
        norm="layer", parallel=True, epsilon=_LAYER_EPSILON,
        base=("rotary_emb_base", 10_000.0), rotary_part=("rotary_pct|partial_rotary_factor", 0.25),
        dropout=("hidden_dropout", 0.0),
        when=(("use_parallel_residual", True, {"parallel": False}),),
    ),
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "gpt_bigcode": replace(_GPT2, groups=1, when=(("multi_query", True, {"groups": None}),)),
    "bert": ModelType(
        groups=None, head_size=None, bias=True, gated=False, mlp_bias=True, norm="layer",
        epsilon=("layer_norm_eps", 1e-12), base=None, positions=("max_position_embeddings", 512),
        segments=("type_vocab_size", 2), tied=_TIED, dropout=("hidden_dropout_prob", 0.1),
        encoder=True, required=(("is_decoder", False), ("add_cross_attention", False)),
    ),
    "ernie4_5": replace(_ERNIE, groups=("num_key_value_heads", 2), head_size=("head_dim", 128)),
    "ernie4_5_moe": replace(
        _ERNIE, groups=("num_key_value_heads", 4), bias=False, mlp_bias=False,
        required=(("use_bias", False),),
        experts=ExpertFields(
            number="moe_num_experts", per_token="moe_k", shared=("moe_num_shared_experts", 2),
            each=True, dense=("moe_layer_start_index", 1), router_bias=True, choice_bias=True,
        ),
    ),
    "smollm3": replace(
        _LLAMA, groups=("num_key_value_heads", 4), base=("rope_theta", 2e6), tied=_TIED,
        pattern=("no_rope_layer_interval", 4), when=_QWEN_WINDOW, traits=(_UNROTATED,),
    ),
    "exaone4": ModelType(
        bias=False, head_norms=True, epsilon=_EPSILON, window=_WINDOW,
        pattern=("sliding_window_pattern", 4), traits=(traits.NORMS_AFTER, _UNROTATED),
    ),
    "ministral3": replace(
        _MISTRAL, head_size=("head_dim", 128), epsilon=_EPSILON,
        base=("rope_theta", 1e6), window=("sliding_window", None),
        traits=("queries scaled by position",),
    ),
    "seed_oss": ModelType(
        head_size=("head_dim", 128), bias=("attention_bias", True),
        output_bias=("attention_out_bias", False), mlp_bias=("mlp_bias", False),
        dropout=("residual_dropout", 0.1),
    ),
    "arcee": ModelType(
        gated=False, mlp_bias=("mlp_bias", False), epsilon=_EPSILON, traits=(traits.SQUARED_RELU,)
    ),
    "dots1": ModelType(
        head_norms=True, window=_WINDOW, pattern=("max_window_layers", 62),
        experts=replace(
            _GLM_EXPERTS, shared=("n_shared_experts", None), dense=("first_k_dense_replace", 0),
            normalized=_NORMED,
        ),
    ),
    "mamba": replace(hf_fields.MAMBA_MODEL, tied=_TIED),
    "falcon_mamba": replace(
        hf_fields.MAMBA_MODEL, tied=_TIED, traits=("norms of steps without weights",)
    ),
    "mamba2": replace(hf_fields.MAMBA_MODEL, recurrent=hf_fields.MAMBA2),
    "qwen3_next": replace(
        _QWEN3_HYBRID, groups=("num_key_value_heads", 2), experts=_QWEN_SHARED_EXPERTS
    ),
    "qwen3_5_text": replace(_QWEN3_HYBRID, groups=("num_key_value_heads", 4)),
    "qwen3_5_moe_text": replace(
        _QWEN3_HYBRID, groups=("num_key_value_heads", 2), width=None,
        experts=replace(_QWEN_SHARED_EXPERTS, dense=None),
    ),
    "kimi_linear": replace(
        _DEEPSEEK_V3, rotary=False, base=None, epsilon=_EPSILON, recurrent=hf_fields.KDA,
        latent=(("q_lora_rank", None), *_LATENT[1:]),
        experts=replace(
            _GLM_EXPERTS, number="num_local_experts|num_experts",
            per_token=("num_experts_per_tok|num_experts_per_token", 8),
            shared=("n_shared_experts|num_shared_experts", 1), dense=("mlp_layer_types", None),
            groups=("n_group|num_expert_group", 1),
            normalized=("norm_topk_prob|moe_renormalize", True),
            scale=("routed_scaling_factor", 2.446),
        ),
    ),
    "minimax": replace(
        _MISTRAL, head_size=("head_dim", None), window=None, base=("rope_theta", 1e6),
        epsilon=_EPSILON, experts=_MIXTRAL_EXPERTS, traits=(_SCALES,),
        recurrent=hf_fields.LIGHTNING,
    ),
    "nemotron_h": ModelType(
        groups=("num_key_value_heads", 8), head_size=("head_dim|attention_head_dim", 128),
        bias=False, gated=False, mlp_bias=("mlp_bias", False), rotary=False, base=None,
        epsilon=("layer_norm_epsilon|norm_eps", 1e-5),
        experts=replace(
            _GLM_EXPERTS, number=("n_routed_experts", 8), per_token=("num_experts_per_tok", 2),
            width=("moe_intermediate_size", 7688), gated=False, each=False, dense=None,
            shared=("moe_shared_expert_intermediate_size", 7688),
        ),
        recurrent=hf_fields.NEMOTRON, required=(("moe_latent_size", False),),
        traits=(traits.SQUARED_RELU,),
    ),
    "bamba": replace(
        hf_fields.HYBRID_MODEL, head_size=None,
        recurrent=replace(hf_fields.BAMBA, indices="attn_layer_indices"),
        rotary_part=_HALF,
    ),
    "granitemoehybrid": replace(
        _GRANITE, mlp_bias=False, width="shared_intermediate_size",
        rotary=("position_embedding_type", None),
        experts=replace(_GRANITE_EXPERTS, shared="shared_intermediate_size"),
        recurrent=replace(hf_fields.BAMBA, kinds="layer_types|layers_block_type"),
    ),
    "falcon_h1": replace(
        hf_fields.HYBRID_MODEL, traits=(_SCALES,),
        recurrent=replace(
            hf_fields.BAMBA, width=("mamba_d_ssm", 1024), norm=("mamba_rms_norm", False),
            beside=True, output_bias=("projectors_bias", False),
        ),
    ),
    "jamba": ModelType(
        groups=("num_key_value_heads", 8), head_size=None, bias=False, rotary=False, base=None,
        experts=ExpertFields(
            number=("num_experts", 16), per_token=("num_experts_per_tok", 2),
            width="intermediate_size", dense=("expert_layer_period", 2),
        ),
        recurrent=hf_fields.JAMBA,
    ),
    "lfm2": hf_fields.LFM2_MODEL,
    "lfm2_moe": replace(
        hf_fields.LFM2_MODEL, width="intermediate_size", narrowed=False,
        experts=ExpertFields(
            number=("num_experts", 32), per_token=("num_experts_per_tok", 4),
            width=("moe_intermediate_size", 1792), dense=("num_dense_layers", 2),
        ),
    ),
    **ENCODER_DECODERS,
}  # fmt: skip
