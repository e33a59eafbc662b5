"""Placed operators: list schedules and search against optima, seconds, and anrg-saga's schedulers.

``python -m benchmarks operators``. The table next to anrg-saga needs that package on the path.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from time import process_time

import networkx as nx
import numpy as np
from rich.progress import track

from benchmarks.operator_graphs import SHAPES, random_problem
from benchmarks.report import Table, percent
from benchmarks.spec import BenchSpec
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.operators.problem import Contention, GraphTimes, OperatorProblem
from stagewright.graphs.documents.arrays import Ints
from stagewright.solvers.operators.exact import EVALUATIONS, solve_exactly
from stagewright.solvers.operators.insertion import (
    by_devices,
    by_rank,
    cpop,
    dpos,
    heft,
    mean_ranks,
    peft,
)
from stagewright.solvers.operators.ranks import arrays_of, bounds_of, transfers
from stagewright.solvers.operators.search import METHODS, SLOW, best_list_schedule, search

LIMITS = Limits(seconds=8, threads=1, seed=0)
DEVICES = 3
SEEDS = 3
SIZES = (30, 45, 60)  # operators, by seed
PEER_OPERATORS, PEER_DEVICES = 500, 8
PEERS = {"heft": "HeftScheduler", "cpop": "CpopScheduler", "m-etf": "ETFScheduler"}

CONTENTION: tuple[Contention, ...] = ("none", "exclusive")

# Mean communication over mean computation.
STUDY = BenchSpec("operators study", lambda case: case, (0.1, 0.3, 1.0, 3.0, 10.0))


def _above(cost: float, bound: float) -> float:
    return cost / bound - 1


def study_table(quick: bool) -> Table:
    """How far each method is above the optimum, or above CP-SAT's bound where it is not proved."""
    rows: list[tuple[object, ...]] = []
    for ratio in STUDY.cases(quick):
        above: dict[str, list[float]] = {"dpos": [], "best list": [], "search": [], "found": []}
        static, proved = [], 0
        cases = [(shape, seed) for shape in SHAPES for seed in range(1 if quick else SEEDS)]
        for shape, seed in track(cases, f"ratio {ratio}"):
            size = 20 if quick else SIZES[seed % len(SIZES)]
            problem = random_problem(size, DEVICES, seed, ratio, shape)
            exact = solve_exactly(problem, LIMITS)
            assert exact.cost is not None
            _, listed = best_list_schedule(problem)
            searched = search(problem, EVALUATIONS, LIMITS, listed)
            found = (dpos(problem), listed, searched, exact.timetable)
            for name, one in zip(above, found, strict=True):
                assert one is not None
                above[name].append(_above(problem.evaluate(one), exact.bound))
            static.append(1 - max(one.seconds for one in bounds_of(problem)) / exact.cost)
            proved += _above(exact.cost, exact.bound) < 1e-5  # ticks are rounded
        for name, values in above.items():
            quartiles = [percent(value) for value in np.quantile(values, [0.5, 0.9, 1.0]).tolist()]
            within = sum(value <= 0.02 for value in values)
            rows.append((ratio, name, len(values), proved, *quartiles, within))
        rows.append(
            (ratio, "static bound, below", len(static), proved,
             *(percent(value) for value in np.quantile(static, [0.5, 0.9, 1.0]).tolist()), None)
        )  # fmt: skip
    columns = ("ratio", "method", "DAGs", "proved", "median", "90 %", "worst", "within 2 %")
    title = (
        f"Above the optimum or its bound: {SIZES[0]} to {SIZES[-1]} operators, {DEVICES} devices, "
        f"{len(SHAPES)} shapes; search: {EVALUATIONS} moves; found: with CP-SAT, "
        f"{LIMITS.seconds:g} s"
    )
    return Table("operators-study", title, columns, tuple(rows))


def time_table(quick: bool) -> Table:
    """CPU milliseconds of large problems, compiled before."""
    size = 1000 if quick else 10_000
    rows = []
    problems = [random_problem(size, 8, 0, 1.0, "random", kind, 2) for kind in CONTENTION]
    small = random_problem(50, 8, 0, 1.0, "random")
    methods: dict[str, Callable[[OperatorProblem], GraphTimes | None]] = {
        "dpos, once": dpos,
        **{name: method for name, method in METHODS.items() if name not in SLOW},
        "m-etf": METHODS["m-etf"],
        "search, 1000 moves": lambda problem: search(problem, 1000, LIMITS, dpos(problem)),
    }
    for name, method in methods.items():
        spent = []
        for problem in problems:
            method(replace(small, contention=problem.contention))
            began = process_time()
            method(problem)
            spent.append(1e3 * (process_time() - began))
        rows.append((name, *spent))
    title = f"CPU milliseconds, {size} operators, 8 devices of 2 kinds"
    return Table("operators-time", title, ("method", *CONTENTION), tuple(rows))


def peer_table(quick: bool) -> Table:
    """Makespans and CPU seconds next to anrg-saga, on related devices with equal links."""
    size = 60 if quick else PEER_OPERATORS
    has_peer = find_spec("saga") is not None
    rows = []
    for shape in SHAPES:
        problem, speeds = related(random_problem(size, PEER_DEVICES, 0, 1.0, shape))
        ours = {"heft": heft, "cpop": cpop, "peft": peft, "m-etf": METHODS["m-etf"],
                "dpos": dpos, "min-cut": min_cut}  # fmt: skip
        for name, method in ours.items():
            began = process_time()
            found = method(problem)
            seconds = process_time() - began
            assert found is not None
            peer = _peer(problem, speeds, PEERS[name]) if has_peer and name in PEERS else None
            cost = problem.evaluate(found)
            rows.append((shape, name, cost, seconds, *(peer or (None, None))))
        began = process_time()
        searched = search(problem, EVALUATIONS, LIMITS)
        assert searched is not None
        seconds = process_time() - began
        rows.append((shape, "search", problem.evaluate(searched), seconds, None, None))
        best = max(one.seconds for one in bounds_of(problem))
        rows.append((shape, "bound", best, None, None, None))
    columns = ("shape", "method", "makespan", "CPU s", "saga's", "its CPU s")
    title = f"Next to anrg-saga: {size} operators, {PEER_DEVICES} devices of different speeds"
    return Table("operators-peers", title, columns, tuple(rows))


def related(problem: OperatorProblem) -> tuple[OperatorProblem, list[float]]:
    """``problem`` on devices of different speeds."""
    speeds = np.random.default_rng(1).uniform(0.5, 2, len(problem.devices))
    return replace(problem, seconds=problem.seconds / speeds), speeds.tolist()


def _peer(problem: OperatorProblem, speeds: list[float], name: str) -> tuple[float, float]:
    """(makespan, CPU seconds) of one of anrg-saga's schedulers."""
    saga, schedulers = import_module("saga"), import_module("saga.schedulers")
    names = problem.devices
    network = saga.Network.create(
        [*zip(names, speeds, strict=True)], [(a, b, 1.0) for a in names for b in names if a < b]
    )
    cost = problem.seconds[:, 0] * speeds[0]
    maker, reader, tensor = problem.edges
    graph = saga.TaskGraph.create(
        [*zip(problem.names, cost.tolist(), strict=True)],
        [
            (problem.names[i], problem.names[j], float(problem.sent_bytes[t]))
            for i, j, t in zip(maker, reader, tensor, strict=True)
        ],
    )
    began = process_time()
    found = getattr(schedulers, name)().schedule(network, graph)
    return float(found.makespan), process_time() - began


def tables(quick: bool) -> list[Table]:
    """Quality against optima, milliseconds, and anrg-saga's schedulers."""
    return [study_table(quick), time_table(quick), peer_table(quick)]


def min_cut(problem: OperatorProblem) -> GraphTimes:
    """Halve the graph again and again where the least is sent (Kernighan and Lin), by groups."""
    groups, readers = len(problem.group_bytes), problem.edges
    graph = nx.Graph()
    graph.add_nodes_from(range(groups))
    wait = transfers(arrays_of(problem), np.mean)
    for i, j, t in zip(*(column.tolist() for column in readers), strict=True):
        a, b = int(problem.group[i]), int(problem.group[j])
        if a != b:
            before = graph.get_edge_data(a, b, {"weight": 0.0})["weight"]
            graph.add_edge(a, b, weight=before + wait[t])
    home = np.zeros(groups, dtype=np.int64)
    _halve(graph, [*range(groups)], [*range(len(problem.devices))], home)
    return by_devices(problem, by_rank(mean_ranks(problem)), home[problem.group])


def _halve(graph: nx.Graph, members: list[int], devices: list[int], home: Ints) -> None:
    if len(devices) == 1 or len(members) < 2:
        home[members] = devices[0]
        return
    one, other = nx.algorithms.community.kernighan_lin_bisection(
        graph.subgraph(members), weight="weight", seed=0
    )
    half = len(devices) // 2
    _halve(graph, sorted(one), devices[:half], home)
    _halve(graph, sorted(other), devices[half:], home)
