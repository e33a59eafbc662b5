"""Settings and jobs of a simulated cluster."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from stagewright.formulations.clusters.rates import RateTable, rate_table
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, Kind, Throughputs
from stagewright.graphs.workloads.pool import Pool

MOST_ROUNDS = 1_000_000  # eleven years of rounds of six minutes


@dataclass(frozen=True, slots=True)
class ClusterRules:
    """Settings of a simulated cluster.

    ``round_seconds``: length of a round. ``reset_seconds``: least time between two allocations.
    ``fill``: give accelerators that no share claims to idle jobs; see ``Mechanism``.
    ``shuffle_seed``: fill the types of accelerators in random order, for policies that do not
    distinguish types; the public code draws it from its seed + 5. ``space_sharing``, ``placement``:
    whether jobs may share accelerators, and whether servers count. ``ideal``: no rounds: every job
    receives exactly its share at all times (figure 5.15b).
    """

    round_seconds: float = 360.0
    reset_seconds: float = 1920.0
    fill: bool = True
    shuffle_seed: int | None = None
    space_sharing: bool = False
    placement: bool = False
    ideal: bool = False

    def __post_init__(self) -> None:
        for name in ("round_seconds", "reset_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} must be more than zero, got {value!r}")

    def require_one_more(self, rounds: int) -> None:
        """Refuse a simulation that has no end in sight after this many rounds."""
        if rounds >= MOST_ROUNDS:
            raise InputError(
                f"the jobs need more than {MOST_ROUNDS:,} rounds of {self.round_seconds:g} s: "
                "choose longer rounds"
            )


def table_of(
    throughputs: Throughputs, pool: Pool, rules: ClusterRules, elastic: Iterable[Kind] = ()
) -> RateTable:
    """Rates of every kind that can run in the pool, since jobs are not known in advance.

    ``elastic``: the kinds of jobs that choose among counts.
    """
    known: dict[tuple[str, int], set[str]] = {}
    runs = set()
    counts = {accelerator.name: accelerator.count for accelerator in pool.accelerators}
    for rate in throughputs.alone:
        known.setdefault((rate.model, rate.scale), set()).add(rate.accelerator)
        if rate.steps_per_second > 0 and rate.scale <= counts.get(rate.accelerator, 0):
            runs.add((rate.model, rate.scale))
    kinds: list[Kind] = [
        kind for kind, names in known.items() if kind in runs and names >= set(pool.names)
    ]
    every = [*kinds, *elastic]
    return rate_table(
        throughputs, pool, every, space_sharing=rules.space_sharing, placement=rules.placement
    )


Quota = tuple[float, float, float]
"""Steps per second; steps in a round, and the seconds that they take."""


def quota_of(rate: float, seconds: float) -> Quota:
    """Whole steps within ``seconds``; a step that is longer continues in the next round."""
    most = rate * seconds
    steps = float(int(most)) or most
    return rate, steps, steps / rate if rate else 0.0


@dataclass(slots=True)
class ActiveJob:
    """A job in the cluster.

    ``since_reset`` are steps run since the last allocation, ``restarting`` the seconds until its
    next step on the accelerators that it has.
    """

    number: int
    job: Job
    kind: int
    left: float
    isolated_seconds: float = 0.0
    since_reset: float = 0.0
    restarting: float = 0.0

    def plan(self, quota: Quota, renewed: bool, round_seconds: float) -> tuple[float, float]:
        """Steps in a round, and the seconds of the restart and of them."""
        if not renewed:
            self.restarting = self.job.move_seconds
        waited = min(self.restarting, round_seconds)
        self.restarting -= waited
        if waited == round_seconds:
            return 0.0, waited
        rate, steps, seconds = quota_of(quota[0], round_seconds - waited) if waited else quota
        if steps > self.left:
            steps, seconds = self.left, self.left / rate
        return steps, waited + seconds
