"""Published trainings on H100: with the A100's fractions of the peaks, and with the H100's preset.

One number of the preset is fitted to the first of these, nothing to the others.

* GPT of 1.7B to 462B on 48 to 6,144 GPUs: Megatron-LM, ``images/model_table.png`` of 2024-07-15
  (f2e5db402c), sequences of 4,096, vocabulary 131,072 (README), exchanges overlapped; microbatch,
  chunks and recomputation are not printed.
* Llama 3 405B: glennklockwood.com/garden/llama-3.1 (from a talk of P. Balaji at SC'24): GPUs, t, c,
  p, tokens per batch, TFLOP/s; the shape of the models: aarnphm.xyz/thoughts/Llama-3. Chunks and
  sharding are not printed there; sequences are 8,192 or 131,072 tokens.
* NVIDIA's trainings in fp8 with complete layouts: the performance summaries of NeMo 24.07
  (NVIDIA/NeMo, docs/source/performance/performance_summary.md) and of 25.11 and 26.02
  (NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md), DGX-H100. The model has all products
  in fp8, attention too. ZeRO-1 is assumed where it is not FSDP, and of 405B a block less in the
  first and in the last stage.

What is not printed is chosen as the model finds best among what fits in memory; if nothing does,
that is said.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

from benchmarks.layout_fit import compiled, error, predicted
from benchmarks.layout_runs import Run, gpt, gpt_problem
from benchmarks.report import Table
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.training import Precision, TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.devices import A100, H100
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention

# Heads, hidden size, layers, t, p, batch, TFLOP/s per GPU as printed; d is 48.
_MEGATRON = (
    (16, 2048, 24, 1, 1, 192, 408.8),
    (32, 4096, 30, 2, 1, 192, 465.9),
    (48, 6144, 32, 4, 1, 192, 489.1),
    (56, 7168, 48, 8, 1, 192, 459.6),
    (64, 8192, 84, 8, 2, 384, 419.7),
    (80, 10240, 92, 8, 4, 768, 420.5),
    (96, 12288, 96, 8, 6, 1152, 432.8),
    (128, 16384, 96, 8, 8, 1536, 474.4),
    (144, 18432, 112, 8, 16, 3072, 459.9),
)
DATA = 48

# GPUs, context ranks, tokens of a sequence, TFLOP/s per GPU as printed; t 8, p 16, 16M tokens.
_LLAMA = ((8192, 1, 8192, 430), (16384, 1, 8192, 400), (16384, 16, 131072, 380))
TOKENS = 16 * 2**20


def _llama(billions: int, layers: int, hidden: int, width: int, heads: int) -> Architecture:
    return Architecture(
        f"llama-3-{billions}b",
        layers,
        hidden,
        128256,
        GroupedAttention(heads, 8, 128),
        FeedForward(width),
    )


LLAMA = _llama(405, 126, 16384, 53248, 128)
_LLAMA_8B, _LLAMA_70B = _llama(8, 32, 4096, 14336, 32), _llama(70, 80, 8192, 28672, 64)
_GPT3 = replace(gpt(96, 12288, 96), dropout=False)

# In fp8: release, model, tokens of a sequence, batch, layout as printed, tokens/s per GPU.
_NEMO = (
    ("24.07", _GPT3, 2048, 256, "p8 t4 d4 b1 v6 zero1 sp", 716),
    ("24.07", _GPT3, 2048, 2048, "p8 t4 d16 b2 v6 zero1 sp", 825),
    ("24.07", _LLAMA_8B, 8192, 128, "p1 t1 c2 d4 b1 zero1", 12273),
    ("24.07", _LLAMA_70B, 8192, 128, "p4 t4 c2 d2 b1 v5 zero1 sp", 1524),
    ("25.11", _LLAMA_8B, 8192, 128, "p1 t1 d8 b1 zero3", 14451),
    ("25.11", _LLAMA_70B, 8192, 128, "p8 t4 d2 b1 v5 zero1 sp", 1602),
    ("26.02", _LLAMA_70B, 8192, 256, "p8 t4 d2 b1 v5 zero1 sp", 1639),
    ("25.11", LLAMA, 8192, 512, "p8 t8 c2 d8 b1 v8 first1 last1 zero1 sp", 292),
    ("26.02", LLAMA, 8192, 1536, "p8 t8 c2 d8 b1 v8 first1 last1 zero1 sp", 311),
)


@dataclass(frozen=True, slots=True)
class Published:
    """A training and its TFLOP/s per GPU; ``layouts`` have what is printed and vary the rest."""

    name: str
    problem: TrainingProblem
    layouts: tuple[Layout, ...]
    teraflops: float


def megatron() -> Iterator[Published]:
    """Megatron-LM's table."""
    for heads, hidden, layers, t, p, batch, rate in _MEGATRON:
        of = replace(
            gpt(layers, hidden, heads, sequence=4096, vocabulary=131072), dropout=False, tied=False
        )
        printed = Layout(pipeline=p, tensor=t, data=DATA, zero=1, sequence_parallel=t > 1)
        chunks = [
            v for v in range(1, layers // p + 1) if layers % (p * v) == 0 and (p > 1 or v == 1)
        ]
        varied = [
            replace(printed, microbatch=b, chunks=v, recompute=recompute)
            for b, v, recompute in product((1, 2, 4), chunks, ("none", "full"))
        ]
        yield Published(
            f"GPT {sum(of.parameters().values()) / 1e9:.1f}B",
            _on_h100(of, batch, printed.ranks),
            tuple(varied),
            rate,
        )


def llama() -> Iterator[Published]:
    """Llama 3 405B: 126 blocks in 16 v stages, of which the first and the last have one less."""
    for gpus, context, sequence, rate in _LLAMA:
        printed = Layout(
            pipeline=16,
            tensor=8,
            context=context,
            data=gpus // (16 * 8 * context),
            zero=1,
            sequence_parallel=True,
        )
        varied = [
            replace(printed, chunks=v, first_blocks=8 // v - 1, last_blocks=8 // v - 1)
            for v in (1, 2, 4, 8)
        ]
        problem = replace(_on_h100(LLAMA, TOKENS // sequence, gpus), sequence=sequence)
        yield Published(
            f"Llama 3 405B, {gpus} GPUs, {sequence} tokens", problem, tuple(varied), rate
        )


def nemo() -> Iterator[Run]:
    """NVIDIA's tables in fp8, whose layouts are printed."""
    for release, model, sequence, batch, words, tokens in _NEMO:
        layout = parse_layout(words)
        problem = replace(
            _on_h100(model, batch, layout.ranks),
            sequence=sequence,
            precision=Precision(fp8_products=True),
        )
        seconds = batch * sequence / (tokens * layout.ranks)
        yield Run(f"{model.name}, {release}", problem, layout, seconds)


def _on_h100(of: Architecture, batch: int, gpus: int) -> TrainingProblem:
    return replace(gpt_problem(of, batch, gpus, "h100"), attention="fused", overlap=True)


def best(of: Published, matmul: float) -> Estimate:
    """The fastest of the layouts that fit, or of all if none fits; products at a rate."""
    problem = replace(of.problem, reached=replace(of.problem.reached, matmul=matmul))
    found = list(_estimates(problem, of.layouts))
    return min([one for one in found if one.fits] or found, key=lambda one: one.seconds)


def _estimates(problem: TrainingProblem, layouts: Iterable[Layout]) -> Iterator[Estimate]:
    for layout in layouts:
        try:
            yield evaluate(problem, layout, compiled)
        except InputError:  # the microbatches do not divide
            continue


def teraflops(of: Published, matmul: float) -> float:
    """TFLOP/s per GPU, as the model counts them; every token attends to the whole sequence."""
    return best(of, matmul).model_flops_per_second / of.problem.fabric.devices / 1e12


def fit() -> float:
    """The rate of products at which the median error over Megatron-LM's table is least."""
    runs = list(megatron())

    def off(matmul: float) -> float:
        return abs(median(teraflops(one, matmul) / one.teraflops - 1 for one in runs))

    return min((percent / 100 for percent in range(50, 78, 2)), key=off)


def tables() -> list[Table]:
    """Printed and predicted: whose layouts are printed, and in part."""
    return [_complete(), _in_part()]


def _complete() -> Table:
    rows = [
        (
            run.name,
            str(run.layout),
            f"{run.seconds:.2f}",
            f"{predicted(run):.2f}",
            f"{error(run):+.1%}",
        )
        for run in nemo()
    ]
    columns = ("training", "layout", "measured s", "predicted s", "error")
    title = "NVIDIA's trainings on H100 in fp8, not fitted: iterations"
    return Table("layout_fp8", title, columns, tuple(rows))


def _in_part() -> Table:
    rows = []
    for one in (*megatron(), *llama()):
        found = best(one, H100.matmul)
        rate, slow = teraflops(one, A100.matmul), teraflops(one, H100.matmul)
        rows.append(
            (
                one.name,
                str(found.layout),
                "yes" if found.fits else f"no ({found.peak_bytes / 1e9:.0f} GB)",
                f"{one.teraflops:.0f}",
                f"{rate:.0f}",
                f"{rate / one.teraflops - 1:+.1%}",
                f"{slow:.0f}",
                f"{slow / one.teraflops - 1:+.1%}",
            )
        )
    columns = (
        "training",
        "layout",
        "fits",
        "printed TFLOP/s per GPU",
        f"{A100.matmul:g} of the peak (A100's)",
        "error",
        f"{H100.matmul:g} (fitted to the GPTs)",
        "error",
    )
    title = "Published trainings on H100; what is not printed of a layout is the model's best"
    return Table("layout_h100", title, columns, tuple(rows))
