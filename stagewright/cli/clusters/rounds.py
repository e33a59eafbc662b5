"""``rounds``: an allocation in rounds, and the launch files of the first of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stagewright.cli.commands import Asked, command
from stagewright.cli.console import print_table, say, tell
from stagewright.cli.options import Printed, Served
from stagewright.cli.outputs import Writes
from stagewright.cli.solving import find
from stagewright.graphs.documents.documents import write_file
from stagewright.graphs.documents.errors import InputError
from stagewright.service.answers import Answer
from stagewright.service.clusters.requests import RoundsRequest
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.service.clusters.answers import AssignmentAnswer, RoundsAnswer


class RoundsOptions(Served, Printed):
    """What ``rounds`` is asked beside its request."""

    output: Annotated[
        Path | None, Option("--output", "-o", form="FOLDER"), Writes(several=True)
    ] = None
    """New folder for the launch files: one for each job, round.sh, round.json."""


@command(
    without="threads seed",
    headings={
        "The policy": "space_sharing placement budget_dollars",
        "Launch files of the first round": "to output after nodes queue node_label image cpus time",
    },
)
def rounds(asked: Asked[RoundsRequest], given: RoundsOptions) -> int:
    """Realise an allocation in rounds: placements, renewed leases, deviation from the target.

    With --to and --output, the first round is written as a folder: bash round.sh there starts it.
    """
    from stagewright.service.clusters.answers import AllocateAnswer, RoundsAnswer

    request = asked.request()
    _require_new_folder(request, given.output)

    def show(answer: Answer) -> None:
        if isinstance(answer, RoundsAnswer):
            _print_rounds(answer)
        elif isinstance(answer, AllocateAnswer):
            say(f"{answer.policy}: {answer.status}, no allocation", *answer.notes)

    answer = find(Answer, request, "making rounds", given.server)
    if isinstance(answer, RoundsAnswer) and answer.launch is not None and given.output is not None:
        _write_round(answer.launch.files, given.output)
    tell(answer, given, show)
    return 0 if isinstance(answer, RoundsAnswer) else 1


def _require_new_folder(request: RoundsRequest, folder: Path | None) -> None:
    """Refuse a folder without launch files, launch files without a folder, and one with files."""
    if (request.to is None) != (folder is None):
        raise InputError("--to and --output go together: which launch files, and their new folder")
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--output {folder} is there already; a round has a folder of its own")


def _write_round(files: dict[str, str], folder: Path) -> None:
    """Write the files of a round; round.json comes last, so that a whole round has it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)


def _print_rounds(answer: "RoundsAnswer") -> None:
    from stagewright.service.clusters.told import launch_lines

    names = answer.accelerators
    rows = []
    for number, assignments in enumerate(answer.rounds):
        cells = []
        for name in names:
            here = [one for one in assignments if one.accelerator == name]
            cells.append(" ".join(_spelled(one) for one in here))
        rows.append((str(number), *cells))
    print_table(("round", *(f"<{name}" for name in names)), rows)
    goes_on = any(one.renewed for one in answer.rounds[0])
    opportunities = sum(len(assignments) for assignments in answer.rounds[1 - goes_on :])
    renewed = sum(one.renewed for assignments in answer.rounds for one in assignments)
    say(
        "+ shares its accelerators, = keeps its lease, xN runs on N",
        f"{answer.policy}: {len(answer.rounds)} rounds of {answer.round_seconds:g} s; "
        f"leases renewed: {renewed} of {opportunities}",
        f"from the target: mean {answer.mean_deviation:.4f} of the time, largest shortfall "
        f"{answer.largest_shortfall:.4f}",
        *answer.assumed,
    )
    if answer.measured:
        say(f"measured, the others computed: {', '.join(answer.measured)}")
    if answer.launch is not None:
        say(*launch_lines(answer.launch))


def _spelled(one: "AssignmentAnswer") -> str:
    size = f"x{len(one.numbers)}" if len(one.numbers) > 1 else ""
    return f"{'+'.join(one.jobs)}{size}{'=' if one.renewed else ''}"
