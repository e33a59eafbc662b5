"""Accelerators by name: peaks and memory from the manufacturers' datasheets.

Peaks are dense; datasheets of NVIDIA since A100 print twice as much, with structured sparsity.
"""

from dataclasses import dataclass

from stagewright.graphs.documents.errors import InputError


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Peaks of one device.

    ``fp16_flops`` is the dense peak with fp32 accumulation, on tensor cores if it has them; that of
    bf16 is the same where the device ``has_bf16``. ``fp8_flops`` is None without fp8 products.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_second: float
    fp32_flops: float
    fp16_flops: float
    has_bf16: bool = False
    fp8_flops: float | None = None


ACCELERATORS: dict[str, Accelerator] = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("k80", 12e9, 240e9, 4.37e12, 4.37e12),  # one of the board's two GPUs
        Accelerator("1080ti", 11e9, 484e9, 11.3e12, 11.3e12),  # fp16 runs as fp32
        Accelerator("p100", 16e9, 732e9, 10.6e12, 21.2e12),  # SXM2
        Accelerator("v100", 16e9, 900e9, 15.7e12, 125e12),  # SXM2
        Accelerator("v100-32gb", 32e9, 900e9, 15.7e12, 125e12),
        Accelerator("t4", 16e9, 320e9, 8.1e12, 65e12),
        Accelerator("a100", 40e9, 1555e9, 19.5e12, 312e12, has_bf16=True),  # SXM4
        Accelerator("a100-80gb", 80e9, 2039e9, 19.5e12, 312e12, has_bf16=True),
        Accelerator("h100", 80e9, 3350e9, 67e12, 989e12, has_bf16=True, fp8_flops=1979e12),  # SXM5
        # An H100 with less FP64 and NVLink (DeepSeek-AI, arXiv 2505.09343, section 4.1).
        Accelerator("h800", 80e9, 3350e9, 67e12, 989e12, has_bf16=True, fp8_flops=1979e12),
        Accelerator("h200", 141e9, 4800e9, 67e12, 989e12, has_bf16=True, fp8_flops=1979e12),
        # A DGX B200's 1440 GB and 64 TB/s, an HGX B200's 600 TFLOP/s and 18 PFLOP/s, over 8 GPUs.
        Accelerator("b200", 180e9, 8000e9, 75e12, 2250e12, has_bf16=True, fp8_flops=4500e12),
        # AMD's datasheet; fp32 as vectors and as matrices.
        Accelerator(
            "mi300x", 192e9, 5300e9, 163.4e12, 1307.4e12, has_bf16=True, fp8_flops=2614.9e12
        ),
    )
}


def accelerator(name: str) -> Accelerator:
    """The accelerator called ``name``, in any case.

    Raises
    ------
    InputError
        If the name is not in the table.
    """
    try:
        return ACCELERATORS[name.lower()]
    except KeyError:
        known = ", ".join(sorted(ACCELERATORS))
        raise InputError(f"device {name!r} is not known; known are {known}") from None


def kind_of_device(kind: str, memory_bytes: float | None) -> tuple[str, float, float | None]:
    """Kind, memory and fp32 peak of a device; for kinds not in the table, memory is required.

    Raises
    ------
    InputError
        If the kind is unknown and no memory is given.
    """
    if memory_bytes is not None and kind.lower() not in ACCELERATORS:
        return kind, memory_bytes, None
    card = accelerator(kind)
    memory = card.memory_bytes if memory_bytes is None else memory_bytes
    return card.name, memory, card.fp32_flops
