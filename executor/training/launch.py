"""The ranks of a run: started on this machine, joined into one group, ended together.

Every cause that a user can act on ends each rank with one line on stderr: bad input with exit
code 2 (one line for the whole job), a failure with exit code 1. What a failing rank has to say
reaches the others through the job's key-value store.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NoReturn

from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

TORCH_VERSION = (2, 13)  # the executor is tested on this one alone

REASON_SECONDS = 2.0  # how long a rank that lost another one waits to hear why
SHUTDOWN_SECONDS = 10  # what ranks get to end by themselves before they are killed
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def require_torch() -> None:
    """Refuse to run without torch, or with one that the executor does not know."""
    major, minor = TORCH_VERSION
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
        _silence_torch()
    try:
        import_module("torch")
    except Exception as error:  # a library that is missing or broken; torch raises many kinds
        told = " ".join(str(error).split())
        raise InputError(
            f"torch {installed} is installed but cannot be imported ({type(error).__name__}: "
            f"{told}); install it again"
        ) from error


def _silence_torch() -> None:
    """Let failures of ranks be told in our one line alone; read when torch is loaded."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def is_rank() -> bool:
    """Whether a launcher (torchrun, or :func:`launch`) started this process as one of its ranks."""
    return "RANK" in os.environ


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run ``stagewright`` with ``arguments`` as ``ranks`` processes of this machine.

    Returns
    -------
    int
        0 if all ended well, 2 if one refused its input, 128 + n if signal n ended this process,
        else 1. All ranks have ended by then.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The ranks share the machine's cores; as torchrun does.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as logs, _without_logging():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=f"stagewright-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle=",".join(number.name for number in ENDING_SIGNALS),
            shutdown_timeout=SHUTDOWN_SECONDS,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "stagewright", *arguments)
        except ChildFailedError as error:
            return _exit_code(error.failures)
        except SignalException as error:
            return 128 + error.sigval
        except KeyboardInterrupt:  # before the launcher listens for signals
            return 128 + signal.SIGINT
    return 0


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
    """Keep the launcher's log to itself: the ranks say what there is to say."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _exit_code(failures: Mapping[int, "ProcessFailure"]) -> int:
    """The job's exit code; ranks that could not say so themselves are said to be killed."""
    for rank, failure in sorted(failures.items()):
        if failure.exitcode < 0 and -failure.exitcode not in ENDING_SIGNALS:
            _say(f"rank {rank}: killed by {signal.Signals(-failure.exitcode).name}")
    return 2 if any(failure.exitcode == 2 for failure in failures.values()) else 1


@dataclass(slots=True)
class Member:
    """One rank, as it sees itself; ``place`` says in messages how far it has come."""

    rank: int
    world_size: int
    device: "torch.device"
    place: str = "before the first step"


@contextlib.contextmanager
def joined(timeout_seconds: float) -> Iterator[Member]:
    """Join the process group of the job that the environment describes, as one of its ranks.

    The body's failure ends the process: one line on stderr, exit code 2 for InputError, else 1.
    So do a signal, a rank that does not come within ``timeout_seconds``, and the loss of another.
    Communication that takes longer than ``timeout_seconds`` counts as such a loss.
    """
    for name in RANK_VARIABLES:
        if name not in os.environ:
            raise InputError(f"RANK is set, but {name} is not; start with torchrun, or unset RANK")
    _end_with_parent()
    _silence_torch()
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend, device = _backend()
    member = Member(rank, world_size, device)
    ending = _Ending(member)
    with _watched_signals(ending):
        try:
            store = _connect(timeout_seconds)
            # The main thread may be waiting in its own.
            ending.store = store.clone()  # type: ignore[attr-defined]
            _await_ranks(store, member, timeout_seconds)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                backend,
                store=PrefixStore(f"{_attempt()}/group", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )
            yield member
            dist.barrier()  # nobody leaves, and takes the store along, before all are done
        except BaseException as error:
            ending.fail(error)
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the launcher dies, however it dies (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _backend() -> tuple[str, "torch.device"]:
    """NCCL where every rank of this machine has a GPU of its own, else gloo on the CPU."""
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        return "cpu:gloo,cuda:nccl", torch.device("cuda", local_rank)
    return "gloo", torch.device("cpu")


def _connect(timeout_seconds: float) -> "Store":
    """The job's store: the launcher's, which outlives every rank, or else rank 0's."""
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launcher_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    is_owner = os.environ["RANK"] == "0" and not launcher_has_it
    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=is_owner,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )
        return store
    except dist.DistNetworkError:
        doubt = "is the port free?" if is_owner else "is rank 0 there?"
        raise ConnectionError(
            f"cannot reach the job's store at {host}:{port} in {timeout_seconds:g} s; {doubt}"
        ) from None


def _await_ranks(store: "Store", member: Member, timeout_seconds: float) -> None:
    import torch.distributed as dist

    keys = [f"{_attempt()}/here/{rank}" for rank in range(member.world_size)]
    store.set(keys[member.rank], "")
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except dist.DistStoreError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        came = member.world_size - len(missing)
        raise ConnectionError(
            f"{came} of {member.world_size} ranks came within {timeout_seconds:g} s, "
            f"missing: {', '.join(missing)}"
        ) from None


def _attempt() -> str:
    """The prefix of keys: a launcher that starts the ranks again keeps its store."""
    return f"stagewright/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@dataclass(slots=True)
class _Ending:
    """How this rank ends when something fails, here or elsewhere: one line, then gone.

    It leaves by ``os._exit``: the destructors of a broken process group may wait for its peers.
    """

    member: Member
    store: "Store | None" = None
    lost: bool = False
    only_one: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: BaseException) -> NoReturn:
        """End by the failure of this rank's main thread."""
        if isinstance(error, InputError):
            self._leave(2, str(error) if self._first("refused", "") else "")
        if self._is_loss(error):
            self.lost = True
            self._leave_after_another(REASON_SECONDS)
        reason = _describe(error)
        self._first("failed", reason)
        self._leave(1, f"{self._place()}: {reason}")

    def signalled(self, number: int) -> NoReturn:
        """End by a signal; called beside a main thread that may hang in communication."""
        self._leave_after_another(0.0, f"ended by {signal.Signals(number).name}")

    def _is_loss(self, error: BaseException) -> bool:
        import torch.distributed as dist

        # gloo raises bare RuntimeErrors; their text starts with the file that raised them.
        return isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in str(error)
        )

    def _leave_after_another(self, seconds: float, otherwise: str = "") -> NoReturn:
        """End because of another rank, whose reason may take some seconds to be known."""
        if self.lost or not otherwise:
            otherwise = "lost contact with another rank (killed, stuck or unreachable?)"
        # The store may be beyond reach, too.
        alarm = threading.Timer(seconds + 1, self._leave, (1, f"{self._place()}: {otherwise}"))
        alarm.daemon = True
        alarm.start()
        until = time.monotonic() + seconds
        while not (known := self._known()) and time.monotonic() < until:
            time.sleep(0.05)
        if "refused" in known:
            self._leave(2, "")
        if "failed" in known:
            rank, _, reason = known["failed"].partition(" ")
            otherwise = f"rank {rank} failed: {reason}"
        self._leave(1, f"{self._place()}: {otherwise}")

    def _known(self) -> dict[str, str]:
        """What ranks of the job have said of their end."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with its owner
            if self.store is not None:
                keys = {name: f"{_attempt()}/{name}" for name in ("refused", "failed")}
                return {
                    name: self.store.get(key).decode()
                    for name, key in keys.items()
                    if self.store.check([key])
                }
        return {}

    def _first(self, name: str, reason: str) -> bool:
        """Tell the other ranks; False if one of them has been first."""
        mine = f"{self.member.rank} {reason}"
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                told = self.store.compare_set(f"{_attempt()}/{name}", "", mine)
                return bool(told.decode() == mine)
        return True

    def _place(self) -> str:
        return f"rank {self.member.rank}: stopped {self.member.place}"

    def _leave(self, code: int, line: str) -> NoReturn:
        with self.only_one:
            if line:
                _say(line)
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(code)


def _describe(error: BaseException) -> str:
    """A failure in one line; with the place in the user's code where the message may not do."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) or type(error).__module__.startswith("stagewright."):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if "site-packages" not in frame.filename]
    place = "".join(f" ({frame.filename}:{frame.lineno})" for frame in users[-1:])
    return f"{type(error).__name__}: {text}{place}"


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever read stderr may be gone
        os.write(2, f"stagewright: {line}\n".encode())


@contextlib.contextmanager
def _watched_signals(ending: _Ending) -> Iterator[None]:
    """End at a signal at once, even while the main thread waits in a call outside Python.

    Python runs signal handlers in the main thread, between its instructions; a thread that reads
    the wake-up pipe needs not wait for that.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while numbers := reader.recv(1):
            if numbers[0] in ENDING_SIGNALS:
                ending.signalled(numbers[0])

    def forget() -> None:
        """Leave a forked process (a loader of data) the signals' usual meaning."""
        signal.set_wakeup_fd(-1)
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, lambda *_: None) for number in ENDING_SIGNALS}
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=forget)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
