"""Outputs never overwrite inputs or each other, and are refused before the work."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from commands import FT06, answered, given_to, refused, run

from stagewright.cli.commands import fields_of
from stagewright.cli.pages import Commands
from stagewright.formulations.plans.plan import load_plan

EXPORT = "export plan.json --to torchrun --command true --per-server 6"
WITHOUT_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def plan_arguments(files: Path) -> list[object]:
    return ["plan", *given_to(files), "--microbatches", 4, "--planner", "gpipe"]


def test_every_path_of_a_command_is_known_as_read_or_written() -> None:
    """What a new command writes must be marked, or it is taken for an input."""
    commands = Commands()
    written = {
        (run.__name__, one.name)
        for run in map(commands.function, commands)
        for one in fields_of(run)
        if one.writes is not None
    }
    assert written == {
        ("plan", "output"), ("show", "html"), ("show", "png"), ("show", "trace"),
        ("import_", "output"), ("model", "output"), ("cluster", "output"),
        ("profile", "output"), ("profile_links", "output"), ("capture", "output"),
        ("schedule", "html"), ("schedule", "png"), ("schedule", "csv"),
        ("run", "checkpoint"), ("run", "save_model"), ("run", "save_parameters"), ("run", "trace"),
        ("run", "log"), ("run", "tensorboard"),
        ("sweep", "output"), ("sweep", "png"),
        ("train", "folder"), ("train", "save_parameters"),
        ("compare", "png"), ("compare", "corrected"), ("export", "output"),
        ("allocate", "output"), ("simulate_cluster", "png"),
        ("simulate_cluster", "completion_png"), ("simulate_cluster", "utilisation_png"),
        ("cloud", "png"), ("cloud", "save_prices"), ("estimate", "output"),
        ("price_jobs", "output"),
        ("run_cluster", "folder"), ("run_cluster", "output"),
        ("train_plan", "output"), ("train_plan", "png"), ("memory", "png"), ("jobs", "output"),
        ("rates", "png"), ("calibrate", "output"), ("anchor", "output"),
        ("rounds", "output"), ("tune", "output"), ("tune", "png"),
        ("backup", "file"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "both"),
    [
        ("show plan.json --png plan.json", ("--png", "PLAN")),
        ("show plan.json --trace ./plan.json", ("--trace", "PLAN")),
        ("show plan.json --trace linked.json", ("--trace", "PLAN")),
        ("show plan.json --trace hard.json", ("--trace", "PLAN")),
        ("show plan.json --png a --html a", ("--png", "--html")),
        ("show plan.json --png a --html folder/../a", ("--png", "--html")),
        ("show plan.json --png dangling --html absent", ("--png", "--html")),
        ("plan --model model.json --cluster cluster.json --microbatches 4 -o model.json",
         ("--output", "--model")),
        ("plan --model model.json --cluster cluster.json --microbatches 4 -o cluster.json",
         ("--output", "--cluster")),
        ("compare plan.json run.json --model model.json --corrected model.json",
         ("--corrected", "--model")),
        ("compare plan.json run.json --png run.json", ("--png", "TRACE")),
        ("run plan.json --module a:b --data a:b --steps 1 --trace a --save-parameters a",
         ("--trace", "--save-parameters")),
        ("run plan.json --module a:b --data a:b --steps 1 --trace plan.json", ("--trace", "PLAN")),
        ("export plan.json --to torch-csv -o plan.json", ("--output", "PLAN")),
        ("import plan.json --from pipedream -o plan.json", ("--output", "FILE")),
        ("allocate --jobs model.json --cluster cluster.json -o cluster.json",
         ("--output", "--cluster")),
        ("cloud plan.json --save-prices plan.json", ("--save-prices", "PRICES")),
        ("cloud plan.json model.json --png model.json", ("--png", "PRICES")),
        ("cluster --matrix model.json -o model.json", ("--output", "--matrix")),
        ("simulate-cluster --cluster v100=1 --jobs model.json --png a.png --completion-png a.png",
         ("--completion-png", "--png")),
    ],
)  # fmt: skip
def test_an_output_that_would_overwrite_is_refused(
    arguments: str, both: tuple[str, str], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    (files / "folder").mkdir()
    (files / "run.json").write_text("{}")
    (files / "linked.json").symlink_to("plan.json")
    (files / "dangling").symlink_to("absent")
    (files / "hard.json").hardlink_to(files / "plan.json")
    before = contents(files)
    line = refused(*arguments.split())
    assert all(option in line for option in both)
    assert line.split()[-1] in arguments
    assert contents(files) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show plan.json --png a.html", "must end in .png"),
        ("show plan.json --html a.png", "must end in .html"),
        ("show plan.json --trace a.png", "must end in .json"),
        ("plan --model model.json --cluster cluster.json --microbatches 4 -o plan.png",
         "must end in .json"),
        ("model vgg19 -o vgg19.yaml", "must end in .json"),
        (f"{EXPORT} -o plan.csv", "a name such as run.sh"),
        ("simulate-cluster --cluster v100=1 --jobs model.json --png a.json", ".svg"),
        ("show plan.json --png none/a.png", "none does not exist"),
        ("show plan.json --png folder", "is a folder"),
        (f"{EXPORT} -o none/run.sh", "none does not exist"),
        ("cloud plan.json --png folder", "is a folder"),
        (f"model vgg19 -o {'n' * 300}", "File name too long"),
    ],
)  # fmt: skip
def test_an_output_that_cannot_be_written_is_refused(
    arguments: str, message: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    (files / "folder").mkdir()
    before = contents(files)
    assert message in refused(*arguments.split())
    assert contents(files) == before


def test_an_output_without_permission_is_refused_before_the_work(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and asked(path, mode))
    (files / "old.json").write_text("{}")
    monkeypatch.delattr("stagewright.graphs.models.chain.load_model")  # where the work would begin
    assert "is not writable" in refused(*plan_arguments(files), "-o", files / "new.json")
    assert "no permission" in refused(*plan_arguments(files), "-o", files / "old.json")


@WITHOUT_ROOT
def test_a_file_that_is_read_only_stays(files: Path) -> None:
    (files / "old.json").write_text("{}")
    (files / "old.json").chmod(0o444)
    assert "no permission" in refused(*plan_arguments(files), "-o", files / "old.json")


def test_names_without_suffix_and_upper_case_ones_are_taken(files: Path) -> None:
    answered(*plan_arguments(files), "-o", files / "new")
    answered("show", files / "new", "--png", files / "NEW.PNG", "--trace", files / "trace")
    assert (files / "NEW.PNG").read_bytes().startswith(b"\x89PNG")


def test_dash_writes_the_document_alone_to_standard_output(
    files: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for dash in ("-", "/dev/stdout"):
        result = run(*plan_arguments(files), "-o", dash)
        assert (result.exit_code, result.stdout) == (0, "")
        assert "per iteration" in result.stderr
        (files / "new.json").write_text(capfd.readouterr().out)
        assert load_plan(files / "new.json").planner == "gpipe"
    monkeypatch.chdir(files)
    run(*EXPORT.split(), "-o", "-")
    assert "torchrun" in capfd.readouterr().out
    assert refused(*plan_arguments(files), "-o", "-", "--json").startswith("--output and --json")
    assert "both are" in refused("show", files / "plan.json", "--html", "-", "--trace", "-")


def test_nothing_goes_to_standard_output_without_a_plan(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run(*plan_arguments(files), "-o", "-", "--memory-limit", "1MB")
    assert (result.stdout, capfd.readouterr().out) == ("", "")
    assert result.exit_code in (1, 2)


@pytest.mark.real
def test_standard_output_that_is_a_file_is_added_to(tmp_path: Path) -> None:
    """A shell's >> must not be cut off, nor the file be replaced under its feet."""
    file = tmp_path / "all.json"
    file.write_text("before\n")
    command = [sys.executable, "-m", "stagewright", "cluster", "1x2", "--intra", "1GB/s", "-o"]
    with file.open("a") as opened:
        for name in ("-", str(file)):
            subprocess.run([*command, name], stdout=opened, check=True, capture_output=False)
    first, *documents = file.read_text().split('{\n "name"')
    assert (first, len(documents)) == ("before\n", 2)


def test_a_named_pipe_is_written(files: Path) -> None:
    os.mkfifo(files / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((files / "pipe").read_text()))
    reader.start()
    answered("show", files / "plan.json", "--trace", files / "pipe")
    reader.join()
    assert json.loads(read[0])["traceEvents"]


@pytest.mark.real
def test_output_that_nobody_can_take_is_one_line(files: Path) -> None:
    for arguments in (["show", files / "plan.json"], ["cluster", "1x2", "--intra", "1GB/s"]):
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "stagewright", *map(str, arguments)],
                stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
        assert ended.returncode == 2
        assert ended.stderr == (
            "stagewright: standard output cannot be written: No space left on device\n"
        )
    assert "No space left" in refused("show", files / "plan.json", "--trace", "/dev/full")


@pytest.mark.real
def test_names_that_the_terminal_cannot_show(files: Path) -> None:
    document = json.loads((files / "plan.json").read_text())
    (files / "plan.json").write_text(json.dumps(document | {"model": "réseau"}))
    shown = subprocess.run(
        [sys.executable, "-m", "stagewright", "show", str(files / "plan.json")],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert r"r\xe9seau" in shown.stdout
    (files / "ft06.txt").write_text(FT06)
    strange = files / os.fsdecode(b"caf\xe9")
    assert "No such file" in refused("show", strange)
