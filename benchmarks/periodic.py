"""The solvers of periodic planning: MadPipe's allocation, patterns, and the joint optimum.

An allocation is measured in a process of its own, so that its peak memory can be told. Kernels
are loaded before any clock starts. CPU seconds are those of the solvers' own processes too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise, product
from math import inf, isfinite
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeVar

import numpy as np
from rich.progress import track

from benchmarks.madpipe_grid import by_grid
from benchmarks.models import paper_model
from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.formulations.forms.answers import Limits, Status, silent
from stagewright.formulations.patterns.joint_patterns import JointPatterns, Placed
from stagewright.formulations.patterns.madpipe import StageAllocationProblem
from stagewright.formulations.patterns.one_f_one_b import least_period as one_f_one_b_period
from stagewright.formulations.patterns.one_f_one_b import pattern_load_bound, period_bound
from stagewright.formulations.patterns.pattern import PatternProblem
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.patterns.joint_patterns import JointAnswer, joint_optimum
from stagewright.solvers.patterns.madpipe import AllocationAnswer, least_period
from stagewright.solvers.patterns.pattern import PatternAnswer, best_pattern
from stagewright.solvers.planners.periodic.madpipe import plan_madpipe
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan
from stagewright.solvers.planners.steps.warm_up import compile_kernels

T = TypeVar("T")
Seconds = tuple[float, float]  # wall, CPU

IMAGE, BATCH = 1000, 8
MICROBATCHES = 32  # in an iteration; more than are ever in flight
LINK = Link(12e9)
SHORT = 2.0  # seconds up to which the median of RUNS is taken
RUNS = 3


# --- Instances -----------------------------------------------------------------------------------


def random_chain(layers: int, seed: int) -> Chain:
    """Layers of 5 to 50 ms forward; what they keep and hand on fades to a quarter on the way."""
    draw = np.random.default_rng(seed)
    found = []
    for i in range(layers):
        fade = 2.0 - 1.5 * (i + 0.5) / layers
        forward = float(draw.uniform(5e-3, 50e-3))
        cost = LayerCost(
            BATCH,
            forward,
            saved_bytes=fade * float(draw.uniform(1e8, 9e8)),
            output_bytes=fade * float(draw.uniform(2e7, 12e7)),
            backward_seconds=forward * float(draw.uniform(1.5, 2.5)),
        )
        found.append(Layer(f"layer{i}", float(draw.uniform(1e6, 4e7)), (cost,)))
    return Chain(f"random {layers}", "drawn", BATCH, tuple(found))


def merged(chain: Chain, count: int) -> Chain:
    """Neighbouring layers taken together, ``count`` of about the same time.

    For counts at which every share has a layer of its own.
    """
    costs = [layer.costs[0] for layer in chain.layers]
    until = np.cumsum([cost.forward_seconds + cost.total_backward_seconds for cost in costs])
    shares = until[-1] * np.arange(1, count) / count
    cuts = [0, *(int(np.abs(until - share).argmin()) + 1 for share in shares), len(chain)]
    layers = tuple(_as_one(chain.layers[start:stop]) for start, stop in pairwise(cuts))
    return replace(chain, layers=layers)


def _as_one(layers: Sequence[Layer]) -> Layer:
    costs = [layer.costs[0] for layer in layers]
    cost = LayerCost(
        BATCH,
        sum(cost.forward_seconds for cost in costs),
        sum(cost.saved_bytes for cost in costs),
        costs[-1].output_bytes,
        backward_seconds=sum(cost.total_backward_seconds for cost in costs),
    )
    parameters = sum(layer.parameter_bytes for layer in layers)
    return Layer(f"{layers[0].name}..{layers[-1].name}", parameters, (cost,))


@cache
def network(name: str) -> Chain:
    """A network on large images, analytic on a V100."""
    return paper_model(name, BATCH, image=IMAGE)


def tight_problem(chain: Chain, devices: int, share: float) -> PipelineProblem:
    """Equal devices that have together ``share`` times what one microbatch in flight needs."""
    static = 3 + chain.optimizer_bytes_per_parameter_byte
    saved = sum(layer.costs[0].saved_bytes for layer in chain.layers)
    needed = static * float(chain.parameter_bytes.sum()) + saved
    cluster = uniform_servers(1, devices, LINK, memory_bytes=share * needed / devices)
    return PipelineProblem(chain, cluster, MICROBATCHES)


def gigabytes(problem: PipelineProblem) -> str:
    """The memory of a device."""
    return f"{problem.memory_bytes[0] / 1e9:.1f}"


def allocation_of(problem: PipelineProblem, special: int | None) -> StageAllocationProblem:
    """A device to a group, the first of them special or none."""
    groups = tuple((v,) for v in range(len(problem.cluster)))
    return StageAllocationProblem(problem, groups, special)


# --- Clocks --------------------------------------------------------------------------------------


def timed(run: Callable[[], T]) -> tuple[T, Seconds]:
    """The answer, and the median of several runs where one is short."""
    answer, took = _once(run)
    every = [took]
    if took[0] < SHORT:
        every += [_once(run)[1] for _ in range(RUNS - 1)]
    wall, cpu = zip(*every, strict=True)
    return answer, (median(wall), median(cpu))


def _once(run: Callable[[], T]) -> tuple[T, Seconds]:
    began, worked = perf_counter(), _cpu_seconds()
    answer = run()
    return answer, (perf_counter() - began, _cpu_seconds() - worked)


def _cpu_seconds() -> float:
    """Of this process, and of those it waited for: CBC is one."""
    times = os.times()
    return process_time() + times.children_user + times.children_system


def peak_bytes() -> float:
    """The process's peak resident memory.

    Linux hands a parent's peak on to its children in ``ru_maxrss``, so ``VmHWM`` is read there.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return float(line.split()[1]) * 1024
    return float(getrusage(RUSAGE_SELF).ru_maxrss)


def shown(seconds: Seconds) -> str:
    """Wall seconds, and CPU seconds in brackets."""
    wall, cpu = seconds
    return f"{wall:.2f} ({cpu:.2f})"


def ratio(period: float | None, least: float) -> str:
    """A period over the least one."""
    return "-" if period is None or not isfinite(period) else f"{period / least:.3f}"


# --- MadPipe-DP ----------------------------------------------------------------------------------

ALLOCATION_LIMITS = Limits(seconds=60.0)
ALLOCATION_SHARE = 2.5
GRID_SIZE = 300  # layers x devices, up to which the grid takes less than half a minute
TARGETS = {50: "1 s, 2 GB", 200: "10 s, 2 GB"}  # up to so many layers
MODELS: tuple[str | int, ...] = (
    "resnet50", "resnet101", 50, "resnet152", "densenet121", 100, 200,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AllocationCase:
    """A network, or a random chain of so many layers, on so many devices."""

    model: str | int
    devices: int

    def build(self) -> PipelineProblem:
        """The planning problem, with little memory."""
        model = self.model
        chain = random_chain(model, seed=7) if isinstance(model, int) else network(model)
        return tight_problem(chain, self.devices, ALLOCATION_SHARE)

    def __str__(self) -> str:
        return "random" if isinstance(self.model, int) else self.model


ALLOCATIONS = BenchSpec(
    "periodic-allocation",
    AllocationCase.build,
    tuple(AllocationCase(model, devices) for model, devices in product(MODELS, (4, 8))),
    few=1,
)


@dataclass(frozen=True, slots=True)
class AllocationMeasured:
    """One case: seconds, the peak above what was there before, and periods in seconds.

    ``grid_expected`` is the period that the grid's answer claims, ``grid_allowed`` the least at
    which its stages fit by the exact program's count (None: at no period).
    """

    contiguous_seconds: Seconds
    special_seconds: Seconds
    peak_bytes: float
    contiguous_period: float
    special_period: float
    bound: float
    exact: bool
    grid_seconds: Seconds | None = None
    grid_expected: float | None = None
    grid_allowed: float | None = None


def measure(number: int) -> AllocationMeasured:
    """Case ``number`` in this process, with the kernels loaded."""
    compile_kernels("madpipe")
    problem = ALLOCATIONS.build(ALLOCATIONS.sweep[number])
    before = peak_bytes()

    def solved(special: int | None) -> tuple[AllocationAnswer, Seconds]:
        # A question of its own for every run, as it remembers its tables.
        return timed(lambda: least_period(allocation_of(problem, special), ALLOCATION_LIMITS))

    contiguous, contiguous_seconds = solved(None)
    special, special_seconds = solved(0)
    found = AllocationMeasured(
        contiguous_seconds, special_seconds, peak_bytes() - before, contiguous.period,
        special.period, special.bound, contiguous.exact and special.exact,
    )  # fmt: skip
    size = len(problem.chain) * len(problem.cluster)
    return with_grid(problem, found) if size <= GRID_SIZE else found


def with_grid(problem: PipelineProblem, found: AllocationMeasured) -> AllocationMeasured:
    """Besides the paper's own program, once."""
    answer, seconds = _once(lambda: by_grid(allocation_of(problem, 0)))
    if answer.stages is None:
        return replace(found, grid_seconds=seconds)
    return replace(
        found,
        grid_seconds=seconds,
        grid_expected=max(answer.target, answer.period),
        grid_allowed=allowed_seconds(allocation_of(problem, 0), answer.stages),
    )


def allowed_seconds(question: StageAllocationProblem, stages: Iterable[Stage]) -> float | None:
    """The least period of an allocation by the exact program's count; None if it never fits."""
    index = question.problem.cluster.index
    placed = [Placed(*stage.layers, index[stage.devices[0]], 0) for stage in stages]
    try:
        return question.evaluate(placed) * question.tick
    except InvalidPlan:
        return None


def measured(number: int) -> AllocationMeasured:
    """Case ``number`` in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.periodic", str(number)],
        cwd=Path(__file__).parents[1], check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    fields: dict[str, Any] = json.loads(done.stdout)
    return AllocationMeasured(**fields)


def allocation_tables(quick: bool) -> list[Table]:
    """Seconds and memory of MadPipe-DP; and what it, the grid, and contiguous plans reach."""
    times, quality = [], []
    for number, case in enumerate(track(ALLOCATIONS.cases(quick), "allocations")):
        got, problem = measured(number), ALLOCATIONS.build(case)
        layers = len(problem.chain)
        names = (str(case), f"{layers} x {case.devices}")
        times.append(
            (
                *names,
                next(target for most, target in TARGETS.items() if layers <= most),
                shown(got.contiguous_seconds),
                shown(got.special_seconds),
                f"{got.peak_bytes / 1e6:.0f}",
                shown(got.grid_seconds) if got.grid_seconds else "-",
            )
        )
        gap = 1 - got.bound / got.special_period
        quality.append(
            (
                *names,
                gigabytes(problem),
                got.special_period,
                "exact" if got.exact else f"{gap:.2%}",
                ratio(got.contiguous_period, got.special_period),
                ratio(got.grid_expected, got.special_period),
                ratio(got.grid_allowed, got.special_period),
            )
        )
    return [
        Table(
            "periodic-allocation-time",
            "MadPipe-DP: seconds and memory, one thread",
            ("model", "layers x devices", "target", "contiguous s (CPU)",
             "with a special device s (CPU)", "MB", "the paper's grid s (CPU)"),
            tuple(times),
        ),
        Table(
            "periodic-allocation-quality",
            "MadPipe-DP: periods that allocations allow",
            ("model", "layers x devices", "GB", "least period s", "gap", "contiguous / least",
             "the grid expects / least", "the grid's stages / least"),
            tuple(quality),
        ),
    ]  # fmt: skip


# --- Patterns ------------------------------------------------------------------------------------

PATTERN_LIMITS = Limits(seconds=15.0)
BACKENDS = ("auto", "highs", "pulp-cbc", "cp-sat")


@dataclass(frozen=True, slots=True)
class PatternCase:
    """The device of every stage; memory as in ``tight_problem``, stages are random layers."""

    devices: tuple[int, ...]
    share: float
    seed: int

    def build(self) -> PatternProblem:
        """The scheduling problem."""
        chain = random_chain(len(self.devices), self.seed)
        problem = tight_problem(chain, max(self.devices) + 1, self.share)
        names = [device.name for device in problem.cluster.devices]
        stages = [Stage((i, i + 1), (names[d],)) for i, d in enumerate(self.devices)]
        return pattern_problem(problem, stages)

    def __str__(self) -> str:
        return " ".join(map(str, self.devices))


PATTERNS = BenchSpec(
    "periodic-pattern",
    PatternCase.build,
    (
        PatternCase((0, 1, 0, 2), 3.0, 3),
        PatternCase((0, 1, 2, 0, 3), 3.0, 3),
        PatternCase((0, 1, 2, 3, 4, 0, 1), 2.5, 2),
        PatternCase((0, 1, 0, 2, 0, 3, 0, 4), 4.5, 2),
        PatternCase((0, 1, 0, 2, 3, 1, 4, 5, 0, 6), 4.5, 2),
        PatternCase((0, 1, 2, 3, 4, 5, 0, 6, 7, 0), 4.5, 3),
        PatternCase((0, 1, 2, 3, 2, 1, 0), 3.5, 2),
        PatternCase((0, 1, 2, 3, 2, 1, 0, 1, 2, 3), 3.5, 2),
        PatternCase((0, 1, 2, 3) * 2, 3.5, 3),
        PatternCase((0, 1, 2, 3) * 3, 3.5, 2),
        PatternCase((0, 1, 2, 3) * 3, 4.5, 3),
        PatternCase((0, 1, 2, 3) * 4, 4.5, 2),
    ),
    few=2,
)


@dataclass(frozen=True, slots=True)
class PatternOutcome:
    """What every backend answered, and how long it took."""

    case: PatternCase
    answers: dict[str, tuple[PatternAnswer, Seconds]]

    @property
    def least(self) -> float:
        """The least period that any backend found."""
        found = [answer.period for answer, _ in self.answers.values() if answer.period is not None]
        return min(found, default=inf)


def solve_patterns(case: PatternCase) -> PatternOutcome:
    """One case by every backend."""
    problem = PATTERNS.build(case)

    def solved(backend: str) -> tuple[PatternAnswer, Seconds]:
        return timed(lambda: best_pattern(problem, PATTERN_LIMITS, backend=backend))

    return PatternOutcome(case, {backend: solved(backend) for backend in BACKENDS})


def pattern_tables(quick: bool) -> list[Table]:
    """Seconds to the proof by backend; and periods over bounds."""
    for backend in BACKENDS:
        best_pattern(PATTERNS.build(PATTERNS.sweep[0]), PATTERN_LIMITS, backend=backend)  # loads it
    outcomes = [solve_patterns(case) for case in track(PATTERNS.cases(quick), "patterns")]
    return [
        Table(
            "periodic-pattern-time",
            f"Patterns: seconds (CPU) until the least period is proved, one thread, limit "
            f"{PATTERN_LIMITS.seconds:g} s; target: 5 s",
            ("devices of the stages", *BACKENDS),
            tuple((str(one.case), *map(_proof, one.answers.values())) for one in outcomes),
        ),
        Table(
            "periodic-pattern-quality",
            "Patterns: the period, and every backend's period over the lower bound it proved",
            ("devices of the stages", "least period s", "over the load",
             "over the memory of 1F1B*", *BACKENDS),
            tuple(_pattern_row(outcome) for outcome in outcomes),
        ),
    ]  # fmt: skip


def _proof(answered: tuple[PatternAnswer, Seconds]) -> str:
    answer, seconds = answered
    return shown(seconds) if answer.status is Status.OPTIMAL else f"no ({seconds[1]:.2f})"


def _pattern_row(outcome: PatternOutcome) -> tuple[object, ...]:
    problem = PATTERNS.build(outcome.case)
    return (
        str(outcome.case),
        outcome.least,
        ratio(outcome.least, pattern_load_bound(problem)),
        ratio(outcome.least, period_bound(problem)),
        *(ratio(answer.period, answer.bound) for answer, _ in outcome.answers.values()),
    )


# --- The joint optimum ---------------------------------------------------------------------------

JOINT_LIMITS = Limits(seconds=60.0)
PLANNER_LIMITS = Limits(seconds=20.0)
JOINT_DEVICES = 4
SETTLED = 10  # layers for which the target of 60 s holds


@dataclass(frozen=True, slots=True)
class JointCase:
    """ResNet-50 in so many layers, or a random chain by its seed; memory as in tight_problem."""

    layers: int
    share: float
    seed: int | None = None

    def build(self) -> PipelineProblem:
        """The planning problem on four devices."""
        if self.seed is None:
            chain = merged(network("resnet50"), self.layers)
        else:
            chain = random_chain(self.layers, self.seed)
        return tight_problem(chain, JOINT_DEVICES, self.share)

    def __str__(self) -> str:
        return "resnet50" if self.seed is None else f"random, seed {self.seed}"


JOINT = BenchSpec(
    "periodic-joint",
    JointCase.build,
    (
        *(JointCase(10, share) for share in (2.0, 2.5, 3.0, 4.0, 5.0)),
        *(JointCase(10, share, seed) for seed in (1, 2, 3, 4, 5) for share in (2.5, 4.0)),
        JointCase(14, 3.0),
        JointCase(14, 3.0, 1),
    ),
    few=2,
)


@dataclass(frozen=True, slots=True)
class JointOutcome:
    """The joint optimum of a case, and what the heuristics reach; periods in seconds, or none."""

    case: JointCase
    gigabytes: str
    optimum: JointAnswer
    seconds: Seconds
    contiguous: float | None
    special: float | None
    planner: float | None
    planner_seconds: Seconds


def compare(case: JointCase) -> JointOutcome:
    """One case every way."""
    problem = JOINT.build(case)
    groups = tuple((v,) for v in range(JOINT_DEVICES))

    optimum, seconds = timed(lambda: joint_optimum(JointPatterns(problem, groups), JOINT_LIMITS))
    planned, planner_seconds = _once(
        lambda: plan_madpipe(problem, PLANNER_LIMITS, silent, Choices(group_size=1))
    )
    return JointOutcome(
        case,
        gigabytes(problem),
        optimum,
        seconds,
        contiguous_period(problem),
        special_period(problem),
        None if isinstance(planned, NoPlan) else planned.pattern.period,
        planner_seconds,
    )


def contiguous_period(problem: PipelineProblem) -> float | None:
    """1F1B* on the best contiguous allocation."""
    stages = least_period(allocation_of(problem, None), ALLOCATION_LIMITS).stages
    return None if stages is None else one_f_one_b_period(pattern_problem(problem, stages))


def special_period(problem: PipelineProblem) -> float | None:
    """The best pattern of the allocation with one special device: MadPipe's two phases alone."""
    stages = least_period(allocation_of(problem, 0), ALLOCATION_LIMITS).stages
    if stages is None:
        return None
    return best_pattern(pattern_problem(problem, stages), PATTERN_LIMITS).period


def joint_tables(quick: bool) -> list[Table]:
    """Seconds to the joint optimum; and how far above it the heuristics are."""
    outcomes = [compare(case) for case in track(JOINT.cases(quick), "joint optima")]
    return [
        Table(
            "periodic-joint-time",
            f"Joint optimum on {JOINT_DEVICES} devices, limit {JOINT_LIMITS.seconds:g} s",
            ("model", "layers", "GB", "target", "s (CPU)", "proved", "allocations", "patterns",
             "planner madpipe s (CPU)"),
            tuple(_joint_times(outcome) for outcome in outcomes),
        ),
        Table(
            "periodic-joint-quality",
            "What heuristics lose: their periods over the joint optimum, or over its bound",
            ("model", "layers", "GB", "joint period s", "joint gap", "contiguous, 1F1B*",
             "one special device", "planner madpipe"),
            tuple(_joint_losses(outcome) for outcome in outcomes),
        ),
    ]  # fmt: skip


def _joint_times(outcome: JointOutcome) -> tuple[object, ...]:
    case, optimum = outcome.case, outcome.optimum
    return (
        str(case),
        case.layers,
        outcome.gigabytes,
        f"{JOINT_LIMITS.seconds:g} s" if case.layers <= SETTLED else "-",
        shown(outcome.seconds),
        "yes" if optimum.complete else "no",
        optimum.allocations,
        optimum.solves,
        shown(outcome.planner_seconds),
    )


def _joint_losses(outcome: JointOutcome) -> tuple[object, ...]:
    optimum = outcome.optimum
    period = optimum.period
    bound = optimum.bound / MICROBATCHES  # of the period, as no update takes time
    # What is proved is so up to the solver's tolerance.
    least = period if optimum.complete and period else bound
    assert least is not None
    return (
        str(outcome.case),
        outcome.case.layers,
        outcome.gigabytes,
        period,
        None if period is None else f"{1 - bound / period:.2%}",
        ratio(outcome.contiguous, least),
        ratio(outcome.special, least),
        ratio(outcome.planner, least),
    )


def tables(quick: bool) -> Iterable[Table]:
    """Times and answers of the three solvers."""
    compile_kernels("madpipe")
    yield from allocation_tables(quick)
    yield from pattern_tables(quick)
    yield from joint_tables(quick)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1])))))
