"""``check``, ``simulate`` and ``show``: what is done with a plan file."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.console import (
    DEFAULT_THREADS,
    ClusterFile,
    JsonFlag,
    ModelFile,
    PlanFile,
    Seed,
    Threads,
    TimeLimit,
    percent,
    print_json,
    print_lines,
    print_table,
    progress,
    read_limits,
    read_problem,
)
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.executor.drawing.summary import StageSummary
    from stagewright.executor.simulation.results import PeriodicRun, Simulation
    from stagewright.formulations.checking.proofs import Verdict
    from stagewright.formulations.plans.pipeline import PipelineProblem
    from stagewright.formulations.plans.plan import (
        Certificate,
        PeriodicSchedule,
        PipelinePlan,
        Stage,
    )
    from stagewright.formulations.plans.plan_class import PlanClass
    from stagewright.graphs.models.chain import Chain


def check(
    plan: PlanFile,
    model: ModelFile,
    cluster: ClusterFile,
    proofs: Annotated[
        bool, typer.Option("--proofs", help="Run the searches behind the bounds again.")
    ] = False,
    time_limit: TimeLimit = 60.0,
    threads: Threads = DEFAULT_THREADS,
    as_json: JsonFlag = False,
) -> int:
    """Check a plan's rules and proofs again, from the definitions; exit code 1 if one is broken."""
    from stagewright.formulations.checking.check import predict
    from stagewright.graphs.documents.units import format_seconds
    from stagewright.solvers.proofs import check_with_proofs

    limits = read_limits(time_limit, threads, 0)
    answer, problem = _read_plan(plan, model, cluster)
    with progress("checking"):
        violations, verdicts = check_with_proofs(problem, answer, limits if proofs else None)
    cost = None if violations else predict(problem, answer).iteration_seconds
    if as_json:
        found = [
            {"rule": one.rule, "place": one.place, "message": one.message} for one in violations
        ]
        status = "invalid" if violations else "valid"
        print_json(
            {
                "status": status,
                "cost_seconds": cost,
                "violations": found,
                "proofs": [asdict(one) for one in verdicts],
            }
        )
        return 1 if violations else 0
    if verdicts:
        _print_verdicts(verdicts)
    if cost is not None:
        print_lines(f"{plan}: valid, {format_seconds(cost)} per iteration")
    else:
        rows = [(one.rule, one.place, one.message) for one in violations]
        rules = f"{len(rows)} broken rule{'s' if len(rows) > 1 else ''}"
        print_table(("<rule", "<place", "<what was found"), rows, f"{plan}: {rules}")
    return 1 if violations else 0


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
        float, typer.Option(help="Spread of the durations: deviation of their logarithm.")
    ] = 0.0,
    straggler: Annotated[
        list[str] | None,
        typer.Option(help="A slow device and its factor; may be repeated.", metavar="DEVICE=F"),
    ] = None,
    seed: Seed = 0,
    as_json: JsonFlag = False,
) -> int:
    """Run the order of a plan as discrete events, with jitter and stragglers if wanted."""
    from stagewright.executor.simulation.simulate import simulate as run
    from stagewright.graphs.documents.errors import InvalidPlan

    factors = dict(_read_straggler(text) for text in straggler or [])
    answer, problem = _read_plan(plan, model, cluster)
    try:
        with progress("simulating"):
            outcome = run(problem, answer, jitter=jitter, stragglers=factors, seed=seed)
    except InvalidPlan as error:
        if as_json:
            print_json({"status": "invalid", "reason": str(error)})
        else:
            print_lines(f"{plan} cannot run: {error}")
        return 1
    if as_json:
        print_json(_simulation_json(answer, outcome, jitter, factors, seed))
    else:
        _print_simulation(answer, outcome)
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
    as_json: JsonFlag = False,
) -> int:
    """Draw a plan, or print its summary where no file is asked for."""
    from stagewright.executor.drawing.chart import write_png
    from stagewright.executor.drawing.chrome import write_trace
    from stagewright.executor.drawing.page import write_html
    from stagewright.formulations.plans.plan import load_plan

    answer = load_plan(plan)
    writers: tuple[tuple[Path | None, Callable[[PipelinePlan, Path], None]], ...] = (
        (html, write_html),
        (png, write_png),
        (trace, write_trace),
    )
    wanted = [(path, write) for path, write in writers if path is not None]
    with progress("drawing"):
        for path, write in wanted:
            write(answer, path)
    if as_json:
        print_json(plan_json(answer) | {"files": [str(path) for path, _ in wanted]})
    elif wanted:
        print_lines(*(f"{path} is written" for path, _ in wanted))
    else:
        print_plan(answer)
    return 0


def plan_json(plan: "PipelinePlan | None") -> dict[str, Any]:
    """What ``--json`` says of a plan; the same fields, all null, without one."""
    certificate = plan.certificate if plan else None
    names = [
        f"{scope}_{name}"
        for scope in ("every", "schedule")
        for name in ("bound_seconds", "gap", "proved_by")
    ]
    predicted = plan.predicted if plan else None
    return {
        "planner": plan.planner if plan else None,
        "cost_seconds": certificate.cost_seconds if certificate else None,
        "bound_seconds": certificate.bound_seconds if certificate else None,
        "gap": certificate.gap if certificate else None,
        "proved_by": certificate.proved_by if certificate else None,
        "plans": class_json(certificate.plans if certificate else None),
        "schedule_plans": class_json(certificate.schedule_plans if certificate else None),
        **{name: getattr(certificate, name, None) for name in names},
        "stages": [
            {
                "layers": stage.layers,
                "devices": stage.devices,
                "replication": stage.replication,
                "recompute": stage.recompute,
                "offload": stage.offload,
            }
            for stage in plan.stages
        ]
        if plan
        else None,
        "period_seconds": getattr(plan.schedule, "period_seconds", None) if plan else None,
        "bubble": predicted.bubble if predicted else None,
        "peak_memory_bytes": max(predicted.peak_memory_bytes.values()) if predicted else None,
        "peak_memory_bytes_per_device": predicted.peak_memory_bytes if predicted else None,
        "guarantees": [
            {
                "theorem": one.theorem,
                "premise": one.premise,
                "seconds": one.seconds,
                "holds": one.holds,
            }
            for one in certificate.guarantees
        ]
        if certificate
        else None,
    }


def class_json(plans: "PlanClass | None") -> dict[str, Any] | None:
    """A class of plans, feature by feature, and in words."""
    return None if plans is None else {**asdict(plans), "text": str(plans)}


def print_plan(plan: "PipelinePlan", chain: "Chain | None" = None) -> None:
    """Print the stages of a plan and its certificate; layers by name where the chain is known."""
    from stagewright.executor.drawing.summary import summarise
    from stagewright.executor.drawing.timeline import headline
    from stagewright.formulations.plans.plan import PeriodicSchedule

    is_periodic = isinstance(plan.schedule, PeriodicSchedule)
    between = ["<first .. last layer"] if chain else []
    more = ["<index shifts", "<shares with"] if is_periodic else []
    manners = [_manner(stage) for stage in plan.stages]
    if any(manners):
        more.append("<how")
    print_lines(headline(plan))
    print_table(
        ["stage", "<layers", *between, "<devices", "replicas", "forward", "backward", "in flight",
         "peak memory", *more],
        [
            [*_stage_row(line, chain), *([manner] if any(manners) else [])]
            for line, manner in zip(summarise(plan), manners, strict=True)
        ],
    )  # fmt: skip
    if isinstance(plan.schedule, PeriodicSchedule):
        print_lines(*_period_lines(plan, plan.schedule))
    if plan.predicted is not None:
        print_lines(f"idle   {percent(plan.predicted.bubble)} of the used devices' time")
    if plan.certificate is not None:
        print_lines(*_certificate_lines(plan.certificate))


def _manner(stage: "Stage") -> str:
    """What a stage does that others do not: turns, recomputation, offloading."""
    turns = ["round-robin"] if stage.turns > 1 else []
    again = [f"recompute {stage.recompute}"] if stage.recompute != "none" else []
    return ", ".join([*turns, *again, *(["offload"] if stage.offload else [])])


def _stage_row(line: "StageSummary", chain: "Chain | None") -> list[str]:
    from stagewright.executor.drawing.summary import shared_text, shifts_text
    from stagewright.executor.drawing.timeline import shorten_devices
    from stagewright.graphs.documents.units import format_bytes, format_seconds

    peak = "-" if line.peak_memory_bytes is None else format_bytes(line.peak_memory_bytes)
    start, stop = line.layers
    names = [f"{chain.layers[start].name} .. {chain.layers[stop - 1].name}"] if chain else []
    more = [] if line.shifts is None else [shifts_text(line), shared_text(line)]
    return [
        str(line.stage), f"{start}-{stop - 1}", *names, shorten_devices(line.devices),
        str(len(line.devices)), format_seconds(line.forward_seconds),
        format_seconds(line.backward_seconds), str(line.in_flight), peak, *more,
    ]  # fmt: skip


def _period_lines(plan: "PipelinePlan", schedule: "PeriodicSchedule") -> list[str]:
    from stagewright.formulations.plans.periodic import iteration_seconds, latency
    from stagewright.graphs.documents.units import format_seconds

    period, pause = schedule.period_seconds, schedule.pause_seconds
    through, whole = latency(schedule), iteration_seconds(schedule, plan.microbatches)
    updates = f", a pause of {format_seconds(pause)} for the updates" if pause > 0 else ""
    return [
        f"period {format_seconds(period)}, a microbatch each{updates}: "
        f"{format_seconds(whole)} per iteration of {plan.microbatches}; "
        "the pipeline does not drain in between",
        f"       a microbatch takes {format_seconds(through)}, {through / period:.2f} periods, "
        "from its first action to its last",
    ]


def _certificate_lines(certificate: "Certificate") -> list[str]:
    from stagewright.formulations.checking.certificates import headlines
    from stagewright.graphs.documents.units import format_seconds

    lines = [
        f"cost   {format_seconds(certificate.cost_seconds)} per iteration",
    ]
    for i, one in enumerate(headlines(certificate)):
        lines.append(
            f"{'       ' if i else 'bound  '}{format_seconds(one.seconds)} for {one.plans}, gap "
            f"{percent(one.gap)}, proved by {one.proved_by}"
        )
    for promise in certificate.guarantees:
        holds = "holds" if promise.holds else "DOES NOT HOLD"
        lines.append(
            f"       {promise.theorem}: {format_seconds(promise.cost_seconds)} <= "
            f"{format_seconds(promise.seconds)} {holds}; {promise.premise}"
        )
    return lines


def _read_plan(plan: Path, model: Path, cluster: Path) -> "tuple[PipelinePlan, PipelineProblem]":
    """The plan, and the problem of its number of microbatches that it must answer."""
    from stagewright.formulations.plans.plan import load_plan

    answer = load_plan(plan)
    problem = read_problem(model, cluster, answer.microbatches, answer.memory_limit_bytes)
    if answer.digest != problem.digest:
        raise InputError(
            f"{plan} is a plan for another problem: it was made for {answer.model} on "
            f"{answer.cluster}, and its digest is not that of {model} and {cluster} with "
            f"{answer.microbatches} microbatches"
        )
    return answer, problem


def _read_straggler(text: str) -> tuple[str, float]:
    name, _, factor = text.rpartition("=")
    try:
        return name, float(factor)
    except ValueError:
        raise InputError(f"--straggler {text!r}: write DEVICE=FACTOR, e.g. s0g0=1.5") from None


def _simulation_json(
    plan: "PipelinePlan",
    outcome: "Simulation",
    jitter: float,
    stragglers: dict[str, float],
    seed: int,
) -> dict[str, Any]:
    from stagewright.executor.drawing.periods import iteration_seconds

    run = outcome.periodic
    return {
        "status": "simulated",
        "iteration_seconds": outcome.iteration_seconds,
        "plan_seconds": iteration_seconds(plan),
        "slowdown": _slowdown(plan, outcome),
        "period_seconds": run and run.period_seconds,
        "warm_up_seconds": run and run.warm_up_seconds,
        "drain_seconds": run and run.drain_seconds,
        "microbatches": run and run.microbatches,
        "idle_seconds": outcome.idle_seconds,
        "slack_seconds": outcome.slack_seconds,
        "jitter": jitter,
        "stragglers": stragglers,
        "seed": seed,
    }


def _slowdown(plan: "PipelinePlan", outcome: "Simulation") -> float:
    """The simulated time in terms of the plan's; nothing is slower where nothing takes time."""
    from stagewright.executor.drawing.periods import iteration_seconds

    planned = iteration_seconds(plan)
    return outcome.iteration_seconds / planned if planned else 1.0


def _print_simulation(plan: "PipelinePlan", outcome: "Simulation") -> None:
    from stagewright.executor.drawing.periods import iteration_seconds
    from stagewright.executor.drawing.timeline import shorten_devices
    from stagewright.graphs.documents.units import format_seconds

    def of_stage(devices: Sequence[str]) -> tuple[str, str]:
        idle = max(outcome.idle_seconds[device] for device in devices)
        # Rounded to nanoseconds: below that is only the rounding of sums.
        slack = abs(round(min(outcome.slack_seconds[device] for device in devices), 9))
        return percent(idle / (outcome.iteration_seconds or 1.0)), format_seconds(slack)

    planned = iteration_seconds(plan)
    print_lines(
        f"{format_seconds(outcome.iteration_seconds)} per iteration, "
        f"{_slowdown(plan, outcome):.4f} x the plan's {format_seconds(planned)}"
    )
    if outcome.periodic is not None:
        print_lines(*_run_lines(plan, outcome.periodic))
    rows = [
        (str(s), shorten_devices(stage.devices), *of_stage(stage.devices))
        for s, stage in enumerate(plan.stages)
    ]
    print_table(("stage", "<devices", "idle", "slack"), rows)


def _run_lines(plan: "PipelinePlan", run: "PeriodicRun") -> list[str]:
    from stagewright.executor.drawing.periods import iteration_seconds
    from stagewright.graphs.documents.units import format_seconds

    planned = iteration_seconds(plan) / plan.microbatches
    return [
        f"period {format_seconds(run.period_seconds)} per microbatch once the pipeline is full, "
        f"planned {format_seconds(planned)}",
        f"run of {run.microbatches} microbatches: warm-up {format_seconds(run.warm_up_seconds)}, "
        f"drain {format_seconds(run.drain_seconds)}",
    ]
