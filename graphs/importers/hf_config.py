"""Hugging Face ``config.json`` files of transformers.

The types and their fields are in ``hf_types``. The sizes that transformers always writes are
required; an absent other field has the default of the type's class. The model is the one that is
trained: with the head of a causal language model, for BERT of a masked one.
"""

import os
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from pydantic_core import from_json

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.documents import not_json
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.importers.config_fields import Field, Fields
from stagewright.graphs.importers.hf_hub import config_file, is_hub_name
from stagewright.graphs.importers.hf_types import (
    ENCODER_DECODER,
    NOT_PRICED,
    TYPES,
    ExpertFields,
    ModelType,
)
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
)

_FULL = "full_attention"
_ALIKE = 0.6  # of the names of model types, by difflib's ratio

_LLAMA_SHAPED = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size",
)  # fmt: skip

_OF_PARAMS, _NOT_DENSE = {"dim", "n_layers", "n_heads"}, ("moe", "sliding_window")

_OF_WRAPPERS = ("tie_word_embeddings",)
"""Fields of a model with other towers that are its text model's too."""


class UnknownType(InputError):  # noqa: N818 - named as InvalidPlan is
    """A configuration of a model type that is not read, and may yet be built by transformers."""


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


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a ``config.json``; see :func:`read_hf_config`."""
    return _values(*_text(path))


def read_most_positions(path: str | os.PathLike[str]) -> int | None:
    """The longest sequence that a ``config.json`` speaks of; None if it has no such field."""
    found = text_fields(read_fields(path)).get("max_position_embeddings")
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
    if values.keys() >= _OF_PARAMS and "model_type" not in values:
        return architecture_of(_of_params(Fields(values)))
    kind, inner = values.get("model_type"), text_fields(values)
    if inner is not values:
        with naming("text_config"):
            text = architecture_of(inner)
        return replace(text, left_out=f"what {kind} has beside its text model")
    if not isinstance(kind, str) or kind not in TYPES:
        raise _unknown(values)
    fields = Fields(values)
    try:
        architecture = _architecture(kind, _variant(TYPES[kind], fields), fields)
    except InputError:
        fields.require_spelling()  # the cause, if a default took the place of what was meant
        raise
    fields.require_spelling()
    return architecture


def text_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model, where a model of a type that is not read has other towers."""
    kind, inner = values.get("model_type"), values.get("text_config")
    if not isinstance(kind, str) or kind in TYPES or not isinstance(inner, dict):
        return values
    return {name: values[name] for name in _OF_WRAPPERS if name in values} | inner


def _variant(of: ModelType, fields: Fields) -> ModelType:
    """The type with the cells that the flags of a configuration replace."""
    for name, wanted in of.required:
        fields.require(name, wanted)
    for name, default, cells in of.when:
        if fields.flag((name, default)) is not default:
            of = replace(of, **cells)
    return of


def _architecture(kind: str, of: ModelType, fields: Fields) -> Architecture:
    layers, hidden = fields.layers(of.layers), fields.size(of.hidden)
    positions, window = fields.optional_size(of.positions), fields.optional_size(of.window)
    inner = fields.optional_size(of.width) or 4 * hidden
    extra = fields.get(("num_nextn_predict_layers|num_mtp_modules", 0))
    return Architecture(
        name=kind,
        layers=layers,
        hidden=hidden,
        vocabulary=fields.size(of.vocabulary),
        attention=_attention(of, fields, hidden),
        feed_forward=FeedForward(
            inner, gated=of.gated, bias=fields.flag(of.mlp_bias), relu=of.relu
        ),
        experts=None if of.experts is None else _experts(of.experts, fields, layers),
        norm=of.norm,
        block_norms=fields.optional_size(of.norms) or 2,
        parallel=of.parallel,
        embedding_norm=of.embedding_norm,
        logits_bias=fields.flag(of.logits_bias),
        rotary=of.rotary,
        positions=None if positions is None else positions + of.offset,
        segments=fields.optional_size(of.segments),
        tied=fields.flag(of.tied),
        window=window,
        full_layers=_full_layers(of, fields, layers) if window else frozenset(),
        chunked=of.chunked and window is not None,
        dropout=of.dropout is not None and fields.is_positive(of.dropout),
        encoder=of.encoder,
        left_out="the layers of multi-token prediction" if extra else None,
        rotary_base=_rotary(fields, "rope_theta", of.base),
        norm_epsilon=None if of.epsilon is None else fields.positive(of.epsilon),
        traits=tuple(sorted(_traits(of, fields))),
    )


def _of_params(fields: Fields) -> dict[str, Any]:
    """The fields of a Llama whose original ``params.json`` (Meta's, Mistral's) is given."""
    if not fields.values.keys().isdisjoint(_NOT_DENSE):
        raise InputError(f"{' and '.join(_NOT_DENSE)} are not read; give the model's config.json")
    hidden, heads = fields.size("dim"), fields.size("n_heads")
    width = fields.optional_size(("hidden_dim", None))
    if width is None:
        multiple = fields.size(("multiple_of", 256))
        scale = fields.positive(("ffn_dim_multiplier", 1.0))
        width = -(-int(scale * (8 * hidden // 3)) // multiple) * multiple
    if fields.get(("vocab_size", -1)) == -1:
        raise InputError("vocab_size is not said (-1: the tokenizer's); write it, e.g. 32000")
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": fields.size("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.optional_size(("n_kv_heads", None)) or heads,
        "head_dim": fields.optional_size(("head_dim", None)) or hidden // heads,
        "intermediate_size": width,
        "vocab_size": fields.size("vocab_size"),
        "rope_theta": fields.positive(("rope_theta", 10_000.0)),
        "rms_norm_eps": fields.positive(("norm_eps", 1e-5)),
        "tie_word_embeddings": fields.flag(("tied_embeddings", False)),
    }


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
    )


def _experts(of: ExpertFields, fields: Fields, layers: int) -> Experts:
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
    )


def _first_dense(fields: Fields, of: Field, blocks: range) -> Iterable[int]:
    first, every = fields.number(of), fields.size(("moe_layer_freq", 1))
    return (one for one in blocks if one < first or one % every)


def _stepwise_dense(fields: Fields, of: Field, blocks: range) -> Iterable[int]:
    step = fields.size(of)
    others = (one for one in blocks if (one + 1) % step)
    return fields.indices("mlp_only_layers").union(others)


def _interleaved_dense(fields: Fields, of: Field, blocks: range) -> Iterable[int]:
    step = fields.size(of)
    listed = fields.get(("moe_layers", None)) is not None
    return set(blocks).difference(
        fields.indices("moe_layers") if listed else blocks[step - 1 :: step]
    )


def _ranged_dense(fields: Fields, of: Field, blocks: range) -> Iterable[int]:
    first, every = fields.number(of), fields.size(("moe_layer_interval", 1))
    last = fields.get(("moe_layer_end_index", -1))
    last = blocks[-1] if last == -1 else fields.number("moe_layer_end_index")
    return (one for one in blocks if not first <= one <= last or (one + 1) % every)


def _listed_dense(fields: Fields, of: Field, blocks: range) -> Iterable[int]:
    kinds = fields.kinds(of[0], len(blocks), ("dense", "sparse"))
    return (0,) if kinds is None else (one for one in blocks if kinds[one] == "dense")


_DENSE: dict[str, Callable[[Fields, Field, range], Iterable[int]]] = {
    "first_k_dense_replace": _first_dense,
    "decoder_sparse_step": _stepwise_dense,
    "interleave_moe_layer_step": _interleaved_dense,
    "moe_layer_start_index": _ranged_dense,
    "mlp_layer_types": _listed_dense,
}
"""The blocks without experts, by the field that says which they are."""


def _full_layers(of: ModelType, fields: Fields, layers: int) -> frozenset[int]:
    """The layers without a window, by ``layer_types`` or else by the class's rule."""
    if of.pattern is None:
        return frozenset()
    limited = "chunked_attention" if of.chunked else "sliding_attention"
    kinds = fields.kinds("layer_types", layers, (_FULL, limited))
    if kinds is not None:
        return frozenset(index for index, kind in enumerate(kinds) if kind == _FULL)
    name = of.pattern[0] if isinstance(of.pattern, tuple) else ""
    if name == "max_window_layers":
        most = fields.number(of.pattern)
        if of.alternates:
            return frozenset(one for one in range(layers) if one % 2 or one >= most)
        return frozenset(range(min(most, layers)))
    every = fields.size(of.pattern)
    found = frozenset(range(layers)[every - 1 :: every])
    if name == "no_rope_layer_interval":
        rotated = fields.kinds("no_rope_layers", layers, (0, 1))
        if rotated:
            found = frozenset(index for index, one in enumerate(rotated) if not one)
        return found if of.chunked else frozenset(range(layers)) - found
    return found


def _rotary(fields: Fields, name: str, cell: Field | None) -> float | None:
    """A number of rotary positions: in ``rope_parameters`` (since release 5), or a field."""
    if cell is None:
        return None
    inner = fields.get(("rope_parameters", None))
    inner = inner if isinstance(inner, dict) else {}
    inner = inner[_FULL] if isinstance(inner.get(_FULL), dict) else inner
    return Fields(inner).positive((name, fields.positive(cell)))


def _traits(of: ModelType, fields: Fields) -> Iterator[str]:
    yield from of.traits
    if _rotary(fields, "partial_rotary_factor", of.rotary_part) not in (None, 1.0):
        yield "rotary positions in part of a head"


def _whole_share(whole: int, parts: int, name: str, parts_name: str) -> int:
    if whole % parts:
        raise InputError(f"{name} ({whole}) must be a multiple of {parts_name} ({parts})")
    return whole // parts


def _unknown(values: dict[str, Any]) -> InputError:
    """Why a configuration is not read, and the nearest type that is."""
    kind = values.get("model_type")
    found = reprlib.repr(kind) if "model_type" in values else "no such field"
    known = f"the {len(TYPES)} that `stagewright models` lists"
    message = f"model_type must be one of {known}; there is {found}"
    if not isinstance(kind, str):
        return InputError(message)
    shaped = all(name in values for name in _LLAMA_SHAPED)
    near = _nearest(kind, values) if shaped else "llama"
    for what, kinds in NOT_PRICED.items():
        if kind in kinds or (what == ENCODER_DECODER and values.get("is_encoder_decoder") is True):
            return InputError(f"{message}, and {what} cannot be priced; the nearest is {near}")
    if shaped:
        advice = f", with the fields of {near}: set model_type to it if the blocks are alike"
    else:
        advice = f"; is {max(TYPES, key=partial(_likeness, kind))} meant?"
    return UnknownType(message + advice)


def _likeness(kind: str, known: str) -> float:
    return SequenceMatcher(None, kind, known).ratio()


def _nearest(kind: str, values: dict[str, Any]) -> str:
    """The type that reads most of a configuration's fields, of several one whose name is alike."""

    def nearness(known: str) -> tuple[int, float]:
        fields = Fields(values)
        try:
            _architecture(known, _variant(TYPES[known], fields), fields)
        except InputError:
            return 0, 0.0
        alike = _likeness(kind, known)
        return len(fields.sought & values.keys()), alike if alike > _ALIKE else 0.0

    return max(TYPES, key=nearness)
