"""Simulated clusters: a workload, or jobs that arrive without end, under a policy."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from stagewright.executor.clusters.rates import RatePlace, outages
from stagewright.executor.clusters.simulation import ClusterState
from stagewright.executor.clusters.simulation import simulate_cluster as simulate
from stagewright.executor.clusters.timeline import MOST_ROUNDS, ClusterRules, ClusterTimeline
from stagewright.formulations.clusters.allocation import problem_of
from stagewright.formulations.forms.answers import Progress, Status, StopToken, silent
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Entity, Job, Throughputs, Workload
from stagewright.graphs.workloads.poisson import LOADS, Arrivals
from stagewright.graphs.workloads.prices import HOUR
from stagewright.service.clusters.allocating import (
    policy_allocator,
    require_trainings,
    with_throughputs,
)
from stagewright.service.clusters.answers import (
    ComputedRate,
    DrawnRateAnswer,
    RunAnswer,
    SimulateClusterAnswer,
)
from stagewright.service.clusters.rates import computed_rates, with_rates
from stagewright.service.clusters.requests import ArrivalsRequest, SimulateClusterRequest
from stagewright.solvers.clusters.policies import policy_named, require_policy

_MOST_ARRIVALS = 10_000  # that are looked at before a simulation
_SHUFFLE = 5  # the public code of Gavel shuffles by its seed + 5


def simulate_cluster(
    request: SimulateClusterRequest,
    on_progress: Callable[[ClusterState | Progress], None] | None = None,
    stop: StopToken | None = None,
) -> SimulateClusterAnswer:
    """Run the jobs under the policy, round by round; ``stop`` ends it after the current round.

    Raises
    ------
    InputError
        If a job has no throughput, the policy has no allocation, or nothing can run any more.
    """
    request, priced = with_throughputs(request, on_progress or silent, stop)
    _require_simulable(request)
    rules = _rules(request)
    jobs, table, entities = _jobs(request)
    predicted, true = None, list[ComputedRate]()
    if request.drawn_rates and request.workload is not None:
        predicted, true = table, _true_rates(table, request.seed)
        table = with_rates(request.workload, true).throughputs
    failures: Iterable[Any] = ()
    if request.hours_to_failure is not None:
        mean, repair = request.hours_to_failure * HOUR, request.repair_hours * HOUR
        failures = outages(request.pool, mean, repair, request.seed)
    window = None if request.window is None else range(*request.window)
    found = simulate(
        jobs,
        table,
        request.pool,
        policy_allocator(request.policy, request.budget_dollars),
        rules,
        window=window,
        entities=entities,
        failures=failures,
        predicted=predicted,
        keep_assignments=request.keep_assignments,
        on_progress=on_progress,
        stop=stop,
    )
    assumed = () if priced is None else priced.assumed
    if request.arrivals is not None and request.arrivals.load is not None:
        load = LOADS[request.arrivals.load]
        assumed += (f"load of {load.source}", f"load: {load.assumed}; arrivals are Poisson")
    drawn = () if predicted is None else tuple(_drawn(predicted, true, found.corrected))
    return _answer(request.policy, found, window, request.keep_assignments, assumed, drawn)


def require_simulable(request: SimulateClusterRequest) -> None:
    """Refuse jobs that the policy, or the cluster, has no place for; trainings before a search.

    Of arrivals without end the first are looked at, to the end of the window.

    Raises
    ------
    InputError
        If a job has no throughput or takes too many rounds, or the policy lacks what it needs.
    """
    if not require_trainings(request):
        _require_simulable(request)


def _require_simulable(request: SimulateClusterRequest) -> None:
    jobs, table, entities = _jobs(request)
    last = None if request.window is None else min(request.window[1], _MOST_ARRIVALS)
    workload = Workload(tuple(islice(jobs, last)), table, entities)
    sharing, placement = request.space_sharing, request.placement
    problem = problem_of(workload, request.pool, space_sharing=sharing, placement=placement)
    require_policy(problem, request.policy, request.budget_dollars)
    if not request.ideal:
        fastest = problem.table.alone.max(axis=1)[problem.kind]
        rounds = float((problem.steps / fastest).max()) / request.round_seconds
        _rules(request).require_one_more(int(min(rounds, MOST_ROUNDS)))


def _true_rates(predicted: Throughputs, seed: int) -> list[ComputedRate]:
    """The computed rates as they are in truth, each drawn evenly from its range."""
    draw = random.Random(seed)
    found = list(computed_rates(predicted))
    if not found:
        raise InputError("drawn_rates: no throughput of the workload is computed, and has a range")
    for number, one in enumerate(found):
        rate = draw.uniform(one.steps_per_second_low, one.steps_per_second_high)
        found[number] = one.model_copy(update={"steps_per_second": rate})
    return found


def _drawn(
    predicted: Throughputs, true: Iterable[ComputedRate], corrected: Collection[RatePlace]
) -> Iterator[DrawnRateAnswer]:
    """The rates that were drawn, and which of them the policy has learned."""
    for one, drawn in zip(computed_rates(predicted), true, strict=True):
        yield DrawnRateAnswer.of(
            drawn,
            predicted_steps_per_second=one.steps_per_second,
            measured=(one.model, one.accelerator, one.count, one.placement) in corrected,
        )


def _rules(request: SimulateClusterRequest) -> ClusterRules:
    policy = policy_named(request.policy)
    return ClusterRules(
        request.round_seconds,
        request.reset_seconds,
        fill=policy.fills,
        shuffle_seed=None if policy.aware else request.seed + _SHUFFLE,
        space_sharing=request.space_sharing,
        placement=request.placement,
        ideal=request.ideal,
    )


def _jobs(request: SimulateClusterRequest) -> tuple[Iterable[Job], Throughputs, tuple[Entity, ...]]:
    given, coming = request.workload, request.arrivals
    if given is not None:
        return given.jobs, given.throughputs, given.entities
    if coming is None:
        raise InputError("give either a workload or arrivals")
    return _arrivals(coming, request.seed), coming.throughputs, ()


def _arrivals(coming: ArrivalsRequest, seed: int) -> Arrivals:
    return Arrivals(
        coming.throughputs,
        HOUR / coming.jobs_per_hour,
        seed,
        distributed=coming.multi_gpu,
        priorities=coming.priorities,
        slos=coming.slos,
        load=coming.load,
    )


def _answer(
    policy: str,
    found: ClusterTimeline,
    window: range | None,
    keeps: bool,
    assumed: tuple[str, ...],
    drawn: tuple[DrawnRateAnswer, ...],
) -> SimulateClusterAnswer:
    durations, fairness = found.durations(window), found.fairness(window)
    weights = sorted({outcome.job.weight for outcome in found.jobs})
    deviations = [one.mean_deviation for one in found.resets]
    return SimulateClusterAnswer.of(
        found,
        status=Status.INTERRUPTED if found.interrupted else "done",
        policy=policy,
        jobs=len(found.jobs),
        completed=sum(outcome.completion_seconds is not None for outcome in found.jobs),
        measured=len(durations),
        mean_jct_seconds=float(durations.mean()) if durations.size else None,
        percentile_jct_seconds={
            str(share): float(np.percentile(durations, share)) if durations.size else None
            for share in (50, 90, 99)
        },
        mean_jct_seconds_by_weight={
            f"{weight:g}": found.mean_jct_seconds(window, weight) for weight in weights
        },
        mean_finish_time_fairness=float(fairness.mean()) if fairness.size else None,
        worst_finish_time_fairness=float(fairness.max()) if fairness.size else None,
        lease_renewals=found.renewal_rate,
        rounds=len(found.rounds),
        allocations=len(found.resets),
        mean_deviation=float(np.mean(deviations)) if deviations else None,
        assumed=assumed,
        drawn=drawn,
        runs=_runs(found) if keeps else None,
        timeline=found,
    )


def _runs(found: ClusterTimeline) -> tuple[RunAnswer, ...]:
    from stagewright.executor.drawing.charts.cluster import spans

    places = [
        (accelerator.name, number)
        for accelerator in found.pool.accelerators
        for number in range(accelerator.count)
    ]
    return tuple(
        RunAnswer(
            jobs=tuple(found.jobs[job].job.name for job in jobs),
            accelerator=places[row][0],
            number=places[row][1],
            start_seconds=start,
            end_seconds=end,
        )
        for row, start, end, jobs in spans(found)
    )
