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
