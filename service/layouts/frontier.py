"""The best layout for each of several numbers of GPUs, or lengths of sequences.

A *cost* is GPU-hours, or dollars at a price; a row is on the Pareto front if no other row of its
sequences is faster and costs no more, or costs less and is as fast.
"""

from time import monotonic
from typing import Annotated, Self

from pydantic import Field, model_validator

from stagewright.formulations.forms.answers import Status, StopToken, is_stopped
from stagewright.formulations.parallelism.document import LayoutPlan
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.ranges import Fits
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.prices import Market
from stagewright.service.answers import CARRIED, Answer, Finite
from stagewright.service.layouts.explaining import layout_row
from stagewright.service.layouts.goodput import iterations_of
from stagewright.service.layouts.requests import LayoutAnswer, LayoutRequest, LayoutRow
from stagewright.service.layouts.searching import find_layouts
from stagewright.service.requests import Request
from stagewright.solvers.parallelism.tree import compiled_walk

_HOUR, _DAY = 3600.0, 86_400.0
_TOKENS = 1e9
"""Of which a row has the time and the cost where the request has no tokens."""
STOPPED = "stopped before it was searched"


class FrontierRequest(Request):
    """Compare the best layouts of several problems, such as numbers of GPUs.

    The time limit of each of ``layouts`` is its own.
    """

    layouts: tuple[LayoutRequest, ...] = Field(min_length=1)
    price: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Dollars of a GPU-hour, spare servers included."""
    deadline_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Choose the cheapest layout that trains all tokens in so many seconds."""

    @model_validator(mode="after")
    def _require_tokens(self) -> Self:
        tokens = {one.tokens for one in self.layouts}
        if len(tokens) > 1:
            raise InputError("layouts must all train the same number of tokens")
        if self.deadline_seconds is not None and tokens == {None}:
            raise InputError("deadline_seconds needs tokens, the length of the training")
        return self


class FrontierRow(Answer):
    """The best layout of a problem; without one the ``reason``.

    Times have the failures of the request in them. The days, GPU-hours and dollars are of the
    request's tokens, or of a billion; measured days are expected from ``days_low`` to
    ``days_high``, and no layout of its class takes less than ``bound_days``. ``meets`` says whether
    the deadline is met in the whole range of days, within it, or nowhere.
    """

    gpus: int
    sequence: int
    status: Status
    reason: str | None = None
    layout: str | None = None
    seconds: Finite = None
    bound_seconds: Finite = None
    tokens_per_second: Finite = None
    mfu: float | None = None
    peak_bytes: float | None = None
    fits: Fits | None = None
    days: Finite = None
    days_low: Finite = None
    days_high: Finite = None
    bound_days: Finite = None
    gpu_hours: Finite = None
    dollars: Finite = None
    is_pareto: bool = False
    meets: Fits | None = None

    @property
    def cost(self) -> float:
        """Dollars, or GPU-hours without a price."""
        found = self.gpu_hours if self.dollars is None else self.dollars
        return float("inf") if found is None else found


class FrontierAnswer(Answer):
    """A row for each problem; with a deadline the place of the cheapest that meets it.

    If none does, ``reason`` names the fastest, and says whether it is proved that no layout of the
    classes searched is fast enough. ``plan`` is the chosen layout.
    """

    rows: tuple[FrontierRow, ...]
    chosen: int | None = None
    reason: str | None = None
    rates: str
    tokens: float
    wall_seconds: float
    plan: Annotated[LayoutPlan | None, CARRIED] = None


def on_demand_price(market: Market, device: str) -> float:
    """Dollars of a GPU-hour: the cheapest instance on demand with this kind of GPU.

    Raises InputError if none has the kind, or a known price on demand.
    """
    instances = [one.instance for one in market.series]
    prices = [
        one.on_demand / one.gpus
        for one in instances
        if one.gpu.lower() == device.lower() and one.on_demand is not None
    ]
    if not prices:
        known = sorted({one.gpu for one in instances if one.on_demand is not None})
        raise InputError(
            f"the prices have no {device} on demand, only {', '.join(known) or 'spot instances'}"
        )
    return min(prices)


def find_frontier(request: FrontierRequest, ended: StopToken | None = None) -> FrontierAnswer:
    """The best layout of each problem, what it costs, and which are on the Pareto front."""
    began = monotonic()
    found = [_searched(request, one, ended) for one in request.layouts]
    every = [row for row, _ in found]
    rows = [row.model_copy(update={"is_pareto": _is_pareto(row, every)}) for row in every]
    chosen = _chosen(request, rows)
    return FrontierAnswer(
        rows=tuple(rows),
        chosen=chosen,
        reason=_reason(request, rows) if chosen is None else None,
        rates=str(request.layouts[0].problem.rates),
        tokens=request.layouts[0].tokens or _TOKENS,
        wall_seconds=monotonic() - began,
        plan=None if chosen is None else found[chosen][1],
    )


def _searched(
    request: FrontierRequest, of: LayoutRequest, ended: StopToken | None
) -> tuple[FrontierRow, LayoutPlan | None]:
    fabric, sequence = of.problem.fabric, of.problem.sequence
    none = FrontierRow(gpus=fabric.devices, sequence=sequence, status=Status.INFEASIBLE)
    if is_stopped(ended):
        return none.model_copy(update={"status": Status.INTERRUPTED, "reason": STOPPED}), None
    try:
        answer = find_layouts(of, stop=ended)
    except InputError as error:
        return none.model_copy(update={"reason": str(error)}), None
    if answer.plan is None:
        update = {"status": answer.status, "reason": answer.reason}
        return none.model_copy(update=update), None
    one = evaluate(of.problem, answer.plan.layout, compiled_walk())
    return _row(request, of, answer, layout_row(of.problem, one, one)), answer.plan


def _row(
    request: FrontierRequest, of: LayoutRequest, answer: LayoutAnswer, row: LayoutRow
) -> FrontierRow:
    """The row of an answer with a layout."""
    assert answer.plan is not None
    problem, failures = of.problem, answer.failures
    seconds, bound = row.seconds, answer.plan.bound.seconds if answer.plan.bound else 0.0
    if failures is not None:
        seconds = failures.effective_seconds or float("inf")
        bound = failures.bound_effective_seconds or float("inf")
    tokens = problem.batch * problem.sequence
    # Of all iterations, which are whole, or of a part of some for a billion tokens.
    count = iterations_of(of) or _TOKENS / tokens
    days = count * seconds / _DAY
    low, high = (days * one / row.seconds for one in (row.seconds_low, row.seconds_high))
    spares = 0 if of.failures is None else of.failures.spares * problem.fabric.per_server
    hours = (problem.fabric.devices + spares) * days * _DAY / _HOUR
    return FrontierRow(
        gpus=problem.fabric.devices,
        sequence=problem.sequence,
        status=answer.status,
        layout=row.layout,
        seconds=seconds,
        bound_seconds=bound,
        tokens_per_second=tokens / seconds,
        mfu=row.mfu,
        peak_bytes=row.peak_bytes,
        fits=row.fits,
        days=days,
        days_low=low,
        days_high=high,
        bound_days=count * bound / _DAY,
        gpu_hours=hours,
        dollars=None if request.price is None else hours * request.price,
        meets=_meets(request.deadline_seconds, low * _DAY, high * _DAY),
    )


def _meets(deadline: float | None, low: float, high: float) -> Fits | None:
    if deadline is None:
        return None
    return "yes" if high <= deadline else "within the range" if low <= deadline else "no"


def _is_pareto(row: FrontierRow, every: list[FrontierRow]) -> bool:
    """Whether no row of the same sequences is better in days or cost and no worse in the other."""
    if row.days is None:
        return False
    others = [
        (other.days, other.cost)
        for other in every
        if other.days is not None and other.sequence == row.sequence
    ]
    mine = row.days, row.cost
    return not any(
        days <= mine[0] and cost <= mine[1] and (days, cost) != mine for days, cost in others
    )


def _chosen(request: FrontierRequest, rows: list[FrontierRow]) -> int | None:
    """The place of the cheapest row that meets the deadline, of equal ones with fewest GPUs."""
    if request.deadline_seconds is None:
        return None
    limit = request.deadline_seconds / _DAY
    able = [n for n, row in enumerate(rows) if row.days is not None and row.days <= limit]
    return min(able, key=lambda n: (rows[n].cost, rows[n].gpus), default=None)


def _reason(request: FrontierRequest, rows: list[FrontierRow]) -> str | None:
    """Why no row is chosen; None without a deadline where some row has a layout."""
    fastest = min(
        (row for row in rows if row.days is not None),
        key=lambda row: row.days or 0.0,
        default=None,
    )
    if fastest is None:
        return "none of them has a layout that fits; each has its reason"
    if request.deadline_seconds is None:
        return None
    limit = request.deadline_seconds / _DAY
    proved = all(
        row.status is Status.INFEASIBLE if row.bound_days is None else row.bound_days > limit
        for row in rows
    )
    how = "proved by the bounds" if proved else "the bounds do not rule it out"
    return (
        f"none trains all tokens in {limit:,.4g} d ({how}); the nearest takes "
        f"{fastest.days:,.1f} days on {fastest.gpus} GPUs"
    )
