"""``model``, ``cluster`` and ``import``: the input documents of a plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stagewright.cli.commands import command, with_option
from stagewright.cli.console import print_json, say, warn
from stagewright.cli.documents.clusters import read_cluster
from stagewright.cli.documents.machines import ClusterOptions
from stagewright.cli.options import Written, read_sizes
from stagewright.cli.outputs import Named, require_apart
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted, parse_share
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.graphs.machines.cluster import Cluster
    from stagewright.graphs.machines.devices import Accelerator
    from stagewright.graphs.models.chain import Chain
    from stagewright.graphs.models.layer_profiles import LayerProfiles
    from stagewright.graphs.models.operators.step_graph import StepGraph

SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary", "image_size")


class ModelOptions(Written):
    """What ``model`` is asked."""

    name: Annotated[str, Option("NAME")]
    """For example bert-large, vgg19, gpt; or a Hugging Face config.json, or its folder, or the name
    of its model, OWNER/NAME."""
    microbatch_size: Annotated[int | None, Option(form="B")] = None
    """Samples in a microbatch."""
    microbatch_sizes: Annotated[str | None, Option(form="B,B,...")] = None
    """Sizes that have costs, separated by commas; the largest is planned."""
    device: Annotated[str | None, Option(form="KIND,...")] = None
    """Kind of device, or the JSON file of your own; several, separated by commas, for a mixed
    cluster. Default: generic, an A100 in round numbers."""
    precision: Literal["fp32", "tf32", "fp16", "bf16", "fp8"] = "fp32"
    """Type of weights and activations; fp8, tf32: of products, the others in bf16 and fp32."""
    attention: Literal["fused", "materialized"] = "fused"
    """fused: the score matrix is not stored; materialized: it is."""
    rates: Annotated[str | None, Option(form="NAME|FILE")] = None
    """What kernels reach of the peaks: a rate set by name, or your own JSON file; default: the
    newest of the kind, or the nearest."""
    optimizer_state: Annotated[int, Field(ge=0), Field(le=2)] = 2
    """State per parameter: SGD 0, with momentum 1, Adam 2."""
    layers: int | None = None
    """gpt: transformer layers."""
    hidden: int | None = None
    """gpt: hidden size."""
    heads: int | None = None
    """gpt: attention heads."""
    sequence: Annotated[int | None, Option(form="S")] = None
    """gpt, config.json: tokens in a sample."""
    vocabulary: int | None = None
    """gpt: entries in the vocabulary."""
    image_size: int | None = None
    """Vision models: height and width of the images."""


@command(headings={"Sizes of a model": "layers hidden heads vocabulary image_size"})
def model(given: ModelOptions) -> int:
    """Write an analytic profile: computed from FLOPs and bytes, not measured.

    The model has a name, or is described by a transformer's config.json.
    """
    from stagewright.formulations.prices.analytic import analytic_model
    from stagewright.graphs.importers.hf_hub import is_model
    from stagewright.graphs.machines.devices import GENERIC, read_kind
    from stagewright.graphs.models.named import MODELS

    sizes: dict[str, Any] = {
        name.removesuffix("_size"): getattr(given, name)
        for name in SIZES
        if getattr(given, name) is not None
    }
    one, several = given.microbatch_size, given.microbatch_sizes
    if one is not None and several is not None:
        raise InputError("give one of --microbatch-size and --microbatch-sizes")
    samples = one if several is None else read_sizes(several)
    options: dict[str, Any] = {
        "precision": given.precision,
        "optimizer_state": given.optimizer_state,
        "rates": given.rates,
    }
    kinds = [read_kind(kind.strip()) for kind in (given.device or GENERIC).split(",")]
    name, attention = given.name, given.attention
    if name.endswith(".json") or (name not in MODELS and is_model(name)):
        if given.output is not None:
            require_apart([Named("--output", given.output)], [Named("NAME", Path(name))])
        chain = _configured(name, attention, sizes, samples, kinds, options)
    else:
        chain = analytic_model(name, samples, kinds, attention=attention, **options, **sizes)
    said = "" if given.device else f"no --device is given: {GENERIC} is taken; "
    return hand_out(chain, given, said + chain.source)


def _configured(
    path: str,
    attention: str,
    sizes: dict[str, int],
    samples: int | list[int] | None,
    kinds: "list[str | Accelerator]",
    options: dict[str, Any],
) -> "Chain":
    """The profile of a model that a config.json describes."""
    from stagewright.formulations.prices.analytic import architecture_model
    from stagewright.service.architectures import read_architecture

    stray = ["--image-size" if size == "image" else f"--{size}" for size in sizes]
    stray = [one for one in stray if one != "--sequence"]
    if attention != "fused":
        stray.append(f"--attention {attention}")
    if stray:
        raise InputError(f"{', '.join(stray)}: does not apply to a configuration such as {path}")
    if "sequence" not in sizes:
        raise InputError("--sequence is missing: the tokens in a sample, for example 4096")
    architecture = read_architecture(path)
    return architecture_model(
        architecture, sizes["sequence"], 1 if samples is None else samples, kinds, **options
    )


@command(
    headings={
        "Latencies and racks": "latency_intra latency_inter inter_rack latency_inter_rack "
        "oversubscription",
        "A server from elsewhere": "listings pcie matrix dgx1",
    }
)
def cluster(given: ClusterOptions) -> int:
    """Describe a cluster: servers x devices, of several kinds, from a file, or of DGX-1.

    What is not given is that of the kind of device; the file's source says what was assumed.
    """
    made = read_cluster(given)
    return hand_out(made, given, made.source)


def hand_out(
    document: "Chain | Cluster | StepGraph", given: Written, said: str | None = None
) -> int:
    """Print the document, or write it and print a summary, then what is ``said``."""
    from stagewright.graphs.models.chain import Chain
    from stagewright.graphs.models.operators.step_graph import StepGraph

    part, source = "device", {"source": getattr(document, "source", None)}
    if isinstance(document, Chain):
        part = "layer"
    elif isinstance(document, StepGraph):
        part, source = "operator", {}
    size = len(document)
    summary = f"{document.name}, {counted(size, part, f'{part}s')}"
    return _write(document, given, {"name": document.name, f"{part}s": size}, source, summary, said)


def _write(
    document: object,
    given: Written,
    told: dict[str, Any],
    more: dict[str, Any],
    summary: str,
    said: str | None = None,
) -> int:
    """Print a document, or write it and print what is told of it, as JSON or in lines."""
    if given.output is None:
        print(to_json(document), end="")
        return 0
    documents.write_file(given.output, to_json(document))
    if given.as_json:
        print_json(told | {"file": str(given.output)} | more)
        return 0
    say(f"{given.output}: {summary}", *([] if said is None else [said]))
    return 0


class ImportOptions(Written):
    """What ``import`` is asked."""

    file: Annotated[Path, Option("FILE")]
    """The profile to read; sailor, metis: or the folder of them."""
    source: Annotated[
        Literal[
            "stagewright", "pipedream", "dnn-partitioning", "piper", "gavel", "sailor", "metis"
        ],
        Option("--from"),
    ]
    """The profile's format."""
    microbatch_size: Annotated[int | None, Option(form="B")] = None
    """Samples in a microbatch."""
    device: Annotated[str | None, Option(form="KIND")] = None
    """Kind of device that was measured; default: any device."""
    contract: bool = False
    """Merge branches, so that layers are cut points."""
    split_backward: Annotated[str | None, Option(form="SHARE")] = None
    """Share of the input gradient in backwards that are given as a whole; an assumption, which the
    model file states; such as 50% or 0.5."""
    throughputs: Annotated[Path | None, Option(form="FILE")] = None
    """gavel: the table of throughputs of the trace."""
    config: Annotated[Path | None, Option(form="FILE")] = None
    """sailor, metis: the model's Hugging Face config.json, for the sizes of the layers that
    train-plan needs."""
    sequence: Annotated[int | None, Option(form="S")] = None
    """With --config: tokens in a sample."""
    precision: Literal["fp32", "fp16", "bf16", "fp8"] | None = None
    """With --config: type of weights and activations; default: fp32."""
    attention: Literal["fused", "materialized"] | None = None
    """With --config: whether scores are stored; default: fused."""


@command(headings={"Layer profiles of sailor and metis": "config sequence precision attention"})
def import_(given: ImportOptions) -> int:
    """Convert another project's profile to a model file, or its trace to a jobs file.

    The profiles of Sailor and Metis, by tensor degree, become a file of layer profiles.
    """
    _require_sizing(given)
    source = given.source
    if (source == "gavel") != (given.throughputs is not None):
        raise InputError("--from gavel needs --throughputs FILE, and no other format takes it")
    if given.throughputs is not None:
        if given.split_backward is not None:
            raise InputError("--split-backward is for profiles: a trace has no backwards")
        return _import_jobs(given, given.throughputs)
    if source in ("sailor", "metis"):
        of_models = (given.microbatch_size, given.split_backward)
        if any(one is not None for one in of_models) or given.contract:
            raise InputError(
                "--microbatch-size, --contract and --split-backward are for models: layer profiles "
                "have all measured sizes, and layers with a whole backward"
            )
        return _import_layer_profiles(given)
    chain = _read_profile(given)
    if given.split_backward is not None:
        chain = _with_parts(chain, given.split_backward)
    return hand_out(chain, given)


def _read_profile(given: ImportOptions) -> "Chain":
    from stagewright.graphs.importers.dnn_partitioning import read_dnn_partitioning
    from stagewright.graphs.importers.pipedream import read_pipedream
    from stagewright.graphs.importers.piper import read_piper_chain
    from stagewright.graphs.models.chain import load_model

    file, size, device = given.file, given.microbatch_size, given.device
    if given.source == "stagewright":
        if size is not None or device is not None or given.contract:
            raise InputError(
                "--microbatch-size, --device and --contract are for other projects' profiles: a "
                "model file has them"
            )
        return load_model(file)
    read = {
        "pipedream": read_pipedream,
        "dnn-partitioning": read_dnn_partitioning,
        "piper": read_piper_chain,
    }
    return read[given.source](
        file,
        microbatch_size=1 if size is None else size,
        device_kind=device,
        contract=given.contract,
    )


def _require_sizing(given: ImportOptions) -> None:
    """Refuse options that do not say the sizes of profiled layers."""
    if given.config is None:
        stray = [
            f"--{name}"
            for name in ("sequence", "precision", "attention")
            if getattr(given, name) is not None
        ]
        if stray:
            raise InputError(f"{', '.join(stray)}: belongs to --config")
        return
    if given.source not in ("sailor", "metis"):
        raise InputError("--config is for the layer profiles of sailor and metis")
    if given.sequence is None:
        raise InputError("--config needs --sequence, the tokens in a sample, for example 2048")
    if given.precision == "fp8":
        raise InputError("--precision: layer profiles are of fp32, fp16 or bf16")


def _with_sizes(profiles: "LayerProfiles", given: ImportOptions) -> "LayerProfiles":
    """The profiles with the sizes of their layers, if a configuration is given."""
    from stagewright.graphs.models.layer_profiles import with_sizes
    from stagewright.service.architectures import read_architecture

    if given.config is None or given.sequence is None:
        return profiles
    architecture = read_architecture(given.config)
    try:
        return with_sizes(
            profiles,
            architecture,
            sequence=given.sequence,
            precision=given.precision or "fp32",
            attention=given.attention or "fused",
        )
    except InputError as error:
        message = with_option(str(error), ("sequence",), {})
        raise InputError(f"{given.config}: {message}") from None


def _import_layer_profiles(given: ImportOptions) -> int:
    from stagewright.graphs.importers.metis import read_metis
    from stagewright.graphs.importers.sailor import read_sailor

    if given.source == "metis":
        if given.device is not None:
            raise InputError("--device: the names of Metis' files say the kinds")
        profiles = read_metis(given.file)
        warn("Metis measures forward and backward together: the forward is taken as a third of it")
    else:
        profiles = read_sailor(given.file, device_kind=given.device)
    profiles = _with_sizes(profiles, given)
    kinds = list(profiles.device_kinds)
    told = {"name": profiles.name, "layers": profiles.layers, "device_kinds": kinds}
    summary = f"{profiles.layers} layers of {profiles.name} on {', '.join(kinds)}"
    return _write(profiles, given, told, {}, summary)


def _with_parts(chain: "Chain", text: str) -> "Chain":
    """The model with every backward in two parts; warns of the shares that are assumed."""
    from stagewright.graphs.models.sharding import split_backwards

    share = parse_share(text, "--split-backward")
    try:
        split, changed = split_backwards(chain, share)
    except InputError as error:
        raise InputError(f"--split-backward: {error}") from None
    if changed:
        warn(
            f"{changed} of {len(chain)} layers have only the time of the whole backward: the input "
            f"gradient is assumed to take {share:g} of it"
        )
    return split


def _import_jobs(given: ImportOptions, throughputs: Path) -> int:
    from stagewright.graphs.importers.gavel import read_gavel

    trace, workload = given.file, read_gavel(given.file, throughputs)
    jobs = len(workload.jobs)
    told = {"name": trace.stem, "jobs": jobs}
    return _write(workload, given, told, {}, f"{jobs} jobs of {trace.name}")
