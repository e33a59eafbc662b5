"""Memory of layouts as software stacks keep it, beside measured bytes and others' estimates.

Every measured run ran, so that each of them fits. Printed memory is torchtitan's maximum of
reserved bytes (its benchmarks of December 2024) and the peak in NVIDIA's log of Llama 3 8B.
Megatron-LM's ``report_theoretical_memory`` (training/theoretical_memory_usage.py, d98e8a6) and
DeepSpeed's ``estimate_zero2_model_states_mem_needs`` and ``estimate_zero3_...`` (runtime/zero,
0.19.6) are restated from their sources. Megatron's counts gradients in fp32, masks of dropout, and
gelu; DeepSpeed's a gradient in 16 bits beside the one in fp32.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from benchmarks.layout_runs import compiled
from benchmarks.measured_layouts import MeasuredRun, measured_runs
from benchmarks.models import ARCHITECTURES
from benchmarks.report import Table, percent
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.stack_memory import PLAIN
from stagewright.graphs.models.architecture import Architecture
from stagewright.service.layouts.problems import training_problem

NEMO_PEAK = 70_833_405_952
"""Bytes at the peak that the log of NVIDIA's Llama 3 8B prints."""


def tables(quick: bool) -> Iterator[Table]:
    """Which runs fit and, if there is any, their printed memory; other estimators."""
    runs = measured_runs()
    yield fits(runs)
    yield printed(runs)
    if not quick:
        yield estimators()


def fits(runs: tuple[MeasuredRun, ...]) -> Table:
    """How many runs of each stack are said not to fit, without what the stack keeps and with it."""
    every, plain, now = Counter[str](), Counter[str](), Counter[str]()
    for run in runs:
        every[run.stack] += 1
        plain[run.stack] += not unstacked(run).fits
        now[run.stack] += not estimate(run).fits
    rows = [(one, every[one], plain[one], now[one]) for one in every]
    total = ("all", every.total(), plain.total(), now.total())
    columns = ("stack", "runs", "do not fit, no stack", "do not fit, as the stack keeps memory")
    return Table("stack_memory_fits", "Runs that ran", columns, (*rows, total))


def printed(runs: tuple[MeasuredRun, ...]) -> Table:
    """The runs whose memory is printed."""
    rows = [_printed(run) for run in runs if run.memory_bytes is not None]
    columns = ("stack", "run", "layout", "printed GB", "no stack", "error", "as kept", "error")
    return Table("stack_memory_runs", "Printed memory", columns, (*rows, _of_nemo()))


def model_named(name: str) -> Architecture:
    """A model of the runs."""
    return replace(ARCHITECTURES[name], positions=None)


def _printed(run: MeasuredRun) -> tuple[object, ...]:
    assert run.memory_bytes is not None
    before, after = _of_torch(unstacked(run)), _of_torch(estimate(run))
    name = f"{run.model} {run.precision} {run.note.split(' (')[0]}"
    return (run.stack, name, str(run.layout), *_compared(run.memory_bytes, before, after))


def _of_nemo() -> tuple[object, ...]:
    layout = parse_layout("p1 t1 c2 d4 b1 zero1")
    before, after = (
        _of_torch(evaluate(_llama_8b(framework), layout, compiled)) for framework in (None, "nemo")
    )
    return ("nemo", "llama3-8b bf16", str(layout), *_compared(NEMO_PEAK, before, after))


def _llama_8b(framework: str | None) -> TrainingProblem:
    return training_problem(
        model_named("llama3-8b"), fabric_of_kind("h100", 8), sequence=8192, batch=128,
        framework=framework,
    )  # fmt: skip


def _of_torch(found: Estimate) -> float:
    """Bytes at the peak without the reserve, which torch's counters do not know."""
    return max(one.total - one.reserve for one in found.memory)


def _compared(measured: float, before: float, after: float) -> Iterator[str]:
    yield _gb(measured)
    for found in (before, after):
        yield _gb(found)
        yield f"{found / measured - 1:+.1%}"


@lru_cache(maxsize=512)
def _evaluated(problem: TrainingProblem, layout: Layout) -> Estimate:
    return evaluate(problem, layout, compiled)


def estimate(run: MeasuredRun) -> Estimate:
    """A run as its stack keeps memory; releases that ran the same layout have one estimate."""
    return _evaluated(run.problem, run.layout)


def unstacked(run: MeasuredRun) -> Estimate:
    """A run without what is known of its stack: fp32 gradients, unfused operators, 2 GB left."""
    gradients = 2 if run.stack == "megatron-2021" else 4
    numbers = replace(run.problem.precision, gradient_bytes=gradients)
    problem = replace(
        run.problem, precision=numbers, memory=PLAIN, reserve_bytes=PLAIN.reserve_bytes
    )
    kind = "full" if run.layout.recompute == "full" else "none"
    return evaluate(problem, replace(run.layout, recompute=kind, offload_blocks=0), compiled)


_SHAPES = (
    ("llama3-8b", "p1 t2 d4 b1 zero1 sp"),
    ("llama3-70b", "p4 t4 d4 b1 zero1 sp"),
    ("llama3-70b", "p4 t4 d4 b1 v5 zero1 sp"),
    ("llama3-405b", "p9 t8 d2 b1 v2 zero1 sp"),
    ("gpt3-20b", "p1 t8 d4 b2 sp"),
    ("nemotron-22b", "p4 t2 d8 b2 v10 zero1 sp"),
)
_REPLICATED = (
    ("llama3-8b", "p1 t1 d8 b1 zero2"),
    ("llama3-8b", "p1 t1 d64 b1 zero2"),
    ("llama3-70b", "p1 t1 d64 b1 zero3"),
    ("llama3-8b", "p1 t1 d8 b1 zero3"),
)


def estimators() -> Table:
    """Others' estimates, and ours of the same bytes."""
    columns = ("estimator", "model", "layout", "bytes", "theirs GB", "ours GB", "difference")
    rows = (*_by_megatron(), *_by_deepspeed())
    title = "Memory beside others' estimates"
    return Table("stack_memory_estimators", title, columns, rows)


def _by_megatron() -> Iterator[tuple[object, ...]]:
    for model, words in _SHAPES:
        layout, of = parse_layout(words), model_named(model)
        problem = _of(of, layout, "megatron")
        precise = replace(problem.precision, gradient_bytes=4)
        first = evaluate(replace(problem, precision=precise), layout, compiled).memory[0]
        held = first.weights + first.gradients + first.optimizer
        for what, theirs, ours in (
            ("states", megatron_state_bytes(of, layout), held),
            ("activations", megatron_activation_bytes(problem, layout), first.activations),
        ):
            yield "Megatron-LM", model, words, what, *_beside(theirs, ours)


def _by_deepspeed() -> Iterator[tuple[object, ...]]:
    for model, words in _REPLICATED:
        layout, of = parse_layout(words), model_named(model)
        memory = evaluate(_of(of, layout, "deepspeed"), layout, compiled).memory[0]
        held = memory.weights + memory.gradients + memory.optimizer
        yield "DeepSpeed", model, words, "states", *_beside(deepspeed_bytes(of, layout), held)


def _of(of: Architecture, layout: Layout, framework: str) -> TrainingProblem:
    """Sixteen microbatches of 2,048 tokens."""
    batch = 16 * layout.data * layout.microbatch * layout.pipeline
    fabric = fabric_of_kind("h100", layout.ranks, per_server=min(8, layout.ranks))
    return training_problem(of, fabric, sequence=2048, batch=batch, framework=framework)


def megatron_state_bytes(of: Architecture, layout: Layout) -> float:
    """Megatron-LM's weights, gradients and optimizer of the fullest rank, of a dense model."""
    norms = 2 if of.norm == "layer" else 1
    attention = of.attention
    queries = attention.heads * attention.head_size  # type: ignore[union-attr]
    keys = attention.key_value_heads * attention.head_size  # type: ignore[union-attr]
    projections = 2 * of.hidden * (queries + keys)
    fed = 2 * of.hidden * of.feed_forward.width * (1.5 if of.feed_forward.gated else 1)
    table = of.hidden * of.vocabulary
    divided = of.layers * (projections + fed) / layout.pipeline + table
    if not of.tied and layout.pipeline == 1:
        divided += table
    whole = (2 * of.layers + 1) * norms * of.hidden / layout.pipeline
    each = 6 + 12 / layout.data if layout.zero else 18
    return (divided / layout.tensor + whole) * each


def megatron_activation_bytes(problem: TrainingProblem, layout: Layout) -> float:
    """Megatron-LM's activations of the first rank, with sequence parallelism (its Table 2)."""
    of, p = problem.architecture, layout.pipeline
    tokens = problem.sequence * layout.microbatch
    found = of.layers * tokens * of.hidden * (18 + 4 * of.feed_forward.width / of.hidden)
    found += tokens * p * (8 + of.hidden)
    if layout.chunks > 1:
        found *= 1 + (p - 1) / (p * layout.chunks)
    elif p > 1:
        found *= min(1, layout.microbatches(problem.batch) / p)
    if p == 1:
        found += 4 * tokens * (of.hidden + of.vocabulary)
    return found / layout.tensor


def deepspeed_bytes(of: Architecture, layout: Layout) -> float:
    """DeepSpeed's estimate of a device's states under ZeRO 2 or 3, without a gathered layer."""
    number = sum(of.parameters().values())
    return 18 * number / layout.data + (2 * number if layout.zero == 2 else 0)


def _beside(theirs: float, ours: float) -> tuple[str, str, str]:
    return _gb(theirs), _gb(ours), percent(ours / theirs - 1)


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f}"
