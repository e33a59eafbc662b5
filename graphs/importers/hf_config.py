"""Hugging Face ``config.json`` files of transformers.

The types and their fields are in ``hf_types``. The sizes that transformers always writes are
required; an absent other field has the default of the type's class. The model is the one that is
trained: with the head of a causal language model, for BERT of a masked one.
"""

import os
import reprlib
from collections.abc import Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from pydantic_core import from_json

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.documents import not_json
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.importers.config_fields import Field, Fields
from stagewright.graphs.importers.diffusers_config import diffusers_architecture
from stagewright.graphs.importers.hf_blocks import parts_of, words_of
from stagewright.graphs.importers.hf_fields import ExpertFields, ModelType
from stagewright.graphs.importers.hf_hub import config_file, is_hub_name
from stagewright.graphs.importers.hf_towers import WRAPPERS, text_type, with_encoder, with_vision
from stagewright.graphs.importers.hf_types import TYPES
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.stated import RotaryScaling, Routing, Stated
from stagewright.graphs.models.traits import ENCODER_DECODER, PARTLY_ROTATED

_FULL = "full_attention"
_ALIKE = 0.6  # of the names of model types, by difflib's ratio

_LLAMA_SHAPED = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size",
)  # fmt: skip

_OF_SCALING = (
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
_OF_PARAMS, _NOT_DENSE = {"dim", "n_layers", "n_heads"}, ("moe", "sliding_window")

_OF_WRAPPERS = ("tie_word_embeddings",)
"""Fields of a model with other towers that are its text model's too."""

_NOT_OF_TEXT = ("model_type", "vision_config")

_NOT_PRICED = {
    "blocks that share weights, or mixers of no known kind,": (
        "zamba", "zamba2", "recurrent_gemma", "rwkv", "xlstm",
    ),
    ENCODER_DECODER: (
        "t5gemma", "bigbird_pegasus", "led", "blenderbot", "speech_to_text",
    ),
}  # fmt: skip
"""What is not priced, and the types that have it; a configuration's own fields may say it too."""


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
    if kind is None and "_class_name" in values:
        return diffusers_architecture(values)
    if inner is not values:
        with naming("text_config"):
            text = architecture_of(inner)
        if kind in WRAPPERS:
            return with_vision(kind, text, values)
        return replace(text, left_out=f"what {kind} has beside its text model")
    if not isinstance(kind, str) or kind not in TYPES:
        raise _unknown(values)
    fields = Fields(_of_kimi(values) if kind == "kimi_linear" else values)
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
    if not isinstance(kind, str) or kind in TYPES:
        return values
    if kind in WRAPPERS and inner is None:  # written before release 5
        inner = {name: value for name, value in values.items() if name not in _NOT_OF_TEXT}
    if not isinstance(inner, dict):
        return values
    own = {name: values[name] for name in _OF_WRAPPERS if name in values}
    return inner | own | {"model_type": text_type(kind, inner.get("model_type"))}


def _variant(of: ModelType, fields: Fields) -> ModelType:
    """The type with the cells that the flags of a configuration replace."""
    for name, wanted in of.required:
        fields.require(name, wanted)
    for name, default, cells in of.when:
        if fields.flag((name, default)) is not default:
            of = replace(of, **cells)
    return of


def _architecture(kind: str, of: ModelType, fields: Fields) -> Architecture:
    words = words_of(of, fields)
    layers, hidden = len(words), fields.size(of.hidden)
    positions, window = fields.optional_size(of.positions), fields.optional_size(of.window)
    extra = fields.number(("num_nextn_predict_layers|num_mtp_modules", 0))
    found = Architecture(
        name=kind,
        layers=layers,
        hidden=hidden,
        vocabulary=fields.size(of.vocabulary),
        **parts_of(of, fields, hidden, words),
        norm=of.norm,
        block_norms=fields.optional_size(of.norms) or 2,
        parallel=of.parallel,
        embedding_norm=of.embedding_norm,
        logits_bias=fields.flag(of.logits_bias),
        rotary=of.rotary if isinstance(of.rotary, bool) else fields.get(of.rotary) == "rope",
        positions=None if positions is None else positions + of.offset,
        unused_positions=of.offset or None,
        segments=fields.optional_size(of.segments),
        tied=fields.flag(of.tied),
        window=window,
        full_layers=_full_layers(of, fields, layers) if window else frozenset(),
        chunked=of.chunked and window is not None,
        dropout=of.dropout is not None and fields.is_positive(of.dropout),
        encoder=of.encoder,
        next_tokens=extra or None,
        final_norm=of.final_norm,
        rotary_base=_rotary(fields, "rope_theta", of.base),
        norm_epsilon=None if of.epsilon is None else fields.positive(of.epsilon),
        traits=tuple(sorted(_traits(of, fields))),
        stated=Stated(
            rotary_part=_rotary(fields, "partial_rotary_factor", of.rotary_part),
            rotary_scaling=_rotary_scaling(fields) if of.base is not None else None,
            routing=None if of.experts is None else _routing(of.experts, fields),
            score_cap=_cap(fields, "attn_logit_softcapping"),
            logit_cap=_cap(fields, "final_logit_softcapping"),
        ),
    )
    return found if of.encoder_blocks is None else with_encoder(of.encoder_blocks, found, fields)


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


_NESTED = "linear_attn_config"
_KIMI = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim",
         "linear_conv_kernel_dim": "short_conv_kernel_size"}  # fmt: skip


def _of_kimi(values: dict[str, Any]) -> dict[str, Any]:
    """The fields with those of ``linear_attn_config``, and which blocks have attention, experts."""
    fields, nested = Fields(values), values.get(_NESTED) or {}
    if not isinstance(nested, dict):
        raise InputError(f"{_NESTED} must be an object, got {reprlib.repr(nested)}")
    own = Fields(nested)
    layers, first = fields.layers("num_hidden_layers"), fields.number(("first_k_dense_replace", 1))
    usual = {"mlp_layer_types": ["dense" if one < first else "sparse" for one in range(layers)]}
    if "full_attn_layers" in own.values:  # counted from 1
        full = {one - 1 for one in own.indices("full_attn_layers", layers + 1)}
        kinds = [_FULL if one in full else "linear_attention" for one in range(layers)]
        usual["layer_types"] = kinds
    sizes = {name: own.values[old] for name, old in _KIMI.items() if old in own.values}
    return usual | {one: value for one, value in values.items() if one != _NESTED} | sizes


def _routing(of: ExpertFields, fields: Fields) -> Routing:
    return Routing(
        scores=of.scores,
        normalized=fields.flag(of.normalized),
        groups=fields.optional_size(of.groups),
        chosen_groups=fields.optional_size(of.chosen_groups),
        scale=1.0 if of.scale is None else fields.positive(of.scale),
        choice_bias=of.choice_bias,
        loss=None if of.loss is None else fields.amount(of.loss),
    )


def _cap(fields: Fields, name: str) -> float | None:
    return None if fields.get((name, None)) is None else fields.positive((name, None))


def _rotary_fields(fields: Fields) -> Fields:
    """The numbers of rotary positions: ``rope_parameters``, before release 5 ``rope_scaling``."""
    found = fields.get(("rope_parameters|rope_scaling", None))
    if not isinstance(found, dict | None):
        raise InputError(f"rope_parameters must be an object, got {reprlib.repr(found)}")
    found = found or {}
    return Fields(found[_FULL] if isinstance(found.get(_FULL), dict) else found)


def _rotary(fields: Fields, name: str, cell: Field | None) -> float | None:
    """A number of rotary positions, or a field of the model."""
    return None if cell is None else _rotary_fields(fields).positive((name, fields.positive(cell)))


def _rotary_scaling(fields: Fields) -> RotaryScaling | None:
    inner = _rotary_fields(fields)
    kind = inner.get(("rope_type|type", "default"))
    if kind in ("default", "mrope", None):
        return None
    if not isinstance(kind, str):
        raise InputError(f"rope_type must be a name, got {reprlib.repr(kind)}")
    return RotaryScaling(
        kind="longrope" if kind == "su" else kind,
        factor=inner.positive(("factor", 1.0)),
        original_max_position_embeddings=inner.optional_size(
            ("original_max_position_embeddings", None)
        ),
        truncate=inner.flag(("truncate", True)),
        **{name: inner.amount((name, None)) for name in _OF_SCALING},
    )


def _traits(of: ModelType, fields: Fields) -> Iterator[str]:
    yield from of.traits
    if _rotary(fields, "partial_rotary_factor", of.rotary_part) not in (None, 1.0):
        yield PARTLY_ROTATED


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
    for what, kinds in _NOT_PRICED.items():
        if kind in kinds or (what == ENCODER_DECODER and values.get("is_encoder_decoder") is True):
            return InputError(f"{message}, and {what} cannot be priced; the nearest is {near}")
    if shaped:
        advice = f", with the fields of {near}: set model_type to it if the blocks are alike"
    else:
        named = max(TYPES, key=lambda known: (_likeness(kind, known), known))
        advice = f"; is {named} meant?" if _likeness(kind, named) > _ALIKE else ""
    return UnknownType(message + advice)


def _likeness(kind: str, known: str) -> float:
    return SequenceMatcher(None, kind.removesuffix("_text"), known).ratio()


def _nearest(kind: str, values: dict[str, Any]) -> str:
    """The type that reads most of a configuration's fields, of several one whose name is alike.

    Of equally near names it is the last: deepseek_v3, not deepseek_v2.
    """

    def nearness(known: str) -> tuple[int, float, str]:
        fields = Fields(values)
        try:
            _architecture(known, _variant(TYPES[known], fields), fields)
        except InputError:
            return 0, 0.0, ""
        alike, count = _likeness(kind, known), len(fields.sought & values.keys())
        return (count, alike, known) if alike > _ALIKE else (count, 0.0, "")

    return max(TYPES, key=nearness)
