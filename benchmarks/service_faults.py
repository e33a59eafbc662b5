"""The planning service under rolling restarts and ``kill -9``: what is lost.

Afterwards every promise of ``docs/serving.md`` is held against what is stored
(`tests/shared/killed_service.py`); what does not hold ends the study.
"""

import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from benchmarks.service_report import MACHINE, Row, put, servers, stores, table
from stagewright.service.jobs.rows import EVENTS, JOBS
from stagewright.service.jobs.store import opened

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from killed_service import Accepted, Kills, Served, require_free, require_kept, submitting

KILLS, RESTARTS, CLIENTS, PAUSE = 100, 20, 2, 8.0
LONGEST = 3.0  # seconds between two faults at most
TARGETS = ("server", "job", "both")


def restarted(both: list[Served], own: random.Random, free: Callable[[], None]) -> Kills:
    """End one server after the other as an orchestrator does, and start it again."""
    kills = Kills()
    for number in range(RESTARTS):
        time.sleep(own.uniform(0.0, LONGEST))
        served = both[number % len(both)]
        served.end(signal.SIGTERM)
        served.start()
        kills.counts["restart"] += 1
        print(f"{number + 1} restarts", file=sys.stderr)
    return kills


def killed(both: list[Served], own: random.Random, free: Callable[[], None]) -> Kills:
    """Kill servers, the processes of their jobs, or both of one, at random moments."""
    kills = Kills()
    for number in range(KILLS):
        time.sleep(own.uniform(0.0, LONGEST))
        kills.one(own.choice(both), own.choice(TARGETS), free)
        print(f"{number + 1} kills", file=sys.stderr)
    return kills


def faulty(store: str, fault: Callable[..., Kills], count: int) -> Row:
    """What became of jobs while so many servers on a store had faults."""
    path = Path(store.removeprefix("sqlite:///"))
    is_file = store.startswith("sqlite:")

    def free() -> None:
        if is_file and count == 1:
            require_free(path)

    with servers(store, count) as both:
        urls = [one.url for one in both]
        with submitting(urls, CLIENTS, PAUSE, count) as accepted:
            kills = fault(both, random.Random(count), free)
        states = require_kept(urls[0], accepted)
    if is_file:
        require_free(path)
    lost, twice, cut = _counted(store, accepted, states)
    return {
        "servers": count,
        "restarts": kills.counts["restart"],
        **{f"killed: {one}": kills.counts[one] for one in TARGETS},
        "unanswered": accepted.unanswered,
        "accepted": len(accepted.jobs),
        **{one: states[one] for one in ("optimal", "feasible", "failed")},
        "lost": lost,
        "twice": twice,
        "cut short": cut,
        "children gone after, at most": f"{max(kills.gone, default=0.0):.2f} s",
    }


def _counted(store: str, accepted: Accepted, states: Counter[str]) -> tuple[int, int, int]:
    """How many jobs are lost, ended twice, or were cut short by a fault."""
    with opened(store) as jobs, jobs.engine.connect() as database:
        ends = sa.select(EVENTS.c.job).where(EVENTS.c.name.in_(states))
        ended = Counter(database.execute(ends).scalars())
        cut = sa.select(sa.func.count()).where(
            JOBS.c.state == "feasible", JOBS.c.stopped_by.in_(("lost", "user"))
        )
        truncated = database.execute(cut).scalar_one()
    lost = len(accepted.jobs) - sum(states.values())
    return lost, sum(count > 1 for count in ended.values()), truncated


def main() -> None:
    """Restart, kill, check, and write the table."""
    rows = list[Row]()
    for fault in (restarted, killed):
        with stores() as found:
            for name, store in found.items():
                rows.append({"store": name} | faulty(store, fault, 1 if name == "SQLite" else 2))
    put(
        "## Restarted, and killed at random moments",
        f"""\
`faults`: rolling restarts (SIGTERM, with the usual time for jobs to end), then `kill -9` of a
server, of the processes of its jobs, or of both, each up to {LONGEST:g} s after the last, while
{CLIENTS} clients submit job shops and plans to any of the servers (some with an idempotency key,
sent again when an answer is lost), on {MACHINE}; two workers for each server, whose lease is 4 s
here. Lost: jobs that were accepted and have no end, or an end without answer or reason; keys with
two jobs; plans that `stagewright check` refuses or whose cost is not the stored one; events out of
order; processes that stay, or hold SQLite's file. Any of these ends the study. Twice: jobs with two
ends. Cut short: feasible because of a fault. A job fails whose process was killed three times.

{table(rows)}""",
    )
