"""What sets a transformer apart from a plain Llama or GPT, in words."""

from collections.abc import Collection
from dataclasses import replace

from stagewright.graphs.documents.units import counted
from stagewright.graphs.models.architecture import Architecture, GroupedAttention, LatentAttention
from stagewright.graphs.models.recurrences import RECURRENT, Recurrence
from stagewright.graphs.models.splits import mixers_of

SIDE_BY_SIDE = "attention and feed-forward of one input"
EMBEDDING_NORM = "a norm of the embedding"
LOGITS_BIAS = "biases of the logits"
SCALES_ONLY = "layer norms without biases"
NO_WEIGHTS = "norms without weights"
NORMS_AFTER = "norms after attention and feed-forward alone"
ALIBI = "ALiBi in place of positions"
PARTLY_ROTATED = "rotary positions in part of a head"
SQUARED_RELU = "a squared ReLU"
ADJACENT = "rotations of adjacent elements"
ADDED_ONE = "norms that add 1 to their weights"
CLAMPED = "clamped gates"
SINKS = "attention sinks"
GATED = "gates of the attention's output"
VARIED = "blocks with other parts than others have"
ENCODER_DECODER = "an encoder and a decoder"
TOWER = "a tower for images"
NEXT_TOKENS = "multi-token prediction"
DIFFUSION = "patches of latents in place of tokens"
RECURRENCES = {
    "ssd": "Mamba-2 mixers",
    "delta": "mixers by the gated delta rule",
    "kda": "Kimi delta attention",
    "lightning": "lightning attention",
    "SelectiveScan": "Mamba mixers",
    "ShortConvolution": "short convolutions",
}
"""Traits of mixers by their rule or class."""


def recurrences_of(of: Architecture) -> tuple[str, ...]:
    """The kinds of a model's recurrent mixers, in words."""
    every = (one for one in mixers_of(of) if isinstance(one, RECURRENT))
    names = (one.rule if isinstance(one, Recurrence) else type(one).__name__ for one in every)
    return tuple(RECURRENCES[name] for name in dict.fromkeys(names))


def common_traits(of: Architecture) -> tuple[str, ...]:
    """Those that a plain Llama lacks and that many exports can say."""
    grouped = of.attention if isinstance(of.attention, GroupedAttention) else None
    found = {
        "experts": of.experts is not None,
        "latent attention": isinstance(of.attention, LatentAttention),
        "shared experts": of.experts is not None and of.experts.shared_width is not None,
        "biases of attention": of.attention.bias or (grouped is not None and grouped.output_bias),
        "biases of the feed-forward": of.feed_forward.bias,
        "norms of heads": grouped is not None and grouped.head_norms,
        "a feed-forward without gates": not of.feed_forward.gated,
        "windows": of.window is not None,
        "an encoder": of.encoder,
        "learned positions": of.positions is not None,
        "tied embeddings": of.tied,
        "layer norms": of.norm == "layer",
    }
    return tuple(what for what, has in found.items() if has)


def counted_traits(of: Architecture) -> tuple[str, ...]:
    """Those of few models that change parameters or operators."""
    attention, experts = of.attention, of.experts
    grouped = attention if isinstance(attention, GroupedAttention) else None
    found = {
        DIFFUSION: of.diffusion is not None,  # first, as a refusal names the first
        SIDE_BY_SIDE: of.parallel,
        EMBEDDING_NORM: of.embedding_norm,
        LOGITS_BIAS: of.logits_bias,
        SCALES_ONLY: of.norm == "layer-scale",
        NO_WEIGHTS: of.norm == "layer-plain",
        "norms of heads with weights for each": grouped is not None and grouped.whole_norms,
        GATED: grouped is not None and grouped.gate,
        SINKS: grouped is not None and grouped.sinks,
        "biases of experts": experts is not None and (experts.bias or experts.router_bias),
        "attention in chunks": of.chunked,
        "experts without gates": experts is not None and not experts.gated,
        VARIED: any(not one.fed or not one.mixers or one.feed_forward for one in of.variants),
        "a ReLU": of.feed_forward.relu,
        ENCODER_DECODER: of.tower is not None and of.tower.is_encoder,
        TOWER: of.tower is not None and not of.tower.is_encoder,
        NEXT_TOKENS: of.next_tokens is not None,
        "logits without a norm before": not of.final_norm,
        "keys without biases": grouped is not None and not grouped.key_bias,
        f"{counted(of.block_norms, 'norm', 'norms')} in a block": of.block_norms != 2,
    }
    return (*recurrences_of(of), *(what for what, has in found.items() if has))


def every_trait(of: Architecture) -> tuple[str, ...]:
    """The counted traits, and those that change no cost."""
    return (*counted_traits(of), *of.traits)


def lacking(of: Architecture, sequence: int, has: Collection[str]) -> list[str]:
    """The traits of a model at so many tokens that are not among those that something ``has``."""
    if of.window is not None and of.window >= sequence:
        of = replace(of, window=None, full_layers=frozenset(), chunked=False)
    return [one for one in (*common_traits(of), *every_trait(of)) if one not in has]


def said_parameters(of: Architecture) -> str:
    """The number of parameters, and how many of them a token uses where experts are chosen."""
    whole = sum(of.parameters().values())
    found = f"{whole / 1e9:,.4g} B parameters"
    if of.experts is None:
        return found
    active = whole - of.routed_parameters() * (1 - of.experts.per_token / of.experts.number)
    return f"{found}, of which a token uses {active / 1e9:,.4g} B"


def remarks_on(of: Architecture, sequence: int) -> tuple[str, ...]:
    """What the prices of a model leave out or assume, and what no rates were fitted to."""
    found = [] if of.left_out is None else [f"without {of.left_out}"]
    if recurrences_of(of):
        found.append(f"{' and '.join(recurrences_of(of))} at the rate of matrix products")
    if of.tower is not None:
        found.append(of.tower.says(sequence))
    if of.diffusion is not None and of.diffusion.text is not None:
        found.append(f"{of.diffusion.text.tokens} tokens of text in a sample")
    if of.next_tokens is not None:
        found.append("blocks of multi-token prediction beside the head, not recomputed")
    return tuple(found)
