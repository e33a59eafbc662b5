"""Plans of pipelines and schedules, for users of Python."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.formulations.forms.answers import OnProgress, StopToken, silent
from stagewright.front import fields_of
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import parse_share
from stagewright.service.pipelines.requests import (
    CheckRequest,
    CompareRequest,
    PartitionRequest,
    PlanRequest,
    SimulateRequest,
)

if TYPE_CHECKING:
    from stagewright.executor.programs.trace import Trace
    from stagewright.executor.simulation.difference import PlanDifference
    from stagewright.executor.simulation.simulate import Simulation
    from stagewright.formulations.checking.order import Violation
    from stagewright.formulations.checking.proofs import Verdict
    from stagewright.formulations.parallelism.document import LayoutPlan
    from stagewright.formulations.plans.plan import PipelinePlan
    from stagewright.front.results import Picture, PlanResult
    from stagewright.graphs.machines.cluster import Cluster
    from stagewright.graphs.models.chain import Chain
    from stagewright.service.layouts.difference import LayoutDifference
    from stagewright.service.pipelines.answers import (
        CompareAnswer,
        PartitionAnswer,
        WhatIfAnswer,
        WhatIfRow,
    )
    from stagewright.service.pipelines.sweeping import SweepAnswer, SweepRow
    from stagewright.solvers.planners.steps.proposal import Choices


def plan(
    chain: "Chain",
    cluster: "Cluster",
    microbatches: int = 8,
    planner: str = "auto",
    time_limit: float = 10.0,
    *,
    gap: float | str = 0.0,
    threads: int = 1,
    seed: int = 0,
    memory_limit_bytes: float | None = None,
    assumed_share: float | None = None,
    tensor: int | None = None,
    runtime: str | None = None,
    global_batch: int | None = None,
    microbatch_size: int | None = None,
    choices: "Choices | None" = None,
    start: "PipelinePlan | None" = None,
    on_progress: OnProgress = silent,
    stop: StopToken | None = None,
) -> "PlanResult":
    """Plan one training iteration of ``chain`` on ``cluster``.

    Parameters
    ----------
    chain, cluster
        The model and the cluster; see :func:`load_model` and :func:`load_cluster`.
    microbatches
        Microbatches in an iteration.
    planner
        ``auto`` (the portfolio) or one that ``stagewright planners`` lists.
    time_limit
        Seconds.
    gap
        Planning ends as soon as the best checked plan is proved to be within this share of the
        best plan of its class: ``0.01`` or ``"1%"``.
    threads, seed
        Of the solvers; with one thread a run is reproducible.
    memory_limit_bytes
        Limit on the memory of every device; None: no limit.
    assumed_share
        Planner ``ooo`` on a single device: the share of it that kernels occupy where the profile
        has none, above 0 and at most 1; None: all of it.
    tensor
        The tensor degree of all stages: every so many devices of a server are planned as one, by
        SPP if ``planner`` is ``auto``; bounds are on all plans of that degree.
    runtime
        The framework that is to run the plan, as :func:`export` names it: only plans that it runs
        are answers, and ``PlanResult.restriction`` says what that costs.
    global_batch, microbatch_size
        In place of ``microbatches``: samples between two updates, and of a microbatch (None: all
        that divide the batch, within those of the model's costs; ``PlanResult.sizes`` has them).
    choices
        Recomputation and offloading; for the planners ``1f1b-star`` and ``madpipe`` also a group
        size, a period and the solver of patterns; the schedule to plan; for ``ooo`` the method of
        training; for ``2bw`` and ``2bw-flush`` a batch in place of ``microbatches``; for
        ``pipedream-async`` vertical sync
        (:class:`~stagewright.solvers.planners.steps.proposal.Choices`).
    start
        Planners ``auto`` and ``general``: a plan of the same layers to start from, though times,
        memory or devices may have changed. Its stages keep the devices that are still there, by
        name, and get free ones for the others. The answer is never worse than this plan with the
        present times, if that is valid.
    on_progress
        Called with the best iteration and the best bound on its class of plans (``plans``) so far,
        whenever one of them improves.
        ``best()`` of its argument is the best checked plan so far, or None.
    stop
        Ends the search within about a second once it is set, by another thread or a signal
        handler: a :class:`threading.Event`, or an object with ``is_set()``. The answer is then the
        best checked plan so far, with the status ``interrupted``. Without a token Ctrl-C does so in
        a notebook or an interactive session; in a script it raises KeyboardInterrupt.

    Returns
    -------
    Result
        Status, plan, cost, proved bound and gap. Infeasible is an answer, not an error.

    Raises
    ------
    InputError
        If an argument is not valid, with the reason in one line.
    """
    given = fields_of(locals(), "global_batch", "choices", "start", "on_progress", "stop")
    from stagewright.front.results import shown, stopped_by_hand
    from stagewright.service.pipelines.planning import plan as answer
    from stagewright.solvers.planners.steps.proposal import Choices

    asked = choices or Choices()
    if asked.runtime is not None:
        raise InputError("choices.runtime: give runtime='megatron' or the like to plan itself")
    chosen = {one.name: getattr(asked, one.name) for one in fields(asked)}
    if start is not None:
        chosen["start"] = start
    if global_batch is not None:
        chosen["batch"] = global_batch
    request = PlanRequest.of(**chosen | given | {"gap": parse_share(gap, "gap")})
    with stopped_by_hand(stop) as token:
        return shown(answer(request, on_progress, token).result)


def show(
    plan: "PipelinePlan",
    path: str | os.PathLike[str] | None = None,
    cluster: "Cluster | None" = None,
) -> "Picture | None":
    """The timeline of ``plan``: a picture that a notebook draws, or a file.

    A ``path`` ends in .html (a page with memory, bounds and stages, and with its links if the
    ``cluster`` is given), .png, or .json (a trace for Perfetto or Chrome).

    Raises
    ------
    InputError
        If the name ends in something else, or the plan's devices are not in the cluster.
    """
    from stagewright.executor.drawing.charts.chart import png
    from stagewright.executor.drawing.chrome import chrome_trace
    from stagewright.executor.drawing.page import page
    from stagewright.front.results import Picture

    if path is None:
        return Picture(plan)
    drawings: dict[str, Callable[[PipelinePlan], str | bytes]] = {
        ".html": partial(page, cluster=cluster),
        ".png": png,
        ".json": chrome_trace,
    }
    kind = Path(path).suffix
    if kind not in drawings:
        raise InputError(f"{path}: the name must end in {', '.join(drawings)}")
    documents.write_file(path, drawings[kind](plan))
    return None


def export(
    plan: "PipelinePlan | LayoutPlan", to: str, folder: str | os.PathLike[str], **options: Any
) -> tuple[Path, ...]:
    """Write a plan for another framework into a new or empty ``folder``; the files' paths.

    ``plan`` is of :func:`plan` or :func:`train_plan`, ``to`` a format of ``stagewright export``,
    and ``options`` are fields of :class:`~stagewright.executor.export.options.Options`.

    Raises
    ------
    InputError
        If the format cannot express the plan, or an option does not apply to it.
    InvalidPlan
        If the plan's order is a deadlock.
    """
    from stagewright.executor.export.options import FormatOptions
    from stagewright.service.exporting import export as written

    files = written(plan, to, FormatOptions(**options))
    place = Path(folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(f"{folder} is there already: name a new folder")
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        documents.write_file(place / name, text)
    return tuple(place / name for name in files)


def sweep(
    chain: "Chain",
    cluster: "Cluster",
    microbatches: Sequence[int] = (),
    *,
    batches: Sequence[int] = (),
    devices: Sequence[int] = (),
    memory_bytes: Sequence[float] = (),
    planners: Sequence[str] = ("auto",),
    recompute: str | None = None,
    offload: bool | None = None,
    time_limit: float = 10.0,
    threads: int = 1,
    seed: int = 0,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    on_row: "Callable[[SweepRow], None] | None" = None,
    stop: StopToken | None = None,
) -> "SweepAnswer":
    """Plan every combination of the listed sizes; an empty list leaves what is given.

    ``devices`` are numbers of the first devices of ``cluster``, ``memory_bytes`` the memory of
    each; ``batches``, samples between two updates, are in place of ``microbatches``.
    ``time_limit`` is of each plan. ``engine`` is ``local`` (processes: ``workers``) or ``ray``.
    ``on_row`` is told of each row when it is planned. Rows are in the order of the lists, each with
    its own bound; ``answer.rows[answer.best]`` has the most samples per second.

    Raises
    ------
    InputError
        If an argument is not valid, or the planner refuses every combination.
    """
    given = fields_of(locals(), "on_row", "stop")
    from stagewright.service.pipelines.sweeping import SweepRequest
    from stagewright.service.pipelines.sweeping import sweep as answer

    lists = ("microbatches", "batches", "devices", "memory_bytes", "planners")
    request = SweepRequest.of(**given | {name: tuple(given[name]) for name in lists})
    return answer(request, on_row or (lambda _: None), stop)


def what_if(
    chain: "Chain",
    cluster: "Cluster",
    microbatches: int = 8,
    planner: str = "auto",
    time_limit: float = 10.0,
    *,
    runtime: str | None = None,
    memory_limit_bytes: float | None = None,
    threads: int = 1,
    seed: int = 0,
    on_row: "Callable[[WhatIfRow], None] | None" = None,
    stop: StopToken | None = None,
) -> "WhatIfAnswer":
    """What one more GB, faster links, or one more device or server would buy.

    Arguments as of :func:`plan`; ``time_limit`` is of each plan. ``on_row`` is told of each row
    when it is planned. A row says what the plan with the change saves against the best plan as
    things are, which is planned again from that of each change that seems to save, and what the
    bound with the change leaves at most.

    Raises
    ------
    InputError
        If an argument is not valid.
    """
    given = fields_of(locals(), "on_row", "stop")
    from stagewright.service.pipelines.what_if import what_if as answer

    return answer(PlanRequest.of(**given), on_row or (lambda _: None), stop)


def partition(
    chain: "Chain",
    cluster: "Cluster",
    microbatches: int = 8,
    stages: int | None = None,
    backend: str = "recurrence",
    time_limit: float = 10.0,
    *,
    memory_limit_bytes: float | None = None,
    stop: StopToken | None = None,
) -> "PartitionAnswer":
    """Divide ``chain`` into stages on ``cluster`` with the least bottleneck (SPP's BPPM).

    ``stages`` None: for every number of stages. ``backend``: ``recurrence`` is exact and fast;
    a backend of integer programs, such as ``highs``, verifies small cases independently.
    """
    given = fields_of(locals(), "stop")
    from stagewright.service.pipelines.partitioning import partition as answer

    return answer(PartitionRequest.of(**given), stop)


def check(plan: "PipelinePlan", chain: "Chain", cluster: "Cluster") -> "tuple[Violation, ...]":
    """Every rule that ``plan`` breaks as an answer for ``chain`` on ``cluster``; none if valid."""
    from stagewright.formulations.checking.check import check as check_plan

    request = CheckRequest.of(plan=plan, chain=chain, cluster=cluster)
    return check_plan(request.problem, request.plan)


def check_proofs(
    plan: "PipelinePlan", chain: "Chain", cluster: "Cluster", time_limit: float = 60.0
) -> "tuple[Verdict, ...]":
    """Prove every bound and guarantee of a valid plan again.

    The result is ``verified``, ``refuted``, or ``claimed`` if its search does not end within
    ``time_limit`` seconds. :func:`check` verifies those that need no search.
    """
    given = fields_of(locals())
    from stagewright.service.pipelines.plans import check as answer

    return answer(CheckRequest.of(**given, proofs=True)).verdicts


def diff(
    first: "PipelinePlan | LayoutPlan", second: "PipelinePlan | LayoutPlan"
) -> "PlanDifference | LayoutDifference":
    """How much longer ``second`` takes than ``first``, by cause, and what it does otherwise.

    Both are plans, or both are layouts (see :func:`train_plan`).

    Raises
    ------
    InputError
        If they are of different kinds or models, or the schedule of a plan lacks actions.
    """
    from stagewright.executor.simulation.difference import differ
    from stagewright.formulations.plans.plan import PipelinePlan

    if isinstance(first, PipelinePlan) and isinstance(second, PipelinePlan):
        return differ(first, second)
    if isinstance(first, PipelinePlan) or isinstance(second, PipelinePlan):
        raise InputError("one is a plan, the other a layout: only two of a kind are compared")
    from stagewright.service.layouts.difference import layout_difference

    return layout_difference(first, second)


def simulate(
    plan: "PipelinePlan",
    chain: "Chain",
    cluster: "Cluster",
    *,
    jitter: float = 0.0,
    stragglers: Mapping[str, float] | None = None,
    seed: int = 0,
) -> "Simulation":
    """Run the order of ``plan`` under the cost model; see :mod:`simulate`."""
    given = fields_of(locals()) | {"stragglers": dict(stragglers or {})}
    from stagewright.service.pipelines.plans import simulate as answer

    return answer(SimulateRequest.of(**given)).simulation


def compare(plan: "PipelinePlan", trace: "Trace") -> "CompareAnswer":
    """Compare the predictions of ``plan`` with the measurements in ``trace``, of a run of it.

    Raises
    ------
    InputError
        If the trace is of another plan, or too short.
    """
    from stagewright.service.pipelines.plans import compare as answer

    return answer(CompareRequest.of(plan=plan, trace=trace))
