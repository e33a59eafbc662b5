"""``train-plan`` and ``memory``: how to divide the training of a transformer among GPUs."""

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli import interruptible
from stagewright.cli.commands import Asked, CommandOptions, ask, command
from stagewright.cli.console import kept, progress, say, tell, warn
from stagewright.cli.layouts.failures import FailureOptions
from stagewright.cli.layouts.frontier import FrontierOptions, plan_frontier
from stagewright.cli.layouts.inputs import (
    DegreeOptions,
    MachineOptions,
    NumberOptions,
    Several,
    TrainingOptions,
    one_of,
)
from stagewright.cli.layouts.printing import (
    bytes_in_range,
    print_layouts,
    print_memory,
    print_shortages,
)
from stagewright.cli.layouts.profiled import (
    is_layout,
    is_profiles,
    on_command_line,
    plan_servers,
    require_options,
)
from stagewright.cli.options import Printed, Written
from stagewright.cli.outputs import Writes, is_document
from stagewright.formulations.parallelism.document import load_layout, save_layout
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.graphs.documents.documents import write_bytes
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.stack_memory import STACK_MEMORY
from stagewright.service.layouts.requests import LayoutAnswer, LayoutRequest
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.executor.export.runs.run import TrainingRun
    from stagewright.graphs.models.architecture import Architecture


class PictureOptions(CommandOptions):
    """A picture of the answer."""

    png: Annotated[Path | None, Option(form="FILE"), Writes(".png")] = None
    """Where to draw: the front, time and cost, the stages of layer profiles, or ranks' memory."""


class TrainPlanOptions(
    TrainingOptions,
    MachineOptions,
    DegreeOptions,
    FailureOptions,
    FrontierOptions,
    PictureOptions,
    Written,
):
    """What ``train-plan`` is asked beside its request."""

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

    def asks_more(self, asked: Asked[LayoutRequest]) -> bool:
        """Whether answers are asked for that are of one size."""
        return bool(asked.given["front"] or asked.given["what_if"])


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
        "More answers": "time_limit prefer explain front what_if unfolded tokens",
    },
)
def train_plan(
    command_line: typer.Context, asked: Asked[LayoutRequest], given: TrainPlanOptions
) -> int:
    """Find how to divide a transformer's training among GPUs; exit code 1 if nothing fits.

    Pipeline, tensor, context, expert and data degrees, microbatch, virtual stages, recomputation,
    ZeRO and placement. With --for plan the layout becomes a plan of stages, by `stagewright export
    LAYOUT --to plan`, that `stagewright run` carries out and `stagewright plan` prices alike.

    On --servers of several kinds, by computed layers or by measured layer profiles: stages,
    replicas, tensor degrees and kinds of GPU.
    """
    from stagewright.service.layouts.searching import find_layouts  # it imports scipy

    are_profiles = given.config is not None and is_profiles(given.config)
    config = given.config or given.run
    if config is None:
        raise InputError(
            "give a model, for example its config.json, or the run that you have: --from FILE"
        )
    require_options(command_line, config, are_profiles)
    if are_profiles or given.servers is not None:
        return plan_servers(given, config, are_profiles, asked.given["time_limit"])
    to, explained = asked.given["framework"], asked.given["explain"]
    run = None
    if given.run is not None:
        run, given = _with_run(given, given.run, on_command_line(command_line))
        if explained is not None:
            raise InputError("--explain: the run of --from is explained; leave one of them out")
        to, explained = to or run.framework, str(run.layout)
    architecture = run.architecture if run is not None and given.config is None else None
    make = partial(_request, asked, config=config, to=to, explained=explained, of=architecture)
    if given.is_frontier:
        if run is not None or explained is not None or given.asks_more(asked):
            raise InputError(
                "--from, --explain, --front and --what-if are of one number of GPUs and one "
                "--sequence, without --price and --deadline"
            )
        return plan_frontier(given, config.name, [make(one) for one in given.sizes()])
    request = make(given)
    problem = request.problem
    with interruptible() as stop, progress(f"planning {config.name}", stop):
        answer = find_layouts(request, stop)
    if given.png is not None:
        _draw(answer, request, config.name, given.png)
    written = kept(answer.plan, given, save_layout)
    tell(
        answer,
        given,
        lambda answer: print_layouts(config.name, problem, answer, asked.given["front"]),
        (given.png, *written) if answer.plan is not None else (),
    )
    return 1 if answer.plan is None else 0


def _request(
    asked: Asked[LayoutRequest],
    given: TrainPlanOptions,
    config: Path,
    to: str | None,
    explained: str | None,
    of: "Architecture | None",
) -> LayoutRequest:
    """The request for one number of GPUs and one length of sequences."""
    # The request refuses a name that is not known.
    problem = given.problem(config, given.fabric(), to if to in STACK_MEMORY else None, of)
    has_host = problem.fabric.host_bytes_per_second is not None
    if given.offload_optimizer and not has_host:
        raise InputError("--offload-optimizer needs --host-bandwidth, for example 25GB/s")
    if given.checkpoints == "asynchronous" and not has_host:
        raise InputError("--checkpoints asynchronous needs --host-bandwidth, for example 25GB/s")
    return asked.request(
        problem=problem,
        space=given.space(problem),
        by_stage=not given.alike,
        failures=given.failures(),
        front=asked.given["front"] or (given.png is not None and not given.is_frontier),
        framework=to,
        explain=None if explained is None else parse_layout(explained),
    )


def _with_run(
    given: TrainPlanOptions, file: Path, on_line: Collection[str]
) -> "tuple[TrainingRun, TrainPlanOptions]":
    """The run that a file describes, and the options with what it says where none is given."""
    from stagewright.executor.export.runs import read_run

    gpus = given.gpus if given.cluster is None else given.fabric().devices
    run = read_run(file, None if gpus is None else one_of(gpus, "--gpus"))
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
    }
    update = {name: one for name, one in said.items() if one is not None and name not in on_line}
    return run, given.model_copy(update=update)


def _draw(answer: LayoutAnswer, request: LayoutRequest, name: str, png: Path) -> None:
    from stagewright.executor.drawing.charts.memory_bars import front_png

    fabric, batch = request.problem.fabric, request.problem.batch
    title = f"{name} on {fabric.devices} {fabric.device}, batch {batch}"
    write_bytes(png, front_png(answer.front, fabric.memory_bytes, title))


class MemoryOptions(NumberOptions, PictureOptions, Printed):
    """What ``memory`` is asked."""

    file: Annotated[Path, Option("CONFIG_OR_LAYOUT")]
    """A Hugging Face config.json, or OWNER/NAME, with --layout; or what train-plan wrote."""
    layout: str | None = None
    """For example "p8 t8 d2 b1 v3 full sp zero1"."""
    sequence: Annotated[int | None, Option(form="S")] = None
    """Tokens in a sample."""
    global_batch: Annotated[int | None, Option(form="N")] = None
    """Samples between two updates; default: two microbatches for every pipeline rank."""
    device: Annotated[str | None, Option(form="KIND")] = None
    """Kind of GPU, or the JSON file of your own; default: h100."""
    memory: Annotated[str | None, Option(form="SIZE")] = None
    """Memory of a GPU; default: that of the kind."""
    stack: Annotated[str | None, Option("--for", form="FRAMEWORK", known=tuple(STACK_MEMORY))] = (
        None
    )
    """The software that trains, which decides what is kept: megatron, megatron-bridge, nemo,
    torchtitan, fsdp, deepspeed, accelerate, automodel, megatron-2021; plan: our own executor."""


@command(
    headings={
        "Trained weights and inputs": "lora lora_targets frozen images encoder_tokens",
        "Arithmetic": "precision attention reserve gradients rates",
    }
)
def memory(command_line: typer.Context, given: MemoryOptions) -> int:
    """Break down the peak memory of a layout by pipeline rank; exit code 1 if one is too full."""
    from stagewright.graphs.importers.hf_hub import is_model
    from stagewright.service.layouts.explaining import layout_memory
    from stagewright.service.layouts.requests import LayoutMemoryAnswer, MemoryRequest

    file = given.file
    if not is_model(file) and is_document(file, "profiled-plan"):
        raise InputError(f"{file} is a plan by layer profiles: check computes its memory again")
    if is_layout(file):
        if not {"file", "png", "as_json"}.issuperset(on_command_line(command_line)):
            raise InputError(
                f"{file} has its layout, batch and machines: of the options only --png and --json "
                "apply"
            )
        plan = load_layout(file)
        request = ask(MemoryRequest, problem=plan.problem, layout=plan.layout)
    else:
        if given.layout is None or given.sequence is None:
            missing = (
                ("--layout", 'for example "p2 t4 d8 b1"')
                if given.layout is None
                else ("--sequence", "the tokens in a sample, for example 4096")
            )
            raise InputError(f"{file} needs {', '.join(missing)}")
        layout = parse_layout(given.layout)
        machines = MachineOptions(
            device=given.device or "h100",
            gpus=layout.ranks,
            per_server=layout.ranks,
            memory=given.memory,
        )
        training = TrainingOptions(
            global_batch=given.global_batch
            or layout.data * layout.microbatch * 2 * layout.pipeline,
            sequence=given.sequence,
            **{name: getattr(given, name) for name in NumberOptions.model_fields},
        )
        problem = training.problem(file, machines.fabric(), given.stack)
        request = ask(MemoryRequest, problem=problem, layout=layout)
    answer = layout_memory(request)
    if given.png is not None:
        from stagewright.executor.drawing.charts.memory_bars import memory_png

        write_bytes(given.png, memory_png(answer.ranks, answer.memory_bytes, answer.layout))

    def show(answer: LayoutMemoryAnswer) -> None:
        print_memory(answer.ranks, answer.memory_bytes)
        print_shortages(answer.shortages)
        fits = bytes_in_range(answer, answer.memory_bytes)
        say(fits, *answer.remarks, f"rates: {answer.rates}")

    tell(answer, given, show, [given.png])
    return 1 if answer.fits == "no" else 0
