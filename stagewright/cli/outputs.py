"""Outputs of commands: refused before any work if they cannot be written, or overwrite an input.

A field that is written is annotated with ``Writes(".json")``; all other paths are read.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from stagewright.graphs.documents.errors import InputError

STANDARD_OUTPUT = Path("/dev/stdout")


class Writes:
    """Marks an option whose value is written: names end in one of ``suffixes``, or have none.

    Without suffixes every name is accepted; ``several`` files are written into a folder.
    """

    def __init__(self, *suffixes: str, several: bool = False) -> None:
        self.suffixes, self.several = suffixes, several

    @staticmethod
    def path(given: Path | None) -> Path | None:
        """The path to write: standard output for ``-``."""
        return STANDARD_OUTPUT if given == Path("-") else given


class Named(NamedTuple):
    """A path and the option that gave it."""

    option: str
    path: Path


@contextlib.contextmanager
def writing(files: Sequence[tuple[Named, Writes | None]], as_json: bool) -> Iterator[None]:
    """Refuse files that cannot be written safely; of those that are read nothing is said.

    While the body runs, prints go to standard error if standard output is one of the files.
    """
    written = [(named, writes) for named, writes in files if writes is not None]
    read = [named for named, writes in files if writes is None]
    require_apart([named for named, _ in written], read)
    for named, writes in written:
        _require_writable(named, writes)
    if not written:
        yield
        return
    from stagewright.graphs.documents.documents import is_standard_output  # slow to import

    taken = [named.option for named, _ in written if is_standard_output(named.path)]
    if taken and as_json:
        raise InputError(f"{taken[0]} and --json would both be standard output: leave one out")
    with contextlib.redirect_stdout(sys.stderr) if taken else contextlib.nullcontext():
        yield


def require_apart(outputs: Sequence[Named], inputs: Sequence[Named]) -> None:
    """Refuse an output that is the same file as an input or another output."""
    for position, output in enumerate(outputs):
        for other in (*inputs, *outputs[:position]):
            if _same(output.path, other.path):
                raise InputError(
                    f"{output.option} would overwrite {other.option}: both are {output.path}"
                )


def require_folder(*paths: Path) -> None:
    """Refuse files that cannot be written."""
    for path in paths:
        folder = os.path.dirname(os.path.realpath(path))
        if os.path.isdir(path):
            raise InputError(f"{path} is a folder; name a file in it")
        if not os.path.isdir(folder):
            raise InputError(f"{path}: the folder {path.parent} does not exist")
        if not os.path.exists(path) and not os.access(folder, os.W_OK):
            raise InputError(f"{path}: the folder {path.parent} is not writable")
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise InputError(f"{path}: no permission to write it")


def is_document(path: Path, name: str) -> bool:
    """Whether a file is a document whose format is ``stagewright-NAME``."""
    from stagewright.graphs.documents.documents import format_of  # slow to import

    return format_of(path) == f"stagewright-{name}"


def _require_writable(named: Named, writes: Writes) -> None:
    option, path = named
    suffix = path.suffix.lower()
    if suffix and writes.suffixes and suffix not in writes.suffixes:
        raise InputError(f"{option} {path}: the name must end in {' or '.join(writes.suffixes)}")
    if not (writes.several and path.is_dir()):
        require_folder(path)


def _same(one: Path, other: Path) -> bool:
    """Whether two names are the same file, existing or not; never for devices like /dev/null."""
    real = os.path.realpath(one)
    if real == os.devnull:
        return False
    try:
        return os.path.samefile(one, other)
    except OSError:
        return real == os.path.realpath(other)
