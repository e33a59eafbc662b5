"""A layout for Accelerate (1.15): the plugins of an ``Accelerator``.

``ParallelismConfig`` divides ranks, FSDP2 the states. FSDP2 divides gradients whenever it exchanges
them, and ``sync_each_batch`` does so after every microbatch: ZeRO 2, or 3 if weights are too.
"""

from stagewright.executor.export.layouts.common import NumberType, launch, left_out, number_type
from stagewright.executor.export.layouts.deepspeed import TRANSFORMERS, checkpointing
from stagewright.executor.export.layouts.rules import (
    Framework,
    FrameworkRule,
    refuse_fp8,
    refuse_offload,
    refuse_one_byte,
    refuse_others_than_transformers,
    refuse_pipeline,
    refuse_recomputed_by_stage,
    refuse_selective,
    refuse_sequence_parallel,
    refuse_some_blocks,
    require_adapters,
    require_bytes,
    require_context,
    require_whole_heads,
)
from stagewright.executor.export.options import filled
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.tuning import target_names

FILE = "stagewright_accelerate.py"

_WITHOUT_TENSOR_PLAN = (
    "gpt2", "gpt_bigcode", "bert", "falcon", "bloom", "opt", "stablelm", "kimi_k2",
)  # fmt: skip
_MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


_PLUGIN = """FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward={reshard},
            auto_wrap_policy="transformer_based_wrap",
            mixed_precision_policy={policy},
        )"""


def configuration(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """A module with the functions ``build`` and ``configure``."""
    numbers = number_type(problem)
    sharded = _is_sharded(layout)
    text = filled(
        "accelerate",
        words=layout,
        tensor=_loading(layout),
        ranks=layout.ranks,
        launch=launch(problem),
        sequence=problem.sequence,
        batch=layout.microbatch,
        accumulation=layout.microbatches(problem.batch),
        mixed=_MIXED[numbers],
        sharded=sharded,
        replicate=1 if sharded else layout.data,
        shard=layout.data if sharded else 1,
        context=layout.context,
        degree=layout.tensor,
        plugin=_plugin(layout, numbers) if sharded else None,
        layers=problem.architecture.layers,
        checkpointing=checkpointing(layout),
        adapters=_adapters(problem),
        remarks="".join(f"\n{line}" for line in _remarks(problem, layout)),
    )
    return {FILE: text}


def _adapters(problem: TrainingProblem) -> str:
    """Lines that add adapters to the model."""
    tuning = problem.architecture.tuning
    if tuning is None:
        return ""
    blocks = [one for one in range(problem.architecture.layers) if one not in tuning.blocks]
    return (
        "    from peft import LoraConfig, get_peft_model\n\n"
        "    adapters = LoraConfig(\n"
        f"        r={tuning.rank},\n"
        f"        target_modules={sorted(tuning.targets)},\n"
        f"        layers_to_transform={blocks if tuning.blocks else None},\n"
        "    )\n"
        "    model = get_peft_model(model, adapters)\n"
    )


def _require_adapters(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Refuse adapters of fused layers, which models of transformers have not."""
    fused = ("linear_qkv", "linear_fc1")
    require_adapters(problem, target_names(problem.architecture) - {*fused}, framework)


def _loading(layout: Layout) -> str:
    """Further arguments of ``from_pretrained``."""
    if layout.tensor == 1:
        return ""
    mesh = "device_mesh=accelerator.torch_device_mesh"
    return f", tp_size={layout.tensor}, tp_plan='auto', {mesh}"


def _is_sharded(layout: Layout) -> bool:
    """Whether ZeRO has ranks to divide the states over."""
    return layout.zero > 0 and layout.data * layout.context > 1


def _plugin(layout: Layout, numbers: NumberType) -> str:
    """FSDP2's plugin; gradients are summed in fp32."""
    policy = "MixedPrecisionPolicy()"
    if numbers != "fp32":
        dtype = _DTYPES[numbers]
        policy = f"MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)"
    return _PLUGIN.format(reshard=layout.zero == 3, policy=policy)


def _require_precision(problem: TrainingProblem, _: Layout, framework: str) -> None:
    known = (4, 4, 8) if number_type(problem) == "fp32" else (2, 4, 12)
    require_bytes(problem, [known], framework)


def _refuse_experts(_: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.expert > 1:
        raise InputError(
            f"expert degree {layout.expert}: {framework} has no expert ranks; choose expert 1, or "
            "export to megatron, torchtitan or deepspeed"
        )


def _require_tensor_plan(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.tensor > 1 and problem.architecture.name in _WITHOUT_TENSOR_PLAN:
        raise InputError(
            f"tensor degree {layout.tensor} of {problem.architecture.name}: {framework} divides by "
            "the plan of transformers, which has none of that model; choose tensor 1"
        )


def _require_shards(_: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.zero == 0 and layout.context > 1:
        raise InputError(
            f"ZeRO 0 with context degree {layout.context}: {framework} divides the states over the "
            "context ranks; choose zero 2 or 3"
        )
    if layout.zero == 0 and layout.tensor > 1 and layout.data > 1:
        raise InputError(
            f"ZeRO 0 with tensor {layout.tensor} and data {layout.data}: {framework} does not "
            "combine them; choose zero 2 or 3"
        )


def _refuse_zero_1(_: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.zero == 1 and _is_sharded(layout):
        raise InputError(
            f"ZeRO 1: {framework}'s FSDP2 divides the gradients too; choose zero 2 or 3, or "
            "export to deepspeed"
        )


def _remarks(problem: TrainingProblem, layout: Layout) -> list[str]:
    found = list(left_out(problem))
    microbatches = layout.microbatches(problem.batch)
    if layout.tensor > 1:
        found.append("Its tensor ranks have the whole embedding; the plan divides the vocabulary.")
    if layout.context > 1:
        found.append("Forward and backward run in accelerator.maybe_context_parallel(...).")
    if layout.zero == 2 and _is_sharded(layout) and microbatches > 1:
        found.append(
            f"It gathers the weights for each of {microbatches} microbatches, the plan once."
        )
    if not problem.overlap:
        found.append("It overlaps exchanges and computation, which the plan does not.")
    return found


ACCELERATE = "huggingface/accelerate 1.15.0, src/accelerate"

FRAMEWORK = Framework(
    "Accelerate",
    (
        FrameworkRule(f"{TRANSFORMERS}, models", refuse_others_than_transformers, of_problem=True),
        FrameworkRule(f"{ACCELERATE}/utils/dataclasses.py", refuse_fp8, of_problem=True),
        FrameworkRule(f"{ACCELERATE}/utils/dataclasses.py", refuse_one_byte, of_problem=True),
        FrameworkRule(f"{ACCELERATE}/utils/fsdp_utils.py", _require_precision, of_problem=True),
        FrameworkRule("huggingface/peft 0.21.2, tuners/lora", _require_adapters, of_problem=True),
        FrameworkRule(f"{ACCELERATE}/parallelism_config.py", refuse_pipeline),
        FrameworkRule(f"{ACCELERATE}/parallelism_config.py", _refuse_experts),
        FrameworkRule(f"{TRANSFORMERS}, integrations/tensor_parallel.py", _require_tensor_plan),
        FrameworkRule(f"{TRANSFORMERS}, integrations/tensor_parallel.py", refuse_sequence_parallel),
        FrameworkRule(f"{TRANSFORMERS}, integrations/tensor_parallel.py", require_whole_heads),
        FrameworkRule(f"{ACCELERATE}/accelerator.py", require_context),
        FrameworkRule(f"{ACCELERATE}/utils/dataclasses.py", refuse_offload),
        FrameworkRule(f"{ACCELERATE}/parallelism_config.py", _require_shards),
        FrameworkRule(f"{ACCELERATE}/utils/fsdp_utils.py", _refuse_zero_1),
        FrameworkRule(f"{TRANSFORMERS}, modeling_layers.py", refuse_selective),
        FrameworkRule(f"{TRANSFORMERS}, modeling_layers.py", refuse_recomputed_by_stage),
        FrameworkRule(f"{TRANSFORMERS}, modeling_layers.py", refuse_some_blocks),
    ),
    configuration,
)
