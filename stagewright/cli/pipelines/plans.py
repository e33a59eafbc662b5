"""``check``, ``simulate``, ``show`` and ``diff``: commands on plan files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stagewright.cli.commands import Asked, command
from stagewright.cli.console import (
    percent,
    print_json,
    print_table,
    print_violations,
    progress,
    say,
    size,
    tell,
    tell_drawn,
    tell_invalid,
)
from stagewright.cli.layouts.differing import diff_layouts, print_parts
from stagewright.cli.layouts.profiled import check_layout, check_profiled, check_tuning, is_layout
from stagewright.cli.options import Printed, Threaded, threads_of
from stagewright.cli.outputs import Writes, is_document
from stagewright.cli.pipelines.planning import print_plan
from stagewright.cli.placing import check_placement, show_placement
from stagewright.formulations.plans.plan import PipelinePlan, load_plan
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import format_seconds
from stagewright.graphs.machines.cluster import load_cluster
from stagewright.graphs.models.chain import load_model
from stagewright.service.options import Option
from stagewright.service.pipelines.requests import CheckRequest, SimulateRequest

if TYPE_CHECKING:
    from stagewright.executor.simulation.difference import PlanDifference
    from stagewright.executor.simulation.simulate import PeriodicRun
    from stagewright.formulations.checking.proofs import Verdict
    from stagewright.service.pipelines.answers import CheckAnswer, SimulateAnswer


class CheckOptions(Printed, Threaded):
    """What ``check`` is asked beside its request."""

    chain: Annotated[Path | None, Option("--model", form="FILE")] = None
    """Model file."""
    cluster: Annotated[Path | None, Option(form="FILE")] = None
    """Cluster file."""


def _own_check(plan: Path) -> Callable[[Path, bool], int] | None:
    """What checks a document that has its model and machines in it."""
    if is_layout(plan):
        return check_layout
    if is_document(plan, "tuning"):
        return check_tuning
    return check_profiled if is_document(plan, "profiled-plan") else None


@command(without="seed")
def check(asked: Asked[CheckRequest], given: CheckOptions) -> int:
    """Check a plan against all rules and verify its bounds; exit code 1 if one fails.

    What train-plan and tune wrote has its model and machines in it; other plans need both files.
    """
    from stagewright.service.pipelines.plans import check as check_plan

    plan, proofs = asked.given["plan"], asked.given["proofs"]
    model, cluster = given.chain, given.cluster
    own = _own_check(plan)
    if own is not None:
        if model is not None or cluster is not None or proofs:
            raise InputError(f"{plan} needs no --model, --cluster or --proofs: leave them out")
        return own(plan, given.as_json)
    if model is None or cluster is None:
        raise InputError("--model and --cluster are needed: the files that were planned")
    if is_document(plan, "operators"):
        if proofs:
            raise InputError("--proofs is for plans of pipelines: no search is behind these bounds")
        return check_placement(plan, model, cluster, given)
    request = asked.request(
        plan=load_plan(plan),
        chain=load_model(model),
        cluster=load_cluster(cluster),
        threads=threads_of(given.threads),
    )
    _require_problem(request, {"plan": plan, "chain": model, "cluster": cluster})
    with progress("checking"):
        answer = check_plan(request)
    tell(answer, given, lambda answer: _print_check(plan, answer))
    return 1 if answer.violations else 0


def _print_check(plan: Path, answer: "CheckAnswer") -> None:
    if answer.verdicts:
        _print_verdicts(answer.verdicts)
    if answer.cost_seconds is not None:
        say(f"{plan}: valid, {format_seconds(answer.cost_seconds)} per iteration")
        return
    print_violations(plan, answer.violations)


def _print_verdicts(verdicts: "Sequence[Verdict]") -> None:
    rows = []
    for one in verdicts:
        said = ": ".join(filter(None, (one.verdict, one.reason)))
        rows.append((one.place, format_seconds(one.seconds), one.name, said))
    print_table(("<place", "seconds", "<by", "<verdict"), rows)


class SimulateOptions(Printed):
    """What ``simulate`` is asked beside its request."""

    straggler: Annotated[list[str] | None, Option(form="DEVICE=F")] = None
    """A slow device and its factor; may be repeated."""


def simulate(asked: Asked[SimulateRequest], given: SimulateOptions) -> int:
    """Simulate a plan in its order by discrete events, with optional jitter and stragglers."""
    from stagewright.service.pipelines.plans import simulate as run

    factors = dict(_read_straggler(text) for text in given.straggler or [])
    request = asked.request(stragglers=factors)
    _require_problem(request, asked.given)
    try:
        with progress("simulating"):
            answer = run(request)
    except InvalidPlan as error:
        return tell_invalid(asked.given["plan"], error, given)
    tell(answer, given, lambda answer: _print_simulation(request.plan, answer))
    return 0


class ShowOptions(Printed):
    """What ``show`` is asked."""

    plan: Annotated[Path, Option("PLAN")]
    """Plan file."""
    html: Annotated[Path | None, Option(form="FILE"), Writes(".html", ".htm")] = None
    """Write a page with the timeline."""
    png: Annotated[Path | None, Option(form="FILE"), Writes(".png")] = None
    """Write a picture."""
    trace: Annotated[Path | None, Option(form="FILE"), Writes(".json")] = None
    """Write a trace for Perfetto or Chrome."""
    cluster: Annotated[Path | None, Option(form="FILE")] = None
    """Cluster file; the page draws its links."""


def show(given: ShowOptions) -> int:
    """Draw a plan, or print its summary if no file is given."""
    if given.cluster is not None and (given.html is None or is_document(given.plan, "operators")):
        raise InputError("--cluster: only the --html page of a pipeline plan draws links")
    if is_document(given.plan, "operators"):
        return show_placement(given)
    from stagewright.executor.drawing.charts.chart import png
    from stagewright.executor.drawing.chrome import chrome_trace
    from stagewright.executor.drawing.page import page
    from stagewright.service.pipelines.plans import summary

    answer = load_plan(given.plan)
    machines = None if given.cluster is None else load_cluster(given.cluster)
    drawings = (
        (given.html, partial(page, answer, machines)),
        (given.png, partial(png, answer)),
        (given.trace, partial(chrome_trace, answer)),
    )
    tell_drawn(summary(answer), given, drawings, lambda: _print_whole(answer))
    return 0


class DiffOptions(Printed):
    """What ``diff`` is asked."""

    plan: Annotated[Path, Option("PLAN")]
    """Plan file, or layout that train-plan wrote."""
    other: Annotated[Path, Option("OTHER")]
    """The second plan or layout, of the same model."""


def diff(given: DiffOptions) -> int:
    """Compare two plans or layouts of a model: what the second takes longer for and does otherwise.

    The causes of a finite plan are the actions and waits on its critical path, those of a periodic
    one the load and the idle time of its busiest device; they add up to the iteration. Of layouts
    they are the parts on the busiest rank; beside them are the prices and every rank's memory.
    """  # fmt: skip
    from stagewright.executor.simulation.difference import differ

    if is_layout(given.plan) or is_layout(given.other):
        return diff_layouts(given.plan, given.other, given.as_json)
    first, second = load_plan(given.plan), load_plan(given.other)
    found = differ(first, second)
    if given.as_json:
        print_json(asdict(found))
    else:
        _print_difference(found, first, second)
    return 0


def _print_difference(
    found: "PlanDifference", first: "PipelinePlan", second: "PipelinePlan"
) -> None:
    print_parts((found.iteration, *found.parts), found.iteration)
    memory = [size(peak) for peak in found.peak_memory_bytes]
    proofs = [one.certificate for one in (first, second)]
    gaps = ["no bound" if one is None else f"gap {percent(one.gap)} in its class" for one in proofs]
    say(
        f"peak memory: {memory[0]} -> {memory[1]}",
        f"proof: {gaps[0]} -> {gaps[1]}",
        *(found.changes or ("nothing else is different",)),
    )


def _print_whole(plan: "PipelinePlan") -> None:
    """Print a plan, and in sentences why its iteration takes so long."""
    from stagewright.executor.simulation.explanation import explain_plan, explanation_sentences

    print_plan(plan)
    say(*explanation_sentences(plan, explain_plan(plan)))


def _require_problem(request: CheckRequest | SimulateRequest, given: Mapping[str, Path]) -> None:
    """Refuse a plan that was made for another problem."""
    plan = request.plan
    if not plan.answers(request.problem.digest):
        raise InputError(
            f"{given['plan']} is a plan for another problem: it was made for {plan.model} on "
            f"{plan.cluster}, and its digest is not that of {given['chain']} and "
            f"{given['cluster']} with {plan.microbatches} microbatches"
        )


def _read_straggler(text: str) -> tuple[str, float]:
    name, _, factor = text.rpartition("=")
    try:
        return name, float(factor)
    except ValueError:
        raise InputError(f"--straggler {text!r}: write DEVICE=FACTOR, e.g. s0g0=1.5") from None


def _print_simulation(plan: "PipelinePlan", answer: "SimulateAnswer") -> None:
    from stagewright.executor.drawing.timeline import shorten_devices

    found = answer.simulation

    def of_stage(devices: Sequence[str]) -> tuple[str, str]:
        idle = max(found.idle_seconds[device] for device in devices)
        # Rounded to nanoseconds, to remove the rounding errors of sums.
        slack = abs(round(min(found.slack_seconds[device] for device in devices), 9))
        return percent(idle / (found.iteration_seconds or 1.0)), format_seconds(slack)

    say(
        f"{format_seconds(found.iteration_seconds)} per iteration, "
        f"{answer.slowdown:.4f} x the plan's {format_seconds(answer.plan_seconds)}"
    )
    if found.periodic is not None:
        say(*_run_lines(answer.plan_seconds / plan.microbatches, found.periodic))
    rows = [
        (str(s), shorten_devices(stage.devices), *of_stage(stage.devices))
        for s, stage in enumerate(plan.stages)
    ]
    print_table(("stage", "<devices", "idle", "slack"), rows)


def _run_lines(planned_seconds: float, run: "PeriodicRun") -> list[str]:
    return [
        f"period {format_seconds(run.period_seconds)} per microbatch once the pipeline is full, "
        f"planned {format_seconds(planned_seconds)}",
        f"run of {run.microbatches} microbatches: warm-up {format_seconds(run.warm_up_seconds)}, "
        f"drain {format_seconds(run.drain_seconds)}",
    ]
