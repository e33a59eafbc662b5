"""Rules on single actions: durations and dependencies."""

from collections.abc import Iterator

import numpy as np

from stagewright.formulations.checking.times import PlanTimes, action_text
from stagewright.formulations.checking.violations import Violation
from stagewright.formulations.plans.actions import REDUCE, SEND_B, SEND_F, UPDATE, B, F, I, W


def broken_durations(times: PlanTimes) -> Iterator[Violation]:
    """Every action takes as long as the cost model says."""
    tolerance = times.tolerance
    for kind, seconds in times.durations.items():
        lasts = times.finishes[kind] - times.starts[kind]
        for s, m in np.argwhere(np.abs(lasts - seconds) > tolerance):
            yield Violation(
                "duration",
                action_text(kind, s, m),
                f"lasts {lasts[s, m]:.9g} s, the cost model says {seconds[s, m]:.9g} s",
            )


def broken_dependencies(times: PlanTimes) -> Iterator[Violation]:
    """SPP's dependencies: each block of a microbatch after its predecessor, all-reduces last.

    A backward is B, or I and then W; without a transfer the next stage follows directly.
    """
    last = len(times.stages) - 1
    head, tail, end, every = slice(0, last), slice(1, None), slice(last, None), slice(0, None)
    handed = np.isnan(times.starts[SEND_F][head])
    sent, always = ~handed, np.ones((1, times.problem.microbatches), dtype=bool)
    for before, earlier, after, later, where in (
        (F, head, SEND_F, head, sent), (SEND_F, head, F, tail, sent), (F, head, F, tail, handed),
        *((F, end, gradient, end, always) for gradient in (B, I)),
        *((gradient, tail, SEND_B, tail, sent) for gradient in (B, I)),
        *((SEND_B, tail, gradient, head, sent) for gradient in (B, I)),
        *((one, tail, other, head, handed) for one in (B, I) for other in (B, I)),
        (I, every, W, every, always),
    ):  # fmt: skip
        starts, ends = times.starts[after][later], times.ends(before)[earlier]
        for row, m in np.argwhere((starts < ends - times.tolerance) & where):
            first = action_text(before, row + earlier.start, m)
            second = action_text(after, row + later.start, m)
            yield _too_early(second, starts[row, m], first, ends[row, m])
    for s, start in enumerate(times.starts[REDUCE][:, 0]):
        m = int(times.done[s].argmax())
        if start < times.done[s, m] - times.tolerance:
            before = B if np.isnan(times.starts[W][s, m]) else W
            yield _too_early(
                action_text(REDUCE, s, 0), start, action_text(before, s, m), times.done[s, m]
            )
    yield from _early_updates(times)


def _early_updates(times: PlanTimes) -> Iterator[Violation]:
    """The optimizer step comes after the all-reduce, or else after the last backward."""
    summed = times.ends(REDUCE)[:, 0]
    for s, start in enumerate(times.starts[UPDATE][:, 0]):
        if not np.isnan(summed[s]):
            before, end = action_text(REDUCE, s, 0), float(summed[s])
        else:
            m = int(times.done[s].argmax())
            kind = B if np.isnan(times.starts[W][s, m]) else W
            before, end = action_text(kind, s, m), float(times.done[s, m])
        if start < end - times.tolerance:
            yield _too_early(action_text(UPDATE, s, 0), start, before, end)


def _too_early(after: str, start: float, before: str, end: float) -> Violation:
    return Violation(
        "dependency", after, f"starts at {start:.9g} s, {before} ends only at {end:.9g} s"
    )
