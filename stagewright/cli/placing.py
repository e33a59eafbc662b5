"""Plans of operators: what ``plan``, ``check`` and ``show`` do with a graph or a plan of one."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.cli.commands import ask
from stagewright.cli.console import (
    kept,
    percent,
    print_json,
    print_table,
    print_violations,
    progress,
    say,
    tell,
    tell_drawn,
)
from stagewright.cli.options import Printed
from stagewright.cli.solving import find
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from stagewright.cli.commands import Asked
    from stagewright.cli.pipelines.planning import PlanOptions
    from stagewright.cli.pipelines.plans import ShowOptions
    from stagewright.executor.measuring.operator_runs import OperatorComparison
    from stagewright.executor.programs.trace import Trace
    from stagewright.formulations.operators.plan import OperatorPlan
    from stagewright.service.operators.plans import (
        PlaceAnswer,
        PlacementCheckAnswer,
        PlacementSummary,
    )
    from stagewright.service.pipelines.requests import PlanRequest

OPTIMAL_GAP = 1e-9  # relative
_MOST_SPLITS = 20  # that are printed
_MOST_OFF = 8  # operators and transfers whose times are furthest from the plan's


def place(asked: "Asked[PlanRequest]", given: "PlanOptions", threads: int) -> int:
    """Place the operators of a graph on a cluster; 1 if there is no plan, or none was found."""
    from stagewright.formulations.operators.plan import save_operator_plan
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.graphs.models.operators.step_graph import load_graph
    from stagewright.service.operators.plans import PlaceAnswer, PlaceRequest

    said = asked.given
    request = ask(
        PlaceRequest,
        graph=load_graph(said["chain"]),
        cluster=load_cluster(said["cluster"]),
        planner="fastt" if said["planner"] == "auto" else said["planner"],
        contention=given.contention or "none",
        time_limit=said["time_limit"],
        threads=threads,
        seed=said["seed"],
    )
    answer = find(PlaceAnswer, request, "placing operators", given.server)
    tell(answer, given, _print_place, kept(answer.plan, given, save_operator_plan))
    return 0 if answer.plan is not None else 1


def _print_place(answer: "PlaceAnswer") -> None:
    if answer.plan is not None:
        _print_placement(answer)
    reason = f": {answer.reason}" if answer.reason else ""
    whole = answer.status == "optimal" and (answer.any_splits_gap or 0.0) > OPTIMAL_GAP
    of = f" with {_splits(answer)}" if whole else ""
    say(f"{answer.planner}: {answer.status}{of} after {answer.wall_seconds:.2f} s{reason}")


def check_placement(plan: Path, model: Path, cluster: Path, given: Printed) -> int:
    """Check a plan of operators; 1 if it breaks a rule."""
    from stagewright.formulations.operators.plan import load_operator_plan
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.graphs.models.operators.step_graph import load_graph
    from stagewright.service.operators.plans import CheckPlacementRequest
    from stagewright.service.operators.plans import check as check_plan

    documents = load_operator_plan(plan), load_graph(model), load_cluster(cluster)
    fields = dict(zip(("plan", "graph", "cluster"), documents, strict=True))
    with progress("checking"):
        answer = check_plan(ask(CheckPlacementRequest, **fields))

    def show(answer: "PlacementCheckAnswer") -> None:
        if answer.cost_seconds is not None:
            say(f"{plan}: valid, {format_seconds(answer.cost_seconds)} per step")
        else:
            print_violations(plan, answer.violations)

    tell(answer, given, show)
    return 1 if answer.violations else 0


def show_placement(given: "ShowOptions") -> int:
    """Draw a plan of operators, or print its summary."""
    from stagewright.executor.drawing.operators import chrome_trace, page, png
    from stagewright.formulations.operators.plan import load_operator_plan
    from stagewright.service.operators.plans import summary

    placed = load_operator_plan(given.plan)
    drawings = [
        (path, partial(draw, placed))
        for path, draw in ((given.html, page), (given.png, png), (given.trace, chrome_trace))
    ]
    shown = summary(placed)
    tell_drawn(shown, given, drawings, lambda: _print_placement(shown))
    return 0


def compare_placement(plan: Path, trace: Path, png: Path | None, as_json: bool) -> int:
    """Compare the predictions of a plan of operators with a run of it."""
    from stagewright.cli.pipelines.comparing import run_line
    from stagewright.executor.programs.trace import load_trace
    from stagewright.formulations.operators.plan import load_operator_plan
    from stagewright.service.operators.plans import ComparePlacementRequest
    from stagewright.service.operators.plans import compare as answer_of

    planned, run = load_operator_plan(plan), load_trace(trace)
    answer = answer_of(ask(ComparePlacementRequest, plan=planned, trace=run))
    if png is not None:
        with progress("drawing"):
            _draw_run(planned, run, png)
    files = [] if png is None else [str(png)]
    if as_json:
        print_json(answer.json_object() | {"files": files})
        return 0
    say(run_line(run))
    _print_comparison(answer.comparison)
    say(*(f"{path} is written" for path in files))
    return 0


def _draw_run(planned: "OperatorPlan", run: "Trace", png: Path) -> None:
    from stagewright.cli.pipelines.comparing import run_line
    from stagewright.executor.drawing.operators import end_of, headline, stacked_png
    from stagewright.executor.measuring.pairs import median_step
    from stagewright.executor.programs.operators.placed import with_times

    measured = with_times(planned, median_step(run))
    pace = f"{format_seconds(end_of(measured))} per step"
    titles = f"predicted: {headline(planned)}", f"measured: {run_line(run)} · {pace}"
    documents.write_file(png, stacked_png((planned, measured), titles))


def _print_comparison(found: "OperatorComparison") -> None:
    from stagewright.cli.pipelines.comparing import cells, ratio

    head = ("count", "predicted", "measured", "ratio")
    for kind, totals in (("<together", found.kinds), ("<device", found.devices)):
        rows = [
            (name, str(one.count), *cells(one.seconds), ratio(one.seconds))
            for name, one in totals.items()
        ]
        print_table((kind, *head), rows)
    off = sorted(found.entries, key=lambda one: -abs(one.seconds.measured - one.seconds.predicted))
    rows = [
        (
            one.operator, one.device if one.target is None else f"{one.device} to {one.target}",
            *cells(one.seconds), ratio(one.seconds),
        )
        for one in off[:_MOST_OFF]
    ]  # fmt: skip
    print_table(("<furthest off", "<on", *head[1:]), rows)
    span = " to ".join(map(format_seconds, (found.least_seconds, found.most_seconds)))
    predicted, measured = cells(found.iteration_seconds)
    say(
        f"predicted {predicted}, measured {measured} "
        f"(median of {counted(found.steps, 'step', 'steps')}, {span}): measured / predicted = "
        f"{ratio(found.iteration_seconds)}"
    )


def _print_placement(placed: "PlacementSummary") -> None:
    """Print the devices of a placement, its splits and its certificate."""
    cost = placed.cost_seconds or 0.0
    parts = [f"{placed.model} on {placed.cluster}", placed.planner]
    parts.append(f"{placed.operators} operators, {placed.transfers} transfers")
    if placed.cost_seconds is not None:
        parts += [f"{format_seconds(cost)} per step", f"gap {percent(placed.gap)}"]
    say(" · ".join(parts))
    rows = [
        (
            one.device, str(one.operators), format_seconds(one.busy_seconds),
            percent(one.busy_seconds / cost if cost else None), format_bytes(one.peak_memory_bytes),
        )
        for one in placed.devices
    ]  # fmt: skip
    print_table(("<device", "operators", "computes", "busy", "peak memory"), rows)
    if placed.splits:
        head = ("<split operator", "<dimension", "parts")
        shown = placed.splits[:_MOST_SPLITS]
        print_table(head, [(one["operator"], one["dimension"], str(one["parts"])) for one in shown])
        if len(placed.splits) > len(shown):
            say(f"and {len(placed.splits) - len(shown)} more splits")
    say(*_certificate_lines(placed))


def _splits(placed: "PlacementSummary") -> str:
    """What all plans share that the bound is about: their splits, or none."""
    return "these splits" if placed.splits else "whole operators"


def _certificate_lines(placed: "PlacementSummary") -> list[str]:
    if placed.cost_seconds is None:
        return []
    assert placed.bound_seconds is not None
    assert placed.any_splits_seconds is not None
    lines = [
        f"cost   {format_seconds(placed.cost_seconds)} per step; transfers "
        + ("wait for each other" if placed.contention == "exclusive" else "do not wait"),
        f"bound  {format_seconds(placed.bound_seconds)} for {_splits(placed)}, "
        f"gap {percent(placed.gap)}, proved by {placed.proved_by}",
        f"       {format_seconds(placed.any_splits_seconds)} for any splits, gap "
        f"{percent(placed.any_splits_gap)}, proved by {placed.any_splits_proved_by}",
    ]
    if placed.unmeasured:
        lines.append(
            f"       {placed.unmeasured} operators have not been measured on some device and take "
            "no time there"
        )
    return lines
