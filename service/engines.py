"""Where pieces of work that do not depend on each other are done: in processes here, or on Ray."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

from stagewright.executor.clusters.ray_ranks import connected, one_line
from stagewright.formulations.forms.answers import StopToken, is_stopped

POLL_SECONDS = 0.2

T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[T, StopToken | None], R]
"""What an engine does with an item, until the token is set."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Where work is done.

    ``local``: in that many ``workers``, processes of this machine (None: one per core; 1: this
    process). ``ray``: in tasks of so many ``cpus`` each on the Ray cluster at ``address`` (None:
    one that is started on this machine).
    """

    name: Literal["local", "ray"] = "local"
    workers: int | None = None
    address: str | None = None
    cpus: int = 1


HERE = Engine(workers=1)


@dataclass(frozen=True, slots=True)
class Pieces(Generic[T, R]):
    """Items, what is done with each, and what stands for the result of one that was ``lost``.

    ``lost`` is told why. Both functions are pickled.
    """

    items: Sequence[T]
    work: Work[T, R]
    lost: Callable[[T, str], R]


def results(
    pieces: Pieces[T, R], engine: Engine, stop: StopToken | None
) -> Iterator[tuple[int, R]]:
    """The numbers of items and their results, in any order.

    After ``stop`` no further item is begun, and those in flight end with their best so far (on Ray:
    are left out).

    Raises
    ------
    InputError
        If Ray is not there.
    """
    if engine.name == "ray":
        return _on_ray(pieces, engine, stop)
    workers = min(engine.workers or os.cpu_count() or 1, len(pieces.items))
    return _here(pieces, stop) if workers == 1 else _in_processes(pieces, workers, stop)


def _here(pieces: Pieces[T, R], stop: StopToken | None) -> Iterator[tuple[int, R]]:
    for number, item in enumerate(pieces.items):
        if is_stopped(stop):
            return
        yield number, pieces.work(item, stop)


_stopping: Any = None  # the event of a worker process


def _begin(stopping: Any) -> None:
    """Prepare a worker process, which leaves Ctrl-C to its parent and stops at the event."""
    global _stopping
    _stopping = stopping
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker process when its parent has ended, instead of waiting for work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _worked(work: Work[T, R], item: T) -> R | None:
    return None if _stopping.is_set() else work(item, _stopping)


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes that start within do not run the caller's script, of which they need nothing.

    Where it sweeps without ``if __name__ == "__main__"``, each of them would sweep again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _in_processes(
    pieces: Pieces[T, R], workers: int, stop: StopToken | None
) -> Iterator[tuple[int, R]]:
    # Not forked: this process may have threads, and its solvers their own.
    context = multiprocessing.get_context("spawn")
    stopping = context.Event()
    with ProcessPoolExecutor(workers, context, _begin, (stopping,)) as pool:
        with _without_main():  # a submission may start a process
            waiting: dict[Future[R | None], int] = {
                pool.submit(_worked, pieces.work, item): number
                for number, item in enumerate(pieces.items)
            }
        while waiting:
            if is_stopped(stop):
                stopping.set()
            for done in wait(waiting, POLL_SECONDS, FIRST_COMPLETED).done:
                number = waiting.pop(done)
                found = _result(done, pieces, number)
                if found is not None:
                    yield number, found


def _result(done: Future[R | None], pieces: Pieces[T, R], number: int) -> R | None:
    try:
        return done.result()
    except BrokenProcessPool:
        why = "a process ended, for example for lack of memory"
        return pieces.lost(pieces.items[number], why)


def _on_ray(
    pieces: Pieces[T, R], engine: Engine, stop: StopToken | None
) -> Iterator[tuple[int, R]]:
    with connected({}, engine.address) as ray:
        task = ray.remote(num_cpus=engine.cpus, max_retries=1)(pieces.work)
        waiting = {task.remote(item, None): number for number, item in enumerate(pieces.items)}
        while waiting:
            if is_stopped(stop):
                for one in waiting:
                    ray.cancel(one, force=True)
                return
            done, _ = ray.wait([*waiting], timeout=POLL_SECONDS)
            for one in done:
                number = waiting.pop(one)
                yield number, _result_of_task(ray, one, pieces, number)


def _result_of_task(ray: Any, task: Any, pieces: Pieces[T, R], number: int) -> R:
    try:
        found: R = ray.get(task)
    except ray.exceptions.RayError as error:
        return pieces.lost(pieces.items[number], one_line(error))
    return found
