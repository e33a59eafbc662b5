"""What blocks and recomputed blocks of every stage gain where memory is small.

``python -m benchmarks.layout_stages`` prints the table of ``docs/layouts.md``: Llama 3 70B and GPT
of 175B with ZeRO 0 or 1, in all of the space, among plain 1F1B pipelines without context
parallelism, and at fixed degrees, which is where AdaPipe (ASPLOS 2024) divides blocks and chooses
recomputation by stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.layout_runs import gpt
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import REACHED
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.solvers.parallelism.refining import Refinement, refine
from stagewright.solvers.parallelism.search import Found, search
from stagewright.solvers.parallelism.space import Space

LLAMA = Architecture(
    "Llama 3 70B", 80, 8192, 128256, GroupedAttention(64, 8, 128), FeedForward(28672)
)
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


@dataclass(frozen=True, slots=True)
class Gain:
    """A case in a space: all or no blocks recomputed, the search, and its refinement."""

    case: str
    space: str
    whole: Found
    found: Found
    refined: Refinement

    def __str__(self) -> str:
        alike = self.found.best[0]
        best = self.refined.best[0].estimate if self.refined.best else alike
        gain = 1 - best.seconds / alike.seconds
        divided = f"{best.seconds:.2f} | `{best.layout}` | {gain:.1%}" if gain > 0 else "- | | 0"
        whole = f"{self.whole.best[0].seconds:.2f}" if self.whole.best else "does not fit"
        now = f"{alike.seconds:.2f} | `{alike.layout}`"
        bound = f"{self.refined.plain_bound:.2f}"
        return " | ".join((self.case, self.space, whole, now, divided, bound))


def gains() -> Iterator[Gain]:
    """All cases in their spaces."""
    for model, sequence, kind, gigabytes, devices, batch, names in CASES:
        fabric = replace(fabric_of_kind(kind, devices), memory_bytes=gigabytes * 1e9)
        problem = TrainingProblem(model, sequence, batch, fabric, REACHED[kind])
        case = f"{model.name}, {sequence:,} | {devices} {kind} {gigabytes} GB, {batch}"
        for name in names:
            space = SPACES[name]
            found = search(problem, space)
            whole = search(problem, replace(space, partial=False), keep=1)
            yield Gain(case, name, whole, found, refine(problem, space, found))


if __name__ == "__main__":
    for gain in gains():
        print(f"| {gain} |", flush=True)
