"""Minimum makespan within a budget (thesis 6.4.3).

minimise_X  M   such that   num_iterations_m / M <= throughput(m, X)  and  M * cost(X) <= B

The thesis searches for M by bisection, for its rows multiply M and X. In y = M X, the time that
each job spends on each type, they are linear and the whole is one linear program, exact at once:
with the rows A X <= b of a valid allocation,

minimise  M   such that   A y <= b M,   sum_j T_mj y_mj >= num_iterations_m,   cost(y) <= B
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies.cost import prices
from stagewright.formulations.clusters.polytope import Polytope
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount

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
