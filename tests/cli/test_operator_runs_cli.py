"""Plans of operators on processes of this machine, from the command line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import answered, answered_json, refused
from launches import TESTS, until

from stagewright.executor.programs.trace import load_trace
from stagewright.formulations.operators.plan import load_operator_plan
from stagewright.graphs.documents import documents
from stagewright.graphs.machines.cluster import Link, save_cluster, uniform_servers
from stagewright.graphs.models.operators.cost_book import CostBook

LENET = "examples.fastt.vision:lenet"
DIGITS = ("--data", "examples.fastt.vision:digits", "--optimizer", "sgd:lr=0.01,momentum=0.9")


def launched(*arguments: object, code: int = 0) -> Any:
    """The answer of a run with real processes, or its one line on stderr."""
    command = [sys.executable, "-m", "stagewright", *map(str, arguments), "--json"]
    places = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=found
    )
    assert ended.returncode == code, ended.stderr
    return ended.stderr if code else json.loads(ended.stdout)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LeNet in two replicas of a sample each, on two ranks."""
    folder = tmp_path_factory.mktemp("lenet")
    graph, cluster, file = (folder / f"{name}.json" for name in ("graph", "cluster", "plan"))
    answered(
        "capture", "--module", LENET, *DIGITS, "--replicas", 2, "--device", "v100", "-o", graph
    )
    save_cluster(uniform_servers(1, 2, Link(1e9, 1e-5), kind="v100"), cluster)
    options = ("--planner", "m-topo", "--model", graph, "--cluster", cluster)
    answered("plan", *options, "-o", file)
    return file


@pytest.mark.slow
def test_a_run_is_traced_compared_and_resumed(plan: Path, tmp_path: Path) -> None:
    trace, picture, checkpoints = (tmp_path / name for name in ("t.json", "c.png", "steps"))
    options = ("run", plan, "--module", LENET, *DIGITS, "--checkpoint", checkpoints)
    first = launched(*options, "--steps", 3, "--trace", trace)
    assert first["world_size"] == 2
    assert len(first["losses"]) == 3
    more = launched(*options, "--steps", 5, "--resume")
    whole = launched("run", plan, "--module", LENET, *DIGITS, "--steps", 5)
    assert first["losses"] + more["losses"] == whole["losses"]

    placed, run = load_operator_plan(plan), load_trace(trace)
    found = answered_json("compare", plan, trace, "--png", picture)
    assert found["files"] == [str(picture)]
    assert picture.stat().st_size > 10_000
    assert found["steps"] == 2
    assert found["iteration_seconds"]["predicted"] == placed.certificate.cost_seconds
    slow, fast = sorted((step.iteration_seconds for step in run.steps[1:]), reverse=True)
    assert found["iteration_seconds"]["most"] == slow
    assert found["iteration_seconds"]["least"] == fast
    assert found["kinds"]["transfer"]["count"] == len(placed.transfers)
    counts = [found["devices"][device]["count"] for device in ("s0g0", "s0g1")]
    assert sum(counts) == len(placed.operators)
    assert "furthest off" in answered("compare", plan, trace)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dtype", "float64"), "dtype is for pipelines"),
        (("--clip-norm", 1.0), "clip_norm is for pipelines"),
        (("--graph",), "graph is for pipelines"),
        (("--resume",), "--resume and --checkpoint-every need --checkpoint DIR"),
    ],
)
def test_options_of_pipelines_are_refused(
    plan: Path, options: tuple[object, ...], message: str
) -> None:
    given = ("run", plan, "--module", LENET, *DIGITS, "--steps", 1)
    assert message in refused(*given, *options)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_rounds_train_as_one_plan_does(replicas: int, tmp_path: Path) -> None:
    cluster, folder = tmp_path / "cluster.json", tmp_path / "out"
    save_cluster(uniform_servers(1, 2, Link(1e9, 1e-5), kind="here"), cluster)
    given = ("--data", "jobs:double_batches", "--optimizer", "adamw:lr=0.01", "--seed", 3)
    options = ("--plans", 2, "--plan-steps", 3, "--replicas", replicas, "--time-limit", 1)
    found = launched(
        "train", "--module", "jobs:double_model", *given, *options, "--cluster", cluster,
        "--steps", 8, "--folder", folder,
    )  # fmt: skip
    assert 1 <= len(found["rounds"]) <= 2
    assert found["rounds"][0]["kept"]
    assert found["rounds"][0]["planner"] == ("single" if replicas == 1 else "data-parallel")
    kept = [one["measured_seconds"] for one in found["rounds"] if one["kept"]]
    assert kept[-1] == min(one["measured_seconds"] for one in found["rounds"])
    assert load_operator_plan(folder / "plan.json") == load_operator_plan(
        folder / f"plan-{found['best']}.json"
    )
    start = folder / "plan-0.json"
    plain = launched("run", start, "--module", "jobs:double_model", *given, "--steps", 8)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-9)
    assert len(found["losses"]) == 8

    again = launched(
        "run", folder / "plan.json", "--module", "jobs:double_model", *given, "--steps", 9,
        "--checkpoint", folder / "steps", "--resume",
    )  # fmt: skip
    assert len(again["losses"]) == 1
    # The learned costs are documents to plan with.
    files = ("--model", folder / "graph.json", "--cluster", folder / "cluster.json")
    assert answered_json("plan", "--planner", "heft", *files)["cost_seconds"] > 0
    assert documents.read(CostBook, folder / "costs.json").computed


@pytest.mark.slow
def test_rounds_of_pipelines_train_as_one_plan_does(tmp_path: Path) -> None:
    profile, cluster, folder = (tmp_path / name for name in ("model.json", "links.json", "out"))
    given = ("--module", "jobs:model", "--data", "jobs:batches")
    trained = (*given, "--optimizer", "adamw:lr=0.01", "--seed", 3)
    launched("profile", *given, "--microbatch-sizes", 1, "-o", profile)
    save_cluster(uniform_servers(1, 2, Link(1e9, 1e-5), kind="cpu-core"), cluster)
    options = ("--model", profile, "--cluster", cluster, "--microbatches", 4, "--time-limit", 1)
    found = launched(
        "train", *trained, *options, "--plans", 2, "--plan-steps", 3, "--steps", 8,
        "--folder", folder,
    )  # fmt: skip
    plain = launched("run", folder / "plan-0.json", *trained, "--steps", 8)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    kept = [one["measured_seconds"] for one in found["rounds"] if one["kept"]]
    assert kept[-1] == min(one["measured_seconds"] for one in found["rounds"])
    files = ("--model", folder / "model.json", "--cluster", folder / "cluster.json")
    assert answered_json("plan", *files, "--microbatches", 4)["cost_seconds"] > 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell of a parent's end")
def test_nothing_runs_on_when_train_is_ended(tmp_path: Path) -> None:
    cluster, folder = tmp_path / "cluster.json", tmp_path / "out"
    save_cluster(uniform_servers(1, 2, Link(1e9, 1e-5), kind="here"), cluster)
    given = ("train", "--module", "jobs:model", "--data", "jobs:batches", "--cluster", cluster)
    steps = ("--steps", 10**8, "--plan-steps", 10**7, "--folder", folder)
    command = [sys.executable, "-m", "stagewright", *map(str, (*given, *steps))]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        until(lambda: len(running(folder)) > 2)  # train, run and its rank
        process.terminate()
    try:
        until(lambda: not running(folder))
    finally:
        for pid in running(folder):
            os.kill(int(pid), signal.SIGKILL)


def running(folder: Path) -> list[str]:
    """The processes whose command line names ``folder``."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder) in (one / "cmdline").read_text():
                found.append(one.name)
    return found


def test_a_folder_is_not_overwritten(plan: Path) -> None:
    options = ("--cluster", plan.parent / "cluster.json", "--steps", 20, "--folder", plan.parent)
    assert "exists; name a new folder, or go on with stagewright run" in refused(
        "train", "--module", LENET, *DIGITS, *options
    )
    options = (*options[:-1], plan.parent / "new")
    of_pipelines = ("--data", "no:factory", "--model", plan, "--replicas", 2)  # no step is captured
    assert "--replicas is of plans of operators" in refused(
        "train", "--module", LENET, *of_pipelines, *options
    )
    options = (*options, "--plan-steps", 20)
    assert "--steps 20 leaves nothing after a plan of 20" in refused(
        "train", "--module", LENET, *DIGITS, *options
    )


@pytest.mark.slow
def test_another_model_is_refused(plan: Path) -> None:
    given = ("run", plan, "--module", "examples.fastt.vision:lenet", "--steps", 1)
    line = launched(*given, *DIGITS[:2], "--optimizer", "adamw", code=2)
    assert line.count("\n") == 1
    assert "are not those of 'lenet' as it was planned (the plan " in line
