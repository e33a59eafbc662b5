"""What kernels reach on a device: matrix products by their size, memory traffic, launches."""

from dataclasses import dataclass

from stagewright.graphs.documents.errors import InputError


@dataclass(frozen=True, slots=True)
class Reached:
    """The achieved part of a device's peaks.

    A matrix product of F FLOPs reaches ``matmul * F / (F + half_flops)`` of the peak: half of
    ``matmul`` at ``half_flops``. ``memory`` is the part of the memory bandwidth that other kernels
    reach, ``launch_seconds`` what each kernel takes in addition.
    """

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
