"""Job shops of the literature: Stagewright, CP-SAT directly, and PyJobShop, side by side.

The files are Fisher and Thompson's (1963) and Lawrence's (1984) instances; where they are not at
hand nothing runs. ``python -m benchmarks jobshop``.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from ortools.sat.python import cp_model
from rich.progress import track

from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.jobshop import JobShop
from stagewright.formulations.pipelines.jobshop_text import parse_jobshop
from stagewright.solvers.pipelines.jobshop import solve_jobshop

DATA = Path(__file__).parents[2] / "shared" / "data" / "jobshop"
MISSING = f"skipped: the instances are not in {Path(*DATA.parts[-3:])} beside the checkout"
LIMITS = Limits(seconds=60, threads=2, seed=0)


def read(name: str) -> JobShop:
    """The instance of that name."""
    path = DATA / f"{name}.txt"
    return parse_jobshop(path.read_text(), path.name)


SPEC = BenchSpec(
    "jobshop", read, ("ft06", "la01", "ft10", "ft20", *(f"la{i:02d}" for i in range(2, 21)))
)


@dataclass(frozen=True, slots=True)
class Run:
    """What a contender found, and in which time."""

    makespan: int | None
    bound: int
    seconds: float

    @property
    def time(self) -> str:
        """Seconds to the proof; in brackets if there is none."""
        proved = self.makespan == self.bound
        return f"{self.seconds:.2f}" if proved else f"({self.seconds:.0f}, not proved)"

    @property
    def answer(self) -> str:
        """The optimum alone, or makespan and bound."""
        proved = self.makespan == self.bound
        return str(self.makespan) if proved else f"{self.makespan}, bound {self.bound}"


def stagewright(shop: JobShop, limits: Limits) -> Run:
    began = perf_counter()
    result = solve_jobshop(shop, limits)
    return Run(result.cost, result.bound, perf_counter() - began)


def pyjobshop(shop: JobShop, limits: Limits) -> Run:
    from pyjobshop import Model  # a development dependency

    began = perf_counter()
    model = Model()
    machines = {k: model.add_machine() for k in {k for job in shop.jobs for k, _ in job}}
    for steps in shop.jobs:
        job = model.add_job()
        tasks = [model.add_task(job) for _ in steps]
        for task, (k, duration) in zip(tasks, steps, strict=True):
            model.add_mode(task, machines[k], duration)
        for one, other in pairwise(tasks):
            model.add_end_before_start(one, other)
    result = model.solve(
        "ortools",
        time_limit=limits.seconds,
        display=False,
        num_workers=limits.threads,
        random_seed=limits.seed,
    )
    found = result.best.tasks
    makespan = max(task.end for task in found) if found else None
    return Run(makespan, round(result.lower_bound), perf_counter() - began)


def direct(shop: JobShop, limits: Limits) -> Run:
    """The textbook model, with CP-SAT's own choice of searches."""
    began = perf_counter()
    model = cp_model.CpModel()
    makespan = model.new_int_var(0, shop.total, "")
    machines: dict[int, list[cp_model.IntervalVar]] = {}
    for job in shop.jobs:
        starts = [model.new_int_var(0, shop.total, "") for _ in job]
        for start, (k, duration) in zip(starts, job, strict=True):
            interval = model.new_fixed_size_interval_var(start, duration, "")
            machines.setdefault(k, []).append(interval)
        for (start, following), (_, duration) in zip(pairwise(starts), job[:-1], strict=True):
            model.add(following >= start + duration)
        model.add(makespan >= starts[-1] + job[-1][1])
    for intervals in machines.values():
        model.add_no_overlap(intervals)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = limits.threads
    solver.parameters.random_seed = limits.seed
    solver.parameters.max_time_in_seconds = limits.seconds
    solver.solve(model)
    found = round(solver.objective_value) if solver.response_proto.solution else None
    return Run(found, round(solver.best_objective_bound), perf_counter() - began)


CONTENDERS: dict[str, Callable[[JobShop, Limits], Run]] = {
    "Stagewright": stagewright,
    "CP-SAT directly": direct,
    "PyJobShop": pyjobshop,
}


def tables(quick: bool) -> list[Table]:
    """Seconds to the proof, and answers."""
    if not DATA.is_dir():
        print(MISSING)
        return []
    with (DATA / "optima.csv").open() as file:
        optima = {row["name"]: int(row["optimum"]) for row in csv.DictReader(file)}
    names = SPEC.cases(quick)
    runs = {
        name: [contend(SPEC.build(name), LIMITS) for contend in CONTENDERS.values()]
        for name in track(names, "job shops")
    }
    totals = [f"{sum(runs[name][i].seconds for name in names):.1f}" for i in range(len(CONTENDERS))]
    title = f"{LIMITS.threads} threads, seed {LIMITS.seed}, limit {LIMITS.seconds:g} s"
    times = [(name, *(run.time for run in runs[name])) for name in names]
    answers = [(name, optima[name], *(run.answer for run in runs[name])) for name in names]
    return [
        Table(
            "jobshop-time",
            f"Seconds until the optimum is proved; {title}",
            ("instance", *CONTENDERS),
            (*times, ("all", *totals)),
        ),
        Table(
            "jobshop-quality",
            f"Makespans, and bounds where they differ; {title}",
            ("instance", "optimum", *CONTENDERS),
            tuple(answers),
        ),
    ]
