"""The architecture of any decoder of transformers, read from its module on torch's meta device.

The module is built without memory, and its blocks are looked at: norms, attention, feed-forward or
experts. The architecture is given only where its parameters are those of the module, layer by
layer, and its FLOPs those that torch counts of a forward.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
)

TRAIT = "blocks that only its module tells"

_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "down_proj", "fc2", "w2", "fc_out",
            "dense_4h_to_h", "output_linear")  # fmt: skip
"""Names of matrices back to the hidden state, where its size does not tell them."""

_DROPOUTS = ("resid_pdrop", "residual_dropout", "hidden_dropout", "hidden_dropout_prob", "dropout")

_FULL = ("full_attention", "global")
_LIMITED = ("sliding_attention", "local", "chunked_attention")

_TOKENS = 16
_FLOPS_WITHIN = 0.001

_Named = Mapping[str, Tensor]


def architecture_of_module(values: dict[str, Any]) -> Architecture:
    """The architecture of a configuration of a type that transformers has.

    Raises InputError where transformers cannot build it, or where the module has what an
    architecture does not say.
    """
    kind = values["model_type"]
    model = _built(kind, values)
    config = model.config.get_text_config()
    blocks = _blocks(model, kind, config.num_hidden_layers)
    found = _architecture(kind, model, config, blocks)
    _require_equal(found, model, blocks)
    return found


def _built(kind: str, values: dict[str, Any]) -> Any:
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    given = {name: value for name, value in values.items() if name != "model_type"}
    try:
        config = transformers.AutoConfig.for_model(kind, **given)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", experts_implementation="batched_mm"
            )
    except Exception as error:  # whatever a configuration's class or a module raises
        why = " ".join(str(error).split()).partition(". ")[0][:200]
        raise InputError(f"transformers cannot build it: {why}") from error
    model.tie_weights()
    return model.eval()


def _blocks(model: nn.Module, kind: str, layers: int) -> list[nn.Module]:
    for one in model.modules():
        if isinstance(one, nn.ModuleList) and len(one) == layers:
            return list(one)
    raise InputError(f"model_type {kind!r}: its module has no list of {layers} blocks")


def _architecture(kind: str, model: Any, config: Any, blocks: list[nn.Module]) -> Architecture:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocabulary, hidden = embedding.weight.shape
    within = {id(one) for block in blocks for one in block.modules()}
    ends = [one for one in model.modules() if _is_norm(one) and id(one) not in within]
    inner = [_feed_forward(one) for one in blocks]
    sparse = [index for index, one in enumerate(inner) if any(p.dim() > 2 for p in one.values())]
    dense = [index for index in range(len(blocks)) if index not in sparse]
    norms = [one for one in blocks[0].children() if _is_norm(one)]
    tables = [
        one.num_embeddings
        for one in model.modules()
        if isinstance(one, nn.Embedding) and one is not embedding and one.embedding_dim == hidden
    ]
    window, full, chunked = _window(config, kind)
    return Architecture(
        name=kind,
        layers=len(blocks),
        hidden=hidden,
        vocabulary=vocabulary,
        attention=_attention(blocks[0], config, hidden),
        feed_forward=_dense(inner[dense[0]] if dense else {}, config, hidden),
        experts=_experts(inner[sparse[0]], config, hidden, dense) if sparse else None,
        norm=_norm(norms),
        block_norms=len(norms),
        parallel=len(norms) == 1 or _has(config, "use_parallel_residual", "parallel_attn"),
        embedding_norm=len(ends) > 1,
        rotary=bool(tables) or any("rotary" in type(o).__name__.lower() for o in model.modules()),
        positions=max(tables, default=None),
        logits_bias=getattr(head, "bias", None) is not None,
        tied=head.weight is embedding.weight,
        window=window,
        full_layers=full,
        chunked=chunked,
        dropout=any(getattr(config, name, 0.0) > 0.0 for name in _DROPOUTS),
        traits=(TRAIT,),
    )


def _has(config: Any, *names: str) -> bool:
    return any(getattr(config, name, False) is True for name in names)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _norm(norms: list[nn.Module]) -> Any:
    """The kind of a block's norms."""
    weights = [dict(one.named_parameters()) for one in norms]
    if not any(weights):
        return "layer-plain"
    if any("bias" in one for one in weights):
        return "layer"
    return "rms" if any("rms" in type(one).__name__.lower() for one in norms) else "layer-scale"


def _core(block: nn.Module) -> nn.Module:
    """The attention of a block."""
    for name, one in block.named_children():
        if ("attn" in name or "attention" in name) and not _is_norm(one) and _has_weights(one):
            return one
    raise InputError(f"a block ({type(block).__name__}) without attention cannot be priced")


def _feed_forward(block: nn.Module) -> _Named:
    """Parameters of a block that belong to neither its attention nor its norms."""
    core, found = _core(block), dict[str, Tensor]()
    for name, one in block.named_children():
        if one is not core and not _is_norm(one):
            found |= {f"{name}.{inner}": each for inner, each in one.named_parameters()}
    return found


def _matrices(parameters: _Named, hidden: int) -> tuple[int, int]:
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


def _any_bias(parameters: Iterable[str]) -> bool:
    return any(name.endswith("bias") for name in parameters)


def _attention(block: nn.Module, config: Any, hidden: int) -> GroupedAttention | LatentAttention:
    parameters = dict(_core(block).named_parameters())
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
            bias=_any_bias(back),
        )
    ins, outs = _matrices(parameters, hidden)
    size = max(1, outs // heads)
    groups = max(1, (ins // size - heads) // 2)
    scales = {
        name: one.numel() for name, one in parameters.items()
        if name in into and "norm" in name and not name.endswith("bias")
    }  # fmt: skip
    own = sum(scales.values()) > 2 * size
    return GroupedAttention(
        heads=heads,
        key_value_heads=groups if heads % groups == 0 else heads,
        head_size=size,
        bias=_any_bias(name for name in into if "norm" not in name),
        output_bias=_any_bias(back),
        head_norms=bool(scales) and not own,
        whole_norms=own,
        sinks=any(name.endswith("sinks") for name in parameters),
    )


def _dense(parameters: _Named, config: Any, hidden: int) -> FeedForward:
    """The feed-forward of these parameters; without any, one that no block has."""
    if not parameters:
        return FeedForward(getattr(config, "intermediate_size", None) or 4 * hidden)
    ins, width = _matrices(parameters, hidden)
    names = (getattr(config, name, None) for name in ("hidden_act", "activation_function"))
    return FeedForward(
        max(1, width), gated=ins > width, bias=_any_bias(parameters), relu="relu" in names
    )


def _experts(parameters: _Named, config: Any, hidden: int, dense: list[int]) -> Experts:
    """The experts of a block: stacked matrices, a router, and what every token passes through."""
    stacks = [one for one in parameters.values() if one.dim() > 2]
    number, down = stacks[0].shape[0], min(one.numel() for one in stacks)
    rest = {
        name: one for name, one in parameters.items()
        if one.dim() < 3 and one.shape[0] not in (number, 1)
    }  # fmt: skip
    routers = [name for name, one in parameters.items() if one.dim() < 3 and name not in rest]
    stacked = [one for one in parameters if "expert" in one and "shared" not in one]
    return Experts(
        number=number,
        per_token=config.num_experts_per_tok,
        width=down // number // hidden,
        shared_width=_matrices(rest, hidden)[1] or None,
        shared_gate=any(parameters[name].shape == (1, hidden) for name in routers),
        dense_layers=frozenset(dense),
        bias=_any_bias(stacked),
        router_bias=_any_bias(name for name in routers if name not in stacked),
    )


def _window(config: Any, kind: str) -> tuple[int | None, frozenset[int], bool]:
    """The window of attention, the blocks without one, and whether it is a chunk."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or []
    for one in kinds:
        if one not in (*_FULL, *_LIMITED):
            raise InputError(f"model_type {kind!r} is not priced: a layer of the type {one!r}")
    chunked = "chunked_attention" in kinds
    names = ("attention_chunk_size",) if chunked else ("sliding_window", "window_size")
    window = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    full = frozenset(index for index, one in enumerate(kinds) if one in _FULL)
    unused = getattr(config, "use_sliding_window", True) is False or len(full) == len(kinds) > 0
    return (None, frozenset(), False) if unused or window is None else (window, full, chunked)


def _require_equal(found: Architecture, model: Any, blocks: list[nn.Module]) -> None:
    """Raise InputError unless parameters and FLOPs are those of the module."""
    counted = found.parameters()
    theirs = [sum(one.numel() for one in block.parameters()) for block in blocks]
    mine = [counted[f"block{index}"] for index in range(len(blocks))]
    for index, (one, other) in enumerate(zip(theirs, mine, strict=True)):
        if one != other:
            raise InputError(
                f"model_type {found.name!r} is not priced: block {index} has {one} parameters, and "
                f"attention and feed-forward as they are known {other}"
            )
    total = sum(one.numel() for one in model.parameters())
    if total != sum(counted.values()):
        raise InputError(
            f"model_type {found.name!r} is not priced: {total} parameters, of which embedding, "
            f"blocks and head as they are known have {sum(counted.values())}"
        )
    flops = _flops(model)
    known = sum(sum(one.values()) for one in found.flops(1, _TOKENS).values())
    if abs(flops - known) > _FLOPS_WITHIN * flops:
        raise InputError(
            f"model_type {found.name!r} is not priced: a forward of {_TOKENS} tokens takes "
            f"{flops:.4g} FLOPs, by its architecture {known:.4g}"
        )


def _flops(model: Any) -> float:
    """FLOPs of a forward of one short sample, as torch counts them."""
    with torch.device("meta"), torch.no_grad():
        tokens = torch.zeros(1, _TOKENS, dtype=torch.int64)
        mask = torch.zeros(1, 1, _TOKENS, _TOKENS)  # whole: most masks would be made with values
        for further in ({"attention_mask": mask}, {}):
            with FlopCounterMode(display=False) as counter:
                try:
                    model(input_ids=tokens, use_cache=False, **further)
                except (ValueError, RuntimeError):  # masks of two dimensions alone
                    continue
            return float(counter.get_total_flops())
    raise InputError(f"{type(model).__name__} does not run without values: it is not priced")
