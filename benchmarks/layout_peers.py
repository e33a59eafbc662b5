"""Parallel layouts beside a public planner: Calculon's search on its own inputs.

``CALCULON`` is the folder of a checkout of github.com/calculon-ai/calculon (caa4b11). Calculon's
own search has all its options. The space that both know has p, t, d, microbatch, chunks,
recomputation, sequence parallelism and the sharded optimizer. There, of Calculon's options, nothing
is offloaded, tensor and data exchanges overlap with nothing, activations are fused, inputs are
gathered again with sequence parallelism, and without it a tensor rank sends its part of an output;
the networks of t, p and d are the best for the layout. Of ours, context and expert parallelism,
zero bubbles, ZeRO 2 and 3, partial recomputation, uneven ends and offloading are off, and exchanges
overlap with nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter

from rich.progress import track

from benchmarks.layout_calculon import (
    CHECKOUT,
    SYSTEM,
    Optimum,
    Peer,
    Searched,
    folder,
    read,
    searched,
    seconds,
    words,
)
from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import (
    TrainingProblem,
)
from stagewright.formulations.prices.computing import Precision
from stagewright.graphs.machines.fabric import Fabric, Level
from stagewright.graphs.machines.rates import RateSet, Reached, Spread
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.solvers.parallelism.refining import FoundLayouts, search
from stagewright.solvers.parallelism.space import Space
from stagewright.solvers.parallelism.tree import compiled_walk

LIMIT, CORES = 20.0, 2  # of Calculon's search
NO_LIMIT = 1e15  # bytes
TOP = 50  # layouts of ours that Calculon evaluates

STUDY = BenchSpec(
    "layout_peers",
    lambda case: Peer(*case),
    (
        ("megatron-22B", 8, 4),
        ("gpt3-175B", 64, 64),
        ("gpt3-175B", 1024, 1536),
        ("megatron-1T", 512, 512),
        ("megatron-1T", 3072, 3072),
    ),
    few=1,
)


def problem(of: Peer) -> TrainingProblem:
    """Calculon's inputs as ours.

    It has no embedding and no head; of products and memory traffic it takes the efficiency by
    their size. A product of 1 GFLOP reaches about 0.5 of its peak, larger ones up to 0.95.
    """
    app, system = of.application, read(SYSTEM)
    networks = system["networks"]
    rates = [1e9 * one["bandwidth"] * one["efficiency"] for one in networks]
    levels = [Level("server", min(of.gpus, networks[0]["size"]), rates[0], networks[0]["latency"])]
    if of.gpus > levels[0].devices:
        levels.append(Level("network", of.gpus, rates[1], networks[1]["latency"]))
    memory = system["mem1"]
    return TrainingProblem(
        Architecture(
            of.model,
            app.num_blocks,
            app.hidden,
            1,
            GroupedAttention(
                app.attn_heads, app.attn_heads, app.attn_size, bias=True, output_bias=True
            ),
            FeedForward(app.feedforward, gated=False, bias=True),
            norm="layer",
            tied=True,
            dropout=True,
        ),
        app.seq_size,
        of.batch,
        Fabric("a100-80gb", memory["GiB"] * 2**30, tuple(levels)),
        RateSet(
            "calculon",
            "calculon",
            ("a100-80gb",),
            "",
            f"Calculon's {SYSTEM}",
            "not fitted",
            Reached(
                matmul=system["matrix"]["float16"]["gflops_efficiency"][0][1],
                half_flops=1e9,
                memory=memory["MB_efficiency"][0][1],
                launch_seconds=0.0,
            ),
            *[Spread(1.0, 1.0)] * 3,
        ),
        precision=Precision(gradient_bytes=2),
        attention="materialized",
        overlap=False,
        overlap_tensor=False,
        reserve_bytes=0.0,
    )


def space(of: Peer) -> Space:
    """The space that both know, as ours."""
    return Space(
        context=(1,),
        expert=(1,),
        chunks=of.application.num_blocks,
        schedules=("1f1b",),
        partial=False,
        sequence_parallel="any",
        zero=(0, 1),
    )


def ranked(of: Peer, keep: int) -> FoundLayouts:
    """Our best layouts of the space, by our rules of memory."""
    return search(problem(of), space(of), keep=keep, accept=_has_equal_stages)


def ranked_as_fits(of: Peer, keep: int) -> FoundLayouts:
    """Our best layouts of the space, of those that fit by Calculon's rules of memory."""

    @cache
    def fits(layout: Layout) -> bool:
        return of.fits(layout)

    def accept(layout: Layout) -> bool:
        return _has_equal_stages(layout) and fits(replace(layout, placement="data-inside"))

    return search(problem(of), space(of), keep=keep, memory_bytes=NO_LIMIT, accept=accept)


def _has_equal_stages(layout: Layout) -> bool:
    return layout.first_blocks is None and layout.last_blocks is None


def distinct(found: FoundLayouts) -> list[Layout]:
    """The layouts without their placements, which Calculon chooses as networks."""
    return [*dict.fromkeys(replace(one.layout, placement="data-inside") for one in found.best)]


@dataclass(frozen=True)
class Scored:
    """Our first layouts by Calculon's evaluator: the best, its seconds, and how many fit."""

    layout: Layout
    iteration_seconds: float
    fitting: int


def scored(of: Peer, layouts: list[Layout]) -> Scored:
    """The best of them."""
    found = [(seconds(one), layout) for layout in layouts if (one := of.best(layout)) is not None]
    least, best = min(found, key=lambda one: one[0])
    return Scored(best, least, len(found))


@dataclass(frozen=True)
class Compared:
    """All that a case gives.

    ``rank`` is that of Calculon's optimum among our layouts that fit by its rules; ``spent`` is the
    time to find and evaluate the first ``TOP`` of them.
    """

    of: Peer
    theirs: Searched
    optimum: Optimum
    ours: FoundLayouts
    kept: Scored
    kept_as_fits: Scored
    rank: int | None
    spent: float


def compared(of: Peer) -> Compared:
    """A case, both ways."""
    started = perf_counter()
    as_fits = distinct(ranked_as_fits(of, 2 * TOP))[:TOP]
    kept_as_fits = scored(of, as_fits)
    spent = perf_counter() - started
    optimum, theirs = of.optimum(), searched(of, LIMIT, CORES)
    return Compared(
        of=of,
        theirs=theirs,
        optimum=optimum,
        ours=ranked(of, 1),
        kept=scored(of, distinct(ranked(of, 2 * TOP))[:TOP]),
        kept_as_fits=kept_as_fits,
        rank=as_fits.index(optimum.layout) + 1 if optimum.layout in as_fits else None,
        spent=spent,
    )


def tables(quick: bool) -> Iterator[Table]:
    """Times, layouts, and the parts of the times; none without the checkout."""
    if folder() is None:
        print(
            f"layout_peers: set {CHECKOUT} to a checkout of github.com/calculon-ai/calculon "
            "(caa4b11)"
        )
        return
    ranked(STUDY.build(STUDY.sweep[0]), 1)
    found = [compared(STUDY.build(case)) for case in track(STUDY.cases(quick), "cases")]
    yield _times(found)
    yield _layouts(found)
    yield _parts(found)


def _times(found: list[Compared]) -> Table:
    rows = []
    for one in found:
        theirs = one.theirs
        rows.append(
            (
                *_case(one),
                theirs.executions,
                theirs.done,
                one.optimum.layouts,
                one.optimum.seconds,
                one.ours.examined,
                one.ours.seconds,
                one.spent,
            )
        )
    columns = (
        "model",
        "GPUs",
        "batch",
        "executions of its search",
        f"done within {LIMIT:.0f} s",
        "layouts of both",
        "best by its evaluator, s",
        "evaluated by ours",
        "best by ours, proved, s",
        f"our {TOP} in its memory, by its evaluator, s",
    )
    title = f"Seconds of Calculon's search ({CORES} cores) and ours (1 core)"
    return Table("layout_peers_times", title, columns, tuple(rows))


def _layouts(found: list[Compared]) -> Table:
    rows = []
    for one in found:
        best, least = one.theirs.best, one.optimum.iteration_seconds
        rows.append(
            (
                *_case(one)[:2],
                "nothing that fits" if best is None else f"{best[0]:.4g}: {words(best[1])}",
                f"{one.of.batch / least:.4g}: {one.optimum.layout}",
                *_beside(one, one.kept_as_fits),
                one.rank,
                *_beside(one, one.kept),
                f"{one.kept.fitting} of {TOP}",
            )
        )
    columns = (
        "model",
        "GPUs",
        f"its search within {LIMIT:.0f} s, all options",
        "the best of both's space",
        f"the best of our {TOP} in its memory",
        "longer",
        "rank of the best in ours",
        f"the best of our {TOP} in our memory",
        "longer",
        "fit by it",
    )
    title = "Samples/s by Calculon's evaluator of layouts that either chooses"
    return Table("layout_peers", title, columns, tuple(rows))


def _beside(one: Compared, ours: Scored) -> tuple[str, str]:
    """Samples/s and the layout, and how much longer it takes than the best."""
    rate, least = one.of.batch / ours.iteration_seconds, one.optimum.iteration_seconds
    return f"{rate:.4g}: {ours.layout}", f"{ours.iteration_seconds / least - 1:+.2%}"


def _case(of: Compared) -> tuple[object, ...]:
    return of.of.model, of.of.gpus, of.of.batch


def _estimate(one: Compared) -> Estimate:
    """The best of Calculon's evaluator by ours, in its better placement."""
    asked, layout = problem(one.of), one.optimum.layout
    placed = [replace(layout, placement=place) for place in ("data-inside", "pipeline-inside")]
    return min(
        (evaluate(asked, each, compiled_walk()) for each in placed), key=lambda one: one.seconds
    )


def _parts(found: list[Compared]) -> Table:
    """The best by Calculon's evaluator, in both models."""
    rows: list[tuple[object, ...]] = []
    for one in found:
        theirs = one.of.best(one.optimum.layout)
        assert theirs is not None
        name = (f"{one.of.model}, {one.of.gpus}", str(one.optimum.layout))
        rows.append((*name, "Calculon", *map(_number, _its_parts(theirs))))
        rows.append((*name, "ours", *map(_number, _our_parts(_estimate(one)))))
    columns = (
        "case",
        "layout",
        "model",
        "products and the like",
        "repeated",
        "tensor",
        "pipeline",
        "data",
        "update",
        "iteration",
        "weights and optimizer GiB",
        "gradients",
        "activations",
        "all",
    )
    title = "Seconds of an iteration by part, and memory, in both models"
    return Table("layout_peers_parts", title, columns, tuple(rows))


def _number(value: float) -> str:
    return f"{value:.3g}"


def _its_parts(of: object) -> tuple[float, ...]:
    def get(name: str) -> float:
        return float(getattr(of, f"get_{name}")())

    memory = (
        get("weight_space") + get("optimizer_space"),
        get("weight_grad_space"),
        get("act_space") + get("act_checkpoint_size") + get("act_grad_space"),
    )
    return (
        get("fw_time") + get("bw_time"),
        get("recompute_time") + get("recomm_exposed_time"),
        get("tp_comm_exposed_time"),
        get("bubble_time") + get("pp_comm_exposed_time"),
        get("dp_comm_exposed_time"),
        get("optim_step_time"),
        get("total_time"),
        *(one / 2**30 for one in memory),
        sum(memory) / 2**30,
    )


def _our_parts(of: Estimate) -> tuple[float, ...]:
    most = max(of.memory, key=lambda one: one.total)
    memory = (most.weights + most.optimizer, most.gradients, most.activations + most.buffers)
    return (
        of.compute_seconds,
        of.repeated_seconds,
        of.exchange_seconds,
        of.bubble_seconds,
        of.gradient_seconds,
        of.update_seconds,
        of.seconds,
        *(one / 2**30 for one in memory),
        sum(memory) / 2**30,
    )
