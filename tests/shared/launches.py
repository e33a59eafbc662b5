"""``stagewright run`` as processes of its own."""

import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from ranks import forked
from training_plans import gpipe, one_f_one_b, straight

from stagewright.formulations.plans.plan import save_plan

TIMEOUT_SECONDS = 30  # what a rank waits for another; nothing here may take that long


TESTS = Path(__file__).parent


class Command:
    """``python -m stagewright`` in a fork of a process that has imported it, and torch.

    Which is most of what a short command takes. As far as tests need it a ``subprocess.Popen``.
    """

    def __init__(self, words: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        (self._out, out), (self._err, err) = (multiprocessing.Pipe(duplex=False) for _ in "ab")
        self._process = forked(_command, words, folder, dict(environment), out, err)
        out.close()
        err.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it and its ranks print until the last of them has ended."""
        until = time.monotonic() + timeout
        with ThreadPoolExecutor(2) as readers:
            texts = [readers.submit(_read, one) for one in (self._out, self._err)]
            try:
                out, err = (text.result(until - time.monotonic()) for text in texts)
            except TimeoutError:
                self._process.kill()  # and with it the ranks, whose ends the readers await
                raise
        self._process.join()
        return out, err


def _read(pipe: Connection) -> str:
    with open(pipe.fileno(), encoding="utf-8", closefd=False) as file:
        return file.read()


def _command(
    words: list[str], folder: Path, environment: dict[str, str], out: Connection, err: Connection
) -> None:
    multiprocessing.current_process().daemon = False  # which could not start ranks
    for descriptor, pipe in enumerate((out, err), 1):
        os.dup2(pipe.fileno(), descriptor)
        pipe.close()
    # Those of the process that was forked know where in another file they are.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - until the end
    sys.stderr = open(2, "w", 1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [str(folder), str(TESTS)]
    sys.argv = ["stagewright", *words]
    runpy.run_module("stagewright", run_name="__main__", alter_sys=True)


class Job:
    """Plans, and the command line that trains by one of them in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        save_plan(one_f_one_b(straight([2, 2]), 4), folder / "two.json")
        save_plan(gpipe(straight([1, 1, 2]), 2), folder / "three.json")
        save_plan(gpipe(straight([4]), 2), folder / "one.json")

    def start(
        self,
        *options: object,
        plan: str = "two.json",
        python: tuple[str, ...] = (),
        **environment: str,
    ) -> Command | subprocess.Popen[str]:
        """Five steps in float64 with AdamW, unless ``options`` say otherwise.

        With ``python``, its arguments before those of the command, by a new Python.
        """
        pids = self.folder / "pids"
        shutil.rmtree(pids, ignore_errors=True)
        pids.mkdir()
        given = [str(option) for option in options]
        for option, value in {
            "--module": "jobs:model",
            "--data": "jobs:batches",
            "--steps": "5",
            "--dtype": "float64",
            "--optimizer": "adamw:lr=1e-2",
            "--timeout": str(TIMEOUT_SECONDS),
        }.items():
            given += [] if option in given else [option, value]
        words = ["run", plan, *given]
        places = [str(TESTS), os.environ.get("PYTHONPATH", "")]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
            "PIDS": str(pids),
            **environment,
        }
        if not python:
            return Command(words, self.folder, variables)
        return subprocess.Popen(
            [sys.executable, *python, *words],
            cwd=self.folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *options: object, code: int = 0, **start: Any) -> tuple[str, list[str]]:
        """Stdout, and the lines on stderr in order; no process is left. See `start`."""
        process = self.start(*options, **start)
        # Two seconds for imports may be twenty on a busy machine; then the ranks' own limit.
        out, complaints = process.communicate(timeout=60 + TIMEOUT_SECONDS)
        assert process.returncode == code, complaints
        self.require_all_gone()
        return out, sorted(complaints.splitlines())

    def await_ranks(self, count: int) -> None:
        """Until ``count`` ranks have begun with their data."""
        until(lambda: len(self._pids()) == count)

    def await_end(self, rank: int) -> None:
        """Until the process of ``rank`` is gone."""
        pid = int((self.folder / "pids" / str(rank)).read_text())
        until(lambda: not is_running(pid))

    def require_forks(self, launcher: int) -> None:
        """Unless each rank is a copy of the launcher, not a program of its own."""
        lines = {Path(f"/proc/{pid}/cmdline").read_bytes() for pid in [launcher, *self._pids()]}
        assert len(lines) == 1

    def require_all_gone(self) -> None:
        until(lambda: not any(map(is_running, self._pids())))

    def parameters(self, name: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / name)
        return found

    def _pids(self) -> list[int]:
        texts = [path.read_text() for path in (self.folder / "pids").iterdir()]
        return [int(text) for text in texts if text]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process is alive, and not merely unburied by whoever adopted it.

    A process whose first thread has ended is alive while others have not.
    """
    try:
        if len(os.listdir(f"/proc/{pid}/task")) > 1:
            return True
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return status not in "ZX"
