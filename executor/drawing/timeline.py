"""A plan's schedule as rows of blocks in time, for all drawings and traces.

For a periodic plan this is a run with its warm-up, some whole periods, and its drain.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from stagewright.executor.drawing.periods import drawn
from stagewright.formulations.plans.actions import ON_DEVICE, Action, ActionKind, parse_action
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import EVERY_PLAN
from stagewright.formulations.plans.shards import mates
from stagewright.graphs.documents.units import counted, format_bytes, format_seconds

Numbers = Literal["microbatches", "stages", "stage.microbatch"]
"""What the number on a computation is."""

MAX_DEVICE_ROWS = 64  # with more devices rows would be lower than a line of text
MOST_NAMES = 4  # numbers in the name of a row; more at equal distances are shortened


@dataclass(frozen=True, slots=True)
class Block:
    """An action in time; ``ends`` are a transfer's endpoints as text.

    ``numbers`` says what the number on a computation is.
    """

    action: Action
    start_seconds: float
    finish_seconds: float
    bytes: float | None = None
    ends: str = ""
    in_sub: bool = False
    numbers: Numbers = "microbatches"

    @property
    def label(self) -> str:
        """The number on a computation, the stage of an all-reduce; empty for an optimizer step."""
        if self.action.microbatch is None:
            return str(self.action.stage) if self.action.kind is ActionKind.REDUCE else ""
        stage, microbatch = str(self.action.stage), str(self.action.microbatch)
        both = f"{stage}.{microbatch}"
        return {"microbatches": microbatch, "stages": stage, "stage.microbatch": both}[self.numbers]

    @property
    def detail(self) -> str:
        """Volume and endpoints as text; empty for a computation."""
        volume = "" if self.bytes is None else format_bytes(self.bytes)
        return ", ".join(part for part in (volume, self.ends) if part)


@dataclass(frozen=True, slots=True)
class Row:
    """The blocks of a device or its stream, a channel or all-reduces; ``group`` says which.

    ``devices`` are those whose row it is, ``about`` its name without them.
    """

    name: str
    group: str
    blocks: tuple[Block, ...]
    devices: tuple[str, ...] = ()
    about: str = ""


def timeline(plan: PipelinePlan, max_device_rows: int | None = MAX_DEVICE_ROWS) -> tuple[Row, ...]:
    """Rows of devices by their first stage, then of channels, then of all-reduces.

    A device that uses its sub-stream has a row for each stream. In a periodic plan all transfers
    between two groups of devices share a channel, in a finite one all-reduces of the same devices,
    which follow each other, share a row. With more than ``max_device_rows`` devices (None: never) a
    row is a stage, drawn from its first device. Raises InputError if the schedule's actions do not
    belong to the plan's stages and devices.
    """
    names = _device_rows(plan, merges_stages(plan, max_device_rows))
    devices: dict[str, list[Block]] = {device: [] for device in names}
    links: dict[tuple[str, tuple[int, ...]], list[Block]] = defaultdict(list)
    shared = {"channel": _shared_channels(plan), "reduce": _shared_reductions(plan)}
    for device, block in blocks_of(plan, devices):
        if block.action.kind in ON_DEVICE:
            devices[device].append(block)
        else:
            group, s = _link(block.action)
            links[group, shared[group].get(s, (s,))].append(block)
    rows = [
        row
        for device, (name, about) in names.items()
        for row in _streams(device, name, about, devices[device])
    ]
    for (group, places), blocks in sorted(links.items()):
        name = f"channel {', '.join(f'{s}-{s + 1}' for s in places)}"
        if group == "reduce":
            name = f"all-reduce {_numbers(places)}"
        rows.append(Row(name, group, _sorted(blocks)))
    return tuple(rows)


def _streams(device: str, name: str, about: str, blocks: Sequence[Block]) -> Iterator[Row]:
    """The row of a device, or one for each of its streams."""
    sub = [block for block in blocks if block.in_sub]
    own = (device,)
    if not sub:
        yield Row(name, "device", _sorted(blocks), own, about)
        return
    first, rest = name.split(" · ", 1)
    main = [block for block in blocks if not block.in_sub]
    yield Row(f"{first} · main · {rest}", "device", _sorted(main), own, f"main · {about}")
    yield Row(f"{first} · sub", "device", _sorted(sub), own, "sub")


def fold(rows: Sequence[Row]) -> tuple[Row, ...]:
    """One row for all devices whose rows are the same, at the place of the first."""
    same: dict[object, list[Row]] = {}
    for i, row in enumerate(rows):
        key = (row.about, row.blocks) if row.devices else i
        same.setdefault(key, []).append(row)
    return tuple(_folded(group) for group in same.values())


def _folded(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    devices = tuple(name for row in rows for name in row.devices)
    name = f"{shorten_devices(devices)} · {rows[0].about}"
    return replace(rows[0], name=name, devices=devices)


def _shared_reductions(plan: PipelinePlan) -> dict[int, tuple[int, ...]]:
    """For each stage of a finite plan, the stages on the same devices, whose all-reduces queue."""
    if plan.is_periodic:
        return {}
    stages: dict[frozenset[str], list[int]] = defaultdict(list)
    for s, stage in enumerate(plan.stages):
        stages[frozenset(stage.devices)].append(s)
    return {s: tuple(places) for places in stages.values() for s in places}


def _shared_channels(plan: PipelinePlan) -> dict[int, tuple[int, ...]]:
    """For each boundary of a periodic plan, the boundaries on the same link; empty if finite."""
    if not plan.is_periodic:
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


def shorten_devices(names: Sequence[str]) -> str:
    """``names`` with runs as ranges: ``s0g0-7, s1g0-3``; beyond 3 runs only the count.

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
    if len(texts) <= 3:
        return ", ".join(texts)
    return f"{', '.join(texts[:2])}, ... {texts[-1]} ({len(names)} devices)"


def _continues(before: tuple[str, str], after: tuple[str, str]) -> bool:
    """Whether name ``after``, split before its last number, follows ``before``."""
    same = before[0] == after[0] and before[1] != "" != after[1]
    return same and int(after[1]) == int(before[1]) + 1


def headline(plan: PipelinePlan) -> str:
    """Model, cluster, planner, and the time of an iteration with its gap, in one line."""
    parts = [f"{plan.model} on {plan.cluster}", f"{plan.planner}"]
    stages = counted(len(plan.stages), "stage", "stages")
    parts.append(f"{stages}, {counted(plan.microbatches, 'microbatch', 'microbatches')}")
    if plan.certificate is not None:
        parts.append(f"{format_seconds(plan.certificate.cost_seconds)} per iteration")
    elif plan.predicted is not None:
        parts.append(f"{format_seconds(plan.predicted.iteration_seconds)} per iteration")
    if plan.is_backward_first:
        parts.append("from loss to loss")
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
    """A note on the rows of :func:`timeline`, if they are stages; else empty."""
    if not merges_stages(plan):
        return ""
    return f"one row per stage ({device_count(plan)} devices)"


def numbering(plan: PipelinePlan) -> Numbers:
    """The kind of numbers that label computations: stages, or stage and microbatch."""
    only_stages = plan.microbatches == 1 and len(plan.stages) > 1
    return "stages" if only_stages else "stage.microbatch"


def numbers_note(plan: PipelinePlan) -> str:
    """A caption that explains the numbers on computations."""
    numbers = numbering(plan)
    narrow = ", microbatch alone in narrow bars of a stage" if numbers == "stage.microbatch" else ""
    return f"numbers: {numbers}{narrow}"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which ``seconds`` is a number of a few digits, and its units per second."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return unit, scale
    return "us", 1e6


def _device_rows(plan: PipelinePlan, merged: bool) -> dict[str, tuple[str, str]]:
    """The devices that have a row, with the row's name and its description of the device.

    A stage's first one only if ``merged``.
    """
    stages: dict[str, list[int]] = defaultdict(list)
    for s, stage in enumerate(plan.stages):
        for device in stage.devices[:1] if merged else stage.devices:
            stages[device].append(s)
    if not merged:
        return {
            device: (f"{device} · {_row_name(plan, its, device)}", _row_name(plan, its))
            for device, its in stages.items()
        }
    rows = {}
    for device, its in stages.items():
        count = len({name for s in its for name in plan.stages[s].devices})
        name = _row_name(plan, its)
        rows[device] = f"{name} · {counted(count, 'device', 'devices')}", name
    return rows


def stages_name(stages: Sequence[int | str]) -> str:
    """The name of a row of these stages."""
    return f"stage{'s' if len(stages) > 1 else ''} {_numbers(stages)}"


def _numbers(names: Sequence[int | str]) -> str:
    """Names in a list; three and more consecutive numbers are a range, many at a distance too."""
    numbers = [name for name in names if isinstance(name, int)]
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) == len(names) > MOST_NAMES and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    runs: list[list[int | str]] = []
    for name in names:
        last = runs[-1][-1] if runs else None
        if isinstance(name, int) and isinstance(last, int) and name == last + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    texts = (f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)
    return ", ".join(texts)


def _row_name(plan: PipelinePlan, stages: Sequence[int], device: str | None = None) -> str:
    """The stages' numbers, followed by their special features: ``2 (round-robin, offload)``.

    With a ``device``, the other devices of its tensor group are named: ``2 (tensor 2 with g1)``.
    What several stages all have is said once.
    """
    features = [", ".join(stage_features(plan.stages[s], device)) for s in stages]
    if len(stages) > 1 and len(set(features)) == 1 and features[0]:
        return f"{stages_name(stages)} (all {features[0]})"
    each = zip(stages, features, strict=True)
    return stages_name([f"{s} ({its})" if its else s for s, its in each])


def stage_features(stage: Stage, device: str | None = None) -> list[str]:
    """Special features of a stage: tensor degree, round-robin, shards, recomputation, offloading.

    Plans have no separate actions for them: a backward includes its recomputation, and copies to
    host memory overlap with computations.
    """
    turns = ["round-robin"] if stage.turns > 1 else []
    again = [f"recompute {stage.recompute}"] if stage.recompute != "none" else []
    others = (
        f" with {shorten_devices(mates(stage, device, stage.tensor))}" if device is not None else ""
    )
    sharded = [f"tensor {stage.tensor}{others}"] if stage.tensor > 1 else []
    parts = [f"shards {stage.shards}"] if stage.shards != "none" else []
    return [*sharded, *turns, *parts, *again, *(["offload"] if stage.offload else [])]


def blocks_of(
    plan: PipelinePlan, devices: Collection[str] | None = None
) -> list[tuple[str, Block]]:
    """Transfers, and the computations of ``devices`` (None: all), each with its device.

    An action that belongs to no stage of the plan is refused.
    """
    blocks, numbers = [], numbering(plan)
    actions = drawn(plan).actions
    parsed = {text: parse_action(text) for text in {timed.action for timed in actions}}
    for timed in actions:
        action = parsed[timed.action]
        if devices is not None and action.kind in ON_DEVICE and timed.device not in devices:
            continue
        ends = _ends(timed.sources, timed.targets)
        times = (timed.start_seconds, timed.finish_seconds)
        in_sub = timed.stream == "sub"
        block = Block(action, *times, timed.bytes, ends, in_sub, numbers)
        blocks.append((timed.device, block))
    return blocks


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
