"""An operator of a problem's arrays divided into parts, without the graph's document.

The same arrays as those of the document after :func:`split_graph`, in a fraction of the time: plans
with splits try thousands of them.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from stagewright.formulations.operators.plan import SplitChoice
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.operators.step_graph import Split, StepGraph
from stagewright.solvers.operators.ranks import Arrays


@dataclass(frozen=True, slots=True)
class OperatorDivision:
    """One operator to divide, as numbers of operators and tensors.

    Attributes
    ----------
    at
        The operator; its cuts, parts and joins take its place in this order.
    cuts, whole, waits
        The tensors that are cut, those that every part reads whole, and the ends of the operators
        that it comes after.
    is_added
        Per output whether the parts are added, not concatenated.
    joins
        The outputs that are joined.
    seconds
        Of the cuts, the parts and the joins on each device.
    """

    at: int
    parts: int
    cuts: Ints
    whole: Ints
    waits: Ints
    is_added: Bools
    joins: Ints
    seconds: Floats

    @property
    def more(self) -> int:
        """The number of operators that the division adds."""
        return len(self.cuts) + self.parts + len(self.joins) - 1


class Places:
    """Where the operators of a graph are in arrays in which some are divided."""

    def __init__(self, graph: StepGraph, cluster: Cluster) -> None:
        self.graph = graph
        self.kinds = [device.kind for device in cluster.devices]
        self.place = np.arange(len(graph))
        self.done: dict[int, OperatorDivision] = {}

    def division(self, arrays: Arrays, choice: SplitChoice) -> OperatorDivision:
        """``choice``, of an operator of the graph that is whole, in numbers."""
        node = self.graph.nodes[self.graph.index[choice.operator]]
        at = int(self.place[self.graph.index[choice.operator]])
        split = next(one for one in node.splits if one.dimension == choice.dimension)
        tensors = [self._output(arrays, name, number) for name, number in node.inputs]
        ends = [t for name in node.after for t in self._ends(arrays, name)]
        first = arrays.first_output[at]
        own = slice(first, first + len(node.outputs))
        is_read = np.diff(arrays.first_reader)[own] > 0
        joins = np.flatnonzero(is_read | (arrays.sent_bytes[own] > 0))
        times = split.times(node.seconds, choice.parts)
        rows = [
            *(one for one, axis in zip(times.cuts, split.inputs, strict=True) if axis is not None),
            *(times.part,) * choice.parts,
            *(times.joins[k] for k in joins),
        ]
        return OperatorDivision(
            at,
            choice.parts,
            _picked(tensors, split, is_cut=True),
            _picked(tensors, split, is_cut=False),
            np.array(ends, dtype=np.int64),
            np.array([axis is None for axis in split.outputs], dtype=bool),
            joins,
            np.array([[one.get(kind, 0.0) for kind in self.kinds] for one in rows]),
        )

    def divide(self, operator: str, division: OperatorDivision) -> None:
        """Divide ``operator`` in all later steps."""
        self.done[self.graph.index[operator]] = division
        self.place[self.place > division.at] += division.more

    def _output(self, arrays: Arrays, name: str, number: int) -> int:
        i = self.graph.index[name]
        first = int(self.place[i])
        if i in self.done:
            before = int(np.searchsorted(self.done[i].joins, number))
            join = first + len(self.done[i].cuts) + self.done[i].parts + before
            return int(arrays.first_output[join])
        return int(arrays.first_output[first] + number)

    def _ends(self, arrays: Arrays, name: str) -> list[int]:
        """The last tensor of each operator, which stands for the operator's end."""
        i = self.graph.index[name]
        first = int(self.place[i])
        if i not in self.done:
            return [int(arrays.first_output[first + 1] - 1)]
        begin = first + len(self.done[i].cuts)
        last: Ints = arrays.first_output[begin + 1 : begin + 1 + self.done[i].parts] - 1
        return [int(t) for t in last]


def _picked(tensors: list[int], split: Split, *, is_cut: bool) -> Ints:
    pairs = zip(tensors, split.inputs, strict=True)
    return np.array([t for t, axis in pairs if (axis is not None) == is_cut], dtype=np.int64)


def divided(arrays: Arrays, division: OperatorDivision) -> Arrays:
    """The arrays after a division."""
    return _divided(
        arrays,
        division.at,
        division.parts,
        division.cuts,
        division.whole,
        division.waits,
        division.is_added,
        division.joins,
        division.seconds,
    )


@njit(cache=True, error_model="numpy")
def _divided(  # noqa: C901 - one pass over tensors
    a: Arrays,
    at: int,
    parts: int,
    cuts: Ints,
    whole: Ints,
    waits: Ints,
    is_added: Bools,
    joins: Ints,
    part_seconds: Floats,
) -> Arrays:
    n = len(a.seconds)
    outputs, first_cut = len(is_added), at
    join_of = np.full(outputs, -1)
    first_part, first_join = at + len(cuts), at + len(cuts) + parts
    join_of[joins] = first_join + np.arange(len(joins))
    more = first_join + len(joins) - at - 1
    low, high = a.first_output[at], a.first_output[at + 1]
    own = high - low  # with the end, if others come after the operator
    has_end = own > outputs
    size = len(a.maker) - own + (len(cuts) + own) * parts + len(joins)
    maker = np.empty(size, np.int64)
    sent, held = np.empty(size), np.empty(size)
    first_reader = np.zeros(size + 1, np.int64)
    most = len(a.reader) + (len(cuts) + parts) * (len(cuts) + len(whole) + len(waits))
    most += parts * (len(cuts) + outputs)
    if has_end:
        most += parts * (a.first_reader[high] - a.first_reader[high - 1])
    reader = np.empty(most, np.int64)
    k, r = 0, 0  # tensors and readers so far
    for t in range(low):
        maker[k], sent[k], held[k] = a.maker[t], a.sent_bytes[t], a.held_bytes[t]
        for e in range(a.first_reader[t], a.first_reader[t + 1]):
            j = a.reader[e]
            if j != at:
                reader[r] = j if j < at else j + more
                r += 1
                continue
            is_waited = _is_in(t, waits)
            for c in range(len(cuts)):
                if is_waited or cuts[c] == t:
                    reader[r] = first_cut + c
                    r += 1
            if is_waited or _is_in(t, whole):
                for p in range(parts):
                    reader[r] = first_part + p
                    r += 1
        k += 1
        first_reader[k] = r
    for c in range(len(cuts)):
        for p in range(parts):
            maker[k] = first_cut + c
            sent[k] = held[k] = a.sent_bytes[cuts[c]] / parts
            reader[r] = first_part + p
            r += 1
            k += 1
            first_reader[k] = r
    for p in range(parts):
        for o in range(outputs):
            maker[k] = first_part + p
            whole_bytes = a.sent_bytes[low + o]
            sent[k] = held[k] = whole_bytes if is_added[o] else whole_bytes / parts
            if join_of[o] >= 0:
                reader[r] = join_of[o]
                r += 1
            k += 1
            first_reader[k] = r
        if has_end:
            maker[k], sent[k], held[k] = first_part + p, 0.0, 0.0
            for e in range(a.first_reader[high - 1], a.first_reader[high]):
                reader[r] = a.reader[e] + more
                r += 1
            k += 1
            first_reader[k] = r
    for o in joins:
        t = low + o
        maker[k], sent[k], held[k] = join_of[o], a.sent_bytes[t], a.held_bytes[t]
        for e in range(a.first_reader[t], a.first_reader[t + 1]):
            reader[r] = a.reader[e] + more
            r += 1
        k += 1
        first_reader[k] = r
    for t in range(high, len(a.maker)):
        maker[k], sent[k], held[k] = a.maker[t] + more, a.sent_bytes[t], a.held_bytes[t]
        for e in range(a.first_reader[t], a.first_reader[t + 1]):
            reader[r] = a.reader[e] + more
            r += 1
        k += 1
        first_reader[k] = r
    reader = reader[:r].copy()
    seconds = np.concatenate((a.seconds[:at], part_seconds, a.seconds[at + 1 :]))
    group, group_bytes = _groups(a, at, more)
    first_input, tensors = _inputs(first_reader, reader, n + more)
    return Arrays(
        seconds,
        maker,
        first_reader,
        reader,
        first_input,
        tensors,
        np.searchsorted(maker, np.arange(n + more + 1)),
        sent,
        held,
        a.latency,
        a.seconds_per_byte,
        a.memory,
        group,
        group_bytes,
        a.exclusive,
    )


@njit(cache=True)
def _is_in(value: int, values: Ints) -> bool:
    for one in values:  # noqa: SIM110 - numba has no generators in any
        if one == value:
            return True
    return False


@njit(cache=True)
def _groups(a: Arrays, at: int, more: int) -> tuple[Ints, Floats]:
    """The group of every operator, and the state of each; the new ones have groups of their own."""
    n, alone = len(a.group), a.group[at]
    group = np.empty(n + more, np.int64)
    for i in range(n):
        place = i if i < at else i + more
        group[place] = a.group[i] if a.group[i] < alone else a.group[i] + more
    group[at : at + more + 1] = alone + np.arange(more + 1)
    group_bytes = np.zeros(len(a.group_bytes) + more)
    group_bytes[:alone] = a.group_bytes[:alone]
    group_bytes[alone + more + 1 :] = a.group_bytes[alone + 1 :]
    return group, group_bytes


@njit(cache=True)
def _inputs(first_reader: Ints, reader: Ints, n: int) -> tuple[Ints, Ints]:
    """As ``OperatorProblem.inputs``."""
    first = np.zeros(n + 1, np.int64)
    for j in reader:
        first[j + 1] += 1
    first = np.cumsum(first)
    at, tensors = first.copy(), np.empty(len(reader), np.int64)
    for t in range(len(first_reader) - 1):
        for e in range(first_reader[t], first_reader[t + 1]):
            tensors[at[reader[e]]] = t
            at[reader[e]] += 1
    return first, tensors
