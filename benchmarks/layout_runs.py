"""Published iterations of large models, as problems and layouts of the cost model.

What is printed as FLOP/s is converted to seconds with the FLOPs that the publication counts.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from numba import njit

from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import shares
from stagewright.formulations.parallelism.pipeline_time import RankMemory, walk
from stagewright.formulations.parallelism.training import (
    TrainingProblem,
)
from stagewright.formulations.prices.computing import Precision
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import rates_of
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention

MEASURED = Path(__file__).parents[2] / "shared/data/megatron/measured_runs.json"


@dataclass(frozen=True, slots=True)
class Run:
    """An iteration of ``seconds``, as printed or measured."""

    name: str
    problem: TrainingProblem
    layout: Layout
    seconds: float

    @property
    def model(self) -> str:
        """Its layers and width; runs of one model are left out together in validation."""
        return self.problem.architecture.name


def gpt(
    layers: int, hidden: int, heads: int, *, sequence: int = 2048, vocabulary: int = 51200
) -> Architecture:
    """Megatron-LM's GPT."""
    return Architecture(
        f"gpt-{layers}x{hidden}",
        layers,
        hidden,
        vocabulary,
        GroupedAttention(heads, heads, hidden // heads, bias=True, output_bias=True),
        FeedForward(4 * hidden, gated=False, bias=True),
        norm="layer",
        positions=sequence,
        tied=True,
        dropout=True,
    )


def gpt_problem(
    architecture: Architecture, batch: int, gpus: int, kind: str = "a100-80gb"
) -> TrainingProblem:
    """GPT on Selene by Megatron-LM of 2022, as Korthikanti et al. trained it."""
    return TrainingProblem(
        architecture,
        architecture.positions or 2048,
        batch,
        fabric_of_kind(kind, gpus),
        rates_of(kind),
        attention="materialized",
        overlap=False,
    )


def of_2021(problem: TrainingProblem, *, overlap: bool = False) -> TrainingProblem:
    """The problem as Megatron-LM of 2021 trains it: fp16 gradients, nothing beside the products.

    ``overlap`` is the thesis's scripts' choice of data parallelism: ``torch`` overlaps, ``local``
    does not (Megatron-LM, examples/academic_paper_scripts/sc21).
    """
    return replace(
        problem,
        precision=Precision(gradient_bytes=2),
        overlap=overlap,
        overlap_tensor=False,
        fused_gradients=False,
    )


# --- Korthikanti et al. 2022 ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, and its bytes on the first rank as the paper has them; None where it has none."""

    run: Run
    state_bytes: float
    activation_bytes: float | None


def kept_by_blocks(of: Run, first: RankMemory) -> float:
    """Bytes that the first rank's forwards keep, without those of a head that is on it."""
    layout = of.layout
    if layout.pipeline > 1:
        return first.activations
    head = shares(of.problem, layout.split).head
    size = of.problem.precision.activation_bytes
    return first.activations - layout.microbatch * head.saved_bytes(size, layout.recompute)


def korthikanti() -> list[Measured]:
    """Tables 3 to 5: 22B to 1T with full recomputation, or selective and sequence parallelism."""
    return [_measured(one) for one in json.loads(MEASURED.read_text())["runs"]]


def _measured(found: dict[str, object]) -> Measured:
    selective = found["recompute"] != "full"
    number = {key: value for key, value in found.items() if isinstance(value, int)}
    layout = Layout(
        pipeline=number["pipeline"],
        tensor=number["tensor"],
        microbatch=number["microbatch"],
        chunks=number["virtual_stages"],
        recompute="selective" if selective else "full",
        sequence_parallel=selective,
    )
    model = gpt(number["layers"], number["hidden"], number["heads"])
    kept = found["measured_activation_gib"]
    run = Run(
        f"{found['model']}, {layout.recompute}",
        gpt_problem(model, number["global_batch"], number["gpus"]),
        layout,
        float(str(found["measured_iteration_seconds"])),
    )
    return Measured(
        run,
        float(str(found["measured_state_gib_first_stage"])) * 2**30,
        None if kept is None else float(str(kept)) * 2**30,
    )


# --- Narayanan's thesis, tables 4.1 and 4.2 ------------------------------------------------------

# GPUs, layers, hidden size, heads, t, p, batch, TFLOP/s per GPU as printed; then from the scripts
# of the paper (sc21/run_table_1.sh): microbatch, chunks, and whether data parallelism is torch's.
_TABLE_4_1 = (
    (32, 24, 2304, 24, 1, 1, 512, 137, 16, 1, True),
    (64, 30, 3072, 32, 2, 1, 512, 138, 16, 1, True),
    (128, 36, 4096, 32, 4, 1, 512, 142, 16, 1, True),
    (256, 40, 6144, 48, 8, 1, 1024, 135, 8, 1, True),
    (512, 48, 8192, 64, 8, 2, 1536, 138, 4, 1, False),
    (1024, 60, 10240, 80, 8, 4, 1792, 140, 2, 3, False),
    (1536, 80, 12288, 96, 8, 8, 2304, 148, 2, 2, False),
    (1920, 96, 16384, 128, 8, 16, 2160, 155, 1, 2, False),
    (2520, 105, 20480, 128, 8, 35, 2520, 163, 1, 3, False),
    (3072, 128, 25600, 160, 8, 64, 3072, 163, 1, 1, False),
)

# GPUs, layers, hidden size, heads, p, batch, TFLOP/s per GPU; t 8, microbatch 1.
_TABLE_4_2_PTD = (
    (384, 96, 12288, 96, 12, 1536, 153),
    (768, 96, 12288, 96, 12, 1536, 149),
    (1536, 96, 12288, 96, 12, 1536, 141),
    (560, 105, 20480, 128, 35, 2240, 171),
    (1120, 105, 20480, 128, 35, 2240, 167),
    (2240, 105, 20480, 128, 35, 2240, 159),
)

_CHUNKS = {12: 4, 35: 3}  # by the pipeline's ranks

# GPUs, layers, hidden size, heads, microbatch, batch, TFLOP/s per GPU; ZeRO-3 alone.
_TABLE_4_2_ZERO = (
    (384, 96, 12288, 96, 4, 1536, 144),
    (768, 96, 12288, 96, 2, 1536, 88),
    (1536, 96, 12288, 96, 1, 1536, 44),
    (640, 105, 20480, 128, 4, 2560, 138),
    (1120, 105, 20480, 128, 2, 2240, 98),
    (2240, 105, 20480, 128, 1, 2240, 48),
)


def thesis_flops(problem: TrainingProblem) -> float:
    """FLOPs of an iteration with recomputation, thesis equation 4.2."""
    of, s = problem.architecture, problem.sequence
    layers, h, vocabulary = of.layers, of.hidden, of.vocabulary
    each = 1 + s / (6 * h) + vocabulary / (16 * layers * h)
    return 96.0 * problem.batch * s * layers * h**2 * each


def thesis_run(name: str, problem: TrainingProblem, layout: Layout, teraflops: float) -> Run:
    """A run with ``teraflops`` TFLOP/s per GPU by the thesis's count."""
    rate = problem.fabric.devices * teraflops * 1e12
    return Run(name, problem, layout, thesis_flops(problem) / rate)


def thesis_teraflops(run: Run, seconds: float) -> float:
    """TFLOP/s per GPU by the thesis's count if the iteration takes ``seconds``."""
    return thesis_flops(run.problem) / seconds / run.problem.fabric.devices / 1e12


def table_4_1() -> Iterator[Run]:
    """Weak scaling from 1.7B to 1T parameters."""
    for gpus, layers, hidden, heads, t, p, batch, rate, microbatch, chunks, torch in _TABLE_4_1:
        problem = of_2021(gpt_problem(gpt(layers, hidden, heads), batch, gpus), overlap=torch)
        layout = Layout(
            pipeline=p,
            tensor=t,
            data=gpus // (p * t),
            microbatch=microbatch,
            chunks=chunks,
            recompute="full",
        )
        billions = sum(problem.architecture.parameters().values()) / 1e9
        yield thesis_run(f"GPT {billions:.1f}B", problem, layout, rate)


def table_4_2_ptd() -> Iterator[Run]:
    """PTD-P; chunks are not printed, those here are of the scripts of figure 4.12 and table 4.1."""
    for gpus, layers, hidden, heads, p, batch, rate in _TABLE_4_2_PTD:
        problem = of_2021(gpt_problem(gpt(layers, hidden, heads), batch, gpus))
        layout = Layout(
            pipeline=p, tensor=8, data=gpus // (8 * p), chunks=_CHUNKS[p], recompute="full"
        )
        yield thesis_run(f"{_billions(problem):.0f}B, PTD-P, {gpus} GPUs", problem, layout, rate)


def table_4_2_zero() -> Iterator[Run]:
    """ZeRO-3 without model parallelism, by DeepSpeed, whose exchanges run beside the work."""
    for gpus, layers, hidden, heads, microbatch, batch, rate in _TABLE_4_2_ZERO:
        problem = of_2021(gpt_problem(gpt(layers, hidden, heads), batch, gpus), overlap=True)
        layout = Layout(data=gpus, microbatch=microbatch, recompute="full", zero=3)
        yield thesis_run(f"{_billions(problem):.0f}B, ZeRO-3, {gpus} GPUs", problem, layout, rate)


def _billions(problem: TrainingProblem) -> float:
    return sum(problem.architecture.parameters().values()) / 1e9


# --- Predicted -----------------------------------------------------------------------------------

compiled = njit(walk)


def predicted(run: Run) -> float:
    """Seconds of a run's iteration."""
    return evaluate(run.problem, run.layout, compiled).seconds


def error(run: Run) -> float:
    """Predicted over measured seconds, less one."""
    return predicted(run) / run.seconds - 1
