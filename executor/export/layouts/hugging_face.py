"""Layouts for trainers of Hugging Face's stack: Axolotl, TRL, and DistributedConfig alone.

Axolotl (0.19) and TRL (1.16) train through Accelerate's FSDP2, whose rules they have too.
``DistributedConfig`` (transformers 5.24) divides a model as it is loaded, without Accelerate.
"""

import json

from stagewright.executor.export.layouts.accelerate import (
    MIXED,
    RULES,
    TENSOR_RULES,
    fsdp,
    is_sharded,
    parallelism,
    require_precision,
)
from stagewright.executor.export.layouts.common import (
    Fields,
    head,
    left_out,
    number_type,
    of_transformers,
)
from stagewright.executor.export.layouts.rules import FrameworkRule, framework
from stagewright.executor.export.options import to_yaml
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError


def _trainer(problem: TrainingProblem, layout: Layout) -> Fields:
    """Arguments of Hugging Face's trainer, and the adapters by the names that both have."""
    numbers, tuning = number_type(problem), problem.architecture.tuning
    found: Fields = {
        "gradient_accumulation_steps": layout.microbatches(problem.batch),
        "bf16": numbers == "bf16",
        "fp16": numbers == "fp16",
        "gradient_checkpointing": layout.recompute == "full",
    }
    if tuning is not None:
        found |= {"lora_r": tuning.rank, "lora_target_modules": sorted(tuning.targets)}
    return found


def axolotl(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """``axolotl.yaml``, to which the model and the data are to be added."""
    fields: Fields = {
        "sequence_len": problem.sequence,
        "sample_packing": False,
        "pad_to_sequence_len": True,
        "micro_batch_size": layout.microbatch,
        **_trainer(problem, layout),
        "attn_implementation": "eager"
        if problem.attention == "materialized"
        else "flash_attention_2",
    }
    if is_sharded(layout):
        fields |= {
            "dp_shard_size": layout.data,
            "tensor_parallel_size": layout.tensor,
            "context_parallel_size": layout.context,
            "fsdp_version": 2,
            "fsdp_config": fsdp(layout),
        }
    if problem.architecture.tuning is not None:
        fields["adapter"] = "lora"
    return {"axolotl.yaml": head(problem, layout, "Axolotl (0.19)") + to_yaml(fields)}


def trl(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """``sft.yaml``, arguments of TRL's trainer; ``accelerate.env``, what it runs in."""
    fields: Fields = {
        "max_length": problem.sequence,
        "packing": False,
        "per_device_train_batch_size": layout.microbatch,
        **_trainer(problem, layout),
    }
    if layout.tensor > 1:
        fields["model_init_kwargs"] = {"tp_plan": "auto", "tp_size": layout.tensor}
    if problem.architecture.tuning is not None:
        fields["use_peft"] = True
    above = head(problem, layout, "TRL (1.16)")
    lines = (f"export {name}={value}\n" for name, value in environment(problem, layout).items())
    return {"sft.yaml": above + to_yaml(fields), "accelerate.env": "".join(lines)}


def environment(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """What ``accelerate launch`` would set of the environment."""
    found: dict[str, str] = {"ACCELERATE_MIXED_PRECISION": MIXED[number_type(problem)]}
    if is_sharded(layout):
        found |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        found |= {f"FSDP_{name.upper()}": _word(value) for name, value in fsdp(layout).items()}
        found["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        found |= {
            f"PARALLELISM_CONFIG_{name.upper()}": str(value)
            for name, value in parallelism(layout).items()
        }
    return found


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def transformers(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """``distributed_config.json``, and a module with the function ``load``."""
    sharded = is_sharded(layout)
    fields: Fields = {
        "tp_size": layout.tensor,
        "tp_plan": "auto" if layout.tensor > 1 else None,
        "fsdp_size": layout.data if sharded else 1,
        "dp_replicate_size": 1 if sharded else layout.data,
        "fsdp_mixed_precision": number_type(problem) == "bf16",
        "ep_size": layout.expert,
    }
    text = of_transformers(
        "transformers",
        problem,
        layout,
        left_out(problem),
        batch=layout.microbatch,
        accumulation=layout.microbatches(problem.batch),
    )
    return {
        "distributed_config.json": json.dumps(fields, indent=1) + "\n",
        "stagewright_transformers.py": text,
    }


def _require_numbers(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    if number_type(problem) == "fp16":
        raise InputError(f"{problem.card.name} has no bf16, and {framework} no fp16")
    require_precision(problem, layout, framework)


def _require_expert_ranks(_: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.expert > 1 and layout.expert % layout.tensor:
        raise InputError(
            f"expert degree {layout.expert} with tensor {layout.tensor}: {framework} needs a "
            "multiple of the tensor degree"
        )


def _require_fsdp(_: TrainingProblem, layout: Layout, framework: str) -> None:
    """Accelerate takes degrees from the environment beside FSDP2 alone."""
    if layout.tensor > 1 and not is_sharded(layout):
        raise InputError(
            f"tensor {layout.tensor} without ZeRO: {framework} takes degrees only beside FSDP2; "
            "choose zero 2 or 3 and data of at least 2"
        )


def _refuse_frozen_blocks(problem: TrainingProblem, _: Layout, framework: str) -> None:
    tuning = problem.architecture.tuning
    if tuning is not None and tuning.blocks:
        raise InputError(f"frozen blocks beside LoRA: {framework} adapts all blocks alike")


_DISTRIBUTED = "src/transformers/distributed/configuration_utils.py"

TRAINERS = [
    *RULES,
    FrameworkRule("huggingface/peft 0.21.2, tuners/lora", _refuse_frozen_blocks, of_problem=True),
    FrameworkRule(
        "huggingface/accelerate 1.15.0, src/accelerate/commands/launch.py", _require_fsdp
    ),
]

AXOLOTL = framework("axolotl", axolotl, TRAINERS)
TRL = framework("trl", trl, TRAINERS)
DISTRIBUTED = framework(
    "transformers",
    transformers,
    [
        FrameworkRule(_DISTRIBUTED, _require_numbers, of_problem=True),
        FrameworkRule(_DISTRIBUTED, _require_expert_ranks),
        *TENSOR_RULES,
    ],
)
