"""Weight gradients in sub-streams: how fast they run beside the main stream of their device.

A kernel occupies a share of the device. One of the main stream runs at full speed; beside it, with
share a, one of the sub-stream with share b runs at rate min(1, (1 - a) / b), and alone at rate 1
(Oh et al., EuroSys 2022, section 4.1; ``docs/decisions/0026-two-streams.md``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.checking.times import (
    Lane,
    PlanTimes,
    action_text,
    devices_by_lanes,
)
from stagewright.formulations.checking.violations import Violation
from stagewright.formulations.plans.actions import COMPUTE, UPDATE, ActionKind, W
from stagewright.formulations.plans.timing import kernel_shares
from stagewright.graphs.documents.arrays import Floats

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
