"""``rates``, ``calibrate``, ``anchor``: lists, pictures, and files that are rate sets."""

import json
from pathlib import Path

import pytest
from commands import answered, answered_json, refused

from stagewright.graphs.documents.documents import write
from stagewright.graphs.importers.hf_config import read_hf_config
from stagewright.graphs.importers.timed_layers import TimedLayers, TimedUpdate
from stagewright.graphs.machines.anchors import TimedLayer, TimedModel
from stagewright.graphs.machines.rates import rate_sets, rates_named, rates_of

PNG = b"\x89PNG\r\n\x1a\n"
LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
CALIBRATE = ("calibrate", "--config", "config.json", "--device", "h100")
SAMPLES = ("--sequence", 2048, "--global-batch", 64)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA))
    Path("runs.csv").write_text("layout,seconds\nd8 b4 zero2,2.1\nt2 d4 b4,2.4\n", encoding="utf-8")


def test_all_sets_are_listed_and_one_with_its_constants() -> None:
    sets = answered_json("rates")["sets"]
    assert [one["name"] for one in sets] == sorted(rate_sets())
    assert all(one["source"] and one["fitted_to"] for one in sets)
    # With a constant for each of two runs, none can be left out of the fit.
    assert [one["name"] for one in sets if not one["errors"]] == ["pytorch-v100"]
    shown = answered("rates", "torchtitan-h100", "--png", "rates.png")
    assert set(rate_sets()) <= {*answered("rates").split()}  # names are whole
    assert "attention_backward" in shown
    assert f"error left out {rate_sets()['torchtitan-h100'].mean_error:.1%}" in shown
    assert Path("rates.png").read_bytes().startswith(PNG)
    assert "known are fsdp-a100" in refused("rates", "fast")


def test_runs_make_a_rate_set_that_is_read_as_one() -> None:
    shown = answered(*CALIBRATE, "runs.csv", *SAMPLES, "--for", "torchtitan", "-o", "mine.json")
    assert "runs.csv:3" in shown
    assert "from torchtitan-h100" in shown
    own = rates_named("mine.json")
    assert (own.name, own.source) == ("mine", "runs.csv; from torchtitan-h100")
    assert len(own.errors) == 2
    assert "mine: torchtitan on h100" in answered("rates", "mine.json")


def test_a_log_needs_a_layout_and_one_run_leaves_none_out() -> None:
    lines = [f"steps: {i} loss: 8.1 iter time (s): 2.100 samples/sec: 30.476" for i in (10, 20)]
    Path("log.txt").write_text("\n".join(lines))
    assert "--layout is given 0 times for 1 logs" in refused(*CALIBRATE, "log.txt", *SAMPLES)
    found = answered_json(*CALIBRATE, "log.txt", *SAMPLES, "--layout", "d8 b4 zero2")
    assert found["rates"]["mean_error"] is None
    assert found["rows"][0]["after_seconds"] == pytest.approx(2.1, rel=1e-3)
    assert "log.txt:1-2: no batch" in refused(
        *CALIBRATE, "log.txt", "--layout", "d8 b4", "--sequence", 2048
    )


def test_a_run_that_cannot_be_is_refused_by_its_line() -> None:
    Path("names.csv").write_text("layout,secs\nd8,2\n")
    assert "names.csv:1: column 'secs' is not known; columns are layout, seconds, gpus" in (
        said := refused(*CALIBRATE, "names.csv", *SAMPLES)
    )
    assert said.endswith("layout and seconds must be there")
    with Path("runs.csv").open("a") as file:
        file.write("d8 b3,2\n")
    assert "runs.csv:4: " in refused(*CALIBRATE, "runs.csv", *SAMPLES)


def test_timed_layers_make_rates_that_their_model_is_planned_with() -> None:
    machine = ("--device", "h100", "--gpus", 1)
    shown = answered("anchor", "config.json", *machine, *SAMPLES, "-o", "anchor.py")
    assert "torchrun --standalone --nproc-per-node=1 anchor.py measured.json" in shown
    assert "import torch" in Path("anchor.py").read_text()
    assert "needs --global-batch" in refused("anchor", "config.json", *machine)
    layers = tuple(
        TimedLayer(kind, 1, 1, False, 4, False, 0.1, 0.1, 0.1, 0.9, 1.1, 1e6)  # type: ignore[arg-type]
        for kind in ("embedding", "dense", "head")
    )
    model = TimedModel(read_hf_config(Path("config.json")), 2048, "h100", 2)
    update, rates = TimedUpdate(10, 0.0), rates_of("h100")
    timed = TimedLayers(model, rates, "torchtitan", "1 x H100", "torch 2", layers, update)
    write(TimedLayers, timed, "measured.json")
    assert "of the options only" in refused("anchor", "measured.json", "--gpus", 8)
    assert "3 timings of llama" in answered("anchor", "measured.json", "-o", "mine.json")
    planned = ("train-plan", "config.json", *machine, *SAMPLES, "--rates", "mine.json")
    found = answered_json(*planned, "--for", "torchtitan", "--explain", "b4")["explained"]
    assert found["seconds"] == pytest.approx(16 * 18 * 0.3)
    assert found["causes"][0] == "rates timed through torch 2, not torchtitan"
    assert "rates are of the timed layers of llama" in refused(*planned, "--precision", "fp32")
