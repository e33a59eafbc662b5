"""Compilation of kernels that only other kernels call."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

from stagewright.graphs.documents.arrays import Floats

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# Numba's own types know no options of compilation targets.
WITHOUT_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
WITHOUT_COUNTS: dict[str, Any] = {"_nrt": False}


def inner(kernel: Kernel) -> Kernel:
    """Compile without the entry points for Python.

    For arguments of many arrays they take a third of the time of compilation.
    """
    made: Kernel = njit(cache=True, error_model="numpy", **WITHOUT_WRAPPERS)(kernel)
    return made


def lean(kernel: Kernel) -> Kernel:
    """Compile as `inner` does, without counts of references to arrays.

    With arguments of many arrays they take a third of the time of compilation, and more than half
    of that of short kernels. Such a kernel must not allocate, so neither copy nor combine arrays as
    a whole, nor return one: the caller would release it.
    """
    made: Kernel = njit(cache=True, error_model="numpy", **WITHOUT_COUNTS, **WITHOUT_WRAPPERS)(
        kernel
    )
    return made


@inner
def least_index(values: Floats) -> int:
    """The first index of the least value; faster than numpy's argmin on short arrays."""
    least = 0
    for other in range(1, len(values)):
        if values[other] < values[least]:
            least = other
    return least


@lean
def copy(values: Floats, start: int, stop: int, to: Floats) -> None:
    """Copy ``values[start:stop]`` to the same places; numpy's copies may allocate."""
    for k in range(start, stop):
        to[k] = values[k]
