"""The states of a job, and the records that the store has of it."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where a job is in its life; requests are validated before they are queued."""

    QUEUED = "queued"
    SOLVING = "solving"
    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    FAILED = "failed"


ENDED = (State.OPTIMAL, State.FEASIBLE, State.INFEASIBLE, State.FAILED)


class StoppedBy(StrEnum):
    """What ended a job before its search was complete."""

    USER = "user"
    TIME = "time"
    MEMORY = "memory"
    LOST = "lost"


class JobEnding(StrEnum):
    """What a user asks of a running job: to end with its best answer, or at once without one."""

    STOP = "stop"
    ABORT = "abort"


class DeliveryState(StrEnum):
    """How far the delivery of a webhook is: it is tried until it arrives, or is given up."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """The delivery of a webhook after so many attempts; ``reason`` is how the last one failed."""

    state: DeliveryState
    attempts: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ServiceJob:
    """A job: what was asked, where it is, and the best of its answers so far.

    ``attempts`` are the times that it was begun, without those whose server was lost, which are
    its ``losses``, or was stopped. ``cost`` and ``bound`` are those of the answer in its own unit,
    ``answer`` is its JSON object and ``document`` the document that it carries (a plan). Times are
    seconds since 1970. ``cached_from`` is the job whose answer this one has, ``cached_user`` whose
    job that is, ``title`` names its model and cluster, and ``webhook`` is the URL that is told of
    its end, of which ``delivery`` says whether it has been. ``user_class`` is the scope with which
    it was submitted, or ``local``, and ``trace`` the traceparent of its submission.
    ``limit_seconds`` is how long it may be searched for, of which ``spent_seconds`` were used
    before it gave way to another job.
    """

    id: str
    kind: str
    user: str
    state: State
    request: str
    digest: str
    priority: int
    created: float
    started: float | None
    finished: float | None
    stopped_by: StoppedBy | None
    asked: JobEnding | None
    attempts: int
    losses: int
    cost: float | None
    bound: float | None
    answer: str | None
    document: str | None
    reason: str
    cached_from: str | None
    title: str
    webhook: str | None
    delivery: DeliveryRecord | None
    cached_user: str | None
    user_class: str | None
    trace: str | None
    limit_seconds: float | None
    spent_seconds: float

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job; ``number`` counts over all jobs and never repeats."""

    number: int
    job: str
    at: float
    name: str
    data: str


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended: the argument of `Queue.finish`."""

    state: State
    answer: str | None = None
    document: str | None = None
    reason: str = ""
    stopped_by: StoppedBy | None = None
    cost: float | None = None
    bound: float | None = None
