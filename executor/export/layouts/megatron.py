"""Arguments of Megatron-LM (core 0.20, megatron/training/arguments.py) for a layout.

Core 0.16 has all of them but ``--moe-shared-expert-gate``.
"""

import shlex

from stagewright.executor.export.layouts.common import Fields, comment, launch, left_out
from stagewright.executor.export.layouts.core import FSDP_FORMAT, RULES, Core, core_of
from stagewright.executor.export.layouts.megatron_model import (
    MODEL_RULES,
    Argument,
    model_arguments,
)
from stagewright.executor.export.layouts.rules import Framework
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem

FILE = "megatron.sh"

_NO_ARGUMENT = ("virtual_pipeline_model_parallel_size", "grad_reduce_in_fp32")
"""Fields that Megatron-LM computes from other arguments."""


def arguments(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """A file for bash that sets the array ``MEGATRON_ARGUMENTS``."""
    core = core_of(problem, layout)
    words = [
        *model_arguments(problem.architecture, problem.sequence),
        ("--micro-batch-size", str(layout.microbatch)),
        ("--global-batch-size", str(problem.batch)),
        *_fields(_used(core)),
        *_virtual_stages(problem, layout, core),
        *_precision(problem, core),
    ]
    if core.pipeline_inside:
        words.append(("--use-tp-pp-dp-mapping",))
    if core.fsdp:
        words.append(("--ckpt-format", FSDP_FORMAT))
    if problem.attention == "materialized":
        words.append(("--attention-backend", "unfused"))
    lines = "".join(f"  {shlex.join(one)}\n" for one in words)
    text = (
        _head(problem, layout)
        + _connections(layout, core)
        + f"MEGATRON_RANKS={layout.ranks}\n"
        + f"MEGATRON_ARGUMENTS=(\n{lines})\n"
    )
    return {FILE: text}


def _head(problem: TrainingProblem, layout: Layout) -> str:
    return comment(
        f"The layout {str(layout)!r} that Stagewright chose, for Megatron-LM (core 0.20):",
        "source this file on every node, then",
        f'  {launch(problem)} ... pretrain_gpt.py "${{MEGATRON_ARGUMENTS[@]}}" ...',
        "with the data, the tokenizer, the learning rate and the number of iterations.",
        "Not in the plan, and so Megatron-LM's defaults: scaling of rotary positions, scores and",
        "losses of a router, dropout's rates, padding of the vocabulary, recipe of fp8.",
        *left_out(problem.architecture),
    )


def _connections(layout: Layout, core: Core) -> str:
    """Kernels and communication must start in order, but for Megatron-FSDP."""
    if core.fsdp:
        return "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
    if layout.tensor > 1 or layout.context > 1:
        return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    return ""


def _used(core: Core) -> Fields:
    """The fields that differ from Megatron-LM's defaults, and the degrees."""
    fields = {**core.model, **core.ddp, **core.optimizer}
    if fields["expert_tensor_parallel_size"] is None:
        del fields["expert_model_parallel_size"]
    if not core.fsdp:
        del fields["data_parallel_sharding_strategy"]
    if fields["exp_avg_dtype"] == "fp32":
        del fields["exp_avg_dtype"], fields["exp_avg_sq_dtype"]
    return {name: value for name, value in fields.items() if name not in _NO_ARGUMENT and value}


def _fields(fields: Fields) -> list[Argument]:
    found: list[Argument] = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [] if value is True else [str(value)]
        found.append((f"--{name.replace('_', '-')}", *values))
    return found


def _virtual_stages(problem: TrainingProblem, layout: Layout, core: Core) -> list[Argument]:
    """An uneven division's text says the number of chunks too."""
    if layout.chunks == 1 or core.model["pipeline_model_parallel_layout"] is not None:
        return []
    each = problem.architecture.layers // layout.stages
    return [("--num-layers-per-virtual-pipeline-stage", str(each))]


def _precision(problem: TrainingProblem, core: Core) -> list[Argument]:
    found: list[Argument] = [] if core.numbers == "fp32" else [(f"--{core.numbers}",)]
    wide = problem.precision.gradient_bytes == 4
    if core.numbers == "bf16" and not wide:
        found.append(("--grad-reduce-in-bf16",))
    if core.numbers == "fp16" and wide:
        found.append(("--accumulate-allreduce-grads-in-fp32",))
    if core.fp8:
        found.append(("--fp8-format", "hybrid"))
    if core.fp8_weights:
        found.append(("--fp8-param-gather",))
    return found


FRAMEWORK = Framework("Megatron-LM", (*RULES, *MODEL_RULES), arguments)
