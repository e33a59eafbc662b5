"""The architecture of any decoder of transformers, read from its module on torch's meta device.

The module is built without memory, and its blocks are looked at: norms, attention, feed-forward or
experts. The architecture is given only where its parameters are those of the module, layer by
layer, and its FLOPs those that torch counts of a forward.
"""

import math
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stagewright.executor.capture.mixers import Named, any_bias, matrices, mixer_of
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import (
    Architecture,
    Block,
    Experts,
    FeedForward,
    fields_of,
)
from stagewright.graphs.models.mixers import AnyMixer
from stagewright.graphs.models.recurrences import RECURRENT

TRAIT = "blocks that only its module tells"

_DROPOUTS = ("resid_pdrop", "residual_dropout", "hidden_dropout", "hidden_dropout_prob", "dropout")

_FULL = (
    "full_attention", "global", "linear_attention", "conv", "moe", "mlp", "hybrid", "mamba",
    "attention",
)  # fmt: skip
_LIMITED = ("sliding_attention", "local", "chunked_attention")

_TOKENS = 16
_FLOPS_WITHIN = 0.001


def architecture_of_module(values: dict[str, Any]) -> Architecture:
    """The architecture of a configuration of a type that transformers has.

    Raises InputError where transformers cannot build it, or where the module has what an
    architecture does not say.
    """
    kind = values["model_type"]
    model = _built(kind, values)
    config = model.config.get_text_config()
    try:
        blocks = _blocks(model, kind, config.num_hidden_layers)
        found = _architecture(kind, model, config, blocks)
    except InputError:
        raise
    except Exception as error:  # of parts or fields that known types have; transformers has its own
        raise InputError(
            f"model_type {kind!r} is not priced: its blocks lack what known ones have, "
            f"{_said(error)}"
        ) from error
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
        raise InputError(f"transformers cannot build it: {_said(error)}") from error
    model.tie_weights()
    return model.eval()


def _said(error: Exception) -> str:
    """The first sentence of a message."""
    return " ".join(str(error).split()).partition(". ")[0][:200]


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
    parts = [_parted(one, config, hidden) for one in blocks]
    norms = max((_norms(one) for one in blocks), key=len)
    is_whole = any(one.mixers and one.is_fed for one in parts)
    number = len(norms) if is_whole else 2
    width = getattr(config, "intermediate_size", None) if any(o.experts for o in parts) else None
    tables = [
        one.num_embeddings
        for one in model.modules()
        if isinstance(one, nn.Embedding) and one is not embedding and one.embedding_dim == hidden
    ]
    rows = max(tables, default=None)
    window, full, chunked = _window(config, kind)
    return Architecture(
        name=kind,
        layers=len(blocks),
        hidden=hidden,
        vocabulary=vocabulary,
        **fields_of(parts, FeedForward(width or 4 * hidden)),
        norm=_norm(norms),
        block_norms=number,
        parallel=number == 1 or _has(config, "use_parallel_residual", "parallel_attn"),
        embedding_norm=len(ends) > 1,
        rotary=bool(tables) or any("rotary" in type(o).__name__.lower() for o in model.modules()),
        positions=rows,
        unused_positions=_unused(rows or 0, config),
        logits_bias=getattr(head, "bias", None) is not None,
        tied=head.weight is embedding.weight,
        window=window,
        full_layers=full,
        chunked=chunked,
        dropout=any(getattr(config, name, 0.0) > 0.0 for name in _DROPOUTS),
        traits=(TRAIT,),
    )


def _unused(rows: int, config: Any) -> int | None:
    """Rows of the table of positions that no token has: OPT's begins with two."""
    longest = getattr(config, "max_position_embeddings", None) or rows
    return rows - longest if rows > longest else None


def _has(config: Any, *names: str) -> bool:
    return any(getattr(config, name, False) is True for name in names)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _norms(block: nn.Module) -> list[nn.Module]:
    return [one for one in block.children() if _is_norm(one)]


def _norm(norms: list[nn.Module]) -> Any:
    """The kind of a block's norms."""
    weights = [dict(one.named_parameters()) for one in norms]
    if not any(weights):
        return "layer-plain"
    if any("bias" in one for one in weights):
        return "layer"
    return "rms" if any("rms" in type(one).__name__.lower() for one in norms) else "layer-scale"


def _parted(block: nn.Module, config: Any, hidden: int) -> Block:
    """What a block has: mixers of its children, and what belongs to neither them nor norms."""
    mixers, rest = list[AnyMixer](), dict[str, Tensor]()
    for name, one in block.named_children():
        if _is_norm(one) or not _has_weights(one):
            continue
        mixer = mixer_of(name, one, config, hidden)
        if mixer is not None:
            mixers.append(mixer)
        else:
            rest |= {f"{name}.{inner}": each for inner, each in one.named_parameters()}
    mixers.sort(key=lambda one: isinstance(one, RECURRENT))
    if any(one.dim() > 2 for one in rest.values()):
        return Block(tuple(mixers), None, _experts(rest, config, hidden))
    return Block(tuple(mixers), _dense(rest, config, hidden) if rest else None, None)


def _dense(parameters: Named, config: Any, hidden: int) -> FeedForward:
    """The feed-forward of these parameters."""
    ins, width = matrices(parameters, hidden)
    names = (getattr(config, name, None) for name in ("hidden_act", "activation_function"))
    return FeedForward(
        max(1, width), gated=ins > width, bias=any_bias(parameters), relu="relu" in names
    )


def _experts(parameters: Named, config: Any, hidden: int) -> Experts:
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
        shared_width=matrices(rest, hidden)[1] or None,
        shared_gate=any(parameters[name].shape == (1, hidden) for name in routers),
        bias=any_bias(stacked),
        router_bias=any_bias(name for name in routers if name not in stacked),
        gated=sum(one.numel() for one in stacks) > 2 * down,
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
    flops, known = _flops(model, blocks, found), _products(found)
    if abs(flops - known) > _FLOPS_WITHIN * flops:
        raise InputError(
            f"model_type {found.name!r} is not priced: a forward of {_TOKENS} tokens takes "
            f"{flops:.4g} FLOPs, by its architecture {known:.4g}"
        )


def _products(of: Architecture) -> float:
    """FLOPs of the products of a short forward; convolutions count what they pad in torch."""
    layers = of.operators(1, _TOKENS).values()
    every = (one for layer in layers for one in layer.values())
    return sum(one.flops for one in every if one.kind != "convolution")


def _flops(model: Any, blocks: list[nn.Module], found: Architecture) -> float:
    """FLOPs of the products in a forward of one short sample, as torch counts them.

    Of blocks of one kind the first runs, and the others give what it gave.
    """
    names = {id(one): f"{type(model).__name__}.{name}" for name, one in model.named_modules()}
    firsts: dict[Any, str] = {}
    given: dict[Any, Any] = {}
    repeats = []
    for index, block in enumerate(blocks):
        kind = found.kind(index)
        if kind in firsts:
            repeats.append(firsts[kind])
            block.forward = partial(_giving, given, kind)
        else:
            firsts[kind] = names[id(block)]
            block.register_forward_hook(partial(_keep, given, kind))
    counts = _counted(model)
    every = [
        flops
        for name in ("Global", *repeats)
        for operator, flops in counts.get(name, {}).items()
        if operator is not torch.ops.aten.convolution
    ]
    return float(sum(every))


def _keep(given: dict[Any, Any], kind: Any, module: nn.Module, inputs: Any, output: Any) -> None:
    given[kind] = output


def _giving(given: dict[Any, Any], kind: Any, *_: Any, **__: Any) -> Any:
    return given[kind]


def _triangular_flops(matrix: Any, right: Any, *_: Any, **__: Any) -> float:
    """FLOPs of forward substitution, which torch does not count."""
    *batch, rows, columns = right
    return float(math.prod(batch) * rows * rows * columns)


def _counted(model: Any) -> Mapping[str, Mapping[Any, float]]:
    """FLOPs of a forward by module and operator."""
    solving = {torch.ops.aten.linalg_solve_triangular: _triangular_flops}
    with torch.device("meta"), torch.no_grad():
        tokens = torch.zeros(1, _TOKENS, dtype=torch.int64)
        mask = torch.zeros(1, 1, _TOKENS, _TOKENS)  # whole: most masks would be made with values
        for further in ({"attention_mask": mask}, {}):
            with FlopCounterMode(display=False, custom_mapping=solving) as counter:
                try:
                    model(input_ids=tokens, use_cache=False, **further)
                except (ValueError, RuntimeError):  # masks of two dimensions alone
                    continue
            counts: Mapping[str, Mapping[Any, float]] = counter.get_flop_counts()
            return counts
    raise InputError(f"{type(model).__name__} does not run without values: it is not priced")
