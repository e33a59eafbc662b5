"""The end of a rank after a failure, its own or another rank's: one line on stderr, then exit.

The reason reaches the other ranks through the job's key-value store.
"""

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from stagewright.graphs.documents.errors import InputError, Notice

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from stagewright.executor.training.ranks.joining import RollCall


GROWTH = 1.01  # a peak is told again when it is larger by this factor: seldom after the first steps
READ_SECONDS = 2.0  # least time between two readings of the others' peaks


@dataclass(slots=True)
class Peaks:
    """The rank's published peak of memory and the peaks read from other ranks, in bytes.

    No rank waits for another one: what is known may be some seconds old.
    """

    store: "Store"
    rank: int
    world_size: int
    told: int = 0
    others: int = 0
    read: float = -math.inf

    def tell(self, peak: int) -> None:
        """Tell the others of this rank's ``peak``, if it has grown."""
        if peak > GROWTH * self.told:
            self.store.set(str(self.rank), str(peak))
            self.told = peak

    def most(self, peak: int) -> int:
        """The largest peak of all ranks that is known; this rank's is ``peak``."""
        if time.monotonic() >= self.read + READ_SECONDS:
            keys = [str(rank) for rank in range(self.world_size) if rank != self.rank]
            told = [int(self.store.get(key)) for key in keys if self.store.check([key])]
            self.others, self.read = max(told, default=0), time.monotonic()
        return max(peak, self.others)


# How long a rank that lost another one waits for the reason, and for the others to answer.
_REASON_SECONDS = 2.0
LOST = "lost contact with another rank (killed, stuck or unreachable?)"
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class Member:
    """One rank, as it sees itself; ``place`` is its progress, for messages.

    ``peaks`` are there once it has joined the others.
    """

    rank: int
    world_size: int
    device: "torch.device"
    place: str = "before the first step"
    peaks: "Peaks | None" = None


def attempt() -> str:
    """The prefix of keys: a launcher that starts the ranks again keeps its store."""
    return f"stagewright/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@dataclass(slots=True)
class Ending:
    """The end of this rank after a failure, its own or another rank's: one line, then exit.

    It leaves by ``os._exit``: the destructors of a broken process group may wait for its peers.
    """

    member: Member
    store: "Store | None" = None
    roll_call: "RollCall | None" = None
    lost: bool = False
    only_one: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: BaseException) -> NoReturn:
        """End by the failure of this rank's main thread."""
        if isinstance(error, InputError):
            self._leave(2, str(error) if self._first("refused", "") else "")
        if self._is_loss(error):
            self.lost = True
            self._leave_after_another(_REASON_SECONDS, LOST)
        reason = describe(error)
        self._first("failed", reason)
        self._leave(1, f"{self._place()}: {reason}")

    def signalled(self, number: int) -> NoReturn:
        """End by a signal; called from a thread, as the main one may hang in communication.

        A launcher ends by SIGTERM the ranks that lost another one; SIGINT is a user's, and then all
        ranks have it, though one that ended sooner may already be missed.
        """
        told = f"ended by {signal.Signals(number).name}"
        lost = self.lost and number == signal.SIGTERM
        self._leave_after_another(0.0, LOST if lost else told)

    def _is_loss(self, error: BaseException) -> bool:
        import torch.distributed as dist

        # gloo raises bare RuntimeErrors; their text starts with the file that raised them.
        return isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in str(error)
        )

    def _leave_after_another(self, seconds: float, otherwise: str) -> NoReturn:
        """End because of another rank, whose reason may arrive some seconds later."""
        # The store may be unreachable, too.
        alarm = threading.Timer(seconds + 1, self._leave, (1, f"{self._place()}: {otherwise}"))
        alarm.daemon = True
        alarm.start()
        known = self._await_reason(seconds)
        if "refused" in known:
            self._leave(2, "")
        if "failed" in known:
            rank, _, reason = known["failed"].partition(" ")
            otherwise = f"rank {rank} failed: {reason}"
        elif "silent" in known:
            otherwise = self._silence(known["silent"].split())
        elif "busy" in known:
            rank, _, what = known["busy"].partition(" ")
            name = "it" if rank == str(self.member.rank) else f"rank {rank}"
            otherwise = f"{name} kept the others waiting for {what}"
        self._leave(1, f"{self._place()}: {otherwise}")

    def _await_reason(self, seconds: float) -> dict[str, str]:
        """The reasons that ranks store within ``seconds``, or which ranks do not answer then."""
        if seconds:
            self._call_roll()
        until = time.monotonic() + seconds
        while not (known := self._known()) and time.monotonic() < until:
            time.sleep(0.05)
        return known or (self._missed() if seconds else {})

    def _call_roll(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self.roll_call is not None:
                self.roll_call.ask()

    def _missed(self) -> dict[str, str]:
        """Tell other ranks which ranks have not answered, and wake these so that they end.

        Where all have answered, tell which rank they wait for.
        """
        with contextlib.suppress(RuntimeError):
            if self.store is not None and self.roll_call is not None:
                ranks = self.roll_call.silent()
                name, found = "silent", " ".join(map(str, ranks))
                if not ranks:
                    name, found = "busy", self.roll_call.busy()
                if found:
                    told = self.store.compare_set(f"{attempt()}/{name}", "", found)
                    self.roll_call.wake(ranks)
                    return {name: told.decode()}
        return {}

    def _silence(self, ranks: list[str]) -> str:
        """A phrase on the ranks that have not answered, for the last line of a rank."""
        if str(self.member.rank) in ranks:
            return "it did not answer the other ranks (was the process stopped?)"
        if len(ranks) == 1:
            return f"rank {ranks[0]} does not answer (killed, stopped or unreachable?)"
        return f"ranks {', '.join(ranks)} do not answer (killed, stopped or unreachable?)"

    def _known(self) -> dict[str, str]:
        """The reasons that ranks of the job have stored."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with its owner
            if self.store is not None:
                keys = {
                    name: f"{attempt()}/{name}" for name in ("refused", "failed", "silent", "busy")
                }
                return {
                    name: self.store.get(key).decode()
                    for name, key in keys.items()
                    if self.store.check([key])
                }
        return {}

    def _first(self, name: str, reason: str) -> bool:
        """Tell other ranks of this failure; False if another rank has reported a failure first."""
        mine = f"{self.member.rank} {reason}"
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                told = self.store.compare_set(f"{attempt()}/{name}", "", mine)
                return bool(told.decode() == mine)
        return True

    def _place(self) -> str:
        return f"rank {self.member.rank}: stopped {self.member.place}"

    def _leave(self, code: int, line: str) -> NoReturn:
        with self.only_one:
            if line:
                say(line)
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(code)


def describe(error: BaseException) -> str:
    """A failure in one line; with the line of the user's code for errors that are not ours."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) or type(error).__module__.startswith("stagewright."):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if "site-packages" not in frame.filename]
    place = "".join(f" ({frame.filename}:{frame.lineno})" for frame in users[-1:])
    return f"{type(error).__name__}: {text}{place}"


def say(line: str) -> None:
    """Print a line to stderr, if it is still open."""
    with contextlib.suppress(OSError):  # whoever read stderr may be gone
        os.write(2, f"stagewright: {line}\n".encode())


@contextlib.contextmanager
def said_notices() -> Iterator[None]:
    """Print a notice as a line, without the place in our code that Python shows of warnings."""
    usual = warnings.formatwarning

    def line_of(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if issubclass(category, Notice):
            return f"stagewright: {' '.join(str(message).split())}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = line_of
    try:
        yield
    finally:
        warnings.formatwarning = usual


@contextlib.contextmanager
def caught_signals() -> Iterator[socket.socket]:
    """A socket that receives the numbers of signals, which do not end this process meanwhile.

    Python runs signal handlers in the main thread, between its instructions; a reader of this
    socket does not wait for that.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in ENDING_SIGNALS}
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()


@contextlib.contextmanager
def watched_signals(ending: Ending) -> Iterator[None]:
    """End at a signal at once, even while the main thread waits in a call outside Python."""

    def watch(reader: socket.socket) -> None:
        while numbers := reader.recv(1):
            if numbers[0] in ENDING_SIGNALS:
                ending.signalled(numbers[0])

    def forget() -> None:
        """Restore the default handlers in a forked process (a data loader)."""
        signal.set_wakeup_fd(-1)
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    with caught_signals() as reader:
        os.register_at_fork(after_in_child=forget)
        threading.Thread(target=watch, args=(reader,), daemon=True).start()
        yield
