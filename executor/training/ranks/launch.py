"""The ranks of a run as processes of this machine, with one import of torch, ended together.

Where it is safe, the ranks are forks of the launcher, made after it has imported torch and before
it does anything else: each rank starts its own threads, process groups, CUDA and user's code.
If the import of the user's code has left nothing behind that forks would share, and has not asked
which rank it is for, they are forked anew after it. Otherwise each rank is a new process, which
imports torch again.
"""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stagewright.executor.training.ranks.endings import ENDING_SIGNALS, caught_signals, say
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_TORCH_VERSION = (2, 13)  # the only version that the executor is tested on

SHUTDOWN_SECONDS = 3  # until ranks that have not ended are killed
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
HOST = "127.0.0.1"

# Each is imported by a rank sooner or later: torch's optimizers import the last.
_NEEDED_BY_RANKS = ("stagewright.executor.training.training", "torch._dynamo")


def require_torch() -> None:
    """Refuse to run without torch, or with an unsupported version."""
    major, minor = _TORCH_VERSION
    supported = f"torch>={major}.{minor},<{major}.{minor + 1}"
    try:
        installed = version("torch")
    except PackageNotFoundError:
        raise InputError(
            "running a plan needs torch: pip install 'stagewright[executor]'"
        ) from None
    if installed.split(".")[:2] != [str(major), str(minor)]:
        raise InputError(f"running a plan needs {supported}, installed is {installed}")
    if is_rank():
        silence_torch()
    try:
        import_module("torch")
    except Exception as error:  # a library that is missing or broken; torch raises many kinds
        told = " ".join(str(error).split())
        raise InputError(
            f"torch {installed} is installed but cannot be imported ({type(error).__name__}: "
            f"{told}); install it again"
        ) from error


def silence_torch() -> None:
    """Switch off torch's log, so that a rank's failure is one line; read when torch is loaded."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def is_rank() -> bool:
    """Whether a launcher (torchrun, or `LocalRanks`) started this process as one of its ranks."""
    return "RANK" in os.environ


def load_for_ranks() -> None:
    """Import the modules that every rank needs, before ranks are forked.

    Called before anything else imports torch, which reads the environment then.
    """
    # The ranks share the machine's cores; as torchrun does.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    silence_torch()
    # Objects made by imports live until the end: there is nothing to collect, here or in a fork.
    gc.disable()
    try:
        require_torch()
        for name in _NEEDED_BY_RANKS:
            import_module(name)
    finally:
        gc.enable()
        gc.freeze()


def may_fork() -> bool:
    """Whether a fork of this process is safe: it has a single thread, and no driver of CUDA."""
    if sys.platform != "linux":
        return False
    threads = len(os.listdir("/proc/self/task"))
    return threads == 1 and "libcuda.so" not in Path("/proc/self/maps").read_text()


def open_files() -> set[str]:
    """What the descriptors of this process are, by number."""
    found = set()
    for number in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # that of the listing itself is closed by now
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


class _Variables(dict[bytes, bytes]):
    """Variables of the environment, and the names of those that were ``asked`` for."""

    def __init__(self, given: Mapping[bytes, bytes]) -> None:
        super().__init__(given)
        self.asked: set[str] = set()

    def __getitem__(self, name: bytes) -> bytes:
        self.asked.add(os.fsdecode(name))
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(os.fsdecode(name) if isinstance(name, bytes) else "")
        return super().__contains__(name)


class LocalRanks:
    """Processes of this machine that carry out ``body`` as the ranks of one job.

    The body is a function that can be imported. Forks are made at once, while that is safe;
    they wait until `run` lets them begin, and end if it is never called::

        with LocalRanks(4, main) as ranks:
            refuse_bad_input()
            return ranks.run()
    """

    def __init__(self, count: int, body: Callable[[], object]) -> None:
        self._count, self._body = count, body
        self._processes: list[BaseProcess] = []
        self._gate: Connection | None = None
        self.may_renew = False
        self._listener = socket.create_server((HOST, 0))
        self._port = self._listener.getsockname()[1]
        if may_fork():
            self._start(multiprocessing.get_context("fork"))

    def __enter__(self) -> "LocalRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._listener.close()

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Look on while the body imports the user's code, which decides whether `renew` is sound.

        Forks would share a thread's locks, the place in a file, a connection, a driver; and what
        the code has read from the variables of a rank would be of no rank.
        """
        files, environment = open_files(), cast(Any, os.environ)
        watched = environment._data = _Variables(environment._data)
        try:
            yield
        finally:
            environment._data = dict(watched)
        self.may_renew = (
            bool(self._processes)
            and may_fork()
            and open_files() == files
            and watched.asked.isdisjoint(self._variables(0))
        )

    def renew(self, body: Callable[[], object]) -> None:
        """Fork the ranks anew from what this process has become, to carry out ``body``."""
        state = random.getstate()

        def begun() -> None:
            random.setstate(state)  # Python draws another one in each fork
            body()

        self._kill()
        self._processes.clear()
        self._body = begun
        self._start(multiprocessing.get_context("fork"))

    def run(self) -> int:
        """Let the ranks begin, and wait for all of them.

        Returns 0 if all ended well, 2 if one refused its input, 128 + n if signal n ended this
        process, else 1. All ranks have ended by then.
        """
        with caught_signals() as caught:
            store = self._serve()
            if not self._processes:
                self._start(multiprocessing.get_context("spawn"))
            assert self._gate is not None
            self._gate.send(None)
            code = self._await(caught)
            del store  # the ranks need it until they end
            return code

    def _start(self, context: ForkContext | SpawnContext) -> None:
        there, self._gate = context.Pipe(duplex=False)
        # Blocked until a rank can handle signals: one that has not begun ends without a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        try:
            for rank in range(self._count):
                with _environment(self._variables(rank)):
                    process = context.Process(target=_be_rank, args=(there, self._body))
                    process.start()
                    self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)

    def _variables(self, rank: int) -> dict[str, str]:
        """The variables that torchrun sets for a rank, without those for several machines."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(self._count),
            "LOCAL_WORLD_SIZE": str(self._count),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
        }

    def _serve(self) -> "Store":
        """The job's store, at the port in the ranks' environment."""
        import torch.distributed as dist

        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            HOST,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        return store

    def _await(self, caught: socket.socket) -> int:
        """Wait until all ranks have ended, one has failed, or a signal says to end."""
        running = list(self._processes)
        while running and not any(process.exitcode for process in self._processes):
            ready = wait([caught, *(process.sentinel for process in running)])
            if caught in ready and (number := caught.recv(1)[0]) in ENDING_SIGNALS:
                self._end(number, caught)
                return 128 + number
            running = [process for process in running if process.exitcode is None]
        late = self._end(signal.SIGTERM, caught)
        codes = [process.exitcode or 0 for process in self._processes]
        return _exit_code({rank: code for rank, code in enumerate(codes) if rank not in late})

    def _end(self, number: int, caught: socket.socket) -> list[int]:
        """End ranks by a signal, and remaining ranks by SIGKILL; return the remaining ranks.

        They have `SHUTDOWN_SECONDS`, or until the next signal to this process.
        """
        for process in self._processes:
            _signal(process, number)
        until = time.monotonic() + SHUTDOWN_SECONDS
        while (running := self._running()) and (seconds := until - time.monotonic()) > 0:
            ready = wait([caught, *(process.sentinel for process in running.values())], seconds)
            if caught in ready and caught.recv(1)[0] in ENDING_SIGNALS:
                break
        late = self._running()
        for rank in late:
            say(f"rank {rank}: killed, as it did not end at {signal.Signals(number).name}")
        self._kill()
        return list(late)

    def _running(self) -> dict[int, BaseProcess]:
        """The ranks that have not ended."""
        return {r: process for r, process in enumerate(self._processes) if process.exitcode is None}

    def _kill(self) -> None:
        for process in self._processes:
            _signal(process, signal.SIGKILL)
        for process in self._processes:
            process.join()


def _be_rank(gate: Connection, body: Callable[[], object]) -> None:
    """Carry out ``body`` in a process that has been started as a rank."""
    os.setsid()
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    end_with_parent()
    launcher = multiprocessing.parent_process()
    if launcher is not None and launcher.pid != os.getppid():
        return  # it died before the kernel was asked
    gate.poll(None)
    try:
        body()
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def _signal(process: BaseProcess, number: int) -> None:
    """Send a signal to a running rank, and to the processes that it has started.

    Those that are stopped continue, as they would not handle it.
    """
    if process.exitcode is not None or process.pid is None:
        return
    for each in (number, signal.SIGCONT):
        try:
            os.killpg(process.pid, each)
        except ProcessLookupError:  # it has not made its own group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, each)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let processes that are started in the body inherit ``variables``."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _exit_code(codes: Mapping[int, int]) -> int:
    """The job's exit code from those of ranks; prints a line for ranks that were killed."""
    for rank, code in codes.items():
        if code < 0 and -code not in ENDING_SIGNALS:
            say(f"rank {rank}: killed by {signal.Signals(-code).name}")
    if not any(codes.values()):
        return 0
    return 2 if 2 in codes.values() else 1


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the launcher dies, however it dies (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
