"""From options to the machines, the problem and the space of layouts."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from stagewright.cli.console import spelled, warn, with_option
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.formulations.parallelism.training import TrainingProblem
    from stagewright.graphs.machines.fabric import Fabric
    from stagewright.solvers.parallelism.space import Space


class Arithmetic(StrEnum):
    """Types of weights and activations; fp8 multiplies in 8 bits and keeps bf16."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


class Attention(StrEnum):
    """Whether the matrix of scores is stored."""

    FUSED = "fused"
    MATERIALIZED = "materialized"


SPELLED = {"memory_bytes": "--memory", "host_bytes_per_second": "--host-bandwidth"}
"""The options of a fabric's fields that have another name."""


def read_fabric(
    device: str | None,
    gpus: int | None,
    per_server: int | None,
    server_bandwidth: str | None,
    network_bandwidth: str | None,
    per_rack: int | None,
    rack_bandwidth: str | None,
    host_bandwidth: str | None,
    memory: str | None,
    cluster: Path | None,
) -> "Fabric":
    """The machines of the options, or of a cluster file."""
    from stagewright.graphs.documents.units import parse_bandwidth, parse_bytes
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.graphs.machines.devices import Accelerator, read_kind
    from stagewright.graphs.machines.fabric import fabric_of
    from stagewright.graphs.machines.networks import fabric_of_kind

    rates = {
        "--server-bandwidth": server_bandwidth,
        "--network-bandwidth": network_bandwidth,
        "--rack-bandwidth": rack_bandwidth,
        "--host-bandwidth": host_bandwidth,
    }
    options = {
        "--device": device,
        "--gpus": gpus,
        "--per-server": per_server,
        "--per-rack": per_rack,
        "--memory": memory,
        **rates,
    }
    kind = None if device is None else read_kind(device)
    if cluster is not None:
        own = kind if isinstance(kind, Accelerator) else None
        stray = [name for name, value in options.items() if value is not None]
        if own is not None:
            stray.remove("--device")  # the cluster file has the kind's name only
        if stray:
            raise InputError(f"{', '.join(stray)}: the cluster file says it; leave it out")
        return replace(fabric_of(load_cluster(cluster)), own_kind=own)
    if kind is None or gpus is None:
        raise InputError("give --device and --gpus, for example h100 and 64, or --cluster FILE")
    within, between, racks, host = [
        None if text is None else parse_bandwidth(text, name) for name, text in rates.items()
    ]
    fields: dict[str, Any] = {
        "per_server": per_server or 8,
        "server_bandwidth": within,
        "network_bandwidth": between,
        "per_rack": per_rack,
        "rack_bandwidth": racks,
        "memory_bytes": None if memory is None else parse_bytes(memory, "--memory"),
        "host_bytes_per_second": host,
    }
    try:
        return fabric_of_kind(kind, gpus, **fields)
    except InputError as error:
        message = with_option(str(error), ("gpus",), {})
        for field in fields:
            message = message.replace(field, SPELLED.get(field, spelled(field)))
        raise InputError(message) from None


def read_problem(
    config: Path,
    sequence: int,
    batch: int,
    fabric: "Fabric",
    precision: Arithmetic,
    attention: Attention,
    no_overlap: bool,
    reserve: str,
) -> "TrainingProblem":
    """The training problem of the options; a warning if its samples are longer than the model's."""
    from stagewright.graphs.documents.units import parse_bytes
    from stagewright.graphs.importers.hf_config import read_hf_config, read_most_positions
    from stagewright.service.training_problems import training_problem

    architecture, positions = read_hf_config(config), read_most_positions(config)
    if positions is not None and sequence > positions:
        warn(
            f"--sequence {sequence} is more than the max_position_embeddings of {config}, "
            f"{positions}; times and memory are those of such samples all the same"
        )
    try:
        return training_problem(
            architecture,
            fabric,
            sequence=sequence,
            batch=batch,
            precision=precision.value,
            attention=attention.value,
            overlap=not no_overlap,
            reserve_bytes=parse_bytes(reserve, "--reserve"),
        )
    except InputError as error:
        options = {"batch": "--global-batch", "reserve_bytes": "--reserve"}
        raise InputError(with_option(str(error), ("sequence", "precision"), options)) from None


# The fields of a space whose options have another name.
FIELDS = {"replicas": "data", "microbatch-sizes": "microbatch"}


def read_space(
    degrees: dict[str, str | None],
    chunks: int,
    zero: str,
    recompute: str,
    schedule: str,
    offload: bool,
) -> "Space":
    """The space of the options."""
    from stagewright.formulations.parallelism.layout import Schedule
    from stagewright.graphs.models.shards import Recompute
    from stagewright.solvers.parallelism.space import Space

    values: dict[str, Any] = {
        FIELDS.get(name, name): None if text is None else _integers(text, name)
        for name, text in degrees.items()
    }
    kinds = tuple(recompute.split(","))
    for kind in kinds:
        if kind not in get_args(Recompute):
            raise InputError(f"--recompute: {kind!r} is none of {', '.join(get_args(Recompute))}")
    schedules = tuple(schedule.split(","))
    for one in schedules:
        if one not in get_args(Schedule):
            raise InputError(f"--schedule: {one!r} is none of {', '.join(get_args(Schedule))}")
    stages = _integers(zero, "zero", least=0)
    if max(stages) > 3:
        raise InputError(f"--zero: {max(stages)} is none of 0, 1, 2, 3")
    return Space(
        **values,
        chunks=chunks,
        schedules=schedules,  # type: ignore[arg-type]
        recompute=kinds,  # type: ignore[arg-type]
        zero=stages,
        offload=(False, True) if offload else (False,),
    )


def _integers(text: str, name: str, least: int = 1) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(one) for one in text.split(",")}))
    except ValueError:
        raise InputError(f"--{name} {text!r}: write for example 1,2,4") from None
    if found[0] < least:
        raise InputError(f"--{name} must be at least {least}, got {found[0]}")
    return found
