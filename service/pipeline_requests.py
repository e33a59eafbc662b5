"""Requests about plans of pipelines, and about scheduling problems."""

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from stagewright.executor.programs.trace import Trace
from stagewright.formulations.backprop.choice import OutOfOrder
from stagewright.formulations.forms.answers import Limits, StopToken
from stagewright.formulations.pipelines.jobshop import JobShop, Step
from stagewright.formulations.pipelines.makespan import Duplex, MakespanProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.plan_class import Shards
from stagewright.formulations.schedules.choice import OPTIMAL, ScheduleChoice
from stagewright.formulations.schedules.kinds import KINDS
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    MAX_LAYERS,
    parse_share,
    require_amount,
    require_count,
    require_seed,
)
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.chain import Chain
from stagewright.service.requests import Request, Search, Solve
from stagewright.service.schedule_setting import Setting, setting_of

Recomputation = Literal["none", "full", "layer", "auto"]
Objective = Literal["makespan", "span", "memory"]
"""Of a schedule: its end, the longest time of a device from first to last computation, the peak."""


class _Problem(Search):
    """A model to train on a cluster."""

    chain: Chain
    cluster: Cluster
    microbatches: int
    memory_limit_bytes: float | None = None

    @model_validator(mode="after")
    def _require_problem(self) -> Self:
        """Refuse what makes no problem where the request is made."""
        if self.memory_limit_bytes is not None:
            require_amount(self.memory_limit_bytes, "memory_limit_bytes")
        _ = self.problem
        return self

    @cached_property
    def problem(self) -> PipelineProblem:
        """The planning problem."""
        return PipelineProblem(self.chain, self.cluster, self.microbatches, self.memory_limit_bytes)


class PlanRequest(_Problem):
    """Plan the training of a model on a cluster; see ``Choices`` for what may be chosen.

    The search starts from the plan ``start``, of the same layers, if there is one. It ends as soon
    as the gap of the best plan is at most ``gap`` (0.01 is 1 %). On a single device, kernels whose
    share of it is not in the profile are assumed to occupy ``assumed_share`` (None: all of it).
    With ``tensor``, all stages have that tensor degree.
    With ``batch``, samples between two updates, there are as many ``microbatches`` as these give in
    microbatches of ``microbatch_size``, or of the best size (None).
    ``shards`` are put into the plan that was found without them. With ``runtime``, the name of an
    export, only plans that it writes are answers.
    """

    microbatches: int = 8
    planner: str = "auto"
    recompute: Recomputation | None = None
    offload: bool | None = None
    group_size: int | None = None
    period_seconds: float | None = None
    gap: float = 0.0
    start: PipelinePlan | None = None
    backend: str | None = None
    order: ScheduleChoice | None = None
    out_of_order: OutOfOrder | None = None
    assumed_share: float | None = None
    batch: int | None = None
    microbatch_size: int | None = None
    vertical_sync: bool = False
    tensor: int | None = None
    shards: Shards = "none"
    runtime: str | None = None

    @cached_property
    def problem(self) -> PipelineProblem:
        """The planning problem, with the share of a device that kernels are assumed to occupy."""
        return PipelineProblem(
            self.chain,
            self.cluster,
            self.microbatches,
            self.memory_limit_bytes,
            self.assumed_share,
        )

    @model_validator(mode="after")
    def _require_batch(self) -> Self:
        """Refuse a size of microbatches without their sum."""
        if self.microbatch_size is not None and self.batch is None:
            raise InputError("microbatch_size goes with a batch, that is divided into these")
        return self

    @model_validator(mode="after")
    def _require_streams(self) -> Self:
        """Refuse a share of kernels where no kernels run side by side."""
        asked = self.out_of_order
        if self.assumed_share is not None and (asked is None or asked.training != "single"):
            raise InputError("a share of a device is assumed for training on a single device only")
        return self

    @model_validator(mode="after")
    def _require_degree(self) -> Self:
        """Refuse what is not planned on groups of devices."""
        if self.tensor is None:
            return self
        require_count(self.tensor, "tensor", len(self.cluster))
        if self.tensor < 2:
            raise InputError(f"tensor must be at least 2, or left out, got {self.tensor}")
        for name in ("batch", "start", "out_of_order", "offload", "runtime"):
            if getattr(self, name):
                raise InputError(f"{name} is not planned together with a tensor degree")
        return self

    @model_validator(mode="after")
    def _require_orders_of_the_framework(self) -> Self:
        """Refuse what would choose other plans than the framework's."""
        for name in ("start", "order", "out_of_order", "offload"):
            if self.runtime is not None and getattr(self, name):
                raise InputError(
                    f"{name} does not go with plans for a framework alone, {self.runtime!r}"
                )
        return self

    def limits(self, stop: StopToken | None = None) -> Limits:
        """The limits of the search, with the gap at which it may end."""
        return replace(super().limits(stop), gap=parse_share(self.gap, "gap"))


class PartitionRequest(_Problem):
    """Divide a model among the devices of a cluster, in one order, with the least bottleneck.

    ``stages`` None: every number of stages. ``backend`` is ``recurrence`` or a backend of integer
    programs.
    """

    stages: int | None = None
    backend: str = "recurrence"

    @model_validator(mode="after")
    def _require_stages(self) -> Self:
        if self.stages is not None:
            require_count(self.stages, "stages", min(len(self.chain), len(self.cluster)))
        return self


class _PlanOfProblem(Request):
    """A plan, and the model and cluster that it is for."""

    plan: PipelinePlan
    chain: Chain
    cluster: Cluster

    @cached_property
    def problem(self) -> PipelineProblem:
        """The problem of the plan's number of microbatches."""
        return PipelineProblem(
            self.chain,
            self.cluster,
            self.plan.microbatches,
            self.plan.memory_limit_bytes,
            self.plan.assumed_share,
            self.plan.microbatch_size,
        )


class CheckRequest(_PlanOfProblem, Search):
    """Check the rules and proofs of a plan; with ``proofs`` the searches behind its bounds too."""

    proofs: bool = False
    time_limit: float = 60.0


class SimulateRequest(_PlanOfProblem):
    """Run the order of a plan with jitter and slow devices."""

    jitter: float = 0.0
    stragglers: dict[str, float] = Field(default_factory=dict)
    seed: int = 0

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        require_seed(self.seed, "seed")
        require_amount(self.jitter, "jitter")
        return self


class CompareRequest(Request):
    """Compare the prediction of a plan with the trace of a run of it."""

    plan: PipelinePlan
    trace: Trace


class _Stages(Solve):
    """A pipeline of stages with given times (seconds or any unit) to schedule.

    Lists have a value per stage; they are empty where nothing is said.

    ``backward`` is the input gradient if there is ``weight_gradient``; else backwards are whole.
    ``transfers`` has one value for all channels between neighbouring stages, or one for each.
    ``device``: of each stage, numbered in the order of their use. Without it there are as many
    devices as stages, and every stage is divided into ``chunks`` of equal times and memory: as many
    per device. ``saved`` is what a forward adds to the memory of its device (default: 1), ``freed``
    how much of it the input gradient gives back (default: 0); ``memory`` the limit of all devices
    or of each. ``duplex``: whether the two directions of a channel share it.
    """

    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    transfers: tuple[float, ...] = ()
    in_flight: tuple[int, ...] = ()
    device: tuple[int, ...] = ()
    weight_gradient: tuple[float, ...] = ()
    chunks: int | None = None
    saved: tuple[float, ...] = ()
    freed: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    duplex: Duplex = "half"
    objective: Objective = "makespan"

    @model_validator(mode="after")
    def _require_chunks(self) -> Self:
        if self.chunks is not None:
            require_count(self.chunks, "chunks", MAX_LAYERS)
        return self


class ScheduleRequest(_Stages):
    """Schedule a pipeline by one of ``SCHEDULES``; ``placement`` is for kinds without their own.

    For kind ``optimal`` the placement may be ``any`` of the named ones, or ``free``: then a stage's
    chunks are consecutive in the model. With objective ``memory`` it has the least memory of all
    schedules that take at most ``makespan_limit``, if that is given. ``replicas`` are the devices
    of each stage for kind ``1f1b-rr``; the copies of a stage take microbatches in turn.
    """

    kind: str = OPTIMAL
    placement: Literal["line", "loop", "V", "wave", "any", "free"] | None = None
    makespan_limit: float | None = None
    replicas: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _require_problem(self) -> Self:
        """Refuse what makes no problem where the request is made."""
        _ = self.setting
        return self

    def with_placement(self, placement: str) -> Self:
        """The same request with that placement."""
        return self.of(**{**self.given(), "placement": placement})

    @cached_property
    def setting(self) -> Setting:
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

    @model_validator(mode="after")
    def _require_problem(self) -> Self:
        """Refuse what makes no problem where the request is made."""
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
        """Refuse what no kind takes; GPipe takes any devices and numbers."""
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


class JobShopRequest(Solve):
    """Solve a job shop: the steps of each job in order, as (machine, duration).

    A step of a flexible job shop is a list of those, of which one is chosen.
    """

    jobs: tuple[tuple[Step, ...], ...]

    @model_validator(mode="after")
    def _require_problem(self) -> Self:
        """Refuse what makes no problem where the request is made."""
        _ = self.problem
        return self

    @cached_property
    def problem(self) -> JobShop:
        """The job shop."""
        return JobShop(self.jobs)
