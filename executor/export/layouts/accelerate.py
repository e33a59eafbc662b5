"""A layout for Accelerate (1.15): the plugins of an ``Accelerator``.

``ParallelismConfig`` divides ranks, FSDP2 the states. FSDP2 divides gradients whenever it exchanges
them, and ``sync_each_batch`` does so after every microbatch: ZeRO 2, or 3 if weights are too.
"""

from stagewright.executor.export.layouts.common import (
    Fields,
    NumberType,
    head,
    left_out,
    nodes,
    number_type,
    of_transformers,
)
from stagewright.executor.export.layouts.rules import (
    FrameworkRule,
    framework,
    require_adapters,
    require_bytes,
    require_context,
    require_whole_heads,
)
from stagewright.executor.export.options import to_yaml
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.tuning import target_names

FILE = "stagewright_accelerate.py"

_WITHOUT_TENSOR_PLAN = (
    "gpt2", "gpt_bigcode", "bert", "falcon", "bloom", "opt", "stablelm", "kimi_k2",
)  # fmt: skip
MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


_PLUGIN = """FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward={reshard},
            auto_wrap_policy="transformer_based_wrap",
            mixed_precision_policy={policy},
        )"""


def parallelism(layout: Layout) -> dict[str, int]:
    """The degrees by the names of ``ParallelismConfig``."""
    sharded = is_sharded(layout)
    return {
        "dp_replicate_size": 1 if sharded else layout.data,
        "dp_shard_size": layout.data if sharded else 1,
        "cp_size": layout.context,
        "tp_size": layout.tensor,
    }


def fsdp(layout: Layout) -> Fields:
    """FSDP2's fields by the names of Accelerate's configuration."""
    return {
        "reshard_after_forward": layout.zero == 3,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "offload_params": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    }


def _launched(problem: TrainingProblem, layout: Layout) -> str:
    """What ``accelerate launch --config_file`` reads, for scripts with an Accelerator of their own.

    It takes degrees only beside FSDP2.
    """
    servers, _ = nodes(problem)
    fields: Fields = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_sharded(layout) else "MULTI_GPU",
        "mixed_precision": MIXED[number_type(problem)],
        "num_machines": servers,
        "num_processes": layout.ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if is_sharded(layout):
        fields["fsdp_config"] = {
            "fsdp_version": 2,
            **{f"fsdp_{name}": value for name, value in fsdp(layout).items()},
        }
        fields["parallelism_config"] = {
            f"parallelism_config_{name}": size for name, size in parallelism(layout).items()
        }
    return head(problem, layout, "Accelerate (1.15)") + to_yaml(fields)


def configuration(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """A module with the functions ``build`` and ``configure``, and a file for its launcher."""
    numbers = number_type(problem)
    sharded = is_sharded(layout)
    text = of_transformers(
        "accelerate",
        problem,
        layout,
        _remarks(problem, layout),
        tensor=_loading(layout),
        batch=layout.microbatch,
        accumulation=layout.microbatches(problem.batch),
        mixed=MIXED[numbers],
        sharded=sharded,
        degrees="".join(f"            {k}={v},\n" for k, v in parallelism(layout).items()),
        plugin=_plugin(layout, numbers) if sharded else None,
        adapters=_adapters(problem),
    )
    return {FILE: text, "accelerate.yaml": _launched(problem, layout)}


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


def is_sharded(layout: Layout) -> bool:
    """Whether ZeRO has ranks to divide the states over."""
    return layout.zero > 0 and layout.data * layout.context > 1


def _plugin(layout: Layout, numbers: NumberType) -> str:
    """FSDP2's plugin; gradients are summed in fp32."""
    policy = "MixedPrecisionPolicy()"
    if numbers != "fp32":
        dtype = _DTYPES[numbers]
        policy = f"MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)"
    return _PLUGIN.format(reshard=layout.zero == 3, policy=policy)


def require_precision(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Raise unless states are kept as FSDP2 does: beside products in 16 bits, in fp32."""
    known = (4, 4, 8) if number_type(problem) == "fp32" else (2, 4, 12)
    require_bytes(problem, [known], framework)


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


def _remarks(problem: TrainingProblem, layout: Layout) -> list[str]:
    found = list(left_out(problem))
    microbatches = layout.microbatches(problem.batch)
    if layout.tensor > 1:
        found.append("Its tensor ranks have the whole embedding; the plan divides the vocabulary.")
    if layout.context > 1:
        found.append("Forward and backward run in accelerator.maybe_context_parallel(...).")
    if layout.zero == 2 and is_sharded(layout) and microbatches > 1:
        found.append(
            f"It gathers the weights for each of {microbatches} microbatches, the plan once."
        )
    if not problem.overlap:
        found.append("It overlaps exchanges and computation, which the plan does not.")
    return found


_TENSOR = "huggingface/transformers 5.24.0, src/transformers/integrations/tensor_parallel.py"
_ACCELERATE = "huggingface/accelerate 1.15.0, src/accelerate"

TENSOR_RULES = [
    FrameworkRule(_TENSOR, _require_tensor_plan),
    FrameworkRule(_TENSOR, require_whole_heads),
]

RULES = [
    FrameworkRule(f"{_ACCELERATE}/utils/fsdp_utils.py", require_precision, of_problem=True),
    FrameworkRule("huggingface/peft 0.21.2, tuners/lora", _require_adapters, of_problem=True),
    *TENSOR_RULES,
    FrameworkRule(f"{_ACCELERATE}/accelerator.py", require_context),
    FrameworkRule(f"{_ACCELERATE}/parallelism_config.py", _require_shards),
]
"""What all that train through Accelerate's FSDP2 ask."""

FRAMEWORK = framework("accelerate", configuration, RULES)
