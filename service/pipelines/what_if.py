"""What one more GB, device or faster link would buy: the plans of a cluster that is changed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.parts import with_faster_links, with_one_more
from stagewright.service.engines import HERE, Engine, Pieces, results
from stagewright.service.pipelines.answers import PlanAnswer, WhatIfAnswer, WhatIfRow
from stagewright.service.pipelines.planning import plan, repriced
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.solvers.planning import PLANNERS

T = TypeVar("T")
GB = 1e9
_FASTER = 2.0  # times the bandwidth

OnRow = Callable[[WhatIfRow], None]


def what_if(
    request: PlanRequest,
    on_row: OnRow = lambda _: None,
    stop: StopToken | None = None,
    engine: Engine = HERE,
) -> WhatIfAnswer:
    """Plan as things are and with each change, and compare plans that know of each other.

    Each change is planned from the plan as things are, and things as they are again from the plan
    of each change that seems to save, so that no side is better for a luckier search. Every search
    has the time limit of ``request``. A change that the cluster does not admit is left out. The
    changes are planned by ``engine``, which may plan several at a time. ``on_row`` is told of each
    row as it compares with the plans so far, the answer's rows compare with all.

    Raises
    ------
    InputError
        If the request is refused.
    """
    base = plan(request, stop=stop)
    items = [_Change(change, changed, request, base) for change, changed in changes(request)]
    tried: dict[int, _Tried] = {}
    for number, one in results(Pieces(items, _try, _lost), engine, stop):
        tried[number] = one
        if one.again is not None:  # a bound of either is one of both
            base = _cheaper(repriced(request, base, one.again.plan), one.again)
        on_row(_row(items[number], one, base))
    status = "interrupted" if is_stopped(stop) else "done"
    rows = tuple(_row(items[number], tried[number], base) for number in sorted(tried))
    return WhatIfAnswer(status=status, base=base, rows=rows)


@dataclass(frozen=True, slots=True)
class _Change:
    """A change in words, the request with it, the request without it and its plan."""

    change: str
    request: PlanRequest
    without: PlanRequest
    base: PlanAnswer


@dataclass(frozen=True, slots=True)
class _Tried:
    """The plan with a change, and the plan without it that was found from that."""

    plan: PlanAnswer | None
    again: PlanAnswer | None = None
    lost: str = ""


def changes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Each change in words, and the request with it."""
    cluster, limit = request.cluster, request.memory_limit_bytes
    more = tuple(replace(one, memory_bytes=one.memory_bytes + GB) for one in cluster.devices)
    raised = None if limit is None else limit + GB
    yield (
        "1 GB more memory on every device",
        _with(request, cluster=replace(cluster, devices=more), memory_limit_bytes=raised),
    )
    for where, within in (("within", True), ("between", False)):
        faster = _made(partial(with_faster_links, cluster, _FASTER, within))
        if faster is not None:
            yield f"links {where} servers twice as fast", _with(request, cluster=faster)
    grown = _made(partial(with_one_more, cluster))
    if grown is not None:
        yield grown[1], _with(request, cluster=grown[0])


def _made(make: Callable[[], T]) -> T | None:
    """What ``make`` gives; None if the cluster does not admit it."""
    try:
        return make()
    except InputError:
        return None


def _with(request: PlanRequest, **changes: Any) -> PlanRequest:
    return PlanRequest.of(**(request.given() | changes))


def _try(one: _Change, stop: StopToken | None) -> _Tried:
    found = plan(_from(one.request, one.base), stop=stop)
    if _cheaper(one.base, found) is one.base:
        return _Tried(found)
    start = _from(one.without, found)
    again = one.base if start is one.without else plan(start, stop=stop)
    return _Tried(found, repriced(one.without, again, found.plan))


def _from(request: PlanRequest, known: PlanAnswer) -> PlanRequest:
    """The request, which starts from the known plan where its planner can."""
    planner = PLANNERS.get(request.planner)
    able = planner is not None and planner.options.start and request.batch is None
    if not able or request.order or request.runtime or request.tensor or known.plan is None:
        return request
    return _with(request, start=known.plan)


def _cheaper(one: PlanAnswer, other: PlanAnswer | None) -> PlanAnswer:
    """The answer with the shorter plan, the first of equal ones."""
    if other is None or other.cost_seconds is None:
        return one
    is_shorter = one.cost_seconds is None or other.cost_seconds < one.cost_seconds
    return other if is_shorter else one


def _row(one: _Change, tried: _Tried, base: PlanAnswer) -> WhatIfRow:
    if tried.plan is None:
        return WhatIfRow(change=one.change, status="failed", reason=tried.lost)
    found = repriced(one.request, tried.plan, base.plan)
    cost, bound, before = found.cost_seconds, found.bound_seconds, base.cost_seconds
    plans = found.result.plans
    return WhatIfRow(
        change=one.change,
        status=found.status.value,
        cost_seconds=cost,
        bound_seconds=bound,
        saved_seconds=None if cost is None or before is None else before - cost,
        most_seconds=None if bound is None or before is None else before - bound,
        plans=None if plans is None else str(plans),
        reason=found.reason,
    )


def _lost(_: _Change, why: str) -> _Tried:
    return _Tried(None, lost=why)
