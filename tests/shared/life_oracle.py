"""The planning service as its documentation tells of it: dictionaries, no database, no HTTP."""

from collections import defaultdict
from dataclasses import dataclass, field

LEASE = 15.0  # seconds of silence after which a job is queued again
# Seconds until a job is begun again when its server was lost once, twice, ...; then it ends.
LOSSES = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0)
PAUSES = (30.0, 120.0, 480.0, 1920.0, 7680.0, 30720.0)  # seconds between deliveries
LOOKED = 5.0  # seconds after which a job that waits may take the place of another
ENDED = ("optimal", "feasible", "infeasible", "failed")


@dataclass
class KnownJob:
    """A job, with the names that ``GET /v1/jobs/ID`` gives to what it tells."""

    id: str
    user: str
    kind: str
    body: str
    created: float
    priority: int = 0
    webhook: bool = False
    state: str = "queued"
    stopped_by: str | None = None
    cost: float | None = None
    bound: float | None = None
    document: str | None = None
    answer: str | None = None
    cached: bool = False
    started: float | None = None
    finished: float | None = None
    worker: str | None = None
    heard: float = 0.0
    spared: bool = False  # gave way, and has found nothing better since
    asked: str | None = None
    losses: int = 0
    due: float = 0.0
    names: list[str] = field(default_factory=lambda: ["queued"])

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_complete(self) -> bool:
        return self.state in ("optimal", "infeasible") and self.stopped_by is None


@dataclass
class KnownDelivery:
    """A webhook that is due at a time, and has failed so often."""

    job: str
    user: str
    due: float
    failures: int = 0
    id: str | None = None


@dataclass
class KnownShare:
    """What a user has used, in seconds of workers by weight, and since when the user waits."""

    weight: float = 1.0
    used: float = 0.0
    since: float = 0.0


class Oracle:
    """Jobs by id, in the order of their submission.

    A user has at most so many jobs in the queue, and running at a time; a job with a plan gives way
    after so many seconds.
    """

    def __init__(
        self, most_queued: int, most_running: int | None = None, preempt: float | None = None
    ) -> None:
        self.most_queued, self.most_running, self.preempt = most_queued, most_running, preempt
        self.shares: defaultdict[str, KnownShare] = defaultdict(KnownShare)
        self.jobs: dict[str, KnownJob] = {}
        self.keys: dict[tuple[str, str], str] = {}
        self.deliveries: list[KnownDelivery] = []

    # --- What users ask ---

    def mine(self, user: str) -> list[KnownJob]:
        """The newest first."""
        return [one for one in reversed(self.jobs.values()) if one.user == user]

    def complete(self, kind: str, body: str) -> list[KnownJob]:
        """Jobs whose answer a request has at once."""
        return [
            one for one in self.jobs.values()
            if one.is_complete and (one.kind, one.body) == (kind, body)
        ]  # fmt: skip

    def queue_is_full(self, user: str) -> bool:
        queued = [one for one in self.jobs.values() if (one.user, one.state) == (user, "queued")]
        return len(queued) >= self.most_queued

    def add(self, job: KnownJob, source: KnownJob | None, key: str | None) -> None:
        if source is None:
            self.enter(job.user, job.created)
        self.jobs[job.id] = job
        if key is not None:
            self.keys[job.user, key] = job.id
        if source is not None:
            job.names = []
            job.cached, job.cost, job.bound = True, source.cost, source.bound
            job.document, job.answer = source.document, source.answer
            self.end(job, source.state, None, job.created)

    def change(self, job: KnownJob, verb: str, now: float) -> int:
        """Stop, abort, retry or discard a job; the status of the answer."""
        if verb == "retry":
            if self.queue_is_full(job.user):
                return 429
            if job.state not in ("failed", "feasible"):
                return 409
            self.retry(job, now)
        elif verb == "discard":
            if not job.has_ended:
                return 409
            self.discard(job)
            return 204
        elif job.has_ended:
            return 409
        else:
            self.ask(job, verb, now)
        return 200

    def ask(self, job: KnownJob, verb: str, now: float) -> None:
        """Stop or abort what has not ended."""
        if job.state == "solving":
            job.names.append("asked")
            job.asked = "abort" if "abort" in (verb, job.asked) else "stop"
        else:
            self.end_with_best(job, verb, "user", now)

    def retry(self, job: KnownJob, now: float) -> None:
        self.enter(job.user, now)
        job.spared = False
        job.state, job.stopped_by, job.asked = "queued", None, None
        job.losses, job.due = 0, 0.0
        job.finished = job.started = None
        job.names.append("queued")
        self.deliveries = [one for one in self.deliveries if one.job != job.id]

    def discard(self, job: KnownJob) -> None:
        del self.jobs[job.id]
        self.keys = {key: one for key, one in self.keys.items() if one != job.id}
        self.deliveries = [one for one in self.deliveries if one.job != job.id]

    # --- What workers do ---

    def enter(self, user: str, now: float) -> None:
        """A user who begins to wait has saved up nothing: the least that others have used is used.

        What they have paid ahead is not used yet. While nobody waits nothing is owed.
        """
        queued, solving = (
            [self.without_leases(one.user, now) for one in self.jobs.values() if one.state == state]
            for state in ("queued", "solving")
        )
        if any(one.state == "queued" for one in self.mine(user)):
            return
        everybody = [one.used for one in self.shares.values()]
        at = min(queued) if queued else max(solving or everybody, default=0.0)
        share = self.shares[user]
        share.used, share.since = max(share.used, at), now

    def without_leases(self, user: str, now: float) -> float:
        ahead = sum(
            max(0.0, one.heard + LEASE - now) for one in self.mine(user) if one.state == "solving"
        )
        return self.shares[user].used - ahead / self.shares[user].weight

    def charge(self, user: str, seconds: float) -> None:
        self.shares[user].used += seconds / self.shares[user].weight

    def is_held_back(self, user: str) -> bool:
        running = sum(one.state == "solving" for one in self.mine(user))
        return self.most_running is not None and running >= self.most_running

    def next(self, now: float) -> KnownJob | None:
        """Of the user who has used the least of those who may run one: the first of their jobs."""
        queued = [one for one in self.jobs.values() if one.state == "queued" and one.due <= now]
        return min(
            (one for one in queued if not self.is_held_back(one.user)), key=self.turn, default=None
        )

    def turn(self, job: KnownJob) -> tuple[float, ...]:
        share = self.shares[job.user]
        # Of users who have used as much, who has waited for longer, then by name.
        return (share.used, share.since, *map(float, job.user.encode()), 0.0, -job.priority)

    def claim(self, job: KnownJob, worker: str, now: float) -> None:
        """A worker's time is paid with its lease."""
        used = self.shares[job.user].used
        for user in {one.user for one in self.jobs.values() if one.state == "queued"}:
            if self.is_held_back(user):  # and saves nothing up
                self.shares[user].used = max(used, self.shares[user].used)
        self.charge(job.user, LEASE)
        job.state, job.worker, job.heard, job.asked = "solving", worker, now, None
        job.started = now
        job.names.append("solving")

    def renew(self, job: KnownJob, now: float) -> None:
        """What was used since it was heard of is paid, a lease at most."""
        self.charge(job.user, min(max(0.0, now - job.heard), LEASE))
        job.heard = now

    def give_back_lease(self, job: KnownJob, now: float) -> None:
        assert job.started is not None
        self.charge(job.user, -max(0.0, job.heard + LEASE - max(now, job.started)))

    def gives_way(self, job: KnownJob, now: float) -> KnownJob | None:
        """The job that begins in place of this one: another user's, who has used less, without one.

        Of the jobs with a plan that have run for so long, that of who has used the most gives way,
        and none twice before it has found a better plan.
        """
        if self.preempt is None:
            return None
        may = [
            one for one in self.jobs.values()
            if one.state == "solving" and one.document is not None and one.asked is None
            and now - (one.started or 0.0) >= self.preempt and not one.spared
        ]  # fmt: skip
        first = min(
            may, key=lambda one: (-self.shares[one.user].used, one.started, one.id), default=None
        )
        waiting = [
            one for one in self.jobs.values()
            if one.state == "queued" and one.document is None
            and max(one.created, one.due) <= now - LOOKED and not self.is_held_back(one.user)
            and self.shares[one.user].used < self.shares[job.user].used
        ]  # fmt: skip
        return min(waiting, key=self.turn, default=None) if first is job else None

    def give_way(self, job: KnownJob, other: KnownJob, worker: str, now: float) -> None:
        self.claim(other, worker, now)
        self.give_back_lease(job, now)
        job.spared = True
        self.queue_again(job, now)

    def improve(self, job: KnownJob, cost: float, bound: float, document: str) -> None:
        """A plan that a worker has found, and a bound of all plans."""
        if job.cost is None or cost < job.cost:
            job.cost, job.document, job.answer = cost, document, None
            job.spared = False
        job.bound = bound if job.bound is None else max(bound, job.bound)

    def answer(self, job: KnownJob, cost: float, bound: float, document: str, answer: str) -> None:
        """The last plan of a search, with its bound; an earlier one that is better stays."""
        if job.cost is None or cost <= job.cost:
            job.cost, job.bound, job.document, job.answer = cost, bound, document, answer

    def expire(self, now: float) -> list[KnownJob]:
        lost = [
            one for one in self.jobs.values()
            if one.state == "solving" and now > one.heard + LEASE
        ]  # fmt: skip
        for job in lost:
            job.losses += 1
            if job.asked is not None:
                self.end_with_best(job, job.asked, "user", now)
            elif job.losses > len(LOSSES):
                self.end_with_best(job, "stop", "lost", now)
            else:
                self.queue_again(job, now)
                job.due = now + LOSSES[job.losses - 1]
        return lost

    def give_back(self, job: KnownJob, now: float) -> None:
        """The server is stopped in good order."""
        self.give_back_lease(job, now)
        if job.asked is not None:
            self.end_with_best(job, job.asked, "user", now)
        else:
            self.queue_again(job, now)

    def queue_again(self, job: KnownJob, now: float) -> None:
        self.enter(job.user, now)
        job.state, job.worker = "queued", None
        job.names.append("queued")

    # --- Ends ---

    def end_with_best(self, job: KnownJob, verb: str, by: str, now: float) -> None:
        has_answer = verb != "abort" and job.document is not None
        self.end(job, "feasible" if has_answer else "failed", by, now)

    def end(self, job: KnownJob, state: str, by: str | None, now: float) -> None:
        job.state, job.stopped_by, job.finished, job.worker = state, by, now, None
        job.names.append(state)
        if state == "failed":
            job.answer = None
        if job.webhook:
            self.deliveries.append(KnownDelivery(job.id, job.user, now))
