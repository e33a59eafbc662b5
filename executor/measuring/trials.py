"""Trials of layouts in a folder: launch files of each, what starts them, and what their logs say.

``FOLDER/LAYOUT/`` has the files of a short run and ``layout.json``. A launched run writes
``run.log`` and, once it has ended, ``exit.txt``. It goes on if the tuner is killed: it holds a lock
on ``run.lock`` until it ends.
"""

import contextlib
import fcntl
import hashlib
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stagewright.executor.export.layouts import export_layout
from stagewright.formulations.parallelism.document import layout_plan, load_layout
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.pipeline_time import Walk
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.parallelism.trials import Trial, Tuning, load_tuning
from stagewright.graphs.documents.documents import to_json, write_file
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.measured_runs import MeasuredIteration, read_outcome

DOCUMENT = "tuning.json"
LAYOUT, LOG, EXIT, LOCK = "layout.json", "run.log", "exit.txt", "run.lock"
_LONGEST = 80  # characters of a folder's name
_LOGS = ("*.log", "*.out", "*.err")


def write_trial(root: Path, tuning: Tuning, layout: Layout, walk: Walk) -> Path:
    """The folder of a layout's short run, which is written unless it is there."""
    folder = root / _name(layout)
    if (folder / LAYOUT).exists():
        return folder
    files = trial_files(tuning, layout, walk)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}") from None
    for name, text in files.items():
        write_file(root / name, text)
    return folder


def trial_files(tuning: Tuning, layout: Layout, walk: Walk) -> dict[str, str]:
    """The folder of a layout's short run: its launch files, and its document, which comes last."""
    files = export_layout(tuning.problem, layout, tuning.framework, short=True)
    plan = layout_plan(tuning.problem, evaluate(tuning.problem, layout, walk))
    files |= {LAYOUT: to_json(plan)}
    return {f"{_name(layout)}/{name}": text for name, text in files.items()}


def _name(layout: Layout) -> str:
    name = str(layout).replace(" ", "-")
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def folders(root: Path) -> dict[Path, Layout]:
    """The folders of trials with their layouts."""
    return {one.parent: load_layout(one).layout for one in sorted(root.glob(f"*/{LAYOUT}"))}


@contextlib.contextmanager
def changing(root: Path) -> Iterator[None]:
    """Keep other processes from changing the tuning in a folder while the body runs."""
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def current(root: Path) -> Tuning:
    """The tuning in a folder."""
    return load_tuning(root / DOCUMENT)


# --- What logs say -------------------------------------------------------------------------------


def trial_of(problem: TrainingProblem, layout: Layout, log: Path, place: str, ended: bool) -> Trial:
    """The trial that a log tells; InputError if it tells none."""
    found = read_outcome(log, ended)
    if not isinstance(found, MeasuredIteration):
        return Trial(layout, found, place)
    batch = found.batch or problem.batch
    if batch != problem.batch:
        raise InputError(f"{log}: its batch is {batch}, the tuning's {problem.batch}")
    seconds = found.seconds_of(problem.fabric.devices, problem.sequence, problem.batch)
    return Trial(layout, "measured", place, seconds, found.memory_bytes)


def trials_in(root: Path, problem: TrainingProblem) -> list[Trial]:
    """What the folders' logs tell; a run without an iteration counts once it has ended."""
    found = (trial_in(root, problem, *one) for one in folders(root).items())
    return [one for one in found if one is not None]


def trial_in(root: Path, problem: TrainingProblem, folder: Path, layout: Layout) -> Trial | None:
    """What the logs in the folder of a layout tell; None while it runs, or if that is nothing."""
    if is_running(folder):
        return None
    place = folder.relative_to(root).as_posix()
    ended, launched = (folder / EXIT).exists(), (folder / LOCK).exists()
    logs = [log for pattern in _LOGS for log in sorted(folder.rglob(pattern))]
    told = []
    for log in logs:
        with contextlib.suppress(InputError):
            told.append(trial_of(problem, layout, log, place, False))
    # One of several logs has the iterations, another perhaps the error of the same run.
    for outcome in ("out of memory", "measured", "crashed"):
        for one in told:
            # What was launched and has not come to its end was ended from outside.
            if one.outcome == outcome and (ended or outcome != "crashed" or not launched):
                return one
    return Trial(layout, "crashed", place) if ended else None


# --- Launching -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Running:
    """A launched run, whose process is None if another process has started it."""

    folder: Path
    layout: Layout
    process: "subprocess.Popen[bytes] | None"

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        if self.process is not None:
            return self.process.poll() is not None
        return not is_running(self.folder)

    def end(self) -> None:
        """Ask the run to end; what another process has started goes on."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()


def is_running(folder: Path) -> bool:
    """Whether a launched run of the folder has not ended."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def launch(command: str, folder: Path, layout: Layout) -> Running:
    """Start a run by a command of the shell, in which ``{script}`` and the like are filled in."""
    if is_running(folder):
        return Running(folder, layout, None)
    (folder / EXIT).unlink(missing_ok=True)
    is_batch = any(word.rpartition("/")[2] == "sbatch" for word in command.split())
    script = "job.sbatch" if is_batch else "run.sh"
    filled = command
    for name, value in {"script": script, "folder": folder.resolve(), "layout": layout}.items():
        filled = filled.replace(f"{{{name}}}", shlex.quote(str(value)))
    around = (
        f"( {filled}\n) > {LOG} 2>&1 < /dev/null\n"
        f"echo $? > .{EXIT} && mv .{EXIT} {EXIT}\n"
    )  # fmt: skip
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            ["bash", "-c", around], cwd=folder, start_new_session=True, pass_fds=[lock.fileno()]
        )
    return Running(folder, layout, process)
