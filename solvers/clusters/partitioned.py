"""Allocations of clusters with so many different jobs that one linear program is too large.

POP (Narayanan et al., SOSP 2021): the jobs are split into parts, each part has the same portion of
every type of accelerator, the parts are solved one by one or at once, and the allocations are put
together. What that loses is bounded: the parts' prices of accelerators, averaged, are prices for
the whole cluster, and prices bound what any allocation can reach.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from stagewright.formulations.clusters.allocation import (
    Allocation,
    AllocationProblem,
    check,
    throughput,
)
from stagewright.formulations.clusters.policies import makespan, max_min
from stagewright.formulations.clusters.policies.throughput import level_program
from stagewright.formulations.clusters.polytope import group_by, polytope
from stagewright.formulations.clusters.rates import server_rows
from stagewright.formulations.forms.answers import Limits, Status, settled
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.levels import ROUNDING

_BACKEND = "highs-ipm"  # where no two of 3,000 jobs are alike, three times as fast as simplex


@dataclass(frozen=True, slots=True, eq=False)
class JobPart:
    """Some of the jobs, ``jobs`` of the whole, with ``portion`` of every type of accelerator."""

    jobs: Ints
    problem: AllocationProblem
    need: Floats
    portion: float


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """A part's answer: its jobs' allocation, None without one, and the prices of its resources.

    A price is for one accelerator of each type, then for one server of each of ``server_rows``.
    """

    status: Status
    allocation: Allocation | None
    prices: Floats


Spread = Callable[[Callable[[JobPart, Limits], Solved], Sequence[JobPart], Limits], list[Solved]]


@dataclass(frozen=True, slots=True)
class _PartsPolicy:
    need: Callable[[AllocationProblem], Floats]
    objective: Callable[[AllocationProblem, Allocation], float]
    maximises: bool


POLICIES = {
    "max-min": _PartsPolicy(max_min.needs, max_min.objective, True),
    "makespan": _PartsPolicy(lambda problem: problem.steps, makespan.objective, False),
}
"""The policies that maximise the least throughput / need."""


def in_process(
    run: Callable[[JobPart, Limits], Solved], parts: Sequence[JobPart], limits: Limits
) -> list[Solved]:
    """Solve one part after the other, in this process."""
    return [run(part, limits) for part in parts]


def allocate_partitioned(
    problem: AllocationProblem,
    policy: str,
    parts: int,
    limits: Limits | None = None,
    spread: Spread = in_process,
) -> AllocationResult:
    """Allocate by ``policy`` in ``parts`` parts, and check the whole; the gap bounds the loss.

    ``limits``: the seconds are for each part; the seed decides how the jobs are split. ``spread``
    solves the parts.

    Raises
    ------
    InputError
        If the policy cannot be solved in parts, there are more parts than jobs, or jobs share
        accelerators.
    """
    began = perf_counter()
    chosen = require_parts(problem, policy, parts)
    limits = limits or Limits(seconds=math.inf)
    need = chosen.need(problem)
    split = _split(problem, need, parts, limits)
    solved = spread(_solve_part, split, limits)
    failed = [part.status for part in solved if part.allocation is None]
    if failed:
        return AllocationResult(failed[0], None, None, None, None, chosen.maximises, policy=policy)
    allocation = _merged(split, [part.allocation for part in solved if part.allocation])
    check(problem, allocation)
    prices = np.mean([part.prices for part in solved], axis=0)
    bound = price_bound(problem, need, prices)
    levels = [
        float((throughput(part.problem, answer.allocation) / part.need).min())
        for part, answer in zip(split, solved, strict=True)
        if answer.allocation
    ]
    objective = chosen.objective(problem, allocation)
    level = objective if chosen.maximises else 1 / objective
    return AllocationResult(
        settled(Status.FEASIBLE, -level, -bound, ROUNDING),
        objective,
        bound if chosen.maximises else 1 / bound,
        allocation,
        f"prices of accelerators, the mean of {parts} parts' duals",
        chosen.maximises,
        notes=(f"{parts} parts reach levels from {min(levels):.6g} to {max(levels):.6g}",),
        policy=policy,
        seconds=perf_counter() - began,
    )


def require_parts(problem: AllocationProblem, policy: str, parts: int) -> _PartsPolicy:
    """The way to solve a policy in parts; raises InputError if the problem cannot be divided."""
    if policy not in POLICIES:
        raise InputError(f"policy {policy!r} is not solved in parts; {', '.join(POLICIES)} are")
    if not 1 <= parts <= len(problem):
        raise InputError(f"parts: from 1 to the number of jobs, {len(problem)}, got {parts}")
    if len(problem.table.paired):
        raise InputError("jobs that share accelerators are not solved in parts: use allocate()")
    return POLICIES[policy]


def deal(problem: AllocationProblem, need: Floats, parts: int, seed: int) -> list[Ints]:
    """A random split into similar parts: of each ``parts`` consecutive jobs one goes to each part.

    The order is by scale, then by how much of its time a job needs for an equal level.
    """
    effort = need / problem.table.alone.max(axis=1)[problem.kind]
    order = np.lexsort((effort, problem.scale))
    rows = -(-len(order) // parts)
    place = np.random.default_rng(seed).permuted(np.tile(np.arange(parts), (rows, 1)), axis=1)
    part = place.reshape(-1)[: len(order)]
    return [np.sort(order[part == number]) for number in range(parts)]


def _split(problem: AllocationProblem, need: Floats, parts: int, limits: Limits) -> list[JobPart]:
    """The parts, each with the portion of the cluster that its jobs are expected to need.

    The first part is tried with its even portion; at its prices and level, what the jobs of each
    part spend is what the part gets.
    """
    split = [
        JobPart(jobs, _part_of(problem, jobs), need[jobs], 1 / parts)
        for jobs in deal(problem, need, parts, limits.seed)
    ]
    if parts == 1:
        return split
    spent = _spending(problem, need, _solve_part(split[0], limits).prices)
    if spent is None:
        return split
    portions = np.array([spent[part.jobs].sum() for part in split])
    portions /= portions.sum()
    return [
        replace(part, portion=float(portion)) for part, portion in zip(split, portions, strict=True)
    ]


def _spending(problem: AllocationProblem, need: Floats, prices: Floats) -> Floats | None:
    """Each job's payment at the highest level that prices allow; None if all prices are 0."""
    if not prices.any():
        return None
    costs = _job_costs(problem, need, prices)
    above = np.maximum(0.0, _level_at(costs) - costs.level) * costs.rise
    return np.bincount(costs.job, above, minlength=len(problem)).astype(float)


def _part_of(problem: AllocationProblem, jobs: Ints) -> AllocationProblem:
    """The problem of some jobs, with only their kinds in the table."""
    kinds, kind = np.unique(problem.kind[jobs], return_inverse=True)
    whole = problem.table
    names = tuple(whole.kinds[number] for number in kinds.tolist())
    table = replace(
        whole,
        kinds=names,
        uses=whole.uses[kinds],
        alone=whole.alone[kinds],
        index={name: number for number, name in enumerate(names)},
    )
    return replace(problem.of(jobs), table=table, kind=kind.reshape(-1))


def _solve_part(part: JobPart, limits: Limits) -> Solved:
    """The linear program of one part; jobs of one kind and need are one group."""
    problem = part.problem
    groups = group_by(problem, part.need)
    valid = polytope(problem, groups)
    shared = slice(len(groups), len(valid.upper))  # the accelerators' and the servers' rows
    upper = valid.upper.copy()
    upper[shared] *= part.portion
    valid = replace(valid, upper=upper)
    most = float((problem.table.alone.max(axis=1)[problem.kind] / part.need).min())
    program = level_program(valid, groups.total(part.need), most)
    answer = solve(program.form, limits.backend or _BACKEND, limits)
    if answer.values is None or answer.duals is None:
        return Solved(answer.status, None, np.zeros(shared.stop - shared.start))
    allocation = valid.invert(np.clip(answer.values[:-1], 0.0, valid.most))
    return Solved(answer.status, allocation, np.maximum(0.0, -answer.duals[shared]))


def _merged(parts: Sequence[JobPart], allocations: Sequence[Allocation]) -> Allocation:
    return Allocation(
        np.concatenate([p.jobs[a.job] for p, a in zip(parts, allocations, strict=True)]),
        np.concatenate([a.partner for a in allocations]),
        np.concatenate([a.worker for a in allocations]),
        np.concatenate([a.share for a in allocations]),
    )


# --- The bound -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Costs:
    """Job ``job[i]`` pays ``rise[i]`` more for each level above ``level[i]``; never over ``most``.

    ``worth`` is that of the cluster at the same prices.
    """

    job: Ints
    level: Floats
    rise: Floats
    most: float
    worth: float


def price_bound(problem: AllocationProblem, need: Floats, prices: Floats) -> float:
    """A level that no allocation without space sharing exceeds, from any prices of resources.

    At level theta every job buys theta * need steps per second at least cost within its time; that
    cost is convex and piecewise linear in theta. All jobs together can spend no more than the worth
    of the cluster, whatever the prices are: the Lagrangian dual of equation 5.3.

    ``prices``: not negative: of an accelerator of each type, then of a server of each of
    ``server_rows``.
    """
    return _level_at(_job_costs(problem, need, prices))


def _job_costs(problem: AllocationProblem, need: Floats, prices: Floats) -> _Costs:
    table = problem.table
    types = len(table.counts)
    cost = table.uses * prices[:types][table.accelerator]
    worth = prices[:types] @ table.counts
    for price, (_, parts, servers) in zip(prices[types:], server_rows(table), strict=True):
        cost += price * parts
        worth += price * servers
    kind, rate, rise = _cost_curves(table.alone, cost)
    jobs = np.argsort(problem.kind, kind="stable")
    start = np.searchsorted(problem.kind[jobs], np.arange(len(table.kinds) + 1))
    many = start[kind + 1] - start[kind]
    corner = np.repeat(np.arange(len(kind)), many)
    job = jobs[start[kind[corner]] + _count_within(many)]
    most = float((table.alone.max(axis=1)[problem.kind] / need).min())
    return _Costs(job, rate[corner] / need[job], rise[corner] * need[job], most, float(worth))


def _count_within(many: Ints) -> Ints:
    """0, 1, ... within each run of ``many`` entries."""
    return np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)


def _cost_curves(rates: Floats, cost: Floats) -> tuple[Ints, Floats, Floats]:
    """Least cost of a rate within one unit of time: kind, rate of a corner, rise of slope there.

    It is the lower hull of (0, 0) and the points (rate, cost) of the workers.
    """
    at_rate, at_cost, slope = np.zeros(len(rates)), np.zeros(len(rates)), np.zeros(len(rates))
    kinds: list[Ints] = []
    corners: list[Floats] = []
    rises: list[Floats] = []
    while True:
        further = rates - at_rate[:, None]
        slopes = np.full(rates.shape, np.inf)
        np.divide(cost - at_cost[:, None], further, out=slopes, where=further > 0)
        least = slopes.min(axis=1)
        going = np.flatnonzero(np.isfinite(least))
        if not len(going):
            return np.concatenate(kinds), np.concatenate(corners), np.concatenate(rises)
        kinds.append(going)
        corners.append(at_rate[going])
        rises.append(least[going] - slope[going])
        slope[going] = least[going]
        # Of several workers on one line, the furthest.
        furthest = np.where(slopes <= least[:, None], rates, -np.inf).argmax(axis=1)[going]
        at_rate[going], at_cost[going] = rates[going, furthest], cost[going, furthest]


def _level_at(costs: _Costs) -> float:
    """The level at which the jobs' payments equal the cluster's total price."""
    order = np.argsort(costs.level)
    level, slopes = costs.level[order], np.cumsum(costs.rise[order])
    spent = np.concatenate([[0.0], np.cumsum(np.diff(level) * slopes[:-1])])
    last = int(np.searchsorted(spent, costs.worth, side="right")) - 1
    if slopes[last] <= 0:
        return costs.most
    return min(costs.most, float(level[last] + (costs.worth - spent[last]) / slopes[last]))
