"""The operations of a period in one order, each with its index shift."""

import math
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import NamedTuple

from stagewright.executor.programs.program import (
    SENDS,
)
from stagewright.executor.programs.transfers import RECEIVE_BUFFERS
from stagewright.formulations.plans.actions import (
    COMPUTE,
    ActionKind,
    Operation,
    parse_operation,
)
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan
from stagewright.graphs.documents.errors import InvalidPlan

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD


TOLERANCE = 1e-9  # of the period: rounding of sums of times


class Turn(NamedTuple):
    """An operation, and how many periods after its microbatch began it is done."""

    operation: Operation
    shift: int


class _Place(NamedTuple):
    """When an operation is done for microbatch 0, and where it stands on the microbatch's way."""

    shift: int
    start_seconds: float
    way: int

    def in_period(self) -> tuple[float, int, int]:
        """What orders the operations of a period: at one instant, the oldest microbatch goes first.

        It may free what a younger one needs at that instant: a buffer, or a version of the weights.
        """
        return self.start_seconds, -self.shift, self.way


def pattern_order(plan: PipelinePlan) -> tuple[Turn, ...]:
    """The operations in the order of a period, computations and transfers, from shift 0 on.

    The order obeys every dependency within a period; those between periods the shifts obey. A
    transfer that does not stand in the plan follows at once. One that would find RECEIVE_BUFFERS
    and the one that is needed next taken waits for the computation that frees one: it comes later
    than in the plan.

    Raises
    ------
    InvalidPlan
        If an operation begins before one that it waits for, is missing, or is not its stage's.
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
    return tuple(Turn(operation, places[operation].shift - first) for operation in order)


def _places(plan: PipelinePlan) -> dict[Operation, _Place]:
    """Where each operation stands, along a microbatch's way; none before the one before it."""
    starts = _starts(plan)
    found: dict[Operation, _Place] = {}
    for chain in _ways(plan, starts):
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
    """Shift and start of every operation that stands in the plan, without rounding.

    What starts within TOLERANCE of another one starts with it.
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
            raise InvalidPlan(f"{operation} stands on {one.device!r}, which is not in its stage")
        is_next = start == whole[period]
        time = (one.shift + is_next, 0.0 if is_next else start)
        found[operation] = max(found.get(operation, time), time)
    return found


def _ways(plan: PipelinePlan, starts: Collection[Operation]) -> Iterator[list[Operation]]:
    """A microbatch's way forth and back, and from each gradient of an input to the weights'."""
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
    """What a stage's computations are: F and B, or F, I and W."""
    found = tuple(kind for kind in COMPUTE if Operation(s, kind) in starts)
    if found not in ((F, B), (F, I, W)):
        raise InvalidPlan(
            f"stage {s} must work on a microbatch by {s}F and {s}B, or by {s}F, {s}I and {s}W; "
            f"found: {', '.join(f'{s}{kind}' for kind in found) or 'nothing'}"
        )
    return found


def _taker(places: Collection[Operation], send: Operation) -> Operation | None:
    """The computation that needs what a transfer brings, if ``send`` is one."""
    if send.kind not in SENDS:
        return None
    kinds, way = ((F,), 1) if send.kind is SEND_F else ((B, I), -1)
    takers = (Operation(send.stage + way, kind) for kind in kinds)
    return next(one for one in takers if one in places)
