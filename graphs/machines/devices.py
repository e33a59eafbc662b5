"""Accelerators by name: peaks and links from the manufacturers' datasheets, memory as torch has it.

Peaks are dense; datasheets of NVIDIA since A100 print twice as much, with structured sparsity.
Memory is what ``torch.cuda`` prints as a device's total ("total capacity" in its errors, "CUDA
capacity" in torchtitan's logs), the least of what was found in public logs: 79.10 to 79.65 GiB of
an "80 GB" H100. It is before the driver's context and the communication library, which are a
stack's reserve (``stack_memory.py``). Where nothing was found it is the datasheet's, as said there.
"""

import os
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    MAX_DEVICES,
    MIN_MEMORY,
    require_amount,
    require_bandwidth,
    require_count,
)

FORMAT: Literal["stagewright-device"] = "stagewright-device"
VERSION: Literal[1] = 1

GENERIC = "generic"
"""The kind of device where none is named."""

NVLINK = 25e9
"""Bytes/s per direction of one NVLink of the second to fourth generation (V100, A100, H100;
NVIDIA's datasheets)."""

_GIB = 2**30

_MIN_FLOPS = 1e9  # FLOP/s; anything below is a number of TFLOP/s without its unit


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Peaks, memory and links of one kind of device.

    ``fp16_flops`` is the dense peak with fp32 accumulation, on tensor cores if it has them; that of
    bf16 is the same where the device ``has_bf16``. ``fp8_flops`` is None without fp8 products,
    ``tf32_flops`` without products of fp32 numbers rounded to 19 bits.

    Links are bytes/s per direction, None if not known: ``server_bytes_per_second`` from a device to
    the others of its server, ``pair_bytes_per_second`` to one of them, if that is less (links that
    join pairs, without a switch), ``network_bytes_per_second`` out of the server, per device;
    ``host_bytes_per_second`` to the host's memory while all devices use it, and
    ``nvlink_bytes_per_second`` of one NVLink.
    ``nvlink_domain`` is the most devices that are as near to each other as those of a server.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    name: str
    memory_bytes: float
    memory_bytes_per_second: float
    fp32_flops: float
    fp16_flops: float
    has_bf16: bool = False
    fp8_flops: float | None = None
    tf32_flops: float | None = None
    server_bytes_per_second: float | None = None
    network_bytes_per_second: float | None = None
    pair_bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None
    nvlink_bytes_per_second: float = NVLINK
    nvlink_domain: int = 8
    source: str | None = None
    format: Literal["stagewright-device"] = FORMAT
    version: Literal[1] = VERSION

    def __post_init__(self) -> None:
        if re.fullmatch(r"[^\s,:=/]+", self.name) is None or self.name.endswith(".json"):
            raise InputError(
                f"name {self.name!r}: a kind is one word without , : = or /, for example l40s"
            )
        require_amount(self.memory_bytes, "memory_bytes")
        if self.memory_bytes < MIN_MEMORY:
            raise InputError(
                f"memory_bytes is {self.memory_bytes:g}, less than 1 MB: is a unit missing? "
                f"{self.memory_bytes:g} GB is {self.memory_bytes * 1e9:g}"
            )
        for field in self.__dataclass_fields__:
            value = getattr(self, field)
            if field.endswith("_per_second") and value is not None:
                require_bandwidth(value, field)
            elif field == "nvlink_domain":
                require_count(value, field, MAX_DEVICES)
            elif field.endswith("_flops") and value is not None:
                _require_flops(value, field)

    def __str__(self) -> str:
        """The name, with where the figures are from if that is said."""
        return self.name if self.source is None else f"{self.name} ({self.source})"


def _require_flops(value: float, field: str) -> None:
    require_amount(value, field)
    if value < _MIN_FLOPS:
        raise InputError(
            f"{field} is {value:g} FLOP/s, less than 1 GFLOP/s: is a unit missing? "
            f"{value:g} TFLOP/s is {value * 1e12:g}"
        )


# To the host: PCIe 4 and 5 as measured on A100 (NVIDIA/nvbandwidth #53, #42) and on eight H100, H20
# and H800 (#24). The link from a Grace CPU to each of its two GPUs is faster than its memory, of
# whose 14 TB/s (GB300 NVL72) a GPU has a 72nd part.
_PCIE_4, _PCIE_5, _GRACE = 25e9, 52.8e9, 194e9

# Links in servers are NVLink of the second to fifth generation and seven Infinity Fabric links (the
# manufacturers' datasheets); a pair of a DGX-1 may have one NVLink only. Networks are the network
# cards of DGX-1, DGX-2, DGX A100, DGX H100 and DGX B200 per device, and 400 Gb/s per MI300X.
# TF32 is at half the rate of 16 bits in the datasheets of all that have it.
ACCELERATORS: dict[str, Accelerator] = {
    accelerator.name: accelerator
    for accelerator in (
        # An A100 in round numbers. Its links are not known: the user's machines have their own.
        Accelerator(
            GENERIC, 40e9, 1500e9, 20e12, 300e12, has_bf16=True, tf32_flops=150e12,
            source="no device in particular, an A100 in round numbers",
        ),
        # One of the board's two GPUs; the datasheet's memory.
        Accelerator("k80", 12e9, 240e9, 4.37e12, 4.37e12),
        # fp16 runs as fp32; the datasheet's memory.
        Accelerator("1080ti", 11e9, 484e9, 11.3e12, 11.3e12),
        # SXM2, as V100; NVLink of the first generation. Memory of the PCIe board: 16,280 MiB.
        Accelerator("p100", 16280 * 2**20, 732e9, 10.6e12, 21.2e12, nvlink_bytes_per_second=20e9),
        # Of the 15.77 GiB that torch has (meta-llama/llama #918) the datasheet's: plans of DGX-1
        # have no reserve.
        Accelerator(
            "v100", 16e9, 900e9, 15.7e12, 125e12,
            server_bytes_per_second=150e9, network_bytes_per_second=6.25e9,
            pair_bytes_per_second=25e9,
        ),
        # Memory: liucongg/ChatGLM-Finetuning #73, and others' 31.73.
        Accelerator(
            "v100-32gb", 31.73 * _GIB, 900e9, 15.7e12, 125e12,
            server_bytes_per_second=150e9, network_bytes_per_second=12.5e9,
        ),
        Accelerator("t4", 14.56 * _GIB, 320e9, 8.1e12, 65e12),
        # SXM4. Memory: 39.38 to 39.56 GiB, by the driver.
        Accelerator(
            "a100", 39.38 * _GIB, 1555e9, 19.5e12, 312e12, has_bf16=True, tf32_flops=156e12,
            server_bytes_per_second=300e9, network_bytes_per_second=25e9,
            host_bytes_per_second=_PCIE_4,
        ),
        # Memory: lianqi1008/Control-GIC #10; 79.25 of older drivers.
        Accelerator(
            "a100-80gb", 79.14 * _GIB, 2039e9, 19.5e12, 312e12, has_bf16=True, tf32_flops=156e12,
            server_bytes_per_second=300e9, network_bytes_per_second=25e9,
            host_bytes_per_second=_PCIE_4,
        ),
        # SXM5. Memory: pytorch/torchtitan #1789 (73.32 GiB are 92.70 %).
        Accelerator(
            "h100", 79.10 * _GIB, 3350e9, 67e12, 989e12, has_bf16=True, fp8_flops=1979e12,
            tf32_flops=494.5e12, server_bytes_per_second=450e9, network_bytes_per_second=50e9,
            host_bytes_per_second=_PCIE_5,
        ),
        # An H100 with less FP64 and NVLink (DeepSeek-AI, arXiv 2505.09343, sections 4.1 and 4.3),
        # who reach 160 GB/s of the 200 in a server. Its memory is the H100's.
        Accelerator(
            "h800", 79.10 * _GIB, 3350e9, 67e12, 989e12, has_bf16=True, fp8_flops=1979e12,
            tf32_flops=494.5e12, server_bytes_per_second=200e9, network_bytes_per_second=50e9,
            host_bytes_per_second=_PCIE_5,
        ),
        # Memory: 139.72 to 139.83 GiB, the latter torchtitan's log.
        Accelerator(
            "h200", 139.72 * _GIB, 4800e9, 67e12, 989e12, has_bf16=True, fp8_flops=1979e12,
            tf32_flops=494.5e12, server_bytes_per_second=450e9, network_bytes_per_second=50e9,
            host_bytes_per_second=_PCIE_5,
        ),
        # A DGX B200's 64 TB/s, an HGX B200's 600 TFLOP/s and 18 PFLOP/s, over 8 GPUs.
        Accelerator(
            "b200", 178.35 * _GIB, 8000e9, 75e12, 2250e12, has_bf16=True, fp8_flops=4500e12,
            tf32_flops=1125e12, server_bytes_per_second=900e9, network_bytes_per_second=50e9,
            nvlink_bytes_per_second=50e9, host_bytes_per_second=_PCIE_5,
        ),
        # Of a GB200 NVL72 and a GB300 NVL72: a 72nd part of their figures.
        Accelerator(
            "gb200", 184.31 * _GIB, 8000e9, 80e12, 2500e12, has_bf16=True, fp8_flops=5000e12,
            tf32_flops=1250e12, server_bytes_per_second=900e9, network_bytes_per_second=50e9,
            nvlink_bytes_per_second=50e9, nvlink_domain=72,
            host_bytes_per_second=_GRACE,
        ),
        Accelerator(
            "gb300", 276.50 * _GIB, 8000e9, 80e12, 2500e12, has_bf16=True, fp8_flops=5000e12,
            tf32_flops=1250e12, server_bytes_per_second=900e9, network_bytes_per_second=100e9,
            nvlink_bytes_per_second=50e9, nvlink_domain=72,
            host_bytes_per_second=_GRACE,
        ),
        # An eighth of a DGX B300's 72 PFLOP/s of sparse fp8.
        Accelerator(
            "b300", 267.69 * _GIB, 8000e9, 75e12, 2250e12, has_bf16=True, fp8_flops=4500e12,
            tf32_flops=1125e12, server_bytes_per_second=900e9, network_bytes_per_second=100e9,
            nvlink_bytes_per_second=50e9, host_bytes_per_second=_PCIE_5,
        ),
        # Memory: modelscope/DiffSynth-Studio #1238.
        Accelerator(
            "h20", 95.00 * _GIB, 4000e9, 44e12, 148e12, has_bf16=True, fp8_flops=296e12,
            tf32_flops=74e12, server_bytes_per_second=450e9, network_bytes_per_second=50e9,
            host_bytes_per_second=_PCIE_5,
        ),
        # AMD's datasheet; fp32 as vectors and as matrices. Memory: 191.69 to 191.98 GiB.
        Accelerator(
            "mi300x", 191.69 * _GIB, 5300e9, 163.4e12, 1307.4e12, has_bf16=True,
            fp8_flops=2614.9e12, tf32_flops=653.7e12,
            server_bytes_per_second=448e9, network_bytes_per_second=50e9,
            pair_bytes_per_second=64e9,
        ),
    )
}  # fmt: skip


def accelerator(kind: str | Accelerator) -> Accelerator:
    """The accelerator called ``kind``, in upper or lower case; an accelerator is returned as it is.

    Raises InputError if the name is not in the table.
    """
    if isinstance(kind, Accelerator):
        return kind
    try:
        return ACCELERATORS[kind.lower()]
    except KeyError:
        known = ", ".join(sorted(ACCELERATORS))
        raise InputError(
            f"device {kind!r} is not known; known are {known}; or give the JSON file of a kind "
            "of your own"
        ) from None


def require_arithmetic(card: Accelerator, precision: str) -> None:
    """Refuse a device without products in that type: bf16, fp8 or tf32; all have the others."""
    if precision == "bf16" and not card.has_bf16:
        raise InputError(f"precision bf16: {card.name} has no bf16 arithmetic; it may be fp16")
    if precision in ("fp8", "tf32") and getattr(card, f"{precision}_flops") is None:
        every = ACCELERATORS.values()
        able = sorted(one.name for one in every if getattr(one, f"{precision}_flops") is not None)
        raise InputError(
            f"precision {precision}: {card.name} has no {precision} arithmetic; "
            f"{', '.join(able)} have it"
        )


def read_kind(kind: str) -> str | Accelerator:
    """The user's own kind, if ``kind`` is the path of its JSON file; else the name as it is.

    Raises InputError if the file is not valid, or gives its kind the name of one in the table.
    """
    return read_accelerator(kind) if kind.lower().endswith(".json") else kind


def read_accelerator(path: str | os.PathLike[str]) -> Accelerator:
    """The kind of device that the JSON file at ``path`` describes; see :func:`read_kind`."""
    own = documents.read(Accelerator, path, FORMAT, VERSION)
    if own.name.lower() in ACCELERATORS:
        raise InputError(
            f"{path}: {own.name!r} is a kind that is built in; choose another name, for example "
            f"{own.name}-own"
        )
    return own


def kind_of_device(
    kind: str | Accelerator, memory_bytes: float | None
) -> tuple[str, float, float | None]:
    """Kind, memory and fp32 peak of a device; for kinds not in the table, memory is required.

    Raises InputError if the kind is unknown and no memory is given.
    """
    if memory_bytes is not None and isinstance(kind, str) and kind.lower() not in ACCELERATORS:
        return kind, memory_bytes, None
    card = accelerator(kind)
    memory = card.memory_bytes if memory_bytes is None else memory_bytes
    return card.name, memory, card.fp32_flops
