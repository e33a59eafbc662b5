"""Answers about schedules of given stages, and about job shops."""

from typing import TYPE_CHECKING, Annotated, Any

from stagewright.formulations.forms.answers import Status
from stagewright.service.answers import CARRIED, Answer, Finite

if TYPE_CHECKING:
    from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
    from stagewright.formulations.schedules.timing import TimedOrder
    from stagewright.solvers.pipelines.scheduling import ScheduleResult
else:  # carried, not validated: their libraries are slow to import
    MakespanProblem = Timetable = TimedOrder = ScheduleResult = Any

Number = int | Finite
"""A whole number stays one."""


class ScheduleFigures(Answer):
    """The main numbers of a schedule; times and memory in the request's units.

    ``makespan``: the end of the last computation. ``span``: the longest time of a device from its
    first start to its last end. ``bubble``: idle time of the busiest device as a fraction of its
    work. ``idle``: idle time of all devices as a fraction of their time until the makespan.
    ``peak_memory``: the largest of any device. ``bound``, ``gap`` and ``status``: of the objective.
    """

    status: Status
    kind: str
    placement: str
    devices: int
    chunks: int | None
    objective: str
    makespan: Number
    span: Number
    bubble: Finite
    idle: Finite
    peak_memory: Number
    bound: Number
    gap: Finite
    proved_by: str
    wall_seconds: float
    reason: str | None


class ScheduleAnswer(ScheduleFigures):
    """A schedule of fixed stages, of which stage s is on ``device[s]``, if it has one copy.

    ``order`` and ``starts`` are per device, as in ``timed``; None if there is no schedule. They are
    without transfers. Generated orders have the times of channels that serve first come, first
    served; the optimal schedule orders its channels too, and may take longer where they are served
    otherwise. Plans state their transfers: ``simulate`` keeps the order on every channel.
    """

    planner: str
    stages: int
    microbatches: int
    device: tuple[int, ...] | None
    cost_seconds: Number
    bound_seconds: Number
    peak_memory_per_device: tuple[Number, ...] | None
    order: tuple[tuple[str, ...], ...] | None
    starts: tuple[tuple[Number, ...], ...] | None
    problem: Annotated[MakespanProblem, CARRIED]
    result: Annotated[ScheduleResult | None, CARRIED]
    timed: Annotated[TimedOrder | None, CARRIED]


class ComparedSchedule(ScheduleFigures):
    """A schedule of a comparison; ``same_as_kinds`` have the same order."""

    same_as_kinds: tuple[str, ...]


class RefusedSchedule(Answer):
    """A kind of schedule that does not fit, and why."""

    kind: str
    reason: str


class ScheduleComparison(Answer):
    """All kinds of schedule that fit, the best first, then those that do not."""

    status: str = "compared"
    stages: int
    microbatches: int
    objective: str
    wall_seconds: float
    schedules: tuple[ComparedSchedule, ...]
    refused: tuple[RefusedSchedule, ...]
    answers: Annotated[tuple[ScheduleAnswer, ...], CARRIED]


class MemoryPoint(Answer):
    """The best schedule found with a limit ``memory`` on every device.

    ``bound`` is a lower bound on the objective of all schedules within that limit and the devices
    of the answer, proved by ``proved_by``.
    """

    memory: Number
    status: Status
    makespan: Number
    span: Number
    bound: Number
    gap: Finite
    proved_by: str


class KindPoint(Answer):
    """What a published kind with the same devices needs and takes."""

    kind: str
    peak_memory: Number
    makespan: Number
    span: Number


class MemoryCurve(Answer):
    """The best makespan or span for every limit of memory; ``kinds`` are those to compare with."""

    status: Status
    stages: int
    microbatches: int
    placement: str
    chunks: int | None
    device: tuple[int, ...]
    objective: str
    wall_seconds: float
    points: tuple[MemoryPoint, ...]
    kinds: tuple[KindPoint, ...]
    timetables: Annotated[tuple[Timetable, ...], CARRIED]


class JobShopAnswer(Answer):
    """A schedule of a job shop: the start of each step of each job, and the machine it is on."""

    status: Status
    makespan: int | None
    bound: int
    cost_seconds: int | None
    bound_seconds: int
    gap: Finite
    proved_by: str
    wall_seconds: float
    jobs: int
    machines: int
    starts: tuple[tuple[int, ...], ...] | None
    chosen_machines: tuple[tuple[int, ...], ...] | None
