"""What one more GB, device or faster link would buy: the plans of a cluster that is changed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.parts import with_faster_links, with_one_more
from stagewright.service.engines import HERE, Engine, Pieces, results
from stagewright.service.pipeline_answers import PlanAnswer
from stagewright.service.pipeline_requests import PlanRequest
from stagewright.service.planning import plan
from stagewright.service.what_if_answers import WhatIfAnswer, WhatIfRow
from stagewright.solvers.planning import PLANNERS

T = TypeVar("T")
GB = 1e9
FASTER = 2.0  # times the bandwidth

OnRow = Callable[[WhatIfRow], None]


def what_if(
    request: PlanRequest,
    on_row: OnRow = lambda _: None,
    stop: StopToken | None = None,
    engine: Engine = HERE,
) -> WhatIfAnswer:
    """Plan as things are, then with each change, from the plan as things are.

    Every plan has the time limit of ``request``. A change that the cluster does not admit is left
    out. The changes are planned by ``engine``, which may plan several at a time.

    Raises
    ------
    InputError
        If the request is refused.
    """
    base = plan(request, stop=stop)
    items = [
        _Change(change, _from(changed, base), base.cost_seconds)
        for change, changed in changes(request)
    ]
    rows: dict[int, WhatIfRow] = {}
    for number, row in results(Pieces(items, _row, _lost), engine, stop):
        rows[number] = row
        on_row(row)
    status = "interrupted" if is_stopped(stop) else "done"
    return WhatIfAnswer(
        status=status, base=base, rows=tuple(rows[number] for number in sorted(rows))
    )


@dataclass(frozen=True, slots=True)
class _Change:
    """A change in words, the request with it, and the cost as things are."""

    change: str
    request: PlanRequest
    before: float | None


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
        faster = _made(partial(with_faster_links, cluster, FASTER, within))
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


def _from(request: PlanRequest, base: PlanAnswer) -> PlanRequest:
    """The request, which starts from the plan as things are where its planner can."""
    known = PLANNERS.get(request.planner)
    able = known is not None and known.options.start and request.batch is None
    if not able or request.order or request.runtime or request.tensor or base.plan is None:
        return request
    return _with(request, start=base.plan)


def _row(one: _Change, stop: StopToken | None) -> WhatIfRow:
    found = plan(one.request, stop=stop)
    cost, bound, before = found.cost_seconds, found.bound_seconds, one.before
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


def _lost(one: _Change, why: str) -> WhatIfRow:
    return WhatIfRow(change=one.change, status="failed", reason=why)
