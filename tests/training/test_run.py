"""``stagewright run`` with real processes: results, checkpoints, and every way to end."""

import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from launches import TESTS, TIMEOUT_SECONDS, Job, until
from processes import pages_of, small_disk
from profiles import slow_after
from training_plans import gpipe, straight
from typer.testing import CliRunner

from stagewright.cli import app
from stagewright.formulations.plans.actions import parse_action
from stagewright.formulations.plans.plan import save_plan
from stagewright.graphs.documents.errors import InputError

pytest.importorskip("torch", reason="pip install 'stagewright[executor]'")

import torch

from stagewright.cli.factories import parse_optimizer
from stagewright.cli.training import running
from stagewright.executor.programs.periodic import lower_any
from stagewright.executor.programs.program import Instruction
from stagewright.executor.programs.verification.verify import verify
from stagewright.executor.training.data.batches import mini_batches
from stagewright.executor.training.interpreter.recorder import carry_out
from stagewright.executor.training.logs import StepReport
from stagewright.executor.training.ranks import launch
from stagewright.executor.training.ranks.endings import Member
from stagewright.executor.training.ranks.joining import Watch

NO_ANSWER = "rank {} does not answer (killed, stopped or unreachable?)"
LOST = "lost contact with another rank (killed, stuck or unreachable?)"


def require_equal(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    assert list(one) == list(other)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of five steps without mishap has written ``whole.pt``."""
    made = Job(tmp_path_factory.mktemp("job"))
    written = ("--json", "--save-parameters", "whole.pt", "--trace", "trace.json")
    out, complaints = made.run(*written, python=("-m", "stagewright"))
    assert complaints == []
    document = json.loads(out)
    assert document["status"] == "trained"
    keys = "status steps loss losses evaluations iteration_seconds seconds world_size"
    assert list(document) == keys.split()
    assert (document["steps"], document["world_size"], len(document["losses"])) == (5, 2, 5)
    assert document["loss"] == document["losses"][-1]
    assert 0 < document["iteration_seconds"] <= document["seconds"]
    return made


@pytest.fixture(scope="module")
def killed(job: Job) -> Path:
    """The folder of checkpoints of a run whose rank 1 was killed in step 4."""
    out, complaints = job.run(
        "--checkpoint", "killed", "--checkpoint-every", 2, code=1, MISHAP="kill 1 4"
    )
    assert out == ""
    # Rank 0 learns of it from its connection to rank 1, or from the launcher if that is quicker.
    cause = rf"({re.escape(LOST)}|{re.escape(NO_ANSWER.format(1))}|ended by SIGTERM)"
    assert re.fullmatch(rf"stagewright: rank 0: stopped at step [34]: {cause}", complaints[0])
    assert complaints[1:] == ["stagewright: rank 1: killed by SIGKILL"]
    folder = job.folder / "killed"
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    return folder


def test_everything_that_was_asked_for_is_written(job: Job) -> None:
    from jobs import model

    model().load_state_dict(job.parameters("whole.pt"))
    assert len(json.loads((job.folder / "trace.json").read_text())["steps"]) == 5


def test_a_killed_run_is_resumed_to_the_bit(job: Job, killed: Path) -> None:
    shutil.copytree(killed, job.folder / "again")
    damaged = shutil.copytree(killed / "step-00000002", job.folder / "again" / "step-00000003")
    with (damaged / "stagewright.json").open("a") as header:
        header.write(" ")
    out, complaints = job.run(
        *("--checkpoint", "again", "--checkpoint-every", 2, "--resume"),
        *("--save-parameters", "resumed.pt"),
    )
    assert complaints == [
        "stagewright: again/step-00000003 is damaged (stagewright.json does not match SHA256SUMS); "
        "resuming from step-00000002"
    ]
    assert re.search(r"^5 steps on 2 ranks, loss [\d.]+, .* per step\nresumed.pt is written$", out)
    require_equal(job.parameters("resumed.pt"), job.parameters("whole.pt"), 0.0)
    left = sorted(path.name for path in (job.folder / "again").iterdir())
    assert left == ["step-00000004", "step-00000005"]


@pytest.mark.slow
def test_steps_of_two_mini_batches_are_those_of_a_plain_loop(job: Job) -> None:
    """Also when a run is killed, and resumed by another plan."""
    import jobs

    options = ("--accumulate", 2, "--steps", 4, "--optimizer", "sgd:lr=0.1,momentum=0.9")
    folder = ("--checkpoint", "accumulated", "--checkpoint-every", 2)
    job.run(*options, *folder, code=1, MISHAP="kill 1 7")
    _, complaints = job.run(
        *("--checkpoint", "accumulated", "--resume", "--optimizer", "sgd"), code=2
    )
    assert complaints == [
        "stagewright: accumulated/step-00000002 is of a run with accumulate 2, this one has 1"
    ]
    resumed = ("--resume", "--save-parameters", "accumulated.pt", "--json")
    document = json.loads(job.run(*options, *folder, *resumed, plan="one.json")[0])

    torch.manual_seed(0)
    module = jobs.model().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    batches = list(islice(mini_batches(jobs.double_batches, 0), 8))
    for pair in zip(batches[::2], batches[1::2], strict=True):
        losses = [torch.nn.functional.cross_entropy(module(x), y) for x, y in pair]
        optimizer.zero_grad()
        for loss in losses:
            (loss / 2).backward()
        optimizer.step()
    assert len(document["losses"]) == 2
    assert document["loss"] == pytest.approx(sum(one.item() for one in losses) / 2, rel=1e-9)
    require_equal(job.parameters("accumulated.pt"), module.state_dict(), 1e-9)


def test_steps_are_logged_and_a_resumed_run_goes_on(job: Job) -> None:
    options = ("--lr-schedule", "linear", "--log", "steps.csv", "--checkpoint", "logged")
    job.run(*options, "--checkpoint-every", 2, code=1, MISHAP="kill 0 4")
    rows = read_log(job.folder / "steps.csv")
    assert [row["step"] for row in rows] in ([1, 2, 3], [1, 2])
    document = json.loads(job.run(*options, "--resume", "--json")[0])
    rows = read_log(job.folder / "steps.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in rows[2:]] == document["losses"]
    assert [row["learning_rate"] for row in rows] == pytest.approx(
        [0.01, 0.008, 0.006, 0.004, 0.002]
    )
    for row in rows:
        assert row["samples_per_second"] == pytest.approx(8 / row["seconds"])
        assert row["peak_bytes"] > 1e6


def test_what_is_held_out_is_evaluated(job: Job) -> None:
    import jobs

    options = ("--evaluate", "jobs:held_out", "--evaluate-every", 2, "--log", "evaluated.csv")
    out, told = job.run(*options, "--json", "--save-parameters", "evaluated.pt")
    document = json.loads(out)
    assert document["losses"] == json.loads(job.run("--json")[0])["losses"]
    require_equal(job.parameters("evaluated.pt"), job.parameters("whole.pt"), 0)
    found = {one["step"]: one["loss"] for one in document["evaluations"]}
    assert list(found) == [2, 4, 5]
    rows = read_log(job.folder / "evaluated.csv")
    assert {int(r["step"]): r["evaluation_loss"] for r in rows if "evaluation_loss" in r} == found
    assert [line for line in told if "evaluation loss" in line][-1].endswith(f"{found[5]:.6g}")
    module = jobs.model().double()
    module.load_state_dict(job.parameters("evaluated.pt"))
    inputs, targets = (torch.cat(parts) for parts in zip(*jobs.held_out(), strict=True))
    expected = torch.nn.functional.cross_entropy(module(inputs.double()), targets)
    assert found[5] == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize(
    ("held_out", "told"),
    slow_after(1, [
        ("jobs:nothing_held_out", "there is no mini-batch"),
        ("jobs:no_batches", "the data must be an iterable of mini-batches, got int"),
        ("jobs:wider_batches", "fails on inputs of shape"),
    ]),
)  # fmt: skip
def test_bad_data_that_are_held_out_are_told_before_the_first_step(
    job: Job, held_out: str, told: str
) -> None:
    _, complaints = job.run("--evaluate", held_out, code=2)
    assert any(told in line for line in complaints), complaints
    assert not any("step 1/" in line for line in complaints)


@pytest.mark.slow
def test_nothing_is_lost_by_an_evaluation_that_fails(job: Job) -> None:
    options = ("--evaluate", "jobs:ever_less_held_out", "--log", "failed.csv")
    saved = ("--checkpoint", "failed", "--save-parameters", "failed.pt")
    _, complaints = job.run(*options, *saved, code=2)
    assert any("fails on inputs of shape" in line for line in complaints), complaints
    assert [row["step"] for row in read_log(job.folder / "failed.csv")] == [1, 2, 3, 4, 5]
    require_equal(job.parameters("failed.pt"), job.parameters("whole.pt"), 0)
    assert (job.folder / "failed" / "step-00000005").is_dir()


def read_log(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [{key: float(text) for key, text in row.items() if text} for row in rows]


def test_tensorboard_gets_the_same_steps(job: Job) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = json.loads(job.run("--tensorboard", "board", "--json")[0])["losses"]
    read = EventAccumulator(str(job.folder / "board")).Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [
        (step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(losses, 1)
    ]


def test_tensorboard_is_refused_where_it_is_not_installed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagewright.executor.training.logs.find_spec", lambda name: None)
    require_refused("--tensorboard board", "board needs the package tensorboard: pip install")


def test_lines_of_progress_are_rare_where_stderr_is_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(running.time, "monotonic", lambda: now)
    report = running._progress(4)
    for step, seconds in enumerate((1, running.QUIET_SECONDS, 1, 1), 1):
        now += seconds
        report(StepReport(step, 0.5, 800.0, 0.01, 0.1, 1_500_000_000))
    assert capsys.readouterr().err == "step 2/4  loss 0.5  10 ms  800 samples/s  peak 1.5 GB\n"


@pytest.mark.slow
def test_groups_and_schedules_of_the_command_line_are_those_of_a_plain_loop(job: Job) -> None:
    """Also when a run is killed, and resumed by another plan."""
    import jobs

    options: list[object] = [
        "--parameter-group",
        "norm|bias:weight_decay=0",
        "--lr-schedule",
        "linear:warmup=1",
    ]
    options += ["--optimizer", "adamw:lr=0.1,weight_decay=0.5,eps=1e-3"]
    folder = ("--checkpoint", "scheduled", "--checkpoint-every", 2)
    job.run(*options, *folder, code=1, MISHAP="kill 1 4")
    _, complaints = job.run(
        *("--checkpoint", "scheduled", "--resume", "--optimizer", "adamw"), code=2
    )
    assert complaints == [
        "stagewright: scheduled/step-00000002 is of a run with schedule "
        "'linear:total=5,warmup=1,min=0', this one has 'none'"
    ]
    resumed = ("--resume", "--save-parameters", "scheduled.pt")
    job.run(*options, *folder, *resumed, plan="one.json")

    torch.manual_seed(0)
    module = jobs.model().double()
    named = [*module.named_parameters()]
    left = [one for name, one in named if not re.search("norm|bias", name)]
    rest = [one for name, one in named if re.search("norm|bias", name)]
    groups = [{"params": left}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5, eps=1e-3)
    for step, (inputs, targets) in enumerate(islice(mini_batches(jobs.double_batches, 0), 5)):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (0.5, 1, 0.75, 0.5, 0.25)[step]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    require_equal(job.parameters("scheduled.pt"), module.state_dict(), 1e-9)


@pytest.mark.slow
def test_a_killed_run_is_resumed_by_another_plan(job: Job, killed: Path) -> None:
    shutil.copytree(killed, job.folder / "other")
    job.run(
        *("--checkpoint", "other", "--resume", "--save-parameters", "other.pt"), plan="one.json"
    )
    require_equal(job.parameters("other.pt"), job.parameters("whole.pt"), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ("--module", "jobs:wider_model", "--checkpoint", "killed", "--resume"),
            "killed/step-00000002 is of another model: "
            "stem.weight is 6x6 of float64 there, 6x7 of float64 here",
        ),
        (("--data", "jobs:ragged_batches"), "7 samples"),
    ],
)
def test_what_only_ranks_can_refuse_is_refused_once(
    job: Job, killed: Path, options: tuple[str, ...], line: str
) -> None:
    out, complaints = job.run(*options, code=2)
    assert out == ""
    assert len(complaints) == 1
    assert complaints[0].startswith("stagewright: ")
    assert line in complaints[0]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_stage_and_microbatch(job: Job) -> None:
    _, complaints = job.run("--data", "jobs:infinite_batches", code=1)
    assert len(complaints) == 2
    failure = r".*microbatch 3 on stage 1\b"
    assert re.match(
        rf"stagewright: rank 0: stopped at step 3: rank 1 failed: {failure}", complaints[0]
    )
    assert re.match(rf"stagewright: rank 1: stopped at step 3: {failure}", complaints[1])


@pytest.mark.slow
def test_a_failure_is_told_by_every_rank_with_its_place(job: Job) -> None:
    _, complaints = job.run(plan="three.json", code=1, MISHAP="raise 2 2")
    place = rf"\({re.escape(str(TESTS / 'jobs.py'))}:\d+\)"
    for rank, line in enumerate(complaints):
        told = "2: " if rank == 2 else "[12]: rank 2 failed: "
        start = rf"stagewright: rank {rank}: stopped at step {told}"
        assert re.fullmatch(rf"{start}ValueError: no such sample {place}", line)
    assert len(complaints) == 3


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run(job: Job) -> None:
    _, complaints = job.run("--timeout", 6, code=1, MISHAP="sleep 0 2")
    place = r"kept the others waiting for [567] s at step 2, .*jobs\.py:\d+"
    for rank, (line, who) in enumerate(zip(complaints, ("it", "rank 0"), strict=True)):
        assert re.fullmatch(rf"stagewright: rank {rank}: stopped at step 2: {who} {place}", line)


@pytest.mark.parametrize(
    ("instruction", "told"),
    [
        ("1B3", "1B3 (stage 1, microbatch 3)"),
        ("0REDUCE_GRAD", "0REDUCE_GRAD (stage 0)"),
        ("12RUN", "12RUN (operator 12)"),
    ],
)
def test_an_instruction_that_hangs_is_named(instruction: str, told: str) -> None:
    """By another thread, with the line of the user's code; nothing where another is waited for."""
    watch = Watch(Member(0, 1, torch.device("cpu"), "at step 2"), since=time.monotonic() - 100)
    seen: list[str] = []

    def look() -> None:
        watch.look()
        watch.since -= 7
        watch.look()
        seen.append(watch.told())

    def hang() -> None:
        looking = threading.Thread(target=look)
        looking.start()
        while looking.is_alive():
            pass

    carry_out([(Instruction(parse_action(instruction)), hang)], None, str, 1)
    assert re.fullmatch(rf"7 s in {re.escape(told)} at step 2, .*test_run\.py:\d+", seen.pop())
    watch.look()
    assert watch.known == ("at step 2", "")


STOPPED = [
    f"stagewright: rank 0: stopped at step 3: {NO_ANSWER.format(1)}",
    "stagewright: rank 1: stopped at step 3: it did not answer the other ranks (was the process "
    "stopped?)",
]


def test_a_stopped_rank_is_named_and_ends_with_the_run(job: Job) -> None:
    """It tells its end itself: it has been continued, not killed after a while."""
    _, complaints = job.run("--timeout", 4, code=1, MISHAP="stop 1 3")
    assert complaints == STOPPED


@pytest.mark.slow
def test_a_stopped_rank_does_not_hold_up_torchrun(job: Job) -> None:
    """Which would wait half a minute for it, then kill it."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    python = (*torchrun, "-m", "stagewright")
    process = job.start("--timeout", 4, python=python, MISHAP="stop 1 3")
    _, complaints = process.communicate(timeout=60 + TIMEOUT_SECONDS)
    assert process.returncode == 1
    told = sorted(line for line in complaints.splitlines() if line.startswith("stagewright: "))
    assert told == STOPPED
    job.require_all_gone()


@pytest.mark.slow
def test_the_second_signal_ends_ranks_that_do_not_hear_the_first(job: Job) -> None:
    """One holds the interpreter, so that its handler does not run."""
    patient = (
        "-c",
        "from stagewright.executor.training.ranks import launch\n"
        "from stagewright.cli import main\n"
        "launch.SHUTDOWN_SECONDS = 1000\n"
        "main()",
    )
    process = job.start(python=patient, MISHAP="hold 0 2")
    until((job.folder / "held").exists)
    process.send_signal(signal.SIGINT)
    assert isinstance(process, subprocess.Popen)
    assert process.stderr is not None
    assert "rank 1: stopped at step" in process.stderr.readline()  # the first is heard
    job.await_end(1)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60 + TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert complaints == "stagewright: rank 0: killed, as it did not end at SIGINT\n"
    job.require_all_gone()


@pytest.mark.parametrize(
    ("number", "code", "told"),
    slow_after(1, [(signal.SIGINT, 130, "SIGINT"), (signal.SIGKILL, -9, "SIGTERM")]),
)
def test_ranks_end_with_their_launcher(job: Job, number: int, code: int, told: str) -> None:
    asleep = job.folder / "asleep"
    asleep.unlink(missing_ok=True)
    process = job.start(MISHAP="sleep 0 2")
    until(asleep.exists)  # rank 1 waits for rank 0 now, or will do so; it must end either way
    job.await_ranks(2)
    job.require_forks(process.pid)
    process.send_signal(number)
    _, complaints = process.communicate(timeout=60 + TIMEOUT_SECONDS)
    assert process.returncode == code
    job.require_all_gone()
    lines = sorted(complaints.splitlines())
    # A rank that misses the other one does not know whether its own SIGTERM is by that loss.
    cause = f"ended by {told}" + (f"|{re.escape(LOST)}" if told == "SIGTERM" else "")
    for rank, line in enumerate(lines):
        assert re.fullmatch(rf"stagewright: rank {rank}: stopped at step [12]: ({cause})", line)
    assert len(lines) == 2


@pytest.fixture
def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    return str(port)


@pytest.mark.parametrize(
    ("rank", "world", "code", "line"),
    slow_after(1, [
        ("0", "2", 1, "rank 0: stopped before the first step: 1 of 2 ranks came within 1 s, "
         "missing: 1"),
        ("0", "1", 2, "the plan needs 2 ranks (devices d0, d1), torchrun started 1"),
        ("1", "2", 1, "rank 1: stopped before the first step: cannot reach the job's store at "
         "localhost:PORT in 1 s; is rank 0 there?"),
    ]),
)  # fmt: skip
def test_ranks_that_others_started(
    job: Job, free_port: str, rank: str, world: str, code: int, line: str
) -> None:
    """As torchrun does, but not all of them."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port}
    _, complaints = job.run("--timeout", 1, code=code, RANK=rank, WORLD_SIZE=world, **where)
    assert complaints == [f"stagewright: {line.replace('PORT', free_port)}"]


# --- Full disks ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(job: Job) -> None:
    job.run("--checkpoint", "whole", "--steps", 1)
    half = pages_of(job.folder / "whole") // 2
    with small_disk(job.folder / "disk", 3 * half):
        _, complaints = job.run("--checkpoint", "disk/steps", "--checkpoint-every", 1, code=2)
        assert complaints == [
            "stagewright: disk/steps/step-00000002: the checkpoint cannot be written: No space "
            "left on device"
        ]
        assert [path.name for path in (job.folder / "disk/steps").iterdir()] == ["step-00000001"]
        shutil.copytree(job.folder / "disk" / "steps", job.folder / "moved")
    job.run("--checkpoint", "moved", "--resume", "--save-parameters", "moved.pt")
    require_equal(job.parameters("moved.pt"), job.parameters("whole.pt"), 0.0)


@pytest.mark.parametrize(
    ("option", "name", "what"),
    slow_after(1, [
        ("--save-parameters", "p.pt", "the parameters"), ("--trace", "t.json", "the trace"),
    ]),
)  # fmt: skip
def test_a_full_disk_leaves_no_half_of_a_result(
    job: Job, option: str, name: str, what: str
) -> None:
    with small_disk(job.folder / f"disk-{name}", 1):
        path = f"disk-{name}/{name}"
        _, complaints = job.run(option, path, code=2)
        assert complaints == [
            f"stagewright: {path}: {what} cannot be written: No space left on device"
        ]
        assert not any((job.folder / f"disk-{name}").iterdir())


# --- What the first process refuses, before it starts another one ------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan and another folder, where no ranks may be started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "may_fork", lambda: False)
    monkeypatch.setattr(launch.LocalRanks, "run", lambda _: pytest.fail("ranks were started"))
    save_plan(gpipe(straight([2, 2]), 4), tmp_path / "two.json")
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--optimizer adamm", "'adamm' is not known; one of adadelta, adafactor"),
        ("--optimizer lbfgs", "'lbfgs' is not known"),
        ("--optimizer sgd:rate=1", "sgd has no 'rate'; one of lr, momentum"),
        ("--optimizer sgd:lr", "write NAME:KEY=VALUE"),
        ("--optimizer sgd:lr=open(1)", "write NAME:KEY=VALUE"),
        ("--optimizer sgd:lr=-1", "Invalid learning rate"),
        ("--optimizer sgd:0.1", "write NAME:KEY=VALUE"),
        ("--parameter-group bias", "write REGEX:KEY=VALUE"),
        ("--parameter-group bias:lr", "write REGEX:KEY=VALUE"),
        ("--parameter-group bias:decay=0", "--parameter-group bias:decay=0: SGD"),
        ("--parameter-group bias:lr=-1", "--parameter-group bias:lr=-1: Invalid learning rate"),
        ("--parameter-group bias:lr=1 --parameter-group bias:momentum=0", "'bias' is given twice"),
        (
            "--lr-schedule cosin",
            "--lr-schedule: 'cosin' is not known; one of constant, linear, cosine",
        ),
        (
            "--lr-schedule cosine:warmup=3",
            "--lr-schedule: warmup must be from 0 to the total of 2 steps",
        ),
        ("--lr-schedule cosine:min=2", "--lr-schedule: min is a fraction of the learning rate"),
        ("--lr-schedule cosine:warmup=0.5", "warmup must be a number of steps"),
        ("--lr-schedule cosine:warm=1", "there is no 'warm'; one of warmup, min, total"),
        ("--lr-schedule cosine:1", "write KIND:KEY=VALUE"),
        ("--log steps.txt", "--log steps.txt: the name must end in .csv"),
        ("--log nowhere/steps.csv", "nowhere does not exist"),
        ("--accumulate 0", "--accumulate"),
        ("--accumulate 2 --trace t.json", "accumulate: most mini-batches have no update to trace"),
        ("--module jobs:nobody", "--module"),
        ("--data nowhere:batches", "--data"),
        ("--loss jobs:nobody", "--loss"),
        ("--steps 0", "--steps"),
        ("--timeout -1", "--timeout"),
        ("--timeout inf", "--timeout"),
        ("--clip-norm 0", "clip_norm must be a positive number, got 0"),
        ("--dtype int8", "--dtype"),
        ("--seed -1", "the seed must be from 0"),
        ("--checkpoint-every 2", "need --checkpoint"),
        ("--resume", "need --checkpoint"),
        ("--checkpoint nowhere/deep", "nowhere does not exist"),
        ("--checkpoint two.json", "--checkpoint would overwrite PLAN: both are two.json"),
        ("--checkpoint folder --resume", "no complete checkpoint in folder"),
        ("--save-parameters folder", "folder is a folder"),
        ("--trace nowhere/trace.json", "nowhere does not exist"),
        ("--graph", "graph captures the window of a plan that begins with the backwards"),
    ],
)
def test_bad_input_is_refused_in_one_line(here: Path, options: str, complaint: str) -> None:
    require_refused(options, complaint)


def test_the_launcher_lowers_and_verifies_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = {"periodic.lower_any": lower_any, "verification.verify.verify": verify}
    for place, function in real.items():
        monkeypatch.setattr(
            f"stagewright.executor.programs.{place}",
            lambda *args, f=function, p=place: (calls.append(p), f(*args))[1],
        )
    monkeypatch.setattr(launch.LocalRanks, "run", lambda _: 0)
    words = ["--module", "jobs:model", "--data", "jobs:batches", "--steps", "2"]
    assert CliRunner().invoke(app, ["run", "two.json", *words]).exit_code == 0
    assert sorted(calls) == sorted(real)


def require_refused(options: str, complaint: str) -> None:
    given = {"--module": "jobs:model", "--data": "jobs:batches", "--steps": "2"}
    words = options.split()
    for option, value in given.items():
        words += [] if option in words else [option, value]
    result = CliRunner().invoke(app, ["run", "two.json", *words])
    assert (result.exit_code, result.stdout) == (2, ""), result.exception
    assert re.fullmatch(r"stagewright: [^\n]+\n", result.stderr)
    assert complaint in result.stderr


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        (os.getpid, 0, ""),
        (partial(sys.exit, 2), 2, ""),
        (partial(os.kill, 0, signal.SIGKILL), 1, "stagewright: rank {}: killed by SIGKILL\n"),
    ],
)
def test_ranks_are_new_processes_where_a_fork_is_not_sound(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    body: Callable[[], object],
    code: int,
    told: str,
) -> None:
    monkeypatch.setattr(launch, "may_fork", lambda: False)
    with launch.LocalRanks(2, body) as ranks:
        assert ranks.run() == code
    said = capfd.readouterr().err
    assert said in {"".join(told.format(rank) for rank in some) for some in ((0, 1), (0,), (1,))}


def test_a_process_with_threads_is_not_forked() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    assert not launch.may_fork()
    go.set()
    thread.join()


def test_half_an_environment_of_a_rank_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    line = "RANK is set, but MASTER_ADDR is not; start with torchrun, or unset RANK"
    require_refused("", line)


def test_torch_must_be_there_in_a_version_that_is_known(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(launch, "version", missing)
    with pytest.raises(InputError, match=r"needs torch: pip install 'stagewright\[executor\]'$"):
        launch.require_torch()
    for unknown in ("2.12.1", "2.14.0", "3.13.0+cpu"):
        monkeypatch.setattr(launch, "version", lambda _, found=unknown: found)
        with pytest.raises(
            InputError, match=rf"needs torch>=2.13,<2.14, installed is {re.escape(unknown)}$"
        ):
            launch.require_torch()
    monkeypatch.setattr(launch, "version", lambda _: "2.13.1+cu130")
    launch.require_torch()


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_torch_that_is_broken_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(name: str) -> None:
        raise error(f"libtorch.so: cannot open\nshared {name} file")

    monkeypatch.setattr(launch, "import_module", broken)
    with pytest.raises(InputError, match=r"cannot be imported \(.*shared torch file\); install it"):
        launch.require_torch()


def test_the_help_page_needs_no_torch() -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom stagewright.cli import app\n"
        "result = CliRunner().invoke(app, ['run', '--help'])\n"
        "assert '--optimizer' in result.stdout, result.output\n"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    ("text", "kind", "settings"),
    [
        ("sgd", torch.optim.SGD, {}),
        ("sgd:lr=0.5,momentum=0.9,nesterov=True", torch.optim.SGD, {"lr": 0.5, "nesterov": True}),
        ("adamw:lr=1e-3,betas=(0.8,0.9)", torch.optim.AdamW, {"lr": 1e-3, "betas": (0.8, 0.9)}),
    ],
)
def test_optimizers_by_name(text: str, kind: type, settings: dict[str, Any]) -> None:
    made = parse_optimizer(text)([torch.nn.Parameter(torch.zeros(2))])
    assert type(made) is kind
    assert settings.items() <= made.param_groups[0].items()


def test_mini_batches_do_not_depend_on_what_others_draw() -> None:
    def passes() -> Iterator[torch.Tensor]:
        yield from torch.randperm(3)
        yield torch.rand(1)

    quiet = list(islice(mini_batches(passes, seed=1), 10))
    loud = []
    for batch in islice(mini_batches(passes, seed=1), 10):
        loud.append(batch)
        torch.manual_seed(len(loud))
    assert quiet == loud
    assert quiet[3] != quiet[7]  # every pass draws anew
    assert quiet != list(islice(mini_batches(passes, seed=2), 10))
    with pytest.raises(InputError, match="no mini-batch"):
        next(mini_batches(list, seed=0))
