"""Machines as nvidia-smi, rocm-smi, lstopo, ibstat, Slurm and Kubernetes print them."""

import json

import numpy as np
import pytest

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.machine_lists import listed_machines, listed_server, with_cards
from stagewright.graphs.machines.devices import kind_named
from stagewright.graphs.machines.topology import server_of

ROCM = """\
====== ROCm System Management Interface ======
========= Weight between two GPUs =========
       GPU0         GPU1         GPU2
GPU0   0            15           30
GPU1   15           0            15
GPU2   30           15           0

========= Hops between two GPUs =========
       GPU0         GPU1         GPU2
GPU0   0            1            2
GPU1   1            0            3
GPU2   2            3            0

========= Link Type between two GPUs =========
       GPU0         GPU1         GPU2
GPU0   0            XGMI         XGMI
GPU1   XGMI         0            PCIE
GPU2   XGMI         PCIE         0

========= Numa Nodes =========
GPU[0]          : (Topology) Numa Node: 0
"""


def _bridge(kind: str, inside: str, index: int = 0) -> str:
    return f'<object type="Bridge" gp_index="{index}" bridge_type="{kind}">{inside}</object>'


def _gpu(index: int, model: str = "NVIDIA L40S", name: str = "cuda") -> str:
    info = f'<info name="GPUModel" value="{model}"/>'
    return (
        f'<object type="PCIDev" gp_index="{index}" pci_type="0302 [10de:26b9]" '
        f'pci_link_speed="31.507692"><object type="OSDev" gp_index="{index + 1}" '
        f'name="{name}{index}" osdev_type="5">{info}</object></object>'
    )


NIC = (
    '<object type="PCIDev" gp_index="70" pci_type="0207 [15b3:1021]" pci_link_speed="63.0">'
    '<object type="OSDev" gp_index="71" name="mlx5_0" osdev_type="3"/></object>'
)
VGA = '<object type="PCIDev" gp_index="72" pci_type="0300 [1a03:2000]" pci_link_speed="0"/>'
SWITCH = _bridge("1-1", _bridge("1-1", _gpu(10)) + _bridge("1-1", _gpu(20)) + NIC)
HWLOC = (
    '<?xml version="1.0"?><topology version="2.0"><object type="Machine" gp_index="1">'
    f'<object type="Package" gp_index="2">{_bridge("0-1", SWITCH + _bridge("1-1", _gpu(30)))}'
    f"{_bridge('0-1', _gpu(40) + VGA)}</object>"
    f'<object type="Package" gp_index="3">{_bridge("0-1", _gpu(50))}</object></object>%s</topology>'
)
NVLINKS = (
    '<distances2 type="OSDev" nbobjs="3" kind="37" name="NVLinkBandwidth" indexing="gp">'
    '<indexes length="9">11 21 99</indexes>'
    '<u64values length="9">1000000 0 450000 0 1000000 </u64values>'
    '<u64values length="9">450000 450000 450000 1000000</u64values></distances2>'
)
CONSOLE = """\
Machine (377GB total)
  Package L#0
    NUMANode L#0 (P#0 188GB)
    HostBridge
      PCIBridge
        PCIBridge
          PCI 04:00.0 (3D)
            CoProc(CUDA) "cuda0"
        PCIBridge
          PCI 07:00.0 (3D)
            CoProc(CUDA) "cuda1"
        PCI 08:00.0 (InfiniBand)
          OpenFabrics "mlx5_0"
      PCIBridge
        PCI 0b:00.0 (VGA)
  Package L#1
    HostBridge
      PCI 84:00.0 (VGA)
        GPU "nvml2"
"""
IBSTAT = """\
CA 'mlx5_0'
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
CA 'mlx5_1'
\tNumber of ports: 2
\tPort 1:
\t\tState: Down
\t\tRate: 400
\tPort 2:
\t\tState: Active
\t\tRate: 100
"""
SCONTROL = """\
NodeName=gpu1 Arch=x86_64 CoresPerSocket=56
   CPUAlloc=0 CPUTot=112
   Gres=gpu:h100:8(S:0-1)
   State=IDLE ThreadsPerCore=1

NodeName=gpu2 Arch=x86_64
   Gres=gpu:h100:8(S:0-1)
   State=IDLE+DRAIN ThreadsPerCore=1

NodeName=login State=IDLE Gres=(null)
"""
CONF = """\
# the old ones
NodeName=DEFAULT Gres=gpu:a100:4 Sockets=2
NodeName=a[01-03,07] State=UNKNOWN
NodeName=b[1-2]c[8-9] Gres=gpu:nvidia_h100_80gb_hbm3:8,gpu:nvidia_h100_80gb_hbm3:2
"""
SINFO = """\
NODELIST GRES STATE
gpu[1-2] gpu:a100:4(S:0-1) idle
gpu[1-2] gpu:a100:4(S:0-1) idle
gpu3 gpu:a100:4 down*
cpu1 (null) idle
"""


def node(
    count: int, labels: dict[str, str] | None = None, ready: str = "True", **spec: bool
) -> dict[str, object]:
    return {
        "metadata": {"name": "n", "labels": labels or {}},
        "spec": spec,
        "status": {
            "allocatable": {"nvidia.com/gpu": str(count)},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def test_xgmi_and_pcie_of_rocm_smi() -> None:
    listed = listed_server(ROCM, "topo")
    assert listed.links == (("X", "XGMI", "-"), ("XGMI", "X", "SYS"), ("-", "SYS", "X"))
    made = server_of(listed, kind="mi300x", pcie=4)
    assert made.direct_bandwidth[0].tolist() == [0, 0.812 * 64e9, 0]
    assert made.bandwidth[0, 2] == 16e9  # over GPU1
    assert made.source == "topo; SYS at 16 GB/s (PCIe 4); XGMI at 51.97 GB/s (81.2% of 64)"
    with pytest.raises(InputError, match=r"topo: the rate of XGMI is not known; give the kind"):
        server_of(listed, kind="generic")


def test_the_pci_tree_of_lstopo() -> None:
    listed = listed_server(HWLOC % "", "box.xml")
    assert listed.links is not None
    assert listed.links[0] == ("X", "PIX", "PHB", "NODE", "SYS")
    assert (listed.kind, listed.cards, listed.pcie) == ("NVIDIA L40S", ("mlx5_0",), 4)
    assert listed.lists_pcie_only
    assert server_of(listed, kind="l40s").bandwidth[0, 1:].tolist() == [24e9, 20e9, 20e9, 16e9]
    text = listed_server(CONSOLE, "box.txt")
    assert text.links == (("X", "PIX", "SYS"), ("PIX", "X", "SYS"), ("SYS", "SYS", "X"))
    assert (text.kind, text.cards, text.pcie) == (None, ("mlx5_0",), None)


def test_nvlinks_of_lstopo_are_of_gpus_or_over_switches() -> None:
    """Object 99 is a switch, which both GPUs reach at 450 GB/s."""
    listed = listed_server(HWLOC % NVLINKS, "box.xml")
    assert listed.links is not None
    assert listed.links[0][:3] == ("X", "NVLINK450", "PHB")
    assert not listed.lists_pcie_only
    assert server_of(listed, kind="h100").bandwidth[0, 1] == pytest.approx(0.812 * 450e9)


def test_cards_belong_to_the_server_before_them() -> None:
    cards = listed_machines(IBSTAT, "ib")
    [one] = with_cards([listed_server(ROCM, "topo"), *cards])
    assert (one.cards, one.card_bytes_per_second) == (("mlx5_0", "mlx5_1"), (50e9, 12.5e9))
    with pytest.raises(InputError, match="ib: network cards without a server"):
        with_cards(cards)


@pytest.mark.parametrize(
    ("text", "expected", "note"),
    [
        (SCONTROL, [("h100", 8, 1)], ("without 1 of 2 nodes, which are out of service",)),
        (CONF, [("a100", 4, 4), ("nvidia_h100_80gb_hbm3", 10, 4)], ()),
        (SINFO, [("a100", 4, 2)], ("without 1 of 3 nodes, which are out of service",)),
        (
            json.dumps({"items": [
                node(8, {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}),
                node(8, {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}),
                node(8, ready="False"), node(8, unschedulable=True), node(0),
            ]}),
            [("NVIDIA-H100-80GB-HBM3", 8, 2)],
            ("without 2 of 4 nodes, which are out of service",),
        ),
    ],
)  # fmt: skip
def test_lists_of_nodes(
    text: str, expected: list[tuple[str, int, int]], note: tuple[str, ...]
) -> None:
    found = listed_machines(text, "nodes")
    assert [(one.kind, len(one.devices), one.servers) for one in found] == expected
    assert {one.notes for one in found} == {note}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "no output of nvidia-smi topo -m, rocm-smi --showtopo, lstopo"),
        ("{}", "none of 1 nodes|not the JSON of kubectl"),
        ('{"items": 3}', "not the JSON of kubectl get nodes -o json"),
        (json.dumps({"items": [node(8, ready="False")]}), "none of 1 nodes with GPUs is in"),
        (
            json.dumps(node(8, {"nvidia.com/gpu.product": "Tesla-T4-SHARED"})),
            "n shares its GPUs .Tesla-T4-SHARED.",
        ),
        (ROCM.replace("GPU2   2            3            0", ""), "Hops: the row of GPU2 needs 3"),
        (ROCM.replace("XGMI         PCIE         0", "XGMI XGMI 0"), "GPU1 to GPU2 is SYS, back"),
        ("<topology><object", "x: not the XML of lstopo: "),
        ("Machine (1GB)\n  Package L#0", "no GPUs; use lstopo --of xml --whole-io"),
        (IBSTAT.replace("Active", "Down"), "ibstat lists no port whose State is Active"),
        ("NODELIST STATE\ngpu1 idle", "sinfo prints no GRES; use sinfo -N -o '%N %G %t'"),
        ("NODELIST GRES\ngpu1", "'gpu1' has not the columns NODELIST GRES"),
        ("NodeName=n[a-b] Gres=gpu:h100:8", r"host list \[a-b\]: write ranges such as"),
        ("NodeName=n[1-99999999] Gres=gpu:1", "the nodes of .* must be at most"),
        ("NodeName=n1 Gres=gpu:a100:1,gpu:t4:1", "n1 has GPUs of several kinds: gpu:a100:1,gpu:t4"),
    ],
)  # fmt: skip
def test_bad_lists_get_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        listed_machines(text, "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA-H100-PCIe", "h100-pcie"),
        ("h100_nvl", "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", None), ("nvidia-tesla-a100", "a100"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None), ("NVIDIA GB200", "gb200"), ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"), ("a100_3g.20gb", None),
        ("AMD_Instinct_MI300X_OAM", "mi300x"), ("tpu-v5p-slice", "tpu-v5p"), ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"), ("GeForce GTX 1080 Ti", "1080ti"), ("gpu", None),
    ],
)  # fmt: skip
def test_kinds_by_what_drivers_call_them(text: str, kind: str | None) -> None:
    assert kind_named(text) == kind


def test_every_pair_of_a_list_has_a_rate() -> None:
    made = server_of(listed_server(CONSOLE, "box"), kind="t4", paths={"PIX": 1e9})
    np.testing.assert_array_equal(made.bandwidth, made.bandwidth.T)
    assert made.bandwidth[0, 1:].tolist() == [1e9, 6e9]
