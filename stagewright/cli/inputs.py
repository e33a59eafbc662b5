"""``model`` and ``cluster``: the input documents of a plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le

from stagewright.cli.cluster_inputs import ClusterOptions, read_cluster
from stagewright.cli.common import Written
from stagewright.cli.console import print_answer, print_lines, read_sizes
from stagewright.cli.outputs import Named, require_apart
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted
from stagewright.service.answers import Answer, ClusterFileAnswer, GraphFileAnswer, ModelFileAnswer
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.graphs.machines.cluster import Cluster
    from stagewright.graphs.machines.devices import Accelerator
    from stagewright.graphs.models.chain import Chain
    from stagewright.graphs.models.step_graph import StepGraph

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
    precision: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Type of weights and activations; fp8: of products, the others in bf16."""
    attention: Literal["fused", "materialized"] = "fused"
    """fused: the score matrix is not stored; materialized: it is."""
    optimizer_state: Annotated[int, Ge(0), Le(2)] = 2
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


def model(given: ModelOptions) -> int:
    """Write an analytic profile: computed from FLOPs and bytes, not measured.

    The model has a name, or is described by a transformer's config.json.
    """
    from stagewright.graphs.importers.hf_hub import is_model
    from stagewright.graphs.machines.devices import GENERIC, read_kind
    from stagewright.graphs.models.analytic import analytic_model
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
    from stagewright.graphs.importers.hf_config import read_hf_config
    from stagewright.graphs.models.analytic import architecture_model

    stray = ["--image-size" if size == "image" else f"--{size}" for size in sizes]
    stray = [one for one in stray if one != "--sequence"]
    if attention != "fused":
        stray.append(f"--attention {attention}")
    if stray:
        raise InputError(f"{', '.join(stray)}: does not apply to a configuration such as {path}")
    if "sequence" not in sizes:
        raise InputError("--sequence is missing: the tokens in a sample, for example 4096")
    architecture = read_hf_config(path)
    return architecture_model(
        architecture, sizes["sequence"], 1 if samples is None else samples, kinds, **options
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
    from stagewright.graphs.models.step_graph import StepGraph

    output = given.output
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
    if given.as_json:
        print_answer(answer)
    else:
        print_lines(f"{output}: {name}, {counted(size, part, f'{part}s')}")
        if said is not None:
            print_lines(said)
    return 0
