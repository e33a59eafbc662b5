"""Hybrids in Megatron Core 0.20: of attention and Mamba-2, or the gated delta rule.

With Mamba-2 every layer is a letter of a pattern (core/models/hybrid), and a mixer or a
feed-forward alone: M a Mamba-2 mixer, * attention, + latent attention, - a feed-forward, E experts;
| ends a stage. With the gated delta rule blocks are those of a GPT (core/ssm/gated_delta_net).
"""

from collections.abc import Iterable, Iterator, Sequence

from stagewright.executor.export.layouts.common import Fields
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import (
    Architecture,
    Block,
    GroupedAttention,
    LatentAttention,
)
from stagewright.graphs.models.mixers import AnyMixer
from stagewright.graphs.models.recurrences import Recurrence
from stagewright.graphs.models.splits import mixers_of
from stagewright.graphs.models.traits import RECURRENCES, VARIED, every_trait

MAMBA, ATTENTION, LATENT, FED, EXPERTS = "M*+-E"
SPEC = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
KERNEL = 4  # tokens of the convolution: core/ssm/mamba_mixer.py
CHUNK = 128


def is_hybrid(of: Architecture) -> bool:
    """Whether blocks have Mamba-2 mixers, or no mixer, or nothing behind it."""
    return not {RECURRENCES["ssd"], VARIED}.isdisjoint(every_trait(of))


def recurrence_of(of: Architecture) -> Recurrence | None:
    """The first recurrent mixer of a model."""
    return next((one for one in mixers_of(of) if isinstance(one, Recurrence)), None)


def layers_of(block: Block) -> str:
    """The layers of a block."""
    fed = EXPERTS if block.experts else FED if block.feed_forward else ""
    return "".join(map(_letter, block.mixers)) + fed


def _letter(mixer: AnyMixer) -> str:
    if isinstance(mixer, LatentAttention):
        return LATENT
    return ATTENTION if isinstance(mixer, GroupedAttention) else MAMBA


def pattern(of: Architecture, stages: Sequence[int] | None = None) -> str:
    """The layers of a model, whose ``stages`` have so many blocks; None: of one stage."""
    blocks = iter([layers_of(of.parts(index)) for index in range(of.layers)])
    counts = (of.layers,) if stages is None else stages
    return "|".join("".join(next(blocks) for _ in range(count)) for count in counts)


def layers_in_block(of: Architecture) -> set[int]:
    """How many layers blocks have: 1, or 2 where a mixer and a feed-forward are in one."""
    return {len(layers_of(of.parts(index))) for index in range(of.layers)}


def delta_fields(of: Architecture) -> Fields:
    """The sizes of mixers by the gated delta rule."""
    mixer = recurrence_of(of)
    if mixer is None or mixer.rule != "delta":
        return {}
    return {
        "experimental_attention_variant": "gdn",
        "linear_conv_kernel_dim": mixer.kernel_size,
        "linear_key_head_dim": mixer.state_size,
        "linear_value_head_dim": mixer.head_size,
        "linear_num_key_heads": mixer.groups,
        "linear_num_value_heads": mixer.heads,
    }


def mamba_fields(of: Architecture) -> Fields:
    """The sizes of Mamba-2 mixers."""
    mixer = recurrence_of(of)
    if mixer is None:
        return {}
    return {
        "mamba_state_dim": mixer.state_size,
        "mamba_head_dim": mixer.head_size,
        "mamba_num_groups": mixer.groups,
        "mamba_num_heads": mixer.heads,
    }


def remarks(of: Architecture) -> list[str]:
    """What trains otherwise than it is priced."""
    mixer = recurrence_of(of)
    if mixer is None or mixer.rule != "ssd" or mixer.chunk == CHUNK:
        return []
    return [f"Mamba-2 mixers scan chunks of {CHUNK} tokens, planned are {mixer.chunk}."]


def require_blocks(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Refuse a hybrid whose layers Megatron Core lacks."""
    of = problem.architecture
    if is_hybrid(of) or recurrence_of(of) is not None:
        for wrong in _lacking(of):
            raise InputError(f"{of.name} has {wrong}: {framework} has no such hybrid")


def _lacking(of: Architecture) -> Iterator[str]:
    blocks = [of.parts(index) for index in range(of.layers)]
    mixers = [one for one in mixers_of(of) if isinstance(one, Recurrence)]
    attentions = {one for one in mixers_of(of) if not isinstance(one, Recurrence)}
    widths = {one.feed_forward for one in blocks if one.feed_forward is not None}
    scaling = of.stated.rotary_scaling
    of_pattern = {
        "mixers of several kinds or sizes": len(attentions) > 1,
        "feed-forwards of several widths": len(widths) > 1,
        "windows": of.window is not None,
        "norms of heads": any(isinstance(a, GroupedAttention) and a.head_norms for a in attentions),
        "rotary positions scaled by other than yarn": (
            scaling is not None and scaling.kind != "yarn"
        ),
        "recurrences other than Mamba-2": any(one.rule != "ssd" for one in mixers),
    }
    wrong = {
        "two mixers in a block": any(len(one.mixers) > 1 for one in blocks),
        "recurrences of several kinds or sizes": len({*mixers}) > 1,
        **(of_pattern if is_hybrid(of) else {}),
        **_of_mixer(mixers),
    }
    return (what for what, has in wrong.items() if has)


def _of_mixer(mixers: Iterable[Recurrence]) -> dict[str, bool]:
    """What the first mixer has otherwise than those of Megatron Core."""
    for one in mixers:
        biased = one.rule == "ssd"  # the convolution of Mamba-2
        return {
            "biases of mixers' projections": one.bias or one.output_bias,
            "convolutions without biases": biased and not one.convolution_bias,
            "convolutions with biases": not biased and one.convolution_bias,
            f"convolutions of other than {KERNEL} tokens": biased and one.kernel_size != KERNEL,
            "mixers without norms": not one.norm,
        }
    return {}


def require_groups(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Refuse tensor ranks that would share a group of heads."""
    mixer = recurrence_of(problem.architecture)
    if mixer is not None and mixer.groups % layout.tensor:
        raise InputError(
            f"tensor degree {layout.tensor} with {mixer.groups} groups of a mixer's heads: "
            f"{framework} gives every tensor rank equally many of its own; choose a divisor"
        )


def require_layers(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Refuse what is counted in blocks, where a block is not one layer."""
    of = problem.architecture
    if not is_hybrid(of) or layers_in_block(of) == {1}:
        return
    counted = {
        f"{layout.recompute_blocks} recomputed blocks": layout.recompute_blocks is not None,
        f"activations of {layout.offload_blocks} blocks in host memory": layout.offload_blocks > 0,
        "full recomputation of blocks of one and of two layers": (
            layout.recompute == "full" and len(layers_in_block(of)) > 1
        ),
    }
    for what in (what for what, has in counted.items() if has):
        raise InputError(
            f"{what} with a mixer and a feed-forward in a block: {framework} has a layer for each; "
            "choose another recomputation"
        )


def require_even_stages(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Refuse stages that a recipe's hybrid cannot have: several of a rank, or unequal ones."""
    uneven = len({*layout.blocks_of_stages(problem.architecture.layers)}) > 1
    if is_hybrid(problem.architecture) and (uneven or layout.chunks > 1):
        raise InputError(
            f"{layout.stages} {'unequal ' if uneven else ''}stages of a hybrid on "
            f"{layout.pipeline} ranks: {framework} divides its layers into equal stages, one on "
            "each rank; choose chunks 1 and a pipeline that divides the blocks"
        )
