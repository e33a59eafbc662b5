"""The planning service, its clients while it is killed, and what must be true afterwards.

What must be true is taken from ``docs/serving.md``.
"""

import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from planning_jobs import long_request, plan_request
from processes import PATIENCE, descendants, holders, job_processes, seconds_until_gone

from stagewright.client import Client, JobState, ServiceError
from stagewright.graphs.documents.documents import to_json
from stagewright.service.pipelines.plans import check
from stagewright.service.pipelines.requests import CheckRequest, PlanRequest

# The command, with workers whose silence is noticed sooner than after 15 s.
SERVE = """
import functools, runpy
from stagewright.service.http import server
server.Worker = functools.partial(server.Worker, lease_seconds=4.0)
runpy.run_module("stagewright", run_name="__main__")
"""


@dataclass
class Served:
    """``stagewright serve`` on a store, always at the same port; ``code`` starts it."""

    store: str
    folder: Path
    workers: int = 2
    options: tuple[str, ...] = ()
    code: str = SERVE
    port: int = field(default_factory=lambda: free_port())
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start it, and wait until it serves."""
        given = ("--port", str(self.port), "--store", self.store, "--workers", str(self.workers))
        command = [sys.executable, "-c", self.code, "serve", *given, *self.options]
        self.process = subprocess.Popen(
            command, cwd=self.folder, text=True, stdout=subprocess.PIPE,
            stderr=(self.folder / "stderr").open("a"), env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert self.process.stdout is not None
        assert re.fullmatch(r"serving at http://\S+\n", self.process.stdout.readline())

    def kill(self) -> float:
        """Kill it; how many seconds later all that it started is gone too."""
        assert self.process is not None
        started = descendants(self.pid)
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return seconds_until_gone(started)

    def kill_jobs(self) -> int:
        """Kill the processes of its jobs; how many there were."""
        found = job_processes(self.pid)
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return len(found)

    def end(self, number: int = signal.SIGINT) -> None:
        """End it as its user would, or by another signal."""
        if self.process is None:
            return
        self.process.send_signal(number)
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None

    @property
    def errors(self) -> str:
        """What it wrote on stderr."""
        return (self.folder / "stderr").read_text()


@contextmanager
def serving(store: str, folder: Path, **how: object) -> Iterator[Served]:
    """A server that is ended at the end, however that comes."""
    served = Served(store, folder, **how)  # type: ignore[arg-type]
    served.start()
    try:
        yield served
    finally:
        served.end()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def request_of(random_: random.Random, small: bool) -> tuple[str, str]:
    """A request that nobody has made: small ones, and some that are searched for some seconds."""
    seed = random_.randrange(10**9)
    drawn = random_.uniform(0.0, 0.8 if small else 1.0)
    if drawn < 0.4:
        return "jobshop", json.dumps({"jobs": [[[0, 3], [1, 2]], [[1, 4], [0, 1]]], "seed": seed})
    if drawn < 0.8:
        return "plan", plan_request(seed=seed)
    return "plan", long_request(seed=seed, time_limit=random_.uniform(1.0, 4.0))


@dataclass
class Accepted:
    """What clients were told: the jobs that were accepted, and those of every key."""

    jobs: dict[str, str] = field(default_factory=dict)
    of_key: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    unanswered: int = 0
    small: bool = False

    def submit(self, urls: Sequence[str], random_: random.Random, done: threading.Event) -> None:
        """Submit until one of the servers accepts it.

        With a key even after it was accepted, as who lost the answer.
        """
        kind, request = request_of(random_, self.small)
        key = random_.choice([None, f"key {random_.randrange(10**12)}"])
        times = 1 if key is None else random_.choice([1, 2])
        while times and not done.is_set():
            try:
                with Client(random_.choice(urls)) as client:
                    found = client.submit(kind, request, key=key)
            except (httpx.HTTPError, ServiceError) as error:
                if isinstance(error, ServiceError) and error.status != 503:
                    raise
                self.unanswered += 1
                time.sleep(0.1)
                continue
            times -= 1
            self.jobs[found.id] = request
            if key is not None:
                self.of_key[key].add(found.id)


@contextmanager
def submitting(
    urls: Sequence[str], clients: int, pause: float, seed: int = 0, *, small: bool = False
) -> Iterator[Accepted]:
    """Clients that submit all the time, each after a pause of about so many seconds."""
    accepted, done = Accepted(small=small), threading.Event()

    def client(number: int) -> None:
        own = random.Random(f"{seed} {number}")
        while not done.wait(own.uniform(0, 2 * pause)):
            accepted.submit(urls, own, done)

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client, number) for number in range(clients)]
        try:
            yield accepted
        finally:
            done.set()
    for one in running:
        one.result()


@dataclass
class Kills:
    """Kills by what was killed, and the seconds until what a killed server started was gone."""

    counts: Counter[str] = field(default_factory=Counter)
    gone: list[float] = field(default_factory=list)

    def one(self, served: Served, what: str, free: Callable[[], None]) -> None:
        """Kill ``server``, ``job`` or ``both``; ``free`` raises if the database is still held."""
        self.counts[what] += 1
        if what != "server":
            served.kill_jobs()
        if what != "job":
            self.gone.append(served.kill())
            free()
            served.start()


def require_free(path: Path) -> None:
    """No process has a database of SQLite open, and it is whole."""
    assert not holders(path), holders(path)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def require_kept(url: str, accepted: Accepted) -> Counter[str]:
    """Wait until all jobs have ended, and check what was promised; how many ended how."""
    assert all(len(ids) == 1 for ids in accepted.of_key.values()), "a key has several jobs"
    states: Counter[str] = Counter()
    with Client(url) as client:
        for job, request in accepted.jobs.items():
            found = client.wait(job, 5 * PATIENCE)
            states[found.state] += 1
            require_told(client, found, request)
        require_listed(url, set(accepted.jobs))
    return states


def require_told(client: Client, job: JobState, request: str) -> None:
    """A job that has ended has an answer or a reason, its events in order, and a valid plan."""
    numbers = [one.number for one in client.events(job.id)]
    names = [one.name for one in client.events(job.id)]
    assert numbers == sorted(set(numbers)), numbers
    assert (names[0], names[-1]) == ("queued", job.state), names
    assert job.state != "failed" or job.reason, job
    assert job.state != "feasible" or job.has_document, job
    if job.state == "optimal":
        client.answer(job.id)
    if job.has_document:
        require_valid(client, job, request)


def require_valid(client: Client, job: JobState, request: str) -> None:
    """The independent checker finds nothing wrong, and the cost is that of the plan."""
    asked, plan = PlanRequest.parse(request), client.document(job.id)
    found = check(CheckRequest(chain=asked.chain, cluster=asked.cluster, plan=plan))
    assert found.status == "valid", found.violations
    assert found.cost_seconds is not None
    assert job.cost is not None
    assert abs(found.cost_seconds - job.cost) <= 1e-9 * job.cost, (found.cost_seconds, job.cost)
    assert json.loads(to_json(plan))["certificate"]["cost_seconds"] == job.cost


def require_listed(url: str, accepted: set[str]) -> None:
    """No accepted job is missing from the list, page by page."""
    listed, before = set[str](), None
    while True:
        given = {"limit": 100} | ({} if before is None else {"before": before})
        page = httpx.get(f"{url}/v1/jobs", params=given, timeout=30).raise_for_status().json()
        listed |= {one["id"] for one in page["jobs"]}
        before = page["next"]
        if before is None:
            break
    assert accepted <= listed
