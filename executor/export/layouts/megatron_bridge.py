"""A layout for recipes of Megatron-Bridge (0.3.1, 0.7): sets their ``ConfigContainer``.

The model is the recipe's; the function refuses one of other sizes.
"""

from stagewright.executor.export.layouts.common import Code, Fields
from stagewright.executor.export.layouts.core import (
    FSDP_FORMAT,
    RULES,
    Core,
    core_of,
    model_fields,
    recipe_text,
)
from stagewright.executor.export.layouts.hybrid import require_even_stages
from stagewright.executor.export.layouts.rules import (
    FrameworkRule,
    framework,
    require_adapters,
)
from stagewright.executor.export.layouts.scaling import bridge_scaling, require_scaling
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.tuning import Tuning

FILE = "stagewright_megatron_bridge.py"

DTYPES = {
    "fp32": Code("torch.float32"),
    "bf16": Code("torch.bfloat16"),
    "fp16": Code("torch.float16"),
}


def recipe(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """A module with the function ``configure``."""
    core = core_of(problem, layout)
    targets: dict[str, Fields] = {
        "config.model": {
            **core.model,
            **model_fields(problem.architecture),
            **bridge_scaling(problem.architecture),
            "seq_length": problem.sequence,
            **_attention(problem),
        },
        "config.ddp": core.ddp,
        "config.optimizer": optimizer_fields(core),
        "config.dist": {
            "use_tp_pp_dp_mapping": core.pipeline_inside,
            "use_megatron_fsdp": core.fsdp,
        },
        "config.train": {"micro_batch_size": layout.microbatch, "global_batch_size": problem.batch},
        "config.dataset": {"seq_length": problem.sequence},
        # Its other overlaps would set those of ``config.ddp`` anew.
        "config": {
            "mixed_precision": _mixed_precision(core),
            "comm_overlap": None,
            **_adapters(problem),
        },
    }
    if core.fsdp:
        targets["config.checkpoint"] = {"ckpt_format": FSDP_FORMAT}
    imported = _IMPORTED[_lora(tuning)[0]] if (tuning := problem.architecture.tuning) else ""
    return {
        FILE: recipe_text("megatron_bridge", "config.model", problem, layout, targets, imported)
    }


_FUSED = {
    "linear_qkv": "linear_qkv", "o_proj": "linear_proj", "linear_fc1": "linear_fc1",
    "down_proj": "linear_fc2",
}  # fmt: skip
"""The targets of ``LoRA``, of whole layers, and Megatron-Bridge's names."""

_CANONICAL = {
    "q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v", "o_proj": "linear_proj",
    "gate_proj": "linear_fc1_gate", "up_proj": "linear_fc1_up", "down_proj": "linear_fc2",
}  # fmt: skip
"""The targets of ``CanonicalLoRA``, of parts of layers."""

_LATENT = {
    "q_a_proj": "linear_q_down_proj", "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj", "kv_b_proj": "linear_kv_up_proj",
}  # fmt: skip


_IMPORTED = {
    "LoRA": "from megatron.bridge.peft.lora import LoRA\n",
    "CanonicalLoRA": "from megatron.bridge.peft.canonical_lora import CanonicalLoRA\n",
}


def _adapters(problem: TrainingProblem) -> Fields:
    tuning = problem.architecture.tuning
    if tuning is None:
        return {}
    kind, names = _lora(tuning)
    targets = [names[one] for one in sorted(tuning.targets)]
    return {"peft": Code(f"{kind}(target_modules={targets}, dim={tuning.rank}, dropout=0.0)")}


def _lora(tuning: Tuning) -> tuple[str, dict[str, str]]:
    """The class of adapters that has most of the targets, and their names there."""
    whole = _FUSED | _LATENT
    return ("LoRA", whole) if tuning.targets <= whole.keys() else ("CanonicalLoRA", _CANONICAL)


def _require_adapters(problem: TrainingProblem, _: Layout, framework: str) -> None:
    tuning = problem.architecture.tuning
    if tuning is not None:
        require_adapters(problem, _lora(tuning)[1], framework)
        if tuning.blocks:
            raise InputError(
                f"frozen blocks beside LoRA: {framework} numbers blocks anew in every stage; give "
                "all blocks adapters"
            )


def optimizer_fields(core: Core) -> Fields:
    """The optimizer's fields with torch's types in place of their names."""
    names = ("exp_avg_dtype", "exp_avg_sq_dtype")
    return core.optimizer | {name: DTYPES[str(core.optimizer[name])] for name in names}


def _attention(problem: TrainingProblem) -> Fields:
    kind = "unfused" if problem.attention == "materialized" else "auto"
    return {"attention_backend": Code(f"AttnBackend.{kind}")}


def _mixed_precision(core: Core) -> Code:
    """The type of weights and of what stages exchange; fp8 with the framework's recipe."""
    dtype = DTYPES[core.numbers]
    words = [
        f"{core.numbers}=True",
        f"params_dtype={dtype}",
        f"pipeline_dtype={dtype}",
        f"grad_reduce_in_fp32={core.ddp['grad_reduce_in_fp32']}",
    ]
    if core.fp8:
        words += ['fp8="hybrid"', f"fp8_param_gather={core.fp8_weights}"]
    if core.fp8_recipe:
        words.append(f'fp8_recipe="{core.fp8_recipe}"')
    return Code(f"MixedPrecisionConfig({', '.join(words)})")


FRAMEWORK = framework(
    "megatron-bridge",
    recipe,
    [
        *RULES,
        FrameworkRule(
            "NVIDIA-NeMo/Megatron-Bridge 0.7, peft/lora.py", _require_adapters, of_problem=True
        ),
        FrameworkRule(
            "NVIDIA-NeMo/Megatron-Bridge 0.7, models/hybrid/hybrid_provider.py", require_even_stages
        ),
        FrameworkRule(
            "NVIDIA-NeMo/Megatron-Bridge 0.7, models/gpt_provider.py",
            require_scaling,
            of_problem=True,
        ),
    ],
)
