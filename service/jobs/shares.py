"""Users' shares of the workers: whose turn it is, what each has used, and why a job waits.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each user has a virtual time: the
seconds of workers used, divided by the user's weight. Whoever waits with the least has the next
turn. How long a job takes is not known before; so its worker's lease is paid at the claim and at
each renewal, and what is left of it is given back at the end, as Kubernetes corrects its guess of
a request's time (API priority and fairness). The system's virtual time is the least of those who
wait, without the leases that they have paid ahead: a user who begins to wait starts there at least,
and so has saved up nothing. While nobody waits nothing is owed: it is the greatest of those who run
then, or else of all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Float, Subquery, bindparam, case, func, select, text, update

from stagewright.service.jobs.records import ServiceJob, State
from stagewright.service.jobs.rows import JOBS, SHARES

# The place of a job in the turn of its user, of those that a query has.
PLACE = (
    func.row_number()
    .over(
        partition_by=JOBS.c.user,
        order_by=(JOBS.c.priority.desc(), JOBS.c.created, JOBS.c.id),
    )
    .label("place")
)
_QUEUED = JOBS.c.state == State.QUEUED
_RUNNING = JOBS.c.state == State.SOLVING
_ENTER = text(
    'INSERT INTO shares ("user", weight, virtual_seconds, since) VALUES (:user, 1, :at, :now) '
    'ON CONFLICT ("user") DO UPDATE SET since = :now, virtual_seconds = '
    "CASE WHEN shares.virtual_seconds < :at THEN :at ELSE shares.virtual_seconds END"
)
_WEIGH = text(
    'INSERT INTO shares ("user", weight, virtual_seconds, since) VALUES (:user, :weight, 0, 0) '
    'ON CONFLICT ("user") DO UPDATE SET weight = :weight'
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A user who waits, with the virtual time and the number of running jobs."""

    user: str
    virtual_seconds: float
    running: int


def _users_waiting() -> Subquery:
    """Each user with queued jobs: one look into the index for each, however many jobs there are."""
    users = select(func.min(JOBS.c.user).label("user")).where(_QUEUED).cte(recursive=True)
    after = select(func.min(JOBS.c.user)).where(_QUEUED, JOBS.c.user > users.c.user)
    following = select(after.scalar_subquery()).where(users.c.user.is_not(None))
    users = users.union_all(following)
    return select(users.c.user).where(users.c.user.is_not(None)).subquery()


_WAITING = _users_waiting()
_COUNTS = (
    select(JOBS.c.user, func.count().label("running")).where(_RUNNING).group_by(JOBS.c.user)
).subquery()
# A user whose first job an older server of the store has queued has no share yet.
_VIRTUAL = func.coalesce(SHARES.c.virtual_seconds, 0.0)
_TURNS = (
    select(_WAITING.c.user, _VIRTUAL, func.coalesce(_COUNTS.c.running, 0))
    .outerjoin(SHARES, _WAITING.c.user == SHARES.c.user)
    .outerjoin(_COUNTS, _COUNTS.c.user == _WAITING.c.user)
    .order_by(_VIRTUAL, SHARES.c.since, _WAITING.c.user)
)
_LEFT = JOBS.c.leased_until - bindparam("now", type_=Float)
_PAID = (
    select(JOBS.c.user, func.sum(case((_LEFT > 0, _LEFT), else_=0.0)).label("ahead"))
    .where(_RUNNING)
    .group_by(JOBS.c.user)
).subquery()
_USED = SHARES.c.virtual_seconds - func.coalesce(_PAID.c.ahead, 0.0) / SHARES.c.weight
_NOW = select(
    func.coalesce(
        select(func.min(_USED))
        .select_from(SHARES)
        .join(_WAITING, _WAITING.c.user == SHARES.c.user)
        .outerjoin(_PAID, _PAID.c.user == SHARES.c.user)
        .scalar_subquery(),
        select(func.max(_USED))
        .select_from(SHARES)
        .join(_PAID, _PAID.c.user == SHARES.c.user)
        .scalar_subquery(),
        select(func.max(SHARES.c.virtual_seconds)).scalar_subquery(),
        0.0,
    )
)


def turns(database: Connection) -> list[Turn]:
    """The users who wait, in the order of their turns."""
    return [Turn(*row) for row in database.execute(_TURNS)]


def enter(database: Connection, user: str, now: float) -> None:
    """Before a job is queued: a user who does not wait yet starts at the system's virtual time."""
    waits = select(JOBS.c.id).where(_QUEUED, JOBS.c.user == user).limit(1)
    if database.execute(waits).first() is None:
        at = database.execute(_NOW, {"now": now}).scalar_one()
        database.execute(_ENTER, {"user": user, "at": at, "now": now})


def charge(database: Connection, user: str, seconds: float, now: float) -> None:
    """Add seconds of a worker, below 0 those that are given back, to what a user has used."""
    used = SHARES.c.virtual_seconds + seconds / SHARES.c.weight
    charged = update(SHARES).where(SHARES.c.user == user).values(virtual_seconds=used)
    if not database.execute(charged).rowcount:
        at = database.execute(_NOW, {"now": now}).scalar_one()
        database.execute(_ENTER, {"user": user, "at": at + seconds, "now": now})


def keep_up(database: Connection, users: Sequence[str], virtual_seconds: float) -> None:
    """Users whom their quota holds back save nothing up behind the one whose turn it is."""
    behind = SHARES.c.user.in_(users), SHARES.c.virtual_seconds < virtual_seconds
    database.execute(update(SHARES).where(*behind).values(virtual_seconds=virtual_seconds))


def weigh(database: Connection, user: str, weight: float) -> None:
    """Set the weight of a user, 1 by default."""
    database.execute(_WEIGH, {"user": user, "weight": weight})


def standing(
    database: Connection, jobs: Iterable[ServiceJob], now: float, most_running: int | None
) -> dict[str, str]:
    """Why each of the jobs that is queued waits, in words."""
    queued = {one.id: one for one in jobs if one.state is State.QUEUED}
    mine = JOBS.c.user.in_({one.user for one in queued.values()})
    places = select(JOBS.c.id, JOBS.c.due, PLACE).where(_QUEUED, mine).subquery()
    waiting = turns(database)
    running = {one.user: one.running for one in waiting}
    users = "you alone wait" if len(waiting) < 2 else f"{len(waiting)} users wait"
    found = dict[str, str]()
    for job, due, at in database.execute(select(places).where(places.c.id.in_(queued))):
        count = running.get(queued[job].user, 0)
        held = most_running is not None and count >= most_running
        of = "1 job" if count == 1 else f"{count} jobs"
        why = f"you have {of} running, and may have {most_running}" if held else users
        found[job] = f"{_ordinal(at)} in your turn, {why}"
        if due > now:
            found[job] = f"its worker was lost: it is begun again in {due - now:.0f} s"
    return found


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"
