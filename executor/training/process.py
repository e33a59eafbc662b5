"""Measurements of this process by the operating system: waits for a core, and memory."""

import re
from contextlib import suppress
from pathlib import Path

import torch

from stagewright.executor.programs.trace import MemoryKind

_SCHEDULING = Path("/proc/thread-self/schedstat")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"


def waited_seconds() -> float | None:
    """How long this thread has been ready to run without a core; None but on Linux."""
    with suppress(OSError, IndexError):
        return 1e-9 * int(_SCHEDULING.read_bytes().split()[1])
    return None


class MemoryMeter:
    """The most memory that a rank has from now on.

    On a GPU it is what torch has allocated in this process. On a CPU it is resident memory above
    that of now: a model that is made later counts, one that was made before does not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._base = device, 0.0
        if device.type == "cpu":
            with suppress(OSError):
                CLEAR.write_text(_FORGET_PEAK)
            self._base = _resident("VmRSS") or 0.0

    @property
    def kind(self) -> MemoryKind:
        """The kind of memory: allocated on a GPU, or resident."""
        return "resident" if self._device.type == "cpu" else "allocated"

    def peak_bytes(self) -> float | None:
        """The peak so far; None where the system does not tell."""
        if self._device.type != "cpu":
            return float(torch.cuda.max_memory_allocated(self._device))
        peak = _resident("VmHWM")
        return None if peak is None else max(0.0, peak - self._base)


def _resident(name: str) -> float | None:
    """An entry of this process's status, in bytes; None but on Linux."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s*(\d+) kB", STATUS.read_text(), re.MULTILINE)
        if found is not None:
            return 1024.0 * int(found[1])
    return None
