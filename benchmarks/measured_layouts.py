"""Published iterations of large transformers, as problems and layouts: measured, and predicted.

The rows are facts read from ``shared/data/training/measured_layouts.csv``; what a source does not
print is assumed as the README there says.
"""

import csv
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.layout_h100 import CHOSEN, megatron
from benchmarks.layout_runs import Run, korthikanti, of_2021, table_4_1
from benchmarks.models import ARCHITECTURES
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.training import (
    TrainingProblem,
    with_stack,
)
from stagewright.formulations.prices.computing import precision_named
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import rates_of
from stagewright.graphs.machines.stack_memory import STACK_MEMORY

ROWS = Path(__file__).parents[2] / "shared/data/training/measured_layouts.csv"

MEMORY = {"torchtitan": 96e9}
"""Bytes of an H100 that are not the usual ones, by the stack that was measured on it."""


BY_RECIPE: dict[tuple[str, str, str], dict[str, Any]] = {
    # Megatron-Bridge 067f987, perf_recipes/llama/gb200/llama3.py (fp8cs): cpu_offloading_num_layers
    ("llama3-70b", "gb200", "p1 t1 d64 b2 zero3"): {"offload_blocks": 40},
    # v0.1.0rc4, scripts/performance/configs/llama31/llama31_405b_llm_pretrain.yaml (128 GPUs)
    ("llama3-405b", "gb200", "p1 t2 d64 b1 zero3 sp"): {"offload_blocks": 95},
    # Automodel 092af93, examples/benchmark/configs/qwen3_moe_30b_te_deepep.yaml
    ("qwen3-30b", "h100", "p1 t1 d8 e8 b4 zero3"): {"recompute": "full"},
}
"""What rows do not print and their public recipes say, by model, device and layout."""

OPTIMIZER_BYTES = {"nemo24.07": 10, "nemo-longseq": 10, "automodel-moe": 4}
"""Of the optimizer's state, by release, where it is not the usual: NeMo before 2.0 (NVIDIA/NeMo,
megatron_gpt_model.py: ``store_param_remainders``) has half of an fp32 master beside the bf16
weight; Automodel (models/qwen3_moe/model.py) casts to bf16, and has torch's Adam of that."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A row: an iteration of ``seconds``, and its memory where it is printed."""

    id: str
    stack: str
    release: str
    model: str
    device: str
    note: str
    precision: str
    problem: TrainingProblem
    layout: Layout
    seconds: float
    memory_bytes: float | None

    @property
    def is_sparse(self) -> bool:
        """Whether the model has experts."""
        return self.problem.architecture.experts is not None


@lru_cache(maxsize=1)
def measured_runs() -> tuple[MeasuredRun, ...]:
    """All rows."""
    with ROWS.open() as file:
        return tuple(_run(row) for row in csv.DictReader(file))


@lru_cache(maxsize=1)
def published_on_a100() -> tuple[MeasuredRun, ...]:
    """Korthikanti et al. 2022, tables 3 to 5, and the thesis's table 4.1."""
    return tuple(_on_a100(run) for run in (*(one.run for one in korthikanti()), *table_4_1()))


@lru_cache(maxsize=1)
def published_on_h100() -> tuple[MeasuredRun, ...]:
    """Megatron-LM's table of 2024, with the layouts that are best among those not printed."""
    return tuple(
        MeasuredRun(
            one.name, "megatron-2024", "2024", one.name, "h100", "", "bf16", one.problem,
            replace(one.layouts[0], microbatch=size, chunks=chunks), one.seconds, None,
        )
        for one, (size, chunks) in zip(megatron(), CHOSEN, strict=True)
    )  # fmt: skip


def _on_a100(run: Run) -> MeasuredRun:
    return MeasuredRun(
        run.name, "megatron-2022", "", run.model, "a100-80gb", "", "fp16", run.problem, run.layout,
        run.seconds, None,
    )  # fmt: skip


def _run(row: dict[str, str]) -> MeasuredRun:
    precision = _precision(row["precision"])
    problem = _problem(
        row["stack"], row["model"], row["device"], int(row["gpus"]), int(row["sequence"]),
        int(row["batch"]), precision, _memory(row["note"]) or MEMORY.get(row["stack"]),
    )  # fmt: skip
    if row["release"] in OPTIMIZER_BYTES:
        numbers = replace(problem.precision, optimizer_bytes=OPTIMIZER_BYTES[row["release"]])
        problem = replace(problem, precision=numbers)
    layout = parse_layout(row["layout"])
    layout = replace(layout, **BY_RECIPE.get((row["model"], row["device"], str(layout)), {}))
    if row["recomputation"] == "full":
        layout = replace(layout, recompute="full")
    elif row["recomputation"] == "sel":
        layout = replace(layout, recompute="selective")
    return MeasuredRun(
        row["id"],
        row["stack"],
        row["release"],
        row["model"],
        row["device"],
        row["note"],
        precision if row["stack"] != "megatron-bridge" else row["precision"].lower(),
        problem,
        layout,
        float(row["seconds"]),
        float(row["memory_gb"]) * 1e9 if row["memory_gb"] else None,
    )


def _precision(text: str) -> str:
    return "fp8" if "fp8" in text.lower() else text.lower()


def _memory(note: str) -> float | None:
    """The device's memory, where a row names it."""
    _, found, size = note.partition("device memory ")
    return float(size.split()[0]) * 1e9 if found else None


@lru_cache(maxsize=512)
def _problem(
    stack: str,
    model: str,
    device: str,
    gpus: int,
    sequence: int,
    batch: int,
    precision: str,
    memory: float | None,
) -> TrainingProblem:
    fabric = fabric_of_kind(device, gpus, memory_bytes=memory)
    of = replace(ARCHITECTURES[model], positions=None)
    problem = TrainingProblem(
        of, sequence, batch, fabric, rates_of(device), precision_named(precision)
    )
    if stack == "megatron-2021":
        problem = replace(of_2021(problem), attention="materialized")
        problem = replace(problem, architecture=ARCHITECTURES[model])
    return with_stack(problem, STACK_MEMORY[stack])
