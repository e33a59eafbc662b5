"""Two plans of a model compared: the difference in time by cause, and changed stages."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from stagewright.executor.simulation.explanation import PlanExplanation, explain_plan
from stagewright.executor.simulation.idle import IdleCause
from stagewright.formulations.plans.actions import COMPUTE, ActionKind, parse_operation
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, Stage
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_seconds

_PARTS = {
    ActionKind.FORWARD: "forwards",
    ActionKind.BACKWARD: "backwards",
    ActionKind.INPUT_GRADIENT: "backwards",
    ActionKind.WEIGHT_GRADIENT: "backwards",
    ActionKind.SEND_FORWARD: "transfers",
    ActionKind.SEND_BACKWARD: "transfers",
    ActionKind.REDUCE: "all-reduces",
    ActionKind.UPDATE: "optimizer steps",
}
WAITS, IDLE, PAUSES = "waits of the plan", "idle within every period", "pauses for updates"
ORDER = (*dict.fromkeys(_PARTS.values()), WAITS, IDLE, PAUSES)


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of an iteration in both plans that are due to one cause."""

    cause: str
    first_seconds: float
    second_seconds: float

    @property
    def difference(self) -> float:
        """Seconds by which the second plan's part is longer."""
        return self.second_seconds - self.first_seconds


@dataclass(frozen=True, slots=True, repr=False)
class PlanDifference:
    """How the second of two plans differs from the first.

    ``parts`` add up to ``iteration``: of a finite plan they are the actions and waits on its
    critical path, of a periodic one the load and the idle time of its busiest device. ``changes``
    says in words what is different in the stages. It prints as lines.
    """

    iteration: Part
    parts: tuple[Part, ...]
    peak_memory_bytes: tuple[float | None, float | None]
    changes: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join((*map(_line, (self.iteration, *self.parts)), *self.changes))


def _line(part: Part) -> str:
    first, second, more = map(
        format_seconds, (part.first_seconds, part.second_seconds, abs(part.difference))
    )
    return f"{part.cause} {first} -> {second}, {'-' if part.difference < 0 else '+'}{more}"


def differ(first: PipelinePlan, second: PipelinePlan) -> PlanDifference:
    """How ``second`` differs from ``first``.

    Raises InputError if the plans are of different models, or the schedule of a plan lacks actions.
    """
    given, other = (len_of(first), first.model), (len_of(second), second.model)
    if given != other:
        raise InputError(
            f"the first plan is of {given[1]!r} with {given[0]} layers, the second of "
            f"{other[1]!r} with {other[0]}: only plans of one model are compared"
        )
    whole, parts = zip(*(_parts(name, one) for name, one in (("first", first), ("second", second))),
                       strict=True)  # fmt: skip
    causes = [cause for cause in ORDER if parts[0][cause] or parts[1][cause]]
    return PlanDifference(
        Part("iteration", whole[0], whole[1]),
        tuple(Part(cause, parts[0][cause], parts[1][cause]) for cause in causes),
        (_peak(first), _peak(second)),
        tuple(_changes(first, second)),
    )


def len_of(plan: PipelinePlan) -> int:
    """The number of the plan's layers."""
    return plan.stages[-1].layers[1]


def _parts(which: str, plan: PipelinePlan) -> tuple[float, defaultdict[str, float]]:
    """The iteration and its parts."""
    found = explain_plan(plan)
    if found is None:
        raise InputError(f"the schedule of the {which} plan lacks actions: `check` names them")
    sums = defaultdict[str, float](float)
    if isinstance(plan.schedule, PeriodicSchedule):
        _add_loads(sums, plan, plan.schedule, found)
    for step in found.path:
        sums[WAITS] += step.wait_seconds
        sums[_PARTS[step.action.kind]] += step.seconds
    return found.iteration_seconds, sums


def _add_loads(
    sums: defaultdict[str, float],
    plan: PipelinePlan,
    schedule: PeriodicSchedule,
    found: PlanExplanation,
) -> None:
    """The load of the busiest device by kind, and its idle time."""
    device, every = found.device.devices[0], range(plan.microbatches)
    for one in schedule.actions:
        operation = parse_operation(one.action)
        if one.device == device and operation.kind in COMPUTE:
            rounds = sum(device in plan.runners(operation.stage, m) for m in every)
            sums[_PARTS[operation.kind]] += rounds * one.seconds
    idle = found.idle_seconds[device]
    sums[PAUSES] += idle.get(IdleCause.PAUSE, 0.0)
    sums[IDLE] += idle.get(IdleCause.PERIOD, 0.0)


def _peak(plan: PipelinePlan) -> float | None:
    return None if plan.predicted is None else max(plan.predicted.peak_memory_bytes.values())


def _changes(first: PipelinePlan, second: PipelinePlan) -> Iterator[str]:
    for what, a, b in (
        ("cluster", first.cluster, second.cluster),
        ("planner", first.planner, second.planner),
        ("microbatches", first.microbatches, second.microbatches),
        ("samples of a microbatch", first.microbatch_size, second.microbatch_size),
        ("schedule", first.schedule.kind, second.schedule.kind),
        ("weights", first.weights, second.weights),
        ("stages", len(first.stages), len(second.stages)),
        ("devices in use", _used(first), _used(second)),
    ):
        if a != b:
            yield f"{what}: {a} -> {b}"
    if len(first.stages) == len(second.stages):
        for s, (one, other) in enumerate(zip(first.stages, second.stages, strict=True)):
            yield from _stage_changes(s, one, other)
    else:
        yield from (f"{name}: layers end at {_cuts(one)}" for name, one in (
            ("first", first), ("second", second)))  # fmt: skip
    same = first.stages == second.stages and first.microbatches == second.microbatches
    if same and first.schedule.kind == second.schedule.kind and _order(first) != _order(second):
        yield "the order of actions"


def _used(plan: PipelinePlan) -> int:
    return len({name for stage in plan.stages for name in stage.devices})


def _cuts(plan: PipelinePlan) -> str:
    return ", ".join(str(stage.layers[1] - 1) for stage in plan.stages)


def _stage_changes(s: int, one: Stage, other: Stage) -> Iterator[str]:
    spans = [f"{stage.layers[0]}-{stage.layers[1] - 1}" for stage in (one, other)]
    fields = [("layers", *spans), ("replicas", one.replicas, other.replicas)]
    fields += [
        (name, getattr(one, name), getattr(other, name))
        for name in ("replication", "tensor", "shards", "recompute", "offload")
    ]
    told = [f"{name} {a} -> {b}" for name, a, b in fields if a != b]
    if set(one.devices) != set(other.devices):
        told.append(f"devices {', '.join(one.devices)} -> {', '.join(other.devices)}")
    if told:
        yield f"stage {s}: {'; '.join(told)}"


def _order(plan: PipelinePlan) -> dict[str, list[str]]:
    """The actions of each device, in order of time."""
    found = defaultdict[str, list[str]](list)
    if isinstance(plan.schedule, PeriodicSchedule):
        entries = [(one.start_seconds, one.device, one.action) for one in plan.schedule.actions]
    else:
        entries = [(one.start_seconds, one.device, one.action) for one in plan.actions]
    for _, device, action in sorted(entries):
        found[device].append(action)
    return dict(found)
