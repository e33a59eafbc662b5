"""Users' shares of the workers: the documentation's oracle, fair shares, quotas, giving way."""

import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from life_oracle import LEASE, KnownJob, Oracle
from planning_jobs import Clock, long_request
from profiles import examples

pytest.importorskip("sqlalchemy")

from sqlalchemy import select

from stagewright.graphs.documents.documents import to_json
from stagewright.service.jobs.kinds import parse_request, rest_of, seconds_of
from stagewright.service.jobs.queue import JobLeaseLostError, Queue, QueueRules
from stagewright.service.jobs.records import JobEnd, JobEnding, State
from stagewright.service.jobs.rows import SHARES
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.jobs.upkeep import DAY
from stagewright.service.pipelines.planning import plan

LONG = long_request()
DONE = JobEnd(State.FEASIBLE, answer="{}")
numbers = itertools.count()
users = st.sampled_from("abc")


@pytest.fixture
def clock() -> Clock:
    return Clock(1e6)


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[ServiceStore]:
    found = ServiceStore(url, clock)
    yield found
    found.close()


def submit(store: ServiceStore, user: str, priority: int = 0) -> str:
    store.clock.now += 2**-6
    return store.submit(user, "plan", f'{{"n":{next(numbers)}}}', priority)[0].id


def used(store: ServiceStore) -> dict[str, float]:
    with store.engine.connect() as database:
        rows = database.execute(select(SHARES.c.user, SHARES.c.virtual_seconds))
        return {user: seconds for user, seconds in rows}


def empty(store: ServiceStore) -> None:
    with store.writing() as database:
        for table in ("deliveries", "events", "jobs", "shares"):
            database.exec_driver_sql(f"DELETE FROM {table}")


# --- The documentation -------------------------------------------------------------------------

STEPS = Counter({
    "submit": 6, "claim": 6, "renew": 8, "improve": 4, "give_way": 8, "finish": 1, "give_back": 1,
    "wait": 6,
})  # fmt: skip


@examples(60, quick=5)
@given(st.integers(0, 10**6), st.sampled_from([None, 1, 2]), st.sampled_from([0.0, 8.0, 8.0, None]))
def test_the_queue_is_that_of_the_documentation(
    url: str, seed: int, running: int | None, preempt: float | None
) -> None:
    store = ServiceStore(url, Clock(1e6))
    empty(store)
    here, draw = Beside(store, running, preempt), random.Random(seed)
    for what in draw.choices(list(STEPS), list(STEPS.values()), k=150):
        getattr(here, what)(draw)
        known = {user: share.used for user, share in here.oracle.shares.items()}
        assert used(store) == pytest.approx(known)
    store.close()


class Beside:
    """A queue and the oracle, which are asked the same."""

    def __init__(self, store: ServiceStore, running: int | None, preempt: float | None) -> None:
        self.store, self.clock = store, store.clock
        self.queue = Queue(store, QueueRules(running, preempt))
        self.oracle = Oracle(1000, running, preempt)
        store.weigh("b", 2.0)
        self.oracle.shares["b"].weight = 2.0

    def submit(self, draw: random.Random) -> None:
        user, priority = draw.choice("abc"), draw.randint(-1, 1)
        made = submit(self.store, user, priority)
        self.oracle.add(KnownJob(made, user, "", "", self.clock(), priority), None, None)

    def claim(self, _: random.Random) -> None:
        expected, claimed = self.oracle.next(self.clock()), self.queue.claim("w", LEASE)
        assert (claimed and claimed.id) == (expected and expected.id)
        if expected is not None:
            self.oracle.claim(expected, "w", self.clock())

    def wait(self, draw: random.Random) -> None:
        """For so long that leases run out, now and then."""
        self.clock.now += draw.choice([0.5, 3.0, 3.0, 6.0, 6.0, 20.0])
        assert self.queue.expire() == len(self.oracle.expire(self.clock()))

    def running(self) -> list[KnownJob]:
        return [one for one in self.oracle.jobs.values() if one.state == "solving"]

    def renew(self, _: random.Random) -> None:
        for job in self.running():
            self.queue.renew(job.id, "w", LEASE)
            self.oracle.renew(job, self.clock())

    def improve(self, draw: random.Random) -> None:
        for job in self.running():
            cost = draw.uniform(1.0, 2.0)
            self.queue.improve(job.id, "w", cost, 0.0, str(cost))
            self.oracle.improve(job, cost, 0.0, str(cost))

    def give_way(self, _: random.Random) -> None:
        for job in self.running():
            expected = self.oracle.gives_way(job, self.clock())
            begun = self.queue.give_way(job.id, "w", LEASE, 61.0)
            assert (begun and begun.id) == (expected and expected.id)
            if expected is not None:
                self.oracle.give_way(job, expected, "w", self.clock())

    def finish(self, draw: random.Random) -> None:
        for job in self.running()[: draw.randint(0, 2)]:
            self.queue.finish(job.id, "w", DONE)
            self.oracle.give_back_lease(job, self.clock())
            self.oracle.end(job, "feasible", None, self.clock())

    def give_back(self, _: random.Random) -> None:
        for job in self.running()[:1]:
            self.queue.give_back(job.id, "w", "why", counted=False)
            self.oracle.give_back(job, self.clock())


# --- Fair shares -------------------------------------------------------------------------------


class Simulation:
    """Workers that answer jobs of known lengths, on a clock that is set."""

    def __init__(self, store: ServiceStore, workers: int, rules: QueueRules | None = None) -> None:
        self.store, self.queue = store, Queue(store, rules or QueueRules())
        self.free, self.running = [f"w{n}" for n in range(workers)], list[tuple[float, str, str]]()
        self.seconds, self.users, self.ends = (
            dict[str, float](),
            dict[str, str](),
            dict[str, float](),
        )
        self.used, self.begun, self.waits = Counter[str](), list[str](), Counter[str]()

    def submit(self, user: str, seconds: float) -> str:
        job = submit(self.store, user)
        self.seconds[job], self.users[job] = seconds, user
        return job

    def step(self) -> bool:
        """Begin what can be begun, and end what ends next, or renew its lease."""
        while self.free and (job := self.queue.claim(self.free[-1], LEASE)) is not None:
            self.begun.append(job.id)
            self.waits[job.user] += job.started - job.created
            self.ends[job.id] = job.started + self.seconds[job.id]
            self._go_on(job.id, self.free.pop())
        if not self.running:
            return False
        self.store.clock.now, job, worker = heapq.heappop(self.running)
        if self.ends[job] > self.store.clock():
            self.queue.renew(job, worker, LEASE)
            self._go_on(job, worker)
        else:
            self.queue.finish(job, worker, DONE)
            self.used[self.users[job]] += self.seconds[job]
            self.free.append(worker)
        return True

    def _go_on(self, job: str, worker: str) -> None:
        at = min(self.ends[job], self.store.clock() + LEASE)
        heapq.heappush(self.running, (at, job, worker))


@examples(60, quick=3)
@given(
    st.lists(st.tuples(users, st.integers(1, 40)), min_size=12, max_size=30),
    st.dictionaries(users, st.sampled_from([1.0, 2.0, 4.0])),
)
def test_users_whose_jobs_wait_get_the_same_seconds_within_one_job(
    url: str, jobs: list[tuple[str, int]], weights: dict[str, float]
) -> None:
    """By weight; on one worker this is a theorem of serving who has used the least."""
    store = ServiceStore(url, Clock(1e6))
    empty(store)
    here = Simulation(store, 1)
    for user, weight in weights.items():
        store.weigh(user, weight)
    for user, seconds in jobs:
        here.submit(user, seconds)
    waiting = set(here.users.values())
    longest = {
        user: max(seconds for of, seconds in jobs if of == user) / weights.get(user, 1.0)
        for user in waiting
    }
    while here.step():
        waiting = {one for one in waiting if store.queued(one)[0]}
        seconds = {one: here.used[one] / weights.get(one, 1.0) for one in waiting}
        for one, other in itertools.permutations(waiting, 2):
            assert seconds[one] - seconds[other] <= longest[one] + 1e-6
    assert sorted(here.begun) == sorted(here.seconds)
    store.close()


@pytest.mark.parametrize("seconds", [0.2, 3000.0])
def test_nobody_starves(store: ServiceStore, clock: Clock, seconds: float) -> None:
    """Whoever submits many tiny jobs, a huge one, or stops and submits anew, others have turns."""
    here = Simulation(store, 1)
    store.weigh("greedy", 3.0)
    for _ in range(8):
        here.submit("greedy", seconds)
        here.submit("bob", 5.0)
    for _ in range(12):
        here.step()
        for job in store.page("greedy", state=State.QUEUED):
            store.ask(job.id, JobEnding.ABORT)
            here.submit("greedy", seconds)
    late = here.submit("cid", 5.0)
    before = len(here.begun)
    while late not in here.begun:
        here.step()
    assert len(here.begun) - before <= 3  # each of the others once
    assert here.used["greedy"] <= 3 * (here.used["bob"] + 5.0) + seconds


def test_who_was_idle_has_saved_nothing_and_owes_nothing(store: ServiceStore, clock: Clock) -> None:
    here = Simulation(store, 1)
    here.submit("ann", 7200.0)
    while here.step():
        pass
    clock.now += DAY
    for user in ("ann", "bob") * 3:
        here.submit(user, 10.0)
    while here.step():
        pass
    assert [here.users[one] for one in here.begun[1:]] == ["ann", "bob"] * 3


def test_equal_users_wait_alike(store: ServiceStore) -> None:
    """With the same jobs of unequal lengths, on two workers."""
    here, draw = Simulation(store, 2), random.Random(3)
    names = [f"u{n}" for n in range(10)]
    for seconds in [draw.lognormvariate(1.5, 1.0) for _ in range(10)]:
        for user in names:
            here.submit(user, seconds)
    while here.step():
        pass
    mean = sum(here.waits.values()) / len(names)
    assert all(here.waits[one] == pytest.approx(mean, rel=0.2) for one in names)


def test_clocks_that_jump_and_lost_workers_charge_a_lease_at_most(
    store: ServiceStore, clock: Clock
) -> None:
    queue = Queue(store)

    def charged(what: Callable[[], object]) -> float:
        before = used(store).get("ann", 0.0)
        what()
        return used(store)["ann"] - before

    job = submit(store, "ann")
    assert charged(lambda: queue.claim("w", LEASE)) == LEASE
    clock.now += DAY
    assert charged(lambda: queue.renew(job, "w", LEASE)) == LEASE
    clock.now -= 2 * DAY
    assert charged(lambda: queue.renew(job, "w", LEASE)) == 0.0
    clock.now += LEASE + 1.0
    assert charged(queue.expire) == 0.0
    assert charged(lambda: queue.claim("w", LEASE)) == LEASE
    clock.now += 2.0
    assert charged(lambda: queue.finish(job, "w", DONE)) == 2.0 - LEASE


# --- Quotas, and why jobs wait -----------------------------------------------------------------


def test_a_job_says_why_it_waits(store: ServiceStore, clock: Clock) -> None:
    queue = Queue(store, QueueRules(running=1))
    jobs = [submit(store, "ann", priority) for priority in (0, 0, 1)]

    def why(job: str) -> str:
        found = store.get(job)
        return store.standing([found], 1).get(job, "") if found is not None else ""

    assert [*map(why, jobs)] == [
        f"{at} in your turn, you alone wait" for at in ("2nd", "3rd", "1st")
    ]
    assert queue.claim("w", LEASE).id == jobs[2]
    assert queue.claim("v", LEASE) is None  # as many run as may
    submit(store, "bob")
    assert queue.claim("v", LEASE).user == "bob"
    assert why(jobs[0]) == "1st in your turn, you have 1 job running, and may have 1"
    assert why(jobs[2]) == ""
    for _ in range(2):
        clock.now += LEASE + 1.0
        queue.expire()
        queue.claim("w", LEASE)
    assert why(jobs[2]) == "its worker was lost: it is begun again in 5 s"
    assert used(store)["ann"] >= 2 * LEASE


def test_who_is_held_back_saves_nothing_up(store: ServiceStore) -> None:
    here = Simulation(store, 3, QueueRules(running=2))
    store.weigh("ann", 4.0)
    for user in ("ann", "bob") * 16:
        here.submit(user, 10.0)
    for _ in range(16):
        here.step()
    assert used(store)["ann"] >= used(store)["bob"] - 20.0  # without it 5 more in each round


# --- Giving way --------------------------------------------------------------------------------


def test_a_job_gives_way_once_for_each_better_plan_and_goes_on(
    store: ServiceStore, clock: Clock
) -> None:
    queue, request = Queue(store, QueueRules(preempt_seconds=60.0)), parse_request("plan", LONG)
    anns, _ = store.submit("ann", "plan", LONG, limit_seconds=seconds_of(request))

    def gives_way() -> bool:
        clock.now += 61.0
        queue.renew(anns.id, "w", LEASE)
        return queue.give_way(anns.id, "w", LEASE, 61.0) is not None

    queue.claim("w", LEASE)
    first, second = submit(store, "bob"), submit(store, "bob")
    assert not gives_way()  # it has no plan
    found = plan(parse_request("plan", long_request(planner="dp"))).plan
    queue.improve(anns.id, "w", 3.0, 1.0, to_json(found))
    assert (
        Queue(store).give_way(anns.id, "w", LEASE, 61.0) is None
    )  # of a server that preempts nothing
    assert gives_way()
    kept = store.get(anns.id)
    assert (kept.state, kept.attempts, kept.cost) == (State.QUEUED, 0, 3.0)
    assert kept.spent_seconds == 61.0
    assert "gave way" in store.events(anns.id)[-1].data
    assert store.queued("ann") == (1, 600.0 - kept.spent_seconds)
    rest = json.loads(rest_of(kept))
    assert rest["time_limit"] == 600.0 - kept.spent_seconds
    assert rest["start"] == json.loads(kept.document)
    of_dp = replace(kept, request=long_request(planner="dp"))  # which starts from no plan
    assert json.loads(rest_of(of_dp)) == json.loads(of_dp.request) | {
        "time_limit": rest["time_limit"]
    }
    with pytest.raises(JobLeaseLostError):
        queue.renew(anns.id, "w", LEASE)
    queue.finish(first, "w", DONE)
    clock.now += 300.0
    queue.expire()
    claimed = {queue.claim("w", LEASE).id for _ in range(2)}
    assert claimed == {anns.id, second}
    third = submit(store, "bob")
    assert not gives_way()  # it has found nothing since
    queue.improve(anns.id, "w", 2.0, 1.0, "{}")
    assert gives_way()
    assert store.get(third).state is State.SOLVING
