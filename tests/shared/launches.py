"""``stagewright run`` as processes of its own."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training_plans import gpipe, one_f_one_b, straight

from stagewright.formulations.plans.plan import save_plan

TIMEOUT_SECONDS = 30  # what a rank waits for another; nothing here may take that long


TESTS = Path(__file__).parent


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
        launcher: tuple[str, ...] = (),
        module: tuple[str, ...] = ("-m", "stagewright"),
        **environment: str,
    ) -> subprocess.Popen[str]:
        """Five steps in float64 with AdamW, unless ``options`` say otherwise.

        ``launcher`` and ``module`` are the arguments of Python before those of the command.
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
        places = [str(TESTS), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [sys.executable, *launcher, *module, "run", plan, *given],
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, places)),
                "PIDS": str(pids),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *options: object, code: int = 0, plan: str = "two.json", **environment: Any
    ) -> tuple[str, list[str]]:
        """Stdout, and the lines on stderr in order; no process is left."""
        process = self.start(*options, plan=plan, **environment)
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
