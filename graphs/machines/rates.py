"""What kernels reach on a device: matrix products by their size, memory traffic, launches."""

from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import ConfigDict

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError


@dataclass(frozen=True, slots=True)
class Reached:
    """The achieved part of a device's peaks.

    A matrix product of F FLOPs reaches ``matmul * F / (F + half_flops)`` of the peak: half of
    ``matmul`` at ``half_flops``. ``memory`` is the part of the memory bandwidth that other kernels
    reach, ``launch_seconds`` what each kernel takes in addition.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    matmul: float
    half_flops: float
    memory: float
    launch_seconds: float
    source: str

    def __post_init__(self) -> None:
        for name in ("matmul", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} must be in (0, 1], got {getattr(self, name):g}")
        for name in ("half_flops", "launch_seconds"):
            if not 0 <= getattr(self, name) < 1e15:
                raise InputError(f"{name} must not be negative, got {getattr(self, name):g}")


A100 = Reached(
    matmul=0.775,
    half_flops=1.76e10,
    memory=0.72,
    launch_seconds=9e-6,
    source="fitted to the eight iterations of Korthikanti et al. 2022 on A100",
)


def reached_on(kind: str) -> Reached:
    """What kernels reach on a kind of device."""
    if kind.startswith("a100"):
        return A100
    return replace(A100, source=f"the A100's fractions on the peaks of {kind}")
