"""Tables of stores: made, brought up to date, and refused where they are newer."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("alembic", reason="the service is not installed")

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, MetaData, create_engine, insert, select, text, update

from stagewright.graphs.documents.errors import InputError
from stagewright.service.http.tokens import Caller, Scope, Tokens, id_of
from stagewright.service.jobs import migrations
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import JobEnd, JobEnding, State
from stagewright.service.jobs.rows import TABLES, engine_of, writing
from stagewright.service.jobs.store import ServiceStore

# A store of the version before there were revisions, as it makes it: tables, jobs in three states.
BEFORE = Path(__file__).parent / "data"
TOKEN = "sw_of-ann"


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    found = create_engine(url)
    yield found
    found.dispose()


def make_before(engine: Engine) -> None:
    """The tables of the version before, with what it stored in them."""
    tables = (BEFORE / f"store-before-{engine.dialect.name}.sql").read_text()
    rows = (BEFORE / "store-before-rows.sql").read_text()
    with engine.begin() as database:
        for statement in filter(str.strip, f"{tables}{rows}".split(";\n")):
            database.exec_driver_sql(statement)


def revision(engine: Engine) -> str:
    with engine.connect() as database:
        return str(database.execute(text("SELECT version_num FROM alembic_version")).scalar_one())


def test_the_revisions_make_the_tables_of_the_code(url: str, engine: Engine) -> None:
    ServiceStore(url).close()
    with engine.connect() as database:
        context = MigrationContext.configure(database, opts={"compare_server_default": True})
        assert compare_metadata(context, TABLES) == []


def test_a_store_of_the_version_before_goes_on(url: str, engine: Engine) -> None:
    make_before(engine)
    store = ServiceStore(url)
    ended, running, waiting = (store.get(letter * 32) for letter in "abc")
    assert ended is not None
    assert (ended.state, ended.document, ended.cost) == (State.OPTIMAL, '{"plan": "ü"}', 2.5)
    assert (ended.title, ended.webhook) == ("", None)
    assert [job.id[0] for job in store.page("ann")] == ["c", "a"]
    assert [one.name for one in store.events(ended.id)] == ["queued", "solving", "optimal"]
    assert Tokens(store.engine).caller(TOKEN) == Caller("ann", Scope.SUBMIT, id_of(TOKEN))
    # The key, the answers that are known and the queue are those of before.
    assert store.submit("ann", "plan", '{"n":1}', key="once")[0].id == ended.id
    other, _ = store.submit("cid", "plan", '{"n":1}')
    assert (other.state, other.cached_from) == (State.QUEUED, None)  # it is an older version's
    store.ask(other.id, JobEnding.STOP)
    store.discard(other.id)
    new, _ = store.submit("ann", "plan", '{"n":4}', title="a model", webhook="https://x.example")
    assert (new.title, new.webhook) == ("a model", "https://x.example")
    assert store.events(new.id)[0].number == 10  # 7 was the last, of a job discarded
    queue = Queue(store)
    assert running is not None
    assert queue.expire() == 1
    claimed = [queue.claim("w", 60.0) for _ in range(3)]
    assert [job.id for job in claimed if job] == [waiting.id, running.id, new.id]
    queue.finish(new.id, "w", JobEnd(State.OPTIMAL, answer="{}"))
    store.close()
    assert revision(engine) == "0007"


def test_a_newer_store_is_refused_and_stays_as_it_is(url: str, engine: Engine) -> None:
    ServiceStore(url).close()
    with engine.begin() as database:
        database.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(InputError, match=r"revision 9999, this version knows 0007 at most") as told:
        ServiceStore(url)
    assert "\n" not in str(told.value)
    assert revision(engine) == "9999"


@pytest.mark.parametrize("before", [False, True])
def test_servers_that_start_at_once_make_the_tables_once(
    url: str, engine: Engine, before: bool
) -> None:
    if before:
        make_before(engine)
    code = (
        "import sys; from stagewright.service.jobs.store import ServiceStore; "
        "sys.stdin.readline(); print(len(ServiceStore(sys.argv[1]).page(None)))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for one in started:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    told = [one.communicate(timeout=120) for one in started]
    assert told == [("3\n" if before else "0\n", "")] * 3
    assert revision(engine) == "0007"


class OlderServer:
    """What a server of the revision before does in the tables that it knows, in turns."""

    def __init__(self, engine: Engine) -> None:
        known = MetaData()
        known.reflect(engine)
        self.engine, self.jobs = engine, known.tables["jobs"]
        self.accepted: list[str] = []
        self.answered: list[str] = []
        self.ends = threading.Event()

    def run(self) -> None:
        while not self.ends.is_set():
            self.submit(f"{len(self.accepted):032x}")
            if len(self.accepted) % 2:
                self.answer()

    def submit(self, job: str) -> None:
        given: dict[str, object] = {"id": job, "state": "queued", "created": len(self.accepted)}
        for column in self.jobs.columns:
            if not column.nullable and column.server_default is None:
                given.setdefault(column.name, 0 if column.type.python_type is int else "x")
        with writing(self.engine) as database:
            database.execute(insert(self.jobs).values(given))
        self.accepted.append(job)

    def answer(self) -> None:
        waiting = select(self.jobs).where(self.jobs.c.state == "queued").limit(1)
        with writing(self.engine) as database:
            row = database.execute(waiting.with_for_update(skip_locked=True)).one_or_none()
            if row is None:
                return
            held = update(self.jobs).where(self.jobs.c.id == row.id)
            database.execute(held.values(state="solving", worker="old", leased_until=9e9))
        with writing(self.engine) as database:
            mine = held.where(self.jobs.c.worker == "old", self.jobs.c.state == "solving")
            assert database.execute(mine.values(state="optimal", answer="{}")).rowcount == 1
        self.answered.append(row.id)


def test_an_older_server_works_on_beside_one_that_migrates(url: str) -> None:
    engine, config = engine_of(url), Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    head = ScriptDirectory.from_config(config).get_revision("head")
    with engine.begin() as database:
        config.attributes["connection"] = database
        command.upgrade(config, str(head.down_revision))
    older, answered = OlderServer(engine), list[str]()
    thread = threading.Thread(target=older.run)
    thread.start()
    while len(older.answered) < 5:
        assert thread.is_alive()
    store = ServiceStore(url)
    assert revision(engine) == head.revision
    queue, before = Queue(store), len(older.answered)
    while (job := queue.claim("new", 60.0)) or not older.ends.is_set():
        assert thread.is_alive() or older.ends.is_set()
        if job is not None:
            queue.finish(job.id, "new", JobEnd(State.OPTIMAL, answer="{}"))
            answered.append(job.id)
        if len(older.answered) > before + 5 and len(answered) > 5 and not older.ends.is_set():
            older.ends.set()
            thread.join()
    assert sorted([*older.answered, *answered]) == older.accepted
    assert store.counts()[State.OPTIMAL] == len(older.accepted)
    store.close()
    engine.dispose()
