"""The planner protocol: a name, the supported choices, and one method."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Protocol, get_args

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    NoPlan,
    PeriodicProposal,
    Proposal,
    Recomputation,
)

ACTION_SECONDS = 2e-5  # predicted, to assemble and check an action
ANY_RECOMPUTATION: tuple[Recomputation, ...] = get_args(Recomputation)


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """The :class:`Choices` that a planner supports, under the same names."""

    recompute: tuple[Recomputation, ...] = ("none",)
    offload: bool = False
    group_size: bool = False
    period_seconds: bool = False
    start: bool = False
    backend: bool = False
    order: bool = False
    out_of_order: bool = False
    batch: bool = False
    vertical_sync: bool = False
    runtime: bool = False


@dataclass
class PlanSearch:
    """A search within ``limits``, its clock, and the best plan so far with its seconds."""

    problem: PipelineProblem
    limits: Limits
    on_progress: OnProgress
    began: float = field(default_factory=monotonic)
    best: Proposal | None = None
    cost: float = math.inf

    def left(self) -> float:
        """The seconds to the limit; 0 after a stop."""
        return self.limits.left(monotonic() - self.began)

    def keep(self, found: Proposal, cost: float) -> None:
        """Make ``found`` the best plan and report it."""
        self.best, self.cost = found, cost
        self.on_progress(Progress(monotonic() - self.began, cost, 0.0, partial(replace, found)))


class Planner(Protocol):
    """The extension point: the type of :data:`stagewright.solvers.planning.PLANNERS`' values."""

    @property
    def name(self) -> str:
        """The name of the planner."""

    @property
    def summary(self) -> str:
        """A summary in one line."""

    @property
    def source(self) -> str:
        """The paper or the method."""

    @property
    def options(self) -> PlannerOptions:
        """The supported choices; all others are refused before the planner is called."""

    def propose(
        self, problem: PipelineProblem, choices: Choices, limits: Limits, on_progress: OnProgress
    ) -> Proposal | PeriodicProposal | NoPlan:
        """The best plan found within ``limits``."""


_SearchFunction = Callable[
    [PipelineProblem, Limits, OnProgress, Choices], Proposal | PeriodicProposal | NoPlan
]


@dataclass(frozen=True, slots=True)
class SearchPlanner:
    """A planner by a search that decides each stage's memory savings itself."""

    name: str
    summary: str
    source: str
    search: _SearchFunction
    options: PlannerOptions = PlannerOptions(ANY_RECOMPUTATION, offload=True)

    def propose(
        self, problem: PipelineProblem, choices: Choices, limits: Limits, on_progress: OnProgress
    ) -> Proposal | PeriodicProposal | NoPlan:
        """The best plan found."""
        return self.search(problem, limits, on_progress, choices)


def checking_seconds(problem: PipelineProblem) -> float:
    """Predicted seconds to assemble and check the plan with the most stages on disjoint devices."""
    layers = len(problem.chain)
    computations = min(len(problem.cluster), int(problem.replicas_per_layer.sum()))
    transfers = min(len(problem.cluster), layers)
    return 2 * problem.microbatches * (computations + transfers) * ACTION_SECONDS


def require_honoured(planner: Planner, choices: Choices, every: Iterable[Planner]) -> None:
    """Refuse choices that ``planner`` does not support, and name those of ``every`` that do."""
    for what, honours in _asked(choices):
        if not honours(planner.options):
            able = " or ".join(one.name for one in every if honours(one.options))
            raise InputError(f"planner {planner.name!r} does not support {what}: use {able}")


def require_host_links(problem: PipelineProblem) -> None:
    """Refuse offloading if a device has no host_bytes_per_second."""
    for device in problem.cluster.devices:
        if device.host_bytes_per_second is None:
            raise InputError(
                f"offloading needs host_bytes_per_second of every device in the cluster file; "
                f"device {device.name!r} has none"
            )


def _asked(  # noqa: C901 - one case per choice
    choices: Choices,
) -> Iterator[tuple[str, Callable[[PlannerOptions], bool]]]:
    """The requested choices by name, each with a test whether options support it."""
    if choices.recompute is not None:
        yield f"recompute {choices.recompute!r}", lambda one: choices.recompute in one.recompute
    if choices.offload:
        yield "offloading", lambda one: one.offload
    if choices.group_size is not None:
        yield "a group size", lambda one: one.group_size
    if choices.period_seconds is not None:
        yield "a period", lambda one: one.period_seconds
    if choices.start is not None:
        yield "a given plan to start from", lambda one: one.start
    if choices.backend is not None:
        yield "a backend", lambda one: one.backend
    if choices.order is not None:
        yield "a given schedule", lambda one: one.order
    if choices.out_of_order is not None:
        yield "a method of out-of-order backprop", lambda one: one.out_of_order
    if choices.batch is not None:
        yield "a batch", lambda one: one.batch
    if choices.vertical_sync:
        yield "vertical sync", lambda one: one.vertical_sync
    if choices.runtime is not None:
        yield f"plans for {choices.runtime.name} alone", lambda one: one.runtime
