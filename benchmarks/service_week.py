"""A week of the planning service in minutes, with retention: what grows."""

import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import sqlalchemy as sa

from benchmarks.report import FIGURES
from benchmarks.service_report import MACHINE, SHOP, Row, put, servers, stores, stub, table
from stagewright.service.jobs.rows import JOBS
from stagewright.service.jobs.store import ServiceStore, opened

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from killed_service import Served
from processes import open_files, resident_bytes, threads

DAY_JOBS, USERS, MINUTES = 1000, 4, 4.0  # jobs of a day; a week takes so many minutes
KEEP_DAYS = 1.0


def faster() -> float:
    """How many times faster than the calendar's the days are."""
    return 7 * 24 * 60 / MINUTES


@dataclass(frozen=True)
class Sample:
    """What a server and its store take after so many days."""

    days: float
    memory: float
    files: int
    threads: int
    jobs: int
    store: float


@dataclass
class Week:
    """Users of a server, what they did, and what was measured."""

    served: Served
    store: ServiceStore
    samples: list[Sample] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.monotonic)

    def live(self) -> None:
        """Let the users work while samples are taken."""
        with ThreadPoolExecutor(USERS) as pool:
            users = [pool.submit(self.use, user) for user in range(USERS)]
            while self.days < 7.0:
                self.samples.append(self.sample())
                time.sleep(60.0 * MINUTES / 70)
            self.over.set()
        for one in users:
            one.result()
        self.samples.append(self.sample())

    @property
    def days(self) -> float:
        """How many have passed."""
        return (time.monotonic() - self.began) * faster() / 86400.0

    def use(self, user: int) -> None:
        """Submit, watch, stop, try again and discard until the week is over."""
        own = random.Random(user)
        pause = 86400.0 / faster() / DAY_JOBS * USERS
        with httpx.Client(base_url=self.served.url, timeout=60.0) as client:
            while not self.over.wait(own.uniform(0.0, 2 * pause)):
                request = SHOP | {"seed": own.randrange(10**9), "time_limit": 0.02}
                made = client.post("/v1/jobshop", content=json.dumps(request)).raise_for_status()
                self._follow(client, own, f"/v1/jobs/{made.json()['id']}")

    def _follow(self, client: httpx.Client, own: random.Random, at: str) -> None:
        self.done["submitted"] += 1
        drawn = own.random()
        if drawn < 0.1:
            self._did("stopped", client.delete(at))
        with client.stream("GET", f"{at}/events") as response:
            for _ in response.iter_lines():
                if drawn > 0.8:
                    self.done["streams left"] += 1
                    break
        if 0.2 < drawn < 0.3:
            self._did("tried again", client.post(f"{at}/retry"))
        elif drawn > 0.9:
            self._did("discarded", client.post(f"{at}/discard"))

    def _did(self, what: str, response: httpx.Response) -> None:
        if response.status_code not in (404, 409):  # it has ended already, or not yet
            response.raise_for_status()
            self.done[what] += 1

    def sample(self) -> Sample:
        """Measure now."""
        pid, engine = self.served.pid, self.store.engine
        with engine.connect() as database:
            jobs = database.execute(sa.select(sa.func.count()).select_from(JOBS)).scalar_one()
            if engine.dialect.name == "sqlite":
                path = Path(str(engine.url.database))
                size = sum(one.stat().st_size for one in path.parent.glob(f"{path.name}*"))
            else:
                asked = sa.text("SELECT pg_database_size(current_database())")
                size = database.execute(asked).scalar_one()
        memory = resident_bytes(pid) / 1e6
        return Sample(self.days, memory, open_files(pid), threads(pid), jobs, size / 1e6)


def lived(store: str) -> Week:
    """A week on a store."""
    keep = ("--keep-days", f"{KEEP_DAYS:g}")
    with servers(store, workers=4, code=stub(faster()), options=keep) as [served]:
        with opened(store) as jobs:
            week = Week(served, jobs)
            week.live()
        return week


def draw(weeks: dict[str, Week]) -> None:
    """Memory, store, files and threads over the days."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, sharex=True, figsize=(7, 7))
    for name, week in weeks.items():
        days = [one.days for one in week.samples]
        for axis, what in zip(axes, ("memory", "store", "files"), strict=True):
            axis.plot(days, [getattr(one, what) for one in week.samples], label=name)
    for axis, label in zip(axes, ("resident MB", "store, MB", "open files"), strict=True):
        axis.set_ylabel(label)
        axis.set_ylim(0, 1.2 * axis.get_ylim()[1])
        axis.legend(loc="lower right")
    axes[-1].set_xlabel("days")
    figure.savefig(FIGURES / "service_week.png", dpi=100)


def main() -> None:
    """Live a week on each store, and write what grew."""
    with stores() as found:
        weeks = {name: lived(store) for name, store in found.items()}
    rows = list[Row]()
    said = []
    for name, week in weeks.items():
        for one in week.samples[:: len(week.samples) // 7]:
            rows.append({
                "store": name, "day": f"{one.days:.1f}", "resident memory": f"{one.memory:.1f} MB",
                "open files": one.files, "threads": one.threads, "jobs kept": one.jobs,
                "size of the store": f"{one.store:.2f} MB",
            })  # fmt: skip
        late = [one for one in week.samples if one.days > 3.0]
        slopes = (
            statistics.linear_regression([one.days for one in late], [each(one) for one in late])
            for each in (lambda one: one.memory, lambda one: one.store)
        )
        memory, size = (1e3 * one.slope for one in slopes)
        did = ", ".join(f"{count} {what}" for what, count in sorted(week.done.items()))
        said.append(
            f"{name}: {did}; from day 3 on memory changes by {memory:.0f} kB a day, the store by "
            f"{size:.0f} kB."
        )
    draw(weeks)
    put(
        "## A week of load",
        f"""\
`week`: seven days in {MINUTES:g} minutes each, of about {DAY_JOBS} jobs a day of {USERS} clients,
which are deleted {KEEP_DAYS:g} day after their ends (`--keep-days`); days are that much shorter for
the server too, and jobs are stubs. On {MACHINE}.

{table(rows)}
{" ".join(said)}

![Memory, store and files over a week](figures/service_week.png)
""",
    )
