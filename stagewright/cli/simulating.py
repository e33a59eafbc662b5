"""``simulate-cluster``: simulate a trace or a stream of jobs under a policy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.allocating import (
    SPELLED,
    Accelerators,
    Budget,
    PlacementSensitive,
    PolicyName,
    SpaceSharing,
    read_pool,
)
from stagewright.cli.console import (
    JsonFlag,
    Seed,
    Server,
    ask,
    percent,
    print_answer,
    print_lines,
    print_table,
)
from stagewright.cli.interrupts import interruptible
from stagewright.cli.outputs import Writes
from stagewright.cli.solving import find
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.executor.clusters.simulation import Progress
    from stagewright.executor.clusters.timeline import ClusterTimeline
    from stagewright.service.cluster_answers import SimulateClusterAnswer
    from stagewright.service.cluster_requests import SimulateClusterRequest

HOUR = 3600.0
PICTURE = Writes(".png", ".svg", ".pdf")
POISSON_WINDOW = "4000-5000"  # steady state, as in the thesis


def simulate_cluster(
    cluster: Accelerators,
    jobs: Annotated[
        Path | None, typer.Option(help="Jobs file with its throughputs.", metavar="FILE")
    ] = None,
    job_trace: Annotated[
        Path | None, typer.Option(help="Gavel trace of arriving jobs.", metavar="FILE")
    ] = None,
    throughputs: Annotated[
        Path | None, typer.Option(help="Gavel table of throughputs.", metavar="FILE")
    ] = None,
    poisson: Annotated[
        float | None, typer.Option(help="Generate jobs at this rate.", metavar="JOBS_PER_HOUR")
    ] = None,
    multi_gpu: Annotated[
        bool, typer.Option("--multi-gpu", help="With --poisson: jobs on 1, 2, 4 or 8 accelerators.")
    ] = False,
    priorities: Annotated[
        bool,
        typer.Option("--priorities", help="With --poisson: a fifth of the jobs have weight 5."),
    ] = False,
    slos: Annotated[
        bool,
        typer.Option("--slos", help="With --poisson: SLOs of 1.2, 2 or 10 times the duration."),
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(
            help="Measure these jobs, numbered by arrival, until they are complete; default: "
            f"{POISSON_WINDOW} with --poisson, else all.",
            metavar="FIRST-END",
        ),
    ] = None,
    policy: PolicyName = "max-min",
    space_sharing: SpaceSharing = False,
    placement_sensitive: PlacementSensitive = False,
    budget: Budget = None,
    round_seconds: Annotated[float, typer.Option(help="Length of a round.")] = 360.0,
    reset_seconds: Annotated[
        float, typer.Option(help="Least time between two allocations.")
    ] = 1920.0,
    ideal: Annotated[
        bool, typer.Option("--ideal", help="No rounds: every job receives exactly its share.")
    ] = False,
    hours_to_failure: Annotated[
        float | None, typer.Option(help="Mean hours until an accelerator fails.")
    ] = None,
    repair_hours: Annotated[float, typer.Option(help="Hours that a repair takes.")] = 1.0,
    seed: Seed = 0,
    png: Annotated[
        Path | None, typer.Option(help="Draw the assignments.", metavar="FILE"), PICTURE
    ] = None,
    completion_png: Annotated[
        Path | None,
        typer.Option(help="Draw the completion times' distribution.", metavar="FILE"),
        PICTURE,
    ] = None,
    utilisation_png: Annotated[
        Path | None, typer.Option(help="Draw the accelerators in use.", metavar="FILE"), PICTURE
    ] = None,
    server: Server = None,
    as_json: JsonFlag = False,
) -> int:
    """Simulate a cluster's rounds on a trace: completion times, fairness, cost, utilisation.

    Ctrl-C (or SIGTERM) ends the simulation and reports on the jobs so far; exit code 1 if none is
    complete.
    """
    from stagewright.service.cluster_requests import SimulateClusterRequest

    _require_pictures(ideal, png, completion_png, utilisation_png)
    generated = {"multi_gpu": multi_gpu, "priorities": priorities, "slos": slos}
    request = ask(
        SimulateClusterRequest,
        SPELLED,
        pool=read_pool(cluster),
        **_read_jobs(jobs, job_trace, throughputs, poisson, generated),
        window=_window(window or (POISSON_WINDOW if poisson is not None else None)),
        policy=policy,
        space_sharing=space_sharing,
        placement=placement_sensitive,
        budget_dollars=budget,
        round_seconds=round_seconds,
        reset_seconds=reset_seconds,
        ideal=ideal,
        hours_to_failure=hours_to_failure,
        repair_hours=repair_hours,
        seed=seed,
        keep_assignments=png is not None,
    )
    answer = _found(request, server)
    _draw(answer.timeline, policy, png, completion_png, utilisation_png)
    if as_json:
        print_answer(answer)
    else:
        _print_summary(answer)
    return 1 if answer.status == "interrupted" and not answer.completed else 0


def _found(request: "SimulateClusterRequest", server: str | None) -> "SimulateClusterAnswer":
    from stagewright.service.cluster_answers import SimulateClusterAnswer

    if server is not None:
        return find(SimulateClusterAnswer, request, "simulating", server)
    from stagewright.service.cluster_simulation import simulate_cluster as answer_of

    with interruptible() as stop, _progress(request.window) as on_progress:
        return answer_of(request, on_progress, stop)


def _require_pictures(ideal: bool, timeline: Path | None, *others: Path | None) -> None:
    """Check the options before the simulation, which may take hours."""
    from stagewright.executor.drawing.cluster_chart import require_suffix

    for path in (timeline, *others):
        if path is not None:
            require_suffix(path)
    if ideal and timeline is not None:
        raise InputError("--ideal has no rounds to draw: leave out --png")


def _read_jobs(
    jobs: Path | None,
    trace: Path | None,
    throughputs: Path | None,
    poisson: float | None,
    generated: dict[str, bool],
) -> dict[str, Any]:
    """The workload of a request, or the arrivals."""
    from stagewright.graphs.importers.gavel import read_gavel, read_throughputs
    from stagewright.graphs.workloads.jobs import load_workload
    from stagewright.service.cluster_requests import ArrivalsRequest

    if sum(source is not None for source in (jobs, trace, poisson)) != 1:
        raise InputError("give one of --jobs FILE, --job-trace FILE, --poisson JOBS_PER_HOUR")
    if (jobs is None) != (throughputs is not None):
        raise InputError(
            "--job-trace and --poisson need --throughputs FILE; a jobs file has its own"
        )
    if poisson is None and any(generated.values()):
        raise InputError("--multi-gpu, --priorities and --slos belong to --poisson")
    if jobs is not None:
        return {"workload": load_workload(jobs)}
    assert throughputs is not None
    if trace is not None:
        return {"workload": read_gavel(trace, throughputs)}
    table = read_throughputs(throughputs)
    spelled = {"jobs_per_hour": "--poisson"}
    arrivals = ask(ArrivalsRequest, spelled, throughputs=table, jobs_per_hour=poisson, **generated)
    return {"arrivals": arrivals}


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, end = text.partition("-")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise InputError(f"--window {text!r} is no FIRST-END, for example {POISSON_WINDOW}")
    return int(first), int(end)


@contextmanager
def _progress(window: tuple[int, int] | None) -> "Iterator[Callable[[Progress], None] | None]":
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Bar(console=console) as bar:
        task = bar.add_task("simulating", total=None if window is None else window[1])

        def report(news: "Progress") -> None:
            bar.update(
                task,
                completed=news.completed,
                description=f"{news.seconds / HOUR:.0f} h, {news.active} jobs active",
            )

        yield report


def _draw(
    found: "ClusterTimeline",
    policy: str,
    timeline: Path | None,
    completion: Path | None,
    utilisation: Path | None,
) -> None:
    from stagewright.executor.drawing.cluster_chart import (
        draw_jct_cdf,
        draw_rounds,
        draw_utilisation,
    )

    if timeline is not None:
        draw_rounds(found, timeline)
    if completion is not None:
        draw_jct_cdf({policy: found}, completion)
    if utilisation is not None:
        draw_utilisation(found, utilisation)


def _print_summary(answer: "SimulateClusterAnswer") -> None:
    spread, by_weight = answer.percentile_jct_seconds, answer.mean_jct_seconds_by_weight
    rows = [
        ("average completion time", _hours(answer.mean_jct_seconds)),
        ("median, 90 %, 99 %", ", ".join(_hours(spread[share]) for share in ("50", "90", "99"))),
        *(
            (f"average, weight {weight}", _hours(mean))
            for weight, mean in by_weight.items()
            if len(by_weight) > 1
        ),
        ("makespan", _hours(answer.makespan_seconds)),
        ("finish-time fairness, mean and worst", _fairness(answer)),
        ("dollars", "-" if answer.dollars is None else f"{answer.dollars:.2f}"),
        ("SLOs missed", str(answer.slo_violations)),
        ("utilisation", percent(answer.utilisation)),
        ("leases renewed", percent(answer.lease_renewals)),
        ("deviation from the target", percent(answer.mean_deviation)),
        ("rounds, allocations", f"{answer.rounds}, {answer.allocations}"),
    ]
    print_lines(
        f"{answer.policy}: {answer.measured} jobs measured, {answer.completed} of {answer.jobs} "
        f"complete after {_hours(answer.seconds)}"
        + (", interrupted" if answer.status == "interrupted" else "")
    )
    print_table(("<what", "<found"), rows)


def _hours(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / HOUR:.2f} h"


def _fairness(answer: "SimulateClusterAnswer") -> str:
    mean, worst = answer.mean_finish_time_fairness, answer.worst_finish_time_fairness
    return "-" if mean is None or worst is None else f"{mean:.2f}, {worst:.2f}"
