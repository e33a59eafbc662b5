"""DeepSpeed (0.19): a ``PipelineModule`` with the plan's cuts, and its configuration.

``partition_method`` accepts no cuts (deepspeed/runtime/pipe/module.py), so the written module
overrides ``_partition_layers``. The order is DeepSpeed's ``TrainSchedule``, 1F1B.
"""

import json

from stagewright.executor.export.options import (
    FormatOptions,
    filled,
    layer_names,
    samples_per_replica,
)
from stagewright.executor.export.pipelines import orders, pipeline, require_order, require_plain
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.schedules.published.one_f_one_b import one_f_one_b
from stagewright.graphs.documents.errors import InputError

NAME = "DeepSpeed"


def module(plan: PipelinePlan, options: FormatOptions) -> dict[str, str]:
    """A module that builds the pipeline, and batch sizes and ZeRO 1 in ``ds_config.json``."""
    ranks = pipeline(plan, NAME, "optimizer")
    count = len(ranks.devices)
    if count < len(plan.stages):
        raise InputError(
            f"{len(plan.stages)} stages on {count} ranks: {NAME} has one stage on each rank"
        )
    interval = 0
    if not options.partition_only:
        require_plain(plan, NAME, recompute=True)
        interval = _checkpoint_interval(plan)
        known = one_f_one_b(count, plan.microbatches).rows
        require_order(orders(plan, ranks), known, f"{NAME}'s schedule")
    samples = samples_per_replica(plan, options, ranks.replicas)
    text = filled(
        "deepspeed_pipeline",
        layers="".join(f"    {name!r},\n" for name in layer_names(plan, options)),
        cuts=[0, *(stage.layers[1] for stage in plan.stages)],
        stages=count,
        interval=interval,
    )
    sizes: dict[str, object] = {
        "train_batch_size": samples * ranks.replicas * plan.microbatches,
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": plan.microbatches,
    }
    if ranks.shards == "optimizer":
        sizes["zero_optimization"] = {"stage": 1}
    return {"stagewright_pipeline.py": text, "ds_config.json": json.dumps(sizes, indent=1) + "\n"}


def _checkpoint_interval(plan: PipelinePlan) -> int:
    """The number of layers between checkpoints of a stage; 0 keeps all activations."""
    first = plan.stages[0].recompute
    for s, stage in enumerate(plan.stages):
        if stage.recompute != first:
            raise InputError(
                f"stage {s} recomputes {stage.recompute!r}, stage 0 {first!r}: {NAME} has one "
                "activation_checkpoint_interval for all stages"
            )
    longest = max(stage.layers[1] - stage.layers[0] for stage in plan.stages)
    return {"none": 0, "layer": 1, "full": longest}[first]
