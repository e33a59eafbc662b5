"""The blocks that a ``config.json`` describes: mixers, feed-forwards and experts of every block."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.config_fields import Field, Fields
from stagewright.graphs.importers.hf_fields import ExpertFields, ModelType, RecurrentFields
from stagewright.graphs.models.architecture import (
    Block,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    fields_of,
)
from stagewright.graphs.models.mixers import AnyMixer
from stagewright.graphs.models.recurrences import Recurrence, SelectiveScan, ShortConvolution

_WORDS = {
    "attention": "attention", "full_attention": "attention", "*": "attention",
    "mamba": "recurrent", "linear_attention": "recurrent", "conv": "recurrent", "M": "recurrent",
    "mlp": "mlp", "-": "mlp", "moe": "moe", "E": "moe",
}  # fmt: skip
"""What a block has, by the words of configurations."""


def words_of(of: ModelType, fields: Fields) -> list[str]:
    """What mixes the tokens of every block: attention, recurrent, both, or a word for neither."""
    own = of.recurrent
    if own is None:
        return ["attention"] * fields.layers(of.layers)
    name = "" if own.kinds is None else fields.name((own.kinds, None))
    listed = fields.get((name, None)) if name else None
    if listed is not None:
        given = list(listed) if isinstance(listed, str) else listed
        most = fields.layers((str(of.layers), len(given) if isinstance(given, list) else 1))
        known = [one for one, word in _WORDS.items() if own.alone or word not in ("mlp", "moe")]
        return [_WORDS[one] for one in Fields({name: given}).kinds(name, most, known) or ()]
    layers = fields.layers(of.layers)
    if own.beside:
        return ["both"] * layers
    attention: Iterable[int] = ()
    if own.indices is not None and fields.get((own.indices, None)) is not None:
        attention = fields.indices(own.indices, layers)
    elif own.every is not None:
        every = fields.size(own.every)
        first = every - 1 if own.first is None else fields.number(own.first)
        attention = range(first, layers, every)
    return ["attention" if index in attention else "recurrent" for index in range(layers)]


def parts_of(of: ModelType, fields: Fields, hidden: int, words: list[str]) -> dict[str, Any]:
    """What the blocks have, common to all and not."""
    mixers: dict[str, tuple[AnyMixer, ...]] = {}
    if {"attention", "both"} & {*words}:
        mixers["attention"] = (_attention(of, fields, hidden),)
    if of.recurrent is not None and {"recurrent", "both"} & {*words}:
        mixers["recurrent"] = (_recurrent(of, of.recurrent, fields, hidden),)
        mixers["both"] = (*mixers.get("attention", ()), *mixers["recurrent"])
    width = fields.optional_size(of.width) or 4 * hidden
    width = _narrowed(fields, width) if of.narrowed else width
    gated, relu = _activation(of, fields)
    plain = FeedForward(width, gated=gated, bias=fields.flag(of.mlp_bias), relu=relu)
    experts = None if of.experts is None else _experts(of.experts, fields, len(words))
    alone = of.recurrent is not None and of.recurrent.alone
    blocks = []
    for index, word in enumerate(words):
        is_sparse = experts is not None and index not in experts.dense_layers
        if alone:
            is_sparse = word == "moe"
        is_fed = not alone or word == "mlp"
        blocks.append(
            Block(
                mixers=mixers.get(word, ()),
                feed_forward=plain if is_fed and not is_sparse else None,
                experts=experts if is_sparse else None,
            )
        )
    inner = fields.optional_size(("intermediate_size", None)) if experts else None
    return fields_of(blocks, replace(plain, width=inner or 4 * hidden))


def _activation(of: ModelType, fields: Fields) -> tuple[bool, bool]:
    """Whether a feed-forward has gates, and whether it has a ReLU."""
    value = fields.get(of.gated)
    if isinstance(value, str):
        return value.startswith("gated"), value == "relu"
    return bool(value), of.relu


def _narrowed(fields: Fields, width: int) -> int:
    if not fields.flag(("block_auto_adjust_ff_dim", True)):
        return width
    step = fields.size(("block_multiple_of", 256))
    factor = fields.positive(("block_ffn_dim_multiplier", 1.0))
    return step * -(-int(factor * (2 * width // 3)) // step)


def _recurrent(of: ModelType, own: RecurrentFields, fields: Fields, hidden: int) -> AnyMixer:
    bias, kernel = fields.flag(own.bias), fields.optional_size(own.kernel_size)
    width = fields.optional_size(own.width) or hidden * (fields.optional_size(own.expand) or 1)
    if own.rule == "convolution":
        return ShortConvolution(width, kernel or 1, bias=bias)
    if own.rule == "selective":
        is_auto = fields.get(own.step_rank) in (None, "auto")
        return SelectiveScan(
            width=width,
            state_size=fields.size(own.state_size),
            step_rank=-(-hidden // 16) if is_auto else fields.size(own.step_rank),
            kernel_size=kernel or 1,
            bias=bias,
            convolution_bias=fields.flag(own.convolution_bias),
            norms=fields.flag(own.norm),
        )
    heads = fields.size(of.heads if own.heads is None else own.heads)
    cell = of.head_size if own.head_size is None else own.head_size
    if fields.get(cell) in (None, "auto"):
        size = _whole_share(width, heads, fields.name(own.expand), fields.name(own.heads))
    else:
        size = fields.size(cell)
    groups = fields.optional_size(own.groups) or heads
    _whole_share(heads, groups, fields.name(own.heads or of.heads), fields.name(own.groups))
    return Recurrence(
        rule=own.rule,
        heads=heads,
        head_size=size,
        state_size=fields.optional_size(own.state_size) or size,
        groups=groups,
        chunk=fields.size(own.chunk),
        kernel_size=kernel,
        bias=bias,
        output_bias=bias if own.output_bias is None else fields.flag(own.output_bias),
        convolution_bias=fields.flag(own.convolution_bias),
        norm=fields.flag(own.norm),
    )


def _attention(of: ModelType, fields: Fields, hidden: int) -> GroupedAttention | LatentAttention:
    heads, bias = fields.size(of.heads), fields.flag(of.bias)
    if of.latent is not None:
        query_rank, rank, plain, rotary, value = of.latent
        return LatentAttention(
            heads=heads,
            query_rank=fields.optional_size(query_rank),
            key_value_rank=fields.size(rank),
            plain_size=fields.size(plain),
            rotary_size=fields.size(rotary),
            value_size=fields.size(value),
            bias=bias,
        )
    names = [fields.name(one) for one in (of.hidden, of.heads, of.groups)]
    size = fields.optional_size(of.head_size)
    size = _whole_share(hidden, heads, names[0], names[1]) if size is None else size
    groups = fields.optional_size(of.groups) or heads
    _whole_share(heads, groups, names[1], names[2])
    return GroupedAttention(
        heads=heads,
        key_value_heads=groups,
        head_size=size,
        bias=bias,
        output_bias=bias if of.output_bias is None else fields.flag(of.output_bias),
        head_norms=fields.flag(of.head_norms),
        whole_norms=fields.flag(of.whole_norms),
        sinks=of.sinks,
        gate=of.gate,
        key_bias=of.key_bias,
    )


def _experts(of: ExpertFields, fields: Fields, layers: int) -> Experts | None:
    if fields.get(of.number) == 0:
        return None
    width, shared = fields.size(of.width), 0
    if isinstance(of.shared, str) or fields.get(of.shared) is not None:
        shared = fields.number(of.shared)
    return Experts(
        number=fields.size(of.number),
        per_token=fields.size(of.per_token),
        width=width,
        shared_width=shared * (width if of.each else 1) or None,
        shared_gate=of.gate,
        dense_layers=frozenset(
            () if of.dense is None else _DENSE[of.dense[0]](fields, of.dense, range(layers))
        ),
        bias=of.bias,
        router_bias=of.router_bias,
        gated=of.gated,
    )


def _first_dense(fields: Fields, of: Field, blocks: range) -> Iterable[int]:
    first, every = fields.number(of), fields.size(("moe_layer_freq", 1))
    return (one for one in blocks if one < first or one % every)


def _stepwise_dense(fields: Fields, of: Field, blocks: range) -> Iterable[int]:
    step = fields.size(of)
    others = (one for one in blocks if (one + 1) % step)
    return fields.indices("mlp_only_layers", len(blocks)).union(others)


def _interleaved_dense(fields: Fields, of: Field, blocks: range) -> Iterable[int]:
    step = fields.size(of)
    listed = fields.get(("moe_layers", None)) is not None
    return set(blocks).difference(
        fields.indices("moe_layers", len(blocks)) if listed else blocks[step - 1 :: step]
    )


def _ranged_dense(fields: Fields, of: Field, blocks: range) -> Iterable[int]:
    first, every = fields.number(of), fields.size(("moe_layer_interval", 1))
    last = fields.get(("moe_layer_end_index", -1))
    last = blocks[-1] if last == -1 else fields.number("moe_layer_end_index")
    return (one for one in blocks if not first <= one <= last or (one + 1) % every)


def _periodic_dense(fields: Fields, of: Field, blocks: range) -> Iterable[int]:
    every, first = fields.size(of), fields.number(("expert_layer_offset", 1))
    return (one for one in blocks if one % every != first)


def _listed_dense(fields: Fields, of: Field, blocks: range) -> Iterable[int]:
    kinds = fields.kinds(of[0], len(blocks), ("dense", "sparse"))
    return (0,) if kinds is None else (one for one in blocks if kinds[one] == "dense")


_DENSE: dict[str, Callable[[Fields, Field, range], Iterable[int]]] = {
    "num_dense_layers": _first_dense,
    "first_k_dense_replace": _first_dense,
    "decoder_sparse_step": _stepwise_dense,
    "interleave_moe_layer_step": _interleaved_dense,
    "moe_layer_start_index": _ranged_dense,
    "expert_layer_period": _periodic_dense,
    "mlp_layer_types": _listed_dense,
}
"""The blocks without experts, by the field that says which they are."""


def _whole_share(whole: int, parts: int, name: str, parts_name: str) -> int:
    if whole % parts:
        raise InputError(f"{name} ({whole}) must be a multiple of {parts_name} ({parts})")
    return whole // parts
