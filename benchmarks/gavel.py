"""Thesis section 5.7: policies in simulated clusters, beside the thesis and its public code.

The printed points are averages of jobs 4000 to 5000. Simulations as long as that are in the table
``gavel-published``; the sweeps measure earlier jobs, so that at loads which a policy cannot sustain
the queue, and with it every factor, is smaller here. How cases are run is in ``gavel_runs.py``.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import isnan, nan
from random import Random
from statistics import fmean
from types import MappingProxyType

import numpy as np

from benchmarks.gavel_runs import (
    DATA,
    HOUR,
    MISSING,
    PHYSICAL,
    PRICED,
    SMALL,
    Case,
    Kind,
    Outcome,
    Outcomes,
    allocation_by,
    measured,
    study,
)
from benchmarks.report import Table, percent
from stagewright.formulations.clusters.allocation import problem_of, throughput
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.workloads.jobs import Discipline, Entity, Job, Workload
from stagewright.graphs.workloads.poisson import HIGH_PRIORITY, MODELS
from stagewright.graphs.workloads.pool import parse_pool

PUBLIC_JOBS = (4000, 5000)


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is run: rates in jobs per hour, and which jobs are measured."""

    single_rates: tuple[float, ...] = (4.0, 5.6)
    multi_rates: tuple[float, ...] = (2.6,)
    fifo_single_rates: tuple[float, ...] = (5.2,)
    fifo_multi_rates: tuple[float, ...] = (2.6,)
    round_rates: tuple[float, ...] = (5.6,)
    single_jobs: tuple[int, int] = (1000, 1500)
    multi_jobs: tuple[int, int] = (400, 600)
    static_jobs: tuple[int, ...] = (100, 300)
    cost_jobs: int = 100
    references: int | None = None  # how many of them; all without


FULL = Scope()
QUICK = Scope(
    single_rates=(0.4,),
    multi_rates=(0.4,),
    fifo_single_rates=(0.4,),
    fifo_multi_rates=(0.4,),
    round_rates=(0.4,),
    single_jobs=(1, 4),
    multi_jobs=(1, 4),
    static_jobs=(10,),
    cost_jobs=5,
    references=2,
)

# --- Beside numbers of the public code -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reference:
    """A number of the public code on the same jobs: as it runs, and as its notebooks print it."""

    case: Case
    hours: float | None
    printed_hours: float | None = None
    makespan: bool = False

    def ours(self, outcomes: Outcomes) -> float:
        """Hours of the same measure."""
        found = outcomes[self.case]
        return found.makespan_hours if self.makespan else found.mean_hours


def _regression(policy: str, seconds: float, space_sharing: bool = False) -> Reference:
    case = Case(policy, space_sharing, HOUR / 2250, (200, 500), pool=SMALL)
    return Reference(case, seconds / HOUR)


def _steady(
    policy: str, jobs_per_hour: float, seconds: float | None, printed: float, kind: Kind = "single"
) -> Reference:
    case = Case(policy, jobs_per_hour=jobs_per_hour, jobs=PUBLIC_JOBS, kind=kind)
    return Reference(case, None if seconds is None else seconds / HOUR, printed)


def _trace(policy: str, name: str, hours: float, makespan: bool) -> Reference:
    return Reference(Case(policy, trace=f"{name}.trace", pool=PHYSICAL), hours, None, makespan)


REFERENCES = (
    _trace("las", "max_min_fairness", 5.55, makespan=False),
    _trace("max-min", "max_min_fairness", 4.06, makespan=False),
    _trace("fifo-agnostic", "minimize_makespan", 76.17, makespan=True),
    _trace("makespan-agnostic", "minimize_makespan", 21.29, makespan=True),
    _trace("makespan", "minimize_makespan", 17.98, makespan=True),
    _regression("las", 72_587.7),
    _regression("max-min", 50_297.6),
    _regression("max-min", 50_221.6, space_sharing=True),
    _regression("fifo", 50_632.0),
    _regression("allox", 51_136.3),
    _steady("las", 4.0, 85_482.7, 23.49),
    _steady("max-min", 4.0, 61_460.6, 16.82),
    _steady("las", 5.6, None, 95.99),
    _steady("max-min", 5.6, 105_901.3, 28.96),
    _steady("max-min", 2.0, 72_930.2, 21.90, kind="multi"),
)


def references(scope: Scope) -> tuple[Reference, ...]:
    return REFERENCES[: scope.references]


def references_table(scope: Scope, outcomes: Outcomes) -> Table:
    """Ours beside the public simulator's, run on the same jobs."""
    rows = []
    for reference in references(scope):
        case, ours = reference.case, reference.ours(outcomes)
        rows.append(
            (
                case.pool,
                _jobs_text(case),
                case.policy + (", space sharing" if case.space_sharing else ""),
                "makespan" if reference.makespan else "average JCT",
                f"{ours:.2f}",
                _deviation(ours, reference.hours),
                _deviation(ours, reference.printed_hours),
                f"{outcomes[case].wall_seconds:.0f} ({outcomes[case].cpu_seconds:.0f})",
            )
        )
    columns = ("cluster", "jobs", "policy", "measure", "ours, h", "public code, h (ours to it)",
               "printed, h (ours to it)", "s (CPU s)")  # fmt: skip
    return Table(
        "gavel-published",
        "The public simulator's numbers on the same jobs; its long simulations took 244 to 358 s",
        columns,
        tuple(rows),
    )


def _deviation(ours: float, theirs: float | None) -> str:
    return "-" if theirs is None else f"{theirs:.2f} ({ours / theirs - 1:+.1%})"


def _jobs_text(case: Case) -> str:
    if case.trace is not None:
        return case.trace
    first, end = case.jobs
    kind = "multi-GPU" if case.kind == "multi" else "single-GPU"
    coming = f"{case.jobs_per_hour:g} jobs/h" if case.jobs_per_hour else "all at once"
    return f"{first} to {end}, {kind}, {coming}"


# --- Points of figures and tables ----------------------------------------------------------------

JCT, RHO, MAKESPAN, SLOS = "average JCT, h", "mean rho", "makespan, h", "SLOs missed"
HIGH, LOW, DOLLARS = "JCT of weight 5, h", "JCT of weight 1, h", "dollars"
MEASURES: dict[str, Callable[[Outcome], float]] = {
    JCT: lambda one: one.mean_hours,
    RHO: lambda one: fmean(one.fairness),
    MAKESPAN: lambda one: one.makespan_hours,
    HIGH: lambda one: one.mean_hours_of(HIGH_PRIORITY),
    LOW: lambda one: one.mean_hours_of(1.0),
    DOLLARS: lambda one: one.dollars or 0.0,
    SLOS: lambda one: float(one.slo_violations),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A measure of a policy in a figure or table of section 5.7, and the printed one if any."""

    figure: str
    policy: str
    case: Case
    measure: str
    printed: float = nan

    def ours(self, outcomes: Outcomes) -> float:
        """The measure of our simulation."""
        return MEASURES[self.measure](outcomes[self.case])


# Policies of a figure: label, ours, name in the published points, and space sharing.
Line = tuple[str, str, str, bool]
LAS: Line = ("LAS", "las", "max_min_fairness", False)
MAX_MIN: Line = ("max-min", "max-min", "max_min_fairness_perf", False)
SHARED: Line = ("max-min, space sharing", "max-min", "max_min_fairness_packed", True)
GANDIVA: Line = ("Gandiva", "gandiva", "gandiva", True)
ALLOX: Line = ("AlloX", "allox", "allox", False)
FAIR = "finish-time-fairness"
FIFO: tuple[Line, ...] = (
    ("FIFO, agnostic", "fifo-agnostic", "fifo", False),
    ("FIFO", "fifo", "fifo_perf", False),
    ("FIFO, space sharing", "fifo", "fifo_packed", True),
)
# Hours by jobs, output of the public code's ``makespan.ipynb``, for seed 1.
STATIC: tuple[tuple[str, str, bool, dict[int, float]], ...] = (
    ("FIFO, agnostic", "fifo-agnostic", False, {100: 182.32, 300: 295.56}),
    ("Gandiva", "gandiva", True, {100: 166.61, 300: 199.87}),
    ("makespan", "makespan", False, {100: 161.16, 300: 161.16}),
    ("makespan, space sharing", "makespan", True, {100: 163.61, 300: 161.17}),
)
# Of table 5.3: policy, trace, measure, the thesis's hours, and space sharing.
PHYSICAL_RUNS = (
    ("max-min", "max_min_fairness", JCT, 3.7, False),
    ("las", "max_min_fairness", JCT, 5.4, False),
    ("makespan", "minimize_makespan", MAKESPAN, 17.6, False),
    ("gandiva", "minimize_makespan", MAKESPAN, 22.1, True),
)
COST_POLICIES = ("max-throughput", "min-cost", "min-cost-slo")
COST_RATE = 0.4
ROUND_SECONDS = (180.0, 360.0, 720.0, 1440.0, 2880.0)


@cache
def published_points() -> dict[tuple[str, str, str], dict[float, float]]:
    """By trace, metric and policy: values by jobs per hour."""
    found: dict[tuple[str, str, str], dict[float, float]] = {}
    with (DATA / "published_jct_from_notebooks.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            points = found.setdefault((row["trace"], row["metric"], row["policy"]), {})
            points[float(row["input_job_rate_per_hr"])] = float(row["value"])
    return found


def points(scope: Scope) -> list[Point]:
    """All of section 5.7 but the hierarchies."""
    single, multi = scope.single_rates, scope.multi_rates
    return [
        *_by_load("5.9", "single", (LAS, MAX_MIN, SHARED, GANDIVA, ALLOX), single,
                  scope.single_jobs),
        *_by_load("5.10", "multi", (LAS, MAX_MIN, SHARED, GANDIVA), multi, scope.multi_jobs),
        *_by_load("5.11", "multi", (
            ("finish-time fairness, agnostic", f"{FAIR}-agnostic", "finish_time_fairness", False),
            ("finish-time fairness", FAIR, "finish_time_fairness_perf", False),
        ), multi, scope.multi_jobs, {JCT: "avg_jct_hours", RHO: "ftf_rho_mean"}),
        *_by_load("FIFO", "single", FIFO, scope.fifo_single_rates, scope.single_jobs),
        *_by_load("FIFO", "multi", FIFO, scope.fifo_multi_rates, scope.multi_jobs),
        *(
            Point("makespan", label, Case(policy, shared, None, (0, jobs), "multi"), MAKESPAN,
                  printed.get(jobs, nan))
            for jobs in scope.static_jobs for label, policy, shared, printed in STATIC
        ),
        *(
            Point("priorities", label,
                  Case(policy, False, single[-1], scope.single_jobs, "priorities"), measure)
            for label, policy, *_ in (LAS, MAX_MIN) for measure in (HIGH, LOW)
        ),
        *(
            Point("cost", policy,
                  Case(policy, False, COST_RATE, (0, scope.cost_jobs), "cost", pool=PRICED),
                  measure)
            for policy in COST_POLICIES for measure in (DOLLARS, SLOS, JCT)
        ),
        *(
            Point("5.15", "ideal" if seconds is None else f"rounds of {seconds:g} s",
                  Case("max-min", jobs_per_hour=rate, jobs=scope.single_jobs,
                       round_seconds=seconds or 360.0, ideal=seconds is None), JCT)
            for rate in scope.round_rates for seconds in (None, *ROUND_SECONDS)
        ),
        *(
            Point("table 5.3", policy,
                  Case(policy, shared, trace=f"{name}.trace", pool=PHYSICAL), measure, printed)
            for policy, name, measure, printed, shared in PHYSICAL_RUNS
        ),
    ]  # fmt: skip


def _by_load(
    figure: str,
    kind: Kind,
    lines: Sequence[Line],
    rates: Sequence[float],
    jobs: tuple[int, int],
    measures: Mapping[str, str] = MappingProxyType({JCT: "avg_jct_hours"}),
) -> Iterator[Point]:
    """Policies at several input rates; measures by the metric of the published points."""
    for rate, (measure, metric) in product(rates, measures.items()):
        for label, policy, published, shared in lines:
            printed = published_points().get((f"{kind}_gpu", metric, published), {})
            case = Case(policy, shared, rate, jobs, kind)
            yield Point(figure, label, case, measure, printed.get(rate, nan))


def points_table(scope: Scope, outcomes: Outcomes) -> Table:
    """Ours beside the printed ones."""
    rows = tuple(
        (
            *(one.figure, _jobs_text(one.case), one.policy, one.measure, one.ours(outcomes)),
            None if isnan(one.printed) else one.printed,
        )
        for one in points(scope)
    )
    return Table(
        "gavel-policies",
        "Section 5.7 in simulation; printed points are of jobs "
        f"{PUBLIC_JOBS[0]} to {PUBLIC_JOBS[1]}, printed makespans of jobs of another seed",
        ("figure", "jobs", "policy", "measure", "ours", "printed"),
        rows,
    )


# --- Hierarchies: figures 5.12 and 5.13 ----------------------------------------------------------

ENTITIES, JOBS_EACH, EVERY = 3, 6, 4  # jobs are added every 4 timesteps
HIERARCHICAL_POOL = "v100=3,p100=3,k80=3"


@dataclass(frozen=True, slots=True)
class Growth:
    """Effective throughput of each job, shape (jobs present, jobs), by policy.

    Effective: over what an equal part of the time on each type would give (section 5.4.1).
    ``partition`` is the thesis's baseline, ``agnostic`` that of the public notebook: the same
    policy, all accelerators taken for alike.
    """

    ours: Floats
    partition: Floats
    agnostic: Floats


def hierarchy(discipline: Discipline) -> Workload:
    """18 jobs of three entities with weights 1, 2, 3, drawn as in the public notebook."""
    draw = Random(0)
    jobs = []
    for number in range(ENTITIES * JOBS_EACH):
        weight = 1.0 if discipline == "fifo" else 1.0 + number % 2
        jobs.append(
            Job(
                str(number),
                draw.choice(MODELS),
                1e6,
                weight=weight,
                arrival_seconds=float(EVERY * number),
                entity=f"entity{number // JOBS_EACH}",
            )
        )
    entities = tuple(Entity(f"entity{n}", n + 1.0, discipline) for n in range(ENTITIES))
    return Workload(tuple(jobs), measured().of((job.model, job.scale) for job in jobs), entities)


def growth(discipline: Discipline) -> Growth:
    """Allocate anew for each job that is added."""
    workload, pool = hierarchy(discipline), parse_pool(HIERARCHICAL_POOL)
    found = np.zeros((3, len(workload.jobs), len(workload.jobs)))
    for present in range(1, len(workload.jobs) + 1):
        problem = problem_of(replace(workload, jobs=workload.jobs[:present]), pool)
        allocations = (
            allocation_by("hierarchical", problem),
            allocation_by("static-partition", problem),
            allocation_by("hierarchical", problem.agnostic()),
        )
        for rows, allocation in zip(found, allocations, strict=True):
            rates = throughput(problem, allocation)
            rows[present - 1, :present] = rates / (problem.fair_throughput() * problem.scale)
    return Growth(*found)


def shares(effective: Floats) -> Floats:
    """Each job's part of the total, by rows."""
    return np.asarray(effective / effective.sum(axis=1, keepdims=True))


def hierarchical_table(found: dict[Discipline, Growth]) -> Table:
    """With 6, 12 and 18 jobs: what entities have, and the loss of a static partition."""
    rows = []
    for discipline, one in found.items():
        for present in range(JOBS_EACH, len(one.ours) + 1, JOBS_EACH):
            part = shares(one.ours)[present - 1].reshape(ENTITIES, JOBS_EACH)
            totals = [float(rows[present - 1].sum()) for rows in (one.ours, one.partition)]
            agnostic = float(one.agnostic[present - 1].sum())
            rows.append(
                (
                    discipline,
                    present,
                    " / ".join(f"{share:.3f}" for share in part.sum(axis=1)),
                    int((part > 1e-6).sum()),
                    *totals,
                    percent(1 - totals[1] / totals[0]),
                    agnostic,
                    percent(1 - agnostic / totals[0]),
                )
            )
    return Table(
        "gavel-hierarchical",
        "Figures 5.12 and 5.13: three entities of weights 1, 2, 3 on 3 V100, 3 P100, 3 K80",
        ("inside an entity", "jobs", "entities' parts", "jobs that run", "total throughput",
         "static partition", "lower by", "agnostic", "lower by"),
        tuple(rows),
    )  # fmt: skip


# --- What the thesis claims ----------------------------------------------------------------------

# Finding, the thesis's factor, figure, kind of jobs, the worse and the better policy, measure.
CLAIMS = (
    ("JCT of LAS over max-min, single-GPU", "3.5", "5.9", "single", "LAS", "max-min", JCT),
    ("JCT of LAS over max-min, multi-GPU", "2.2", "5.10", "multi", "LAS", "max-min", JCT),
    ("JCT of Gandiva over max-min with space sharing, single-GPU", "2.2", "5.9", "single",
     "Gandiva", SHARED[0], JCT),
    ("JCT of Gandiva over max-min with space sharing, multi-GPU", "2.2", "5.10", "multi",
     "Gandiva", SHARED[0], JCT),
    ("JCT of finish-time fairness, agnostic over aware", "3", "5.11", "multi",
     "finish-time fairness, agnostic", "finish-time fairness", JCT),
    ("mean rho of finish-time fairness, agnostic over aware", "2.8", "5.11", "multi",
     "finish-time fairness, agnostic", "finish-time fairness", RHO),
    ("JCT of FIFO, agnostic over aware, single-GPU", "2.7", "FIFO", "single",
     "FIFO, agnostic", "FIFO", JCT),
    ("JCT of FIFO, agnostic over aware with space sharing, single-GPU", "3.8", "FIFO", "single",
     "FIFO, agnostic", "FIFO, space sharing", JCT),
    ("JCT of FIFO without space sharing over with, single-GPU", "1.4", "FIFO", "single",
     "FIFO", "FIFO, space sharing", JCT),
    ("JCT of FIFO without space sharing over with, multi-GPU", "1.1", "FIFO", "multi",
     "FIFO", "FIFO, space sharing", JCT),
    ("makespan, FIFO over makespan", "2.5", "makespan", "multi", "FIFO, agnostic", "makespan",
     MAKESPAN),
    ("makespan, Gandiva over makespan", "1.4", "makespan", "multi", "Gandiva", "makespan",
     MAKESPAN),
    ("makespan without space sharing over with", "1.08", "makespan", "multi", "makespan",
     "makespan, space sharing", MAKESPAN),
    ("JCT of high priority jobs, LAS over max-min", "1.5", "priorities", "priorities", "LAS",
     "max-min", HIGH),
    ("JCT of low priority jobs, LAS over max-min", "2.7", "priorities", "priorities", "LAS",
     "max-min", LOW),
    ("cost of max-throughput over min-cost", "1.4", "cost", "cost", "max-throughput", "min-cost",
     DOLLARS),
    ("cost of max-throughput over min-cost-slo", "1.2", "cost", "cost", "max-throughput",
     "min-cost-slo", DOLLARS),
    ("table 5.3: JCT of LAS over max-min", "1.5", "table 5.3", "single", "las", "max-min", JCT),
    ("table 5.3: makespan of Gandiva over makespan", "1.2", "table 5.3", "single", "gandiva",
     "makespan", MAKESPAN),
)  # fmt: skip


def claims_table(scope: Scope, outcomes: Outcomes, hierarchies: dict[Discipline, Growth]) -> Table:
    """The factors that the thesis states, ours, and those of the published points."""
    # Of several loads the last is the highest.
    at: dict[tuple[str, str, str, str], Point] = {
        (one.figure, one.case.kind, one.policy, one.measure): one for one in points(scope)
    }
    rows: list[tuple[object, ...]] = []
    for finding, printed, figure, kind, worse, better, measure in CLAIMS:
        both = [at[figure, kind, one, measure] for one in (worse, better)]
        ours = _factor(*(one.ours(outcomes) for one in both))
        rows.append((finding, printed, ours, _factor(*(one.printed for one in both))))
    missed = (at["cost", "cost", one, SLOS].ours(outcomes) for one in COST_POLICIES[1:])
    text = ", ".join(percent(one / scope.cost_jobs) for one in missed)
    last = hierarchies["fairness"]
    loss = 1 - float(last.partition[-1].sum() / last.ours[-1].sum())
    rows += [
        *_steady_claim(outcomes),
        ("SLOs missed, min-cost and min-cost-slo", "35%, 0%", text, "-"),
        ("throughput lost by a static partition", "17%", percent(loss), "-"),
    ]
    return Table(
        "gavel-claims",
        "Section 5.7 in factors, at the highest load of each sweep (published points: of jobs "
        f"{PUBLIC_JOBS[0]} to {PUBLIC_JOBS[1]}, at the same rate)",
        ("finding", "thesis", "ours", "published points"),
        tuple(rows),
    )


def _factor(worse: float, better: float) -> str:
    return "-" if isnan(worse / better) else f"{worse / better:.2f}"


def _steady_claim(outcomes: Outcomes) -> Iterator[tuple[object, ...]]:
    """LAS over max-min at 5.6 jobs/h, where both were run in steady state."""
    found = [one for one in REFERENCES if one.case.jobs_per_hour == 5.6 and one.case in outcomes]
    if len(found) == 2:
        las, aware = found
        finding = f"JCT of LAS over max-min, single-GPU, jobs {PUBLIC_JOBS[0]} to {PUBLIC_JOBS[1]}"
        printed = _factor(las.printed_hours or nan, aware.printed_hours or nan)
        yield finding, "3.5", _factor(las.ours(outcomes), aware.ours(outcomes)), printed


def tables(quick: bool) -> list[Table]:
    """All tables; nothing where the data are absent."""
    if not DATA.is_dir():
        print(MISSING)
        return []
    scope = QUICK if quick else FULL
    cases = [one.case for one in references(scope)] + [one.case for one in points(scope)]
    outcomes = study(cases)
    found: dict[Discipline, Growth] = {"fairness": growth("fairness"), "fifo": growth("fifo")}
    return [
        references_table(scope, outcomes),
        claims_table(scope, outcomes, found),
        points_table(scope, outcomes),
        hierarchical_table(found),
    ]
