"""The layouts of a training run: the best ones, one explained, the front, and what-if."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from stagewright.executor.export.layouts import EVERY_FORMAT, PLAN
from stagewright.executor.export.layouts.rules import Rule
from stagewright.formulations.forms.answers import Status, StopToken, is_stopped
from stagewright.formulations.parallelism.document import (
    LayoutBound,
    LayoutPlan,
    differences,
    layout_plan,
    shortages,
    why_slower,
)
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.training import TrainingProblem, require_layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.groups import links
from stagewright.service.answers import CARRIED, Answer, Finite
from stagewright.service.layouts.refined import RefinedAnswer, refined_layouts
from stagewright.service.options import Option
from stagewright.service.requests import Request
from stagewright.solvers.parallelism.refining import FoundLayouts, search, work_alike
from stagewright.solvers.parallelism.space import Space
from stagewright.solvers.parallelism.tree import compiled_walk

PROVED_BY = "branch and bound over all layouts of the space"
NOTHING = "no layout of the space obeys the rules of the model, the batch and the devices{}; {}"
EXPLAIN = "explain one to see which rule it breaks"
WITHOUT_SEQUENCE = (PLAN, "deepspeed", "accelerate")
"""What cannot express sequence parallelism."""

SECONDS_A_DAY = 86_400
LESS_MEMORY = 0.93
"""From one point of the front to the next, the limit on memory shrinks at least by this factor."""


class LayoutRequest(Request):
    """Find the fastest layouts of a problem that fit."""

    problem: TrainingProblem
    space: Space = Space()
    top: int = Field(default=10, ge=1, le=1000)
    """Layouts in the table."""
    framework: Annotated[str | None, Option("--for", form="FRAMEWORK")] = None
    """Only layouts that can be exported to it: megatron, megatron-bridge, nemo, torchtitan,
    deepspeed, accelerate; plan: a plan of stages, for `stagewright run`, of which some may then not
    fit in memory."""
    by_stage: bool = True
    """Whether to find blocks and recomputed blocks of every stage after the search."""
    explain: Annotated[Layout | None, Option(of_text=lambda text, _: parse_layout(text))] = None
    """Why not this layout, for example "p8 t8 d2 b1 v3 full sp zero1"."""
    front: bool = False
    """The fastest layouts with less and with more memory."""
    what_if: bool = False
    """What more memory and faster links would buy."""
    unfolded: bool = False
    """List layouts, too, that differ from a faster one only in placement, or in whether ranks
    divide samples or their tokens."""
    tokens: float | None = Field(default=None, ge=1, le=1e18, allow_inf_nan=False)
    """Tokens of the whole training, such as 15e12: how many days it takes."""

    @model_validator(mode="after")
    def _require_framework(self) -> Self:
        if self.framework is not None and self.framework not in EVERY_FORMAT:
            raise InputError(
                f"framework {self.framework!r} is not known; there are {', '.join(EVERY_FORMAT)}"
            )
        return self

    @property
    def searched(self) -> Space:
        """The space, without what the default prefers and the framework cannot express."""
        if self.framework not in WITHOUT_SEQUENCE:
            return self.space
        partial = self.space.partial and self.framework != PLAN
        return replace(self.space, sequence_parallel="never", partial=partial)

    def require_problem(self) -> None:
        """Refuse a model or a precision of which the framework can express no layout."""
        if self.framework is None:
            return
        try:
            EVERY_FORMAT[self.framework].require_problem(self.problem)
        except InputError as error:
            raise InputError(f"{self.framework} can express no layout of it: {error}") from None

    def wrong(self, layout: Layout) -> Iterator[tuple[Rule, str]]:
        """The framework's rules that a possible layout breaks, with what is wrong."""
        if self.framework is not None:
            yield from EVERY_FORMAT[self.framework].broken(self.problem, layout)


class Searches:
    """The searches of one request, and how many layouts each rule of the framework refused."""

    def __init__(self, request: LayoutRequest) -> None:
        self.request = request
        self.refused: Counter[Rule] = Counter()
        self.examples: dict[Rule, str] = {}

    def search(self, problem: TrainingProblem, keep: int, **options: Any) -> FoundLayouts:
        """The best layouts of a problem in the request's space."""
        return search(problem, self.request.searched, keep=keep, accept=self.accepts, **options)

    def accepts(self, layout: Layout) -> bool:
        """Whether the framework can express the layout."""
        wrong = dict(self.request.wrong(layout))
        self.refused.update(wrong.keys())
        self.examples |= wrong
        return not wrong

    def nothing(self) -> str:
        """Why there is no layout, with the rule of the framework that excludes most."""
        name = self.request.framework
        if name is None:
            return NOTHING.format("", EXPLAIN)
        expressed = f", and can be expressed by {name}"
        if not self.refused:
            return NOTHING.format(expressed, EXPLAIN)
        ((rule, count),) = self.refused.most_common(1)
        excluded = f"most are excluded ({count:,}) by a rule of it: {self.examples[rule]}"
        return NOTHING.format(expressed, excluded)


class MemoryAnswer(Answer):
    """Peak bytes of the ranks at one position in the pipeline, by kind."""

    rank: int
    total_bytes: float
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    buffers_bytes: float
    reserve_bytes: float


class LayoutRow(Answer):
    """A layout: an iteration and its parts on the busiest rank (s), and the fullest rank's memory.

    ``loses_by`` is the largest loss against the best, in words; ``alike`` are layouts that were
    evaluated too and are folded into this one.
    """

    layout: str
    microbatches: int
    seconds: float
    mfu: float
    flops_per_device: float
    compute_seconds: float
    exchange_seconds: float
    repeated_seconds: float
    zero_seconds: float
    bubble_seconds: float
    gradient_seconds: float
    update_seconds: float
    memory: MemoryAnswer
    loses_by: str
    tokens_per_second: float
    alike: tuple[str, ...] = ()


class PartAnswer(Answer):
    """A part of an iteration, in the explained layout and in the best."""

    part: str
    seconds: float
    best_seconds: Finite


class ExplainAnswer(Answer):
    """Why a layout is not the best: the rule it breaks, what does not fit, or what takes longer."""

    layout: str
    refused: str | None = None
    row: LayoutRow | None = None
    shortages: tuple[str, ...] = ()
    parts: tuple[PartAnswer, ...] = ()


class FrontPoint(Answer):
    """The fastest layout whose peak is at most ``limit_bytes``."""

    limit_bytes: Finite
    peak_bytes: float
    seconds: float
    layout: str


class WhatIf(Answer):
    """The fastest layout on changed machines; None if none fits."""

    change: str
    seconds: Finite
    layout: str | None


class LayoutAnswer(Answer):
    """The best layouts by time, with a bound on every layout of the space that fits.

    ``plan_class`` is what the bound speaks of: stages that are alike. The first ``fastest_rows`` of
    the rows are the fastest of that class; a layout that is not listed may be faster than a row
    below them. ``refined`` are layouts whose stages differ, None if none were asked for; ``plan``
    is the best of both. If no layout whose stages are alike fits, but a refined one does, there are
    no rows, and bound and gap are the refined one's. With status ``infeasible`` no layout of the
    space fits, for the ``reason``; if ``interrupted`` before it is proved the rows are the best so
    far. ``training_days`` are those of the request's tokens with the best layout.
    """

    status: Status
    bound_seconds: Finite
    gap: Finite
    proved_by: str
    plan_class: str
    rows: tuple[LayoutRow, ...]
    fastest_rows: int = 0
    refined: RefinedAnswer | None = None
    explained: ExplainAnswer | None = None
    front: tuple[FrontPoint, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    remarks: tuple[str, ...] = ()
    reason: str | None = None
    training_days: float | None = None
    examined: int
    wall_seconds: float
    plan: Annotated[LayoutPlan | None, CARRIED] = None


class CheckLayoutAnswer(Answer):
    """What is wrong with a layout's document; nothing if it is valid.

    Its bound is compared with the time, but the search is not run again.
    """

    status: str
    is_bound_verified: bool = False
    violations: tuple[str, ...]


def find_layouts(request: LayoutRequest, stop: StopToken | None = None) -> LayoutAnswer:
    """The fastest layouts.

    Raises
    ------
    InputError
        If no layout of the space obeys the rules of the model, the batch and the devices.
    """
    problem, searches = request.problem, Searches(request)
    try:
        request.require_problem()
        folding = {} if request.unfolded else {"alike": work_alike}
        found = searches.search(problem, request.top, stop=stop, **folding)
    except InputError as error:
        if request.explain is None:
            raise
        return _impossible(request, str(error))
    speaks_of = plan_class(request)
    best = found.best[0] if found.best else None
    bound, status = LayoutBound(found.bound, PROVED_BY, speaks_of), _status(found, stop)
    refined, refined_bound = None, None
    if request.by_stage and not is_stopped(stop):
        refined = refined_layouts(
            problem, request.searched, found, request.framework, searches.accepts, speaks_of, stop
        )
        refined_bound = refined.bound
        if best is None and refined.best is not None:
            assert refined_bound is not None
            bound, status = refined_bound, Status.FEASIBLE
        best = refined.best
    front: tuple[FrontPoint, ...] = ()
    if request.front or best is None:
        front = tuple(_front(searches, stop))
    if best is None and not front and not is_stopped(stop) and request.explain is None:
        raise InputError(searches.nothing())
    answered = found.best[0] if found.best else best
    return LayoutAnswer(
        status=status,
        bound_seconds=bound.seconds,
        gap=None if answered is None else 1 - bound.seconds / answered.seconds,
        proved_by=bound.proved_by,
        plan_class=bound.space,
        rows=tuple(_rows(request, found)),
        fastest_rows=found.fastest,
        refined=None if refined is None else refined.answer,
        explained=None if request.explain is None else explain(request, request.explain, best),
        front=front if request.front else (),
        what_if=tuple(_what_if(searches, stop)) if request.what_if and best else (),
        remarks=_remarks(problem, best),
        reason=_reason(searches, found, best, front, stop),
        training_days=_days(request, best),
        examined=found.examined,
        wall_seconds=found.seconds,
        plan=None if best is None else layout_plan(problem, best, refined_bound or bound),
    )


def _rows(request: LayoutRequest, found: FoundLayouts) -> Iterator[LayoutRow]:
    """The best layouts, with those that are folded into them."""
    for one in found.best:
        key = work_alike(one.layout)
        alike = [str(other.layout) for other in found.folded if work_alike(other.layout) == key]
        yield layout_row(request.problem, one, found.best[0], tuple(alike))


def _days(request: LayoutRequest, best: Estimate | None) -> float | None:
    """Days of the iterations that all tokens take (thesis, equation 4.5, with our seconds)."""
    if request.tokens is None or best is None:
        return None
    iterations = ceil(request.tokens / (request.problem.batch * request.problem.sequence))
    return iterations * best.seconds / SECONDS_A_DAY


def _impossible(request: LayoutRequest, reason: str) -> LayoutAnswer:
    """No layout of the space is possible; but the explained one may be."""
    assert request.explain is not None
    return LayoutAnswer(
        status=Status.INFEASIBLE,
        bound_seconds=inf,
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
    """Why there are no rows; None if there are."""
    if found.best:
        return None
    if best is not None:
        return "no layout whose stages are alike but for the first and the last"
    if is_stopped(stop):
        return "stopped before a layout was found"
    return _too_large(searches.request.problem, front[-1]) if front else searches.nothing()


def _status(found: FoundLayouts, stop: StopToken | None) -> Status:
    if is_stopped(stop) and not (found.best and found.proved):
        return Status.INTERRUPTED
    if found.best:
        return Status.OPTIMAL if found.proved else Status.FEASIBLE
    return Status.INFEASIBLE


def _remarks(problem: TrainingProblem, best: Estimate | None) -> tuple[str, ...]:
    """What a user should know of the prediction of the best layout."""
    if best is None:
        return ()
    found = []
    if best.layout.zero >= 2 and _leaves_server(problem, best.layout):
        found.append(
            f"ZeRO {best.layout.zero} between servers is predicted too fast against what is "
            "published (1.5 to 4.5 times for ZeRO 3 of 2021): see docs/layouts.md, measure it, or "
            "consider --zero 0,1"
        )
    if problem.architecture.experts is not None:
        found.append(
            "layers of experts are predicted too fast against what is published (24 to 68 % of "
            "the time for four trainings in fp8): see docs/layouts.md"
        )
    return tuple(found)


def _leaves_server(problem: TrainingProblem, layout: Layout) -> bool:
    """Whether data parallelism goes from server to server."""
    ways = links(problem.fabric, layout.data_group).ways
    inside = problem.fabric.levels[0].name
    return not all(one.level.name == inside for way in ways for one in way.crossed)


def plan_class(request: LayoutRequest) -> str:
    """What a bound of the search speaks of, in words."""
    for_whom = "" if request.framework is None else f" that {request.framework} can express"
    space = request.searched
    return (
        f"layouts of {request.problem.fabric.devices} devices{for_whom} with {space}; "
        f"schedules {', '.join(space.schedules)}, plain or interleaved; equal stages but "
        "for the first and last, whole microbatches, the same choices on all ranks"
    )


def layout_row(
    problem: TrainingProblem, one: Estimate, best: Estimate, alike: tuple[str, ...] = ()
) -> LayoutRow:
    """A layout in figures."""
    fullest = max(range(len(one.memory)), key=lambda rank: one.memory[rank].total)
    return LayoutRow(
        layout=str(one.layout),
        microbatches=one.microbatches,
        seconds=one.seconds,
        mfu=one.mfu,
        flops_per_device=one.model_flops_per_second / one.layout.ranks,
        compute_seconds=one.compute_seconds,
        exchange_seconds=one.exchange_seconds,
        repeated_seconds=one.repeated_seconds,
        zero_seconds=one.zero_seconds,
        bubble_seconds=one.bubble_seconds,
        gradient_seconds=one.gradient_seconds,
        update_seconds=one.update_seconds,
        memory=memory_answer(one, fullest),
        loses_by="" if one is best else why_slower(one, best),
        tokens_per_second=problem.batch * problem.sequence / one.seconds,
        alike=alike,
    )


def memory_answer(one: Estimate, rank: int) -> MemoryAnswer:
    """The memory of the ranks at one position."""
    of = one.memory[rank]
    return MemoryAnswer(
        rank=rank,
        total_bytes=of.total,
        weights_bytes=of.weights,
        gradients_bytes=of.gradients,
        optimizer_bytes=of.optimizer,
        activations_bytes=of.activations,
        buffers_bytes=of.buffers,
        reserve_bytes=of.reserve,
    )


def explain(request: LayoutRequest, layout: Layout, best: Estimate | None) -> ExplainAnswer:
    """Why a layout is not the best one: first the rules, those of the framework too."""
    problem = request.problem
    try:
        require_layout(problem, layout)
        for _, wrong in request.wrong(layout):
            raise InputError(f"{request.framework} cannot express it: {wrong}")
        one = evaluate(problem, layout, compiled_walk())
    except InputError as error:
        return ExplainAnswer(layout=str(layout), refused=str(error))
    parts = differences(one, one if best is None else best)
    return ExplainAnswer(
        layout=str(layout),
        row=layout_row(problem, one, one if best is None else best),
        shortages=shortages(one),
        parts=tuple(
            PartAnswer(
                part=part.part,
                seconds=part.seconds,
                best_seconds=None if best is None else part.other_seconds,
            )
            for part in parts
        ),
    )


def _front(searches: Searches, stop: StopToken | None) -> Iterator[FrontPoint]:
    """The fastest layout for less and less memory, from any amount to too little.

    One limit is what a device has. What is no faster than a later point is left out.
    """
    problem = searches.request.problem
    limit, has, last = inf, problem.fabric.memory_bytes, None
    while not is_stopped(stop):
        found = searches.search(problem, 1, memory_bytes=limit, stop=stop)
        point = _point(limit, found.best[0]) if found.best else None
        if last is not None and (point is None or point.seconds > last.seconds * (1 + 1e-9)):
            yield last
        if point is None:
            return
        last, below = point, point.peak_bytes * LESS_MEMORY
        limit = has if below < has < limit and point.peak_bytes > has else below


def _point(limit: float, one: Estimate) -> FrontPoint:
    return FrontPoint(
        limit_bytes=limit, peak_bytes=one.peak_bytes, seconds=one.seconds, layout=str(one.layout)
    )


def _too_large(problem: TrainingProblem, least: FrontPoint) -> str:
    from stagewright.graphs.documents.units import format_bytes

    missing = least.peak_bytes - problem.fabric.memory_bytes
    return (
        f"a device has {format_bytes(problem.fabric.memory_bytes)}; {least.layout} would need "
        f"{format_bytes(least.peak_bytes)}, {format_bytes(missing)} more, and no layout much less"
    )


def _what_if(searches: Searches, stop: StopToken | None) -> Iterator[WhatIf]:
    for change, changed in _changes(searches.request.problem):
        if is_stopped(stop):
            return
        found = searches.search(changed, 1, stop=stop)
        one = found.best[0] if found.best else None
        yield WhatIf(
            change=change,
            seconds=None if one is None else one.seconds,
            layout=None if one is None else str(one.layout),
        )


def _changes(problem: TrainingProblem) -> Iterator[tuple[str, TrainingProblem]]:
    """Better machines, one thing at a time."""
    fabric = problem.fabric
    for text, memory in (
        ("1 GB more memory", fabric.memory_bytes + 1e9),
        ("10 % more memory", fabric.memory_bytes * 1.1),
        ("twice the memory", fabric.memory_bytes * 2),
    ):
        yield text, replace(problem, fabric=replace(fabric, memory_bytes=memory))
    for position, level in enumerate(fabric.levels):
        faster = replace(level, bytes_per_second=2 * level.bytes_per_second)
        levels = (*fabric.levels[:position], faster, *fabric.levels[position + 1 :])
        text = f"twice the bandwidth of level {level.name}"
        yield text, replace(problem, fabric=replace(fabric, levels=levels))
