"""Fields of the recurrent mixers of model types of transformers; see ``hf_types``."""

from dataclasses import replace

from stagewright.graphs.importers.hf_fields import RecurrentFields

DELTA = RecurrentFields(
    rule="delta", heads=("linear_num_value_heads", 32), head_size=("linear_value_head_dim", 128),
    state_size=("linear_key_head_dim", 128), groups=("linear_num_key_heads", 16), chunk=64,
    kernel_size=("linear_conv_kernel_dim", 4), kinds="layer_types",
    every=("full_attention_interval", 4),
)  # fmt: skip
KDA = RecurrentFields(
    rule="kda", heads=("linear_num_heads", 32), head_size=("linear_head_dim", 128), chunk=64,
    kernel_size=("linear_conv_kernel_dim", 4), kinds="layer_types", every=4, first=4,
)  # fmt: skip
MAMBA2 = RecurrentFields(
    rule="ssd", heads=("num_heads", 128), head_size=("head_dim", 64),
    state_size=("state_size", 128), groups=("n_groups", 8), chunk=("chunk_size", 256),
    kernel_size=("conv_kernel", 4), bias=("use_bias", False),
    convolution_bias=("use_conv_bias", True), alone=True,
)  # fmt: skip
MAMBA = RecurrentFields(
    rule="selective", width=("intermediate_size", None), expand=("expand", 2),
    state_size=("state_size", 16), step_rank=("time_step_rank", "auto"),
    kernel_size=("conv_kernel", 4), bias=("use_bias", False), norm=False,
    convolution_bias=("use_conv_bias", True), alone=True,
)  # fmt: skip
BAMBA = RecurrentFields(
    rule="ssd", heads=("mamba_n_heads", 128), head_size=("mamba_d_head", "auto"),
    expand=("mamba_expand", 2), state_size=("mamba_d_state", 256), groups=("mamba_n_groups", 1),
    chunk=("mamba_chunk_size", 256), kernel_size=("mamba_d_conv", 4),
    bias=("mamba_proj_bias", False), convolution_bias=("mamba_conv_bias", True),
)  # fmt: skip
JAMBA = RecurrentFields(
    rule="selective", expand=("mamba_expand", 2), state_size=("mamba_d_state", 16),
    step_rank=("mamba_dt_rank", "auto"), kernel_size=("mamba_d_conv", 4),
    bias=("mamba_proj_bias", False), convolution_bias=("mamba_conv_bias", True),
    every=("attn_layer_period", 8), first=("attn_layer_offset", 4),
)  # fmt: skip
SHORT = RecurrentFields(
    rule="convolution", kernel_size=("conv_L_cache", 3), bias=("conv_bias", False),
    kinds="layer_types", indices="full_attn_idxs", every=1,
)  # fmt: skip
LIGHTNING = RecurrentFields(
    rule="lightning", chunk=("block_size", 256), kinds="layer_types", every=2, first=0
)
NEMOTRON = replace(
    MAMBA2, heads=("mamba_num_heads", 128), head_size=("mamba_head_dim", 64),
    state_size=("ssm_state_size", 128), chunk=("chunk_size|mamba_chunk_size", 128),
    kinds="hybrid_override_pattern|layers_block_type",
)  # fmt: skip
