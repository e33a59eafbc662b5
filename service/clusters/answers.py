"""Answers about the jobs of a cluster."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from stagewright.formulations.forms.answers import Status
from stagewright.service.answers import CARRIED, Answer, Finite

if TYPE_CHECKING:
    from stagewright.executor.clusters.report import ClusterReport
    from stagewright.executor.clusters.timeline import ClusterTimeline
    from stagewright.formulations.clusters.allocation import AllocationProblem
    from stagewright.formulations.clusters.allocation_plan import AllocationPlan
    from stagewright.graphs.workloads.jobs import Workload
    from stagewright.solvers.clusters.policies import AllocationResult
else:  # carried, not validated: their libraries are slow to import
    ClusterReport = ClusterTimeline = AllocationProblem = AllocationPlan = Any
    Workload = AllocationResult = Any


class ShareAnswer(Answer):
    """The share of time that a job or a pair has on a type of accelerator."""

    jobs: tuple[str, ...]
    accelerator: str
    share: float
    placement: str | None = None
    count: int | None = None

    @model_serializer(mode="wrap")
    def _what_counts(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out placement and count where they do not matter."""
        fields: dict[str, Any] = write(self)
        for name in ("placement", "count"):
            if getattr(self, name) is None:
                fields.pop(name, None)
        return fields


class AllocateAnswer(Answer):
    """The answer of a policy; ``allocation`` is None if there is none."""

    status: Status
    policy: str
    objective: Finite
    bound: Finite
    gap: Finite
    wall_seconds: float
    proved_by: str | None
    notes: tuple[str, ...]
    utilisation: dict[str, float] | None
    duals: dict[str, Any] | None
    allocation: tuple[ShareAnswer, ...] | None
    problem: Annotated[AllocationProblem, CARRIED]
    result: Annotated[AllocationResult, CARRIED]
    plan: Annotated[AllocationPlan | None, CARRIED]


class AssignmentAnswer(Answer):
    """Jobs on accelerators, by their numbers within the type, in one round."""

    jobs: tuple[str, ...]
    accelerator: str
    numbers: tuple[int, ...]
    renewed: bool


class RoundsAnswer(Answer):
    """Rounds that realise an allocation, and how far they stay from it."""

    policy: str
    round_seconds: float
    rounds: tuple[tuple[AssignmentAnswer, ...], ...]
    mean_deviation: float
    largest_shortfall: float
    accelerators: Annotated[tuple[str, ...], CARRIED]


class RunAnswer(Answer):
    """The time from one change to the next that an accelerator of a type, by number, ran jobs."""

    jobs: tuple[str, ...]
    accelerator: str
    number: int
    start_seconds: float
    end_seconds: float


class SimulateClusterAnswer(Answer):
    """Statistics of a simulated cluster; None if no job completed.

    ``status`` is ``done``, or ``interrupted`` if the simulation was stopped before its end.
    ``runs`` are there if the request keeps the assignments.
    """

    status: str
    policy: str
    jobs: int
    completed: int
    measured: int
    mean_jct_seconds: Finite
    percentile_jct_seconds: dict[str, Finite]
    mean_jct_seconds_by_weight: dict[str, Finite]
    makespan_seconds: float
    mean_finish_time_fairness: Finite
    worst_finish_time_fairness: Finite
    dollars: Finite
    slo_violations: int
    utilisation: float
    lease_renewals: float
    rounds: int
    allocations: int
    mean_deviation: Finite
    seconds: float
    runs: tuple[RunAnswer, ...] | None = None
    timeline: Annotated[ClusterTimeline, CARRIED]

    @model_serializer(mode="wrap")
    def _without_runs(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave the runs out where they are not kept."""
        fields: dict[str, Any] = write(self)
        if self.runs is None:
            fields.pop("runs", None)
        return fields


class JobOutcomeAnswer(Answer):
    """The final state of a job."""

    name: str
    state: str
    steps: int
    completion_seconds: Finite
    error: str | None


class TimeShareAnswer(Answer):
    """A job's planned and measured fraction of time on a worker type."""

    job: str
    worker: str
    target: float
    measured: float


class RunClusterAnswer(Answer):
    """The final states of the jobs of a cluster.

    ``status`` is ``failed`` if a job has failed, else ``interrupted`` if the run was stopped before
    all jobs were done, else ``waiting`` if one lacks accelerators, else ``done``.
    """

    status: str
    policy: str
    rounds: int
    jobs: tuple[JobOutcomeAnswer, ...]
    shares: tuple[TimeShareAnswer, ...]
    report: Annotated[ClusterReport, CARRIED]


class NewJobAnswer(Answer):
    """A new job and the reference job that stands for it."""

    model: str
    scale: int
    nearest: str


class PairRateAnswer(Answer):
    """Estimated steps per second of two models that share accelerators."""

    models: tuple[str, str]
    scale: int
    accelerator: str
    steps_per_second: tuple[float, float]


class EstimateAnswer(Answer):
    """The new jobs of a workload, and the rates of their pairs that were estimated."""

    status: str = "estimated"
    new: tuple[NewJobAnswer, ...]
    measured: int
    estimated: tuple[PairRateAnswer, ...]
    workload: Annotated[Workload, CARRIED]


class MeasureAnswer(Answer):
    """The (accelerator, reference model) with which a new job is to be measured."""

    status: str = "chosen"
    model: str
    scale: int
    pairs: tuple[tuple[str, str], ...]
