"""Completion by the shell, and what it knows: ``devices``, ``models``, ``frameworks``."""

import pytest
from commands import answered, answered_json, refused
from typer.testing import CliRunner

from stagewright.cli import app, completing
from stagewright.executor.export import FORMATS
from stagewright.executor.export.layouts import EVERY_FORMAT
from stagewright.executor.export.layouts.rules import described
from stagewright.executor.export.runtimes import RUNTIMES
from stagewright.formulations.cloud.strategies import STRATEGIES
from stagewright.graphs.importers.diffusers_config import CLASSES
from stagewright.graphs.importers.hf_towers import WRAPPERS
from stagewright.graphs.importers.hf_types import TYPES
from stagewright.graphs.machines.devices import ACCELERATORS
from stagewright.service.cloud.requests import ALL, OPTIMAL, ROLLING
from stagewright.solvers.backends.backend import BACKENDS
from stagewright.solvers.clusters.policies import POLICIES
from stagewright.solvers.planning import PLANNERS


def completed(line: str) -> list[str]:
    """What bash offers for the last word of ``line``."""
    environment = {
        "_STAGEWRIGHT_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    result = CliRunner(env=environment).invoke(app, [], prog_name="stagewright")
    assert result.exit_code == 0, result.output
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("stagewright train", ["train-plan", "train"]),
        ("stagewright run --lo", ["--log", "--loss", "--load-parameters"]),
        ("stagewright plan --planner 1f", ["1f1b-star"]),
        ("stagewright plan --planner fa", ["fastt"]),
        ("stagewright sweep --planner dp,pi", ["dp,pipedream", "dp,pipedream-async"]),
        ("stagewright train --planner d", ["dag", "dpos", "data-parallel"]),
        ("stagewright export plan.json --to s", ["slurm"]),
        (
            "stagewright train-plan config.json --device h",
            ["h100", "h100-pcie", "h100-nvl", "h800", "h200", "h20"],
        ),
        ("stagewright schedule --kind zb-", ["zb-h1", "zb-h2"]),
        ("stagewright import file --from p", ["pipedream", "piper"]),
        ("stagewright allocate --policy min-cost", ["min-cost", "min-cost-slo"]),
        ("stagewright train-plan config.json --recompute s", ["selective"]),
        ("stagewright cloud prices.json --strategy o", ["optimal"]),
        ("stagewright model bert", ["bert-large", "bert-48"]),
        ("stagewright plan --model mod", []),  # a file, which the shell completes
    ],
)
def test_words_are_completed(line: str, offered: list[str]) -> None:
    assert completed(line) == offered


def test_every_option_with_values_is_one_of_a_command() -> None:
    """A name in the table that no command has would never be offered."""
    for name in completing.VALUES:
        command, _, option = name.rpartition(" ")
        values = list(completing.VALUES[name]())
        assert values
        if option.startswith("--"):
            of = command or next(one for one in COMMAND_OF if one[0] == option)[1]
            assert completed(f"stagewright {of} {option} {values[-1]}")[:1] == [values[-1]]


COMMAND_OF = [
    ("--backend", "schedule"), ("--contention", "train"), ("--device", "cluster"),
    ("--for", "what-if"), ("--kind", "schedule"), ("--lr-schedule", "run"),
    ("--optimizer", "profile"), ("--order", "plan"), ("--planner", "plan"), ("--policy", "rounds"),
    ("--recompute", "plan"), ("--schedule", "train-plan"), ("--strategy", "cloud"),
    ("--to", "export"), ("--training", "plan"),
]  # fmt: skip


def test_repeated_names_are_those_of_the_registries() -> None:
    assert set(completing.PLANNERS) == set(PLANNERS)
    assert set(completing.POLICIES) == set(POLICIES)
    assert tuple(FORMATS) == completing.OF_PLANS
    assert set(completing.RUNTIMES) == set(RUNTIMES)
    assert tuple(EVERY_FORMAT) == completing.OF_LAYOUTS
    assert set(completing.BACKENDS) == set(BACKENDS)
    assert set(completing.STRATEGIES) == {*STRATEGIES, ROLLING, OPTIMAL, ALL}


def test_scripts_of_shells_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    shown = CliRunner().invoke(app, ["--show-completion"], prog_name="stagewright")
    assert shown.exit_code == 0
    assert "_STAGEWRIGHT_COMPLETE=complete_bash" in shown.stdout


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
