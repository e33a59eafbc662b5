"""The scheduler's records of leased jobs and of the current round."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stagewright.executor.clusters.rates import Measured
from stagewright.executor.clusters.rounds import Assignment
from stagewright.graphs.documents.arrays import Floats


@dataclass(slots=True)
class LeasedJob:
    """A job with an active lease: its processes and their place."""

    epoch: int
    refs: list[Any]
    nodes: list[str]
    worker: int
    accelerators: tuple[int, ...]
    sharing: int  # jobs on these accelerators

    @property
    def place(self) -> tuple[int, tuple[int, ...], int]:
        """Worker type, accelerators, and jobs on them."""
        return self.worker, self.accelerators, self.sharing


@dataclass(slots=True)
class CurrentRound:
    """The current round: its target, the jobs in it, and the run times of those that ended."""

    target: Floats
    there: list[int]
    began: float = field(default_factory=time.monotonic)
    ran: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds since the round began."""
        return time.monotonic() - self.began


Place = tuple[int, tuple[int, ...], int]


def place_of(assignment: Assignment) -> Place:
    """Worker type, accelerators, and jobs on them."""
    return assignment.worker, assignment.accelerators, len(assignment.jobs)


def measurements(
    leased: Mapping[int, LeasedJob], rates: Mapping[int, float], kind_of: Callable[[int], int]
) -> list[Measured]:
    """The measured ``rates`` of jobs with a lease, each with the kind of its partner.

    Without jobs whose partner has ended.
    """
    found = []
    for job, rate in rates.items():
        own = leased[job]
        partners = [
            kind_of(other)
            for other, lease in leased.items()
            if other != job and lease.place == own.place
        ]
        if len(partners) == own.sharing - 1:
            partner = partners[0] if partners else None
            found.append(Measured(kind_of(job), partner, own.worker, rate))
    return found
