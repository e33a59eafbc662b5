"""A bound on the schedule of one device or channel with evenly spaced releases."""

import numpy as np

from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.compiled import lean

WINDOWS = 8  # releases and tails that are tried
MARGIN = 1e-9


@lean
def least_schedule(
    M: int, f: float, b: float, pace: float, around: float, tails: Floats, cut: float
) -> float:
    """A lower bound on the schedule of one device or channel; stops above ``cut``.

    Forward i is released at i ``pace``, backward i ``around`` later. The k-th last backward is
    followed by tails[k], the k-th last forward by that, ``around`` - f and b. For any h and q, all
    computations with release h or later and tail q or longer take place between: h + work + q is a
    bound. If there are many microbatches, only some h and q are tried.
    """
    most: float = tails[0]
    step = max(1, M // WINDOWS)
    for by_backward in range(2):
        for i in range(0, M, step):
            head = i * pace + by_backward * around
            forwards, backwards = M - _below(head, pace, M), M - _below(head - around, pace, M)
            most = max(most, _by_tails(M, f, b, around, tails, head, forwards, backwards))
            if most > cut:
                return most
    return most


@lean
def _below(seconds: float, pace: float, most: int) -> int:
    """How many of 0, pace, 2 pace, ... are less than ``seconds``, at most ``most``."""
    if seconds <= 0:
        return 0
    return most if pace <= 0 else min(most, int(np.ceil(seconds / pace - MARGIN)))


@lean
def _by_tails(
    M: int,
    f: float,
    b: float,
    around: float,
    tails: Floats,
    head: float,
    forwards: int,
    backwards: int,
) -> float:
    """The best bound of :func:`least_schedule` for one release ``head``."""
    more, most = around - f + b, 0.0
    short_f = short_b = 0  # forwards and backwards with a tail below q
    for j in range(0, M, max(1, M // WINDOWS)):
        while short_f < M and more + tails[short_f] < tails[j]:
            short_f += 1
        while short_b < M and tails[short_b] < more + tails[j]:
            short_b += 1
        most = max(most, _window(head, forwards - short_f, f, backwards - j, b, tails[j]))
        most = max(most, _window(head, forwards - j, f, backwards - short_b, b, more + tails[j]))
    return most


@lean
def _window(head: float, forwards: int, f: float, backwards: int, b: float, tail: float) -> float:
    if forwards <= 0 and backwards <= 0:
        return 0.0
    seconds: float = head + max(forwards, 0) * f + max(backwards, 0) * b + tail
    return seconds
