"""First in, first out (thesis 5.4.2): earlier jobs run where they are fastest.

    maximise_X  sum_m  (M - m) * throughput(m, X) / throughput(m, X^fastest)

over the jobs m = 0 ... M - 1 in order of arrival; X^fastest is a job alone on its fastest type all
of the time.

With accelerators at their prices, what is best for a job depends on its kind and, convexly, on its
factor M - m: early jobs of a kind run on one type, later ones on another, the last not at all. So
jobs of a kind whose factors are neighbours may be treated alike, except where one type ends and
the next begins; ``jobs_bound`` prices every job by itself and finds those places.

Jobs that choose among counts would make the others wait here: the first ones take the count on
which they are fastest, however little the last accelerators add. So there are two passes. In the
first, each job has only the counts on which an accelerator does most (``efficient``). In the
second all counts are open, and no job may get less than in the first: early jobs spread over
what is left when all that wait have what they use best. Jobs without a choice have one pass.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.formulations.clusters.polytope import Polytope
from stagewright.formulations.clusters.rates import server_rows
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Bools, Floats, Ints

ROUNDING = 1e-9  # relative, of rates and of what a first pass gave


def values(problem: AllocationProblem) -> Floats:
    """Value in the objective of a step per second of each job, seconds, shape (jobs,)."""
    first = np.arange(len(problem), 0, -1)
    return np.asarray(first / problem.rates.max(axis=1))


def efficient(problem: AllocationProblem) -> AllocationProblem:
    """The problem in which jobs run only on the counts on which an accelerator does most.

    That is of each type, and of each placement where that counts.
    """
    table = problem.table
    of_one = table.alone / np.maximum(table.uses, 1)
    best = np.zeros_like(of_one)
    places = [(worker.accelerator, worker.placement) for worker in table.workers]
    for place in set(places):
        here = [worker for worker, at in enumerate(places) if at == place]
        best[:, here] = of_one[:, here].max(axis=1, keepdims=True)
    alone = np.where(of_one >= best * (1 - ROUNDING), table.alone, 0.0)
    return replace(problem, table=replace(table, alone=alone))


def objective(problem: AllocationProblem, allocation: Allocation) -> float:
    """The sum over jobs of (M - m) times throughput relative to the fastest."""
    return float(values(problem) @ throughput(problem, allocation))


def value_program(valid: Polytope, value: Floats, floor: Floats) -> LinearProgram:
    """Maximise the sum of value times throughput, in groups of mean ``value``.

    The last rows hold the jobs with a positive ``floor``, each a group of its own, to at least
    that many steps per second.

    ``value`` and ``floor``: by job.
    """
    groups = valid.groups
    held = groups.of_job[floor > 0]
    least = sparse.diags_array(1 / floor[floor > 0]) @ sparse.csr_array(valid.rate[held])
    return LinearProgram(
        -(valid.rate.T @ (groups.total(value) / groups.size)),
        sparse.csr_array(sparse.vstack([valid.matrix, least], format="csr")),
        np.concatenate([valid.lower, np.ones(len(held))]),
        np.concatenate([valid.upper, np.full(len(held), np.inf)]),
        np.zeros(valid.columns),
        valid.most,
        np.zeros(valid.columns, dtype=bool),
    )


@dataclass(frozen=True, slots=True, eq=False)
class JobsBound:
    """No allocation is worth more than ``bound``.

    ``excess`` is what grouping may cost, shape (groups,): 0 where all of a group's jobs want the
    same at these prices. ``missing`` is what a pair that the program lacks may add per unit of
    time, by the problem's table, shape (pairs,); at most 0 for those that it has.
    """

    bound: float
    excess: Floats
    missing: Floats


def jobs_bound(
    problem: AllocationProblem,
    valid: Polytope,
    form: LinearProgram,
    duals: Floats,
    value: Floats,
    floor: Floats,
) -> JobsBound:
    """Weak duality for single jobs at the prices that the groups' program found.

    A job has a unit of time, so whatever the other rows' prices it is worth no more than the best
    of its columns. A job alone in its kind shares columns with its partners: there the price of
    its time stays as found. ``valid`` may be of a problem with only some of the table's pairs.
    """
    groups = valid.groups
    alone = (np.bincount(groups.kind)[groups.kind] == 1) & (groups.size == 1)
    y = np.where(_absent(form, duals), 0.0, duals)
    y[: len(groups)] = np.where(alone, y[: len(groups)], 0.0)
    held = np.flatnonzero(floor > 0)
    own_rows = len(y) - len(held)
    value = value.copy()
    value[held] += y[own_rows:] / floor[held]

    price = -(form.matrix[:own_rows].T @ y[:own_rows])  # of a unit of each column
    columns = _own_columns(valid, alone)
    rate = np.asarray(valid.rate.sum(axis=0)).reshape(-1)
    worth, excess = -y[groups.of_job], np.zeros(len(groups))
    members = np.split(np.argsort(groups.of_job, kind="stable"), np.cumsum(groups.size)[:-1])
    for group in np.flatnonzero(~alone):
        at, jobs = columns[group], members[group]
        best = _best(np.append(value[jobs], value[jobs].mean()), rate[at], price[at])
        worth[jobs] = best[:-1]
        excess[group] = best[:-1].sum() - len(jobs) * best[-1]
    profit = valid.rate[alone].T @ groups.total(value)[alone] - price
    profit[np.concatenate([*columns, np.zeros(0, dtype=np.int64)])] = 0.0
    y[: len(groups)] = 0.0
    rows, used = np.where(y > 0, form.row_lower, form.row_upper), y != 0
    bound = worth.sum() + np.maximum(profit, 0.0) @ form.upper - y[used] @ rows[used]
    missing, most = _missing(problem, valid, value, worth, _resources(problem, -y[len(groups) :]))
    return JobsBound(float(bound + np.maximum(missing, 0.0) @ most), excess, missing)


def _resources(problem: AllocationProblem, price: Floats) -> Floats:
    """Cost of all the time on a worker for each kind, at ``price`` of types, then of servers.

    Shape (kinds, workers).
    """
    table = problem.table
    cost = table.uses * price[table.accelerator]
    for row, (_, parts, _) in enumerate(server_rows(table), len(table.counts)):
        cost += parts * price[row]
    return np.asarray(cost)


def _missing(
    problem: AllocationProblem, valid: Polytope, value: Floats, worth: Floats, cost: Floats
) -> tuple[Floats, Floats]:
    """Value of a unit of each pair in the table beyond its jobs' ``worth``, and the most units.

    The pairs that ``valid`` has are not asked: 0.
    """
    table, here = problem.table, valid.problem.table
    width = len(table.workers), len(table.kinds)
    code = (table.first * width[1] + table.second) * width[0] + table.worker
    known = (here.first * width[1] + here.second) * width[0] + here.worker
    present = np.bincount(problem.kind, minlength=width[1])
    itself = table.first == table.second
    most = np.where(itself, present[table.first] // 2 * 2, present[table.first])
    most = np.minimum(most, present[table.second]).astype(float)
    asked = (most > 0) & ~np.isin(code, known)
    gain = -cost[table.first, table.worker]
    for side, kinds in enumerate((table.first, table.second)):
        rate = np.where(itself, table.paired.mean(axis=1), table.paired[:, side])
        for kind in np.unique(kinds[asked]):
            of_kind, jobs = asked & (kinds == kind), problem.kind == kind
            reduced = value[jobs, None] * rate[of_kind] - worth[jobs, None]
            gain[of_kind] += reduced.max(axis=0)
    return np.where(asked, gain, 0.0), most


def _absent(form: LinearProgram, duals: Floats) -> Bools:
    """Rows whose dual has a sign for a bound that the row does not have, by rounding."""
    below = (duals > 0) & ~np.isfinite(form.row_lower)
    return np.asarray(below | ((duals < 0) & ~np.isfinite(form.row_upper)))


def _own_columns(valid: Polytope, alone: Bools) -> list[Ints]:
    """By group, the variables of the group's time; none for a group that is alone in its kind."""
    own = valid.side_column >= 0
    group = np.concatenate([valid.alone_group, valid.side_group[own]])
    column = np.concatenate([np.arange(len(valid.alone_group)), valid.side_column[own]])
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(group, minlength=len(alone)))
    parts = np.split(column[order], ends[:-1])
    return [part[:0] if single else part for part, single in zip(parts, alone, strict=True)]


def _best(value: Floats, rate: Floats, price: Floats) -> Floats:
    """Profit of a unit of time in the best column, 0 for none, shape of ``value``."""
    return np.asarray((value[:, None] * rate - price).max(axis=1).clip(min=0.0))
