"""Those who wait are woken by what happens to jobs, in any process, and bind nothing."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from planning_jobs import TWO_JOBS, long_request
from postgres import PostgreSQL
from processes import PATIENCE
from served import served

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from stagewright.client import Client
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import JobEnd, JobEnding, State
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.workers.worker import Worker

DONE = JobEnd(State.OPTIMAL, answer="{}")
MOST_CONNECTIONS, MOST_THREADS = 20, 60  # of a server


@pytest.fixture
def store(url: str) -> Iterator[ServiceStore]:
    found = ServiceStore(url)
    yield found
    found.close()


@pytest.fixture
def other(url: str) -> Iterator[ServiceStore]:
    """The store as another server has it."""
    found = ServiceStore(url)
    yield found
    found.close()


class Woken:
    """How often somebody was woken."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __call__(self) -> None:
        self.calls.put(None)

    def once(self) -> None:
        """Wait for a call."""
        self.calls.get(timeout=PATIENCE)

    def never(self) -> bool:
        """Whether there is none."""
        return self.calls.empty()


def test_who_waits_is_woken_by_what_it_waits_for(store: ServiceStore, other: ServiceStore) -> None:
    """By a transaction of its own process, and by that of another server."""
    mine, _ = store.submit("ann", "plan", '{"n":1}')
    theirs, _ = store.submit("ann", "plan", '{"n":2}')
    of_job, of_queue, of_wish, of_others = Woken(), Woken(), Woken(), Woken()
    with ExitStack() as waiting:
        subscribed = store.signals.subscribed
        waiting.enter_context(subscribed(of_job, job=mine.id))
        waiting.enter_context(subscribed(of_queue, name=State.QUEUED))
        waiting.enter_context(subscribed(of_wish, job=mine.id, name="asked"))
        waiting.enter_context(subscribed(of_others, job=theirs.id))
        for one in (of_job, of_queue, of_wish, of_others):
            one.once()  # events of before are not told: all who wait look once
        for writer in (store, other):
            writer.submit("bob", "plan", '{"n":3}')
            of_queue.once()
            assert of_job.never()
        claimed = Queue(other).claim("w", 60.0)
        assert claimed is not None
        of_job.once()
        other.ask(claimed.id, JobEnding.STOP)
        of_wish.once()
        of_job.once()
        assert of_job.never()
        assert of_others.never()
    store.ask(mine.id, JobEnding.ABORT)
    with store.signals.subscribed(of_others, job=theirs.id):
        store.ask(theirs.id, JobEnding.STOP)
        of_others.once()
    assert of_job.never()


@pytest.mark.slow
def test_who_waits_is_woken_after_a_restart_of_the_database(server: PostgreSQL) -> None:
    store = ServiceStore(server.new_database())
    woken = Woken()
    with store.signals.subscribed(woken, name=State.QUEUED):
        woken.once()
        server.restart()
        woken.once()  # what was written meanwhile was not told
        store.submit("ann", "plan", "{}")
        woken.once()
    store.close()


def test_workers_wait_for_jobs_and_wishes(store: ServiceStore, other: ServiceStore) -> None:
    """Without looking: they would look in an hour."""
    worker = Worker(store, lease_seconds=36000.0, look_seconds=3600.0, poll_seconds=0.05)
    thread = threading.Thread(target=worker.run)
    thread.start()

    def await_event(job: str, name: str) -> None:
        told = threading.Event()
        with other.signals.subscribed(told.set, job=job):
            while name not in [one.name for one in other.events(job)]:
                assert told.wait(PATIENCE)
                told.clear()

    await_event(other.submit("ann", "jobshop", TWO_JOBS)[0].id, State.OPTIMAL)
    long, _ = other.submit("ann", "plan", long_request())
    await_event(long.id, "progress")
    other.ask(long.id, JobEnding.ABORT)
    await_event(long.id, State.FAILED)
    worker.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()


# --- A server with many who wait ------------------------------------------------------------------


async def follow(url: str, job: str, begun: Callable[[], None]) -> list[str]:
    """The names of a job's events, read from the server until it ends the stream."""
    address = urlsplit(url)
    assert address.port is not None
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
    names = []
    async for line in reader:
        if line.startswith(b"event: "):
            names.append(line[7:].decode().strip())
            if len(names) == 1:
                begun()
        elif line == b"0\r\n":
            break
    writer.close()
    return names


def connections(process: int, store: ServiceStore) -> int:
    """How many a server has to its store, and in PostgreSQL those of ``store`` too."""
    if store.engine.dialect.name == "postgresql":
        asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        with store.engine.connect() as database:
            return int(database.exec_driver_sql(asked).scalar_one())
    links = (path.readlink() for path in Path(f"/proc/{process}/fd").iterdir())
    return [str(link) for link in links].count(str(store.engine.url.database))


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_who_wait_hinder_nobody(
    tmp_path: Path, url: str, store: ServiceStore, count: int
) -> None:
    """They follow one job on a server; another client's job is accepted, answered and told."""
    quiet, _ = store.submit("local", "plan", "{}")
    queue = Queue(store)
    assert queue.claim("w", 3600.0) is not None

    async def check(address: str, client: Client, process: int) -> None:
        waiting, all_wait = 0, asyncio.Event()

        def begun() -> None:
            nonlocal waiting
            waiting += 1
            if waiting == count:
                all_wait.set()

        followers = [asyncio.create_task(follow(address, quiet.id, begun)) for _ in range(count)]
        await asyncio.wait_for(all_wait.wait(), PATIENCE)
        await asyncio.to_thread(answer_another, client)
        assert not any(one.done() for one in followers)
        assert len(list(Path(f"/proc/{process}/task").iterdir())) <= MOST_THREADS
        assert 0 < connections(process, store) <= MOST_CONNECTIONS
        await asyncio.to_thread(queue.finish, quiet.id, "w", DONE)
        for told in await asyncio.wait_for(asyncio.gather(*followers), PATIENCE):
            assert told == ["queued", "solving", "optimal"]

    def answer_another(client: Client) -> None:
        job = client.submit("jobshop", TWO_JOBS)
        claimed = queue.claim("w", 60.0)
        assert claimed is not None
        assert claimed.id == job.id
        queue.finish(job.id, "w", DONE)
        assert [one.name for one in client.events(job.id)] == ["queued", "solving", "optimal"]

    running = served(tmp_path, "--workers", "0", "--store", url)
    with running as (address, process), Client(address) as client:
        asyncio.run(check(address, client, process.pid))
    assert process.returncode == 0
