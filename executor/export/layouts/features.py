"""Features of layouts, models and precisions that a framework may lack, each told in words."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.models.modules import modules_of
from stagewright.graphs.models.traits import NEXT_TOKENS

Told: TypeAlias = Callable[[TrainingProblem, Layout], str | None]


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature: in words if a layout of a problem has it, and what to choose in its place.

    ``of_problem``: the model or the precision alone is asked, whatever the layout.
    """

    told: Told
    instead: str
    of_problem: bool = False


def _some_blocks(problem: TrainingProblem, layout: Layout) -> str | None:
    blocks = layout.blocks_of_stages(problem.architecture.layers)
    again = layout.recomputed_of_stages(problem.architecture.layers)
    some = next((pair for pair in zip(again, blocks, strict=True) if 0 < pair[0] < pair[1]), None)
    return None if some is None else "{} recomputed blocks of {} in a stage".format(*some)


def _if(text: str, has: Callable[[TrainingProblem, Layout], bool]) -> Told:
    return lambda problem, layout: text if has(problem, layout) else None


def _shards(zero: int, _: TrainingProblem, layout: Layout) -> str | None:
    has = layout.zero == zero and layout.data * layout.context > 1
    return f"ZeRO {zero}" if has else None


def _attention_again(problem: TrainingProblem, layout: Layout) -> bool:
    return layout.recompute == "selective" and not problem.memory.by_operator


def _has_encoder(problem: TrainingProblem) -> bool:
    of = problem.architecture
    return of.encoder or (of.tower is not None and of.tower.is_encoder)


_SELECTIVE = "selective recomputation of the attention"

FEATURES = {
    "encoders": Feature(
        lambda of, _: f"an encoder ({of.architecture.name})" if _has_encoder(of) else None,
        "train a decoder", True,
    ),
    NEXT_TOKENS: Feature(
        _if(NEXT_TOKENS, lambda of, _: of.architecture.next_tokens is not None),
        "set num_nextn_predict_layers to 0", True,
    ),
    "products in fp8": Feature(
        _if("products in fp8", lambda of, _: of.precision.fp8_products), "set fp8_products false",
        True,
    ),
    "activations of one byte": Feature(
        _if("activations of 1 byte", lambda of, _: of.precision.activation_bytes == 1),
        "set activation_bytes 2", True,
    ),
    "adapters": Feature(
        _if("LoRA or frozen layers", lambda of, _: of.architecture.tuning is not None),
        "train all weights", True,
    ),
    "pipelines": Feature(
        lambda _, one: f"a pipeline of {one.pipeline}" if one.pipeline > 1 else None,
        "choose pipeline 1",
    ),
    "interleaved stages": Feature(
        lambda _, one: f"{one.chunks} chunks" if one.chunks > 1 else None, "choose chunks 1"
    ),
    "uneven stages": Feature(
        lambda of, one: (
            "stages of unequal numbers of blocks"
            if len(set(one.blocks_of_stages(of.architecture.layers))) > 1
            else None
        ),
        "choose a pipeline that divides the blocks",
    ),
    "tensor ranks": Feature(
        lambda _, one: f"tensor degree {one.tensor}" if one.tensor > 1 else None, "choose tensor 1"
    ),
    "sequence parallelism": Feature(
        _if("sequence parallelism over the tensor ranks", lambda _, one: one.sequence_parallel),
        "choose sequence_parallel false",
    ),
    "context ranks": Feature(
        lambda _, one: f"context degree {one.context}" if one.context > 1 else None,
        "choose context 1",
    ),
    "expert ranks": Feature(
        lambda _, one: f"expert degree {one.expert}" if one.expert > 1 else None, "choose expert 1"
    ),
    "zero bubbles": Feature(
        lambda _, one: f"the schedule {one.schedule}" if one.schedule != "1f1b" else None,
        "choose 1f1b",
    ),
    "ZB-H2 and DualPipe": Feature(
        lambda _, one: (
            f"the schedule {one.schedule}" if one.schedule in ("zb-h2", "dualpipe") else None
        ),
        "choose zero-bubble, zbv or dualpipev",
    ),
    "pipelines inside": Feature(
        _if(
            "the placement pipeline-inside",
            lambda _, one: one.placement == "pipeline-inside" and one.pipeline > 1 < one.data,
        ),
        "choose data-inside",
    ),
    **{
        f"ZeRO {zero}": Feature(
            partial(_shards, zero), "choose another stage of ZeRO"
        )
        for zero in (1, 2, 3)
    },
    "offloaded optimizers": Feature(
        _if("an offloaded optimizer", lambda _, one: one.offload_optimizer),
        "choose offload_optimizer false",
    ),
    "recomputed attention": Feature(_if(_SELECTIVE, _attention_again), "choose none or full"),
    "selective recomputation": Feature(
        _if(_SELECTIVE, lambda _, one: one.recompute == "selective"), "choose none or full"
    ),
    "recomputed modules": Feature(
        lambda _, one: f"recomputation of {one.recompute}" if modules_of(one.recompute) else None,
        "choose none or full",
    ),
    "offloaded activations": Feature(
        lambda _, one: (
            f"activations of {one.offload_blocks} blocks in host memory"
            if one.offload_blocks
            else None
        ),
        "choose offload_blocks 0",
    ),
    "recomputed blocks by stage": Feature(
        _if("recomputed blocks by stage", lambda _, one: one.recomputed_by_stage is not None),
        "choose full, with or without blocks",
    ),
    "some recomputed blocks": Feature(_some_blocks, "choose full for all"),
}  # fmt: skip
"""What ``frameworks.toml`` names."""
