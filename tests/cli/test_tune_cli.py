"""``tune``: from a configuration to the proved-best run, on a table behind a launcher."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import answered, answered_json, refused, run
from documentation import require_schema

from stagewright.formulations.parallelism.trials import load_tuning

MODEL = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
BEGIN = (
    "tune", "config.json", "--device", "h100", "--gpus", 8, "--global-batch", 64, "--sequence",
    1024, "--for", "megatron", "--zero", 1, "--chunks", 1, "--schedule", "1f1b", "--candidates", 12,
    "--recompute", "none", "-o", "tuning",
)  # fmt: skip
LINE = "iteration {}/ 20 | elapsed time per iteration (ms): {} | global batch size: 64 |\n"
FAKE = """\
sleep 0.02
ms=$(grep -F "$1," "$(dirname "$0")/table.csv" | cut -d, -f2)
case $ms in '') echo 'torch.OutOfMemoryError: CUDA out of memory'; exit 1;; esac
for i in 1 2 3 4; do
  echo "iteration $i/ 4 | elapsed time per iteration (ms): $ms | global batch size: 64 |"
done
"""
LAUNCH = ("--launch", "sh ../../fake.sh {layout}")


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of milliseconds behind a launcher: the predicted ones, off by up to a tenth."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(MODEL))
    answered(*BEGIN)
    draw = random.Random(1)
    rows = [
        f"{one.layout},{1e3 * one.seconds * draw.uniform(0.95, 1.1):.3f}\n"
        for one in load_tuning("tuning/tuning.json").candidates[1:]
    ]
    Path("table.csv").write_text("".join(rows))
    Path("fake.sh").write_text(FAKE)


def fastest() -> str:
    rows = [one.split(",") for one in Path("table.csv").read_text().splitlines()]
    return min(rows, key=lambda one: float(one[1]))[0]


def test_a_loop_ends_with_the_best_and_goes_on_where_it_was() -> None:
    shown = answered("tune", "tuning", *LAUNCH, "--trials", 2)
    assert "out of memory" in shown
    assert "next: " in shown
    (first, second) = load_tuning("tuning/tuning.json").trials
    assert (first.outcome, second.outcome) == ("out of memory", "measured")
    found = answered_json(*BEGIN, *LAUNCH, "--parallel", 2)
    assert found["stop"]
    table = dict(one.split(",") for one in Path("table.csv").read_text().splitlines())
    best = float(table[fastest()]) / 1e3
    assert found["best"]["seconds"] <= best / 0.98
    assert found["said"].startswith(
        "stop: no layout of the class that fits is faster by more than 2%"
    )
    assert f"which happened in {found['wrong']} of {found['runs']} runs here" in found["said"]
    assert [one["layout"] for one in found["tried"]][:2] == [str(first.layout), str(second.layout)]
    assert "valid" in answered("check", "tuning/tuning.json")
    assert require_schema(json.loads(Path("tuning/tuning.json").read_text())) == "tuning"
    assert answered_json("tune", "tuning", *LAUNCH)["tried"] == found["tried"]


def test_logs_and_tables_are_read_and_what_contradicts_is_refused() -> None:
    assert "nothing is measured yet" in answered("tune", "read", "tuning")
    of = load_tuning("tuning/tuning.json")
    (folder,) = (one.parent for one in Path("tuning").glob("*/layout.json"))
    assert "--mock-data" in (folder / "train.sh").read_text()
    (folder / "node0.log").write_text("".join(LINE.format(i, 900.0 + i) for i in range(1, 21)))
    found = answered_json("tune", "read", "tuning", "--png", "trials.png")
    assert found["best"]["seconds"] == pytest.approx(0.9155)
    assert Path("trials.png").read_bytes().startswith(b"\x89PNG")
    before = Path("tuning/tuning.json").read_bytes()
    assert answered_json("tune", "read", "tuning", folder / "node0.log")["runs"] == 1
    assert Path("tuning/tuning.json").read_bytes() == before  # told once
    # A run of one's own, and a table.
    Path("mine.log").write_text("".join(LINE.format(i, 1200) for i in range(1, 21)))
    assert answered_json("tune", "read", "tuning", "mine.log", "--layout", "t8 b1")["runs"] == 2
    Path("runs.csv").write_text(f"layout,seconds\n{of.candidates[5].layout},1.5\n")
    assert answered_json("tune", "read", "tuning", "runs.csv")["runs"] == 3
    Path("runs.csv").write_text("layout,seconds\nt8 b1,9\n")
    assert "contradicts" in refused("tune", "read", "tuning", "runs.csv")
    Path("bad.csv").write_text("layout,seconds,batch\nt8 b1,1.2,32\n")
    assert "batch is 32, the tuning's 64" in refused("tune", "read", "tuning", "bad.csv")
    assert "in no layout's folder" in refused("tune", "read", "tuning", "mine.log")
    Path("mine.log").write_text("it has begun\n")
    assert "no line of an iteration" in refused(
        "tune", "read", "tuning", "mine.log", "--layout", "t8 b1"
    )
    Path("mine.log").write_text("Traceback (most recent call last):\n")
    crashed = answered_json("tune", "read", "tuning", "mine.log", "--layout", "t4 d2 b1")
    assert crashed["tried"][-1]["outcome"] == "crashed"


def test_a_tuning_without_a_candidate_left_says_so_and_goes_on_with_more() -> None:
    few = [2 if one == 12 else "few" if one == "tuning" else one for one in BEGIN]
    shown = answered(*few, "--launch", "echo CUDA out of memory; false", code=1)
    assert "end: none of the candidates fits and runs" in shown
    assert "more --candidates than 2 in the first command go on" in shown
    assert "next: " not in shown
    more = [12 if one == 2 else one for one in few]
    (folder,) = {one.parent for one in Path("few").glob("*/layout.json")} - {
        Path("few") / one.place for one in load_tuning("few/tuning.json").trials[:1]
    }
    for end in (folder / "exit.txt", folder / "run.lock"):
        end.unlink()
    (folder / "run.log").write_text("".join(LINE.format(i, 900) for i in range(1, 21)))
    found = answered_json(*more)
    assert (found["candidates"], found["runs"], bool(found["next"])) == (12, 1, True)
    assert f"is in the folder of {found['best']['layout']}" in refused(
        "tune", "read", "few", folder / "run.log", "--layout", "t8 b1"
    )


def test_what_does_not_apply_is_refused() -> None:
    other = [*BEGIN]
    other[other.index(64)] = 32
    assert "has a tuning of another problem" in refused(*other)
    assert "is no folder of a tuning" in refused("tune", "config.json", "--device", "h100")
    assert "--gpus: the tuning in tuning says it" in refused("tune", "tuning", "--gpus", 8)
    assert "begin with tune MODEL" in refused("tune", "read", "elsewhere")
    assert "give one model" in refused("tune", "config.json", "config.json")
    assert "the command is empty" in refused("tune", "tuning", "--launch", " ")


def test_a_launch_that_fails_is_not_the_layouts_fault() -> None:
    failed = "it is the launch that fails, not the layouts"
    for command, why in (
        ("no-such-command", "the command was not found"),
        ("false", "3 layouts in a row have crashed"),
    ):
        shown = answered("tune", "tuning", "--launch", command, code=1)
        assert f"{why}: {failed}" in shown
        assert load_tuning("tuning/tuning.json").trials == ()
    assert answered_json("tune", "tuning", *LAUNCH)["best"]


@pytest.mark.real
def test_kills_lose_no_measurement() -> None:
    """Killed at random moments, a tuning goes on; what ran when it was killed counts."""
    command = [sys.executable, "-m", "stagewright", "tune", "tuning", *LAUNCH]
    known: set[str] = set()
    draw = random.Random(3)
    for _ in range(int(os.environ.get("KILLS", "4"))):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(1.0, 4.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        tuning = load_tuning("tuning/tuning.json")
        places = {one.place for one in tuning.trials}
        assert places >= known
        known = places
    ended = {one.parent.name for one in Path("tuning").glob("*/exit.txt")}
    found = answered_json("tune", "tuning", *LAUNCH)
    assert found["stop"]
    assert {one["place"] for one in found["tried"]} >= known | ended
    assert run("check", "tuning/tuning.json").exit_code == 0
