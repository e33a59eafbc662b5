"""First in, first out; see ``formulations.policies.fifo``."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.formulations.clusters.policies import fifo
from stagewright.formulations.clusters.polytope import Polytope, group_by, polytope
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.models import weak_duality_bound
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.solvers.backends.backend import solve as solve_form
from stagewright.solvers.clusters.answer import AllocationResult

TOLERANCE = 1e-9  # relative distance to the bound at which the answer counts as optimal
_LEAST = 1e-6  # of a job's best rate: a floor below it is rounding
_FIRST_PARTS = 4  # groups of a kind, at first
_MORE_PAIRS = 64  # of kinds, in a round


@dataclass(frozen=True, slots=True, eq=False)
class Worth:
    """``allocation`` is worth ``value``, none is worth more than ``bound``.

    One more accelerator of a type adds at most its ``price``, (types,), if that is known.
    """

    status: Status
    value: float
    bound: float
    allocation: Allocation | None
    backend: str
    price: Floats | None = None


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """Jobs in order of arrival."""
    return in_order(problem, fifo.values, limits)


def in_order(
    problem: AllocationProblem, values: Callable[[AllocationProblem], Floats], limits: Limits
) -> AllocationResult:
    """A linear program over jobs, or with space sharing some over runs of neighbouring jobs.

    Where jobs choose among counts there are two, and the second has the first one's throughputs
    as floors. ``values``: what a step per second of each job is worth, by the order of jobs.
    """
    until = perf_counter() + limits.seconds
    floor = np.zeros(len(problem))
    if problem.elastic:
        sparing = fifo.efficient(problem)
        first = most_value(sparing, values(sparing), floor, limits)
        if first.allocation is None:
            return AllocationResult(first.status, None, None, None, None)
        floor = throughput(problem, first.allocation) * (1 - fifo.ROUNDING)
        floor[floor < _LEAST * problem.rates.max(axis=1)] = 0.0
        limits = replace(limits, seconds=max(0.0, until - perf_counter()))
    found = most_value(problem, values(problem), floor, limits)
    if found.allocation is None:
        return AllocationResult(found.status, None, None, None, None)
    return AllocationResult(
        found.status,
        found.value,
        found.bound,
        found.allocation,
        f"duals of the linear program over jobs ({found.backend})",
        one_more=found.price,
    )


def most_value(problem: AllocationProblem, value: Floats, floor: Floats, limits: Limits) -> Worth:
    """Maximise the sum of ``value`` times throughput, both by job.

    ``floor``: steps per second that a job must have; 0 for none. Shape (jobs,).
    """
    if len(problem.table.first):
        return _in_runs(problem, value, floor, limits)
    valid = polytope(problem, group_by(problem, np.arange(len(problem))))
    form = fifo.value_program(valid, value, floor)
    answer = solve_form(form, None, limits)
    if answer.values is None or answer.duals is None:
        return Worth(answer.status, -math.inf, math.inf, None, answer.backend)
    allocation = valid.invert(np.clip(answer.values, 0.0, valid.most))
    worth = float(value @ throughput(problem, allocation))
    bound = -weak_duality_bound(form, answer.duals)
    price = valid.prices(answer.duals)
    return Worth(answer.status, worth, bound, allocation, answer.backend, price)


def _in_runs(problem: AllocationProblem, value: Floats, floor: Floats, limits: Limits) -> Worth:
    """The same with space sharing, where single jobs would have too many pairs.

    Jobs of a kind in order of value are cut into runs that are treated alike, and only some pairs
    of kinds are allowed. Runs whose jobs want different things at the prices found are cut again,
    and pairs that would gain are let in, until the bound for single jobs and all pairs is met.
    """
    until = perf_counter() + limits.seconds
    alike = problem.alike
    order = np.lexsort((np.arange(len(problem)), -value, alike))
    starts = _first_runs(alike[order], floor[order] > 0)
    pairs = _first_pairs(problem, value, floor, limits)
    best = Worth(Status.NO_ANSWER, -math.inf, math.inf, None, "")
    while True:
        run = np.empty(len(problem), dtype=np.int64)
        run[order] = np.cumsum(starts) - 1
        some = replace(problem, table=problem.table.with_pairs(pairs))
        valid = polytope(some, group_by(some, run))
        form = fifo.value_program(valid, value, floor)
        left = replace(limits, seconds=max(0.0, until - perf_counter()))
        answer = solve_form(form, None, left)
        if answer.values is None or answer.duals is None:
            status = Status.FEASIBLE if best.allocation is not None else answer.status
            return Worth(status, best.value, best.bound, best.allocation, answer.backend)
        y = np.clip(answer.values, 0.0, valid.most)
        allocation = valid.invert(y)
        worth = float(value @ throughput(problem, allocation))
        proof = fifo.jobs_bound(problem, valid, form, answer.duals, value, floor)
        bound = min(best.bound, proof.bound)
        best = Worth(Status.OPTIMAL, worth, bound, allocation, answer.backend)
        least = TOLERANCE / 2 * worth
        loose = (proof.excess > least / len(proof.excess)) & (valid.groups.size > 1)
        missing = proof.missing > least / len(problem)
        if bound - worth <= TOLERANCE * worth or not (loose.any() or missing.any()):
            return best
        starts |= _cuts(valid, y, np.flatnonzero(starts), loose)
        pairs[np.argsort(-proof.missing)[: min(_MORE_PAIRS, missing.sum())]] = True


def _first_pairs(problem: AllocationProblem, value: Floats, floor: Floats, limits: Limits) -> Bools:
    """The pairs that share accelerators if all jobs of a kind are treated alike; (pairs,)."""
    pairs = np.zeros(len(problem.table.first), dtype=bool)
    valid = polytope(problem, group_by(problem, floor))
    answer = solve_form(fifo.value_program(valid, value, floor), None, limits)
    if answer.values is not None:
        time = answer.values[len(valid.alone_group) :][: len(valid.pair)]
        pairs[valid.pair[time > 0]] = True
    return pairs


def _first_runs(kind: Ints, held: Bools) -> Bools:
    """Where runs of jobs, in order of kind and value, start: a few equal runs in every kind."""
    starts = np.zeros(len(kind), dtype=bool)
    first = np.flatnonzero(np.diff(kind, prepend=-1))
    for start, end in zip(first, [*first[1:], len(kind)], strict=True):
        parts = min(_FIRST_PARTS, end - start)
        starts[np.linspace(start, end, parts, endpoint=False).astype(int)] = True
    starts[held] = True
    starts[1:][held[:-1]] = True
    return starts


def _cuts(valid: Polytope, y: Floats, start: Ints, loose: Bools) -> Bools:
    """New starts inside the loose runs, where faster columns' time ends, else in the middle.

    The more valuable of a run's jobs would take its faster columns.
    """
    time = valid.matrix[: len(valid.groups)]
    rate = np.asarray(valid.rate.sum(axis=0)).reshape(-1)
    cuts = np.zeros(len(valid.groups.of_job), dtype=bool)
    for group in np.flatnonzero(loose):
        columns = time.indices[time.indptr[group] : time.indptr[group + 1]]
        faster = columns[np.argsort(-rate[columns], kind="stable")]
        ends = np.cumsum(y[faster])
        size = valid.groups.size[group]
        inside = np.unique(np.concatenate([np.floor(ends), np.ceil(ends)])).astype(int)
        inside = inside[(inside > 0) & (inside < size)]
        cuts[start[group] + (inside if len(inside) else np.array([size // 2]))] = True
    return cuts
