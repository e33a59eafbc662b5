"""Processes of jobs on a Ray cluster: an actor on one of its machines has the process there."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from stagewright.executor.clusters.ray_ranks import ADDRESS, connected
from stagewright.service.workers.processes import LocalProcess, Look, MachineLostError, Start

KILL_SECONDS = 10.0  # how long an actor may take to end its process
KILLED = Look(None, -9, 0.0)


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
            return KILLED
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
