"""Threads that watch the messages in flight, for a trace."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from stagewright.executor.training.interpreter.arrival import waited
from stagewright.executor.training.ranks.rank import Place


class Watchers:
    """Threads for up to ``messages`` that are in flight at one time."""

    def __init__(self, place: Place, messages: int) -> None:
        self._place = place
        self._threads = ThreadPoolExecutor(messages)  # they start when they are needed

    def watch(self, works: Sequence[dist.Work]) -> Callable[[], float]:
        """A function that returns when ``works`` were done.

        With gloo, only a thread that waits for a message knows its time. With NCCL, a wait belongs
        to the stream of this thread, which waits itself when it has to.
        """
        if self._place.wire.type == "cpu":
            return self._threads.submit(waited, works).result

        def synchronized() -> float:
            waited(works)
            torch.cuda.synchronize(self._place.device)
            return time.perf_counter()

        return synchronized
