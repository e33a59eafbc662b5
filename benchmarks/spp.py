"""SPP section V (INFOCOM 2022): table III and the sweeps of figures 6-11, on analytic profiles.

The profiles are computed, not measured, so seconds cannot be the printed ones: what is held
against the paper are speed-ups, (baseline - SPP) / SPP, and trends. Links have no latency, as in
the paper's model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.models import paper_model
from benchmarks.report import Table, percent
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bppm import BalancedPartition, makespan_problem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.machines.cluster import Cluster, Device, Link, from_matrix, uniform_servers
from stagewright.graphs.machines.devices import accelerator
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.pipelines.list_scheduling import best_list_schedule, list_schedule
from stagewright.solvers.pipelines.partition.passes import PartitionSearch
from stagewright.solvers.planning import Result, plan

BASELINES = ("dp", "gpipe", "pipedream", "hetpipe")
GBPS = 1e9 / 8
SEED = 2022

Results = Mapping[str, Result]


# --- Table III -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workload:
    """A row of table II: microbatches, and samples in one on each testbed."""

    model: str
    microbatches: int
    samples: Mapping[str, int]


TESTBEDS: dict[str, tuple[int, int]] = {"1080ti": (4, 2), "v100": (1, 4)}  # servers x GPUs
WORKLOADS = tuple(
    Workload(model, microbatches, {"1080ti": on_1080ti, "v100": on_v100})
    for model, microbatches, on_1080ti, on_v100 in (
        ("vgg19", 8, 32, 32),
        ("resnet152", 4, 4, 4),
        ("inception-v3", 8, 32, 32),
        ("transformer", 8, 32, 32),
        ("bert-large", 4, 4, 4),
        ("xlnet-large", 4, 4, 4),
        ("bert-48", 4, 4, 2),
    )
)
# Printed seconds: SPP, DP, GPipe, PipeDream, HetPipe; None for out of memory or not run.
PRINTED: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("vgg19", "1080ti"): (1.799, 2.882, 2.120, 1.949, 2.696),
    ("vgg19", "v100"): (0.983, 1.245, 1.004, 1.024, None),
    ("resnet152", "1080ti"): (0.732, 0.896, 1.214, None, 0.843),
    ("resnet152", "v100"): (0.832, 1.209, 1.041, 0.873, None),
    ("inception-v3", "1080ti"): (0.303, 0.420, 0.551, 0.656, 0.408),
    ("inception-v3", "v100"): (0.357, 0.663, 0.587, 0.919, None),
    ("transformer", "1080ti"): (0.640, 0.944, 1.234, 1.118, 0.766),
    ("transformer", "v100"): (1.065, 2.533, 1.487, 1.830, None),
    ("bert-large", "1080ti"): (0.409, 0.524, 0.472, 0.421, 0.525),
    ("bert-large", "v100"): (0.952, 2.269, 1.665, 1.084, None),
    ("xlnet-large", "1080ti"): (1.299, 1.388, 1.696, 1.384, 1.628),
    ("xlnet-large", "v100"): (1.437, 1.842, 1.720, 1.690, None),
    ("bert-48", "1080ti"): (0.762, None, 1.885, 1.266, 1.377),
    ("bert-48", "v100"): (0.855, 1.656, 1.199, 1.160, None),
}


def testbed(kind: str) -> Cluster:
    """Section V-A: 4 servers x 2 GTX 1080Ti at 50 Gbps, or one server of 4 V100 on PCIe."""
    servers, gpus = TESTBEDS[kind]
    return uniform_servers(
        servers,
        gpus,
        Link(16e9),  # 128 Gbps
        Link(6.25e9) if servers > 1 else None,
        kind=kind,
        memory_bytes=accelerator(kind).memory_bytes,
        name=f"{kind} x {servers * gpus}",
    )


def table3_problem(case: tuple[str, str]) -> PipelineProblem:
    """The problem of a model and a testbed."""
    model, kind = case
    workload = next(workload for workload in WORKLOADS if workload.model == model)
    chain = paper_model(model, workload.samples[kind], kind)
    return PipelineProblem(chain, testbed(kind), workload.microbatches)


def compare(problem: PipelineProblem, seconds: float = 30.0) -> dict[str, Result]:
    """SPP and its baselines on one problem."""
    return {name: plan(problem, name, Limits(seconds)) for name in ("spp", *BASELINES)}


def speedup(results: Results, baseline: str) -> float | None:
    """(baseline - SPP) / SPP."""
    ours, theirs = results["spp"].cost, results[baseline].cost
    return None if ours is None or theirs is None else theirs / ours - 1


def slower_than(results: Results) -> list[str]:
    """Baselines that beat SPP."""
    return [name for name in BASELINES if (speedup(results, name) or 0.0) < -1e-9]


def table3(cases: Sequence[tuple[str, str]], exact_seconds: float) -> list[Table]:
    """Speed-ups beside the printed ones, certified gaps, and the gap to the joint optimum."""
    rows, gaps = [], []
    for case in cases:
        problem = table3_problem(case)
        results = compare(problem)
        rows.append(_table3_row(case, results))
        gaps.append(_gap_row(case, problem, results["spp"], exact_seconds))
    shown = [f"{name}: ours (printed)" for name in ("SPP s", "DP", "GPipe", "PipeDream", "HetPipe")]
    return [
        Table(
            "spp-table3",
            "Table III: seconds per iteration, and speed-up of SPP over each baseline",
            ("model", "testbed", *shown, "SPP slower than"),
            tuple(rows),
        ),
        Table(
            "spp-gaps",
            "How far SPP is from the best plan there is",
            ("model", "testbed", "layers", "SPP s", "SPP's certified gap", "exact s",
             "exact's bound s", "true gap of SPP", "auto s", "exact: wall s"),
            tuple(gaps),
        ),
    ]  # fmt: skip


def _table3_row(case: tuple[str, str], results: Results) -> tuple[object, ...]:
    model, kind = case
    printed_spp, *printed = PRINTED[case]
    cells = [f"{results['spp'].cost:.4g} ({printed_spp})"]
    for name, seconds in zip(BASELINES, printed, strict=True):
        ours = speedup(results, name)
        theirs = None if seconds is None or printed_spp is None else seconds / printed_spp - 1
        cells.append(f"{_or_no_plan(ours)} ({percent(theirs) or '-'})")
    return (model, testbed(kind).name, *cells, ", ".join(slower_than(results)) or "none")


def _or_no_plan(value: float | None) -> str:
    return "no plan" if value is None else percent(value)


def _gap_row(
    case: tuple[str, str], problem: PipelineProblem, spp: Result, seconds: float
) -> tuple[object, ...]:
    """The true gap (SPP - optimum) / SPP, bracketed where the optimum was not proved in time."""
    exact = plan(problem, "exact", Limits(seconds))
    auto = plan(problem, "auto", Limits(seconds))
    assert spp.cost is not None
    bound = exact.bound or 0.0
    most = max(0.0, 1 - bound / spp.cost)
    if exact.status.value == "optimal":
        gap = percent(most)
    else:
        least = max(0.0, 1 - exact.cost / spp.cost) if exact.cost else 0.0
        gap = f"between {percent(least)} and {percent(most)}"
    return (
        case[0], problem.cluster.name, len(problem.chain), spp.cost, percent(spp.gap), exact.cost,
        bound, gap, auto.cost, f"{exact.seconds:.1f}",
    )  # fmt: skip


# --- Section V-B: sweeps on a simulated cluster --------------------------------------------------


def simulated_cluster(
    servers: Sequence[int] = (4,) * 8, inter_gbps: tuple[float, float] = (32, 40)
) -> Cluster:
    """Servers of so many V100; 3 in 8 have PCIe (96-128 Gbps), the others NVLink (160-200 Gbps).

    Bandwidths are drawn once per server and once per pair of servers.
    """
    draw = np.random.default_rng(SEED)
    pcie = round(len(servers) * 3 / 8)
    intra = [
        draw.uniform(*((96, 128) if s < pcie else (160, 200))) * GBPS for s in range(len(servers))
    ]
    between = np.triu(draw.uniform(0, 1, (len(servers), len(servers))), 1)
    low, high = inter_gbps
    between = (low + (between + between.T) * (high - low)) * GBPS
    np.fill_diagonal(between, intra)
    home = np.repeat(np.arange(len(servers)), servers)
    names = [[f"s{s}g{g}" for g in range(count)] for s, count in enumerate(servers)]
    return from_matrix(
        [
            Device(name, "v100", accelerator("v100").memory_bytes)
            for row in names
            for name in row
        ],
        between[np.ix_(home, home)],
        servers=names,
        name="simulated",
    )  # fmt: skip


def scaled_activations(chain: Chain, factor: float) -> Chain:
    """``chain`` with its activations between layers scaled by ``factor``."""
    layers = tuple(
        replace(
            layer,
            costs=tuple(
                replace(cost, output_bytes=factor * cost.output_bytes) for cost in layer.costs
            ),
        )
        for layer in chain.layers
    )
    return replace(chain, name=f"{chain.name} x{factor:g}", layers=layers)


def servers_label(servers: Sequence[int]) -> str:
    """As in figure 8: ``8x4``, or ``6x2 3x4 1x8``."""
    return " ".join(f"{servers.count(size)}x{size}" for size in sorted(set(servers)))


def bert(
    model: str = "bert-large",
    microbatches: int = 32,
    activations: float = 1.0,
    inter_gbps: tuple[float, float] = (32, 40),
    servers: Sequence[int] = (4,) * 8,
) -> PipelineProblem:
    """Section V-B's default, BERT-large in 32 microbatches of 6, but for what a sweep changes."""
    chain = scaled_activations(paper_model(model, 6), activations)
    return PipelineProblem(chain, simulated_cluster(servers, inter_gbps), microbatches)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A figure: its axis, and the problem at each point by its label."""

    figure: int
    axis: str
    build: Callable[..., PipelineProblem]
    points: Mapping[str, Mapping[str, object]]

    def problem(self, point: str) -> PipelineProblem:
        """The problem at a point."""
        return self.build(**self.points[point])


SWEEPS = (
    Sweep(6, "microbatches", bert, {str(m): {"microbatches": m} for m in (8, 16, 32, 64)}),
    Sweep(
        7,
        "Gbps between servers",
        bert,
        {
            f"{low}-{high}": {"inter_gbps": (low, high)}
            for low, high in ((8, 10), (16, 20), (32, 40))
        },
    ),
    Sweep(
        8,
        "servers x GPUs",
        bert,
        {
            servers_label(servers): {"servers": servers}
            for servers in ((2,) * 16, (4,) * 8, (8,) * 4, (2,) * 6 + (4,) * 3 + (8,))
        },
    ),
    Sweep(9, "model", bert, {m: {"model": m} for m in ("bert-large", "bert-48", "bert-72")}),
    Sweep(10, "activation scale", bert, {f"{f:g}": {"activations": f} for f in (0.5, 1, 2, 4, 8)}),
)


@dataclass(frozen=True, slots=True)
class ByStages:
    """Figure 11 at one number of stages: W of PRM, PE's makespan, the best list schedule's."""

    stages: int
    bottleneck_seconds: float
    pe_seconds: float
    seconds: float


def by_stages(problem: PipelineProblem) -> tuple[ByStages, ...]:
    """Partition, by W, and schedule for every number of stages."""
    rows = []
    order = recursive_device_order(problem.cluster)
    search = PartitionSearch(BalancedPartition(problem, tuple(order)))
    for count in sorted(search.bound):
        solved = search.solve(count)
        if solved is None:
            continue
        bottleneck, stages = solved.bottleneck_seconds, solved.stages
        scheduling = makespan_problem(problem, stages)
        if scheduling is None:
            continue
        pe = list_schedule(scheduling, "pe")
        assert pe is not None  # PE keeps every limit
        times = best_list_schedule(scheduling)[1]
        rows.append(
            ByStages(count, bottleneck, pe.makespan(scheduling), times.makespan(scheduling))
        )
    return tuple(rows)


def sweeps_table(figures: Mapping[int, Mapping[str, Results]]) -> Table:
    """Seconds of every planner at every point, and SPP's certified gap."""
    rows = tuple(
        (
            *(sweep.figure, sweep.axis, point),
            *(results[name].cost for name in ("spp", *BASELINES)),
            percent(results["spp"].gap),
            ", ".join(slower_than(results)) or "none",
        )
        for sweep in SWEEPS
        for point, results in figures[sweep.figure].items()
    )
    columns = ("figure", "axis", "at", "SPP", "DP", "GPipe", "PipeDream", "HetPipe",
               "SPP's certified gap", "SPP slower than")  # fmt: skip
    return Table("spp-sweeps", "Figures 6 to 10: seconds per iteration", columns, rows)


def stages_table(rows: Sequence[ByStages]) -> Table:
    """Figure 11 as a table."""
    return Table(
        "spp-figure11",
        "Figure 11: bottleneck and seconds per iteration by number of stages",
        ("stages", "W of PRM s", "PE s", "best list schedule s"),
        tuple((row.stages, row.bottleneck_seconds, row.pe_seconds, row.seconds) for row in rows),
    )


# --- Which printed trends are given back ---------------------------------------------------------


def trends(
    figures: Mapping[int, Mapping[str, Results]], stages: Sequence[ByStages]
) -> tuple[tuple[object, ...], ...]:
    """(figure, what the paper says, what comes out, given back or not)."""
    everywhere = [r for outcomes in figures.values() for r in outcomes.values()]
    lost = sum(bool(slower_than(results)) for results in everywhere)
    gaps = [results["spp"].gap or 0.0 for results in figures[6].values()]
    over_pipedream = [speedup(results, "pipedream") or 0.0 for results in figures[9].values()]
    spread = {
        (figure, name): _spread(figures[figure], name)
        for figure in (7, 10)
        for name in ("spp", *BASELINES)
    }
    return (
        ("6-10", "SPP is the fastest at every point",
         f"slower than a baseline at {lost} of {len(everywhere)} points", lost == 0),
        (6, "the gap shrinks as M grows",
         "certified gap " + ", ".join(percent(gap) for gap in gaps), gaps == sorted(gaps)[::-1]),
        *_bandwidth_trends(spread),
        (9, "SPP is more than 20 % ahead of PipeDream on all three",
         "ahead by " + ", ".join(percent(ahead) for ahead in over_pipedream),
         min(over_pipedream) > 0.2),
        (10, "SPP hardly changes with the activations' size",
         f"slowest / fastest {spread[10, 'spp']:.2f}", spread[10, "spp"] < STEADY),
        (10, "GPipe suffers more, as it has more stages",
         f"slowest / fastest {spread[10, 'gpipe']:.2f}",
         spread[10, "gpipe"] > spread[10, "spp"]),
        *_stage_trends(stages),
    )  # fmt: skip


def trends_table(rows: tuple[tuple[object, ...], ...]) -> Table:
    """The printed trends, and whether they come out."""
    shown = tuple((*row[:3], "yes" if row[3] else "**no**") for row in rows)
    return Table(
        "spp-trends",
        "What the paper reports, and what comes out here",
        ("figure", "printed", "here", "given back"),
        shown,
    )


STEADY = 1.15  # slowest over fastest point of what the paper calls stable


def _spread(outcomes: Mapping[str, Results], name: str) -> float:
    seconds = [results[name].cost or np.inf for results in outcomes.values()]
    return float(max(seconds) / min(seconds))


def _bandwidth_trends(spread: Mapping[tuple[int, str], float]) -> tuple[tuple[object, ...], ...]:
    steady = [(7, name, True) for name in ("spp", "gpipe", "pipedream")]
    falling = [(7, name, False) for name in ("dp", "hetpipe")]
    return tuple(
        (
            figure,
            f"{name} is {'stable' if stable else 'much slower'} at low bandwidth",
            f"slowest / fastest {spread[figure, name]:.2f}",
            (spread[figure, name] < STEADY) == stable,
        )
        for figure, name, stable in steady + falling
    )


def _stage_trends(rows: Sequence[ByStages]) -> tuple[tuple[object, ...], ...]:
    bottlenecks = {row.stages: row.bottleneck_seconds for row in rows}
    best = min(rows, key=lambda row: row.pe_seconds)
    least = min(bottlenecks, key=lambda count: bottlenecks[count])
    # Stages of more devices than a microbatch has samples are not possible.
    steady = max(4, min(bottlenecks))
    ratio = bottlenecks[steady] / min(bottlenecks.values())
    return (
        (11, "W falls and is about stable from 4 stages on",
         f"W at {steady} stages is {ratio:.2f} times the least, which is at {least}",
         ratio < STEADY),
        (11, "the time falls, then rises; 6 stages are best",
         f"best at {best.stages} stages, W smallest at {least}", best.stages == 6),
        (11, "the least W is not the best plan",
         f"PE at {least} stages is {bottleneck_penalty(rows, least):.2f} times the best",
         bottleneck_penalty(rows, least) > 1),
    )  # fmt: skip


def bottleneck_penalty(rows: Sequence[ByStages], count: int) -> float:
    """PE's makespan at ``count`` stages over its best."""
    times = {row.stages: row.pe_seconds for row in rows}
    return times[count] / min(times.values())


def tables(quick: bool) -> list[Table]:
    """Table III, the sweeps, and the trends; the two smallest cases if ``quick``."""
    if quick:
        return table3(list(PRINTED)[:2], 1.0)
    figures = {
        sweep.figure: {point: compare(sweep.problem(point)) for point in sweep.points}
        for sweep in SWEEPS
    }
    stages = by_stages(bert())
    return [
        *table3(list(PRINTED), 30.0),
        sweeps_table(figures),
        stages_table(stages),
        trends_table(trends(figures, stages)),
    ]
