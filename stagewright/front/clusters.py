"""Jobs on clusters and in the cloud, for users of Python."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, overload

from stagewright.formulations.forms.answers import StopToken
from stagewright.front import fields_of
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.executor.clusters.leases import Lease
    from stagewright.formulations.clusters.allocation_plan import AllocationPlan
    from stagewright.graphs.workloads.jobs import Throughputs, Workload
    from stagewright.graphs.workloads.pool import Pool
    from stagewright.graphs.workloads.prices import Market
    from stagewright.service.cloud.requests import CloudAnswer
    from stagewright.service.clusters.answers import (
        AllocateAnswer,
        EstimateAnswer,
        MeasureAnswer,
        PriceJobsAnswer,
        RoundsAnswer,
        RunClusterAnswer,
        SimulateClusterAnswer,
    )
    from stagewright.service.clusters.requests import ArrivalsRequest
    from stagewright.solvers.clusters.policies import AllocationResult


def allocate(
    workload: "Workload",
    pool: "Pool",
    policy: str = "water-filling",
    *,
    space_sharing: bool = False,
    placement: bool = False,
    budget_dollars: float | None = None,
    parts: int | None = None,
    at_once: bool = False,
    time_limit: float = 60.0,
    seed: int = 0,
    backend: str | None = None,
) -> "AllocationResult":
    """Divide the accelerators of ``pool`` among the jobs of ``workload``.

    Parameters
    ----------
    workload, pool
        See :func:`load_workload` and :func:`parse_pool`.
    policy
        One that ``stagewright policies`` lists. With the default no job can be raised without
        lowering another; ``max-min`` is faster and may leave accelerators idle.
    space_sharing
        Two jobs may run on the same accelerators at once.
    placement
        Jobs on several accelerators may have one server's, or any, at different rates.
    budget_dollars
        For the policy ``makespan-budget``.
    parts
        For very many jobs, with ``max-min`` and ``makespan``: split jobs and accelerators into
        this many parts and solve each; the gap bounds the loss. ``seed`` assigns jobs to parts.
    at_once
        Solve the parts in parallel, on Ray.
    time_limit
        Seconds, of each part.
    backend
        Solver of the linear programs, such as ``pulp-cbc``; ``cvxpy`` solves the policy's program
        as the thesis states it, with duals, for small clusters.

    Returns
    -------
    AllocationResult
        Status, allocation, objective, proved bound and gap. Infeasible is an answer.

    Raises
    ------
    InputError
        If a throughput is missing, a job fits nowhere, or the policy lacks what it needs.
    """
    fields = fields_of(locals())
    from stagewright.service.clusters.allocating import allocate as answer
    from stagewright.service.clusters.requests import AllocateRequest

    return answer(AllocateRequest.of(**fields)).result


def forecast_jobs(
    workload: "Workload",
    pool: "Pool",
    policy: str = "water-filling",
    *,
    explain: str | None = None,
    stop: StopToken | None = None,
    **options: Any,
) -> "AllocateAnswer":
    """Allocate as :func:`allocate`, and say when jobs are done, and why one has what it has.

    Parameters
    ----------
    workload, pool, policy
        As of :func:`allocate`.
    explain
        The name of a job: ``explained`` of the answer says what keeps it, and what more
        accelerators of each type, twice its weight, or other numbers of them would bring it.
    stop
        Once it is set, simulations end; what they leave open is None.
    options
        The other fields of :class:`~stagewright.service.clusters.requests.AllocateRequest`, such
        as ``round_seconds``.

    Returns
    -------
    AllocateAnswer
        ``forecasts`` has the seconds from now until each job is done if no other comes.
    """
    from stagewright.service.clusters.allocating import allocate as answer
    from stagewright.service.clusters.requests import AllocateRequest

    request = AllocateRequest.of(
        workload=workload, pool=pool, policy=policy, explain=explain, forecast=True, **options
    )
    return answer(request, stop=stop)


def price_jobs(
    workload: "Workload", pool: "Pool", *, stop: StopToken | None = None, **options: Any
) -> "PriceJobsAnswer":
    """Compute the throughputs of the workload's trainings, as :func:`train_plan` has them.

    The answer's ``workload`` has all throughputs, ``prices`` are the computed ones with ranges,
    bounds and layouts. :func:`allocate`, :func:`rounds` and :func:`simulate_cluster` compute them
    by themselves. ``options`` are the other fields of
    :class:`~stagewright.service.clusters.requests.PriceJobsRequest`, such as ``placement`` and
    ``network_bandwidth``.

    Raises
    ------
    InputError
        If a configuration or a kind is not known, a job fits nowhere, or ``stop`` was set.
    """
    from stagewright.service.clusters.pricing import price_jobs as answer
    from stagewright.service.clusters.requests import PriceJobsRequest

    return answer(PriceJobsRequest.of(workload=workload, pool=pool, **options), stop=stop)


def rounds(
    workload: "Workload",
    pool: "Pool",
    policy: str = "water-filling",
    *,
    allocation: "AllocationPlan | None" = None,
    **options: Any,
) -> "RoundsAnswer | AllocateAnswer":
    """Realise a policy's allocation, or the given one, in rounds.

    ``options`` are the other fields of
    :class:`~stagewright.service.clusters.requests.RoundsRequest`, such as ``rounds``,
    ``round_seconds``, ``time_limit``, and ``to``: then ``launch`` of the answer has the launch
    files of the first round. Without an allocation the answer is the policy's.
    """
    from stagewright.service.clusters.requests import RoundsRequest
    from stagewright.service.clusters.rounds import rounds as answer

    request = RoundsRequest.of(
        workload=workload, pool=pool, policy=policy, allocation=allocation, **options
    )
    return answer(request)


def simulate_cluster(
    pool: "Pool",
    jobs: "Workload | ArrivalsRequest",
    policy: str = "max-min",
    *,
    stop: StopToken | None = None,
    **options: Any,
) -> "SimulateClusterAnswer":
    """Simulate a cluster on a workload, or on an endless stream of jobs.

    ``options`` are the other fields of
    :class:`~stagewright.service.clusters.requests.SimulateClusterRequest`, such as
    ``round_seconds`` and ``window``. The answer's ``timeline`` is the full record. ``stop`` ends
    the simulation after the current round once it is set (see :func:`stagewright.plan`); the answer
    has the statistics so far and the status ``interrupted``.
    """
    from stagewright.service.clusters.requests import ArrivalsRequest, SimulateClusterRequest
    from stagewright.service.clusters.simulation import simulate_cluster as answer

    source = "arrivals" if isinstance(jobs, ArrivalsRequest) else "workload"
    request = SimulateClusterRequest.of(pool=pool, policy=policy, **{source: jobs}, **options)
    return answer(request, stop=stop)


def run_cluster(
    workload: "Workload",
    pool: "Pool",
    programs: "Mapping[str, Callable[[Lease], object]]",
    folder: str | os.PathLike[str],
    policy: str = "max-min",
    *,
    stop: StopToken | None = None,
    **options: Any,
) -> "RunClusterAnswer":
    """Train the jobs of ``workload`` in rounds on a Ray cluster.

    Parameters
    ----------
    programs
        The program of each model: a function of a lease
        (:class:`~stagewright.executor.clusters.leases.LeaseIterator`).
    folder
        Folder of checkpoints and of the job store, shared by all nodes. Jobs that it already
        contains continue from their checkpoints.
    stop
        Once it is set (see :func:`stagewright.plan`), all jobs save checkpoints and end; the status
        is ``interrupted``.
    options
        The other fields of :class:`~stagewright.service.clusters.requests.RunClusterRequest`, such
        as ``round_seconds`` and ``address``.
    """
    from stagewright.service.clusters.requests import RunClusterRequest
    from stagewright.service.clusters.running import run_cluster as answer

    request = RunClusterRequest.of(
        workload=workload, pool=pool, folder=os.fspath(folder), policy=policy, **options
    )
    return answer(request, programs, stop)


@overload
def estimate(reference: "Throughputs", workload: "Workload") -> "EstimateAnswer": ...
@overload
def estimate(
    reference: "Throughputs", *, choose: str, scale: int = 1, fraction: float = 0.2, seed: int = 0
) -> "MeasureAnswer": ...
def estimate(
    reference: "Throughputs",
    workload: "Workload | None" = None,
    *,
    choose: str | None = None,
    scale: int = 1,
    fraction: float = 0.2,
    seed: int = 0,
) -> "EstimateAnswer | MeasureAnswer":
    """Estimate rates of new jobs that share accelerators, or choose the pairs to measure.

    Parameters
    ----------
    reference
        The rates of jobs that are measured alone and in pairs.
    workload
        Its new jobs have their rates alone and in some pairs. The answer's ``workload`` has all
        rates.
    choose
        Instead of a workload, a new model: the answer's ``pairs`` are to be measured.
    scale, fraction, seed
        With ``choose``: accelerators of the job, the fraction of all pairs, and of the draw.
    """
    from stagewright.service.clusters.allocating import estimate as answer
    from stagewright.service.clusters.allocating import measure
    from stagewright.service.clusters.requests import EstimateRequest, MeasureRequest

    if (workload is None) == (choose is None):
        raise InputError("give either a workload or choose, the model to measure")
    if workload is not None:
        return answer(EstimateRequest.of(reference=reference, workload=workload))
    request = MeasureRequest.of(
        reference=reference, model=choose, scale=scale, fraction=fraction, seed=seed
    )
    return measure(request)


def cloud(
    market: "Market", rates: Mapping[str, float], *, stop: StopToken | None = None, **options: Any
) -> "CloudAnswer":
    """Compare strategies of renting cloud GPUs for a job, and plan its instances over time.

    Parameters
    ----------
    market
        See :func:`load_market`.
    rates
        Work per hour of each kind of GPU, relative to a V100.
    stop
        Once it is set (see :func:`stagewright.plan`), the answer has the strategies so far, and the
        status ``interrupted``.
    options
        The other fields of :class:`~stagewright.service.cloud.requests.CloudRequest`, such as
        ``v100_hours`` and ``strategy``.
    """
    from stagewright.service.cloud.renting import cloud as answer
    from stagewright.service.cloud.requests import CloudRequest

    return answer(CloudRequest.of(market=market, rates=dict(rates), **options), stop)
