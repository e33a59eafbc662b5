"""A layout for DeepSpeed (0.19): its configuration, and a function that starts it.

Tensor parallelism is AutoTP's, expert parallelism AutoEP's; both divide models of ``transformers``.
"""

import json

from stagewright.executor.export.layouts.common import (
    left_out,
    number_type,
    of_transformers,
)
from stagewright.executor.export.layouts.rules import (
    FrameworkRule,
    framework,
    require_bytes,
    require_whole_heads,
)
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError

CONFIG, FILE = "ds_config.json", "stagewright_deepspeed.py"

_AUTO_EXPERTS = ("mixtral", "deepseek_v2", "deepseek_v3")  # presets of AutoEP, by model_type


def configuration(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """``ds_config.json``, and a module with the function ``initialize``."""
    text = of_transformers("deepspeed", problem, layout, _remarks(problem, layout))
    return {CONFIG: json.dumps(_config(problem, layout), indent=1) + "\n", FILE: text}


def _config(problem: TrainingProblem, layout: Layout) -> dict[str, object]:
    numbers = number_type(problem)
    zero: dict[str, object] = {"stage": layout.zero}
    if layout.zero:
        zero["overlap_comm"] = problem.overlap
    if layout.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": layout.microbatch,
        "gradient_accumulation_steps": layout.microbatches(problem.batch),
        "zero_optimization": zero,
    }
    if numbers != "fp32":
        gradients = "fp32" if problem.precision.gradient_bytes == 4 else numbers
        config |= {numbers: {"enabled": True}, "data_types": {"grad_accum_dtype": gradients}}
    if layout.tensor > 1:
        # Without train_batch_size, which is compared with the microbatches of all ranks then.
        config["tensor_parallel"] = {"autotp_size": layout.tensor}
    else:
        config["train_batch_size"] = problem.batch
    if layout.expert > 1:
        config["expert_parallel"] = {
            "enabled": True,
            "autoep_size": layout.expert,
            "preset_model": problem.architecture.name,
        }
    return config


def _require_offload(_: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.offload_optimizer and layout.zero == 0:
        raise InputError(
            f"an offloaded optimizer with ZeRO 0: {framework} offloads with zero 1 to 3"
        )


def _require_experts(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """With experts, the tensor degree is 1: more needs sequence parallelism."""
    name = problem.architecture.name
    if layout.expert > 1 and name not in _AUTO_EXPERTS:
        raise InputError(
            f"expert degree {layout.expert} of {name!r}: {framework}'s AutoEP knows "
            f"{', '.join(_AUTO_EXPERTS)}; choose expert 1"
        )


def _require_precision(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """ZeRO keeps an fp32 copy of fp32 weights; without it, gradients have the weights' type."""
    if number_type(problem) == "fp32":
        known = [(4, 4, 12)] if layout.zero else [(4, 4, 8)]
    else:
        known = [(2, 4, 12), (2, 2, 12)] if layout.zero else [(2, 2, 12)]
    require_bytes(problem, known, framework)


def _remarks(problem: TrainingProblem, layout: Layout) -> list[str]:
    found = list(left_out(problem))
    if layout.tensor > 1:
        found.append("AutoTP leaves the embedding whole, where the plan divides the vocabulary.")
        found.append(
            f"The batch is {problem.batch}: DeepSpeed reports {layout.tensor} times as much, as it "
            "counts the tensor ranks too."
        )
    if problem.overlap and layout.zero < 2 and layout.data > 1:
        found.append("It exchanges gradients after the backward, the plan beside it.")
    return found


FRAMEWORK = framework(
    "deepspeed",
    configuration,
    [
        FrameworkRule("deepspeed/module_inject/tp_shard.py", require_whole_heads),
        FrameworkRule("deepspeed/runtime/zero/config.py", _require_offload),
        FrameworkRule("deepspeed/module_inject/auto_ep_presets", _require_experts),
        FrameworkRule("deepspeed/runtime/zero/stage_1_and_2.py", _require_precision),
    ],
)
