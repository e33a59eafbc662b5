"""Options that several commands have."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from stagewright.cli.commands import CommandOptions
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.errors import InputError
from stagewright.service.options import Option

T = TypeVar("T")

MOST_THREADS = 8  # unless more are asked for
SERVED_THREADS = 4  # what services allow unless they are set otherwise


class Printed(CommandOptions):
    """How a command prints its answer."""

    as_json: Annotated[bool, Option("--json")] = False
    """Print one JSON object and nothing else."""


class Written(Printed):
    """An answer with a document to write."""

    output: Annotated[Path | None, Option("--output", "-o", form="FILE"), Writes(".json")] = None
    """Where to write; - is standard output."""


class Served(CommandOptions):
    """Whether this process or a service answers."""

    server: Annotated[str | None, Option(form="URL", env="STAGEWRIGHT_SERVER")] = None
    """Solve on the planning service at this URL, with the token in STAGEWRIGHT_TOKEN."""


class Threaded(CommandOptions):
    """The threads of a search."""

    threads: int | None = None
    """Threads of the solvers; with one, answers are reproducible. Default: one per core, at most 8;
    of a sweep and on Ray 1; with --server 4."""


class OnRay(CommandOptions):
    """Where several plans are made at the same time."""

    engine: Literal["local", "ray"] = "local"
    """Processes of this machine, or of a Ray cluster."""
    address: str | None = None
    """With --engine ray: address of the Ray cluster; default: Ray is started here."""

    def require(self, server: str | None = None) -> None:
        """Refuse an address of a cluster that is not used, or a cluster for a server's jobs."""
        if self.engine == "local" and self.address is not None:
            raise InputError("--address goes with --engine ray")
        if self.engine == "ray" and server is not None:
            raise InputError("--engine ray is of searches here; leave it or --server out")


class Modelled(CommandOptions):
    """A user's module and its data."""

    module: Annotated[str, Option(form="PACKAGE:FACTORY")]
    """Function that returns the module."""
    data: Annotated[str, Option(form="PACKAGE:FACTORY")]
    """Function that returns an iterable of mini-batches (inputs, targets), of which the first is
    used."""
    loss: Annotated[str | None, Option(form="PACKAGE:FUNCTION")] = None
    """Loss of (outputs, targets): a mean, or (sum, count); default: cross-entropy."""
    optimizer: str = "adamw"
    """One of torch.optim, e.g. adamw:lr=1e-3,weight_decay=0.1."""


class Updated(CommandOptions):
    """How gradients become updates."""

    parameter_group: Annotated[list[str] | None, Option(form="REGEX:KEY=VALUE,...")] = None
    """Other arguments of the optimizer for parameters with a matching name, e.g.
    'norm|bias:weight_decay=0', or another one: 'norm|bias:optimizer=adamw,lr=1e-3'; repeatable, the
    first match counts."""

    clip_norm: float | None = None
    """Clip gradients to this norm over all parameters."""


class Seeded(CommandOptions):
    """Random choices."""

    seed: int = 0
    """Seed of all random choices."""


class Repeated(CommandOptions):
    """Measurements."""

    repetitions: Annotated[int, Field(ge=1)] = 9
    """Measurements, of which the median counts."""


def threads_of(threads: int | None, server: str | None = None) -> int:
    """The threads of a search, here or on a server."""
    if threads is not None:
        return threads
    return min(MOST_THREADS, os.cpu_count() or 1) if server is None else SERVED_THREADS


def read_sizes(text: str) -> list[int]:
    """Sizes of microbatches, ascending."""
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise InputError(f"--microbatch-sizes {text!r}: write for example 1,2,4") from None
    if sizes[0] < 1:
        raise InputError(f"--microbatch-sizes must be at least 1, got {sizes[0]}")
    return sizes


_GROUP = re.compile(r"(?P<kind>[^:,]+):(?P<servers>\d{1,9})[xX](?P<devices>\d{1,9})")


def read_groups(text: str, option: str) -> list[tuple[str, int, int]]:
    """Kind, servers and devices of a server of every group."""
    found = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise InputError(
                f"{option} {part.strip()!r}: write KIND:SERVERSxGPUS, for example a100:2x4"
            )
        found.append((match["kind"], int(match["servers"]), int(match["devices"])))
    return found


def read_by_kind(
    text: str | None,
    option: str,
    parse: Callable[[str, str], T],
    kinds: Iterable[str],
    known: Callable[[str, str], str],
) -> dict[str, T]:
    """The value of each kind, from one for all ``kinds`` or several by kind; none without a text.

    ``known`` gives the kind that a text and its option name, or refuses it.
    """
    if text is None:
        return {}
    if "=" not in text:
        return dict.fromkeys(kinds, parse(text, option))
    pairs = [part.partition("=") for part in text.split(",")]
    found: dict[str, T] = {}
    for given, _, value in pairs:
        kind = known(given, option)
        if kind in found:
            raise InputError(f"{option}: {kind} is given twice; give it once")
        found[kind] = parse(value.strip(), option)
    return found
