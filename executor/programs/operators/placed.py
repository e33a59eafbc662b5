"""The operators of a plan by rank, their inputs, and the values to be sent."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from stagewright.formulations.operators.plan import OperatorPlan, SplitChoice
from stagewright.formulations.operators.splitting import split_graph
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.models.operators.step_graph import Node, Split, StepGraph

Value = tuple[int, int]
"""Number of an operator and of its output; the one after its last output says that it has ended."""


@dataclass(frozen=True)
class PlacedGraph:
    """The operators of a plan by their number there, and the values that they read.

    Rank r is ``devices[r]``: the devices in the order in which the plan starts to use them.
    ``divided`` are the split and the number of parts of every operator that the plan divides.
    """

    plan: OperatorPlan
    devices: tuple[str, ...]
    nodes: tuple[Node, ...]
    rank: tuple[int, ...]
    divided: dict[str, tuple[Split, int]]

    @cached_property
    def number(self) -> dict[str, int]:
        """The operators' numbers by name."""
        return {node.name: n for n, node in enumerate(self.nodes)}

    @cached_property
    def inputs(self) -> tuple[tuple[Value, ...], ...]:
        """For each operator, the tensors that it reads, in the order of its arguments."""
        return tuple(
            tuple((self.number[name], output) for name, output in node.inputs)
            for node in self.nodes
        )

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, the operators that must have ended before it starts."""
        return tuple(tuple(self.number[name] for name in node.after) for node in self.nodes)

    def end(self, n: int) -> Value:
        """The value that says that an operator has ended."""
        return n, len(self.nodes[n].outputs)

    def awaited(self, n: int) -> Iterator[Value]:
        """The values that must be on the rank of operator ``n`` before it starts.

        The ends of operators on the same rank are not among them: they are in its row.
        """
        yield from self.inputs[n]
        for other in self.after[n]:
            if self.rank[other] != self.rank[n]:
                yield self.end(other)

    @cached_property
    def targets(self) -> dict[Value, tuple[int, ...]]:
        """The ranks to which each value is sent: once to every other rank that reads it."""
        found: dict[Value, set[int]] = {}
        for n in range(len(self.nodes)):
            for value in self.awaited(n):
                if self.rank[value[0]] != self.rank[n]:
                    found.setdefault(value, set()).add(self.rank[n])
        return {value: tuple(sorted(ranks)) for value, ranks in found.items()}

    def made(self, n: int) -> list[Value]:
        """The values of operator ``n``; its end only if it is sent."""
        every = [(n, output) for output in range(len(self.nodes[n].outputs))]
        return every + [self.end(n)] * (self.end(n) in self.targets)

    def stays(self, value: Value) -> bool:
        """Whether a value is a state, which its rank keeps from step to step."""
        return self.nodes[value[0]].role == "state" and value != self.end(value[0])


def devices_of(plan: OperatorPlan) -> tuple[str, ...]:
    """The devices that run operators, in the order in which the plan starts to use them."""
    return tuple(dict.fromkeys(one.device for one in plan.operators))


def place_graph(plan: OperatorPlan, graph: StepGraph) -> PlacedGraph:
    """The operators of ``graph``, divided and placed by ``plan``.

    Raises InvalidPlan if the plan does not place every operator of the graph after its splits
    exactly once.
    """
    try:
        split = split_graph(graph, plan.splits)
    except InputError as error:
        raise InvalidPlan(str(error)) from None
    names = [one.operator for one in plan.operators]
    for name in names:
        if name not in split.index:
            raise InvalidPlan(f"the plan places {name!r}, which is not in graph {graph.name!r}")
    missing = split.index.keys() - set(names)
    if missing or len(names) != len(split):
        reason = f"does not place {min(missing)!r}" if missing else "places an operator twice"
        raise InvalidPlan(f"the plan {reason}; it is of another graph than {graph.name!r}")
    devices = devices_of(plan)
    ranks = {name: rank for rank, name in enumerate(devices)}
    return PlacedGraph(
        plan,
        devices,
        tuple(split.nodes[split.index[name]] for name in names),
        tuple(ranks[one.device] for one in plan.operators),
        {one.operator: (_split(graph, one), one.parts) for one in plan.splits},
    )


def _split(graph: StepGraph, choice: SplitChoice) -> Split:
    splits = graph.nodes[graph.index[choice.operator]].splits
    return next(one for one in splits if one.dimension == choice.dimension)
