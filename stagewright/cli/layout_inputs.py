"""From options to the machines, the problem and the space of layouts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from annotated_types import Ge

from stagewright.cli.commands import Options
from stagewright.cli.console import spelled, warn, with_option
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import parse_bandwidth, parse_bytes
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.formulations.parallelism.training import TrainingProblem
    from stagewright.graphs.machines.fabric import Fabric
    from stagewright.solvers.parallelism.space import Space


Precision = Literal["fp32", "fp16", "bf16", "fp8"]


class Machines(Options):
    """The machines of a training run: of one kind, or those of a cluster file."""

    device: Annotated[str | None, Option(form="KIND")] = None
    """Kind of GPU, for example h100, or the JSON file of your own."""
    gpus: Annotated[int | None, Option(form="N")] = None
    """Number of GPUs."""
    per_server: Annotated[int | None, Option(form="N"), Ge(1)] = None
    """GPUs in a server; default: 8."""
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
                for name in Machines.model_fields
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
            return fabric_of_kind(kind, self.gpus, **fields)
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
            "per_server": self.per_server or 8,
            "per_rack": self.per_rack,
            "memory_bytes": memory,
            "host_bytes_per_second": rates.pop("host_bandwidth"),
            **rates,
        }


class Training(Options):
    """What is trained, and with which types and memory."""

    global_batch: Annotated[int, Option(form="N")]
    """Samples between two updates."""
    sequence: Annotated[int | None, Option(form="S")] = None
    """Tokens in a sample; for a config.json."""
    precision: Precision = "bf16"
    """Type of weights and activations; fp8: of products."""
    attention: Literal["fused", "materialized"] = "fused"
    """fused: scores are not stored; materialized: they are."""
    no_overlap: bool = False
    """Exchanges of gradients and ZeRO wait for computations."""
    reserve: Annotated[str, Option(form="SIZE")] = "2GB"
    """Memory of a GPU that is not for the plan."""

    def problem(self, config: Path, fabric: "Fabric") -> "TrainingProblem":
        """The training problem; a warning if its samples are longer than the model's."""
        from stagewright.graphs.importers.hf_config import read_hf_config, read_most_positions
        from stagewright.service.training_problems import training_problem

        if self.sequence is None:
            raise InputError(f"{config} needs --sequence, the tokens in a sample, for example 4096")
        architecture, positions = read_hf_config(config), read_most_positions(config)
        if positions is not None and self.sequence > positions:
            warn(
                f"--sequence {self.sequence} is more than the max_position_embeddings of {config}, "
                f"{positions}; times and memory are those of such samples all the same"
            )
        try:
            return training_problem(
                architecture,
                fabric,
                sequence=self.sequence,
                batch=self.global_batch,
                precision=self.precision,
                attention=self.attention,
                overlap=not self.no_overlap,
                reserve_bytes=parse_bytes(self.reserve, "--reserve"),
            )
        except InputError as error:
            options = {"batch": "--global-batch", "reserve_bytes": "--reserve"}
            message = with_option(str(error), ("sequence", "precision"), options)
            raise InputError(message) from None


class Degrees(Options):
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
    recompute: str = "none,selective,full"
    """none, selective, full: which to consider."""
    offload_optimizer: bool = False
    """Consider the optimizer in host memory too."""
    alike: bool = False
    """Only layouts whose stages are alike but for the ends."""

    def space(self) -> "Space":
        """The space of the layouts."""
        from stagewright.formulations.parallelism.layout import Schedule
        from stagewright.graphs.models.shards import Recompute
        from stagewright.solvers.parallelism.space import Space

        degrees: dict[str, Any] = {
            field: None if text is None else _integers(text, name)
            for name, field in DEGREES.items()
            for text in [getattr(self, name)]
        }
        stages = _integers(self.zero, "zero", least=0)
        if max(stages) > 3:
            raise InputError(f"--zero: {max(stages)} is none of 0, 1, 2, 3")
        return Space(
            **degrees,
            chunks=self.chunks,
            recompute=_names("--recompute", self.recompute, get_args(Recompute)),
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
