"""Metis' planner on its own profiles, beside the optimum by its own evaluator.

Clusters are of one kind, as the public profiles are: servers of four, links as in its results.

The optimum is over a larger class than Metis searches: stages of whole consecutive layers, each on
any number of GPUs (Metis: powers of two, within a variance), divided into any data and measured
tensor degree, any number of microbatches that are whole and measured. Memory is judged by Metis'
rule.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from time import perf_counter

from benchmarks.metis import (
    BANDWIDTH,
    CHECKOUT,
    DEGREES,
    HIDDEN,
    LAYERS,
    MEBIBYTE,
    PER_SERVER,
    PROFILES,
    SEQUENCE,
    SIZES,
    Case,
    MetisPlan,
    Stage,
    checkout,
    folder,
)
from benchmarks.report import Table, percent
from benchmarks.spec import BenchSpec
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.parallelism.profiles.cluster import Pool, Route, ServerPools
from stagewright.formulations.parallelism.profiles.pipelines import MemoryRule, ProfiledProblem
from stagewright.graphs.importers.metis import read_metis
from stagewright.graphs.models.layer_profiles import LayerProfiles, LayerSizes
from stagewright.solvers.parallelism.profiles.pipelines import profiled_plan

# The optimum by Metis' evaluator.


@dataclass(frozen=True, slots=True)
class _Label:
    """Stages from the first layer on: sum of times and transfers, longest time, update, sum."""

    total: float
    longest: float
    update: float
    summed: float
    stages: tuple[Stage, ...]

    def no_worse(self, other: "_Label") -> bool:
        return (
            self.total <= other.total
            and self.longest <= other.longest
            and self.update <= other.update
            and self.summed <= other.summed
        )


def optimum(case: Case) -> tuple[float, MetisPlan | None]:
    """The least cost (ms) of the class, and its plan; all devices are used.

    Of two labels with the same layers and devices, one that is no worse in all four suffices.
    """
    best: tuple[float, MetisPlan | None] = (float("inf"), None)
    for batches in (m for m in range(1, case.batch + 1) if case.batch % m == 0):
        for one in _whole(case, batches):
            cost = _cost(one, batches, case.finish(one.stages[-1], batches))
            if cost < best[0]:
                best = cost, MetisPlan(one.stages, batches)
    return best


def _whole(case: Case, batches: int) -> list[_Label]:
    """The labels of all layers and devices; one for each last stage's degrees and costs."""
    at: dict[tuple[int, int], list[_Label]] = {(0, 0): [_Label(0.0, 0.0, 0.0, 0.0, ())]}
    whole: dict[tuple[int, int], list[_Label]] = {}
    for layer, used in product(range(LAYERS), range(case.gpus)):
        for label in at.get((layer, used), []):
            for stage, longer in _longer(case, label, batches, case.gpus - used):
                end = (stage[1], used + stage[2] * stage[3])
                if stage[1] < LAYERS:
                    _keep(at.setdefault(end, []), longer)
                elif end[1] == case.gpus:
                    _keep(whole.setdefault(stage[2:], []), longer)
    return [one for labels in whole.values() for one in labels]


def _cost(one: _Label, batches: int, finish: float) -> float:
    return one.total + (batches - 1) * one.longest + one.update + one.summed + finish


def _keep(labels: list[_Label], one: _Label) -> None:
    if not any(other.no_worse(one) for other in labels):
        labels[:] = [other for other in labels if not one.no_worse(other)]
        labels.append(one)


def _longer(case: Case, label: _Label, batches: int, left: int) -> Iterator[tuple[Stage, _Label]]:
    """The labels with one more stage."""
    first = label.stages[-1][1] if label.stages else 0
    for tensor in DEGREES:
        for data in range(1, left // tensor + 1):
            if case.batch % (data * batches) or case.batch // data // batches not in SIZES:
                continue
            for stop in range(first + 1, LAYERS + 1):
                stage = (first, stop, data, tensor)
                if not case.fits(stage, batches):
                    break
                compute, sent, update, summed = case.parts(stage, batches)
                yield (
                    stage,
                    _Label(
                        label.total + compute + sent,
                        max(label.longest, compute),
                        max(label.update, update),
                        max(label.summed, summed),
                        (*label.stages, stage),
                    ),
                )


# Our planner on the same inputs, in its own model.


def our_problem(case: Case) -> ProfiledProblem:
    """Metis' inputs as ours: gradients as it counts them, links by its bandwidth, no memory rule.

    Metis' rule of memory is of a stage's GPUs together, which ours has not.
    """
    profiles = read_metis(checkout() / PROFILES)
    held = case.profile["model"]["parameters"]
    sizes = tuple(
        LayerSizes(
            tensor,
            tuple(each / tensor for each in held),
            (0.0,) * LAYERS,
            (float(SEQUENCE * HIDDEN),) * LAYERS,
        )
        for tensor in DEGREES
    )
    rate = BANDWIDTH * MEBIBYTE * 1e3
    pool = Pool("A100", "whole", case.servers, PER_SERVER, 1e15, Route(rate, rate))
    whole = LayerProfiles(profiles.name, profiles.source, profiles.measured, sizes)
    rule = MemoryRule(0.0, 0.0, 0.0)
    return ProfiledProblem(whole, ServerPools((pool,)), case.batch, rule, gradient_bytes=1.0)


def our_plan(case: Case, limits: Limits) -> tuple[MetisPlan | None, float]:
    """Our planner's plan as Metis states plans, and the seconds of the search."""
    found = profiled_plan(our_problem(case), limits)
    if found.plan is None:
        return None, found.seconds
    stages, first = [], 0
    for one in found.plan.stages:
        stages.append((first, first + one.layers, len(one.replicas), one.replicas[0].tensor))
        first += one.layers
    counts = set(found.plan.microbatches)
    return MetisPlan(tuple(stages), max(counts)), found.seconds


STUDY = BenchSpec(
    "profiled_metis",
    lambda case: Case(*case),
    (
        (1, 80, 128),
        (2, 80, 128),
        (4, 80, 128),
        (8, 80, 128),
        (2, 40, 128),
        (4, 24, 64),
        (4, 12, 64),
        (3, 80, 96),
        (6, 80, 96),
        (8, 40, 64),
    ),
    few=1,
)
LIMITS = Limits(30)


def tables(quick: bool) -> list[Table]:
    """Metis' plan, ours and the optimum; none without a checkout."""
    if folder() is None:
        print(f"profiled_metis: set {CHECKOUT} to a checkout of github.com/SamsungLabs/Metis")
        return []
    rows: list[tuple[object, ...]] = []
    for each in STUDY.cases(quick):
        case = STUDY.build(each)
        rows.append(_row(case))
    columns = (
        "A100", "GB", "batch", "Metis' plan ms", "our plan ms", "optimum ms", "gap of Metis",
        "Metis' search s", "our search s", "optimum's s", "Metis' stages; microbatches", "optimum",
    )  # fmt: skip
    title = "Plans of Metis' GPT on its own profiles, by its own evaluator"
    return [Table("profiled_metis", title, columns, tuple(rows))]


def _row(case: Case) -> tuple[object, ...]:
    listed, searched = case.planned
    ours, spent = our_plan(case, LIMITS)
    began = perf_counter()
    best, plan = optimum(case)
    closing = perf_counter() - began
    assert plan is not None
    assert abs(case.milliseconds(plan) - best) < 1e-6 * best
    whole = [one for one in listed if one[1].is_whole]
    cost, theirs = min(whole, key=lambda one: one[0], default=(None, None))
    is_kept = ours is not None and all(case.fits(one, ours.batches) for one in ours.stages)
    return (
        case.gpus, case.memory, case.batch, "fails" if cost is None else cost,
        case.milliseconds(ours) if ours is not None and is_kept else "no memory", best,
        None if cost is None else percent(max(0.0, 1 - best / cost)), searched, spent, closing,
        None if theirs is None else words(theirs), words(plan),
    )  # fmt: skip


def words(plan: MetisPlan) -> str:
    """Such as ``10 d8 t1`` for each stage, and the microbatches."""
    stages = " | ".join(f"{stop - first} d{d} t{t}" for first, stop, d, t in plan.stages)
    return f"{stages}; {plan.batches}"
