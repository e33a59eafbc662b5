"""The setting of the thesis's policies: X, throughput(m, X), and the constraints on X.

Narayanan, PhD thesis (2021), section 5.3.1. There is one variable for every job (and, with space
sharing, every pair of jobs) and worker type: no groups of like jobs. Slow, for small instances.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter

import cvxpy as cp
import numpy as np
from scipy import sparse

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies.cost import prices
from stagewright.formulations.clusters.rates import RateTable, server_rows
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.models import Convex
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.clusters.answer import Duals

SECONDS_PER_HOUR = 3600.0
_MOST_VARIABLES = 1_000_000
UNLIMITED = Limits(math.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Specified:
    """An optimal X: ``shares`` of time, (combinations, workers), and each job's throughput.

    A combination is a job alone, (m,), or a pair (m, n). ``duals`` are those of the program that
    gave X, ``solver`` is what solved it.
    """

    objective: float
    combinations: tuple[tuple[int, ...], ...]
    shares: Floats
    throughput: Floats
    duals: Duals
    solver: str


@dataclass(frozen=True, slots=True, eq=False)
class Valid:
    """Equations 5.1 to 5.3, each a constraint whose dual is asked for."""

    time: cp.Constraint
    accelerators: cp.Constraint
    servers: tuple[cp.Constraint, ...]

    def __iter__(self) -> Iterator[cp.Constraint]:
        return iter((self.time, self.accelerators, *self.servers))

    def duals(self) -> Duals:
        """The gain in the solved program's objective by one more unit on each right-hand side."""
        servers = [float(np.asarray(one.dual_value).item()) for one in self.servers]
        return Duals(
            np.asarray(self.time.dual_value),
            np.asarray(self.accelerators.dual_value),
            np.array(servers),
        )


@dataclass(frozen=True, slots=True, eq=False)
class RateSetting:
    """``rates[m, k * workers + j]`` is T_kjm: of job m in combination k on worker type j.

    ``runs[k, j]`` says whether combination k may run on worker type j. The first combinations are
    the jobs alone, in their order. The time of ``limits`` is for all programs, from ``began`` on.
    """

    problem: AllocationProblem
    combinations: tuple[tuple[int, ...], ...]
    rates: sparse.csr_array
    runs: Bools
    limits: Limits
    began: float
    budget_dollars: float | None = None

    @property
    def alone(self) -> Floats:
        """T without space sharing, shape (jobs, workers)."""
        job, workers = np.arange(len(self.problem))[:, None], self.runs.shape[1]
        return np.asarray(self.rates[job, job * workers + np.arange(workers)].todense())

    @property
    def fastest(self) -> Floats:
        """throughput(m, X^fastest): all of the time on the fastest worker type, shape (jobs,)."""
        return np.asarray(self.alone.max(axis=1))

    @property
    def fair(self) -> Floats:
        """throughput(m, X^equal) / scale_m, 5.4.1: an even part of the cluster's accelerators.

        Of several counts the one at which an accelerator does most.
        """
        counts = self.problem.table.counts
        of_one = self.alone / np.maximum(self.problem.uses, 1)
        best = [of_one[:, here].max(axis=1) for here in self._workers_of_types]
        return np.asarray(np.array(best).T @ (counts / counts.sum()))

    @property
    def isolated(self) -> Floats:
        """throughput(m, X^isolated), 5.4.2: 1/n of every type, and no more time than there is."""
        found = []
        for rates, uses in zip(self.alone, self.problem.uses, strict=True):
            chosen = []
            for here, count in zip(self._workers_of_types, self.problem.table.counts, strict=True):
                times = [
                    (rates[w], count / (uses[w] * len(self.problem)))
                    for w in here.tolist()
                    if uses[w]
                ]
                chosen.append(max(times, key=lambda one: one[0] * min(1.0, one[1])))
            total = sum(time for _, time in chosen)
            found.append(sum(rate * time for rate, time in chosen) / max(1.0, total))
        return np.array(found)

    @property
    def _workers_of_types(self) -> list[Ints]:
        table = self.problem.table
        return [np.flatnonzero(table.accelerator == number) for number in range(len(table.counts))]

    def variable(self) -> cp.Variable:
        """X, 0 where a combination does not run."""
        return cp.Variable(self.runs.shape, bounds=[0, np.where(self.runs, np.inf, 0.0)])

    def throughput(self, X: cp.Variable) -> cp.Expression:
        """throughput(m, X) for all m: the sum of T_kjm X_kj over combinations and workers."""
        every: cp.Expression = self.rates @ cp.vec(X, order="C")
        return every

    def valid(self, X: cp.Variable, whole: cp.Expression | float = 1.0) -> Valid:
        """Equations 5.1 to 5.3 with C_m, placement, and servers, of ``X`` / ``whole``."""
        table, problem = self.problem.table, self.problem
        types = np.arange(len(table.counts))[:, None] == table.accelerator
        # Both jobs of a pair have one scale, and take their accelerators once.
        first = self._first
        servers = tuple(
            cp.sum(cp.multiply(parts[problem.kind[first]], X)) <= servers * whole
            for _, parts, servers in server_rows(table)
        )
        return Valid(
            self._contains @ cp.sum(X, axis=1) <= whole,
            types.astype(float) @ cp.sum(cp.multiply(problem.uses[first], X), axis=0)
            <= table.counts * whole,
            servers,
        )

    def dollars_per_second(self, X: cp.Variable) -> cp.Expression:
        """Sum of cost(m, X), 6.4.2: every accelerator in use costs its price."""
        dollars = self.problem.uses[self._first] * self._prices()
        total: cp.Expression = cp.sum(cp.multiply(dollars, X))
        return total

    def cheapest_dollars_per_step(self) -> Floats:
        """Dollars of a step of each job on its cheapest worker type, shape (jobs,)."""
        dollars_per_second = self.problem.uses * self._prices()
        with np.errstate(divide="ignore"):
            return np.asarray((dollars_per_second / self.alone).min(axis=1))

    def solved(
        self,
        X: cp.Variable,
        objective: cp.Maximize | cp.Minimize,
        valid: Valid,
        others: Sequence[cp.Constraint] = (),
        convert: Callable[[float], float] = float,
        whole: cp.Variable | None = None,
    ) -> Specified | Status:
        """The optimum, or how the search for it ended; X / ``whole`` is the allocation."""
        program = Convex(cp.Problem(objective, [*valid, *others]), X)
        left = replace(self.limits, seconds=self.limits.left(perf_counter() - self.began))
        answer = solve(program, None, left)
        if answer.values is None or answer.objective is None:
            return answer.status
        shares = answer.values / (1.0 if whole is None else np.asarray(whole.value).item())
        return Specified(
            convert(answer.objective),
            self.combinations,
            shares,
            self.rates @ shares.reshape(-1),
            valid.duals(),
            answer.backend,
        )

    @property
    def _first(self) -> Ints:
        return np.array([members[0] for members in self.combinations])

    @property
    def _contains(self) -> sparse.csr_array:
        """1 where a job is in a combination, shape (jobs, combinations)."""
        entries = [(job, k) for k, members in enumerate(self.combinations) for job in members]
        shape = (len(self.problem), len(self.combinations))
        return sparse.csr_array((np.ones(len(entries)), np.array(entries).T), shape=shape)

    def _prices(self) -> Floats:
        """Dollars per second of an accelerator of each worker type."""
        return prices(self.problem) / SECONDS_PER_HOUR


def _members(problem: AllocationProblem) -> list[Ints]:
    """The jobs of each kind."""
    return [np.flatnonzero(problem.kind == kind) for kind in range(len(problem.table.kinds))]


def require_small(problem: AllocationProblem) -> None:
    """Refuse too many variables."""
    members = _members(problem)
    pairs = _together(problem.table)
    size = sum(len(members[first]) * len(members[second]) for first, second in pairs)
    if (len(problem) + size) * len(problem.table.workers) > _MOST_VARIABLES:
        raise InputError(
            f"{len(problem)} jobs and their {size} pairs are too many to write out in full: "
            "backend 'cvxpy' is for small clusters"
        )


def setting(
    problem: AllocationProblem, limits: Limits = UNLIMITED, budget_dollars: float | None = None
) -> RateSetting:
    """T of all jobs, and of all pairs of distinct jobs whose kinds the problem pairs.

    Raises InputError if that is too many variables.
    """
    require_small(problem)
    together, members = _together(problem.table), _members(problem)
    pairs = [
        (pair, rates)
        for (first, second), rates in together.items()
        for pair in product(members[first].tolist(), members[second].tolist())
        if pair[0] != pair[1]
    ]
    combinations = [*((job,) for job in range(len(problem))), *(pair for pair, _ in pairs)]
    both = np.array([rates for _, rates in pairs]).reshape(-1, 2, len(problem.table.workers))
    runs = np.concatenate([problem.rates > 0, ~np.isnan(both[:, 0])])
    rates = _rates(problem.rates, [pair for pair, _ in pairs], np.nan_to_num(both))
    return RateSetting(
        problem, tuple(combinations), rates, runs, limits, perf_counter(), budget_dollars
    )


def _together(table: RateTable) -> dict[tuple[int, int], Floats]:
    """Both kinds' rates on each worker type, shape (2, workers), nan where they do not share."""
    found: dict[tuple[int, int], Floats] = {}
    for first, second, worker, rates in zip(
        table.first.tolist(), table.second.tolist(), table.worker, table.paired, strict=True
    ):
        both = found.setdefault((first, second), np.full((2, len(table.workers)), np.nan))
        both[:, worker] = rates
    return found


def _rates(alone: Floats, pairs: list[tuple[int, int]], both: Floats) -> sparse.csr_array:
    """T of single jobs, (jobs, workers), and of pairs, (pairs, 2, workers), as a setting has it."""
    jobs, workers = alone.shape
    number = np.repeat(jobs + np.arange(len(pairs)), 2)
    combination = np.concatenate([np.arange(jobs), number])
    job = np.concatenate([np.arange(jobs), np.array(pairs, dtype=np.int64).reshape(-1)])
    values = np.concatenate([alone, both.reshape(-1, workers)])
    columns = combination[:, None] * workers + np.arange(workers)
    entries = values.reshape(-1), (np.repeat(job, workers), columns.reshape(-1))
    shape = (jobs, (jobs + len(pairs)) * workers)
    return sparse.csr_array(sparse.coo_array(entries, shape=shape))
