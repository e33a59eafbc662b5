"""Rounds for real: processes on a Ray of two nodes on this machine, killed and hung on purpose."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import (
    BATCHES,
    MODEL,
    STATE,
    Walk,
    quick,
    steady,
    train,
    train_divided,
    train_killed,
    trained,
    value_after,
)
from cluster_runs import RATES, ROUND, SECONDS, job, max_min_fair, run
from commands import answered_json

from stagewright.executor.clusters.job_store import JobStore
from stagewright.executor.clusters.rates import (
    ClusterJob,
    MeasuredRate,
    has_moved,
    measured,
    surviving,
)
from stagewright.executor.clusters.ray_ranks import bind
from stagewright.executor.clusters.report import ClusterReport, JobOutcome
from stagewright.executor.clusters.runtime import run_cluster
from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.clusters.rates import rate_table
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import (
    Job,
    PairRate,
    Rate,
    Throughputs,
    Workload,
    save_workload,
)
from stagewright.graphs.workloads.pool import parse_pool

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray with two v100 and two k80 on one node; the tests' process is connected to it."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 4,
        "resources": {"v100": 2, "k80": 2},
        "include_dashboard": False,
        # A dead node is noticed after 4 s, not 15.
        "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 4},
    }
    nodes = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def outcome(report: ClusterReport, name: str) -> JobOutcome:
    (found,) = (each for each in report.jobs if each.name == name)
    return found


def checkpoint(folder: Path, name: str) -> Path:
    store = JobStore(folder)
    found = store.job(name).checkpoint
    store.close()
    assert found is not None
    return Path(found)


def commits(folder: Path, name: str) -> tuple[tuple[int, int, int], ...]:
    store = JobStore(folder)
    found = store.commits(name)
    store.close()
    return found


def require_every_step_once(folder: Path, name: str, steps: int) -> None:
    """Committed steps add up, and the job's checkpoint is that of an uninterrupted run."""
    state = json.loads((checkpoint(folder, name) / STATE).read_text())
    assert [step for step, _ in state["history"]] == list(range(1, steps + 1))
    assert state["value"] == value_after(steps)
    store = JobStore(folder)
    commits = store.commits(name)
    store.close()
    counted = [
        [step, epoch] for epoch, first, last in commits for step in range(first + 1, last + 1)
    ]
    assert state["history"] == counted


MISHAPS = {
    "plain": Walk(SECONDS),
    "killed": Walk(SECONDS, "kill", 20),
    "torn": Walk(SECONDS, "torn save"),
    "killed-in-save": Walk(SECONDS, "killed save"),
    "hung": Walk(SECONDS, "hang", 15),
    "raising": Walk(SECONDS, "raise", 10, times=99),
    "leaving": Walk(SECONDS, "exit", 10),
    "together-killed": Walk(SECONDS, "kill", 15),
}


@pytest.mark.slow
def test_whatever_befalls_a_job_its_steps_count_once(cluster: Any, tmp_path: Path) -> None:
    """All programs that fare ill, at once with one that does not: in one run, for time's sake."""
    jobs = [
        job(name, 30, program, scale=1 + name.startswith("together"))
        for name, program in MISHAPS.items()
    ]
    report = run(tmp_path, *jobs, grace_seconds=5.0)
    for name in MISHAPS.keys() - {"raising"}:
        assert outcome(report, name).state == "done", name
        assert outcome(report, name).steps == 30, name
        require_every_step_once(tmp_path, name, 30)
    require_given_up_with_its_error(report, tmp_path)
    require_nobody_in_two_places(report)
    assert documents.to_json(report).startswith("{")


def require_given_up_with_its_error(report: ClusterReport, folder: Path) -> None:
    failed = outcome(report, "raising")
    assert failed.state == "failed"
    assert failed.steps < 10
    assert failed.error is not None
    assert failed.error.startswith("ValueError: no such sample on ")
    log = next(folder.glob("job-raising/output.log")).read_text()
    assert "in this line neither" in log


def require_nobody_in_two_places(report: ClusterReport) -> None:
    """No accelerator has two leases in a round, and no job runs twice."""
    for placed in report.rounds:
        places = [(each.worker, number) for each in placed for number in each.accelerators]
        assert len(set(places)) == len(places)
        names = list(chain.from_iterable(each.jobs for each in placed))
        assert len(set(names)) == len(names)


@pytest.mark.slow
def test_parameters_are_those_of_an_uninterrupted_run(cluster: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    jobs = [job("1", 50, train), job("2", 50, train, scale=2)]
    report = run(tmp_path, *jobs, pool="k80=2", round_seconds=0.4)
    for ranks in (1, 2):
        name = str(ranks)
        assert outcome(report, name).state == "done"
        assert len(commits(tmp_path, name)) > 1  # it was interrupted
        found = torch.load(checkpoint(tmp_path, name) / MODEL)[0]
        for parameter, expected in trained(ranks, 50).items():
            assert torch.equal(found[parameter], expected), parameter


@pytest.mark.slow
def test_jobs_go_on_with_other_numbers_of_ranks(cluster: Any, tmp_path: Path) -> None:
    """Three jobs on four accelerators, until a node is killed with two; then on what is left.

    A process of one of them is killed, too. The parameters are those of one process, whatever
    ranks died between two checkpoints.
    """
    torch = pytest.importorskip("torch")
    node = cluster.add_node(num_cpus=0, resources={"k80": 2})
    rates = Throughputs((Rate("walk", 1, "k80", 100.0), Rate("walk", 2, "k80", 150.0)))
    steps = {"a": 400, "b": 60, "c": 60}
    jobs = [
        job(name, many, train_killed if name == "b" else train_divided, counts=(1, 2))
        for name, many in steps.items()
    ]
    kill = subprocess.Popen(
        [sys.executable, "-c", WHEN_COMMITTED, str(tmp_path), str(_raylet(node))]
    )
    report = run(tmp_path, *jobs, pool="k80=4", rates=rates, round_seconds=0.6)
    assert kill.wait() == 0
    cluster.remove_node(node)
    for name, many in steps.items():
        assert (outcome(report, name).state, outcome(report, name).steps) == ("done", many)
        found = torch.load(checkpoint(tmp_path, name) / MODEL)[0]
        for parameter, expected in trained(1, many).items():
            assert torch.allclose(found[parameter], expected, rtol=1e-12, atol=1e-14), parameter
    told = [(tmp_path / f"job-{name}" / "output.log").read_text() for name in steps]
    assert any("1 ranks" in each and "2 ranks" in each for each in told)
    in_use = [sum(len(one.accelerators) for one in placed) for placed in report.rounds]
    assert max(in_use) > 2
    assert in_use[-1] <= 2
    assert (tmp_path / "job-b" / "death").exists()
    # A step sleeps 10 ms: no rate is higher, whatever was predicted.
    rates = {
        share.worker: share.steps_per_second
        for share in report.shares
        if share.steps_per_second is not None
    }
    assert rates
    assert all(0 < rate <= 100 for rate in rates.values())
    predicted = {share.worker: share.predicted_steps_per_second for share in report.shares}
    assert predicted == {"k80 x1": 100.0, "k80 x2": 150.0}


SCHEDULER = """
import sys
from pathlib import Path
import ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
from cluster_runs import job, run
from cluster_jobs import Walk
run(Path(sys.argv[2]), *(job(name, 100, Walk({"k80": 0.1})) for name in "abc"), pool="k80=2")
"""


def has_commit(folder: Path) -> bool:
    """Looked up without taking the folder over."""
    if not list(folder.glob("job-*/epoch-*")):
        return False
    database = sqlite3.connect(folder / "jobs.sqlite")
    (count,) = database.execute("SELECT count(*) FROM commits").fetchone()
    database.close()
    return bool(count)


@pytest.mark.slow
def test_a_scheduler_that_is_killed_can_be_started_again(cluster: Any, tmp_path: Path) -> None:
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", SCHEDULER, cluster.address, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        end = time.monotonic() + 60
        while not has_commit(tmp_path) and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    store = JobStore(tmp_path)
    before = [store.job(name).committed for name in "abc"]
    store.close()
    assert 0 < sum(before) < 3 * 100
    walks = [job(name, 100, Walk(SECONDS)) for name in "abc"]
    report = run(tmp_path, *walks, pool="k80=2")
    for name in "abc":
        assert outcome(report, name).state == "done"
        require_every_step_once(tmp_path, name, 100)
    assert run(tmp_path, *walks, pool="k80=2").rounds == ()  # nothing is left to do
    with pytest.raises(InputError, match="job 'a' has 100 steps there, here 7"):
        run(tmp_path, job("a", 7, Walk()))


class OnceRunning:
    """A stop token that is set once a job has a process in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_set(self) -> bool:
        return any(self.folder.glob("job-*/running-*"))


@pytest.mark.slow
def test_a_stopped_run_saves_checkpoints_and_can_be_continued(cluster: Any, tmp_path: Path) -> None:
    """The jobs would be done within the round."""
    jobs = [job(name, 400, steady) for name in "ab"]
    report = run(tmp_path, *jobs, pool="k80=2", round_seconds=30.0, stop=OnceRunning(tmp_path))
    assert {each.state for each in report.jobs} == {"waiting"}
    assert sum(each.steps for each in report.jobs) > 0
    for each in report.jobs:
        assert each.steps < 400
        assert each.error is None
    run(tmp_path, *(job(name, 400, quick) for name in "ab"), pool="k80=2")
    for name in "ab":
        require_every_step_once(tmp_path, name, 400)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_with_checkpoints(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    save_workload(Workload((Job("one", "walk", 1e6),), RATES), tmp_path / "jobs.json")
    folder = tmp_path / "run"
    given = ["--jobs", tmp_path / "jobs.json", "--cluster", "k80=1", "--folder", folder]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "stagewright", "run-cluster", *map(str, given),
            "--round-seconds", "30", "--program", "cluster_jobs:steady", "--json",
        ],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    end = time.monotonic() + 120
    while not list(folder.glob("job-*/running-*")) and time.monotonic() < end:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    told, _ = process.communicate(timeout=120)
    found = json.loads(told)
    assert (process.returncode, found["status"]) == (0, "interrupted")
    assert [one["state"] for one in found["jobs"]] == ["waiting"]
    require_every_step_once(folder, "one", found["jobs"][0]["steps"])


@pytest.mark.slow
def test_accelerators_of_a_dead_node_are_lost(cluster: Any, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=0, resources={"a100": 1})
    rates = Throughputs(
        (
            Rate("walk", 1, "a100", 1000.0),
            Rate("walk", 1, "k80", 100.0),
            Rate("big", 1, "a100", 1.0),
            Rate("big", 1, "k80", 0.0),
        )
    )

    jobs = [job(name, 300, Walk({"a100": 0.01, "k80": 0.005})) for name in "abc"]
    stranded = ClusterJob(Job("stranded", "big", 10**6), Walk({"a100": 0.01}))
    kill = subprocess.Popen(
        [sys.executable, "-c", WHEN_COMMITTED, str(tmp_path), str(_raylet(node))]
    )
    report = run(
        tmp_path, *jobs, stranded, pool="a100=1,k80=2", rates=rates, patience_seconds=0.5, retries=0
    )
    assert kill.wait() == 0
    cluster.remove_node(node)
    for name in "abc":
        require_every_step_once(tmp_path, name, 300)
    assert outcome(report, "stranded").state == "waiting"
    workers = [{each.worker for each in placed} for placed in report.rounds]
    assert "a100" in workers[0]
    assert "a100" not in workers[-1]


WHEN_COMMITTED = """
import os, pathlib, signal, sys, time
while not list(pathlib.Path(sys.argv[1]).glob("job-*/epoch-*")):
    time.sleep(0.05)
os.kill(int(sys.argv[2]), signal.SIGKILL)
"""


def _raylet(node: Any) -> int:
    (process,) = node.all_processes["raylet"]
    pid: int = process.process.pid
    return pid


@pytest.mark.slow
def test_pairs_share_an_accelerator_and_rates_are_learnt(cluster: Any, tmp_path: Path) -> None:
    rates = Throughputs(
        (Rate("walk", 1, "v100", 20.0),), (PairRate(("walk", "walk"), 1, "v100", (19.0, 19.0)),)
    )
    jobs = [job(name, 120, Walk(SECONDS)) for name in "abc"]
    problems: list[AllocationProblem] = []

    def allocate(problem: AllocationProblem) -> Allocation:
        problems.append(problem)
        return max_min_fair(problem)

    report = run_cluster(
        jobs,
        rates,
        parse_pool("v100=1"),
        allocate,
        folder=tmp_path,
        round_seconds=ROUND,
        grace_seconds=10.0,
        space_sharing=True,
        feedback=0.5,
    )
    assert {each.state for each in report.jobs} == {"done"}
    paired = [each for placed in report.rounds for each in placed if len(each.jobs) == 2]
    assert paired
    assert {each.worker for each in paired} == {"v100"}
    for name in "abc":
        require_every_step_once(tmp_path, name, 120)
    assert max(problem.table.paired.max() for problem in problems) > 40.0  # a step takes 5 ms


@pytest.mark.slow
def test_jobs_come_when_they_arrive(cluster: Any, tmp_path: Path) -> None:
    late = job("late", 20, Walk(SECONDS), arrival_seconds=2.0)
    report = run(
        tmp_path, job("a", 100, Walk(SECONDS)), job("b", 100, Walk(SECONDS)), late, pool="v100=1"
    )
    assert {each.state for each in report.jobs} == {"done"}
    finished = outcome(report, "late").completion_seconds
    assert finished is not None
    assert finished > 0
    assert all(0 < share.target <= 1 for share in report.shares), report.shares
    assert all(0 < share.measured <= 1 + 1e-9 for share in report.shares), report.shares


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"pool": "v100=9"}, "Ray has 2 of 'v100', the pool 9: start its nodes with --resources"),
        ({"round_seconds": 0.0}, "round_seconds must be more than zero"),
        ({"feedback": 2.0}, "feedback must be between 0 and 1, got 2"),
        ({"grace_seconds": -1.0}, "grace_seconds must be finite and not negative"),
    ],
)
def test_senseless_options_are_refused(
    cluster: Any, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        run(tmp_path, job("a", 5, Walk()), **change)


@pytest.mark.parametrize(
    ("jobs", "match"),
    [
        ([job("a", 2.5, Walk())], "job 'a': steps must be a whole number, got 2.5"),  # type: ignore[arg-type]
        ([], "there are no jobs to run"),
        ([job("a", 2, Walk()), job("a", 3, Walk())], "two jobs are named 'a'"),
    ],
)
def test_jobs_that_cannot_be_counted_are_refused(
    tmp_path: Path, jobs: Sequence[ClusterJob], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        run(tmp_path, *jobs)


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'stagewright\[cluster\]'"):
        run(tmp_path, job("a", 5, Walk()))


def test_accelerators_keep_their_node_while_it_lives() -> None:
    assert bind([None] * 3, {"m": 2, "n": 2}) == ["m", "m", "n"]
    assert bind(["m", "m", "n"], {"n": 2}) == ["n", None, "n"]
    assert bind(["n", None, "n"], {"n": 2, "o": 1}) == ["n", "o", "n"]
    assert bind(["m"], {}) == [None]


PAIRS = (
    PairRate(("walk", "walk"), 1, "v100", (150.0, 150.0)),
    PairRate(("walk", "walk"), 2, "k80", (80.0, 80.0)),
)
TABLE = rate_table(
    Throughputs(RATES.alone, PAIRS),
    parse_pool("v100=2,k80=2"),
    [("walk", 1), ("walk", 2)],
    space_sharing=True,
)


def test_what_is_lost_has_no_rates() -> None:
    left = surviving(TABLE, [0, 1])
    assert left.alone.tolist() == [[0.0, 100.0], [0.0, 0.0]]
    assert len(left.paired) == 0
    assert left.counts.tolist() == [1, 1]
    assert surviving(TABLE, [2, 2]) is TABLE
    one_gone = surviving(TABLE, [1, 2])
    assert one_gone.alone.tolist() == [[200.0, 100.0], [0.0, 100.0]]
    assert len(one_gone.paired) == 2


def test_servers_that_are_no_longer_whole_are_not_counted_as_servers() -> None:
    table = rate_table(RATES, parse_pool("v100=2x2,k80=2x2"), [("walk", 1), ("walk", 2)])
    left = surviving(table, [3, 2])
    assert [each.per_server for each in left.pool.accelerators] == [None, 2]
    assert [each.count for each in left.pool.accelerators] == [3, 2]


def test_measured_rates_are_averaged_in() -> None:
    half = measured(TABLE, [MeasuredRate(0, None, 0, 100.0)], 0.5)
    assert half.alone.tolist() == [[150.0, 100.0], [200.0, 100.0]]
    assert has_moved(half, TABLE)
    assert not has_moved(measured(TABLE, [MeasuredRate(0, None, 0, 190.0)], 0.5), TABLE)
    paired = measured(TABLE, [MeasuredRate(1, 1, 1, 40.0)], 1.0)
    assert paired.paired.tolist() == [[150.0, 150.0], [40.0, 80.0]]
    assert has_moved(paired, TABLE)
    assert TABLE.paired.tolist() == [[150.0, 150.0], [80.0, 80.0]]


def test_batches_of_the_walk_are_not_a_divisor_of_its_steps() -> None:
    assert 30 % BATCHES  # else taking up a pass in its middle goes untested


def test_the_command_line_runs_a_cluster(cluster: Any, tmp_path: Path) -> None:
    jobs = (Job("one", "walk", 20.0), Job("two", "walk", 20.0, scale=2))
    save_workload(Workload(jobs, RATES), tmp_path / "jobs.json")
    given = ["--jobs", tmp_path / "jobs.json", "--cluster", "v100=2,k80=2"]
    given += ["--folder", tmp_path / "run", "--round-seconds", ROUND, "--grace-seconds", 10]
    found = answered_json(
        "run-cluster", *given, "--program", "cluster_jobs:quick", "-o", tmp_path / "report.json"
    )
    assert found["status"] == "done"
    assert {job["name"]: job["steps"] for job in found["jobs"]} == {"one": 20, "two": 20}
    for name in ("one", "two"):
        require_every_step_once(tmp_path / "run", name, 20)
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["rounds"]) == found["rounds"] > 0
    assert {one["predicted_steps_per_second"] for one in report["shares"]} <= {100.0, 200.0}
    broken = answered_json(
        "run-cluster", *given, "--folder", tmp_path / "other", "--retries", 0,
        "--program", "walk=json:loads", code=1,
    )  # fmt: skip
    assert broken["status"] == "failed"
    assert all("json:loads" in job["error"] for job in broken["jobs"])
