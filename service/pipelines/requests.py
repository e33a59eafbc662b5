"""Requests about plans of pipelines, and about scheduling problems."""

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from stagewright.executor.programs.trace import Trace, load_trace
from stagewright.formulations.backprop.choice import OutOfOrder
from stagewright.formulations.forms.answers import Limits, StopToken
from stagewright.formulations.pipelines.jobshop import JobShop, Step
from stagewright.formulations.pipelines.makespan import Duplex, MakespanProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, load_plan
from stagewright.formulations.plans.plan_class import Shards
from stagewright.formulations.schedules.choice import OPTIMAL, ScheduleChoice
from stagewright.formulations.schedules.published.kinds import KINDS
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    MAX_LAYERS,
    parse_bytes,
    parse_share,
    require_amount,
    require_count,
    require_seed,
)
from stagewright.graphs.machines.cluster import Cluster, load_cluster
from stagewright.graphs.models.chain import Chain, load_model
from stagewright.service.options import Option, itself, number_or_auto, whole_numbers
from stagewright.service.requests import Request, Search, Solve
from stagewright.service.schedules.setting import RULES, SCHEDULES, Setting, setting_of

Recomputation = Literal["none", "full", "layer", "auto"]
Objective = Literal["makespan", "span", "memory"]
"""Of a schedule: its end, the longest time of a device from first to last computation, the peak."""


class _Problem(Search):
    """A model to train on a cluster."""

    chain: Annotated[Chain, Option("--model", form="FILE", of_file=load_model)]
    """Model file."""
    cluster: Annotated[Cluster, Option(form="FILE", of_file=load_cluster)]
    """Cluster file."""
    microbatches: Annotated[int, Option(form="M")]
    """Microbatches in an iteration."""
    memory_limit_bytes: Annotated[
        float | None, Option("--memory-limit", form="SIZE", of_text=parse_bytes)
    ] = None
    """Limit on the memory of every device, such as 8GB."""

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
    """Plan the training of a model on a cluster."""

    microbatches: int = 8
    """Microbatches in an iteration; needed for a model of layers, if no batch is given."""
    planner: str = "auto"
    """One of those that `stagewright planners` lists; auto is fastt for a graph."""
    batch: Annotated[int | None, Option("--global-batch", form="N")] = None
    """Samples between two updates, in place of a number of microbatches."""
    microbatch_size: Annotated[
        int | None, Option(form="<auto|N>", of_text=number_or_auto, default="auto")
    ] = None
    """With a batch: samples of a microbatch, of all replicas of a stage together; by default every
    size that the model has costs for is planned."""
    runtime: Annotated[str | None, Option("--for", form="FRAMEWORK")] = None
    """Plan only what this framework runs, as `stagewright export --to` writes it: torch-csv,
    torchtitan, nemo, megatron or deepspeed."""
    recompute: Annotated[Recomputation | None, Option(form="<none|full|layer|auto>")] = None
    """none; full or layer: stages keep their input, or every layer's, and recompute the rest; auto:
    the best of them. Default: auto for the planners auto, general and launchable, none for the
    others."""
    offload: bool | None = None
    """Whether stages may offload activations to host memory; the cluster file must have host
    bandwidths. auto, general, madpipe and 1f1b-star offload where it helps (auto and general by
    default), the other planners in every stage."""
    shards: Shards = "none"
    """What the replicas of a stage divide: the optimizer's state (ZeRO-1), or the weights too
    (ZeRO-3). Put into the plan that is found without, or where none fits, into one that is found
    for smaller states: nothing is proved about it."""
    tensor: Annotated[int | None, Option(form="T")] = None
    """Tensor degree of all stages: each T devices of a server compute their layers together. The
    model needs costs of that degree (profile --tensor)."""
    start: Annotated[PipelinePlan | None, Option("--from-plan", form="FILE", of_file=load_plan)] = (
        None
    )
    """Start from this plan of the same layers, made for other times, memory or devices; planners
    auto and general."""
    gap: Annotated[float, Option(form="SHARE", of_text=parse_share)] = 0.0
    """End as soon as the best plan is proved to be within this of the best of its class, such as 1%
    or 0.01."""
    period_seconds: Annotated[float | None, Option("--period")] = None
    """Periodic planners: seconds between microbatches; default: the minimum."""
    group_size: int | None = None
    """Periodic planners: devices per stage; default: the best number."""
    backend: Annotated[str | None, Option(form="NAME")] = None
    """Periodic planners: solver of the patterns; highs (the default), pulp-cbc, cvxpy
    or cp-sat."""
    vertical_sync: bool = False
    """With the planner pipedream-async: a microbatch uses on every stage the version of the weights
    that it used on the first."""
    order: ScheduleChoice | None = None
    """Plan this schedule on balanced stages (planner order)."""
    out_of_order: OutOfOrder | None = None
    """What the planner ooo may do."""
    assumed_share: Annotated[float | None, Option("--share", form="SHARE", of_text=parse_share)] = (
        None
    )
    """Planner ooo on a single device: the share of the device that kernels occupy where the profile
    has none, such as 30% or 0.3; default: all of it."""

    @cached_property
    def problem(self) -> PipelineProblem:
        """The planning problem, with the share of a device that kernels are assumed to occupy."""
        return PipelineProblem(
            self.chain, self.cluster, self.microbatches, self.memory_limit_bytes, self.assumed_share
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
    """Divide a model among the devices of a cluster, in one order, with the least bottleneck."""

    stages: Annotated[int | None, Option(form="N")] = None
    """Number of stages; default: every number."""
    backend: Annotated[str, Option(form="NAME")] = "recurrence"
    """recurrence; or, for small cases, a solver of integer programs such as highs, pulp-cbc or
    cvxpy."""

    @model_validator(mode="after")
    def _require_stages(self) -> Self:
        if self.stages is not None:
            require_count(self.stages, "stages", min(len(self.chain), len(self.cluster)))
        return self


class _PlanOfProblem(Request):
    """A plan, and the model and cluster that it is for."""

    plan: Annotated[PipelinePlan, Option("PLAN", of_file=load_plan)]
    """Plan file."""
    chain: Annotated[Chain, Option("--model", form="FILE", of_file=load_model)]
    """Model file."""
    cluster: Annotated[Cluster, Option(form="FILE", of_file=load_cluster)]
    """Cluster file."""

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
    """Check the rules and proofs of a plan."""

    proofs: bool = False
    """Run the searches behind the bounds again."""
    time_limit: float = 60.0
    """Time limit of the search in seconds."""


class SimulateRequest(_PlanOfProblem):
    """Run the order of a plan with jitter and slow devices."""

    jitter: float = 0.0
    """Jitter: standard deviation of the durations' logarithm."""
    stragglers: dict[str, float] = Field(default_factory=dict)
    """The slow devices, with their factors."""
    seed: int = 0
    """Seed of all random choices."""

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        require_seed(self.seed, "seed")
        require_amount(self.jitter, "jitter")
        return self


class CompareRequest(Request):
    """Compare the prediction of a plan with the trace of a run of it."""

    plan: Annotated[PipelinePlan, Option("PLAN", of_file=load_plan)]
    """Plan file."""
    trace: Annotated[Trace, Option("TRACE", of_file=load_trace)]
    """Trace file of a run."""


class _Stages(Solve):
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
    """Where the chunks are."""

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
    """Solve a job shop."""

    jobs: tuple[tuple[Step, ...], ...]
    """The steps of each job in order, as (machine, duration); a step of a flexible job shop is a
    list of those, of which one is chosen."""
    backend: Annotated[str | None, Option(form="NAME")] = None
    """Solver; default: cp-sat."""

    @model_validator(mode="after")
    def _require_problem(self) -> Self:
        """Refuse what makes no problem where the request is made."""
        _ = self.problem
        return self

    @cached_property
    def problem(self) -> JobShop:
        """The job shop."""
        return JobShop(self.jobs)
