"""The common problem of out-of-order backprop (Oh et al., EuroSys 2022, section 2).

The window starts with the gradient of the loss at time 0 and ends with the last layer's forward of
the next iteration. Layers are numbered from 1 as in the paper, microbatches from 0. What a training
method lacks takes no time.

An operation occupies its resource, a stream of a device or a link. Some links may suspend a
transfer for a more urgent one: an answer therefore states *pieces* of operations.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE, running_peak
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import require_amount

Kind = Literal["loss", "F", "R", "dO", "dW", "S[F]", "S[dO]", "S[dW]", "U"]

NO_RESOURCE = -1  # of operations that take no time


@dataclass(frozen=True, slots=True)
class Resource:
    """A stream or a link: one operation at a time.

    Operations are suspended only at multiples of ``chunk_seconds`` of their work: infinity for
    never (streams, exclusive links), 0 for at any time (preemptible links).
    """

    name: str
    chunk_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class BackpropOperation:
    """One operation.

    ``R`` is the second run of a forward whose output was dropped, ``U`` an optimizer step.
    """

    kind: Kind
    layer: int
    microbatch: int
    resource: int
    seconds: float

    @property
    def name(self) -> str:
        """The operation as text: ``dW3.0`` is layer 3, microbatch 0."""
        return f"{self.kind}{self.layer}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class BackpropTensor:
    """``amount`` bytes on ``device``, from the start of ``first`` to the end of all of ``last``.

    Without ``last`` it is held to the end of the window.
    """

    device: int
    amount: float
    first: int
    last: tuple[int, ...] = ()


@dataclass(frozen=True)
class BackpropProblem:
    """Order operations on their resources; minimise the end of the window.

    ``before``: pairs of operations (i, j): j starts after the end of i. ``tensors`` and ``memory``:
    what takes memory, and the limit per device in bytes; no limits if ``memory`` is empty.
    """

    operations: tuple[BackpropOperation, ...]
    resources: tuple[Resource, ...]
    before: tuple[tuple[int, int], ...]
    tensors: tuple[BackpropTensor, ...] = ()
    memory: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for place in self.resources:
            if not place.chunk_seconds >= 0:
                raise InputError(f"{place.name}: chunk_seconds must not be negative")
        for one in self.operations:
            require_amount(one.seconds, one.name)
            lowest = NO_RESOURCE if one.seconds == 0 else 0
            if not lowest <= one.resource < len(self.resources):
                raise InputError(f"{one.name}: there is no resource {one.resource}")
        self._require_indices((i for pair in self.before for i in pair), "before")
        _require_acyclic(self)
        for limit in self.memory:
            require_amount(limit, "memory")
        for tensor in self.tensors:
            require_amount(tensor.amount, "tensor")
            self._require_indices((tensor.first, *tensor.last), "tensors")
            if self.memory and not 0 <= tensor.device < len(self.memory):
                raise InputError(f"memory has no limit for device {tensor.device}")

    def _require_indices(self, indices: Iterable[int], name: str) -> None:
        for i in indices:
            if not 0 <= i < len(self.operations):
                raise InputError(f"{name}: there is no operation {i}")

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of the operations, shape (n,)."""
        return np.array([one.seconds for one in self.operations], dtype=float)

    @cached_property
    def resource(self) -> Ints:
        """Resources of the operations, shape (n,)."""
        return np.array([one.resource for one in self.operations], dtype=np.int64)

    @cached_property
    def edges(self) -> Ints:
        """``before`` as an array, shape (edges, 2)."""
        return np.array(self.before, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def followers(self) -> tuple[Ints, Ints]:
        """(first, members): operation i's successors are ``members[first[i] : first[i + 1]]``."""
        return _rows(self.edges[:, 0], self.edges[:, 1], len(self.operations))

    @cached_property
    def preceding(self) -> tuple[Ints, Ints]:
        """(first, members): the predecessors of each operation, as in :attr:`followers`."""
        return _rows(self.edges[:, 1], self.edges[:, 0], len(self.operations))

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """The operations, each after those it waits for."""
        return tuple(_topological(self))

    @cached_property
    def heads(self) -> Floats:
        """Least start of each operation by precedence alone."""
        return _longest(self, self.topological, self.edges)

    @cached_property
    def tails(self) -> Floats:
        """Least time from the end of each operation to the end of the window."""
        return _longest(self, self.topological[::-1], self.edges[:, ::-1])

    def find(self, kind: Kind, layer: int, microbatch: int = 0) -> int:
        """The index of an operation; KeyError if there is none."""
        return self._index[kind, layer, microbatch]

    @cached_property
    def _index(self) -> dict[tuple[str, int, int], int]:
        rows = enumerate(self.operations)
        return {(one.kind, one.layer, one.microbatch): i for i, one in rows}

    def evaluate(self, timetable: "WindowTimes") -> float:
        """Check every constraint and return the end of the window, T(F_L) + F_L.

        Raises InvalidPlan if a constraint is broken; the message names the first one.
        """
        slack = RELATIVE_TOLERANCE * float(self.seconds.sum())
        _require_work(self, timetable, slack)
        _require_order(self, timetable, slack)
        for r in range(len(self.resources)):
            _require_one_at_a_time(self, timetable, r, slack)
        for device, peak in enumerate(peaks(self, timetable)):
            if self.memory and peak > self.memory[device] * (1 + RELATIVE_TOLERANCE):
                raise InvalidPlan(
                    f"device {device}: {peak:g} bytes in memory, the limit is "
                    f"{self.memory[device]:g}"
                )
        return timetable.end


@dataclass(frozen=True, eq=False)
class WindowTimes:
    """Pieces: ``operation[p]`` runs from ``start[p]`` to ``finish[p]`` (seconds)."""

    operation: Ints
    start: Floats
    finish: Floats

    @classmethod
    def of_starts(cls, problem: BackpropProblem, starts: Floats) -> "WindowTimes":
        """Every operation in one piece from ``starts``, shape (n,)."""
        starts = np.asarray(starts, dtype=float)
        if starts.shape != problem.seconds.shape:
            raise InvalidPlan(f"{len(problem.operations)} starts needed, got {starts.shape}")
        return cls(np.arange(len(starts)), starts, starts + problem.seconds)

    @property
    def end(self) -> float:
        """The end of the last piece."""
        return float(self.finish.max(initial=0.0))

    @cached_property
    def starts(self) -> Floats:
        """The start of each operation's first piece."""
        found = np.full(1 + int(self.operation.max(initial=-1)), np.inf)
        np.minimum.at(found, self.operation, self.start)
        return found

    @cached_property
    def ends(self) -> Floats:
        """The end of each operation's last piece."""
        found = np.full(len(self.starts), -np.inf)
        np.maximum.at(found, self.operation, self.finish)
        return found


def peaks(problem: BackpropProblem, timetable: WindowTimes) -> tuple[float, ...]:
    """The most bytes on each device at any time; what ends frees its memory before others start."""
    starts, ends = timetable.starts, timetable.ends
    devices = 1 + max((tensor.device for tensor in problem.tensors), default=-1)
    changes: list[list[tuple[float, float]]] = [
        [] for _ in range(max(devices, len(problem.memory)))
    ]
    for tensor in problem.tensors:
        last = ends[list(tensor.last)].max() if tensor.last else math.inf
        if last > starts[tensor.first]:
            changes[tensor.device] += [
                (starts[tensor.first], tensor.amount),
                (last, -tensor.amount),
            ]
    return tuple(running_peak(rows, RELATIVE_TOLERANCE * timetable.end) for rows in changes)


def _topological(problem: BackpropProblem) -> list[int]:
    waits = [0] * len(problem.operations)
    after: list[list[int]] = [[] for _ in waits]
    for i, j in problem.before:
        waits[j] += 1
        after[i].append(j)
    order = [i for i, count in enumerate(waits) if count == 0]
    for i in order:
        for j in after[i]:
            waits[j] -= 1
            if waits[j] == 0:
                order.append(j)
    return order


def _longest(problem: BackpropProblem, order: tuple[int, ...], edges: Ints) -> Floats:
    after: list[list[int]] = [[] for _ in order]
    for i, j in edges.tolist():
        after[i].append(j)
    found, seconds = [0.0] * len(order), problem.seconds.tolist()
    for i in order:
        for j in after[i]:
            found[j] = max(found[j], found[i] + seconds[i])
    return np.array(found)


def _rows(owner: Ints, member: Ints, count: int) -> tuple[Ints, Ints]:
    first = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=count))))
    return first, member[np.argsort(owner, kind="stable")]


def _require_acyclic(problem: BackpropProblem) -> None:
    left = set(range(len(problem.operations))) - set(problem.topological)
    if left:
        raise InputError(f"before has a cycle through {problem.operations[min(left)].name}")


def _require_work(problem: BackpropProblem, timetable: WindowTimes, slack: float) -> None:
    """Every operation runs for its seconds, from time 0 on."""
    operation, start, finish = timetable.operation, timetable.start, timetable.finish
    if not (np.isfinite(start).all() and np.isfinite(finish).all() and (start >= -slack).all()):
        raise InvalidPlan("a time is negative or not finite")
    if (finish < start).any() or not np.isin(operation, np.arange(len(problem.operations))).all():
        raise InvalidPlan("a piece ends before it starts, or is of no operation")
    count = len(problem.operations)
    pieces = np.bincount(operation, minlength=count)
    work = np.bincount(operation, finish - start, minlength=count)
    wrong = np.flatnonzero((pieces == 0) | (np.abs(work - problem.seconds) > slack))
    if len(wrong):
        i = int(wrong[0])
        one = problem.operations[i]
        raise InvalidPlan(f"{one.name} runs for {work[i]:g} s of {one.seconds:g} s")


def _require_order(problem: BackpropProblem, timetable: WindowTimes, slack: float) -> None:
    first, second = problem.edges.T
    early = np.flatnonzero(timetable.starts[second] < timetable.ends[first] - slack)
    if len(early):
        i, j = problem.before[early[0]]
        names = problem.operations[i].name, problem.operations[j].name
        raise InvalidPlan(f"{names[1]} starts before {names[0]} ends")


def _require_one_at_a_time(
    problem: BackpropProblem, timetable: WindowTimes, r: int, slack: float
) -> None:
    """Pieces on a resource do not overlap, and operations are suspended where they may be."""
    on = (problem.resource[timetable.operation] == r) & (timetable.finish > timetable.start)
    own = np.flatnonzero(on)
    own = own[np.lexsort((timetable.finish[own], timetable.start[own]))]
    start, finish = timetable.start[own], timetable.finish[own]
    name = problem.resources[r].name
    early = np.flatnonzero(start[1:] < finish[:-1] - slack)
    if len(early):
        one = problem.operations[timetable.operation[own[early[0] + 1]]]
        raise InvalidPlan(f"{name}: {one.name} starts while another operation runs")
    done = np.zeros(len(problem.operations))
    chunk = problem.resources[r].chunk_seconds
    for i, seconds in zip(
        timetable.operation[own].tolist(), (finish - start).tolist(), strict=True
    ):
        if done[i] > slack and not _is_multiple(done[i], chunk, slack):
            raise InvalidPlan(f"{name}: {problem.operations[i].name} is suspended within a chunk")
        done[i] += seconds


def _is_multiple(value: float, chunk: float, slack: float) -> bool:
    if chunk == 0:
        return True
    return math.isfinite(chunk) and abs(value - chunk * round(value / chunk)) <= slack
