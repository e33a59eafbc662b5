"""The process of a job, which answers one request; and how a worker sees it, here or on Ray."""

import contextlib
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from stagewright.executor.clusters.ray_ranks import ADDRESS, connected
from stagewright.formulations.forms.answers import Progress, Status
from stagewright.formulations.parallelism.document import LayoutPlan
from stagewright.formulations.parallelism.profiles.document import ProfiledDocument
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.documents.errors import InputError
from stagewright.service.answers import Answer
from stagewright.service.jobs.kinds import KINDS, parse_request
from stagewright.service.jobs.records import JobEnd, State, StoppedBy
from stagewright.service.whole_answers import written

STOP = "stop"
_NEARLY = 0.9  # of its time limit, after which a search has probably been ended by it
_STATES = {
    Status.OPTIMAL: State.OPTIMAL,
    Status.FEASIBLE: State.FEASIBLE,
    Status.INFEASIBLE: State.INFEASIBLE,
    Status.UNBOUNDED: State.INFEASIBLE,
    Status.NO_ANSWER: State.FAILED,
}


@dataclass(frozen=True, slots=True)
class Better:
    """A better answer so far, with its document if there is one, or a better bound.

    ``plans`` is the class of plans that the bound is of, where it is known; ``doing`` what is done
    before the search, such as the kernel that is compiled.
    """

    cost: float | None
    bound: float | None
    document: str | None
    plans: dict[str, Any] | None
    doing: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """The process has started, and begins to answer."""


Told = Better | Begun | JobEnd


def solve(connection: Connection, kind: str, request: str) -> None:
    """Answer a request; sends `Begun`, every `Better` answer, then the `JobEnd`.

    ``STOP`` from the other end ends the search with its best answer. When the other end is gone,
    so is this process.
    """
    os.setsid()  # a group of its own, so that it is killed with its children
    with contextlib.suppress(OSError):  # where memory is short the job is killed, not its server
        Path("/proc/self/oom_score_adj").write_text("500")
    stop = threading.Event()
    threading.Thread(target=_listen, args=(connection, stop), daemon=True).start()
    try:
        outcome = _answered(connection, kind, request, stop)
    except InputError as error:
        outcome = JobEnd(State.FAILED, reason=str(error))
    except MemoryError:
        reason = "out of memory"
        outcome = JobEnd(State.FAILED, reason=reason, stopped_by=StoppedBy.MEMORY)
    connection.send(outcome)


def _listen(connection: Connection, stop: threading.Event) -> None:
    try:
        while connection.recv() == STOP:
            stop.set()
    except (EOFError, OSError):
        os._exit(1)


def _answered(connection: Connection, kind: str, request: str, stop: threading.Event) -> JobEnd:
    least = float("inf")

    def report(progress: Progress) -> None:
        nonlocal least
        cost, better = progress.objective, None
        if cost is not None and cost < least and progress.best is not None:
            least = cost
            better = _document(progress.best())
        bound = progress.bound if math.isfinite(progress.bound) else None
        plans = None if progress.plans is None else asdict(progress.plans)
        connection.send(Better(cost, bound, better, plans, progress.doing))

    asked, began = parse_request(kind, request), monotonic()
    connection.send(Begun())
    answer = KINDS[kind].answer(asked, report, stop)
    if stop.is_set():
        return outcome_of(answer, StoppedBy.USER)
    limit = asked.given().get("time_limit")
    late = limit is not None and monotonic() - began > _NEARLY * limit
    return outcome_of(answer, StoppedBy.TIME if late else None)


def outcome_of(answer: Answer, stopped_by: StoppedBy | None = None) -> JobEnd:
    """How a job ends with this answer; ``stopped_by`` is what may have ended its search."""
    told = answer.json_object()
    state, by = _state(told, stopped_by)
    plan = getattr(answer, "plan", None)
    cost, bound = told.get("cost_seconds"), told.get("bound_seconds")
    if isinstance(plan, LayoutPlan | ProfiledDocument):  # the bound is that of the plan's class
        cost, bound = plan.iteration_seconds, plan.bound and plan.bound.seconds
    return JobEnd(
        state,
        answer=written(answer),
        document=_document(plan),
        reason=str(told.get("reason") or ""),
        stopped_by=by,
        cost=cost,
        bound=bound,
    )


def _state(told: dict[str, Any], stopped_by: StoppedBy | None) -> tuple[State, StoppedBy | None]:
    """The state of an answer by its status; an answer without one is complete.

    A search may also end by itself without a proof: then nothing has stopped it.
    """
    status = told.get("status")
    if status == Status.INTERRUPTED:
        found = told.get("cost_seconds") is not None or told.get("rows") is not None
        return (State.FEASIBLE if found else State.FAILED), stopped_by or StoppedBy.USER
    if status in _STATES:
        state = _STATES[Status(status)]
        return state, None if state in (State.OPTIMAL, State.INFEASIBLE) else stopped_by
    return State.OPTIMAL, None


def _document(found: object) -> str | None:
    return to_json(found) if isinstance(found, PipelinePlan) else None


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of a process: what it tells next, if anything, and its resident memory.

    ``exit_code`` is None while it runs; ``out_of_memory``: the kernel has killed it for that.
    """

    told: Told | None
    exit_code: int | None
    resident_bytes: float
    out_of_memory: bool = False


class MachineLostError(Exception):
    """The machine of a process is gone, or does not answer: nobody knows what became of it."""


class JobProcess(Protocol):
    """The process of one job."""

    def look(self, seconds: float) -> Look:
        """Wait for so long, at most, for what it tells.

        Raises
        ------
        MachineLostError
            If nobody can tell any more.
        """
        ...

    def stop(self) -> None:
        """Ask it to end with its best answer."""
        ...

    def kill(self) -> None:
        """End it and all that it started."""
        ...


Start = Callable[[str, str], JobProcess]
"""Starts the process of a job of a kind with a request."""


class LocalProcess:
    """A process of this machine."""

    def __init__(self, kind: str, request: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=solve, args=(other, kind, request), daemon=False
        )
        self._kills = _kills_for_memory()
        self._process.start()
        other.close()

    def look(self, seconds: float) -> Look:
        """See :meth:`JobProcess.look`."""
        exit_code = self._process.exitcode  # asked first, so that no last word is missed
        told = _received(self._connection, seconds)
        out_of_memory = exit_code == -signal.SIGKILL and _kills_for_memory() > self._kills
        return Look(told, exit_code, _resident_bytes(self._process.pid), out_of_memory)

    def stop(self) -> None:
        """See :meth:`JobProcess.stop`."""
        with contextlib.suppress(OSError):
            self._connection.send(STOP)

    def kill(self) -> None:
        """See :meth:`JobProcess.kill`."""
        pid = self._process.pid
        if pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.join()
        self._connection.close()


def _received(connection: Connection, seconds: float) -> Told | None:
    """What the process tells next; None if it is silent or gone."""
    try:
        if connection.poll(seconds):
            told: Told = connection.recv()
            return told
    except (EOFError, OSError):
        time.sleep(seconds)
    return None


def _resident_bytes(pid: int | str | None) -> float:
    """Resident memory of a process and all that it started; 0 of what is gone.

    Pages that they share count for each of them.
    """
    own = Path(f"/proc/{pid}")
    try:
        pages = float((own / "statm").read_text().split()[1])
        started = [one.read_text().split() for one in own.glob("task/*/children")]
    except OSError:
        return 0.0
    return pages * _PAGE_BYTES + sum(_resident_bytes(child) for its in started for child in its)


def _kills_for_memory() -> int:
    """How many processes the kernel of this machine has killed for lack of memory; 0 if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


KILL_SECONDS = 10.0  # how long an actor may take to end its process
_KILLED = Look(None, -9, 0.0)


@contextlib.contextmanager
def on_ray(address: str | None) -> Iterator[Start]:
    """Start processes on the Ray cluster at ``address``; None: one that is started here.

    Raises
    ------
    InputError
        If Ray is not installed, or there is no cluster.
    """
    with connected({}, address) as ray:
        yield lambda kind, request: RayProcess(ray, kind, request)


class _Relay:
    """In an actor: the process of a job on its machine; what it starts on Ray is on this cluster.

    When the actor ends, so does the process.
    """

    def __init__(self, kind: str, request: str) -> None:
        import ray

        os.environ[ADDRESS] = ray.get_runtime_context().gcs_address
        self._process = LocalProcess(kind, request)

    def look(self, seconds: float) -> Look:
        return self._process.look(seconds)

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()


class RayProcess:
    """The process of a job on a Ray cluster, which waits there for as many CPUs as it has threads.

    An actor that is gone without being killed here counts as a lost machine.
    """

    def __init__(self, ray: Any, kind: str, request: str) -> None:
        self._ray = ray
        asked = json.loads(request)
        # The process of a sweep on Ray only waits for its tasks.
        cpus = 0 if asked.get("engine") == "ray" else asked.get("threads", 1)
        self._actor = ray.remote(num_cpus=cpus, max_restarts=0)(_Relay).remote(kind, request)
        self._looking: Any = None
        self._killed = False

    def look(self, seconds: float) -> Look:
        """See :meth:`JobProcess.look`; the process may not have begun yet."""
        if self._killed:
            return _KILLED
        if self._looking is None:
            self._looking = self._actor.look.remote(seconds)
        ready, _ = self._ray.wait([self._looking], timeout=seconds)
        if not ready:
            return Look(None, None, 0.0)
        looking, self._looking = self._looking, None
        try:
            seen: Look = self._ray.get(looking)
        except self._ray.exceptions.RayActorError as error:
            raise MachineLostError(str(error)) from None
        return seen

    def stop(self) -> None:
        """See :meth:`JobProcess.stop`."""
        self._actor.stop.remote()

    def kill(self) -> None:
        """See :meth:`JobProcess.kill`."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.kill.remote(), timeout=KILL_SECONDS)
        self._ray.kill(self._actor)
