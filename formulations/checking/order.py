"""Rules on single actions: durations and dependencies.

Weight gradients in sub-streams: how fast they run beside the main stream of their device.

A kernel occupies a share of the device. One of the main stream runs at full speed; beside it, with
share a, one of the sub-stream with share b runs at rate min(1, (1 - a) / b), and alone at rate 1
(Oh et al., EuroSys 2022, section 4.1; ``docs/decisions/0026-two-streams.md``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.checking.times import Lane, PlanTimes, action_text, devices_by_lanes
from stagewright.formulations.plans.actions import (
    COMPUTE,
    REDUCE,
    SEND_B,
    SEND_F,
    UPDATE,
    ActionKind,
    B,
    F,
    I,
    W,
)
from stagewright.formulations.plans.timing import kernel_shares
from stagewright.graphs.documents.arrays import Floats


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: its name, the place, and the values found. Prints as one line."""

    rule: str
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.place}: {self.message}"


Shares = dict[ActionKind, float]

STOPPED = 1e-6  # rates below this count as none


def broken_sub_streams(times: PlanTimes) -> Iterator[Violation]:
    """A weight gradient in a sub-stream ends as soon as it has done its work."""
    if not times.in_sub.any():
        return
    shares = [kernel_shares(times.problem, stage) for stage in times.stages]
    for lanes in devices_by_lanes(times.stages):
        main = _main(times, lanes, shares)
        for s, first, step in lanes:
            own = np.arange(first, times.in_sub.shape[1], step)
            for m in own[times.in_sub[s, own]].tolist():
                yield from _broken(times, main, shares[s][W], s, m)


@dataclass(frozen=True, slots=True, eq=False)
class _Main:
    """The computations of a device's main stream by their starts, with the share of each.

    ``before`` are the latest ends of those up to each, so that they ascend in every plan.
    """

    starts: Floats
    ends: Floats
    share: Floats
    before: Floats

    def progress(self, share: float, begin: float, until: float) -> float:
        """Seconds of work of a kernel in the sub-stream, from ``begin`` to ``until``."""
        near = slice(
            np.searchsorted(self.before, begin, side="right"), np.searchsorted(self.starts, until)
        )
        beside = np.minimum(self.ends[near], until) - np.maximum(self.starts[near], begin)
        rate = np.minimum(1.0, (1 - self.share[near]) / share)
        return until - begin - float(np.maximum(beside, 0.0) @ (1 - rate))


def _main(times: PlanTimes, lanes: Sequence[Lane], shares: Sequence[Shares]) -> _Main:
    """The main stream of the devices with these lanes."""
    parts = []
    for kind in (*COMPUTE, UPDATE):
        starts, ends = times.on_stream(kind, sub=False)
        for s, first, step in lanes:
            own = slice(None) if kind is UPDATE else slice(first, None, step)
            share = np.full_like(starts[s, own], shares[s][kind])
            parts.append((starts[s, own], ends[s, own], share))
    starts, ends, share = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(starts)[: np.count_nonzero(~np.isnan(starts))]
    starts, ends, share = starts[order], ends[order], share[order]
    return _Main(starts, ends, share, np.maximum.accumulate(ends))


def _broken(times: PlanTimes, main: _Main, share: float, s: int, m: int) -> Iterator[Violation]:
    start, finish = float(times.starts[W][s, m]), float(times.finishes[W][s, m])
    work, tolerance = float(times.durations[W][s, m]), times.tolerance
    done = main.progress(share, start, finish)
    if abs(done - work) > tolerance:
        yield Violation(
            "duration",
            action_text(W, s, m),
            f"does {done:.9g} s of work in the sub-stream until {finish:.9g} s, the cost model "
            f"says {work:.9g} s",
        )
    elif finish - start > 2 * tolerance:
        last = main.progress(share, finish - tolerance, finish + tolerance)
        if last <= STOPPED * tolerance:
            yield Violation(
                "duration",
                action_text(W, s, m),
                f"ends at {finish:.9g} s, when it does not run in the sub-stream: it has done its "
                "work before",
            )


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
