"""From what people name to a training problem and its space: kinds of GPUs, degrees, types.

One definition for the command line, Python and HTTP: fields are options of commands, keywords of
functions and fields of a JSON body. Messages begin with a field, or have it between backticks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Literal, get_args

from pydantic import Field

from stagewright.formulations.parallelism.goodput import Failures
from stagewright.formulations.parallelism.ranges import unmeasured
from stagewright.formulations.parallelism.schedules import USUAL, Schedule
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.computing import PrecisionName
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import parse_bandwidth, parse_bytes, parse_duration
from stagewright.graphs.machines.cluster import Cluster, load_cluster
from stagewright.graphs.machines.devices import ACCELERATORS, Accelerator, read_kind
from stagewright.graphs.machines.fabric import Fabric, fabric_of
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import RateSet, published_rates, read_rates, taken_for
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.language import Attention
from stagewright.graphs.models.modules import EVERY_SET, OFFLOAD, WHOLE, require_recompute
from stagewright.graphs.models.towers import with_inputs
from stagewright.graphs.models.tuning import tuned_with
from stagewright.service.layouts.problems import training_problem
from stagewright.service.options import Option, itself
from stagewright.service.requests import Request
from stagewright.solvers.parallelism.space import Space

GRADIENT_BYTES = {"fp32": 4, "bf16": 2}


def _rates_of_text(text: str, _: str) -> str | RateSet:
    """The rate set of a file; the name of another."""
    return read_rates(text) if text.lower().endswith(".json") else text


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers separated by commas, each once, ascending."""
    try:
        found = tuple(sorted({int(one) for one in text.split(",")}))
    except ValueError:
        raise InputError(f"{option} {text!r}: write for example 1,2,4") from None
    least = 0 if option == "--zero" else 1
    if found[0] < least:
        raise InputError(f"{option} must be at least {least}, got {found[0]}")
    return found


def _words(text: str, _: str) -> tuple[str, ...]:
    return tuple(text.split(","))


Size = Annotated[str | float | None, Option(form="SIZE", of_text=itself)]
"""Bytes, as a number or with a unit: 80e9 or "80GB"."""
Rate = Annotated[str | float | None, Option(of_text=itself)]
"""Bytes per second, as a number or with a unit: 50e9 or "50GB/s"."""
Time = Annotated[str | float | None, Option(form="TIME", of_text=itself)]
"""Seconds, as a number or with a unit: 600 or "10min"."""
Kind = Annotated[
    str | Accelerator | None,
    Option(form="KIND", of_text=lambda text, _: read_kind(text)),
    Field(json_schema_extra={"examples": [*ACCELERATORS]}),
]
"""A kind of GPU by name, or one's own."""
Degrees = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...] | None, Option(form="N,N,...", of_text=_numbers)
]
"""Degrees to consider; None: all that are possible."""


class MachineInputs(Request):
    """The machines of a training run: of one kind, or those of a cluster."""

    device: Kind = None
    """Kind of GPU, for example h100, or the JSON file of your own."""
    gpus: Annotated[int | None, Option(form="N")] = None
    """Number of GPUs."""
    per_server: Annotated[int | None, Option(form="N"), Field(ge=1)] = None
    """GPUs in a server; default: 8, of GB200 and GB300 those that NVLink joins."""
    server_bandwidth: Rate = None
    """From a GPU to the others of its server, as reached; default: 81 % of the kind's."""
    network_bandwidth: Rate = None
    """From a GPU out of its server while all send, as reached; default: 84 % of the kind's."""
    per_rack: Annotated[int | None, Option(form="N")] = None
    """GPUs in a rack or pod, with --rack-bandwidth."""
    rack_bandwidth: Rate = None
    """From a GPU out of its rack while all send."""
    host_bandwidth: Rate = None
    """From a GPU to its host's memory, for --offload-optimizer."""
    memory: Size = None
    """Memory of a GPU; default: that of the kind."""
    cluster: Annotated[Cluster | None, Option(form="FILE", of_file=load_cluster)] = None
    """Cluster file, in place of --device, --gpus and bandwidths."""

    def fabric(self) -> Fabric:
        """The machines.

        Raises
        ------
        InputError
            If they are not said, or said twice; or what `fabric_of_kind` refuses.
        """
        if self.cluster is not None:
            own = self.device if isinstance(self.device, Accelerator) else None
            # Of the kind the cluster file has the name only.
            said = {"cluster"} if own is None else {"cluster", "device"}
            names = MachineInputs.model_fields.keys() - said
            stray = [one for one in MachineInputs.model_fields if one in names]
            stray = [f"`{one}`" for one in stray if getattr(self, one) is not None]
            if stray:
                raise InputError(f"{', '.join(stray)}: the cluster file says it; leave it out")
            return replace(fabric_of(self.cluster), own_kind=own)
        if self.device is None or self.gpus is None:
            raise InputError(
                "give `device` and `gpus`, for example h100 and 64, or a `cluster` file"
            )
        host = _rate(self.host_bandwidth, "host_bandwidth")
        with renamed(memory_bytes="memory", host_bytes_per_second="host_bandwidth"):
            return fabric_of_kind(
                self.device,
                self.gpus,
                per_server=self.per_server,
                server_bandwidth=_rate(self.server_bandwidth, "server_bandwidth"),
                network_bandwidth=_rate(self.network_bandwidth, "network_bandwidth"),
                per_rack=self.per_rack,
                rack_bandwidth=_rate(self.rack_bandwidth, "rack_bandwidth"),
                memory_bytes=size_of(self.memory, "memory"),
                host_bytes_per_second=host,
            )


class WeightInputs(Request):
    """Which weights are trained."""

    lora: Annotated[int | None, Option(form="RANK")] = None
    """Train LoRA adapters of this rank beside frozen weights."""
    lora_targets: Annotated[str | None, Option(form="NAME,NAME")] = None
    """Linear layers with adapters, as PEFT, Megatron-Bridge or torchtune name them; default:
    linear_qkv,linear_proj,linear_fc1,linear_fc2; with Accelerate q_proj,v_proj."""
    frozen: Annotated[str | None, Option(form="PART,PART")] = None
    """Layers that are not trained, for example embedding,head,blocks.0-15; with --lora: blocks
    without adapters."""


class NumberInputs(WeightInputs):
    """Which weights are trained, with which types, memory and rates."""

    images: Annotated[int | None, Option(form="N")] = None
    """Images in a sample of a model with a tower for them, each of the size that the
    configuration names; default: 1."""
    encoder_tokens: Annotated[int | None, Option(form="S")] = None
    """Tokens of the encoder in a sample, or of the text of a diffusion transformer; default: as
    many as of the decoder, or those of the published training."""
    precision: PrecisionName = "bf16"
    """Type of weights and activations; fp8, tf32: of products, beside bf16 and fp32."""
    attention: Attention = "fused"
    """fused: scores are not stored; materialized: they are."""
    reserve: Size = None
    """Memory of a GPU that is not for the plan; default: that of the software, else 2GB."""
    gradients: Literal["fp32", "bf16"] | None = None
    """Type of the sum of gradients; default: that of the software, else fp32."""
    rates: Annotated[
        str | RateSet | None, Option(form="NAME|FILE", of_text=_rates_of_text, may_be_file=True)
    ] = None
    """What kernels reach of the peaks: a rate set by name, or your own JSON file; default: measured
    with the framework on this kind of GPU, or the nearest."""

    def problem_of(
        self,
        architecture: Architecture,
        fabric: Fabric,
        *,
        sequence: int,
        batch: int,
        framework: str | None,
        overlap: bool = True,
    ) -> TrainingProblem:
        """The training of an architecture as it is with these weights, inputs and types."""
        rates = published_rates(self.rates) if isinstance(self.rates, str) else self.rates
        model = with_inputs(architecture, images=self.images, encoder_tokens=self.encoder_tokens)
        with renamed(batch="global_batch", reserve_bytes="reserve"):
            return training_problem(
                tuned_with(
                    model,
                    lora=self.lora,
                    targets=self.lora_targets,
                    frozen=self.frozen,
                    framework=framework,
                ),
                fabric,
                sequence=sequence,
                batch=batch,
                precision=self.precision,
                attention=self.attention,
                overlap=overlap,
                reserve_bytes=size_of(self.reserve, "reserve"),
                framework=framework,
                gradient_bytes=None if self.gradients is None else GRADIENT_BYTES[self.gradients],
                rates=None if rates is None else taken_for(rates, fabric.card, framework),
            )


class TrainingInputs(NumberInputs):
    """What is trained, and with which types and memory."""

    global_batch: Annotated[int | None, Option(form="N")] = None
    """Samples between two updates."""
    sequence: Annotated[int | None, Option(form="S")] = None
    """Tokens in a sample; for a config.json."""
    no_overlap: bool = False
    """Exchanges of gradients and ZeRO wait for computations."""

    def problem(
        self, architecture: Architecture, fabric: Fabric, framework: str | None = None
    ) -> TrainingProblem:
        """The training problem.

        Raises
        ------
        InputError
            If batch or sequence are not said, or what `training_problem` refuses.
        """
        return self.problem_of(
            architecture,
            fabric,
            sequence=needed(self.sequence, "sequence", "the tokens in a sample, for example 4096"),
            batch=needed(self.global_batch, "global_batch", "the samples between two updates"),
            framework=framework,
            overlap=not self.no_overlap,
        )


class FailureInputs(Request):
    """How often GPUs fail, and what saves and restores the run."""

    mtbf: Time = None
    """Time between two failures of one GPU, with its part of the failures of server, network and
    software, such as 50000h: rank layouts by the time that they take with failures."""
    checkpoint_bandwidth: Annotated[str | float | None, Option(form="SIZE/s", of_text=itself)] = (
        None
    )
    """From a server to the store, or back, for all its GPUs together while all servers do so."""
    checkpoints: Literal["blocking", "asynchronous"] = "blocking"
    """blocking: the run stops until a checkpoint is written; asynchronous: until the host has it in
    memory."""
    restart: Annotated[str | float, Option(form="TIME", of_text=itself, default="10min")] = "10min"
    """From a failure until the checkpoint is loaded: detection, processes, communication."""
    repair: Time = None
    """Until a server that failed is back; default: it restarts with the run. Meanwhile a spare
    takes its place, or the run is smaller, or waits, whichever is faster."""
    spares: Annotated[int, Option(form="N")] = 0
    """Spare servers, with --repair."""

    def failures_on(self, fabric: Fabric) -> Failures | None:
        """The failures of these machines; None if none are given.

        Raises
        ------
        InputError
            If what they need is not given, or what `Failures` refuses.
        """
        if self.mtbf is None:
            fields = FailureInputs.model_fields.items()
            stray = [f"`{name}`" for name, info in fields if getattr(self, name) != info.default]
            if stray:
                raise InputError(f"{', '.join(stray)}: needs `mtbf`, for example 50000h")
            return None
        if self.checkpoint_bandwidth is None:
            raise InputError("mtbf needs `checkpoint_bandwidth`, for example 2GB/s")
        if self.checkpoints == "asynchronous" and fabric.host_bytes_per_second is None:
            raise InputError("checkpoints: asynchronous needs `host_bandwidth`, for example 25GB/s")
        if self.spares and self.repair is None:
            raise InputError("spares need `repair`: without it no server is away")
        renames = {
            "mtbf_seconds": "mtbf", "checkpoint_bytes_per_second": "checkpoint_bandwidth",
            "restart_seconds": "restart", "repair_seconds": "repair",
        }  # fmt: skip
        with renamed(**renames):
            return Failures(
                mtbf_seconds=_seconds(self.mtbf, "mtbf"),
                checkpoint_bytes_per_second=_rate(self.checkpoint_bandwidth, "checkpoint_bandwidth")
                or 0.0,
                asynchronous=self.checkpoints == "asynchronous",
                restart_seconds=_seconds(self.restart, "restart"),
                repair_seconds=_seconds(self.repair or 0.0, "repair"),
                spares=self.spares,
            )


class DegreeInputs(Request):
    """The layouts that a search considers."""

    pipeline: Degrees = None
    """Pipeline degrees to consider."""
    tensor: Degrees = None
    """Tensor degrees to consider: 1,2,4."""
    context: Degrees = None
    """Context degrees to consider."""
    replicas: Degrees = None
    """Data degrees to consider: copies of the model."""
    expert: Degrees = None
    """Expert degrees to consider."""
    microbatch_sizes: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...] | None, Option(form="B,B,...", of_text=_numbers)
    ] = None
    """Samples of a microbatch to consider."""
    chunks: Annotated[int, Option(form="V")] = 16
    """The most stages on a pipeline rank (virtual stages)."""
    schedule: Annotated[
        tuple[Schedule, ...],
        Option(form="NAME,NAME", of_text=_words, default="1f1b,zero-bubble"),
    ] = USUAL
    """Schedules to consider: 1f1b, zero-bubble (ZB-H1), zb-h2, zbv, dualpipe, dualpipev."""
    zero: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], Option(of_text=_numbers, default="0,1,2,3")
    ] = (0, 1, 2, 3)
    """Stages of ZeRO to consider; 3 is FSDP."""
    recompute: Annotated[tuple[str, ...] | None, Option(of_text=_words)] = None
    """none, selective, full, sets of modules such as moe_act+layernorm: which to consider; modules:
    all sets that the software has; offload: activations in host memory instead. Default: all, but
    offload only where the rates have measured it."""
    offload_optimizer: bool = False
    """Consider the optimizer in host memory too."""
    alike: bool = False
    """Only layouts whose stages are alike but for the ends."""

    def space_of(self, problem: TrainingProblem) -> Space:
        """The space of the problem's layouts.

        Raises
        ------
        InputError
            If a choice is not known, or the machines do not have what it needs.
        """
        if self.offload_optimizer and problem.fabric.host_bytes_per_second is None:
            raise InputError("offload_optimizer needs `host_bandwidth`, for example 25GB/s")
        for name, known in (("schedule", get_args(Schedule)), ("zero", (0, 1, 2, 3))):
            for one in getattr(self, name):
                if one not in known:
                    raise InputError(f"{name}: {one!r} is none of {', '.join(map(str, known))}")
        recompute = (*WHOLE, EVERY_SET) if self.recompute is None else self.recompute
        if self.recompute is None and "activation offload" not in unmeasured(problem):
            recompute = (*recompute, OFFLOAD)
        for each in recompute:
            if each not in (EVERY_SET, OFFLOAD):
                require_recompute(each, "recompute", (EVERY_SET, OFFLOAD))
        return Space(
            pipeline=self.pipeline,
            tensor=self.tensor,
            context=self.context,
            data=self.replicas,
            expert=self.expert,
            microbatch=self.microbatch_sizes,
            chunks=self.chunks,
            recompute=recompute,
            schedules=self.schedule,
            zero=self.zero,
            offload=(False, True) if self.offload_optimizer else (False,),
        )


def needed(value: int | None, name: str, what: str) -> int:
    """A value that must be said; ``what`` it is."""
    if value is None:
        raise InputError(f"{name} is missing: {what}")
    return value


def size_of(value: str | float | None, name: str) -> float | None:
    """Bytes, of a number or a text with a unit."""
    return parse_bytes(value, name) if isinstance(value, str) else value


def _rate(value: str | float | None, name: str) -> float | None:
    """Bytes per second, of a number or a text with a unit."""
    return parse_bandwidth(value, name) if isinstance(value, str) else value


def _seconds(value: str | float, name: str) -> float:
    """Seconds, of a number or a text with a unit."""
    return parse_duration(value, name) if isinstance(value, str) else value


@contextmanager
def renamed(**fields: str) -> Iterator[None]:
    """Messages that begin with an argument of a function begin with the field that it is of."""
    try:
        yield
    except InputError as error:
        first, _, rest = str(error).partition(" ")
        raise InputError(f"{fields.get(first, first)} {rest}") from None
