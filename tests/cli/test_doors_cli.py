"""``partition``, ``estimate``, ``allocate --parts`` and ``run-cluster``: answers and complaints."""

import json
from pathlib import Path

import pytest
from commands import answered, answered_json, given_to, refused

from stagewright.graphs.workloads.jobs import (
    Job,
    PairRate,
    Rate,
    Throughputs,
    Workload,
    load_workload,
    save_workload,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "jobs" / "mixed.json"
POOL = "v100=8,p100=8,k80=8"


def test_partitions_by_both_methods_agree(files: Path) -> None:
    arguments = ["partition", *given_to(files), "--microbatches", 4]
    every = answered_json(*arguments)
    assert every["status"] == "optimal"
    assert [one["count"] for one in every["partitions"]] == [1, 2, 3, 4, 5, 6]
    program = answered_json(*arguments, "--stages", 2, "--backend", "highs")
    (one,) = program["partitions"]
    assert one["bottleneck_seconds"] == pytest.approx(every["partitions"][1]["bottleneck_seconds"])
    assert one["bound_seconds"] == pytest.approx(one["bottleneck_seconds"])
    text = answered(*arguments, "--stages", 2)
    first, last = (stage["layers"] for stage in every["partitions"][1]["stages"])
    assert f"{first[0]}-{first[1] - 1} | {last[0]}-{last[1] - 1}" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", 0], "--stages must be at least 1"),
        (["--stages", 7], "--stages must be at most 6"),
        (["--backend", "magic"], "backend 'magic' is none of recurrence, highs"),
        (["--backend", "cvxpy-convex"], "backend 'cvxpy-convex' is none of"),
        (["--time-limit", 0], "--time-limit must be"),
    ],
)
def test_partition_refuses(options: list[object], message: str, files: Path) -> None:
    assert message in refused("partition", *given_to(files), "--microbatches", 4, *options)


def test_a_program_that_is_too_large_is_refused() -> None:
    examples = EXAMPLE.parents[1]
    given = ["--model", examples / "profiles" / "bert-large.v100.json"]
    given += ["--cluster", examples / "clusters" / "v100-8x4.json", "--microbatches", 4]
    message = refused("partition", *given, "--stages", 4, "--backend", "highs")
    assert "use 'recurrence'" in message


def test_a_partition_keeps_the_memory_limit(files: Path) -> None:
    arguments = ["partition", *given_to(files), "--microbatches", 4, "--stages", 2]
    assert answered_json(*arguments)["partitions"][0]["stages"] is not None
    tight = answered_json(*arguments, "--memory-limit", "1MB", code=1)
    assert tight["partitions"][0]["stages"] is None


def test_a_model_that_fits_nowhere_has_no_partition(files: Path) -> None:
    cluster = json.loads((files / "cluster.json").read_text())
    for device in cluster["devices"]:
        device["memory_bytes"] = 1e6
    (files / "cluster.json").write_text(json.dumps(cluster))
    found = answered_json("partition", *given_to(files), "--microbatches", 4, code=1)
    assert found["status"] == "infeasible"
    assert {one["stages"] for one in found["partitions"]} == {None}


def test_an_allocation_in_parts_has_a_bound() -> None:
    there = ["allocate", "--jobs", EXAMPLE, "--cluster", POOL, "--policy", "max-min"]
    whole = answered_json(*there)
    parts = answered_json(*there, "--parts", 3, "--seed", 1)
    assert parts["status"] == "optimal"  # as good as the whole here, which its own bound shows
    assert parts["objective"] == pytest.approx(parts["bound"], rel=1e-6)
    assert parts["objective"] <= whole["objective"] * (1 + 1e-9)
    assert whole["objective"] <= parts["bound"] * (1 + 1e-9)
    assert "3 parts reach levels" in answered(*there, "--parts", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", 3], "'water-filling' is not solved in parts"),
        (["--policy", "max-min", "--parts", 99], "from 1 to the number of jobs, 24, got 99"),
        (["--policy", "max-min", "--parts", 0], "from 1 to the number of jobs"),
        (["--at-once"], "--at-once is for parts"),
        (["--policy", "max-min", "--parts", 2, "--budget", 9], "--budget is for a policy"),
        (["--policy", "max-min", "--parts", 2, "--space-sharing"], "not solved in parts"),
        (["--seed", -1], "--seed must be"),
    ],
)
def test_parts_that_cannot_be_are_refused(options: list[object], message: str) -> None:
    assert message in refused("allocate", "--jobs", EXAMPLE, "--cluster", POOL, *options)


@pytest.fixture
def new_job(tmp_path: Path) -> Path:
    """A jobs file with a job that is measured alone and beside resnet50, on one v100."""
    rates = Throughputs(
        (Rate("new", 1, "v100", 2.0),), (PairRate(("new", "resnet50"), 1, "v100", (1.0, 0.5)),)
    )
    save_workload(Workload((Job("n", "new", 10.0),), rates), tmp_path / "new.json")
    return tmp_path / "new.json"


def test_rates_of_a_new_job_are_estimated(new_job: Path, tmp_path: Path) -> None:
    written = tmp_path / "whole.json"
    arguments = ["estimate", "--reference", EXAMPLE, "--jobs", new_job]
    found = answered_json(*arguments, "-o", written)
    assert [(one["model"], one["scale"]) for one in found["new"]] == [("new", 1)]
    partners = {model for one in found["estimated"] for model in one["models"]} - {"new"}
    assert found["new"][0]["nearest"] in partners
    rates = load_workload(written).throughputs
    assert {("new", "resnet50")} <= {pair.models for pair in rates.pairs}
    shared = answered_json(
        "allocate", "--jobs", written, "--cluster", "v100=1", "--policy", "max-min"
    )
    assert shared["status"] == "optimal"
    assert f"{found['measured']} pairs are measured" in answered(*arguments)


def test_what_to_measure_is_chosen() -> None:
    arguments = ["estimate", "--reference", EXAMPLE, "--choose", "new", "--fraction", 0.5]
    found = answered_json(*arguments, "--seed", 2)
    assert found == answered_json(*arguments, "--seed", 2)
    known = {(rate.accelerator, rate.model) for rate in load_workload(EXAMPLE).throughputs.alone}
    assert {tuple(pair) for pair in found["pairs"]} <= known
    assert len(found["pairs"]) == round(0.5 * len(known))
    assert "reference job" in answered(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give one of --jobs FILE, --choose MODEL"),
        (["--jobs", EXAMPLE, "--choose", "a"], "give one of --jobs FILE"),
        (["--choose", "a", "--fraction", 2], "--fraction must be above 0 and at most 1, got 2"),
        (["--choose", "a", "--fraction", 0], "--fraction must be above 0 and at most 1, got 0"),
        (["--choose", ""], "--choose must not be empty"),
        (["--choose", "a", "--scale", 99], "no reference job runs on 99 accelerators"),
        (["--choose", "a", "--seed", -1], "--seed must be"),
        (["--choose", "a", "-o", "a.json"], "--output is for the jobs file"),
        (["--jobs", "nowhere.json"], "nowhere.json: No such file"),
    ],
)
def test_estimate_refuses(options: list[object], message: str) -> None:
    assert message in refused("estimate", "--reference", EXAMPLE, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--program", "nowhere:train"], "there is no module 'nowhere'"),
        (["--program", "json"], "names no PACKAGE:FUNCTION"),
        (["--program", "b=json:loads"], "no job is of model 'b'"),
        (["--program", "a=json:loads", "--program", "a=json:load"], "has a program already"),
        (["--program", "json:loads", "--program", "json:load"], "only one program"),
        (["--program", "json:loads", "--policy", "magic"], "unknown policy 'magic'"),
        (["--program", "json:loads", "--retries", -1], "--retries must be at least 0"),
        (["--program", "json:loads", "--round-seconds", 0], "--round-seconds must be more"),
        (["--program", "json:loads", "--feedback", 2], "--feedback must be between 0 and 1"),
    ],
)
def test_run_cluster_refuses(options: list[object], message: str, tmp_path: Path) -> None:
    rates = Throughputs((Rate("a", 1, "v100", 1.0),))
    save_workload(Workload((Job("a", "a", 5.0),), rates), tmp_path / "jobs.json")
    given = ["--jobs", tmp_path / "jobs.json", "--cluster", "v100=1", "--folder", tmp_path / "run"]
    assert message in refused("run-cluster", *given, *options)
