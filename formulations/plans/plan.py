"""The pipeline plan: a versioned JSON document."""

import math
import os
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from stagewright.formulations.plans import plan_class
from stagewright.formulations.plans.actions import (
    COMPUTE,
    UPDATE,
    WEIGHT_RULES,
    ActionKind,
    B,
    W,
    WeightRule,
    Weights,
)
from stagewright.formulations.plans.envelope import Envelope
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import (
    MAX_MICROBATCHES,
    counted,
    require_amount,
    require_count,
    require_positive,
)

Begins = Literal["forward", "backward"]
"""What a finite schedule begins with; see `Schedule`."""


_OF_REPLICAS: dict[plan_class.Shards, tuple[ActionKind, ...]] = {
    "none": (),
    "optimizer": (UPDATE,),
    "gradients": (B, W, UPDATE),
    "weights": COMPUTE,
}
"""The actions in which all replicas of a stage exchange what they divide."""


@documents.record
class Stage:
    """Layers ``[start, stop)`` on ``devices``.

    ``replication`` says how several devices share the microbatches: ``split`` divides every
    microbatch evenly among them (SPP), ``round-robin`` gives the whole microbatch m to device m
    mod r. ``recompute`` says which activations are freed after the forward and recomputed for the
    backward: none (``none``), all but the stage's input (``full``), or all but every layer's input
    (``layer``). With ``offload`` all kept activations move to host memory after the forward, and
    back before the backward begins.

    Groups of ``tensor`` consecutive devices compute every layer together, each with a shard of it
    (tensor parallelism); a group takes the place of one device in the replication.

    ``shards`` says what the replicas divide among them, each with an equal part (ZeRO, Rajbhandari
    et al. 2020): nothing (``none``); the state of the optimizer (``optimizer``, ZeRO-1); also
    gradients (``gradients``, ZeRO-2), so that a layer's are summed up in each of its backwards; or
    weights too (``weights``, ZeRO-3), which are gathered for each of its forwards and backwards.
    """

    layers: tuple[int, int]
    devices: tuple[str, ...]
    replication: plan_class.Replication = "split"
    recompute: plan_class.Recompute = "none"
    offload: bool = False
    tensor: int = 1
    shards: plan_class.Shards = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.layers[0] < self.layers[1]:
            raise InputError(f"layers must be [start, stop) with start < stop, got {self.layers}")
        if not self.devices:
            raise InputError("a stage needs at least one device")
        count = len(self.devices)
        require_count(self.tensor, "tensor", count)
        if count % self.tensor:
            raise InputError(f"tensor must divide the stage's {count} devices, got {self.tensor}")
        if self.offload and self.recompute != "none":
            raise InputError(
                f"a stage either offloads or recomputes its activations, not both; got recompute "
                f"{self.recompute!r} with offload"
            )
        plan_class.require_replicas(self.shards, self.replication, self.replicas)

    def runners(self, microbatch: int) -> tuple[str, ...]:
        """The devices that process ``microbatch``."""
        if self.replication == "split":
            return self.devices
        first = microbatch % self.turns * self.tensor
        return self.devices[first : first + self.tensor]

    @property
    def replicas(self) -> int:
        """The number of groups, each with the whole weights."""
        return len(self.devices) // self.tensor

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed up once, after the backwards, and not within each."""
        return self.replicas > 1 and self.shards in ("none", "optimizer")

    def joint(self, kind: ActionKind) -> int:
        """Among how many consecutive devices a computation or update has collectives."""
        if kind in _OF_REPLICAS.get(self.shards, ()):
            return len(self.devices)
        return 1 if kind is UPDATE else self.tensor

    @property
    def lanes(self) -> tuple[tuple[str, ...], ...]:
        """The groups of runners that take turns: microbatch m runs on lane m mod their number."""
        size = len(self.devices) // self.turns
        return tuple(self.devices[i : i + size] for i in range(0, len(self.devices), size))

    @property
    def turns(self) -> int:
        """The number of lanes."""
        return 1 if self.replication == "split" else self.replicas


@documents.record
class PlannedLayer:
    """A layer of the planned model, to compare with the layers of the model that is run."""

    name: str
    parameter_bytes: float


@documents.record
class ScheduledAction:
    """One action in time.

    Computations appear once per device. A transfer appears once, led by its first source, with all
    endpoints; an all-reduce once, led by its first device, with all devices of the stage as sources
    and targets. ``bytes`` are the bytes of the whole transfer, or the gradients that are reduced.
    ``stream`` is None for the device's main stream, which has priority over the sub-stream: beside
    a kernel that occupies a share a of the device, one of share b in the sub-stream runs at rate
    min(1, (1 - a) / b).
    """

    device: str
    action: str
    start_seconds: float
    finish_seconds: float
    sources: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None
    bytes: float | None = None
    stream: Literal["sub"] | None = None


@documents.record
class Schedule:
    """A finite schedule: every action once, with its times from the start of the iteration.

    ``begins`` says where an iteration is cut out of the training run. ``forward``: it begins with
    the forwards and ends with the updates. ``backward``: it lies between two losses; it begins with
    the backwards of a mini-batch and ends with the forwards of the next one, of which each needs
    only the update of its own stage (out-of-order backprop, section 2). At its start the
    activations of all microbatches are held, at its end those of the next.
    """

    actions: tuple[ScheduledAction, ...]
    begins: Begins = "forward"
    kind: Literal["finite"] = "finite"


@documents.record
class PeriodicAction:
    """One operation of a pattern; in the k-th period it runs for microbatch k - ``shift``.

    ``action`` is a stage and a kind, without microbatch: ``2F``. It starts ``start_seconds`` after
    its period starts, in [0, period), and takes ``seconds``; it may extend into the next period.
    An all-reduce runs once per iteration, for the last microbatch. The other fields are those of
    :class:`ScheduledAction`.
    """

    device: str
    action: str
    start_seconds: float
    shift: int
    seconds: float
    sources: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None
    bytes: float | None = None


@documents.record
class PeriodicSchedule:
    """A pattern repeated every ``period_seconds``, once per microbatch (MadPipe, 3).

    A pause of ``pause_seconds`` is inserted once per iteration, before each period whose number is
    a multiple of the number of microbatches: actions that start in that period or later are
    delayed by it, running actions continue. Every device pauses equally, for its weight updates.
    """

    period_seconds: float
    actions: tuple[PeriodicAction, ...]
    pause_seconds: float = 0.0
    kind: Literal["periodic"] = "periodic"

    def __post_init__(self) -> None:
        if not 0 < self.period_seconds < math.inf:
            raise InputError(f"period_seconds must be positive, got {self.period_seconds}")
        require_amount(self.pause_seconds, "pause_seconds")
        for i, one in enumerate(self.actions):
            if not (0 <= one.start_seconds < self.period_seconds and 0 <= one.seconds < math.inf):
                raise InputError(
                    f"actions[{i}], {one.action}: start_seconds must be in [0, "
                    f"{self.period_seconds}) and seconds not negative, got {one.start_seconds} "
                    f"and {one.seconds}"
                )
            if not 0 <= one.shift <= MAX_MICROBATCHES:
                raise InputError(
                    f"actions[{i}], {one.action}: shift must be from 0 to {MAX_MICROBATCHES}, "
                    f"got {one.shift}"
                )


@documents.record
class Predicted:
    """Predictions of the cost model for the plan.

    ``bubble`` is the idle share of the used devices' time in the iteration; memory is the peak per
    device, ``capacity_bytes`` what a device may use (empty in older documents). Link bytes are the
    sum per iteration over each pair of stages ("0-1") and group ("0"). An iteration of a periodic
    plan is one period per microbatch, plus the pause.
    """

    iteration_seconds: float
    bubble: float
    peak_memory_bytes: dict[str, float]
    link_bytes: dict[str, float]
    capacity_bytes: dict[str, float] = field(default_factory=dict)


@documents.record
class Bound:
    """A proved lower bound on the iteration time.

    With ``scope`` ``problem`` it bounds every plan of the problem in the class ``plans``, with
    ``schedule`` every schedule in that class of this plan's stages. ``proved_by`` names the
    argument (docs/certificates.md); ``witness`` holds the numbers that verify it, such as dual
    prices.
    """

    seconds: float
    proved_by: str
    scope: Literal["problem", "schedule"]
    plans: plan_class.PlanClass
    witness: tuple[float, ...] = ()


@documents.record
class Guarantee:
    """An upper bound given by a theorem, next to the cost that was reached.

    ``premise`` states the conditions of the theorem and what it compares with; ``stages`` are
    those whose times are in its formula.
    """

    theorem: str
    seconds: float
    cost_seconds: float
    holds: bool
    premise: str
    stages: tuple[Stage, ...]


@documents.record
class Certificate:
    """Lower bounds on the plan's cost, and their gaps: (cost - bound) / cost.

    ``bound_seconds`` is the best bound over a class ``plans`` that contains this plan (of equal
    bounds, the one on the largest class). ``every_bound_seconds`` is the best over every plan (of
    tensor degree 1, without shards) that the checker accepts. ``schedule_bound_seconds`` is the
    best bound over the schedules of the same stages in the class ``schedule_plans``. ``bounds``
    lists all computed bounds, including those on classes without this plan: one that exceeds the
    plan's cost says that every plan of its class is worse.
    """

    cost_seconds: float
    bound_seconds: float
    gap: float
    proved_by: str
    plans: plan_class.PlanClass
    every_bound_seconds: float
    every_gap: float
    every_proved_by: str
    schedule_bound_seconds: float
    schedule_gap: float
    schedule_proved_by: str
    schedule_plans: plan_class.PlanClass
    bounds: tuple[Bound, ...]
    guarantees: tuple[Guarantee, ...] = ()


@documents.record
class PipelinePlan(Envelope):
    """A plan for one training iteration of a model on a cluster.

    ``digest`` identifies the problem (model, cluster, microbatches), ``layers`` (None: unknown) and
    ``reference_seconds`` are the model's, ``memory_limit_bytes``, ``assumed_share`` and
    ``microbatch_size`` are the problem's, the times of messages the cluster's. Stages may share
    devices. ``weights`` says when the weights change:

    - ``flush``: once, at the end of the iteration, by the gradient of all microbatches.
    - ``stash``: after every microbatch (of a round-robin stage, after every round), as its backward
      ends; a forward uses the newest weights, and its backward the same version (PipeDream's weight
      stashing).
    - ``stash+vertical-sync``: likewise, but every stage uses the version that the first stage used
      for this microbatch.
    - ``double-buffer``: once, at the end of the iteration, by a gradient at the weights before the
      last update: W(t+1) = W(t) - lr grad f(W(t-1)) (PipeDream-2BW). With a periodic schedule the
      next iteration begins before this one ends.
    """

    planner: str
    model: str
    cluster: str
    microbatches: int
    stages: tuple[Stage, ...]
    schedule: Annotated[Schedule | PeriodicSchedule, Field(discriminator="kind")]
    predicted: Predicted | None = None
    certificate: Certificate | None = None
    weights: Weights = "flush"
    memory_limit_bytes: float | None = None
    layers: tuple[PlannedLayer, ...] | None = None
    assumed_share: float | None = None
    microbatch_size: int | None = None
    message_seconds: float | None = None
    message_bytes_per_second: float | None = None
    reference_seconds: float | None = None
    format: Literal["stagewright-plan"] = "stagewright-plan"
    version: Literal[1] = 1
    kind: Literal["pipeline"] = "pipeline"

    def __post_init__(self) -> None:
        if not self.stages:
            raise InputError("a plan needs at least one stage")
        if self.microbatches < 1:
            raise InputError(f"microbatches must be at least 1, got {self.microbatches}")
        require_positive(self.reference_seconds, "reference_seconds")

    @property
    def is_periodic(self) -> bool:
        """Whether iterations overlap, as a pattern that is repeated."""
        return isinstance(self.schedule, PeriodicSchedule)

    @property
    def is_backward_first(self) -> bool:
        """Whether the schedule is finite and lies between two losses."""
        return isinstance(self.schedule, Schedule) and self.schedule.begins == "backward"

    @property
    def uses_two_streams(self) -> bool:
        """Whether some device computes in a sub-stream beside its main stream."""
        finite = isinstance(self.schedule, Schedule)
        return finite and any(one.stream == "sub" for one in self.actions)

    @property
    def spans_steps(self) -> bool:
        """Whether a mini-batch ends in a later step than it begins."""
        return self.is_periodic or self.is_backward_first

    def runners(self, stage: int, microbatch: int) -> tuple[str, ...]:
        """The devices that process a microbatch, in numbers that count over all mini-batches."""
        return self.stages[stage].runners(microbatch % self.microbatches)

    @property
    def of_sizes(self) -> str:
        """The chosen number and size of microbatches, in words; empty if the sizes were given."""
        if self.microbatch_size is None:
            return ""
        number = counted(self.microbatches, "microbatch", "microbatches")
        return f", in {number} of {counted(self.microbatch_size, 'sample', 'samples')}"

    @property
    def weight_rule(self) -> WeightRule:
        """The rule that ``weights`` names."""
        return WEIGHT_RULES[self.weights]

    @property
    def actions(self) -> tuple[ScheduledAction, ...]:
        """The actions of a finite schedule."""
        if isinstance(self.schedule, PeriodicSchedule):
            raise InvalidPlan("the plan is periodic: unroll it to get the actions of an iteration")
        return self.schedule.actions


def load_plan(path: str | os.PathLike[str]) -> PipelinePlan:
    """Read a plan document; raises InputError, with one line, if it is not valid."""
    return documents.read(PipelinePlan, path)


def save_plan(plan: PipelinePlan, path: str | os.PathLike[str]) -> None:
    """Write a plan document atomically."""
    documents.write(PipelinePlan, plan, path)
