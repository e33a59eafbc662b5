"""The topology of a server as hwloc's ``lstopo`` prints it, in XML or as text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.topology import Listed

_GENERATIONS = {5: 60.0, 4: 30.0}  # GB/s of 16 lanes, at least, by the generation of PCIe
_GPU_CLASSES = ("0302", "0380", "1200", "3D", "Display", "ProcessingAccelerator")
_VGA_CLASSES = ("0300", "VGA")  # a GPU only if a library of GPUs has it too
_OF_LIBRARY = re.compile(r"cuda|nvml|rsmi|opencl|ze")
_BANDWIDTHS = {"NVLinkBandwidth": "NVLINK", "XGMIBandwidth": "XGMI"}  # hwloc's matrices, in MB/s
_LINE = re.compile(r'( *)(?:PCI \S+ \((?P<pci>\w+)\)|(?P<type>\w+))(?:.*"(?P<name>[^"]+)")?')


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """An object of the tree, the class of a PCI device, and its link's rate in GB/s."""

    type: str
    parent: "_Item | None"
    name: str = ""
    pci_class: str = ""
    index: int = -1
    gigabytes_per_second: float = 0.0
    model: str | None = None

    @property
    def chain(self) -> "Iterator[_Item]":
        """The object and all that contain it, the innermost first."""
        item: _Item | None = self
        while item is not None:
            yield item
            item = item.parent


def lstopo(text: str, place: str) -> Listed:
    """The server of ``lstopo --of xml`` or ``lstopo --of console``, with the GPUs in its PCI tree.

    Pairs are joined by the nearest that they have in common: a PCIe switch, a host bridge, a CPU.
    NVLink and XGMI are in the XML where hwloc was built with the vendors' libraries.
    """
    root = _xml(text, place) if text.lstrip().startswith("<") else None
    items = list(_of_text(text) if root is None else _of_xml(root, None))
    parts = {
        item: [one for one in items if item in one.chain]
        for item in items
        if item.pci_class in (*_GPU_CLASSES, *_VGA_CLASSES)
    }
    gpus = [item for item, its in parts.items() if _is_gpu(item, its)]
    if not gpus:
        raise InputError(f"{place}: no GPUs; use lstopo --of xml --whole-io, and paste all of it")
    packages = sum(one.type in ("Package", "Socket") for one in items)
    links = [["X" if a is b else _joined(a, b, packages) for b in gpus] for a in gpus]
    found = (
        []
        if root is None
        else _bandwidths(root, [{one.index for one in parts[gpu]} for gpu in gpus])
    )
    rates: dict[str, float] = {}
    for i, j, name, rate in found:
        links[i][j] = f"{name}{rate / 1e9:g}"
        rates[links[i][j]] = rate
    widest = max(gpu.gigabytes_per_second for gpu in gpus)
    models = (one.model for gpu in gpus for one in parts[gpu] if one.model)
    return Listed(
        place,
        tuple(f"GPU{i}" for i in range(len(gpus))),
        tuple(map(tuple, links)),
        kind=next(models, None),
        cards=tuple(one.name for one in items if one.type == "OpenFabrics"),
        path_bytes_per_second=rates,
        lists_pcie_only=not rates,
        pcie=next((one for one, least in _GENERATIONS.items() if widest >= least), None),
    )


def _xml(text: str, place: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise InputError(f"{place}: not the XML of lstopo: {error}") from None


def _of_xml(node: ElementTree.Element, parent: _Item | None) -> Iterator[_Item]:
    """The objects below a node, parents first."""
    for child in node.findall("object"):
        has, infos = (
            child.attrib,
            {one.get("name"): one.get("value") for one in child.findall("info")},
        )
        kind = has["type"]
        if kind == "Bridge":
            kind = "HostBridge" if has.get("bridge_type", "").startswith("0") else "PCIBridge"
        if kind == "OSDev" and has.get("osdev_type") in ("3", "OpenFabrics"):
            kind = "OpenFabrics"
        item = _Item(
            kind,
            parent,
            has.get("name", ""),
            has.get("pci_type", "")[:4],
            int(has.get("gp_index", -1)),
            float(has.get("pci_link_speed", 0)),
            infos.get("GPUModel"),
        )
        yield item
        yield from _of_xml(child, item)


def _of_text(text: str) -> Iterator[_Item]:
    """The objects of the lines of the console's format, which are indented."""
    open_items: list[tuple[int, _Item]] = []
    for line in filter(str.strip, text.splitlines()):
        found = _LINE.match(line)
        if found is None:
            continue
        depth = len(found[1])
        open_items = [one for one in open_items if one[0] < depth]
        parent = open_items[-1][1] if open_items else None
        item = _Item(found["type"] or "PCI", parent, found["name"] or "", found["pci"] or "")
        open_items.append((depth, item))
        yield item


def _is_gpu(item: _Item, parts: Sequence[_Item]) -> bool:
    return item.pci_class in _GPU_CLASSES or any(_OF_LIBRARY.match(one.name) for one in parts)


def _joined(one: _Item, other: _Item, packages: int) -> str:
    """The path between two GPUs, by its name in ``nvidia-smi topo -m``."""
    above = set(other.chain)
    common = next((item.type for item in one.chain if item in above), "Machine")
    if common == "Machine":
        return "SYS" if packages > 1 else "NODE"
    return {"PCIBridge": "PIX", "HostBridge": "PHB"}.get(common, "NODE")


def _bandwidths(
    root: ElementTree.Element, gpus: Sequence[set[int]]
) -> Iterator[tuple[int, int, str, float]]:
    """Pairs of GPUs with NVLink or XGMI: their numbers, the link's name, and bytes/s.

    ``gpus`` has the indices of the objects of each GPU. Objects that are none are switches: a pair
    has over them what both reach.
    """
    for matrix in root:
        name = _BANDWIDTHS.get(matrix.get("name", ""))
        if name is None or not matrix.tag.startswith("distances2"):
            continue
        objects = [int(one.rpartition(":")[2]) for one in _words(matrix, "indexes")]
        values = list(map(int, _words(matrix, "u64values")))
        size = len(objects)
        rows = [values[i * size : (i + 1) * size] for i in range(size)]
        at = {gpu: i for i, one in enumerate(objects) for gpu, its in enumerate(gpus) if one in its}
        switches = [i for i in range(size) if i not in at.values()]
        for a, b in ((a, b) for a in at for b in at if a != b):
            rate = rows[at[a]][at[b]] or sum(min(rows[at[a]][k], rows[k][at[b]]) for k in switches)
            if rate:
                yield a, b, name, rate * 1e6


def _words(matrix: ElementTree.Element, tag: str) -> list[str]:
    return " ".join(one.text or "" for one in matrix.findall(tag)).split()
