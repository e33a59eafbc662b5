"""A layout for pre-training recipes of NeMo (2.6 and 2.7, ``nemo.collections.llm``).

A recipe is a configuration of ``nemo_run``; the strategy is ``nemo.lightning.MegatronStrategy``.
NeMo 3.0 has no such recipes.
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
from stagewright.executor.export.layouts.megatron_bridge import DTYPES, optimizer_fields
from stagewright.executor.export.layouts.rules import (
    FrameworkRule,
    framework,
    require_whole_heads,
)
from stagewright.executor.export.layouts.scaling import nemo_scaling, require_nemo_scaling
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem

FILE = "stagewright_nemo.py"

_PLUGIN = {"fp32": "32", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def recipe(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """A module with the function ``configure``."""
    core = core_of(problem, layout)
    servers, each = nodes(problem)
    recomputed = {name: value for name, value in core.model.items() if _is_model(name)}
    degrees = {name: value for name, value in core.model.items() if name not in recomputed}
    kind = "unfused" if problem.attention == "materialized" else "auto"
    targets: dict[str, Fields] = {
        "recipe.trainer": {"num_nodes": servers, "devices": each, "plugins": _plugin(core)},
        "recipe.trainer.strategy": degrees | _strategy(core),
        "recipe.trainer.strategy.ddp": core.ddp,
        "recipe.model.config": {
            **recomputed,
            **model_fields(problem.architecture),
            **nemo_scaling(problem.architecture),
            "seq_length": problem.sequence,
            "attention_backend": Code(f"AttnBackend.{kind}"),
        },
        "recipe.optim.config": optimizer_fields(core),
        "recipe.data": {
            "seq_length": problem.sequence,
            "micro_batch_size": layout.microbatch,
            "global_batch_size": problem.batch,
        },
    }
    return {FILE: recipe_text("nemo", "recipe.model.config", problem, layout, targets)}


def _is_model(name: str) -> bool:
    """Fields that are the model's, where all others are the strategy's too."""
    return name.startswith(("recompute_", "cpu_offloading"))


def _strategy(core: Core) -> Fields:
    found: Fields = {
        "pipeline_dtype": DTYPES[core.numbers],
        "use_tp_pp_dp_mapping": core.pipeline_inside,
        "fsdp": "megatron" if core.fsdp else None,
    }
    return found | ({"save_ckpt_format": FSDP_FORMAT} if core.fsdp else {})


def _plugin(core: Core) -> Code:
    dtype = DTYPES[core.numbers]
    words = [
        "MegatronMixedPrecision",
        f'precision="{_PLUGIN[core.numbers]}"',
        f"params_dtype={dtype}",
        f"pipeline_dtype={dtype}",
        "autocast_enabled=False",
        f"grad_reduce_in_fp32={core.ddp['grad_reduce_in_fp32']}",
    ]
    if core.fp8:
        words += ['fp8="hybrid"', f"fp8_param_gather={core.fp8_weights}"]
    if core.fp8_recipe:
        words.append(f'fp8_recipe="{core.fp8_recipe}"')
    return Code(f"run.Config({', '.join(words)})")


_CORE = "NVIDIA/Megatron-LM core 0.15.3, megatron/core/transformer/transformer_config.py"

FRAMEWORK = framework(
    "nemo",
    recipe,
    [
        *RULES,
        FrameworkRule(_CORE, require_whole_heads),
        FrameworkRule("nemo/collections/llm/gpt/model", require_nemo_scaling, of_problem=True),
        FrameworkRule("nemo/collections/llm/gpt/model/ssm.py", require_even_stages),
    ],
)
