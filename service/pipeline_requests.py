"""Requests about plans of pipelines, and about scheduling problems."""

from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from stagewright.executor.programs.trace import Trace
from stagewright.formulations.forms.answers import Limits, StopToken
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.units import (
    parse_share,
    require_amount,
    require_count,
    require_seed,
)
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.chain import Chain
from stagewright.service.requests import Request, Search, Solve

Recomputation = Literal["none", "full", "layer", "auto"]
ScheduleKind = Literal["gpipe", "1f1b", "pe", "optimal"]


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
    as the gap of the best plan is at most ``gap`` (0.01 is 1 %).
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
        limit = self.plan.memory_limit_bytes
        return PipelineProblem(self.chain, self.cluster, self.plan.microbatches, limit)


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


class ScheduleRequest(Solve):
    """Schedule a pipeline of fixed stages: seconds (or any unit) of each stage and channel.

    ``transfers`` and ``in_flight`` empty: no time, no limit. ``device`` of each stage, numbered in
    the order of their use, between whose own stages nothing is transferred; empty: one per stage.
    ``weight_gradient`` empty: backwards are whole; else ``backward`` is the input gradient.
    """

    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    transfers: tuple[float, ...] = ()
    in_flight: tuple[int, ...] = ()
    device: tuple[int, ...] = ()
    weight_gradient: tuple[float, ...] = ()
    kind: ScheduleKind = "optimal"

    @model_validator(mode="after")
    def _require_problem(self) -> Self:
        """Refuse what makes no problem where the request is made."""
        _ = self.problem
        return self

    @cached_property
    def problem(self) -> MakespanProblem:
        """The scheduling problem."""
        stages = len(self.forward)
        device = self.device or tuple(range(stages))
        sends = self.transfers or (0.0,) * (stages - 1)
        if len(sends) == stages - 1 == len(device) - 1:
            moves = (one != following for one, following in pairwise(device))
            sends = tuple(time if moved else 0.0 for time, moved in zip(sends, moves, strict=True))
        return MakespanProblem(
            microbatches=self.microbatches,
            forward=self.forward,
            backward=self.backward,
            send_forward=sends,
            send_backward=sends,
            reduce=(0.0,) * stages,
            in_flight=self.in_flight or (self.microbatches,) * stages,
            device=device,
            weight_gradient=self.weight_gradient or None,
        )


class JobShopRequest(Solve):
    """Solve a job shop: the steps of each job in order, as (machine, duration)."""

    jobs: tuple[tuple[tuple[int, int], ...], ...]
