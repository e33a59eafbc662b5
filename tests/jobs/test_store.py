"""The store and its queue, on SQLite and on a real PostgreSQL."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from planning_jobs import TWO_JOBS, Clock, plan_request

pytest.importorskip("sqlalchemy")

from sqlalchemy.exc import SQLAlchemyError

from stagewright.graphs.documents.errors import InputError
from stagewright.service.jobs import store as stores
from stagewright.service.jobs.kinds import parse_request, title_of
from stagewright.service.jobs.queue import LOSS_PAUSES, JobLeaseLostError, Queue
from stagewright.service.jobs.records import JobEnd, JobEnding, State, StoppedBy
from stagewright.service.jobs.store import ConflictError, ServiceStore
from stagewright.service.jobs.upkeep import DAY, retention

LEASE = 10.0
DONE = JobEnd(State.OPTIMAL, answer="{}", document="plan", cost=2.0, bound=2.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[ServiceStore]:
    found = ServiceStore(url, clock)
    yield found
    found.close()


@pytest.fixture
def queue(store: ServiceStore) -> Queue:
    return Queue(store)


def test_a_job_lives_from_the_queue_to_its_answer(store: ServiceStore, queue: Queue) -> None:
    job, new = store.submit("ann", "plan", "{}")
    assert (new, job.state, job.has_ended) == (True, State.QUEUED, False)
    claimed = queue.claim("w", LEASE)
    assert claimed is not None
    assert (claimed.id, claimed.state, claimed.attempts) == (job.id, State.SOLVING, 1)
    assert queue.claim("v", LEASE) is None
    queue.improve(job.id, "w", 3.0, 1.0, "better")
    queue.improve(job.id, "w", 3.0, 1.5)
    assert store.get(job.id).document == "better"
    queue.finish(job.id, "w", DONE)
    ended = store.get(job.id)
    assert (ended.state, ended.document, ended.cost) == (State.OPTIMAL, "plan", 2.0)
    names = [one.name for one in store.events(job.id)]
    assert names == ["queued", "solving", "progress", "progress", "optimal"]
    numbers = [one.number for one in store.events(job.id)]
    assert numbers == sorted(set(numbers))
    assert [one.name for one in store.events(job.id, after=numbers[2])] == ["progress", "optimal"]


def test_the_bound_is_that_of_the_best_answer(
    store: ServiceStore, queue: Queue, clock: Clock
) -> None:
    """A bound on a smaller class of plans may be above the cost of a better plan outside of it."""
    job, _ = store.submit("ann", "plan", "{}")
    narrow, wide = {"sharing": "none"}, {"sharing": "any"}

    def known() -> tuple[float | None, float | None]:
        found = store.get(job.id)
        return found.cost, found.bound

    queue.claim("w", LEASE)
    queue.improve(job.id, "w", None, 0.5, None, wide)
    queue.improve(job.id, "w", 4.0, 3.5, "narrow", narrow)
    queue.improve(job.id, "w", 3.0, 2.0, "wide", wide)
    assert known() == (3.0, 2.0)
    clock.now += LEASE + 1
    queue.expire()
    queue.claim("v", LEASE)
    queue.improve(job.id, "v", 4.0, 3.5, "narrow", narrow)
    assert known() == (3.0, 2.0)
    queue.finish(job.id, "v", JobEnd(State.FEASIBLE, answer="{}", cost=3.5, bound=3.2))
    assert known() == (3.0, 2.0)
    other, _ = store.submit("ann", "plan", '{"n":1}')
    queue.claim("w", LEASE)
    queue.improve(other.id, "w", 4.0, 3.5, "narrow", narrow)
    queue.finish(other.id, "w", JobEnd(State.FEASIBLE, answer="{}", cost=3.0, bound=2.0))
    assert (store.get(other.id).cost, store.get(other.id).bound) == (3.0, 2.0)


def test_a_key_submits_once(store: ServiceStore) -> None:
    job, _ = store.submit("ann", "plan", "{}", key="k")
    again, new = store.submit("ann", "plan", "{}", key="k")
    assert (again.id, new) == (job.id, False)
    other, new = store.submit("bob", "plan", "{}", key="k")
    assert (other.id != job.id, new) == (True, True)
    with pytest.raises(ConflictError, match="belongs to another request"):
        store.submit("ann", "plan", '{"a":1}', key="k")
    assert len(store.page("ann")) == 1


def test_what_was_answered_completely_is_not_solved_again(
    store: ServiceStore, queue: Queue
) -> None:
    job, _ = store.submit("ann", "plan", "{}")
    queue.claim("w", LEASE)
    queue.finish(job.id, "w", DONE)
    other, _ = store.submit("bob", "plan", "{}")
    assert (other.state, other.cached_from, other.document) == (State.OPTIMAL, job.id, "plan")
    fourth, _ = store.submit("cid", "plan", "{}")
    assert fourth.cached_from == job.id
    assert (store.get(other.id), store.get(fourth.id)) == (other, fourth)  # as it was returned
    third, _ = store.submit("bob", "schedule", "{}")  # the same text of another kind
    assert third.state is State.QUEUED
    assert queue.claim("w", LEASE).id == third.id


def test_no_answer_of_another_version_is_served(
    store: ServiceStore, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = store.submit("ann", "plan", "{}", key="k")
    queue.claim("w", LEASE)
    queue.finish(job.id, "w", DONE)
    monkeypatch.setattr(stores, "_version", lambda: "the next one")
    assert store.submit("ann", "plan", "{}", key="k") == (store.get(job.id), False)
    assert not store.knows("bob", "plan", "{}", None)
    other, _ = store.submit("bob", "plan", "{}")
    assert other.state is State.QUEUED
    store.ask(other.id, JobEnding.ABORT)
    with pytest.raises(ConflictError, match="has failed or was stopped"):
        store.retry(job.id)
    again = store.retry(job.id, fresh=True)
    assert (again.state, again.cost, again.document, again.answer) == (State.QUEUED, *[None] * 3)
    queue.claim("w", LEASE)
    queue.finish(job.id, "w", DONE)
    assert store.submit("cid", "plan", "{}")[0].cached_from == job.id


def test_an_answer_is_of_the_version_that_gave_it(
    store: ServiceStore, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a service is brought up to date, a worker answers what another's server has queued."""
    job, _ = store.submit("ann", "plan", "{}")
    claimed = queue.claim("w", LEASE)
    with monkeypatch.context() as other:
        other.setattr(stores, "_version", lambda: "the one before")
        store.sign(claimed)
        queue.finish(job.id, "w", DONE)
        assert store.submit("bob", "plan", "{}")[0].cached_from == job.id
    assert store.submit("cid", "plan", "{}")[0].state is State.QUEUED


def test_a_fresh_answer_is_no_other_jobs(store: ServiceStore, queue: Queue) -> None:
    job, _ = store.submit("ann", "plan", "{}")
    queue.claim("w", LEASE)
    queue.finish(job.id, "w", DONE)
    other, _ = store.submit("bob", "plan", "{}")
    again = store.retry(other.id, fresh=True)
    assert (again.state, again.cached_from) == (State.QUEUED, None)
    with pytest.raises(ConflictError, match="only a job that has ended"):
        store.retry(other.id, fresh=True)


def test_an_incomplete_answer_is_solved_again(store: ServiceStore, queue: Queue) -> None:
    job, _ = store.submit("ann", "plan", "{}")
    queue.claim("w", LEASE)
    queue.finish(job.id, "w", JobEnd(State.FEASIBLE, stopped_by=StoppedBy.TIME))
    assert store.submit("ann", "plan", "{}")[0].state is State.QUEUED


def test_users_take_turns_and_priorities_order_their_own(
    store: ServiceStore, queue: Queue, clock: Clock
) -> None:
    def submit(user: str, priority: int = 0) -> str:
        clock.now += 1
        job, _ = store.submit(user, "plan", f'{{"n":{clock.now}}}', priority)
        return job.id

    first, second, urgent = submit("ann"), submit("ann"), submit("ann", 5)
    bobs, cids = submit("bob"), submit("cid", -5)
    turns = [queue.claim(f"w{i}", LEASE).id for i in range(5)]
    assert turns == [urgent, bobs, cids, first, second]


def test_only_the_holder_of_a_lease_writes(store: ServiceStore, queue: Queue, clock: Clock) -> None:
    job, _ = store.submit("ann", "plan", "{}")
    queue.claim("w", LEASE)
    clock.now += LEASE - 1
    assert queue.renew(job.id, "w", LEASE) is None
    clock.now += LEASE - 1
    assert queue.expire() == 0
    clock.now += 2
    assert queue.expire() == 1
    assert store.get(job.id).state is State.QUEUED
    for write in (
        lambda: queue.renew(job.id, "w", LEASE),
        lambda: queue.improve(job.id, "w", 1.0, 1.0),
        lambda: queue.finish(job.id, "w", DONE),
    ):
        with pytest.raises(JobLeaseLostError):
            write()
    assert queue.claim("v", LEASE).attempts == 1
    with pytest.raises(JobLeaseLostError):
        queue.finish(job.id, "w", DONE)
    queue.finish(job.id, "v", DONE)
    with pytest.raises(JobLeaseLostError):
        queue.finish(job.id, "v", DONE)


@pytest.mark.parametrize("found", [True, False])
def test_a_job_whose_workers_are_lost_ends_with_its_best(
    store: ServiceStore, queue: Queue, clock: Clock, found: bool
) -> None:
    job, _ = store.submit("ann", "plan", "{}")
    pauses = []
    for _ in range(10):
        waits = clock.now
        while (claimed := queue.claim("w", LEASE)) is None:
            clock.now += 1
        pauses.append(clock.now - waits)
        assert claimed.attempts == 1  # a lost server is not the job's fault
        if found:
            queue.improve(job.id, "w", 3.0, 1.0, "better")
        clock.now += LEASE + 1
        queue.expire()
    assert pauses == [0.0, *LOSS_PAUSES]
    ended = store.get(job.id)
    assert ended.state is (State.FEASIBLE if found else State.FAILED)
    assert ended.stopped_by is StoppedBy.LOST
    assert ended.document == ("better" if found else None)
    assert store.retry(job.id).state is State.QUEUED


def test_a_job_that_is_given_back_waits_no_longer_than_others(
    store: ServiceStore, queue: Queue, clock: Clock
) -> None:
    job, _ = store.submit("ann", "plan", "{}")
    for attempts, counted in ((1, False), (1, True), (2, False)):
        assert queue.claim("w", LEASE).attempts == attempts
        queue.improve(job.id, "w", 3.0, 1.0, "good plan")
        queue.give_back(job.id, "w", "why", counted=counted)
        with pytest.raises(JobLeaseLostError):
            queue.give_back(job.id, "w", "why", counted=False)
    kept = store.get(job.id)
    assert (kept.state, kept.document, kept.cost) == (State.QUEUED, "good plan", 3.0)
    assert store.events(job.id)[-1].data == '{"reason": "why"}'
    queue.claim("w", LEASE)
    store.ask(job.id, JobEnding.STOP)
    queue.give_back(job.id, "w", "why", counted=False)
    assert store.get(job.id).state is State.FEASIBLE


def test_jobs_are_stopped_wherever_they_are(
    store: ServiceStore, queue: Queue, clock: Clock
) -> None:
    waiting, _ = store.submit("ann", "plan", '{"n":1}')
    assert store.ask(waiting.id, JobEnding.STOP).state is State.FAILED
    assert store.get(waiting.id).stopped_by is StoppedBy.USER
    running, _ = store.submit("ann", "plan", '{"n":2}')
    queue.claim("w", LEASE)
    assert store.ask(running.id, JobEnding.STOP).state is State.SOLVING
    assert queue.renew(running.id, "w", LEASE) is JobEnding.STOP
    clock.now += LEASE + 1  # its worker is killed, before it has heard
    queue.expire()
    assert store.get(running.id).state is State.FAILED
    with pytest.raises(ConflictError, match="has ended"):
        store.ask(running.id, JobEnding.STOP)
    with pytest.raises(ConflictError, match="has ended"):
        store.ask("nothing", JobEnding.ABORT)


def test_a_stop_takes_no_abort_back(store: ServiceStore, queue: Queue) -> None:
    job, _ = store.submit("ann", "plan", "{}")
    queue.claim("w", LEASE)
    for asked in (JobEnding.STOP, JobEnding.ABORT, JobEnding.STOP):
        store.ask(job.id, asked)
    assert queue.renew(job.id, "w", LEASE) is JobEnding.ABORT
    assert [json.loads(one.data) for one in store.events(job.id)][2:] == [
        {"asked": "stop"}, {"asked": "abort"}, {"asked": "abort"},
    ]  # fmt: skip


def test_only_what_has_ended_is_discarded(store: ServiceStore, queue: Queue) -> None:
    job, _ = store.submit("ann", "plan", "{}")
    with pytest.raises(ConflictError, match="stop it first"):
        store.discard(job.id)
    queue.claim("w", LEASE)
    queue.finish(job.id, "w", DONE)
    with pytest.raises(ConflictError, match="failed or was stopped"):
        store.retry(job.id)
    store.discard(job.id)
    assert store.get(job.id) is None
    assert store.events(job.id) == []


def test_pages_show_every_job_of_a_user_once(store: ServiceStore, clock: Clock) -> None:
    made = []
    for n in range(7):
        clock.now += n % 2  # some at the same time
        made.append(store.submit("ann", "plan", f'{{"n":{n}}}')[0].id)
        store.submit("bob", "plan", f'{{"n":{n}}}')
    seen: list[str] = []
    while page := store.page("ann", before=seen[-1] if seen else None, limit=3):
        seen += [job.id for job in page]
    assert sorted(seen) == sorted(made)
    assert len(store.page(None)) == 14
    assert store.page("ann", state=State.OPTIMAL) == []
    assert store.counts() == {State.QUEUED: 14}
    assert store.get(made[0], "bob") is None
    assert store.get(made[0][:8]) is None  # a prefix is no name


def test_workers_at_once_claim_every_job_once(url: str) -> None:
    opened = ServiceStore(url)
    for n in range(40):
        opened.submit(f"u{n % 3}", "plan", f'{{"n":{n}}}')
    claimed: list[str] = []

    def work(name: str) -> None:
        mine = ServiceStore(url)
        queue = Queue(mine)
        while (job := queue.claim(name, LEASE)) is not None:
            claimed.append(job.id)
            queue.finish(job.id, name, DONE)
        mine.close()

    threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(claimed).most_common(1)[0][1] == 1
    assert len(claimed) == 40
    assert opened.counts() == {State.OPTIMAL: 40}
    opened.close()


def test_who_waits_too_long_to_write_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an error of the database, whether this process or another one writes for so long."""
    monkeypatch.setattr("stagewright.service.jobs.store.LOCK_SECONDS", 0.05)
    monkeypatch.setattr("stagewright.service.jobs.rows.LOCK_SECONDS", 0.05)
    one, other = (ServiceStore(f"sqlite:///{tmp_path / 'jobs.sqlite'}") for _ in range(2))
    for waiting in (one, other):
        with one.writing(), pytest.raises(SQLAlchemyError, match="locked"):
            waiting.submit("ann", "plan", "{}")
        waiting.submit("ann", "plan", "{}")
    one.close()
    other.close()


def test_a_title_names_model_and_cluster(store: ServiceStore) -> None:
    request = json.loads(plan_request())
    request["chain"]["name"] = "a\0 model" + 300 * "x"
    request["cluster"]["name"] = "two GPUs"
    title = title_of(parse_request("plan", json.dumps(request)))
    assert title.startswith("a modelx")
    assert title.endswith("x on two GPUs")
    assert title_of(parse_request("jobshop", TWO_JOBS)) == ""
    job, _ = store.submit("ann", "plan", "{}", title=title, webhook="https://x.example/done")
    assert (job.title, job.webhook) == (title[:200], "https://x.example/done")


@pytest.mark.parametrize("url", ["sqlite:////nowhere/jobs.sqlite", "nosuch://x"])
def test_where_no_store_can_be_it_is_said(url: str) -> None:
    with pytest.raises(InputError, match="no store of jobs can be kept here"):
        ServiceStore(url)


def test_jobs_are_deleted_so_long_after_their_ends(
    store: ServiceStore, queue: Queue, clock: Clock
) -> None:
    jobs = list[str]()
    for seed in range(3):
        jobs.append(store.submit("ann", "plan", f'{{"seed": {seed}}}')[0].id)
        clock.now += 1.0
    old, running, late = jobs
    queue.claim("w", LEASE)
    queue.finish(old, "w", DONE)
    clock.now += 2 * DAY
    assert queue.claim("w", LEASE).id == running
    queue.claim("v", LEASE)
    queue.finish(late, "v", DONE)
    keeper = retention(store, 1.0)
    thread = threading.Thread(target=keeper.run)
    thread.start()
    try:
        ends = time.monotonic() + 60.0
        while store.get(old) is not None:
            assert time.monotonic() < ends
            time.sleep(0.01)
    finally:
        keeper.stop()
        thread.join()
    assert store.events(old) == []
    assert store.get(running) is not None
    assert store.get(late) is not None


def test_a_postgresql_that_does_not_answer_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setattr("stagewright.service.jobs.rows.CONNECT_SECONDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(InputError, match="no store of jobs can be kept here: connection time"):
            ServiceStore(f"postgresql+psycopg://ann:word@127.0.0.1:{port}/jobs")
