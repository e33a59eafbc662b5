"""The rates of kernels on a device: matrix products by their size, memory traffic, launches."""

from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import ConfigDict

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.devices import ACCELERATORS, Accelerator, accelerator


@dataclass(frozen=True, slots=True)
class Reached:
    """The achieved part of a device's peaks.

    A matrix product of F FLOPs reaches ``matmul * F / (F + half_flops)`` of the peak: half of
    ``matmul`` at ``half_flops``. ``memory`` is the part of the memory bandwidth that other kernels
    reach, ``launch_seconds`` what each kernel takes in addition. ``dispatch_seconds`` is what the
    host needs to start a kernel while the device is at work: a layer lasts at least as long as it
    takes to start its kernels.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

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


A100 = Reached(
    matmul=0.765,
    half_flops=2.2e10,
    memory=0.562,
    launch_seconds=4.4e-6,
    source=(
        "fitted to iterations on DGX A100: 8 of Korthikanti et al. 2022, 10 of Narayanan's thesis, "
        "table 4.1; the host's time on small models in vTrain's data"
    ),
    dispatch_seconds=1e-4,
)
"""``python -m benchmarks.layout_fit`` gives the first four; docs/layouts.md has the errors."""

H100 = replace(
    A100,
    matmul=0.6,
    source=(
        "the A100's fractions, but products at 0.6 of the peak: fitted to Megatron-LM's table of 9 "
        "GPTs on H100 of 2024"
    ),
)
"""``benchmarks/layout_h100.py`` has the table; Llama 3 405B, which is not in it, is 8 % slower."""

B200 = replace(
    A100,
    matmul=0.49,
    source=(
        "the A100's fractions, but products at 0.49 of the peak: the mean of 514 products measured "
        "on B200 by SimuMax, configs/system/b200_bf16_ceperm.json; no iteration is fitted"
    ),
)
"""``benchmarks/layout_simumax.py`` has 43 iterations that are not fitted."""


def _not_measured(kind: str) -> Reached:
    return replace(A100, source=f"the A100's fractions on the peaks of {kind}; not measured")


REACHED: dict[str, Reached] = {kind: _not_measured(kind) for kind in ACCELERATORS} | {
    "a100": A100,
    "a100-80gb": A100,
    "h100": H100,
    "h800": replace(H100, source=f"{H100.source}; not measured on H800"),
    "h200": replace(H100, source=f"{H100.source}; not measured on H200"),
    "b200": B200,
}
"""What kernels reach, by the kind of device."""


def reached_on(kind: str | Accelerator) -> Reached:
    """The rates that kernels reach on a kind of device, which is named or the user's own.

    Raises
    ------
    InputError
        If the name is not known.
    """
    card = accelerator(kind)
    return REACHED.get(card.name) or _not_measured(card.name)
