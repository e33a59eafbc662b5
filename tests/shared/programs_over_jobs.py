"""Programs of policies as the thesis defines them: a variable for every job and pair of jobs."""

from typing import Any

import numpy as np
from scipy.optimize import linprog
from strategies_allocation import use_of

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.rates import server_rows
from stagewright.graphs.documents.arrays import Floats


def kept(problem: AllocationProblem) -> Floats:
    """Seconds at work of those of a lease and the move before it, by job and worker type."""
    found = np.ones(problem.rates.shape)
    for job, worker in np.ndindex(found.shape):
        now, move = problem.current[job], problem.restart_seconds[job]
        lease = max(problem.lease_seconds, 20 * move)
        if now >= 0 and problem.rates[job, now] > 0:
            lease = min(lease, problem.steps[job] / problem.rates[job, now])
        if worker != now and np.isfinite(lease):
            found[job, worker] = lease / (lease + move)
    return found


class Entries:
    """All rows and columns of equations 5.1 to 5.3, a variable for every job and pair of jobs."""

    def __init__(self, problem: AllocationProblem) -> None:
        table, kind = problem.table, problem.kind
        rates = problem.rates * kept(problem)
        self.columns = [(j, -1, w, r, 0.0) for (j, w), r in np.ndenumerate(rates) if r > 0]
        for a, b, w, (first, second) in zip(
            table.first, table.second, table.worker, table.paired, strict=True
        ):
            self.columns += [
                (i, j, w, first * kept(problem)[i, w], second * kept(problem)[j, w])
                for i in np.flatnonzero(kind == a)
                for j in np.flatnonzero(kind == b)
                if i < j or (i != j and a != b)
            ]
        jobs, types = len(problem), len(table.counts)
        servers = server_rows(table)
        self.rate = np.zeros((jobs, len(self.columns)))
        self.rows = np.zeros((jobs + types + len(servers), len(self.columns)))
        for at, (job, other, worker, first, second) in enumerate(self.columns):
            self.rate[job, at] = first
            self.rows[job, at] = 1
            if other >= 0:
                self.rate[other, at] = second
                self.rows[other, at] = 1
            self.rows[jobs + table.accelerator[worker], at] = use_of(problem, job, worker)
            for row, (_, parts, _) in enumerate(servers):
                self.rows[jobs + types + row, at] = parts[kind[job], worker]
        self.upper = np.concatenate(
            [np.ones(jobs), table.counts, [servers for _, _, servers in servers]]
        )

    def least(self, objective: Floats, floor: Floats) -> Any:
        """linprog's answer over valid allocations with throughputs of at least ``floor``."""
        rows = np.vstack([self.rows, -self.rate])
        return linprog(objective, rows, np.concatenate([self.upper, -floor]))

    def most(self, value: Floats, floor: Floats) -> float:
        """The largest sum of value times throughput, with throughputs of at least ``floor``."""
        answer = self.least(-(value @ self.rate), floor)
        assert answer.status == 0
        return -float(answer.fun)

    def level(self, need: Floats) -> float:
        """The largest theta such that every job has theta times its need."""
        rows = np.block([[self.rows, np.zeros((len(self.rows), 1))], [-self.rate, need[:, None]]])
        cost = np.zeros(rows.shape[1])
        cost[-1] = -1
        answer = linprog(cost, rows, np.concatenate([self.upper, np.zeros(len(need))]))
        assert answer.status == 0
        return -answer.fun
