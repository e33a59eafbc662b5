"""Requests about plans of pipelines, and about scheduling problems."""

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stagewright.executor.programs.trace import Trace, load_trace
from stagewright.formulations.backprop.orders import OutOfOrder
from stagewright.formulations.forms.answers import Limits, StopToken
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, load_plan
from stagewright.formulations.plans.plan_class import Shards
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    parse_bytes,
    parse_share,
    require_amount,
    require_count,
    require_seed,
)
from stagewright.graphs.machines.cluster import Cluster, load_cluster
from stagewright.graphs.models.chain import Chain, load_model
from stagewright.service.options import Option, number_or_auto
from stagewright.service.requests import Request, SearchRequest

Recomputation = Literal["none", "full", "layer", "auto"]


class _Problem(SearchRequest):
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
        """Refuse a request whose fields make no problem."""
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
    """With a batch: samples of a microbatch, of all replicas of a stage together; by default all
    that divide the batch are planned, from the least to the most that the model has costs for."""
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
    """What the replicas of a stage divide: the optimizer's state (ZeRO-1), gradients too (ZeRO-2),
    or all with the weights (ZeRO-3). Put into the plan that is found without, or where none fits,
    into one that is found for smaller states: nothing is proved about it."""
    tensor: Annotated[int | None, Option(form="T")] = None
    """Tensor degree of all stages: each T devices of a server compute their layers together. The
    model needs costs of that degree (profile --tensor)."""
    start: Annotated[PipelinePlan | None, Option("--from-plan", form="FILE", of_file=load_plan)] = (
        None
    )
    """Start from this plan of the same layers, made for other times, memory, devices or
    microbatches; planners auto and general."""
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
        """Refuse a size of microbatches without a batch."""
        if self.microbatch_size is not None and self.batch is None:
            raise InputError("microbatch_size goes with a batch, that is divided into these")
        return self

    @model_validator(mode="after")
    def _require_streams(self) -> Self:
        """Refuse an assumed share of a device unless training is on a single device."""
        asked = self.out_of_order
        if self.assumed_share is not None and (asked is None or asked.training != "single"):
            raise InputError("a share of a device is assumed for training on a single device only")
        return self

    @model_validator(mode="after")
    def _require_degree(self) -> Self:
        """Refuse choices that are not planned together with a tensor degree."""
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
        """Refuse choices that are not planned together with a framework."""
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


class CheckRequest(_PlanOfProblem, SearchRequest):
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
