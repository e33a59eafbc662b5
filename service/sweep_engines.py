"""Where the plans of a sweep are made: in this process, in several, on Ray."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from stagewright.executor.clusters.ray_ranks import connected, one_line
from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.graphs.documents.errors import InputError
from stagewright.service.pipeline_answers import PlanAnswer, StageAnswer
from stagewright.service.sweep_requests import Point, SweepRequest, SweepRow

REFUSED = "refused"
FAILED = "failed"
POLL_SECONDS = 0.2

Rows = Iterator[tuple[int, SweepRow]]


def engine_of(request: SweepRequest) -> Callable[[SweepRequest, StopToken | None], Rows]:
    """The function that yields numbers and rows of a request's points, in any order."""
    if request.engine == "ray":
        return _on_ray
    return _here if _workers(request) == 1 else _in_processes


def row(point: Point, **fields: Any) -> SweepRow:
    """A row with what distinguishes the point."""
    asked = point.request
    microbatches = asked.microbatches if asked.batch is None else None
    return SweepRow(**point.place, batch=asked.batch, **{"microbatches": microbatches} | fields)


def _workers(request: SweepRequest) -> int:
    return min(request.workers or os.cpu_count() or 1, len(request.points))


def _here(request: SweepRequest, stop: StopToken | None) -> Rows:
    for number, point in enumerate(request.points):
        if is_stopped(stop):
            return
        yield number, _planned(point, stop)


def _planned(point: Point, stop: StopToken | None = None) -> SweepRow:
    from stagewright.service.planning import plan

    try:
        return _answered(point, plan(point.request, stop=stop))
    except InputError as error:
        return row(point, status=REFUSED, reason=str(error))


def _answered(point: Point, answer: PlanAnswer) -> SweepRow:
    found = answer.plan
    sizes: dict[str, int] = {}
    if found is not None:
        size = found.microbatch_size or point.request.chain.microbatch_size
        sizes = {"microbatches": found.microbatches, "microbatch_size": size}
    samples = sizes["microbatches"] * sizes["microbatch_size"] if sizes else None
    cost = answer.cost_seconds
    return row(
        point,
        **sizes,
        status=answer.status.value,
        cost_seconds=cost,
        samples=samples,
        samples_per_second=samples / cost if samples and cost else None,
        bound_seconds=answer.bound_seconds,
        gap=answer.gap,
        proved_by=answer.proved_by,
        plans=None
        if answer.result.plans is None
        else f"{answer.result.plans}{'' if found is None else found.of_sizes}",
        stages=None if answer.stages is None else len(answer.stages),
        replicas=None if answer.stages is None else _replicas(answer.stages),
        peak_memory_bytes=answer.peak_memory_bytes,
        wall_seconds=answer.wall_seconds,
        reason=answer.reason,
    )


def _replicas(stages: Sequence[StageAnswer]) -> str:
    return "-".join(str(len(stage.devices) // stage.tensor) for stage in stages)


_stopping: Any = None  # the event of a worker process


def _begin(stopping: Any) -> None:
    """Of a worker: Ctrl-C is the parent's, which then sets the event."""
    global _stopping
    _stopping = stopping
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's workers would wait for work of a parent that is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _planned_in_worker(point: Point) -> SweepRow | None:
    return None if _stopping.is_set() else _planned(point, _stopping)


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


def _in_processes(request: SweepRequest, stop: StopToken | None) -> Rows:
    # Not forked: this process may have threads, and its solvers their own.
    context = multiprocessing.get_context("spawn")
    stopping = context.Event()
    with ProcessPoolExecutor(_workers(request), context, _begin, (stopping,)) as pool:
        with _without_main():  # a submission may start a process
            waiting: dict[Future[SweepRow | None], int] = {
                pool.submit(_planned_in_worker, point): number
                for number, point in enumerate(request.points)
            }
        while waiting:
            if is_stopped(stop):
                stopping.set()
            for done in wait(waiting, POLL_SECONDS, FIRST_COMPLETED).done:
                number = waiting.pop(done)
                found = _result(done, request.points[number])
                if found is not None:
                    yield number, found


def _result(done: Future[SweepRow | None], point: Point) -> SweepRow | None:
    try:
        return done.result()
    except BrokenProcessPool:
        return row(point, status=FAILED, reason="a process ended, for example for lack of memory")


def _on_ray(request: SweepRequest, stop: StopToken | None) -> Rows:
    with connected({}, request.address) as ray:
        task = ray.remote(num_cpus=request.threads, max_retries=1)(_planned)
        waiting = {task.remote(point): number for number, point in enumerate(request.points)}
        while waiting:
            if is_stopped(stop):
                for one in waiting:
                    ray.cancel(one, force=True)
                return
            done, _ = ray.wait([*waiting], timeout=POLL_SECONDS)
            for one in done:
                number = waiting.pop(one)
                yield number, _row_of_task(ray, one, request.points[number])


def _row_of_task(ray: Any, task: Any, point: Point) -> SweepRow:
    try:
        found: SweepRow = ray.get(task)
    except ray.exceptions.RayError as error:
        return row(point, status=FAILED, reason=one_line(error))
    return found
