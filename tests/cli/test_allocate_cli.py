"""``allocate``, ``rounds``, ``policies`` and ``import --from gavel``, on good and on bad input."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokens import After
from typer.testing import CliRunner, Result

from stagewright.cli import app
from stagewright.cli.clusters import simulating
from stagewright.formulations.clusters.allocation_plan import load_allocation
from stagewright.graphs.machines.cluster import Link, save_cluster, uniform_servers
from stagewright.graphs.workloads.jobs import (
    Job,
    PairRate,
    Rate,
    Throughputs,
    Training,
    Workload,
    load_workload,
    save_workload,
)
from stagewright.solvers.clusters.policies import POLICIES

EXAMPLE = Path(__file__).parents[2] / "examples" / "jobs" / "mixed.json"
RATES = {"a": (40.0, 10.0), "b": (12.0, 4.0), "c": (100.0, 50.0)}  # thesis 5.4.1


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def answered(*arguments: object, code: int = 0) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stderr == ""
    return result.stdout


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


def as_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    found = json.loads(answered(*arguments, "--json", code=code))
    assert isinstance(found, dict)
    return found


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """The three jobs of the thesis, and how two of them run together."""
    alone = tuple(
        Rate(model, 1, kind, rate)
        for model, rates in RATES.items()
        for kind, rate in zip(("v100", "k80"), rates, strict=True)
    )
    pairs = (PairRate(("a", "b"), 1, "v100", (36.0, 11.0)),)
    path = tmp_path / "jobs.json"
    save_workload(
        Workload(tuple(Job(name, name, 1000.0) for name in RATES), Throughputs(alone, pairs)), path
    )
    return path


def test_the_example_of_the_thesis(jobs: Path):
    found = as_json("allocate", "--jobs", jobs, "--cluster", "v100=1,k80=1", "--policy", "max-min")
    assert list(found)[:6] == ["status", "policy", "objective", "bound", "gap", "wall_seconds"]
    assert (found["status"], found["policy"]) == ("optimal", "max-min")
    assert found["gap"] < 1e-9
    shares = {(*one["jobs"], one["accelerator"]): one["share"] for one in found["allocation"]}
    assert shares == {
        ("a", "v100"): pytest.approx(5 / 11),
        ("b", "v100"): pytest.approx(5 / 11),
        ("b", "k80"): pytest.approx(1 / 11),
        ("c", "v100"): pytest.approx(1 / 11),
        ("c", "k80"): pytest.approx(10 / 11),
    }


def test_what_is_in_use_is_shown(jobs: Path):
    there = ("--jobs", jobs, "--cluster", "v100=2,k80=4")
    found = as_json("allocate", *there)
    used = dict.fromkeys(("v100", "k80"), 0.0)
    for one in found["allocation"]:
        used[one["accelerator"]] += one["share"]
    assert found["utilisation"] == {
        "v100": pytest.approx(used["v100"] / 2),
        "k80": pytest.approx(used["k80"] / 4),
    }
    assert found["utilisation"]["v100"] == pytest.approx(1.0)
    k80 = f"{found['utilisation']['k80']:.2%}"
    assert f"in use: v100 100.00%, k80 {k80}\n" in answered("allocate", *there)


def test_sharing_accelerators_is_shown_and_helps(jobs: Path):
    there = ("--jobs", jobs, "--cluster", "v100=1,k80=1")
    shared = as_json("allocate", *there, "--space-sharing")
    assert shared["objective"] > as_json("allocate", *there)["objective"]
    assert any(one["jobs"] == ["a", "b"] for one in shared["allocation"])
    assert "optimal" in answered("allocate", *there, "--space-sharing")


def test_a_cluster_may_be_a_file_of_devices(jobs: Path, tmp_path: Path):
    cluster = uniform_servers(1, 2, Link(1e9), kind="v100")
    save_cluster(cluster, tmp_path / "cluster.json")
    spelled = as_json("allocate", "--jobs", jobs, "--cluster", "v100=1x2", "--placement-sensitive")
    read = as_json(
        "allocate", "--jobs", jobs, "--cluster", tmp_path / "cluster.json", "--placement-sensitive"
    )
    assert read["objective"] == pytest.approx(spelled["objective"])


def test_rounds_realise_an_allocation_file(jobs: Path, tmp_path: Path):
    there = ("--jobs", jobs, "--cluster", "v100=1,k80=1")
    file = tmp_path / "allocation.json"
    answered("allocate", *there, "--output", file)
    assert load_allocation(file).policy == "water-filling"
    found = as_json("rounds", *there, "--allocation", file, "--rounds", 300)
    assert len(found["rounds"]) == 300
    assert found["largest_shortfall"] < 0.02
    for assignments in found["rounds"]:
        running = [job for one in assignments for job in one["jobs"]]
        assert len(running) == len(set(running)) == 2
    assert "leases renewed" in answered("rounds", *there, "--rounds", 5)
    other = ("--jobs", jobs, "--cluster", "v100=2,k80=1")
    assert "answers other jobs" in refused("rounds", *other, "--allocation", file)


def test_an_allocation_file_that_was_tampered_with_is_refused(jobs: Path, tmp_path: Path):
    there = ("--jobs", jobs, "--cluster", "v100=1,k80=1")
    file = tmp_path / "allocation.json"
    answered("allocate", *there, "--output", file)
    document = json.loads(file.read_text())
    document["shares"][0]["share"] = 1.0
    file.write_text(json.dumps(document))
    assert "not valid" in refused("rounds", *there, "--allocation", file)
    document["shares"][0]["jobs"] = ["nobody"]
    file.write_text(json.dumps(document))
    assert "no job 'nobody'" in refused("rounds", *there, "--allocation", file)


def test_policies_are_listed():
    assert {one["name"] for one in as_json("policies")["policies"]} == POLICIES.keys()
    assert "max-min" in answered("policies")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--cluster", "v100=1,a100=1"), "unknown accelerator 'a100'"),
        (("--cluster", "v100"), "cluster 'v100': there is no such file"),
        (("--cluster", "v100=0"), "count must be at least 1"),
        (("--cluster", "v100=1,v100=2"), "two types of accelerators are named 'v100'"),
        (("--cluster", "v100=1@cheap"), "is not an accelerator type"),
        (("--cluster", "v100=1", "--policy", "fair"), "unknown policy 'fair'"),
        (("--cluster", "v100=1", "--placement-sensitive"), "placement needs servers"),
        (("--cluster", "v100=1", "--budget", "5"), "spends no budget"),
        (("--cluster", "v100=1", "--time-limit", "0"), "--time-limit"),
        (("--cluster", "v100=1", "--output", "/nowhere/a.json"), "does not exist"),
    ],
)
def test_bad_input_is_refused_in_one_line(jobs: Path, arguments: tuple[str, ...], complaint: str):
    assert complaint in refused("allocate", "--jobs", jobs, *arguments)


def test_space_sharing_needs_rates_of_pairs(tmp_path: Path):
    rates = Throughputs((Rate("a", 1, "v100", 1.0),))
    save_workload(Workload((Job("a", "a", 1.0),), rates), tmp_path / "jobs.json")
    there = ("--jobs", tmp_path / "jobs.json", "--cluster", "v100=1")
    assert "needs throughputs of pairs" in refused("allocate", *there, "--space-sharing")


def test_a_trace_becomes_a_jobs_file(tmp_path: Path):
    trace, table, output = (tmp_path / name for name in ("a.trace", "table.json", "jobs.json"))
    line = "A (batch size 1)\tpython3 a.py\ta\t--steps\t1\t500\t2\t1\t-1.000000\t{}\n"
    trace.write_text(line.format(0) + line.format(30.5))
    table.write_text(json.dumps({"v100": {"('A (batch size 1)', 2)": {"null": 3.5}}}))
    from_gavel = ("import", "--from", "gavel", trace, "--throughputs", table)
    assert "2 jobs" in answered(*from_gavel, "-o", output)
    told = {"name": "a", "jobs": 2, "file": str(output)}
    assert as_json(*from_gavel, "-o", output) == told
    jobs = load_workload(output).jobs
    assert [(job.scale, job.steps, job.arrival_seconds) for job in jobs] == [
        (2, 500, 0),
        (2, 500, 30.5),
    ]
    trace.write_text(line.format(9) + line.format(8))
    assert "a.trace:2: arrives at 8 s" in refused(*from_gavel)
    trace.write_text(line.format(9) + "\n" + line.format(10))
    assert "a.trace:2: the line is empty" in refused(*from_gavel)
    assert "--throughputs" in refused("import", "--from", "gavel", trace)


def test_the_generated_workload_is_what_the_script_writes():
    from examples.cluster_jobs import workload

    assert load_workload(EXAMPLE) == workload()


def test_a_cluster_is_simulated_on_a_jobs_file(tmp_path: Path):
    there = ("--jobs", EXAMPLE, "--cluster", "v100=2x4@2.48,p100=1x4@1.46")
    pictures = [tmp_path / f"{name}.png" for name in ("timeline", "completion", "utilisation")]
    options = ("--png", "--completion-png", "--utilisation-png")
    drawn = [word for pair in zip(options, pictures, strict=True) for word in pair]
    found = as_json("simulate-cluster", *there, *drawn, "--hours-to-failure", 20, "--seed", 1)
    assert found["completed"] == found["jobs"] == 24
    assert 0 < found["utilisation"] <= 1
    assert found["mean_jct_seconds"] < found["makespan_seconds"]
    assert found["dollars"] > 0
    assert all(file.read_bytes()[1:4] == b"PNG" for file in pictures)
    again = answered("simulate-cluster", *there, "--hours-to-failure", 20, "--seed", 1)
    assert "24 of 24 complete" in again
    assert f"{found['mean_jct_seconds'] / 3600:.2f} h" in again


def test_an_interrupted_simulation_has_its_jobs_so_far(monkeypatch: pytest.MonkeyPatch):
    options = ("simulate-cluster", "--jobs", EXAMPLE, "--cluster", "v100=2x4,p100=1x4")
    whole = as_json(*options)
    assert whole["status"] == "done"
    monkeypatch.setattr(simulating, "interruptible", lambda: nullcontext(After(30)))
    found = as_json(*options)
    assert (found["status"], found["rounds"]) == ("interrupted", 30)
    assert 0 < found["completed"] < whole["completed"]
    assert re.search(r"complete after [^\n]+, interrupted\n", answered(*options))
    monkeypatch.setattr(simulating, "interruptible", lambda: nullcontext(After(0)))
    assert as_json(*options, code=1)["completed"] == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give one of --jobs FILE"),
        (("--jobs", EXAMPLE, "--poisson", "3"), "give one of --jobs FILE"),
        (("--poisson", "3"), "need --throughputs FILE"),
        (("--jobs", EXAMPLE, "--slos"), "belong to --poisson"),
        (("--jobs", EXAMPLE, "--window", "9-3"), "is no FIRST-END"),
        (("--jobs", EXAMPLE, "--policy", "best"), "unknown policy 'best'"),
        (("--jobs", EXAMPLE, "--round-seconds", "0"), "--round-seconds"),
        (("--jobs", EXAMPLE, "--hours-to-failure", "-1"), "--hours-to-failure"),
        (("--jobs", EXAMPLE, "--policy", "makespan-budget", "--budget", "0.01"), "no allocation"),
        (("--jobs", "nowhere.json"), "nowhere.json: No such file"),
    ],
)
def test_a_simulation_that_cannot_be_is_refused(arguments: tuple[str, ...], complaint: str):
    cluster = ("--cluster", "v100=2x4@2.48,p100=1x4@1.46")
    assert complaint in refused("simulate-cluster", *cluster, *arguments)


@pytest.mark.parametrize("backend", ["cvxpy", "pulp-cbc"])
def test_another_backend_has_the_same_optimum(jobs: Path, backend: str):
    options = ("allocate", "--jobs", jobs, "--cluster", "v100=1,k80=1", "--policy", "max-min")
    found = as_json(*options, "--backend", backend)
    assert found["objective"] == pytest.approx(as_json(*options)["objective"], rel=1e-6)
    assert (found["duals"] is not None) == (backend == "cvxpy")


def test_backends_that_do_not_apply_are_refused(jobs: Path):
    options = ("allocate", "--jobs", jobs, "--cluster", "v100=1,k80=1", "--policy")
    linear = "use highs or highs-ipm or pulp-cbc"
    for policy, usable in (("fifo", f"{linear} or cvxpy"), ("allox", linear)):
        line = refused(*options, policy, "--backend", "gurobi")
        assert line.endswith(f"backend 'gurobi' is unknown; {usable}\n")
    line = refused(*options, "fifo", "--backend", "cp-sat")
    assert f"backend 'cp-sat' solves no linear programs; {linear} or cvxpy" in line
    assert "has no program to write out" in refused(*options, "allox", "--backend", "cvxpy")


def test_trainings_are_computed(tmp_path: Path):
    config = {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
        "n_positions": 1024,
    }  # fmt: skip
    training = Training("gpt", config, global_batch=8, sequence=512)
    file, priced = tmp_path / "jobs.json", tmp_path / "priced.json"
    save_workload(Workload((Job("a", "gpt", 9e4),), trainings=(training,)), file)
    there = ("--jobs", file, "--cluster", "h100=2,a100=2")
    told = answered("price-jobs", *there, "-o", priced)
    for part in ("p1 t1 d1 b8", "computed for a100: servers of 8 (the usual)", "2 throughputs in"):
        assert part in told
    found = as_json("price-jobs", *there)
    rates = [one["steps_per_second"] for one in found["prices"]]
    assert [one.steps_per_second for one in load_workload(priced).throughputs.alone] == rates
    allocated = as_json("allocate", *there, "-o", tmp_path / "allocation.json")
    assert allocated["prices"] == found["prices"]
    assert allocated["assumed"] == found["assumed"]
    plain = as_json("allocate", "--jobs", priced, "--cluster", "h100=2,a100=2")
    assert (plain["prices"], plain["allocation"]) == (found["prices"], allocated["allocation"])
    realised = answered("rounds", *there, "--allocation", tmp_path / "allocation.json")
    assert "computed for h100" in realised
    assert "computed for h100" in answered("simulate-cluster", *there)
    drawn = answered("simulate-cluster", "--jobs", priced, *there[2:], "--drawn-rates")
    assert "from the ranges of 2 computed ones; the policy learned 1 when" in drawn
    assert "no trainings" in refused("price-jobs", *there[2:], "--jobs", priced)
