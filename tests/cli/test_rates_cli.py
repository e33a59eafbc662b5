"""``rates`` and ``calibrate``: lists, pictures, and a file that is a rate set."""

import json
from pathlib import Path

import pytest
from commands import answered, answered_json, refused

from stagewright.graphs.machines.rates import rate_sets, rates_named

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
    with Path("runs.csv").open("a") as file:
        file.write("d8 b3,2\n")
    assert "runs.csv:4: " in refused(*CALIBRATE, "runs.csv", *SAMPLES)
