"""A round of a shared cluster as a JSON document: who runs where, and what each has had before."""

import re
from dataclasses import field
from typing import Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.pool import Pool

Launcher = Literal["slurm", "kueue", "torchrun"]
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""Names of JobSets and queues."""
NAME = re.compile(r"[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)
"""Names of nodes and of types of accelerators, in scripts and as values of labels."""


@documents.record
class RoundEntry:
    """A job, or a pair that shares accelerators, on one type of them, at a placement and a count.

    In this round it has those with ``numbers``, since ``lease_seconds`` at the round's end; without
    numbers it waits, or runs on another type. ``received_seconds`` are those it had on this type
    since the jobs of the cluster last changed, this round included.
    """

    jobs: tuple[str, ...]
    accelerator: str
    placement: Literal["consolidated", "spread"] | None = None
    count: int | None = None
    numbers: tuple[int, ...] = ()
    lease_seconds: float = 0.0
    received_seconds: float = 0.0


@documents.record
class ClusterRound:
    """A round, as launched by ``launcher``: jobs that stop, stay and start, in this order.

    ``jobs`` are all of the cluster, those in ``queued`` JobSets that their users made. ``nodes``
    are the servers of each type of accelerator. ``elapsed_seconds`` are from the last change of the
    jobs to the round's end. ``bound`` is on the policy's objective; ``one_more`` is how far one
    more accelerator of each type moves it at most.
    """

    launcher: Launcher
    policy: str
    round_seconds: float
    pool: Pool
    jobs: tuple[str, ...]
    stops: tuple[str, ...]
    stays: tuple[str, ...]
    starts: tuple[str, ...]
    entries: tuple[RoundEntry, ...]
    elapsed_seconds: float
    queued: tuple[str, ...] = ()
    nodes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    objective: float | None = None
    bound: float | None = None
    proved_by: str | None = None
    one_more: dict[str, float] | None = None
    format: Literal["stagewright-round"] = "stagewright-round"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        counts = {one.name: one.count for one in self.pool.accelerators}
        taken: set[tuple[str, int]] = set()
        for number, one in enumerate(self.entries):
            for each in one.numbers:
                place = one.accelerator, each
                if not 0 <= each < counts.get(one.accelerator, 0) or place in taken:
                    raise InputError(f"entries[{number}]: {each} is no free {one.accelerator}")
                taken.add(place)
        for kind in self.pool.accelerators:
            names = self.nodes.get(kind.name, ())
            if len(names) not in (0, kind.servers) or not all(map(NAME.fullmatch, names)):
                raise InputError(f"nodes: {kind.name} needs {kind.servers} names of servers")
        for job in self.queued:
            if not DNS_LABEL.fullmatch(job):
                raise InputError(f"queued: {job!r} is no name of a JobSet")

    def running(self) -> dict[str, RoundEntry]:
        """The entry of each job that runs."""
        return {job: one for one in self.entries if one.numbers for job in one.jobs}
