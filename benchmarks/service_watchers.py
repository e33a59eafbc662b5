"""Thousands of streams of events on two servers: what they take, and how late an event is."""

import asyncio
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.service_report import MACHINE, SHOP, Row, milliseconds, put, servers, stores, table
from stagewright.client import Client
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import JobEnd, State
from stagewright.service.jobs.store import opened

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from processes import open_files, resident_bytes

WATCHERS, EVENTS = 2000, 20
PAUSE = 1.0  # seconds between events


async def _watch(url: str, job: str, seen: list[tuple[str, float]], open_: list[int]) -> None:
    """Read a stream to its end: the costs that it tells, and when."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode())
    open_[0] += 1
    while line := await reader.readline():
        if line.startswith(b"data:") and (cost := json.loads(line[5:]).get("cost")):
            seen.append((str(cost), time.time()))
        if line == b"0\r\n":  # the last chunk
            break
    writer.close()


async def _all(store: str, urls: list[str], pids: list[int]) -> Row:
    """Watch one job from both servers, while a worker tells of better answers."""
    with Client(urls[0]) as client, opened(store) as jobs:
        job = client.submit("jobshop", json.dumps(SHOP)).id
        queue, seen, open_ = Queue(jobs), list[tuple[str, float]](), [0]
        before = [resident_bytes(pid) for pid in pids]
        watching = [
            asyncio.create_task(_watch(urls[n % 2], job, seen, open_)) for n in range(WATCHERS)
        ]
        while open_[0] < WATCHERS:
            await asyncio.sleep(0.1)
        await asyncio.sleep(10.0)
        assert queue.claim("w", 600.0) is not None
        told = dict[str, float]()
        for number in range(EVENTS):
            cost = float(1000 - number)
            told[str(cost)] = time.time()
            await asyncio.to_thread(queue.improve, job, "w", cost, 1.0, None, None)
            await asyncio.sleep(PAUSE)
        memory = [(resident_bytes(pid) - old) / 1e3 for pid, old in zip(pids, before, strict=True)]
        files = [open_files(pid) for pid in pids]
        queue.finish(job, "w", JobEnd(State.OPTIMAL, answer="{}"))
        await asyncio.gather(*watching)
    late = [when - told[cost] for cost, when in seen if cost in told]
    last = [max(when for cost, when in seen if cost == one) - at for one, at in told.items()]
    cuts = statistics.quantiles(late, n=100)
    return {
        "events read": len(late),
        "missed": WATCHERS * EVENTS - len(late),
        "memory of a stream": f"{sum(memory) / WATCHERS:.1f} kB",
        "files of a server": max(files),
        "median": milliseconds(cuts[49]),
        "99 %": milliseconds(cuts[98]),
        "until all have it, median": milliseconds(statistics.median(last)),
    }


def main() -> None:
    """Measure, print and write the table."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = list[Row]()
    with stores() as found:
        for name, store in found.items():
            with servers(store, 2, workers=0) as both:
                pids = [one.pid for one in both]
                told = asyncio.run(_all(store, [one.url for one in both], pids))
                rows.append({"store": name} | told)
    put(
        "## Watchers",
        f"""\
`watchers`: {WATCHERS} streams of one job's events, half of them from each of two servers on one
store; {EVENTS} events, {PAUSE:g} s apart. Times are from before an event is written until a stream
has it; clients are one process on the same machine, {MACHINE}.

{table(rows)}""",
    )
