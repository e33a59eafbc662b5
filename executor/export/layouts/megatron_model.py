"""The arguments of Megatron-LM (core 0.20) that describe an architecture."""

from collections.abc import Iterable
from itertools import groupby

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    GroupedAttention,
    LatentAttention,
)

Argument = tuple[str, ...]
"""A name and its values; none for a flag."""

NAME = "Megatron-LM"
NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}


def model_arguments(architecture: Architecture, sequence: int) -> list[Argument]:
    """All of them; what an :class:`Architecture` does not know keeps Megatron-LM's defaults.

    Raises
    ------
    InputError
        If Megatron-LM has no argument for a part of the architecture.
    """
    _require_blocks(architecture)
    rotary = architecture.positions is None
    longest = sequence if architecture.positions is None else architecture.positions
    found: list[Argument] = [
        ("--num-layers", str(architecture.layers)),
        ("--hidden-size", str(architecture.hidden)),
        ("--ffn-hidden-size", str(architecture.feed_forward.width)),
        ("--num-attention-heads", str(architecture.attention.heads)),
        *_attention(architecture.attention),
        ("--seq-length", str(sequence)),
        ("--max-position-embeddings", str(longest)),
        ("--position-embedding-type", "rope" if rotary else "learned_absolute"),
        ("--vocab-size", str(architecture.vocabulary)),
        ("--normalization", NORMS[architecture.norm]),
        *_biases(architecture),
    ]
    if architecture.feed_forward.gated:
        found.append(("--swiglu",))
    if not architecture.tied:
        found.append(("--untie-embeddings-and-output-weights",))
    if not architecture.dropout:
        found += [("--hidden-dropout", "0.0"), ("--attention-dropout", "0.0")]
    return [*found, *_window(architecture), *_experts(architecture)]


def _require_blocks(architecture: Architecture) -> None:
    if architecture.block_norms != 2:
        raise InputError(
            f"{architecture.block_norms} norms in a block: {NAME} has 2; export to nemo or "
            "megatron-bridge, whose recipes bring the model"
        )
    if architecture.name.startswith("gemma"):
        raise InputError(
            f"{architecture.name}'s feed-forward with GELU gates: {NAME} has no argument for it; "
            "export to nemo or megatron-bridge, whose recipes bring the model"
        )
    if architecture.experts is not None and not architecture.feed_forward.gated:
        raise InputError(
            f"gated experts beside a feed-forward that is not: {NAME} has one activation for both; "
            "set gated alike"
        )


def _attention(attention: GroupedAttention | LatentAttention) -> Iterable[Argument]:
    if isinstance(attention, LatentAttention):
        return _latent(attention)
    found: list[Argument] = [("--kv-channels", str(attention.head_size))]
    if attention.key_value_heads < attention.heads:
        groups = ("--num-query-groups", str(attention.key_value_heads))
        found += [("--group-query-attention",), groups]
    if attention.head_norms:
        found.append(("--qk-layernorm",))
    return found


def _latent(attention: LatentAttention) -> Iterable[Argument]:
    yield ("--multi-latent-attention",)
    if attention.query_rank is not None:
        yield ("--q-lora-rank", str(attention.query_rank))
    yield ("--kv-lora-rank", str(attention.key_value_rank))
    yield ("--qk-head-dim", str(attention.plain_size))
    yield ("--qk-pos-emb-head-dim", str(attention.rotary_size))
    yield ("--v-head-dim", str(attention.value_size))
    yield ("--kv-channels", str(attention.value_size))
    yield ("--qk-layernorm",)  # the norms of the latent vectors


def _biases(architecture: Architecture) -> list[Argument]:
    """Biases everywhere, nowhere, or of queries, keys and values alone."""
    attention, inner = architecture.attention, architecture.feed_forward.bias
    inputs = attention.bias
    outputs = attention.bias if isinstance(attention, LatentAttention) else attention.output_bias
    latent = isinstance(attention, LatentAttention)
    if inputs and outputs and inner and not latent and architecture.experts is None:
        return []
    if outputs or inner or (inputs and latent):
        raise InputError(
            f"biases of only some projections: {NAME} has them in all of a dense model with plain "
            "attention, in queries, keys and values alone, or nowhere"
        )
    return [("--disable-bias-linear",), *([("--add-qkv-bias",)] if inputs else [])]


def _window(architecture: Architecture) -> Iterable[Argument]:
    if architecture.window is None:
        return
    # A token attends to itself and the tokens left of it.
    yield ("--window-size", f"{architecture.window - 1},0")
    if architecture.full_layers:
        limited = [index not in architecture.full_layers for index in range(architecture.layers)]
        yield ("--window-attn-skip-freq", _pattern(limited))


def _experts(architecture: Architecture) -> Iterable[Argument]:
    experts = architecture.experts
    if experts is None:
        return
    yield ("--num-experts", str(experts.number))
    yield ("--moe-router-topk", str(experts.per_token))
    yield ("--moe-ffn-hidden-size", str(experts.width))
    yield from _shared_experts(experts)
    sparse = [architecture.is_sparse(index) for index in range(architecture.layers)]
    if not all(sparse):
        yield ("--moe-layer-freq", _pattern(sparse))
    yield ("--moe-token-dispatcher-type", "alltoall")
    yield ("--moe-grouped-gemm",)


def _shared_experts(experts: Experts) -> Iterable[Argument]:
    if experts.shared_width is not None:
        yield ("--moe-shared-expert-intermediate-size", str(experts.shared_width))
        if experts.shared_gate:
            yield ("--moe-shared-expert-gate",)


def _pattern(flags: list[bool]) -> str:
    """A list of 0 and 1 as an expression: ``[0]*3+[1]*58``."""
    runs = [(int(flag), len(list(run))) for flag, run in groupby(flags)]
    return "+".join(f"[{flag}]*{count}" for flag, count in runs)
