"""``price-jobs``, ``allocate``, ``estimate``, ``run-cluster``: jobs share a cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stagewright.cli import interruptible
from stagewright.cli.commands import Asked, ask, command
from stagewright.cli.console import (
    kept,
    percent,
    print_json,
    print_table,
    progress,
    say,
    tell,
)
from stagewright.cli.options import Printed, Served, Written
from stagewright.cli.outputs import Writes
from stagewright.cli.solving import find
from stagewright.formulations.clusters.allocation import throughput
from stagewright.formulations.clusters.allocation_plan import save_allocation
from stagewright.graphs.documents.documents import to_json, write_file
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import counts_of, load_workload, save_workload
from stagewright.service.clusters.requests import (
    AllocateRequest,
    EstimateRequest,
    MeasureRequest,
    PriceJobsRequest,
    RunClusterRequest,
)
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.service.clusters.answers import (
        AllocateAnswer,
        EstimateAnswer,
        PriceJobsAnswer,
        RunClusterAnswer,
    )

_SHOWN_JOBS = 40


@command(headings={"The machines": "server_bandwidth network_bandwidth store_bandwidth"})
def price_jobs(asked: Asked[PriceJobsRequest], given: Written) -> int:
    """Compute the throughputs of jobs that are trainings, by the search of train-plan.

    On each type of accelerator, for each number of them that a job of the training asks for. With
    --output a jobs file with these throughputs is written, in which nothing is left to compute.
    """
    from stagewright.service.clusters.pricing import price_jobs as answer_of

    request = asked.request()
    with interruptible() as stop, progress("computing throughputs", stop) as on_progress:
        answer = answer_of(request, on_progress, stop)
    tell(answer, given, _print_prices, kept(answer.workload, given, save_workload))
    return 0


def _print_prices(answer: "PriceJobsAnswer") -> None:
    from stagewright.service.clusters.told import prices_table

    table = prices_table(answer.prices)
    print_table(table.head, table.rows, tight=True)
    say(*answer.assumed, f"{len(table.rows)} throughputs in {answer.wall_seconds:.1f} s")


class AllocateOptions(Served, Written):
    """What ``allocate`` is asked beside its request."""


@command(
    without="threads",
    headings={
        "The policy": "space_sharing placement budget_dollars backend",
        "In parts": "parts at_once seed",
        "Why, and when": "explain forecast round_seconds",
    },
)
def allocate(asked: Asked[AllocateRequest], given: AllocateOptions) -> int:
    """Divide the accelerators' time among jobs; exit code 1 if there is no such allocation."""
    from stagewright.service.clusters.answers import AllocateAnswer

    answer = find(AllocateAnswer, asked.request(), "allocating", given.server)
    tell(answer, given, _print_allocation, kept(answer.plan, given, save_allocation))
    return 1 if answer.plan is None else 0


def policies(given: Printed) -> int:
    """List the policies of allocate, rounds, simulate-cluster and run-cluster."""
    from stagewright.solvers.clusters.policies import POLICIES

    if given.as_json:
        print_json(
            {
                "policies": [
                    {
                        "name": one.name,
                        "summary": one.summary,
                        "aware": one.aware,
                        "space_sharing": one.pairs,
                    }
                    for one in POLICIES.values()
                ]
            }
        )
        return 0
    rows = [
        (one.name, one.summary, "yes" if one.aware else "no", "yes" if one.pairs else "no")
        for one in POLICIES.values()
    ]
    print_table(("<policy", "<what it does", "<knows rates", "<space sharing"), rows)
    return 0


def _print_allocation(answer: "AllocateAnswer") -> None:
    jobs = len(answer.problem)
    found = "no allocation" if answer.objective is None else f"objective {answer.objective:.6g}"
    bound = "" if answer.bound is None else f", bound {answer.bound:.6g}, gap {percent(answer.gap)}"
    say(
        f"{answer.policy}: {answer.status}, {found}{bound}, {jobs} jobs, "
        f"{answer.wall_seconds:.3f} s"
    )
    if answer.proved_by is not None:
        say(f"bound by {answer.proved_by}")
    say(*answer.notes, *answer.assumed)
    if answer.duals is not None:
        prices = answer.duals["accelerators"].items()
        say("duals: " + ", ".join(f"{name} {price:.6g}" for name, price in prices))
    if answer.one_more is not None:
        more = answer.one_more.items()
        say("one more buys at most: " + ", ".join(f"{name} {worth:.4g}" for name, worth in more))
    if answer.utilisation is None:
        return
    _print_shares(answer)
    parts = answer.utilisation.items()
    say("in use: " + ", ".join(f"{name} {percent(part)}" for name, part in parts))
    if jobs > _SHOWN_JOBS:
        say(f"{jobs - _SHOWN_JOBS} more jobs; --json or --output has all of them")
    _print_why_and_when(answer)


def _print_shares(answer: "AllocateAnswer") -> None:
    problem, allocation = answer.problem, answer.result.allocation
    assert allocation is not None
    workers = problem.table.workers
    shares = allocation.dense(len(problem), len(workers))
    rates = throughput(problem, allocation)
    shown = [[f"{share:.3f}" if share > 1e-9 else "" for share in row] for row in shares]
    names = [worker.name for worker in workers]
    if any(worker.count for worker in workers):  # too many types for a column each
        shown = [
            [", ".join(f"{name} {share}" for name, share in zip(names, row, strict=True) if share)]
            for row in shown
        ]
        names = ["<share of time"]
    rows = [
        (
            problem.names[job],
            kind[0],
            "/".join(map(str, counts_of(kind))),
            *shown[job],
            f"{rates[job]:.4g}",
        )
        for job in range(min(len(problem), _SHOWN_JOBS))
        for kind in [problem.table.kinds[problem.kind[job]]]
    ]
    print_table(("<job", "<model", "scale", *names, "steps/s"), rows)


def _print_why_and_when(answer: "AllocateAnswer") -> None:
    from stagewright.service.clusters.told import forecast_table, job_lines, job_tables

    tables = []
    if answer.forecasts is not None:
        tables.append(forecast_table(answer.forecasts[:_SHOWN_JOBS]))
    if answer.explained is not None:
        say(f"Why {answer.explained.job}?", *job_lines(answer.explained))
        tables += job_tables(answer.explained)
    for table in tables:
        print_table(table.head, table.rows, table.title)


class EstimateOptions(Written):
    """What ``estimate`` is asked beside the request for pairs to measure."""

    jobs: Annotated[Path | None, Option(form="FILE")] = None
    """Jobs file whose new jobs are measured alone and in some pairs."""
    model: Annotated[str | None, Option("--choose", form="MODEL")] = None
    """Choose the pairs in which to measure a new model."""


def estimate(asked: Asked[MeasureRequest], given: EstimateOptions) -> int:
    """Estimate rates of new jobs that share accelerators, or choose the pairs to measure."""
    from stagewright.service.clusters.allocating import estimate as answer_of
    from stagewright.service.clusters.allocating import measure

    if (given.jobs is None) == (given.model is None):
        raise InputError("give one of --jobs FILE, --choose MODEL")
    if given.jobs is None:
        if given.output is not None:
            raise InputError("--output is for the jobs file of --jobs")
        chosen = measure(asked.request({"model": "--choose"}, model=given.model))
        head = ("<accelerator", "<reference job")
        tell(chosen, given, lambda answer: print_table(head, answer.pairs))
        return 0
    known = asked.values({"model"})["reference"]
    answer = answer_of(ask(EstimateRequest, reference=known, workload=load_workload(given.jobs)))
    tell(answer, given, _print, kept(answer.workload, given, save_workload))
    return 0


def _print(answer: "EstimateAnswer") -> None:
    print_table(
        ("<new job", "scale", "<most like"),
        [(one.model, str(one.scale), one.nearest) for one in answer.new],
    )
    rows = [
        (*one.models, str(one.scale), one.accelerator, *map("{:.4g}".format, one.steps_per_second))
        for one in answer.estimated
    ]
    print_table(("<job", "<beside", "scale", "<accelerator", "steps/s", "steps/s"), rows)
    say(f"{answer.measured} pairs are measured, {len(answer.estimated)} estimated")


class RunClusterOptions(Written):
    """What ``run-cluster`` is asked beside its request."""

    program: Annotated[list[str], Option(form="[MODEL=]PACKAGE:FUNCTION")]
    """Function that trains a job under a lease, of any model or of MODEL; repeatable."""
    folder: Annotated[Path, Option(form="DIR"), Writes(several=True)]
    """Checkpoints and the job store, shared by all nodes; a stopped run continues from it."""


@command(
    headings={
        "The policy": "space_sharing placement budget_dollars",
        "When jobs fail": "grace_seconds patience_seconds retries feedback",
        "Ray": "address",
    }
)
def run_cluster(asked: Asked[RunClusterRequest], given: RunClusterOptions) -> int:
    """Train the jobs of a workload in rounds on Ray; exit code 1 if one failed or still waits.

    After Ctrl-C (or SIGTERM) all jobs save checkpoints and end; the same command continues them.
    The exit code is then 0 if a job has made a step and none has failed. A second Ctrl-C ends
    immediately.
    """
    request = asked.request(folder=str(given.folder))
    programs = _programs(given.program, {job.model for job in request.workload.jobs})
    from stagewright.service.clusters.running import run_cluster as answer_of

    with interruptible() as stop:
        answer = answer_of(request, programs, stop)
    if given.output is not None:
        write_file(given.output, to_json(answer.report))
    tell(answer, given, _print_cluster_running, [given.output])
    progressed = answer.status == "interrupted" and any(job.steps for job in answer.jobs)
    return 0 if answer.status == "done" or progressed else 1


def _programs(texts: list[str], models: set[str]) -> dict[str, Callable[..., Any]]:
    """The program of each model; a program without a model trains all models without one."""
    from stagewright.cli.factories import load_factory

    found: dict[str, Callable[..., Any]] = {}
    rest: list[Callable[..., Any]] = []
    for text in texts:
        model, equals, name = text.rpartition("=")
        loaded = load_factory(name, "--program")
        if not equals:
            rest.append(loaded)
        elif model not in models:
            raise InputError(f"--program {text}: no job is of model {model!r}")
        elif model in found:
            raise InputError(f"--program {text}: {model!r} has a program already")
        else:
            found[model] = loaded
    if len(rest) > 1:
        raise InputError("--program: only one program can be without a model")
    return dict.fromkeys(models, rest[0]) | found if rest else found


def _print_cluster_running(answer: "RunClusterAnswer") -> None:
    print_table(
        ("<job", "<state", "steps", "seconds", "<error"),
        [
            (
                job.name, job.state, str(job.steps),
                "-" if job.completion_seconds is None else f"{job.completion_seconds:.1f}",
                job.error or "",
            )
            for job in answer.jobs
        ],
    )  # fmt: skip
    print_table(
        ("<job", "<accelerator", "planned", "measured", "predicted steps/s", "measured"),
        [
            (
                one.job, one.worker, f"{one.target:.3f}", f"{one.measured:.3f}",
                f"{one.predicted_steps_per_second:.4g}",
                "-" if one.steps_per_second is None else f"{one.steps_per_second:.4g}",
            )
            for one in answer.shares
        ],
    )  # fmt: skip
    say(f"{answer.policy}: {answer.status} after {answer.rounds} rounds")
