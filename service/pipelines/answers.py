"""Answers about plans of pipelines, and about scheduling problems."""

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, computed_field

from stagewright.formulations.forms.answers import Status
from stagewright.service.answers import CARRIED, Answer, Finite

if TYPE_CHECKING:
    from stagewright.executor.measuring.compare import Comparison
    from stagewright.executor.simulation.simulate import Simulation
    from stagewright.formulations.checking.order import Violation
    from stagewright.formulations.checking.proofs import Verdict
    from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
    from stagewright.formulations.plans.plan import PipelinePlan
    from stagewright.formulations.schedules.timing import TimedOrder
    from stagewright.graphs.models.chain import Chain
    from stagewright.solvers.pipelines.scheduling import ScheduleResult
    from stagewright.solvers.planning import Result
else:  # carried, not validated: their libraries are slow to import
    Comparison = Simulation = Verdict = Violation = MakespanProblem = Timetable = Any
    PipelinePlan = ScheduleResult = Result = TimedOrder = Chain = Any


class StageAnswer(Answer):
    """A stage of a plan."""

    layers: tuple[int, int]
    devices: tuple[str, ...]
    replication: str
    recompute: str
    offload: bool
    tensor: int
    shards: str


class GuaranteeAnswer(Answer):
    """A theorem's upper bound in seconds, and whether the plan satisfies it."""

    theorem: str
    premise: str
    seconds: float
    holds: bool


class PlanSummary(Answer):
    """The main numbers of a plan and its certificate; all None without a plan.

    ``plans`` and ``schedule_plans`` are the classes that the bounds apply to.
    """

    planner: str | None = None
    cost_seconds: Finite = None
    bound_seconds: Finite = None
    gap: Finite = None
    proved_by: str | None = None
    plans: dict[str, Any] | None = None
    schedule_plans: dict[str, Any] | None = None
    every_bound_seconds: Finite = None
    every_gap: Finite = None
    every_proved_by: str | None = None
    schedule_bound_seconds: Finite = None
    schedule_gap: Finite = None
    schedule_proved_by: str | None = None
    stages: tuple[StageAnswer, ...] | None = None
    period_seconds: Finite = None
    bubble: Finite = None
    peak_memory_bytes: Finite = None
    peak_memory_bytes_per_device: dict[str, float] | None = None
    guarantees: tuple[GuaranteeAnswer, ...] | None = None


class AttemptAnswer(Answer):
    """The result of one planner of a portfolio."""

    planner: str
    status: Status
    cost_seconds: Finite
    wall_seconds: float
    reason: str


class RestrictionAnswer(Answer):
    """What planning for a framework alone costs; see `Restriction`."""

    name: str
    plans: dict[str, Any]
    bound_seconds: Finite
    gap: Finite
    proved_by: str | None
    free_cost_seconds: Finite


class OtherAnswer(Answer):
    """Another plan that a portfolio also holds; see `Result`."""

    cost_seconds: float
    bound_seconds: float
    gap: float
    proved_by: str
    plans: dict[str, Any]


class SizeAnswer(Answer):
    """What was found for a batch in ``microbatches`` of ``samples`` each."""

    samples: int
    microbatches: int
    status: Status
    cost_seconds: Finite
    bound_seconds: Finite


class PlanAnswer(PlanSummary):
    """The answer of a planner.

    ``optimal_among`` says of which plans an optimal plan is the shortest. With ``sizes`` the bound
    and the status are about microbatches of all these sizes.
    ``exports`` has the exports to other frameworks, each with why it refuses the plan or None; it
    is None without a plan, and for plans with very many actions.
    """

    status: Status
    optimal_among: str | None = None
    wall_seconds: float
    reason: str
    microbatches: int
    memory_limit_bytes: Finite
    model: str
    cluster: str
    attempts: tuple[AttemptAnswer, ...]
    restriction: RestrictionAnswer | None
    sizes: tuple[SizeAnswer, ...]
    other: OtherAnswer | None
    result: Annotated[Result, CARRIED]
    chain: Annotated[Chain, CARRIED]

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def exports(self) -> dict[str, str | None] | None:
        """Found out when it is read: every format lowers the plan, which sweeps do not need."""
        from stagewright.service.pipelines.launching import exports

        return None if self.plan is None else exports(self.plan, self.chain)

    @property
    def plan(self) -> PipelinePlan | None:
        """The plan, if there is one."""
        return self.result.plan


class ViolationAnswer(Answer):
    """A broken rule."""

    rule: str
    place: str
    message: str


class VerdictAnswer(Answer):
    """The result of proving a bound or guarantee again."""

    place: str
    name: str
    seconds: Finite
    verdict: str
    reason: str


class CheckAnswer(Answer):
    """Whether a plan is valid, and the broken rules."""

    status: str
    cost_seconds: Finite
    violations: tuple[ViolationAnswer, ...]
    proofs: tuple[VerdictAnswer, ...]
    found: Annotated[tuple[Violation, ...], CARRIED]
    verdicts: Annotated[tuple[Verdict, ...], CARRIED]


class SimulateAnswer(Answer):
    """A simulated run of a plan; the figures of the period are None for a finite plan."""

    status: str = "simulated"
    iteration_seconds: float
    plan_seconds: float
    slowdown: float
    period_seconds: Finite
    warm_up_seconds: Finite
    drain_seconds: Finite
    microbatches: int | None
    idle_seconds: dict[str, float]
    slack_seconds: dict[str, Finite]
    jitter: float
    stragglers: dict[str, float]
    seed: int
    simulation: Annotated[Simulation, CARRIED]


class PairAnswer(Answer):
    """A predicted value, the measured one, and measured / predicted."""

    predicted: Finite
    measured: Finite
    ratio: Finite


class IterationAnswer(PairAnswer):
    """The iteration, and the shortest and longest that was measured."""

    least: Finite
    most: Finite


class PeriodAnswer(PairAnswer):
    """The period, and of how many microbatches it was measured."""

    microbatches: int


class KindAnswer(Answer):
    """The actions of one kind, by the mean of their seconds."""

    count: int
    seconds: PairAnswer


class StageComparisonAnswer(Answer):
    """A stage's mean times, and the share of the iteration in which it computes."""

    devices: tuple[str, ...]
    forward_seconds: PairAnswer
    backward_seconds: PairAnswer
    busy: PairAnswer


class MemoryAnswer(Answer):
    """The peak of each device in bytes: ``allocated`` by torch, or ``resident`` in its process."""

    kind: str
    peak_bytes: dict[str, PairAnswer]


_OF_WORK = Field(validation_alias="work")
"""Marks the seconds that measurements have as ``work``."""


class StageShareAnswer(Answer):
    """What a cause accounts for with the measured times of one stage alone."""

    stage: int
    seconds: Finite
    work_seconds: Annotated[PairAnswer, _OF_WORK]


class DeviceShareAnswer(Answer):
    """What a cause accounts for with what was measured on one device alone."""

    device: str
    seconds: Finite


class CauseAnswer(Answer):
    """By how much a cause alone lengthens an iteration, and the seconds of its actions together."""

    name: str
    seconds: Finite
    work_seconds: Annotated[PairAnswer | None, _OF_WORK]
    stages: tuple[StageShareAnswer, ...]
    devices: tuple[DeviceShareAnswer, ...]


class ExplanationAnswer(Answer):
    """The causes and the rest, which add up to measured - predicted, and the largest cause."""

    causes: tuple[CauseAnswer, ...]
    rest_seconds: Finite
    largest: str | None
    without_waits_seconds: Finite


class CompareAnswer(Answer):
    """A plan's predictions and the measurements of a run of it."""

    status: str = "compared"
    machine: str
    backend: str
    world_size: int
    dtype: str
    steps: int
    iteration_seconds: IterationAnswer
    period_seconds: PeriodAnswer | None
    update_seconds: PairAnswer
    kinds: dict[str, KindAnswer]
    stages: tuple[StageComparisonAnswer, ...]
    memory: MemoryAnswer | None
    explanation: ExplanationAnswer | None
    reference_seconds: PairAnswer | None
    equal_speed_ratio: Finite
    comparison: Annotated[Comparison, CARRIED]


class PlacedStageAnswer(Answer):
    """A stage of a partition."""

    layers: tuple[int, int]
    devices: tuple[str, ...]


class PartitionChoice(Answer):
    """The partition into ``count`` stages: its bottleneck and a bound on every other one's."""

    count: int
    status: Status
    bottleneck_seconds: Finite
    bound_seconds: Finite
    gap: Finite
    stages: tuple[PlacedStageAnswer, ...] | None


class PartitionAnswer(Answer):
    """The partitions of least bottleneck for a fixed order of the devices.

    The bottleneck is the largest time that the microbatches of an iteration spend on one stage or
    channel.
    """

    status: Status
    backend: str
    model: str
    cluster: str
    microbatches: int
    order: tuple[str, ...]
    wall_seconds: float
    partitions: tuple[PartitionChoice, ...]


class WhatIfRow(Answer):
    """The plan with one change.

    ``saved_seconds`` is how much less time it takes than the best plan as things are, which is
    looked for from this plan too: it is what the change saves, not the search. With the change no
    plan of the class ``plans`` saves more than ``most_seconds``, as ``bound_seconds`` is below all
    of them. None where a plan or a bound is missing.
    """

    change: str
    status: str
    cost_seconds: Finite = None
    bound_seconds: Finite = None
    saved_seconds: Finite = None
    most_seconds: Finite = None
    plans: str | None = None
    reason: str = ""


class WhatIfAnswer(Answer):
    """The plan as things are, and a row for every change."""

    status: str
    base: PlanAnswer
    rows: tuple[WhatIfRow, ...]
