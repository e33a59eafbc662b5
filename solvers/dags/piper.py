"""The pipeline with the least time per sample in Piper's problem, and a bound on it.

A pipeline is a chain of upsets (sets of layers with all their successors), from the last stage to
the first. The samples in flight in a stage depend on the replicas of the later ones only. So within
a limit on the time per sample, the least devices for every upset and number of replicas in all tell
whether there is a pipeline; the limit is bisected.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import networkx as nx
import numpy as np

from stagewright.formulations.dags.piper import (
    LayerOption,
    PiperProblem,
    PiperStage,
    device_seconds,
    least_seconds,
    shared_work,
)
from stagewright.formulations.forms.answers import Bounded, Limits, Status, settled
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.prices.collectives import link_seconds
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.dags.knapsack import choose
from stagewright.solvers.dags.merging import Contents, downsets, prefixes
from stagewright.solvers.dags.piper_kernel import (
    LeastDevices,
    OptionCosts,
    PiperMachine,
    StageRows,
    UpsetWork,
    price,
    within,
)

MOST_UPSETS = 40_000
LEAST = 1e-9  # relative improvement; less is rounding
CHUNK = 16  # upsets whose stages are priced between two looks at the clock
_CUTOFFS = (1.1, 1.5, 3.0, 10.0, 100.0)  # times the lower bound: up to where stages are priced
UPSETS, DEVICES = "dynamic program over upsets", "device-seconds"


@dataclass(frozen=True, slots=True, eq=False)
class PiperResult(Bounded):
    """The best pipeline found and a bound on the time per sample of every pipeline (seconds).

    An optimal one is so up to ``LEAST``. ``stages`` are in the order of the pipeline; None if none
    was found. ``priced``: the stages with a best choice within the last limit on the time.
    """

    stages: tuple[PiperStage, ...] | None
    cost: float | None
    bound: float
    proved_by: str
    status: Status
    priced: int
    seconds: float


def piper_pipeline(problem: PiperProblem, limits: Limits | None = None) -> PiperResult:
    """The optimum by bisection; else the best found within ``limits``.

    If the upsets are too many to be listed, the best that divides one topological order.
    """
    return _PiperSearch(problem, limits or Limits()).run()


class _PiperSearch:
    """The layers in the order in which upsets grow, the best pipeline so far, and the clock."""

    def __init__(self, problem: PiperProblem, limits: Limits) -> None:
        self.began = perf_counter()
        self.problem, self.limits = problem, limits
        graph: nx.DiGraph[int] = nx.DiGraph((edge.target, edge.source) for edge in problem.edges)
        graph.add_nodes_from(range(len(problem.layers)))
        self.order = list(nx.lexicographical_topological_sort(graph))
        number = {v: x for x, v in enumerate(self.order)}
        arcs = [(number[a], number[b]) for a, b in graph.edges]
        listed = downsets(len(self.order), arcs, MOST_UPSETS)
        self.complete = listed is not None
        self.lattice = prefixes(range(len(self.order))) if listed is None else listed
        self.contents = Contents(self.lattice)
        self.costs, self.machine = _costs(problem, self.order), _machine(problem)
        self.work = self._work()
        self.least = shared_work(problem)
        self.stages: tuple[PiperStage, ...] | None = None
        self.cost, self.priced = np.inf, 0

    def run(self) -> PiperResult:
        """Price stages up to a cutoff that some pipeline keeps, then bisect."""
        low = self.least
        for cutoff in (*(low * factor for factor in _CUTOFFS if low), np.inf):
            stages = self._price(cutoff)
            if stages is None:
                return self._result(self.limits.status(found=False), low)
            if self._find(stages, cutoff):
                return self._bisect(stages, low)
            low = cutoff
        status = Status.INFEASIBLE if self.complete else self.limits.status(found=False)
        return self._result(status, self.least)

    def _bisect(self, stages: StageRows, low: float) -> PiperResult:
        while self.cost - low > LEAST * self.cost:
            if self._is_late():
                return self._result(self.limits.status(found=True), low)
            middle = (low + self.cost) / 2
            if not self._find(stages, middle):
                low = middle
        if not self.complete:
            return self._result(self.limits.status(found=True), self.least)
        return self._result(Status.OPTIMAL, self.cost)

    def _is_late(self) -> bool:
        return self.limits.left(perf_counter() - self.began) == 0

    def _result(self, status: Status, low: float) -> PiperResult:
        bound = low if self.complete else self.least
        cost = None if self.stages is None else self.cost
        return PiperResult(
            stages=self.stages,
            cost=cost,
            bound=bound,
            proved_by=UPSETS if bound > self.least else DEVICES,
            status=settled(status, cost, bound, LEAST),
            priced=self.priced,
            seconds=perf_counter() - self.began,
        )

    def _price(self, cutoff: float) -> StageRows | None:
        """All stages that may take at most ``cutoff`` seconds; None if stopped early."""
        parts = []
        for begin in range(0, len(self.lattice), CHUNK):
            if self._is_late():
                return None
            end = min(begin + CHUNK, len(self.lattice))
            parts.append(
                price(self.costs, self.machine, self.work, self.lattice, begin, end, cutoff)
            )
        stages = _joined(parts)
        self.priced = len(stages.source)
        return stages

    def _find(self, stages: StageRows, limit: float) -> bool:
        """Look for a pipeline whose stages take at most ``limit`` seconds."""
        found = within(self.costs, self.machine, self.work, stages, limit)
        replicas = int(np.argmin(found.least[-1]))
        if found.least[-1, replicas] > self.machine.devices:
            return False
        pipeline = tuple(self._pipeline(stages, found, replicas))
        cost = self.problem.evaluate(pipeline)
        if cost > limit * (1 + RELATIVE_TOLERANCE):
            raise InvalidPlan(f"a stage takes {cost} s, its choice of options at most {limit} s")
        if cost < self.cost:
            self.cost, self.stages = cost, pipeline
        return True

    def _pipeline(
        self, stages: StageRows, found: LeastDevices, replicas: int
    ) -> Iterator[PiperStage]:
        """The stages of all layers with that many replicas in all."""
        upset = len(self.lattice) - 1
        while upset:
            row, own = int(found.row[upset, replicas]), int(found.replicas[upset, replicas])
            before = int(stages.source[row])
            layers = self.contents.of(upset) - self.contents.of(before)
            shards = int(self.costs.shards[stages.degree[row]])
            yield self._stage(
                tuple(sorted(self.order[x] for x in layers)), own, shards, -(-replicas // own)
            )
            upset, replicas = before, replicas - own

    def _stage(
        self, layers: tuple[int, ...], replicas: int, shards: int, in_flight: int
    ) -> PiperStage:
        """A stage with its best options."""
        options = [self.problem.layers[v].options[shards] for v in layers]
        inside = frozenset(layers)
        first = np.cumsum([0, *map(len, options)])
        time = [
            self.problem.option_seconds(v, one, inside, replicas)
            for v, its in zip(layers, options, strict=True)
            for one in its
        ]
        size = [in_flight * one.flight_bytes + one.fixed_bytes for its in options for one in its]
        chosen = choose(first, np.array(time), np.array(size), self.machine.memory, np.inf)
        return PiperStage(layers, replicas, shards, tuple((chosen - first[:-1]).tolist()))

    def _work(self) -> UpsetWork:
        layers = [self.problem.layers[v] for v in self.order]
        least = np.array([(device_seconds(layer), least_seconds(layer)) for layer in layers])
        done = np.zeros((len(self.lattice), 2))
        for i in range(1, len(done)):  # by size, so that what i grows from is known
            done[i] = done[self.contents.before[i]] + least[self.contents.part[i]]
        return UpsetWork(device_seconds=done[-1, 0] - done[:, 0], seconds=done[:, 1].copy())


def _joined(parts: list[StageRows]) -> StageRows:
    """The stages of consecutive upsets as one table."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    shifts = np.cumsum([0, *(len(part.flight) for part in parts)])
    step = [part.step[:-1] + shift for part, shift in zip(parts, shifts, strict=False)]
    joined = StageRows(*columns)
    return joined._replace(step=np.concatenate([*step, shifts[-1:]]))


def _machine(problem: PiperProblem) -> PiperMachine:
    """Stages may have as many replicas as divide the samples and as there are devices.

    Memory has half the checker's tolerance: a sum in another order must not break the limit.
    """
    most = min(problem.devices, problem.samples)
    replicas = np.arange(1, most + 1)
    degrees = _degrees(problem)
    return PiperMachine(
        devices=problem.devices,
        memory=problem.memory * (1 + RELATIVE_TOLERANCE / 2),
        most=most,
        replicas=replicas[problem.samples % replicas == 0],
        equal=np.array([_is_equal(problem, shards) for shards in degrees], dtype=bool),
    )


def _degrees(problem: PiperProblem) -> list[int]:
    """The numbers of shards of all options that there are devices for."""
    every = {shards for layer in problem.layers for shards in layer.options}
    return sorted(shards for shards in every if shards <= problem.devices)


def _is_equal(problem: PiperProblem, shards: int) -> bool:
    """Whether all options of each layer have equally many parameters."""
    return all(
        len({one.parameter_bytes for one in layer.options.get(shards, ())}) <= 1
        for layer in problem.layers
    )


def _costs(problem: PiperProblem, order: list[int]) -> OptionCosts:
    degrees = _degrees(problem)
    option = np.zeros((len(order), len(degrees) + 1), dtype=np.int64)
    options: list[LayerOption] = []
    other: list[list[int]] = []
    across: list[int] = []
    crossing: list[float] = []
    for x, v in enumerate(order):
        ends = [(problem.edges[e].source, problem.edges[e].target) for e in problem.edges_of[v]]
        other.append([order.index(a if b == v else b) for a, b in ends])
        for t, shards in enumerate(degrees):
            option[x, t] = len(options)
            for one in problem.layers[v].options.get(shards, ()):
                options.append(one)
                across.append(len(crossing))
                sent = (
                    2 * (problem.edges[e].bytes + one.edge_bytes.get(e, 0.0))
                    for e in problem.edges_of[v]
                )
                crossing += [link_seconds(each, problem.bandwidth) for each in sent]
        option[x, -1] = len(options)
    exchanged = np.array([one.parameter_bytes for one in options])
    return OptionCosts(
        shards=np.array(degrees, dtype=np.int64),
        option=option,
        seconds=np.array([one.seconds for one in options]),
        exchange=link_seconds(4 * exchanged / problem.samples, problem.bandwidth),
        flight=np.array([one.flight_bytes for one in options]),
        fixed=np.array([one.fixed_bytes for one in options]),
        edge=np.cumsum([0, *map(len, other)]),
        other=np.array([x for its in other for x in its], dtype=np.int64),
        across=np.array(across, dtype=np.int64),
        crossing=np.array(crossing, dtype=float),
    )
