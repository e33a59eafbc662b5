"""The measured machine: its name and its clock."""

import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

Seconds = Callable[[], float]
"""A measured time; on a GPU who asks for it waits until it is over."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The measuring device: ``kind`` is the device kind that clusters use for it."""

    device: torch.device
    threads: int = 1
    kind: str = ""

    @property
    def device_kind(self) -> str:
        """``kind``, or else the name of the device."""
        if self.kind:
            return self.kind
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu core"
        return name.lower().replace(" ", "-")

    @property
    def clock(self) -> str:
        """The kind of time that is measured."""
        return "processor time" if self._counts_processor_time else "elapsed time"

    def __str__(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.threads} of {os.cpu_count()} cores of {_processor()}, {self.clock}"

    @property
    def _counts_processor_time(self) -> bool:
        return self.device.type == "cpu" and self.threads == 1

    def timed(self, work: Callable[[], Any]) -> tuple[Seconds, Any]:
        """The seconds that ``work`` takes, and its result.

        On a GPU they are those between two events of its stream, and nothing waits before they are
        asked for: as in a run, the host issues what follows while the GPU computes, and a kernel
        that is issued too late for the GPU takes the time of its launch.
        """
        if self.device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            result = work()
            ended.record()
            return partial(_between, began, ended), result
        clock = time.process_time if self._counts_processor_time else time.perf_counter
        start = clock()
        result = work()
        seconds = clock() - start
        return lambda: seconds, result


def _between(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    ended.synchronize()
    milliseconds: float = began.elapsed_time(ended)
    return 1e-3 * milliseconds


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _processor() -> str:
    """The processor's name, with family and model if the kernel reports them."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE))
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"
