"""The measuring device: its clock, its name, and how fast it is at a time.

A shared machine is not as fast at one time as at another. ``profile`` and ``run --trace`` both time
the same small computation between what they measure, so that drift is told from wrong predictions.
"""

import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

Seconds = Callable[[], float]
"""A measured time; on a GPU who asks for it waits until it is over."""


@dataclass(frozen=True, slots=True)
class MeasuringMachine:
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


DIGITS = 4  # significant digits of a measurement


def rounded(value: float) -> float:
    """A number with as many digits as a measurement has."""
    return float(f"{value:.{DIGITS}g}")


# The reference

_LAYERS, _WIDTH, _ROWS = 4, 512, 64  # of a microbatch: 1.5 ms, 1 MB of weights each layer


@cache
def layers_of_reference() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows (64, 512) and the weights (512, 512) of the layers that they pass through.

    With gradients they are 8 MB, which caches of a core do not hold, as little as a model's.
    """
    ones = torch.ones(_ROWS, _WIDTH, dtype=torch.float32)
    return ones, [(ones[:1] / _WIDTH).repeat(_WIDTH, 1).requires_grad_() for _ in range(_LAYERS)]


def reference_seconds(device: torch.device) -> float | None:
    """Seconds of a forward and a backward of the reference with torch's threads; None on a GPU.

    With one thread its own processor time: in a run, gloo's threads still end what a step has sent.
    """
    if device.type != "cpu":
        return None
    rows, weights = layers_of_reference()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    forward_and_backward(rows, [weights])
    return rounded(clock() - start)


def typical(
    seconds: Iterable[float | None], way: Callable[[list[float]], Any] = median
) -> float | None:
    """The median, or another mean, of those that are known; None without any."""
    known = [one for one in seconds if one is not None]
    return float(way(known)) if known else None


def forward_and_backward(
    values: torch.Tensor,
    parts: Sequence[Sequence[torch.Tensor]],
    after_forward: Callable[[], None] = lambda: None,
    after_backward: Callable[[], None] = lambda: None,
) -> None:
    """Layers ``parts`` by part, as stages have them; calls after the first of each direction."""
    graphs, gradient = [], values
    for i, part in enumerate(parts):
        given = values = values.detach().requires_grad_()
        for layer in part:
            values = values @ layer
        graphs.append((given, values))
        if i == 0:
            after_forward()
    for i, (given, values) in enumerate(reversed(graphs)):
        torch.autograd.backward(values, gradient)
        assert given.grad is not None
        gradient = given.grad
        if i == 0:
            after_backward()
