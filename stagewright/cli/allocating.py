"""``allocate``, ``rounds`` and ``policies``: allocations of accelerators, and their rounds."""

from typing import TYPE_CHECKING

from stagewright.cli.commands import Asked, command
from stagewright.cli.common import Printed, Served, Written, tell
from stagewright.cli.console import percent, print_json, print_lines, print_table
from stagewright.cli.solving import find
from stagewright.formulations.clusters.allocation import throughput
from stagewright.formulations.clusters.allocation_plan import save_allocation
from stagewright.service.answers import Answer
from stagewright.service.cluster_requests import AllocateRequest, RoundsRequest

if TYPE_CHECKING:
    from stagewright.service.cluster_answers import (
        AllocateAnswer,
        AssignmentAnswer,
        RoundsAnswer,
    )

SHOWN_JOBS = 40


class AllocateOptions(Served, Written):
    """What ``allocate`` is asked beside its request."""


@command(without="threads")
def allocate(asked: Asked[AllocateRequest], given: AllocateOptions) -> int:
    """Divide the accelerators' time among jobs; exit code 1 if there is no such allocation."""
    from stagewright.service.cluster_answers import AllocateAnswer

    answer = find(AllocateAnswer, asked.request(), "allocating", given.server)
    written = given.output if answer.plan is not None else None
    if answer.plan is not None and written is not None:
        save_allocation(answer.plan, written)
    tell(answer, given, _print_allocation, [written])
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


class RoundsOptions(Served, Printed):
    """What ``rounds`` is asked beside its request."""


@command(without="threads seed")
def rounds(asked: Asked[RoundsRequest], given: RoundsOptions) -> int:
    """Realise an allocation in rounds: placements, renewed leases, deviation from the target."""
    from stagewright.service.cluster_answers import AllocateAnswer, RoundsAnswer

    def show(answer: Answer) -> None:
        if isinstance(answer, RoundsAnswer):
            _print_rounds(answer)
        elif isinstance(answer, AllocateAnswer):
            print_lines(f"{answer.policy}: {answer.status}, no allocation", *answer.notes)

    answer = find(Answer, asked.request(), "making rounds", given.server)
    tell(answer, given, show)
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
