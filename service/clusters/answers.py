"""Answers about the jobs of a cluster."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from stagewright.formulations.forms.answers import Status
from stagewright.service.answers import CARRIED, Answer, Finite

if TYPE_CHECKING:
    from stagewright.executor.clusters.report import ClusterReport
    from stagewright.executor.clusters.timeline import ClusterTimeline
    from stagewright.formulations.clusters.allocation import AllocationProblem
    from stagewright.formulations.clusters.allocation_plan import AllocationPlan
    from stagewright.formulations.parallelism.document import LayoutPlan
    from stagewright.graphs.workloads.jobs import Workload
    from stagewright.solvers.clusters.policies import AllocationResult
else:  # carried, not validated: their libraries are slow to import
    ClusterReport = ClusterTimeline = AllocationProblem = AllocationPlan = Any
    LayoutPlan = Workload = AllocationResult = Any


class ComputedRate(Answer):
    """Steps per second of a training on ``count`` accelerators of one type, as ``train-plan`` has.

    ``placement`` is ``consolidated`` on the fewest ``servers`` (equally many on each), or
    ``spread`` over the most. A run is expected between ``..._low`` and ``..._high``; no layout of
    the search makes more than ``bound_steps_per_second``. The rate is 0, for the ``reason``, where
    nothing fits. To write and read the checkpoint takes ``checkpoint_seconds``.
    """

    model: str
    accelerator: str
    count: int
    placement: Literal["consolidated", "spread"]
    servers: int
    steps_per_second: float = 0.0
    steps_per_second_low: float = 0.0
    steps_per_second_high: float = 0.0
    bound_steps_per_second: float | None = None
    layout: str | None = None
    reason: str | None = None
    checkpoint_seconds: float | None = None


class PriceJobsAnswer(Answer):
    """The computed rates, what was ``assumed`` of the machines, and the workload with all rates.

    ``plans`` are the layouts of the ``prices``, None where nothing fits.
    """

    status: str = "priced"
    prices: tuple[ComputedRate, ...]
    assumed: tuple[str, ...]
    wall_seconds: float
    workload: Annotated[Workload, CARRIED]
    plans: Annotated[tuple[LayoutPlan | None, ...], CARRIED] = ()


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


class ForecastAnswer(Answer):
    """Seconds from now until a job is done if no other job comes; None: not in the simulation.

    ``seconds_low`` and ``seconds_high`` are the least and the most of three simulations: all
    computed rates as they are, all at the lowest and all at the highest of their ranges.
    ``deadline_seconds`` are from now until the job's SLO.
    """

    job: str
    seconds: Finite
    seconds_low: Finite
    seconds_high: Finite
    deadline_seconds: float | None = None


class ChoiceAnswer(Answer):
    """Accelerators on which a job may run: its share of time there, and its rate alone.

    A computed rate has a range and a layout; a ``reason`` says why the job does not run there.
    """

    accelerator: str
    count: int
    placement: str | None
    share: float
    steps_per_second: float
    steps_per_second_low: float | None = None
    steps_per_second_high: float | None = None
    layout: str | None = None
    reason: str | None = None


class OccupancyAnswer(Answer):
    """Mean accelerators of a type in use, and by which other jobs, the largest first."""

    accelerator: str
    count: int
    in_use: float
    others: dict[str, float]


class ChangeAnswer(Answer):
    """What a job would have after a change, by the policy anew; None: not known in time."""

    change: str
    steps_per_second: Finite
    completion_seconds: Finite


class JobAnswer(Answer):
    """Why a job has what it has: ``why`` in sentences, and what ``changes`` would bring it.

    ``forecast`` is None where no simulation ends.
    """

    job: str
    model: str
    share: float
    steps_per_second: float
    steps_per_second_low: float
    steps_per_second_high: float
    forecast: ForecastAnswer | None
    why: tuple[str, ...]
    choices: tuple[ChoiceAnswer, ...]
    occupancy: tuple[OccupancyAnswer, ...]
    changes: tuple[ChangeAnswer, ...]


class AllocateAnswer(Answer):
    """The answer of a policy; ``allocation`` is None if there is none.

    ``one_more`` is how far one more accelerator of each type moves ``bound`` at most, where its
    duals say so. ``prices`` are the throughputs that were computed for trainings, with what was
    ``assumed``. ``first`` is the part of the allocation that runs until the policy is asked again,
    where that is not all of it.
    ``forecasts`` and the ``explained`` job are there if they were asked for.
    """

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
    one_more: dict[str, float] | None
    allocation: tuple[ShareAnswer, ...] | None
    first: tuple[ShareAnswer, ...] | None = None
    prices: tuple[ComputedRate, ...] = ()
    assumed: tuple[str, ...] = ()
    forecasts: tuple[ForecastAnswer, ...] | None = None
    explained: JobAnswer | None = None
    problem: Annotated[AllocationProblem, CARRIED]
    result: Annotated[AllocationResult, CARRIED]
    plan: Annotated[AllocationPlan | None, CARRIED]


class AssignmentAnswer(Answer):
    """Jobs on accelerators, by their numbers within the type, in one round."""

    jobs: tuple[str, ...]
    accelerator: str
    numbers: tuple[int, ...]
    renewed: bool


class RoundFilesAnswer(Answer):
    """The first round as files, by path: jobs that stop, stay, start and wait, and remarks.

    ``bound`` is on the policy's objective, ``one_more`` how far one more accelerator of each type
    moves it at most.
    """

    launcher: str
    stops: tuple[str, ...]
    stays: tuple[str, ...]
    starts: tuple[str, ...]
    waits: tuple[str, ...]
    objective: Finite = None
    bound: Finite = None
    proved_by: str | None = None
    one_more: dict[str, float] | None = None
    remarks: tuple[str, ...] = ()
    files: dict[str, str]


class RoundsAnswer(Answer):
    """Rounds that realise an allocation, and how far they stay from it.

    ``prices`` are the throughputs that were computed for trainings, with what was ``assumed``;
    ``measured`` names the others. ``launch`` has the launch files of the first round, if they were
    asked for.
    """

    policy: str
    round_seconds: float
    rounds: tuple[tuple[AssignmentAnswer, ...], ...]
    mean_deviation: float
    largest_shortfall: float
    prices: tuple[ComputedRate, ...] = ()
    measured: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    launch: RoundFilesAnswer | None = None
    accelerators: Annotated[tuple[str, ...], CARRIED]


class RunAnswer(Answer):
    """The time from one change to the next that an accelerator of a type, by number, ran jobs."""

    jobs: tuple[str, ...]
    accelerator: str
    number: int
    start_seconds: float
    end_seconds: float


class DrawnRateAnswer(Answer):
    """A true rate that was drawn, what it was predicted to be, and whether a job measured it."""

    model: str
    accelerator: str
    count: int
    placement: Literal["consolidated", "spread"]
    predicted_steps_per_second: float
    steps_per_second: float
    measured: bool


class SimulateClusterAnswer(Answer):
    """Statistics of a simulated cluster; None if no job completed.

    ``status`` is ``done``, or ``interrupted`` if the simulation was stopped before its end.
    ``runs`` are there if the request keeps the assignments. Of throughputs that were computed for
    trainings, ``assumed`` has what was assumed, and ``drawn`` what they were drawn to be.
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
    assumed: tuple[str, ...] = ()
    drawn: tuple[DrawnRateAnswer, ...] = ()
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
    """A job's planned and measured fraction of time on a worker type, and its rate alone there.

    Of the rate, None where no step was timed.
    """

    job: str
    worker: str
    target: float
    measured: float
    predicted_steps_per_second: float
    steps_per_second: float | None


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
