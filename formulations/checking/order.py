"""Rules on single actions: durations and dependencies."""

from collections.abc import Iterator

import numpy as np

from stagewright.formulations.checking.times import PlanTimes, action_text
from stagewright.formulations.checking.violations import Violation
from stagewright.formulations.plans.actions import REDUCE, SEND_B, SEND_F, UPDATE, B, F, I, W


def broken_durations(times: PlanTimes) -> Iterator[Violation]:
    """Every action of a main stream takes as long as the cost model says."""
    tolerance = times.tolerance
    for kind, seconds in times.durations.items():
        lasts = times.finishes[kind] - times.starts[kind]
        wrong = np.abs(lasts - seconds) > tolerance
        for s, m in np.argwhere(wrong & ~times.in_sub if kind is W else wrong):
            yield Violation(
                "duration",
                action_text(kind, s, m),
                f"lasts {lasts[s, m]:.9g} s, the cost model says {seconds[s, m]:.9g} s",
            )


def broken_dependencies(times: PlanTimes) -> Iterator[Violation]:
    """SPP's dependencies: each block of a microbatch after its predecessor, all-reduces last.

    A backward is B, or I and then W; without a transfer the next stage follows directly. Between
    two losses the gradients of the first loss are there from the start, and the forwards of a
    stage follow its gradients, all-reduce and update.
    """
    last = len(times.stages) - 1
    head, tail, end, every = slice(0, last), slice(1, None), slice(last, None), slice(0, None)
    handed = np.isnan(times.starts[SEND_F][head])
    sent, always = ~handed, np.ones((1, times.problem.microbatches), dtype=bool)
    turned = always & (not times.backward_first)  # where a microbatch's forward precedes its loss
    for before, earlier, after, later, where in (
        (F, head, SEND_F, head, sent), (SEND_F, head, F, tail, sent), (F, head, F, tail, handed),
        *((F, end, gradient, end, turned) for gradient in (B, I)),
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
    yield from _early_reductions(times)
    yield from _early_updates(times)
    if times.backward_first:
        yield from _early_forwards(times)


def _early_reductions(times: PlanTimes) -> Iterator[Violation]:
    """The all-reduce comes after the last backward."""
    for s, start in enumerate(times.starts[REDUCE][:, 0]):
        before, end = _last_backward(times, s)
        if start < end - times.tolerance:
            yield _too_early(action_text(REDUCE, s, 0), start, before, end)


def _early_updates(times: PlanTimes) -> Iterator[Violation]:
    """The optimizer step comes after the all-reduce, or else after the last backward."""
    for s, start in enumerate(times.starts[UPDATE][:, 0]):
        before, end = _gradients_ready(times, s)
        if start < end - times.tolerance:
            yield _too_early(action_text(UPDATE, s, 0), start, before, end)


def _early_forwards(times: PlanTimes) -> Iterator[Violation]:
    """A stage's forwards come after its update or, without one, its complete gradients."""
    updated = times.ends(UPDATE)[:, 0]
    for s, starts in enumerate(times.starts[F]):
        before, end = action_text(UPDATE, s, 0), float(updated[s])
        if np.isnan(end):
            before, end = _gradients_ready(times, s)
        for m in np.flatnonzero(starts < end - times.tolerance).tolist():
            yield _too_early(action_text(F, s, m), starts[m], before, end)


def _gradients_ready(times: PlanTimes, s: int) -> tuple[str, float]:
    """The action that completes a stage's gradients (all-reduce or last backward), and its end."""
    summed = float(times.ends(REDUCE)[s, 0])
    return _last_backward(times, s) if np.isnan(summed) else (action_text(REDUCE, s, 0), summed)


def _last_backward(times: PlanTimes, s: int) -> tuple[str, float]:
    """The backward of a stage that ends last, and when."""
    m = int(times.done[s].argmax())
    kind = B if np.isnan(times.starts[W][s, m]) else W
    return action_text(kind, s, m), float(times.done[s, m])


def _too_early(after: str, start: float, before: str, end: float) -> Violation:
    return Violation(
        "dependency", after, f"starts at {start:.9g} s, {before} ends only at {end:.9g} s"
    )
