"""Every command on good and on bad input: exit codes, one JSON object, one line of complaint."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import FT06, PROFILE, answered, answered_json, given_to, refused, rewrite, run
from plans import small_problem

from stagewright.formulations.plans.plan import load_plan, save_plan
from stagewright.graphs.machines.cluster import Link, load_cluster, save_cluster, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost, load_model, save_model
from stagewright.solvers.planners.steps import warm_up

DATA = Path(__file__).parents[3] / "shared" / "data"
HEAVY = ("ortools", "cvxpy", "highspy", "pulp", "numba", "matplotlib", "scipy", "pydantic")


# The program itself


def python_m(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagewright", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.mark.real
def test_python_m_stagewright_answers_and_refuses(tmp_path: Path) -> None:
    good = python_m("cluster", "2x2", "--intra", "100GB/s", "--inter", "10GB/s")
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["name"] == "2x2"
    bad = python_m("check", tmp_path / "none.json", "--model", "m", "--cluster", "c")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == f"stagewright: {tmp_path}/none.json: No such file or directory\n"


@pytest.mark.real
def test_a_closed_pipe_ends_it_quietly() -> None:
    pipe = f"{sys.executable} -m stagewright cluster 40x8 --intra 9GB/s --inter 1GB/s | head -c 1"
    run = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("{", "")


@pytest.mark.real
def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from stagewright.cli import app; "
        "print(CliRunner().invoke(app, ['--help']).stdout); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    text = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    for command in (
        "plan", "check", "simulate", "show", "schedule", "jobshop", "import", "model", "cluster",
        "planners", "doctor", "partition", "divide", "estimate", "run-cluster", "capture",
    ):  # fmt: skip
        assert re.search(rf"\b{command}  +[A-Z]", text), command
    assert text.rstrip().endswith("[]")


@pytest.mark.real
def test_a_command_that_solves_nothing_does_not_load_scipy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from stagewright.cli import app; "
        "result = CliRunner().invoke(app, ['cluster', '1x2', '--intra', '1GB/s']); "
        "sys.exit(result.exit_code or 'scipy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_and_no_command() -> None:
    assert re.fullmatch(r"stagewright \d+\.\d+\.\d+\n", answered("--version"))
    assert "Usage" in answered()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pln"], "No such command 'pln'. Did you mean 'plan'?"),
        (["--nope"], "No such option"),
        (
            ["train-plan", "x.json", "--per-server", "2x"],
            "Invalid value for '--per-server': no whole",
        ),
        (["plan", "--time-limit", "soon"], "Invalid value for '--time-limit': no number"),
        (["plan"], "Missing option '--model'"),
        (["schedule", "--stages", "two"], "Invalid value for '--stages'"),
        (["schedule", "--kind", "zb"], "Invalid value for '--kind'"),
        (["jobshop"], "Missing argument"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


# check, simulate, show


def test_check_accepts_a_valid_plan(files: Path) -> None:
    arguments = ["check", files / "plan.json", *given_to(files)]
    assert "valid" in answered(*arguments)
    document = answered_json(*arguments)
    plan = load_plan(files / "plan.json")
    assert plan.predicted is not None
    assert document == {
        "status": "valid",
        "cost_seconds": pytest.approx(plan.predicted.iteration_seconds),
        "violations": [],
        "proofs": [],
    }


def test_check_lists_every_broken_rule(files: Path) -> None:
    plan = load_plan(files / "plan.json")
    actions = [replace(action, start_seconds=0.0) for action in plan.actions]
    schedule = replace(plan.schedule, actions=tuple(actions))
    save_plan(replace(plan, schedule=schedule), files / "plan.json")
    document = answered_json("check", files / "plan.json", *given_to(files), code=1)
    assert document["status"] == "invalid"
    assert {violation["rule"] for violation in document["violations"]} >= {"duration", "dependency"}
    text = answered("check", files / "plan.json", *given_to(files), code=1)
    assert f"{len(document['violations'])} broken rules" in text
    assert text.count("dependency") >= 3


@pytest.mark.parametrize("command", ["check", "simulate"])
def test_a_plan_for_another_problem_is_refused(command: str, files: Path) -> None:
    chain = load_model(files / "model.json")
    save_model(replace(chain, optimizer_bytes_per_parameter_byte=1.0), files / "model.json")
    assert "another problem" in refused(command, files / "plan.json", *given_to(files))


def test_simulate_repeats_the_plan(files: Path) -> None:
    arguments = ["simulate", files / "plan.json", *given_to(files)]
    document = answered_json(*arguments)
    assert document["iteration_seconds"] == pytest.approx(document["plan_seconds"])
    assert document["slowdown"] == pytest.approx(1)
    assert "1.0000 x the plan's" in answered(*arguments)
    slow = answered_json(*arguments, "--straggler", "g2=3", "--straggler", "g0=1.5")
    assert slow["slowdown"] > 1
    assert slow["stragglers"] == {"g2": 3, "g0": 1.5}
    noisy = [answered_json(*arguments, "--jitter", "0.3", "--seed", seed) for seed in (1, 1, 2)]
    assert noisy[0] == noisy[1] != noisy[2]


def test_simulate_says_no_to_a_plan_that_cannot_run(files: Path) -> None:
    plan = load_plan(files / "plan.json")
    schedule = replace(plan.schedule, actions=plan.actions[1:])
    save_plan(replace(plan, schedule=schedule), files / "plan.json")
    arguments = ["simulate", files / "plan.json", *given_to(files)]
    document = answered_json(*arguments, code=1)
    assert document["status"] == "invalid"
    assert "missing" in document["reason"]
    assert "cannot run: missing" in answered(*arguments, code=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--straggler", "g2"], "write DEVICE=FACTOR"),
        (["--straggler", "g2=fast"], "write DEVICE=FACTOR"),
        (["--straggler", "nobody=2"], "'nobody' is not a device"),
        (["--straggler", "g2=-1"], "must be finite and not negative"),
        (["--jitter", "nan"], "jitter must be finite"),
    ],
)
def test_simulate_refuses(options: list[str], message: str, files: Path) -> None:
    assert message in refused("simulate", files / "plan.json", *given_to(files), *options)


def test_plan_with_shards(files: Path) -> None:
    asked = ("plan", *given_to(files), "--microbatches", 4, "--planner", "dp", "--time-limit", 3)
    document = answered_json(*asked, "--shards", "optimizer", "-o", files / "sharded.json")
    (stage,) = document["stages"]
    assert stage["shards"] == "optimizer"
    assert (document["bound_seconds"], document["gap"], document["plans"]) == (None, None, None)
    assert document["reason"].startswith("shards optimizer on stage 0; an iteration takes")
    text = answered("check", files / "sharded.json", *given_to(files))
    assert "valid" in text
    (shown,) = answered_json("show", files / "sharded.json")["stages"]
    assert shown["shards"] == "optimizer"
    assert "'zero1' is not one of 'none', 'optimizer', 'gradients', 'weights'" in refused(
        *asked, "--shards", "zero1"
    )


def test_show_prints_and_draws(files: Path) -> None:
    text = answered("show", files / "plan.json")
    assert "3 stages, 4 microbatches" in text
    assert re.search(r"2\s+4-5\s+g3-5\s+3", text)
    stages = answered_json("show", files / "plan.json")["stages"]
    assert stages[0] == {
        "layers": [0, 2], "devices": ["g0", "g1"], "replication": "split", "recompute": "none",
        "offload": False, "tensor": 1, "shards": "none",
    }  # fmt: skip
    drawn = [files / name for name in ("plan.html", "plan.png", "trace.json")]
    answered(
        "show", files / "plan.json", "--html", drawn[0], "--png", drawn[1], "--trace", drawn[2]
    )
    assert "<!DOCTYPE html>" in drawn[0].read_text()
    assert drawn[1].read_bytes().startswith(b"\x89PNG")
    assert json.loads(drawn[2].read_text())["traceEvents"]


# Documents


def truncate(path: Path) -> None:
    path.write_text(path.read_text()[:-40])


def empty(path: Path) -> None:
    path.write_text("")


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def newer(path: Path) -> None:
    rewrite(path, version=99)


def unknown_field(path: Path) -> None:
    rewrite(path, colour="red")


def other_format(path: Path) -> None:
    rewrite(path, format="stagewright-recipe")


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "not a complete JSON document"),
        (empty, "not a complete JSON document"),
        (binary, "not a text file"),
        (newer, "version 99 is not known"),
        (unknown_field, "unknown field"),
        (other_format, "found 'stagewright-recipe'"),
        (missing, "No such file"),
    ],
)
@pytest.mark.parametrize("which", ["plan.json", "model.json", "cluster.json"])
def test_damaged_files_are_refused(which: str, damage: Any, message: str, files: Path) -> None:
    damage(files / which)
    for command in ("check", "simulate"):
        line = refused(command, files / "plan.json", *given_to(files))
        assert line.startswith(f"{files / which}: ")
        assert message in line
    if which == "plan.json":
        assert message in refused("show", files / which, "--html", files / "p.html")
        assert not (files / "p.html").exists()
    else:
        assert message in refused("plan", *given_to(files), "--microbatches", 4)


def layer(seconds: float = 0.01, parameters: float = 1e6) -> dict[str, Any]:
    cost = {
        "microbatch_size": 6, "forward_seconds": seconds, "backward_seconds": 0.02,
        "saved_bytes": 1e6, "output_bytes": 1e6,
    }  # fmt: skip
    return {"name": "a", "parameter_bytes": parameters, "costs": [cost]}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([layer(seconds=-1.0)], "forward_seconds must be finite and not negative, got -1"),
        ([layer(seconds=float("nan"))], "forward_seconds"),
        ([layer(), layer()], "two layers are named 'a'"),
        ([layer(seconds=1e6)], "times are seconds"),
        ([], "has no layers"),
    ],
)
def test_plan_refuses_models(layers: list[Any], message: str, files: Path) -> None:
    rewrite(files / "model.json", layers=layers)
    options = [*given_to(files), "--microbatches", 4, "-o", files / "new.json"]
    assert message in refused("plan", *options)
    assert not (files / "new.json").exists()


def test_a_layer_that_fits_nowhere_is_told_in_bytes(files: Path) -> None:
    rewrite(files / "model.json", layers=[layer(parameters=4e9)])
    found = answered("plan", *given_to(files), "--microbatches", 4, code=1)
    assert re.search(
        r"no plan with tensor degree 1, no shards fits: layer 'a' .*\d+ bytes short", found
    )


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ({"bandwidth_bytes_per_second": 0.0}, "must be positive and finite, got 0"),
        ({"bandwidth_bytes_per_second": 12.0}, "is a unit missing?"),
        ({"bandwidth_bytes_per_second": 1e9, "latency_seconds": -1.0}, "latency_seconds"),
    ],
)
def test_plan_refuses_links(links: dict[str, float], message: str, files: Path) -> None:
    save_cluster(uniform_servers(1, 4, Link(1e9), kind="fast"), files / "cluster.json")
    document = json.loads((files / "cluster.json").read_text())
    rewrite(files / "cluster.json", links=document["links"] | {"intra": links})
    assert message in refused("plan", *given_to(files), "--microbatches", 4)


def test_plan_refuses_two_devices_of_one_name(files: Path) -> None:
    devices = json.loads((files / "cluster.json").read_text())["devices"]
    rewrite(files / "cluster.json", devices=devices[:1] * 2)
    assert "two devices are named 'g0'" in refused("plan", *given_to(files), "--microbatches", 4)


# plan and planners


def test_plan_writes_what_it_prints_and_check_accepts_it(files: Path) -> None:
    arguments = ["plan", *given_to(files), "--microbatches", 4, "--time-limit", 1, "--threads", 1]
    document = answered_json(*arguments, "-o", files / "new.json")
    assert {
        "status", "planner", "cost_seconds", "bound_seconds", "gap", "proved_by", "wall_seconds",
        "stages", "peak_memory_bytes", "schedule_bound_seconds", "schedule_gap",
        "schedule_proved_by", "attempts", "reason", "microbatches", "model", "cluster",
    } <= document.keys()  # fmt: skip
    plan = load_plan(files / "new.json")
    assert [tuple(stage["devices"]) for stage in document["stages"]] == [
        stage.devices for stage in plan.stages
    ]
    assert 0 < document["bound_seconds"] <= document["cost_seconds"] * (1 + 1e-9)
    assert document["gap"] == pytest.approx(
        1 - document["bound_seconds"] / document["cost_seconds"], abs=1e-9
    )
    checked = answered_json("check", files / "new.json", *given_to(files))
    assert checked["cost_seconds"] == pytest.approx(document["cost_seconds"])
    text = answered(*arguments, "--planner", "spp")
    for word in ("layer0", "bound", "gap", "proved by", "Lemma 1"):
        assert word in text


def test_plan_reports_an_infeasible_problem(tmp_path: Path) -> None:
    """Each layer fits on a device, but all of them on no two."""
    cost = LayerCost(840, 0.1, saved_bytes=0, output_bytes=1e3, backward_seconds=0.2)
    layers = tuple(Layer(f"layer{i}", 3e9, (cost,)) for i in range(4))
    save_model(Chain("large", "test", 840, layers), tmp_path / "model.json")
    save_cluster(uniform_servers(1, 2, Link(1e10)), tmp_path / "cluster.json")
    arguments = ["plan", *given_to(tmp_path), "--microbatches", 2, "-o", tmp_path / "plan.json"]
    document = answered_json(*arguments, code=1)
    assert document["status"] == "infeasible"
    assert document["reason"]
    for name in ("cost_seconds", "gap", "stages", "peak_memory_bytes"):
        assert document[name] is None
    assert re.fullmatch(
        r"auto: infeasible after [^\n]+: [^\n]+ short\n", answered(*arguments, code=1)
    )
    assert not (tmp_path / "plan.json").exists()


def test_spp_plans_a_single_layer_as_a_single_stage(tmp_path: Path) -> None:
    cost = LayerCost(840, 0.1, saved_bytes=1e6, output_bytes=1e3, backward_seconds=0.2)
    save_model(Chain("one", "test", 840, (Layer("all", 1e6, (cost,)),)), tmp_path / "model.json")
    save_cluster(uniform_servers(1, 2, Link(1e10)), tmp_path / "cluster.json")
    arguments = ["plan", *given_to(tmp_path), "--microbatches", 2, "--planner", "spp"]
    document = answered_json(*arguments)
    assert [stage["layers"] for stage in document["stages"]] == [[0, 1]]
    assert all(guarantee["holds"] for guarantee in document["guarantees"])


@pytest.mark.parametrize("planner", ["auto", "spp", "exact"])
def test_plan_says_no_when_the_time_is_too_short(files: Path, planner: str) -> None:
    arguments = ["plan", *given_to(files), "--microbatches", 4, "--planner", planner]
    document = answered_json(*arguments, "--time-limit", 1e-9, code=1)
    assert (document["status"], document["stages"]) == ("no-answer", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--microbatches", 0], "microbatches must be at least 1, got 0"),
        (["--microbatches", 4, "--time-limit", 0], "--time-limit must be"),
        (["--microbatches", 4, "--time-limit", "nan"], "--time-limit must be"),
        (["--microbatches", 4, "--threads", 0], "--threads must be"),
        (["--microbatches", 4, "--seed", -1], "--seed must be"),
        (["--microbatches", 4, "--planner", "magic"], "magic"),
        (
            ["--microbatches", 4, "--order", "zbw"],
            "unknown schedule 'zbw'; known are optimal, gpipe",
        ),
        (["--microbatches", 4, "--order", "pe"], "chimera; pe is the order of planner spp"),
        (["--microbatches", 4, "--order", "zbv"], "zbv splits backwards, but layer 'layer0' has"),
        (["--microbatches", 4, "--order", "zbv", "--chunks", 3], "zbv has 2 stages per device"),
        (["--microbatches", 4, "--order", "1f1b-rr", "--replicas", "2;1"], "whole numbers such as"),
        (["--microbatches", 4, "--order", "1f1b-rr", "--replicas", "9,9"], "are 18 devices"),
        (["--microbatches", 4, "--chunks", 2], "--chunks goes with --order KIND"),
        (["--microbatches", 4, "--order", "1f1b", "--planner", "spp"], "use order"),
        (["--microbatches", 4, "--gap", "200%"], "--gap must be from 0 to 100%"),
        (["--microbatches", 4, "--gap", ""], "--gap must be from 0 to 100%"),
        (["--microbatches", 4, "-o", "/nowhere/plan.json"], "folder /nowhere does not exist"),
        (["--microbatches", 4, "-o", "/"], "/ is a folder"),
    ],
)
def test_plan_refuses_options(options: list[object], message: str, files: Path) -> None:
    assert message in refused("plan", *given_to(files), *options)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("plan", ["--microbatches", 4, "--planner", "magic"], "unknown planner 'magic'"),
        ("plan", ["--global-batch", 4, "--planner", "magic"], "unknown planner 'magic'"),
        ("plan", ["--microbatches", 4, "--tensor", 2, "--planner", "magic"], "unknown planner"),
        ("plan", ["--microbatches", 4, "--order", "1f1b", "--planner", "spp"], "use order"),
        ("plan", ["--microbatches", 4, "--recompute", "full", "--planner", "ooo"], "recompute 'fu"),
        ("plan", ["--microbatches", 4, "--offload"], "needs host_bytes_per_second"),
        ("plan", ["--microbatches", 4, "--for", "jax"], "no framework of that name"),
        ("plan", ["--microbatches", 4, "--for", "torch-csv", "--planner", "spp"], "use launchable"),
        ("what-if", ["--microbatches", 4, "--planner", "magic"], "unknown planner 'magic'"),
        ("what-if", ["--microbatches", 4, "--for", "jax"], "no framework of that name"),
    ],
)
def test_what_no_planner_supports_is_refused_before_kernels_are_compiled(
    command: str, options: list[object], message: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_kernels(*_: object) -> None:
        raise AssertionError("minutes are spent before a refusal")

    monkeypatch.setattr(warm_up, "compile_kernels", compile_kernels)
    assert message in refused(command, *given_to(files), *options)


def test_plan_ends_at_the_gap_and_says_so(files: Path) -> None:
    arguments = ["plan", *given_to(files), "--microbatches", 4]
    document = answered_json(*arguments, "--gap", "99%")
    assert document["gap"] <= 0.99
    printed = answered(*arguments, "--gap", "99%")
    assert "is reached, at most 99.00% was asked for" in printed


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (["chimera"], [2] * 6),
        (["interleaved", "--chunks", 3], [1] * 6),
        (["1f1b-rr", "--replicas", "2,1,1"], [2, 1, 1]),
        (["optimal", "--placement", "v"], [1] * 6),
    ],
)
def test_plan_makes_a_published_schedule(
    options: list[object], sizes: list[int], files: Path
) -> None:
    arguments = [*given_to(files), "--microbatches", 4, "--time-limit", 1, "--order", *options]
    document = answered_json("plan", *arguments, "-o", files / "ordered.json")
    assert document["planner"] == "order"
    assert [len(stage["devices"]) for stage in document["stages"]] == sizes
    answered("check", files / "ordered.json", *given_to(files))
    answered("simulate", files / "ordered.json", *given_to(files))


def test_plan_starts_from_a_plan_and_refuses_one_of_other_layers(files: Path) -> None:
    options = ["--microbatches", 4, "--from-plan", files / "plan.json"]
    given = json.loads((files / "plan.json").read_text())["predicted"]["iteration_seconds"]
    document = answered_json("plan", *given_to(files), *options, "--time-limit", 1)
    assert document["attempts"][0]["planner"] == "given"
    assert document["cost_seconds"] <= document["attempts"][0]["cost_seconds"] <= given
    assert "use general or auto" in refused("plan", *given_to(files), *options, "--planner", "spp")
    model = load_model(files / "model.json")
    save_model(replace(model, layers=model.layers[:-1]), files / "model.json")
    line = refused("plan", *given_to(files), *options)
    assert "the given plan is for 6 layers, model 'small' has 5" in line


def test_planners_are_listed() -> None:
    listed = {planner["name"] for planner in answered_json("planners")["planners"]}
    assert {"spp", "exact", "gpipe", "pipedream", "hetpipe", "dp"} <= listed
    text = answered("planners")
    assert all(name in text for name in listed)


# schedule and jobshop


def test_schedule_keeps_integers_and_proves_the_optimum() -> None:
    document = answered_json("schedule", "--stages", 2, "--microbatches", 3, "--times", "1,2")
    # One forward, three pairs of three on the last stage, one backward.
    assert document["makespan"] == document["bound"] == 12
    assert isinstance(document["makespan"], int)
    assert all(isinstance(start, int) for row in document["starts"] for start in row)
    assert (document["status"], document["gap"]) == ("optimal", 0)
    assert sorted(document["order"][1]) == ["1B0", "1B1", "1B2", "1F0", "1F1", "1F2"]


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (3, 3), (2, 7)])
def test_the_bubble_is_that_of_the_literature(kind: str, stages: int, microbatches: int) -> None:
    document = answered_json(
        "schedule", "--stages", stages, "--microbatches", microbatches, "--times", "1,2",
        "--kind", kind,
    )  # fmt: skip
    # Narayanan's thesis, section 4.2.2.
    assert document["bubble"] == pytest.approx((stages - 1) / microbatches)


def test_schedule_takes_a_pair_per_stage_in_several_spellings() -> None:
    common = ["schedule", "--stages", 2, "--microbatches", 4, "--transfer", 1, "--in-flight", "2,1"]
    spellings = (["1,2;2,3"], ["1,2 2,3"], ["1,2", "2,3"])
    answers = [
        answered_json(*common, *(part for text in spelling for part in ("--times", text)))
        for spelling in spellings
    ]
    assert len({answer["makespan"] for answer in answers}) == 1
    order = answers[0]["order"][1]
    assert order == [f"1{work}{m}" for m in range(4) for work in "FB"]


def test_gpipe_cannot_keep_an_in_flight_limit() -> None:
    arguments = ["schedule", "--stages", 2, "--microbatches", 4, "--times", "1,2"]
    arguments += ["--kind", "gpipe", "--in-flight", 3]
    document = answered_json(*arguments, code=1)
    assert (document["status"], document["makespan"]) == ("infeasible", None)
    assert document["reason"]
    assert "infeasible" in answered(*arguments, code=1)


def test_schedule_takes_several_stages_on_a_device_and_split_backwards() -> None:
    arguments = ["schedule", "--stages", 4, "--microbatches", 4, "--transfer", 1]
    arguments += ["--times", "1,1,1", "--stage-devices", "0,1,1,0"]
    document = answered_json(*arguments)
    assert document["status"] == "optimal"
    everything = {f"{s}{kind}{m}" for s in range(4) for kind in "FIW" for m in range(4)}
    assert [len(row) for row in document["order"]] == [24, 24]
    assert {one for row in document["order"] for one in row} == everything
    assert "device 1" in answered(*arguments)


def test_1f1b_is_interleaved_on_several_stages_of_a_device() -> None:
    arguments = ["schedule", "--stages", 4, "--times", "1,2", "--stage-devices", "0,1,0,1"]
    arguments += ["--kind", "1f1b"]
    document = answered_json(*arguments, "--microbatches", 4)
    assert (document["makespan"], document["bubble"]) == (27, pytest.approx(1 / 8))
    refusal = answered_json(*arguments, "--microbatches", 3, code=1)
    assert "a multiple of 2 microbatches" in refusal["reason"]


def test_schedule_draws_the_rows() -> None:
    text = answered(
        "schedule", "--stages", 2, "--microbatches", 2, "--times", "1,1", "--kind", "gpipe"
    )
    rows = [line.split("  ", 1)[1].strip() for line in text.splitlines() if "stage " in line]
    starts = [[row.index(name) for name in ("F0", "F1", "B0", "B1")] for row in rows]
    unit = starts[1][0]
    assert starts == [[0, unit, 4 * unit, 5 * unit], [unit, 2 * unit, 3 * unit, 4 * unit]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", 0, "--times", "1,2"], "--stages must be at least 1"),
        (["--microbatches", 0, "--times", "1,2"], "--microbatches must be at least 1"),
        (["--times", "1"], "write F,B"),
        (["--times", "1,2,3,4"], "write F,B"),
        (["--times", "1,2;1,2,3;1,2"], "write F,B for every stage or F,I,W"),
        (["--times", "1,2", "--stage-devices", "0,1"], "--stage-devices needs 3 values"),
        (
            ["--times", "1,2", "--stage-devices", "0,1,-1"],
            "--stage-devices must be whole numbers from 0",
        ),
        (["--times", "1e308,1e308"], "their sum is not a finite number"),
        (
            ["--times", "1,2", "--stage-devices", "1,0,1"],
            "--stage-devices[0] must be an integer from 0 to 0, got 1: devices are",
        ),
        (
            ["--times", "1,2", "--stage-devices", "0,1,2,"],
            "--stage-devices: '0,1,2,' is no list of numbers",
        ),
        (["--times=1,-2"], "--times: backward of stage 0 must be finite and not negative, got -2"),
        (["--times", "1,2,nan"], "--times: weight gradient of stage 0 must be finite"),
        (["--times", "1,2", "--transfer=-1"], "--transfer of channel 0 must be finite and not neg"),
        (["--times", "1,two"], "no list of numbers"),
        (["--times", "1,2;1,2"], "--times needs one value or 3"),
        (["--times", "-1,2"], "must be finite and not negative"),
        (["--times", "nan,2"], "must be finite and not negative"),
        (["--times", "1,2", "--transfer", "1,2,3"], "--transfer needs one value or 2"),
        (["--times", "1,2", "--in-flight", "0"], "--in-flight must be whole numbers from 1"),
        (["--times", "1,2", "--in-flight", "1.5"], "--in-flight must be whole numbers from 1"),
        (["--times", "1,2", "--time-limit", "inf"], "--time-limit must be"),
    ],
)
def test_schedule_refuses(options: list[object], message: str) -> None:
    assert message in refused("schedule", "--stages", 3, "--microbatches", 4, *options)


def test_jobshop_proves_ft06(tmp_path: Path) -> None:
    (tmp_path / "ft06.txt").write_text(FT06)
    document = answered_json("jobshop", tmp_path / "ft06.txt", "--threads", 1)
    assert (document["status"], document["makespan"], document["bound"]) == ("optimal", 55, 55)
    assert (document["jobs"], document["machines"], document["gap"]) == (6, 6, 0)
    assert [len(row) for row in document["starts"]] == [6] * 6
    assert "makespan 55 (optimal)" in answered("jobshop", tmp_path / "ft06.txt")


def test_jobshop_reads_taillard_flexible_shops_and_collections(tmp_path: Path) -> None:
    header = "Nb of jobs, Nb of Machines, Time seed, Machine seed, Upper bound, Lower bound :"
    (tmp_path / "tai.txt").write_text(
        f"{header}\n 2 2 840612802 398197754 7 7\nTimes\n3 2\n2 4\nMachines\n1 2\n2 1\n"
    )
    assert "makespan 7 (optimal)" in answered("jobshop", tmp_path / "tai.txt")
    (tmp_path / "tiny.fjs").write_text("2 2 1.3\n2 2 1 3 2 5 1 2 2\n1 1 1 4\n")
    shown = answered("jobshop", tmp_path / "tiny.fjs")
    assert "makespan 7 (optimal)" in shown
    assert "3@0" in shown or "0@1" in shown  # one of the first two steps waits, or is elsewhere
    several = tmp_path / "two.txt"
    several.write_text(f"instance one\n1 1\n0 5\ninstance ft06\n+++\n six\n{FT06}")
    assert "makespan 55 (optimal)" in answered("jobshop", several, "--instance", "ft06")
    assert "2 instances, name one with --instance: one, ft06" in refused("jobshop", several)
    assert "no instance 'x'; there are one, ft06" in refused("jobshop", several, "--instance", "x")


def test_jobshop_says_no_when_the_time_is_too_short() -> None:
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not at hand")
    file = DATA / "jobshop" / "ft20.txt"
    document = answered_json("jobshop", file, "--time-limit", 1e-9, code=1)
    assert (document["status"], document["makespan"]) == ("no-answer", None)
    assert "no answer (no-answer)" in answered("jobshop", file, "--time-limit", 1e-9, code=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("2 2\n0 1 1 2\n", "announces 2 jobs"),
        ("1 2\n0 1 5 2\n", "line 2: machine 5"),
        ("1 1\n0 -3\n", "duration -3 is negative"),
        ("one two\n", "'one' is not an integer"),
    ],
)
def test_jobshop_refuses(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "shop.txt").write_text(text)
    assert message in refused("jobshop", tmp_path / "shop.txt")


# import, model, cluster, doctor


def test_import_reads_a_pipedream_profile(tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(PROFILE)
    arguments = ["import", "--from", "pipedream", tmp_path / "graph.txt"]
    document = answered_json(*arguments, "-o", tmp_path / "model.json", "--device", "v100")
    assert "measured: PipeDream profile graph.txt" in document.pop("source")
    assert document == {"name": "graph", "layers": 2, "file": str(tmp_path / "model.json")}
    chain = load_model(tmp_path / "model.json")
    assert sum(layer.costs[0].forward_seconds for layer in chain.layers) == pytest.approx(3e-3)
    assert {layer.costs[0].device_kind for layer in chain.layers} == {"v100"}
    assert json.loads(answered(*arguments))["layers"]


def test_import_reads_a_dnn_partitioning_workload(tmp_path: Path) -> None:
    files = sorted((DATA / "downsets").glob("**/*.json"))
    if not files:
        pytest.skip(f"{DATA} is not at hand")
    source = min(files, key=lambda path: path.stat().st_size)
    answered("import", "--from", "dnn-partitioning", source, "-o", tmp_path / "m.json")
    assert len(load_model(tmp_path / "m.json")) > 1


def test_import_splits_whole_backwards_and_says_what_is_assumed(tmp_path: Path) -> None:
    chain, file = small_problem(layers=4).chain, tmp_path / "whole.json"
    layers = [*chain.layers]
    layers[1] = small_problem(layers=4, parts=True).chain.layers[1]
    save_model(replace(chain, layers=tuple(layers)), file)
    arguments = ("import", "--from", "stagewright", file, "--split-backward")
    done = run(*arguments, 0.4, "-o", tmp_path / "split.json")
    assert "3 of 4 layers" in done.stderr
    assert "assumed to take 0.4" in done.stderr
    split = load_model(tmp_path / "split.json")
    assert split.source.endswith("; assumed: input gradients take 0.4 of the backward in 3 layers")
    assert split.layers[1] == layers[1]
    for layer, before in zip(split.layers[::2], layers[::2], strict=True):
        cost = layer.costs[0]
        assert cost.backward_seconds is None
        assert cost.total_backward_seconds == pytest.approx(before.costs[0].backward_seconds)
        assert cost.input_gradient_seconds == 0.4 * before.costs[0].total_backward_seconds
    again = ("import", "--from", "stagewright", tmp_path / "split.json", "--split-backward", 0.4)
    assert json.loads(answered(*again)) == json.loads((tmp_path / "split.json").read_text())
    assert "--split-backward: the input gradient's share" in refused(*arguments, 1)
    assert "other projects' profiles" in refused(*arguments, 0.4, "--device", "v100")
    assert "overwrite FILE" in refused(*arguments, 0.4, "-o", file)


@pytest.mark.parametrize(
    ("text", "edit", "message"),
    [
        (PROFILE + "\tnode3 -- node2\n", [], "cycle"),
        (PROFILE.replace("=2.000", "=-2.000"), [], ":2: forward_compute_time must be"),
        (PROFILE.replace("=2.000", "=nan"), [], ":2: forward_compute_time must be"),
        ("nonsense\n", [], "graph.txt"),
        (PROFILE, ["--microbatch-size", 0], "at least 1"),
        (PROFILE, ["-o", "/nowhere/m.json"], "does not exist"),
    ],
)
def test_import_refuses(text: str, edit: list[object], message: str, tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(text)
    assert message in refused("import", "--from", "pipedream", tmp_path / "graph.txt", *edit)
    assert [path.name for path in tmp_path.iterdir()] == ["graph.txt"]


def test_model_writes_an_analytic_profile(tmp_path: Path) -> None:
    bert = ["bert-large", "--device", "v100", "--microbatch-size", 4]
    line, said = answered("model", *bert, "-o", tmp_path / "m.json").splitlines()
    chain = load_model(tmp_path / "m.json")
    assert line == f"{tmp_path}/m.json: {chain.name}, {len(chain)} layers"
    assert said == chain.source
    assert chain.source.startswith("analytic")
    assert chain.microbatch_size == 4
    small = ["--layers", 2, "--hidden", 64, "--heads", 4, "--sequence", 32, "--vocabulary", 1000]
    gpt = json.loads(answered("model", "gpt", *small, "--device", "v100,p100"))
    assert {cost["device_kind"] for cost in gpt["layers"][0]["costs"]} == {"v100", "p100"}
    older = json.loads(answered("model", "gpt", *small, "--attention", "materialized"))
    kept = [chain["layers"][1]["costs"][0]["saved_bytes"] for chain in (gpt, older)]
    assert kept[0] < kept[1]
    sgd = json.loads(answered("model", "gpt", *small, "--optimizer-state", 0))
    assert sgd["optimizer_bytes_per_parameter_byte"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bert-huge"], "bert-huge"),
        (["bert-large", "--device", "abacus"], "'abacus' is not known"),
        (["bert-large", "--microbatch-size", 0], "at least 1"),
        (["vgg19", "--hidden", 64], "hidden"),
        (["vgg19", "-o", "/nowhere/m.json"], "does not exist"),
    ],
)
def test_model_refuses(arguments: list[object], message: str) -> None:
    assert message in refused("model", *arguments)


def test_cluster_builds_servers(tmp_path: Path) -> None:
    answered(
        "cluster", "2x4", "--intra", "100GB/s", "--inter", "100Gbps", "--memory", "32GB",
        "--device", "a100", "--latency-inter", "10us", "-o", tmp_path / "c.json",
    )  # fmt: skip
    cluster = load_cluster(tmp_path / "c.json")
    assert (len(cluster), len(cluster.servers)) == (8, 2)
    assert cluster.bandwidth[0, 1] == 100e9
    assert cluster.bandwidth[0, 4] == 12.5e9
    assert cluster.latency[0, 4] == 1e-5
    assert {(device.kind, device.memory_bytes) for device in cluster.devices} == {("a100", 32e9)}


def test_cluster_builds_racks(tmp_path: Path) -> None:
    answered(
        "cluster", "2x3x4", "--intra", "300GB/s", "--inter", "50GB/s", "--inter-rack", "100Gbps",
        "--latency-inter-rack", "10us", "-o", tmp_path / "c.json",
    )  # fmt: skip
    cluster = load_cluster(tmp_path / "c.json")
    assert (len(cluster), len(cluster.servers)) == (24, 6)
    assert cluster.bandwidth[0, [1, 4, 12]].tolist() == [300e9, 50e9, 12.5e9]
    assert cluster.latency[0, [1, 4, 12]].tolist() == [0.0, 0.0, 1e-5]


def test_a_kind_of_ones_own_needs_its_memory() -> None:
    arguments = ["cluster", "1x2", "--intra", "9GB/s", "--device", "abacus"]
    device = json.loads(answered(*arguments, "--memory", "1GB"))["devices"][0]
    assert (device["kind"], device["memory_bytes"]) == ("abacus", 1e9)
    assert "'abacus' is not known" in refused(*arguments)


def test_cluster_reads_files(tmp_path: Path) -> None:
    (tmp_path / "links.txt").write_text("- 10GB/s\n96Gb/s -\n")
    cluster = json.loads(answered("cluster", "--matrix", tmp_path / "links.txt"))
    assert cluster["links"]["bandwidth_bytes_per_second"] == [[None, 10e9], [12e9, None]]
    (tmp_path / "topo.txt").write_text(
        "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV2\t0-9\nGPU1\tNV2\t X \t0-9\n"
    )
    cluster = json.loads(answered("cluster", "--nvidia-smi", tmp_path / "topo.txt"))
    assert [device["name"] for device in cluster["devices"]] == ["GPU0", "GPU1"]
    assert len(json.loads(answered("cluster", "--dgx1"))["devices"]) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of"),
        (["2x2", "--dgx1"], "give one of"),
        (["8by4", "--intra", "1GB/s"], "write servers x devices"),
        (["0x4", "--intra", "1GB/s"], "the number of servers must be at least 1, got 0"),
        (
            ["2x0", "--intra", "1GB/s", "--inter", "1GB/s"],
            "the number of devices per server must be at least 1, got 0",
        ),
        (["8x4", "--intra", "100GB/s"], "--inter is missing"),
        (["8x4", "--inter", "100GB/s"], "--intra is missing"),
        (["1x4"], "--intra is missing"),
        (
            ["8x4", "--intra", "12", "--inter", "1GB/s"],
            "--intra '12' has no unit; write for example",
        ),
        (["8x4", "--intra", "0GB/s", "--inter", "1GB/s"], "must be positive"),
        (["8x4", "--intra", "fast", "--inter", "1GB/s"], "'fast' is not a bandwidth"),
        (
            ["1x2", "--intra", "9GB/s", "--memory", "16"],
            "has no unit; write for example 80GB or 80GiB",
        ),
        (["1x2", "--intra", "9GB/s", "--memory", "big"], "'big' is not a size"),
        (["1x2", "--intra", "9GB/s", "--device", "abacus"], "'abacus' is not known"),
        (["1x2", "--intra", "9GB/s", "--latency-intra", "-1us"], "--latency-intra must be from 0"),
        (["1x2", "--intra", "9GB/s", "--latency-intra", "5"], "--latency-intra '5' has no unit"),
        (["1x2", "--intra", "9GB/s", "--latency-intra", "5s"], "must be from 0 to 1 s"),
        (["1x2", "--intra", "9GB/s", "--latency-intra", "5us/s"], "has an unknown unit, us/s"),
        (["1x2", "--intra", "9GB/s", "--latency-intra", "5GB"], "has an unknown unit, GB"),
        (["1x2", "--intra", "9GB/s", "--latency-intra", "nan us"], "must be from 0 to 1 s"),
        (["--dgx1", "--inter", "9GB/s"], "belong to a shape"),
        (["2x2", "--intra", "9GB/s", "--inter-rack", "9GB/s"], "belong to a shape such as 4x8x4"),
        (["2x2x2", "--intra", "9GB/s", "--inter", "9GB/s"], "--inter-rack is missing"),
        (["2x2x2x2", "--intra", "9GB/s"], "racks x servers x devices"),
        (["--matrix", "/nowhere/links.txt"], "No such file"),
        (["--nvidia-smi", os.devnull], "no output of nvidia-smi topo -m, rocm-smi"),
        (["--dgx1", "-o", "/nowhere/c.json"], "does not exist"),
    ],
)
def test_cluster_refuses(arguments: list[str], message: str) -> None:
    assert message in refused("cluster", *arguments)


def test_an_unconnected_matrix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "links.txt").write_text("- 1GB/s -\n1GB/s - -\n- - -\n")
    assert "not connected" in refused("cluster", "--matrix", tmp_path / "links.txt")


def test_doctor_finds_every_backend_working() -> None:
    document = answered_json("doctor")
    assert document["working"] is True
    found = {finding["name"]: finding["working"] for finding in document["findings"]}
    names = ("python", "ortools", "backend cp-sat", "backend highs", "backend pulp-cbc")
    assert all(found[name] for name in names)
    assert "backend highs-ipm" in answered("doctor")


def test_doctor_asks_for_distributions_by_their_names() -> None:
    from stagewright.cli.doctor import _name

    names = {"jinja2>=3.1": "jinja2", "pulp<4,>=3.2": "pulp", "scipy": "scipy"}
    assert {text: _name(text) for text in names} == names


def test_doctor_says_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    from stagewright.solvers.backends import backend

    def broken(*_: object) -> Any:
        raise OSError("libfoo.so is missing")

    monkeypatch.setitem(backend.BACKENDS, "highs", replace(backend.BACKENDS["highs"], run=broken))
    document = answered_json("doctor", code=1)
    finding = next(one for one in document["findings"] if one["name"] == "backend highs")
    assert (finding["working"], finding["note"]) == (False, "OSError: libfoo.so is missing")
    assert re.search(r"BROKEN\s+backend highs", answered("doctor", code=1))


# Names and numbers that trip a careless program


def test_brackets_in_names_are_no_markup(files: Path) -> None:
    rewrite(files / "model.json", name="a[/bold]b :smile:")
    plan = files / "[red].json"
    made = answered("plan", *given_to(files), "--microbatches", 2, "--planner", "dp", "-o", plan)
    assert "a[/bold]b :smile:" in made
    assert "[red].json" in answered("check", plan, *given_to(files))
    assert "a[/bold]b :smile:" in answered("show", plan)


def test_a_model_that_takes_no_time_is_simulated(files: Path) -> None:
    layers = json.loads((files / "model.json").read_text())["layers"]
    for layer in layers:
        layer["parameter_bytes"] = 0
        for cost in layer["costs"]:
            cost |= {key: 0 for key in cost if key.endswith(("_seconds", "_bytes"))}
    rewrite(files / "model.json", layers=layers)
    cluster = (files / "cluster.json").read_text()
    without_latency = re.sub(r'"latency_seconds": [\d.e-]+', '"latency_seconds": 0', cluster)
    (files / "cluster.json").write_text(without_latency)
    plan = files / "free.json"
    answered("plan", *given_to(files), "--microbatches", 2, "--planner", "dp", "-o", plan)
    assert "0 s per iteration" in answered("simulate", plan, *given_to(files))
    assert answered_json("simulate", plan, *given_to(files))["slowdown"] == 1


def test_schedule_prints_its_table() -> None:
    table = answered("schedule", "--stages", 2, "--microbatches", 3, "--times", "1,2")
    assert "optimal" in table
    full = ["--microbatches", 3, "--times", "1,1", "--kind", "gpipe", "--in-flight", 1]
    assert "gpipe: infeasible" in answered("schedule", "--stages", 2, *full, code=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["schedule", "--stages", 10**9, "--microbatches", 3, "--times", "1,1"],
        ["schedule", "--stages", 3, "--microbatches", 10**9, "--times", "1,1"],
        ["cluster", "99999999999x9", "--intra", "1GB/s", "--inter", "1GB/s"],
        ["model", "gpt", "--layers", 10**11],
    ],
)
def test_absurd_sizes_are_refused_at_once(arguments: list[object]) -> None:
    assert "must be at most" in refused(*arguments)


def test_absurd_microbatches_are_refused_at_once(files: Path) -> None:
    assert "at most" in refused("plan", *given_to(files), "--microbatches", 10**8)
