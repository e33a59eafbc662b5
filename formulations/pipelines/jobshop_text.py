"""Text formats of job shops: OR-Library's and JSPLIB's, Taillard's, and flexible ones (.fjs)."""

from collections.abc import Sequence
from itertools import count

from stagewright.formulations.pipelines.jobshop import JobShop, Pair, Step
from stagewright.graphs.documents.errors import InputError

Line = tuple[str, list[str]]
"""Where a line is, and its words."""
TAILLARD = ("nb of jobs", "number of jobs")
"""How the line above the sizes of one of Taillard's instances begins."""
BLOCKS = "times", "machines"
SIZES = {2: "pairs", 3: "flexible", 6: "matrices"}
"""The layout by how many numbers the first line has."""


def parse_jobshop(text: str, place: str, instance: str | None = None) -> JobShop:
    """Read an instance; ``place`` (a file name) starts every message.

    ``#`` starts a comment. The first line gives the numbers of jobs and machines; then one of:

    - a line per job, a pair of machine (from 0) and duration per step, one step per machine;
    - Taillard's matrices: a line of durations per job, then a line of machines (from 1) per job,
      with his line of names and the words Times and Machines, or without;
    - flexible job shops (name ends with ``.fjs``, or a third number in the first line): a line per
      job, its number of steps, and for each step the number of its machines and as many pairs of
      machine (from 1) and duration.

    A file may have several instances: named by lines ``instance NAME`` as OR-Library's are, or
    numbered from 1, Taillard's. ``instance`` chooses one.

    Raises
    ------
    InputError
        One line that names the line of the fault, or the instances to choose from.
    """
    lines = _chosen(_instances(text, place), instance, place)
    if not lines:
        raise InputError(f"{place}: empty; the first line must give jobs and machines")
    (where, words), *rest = lines
    layout = "flexible" if place.endswith(".fjs") else SIZES.get(len(words), "pairs")
    # A third number is the mean of machines per step, and may be a fraction.
    header = _integers(words[:2] if layout == "flexible" else words, where)
    if len(words) not in SIZES or min(header[:2]) < 1:
        raise InputError(
            f"{where}: expected the numbers of jobs and machines, got {' '.join(words)!r}"
        )
    jobs, machines = header[:2]
    blocks = [row for row in rest if row[1][0].lower() in BLOCKS]
    if layout == "pairs" and (blocks or [len(row[1]) for row in rest] == [machines] * 2 * jobs):
        layout = "matrices"
    if layout == "matrices":
        found = _matrices([row for row in rest if row not in blocks], jobs, machines, lines[-1][0])
    else:
        read = _flexible_job if layout == "flexible" else _job
        found = tuple(read(words, machines, where) for where, words in rest)
        _require_jobs(len(found), jobs, lines[-1][0])
    try:
        return JobShop(found)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _instances(text: str, place: str) -> dict[str, list[Line]]:
    """The lines of every instance with content, by its name; the name of a single one is empty."""
    found: dict[str, list[Line]] = {"": []}
    current, numbers = found[""], count(1)
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words or not "".join(words).strip("+"):
            continue
        named = words[0].lower() == "instance" and len(words) == 2
        if named or " ".join(words).lower().startswith(TAILLARD):
            name = words[1] if named else str(next(numbers))
            if name in found:
                raise InputError(f"{place}, line {number}: a second instance {name!r}")
            current = found[name] = []
        else:
            current.append((f"{place}, line {number}", words))
    if len(found) > 1:
        del found[""]  # what a collection says of itself
        return {name: _numeric(lines) for name, lines in found.items()}
    return found


def _numeric(lines: Sequence[Line]) -> list[Line]:
    """The lines of an instance in a collection, without its description and an end of file."""
    return [
        (where, words)
        for where, words in lines
        if words[0].lstrip("-").isdigit() or (len(words) == 1 and words[0].lower() in BLOCKS)
    ]


def _chosen(named: dict[str, list[Line]], instance: str | None, place: str) -> list[Line]:
    names = ", ".join(named)
    if instance in named:
        return named[instance]
    if instance is not None:
        raise InputError(f"{place}: no instance {instance!r}; there {_are(names)}")
    if len(named) > 1:
        raise InputError(f"{place}: {len(named)} instances, name one with --instance: {names}")
    return next(iter(named.values()))


def _are(names: str) -> str:
    return f"are {names}" if names else "is one without a name: leave --instance out"


def _require_jobs(found: int, jobs: int, where: str) -> None:
    if found != jobs:
        raise InputError(f"{where}: the first line announces {jobs} jobs, the file has {found}")


def _job(words: list[str], machines: int, where: str) -> tuple[Step, ...]:
    numbers = _integers(words, where)
    if len(numbers) != 2 * machines:
        raise InputError(
            f"{where}: expected {machines} pairs of machine and duration, "
            f"got {len(numbers)} numbers"
        )
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return tuple(_pair(machine, duration, 0, machines, where) for machine, duration in pairs)


def _flexible_job(words: list[str], machines: int, where: str) -> tuple[Step, ...]:
    numbers = iter(_integers(words, where))
    try:
        steps = tuple(
            tuple(
                _pair(next(numbers), next(numbers), 1, machines, where)
                for _ in range(next(numbers))
            )
            for _ in range(next(numbers))
        )
    except (StopIteration, RuntimeError):  # the latter within a generator
        raise InputError(f"{where}: ends before the last step's machines and durations") from None
    left = len(list(numbers))
    if left:
        raise InputError(f"{where}: {left} numbers after the last step")
    return steps


def _matrices(
    rows: Sequence[Line], jobs: int, machines: int, last: str
) -> tuple[tuple[Step, ...], ...]:
    """Rows of durations, then as many of machines; Taillard numbers these from 1."""
    if len(rows) != 2 * jobs:
        raise InputError(
            f"{last}: {jobs} jobs have {jobs} lines of durations and {jobs} of machines, the file "
            f"has {len(rows)}"
        )
    numbers = [_integers(words, where) for where, words in rows]
    for (where, _), row in zip(rows, numbers, strict=True):
        if len(row) != machines:
            raise InputError(f"{where}: expected {machines} numbers, got {len(row)}")
    first = min(1, *map(min, numbers[jobs:]))
    return tuple(
        tuple(
            _pair(machine, duration, max(first, 0), machines, where)
            for machine, duration in zip(order, durations, strict=True)
        )
        for (where, _), durations, order in zip(
            rows[jobs:], numbers[:jobs], numbers[jobs:], strict=True
        )
    )


def _pair(machine: int, duration: int, first: int, machines: int, where: str) -> Pair:
    """A machine, numbered from 0, and a duration."""
    if not first <= machine < first + machines:
        raise InputError(f"{where}: machine {machine} is not in {first} ... {first + machines - 1}")
    if duration < 0:
        raise InputError(f"{where}: duration {duration} is negative")
    return machine - first, duration


def _integers(words: list[str], place: str) -> list[int]:
    numbers = []
    for word in words:
        try:
            numbers.append(int(word))
        except ValueError:
            raise InputError(f"{place}: {word[:40]!r} is not an integer") from None
    return numbers
