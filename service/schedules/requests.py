"""Requests about schedules of given stages and about job shops, and their answers."""

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from stagewright.formulations.forms.answers import Status
from stagewright.formulations.pipelines.jobshop import JobShop, Step
from stagewright.formulations.pipelines.makespan import Duplex, MakespanProblem
from stagewright.formulations.schedules.published.kinds import KINDS, OPTIMAL
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_amount, require_count
from stagewright.service.answers import CARRIED, Answer, Finite
from stagewright.service.options import Option, itself, whole_numbers
from stagewright.service.requests import SolveRequest
from stagewright.service.schedules.setting import RULES, SCHEDULES, ScheduleSetting, setting_of

if TYPE_CHECKING:
    from stagewright.formulations.pipelines.makespan import MakespanProblem as CarriedProblem
    from stagewright.formulations.pipelines.makespan import Timetable
    from stagewright.formulations.schedules.timing import TimedOrder
    from stagewright.solvers.pipelines.scheduling import ScheduleResult
else:  # carried, not validated: their libraries are slow to import
    CarriedProblem = Timetable = TimedOrder = ScheduleResult = Any

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
    problem: Annotated[CarriedProblem, CARRIED]
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


Objective = Literal["makespan", "span", "memory"]
"""Of a schedule: its end, the longest time of a device from first to last computation, the peak."""


class _Stages(SolveRequest):
    """A pipeline of stages with given times (seconds or any unit) to schedule.

    Lists have a value per stage; they are empty where nothing is said.
    """

    microbatches: Annotated[int, Option(form="M")]
    """Number of microbatches."""
    forward: tuple[float, ...]
    """Times of the forwards."""
    backward: tuple[float, ...]
    """Times of the backwards; of the input gradients, if the weight gradients have theirs."""
    transfers: tuple[float, ...] = ()
    """Transfer times: one for all channels between neighbouring stages, or one for each."""
    in_flight: tuple[int, ...] = ()
    """The most microbatches in flight."""
    device: tuple[int, ...] = ()
    """The device of each stage, numbered in the order of their use. Without it there are as many
    devices as stages, and every stage is divided into chunks."""
    weight_gradient: tuple[float, ...] = ()
    """Times of the weight gradients; without them backwards are whole."""
    chunks: Annotated[int | None, Option(form="V")] = None
    """Divide every stage into V equal chunks, each with 1/V of its times and memory: a device has V
    of the P x V chunks, in a loop, a V or a wave. Actions name the chunk. Default: 2 where the kind
    has chunks."""
    saved: tuple[float, ...] = ()
    """What a forward adds to the memory of its device (default: 1)."""
    freed: tuple[float, ...] = ()
    """How much of what is saved the input gradient gives back (default: 0)."""
    memory: tuple[float, ...] = ()
    """Limit on that memory, of all devices or of each."""
    duplex: Duplex = "half"
    """Whether the two directions of a channel share it."""
    objective: Objective = "makespan"
    """What bound, gap and status are of, and what a comparison sorts by: the end; the longest time
    of a device from its first to its last computation; peak memory. Kind optimal minimises it."""
    backend: Annotated[str | None, Option(form="NAME")] = None
    """Solver; default: cp-sat."""

    @model_validator(mode="after")
    def _require_chunks(self) -> Self:
        if self.chunks is not None:
            require_count(self.chunks, "chunks", MAX_LAYERS)
        return self


class ScheduleRequest(_Stages):
    """Schedule a pipeline by one of ``SCHEDULES``."""

    kind: Annotated[str, Option(form="NAME", of_text=itself, known=SCHEDULES)] = Field(
        OPTIMAL,
        description="gpipe, 1f1b or pe (on any devices); a published schedule: "
        f"{', '.join(name for name in KINDS if name not in RULES)}; or optimal. chimera and "
        "dualpipe have two copies of every stage.",
    )
    placement: Literal["line", "loop", "V", "wave", "any", "free"] | None = None
    """Where the chunks of the kinds pe and optimal are; others have theirs. For optimal also the
    best of these (any), or on any device (free): then a stage's chunks follow each other in the
    model; not with objective memory."""
    makespan_limit: Annotated[float | None, Option(form="TIME")] = None
    """With kind optimal and objective memory: the least memory of schedules that take at most
    this."""
    replicas: Annotated[tuple[int, ...], Option(form="R,...", of_text=whole_numbers)] = ()
    """With kind 1f1b-rr: devices of each of the P stages, such as 2,1,1; they take microbatches in
    turn."""

    @model_validator(mode="after")
    def _require_problem(self) -> Self:
        """Refuse a request whose fields make no problem."""
        _ = self.setting
        return self

    def with_placement(self, placement: str) -> Self:
        """The same request with that placement."""
        return self.of(**{**self.given(), "placement": placement})

    @cached_property
    def setting(self) -> ScheduleSetting:
        """The stages, with the chunks and devices of the kind."""
        return setting_of(self)

    @property
    def problem(self) -> MakespanProblem:
        """The scheduling problem."""
        return self.setting.problem


class MemoryCurveRequest(_Stages):
    """The best schedules within every limit of ``memory``, which is a list of them here.

    Without limits they go from one microbatch of each stage to two per device, until more memory is
    of no use.
    """

    placement: Literal["line", "loop", "V", "wave"] | None = None
    """Where the chunks are."""

    @model_validator(mode="after")
    def _require_problem(self) -> Self:
        """Refuse a request whose fields make no problem."""
        if self.objective == "memory":
            raise InputError("objective memory is for single schedules: a curve has all memory")
        if self.backend not in (None, "cp-sat"):
            raise InputError(f"backend {self.backend} takes neither memory nor spans; use cp-sat")
        for number, limit in enumerate(self.memory):
            require_amount(limit, f"memory[{number}]")
            _ = self.within((limit,))
        _ = self.within(())
        return self

    def within(self, memory: tuple[float, ...], **changes: Any) -> ScheduleRequest:
        """The request for one schedule with that limit."""
        return ScheduleRequest.of(**{**self.given(), "memory": memory, **changes})


class CompareSchedulesRequest(_Stages):
    """Compare all kinds of schedule that fit a pipeline, and the optimum."""

    @model_validator(mode="after")
    def _require_stages(self) -> Self:
        """Refuse stages that no kind can schedule, not even GPipe."""
        _ = self.of_kind("gpipe")
        return self

    def of_kind(
        self, kind: str, placement: str | None = None, chunks: int | None = None
    ) -> ScheduleRequest:
        """The request for one kind, whose number of chunks counts if it is fixed.

        Raises
        ------
        InputError
            If the kind does not fit.
        """
        fields = self.given()
        if placement is not None:
            fields |= {"placement": placement, "chunks": chunks}
        elif kind == "pe" or (kind in KINDS and KINDS[kind].chunks.fixed):
            fields["chunks"] = None
        return ScheduleRequest.of(**fields, kind=kind)


class JobShopRequest(SolveRequest):
    """Solve a job shop."""

    jobs: tuple[tuple[Step, ...], ...]
    """The steps of each job in order, as (machine, duration); a step of a flexible job shop is a
    list of those, of which one is chosen."""
    backend: Annotated[str | None, Option(form="NAME")] = None
    """Solver; default: cp-sat."""

    @model_validator(mode="after")
    def _require_problem(self) -> Self:
        """Refuse a request whose fields make no problem."""
        _ = self.problem
        return self

    @cached_property
    def problem(self) -> JobShop:
        """The job shop."""
        return JobShop(self.jobs)
