"""PipeDream's recurrence on a graph of operators, cut at antichains as in its public optimizer.

A state is a downset: the operators of an antichain and all that they depend on. A stage is what a
state has more than an earlier one, so that every contiguous partition is looked at, not only those
of one topological order. A plan of chain layers cannot express sets that are no intervals of the
linearised order: :func:`~stagewright.graphs.models.operators.opgraph.linearise` decides it there.
"""

from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.dags.problem import DagProblem, DevicePool, Tensor
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operators.opgraph import OpGraph
from stagewright.solvers.dags.merging import Contents, downsets, merge
from stagewright.solvers.planners.baselines.hierarchy import (
    CutStates,
    Hierarchy,
    Shape,
    optimize,
    placed,
)

MOST_STATES = 1500  # the tables of 8 components of a lower level take 0.3 GB


@dataclass(frozen=True, slots=True)
class OperatorStage:
    """Operators, by name in the order of the graph, and the devices that replicate them."""

    operators: tuple[str, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphPartition:
    """The optimum of the recurrence over all contiguous partitions; memory is not looked at.

    ``slowest_seconds`` are those of the slowest stage or channel per microbatch; infinite, without
    ``stages``, if there are too few operators for the shape. ``states`` are those that were listed.
    """

    stages: tuple[OperatorStage, ...]
    slowest_seconds: float
    states: int


def partition_graph(
    graph: OpGraph, hierarchy: Hierarchy, *, overlapped: bool = True, shape: Shape = "any"
) -> GraphPartition:
    """The stages of the recurrence on the downsets of ``graph``; see ``hierarchy.optimize``.

    Operators without work and weights that a neighbour decides, such as the views of an output
    that nothing reads, are no states of their own: some optimal partition has them together.

    Raises
    ------
    InputError
        If there are more than ``MOST_STATES`` states.
    """
    problem, members = merge(_problem(graph))
    lattice = downsets(len(members), problem.edges, MOST_STATES)
    if lattice is None:
        raise InputError(
            f"operator graph {graph.name!r} has more than {MOST_STATES} antichain states; "
            "linearise it with contract"
        )
    contents = Contents(lattice)
    inside = np.zeros((len(lattice), len(members)), dtype=bool)
    for i in range(len(lattice)):
        inside[i, list(contents.of(i))] = True
    states, inside = _states(problem, inside)
    tables = optimize(states, hierarchy, overlapped=overlapped, shape=shape)
    slowest = float(tables[-1].slowest[0, -1, -1])
    chosen = placed(tables, hierarchy) if np.isfinite(slowest) else ()
    names = [operator.name for operator in graph.operators]
    stages = []
    for one in chosen:
        parts = np.flatnonzero(inside[one.stop] & ~inside[one.start])
        numbers = sorted(i for part in parts for i in members[part])
        stages.append(OperatorStage(tuple(names[i] for i in numbers), one.devices))
    return GraphPartition(tuple(stages), slowest, len(lattice))


def _problem(graph: OpGraph) -> DagProblem:
    """The operators as parts; a part exchanges bytes of weights, a tensor is as long as big."""
    number = {operator.name: i for i, operator in enumerate(graph.operators)}
    readers: dict[int, dict[int, None]] = {}
    for a, b in graph.edges:
        readers.setdefault(number[a], {})[number[b]] = None
    work = [one.forward_seconds + one.backward_seconds for one in graph.operators]
    return DagProblem(
        names=tuple(number),
        edges=tuple((a, b) for a, its in readers.items() for b in its),
        seconds=np.array(work)[:, None],
        bytes=np.zeros(len(graph)),
        tensors=tuple(
            Tensor((a, *its), graph.operators[a].output_bytes) for a, its in readers.items()
        ),
        pools=(DevicePool("any", 1, np.inf),),
        exchange=np.array([one.parameter_bytes for one in graph.operators]),
    )


def _states(problem: DagProblem, inside: NDArray[np.bool_]) -> tuple[CutStates, NDArray[np.bool_]]:
    """The states in ascending order, and the parts of each.

    Correctly rounded sums, so that a state has at least the work of those in it.
    """
    work = np.array([fsum(problem.seconds[its, 0]) for its in inside])
    order = np.lexsort((inside.sum(axis=1), work))
    inside = inside[order]
    crossing = np.zeros(len(inside))
    for tensor in problem.tensors:
        has = inside[:, list(tensor.parts)]
        crossing += tensor.seconds * (has.any(axis=1) & ~has.all(axis=1))
    assert problem.exchange is not None
    missing = inside.astype(np.float32) @ (~inside).T.astype(np.float32)
    states = CutStates(
        work=work[order],
        parameter_bytes=inside @ problem.exchange,
        crossing_bytes=crossing,
        stages=(missing == 0) & ~np.eye(len(inside), dtype=bool),
    )
    return states, inside
