"""Ray: connecting to it, and the functions that run in its processes.

Ray is imported only when it is used, and no other heavy package, so that ranks start quickly.
"""

import contextlib
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stagewright.executor.clusters.leases import Grant, Lease
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.graphs.workloads.pool import Pool

CONNECT_SECONDS = 5.0
KILL_SECONDS = 10.0  # how long a killed process may take to end
ADDRESS = "RAY_ADDRESS"  # Ray's own name for the cluster of a process
_MODE, _TOKENS = "RAY_AUTH_MODE", ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # Ray's own, too
LOG = "output.log"  # output of a job's processes, in the job's folder


@contextlib.contextmanager
def connected(counts: Mapping[str, int], address: str | None) -> Iterator[Any]:
    """The ray module, connected; a cluster started here is shut down at the end.

    Without an ``address`` it is the cluster that RAY_ADDRESS names, or one that is started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # suppresses a deprecation warning
    address = address or os.environ.get(ADDRESS)
    if address is None:
        _guard()
    try:
        import ray
    except ImportError:
        raise InputError("Ray is not installed: pip install 'stagewright[cluster]'") from None
    if ray.is_initialized():
        yield ray
        return
    handler = signal.getsignal(signal.SIGTERM)
    _connect(ray, counts, address)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray replaces it
    try:
        yield ray
    finally:
        ray.shutdown()


def _guard() -> None:
    """Let nobody use the cluster that is started here without a token.

    Ray listens at every address of the machine, whatever it is told, and reads the mode when it is
    imported.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return
    if os.environ.get(_MODE) != "token":
        if ray is not None:
            raise InputError(
                f"Ray was imported without tokens, and listens at every address: set {_MODE}=token "
                "before, or call ray.init"
            )
        os.environ[_MODE] = "token"
    if not any(os.environ.get(name) for name in _TOKENS):
        os.environ[_TOKENS[0]] = secrets.token_hex(32)


def _connect(ray: Any, counts: Mapping[str, int], address: str | None) -> None:
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is not None:
        _require_listener(address)
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            raise InputError(f"no Ray cluster at {address!r}: {one_line(error)}") from None
        return
    cpus = max(os.cpu_count() or 1, sum(counts.values()))  # Ray keeps a process for each
    resources = {name: float(count) for name, count in counts.items()}
    ray.init(address="local", num_cpus=cpus, resources=resources, include_dashboard=False, **quiet)


def _require_listener(address: str) -> None:
    """Refuse HOST:PORT where nothing listens; Ray would try again for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()) or "://" in address:
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray cluster at {address!r}: {one_line(error)}") from None


class RemoteScheduler:
    """A program's connection to the lease server, through Ray."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def grant(self, job: str, epoch: int, rank: int, number: int) -> Grant:
        """See :meth:`leases.Scheduler.grant`."""
        found: Grant = call(self.server, "grant", job, epoch, rank, number)
        return found

    def saved(self, job: str, epoch: int, rank: int, step: int) -> None:
        """See :meth:`leases.Scheduler.saved`."""
        call(self.server, "saved", job, epoch, rank, step)


def call(server: Any, method: str, *arguments: object) -> Any:
    """Call the actor's method; returns its result or raises its exception."""
    import ray

    try:
        return ray.get(getattr(server, method).remote(*arguments))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # as the server raised it


def run_rank(program: bytes, lease: Lease, path: Sequence[str]) -> str | None:
    """Run a rank in this process; returns its error in one line, or None.

    ``program`` is pickled, and loaded with the scheduler's module ``path``.
    """
    sys.path.extend(each for each in path if each not in sys.path)
    with (
        (lease.folder / LOG).open("a", buffering=1) as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            pickle.loads(program)(lease)
        except SystemExit as error:
            return f"SystemExit: {error.code}" if error.code else None
        except Exception as error:
            traceback.print_exc()
            return one_line(error)
        finally:
            _leave_group()
    return None


def _leave_group() -> None:
    """Ray may use the process again, for another job's rank."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def one_line(error: BaseException) -> str:
    """The kind of error and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


class Accelerators:
    """The node of each accelerator of a pool in Ray, and the processes there.

    Accelerators are numbered within their type, node by node.
    """

    def __init__(self, ray: Any, pool: "Pool") -> None:
        self._ray = ray
        self._pool = pool
        self._run_rank = ray.remote(run_rank)
        self._nodes: list[list[str | None]] = [[None] * each.count for each in pool.accelerators]
        self._have_gpus: set[str] = set()
        self._stuck: list[tuple[list[Any], int, tuple[int, ...]]] = []

    def in_order(self) -> list[set[int]]:
        """The usable accelerators by type: on a live node, and not held by a killed process."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        self._have_gpus = {node["NodeID"] for node in alive if node["Resources"].get("GPU")}
        self._stuck = [held for held in self._stuck if self._left(held[0], 0.0)]
        found = []
        for number, accelerator in enumerate(self._pool.accelerators):
            room = {
                node["NodeID"]: int(node["Resources"].get(accelerator.name, 0)) for node in alive
            }
            bound = self._nodes[number] = bind(self._nodes[number], room)
            stuck = {each for _, held, numbers in self._stuck if held == number for each in numbers}
            found.append({each for each, node in enumerate(bound) if node} - stuck)
        return found

    def require_all(self) -> None:
        """Refuse a cluster with fewer accelerators than the pool, or with other servers."""
        for accelerator, found in zip(self._pool.accelerators, self.in_order(), strict=True):
            name = accelerator.name
            if len(found) < accelerator.count:
                raise InputError(
                    f"Ray has {len(found)} of {name!r}, the pool {accelerator.count}: start its "
                    f"nodes with --resources='{{\"{name}\": COUNT}}'"
                )
        for accelerator, nodes in zip(self._pool.accelerators, self._nodes, strict=True):
            size = accelerator.per_server or 1
            servers = [set(nodes[start : start + size]) for start in range(0, len(nodes), size)]
            if any(len(server) > 1 for server in servers):
                raise InputError(
                    f"accelerator {accelerator.name!r}: the pool has servers of {size}, Ray's "
                    "nodes have other sizes"
                )

    def node(self, number: int, accelerator: int) -> str:
        """The node of an accelerator of type ``number``."""
        return str(self._nodes[number][accelerator])

    def are_alive(self, nodes: Iterable[str]) -> bool:
        """Whether all these nodes are alive."""
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        return alive.issuperset(nodes)

    def start_here(self, kind: type, *arguments: object) -> Any:
        """An actor on this process's node."""
        here = self._ray.get_runtime_context().get_node_id()
        actor = self._ray.remote(kind).options(num_cpus=0, scheduling_strategy=self._on(here))
        return actor.remote(*arguments)

    def run(self, node: str, name: str, part: float, program: bytes, lease: Lease) -> Any:
        """Start a rank on ``part`` of an accelerator of ``node``; returns Ray's reference."""
        task = self._run_rank.options(
            num_cpus=0,
            num_gpus=part if node in self._have_gpus else 0,
            resources={name: part},
            max_retries=0,
            scheduling_strategy=self._on(node),
        )
        return task.remote(program, lease, sys.path)

    def _on(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=False)

    def cancel(self, refs: list[Any]) -> None:
        """Request that the processes are killed."""
        for ref in refs:
            self._ray.cancel(ref, force=True)

    def kill(self, refs: list[Any], number: int, accelerators: tuple[int, ...]) -> None:
        """Kill the processes; accelerators of one that does not end count as down."""
        self.cancel(refs)
        if self._left(refs, KILL_SECONDS):
            self._stuck.append((refs, number, accelerators))

    def _left(self, refs: list[Any], seconds: float) -> list[Any]:
        """The processes that have not ended within ``seconds``."""
        if not refs:
            return []
        left: list[Any] = self._ray.wait(refs, num_returns=len(refs), timeout=seconds)[1]
        return left


def bind(bound: Sequence[str | None], room: Mapping[str, int]) -> list[str | None]:
    """The node of each accelerator: its previous one if that is alive, else one with room."""
    left = dict(room)
    kept: list[str | None] = []
    for node in bound:
        stays = node is not None and left.get(node, 0) > 0
        if node is not None and stays:
            left[node] -= 1
        kept.append(node if stays else None)
    spare = [node for node in sorted(left) for _ in range(left[node])]
    return [node if node is not None or not spare else spare.pop(0) for node in kept]
