"""A layout for nnScaler (0.5): arguments of its trainer, whose policy ``autodist`` divides layers.

The policy takes degrees, stages and what is recomputed, and divides operators and layers itself.
"""

from stagewright.executor.export.layouts.common import Fields, head, number_type
from stagewright.executor.export.layouts.rules import FrameworkRule, framework, require_bytes
from stagewright.executor.export.options import to_yaml
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem

LAYER = "LAYER"  # the class of a model's layers


def arguments(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """``nnscaler.yaml``, to which the model, the data and the optimizer are to be added."""
    numbers = number_type(problem)
    policy: Fields = {
        "update_freq": layout.microbatches(problem.batch),
        "pipeline_nstages": layout.pipeline,
        "pipeline_scheduler": "1f1b",
        "max_partition_degree": layout.tensor,
        "use_bf16": numbers == "bf16",
        "use_fp16": numbers == "fp16",
        "mem_constraint": int(problem.fabric.memory_bytes / 2**30),
    }
    if layout.pipeline > 1:
        policy["pipeline_pivots"] = LAYER
    if layout.recompute == "full":
        policy["recompute_modules"] = LAYER
    fields: Fields = {
        "compute_config": {
            "plan_ngpus": layout.pipeline * layout.tensor,
            "runtime_ngpus": layout.ranks,
            "use_zero": layout.zero > 0,
            "use_end2end": True,
            "pas_config": policy,
        },
        "pas_policy": "autodist",
        "precision": numbers,
        "micro_batch_size": layout.microbatch,
        "global_batch_size": problem.batch,
    }
    return {"nnscaler.yaml": head(problem, layout, "nnScaler (0.5)") + to_yaml(fields)}


def _require_precision(problem: TrainingProblem, _: Layout, framework: str) -> None:
    full = number_type(problem) == "fp32"
    require_bytes(problem, [(4, 4, 8)] if full else [(2, 2, 12), (2, 4, 12)], framework)


FRAMEWORK = framework(
    "nnscaler",
    arguments,
    [FrameworkRule("nnscaler/cli/trainer_args.py", _require_precision, of_problem=True)],
)
