"""The planning service under load: how long it takes to accept a request, and that none is lost.

``python -m benchmarks.service`` submits 1,000 different requests from 50 clients to a server in a
process of its own, on SQLite and (where the distribution has it) PostgreSQL, and lets eight workers
claim them all. Writes ``benchmarks/service.md``.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from stagewright.client import Client
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import Outcome, State
from stagewright.service.jobs.store import opened

SUBMISSIONS, CLIENTS, WORKERS = 1000, 50, 8
REPORT = Path(__file__).with_name("service.md")
HEAD = """\
# The planning service under load

`python -m benchmarks.service`: {submissions} requests from {clients} clients on {machine}; then
{workers} workers claim them all and answer at once. Times of acceptance are those that a client
sees, with validation and storage.

| store | accepted/s | median | 95 % | most | stored | claimed | claimed twice |
|---|---|---|---|---|---|---|---|
"""


@contextmanager
def served(store: str) -> Iterator[str]:
    """A server without workers; its address."""
    command = [sys.executable, "-m", "stagewright", "serve", "--port", "0", "--workers", "0",
               "--store", store]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        told = re.search(r"http://\S+", process.stdout.readline())
        assert told is not None
        try:
            yield told[0]
        finally:
            process.terminate()


def submit_all(url: str) -> tuple[list[float], float]:
    """Seconds that each submission took to be accepted, and all together."""
    numbers = iter(range(SUBMISSIONS))
    lock, taken = threading.Lock(), list[float]()

    def submit(_: int) -> None:
        with Client(url) as client:
            while True:
                with lock:
                    n = next(numbers, None)
                if n is None:
                    return
                request = json.dumps({"jobs": [[[0, 3], [1, 2]], [[1, 4], [0, 1]]], "seed": n})
                began = time.perf_counter()
                client.submit("jobshop", request, key=f"request {n}")
                taken.append(time.perf_counter() - began)

    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(submit, range(CLIENTS)))
    return taken, time.perf_counter() - began


def claim_all(store: str) -> list[str]:
    """The jobs that workers claimed, in threads with connections of their own."""
    claimed: list[str] = []

    def work(name: int) -> None:
        with opened(store) as jobs:
            queue = Queue(jobs)
            while (job := queue.claim(f"w{name}", 60.0)) is not None:
                claimed.append(job.id)
                queue.finish(job.id, f"w{name}", Outcome(State.OPTIMAL, answer="{}"))

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(WORKERS)))
    return claimed


def row(name: str, store: str) -> str:
    """A line of the table."""
    with served(store) as url:
        taken, seconds = submit_all(url)
    with opened(store) as jobs:
        stored = sum(jobs.counts().values())
    claimed = claim_all(store)
    ordered = sorted(taken)
    return (
        f"| {name} | {len(taken) / seconds:.0f} | {1e3 * statistics.median(ordered):.1f} ms | "
        f"{1e3 * ordered[int(0.95 * len(ordered))]:.1f} ms | {1e3 * ordered[-1]:.0f} ms | "
        f"{stored} | {len(claimed)} | {len(claimed) - len(set(claimed))} |"
    )


def main() -> None:
    """Measure, print and write the table."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    text = HEAD.format(submissions=SUBMISSIONS, clients=CLIENTS, workers=WORKERS, machine=machine)
    with tempfile.TemporaryDirectory() as folder:
        text += row("SQLite", f"sqlite:///{folder}/jobs.sqlite") + "\n"
    if any(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        from postgres import postgres_server

        with postgres_server() as server:
            text += row("PostgreSQL", server.new_database()) + "\n"
    REPORT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
