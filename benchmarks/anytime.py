"""How good the plan of ``auto`` is after a few CPU seconds, on 60 instances.

Every instance is planned once in a process of its own whose clocks count CPU seconds, so that a
loaded machine measures the same. The primal integral is the mean over the time of
(cost - best) / cost, where best is the least cost known of the instance, and 1 before the first
plan; the dual integral is that of (best - bound) / best (cf. Berthold, Measuring the impact of
primal heuristics, Operations Research Letters 2013). A gap is (cost - bound) / cost as the answer
has it: to the bound on the plan's class. ``results/anytime-before.csv`` was measured in the same
way with the portfolio of fixed shares, as it was before this benchmark.
"""

import csv
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure

from benchmarks.report import FIGURES, RESULTS, Table
from stagewright.formulations.forms.answers import Limits, Progress
from stagewright.formulations.plans.memory import least_state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.machines.cluster import Cluster, Link, load_cluster, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost, load_model
from stagewright.solvers.planning import plan

EXAMPLES = RESULTS.parents[1] / "examples"
PROFILES = (
    "bert-48", "bert-large", "inception-v3", "resnet152", "transformer", "vgg19", "xlnet-large",
)  # fmt: skip
SHAPES = ((1, 4), (2, 4), (1, 8), (4, 4), (8, 4), (16, 8))
SECONDS = 10.0
TIMES = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
COLUMNS = (
    "instance", "layers", "devices", "M", "cost s", "bound s", "primal integral", "dual integral",
    *(f"gap at {seconds:g} s" for seconds in TIMES),
)  # fmt: skip
MEASURED, GAPS = COLUMNS.index("primal integral"), len(COLUMNS) - len(TIMES)
Rows = dict[str, list[str]]
LARGE = (("bert-large", 64), ("resnet152", 64), ("bert-48", 128), ("inception-v3", 128))
DRAWN = 20


@cache
def instances() -> dict[str, PipelineProblem]:
    """Profiled models on servers of V100s, in ample and in tight memory, and drawn ones."""
    found = {}
    for i, profile in enumerate(PROFILES):
        for j in range(4):
            servers, devices = SHAPES[(2 * i + j) % len(SHAPES)]
            count = (8, 16, 8, 32)[(i + j) % 4]
            problem = PipelineProblem(profiled(profile), servers_of(servers, devices), count)
            found[f"{profile} {servers}x{devices}"] = problem
        servers, devices = SHAPES[i % 5]
        problem = PipelineProblem(profiled(profile), servers_of(servers, devices), 8)
        found[f"{profile} {servers}x{devices} tight"] = tight(problem, 1.3)
    cluster = load_cluster(EXAMPLES / "clusters" / "dgx1.json")
    found["xlnet-large dgx1"] = PipelineProblem(profiled("xlnet-large"), cluster, 8)
    for profile, servers in LARGE:
        found[f"{profile} {servers}x8"] = PipelineProblem(
            profiled(profile), servers_of(servers, 8), 32
        )
    for seed in range(DRAWN):
        found[f"drawn {seed}"] = drawn(seed)
    return found


def drawn(seed: int) -> PipelineProblem:
    """A random model on random servers, half of them in tight memory."""
    rng = np.random.default_rng([seed, 2013])
    count, samples = int(rng.integers(6, 65)), 2 ** int(rng.integers(0, 6))
    spread, total = rng.choice([0.1, 0.5, 1.0]), 0.02 * 10 ** rng.uniform(0, 1)
    forward = rng.lognormal(0, spread, count)
    forward *= total / forward.sum()
    parameters = rng.lognormal(0, rng.choice([0.1, 1.0]), count)
    parameters *= 10 ** rng.uniform(8, 9.7) / parameters.sum()
    outputs = rng.lognormal(0, rng.choice([0.1, 1.0]), count) * 10 ** rng.uniform(6, 8)
    saved = outputs * rng.uniform(2, 10)
    layers = tuple(
        Layer(f"l{i}", float(parameters[i]), (LayerCost(
            samples, float(forward[i]), float(saved[i]), float(outputs[i]),
            backward_seconds=float(forward[i] * rng.uniform(1.8, 2.2)),
        ),))
        for i in range(count)
    )  # fmt: skip
    chain = Chain(f"drawn {seed}", "drawn", samples, layers)
    servers, devices = int(rng.choice([1, 2, 4, 8, 16])), int(rng.choice([4, 8]))
    cluster = servers_of(servers, devices, 10 ** rng.uniform(9.7, 10.7), memory_bytes=1e12)
    problem = PipelineProblem(chain, cluster, int(rng.choice([4, 8, 16, 32])))
    return tight(problem, rng.uniform(1.2, 2.0)) if seed % 2 else problem


def tight(problem: PipelineProblem, slack: float) -> PipelineProblem:
    """The problem in ``slack`` times the memory that equal shares of one microbatch take."""
    states = problem.chain.parameter_bytes * least_state_factor(problem)
    needs = states + problem.saved_per_layer(1)
    used = min(len(problem.cluster), len(problem.chain))
    limit = slack * max(float(needs.max()), float(needs.sum()) / used)
    return PipelineProblem(problem.chain, problem.cluster, problem.microbatches, limit)


@cache
def profiled(name: str) -> Chain:
    return load_model(EXAMPLES / "profiles" / f"{name}.v100.json")


def servers_of(
    servers: int, devices: int, inter: float = 12.5e9, memory_bytes: float = 16e9
) -> Cluster:
    links = Link(130e9, 1e-6), Link(inter, 5e-6)
    return uniform_servers(servers, devices, *links, memory_bytes=memory_bytes)


Step = tuple[float, float | None, float]
"""CPU seconds, the cost of the best plan so far, and the bound."""


@dataclass(frozen=True, slots=True)
class Course:
    """The steps of a planner on an instance."""

    steps: tuple[Step, ...]

    def at(self, seconds: float) -> tuple[float, float]:
        """The cost (inf before the first plan) and the bound after so many CPU seconds."""
        known = [step for step in self.steps if step[0] <= seconds]
        _, cost, bound = known[-1] if known else (0.0, None, 0.0)
        return (math.inf if cost is None else cost), bound

    def gap(self, seconds: float) -> float:
        """(cost - bound) / cost after so many CPU seconds; 1 before the first plan."""
        cost, bound = self.at(seconds)
        return max(0.0, 1 - bound / cost)

    def integrals(self, best: float) -> tuple[float, float]:
        """The primal and the dual integral, over the time limit."""
        times = [0.0, *(step[0] for step in self.steps if step[0] < SECONDS), SECONDS]
        primal = dual = 0.0
        for begin, end in pairwise(times):
            cost, bound = self.at(begin)
            primal += (end - begin) * max(0.0, 1 - best / cost)
            dual += (end - begin) * max(0.0, 1 - bound / best)
        return primal / SECONDS, dual / SECONDS


def on_cpu_clock(module: str, call: str) -> str:
    """What a call of a benchmark prints in a process of its own whose clocks count CPU seconds."""
    program = (
        "import time; time.monotonic = time.perf_counter = time.process_time\n"
        f"import benchmarks.{module} as asked; asked.{call}"
    )
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def course(name: str, planner: str, seconds: float) -> Course:
    """The course of a planner on an instance, in a process of its own."""
    said = on_cpu_clock("anytime", f"child({name!r}, {planner!r}, {seconds})")
    return Course(tuple(tuple(step) for step in json.loads(said)))


def child(name: str, planner: str, seconds: float) -> None:
    """Write the steps of a planner as JSON; the arguments are those of :func:`course`."""
    load_kernels()
    print(json.dumps(steps_of(instances()[name], planner, seconds)))


def load_kernels() -> None:
    """Plan a small problem."""
    plan(PipelineProblem(profiled("vgg19"), servers_of(1, 2), 2), "auto", Limits(0.3))


def steps_of(problem: PipelineProblem, planner: str, seconds: float) -> list[Step]:
    """The steps of a planner in this process."""
    steps: list[Step] = []
    began = time.monotonic()

    def note(step: Progress) -> None:
        if not step.doing:
            steps.append((time.monotonic() - began, step.objective, step.bound))

    result = plan(problem, planner, Limits(seconds), note)
    steps.append((time.monotonic() - began, result.cost, result.bound or 0.0))
    return steps


def tables(quick: bool) -> Iterator[Table]:
    """Gaps of every instance over the time, those of before, and the two side by side."""
    names = [*instances()][: 2 if quick else None]
    before = _read("anytime-before")
    courses = {name: course(name, "auto", 1.0 if quick else SECONDS) for name in names}
    now = table_of("anytime", "The portfolio in turns", courses, before)
    yield now
    rows = {row[0]: [str(cell) for cell in row] for row in now.rows}
    yield summary(before, rows)
    if not quick:
        draw(before, rows)


def table_of(name: str, title: str, courses: dict[str, Course], known: Rows) -> Table:
    """A row for every instance; ``known`` are rows of another run, whose costs count too."""
    rows = []
    for instance, one in courses.items():
        problem, (cost, bound) = instances()[instance], one.at(math.inf)
        other = known[instance][COLUMNS.index("cost s")] if instance in known else math.inf
        best = min(cost, float(other))
        primal, dual = one.integrals(best)
        rows.append((
            instance, len(problem.chain), len(problem.cluster), problem.microbatches,
            f"{cost:.6g}", f"{bound:.6g}", f"{100 * primal:.2f}", f"{100 * dual:.2f}",
            *(f"{100 * one.gap(seconds):.2f}" for seconds in TIMES),
        ))  # fmt: skip
    return Table(name, f"{title}: {SECONDS:g} CPU s on each instance", COLUMNS, tuple(rows))


def summary(before: Rows, now: Rows) -> Table:
    """Medians, means and the worst of both runs, on the instances of both."""
    rows, both = [], [name for name in now if name in before]
    for name, run in (("before", before), ("now", now)):
        values = np.array([[float(cell) for cell in run[one][MEASURED:]] for one in both])
        for what, cells in (
            ("median", np.median(values, axis=0)),
            ("mean", values.mean(axis=0)),
            ("worst", values.max(axis=0)),
        ):
            rows.append((name, what, *(f"{cell:.1f}" for cell in cells)))
    title = f"{len(both)} instances, before and now, in percent"
    return Table("anytime-summary", title, ("portfolio", "of all", *COLUMNS[MEASURED:]), (*rows,))


def draw(before: Rows, now: Rows) -> None:
    """Draw median and worst gaps over CPU time."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, what, share in zip(
        figure.subplots(1, 2), ("median", "worst"), (50, 100), strict=True
    ):
        for name, run, style in (("before", before, "--"), ("now", now, "-")):
            both = [one for one in now if one in before]
            gaps = np.array([[float(cell) for cell in run[one][GAPS:]] for one in both])
            axes.plot(TIMES, np.percentile(gaps, share, axis=0), f"o{style}", label=name)
        axes.set(xscale="log", xlabel="CPU s", ylabel="gap, %", title=what, ylim=0)
        axes.set_xticks(TIMES, [f"{one:g}" for one in TIMES])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(FIGURES / "anytime.png", dpi=100)


def _read(name: str) -> Rows:
    """The rows of a table of results by instance."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
        rows = csv.reader(line for line in file if not line.startswith("#"))
        return {row[0]: row for row in rows if row[0] != COLUMNS[0]}
