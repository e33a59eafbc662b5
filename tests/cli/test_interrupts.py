"""Signals and the progress line of real commands."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from commands import FT06, answered, answered_json
from processes import PATIENCE, in_a_terminal, wait_for
from profiles import slow_after
from rich.console import Console

from stagewright.cli import SIGNALS, console, interruptible, solving
from stagewright.cli.console import ProgressLine
from stagewright.cli.pipelines import planning
from stagewright.formulations.forms.answers import Progress
from stagewright.formulations.plans.plan import load_plan
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.machines.cluster import Link, save_cluster, uniform_servers
from stagewright.graphs.models.chain import save_model
from stagewright.solvers.planners.steps import warm_up

LONG = 1000  # seconds that no search here may take


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model and a cluster whose joint search does not end within minutes."""
    save_model(analytic_model("bert-large", 4), tmp_path / "model.json")
    cluster = uniform_servers(4, 4, Link(10e9), Link(1e9))
    save_cluster(cluster, tmp_path / "cluster.json")
    return tmp_path


def plan_arguments(files: Path, *more: object) -> list[str]:
    given = ["--model", files / "model.json", "--cluster", files / "cluster.json"]
    options = ["--microbatches", 16, "--time-limit", LONG, "--threads", 1, *more]
    return ["plan", *map(str, (*given, *options))]


@pytest.mark.real
@pytest.mark.parametrize("number", slow_after(1, [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_keeps_the_best_plan(files: Path, number: signal.Signals) -> None:
    process, shown = in_a_terminal(plan_arguments(files, "-o", files / "plan.json", "--json"))
    pattern = r"planning: \d+ s, best ([0-9.]+), bound ([0-9.]+), gap ([0-9.]+)%"
    best, bound, gap = map(float, re.findall(pattern, wait_for(shown, pattern))[-1])
    assert gap == pytest.approx(100 * (1 - bound / best), abs=0.01)
    process.send_signal(number)
    told, _ = process.communicate(timeout=PATIENCE)
    document = json.loads(told)
    assert (process.returncode, document["status"]) == (0, "interrupted")
    plan = load_plan(files / "plan.json")
    assert plan.certificate is not None
    assert plan.certificate.cost_seconds == document["cost_seconds"] > document["bound_seconds"] > 0
    given = ["--model", files / "model.json", "--cluster", files / "cluster.json"]
    assert answered_json("check", files / "plan.json", *given)["status"] == "valid"


SEARCH = """
import time
from holding import hold
from stagewright.cli import interruptible
with interruptible() as stop:
    print("ready", flush=True)
    while not stop.is_set():
        time.sleep(0.01)
    print("stopping", flush=True)
    hold()
"""
# What starts the tests in the background may ignore interrupts, which its children inherit.
COMMAND = f"""
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from holding import hold
from stagewright.cli import app, main

@app.command()
def wait():
    try:
        print("ready", flush=True)
        time.sleep({LONG})
    finally:
        print("stopping", flush=True)
        hold()

main()
"""


def started(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@pytest.mark.parametrize(
    ("code", "told"),
    [(SEARCH, "stagewright: stopping; a second signal ends it immediately\n"), (COMMAND, "")],
    ids=["search", "command"],
)
def test_the_second_signal_ends_at_once(code: str, told: str) -> None:
    """A library that computes, and lets no handler of Python run, is no reason to wait."""
    process = started(code)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        for line in ("ready\n", "stopping\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == -signal.SIGINT
        assert process.stderr.read() == told
    finally:
        process.kill()


def test_the_first_signal_ends_a_command_without_a_traceback() -> None:
    code = COMMAND.replace("hold()", "pass")
    process = started(code)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    told, complaints = process.communicate(timeout=PATIENCE)
    assert (process.returncode, told, complaints) == (128 + signal.SIGINT, "stopping\n", "")


def test_a_signal_leaves_out_the_kernels_that_are_not_compiled_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, compiled = threading.Event(), list[str]()
    steps = (lambda: compiled.append("first"), stop.set, lambda: compiled.append("last"))
    monkeypatch.setitem(warm_up.KERNELS, "auto", steps)
    assert not warm_up.compile_kernels("auto", stop=stop)
    assert compiled == ["first"]


@contextmanager
def stopped() -> Iterator[threading.Event]:
    """As ``interruptible`` after a first signal."""
    with interruptible() as stop:
        stop.set()
        yield stop


def test_no_plan_yet_is_one_line(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "interruptible", stopped)
    text = answered(*plan_arguments(files, "-o", files / "plan.json"), code=1)
    assert re.fullmatch(r"auto: interrupted after [^\n]+ came before any [^\n]+\n", text)
    document = answered_json(*plan_arguments(files), code=1)
    assert (document["status"], document["cost_seconds"]) == ("interrupted", None)
    assert not (files / "plan.json").exists()


def test_schedules_and_job_shops_are_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solving, "interruptible", stopped)
    (tmp_path / "ft06.txt").write_text(FT06)
    assert answered_json("jobshop", tmp_path / "ft06.txt", code=1)["status"] == "interrupted"
    assert "no answer (interrupted)" in answered("jobshop", tmp_path / "ft06.txt", code=1)
    arguments = ["schedule", "--stages", 5, "--microbatches", 24, "--times", "3,7;7,5;2,9;5,6;4,8"]
    document = answered_json(*arguments, "--transfer", 2, "--in-flight", "3,3,3,2,1")
    assert document["status"] == "interrupted"
    assert document["cost_seconds"] > document["bound_seconds"]


def test_handlers_are_put_back_and_threads_have_none() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with interruptible() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    found: list[bool] = []

    def elsewhere() -> None:
        with interruptible() as token:
            found.append(token.is_set())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]


def drawn(line: ProgressLine) -> str:
    recorder = Console(record=True, file=StringIO(), width=200)
    recorder.print(line)
    return recorder.export_text().strip()


def test_the_progress_line_ticks_and_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    now = console.BEGAN + 1.0
    monkeypatch.setattr(console, "monotonic", lambda: now)
    stop = threading.Event()
    line = ProgressLine("planning [x]", stop)
    assert drawn(line) == "planning [x]: 1 s"
    line.take(Progress(0.1, None, 0.125))
    assert drawn(line) == "planning [x]: 1 s, best none yet, bound 0.125"
    line.take(Progress(0.2, 0.25, 0.0))
    now += 119
    assert drawn(line) == "planning [x]: 120 s, best 0.25, bound 0.125, gap 50.00%"
    line.take(Progress(0.3, 0.5, 0.2))  # a search of its own, whose best is worse
    assert drawn(line) == "planning [x]: 120 s, best 0.25, bound 0.2, gap 20.00%"
    stop.set()
    assert "a second Ctrl-C" in drawn(line)
    line.take(Progress(0.4, 0.0, 0.0))
    assert "best 0, bound 0, gap 0.00%" in drawn(line)
