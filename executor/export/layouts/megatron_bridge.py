"""A layout for recipes of Megatron-Bridge (0.3.1, 0.7): sets their ``ConfigContainer``.

The model is the recipe's; the function refuses one of another number of layers.
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
from stagewright.executor.export.layouts.rules import Framework
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem

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
        "config": {"mixed_precision": _mixed_precision(core), "comm_overlap": None},
    }
    if core.fsdp:
        targets["config.checkpoint"] = {"ckpt_format": FSDP_FORMAT}
    return {FILE: recipe_text("megatron_bridge", problem, layout, targets)}


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


FRAMEWORK = Framework("Megatron-Bridge", RULES, recipe)
