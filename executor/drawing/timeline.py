"""A plan's schedule as rows of blocks in time: the source of every drawing and trace.

Of a periodic plan a run is drawn, long enough for its warm-up, some whole periods, and its drain.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.plans.actions import (
    ON_DEVICE,
    PLANNED,
    Action,
    ActionKind,
    Operation,
    parse_action,
    parse_operation,
)
from stagewright.formulations.plans.periodic import iteration_seconds as iteration_of
from stagewright.formulations.plans.plan import (
    PeriodicAction,
    PeriodicSchedule,
    PipelinePlan,
    ScheduledAction,
)
from stagewright.formulations.plans.plan_class import EVERY_PLAN
from stagewright.formulations.plans.unrolling import unroll_run, warm_up_periods
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes, format_seconds

MAX_DEVICE_ROWS = 64  # with more devices the rows would be thinner than a line of text

WHOLE_PERIODS = 4  # that are drawn at least, so that one sees them repeat
MAX_DRAWN_ACTIONS = 1_000_000

ENDS_BACKWARD = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)

KIND_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "input gradient",
    ActionKind.WEIGHT_GRADIENT: "weight gradient",
    ActionKind.SEND_FORWARD: "activations sent",
    ActionKind.SEND_BACKWARD: "gradients sent",
    ActionKind.REDUCE: "all-reduce",
    ActionKind.UPDATE: "optimizer's step",
}
KIND_COLOURS = {  # after Okabe and Ito: distinct for every kind of colour vision
    ActionKind.FORWARD: "#4d8fd1",
    ActionKind.BACKWARD: "#2a9d78",
    ActionKind.INPUT_GRADIENT: "#12533f",
    ActionKind.WEIGHT_GRADIENT: "#6f4fc4",
    ActionKind.SEND_FORWARD: "#f0b94a",
    ActionKind.SEND_BACKWARD: "#d97b3f",
    ActionKind.REDUCE: "#b0609b",
    ActionKind.UPDATE: "#5c5c5c",
}
BAND_COLOUR = "#e4ebf4"  # behind the period that is named


@dataclass(frozen=True, slots=True)
class Block:
    """An action in time; ``ends`` are a transfer's endpoints, in words."""

    action: Action
    start_seconds: float
    finish_seconds: float
    bytes: float | None = None
    ends: str = ""

    @property
    def detail(self) -> str:
        """Volume and endpoints for people; empty for a computation."""
        volume = "" if self.bytes is None else format_bytes(self.bytes)
        return ", ".join(part for part in (volume, self.ends) if part)


@dataclass(frozen=True, slots=True)
class Row:
    """What one device, channel or all-reduce does; ``group`` is "device", "channel", "reduce"."""

    name: str
    group: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage in a line: times are of one microbatch, memory and in-flight are peaks.

    ``shares_with`` are the other stages on any of its devices; ``shifts`` are the periods by which
    its forward and its backward (the end of it) lag behind the microbatch's begin, None in a finite
    plan.
    """

    stage: int
    layers: tuple[int, int]
    devices: tuple[str, ...]
    forward_seconds: float
    backward_seconds: float
    in_flight: int
    peak_memory_bytes: float | None
    shares_with: tuple[int, ...] = ()
    shifts: tuple[int, int] | None = None


Span = tuple[str, float, float]
"""A name, and when it begins and ends, in seconds."""


@dataclass(frozen=True, slots=True)
class Phases:
    """The periods of the run that is drawn of a periodic plan.

    Everything is done in the periods ``first`` to ``last``; before them the pipeline fills, after
    them it drains, until ``finish_seconds``. Before each period whose number is a multiple of
    ``microbatches`` there is a pause for the updates.
    """

    period_seconds: float
    pause_seconds: float
    microbatches: int
    first: int
    last: int
    finish_seconds: float

    def _begin(self, period: int) -> float:
        return period * self.period_seconds + period // self.microbatches * self.pause_seconds

    @property
    def bounds(self) -> tuple[float, ...]:
        """Begins of the whole periods, and the end of the last, in seconds."""
        begins = (self._begin(i) for i in range(self.first, self.last + 1))
        return (*begins, self._begin(self.last) + self.period_seconds)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Warm-up, periods by their number, pauses, and drain, where they take any time."""
        between = list[Span]()
        for i in range(self.first, self.last + 1):
            begin = self._begin(i)
            if i > self.first and i % self.microbatches == 0:
                between.append(("updates", begin - self.pause_seconds, begin))
            between.append((f"period {i}", begin, begin + self.period_seconds))
        ends = [("warm-up", 0.0, self.bounds[0]), ("drain", self.bounds[-1], self.finish_seconds)]
        return tuple(span for span in (ends[0], *between, ends[1]) if span[1] < span[2])

    @property
    def headings(self) -> tuple[Span, ...]:
        """As :attr:`spans`, but of the periods one in the middle alone, by its length."""
        period = f"period {format_seconds(self.period_seconds)}"
        begin = self._begin((self.first + self.last) // 2)
        middle = (period, begin, begin + self.period_seconds)
        ends = (span for span in self.spans if span[0] in ("warm-up", "drain"))
        return (middle, *ends)


def timeline(plan: PipelinePlan, max_device_rows: int | None = MAX_DEVICE_ROWS) -> tuple[Row, ...]:
    """Rows of devices by their first stage, then of channels, then of all-reduces.

    In a periodic plan all transfers between two groups of devices share a channel. With more than
    ``max_device_rows`` devices (None: never) a stage's first device stands for the whole stage.

    Raises
    ------
    InputError
        If the schedule's actions do not belong to the plan's stages and devices.
    """
    names = _device_rows(plan, merges_stages(plan, max_device_rows))
    devices: dict[str, list[Block]] = {device: [] for device in names}
    links: dict[tuple[str, tuple[int, ...]], list[Block]] = defaultdict(list)
    shared = _shared_channels(plan)
    for device, block in _blocks(plan, devices):
        if block.action.kind in ON_DEVICE:
            devices[device].append(block)
        else:
            group, s = _link(block.action)
            links[group, shared.get(s, (s,)) if group == "channel" else (s,)].append(block)
    rows = [Row(names[device], "device", _sorted(blocks)) for device, blocks in devices.items()]
    for (group, places), blocks in sorted(links.items()):
        ends = ", ".join(f"{s}-{s + 1}" if group == "channel" else str(s) for s in places)
        name = "all-reduce" if group == "reduce" else group
        rows.append(Row(f"{name} {ends}", group, _sorted(blocks)))
    return tuple(rows)


def _shared_channels(plan: PipelinePlan) -> dict[int, tuple[int, ...]]:
    """Per boundary of a periodic plan those whose transfers share its link; none if finite."""
    if not isinstance(plan.schedule, PeriodicSchedule):
        return {}
    boundaries: dict[frozenset[tuple[str, ...]], list[int]] = defaultdict(list)
    for s, (one, other) in enumerate(pairwise(plan.stages)):
        boundaries[frozenset((one.devices, other.devices))].append(s)
    return {s: tuple(places) for places in boundaries.values() for s in places}


def merges_stages(plan: PipelinePlan, max_device_rows: int | None = MAX_DEVICE_ROWS) -> bool:
    """Whether :func:`timeline` draws a row per stage instead of one per device."""
    return max_device_rows is not None and device_count(plan) > max_device_rows


def device_count(plan: PipelinePlan) -> int:
    """Number of devices that the plan uses."""
    return len({device for stage in plan.stages for device in stage.devices})


def finish_seconds(plan: PipelinePlan) -> float:
    """When the last action that is drawn ends; 0 for an empty schedule."""
    return max((action.finish_seconds for action in drawn(plan).actions), default=0.0)


def iteration_seconds(plan: PipelinePlan) -> float:
    """What an iteration takes: until the last action ends, or its periods and the pause."""
    if isinstance(plan.schedule, PeriodicSchedule):
        return iteration_of(plan.schedule, plan.microbatches)
    return finish_seconds(plan)


def drawn(plan: PipelinePlan) -> PipelinePlan:
    """The finite plan that is drawn: ``plan``, or a run of a periodic one.

    Raises
    ------
    InputError
        If the schedule's actions do not belong to the plan's stages and devices, or lag so far
        behind that no picture holds the run.
    """
    _require_places(plan)
    if not isinstance(plan.schedule, PeriodicSchedule):
        return plan
    microbatches = _drawn_microbatches(plan.schedule)
    if microbatches * len(plan.schedule.actions) > MAX_DRAWN_ACTIONS:
        raise InputError(
            f"schedule: {len(plan.schedule.actions)} actions with index shifts of up to "
            f"{warm_up_periods(plan.schedule)} periods are too many to be drawn"
        )
    return unroll_run(plan, microbatches)


def phases(plan: PipelinePlan) -> Phases | None:
    """The periods that are drawn; None for a finite plan."""
    schedule = plan.schedule
    if not isinstance(schedule, PeriodicSchedule):
        return None
    return Phases(
        period_seconds=schedule.period_seconds,
        pause_seconds=schedule.pause_seconds,
        microbatches=plan.microbatches,
        first=warm_up_periods(schedule),
        last=_drawn_microbatches(schedule) - 1,
        finish_seconds=finish_seconds(plan),
    )


def _drawn_microbatches(schedule: PeriodicSchedule) -> int:
    """As many that the whole periods take about as much of the picture as either end."""
    fill = warm_up_periods(schedule)
    return fill + max(WHOLE_PERIODS, fill)


def summarise(plan: PipelinePlan) -> tuple[StageSummary, ...]:
    """A line per stage; times and in-flight counts are read from the schedule."""
    longest: dict[tuple[int, ActionKind], float] = defaultdict(float)
    for _, block in _blocks(plan, {stage.devices[0] for stage in plan.stages}):
        key = (block.action.stage, block.action.kind)
        longest[key] = max(longest[key], block.finish_seconds - block.start_seconds)
    peaks = plan.predicted.peak_memory_bytes if plan.predicted else {}
    flights, shifts = in_flight(plan), _shifts(plan)
    return tuple(
        StageSummary(
            s,
            stage.layers,
            stage.devices,
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
    return _stages_name(line.shares_with) if line.shares_with else "-"


def _shifts(plan: PipelinePlan) -> list[tuple[int, int]]:
    """Per stage the index shifts of its forward and of its backward's end; none if finite."""
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


def in_flight(plan: PipelinePlan) -> list[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Per stage the steps (times, counts) of microbatches in flight on its first device.

    A microbatch is in flight from the start of its forward to the end of its backward.
    """
    first = [stage.devices[0] for stage in plan.stages]
    changes: list[list[tuple[float, int]]] = [[] for _ in first]
    for device, block in _blocks(plan, set(first)):
        s = block.action.stage
        if device == first[s] and block.action.kind is ActionKind.FORWARD:
            changes[s].append((block.start_seconds, 1))
        elif device == first[s] and block.action.kind in ENDS_BACKWARD:
            changes[s].append((block.finish_seconds, -1))
    curves = []
    for steps in changes:
        net: dict[float, int] = defaultdict(int, {0.0: 0})
        for time, change in steps:
            net[time] += change
        times = sorted(net)
        curves.append((np.array(times), np.cumsum([net[time] for time in times])))
    return curves


def shorten_devices(names: Sequence[str], limit: int = 3) -> str:
    """``names`` with runs as ranges: ``s0g0-7, s1g0-3``; beyond ``limit`` runs only the count.

    Examples
    --------
    >>> shorten_devices(["s0g0", "s0g1", "s0g2", "s1g0"])
    's0g0-2, s1g0'
    """
    runs: list[list[tuple[str, str]]] = []
    for name in names:
        digits = re.search(r"\d*$", name)[0]  # type: ignore[index]  # matches at least ""
        part = (name.removesuffix(digits), digits)
        if runs and _continues(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    texts = ["".join(run[0]) + (f"-{run[-1][1]}" if len(run) > 1 else "") for run in runs]
    if len(texts) <= limit:
        return ", ".join(texts)
    return f"{', '.join(texts[: limit - 1])}, ... {texts[-1]} ({len(names)} devices)"


def _continues(before: tuple[str, str], after: tuple[str, str]) -> bool:
    """Whether name ``after``, split before its last number, is the next after ``before``."""
    same = before[0] == after[0] and before[1] != "" != after[1]
    return same and int(after[1]) == int(before[1]) + 1


def headline(plan: PipelinePlan) -> str:
    """Model, cluster, planner and the proved figures in one line."""
    parts = [f"{plan.model} on {plan.cluster}", f"{plan.planner}"]
    parts.append(f"{len(plan.stages)} stages, {plan.microbatches} microbatches")
    if plan.certificate is not None:
        parts.append(f"{format_seconds(plan.certificate.cost_seconds)} per iteration")
    if isinstance(plan.schedule, PeriodicSchedule):
        parts.append(f"period {format_seconds(plan.schedule.period_seconds)}")
        if plan.schedule.pause_seconds > 0:
            parts.append(f"pause {format_seconds(plan.schedule.pause_seconds)}")
    if plan.certificate is not None:
        certificate = plan.certificate
        of = "" if certificate.plans == EVERY_PLAN else " in its class"
        parts.append(f"gap {certificate.gap:.2%}{of}")
    return " · ".join(parts)


def row_note(plan: PipelinePlan) -> str:
    """What a row of :func:`timeline` stands for, where it is more than one device."""
    if not merges_stages(plan):
        return ""
    return f"one row per stage ({device_count(plan)} devices)"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which ``seconds`` is a number of a few digits, and its units per second."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return unit, scale
    return "us", 1e6


def chrome_trace(plan: PipelinePlan) -> str:
    """The schedule in Chrome's trace event format, which Perfetto reads; times in microseconds.

    One process each for devices, channels and all-reduces, one thread per row; of a periodic plan
    one more for its periods.
    """
    processes = {"device": (1, "devices"), "channel": (2, "channels"), "reduce": (3, "all-reduces")}
    shown = phases(plan)
    if shown is not None:
        processes["period"] = (4, "periods")
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in processes.values()
    ]
    for tid, row in enumerate(timeline(plan, max_device_rows=None)):
        pid = processes[row.group][0]
        place = {"pid": pid, "tid": tid}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": row.name}})
        events.append(
            {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}}
        )
        events += [_trace_event(block, place) for block in row.blocks]
    if shown is not None:
        place = {"pid": processes["period"][0], "tid": 0}
        events += [_slice(name, "period", place, begin, end) for name, begin, end in shown.spans]
    other = {"model": plan.model, "cluster": plan.cluster, "planner": plan.planner}
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, separators=(",", ":")
    )


def write_trace(plan: PipelinePlan, path: str | os.PathLike[str]) -> None:
    """Write :func:`chrome_trace` to ``path`` atomically."""
    documents.write_text(path, chrome_trace(plan))


def _trace_event(block: Block, place: dict[str, int]) -> dict[str, Any]:
    action = block.action
    arguments: dict[str, Any] = {"stage": action.stage, "microbatch": action.microbatch}
    arguments |= {"bytes": block.bytes, "endpoints": block.ends or None}
    return {
        **_slice(
            str(action), KIND_NAMES[action.kind], place, block.start_seconds, block.finish_seconds
        ),
        "args": {key: value for key, value in arguments.items() if value is not None},
    }


def _slice(
    name: str, category: str, place: dict[str, int], start: float, finish: float
) -> dict[str, Any]:
    duration = (finish - start) * 1e6
    return {"ph": "X", "name": name, "cat": category, **place, "ts": start * 1e6, "dur": duration}


def _device_rows(plan: PipelinePlan, merged: bool) -> dict[str, str]:
    """The devices that have a row, with the row's name; a stage's first one only if ``merged``."""
    stages: dict[str, list[int]] = defaultdict(list)
    for s, stage in enumerate(plan.stages):
        for device in stage.devices[:1] if merged else stage.devices:
            stages[device].append(s)
    if not merged:
        return {device: f"{device} · {_stages_name(its)}" for device, its in stages.items()}
    rows = {}
    for device, its in stages.items():
        count = len({name for s in its for name in plan.stages[s].devices})
        rows[device] = f"{_stages_name(its)} · {count} device{'s' if count > 1 else ''}"
    return rows


def _stages_name(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _blocks(plan: PipelinePlan, devices: Collection[str] | None = None) -> list[tuple[str, Block]]:
    """Transfers, and the computations of ``devices`` (None: all), each with its device.

    An action that fits no stage of the plan is refused.
    """
    blocks = []
    actions = drawn(plan).actions
    parsed = {text: parse_action(text) for text in {timed.action for timed in actions}}
    for timed in actions:
        action = parsed[timed.action]
        if devices is not None and action.kind in ON_DEVICE and timed.device not in devices:
            continue
        ends = _ends(timed.sources, timed.targets)
        times = (timed.start_seconds, timed.finish_seconds)
        blocks.append((timed.device, Block(action, *times, timed.bytes, ends)))
    return blocks


def _require_places(plan: PipelinePlan) -> None:
    """Refuse entries of the schedule, finite or periodic, that are on no stage or device of it."""
    is_periodic = isinstance(plan.schedule, PeriodicSchedule)
    parse: Callable[[str], Action | Operation] = parse_operation if is_periodic else parse_action
    entries: Sequence[ScheduledAction | PeriodicAction] = plan.schedule.actions
    known: dict[str, Action | Operation] = {}
    for i, entry in enumerate(entries):
        try:
            if entry.action not in known:
                known[entry.action] = parse(entry.action)
            _require_place(plan, known[entry.action], entry.device)
        except InputError as error:
            raise InputError(f"schedule.actions[{i}]: {error}") from None


def _require_place(plan: PipelinePlan, action: Action | Operation, device: str) -> None:
    if action.kind not in PLANNED:
        raise InputError(f"{action} belongs to programs, not to plans")
    if action.stage >= len(plan.stages):
        raise InputError(
            f"{action} is of stage {action.stage}, the plan has {len(plan.stages)} stages"
        )
    if device not in plan.stages[action.stage].devices:
        raise InputError(f"{action} runs on {device!r}, which is no device of stage {action.stage}")


@lru_cache(maxsize=4096)  # every microbatch repeats the endpoints
def _ends(sources: tuple[str, ...] | None, targets: tuple[str, ...] | None) -> str:
    if not sources or not targets:
        return ""
    if sources == targets:
        return f"among {shorten_devices(sources)}"
    return f"{shorten_devices(sources)} to {shorten_devices(targets)}"


def _link(action: Action) -> tuple[str, int]:
    """The row of a transfer or all-reduce: its group and the (lower) stage."""
    if action.kind is ActionKind.REDUCE:
        return "reduce", action.stage
    return "channel", action.stage - (action.kind is ActionKind.SEND_BACKWARD)


def _sorted(blocks: Sequence[Block]) -> tuple[Block, ...]:
    return tuple(sorted(blocks, key=lambda block: (block.start_seconds, block.finish_seconds)))
