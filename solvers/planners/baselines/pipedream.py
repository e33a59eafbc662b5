"""PipeDream's partition with a synchronous barrier (thesis 2.4.1; SPP V-A, baseline iii)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.pipelines.bppm import StageChoice, prefix_sums, range_sums
from stagewright.formulations.pipelines.spp import makespan_problem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.machines.cluster import Cluster
from stagewright.solvers.pipelines.list_scheduling import list_schedule
from stagewright.solvers.planners.proposal import (
    NoPlan,
    Proposal,
    named_stages,
    proposal_of,
    shortage,
)
from stagewright.solvers.planners.uniform import UniformPlanner

STEP_SECONDS = 4e-9  # predicted, of a choice in the tables


@dataclass(frozen=True, slots=True)
class LevelStage:
    """A stage of one level: layers [start, stop) on ``workers`` components."""

    start: int
    stop: int
    workers: int


@dataclass(frozen=True, slots=True, eq=False)
class LevelTables:
    """A[i, j, m], the time of the slowest stage of layers [i, j) on m components, with choices.

    ``split[i, j, m]`` is the first layer of the last stage (i for a single stage) and
    ``last[i, j, m]`` the components of that stage.
    """

    slowest: Floats
    split: Ints
    last: Ints


def plan_pipedream(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """PipeDream's partition and replication, scheduled by 1F1B with a flush per iteration.

    Devices are used in the order of the cluster, as in the paper's homogeneous levels. If a stage
    has more devices than a microbatch can be split among, the last ones stay idle.
    """
    needed = _predicted_seconds(problem)
    if needed > limits.seconds:
        return NoPlan(f"its tables take about {needed:.2g} s, more than is left", proved=False)
    stages = tuple(
        replace(one, devices=one.devices[: problem.most_replicas(one.start, one.stop)])
        for one in partition(problem)
    )
    scheduling = makespan_problem(problem, stages)
    if scheduling is None:
        return NoPlan(shortage(problem, stages))
    times = list_schedule(scheduling, "1f1b")
    assert times is not None  # 1F1B keeps every limit
    return proposal_of(problem, named_stages(problem, stages), times)


def partition(problem: PipelineProblem) -> tuple[StageChoice, ...]:
    """The stages of PipeDream's optimizer on the levels of the cluster."""
    levels = optimize(problem)
    layers = len(problem.chain)
    servers = problem.cluster.servers
    if len(levels) == 1:
        every = [v for server in servers for v in server]
        outer = [
            (part, [[v] for v in every]) for part in _level_stages(levels[0], 0, layers, len(every))
        ]
        return _place(outer)
    stages: list[StageChoice] = []
    used = 0
    for wide in _level_stages(levels[1], 0, layers, len(servers)):
        group = servers[used : used + wide.workers]
        used += wide.workers
        columns = [list(column) for column in zip(*group, strict=True)]
        inner = _level_stages(levels[0], wide.start, wide.stop, len(columns))
        stages += _place([(part, columns) for part in inner])
    return tuple(stages)


def _predicted_seconds(problem: PipelineProblem) -> float:
    """Seconds that the tables of all levels take."""
    layers, levels = len(problem.chain), _hierarchy(problem.cluster)
    steps = [layers**3 / 6 * workers**2 / 2 for workers, _ in levels[:-1]]
    return (sum(steps) + layers**2 / 2 * levels[-1][0] ** 2 / 2) * STEP_SECONDS


def optimize(problem: PipelineProblem) -> tuple[LevelTables, ...]:
    """The tables A^k, from the lowest level: devices of a server, then servers."""
    costs = [problem.costs(kind, 1) for kind in problem.kinds]
    work = np.max([c.forward_seconds + c.backward_seconds for c in costs], axis=0)
    compute = range_sums(prefix_sums(work))
    weights = range_sums(prefix_sums(problem.chain.parameter_bytes))
    activations = np.array([problem.boundary_bytes(s + 1) for s in range(len(work))])
    levels: list[LevelTables] = []
    for workers, bandwidth in _hierarchy(problem.cluster):
        highest = len(levels) + 1 == len(_hierarchy(problem.cluster))
        tables = _solve_level(
            compute, weights, activations / bandwidth, bandwidth, workers, highest
        )
        levels.append(LevelTables(*tables))
        compute = np.ascontiguousarray(levels[-1].slowest[:, :, workers])
    return tuple(levels)


def _hierarchy(cluster: Cluster) -> list[tuple[int, float]]:
    """(components, bandwidth) per level; unequal servers form one level of all devices."""
    servers = cluster.servers
    slowest, _ = cluster.pairs.slowest(*2 * (range(len(cluster)),))
    if len(servers) == 1 or len({len(server) for server in servers}) > 1:
        return [(len(cluster), slowest)]
    if len(servers[0]) == 1:
        return [(len(servers), slowest)]
    inside = min(cluster.pairs.slowest(server, server)[0] for server in servers)
    return [(len(servers[0]), inside), (len(servers), slowest)]


def _level_stages(level: LevelTables, start: int, stop: int, workers: int) -> list[LevelStage]:
    found: list[LevelStage] = []
    while True:
        split, last = int(level.split[start, stop, workers]), int(level.last[start, stop, workers])
        found.append(LevelStage(split, stop, last))
        if split == start:
            return found[::-1]
        stop, workers = split, workers - last


def _place(parts: Sequence[tuple[LevelStage, list[list[int]]]]) -> tuple[StageChoice, ...]:
    """Each stage takes the next columns (devices with the same index in every server)."""
    stages, used = [], 0
    for part, columns in parts:
        taken = columns[used : used + part.workers]
        stages.append(StageChoice(part.start, part.stop, tuple(v for c in taken for v in c)))
        used += part.workers
    return tuple(stages)


@njit(cache=True, error_model="numpy")
def _solve_level(
    compute: Floats,
    weights: Floats,
    activation_seconds: Floats,
    bandwidth: float,
    workers: int,
    highest: bool,
) -> tuple[Floats, Ints, Ints]:
    """The tables of one level; the highest level needs i = 0 only.

    T(i, j, m) = max(A_below(i, j), 2 (m-1) w(i, j) / B) / m, and A(i, j, m) is the least of
    T(i, j, m) and, over s and m', max(A(i, s, m - m'), 2 a_s / B, T(s, j, m')). The printed
    minimum leaves out the single stage on all m.
    """
    layers = compute.shape[0] - 1
    slowest = np.full((layers + 1, layers + 1, workers + 1), np.inf)
    split = np.zeros((layers + 1, layers + 1, workers + 1), dtype=np.int64)
    last = np.zeros((layers + 1, layers + 1, workers + 1), dtype=np.int64)
    for i in range(1 if highest else layers):
        for j in range(i + 1, layers + 1):
            for m in range(1, workers + 1):
                alone = max(compute[i, j], 2.0 * (m - 1) * weights[i, j] / bandwidth) / m
                slowest[i, j, m], split[i, j, m], last[i, j, m] = alone, i, m
            for s in range(j - 1, i, -1):
                moved = 2.0 * activation_seconds[s - 1]
                for k in range(1, workers):
                    one = max(compute[s, j], 2.0 * (k - 1) * weights[s, j] / bandwidth) / k
                    for m in range(k + 1, workers + 1):
                        time = max(slowest[i, s, m - k], moved, one)
                        if time < slowest[i, j, m]:
                            slowest[i, j, m], split[i, j, m], last[i, j, m] = time, s, k
    return slowest, split, last


PLANNER = UniformPlanner(
    "pipedream",
    "hierarchical partition and replication, 1F1B with a flush",
    "Narayanan's thesis 2.4.1",
    plan_pipedream,
)
