"""Machines as the tools on them print them: topologies of a server, network cards, lists of nodes.

A tool's text is told by what only that tool prints, see ``_TOOLS``. Nodes that a scheduler says are
out of service are left out.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product, takewhile
from typing import Any

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_DEVICES, require_count
from stagewright.graphs.importers.hwloc import lstopo
from stagewright.graphs.machines.topology import PATHS, Listed

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # nvidia-smi underlines the header
_GPU = re.compile(r"GPU\d+")
_NIC = re.compile(r"^\s*(NIC\d+):\s*(\S+)", re.MULTILINE)  # a line of nvidia-smi's legend
_CARD = re.compile(r"^\s*CA '([^']+)'", re.MULTILINE)
_PORT = re.compile(r"State:\s*Active\b.*?Rate:\s*(\d+)", re.DOTALL)  # of ibstat, in Gb/s
_GRES = re.compile(r"gpu(?::([^:,(]+))?(?::no_consume)?:(\d+)")
_OUT = re.compile(r"\bdown|drain|drng|fail|maint|future|inval|respond", re.IGNORECASE)
_RANGE = re.compile(r"\[([^\]]*)\]")

_RESOURCES = (
    "nvidia.com/gpu", "amd.com/gpu", "habana.ai/gaudi", "aws.amazon.com/neuron", "google.com/tpu",
)  # fmt: skip
_PRODUCTS = (
    "nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator",
    "cloud.google.com/gke-tpu-accelerator", "k8s.amazonaws.com/accelerator",
)  # fmt: skip


def listed_machines(text: str, place: str) -> tuple[Listed, ...]:
    """The servers, or the network cards, that a tool's output lists.

    Raises InputError in one line that begins with ``place``, such as a file's name, and names the
    row and column, if no tool's output is recognised or the output is not complete.
    """
    for mark, read in _TOOLS:
        if re.search(mark, text, re.MULTILINE):
            found = read(text, place)
            return found if isinstance(found, tuple) else (found,)
    raise InputError(
        f"{place}: no output of nvidia-smi topo -m, rocm-smi --showtopo, lstopo --of xml, ibstat, "
        "scontrol show node, sinfo -N -o '%N %G %t' or kubectl get nodes -o json; paste the whole "
        "output"
    )


def listed_server(text: str, place: str) -> Listed:
    """The one server whose links a tool's output lists; see :func:`listed_machines`."""
    found = listed_machines(text, place)
    if len(found) > 1 or found[0].links is None:
        raise InputError(f"{place}: a list without links; give what describes one server")
    return found[0]


def with_cards(listings: Iterable[Listed]) -> list[Listed]:
    """The servers, with the network cards that are listed after them."""
    found: list[Listed] = []
    for one in listings:
        if one.devices:
            found.append(one)
            continue
        if not found:
            raise InputError(
                f"{one.place}: network cards without a server; give the file of the server first"
            )
        found[-1] = replace(
            found[-1], cards=one.cards, card_bytes_per_second=one.card_bytes_per_second
        )
    return found


def nvidia_smi(text: str, place: str) -> Listed:
    """The server of ``nvidia-smi topo -m``; CPU affinities are ignored.

    Network cards are columns like NIC0, which the legend names, or like mlx5_0.
    """
    columns, table = _smi_table(text, place)
    names = tuple(column for column in columns if _GPU.fullmatch(column))
    links = [[_smi_entry(table, columns, a, b, place) for b in names] for a in names]
    _require_symmetric(links, names, place)
    legend = dict(_NIC.findall(text))
    cards = tuple(legend.get(one, one) for one in columns if not _GPU.fullmatch(one))
    return Listed(place, names, tuple(map(tuple, links)), cards=cards)


def rocm_smi(text: str, place: str) -> Listed:
    """The server of ``rocm-smi --showtopo``: XGMI links of one hop, and PCIe by the hops.

    GPUs that XGMI joins over another GPU have no direct link. Over PCIe three hops, or no number of
    them, are through the link between CPUs.
    """
    kinds = _rocm_table(text, "Link Type", place)
    hops = _rocm_table(text, "Hops", place) if "Hops between" in text else {}
    links = [
        [_rocm_link(a, b, kind, hops.get(a, {}).get(b, "")) for b, kind in row.items()]
        for a, row in kinds.items()
    ]
    names = tuple(kinds)
    _require_symmetric(links, names, place)
    return Listed(place, names, tuple(map(tuple, links)))


def _rocm_link(a: str, b: str, kind: str, hops: str) -> str:
    if a == b:
        return "X"
    if kind == "XGMI":
        return "XGMI" if hops in ("", "1") else "-"
    return "PHB" if hops in ("1", "2") else "SYS"


def _rocm_table(text: str, title: str, place: str) -> dict[str, dict[str, str]]:
    """The rows below a title, by GPU and GPU."""
    header, *lines = [
        line.split() for line in text.partition(f"{title} between two GPUs")[2].splitlines()[1:]
    ] or [[]]
    rows = {line[0]: line[1:] for line in takewhile(lambda one: one[:1] != [], lines)}
    if not header or not all(map(_GPU.fullmatch, header)):
        raise InputError(f"{place}: no table of the {title} between two GPUs; paste all of it")
    for name in header:
        if len(rows.get(name, ())) != len(header):
            raise InputError(f"{place}: {title}: the row of {name} needs {len(header)} entries")
    return {name: dict(zip(header, rows[name], strict=True)) for name in header}


def ibstat(text: str, place: str) -> Listed:
    """The active network cards of ``ibstat``, and their rates."""
    parts = _CARD.split(text)[1:]
    rates = {
        card: sum(map(int, _PORT.findall(_ports(ports)))) * 1e9 / 8
        for card, ports in zip(parts[::2], parts[1::2], strict=True)
    }
    active = {card: rate for card, rate in rates.items() if rate}
    if not active:
        raise InputError(f"{place}: ibstat lists no port whose State is Active")
    return Listed(place, cards=tuple(active), card_bytes_per_second=tuple(active.values()))


def _ports(text: str) -> str:
    """The text of the active ports."""
    return "".join(one for one in re.split(r"Port \d+:", text) if "State: Active" in one)


def slurm_nodes(text: str, place: str) -> tuple[Listed, ...]:
    """The nodes of ``scontrol show node``, or of the lines NodeName=... of slurm.conf."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    usual: dict[str, str] = {}
    rows = []
    for block in re.split(r"(?=\bNodeName=)", "\n".join(lines))[1:]:
        one = usual | dict(re.findall(r"(\w+)=(\S+)", block.split("\n\n")[0]))
        if one["NodeName"] == "DEFAULT":
            usual = one
            continue
        rows += [
            (name, one.get("Gres", ""), one.get("State", ""))
            for name in host_names(one["NodeName"])
        ]
    return _of_gres(rows, place)


def sinfo(text: str, place: str) -> tuple[Listed, ...]:
    """The nodes of ``sinfo`` with its columns NODELIST, GRES and STATE; a node counts once."""
    header, *lines = [line.split() for line in text.splitlines() if line.strip()]
    if "GRES" not in header:
        raise InputError(f"{place}: sinfo prints no GRES; use sinfo -N -o '%N %G %t'")
    at = {name: header.index(name) for name in header}
    rows = []
    for line in lines:
        if len(line) != len(header):
            raise InputError(f"{place}: {' '.join(line)!r} has not the columns {' '.join(header)}")
        state = line[at["STATE"]] if "STATE" in at else ""
        rows += [(name, line[at["GRES"]], state) for name in host_names(line[at["NODELIST"]])]
    return _of_gres(rows, place)


def kubernetes(text: str, place: str) -> tuple[Listed, ...]:
    """The nodes of ``kubectl get nodes -o json`` that are ready and have devices."""
    try:
        data = json.loads(text)
        items = data.get("items", [data])
        rows = [_kubernetes_node(one, place) for one in items]
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{place}: not the JSON of kubectl get nodes -o json") from None
    return _grouped([one for one in rows if one is not None], place)


def _kubernetes_node(node: Mapping[str, Any], place: str) -> tuple[str, int, str, bool] | None:
    """Kind, devices, NVLink domain and service of a node; None if it has no devices."""
    labels, status = node["metadata"].get("labels", {}), node["status"]
    counts = [int(status.get("allocatable", {}).get(one, 0)) for one in _RESOURCES]
    if not any(counts):
        return None
    kind = next((labels[one] for one in _PRODUCTS if one in labels), "")
    if kind.endswith("-SHARED"):
        name = node["metadata"]["name"]
        raise InputError(
            f"{place}: {name} shares its GPUs ({kind}); several pods have the same one"
        )
    ready = {one["type"]: one["status"] for one in status.get("conditions", ())}
    is_out = node.get("spec", {}).get("unschedulable") or ready.get("Ready", "True") != "True"
    return kind, max(counts), labels.get("nvidia.com/gpu.clique", ""), not is_out


def _of_gres(rows: Sequence[tuple[str, str, str]], place: str) -> tuple[Listed, ...]:
    """The nodes by name, generic resources and state."""
    nodes = {}
    for name, gres, state in rows:
        found = _GRES.findall(gres)
        if len({kind for kind, _ in found}) > 1:
            raise InputError(f"{place}: {name} has GPUs of several kinds: {gres}")
        if found:
            count = sum(int(count) for _, count in found)
            nodes[name] = (found[0][0], count, "", _OUT.search(state) is None)
    return _grouped(list(nodes.values()), place)


def _grouped(nodes: Sequence[tuple[str, int, str, bool]], place: str) -> tuple[Listed, ...]:
    """The nodes in service, equal ones together."""
    served = Counter(node[:3] for node in nodes if node[3])
    if not served:
        raise InputError(f"{place}: none of {len(nodes)} nodes with GPUs is in service")
    out = len(nodes) - served.total()
    notes = (f"without {out} of {len(nodes)} nodes, which are out of service",) if out else ()
    return tuple(
        Listed(
            place,
            tuple(f"g{i}" for i in range(devices)),
            servers=servers,
            kind=kind or None,
            domain=domain,
            notes=notes,
        )
        for (kind, devices, domain), servers in served.items()
    )


def host_names(text: str) -> Iterator[str]:
    """The node names of a host list such as ``gpu[01-16,20],login1``."""
    for one in re.split(r",(?![^\[]*\])", text):
        literal = _RANGE.split(one)
        choices = [[part] if i % 2 == 0 else list(_numbers(part)) for i, part in enumerate(literal)]
        yield from map("".join, product(*choices))


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise InputError(f"host list [{text}]: write ranges such as [01-16,20]")
        require_count(int(last or first) - int(first) + 1, f"the nodes of [{text}]", MAX_DEVICES)
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"


def _require_symmetric(links: Sequence[Sequence[str]], names: Sequence[str], place: str) -> None:
    for i, row in enumerate(links):
        for j, link in enumerate(row):
            if link != links[j][i]:
                raise InputError(
                    f"{place}: {names[i]} to {names[j]} is {link}, back it is {links[j][i]}"
                )


def _smi_table(text: str, place: str) -> tuple[list[str], dict[str, list[str]]]:
    """The column names before the affinities, and the entries of each row below them."""
    lines = [line.split() for line in _ESCAPES.sub("", text).splitlines()]
    header = next((i for i, line in enumerate(lines) if line and _GPU.fullmatch(line[0])), None)
    if header is None or "X" in lines[header]:
        raise InputError(f"{place}: no header of GPU0, GPU1, ...; paste the whole output")
    columns = []
    for word in lines[header]:
        if word in ("CPU", "NUMA", "GPU"):  # "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"
            break
        columns.append(word)
    rows = {line[0]: line[1:] for line in lines[header + 1 :] if line and line[0] in columns}
    return columns, rows


def _smi_entry(
    table: Mapping[str, Sequence[str]], columns: Sequence[str], a: str, b: str, place: str
) -> str:
    if a not in table:
        raise InputError(f"{place}: the row of {a} is missing; paste the whole output")
    column = columns.index(b)
    if len(table[a]) <= column:
        raise InputError(f"{place}: the row of {a} ends before the column of {b}")
    link = table[a][column]
    if (link == "X") != (a == b) or not re.fullmatch(rf"X|NV[1-9]\d*|{'|'.join(PATHS)}", link):
        raise InputError(f"{place}: {a} to {b}: {link!r} is none of NV#, {', '.join(PATHS)}")
    return link


_TOOLS: tuple[tuple[str, Callable[[str, str], Listed | tuple[Listed, ...]]], ...] = (
    (r"\A\s*\{", kubernetes),
    (r"<topology|^Machine\b", lstopo),
    (r"between two GPUs", rocm_smi),
    (r"^\s*CA '", ibstat),
    (r"\bNodeName=", slurm_nodes),
    (r"\A\s*(\S+ +)*NODELIST\b", sinfo),
    (r"\bGPU0\b", nvidia_smi),
)
"""What only one tool prints, and what reads its output."""
