"""The planning service under ``kill -9``: what is lost.

``python -m benchmarks.service_faults`` kills the server, the processes of its jobs, or both at 100
random moments on SQLite, and on PostgreSQL where the distribution has it, while clients submit
plans. Afterwards every promise of ``docs/serving.md`` is held against what is stored
(`tests/shared/killed_service.py`). Writes its section of ``docs/benchmarks/service.md``.
"""

import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.service_report import put

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from killed_service import Accepted, Kills, require_free, require_kept, serving, submitting
from postgres import postgres_server

KILLS, CLIENTS, PAUSE = 100, 3, 6.0
LONGEST = 3.0  # seconds between two kills at most
TARGETS = ("server", "job", "both")
HEADING = "## Killed at random moments"
HEAD = """\
`python -m benchmarks.service_faults`: `kill -9` of the server, of the processes of its jobs, or of
both, each up to {longest:g} s after the last, while {clients} clients submit job shops and plans
(some with an idempotency key, sent again when an answer is lost), on {machine}; two workers, whose
lease is 4 s here. Lost: jobs that were accepted and have no end, or an end without answer or
reason; keys with two jobs; plans that `stagewright check` refuses or whose cost is not the stored
one; events out of order; processes that stay, or hold SQLite's file. Any of these ends the study.

| store | killed: server | jobs | both | submissions unanswered | accepted | optimal | feasible | \
failed | lost | children gone after, at most |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def killed(store: str, free: Callable[[], None], seed: int) -> tuple[Kills, Accepted, Counter[str]]:
    """Kills, what clients were told meanwhile, and how the jobs ended."""
    own, kills = random.Random(seed), Kills()
    with tempfile.TemporaryDirectory() as folder, serving(store, Path(folder)) as served:
        with submitting(served.url, CLIENTS, PAUSE, seed) as accepted:
            for number in range(KILLS):
                time.sleep(own.uniform(0.0, LONGEST))
                kills.one(served, own.choice(TARGETS), free)
                print(f"{number + 1} kills, {len(accepted.jobs)} jobs", file=sys.stderr)
        return kills, accepted, require_kept(served.url, accepted)


@contextmanager
def sqlite() -> Iterator[tuple[str, Callable[[], None]]]:
    """A store, and what raises if it is held or damaged."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.sqlite"
        yield str(path), lambda: require_free(path)
        require_free(path)


@contextmanager
def postgresql() -> Iterator[tuple[str, Callable[[], None]]]:
    """As `sqlite`."""
    with postgres_server() as server:
        yield server.new_database(), lambda: None


def row(name: str, kills: Kills, accepted: Accepted, states: Counter[str]) -> str:
    """A line of the table."""
    cells = [
        name,
        *(kills.counts[one] for one in TARGETS),
        accepted.unanswered,
        len(accepted.jobs),
        *(states[one] for one in ("optimal", "feasible", "failed")),
        len(accepted.jobs) - sum(states.values()),
        f"{max(kills.gone):.2f} s",
    ]
    return f"| {' | '.join(map(str, cells))} |\n"


def main() -> None:
    """Kill, check, and write the table."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    text = HEAD.format(longest=LONGEST, clients=CLIENTS, machine=machine)
    stores = {"SQLite": sqlite}
    if any(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        stores["PostgreSQL"] = postgresql
    for seed, (name, store) in enumerate(stores.items()):
        with store() as (url, free):
            text += row(name, *killed(url, free, seed))
    put(HEADING, text)


if __name__ == "__main__":
    main()
