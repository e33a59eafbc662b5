"""A layout for TorchTitan (0.3.0): a function that sets a trainer's configuration.

Data parallelism is FSDP2's over the data and the context ranks. In a pipeline, weights and
gradients stay whole over all microbatches of an iteration (torch/distributed/pipelining/stage.py),
so that only the optimizer's state is divided: ZeRO 1. Without one, gradients are divided after
every microbatch: ZeRO 2, or 3 if the weights are too (``fsdp_reshard_after_forward``).
"""

from stagewright.executor.export.layouts.common import (
    Fields,
    assignments,
    compared,
    launch,
    left_out,
    number_type,
    rotary_and_norms,
)
from stagewright.executor.export.layouts.rules import (
    FrameworkRule,
    framework,
    require_bytes,
    require_whole_heads,
)
from stagewright.executor.export.options import filled
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.schedules import Schedule
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import Architecture, GroupedAttention, LatentAttention
from stagewright.graphs.models.stated import RotaryScaling, Routing

FILE = "stagewright_torchtitan.py"

ACTIVE_STAGES = 3  # of a rank with gathered weights; torch/distributed/pipelining/schedules.py
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_CHECKPOINTING = {"none": None, "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}


def configuration(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """A module with the function ``configure``."""
    fields = {**_degrees(layout), **_pipeline(problem, layout)}
    text = filled(
        "torchtitan",
        words=layout,
        ranks=layout.ranks,
        launch=launch(problem),
        remarks="".join(f"\n{line}" for line in _remarks(problem, layout)),
        layers=problem.architecture.layers,
        compared=_compared(problem.architecture),
        model=_model(problem.architecture),
        lines=assignments("config.training", _training(problem, layout))
        + assignments("config.parallelism", fields),
        checkpoint=_CHECKPOINTING[layout.recompute],
    )
    return {FILE: text}


def _compared(of: Architecture) -> str:
    sizes: Fields = {"dim": of.hidden, "vocab_size": of.vocabulary}
    attention = of.first_attention
    heads: Fields = {"n_heads": attention.heads}
    if isinstance(attention, GroupedAttention):
        heads["n_kv_heads"] = attention.key_value_heads
    return compared("model", sizes) + compared("model.layers[0].attention", heads)


def _model(architecture: Architecture) -> str:
    """Lines that set rotary positions, routers and the epsilon of every norm."""
    known = rotary_and_norms(architecture, "theta", "eps")
    rotary = {"theta": known["theta"]} if "theta" in known else {}
    rotary |= _scaling(architecture.stated.rotary_scaling)
    lines = "".join(f"        layer.attention.rope.{k} = {v!r}\n" for k, v in rotary.items())
    scaling = architecture.stated.rotary_scaling
    if scaling is not None and isinstance(architecture.attention, LatentAttention):
        lines += f"        layer.attention.mscale = {scaling.mscale_all_dim or 0.0}\n"
    router = _router(architecture.stated.routing)
    if router:
        lines += '        if getattr(layer, "moe", None) is not None:\n'
        lines += "".join(f"            layer.moe.router.{k} = {v!r}\n" for k, v in router.items())
    if lines:
        lines = "    for layer in model.layers:\n" + lines
    if "eps" in known:
        names = ("norm", "attention_norm", "ffn_norm", "qk_norm", "q_norm", "kv_norm")
        lines += (
            "    attentions = [layer.attention for layer in model.layers]\n"
            "    for part in (model, *model.layers, *attentions):\n"
            f"        for name in {names}:\n"
            "            norm = getattr(part, name, None)\n"
            "            if norm is not None:\n"
            f"                norm.eps = {known['eps']}\n"
        )
    return lines


def _scaling(scaling: RotaryScaling | None) -> Fields:
    if scaling is None:
        return {}
    original = scaling.original_max_position_embeddings
    if scaling.kind == "llama3":
        found: Fields = {
            "scaling": "llama",
            "scaling_factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": original,
        }
    else:
        found = {
            "scaling": "yarn",
            "rope_factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_seq_len": original,
            "truncate": scaling.truncate,
        }
    return {name: value for name, value in found.items() if value is not None}


def _router(routing: Routing | None) -> Fields:
    if routing is None:
        return {}
    return {
        "score_func": routing.scores,
        "route_norm": routing.normalized,
        "route_scale": routing.scale,
        "num_expert_groups": routing.groups if routing.is_grouped else None,
        "num_limited_groups": routing.chosen_groups if routing.is_grouped else None,
    }


def _require_scaling(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """YaRN scales scores of attention too, which some of the models do."""
    scaling, attention = problem.architecture.stated.rotary_scaling, problem.architecture.attention
    scores = not isinstance(attention, GroupedAttention) or attention.sinks
    known = ("llama3", "yarn") if scores else ("llama3",)
    if scaling is not None and scaling.kind not in known:
        raise InputError(
            f"rotary positions scaled by {scaling.kind}: {framework} scales by "
            f"{' or '.join(known)} in such a model"
        )


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


TORCH_SCHEDULES: dict[Schedule, str] = {
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Names of schedules with zero bubbles."""


def _schedule(layout: Layout) -> str:
    """Torch's name; its order of zero bubbles with one chunk is that of ZB-H1."""
    if layout.schedule in TORCH_SCHEDULES:
        return TORCH_SCHEDULES[layout.schedule]
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
    numbers, precision = number_type(problem), problem.precision
    pure = (precision.weight_bytes, precision.gradient_bytes, precision.optimizer_bytes)
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


def _remarks(problem: TrainingProblem, layout: Layout) -> list[str]:
    found = list(left_out(problem))
    routing = problem.architecture.stated.routing
    if routing is not None and routing.loss:
        found.append(
            f"It evens the experts' load by a bias, not by the loss with factor {routing.loss}."
        )
    microbatches = layout.microbatches(problem.batch)
    repeats = layout.pipeline == 1 and microbatches > 1 and _shards(problem, layout) > 1
    if repeats and layout.zero == 0:
        found.append(f"It sums gradients after each of {microbatches} microbatches, the plan once.")
    if repeats and layout.zero == 2:
        found.append(
            f"It gathers the weights for each of {microbatches} microbatches, the plan once."
        )
    if layout.chunks > ACTIVE_STAGES and layout.zero and _shards(problem, layout) > 1:
        found.append(
            f"It keeps gathered weights of {ACTIVE_STAGES} of the {layout.chunks} stages of a rank "
            "and gathers the others again, the plan all once."
        )
    if layout.form.is_split:
        found.append("Torch's split backwards do not run in compiled modules.")
    if not problem.overlap:
        found.append("It overlaps exchanges and computation, which the plan does not.")
    return found


def _require_numbers(problem: TrainingProblem, _: Layout, framework: str) -> None:
    numbers = number_type(problem)
    if numbers == "fp16":
        raise InputError(
            f"{problem.card.name} has no bf16, and {framework} no fp16: set activation_bytes 4"
        )
    known = [(2, 4, 12), (2, 2, 4)] if numbers == "bf16" else [(4, 4, 8)]
    require_bytes(problem, known, framework)


def _require_context_shards(_: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.zero == 0 and layout.context > 1:
        raise InputError(
            f"ZeRO 0 with context degree {layout.context}: {framework} divides the states over the "
            f"context ranks; choose zero {1 if layout.pipeline > 1 else '2 or 3'}"
        )


def _require_zero_1(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """FSDP2's modules neither sum up nor divide gradients before the last backward of a stage."""
    if layout.pipeline > 1 and layout.zero > 1 and _shards(problem, layout) > 1:
        raise InputError(
            f"ZeRO {layout.zero} in a pipeline: {framework} keeps whole weights and gradients over "
            "the microbatches of an iteration, which is ZeRO 1; choose zero 1"
        )


def _refuse_zero_1(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.pipeline == 1 and layout.zero == 1 and _shards(problem, layout) > 1:
        raise InputError(
            f"ZeRO 1 without a pipeline: {framework} divides the gradients too; choose zero 2"
        )


def _require_expert_ranks(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    if problem.architecture.experts is not None and layout.expert == 1 and layout.tensor > 1:
        raise InputError(
            f"experts on {layout.tensor} tensor ranks with expert degree 1: {framework} divides "
            "the experts themselves; choose an expert degree of at least 2"
        )


def _require_expert_shards(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    shared, sparse = layout.tensor * layout.context, problem.architecture.experts is not None
    if sparse and layout.zero == 0 and layout.expert != shared:
        raise InputError(
            f"ZeRO 0 with expert degree {layout.expert}: {framework} divides the experts over "
            f"tensor x context = {shared} ranks then; choose expert {shared} or ZeRO"
        )


def _require_sequence(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    parts = layout.tensor if layout.sequence_parallel else 1
    if layout.context > 1:
        parts *= 2 * layout.context
    if problem.sequence % parts:
        raise InputError(
            f"{problem.sequence} tokens: {framework} needs a multiple of {parts} (tensor with "
            "sequence parallelism, twice the context degree)"
        )


def _refuse_tied(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    if problem.architecture.tied and layout.pipeline > 1:
        raise InputError(
            f"a tied head in a pipeline: {framework} ties no weights over stages; choose pipeline 1"
        )


def _require_microbatches(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Torch's interleaved 1F1B takes fewer, in one round."""
    microbatches = layout.microbatches(problem.batch)
    is_plain = layout.schedule == "1f1b" and layout.chunks == 1
    if is_plain and microbatches < layout.pipeline:
        raise InputError(
            f"{microbatches} microbatches in a pipeline of {layout.pipeline}: {framework}'s 1F1B "
            "needs at least as many microbatches as stages"
        )


def _require_rounds(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Torch's groups of microbatches have one size."""
    microbatches = layout.microbatches(problem.batch)
    if layout.schedule == "zero-bubble" and microbatches % max(1, microbatches // layout.pipeline):
        raise InputError(
            f"{microbatches} microbatches with zero bubbles in a pipeline of {layout.pipeline}: "
            f"{framework} runs them in rounds of one size; choose a multiple of {layout.pipeline}"
        )


def _refuse_repeated_twice(_: TrainingProblem, layout: Layout, framework: str) -> None:
    """Refuse recomputation with split backwards: torch's I and W would both repeat the forward."""
    if layout.form.is_split and layout.recompute != "none":
        raise InputError(
            f"{layout.recompute} recomputation with zero bubbles: {framework} repeats the forward "
            "for both parts of a backward, the plan once; choose none, or the schedule 1f1b"
        )


def _refuse_pairs(_: TrainingProblem, layout: Layout, framework: str) -> None:
    """Refuse exchanges of experts beside computation; 0.2 overlapped them."""
    if layout.form.pairs and layout.expert > 1:
        raise InputError(
            f"the schedule {layout.schedule} with expert degree {layout.expert}: {framework} runs "
            "its pairs one after the other, which hides no exchange; choose zbv, or expert 1"
        )


TORCH = "pytorch/pytorch 2.13.0, torch/distributed"
_SCHEDULES = f"{TORCH}/pipelining/schedules.py"

FRAMEWORK = framework(
    "torchtitan",
    configuration,
    [
        FrameworkRule("torchtitan/config/configs.py", _require_numbers, of_problem=True),
        FrameworkRule("torchtitan/models/common/rope.py", _require_scaling, of_problem=True),
        FrameworkRule("torchtitan/models/common/decoder.py", require_whole_heads),
        FrameworkRule("torchtitan/models/common/decoder.py", _refuse_tied),
        FrameworkRule("torchtitan/distributed/parallel_dims.py", _require_context_shards),
        FrameworkRule(f"{TORCH}/pipelining/stage.py", _require_zero_1),
        FrameworkRule(f"{TORCH}/fsdp/_fully_shard", _refuse_zero_1),
        FrameworkRule("torchtitan/models/common/moe_sharding.py", _require_expert_ranks),
        FrameworkRule("torchtitan/distributed/parallel_dims.py", _require_expert_shards),
        FrameworkRule("torchtitan/trainer.py", _require_sequence),
        FrameworkRule("torchtitan/distributed/pipeline_parallel.py", _refuse_pairs),
        FrameworkRule(_SCHEDULES, _require_microbatches),
        FrameworkRule(_SCHEDULES, _require_rounds),
        FrameworkRule(_SCHEDULES, _refuse_repeated_twice),
    ],
)
