import json
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    byte_unit,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_latency,
)
from stagewright.graphs.importers.machine_lists import nvidia_smi
from stagewright.graphs.machines.canonical import reordered
from stagewright.graphs.machines.cluster import (
    Cluster,
    Device,
    Link,
    from_matrix,
    load_cluster,
    save_cluster,
    uniform_servers,
)
from stagewright.graphs.machines.devices import ACCELERATORS, accelerator
from stagewright.graphs.machines.fabric import fabric_of
from stagewright.graphs.machines.networks import fabric_of_kind, server_link
from stagewright.graphs.machines.topology import PCIE_PATHS, dgx1, read_matrix, server_of


def devices(count: int) -> list[Device]:
    return [Device(f"d{i}", "v100", 16e9) for i in range(count)]


def test_uniform_servers():
    cluster = uniform_servers(2, 3, Link(100e9, 1e-6), Link(10e9, 5e-6))
    assert [device.name for device in cluster.devices][:4] == ["s0g0", "s0g1", "s0g2", "s1g0"]
    assert cluster.servers == ((0, 1, 2), (3, 4, 5))
    assert cluster.bandwidth[0, 2] == 100e9
    assert cluster.bandwidth[2, 3] == 10e9
    assert np.isinf(np.diag(cluster.bandwidth)).all()
    assert cluster.latency[0, 1] == 1e-6
    assert cluster.latency[0, 5] == 5e-6
    assert (np.diag(cluster.latency) == 0).all()


def test_both_directions_of_a_link_are_kept():
    cluster = from_matrix(devices(2), [[None, 1e9], [2e9, None]])
    assert cluster.bandwidth[0, 1] == 1e9
    assert cluster.bandwidth[1, 0] == 2e9


def test_pairs_without_a_link_use_the_widest_path_and_add_its_latencies():
    # d0 - d1 - d3 is narrow, d0 - d2 - d3 wide.
    bandwidth = [
        [None, 1e9, 4e9, None],
        [1e9, None, None, 9e9],
        [4e9, None, None, 3e9],
        [None, 9e9, 3e9, None],
    ]
    cluster = from_matrix(devices(4), bandwidth, 1e-6)
    assert cluster.direct_bandwidth[0, 3] == 0
    assert cluster.bandwidth[0, 3] == 3e9
    assert cluster.latency[0, 3] == pytest.approx(2e-6)
    assert cluster.bandwidth[0, 1] == 1e9  # the direct link, though d0 - d2 - d3 - d1 is wider


@given(
    st.integers(2, 5).flatmap(
        lambda n: st.lists(
            st.lists(st.sampled_from([None, 1e9, 2e9, 5e9]), min_size=n, max_size=n),
            min_size=n,
            max_size=n,
        )
    )
)
def test_widest_paths_equal_brute_force(rows):
    size = len(rows)
    wide = np.array([[entry or 0 for entry in row] for row in rows], dtype=float)
    np.fill_diagonal(wide, np.inf)
    for _ in range(size):  # paths of ever more links
        wide = np.maximum(wide, np.minimum(wide[:, :, None], wide[None, :, :]).max(axis=1))
    if (wide == 0).any():
        with pytest.raises(InputError, match="not connected"):
            from_matrix(devices(size), rows)
        return
    cluster = from_matrix(devices(size), rows)
    linked = cluster.direct_bandwidth > 0
    assert (cluster.bandwidth[linked] == cluster.direct_bandwidth[linked]).all()
    assert (cluster.bandwidth[~linked] == wide[~linked]).all()


@given(st.integers(3, 5), st.randoms(use_true_random=False))
def test_of_the_widest_paths_that_of_least_latency_is_used(size, chance):
    """Beside all paths one by one, and in another order of the devices."""
    rows = [[chance.choice((None, 1e9, 2e9)) for _ in range(size)] for _ in range(size)]
    late = [[float(chance.randint(0, 4)) for _ in range(size)] for _ in range(size)]
    for v in range(size):  # a ring in both directions: connected
        for w in ((v + 1) % size, (v - 1) % size):
            rows[v][w] = rows[v][w] or 1e9
    cluster = from_matrix(devices(size), rows, late)
    for i, j in permutations(range(size), 2):
        paths = [
            list(pairwise((i, *inner, j)))
            for count in range(size - 1)
            for inner in permutations({*range(size)} - {i, j}, count)
        ]
        paths = [path for path in paths if all(rows[v][w] for v, w in path)]
        if rows[i][j]:
            paths = [[(i, j)]]
        least = min((-min(rows[v][w] for v, w in p), sum(late[v][w] for v, w in p)) for p in paths)
        assert (-cluster.bandwidth[i, j], cluster.latency[i, j]) == least
    order = chance.sample(range(size), size)
    other = reordered(cluster, order)
    assert (other.latency == cluster.latency[np.ix_(order, order)]).all()


@pytest.mark.parametrize(
    "cluster",
    [
        uniform_servers(2, 2, Link(1e9), Link(1e8, 1e-5), peak_flops=1e12),
        from_matrix(devices(2), [[None, 1e9], [2e9, None]], [[0, 1e-6], [2e-6, 0]]),
        dgx1(),
    ],
    ids=["servers", "matrix", "dgx1"],
)
def test_a_cluster_survives_its_file(tmp_path: Path, cluster: Cluster):
    save_cluster(cluster, tmp_path / "cluster.json")
    loaded = load_cluster(tmp_path / "cluster.json")
    assert loaded == cluster
    assert loaded.digest() == cluster.digest()


SERVERS = uniform_servers(2, 2, Link(100e9), Link(12.5e9))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("devices",), [], "has no devices"),
        (("devices", 1, "name"), "s0g0", "two devices are named 's0g0'"),
        (("all_reduce_share",), 0.0, "all_reduce_share must be above 0 and at most 1, got 0"),
        (("message_seconds",), -1e-4, "message_seconds must be finite and not negative"),
        (("message_bytes_per_second",), 1e9, "message_bytes_per_second needs message_seconds"),
        (("devices", 0, "memory_bytes"), 16, "is a unit missing"),
        (("links", "intra", "bandwidth_bytes_per_second"), 12, "is a unit missing"),
        (("links", "intra", "bandwidth_bytes_per_second"), 0, "must be positive"),
        (("links", "inter"), None, "not connected: several servers and no inter link"),
        (("links", "inter", "latency_seconds"), -1, "not negative"),
        (("links", "servers", 1), ["s1g0"], "device 's1g1' is in no server"),
        (("links", "servers", 1), ["s1g0", "s1g1", "s0g0"], "names 's0g0' twice"),
        (("links", "servers", 1), ["s1g0", "s1g1", "x"], "names 'x', which is not a device"),
        (("links", "intra", "bandwidth_bytes_per_second"), "1e9", "valid number, got '1e9'$"),
        (
            ("links",),
            {"bandwidth_bytes_per_second": [[None, "1e9"]]},
            r"second\[0\]\[1\]: Input.*'$",
        ),
        (("version",), 7, "version 7 is not known"),
        (("racks",), 1, "racks: unknown field"),
    ],
)
def test_bad_documents_get_one_line(tmp_path: Path, path, value, message):
    save_cluster(SERVERS, tmp_path / "cluster.json")
    document = json.loads((tmp_path / "cluster.json").read_text())
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "cluster.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=message) as caught:
        load_cluster(tmp_path / "cluster.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("bandwidth", "latency", "message"),
    [
        ([[None, 0.0], [1e9, None]], 0.0, "is zero; write null where there is no link"),
        ([[None, 12.0], [1e9, None]], 0.0, "d0 to d1.* is a unit missing"),
        ([[None, float("nan")], [1e9, None]], 0.0, "must be positive and finite"),
        ([[None, 1e9]], 0.0, "must have 2 rows of 2 entries"),
        ([[None, 1e9], [None, None]], 0.0, "no path of links from 'd1' to 'd0'"),
        ([[None, 1e9], [1e9, None]], [[0, -1], [0, 0]], "latency.* not negative"),
    ],
)
def test_bad_matrices_are_refused(bandwidth, latency, message):
    with pytest.raises(InputError, match=message):
        from_matrix(devices(2), bandwidth, latency)


def test_a_kind_outside_the_table_needs_its_memory():
    assert dgx1(kind="mi50", memory_bytes=32e9).devices[0] == Device("g0", "mi50", 32e9)
    with pytest.raises(InputError, match="device 'mi50' is not known"):
        dgx1(kind="mi50")


def test_dgx1_is_the_hybrid_cube_mesh():
    cluster = dgx1(brick=25e9, pcie=6e9)
    nvlink = np.where(cluster.direct_bandwidth > 6e9, cluster.direct_bandwidth / 25e9, 0)
    assert (nvlink == nvlink.T).all()
    assert (nvlink.sum(axis=0) == 6).all()  # six bricks per V100
    assert sorted(nvlink[0]) == [0, 0, 0, 0, 1, 1, 2, 2]
    assert cluster.bandwidth[0, 4] == 50e9  # the two quads are joined by doubled links
    assert cluster.bandwidth[0, 7] == 6e9
    assert cluster.devices[0].memory_bytes == 16e9
    assert len(cluster.servers) == 1


DGX1_V100 = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tmlx5_1\tCPU Affinity\x1b[0m
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tPIX\tSYS\t0-19,40-59
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\tPIX\tSYS\t0-19,40-59
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\tPHB\tSYS\t0-19,40-59
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\tPHB\tSYS\t0-19,40-59
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\tSYS\tPIX\t20-39,60-79
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\tSYS\tPIX\t20-39,60-79
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\tSYS\tPHB\t20-39,60-79
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \tSYS\tPHB\t20-39,60-79
mlx5_0\tPIX\tPIX\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\t X \tSYS
mlx5_1\tSYS\tSYS\tSYS\tSYS\tPIX\tPIX\tPHB\tPHB\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""

FOUR_PCIE = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      PIX     NODE    SYS     0-15    0               N/A
GPU1    PIX      X      NODE    SYS     0-15    0               N/A
GPU2    NODE    NODE     X      SYS     0-15    0               N/A
GPU3    SYS     SYS     SYS      X      16-31   1               N/A
"""

TWO_H100 = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tPXB\t0-55,112-167\t0\t\tN/A
GPU1\tNV18\t X \tNODE\t0-55,112-167\t0\t\tN/A
NIC0\tPXB\tNODE\t X

Legend:

  X    = Self

NIC Legend:

  NIC0: mlx5_0
"""


def test_nvidia_smi_of_a_dgx1_gives_the_built_in_one():
    parsed = server_of(nvidia_smi(DGX1_V100, "topo"))
    np.testing.assert_array_equal(parsed.direct_bandwidth, dgx1().direct_bandwidth)
    assert [device.name for device in parsed.devices] == [f"GPU{i}" for i in range(8)]
    assert len(parsed.servers) == 1


def test_nvidia_smi_paths_and_their_overrides():
    parsed = server_of(nvidia_smi(FOUR_PCIE, "topo"), kind="1080ti")
    assert parsed.bandwidth[0, 1:].tolist() == [12e9, 10e9, 6e9]
    assert parsed.devices[0].kind == "1080ti"
    assert parsed.devices[0].memory_bytes == 11e9
    faster = server_of(
        nvidia_smi(FOUR_PCIE, "topo"), paths={"PIX": 24e9}, latency=1e-6, memory_bytes=5e9
    )
    assert faster.bandwidth[0, 1] == 24e9
    assert faster.bandwidth[0, 2] == 10e9
    assert faster.latency[0, 1] == 1e-6
    assert faster.devices[0].memory_bytes == 5e9


@pytest.mark.parametrize(
    ("generation", "rates"), [(4, [24e9, 20e9, 16e9]), (5, [48e9, 40e9, 22e9])]
)
def test_nvidia_smi_by_the_generation_of_pcie(generation, rates):
    """The rates of NCCL 2.30 (src/graph/topo.h and topo.cc)."""
    parsed = server_of(nvidia_smi(FOUR_PCIE, "topo"), pcie=generation)
    assert parsed.bandwidth[0, 1:].tolist() == rates
    assert f"SYS at {rates[2] / 1e9:g} GB/s (PCIe {generation})" in parsed.source
    assert set(PCIE_PATHS) == {3, 4, 5}
    with pytest.raises(InputError, match="pcie must be one of 3, 4, 5, got 6"):
        server_of(nvidia_smi(FOUR_PCIE, "topo"), pcie=6)


@pytest.mark.parametrize("kind", ["h100", "h800", "b200"])
def test_nvidia_smi_of_nvswitch_machines_has_the_links_of_the_kind(kind):
    """That an H100's 450 GB/s are 365 reached is said once, whatever describes the server."""
    links = 8 if kind == "h800" else 18
    parsed = server_of(nvidia_smi(TWO_H100.replace("NV18", f"NV{links}"), "topo"), kind=kind)
    link = server_link(accelerator(kind))
    assert fabric_of(parsed).levels == fabric_of_kind(kind, 2).levels
    assert Link(parsed.bandwidth[0, 1], parsed.latency[0, 1]) == link


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no header"),
        (FOUR_PCIE.split("\n", 1)[1], "no header"),
        (FOUR_PCIE.rsplit("GPU3", 1)[0], "the row of GPU3 is missing"),
        (FOUR_PCIE.split("SYS     0-15")[0], "the row of GPU0 ends before the column of GPU3"),
        (FOUR_PCIE.replace("PIX", "QPI"), "GPU0 to GPU1: 'QPI' is none of NV#"),
        (FOUR_PCIE.replace("PIX", "NV0"), "GPU0 to GPU1: 'NV0' is none of NV#"),
        (FOUR_PCIE.replace("PIX", "X", 1), "GPU0 to GPU1: 'X' is none of NV#"),
        (FOUR_PCIE.replace("PIX", "NV2", 1), "GPU0 to GPU1 is NV2, back it is PIX"),
    ],
)
def test_bad_nvidia_smi_text_gets_one_line(text, message):
    with pytest.raises(InputError, match=message) as caught:
        server_of(nvidia_smi(text, "topo.txt"))
    assert str(caught.value).startswith("topo.txt: ")
    assert "\n" not in str(caught.value)


def test_nvidia_smi_refuses_unknown_overrides():
    with pytest.raises(InputError, match="no GPUs are joined by QPI, only by NODE, PIX, SYS"):
        server_of(nvidia_smi(FOUR_PCIE, "topo"), paths={"QPI": 1e9})


def test_read_matrix_without_names(tmp_path: Path):
    file = tmp_path / "rack.txt"
    file.write_text("# per direction\n0 100Gb/s -\n12.5GB/s 0 3GB/s\n\nx 24Gbps 0\n")
    cluster = read_matrix(file, latency=2e-6, memory_bytes=32e9)
    assert cluster.name == "rack"
    assert [device.name for device in cluster.devices] == ["g0", "g1", "g2"]
    assert cluster.direct_bandwidth.tolist() == [[0, 12.5e9, 0], [12.5e9, 0, 3e9], [0, 3e9, 0]]
    assert cluster.latency[0, 1] == 2e-6
    assert cluster.devices[0].memory_bytes == 32e9


def test_read_matrix_with_names_and_units(tmp_path: Path):
    file = tmp_path / "matrix.csv"
    file.write_text("left, right\nleft, x, 12 GB/s\nright, 100Gbps, x\n")
    cluster = read_matrix(file, kind="a100")
    assert [device.name for device in cluster.devices] == ["left", "right"]
    assert cluster.direct_bandwidth.tolist() == [[0, 12e9], [12.5e9, 0]]
    assert cluster.devices[0].kind == "a100"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows"),
        ("a b\n", "0 rows for 2 devices"),
        ("0 12\n12 0\n", ":1: g0 to g1: '12' has no unit; write for example 25GB/s"),
        ("0 12e9\n12e9 0\n", ":1: g0 to g1: '12e9' has no unit"),
        ("0 12GB/s\n0 0\n", ":2: g1 to g0: .* must be positive"),
        ("0 12GB/s\n-3GB/s 0\n", ":2: g1 to g0: .* must be positive"),
        ("0 nan\n1GB/s 0\n", ":1: g0 to g1: 'nan' is not a bandwidth"),
        ("0 12apples\n1GB/s 0\n", ":1: g0 to g1: '12apples' has an unknown unit"),
        ("0 1GB/s\n1GB/s\n", ":2: 1 entries for 2 devices"),
        ("a b\n0 1GB/s 1GB/s\n1GB/s 0 1GB/s\n", ":2: 3 entries for 2 devices"),
        ("a b\n0 1GB/s\n", "1 rows for 2 devices"),
        ("a a\n0 1GB/s\n1GB/s 0\n", "two devices are named 'a'"),
        ("0 -\n- 0\n", "not connected"),
    ],
)
def test_bad_matrix_files_get_one_line(tmp_path: Path, text, message):
    file = tmp_path / "matrix.txt"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_matrix(file)
    assert "\n" not in str(caught.value)


def test_accelerators():
    assert accelerator("V100") is ACCELERATORS["v100"]
    with pytest.raises(InputError, match="device 'tpu' is not known; known are 1080ti, a10, a100"):
        accelerator("tpu")
    for card in ACCELERATORS.values():
        assert card.fp16_flops >= card.fp32_flops


@pytest.mark.parametrize(
    ("text", "value"),
    [("16GB", 16e9), ("16GiB", 16 * 2**30), ("16e9B", 16e9), ("1.5 TB", 1.5e12), ("123B", 123),
     ("80gb", 80e9), ("4kB", 4e3), ("0", 0)],
)  # fmt: skip
def test_parse_bytes(text, value):
    assert parse_bytes(text, "memory") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12.5GB/s", 12.5e9),
        ("12.5GBps", 12.5e9),
        ("25GiB/s", 25 * 2**30),
        ("10MiB/sec", 10 * 2**20),
        ("400Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("400gbps", 50e9),
        ("400Gbit/s", 50e9),
        ("400gbit/s", 50e9),
        ("100 Gbps", 12.5e9),
        ("0.4Tb/s", 50e9),
        ("8e3Mb/s", 1e9),
    ],
)
def test_parse_bandwidth(text, value):
    assert parse_bandwidth(text, "link") == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("400", "has no unit"),
        ("1.25e10", "has no unit"),
        ("400G", "has an unknown unit, G"),
        ("400GB", "has an unknown unit, GB"),
        ("400gb/s", "has an unknown unit, gb/s"),  # bits or bytes
        ("400GBPS", "has an unknown unit, GBPS"),
        ("fast", "is not a bandwidth"),
    ],
)
def test_a_bandwidth_without_its_unit_is_refused_with_both_spellings(text, problem):
    with pytest.raises(InputError) as caught:
        parse_bandwidth(text, "--inter")
    assert str(caught.value) == (
        f"--inter '{text}' {problem}; write for example 25GB/s (bytes) or 200Gb/s (bits)"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("80", "has no unit"),
        ("16e9", "has no unit"),
        ("80Gb", "has an unknown unit, Gb"),
        ("80G", "has an unknown unit, G"),
        ("80GB/s", "has an unknown unit, GB/s"),
        ("big", "is not a size"),
    ],
)
def test_a_size_without_its_unit_is_refused_with_both_spellings(text, problem):
    with pytest.raises(InputError) as caught:
        parse_bytes(text, "--memory")
    assert str(caught.value) == (f"--memory '{text}' {problem}; write for example 80GB or 80GiB")


@pytest.mark.parametrize(
    ("text", "value"),
    [("5us", 5e-6), ("0.2 ms", 2e-4), ("500NS", 5e-7), ("1e1µs", 1e-5), ("0", 0.0), ("1s", 1.0)],
)
def test_parse_latency(text, value):
    assert parse_latency(text, "latency") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "us", "5", "1e-5", "5GB", "-5us", "inf us", "nan us", "2s"])
def test_no_latencies(text):
    with pytest.raises(InputError, match=r"^--latency .*5us"):
        parse_latency(text, "--latency")


@pytest.mark.parametrize("number", ["", "12 apples", "nan", "inf", "-5", "-5e9", "1e400"])
def test_no_amounts(number):
    with pytest.raises(InputError):
        parse_bytes(f"{number}GB", "memory")
    with pytest.raises(InputError):
        parse_bandwidth(f"{number}GB/s", "link")


def test_amounts_for_people():
    assert [format_bytes(value) for value in (0, 999, 1.5e3, 16e9, 2e12)] == [
        "0 B", "999 B", "1.5 kB", "16 GB", "2 TB",
    ]  # fmt: skip
    assert [byte_unit(value) for value in (0, 1e3, 5e9)] == [("B", 1), ("kB", 1e3), ("GB", 1e9)]
    assert [format_seconds(value) for value in (2, 0.0123, 5e-6)] == ["2 s", "12.3 ms", "5 us"]
