"""Layouts of a transformer's training, for users of Python."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from stagewright.formulations.forms.answers import StopToken
from stagewright.front import fields_of

if TYPE_CHECKING:
    from stagewright.formulations.parallelism.goodput import Failures
    from stagewright.formulations.parallelism.layout import Layout
    from stagewright.formulations.parallelism.profiles.document import ProfiledDocument
    from stagewright.formulations.parallelism.profiles.pipelines import ProfiledProblem
    from stagewright.formulations.parallelism.training import TrainingProblem
    from stagewright.service.layouts.frontier import FrontierAnswer
    from stagewright.service.layouts.profiled import ProfiledAnswer
    from stagewright.service.layouts.requests import LayoutAnswer
    from stagewright.solvers.parallelism.space import Space


def train_plan(
    problem: "TrainingProblem",
    space: "Space | None" = None,
    *,
    top: int = 10,
    explain: "Layout | None" = None,
    framework: str | None = None,
    prefer: Literal["fastest", "surest"] = "fastest",
    by_stage: bool = True,
    front: bool = False,
    what_if: bool = False,
    unfolded: bool = False,
    tokens: float | None = None,
    failures: "Failures | None" = None,
    simulations: int = 0,
    time_limit: float = 60.0,
    stop: StopToken | None = None,
) -> "LayoutAnswer":
    """Find how to divide the training of a transformer among devices.

    Parameters
    ----------
    problem
        See :func:`training_problem`.
    space
        The layouts to consider; None for all that the model, the batch and the devices allow.
    top
        How many of the best layouts.
    explain
        A layout to compare with the best: which rule it breaks, what does not fit, what is longer.
    framework
        Only layouts that can be exported to it, such as ``megatron``; give it to
        :func:`training_problem` too, for its rates and memory.
    prefer
        ``surest``: only layouts whose prices the rates have measured.
    by_stage
        After the search, find blocks and recomputed blocks of every stage of plain pipelines.
    front, what_if
        Find the fastest layouts with less memory, and with better machines, too.
    unfolded
        List layouts, too, that differ from a faster one only in placement, or in whether ranks
        divide samples or their tokens.
    tokens
        Of the whole training: the answer has its days.
    failures
        How often devices fail (:class:`Failures`): rank layouts by their time with failures.
    simulations
        Simulate so many runs of the best layout with failures, as a check of its goodput.
    time_limit
        Of the search, in seconds.
    stop
        Ends the search once it is set; the answer is then the best so far.

    Returns
    -------
    LayoutAnswer
        ``plan`` (see :func:`save_layout`; None if no layout fits), ``rows`` of the best layouts
        with stages that are alike and their ranges of seconds and bytes, ``refined`` ones whose
        stages differ, status, bound and gap, and what the bound speaks of.

    Raises
    ------
    InputError
        If no layout obeys the rules of the model, the batch and the devices.
    """
    fields = fields_of(locals(), "stop")
    from stagewright.service.layouts.requests import LayoutRequest
    from stagewright.service.layouts.searching import find_layouts
    from stagewright.solvers.parallelism.space import Space

    return find_layouts(LayoutRequest.of(**fields | {"space": space or Space()}), stop)


def frontier(
    problems: "Sequence[TrainingProblem]",
    space: "Space | None" = None,
    *,
    framework: str | None = None,
    by_stage: bool = True,
    tokens: float | None = None,
    failures: "Failures | None" = None,
    price: float | None = None,
    deadline_seconds: float | None = None,
    time_limit: float = 60.0,
    stop: StopToken | None = None,
) -> "FrontierAnswer":
    """Compare the best layouts of several problems, such as numbers of GPUs.

    Parameters
    ----------
    problems
        See :func:`training_problem`.
    space, framework, by_stage, tokens, failures
        See :func:`train_plan`.
    price
        Dollars of a GPU-hour.
    deadline_seconds
        Choose the cheapest layout that trains all tokens in so many seconds.
    time_limit
        Seconds of the search of each problem.
    stop
        Ends the searches once it is set; the answer is then the best so far.

    Returns
    -------
    FrontierAnswer
        ``rows`` with the best layout of each problem, its time with a range and a bound, its cost,
        and whether it is on the Pareto front; with a deadline the place of the ``chosen`` row and
        its ``plan``, or the ``reason`` why there is none.

    Raises
    ------
    InputError
        If an argument is out of range.
    """
    from stagewright.service.layouts.frontier import FrontierRequest, find_frontier
    from stagewright.service.layouts.requests import LayoutRequest
    from stagewright.solvers.parallelism.space import Space

    layouts = tuple(
        LayoutRequest.of(
            problem=problem, space=space or Space(), framework=framework, by_stage=by_stage,
            tokens=tokens, failures=failures, time_limit=time_limit,
        )
        for problem in problems
    )  # fmt: skip
    request = FrontierRequest.of(layouts=layouts, price=price, deadline_seconds=deadline_seconds)
    return find_frontier(request, stop)


def profiled_train_plan(
    problem: "ProfiledProblem", *, time_limit: float = 60.0, stop: StopToken | None = None
) -> "ProfiledAnswer":
    """Find the fastest pipelines by measured layer profiles, on servers of several kinds.

    Parameters
    ----------
    problem
        See :func:`profiled_problem`.
    time_limit
        Seconds of the search.
    stop
        Ends the search once it is set; the answer is then the best so far.

    Returns
    -------
    ProfiledAnswer
        ``plan`` (see :func:`save_profiled_plan`; None if none fits), its stages, the memory of
        every kind, status, bound and gap, and what the bound speaks of.

    Raises
    ------
    InputError
        If an argument is out of range.
    """
    from stagewright.service.layouts.profiled import ProfiledRequest, find_profiled_plan

    return find_profiled_plan(ProfiledRequest.of(problem=problem, time_limit=time_limit), stop)


def check_profiled_plan(plan: "ProfiledDocument") -> tuple[str, ...]:
    """What is wrong with a plan by layer profiles, evaluated again; empty if it is valid.

    Its bound is compared with the time, but the search is not run again.
    """
    from stagewright.service.layouts.profiled import CheckProfiledRequest
    from stagewright.service.layouts.profiled import check_profiled_plan as check

    return check(CheckProfiledRequest.of(document=plan)).violations
