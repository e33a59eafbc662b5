"""What kernels reach on a device: matrix products by their size, memory traffic, launches."""

from dataclasses import dataclass, replace

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.devices import ACCELERATORS


@dataclass(frozen=True, slots=True)
class Reached:
    """The achieved part of a device's peaks.

    A matrix product of F FLOPs reaches ``matmul * F / (F + half_flops)`` of the peak: half of
    ``matmul`` at ``half_flops``. ``memory`` is the part of the memory bandwidth that other kernels
    reach, ``launch_seconds`` what each kernel takes in addition. ``dispatch_seconds`` is what the
    host needs to start a kernel while the device is at work: a layer lasts at least as long as it
    takes to start its kernels.
    """

    matmul: float
    half_flops: float
    memory: float
    launch_seconds: float
    source: str
    dispatch_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("matmul", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} must be in (0, 1], got {getattr(self, name):g}")
        for name in ("half_flops", "launch_seconds", "dispatch_seconds"):
            if not 0 <= getattr(self, name) < 1e15:
                raise InputError(f"{name} must not be negative, got {getattr(self, name):g}")


_A100 = Reached(
    matmul=0.765,
    half_flops=2.2e10,
    memory=0.562,
    launch_seconds=4.4e-6,
    source=(
        "fitted to 8 iteration times of Korthikanti et al. 2022 and 10 of Narayanan's thesis, "
        "table 4.1, on DGX A100 80 GB"
    ),
)
REACHED: dict[str, Reached] = {
    name: _A100
    if name.startswith("a100")
    else replace(_A100, source="the A100's fractions of this device's peaks; not measured")
    for name in ACCELERATORS
}
"""By the device's kind."""
