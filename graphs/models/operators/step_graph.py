"""A training step as a graph of operators: the document that placements are planned for.

FastT's search starts from data parallelism (Middleware 2020, section 5.2): the model's graph once
per device, or, where a replica does not fit on a device, the graph of the model itself.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import ConfigDict

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount, require_count

_MAX_OPERATORS = 1_000_000

Role = Literal["input", "state", "forward", "backward", "update"]
"""A batch's tensor; parameters, buffers and the optimizer's state; or a part of the step."""

WITHOUT_TIME: tuple[Role, ...] = ("input", "state")
"""Roles of what is not computed."""


@documents.record
class Output:
    """A tensor that an operator makes; ``bytes`` are in memory until its last reader has ended.

    If it is ``shared``, it has no memory itself: it is a view of the operator's first input, or
    that input changed in place. That memory is in use until the last reader of either has ended.
    ``bytes`` are then what a copy to another device takes.
    """

    bytes: float
    shape: tuple[int, ...] = ()
    shared: bool = False

    def __post_init__(self) -> None:
        require_amount(self.bytes, "bytes")


@documents.record
class DividedTimes:
    """Measured seconds, by kind of device, of an operator divided into ``parts``.

    Of one part (the mean of all), of the cut of each input and of the join of each output; what is
    not there has not been measured.
    """

    parts: int
    part: dict[str, float]
    cuts: tuple[dict[str, float], ...]
    joins: tuple[dict[str, float], ...]

    def __post_init__(self) -> None:
        require_count(self.parts, "parts", _MAX_OPERATORS)
        for times in (self.part, *self.cuts, *self.joins):
            for kind, seconds in times.items():
                require_amount(seconds, f"divided into {self.parts}: seconds on {kind!r}")


@documents.record
class Split:
    """A dimension along which an operator can be divided into up to ``size`` equal parts.

    Attributes
    ----------
    dimension
        ``batch`` or ``channel``: what is divided, as the paper names it.
    inputs
        Per input the axis along which it is cut; None if every part reads all of it.
    outputs
        Per output the axis along which the parts are concatenated; None if they are added.
    measured
        Times of numbers of parts that have been carried out.
    """

    dimension: Literal["batch", "channel"]
    size: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    measured: tuple[DividedTimes, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 2:
            raise InputError(f"a dimension that can be split has a size of 2 or more: {self.size}")
        for one in self.measured:
            if (len(one.cuts), len(one.joins)) != (len(self.inputs), len(self.outputs)):
                raise InputError(
                    f"divided into {one.parts}: times of {len(one.cuts)} cuts and "
                    f"{len(one.joins)} joins; there are {len(self.inputs)} inputs and "
                    f"{len(self.outputs)} outputs"
                )

    def times(self, seconds: dict[str, float], parts: int) -> DividedTimes:
        """The times to plan with, of an operator that takes ``seconds`` by kind of device.

        A part takes what was measured and at least its share: bounds on plans with any splits
        count no less work than that of the whole operator.
        """
        share = {kind: one / parts for kind, one in seconds.items()}
        found = next((one for one in self.measured if one.parts == parts), None)
        if found is None:
            return DividedTimes(parts, share, ({},) * len(self.inputs), ({},) * len(self.outputs))
        part = {kind: max(one, found.part.get(kind, 0.0)) for kind, one in share.items()}
        return replace(found, part=part)


@documents.record
class Node:
    """One operator of the step.

    Attributes
    ----------
    operator
        What is computed, for example ``aten.convolution``.
    inputs
        (node, number of its output) of every tensor that is read.
    seconds
        Time by kind of device; a kind that is not there has not been measured.
    state_bytes
        Bytes that stay on its device for the whole run: parameters, buffers, optimizer's state.
    beside
        A node on whose device this node must be, to share its memory or update its state.
    after
        Nodes that must end before this node starts, though it reads none of their outputs:
        they read memory that this node changes in place.
    splits
        The dimensions along which it can be divided without changing the result.
    line
        The line of the user's code that it comes from.
    """

    name: str
    operator: str
    role: Role
    inputs: tuple[tuple[str, int], ...] = ()
    outputs: tuple[Output, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    state_bytes: float = 0.0
    beside: str | None = None
    after: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()
    line: str | None = None

    def __post_init__(self) -> None:
        require_amount(self.state_bytes, f"operator {self.name!r}: state_bytes")
        for kind, seconds in self.seconds.items():
            require_amount(seconds, f"operator {self.name!r}: seconds on {kind!r}")
        for split in self.splits:
            sizes = (len(split.inputs), len(split.outputs))
            if sizes != (len(self.inputs), len(self.outputs)):
                raise InputError(
                    f"operator {self.name!r}: its {split.dimension} split names {sizes[0]} inputs "
                    f"and {sizes[1]} outputs, it has {len(self.inputs)} and {len(self.outputs)}"
                )


@dataclass(frozen=True)
class StepGraph:
    """The operators of a training step, each after those that it reads from.

    ``samples`` is the size of the mini-batch that the costs are for; ``source`` says where the
    costs come from.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    name: str
    source: str
    samples: int
    nodes: tuple[Node, ...]
    format: Literal["stagewright-graph"] = "stagewright-graph"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        require_count(len(self.nodes), "operators", _MAX_OPERATORS)
        require_count(self.samples, "samples", _MAX_OPERATORS)
        for problem in self._broken():
            raise InputError(f"graph {self.name!r}: {problem}")

    def _broken(self) -> Iterator[str]:
        names = [node.name for node in self.nodes]
        known: dict[str, int] = {}
        for node in self.nodes:
            for name, number in node.inputs:
                if name not in known:
                    late = "comes later: operators are in topological order" * (name in names)
                    yield f"operator {node.name!r} reads {name!r}, which {late or 'is missing'}"
                elif not 0 <= number < known[name]:
                    yield (
                        f"operator {node.name!r} reads output {number} of {name!r}, which has "
                        f"{known[name]}"
                    )
            if node.name in known:
                yield f"two operators are named {node.name!r}"
            yield from _dangling(node, known)
            known[node.name] = len(node.outputs)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def index(self) -> dict[str, int]:
        """The position of every operator."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def hosts(self) -> frozenset[str]:
        """The operators that others are beside."""
        return frozenset(node.beside for node in self.nodes if node.beside is not None)

    def digest(self) -> str:
        """A SHA-256 of everything that a placement depends on."""
        return hashlib.sha256(documents.to_json(self).encode()).hexdigest()

    def structure(self) -> str:
        """A SHA-256 of the computation, without names and times of operators."""
        nodes = tuple(
            replace(node, seconds={}, line=None, splits=_without_times(node.splits))
            for node in self.nodes
        )
        return replace(self, name="", source="", nodes=nodes).digest()


def _without_times(splits: tuple[Split, ...]) -> tuple[Split, ...]:
    return tuple(replace(split, measured=()) for split in splits)


def _dangling(node: Node, known: Mapping[str, int]) -> Iterator[str]:
    """Names in ``beside`` and ``after`` of ``node`` that are no earlier nodes."""
    if node.beside is not None and node.beside not in known:
        yield f"operator {node.name!r} is beside {node.beside!r}, which is not before it"
    for name in node.after:
        if name not in known:
            yield f"operator {node.name!r} is after {name!r}, which is not before it"


def load_graph(path: str | os.PathLike[str]) -> StepGraph:
    """Read a graph document; raises InputError, with one line, if it is not valid."""
    return documents.read(StepGraph, path)


def save_graph(graph: StepGraph, path: str | os.PathLike[str]) -> None:
    """Write a graph document atomically."""
    documents.write(StepGraph, graph, path)


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
