"""Kernels are compiled once in a run, not once by every worker of pytest-xdist.

Numba keeps a compiled kernel on disk, where other processes find it. Before they collect tests the
workers compile most kernels together, half of them from the last one on; the scheduler waits until
all workers have collected. A worker waits for a kernel that another one compiles.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock


def compile_together(worker: int, locks: Path) -> None:
    """Compile the kernels, an odd ``worker`` from the last one on; ``locks`` is a folder."""
    _lock_kernels(locks)
    for step in _steps()[:: -1 if worker % 2 else 1]:
        step()


def _steps() -> list[Callable[[], object]]:
    from benchmarks.operator_graphs import random_problem
    from stagewright.formulations.forms.answers import Limits
    from stagewright.solvers.dags import warm_up as dags
    from stagewright.solvers.operators.search import search
    from stagewright.solvers.planners.steps.warm_up import FINITE, HIERARCHY, PATTERNS

    def operators() -> None:
        for contention in ("none", "exclusive"):
            search(random_problem(8, 2, 0, contention=contention), 8, Limits(seconds=600))

    graphs = (dags.compile_partition, dags.compile_latency, dags.compile_piper)
    return [*FINITE, operators, *HIERARCHY, *graphs, *PATTERNS]


def _lock_kernels(folder: Path) -> None:
    """Let no two processes compile a kernel at the same time that numba keeps on disk."""
    from numba.core.caching import NullCache
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.dispatcher import Dispatcher

    folder.mkdir(parents=True, exist_ok=True)
    compile_alone = Dispatcher.compile

    @cache
    def lock(kernel: str) -> FileLock:
        return FileLock(folder / kernel, thread_local=False)

    def compile_once(dispatcher: Any, signature: Any) -> Any:
        if isinstance(dispatcher._cache, NullCache):
            return compile_alone(dispatcher, signature)
        kernel = f"{dispatcher.py_func.__module__}.{dispatcher.py_func.__qualname__}"
        # Numba's own lock first, as a thread that has it may ask for the lock of another kernel.
        with global_compiler_lock, lock(kernel):
            return compile_alone(dispatcher, signature)

    Dispatcher.compile = compile_once
