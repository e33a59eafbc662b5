"""``import``: profiles and traces of other projects."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.console import (
    JsonFlag,
    OutputFile,
    print_answer,
    print_lines,
    warn,
    with_option,
)
from stagewright.cli.inputs import MicrobatchSize, hand_out
from stagewright.cli.layout_inputs import Arithmetic, Attention
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.graphs.models.chain import Chain
    from stagewright.graphs.models.layer_profiles import LayerProfiles


class Source(StrEnum):
    """Formats that ``import`` reads."""

    STAGEWRIGHT = "stagewright"
    PIPEDREAM = "pipedream"
    DNN_PARTITIONING = "dnn-partitioning"
    PIPER = "piper"
    GAVEL = "gavel"
    SAILOR = "sailor"
    METIS = "metis"


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="The profile to read; sailor, metis: or the folder of them.", show_default=False
        ),
    ],
    source: Annotated[Source, typer.Option("--from", help="The profile's format.")],
    output: OutputFile = None,
    microbatch_size: MicrobatchSize = None,
    device: Annotated[
        str | None,
        typer.Option(help="Kind of device that was measured; default: any device.", metavar="KIND"),
    ] = None,
    contract: Annotated[
        bool, typer.Option("--contract", help="Merge branches, so that layers are cut points.")
    ] = False,
    split_backward: Annotated[
        str | None,
        typer.Option(
            help="Share of the input gradient in backwards that are given as a whole; an "
            "assumption, which the model file states; such as 50% or 0.5.",
            metavar="SHARE",
        ),
    ] = None,
    throughputs: Annotated[
        Path | None,
        typer.Option(help="gavel: the table of throughputs of the trace.", metavar="FILE"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="sailor, metis: the model's Hugging Face config.json, for the sizes of the layers "
            "that train-plan needs.",
            metavar="FILE",
        ),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(help="With --config: tokens in a sample.", metavar="S")
    ] = None,
    precision: Annotated[
        Arithmetic | None,
        typer.Option(help="With --config: type of weights and activations; default: fp32."),
    ] = None,
    attention: Annotated[
        Attention | None,
        typer.Option(help="With --config: whether scores are stored; default: fused."),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Convert another project's profile to a model file, or its trace to a jobs file.

    The profiles of Sailor and Metis, by tensor degree, become a file of layer profiles.
    """
    sizing = _read_sizing(source, config, sequence, precision, attention)
    if (source is Source.GAVEL) != (throughputs is not None):
        raise InputError("--from gavel needs --throughputs FILE, and no other format takes it")
    if throughputs is not None:
        if split_backward is not None:
            raise InputError("--split-backward is for profiles: a trace has no backwards")
        return _import_jobs(file, throughputs, output, as_json)
    if source in (Source.SAILOR, Source.METIS):
        if microbatch_size is not None or contract or split_backward is not None:
            raise InputError(
                "--microbatch-size, --contract and --split-backward are for models: layer profiles "
                "have all measured sizes, and layers with a whole backward"
            )
        return _import_layer_profiles(file, source, device, sizing, output, as_json)
    chain = _read_profile(file, source, microbatch_size, device, contract)
    if split_backward is not None:
        chain = _with_parts(chain, split_backward)
    return hand_out(chain, output, as_json)


def _read_profile(
    file: Path, source: Source, size: int | None, device: str | None, contract: bool
) -> "Chain":
    from stagewright.graphs.importers.dnn_partitioning import read_dnn_partitioning
    from stagewright.graphs.importers.pipedream import read_pipedream
    from stagewright.graphs.importers.piper import read_piper_chain
    from stagewright.graphs.models.chain import load_model

    if source is Source.STAGEWRIGHT:
        if size is not None or device is not None or contract:
            raise InputError(
                "--microbatch-size, --device and --contract are for other projects' profiles: a "
                "model file has them"
            )
        return load_model(file)
    read = {
        Source.PIPEDREAM: read_pipedream,
        Source.DNN_PARTITIONING: read_dnn_partitioning,
        Source.PIPER: read_piper_chain,
    }
    return read[source](
        file, microbatch_size=1 if size is None else size, device_kind=device, contract=contract
    )


def _read_sizing(
    source: Source,
    config: Path | None,
    sequence: int | None,
    precision: Arithmetic | None,
    attention: Attention | None,
) -> "_Sizing | None":
    """What the sizes of profiled layers follow from; None if there is no configuration."""
    if config is None:
        given = {"--sequence": sequence, "--precision": precision, "--attention": attention}
        stray = [name for name, value in given.items() if value is not None]
        if stray:
            raise InputError(f"{', '.join(stray)}: belongs to --config")
        return None
    if source not in (Source.SAILOR, Source.METIS):
        raise InputError("--config is for the layer profiles of sailor and metis")
    if sequence is None:
        raise InputError("--config needs --sequence, the tokens in a sample, for example 2048")
    if precision is Arithmetic.FP8:
        raise InputError("--precision: layer profiles are of fp32, fp16 or bf16")
    kept = attention or Attention.FUSED
    return _Sizing(config, sequence, precision or Arithmetic.FP32, kept)


@dataclass(frozen=True, slots=True)
class _Sizing:
    """The options of a model's sizes."""

    config: Path
    sequence: int
    precision: Arithmetic
    attention: Attention

    def add(self, profiles: "LayerProfiles") -> "LayerProfiles":
        """The profiles with the sizes of their layers."""
        from stagewright.graphs.importers.hf_config import read_hf_config
        from stagewright.graphs.models.analytic_sizes import with_sizes

        architecture = read_hf_config(self.config)
        try:
            return with_sizes(
                profiles,
                architecture,
                sequence=self.sequence,
                precision=self.precision.value,
                attention=self.attention.value,
            )
        except InputError as error:
            message = with_option(str(error), ("sequence",), {})
            raise InputError(f"{self.config}: {message}") from None


def _import_layer_profiles(
    path: Path,
    source: Source,
    device: str | None,
    sizing: _Sizing | None,
    output: Path | None,
    as_json: bool,
) -> int:
    from stagewright.graphs.documents.documents import to_json
    from stagewright.graphs.importers.metis import read_metis
    from stagewright.graphs.importers.sailor import read_sailor
    from stagewright.graphs.models.layer_profiles import save_layer_profiles
    from stagewright.service.answers import LayerProfilesFileAnswer

    if source is Source.METIS and device is not None:
        raise InputError("--device: the names of Metis' files say the kinds")
    if source is Source.METIS:
        profiles = read_metis(path)
        warn("Metis measures forward and backward together: the forward is taken as a third of it")
    else:
        profiles = read_sailor(path, device_kind=device)
    if sizing is not None:
        profiles = sizing.add(profiles)
    if output is None:
        print(to_json(profiles), end="")
        return 0
    save_layer_profiles(profiles, output)
    if as_json:
        print_answer(
            LayerProfilesFileAnswer(
                name=profiles.name,
                layers=profiles.layers,
                device_kinds=list(profiles.device_kinds),
                file=str(output),
            )
        )
    else:
        kinds = ", ".join(profiles.device_kinds)
        print_lines(f"{output}: {profiles.layers} layers of {profiles.name} on {kinds}")
    return 0


def _with_parts(chain: "Chain", text: str) -> "Chain":
    """The chain with both parts of every backward; says what was assumed."""
    from stagewright.graphs.documents.units import parse_share
    from stagewright.graphs.models.splitting import split_backwards

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


def _import_jobs(trace: Path, throughputs: Path, output: Path | None, as_json: bool) -> int:
    from stagewright.graphs.documents.documents import to_json
    from stagewright.graphs.importers.gavel import read_gavel
    from stagewright.graphs.workloads.jobs import save_workload
    from stagewright.service.answers import JobsFileAnswer

    workload = read_gavel(trace, throughputs)
    if output is None:
        print(to_json(workload), end="")
        return 0
    save_workload(workload, output)
    if as_json:
        print_answer(JobsFileAnswer(name=trace.stem, jobs=len(workload.jobs), file=str(output)))
    else:
        print_lines(f"{output}: {len(workload.jobs)} jobs of {trace.name}")
    return 0
