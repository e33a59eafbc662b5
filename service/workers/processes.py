"""Processes of jobs, wherever they run: what a worker sees of them and does to them."""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

from stagewright.executor.clusters.ray_ranks import ADDRESS, connected
from stagewright.service.jobs.records import JobEnd
from stagewright.service.workers.solving import STOP, Better, solve

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of a process: what it tells next, if anything, and its resident memory.

    ``exit_code`` is None while it runs.
    """

    told: Better | JobEnd | None
    exit_code: int | None
    resident_bytes: float


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
        self._process.start()
        other.close()

    def look(self, seconds: float) -> Look:
        """See :meth:`JobProcess.look`."""
        exit_code = self._process.exitcode  # asked first, so that no last word is missed
        told = _received(self._connection, seconds)
        return Look(told, exit_code, _resident_bytes(self._process.pid))

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


def _received(connection: Connection, seconds: float) -> Better | JobEnd | None:
    """What the process tells next; None if it is silent or gone."""
    try:
        if connection.poll(seconds):
            told: Better | JobEnd = connection.recv()
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
