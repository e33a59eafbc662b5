"""Classes of plans: the scope of a bound or of a proof that no plan exists.

A proof holds for the plans that its argument covers. A class describes them by the features that
a plan may use. Classes are ordered by inclusion, feature by feature, and every plan has a smallest
class that contains it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from stagewright.formulations.plans.actions import WeightRule, Weights
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.formulations.plans.plan import PipelinePlan, Stage

Replication = Literal["split", "round-robin"]
Recompute = Literal["none", "full", "layer"]
Shards = Literal["none", "optimizer", "gradients", "weights"]
ScheduleKind = Literal["finite", "periodic", "backward-first"]
Sharing = Literal["none", "groups", "any"]

WEIGHTS: tuple[Weights, ...] = get_args(Weights)
REPLICATION: tuple[Replication, ...] = get_args(Replication)
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
SHARDS: tuple[Shards, ...] = get_args(Shards)
SCHEDULES: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
_SHARING: tuple[Sharing, ...] = get_args(Sharing)
_SINGLE_STREAM = "one stream on every device"


@documents.record
class PlanClass:
    """The plans that use only these features.

    By default these are all that the checker accepts whose stages have tensor degree 1 and whose
    replicas keep all of their state.

    Attributes
    ----------
    sharing
        Stages on common devices: ``none``; ``groups``, any two stages have the same devices or
        none in common; or ``any``.
    replication
        Kinds of replication of the stages on several devices; empty: no such stages.
    split_backward
        Whether backwards may be divided into input gradient and weight gradient.
    recompute
        Choices of recomputation of the stages.
    offload
        Whether stages may keep activations in host memory.
    schedules, weights
        Kinds of schedules, semantics of the weight update. ``finite`` are the finite schedules that
        begin with the forwards, ``backward-first`` those that lie between two losses.
    equal_groups
        All stages have the same number of devices, one of these; None: no such limit.
    merged
        Whether neighbouring stages have different devices, so that neighbouring layers on the same
        devices are one stage.
    streams
        Streams of every device; with two, weight gradients of backward-first plans may run beside
        other computations of their device.
    tensor
        The tensor degrees that stages may have, ascending, or ``any``.
    shards
        What the replicas of a stage may divide among them.
    """

    sharing: Sharing = "any"
    replication: tuple[Replication, ...] = REPLICATION
    split_backward: bool = True
    recompute: tuple[Recompute, ...] = RECOMPUTE
    offload: bool = True
    schedules: tuple[ScheduleKind, ...] = SCHEDULES
    weights: tuple[Weights, ...] = WEIGHTS
    equal_groups: tuple[int, ...] | None = None
    merged: bool = False
    streams: Literal[1, 2] = 2
    tensor: tuple[int, ...] | Literal["any"] = (1,)
    shards: tuple[Shards, ...] = ("none",)

    def __post_init__(self) -> None:
        if "backward-first" not in self.schedules:  # the others have one stream
            object.__setattr__(self, "streams", 1)
        _require_choice("replication", self.replication, REPLICATION, empty=True)
        _require_choice("recompute", self.recompute, RECOMPUTE)
        _require_choice("schedules", self.schedules, SCHEDULES)
        _require_choice("weights", self.weights, WEIGHTS)
        _require_choice("shards", self.shards, SHARDS)
        _require_ascending("equal_groups", self.equal_groups)
        if self.tensor != "any":
            _require_ascending("tensor", self.tensor)

    def contains(self, other: "PlanClass") -> bool:
        """Whether every plan of ``other`` is a plan of this class."""
        return (
            _SHARING.index(other.sharing) <= _SHARING.index(self.sharing)
            and set(other.replication) <= set(self.replication)
            and other.split_backward <= self.split_backward
            and set(other.recompute) <= set(self.recompute)
            and other.offload <= self.offload
            and set(other.schedules) <= set(self.schedules)
            and set(other.weights) <= set(self.weights)
            and _within(other.equal_groups, self.equal_groups)
            and other.merged >= self.merged
            and other.streams <= self.streams
            and _within(_given(other.tensor), _given(self.tensor))
            and set(other.shards) <= set(self.shards)
        )

    @property
    def degree(self) -> int | None:
        """The tensor degree of all stages; None if there may be several."""
        if self.tensor == "any" or len(self.tensor) > 1:
            return None
        return self.tensor[0]

    def describe(self) -> str:
        """The restrictions of the class, apart from the kind of schedule; empty if none."""
        return ", ".join(_limits(self))

    def phrase(self, quantifier: str) -> str:
        """The class as a noun, such as "every finite plan with disjoint devices"."""
        kind = f"{self.schedules[0]} plan" if len(self.schedules) == 1 else "plan"
        limits = self.describe()
        return f"{quantifier} {kind}" + (f" with {limits}" if limits else "")

    def schedule_phrase(self) -> str:
        """The schedules of given stages that belong to the class."""
        kind = f"{self.schedules[0]} schedule" if len(self.schedules) == 1 else "schedule"
        limits = [] if self.split_backward else ["whole backwards"]
        if self.streams == 1 and "backward-first" in self.schedules:
            limits.append(_SINGLE_STREAM)
        if self.schedules == EVERY_PERIODIC.schedules and self.weights != EVERY_PERIODIC.weights:
            limits.append(f"weights {' or '.join(self.weights)}")
        return f"every {kind} of these stages" + (f" with {', '.join(limits)}" if limits else "")

    def __str__(self) -> str:
        return self.phrase("every")


def class_of(plan: "PipelinePlan") -> PlanClass:
    """The smallest class that ``plan`` belongs to."""
    parts = any("I" in one.action or "W" in one.action for one in plan.schedule.actions)
    kind: ScheduleKind = "backward-first" if plan.is_backward_first else plan.schedule.kind
    streams: Literal[1, 2] = 2 if plan.uses_two_streams else 1
    return class_of_stages(plan.stages, parts, kind, plan.weights, streams)


def class_of_stages(
    stages: "tuple[Stage, ...]",
    parts: bool,
    schedule: ScheduleKind,
    weights: Weights,
    streams: Literal[1, 2] = 1,
) -> PlanClass:
    """The smallest class of plans of ``stages``; ``parts``: whether some backwards are split."""
    sizes = {len(stage.devices) for stage in stages}
    kinds = {stage.replication for stage in stages if len(stage.devices) > 1}
    ways = {stage.recompute for stage in stages}
    return PlanClass(
        sharing=_sharing(stages),
        replication=tuple(kind for kind in REPLICATION if kind in kinds),
        split_backward=parts,
        recompute=tuple(way for way in RECOMPUTE if way in ways),
        offload=any(stage.offload for stage in stages),
        schedules=(schedule,),
        weights=(weights,),
        equal_groups=tuple(sizes) if len(sizes) == 1 else None,
        merged=all(set(a.devices) != set(b.devices) for a, b in pairwise(stages)),
        streams=streams,
        tensor=tuple(sorted({stage.tensor for stage in stages})),
        shards=tuple(kind for kind in SHARDS if kind in {stage.shards for stage in stages}),
    )


def require_replicas(shards: Shards, replication: Replication, replicas: int) -> None:
    """Refuse shards without replicas, or of layers that replicas compute at different times."""
    if shards == "none":
        return
    if replicas == 1:
        raise InputError(f"shards {shards!r} needs several replicas, the stage has one")
    if shards in ("gradients", "weights") and replication != "split":
        raise InputError(
            f"shards {shards!r} needs all replicas at a layer at once, but those of a "
            "round-robin stage compute at different times: use replication 'split'"
        )


def patterns_under(rule: WeightRule) -> PlanClass:
    """The plans that the patterns of given stages are compared with, by the rule of updates."""
    return replace(PATTERNS, weights=(rule.name,))


def _sharing(stages: "tuple[Stage, ...]") -> Sharing:
    groups = {frozenset(stage.devices) for stage in stages}
    if any(one & other for one, other in combinations(groups, 2)):
        return "any"
    return "none" if len(groups) == len(stages) else "groups"


def _given(degrees: tuple[int, ...] | Literal["any"]) -> tuple[int, ...] | None:
    return None if degrees == "any" else degrees


def _within(inner: tuple[int, ...] | None, outer: tuple[int, ...] | None) -> bool:
    return outer is None or (inner is not None and set(inner) <= set(outer))


def _require_ascending(name: str, numbers: tuple[int, ...] | None) -> None:
    if numbers is not None and (
        not numbers or numbers[0] < 1 or any(a >= b for a, b in pairwise(numbers))
    ):
        raise InputError(f"{name} must be ascending positive numbers of devices, got {numbers}")


def _require_choice(
    name: str, found: tuple[Any, ...], known: tuple[Any, ...], empty: bool = False
) -> None:
    if found != tuple(one for one in known if one in found) or not (found or empty):
        raise InputError(
            f"{name} must be a choice of {', '.join(map(repr, known))} in this order, "
            f"got {list(found)}"
        )


def _limits(plans: PlanClass) -> Iterator[str]:
    yield from _device_limits(plans)
    if plans.streams == 1 and "backward-first" in plans.schedules:
        yield _SINGLE_STREAM
    if not plans.split_backward:
        yield "whole backwards"
    yield from _memory_limits(plans)
    full = EVERY_PLAN
    if "finite" not in plans.schedules:
        full = EVERY_PERIODIC if "periodic" in plans.schedules else EVERY_BACKWARD_FIRST
    if plans.weights != full.weights:
        yield f"weights {' or '.join(plans.weights)}"
    if plans.tensor != "any":
        yield f"tensor degree {_runs(plans.tensor)}"
    if plans.shards != SHARDS:
        yield "no shards" if plans.shards == ("none",) else f"shards {' or '.join(plans.shards)}"


def _device_limits(plans: PlanClass) -> Iterator[str]:
    if plans.sharing == "none":
        yield "disjoint devices"
    elif plans.sharing == "groups":
        yield "groups of devices that do not overlap"
    if plans.equal_groups is not None:
        numbers = _runs(plans.equal_groups)
        yield f"{numbers} device{'s' if plans.equal_groups != (1,) else ''} in every stage"
    if plans.replication != REPLICATION and plans.equal_groups != (1,):
        yield f"{' '.join(plans.replication) or 'no'} replicas"
    if plans.merged:
        yield "neighbouring layers on the same devices in one stage"


def _runs(numbers: Sequence[int]) -> str:
    """The numbers with the ends of each run of neighbours: ``1 or 2 or 4 to 9``."""
    runs: list[list[int]] = []
    for one in numbers:
        if runs and one == runs[-1][-1] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    parts = (
        f"{run[0]} to {run[-1]}" if len(run) > 2 else " or ".join(map(str, run)) for run in runs
    )
    return " or ".join(parts)


def _memory_limits(plans: PlanClass) -> Iterator[str]:
    if plans.recompute == ("none",):
        yield "no recomputation" if plans.offload else "no recomputation or offloading"
        return
    if plans.recompute != RECOMPUTE:
        yield f"recomputation {' or '.join(plans.recompute)}"
    if not plans.offload:
        yield "no offloading"


EVERY_PLAN = PlanClass()
ONE_STREAM = PlanClass(streams=1)
"""The plans in which a device computes one thing at a time."""
EVERY_FINITE = PlanClass(schedules=("finite",))
WHOLE_FINITE = replace(EVERY_FINITE, split_backward=False)
DISJOINT_WHOLE = replace(WHOLE_FINITE, sharing="none")
EVERY_PERIODIC = PlanClass(
    replication=("split",), schedules=("periodic",), weights=("double-buffer",)
)
EVERY_BACKWARD_FIRST = PlanClass(offload=False, schedules=("backward-first",), weights=("flush",))


def every_of_degree(degree: int) -> PlanClass:
    """Every plan, of tensor degree 1; of others those of which bounds are known."""
    if degree == 1:
        return EVERY_PLAN
    return replace(EVERY_FINITE, sharing="groups", replication=("split",), tensor=(degree,))


DISJOINT_SPLIT = PlanClass(
    sharing="none",
    replication=("split",),
    split_backward=False,
    recompute=("none",),
    offload=False,
    schedules=("finite",),
)
"""The plans that the joint search covers, and SPP, PipeDream and other planners of split stages.

Their schedules update the weights once, at the end. A plan of this class with another weight rule
is no faster: see docs/certificates.md.
"""
SHARED_SPLIT = replace(EVERY_FINITE, sharing="groups", replication=("split",))
"""Finite plans of split stages, of which some may have the same devices."""
SHARED_WHOLE = replace(SHARED_SPLIT, split_backward=False)
WHOLE_PERIODIC = replace(EVERY_PERIODIC, split_backward=False, recompute=("none",), offload=False)
"""Periodic plans with whole backwards, without recomputation or offloading."""
SEARCHED_ALLOCATIONS = replace(
    WHOLE_PERIODIC, sharing="groups", recompute=("none", "full"), merged=True
)
"""The plans that the search over all allocations to groups of devices covers."""
PATTERNS = replace(EVERY_PERIODIC, sharing="groups", split_backward=False, offload=False)
"""The plans that the patterns of given stages are compared with."""
EVERY_PATTERN = replace(PATTERNS, weights=WEIGHTS[1:])
"""The same with any weights that allow iterations to overlap."""
OFFLOADING_PATTERNS = replace(EVERY_PATTERN, offload=True)
"""The same, also with stages that offload: loads bound these too, needs of memory do not."""
