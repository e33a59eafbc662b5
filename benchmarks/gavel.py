"""Thesis section 5.7: policies in simulated clusters, beside the thesis and its public code.

The printed points are averages of jobs 4000 to 5000. Simulations as long as that are in the table
``gavel-published``; the sweeps measure earlier jobs, so that at loads which a policy cannot sustain
the queue, and with it every factor, is smaller here. How cases are run is in ``gavel_runs.py``.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from statistics import fmean

import numpy as np

from benchmarks import gavel_figures
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
    return f"{first} to {end}, {case.kind}-GPU, {case.jobs_per_hour:g} jobs/h"


# --- Completion times by load: figures 5.9 to 5.11, FIFO -----------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A policy in a figure, and its name in the published points."""

    label: str
    policy: str
    published: str
    space_sharing: bool = False


LAS = Line("LAS", "las", "max_min_fairness")
MAX_MIN = Line("max-min", "max-min", "max_min_fairness_perf")
MAX_MIN_SHARED = Line("max-min, space sharing", "max-min", "max_min_fairness_packed", True)
GANDIVA = Line("Gandiva", "gandiva", "gandiva", True)
ALLOX = Line("AlloX", "allox", "allox")
FAIR_AGNOSTIC = Line(
    "finish-time fairness, agnostic", "finish-time-fairness-agnostic", "finish_time_fairness"
)
FAIR = Line("finish-time fairness", "finish-time-fairness", "finish_time_fairness_perf")
FIFO_AGNOSTIC = Line("FIFO, agnostic", "fifo-agnostic", "fifo")
FIFO = Line("FIFO", "fifo", "fifo_perf")
FIFO_SHARED = Line("FIFO, space sharing", "fifo", "fifo_packed", True)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Policies at several input rates."""

    name: str
    title: str
    kind: Kind
    lines: tuple[Line, ...]
    rates: tuple[float, ...]
    jobs: tuple[int, int]
    fairness: bool = False

    @property
    def heading(self) -> str:
        """The title with the jobs that are measured."""
        return f"{self.title}, jobs {self.jobs[0]} to {self.jobs[1]}"

    def case(self, line: Line, rate: float) -> Case:
        """The simulation behind a point."""
        return Case(line.policy, line.space_sharing, rate, self.jobs, self.kind)

    def cases(self) -> list[Case]:
        """All of them."""
        return [self.case(line, rate) for rate in self.rates for line in self.lines]

    def points(self, line: Line, outcomes: Outcomes) -> list[float]:
        """Average completion time in hours at each rate."""
        return [outcomes[self.case(line, rate)].mean_hours for rate in self.rates]

    def published(self, line: Line, metric: str = "avg_jct_hours") -> dict[float, float]:
        """Printed points by rate."""
        return published_points().get((f"{self.kind}_gpu", metric, line.published), {})


def sweeps(scope: Scope) -> tuple[Sweep, ...]:
    single, multi = scope.single_jobs, scope.multi_jobs
    return (
        Sweep("gavel-figure9", "Figure 5.9, single-GPU jobs", "single",
              (LAS, MAX_MIN, MAX_MIN_SHARED, GANDIVA, ALLOX), scope.single_rates, single),
        Sweep("gavel-figure10", "Figure 5.10, multi-GPU jobs", "multi",
              (LAS, MAX_MIN, MAX_MIN_SHARED, GANDIVA), scope.multi_rates, multi),
        Sweep("gavel-figure11", "Figure 5.11, multi-GPU jobs", "multi",
              (FAIR_AGNOSTIC, FAIR), scope.multi_rates, multi, fairness=True),
        Sweep("gavel-fifo-single", "FIFO, single-GPU jobs", "single",
              (FIFO_AGNOSTIC, FIFO, FIFO_SHARED), scope.fifo_single_rates, single),
        Sweep("gavel-fifo-multi", "FIFO, multi-GPU jobs", "multi",
              (FIFO_AGNOSTIC, FIFO, FIFO_SHARED), scope.fifo_multi_rates, multi),
    )  # fmt: skip


@cache
def published_points() -> dict[tuple[str, str, str], dict[float, float]]:
    """By trace, metric and policy: values by jobs per hour."""
    found: dict[tuple[str, str, str], dict[float, float]] = {}
    with (DATA / "published_jct_from_notebooks.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            points = found.setdefault((row["trace"], row["metric"], row["policy"]), {})
            points[float(row["input_job_rate_per_hr"])] = float(row["value"])
    return found


def sweep_table(sweep: Sweep, outcomes: Outcomes) -> Table:
    """Average completion times, and rho where that is the objective; printed ones in brackets."""
    rows = []
    for rate in sweep.rates:
        found = {line: outcomes[sweep.case(line, rate)] for line in sweep.lines}
        cells = [_beside(one.mean_hours, sweep.published(line).get(rate), 1)
                 for line, one in found.items()]  # fmt: skip
        if sweep.fairness:
            cells += [
                _beside(fmean(one.fairness), sweep.published(line, "ftf_rho_mean").get(rate), 2)
                for line, one in found.items()
            ]
        rows.append((f"{rate:g}", *cells))
    labels = [line.label for line in sweep.lines]
    first, end = sweep.jobs
    return Table(
        sweep.name,
        f"{sweep.title}: average JCT in hours of jobs {first} to {end} (printed: of jobs "
        f"{PUBLIC_JOBS[0]} to {PUBLIC_JOBS[1]})",
        ("jobs/h", *labels, *(f"mean rho, {label}" for label in labels if sweep.fairness)),
        tuple(rows),
    )


def _beside(ours: float, printed: float | None, digits: int) -> str:
    return f"{ours:.{digits}f} ({'-' if printed is None else f'{printed:.{digits}f}'})"


# --- Makespan ------------------------------------------------------------------------------------

STATIC = (
    FIFO_AGNOSTIC,
    Line("Gandiva", "gandiva", "Gandiva", True),
    Line("makespan", "makespan", "Gavel"),
    Line("makespan, space sharing", "makespan", "Gavel w/ SS", True),
)
PRINTED_MAKESPAN: dict[Line, dict[float, float]] = {
    FIFO_AGNOSTIC: {100: 182.32, 300: 295.56, 500: 426.58},
    STATIC[1]: {100: 166.61, 300: 199.87, 500: 263.87},
    STATIC[2]: {100: 161.16, 300: 161.16, 500: 169.42},
    STATIC[3]: {100: 163.61, 300: 161.17, 500: 168.13},
}
"""Hours, by jobs: output of the public code's ``makespan.ipynb``, for seed 1."""


def static_case(line: Line, jobs: int) -> Case:
    return Case(line.policy, line.space_sharing, None, (0, jobs), "multi")


def static_cases(scope: Scope) -> list[Case]:
    return [static_case(line, jobs) for jobs in scope.static_jobs for line in STATIC]


def makespan_table(scope: Scope, outcomes: Outcomes) -> Table:
    """Makespans of static traces."""
    rows = []
    for jobs in scope.static_jobs:
        found = [
            (outcomes[static_case(line, jobs)].makespan_hours, PRINTED_MAKESPAN[line].get(jobs))
            for line in STATIC
        ]
        rows.append((jobs, *(_beside(ours, printed, 1) for ours, printed in found)))
    return Table(
        "gavel-makespan",
        "Section 5.7.3: makespan in hours of multi-GPU jobs that all come at once (printed: other "
        "jobs, of another seed)",
        ("jobs", *(line.label for line in STATIC)),
        tuple(rows),
    )


# --- Priorities and cost -------------------------------------------------------------------------


def priority_cases(scope: Scope) -> dict[str, Case]:
    rate, jobs = scope.single_rates[-1], scope.single_jobs
    return {
        line.label: Case(line.policy, False, rate, jobs, "priorities") for line in (LAS, MAX_MIN)
    }


def priorities_table(scope: Scope, outcomes: Outcomes) -> Table:
    """Average completion times by priority."""
    rows = tuple(
        (label, outcomes[case].mean_hours_of(HIGH_PRIORITY), outcomes[case].mean_hours_of(1.0))
        for label, case in priority_cases(scope).items()
    )
    return Table(
        "gavel-priorities",
        f"Section 5.7.3, LAS with priorities: average JCT in hours of single-GPU jobs "
        f"{scope.single_jobs[0]} to {scope.single_jobs[1]} at {scope.single_rates[-1]:g} jobs/h",
        ("policy", "jobs of weight 5", "jobs of weight 1"),
        rows,
    )


COST_POLICIES = ("max-throughput", "min-cost", "min-cost-slo")
COST_RATE = 0.4


def cost_cases(scope: Scope) -> dict[str, Case]:
    return {
        policy: Case(policy, False, COST_RATE, (0, scope.cost_jobs), "cost", pool=PRICED)
        for policy in COST_POLICIES
    }


def cost_table(scope: Scope, outcomes: Outcomes) -> Table:
    """Dollars and missed SLOs."""
    found = {policy: outcomes[case] for policy, case in cost_cases(scope).items()}
    most = found["max-throughput"].dollars or 0.0
    rows = tuple(
        (
            policy,
            f"{one.dollars or 0.0:.0f}",
            most / (one.dollars or np.inf),
            f"{one.slo_violations} ({percent(one.slo_violations / scope.cost_jobs)})",
            one.mean_hours,
        )
        for policy, one in found.items()
    )
    return Table(
        "gavel-cost",
        f"Section 5.7.3, cost: {scope.cost_jobs} jobs of ResNet-50 and A3C at {COST_RATE:g} jobs/h "
        f"on {PRICED}",
        ("policy", "dollars", "cheaper by", "SLOs missed", "average JCT, h"),
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


# --- Rounds: figure 5.15, and table 5.3 ----------------------------------------------------------

ROUND_SECONDS = (180.0, 360.0, 720.0, 1440.0, 2880.0)


def round_case(scope: Scope, rate: float, seconds: float | None) -> Case:
    """Max-min with rounds of so many seconds; None is the ideal."""
    case = Case("max-min", jobs_per_hour=rate, jobs=scope.single_jobs)
    return replace(case, ideal=True) if seconds is None else replace(case, round_seconds=seconds)


def round_cases(scope: Scope) -> list[Case]:
    return [
        round_case(scope, rate, seconds)
        for rate in scope.round_rates
        for seconds in (None, *ROUND_SECONDS)
    ]


def rounds_table(scope: Scope, outcomes: Outcomes) -> Table:
    """Average completion time by length of a round."""
    rows = []
    for rate in scope.round_rates:
        ideal = outcomes[round_case(scope, rate, None)].mean_hours
        found = [outcomes[round_case(scope, rate, one)].mean_hours for one in ROUND_SECONDS]
        cells = (f"{hours:.2f} ({hours / ideal - 1:+.1%})" for hours in found)
        rows.append((f"{rate:g}", f"{ideal:.2f}", *cells))
    first, end = scope.single_jobs
    return Table(
        "gavel-figure15",
        f"Figure 5.15: average JCT in hours of single-GPU jobs {first} to {end} under max-min, by "
        "length of a round (over the ideal)",
        ("jobs/h", "ideal", *(f"{seconds:g} s" for seconds in ROUND_SECONDS)),
        tuple(rows),
    )


PHYSICAL_CASES = {
    "max-min": Case("max-min", trace="max_min_fairness.trace", pool=PHYSICAL),
    "las": Case("las", trace="max_min_fairness.trace", pool=PHYSICAL),
    "makespan": Case("makespan", trace="minimize_makespan.trace", pool=PHYSICAL),
    "gandiva": Case("gandiva", True, trace="minimize_makespan.trace", pool=PHYSICAL),
}


def physical_table(outcomes: Outcomes) -> Table:
    """Table 5.3's simulated column on the traces that are public."""
    printed = {"max-min": 3.7, "las": 5.4, "makespan": 17.6, "gandiva": 22.1}
    rows = []
    for policy, case in PHYSICAL_CASES.items():
        continuous = policy in ("max-min", "las")
        one = outcomes[case]
        ours = one.mean_hours if continuous else one.makespan_hours
        kind = ("continuous", "average JCT") if continuous else ("static", "makespan")
        rows.append((*kind, policy, f"{printed[policy]:.1f}", f"{ours:.2f}"))
    return Table(
        "gavel-table53",
        "Table 5.3 in simulation, on the public traces of this shape: 8 V100, 16 P100, 24 K80",
        ("trace", "measure", "policy", "thesis, h", "ours, h"),
        tuple(rows),
    )


# --- What the thesis claims ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """A factor that the thesis states, ours, and that of the published points where there are."""

    finding: str
    printed: str
    ours: str
    points: str = ""


def _between(sweep: Sweep, worse: Line, better: Line, outcomes: Outcomes) -> tuple[str, str]:
    """The factor of average completion time at the highest rate: ours, and the printed points'."""
    rate = sweep.rates[-1]
    ours = (outcomes[sweep.case(line, rate)].mean_hours for line in (worse, better))
    points = (sweep.published(line).get(rate, np.nan) for line in (worse, better))
    return _factor(*ours), _factor(*points)


def _factor(worse: float, better: float) -> str:
    return "-" if np.isnan(worse / better) else f"{worse / better:.2f}"


def claims(scope: Scope, outcomes: Outcomes) -> list[Claim]:
    """The sentences of section 5.7 that are a number."""
    single, multi, fair, fifo, fifo_multi = sweeps(scope)
    return [
        Claim("JCT of LAS over max-min, single-GPU", "3.5",
              *_between(single, LAS, MAX_MIN, outcomes)),
        *_steady_claims(outcomes),
        Claim("JCT of LAS over max-min, multi-GPU", "2.2",
              *_between(multi, LAS, MAX_MIN, outcomes)),
        Claim("JCT of Gandiva over max-min with space sharing, single-GPU", "2.2",
              *_between(single, GANDIVA, MAX_MIN_SHARED, outcomes)),
        Claim("JCT of Gandiva over max-min with space sharing, multi-GPU", "2.2",
              *_between(multi, GANDIVA, MAX_MIN_SHARED, outcomes)),
        Claim("JCT of finish-time fairness, agnostic over aware", "3",
              *_between(fair, FAIR_AGNOSTIC, FAIR, outcomes)),
        Claim("mean rho of finish-time fairness, agnostic over aware", "2.8",
              *_rho(fair, outcomes)),
        Claim("JCT of FIFO, agnostic over aware, single-GPU", "2.7",
              *_between(fifo, FIFO_AGNOSTIC, FIFO, outcomes)),
        Claim("JCT of FIFO, agnostic over aware with space sharing, single-GPU", "3.8",
              *_between(fifo, FIFO_AGNOSTIC, FIFO_SHARED, outcomes)),
        Claim("JCT of FIFO without space sharing over with, single-GPU", "1.4",
              *_between(fifo, FIFO, FIFO_SHARED, outcomes)),
        Claim("JCT of FIFO without space sharing over with, multi-GPU", "1.1",
              *_between(fifo_multi, FIFO, FIFO_SHARED, outcomes)),
        *_makespan_claims(scope, outcomes),
        *_priority_claims(scope, outcomes),
        *_cost_claims(scope, outcomes),
        *_physical_claims(outcomes),
    ]  # fmt: skip


def _steady_claims(outcomes: Outcomes) -> list[Claim]:
    """LAS and max-min at 5.6 jobs/h, where both were run in steady state."""
    found = {
        one.case.policy: one
        for one in REFERENCES
        if one.case.jobs_per_hour == 5.6 and one.case in outcomes
    }
    if found.keys() != {"las", "max-min"}:
        return []
    las, aware = found["las"], found["max-min"]
    return [
        Claim(
            f"the same, jobs {PUBLIC_JOBS[0]} to {PUBLIC_JOBS[1]}",
            "3.5",
            _factor(las.ours(outcomes), aware.ours(outcomes)),
            _factor(las.printed_hours or np.nan, aware.printed_hours or np.nan),
        )
    ]


def _rho(sweep: Sweep, outcomes: Outcomes) -> tuple[str, str]:
    rate = sweep.rates[-1]
    ours = [fmean(outcomes[sweep.case(line, rate)].fairness) for line in sweep.lines]
    points = [sweep.published(line, "ftf_rho_mean").get(rate, np.nan) for line in sweep.lines]
    return _factor(ours[0], ours[1]), _factor(points[0], points[1])


def _makespan_claims(scope: Scope, outcomes: Outcomes) -> list[Claim]:
    jobs = scope.static_jobs[-1]
    fifo, gandiva, plain, shared = (
        (outcomes[static_case(line, jobs)].makespan_hours, PRINTED_MAKESPAN[line].get(jobs, np.nan))
        for line in STATIC
    )
    pairs = (
        ("FIFO over makespan", "2.5", fifo, plain),
        ("Gandiva over makespan", "1.4", gandiva, plain),
        ("makespan without space sharing over with", "1.08", plain, shared),
    )
    return [
        Claim(
            f"makespan of {jobs} jobs, {name}",
            printed,
            _factor(worse[0], better[0]),
            _factor(worse[1], better[1]),
        )
        for name, printed, worse, better in pairs
    ]


def _priority_claims(scope: Scope, outcomes: Outcomes) -> list[Claim]:
    las, aware = (outcomes[case] for case in priority_cases(scope).values())
    return [
        Claim(
            f"JCT of {name} priority jobs, LAS over max-min",
            printed,
            _factor(las.mean_hours_of(weight), aware.mean_hours_of(weight)),
        )
        for name, printed, weight in (("high", "1.5", HIGH_PRIORITY), ("low", "2.7", 1.0))
    ]


def _cost_claims(scope: Scope, outcomes: Outcomes) -> list[Claim]:
    fast, cheap, both = (outcomes[case] for case in cost_cases(scope).values())
    dollars = [one.dollars or np.nan for one in (fast, cheap, both)]
    return [
        Claim("cost of max-throughput over min-cost", "1.4", _factor(dollars[0], dollars[1])),
        Claim("cost of max-throughput over min-cost-slo", "1.2", _factor(dollars[0], dollars[2])),
        Claim(
            "SLOs missed, min-cost and min-cost-slo",
            "35%, 0%",
            ", ".join(percent(one.slo_violations / scope.cost_jobs) for one in (cheap, both)),
        ),
    ]


def _physical_claims(outcomes: Outcomes) -> list[Claim]:
    found = {policy: outcomes[case] for policy, case in PHYSICAL_CASES.items()}
    return [
        Claim(
            "table 5.3: JCT of LAS over max-min",
            "1.5",
            _factor(found["las"].mean_hours, found["max-min"].mean_hours),
        ),
        Claim(
            "table 5.3: makespan of Gandiva over makespan",
            "1.2",
            _factor(found["gandiva"].makespan_hours, found["makespan"].makespan_hours),
        ),
    ]


def claims_table(scope: Scope, outcomes: Outcomes, hierarchies: dict[Discipline, Growth]) -> Table:
    """What the thesis says, in one place."""
    last = hierarchies["fairness"]
    loss = 1 - float(last.partition[-1].sum() / last.ours[-1].sum())
    listed = [
        *claims(scope, outcomes),
        Claim("throughput lost by a static partition", "17%", percent(loss)),
    ]
    return Table(
        "gavel-claims",
        "Section 5.7 in factors, at the highest load of each sweep (published points: of jobs "
        f"{PUBLIC_JOBS[0]} to {PUBLIC_JOBS[1]}, at the same rate)",
        ("finding", "thesis", "ours", "published points"),
        tuple((one.finding, one.printed, one.ours, one.points) for one in listed),
    )


# --- All of it -----------------------------------------------------------------------------------


def cases(scope: Scope) -> list[Case]:
    """All that is simulated."""
    return [
        *(reference.case for reference in references(scope)),
        *(case for sweep in sweeps(scope) for case in sweep.cases()),
        *static_cases(scope),
        *priority_cases(scope).values(),
        *cost_cases(scope).values(),
        *round_cases(scope),
        *PHYSICAL_CASES.values(),
    ]


def draw(scope: Scope, outcomes: Outcomes, hierarchies: dict[Discipline, Growth]) -> None:
    """All pictures."""
    single, multi, fair, fifo, fifo_multi = sweeps(scope)
    completion = "job completion time, hours"
    for name, sweep, metric in (
        ("gavel-figure9", single, completion),
        ("gavel-figure10", multi, completion),
        ("gavel-figure11", fair, "finish-time fairness rho"),
    ):
        samples = _samples(sweep, outcomes)
        gavel_figures.by_load(name, sweep.heading, _curves(sweep, outcomes), samples, metric)
    gavel_figures.two_loads(
        "gavel-fifo", {one.heading: _curves(one, outcomes) for one in (fifo, fifo_multi)}
    )
    gavel_figures.makespans(_makespans(scope, outcomes))
    _draw_priorities(scope, outcomes)
    gavel_figures.cost(
        f"{scope.cost_jobs} jobs of ResNet-50 and A3C",
        {
            policy: (outcomes[case].dollars or 0.0, outcomes[case].slo_violations / scope.cost_jobs)
            for policy, case in cost_cases(scope).items()
        },
    )
    gavel_figures.hierarchies(
        {
            discipline: (shares(one.ours), one.ours.sum(axis=1), one.partition.sum(axis=1))
            for discipline, one in hierarchies.items()
        },
        JOBS_EACH,
        EVERY,
    )
    _draw_rounds(scope, outcomes)


def _makespans(scope: Scope, outcomes: Outcomes) -> gavel_figures.Curves:
    return {
        line.label: (
            {jobs: outcomes[static_case(line, jobs)].makespan_hours for jobs in scope.static_jobs},
            PRINTED_MAKESPAN[line],
        )
        for line in STATIC
    }


def _draw_priorities(scope: Scope, outcomes: Outcomes) -> None:
    samples: dict[str, dict[float, list[float]]] = {}
    for label, case in priority_cases(scope).items():
        found = outcomes[case]
        for hours, weight in zip(found.hours, found.weights, strict=True):
            samples.setdefault(label, {HIGH_PRIORITY: [], 1.0: []})[weight].append(hours)
    first, end = scope.single_jobs
    title = f"LAS with priorities, jobs {first} to {end} at {scope.single_rates[-1]:g} jobs/h"
    gavel_figures.priorities(title, samples)


def _draw_rounds(scope: Scope, outcomes: Outcomes) -> None:
    def found(rate: float, seconds: float | None) -> Outcome:
        return outcomes[round_case(scope, rate, seconds)]

    first, end = scope.single_jobs
    gavel_figures.rounds(
        f"jobs {first} to {end}",
        {
            rate: [found(rate, one).mean_hours for one in ROUND_SECONDS]
            for rate in scope.round_rates
        },
        ROUND_SECONDS,
        {rate: (found(rate, None).hours, found(rate, 360.0).hours) for rate in scope.round_rates},
    )


def _curves(sweep: Sweep, outcomes: Outcomes) -> gavel_figures.Curves:
    """By label: our points and the printed ones."""
    return {
        line.label: (
            dict(zip(sweep.rates, sweep.points(line, outcomes), strict=True)),
            sweep.published(line),
        )
        for line in sweep.lines
    }


def _samples(sweep: Sweep, outcomes: Outcomes) -> dict[str, Sequence[float]]:
    """By label: completion times, or rho where that is the objective, at the highest rate."""
    found = {line.label: outcomes[sweep.case(line, sweep.rates[-1])] for line in sweep.lines}
    return {label: one.fairness if sweep.fairness else one.hours for label, one in found.items()}


def tables(quick: bool) -> list[Table]:
    """All tables, and the pictures of a full run; nothing where the data are absent."""
    if not DATA.is_dir():
        print(MISSING)
        return []
    scope = QUICK if quick else FULL
    outcomes = study(cases(scope))
    found: dict[Discipline, Growth] = {"fairness": growth("fairness"), "fifo": growth("fifo")}
    if not quick:
        draw(scope, outcomes, found)
    return [
        references_table(scope, outcomes),
        claims_table(scope, outcomes, found),
        *(sweep_table(sweep, outcomes) for sweep in sweeps(scope)),
        makespan_table(scope, outcomes),
        priorities_table(scope, outcomes),
        cost_table(scope, outcomes),
        hierarchical_table(found),
        rounds_table(scope, outcomes),
        physical_table(outcomes),
    ]
