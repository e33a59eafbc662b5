"""PipeDream's choices and predictions in Narayanan's thesis: table 2.2 and figure 2.14.

From the public profiles, as `pipedream.py`. The recurrence runs on the two levels of a cluster, and
on one level of all its devices at the slower bandwidth, on which alone a stage may have 15 of 16.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from benchmarks.pipedream import DATA, MISSING, SAMPLES, read_profile
from benchmarks.report import Table
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.patterns.one_f_one_b import least_period, one_f_one_b_star
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.pipelines.bppm import prefix_sums, range_sums
from stagewright.formulations.plans.actions import STASH
from stagewright.formulations.plans.assembly import assemble_pattern
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.machines.cluster import Cluster, Link, uniform_servers
from stagewright.solvers.planners.baselines.hierarchy import (
    Hierarchy,
    LayerCosts,
    WorkerLevel,
    hierarchy_of,
    optimize,
    placed,
)
from stagewright.solvers.planners.baselines.pipedream import costs_of

BANDWIDTHS = {"A": (12e9, 1.25e9), "B": (30e9, 3.125e9), "equal links": (3.125e9,)}
"""Bytes per second in and between the servers; of all pairs of devices."""
FORMULAS = {"thesis": True, "code": False}  # whether an all-reduce overlaps the computation


@dataclass(frozen=True, slots=True)
class Choice:
    """A line of table 2.2: a model on servers x devices of a cluster, and its configuration."""

    profile: str
    servers: int
    devices: int
    cluster: str
    printed: tuple[int, ...]

    @property
    def where(self) -> str:
        """Such as 4x4 (A)."""
        return f"{self.servers}x{self.devices} ({self.cluster})"

    @property
    def machines(self) -> Cluster:
        """The cluster."""
        links = [Link(one) for one in BANDWIDTHS[self.cluster][: min(self.servers, 2)]]
        return uniform_servers(self.servers, self.devices, *links)

    @property
    def one_level(self) -> Hierarchy:
        """All devices at the bandwidth of the slowest link."""
        count = self.servers * self.devices
        bandwidth = BANDWIDTHS[self.cluster][min(self.servers, 2) - 1]
        return Hierarchy((WorkerLevel(count, bandwidth),), tuple(range(count)))


CHOICES = (
    Choice("vgg16", 4, 4, "A", (15, 1)),
    Choice("vgg16", 2, 8, "B", (15, 1)),
    Choice("resnet50", 4, 4, "A", (16,)),
    Choice("resnet50", 2, 8, "B", (16,)),
    Choice("alexnet", 4, 4, "A", (15, 1)),
    Choice("alexnet", 2, 8, "B", (15, 1)),
    Choice("gnmt_large", 1, 4, "A", (1,) * 4),
    Choice("gnmt_large", 4, 4, "A", (1,) * 16),
    Choice("gnmt_large", 2, 8, "B", (1,) * 16),
    Choice("gnmt", 1, 4, "A", (1,) * 4),
    Choice("gnmt", 3, 4, "A", (1,) * 12),
    Choice("gnmt", 2, 8, "B", (16,)),
)
"""Table 2.2 without AWD LM and S2VT, of which there are no public profiles."""


@dataclass(frozen=True, slots=True)
class Priced:
    """The best cuts of given replicas on one level, seconds per microbatch, and what is slowest."""

    cuts: tuple[int, ...]
    seconds: float
    slowest: str


def price(
    costs: LayerCosts, replicas: Sequence[int], hierarchy: Hierarchy, *, overlapped: bool
) -> Priced:
    """The cuts with the least slowest stage or channel, with stage s on ``replicas[s]`` devices."""
    (level,) = hierarchy.levels
    channel = np.append(0.0, 2 * costs.output_bytes / level.bandwidth)
    parts = [_parts(costs, m, level.bandwidth, overlapped) for m in replicas]
    stages = [np.maximum(*one) if overlapped else one[0] + one[1] for one in parts]
    best, came = np.full(len(channel), np.inf), []
    best[0] = 0.0
    for s, stage in enumerate(stages):
        through = np.maximum((np.maximum(best, channel) if s else best)[:, None], stage)
        came.append(through.argmin(axis=0))
        best = through.min(axis=0)
    ends = [len(channel) - 1]
    for at in came[::-1]:
        ends.append(int(at[ends[-1]]))
    cuts = tuple(ends[::-1])
    candidates = [(float(channel[cut]), "transfer") for cut in cuts[1:-1]]
    for (i, j), stage, (computed, reduced) in zip(pairwise(cuts), stages, parts, strict=True):
        name = "computation" if computed[i, j] >= reduced[i, j] else "all-reduce"
        candidates.append((float(stage[i, j]), name))
    return Priced(cuts, *max(candidates))


def _parts(costs: LayerCosts, m: int, bandwidth: float, overlapped: bool) -> tuple[Floats, Floats]:
    """Computation and all-reduce of the layers [i, j) on m devices, infinite unless i < j."""
    spans = range_sums(prefix_sums(costs.work)) / m
    share = 2 * (m - 1) / m if overlapped else 4 * (m - 1) / m**2
    reduced = share * range_sums(prefix_sums(costs.parameter_bytes)) / bandwidth
    none = np.tri(len(spans), dtype=bool)
    return np.where(none, np.inf, spans), np.where(none, np.inf, reduced)


def shown(replicas: Sequence[int]) -> str:
    """Such as ``straight``, 16, 15-1 and 1x11-4-1: eleven stages on a device each, and so on."""
    if len(replicas) > 1 and set(replicas) == {1}:
        return "straight"
    runs = [(r, len(list(its))) for r, its in groupby(replicas)]
    return "-".join(f"{r}x{n}" if n > 2 else "-".join([str(r)] * n) for r, n in runs)


def chosen(costs: LayerCosts, hierarchy: Hierarchy, *, overlapped: bool) -> tuple[int, ...]:
    """The replicas of the stages of the recurrence's optimum."""
    tables = optimize(costs, hierarchy, overlapped=overlapped)
    return tuple(len(one.devices) for one in placed(tables, hierarchy))


def costs_on(choice: Choice) -> LayerCosts:
    """The layers of the profile; memory is not looked at, as in PipeDream's runs."""
    return costs_of(PipelineProblem(read_profile(choice.profile), choice.machines, 1), memory=False)


def table_2_2(choices: Sequence[Choice]) -> Table:
    """The printed configurations beside those of the recurrence; transfers count."""
    rows = []
    for choice in choices:
        costs = costs_on(choice)
        ours, dearer = {}, []
        for formula, overlapped in FORMULAS.items():
            levels = hierarchy_of(choice.machines)
            ours["levels", formula] = chosen(costs, levels, overlapped=overlapped)
            flat = chosen(costs, choice.one_level, overlapped=overlapped)
            ours["one level", formula] = flat
            least = price(costs, flat, choice.one_level, overlapped=overlapped)
            printed = price(costs, choice.printed, choice.one_level, overlapped=overlapped)
            dearer.append(f"{printed.seconds / least.seconds:.2f}, {printed.slowest}")
        agree = [" by ".join(key) for key, one in ours.items() if one == choice.printed]
        rows.append(
            (
                choice.profile,
                choice.where,
                shown(choice.printed),
                *(shown(one) for one in ours.values()),
                "; ".join(agree) or "none",
                *dearer,
            )
        )
    columns = ("profile", "servers x GPUs", "printed", "levels, thesis's formula",
               "one level, thesis's", "levels, public code's", "one level, code's", "agree",
               "printed / optimum, its slowest: thesis's", "code's")  # fmt: skip
    title = "Configurations of table 2.2 and those of the recurrence on the public profiles"
    return Table("pipedream-table-2-2", title, columns, tuple(rows))


# --- Figure 2.14: predicted and real throughput of VGG-16 on 16 GPUs ---------------------------

FIGURE = (*CHOICES[:2], Choice("vgg16", 1, 16, "equal links", (15, 1)))
MICROBATCHES = 8
JITTER = 0.1
CONFIGURATIONS = (
    (16,), *((16 - y, y) for y in range(1, 16)), (14, 1, 1), (12, 3, 1), (8, 7, 1), (8, 4, 4),
    (4, 4, 4, 4), (8, *(1,) * 8), (1,) * 16,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """A configuration's seconds per microbatch, predicted and simulated.

    ``steps`` lead from the formula of the thesis to the simulated plan, a change at a time: the
    formula; transfers on their links, divided among the replicas; computation in whole samples,
    and all-reduces on their links; all-reduce and update after the backward; as simulated, with
    memory.
    """

    replicas: tuple[int, ...]
    predicted: dict[str, float]
    steps: tuple[float, ...]
    jittered: float

    @property
    def simulated(self) -> float:
        """Without jitter."""
        return self.steps[-1]


def points(choice: Choice) -> Iterator[Point]:
    """The configurations, each with the cuts that the thesis's formula finds best.

    Those that fit in no memory are left out.
    """
    chain, costs = read_profile(choice.profile), costs_on(choice)
    problem = PipelineProblem(chain, choice.machines, MICROBATCHES)
    names = [device.name for device in choice.machines.devices]
    for replicas in CONFIGURATIONS:
        made = {
            name: price(costs, replicas, choice.one_level, overlapped=overlapped)
            for name, overlapped in FORMULAS.items()
        }
        ends = np.cumsum((0, *replicas)).tolist()
        stages = [
            Stage(layers, tuple(names[first:last]))
            for layers, (first, last) in zip(
                pairwise(made["thesis"].cuts), pairwise(ends), strict=True
            )
        ]
        asked = pattern_problem(problem, stages, STASH)
        period = least_period(asked)
        if math.isinf(period):
            continue
        pattern = one_f_one_b_star(asked, period)
        plan = assemble_pattern(problem, "figure", stages, pattern, STASH)
        runs = [simulate(problem, plan, jitter=jitter) for jitter in (0.0, JITTER)]
        steady, jittered = (run.iteration_seconds / MICROBATCHES for run in runs)
        between = _between(problem, stages, costs, choice.one_level.levels[0].bandwidth)
        predicted = {name: one.seconds for name, one in made.items()}
        yield Point(replicas, predicted, (predicted["thesis"], *between, steady), jittered)


def _between(
    problem: PipelineProblem, stages: Sequence[Stage], costs: LayerCosts, bandwidth: float
) -> Iterator[float]:
    """The steps of a point between the formula and the simulation."""
    index = problem.cluster.index
    groups = [[index[name] for name in stage.devices] for stage in stages]
    moved = max(
        [0.0]
        + [
            sum(problem.transfer_seconds(one.layers[1], *pair))
            for one, pair in zip(stages, pairwise(groups), strict=False)
        ]
    )
    formula, shares, summed = [0.0], [0.0], [0.0]
    for (start, stop), devices in zip((one.layers for one in stages), groups, strict=True):
        m = len(devices)
        computed = sum(problem.compute_seconds(start, stop, devices))
        reduced = problem.reduce_seconds(start, stop, devices)
        updated = problem.update_seconds(start, stop, devices)
        flat = 2 * (m - 1) / m * problem.gradient_bytes(start, stop) / bandwidth
        formula.append(max(float(costs.work[start:stop].sum()) / m, flat))
        shares.append(max(computed, reduced))
        summed.append(computed + reduced + updated)
    for one in (formula, shares, summed):
        yield max(moved, *one)


def figure_table(found: dict[str, list[Point]]) -> Table:
    """Every configuration's throughput."""
    rows: list[tuple[object, ...]] = []
    samples = SAMPLES[FIGURE[0].profile]
    for where, its in found.items():
        for one in its:
            thesis, code = one.predicted["thesis"], one.predicted["code"]
            rates = [samples / value for value in (thesis, code, one.simulated, one.jittered)]
            rows.append(
                (
                    where,
                    shown(one.replicas),
                    *(f"{rate:.0f}" for rate in rates),
                    *(f"{1e3 * step:.1f}" for step in one.steps),
                )
            )
    columns = ("cluster", "configuration", "samples/s predicted by thesis's formula",
               "by code's", "simulated", "with jitter", "formula, ms", "+ transfers divided",
               "+ whole samples, own links", "+ all-reduce after backward",
               "simulated")  # fmt: skip
    title = "Figure 2.14 in simulation: VGG-16 on 16 GPUs, seconds per microbatch by cause"
    return Table("pipedream-figure-2-14", title, columns, tuple(rows))


def fits_table(found: dict[str, list[Point]]) -> Table:
    """The correlation of predicted and simulated throughput, and the straight line between them."""
    rows: list[tuple[object, ...]] = []
    for where, its in found.items():
        for name in FORMULAS:
            predicted = np.array([1 / one.predicted[name] for one in its])
            for run in ("simulated", "jittered"):
                real = np.array([1 / getattr(one, run) for one in its])
                slope = float(np.polyfit(predicted, real, 1)[0])
                r = float(np.corrcoef(predicted, real)[0, 1])
                best, pick = int(real.argmax()), int(predicted.argmax())
                rows.append(
                    (
                        where, f"{name}'s", run, len(its), f"{r:.3f}", f"{slope:.2f}",
                        shown(its[pick].replicas), shown(its[best].replicas),
                        f"{real[best] / real[pick]:.2f}",
                    )
                )  # fmt: skip
    columns = ("cluster", "formula", "run", "points", "correlation", "slope", "predicted best",
               "simulated best", "its gain over the predicted")  # fmt: skip
    title = "Predicted and simulated throughput of figure 2.14"
    return Table("pipedream-figure-2-14-fit", title, columns, tuple(rows))


def tables(quick: bool) -> list[Table]:
    """The tables; nothing where the profiles are absent."""
    if not DATA.is_dir():
        print(MISSING)
        return []
    found = {choice.where: list(points(choice)) for choice in FIGURE[: 1 if quick else None]}
    return [
        table_2_2(CHOICES[:2] if quick else CHOICES),
        figure_table(found),
        fits_table(found),
    ]
