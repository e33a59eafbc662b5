"""Hugging Face ``config.json`` files of transformers.

Names and defaults are those of the configuration classes of the ``transformers`` package (compared
with its release 5). The sizes that it always writes are required; an absent other field has the
class's default. Fields that change neither parameters nor operators are not read. The model is the
one that is trained: with the head of a causal language model, for BERT of a masked one.
"""

import operator
import os
import reprlib
from collections.abc import Callable
from typing import Any

from pydantic_core import from_json

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.documents import not_json
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.importers.config_fields import Fields
from stagewright.graphs.importers.hf_hub import config_file, is_hub_name
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_hf_config(path: str | os.PathLike[str]) -> Architecture:
    """The architecture that a ``config.json``, or that of a folder or a model's name, describes.

    A name, ``OWNER/NAME``, is looked up by :func:`~stagewright.graphs.importers.hf_hub.hub_config`.
    Raises InputError in one line with the file and the field: no such name, no JSON object, a
    model type that is not known, a field that is missing or has a wrong type or value.
    """
    return parse_hf_config(*_text(path))


def parse_hf_config(text: str, place: str) -> Architecture:
    """The architecture in the text of a ``config.json``; ``place`` starts every message.

    Raises InputError as of :func:`read_hf_config`.
    """
    values = _values(text, place)
    with naming(place):
        return architecture_of(values)


def read_most_positions(path: str | os.PathLike[str]) -> int | None:
    """The longest sequence that a ``config.json`` speaks of; None if it has no such field."""
    found = _values(*_text(path)).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _text(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The text of a configuration, and its place: the file, or the name of a model."""
    file = config_file(path)
    return documents.read_text(file), os.fspath(path if is_hub_name(path) else file)


def _values(text: str, place: str) -> dict[str, Any]:
    try:
        values = from_json(text)
    except ValueError as error:
        raise InputError(f"{place}: {not_json(text, error)}") from None
    if not isinstance(values, dict):
        raise InputError(f"{place}: a configuration is an object with the field 'model_type'")
    return values


def architecture_of(values: dict[str, Any]) -> Architecture:
    """The architecture of a configuration's fields; see :func:`read_hf_config`."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        found = reprlib.repr(kind) if "model_type" in values else "no such field"
        raise InputError(f"model_type must be one of {', '.join(_READERS)}; there is {found}")
    fields = Fields(values)
    try:
        architecture = _READERS[kind](fields)
    except InputError:
        fields.require_spelling()  # the cause, if a default took the place of what was meant
        raise
    fields.require_spelling()
    return architecture


def _gpt2(fields: Fields) -> Architecture:
    fields.refuse("add_cross_attention")
    hidden = fields.size("n_embd")
    inner = fields.optional_size("n_inner") or 4 * hidden
    return Architecture(
        name="gpt2",
        layers=fields.layers("n_layer"),
        hidden=hidden,
        vocabulary=fields.size("vocab_size"),
        attention=_equal_heads(fields, "n_embd", "n_head"),
        feed_forward=FeedForward(inner, gated=False, bias=True),
        norm="layer",
        positions=fields.size("n_positions", 1024),
        tied=fields.flag("tie_word_embeddings", True),
        dropout=fields.is_positive("resid_pdrop", 0.1),
        norm_epsilon=fields.positive("layer_norm_epsilon", 1e-5),
    )


def _bert(fields: Fields) -> Architecture:
    fields.refuse("is_decoder")
    fields.refuse("add_cross_attention")
    return Architecture(
        name="bert",
        layers=fields.layers(),
        hidden=fields.size("hidden_size"),
        vocabulary=fields.size("vocab_size"),
        attention=_equal_heads(fields, "hidden_size", "num_attention_heads"),
        feed_forward=FeedForward(fields.size("intermediate_size"), gated=False, bias=True),
        norm="layer",
        positions=fields.size("max_position_embeddings", 512),
        segments=fields.size("type_vocab_size", 2),
        tied=fields.flag("tie_word_embeddings", True),
        dropout=fields.is_positive("hidden_dropout_prob", 0.1),
        encoder=True,
        norm_epsilon=fields.positive("layer_norm_eps", 1e-12),
    )


def _gpt_neox(fields: Fields) -> Architecture:
    bias = fields.flag("attention_bias", True)
    return Architecture(
        name="gpt_neox",
        layers=fields.layers(),
        hidden=fields.size("hidden_size"),
        vocabulary=fields.size("vocab_size"),
        attention=_equal_heads(fields, "hidden_size", "num_attention_heads", bias=bias),
        feed_forward=FeedForward(fields.size("intermediate_size"), gated=False, bias=True),
        norm="layer",
        tied=fields.flag("tie_word_embeddings", False),
        dropout=fields.is_positive("hidden_dropout", 0.0),
        rotary_base=_rotary_base(fields, 10_000.0, "rotary_emb_base"),
        norm_epsilon=fields.positive("layer_norm_eps", 1e-5),
    )


def _llama(fields: Fields) -> Architecture:
    attention = _grouped(fields)
    feed_forward = FeedForward(
        fields.size("intermediate_size"), bias=fields.flag("mlp_bias", False)
    )
    return _decoder("llama", fields, attention, feed_forward)


def _mistral(fields: Fields) -> Architecture:
    return _decoder(
        "mistral",
        fields,
        _grouped(fields, bias=False, key_value_heads=8),
        window=fields.optional_size("sliding_window", 4096),
    )


def _mixtral(fields: Fields) -> Architecture:
    width = fields.size("intermediate_size")
    experts = Experts(fields.size("num_local_experts"), fields.size("num_experts_per_tok"), width)
    return _decoder(
        "mixtral",
        fields,
        _grouped(fields, bias=False, key_value_heads=8),
        experts=experts,
        base=1_000_000.0,
        epsilon=1e-5,
        window=fields.optional_size("sliding_window"),
    )


def _qwen2(fields: Fields) -> Architecture:
    window, full = _qwen_window(fields)
    attention = _grouped(fields, bias=True, key_value_heads=32)
    return _decoder("qwen2", fields, attention, window=window, full_layers=full)


def _qwen3(fields: Fields) -> Architecture:
    window, full = _qwen_window(fields)
    attention = _grouped(fields, head_norms=True, key_value_heads=32, head_size=128)
    return _decoder("qwen3", fields, attention, window=window, full_layers=full)


def _qwen2_moe(fields: Fields) -> Architecture:
    window, full = _qwen_window(fields, lambda index, most: index % 2 == 1 or index >= most)
    step = fields.size("decoder_sparse_step", 1)
    others = (index for index in range(fields.layers()) if (index + 1) % step)
    experts = Experts(
        fields.size("num_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("moe_intermediate_size"),
        shared_width=fields.size("shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=fields.indices("mlp_only_layers").union(others),
    )
    attention = _grouped(fields, bias=fields.flag("qkv_bias", True), key_value_heads=16)
    return _decoder(
        "qwen2_moe", fields, attention, experts=experts, window=window, full_layers=full
    )


def _gemma(fields: Fields) -> Architecture:
    attention = _grouped(fields, key_value_heads=16, head_size=256)
    return _decoder("gemma", fields, attention, tied=True)


def _gemma2(fields: Fields) -> Architecture:
    attention = _grouped(fields, key_value_heads=4, head_size=256)
    return _decoder(
        "gemma2",
        fields,
        attention,
        tied=True,
        block_norms=4,
        window=fields.optional_size("sliding_window", 4096),
        full_layers=_full_layers(fields, lambda index: index % 2 == 1),
    )


def _deepseek_v2(fields: Fields) -> Architecture:
    fields.refuse("mlp_bias")
    return _deepseek("deepseek_v2", fields, first_dense=0, shared=2)


def _deepseek_v3(fields: Fields) -> Architecture:
    return _deepseek("deepseek_v3", fields, first_dense=3, shared=1)


def _deepseek(name: str, fields: Fields, *, first_dense: int, shared: int) -> Architecture:
    attention = LatentAttention(
        heads=fields.size("num_attention_heads"),
        query_rank=fields.optional_size("q_lora_rank", 1536),
        key_value_rank=fields.size("kv_lora_rank", 512),
        plain_size=fields.size("qk_nope_head_dim", 128),
        rotary_size=fields.size("qk_rope_head_dim", 64),
        value_size=fields.size("v_head_dim", 128),
        bias=fields.flag("attention_bias", False),
    )
    width = fields.size("moe_intermediate_size")
    first = fields.number("first_k_dense_replace", first_dense)
    every = fields.size("moe_layer_freq", 1)
    dense = (i for i in range(fields.layers()) if i < first or i % every)
    experts = Experts(
        fields.size("n_routed_experts"),
        fields.size("num_experts_per_tok"),
        width,
        shared_width=width * (fields.optional_size("n_shared_experts", shared) or 0) or None,
        dense_layers=frozenset(dense),
    )
    extra = fields.number("num_nextn_predict_layers", 0)
    left_out = "the layers of multi-token prediction" if extra else None
    return _decoder(name, fields, attention, experts=experts, left_out=left_out)


def _equal_heads(fields: Fields, hidden: str, heads: str, *, bias: bool = True) -> GroupedAttention:
    """Attention with as many key-value heads as query heads; arguments are names of fields."""
    number = fields.size(heads)
    size = _whole_share(fields.size(hidden), number, hidden, heads)
    return GroupedAttention(number, number, size, bias=bias, output_bias=bias)


def _grouped(
    fields: Fields,
    *,
    bias: bool | None = None,
    head_norms: bool = False,
    key_value_heads: int | None = None,
    head_size: int | None = None,
) -> GroupedAttention:
    """Attention with the class's defaults; null heads or head size follow from the others.

    ``bias`` is of queries, keys and values; None: all projections have one if ``attention_bias``.
    """
    heads = fields.size("num_attention_heads")
    size = fields.optional_size("head_dim", head_size)
    if size is None:
        hidden = fields.size("hidden_size")
        size = _whole_share(hidden, heads, "hidden_size", "num_attention_heads")
    groups = fields.optional_size("num_key_value_heads", key_value_heads) or heads
    if heads % groups:
        raise InputError(
            f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({groups})"
        )
    output_bias = fields.flag("attention_bias", False) if bias is None else False
    return GroupedAttention(
        heads, groups, size, output_bias if bias is None else bias, output_bias, head_norms
    )


def _decoder(
    name: str,
    fields: Fields,
    attention: GroupedAttention | LatentAttention,
    feed_forward: FeedForward | None = None,
    *,
    tied: bool = False,
    base: float = 10_000.0,
    epsilon: float = 1e-6,
    **others: Any,
) -> Architecture:
    """A decoder with rotary positions and RMS norms; ``tied``, base and epsilon are defaults."""
    return Architecture(
        name=name,
        layers=fields.layers(),
        hidden=fields.size("hidden_size"),
        vocabulary=fields.size("vocab_size"),
        attention=attention,
        feed_forward=feed_forward or FeedForward(fields.size("intermediate_size")),
        tied=fields.flag("tie_word_embeddings", tied),
        rotary_base=_rotary_base(fields, base),
        norm_epsilon=fields.positive("rms_norm_eps", epsilon),
        **others,
    )


def _rotary_base(fields: Fields, default: float, name: str = "rope_theta") -> float:
    """The base of rotary positions, in ``rope_parameters`` (since release 5) or ``name``."""
    parameters = fields.get("rope_parameters")
    inner = Fields(parameters if isinstance(parameters, dict) else {})
    return inner.positive("rope_theta", fields.positive(name, default))


def _qwen_window(
    fields: Fields, is_full: Callable[[int, int], bool] = operator.lt
) -> tuple[int | None, frozenset[int]]:
    """The sliding window, if the model uses a window, and the layers without a window.

    ``is_full`` of a layer and ``max_window_layers`` is the rule; by default the first are full.
    """
    if not fields.flag("use_sliding_window", False):
        return None, frozenset()
    window = fields.optional_size("sliding_window", 4096)
    most = fields.number("max_window_layers", 28)
    return window, _full_layers(fields, lambda index: is_full(index, most))


def _full_layers(fields: Fields, is_full: Callable[[int], bool]) -> frozenset[int]:
    """The layers without a window, by ``layer_types`` or else by the class's rule."""
    layers = fields.layers()
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return frozenset(filter(is_full, range(layers)))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise InputError(f"layer_types must be a list of {layers} kinds, one per layer")
    for index, kind in enumerate(kinds):
        if kind not in (_FULL, _SLIDING):
            raise InputError(
                f"layer_types[{index}] must be {_FULL} or {_SLIDING}, got {reprlib.repr(kind)}"
            )
    return frozenset(index for index, kind in enumerate(kinds) if kind == _FULL)


def _whole_share(whole: int, parts: int, name: str, parts_name: str) -> int:
    if whole % parts:
        raise InputError(f"{name} ({whole}) must be a multiple of {parts_name} ({parts})")
    return whole // parts


_READERS: dict[str, Callable[[Fields], Architecture]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gpt_neox": _gpt_neox,
    "bert": _bert,
}
