"""Minimum cost (thesis 6.4.2): as much work as possible for each dollar.

maximise_X  sum_m work(m, X) / sum_m cost(m, X)

``cost`` is dollars per hour: scale x share x price, and a pair pays once. ``work`` is throughput
in dollars per hour that the steps cost where they are cheapest, so that the ratio is an efficiency:
1 if every job runs only where it is cheapest, and above 1 only where jobs share accelerators.

The thesis prints a sum of ratios, sum_m throughput(m, X) / cost(m, X), in samples per dollar: each
of its terms is at its best for any sliver of time on the job's cheapest type, so that it asks for
nothing more. The public code of its scheduler maximises sum_m sum_j T_mj / c_j X_mj instead. We
solve the ratio of sums, a linear-fractional program, by the substitution of Charnes and Cooper
(1962): z = t y for t > 0 with cost(z) fixed is one linear program. A ratio does not say how much
to do; among the allocations of the best ratio the one with most work is taken.
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.formulations.clusters.polytope import Polytope
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError

_TIGHT = 100.0  # scales the row of the ratio: a solver's 1e-7 is then 1e-9 of the cost


def prices(problem: AllocationProblem) -> Floats:
    """Dollars per hour of one accelerator, by worker type, shape (workers,).

    Raises InputError if an accelerator has no price.
    """
    accelerators = problem.table.pool.accelerators
    for one in accelerators:
        if one.dollars_per_hour is None:
            raise InputError(
                f"accelerator {one.name!r} has no price: write the dollars per hour of one, for "
                f"example {one.name}={one.count}@2.48"
            )
    by_type = np.array([one.dollars_per_hour or 0.0 for one in accelerators])
    return np.asarray(by_type[problem.table.accelerator])


def positive_prices(problem: AllocationProblem) -> Floats:
    """``prices``, none of them 0, where a ratio to cost is asked for.

    Raises InputError if an accelerator has no price, or costs nothing.
    """
    found = prices(problem)
    if (found == 0).any():
        name = problem.table.workers[int(found.argmin())].name
        raise InputError(
            f"accelerator {name!r} costs nothing: work for each dollar needs a price above 0"
        )
    return found


def dollars_per_hour(problem: AllocationProblem, allocation: Allocation) -> float:
    """Dollars per hour of the accelerators in use."""
    uses = problem.uses[allocation.job, allocation.worker]
    return float((allocation.share * uses) @ prices(problem)[allocation.worker])


def least_cost(problem: AllocationProblem) -> Floats:
    """Dollars per hour for one step per second of each kind where it is cheapest, (kinds,)."""
    table = problem.table
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = table.uses * prices(problem) / table.alone
    return np.asarray(np.where(table.alone > 0, cost, np.inf).min(axis=1))


def objective(problem: AllocationProblem, allocation: Allocation) -> float:
    """Work for each dollar; see the module."""
    work = least_cost(problem)[problem.kind] @ throughput(problem, allocation)
    return float(work / dollars_per_hour(problem, allocation))


@dataclass(frozen=True, slots=True, eq=False)
class Costed:
    """A polytope whose ``work @ y`` and ``cost @ y`` are dollars per hour; ``floor`` by group."""

    valid: Polytope
    work: Floats
    cost: Floats
    floor: Floats

    @property
    def floor_rows(self) -> sparse.csr_array:
        """Throughput over floor of the groups that have one, shape (groups with floor, columns)."""
        asked = np.flatnonzero(self.floor)
        scale = sparse.diags_array(1 / self.floor[asked])
        return sparse.csr_array(scale @ self.valid.rate[asked])


def costed(valid: Polytope, floor: Floats) -> Costed:
    """``valid`` with costs; ``floor`` is the least throughput of each job, steps per second."""
    problem = valid.problem
    work = valid.rate.T @ least_cost(problem)[valid.groups.kind]
    return Costed(valid, work, valid.used.T @ prices(problem), valid.groups.total(floor))


@dataclass(frozen=True, slots=True, eq=False)
class RatioProgram:
    """The form over (z, t), and for the bound the same with groups' time relaxed.

    Only ``relaxed`` has finite columns: a bound leans on them, a simplex is faster without.
    """

    form: LinearProgram
    relaxed: LinearProgram


def ratio_program(asked: Costed) -> RatioProgram:
    """Charnes-Cooper: minimise -work(z) / K over (z, t) = t (y, 1) with cost(z) = K.

    K is at least what all accelerators that the jobs can use cost, so that t is at least 1.
    """
    valid = asked.valid
    whole = _cost_of_all(valid.problem)
    floors = np.count_nonzero(asked.floor)
    equal = np.isfinite(valid.lower)  # a row with a lower bound is an equation
    row_lower = np.concatenate([np.where(equal, 0.0, -np.inf), np.zeros(floors), [1.0]])

    def form(upper: Floats, most: Floats) -> LinearProgram:
        bounded = np.isfinite(upper)
        rows = sparse.block_array(
            [
                [valid.matrix, sparse.csr_array(np.where(bounded, -upper, 0.0)[:, None])],
                [asked.floor_rows, sparse.csr_array(-np.ones((floors, 1)))],
                [sparse.csr_array((asked.cost / whole)[None, :]), None],
            ],
            format="csr",
        )
        return LinearProgram(
            np.append(-asked.work / whole, 0.0),
            sparse.csr_array(rows),
            row_lower,
            np.concatenate([np.where(bounded, 0.0, np.inf), np.full(floors, np.inf), [1.0]]),
            np.zeros(len(most)),
            most,
            np.zeros(len(most), dtype=bool),
        )

    longest = whole / _least_spent(valid.problem, asked)
    return RatioProgram(
        form(valid.upper, np.full(valid.columns + 1, np.inf)),
        form(valid.relaxed_upper(), np.append(valid.most, 1.0) * longest),
    )


def work_program(asked: Costed, ratio: float, spent: float) -> LinearProgram:
    """Minimise -work(y) where work(y) >= ``ratio`` * cost(y).

    ``spent``, dollars per hour of an allocation of that ratio, sets the row's scale.
    """
    valid = asked.valid
    efficient = (asked.work - ratio * asked.cost) * (_TIGHT / spent)
    rows = sparse.vstack([valid.matrix, asked.floor_rows, efficient[None, :]], format="csr")
    floors = np.count_nonzero(asked.floor)
    return LinearProgram(
        -asked.work,
        sparse.csr_array(rows),
        np.concatenate([valid.lower, np.ones(floors), [0.0]]),
        np.concatenate([valid.upper, np.full(floors + 1, np.inf)]),
        np.zeros(valid.columns),
        valid.most,
        np.zeros(valid.columns, dtype=bool),
    )


def _cost_of_all(problem: AllocationProblem) -> float:
    """Dollars per hour of as many accelerators of every type as the jobs could use."""
    usable = np.minimum(problem.table.counts, problem.scale.sum())
    by_type = np.zeros(len(usable))
    by_type[problem.table.accelerator] = prices(problem)
    return float(usable @ by_type)


def _least_spent(problem: AllocationProblem, asked: Costed) -> float:
    """Dollars per hour below which some allocation of the best ratio need not go.

    With floors, what their steps cost at least, if a pair's jobs pay half each. Without, one job
    alone or one pair all of the time: some best allocation is a single such column.
    """
    if not asked.floor.any():
        dollars = np.where(problem.rates > 0, problem.uses * prices(problem), np.inf)
        return float(dollars.min())
    table = problem.table
    least = least_cost(problem)
    half = table.uses[table.first, table.worker] * prices(problem)[table.worker] / 2
    rates = table.paired
    itself = table.first == table.second
    rates = np.where(itself[:, None], rates.mean(axis=1, keepdims=True), rates)
    for side, kinds in enumerate((table.first, table.second)):
        runs = rates[:, side] > 0
        np.minimum.at(least, kinds[runs], half[runs] / rates[runs, side])
    return float(asked.floor @ least[asked.valid.groups.kind])
