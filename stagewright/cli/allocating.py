"""``allocate``, ``rounds`` and ``policies``: allocations of accelerators, and their rounds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.console import (
    JsonFlag,
    OutputFile,
    Server,
    TimeLimit,
    ask,
    percent,
    print_answer,
    print_json,
    print_lines,
    print_table,
    read_limits,
)
from stagewright.cli.outputs import Reads
from stagewright.cli.solving import find
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.graphs.workloads.jobs import Workload
    from stagewright.graphs.workloads.pool import Pool
    from stagewright.service.cluster_answers import (
        AllocateAnswer,
        AssignmentAnswer,
        RoundsAnswer,
    )

SHOWN_JOBS = 40
SPELLED = {"budget_dollars": "--budget", "placement": "--placement-sensitive"}
"""Options whose name differs from the request's field."""

JobsFile = Annotated[Path, typer.Option("--jobs", help="Jobs file.", metavar="FILE")]
Accelerators = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="Accelerators as v100=36,p100=9x4@1.46 (9 servers of 4 at $1.46 an hour), or a file.",
        metavar="FILE|NAME=COUNT,...",
    ),
    Reads(),
]
PolicyName = Annotated[
    str, typer.Option("--policy", help="One of those that `stagewright policies` lists.")
]
SpaceSharing = Annotated[
    bool, typer.Option("--space-sharing", help="Two jobs may run on the same accelerators.")
]
PlacementSensitive = Annotated[
    bool,
    typer.Option(
        "--placement-sensitive",
        help="Distinguish accelerators of one server from those of several.",
    ),
]
Budget = Annotated[
    float | None, typer.Option("--budget", help="Dollars, for makespan-budget.", metavar="DOLLARS")
]

Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="Solver of the linear programs, e.g. pulp-cbc; cvxpy: the thesis's program.",
        metavar="NAME",
    ),
]


def allocate(
    jobs: JobsFile,
    cluster: Accelerators,
    policy: PolicyName = "water-filling",
    space_sharing: SpaceSharing = False,
    placement_sensitive: PlacementSensitive = False,
    budget: Budget = None,
    backend: Backend = None,
    parts: Annotated[
        int | None,
        typer.Option(
            help="max-min, makespan: split jobs and accelerators into N parts and solve each; the "
            "gap bounds the loss.",
            metavar="N",
        ),
    ] = None,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Solve the parts in parallel, on Ray.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Decides which job is in which part.")] = 0,
    time_limit: TimeLimit = 60.0,
    server: Server = None,
    output: OutputFile = None,
    as_json: JsonFlag = False,
) -> int:
    """Divide the accelerators' time among jobs; exit code 1 if there is no such allocation."""
    from stagewright.formulations.clusters.allocation_plan import save_allocation
    from stagewright.service.cluster_answers import AllocateAnswer
    from stagewright.service.cluster_requests import AllocateRequest

    limits = read_limits(time_limit, 1, seed)
    request = ask(
        AllocateRequest,
        SPELLED,
        **read_jobs(jobs, cluster),
        policy=policy,
        space_sharing=space_sharing,
        placement=placement_sensitive,
        budget_dollars=budget,
        backend=backend,
        parts=parts,
        at_once=at_once,
        time_limit=limits.seconds,
        seed=limits.seed,
    )
    answer = find(AllocateAnswer, request, "allocating", server)
    if output is not None and answer.plan is not None:
        save_allocation(answer.plan, output)
    if as_json:
        print_answer(answer)
    else:
        _print_allocation(answer)
        if output is not None and answer.plan is not None:
            print_lines(f"{output} is written")
    return 1 if answer.plan is None else 0


def policies(as_json: JsonFlag = False) -> int:
    """List the policies of allocate, rounds, simulate-cluster and run-cluster."""
    from stagewright.solvers.clusters.policies import POLICIES

    if as_json:
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


def read_pool(text: str) -> "Pool":
    """The accelerators of ``--cluster``: given as text, a pool file or a cluster file."""
    from stagewright.graphs.documents import documents
    from stagewright.graphs.machines.cluster import FORMAT as CLUSTER
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.graphs.workloads.pool import load_pool, parse_pool, pool_of_cluster

    path = Path(text)
    if not text or ("=" in text and not path.exists()):
        return parse_pool(text)
    if not path.exists():
        raise InputError(
            f"cluster {text!r}: there is no such file; accelerators are spelled v100=36,k80=9x4"
        )
    if f'"{CLUSTER}"' in documents.read_text(path):
        return pool_of_cluster(load_cluster(path))
    return load_pool(path)


def read_jobs(jobs: Path, cluster: str) -> "dict[str, Workload | Pool]":
    """The jobs and the accelerators of a request."""
    from stagewright.graphs.workloads.jobs import load_workload

    return {"workload": load_workload(jobs), "pool": read_pool(cluster)}


def _print_allocation(answer: "AllocateAnswer") -> None:
    jobs = len(answer.problem)
    found = "no allocation" if answer.objective is None else f"objective {answer.objective:.6g}"
    bound = "" if answer.bound is None else f", bound {answer.bound:.6g}, gap {percent(answer.gap)}"
    print_lines(
        f"{answer.policy}: {answer.status}, {found}{bound}, {jobs} jobs, "
        f"{answer.wall_seconds:.3f} s"
    )
    if answer.proved_by is not None:
        print_lines(f"bound by {answer.proved_by}")
    print_lines(*answer.notes)
    if answer.duals is not None:
        prices = answer.duals["accelerators"].items()
        print_lines("duals: " + ", ".join(f"{name} {price:.6g}" for name, price in prices))
    if answer.utilisation is None:
        return
    _print_shares(answer)
    parts = answer.utilisation.items()
    print_lines("in use: " + ", ".join(f"{name} {percent(part)}" for name, part in parts))
    if jobs > SHOWN_JOBS:
        print_lines(f"{jobs - SHOWN_JOBS} more jobs; --json or --output has all of them")


def _print_shares(answer: "AllocateAnswer") -> None:
    from stagewright.formulations.clusters.allocation import throughput

    problem, allocation = answer.problem, answer.result.allocation
    assert allocation is not None
    workers = problem.table.workers
    shares = allocation.dense(len(problem), len(workers))
    rates = throughput(problem, allocation)
    rows = [
        (
            problem.names[job],
            problem.table.kinds[problem.kind[job]][0],
            str(problem.scale[job]),
            *(f"{share:.3f}" if share > 1e-9 else "" for share in shares[job]),
            f"{rates[job]:.4g}",
        )
        for job in range(min(len(problem), SHOWN_JOBS))
    ]
    head = ("<job", "<model", "scale", *(worker.name for worker in workers), "steps/s")
    print_table(head, rows)


def rounds(
    jobs: JobsFile,
    cluster: Accelerators,
    policy: PolicyName = "water-filling",
    allocation: Annotated[
        Path | None,
        typer.Option(help="Realise this allocation file instead of a policy's.", metavar="FILE"),
    ] = None,
    count: Annotated[int, typer.Option("--rounds", help="How many rounds.")] = 10,
    round_seconds: Annotated[float, typer.Option(help="Length of a round.")] = 360.0,
    space_sharing: SpaceSharing = False,
    placement_sensitive: PlacementSensitive = False,
    budget: Budget = None,
    time_limit: TimeLimit = 60.0,
    server: Server = None,
    as_json: JsonFlag = False,
) -> int:
    """Realise an allocation in rounds: placements, renewed leases, deviation from the target."""
    from stagewright.formulations.clusters.allocation_plan import load_allocation
    from stagewright.service.answers import Answer
    from stagewright.service.cluster_answers import AllocateAnswer, RoundsAnswer
    from stagewright.service.cluster_requests import RoundsRequest

    limits = read_limits(time_limit, 1, 0)
    request = ask(
        RoundsRequest,
        SPELLED,
        **read_jobs(jobs, cluster),
        policy=policy,
        allocation=None if allocation is None else load_allocation(allocation),
        rounds=count,
        round_seconds=round_seconds,
        space_sharing=space_sharing,
        placement=placement_sensitive,
        budget_dollars=budget,
        time_limit=limits.seconds,
    )
    answer = find(Answer, request, "making rounds", server)
    if as_json:
        print_answer(answer)
    elif isinstance(answer, RoundsAnswer):
        _print_rounds(answer)
    elif isinstance(answer, AllocateAnswer):
        print_lines(f"{answer.policy}: {answer.status}, no allocation", *answer.notes)
    return 0 if isinstance(answer, RoundsAnswer) else 1


def _print_rounds(answer: "RoundsAnswer") -> None:
    names = answer.accelerators
    rows = []
    for number, assignments in enumerate(answer.rounds):
        cells = []
        for name in names:
            here = [one for one in assignments if one.accelerator == name]
            cells.append(" ".join(_spelled(one) for one in here))
        rows.append((str(number), *cells))
    print_table(("round", *(f"<{name}" for name in names)), rows)
    opportunities = sum(len(assignments) for assignments in answer.rounds[1:])
    renewed = sum(one.renewed for assignments in answer.rounds for one in assignments)
    print_lines(
        "+ shares its accelerators, = keeps its lease, xN runs on N",
        f"{answer.policy}: {len(answer.rounds)} rounds of {answer.round_seconds:g} s; "
        f"leases renewed: {renewed} of {opportunities}",
        f"from the target: mean {answer.mean_deviation:.4f} of the time, largest shortfall "
        f"{answer.largest_shortfall:.4f}",
    )


def _spelled(one: "AssignmentAnswer") -> str:
    size = f"x{len(one.numbers)}" if len(one.numbers) > 1 else ""
    return f"{'+'.join(one.jobs)}{size}{'=' if one.renewed else ''}"
