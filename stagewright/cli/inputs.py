"""``model`` and ``cluster``: the input documents of a plan."""

import re
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.console import (
    JsonFlag,
    OutputFile,
    print_answer,
    print_lines,
    read_sizes,
)
from stagewright.cli.outputs import Named, require_apart
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.graphs.machines.cluster import Cluster
    from stagewright.graphs.models.chain import Chain
    from stagewright.graphs.models.step_graph import StepGraph
    from stagewright.service.answers import Answer

MicrobatchSize = Annotated[
    int | None, typer.Option("--microbatch-size", help="Samples in a microbatch.", metavar="B")
]


class Precision(StrEnum):
    """Number type of an analytic profile."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Attention(StrEnum):
    """Attention kernel of an analytic profile."""

    FUSED = "fused"
    MATERIALIZED = "materialized"


def model(
    name: Annotated[
        str,
        typer.Argument(
            help="For example bert-large, vgg19, gpt; or a Hugging Face config.json, or the name "
            "of its model, OWNER/NAME.",
            show_default=False,
        ),
    ],
    output: OutputFile = None,
    microbatch_size: MicrobatchSize = None,
    microbatch_sizes: Annotated[
        str | None,
        typer.Option(
            help="Sizes that have costs, separated by commas; the largest is planned.",
            metavar="B,B,...",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Kind of device; several, separated by commas, for a mixed cluster.",
            metavar="KIND,...",
        ),
    ] = "v100",
    precision: Annotated[
        Precision, typer.Option(help="Type of weights and activations.")
    ] = Precision.FP32,
    attention: Annotated[
        Attention,
        typer.Option(help="fused: the score matrix is not stored; materialized: it is."),
    ] = Attention.FUSED,
    optimizer_state: Annotated[
        int,
        typer.Option(help="State per parameter: SGD 0, with momentum 1, Adam 2.", min=0, max=2),
    ] = 2,
    layers: Annotated[int | None, typer.Option(help="gpt: transformer layers.")] = None,
    hidden: Annotated[int | None, typer.Option(help="gpt: hidden size.")] = None,
    heads: Annotated[int | None, typer.Option(help="gpt: attention heads.")] = None,
    sequence: Annotated[
        int | None, typer.Option(help="gpt, config.json: tokens in a sample.", metavar="S")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(help="gpt: entries in the vocabulary.")] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Vision models: height and width of the images.")
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Write an analytic profile: computed from FLOPs and bytes, not measured.

    The model has a name, or is described by a transformer's config.json.
    """
    from stagewright.graphs.importers.hf_hub import is_hub_name
    from stagewright.graphs.models.analytic import analytic_model

    given = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "sequence": sequence,
        "vocabulary": vocabulary,
        "image": image_size,
    }
    sizes: dict[str, Any] = {key: size for key, size in given.items() if size is not None}
    if microbatch_size is not None and microbatch_sizes is not None:
        raise InputError("give one of --microbatch-size and --microbatch-sizes")
    samples = microbatch_size if microbatch_sizes is None else read_sizes(microbatch_sizes)
    options: dict[str, Any] = {"precision": precision.value, "optimizer_state": optimizer_state}
    kinds = device.split(",")
    if name.endswith(".json") or is_hub_name(name):
        if output is not None:
            require_apart([Named("--output", output)], [Named("NAME", Path(name))])
        chain = _configured(name, attention, sizes, samples, kinds, options)
    else:
        chain = analytic_model(name, samples, kinds, attention=attention.value, **options, **sizes)
    return hand_out(chain, output, as_json)


def _configured(
    path: str,
    attention: Attention,
    sizes: dict[str, int],
    samples: int | list[int] | None,
    kinds: list[str],
    options: dict[str, Any],
) -> "Chain":
    """The profile of a model that a config.json describes."""
    from stagewright.graphs.importers.hf_config import read_hf_config
    from stagewright.graphs.models.analytic import architecture_model

    stray = ["--image-size" if size == "image" else f"--{size}" for size in sizes]
    stray = [one for one in stray if one != "--sequence"]
    if attention is not Attention.FUSED:
        stray.append(f"--attention {attention.value}")
    if stray:
        raise InputError(f"{', '.join(stray)}: does not apply to a configuration such as {path}")
    if "sequence" not in sizes:
        raise InputError("--sequence is missing: the tokens in a sample, for example 4096")
    architecture = read_hf_config(path)
    return architecture_model(
        architecture, sizes["sequence"], 1 if samples is None else samples, kinds, **options
    )


def cluster(
    shape: Annotated[
        str | None,
        typer.Argument(
            help="Servers x devices, for example 8x4, or racks x servers x devices, 4x8x4.",
            show_default=False,
        ),
    ] = None,
    intra: Annotated[
        str | None, typer.Option(help="Bandwidth inside a server, for example 100GB/s.")
    ] = None,
    inter: Annotated[
        str | None, typer.Option(help="Bandwidth between servers, for example 12.5GB/s or 100Gbps.")
    ] = None,
    latency_intra: Annotated[
        str, typer.Option(help="Latency inside a server, for example 5us.", metavar="TIME")
    ] = "0",
    latency_inter: Annotated[
        str, typer.Option(help="Latency between servers, for example 20us.", metavar="TIME")
    ] = "0",
    inter_rack: Annotated[
        str | None, typer.Option(help="Bandwidth between racks, for example 100Gbps.")
    ] = None,
    latency_inter_rack: Annotated[
        str, typer.Option(help="Latency between racks, for example 50us.", metavar="TIME")
    ] = "0",
    matrix: Annotated[
        Path | None, typer.Option(help="A text file of bandwidths, a row per device.")
    ] = None,
    nvidia_smi: Annotated[
        Path | None, typer.Option(help="The text that nvidia-smi topo -m prints.")
    ] = None,
    dgx1: Annotated[bool, typer.Option("--dgx1", help="Eight V100 in a cube of NVLinks.")] = False,
    device: Annotated[str, typer.Option(help="Kind of device.", metavar="KIND")] = "v100",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of a device, for example 16GB; default: that of the kind.",
            metavar="SIZE",
        ),
    ] = None,
    host_bandwidth: Annotated[
        str | None,
        typer.Option(help="Bandwidth between a device and its host's memory, for example 25GB/s."),
    ] = None,
    output: OutputFile = None,
    as_json: JsonFlag = False,
) -> int:
    """Describe a cluster: servers x devices, or from a file, or a DGX-1."""
    from stagewright.graphs.documents import documents
    from stagewright.graphs.documents.units import parse_bandwidth, parse_bytes, parse_latency
    from stagewright.graphs.machines import topology

    given = [shape is not None, matrix is not None, nvidia_smi is not None, dgx1]
    if sum(given) != 1:
        raise InputError("give one of: a shape such as 8x4, --matrix, --nvidia-smi, --dgx1")
    within = parse_latency(latency_intra, "--latency-intra")
    between = parse_latency(latency_inter, "--latency-inter")
    racks = parse_latency(latency_inter_rack, "--latency-inter-rack")
    if shape is None and (intra or inter or between):
        raise InputError("--intra, --inter and --latency-inter belong to a shape such as 8x4")
    if (inter_rack or racks) and (shape or "").lower().count("x") < 2:
        raise InputError("--inter-rack and --latency-inter-rack belong to a shape such as 4x8x4")
    bytes_ = None if memory is None else parse_bytes(memory)
    every: dict[str, Any] = {"kind": device, "memory_bytes": bytes_, "latency": within}
    if matrix is not None:
        made = topology.read_matrix(matrix, **every)
    elif nvidia_smi is not None:
        text = documents.read_text(nvidia_smi)
        made = topology.parse_nvidia_smi(text, place=str(nvidia_smi), **every)
    elif dgx1:
        made = topology.dgx1(**every)
    else:
        latencies = (within, between, racks)
        made = _servers(shape or "", (intra, inter, inter_rack), latencies, device, bytes_)
    if host_bandwidth is not None:
        rate = parse_bandwidth(host_bandwidth)
        linked = tuple(replace(one, host_bytes_per_second=rate) for one in made.devices)
        made = replace(made, devices=linked)
    return hand_out(made, output, as_json)


def _servers(
    shape: str,
    bandwidths: tuple[str | None, str | None, str | None],
    latency: tuple[float, float, float],
    device: str,
    memory_bytes: float | None,
) -> "Cluster":
    from stagewright.graphs.documents.units import parse_bandwidth
    from stagewright.graphs.machines.cluster import Link, uniform_servers
    from stagewright.graphs.machines.devices import kind_of_device
    from stagewright.graphs.machines.topology import uniform_racks

    if re.fullmatch(r"(\d+[xX])?\d+[xX]\d+", shape) is None:
        raise InputError(
            f"{shape!r} is no shape; write servers x devices, for example 8x4, or racks x servers "
            f"x devices, 4x8x4"
        )
    racks, servers, devices = [1, *map(int, shape.lower().split("x"))][-3:]
    intra, inter, inter_rack = bandwidths
    if devices > 1 and intra is None:
        raise InputError("--intra is missing; write for example --intra 100GB/s")
    if servers > 1 and inter is None:
        raise InputError("--inter is missing: the servers must be connected, e.g. --inter 12.5GB/s")
    if racks > 1 and inter_rack is None:
        raise InputError("--inter-rack is missing: the racks must be connected, e.g. 100Gbps")
    links = [
        None if text is None else Link(parse_bandwidth(text), seconds)
        for text, seconds in zip(bandwidths, latency, strict=True)
    ]
    inside = links[0] or links[1] or links[2]
    if inside is None:
        raise InputError("--intra is missing; write for example --intra 100GB/s")
    kind, memory, peak = kind_of_device(device, memory_bytes)
    same: dict[str, Any] = {"kind": kind, "memory_bytes": memory, "peak_flops": peak}
    if links[2] is None:
        return uniform_servers(servers, devices, inside, links[1], **same)
    every = (inside, links[1] or inside, links[2])
    return uniform_racks(racks, servers, devices, every, **same)


def hand_out(document: "Chain | Cluster | StepGraph", output: Path | None, as_json: bool) -> int:
    """Print the document, or write it to ``output`` and print a summary."""
    from stagewright.graphs.documents import documents
    from stagewright.graphs.documents.units import counted
    from stagewright.graphs.models.chain import Chain
    from stagewright.graphs.models.step_graph import StepGraph
    from stagewright.service.answers import ClusterFileAnswer, GraphFileAnswer, ModelFileAnswer

    if output is None:
        print(documents.to_json(document), end="")
        return 0
    documents.write_text(output, documents.to_json(document))
    name, size, file = document.name, len(document), str(output)
    answer: Answer
    if isinstance(document, Chain):
        part, answer = "layer", ModelFileAnswer(name=name, layers=size, file=file)
    elif isinstance(document, StepGraph):
        part, answer = "operator", GraphFileAnswer(name=name, operators=size, file=file)
    else:
        part, answer = "device", ClusterFileAnswer(name=name, devices=size, file=file)
    if as_json:
        print_answer(answer)
    else:
        print_lines(f"{output}: {name}, {counted(size, part, f'{part}s')}")
    return 0
