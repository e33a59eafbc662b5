"""``model`` and ``cluster``: the input documents of a plan."""

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
    from stagewright.graphs.machines.devices import Accelerator
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
    FP8 = "fp8"


class Attention(StrEnum):
    """Attention kernel of an analytic profile."""

    FUSED = "fused"
    MATERIALIZED = "materialized"


def model(
    name: Annotated[
        str,
        typer.Argument(
            help="For example bert-large, vgg19, gpt; or a Hugging Face config.json, or its "
            "folder, or the name of its model, OWNER/NAME.",
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
        str | None,
        typer.Option(
            help="Kind of device, or the JSON file of your own; several, separated by commas, for "
            "a mixed cluster. Default: generic, an A100 in round numbers.",
            metavar="KIND,...",
        ),
    ] = None,
    precision: Annotated[
        Precision,
        typer.Option(help="Type of weights and activations; fp8: of products, the others in bf16."),
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
    from stagewright.graphs.importers.hf_hub import is_model
    from stagewright.graphs.machines.devices import GENERIC, read_kind
    from stagewright.graphs.models.analytic import analytic_model
    from stagewright.graphs.models.named import MODELS

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
    kinds = [read_kind(kind.strip()) for kind in (device or GENERIC).split(",")]
    if name.endswith(".json") or (name not in MODELS and is_model(name)):
        if output is not None:
            require_apart([Named("--output", output)], [Named("NAME", Path(name))])
        chain = _configured(name, attention, sizes, samples, kinds, options)
    else:
        chain = analytic_model(name, samples, kinds, attention=attention.value, **options, **sizes)
    said = "" if device else f"no --device is given: {GENERIC} is taken; "
    return hand_out(chain, output, as_json, said + chain.source)


def _configured(
    path: str,
    attention: Attention,
    sizes: dict[str, int],
    samples: int | list[int] | None,
    kinds: "list[str | Accelerator]",
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
            help="Servers x devices, for example 8x4; racks x servers x devices, 4x8x4; servers by "
            "kind, a100:2x4,v100:3x8; or a number of servers, each that of --nvidia-smi, --dgx1 or "
            "--matrix.",
            show_default=False,
        ),
    ] = None,
    intra: Annotated[
        str | None,
        typer.Option(
            help="Bandwidth inside a server, for example 100GB/s; default: that of the kind. "
            "Bandwidths and memory may be given by kind: a100=300GB/s,v100=25GB/s; this one, with "
            "--nvidia-smi, by path: PIX=24GB/s,SYS=16GB/s."
        ),
    ] = None,
    inter: Annotated[
        str | None, typer.Option(help="Bandwidth between servers, for example 12.5GB/s or 100Gbps.")
    ] = None,
    latency_intra: Annotated[
        str | None, typer.Option(help="Latency inside a server, for example 5us.", metavar="TIME")
    ] = None,
    latency_inter: Annotated[
        str | None, typer.Option(help="Latency between servers, for example 20us.", metavar="TIME")
    ] = None,
    inter_rack: Annotated[
        str | None, typer.Option(help="Bandwidth between racks, for example 100Gbps.")
    ] = None,
    latency_inter_rack: Annotated[
        str | None, typer.Option(help="Latency between racks, for example 50us.", metavar="TIME")
    ] = None,
    matrix: Annotated[
        Path | None, typer.Option(help="A text file of bandwidths, a row per device.")
    ] = None,
    nvidia_smi: Annotated[
        Path | None, typer.Option(help="The text that nvidia-smi topo -m prints.")
    ] = None,
    pcie: Annotated[
        int | None,
        typer.Option(
            help="With --nvidia-smi: generation of PCIe, 3, 4 or 5; default: 3.", min=3, max=5
        ),
    ] = None,
    dgx1: Annotated[bool, typer.Option("--dgx1", help="Eight V100 in a cube of NVLinks.")] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="Kind of device, or the JSON file of your own; default: generic, an A100 in round "
            "numbers without links.",
            metavar="KIND",
        ),
    ] = None,
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
    """Describe a cluster: servers x devices, of several kinds, from a file, or of DGX-1.

    What is not given is that of the kind of device; the file's source says what was assumed.
    """
    from stagewright.cli.cluster_inputs import ByLevel, ClusterOptions, read_cluster
    from stagewright.graphs.documents.units import parse_latency

    latencies = [
        None if text is None else parse_latency(text, f"--latency-{level}")
        for level, text in (
            ("intra", latency_intra), ("inter", latency_inter), ("inter-rack", latency_inter_rack)
        )
    ]  # fmt: skip

    made = read_cluster(
        ClusterOptions(
            shape=shape,
            matrix=matrix,
            nvidia_smi=nvidia_smi,
            pcie=pcie,
            dgx1=dgx1,
            device=device,
            memory=memory,
            host_bandwidth=host_bandwidth,
            bandwidth=ByLevel(intra, inter, inter_rack),
            latency=ByLevel(*latencies),
        )
    )
    return hand_out(made, output, as_json, made.source)


def hand_out(
    document: "Chain | Cluster | StepGraph",
    output: Path | None,
    as_json: bool,
    said: str | None = None,
) -> int:
    """Print the document, or write it to ``output`` and print a summary, then what is ``said``."""
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
        part, answer = (
            "layer",
            ModelFileAnswer(name=name, layers=size, file=file, source=document.source),
        )
    elif isinstance(document, StepGraph):
        part, answer = "operator", GraphFileAnswer(name=name, operators=size, file=file)
    else:
        part, answer = (
            "device",
            ClusterFileAnswer(name=name, devices=size, file=file, source=document.source),
        )
    if as_json:
        print_answer(answer)
    else:
        print_lines(f"{output}: {name}, {counted(size, part, f'{part}s')}")
        if said is not None:
            print_lines(said)
    return 0
