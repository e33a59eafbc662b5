"""``train-plan`` and ``memory``: how to divide the training of a transformer among GPUs."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.commands import CommandOptions, ask, command, spelling
from stagewright.cli.console import kept, say, tell, warn
from stagewright.cli.layouts.frontier import FrontierOptions, Several, one_of, plan_frontier
from stagewright.cli.layouts.printing import print_layouts, print_memory
from stagewright.cli.layouts.profiled import (
    is_layout,
    is_profiles,
    on_command_line,
    plan_servers,
    require_options,
)
from stagewright.cli.options import Printed, Served, Written
from stagewright.cli.outputs import Writes, is_document
from stagewright.cli.solving import find
from stagewright.formulations.parallelism.document import load_layout, save_layout
from stagewright.graphs.documents.documents import write_file
from stagewright.graphs.documents.errors import InputError
from stagewright.service.layouts.configured import MemoryInputs, TrainPlanInputs
from stagewright.service.layouts.requests import LayoutAnswer, LayoutMemoryAnswer, LayoutRequest
from stagewright.service.layouts.told.layouts import bytes_in_range, shortage_lines
from stagewright.service.options import Option, one_or_several

if TYPE_CHECKING:
    from stagewright.executor.export.runs.arguments import TrainingRun
    from stagewright.graphs.models.architecture import Architecture


class PictureOptions(CommandOptions):
    """A picture of the answer."""

    png: Annotated[Path | None, Option(form="FILE"), Writes(".png")] = None
    """Where to draw: the front, time and cost, the stages of layer profiles, or ranks' memory."""


class TrainPlanOptions(TrainPlanInputs, FrontierOptions, PictureOptions, Written, Served):
    """What ``train-plan`` is asked."""

    config: Annotated[Path | None, Option("CONFIG_OR_PROFILES")] = None
    """A Hugging Face config.json, or its folder, or the name of its model (OWNER/NAME), Meta's
    params.json, or layer profiles that import wrote."""
    run: Annotated[Path | None, Option("--from", form="FILE")] = None
    """The run that you have, to explain and better it: a launch script or the arguments of
    Megatron-LM, or a TOML file of torchtitan. It says model, layout, batch and GPUs; options
    override it."""
    servers: Annotated[str | None, Option(form="KIND:NxM,...")] = None
    """Servers x GPUs by kind, in place of --device and --gpus: a100:2x8,h100:2x8; memory and
    bandwidths may then be given by kind, for example a100=40GB,v100=16GB."""
    gpus: Annotated[Several, Option(form="N", of_text=one_or_several)] = None  # type: ignore[assignment]
    """Number of GPUs, or several: 8,24,64, or 8-1024 (8, 16, ... 1024)."""
    sequence: Annotated[Several, Option(form="S", of_text=one_or_several)] = None  # type: ignore[assignment]
    """Tokens in a sample, or several numbers of them: 4096,32768; for a config.json."""

    @property
    def is_frontier(self) -> bool:
        """Whether layouts of several sizes, or their cost, are asked for."""
        several = isinstance(self.gpus, tuple) or isinstance(self.sequence, tuple)
        return several or self.price is not None or self.deadline is not None

    def sizes(self) -> "Iterator[TrainPlanOptions]":
        """The options for each number of GPUs and each length of sequences."""
        for gpus in _each(self.gpus):
            for sequence in _each(self.sequence):
                yield self.model_copy(update={"gpus": gpus, "sequence": sequence})


def _each(value: Several) -> tuple[int | None, ...]:
    return value if isinstance(value, tuple) else (value,)


@command(
    without="by_stage",
    headings={
        "Machines": "per_server server_bandwidth network_bandwidth per_rack rack_bandwidth"
        " host_bandwidth memory servers",
        "Trained weights and inputs": "lora lora_targets frozen images encoder_tokens",
        "Arithmetic and memory": "precision attention no_overlap reserve gradients rates",
        "Layouts to consider": "pipeline tensor context replicas expert microbatch_sizes chunks"
        " schedule zero recompute offload_optimizer alike",
        "Failures": "mtbf checkpoint_bandwidth checkpoints restart repair spares simulations",
        "Several sizes, and cost": "price deadline",
        "More answers": "prefer explain front what_if unfolded tokens",
        "Search": "time_limit server",
    },
)
def train_plan(command_line: typer.Context, given: TrainPlanOptions) -> int:
    """Find how to divide a transformer's training among GPUs; exit code 1 if nothing fits.

    Pipeline, tensor, context, expert and data degrees, microbatch, virtual stages, recomputation,
    ZeRO and placement. With --for plan the layout becomes a plan of stages, by `stagewright export
    LAYOUT --to plan`, that `stagewright run` carries out and `stagewright plan` prices alike.

    On --servers of several kinds, by computed layers or by measured layer profiles: stages,
    replicas, tensor degrees and kinds of GPU.
    """
    are_profiles = given.config is not None and is_profiles(given.config)
    config = given.config or given.run
    if config is None:
        raise InputError(
            "give a model, for example its config.json, or the run that you have: --from FILE"
        )
    require_options(command_line, config, are_profiles)
    if are_profiles:
        return plan_servers(given, config, None)
    if given.servers is not None:
        return plan_servers(given, config, read_model(config, one_of(given.sequence, "sequence")))
    if given.is_frontier:
        return plan_frontier(given, config.name, _requests(given, config))
    with spelling(TrainPlanOptions):
        request = _request(given, config, on_command_line(command_line))
    answer = find(LayoutAnswer, request, f"planning {config.name}", given.server)
    if given.png is not None:
        _draw(answer, request, config.name, given.png)
    written = kept(answer.plan, given, save_layout)
    tell(
        answer,
        given,
        lambda answer: print_layouts(config.name, request.problem, answer, given.front),
        (given.png, *written) if answer.plan is not None else (),
    )
    return 1 if answer.plan is None else 0


def _request(given: TrainPlanOptions, config: Path, on_line: Collection[str]) -> LayoutRequest:
    """The search for the layouts of a configuration, or of the run that one has."""
    front = given.front or given.png is not None
    if given.run is None:
        architecture = read_model(config, one_of(given.sequence, "sequence"))
        return given.layouts_of(architecture, front=front)
    run, given = _with_run(given, given.run, on_line)
    if given.explain is not None:
        raise InputError("--explain: the run of --from is explained; leave one of them out")
    model = run.architecture if given.config is None else None
    architecture = model or read_model(config, one_of(given.sequence, "sequence"))
    return given.layouts_of(architecture, front=front, explain=run.layout)


def _requests(given: TrainPlanOptions, config: Path) -> list[LayoutRequest]:
    """The searches for each number of GPUs and each length of sequences."""
    if given.run is not None or given.explain is not None or given.front or given.what_if:
        raise InputError(
            "--from, --explain, --front and --what-if are of one number of GPUs and one "
            "--sequence, without --price and --deadline"
        )
    with spelling(TrainPlanOptions):
        sequences = [one for one in _each(given.sequence) if one is not None]
        architecture = read_model(config, max(sequences, default=None))
        return [one.layouts_of(architecture) for one in given.sizes()]


def read_model(config: Path, sequence: int | None) -> "Architecture":
    """The architecture of a configuration; a warning if samples are longer than the model's."""
    from stagewright.graphs.importers.hf_config import read_most_positions
    from stagewright.service.architectures import read_architecture

    positions = read_most_positions(config)
    if positions is not None and sequence is not None and sequence > positions:
        warn(
            f"--sequence {sequence} is more than the max_position_embeddings of {config}, "
            f"{positions}; times and memory are those of such samples all the same"
        )
    return read_architecture(config)


def _with_run(
    given: TrainPlanOptions, file: Path, on_line: Collection[str]
) -> "tuple[TrainingRun, TrainPlanOptions]":
    """The run that a file describes, and the options with what it says where none is given."""
    from stagewright.executor.export.runs import read_run

    gpus = given.gpus if given.cluster is None else given.fabric().devices
    run = read_run(file, one_of(gpus, "gpus"))
    if run.architecture is None and given.config is None:
        raise InputError(f"{file}: the model is not said; give it: train-plan MODEL --from {file}")
    for note in run.notes:
        warn(note)
    said = {
        "gpus": run.layout.ranks if given.cluster is None else None,
        "global_batch": run.batch,
        "sequence": run.sequence,
        "precision": run.precision,
        "gradients": run.gradients if run.precision != "fp32" else None,
        "attention": run.attention,
        "no_overlap": not run.overlap,
        "framework": run.framework,
    }
    update = {name: one for name, one in said.items() if one is not None and name not in on_line}
    return run, given.model_copy(update=update)


def _draw(answer: LayoutAnswer, request: LayoutRequest, name: str, png: Path) -> None:
    from stagewright.executor.drawing.charts.layouts import front_png

    fabric, batch = request.problem.fabric, request.problem.batch
    title = f"{name} on {fabric.devices} {fabric.device}, batch {batch}"
    write_file(png, front_png(answer.front, fabric.memory_bytes, title))


class MemoryOptions(MemoryInputs, PictureOptions, Printed, Served):
    """What ``memory`` is asked."""

    file: Annotated[Path, Option("CONFIG_OR_LAYOUT")]
    """A Hugging Face config.json, or OWNER/NAME, with --layout; or what train-plan wrote."""


@command(
    headings={
        "Trained weights and inputs": "lora lora_targets frozen images encoder_tokens",
        "Arithmetic": "precision attention reserve gradients rates",
    }
)
def memory(command_line: typer.Context, given: MemoryOptions) -> int:
    """Break down the peak memory of a layout by pipeline rank; exit code 1 if one is too full."""
    from stagewright.graphs.importers.hf_hub import is_model
    from stagewright.service.layouts.requests import MemoryRequest

    file = given.file
    if not is_model(file) and is_document(file, "profiled-plan"):
        raise InputError(f"{file} is a plan by layer profiles: check computes its memory again")
    if is_layout(file):
        if not {"file", "png", "as_json", "server"}.issuperset(on_command_line(command_line)):
            raise InputError(
                f"{file} has its layout, batch and machines: of the options only --png, --json and "
                "--server apply"
            )
        plan = load_layout(file)
        request = ask(MemoryRequest, problem=plan.problem, layout=plan.layout)
    else:
        with spelling(MemoryOptions):
            request = given.memory_of(read_model(file, given.sequence))
    answer = find(LayoutMemoryAnswer, request, f"memory of {file.name}", given.server)
    if given.png is not None:
        from stagewright.executor.drawing.charts.layouts import memory_png

        write_file(given.png, memory_png(answer.ranks, answer.memory_bytes, answer.layout))

    def show(answer: LayoutMemoryAnswer) -> None:
        print_memory(answer.ranks, answer.memory_bytes)
        fits = bytes_in_range(answer, answer.memory_bytes)
        say(*shortage_lines(answer.shortages), fits, *answer.remarks, f"rates: {answer.rates}")

    tell(answer, given, show, [given.png])
    return 1 if answer.fits == "no" else 0
