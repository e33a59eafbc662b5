"""Requests about the jobs of a cluster: allocations, rounds, simulations, estimates."""

import re
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Self, get_args

from pydantic import Field, model_validator

from stagewright.executor.clusters.rates import require_settings
from stagewright.formulations.clusters.allocation_plan import AllocationPlan, load_allocation
from stagewright.formulations.clusters.round_document import ClusterRound, Launcher
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.documents.units import (
    parse_bandwidth,
    require_amount,
    require_count,
    require_seed,
)
from stagewright.graphs.workloads.jobs import Throughputs, Workload, load_workload
from stagewright.graphs.workloads.poisson import LOADS
from stagewright.graphs.workloads.pool import Pool, read_pool
from stagewright.service.options import Option
from stagewright.service.requests import Request, SearchRequest, require_positive

MOST_ROUNDS = 100_000


def _reference(path: str) -> Throughputs:
    from stagewright.graphs.importers.gavel import read_reference  # with every importer

    return read_reference(path)


def _first_end(text: str, option: str) -> tuple[int, int]:
    """The two numbers of a text such as ``4000-5000``."""
    first, _, end = text.partition("-")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise InputError(f"{option} {text!r} is no FIRST-END, for example 4000-5000")
    return int(first), int(end)


def _shape(pool: Pool) -> list[tuple[object, ...]]:
    """What numbers accelerators: types, and how many there are on a server."""
    return [(one.name, one.count, one.per_server) for one in pool.accelerators]


def _require_pairs(workload: Workload, space_sharing: bool) -> None:
    if space_sharing and not workload.throughputs.pairs:
        raise InputError("space_sharing needs throughputs of pairs, the workload has none")


def _bandwidths(text: str, option: str) -> float | dict[str, float]:
    """Bytes per second, or by the name of an accelerator, of a text such as ``k80=10GB/s``."""
    if "=" not in text:
        return parse_bandwidth(text, option)
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, rate = (one.strip() for one in part.partition("="))
        if name in found:
            raise InputError(f"{option}: {name} is given twice; give it once")
        found[name] = parse_bandwidth(rate, option)
    return found


def _nodes(text: str, option: str) -> dict[str, tuple[str, ...]]:
    """The nodes of each kind of a text such as ``h100=gpu[01-02],a100=old1,old2``."""
    from stagewright.graphs.importers.machine_lists import host_names  # with its readers

    found: dict[str, tuple[str, ...]] = {}
    for part in re.split(r",(?=[^,\[\]]+=)", text):
        kind, equals, names = part.partition("=")
        if not equals or not names:
            raise InputError(f"{option} {part!r}: write KIND=NAMES, for example h100=gpu[01-16]")
        with naming(option):
            found[kind] = (*found.get(kind, ()), *host_names(names))
    return found


Bandwidth = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bandwidths = Annotated[Bandwidth | dict[str, Bandwidth] | None, Option(of_text=_bandwidths)]
"""Bytes per second of all accelerators, or by name."""


JobsFile = Annotated[Workload, Option("--jobs", form="FILE", of_file=load_workload)]
Accelerators = Annotated[
    Pool, Option("--cluster", form="FILE|NAME=COUNT,...", of_text=read_pool, may_be_file=True)
]


class PriceJobsRequest(Request):
    """Compute the throughputs of a workload's trainings on the accelerators of a pool."""

    workload: JobsFile
    """Jobs file with trainings."""
    pool: Accelerators
    """Accelerators as v100=36,p100=9x4 (9 servers of 4), by the names of kinds, or a file."""
    placement: Annotated[bool, Option("--placement-sensitive")] = False
    """Rates on accelerators of several servers too."""
    server_bandwidth: Bandwidths = None
    """From an accelerator to the others of its server, as reached, or by name: k80=10GB/s; default:
    as train-plan."""
    network_bandwidth: Bandwidths = None
    """From an accelerator out of its server while all send, or by name: k80=1GB/s; default: as
    train-plan."""
    store_bandwidth: Annotated[Bandwidth, Option(form="SIZE/s", of_text=parse_bandwidth)] = 1e10
    """From a job to the store of checkpoints, or back."""
    time_limit: float = 10.0
    """Time limit of each search in seconds."""

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        require_positive(self.time_limit, "time_limit")
        for field in ("server_bandwidth", "network_bandwidth"):
            given = getattr(self, field)
            for name in given if isinstance(given, dict) else ():
                if name not in self.pool.names:
                    known = ", ".join(self.pool.names)
                    raise InputError(f"{field}: {name!r} is none of the cluster's: {known}")
        return self

    def links(self, accelerator: str) -> dict[str, float | None]:
        """The bandwidths that are given for an accelerator, by field."""
        return {
            field: given.get(accelerator) if isinstance(given, dict) else given
            for field, given in (
                ("server_bandwidth", self.server_bandwidth),
                ("network_bandwidth", self.network_bandwidth),
            )
        }


class _PolicyRequest(Request):
    """A policy that divides the accelerators of a pool."""

    pool: Accelerators
    """Accelerators as v100=36,p100=9x4@1.46 (9 servers of 4 at $1.46 an hour), or a file."""
    policy: str = "max-min"
    """One of those that `stagewright policies` lists."""
    space_sharing: bool = False
    """Two jobs may run on the same accelerators."""
    placement: Annotated[bool, Option("--placement-sensitive")] = False
    """Distinguish accelerators of one server from those of several."""
    budget_dollars: Annotated[float | None, Option("--budget", form="DOLLARS")] = None
    """Dollars, for makespan-budget."""


class _JobsPolicyRequest(_PolicyRequest):
    """A policy that divides the accelerators of a pool among the jobs of a workload."""

    workload: JobsFile
    """Jobs file."""


class AllocateRequest(_JobsPolicyRequest, SearchRequest):
    """Divide the accelerators of a pool among jobs; with ``parts`` in so many parts (POP)."""

    policy: str = "water-filling"
    """One of those that `stagewright policies` lists."""
    backend: Annotated[str | None, Option(form="NAME")] = None
    """Solver of the linear programs, e.g. pulp-cbc; cvxpy: the thesis's program."""
    parts: Annotated[int | None, Option(form="N")] = None
    """max-min, makespan: split jobs and accelerators into N parts and solve each; the gap bounds
    the loss."""
    at_once: bool = False
    """Solve the parts in parallel, on Ray."""
    time_limit: float = 60.0
    """Time limit of the search in seconds."""
    seed: int = 0
    """Decides which job is in which part."""
    explain: Annotated[str | None, Option(form="JOB")] = None
    """Say why a job has what it has, and what more accelerators, another number or weight bring."""
    forecast: bool = False
    """Say when each job is done if no other comes, with the range of computed throughputs."""
    round_seconds: float = 360.0
    """Of forecasts: length of a round."""

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        _require_pairs(self.workload, self.space_sharing)
        require_positive(self.round_seconds, "round_seconds")
        self._require_explainable()
        if self.budget_dollars is not None:
            require_amount(self.budget_dollars, "budget_dollars")
        if self.parts is not None and self.budget_dollars is not None:
            raise InputError("budget_dollars is for a policy that is not solved in parts")
        if self.parts is not None and self.backend is not None:
            raise InputError("backend is for a policy that is not solved in parts")
        if self.at_once and self.parts is None:
            raise InputError("at_once is for parts: say how many")
        return self

    def _require_explainable(self) -> None:
        names = [job.name for job in self.workload.jobs]
        if self.explain is not None and self.explain not in names:
            near = get_close_matches(self.explain, names, 1) or names[:1]
            raise InputError(f"explain: no job is named {self.explain!r}; there is {near[0]!r}")
        if self.parts is not None and (self.forecast or self.explain is not None):
            raise InputError("explain and forecast are for a policy that is not solved in parts")


class RoundsRequest(_JobsPolicyRequest, SearchRequest):
    """Realise a policy's allocation, or the given one, in rounds."""

    policy: str = "water-filling"
    """One of those that `stagewright policies` lists."""
    allocation: Annotated[AllocationPlan | None, Option(form="FILE", of_file=load_allocation)] = (
        None
    )
    """Realise this allocation file instead of a policy's."""
    rounds: int = 10
    """How many rounds."""
    round_seconds: float = 360.0
    """Length of a round."""
    time_limit: float = 60.0
    """Time limit of the search in seconds."""
    to: Annotated[Launcher | None, Option(form="FORMAT", known=get_args(Launcher))] = None
    """Launch files of the first round: slurm, kueue, torchrun."""
    after: Annotated[
        ClusterRound | None, Option(form="FILE", of_file=partial(documents.read, ClusterRound))
    ] = None
    """The round.json of the round that runs now: jobs stay where they can, shares go on."""
    nodes: Annotated[
        dict[str, tuple[str, ...]] | None, Option(form="KIND=NAMES,...", of_text=_nodes)
    ] = None
    """Names of the servers of each type, such as h100=gpu[01-02],a100=old1,old2; by default Slurm
    and Kubernetes choose them."""
    queue: Annotated[str | None, Option(form="NAME")] = None
    """kueue: local queue of the JobSets."""
    node_label: Annotated[str | None, Option(form="KEY")] = None
    """kueue: label of nodes that has the type of accelerator; default: accelerator."""
    image: str | None = None
    """kueue: container image."""
    cpus: Annotated[int | None, Option(form="N")] = None
    """slurm: CPUs of every process."""
    time: Annotated[str | None, Option(form="TIME")] = None
    """slurm: a job's most time, for example 4:00:00; default: the round, which round.sh extends for
    jobs that stay, as an operator of Slurm may."""

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        _require_pairs(self.workload, self.space_sharing)
        require_count(self.rounds, "rounds", MOST_ROUNDS)
        require_positive(self.round_seconds, "round_seconds")
        if self.allocation is not None and self.budget_dollars is not None:
            raise InputError("budget_dollars is for a policy; the allocation is given")
        if self.after is not None and _shape(self.after.pool) != _shape(self.pool):
            raise InputError("after: that round is of another cluster")
        if self.to is not None:
            from stagewright.service.clusters.launching import require_launchable  # with formats

            require_launchable(self)
            return self
        for name in ("nodes", "queue", "node_label", "image", "cpus", "time"):
            if getattr(self, name) is not None:
                raise InputError(f"{name} is of launch files: say of which with to")
        return self


class ArrivalsRequest(Request):
    """Jobs that arrive by a Poisson process, of the models of ``throughputs``."""

    throughputs: Throughputs
    jobs_per_hour: Annotated[float, Option("--poisson", form="JOBS_PER_HOUR")]
    """Generate jobs at this rate."""
    load: Annotated[str | None, Option(form="NAME", known=tuple(LOADS))] = None
    """With arrivals: durations and sizes as published of a cluster or an evaluation: philly,
    helios, sia, shockwave; default: Gavel's."""
    multi_gpu: bool = False
    """With arrivals: jobs on 1, 2, 4 or 8 accelerators."""
    priorities: bool = False
    """With arrivals: a fifth of the jobs have weight 5."""
    slos: bool = False
    """With arrivals: SLOs of 1.2, 2 or 10 times the duration."""

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        require_positive(self.jobs_per_hour, "jobs_per_hour", "a positive number of jobs per hour")
        return self


class SimulateClusterRequest(_PolicyRequest):
    """Simulate a cluster on the jobs of a workload, or on arrivals without end."""

    workload: Workload | None = None
    arrivals: ArrivalsRequest | None = None
    window: Annotated[tuple[int, int] | None, Option(form="FIRST-END", of_text=_first_end)] = None
    """Measure these jobs, numbered by arrival, until they are complete, [first, end); default:
    4000-5000 of arrivals, else all."""
    round_seconds: float = 360.0
    """Length of a round."""
    reset_seconds: float = 1920.0
    """Least time between two allocations."""
    ideal: bool = False
    """No rounds: every job receives exactly its share."""
    hours_to_failure: float | None = None
    """Mean hours until an accelerator fails."""
    repair_hours: float = 1.0
    """Hours that a repair takes."""
    seed: int = 0
    """Seed of all random choices."""
    drawn_rates: bool = False
    """True rates are drawn from the ranges of computed ones; the policy learns each when a job has
    run at it."""
    keep_assignments: bool = False
    """Whether the answer has the assignments of every round."""

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        require_seed(self.seed, "seed")
        if self.drawn_rates and (self.ideal or self.workload is None):
            raise InputError("drawn_rates are of a workload in rounds, not ideal or of arrivals")
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


class RunClusterRequest(_JobsPolicyRequest):
    """Train the jobs of a workload in rounds on a Ray cluster; see :func:`run_cluster`."""

    folder: str
    """Checkpoints and the job store, shared by all nodes; a stopped run continues from it."""
    round_seconds: float = 360.0
    """Length of a round; several steps of every job should fit."""
    grace_seconds: float = 60.0
    """How long a process may exceed its lease before it is killed."""
    patience_seconds: float = 600.0
    """How long to wait for accelerators when no job can run."""
    retries: int = 3
    """How often a job may fail between two checkpoints."""
    feedback: float = 0.0
    """Weight of measured rates against those of the jobs file, 0 to 1."""
    address: str | None = None
    """Address of a Ray cluster; default: Ray is started on this machine."""

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

    reference: Annotated[Throughputs, Option(form="FILE", of_file=_reference)]
    """Jobs file whose jobs are measured alone and in pairs, or Gavel's table of throughputs."""
    model: Annotated[str, Option("--choose", form="MODEL")]
    """Choose the pairs in which to measure a new model."""
    scale: Annotated[int, Option(form="N")] = 1
    """Of a chosen model: accelerators of the job."""
    fraction: float = 0.2
    """Of a chosen model: fraction of all pairs to measure."""
    seed: int = 0
    """Seed of all random choices."""

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        require_seed(self.seed, "seed")
        if not self.model:
            raise InputError("model must not be empty")
        if not 0 < self.fraction <= 1:
            raise InputError(f"fraction must be above 0 and at most 1, got {self.fraction:g}")
        return self
