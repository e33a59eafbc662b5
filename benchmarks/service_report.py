"""What the parts of the study of the service share: servers, their stores, and the page."""

import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.report import PAGES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from killed_service import Served, serving
from postgres import postgres_server

REPORT = PAGES / "service.md"
MACHINE = f"{platform.machine()}, {os.cpu_count()} cores"
SHOP = {"jobs": [[[0, 3], [1, 2]], [[1, 4], [0, 1]]]}
# The command; a job of the first kind is over after its time limit, without a process and a search,
# and days are as many times shorter as is told.
STUB = """
import json, runpy, time
from stagewright.service.http import server
from stagewright.service.jobs import upkeep
from stagewright.service.jobs.records import JobEnd, State
from stagewright.service.workers.processes import Look

class Stub:
    def __init__(self, kind, request):
        self.ends = time.monotonic() + json.loads(request)["time_limit"]
    def look(self, seconds):
        left = self.ends - time.monotonic()
        time.sleep(max(0.0, min(seconds, left)))
        end = JobEnd(State.FEASIBLE, answer="{}", cost=2.0, bound=1.0)
        return Look(end if left <= seconds else None, None, 0.0)
    def stop(self):
        self.ends = 0.0
    kill = stop

own = server.Worker
server.Worker = lambda *given, **named: own(*given, **named | {"start": Stub})
upkeep.DAY /= FASTER
upkeep.LOOK_SECONDS /= FASTER
runpy.run_module("stagewright", run_name="__main__")
"""


def stub(faster: float = 1.0) -> str:
    """Code of a server whose jobs are stubs, and whose days are so many times shorter."""
    return STUB.replace("FASTER", f"{faster!r}")


@contextmanager
def servers(store: str, count: int = 1, **how: object) -> Iterator[list[Served]]:
    """Servers on one store, each in a folder of its own."""
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(count)]
        yield [stack.enter_context(serving(store, Path(folder), **how)) for folder in folders]


@contextmanager
def stores() -> Iterator[dict[str, str]]:
    """An empty store of SQLite, and of PostgreSQL where the distribution has it, by name."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        found = {"SQLite": f"sqlite:///{folder}/jobs.sqlite"}
        if any(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
            found["PostgreSQL"] = stack.enter_context(postgres_server()).new_database()
        yield found


Row = dict[str, object]


def table(rows: Sequence[Row]) -> str:
    """A table of Markdown; each row has the same headings."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (rows[0], *(r.values() for r in rows))]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def milliseconds(seconds: float) -> str:
    """As cells have them."""
    return f"{1e3 * seconds:.1f} ms"


def put(heading: str, text: str) -> None:
    """Write the section of a heading anew, or add it at the end; and print it."""
    section = f"{heading}\n\n{text.strip()}\n"
    sections = re.split(r"(?m)^(?=#+ )", REPORT.read_text())
    kept = [one.strip() + "\n" for one in sections if one.strip()]
    places = [number for number, one in enumerate(kept) if one.startswith(f"{heading}\n")]
    if places:
        kept[places[0]] = section
    else:
        kept.append(section)
    REPORT.write_text("\n".join(kept))
    print(section)
