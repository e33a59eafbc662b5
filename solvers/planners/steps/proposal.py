"""A planner's answer, before it is assembled, checked and certified."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from stagewright.formulations.backprop.orders import OutOfOrder
from stagewright.formulations.forms.answers import Status
from stagewright.formulations.patterns.pattern import Pattern
from stagewright.formulations.pipelines.bppm import StageChoice
from stagewright.formulations.pipelines.makespan import Timetable
from stagewright.formulations.plans import plan_class
from stagewright.formulations.plans.actions import DOUBLE_BUFFER, WEIGHT_RULES, ActionKind, Weights
from stagewright.formulations.plans.assembly import starts_of
from stagewright.formulations.plans.memory import in_flight_limit, static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    Begins,
    Bound,
    Guarantee,
    PipelinePlan,
    Predicted,
    Stage,
)
from stagewright.formulations.plans.structure import Structure
from stagewright.formulations.plans.timing import Blocks, durations
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.formulations.schedules.runtimes import Runtime
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_DEVICES, format_bytes, require_count


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of one planner of a portfolio."""

    planner: str
    status: Status
    cost_seconds: float | None
    wall_seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Stages, start times, and bounds that the planner proved; ``notes`` describe the search.

    Backwards are split where ``starts`` has their input gradients; ``weights`` names the rule of
    their updates; ``begins`` as in `Schedule`. ``sub_ends`` has the ends of the weight gradients in
    sub-streams, shape (S, M), NaN for the others; None: there are none. ``others`` are plans of a
    portfolio that are hardly slower, each the best of another class.
    """

    stages: tuple[Stage, ...]
    starts: Blocks
    bounds: tuple[Bound, ...] = ()
    guarantees: tuple[Guarantee, ...] = ()
    notes: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    weights: Weights = "flush"
    begins: Begins = "forward"
    sub_ends: Floats | None = None
    others: "tuple[Proposal, ...]" = ()


Recomputation = Literal["none", "full", "layer", "auto"]
MemoryMode = Literal["none", "full", "layer", "offload"]
"""How a stage saves activation memory: not at all, by recomputation, or by offloading."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of the requested plan.

    Attributes
    ----------
    recompute
        ``none``: nothing is recomputed. ``full``, ``layer``: stages keep their input only, or the
        input of every layer, and recompute the rest. The planners ``auto``, ``general``,
        ``madpipe`` and ``1f1b-star`` choose the stages that recompute; with the others all stages
        do. ``auto``: the best of these. None: ``auto`` for the planners ``auto`` and ``general``,
        ``none`` for the others.
    offload
        Stages may keep activations in host memory. The planners ``auto``, ``general``, ``madpipe``
        and ``1f1b-star`` choose the stages that offload; with the others all stages do (or
        recompute, if that is allowed and faster). None: allowed with the planners ``auto`` and
        ``general`` on devices with host_bytes_per_second.
    group_size
        Periodic planners: the number of devices that split the microbatches of every stage (None:
        the best number).
    period_seconds
        Periodic planners: the exact period of the plan (None: the least).
    start
        ``auto`` and ``general``: a plan of the same layers, for this or another cluster, that the
        search starts from.
    backend
        Periodic planners: the solver of the patterns, ``highs`` (the default),
        ``pulp-cbc``, ``cvxpy`` or ``cp-sat``.
    order
        ``order``, and ``auto`` which then runs it: the schedule (None: ``1f1b``).
    out_of_order
        ``ooo``: the method of training and its parameter (None: data parallelism).
    batch
        ``2bw`` and ``2bw-flush``: the samples between two updates, of which the planner chooses
        the microbatches and their size in place of the problem's.
    vertical_sync
        ``pipedream-async``: whether every stage uses the weights that the first stage used.
    shards
        What the replicas of stages divide, put into the plan after the search; see `sharded`.
    runtime
        ``launchable``, and ``auto`` which then runs it: the framework's runtime to plan for (None:
        that of torch.distributed.pipelining).
    """

    recompute: Recomputation | None = None
    offload: bool | None = None
    group_size: int | None = None
    period_seconds: float | None = None
    start: PipelinePlan | None = None
    backend: str | None = None
    order: ScheduleChoice | None = None
    out_of_order: OutOfOrder | None = None
    batch: int | None = None
    vertical_sync: bool = False
    shards: plan_class.Shards = "none"
    runtime: Runtime | None = None

    def __post_init__(self) -> None:
        if self.group_size is not None:
            require_count(self.group_size, "group size", MAX_DEVICES)
        if self.recompute not in (None, *get_args(Recomputation)):
            known = ", ".join(get_args(Recomputation))
            raise InputError(f"recompute must be one of {known}, got {self.recompute!r}")
        if self.shards not in plan_class.SHARDS:
            raise InputError(
                f"shards must be one of {', '.join(plan_class.SHARDS)}, got {self.shards!r}"
            )
        if not isinstance(self.offload, bool | None):
            raise InputError(f"offload must be True or False, got {self.offload!r}")
        period = self.period_seconds
        if period is not None and not (isinstance(period, int | float) and 0 < period < math.inf):
            raise InputError(f"the period must be a positive number of seconds, got {period!r}")

    @property
    def any_mode(self) -> "Choices":
        """These choices, with every memory mode allowed unless it is set otherwise."""
        recompute = "auto" if self.recompute is None else self.recompute
        offload = True if self.offload is None else self.offload
        return replace(self, recompute=recompute, offload=offload)

    @property
    def recomputations(self) -> tuple[plan_class.Recompute, ...]:
        """The allowed values of ``Stage.recompute``."""
        return tuple(
            mode
            for mode in plan_class.RECOMPUTE
            if mode == "none" or self.recompute in (mode, "auto")
        )

    @property
    def uniform_modes(self) -> tuple[MemoryMode, ...]:
        """The memory modes for plans whose stages all have the same one."""
        known: tuple[MemoryMode, ...] = () if self.offload else ("none",)
        if self.recompute == "auto":
            known = plan_class.RECOMPUTE
        elif self.recompute in ("full", "layer"):
            known = (self.recompute,)
        return (*known, "offload") if self.offload else known

    @property
    def periodic_recomputations(self) -> tuple[Literal["none", "full"], ...]:
        """The recomputation of stages of periodic plans, without ``layer``."""
        return ("none", "full") if self.recompute in ("full", "auto") else ("none",)

    @property
    def periodic_modes(self) -> tuple[MemoryMode, ...]:
        """The memory modes of stages of periodic plans."""
        known = self.periodic_recomputations
        return (*known, "offload") if self.offload else known


@dataclass(frozen=True, slots=True, eq=False)
class PeriodicProposal:
    """Stages with their pattern, and proved bounds on the iteration.

    ``predicted_seconds`` is the period estimated from the allocation, before its pattern was found;
    ``weights`` names the rule of their updates.
    """

    stages: tuple[Stage, ...]
    pattern: Pattern
    predicted_seconds: float
    bounds: tuple[Bound, ...]
    notes: tuple[str, ...] = ()
    weights: Weights = DOUBLE_BUFFER.name


@dataclass(frozen=True, slots=True)
class NoPlan:
    """No plan was found: ``proved`` if none exists, otherwise a limit was reached.

    ``plans`` is the class of plans that is proved to be empty; None if only the planner's own kind
    of plan was searched.
    """

    reason: str
    proved: bool = True
    bounds: tuple[Bound, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    plans: plan_class.PlanClass | None = None


def proposal_of(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    times: Timetable,
    bounds: tuple[Bound, ...] = (),
    notes: tuple[str, ...] = (),
) -> Proposal:
    """The proposal of a timetable with whole backwards."""
    starts = starts_of(problem, stages, times)
    return Proposal(tuple(stages), starts, bounds, notes=notes)


def class_of_proposal(proposal: Proposal | PeriodicProposal) -> plan_class.PlanClass:
    """The smallest class of the proposed plan."""
    if isinstance(proposal, PeriodicProposal):
        return plan_class.class_of_stages(proposal.stages, False, "periodic", proposal.weights)
    parts = not np.isnan(proposal.starts[ActionKind.INPUT_GRADIENT]).all()
    kind: plan_class.ScheduleKind = "finite" if proposal.begins == "forward" else "backward-first"
    streams: Literal[1, 2] = 1 if proposal.sub_ends is None else 2
    return plan_class.class_of_stages(proposal.stages, bool(parts), kind, proposal.weights, streams)


def structure_of(proposal: Proposal) -> Structure:
    """The stages, and which of them split all their backwards."""
    split = ~np.isnan(proposal.starts[ActionKind.INPUT_GRADIENT])
    return Structure(proposal.stages, tuple(bool(row.all()) for row in split))


def cost_of(problem: PipelineProblem, proposal: Proposal) -> float:
    """The end of the last action of a proposal, which is not in a sub-stream: forwards follow."""
    split = ~np.isnan(proposal.starts[ActionKind.INPUT_GRADIENT])
    rule = WEIGHT_RULES[proposal.weights]
    seconds_by_kind = durations(problem, proposal.stages, split, rule)
    return max(
        float(np.nanmax(proposal.starts[kind] + seconds))
        for kind, seconds in seconds_by_kind.items()
        if not np.isnan(seconds).all()
    )


def fullest_share(problem: PipelineProblem, predicted: Predicted) -> float:
    """The largest share of its memory that a device needs at its peak."""
    index = problem.cluster.index
    return max(
        peak / float(problem.memory_bytes[index[name]])
        for name, peak in predicted.peak_memory_bytes.items()
    )


def with_memory_mode(stage: Stage, mode: MemoryMode) -> Stage:
    """The stage with memory mode ``mode``."""
    if mode == "offload":
        return replace(stage, recompute="none", offload=True)
    return replace(stage, recompute=mode, offload=False)


def named_stages(problem: PipelineProblem, choices: Sequence[StageChoice]) -> tuple[Stage, ...]:
    """Split stages with device names in place of indices."""
    devices = problem.cluster.devices
    return tuple(
        Stage((c.start, c.stop), tuple(devices[v].name for v in c.devices)) for c in choices
    )


def shortage(problem: PipelineProblem, stages: Sequence[StageChoice], in_flight: int = 1) -> str:
    """Describe the first stage that cannot hold ``in_flight`` microbatches, with missing bytes.

    Or the first stage with more devices than a microbatch can be split among.
    """
    for s, stage in enumerate(stages):
        most = problem.most_replicas(stage.start, stage.stop)
        if len(stage.devices) > most:
            return (
                f"stage {s} (layers {stage.start} to {stage.stop - 1}) splits microbatches of "
                f"{problem.chain.microbatch_size} samples among {len(stage.devices)} devices, "
                f"{most} are the most: plan larger microbatches"
            )
        if in_flight_limit(problem, stage.start, stage.stop, stage.devices) >= in_flight:
            continue
        shares = len(stage.devices)
        need = static_bytes(problem, stage.start, stage.stop, shares)
        need += in_flight * problem.saved_bytes(stage.start, stage.stop, shares)
        tightest = min(stage.devices, key=lambda v: problem.memory_bytes[v])
        memory = float(problem.memory_bytes[tightest])
        return (
            f"stage {s} (layers {stage.start} to {stage.stop - 1}) with {in_flight} microbatches "
            f"in flight needs {format_bytes(need)}, device "
            f"{problem.cluster.devices[tightest].name!r} has {format_bytes(memory)}: "
            f"{need - memory:.0f} bytes short"
        )
    raise AssertionError("no stage is short of memory")
