"""The layouts of a training run: the best ones, one explained, the front, and what-if."""

from collections import Counter
from collections.abc import Iterator
from math import ceil, inf
from time import monotonic
from typing import Any

from stagewright.executor.export.layouts.rules import FrameworkRule
from stagewright.formulations.forms.answers import (
    Deadline,
    OnProgress,
    Progress,
    Status,
    StopToken,
    is_stopped,
    silent,
)
from stagewright.formulations.parallelism.document import (
    LayoutBound,
    differences,
    layout_plan,
    shortages,
    why_slower,
)
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.ranges import (
    causes,
    expected,
    ranges,
    unknown_prices,
    unmeasured_work,
)
from stagewright.formulations.parallelism.switches import price_effects
from stagewright.formulations.parallelism.training import TrainingProblem, require_layout
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.graphs.machines.rates import Feature
from stagewright.graphs.models.traits import remarks_on
from stagewright.service.layouts.problems import better_machines
from stagewright.service.layouts.refined import refined_layouts
from stagewright.service.layouts.requests import (
    ExplainAnswer,
    FrontPoint,
    LayoutAnswer,
    LayoutMemoryAnswer,
    LayoutRequest,
    LayoutRow,
    MemoryRequest,
    PartAnswer,
    PriceAnswer,
    RankMemoryAnswer,
    WhatIf,
)
from stagewright.solvers.parallelism.refining import FoundLayouts, search, work_alike
from stagewright.solvers.parallelism.tree import compiled_walk

PROVED_BY = "branch and bound over all layouts of the space"
NOTHING = "no layout of the space obeys the rules of the model, the batch and the devices{}; {}"
_LATE = "the time limit of {:g} s ended the search before all was proved or tried (--time-limit)"
SHARE_OF_FIRST = 0.7
"""Of the time limit, where stages are refined, or more is asked, after the first search."""
LESS_MEMORY = 0.93
"""From one point of the front to the next, the limit on memory shrinks at least by this factor."""


class Searches:
    """The searches of one request, and how many layouts each rule or unknown price refused."""

    def __init__(self, request: LayoutRequest) -> None:
        self.request = request
        self.refused: Counter[FrameworkRule | Feature] = Counter()
        self.examples: dict[FrameworkRule, str] = {}

    def search(self, problem: TrainingProblem, keep: int, **options: Any) -> FoundLayouts:
        """The best layouts of a problem in the request's space."""
        rules: dict[str, Any] = {"accept": self.accepts, "known": self.knows}
        try:
            return search(problem, self.request.searched, keep=keep, **rules, **options)
        except InputError:
            if self.refused:
                raise InputError(self.nothing()) from None
            raise

    def knows(self, layout: Layout) -> bool:
        """Whether the rates have measured all prices of the layout, if that is asked for."""
        if self.request.prefer == "fastest":
            return True
        unknown = unknown_prices(self.request.problem, layout)
        self.refused.update(unknown)
        return not unknown

    def accepts(self, layout: Layout) -> bool:
        """Whether the layout is preferred, and the framework can express it."""
        if not self.knows(layout):
            return False
        wrong = dict(self.request.wrong(layout))
        self.refused.update(wrong.keys())
        self.examples |= wrong
        return not wrong

    def nothing(self) -> str:
        """Why there is no layout, with the rule of the framework, or price, that excludes most."""
        request, excluded = self.request, "explain one to see which rule it breaks"
        also = "" if request.framework is None else f", and can be expressed by {request.framework}"
        if request.prefer == "surest":
            also += f", and has prices that {request.problem.rates.name} knows"
        for by, count in self.refused.most_common(1):
            unknown = f"an unknown price: {by}"
            why = f"a rule of it: {self.examples[by]}" if isinstance(by, FrameworkRule) else unknown
            excluded = f"most are excluded ({count:,}) by {why}"
        return NOTHING.format(also, excluded)


def find_layouts(
    request: LayoutRequest,
    on_progress: OnProgress = silent,
    stop: StopToken | None = None,
) -> LayoutAnswer:
    """The fastest layouts that are found in the request's time, unless ``stop`` is set before.

    Raises
    ------
    InputError
        If no layout of the space obeys the rules of the model, the batch and the devices.
    """
    problem, searches = request.problem, Searches(request)
    began, limit = monotonic(), request.time_limit
    deadline = Deadline(began + limit, stop)
    first = Deadline(began + limit * (SHARE_OF_FIRST if request.asks_more else 1), stop)
    try:
        request.require_problem()
        folding: dict[str, Any] = {} if request.unfolded else {"alike": work_alike}
        found = searches.search(problem, request.top, stop=first, **folding)
    except InputError as error:
        if request.explain is None:
            raise
        return _impossible(request, str(error))
    speaks_of = plan_class(request)
    best = found.best[0] if found.best else None
    bound, status = LayoutBound(found.bound, PROVED_BY, speaks_of), _status(found, stop)
    first_seconds = None if best is None else best.seconds
    on_progress(Progress(monotonic() - began, first_seconds, bound.seconds))
    refined, refined_bound = None, None
    if request.by_stage and not is_stopped(deadline):
        refined = refined_layouts(
            problem,
            request.searched,
            found,
            request.framework,
            searches.accepts,
            speaks_of,
            deadline,
        )
        refined_bound = refined.bound
        if best is None and refined.best is not None:
            assert refined_bound is not None
            bound, status = refined_bound, Status.FEASIBLE
        best = refined.best
    front: tuple[FrontPoint, ...] = ()
    too_large = _states_too_large(request) if best is None else None
    if request.front or (best is None and too_large is None):
        front = tuple(_front(searches, deadline))
    if not (best or front or too_large or is_stopped(deadline) or request.explain):
        raise InputError(searches.nothing())
    answered = found.best[0] if found.best else best
    surest, remarks = _known_prices(searches, best, deadline)
    remarks += tuple(f"less sure: {one}" for one in unmeasured_work(problem))
    if deadline.is_set() or not found.proved:
        remarks += () if is_stopped(stop) else (_LATE.format(limit),)
    return LayoutAnswer(
        status=status,
        rates=str(problem.rates),
        bound_seconds=bound.seconds,
        bound_fastest_seconds=bound.seconds * expected(problem, request.searched_features).low,
        gap=None if answered is None else 1 - bound.seconds / answered.seconds,
        proved_by=bound.proved_by,
        plan_class=bound.space,
        rows=tuple(_rows(request, found)),
        fastest_rows=found.fastest,
        surest=None if surest is None else _layout_row(problem, surest, best or surest),
        refined=None if refined is None else refined.answer,
        explained=None if request.explain is None else explain(request, request.explain, best),
        front=front if request.front else (),
        what_if=tuple(_what_if(searches, deadline)) if request.what_if and best else (),
        remarks=(*remarks, *remarks_on(problem.architecture, problem.sequence)),
        reason=too_large or _reason(searches, found, best, front, deadline),
        training_days=_days(request, best),
        examined=found.examined,
        wall_seconds=found.seconds,
        plan=None if best is None else layout_plan(problem, best, refined_bound or bound),
    )


def _rows(request: LayoutRequest, found: FoundLayouts) -> Iterator[LayoutRow]:
    """A row for each of the best layouts, with the layouts that are folded into it."""
    for one in found.best:
        key = work_alike(one.layout)
        alike = [str(other.layout) for other in found.folded if work_alike(other.layout) == key]
        yield _layout_row(request.problem, one, found.best[0], tuple(alike))


def _days(request: LayoutRequest, best: Estimate | None) -> float | None:
    """Days of the iterations that all tokens take (thesis, equation 4.5, with our seconds)."""
    if request.tokens is None or best is None:
        return None
    each = request.problem.batch * request.problem.sequence
    return ceil(request.tokens / each) * best.seconds / 86_400


def _impossible(request: LayoutRequest, reason: str) -> LayoutAnswer:
    """The answer where no layout of the space is possible, with the explained layout."""
    assert request.explain is not None
    return LayoutAnswer(
        status=Status.INFEASIBLE,
        rates=str(request.problem.rates),
        bound_seconds=inf,
        bound_fastest_seconds=inf,
        gap=None,
        proved_by=PROVED_BY,
        plan_class=plan_class(request),
        rows=(),
        explained=explain(request, request.explain, None),
        reason=reason,
        examined=0,
        wall_seconds=0.0,
    )


def _reason(
    searches: Searches,
    found: FoundLayouts,
    best: Estimate | None,
    front: tuple[FrontPoint, ...],
    stop: StopToken | None,
) -> str | None:
    """Why the answer lists no layout; None if it lists some."""
    if found.best:
        return None
    if best is not None:
        return "no layout whose stages are alike but for the first and the last"
    if is_stopped(stop):
        late = "stopped, or the time limit came, before"
        least = "no layout fits; " if found.proved else ""
        return f"{least}{late} {'how much memory one needs' if least else 'a layout'} was found"
    return _too_large(searches.request.problem, front[-1]) if front else searches.nothing()


def _status(found: FoundLayouts, ended: StopToken | None) -> Status:
    if is_stopped(ended) and not (found.best and found.proved):
        return Status.INTERRUPTED
    if found.best:
        return Status.OPTIMAL if found.proved else Status.FEASIBLE
    return Status.INFEASIBLE if found.proved else Status.NO_ANSWER


def _known_prices(
    searches: Searches, best: Estimate | None, stop: StopToken | None
) -> tuple[Estimate | None, tuple[str, ...]]:
    """The fastest layout with known prices, where the best wins by others; and what to say then."""
    request = searches.request
    unknown = () if best is None else unknown_prices(request.problem, best.layout)
    if best is None or not unknown or is_stopped(stop):
        return None, ()
    sure = request.model_copy(update={"prefer": "surest"})
    try:
        found = Searches(sure).search(request.problem, 1, stop=stop).best
    except InputError:
        found = ()
    names, how = ", ".join(unknown), "(--prefer surest)"
    wins = f"the fastest layout wins by prices that are not measured ({names})"
    if not found:
        return None, (f"{wins}; no layout with known prices fits",)
    one = found[0]
    if one.seconds <= best.seconds * (1 + RELATIVE_TOLERANCE):
        has = f"the fastest layout has prices that are not measured ({names})"
        return one, (f"{has}; as fast with known prices is {one.layout} {how}",)
    seconds = format_seconds(one.seconds)
    return one, (f"{wins}; the fastest with known prices is {one.layout}, {seconds} {how}",)


def plan_class(request: LayoutRequest) -> str:
    """What a bound of the search speaks of, in words."""
    for_whom = "" if request.framework is None else f" that {request.framework} can express"
    if request.prefer == "surest":
        for_whom += f" whose prices {request.problem.rates.name} knows,"
    space = request.searched
    return (
        f"layouts of {request.problem.fabric.devices} devices{for_whom} with {space}; "
        f"schedules {', '.join(space.schedules)}, plain or interleaved; equal stages but "
        "for the first and last, whole microbatches, the same choices on all ranks"
    )


def _layout_row(
    problem: TrainingProblem, one: Estimate, best: Estimate, alike: tuple[str, ...] = ()
) -> LayoutRow:
    """The row of a layout: its time and the parts of it, and its memory."""
    fullest = max(range(len(one.memory)), key=lambda rank: one.memory[rank].total)
    return LayoutRow.of(
        ranges(problem, one),
        one,
        layout=str(one.layout),
        flops_per_device=one.model_flops_per_second / one.layout.ranks,
        memory=_memory_answer(one, fullest),
        loses_by="" if one is best else why_slower(one, best),
        tokens_per_second=problem.batch * problem.sequence / one.seconds,
        alike=alike,
    )


def _memory_answer(one: Estimate, rank: int) -> RankMemoryAnswer:
    """The peak memory, by kind, of the ranks at one position in the pipeline."""
    kinds = [name for name in RankMemoryAnswer.model_fields if name != "rank"]
    held = {name: getattr(one.memory[rank], name.removesuffix("_bytes")) for name in kinds}
    return RankMemoryAnswer(rank=rank, **held)


def explain(request: LayoutRequest, layout: Layout, best: Estimate | None) -> ExplainAnswer:
    """Why a layout is not the best one: first the rules, those of the framework too."""
    problem, rates = request.problem, str(request.problem.rates)
    try:
        require_layout(problem, layout)
        for _, wrong in request.wrong(layout):
            raise InputError(f"{request.framework} cannot express it: {wrong}")
        one = evaluate(problem, layout, compiled_walk())
    except InputError as error:
        return ExplainAnswer(layout=str(layout), rates=rates, refused=str(error))
    parts = differences(one, one if best is None else best)
    return ExplainAnswer.of(
        ranges(problem, one),
        layout=str(layout),
        rates=rates,
        causes=causes(problem, layout),
        row=_layout_row(problem, one, one if best is None else best),
        shortages=shortages(one),
        differs=() if best is None else tuple(layout.differences(best.layout)),
        parts=tuple(
            PartAnswer.of(part, best_seconds=None if best is None else part.other_seconds)
            for part in parts
        ),
        prices=tuple(map(PriceAnswer.of, price_effects(problem, one, compiled_walk()))),
    )


def _front(searches: Searches, stop: StopToken | None) -> Iterator[FrontPoint]:
    """The fastest layout for less and less memory, from any amount to too little.

    One limit is what a device has. What is no faster than a later point is left out.
    """
    problem = searches.request.problem
    limit, has, last = inf, problem.fabric.memory_bytes, None
    while not is_stopped(stop):
        best = searches.search(problem, 1, memory_bytes=limit, stop=stop).best
        point = None
        if best:
            point = FrontPoint.of(best[0], limit_bytes=limit, layout=str(best[0].layout))
        if last is not None and (point is None or point.seconds > last.seconds * (1 + 1e-9)):
            yield last
        if point is None:
            return
        last, below = point, point.peak_bytes * LESS_MEMORY
        limit = has if below < has < limit and point.peak_bytes > has else below


def _states_too_large(request: LayoutRequest) -> str | None:
    """That states alone are more than all devices have, whatever the layout; None if not."""
    problem, has = request.problem, request.problem.fabric.memory_bytes
    needed = request.searched.least_bytes(problem)
    if needed <= has * (1 + RELATIVE_TOLERANCE):
        return None
    return (
        f"a device has {format_bytes(has)}; weights, gradients, the optimizer's state and the "
        f"reserve alone would need {format_bytes(needed)} on each of {problem.fabric.devices}"
    )


def _too_large(problem: TrainingProblem, least: FrontPoint) -> str:
    missing = least.peak_bytes - problem.fabric.memory_bytes
    return (
        f"a device has {format_bytes(problem.fabric.memory_bytes)}; {least.layout} would need "
        f"{format_bytes(least.peak_bytes)}, {format_bytes(missing)} more, and no layout much less"
    )


def _what_if(searches: Searches, stop: StopToken | None) -> Iterator[WhatIf]:
    for change, changed in better_machines(searches.request.problem):
        if is_stopped(stop):
            return
        found = searches.search(changed, 1, stop=stop)
        one = found.best[0] if found.best else None
        yield WhatIf(
            change=change,
            seconds=None if one is None else one.seconds,
            layout=None if one is None else str(one.layout),
        )


def layout_memory(request: MemoryRequest, stop: StopToken | None = None) -> LayoutMemoryAnswer:
    """The memory of a layout, whether or not it fits.

    Raises
    ------
    InputError
        If the layout breaks a rule of the model, the batch or the devices.
    """
    problem = request.problem
    found = evaluate(problem, request.layout, compiled_walk())
    return LayoutMemoryAnswer.of(
        ranges(problem, found),
        layout=str(request.layout),
        memory_bytes=problem.fabric.memory_bytes,
        rates=str(problem.rates),
        ranks=tuple(_memory_answer(found, rank) for rank in range(len(found.memory))),
        shortages=shortages(found),
        remarks=remarks_on(problem.architecture, problem.sequence),
    )
