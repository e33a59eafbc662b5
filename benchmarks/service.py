"""The planning service under load: how long it takes to accept a request, and that none is lost.

``python -m benchmarks.service`` submits 1,000 different requests from 50 clients to a server in a
process of its own, on SQLite and (where the distribution has it) PostgreSQL: each client one a
second, then as fast as it can. Eight workers claim them all. Writes ``docs/benchmarks/service.md``.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.service_report import put
from stagewright.client import Client
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import JobEnd, State
from stagewright.service.jobs.store import opened

CLIENTS, WORKERS = 50, 8
EACH = 20  # submissions of a client
SHOP = {"jobs": [[[0, 3], [1, 2]], [[1, 4], [0, 1]]]}
HEADING = "# The planning service under load"
HEAD = """\
`python -m benchmarks.service`: {submissions} requests from {clients} clients on {machine}; then
{workers} workers claim them all and answer at once. Times of acceptance are those that a client
sees, with validation and storage; clients are threads of one process on the same machine. *Paced*:
every client submits once a second. *At once*: every client submits as soon as it is answered, so
that {clients} requests are always waiting; the time is then that of {clients} requests. CPU is that
of the server for each request, load the processes that ran before the row began, which was
measured at nice {nice}.

| store | clients | load | accepted/s | median | 95 % | most | CPU | stored | claimed | twice |
|---|---|---|---|---|---|---|---|---|---|---|
"""


@contextmanager
def served(store: str) -> Iterator[tuple[str, int]]:
    """A server without workers: its address and process."""
    command = [sys.executable, "-m", "stagewright", "serve", "--port", "0", "--workers", "0",
               "--store", store]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        told = re.search(r"http://\S+", process.stdout.readline())
        assert told is not None
        try:
            yield told[0], process.pid
        finally:
            process.terminate()


def submit_all(url: str, pause: float) -> tuple[list[float], float]:
    """Seconds that each submission took to be accepted, and all together.

    A client submits every ``pause`` seconds, all of them in turn, but not before it is answered.
    """
    taken = list[float]()

    def submit(number: int) -> None:
        client = clients[number]
        for n in range(EACH):
            due = began + pause * (n + number / CLIENTS)
            time.sleep(max(0.0, due - time.perf_counter()))
            name = f"{number} {n} {pause:g}"
            request = json.dumps(SHOP | {"seed": number * EACH + n, "time_limit": 10 + pause})
            start = time.perf_counter()
            client.submit("jobshop", request, key=name)
            taken.append(time.perf_counter() - start)

    with ExitStack() as stack, ThreadPoolExecutor(CLIENTS) as pool:
        clients = [stack.enter_context(Client(url)) for _ in range(CLIENTS)]
        began = time.perf_counter()
        list(pool.map(submit, range(CLIENTS)))
        return taken, time.perf_counter() - began


def cpu_seconds(process: int) -> float:
    """What a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def claim_all(store: str) -> list[str]:
    """The jobs that workers claimed, in threads with connections of their own."""
    claimed: list[str] = []

    def work(name: int) -> None:
        with opened(store) as jobs:
            queue = Queue(jobs)
            while (job := queue.claim(f"w{name}", 60.0)) is not None:
                claimed.append(job.id)
                queue.finish(job.id, f"w{name}", JobEnd(State.OPTIMAL, answer="{}"))

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(WORKERS)))
    return claimed


def row(name: str, store: str, pause: float) -> str:
    """A line of the table."""
    load = os.getloadavg()[0]
    with served(store) as (url, process):
        used = cpu_seconds(process)
        taken, seconds = submit_all(url, pause)
        used = cpu_seconds(process) - used
    with opened(store) as jobs:
        stored = sum(jobs.counts().values())
    claimed = claim_all(store)
    ordered = sorted(taken)
    cells = (
        name, "paced" if pause else "at once", f"{load:.1f}", f"{len(taken) / seconds:.0f}",
        f"{1e3 * statistics.median(ordered):.1f} ms",
        f"{1e3 * ordered[int(0.95 * len(ordered))]:.1f} ms", f"{1e3 * ordered[-1]:.0f} ms",
        f"{1e3 * used / stored:.1f} ms", stored, len(claimed), len(claimed) - len(set(claimed)),
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |\n"


def main() -> None:
    """Measure, print and write the table."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    text = HEAD.format(
        submissions=CLIENTS * EACH,
        clients=CLIENTS,
        workers=WORKERS,
        machine=machine,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
    )
    with tempfile.TemporaryDirectory() as folder:
        for pause in (1.0, 0.0):
            text += row("SQLite", f"sqlite:///{folder}/jobs{pause:g}.sqlite", pause)
    if any(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        from postgres import postgres_server

        with postgres_server() as server:
            for pause in (1.0, 0.0):
                text += row("PostgreSQL", server.new_database(), pause)
    put(HEADING, text)


if __name__ == "__main__":
    main()
