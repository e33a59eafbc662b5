"""Accelerators by name: peaks and links from the manufacturers' datasheets, memory as torch has it.

The figures and their sources are lines of ``kinds.csv``; here is what holds for all of them.

Peaks are dense; datasheets of NVIDIA since A100 print twice as much, with structured sparsity.
Memory is what ``torch.cuda`` prints as a device's total ("total capacity" in its errors, "CUDA
capacity" in torchtitan's logs), the least of what was found in public logs: 79.10 to 79.65 GiB of
an "80 GB" H100. It is before the driver's context and the communication library, which are a
stack's reserve (``stack_memory.py``). Where nothing was found it is the datasheet's, as said there.

Links in servers are NVLink of the second to fifth generation and Infinity Fabric; a pair of a DGX-1
may have one NVLink only. Cards without them exchange over PCIe: 24 and 48 GB/s (generations 4 and
5), of which 0.812 are what NCCL counts through a CPU; 20 and 27 GB/s, as it counts between CPUs,
for cards that have no peer-to-peer and copy through the host's memory (``topology.py``). Networks
are the network cards of DGX-1, DGX-2, DGX A100, DGX H100 and DGX B200 per device, and 400 Gb/s per
MI300X. TF32 is at half the rate of 16 bits where there is any.

To the host: PCIe 4 and 5 as measured on A100 (NVIDIA/nvbandwidth #53, #42) and on eight H100, H20
and H800 (#24). The link from a Grace CPU to each of its two GPUs is faster than its memory, of
whose 14 TB/s (GB300 NVL72) a GPU has a 72nd part.
"""

import csv
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    MAX_DEVICES,
    MIN_MEMORY,
    parse_bytes,
    require_amount,
    require_bandwidth,
    require_count,
)

GENERIC = "generic"
"""The kind of device where none is named."""

NVLINK = 25e9
"""Bytes/s per direction of one NVLink of the second to fourth generation (V100, A100, H100;
NVIDIA's datasheets)."""

MOST_PCIE = 64e9  # bytes/s of 16 lanes of the fifth generation
_MIN_FLOPS = 1e9  # FLOP/s; anything below is a number of TFLOP/s without its unit


@documents.record
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
    format: Literal["stagewright-device"] = "stagewright-device"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if re.fullmatch(r"[^\s,:=/]+", self.name) is None or self.name.endswith(".json"):
            raise InputError(
                f"name {self.name!r}: a kind is one word without , : = or /, for example l40"
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


GENERIC_KIND = Accelerator(
    GENERIC, 40e9, 1500e9, 20e12, 300e12, has_bf16=True, tf32_flops=150e12,
    source="no device in particular, an A100 in round numbers",
)  # fmt: skip
"""An A100 in round numbers. Its links are not known: the user's machines have their own."""


def _kind(row: Mapping[str, str]) -> Accelerator:
    """The kind of a row of ``kinds.csv``: rates in GB/s and TFLOP/s, empty where not known."""

    def amount(column: str, unit: str) -> float | None:
        return float(f"{row[column]}{unit}") if row[column] else None

    return Accelerator(
        row["name"],
        parse_bytes(row["memory"], "memory"),
        float(row["memory_bandwidth"] + "e9"),
        float(row["fp32"] + "e12"),
        float(row["fp16"] + "e12"),
        has_bf16=bool(row["bf16"]),
        fp8_flops=amount("fp8", "e12"),
        tf32_flops=amount("tf32", "e12"),
        nvlink_bytes_per_second=amount("nvlink", "e9") or NVLINK,
        nvlink_domain=int(row["domain"] or 8),
        server_bytes_per_second=amount("server", "e9"),
        network_bytes_per_second=amount("network", "e9"),
        pair_bytes_per_second=amount("pair", "e9"),
        host_bytes_per_second=amount("host", "e9"),
    )


with (Path(__file__).parent / "kinds.csv").open(encoding="utf-8", newline="") as _file:
    _ROWS = list(csv.DictReader(_file))

ACCELERATORS: dict[str, Accelerator] = {one.name: one for one in (GENERIC_KIND, *map(_kind, _ROWS))}
SOURCES: dict[str, str] = {row["name"]: row["source"] for row in _ROWS}
"""Where the figures of the kinds are from."""


def accelerator(kind: str | Accelerator) -> Accelerator:
    """The accelerator called ``kind``, in upper or lower case; an accelerator is returned as it is.

    Raises InputError if the name is not in the table.
    """
    found = known_kind(kind)
    if found is None:
        known = ", ".join(sorted(ACCELERATORS))
        raise InputError(
            f"device {kind!r} is not known; known are {known}; or give the JSON file of a kind "
            "of your own"
        )
    return found


def known_kind(kind: str | Accelerator) -> Accelerator | None:
    """The accelerator called ``kind`` as of :func:`accelerator`; None if it is not in the table."""
    return ACCELERATORS.get(kind.lower()) if isinstance(kind, str) else kind


def kind_named(text: str) -> str | None:
    """The kind that a driver's or scheduler's name is of, such as NVIDIA-H100-80GB-HBM3.

    The words of a kind's name are in it, whatever separates them; the longest name counts. A card
    for PCIe is none of a kind with faster links.
    """
    if re.search(r"\dg\.\d+gb", text):  # a part of a GPU, as MIG names it
        return None
    found = [
        card
        for card in ACCELERATORS.values()
        if all(_has_word(text, word) for word in card.name.split("-"))
        and not (_has_word(text, "pcie") and (card.server_bytes_per_second or 0) > MOST_PCIE)
    ]
    return max((card.name for card in found), key=len, default=None)


def _has_word(text: str, word: str) -> bool:
    letters = r"[\W_]*".join(word)
    return re.search(rf"(?<![^\W_]){letters}(?![^\W_])", text, re.IGNORECASE) is not None


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
    own = documents.read(Accelerator, path)
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
