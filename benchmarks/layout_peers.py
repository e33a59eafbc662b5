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
from benchmarks.layout_calculon_all import Best, best_of_all
from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import Precision, TrainingProblem
from stagewright.graphs.machines.fabric import Fabric, Level
from stagewright.graphs.machines.rates import Reached
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.solvers.parallelism.search import Found, search
from stagewright.solvers.parallelism.space import Space
from stagewright.solvers.parallelism.tree import compiled_walk

LIMIT, CORES = 45.0, 2  # of Calculon's search
TOP, MOST = 50, 2000  # layouts of ours that Calculon evaluates, and that its optimum is sought in

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
SMALL = 10**6  # executions of a search whose whole space is closed too


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
        Reached(
            matmul=system["matrix"]["float16"]["gflops_efficiency"][0][1],
            half_flops=1e9,
            memory=memory["MB_efficiency"][0][1],
            launch_seconds=0.0,
            source=f"Calculon's {SYSTEM}",
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


def ranked(of: Peer, keep: int, *, memory_bytes: float | None = None) -> Found:
    """Our best layouts of the space."""
    return search(
        problem(of), space(of), keep=keep, memory_bytes=memory_bytes, accept=_has_equal_stages
    )


def _has_equal_stages(layout: Layout) -> bool:
    return layout.first_blocks is None and layout.last_blocks is None


def distinct(found: Found) -> list[Layout]:
    """The layouts without their placements, which Calculon chooses as networks."""
    return [*dict.fromkeys(replace(one.layout, placement="data-inside") for one in found.best)]


@dataclass(frozen=True)
class Compared:
    """All that a case gives; ``peers`` is ours by Calculon's evaluator."""

    of: Peer
    theirs: Searched
    ours: Found
    optimum: Optimum
    best_of_ours: Layout
    best_seconds: float
    fitting: int
    evaluating_seconds: float
    rank: int | None
    unlimited_rank: int | None
    whole: Best | None


def compared(of: Peer) -> Compared:
    """A case, both ways."""
    ours = ranked(of, 1)
    kept = distinct(ranked(of, 2 * TOP))[:TOP]
    started = perf_counter()
    scored = [(seconds(one), layout) for layout in kept if (one := of.best(layout)) is not None]
    spent = perf_counter() - started
    best, layout = min(scored, key=lambda one: one[0])
    optimum, theirs = of.optimum(), searched(of, LIMIT, CORES)
    return Compared(
        of=of,
        theirs=theirs,
        ours=ours,
        optimum=optimum,
        best_of_ours=layout,
        best_seconds=best,
        fitting=len(scored),
        evaluating_seconds=spent,
        rank=_rank(optimum.layout, distinct(ranked(of, MOST))),
        unlimited_rank=_rank(optimum.layout, distinct(ranked(of, MOST, memory_bytes=1e15))),
        whole=best_of_all(of) if theirs.executions <= SMALL else None,
    )


def _rank(layout: Layout, among: list[Layout]) -> int | None:
    return among.index(layout) + 1 if layout in among else None


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
    yield _whole(found)
    yield _parts(found)


def _times(found: list[Compared]) -> Table:
    rows = []
    for one in found:
        theirs = one.theirs
        whole = theirs.seconds * theirs.executions / theirs.done if theirs.done else None
        rows.append(
            (
                *_case(one),
                theirs.executions,
                theirs.done,
                None if whole is None else f"{whole / 3600:.2g}",
                one.optimum.layouts,
                one.optimum.seconds,
                one.ours.examined,
                one.ours.seconds,
                one.evaluating_seconds,
            )
        )
    columns = (
        "model",
        "GPUs",
        "batch",
        "executions of its search",
        f"within {LIMIT:.0f} s",
        "hours for all at that rate",
        "layouts of both",
        "best by its evaluator, s",
        "evaluated by ours",
        "best by ours, proved, s",
        f"our {TOP} by its evaluator, s",
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
                f"{one.of.batch / one.best_seconds:.4g}: {one.best_of_ours}",
                f"{one.best_seconds / least - 1:+.2%}",
                _shown_rank(one.rank),
                _shown_rank(one.unlimited_rank),
                f"{one.fitting} of {TOP}",
                f"{_of_ours(one) / one.ours.best[0].seconds - 1:+.2%}",
                str(one.ours.best[0].layout),
            )
        )
    columns = (
        "model",
        "GPUs",
        f"its search within {LIMIT:.0f} s, all options",
        "the best of both's space",
        f"the best of our {TOP}",
        "longer than the best",
        "the best among ours",
        "without our memory limit",
        "fit by it",
        "the best by our model, longer than ours",
        "ours",
    )
    title = "Samples/s by Calculon's evaluator of layouts that either chooses"
    return Table("layout_peers", title, columns, tuple(rows))


def _whole(found: list[Compared]) -> Table:
    rows = [
        (
            *_case(one)[:2],
            f"{best.samples_per_second:.4g}: {words(best.execution)}",
            one.theirs.executions,
            best.evaluated,
            best.seconds,
        )
        for one in found
        if (best := one.whole) is not None
    ]
    columns = ("model", "GPUs", "samples/s", "executions", "evaluated", "s")
    title = "The best of all options by Calculon's evaluator, proved by bounds"
    return Table("layout_peers_whole", title, columns, tuple(rows))


def _shown_rank(rank: int | None) -> str:
    return f"not in the first {MOST}" if rank is None else f"{rank}."


def _case(of: Compared) -> tuple[object, ...]:
    return of.of.model, of.of.gpus, of.of.batch


def _estimate(one: Compared) -> Estimate:
    """The best of Calculon's evaluator by ours, in its better placement."""
    asked, layout = problem(one.of), one.optimum.layout
    placed = [replace(layout, placement=place) for place in ("data-inside", "pipeline-inside")]
    return min(
        (evaluate(asked, each, compiled_walk()) for each in placed), key=lambda one: one.seconds
    )


def _of_ours(one: Compared) -> float:
    return _estimate(one).seconds


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
