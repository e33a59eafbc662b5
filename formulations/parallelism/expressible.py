"""Which layouts a pipeline plan can express; see ``lowering``."""

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.plan_class import Shards
from stagewright.graphs.documents.errors import InputError


def shards_of(layout: Layout) -> Shards:
    """The state that replicas divide by the layout's ZeRO stage; none with a single replica."""
    if layout.data == 1:
        return "none"
    kinds: dict[int, Shards] = {1: "optimizer", 2: "gradients", 3: "weights"}
    return kinds.get(layout.zero, "none")


def require_expressible(problem: TrainingProblem, layout: Layout) -> None:
    """Refuse, with a remedy, the first feature of a layout that a plan or its run does not have."""
    blocks = layout.blocks_of_stages(problem.architecture.layers)
    again = layout.recomputed_of_stages(problem.architecture.layers)
    some = next((pair for pair in zip(again, blocks, strict=True) if 0 < pair[0] < pair[1]), None)
    shards = shards_of(layout)
    refused = [
        (layout.context > 1, f"context degree {layout.context}", "c1"),
        (problem.architecture.experts is not None, "experts", "a model without them"),
        (
            any((problem.architecture.tower, problem.architecture.next_tokens))
            or problem.architecture.diffusion is not None,
            "encoder, tower, patches of latents or multi-token prediction",
            "a decoder alone",
        ),
        (
            problem.architecture.tuning is not None,
            "frozen weights or adapters",
            "a training of all weights",
        ),
        (layout.sequence_parallel, "sequence parallelism", "a layout without sp"),
        (
            shards != "none" and layout.pipeline > 1 and problem.architecture.tied,
            "stages with shards that share a tied table",
            "zero0, p1, or a model that is not tied",
        ),
        (
            layout.tensor > 1 and layout.pipeline > 1 and problem.architecture.tied,
            "divided stages that share a tied table",
            "t1, p1, or a model that is not tied",
        ),
        (
            layout.form.copies > 1,
            "second copies of stages (dualpipe)",
            "dualpipev, on half the ranks",
        ),
        (layout.offload_optimizer, "offloaded optimizer", "a layout without offload"),
        (layout.offload_blocks > 0, "offloaded activations of blocks", "offload_blocks 0"),
        (
            layout.recompute not in ("none", "full"),
            f"recomputation of {layout.recompute}",
            "none or full",
        ),
        (
            some is not None,
            "recomputation of {} of a stage's {} blocks".format(*(some or (0, 0))),
            "full without blocks",
        ),
    ]
    for is_there, what, instead in refused:
        if is_there:
            raise InputError(f"a pipeline plan that runs has no {what}; choose {instead}")
