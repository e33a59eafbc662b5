"""``partition``, ``divide`` and ``jobshop``: published problems of scheduling by themselves."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stagewright.cli.commands import Asked, command
from stagewright.cli.console import percent, print_table, say, seconds, tell
from stagewright.cli.options import Printed, Served, Threaded, threads_of
from stagewright.cli.solving import find
from stagewright.graphs.documents.documents import read_text
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.service.operators.dividing import DivideAnswer, DividedSet, DivideRequest
from stagewright.service.options import Option
from stagewright.service.pipelines.requests import PartitionRequest
from stagewright.service.schedules.requests import JobShopRequest

if TYPE_CHECKING:
    from stagewright.service.pipelines.answers import PartitionAnswer, PartitionChoice
    from stagewright.service.schedules.requests import JobShopAnswer

MOST_NAMES = 3  # of a set's nodes that are printed


class Answered(Served, Printed):
    """Where an answer comes from, and how it is printed."""


@command(without="threads seed")
def partition(asked: Asked[PartitionRequest], given: Answered) -> int:
    """Divide a model into stages of minimum bottleneck (SPP's BPPM); exit code 1 if none fits."""
    from stagewright.service.pipelines.answers import PartitionAnswer

    answer = find(PartitionAnswer, asked.request(), "partitioning", given.server)
    tell(answer, given, _print_partition)
    return 0 if any(one.stages for one in answer.partitions) else 1


def _print_partition(answer: "PartitionAnswer") -> None:
    from stagewright.executor.drawing.timeline import shorten_devices

    print_table(
        ("stages", "<status", "bottleneck", "bound", "gap", "<layers", "<devices"),
        [
            (
                str(one.count), one.status, seconds(one.bottleneck_seconds),
                seconds(one.bound_seconds), percent(one.gap), _layers(one),
                " | ".join(shorten_devices(stage.devices) for stage in one.stages or ()),
            )
            for one in answer.partitions
        ],
    )  # fmt: skip
    say(
        f"{answer.model} on {answer.cluster}, {answer.microbatches} microbatches: the bottleneck "
        f"is the most time that an iteration spends on one stage or channel; by {answer.backend}, "
        f"{answer.wall_seconds:.2f} s"
    )


def _layers(one: "PartitionChoice") -> str:
    return " | ".join(f"{stage.layers[0]}-{stage.layers[1] - 1}" for stage in one.stages or ())


@command(
    without="threads seed",
    headings={"Workloads of dnn-partitioning": "hosts any_sets replicas objective"},
)
def divide(asked: Asked[DivideRequest], given: Answered) -> int:
    """Divide an operator graph among devices: least time between two samples; exit code 1 if none.

    Or least time of one sample (--objective latency).

    Operators in contiguous sets (Tarnawski et al. 2020), or layers in stages with replicas, shards
    and recomputation (Piper 2021).
    """
    name = asked.given["workload"].name
    answer = find(DivideAnswer, asked.request(), f"dividing {name}", given.server)
    is_latency = asked.given["objective"] == "latency"
    what = "for one sample" if is_latency else "between two samples"
    tell(answer, given, lambda answer: _print_division(name, answer, what))
    return 1 if answer.sets is None else 0


def _print_division(name: str, answer: DivideAnswer, what: str) -> None:
    if answer.sets is None or answer.cost_seconds is None:
        say(f"{name}: {answer.status}", *([answer.reason] if answer.reason else []))
        return
    print_table(
        ("set", "<device", "time", "memory", "nodes", "<first and last", "<computed"),
        [
            (
                str(number), _device(one), format_seconds(one.seconds),
                format_bytes(one.memory_bytes), str(len(one.nodes)), _ends(one), _options(one),
            )
            for number, one in enumerate(answer.sets)
        ],
    )  # fmt: skip
    say(
        f"{name}: {format_seconds(answer.cost_seconds)} {what} ({answer.status}), "
        f"bound {format_seconds(answer.bound_seconds or 0.0)} by {answer.proved_by}, gap "
        f"{percent(answer.gap)}, {answer.wall_seconds:.2f} s",
        f"of all {answer.plan_class}",
    )


def _device(one: DividedSet) -> str:
    if one.options is None:
        return one.device if one.replicas == 1 else f"{one.replicas} x {one.device}"
    return f"{one.replicas} x {one.shards}" if one.shards > 1 else str(one.replicas)


def _ends(one: DividedSet) -> str:
    if len(one.nodes) <= MOST_NAMES:
        return ", ".join(one.nodes)
    return f"{one.nodes[0]} ... {one.nodes[-1]}"


def _options(one: DividedSet) -> str:
    """How many layers are computed in each way."""
    names = one.options or ()
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


class JobShopOptions(Served, Threaded, Printed):
    """What ``jobshop`` is asked beside its request."""

    file: Annotated[Path, Option("FILE")]
    """An instance in a text format of the literature: OR-Library's, Taillard's or, of flexible job
    shops, .fjs."""
    instance: Annotated[str | None, Option(form="NAME")] = None
    """Of a file with several: ft06, or 1 for Taillard's first."""


def jobshop(asked: Asked[JobShopRequest], given: JobShopOptions) -> int:
    """Solve a job shop: minimise the makespan of jobs that visit machines in given orders.

    In a flexible job shop a step has a choice of machines.
    """
    from stagewright.formulations.pipelines.jobshop_text import parse_jobshop
    from stagewright.service.schedules.requests import JobShopAnswer

    file = given.file
    request = asked.request(
        jobs=parse_jobshop(read_text(file), str(file), given.instance).jobs,
        threads=threads_of(given.threads, given.server),
    )
    answer = find(JobShopAnswer, request, f"scheduling {file.name}", given.server)
    flexible = request.problem.is_flexible
    tell(answer, given, lambda answer: _print_jobshop(file.name, answer, flexible=flexible))
    return 1 if answer.starts is None else 0


def _print_jobshop(name: str, answer: "JobShopAnswer", flexible: bool) -> None:
    found = "no answer" if answer.makespan is None else f"makespan {answer.makespan}"
    say(
        f"{name}: {answer.jobs} jobs on {answer.machines} machines",
        f"{found} ({answer.status}), bound {answer.bound} by {answer.proved_by}, "
        f"gap {percent(answer.gap)}, {answer.wall_seconds:.2f} s",
    )
    steps = zip(answer.starts or (), answer.chosen_machines or (), strict=True)
    rows = [
        (
            str(j),
            " ".join(
                f"{start}@{on}" if flexible else str(start) for start, on in zip(*row, strict=True)
            ),
        )
        for j, row in enumerate(steps)
    ]
    if rows:
        where = "@machine, from 0" if flexible else ""
        print_table(("job", f"<starts of its steps{where}"), rows)
