"""From a transformer's configuration to files that a framework launches, on the command line."""

import json
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from commands import answered, answered_json, refused

from stagewright.service.pipelines import batches, launching

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
ASKED = ("plan", "--model", "model.json", "--cluster", "cluster.json", "--time-limit", 0.6)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    answered(
        "model", "config.json", "--device", "a100", "--sequence", 128,
        "--microbatch-sizes", "2,4", "-o", "model.json",
    )  # fmt: skip
    answered(
        "cluster", "2x2", "--intra", "100GB/s", "--inter", "10GB/s", "--memory", "16GB",
        "--device", "a100", "-o", "cluster.json",
    )  # fmt: skip
    return tmp_path


@pytest.mark.parametrize(
    ("to", "file"), [("megatron", "megatron.sh"), ("torchtitan", "stagewright_parallelism.py")]
)
def test_from_a_configuration_to_launchable_files(
    files: Path, monkeypatch: pytest.MonkeyPatch, to: str, file: str
) -> None:
    for timed in (batches, launching):  # however busy the machine is, time is left to compare
        monkeypatch.setattr(timed, "monotonic", partial(next, count(0.0, 1e-6)))
    told = answered(*ASKED, "--global-batch", 16, "--for", to, "-o", "plan.json")
    assert "sizes of microbatches, each with its own bound" in told
    assert "in all these sizes, gap" in told
    assert "the best plan found without this restriction takes" in told
    assert to in next(line for line in told.splitlines() if line.startswith("exports to "))
    answered("export", "plan.json", "--to", to, "--model", "model.json", "-o", "out")
    assert file in [one.name for one in Path().rglob("*")] or Path("out").is_file()
    answered("check", "plan.json", "--model", "model.json", "--cluster", "cluster.json", "--proofs")


def test_that_nothing_was_compared_is_told(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "monotonic", partial(next, count(0.0, 1e6)))  # much passes
    told = answered(*ASKED, "--microbatches", 4, "--for", "megatron")
    assert "no plan without this restriction was found in the time left: --time-limit" in told


def test_the_batch_that_is_exported_is_the_one_that_was_planned(files: Path) -> None:
    """The plan's own size of microbatches counts, not the model's."""
    answered(
        *ASKED, "--global-batch", 16, "--microbatch-size", 2, "--for", "megatron", "-o", "plan.json"
    )
    answered("export", "plan.json", "--to", "megatron", "--model", "model.json", "-o", "run.sh")
    words = Path("run.sh").read_text().split()
    assert words[words.index("--global-batch-size") + 1] == "16"


def test_the_json_object_says_which_frameworks_run_the_plan(files: Path) -> None:
    found = answered_json(*ASKED, "--microbatches", 4, "--for", "deepspeed")
    assert found["exports"]["deepspeed"] is None
    assert found["restriction"]["name"] == "DeepSpeed"
    assert found["restriction"]["bound_seconds"] <= found["cost_seconds"]
    assert found["restriction"]["plans"]["equal_groups"] == [1, 2, 4]
    assert found["sizes"] == []
    periodic = answered_json(*ASKED, "--microbatches", 4, "--planner", "1f1b-star")
    assert all("the plan is periodic" in reason for reason in periodic["exports"].values())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "--microbatches is missing; write for example --microbatches 8, or --global-batch"),
        (("--microbatches", 4, "--global-batch", 8), "--global-batch is in place of"),
        (("--microbatches", 4, "--microbatch-size", 2), "goes with --global-batch"),
        (("--global-batch", 8, "--microbatch-size", 3), "8 samples is no multiple of a microbatch"),
        (("--global-batch", 8, "--microbatch-size", "x"), "--microbatch-size must be auto or a"),
        (("--microbatches", 4, "--for", "jax"), "--for 'jax': no framework of that name"),
        (("--microbatches", 4, "--for", "nemo", "--planner", "dp"), "use launchable"),
        (("--microbatches", 4, "--for", "nemo", "--order", "1f1b"), "--order does not go with"),
        (("--microbatches", 4, "--for", "nemo", "--tensor", 2), "--for is not planned together"),
        (("--microbatches", 4, "--for", "nemo", "--recompute", "full"), "have none or auto"),
    ],
)
def test_bad_input_is_refused(files: Path, arguments, complaint) -> None:
    assert complaint in refused(*ASKED, *arguments)
