"""A few gloo processes, started once for all tests; each run gets a process group of its own.

They are forks of one server, which imports torch once for all of them and for those that follow.

A function that is run must be importable (at the top of a module) and take the process group and
the rank before its own arguments. The group is also the default group, as under ``torchrun``, so
the function may make groups of its own; all of them are gone after the run. What goes to and from
the processes are plain pickles: a tensor that is sent is copied.
"""

import gc
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What ranks import sooner or later (optimizers the second, an export the next two); the server does
# it once for all. What is not installed is left out.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.export",
    "torch._functorch.partitioners",
    "hypothesis",
    "pytest",
    "stagewright.cli",
    "stagewright.executor.training.training",
    "benchmarks.torchvision_operators",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)

ROOT = str(Path(__file__).parents[2])

# How long the others may take to notice that a rank failed.
GRACE_SECONDS = 5.0


def forked(function: Callable[..., Any], *args: Any) -> multiprocessing.process.BaseProcess:
    """A process that calls ``function``, forked where torch has been imported; ends with this one.

    Its only thread is the one that calls.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(PRELOADED))
    with _environment():
        process = server.Process(target=function, args=args, daemon=True)
        process.start()
    return process


@contextmanager
def _environment() -> Iterator[None]:
    """What the processes inherit: one thread each, and sockets on this machine only."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "TORCH_CPP_LOG_LEVEL": "FATAL",  # as `stagewright run` asks for
        # For the benchmarks: without theirs transformers may not be importable beside torch.
        "PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH")))),
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class RanksFailed(RuntimeError):  # noqa: N818 - says what happened
    """What went wrong, by rank, in the order in which it was noticed.

    The first is the cause; a rank that waited for a failed one reports a closed connection.
    """

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        self.errors = errors


class Ranks:
    """A pool of processes; start with ``with Ranks() as ranks``."""

    def __init__(self, world: int = 4) -> None:
        self.world = world
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._runs = 0

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    @property
    def process_ids(self) -> tuple[int | None, ...]:
        """Of the processes that stand ready."""
        return tuple(process.pid for process in self._processes)

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_seconds: float = 180.0,
    ) -> list[Any]:
        """Return ``function(group, rank, *args)`` of every rank.

        Raises
        ------
        RanksFailed
            If a rank raises, dies, or has not answered in time (or soon after another failed).
            After the latter two all processes are ended, and the next run starts new ones.
        """
        if not 1 <= world_size <= self.world:
            raise ValueError(f"world_size must be 1..{self.world}, got {world_size}")
        call = pickle.dumps((function, args))
        self.start()
        self._runs += 1
        meeting = str(Path(self._folder.name) / f"run-{self._runs}")
        for rank, pipe in enumerate(self._pipes[:world_size]):
            pipe.send_bytes(pickle.dumps((rank, world_size, meeting, timeout_seconds, call)))
        answers, errors = self._gather(world_size, time.monotonic() + timeout_seconds)
        if len(answers) + len(errors) < world_size or None in errors.values():
            self.stop()
        for rank in set(range(world_size)) - answers.keys() - errors.keys():
            errors[rank] = f"no answer within {timeout_seconds:g} seconds, or after a failure"
        if errors:
            raise RanksFailed({rank: text or "the process died" for rank, text in errors.items()})
        return [pickle.loads(answers[rank]) for rank in range(world_size)]

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def start(self) -> None:
        """Start the processes unless they stand ready; a run does it by itself."""
        if self._processes:
            return
        for _ in range(self.world):
            ours, theirs = multiprocessing.Pipe()
            self._processes.append(forked(_work, theirs))
            theirs.close()
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv_bytes()  # torch is imported: from here on time is the run's own

    def _gather(
        self, world_size: int, deadline: float
    ) -> tuple[dict[int, bytes], dict[int, str | None]]:
        """Answers and errors by rank until all are there or it is too late; None is a death."""
        answers: dict[int, bytes] = {}
        errors: dict[int, str | None] = {}
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size])}
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    done, content = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    done, content = False, None
                (answers if done else errors)[rank] = content
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers, errors


def _work(pipe: Connection) -> None:
    """Answer one call after another until the pipe closes or the parent is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: nothing to look through in every collection
    pipe.send_bytes(b"ready")
    while True:
        try:
            call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        # Only now is everybody done with the last run's group.
        if dist.is_initialized():
            dist.destroy_process_group()
        try:
            answer = True, _call(*call)
        except Exception as error:
            # Those who wait for this rank shall hear of it at once, not at the timeout.
            if dist.is_initialized():
                dist.destroy_process_group()
            text = traceback.format_exc()
            answer = False, f"{type(error).__name__}: {error}\n{text}"
        sys.stdout.flush()
        pipe.send_bytes(pickle.dumps(answer))


def _call(
    rank: int, world_size: int, meeting: str, timeout_seconds: float, function_and_args: bytes
) -> bytes:
    import torch.distributed as dist

    function, args = pickle.loads(function_and_args)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return pickle.dumps(function(dist.group.WORLD, rank, *args))


def _end_with_parent() -> None:
    """End this process, whatever it waits for, when the parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
