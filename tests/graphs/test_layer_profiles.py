"""Layer profiles by tensor degree: the document, and the files of Sailor and of Metis."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.decoder import OPT_350M, Decoder
from benchmarks.sailor_plans import SailorGroup, read_sailor_plan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.metis import read_metis
from stagewright.graphs.importers.sailor import read_sailor
from stagewright.graphs.models.layer_profiles import (
    LayerProfiles,
    LayerSizes,
    Measured,
    load_layer_profiles,
    save_layer_profiles,
)

SAILOR = Path(__file__).parents[3] / "shared" / "data" / "training" / "sailor"
needs_data = pytest.mark.skipif(
    not SAILOR.is_dir(), reason="the public profiles are not beside the checkout"
)


def measured(kind="a", size=1, tensor=1, forward=(1.0, 2.0), backward=(3.0, 4.0)):
    return Measured(kind, size, tensor, forward, backward, (0.5, 0.5))


def refused(call, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# The document.


def test_a_document_is_read_as_it_was_written(tmp_path: Path):
    sizes = LayerSizes(1, (5.0, 6.0), (7.0, 8.0), (9.0, 10.0))
    profiles = LayerProfiles("m", "measured: here", (measured(), measured(size=2)), (sizes,))
    save_layer_profiles(profiles, tmp_path / "profiles.json")
    assert load_layer_profiles(tmp_path / "profiles.json") == profiles


def test_a_smaller_microbatch_takes_no_longer_than_a_larger_one():
    slow = measured(size=1, forward=(5.0, 1.0))
    quick = measured(size=2, forward=(4.0, 3.0))
    profiles = LayerProfiles("m", "s", (slow, quick))
    np.testing.assert_array_equal(profiles.times("a", 1, 1).forward, [4.0, 1.0])
    np.testing.assert_array_equal(profiles.times("a", 2, 1).forward, [4.0, 3.0])
    np.testing.assert_array_equal(profiles.times("a", 1, 1).update, [0.5, 0.5])


def test_what_was_not_measured_is_refused_with_what_was():
    profiles = LayerProfiles("m", "s", (measured(size=2), measured(size=4, tensor=2)))
    refused(lambda: profiles.times("b", 2, 1), "kind 'b'", "measured are a")
    refused(lambda: profiles.times("a", 2, 4), "on 4 devices", "tensor degrees 1, 2")
    refused(lambda: profiles.times("a", 3, 1), "microbatches of 3", "only those of 2")
    refused(lambda: profiles.sizes_at(1), "sizes of layers at tensor degree 1", "none")


def test_profiles_that_do_not_agree_are_refused():
    refused(lambda: LayerProfiles("m", "s", ()), "no measurements")
    refused(lambda: LayerProfiles("m", "s", (measured(), measured())), "measured twice")
    short = Measured("a", 2, 1, (1.0,), (1.0,), (1.0,))
    refused(lambda: LayerProfiles("m", "s", (measured(), short)), "1 layers", "2")
    still = measured(forward=(0.0, 0.0), backward=(0.0, 0.0))
    refused(lambda: LayerProfiles("m", "s", (still,)), "the layers take no time")
    refused(lambda: measured(forward=(1.0,)), "backward_seconds has 2 layers")
    refused(lambda: measured(forward=(1.0, -1.0)), "forward_seconds[1]", "not negative")
    refused(lambda: measured(forward=(1.0, 1e6)), "times are seconds")
    one = LayerSizes(1, (1.0,), (1.0,), (1.0,))
    refused(lambda: LayerProfiles("m", "s", (measured(),), (one,)), "sizes at tensor degree 1")
    refused(lambda: LayerSizes(1, (1.0,), (1.0, 2.0), (1.0,)), "saved_bytes has 2 layers")


# Sizes of a decoder.


def test_parameters_of_opt_350m_with_tables_as_wide_as_the_hidden_states():
    whole = OPT_350M.sizes(1)
    block = 12 * 1024**2 + 13 * 1024
    assert whole.parameters[1:-1] == (block,) * 24
    assert whole.parameters[0] == 50304 * 1024 + 2048 * 1024
    assert whole.parameters[-1] == 50304 * 1024 + 2 * 1024
    assert whole.output_bytes[0] == whole.output_bytes[24] == 4 * 2048 * 1024


def test_ranks_divide_all_but_norms_and_positions():
    whole, part = OPT_350M.sizes(1), OPT_350M.sizes(4)
    shared = 6 * 1024
    assert part.parameters[1] == pytest.approx((whole.parameters[1] - shared) / 4 + shared)
    assert part.parameters[0] == 50688 // 4 * 1024 + 2048 * 1024
    scores = 16 * 2048**2 * 4
    assert whole.saved_bytes[1] - part.saved_bytes[1] == pytest.approx(
        3 / 4 * (scores + 8 * 2048 * 1024 * 4)
    )


def test_a_degree_that_does_not_divide_is_refused():
    small = Decoder(layers=1, hidden=4, heads=2, feed_forward=6, vocabulary=8, sequence=2)
    refused(lambda: small.sizes(4), "tensor degree 4", "2 heads")
    refused(lambda: Decoder(1, 4, 4, 6, 8, 2).sizes(4), "6 feed_forward")


# Sailor.

TABLE = {"1": {"2": {"1": [1, 2, 3], "0": [4, 5, 6]}}}


def write(folder: Path, name: str, content: object) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_sailor_reads_a_folder_of_kinds(tmp_path: Path):
    folder = tmp_path / "model"
    write(folder, "A.json", TABLE)
    write(folder, "B/profile.json", TABLE)
    profiles = read_sailor(folder)
    assert profiles.name == "model"
    assert profiles.device_kinds == ("A", "B")
    times = profiles.times("B", 1, 2)
    np.testing.assert_array_equal(times.forward, [4, 1])
    np.testing.assert_array_equal(times.backward, [5, 2])
    np.testing.assert_array_equal(times.update, [6, 3])
    one = read_sailor(folder / "A.json", device_kind="C")
    assert one.device_kinds == ("C",)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("{", ("A.json", "JSON")),
        ({}, ("A.json", "no measurements")),
        ({"x": {}}, ("A.json", "integer")),
        ({"1": {"0": {"0": [1, 2, 3]}}}, ("A.json", "greater than or equal to 1")),
        ({"1": {"2": {"0": [1, 2]}}}, ("A.json", "1", "2", "0")),
        ({"1": {"2": {"0": [1, 2, -3]}}}, ("A.json", "greater than or equal to 0")),
        ({"1": {"2": {"1": [1, 2, 3]}}}, ("A.json: 1.2", "layer 0 is missing")),
        ({"1": {"2": {}}}, ("A.json: 1.2", "layer 0 is missing")),
        ({"1": {"2": {"0": [1e6, 2, 3]}}}, ("A.json: 1.2", "times are seconds")),
    ],
)
def test_bad_sailor_files_are_refused_in_one_line(tmp_path: Path, content, parts):
    file = write(tmp_path, "A.json", content)
    refused(lambda: read_sailor(file), *parts)


def test_sailor_folders_that_cannot_be_read(tmp_path: Path):
    refused(lambda: read_sailor(tmp_path), str(tmp_path), "no KIND.json")
    refused(lambda: read_sailor(tmp_path / "none.json"), "none.json")
    write(tmp_path, "A.json", TABLE)
    write(tmp_path, "B.json", {"1": {"1": {"0": [1, 2, 3]}}})
    refused(lambda: read_sailor(tmp_path), "1 layers", "2")
    refused(lambda: read_sailor(tmp_path, device_kind="A"), "one file")


PLAN = {
    "pipeline_list": [
        {
            "num_stages": 2,
            "layers_per_stage": [[0], [1, 2]],
            "tmp_per_stage": [[[[["A", 4, "z"]], 4]], [[[["B", 2, "z"]], 1]]],
            "dp": [1, 1],
        }
    ],
    "mbs": 2,
    "gbs": 8,
    "real": 1.5,
    "max_mem": 7,
}


def changed(**fields):
    return {**PLAN, **{k: v for k, v in fields.items() if k in PLAN},
            "pipeline_list": [{**PLAN["pipeline_list"][0],
                               **{k: v for k, v in fields.items() if k not in PLAN}}]}  # fmt: skip


def test_a_plan_of_sailor(tmp_path: Path):
    plan = read_sailor_plan(write(tmp_path, "p.json", PLAN))
    assert plan.layers == (1, 2)
    assert plan.groups == ((SailorGroup("A", "z", 4),), (SailorGroup("B", "z", 1),))
    assert (plan.microbatch_size, plan.batch, plan.seconds, plan.peak_bytes) == (2, 8, 1.5, 7)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"mbs": 0}, "mbs"),
        ({"num_stages": 3}, "num_stages is 3"),
        ({"layers_per_stage": [[0], [2, 1]]}, "not 0, 1, 2"),
        ({"tmp_per_stage": [[[[["A", 2, "z"]], 4]]] * 2}, "tensor degree 4 on 2 devices"),
        ({"tmp_per_stage": [[[[["A", 2, "z"]] * 2, 4]]] * 2}, "in 2 servers"),
    ],
)
def test_bad_plans_of_sailor_are_refused(tmp_path: Path, fields, part):
    file = write(tmp_path, "p.json", changed(**fields))
    refused(lambda: read_sailor_plan(file), "p.json", part)


@needs_data
def test_public_profiles_are_read():
    opt = read_sailor(SAILOR / "profiles" / "OPT-350")
    assert opt.device_kinds == ("A100-40", "GH-96", "V100-16")
    assert opt.layers == 26
    assert opt.microbatch_sizes("V100-16", 1) == (1, 2, 4)
    assert read_sailor(SAILOR / "profiles" / "LLAMA-3-8").layers == 35


# Metis.


def metis(**fields):
    times = {"optimizer_time_ms": 30.0, "layer_compute_total_ms": [3.0, 6.0]}
    parameters = {"parameters": {"parameters_per_layer_bytes": [100, 200]}}
    return {
        "model": {"model_name": "GPT3", "num_layers": 2, **parameters},
        "execution_time": {**times, **fields},
        "execution_memory": {"total_memory": 5},
    }


def test_metis_divides_what_its_files_tell_together(tmp_path: Path):
    write(tmp_path, "DeviceType.A100_tp2_bs4.json", metis())
    profiles = read_metis(tmp_path)
    assert profiles.name == "GPT3"
    assert "0.333 of a layer's time" in profiles.source
    times = profiles.times("A100", 4, 2)
    np.testing.assert_allclose(times.forward, [0.001, 0.002])
    np.testing.assert_allclose(times.backward, [0.002, 0.004])
    np.testing.assert_allclose(times.update, [0.01, 0.02])


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("A100_tp2_bs4.json", metis(), "DeviceType.KIND_tpT_bsB.json"),
        ("DeviceType.A100_tp0_bs4.json", metis(), "DeviceType.KIND_tpT_bsB.json"),
        ("DeviceType.A_tp1_bs1.json", "[", "JSON"),
        ("DeviceType.A_tp1_bs1.json", {"model": {}}, "model"),
        ("DeviceType.A_tp1_bs1.json", metis(optimizer_time_ms=-1), "optimizer_time_ms"),
        (
            "DeviceType.A_tp1_bs1.json",
            metis(layer_compute_total_ms=[1.0]),
            "parameters_per_layer_bytes has 2 layers",
        ),
    ],
)
def test_bad_metis_files_are_refused_in_one_line(tmp_path: Path, name, content, part):
    write(tmp_path, name, content)
    refused(lambda: read_metis(tmp_path), name, part)


def test_metis_needs_files(tmp_path: Path):
    refused(lambda: read_metis(tmp_path), "no DeviceType.KIND_tpT_bsB.json")
