"""Versions of the weights in a periodic program where they change after every microbatch.

A microbatch uses the newest version at its forward, or with vertical sync as many updates as the
first stage has made at its own forward of it. A version is kept for as long as a microbatch needs
it: one in flight, or with vertical sync one that has begun on the first stage alone.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from stagewright.executor.programs.program import (
    SENDS,
    Instruction,
    ProgramRows,
    Rows,
    plan_devices,
    stages_on,
)
from stagewright.executor.programs.transfers import RECEIVE_BUFFERS
from stagewright.formulations.plans.actions import (
    COMPUTE,
    REDUCE,
    SEND_B,
    SEND_F,
    UPDATE,
    Action,
    ActionKind,
    B,
    F,
    I,
    Operation,
    W,
    parse_operation,
)
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan
from stagewright.graphs.documents.errors import InvalidPlan

TOLERANCE = 1e-9  # of the period: rounding of sums of times


class ShiftedOperation(NamedTuple):
    """An operation, and its distance in periods from the first operation of its microbatch."""

    operation: Operation
    shift: int


class _Place(NamedTuple):
    """The time of an operation for microbatch 0, and its position in the chain."""

    shift: int
    start_seconds: float
    way: int

    def in_period(self) -> tuple[float, int, int]:
        """The sort key within a period: at equal times, the oldest microbatch comes first.

        It may free a buffer or a version of the weights that a younger one needs at that time.
        """
        return self.start_seconds, -self.shift, self.way


def pattern_order(plan: PipelinePlan) -> tuple[ShiftedOperation, ...]:
    """The operations in the order of a period, computations and transfers, from shift 0 on.

    The order obeys every dependency within a period; the shifts obey those between periods. A
    transfer that is not in the plan follows its computation at once. Where all RECEIVE_BUFFERS + 1
    buffers are taken, a transfer waits for the computation that frees one and comes later than in
    the plan. Raises InvalidPlan if an operation begins before one that it waits for, is missing, or
    is on a device that is not in its stage.
    """
    places = _places(plan)
    for operation in places:
        taker = _taker(places, operation)
        if taker is not None:
            shift, start, _ = places[taker]
            freed = _Place(shift - RECEIVE_BUFFERS - 1, start, places[operation].way)
            places[operation] = max(places[operation], freed)
    first = min(place.shift for place in places.values())
    order = sorted(places, key=lambda operation: places[operation].in_period())
    return tuple(
        ShiftedOperation(operation, places[operation].shift - first) for operation in order
    )


def _places(plan: PipelinePlan) -> dict[Operation, _Place]:
    """The place of each operation of a microbatch; each comes after its predecessor."""
    starts = _starts(plan)
    found: dict[Operation, _Place] = {}
    for chain in _chains(plan, starts):
        before: Operation | None = None
        for operation in chain:
            earliest = (0, 0.0) if before is None else found[before][:2]
            time = starts.get(operation, earliest)
            if time < earliest:
                raise InvalidPlan(f"{operation} begins before {before}, which it waits for")
            found.setdefault(operation, _Place(*time, len(found)))
            before = operation
    return found


def _starts(plan: PipelinePlan) -> dict[Operation, tuple[int, float]]:
    """Shift and start of every operation of the plan, without rounding.

    Operations that start within TOLERANCE of each other start together.
    """
    schedule = plan.schedule
    assert isinstance(schedule, PeriodicSchedule)
    period = schedule.period_seconds
    instants = sorted({0.0, period, *(one.start_seconds for one in schedule.actions)})
    whole: dict[float, float] = {}
    for before, instant in pairwise([-math.inf, *instants]):
        together = instant - before <= TOLERANCE * period
        whole[instant] = whole[before] if together else instant
    found: dict[Operation, tuple[int, float]] = {}
    for one in schedule.actions:
        operation, start = parse_operation(one.action), whole[one.start_seconds]
        if not 0 <= operation.stage < len(plan.stages):
            raise InvalidPlan(f"{operation}: there are only {len(plan.stages)} stages")
        if one.device not in plan.stages[operation.stage].devices:
            raise InvalidPlan(f"{operation} runs on {one.device!r}, which is not in its stage")
        is_next = start == whole[period]
        time = (one.shift + is_next, 0.0 if is_next else start)
        found[operation] = max(found.get(operation, time), time)
    return found


def _chains(plan: PipelinePlan, starts: Collection[Operation]) -> Iterator[list[Operation]]:
    """Forwards and backwards of a microbatch in order; and each I with its W."""
    devices = [stage.devices for stage in plan.stages]
    kinds = [_kinds(s, starts) for s in range(len(devices))]
    way = []
    for s, own in enumerate(devices):
        way.append(Operation(s, F))
        if own != devices[min(s + 1, len(devices) - 1)]:
            way.append(Operation(s, SEND_F))
    for s, own in reversed(list(enumerate(devices))):
        way.append(Operation(s, kinds[s][1]))
        if own != devices[max(s - 1, 0)]:
            way.append(Operation(s, SEND_B))
    yield way
    for s, found in enumerate(kinds):
        yield [Operation(s, kind) for kind in found[1:]]


def _kinds(s: int, starts: Collection[Operation]) -> tuple[ActionKind, ...]:
    """The kinds of a stage's computations: F and B, or F, I and W."""
    found = tuple(kind for kind in COMPUTE if Operation(s, kind) in starts)
    if found not in ((F, B), (F, I, W)):
        raise InvalidPlan(
            f"stage {s} must work on a microbatch by {s}F and {s}B, or by {s}F, {s}I and {s}W; "
            f"found: {', '.join(f'{s}{kind}' for kind in found) or 'nothing'}"
        )
    return found


def _taker(places: Collection[Operation], send: Operation) -> Operation | None:
    """The computation that needs the values of a transfer, if ``send`` is one."""
    if send.kind not in SENDS:
        return None
    kinds, way = ((F,), 1) if send.kind is SEND_F else ((B, I), -1)
    takers = (Operation(send.stage + way, kind) for kind in kinds)
    return next(one for one in takers if one in places)


State = tuple[int, int, tuple[int, ...], tuple[tuple[int, int], ...]]


@dataclass(slots=True)
class _StageVersions:
    """A stage's versions on a rank, by their number of updates; ``held[-1]`` is the newest.

    ``of`` are the versions of the microbatches in flight, ``forwards`` is the number of forwards
    that have begun.
    """

    used: int = 0
    forwards: int = 0
    held: list[int] = field(default_factory=lambda: [0])
    of: dict[int, int] = field(default_factory=dict)

    def relative(self, microbatches: int) -> State:
        """All version numbers, less a number of microbatches, each of which makes a version."""
        return (
            self.used - microbatches,
            self.forwards - microbatches,
            tuple(one - microbatches for one in self.held),
            tuple((m - microbatches, one - microbatches) for m, one in self.of.items()),
        )


class StashedWalk:
    """The weights of all ranks' stages, iteration by iteration; ``order`` is that of a period."""

    def __init__(self, plan: PipelinePlan, order: Sequence[ShiftedOperation]) -> None:
        self.plan, self.iteration = plan, 0
        self._stages = [
            {s: _StageVersions() for s in stages_on(plan, d)} for d in plan_devices(plan)
        ]
        at = {one.operation: (one.shift, i) for i, one in enumerate(order)}
        self._ends = {s: W if Operation(s, W) in at else B for s in range(len(plan.stages))}
        (ends, last), (begins, first) = at[Operation(0, self._ends[0])], at[Operation(0, F)]
        self._in_flight = ends - begins + (last > first)  # on the first stage at a forward

    def relative(self) -> list[dict[int, State]]:
        """The versions, relative to the next iteration."""
        microbatches = self.iteration * self.plan.microbatches
        return [
            {s: one.relative(microbatches) for s, one in stages.items()} for stages in self._stages
        ]

    def through(self, rows: Rows, *, to_the_end: bool = False) -> ProgramRows:
        """``rows`` with all-reduces, updates and versions; ``to_the_end`` nothing comes after."""
        stop = (self.iteration + 1) * self.plan.microbatches if to_the_end else None
        return tuple(
            tuple(self._through(row, stages, stop))
            for row, stages in zip(rows, self._stages, strict=True)
        )

    def _through(
        self, row: Iterable[Instruction], stages: dict[int, _StageVersions], stop: int | None
    ) -> Iterator[Instruction]:
        for s, versions in stages.items():
            yield from self._dropped(s, versions, stop)  # what was kept for later iterations
        due: list[int] = []
        for one in row:
            s, kind, m = one.action.stage, one.action.kind, one.action.microbatch
            if kind not in SENDS:  # the sends of a backward come before its update
                yield from self._updates(due, stages, stop)
                due = []
            if kind in COMPUTE:
                assert m is not None
                yield from self._used(s, stages[s], m)
            yield one
            if kind is self._ends[s]:
                assert m is not None
                del stages[s].of[m]
                yield from self._dropped(s, stages[s], stop)
                due.append(s)
        yield from self._updates(due, stages, stop)

    def _used(self, s: int, versions: _StageVersions, m: int) -> Iterator[Instruction]:
        """A microbatch uses one version from its forward on."""
        if m not in versions.of:
            versions.of[m] = self._required(versions, m)
            versions.forwards += 1
        if versions.used != versions.of[m]:
            versions.used = versions.of[m]
            yield Instruction(Action(s, ActionKind.USE, versions.used))

    def _required(self, versions: _StageVersions, m: int) -> int:
        if self.plan.weight_rule.follows_first_stage:
            return max(0, m + 1 - self._in_flight)
        return versions.held[-1]

    def _is_needed(self, versions: _StageVersions, version: int, stop: int | None) -> bool:
        if version in versions.of.values():
            return True
        following = versions.forwards
        if not self.plan.weight_rule.follows_first_stage or following == stop:
            return False
        return version >= self._required(versions, following)

    def _dropped(self, s: int, versions: _StageVersions, stop: int | None) -> Iterator[Instruction]:
        for version in versions.held[:-1]:
            if not self._is_needed(versions, version, stop):
                versions.held.remove(version)
                yield Instruction(Action(s, ActionKind.DROP, version))

    def _updates(
        self, due: Iterable[int], stages: dict[int, _StageVersions], stop: int | None
    ) -> Iterator[Instruction]:
        for s in due:
            versions = stages[s]
            newest = versions.held[-1]
            if len(self.plan.stages[s].devices) > 1:
                yield Instruction(Action(s, REDUCE))
            if self._is_needed(versions, newest, stop):
                yield Instruction(Action(s, ActionKind.STASH, newest))
            else:
                versions.held.remove(newest)
            yield Instruction(Action(s, UPDATE))
            versions.held.append(newest + 1)
            versions.used = newest + 1
