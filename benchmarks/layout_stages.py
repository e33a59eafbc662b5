"""What blocks and recomputed blocks of every stage gain where memory is small.

Llama 3 70B and GPT of 175B with ZeRO 0 or 1, in all of the space, among plain 1F1B pipelines
without context parallelism, and at fixed degrees, which is where AdaPipe (ASPLOS 2024) divides
blocks and chooses recomputation by stage.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.layout_runs import gpt
from benchmarks.models import ARCHITECTURES
from benchmarks.report import Table
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import rates_of
from stagewright.solvers.parallelism.refining import refine, search
from stagewright.solvers.parallelism.space import Space

LLAMA = replace(ARCHITECTURES["llama3-70b"], name="Llama 3 70B")
GPT = replace(gpt(96, 12288, 96), name="GPT 175B", positions=None, dropout=False)

ALL = Space(zero=(0, 1))
PLAIN = replace(ALL, chunks=1, schedules=("1f1b",), context=(1,))
FIXED = replace(PLAIN, pipeline=(8,), tensor=(8,), microbatch=(1,))
SPACES = {"all": ALL, "plain 1F1B": PLAIN, "p8 t8 b1": FIXED}

# Model, tokens of a sequence, kind, memory of a device (GB), devices, batch; spaces.
CASES = (
    (LLAMA, 8192, "h100", 80, 64, 256, ("all", "plain 1F1B")),
    (LLAMA, 8192, "h100", 80, 128, 256, ("all", "plain 1F1B")),
    (LLAMA, 8192, "h100", 80, 256, 512, ("all", "plain 1F1B")),
    (LLAMA, 8192, "h100", 80, 512, 512, ("all", "plain 1F1B")),
    (LLAMA, 4096, "a100", 40, 64, 256, ("all", "plain 1F1B")),
    (LLAMA, 4096, "a100", 40, 128, 512, ("all", "plain 1F1B")),
    (LLAMA, 4096, "a100", 40, 256, 512, ("all", "plain 1F1B")),
    (GPT, 2048, "a100", 80, 1024, 1536, ("all", "plain 1F1B")),
    (GPT, 4096, "a100", 80, 64, 128, ("plain 1F1B", "p8 t8 b1")),
    (GPT, 8192, "a100", 80, 64, 64, ("plain 1F1B", "p8 t8 b1")),
    (GPT, 16384, "a100", 80, 64, 32, ("all", "plain 1F1B", "p8 t8 b1")),
)


COLUMNS = (
    "model, tokens", "GPUs, batch", "space", "alike, all or no blocks recomputed",
    "alike, fewest blocks", "layout", "by stage", "layout", "gain", "bound, plain pipelines",
)  # fmt: skip


def tables(quick: bool) -> Iterator[Table]:
    """A row for each case in each of its spaces."""
    rows = []
    for model, sequence, kind, gigabytes, devices, batch, names in CASES[: 1 if quick else None]:
        fabric = replace(fabric_of_kind(kind, devices), memory_bytes=gigabytes * 1e9)
        problem = TrainingProblem(model, sequence, batch, fabric, rates_of(kind))
        case = (f"{model.name}, {sequence:,}", f"{devices} {kind} {gigabytes} GB, {batch}")
        rows += [(*case, name, *_gain(problem, SPACES[name])) for name in names]
    title = "Blocks and recomputed blocks of every stage: seconds by the model"
    yield Table("layout_stages", title, COLUMNS, tuple(rows))


def _gain(problem: TrainingProblem, space: Space) -> tuple[object, ...]:
    """All or no blocks recomputed, the search, and its refinement, if that is faster."""
    found = search(problem, space)
    whole = search(problem, replace(space, partial=False), keep=1)
    refined = refine(problem, space, found)
    alike = found.best[0]
    best = refined.best[0].estimate if refined.best else alike
    gain = 1 - best.seconds / alike.seconds
    divided = (best.seconds, best.layout, f"{gain:.1%}") if gain > 0 else ("-", "", 0)
    seconds = whole.best[0].seconds if whole.best else "does not fit"
    return (seconds, alike.seconds, alike.layout, *divided, refined.plain_bound)
