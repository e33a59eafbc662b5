"""Runs of TorchTitan: its TOML file (0.1 to 0.2), or the function that Stagewright exports (0.3).

The model is the file's flavor if it is one of Llama 3 (torchtitan/models/llama3), or that of the
config.json next to its tokenizer; else it has to be given.
"""

import ast
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagewright.executor.export.layouts.torchtitan import TORCH_SCHEDULES
from stagewright.executor.export.runs.arguments import TrainingRun, data_degree, division
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.schedules import Schedule
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.importers.config_fields import Fields
from stagewright.graphs.importers.hf_config import architecture_of, read_hf_config
from stagewright.graphs.models.architecture import Architecture

_LLAMA3 = {"vocab_size": 128_256, "n_kv_heads": 8, "rope_theta": 500_000.0}
_FLAVORS = {
    "8B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim_multiplier": 1.3,
           "multiple_of": 1024},
    "70B": {"dim": 8192, "n_layers": 80, "n_heads": 64, "ffn_dim_multiplier": 1.3,
            "multiple_of": 4096},
    "405B": {"dim": 16384, "n_layers": 126, "n_heads": 128, "ffn_dim_multiplier": 1.2,
             "multiple_of": 4096},
}  # fmt: skip
"""Sizes of Llama 3.1, as in Meta's params.json."""

_SCHEDULES: dict[str, Schedule] = {
    "1F1B": "1f1b", "Interleaved1F1B": "1f1b",
    **{name: schedule for schedule, name in TORCH_SCHEDULES.items()},
}  # fmt: skip
_CHECKPOINTS = {"None": "none", "SelectiveAC": "selective", "FullAC": "full"}


def read_torchtitan(text: str, place: str, gpus: int | None = None) -> TrainingRun:
    """The run of a TOML file, or of an exported function, on ``gpus`` devices.

    Raises InputError in one line that begins with ``place`` and names the field.
    """
    with naming(place):
        values = _of_python(text) if place.endswith(".py") else _of_toml(text)
        training, parallelism = (Fields(values.get(one, {})) for one in ("training", "parallelism"))
        layout = _layout(training, parallelism, values, gpus)
        if training.get(("dtype", "float32")) != "float32":
            raise InputError("training.dtype: the prices are of weights in float32; leave it out")
        numbers = training.get(("mixed_precision_param", "bfloat16"))
        if numbers not in ("bfloat16", "float32"):
            raise InputError(
                f"training.mixed_precision_param {numbers!r}: write bfloat16 or float32"
            )
        eight = "float8" in str(values.get("quantize", "")) + str(values.get("model", ""))
        local = training.size("local_batch_size|batch_size")
        batch = training.get(("global_batch_size", -1))
        return TrainingRun(
            "torchtitan",
            layout,
            _architecture(values.get("model", {}), place),
            batch=local * layout.data if batch == -1 else training.size("global_batch_size"),
            sequence=training.size(("seq_len", 2048)),
            precision="fp8" if eight else {"bfloat16": "bf16", "float32": "fp32"}[numbers],
        )


def _of_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"no TOML: {error}") from None


def _of_python(text: str) -> dict[str, Any]:
    """The fields that a function sets of its ``config``, by section."""
    found: dict[str, Any] = {}
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(f"no Python: {error.msg}, line {error.lineno}") from None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        target, value = ast.unparse(node.targets[0]), ast.unparse(node.value)
        if target == "RANKS":
            found["ranks"] = ast.literal_eval(node.value)
        elif target == "config.activation_checkpoint":
            kind = value.partition(".")[0]
            found["activation_checkpoint"] = {
                "mode": _CHECKPOINTS.get(kind, kind),
                "selective_ac_option": "op",
            }
        elif match := re.fullmatch(r"config\.(\w+)\.(\w+)", target):
            found.setdefault(match[1], {})[match[2]] = ast.literal_eval(node.value)
    if "parallelism" not in found:
        raise InputError("sets no config.parallelism; give TorchTitan's TOML file, or an export")
    return found


def _architecture(model: Mapping[str, Any], place: str) -> Architecture | None:
    """The model of the flavor, or of the folder of its tokenizer; None if neither tells."""
    assets = model.get("hf_assets_path") or model.get("tokenizer_path")
    if isinstance(assets, str):
        file = Path(place).parent / assets / "config.json"
        if file.is_file():
            return read_hf_config(file)
    flavor = _FLAVORS.get(str(model.get("flavor")))
    if model.get("name") != "llama3" or flavor is None:
        return None
    return architecture_of(_LLAMA3 | {"norm_eps": 1e-5} | flavor)


def _layout(
    training: Fields, parallelism: Fields, values: dict[str, Any], gpus: int | None
) -> Layout:
    names = ("tensor", "pipeline", "context", "expert")
    degree: dict[str, Any] = {one: parallelism.size((f"{one}_parallel_degree", 1)) for one in names}
    expert = degree.pop("expert")
    replicas = parallelism.size(("data_parallel_replicate_degree", 1))
    shards = parallelism.get(("data_parallel_shard_degree", -1))
    if shards == -1:
        shards = data_degree(gpus or values.get("ranks"), {"replicas": replicas, **degree})
    if replicas > 1 and shards > 1:
        raise InputError(
            f"parallelism: {replicas} replicas of {shards} shards: layouts have replicas or shards"
        )
    data = replicas * shards
    tensor, pipeline = degree["tensor"], degree["pipeline"]
    whole = parallelism.get(("expert_tensor_parallel_degree", 1))
    if whole not in (1, None) and expert > 1:
        raise InputError("parallelism.expert_tensor_parallel_degree: layouts keep experts whole")
    reshard = parallelism.get(("fsdp_reshard_after_forward", "default"))
    local = training.size("local_batch_size|batch_size")
    within = parallelism.size(("pipeline_parallel_microbatch_size", 1))
    return Layout(
        **degree,
        data=data,
        expert=expert,
        microbatch=within if pipeline > 1 else local,
        **(_stages(parallelism, pipeline) if pipeline > 1 else {}),
        recompute=_recompute(Fields(values.get("activation_checkpoint", {}))),
        sequence_parallel=tensor > 1 and parallelism.flag(("enable_sequence_parallel", True)),
        zero=_zero(reshard, pipeline) if replicas == 1 and shards * degree["context"] > 1 else 0,
    )


def _zero(reshard: object, pipeline: int) -> int:
    """The stage of ZeRO: with a pipeline weights and gradients stay whole."""
    if pipeline > 1:
        return 1
    if reshard not in ("default", "always", "never"):
        raise InputError(f"parallelism.fsdp_reshard_after_forward {reshard!r} is not known")
    return 2 if reshard == "never" else 3


def _stages(parallelism: Fields, pipeline: int) -> dict[str, Any]:
    name = parallelism.get(("pipeline_parallel_schedule", "1F1B"))
    if name not in _SCHEDULES:
        raise InputError(
            f"parallelism.pipeline_parallel_schedule {name!r} is none of {', '.join(_SCHEDULES)}"
        )
    modules = parallelism.get(("module_fqns_per_model_part", None))
    each = parallelism.optional_size(("pipeline_parallel_layers_per_stage", None))
    if modules is None and (each is not None or name != "1F1B"):
        raise InputError(
            "parallelism.module_fqns_per_model_part is missing: it says the layers of every stage"
        )
    found: dict[str, Any] = {"schedule": _SCHEDULES[name]}
    if modules is not None:
        counts = [sum(one.startswith("layers.") for one in part) for part in modules]
        found |= division(counts, pipeline)
    return found


def _recompute(checkpoint: Fields) -> Any:
    mode = checkpoint.get(("mode", "selective"))
    option = checkpoint.get(("selective_ac_option", "2"))  # every other layer
    if mode not in ("none", "selective", "full"):
        raise InputError(f"activation_checkpoint.mode {mode!r} is none of none, selective, full")
    if mode == "selective" and option != "op":
        raise InputError(
            f"activation_checkpoint.selective_ac_option {option!r}: selective is by operator; "
            "write op"
        )
    return mode
