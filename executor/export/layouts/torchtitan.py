"""A layout for TorchTitan (0.3.0): a function that sets a trainer's configuration.

Data parallelism is FSDP2's over the data and the context ranks. In a pipeline, weights and
gradients stay whole over all microbatches of an iteration (torch/distributed/pipelining/stage.py),
so that only the optimizer's state is divided: ZeRO 1. Without one, gradients are divided after
every microbatch: ZeRO 2, or 3 if the weights are too (``fsdp_reshard_after_forward``).
"""

from stagewright.executor.export.layouts.common import (
    Fields,
    assignments,
    launch,
    left_out,
    number_type,
    refuse_encoder,
    refuse_fp8,
    refuse_selective,
    refuse_some_blocks,
    require_bytes,
)
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError

NAME = "TorchTitan"
FILE = "stagewright_torchtitan.py"

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

_TEXT = '''\
"""The layout {words} that Stagewright chose, for TorchTitan (0.3.0).

    from stagewright_torchtitan import configure

    def my_config():  # in a config registry
        return configure(...)  # the configuration of the model that the layout is for

on {ranks} ranks: {launch} ...{remarks}
"""

from torchtitan.distributed.activation_checkpoint import FullAC

RANKS = {ranks}


def configure(config):
    """Set the layout in a Trainer.Config."""
    layers = len(config.model_spec.model.layers)
    if layers != {layers}:
        raise ValueError(f"the plan is for {layers} layers, the model has {{layers}}")
{lines}    config.activation_checkpoint = {checkpoint}
    return config
'''


def configuration(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """A module with the function ``configure``."""
    refuse_encoder(problem.architecture, NAME)
    refuse_fp8(problem, NAME)
    _require_states(problem, layout)
    _require_experts(problem, layout)
    _require_sequence(problem, layout)
    _require_pipeline(problem, layout)
    refuse_selective(layout, NAME, "keeps other operators in its selective mode")
    refuse_some_blocks(problem, layout, NAME)
    fields = {**_degrees(layout), **_pipeline(problem, layout)}
    text = _TEXT.format(
        words=layout,
        ranks=layout.ranks,
        launch=launch(problem),
        remarks="".join(f"\n{line}" for line in _remarks(problem, layout)),
        layers=problem.architecture.layers,
        lines=assignments("config.training", _training(problem, layout))
        + assignments("config.parallelism", fields),
        checkpoint="FullAC.Config()" if layout.recompute == "full" else None,
    )
    return {FILE: text}


def _shards(problem: TrainingProblem, layout: Layout) -> int:
    """Most ranks over which FSDP divides equal weights, the experts' or others."""
    shared = layout.data * layout.context
    if problem.architecture.experts is None:
        return shared
    return max(shared, layout.tensor * shared // layout.expert)


def _degrees(layout: Layout) -> Fields:
    sharded = layout.zero > 0
    return {
        "data_parallel_replicate_degree": 1 if sharded else layout.data,
        "data_parallel_shard_degree": layout.data if sharded else 1,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tensor,
        "enable_sequence_parallel": layout.sequence_parallel,
        "context_parallel_degree": layout.context,
        "expert_parallel_degree": layout.expert,
        "pipeline_parallel_degree": layout.pipeline,
    }


def _pipeline(problem: TrainingProblem, layout: Layout) -> Fields:
    if layout.pipeline == 1:
        return {"module_fqns_per_model_part": None}
    return {
        "pipeline_parallel_schedule": _schedule(layout),
        "pipeline_parallel_schedule_csv": "",
        "pipeline_parallel_microbatch_size": layout.microbatch,
        "module_fqns_per_model_part": _modules(problem, layout),
    }


def _schedule(layout: Layout) -> str:
    """Torch's name; its order of zero bubbles with one chunk is that of ZB-H1."""
    if layout.schedule == "zero-bubble":
        return "InterleavedZeroBubble"
    return "1F1B" if layout.chunks == 1 else "Interleaved1F1B"


def _modules(problem: TrainingProblem, layout: Layout) -> list[list[str]]:
    """The modules of every stage; the first has the embedding, the last norm and head."""
    parts: list[list[str]] = []
    first = 0
    for count in layout.blocks_of_stages(problem.architecture.layers):
        parts.append([f"layers.{index}" for index in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _training(problem: TrainingProblem, layout: Layout) -> Fields:
    """A pipeline's microbatches are parts of a local batch, others are accumulated."""
    together = layout.microbatches(problem.batch) if layout.pipeline > 1 else 1
    numbers = number_type(problem, NAME)
    if numbers == "fp16":
        raise InputError(
            f"{problem.card.name} has no bf16, and {NAME} no fp16: set activation_bytes 4, or "
            "export to megatron or deepspeed"
        )
    precision = problem.precision
    pure = (precision.weight_bytes, precision.gradient_bytes, precision.optimizer_bytes)
    known = [(2, 4, 12), (2, 2, 4)] if numbers == "bf16" else [(4, 4, 8)]
    require_bytes(problem, known, NAME)
    fields: Fields = {
        "seq_len": problem.sequence,
        "local_batch_size": layout.microbatch * together,
        "global_batch_size": problem.batch,
        "dtype": "bfloat16" if pure == (2, 2, 4) else "float32",
        "mixed_precision_param": _DTYPES[numbers],
        "enable_cpu_offload": False,
    }
    # It has no CUDA graphs of a pipeline or of experts on several ranks, and refuses both together.
    no_graphs = layout.pipeline > 1 or layout.expert > 1
    return fields | ({"disable_cuda_graphs": True} if no_graphs else {})


def _require_states(problem: TrainingProblem, layout: Layout) -> None:
    if layout.offload_optimizer:
        raise InputError(
            f"an offloaded optimizer: {NAME} offloads parameters and gradients with it; choose "
            "offload_optimizer false, or export to megatron or deepspeed"
        )
    if layout.zero == 0 and layout.context > 1:
        raise InputError(
            f"ZeRO 0 with context degree {layout.context}: {NAME} divides the states over the "
            f"context ranks; choose zero {1 if layout.pipeline > 1 else '2 or 3'}"
        )
    if _shards(problem, layout) == 1:
        return
    if layout.pipeline > 1 and layout.zero > 1:
        raise InputError(
            f"ZeRO {layout.zero} in a pipeline: {NAME} keeps whole weights and gradients over the "
            "microbatches of an iteration; choose zero 1"
        )
    if layout.pipeline == 1 and layout.zero == 1:
        raise InputError(
            f"ZeRO 1 without a pipeline: {NAME} divides the gradients too; choose zero 2"
        )


def _require_experts(problem: TrainingProblem, layout: Layout) -> None:
    if problem.architecture.experts is None:
        return
    if layout.expert == 1 and layout.tensor > 1:
        raise InputError(
            f"experts on {layout.tensor} tensor ranks with expert degree 1: {NAME} divides the "
            f"experts themselves; choose an expert degree of at least 2"
        )
    shared = layout.tensor * layout.context * (layout.data if layout.zero else 1)
    if layout.zero == 0 and layout.expert != shared:
        raise InputError(
            f"ZeRO 0 with expert degree {layout.expert}: {NAME} divides the experts over tensor x "
            f"context = {shared} ranks then; choose expert {shared} or ZeRO"
        )


def _require_sequence(problem: TrainingProblem, layout: Layout) -> None:
    parts = layout.tensor if layout.sequence_parallel else 1
    if layout.context > 1:
        parts *= 2 * layout.context
    if problem.sequence % parts:
        raise InputError(
            f"{problem.sequence} tokens: {NAME} needs a multiple of {parts} (tensor with sequence "
            "parallelism, twice the context degree)"
        )


def _require_pipeline(problem: TrainingProblem, layout: Layout) -> None:
    if layout.pipeline == 1:
        return
    if layout.placement == "pipeline-inside" and layout.data > 1:
        raise InputError(
            f"the placement pipeline-inside: {NAME} has the pipeline outermost; choose "
            "data-inside, or export to megatron"
        )
    if problem.architecture.tied:
        raise InputError(
            f"a tied head in a pipeline: {NAME} ties no weights over stages; choose pipeline "
            "1, or export to megatron"
        )
    microbatches = layout.microbatches(problem.batch)
    if layout.schedule == "zero-bubble":
        _require_zero_bubble(layout, microbatches)
    elif layout.chunks == 1 and microbatches < layout.pipeline:
        raise InputError(
            f"{microbatches} microbatches in a pipeline of {layout.pipeline}: {NAME}'s 1F1B needs "
            "at least as many microbatches as stages"
        )


def _require_zero_bubble(layout: Layout, microbatches: int) -> None:
    """Torch's groups of microbatches have one size; its W repeats what is not kept."""
    if microbatches % max(1, microbatches // layout.pipeline):
        raise InputError(
            f"{microbatches} microbatches with zero bubbles in a pipeline of {layout.pipeline}: "
            f"{NAME} runs them in rounds of one size; choose a multiple of {layout.pipeline}"
        )
    if layout.recompute == "full":
        raise InputError(
            f"full recomputation with zero bubbles: {NAME} repeats the forward for both parts of a "
            "backward, the plan once; choose none, or the schedule 1f1b"
        )


def _remarks(problem: TrainingProblem, layout: Layout) -> list[str]:
    found = list(left_out(problem.architecture))
    microbatches = layout.microbatches(problem.batch)
    repeats = layout.pipeline == 1 and microbatches > 1 and _shards(problem, layout) > 1
    if repeats and layout.zero == 0:
        found.append(f"It sums gradients after each of {microbatches} microbatches, the plan once.")
    if repeats and layout.zero == 2:
        found.append(
            f"It gathers the weights for each of {microbatches} microbatches, the plan once."
        )
    if layout.schedule == "zero-bubble":
        found.append("Torch's split backwards do not run in compiled modules.")
    if not problem.overlap:
        found.append("It overlaps exchanges and computation, which the plan does not.")
    return found
