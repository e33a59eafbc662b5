"""Pipelines of operators: a cut of the graph into contiguous stages, then 1F1B over microbatches.

The graph is that of microbatches (``graphs.models.data_parallel``, whose replicas they are). What
must be together with an operator of the forward pass makes a part: its parameters, its backward
operators, their gradients' sums and updates. The parts are divided into contiguous stages with the
least largest load by :mod:`stagewright.solvers.dags.partition`.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import networkx as nx
import numpy as np

from stagewright.formulations.dags.problem import DagProblem, DevicePool, PlacedSet, Tensor
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.operators.problem import GraphTimes, OperatorProblem
from stagewright.formulations.prices.collectives import paced_seconds
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.models.operators.step_graph import StepGraph
from stagewright.solvers.dags.partition import partition
from stagewright.solvers.dags.warm_up import compile_partition
from stagewright.solvers.operators.insertion import by_devices, timetable
from stagewright.solvers.operators.ranks import arrays_of
from stagewright.solvers.operators.search import shortest

_PARTITION_SECONDS = 10.0
FORWARD, BACKWARD, UPDATE = 1, 2, 3
_PHASES = {"input": 0, "state": 0, "forward": FORWARD, "backward": BACKWARD, "update": UPDATE}
AHEAD = ("state", "input", "forward")


def pipelined(graph: StepGraph, problem: OperatorProblem, limits: Limits) -> GraphTimes | None:
    """The shortest pipeline found that keeps the memory; None if there is none.

    Stages are cut for all devices and for half as many, down to one: more stages are slower where
    transfers take longer than what they save.
    """
    compile_partition()
    began, parts = perf_counter(), _Parts.of(graph, problem)
    best: GraphTimes | None = None
    few = len(problem.devices)
    while few:
        left = replace(limits, seconds=limits.left(perf_counter() - began))
        found = _on_few(parts, problem, few, left)
        best = shortest(problem, [one for one in (best, found) if one is not None])
        few //= 2
    return best


def _on_few(
    parts: "_Parts", problem: OperatorProblem, few: int, limits: Limits
) -> GraphTimes | None:
    """The shortest pipeline on at most that many devices of each kind.

    Stages are cut with and without the time of transfers in the load, for as many microbatches in
    memory as there are devices, and for fewer if that does not fit.
    """
    began = perf_counter()
    best: GraphTimes | None = None
    for held in range(min(parts.microbatches, few), 0, -1):
        for pays in (True, False):
            left = min(_PARTITION_SECONDS, limits.left(perf_counter() - began))
            asked = parts.problem(problem, held, pays, few)
            found = partition(asked, replace(limits, seconds=left))
            if found.sets is not None:
                best = shortest(problem, [best, *_timetables(parts, problem, found.sets)])
        if best is not None:
            return best
    return None


@dataclass(frozen=True, eq=False)
class _Parts:
    """Parts of the forward pass, with the weights, updates and backward operators of each.

    Attributes
    ----------
    part
        Of every operator, shape (n,).
    microbatch
        Of every operator; 0 if it belongs to none.
    phase
        Of every operator, one of ``_PHASES``; views of weights are before the forward.
    edges
        (a, b): part a is not in a later stage than b.
    """

    part: Ints
    microbatch: Ints
    phase: Ints
    edges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """The number of parts."""
        return int(self.part.max()) + 1

    @property
    def microbatches(self) -> int:
        """The number of microbatches in a step."""
        return int(self.microbatch.max()) + 1

    @classmethod
    def of(cls, graph: StepGraph, problem: OperatorProblem) -> "_Parts":
        """The parts of a graph of microbatches."""
        owner, weights = _owners(graph, problem), _weights(graph, problem)
        order: nx.DiGraph[int] = nx.DiGraph()
        order.add_nodes_from(owner)
        order.add_edges_from(_order(graph, owner, weights))
        joined = nx.condensation(order)
        number = joined.graph["mapping"]
        return cls(
            np.array([number[one] for one in owner], dtype=np.int64),
            _microbatches(graph),
            np.array(
                [
                    _PHASES[node.role] if node.role == "update" or j not in weights else 0
                    for j, node in enumerate(graph.nodes)
                ],
                dtype=np.int64,
            ),
            tuple(joined.edges),
        )

    def problem(self, problem: OperatorProblem, held: int, pays: bool, few: int) -> DagProblem:
        """Divide the parts among ``few`` devices a kind, with ``held`` microbatches in memory.

        A load is that of a microbatch: a step's work over the number of microbatches.
        """
        pools = _pools(problem)
        first = [its[0] for its in pools]
        seconds = np.zeros((self.count, len(first)))
        np.add.at(seconds, self.part, problem.seconds[:, first] / self.microbatches)
        held_bytes = np.zeros(self.count)
        np.add.at(held_bytes, self.part, problem.state_bytes)
        saved = self._saved(problem)
        np.add.at(held_bytes, self.part[problem.maker], problem.held_bytes * saved * held)
        return DagProblem(
            names=tuple(f"part {i}" for i in range(self.count)),
            edges=self.edges,
            seconds=seconds,
            bytes=held_bytes,
            tensors=tuple(self._tensors(problem)),
            pools=tuple(
                DevicePool(problem.devices[d], min(few, len(its)), float(problem.memory[d]), pays)
                for d, its in zip(first, pools, strict=True)
            ),
        )

    def _saved(self, problem: OperatorProblem) -> Floats:
        """1 for tensors of the first microbatch's forward that its backward reads, else 0."""
        readers = np.split(problem.reader, problem.first_reader[1:-1])
        found = [
            self.phase[maker] == FORWARD
            and self.microbatch[maker] == 0
            and (self.phase[its] == BACKWARD).any()
            for maker, its in zip(problem.maker.tolist(), readers, strict=True)
        ]
        return np.array(found, dtype=float)

    def _tensors(self, problem: OperatorProblem) -> Iterator[Tensor]:
        """A part's outputs for other parts in a microbatch, with the slowest transfer time."""
        rate, latency = problem.seconds_per_byte.max(), problem.latency.max()
        readers = np.split(problem.reader, problem.first_reader[1:-1])
        for maker, sent, its in zip(
            problem.maker.tolist(), problem.sent_bytes.tolist(), readers, strict=True
        ):
            if self.microbatch[maker] or self.phase[maker] == UPDATE:
                continue
            parts = dict.fromkeys(self.part[[maker, *its.tolist()]].tolist())
            if len(parts) > 1:
                yield Tensor(tuple(parts), float(paced_seconds(sent, rate, latency)))


def _pools(problem: OperatorProblem) -> list[list[int]]:
    """Devices of the same times and memory."""
    found: dict[bytes, list[int]] = {}
    for d, memory in enumerate(problem.memory.tolist()):
        key = problem.seconds[:, d].tobytes() + np.float64(memory).tobytes()
        found.setdefault(key, []).append(d)
    return list(found.values())


def _owners(graph: StepGraph, problem: OperatorProblem) -> list[int]:
    """The operator of the first microbatch's forward pass that each operator belongs to.

    Operators that must be together belong to one. States and inputs, and what is beside them,
    belong to the first operator of the forward pass that reads them; a backward operator to the
    last of those that made what it reads, or else where its gradient comes from. A weight that is
    used several times does not tell.
    """
    index, base = graph.index, _bases(graph)
    readers = _readers(graph, problem, base)
    owner = [*range(len(graph.nodes))]
    leader: dict[int, int] = {}
    for j, node in enumerate(graph.nodes):
        group = int(problem.group[j])
        if base[j] != j:
            owner[j] = owner[base[j]]
        elif group in leader:
            owner[j] = leader[group]
        elif node.role in ("state", "input"):
            owner[j] = readers.get(group, [j])[0]
        elif node.role != "forward" and node.inputs:
            every = [index[name] for name, _ in node.inputs]
            read = [i for i in every if len(readers.get(int(problem.group[i]), ())) < 2] or every
            ahead = [owner[i] for i in read if graph.nodes[i].role in AHEAD]
            owner[j] = max(ahead) if ahead else min(owner[i] for i in read)
        leader.setdefault(group, owner[j])
    return [_root(owner, j) for j in range(len(owner))]


def _readers(
    graph: StepGraph, problem: OperatorProblem, base: Sequence[int]
) -> dict[int, list[int]]:
    """For each group of states or inputs, its readers in the first microbatch's forward pass."""
    states = _groups_of(graph, problem, "state", "input")
    found: dict[int, list[int]] = {}
    for j, node in enumerate(graph.nodes):
        if node.role == "forward" and base[j] == j:
            groups = {int(problem.group[graph.index[name]]) for name, _ in node.inputs}
            for group in (groups & states) - {int(problem.group[j])}:
                found.setdefault(group, []).append(j)
    return found


def _groups_of(graph: StepGraph, problem: OperatorProblem, *roles: str) -> set[int]:
    return {int(problem.group[j]) for j, node in enumerate(graph.nodes) if node.role in roles}


def _weights(graph: StepGraph, problem: OperatorProblem) -> set[int]:
    """States and all operators in their groups, such as views: known before a step begins."""
    groups = _groups_of(graph, problem, "state")
    return {j for j in range(len(graph.nodes)) if int(problem.group[j]) in groups}


def _root(owner: Sequence[int], j: int) -> int:
    while owner[j] != j:
        j = owner[j]
    return j


def _microbatches(graph: StepGraph) -> Ints:
    """The microbatch of every operator: its own, or the last microbatch whose gradient it adds."""
    found: list[int] = []
    for node in graph.nodes:
        replica = node.name.rpartition("@")[2]
        if replica.isdigit() and "@" in node.name:
            found.append(int(replica))
        elif node.role == "backward":
            found.append(max((found[graph.index[name]] for name, _ in node.inputs), default=0))
        else:
            found.append(0)
    return np.array(found, dtype=np.int64)


def _bases(graph: StepGraph) -> list[int]:
    """The copy of every operator in the first microbatch."""
    found = []
    for j, node in enumerate(graph.nodes):
        name, mark, replica = node.name.rpartition("@")
        first = f"{name}@0" if mark and replica.isdigit() else node.name
        found.append(graph.index.get(first, j))
    return found


def _order(
    graph: StepGraph, owner: Sequence[int], weights: Container[int]
) -> Iterator[tuple[int, int]]:
    """Edges between owners: along the forward pass, and against the backward pass."""
    for j, node in enumerate(graph.nodes):
        for name in (*(name for name, _ in node.inputs), *node.after):
            i = graph.index[name]
            if i in weights:
                continue
            roles = graph.nodes[i].role, node.role
            if owner[i] != owner[j] and roles == ("forward", "forward"):
                yield owner[i], owner[j]
            elif owner[i] != owner[j] and roles == ("backward", "backward"):
                yield owner[j], owner[i]


def _timetables(
    parts: _Parts, problem: OperatorProblem, sets: Sequence[PlacedSet]
) -> Iterator[GraphTimes]:
    """The stages on devices, in the order of 1F1B as it is, and with gaps filled."""
    free = [list(its) for its in _pools(problem)]
    home = np.array([free[one.pool].pop(0) for one in sets])
    stage_of = np.zeros(parts.count, dtype=np.int64)
    for number, one in enumerate(sets):
        stage_of[list(one.parts)] = number
    stage = stage_of[parts.part]
    order = _one_f_one_b(parts, problem, stage, home)
    if problem.contention == "none":
        yield _in_turn(problem, order, home[stage])
    yield by_devices(problem, order, home[stage])


def _one_f_one_b(parts: _Parts, problem: OperatorProblem, stage: Ints, home: Ints) -> Ints:
    """The operators by the starts of their stages' forwards and backwards in 1F1B."""
    own = problem.seconds[np.arange(len(stage)), home[stage]]
    taken = np.zeros((2, len(home)))  # seconds of a forward and a backward of each stage
    for phase in (FORWARD, BACKWARD):
        its = parts.phase == phase
        np.add.at(taken[phase - FORWARD], stage[its], own[its] / parts.microbatches)
    starts = _starts(taken, parts.microbatches)
    keys = []
    for j, (phase, s, m) in enumerate(
        zip(parts.phase.tolist(), stage.tolist(), parts.microbatch.tolist(), strict=True)
    ):
        if phase in (FORWARD, BACKWARD):
            start = starts[phase - FORWARD, s, m]
            keys.append((start, phase, s if phase == FORWARD else -s, j))
        else:
            keys.append((-1.0 if phase < FORWARD else np.inf, phase, 0, j))
    return np.array([j for *_, j in sorted(keys)], dtype=np.int64)


def _starts(taken: Floats, microbatches: int) -> Floats:
    """Starts of 1F1B, shape (2, stages, microbatches): forwards and backwards."""
    stages = taken.shape[1]
    rows = [_row(min(microbatches, stages - s), microbatches) for s in range(stages)]
    starts = np.full((2, stages, microbatches), np.nan)
    at, free = [0] * stages, np.zeros(stages)
    while any(at[s] < len(rows[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(rows[s]):
                phase, m = rows[s][at[s]]
                before = s - 1 if phase == 0 else s + 1
                ready = 0.0
                if 0 <= before < stages:
                    ready = starts[phase, before, m] + taken[phase, before]
                if np.isnan(ready):
                    break
                starts[phase, s, m] = max(ready, free[s])
                free[s] = starts[phase, s, m] + taken[phase, s]
                at[s] += 1
    return starts


def _row(ahead: int, microbatches: int) -> list[tuple[int, int]]:
    """A stage's (phase, microbatch): ``ahead`` forwards, then a backward and a forward in turn."""
    row = [(0, m) for m in range(ahead)]
    for m in range(microbatches):
        row.append((1, m))
        row += [(0, m + ahead)] if m + ahead < microbatches else []
    return row


def _in_turn(problem: OperatorProblem, order: Ints, devices: Ints) -> GraphTimes:
    """The timetable of operators that start in the order of the list on each device."""
    a = arrays_of(problem)
    seconds = problem.seconds[np.arange(len(order)), devices].tolist()
    home, made = devices.tolist(), [0.0] * len(order)
    start = np.zeros(len(order))
    sent_start = np.full((len(a.maker), len(problem.devices)), np.nan)
    arrived: dict[tuple[int, int], float] = {}
    free = [0.0] * len(problem.devices)
    for i in order.tolist():
        d, ready = home[i], free[home[i]]
        for t in a.input[a.first_input[i] : a.first_input[i + 1]].tolist():
            j = int(a.maker[t])
            if home[j] == d:
                ready = max(ready, made[j])
                continue
            if (t, d) not in arrived:
                sent_start[t, d] = made[j]
                pair = home[j], d
                wait = paced_seconds(a.sent_bytes[t], a.seconds_per_byte[pair], a.latency[pair])
                arrived[t, d] = made[j] + float(wait)
            ready = max(ready, arrived[t, d])
        start[i] = ready
        made[i] = free[d] = ready + seconds[i]
    return timetable(a, devices, start, sent_start)
