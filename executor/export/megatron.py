"""Arguments of Megatron-LM (core 0.16 to 0.20): ``--pipeline-model-parallel-layout`` and others.

The layout is read by megatron/core/transformer/pipeline_parallel_layer_layout.py: ``E`` is the
embedding, ``t`` a transformer layer, ``L`` the output layer with the loss; ``|`` separates stages.
Stage s is chunk s // P of rank s mod P. The order of the computations is Megatron-LM's.
"""

import re
import shlex

from stagewright.executor.export.decoder import modules
from stagewright.executor.export.options import FormatOptions, samples_per_replica, stage_layers
from stagewright.executor.export.pipelines import (
    Pipeline,
    orders,
    pipeline,
    require_order,
    require_plain,
)
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.schedules.published.one_f_one_b import interleaved
from stagewright.graphs.documents.errors import InputError

NAME = "Megatron-LM"

_OUTPUT = ("norm", "pooler", "head", "loss")
SYMBOLS = {"embedding": "E", "block": "t{}", **dict.fromkeys(_OUTPUT, "L")}


def arguments(plan: PipelinePlan, options: FormatOptions) -> dict[str, str]:
    """A file for bash that sets the array ``MEGATRON_ARGUMENTS``."""
    ranks = pipeline(plan, NAME, "optimizer")
    count, stages = len(ranks.devices), len(plan.stages)
    _require_loop(plan, ranks)
    parts = modules(stage_layers(plan, options), SYMBOLS, NAME)
    layout = ["".join(part[0] for part in stage) for stage in parts]
    if not options.partition_only:
        require_plain(plan, NAME)
        known = interleaved(count, stages // count, plan.microbatches).rows
        require_order(orders(plan, ranks), known, f"{NAME}'s schedule")
    samples = samples_per_replica(plan, options, ranks.replicas)
    words = [
        *("--pipeline-model-parallel-size", count),
        *("--pipeline-model-parallel-layout", "|".join(map(_shortened, layout))),
        *("--num-layers", sum(stage.count("t") for stage in layout)),
        *("--micro-batch-size", samples),
        *("--global-batch-size", samples * ranks.replicas * plan.microbatches),
    ]
    if stages > count:
        words += ["--microbatch-group-size-per-virtual-pipeline-stage", count]
    lines = "".join(
        f"  {name} {shlex.quote(str(value))}\n"
        for name, value in zip(words[::2], words[1::2], strict=True)
    )
    lines += "  --use-distributed-optimizer\n" * (ranks.shards == "optimizer")
    head = (
        "# The pipeline that Stagewright planned, for Megatron-LM: source this file, then on\n"
        f"# {count * ranks.replicas} ranks\n"
        '#   torchrun ... pretrain_gpt.py "${MEGATRON_ARGUMENTS[@]}" ...\n'
        "# with what is not in the plan: the model (--hidden-size, --num-attention-heads, ...),\n"
        "# --seq-length, the precision (--bf16), data, tokenizer and learning rate.\n"
    )
    return {"megatron.sh": f"{head}MEGATRON_ARGUMENTS=(\n{lines})\n"}


def _require_loop(plan: PipelinePlan, ranks: Pipeline) -> None:
    count, stages = len(ranks.devices), len(plan.stages)
    for s, rank in enumerate(ranks.rank_of_stage):
        if rank != s % count:
            raise InputError(
                f"stage {s} is on rank {rank}, where {NAME} has it on rank {s % count}: it assigns "
                "stages to ranks round-robin"
            )
    if stages % count:
        raise InputError(f"{stages} stages on {count} ranks: {NAME} has equally many on each")
    if stages > count and (count == 1 or plan.microbatches % count):
        raise InputError(
            f"{stages} stages on {count} ranks with {plan.microbatches} microbatches: {NAME} "
            "interleaves on at least 2 ranks, with a multiple of their number of microbatches"
        )


def _shortened(symbols: str) -> str:
    """Write runs of ``t`` as products: ``Ettt`` as ``Et*3``."""
    return re.sub("tt+", lambda run: f"t*{len(run[0])}", symbols)
