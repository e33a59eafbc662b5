"""Leases, epochs and commits, without Ray: ranks are generators, and time is made up."""

import itertools
import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.executor.clusters import lease_server
from stagewright.executor.clusters.job_store import JobStore
from stagewright.executor.clusters.lease_server import KEPT, START_SECONDS, LeaseServer
from stagewright.executor.clusters.leases import JobLeaseLostError, Lease, LeaseIterator
from stagewright.graphs.documents.errors import InputError

ROUND = 10.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that pass only when a test says so."""
    clock = SimpleNamespace(now=1000.0)
    ticking = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(lease_server, "time", ticking)
    return clock


def opened(folder: Path, retries: int = 3, **steps: int) -> LeaseServer:
    server = LeaseServer(folder, ROUND, retries)
    server.open(steps)
    server.begin_round()
    return server


def started(server: LeaseServer, job: str = "a", ranks: int = 1) -> list[Lease]:
    record, folder = server.start(job, ranks)
    checkpoint = None if record.checkpoint is None else Path(record.checkpoint)
    return [
        Lease(
            job,
            record.epoch,
            rank,
            ranks,
            "v100",
            record.steps,
            record.committed,
            checkpoint,
            folder,
            server,
        )
        for rank in range(ranks)
    ]


class Rank:
    """A program whose checkpoint is the list of the batches that it has seen."""

    def __init__(self, lease: Lease, loader: Iterable[int] = range(7)) -> None:
        self.lease = lease
        self.seen: list[int] = []
        self.iterator = LeaseIterator(loader, self.load, self.save, lease)
        self.batches = iter(self.iterator)

    def load(self, folder: Path) -> None:
        self.seen = json.loads((folder / f"{self.lease.rank}.json").read_text())

    def save(self, folder: Path) -> None:
        (folder / f"{self.lease.rank}.json").write_text(json.dumps(self.seen))

    def advance(self) -> bool:
        """One more step; False at the end of the lease."""
        batch = next(self.batches, None)
        if batch is not None:
            self.seen.append(batch)
        return batch is not None

    def run(self, clock: SimpleNamespace, seconds: float) -> int:
        """All steps of the lease, each as long as said; how many there were."""
        return sum(self._take(clock, seconds) for _ in itertools.takewhile(bool, self._steps()))

    def _steps(self) -> Iterator[bool]:
        while True:
            yield self.advance()

    def _take(self, clock: SimpleNamespace, seconds: float) -> int:
        clock.now += seconds
        return 1


def test_a_job_that_has_the_cluster_to_itself_is_done_in_one_lease(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    server = opened(tmp_path, a=20)
    rank = Rank(started(server)[0])
    assert rank.run(clock, 0.1) == 20
    assert rank.iterator.done
    record = server.store.job("a")
    assert (record.state, record.committed) == ("done", 20)
    assert rank.seen == [step % 7 for step in range(20)]


@pytest.mark.parametrize("is_renewed", [False, True])
def test_a_stopped_server_ends_leases_after_the_steps_granted(
    tmp_path: Path, clock: SimpleNamespace, is_renewed: bool
) -> None:
    server = opened(tmp_path, a=1000, b=1000)
    rank, late = Rank(started(server)[0]), started(server, "b")[0]
    for _ in range(3):
        assert rank.advance()
        clock.now += 0.25
    if is_renewed:
        server.decide(["a", "b"])
    began = clock.now
    server.stop()
    rank.run(clock, 0.25)
    assert clock.now - began < ROUND / 2  # what a grant may cover
    assert Rank(late).run(clock, 0.25) == 1  # a lease that has no grants yet
    records = [server.store.job(name) for name in "ab"]
    assert [record.committed for record in records] == [len(rank.seen), 1]
    assert {record.state for record in records} == {"active"}


def test_a_lease_that_is_not_renewed_ends_with_its_round(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    server = opened(tmp_path, a=1000)
    rank = Rank(started(server)[0])
    while clock.now < 1000 + ROUND / 2:
        assert rank.advance()
        clock.now += 0.25
    server.decide([])
    rank.run(clock, 0.25)
    assert not rank.iterator.done
    assert 1000 + ROUND - 1.0 <= clock.now <= 1000 + ROUND
    assert server.store.job("a").committed == len(rank.seen)
    with pytest.raises(JobLeaseLostError):
        server.grant("a", rank.lease.epoch, 0, 99)


def test_a_renewed_lease_goes_on_without_a_checkpoint(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    server = opened(tmp_path, a=1000)
    rank = Rank(started(server)[0])
    for number in range(6):
        while clock.now < 1000 + ROUND * (number + 0.5):
            assert rank.advance()
            clock.now += 0.25
        assert server.decide(["a"]) == {"a"}
        while clock.now < 1000 + ROUND * (number + 1):
            assert rank.advance()
            clock.now += 0.25
        assert server.overstays() == {}
        server.begin_round()
    assert not rank.lease.partial.exists()
    assert server.store.commits("a") == ()
    assert server.progress()["a"][1] == pytest.approx(4.0)


def test_the_next_lease_goes_on_where_the_last_one_stopped(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    server = opened(tmp_path, a=100)
    while server.store.job("a").state == "active":
        rank = Rank(started(server)[0])
        server.begin_round()
        server.decide([])
        assert rank.run(clock, 0.9) <= 12
        assert server.ended("a", rank.lease.epoch).error is None
    assert rank.seen == [step % 7 for step in range(100)]
    commits = server.store.commits("a")
    assert [last for *_, last in commits] == [*(first for _, first, _ in commits[1:]), 100]
    assert len(list(rank.lease.folder.iterdir())) == KEPT


@examples(25)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 40))
def test_every_step_counts_once_whatever_befalls(
    tmp_path_factory: pytest.TempPathFactory,
    clock: SimpleNamespace,
    seed: int,
    ranks: int,
    steps: int,
) -> None:
    """Ranks run in any order; leases are renewed or not, killed, or the scheduler starts anew."""
    draw = random.Random(seed)
    folder = tmp_path_factory.mktemp("jobs")
    server = opened(folder, retries=10**6, a=steps)
    while server.store.job("a").state == "active":
        if draw.random() < 0.1:
            server = opened(folder, retries=10**6, a=steps)
        server.begin_round()
        members = [Rank(lease) for lease in started(server, ranks=ranks)]
        if hold_lease(draw, server, clock, members):
            assert len({rank.iterator.step for rank in members}) == 1
            server.ended("a", members[0].lease.epoch)
        else:
            server.fail("a", members[0].lease.epoch, "killed", True)
    expected = [step % 7 for step in range(steps)]
    checkpoint = Path(str(server.store.job("a").checkpoint))
    for rank in range(ranks):
        assert json.loads((checkpoint / f"{rank}.json").read_text()) == expected
    commits = server.store.commits("a")
    assert [first for _, first, _ in commits] == [0, *(last for *_, last in commits[:-1])]
    assert sum(last - first for _, first, last in commits) == steps


def hold_lease(
    draw: random.Random, server: LeaseServer, clock: SimpleNamespace, members: list[Rank]
) -> bool:
    """Step the ranks in any order; False if they are killed before all have ended."""
    out, is_killed = list(members), draw.random() < 1 / 3
    while out and not (is_killed and draw.random() < 0.05):
        rank = draw.choice(out)
        if not rank.advance():
            out.remove(rank)
        clock.now += draw.uniform(0.0, 1.5)
        if draw.random() < 0.2:
            server.decide(draw.choice([[], ["a"]]))
        if draw.random() < 0.1:
            server.begin_round()
    return not out


def test_a_job_is_not_believed(tmp_path: Path, clock: SimpleNamespace) -> None:
    """Rates are by the server's clock; what a rank may not ask or save is refused."""
    server = opened(tmp_path, a=1000)
    lease = started(server, ranks=2)[0]
    first = server.grant("a", lease.epoch, 0, 0)
    clock.now += 0.5
    second = server.grant("a", lease.epoch, 1, 1)
    assert server.progress() == {"a": (1, 2.0)}
    clock.now += 0.25 * (second.step - first.step)
    server.grant("a", lease.epoch, 0, 2)
    assert server.progress() == {"a": (second.step, 4.0)}
    timed = 0.5 + 0.25 * (second.step - first.step)
    assert server.measured() == {("a", lease.epoch): (second.step, pytest.approx(timed))}
    wrong = (
        (lambda: server.grant("a", lease.epoch, 0, 9), "asked for grant 9, has had 3"),
        (lambda: server.grant("a", lease.epoch, 0, -1), "asked for grant -1"),
        (lambda: server.grant("a", lease.epoch, 2, 0), "rank 2 is not one of 2"),
        (lambda: server.saved("a", lease.epoch, 7, second.step), "rank 7 is not one of 2"),
        (lambda: server.saved("a", lease.epoch, 0, 1000), "saved step 1000, not the end"),
    )
    for attempt, message in wrong:
        with pytest.raises(JobLeaseLostError, match=message):
            attempt()
    assert server.progress() == {"a": (second.step, 4.0)}


def test_an_old_epoch_may_neither_run_on_nor_save(tmp_path: Path, clock: SimpleNamespace) -> None:
    server = opened(tmp_path, a=5)
    old = Rank(started(server)[0])
    old.advance()
    new = Rank(started(server)[0])
    with pytest.raises(JobLeaseLostError, match="epoch 1 has ended, the newest is 2"):
        old.run(clock, 0.1)
    assert new.run(clock, 0.1) == 5
    last = Rank(new.lease)
    with pytest.raises(JobLeaseLostError, match="done"):
        last.advance()
    assert len(server.store.commits("a")) == 1


def test_who_slept_through_the_next_lease_cannot_save_either(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    server = opened(tmp_path, a=5)
    old = Rank(started(server)[0])
    while old.iterator.step < 4:
        old.advance()
        clock.now += 0.1
    held = server._held["a"].grants[-1]
    assert held.is_last  # it need not ask again before it saves
    new = Rank(started(server)[0])
    new.advance()
    with pytest.raises(JobLeaseLostError):
        old.run(clock, 0.1)
    assert server.store.job("a").committed == 0
    assert new.run(clock, 0.1) == 4


def test_a_new_scheduler_shuts_the_old_one_out(tmp_path: Path, clock: SimpleNamespace) -> None:
    old = opened(tmp_path, a=5)
    rank = Rank(started(old)[0])
    rank.advance()
    new = opened(tmp_path, a=5)
    with pytest.raises(JobLeaseLostError, match="another scheduler"):
        rank.run(clock, 0.1)
    with pytest.raises(JobLeaseLostError, match="another scheduler"):
        old.start("a", 1)
    assert Rank(started(new)[0]).run(clock, 0.1) == 5


def test_a_save_that_fails_leaves_the_older_checkpoint(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = opened(tmp_path, a=30)
    server.decide([])
    first = Rank(started(server)[0])
    first.run(clock, 1.0)
    before = server.store.job("a")
    assert before.committed > 0
    server.begin_round()
    server.decide([])

    torn = Rank(started(server)[0])
    monkeypatch.setattr(torn.iterator, "save_checkpoint", lambda folder: [][0])
    with pytest.raises(IndexError):
        torn.run(clock, 1.0)
    server.fail("a", torn.lease.epoch, "torn", True)
    assert server.store.job("a").checkpoint == before.checkpoint

    server.begin_round()
    server.decide([])
    uncommitted = Rank(started(server)[0])
    with monkeypatch.context() as patched:
        patched.setattr(JobStore, "commit", lambda *_: 1 // 0)  # killed after the renaming
        with pytest.raises(ZeroDivisionError):
            uncommitted.run(clock, 1.0)
    assert server.store.job("a").checkpoint == before.checkpoint

    server = opened(tmp_path, a=30)
    last = Rank(started(server)[0])
    last.run(clock, 0.1)
    assert last.seen == [step % 7 for step in range(30)]
    assert not list(last.lease.folder.glob(".epoch*"))


def test_a_checkpoint_counts_with_the_last_rank(tmp_path: Path, clock: SimpleNamespace) -> None:
    server = opened(tmp_path, a=3)
    first, second = (Rank(lease) for lease in started(server, ranks=2))
    first.run(clock, 0.1)
    assert server.store.job("a").committed == 0
    with pytest.raises(JobLeaseLostError, match="saved step 2"):
        server.saved("a", second.lease.epoch, 1, 2)
    second.run(clock, 0.1)
    assert server.store.job("a").state == "done"


def test_who_overstays_is_known_and_who_starts_slowly_has_time(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    server = opened(tmp_path, a=100, b=100, c=100)
    hung, slow, renewed = (Rank(started(server, job)[0]) for job in "abc")
    hung.advance()
    renewed.advance()
    server.decide(["b", "c"])
    clock.now += 3.0
    renewed.advance()
    clock.now += 12.0
    overstays = server.overstays()
    assert overstays["a"] == pytest.approx(5.0)
    assert overstays["b"] == pytest.approx(15.0 - START_SECONDS)
    assert "c" not in overstays
    slow.advance()
    assert "b" not in server.overstays()


def test_failures_are_counted_from_commit_to_commit(tmp_path: Path, clock: SimpleNamespace) -> None:
    server = opened(tmp_path, retries=1, a=50)

    def fail(is_counted: bool = True) -> str:
        record, _ = server.start("a", 1)
        return server.fail("a", record.epoch, "it broke", is_counted).state

    assert fail() == "active"
    assert fail(is_counted=False) == "active"
    server.decide([])
    Rank(started(server)[0]).run(clock, 1.0)
    assert server.store.job("a").failures == 0
    assert [fail(), fail()] == ["active", "failed"]
    assert server.store.job("a").error == "it broke"
    (again,) = LeaseServer(tmp_path, ROUND, 1).open({"a": 50})
    assert (again.state, again.failures) == ("active", 0)


def test_a_program_that_leaves_before_its_lease_is_over_has_failed(tmp_path: Path) -> None:
    server = opened(tmp_path, retries=0, a=5)
    rank = Rank(started(server)[0])
    rank.advance()
    record = server.ended("a", rank.lease.epoch)
    assert record.state == "failed"
    assert record.error == "the program returned before its lease was over"


@pytest.mark.parametrize("loader", [range(7), iter, lambda step: itertools.count(step % 7)])
def test_a_loader_is_taken_up_where_training_stood(
    tmp_path: Path, clock: SimpleNamespace, loader: object
) -> None:
    server = opened(tmp_path, a=6)
    server.decide([])
    clock.now += ROUND * 2  # too late for more than a step
    Rank(started(server)[0]).run(clock, 1.0)
    server.begin_round()
    fitting = Unsized() if loader is iter else loader
    rank = Rank(started(server)[0], fitting)
    rank.run(clock, 0.1)
    assert rank.seen == [0, 1, 2, 3, 4, 5]


class Unsized:
    """A loader that does not know its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def test_a_loader_that_ends_for_good_is_refused(tmp_path: Path, clock: SimpleNamespace) -> None:
    rank = Rank(started(opened(tmp_path, a=9))[0], iter(range(4)))
    with pytest.raises(ValueError, match="no batches for step 5; it must be possible to iterate"):
        rank.run(clock, 0.1)


def test_a_store_of_other_jobs_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, a=9)
    with pytest.raises(InputError, match="job 'a' has 9 steps there, here 10"):
        opened(tmp_path, a=10)
    (tmp_path / "jobs.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match="no store of jobs can be kept here"):
        opened(tmp_path, a=9)


def test_the_store_may_be_in_another_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'elsewhere.sqlite'}"
    server = LeaseServer(tmp_path / "jobs", ROUND, 3, url)
    server.open({"a": 9})
    record, _ = server.start("a", 1)
    assert JobStore(tmp_path / "others", url).job("a").epoch == record.epoch + 1
    assert not list(tmp_path.rglob("jobs.sqlite"))


@pytest.mark.parametrize("url", ["nowhere", "oracle+none://user:secret@host/jobs"])
def test_a_store_that_cannot_be_reached_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(InputError, match="no store of jobs can be kept here") as refusal:
        JobStore(tmp_path, url)
    assert "secret" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_transactions_of_two_stores_do_not_interleave(tmp_path: Path) -> None:
    """A writer keeps others out from its beginning, not from its first write."""
    store = JobStore(tmp_path)
    other = sqlite3.connect(tmp_path / "jobs.sqlite", timeout=0.05)
    with store._writing(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    other.execute("BEGIN IMMEDIATE")
    other.close()


def test_an_epoch_is_on_the_disk_before_the_job_starts(tmp_path: Path) -> None:
    server = opened(tmp_path, a=9)
    record, _ = server.start("a", 1)
    other = sqlite3.connect(tmp_path / "jobs.sqlite")
    assert other.execute("SELECT epoch FROM jobs").fetchone() == (record.epoch,)
    other.close()


def test_names_of_jobs_are_no_paths(tmp_path: Path, clock: SimpleNamespace) -> None:
    server = opened(tmp_path / "jobs", **{"../../a": 2, "..": 2})
    for job in ("../../a", ".."):
        assert Rank(started(server, job)[0]).run(clock, 0.1) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["jobs"]


def test_a_program_needs_nothing_heavy_for_its_leases() -> None:
    heavy = "{'torch', 'ray', 'numpy', 'pydantic'}"
    module = "stagewright.executor.clusters.leases"
    code = f"import {module}, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
