"""A roll call through the job's store: which ranks still answer, after a rank lost another.

A thread of every rank looks for the question. It answers even while the main thread computes or
waits; only a process that is stopped, killed, unreachable or stuck outside Python does not.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LOOK_SECONDS = 0.5  # between two looks for the question


def address() -> str:
    """Where this process is: its machine, launcher and number."""
    return f"{socket.gethostname()} {os.getppid()} {os.getpid()}"


@dataclass(frozen=True, slots=True)
class RollCall:
    """The roll call of a job, as one of its ranks sees it.

    Parameters
    ----------
    store
        A connection to the job's store that the main thread does not use.
    prefix
        The beginning of the keys.
    rank
        This one.
    """

    store: "Store"
    prefix: str
    rank: int
    world_size: int

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
                if self.store.check([self._question]):
                    self.store.set(self._answer(self.rank), "")
                    return

    def ask(self) -> None:
        """Ask all ranks to answer."""
        self.store.set(self._question, "")

    def silent(self) -> list[int]:
        """The other ranks that have not answered."""
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        return [rank for rank in others if not self.store.check([self._answer(rank)])]

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
    def _question(self) -> str:
        return f"{self.prefix}/question"

    def _answer(self, rank: int) -> str:
        return f"{self.prefix}/answer/{rank}"
