"""A plan's timeline as lanes of a page: critical path, idle time and bottleneck marked."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from stagewright.executor.drawing.colours import DARK_COLOURS, KIND_COLOURS, KIND_NAMES
from stagewright.executor.drawing.lanes import Bar, BarKind, Drawing, Gap, Lane, Mark, TimeBand
from stagewright.executor.drawing.periods import finish_seconds, phases
from stagewright.executor.drawing.timeline import Block, Row, fold, time_unit, timeline
from stagewright.executor.simulation.explanation import PlanExplanation
from stagewright.executor.simulation.idle import IdleCause
from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.units import counted

BOUND = "proved lower bound"
CAUSES = {  # what is written on an idle interval, if there is room
    IdleCause.FILL: "fill",
    IdleCause.DRAIN: "drain",
    IdleCause.STAGES: "waits",
    IdleCause.TRANSFERS: "transfer",
    IdleCause.REDUCE: "all-reduce",
    IdleCause.MEMORY: "memory",
    IdleCause.PLAN: "late",
    IdleCause.PERIOD: "idle",
}

Timed = tuple[Action, float, float]
"""An action with its start and end, which all its devices share."""


def critical_actions(found: PlanExplanation | None) -> frozenset[Timed]:
    """The actions of the critical path."""
    steps = () if found is None else found.path
    return frozenset(
        (step.action, step.entry.start_seconds, step.entry.finish_seconds) for step in steps
    )


def timed(block: Block) -> Timed:
    """The key of a block among :func:`critical_actions`."""
    return block.action, block.start_seconds, block.finish_seconds


def is_bottleneck(row: Row, found: PlanExplanation | None) -> bool:
    """Whether it is the row of the busiest resource."""
    if found is None:
        return False
    most = found.bottleneck
    if most.kind == "device":
        return not set(most.devices).isdisjoint(row.devices) and row.about != "sub"
    group = "channel" if most.kind == "channel" else "reduce"
    places = {link_stages(block.action) for block in row.blocks}
    return row.group == group and most.stages in places


def link_stages(action: Action) -> tuple[int, ...]:
    """The stages of a transfer, or of an all-reduce."""
    if action.kind is ActionKind.REDUCE:
        return (action.stage,)
    first = action.stage - (action.kind is ActionKind.SEND_BACKWARD)
    return first, first + 1


def plan_drawing(plan: PipelinePlan, found: PlanExplanation | None) -> Drawing:
    """The timeline of a plan: identical devices in one lane."""
    end = finish_seconds(plan)
    unit, scale = time_unit(end)
    rows, critical = fold(timeline(plan, max_device_rows=None)), critical_actions(found)
    return Drawing(
        lanes=tuple(
            _lane(row, critical, idle, is_bottleneck(row, found))
            for row, idle in zip(rows, idle_of(rows, found), strict=True)
        ),
        kinds=KINDS,
        end=end,
        unit=unit,
        scale=scale,
        marks=tuple(_marks(plan)),
        bands=tuple(_bands(plan)),
        causes={str(cause): short for cause, short in CAUSES.items()},
        stages=len(plan.stages),
    )


KINDS = {
    str(kind): BarKind(KIND_NAMES[kind], KIND_COLOURS[kind], DARK_COLOURS[kind])
    for kind in KIND_COLOURS
}


def idle_of(rows: Sequence[Row], found: PlanExplanation | None) -> list[tuple[Gap, ...]]:
    """The idle intervals of every row; of a periodic plan all between two computations."""
    spans = defaultdict[str, list[Gap]](list)
    for one in () if found is None else found.idle:
        spans[one.device].append((one.start_seconds, one.finish_seconds, str(one.cause)))
    between = _between if found is not None and not found.path else lambda row: ()
    return [
        (*spans[row.devices[0]], *between(row)) if row.devices and row.about != "sub" else ()
        for row in rows
    ]


def _between(row: Row) -> tuple[Gap, ...]:
    return tuple(
        (one.finish_seconds, other.start_seconds, str(IdleCause.PERIOD))
        for one, other in pairwise(row.blocks)
        if one.finish_seconds < other.start_seconds
    )


def _lane(row: Row, critical: frozenset[Timed], idle: tuple[Gap, ...], bottleneck: bool) -> Lane:
    count = len(row.devices)
    name = f"{row.name} · {counted(count, 'device', 'devices')}" if count > 1 else row.name
    return Lane(
        name=name,
        group=row.group,
        bars=tuple(block_bar(block, timed(block) in critical) for block in row.blocks),
        idle=idle,
        members=row.devices,
        about=row.about,
        bottleneck=bottleneck,
        stages=tuple(sorted({block.action.stage for block in row.blocks})) if row.devices else (),
    )


def block_bar(block: Block, critical: bool = False) -> Bar:
    """A block as a bar of its action's kind."""
    return Bar(
        str(block.action),
        str(block.action.kind),
        block.start_seconds,
        block.finish_seconds,
        critical,
        block.label,
        block.detail,
    )


def _marks(plan: PipelinePlan) -> Iterable[Mark]:
    """The bound on an iteration, or the periods' starts."""
    shown = phases(plan)
    if shown is not None:
        yield from (Mark(at) for at in shown.bounds)
    elif plan.certificate is not None:
        yield Mark(plan.certificate.bound_seconds, BOUND)


def _bands(plan: PipelinePlan) -> Iterable[TimeBand]:
    shown = phases(plan)
    for i, (name, begin, end) in enumerate(() if shown is None else shown.headings):
        yield TimeBand(name, begin, end, shaded=i == 0)
