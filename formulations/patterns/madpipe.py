"""MadPipe's allocation of layers to devices for periodic pipelines (MadPipe 4.2).

Every group of devices runs at most one stage, except for one special group, which may run any
number. Stages are chosen from the last to the first. The delay V after a stage is the time from the
end of its forward to the start of its backward; it determines how many microbatches the stage keeps
in flight.

The model is in integers, so sums do not depend on their order and answers are exact. Times are in
ticks, rounded to the nearest; all times sum to about 2^44 ticks. Bytes are in fractions of a byte
such that all sum to about 2^52; requirements are rounded down and memory is rounded up.

Only times within a period are modelled; updates enter as an upper limit on their time.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.patterns.joint_patterns import (
    BYTE_RESOLUTION,
    FORBIDDEN,
    RESOLUTION,
    AllocationTables,
    Placed,
    layer_sums,
    worth_skipping,
)
from stagewright.formulations.plans.actions import DOUBLE_BUFFER
from stagewright.formulations.plans.memory import buffers_per_boundary, kept_tables, state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.models.chain import ChainCosts


def delayed(group: int, rest: int, seconds: int, period: int) -> tuple[int, int]:
    """V (+) y, where V = (group - 1) period + rest (MadPipe 4.2.2).

    An item of y = ``seconds`` (both directions) joins the group if the period has time for it in
    addition to ``rest``; otherwise it starts the next group. This is the least delay at which the
    forward and the backward of one device do not overlap.
    """
    return (group, rest + seconds) if rest + seconds <= period else (group + 1, seconds)


def allocation_period(tables: AllocationTables, placed: Sequence[Placed]) -> int:
    """The least feasible period, found by raising the load bound to the next group change."""
    period = _load(tables, placed)
    while True:
        trips, change = _trips(tables, placed, period)
        wanted = _reduce_period(tables, placed, trips)
        if wanted <= period and _fits(tables, placed, trips):
            return period
        change = change if wanted <= period else min(change, wanted)
        if change == math.inf:
            raise InvalidPlan("the allocation does not fit in memory at any period")
        period = int(change)


def _load(tables: AllocationTables, placed: Sequence[Placed]) -> int:
    """The largest load of a group, of a link, or of an all-reduce per period."""
    loads: Counter[tuple[int, ...]] = Counter()
    for one in placed:
        loads[one.group,] += _seconds(tables, one)
    for one, following in pairwise(placed):
        link = tuple(sorted((one.group, following.group)))
        loads[link] += int(tables.transfer[one.group, following.group, one.stop])
    reduces = [-(-_reduce(tables, one) // (tables.versions - 1)) for one in placed]
    return max(*loads.values(), *reduces)


def _trips(
    tables: AllocationTables, placed: Sequence[Placed], period: int
) -> tuple[list[tuple[int, int]], float]:
    """Group and rest of each stage, V (+) U, and the next period at which a group changes."""
    group, rest, owner = 1, 0, -1
    found, change = [], math.inf
    for one in reversed(placed):
        crossing = int(tables.transfer[one.group, owner, one.stop]) if owner >= 0 else 0
        for seconds in (crossing, _seconds(tables, one)):
            if rest + seconds > period:
                change = min(change, rest + seconds)
            group, rest = delayed(group, rest, seconds, period)
        owner = one.group
        found.append((group, rest))
    return found[::-1], change


def _reduce_period(
    tables: AllocationTables, placed: Sequence[Placed], trips: Sequence[tuple[int, int]]
) -> float:
    """The least period at which every trip and its all-reduce end within m + 1 periods."""
    wanted = 0.0
    for one, (group, rest) in zip(placed, trips, strict=True):
        reduce, left = _reduce(tables, one), tables.versions + 1 - group
        if reduce and left > 0:
            wanted = max(wanted, -(-(rest + reduce) // left))
    return wanted


def _fits(
    tables: AllocationTables, placed: Sequence[Placed], trips: Sequence[tuple[int, int]]
) -> bool:
    """Whether the microbatches in flight fit in memory, with two versions of the weights.

    A stage of group g keeps g microbatches at some instant, at least g - 1 at all times, and at
    least as many as every later stage. So the special group keeps g - 1 microbatches of each of its
    stages, and at some instant one more of a stage and of all earlier stages of the same g.
    MadPipe (4.2.1) counts g - 1 only.
    """
    always = most = before = last = 0
    for one, (group, _) in zip(placed, trips, strict=True):
        sort = tables.sort[one.group]
        stage = (sort, one.choice, one.stop, one.start)
        static = int(tables.static[sort, one.stop, one.start])
        saved, working = int(tables.saved[stage]), int(tables.working[stage])
        if one.group == tables.special:
            before, last = before if group == last else 0, group
            always += static + (group - 1) * saved
            most = max(most, before + saved + working)
            before += saved
        elif static + group * saved + working > tables.memory[one.group]:
            return False
    few = max(group for group, _ in trips) <= tables.versions
    return few and (tables.special < 0 or always + most <= tables.memory[tables.special])


def _seconds(tables: AllocationTables, one: Placed) -> int:
    return int(tables.seconds[tables.sort[one.group], one.choice, one.stop, one.start])


def _reduce(tables: AllocationTables, one: Placed) -> int:
    return int(tables.reduce[one.group, one.stop, one.start])


_RECOMPUTATIONS = ("none", "full")


@dataclass(frozen=True)
class StageAllocationProblem:
    """Allocate the chain of ``problem`` to ``groups`` so that the period is minimal.

    Attributes
    ----------
    problem
        Chain, cluster, and microbatches per iteration m.
    groups
        Device indices of every group, in the order of the pipeline; the devices of a group split
        every microbatch. Normal groups keep this order and run at most one stage each. Any of them
        may stay unused, since a slow group, or one with little memory, can increase the period.
    special
        The group that may run any number of stages anywhere in the pipeline. None: no group may,
        and allocations are contiguous.
    recompute
        Allowed recomputation of a stage: ``none`` keeps all activations for the backward, ``full``
        keeps the stage's input only and recomputes the forward.
    most_update_seconds
        Upper limit on the time of a stage's updates.
    """

    problem: PipelineProblem
    groups: tuple[tuple[int, ...], ...]
    special: int | None = None
    recompute: tuple[str, ...] = ("none",)
    most_update_seconds: float = math.inf

    def __post_init__(self) -> None:
        size, members = len(self.problem.cluster), [v for group in self.groups for v in group]
        if not self.groups or not all(self.groups):
            raise InputError("groups: give at least one, each with at least one device")
        if sorted(set(members)) != sorted(members) or not 0 <= min(members) <= max(members) < size:
            raise InputError(
                f"groups must hold positions from 0 to {size - 1}, each at most once, "
                f"got {self.groups}"
            )
        if self.special is not None and not 0 <= self.special < len(self.groups):
            raise InputError(
                f"special must be None or from 0 to {len(self.groups) - 1}, got {self.special}"
            )
        known = set(self.recompute) <= set(_RECOMPUTATIONS)
        if not known or not 0 < len(self.recompute) == len(set(self.recompute)):
            raise InputError(f"recompute must name 'none', 'full' or both, got {self.recompute}")

    @cached_property
    def tick(self) -> float:
        """Seconds of a tick: a power of two."""
        costs = [
            float((2 * cost.forward_seconds + cost.backward_seconds).sum())
            for cost in (self._costs(group, kind) for group, kind in self._group_kinds)
        ]
        reduce = max(float(seconds.max()) for seconds in self._reduce_seconds)
        total = max(costs) + float(self._transfer_seconds.max(axis=(0, 1)).sum()) + reduce
        return 2.0 ** (math.ceil(math.log2(total)) - RESOLUTION) if total else 1.0

    @cached_property
    def byte(self) -> float:
        """Bytes of a unit: a power of two."""
        replicas = min(len(group) for group in self.groups)
        kept = float(self.problem.saved_per_layer(replicas).sum()) * (self._versions + 1)
        largest = max(float(self.problem.memory_bytes.max()), kept, 1.0)
        return float(2.0 ** (math.ceil(math.log2(largest)) - BYTE_RESOLUTION))

    @property
    def _versions(self) -> int:
        return self.problem.microbatches + 1

    @cached_property
    def tables(self) -> AllocationTables:
        """The problem in integers."""
        sorts = list(dict.fromkeys(self._sort(group) for group in self.groups))
        saved, working = np.array([[table[i] for table in map(self._kept, sorts)] for i in (0, 1)])
        tables = AllocationTables(
            sort=np.array([sorts.index(self._sort(group)) for group in self.groups]),
            seconds=np.array([self._compute_ticks(*sort) for sort in sorts]),
            saved=np.ascontiguousarray(saved),
            working=np.ascontiguousarray(working),
            static=np.array([self._static(replicas) for replicas, _ in sorts]),
            transfer=self._ticks(self._transfer_seconds),
            reduce=self._ticks(np.array(self._reduce_seconds)),
            memory=np.array(
                [
                    math.ceil(self.problem.memory_bytes[list(group)].min() / self.byte)
                    for group in self.groups
                ]
            ),
            normal=np.array([g for g in range(len(self.groups)) if g != self.special], np.int64),
            skips=np.zeros(0, dtype=np.bool_),
            special=-1 if self.special is None else self.special,
            versions=self._versions,
        )
        return tables._replace(skips=worth_skipping(tables))

    def stages(self, placed: Sequence[Placed]) -> tuple[Stage, ...]:
        """The stages of a plan."""
        devices = self.problem.cluster.devices
        return tuple(
            Stage(
                (one.start, one.stop),
                tuple(devices[v].name for v in self.groups[one.group]),
                recompute="full" if self.recompute[one.choice] == "full" else "none",
            )
            for one in placed
        )

    def evaluate(self, placed: Sequence[Placed]) -> int:
        """The least period of an allocation, in ticks.

        Raises
        ------
        InvalidPlan
            If it is not an allocation of this problem, or does not fit in memory at any period.
        """
        for fault in self._broken(placed):
            raise InvalidPlan(fault)
        return allocation_period(self.tables, placed)

    def _broken(self, placed: Sequence[Placed]) -> Iterator[str]:
        layers = [layer for one in placed for layer in range(one.start, one.stop)]
        if layers != list(range(len(self.problem.chain))):
            yield "the stages do not cover every layer once, in order"
        normal = [one.group for one in placed if one.group != self.special]
        if any(later <= one for one, later in pairwise(normal)):
            yield "normal groups must run one stage each, in their order"

    @property
    def _group_kinds(self) -> list[tuple[tuple[int, ...], str]]:
        return [(group, kind) for group in self.groups for kind in self._sort(group)[1]]

    def _sort(self, group: Sequence[int]) -> tuple[int, tuple[str, ...]]:
        """Key of a group's costs: the number of devices and their kinds."""
        kinds = {self.problem.cluster.devices[v].kind for v in group}
        return len(group), tuple(sorted(kinds))

    def _costs(self, group: Sequence[int], kind: str) -> ChainCosts:
        return self.problem.costs(kind, len(group))

    def _ticks(self, seconds: Floats) -> Ints:
        return np.rint(seconds / self.tick).astype(np.int64)

    def _compute_ticks(self, replicas: int, kinds: tuple[str, ...]) -> Ints:
        """U(k, l) per recomputation mode on the slowest kind, shape (R, L + 1, L + 1)."""
        costs = [self.problem.costs(kind, replicas) for kind in kinds]
        forward, backward = (
            np.max([layer_sums(self._ticks(getattr(cost, name))) for cost in costs], axis=0)
            for name in ("forward_seconds", "backward_seconds")
        )
        again = {"none": 1, "full": 2}
        ticks = np.array([again[choice] * forward + backward for choice in self.recompute])
        return np.where(self._forbidden(replicas, kinds), FORBIDDEN, ticks)

    def _forbidden(self, replicas: int, kinds: tuple[str, ...]) -> NDArray[np.bool_]:
        """The stages with fewer samples than devices, or with too long updates."""
        updates = [layer_sums(self.problem.update_per_layer(kind)) for kind in kinds]
        few = layer_sums((self.problem.replicas_per_layer < replicas).astype(np.int64)) > 0
        return np.asarray(few | (np.max(updates, axis=0) > self.most_update_seconds))

    def _kept(self, sort: tuple[int, tuple[str, ...]]) -> tuple[Ints, Ints]:
        """Saved and working bytes as in ``kept_bytes``, each of shape (R, L + 1, L + 1)."""
        replicas, _ = sort
        saved = layer_sums(self._units(self.problem.saved_per_layer(replicas)))
        inputs = self._units(self.problem.inputs_per_layer(replicas))
        return kept_tables(saved, inputs, self.recompute)

    def _static(self, replicas: int) -> Ints:
        """Resident bytes as in ``pattern_problems.static_bytes``, shape (L + 1, L + 1)."""
        problem = self.problem
        factor = state_factor(problem, replicas, DOUBLE_BUFFER, overlapping=True)
        sides = self._units(buffers_per_boundary(problem, replicas))
        weights = layer_sums(self._units(factor * problem.chain.parameter_bytes))
        return np.asarray(weights + sides[:, None] + sides[None, :])

    def _units(self, size: Floats) -> Ints:
        return np.asarray(np.floor(size / self.byte).astype(np.int64))

    @cached_property
    def _transfer_seconds(self) -> Floats:
        """Shape (G, G, L + 1)."""
        groups, layers = self.groups, len(self.problem.chain)
        seconds = np.zeros((len(groups), len(groups), layers + 1))
        for a, b in np.ndindex(len(groups), len(groups)):
            if a < b or (a != b and self.special in (a, b)):
                for l in range(1, layers):
                    seconds[a, b, l] = sum(self.problem.transfer_seconds(l, groups[a], groups[b]))
        return seconds

    @cached_property
    def _reduce_seconds(self) -> list[Floats]:
        """Per group, shape (L + 1, L + 1): affine in the bytes of the gradients."""
        gradients = layer_sums(self.problem.chain.parameter_bytes)
        total, layers = float(gradients[-1, 0]), len(self.problem.chain)
        found = []
        for group in self.groups:
            once = self.problem.reduce_seconds(0, 0, group)
            whole = self.problem.reduce_seconds(0, layers, group)
            found.append(once + gradients * ((whole - once) / total if total else 0.0))
        return found
