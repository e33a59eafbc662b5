"""A day of the planning service in minutes: what grows.

``python -m benchmarks.service_day`` lets several users submit thousands of job shops to one server,
watch them by streams of which they leave some early, stop, retry and discard them, and measures
memory, files, threads and the store meanwhile. The processes of jobs are stubs, so that the server
itself is what works. Writes its section of ``docs/benchmarks/service.md``, and a picture.
"""

import json
import os
import platform
import random
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import httpx

from benchmarks.report import FIGURES
from benchmarks.service_report import put

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from killed_service import Served, serving
from processes import open_files, resident_bytes, threads

JOBS, USERS = 8000, 4
SAMPLES = 100
HEADING = "## A day of load"
# As the command, but a job is answered by a thread in place of a process.
STUB = """
import runpy, threading
from stagewright.service.http import server
from stagewright.service.jobs.records import Outcome, State
from stagewright.service.workers import worker

class Process:
    pid, exitcode = None, 0
    def __init__(self, target, args, daemon):
        self.connection = args[0]
    def start(self):
        connection = self.connection
        def answer():
            connection.send(worker.Better(2.0, 1.0, None))
            connection.send(Outcome(State.FEASIBLE, answer="{}", cost=2.0, bound=1.0))
        self.thread = threading.Thread(target=answer)
        self.thread.start()
        self.thread.join()
    def is_alive(self):
        return False
    def join(self):
        self.connection.close()

worker.multiprocessing.get_context("spawn").__class__.Process = Process
runpy.run_module("stagewright", run_name="__main__")
"""


@dataclass(frozen=True)
class Sample:
    """What a server takes after so many jobs."""

    jobs: int
    memory: float
    files: int
    threads: int
    store: int
    log: int


@dataclass
class Day:
    """Users of a server, what they did, and what was measured."""

    served: Served
    path: Path

    def __post_init__(self) -> None:
        self.samples: list[Sample] = []
        self.done: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._numbers = iter(range(JOBS))

    def use(self, user: int) -> None:
        """Submit, watch, stop, try again and discard until the day is over."""
        own = random.Random(user)
        with httpx.Client(base_url=self.served.url, timeout=60.0) as client:
            while (number := self._next()) is not None:
                self._one(client, own, number)

    def _next(self) -> int | None:
        with self._lock:
            number = next(self._numbers, None)
            if number is not None and number % (JOBS // SAMPLES) == 0:
                self.measure(number)
            return number

    def _one(self, client: httpx.Client, own: random.Random, number: int) -> None:
        text = json.dumps({"jobs": [[[0, 3], [1, 2]], [[1, 4], [0, 1]]], "seed": number})
        job = client.post("/v1/jobshop", content=text).raise_for_status().json()["id"]
        at = f"/v1/jobs/{job}"
        drawn = own.random()
        if drawn < 0.1:
            self._did("stopped", client.delete(at))
        self._watch(client, at, leave=drawn > 0.8)
        if 0.2 < drawn < 0.3:
            self._did("tried again", client.post(f"{at}/retry"))
        elif drawn > 0.7:
            self._did("discarded", client.post(f"{at}/discard"))

    def _watch(self, client: httpx.Client, at: str, leave: bool) -> None:
        with client.stream("GET", f"{at}/events") as response:
            for _ in response.iter_lines():
                if leave:
                    self.done["streams left"] += 1
                    return
        self.done["streams read to the end"] += 1

    def _did(self, what: str, response: httpx.Response) -> None:
        if response.status_code != 409:  # it has ended already, or not yet
            response.raise_for_status()
            self.done[what] += 1

    def measure(self, jobs: int) -> None:
        """Take a sample."""
        pid = self.served.pid
        log = self.path.with_name(self.path.name + "-wal")
        sizes = [one.stat().st_size if one.exists() else 0 for one in (self.path, log)]
        self.samples.append(
            Sample(jobs, resident_bytes(pid) / 1e6, open_files(pid), threads(pid), *sizes)
        )


@contextmanager
def stubbed(path: Path) -> Iterator[Served]:
    """A server whose jobs are answered by stubs."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("killed_service.SERVE", STUB),
        serving(str(path), Path(folder), workers=4) as served,
    ):
        yield served


def text_of(day: Day, seconds: float, rows: int) -> str:
    """The section: what was done, and a table of some samples."""
    did = ", ".join(f"{count} {what}" for what, count in sorted(day.done.items()))
    text = (
        f"`python -m benchmarks.service_day`: {JOBS} jobs of {USERS} clients in {seconds:.0f} s on "
        f"{platform.machine()}, {os.cpu_count()} cores, answered by stubs in the server; {did}. "
        f"{rows} jobs are stored at the end.\n\n"
        "| jobs submitted | resident memory | open files | threads | store | write-ahead log |\n"
        "|---|---|---|---|---|---|\n"
    )
    for one in day.samples[:: SAMPLES // 10]:
        text += (
            f"| {one.jobs} | {one.memory:.1f} MB | {one.files} | {one.threads} | "
            f"{one.store / 1e6:.2f} MB | {one.log / 1e6:.2f} MB |\n"
        )
    half = [one.memory for one in day.samples[SAMPLES // 2 :]]
    slope = statistics.linear_regression(range(len(half)), half).slope * SAMPLES / JOBS
    return text + (
        f"\nIn the second half memory grows by {1e6 * slope:.0f} bytes a job; the store by "
        f"{(day.samples[-1].store - day.samples[SAMPLES // 2].store) / (JOBS / 2):.0f}, as jobs "
        "stay until they are discarded.\n\n![Memory over a day](figures/service_day.png)\n"
    )


def draw(day: Day) -> None:
    """Memory and store over the jobs."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 5))
    jobs = [one.jobs for one in day.samples]
    above.plot(jobs, [one.memory for one in day.samples], label="resident memory")
    above.set_ylabel("MB")
    above.set_ylim(0, 1.2 * max(one.memory for one in day.samples))
    above.legend()
    below.plot(jobs, [one.files for one in day.samples], label="open files")
    below.plot(jobs, [one.threads for one in day.samples], label="threads")
    below.set_xlabel("jobs submitted")
    below.set_ylim(0)
    below.legend()
    figure.savefig(FIGURES / "service_day.png", dpi=100)


def main() -> None:
    """Live a day, and write what grew."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.sqlite"
        with stubbed(path) as served:
            day, began = Day(served, path), time.monotonic()
            with ThreadPoolExecutor(USERS) as pool:
                list(pool.map(day.use, range(USERS)))
            day.measure(JOBS)
            seconds = time.monotonic() - began
        with closing(sqlite3.connect(path)) as database:
            [(rows,)] = database.execute("SELECT count(*) FROM jobs")
    draw(day)
    put(HEADING, text_of(day, seconds, rows))


if __name__ == "__main__":
    main()
