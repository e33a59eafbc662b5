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

Minimum cost under SLOs (thesis 6.4.3): ``cost`` with a floor for every job that has one.

throughput(m, X) >= num_iterations_m / SLO_m

If the floors cannot all be had, the total of the parts that are missing is minimised first:

minimise_X,s  sum_m s_m   such that   throughput(m, X) >= (1 - s_m) * num_iterations_m / SLO_m

Minimum makespan within a budget (thesis 6.4.3).

minimise_X  M   such that   num_iterations_m / M <= throughput(m, X)  and  M * cost(X) <= B

The thesis searches for M by bisection, for its rows multiply M and X. In y = M X, the time that
each job spends on each type, they are linear and the whole is one linear program, exact at once:
with the rows A X <= b of a valid allocation,

minimise  M   such that   A y <= b M,   sum_j T_mj y_mj >= num_iterations_m,   cost(y) <= B
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.formulations.clusters.polytope import Polytope
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount


def needs(problem: AllocationProblem) -> Floats:
    """Steps per second that meet each job's SLO; 0 without one, or if it has passed."""
    left = problem.deadline_seconds
    open_ = np.isfinite(left) & (left > 0)
    return np.asarray(np.where(open_, problem.steps / np.where(open_, left, 1.0), 0.0))


def too_fast(problem: AllocationProblem) -> Bools:
    """Jobs whose SLO asks for more than any accelerator gives."""
    return np.asarray(needs(problem) > problem.best_rates() * (1 + 1e-9))


def shortfall_program(valid: Polytope, floor: Floats) -> tuple[LinearProgram, Ints]:
    """The form, whose last columns are s of the groups with a floor, and those groups."""
    groups = np.flatnonzero(floor)
    count = len(groups)
    scale = sparse.diags_array(1 / floor[groups])
    rows = sparse.block_array(
        [[valid.matrix, None], [scale @ valid.rate[groups], sparse.eye_array(count, format="csr")]],
        format="csr",
    )
    columns = valid.columns + count
    form = LinearProgram(
        np.concatenate([np.zeros(valid.columns), np.ones(count)]),
        sparse.csr_array(rows),
        np.concatenate([valid.lower, np.ones(count)]),
        np.concatenate([valid.upper, np.full(count, np.inf)]),
        np.zeros(columns),
        np.concatenate([valid.most, np.ones(count)]),
        np.zeros(columns, dtype=bool),
    )
    return form, groups


def notes(problem: AllocationProblem, floor: Floats) -> tuple[str, ...]:
    """A line for each job that misses its SLO; ``floor`` is its possible steps per second."""
    need, best, hopeless = needs(problem), problem.best_rates(), too_fast(problem)
    found = []
    for job in np.flatnonzero(np.isfinite(problem.deadline_seconds)):
        left = problem.deadline_seconds[job]
        asks = f"needs {need[job]:.4g} steps/s to meet its SLO in {left / 3600:.3g} h"
        if left <= 0:
            text = f"its SLO passed {-left / 3600:.3g} h ago; served as if it had none"
        elif hopeless[job]:
            text = (
                f"{asks}, no accelerator is fast enough (at best {best[job]:.4g}: no SLO below "
                f"{_hours(problem, job, best)} can be met); served as if it had none"
            )
        elif floor[job] < need[job] * (1 - 1e-6):
            when = f", by which it takes {_hours(problem, job, floor)}" if floor[job] else ""
            text = f"{asks}, gets {floor[job]:.4g} at best together with the others{when}"
        else:
            continue
        found.append(f"job {problem.names[job]!r}: {text}")
    return tuple(found)


def _hours(problem: AllocationProblem, job: np.signedinteger, rate: Floats) -> str:
    """How long the rest of a job takes at its rate."""
    return f"{problem.steps[job] / rate[job] / 3600:.3g} h"


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


SECONDS_PER_HOUR = 3600.0


def require_budget(budget_dollars: float | None) -> float:
    """The budget; none, or one that is not positive, is refused."""
    if budget_dollars is None:
        raise InputError("makespan-budget needs a budget: give the dollars that all jobs may cost")
    require_amount(budget_dollars, "budget")
    if budget_dollars == 0:
        raise InputError("budget must be more than zero, got 0")
    return budget_dollars


def unit_seconds(problem: AllocationProblem) -> float:
    """The program's unit of time, in seconds: no makespan is shorter than this unit."""
    return float((problem.steps / problem.best_rates()).max())


@dataclass(frozen=True, slots=True, eq=False)
class BudgetProgram:
    """The form over (y, M), minimising M, and the same with groups' time relaxed, for the bound.

    ``dollars`` is the cost of each column; ``most`` bounds y / M.
    """

    form: LinearProgram
    relaxed: LinearProgram
    dollars: Floats
    most: Floats

    def cheapest(self, makespan: float = np.inf, *, relaxed: bool = False) -> LinearProgram:
        """The form that minimises dollars instead, within ``makespan`` (units) and any budget."""
        form = self.relaxed if relaxed else self.form
        budget = form.row_upper.copy()
        budget[-1] = np.inf
        upper = np.append(self.most, 1.0) * makespan
        return replace(form, cost=self.dollars, row_upper=budget, upper=upper)

    def bounding(self, makespan: float) -> LinearProgram:
        """``relaxed`` with finite columns: an optimum takes no longer than ``makespan``, found."""
        return replace(self.relaxed, upper=np.append(self.most, 1.0) * makespan)


def budget_program(valid: Polytope, budget_dollars: float) -> BudgetProgram:
    """State the program for the polytope's groups; the last row is the budget."""
    problem = valid.problem
    unit = unit_seconds(problem)
    steps = valid.groups.total(problem.steps)
    done = sparse.diags_array(unit / steps) @ valid.rate
    dollars = valid.used.T @ prices(problem) * (unit / SECONDS_PER_HOUR)
    equal = np.isfinite(valid.lower)  # a row with a lower bound is an equation

    def form(upper: Floats) -> LinearProgram:
        bounded = np.isfinite(upper)
        rows = sparse.block_array(
            [
                [valid.matrix, sparse.csr_array(np.where(bounded, -upper, 0.0)[:, None])],
                [done, None],
                [sparse.csr_array((dollars / budget_dollars)[None, :]), None],
            ],
            format="csr",
        )
        return LinearProgram(
            np.append(np.zeros(valid.columns), 1.0),
            sparse.csr_array(rows),
            np.concatenate([np.where(equal, 0.0, -np.inf), np.ones(len(steps)), [-np.inf]]),
            np.concatenate([np.where(bounded, 0.0, np.inf), np.full(len(steps), np.inf), [1.0]]),
            np.zeros(valid.columns + 1),
            np.full(valid.columns + 1, np.inf),
            np.zeros(valid.columns + 1, dtype=bool),
        )

    return BudgetProgram(
        form(valid.upper), form(valid.relaxed_upper()), np.append(dollars, 0.0), valid.most
    )
