"""Partition of an operator graph as an integer program (Tarnawski et al. 2020, section 5.1).

It knows neither downsets nor merged parts, and cross-checks them on small cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from stagewright.formulations.dags.problem import DagProblem, PlacedSet
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError

_Row = dict[int, float]


@dataclass(frozen=True, slots=True)
class ByAssignment:
    """A binary for every part, place in the pipeline and pool; minimise the largest load T.

    A place has at most one device, of one pool; there are as many places as devices, at most one
    per part. Columns: x[v, i, p], part v is on a device of pool p at place i; z[i, p], place i has
    a device of pool p; y[t, i, p], that device sends or receives tensor t; and T, in units of all
    work. ``contiguous``: the places of the parts are in the order of the edges.
    """

    contiguous: bool = True

    def apply(self, problem: DagProblem) -> LinearProgram:
        """The program; infeasible if no partition fits in memory.

        Raises
        ------
        InputError
            If sets may have replicas.
        """
        if problem.most_replicas > 1:
            raise InputError("the integer program divides among devices without replicas")
        columns = _Columns(problem)
        least: list[_Row] = []  # rows that are at least 0
        least += _used(columns)
        least += _one_kind(columns)
        least += _counts(problem, columns)
        least += _memory(problem, columns)
        least += _sent(problem, columns)
        least += _loads(problem, columns)
        if self.contiguous:
            least += _in_order(problem, columns)
        once = [_whole(columns, v) for v in range(len(problem.names))]
        last = columns.constant + 1
        return LinearProgram(
            cost=np.eye(1, last, columns.slowest).ravel() * columns.unit,
            matrix=_sparse([*once, *least], last),
            row_lower=np.r_[np.ones(len(once)), np.zeros(len(least))],
            row_upper=np.r_[np.ones(len(once)), np.full(len(least), np.inf)],
            lower=np.eye(1, last, columns.constant).ravel(),
            upper=np.where(np.arange(last) == columns.slowest, np.inf, 1.0),
            integral=np.arange(last) < columns.sent(0, 0, 0),
        )

    def invert(self, problem: DagProblem, values: Floats) -> tuple[PlacedSet, ...]:
        """The sets of the places that have parts, in the order of the pipeline."""
        columns = _Columns(problem)
        found: dict[tuple[int, int], list[int]] = {}
        for v in range(columns.parts):
            for i in range(columns.places):
                for p in range(columns.pools):
                    if values[columns.part(v, i, p)] > 0.5:
                        found.setdefault((i, p), []).append(v)
        return tuple(PlacedSet(p, tuple(own)) for (_, p), own in sorted(found.items()))


class _Columns:
    """The numbers of the columns; the last one is fixed at 1, for constants of rows."""

    def __init__(self, problem: DagProblem) -> None:
        self.parts, self.pools = len(problem.names), len(problem.pools)
        self.places = min(self.parts, sum(pool.count for pool in problem.pools))
        self.tensors = len(problem.tensors)
        slots = self.places * self.pools
        self.slowest = (self.parts + 1 + self.tensors) * slots
        self.constant = self.slowest + 1
        self.unit = float(problem.seconds.max(axis=1).sum()) or 1.0

    def part(self, v: int, i: int, p: int) -> int:
        return (v * self.places + i) * self.pools + p

    def place(self, i: int, p: int) -> int:
        return self.part(self.parts, i, p)

    def sent(self, t: int, i: int, p: int) -> int:
        return self.part(self.parts + 1 + t, i, p)

    def slots(self) -> list[tuple[int, int]]:
        return [(i, p) for i in range(self.places) for p in range(self.pools)]


def _whole(columns: _Columns, v: int) -> _Row:
    """A part is at one place (equal to 1)."""
    return {columns.part(v, i, p): 1.0 for i, p in columns.slots()}


def _used(columns: _Columns) -> list[_Row]:
    """Parts are where there is a device."""
    return [
        {columns.place(i, p): 1.0, columns.part(v, i, p): -1.0}
        for v in range(columns.parts)
        for i, p in columns.slots()
    ]


def _one_kind(columns: _Columns) -> list[_Row]:
    """A place has at most one device."""
    return [
        {columns.constant: 1.0} | {columns.place(i, p): -1.0 for p in range(columns.pools)}
        for i in range(columns.places)
    ]


def _counts(problem: DagProblem, columns: _Columns) -> list[_Row]:
    """No more devices of a pool than there are."""
    return [
        {columns.constant: float(pool.count)}
        | {columns.place(i, p): -1.0 for i in range(columns.places)}
        for p, pool in enumerate(problem.pools)
    ]


def _memory(problem: DagProblem, columns: _Columns) -> list[_Row]:
    """What a device holds fits, as a share of its memory."""
    rows = []
    for i, p in columns.slots():
        memory = problem.pools[p].memory
        if problem.bytes.sum() > memory:
            held = {columns.part(v, i, p): -b for v, b in enumerate(problem.bytes) if b}
            scale = memory or 1.0
            rows.append(
                {columns.constant: memory / scale} | {k: b / scale for k, b in held.items()}
            )
    return rows


def _sent(problem: DagProblem, columns: _Columns) -> list[_Row]:
    """A tensor is sent or received where its first part is and another is not, or the reverse."""
    rows = []
    for t, tensor in enumerate(problem.tensors):
        first, *others = tensor.parts
        for i, p in columns.slots():
            for other in others:
                here, there = columns.part(first, i, p), columns.part(other, i, p)
                rows.append({columns.sent(t, i, p): 1.0, here: -1.0, there: 1.0})
                rows.append({columns.sent(t, i, p): 1.0, here: 1.0, there: -1.0})
    return rows


def _loads(problem: DagProblem, columns: _Columns) -> list[_Row]:
    """The load of a device is at most T."""
    rows = []
    for i, p in columns.slots():
        row = {
            columns.part(v, i, p): -float(seconds) / columns.unit
            for v, seconds in enumerate(problem.seconds[:, p])
        }
        if problem.pools[p].pays_transfers:
            row |= {
                columns.sent(t, i, p): -tensor.seconds / columns.unit
                for t, tensor in enumerate(problem.tensors)
            }
        rows.append(row | {columns.slowest: 1.0})
    return rows


def _in_order(problem: DagProblem, columns: _Columns) -> list[_Row]:
    """Up to any place there is b only if there is a, for every edge (a, b)."""
    rows = []
    for a, b in problem.edges:
        for last in range(columns.places - 1):
            row: _Row = {}
            for i, p in columns.slots():
                if i <= last:
                    row[columns.part(a, i, p)] = 1.0
                    row[columns.part(b, i, p)] = -1.0
            rows.append(row)
    return rows


def _sparse(rows: Sequence[_Row], size: int) -> sparse.csr_array:
    entries = [(r, column, value) for r, row in enumerate(rows) for column, value in row.items()]
    r, column, value = (np.array(one) for one in zip(*entries, strict=True))
    return sparse.csr_array((value, (r, column)), shape=(len(rows), size))
