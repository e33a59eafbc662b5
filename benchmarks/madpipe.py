"""MadPipe section 5: MadPipe and PipeDream on large images, by memory, devices and bandwidth.

The networks' times are computed, not measured, so seconds cannot be the printed ones: what is held
against the paper are ratios of periods, and speed-ups. Memory is counted as in the paper's
section 3: every layer keeps its input, and there is no optimizer state.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from math import inf, isfinite, nan
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.progress import track

from benchmarks.models import paper_model
from benchmarks.report import FIGURES, Table, percent
from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.patterns.one_f_one_b import least_period
from stagewright.formulations.patterns.pattern_problems import pattern_problem, static_bytes
from stagewright.formulations.plans.assembly import assemble_pattern
from stagewright.formulations.plans.memory import kept_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.planners.periodic.madpipe import plan_madpipe
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan, class_of_proposal
from stagewright.solvers.planners.steps.warm_up import compile_kernels

NETWORKS = {
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "inception-v3": "Inception-v3",
    "densenet121": "DenseNet-121",
}
IMAGE, BATCH = 1000, 8
DEVICES = tuple(range(2, 9))
GIGABYTES = tuple(range(3, 17))
BANDWIDTHS = (12e9, 24e9)
ROOMY_GIGABYTES = 10  # "over 20 % when the available memory is below 10 GB"
SPEEDUP_GIGABYTES = (4, 8, 12, 16)

MICROBATCHES = 32  # in an iteration; more than are ever in flight
LIMITS = Limits(seconds=5.0)  # for all of MadPipe; the paper gives its second step a minute
PROCESSES = 2
SAME = 1e-6  # relative; periods that differ by less are equal


# --- The cases -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A network on so many devices, with memory in GB and a bandwidth in bytes/s."""

    network: str
    devices: int
    gigabytes: int
    bandwidth: float


SWEEP = tuple(
    Case(network, devices, gigabytes, bandwidth)
    for network, bandwidth, devices, gigabytes in product(NETWORKS, BANDWIDTHS, DEVICES, GIGABYTES)
)
QUICK = tuple(
    Case(network, devices, gigabytes, 12e9)
    for network, devices, gigabytes in product(("resnet50", "inception-v3"), (2, 4), (4, 8, 16))
)


def keeps_inputs(chain: Chain, input_bytes: float) -> Chain:
    """The chain in which a layer keeps its input alone, and an update needs no state.

    MadPipe section 4.2.1: the sum of 3 W_i + g a_(i-1), with a_0 = ``input_bytes``.
    """
    layers = []
    before = [input_bytes] * len(chain.layers[0].costs)
    for layer in chain.layers:
        costs = tuple(
            replace(cost, saved_bytes=kept) for cost, kept in zip(layer.costs, before, strict=True)
        )
        layers.append(replace(layer, costs=costs))
        before = [cost.output_bytes for cost in layer.costs]
    return replace(chain, layers=tuple(layers), optimizer_bytes_per_parameter_byte=0.0)


@cache
def network_chain(network: str) -> Chain:
    """A network of the study on a V100 in fp32, as the paper counts memory."""
    return keeps_inputs(paper_model(network, BATCH, image=IMAGE), BATCH * 3 * IMAGE * IMAGE * 4.0)


def problem(case: Case) -> PipelineProblem:
    """The planning problem of a case; every two devices have a link of their own."""
    cluster = uniform_servers(
        1, case.devices, Link(case.bandwidth), memory_bytes=case.gigabytes * 1e9
    )
    return PipelineProblem(network_chain(case.network), cluster, MICROBATCHES)


# --- The planners --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Periods:
    """Seconds that a planner's first phase expects, and that its schedule takes.

    None stands for no prediction, and for no schedule that fits.
    """

    predicted: float | None
    achieved: float | None


@dataclass(frozen=True, slots=True)
class Planned:
    """MadPipe's periods, a proved lower bound of the period, and the wall time of planning."""

    periods: Periods
    bound: float | None
    wall_seconds: float

    @property
    def gap(self) -> float | None:
        """Certified distance from the best allocation and schedule, (period - bound) / period."""
        achieved, bound = self.periods.achieved, self.bound
        return None if achieved is None or bound is None else max(0.0, 1 - bound / achieved)

    @property
    def is_as_predicted(self) -> bool:
        """Whether its allocation has no schedule of a smaller period."""
        achieved, predicted = self.periods.achieved, self.periods.predicted
        if achieved is None or predicted is None:
            return False
        return achieved <= predicted * (1 + SAME)


def madpipe(asked: PipelineProblem) -> Planned:
    """MadPipe with a device to a stage: the period its allocation allows, and the plan's."""
    compile_kernels("madpipe")
    began = perf_counter()
    found = plan_madpipe(asked, LIMITS, silent, Choices(group_size=1))
    seconds = perf_counter() - began
    if isinstance(found, NoPlan):
        return Planned(Periods(None, None), None, seconds)
    require_valid(asked, assemble_pattern(asked, "madpipe", found.stages, found.pattern))
    own = class_of_proposal(found)
    # Bounds on the schedules of the same stages say nothing about other allocations.
    whole = [b.seconds for b in found.bounds if b.scope == "problem" and b.plans.contains(own)]
    bound = max(whole) / asked.microbatches
    return Planned(Periods(found.predicted_seconds, found.pattern.period), bound, seconds)


def pipedream(asked: PipelineProblem) -> Periods:
    """PipeDream's contiguous partition, scheduled by 1F1B* (MadPipe section 5.1).

    Where no partition fits by PipeDream's own estimate, the paper leaves open what is done. Here
    memory is disregarded then: the partition is tried all the same, without a prediction.
    """
    loads = stage_loads(asked)
    partition = balanced_partition(asked, np.where(fits_by_estimate(asked), loads, inf))
    predicted = None if partition is None else partition.period
    partition = partition or balanced_partition(asked, loads)
    assert partition is not None  # of loads alone, a single stage is one
    achieved = least_period(pattern_problem(asked, partition.stages))
    return Periods(predicted, achieved if isfinite(achieved) else None)


def stage_loads(asked: PipelineProblem) -> Floats:
    """U(k, l): seconds of layers [k, l) for a microbatch, shape (L + 1, L + 1); inf for none."""
    layers = len(asked.chain)
    loads = np.full((layers + 1, layers + 1), inf)
    for start, stop in _spans(layers):
        loads[start, stop] = sum(asked.compute_seconds(start, stop, [0]))
    return loads


def fits_by_estimate(asked: PipelineProblem) -> NDArray[np.bool_]:
    """Whether layers [k, l) fit with an activation in flight for every device of the cluster."""
    layers, device = len(asked.chain), asked.cluster.devices[0]
    fits = np.zeros((layers + 1, layers + 1), dtype=bool)
    for start, stop in _spans(layers):
        stage = Stage((start, stop), (device.name,))
        activations = len(asked.cluster) * kept_bytes(asked, stage).saved_bytes
        fits[start, stop] = static_bytes(asked, stage) + activations <= device.memory_bytes
    return fits


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages, each on the next device, and the load of the busiest device or link in seconds."""

    period: float
    stages: tuple[Stage, ...]


def balanced_partition(asked: PipelineProblem, loads: Floats) -> Partition | None:
    """The partition whose busiest device or link has the least load.

    PipeDream's dynamic program without replication: with T(0, 0) = 0,
    T(l, p) = min over k of max(T(k, p - 1), C(k), U(k, l)), where C(k) is the time of the
    activation behind layer k - 1 and of its gradient. None if ``loads`` allow no partition.
    """
    layers, devices = len(asked.chain), len(asked.cluster)
    links = np.array([0.0, *(sum(asked.transfer_seconds(k, [0], [1])) for k in range(1, layers))])
    least = np.full((devices + 1, layers + 1), inf)
    least[0, 0] = 0.0
    cut = np.zeros((devices + 1, layers + 1), dtype=int)
    for p, stop in product(range(1, devices + 1), range(1, layers + 1)):
        busiest = np.maximum(np.maximum(least[p - 1, :stop], links[:stop]), loads[:stop, stop])
        cut[p, stop] = busiest.argmin()
        least[p, stop] = busiest.min()
    count = int(least[:, layers].argmin())
    if not isfinite(least[count, layers]):
        return None
    cuts = [layers]
    for p in range(count, 0, -1):
        cuts.insert(0, int(cut[p, cuts[0]]))
    stages = tuple(
        Stage(layers, (device.name,))
        for layers, device in zip(pairwise(cuts), asked.cluster.devices, strict=False)
    )
    return Partition(float(least[count, layers]), stages)


def _spans(layers: int) -> Iterable[tuple[int, int]]:
    return ((start, stop) for stop in range(1, layers + 1) for start in range(stop))


# --- The comparison ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both planners on one case."""

    case: Case
    pipedream: Periods
    madpipe: Planned

    @property
    def ratio(self) -> float | None:
        """PipeDream's period over MadPipe's; None if one of them has no schedule."""
        theirs, ours = self.pipedream.achieved, self.madpipe.periods.achieved
        return None if theirs is None or ours is None else theirs / ours

    @property
    def estimate_fits(self) -> bool:
        """Whether PipeDream's own estimate of the memory lets it have a partition."""
        return self.pipedream.predicted is not None

    @property
    def only_madpipe(self) -> bool:
        """Whether MadPipe has a schedule and PipeDream none."""
        return self.pipedream.achieved is None and self.madpipe.periods.achieved is not None

    @property
    def neither(self) -> bool:
        """Whether no schedule was found at all."""
        return self.pipedream.achieved is None and self.madpipe.periods.achieved is None

    @property
    def madpipe_lost(self) -> bool:
        """Whether PipeDream has a schedule and MadPipe none, or a slower one."""
        theirs, ours = self.pipedream.achieved, self.madpipe.periods.achieved
        return theirs is not None and (ours is None or ours > theirs * (1 + SAME))


def compare(case: Case) -> Outcome:
    """Plan one case both ways."""
    asked = problem(case)
    return Outcome(case, pipedream(asked), madpipe(asked))


def study(cases: Sequence[Case]) -> list[Outcome]:
    """All cases, in processes of one thread each."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        return list(track(pool.map(compare, cases), "madpipe", total=len(cases)))


def require_never_slower(outcomes: Iterable[Outcome]) -> None:
    """Raise an AssertionError that names the first case in which PipeDream is ahead."""
    for outcome in outcomes:
        if outcome.madpipe_lost:
            raise AssertionError(f"PipeDream is ahead of MadPipe: {outcome}")


def mean_ratio(outcomes: Iterable[Outcome]) -> float | None:
    """Geometric mean of PipeDream's period over MadPipe's, where both have a schedule."""
    ratios = [outcome.ratio for outcome in outcomes if outcome.ratio is not None]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else None


def speedup(network: str, period: float | None) -> float:
    """U(1, L) over a period; nan where there is none."""
    costs = [layer.costs[0] for layer in network_chain(network).layers]
    sequential = sum(cost.forward_seconds + cost.total_backward_seconds for cost in costs)
    return nan if period is None else sequential / period


# --- The tables ----------------------------------------------------------------------------------


def summary_table(outcomes: Sequence[Outcome]) -> Table:
    """A row per network: how far PipeDream is behind, and how much is proved."""
    networks = dict.fromkeys(outcome.case.network for outcome in outcomes)
    columns = (
        "network", "M < 10 GB (printed)", "of these, estimate fits", "M >= 10 GB", "cases",
        "estimate fits", "only MadPipe fits", "neither fits", "PipeDream ahead",
        "best of its allocation",
        "proved optimal", "mean gap", "most s of planning",
    )  # fmt: skip
    return Table(
        "madpipe",
        "Section 5: PipeDream's period over MadPipe's, geometric mean where both fit",
        columns,
        tuple(_summary(network, _of(outcomes, network)) for network in networks),
    )


def _summary(network: str, outcomes: Sequence[Outcome]) -> tuple[object, ...]:
    tight = [o for o in outcomes if o.case.gigabytes < ROOMY_GIGABYTES]
    roomy = [o for o in outcomes if o.case.gigabytes >= ROOMY_GIGABYTES]
    gaps = [o.madpipe.gap for o in outcomes if o.madpipe.gap is not None]
    return (
        NETWORKS[network],
        f"{_ratio(mean_ratio(tight))} (over 1.2)",
        _ratio(mean_ratio(o for o in tight if o.estimate_fits)),
        _ratio(mean_ratio(roomy)),
        len(outcomes),
        sum(o.estimate_fits for o in outcomes),
        sum(o.only_madpipe for o in outcomes),
        sum(o.neither for o in outcomes),
        sum(o.madpipe_lost for o in outcomes),
        sum(o.madpipe.is_as_predicted for o in outcomes),
        sum(gap <= SAME for gap in gaps),
        percent(float(np.mean(gaps)) if gaps else None),
        f"{max(o.madpipe.wall_seconds for o in outcomes):.1f}",
    )


def figure7_table(outcomes: Sequence[Outcome]) -> Table:
    """Figure 7 in numbers; in brackets of how many cases, and in how many MadPipe alone fits."""
    networks = dict.fromkeys(outcome.case.network for outcome in outcomes)
    rows = []
    for gigabytes in sorted({outcome.case.gigabytes for outcome in outcomes}):
        cells = []
        for network in networks:
            at = [o for o in _of(outcomes, network) if o.case.gigabytes == gigabytes]
            both, alone = sum(o.ratio is not None for o in at), sum(o.only_madpipe for o in at)
            cells.append(f"{_ratio(mean_ratio(at))} ({both}, {alone})")
        rows.append((gigabytes, *cells))
    return Table(
        "madpipe-figure7",
        "Figure 7: geometric mean of PipeDream / MadPipe over P and bandwidth (cases in which both "
        "fit, cases in which MadPipe alone does)",
        ("M, GB", *(NETWORKS[network] for network in networks)),
        tuple(rows),
    )


def _of(outcomes: Iterable[Outcome], network: str) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.case.network == network]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# --- The pictures --------------------------------------------------------------------------------

MADPIPE_COLOUR, PIPEDREAM_COLOUR = "tab:blue", "tab:red"


def draw(outcomes: Sequence[Outcome], folder: Path = FIGURES) -> None:
    """Figures 6 and 8 as PNG files."""
    figure6(_of(outcomes, "resnet50")).savefig(folder / "madpipe-figure6.png")
    figure8(outcomes).savefig(folder / "madpipe-figure8.png")


def figure6(outcomes: Sequence[Outcome]) -> Figure:
    """Periods by memory: a row per bandwidth, a column per number of devices."""
    picture = Figure(figsize=(16, 5.6), dpi=80, layout="constrained")
    panels = picture.subplots(len(BANDWIDTHS), len(DEVICES), sharex=True, squeeze=False)
    for (bandwidth, devices), panel in zip(product(BANDWIDTHS, DEVICES), panels.flat, strict=True):
        at = [o for o in outcomes if (o.case.bandwidth, o.case.devices) == (bandwidth, devices)]
        for colour, name, periods in (
            (PIPEDREAM_COLOUR, "PipeDream", [o.pipedream for o in at]),
            (MADPIPE_COLOUR, "MadPipe", [o.madpipe.periods for o in at]),
        ):
            memory = [o.case.gigabytes for o in at]
            _line(panel, memory, [p.predicted for p in periods], colour, "--", f"{name}, predicted")
            _line(panel, memory, [p.achieved for p in periods], colour, "-", name)
        panel.set_title(f"P = {devices}, {bandwidth / 1e9:g} GB/s", fontsize=10)
        panel.set_ylim(bottom=0)
    for panel in panels[:, 0]:
        panel.set_ylabel("period, s")
    for panel in panels[-1]:
        panel.set_xlabel("memory, GB")
    panels[0, 0].legend(fontsize=7)
    return picture


def figure8(outcomes: Sequence[Outcome]) -> Figure:
    """Speed-up over one device of endless memory: a row per network, a column per memory."""
    picture = Figure(figsize=(13, 11), dpi=80, layout="constrained")
    panels = picture.subplots(len(NETWORKS), len(SPEEDUP_GIGABYTES), sharex=True, squeeze=False)
    for (network, gigabytes), panel in zip(
        product(NETWORKS, SPEEDUP_GIGABYTES), panels.flat, strict=True
    ):
        for bandwidth, style in zip(BANDWIDTHS, ("-", ":"), strict=True):
            at = [
                o
                for o in _of(outcomes, network)
                if (o.case.gigabytes, o.case.bandwidth) == (gigabytes, bandwidth)
            ]
            devices = [o.case.devices for o in at]
            label = f"{bandwidth / 1e9:g} GB/s"
            theirs = [speedup(network, o.pipedream.achieved) for o in at]
            ours = [speedup(network, o.madpipe.periods.achieved) for o in at]
            _line(panel, devices, theirs, PIPEDREAM_COLOUR, style, f"PipeDream, {label}")
            _line(panel, devices, ours, MADPIPE_COLOUR, style, f"MadPipe, {label}")
        panel.plot(DEVICES, DEVICES, color="grey", lw=0.6)
        panel.set_title(f"{NETWORKS[network]}, {gigabytes} GB", fontsize=10)
    for panel in panels[:, 0]:
        panel.set_ylabel("speed-up")
    for panel in panels[-1]:
        panel.set_xlabel("devices")
    panels[0, 0].legend(fontsize=7)
    return picture


def _line(
    panel: Axes,
    places: Sequence[int],
    values: Sequence[float | None],
    colour: str | None,
    style: str,
    label: str | None = None,
) -> None:
    heights = [nan if value is None else value for value in values]
    panel.plot(places, heights, color=colour, ls=style, marker=".", ms=4, lw=1.2, label=label)


def tables(quick: bool) -> list[Table]:
    """Both tables, and the pictures; a handful of cases if ``quick``, which MadPipe must win."""
    outcomes = study(QUICK if quick else SWEEP)
    if quick:
        require_never_slower(outcomes)
    else:
        draw(outcomes)
    return [summary_table(outcomes), figure7_table(outcomes)]
