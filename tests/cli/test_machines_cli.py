"""``stagewright cluster`` and ``model``: kinds, what is assumed of them, several servers."""

import importlib
import json
from pathlib import Path

import pytest
from commands import answered, answered_json, refused

from stagewright.graphs.machines.cluster import MatrixLinks, ServerLinks, load_cluster
from stagewright.graphs.machines.devices import read_accelerator
from stagewright.graphs.machines.fabric import fabric_of
from stagewright.graphs.models.chain import load_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "devices" / "l40.json"
NVSWITCH = """\
\x1b[4m\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPXB\tSYS\t0-55,112-167\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tSYS\t0-55,112-167\t0\t\tN/A
NIC0\tPXB\tNODE\t X \tSYS
NIC1\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_1
"""
OLD = """\
\tGPU0\tGPU1\tGPU2\tmlx5_0\tCPU Affinity
GPU0\t X \tPIX\tSOC\tPHB\t0-9
GPU1\tPIX\t X \tSOC\tPHB\t0-9
GPU2\tSOC\tSOC\t X \tSOC\t10-19
mlx5_0\tPHB\tPHB\tSOC\t X
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("topo.txt").write_text(NVSWITCH)
    Path("old.txt").write_text(OLD)


def test_a_kind_needs_no_bandwidths_and_says_what_is_assumed() -> None:
    line, said = answered("cluster", "4x8", "--device", "H100", "-o", "c.json").splitlines()
    cluster = load_cluster("c.json")
    assert line == "c.json: 4x8, 32 devices"
    assert said == cluster.source == (
        "devices h100; assumed: memory 84.9 GB, 365.4 GB/s inside a server (81.2% of 450), "
        "42 GB/s between servers (84.0% of 50)"
    )  # fmt: skip
    assert cluster.bandwidth[0, [1, 8]].tolist() == [0.812 * 450e9, 0.84 * 50e9]
    assert cluster.latency[0, [1, 8]].tolist() == [2.4e-6, 4.4e-6]
    assert answered_json("cluster", "4x8", "--device", "h100", "-o", "c.json")["source"] == said


def test_what_is_given_is_not_assumed() -> None:
    given = ["--intra", "300GB/s", "--inter", "25GB/s", "--memory", "40GB"]
    assert "source" not in json.loads(answered("cluster", "2x2", "--device", "a100", *given))
    half = json.loads(answered("cluster", "2x2", "--device", "a100", *given[:2]))
    assert half["source"] == (
        "devices a100; assumed: memory 42.3 GB, 21 GB/s between servers (84.0% of 25)"
    )
    slow = ["--latency-intra", "1ms"]
    assert json.loads(answered("cluster", "1x2", "--device", "a100", *slow))["links"]["intra"] == {
        "bandwidth_bytes_per_second": 0.812 * 300e9, "latency_seconds": 1e-3,
    }  # fmt: skip
    none = json.loads(answered("cluster", "1x2", "--device", "a100", "--latency-intra", "0"))
    assert none["links"]["intra"]["latency_seconds"] == 0
    assert "belong to a shape" in refused("cluster", "--dgx1", "--latency-inter", "1us")


def test_the_generic_kind_is_not_taken_in_silence() -> None:
    links = ["--intra", "9GB/s", "--memory", "16GB"]
    _, said = answered("cluster", "1x2", *links, "-o", "c.json").splitlines()
    assert said.endswith("an A100 in round numbers), as --device is not given")
    assert load_cluster("c.json").devices[0].kind == "generic"
    _, said = answered("model", "vgg19", "-o", "m.json").splitlines()
    chain = load_model("m.json")
    assert said == f"no --device is given: generic is taken; {chain.source}"
    assert "in round numbers), fp32 peak 20 TFLOP/s" in chain.source
    given = ["--model", "m.json", "--cluster", "c.json", "--microbatches", 2, "--planner", "gpipe"]
    answered("plan", *given, "-o", "p.json")
    message = refused("cluster", "2x2", "--inter", "1GB/s")
    assert message.startswith("--intra is missing: links of kind generic are not known; give those")


def test_single_devices() -> None:
    links = json.loads(answered("cluster", "2x1x1", "--inter-rack", "1GB/s"))["links"]
    assert links["inter_rack"]["bandwidth_bytes_per_second"] == 1e9
    links = json.loads(answered("cluster", "2x1", "--inter", "1GB/s"))["links"]
    assert links["inter"]["bandwidth_bytes_per_second"] == 1e9
    links = json.loads(answered("cluster", "1x1", "--device", "h100"))["links"]
    assert "inter" not in links
    assert "--intra is missing" in refused("cluster", "1x1")
    racks = ["cluster", "2x2x2", "--device", "h100", "--inter-rack", "1GB/s"]
    links = json.loads(answered(*racks, "--host-bandwidth", "9GB/s"))["links"]
    assert links["intra"]["bandwidth_bytes_per_second"] == 0.812 * 450e9


def test_servers_of_several_kinds() -> None:
    answered(
        "cluster", "a100:1x2,V100:2x4", "--intra", "a100=300GB/s,v100=25GB/s", "--inter", "10GB/s",
        "--memory", "v100=32GB", "--host-bandwidth", "12GB/s", "-o", "c.json",
    )  # fmt: skip
    cluster = load_cluster("c.json")
    assert isinstance(cluster.links, MatrixLinks)
    assert [len(server) for server in cluster.servers] == [2, 4, 4]
    found = {(one.kind, one.memory_bytes, one.host_bytes_per_second) for one in cluster.devices}
    assert found == {("a100", 39.38 * 2**30, 12e9), ("v100", 32e9, 12e9)}
    assert cluster.bandwidth[0, [1, 2]].tolist() == [300e9, 10e9]
    assert cluster.bandwidth[2, [3, 6]].tolist() == [25e9, 10e9]
    assert cluster.source == "devices a100; assumed: memory 42.3 GB"
    same = ["--intra", "25GB/s", "--inter", "10GB/s", "-o", "c.json"]
    answered("cluster", "a100:1x2,v100:2x4,a100:1x1", *same)
    assert isinstance(load_cluster("c.json").links, ServerLinks)


def test_several_servers_of_one_topology() -> None:
    four = ["cluster", 4, "--nvidia-smi", "topo.txt"]
    answered(*four, "--inter", "50GB/s", "--device", "h100", "-o", "c.json")
    cluster = load_cluster("c.json")
    assert (len(cluster), len(cluster.servers)) == (8, 4)
    assert cluster.bandwidth[0, [1, 2]].tolist() == [0.812 * 450e9, 50e9]
    assert cluster.source == (
        "topo.txt; NV18 at 365.4 GB/s (81.2% of 450); network cards mlx5_0, mlx5_bond_1; "
        "devices h100; assumed: memory 84.9 GB"
    )
    answered(*four, "--device", "b200", "-o", "c.json")  # NVLink of the fifth generation
    assert load_cluster("c.json").bandwidth[0, [1, 2]].tolist() == [0.812 * 900e9, 0.84 * 50e9]
    answered("cluster", 2, "--nvidia-smi", "old.txt", "--inter", "1GB/s", "-o", "c.json")
    cluster = load_cluster("c.json")
    assert cluster.bandwidth[0, [1, 2, 3]].tolist() == [12e9, 6e9, 1e9]
    assert "PIX at 12 GB/s (PCIe 3); SOC at 6 GB/s (PCIe 3); network cards mlx5_0;" in str(
        cluster.source
    )
    assert len(json.loads(answered("cluster", 2, "--dgx1"))["devices"]) == 16


def test_the_rates_of_one_topology() -> None:
    old = ["cluster", "--nvidia-smi", "old.txt", "-o", "c.json"]
    answered(*old, "--pcie", 4, "--intra", "pix=200Gb/s", "--latency-intra", "9us")
    cluster = load_cluster("c.json")
    assert cluster.bandwidth[0, [1, 2]].tolist() == [25e9, 16e9]
    assert cluster.latency[0, 1] == 9e-6
    assert "PIX at 25 GB/s; SOC at 16 GB/s (PCIe 4);" in str(cluster.source)


@pytest.mark.parametrize(
    ("topology", "options"), [("topo.txt", ["--device", "h100"]),
                              ("old.txt", ["--device", "h100", "--intra", "20GB/s"])]
)  # fmt: skip
def test_one_server_with_equal_links_has_levels(topology: str, options: list[str]) -> None:
    answered("cluster", "--nvidia-smi", topology, *options, "-o", "one.json")
    answered("cluster", 1, "--nvidia-smi", topology, *options, "-o", "levels.json")
    one, several = (fabric_of(load_cluster(file)) for file in ("one.json", "levels.json"))
    assert one.levels == several.levels[:1]
    assert one.memory_bytes == several.memory_bytes


def test_the_example_is_generated() -> None:
    generator = importlib.import_module("examples.documents")
    assert read_accelerator(EXAMPLE) == generator.L40


def test_ones_own_kind() -> None:
    answered("cluster", "2x4", "--device", EXAMPLE, "-o", "c.json")
    cluster = load_cluster("c.json")
    first = cluster.devices[0]
    assert (first.kind, first.memory_bytes, first.host_bytes_per_second) == ("l40", 48e9, 24e9)
    assert str(cluster.source).startswith("devices l40 (NVIDIA's datasheet")
    mixed = [f"{EXAMPLE}:1x2,t4:1x2", "--intra", "9GB/s", "--inter", "l40=9GB/s,t4=1GB/s"]
    made = json.loads(answered("cluster", *mixed))
    assert made["name"] == "l40:1x2,t4:1x2"
    devices = made["devices"]
    assert [one["kind"] for one in devices] == ["l40", "l40", "t4", "t4"]
    answered("model", "gpt", "--device", f"{EXAMPLE},h100", "--precision", "fp8", "-o", "m.json")
    chain = load_model("m.json")
    assert [cost.device_kind for cost in chain.layers[1].costs] == ["l40", "h100"]
    assert "fp8 peak 362 TFLOP/s" in chain.source
    assert "masters and optimizer state in fp32" in chain.source


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cluster", "a100:1x2", "--device", "a100"], "the shape a100:1x2 names the kinds"),
        (["cluster", "a100:1x2,v100"], "the shape 'v100': write KIND:SERVERSxGPUS"),
        (["cluster", "a100:1x2", "--intra", "v100=9GB/s"], "--intra: 'v100' is none of a100"),
        (["cluster", "a100:1x2", "--intra", "a100=9"], "--intra '9' has no unit"),
        (["cluster", "t4:1x2"], "--intra is missing: links of kind t4 are not known"),
        (["cluster", "a100:2x2x2"], "write KIND:SERVERSxGPUS"),
        (["cluster", "4"], "'4' is no shape"),
        (["cluster", "4x8", "--nvidia-smi", "topo.txt"], "give one of: a shape"),
        (["cluster", "4", "--nvidia-smi", "topo.txt", "--dgx1"], "give one of: a shape"),
        (["cluster", "4", "--nvidia-smi", "topo.txt"], "--inter is missing: links of kind generic"),
        (["cluster", "--nvidia-smi", "topo.txt", "--inter", "1GB/s"], "or to a number of servers"),
        (["cluster", "--dgx1", "--intra", "1GB/s"], "the server's links are given"),
        (["cluster", "--dgx1", "--pcie", "4"], "--pcie belongs to --from FILE"),
        (["cluster", "--nvidia-smi", "old.txt", "--pcie", "6"], "less than or equal to 5"),
        (
            ["cluster", "--nvidia-smi", "old.txt", "--intra", "PHB=9GB/s"],
            "old.txt: no GPUs are joined by PHB, only by PIX, SOC",
        ),
        (
            ["cluster", "--nvidia-smi", "old.txt", "--intra", "PIX=9GB/s,PIX=8GB/s"],
            "--intra: PIX is given twice",
        ),
        (["cluster", "0", "--dgx1"], "the number of servers must be at least 1"),
        (["cluster", "1x2", "--device", "nowhere.json"], "nowhere.json: No such file"),
        (["cluster", "1x2", "--device", "topo.json"], "topo.json: not a complete JSON document"),
        (["model", "vgg19", "--device", "topo.json"], "topo.json: not a complete JSON document"),
        (
            ["model", "vgg19", "--device", "a100", "--precision", "fp8"],
            "a100 has no fp8 arithmetic",
        ),
        (["model", "vgg19", "--precision", "fp8"], "rtxpro6000, tpu-v5p, trainium2 have it"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    Path("topo.json").write_text("no JSON")
    assert message in refused(*arguments)


def test_a_layout_on_ones_own_kind() -> None:
    config = EXAMPLE.parents[1] / "configs" / "transformer-8b.json"
    run = ["--sequence", 2048, "--global-batch", 16, "--pipeline", 8, "--tensor", 1]
    machines = ["--device", EXAMPLE, "--gpus", 8]
    answered("train-plan", config, *machines, *run, "--precision", "fp8", "-o", "layout.json")
    assert "valid" in answered("check", "layout.json")
    answered("cluster", "1x8", "--device", EXAMPLE, "-o", "c.json")
    of_file = ["train-plan", config, "--cluster", "c.json", *run]
    assert "MFU" in answered(*of_file, "--device", EXAMPLE)
    assert "'l40' is not known" in refused(*of_file)
    assert "--device, --gpus: the cluster file" in refused(*of_file, "--device", "t4", "--gpus", 8)


def test_nodes_of_schedulers_have_the_links_of_their_kind() -> None:
    Path("nodes.txt").write_text(
        "NODELIST GRES STATE\ng[1-4] gpu:h100:8(S:0-1) idle\na[1-2] gpu:a100:4 mix\n"
    )
    answered("cluster", "--from", "nodes.txt", "-o", "c.json")
    cluster = load_cluster("c.json")
    assert [len(one) for one in cluster.servers] == [8] * 4 + [4] * 2
    assert cluster.bandwidth[0, [1, 8, 32]].tolist() == [0.812 * 450e9, 0.84 * 50e9, 0.84 * 25e9]
    assert "nodes.txt; devices h100; assumed: memory 84.9 GB, 42 GB/s" in str(cluster.source)
    answered(
        "cluster", "--from", "nodes.txt", "--inter", "h100=4x100Gb/s,a100=9GB/s", "-o", "c.json"
    )
    cluster = load_cluster("c.json")
    assert cluster.bandwidth[0, 8] == 0.84 * 50e9 / 8  # four cards of 12.5 GB/s for eight GPUs
    assert "5.25 GB/s between servers (84.0% of 4x100Gb/s, over 8 devices)" in str(cluster.source)
    assert "g[1-4]" not in refused("cluster", "4", "--from", "nodes.txt")
    Path("nodes.txt").write_text("NodeName=n[1-2] Gres=gpu:8\n")
    assert "GPUs without a name: no kind of device" in refused("cluster", "--from", "nodes.txt")
    answered("cluster", "--from", "nodes.txt", "--device", "h200", "-o", "c.json")
    assert fabric_of(load_cluster("c.json")).devices == 16


def test_an_nvlink_domain_is_one_server() -> None:
    Path("nodes.txt").write_text("NodeName=n[01-36] Gres=gpu:gb200:4\n")
    answered("cluster", "--from", "nodes.txt", "-o", "c.json")
    cluster = load_cluster("c.json")
    assert [level.devices for level in fabric_of(cluster).levels] == [72, 144]
    assert "servers of 4 joined to 72 by NVLink" in str(cluster.source)
    Path("nodes.txt").write_text("NodeName=n[01-20] Gres=gpu:gb300:4\n")
    answered("cluster", "--from", "nodes.txt", "-o", "c.json")
    assert [len(one) for one in load_cluster("c.json").servers] == [72, 8]
    Path("nodes.txt").write_text("NodeName=n[01-18] Gres=gpu:gb200:4\n")
    answered("cluster", "--from", "nodes.txt", "-o", "c.json")
    cluster = load_cluster("c.json")
    assert len(cluster.servers) == 1
    assert "between servers" not in str(cluster.source)


def test_servers_of_several_files() -> None:
    Path("ib.txt").write_text(
        "".join(f"CA 'm{i}'\n Port 1:\n  State: Active\n  Rate: 400\n" for i in range(3))
    )
    both = ["cluster", "h100:2,t4:1", "--from", "topo.txt", "--from", "ib.txt", "--from", "old.txt"]
    answered(*both, "--inter", "t4=1GB/s", "--pcie", 4, "-o", "c.json")
    cluster = load_cluster("c.json")
    assert [len(one) for one in cluster.servers] == [2, 2, 3]
    assert cluster.bandwidth[0, [1, 2, 4]].tolist() == [0.812 * 450e9, 0.84 * 50e9, 1e9]
    assert cluster.bandwidth[4, 5:].tolist() == [24e9, 16e9]
    assert "2 of 3 cards of 400 Gb/s, over 2 devices" in str(cluster.source)
    assert "'2' says 1 kinds of servers, the files 2" in refused(
        "cluster", "2", "--from", "topo.txt", "--from", "old.txt"
    )


def test_uplinks_of_an_oversubscribed_leaf() -> None:
    racks = ["cluster", "2x4x8", "--device", "h100"]
    answered(*racks, "--oversubscription", 3, "-o", "c.json")
    levels = fabric_of(load_cluster("c.json")).levels
    assert [one.devices for one in levels] == [8, 32, 64]
    assert levels[2].bytes_per_second == levels[1].bytes_per_second / 3
    assert levels[2].latency_seconds == levels[1].latency_seconds
    assert "--oversubscription says what --inter-rack says" in refused(
        *racks, "--oversubscription", 3, "--inter-rack", "9GB/s"
    )
