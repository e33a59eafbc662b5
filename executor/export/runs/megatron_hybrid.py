"""Hybrids by the arguments of Megatron-LM: a block for every letter of their pattern."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stagewright.executor.export.layouts.hybrid import (
    ATTENTION,
    CHUNK,
    EXPERTS,
    FED,
    KERNEL,
    LATENT,
    MAMBA,
)
from stagewright.executor.export.runs.arguments import Arguments
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import Block, Experts, FeedForward, Variant, fields_of
from stagewright.graphs.models.mixers import AnyAttention
from stagewright.graphs.models.recurrences import Recurrence
from stagewright.graphs.models.stated import RotaryScaling, Routing, Stated
from stagewright.graphs.models.traits import (
    ADDED_ONE,
    ADJACENT,
    CLAMPED,
    PARTLY_ROTATED,
    SQUARED_RELU,
)

POSITIONS = ("learned_absolute", "rope", "yarn", "none")
_ROUTER = ("score-function", "pre-softmax", "num-groups", "group-topk", "topk-scaling-factor",
           "enable-expert-bias", "load-balancing-type")  # fmt: skip


def read_stated(arguments: Arguments, positions: str, *, latent: bool, experts: bool) -> Stated:
    """The values of a model with these ``positions``, with ``latent`` attention or ``experts``."""
    scaling = _latent_scaling(arguments) if latent else _scaling(arguments, positions)
    routing = _routing(arguments)
    return Stated(
        rotary_part=arguments.real("--rotary-percent"),
        rotary_scaling=scaling,
        routing=routing if experts else None,
    )


def read_traits(arguments: Arguments) -> tuple[str, ...]:
    """The traits that arguments say, in words."""
    clamped = arguments.flag("--quick-geglu")
    for name, value in (("--activation-func-clamp-value", 7.0), ("--glu-linear-offset", 1.0)):
        arguments.require(name, (value,) if clamped else ())
    part = arguments.real("--rotary-percent")
    found = {
        SQUARED_RELU: arguments.flag("--squared-relu"),
        ADJACENT: arguments.flag("--rotary-interleaved"),
        ADDED_ONE: arguments.flag("--apply-layernorm-1p"),
        CLAMPED: clamped,
        PARTLY_ROTATED: part not in (None, 1.0),
    }
    return tuple(sorted(what for what, has in found.items() if has))


def _latent_scaling(arguments: Arguments) -> RotaryScaling | None:
    """Latent attention scales by YaRN unless it is told not to."""
    factor = arguments.real("--rotary-scaling-factor")
    scale, scale_all = (arguments.real(one) for one in _SCALES)
    if arguments.choice("--rope-type", ("yarn", "rope")) == "rope":
        return None
    return RotaryScaling(
        "yarn", 40.0 if factor is None else factor, mscale=scale, mscale_all_dim=scale_all
    )


_SCALES = ("--mscale", "--mscale-all-dim")


def _scaling(arguments: Arguments, positions: str) -> RotaryScaling | None:
    linear = arguments.real("--rotary-seq-len-interpolation-factor")
    scaled, factor = arguments.flag("--use-rope-scaling"), arguments.real("--rope-scaling-factor")
    if positions == "yarn":
        scale, scale_all = (arguments.real(one) for one in _SCALES)
        longest = arguments.number("--yarn-original-max-position-embeddings")
        return RotaryScaling(
            "yarn",
            factor=arguments.real("--rotary-scaling-factor") or 1.0,
            original_max_position_embeddings=longest,
            beta_fast=arguments.real("--yarn-beta-fast"),
            beta_slow=arguments.real("--yarn-beta-slow"),
            mscale=scale,
            mscale_all_dim=scale_all,
            truncate=not arguments.flag("--no-yarn-correction-range-round-to-int"),
        )
    if scaled:
        return RotaryScaling("llama3", 8.0 if factor is None else factor)
    return None if linear is None else RotaryScaling("linear", linear)


def _routing(arguments: Arguments) -> Routing | None:
    """The router, None if nothing is said of it."""
    said = any(f"--moe-router-{name}" in arguments.values for name in _ROUTER)
    scores = arguments.choice("--moe-router-score-function", ("softmax", "sigmoid"))
    before = arguments.flag("--moe-router-pre-softmax")
    names = ("num-groups", "group-topk")
    groups, chosen = (arguments.number(f"--moe-router-{name}") for name in names)
    scale = arguments.real("--moe-router-topk-scaling-factor")
    loss = arguments.real("--moe-aux-loss-coeff")
    kinds = ("aux_loss", "none", "seq_aux_loss", "global_aux_loss", "sinkhorn")
    evened = arguments.choice("--moe-router-load-balancing-type", kinds) not in ("none", "sinkhorn")
    biased = arguments.flag("--moe-router-enable-expert-bias")
    if not said and not loss:
        return None
    return Routing(
        scores="sigmoid" if scores == "sigmoid" else "softmax",
        normalized=scores == "sigmoid" or not before,
        groups=groups,
        chosen_groups=chosen,
        scale=scale or 1.0,
        choice_bias=biased,
        loss=(loss or None) if evened else None,
    )


_KNOWN = MAMBA + ATTENTION + LATENT + FED + EXPERTS
_DELTA_SIZES = {
    "num-value-heads": 32, "value-head-dim": 128, "key-head-dim": 128, "num-key-heads": 16,
    "conv-kernel-dim": 4,
}  # fmt: skip
"""Arguments, and their defaults."""

_DELTA_CHUNK = 64  # fla's chunk_gated_delta_rule
_SPECS = ("hybrid_stack_spec", "mamba_stack_spec")


def read_pattern(arguments: Arguments) -> list[list[str]] | None:
    """The layers of the blocks of every stage; None of a model that is no hybrid.

    Where full recomputation keeps the input of every second layer, two layers are a block.
    Raises InputError for layers that are not known.
    """
    name = "--hybrid-layer-pattern"
    text = arguments.text(name, "--hybrid-override-pattern")
    arguments.flag("--is-hybrid-model")
    arguments.read.add("--spec")
    if text is None:
        return None
    wrong = sorted({*text} - {*_KNOWN, "|"})
    if wrong:
        raise InputError(f"{name}: {wrong[0]!r} is none of the layers {' '.join(_KNOWN)}")
    *_, spec = arguments.values.get("--spec", ["hybrid_stack_spec"])
    if spec not in _SPECS:
        raise InputError(f"--spec {spec}: read are {', '.join(_SPECS)}")
    pairs = arguments.number("--recompute-num-layers") == 2
    stages = text.split("|")
    if pairs and all(re.fullmatch(f"([{MAMBA}*+][{EXPERTS}-])*", one) for one in stages):
        return [re.findall("..", one) for one in stages]
    return [[*one] for one in stages]


def hybrid_fields(
    arguments: Arguments,
    stages: list[list[str]],
    hidden: int,
    attention: Callable[[], AnyAttention],
    fed: FeedForward,
    experts: Experts | None,
) -> dict[str, Any]:
    """The fields of an architecture with these blocks."""
    layers = [one for stage in stages for one in stage]
    letters = {*"".join(layers)}
    if EXPERTS in letters and experts is None:
        raise InputError(f"--hybrid-layer-pattern has experts ({EXPERTS}); add --num-experts")
    mixers: dict[str, Any] = {MAMBA: _mamba(arguments, hidden)}
    if not letters.isdisjoint({ATTENTION, LATENT}):
        mixers |= dict.fromkeys((ATTENTION, LATENT), attention())
    else:
        arguments.read.update(("--num-attention-heads", "--kv-channels"))
    every = None if experts is None else replace(experts, dense_layers=frozenset())
    blocks = [
        Block(
            mixers=tuple(mixers[one] for one in layer if one in mixers),
            feed_forward=fed if FED in layer else None,
            experts=every if EXPERTS in layer else None,
        )
        for layer in layers
    ]
    return {"layers": len(blocks), **fields_of(blocks, fed)}


def delta_variants(arguments: Arguments, layers: int) -> tuple[Variant, ...]:
    """The blocks of a GPT that mix tokens by the gated delta rule."""
    sizes = [arguments.number(f"--linear-{one}") or usual for one, usual in _DELTA_SIZES.items()]
    kinds = ("", "gdn", "gated_delta_net")
    kind = arguments.choice("--experimental-attention-variant", kinds)
    text = arguments.text("--linear-attention-freq")
    if not kind:
        return ()
    if text is None:
        raise InputError("--linear-attention-freq is missing; write the blocks: 4 or [1]*3+[0]*1")
    every = int(text) if text.isdecimal() else 0
    limited = (
        [(index + 1) % every > 0 for index in range(layers)]
        if every
        else flags(text, layers, "--linear-attention-freq")
    )
    heads, size, state, groups, kernel = sizes
    mixer = Recurrence("delta", heads, size, state, groups, _DELTA_CHUNK, kernel)
    blocks = frozenset(index for index, one in enumerate(limited) if one)
    return (Variant(blocks, mixers=(mixer,)),) if blocks else ()


def flags(text: str, layers: int, name: str) -> list[int]:
    """One flag for every layer: N is every N-th from the first, or ``([0]*3+[1]*58)``."""
    if text.isdecimal() and int(text):
        return [int(i % int(text) == 0) for i in range(layers)]
    runs = re.findall(r"\[([01 ,]+)\](?:\*(\d+))?", text)
    found = [int(one) for ones, n in runs for _ in range(int(n or 1)) for one in ones.split(",")]
    whole = re.fullmatch(r"\(?(\[[01 ,]+\](\*\d+)?\+?)+\)?", text.replace(" ", ""))
    if whole is None or len(found) != layers:
        raise InputError(f"{name} {text}: write a number, or {layers} flags such as [0]*1+[1]*9")
    return found


def _mamba(arguments: Arguments, hidden: int) -> Recurrence:
    head = arguments.number("--mamba-head-dim") or 64
    return Recurrence(
        "ssd",
        heads=arguments.number("--mamba-num-heads") or 2 * hidden // head,
        head_size=head,
        state_size=arguments.number("--mamba-state-dim") or 128,
        groups=arguments.number("--mamba-num-groups") or 8,
        chunk=CHUNK,
        kernel_size=KERNEL,
        convolution_bias=True,
    )
