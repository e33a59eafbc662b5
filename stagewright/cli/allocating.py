"""``allocate``, ``rounds`` and ``policies``: who gets which accelerators, and when."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.console import (
    JsonFlag,
    OutputFile,
    TimeLimit,
    percent,
    print_json,
    print_lines,
    print_table,
    read_limits,
)
from stagewright.cli.outputs import Reads
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.executor.clusters.rounds import Assignment
    from stagewright.formulations.clusters.allocation import AllocationProblem
    from stagewright.formulations.clusters.allocation_plan import AllocationPlan, Share
    from stagewright.graphs.workloads.jobs import Workload
    from stagewright.graphs.workloads.pool import Pool
    from stagewright.solvers.clusters.policies import AllocationResult

SHOWN_JOBS = 40
MOST_ROUNDS = 100_000

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
Placement = Annotated[
    bool,
    typer.Option("--placement", help="Jobs may run on one server's accelerators or on any."),
]
Budget = Annotated[
    float | None, typer.Option("--budget", help="Dollars, for makespan-budget.", metavar="DOLLARS")
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="Solver of the linear programs, e.g. pulp-cbc; cvxpy: the thesis's own program.",
        metavar="NAME",
    ),
]


def allocate(
    jobs: JobsFile,
    cluster: Accelerators,
    policy: PolicyName = "water-filling",
    space_sharing: SpaceSharing = False,
    placement: Placement = False,
    budget: Budget = None,
    backend: Backend = None,
    time_limit: TimeLimit = 60.0,
    output: OutputFile = None,
    as_json: JsonFlag = False,
) -> int:
    """Divide the accelerators' time among jobs; exit code 1 if what is asked cannot be had."""
    from stagewright.formulations.clusters.allocation_plan import save_allocation

    limits = read_limits(time_limit, 1, 0)
    workload, pool, problem = read_allocation_problem(jobs, cluster, space_sharing, placement)
    from stagewright.solvers.clusters.policies import allocate as solve

    result = solve(problem, policy, limits, budget_dollars=budget, backend=backend)
    plan = _plan_of(workload, pool, problem, result, space_sharing, placement)
    if output is not None and plan is not None:
        save_allocation(plan, output)
    if as_json:
        print_json(_allocation_json(problem, result, plan))
    else:
        _print_allocation(problem, result)
        if output is not None and plan is not None:
            print_lines(f"{output} is written")
    return 1 if plan is None else 0


def policies(as_json: JsonFlag = False) -> int:
    """List the policies of ``allocate``, ``rounds`` and ``simulate-cluster``."""
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
    """The accelerators of ``--cluster``: spelled out, a pool file or a cluster file."""
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


def read_allocation_problem(
    jobs: Path, cluster: str, space_sharing: bool, placement: bool
) -> "tuple[Workload, Pool, AllocationProblem]":
    """The problem of a jobs file on a cluster."""
    from stagewright.formulations.clusters.allocation import problem_of
    from stagewright.graphs.workloads.jobs import load_workload

    workload, pool = load_workload(jobs), read_pool(cluster)
    if space_sharing and not workload.throughputs.pairs:
        raise InputError(f"{jobs}: --space-sharing needs throughputs of pairs, the file has none")
    problem = problem_of(workload, pool, space_sharing=space_sharing, placement=placement)
    return workload, pool, problem


def _plan_of(
    workload: "Workload",
    pool: "Pool",
    problem: "AllocationProblem",
    result: "AllocationResult",
    space_sharing: bool,
    placement: bool,
) -> "AllocationPlan | None":
    from stagewright.formulations.clusters.allocation_plan import (
        AllocationPlan,
        digest_of,
        shares_of,
    )

    if result.allocation is None:
        return None
    return AllocationPlan(
        digest_of(workload, pool),
        result.policy,
        shares_of(problem, result.allocation),
        space_sharing,
        placement,
        _finite(result.objective),
        _finite(result.bound),
        result.proved_by,
        result.notes,
    )


def _finite(value: float | None) -> float | None:
    """None for what a document cannot hold: a makespan is inf if a job makes no progress."""
    return value if value is not None and math.isfinite(value) else None


def _allocation_json(
    problem: "AllocationProblem", result: "AllocationResult", plan: "AllocationPlan | None"
) -> dict[str, Any]:
    return {
        "status": result.status,
        "policy": result.policy,
        "objective": result.objective,
        "bound": result.bound,
        "gap": result.gap,
        "wall_seconds": result.seconds,
        "proved_by": result.proved_by,
        "notes": list(result.notes),
        "utilisation": _utilisation(problem, result),
        "duals": None if result.duals is None else result.duals.named(problem),
        "allocation": None if plan is None else [_share_json(share) for share in plan.shares],
    }


def _utilisation(
    problem: "AllocationProblem", result: "AllocationResult"
) -> dict[str, float] | None:
    """The part of each type's accelerators that works; None without an allocation."""
    from stagewright.formulations.clusters.allocation import accelerators_in_use

    if result.allocation is None:
        return None
    parts = accelerators_in_use(problem, result.allocation) / problem.table.counts
    return dict(zip(problem.table.pool.names, parts.tolist(), strict=True))


def _share_json(share: "Share") -> dict[str, Any]:
    fields = asdict(share)
    if share.placement is None:
        del fields["placement"]
    return fields


def _print_allocation(problem: "AllocationProblem", result: "AllocationResult") -> None:
    found = "no allocation" if result.objective is None else f"objective {result.objective:.6g}"
    bound = "" if result.bound is None else f", bound {result.bound:.6g}, gap {percent(result.gap)}"
    print_lines(
        f"{result.policy}: {result.status}, {found}{bound}, {len(problem)} jobs, "
        f"{result.seconds:.3f} s"
    )
    if result.proved_by is not None:
        print_lines(f"bound by {result.proved_by}")
    print_lines(*result.notes)
    if result.duals is not None:
        prices = result.duals.named(problem)["accelerators"].items()
        print_lines("duals: " + ", ".join(f"{name} {price:.6g}" for name, price in prices))
    if result.allocation is None:
        return
    from stagewright.formulations.clusters.allocation import throughput

    workers = problem.table.workers
    shares = result.allocation.dense(len(problem), len(workers))
    rates = throughput(problem, result.allocation)
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
    parts = (_utilisation(problem, result) or {}).items()
    print_lines("in use: " + ", ".join(f"{name} {percent(part)}" for name, part in parts))
    if len(problem) > SHOWN_JOBS:
        print_lines(f"{len(problem) - SHOWN_JOBS} more jobs; --json or --output has all of them")


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
    placement: Placement = False,
    budget: Budget = None,
    time_limit: TimeLimit = 60.0,
    as_json: JsonFlag = False,
) -> int:
    """Realise an allocation round by round: who runs where, who keeps its lease, what deviates."""
    from stagewright.graphs.documents.units import require_count

    require_count(count, "--rounds", MOST_ROUNDS)
    limits = read_limits(time_limit, 1, 0)
    given = _given_allocation(allocation, policy, budget)
    if given is not None:
        space_sharing, placement = given.space_sharing, given.placement
    workload, pool, problem = read_allocation_problem(jobs, cluster, space_sharing, placement)
    from stagewright.executor.clusters.rounds import Mechanism
    from stagewright.formulations.clusters.allocation_plan import allocation_of, digest_of
    from stagewright.solvers.clusters.policies import allocate as solve

    if given is not None:
        if given.digest != digest_of(workload, pool):
            raise InputError(f"{allocation}: answers other jobs, or another cluster")
        policy, target = given.policy, allocation_of(given, problem)
    else:
        result = solve(problem, policy, limits, budget_dollars=budget)
        if result.allocation is None:
            return _no_allocation(problem, result, as_json)
        target = result.allocation
    mechanism = Mechanism(problem.table, require_seconds(round_seconds, "--round-seconds"))
    mechanism.reset(problem, target, range(len(problem)))
    made = []
    for _ in range(count):
        assignments = mechanism.schedule()
        for one in assignments:
            mechanism.account(one, round_seconds)
        made.append(assignments)
    deviation = mechanism.deviation()
    document = {
        "policy": policy,
        "round_seconds": round_seconds,
        "rounds": [[_assignment_json(problem, one) for one in assignments] for assignments in made],
        "mean_deviation": deviation.mean,
        "largest_shortfall": deviation.shortfall,
    }
    if as_json:
        print_json(document)
    else:
        _print_rounds(problem, document)
    return 0


def _no_allocation(problem: "AllocationProblem", result: "AllocationResult", as_json: bool) -> int:
    if as_json:
        print_json(_allocation_json(problem, result, None))
    else:
        print_lines(f"{result.policy}: {result.status}, no allocation", *result.notes)
    return 1


def require_seconds(value: float, option: str) -> float:
    """Refuse a time that is not positive and finite."""
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{option} must be a positive number of seconds, got {value:g}")
    return value


def _given_allocation(
    path: Path | None, policy: str, budget: float | None
) -> "AllocationPlan | None":
    from stagewright.formulations.clusters.allocation_plan import load_allocation

    if path is None:
        return None
    if budget is not None:
        raise InputError("--budget belongs to a policy; --allocation has been made already")
    return load_allocation(path)


def _assignment_json(problem: "AllocationProblem", one: "Assignment") -> dict[str, Any]:
    kind = problem.table.workers[one.worker]
    return {
        "jobs": [problem.names[job] for job in one.jobs],
        "accelerator": problem.table.pool.names[kind.accelerator],
        "numbers": list(one.accelerators),
        "renewed": one.renewed,
    }


def _print_rounds(problem: "AllocationProblem", document: dict[str, Any]) -> None:
    names = problem.table.pool.names
    rows = []
    for number, assignments in enumerate(document["rounds"]):
        cells = []
        for name in names:
            here = [one for one in assignments if one["accelerator"] == name]
            cells.append(" ".join(_spelled(one) for one in here))
        rows.append((str(number), *cells))
    print_table(("round", *(f"<{name}" for name in names)), rows)
    opportunities = sum(len(assignments) for assignments in document["rounds"][1:])
    renewed = sum(one["renewed"] for assignments in document["rounds"] for one in assignments)
    print_lines(
        "+ shares its accelerators, = keeps its lease, xN runs on N",
        f"{document['policy']}: {len(document['rounds'])} rounds of "
        f"{document['round_seconds']:g} s; leases renewed: {renewed} of {opportunities}",
        f"from the target: mean {document['mean_deviation']:.4f} of the time, largest shortfall "
        f"{document['largest_shortfall']:.4f}",
    )


def _spelled(one: dict[str, Any]) -> str:
    scale = len(one["numbers"])
    size = f"x{scale}" if scale > 1 else ""
    return f"{'+'.join(one['jobs'])}{size}{'=' if one['renewed'] else ''}"
