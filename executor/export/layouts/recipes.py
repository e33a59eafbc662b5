"""Layouts for recipes of Megatron-Bridge (0.3.1, 0.7) and of NeMo (2.6 and 2.7).

The function ``configure`` sets a ``ConfigContainer``, or of NeMo (``nemo.collections.llm``) a
configuration of ``nemo_run``, whose strategy is ``nemo.lightning.MegatronStrategy``; NeMo 3.0 has
no such recipes. The model is the recipe's; the function refuses one of other sizes.
"""

from stagewright.executor.export.layouts.common import Code, Fields, nodes
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
    require_whole_heads,
)
from stagewright.executor.export.layouts.scaling import (
    bridge_scaling,
    nemo_scaling,
    require_nemo_scaling,
    require_scaling,
)
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.tuning import Tuning

_DTYPES = {
    "fp32": Code("torch.float32"),
    "bf16": Code("torch.bfloat16"),
    "fp16": Code("torch.float16"),
}
_PRECISIONS = {"fp32": "32", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def bridge(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """A module for Megatron-Bridge."""
    core, tuning = core_of(problem, layout), problem.architecture.tuning
    numbers = _numbers("MixedPrecisionConfig", core, [f"{core.numbers}=True"])
    targets: dict[str, Fields] = {
        "config.model": {
            **core.model,
            **model_fields(problem.architecture),
            **bridge_scaling(problem.architecture),
            **_sequences(problem),
        },
        "config.ddp": core.ddp,
        "config.optimizer": _optimizer(core),
        "config.dist": {
            "use_tp_pp_dp_mapping": core.pipeline_inside,
            "use_megatron_fsdp": core.fsdp,
        },
        "config.train": {"micro_batch_size": layout.microbatch, "global_batch_size": problem.batch},
        "config.dataset": {"seq_length": problem.sequence},
        # Its other overlaps would set those of ``config.ddp`` anew.
        "config": {"mixed_precision": numbers, "comm_overlap": None, **_adapters(tuning)},
    }
    if core.fsdp:
        targets["config.checkpoint"] = {"ckpt_format": FSDP_FORMAT}
    imported = "" if tuning is None else _IMPORTED[_lora(tuning)[0]]
    text = recipe_text("megatron_bridge", "config.model", problem, layout, targets, imported)
    return {"stagewright_megatron_bridge.py": text}


def nemo(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """A module for NeMo, where the strategy has the fields that are not the model's alone."""
    core = core_of(problem, layout)
    servers, each = nodes(problem)
    of_model = {
        name: value
        for name, value in core.model.items()
        if name.startswith(("recompute_", "cpu_offloading"))
    }
    strategy: Fields = {
        **{name: value for name, value in core.model.items() if name not in of_model},
        "pipeline_dtype": _DTYPES[core.numbers],
        "use_tp_pp_dp_mapping": core.pipeline_inside,
        "fsdp": "megatron" if core.fsdp else None,
        **({"save_ckpt_format": FSDP_FORMAT} if core.fsdp else {}),
    }
    plugin = ["MegatronMixedPrecision", f'precision="{_PRECISIONS[core.numbers]}"']
    numbers = _numbers("run.Config", core, plugin, "autocast_enabled=False")
    targets: dict[str, Fields] = {
        "recipe.trainer": {"num_nodes": servers, "devices": each, "plugins": numbers},
        "recipe.trainer.strategy": strategy,
        "recipe.trainer.strategy.ddp": core.ddp,
        "recipe.model.config": {
            **of_model,
            **model_fields(problem.architecture),
            **nemo_scaling(problem.architecture),
            **_sequences(problem),
        },
        "recipe.optim.config": _optimizer(core),
        "recipe.data": {
            "seq_length": problem.sequence,
            "micro_batch_size": layout.microbatch,
            "global_batch_size": problem.batch,
        },
    }
    return {
        "stagewright_nemo.py": recipe_text("nemo", "recipe.model.config", problem, layout, targets)
    }


def _optimizer(core: Core) -> Fields:
    """The optimizer's fields with torch's types in place of their names."""
    names = ("exp_avg_dtype", "exp_avg_sq_dtype")
    return core.optimizer | {name: _DTYPES[str(core.optimizer[name])] for name in names}


def _sequences(problem: TrainingProblem) -> Fields:
    """What a recipe's model is told of sequences and of attention."""
    kind = "unfused" if problem.attention == "materialized" else "auto"
    return {"seq_length": problem.sequence, "attention_backend": Code(f"AttnBackend.{kind}")}


def _numbers(kind: str, core: Core, begin: list[str], *more: str) -> Code:
    """The type of weights and of what stages exchange; fp8 with the framework's recipe."""
    dtype, wide = _DTYPES[core.numbers], core.ddp["grad_reduce_in_fp32"]
    words = [*begin, f"params_dtype={dtype}", f"pipeline_dtype={dtype}", *more]
    words.append(f"grad_reduce_in_fp32={wide}")
    if core.fp8:
        words += ['fp8="hybrid"', f"fp8_param_gather={core.fp8_weights}"]
    if core.fp8_recipe:
        words.append(f'fp8_recipe="{core.fp8_recipe}"')
    return Code(f"{kind}({', '.join(words)})")


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


def _adapters(tuning: Tuning | None) -> Fields:
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


_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge 0.7"
_CORE = "NVIDIA/Megatron-LM core 0.15.3, megatron/core/transformer/transformer_config.py"

BRIDGE = framework(
    "megatron-bridge",
    bridge,
    [
        *RULES,
        FrameworkRule(f"{_BRIDGE}, peft/lora.py", _require_adapters, of_problem=True),
        FrameworkRule(f"{_BRIDGE}, models/hybrid/hybrid_provider.py", require_even_stages),
        FrameworkRule(f"{_BRIDGE}, models/gpt_provider.py", require_scaling, of_problem=True),
    ],
)

NEMO = framework(
    "nemo",
    nemo,
    [
        *RULES,
        FrameworkRule(_CORE, require_whole_heads),
        FrameworkRule("nemo/collections/llm/gpt/model", require_nemo_scaling, of_problem=True),
        FrameworkRule("nemo/collections/llm/gpt/model/ssm.py", require_even_stages),
    ],
)
