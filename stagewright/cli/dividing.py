"""``divide``: published partition problems of operator graphs."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.console import (
    JsonFlag,
    Server,
    TimeLimit,
    ask,
    percent,
    print_answer,
    print_lines,
    print_table,
)
from stagewright.cli.makespans import limit_fields
from stagewright.cli.solving import find

if TYPE_CHECKING:
    from stagewright.service.dividing import DivideAnswer, DividedSet

MOST_NAMES = 3  # of a set's nodes that are printed


class Objective(StrEnum):
    """What is least."""

    LOAD = "load"
    PHASES = "phases"
    LATENCY = "latency"


def divide(
    file: Annotated[
        Path,
        typer.Argument(
            help="A workload of dnn-partitioning or of Piper (JSON).", show_default=False
        ),
    ],
    devices: Annotated[
        int | None, typer.Option(help="Devices; default: as in the file.", metavar="N")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of a device; default: as in the file.", metavar="SIZE"),
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(
            help="dnn-partitioning: processors besides; default: as in the file; with --objective "
            "latency only 0: none."
        ),
    ] = None,
    any_sets: Annotated[
        bool, typer.Option("--any-sets", help="dnn-partitioning: sets need not be contiguous.")
    ] = False,
    replicas: Annotated[
        int,
        typer.Option(
            help="dnn-partitioning: the most devices of a set; they exchange gradients at "
            "--bandwidth.",
            metavar="N",
        ),
    ] = 1,
    objective: Annotated[
        Objective,
        typer.Option(
            help="dnn-partitioning: the largest load; the largest forward load plus the largest "
            "backward load (phases), of a pipeline that does all forwards first; or the time of "
            "one sample (latency).",
        ),
    ] = Objective.LOAD,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Of a device, such as 25GB/s; Piper: default as in the file; dnn-partitioning: "
            "with --replicas."
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Piper: samples in a batch; default: as in the file.")
    ] = None,
    time_limit: TimeLimit = 10.0,
    server: Server = None,
    as_json: JsonFlag = False,
) -> int:
    """Divide an operator graph among devices: least time between two samples; exit code 1 if none.

    Or least time of one sample (--objective latency).

    Operators in contiguous sets (Tarnawski et al. 2020), or layers in stages with replicas, shards
    and recomputation (Piper 2021).
    """
    from stagewright.graphs.documents.units import parse_bandwidth, parse_bytes
    from stagewright.graphs.importers.partition_problems import load_partition_problem
    from stagewright.service.dividing import DivideAnswer, DivideRequest

    request = ask(
        DivideRequest,
        {"memory_bytes": "--memory", "bandwidth_bytes_per_second": "--bandwidth"},
        **limit_fields(time_limit, 1, 0),
        workload=load_partition_problem(file),
        devices=devices,
        memory_bytes=None if memory is None else parse_bytes(memory, "--memory"),
        hosts=hosts,
        any_sets=any_sets,
        replicas=replicas,
        objective=objective.value,
        bandwidth_bytes_per_second=(
            None if bandwidth is None else parse_bandwidth(bandwidth, "--bandwidth")
        ),
        samples=samples,
    )
    answer = find(DivideAnswer, request, f"dividing {file.name}", server)
    if as_json:
        print_answer(answer)
    else:
        what = "for one sample" if objective is Objective.LATENCY else "between two samples"
        _print(file.name, answer, what)
    return 1 if answer.sets is None else 0


def _print(name: str, answer: "DivideAnswer", what: str) -> None:
    from stagewright.graphs.documents.units import format_bytes, format_seconds

    if answer.sets is None or answer.cost_seconds is None:
        print_lines(f"{name}: {answer.status}", *([answer.reason] if answer.reason else []))
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
    print_lines(
        f"{name}: {format_seconds(answer.cost_seconds)} {what} ({answer.status}), "
        f"bound {format_seconds(answer.bound_seconds or 0.0)} by {answer.proved_by}, gap "
        f"{percent(answer.gap)}, {answer.wall_seconds:.2f} s",
        f"of all {answer.plan_class}",
    )


def _device(one: "DividedSet") -> str:
    if one.options is None:
        return one.device if one.replicas == 1 else f"{one.replicas} x {one.device}"
    return f"{one.replicas} x {one.shards}" if one.shards > 1 else str(one.replicas)


def _ends(one: "DividedSet") -> str:
    if len(one.nodes) <= MOST_NAMES:
        return ", ".join(one.nodes)
    return f"{one.nodes[0]} ... {one.nodes[-1]}"


def _options(one: "DividedSet") -> str:
    """How many layers are computed in each way."""
    names = one.options or ()
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
