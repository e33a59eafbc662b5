"""The operations of a period in one order, each with its index shift."""

import math
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import NamedTuple

from stagewright.executor.programs.program import SENDS
from stagewright.executor.programs.transfers import RECEIVE_BUFFERS
from stagewright.formulations.plans.actions import COMPUTE, ActionKind, Operation, parse_operation
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan
from stagewright.graphs.documents.errors import InvalidPlan

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD


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
