"""A plan as one self-contained HTML page: timeline, memory, bounds and stages; works offline."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.executor.drawing.lanes import plan_drawing, table
from stagewright.executor.drawing.periods import finish_seconds, iteration_seconds, phases
from stagewright.executor.drawing.timeline import (
    blocks_of,
    device_count,
    numbers_note,
    shorten_devices,
    stages_name,
    time_unit,
)
from stagewright.executor.drawing.topology import HEAD as TOPOLOGY_HEAD
from stagewright.executor.drawing.topology import topology, topology_rows
from stagewright.executor.drawing.web.render import Chart, Series, bound_bars, render
from stagewright.executor.simulation.explanation import (
    PlanExplanation,
    explain_plan,
    explanation_sentences,
    proof_sentences,
    resource_name,
)
from stagewright.formulations.checking.certificates import headlines
from stagewright.formulations.plans.actions import ActionKind, Operation, parse_operation
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan
from stagewright.formulations.plans.plan_class import class_of
from stagewright.graphs.documents.units import counted, format_bytes, format_seconds
from stagewright.graphs.machines.cluster import Cluster

ENDS_BACKWARD = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True)
class StageSummary:
    """A row for one stage: times are per microbatch, memory and in-flight are peaks.

    ``shares_with`` are the other stages on any of its devices; ``shifts`` are the index shifts of
    its forward and of the end of its backward, None in a finite plan.
    """

    stage: int
    layers: tuple[int, int]
    devices: tuple[str, ...]
    replicas: int
    forward_seconds: float
    backward_seconds: float
    in_flight: int
    peak_memory_bytes: float | None
    shares_with: tuple[int, ...] = ()
    shifts: tuple[int, int] | None = None


Curve = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Steps of a count over time: times in seconds, and the count from each on."""


def summarise(
    plan: PipelinePlan, flights: Sequence[Curve] | None = None
) -> tuple[StageSummary, ...]:
    """A line per stage; times and in-flight counts are read from the schedule.

    ``flights`` are those of :func:`in_flight`, where they are known.
    """
    longest: dict[tuple[int, ActionKind], float] = defaultdict(float)
    for _, block in blocks_of(plan, {stage.devices[0] for stage in plan.stages}):
        key = (block.action.stage, block.action.kind)
        longest[key] = max(longest[key], block.finish_seconds - block.start_seconds)
    peaks = plan.predicted.peak_memory_bytes if plan.predicted else {}
    flights, shifts = flights or in_flight(plan), _shifts(plan)
    return tuple(
        StageSummary(
            s,
            stage.layers,
            stage.devices,
            stage.replicas,
            longest[s, ActionKind.FORWARD],
            max(
                longest[s, ActionKind.BACKWARD],
                longest[s, ActionKind.INPUT_GRADIENT] + longest[s, ActionKind.WEIGHT_GRADIENT],
            ),
            int(flights[s][1].max(initial=0)),
            max((peaks[device] for device in stage.devices if device in peaks), default=None),
            tuple(
                t
                for t, other in enumerate(plan.stages)
                if t != s and not set(other.devices).isdisjoint(stage.devices)
            ),
            shifts[s] if shifts else None,
        )
        for s, stage in enumerate(plan.stages)
    )


def shifts_text(line: StageSummary) -> str:
    """The index shifts of a stage's forward and backward."""
    return "" if line.shifts is None else f"F {line.shifts[0]}, B {line.shifts[1]}"


def shared_text(line: StageSummary) -> str:
    """The other stages on a stage's devices."""
    return stages_name(line.shares_with) if line.shares_with else "-"


def _shifts(plan: PipelinePlan) -> list[tuple[int, int]]:
    """Per stage the index shifts of its forward and of its backward's end; empty if finite."""
    if not isinstance(plan.schedule, PeriodicSchedule):
        return []
    found = {parse_operation(one.action): one.shift for one in plan.schedule.actions}
    return [
        (
            found.get(Operation(s, ActionKind.FORWARD), 0),
            max(found.get(Operation(s, kind), 0) for kind in ENDS_BACKWARD),
        )
        for s in range(len(plan.stages))
    ]


def in_flight(plan: PipelinePlan) -> list[Curve]:
    """Per stage the steps (times, counts) of microbatches in flight on its first device.

    A microbatch is in flight from the start of its forward to the end of its backward; between two
    losses, all of the first are from the start.
    """
    first = [stage.devices[0] for stage in plan.stages]
    held = [0] * len(first)
    if plan.is_backward_first:
        every = range(plan.microbatches)
        held = [sum(name in plan.runners(s, m) for m in every) for s, name in enumerate(first)]
    changes: list[list[tuple[float, int]]] = [[] for _ in first]
    for device, block in blocks_of(plan, set(first)):
        s = block.action.stage
        if device == first[s] and block.action.kind is ActionKind.FORWARD:
            changes[s].append((block.start_seconds, 1))
        elif device == first[s] and block.action.kind in ENDS_BACKWARD:
            changes[s].append((block.finish_seconds, -1))
    curves = []
    for steps, count in zip(changes, held, strict=True):
        net: dict[float, int] = defaultdict(int, {0.0: count})
        for time, change in steps:
            net[time] += change
        times = sorted(net)
        curves.append((np.array(times), np.cumsum([net[time] for time in times])))
    return curves


TEMPLATE = "page.html.jinja"
MOST_OF = 75  # characters of a class that are shown with a number
_MOST_CURVES = 32  # of microbatches in flight
_MOST_BARS = 64  # of peak memory; the fullest devices are shown
# Work, then idle time from the most to the least.
_SHARE_COLOURS = (
    "var(--problem)",
    "#d98a2b",
    "#8a6fc0",
    "#6f7d8c",
    "#b9707f",
    "#4f9d9d",
    "#a8a04b",
)


def page(plan: PipelinePlan, cluster: Cluster | None = None) -> str:
    """The page as one self-contained HTML text."""
    return render(TEMPLATE, **_contents(plan, cluster))


def page_object(plan: PipelinePlan, cluster: Cluster | None = None) -> dict[str, Any]:
    """The contents of the page, as a JSON object.

    The scripts draw its ``timeline``, ``in_flight`` and ``topology``. Names of columns in ``head``
    that begin with ``<`` are of text.
    """
    told = _contents(plan, cluster)
    drawn = {"timeline": table(told["timeline"]), "in_flight": told["in_flight"].table()}
    return told | drawn


def _contents(plan: PipelinePlan, cluster: Cluster | None) -> dict[str, Any]:
    """The values of the template."""
    found, flights = explain_plan(plan), in_flight(plan)
    drawn = None if cluster is None else topology(plan, cluster)
    memory = list(_memory(plan))
    return dict(
        title=f"{plan.model} on {plan.cluster}",
        subtitle=_subtitle(plan),
        facts=list(_facts(plan)),
        duration=format_seconds(iteration_seconds(plan)),
        sentences=[*explanation_sentences(plan, found), *proof_sentences(plan)],
        shares=[] if found is None else list(_shares(found)),
        share_title="" if found is None else f"An iteration on {resource_name(found.device)}",
        shown=f"{_shown(plan)}, {numbers_note(plan)}",
        timeline=plan_drawing(plan, found),
        cluster=plan.cluster,
        topology=drawn,
        topology_head=TOPOLOGY_HEAD,
        topology_rows=[] if drawn is None else topology_rows(drawn),
        memory=memory[:_MOST_BARS],
        memory_note=f"the {_MOST_BARS} fullest of {len(memory)}"
        if len(memory) > _MOST_BARS
        else "",
        has_limits=any(one["limit_percent"] is not None for one in memory),
        in_flight=_in_flight(plan, flights),
        bounds=_bounds(plan),
        head=_head(plan),
        stages=[list(_stage(plan, line)) for line in summarise(plan, flights)],
        guarantees=list(_guarantees(plan)),
    )


def _subtitle(plan: PipelinePlan) -> str:
    return (
        f"planner {plan.planner} · {counted(len(plan.stages), 'stage', 'stages')} on "
        f"{counted(device_count(plan), 'device', 'devices')} · "
        f"{counted(plan.microbatches, 'microbatch', 'microbatches')}"
    )


def _shown(plan: PipelinePlan) -> str:
    """Caption of the timeline."""
    shown = phases(plan)
    if plan.is_backward_first:
        return "From one loss to the next: backwards, updates, and the next iteration's forwards"
    if shown is None:
        return "One training iteration"
    return f"{shown.last + 1} microbatches, from the first until the pipeline has drained"


def _facts(plan: PipelinePlan) -> Iterator[tuple[str, str]]:
    """The main numbers and their labels."""
    yield format_seconds(iteration_seconds(plan)), "per iteration"
    shown = phases(plan)
    if shown is not None:
        yield format_seconds(shown.period_seconds), "period, one per microbatch"
    if plan.certificate is not None:
        certificate = plan.certificate
        yield format_seconds(certificate.bound_seconds), f"bound, by {certificate.proved_by}"
        *of_plans, of_schedules = headlines(certificate)
        for one, short in (
            *((one, "its class of plans") for one in of_plans),
            (of_schedules, "schedules of these stages"),
        ):
            of = f"{one.plans}{plan.of_sizes}"
            # What it is a gap of is said in full below the numbers.
            yield f"{one.gap:.2%}", f"gap, over {of if len(of) < MOST_OF else short}"
    if plan.predicted is not None:
        yield f"{plan.predicted.bubble:.1%}", "of the devices' time idle"
        peak = max(plan.predicted.peak_memory_bytes.values(), default=0.0)
        yield format_bytes(peak), "peak memory of a device"


def _shares(found: PlanExplanation) -> Iterator[dict[str, str]]:
    """The parts of an iteration of the busiest device."""
    idle = found.idle_seconds[found.device.devices[0]]
    parts = [("works", found.device.seconds)]
    parts += sorted(((f"idle {cause}", s) for cause, s in idle.items()), key=lambda one: -one[1])
    whole = found.iteration_seconds
    for (name, seconds), fill in zip(parts, _SHARE_COLOURS, strict=False):
        percent = f"{100 * seconds / whole:.2f}"
        yield {"name": f"{seconds / whole:.1%} {name}", "percent": percent, "fill": fill}


def _memory(plan: PipelinePlan) -> Iterator[dict[str, Any]]:
    """Peak memory and its limit, one entry for all devices with the same stages and memory."""
    if plan.predicted is None:
        return
    capacity, peaks = plan.predicted.capacity_bytes, plan.predicted.peak_memory_bytes
    homes: dict[str, list[int | str]] = {}
    for s, stage in enumerate(plan.stages):
        for name in stage.devices:
            homes.setdefault(name, []).append(s)
    same: dict[tuple[tuple[int | str, ...], float, float | None], list[str]] = {}
    for name, its in homes.items():
        key = (tuple(its), peaks.get(name, 0.0), capacity.get(name))
        same.setdefault(key, []).append(name)
    rows = list(same.items())
    if len(rows) > _MOST_BARS:
        rows.sort(key=lambda row: -row[0][1])
    most = 1.02 * max((max(peak, limit or 0.0) for (_, peak, limit), _ in rows), default=1.0)
    for (stages, peak, limit), names in rows:
        of = "" if limit is None else f" of {format_bytes(limit)}"
        yield {
            "name": f"{shorten_devices(names)} · {stages_name(stages)}",
            "percent": f"{100 * peak / (most or 1.0):.2f}",
            "limit_percent": None if limit is None else f"{100 * limit / most:.2f}",
            "text": f"{format_bytes(peak)}{of}",
        }


def _in_flight(plan: PipelinePlan, flights: Sequence[Curve]) -> Chart:
    """Microbatches in flight over time, per stage; of many stages some at equal distances."""
    unit, scale = time_unit(finish_seconds(plan))
    every = -(-len(plan.stages) // _MOST_CURVES)
    return Chart(
        f"time in {unit}",
        "microbatches",
        tuple(
            Series(f"stage {s}", (times * scale).tolist(), counts.tolist())
            for s, (times, counts) in list(enumerate(flights))[::every]
        ),
    )


def _bounds(plan: PipelinePlan) -> list[dict[str, Any]]:
    """The cost and every computed lower bound; ``percent`` is relative to the cost.

    Last are bounds for plans that this one is not among, which may be above its cost.
    """
    if plan.certificate is None:
        return []
    cost = plan.certificate.cost_seconds
    largest = {
        (bound.proved_by, bound.scope, bound.plans): bound.seconds
        for bound in sorted(plan.certificate.bounds, key=lambda bound: bound.seconds)
    }
    own = class_of(plan)
    rows, others = [("this plan", "", "cost", cost)], []
    for (who, scope, plans), seconds in reversed(largest.items()):
        of = (str(plans) if scope == "problem" else plans.schedule_phrase()) + plan.of_sizes
        if plans.contains(own):
            rows.append((who, of, scope, seconds))
        else:
            others.append((who, of, "outside", seconds))
    return bound_bars(rows + others, cost)


def _head(plan: PipelinePlan) -> tuple[str, ...]:
    """Columns of the table of stages; titles of text columns begin with ``<``."""
    named = () if plan.layers is None else ("<first to last layer",)
    more = ("index shifts", "shares with") if plan.is_periodic else ()
    return ("stage", "layers", *named, "<devices", "replicas", "forward", "backward",
            "in flight", "peak memory", *more)  # fmt: skip


def _stage(plan: PipelinePlan, line: StageSummary) -> Iterator[str]:
    start, stop = line.layers
    yield str(line.stage)
    yield f"{start} to {stop - 1}" if stop - start > 1 else str(start)
    if plan.layers is not None:
        names = [layer.name for layer in plan.layers[start:stop]]
        yield f"{names[0]} to {names[-1]}" if len(names) > 1 else "".join(names)
    yield shorten_devices(line.devices)
    yield str(line.replicas)
    yield format_seconds(line.forward_seconds)
    yield format_seconds(line.backward_seconds)
    yield str(line.in_flight)
    yield "" if line.peak_memory_bytes is None else format_bytes(line.peak_memory_bytes)
    if plan.is_periodic:
        yield shifts_text(line)
        yield shared_text(line)


def _guarantees(plan: PipelinePlan) -> Iterator[tuple[str, ...]]:
    for one in () if plan.certificate is None else plan.certificate.guarantees:
        holds = "yes" if one.holds else "no"
        cost, promised = format_seconds(one.cost_seconds), format_seconds(one.seconds)
        yield one.theorem, cost, promised, holds, one.premise
