"""``train-plan`` and ``check`` of layer profiles: tables, files, exit codes, refusals."""

import json
from pathlib import Path

import pytest
from commands import answered, answered_json, refused, rewrite, run

from stagewright.formulations.parallelism.profiles.document import load_profiled_plan, violations
from stagewright.graphs.machines.cluster import Cluster, Device, Link, ServerLinks, save_cluster
from stagewright.graphs.models.layer_profiles import (
    LayerProfiles,
    LayerSizes,
    Measured,
    load_layer_profiles,
    save_layer_profiles,
)

PNG = b"\x89PNG\r\n\x1a\n"
LAYERS = 4
MACHINES = {"--servers": "a100:1x2,v100:1x2", "--memory": "8GB", "--network-bandwidth": "10GB/s"}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 1000,
    "n_positions": 128,
    "tie_word_embeddings": False,
}


def profiles(kinds: tuple[str, ...] = ("A100", "v100"), sizes: bool = True) -> LayerProfiles:
    """A100s take half the time of V100s; two devices two thirds of one."""
    measured = tuple(
        Measured(
            kind,
            size,
            tensor,
            (0.01 * size * slow / tensor**0.6,) * LAYERS,
            (0.02 * size * slow / tensor**0.6,) * LAYERS,
            (0.001,) * LAYERS,
        )
        for kind, slow in zip(kinds, (1, 2), strict=False)
        for size in (2, 4)
        for tensor in (1, 2)
    )
    known = tuple(
        LayerSizes(t, (5e7 / t,) * LAYERS, (1e8 / t,) * LAYERS, (4e6,) * LAYERS) for t in (1, 2)
    )
    return LayerProfiles("four", "measured: by hand", measured, known if sizes else ())


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_layer_profiles(profiles(), "profiles.json")
    Path("config.json").write_text(json.dumps(GPT2))


def plan(changed: dict[str, object] | None = None, file: str = "profiles.json") -> list[object]:
    options = {**MACHINES, "--global-batch": 16, "--time-limit": 20} | (changed or {})
    given = [x for pair in options.items() if pair[1] is not None for x in pair]
    return ["train-plan", file, *given]


# Answers.


def test_table_document_picture_and_check() -> None:
    shown = answered(*plan(), "-o", "plan.json", "--png", "plan.png")
    for part in ("A100", "v100", "2 of 2", "8 GB", "samples/s", "by the model), bound", "gap"):
        assert part in shown
    assert "of all plans of the class: consecutive layers" in shown
    assert "plan.json is written" in shown
    assert Path("plan.png").read_bytes().startswith(PNG)
    document = load_profiled_plan("plan.json")
    assert violations(document) == ()
    assert sum(stage.layers for stage in document.plan.stages) == LAYERS
    assert "plan.json: valid" in answered("check", "plan.json")


def test_the_answer_in_json() -> None:
    found = answered_json(*plan())
    assert found["status"] == "optimal"
    assert found["samples_per_second"] == pytest.approx(16 / found["iteration_seconds"])
    assert found["bound_seconds"] <= found["iteration_seconds"] * (1 + 1e-9)
    stages = found["stages"]
    assert [one["first"] for one in stages] == [0, *(one["stop"] for one in stages)][:-1]
    assert stages[-1]["stop"] == LAYERS
    assert {one["device_kind"] for one in found["pools"]} == {"A100", "v100"}
    for pool, one in enumerate(found["pools"]):
        used = sum(s["replicas"] * s["tensor"] for s in stages if s["pool"] == pool)
        peaks = [s["memory_bytes"] for s in stages if s["pool"] == pool]
        assert (one["used"], one["peak_bytes"]) == (used, max(peaks, default=None))
        assert all(peak <= one["capacity_bytes"] == 8e9 for peak in peaks)
    assert found["microbatch_size"] * sum(found["microbatches"]) == 16


def test_both_kinds_are_faster_than_one() -> None:
    both, one = (
        answered_json(*plan({"--servers": servers}))["iteration_seconds"]
        for servers in ("a100:1x2,v100:1x2", "a100:1x2")
    )
    assert both < one


def test_a_cluster_file_is_as_its_servers() -> None:
    names = (("a0", "a1"), ("v0", "v1"))
    devices = [Device(n, "a100" if n[0] == "a" else "V100", 8e9) for row in names for n in row]
    links = ServerLinks(names, Link(40e9), Link(10e9))
    save_cluster(Cluster("mixed", tuple(devices), links), "cluster.json")
    changed: dict[str, object] = dict.fromkeys(MACHINES) | {"--cluster": "cluster.json"}
    found = answered_json(*plan(changed))
    listed = answered_json(*plan({"--server-bandwidth": "40GB/s"}))
    assert found["pools"] == [one | {"zone": "whole"} for one in listed["pools"]]
    # A file's links have no latency here, those of the options have.
    assert found["iteration_seconds"] == pytest.approx(listed["iteration_seconds"], rel=1e-3)


def test_no_plan_fits_and_what_it_lacks() -> None:
    result = answered(*plan({"--memory": "5GB"}), "-o", "plan.json", "--png", "x.png", code=1)
    assert "four: infeasible" in result
    assert "times the memory one does" in result
    assert "which has 5 GB" in result
    assert "is the reserve)" in result
    assert not Path("plan.json").exists()
    assert answered_json(*plan({"--memory": "5GB"}), code=1)["iteration_seconds"] is None
    roomy = answered_json(*plan({"--memory": "5GB", "--reserve": "1GB"}))
    assert roomy["status"] == "optimal"


def test_remarks_on_pools_without_use() -> None:
    found = answered_json(*plan({"--servers": "a100:1x2,a100:1x1,v100:1x1"}))
    assert any("there are 2 pools" in one for one in found["remarks"])
    fewer = [one for one in profiles().measured if one.device_kind == "A100" or one.tensor == 2]
    save_layer_profiles(LayerProfiles("four", "s", tuple(fewer), profiles().sizes), "profiles.json")
    found = answered_json(*plan({"--servers": "a100:1x2,v100:1x1"}))
    (remark,) = found["remarks"]
    assert remark.startswith("not used: servers of 1 device of v100 have no room")


# What is refused.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--servers": None}, "layer profiles need one of --servers, for example"),
        ({"--cluster": "config.json"}, "config.json: expected a 'stagewright-cluster' document"),
        ({"--servers": "h100:1x2"}, "--servers: 'h100' was not profiled, only A100, v100"),
        ({"--servers": "a100:2"}, "--servers 'a100:2': write KIND:SERVERSxGPUS"),
        ({"--servers": "a100:0x2"}, "A100: servers must be at least 1, got 0"),
        ({"--global-batch": 7}, "--global-batch 7 is no multiple of a measured microbatch size"),
        ({"--global-batch": 0}, "--global-batch must be at least 1"),
        ({"--memory": "h100=8GB"}, "--memory: 'h100' was not profiled"),
        ({"--memory": "a100=much"}, "--memory 'much' is not a size"),
        ({"--network-bandwidth": "10"}, "--network-bandwidth '10' has no unit"),
        ({"--time-limit": 0}, "--time-limit must be a positive number of seconds"),
        ({"--reserve": "some"}, "'some' is not a size"),
        ({"--sequence": 64}, "--sequence does not apply to profiles.json, which is a file of"),
        ({"--zero": "1", "--gpus": 4}, "--zero, --gpus do not apply to profiles.json"),
    ],
)
def test_refusals(changed: dict[str, object], message: str) -> None:
    assert message in refused(*plan(changed))


def test_the_nearest_batches_are_told() -> None:
    assert refused(*plan({"--global-batch": 7})).endswith("the nearest batches are 6 and 8")


def test_all_that_is_missing_of_an_unknown_kind_is_told_at_once() -> None:
    save_layer_profiles(profiles(("A100-40", "V100-16")), "profiles.json")
    bare: dict[str, object] = dict.fromkeys(MACHINES) | {"--servers": "a100-40:2x2"}
    line = refused(*plan(bare))
    assert "give --memory, --server-bandwidth, --network-bandwidth" in line
    assert "for example --memory A100-40=40GB" in line
    alone = bare | {"--servers": "a100-40:1x2", "--memory": "A100-40=8GB"}
    answered(*plan(alone | {"--server-bandwidth": "10GB/s"}))


def test_a_degree_without_room_or_without_sizes() -> None:
    whole = profiles()
    two = tuple(one for one in whole.measured if one.tensor == 2)
    save_layer_profiles(LayerProfiles("four", "s", two, whole.sizes), "profiles.json")
    line = refused(*plan({"--servers": "a100:4x1"}))
    assert "servers of 1 device of A100 have no room for a measured tensor degree (2)" in line
    save_layer_profiles(LayerProfiles("four", "s", two, whole.sizes[:1]), "profiles.json")
    assert "for which layers have no sizes" in refused(*plan())


def test_profiles_that_are_not_imported() -> None:
    Path("raw").mkdir()
    assert "raw has no config.json; import profiles first" in refused(*plan(file="raw"))
    Path("raw/A.json").write_text(json.dumps({"1": {"1": {"0": [1, 1, 1]}}}))
    assert "seems to be a profile of sailor; import" in refused(*plan(file="raw/A.json"))
    Path("raw/DeviceType.A_tp1_bs1.json").write_text(json.dumps({"execution_time": {}}))
    assert "--from metis" in refused(*plan(file="raw"))
    save_layer_profiles(profiles(sizes=False), "profiles.json")
    assert "import them with --config and --sequence" in refused(*plan())


def test_options_do_not_apply_to_a_configuration_on_servers_of_several_kinds() -> None:
    given = ("train-plan", "config.json", "--global-batch", 8)
    asked = (*given, "--servers", "a100:1x2", "--zero", 1, "--mtbf", "9h")
    assert "--zero, --mtbf do not apply to a config.json on --servers" in refused(*asked)
    machines = ("--device", "h100", "--gpus", 2)
    assert "--sequence is missing" in refused(*given, *machines, "--time-limit", 3)


# Documents.


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("iteration_seconds", "iteration_seconds is"),
        ("memory_bytes", "memory_bytes[0] is"),
        ("bound", "bound is"),
        ("microbatches", "the batch has 16"),
        ("memory", "too little"),
    ],
)
def test_a_changed_document_is_invalid(field: str, message: str) -> None:
    answered(*plan(), "-o", "plan.json")
    document = json.loads(Path("plan.json").read_text())
    changed = {
        "iteration_seconds": 0.9 * document["iteration_seconds"],
        "memory_bytes": [1.0, *document["memory_bytes"][1:]],
        "bound": document["bound"] | {"seconds": 2 * document["iteration_seconds"]},
    }
    if field == "microbatches":
        document["plan"]["microbatches"][0] += 1
    elif field == "memory":
        for pool in document["problem"]["cluster"]["pools"]:
            pool["memory_bytes"] = 2e6
    else:
        document[field] = changed[field]
    Path("plan.json").write_text(json.dumps(document))
    found = answered_json("check", "plan.json", code=1)
    assert found["status"] == "invalid"
    assert any(message in one for one in found["violations"])
    assert "plan.json: " in answered("check", "plan.json", code=1)


def test_what_does_not_take_a_plan_by_profiles_says_so() -> None:
    answered(*plan(), "-o", "plan.json")
    assert "needs no --model" in refused("check", "plan.json", "--model", "profiles.json")
    assert "check computes its memory again" in refused("memory", "plan.json")
    rewrite(Path("plan.json"), version=2)
    assert "version 2 is not known" in refused("check", "plan.json")


# Sizes from a configuration.

TABLE = {"1": {"2": {str(i): [0.01, 0.02, 0.001] for i in range(LAYERS)}}}


def test_sizes_are_imported_with_a_configuration() -> None:
    Path("A100.json").write_text(json.dumps(TABLE))
    sized = ("import", "A100.json", "--from", "sailor", "--config", "config.json")
    answered(*sized, "--sequence", 128, "--precision", "fp16", "-o", "sized.json")
    found = load_layer_profiles("sized.json")
    assert (found.precision, [one.tensor for one in found.sizes]) == ("fp16", [2])
    table = {**TABLE, "--servers": "a100:1x2"}
    machines = {"--servers": table["--servers"], "--network-bandwidth": None}
    shown = answered(*plan(machines, "sized.json"))
    assert "optimal by the model" in shown
    assert "no time of the optimizer" not in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sequence", 8), "--sequence: belongs to --config"),
        (("--config", "config.json"), "--config needs --sequence"),
        (("--config", "config.json", "--sequence", 999), "--sequence must be at most the 128"),
        (("--config", "config.json", "--sequence", 8, "--precision", "fp8"), "fp32, fp16 or bf16"),
        (("--config", "none.json", "--sequence", 8), "none.json: No such file"),
    ],
)
def test_refused_sizes(options: tuple[object, ...], message: str) -> None:
    Path("A100.json").write_text(json.dumps(TABLE))
    assert message in refused("import", "A100.json", "--from", "sailor", *options)


def test_a_configuration_of_another_model_is_refused() -> None:
    Path("A100.json").write_text(json.dumps(TABLE))
    rewrite(Path("config.json"), n_layer=7)
    line = refused(
        "import", "A100.json", "--from", "sailor", "--config", "config.json", "--sequence", 8
    )
    assert "the profiles have 4 layers, but the configuration 7 blocks" in line
    other = run("import", "A100.json", "--from", "pipedream", "--config", "config.json")
    assert "--config is for the layer profiles of sailor and metis" in other.stderr
