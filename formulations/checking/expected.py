"""Every expected action appears once, on its devices, with its endpoints and bytes."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from stagewright.formulations.checking.order import Violation
from stagewright.formulations.checking.times import (
    Lane,
    PlanTimes,
    action_text,
    devices_by_lanes,
    host_times,
)
from stagewright.formulations.plans import timing
from stagewright.formulations.plans.actions import (
    BARE,
    COMPUTE,
    ON_DEVICE,
    PLANNED,
    REDUCE,
    SEND_B,
    SEND_F,
    UPDATE,
    Action,
    ActionKind,
    B,
    W,
    parse_action,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, ScheduledAction, Stage
from stagewright.formulations.plans.shards import of_shard, stays
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.errors import InputError

Row = tuple[ActionKind, Lane]


def overlaps(times: PlanTimes) -> Iterator[Violation]:
    """One computation at a time on a stream, one transfer in either direction on a channel."""
    for lanes, names in devices_by_lanes(times.stages).items():
        rows: list[Row] = [(kind, lane) for lane in lanes for kind in COMPUTE]
        rows += [(UPDATE, (s, 0, 1)) for s, _, _ in lanes]
        yield from _overlap(times, f"device {names[0]}", rows)
        if times.in_sub.any():
            rows = [(W, lane) for lane in lanes]
            yield from _overlap(times, f"sub-stream of device {names[0]}", rows, sub=True)
    yield from _host_overlaps(times)
    if times.schedule is not None:
        yield from _link_overlaps(times)
        return
    yield from _reduction_overlaps(times)
    for s in range(len(times.stages) - 1):
        for first, cycle in timing.channels(times.stages, s, times.problem.microbatches):
            ends = (times.stages[s + side].runners(first)[0] for side in (0, 1))
            name = f"channel {s}-{s + 1} of {' and '.join(ends)}"
            rows = [(SEND_F, (s, first, cycle)), (SEND_B, (s + 1, first, cycle))]
            yield from _overlap(times, name, rows)


def _reduction_overlaps(times: PlanTimes) -> Iterator[Violation]:
    """A device takes part in one all-reduce at a time."""
    for lanes, names in devices_by_lanes(times.stages).items():
        rows = [(REDUCE, (s, 0, 1)) for s, _, _ in lanes]
        yield from _overlap(times, f"all-reduces on device {names[0]}", rows)


def _host_overlaps(times: PlanTimes) -> Iterator[Violation]:
    """A device offloads one microbatch's activations at a time, and reads back one at a time."""
    for lanes, names in devices_by_lanes(times.stages).items():
        for end, place in ((0, "to"), (1, "from")):
            parts = [
                host_times(times, lane)[end] for lane in lanes if times.stages[lane[0]].offload
            ]
            if not parts:
                continue
            starts, ends = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
            order = np.argsort(starts)
            starts, ends = starts[order], np.maximum.accumulate(ends[order])
            for i in np.flatnonzero(starts[1:] < ends[:-1] - times.tolerance):
                yield Violation(
                    "overlap",
                    f"link {place} the host of device {names[0]}",
                    f"activations follow at {starts[i + 1]:.9g} s, it is busy until "
                    f"{ends[i]:.9g} s",
                )


def _link_overlaps(times: PlanTimes) -> Iterator[Violation]:
    """In a periodic plan all transfers between two groups of devices share one link."""
    links: defaultdict[tuple[tuple[str, ...], ...], list[Row]] = defaultdict(list)
    for s, (one, other) in enumerate(pairwise(times.stages)):
        if not stays(one, other, 0):
            ends = tuple(sorted((one.devices, other.devices)))
            links[ends] += [(SEND_F, (s, 0, 1)), (SEND_B, (s + 1, 0, 1))]
    for ends, rows in links.items():
        yield from _overlap(times, f"link of {' and '.join(names[0] for names in ends)}", rows)


def _overlap(
    times: PlanTimes, name: str, rows: Sequence[Row], sub: bool = False
) -> Iterator[Violation]:
    """Overlaps among ``rows`` of actions on one resource; ``sub`` selects the stream."""
    parts = [
        [values[s, m::step] for values in times.on_stream(kind, sub)] for kind, (s, m, step) in rows
    ]
    starts, ends = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    # A zero-length action may start or end together with another one, in any order.
    lasting = np.flatnonzero(ends > starts)  # not NaN
    order = lasting[np.lexsort((ends[lasting], starts[lasting]))]
    begins, busy_until = starts[order], np.maximum.accumulate(ends[order])
    late = np.flatnonzero(begins[1:] < busy_until[:-1] - times.tolerance)
    found = [(order[i + 1], busy_until[i]) for i in late]
    instants = np.flatnonzero(ends == starts)
    before = np.searchsorted(begins, starts[instants] - times.tolerance) - 1
    found += [
        (i, busy_until[k])
        for i, k in zip(instants, before, strict=True)
        if k >= 0 and starts[i] < busy_until[k] - times.tolerance
    ]
    texts = _texts(rows, times.problem.microbatches) if found else []
    for i, until in found:
        yield Violation(
            "overlap",
            name,
            f"{texts[i]} starts at {starts[i]:.9g} s, it is busy until {until:.9g} s",
        )


def _texts(rows: Sequence[Row], microbatches: int) -> list[str]:
    """The actions of ``rows``, one row after the other."""
    return [
        action_text(kind, s, m)
        for kind, (s, first, step) in rows
        for m in range(first, 1 if kind in BARE else microbatches, step)
    ]


def broken_actions(
    problem: PipelineProblem, plan: PipelinePlan, updated: Collection[int]
) -> Iterator[Violation]:
    """Every expected action appears exactly once, in its place, and no other action appears."""
    present: defaultdict[str, dict[str, ScheduledAction]] = defaultdict(dict)
    for i, entry in enumerate(plan.actions):
        place = f"schedule.actions[{i}]"
        if not 0 <= entry.start_seconds <= entry.finish_seconds < math.inf:
            yield Violation(
                "times",
                place,
                f"{entry.action} starts at {entry.start_seconds} and finishes at "
                f"{entry.finish_seconds}; both are finite and 0 <= start <= finish",
            )
        if entry.device in present[entry.action]:
            yield Violation("twice", place, f"{entry.action} on {entry.device} appears twice")
        present[entry.action][entry.device] = entry
    split = timing.split_backwards(plan)
    yield from _unknown_parts(problem, plan.stages, split)
    for action in timing.expected_actions(
        plan.stages, plan.microbatches, split, updated, plan.weight_rule
    ):
        yield from _broken_entries(problem, plan.stages, action, present.pop(str(action), {}))
    for text, entries in present.items():
        message = _why_unexpected(text, len(plan.stages), plan.microbatches)
        yield Violation("unexpected", f"{text} on {', '.join(entries)}", message)


def _unknown_parts(
    problem: PipelineProblem, stages: Sequence[Stage], split: timing.Split
) -> Iterator[Violation]:
    """Where a backward is split into I and W, the profile has the time of each."""
    for s in np.flatnonzero(split.any(axis=1)).tolist():
        if stages[s].offload:
            yield Violation("offload", f"stage {s}", "offloading needs whole backwards (B)")
        name = of_shard(problem, stages[s]).layer_with_whole_backward(*stages[s].layers)
        if name is not None:
            yield Violation(
                "parts",
                f"stage {s}",
                f"layer {name!r} has only the time of a whole backward: plan B for I and W, or "
                "give its input_gradient_seconds and weight_gradient_seconds",
            )


def _why_unexpected(text: str, stages: int, microbatches: int) -> str:
    try:
        action = parse_action(text)
    except InputError as error:
        return str(error)
    if action.kind not in PLANNED:
        return f"{action.kind} belongs to programs, not to plans"
    if action.stage >= stages:
        return f"there are only stages 0 to {stages - 1}"
    if action.microbatch is not None and action.microbatch >= microbatches:
        return f"there are only microbatches 0 to {microbatches - 1}"
    return _why_idle(action, stages)


def _why_idle(action: Action, stages: int) -> str:
    """Why an existing stage and microbatch has no such action."""
    if action.kind is REDUCE:
        return "a stage without replicas has nothing to reduce, others may do it in the backward"
    if action.kind is UPDATE:
        return "the optimizer step takes no time here, or is part of the backward"
    if action.kind is B:
        return "the backward is split into I and W"
    if action.stage == (stages - 1 if action.kind is SEND_F else 0):
        return "there is no stage to send to"
    return "the same devices run this microbatch in both stages"


def _broken_entries(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    action: Action,
    entries: Mapping[str, ScheduledAction],
) -> Iterator[Violation]:
    """Check the devices, endpoints and bytes of one expected action."""
    sources, targets = _endpoints(stages, action)
    compute = action.kind in ON_DEVICE
    devices = set(sources if compute else sources[:1])
    if entries.keys() != devices:
        for name in sorted(devices - entries.keys()):
            yield Violation("missing", str(action), f"is not on {name}")
        for name in sorted(entries.keys() - devices):
            yield Violation("unexpected", str(action), f"is on {name}, where it does not run")
    if compute:
        yield from _broken_computation(action, entries)
        return
    volume = _bytes(problem, stages, action)
    for entry in entries.values():
        if entry.sources != sources or entry.targets != targets:
            yield Violation(
                "endpoints",
                str(action),
                f"goes from {_names(entry.sources)} to {_names(entry.targets)}, "
                f"expected from {_names(sources)} to {_names(targets)}",
            )
        if entry.bytes is None or not math.isclose(entry.bytes, volume, rel_tol=RELATIVE_TOLERANCE):
            yield Violation("bytes", str(action), f"carries {entry.bytes} bytes, expected {volume}")


def _broken_computation(
    action: Action, entries: Mapping[str, ScheduledAction]
) -> Iterator[Violation]:
    """A computation has no endpoints, and the devices that split it run it at the same time."""
    if len({(entry.start_seconds, entry.finish_seconds) for entry in entries.values()}) > 1:
        yield Violation("replicas", str(action), "its devices run it at different times")
    if len({entry.stream for entry in entries.values()}) > 1:
        yield Violation("replicas", str(action), "its devices run it in different streams")
    for name, entry in entries.items():
        if (entry.sources, entry.targets, entry.bytes) != (None, None, None):
            yield Violation("endpoints", f"{action} on {name}", "a computation has none")


def _endpoints(stages: Sequence[Stage], action: Action) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The devices that ``action`` runs on or sends from, and the devices it sends to."""
    stage = stages[action.stage]
    if action.microbatch is None:
        return stage.devices, stage.devices
    receiver = action.stage + {SEND_F: 1, SEND_B: -1}.get(action.kind, 0)
    return stage.runners(action.microbatch), stages[receiver].runners(action.microbatch)


def _bytes(problem: PipelineProblem, stages: Sequence[Stage], action: Action) -> float:
    """Bytes that a transfer or an all-reduce carries."""
    stage = stages[action.stage]
    if action.kind is REDUCE:
        return timing.reduce_bytes(problem, stage)
    way = 1 if action.kind is SEND_F else -1
    return timing.transfer_bytes(problem, stage, stages[action.stage + way])


def _names(devices: Sequence[str] | None) -> str:
    return "nowhere" if devices is None else "(" + ", ".join(devices) + ")"
