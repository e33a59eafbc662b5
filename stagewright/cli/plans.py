"""``check``, ``simulate`` and ``show``: commands on a plan file."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.console import (
    ClusterFile,
    JsonFlag,
    ModelFile,
    PlanFile,
    Seed,
    Threads,
    TimeLimit,
    ask,
    percent,
    print_answer,
    print_json,
    print_lines,
    print_table,
    progress,
    read_limits,
)
from stagewright.cli.outputs import Writes
from stagewright.cli.printing import print_plan
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.executor.simulation.results import PeriodicRun
    from stagewright.formulations.checking.proofs import Verdict
    from stagewright.formulations.plans.plan import PipelinePlan
    from stagewright.service.pipeline_answers import CheckAnswer, SimulateAnswer


def check(
    plan: PlanFile,
    model: Annotated[Path | None, typer.Option(help="Model file.", metavar="FILE")] = None,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file.", metavar="FILE")] = None,
    proofs: Annotated[
        bool, typer.Option("--proofs", help="Run the searches behind the bounds again.")
    ] = False,
    time_limit: TimeLimit = 60.0,
    threads: Threads = None,
    as_json: JsonFlag = False,
) -> int:
    """Check a plan against all rules and verify its bounds; exit code 1 if one fails.

    What train-plan wrote has its model and machines in it; all other plans need both files.
    """
    from stagewright.cli.layouts import check_layout, is_layout
    from stagewright.cli.placing import check_placement, is_placement
    from stagewright.cli.profiled import check_profiled, is_profiled_plan
    from stagewright.service.pipeline_requests import CheckRequest
    from stagewright.service.plans import check as check_plan

    if is_layout(plan) or is_profiled_plan(plan):
        if model is not None or cluster is not None or proofs:
            raise InputError(f"{plan} needs no --model, --cluster or --proofs: leave them out")
        return (check_layout if is_layout(plan) else check_profiled)(plan, as_json)
    if model is None or cluster is None:
        raise InputError("--model and --cluster are needed: the files that were planned")
    if is_placement(plan):
        if proofs:
            raise InputError("--proofs is for plans of pipelines: no search is behind these bounds")
        return check_placement(plan, model, cluster, as_json)
    limits = read_limits(time_limit, threads, 0)
    request = ask(
        CheckRequest,
        **_read_plan(plan, model, cluster),
        proofs=proofs,
        time_limit=limits.seconds,
        threads=limits.threads,
    )
    with progress("checking"):
        answer = check_plan(request)
    if as_json:
        print_answer(answer)
    else:
        _print_check(plan, answer)
    return 1 if answer.violations else 0


def _print_check(plan: Path, answer: "CheckAnswer") -> None:
    from stagewright.graphs.documents.units import format_seconds

    if answer.verdicts:
        _print_verdicts(answer.verdicts)
    if answer.cost_seconds is not None:
        print_lines(f"{plan}: valid, {format_seconds(answer.cost_seconds)} per iteration")
        return
    rows = [(one.rule, one.place, one.message) for one in answer.violations]
    rules = f"{len(rows)} broken rule{'s' if len(rows) > 1 else ''}"
    print_table(("<rule", "<place", "<what was found"), rows, f"{plan}: {rules}")


def _print_verdicts(verdicts: "Sequence[Verdict]") -> None:
    from stagewright.graphs.documents.units import format_seconds

    rows = []
    for one in verdicts:
        said = ": ".join(filter(None, (one.verdict, one.reason)))
        rows.append((one.place, format_seconds(one.seconds), one.name, said))
    print_table(("<place", "seconds", "<by", "<verdict"), rows)


def simulate(
    plan: PlanFile,
    model: ModelFile,
    cluster: ClusterFile,
    jitter: Annotated[
        float, typer.Option(help="Jitter: standard deviation of the durations' logarithm.")
    ] = 0.0,
    straggler: Annotated[
        list[str] | None,
        typer.Option(help="A slow device and its factor; may be repeated.", metavar="DEVICE=F"),
    ] = None,
    seed: Seed = 0,
    as_json: JsonFlag = False,
) -> int:
    """Simulate a plan in its order by discrete events, with optional jitter and stragglers."""
    from stagewright.graphs.documents.errors import InvalidPlan
    from stagewright.service.answers import InvalidAnswer
    from stagewright.service.pipeline_requests import SimulateRequest
    from stagewright.service.plans import simulate as run

    factors = dict(_read_straggler(text) for text in straggler or [])
    given = _read_plan(plan, model, cluster)
    request = ask(SimulateRequest, **given, jitter=jitter, stragglers=factors, seed=seed)
    try:
        with progress("simulating"):
            answer = run(request)
    except InvalidPlan as error:
        if as_json:
            print_answer(InvalidAnswer(reason=str(error)))
        else:
            print_lines(f"{plan} cannot run: {error}")
        return 1
    if as_json:
        print_answer(answer)
    else:
        _print_simulation(request.plan, answer)
    return 0


def show(
    plan: PlanFile,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with the timeline.", metavar="FILE"),
        Writes(".html", ".htm"),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write a picture.", metavar="FILE"), Writes(".png")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a trace for Perfetto or Chrome.", metavar="FILE"),
        Writes(".json"),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster file; the page draws its links.", metavar="FILE")
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Draw a plan, or print its summary if no file is given."""
    from stagewright.cli.placing import is_placement, show_placement

    if cluster is not None and (html is None or is_placement(plan)):
        raise InputError("--cluster: only the --html page of a pipeline plan draws links")
    if is_placement(plan):
        return show_placement(plan, html, png, trace, as_json)
    from stagewright.executor.drawing.chart import write_png
    from stagewright.executor.drawing.chrome import write_trace
    from stagewright.executor.drawing.page import write_html
    from stagewright.formulations.plans.plan import load_plan
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.service.plans import summary

    answer = load_plan(plan)
    machines = None if cluster is None else load_cluster(cluster)
    writers: tuple[tuple[Path | None, Callable[[PipelinePlan, Path], None]], ...] = (
        (html, partial(write_html, cluster=machines)),
        (png, write_png),
        (trace, write_trace),
    )
    wanted = [(path, write) for path, write in writers if path is not None]
    with progress("drawing"):
        for path, write in wanted:
            write(answer, path)
    if as_json:
        print_json(summary(answer).json_object() | {"files": [str(path) for path, _ in wanted]})
    elif wanted:
        print_lines(*(f"{path} is written" for path, _ in wanted))
    else:
        print_plan(answer)
        _print_explanation(answer)
    return 0


def _print_explanation(plan: "PipelinePlan") -> None:
    from stagewright.executor.simulation.explanation import explain_plan
    from stagewright.executor.simulation.sentences import explanation_sentences

    print_lines(*explanation_sentences(plan, explain_plan(plan)))


def _read_plan(plan: Path, model: Path, cluster: Path) -> dict[str, Any]:
    """The plan, and the model and cluster of its problem."""
    from stagewright.formulations.plans.pipeline import PipelineProblem
    from stagewright.formulations.plans.plan import load_plan
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.graphs.models.chain import load_model

    answer, chain, machines = load_plan(plan), load_model(model), load_cluster(cluster)
    problem = PipelineProblem(
        chain,
        machines,
        answer.microbatches,
        answer.memory_limit_bytes,
        answer.assumed_share,
        answer.microbatch_size,
    )
    if not answer.answers(problem.digest):
        raise InputError(
            f"{plan} is a plan for another problem: it was made for {answer.model} on "
            f"{answer.cluster}, and its digest is not that of {model} and {cluster} with "
            f"{answer.microbatches} microbatches"
        )
    return {"plan": answer, "chain": chain, "cluster": machines}


def _read_straggler(text: str) -> tuple[str, float]:
    name, _, factor = text.rpartition("=")
    try:
        return name, float(factor)
    except ValueError:
        raise InputError(f"--straggler {text!r}: write DEVICE=FACTOR, e.g. s0g0=1.5") from None


def _print_simulation(plan: "PipelinePlan", answer: "SimulateAnswer") -> None:
    from stagewright.executor.drawing.timeline import shorten_devices
    from stagewright.graphs.documents.units import format_seconds

    found = answer.simulation

    def of_stage(devices: Sequence[str]) -> tuple[str, str]:
        idle = max(found.idle_seconds[device] for device in devices)
        # Rounded to nanoseconds, to remove the rounding errors of sums.
        slack = abs(round(min(found.slack_seconds[device] for device in devices), 9))
        return percent(idle / (found.iteration_seconds or 1.0)), format_seconds(slack)

    print_lines(
        f"{format_seconds(found.iteration_seconds)} per iteration, "
        f"{answer.slowdown:.4f} x the plan's {format_seconds(answer.plan_seconds)}"
    )
    if found.periodic is not None:
        print_lines(*_run_lines(answer.plan_seconds / plan.microbatches, found.periodic))
    rows = [
        (str(s), shorten_devices(stage.devices), *of_stage(stage.devices))
        for s, stage in enumerate(plan.stages)
    ]
    print_table(("stage", "<devices", "idle", "slack"), rows)


def _run_lines(planned_seconds: float, run: "PeriodicRun") -> list[str]:
    from stagewright.graphs.documents.units import format_seconds

    return [
        f"period {format_seconds(run.period_seconds)} per microbatch once the pipeline is full, "
        f"planned {format_seconds(planned_seconds)}",
        f"run of {run.microbatches} microbatches: warm-up {format_seconds(run.warm_up_seconds)}, "
        f"drain {format_seconds(run.drain_seconds)}",
    ]
