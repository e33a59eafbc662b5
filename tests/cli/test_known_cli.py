"""``devices``, ``models``, ``frameworks``: what is known, each with where it is from."""

from commands import answered, answered_json, refused

from stagewright.executor.export.layouts import EVERY_FORMAT
from stagewright.executor.export.layouts.rules import described
from stagewright.graphs.importers.diffusers_config import CLASSES
from stagewright.graphs.importers.hf_towers import WRAPPERS
from stagewright.graphs.importers.hf_types import TYPES
from stagewright.graphs.machines.devices import ACCELERATORS


def test_every_kind_of_device_has_a_source_and_rates() -> None:
    listed = {one["device"]["name"]: one for one in answered_json("devices")["devices"]}
    assert listed.keys() == ACCELERATORS.keys()
    assert all(one["source"] and one["nearest_rates"] for one in listed.values())
    assert "torchtitan-h100" in listed["h100"]["rates"]
    assert "rates: borrowed, megatron-a100-2022" in answered("devices", "rtx4090")
    assert "device 'abacus' is not known; known are generic, k80" in refused("devices", "abacus")


def test_every_type_of_model_has_its_frameworks() -> None:
    listed = {one["name"]: one for one in answered_json("models")["models"]}
    assert listed.keys() == TYPES.keys() | WRAPPERS.keys() | CLASSES.keys()
    assert listed["llava"]["traits"] == ["a tower for images"]
    assert listed["llama"]["traits"] == []
    assert listed["llama"]["frameworks"] == [*EVERY_FORMAT]
    assert {"experts", "attention sinks"} <= {*listed["gpt_oss"]["traits"]}
    assert listed["bert"]["frameworks"] == ["deepspeed", "accelerate", "nnscaler", "plan"]
    assert "latent attention" in answered("models", "kimi_k2")
    recipes = [
        (to, name)
        for to in ("megatron-bridge", "nemo")
        for models in described(to)["models"]
        for name in models.get("recipes", ())
    ]
    assert ("nemo", "mamba2") in recipes
    assert [one for one in recipes if one[0] not in listed[one[1]]["frameworks"]] == []


def test_frameworks_do_what_their_rules_let_through() -> None:
    listed = {one["name"]: one for one in answered_json("frameworks")["frameworks"]}
    assert listed.keys() == EVERY_FORMAT.keys()
    assert listed["accelerate"]["degrees"] == ["tensor", "context", "ZeRO 2", "ZeRO 3"]
    assert listed["deepspeed"]["schedules"] == []
    assert "expert" in listed["deepspeed"]["degrees"]
    assert "zero-bubble" in listed["torchtitan"]["schedules"]
    assert "fp8" not in listed["torchtitan"]["precisions"]
    assert {"selective", "modules"} <= {*listed["megatron"]["recomputation"]}
    for name, one in listed.items():
        rules = [rule["source"] for rule in one["rules"]]
        assert rules == [rule.source for rule in EVERY_FORMAT[name].rules]
        assert all(source.startswith(tuple(one["releases"])) for source in rules)
    assert listed["torchtitan"]["models"] == ["llama3", "qwen3", "deepseek_v3", "gpt_oss"]
    assert "no pipelines" in answered("frameworks", "deepspeed")
