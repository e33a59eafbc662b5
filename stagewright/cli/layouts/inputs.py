"""From options to the machines, the problem and the space of layouts, and to servers by kind."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field

from stagewright.cli.commands import CommandOptions, spelled, with_option
from stagewright.cli.console import warn
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import parse_bandwidth, parse_bytes
from stagewright.service.options import Option, one_or_several

if TYPE_CHECKING:
    from stagewright.formulations.parallelism.profiles.cluster import Pool, ServerPools
    from stagewright.formulations.parallelism.training import TrainingProblem
    from stagewright.graphs.machines.fabric import Fabric
    from stagewright.graphs.models.architecture import Architecture
    from stagewright.solvers.parallelism.space import Space

T = TypeVar("T")
Several = int | tuple[int, ...] | None

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
Gradients = Literal["fp32", "bf16"]
INPUTS = ("sequence", "images", "encoder_tokens")
GRADIENT_BYTES = {"fp32": 4, "bf16": 2}


def one_of(value: int | tuple[int, ...], option: str) -> int:
    """The one value of an option that may have several."""
    if isinstance(value, tuple):
        raise InputError(f"{option}: give one number here, got {', '.join(map(str, value))}")
    return value


class MachineOptions(CommandOptions):
    """The machines of a training run: of one kind, or those of a cluster file."""

    device: Annotated[str | None, Option(form="KIND")] = None
    """Kind of GPU, for example h100, or the JSON file of your own."""
    gpus: Annotated[Several, Option(form="N", of_text=one_or_several)] = None
    """Number of GPUs; of train-plan also several: 8,24,64, or 8-1024 (8, 16, ... 1024)."""
    per_server: Annotated[int | None, Option(form="N"), Field(ge=1)] = None
    """GPUs in a server; default: 8, of GB200 and GB300 those that NVLink joins."""
    server_bandwidth: str | None = None
    """From a GPU to the others of its server, as reached; default: 81 % of the kind's."""
    network_bandwidth: str | None = None
    """From a GPU out of its server while all send, as reached; default: 84 % of the kind's."""
    per_rack: Annotated[int | None, Option(form="N")] = None
    """GPUs in a rack or pod, with --rack-bandwidth."""
    rack_bandwidth: str | None = None
    """From a GPU out of its rack while all send."""
    host_bandwidth: str | None = None
    """From a GPU to its host's memory, for --offload-optimizer."""
    memory: Annotated[str | None, Option(form="SIZE")] = None
    """Memory of a GPU; default: that of the kind."""
    cluster: Annotated[Path | None, Option(form="FILE")] = None
    """Cluster file, in place of --device, --gpus and bandwidths."""

    def fabric(self) -> "Fabric":
        """The machines."""
        from stagewright.graphs.machines.cluster import load_cluster
        from stagewright.graphs.machines.devices import Accelerator, read_kind
        from stagewright.graphs.machines.fabric import fabric_of
        from stagewright.graphs.machines.networks import fabric_of_kind

        kind = None if self.device is None else read_kind(self.device)
        if self.cluster is not None:
            own = kind if isinstance(kind, Accelerator) else None
            stray = [
                spelled(name)
                for name in MachineOptions.model_fields
                # Of the kind the cluster file has the name only.
                if getattr(self, name) is not None
                and name != "cluster"
                and not (name == "device" and own is not None)
            ]
            if stray:
                raise InputError(f"{', '.join(stray)}: the cluster file says it; leave it out")
            return replace(fabric_of(load_cluster(self.cluster)), own_kind=own)
        if kind is None or self.gpus is None:
            raise InputError("give --device and --gpus, for example h100 and 64, or --cluster FILE")
        fields = self._rates()
        try:
            return fabric_of_kind(kind, one_of(self.gpus, "--gpus"), **fields)
        except InputError as error:
            message = with_option(str(error), ("gpus",), {})
            for field in fields:
                message = message.replace(field, SPELLED.get(field, spelled(field)))
            raise InputError(message) from None

    def _rates(self) -> dict[str, Any]:
        """The sizes and rates of the machines."""
        names = ("server_bandwidth", "network_bandwidth", "rack_bandwidth", "host_bandwidth")
        texts = {name: getattr(self, name) for name in names}
        rates = {
            name: None if text is None else parse_bandwidth(text, spelled(name))
            for name, text in texts.items()
        }
        memory = None if self.memory is None else parse_bytes(self.memory, "--memory")
        return {
            "per_server": self.per_server,
            "per_rack": self.per_rack,
            "memory_bytes": memory,
            "host_bytes_per_second": rates.pop("host_bandwidth"),
            **rates,
        }


class TuningOptions(CommandOptions):
    """Which weights are trained."""

    lora: Annotated[int | None, Option(form="RANK")] = None
    """Train LoRA adapters of this rank beside frozen weights."""
    lora_targets: Annotated[str | None, Option(form="NAME,NAME")] = None
    """Linear layers with adapters, as PEFT, Megatron-Bridge or torchtune name them; default:
    linear_qkv,linear_proj,linear_fc1,linear_fc2; with Accelerate q_proj,v_proj."""
    frozen: Annotated[str | None, Option(form="PART,PART")] = None
    """Layers that are not trained, for example embedding,head,blocks.0-15; with --lora: blocks
    without adapters."""


class NumberOptions(TuningOptions):
    """Which weights are trained, with which types, memory and rates."""

    images: Annotated[int | None, Option(form="N")] = None
    """Images in a sample of a model with a tower for them, each of the size that the
    configuration names; default: 1."""
    encoder_tokens: Annotated[int | None, Option(form="S")] = None
    """Tokens of the encoder in a sample; default: as many as of the decoder."""
    precision: Precision = "bf16"
    """Type of weights and activations; fp8, tf32: of products, beside bf16 and fp32."""
    attention: Literal["fused", "materialized"] = "fused"
    """fused: scores are not stored; materialized: they are."""
    reserve: Annotated[str | None, Option(form="SIZE")] = None
    """Memory of a GPU that is not for the plan; default: that of the software, else 2GB."""
    gradients: Gradients | None = None
    """Type of the sum of gradients; default: that of the software, else fp32."""
    rates: Annotated[str | None, Option(form="NAME|FILE")] = None
    """What kernels reach of the peaks: a rate set by name, or your own JSON file; default: measured
    with the framework on this kind of GPU, or the nearest."""


class TrainingOptions(NumberOptions):
    """What is trained, and with which types and memory."""

    global_batch: Annotated[int | None, Option(form="N")] = None
    """Samples between two updates."""
    sequence: Annotated[Several, Option(form="S", of_text=one_or_several)] = None
    """Tokens in a sample; for a config.json; of train-plan also several, such as 4096,32768."""
    no_overlap: bool = False
    """Exchanges of gradients and ZeRO wait for computations."""

    def problem(
        self,
        config: Path,
        fabric: "Fabric",
        framework: str | None = None,
        architecture: "Architecture | None" = None,
    ) -> "TrainingProblem":
        """The training problem; a warning if its samples are longer than the model's.

        The ``architecture`` is that of ``config`` unless it is given.
        """
        from stagewright.graphs.importers.hf_config import read_most_positions
        from stagewright.graphs.models.towers import with_inputs
        from stagewright.graphs.models.tuning import tuned_with
        from stagewright.service.architectures import read_architecture
        from stagewright.service.layouts.problems import training_problem

        if self.sequence is None:
            raise InputError(f"{config} needs --sequence, the tokens in a sample, for example 4096")
        if self.global_batch is None:
            raise InputError(f"{config} needs --global-batch, the samples between two updates")
        sequence = one_of(self.sequence, "--sequence")
        positions = read_most_positions(config) if architecture is None else None
        architecture = read_architecture(config) if architecture is None else architecture
        if positions is not None and sequence > positions:
            warn(
                f"--sequence {sequence} is more than the max_position_embeddings of {config}, "
                f"{positions}; times and memory are those of such samples all the same"
            )
        try:
            return training_problem(
                tuned_with(
                    with_inputs(
                        architecture, images=self.images, encoder_tokens=self.encoder_tokens
                    ),
                    lora=self.lora,
                    targets=self.lora_targets,
                    frozen=self.frozen,
                    framework=framework,
                ),
                fabric,
                sequence=sequence,
                batch=self.global_batch,
                precision=self.precision,
                attention=self.attention,
                overlap=not self.no_overlap,
                reserve_bytes=None
                if self.reserve is None
                else parse_bytes(self.reserve, "--reserve"),
                framework=framework,
                gradient_bytes=None if self.gradients is None else GRADIENT_BYTES[self.gradients],
                rates=self.rates,
            )
        except InputError as error:
            options = {
                "batch": "--global-batch", "reserve_bytes": "--reserve", "framework": "--for"
            }  # fmt: skip
            message = with_option(str(error), (*INPUTS, "precision", "rates"), options)
            raise InputError(message) from None


class DegreeOptions(CommandOptions):
    """The layouts that a search considers."""

    pipeline: str | None = None
    """Pipeline degrees to consider."""
    tensor: str | None = None
    """Tensor degrees to consider: 1,2,4."""
    context: str | None = None
    """Context degrees to consider."""
    replicas: str | None = None
    """Data degrees to consider: copies of the model."""
    expert: str | None = None
    """Expert degrees to consider."""
    microbatch_sizes: Annotated[str | None, Option(form="B,B,...")] = None
    """Samples of a microbatch to consider."""
    chunks: Annotated[int, Option(form="V")] = 16
    """The most stages on a pipeline rank (virtual stages)."""
    schedule: Annotated[str, Option(form="NAME,NAME")] = "1f1b,zero-bubble"
    """Schedules to consider."""
    zero: str = "0,1,2,3"
    """Stages of ZeRO to consider; 3 is FSDP."""
    recompute: str | None = None
    """none, selective, full, sets of modules such as moe_act+layernorm: which to consider; modules:
    all sets that the software has; offload: activations in host memory instead. Default: all, but
    offload only where the rates have measured it."""
    offload_optimizer: bool = False
    """Consider the optimizer in host memory too."""
    alike: bool = False
    """Only layouts whose stages are alike but for the ends."""

    def space(self, problem: "TrainingProblem") -> "Space":
        """The space of the problem's layouts."""
        from stagewright.formulations.parallelism.layout import Schedule
        from stagewright.formulations.parallelism.ranges import unmeasured
        from stagewright.graphs.models.modules import EVERY_SET, OFFLOAD, WHOLE, require_recompute
        from stagewright.solvers.parallelism.space import Space

        degrees: dict[str, Any] = {
            field: None if text is None else _integers(text, name)
            for name, field in DEGREES.items()
            for text in [getattr(self, name)]
        }
        stages = _integers(self.zero, "zero", least=0)
        if max(stages) > 3:
            raise InputError(f"--zero: {max(stages)} is none of 0, 1, 2, 3")
        recompute = (*WHOLE, EVERY_SET) if self.recompute is None else self.recompute.split(",")
        if self.recompute is None and "activation offload" not in unmeasured(problem):
            recompute = (*recompute, OFFLOAD)
        for one in recompute:
            if one not in (EVERY_SET, OFFLOAD):
                require_recompute(one, "--recompute", (EVERY_SET, OFFLOAD))
        return Space(
            **degrees,
            chunks=self.chunks,
            recompute=tuple(recompute),
            schedules=_names("--schedule", self.schedule, get_args(Schedule)),
            zero=stages,
            offload=(False, True) if self.offload_optimizer else (False,),
        )


DEGREES = {
    "pipeline": "pipeline", "tensor": "tensor", "context": "context", "replicas": "data",
    "expert": "expert", "microbatch_sizes": "microbatch",
}  # fmt: skip
"""The options of degrees, and the fields of a space."""

SPELLED = {"memory_bytes": "--memory", "host_bytes_per_second": "--host-bandwidth"}
"""The options of a fabric's fields that have another name."""


def _names(option: str, text: str, known: Sequence[str]) -> tuple[Any, ...]:
    """Names separated by commas."""
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise InputError(f"{option}: {name!r} is none of {', '.join(known)}")
    return names


def _integers(text: str, name: str, least: int = 1) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(one) for one in text.split(",")}))
    except ValueError:
        raise InputError(f"{spelled(name)} {text!r}: write for example 1,2,4") from None
    if found[0] < least:
        raise InputError(f"{spelled(name)} must be at least {least}, got {found[0]}")
    return found


_GROUP = re.compile(r"(?P<kind>[^:,]+):(?P<servers>\d{1,9})[xX](?P<devices>\d{1,9})")


def read_groups(text: str, option: str) -> list[tuple[str, int, int]]:
    """Kind, servers and devices of a server of every group."""
    found = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise InputError(
                f"{option} {part.strip()!r}: write KIND:SERVERSxGPUS, for example a100:2x4"
            )
        found.append((match["kind"], int(match["servers"]), int(match["devices"])))
    return found


def read_by_kind(
    text: str | None,
    option: str,
    parse: Callable[[str, str], T],
    kinds: Iterable[str],
    known: Callable[[str, str], str],
) -> dict[str, T]:
    """The value of each kind, from one for all ``kinds`` or several by kind; none without a text.

    ``known`` gives the kind that a text and its option name, or refuses it.
    """
    if text is None:
        return {}
    if "=" not in text:
        return dict.fromkeys(kinds, parse(text, option))
    pairs = [part.partition("=") for part in text.split(",")]
    found: dict[str, T] = {}
    for given, _, value in pairs:
        kind = known(given, option)
        if kind in found:
            raise InputError(f"{option}: {kind} is given twice; give it once")
        found[kind] = parse(value.strip(), option)
    return found


def read_server_pools(
    servers: str | None, cluster: Path | None, rates: dict[str, str | None], kinds: Sequence[str]
) -> "ServerPools":
    """The servers of the options, or of a cluster file.

    ``rates`` are the texts of ``memory``, ``server_bandwidth`` and ``network_bandwidth``: a value
    for all kinds, or values by kind; ``kinds`` those that were profiled.
    """
    from stagewright.formulations.parallelism.profiles.cluster import ServerPools, server_pools
    from stagewright.graphs.machines.cluster import load_cluster

    if (servers is None) == (cluster is None):
        raise InputError(
            "layer profiles need one of --servers, for example a100:2x4,v100:3x8 (2 servers of 4, "
            "3 of 8), and --cluster FILE"
        )
    if cluster is not None:
        stray = [f"--{name.replace('_', '-')}" for name, text in rates.items() if text is not None]
        if stray:
            raise InputError(f"{', '.join(stray)}: the cluster file says it; leave it out")
        return server_pools(load_cluster(cluster))
    found = _shapes(servers or "", kinds)
    by_kind = {name: _by_kind(name, text, kinds) for name, text in rates.items()}
    is_alone = [count for _, count, _ in found] == [1]
    return ServerPools(tuple(_pool(*one, by_kind, is_alone) for one in found))


def _shapes(text: str, kinds: Sequence[str]) -> list[tuple[str, int, int]]:
    """Kind, servers and devices of a server of every pool."""
    return [
        (_measured(kind, kinds, "--servers"), servers, devices)
        for kind, servers, devices in read_groups(text, "--servers")
    ]


def _measured(kind: str, kinds: Sequence[str], option: str) -> str:
    """The kind of device, spelled as in the profiles."""
    for one in kinds:
        if one.lower() == kind.strip().lower():
            return one
    raise InputError(f"{option}: {kind.strip()!r} was not profiled, only {', '.join(kinds)}")


def _by_kind(name: str, text: str | None, kinds: Sequence[str]) -> dict[str, float]:
    """The value of each kind; none is given where the text is None."""
    from stagewright.graphs.documents.units import parse_bandwidth, parse_bytes

    option = f"--{name.replace('_', '-')}"
    parse: Callable[[str, str], float] = parse_bytes if name == "memory" else parse_bandwidth
    return read_by_kind(
        text, option, parse, kinds, lambda kind, option: _measured(kind, kinds, option)
    )


def _pool(
    kind: str, servers: int, devices: int, by_kind: dict[str, dict[str, float]], is_alone: bool
) -> "Pool":
    from stagewright.formulations.parallelism.profiles.cluster import pool_of_kind

    inside = by_kind["server_bandwidth"].get(kind)
    between = by_kind["network_bandwidth"].get(kind)
    given = {
        "memory": by_kind["memory"].get(kind),
        "server-bandwidth": between if inside is None and devices == 1 else inside,
        "network-bandwidth": inside if between is None and is_alone else between,
    }
    _require_known(kind, given)
    return pool_of_kind(
        kind,
        servers,
        devices,
        memory_bytes=given["memory"],
        server_bandwidth=given["server-bandwidth"],
        network_bandwidth=given["network-bandwidth"],
    )


def _require_known(kind: str, given: dict[str, float | None]) -> None:
    """Name all that is missing of a kind that is not in the table of accelerators."""
    from stagewright.graphs.machines.devices import ACCELERATORS

    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing and kind.lower() not in ACCELERATORS:
        example = f"{missing[0]} {kind}={'40GB' if missing[0] == '--memory' else '10GB/s'}"
        raise InputError(
            f"{kind} is none of the kinds that are known ({', '.join(ACCELERATORS)}): give "
            f"{', '.join(missing)}, for example {example}"
        )
