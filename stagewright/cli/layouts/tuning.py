"""``tune``: the layouts to try on the machines themselves, and when to stop."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from stagewright.cli import interruptible
from stagewright.cli.commands import command, spelling
from stagewright.cli.console import print_table, progress, say, seconds, tell, warn
from stagewright.cli.layouts.layouts import read_model
from stagewright.cli.layouts.profiled import on_command_line
from stagewright.cli.options import Printed
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.documents import write_file
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_seconds
from stagewright.service.layouts.configured import TuneInputs
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.formulations.parallelism.trials import Trial, Tuning
    from stagewright.service.layouts.tuning import TuneAnswer

_LATER = {"what", "parallel", "launch", "trials", "layout", "png", "as_json"}
"""The options of a tuning that has begun, which says everything else."""


class TuneOptions(TuneInputs, Printed):
    """What ``tune`` is asked."""

    what: Annotated[list[str], Option("MODEL_OR_FOLDER")]
    """A Hugging Face config.json, or its folder, or OWNER/NAME, to begin; FOLDER to go on; or read
    FOLDER LOG...: logs of the runs, where they are not in the folders, or a CSV with columns
    layout, seconds."""
    output: Annotated[
        Path | None, Option("--output", "-o", form="FOLDER"), Writes(several=True)
    ] = None
    """Folder of the tuning: tuning.json, and a folder for every layout to try."""
    launch: Annotated[str | None, Option(form="COMMAND")] = None
    """Command that makes a run and waits for it, in the layout's folder; {script} is run.sh, for
    sbatch job.sbatch, {folder} the folder, {layout} the layout: trials follow one another."""
    trials: Annotated[int | None, Option(form="N"), Field(ge=1)] = None
    """The most trials that --launch makes; default: until no other is worth one."""
    layout: str | None = None
    """Of the logs, where they are not in a layout's folder: "p4 t2 d8 b1"."""
    png: Annotated[Path | None, Option(form="FILE"), Writes(".png")] = None
    """Where to draw the trials, the best so far and what may still win."""


@command(
    headings={
        "Machines": "per_server server_bandwidth network_bandwidth per_rack rack_bandwidth"
        " host_bandwidth memory",
        "Trained weights and inputs": "lora lora_targets frozen images encoder_tokens",
        "Arithmetic and memory": "precision attention no_overlap reserve gradients rates",
        "Layouts to consider": "pipeline tensor context replicas expert microbatch_sizes chunks"
        " schedule zero recompute offload_optimizer alike candidates time_limit",
        "Trials": "launch trials parallel layout",
    },
)
def tune(command_line: typer.Context, given: TuneOptions) -> int:
    """Find the fastest layout by as few trials on the machines as can be, and say when to stop.

    It writes the launch files of the layout to try, corrects all predictions by what was measured
    (out of memory is an answer too), and ends where no other layout is worth a trial. With --launch
    it makes the trials itself; killed, it goes on where it was.
    """
    first, *others = given.what
    if first == "read" and others:
        answer = _read(command_line, Path(others[0]), others[1:], given)
    elif others:
        raise InputError(f"{others[0]}: give one model, or: tune read FOLDER LOG...")
    else:
        answer = _begin_or_go_on(command_line, Path(first), given)
    if given.png is not None:
        from stagewright.executor.drawing.charts.layouts import trials_png

        write_file(given.png, trials_png(answer.tried, answer.open))
    tell(answer, given, lambda answer: print_tuning(answer, _root(given)), [given.png])
    return 1 if answer.broken or (given.launch and answer.best is None) else 0


def _root(given: TuneOptions) -> Path:
    """The folder of the tuning."""
    if given.what[0] == "read" and len(given.what) > 1:
        return Path(given.what[1])
    return Path(given.what[0]) if given.output is None else given.output


def _begin_or_go_on(context: typer.Context, model: Path, given: TuneOptions) -> "TuneAnswer":
    from stagewright.executor.measuring.trials import DOCUMENT
    from stagewright.service.layouts.trials import read_in, start_in

    root, parallel = _root(given), given.parallel
    if given.layout is not None:
        raise InputError("--layout is of logs: tune read FOLDER LOG... --layout LAYOUT")
    if given.trials is not None and given.launch is None:
        raise InputError("--trials is of the runs that --launch makes")
    if (model / DOCUMENT).exists() and given.output is None:
        _require_later(context, root)
    elif given.output is None:
        raise InputError(f"{model} is no folder of a tuning; to begin one, name it: -o FOLDER")
    else:
        with spelling(TuneOptions):
            request = given.tune_of(read_model(model, given.sequence))
        is_new = not (root / DOCUMENT).exists()
        with interruptible() as stop, progress(f"searching layouts of {model.name}", stop):
            begun = start_in(root, request, stop)
        is_cut = len(begun.candidates) < request.candidates and begun.rest_seconds is not None
        if is_new and is_cut:
            warn(
                f"the time limit of {request.time_limit:g} s ended the search: there are "
                f"{len(begun.candidates)} candidates (--time-limit)"
            )
    if given.launch is None:
        return read_in(root, [], parallel)
    return _launch(root, given.launch, given, parallel)


def _launch(root: Path, command: str, given: TuneOptions, parallel: int) -> "TuneAnswer":
    from stagewright.service.layouts.trials import tune_by

    def show(answer: "TuneAnswer", trial: "Trial") -> None:
        if not given.as_json:
            took = trial.outcome if trial.seconds is None else format_seconds(trial.seconds)
            best = "-" if answer.best is None else seconds(answer.best.seconds)
            say(f"{trial.layout}: {took}; best {best}; {answer.said.partition(':')[0]}")

    if not command.strip():
        raise InputError('--launch: the command is empty; for example "sbatch --wait {script}"')
    with interruptible() as stop, progress(f"tuning {root.name}", stop):
        return tune_by(
            root, command, trials=given.trials, parallel=parallel, stop=stop, on_trial=show
        )


def _read(context: typer.Context, root: Path, logs: list[str], given: TuneOptions) -> "TuneAnswer":
    from stagewright.executor.measuring.trials import DOCUMENT, current
    from stagewright.service.layouts.trials import read_in

    if not (root / DOCUMENT).exists():
        raise InputError(f"{root} has no {DOCUMENT}: begin with tune MODEL -o {root}")
    if given.launch is not None:
        raise InputError(f"--launch goes without read: tune {root} --launch COMMAND")
    _require_later(context, root)
    tuning = current(root)
    trials = [one for log in logs for one in _trials(root, tuning, Path(log), given.layout)]
    return read_in(root, trials, context.params["parallel"])


def _require_later(context: typer.Context, root: Path) -> None:
    stray = [name for name in on_command_line(context) if name not in _LATER]
    if stray:
        names = [one.opts[0] for one in context.command.params if one.name in stray]
        raise InputError(f"{', '.join(names)}: the tuning in {root} says it; leave it out")


def _trials(root: Path, tuning: "Tuning", log: Path, layout: str | None) -> Iterator["Trial"]:
    """The trials that a file tells: a CSV, a log in a layout's folder, or one with --layout."""
    from stagewright.executor.measuring.trials import folders, trial_of
    from stagewright.formulations.parallelism.layout import parse_layout

    if not log.exists():
        raise InputError(f"{log}: No such file or directory")
    place = str(log.resolve())
    if log.suffix.lower() == ".csv":
        yield from _table(tuning, log)
        return
    mine = [
        (folder, of) for folder, of in folders(root).items()
        if folder.resolve() in log.resolve().parents
    ]  # fmt: skip
    if layout is not None:
        named = parse_layout(layout)
        if mine and mine[0][1] != named:
            raise InputError(f"{log} is in the folder of {mine[0][1]}: leave out --layout")
        yield trial_of(tuning.problem, named, log, place, False)
    elif mine:
        folder, of_folder = mine[0]
        name = folder.relative_to(root).as_posix()
        yield trial_of(tuning.problem, of_folder, log, name, False)
    else:
        raise InputError(f'{log} is in no layout\'s folder of {root}: give --layout "p4 t2 d8 b1"')


def _table(tuning: "Tuning", log: Path) -> Iterator["Trial"]:
    """The trials of a CSV."""
    from stagewright.formulations.parallelism.layout import parse_layout
    from stagewright.formulations.parallelism.trials import Trial
    from stagewright.graphs.importers.measured_runs import read_measured

    of = tuning.problem
    for row, one in enumerate(read_measured(log), 1):
        for name, said, is_ in (
            ("gpus", one.gpus, of.fabric.devices), ("sequence", one.sequence, of.sequence),
            ("batch", one.batch, of.batch),
        ):  # fmt: skip
            if said is not None and said != is_:
                raise InputError(f"{one.place}: {name} is {said}, the tuning's {is_}")
        taken = one.seconds_of(of.fabric.devices, of.sequence, of.batch)
        found = parse_layout(one.layout or "")
        yield Trial(found, "measured", f"{log.resolve()}:{row}", taken, one.memory_bytes)


# --- What is printed -----------------------------------------------------------------------------


def print_tuning(answer: "TuneAnswer", root: Path) -> None:
    """The trials, what may still win, and what to do next."""
    from stagewright.service.layouts.told.measured import (
        about_lines,
        standing_lines,
        tuned_tables,
    )

    for table in tuned_tables(answer):
        print_table(table.head, table.rows, table.title)
    say(*about_lines(answer), *standing_lines(answer))
    if answer.broken is None and answer.next and not answer.stop:
        say(f"their launch files are in {root}; then: stagewright tune read {root}")
