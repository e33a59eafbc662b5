"""``export``: plans for other frameworks' runtimes, and launch scripts."""

from pathlib import Path
from typing import Annotated

from stagewright.cli.commands import command
from stagewright.cli.console import print_answer, say
from stagewright.cli.layouts.profiled import is_layout
from stagewright.cli.options import Printed
from stagewright.cli.outputs import Named, Writes, require_apart, require_folder
from stagewright.graphs.documents.documents import write_file
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.service.answers import ExportAnswer
from stagewright.service.options import Option


class ExportOptions(Printed):
    """What ``export`` is asked."""

    plan: Annotated[Path, Option("PLAN")]
    """Plan file."""
    to: Annotated[str, Option(form="FORMAT")]
    """torch-csv, torchtitan, nemo, megatron, deepspeed, torchrun, slurm, kubernetes; of a layout:
    megatron, megatron-bridge, nemo (2.x), torchtitan, deepspeed, accelerate, axolotl, trl,
    transformers (DistributedConfig), nnscaler, plan."""
    output: Annotated[Path, Option("--output", "-o", form="FILE_OR_FOLDER"), Writes(several=True)]
    """Output file, or a folder for several files."""
    model: Annotated[Path | None, Option(form="FILE")] = None
    """Model file: layers' names, samples in a microbatch; of a layout: names."""
    partition_only: bool = False
    """Export only the stages; leave the schedule to the framework."""
    command: str | None = None
    """Launch scripts: the command of every rank."""
    cluster: Annotated[Path | None, Option(form="FILE")] = None
    """Cluster file, with the servers of the devices."""
    per_server: Annotated[int | None, Option(form="N")] = None
    """Devices in a server, without a cluster file."""
    image: str | None = None
    """Container image of the Kubernetes Job."""
    cpus: Annotated[int | None, Option(form="N")] = None
    """Slurm: CPUs of every process of the job."""
    time: Annotated[str | None, Option(form="TIME")] = None
    """Slurm: the job's most time, for example 4:00:00."""


@command(headings={"Launch scripts": "command cluster per_server image cpus time"})
def export(given: ExportOptions) -> int:
    """Write a plan, or a layout of train-plan, for another framework; or a script to launch it."""
    from stagewright.executor.export import remarks
    from stagewright.executor.export.options import FormatOptions
    from stagewright.formulations.parallelism.document import load_layout
    from stagewright.formulations.plans.plan import load_plan
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.graphs.models.chain import load_model
    from stagewright.service.exporting import export as written

    plan = given.plan
    options = FormatOptions(
        model=load_model(given.model) if given.model else None,
        partition_only=given.partition_only,
        command=given.command,
        cluster=load_cluster(given.cluster) if given.cluster else None,
        per_server=given.per_server,
        image=given.image,
        cpus=given.cpus,
        time=given.time,
    )
    answer = load_layout(plan) if is_layout(plan) else load_plan(plan)
    try:
        files = written(answer, given.to, options)
    except InvalidPlan as error:
        if given.as_json:
            print_answer(ExportAnswer(status="invalid", reason=str(error)))
        else:
            say(f"{plan} cannot run: {error}")
        return 1
    inputs = _named(("PLAN", plan), ("--model", given.model), ("--cluster", given.cluster))
    return _write(files, given.output, inputs, remarks(answer, given.to), given.as_json)


def _named(*given: tuple[str, Path | None]) -> list[Named]:
    return [Named(name, path) for name, path in given if path is not None]


def _write(
    files: dict[str, str], output: Path, inputs: list[Named], told: tuple[str, ...], as_json: bool
) -> int:
    """Write exported files, and print their names and remarks."""
    paths = _paths(output, list(files))
    require_apart([Named("--output", path) for path in paths], inputs)
    for path, text in zip(paths, files.values(), strict=True):
        write_file(path, text)
    if as_json:
        names = tuple(map(str, paths))
        print_answer(ExportAnswer(status="written", files=names, remarks=told))
    else:
        say(*(f"{path} is written" for path in paths), *told)
    return 0


def _paths(output: Path, names: list[str]) -> list[Path]:
    """The paths to write: one file as or into ``output``, several into it as a new folder."""
    if len(names) == 1 and not output.is_dir():
        if output.suffix and output.suffix != Path(names[0]).suffix:
            raise InputError(f"--output {output}: a name such as {names[0]} is needed")
        return [output]
    if not output.is_dir():
        if output.exists():
            raise InputError(f"--output {output} is a file; {len(names)} files need a folder")
        try:
            output.mkdir()
        except OSError as error:
            raise InputError(f"--output {output}: {error.strerror}") from None
    paths = [output / name for name in names]
    require_folder(*paths)
    return paths
