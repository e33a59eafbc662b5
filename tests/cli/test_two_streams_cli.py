"""A single device with two streams from the command line and from Python, from plan to picture."""

from pathlib import Path

import pytest
from streams import device_problem
from typer.testing import CliRunner

import stagewright
from stagewright.cli import app
from stagewright.executor.export import FORMATS, export
from stagewright.executor.export.options import FormatOptions
from stagewright.formulations.backprop.orders import OutOfOrder
from stagewright.formulations.plans.plan import load_plan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import save_cluster
from stagewright.graphs.models.chain import save_model
from stagewright.solvers.planners.steps.proposal import Choices

PROBLEM = device_problem([(1.0, 1.0, 1.0)] * 3, [(None,) * 3] * 3)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    save_model(PROBLEM.chain, tmp_path / "m.json")
    save_cluster(PROBLEM.cluster, tmp_path / "c.json")
    return ["--model", str(tmp_path / "m.json"), "--cluster", str(tmp_path / "c.json")]


def run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, list(arguments))
    return found.exit_code, " ".join(found.output.split())


def test_from_plan_to_picture(files: list[str], tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    asked = ["--microbatches", "1", "--planner", "ooo", "--training", "single"]
    code, text = run("plan", *files, *asked, "--share", "50%", "-o", path)
    assert code == 0
    assert "shares are assumed, not measured: 0.5 where the profile has none" in text
    assert load_plan(path).uses_two_streams
    code, text = run("check", path, *files)
    assert code == 0
    assert "two streams of a single device verified" in text
    code, text = run("simulate", path, *files)
    assert code == 0
    assert "1.0000 x the plan's 7 s" in text
    code, text = run("show", path, "--png", str(tmp_path / "p.png"))
    assert code == 0
    code, text = run("plan", *files, *asked)
    assert "or assume one with --share" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--training", "single", "--k", "1"], "k is for data parallelism"),
        (["--training", "single", "--group", "1"], "groups of layers are for pipelines"),
        (["--training", "data", "--share", "0.5"], "--share goes with --training single"),
        (["--training", "single", "--share", "0"], "above 0 and at most 1"),
        (["--training", "single", "--share", "half"], "--share must be from 0 to 100%"),
        (["--training", "both"], "training must be one of data, pipeline, single"),
    ],
)
def test_wrong_options_are_refused(files: list[str], options: list[str], message: str) -> None:
    code, text = run("plan", *files, "--microbatches", "1", "--planner", "ooo", *options)
    assert (code, message in text) == (2, True), text
    code, text = run("plan", *files, "--microbatches", "1", "--planner", "spp", "--share", "0.5")
    assert (code, "--share goes with --planner ooo" in text) == (2, True)


def test_from_python() -> None:
    choices = Choices(out_of_order=OutOfOrder("single"))
    chain, cluster = PROBLEM.chain, PROBLEM.cluster
    found = stagewright.plan(chain, cluster, 1, "ooo", assumed_share=0.5, choices=choices)
    assert found.cost == 7
    assert stagewright.check(found.plan, chain, cluster) == ()
    assert stagewright.simulate(found.plan, chain, cluster).iteration_seconds == 7
    started = stagewright.plan(chain, cluster, 1, "auto", time_limit=5, start=found.plan)
    assert started.cost == 9  # its order is not that of a plan which begins with the forwards
    for name in FORMATS:
        with pytest.raises(InputError):
            export(found.plan, name, FormatOptions())
