"""What a model type of transformers is described by: which fields of a ``config.json`` mean what.

A cell is a number or a word that holds for all models of the type, a :data:`Field`, or for required
fields the name alone; ``a|b`` is a field that has two names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from stagewright.graphs.importers.config_fields import Cell, Field


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFields:
    """Fields of the experts; ``shared`` is the width of shared experts, or with ``each`` a number.

    ``dense`` is the field that says which blocks have none, see ``hf_config``. ``scores`` to
    ``loss`` are of the router, see :class:`~stagewright.graphs.models.stated.Routing`.
    """

    number: Cell
    per_token: Cell = "num_experts_per_tok"
    width: Cell = "moe_intermediate_size"
    shared: Cell = None
    each: bool = False
    gate: bool = False
    dense: Field | None = None
    bias: bool = False
    router_bias: bool = False
    gated: bool = True
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: Field | bool = True
    groups: Cell = None
    chosen_groups: Cell = None
    scale: Field | None = None
    choice_bias: bool = False
    loss: Field | None = ("router_aux_loss_coef", 0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentFields:
    """Fields of recurrent mixers, of a ``rule`` of recurrences or of another class.

    Null heads and sizes are those of the attention, null ``groups`` the heads; a null or "auto"
    ``head_size`` follows from the ``width``, which is else ``expand`` times the hidden size.
    ``kinds`` is a field with the kind of every block; without it blocks have attention that the
    field ``indices`` lists, or every ``every``-th from ``first`` on (None: the last of so many).
    ``beside``: all have both. ``alone``: a block is a mixer or a feed-forward alone.
    """

    rule: Literal["ssd", "delta", "kda", "lightning", "selective", "convolution"]
    heads: Cell = None
    head_size: Cell = None
    width: Cell = None
    expand: Cell = None
    state_size: Cell = None
    groups: Cell = None
    chunk: Cell = None
    kernel_size: Cell = None
    step_rank: Cell = None
    bias: Field | bool = False
    output_bias: Field | bool | None = None
    convolution_bias: Field | bool = False
    norm: Field | bool = True
    kinds: str | None = None
    indices: str | None = None
    every: Cell = None
    first: Cell = None
    beside: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFields:
    """Fields of an encoder; norms, biases and the rest are as in its decoder.

    ``output_norm``: whether a norm follows the last block; ``scores``: the field of learned scores
    by distance, in the first block or, with ``every``, in all. ``tokens`` are those of a sample
    (None: as many as a sequence), made of ``channels`` by two convolutions of three frames.
    """

    layers: Cell = "encoder_layers"
    heads: Cell = "encoder_attention_heads"
    width: Cell = "encoder_ffn_dim"
    output_norm: bool = True
    scores: Field | None = None
    every: bool = False
    tokens: Cell = None
    channels: Cell = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """Fields of a model type; by default those of Llama.

    Where they are null, ``groups`` are the heads, the head's size follows from the hidden size, and
    the ``width`` is four times that; a ``narrowed`` one is two thirds of what it says, rounded as
    LFM2 does it. ``latent``: the ranks of queries and of keys and values, and a head's sizes
    (plain, rotary, value). ``output_bias`` None is as ``bias``; ``offset`` is of the table of
    positions. ``pattern`` says which blocks have no window: those that the field ``layer_types`` or
    else a rule of ``hf_config`` tells; with ``alternates`` every second of the others has none
    either. ``rotary`` may be a field that is then "rope"; ``rotary_part`` of a head is rotated.
    ``gated`` may be the field of an activation, such as gated-gelu. ``when`` a flag is not its
    default, the cells are replaced. Other values of the flags in ``required`` are refused: such
    operators are not counted.
    """

    layers: Cell = "num_hidden_layers"
    hidden: Cell = "hidden_size"
    vocabulary: Cell = "vocab_size"
    heads: Cell = "num_attention_heads"
    groups: Cell = ("num_key_value_heads", None)
    head_size: Cell = ("head_dim", None)
    bias: Field | bool = ("attention_bias", False)
    output_bias: Field | bool | None = None
    head_norms: Field | bool = False
    whole_norms: Field | bool = False
    sinks: bool = False
    gate: bool = False
    key_bias: bool = True
    recurrent: RecurrentFields | None = None
    latent: tuple[Field, Field, Field, Field, Field] | None = None
    width: Cell = "intermediate_size"
    narrowed: bool = False
    gated: Field | bool = True
    relu: bool = False
    mlp_bias: Field | bool = False
    experts: ExpertFields | None = None
    norm: Literal["layer", "rms", "layer-scale", "layer-plain"] = "rms"
    norms: Cell = 2
    parallel: bool = False
    embedding_norm: bool = False
    epsilon: Field | None = ("rms_norm_eps", 1e-6)
    base: Field | None = ("rope_theta", 10_000.0)
    rotary: Field | bool = True
    rotary_part: Field | None = None
    positions: Cell = None
    offset: int = 0
    segments: Cell = None
    tied: Field = ("tie_word_embeddings", False)
    logits_bias: Field | bool = False
    window: Cell = None
    pattern: Field | int | None = None
    alternates: bool = False
    chunked: bool = False
    dropout: Field | None = None
    encoder: bool = False
    required: tuple[tuple[str, bool], ...] = ()
    traits: tuple[str, ...] = ()
    when: tuple[tuple[str, bool, Mapping[str, Any]], ...] = ()
    encoder_blocks: EncoderFields | None = None
    final_norm: bool = True


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

MAMBA_MODEL = ModelType(
    width=None, epsilon=("layer_norm_epsilon", 1e-5), base=None, rotary=False,
    recurrent=MAMBA,
)  # fmt: skip
HYBRID_MODEL = ModelType(
    groups=("num_key_value_heads", 8), mlp_bias=("mlp_bias", False), epsilon=("rms_norm_eps", 1e-5)
)
LFM2_MODEL = ModelType(
    width="block_ff_dim|intermediate_size", narrowed=True, groups=("num_key_value_heads", 8),
    head_size=None, bias=False, head_norms=True,
    epsilon=("norm_eps", 1e-5), base=("rope_theta", 1e6),
    tied=("tie_embedding|tie_word_embeddings", True), recurrent=SHORT,
)  # fmt: skip
