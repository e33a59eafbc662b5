"""Transformers, random layouts of them, and what a layout says."""

import random
from dataclasses import replace

from layout_oracle import by_stage
from own_rates import own_rates

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import (
    TrainingProblem,
    require_layout,
)
from stagewright.formulations.prices.computing import Precision
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.fabric import Fabric, Level
from stagewright.graphs.machines.rates import Reached
from stagewright.graphs.models.architecture import (
    Architecture,
    Block,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    fields_of,
)
from stagewright.graphs.models.recurrences import Recurrence
from stagewright.graphs.models.traits import SQUARED_RELU

LLAMA = Architecture(
    "llama", 16, 1024, 32000, GroupedAttention(16, 4, 64), FeedForward(2816), rotary_base=5e5,
    norm_epsilon=1e-5,
)  # fmt: skip
GPT2 = Architecture(
    "gpt2", 12, 768, 50257, GroupedAttention(12, 12, 64, bias=True, output_bias=True),
    FeedForward(3072, gated=False, bias=True), norm="layer", positions=2048, tied=True,
    dropout=True, norm_epsilon=1e-5,
)  # fmt: skip
QWEN2 = Architecture(
    "qwen2", 24, 1024, 32000, GroupedAttention(16, 4, 64, bias=True), FeedForward(2816),
    window=512, full_layers=frozenset(range(10)), rotary_base=1e6, norm_epsilon=1e-6,
)  # fmt: skip
QWEN3 = Architecture(
    "qwen3", 24, 1024, 32000, GroupedAttention(16, 4, 128, head_norms=True), FeedForward(2816)
)
MIXTRAL = Architecture(
    "mixtral", 16, 1024, 32000, GroupedAttention(16, 8, 64), FeedForward(2048), Experts(8, 2, 2048)
)
QWEN2_MOE = Architecture(
    "qwen2_moe", 16, 1024, 32000, GroupedAttention(16, 8, 64, bias=True), FeedForward(2048),
    Experts(8, 2, 512, 2048, shared_gate=True),
)  # fmt: skip
DEEPSEEK = Architecture(
    "deepseek_v3", 16, 1024, 32000, LatentAttention(16, 128, 64, 32, 64, 256), FeedForward(4096),
    Experts(16, 4, 512, 1024, dense_layers=frozenset(range(3))),
    left_out="the layers of multi-token prediction",
)  # fmt: skip
QWEN3_MOE = replace(
    MIXTRAL, name="qwen3_moe", attention=GroupedAttention(16, 8, 64, head_norms=True)
)
MAMBA = Recurrence("ssd", 16, 64, 32, 4, 128, 4, convolution_bias=True)
_LAYERS = {
    "M": Block((MAMBA,), None, None),
    "*": Block((GroupedAttention(16, 4, 64),), None, None),
    "-": Block((), FeedForward(4096, gated=False), None),
    "E": Block((), None, Experts(8, 2, 512, 1024, gated=False)),
}


def hybrid(pattern, name="nemotron_h"):
    """A model with such layers as blocks."""
    blocks = [_LAYERS[one] for one in pattern]
    return Architecture(
        name, len(blocks), 1024, 32000, **fields_of(blocks, FeedForward(4096)), rotary=False,
        traits=(SQUARED_RELU,), norm_epsilon=1e-5,
    )  # fmt: skip


HYBRID = hybrid("ME*EM-M-" * 2)
ARCHITECTURES = (LLAMA, GPT2, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, DEEPSEEK, HYBRID)

ENDS = (None, None, 0, 1, 2, 3)


def make_problem(architecture, layout, microbatches=8, device="h100", sequence=1024, **others):
    """Servers of at most 8 devices."""
    ranks = layout.ranks
    levels = (Level("server", min(8, ranks), 4e11), Level("all", ranks, 5e10))
    return TrainingProblem(
        architecture, sequence, layout.data * layout.microbatch * microbatches,
        Fabric(device, 80e9, levels, 5e10), own_rates(Reached(0.7, 1e9, 0.8, 1e-6)), **others,
    )  # fmt: skip


def random_problem(seed):
    """A problem and a layout that keeps its rules."""
    draw = random.Random(seed)
    while True:
        try:
            problem, layout = _draw(draw)
            require_layout(problem, layout)
        except InputError:
            continue
        return problem, by_stage(layout, problem, draw) if draw.random() < 0.2 else layout


def _draw(draw):
    architecture = draw.choice(ARCHITECTURES)
    tensor, pipeline = draw.choice((1, 2, 4)), draw.choice((1, 1, 2, 4))
    sparse, uneven = architecture.experts is not None, pipeline > 1 and draw.random() < 0.5
    recompute = draw.choice(("none", "none", "selective", "full"))
    layout = Layout(
        pipeline, tensor, draw.choice((1, 1, 2)), draw.choice((1, 2, 4)),
        expert=draw.choice((1, 2, 4, 8)) if sparse else 1,
        microbatch=draw.choice((1, 2)),
        chunks=draw.choice((1, 1, 2)) if pipeline > 1 else 1,
        schedule=draw.choice(("1f1b", "1f1b", "zero-bubble")) if pipeline > 1 else "1f1b",
        recompute=recompute,
        recompute_blocks=draw.choice((None, 1, 3, 20)) if recompute == "full" else None,
        sequence_parallel=tensor > 1 and (sparse or draw.random() < 0.5),
        zero=draw.randrange(4),
        offload_optimizer=draw.random() < 0.15,
        placement=draw.choice(("data-inside", "data-inside", "pipeline-inside")),
        first_blocks=draw.choice(ENDS) if uneven else None,
        last_blocks=draw.choice(ENDS) if uneven else None,
    )  # fmt: skip
    problem = make_problem(
        architecture, layout, draw.choice((1, 4, 8)), draw.choice(("h100", "h100", "v100")),
        precision=_precision(draw), attention=draw.choice(("fused", "materialized")),
        overlap=draw.random() < 0.7,
    )  # fmt: skip
    return problem, layout


def _precision(draw):
    if draw.random() < 0.2:
        return Precision(4, 4, 4, draw.choice((8, 12)))
    fp8 = draw.random() < 0.2
    weights = draw.choice((1, 2)) if fp8 else 2
    return Precision(2, weights, draw.choice((2, 4, 4)), draw.choice((8, 12, 12, 12)), fp8)


def said(problem, layout):
    """What a layout says, whatever the format; ``inside``: which order of ranks matters."""
    both = layout.pipeline > 1 and layout.data > 1
    return {
        "ranks": layout.ranks,
        "pipeline": layout.pipeline,
        "tensor": layout.tensor,
        "context": layout.context,
        "data": layout.data,
        "expert": layout.expert,
        "microbatch": layout.microbatch,
        "batch": problem.batch,
        "accumulation": layout.microbatches(problem.batch),
        "blocks": layout.blocks_of_stages(problem.architecture.layers),
        "schedule": layout.schedule,
        "recompute": layout.recompute,
        "recompute_blocks": layout.recompute_blocks,
        "offload_blocks": layout.offload_blocks,
        "sequence_parallel": layout.sequence_parallel,
        "zero": layout.zero,
        "offload": layout.offload_optimizer,
        "inside": both and layout.placement == "pipeline-inside",
    }
