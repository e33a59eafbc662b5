"""The policies as the thesis writes them, in CVXPY: the readable reference of ``solvers.policies``.

Narayanan, PhD thesis (2021), sections 5.3.1 to 5.4.3 and 6.4. There is one variable for every job
(and, with space sharing, every pair of jobs) and worker type, from the throughputs as they were
given: no groups of like jobs, no pair left out. Slow, for small instances.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations

import cvxpy as cp
import numpy as np

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.rates import server_rows
from stagewright.graphs.documents.arrays import Bools, Floats
from stagewright.graphs.workloads.jobs import PairRate, Throughputs

SECONDS_PER_HOUR = 3600.0
STUCK = 1e-6
"""A job that cannot gain more than this, relatively, without another's loss is a bottleneck."""


@dataclass(frozen=True, slots=True, eq=False)
class Specified:
    """An optimal X: ``shares`` of time, (combinations, workers), and each job's throughput.

    A combination is a job alone, (m,), or a pair (m, n).
    """

    objective: float
    combinations: tuple[tuple[int, ...], ...]
    shares: Floats
    throughput: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What a policy is given. ``rates[m, k, j]`` is T_kjm: job m's in combination k on worker j.

    ``runs[k, j]`` says whether combination k may run on worker j.
    """

    problem: AllocationProblem
    combinations: tuple[tuple[int, ...], ...]
    rates: Floats
    runs: Bools

    @property
    def alone(self) -> Floats:
        """T without space sharing, shape (jobs, workers)."""
        jobs = range(len(self.problem))
        return np.array([self.rates[job, self.combinations.index((job,))] for job in jobs])

    @property
    def fastest(self) -> Floats:
        """throughput(m, X^fastest): all of the time on the fastest worker type, shape (jobs,)."""
        return np.asarray(self.alone.max(axis=1))

    @property
    def of_type(self) -> Floats:
        """Rates alone on each type of accelerator, at its better placement, shape (jobs, types)."""
        table = self.problem.table
        return np.array(
            [
                self.alone[:, table.accelerator == number].max(axis=1)
                for number in range(len(table.pool.accelerators))
            ]
        ).T

    @property
    def equal(self) -> Floats:
        """throughput(m, X^equal), 5.4.1: time is split evenly over the cluster's accelerators."""
        counts = self.problem.table.counts
        return np.asarray(self.of_type @ (counts / counts.sum()))

    @property
    def isolated(self) -> Floats:
        """throughput(m, X^isolated), 5.4.2: 1/n of every type, and no more time than there is."""
        found = []
        for rates, scale in zip(self.of_type, self.problem.scale, strict=True):
            share = self.problem.table.counts / (scale * len(self.problem))
            found.append(rates @ share / max(1.0, share.sum()))
        return np.array(found)

    def variable(self) -> cp.Variable:
        """X, 0 where a combination does not run."""
        return cp.Variable(self.runs.shape, bounds=[0, np.where(self.runs, np.inf, 0.0)])

    def throughput(self, X: cp.Variable) -> cp.Expression:
        """throughput(m, X) for all m: the sum of T_kjm X_kj over combinations and workers."""
        every: cp.Expression = self.rates.reshape(len(self.problem), -1) @ cp.vec(X, order="C")
        return every

    def is_valid(self, X: cp.Variable, whole: cp.Expression | float = 1.0) -> list[cp.Constraint]:
        """Equations 5.1 to 5.3 with C_m, placement, and servers, of ``X`` / ``whole``."""
        table, jobs = self.problem.table, range(len(self.problem))
        contains = np.array([[m in members for members in self.combinations] for m in jobs])
        types = np.arange(len(table.counts))[:, None] == table.accelerator
        # Both jobs of a pair have one scale, and take their accelerators once.
        first = [members[0] for members in self.combinations]
        constraints = [
            contains.astype(float) @ cp.sum(X, axis=1) <= whole,
            types.astype(float) @ (self.problem.scale[first] @ X) <= table.counts * whole,
        ]
        for worker, servers_per_job, servers in server_rows(table):
            needed = servers_per_job[self.problem.kind[first]] @ X[:, worker]
            constraints.append(needed <= servers * whole)
        return constraints

    def dollars_per_second(self, X: cp.Variable) -> cp.Expression:
        """Sum of cost(m, X), 6.4.2: every accelerator in use costs its price."""
        first = [members[0] for members in self.combinations]
        total: cp.Expression = cp.sum((self.problem.scale[first] @ X) @ self._prices())
        return total

    def cheapest_dollars_per_step(self) -> Floats:
        """What a step of each job costs on the worker type where it costs least, shape (jobs,)."""
        dollars_per_second = self.problem.scale[:, None] * self._prices()
        with np.errstate(divide="ignore"):
            return np.asarray((dollars_per_second / self.alone).min(axis=1))

    def _prices(self) -> Floats:
        """Dollars per second of an accelerator of each worker type."""
        accelerators = self.problem.table.pool.accelerators
        prices = [accelerators[j].dollars_per_hour for j in self.problem.table.accelerator]
        return np.array(prices, dtype=float) / SECONDS_PER_HOUR


def specify(
    problem: AllocationProblem, throughputs: Throughputs, *, space_sharing: bool = False
) -> Setting:
    """T of all jobs and, with space sharing, of all pairs of distinct jobs of equal scale."""
    alone = _alone(problem, throughputs)
    combinations: list[tuple[int, ...]] = [(job,) for job in range(len(problem))]
    rates, runs = list(np.eye(len(problem))[:, :, None] * alone), list(alone > 0)
    for pair in permutations(range(len(problem)), 2) if space_sharing else ():
        together = _together(problem, throughputs, pair)
        both_run = (alone[list(pair)] > 0).all(axis=0)
        if together is not None:
            combinations.append(pair)
            rates.append(np.zeros_like(alone))
            rates[-1][list(pair)] = np.nan_to_num(together) * both_run
            runs.append(~np.isnan(together).any(axis=0) & both_run)
    return Setting(problem, tuple(combinations), np.array(rates).swapaxes(0, 1), np.array(runs))


def specify_agnostic(
    problem: AllocationProblem, throughputs: Throughputs, *, alike: bool
) -> Setting:
    """T of a policy that takes all accelerators for alike.

    A job runs at 1 wherever it runs or, where jobs are not ``alike``, at its best rate.
    """
    aware = specify(problem, throughputs)
    rate = 1.0 if alike else aware.fastest[:, None, None]
    return Setting(problem, aware.combinations, np.where(aware.rates > 0, rate, 0.0), aware.runs)


def _alone(problem: AllocationProblem, throughputs: Throughputs) -> Floats:
    found = np.zeros((len(problem), len(problem.table.workers)))
    known = {(rate.model, rate.scale, rate.accelerator): rate for rate in throughputs.alone}
    for job, kind in enumerate(problem.kind):
        model, scale = problem.table.kinds[kind]
        for column, worker in enumerate(problem.table.workers):
            accelerator = problem.table.pool.accelerators[worker.accelerator]
            rate = known[model, scale, accelerator.name]
            is_spread = worker.placement == "spread"
            if scale <= accelerator.count and not (is_spread and scale == 1):
                found[job, column] = (
                    rate.spread_steps_per_second or 0.0 if is_spread else rate.steps_per_second
                )
    return found


def _together(
    problem: AllocationProblem, throughputs: Throughputs, pair: tuple[int, int]
) -> Floats | None:
    """Both jobs' rates on each worker type, shape (2, workers), nan where unknown; None: nowhere.

    Of two jobs of one model either may be the first.
    """
    (model, scale), (other, other_scale) = (
        problem.table.kinds[problem.kind[member]] for member in pair
    )
    mine = [
        rate
        for rate in throughputs.pairs
        if rate.models == (model, other) and rate.scale == scale == other_scale
    ]
    found = np.full((2, len(problem.table.workers)), np.nan)
    for column, worker in enumerate(problem.table.workers):
        name = problem.table.pool.names[worker.accelerator]
        for rate in mine:
            if rate.accelerator == name:
                found[:, column] = _placed(rate, worker.placement)
    return None if np.isnan(found).all() else found


def _placed(rate: PairRate, placement: str | None) -> tuple[float, float]:
    if placement == "spread":
        return rate.spread_steps_per_second or (np.nan, np.nan)
    return rate.steps_per_second


def max_min(given: Setting) -> Specified | None:
    """5.4.1: maximise the least 1/w_m throughput(m, X) / throughput(m, X^equal) scale_m."""
    X, problem = given.variable(), given.problem
    factor = problem.scale / (problem.weight * given.equal)
    objective = cp.Maximize(cp.min(cp.multiply(factor, given.throughput(X))))
    return _solved(given, X, objective, given.is_valid(X))


def makespan(given: Setting) -> Specified | None:
    """5.4.2: minimise the largest num_steps_m / throughput(m, X); its inverse is concave."""
    X = given.variable()
    inverse = cp.min(cp.multiply(1 / given.problem.steps, given.throughput(X)))
    return _solved(given, X, cp.Maximize(inverse), given.is_valid(X), lambda value: 1 / value)


def finish_time_fairness(given: Setting) -> Specified | None:
    """5.4.2 (Themis): minimise the largest of the time until a job is done / that on 1/n."""
    X, problem = given.variable(), given.problem
    on_its_own = problem.isolated_seconds + problem.steps / given.isolated
    # inv_pos of a number near 1 is what interior points do well.
    speed = cp.multiply(1 / given.fastest, given.throughput(X))
    seconds = problem.elapsed_seconds + cp.multiply(
        problem.steps / given.fastest, cp.inv_pos(speed)
    )
    rho = cp.max(cp.multiply(1 / on_its_own, seconds))
    return _solved(given, X, cp.Minimize(rho), given.is_valid(X))


def fifo(given: Setting) -> Specified | None:
    """5.4.2: maximise the sum of throughput(m, X) / throughput(m, X^fastest) (M - m), m from 0."""
    X, jobs = given.variable(), len(given.problem)
    factor = (jobs - np.arange(jobs)) / given.fastest
    return _solved(given, X, cp.Maximize(factor @ given.throughput(X)), given.is_valid(X))


def shortest_job_first(given: Setting) -> Specified | None:
    """5.4.2: minimise the duration of the shortest job, num_steps_m / throughput(m, X)."""
    answers = []
    for job, steps in enumerate(given.problem.steps):
        X = given.variable()
        objective = cp.Maximize(given.throughput(X)[job] / steps)
        answers.append(_solved(given, X, objective, given.is_valid(X), lambda value: 1 / value))
    return min((answer for answer in answers if answer), key=lambda answer: answer.objective)


def max_throughput(given: Setting) -> Specified | None:
    """6.4.1, with jobs made comparable: maximise the sum of throughput / fastest throughput."""
    X = given.variable()
    objective = cp.Maximize(cp.sum(cp.multiply(1 / given.fastest, given.throughput(X))))
    return _solved(given, X, objective, given.is_valid(X))


def min_cost(given: Setting, *, deadlines: bool = False) -> Specified | None:
    """6.4.2 as the ratio of sums: maximise steps' least dollars per dollar that is spent.

    The steps of different models are added at what they cost where they cost least. With
    ``deadlines``, throughput(m, X) >= num_steps_m / SLO_m (6.4.3). Y = X / cost(X), of which
    ``whole`` is 1 / cost(X), makes the linear-fractional program linear (Charnes and Cooper, 1962).
    """
    Y, whole, problem = given.variable(), cp.Variable(nonneg=True), given.problem
    throughput = given.throughput(Y)
    constraints = [*given.is_valid(Y, whole), given.dollars_per_second(Y) == 1]
    if deadlines:
        least = problem.steps / problem.deadline_seconds  # 0 where there is no SLO
        constraints += [throughput >= least * whole]
    objective = cp.Maximize(given.cheapest_dollars_per_step() @ throughput)
    return _solved(given, Y, objective, constraints, whole=whole)


def min_cost_slo(given: Setting) -> Specified | None:
    """6.4.3: :func:`min_cost` such that every job meets its SLO; None where they cannot."""
    return min_cost(given, deadlines=True)


def makespan_budget(given: Setting, budget_dollars: float) -> Specified | None:
    """6.4.3: the least M such that every job is done by M and M sum_m cost(m, X) <= B.

    Linear in Y = M X, the seconds of each combination on each worker type.
    """
    Y, M = given.variable(), cp.Variable(nonneg=True)
    constraints = [
        *given.is_valid(Y, M),
        given.throughput(Y) >= given.problem.steps,
        given.dollars_per_second(Y) <= budget_dollars,
    ]
    return _solved(given, Y, cp.Minimize(M), constraints, whole=M)


def water_filling(given: Setting) -> Specified | None:
    """5.4.3 at one level: raise all jobs alike; one that is stuck stays; go on with the rest."""
    return _filled(given, lambda stuck: given.problem.weight * ~stuck)


def hierarchical(given: Setting) -> Specified | None:
    """5.4.3: water-filling by entities' weights; what is stuck leaves its part to its siblings."""
    return _filled(given, lambda stuck: _parts(given.problem, None, ~stuck))


def _filled(given: Setting, weights: Callable[[Bools], Floats]) -> Specified | None:
    """Maximise the least 1/w_m (throughput / equal - t_m) scale_m over w_m > 0, again and again.

    t_m is what job m was sure of before. A job is stuck that can gain nothing while every other
    keeps what it is sure of.
    """
    sure, stuck = np.zeros(len(given.problem)), np.zeros(len(given.problem), dtype=bool)
    answer = None
    while (weight := weights(stuck)).any():
        X, theta = given.variable(), cp.Variable()
        unit = weight * given.equal / given.problem.scale
        constraints = [*given.is_valid(X), given.throughput(X) >= sure + cp.multiply(theta, unit)]
        answer = _solved(given, X, cp.Maximize(theta), constraints)
        if answer is None:
            return None
        sure = (sure + answer.objective * unit) * (1 - 1e-10)  # in spite of rounding
        newly = [job for job in np.flatnonzero(weight).tolist() if _is_stuck(given, job, sure)]
        if not newly:
            raise RuntimeError("no job is stuck at the highest level: rounding exceeds STUCK")
        stuck[newly] = True
    return answer


def _parts(problem: AllocationProblem, owner: str | None, live: Bools) -> Floats:
    """Each job's part of what ``owner`` (None: the cluster) has; 0 if no job below is live."""
    found = np.zeros(len(problem))
    for number, entity in enumerate(problem.entities):
        mine = live & (problem.entity == number)
        if entity.name == owner and mine.any():
            if entity.discipline == "fifo":
                found[mine.argmax()] = 1.0
            else:
                found[mine] = problem.weight[mine]
        if entity.parent == owner:
            found += entity.weight * _parts(problem, entity.name, live)
    return found / (found.sum() or 1.0)


def _is_stuck(given: Setting, job: int, least: Floats) -> bool:
    X = given.variable()
    throughput = given.throughput(X)
    others = np.arange(len(least)) != job
    constraints = [*given.is_valid(X), throughput >= least * others]
    best = _solved(given, X, cp.Maximize(throughput[job] / given.fastest[job]), constraints)
    return best is not None and bool(
        best.throughput[job] <= least[job] + STUCK * given.fastest[job]
    )


def _solved(
    given: Setting,
    X: cp.Variable,
    objective: cp.Maximize | cp.Minimize,
    constraints: list[cp.Constraint],
    convert: Callable[[float], float] = float,
    whole: cp.Variable | None = None,
) -> Specified | None:
    """The optimum, None if there is no valid X; X / ``whole`` is the allocation."""
    question = cp.Problem(objective, constraints)
    if objective.args[0].is_pwl():
        question.solve(solver=cp.HIGHS, ignore_dpp=True)
    else:
        with np.errstate(divide="ignore"):  # inv_pos at the starting point
            question.solve(solver=cp.CLARABEL, tol_gap_rel=1e-10, tol_gap_abs=1e-10)
    if question.status != cp.OPTIMAL:
        return None
    shares = np.asarray(X.value) / (1.0 if whole is None else np.asarray(whole.value).item())
    throughput = np.einsum("mkj,kj->m", given.rates, shares)
    return Specified(convert(float(question.value)), given.combinations, shares, throughput)
