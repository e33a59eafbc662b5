"""DeepSeek-V3's own training, to which no rate is fitted.

It was trained on 2,048 H800; the nearest layout that our model states is compared.

* [R] DeepSeek-V3 technical report (arXiv 2412.19437): 671B parameters, 37B active (abstract); 180K
  GPU hours for 10^12 tokens (section 1); 2,048 H800 in servers of 8 (3.1); p = 16, e = 64 over 8
  servers, ZeRO-1, no tensor parallelism (3.2); DualPipe, which hides the exchange of the experts
  (3.2.1); every token goes to 4 servers at most, once to each (3.2.2); norms and the projections
  from latent vectors are recomputed (3.2.3); products in fp8 but for attention, embedding and head;
  tokens go to the experts in fp8 (3.3); sequences of 4,096, batch 15,360 (4.2).
* [I] "Insights into DeepSeek-V3" (arXiv 2505.09343): NVLink of 200 GB/s, of which 160 are reached,
  a card of 400 Gb/s for each GPU (4.1, 4.3), and the step's parts (table 4, MPFT).

The microbatch is not printed; 1 is the model's best. What the model cannot state: fp8 on the way to
the experts, the 20 of 132 multiprocessors that send, and the module that predicts a second token.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.layout_runs import compiled
from benchmarks.models import V3
from benchmarks.report import Table
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.training import (
    TrainingProblem,
    with_stack,
)
from stagewright.formulations.prices.computing import Precision
from stagewright.graphs.machines.fabric import Fabric
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import rates_of
from stagewright.graphs.machines.stack_memory import STACK_MEMORY
from stagewright.solvers.parallelism.refining import search
from stagewright.solvers.parallelism.space import Space

GPUS, BATCH, SEQUENCE = 2048, 15360, 4096

# As printed in [I], table 4, MPFT.
SECONDS, TOKENS_PER_DAY = 19.926, 272.80e9
TERAFLOPS = 432  # with the whole matrix of scores
PARTS = {"1F": 1.13, "1B": 1.99, "1W": 0.48, "1F1B": 13.95, "bubble": 2.06, "optimizer": 0.29}

# 61 blocks in 16 stages: 4 each, 2 in the first and 3 in the last.
_PRINTED = "p16 t1 d128 e64 b1 first2 last3 zero1"
LAYOUTS = tuple(
    parse_layout(f"{_PRINTED}{more}")
    for more in ("", " zero-bubble", " full zero-bubble", " dualpipe")
)
AS_PRINTED = parse_layout(f"{_PRINTED} moe_act+layernorm dualpipe")
"""With what is recomputed in [R] 3.2.3, and with fused operators as Megatron Core has them."""
_NO_TIME = 1e18  # bytes/s


def problem(*, fp8: bool = True, free: bool = False) -> TrainingProblem:
    """The training, with all products in fp8 or in bf16; if ``free`` nothing takes time to send."""
    fabric = fabric_of_kind("h800", GPUS)
    if free:
        levels = (
            replace(one, bytes_per_second=_NO_TIME, latency_seconds=0.0) for one in fabric.levels
        )
        fabric = Fabric(fabric.device, fabric.memory_bytes, tuple(levels))
    rates = rates_of("h800")
    return TrainingProblem(V3, SEQUENCE, BATCH, fabric, rates, Precision(fp8_products=fp8))


def predicted(layout: Layout, *, fp8: bool = True, free: bool = False) -> Estimate:
    """What our model predicts."""
    of = problem(fp8=fp8, free=free)
    if layout == AS_PRINTED:
        of = with_stack(of, STACK_MEMORY["megatron"])
    return evaluate(of, layout, compiled)


def tables() -> Iterator[Table]:
    """DeepSeek-V3's layout, and what the search finds for its machine."""
    yield deepseek()


def deepseek() -> Table:
    """The printed layout, dissected, and the best ones of the search."""
    rows = [
        _row("printed layout", predicted(layout, fp8=fp8, free=free), fp8=fp8, free=free)
        for fp8, free in ((True, False), (True, True), (False, True))
        for layout in (*LAYOUTS, AS_PRINTED)
    ]
    rows += [
        _row("train-plan's best", _best(space), fp8=True, free=False)
        for space in (Space(), Space(pipeline=(16,), expert=(64,)), Space(schedules=("dualpipe",)))
    ]
    columns = (
        "",
        "layout",
        "products",
        "sending",
        "s",
        f"over {SECONDS} s",
        "TFLOP/s per GPU",
        "computation",
        "experts",
        "repeated",
        "bubble",
        "fits",
    )
    title = (
        f"DeepSeek-V3 on 2,048 H800, printed {SECONDS} s and {TERAFLOPS} TFLOP/s per GPU: predicted"
    )
    return Table("layout_deepseek", title, columns, tuple(rows))


def _best(space: Space) -> Estimate:
    found = search(problem(), space, keep=1)
    assert found.proved
    return found.best[0]


def _row(what: str, found: Estimate, *, fp8: bool, free: bool) -> tuple[str, ...]:
    return (
        what,
        str(found.layout),
        "fp8" if fp8 else "bf16",
        "free" if free else "as it is",
        f"{found.seconds:.2f}",
        f"{found.seconds / SECONDS - 1:+.1%}",
        f"{found.model_flops_per_second / GPUS / 1e12:.0f}",
        *(
            f"{value:.2f}"
            for value in (
                found.compute_seconds,
                found.exchange_seconds,
                found.repeated_seconds,
                found.bubble_seconds,
            )
        ),
        "yes" if found.fits else f"no ({found.peak_bytes / 1e9:.0f} GB)",
    )
