"""Layouts of a transformer's training, for users of Python."""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal

from stagewright.formulations.forms.answers import OnProgress, StopToken, silent
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.front import fields_of
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.formulations.parallelism.document import LayoutPlan
    from stagewright.formulations.parallelism.goodput import Failures
    from stagewright.formulations.parallelism.layout import Layout
    from stagewright.formulations.parallelism.profiles.document import ProfiledDocument
    from stagewright.formulations.parallelism.profiles.pipelines import ProfiledProblem
    from stagewright.formulations.parallelism.training import TrainingProblem
    from stagewright.formulations.parallelism.trials import Trial, Tuning
    from stagewright.graphs.models.architecture import Architecture
    from stagewright.service.layouts.frontier import FrontierAnswer
    from stagewright.service.layouts.profiled import ProfiledAnswer
    from stagewright.service.layouts.rates import CalibrateAnswer
    from stagewright.service.layouts.requests import LayoutAnswer, LayoutMemoryAnswer
    from stagewright.service.layouts.tuning import TuneAnswer
    from stagewright.solvers.parallelism.space import Space


def train_plan(
    problem: "TrainingProblem | None" = None,
    space: "Space | None" = None,
    *,
    config: "str | PathLike[str] | Architecture | None" = None,
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
    on_progress: OnProgress = silent,
    stop: StopToken | None = None,
    **options: Any,
) -> "LayoutAnswer":
    """Find how to divide the training of a transformer among devices.

    With a ``problem``, or in the words of the command line, for example
    ``train_plan(config="config.json", device="h100", gpus=64, global_batch=512, sequence=4096)``.

    Parameters
    ----------
    problem
        See :func:`training_problem`.
    config
        In place of a problem: a Hugging Face ``config.json``, its folder or model's name, or an
        architecture (see :func:`read_architecture`).
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
    on_progress
        Told of the best layouts as soon as they are found.
    stop
        Ends the search once it is set; the answer is then the best so far.
    options
        With ``config``: the other options of ``stagewright train-plan`` by their names with
        underscores, as the service takes them, such as ``device``, ``gpus``, ``cluster``,
        ``global_batch``, ``sequence``, ``precision``, ``tensor=(1, 2)``, ``mtbf="50000h"`` or
        ``rates``.

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
    fields = fields_of(
        locals(), "problem", "space", "config", "failures", "on_progress", "stop", "options"
    )
    from stagewright.service.layouts.configured import TrainPlanInputs
    from stagewright.service.layouts.requests import LayoutRequest
    from stagewright.service.layouts.searching import find_layouts
    from stagewright.solvers.parallelism.space import Space

    if (problem is None) == (config is None):
        raise InputError(
            "train_plan needs a problem, or a config with device and gpus; one of both"
        )
    if config is not None:
        architecture = _architecture(config)
        changed = {} if failures is None else {"failures": failures}
        request = TrainPlanInputs.of(**fields, **_read(options)).layouts_of(architecture, **changed)
        request = request if space is None else request.model_copy(update={"space": space})
    else:
        for name in options:
            raise InputError(f"{name} goes with config; a problem says it already")
        request = LayoutRequest.of(
            problem=problem, space=space or Space(), failures=failures, **fields
        )
    return find_layouts(request, on_progress, stop)


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
    space, framework, by_stage, tokens, failures, time_limit, stop
        See :func:`train_plan`; the limit is of each search.
    price
        Dollars of a GPU-hour.
    deadline_seconds
        Choose the cheapest layout that trains all tokens in so many seconds.

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
    fields = fields_of(locals(), "problems", "space", "price", "deadline_seconds", "stop")
    from stagewright.service.layouts.frontier import FrontierRequest, find_frontier
    from stagewright.service.layouts.requests import LayoutRequest
    from stagewright.solvers.parallelism.space import Space

    space = space or Space()
    layouts = tuple(LayoutRequest.of(problem=one, space=space, **fields) for one in problems)
    request = FrontierRequest.of(layouts=layouts, price=price, deadline_seconds=deadline_seconds)
    return find_frontier(request, stop)


def memory(
    layout: "str | Layout | LayoutPlan",
    config: "str | PathLike[str] | Architecture | None" = None,
    **options: Any,
) -> "LayoutMemoryAnswer":
    """Break down the peak memory of a layout by pipeline rank, whether or not it fits.

    Parameters
    ----------
    layout
        Such as ``p8 t8 d2 b1 v3 full sp zero1``; or a plan of :func:`train_plan`, which has its
        model and machines.
    config
        A Hugging Face ``config.json``, its folder or model's name, or an architecture.
    options
        The other options of ``stagewright memory``, such as ``sequence``, ``device``, ``framework``
        and ``global_batch``.

    Raises
    ------
    InputError
        If the layout breaks a rule of the model, the batch or the devices.
    """
    from stagewright.formulations.parallelism.document import LayoutPlan
    from stagewright.service.layouts.configured import MemoryInputs
    from stagewright.service.layouts.explaining import layout_memory
    from stagewright.service.layouts.requests import MemoryRequest

    if isinstance(layout, LayoutPlan):
        if config is not None or options:
            raise InputError("config: the plan says model and machines; leave it out")
        return layout_memory(MemoryRequest.of(problem=layout.problem, layout=layout.layout))
    if config is None:
        raise InputError("config is missing: a config.json, or an architecture")
    of_text = parse_layout(layout) if isinstance(layout, str) else layout
    inputs = MemoryInputs.of(layout=of_text, **_read(options))
    return layout_memory(inputs.memory_of(_architecture(config)))


def calibrate(
    runs: "str | PathLike[str] | Sequence[Mapping[str, Any]]",
    config: "str | PathLike[str] | Architecture",
    *,
    name: str = "calibrated",
    **options: Any,
) -> "CalibrateAnswer":
    """Make a rate set of your own from two or three measured iterations.

    Parameters
    ----------
    runs
        A CSV as of ``stagewright calibrate``, or for each run ``layout`` and ``seconds``, and
        ``gpus``, ``sequence``, ``batch``, ``precision`` or ``memory_bytes`` where they differ.
    config
        A Hugging Face ``config.json``, its folder or model's name, or an architecture.
    name
        Of the rates.
    options
        The other options of ``stagewright calibrate``, such as ``device``, ``gpus``,
        ``framework``, ``sequence`` and ``global_batch``.

    Returns
    -------
    CalibrateAnswer
        ``document`` are the rates, for the option ``rates`` of :func:`train_plan`.

    Raises
    ------
    InputError
        If a run cannot be, with its place.
    """
    from stagewright.graphs.importers.measured_runs import read_measured
    from stagewright.service.layouts.configured import CalibrateInputs, MeasuredRun, iterations
    from stagewright.service.layouts.rates import CalibrateRequest
    from stagewright.service.layouts.rates import calibrate as fit

    inputs, architecture = CalibrateInputs.of(**_read(options)), _architecture(config)
    if isinstance(runs, str | PathLike):
        measured, source = read_measured(runs), fspath(runs)
    else:
        measured, source = iterations(MeasuredRun.of(**one) for one in runs), "measured"
    made = tuple(inputs.run(one, architecture) for one in measured)
    return fit(CalibrateRequest.of(runs=made, name=name, source=source))


def _architecture(config: "str | PathLike[str] | Architecture") -> "Architecture":
    """The architecture, of a configuration if it is not one."""
    from stagewright.service.architectures import read_architecture

    return read_architecture(config) if isinstance(config, str | PathLike) else config


def _read(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with what the files say that they name; lists as tuples."""
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.graphs.machines.devices import read_kind
    from stagewright.graphs.machines.rates import rates_named

    found = fields_of(options)
    for name, read in (("device", read_kind), ("rates", rates_named), ("cluster", load_cluster)):
        if isinstance(found.get(name), str | PathLike):
            found[name] = read(fspath(found[name]))
    return found


def tune(
    problem: "TrainingProblem",
    space: "Space | None" = None,
    *,
    framework: str = "megatron",
    candidates: int = 300,
    parallel: int = 1,
    time_limit: float = 60.0,
    stop: StopToken | None = None,
) -> "TuneAnswer":
    """Find the layouts that are worth a trial on the machines, and the first ones to try.

    Parameters
    ----------
    problem
        See :func:`training_problem`; give it the framework too.
    framework
        What trains.
    candidates
        The most layouts to correct; about all others there is a bound.
    parallel
        Trials at the same time.
    space, time_limit, stop
        See :func:`train_plan`; stopped, the candidates are those found so far.

    Returns
    -------
    TuneAnswer
        ``next`` are the layouts to try; ``document`` (see :func:`save_tuning`) is the tuning, for
        :func:`tune_read`.

    Raises
    ------
    InputError
        If no layout obeys the rules of the model, the batch and the devices, or may fit.
    """
    fields = fields_of(locals(), "stop")
    from stagewright.service.layouts.tuning import TuneRequest
    from stagewright.service.layouts.tuning import tune as first
    from stagewright.solvers.parallelism.space import Space

    return first(TuneRequest.of(**fields | {"space": space or Space()}), stop)


def tune_read(
    tuning: "Tuning", trials: "tuple[Trial, ...]" = (), *, parallel: int = 1
) -> "TuneAnswer":
    """Add trials to a tuning, and say what they tell: the best, what may still win, what is next.

    Parameters
    ----------
    tuning
        The ``document`` of an earlier answer, or see :func:`load_tuning`.
    trials
        Runs of layouts: seconds, or that one ran out of memory or crashed.
    parallel
        Trials at the same time.

    Returns
    -------
    TuneAnswer
        With ``stop``, no other layout is worth a trial; ``said`` says why.

    Raises
    ------
    InputError
        If trials contradict each other, or a layout breaks a rule of the problem.
    """
    from stagewright.service.layouts.tuning import TuneReadRequest, read_trials

    return read_trials(TuneReadRequest.of(tuning=tuning, trials=trials, parallel=parallel))


def profiled_train_plan(
    problem: "ProfiledProblem", *, time_limit: float = 60.0, stop: StopToken | None = None
) -> "ProfiledAnswer":
    """Find the fastest pipelines by measured layer profiles, on servers of several kinds.

    Parameters
    ----------
    problem
        See :func:`profiled_problem`.
    time_limit, stop
        See :func:`train_plan`.

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
