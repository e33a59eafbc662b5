"""Reverse first-k with limited memory (Algorithm 2) and with groups of transfers."""

from collections.abc import Sequence
from itertools import accumulate

from stagewright.graphs.documents.errors import InputError


def reversed_memory(kept: float, output: Sequence[float], weight: Sequence[float]) -> list[float]:
    """f(j) for j = 0 to L: bytes if the weight gradients of layers 1 to j come last.

    ``kept`` is what the forward left (M_fwd); ``output[i - 1]`` is freed by dO_i, ``weight[i - 1]``
    is what dW_i needs in addition.
    """
    freed = [*accumulate(reversed(output), initial=0.0)][::-1]
    needed = accumulate(weight, initial=0.0)
    return [kept - free + need for free, need in zip(freed, needed, strict=True)]


def most_reversed(
    kept: float, output: Sequence[float], weight: Sequence[float], limit: float
) -> int:
    """The largest j with f(j) < ``limit``: line 1 of Algorithm 2, which prints an arg max of f.

    Raises
    ------
    InputError
        If not even f(0) is below the limit.
    """
    memory = reversed_memory(kept, output, weight)
    fitting = [j for j, value in enumerate(memory) if value < limit]
    if not fitting:
        least = min(memory)
        raise InputError(f"memory must be above {least:g} bytes for any k, got {limit:g}")
    return fitting[-1]


def require_reversed(k: int, most: int, layers: int) -> None:
    """Refuse a k outside of 0 to ``most``, naming the largest that fits."""
    if not 0 <= k <= layers:
        raise InputError(f"k must be from 0 to {layers}, the number of layers, got {k}")
    if k > most:
        raise InputError(f"k = {k} does not fit in memory; the largest k that fits is {most}")
