"""``stagewright model config.json``."""

import json
from pathlib import Path

import pytest
from commands import answered, refused, run

from stagewright.formulations.plans.plan import load_plan
from stagewright.graphs.models.chain import load_model

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 512,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 1024, "num_local_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 4000, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(MIXTRAL))
    return Path("config.json")


def test_a_configuration_becomes_a_model_and_a_plan(config: Path) -> None:
    line, said = answered(
        "model", config, "--device", "h100", "--precision", "bf16", "--sequence", 256,
        "--microbatch-size", 2, "-o", "model.json",
    ).splitlines()  # fmt: skip
    assert line == "model.json: mixtral(layers=6,hidden=512,sequence=256), 8 layers"
    chain = load_model("model.json")
    assert said == chain.source
    assert chain.source.startswith("analytic: h100, bf16 peak 989 TFLOP/s")
    assert "tokens spread evenly over the experts" in chain.source
    assert chain.microbatch_size == 2
    block = 2 * 512 + 512 * (8 + 4) * 64 + 512 * 512 + 4 * 512 + 4 * 3 * 512 * 1024
    assert chain.layers[1].parameter_bytes == 2 * block
    answered("cluster", "1x2", "--intra", "100GB/s", "--device", "h100", "-o", "cluster.json")
    given = ["--model", "model.json", "--cluster", "cluster.json"]
    planned = run("plan", *given, "--microbatches", 4, "--planner", "gpipe", "-o", "plan.json")
    assert planned.exit_code == 0
    assert "warning: mixtral(layers=6,hidden=512,sequence=256): all experts" in planned.stderr
    assert len(load_plan("plan.json").stages) == 2


def test_sizes_and_devices_of_a_configuration(config: Path) -> None:
    several = ["--sequence", 64, "--microbatch-sizes", "1,2", "--device", "b200,mi300x"]
    found = json.loads(answered("model", config, *several, "--optimizer-state", 1))
    costs = found["layers"][0]["costs"]
    kinds = [(cost["device_kind"], cost["microbatch_size"]) for cost in costs]
    assert kinds == [("b200", 1), ("b200", 2), ("mi300x", 1), ("mi300x", 2)]
    assert found["optimizer_bytes_per_parameter_byte"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--sequence is missing: the tokens in a sample, for example 4096"),
        (["--sequence", 0], "sequence must be at least 1, got 0"),
        (
            ["--layers", 3, "--image-size", 9],
            "--layers, --image-size: does not apply to a configuration",
        ),
        (["--sequence", 8, "--attention", "materialized"], "--attention materialized: does not"),
        (
            ["--sequence", 8, "--device", "v100", "--precision", "bf16"],
            "v100 has no bf16 arithmetic",
        ),
        (["--sequence", 8, "-o", "./config.json"], "--output would overwrite NAME"),
    ],
)
def test_options_of_a_configuration_are_refused(
    config: Path, arguments: list[object], message: str
) -> None:
    assert message in refused("model", config, *arguments)
    assert json.loads(config.read_text()) == MIXTRAL


def test_other_files_are_refused(config: Path) -> None:
    config.write_text(json.dumps(MIXTRAL | {"model_type": "rwkv"}))
    message = refused("model", config, "--sequence", 8)
    assert "config.json: model_type must be one of the" in message
    assert "there is 'rwkv', and blocks that share weights, or mixers" in message
    assert "nowhere.json: No such file" in refused("model", "nowhere.json", "--sequence", 8)
