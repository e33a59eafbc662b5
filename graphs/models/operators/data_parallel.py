"""Data parallelism as a graph of operators: the deployment that FastT's search starts from.

FastT (Middleware 2020), section 5.2: the model's graph replicated once per device, or, where a
replica does not fit on a device, the graph of the model itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operators.step_graph import Node, StepGraph

Weights = Literal["shared", "mirrored", "accumulated"]

Input = tuple[str, int]


def data_parallel(share: StepGraph, replicas: int, weights: Weights = "shared") -> StepGraph:
    """The step of ``replicas`` copies of the model, each on the samples of ``share``.

    The loss of the mini-batch is the mean of the replicas' losses, so the gradients are averaged,
    by one operator per gradient or, accumulated, one per gradient and replica. Nodes of replica r
    are called ``NAME@r``. Statistics of batch norm are those of each replica's samples, as in every
    framework. Raises InputError if there is not at least one replica. ``share``: the step of one
    replica, captured or measured with its part of the mini-batch: times do not scale with the
    samples. ``weights``: ``shared``: one copy of the states, which all replicas read and one update
    changes (in-graph replication, as FastT's); buffers take the values of replica 0. An operator
    ``mean`` reads all gradients. ``accumulated``: the same, but gradients are added up one after
    the other, by operators ``accumulate``, and then scaled: replicas are microbatches, whose
    gradients do not wait for each other in memory. ``mirrored``: every replica has its states and
    its update, and an operator ``all_reduce`` returns the mean to each of them.
    """
    if replicas < 1:
        raise InputError(f"replicas must be at least 1, got {replicas}")
    if replicas == 1:
        return share
    copied = _Replication(share, replicas, weights)
    return replace(
        share,
        source=f"{share.source}; {replicas} replicas with {weights} weights",
        samples=share.samples * replicas,
        nodes=tuple(copied.nodes()),
    )


@dataclass(slots=True)
class _Replication:
    """Names of the copies, and the gradients that are averaged."""

    share: StepGraph
    replicas: int
    weights: Weights
    once: set[str] = field(default_factory=set)
    averaged: dict[Input, str] = field(default_factory=dict)

    def nodes(self) -> Iterator[Node]:
        """The nodes of the new graph, each after the nodes that it reads; copies are neighbours."""
        role = {node.name: node.role for node in self.share.nodes}
        for node in self.share.nodes:
            if self._is_single(node):
                self.once.add(node.name)
            if node.role == "update":
                for one in dict.fromkeys(node.inputs):
                    if role[one[0]] == "backward" and one not in self.averaged:
                        yield from self._average(one, node)
            copies = (0,) if node.name in self.once else range(self.replicas)
            yield from (self._copy(node, number) for number in copies)

    def _is_single(self, node: Node) -> bool:
        """Whether a node has no replicas: a shared state, a view of a state, or its update."""
        if self.weights == "mirrored":
            return False
        view = node.beside is not None and all(name in self.once for name, _ in node.inputs)
        return node.role in ("state", "update") or (view and node.beside in self.once)

    def _copy(self, node: Node, number: int) -> Node:
        averaged = self.averaged if node.role == "update" else {}
        return replace(
            node,
            name=self._name(node.name, number),
            inputs=tuple(
                (averaged[one], number if self.weights == "mirrored" else 0)
                if one in averaged
                else (self._name(one[0], number), one[1])
                for one in node.inputs
            ),
            beside=None if node.beside is None else self._name(node.beside, number),
            after=tuple(copy for name in node.after for copy in self._readers(name, node, number)),
        )

    def _readers(self, name: str, node: Node, number: int) -> list[str]:
        """The copies of ``name`` that read the memory that copy ``number`` of ``node`` changes."""
        if node.name in self.once and name not in self.once:
            return [self._name(name, other) for other in range(self.replicas)]
        return [self._name(name, number)]

    def _name(self, name: str, number: int) -> str:
        return name if name in self.once else f"{name}@{number}"

    def _average(self, gradient: Input, reader: Node) -> Iterator[Node]:
        """The operators that average a gradient."""
        source, number = gradient
        every = tuple((self._name(source, i), number) for i in range(self.replicas))
        self.averaged[gradient] = name = f"{source}.{number}@mean"
        if self.weights != "accumulated":
            mirrored = self.weights == "mirrored"
            operator, written = ("all_reduce", self.replicas) if mirrored else ("mean", 1)
            yield self._moving(name, operator, every, written, gradient, reader)
            return
        total = every[0]
        for i, one in enumerate(every[1:], start=1):
            added = f"{source}.{number}@sum{i}"
            yield self._moving(added, "accumulate", (total, one), 1, gradient, reader)
            total = added, 0
        yield self._moving(name, "scale", (total,), 1, gradient, reader)

    def _moving(
        self,
        name: str,
        operator: str,
        inputs: tuple[Input, ...],
        written: int,
        gradient: Input,
        reader: Node,
    ) -> Node:
        """An operator on tensors like ``gradient``, timed in proportion to ``reader``."""
        source, number = gradient
        node = self.share.nodes[self.share.index[source]]
        moved = (len(inputs) + written) / (len(reader.inputs) + len(reader.outputs))
        return Node(
            name=name,
            operator=operator,
            role="backward",
            inputs=inputs,
            outputs=(replace(node.outputs[number], shared=False),) * written,
            seconds={kind: moved * seconds for kind, seconds in reader.seconds.items()},
            line=node.line,
        )
