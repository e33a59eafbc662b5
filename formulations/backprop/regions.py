"""Regions of the main stream and the co-run of weight gradients in them (Algorithm 1)."""

from dataclasses import dataclass

import numpy as np

from stagewright.formulations.backprop.overlap import Streams
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """N regions of the main stream and the weight gradients of L layers.

    Attributes
    ----------
    main
        T_main: seconds of the main kernels of each region, shape (N,).
    sub
        T_sub: seconds of each weight gradient in each region, next to its kernels, shape (L, N).
    speedup
        Of running a weight gradient next to a region's kernels, over both in turn, shape (L, N).
    ready, offset
        The region, and the seconds from its start, from which each weight gradient may run.
    last
        The last region in which each may run without delaying its layer's forward.
    """

    main: Floats
    sub: Floats
    speedup: Floats
    ready: Ints
    offset: Floats
    last: Ints

    def __post_init__(self) -> None:
        shape = (len(self.ready), len(self.main))
        if self.sub.shape != shape or self.speedup.shape != shape:
            raise InputError(f"sub and speedup need shape {shape}")


def regions_of(streams: Streams, ends: tuple[int, ...]) -> Regions:
    """Regions that stop before main kernels ``ends``, priced by the model of overlap.

    The main stream is not slowed, so that the speed-up is 1 plus the weight gradient's rate.
    """
    main, count = streams.main(), streams.layers.count
    starts = (0, *ends[:-1])
    if ends[-1] != len(main) or any(a >= b for a, b in zip(starts, ends, strict=True)):
        raise InputError(f"ends must rise to {len(main)}, the number of main kernels, got {ends}")
    region: Ints = np.repeat(np.arange(len(ends)), np.diff((0, *ends)))
    seconds = np.array([one[2] for one in main])
    share = np.array([one[3] for one in main])
    length = np.bincount(region, seconds + streams.gap).astype(float)
    rate = np.empty((count, len(ends)))
    for k, needed in enumerate(streams.sub_share):
        next_to = seconds * np.minimum(1.0, (1 - share) / needed) + streams.gap
        rate[k] = np.bincount(region, next_to) / length
    begin = np.concatenate(([0.0], np.cumsum(length)))[:-1]
    finish = np.cumsum(seconds + streams.gap)
    position = {(one[0], one[1]): p for p, one in enumerate(main)}
    ready, offset, last = np.zeros(count, np.int64), np.zeros(count), np.zeros(count, np.int64)
    limit = len(ends)  # the region of the next forward that takes time
    for i in range(count, 0, -1):
        p = position.get(("dO", i + 1))
        if p is not None:
            ready[i - 1] = region[min(p + 1, len(main) - 1)]
            offset[i - 1] = finish[p] - begin[ready[i - 1]]
        if ("F", i) in position:
            limit = int(region[position["F", i]])
        last[i - 1] = max(ready[i - 1], limit - 1)
    weight = np.array(streams.layers.weight_gradient)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        sub = np.where(weight > 0, weight / rate, 0.0)
    return Regions(length, sub, 1 + rate, ready, offset, last)
