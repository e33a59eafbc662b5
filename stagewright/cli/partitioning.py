"""``partition``: stages with minimum bottleneck, by the recurrence or an integer program."""

from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.console import (
    ClusterFile,
    JsonFlag,
    MemoryLimit,
    ModelFile,
    Server,
    TimeLimit,
    ask,
    percent,
    print_answer,
    print_lines,
    print_table,
    read_limits,
)
from stagewright.cli.solving import find

if TYPE_CHECKING:
    from stagewright.service.pipeline_answers import PartitionAnswer, PartitionChoice


def partition(
    model: ModelFile,
    cluster: ClusterFile,
    microbatches: Annotated[int, typer.Option(help="Microbatches in an iteration.", metavar="M")],
    stages: Annotated[
        int | None, typer.Option(help="Number of stages; default: every number.", metavar="N")
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="recurrence; or, for small cases, a solver of integer programs such as highs, "
            "pulp-cbc or cvxpy.",
            metavar="NAME",
        ),
    ] = "recurrence",
    memory_limit: MemoryLimit = None,
    time_limit: TimeLimit = 10.0,
    server: Server = None,
    as_json: JsonFlag = False,
) -> int:
    """Divide a model into stages of minimum bottleneck (SPP's BPPM); exit code 1 if none fits."""
    from stagewright.graphs.documents.units import parse_bytes
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.graphs.models.chain import load_model
    from stagewright.service.pipeline_answers import PartitionAnswer
    from stagewright.service.pipeline_requests import PartitionRequest

    request = ask(
        PartitionRequest,
        {"memory_limit_bytes": "--memory-limit"},
        memory_limit_bytes=None
        if memory_limit is None
        else parse_bytes(memory_limit, "--memory-limit"),
        chain=load_model(model),
        cluster=load_cluster(cluster),
        microbatches=microbatches,
        stages=stages,
        backend=backend,
        time_limit=read_limits(time_limit, 1, 0).seconds,
    )
    answer = find(PartitionAnswer, request, "partitioning", server)
    if as_json:
        print_answer(answer)
    else:
        _print(answer)
    return 0 if any(one.stages for one in answer.partitions) else 1


def _print(answer: "PartitionAnswer") -> None:
    from stagewright.executor.drawing.timeline import shorten_devices

    print_table(
        ("stages", "<status", "bottleneck", "bound", "gap", "<layers", "<devices"),
        [
            (
                str(one.count), one.status, _seconds(one.bottleneck_seconds),
                _seconds(one.bound_seconds), percent(one.gap), _layers(one),
                " | ".join(shorten_devices(stage.devices) for stage in one.stages or ()),
            )
            for one in answer.partitions
        ],
    )  # fmt: skip
    print_lines(
        f"{answer.model} on {answer.cluster}, {answer.microbatches} microbatches: the bottleneck "
        f"is the most time that an iteration spends on one stage or channel; by {answer.backend}, "
        f"{answer.wall_seconds:.2f} s"
    )


def _layers(one: "PartitionChoice") -> str:
    return " | ".join(f"{stage.layers[0]}-{stage.layers[1] - 1}" for stage in one.stages or ())


def _seconds(value: float | None) -> str:
    from stagewright.graphs.documents.units import format_seconds

    return "-" if value is None else format_seconds(value)
