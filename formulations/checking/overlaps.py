"""Devices, channels and links do one thing at a time."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from stagewright.formulations.checking.times import (
    Lane,
    PlanTimes,
    action_text,
    devices_by_lanes,
    host_times,
)
from stagewright.formulations.checking.violations import Violation
from stagewright.formulations.plans.actions import (
    BARE,
    COMPUTE,
    REDUCE,
    SEND_B,
    SEND_F,
    UPDATE,
    ActionKind,
    W,
)
from stagewright.formulations.plans.tensor import stays
from stagewright.formulations.plans.timing import channels

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
        for first, cycle in channels(times.stages, s, times.problem.microbatches):
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
