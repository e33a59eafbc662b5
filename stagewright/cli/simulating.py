"""``simulate-cluster``: a trace of jobs, or a stream of them, under a policy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.allocating import (
    Accelerators,
    Budget,
    Placement,
    PolicyName,
    SpaceSharing,
    read_pool,
    require_seconds,
)
from stagewright.cli.console import (
    JsonFlag,
    Seed,
    percent,
    print_json,
    print_lines,
    print_table,
)
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stagewright.executor.clusters.simulation import Progress
    from stagewright.executor.clusters.timeline import ClusterTimeline
    from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
    from stagewright.graphs.workloads.jobs import Entity, Job, Throughputs

HOUR = 3600.0
PICTURE = Writes(".png", ".svg", ".pdf")
POISSON_WINDOW = "4000-5000"  # steady state, as in the thesis


def simulate_cluster(
    cluster: Accelerators,
    jobs: Annotated[
        Path | None, typer.Option(help="Jobs file with its throughputs.", metavar="FILE")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Gavel trace.", metavar="FILE")] = None,
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
        bool, typer.Option("--priorities", help="With --poisson: a fifth of the jobs weigh 5.")
    ] = False,
    slos: Annotated[
        bool,
        typer.Option("--slos", help="With --poisson: SLOs of 1.2, 2 or 10 times the duration."),
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(
            help=f"Jobs FIRST-END that are measured and end the simulation; {POISSON_WINDOW} with "
            "--poisson, else all.",
            metavar="FIRST-END",
        ),
    ] = None,
    policy: PolicyName = "max-min",
    space_sharing: SpaceSharing = False,
    placement: Placement = False,
    budget: Budget = None,
    round_seconds: Annotated[float, typer.Option(help="Length of a round.")] = 360.0,
    reset_seconds: Annotated[
        float, typer.Option(help="Least time between two allocations.")
    ] = 1920.0,
    ideal: Annotated[
        bool, typer.Option("--ideal", help="No rounds: every job has exactly its share.")
    ] = False,
    hours_to_failure: Annotated[
        float | None, typer.Option(help="Mean hours until an accelerator fails.")
    ] = None,
    repair_hours: Annotated[float, typer.Option(help="Hours that a repair takes.")] = 1.0,
    seed: Seed = 0,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw who ran where.", metavar="FILE.png"), PICTURE
    ] = None,
    completion: Annotated[
        Path | None,
        typer.Option(help="Draw the completion times' distribution.", metavar="FILE.png"),
        PICTURE,
    ] = None,
    utilisation: Annotated[
        Path | None, typer.Option(help="Draw the accelerators in use.", metavar="FILE.png"), PICTURE
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Simulate a cluster's rounds on a trace: completion times, fairness, cost, utilisation."""
    from stagewright.executor.clusters.outages import outages
    from stagewright.executor.clusters.rules import Rules
    from stagewright.executor.clusters.simulation import simulate_cluster as simulate
    from stagewright.solvers.clusters.policies import policy_named

    _require_pictures(ideal, timeline, completion, utilisation)
    pool = read_pool(cluster)
    chosen = policy_named(policy)
    generated = (multi_gpu, priorities, slos)
    coming, table, entities = _jobs(jobs, trace, throughputs, poisson, generated, seed)
    measured = _window(window or (POISSON_WINDOW if poisson is not None else None))
    if measured is not None and isinstance(coming, tuple) and measured.stop > len(coming):
        raise InputError(f"--window {window}: there are {len(coming)} jobs, numbered from 0")
    rules = Rules(
        require_seconds(round_seconds, "--round-seconds"),
        require_seconds(reset_seconds, "--reset-seconds"),
        fill=chosen.fills,
        shuffle_seed=None if chosen.aware else seed + 5,
        space_sharing=space_sharing,
        placement=placement,
        ideal=ideal,
    )
    failures = (
        ()
        if hours_to_failure is None
        else outages(
            pool,
            require_seconds(hours_to_failure, "--hours-to-failure") * HOUR,
            require_seconds(repair_hours, "--repair-hours") * HOUR,
            seed,
        )
    )
    with _progress(measured) as on_progress:
        found = simulate(
            coming,
            table,
            pool,
            _allocator(policy, budget),
            rules,
            window=measured,
            entities=entities,
            failures=failures,
            keep_assignments=timeline is not None,
            on_progress=on_progress,
        )
    _draw(found, policy, timeline, completion, utilisation)
    document = _summary(found, policy, measured)
    if as_json:
        print_json(document)
    else:
        _print_summary(document)
    return 0


def _require_pictures(ideal: bool, timeline: Path | None, *others: Path | None) -> None:
    """Before the simulation, which may take hours."""
    from stagewright.executor.drawing.cluster_chart import require_suffix

    for path in (timeline, *others):
        if path is not None:
            require_suffix(path)
    if ideal and timeline is not None:
        raise InputError("--ideal has no rounds to draw: leave out --timeline")


def _jobs(
    jobs: Path | None,
    trace: Path | None,
    throughputs: Path | None,
    poisson: float | None,
    generated: tuple[bool, bool, bool],
    seed: int,
) -> "tuple[Iterable[Job], Throughputs, tuple[Entity, ...]]":
    from stagewright.graphs.importers.gavel import read_gavel, read_throughputs
    from stagewright.graphs.workloads.jobs import load_workload
    from stagewright.graphs.workloads.poisson import Arrivals

    if sum(source is not None for source in (jobs, trace, poisson)) != 1:
        raise InputError("give one of --jobs FILE, --trace FILE, --poisson JOBS_PER_HOUR")
    if (jobs is None) != (throughputs is not None):
        raise InputError("--trace and --poisson need --throughputs FILE; a jobs file has its own")
    if poisson is None and any(generated):
        raise InputError("--multi-gpu, --priorities and --slos belong to --poisson")
    if poisson is not None and throughputs is not None:
        if not 0 < poisson < float("inf"):
            raise InputError(
                f"--poisson must be a positive number of jobs per hour, got {poisson:g}"
            )
        table = read_throughputs(throughputs)
        return Arrivals(table, HOUR / poisson, seed, *generated), table, ()
    if trace is not None and throughputs is not None:
        workload = read_gavel(trace, throughputs)
    elif jobs is not None:
        workload = load_workload(jobs)
    return workload.jobs, workload.throughputs, workload.entities


def _window(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, end = text.partition("-")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise InputError(f"--window {text!r} is no FIRST-END, for example {POISSON_WINDOW}")
    return range(int(first), int(end))


def _allocator(policy: str, budget: float | None) -> "Callable[[AllocationProblem], Allocation]":
    from stagewright.solvers.clusters.policies import allocate

    def run(problem: "AllocationProblem") -> "Allocation":
        result = allocate(problem, policy, budget_dollars=budget)
        if result.allocation is None:
            why = "; ".join(result.notes) or result.status.value
            raise InputError(f"policy {policy!r} has no allocation for {len(problem)} jobs: {why}")
        return result.allocation

    return run


@contextmanager
def _progress(window: range | None) -> "Iterator[Callable[[Progress], None] | None]":
    """A bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Bar(console=console) as bar:
        task = bar.add_task("simulating", total=None if window is None else window.stop)

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


def _summary(found: "ClusterTimeline", policy: str, window: range | None) -> dict[str, Any]:
    import numpy as np

    durations, fairness = found.durations(window), found.fairness(window)
    weights = sorted({outcome.job.weight for outcome in found.jobs})
    return {
        "policy": policy,
        "jobs": len(found.jobs),
        "completed": int(sum(outcome.completion_seconds is not None for outcome in found.jobs)),
        "measured": len(durations),
        "mean_jct_seconds": float(durations.mean()) if durations.size else None,
        "percentile_jct_seconds": {
            str(share): float(np.percentile(durations, share)) if durations.size else None
            for share in (50, 90, 99)
        },
        "mean_jct_seconds_by_weight": {
            f"{weight:g}": found.mean_jct_seconds(window, weight) for weight in weights
        },
        "makespan_seconds": found.makespan_seconds,
        "mean_finish_time_fairness": float(fairness.mean()) if fairness.size else None,
        "worst_finish_time_fairness": float(fairness.max()) if fairness.size else None,
        "dollars": found.dollars,
        "slo_violations": found.slo_violations,
        "utilisation": found.utilisation,
        "lease_renewals": found.renewal_rate,
        "rounds": len(found.rounds),
        "allocations": len(found.resets),
        "mean_deviation": float(np.mean([one.mean_deviation for one in found.resets]))
        if found.resets
        else None,
        "seconds": found.seconds,
    }


def _print_summary(document: dict[str, Any]) -> None:
    def hours(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds / HOUR:.2f} h"

    spread = document["percentile_jct_seconds"]
    rows = [
        ("average completion time", hours(document["mean_jct_seconds"])),
        ("median, 90 %, 99 %", ", ".join(hours(spread[share]) for share in ("50", "90", "99"))),
        *(
            (f"average, weight {weight}", hours(mean))
            for weight, mean in document["mean_jct_seconds_by_weight"].items()
            if len(document["mean_jct_seconds_by_weight"]) > 1
        ),
        ("makespan", hours(document["makespan_seconds"])),
        ("finish-time fairness, mean and worst", _both(document)),
        ("dollars", "-" if document["dollars"] is None else f"{document['dollars']:.2f}"),
        ("SLOs missed", str(document["slo_violations"])),
        ("utilisation", percent(document["utilisation"])),
        ("leases renewed", percent(document["lease_renewals"])),
        ("deviation from the target", percent(document["mean_deviation"])),
        ("rounds, allocations", f"{document['rounds']}, {document['allocations']}"),
    ]
    print_lines(
        f"{document['policy']}: {document['measured']} jobs measured, {document['completed']} of "
        f"{document['jobs']} complete after {hours(document['seconds'])}"
    )
    print_table(("<what", "<found"), rows)


def _both(document: dict[str, Any]) -> str:
    mean, worst = document["mean_finish_time_fairness"], document["worst_finish_time_fairness"]
    return "-" if mean is None else f"{mean:.2f}, {worst:.2f}"
