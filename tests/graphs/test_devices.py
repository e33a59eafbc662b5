"""Kinds of devices: the table, kinds of one's own, and their links."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.formulations.prices.analytic import analytic_model, architecture_model
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.machine_lists import nvidia_smi
from stagewright.graphs.machines.cluster import Link
from stagewright.graphs.machines.devices import (
    ACCELERATORS,
    GENERIC,
    SOURCES,
    Accelerator,
    accelerator,
    read_accelerator,
    read_kind,
    require_arithmetic,
)
from stagewright.graphs.machines.fabric import Fabric, Level, ServerGroup, fabric_of, mixed_servers
from stagewright.graphs.machines.networks import fabric_of_kind, network_link, server_link
from stagewright.graphs.machines.rates import OTHER_DEVICE, rates_of
from stagewright.graphs.machines.topology import server_of
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.service.layouts.problems import training_problem

ABACUS = Accelerator("abacus", 8e9, 100e9, 1e12, 4e12, fp8_flops=8e12, source="counted by hand")


def test_the_kinds_that_have_fp8_have_bf16() -> None:
    kinds = ACCELERATORS.values()
    assert all(one.has_bf16 for one in kinds if one.fp8_flops is not None)
    assert {one.name for one in kinds if one.has_bf16 and one.fp8_flops is None} == {
        "a10", "a100", "a100-80gb", "a40", GENERIC, "mi250x", "rtx3080", "rtx3090", "tpu-v6e",
    }  # fmt: skip
    assert set(ACCELERATORS) >= {"v100", "a100", GENERIC}
    # 79.10 GiB as torch has them, in place of 80 decimal gigabytes.
    assert ACCELERATORS["h100"].memory_bytes == pytest.approx(84.93e9, rel=1e-4)


def test_a_kind_of_ones_own_is_a_document(tmp_path: Path) -> None:
    documents.write(Accelerator, ABACUS, tmp_path / "a.json")
    assert read_accelerator(tmp_path / "a.json") == ABACUS
    assert read_kind(str(tmp_path / "a.json")) == ABACUS
    assert read_kind("h100") == "h100"
    assert accelerator(ABACUS) is ABACUS


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "H100"}, "'H100' is a kind that is built in; choose another name"),
        ({"name": "two words"}, "name 'two words': a kind is one word"),
        ({"name": "a:b"}, "a kind is one word without"),
        ({"name": "mine.json"}, "a kind is one word without"),
        ({"fp32_flops": 15.7}, "fp32_flops is 15.7 FLOP/s, less than 1 GFLOP/s: is a unit missing"),
        ({"fp8_flops": -1e12}, "fp8_flops must be finite and not negative"),
        ({"memory_bytes": 16}, "memory_bytes is 16, less than 1 MB: is a unit missing"),
        ({"memory_bytes_per_second": 900}, "memory_bytes_per_second is 900 bytes/s"),
        ({"server_bytes_per_second": 0}, "server_bytes_per_second must be positive"),
        ({"fp16_flops": None}, "fp16_flops: "),
        ({"tf32_tflops": 1e12}, "tf32_tflops: unknown field"),
    ],
)
def test_bad_kinds_get_one_line(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(json.loads(documents.to_json(ABACUS)) | changed))
    with pytest.raises(InputError, match=message) as caught:
        read_accelerator(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_every_figure_of_a_kind_is_checked() -> None:
    for field in fields(Accelerator):
        if field.name.endswith(("_flops", "_per_second")):
            with pytest.raises(InputError, match=field.name):
                replace(ABACUS, **{field.name: 1.0})


def test_arithmetic_that_a_kind_lacks_is_refused() -> None:
    require_arithmetic(ABACUS, "fp8")
    with pytest.raises(
        InputError,
        match="a100 has no fp8 arithmetic; b200, b300, gaudi3, gb200, gb300, h100, h100-nvl",
    ):
        require_arithmetic(accelerator("a100"), "fp8")
    with pytest.raises(
        InputError, match="precision bf16: abacus has no bf16 arithmetic; it may be fp16"
    ):
        require_arithmetic(ABACUS, "bf16")


def test_links_of_kinds() -> None:
    """As of train-plan's machines; where links join pairs, of one of them."""
    fabric = fabric_of_kind("h100", 32)
    card = accelerator("h100")
    known = [server_link(card), network_link(card)]
    assert known == [Link(one.bytes_per_second, one.latency_seconds) for one in fabric.levels]
    assert server_link(accelerator("mi300x")) == replace(
        known[0], bandwidth_bytes_per_second=0.812 * 64e9
    )
    assert server_link(accelerator(GENERIC)) is None
    assert network_link(ABACUS) is None


@pytest.mark.parametrize(
    ("kind", "borrowed", "reached"),
    [
        ("h100-nvl", 1.0, 39e9),  # Hopper: the H100's rates; PCIe 5 through a CPU
        ("l40s", OTHER_DEVICE, 19.5e9),  # PCIe 4
        ("rtx4090", OTHER_DEVICE, 16.2e9),  # through the host's memory
        ("rtx5090", OTHER_DEVICE, 21.9e9),
        ("mi250x", OTHER_DEVICE, 81.2e9),
    ],
)
def test_kinds_without_rates_of_their_own(kind: str, borrowed: float, reached: float) -> None:
    rates, own = rates_of(kind), rates_of("h100" if kind.startswith("h100") else "a100")
    assert rates.borrowed == f"not measured on {kind}"
    assert rates.dense == own.dense.widened(borrowed)
    assert fabric_of_kind(kind, 8).levels[0].bytes_per_second == pytest.approx(reached, rel=5e-3)
    assert ACCELERATORS.keys() - SOURCES.keys() == {GENERIC}


def test_machines_of_ones_own_kind() -> None:
    with pytest.raises(InputError, match="server_bandwidth of abacus is not known"):
        fabric_of_kind(ABACUS, 8)
    linked = replace(ABACUS, server_bytes_per_second=1e10, host_bytes_per_second=2e9)
    fabric = fabric_of_kind(linked, 8)
    assert (fabric.device, fabric.own_kind, fabric.card) == ("abacus", linked, linked)
    assert fabric.host_bytes_per_second == 2e9
    assert fabric_of_kind("h100", 8).own_kind is None
    assert rates_of(linked).borrowed == "not measured on abacus"
    with pytest.raises(InputError, match="of kind 'abacus', but own_kind is 'other'"):
        replace(fabric, own_kind=replace(linked, name="other"))
    level = Level("server", 8, 1e9)
    with pytest.raises(InputError, match="'h100' is a kind that is built in"):
        Fabric("h100", 80e9, (level,), own_kind=replace(linked, name="h100"))
    with pytest.raises(InputError, match=r"'abacus' is not known.*JSON file of a kind"):
        _ = replace(fabric, own_kind=None).card


def test_a_cluster_has_the_name_of_ones_own_kind() -> None:
    text = "\tGPU0\tGPU1\nGPU0\tX\tNV2\nGPU1\tNV2\tX\n"
    cluster = server_of(nvidia_smi(text, "topo"), kind=replace(ABACUS, nvlink_bytes_per_second=3e9))
    assert (cluster.devices[0].kind, cluster.devices[0].memory_bytes) == ("abacus", 8e9)
    assert cluster.bandwidth[0, 1] == 0.812 * 6e9
    servers = mixed_servers([ServerGroup(cluster.devices[:2], 1, Link(1e9), None)], "two")
    assert fabric_of(servers).device == "abacus"


def test_a_model_on_ones_own_kind() -> None:
    chain = analytic_model("vgg19", 2, [ABACUS, "v100"])
    assert [cost.device_kind for cost in chain.layers[0].costs] == ["abacus", "v100"]
    assert "abacus (counted by hand), fp32 peak 1 TFLOP/s" in chain.source


def test_tf32_is_half_of_16_bits_where_there_is_any() -> None:
    """The datasheets' dense peaks: A100 156, H100 494.5, B200 1,125, MI300X 653.7 TFLOP/s."""
    for one in ACCELERATORS.values():
        if one.name == "trainium2":
            assert one.tf32_flops == one.fp16_flops
        elif one.has_bf16 and one.name not in {
            "gaudi3", "mi250x", "mi355x", "tpu-v5p", "tpu-v6e"
        }:  # fmt: skip
            assert one.tf32_flops == pytest.approx(one.fp16_flops / 2, rel=1e-3)
        else:
            assert one.tf32_flops is None
            with pytest.raises(InputError, match=f"precision tf32: {one.name} has no tf32.*a100"):
                require_arithmetic(one, "tf32")


def test_products_in_tf32_keep_all_in_fp32() -> None:
    """A large product is 8 times as fast on an A100, and nothing else changes."""
    model = Architecture("m", 2, 4096, 1000, GroupedAttention(32, 32, 128), FeedForward(16384))
    full, fast = (
        architecture_model(model, 1024, 8, "a100", precision=one) for one in ("fp32", "tf32")
    )
    assert "matrix products and convolutions in TF32" in fast.source
    assert full.layers[1].parameter_bytes == fast.layers[1].parameter_bytes
    times = [chain.layers[1].costs[0].forward_seconds for chain in (full, fast)]
    assert 5 < times[0] / times[1] < 8
    layout = parse_layout("b1")
    seconds = [
        evaluate(
            training_problem(model, fabric_of_kind("a100", 1), sequence=2048, batch=1, precision=p),
            layout,
        )
        for p in ("fp32", "tf32")
    ]
    assert seconds[0].memory == seconds[1].memory
    assert seconds[0].seconds > 3 * seconds[1].seconds
