"""Why a job of an allocation has what it has, what would change it, and when jobs are done."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from time import monotonic

import numpy as np

from stagewright.formulations.clusters.allocation import problem_of, throughput
from stagewright.formulations.forms.answers import Deadline, StopToken
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, Workload, counts_of
from stagewright.graphs.workloads.pool import Accelerator, Pool
from stagewright.service.clusters.allocating import solved, with_throughputs
from stagewright.service.clusters.answers import (
    AllocateAnswer,
    ChangeAnswer,
    ChoiceAnswer,
    ComputedRate,
    ForecastAnswer,
    JobAnswer,
    OccupancyAnswer,
)
from stagewright.service.clusters.rates import with_rates
from stagewright.service.clusters.requests import AllocateRequest, SimulateClusterRequest
from stagewright.service.clusters.simulation import simulate_cluster
from stagewright.service.clusters.told import WHOLE, Holdings

_MOST_NAMED = 3  # jobs in a sentence


def with_explanation(
    request: AllocateRequest, answer: AllocateAnswer, stop: StopToken | None
) -> AllocateAnswer:
    """The answer with the forecasts and the explained job that the request asks for.

    What is not simulated within the time limit of the request is left open.
    """
    until = Deadline(monotonic() + request.time_limit, stop)
    notes = answer.notes
    forecasts: tuple[ForecastAnswer, ...] = ()
    try:
        forecasts = tuple(_forecasts(request, answer.prices, until))
    except InputError as error:
        notes = (*notes, f"no forecast: {error}")
    explained = None
    if request.explain is not None:
        own = {one.job: one for one in forecasts}.get(request.explain)
        explained = _explained(request, answer, own, until)
    told = forecasts if request.forecast else None
    return answer.model_copy(update={"forecasts": told, "explained": explained, "notes": notes})


# --- Forecasts -----------------------------------------------------------------------------------


def _forecasts(
    request: AllocateRequest, prices: tuple[ComputedRate, ...], stop: StopToken
) -> Iterator[ForecastAnswer]:
    """The forecast of each job, by the simulation with all rates as they are, lowest, highest."""
    plain = _completions(request, with_rates(request.workload, prices), stop)
    found = [plain]
    for end in ("low", "high") if prices else ():
        rates = [
            one.model_copy(update={"steps_per_second": getattr(one, f"steps_per_second_{end}")})
            for one in prices
        ]
        found.append(_completions(request, with_rates(request.workload, rates), stop))
    for job in request.workload.jobs:
        times = [one[job.name] for one in found]
        known = [time for time in times if time is not None]
        is_known = len(known) == len(times)
        yield ForecastAnswer(
            job=job.name,
            seconds=times[0],
            seconds_low=min(known) if is_known else None,
            seconds_high=max(known) if is_known else None,
            deadline_seconds=job.slo_seconds,
        )


def _completions(
    request: AllocateRequest, workload: Workload, stop: StopToken
) -> dict[str, float | None]:
    """When each job is done in the simulated cluster, if all are there now and no other comes."""
    jobs = tuple(replace(job, arrival_seconds=0.0) for job in workload.jobs)
    names = ("pool", "policy", "space_sharing", "placement", "budget_dollars", "round_seconds")
    asked = SimulateClusterRequest.of(
        workload=replace(workload, jobs=jobs),
        reset_seconds=request.round_seconds,  # as the runtime: a new target when jobs have changed
        **{name: getattr(request, name) for name in names},
    )
    timeline = simulate_cluster(asked, stop=stop).timeline
    return {one.job.name: one.completion_seconds for one in timeline.jobs}


# --- One job -------------------------------------------------------------------------------------


def _explained(
    request: AllocateRequest,
    answer: AllocateAnswer,
    forecast: ForecastAnswer | None,
    stop: StopToken,
) -> JobAnswer:
    job = next(one for one in request.workload.jobs if one.name == request.explain)
    has, number = Holdings(answer), answer.problem.names.index(job.name)
    rate, share = float(has.rates[number]), float(has.shares[number].sum())
    choices = tuple(_choices(has, answer.prices, job, number))
    occupancy = tuple(_occupancy(has, number))
    changes = tuple(_changes(request, answer.prices, job, stop))
    low, high = (
        rate + sum(
            one.share * (end - one.steps_per_second)
            for one in choices
            for end in [getattr(one, f"steps_per_second_{name}")]
            if end is not None
        )
        for name in ("low", "high")
    )  # fmt: skip
    return JobAnswer(
        job=job.name,
        model=job.model,
        share=share,
        steps_per_second=rate,
        steps_per_second_low=low,
        steps_per_second_high=high,
        forecast=forecast,
        why=tuple(_why(share, rate, choices, occupancy, changes)),
        choices=choices,
        occupancy=occupancy,
        changes=changes,
    )


def _choices(
    has: Holdings, prices: tuple[ComputedRate, ...], job: Job, number: int
) -> Iterator[ChoiceAnswer]:
    """What the job has on each worker type that its counts allow."""
    problem, table = has.problem, has.problem.table
    computed = {(one.accelerator, one.count, one.placement): one
                for one in prices if one.model == job.model}  # fmt: skip
    for column, worker in enumerate(table.workers):
        count = int(problem.uses[number, column])
        here = table.pool.accelerators[worker.accelerator]
        if not count:
            continue
        rate = float(problem.rates[number, column])
        price = computed.get((here.name, count, worker.placement or "consolidated"))
        found = {} if price is None else {
            name: getattr(price, name)
            for name in ("steps_per_second_low", "steps_per_second_high", "layout", "reason")
        }  # fmt: skip
        if not rate:
            short = count > here.count
            why = f"it takes {count}, there are {here.count}" if short else "its rate there is 0"
            found["reason"] = found.get("reason") or why
        yield ChoiceAnswer(
            accelerator=here.name,
            count=count,
            placement=worker.placement,
            share=float(has.shares[number, column]),
            steps_per_second=rate,
            **found,
        )


def _occupancy(has: Holdings, number: int) -> Iterator[OccupancyAnswer]:
    """Who has the types of accelerators on which the job runs."""
    for place in has.types_of(number):
        one, held = has.problem.table.pool.accelerators[place], has.of_jobs[:, place]
        mine = np.flatnonzero(held > 1e-9)
        order = [job for job in mine[np.argsort(-held[mine])] if job != number]
        yield OccupancyAnswer(
            accelerator=one.name,
            count=one.count,
            in_use=float(has.in_use[place]),
            others={has.problem.names[job]: float(held[job]) for job in order},
        )


def _why(
    share: float,
    rate: float,
    choices: tuple[ChoiceAnswer, ...],
    occupancy: tuple[OccupancyAnswer, ...],
    changes: tuple[ChangeAnswer, ...],
) -> Iterator[str]:
    """Why the job waits, in sentences; the first change is its being alone."""
    alone = changes[0].steps_per_second
    if rate >= WHOLE * max(one.steps_per_second for one in choices):
        yield "it runs all the time, as fast as it does on any of these accelerators"
    else:
        part = "" if not alone else f", {rate / alone:.1%} of what it has alone in the cluster"
        slower = ", but not always where it is fastest" if share >= WHOLE else ""
        yield f"it runs {share:.1%} of the time{slower}, at {rate:.4g} steps/s{part}"
        yield from map(_taken, occupancy)
    for one in choices:
        if not one.steps_per_second:
            yield f"it does not run on {one.count} {one.accelerator}: {one.reason}"


def _taken(one: OccupancyAnswer) -> str:
    """Whether accelerators of a type are left, and who has most of them."""
    left = one.count - one.in_use
    state = f"all {one.count} {one.accelerator} are in use"
    if one.in_use < WHOLE * one.count:
        state = f"{left:.3g} of {one.count} {one.accelerator} are left idle by the policy"
    named = [f"{name} ({many:.3g})" for name, many in [*one.others.items()][:_MOST_NAMED]]
    more = len(one.others) - len(named)
    named += [f"{more} more"] if more else []
    return f"{state}; other jobs have {', '.join(named)}" if named else state


# --- What would change it ------------------------------------------------------------------------


def _changes(
    request: AllocateRequest, prices: tuple[ComputedRate, ...], job: Job, stop: StopToken
) -> Iterator[ChangeAnswer]:
    """What the policy gives the job after each change; those that it refuses are left out."""
    whole = request.model_copy(update={"workload": with_rates(request.workload, prices)})
    alone = replace(whole.workload, jobs=(job,))
    yield from _changed("alone in the cluster", whole, alone, job, stop)
    with suppress(InputError):  # weights too far apart
        heavier = replace(job, weight=2 * job.weight)
        yield from _changed("twice its weight", whole, _with(whole.workload, heavier), job, stop)
    for one in request.pool.accelerators:
        more = one.per_server or 1
        larger = _enlarged(request.pool, one, more)
        open_ = _without(request, prices, one)
        asked = request.model_copy(update={"pool": larger})
        yield from _changed(f"{more} more {one.name}", asked, open_, job, stop)
    for count in _other_counts(request, job):
        known = replace(whole.workload, trainings=request.workload.trainings)
        if job.counts:
            what, other = f"{count} too", replace(job, counts=tuple(sorted({*job.counts, count})))
        else:
            what, other = f"{count} in place of {job.scale}", replace(job, scale=count)
        yield from _changed(f"on {what}", request, _with(known, other), job, stop)


def _changed(
    change: str, request: AllocateRequest, workload: Workload, job: Job, stop: StopToken
) -> Iterator[ChangeAnswer]:
    with suppress(InputError):  # a policy need not take the changed jobs
        asked, _ = with_throughputs(request.model_copy(update={"workload": workload}), stop=stop)
        problem = problem_of(asked.workload, asked.pool, space_sharing=asked.space_sharing,
                             placement=asked.placement)  # fmt: skip
        allocation = solved(asked, problem, stop).allocation
        if allocation is None:
            return
        rate = throughput(problem, allocation)[problem.names.index(job.name)]
        seconds = None
        with suppress(InputError):
            seconds = _completions(asked, asked.workload, stop)[job.name]
        yield ChangeAnswer(change=change, steps_per_second=float(rate), completion_seconds=seconds)


def _with(workload: Workload, job: Job) -> Workload:
    """The workload with the job in place of that of its name."""
    return replace(
        workload, jobs=tuple(job if one.name == job.name else one for one in workload.jobs)
    )


def _enlarged(pool: Pool, one: Accelerator, more: int) -> Pool:
    larger = replace(one, count=one.count + more)
    return replace(
        pool, accelerators=tuple(larger if it == one else it for it in pool.accelerators)
    )


def _without(
    request: AllocateRequest, prices: Iterable[ComputedRate], one: Accelerator
) -> Workload:
    """The workload without the computed rates that depend on how many of a type there are."""
    kept = [
        price
        for price in prices
        if price.accelerator != one.name or (price.count <= one.count and not request.placement)
    ]
    return replace(with_rates(request.workload, kept), trainings=request.workload.trainings)


def _other_counts(request: AllocateRequest, job: Job) -> list[int]:
    """Numbers of accelerators on which a step is the same work, and of which the rates are known.

    Of a training half and twice as many as it may have now; else those of the throughputs.
    """
    now, most = counts_of(job.kind), max(one.count for one in request.pool.accelerators)
    found: set[int] = set()
    if any(one.model == job.model for one in request.workload.trainings):
        found = {min(now) // 2, 2 * max(now)}
    elif job.counts:
        found = {one.scale for one in request.workload.throughputs.alone if one.model == job.model}
    return sorted(count for count in found if 0 < count <= most and count not in now)
