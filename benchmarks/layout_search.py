"""CPU seconds of the search of parallel layouts on many GPUs; the whole default space."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from time import process_time

from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.importers.hf_config import architecture_of
from stagewright.graphs.machines.groups import ends, links
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.service.layouts.problems import training_problem
from stagewright.solvers.parallelism.family import placed_rates
from stagewright.solvers.parallelism.refining import FoundLayouts, search, work_alike
from stagewright.solvers.parallelism.tree import compiled_walk

RUNS = 3
Case = tuple[str, int, int, int]
"""Model, GPUs, batch, tokens of a sample."""


def _fields(
    kind: str, layers: int, hidden: int, heads: int, groups: int, inner: int, vocabulary: int
) -> dict[str, object]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }


MODELS: dict[str, dict[str, object]] = {
    "Llama 3 70B": _fields("llama", 80, 8192, 64, 8, 28672, 128256),
    "Llama 3 405B": _fields("llama", 126, 16384, 128, 8, 53248, 128256),
    "DeepSeek-V3": _fields("deepseek_v3", 61, 7168, 128, 128, 18432, 129280)
    | {
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
    },
}


def problem(case: Case) -> TrainingProblem:
    """A training on H100s in servers of eight."""
    model, gpus, batch, sequence = case
    return training_problem(
        architecture_of(MODELS[model]), fabric_of_kind("h100", gpus), sequence=sequence, batch=batch
    )


STUDY = BenchSpec(
    "layout_search",
    problem,
    (
        ("Llama 3 70B", 10_000, 10_000, 4096),
        ("Llama 3 405B", 10_240, 2560, 8192),
        ("Llama 3 405B", 10_000, 10_000, 8192),
        ("DeepSeek-V3", 10_240, 15_360, 4096),
        ("DeepSeek-V3", 10_000, 10_000, 4096),
        ("Llama 3 70B", 100_000, 20_000, 4096),
        ("Llama 3 405B", 100_000, 20_000, 8192),
        ("DeepSeek-V3", 100_000, 100_000, 4096),
    ),
)


def timed(case: Case, run: int, folded: bool) -> tuple[float, FoundLayouts]:
    """CPU seconds of a search, and what it finds; nothing is remembered from the one before."""
    asked = STUDY.build(case)
    asked = replace(asked, architecture=replace(asked.architecture, name=f"{run} {folded}"))
    links.cache_clear()
    ends.cache_clear()
    placed_rates.cache_clear()
    started = process_time()
    found = search(asked, alike=work_alike) if folded else search(asked)
    return process_time() - started, found


def tables(quick: bool) -> Iterator[Table]:
    """Medians of several searches; the schedule's walk is compiled before."""
    compiled_walk()
    timed(("Llama 3 70B", 64, 64, 4096), 0, folded=True)
    rows = []
    for case in STUDY.cases(quick):
        folded, every = ([timed(case, i, way) for i in range(RUNS)] for way in (True, False))
        found = folded[0][1]
        rows.append(
            (
                *case,
                f"{median(seconds for seconds, _ in folded):.2f}",
                found.examined,
                f"{median(seconds for seconds, _ in every):.2f}",
                every[0][1].examined,
                "yes" if found.proved and every[0][1].proved else "no",
                str(found.best[0].layout) if found.best else None,
            )
        )
    columns = (
        "model", "GPUs", "batch", "tokens of a sample", "CPU s", "evaluated",
        "CPU s, `--unfolded`", "evaluated", "proved", "best",
    )  # fmt: skip
    title = f"The ten best layouts of the default space: CPU seconds, medians of {RUNS}"
    yield Table("layout_search", title, columns, tuple(rows))
