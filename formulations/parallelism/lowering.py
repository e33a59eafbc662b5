"""A layout, found by an estimate, as a pipeline plan that is checked, simulated and run.

The layers are the embedding, the blocks and the head, with the times that the estimate has for
them. What a pipeline plan and its run cannot say is refused by name. Where the two models differ,
and by how much, is in docs/layouts.md, "From a layout to a run".
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.checking.peaks import memory_exceeded
from stagewright.formulations.checking.times import read_times
from stagewright.formulations.parallelism.layer_times import LayerTime, share_time
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import shares
from stagewright.formulations.parallelism.schedules import Schedule, stages_of_ranks
from stagewright.formulations.parallelism.states import held, update_seconds
from stagewright.formulations.parallelism.training import (
    TrainingProblem,
    require_layout,
)
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import Shards
from stagewright.formulations.prices.computing import layer_cost
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.planned import starts_to_the_end
from stagewright.formulations.schedules.published.kinds import KINDS, Sizes
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.machines.fabric import cluster_of
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.graphs.models.shards import LayerShare, LayerSplit


def lowered(
    problem: TrainingProblem, layout: Layout, names: Sequence[str] | None = None
) -> tuple[PipelineProblem, PipelinePlan]:
    """The layout as a checked plan, and the problem that the plan answers.

    ``names`` are those of the layers in the module that is run; by default ``embedding``,
    ``blocks.0`` and so on, and ``head``. The plan has no certificate yet: the bound of a layout is
    on the estimate's time, which is another one.

    Raises
    ------
    InputError
        If a rule of the layout does not hold, if a pipeline plan cannot express it, if there are
        other layers than ``names``, or if it does not fit in memory as a plan.
    """
    require_layout(problem, layout)
    require_expressible(problem, layout)
    asked = PipelineProblem(
        chain_of(problem, layout, names),
        cluster_of(problem.fabric),
        layout.microbatches(problem.batch),
        memory_limit_bytes=problem.fabric.memory_bytes - problem.reserve_bytes,
    )
    plan = carried_out(asked, problem, layout)
    for short in memory_exceeded(read_times(asked, plan)):
        raise InputError(
            f"the layout does not fit as a pipeline plan: {short.place} {short.message}"
        )
    require_valid(asked, plan)
    return asked, plan


def carried_out(asked: PipelineProblem, problem: TrainingProblem, layout: Layout) -> PipelinePlan:
    """The layout's stages and order, with the times of ``asked``; neither checked nor refused."""
    stages = stages_of(problem, layout, asked.cluster)
    starts = starts_to_the_end(asked, stages, _order(layout, asked.microbatches))
    return assemble(asked, "layout", stages, starts)


def chain_of(problem: TrainingProblem, layout: Layout, names: Sequence[str] | None = None) -> Chain:
    """The layers with the costs of a microbatch of all replicas, and of each replica's part.

    A layer that uses the embedding's table has a copy of it, as in other models' chains. The
    bytes of a parameter are those of the weight; what gradients and optimizer take in addition is
    the optimizer's state.

    Raises InputError if ``names`` are not as many as there are layers.
    """
    count = problem.architecture.layers
    own = ["embedding", *(f"blocks.{i}" for i in range(count)), "head"]
    if names is not None and len(names) != len(own):
        raise InputError(
            f"the layout's model has {len(own)} layers (embedding, {count} blocks, head), the "
            f"names are {len(names)}"
        )
    whole, divided = (shares(problem, split).every for split in (LayerSplit(), layout.split))
    layers = [
        Layer(name, _parameter_bytes(problem, one), tuple(_costs(problem, layout, one, shard)))
        for name, one, shard in zip(names or own, whole, divided, strict=True)
    ]
    return Chain(
        problem.architecture.name,
        f"computed for {problem.fabric.device}, sequences of {problem.sequence}, of a layout",
        layout.data * layout.microbatch,
        tuple(layers),
        # Where the replicas divide the optimizer's state alone, what gradients take in addition
        # stays whole: it counts as many times as the state is divided.
        problem.precision.state_factor(layout.data if shards_of(layout) == "optimizer" else 1),
    )


def stages_of(problem: TrainingProblem, layout: Layout, cluster: Cluster) -> tuple[Stage, ...]:
    """Stage s on the devices of its pipeline rank, whose tensor ranks are next to each other.

    What the estimate recomputes are blocks, one at a time, each from its input: ``layer``.
    """
    blocks = layout.blocks_of_stages(problem.architecture.layers)
    again = layout.recomputed_of_stages(problem.architecture.layers)
    cuts = [0, *(1 + done for done in accumulate(blocks))]
    cuts[-1] += 1
    placed = stages_of_ranks(layout.pipeline, layout.chunks, layout.form.in_v)
    rank_of = np.argsort(placed, axis=None) // layout.chunks
    return tuple(
        Stage(
            (cuts[s], cuts[s + 1]),
            tuple(cluster.devices[i].name for i in _ranks(layout, int(rank_of[s]))),
            recompute="layer" if again[s] else "none",
            tensor=layout.tensor,
            shards=shards_of(layout),
        )
        for s in range(layout.stages)
    )


def _ranks(layout: Layout, rank: int) -> list[int]:
    """The ranks of a position in the pipeline, replica by replica."""
    first = rank * layout.pipeline_stride
    return [
        first + replica * layout.data_stride + shard
        for replica in range(layout.data)
        for shard in range(layout.tensor)
    ]


def _order(layout: Layout, microbatches: int) -> Order:
    """The published order; a plan has no pairs: their forward comes before their backward."""
    kind = _KINDS[layout.schedule]
    return KINDS[kind].generate(Sizes(layout.pipeline, microbatches), layout.chunks)


_KINDS: dict[Schedule, str] = {
    "1f1b": "interleaved", "zero-bubble": "interleaved-zb", "zb-h2": "zb-h2", "zbv": "zbv",
    "dualpipev": "dualpipev",
}  # fmt: skip
"""Which published schedule a layout's is; a plan has no second copies of stages."""


def _costs(
    problem: TrainingProblem, layout: Layout, whole: LayerShare, shard: LayerShare
) -> Iterator[LayerCost]:
    """Costs of a layer at degree 1 and the tensor degree, for one replica's samples and for all."""
    for samples in sorted({layout.microbatch, layout.data * layout.microbatch}):
        yield _cost(problem, layout, whole, LayerSplit(), samples)
        if layout.tensor > 1:
            yield _cost(problem, layout, shard, layout.split, samples)


def _cost(
    problem: TrainingProblem, layout: Layout, share: LayerShare, split: LayerSplit, samples: int
) -> LayerCost:
    split_backward = layout.form.is_split
    time = share_time(problem, share, split, samples, "none", split_backward)
    degree = split.tensor if split.tensor > 1 else None
    of = held(((share, False, 1),), tied=True)
    return layer_cost(
        problem.processor,
        share,
        samples,
        device_kind=problem.fabric.device,
        forward_seconds=time.forward,
        # Of all numbers: the plan's stages say which part of the step a replica does.
        update_seconds=update_seconds(problem, replace(layout, zero=0), of),
        tensor=degree,
        shard_parameter_bytes=None if degree is None else _parameter_bytes(problem, share),
        **_backward(time, split_backward),
    )


def _backward(time: LayerTime, in_parts: bool) -> dict[str, float]:
    if not in_parts:
        return {"backward_seconds": time.backward}
    return {
        "input_gradient_seconds": time.backward - time.weight,
        "weight_gradient_seconds": time.weight,
    }


def _parameter_bytes(problem: TrainingProblem, share: LayerShare) -> float:
    return (share.parameters + share.tied_parameters) * problem.precision.weight_bytes


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
