"""``sweep``: table, CSV, picture, JSON, exit codes."""

import csv
from pathlib import Path

import pytest
from commands import answered, answered_json, refused, run

from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.machines.cluster import Link, save_cluster, uniform_servers
from stagewright.graphs.models.chain import save_model

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(analytic_model("vgg19", 8), "model.json")
    save_cluster(uniform_servers(1, 4, Link(10e9)), "cluster.json")


ASKED = ["sweep", "--model", "model.json", "--cluster", "cluster.json", "--workers", 1]
MANY = [*ASKED, "--planner", "dp,pipedream", "--microbatches", "2,4", "--devices", "2,4"]


@pytest.mark.usefixtures("files")
def test_table_csv_and_picture() -> None:
    shown = answered(*MANY, "--memory", "16GB,1MB", "-o", "sweep.csv", "--png", "sweep.png")
    assert "16 plans, done" in shown
    assert "most samples per second of these: " in shown
    assert "2 devices of 1 MB, 2 microbatches: infeasible: " in shown
    with Path("sweep.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["devices"], row["memory_bytes"], row["microbatches"]) for row in rows[:6:2]] == [
        ("2", "16000000000.0", "2"), ("2", "16000000000.0", "4"), ("2", "1000000.0", "2"),
    ]  # fmt: skip
    for row in rows:
        if row["status"] == "infeasible":
            assert row["cost_seconds"] == "" != row["reason"]
            continue
        rate = float(row["samples"]) / float(row["cost_seconds"])
        assert float(row["samples_per_second"]) == pytest.approx(rate)
        assert float(row["bound_seconds"]) <= float(row["cost_seconds"]) * (1 + 1e-9)
    assert Path("sweep.png").read_bytes().startswith(PNG)


@pytest.mark.usefixtures("files")
def test_csv_on_standard_output_is_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*MANY, "-o", "-").exit_code == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["devices", *"22224444"]


@pytest.mark.usefixtures("files")
def test_json_and_no_plan() -> None:
    found = answered_json(*MANY)
    assert len(found["rows"]) == 8
    rates = [row["samples_per_second"] for row in found["rows"]]
    assert rates[found["best"]] == max(rates)
    none = answered_json(*ASKED, "--planner", "dp", "--microbatches", 2, "--memory", "1MB", code=1)
    assert none["best"] is None
    assert none["rows"][0]["status"] == "infeasible"


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give one of --microbatches and --global-batch, for example --microbatches 4,8"),
        (["--microbatches", "4,x"], "--microbatches: 'x' is no whole number"),
        (["--microbatches", "4,"], "--microbatches '4,' has an empty entry"),
        (["--microbatches", "0"], "--microbatches must be at least 1, got 0"),
        (["--microbatches", "4", "--devices", "2,8"], "--devices must be 1 to 4"),
        (
            ["--microbatches", "4", "--memory", "16B"],
            "--memory must be at least 1 MB, got 16 bytes",
        ),
        (["--microbatches", "4", "--memory", "16XB"], "--memory '16XB' has an unknown unit, XB"),
        (["--microbatches", "4", "--planner", "best"], "--planner: 'best' is none of spp, "),
        (["--microbatches", "4", "--engine", "ray"], "--workers is for the engine local"),
        (["--global-batch", "12", "--planner", "2bw"], "use a batch of 8 or 16"),
        (["--microbatches", "4", "-o", "sweep.txt"], "the name must end in .csv"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], complaint: str) -> None:
    assert complaint in refused(*ASKED, *arguments)
    assert [one.name for one in sorted(Path().iterdir())] == ["cluster.json", "model.json"]
