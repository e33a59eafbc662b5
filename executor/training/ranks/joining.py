"""A rank joins the process group of its job, and leaves it when all ranks are done.

Every cause that a user can act on ends each rank with one line on stderr: bad input with exit
code 2 (one line for the whole job), a failure with exit code 1.

A roll call through the job's store: which ranks still answer, after a rank lost another.

A thread of every rank looks for the question. It answers even while the main thread computes or
waits; only a process that is stopped, killed, unreachable or stuck outside Python does not.
"""

import contextlib
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch.distributed as dist

from stagewright.executor.capture.places import line_of_call
from stagewright.executor.programs.program import Instruction
from stagewright.executor.training.interpreter.recorder import carry_out
from stagewright.executor.training.ranks.endings import (
    Ending,
    Member,
    Peaks,
    attempt,
    said_notices,
    watched_signals,
)
from stagewright.executor.training.ranks.launch import end_with_parent, silence_torch
from stagewright.formulations.plans.actions import OF_OPERATORS
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store


# Whose code waits for other ranks, and does nothing else that may take long.
_WAITING = (str(Path(__file__).parents[1]), str(Path(dist.__file__).parent))
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))


@dataclass(slots=True)
class Watch:
    """What the main thread of a rank did when `look` was called last, and since when."""

    member: Member
    known: tuple[str, str] = ("", "")
    since: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Note what the main thread does now."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        found = self.member.place, _instruction(frame)
        if found != self.known:
            self.known, self.since = found, time.monotonic()

    def told(self) -> str:
        """In words, what it is in, for how long, and where in the user's code.

        Nothing of a rank that waits for another one.
        """
        self.look()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or frame.f_code.co_filename.startswith(_WAITING):
            return ""
        place, instruction = self.known
        line = line_of_call(_outside_libraries(frame))
        within = f"in {instruction} " if instruction else ""
        return f"{time.monotonic() - self.since:.0f} s {within}{place}{f', {line}' if line else ''}"


def _instruction(frame: FrameType | None) -> str:
    """The instruction of a row that is carried out; empty outside a row."""
    while frame is not None and frame.f_code is not carry_out.__code__:
        frame = frame.f_back
    one = None if frame is None else frame.f_locals.get("one")
    if not isinstance(one, Instruction):
        return ""
    action, number = one.action, one.action.microbatch
    if action.kind in OF_OPERATORS:
        return f"{action} (operator {action.stage})"
    return f"{action} (stage {action.stage}{'' if number is None else f', microbatch {number}'})"


def _outside_libraries(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame


LOOK_SECONDS = 0.5  # between two looks for the question


def address() -> str:
    """Where this process is: its machine, launcher and number."""
    return f"{socket.gethostname()} {os.getppid()} {os.getpid()}"


@dataclass(frozen=True, slots=True)
class RollCall:
    """The roll call of a job, as one of its ranks sees it.

    ``store``: a connection to the job's store that the main thread does not use. ``prefix``: the
    beginning of the keys. ``rank``: this one; ``watch`` knows what its main thread does.
    """

    store: "Store"
    prefix: str
    rank: int
    world_size: int
    watch: "Watch"

    def here(self, rank: int) -> str:
        """The key under which ``rank`` stores its `address` when it comes."""
        return f"{self.prefix}/here/{rank}"

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Answer the question, if it comes, while the body runs, and after it has failed."""
        done = threading.Event()
        thread = threading.Thread(target=self._look, args=(done,), daemon=True)
        thread.start()
        yield
        done.set()
        thread.join()

    def _look(self, done: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the store may be gone with its owner
            while not done.wait(LOOK_SECONDS):
                self.watch.look()
                if self.store.check([self._question]):
                    self.store.set(self._answer(self.rank), self.watch.told())
                    return

    def ask(self) -> None:
        """Ask all ranks to answer."""
        self.store.set(self._question, "")

    def silent(self) -> list[int]:
        """The other ranks that have not answered."""
        return [rank for rank in self._others if not self.store.check([self._answer(rank)])]

    def busy(self) -> str:
        """Once the others have answered: the first that waits for no rank, and what it does."""
        told = ((rank, self.store.get(self._answer(rank)).decode()) for rank in self._others)
        return next((f"{rank} {what}" for rank, what in told if what), "")

    def wake(self, ranks: Collection[int]) -> None:
        """Continue those of ``ranks`` that this rank's launcher started, if they are stopped.

        A stopped process does not handle the signal by which its launcher will end it.
        """
        launcher = address().rpartition(" ")[0]
        for rank in ranks:
            place, _, number = self.store.get(self.here(rank)).decode().rpartition(" ")
            if place == launcher:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(number), signal.SIGCONT)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    @property
    def _question(self) -> str:
        return f"{self.prefix}/question"

    def _answer(self, rank: int) -> str:
        return f"{self.prefix}/answer/{rank}"


_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def joined(timeout_seconds: float) -> Iterator[Member]:
    """Join the process group of the job that the environment describes, as one of its ranks.

    The body's failure ends the process: one line on stderr, exit code 2 for InputError, else 1.
    A `Notice` is one line as well.
    So do a signal, a rank that does not come within ``timeout_seconds``, and the loss of another.
    Communication that takes longer than ``timeout_seconds`` counts as such a loss.
    """
    for name in _RANK_VARIABLES:
        if name not in os.environ:
            raise InputError(f"RANK is set, but {name} is not; start with torchrun, or unset RANK")
    end_with_parent()
    silence_torch()
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from stagewright.executor.training.ranks.joining import Watch

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend, device = _backend()
    member = Member(rank, world_size, device)
    ending = Ending(member)
    with watched_signals(ending), said_notices():
        try:
            store = _connect(timeout_seconds)
            # A second connection: the main thread may be waiting in the first.
            ending.store = store.clone()  # type: ignore[attr-defined]
            roll_call = RollCall(ending.store, attempt(), rank, world_size, Watch(member))
            _await_ranks(store, roll_call, timeout_seconds)
            ending.roll_call = roll_call
            member.peaks = Peaks(PrefixStore(f"{attempt()}/peaks", store), rank, world_size)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with roll_call.answered():
                dist.init_process_group(
                    backend,
                    store=PrefixStore(f"{attempt()}/group", store),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout_seconds),
                )
                yield member
                dist.barrier()  # no rank leaves, and closes the store, before all are done
        except BaseException as error:
            ending.fail(error)
    dist.destroy_process_group()


def _backend() -> tuple[str, "torch.device"]:
    """NCCL where there is a GPU for every rank of this machine, else gloo on the CPU."""
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


def _await_ranks(store: "Store", roll_call: RollCall, timeout_seconds: float) -> None:
    import torch.distributed as dist

    keys = [roll_call.here(rank) for rank in range(roll_call.world_size)]
    store.set(keys[roll_call.rank], address())
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except dist.DistStoreError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        came = len(keys) - len(missing)
        raise ConnectionError(
            f"{came} of {len(keys)} ranks came within {timeout_seconds:g} s, "
            f"missing: {', '.join(missing)}"
        ) from None
