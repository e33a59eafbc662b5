"""What a planner hands back, before it is assembled, checked and certified."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from stagewright.formulations.forms.answers import Status
from stagewright.formulations.patterns.pattern import Pattern
from stagewright.formulations.pipelines.bppm import StageChoice
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.pipelines.spp import makespan_problem
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.memory import in_flight_limit, static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Guarantee, Stage
from stagewright.formulations.plans.plan_class import RECOMPUTE, PlanClass, Recompute
from stagewright.formulations.plans.starts import starts_of
from stagewright.formulations.plans.timing import Blocks, durations
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_DEVICES, format_bytes, require_count


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one planner of a portfolio gave."""

    planner: str
    status: Status
    cost_seconds: float | None
    wall_seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Stages, start times, and what the planner proved on the way; ``notes`` say how it went.

    Backwards are split where ``starts`` has their input gradients.
    """

    stages: tuple[Stage, ...]
    starts: Blocks
    bounds: tuple[Bound, ...] = ()
    guarantees: tuple[Guarantee, ...] = ()
    notes: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()


Recomputation = Literal["none", "full", "layer", "auto"]
MemoryWay = Literal["none", "full", "layer", "offload"]
"""What a stage does about what it keeps: nothing, recomputation, or offloading."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a plan may use, and what is asked of it.

    Attributes
    ----------
    recompute
        ``none``: nothing is recomputed. ``full``, ``layer``: stages keep their input alone, or the
        input of every layer, and recompute the rest; with ``auto``, ``general``, ``madpipe`` and
        ``1f1b-star`` those stages where it helps, with the other planners all. ``auto``: any of
        these, whatever is best. None: ``auto`` for the planners ``auto`` and ``general``, where
        it is faster or nothing fits without; ``none`` for the others.
    offload
        Stages may keep activations in the host's memory: with ``auto``, ``general``, ``madpipe``
        and ``1f1b-star`` those where it helps, with the other planners all (or, if they may
        recompute too, whatever is faster). None: with the planners ``auto`` and ``general``, on
        devices whose link to the host is known.
    group_size
        Periodic planners: so many devices share every stage and split its microbatches (None:
        whatever is best).
    period_seconds
        Periodic planners: a plan of exactly this period (None: of the least).
    """

    recompute: Recomputation | None = None
    offload: bool | None = None
    group_size: int | None = None
    period_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.group_size is not None:
            require_count(self.group_size, "group size", MAX_DEVICES)
        if self.recompute not in (None, *get_args(Recomputation)):
            known = ", ".join(get_args(Recomputation))
            raise InputError(f"recompute must be one of {known}, got {self.recompute!r}")
        if not isinstance(self.offload, bool | None):
            raise InputError(f"offload must be True or False, got {self.offload!r}")
        period = self.period_seconds
        if period is not None and not (isinstance(period, int | float) and 0 < period < math.inf):
            raise InputError(f"the period must be a positive number of seconds, got {period!r}")

    @property
    def recomputations(self) -> tuple[Recompute, ...]:
        """What stages may recompute."""
        return tuple(way for way in RECOMPUTE if way == "none" or self.recompute in (way, "auto"))

    @property
    def uniform_ways(self) -> tuple[MemoryWay, ...]:
        """What all stages of a plan may do, where they all do the same."""
        known: tuple[MemoryWay, ...] = () if self.offload else ("none",)
        if self.recompute == "auto":
            known = RECOMPUTE
        elif self.recompute in ("full", "layer"):
            known = (self.recompute,)
        return (*known, "offload") if self.offload else known

    @property
    def periodic_recomputations(self) -> tuple[Literal["none", "full"], ...]:
        """What the stages of periodic plans may recompute: no planner of them knows ``layer``."""
        return ("none", "full") if self.recompute in ("full", "auto") else ("none",)

    @property
    def periodic_ways(self) -> tuple[MemoryWay, ...]:
        """What the stages of periodic plans may do about what they keep."""
        known = self.periodic_recomputations
        return (*known, "offload") if self.offload else known


@dataclass(frozen=True, slots=True, eq=False)
class PeriodicProposal:
    """Stages and their pattern, and what was proved of the iteration.

    ``predicted_seconds`` is the period that the allocation seemed to allow before its pattern was
    found.
    """

    stages: tuple[Stage, ...]
    pattern: Pattern
    predicted_seconds: float
    bounds: tuple[Bound, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NoPlan:
    """No plan, and why: ``proved`` if there is none, else the limit came first.

    ``plans`` is the class that is proved to have no plan; None where only the planner's own kind of
    plans was looked at.
    """

    reason: str
    proved: bool = True
    bounds: tuple[Bound, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    plans: PlanClass | None = None


def proposal_of(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    times: Timetable,
    bounds: tuple[Bound, ...] = (),
    notes: tuple[str, ...] = (),
) -> Proposal:
    """The proposal of a timetable, as planners of whole backwards make them."""
    starts = starts_of(problem, stages, times)
    return Proposal(tuple(stages), starts, bounds, notes=notes)


def cost_of(problem: PipelineProblem, proposal: Proposal) -> float:
    """When the last action of a proposal ends."""
    split = ~np.isnan(proposal.starts[ActionKind.INPUT_GRADIENT])
    lasting = durations(problem, proposal.stages, split)
    return max(
        float(np.nanmax(proposal.starts[kind] + seconds))
        for kind, seconds in lasting.items()
        if not np.isnan(seconds).all()
    )


def with_way(stage: Stage, way: MemoryWay) -> Stage:
    """The stage that saves memory in this way and no other."""
    if way == "offload":
        return replace(stage, recompute="none", offload=True)
    return replace(stage, recompute=way, offload=False)


def named_stages(problem: PipelineProblem, choices: Sequence[StageChoice]) -> tuple[Stage, ...]:
    """Split stages with device names in place of positions."""
    devices = problem.cluster.devices
    return tuple(
        Stage((c.start, c.stop), tuple(devices[v].name for v in c.devices)) for c in choices
    )


def scheduling_of(problem: PipelineProblem, stages: Sequence[Stage]) -> MakespanProblem | None:
    """The makespan problem of plain stages, None if they are others.

    Plain stages are split, on disjoint devices, and keep what they save.
    """
    devices = [name for stage in stages for name in stage.devices]
    plain = all(
        stage.replication == "split" and stage.recompute == "none" and not stage.offload
        for stage in stages
    )
    if not plain or len({*devices}) < len(devices):
        return None
    return makespan_problem(problem, choices_of(problem, stages))


def choices_of(problem: PipelineProblem, stages: Sequence[Stage]) -> tuple[StageChoice, ...]:
    """Stages with device positions in place of names."""
    index = problem.cluster.index
    return tuple(
        StageChoice(*stage.layers, tuple(index[name] for name in stage.devices)) for stage in stages
    )


def shortage(problem: PipelineProblem, stages: Sequence[StageChoice], held: int = 1) -> str:
    """Which stage cannot hold ``held`` microbatches: on which device, and how many bytes short.

    Or else which stage has more devices than a microbatch can be split among.
    """
    for s, stage in enumerate(stages):
        most = problem.most_replicas(stage.start, stage.stop)
        if len(stage.devices) > most:
            return (
                f"stage {s} (layers {stage.start} to {stage.stop - 1}) splits microbatches of "
                f"{problem.chain.microbatch_size} samples among {len(stage.devices)} devices, "
                f"{most} are the most: plan larger microbatches"
            )
        if in_flight_limit(problem, stage.start, stage.stop, stage.devices) >= held:
            continue
        shares = len(stage.devices)
        need = static_bytes(problem, stage.start, stage.stop, shares)
        need += held * problem.saved_bytes(stage.start, stage.stop, shares)
        tightest = min(stage.devices, key=lambda v: problem.memory_bytes[v])
        memory = float(problem.memory_bytes[tightest])
        return (
            f"stage {s} (layers {stage.start} to {stage.stop - 1}) with {held} microbatches in "
            f"flight needs {format_bytes(need)}, device "
            f"{problem.cluster.devices[tightest].name!r} has {format_bytes(memory)}: "
            f"{need - memory:.0f} bytes short"
        )
    raise AssertionError("no stage is short of memory")
