"""Requests about the jobs of a cluster: allocations, rounds, simulations, estimates."""

from typing import Self

from pydantic import model_validator

from stagewright.executor.clusters.workload import require_settings
from stagewright.formulations.clusters.allocation_plan import AllocationPlan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount, require_count, require_seed
from stagewright.graphs.workloads.jobs import Throughputs, Workload
from stagewright.graphs.workloads.pool import Pool
from stagewright.service.requests import Request, Search, require_positive

MOST_ROUNDS = 100_000


def _require_pairs(workload: Workload, space_sharing: bool) -> None:
    if space_sharing and not workload.throughputs.pairs:
        raise InputError("space_sharing needs throughputs of pairs, the workload has none")


class AllocateRequest(Search):
    """Divide the accelerators of a pool among jobs; with ``parts`` in so many parts (POP).

    ``backend`` solves the linear programs; ``cvxpy`` solves the policy's program as it is stated.
    ``at_once`` solves the parts on Ray. ``seed`` decides how jobs are dealt to parts.
    """

    workload: Workload
    pool: Pool
    policy: str = "water-filling"
    space_sharing: bool = False
    placement: bool = False
    budget_dollars: float | None = None
    backend: str | None = None
    parts: int | None = None
    at_once: bool = False
    time_limit: float = 60.0

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        _require_pairs(self.workload, self.space_sharing)
        if self.budget_dollars is not None:
            require_amount(self.budget_dollars, "budget_dollars")
        if self.parts is not None and self.budget_dollars is not None:
            raise InputError("budget_dollars is for a policy that is not solved in parts")
        if self.parts is not None and self.backend is not None:
            raise InputError("backend is for a policy that is not solved in parts")
        if self.at_once and self.parts is None:
            raise InputError("at_once is for parts: say how many")
        return self


class RoundsRequest(Search):
    """Realise a policy's allocation, or the given one, in rounds."""

    workload: Workload
    pool: Pool
    policy: str = "water-filling"
    allocation: AllocationPlan | None = None
    rounds: int = 10
    round_seconds: float = 360.0
    space_sharing: bool = False
    placement: bool = False
    budget_dollars: float | None = None
    time_limit: float = 60.0

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        _require_pairs(self.workload, self.space_sharing)
        require_count(self.rounds, "rounds", MOST_ROUNDS)
        require_positive(self.round_seconds, "round_seconds")
        if self.allocation is not None and self.budget_dollars is not None:
            raise InputError("budget_dollars is for a policy; the allocation is given")
        return self


class ArrivalsRequest(Request):
    """Jobs that arrive by a Poisson process, of the models of ``throughputs``."""

    throughputs: Throughputs
    jobs_per_hour: float
    multi_gpu: bool = False
    priorities: bool = False
    slos: bool = False

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        require_positive(self.jobs_per_hour, "jobs_per_hour", "a positive number of jobs per hour")
        return self


class SimulateClusterRequest(Request):
    """Simulate a cluster on the jobs of a workload, or on arrivals without end.

    ``window`` are the numbers [first, end) of the jobs that are measured and end the simulation.
    """

    pool: Pool
    workload: Workload | None = None
    arrivals: ArrivalsRequest | None = None
    window: tuple[int, int] | None = None
    policy: str = "max-min"
    space_sharing: bool = False
    placement: bool = False
    budget_dollars: float | None = None
    round_seconds: float = 360.0
    reset_seconds: float = 1920.0
    ideal: bool = False
    hours_to_failure: float | None = None
    repair_hours: float = 1.0
    seed: int = 0
    keep_assignments: bool = False

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        require_seed(self.seed, "seed")
        if (self.workload is None) == (self.arrivals is None):
            raise InputError("give either a workload or arrivals")
        for name in ("round_seconds", "reset_seconds", "repair_hours"):
            require_positive(getattr(self, name), name)
        if self.hours_to_failure is not None:
            require_positive(
                self.hours_to_failure, "hours_to_failure", "a positive number of hours"
            )
        if self.arrivals is not None and self.window is None:
            raise InputError("arrivals have no end: give a window")
        return self._require_window()

    def _require_window(self) -> Self:
        if self.window is not None:
            first, end = self.window
            if not 0 <= first < end:
                raise InputError(f"window {first}-{end}: the first must come before the end")
            if self.workload is not None and end > len(self.workload.jobs):
                many = len(self.workload.jobs)
                raise InputError(f"window {first}-{end}: there are {many} jobs, numbered from 0")
        return self


class RunClusterRequest(Request):
    """Train the jobs of a workload in rounds on a Ray cluster; see :func:`run_cluster`."""

    workload: Workload
    pool: Pool
    folder: str
    policy: str = "max-min"
    space_sharing: bool = False
    placement: bool = False
    budget_dollars: float | None = None
    round_seconds: float = 360.0
    grace_seconds: float = 60.0
    patience_seconds: float = 600.0
    retries: int = 3
    feedback: float = 0.0
    address: str | None = None

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        if self.retries < 0:
            raise InputError(f"retries must be at least 0, got {self.retries}")
        require_settings(
            self.round_seconds, self.grace_seconds, self.patience_seconds, self.feedback
        )
        return self


class EstimateRequest(Request):
    """Estimate the rates of a workload's new jobs in pairs, from those of reference jobs."""

    reference: Throughputs
    workload: Workload


class MeasureRequest(Request):
    """Choose a part of all pairs in which a new job is to be measured; at least one."""

    reference: Throughputs
    model: str
    scale: int = 1
    fraction: float = 0.2
    seed: int = 0

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        require_seed(self.seed, "seed")
        if not self.model:
            raise InputError("model must not be empty")
        if not 0 < self.fraction <= 1:
            raise InputError(f"fraction must be above 0 and at most 1, got {self.fraction:g}")
        return self
