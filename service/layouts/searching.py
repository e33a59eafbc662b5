"""The layouts of a training run: the best ones, and one explained."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import inf, isfinite
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
from stagewright.formulations.parallelism.document import LayoutBound, layout_plan
from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.ranges import (
    expected,
    unknown_prices,
    unmeasured_work,
)
from stagewright.formulations.parallelism.schedules import FORMS
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_seconds
from stagewright.graphs.machines.rates import Feature
from stagewright.graphs.models.traits import remarks_on
from stagewright.service.layouts.explaining import explain, layout_row
from stagewright.service.layouts.further import (
    RefinedLayouts,
    front_of,
    least_too_large,
    refined_layouts,
    smallest_of,
    states_too_large,
    what_if,
)
from stagewright.service.layouts.goodput import Ranking, iterations_of, ranked_layouts
from stagewright.service.layouts.requests import (
    FrontPoint,
    LayoutAnswer,
    LayoutRequest,
    LayoutRow,
)
from stagewright.solvers.parallelism.refining import FoundLayouts, search, work_alike

PROVED_BY = "branch and bound over all layouts of the space"
NOTHING = "no layout of the space obeys the rules of the model, the batch and the devices{}; {}"
_LATE = "the time limit of {:g} s ended the search before all was proved or tried (--time-limit)"
SHARE_OF_FIRST = 0.7
"""Of the time limit, where stages are refined, or more is asked, after the first search."""


class Searches:
    """The searches of one request, and how many layouts each rule or unknown price refused."""

    def __init__(self, request: LayoutRequest) -> None:
        self.request = request
        self.refused: Counter[FrameworkRule | Feature] = Counter()
        self.examples: dict[FrameworkRule, str] = {}

    def search(self, problem: TrainingProblem, keep: int, **options: Any) -> FoundLayouts:
        """The best layouts of a problem in the request's space."""
        known = None if self.request.prefer == "fastest" else self.knows
        rules: dict[str, Any] = {"accept": self.accepts, "known": known}
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
    *,
    surest: bool = True,
) -> LayoutAnswer:
    """The fastest layouts that are found in the request's time, unless ``stop`` is set before.

    Without ``surest`` no other layout is looked for where the best has prices that are not known.

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
        by_time, found, ranking = _searched(searches, first)
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
    has_plain = any(not FORMS[one].in_v for one in request.searched.schedules)
    if request.by_stage and has_plain and not is_stopped(deadline):
        refined = refined_layouts(
            problem,
            request.searched,
            by_time,
            request.framework,
            searches.accepts,
            speaks_of,
            deadline,
        )
        if best is None and refined.bound is not None:
            bound, status = refined.bound, Status.FEASIBLE
        best, refined_bound = _better(best, refined, ranking)
    front: tuple[FrontPoint, ...] = ()
    too_large = states_too_large(request) if best is None else None
    if request.front or (best is None and too_large is None):
        points = front_of if request.front else smallest_of
        front = tuple(points(searches.search, problem, deadline))
    if not (best or front or too_large or is_stopped(deadline) or request.explain):
        raise InputError(searches.nothing())
    answered = found.best[0] if found.best else best
    sure, remarks = _known_prices(searches, best, deadline) if surest else (None, ())
    remarks += tuple(f"less sure: {one}" for one in unmeasured_work(problem))
    if deadline.is_set() or not by_time.proved:
        remarks += () if is_stopped(stop) else (_LATE.format(limit),)
    return LayoutAnswer(
        status=status,
        rates=str(problem.rates),
        bound_seconds=bound.seconds,
        bound_fastest_seconds=bound.seconds * expected(problem, request.searched_features).low,
        gap=None if answered is None else 1 - bound.seconds / answered.seconds,
        proved_by=bound.proved_by,
        plan_class=bound.space,
        rows=tuple(_rows(request, found, ranking)),
        fastest_rows=found.fastest,
        surest=None if sure is None else layout_row(problem, sure, best or sure),
        refined=None if refined is None else refined.answer,
        explained=None
        if request.explain is None
        else explain(request, request.explain, best, ranking),
        front=front if request.front else (),
        what_if=tuple(what_if(searches.search, problem, deadline))
        if request.what_if and best
        else (),
        remarks=(*remarks, *remarks_on(problem.architecture, problem.sequence)),
        reason=too_large or _reason(searches, found, best, front, deadline),
        training_days=_days(request, best, ranking),
        failures=None
        if ranking is None or best is None
        else ranking.answer(best, *_proved(by_time, speaks_of, refined if refined_bound else None)),
        examined=found.examined,
        wall_seconds=found.seconds,
        plan=None if best is None else layout_plan(problem, best, refined_bound or bound),
    )


def _searched(
    searches: Searches, stop: StopToken
) -> tuple[FoundLayouts, FoundLayouts, Ranking | None]:
    """The best layouts by time; the same, or with failures the best of them, and their ranking."""
    request = searches.request
    folding: dict[str, Any] = {} if request.unfolded else {"alike": work_alike}

    def find(keep: int) -> FoundLayouts:
        return searches.search(request.problem, keep, stop=stop, **folding)

    if request.failures is None:
        found = find(request.top)
        return found, found, None
    on = partial(_fastest_on, request, stop=stop)
    found, ranking = ranked_layouts(request, request.failures, find, on, stop)
    return found, ranking.ordered(found), ranking


def _better(
    best: Estimate | None, refined: RefinedLayouts, ranking: Ranking | None
) -> tuple[Estimate | None, LayoutBound | None]:
    """The best layout of all, and the bound of its document if it is a refined one."""
    if ranking is None or best is None or refined.best is None:
        return refined.best, refined.bound
    if refined.bound is None or ranking.effective(best) <= ranking.effective(refined.best):
        return best, None
    return refined.best, refined.bound


def _rows(
    request: LayoutRequest, found: FoundLayouts, ranking: Ranking | None
) -> Iterator[LayoutRow]:
    """A row for each of the best layouts, with the layouts that are folded into it."""
    for one in found.best:
        key = work_alike(one.layout)
        alike = [str(other.layout) for other in found.folded if work_alike(other.layout) == key]
        yield layout_row(request.problem, one, found.best[0], tuple(alike), ranking)


def _days(request: LayoutRequest, best: Estimate | None, ranking: Ranking | None) -> float | None:
    """Days of the iterations that all tokens take (thesis, equation 4.5, with our seconds)."""
    iterations = iterations_of(request)
    if iterations is None or best is None:
        return None
    each = best.seconds if ranking is None else ranking.effective(best)
    return iterations * each / 86_400 if isfinite(each) else None


def _fastest_on(
    request: LayoutRequest, problem: TrainingProblem, stop: StopToken
) -> Estimate | None:
    """The fastest layout of a problem on other machines, None if none fits."""
    try:
        changed = request.model_copy(update={"problem": problem})
        best = Searches(changed).search(problem, 1, stop=stop).best
    except InputError:
        return None
    return best[0] if best else None


def _proved(
    by_time: FoundLayouts, speaks_of: str, refined: RefinedLayouts | None
) -> tuple[float, str]:
    """The bound on iterations of layouts that were not ranked, and the class it speaks of."""
    if refined is None:
        return by_time.others, speaks_of
    return min(refined.answer.bound_seconds, by_time.others), refined.answer.plan_class


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
    return least_too_large(searches.request.problem, front[-1]) if front else searches.nothing()


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
    in_v = any(FORMS[one].in_v for one in space.schedules)
    return (
        f"layouts of {request.problem.fabric.devices} devices{for_whom} with {space}; "
        f"schedules {', '.join(space.schedules)}, plain{',' if in_v else ' or'} interleaved"
        f"{' or in a V' if in_v else ''}; equal stages but "
        "for the first and last, whole microbatches, the same choices on all ranks"
    )
