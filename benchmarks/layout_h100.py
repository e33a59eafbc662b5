"""Published trainings on H100 of 2024; of Megatron-LM's table rates are fitted, of Llama 3 none.

* GPT of 1.7B to 462B on 48 to 6,144 GPUs: Megatron-LM, ``images/model_table.png`` of 2024-07-15
  (f2e5db402c), sequences of 4,096, vocabulary 131,072 (README), exchanges overlapped; microbatch,
  chunks and recomputation are not printed.
* Llama 3 405B: glennklockwood.com/garden/llama-3.1 (from a talk of P. Balaji at SC'24): GPUs, t, c,
  p, tokens per batch, TFLOP/s; the shape of the models: aarnphm.xyz/thoughts/Llama-3. Chunks and
  sharding are not printed there; sequences are 8,192 or 131,072 tokens.

What is not printed is chosen as the model finds best among what fits in memory; if nothing does,
that is said.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.layout_runs import compiled, gpt, gpt_problem
from benchmarks.models import ARCHITECTURES
from benchmarks.report import Table
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.rates import rates_named
from stagewright.graphs.models.architecture import Architecture

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
CHOSEN = (
    (4, 1), (4, 1), (4, 1), (4, 1), (4, 14), (2, 23), (2, 16), (1, 12), (1, 7),
)  # fmt: skip
"""Microbatch and chunks that the model finds best for these, without recomputation."""

# GPUs, context ranks, tokens of a sequence, TFLOP/s per GPU as printed; t 8, p 16, 16M tokens.
_LLAMA = ((8192, 1, 8192, 430), (16384, 1, 8192, 400), (16384, 16, 131072, 380))
TOKENS = 16 * 2**20


LLAMA = ARCHITECTURES["llama3-405b"]


@dataclass(frozen=True, slots=True)
class Published:
    """A training and its TFLOP/s per GPU; ``layouts`` have what is printed and vary the rest."""

    name: str
    problem: TrainingProblem
    layouts: tuple[Layout, ...]
    teraflops: float

    @property
    def seconds(self) -> float:
        """Of an iteration: every token attends to the whole sequence in the printed FLOP/s."""
        problem = self.problem
        return problem.model_flops / (self.teraflops * 1e12 * problem.fabric.devices)


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


def _on_h100(of: Architecture, batch: int, gpus: int) -> TrainingProblem:
    problem = replace(gpt_problem(of, batch, gpus, "h100"), attention="fused", overlap=True)
    return replace(problem, rates=rates_named("megatron-h100-24.07"))


def best(of: Published) -> Estimate:
    """The fastest of the layouts that fit, or of all if none fits."""
    found = list(_estimates(of.problem, of.layouts))
    return min([one for one in found if one.fits] or found, key=lambda one: one.seconds)


def _estimates(problem: TrainingProblem, layouts: Iterable[Layout]) -> Iterator[Estimate]:
    for layout in layouts:
        try:
            yield evaluate(problem, layout, compiled)
        except InputError:  # the microbatches do not divide
            continue


def teraflops(of: Published) -> float:
    """TFLOP/s per GPU, as the model counts them; every token attends to the whole sequence."""
    return best(of).model_flops_per_second / of.problem.fabric.devices / 1e12


def tables() -> list[Table]:
    """Printed and predicted; the rest of the layouts is chosen."""
    rows = []
    for one in (*megatron(), *llama()):
        found, rate = best(one), teraflops(one)
        rows.append(
            (
                one.name,
                str(found.layout),
                f"{one.teraflops:.0f}",
                f"{rate:.0f}",
                f"{rate / one.teraflops - 1:+.1%}",
                "yes" if found.fits else f"no ({found.peak_bytes / 1e9:.0f} GB)",
            )
        )
    columns = ("training", "layout", "printed TFLOP/s per GPU", "predicted", "error", "fits")
    title = "Published trainings on H100 of 2024: the rest of the layouts is chosen"
    return [Table("layout_h100", title, columns, tuple(rows))]
