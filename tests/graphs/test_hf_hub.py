"""Models by name: the configuration of the local cache, without a network."""

import json
from pathlib import Path

import pytest
from commands import answered, refused

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers import hf_hub
from stagewright.graphs.importers.hf_config import architecture_of, read_hf_config

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of huggingface_hub with one model, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--owner--tiny"
    for name, text in (
        ("refs/main", COMMIT),
        (f"snapshots/{COMMIT}/config.json", json.dumps(CONFIG)),
    ):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(text)
    return tmp_path


def test_a_name_is_the_model_of_its_configuration(cache, monkeypatch) -> None:
    monkeypatch.chdir(cache)
    Path("config.json").write_text(json.dumps(CONFIG))
    assert read_hf_config("owner/tiny") == read_hf_config("config.json")
    answered("model", "owner/tiny", "--device", "h100", "--sequence", 64, "-o", "model.json")
    assert len(json.loads(Path("model.json").read_text())["layers"]) == 5
    told = answered(
        "train-plan", "owner/tiny", "--device", "h100", "--gpus", 8, "--global-batch", 8,
        "--sequence", 64,
    )  # fmt: skip
    assert "tiny on" in told
    answered(
        "memory", "owner/tiny", "--layout", "p1 t1 d8 b1", "--sequence", 64, "--device", "h100"
    )


def test_a_file_of_that_name_comes_first(cache, monkeypatch) -> None:
    monkeypatch.chdir(cache)
    Path("owner").mkdir()
    Path("owner/tiny").write_text(json.dumps(CONFIG | {"num_hidden_layers": 2}))
    assert read_hf_config("owner/tiny") == architecture_of(CONFIG | {"num_hidden_layers": 2})


def test_a_folder_is_the_model_of_its_configuration(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt").mkdir()
    Path("gpt/config.json").write_text(json.dumps(CONFIG))
    assert read_hf_config("gpt") == architecture_of(CONFIG)
    sizes = ["--sequence", 64, "--device", "h100"]
    answered("model", "./gpt", *sizes, "-o", "model.json")
    assert len(json.loads(Path("model.json").read_text())["layers"]) == 5
    assert "gpt" in json.loads(answered("model", "gpt", *sizes))["name"]  # the built-in one
    answered("train-plan", "gpt", *sizes, "--gpus", 1, "--global-batch", 8, "--alike")
    answered("memory", "gpt", "--layout", "d12", *sizes)
    answered("cluster", "1x2", "--device", "h100", "-o", "cluster.json")
    for model in ("gpt", "gpt/config.json"):
        said = refused("plan", "--model", model, "--cluster", "cluster.json", "--microbatches", 4)
        assert said.strip().endswith("config.json: `stagewright model` makes a model of it")


def test_what_is_not_there_is_said_in_one_line(cache, monkeypatch) -> None:
    with pytest.raises(InputError, match=r"owner/other: huggingface_hub has no config.json of a"):
        read_hf_config("owner/other")
    said = refused("model", "owner/other", "--device", "h100", "--sequence", 64)
    assert said.startswith("owner/other: huggingface_hub has no config.json")
    assert said.count("\n") <= 1


def test_without_huggingface_hub_the_remedy_is_named(monkeypatch) -> None:
    def absent(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(hf_hub.importlib, "import_module", absent)
    with pytest.raises(InputError, match=r"pip install huggingface_hub, or give its config.json"):
        hf_hub.hub_config("owner/tiny")


@pytest.mark.parametrize("path", ["config.json", "a/config.json", "a/b/c", "gpt2", "/a/b"])
def test_paths_are_no_names(path: str) -> None:
    assert not hf_hub.is_hub_name(path)
