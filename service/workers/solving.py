"""The process of a job: it answers one request, and tells the worker of every better answer."""

import math
import os
import threading
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from stagewright.formulations.forms.answers import Progress, Status
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.documents.errors import InputError
from stagewright.service.answers import Answer
from stagewright.service.jobs.kinds import KINDS, parse_request
from stagewright.service.jobs.records import JobEnd, State, StoppedBy
from stagewright.service.whole_answers import written

STOP = "stop"
_NEARLY = 0.9  # of its time limit, after which a search has probably been ended by it
_STATES = {
    Status.OPTIMAL: State.OPTIMAL,
    Status.FEASIBLE: State.FEASIBLE,
    Status.INFEASIBLE: State.INFEASIBLE,
    Status.UNBOUNDED: State.INFEASIBLE,
    Status.NO_ANSWER: State.FAILED,
}


@dataclass(frozen=True, slots=True)
class Better:
    """A better answer so far, with its document if there is one, or a better bound.

    ``plans`` is the class of plans that the bound is of, where it is known; ``doing`` what is done
    before the search, such as the kernel that is compiled.
    """

    cost: float | None
    bound: float | None
    document: str | None
    plans: dict[str, Any] | None
    doing: str = ""


def solve(connection: Connection, kind: str, request: str) -> None:
    """Answer a request; sends every `Better` answer, then the `JobEnd`.

    ``STOP`` from the other end ends the search with its best answer. When the other end is gone,
    so is this process.
    """
    os.setsid()  # a group of its own, so that it is killed with its children
    stop = threading.Event()
    threading.Thread(target=_listen, args=(connection, stop), daemon=True).start()
    try:
        outcome = _answered(connection, kind, request, stop)
    except InputError as error:
        outcome = JobEnd(State.FAILED, reason=str(error))
    except MemoryError:
        reason = "out of memory"
        outcome = JobEnd(State.FAILED, reason=reason, stopped_by=StoppedBy.MEMORY)
    connection.send(outcome)


def _listen(connection: Connection, stop: threading.Event) -> None:
    try:
        while connection.recv() == STOP:
            stop.set()
    except (EOFError, OSError):
        os._exit(1)


def _answered(connection: Connection, kind: str, request: str, stop: threading.Event) -> JobEnd:
    least = float("inf")

    def report(progress: Progress) -> None:
        nonlocal least
        cost, better = progress.objective, None
        if cost is not None and cost < least and progress.best is not None:
            least = cost
            better = _document(progress.best())
        bound = progress.bound if math.isfinite(progress.bound) else None
        plans = None if progress.plans is None else asdict(progress.plans)
        connection.send(Better(cost, bound, better, plans, progress.doing))

    asked, began = parse_request(kind, request), monotonic()
    answer = KINDS[kind].answer(asked, report, stop)
    if stop.is_set():
        return outcome_of(answer, StoppedBy.USER)
    limit = asked.given().get("time_limit")
    late = limit is not None and monotonic() - began > _NEARLY * limit
    return outcome_of(answer, StoppedBy.TIME if late else None)


def outcome_of(answer: Answer, stopped_by: StoppedBy | None = None) -> JobEnd:
    """How a job ends with this answer; ``stopped_by`` is what may have ended its search."""
    told = answer.json_object()
    state, by = _state(told, stopped_by)
    return JobEnd(
        state,
        answer=written(answer),
        document=_document(getattr(answer, "plan", None)),
        reason=str(told.get("reason") or ""),
        stopped_by=by,
        cost=told.get("cost_seconds"),
        bound=told.get("bound_seconds"),
    )


def _state(told: dict[str, Any], stopped_by: StoppedBy | None) -> tuple[State, StoppedBy | None]:
    """The state of an answer by its status; an answer without one is complete.

    A search may also end by itself without a proof: then nothing has stopped it.
    """
    status = told.get("status")
    if status == Status.INTERRUPTED:
        found = told.get("cost_seconds") is not None or told.get("rows") is not None
        return (State.FEASIBLE if found else State.FAILED), stopped_by or StoppedBy.USER
    if status in _STATES:
        state = _STATES[Status(status)]
        return state, None if state in (State.OPTIMAL, State.INFEASIBLE) else stopped_by
    return State.OPTIMAL, None


def _document(found: object) -> str | None:
    return to_json(found) if isinstance(found, PipelinePlan) else None
