"""The mixers of a module's blocks, by their parameters and attributes."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from stagewright.graphs.models.architecture import GroupedAttention, LatentAttention
from stagewright.graphs.models.mixers import AnyAttention, AnyMixer
from stagewright.graphs.models.recurrences import Recurrence, SelectiveScan, ShortConvolution

Named = Mapping[str, Tensor]

_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "down_proj", "fc2", "w2", "fc_out",
            "dense_4h_to_h", "output_linear")  # fmt: skip
"""Names of matrices back to the hidden state, where its size does not tell them."""

_DELTA_CHUNK = 64  # tokens, as transformers' and fla's gated delta rule has it


def matrices(parameters: Named, hidden: int) -> tuple[int, int]:
    """Outputs of all matrices from the hidden state, and inputs of all that lead back."""
    ins = outs = 0
    for name, one in parameters.items():
        if one.dim() != 2 or name.endswith("bias"):
            continue
        words = name.split(".")
        if any(word in _OUTPUTS for word in words):
            outs += one.numel() // hidden
        else:
            ins += one.numel() // hidden
    return ins, outs


def any_bias(parameters: Iterable[str]) -> bool:
    """Whether one of the parameters is a bias."""
    return any(name.endswith("bias") for name in parameters)


def mixer_of(name: str, module: nn.Module, config: Any, hidden: int) -> AnyMixer | None:
    """The mixer that a child of a block is; None for one that mixes no tokens."""
    parameters = dict(module.named_parameters())
    if isinstance(getattr(module, "conv1d", None), nn.Conv1d) or hasattr(module, "slope_rate"):
        return _recurrence(module, parameters, hidden)
    if isinstance(getattr(module, "conv", None), nn.Conv1d):
        convolution: Any = module
        return ShortConvolution(
            width=parameters["out_proj.weight"].shape[1],
            kernel=convolution.conv.kernel_size[0],
            bias=any_bias(parameters),
        )
    is_attention = "attn" in name or "attention" in name
    return (
        _attention(parameters, config, hidden)
        if is_attention or "q_proj.weight" in parameters
        else None
    )


def _recurrence(module: Any, parameters: Named, hidden: int) -> AnyMixer:
    """The recurrence of a module that has a convolution, or a fixed decay."""
    back = "out_proj" if "out_proj.weight" in parameters else "o_proj"
    width = parameters[f"{back}.weight"].shape[1]
    if hasattr(module, "slope_rate"):
        heads = module.num_attention_heads
        size = width // heads
        return Recurrence("lightning", heads, size, size, heads, module.block_size)
    convolution = module.conv1d
    kernel, convolution_bias = convolution.kernel_size[0], convolution.bias is not None
    bias, output_bias = (f"{name}.bias" in parameters for name in ("in_proj", back))
    if "x_proj.weight" in parameters:
        return SelectiveScan(
            width=width,
            state_size=module.ssm_state_size,
            step_rank=module.time_step_rank,
            kernel_size=kernel,
            bias=bias,
            convolution_bias=convolution_bias,
            norms=any("norm" in name for name in parameters),
        )
    is_ssd = "D" in parameters
    heads = parameters["A_log"].shape[0]
    groups = module.n_groups if is_ssd else module.num_k_heads
    return Recurrence(
        rule="ssd" if is_ssd else "delta",
        heads=heads,
        head_size=width // heads,
        state_size=(convolution.out_channels - width) // (2 * groups),
        groups=groups,
        chunk=module.chunk_size if is_ssd else _DELTA_CHUNK,
        kernel_size=kernel,
        bias=bias,
        output_bias=output_bias,
        convolution_bias=convolution_bias,
        norm=any(name.endswith("norm.weight") for name in parameters),
    )


def _attention(parameters: Named, config: Any, hidden: int) -> AnyAttention:
    heads = config.num_attention_heads
    back = {one for one in parameters if set(one.split(".")) & {*_OUTPUTS}}
    into = {name for name in parameters if name not in back}
    if any("kv_b_proj" in name for name in parameters):
        return LatentAttention(
            heads=heads,
            key_value_rank=config.kv_lora_rank,
            plain_size=config.qk_nope_head_dim,
            rotary_size=config.qk_rope_head_dim,
            value_size=config.v_head_dim,
            query_rank=config.q_lora_rank,
            bias=any_bias(back),
        )
    ins, outs = matrices(parameters, hidden)
    size = max(1, outs // heads)
    gated = _has_gate(parameters, outs)
    groups = max(1, (ins // size - heads * (2 if gated else 1)) // 2)
    scales = {
        name: one.numel() for name, one in parameters.items()
        if name in into and "norm" in name and not name.endswith("bias")
    }  # fmt: skip
    own = sum(scales.values()) > 2 * size
    return GroupedAttention(
        heads=heads,
        key_value_heads=groups if heads % groups == 0 else heads,
        head_size=size,
        bias=any_bias(name for name in into if "norm" not in name),
        output_bias=any_bias(back),
        head_norms=bool(scales) and not own,
        whole_norms=own,
        gate=gated,
        sinks=any(name.endswith("sinks") for name in parameters),
    )


def _has_gate(parameters: Named, outs: int) -> bool:
    """Whether there is a gate of the output, perhaps of the projection to queries."""
    queries, gate = (parameters.get(f"{name}.weight") for name in ("q_proj", "gate_proj"))
    is_wide = queries is not None and queries.shape[0] == 2 * outs
    return is_wide or (gate is not None and gate.shape[0] == outs)
