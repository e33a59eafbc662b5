"""Schedule files of ``torch.distributed.pipelining``, and the frameworks that read them.

The file is what ``_PipelineScheduleRuntime._load_csv(..., "compute_only")`` reads (torch 2.13): a
row per rank, computations only. Any stage may be on any rank; torch adds the transfers.
"""

from collections.abc import Mapping

from stagewright.executor.export.megatron import modules
from stagewright.executor.export.options import (
    FormatOptions,
    filled,
    samples_per_replica,
    stage_layers,
    to_yaml,
)
from stagewright.executor.export.pipelines import Pipeline, orders, pipeline, require_plain
from stagewright.formulations.plans.actions import Action, ActionKind, F, parse_action
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.schedules.order import Order, Row
from stagewright.graphs.documents.errors import InputError

SCHEDULE = "schedule.csv"

Names = Mapping[str, str]

# A loss is not one of their modules.
TORCHTITAN: Names = {
    "embedding": "tok_embeddings",
    "block": "layers.{}",
    "norm": "norm",
    "head": "lm_head",
    "loss": "",
}
NEMO: Names = {
    "embedding": "model.embed_tokens",
    "block": "model.layers.{}",
    "norm": "model.norm",
    "head": "lm_head",
    "loss": "",
}

# The recipes of torchtitan recompute: their selective mode is not what the plan's times are of.
_NO_RECOMPUTATION = "    config.activation_checkpoint = None  # the plan recomputes nothing\n"

_ROTARY = "model.rotary_emb"  # every stage of a Hugging Face decoder needs it


def schedule(plan: PipelinePlan, options: FormatOptions) -> dict[str, str]:
    """The schedule file; copies of the pipeline have equal shares of the samples, if known."""
    ranks = pipeline(plan, "torch")
    if plan.microbatch_size is not None or options.model is not None:
        samples_per_replica(plan, options, ranks.replicas)
    return {SCHEDULE: _csv(plan, ranks)}


def torchtitan(plan: PipelinePlan, options: FormatOptions) -> dict[str, str]:
    """A module that sets the stages and their schedule in a configuration, with the schedule file.

    Names of torchtitan 0.3.0, for its decoders: Llama 3, Qwen 3, DeepSeek-V3, gpt-oss. Others have
    other names, but a configuration takes any: the module refuses them. torchtitan silently drops
    the layers that no stage names, so the module counts them too.
    """
    ranks = pipeline(plan, "torchtitan", "weights")
    fields = {
        "pipeline_parallel_degree": len(ranks.devices),
        **_replication(ranks),
        "pipeline_parallel_schedule": _schedule_name(ranks, options, "torchtitan"),
    }
    files = {} if options.partition_only else {SCHEDULE: _csv(plan, ranks)}
    fields["pipeline_parallel_schedule_csv"] = SCHEDULE if files else ""
    stages = _modules(plan, options, TORCHTITAN, "torchtitan")
    text = filled(
        "torchtitan_pipeline",
        blocks=sum(name.startswith("layers.") for part in stages for name in part),
        batch=_torchtitan_batch(plan, options, ranks),
        microbatches=plan.microbatches,
        ranks=len(ranks.devices) * ranks.replicas,
        recompute=_NO_RECOMPUTATION * (not options.partition_only),
        fields="".join(f"    parallelism.{name} = {value!r}\n" for name, value in fields.items()),
        parts="".join(f"        {part!r},\n" for part in stages),
    )
    return {**files, "stagewright_parallelism.py": text}


def _replication(ranks: Pipeline) -> dict[str, int | str]:
    """Whole replicas, or FSDP that keeps no weights from a forward to its backward."""
    if ranks.shards == "none":
        return {"data_parallel_replicate_degree": ranks.replicas, "data_parallel_shard_degree": 1}
    return {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": ranks.replicas,
        "fsdp_reshard_after_forward": "always",
    }


def _torchtitan_batch(plan: PipelinePlan, options: FormatOptions, ranks: Pipeline) -> str:
    """Lines that set the samples of a pipeline's iteration and of all, if the plan's are known."""
    if options.model is None:
        return ""
    local = samples_per_replica(plan, options, ranks.replicas) * plan.microbatches
    return (
        f"    config.training.local_batch_size = {local}\n"
        f"    config.training.global_batch_size = {local * ranks.replicas}\n"
    )


def nemo(plan: PipelinePlan, options: FormatOptions) -> dict[str, str]:
    """The ``distributed`` section of a NeMo AutoModel recipe (0.5 to 0.7), with the schedule file.

    Its modules are those of Hugging Face's decoders, such as Llama's: ``model.layers.0``.
    """
    ranks = pipeline(plan, "NeMo AutoModel")
    if ranks.replicas > 1 and not options.partition_only:
        # Its mesh refuses dp_replicate_size == dp_size.
        raise InputError(
            f"stage 0 is on {ranks.replicas} devices that each hold all its weights: NeMo "
            "AutoModel shards them; --partition-only exports only the stages"
        )
    if plan.microbatches < len(ranks.devices):
        raise InputError(
            f"{plan.microbatches} microbatches on {len(ranks.devices)} ranks: NeMo AutoModel needs "
            "at least as many microbatches as ranks"
        )
    samples = samples_per_replica(plan, options, ranks.replicas)
    parts = _modules(plan, options, NEMO, "NeMo AutoModel")
    section = {
        "pp_schedule": _schedule_name(ranks, options, "NeMo AutoModel"),
        "pp_microbatch_size": samples,
        "module_fqns_per_model_part": [[*part, _ROTARY] for part in parts],
    }
    files = {} if options.partition_only else {SCHEDULE: _csv(plan, ranks)}
    if files:
        section["pp_schedule_csv"] = SCHEDULE
    config = {
        "step_scheduler": {
            "global_batch_size": samples * plan.microbatches * ranks.replicas,
            "local_batch_size": samples * plan.microbatches,
        },
        "distributed": {
            "strategy": "fsdp2",
            "pp_size": len(ranks.devices),
            "dp_size": ranks.replicas,
            "pipeline": section,
        },
    }
    blocks = sum(name.startswith("model.layers.") for part in parts for name in part)
    head = (
        "# The pipeline that Stagewright planned: merge it into a recipe of NeMo AutoModel.\n"
        f"# It is for a decoder of {blocks} layers (num_hidden_layers). Other modules that every\n"
        "# stage needs must be added to every list.\n"
    )
    return {**files, "stagewright_nemo.yaml": head + to_yaml(config)}


def remarks(plan: PipelinePlan) -> tuple[str, ...]:
    """Remarks that a schedule file cannot express."""
    ranks = pipeline(plan, "torch")
    stages = zip(plan.stages, ranks.rank_of_stage, strict=True)
    found = [
        f"stage {s}: layers {stage.layers[0]} to {stage.layers[1] - 1}, row {rank}"
        for s, (stage, rank) in enumerate(stages)
    ]
    if ranks.replicas > 1:
        found.append(
            f"the pipeline runs {ranks.replicas} times, each copy with the same file and its equal "
            "share of every microbatch's samples: average the gradients over the copies"
        )
        actions = (parse_action(entry.action) for entry in plan.actions)
        if any(action.kind is ActionKind.WEIGHT_GRADIENT for action in actions):
            found.append(
                "DistributedDataParallel does not reduce the gradients of W: reduce them yourself "
                "after each step"
            )
    return tuple(found)


def _csv(plan: PipelinePlan, ranks: Pipeline) -> str:
    require_plain(plan, "a schedule file of torch")
    return _rows_csv(orders(plan, ranks), len(plan.stages), plan.microbatches)


def order_csv(order: Order) -> str:
    """The schedule file of an order.

    Raises InputError if torch cannot run it: stages have several copies, or losses would be mixed
    up.
    """
    if len(order.paths) > 1:
        raise InputError(
            f"a schedule file of torch has one rank per stage; here every stage has "
            f"{len(order.paths)} copies"
        )
    return _rows_csv(order.rows, len(order.device), order.microbatches)


def _rows_csv(rows: tuple[Row, ...], stages: int, microbatches: int) -> str:
    _require_losses_in_order(rows, stages - 1, microbatches)
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def _require_losses_in_order(rows: tuple[Row, ...], last: int, microbatches: int) -> None:
    """Torch finds a microbatch's loss by counting the last stage's forwards."""
    for rank, row in enumerate(rows):
        found = [action for action in row if action.stage == last and action.kind is F]
        if found:
            wanted = [Action(last, F, m) for m in range(microbatches)]
            for action, other in zip(found, wanted, strict=True):
                if action != other:
                    raise InputError(
                        f"rank {rank}: the last stage does {action} where torch, which counts its "
                        f"forwards, takes it for {other} and computes wrong gradients; plan them "
                        "in the order of the microbatches"
                    )


def _schedule_name(ranks: Pipeline, options: FormatOptions, framework: str) -> str:
    """A schedule of the plan's placement; the file, where there is one, replaces its order."""
    count = len(ranks.devices)
    if count == 1:
        raise InputError(f"all stages are on one rank, and {framework} needs two for a pipeline")
    if ranks.is_loop:
        if not options.partition_only:
            return "PipelineScheduleMulti"
        return "1F1B" if len(ranks.rank_of_stage) == count else "Interleaved1F1B"
    if ranks.rank_of_stage == (*range(count), *reversed(range(count))):
        return "ZBVZeroBubble"
    raise InputError(
        f"stages are on ranks {', '.join(map(str, ranks.rank_of_stage))}: {framework} knows them "
        "only in a loop (0, 1, 0, 1) or a V (0, 1, 1, 0)"
    )


def _modules(
    plan: PipelinePlan, options: FormatOptions, names: Names, framework: str
) -> list[list[str]]:
    """Per stage the framework's own modules; a head without a norm before it counts as both."""
    parts = modules(stage_layers(plan, options), names, framework)
    if not any(names["norm"] in part for part in parts):
        parts[-1].insert(parts[-1].index(names["head"]), names["norm"])
    return parts
