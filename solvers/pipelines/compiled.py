"""Compilation of kernels that only other kernels call."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# Numba's own types know no options of compilation targets.
WITHOUT_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def inner(kernel: Kernel) -> Kernel:
    """Compile without the entry points for Python.

    For arguments of many arrays they take a third of the time of compilation.
    """
    made: Kernel = njit(cache=True, error_model="numpy", **WITHOUT_WRAPPERS)(kernel)
    return made
