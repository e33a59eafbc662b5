"""The planning service under load, in parts that are measured by their names.

``python -m benchmarks.service [accept] [turns] [watchers] [faults] [week]`` starts real servers on
SQLite and, where the distribution has it, PostgreSQL, and writes the section of each part (without
names: of all) in ``docs/benchmarks/service.md``.
"""

import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import sqlalchemy as sa

from benchmarks import service_faults, service_watchers, service_week
from benchmarks.service_report import (
    MACHINE,
    SHOP,
    Row,
    milliseconds,
    put,
    servers,
    stores,
    stub,
    table,
)
from stagewright.client import Client
from stagewright.service.http.tokens import Scope, Tokens
from stagewright.service.jobs.records import ENDED
from stagewright.service.jobs.rows import EVENTS, JOBS
from stagewright.service.jobs.store import opened

USERS, EACH = 100, 20  # users, and requests of each


# --- Acceptance ---------------------------------------------------------------------------------


def accept() -> None:
    """How long it takes to accept a request."""
    rows = list[Row]()
    for pause in (1.0, 0.0):
        with stores() as found:
            rows += [_accepted(name, store, pause) for name, store in found.items()]
    put(
        "# The planning service under load",
        f"""\
`python -m benchmarks.service` measures what follows, in parts that can be named.

`accept`: {USERS * EACH} different requests from {USERS} clients, threads of one process, on
{MACHINE}; no workers. Times are those that a client sees, with validation and storage.
*Paced*: a client submits once a second. *At once*: as soon as it is answered, so that {USERS}
requests are always waiting, and the time is that of {USERS} requests. CPU is that of the server for
a request.

{table(rows)}""",
    )


def _accepted(name: str, store: str, pause: float) -> Row:
    with servers(store, workers=0) as [served]:
        used = _cpu_seconds(served.pid)
        taken, seconds = submit_all(served.url, pause)
        used = _cpu_seconds(served.pid) - used
    with opened(store) as jobs:
        stored = sum(jobs.counts().values())
    cuts = statistics.quantiles(taken, n=100)
    times = {"median": cuts[49], "95 %": cuts[94], "99 %": cuts[98], "most": max(taken)}
    return {
        "store": name,
        "clients": "paced" if pause else "at once",
        "accepted/s": f"{len(taken) / seconds:.0f}",
        **{name: milliseconds(one) for name, one in times.items()},
        "CPU": milliseconds(used / stored),
        "stored": stored,
    }


def submit_all(url: str, pause: float) -> tuple[list[float], float]:
    """Seconds that each submission took to be accepted, and all together.

    A client submits every ``pause`` seconds, all of them in turn, but not before it is answered.
    """
    taken = list[float]()

    def submit(number: int) -> None:
        with httpx.Client(base_url=url, timeout=60.0, verify=False) as client:  # reads no files
            for n in range(EACH):
                due = began + pause * (n + number / USERS)
                time.sleep(max(0.0, due - time.perf_counter()))
                request = json.dumps(SHOP | {"seed": number * EACH + n, "time_limit": 10 + pause})
                start = time.perf_counter()
                client.post("/v1/jobshop", content=request).raise_for_status()
                taken.append(time.perf_counter() - start)

    with ThreadPoolExecutor(USERS) as pool:
        began = time.perf_counter()
        list(pool.map(submit, range(USERS)))
    return taken, time.perf_counter() - began


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- Turns --------------------------------------------------------------------------------------


def turns() -> None:
    """Whether equal users wait alike, and each job is answered once."""
    with stores() as found:
        rows = [{"store": name} | taken(store) for name, store in found.items()]
    put(
        "## Equal users",
        f"""\
`turns`: {USERS} users submit {EACH} job shops each, all at once, to two servers on one store, each
with eight workers; jobs take 0.1 to 3 s, the same in the same order for each user. They are
stubs without a search, as {USERS * EACH} searches would measure two cores and not the queue. Waits
are means of a user, from acceptance to the beginning. On {MACHINE}.

{table(rows)}""",
    )


def taken(store: str) -> Row:
    """What became of the jobs of all users, on an empty store."""
    lengths = [0.1 * 30.0 ** (n / (EACH - 1)) for n in range(EACH)]
    random.Random(0).shuffle(lengths)
    with opened(store) as jobs:
        tokens = [Tokens(jobs.engine).create(f"user{n}", Scope.SUBMIT) for n in range(USERS)]
    began = time.time()
    with servers(store, 2, workers=8, code=stub()) as both:

        def submit(user: int) -> None:
            with Client(both[user % 2].url, tokens[user]) as client:
                for n, seconds in enumerate(lengths):
                    request = SHOP | {"seed": user * EACH + n, "time_limit": seconds}
                    client.submit("jobshop", json.dumps(request))

        with ThreadPoolExecutor(USERS) as pool, opened(store) as jobs:
            list(pool.map(submit, range(USERS)))
            while any(count for state, count in jobs.counts().items() if state not in ENDED):
                time.sleep(1.0)
            with jobs.engine.connect() as database:
                columns = (JOBS.c.user, JOBS.c.created, JOBS.c.started, JOBS.c.state)
                known = database.execute(sa.select(*columns)).all()
                told = database.execute(sa.select(EVENTS.c.job, EVENTS.c.name)).all()
    begun = Counter(job for job, event in told if event == "solving")
    waits: dict[str, list[float]] = {}
    for user, created, started, _ in known:
        waits.setdefault(user, []).append(started - created)
    means = sorted(map(statistics.mean, waits.values()))
    return {
        "users": len(waits),
        "jobs": len(known),
        "seconds": f"{time.time() - began:.0f}",
        "lost": USERS * EACH - len(known),
        "twice": sum(count > 1 for count in begun.values()),
        "failed": sum(one.state == "failed" for one in known),
        "mean wait": f"{statistics.mean(means):.1f} s",
        "least": f"{means[0]:.1f} s",
        "greatest": f"{means[-1]:.1f} s",
        "greatest / least": f"{means[-1] / means[0]:.2f}",
    }


PARTS = {
    "accept": accept, "turns": turns, "watchers": service_watchers.main,
    "faults": service_faults.main, "week": service_week.main,
}  # fmt: skip

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
