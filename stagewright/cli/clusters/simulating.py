"""``simulate-cluster``: simulate a trace or a stream of jobs under a policy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stagewright.cli import interruptible
from stagewright.cli.commands import Asked, command
from stagewright.cli.console import percent, print_table, say, tell, terminal
from stagewright.cli.options import Printed, Served
from stagewright.cli.outputs import Writes
from stagewright.cli.solving import find
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.gavel import read_gavel, read_throughputs
from stagewright.graphs.workloads.jobs import load_workload
from stagewright.service.clusters.requests import ArrivalsRequest, SimulateClusterRequest
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.executor.clusters.simulation import ClusterState
    from stagewright.executor.clusters.timeline import ClusterTimeline
    from stagewright.formulations.forms.answers import Progress
    from stagewright.service.clusters.answers import SimulateClusterAnswer

HOUR = 3600.0
PICTURE = Writes(".png", ".svg", ".pdf")
_POISSON_WINDOW = (4000, 5000)  # steady state, as in the thesis


class SimulateClusterOptions(Served, Printed):
    """What ``simulate-cluster`` is asked beside its request and arrivals."""

    jobs: Annotated[Path | None, Option(form="FILE")] = None
    """Jobs file with its throughputs."""
    job_trace: Annotated[Path | None, Option(form="FILE")] = None
    """Gavel trace of arriving jobs."""
    throughputs: Annotated[Path | None, Option(form="FILE")] = None
    """Gavel table of throughputs."""
    jobs_per_hour: Annotated[float | None, Option("--poisson", form="JOBS_PER_HOUR")] = None
    """Generate jobs at this rate."""
    png: Annotated[Path | None, Option(form="FILE"), PICTURE] = None
    """Draw the assignments."""
    completion_png: Annotated[Path | None, Option(form="FILE"), PICTURE] = None
    """Draw the completion times' distribution."""
    utilisation_png: Annotated[Path | None, Option(form="FILE"), PICTURE] = None
    """Draw the accelerators in use."""


@command(
    without="keep_assignments",
    headings={
        "The policy": "space_sharing placement budget_dollars",
        "Arrivals": "throughputs jobs_per_hour load multi_gpu priorities slos",
        "Failures, and wrong rates": "hours_to_failure repair_hours drawn_rates",
        "Pictures": "png completion_png utilisation_png",
    },
)
def simulate_cluster(
    asked: Asked[SimulateClusterRequest],
    arrivals: Asked[ArrivalsRequest],
    given: SimulateClusterOptions,
) -> int:
    """Simulate a cluster's rounds on a trace: completion times, fairness, cost, utilisation.

    Ctrl-C (or SIGTERM) ends the simulation and reports on the jobs so far; exit code 1 if none is
    complete.
    """
    _require_pictures(given, asked.given["ideal"])
    steady = given.jobs_per_hour is not None and asked.given["window"] is None
    request = asked.request(
        **_read_jobs(arrivals, given),
        **({"window": _POISSON_WINDOW} if steady else {}),
        keep_assignments=given.png is not None,
    )
    answer = _found(request, given.server)
    _draw(answer.timeline, request.policy, given)
    tell(answer, given, _print_summary)
    return 1 if answer.status == "interrupted" and not answer.completed else 0


def _found(request: "SimulateClusterRequest", server: str | None) -> "SimulateClusterAnswer":
    from stagewright.service.clusters.answers import SimulateClusterAnswer

    if server is not None:
        return find(SimulateClusterAnswer, request, "simulating", server)
    from stagewright.service.clusters.simulation import simulate_cluster as answer_of

    with interruptible() as stop, _progress(request.window) as on_progress:
        return answer_of(request, on_progress, stop)


def _require_pictures(given: SimulateClusterOptions, ideal: bool) -> None:
    """Check the options before the simulation, which may take hours."""
    from stagewright.executor.drawing.charts.cluster import require_suffix

    for path in (given.png, given.completion_png, given.utilisation_png):
        if path is not None:
            require_suffix(path)
    if ideal and given.png is not None:
        raise InputError("--ideal has no rounds to draw: leave out --png")


def _read_jobs(arrivals: Asked[ArrivalsRequest], given: SimulateClusterOptions) -> dict[str, Any]:
    """The workload of a request, or the arrivals."""
    sources = (given.jobs, given.job_trace, given.jobs_per_hour)
    if sum(source is not None for source in sources) != 1:
        raise InputError("give one of --jobs FILE, --job-trace FILE, --poisson JOBS_PER_HOUR")
    if (given.jobs is None) != (given.throughputs is not None):
        raise InputError(
            "--job-trace and --poisson need --throughputs FILE; a jobs file has its own"
        )
    if given.jobs_per_hour is None and any(arrivals.given.values()):
        raise InputError("--load, --multi-gpu, --priorities and --slos belong to --poisson")
    if given.jobs is not None:
        return {"workload": load_workload(given.jobs)}
    assert given.throughputs is not None
    if given.job_trace is not None:
        return {"workload": read_gavel(given.job_trace, given.throughputs)}
    table = read_throughputs(given.throughputs)
    asked = arrivals.request(
        {"jobs_per_hour": "--poisson"}, throughputs=table, jobs_per_hour=given.jobs_per_hour
    )
    return {"arrivals": asked}


@contextmanager
def _progress(
    window: tuple[int, int] | None,
) -> "Iterator[Callable[[ClusterState | Progress], None] | None]":
    """A progress bar on stderr, if that is a terminal."""
    from rich.progress import Progress as Bar

    from stagewright.formulations.forms.answers import Progress

    console = terminal()
    if console is None:
        yield None
        return
    with Bar(console=console) as bar:
        task = bar.add_task("simulating", total=None if window is None else window[1])

        def report(news: "ClusterState | Progress") -> None:
            if isinstance(news, Progress):
                bar.update(task, description=news.doing)
                return
            bar.update(
                task,
                completed=news.completed,
                description=f"{news.seconds / HOUR:.0f} h, {news.active} jobs active",
            )

        yield report


def _draw(found: "ClusterTimeline", policy: str, given: SimulateClusterOptions) -> None:
    from stagewright.executor.drawing.charts.cluster import (
        draw_jct_cdf,
        draw_rounds,
        draw_utilisation,
    )

    if given.png is not None:
        draw_rounds(found, given.png)
    if given.completion_png is not None:
        draw_jct_cdf(found, policy, given.completion_png)
    if given.utilisation_png is not None:
        draw_utilisation(found, given.utilisation_png)


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
    say(
        f"{answer.policy}: {answer.measured} jobs measured, {answer.completed} of {answer.jobs} "
        f"complete after {_hours(answer.seconds)}"
        + (", interrupted" if answer.status == "interrupted" else "")
    )
    print_table(("<what", "<found"), rows)
    say(*answer.assumed)
    if answer.drawn:
        learned = sum(one.measured for one in answer.drawn)
        say(
            f"true rates drawn from the ranges of {len(answer.drawn)} computed ones; the policy "
            f"learned {learned} when jobs ran"
        )


def _hours(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / HOUR:.2f} h"


def _fairness(answer: "SimulateClusterAnswer") -> str:
    mean, worst = answer.mean_finish_time_fairness, answer.worst_finish_time_fairness
    return "-" if mean is None or worst is None else f"{mean:.2f}, {worst:.2f}"
