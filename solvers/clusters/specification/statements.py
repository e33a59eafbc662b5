"""Each policy that the thesis states as a program, in its words.

Narayanan, PhD thesis (2021), sections 5.4.1 to 5.4.3 and 6.4. A statement answers with an optimal
X, or with the status that its program ended in.
"""

from collections.abc import Callable
from dataclasses import replace

import cvxpy as cp
import numpy as np

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import cost
from stagewright.formulations.clusters.policies.cost import positive_prices, require_budget
from stagewright.formulations.forms.answers import Status
from stagewright.graphs.documents.arrays import Bools, Floats
from stagewright.solvers.backends.backend import UnknownStatusError
from stagewright.solvers.clusters.specification.setting import RateSetting, Specified

STUCK = 1e-6
"""A job that cannot gain more than this, relatively, without another's loss is a bottleneck."""


def max_min(given: RateSetting) -> Specified | Status:
    """5.4.1: maximise the least 1/w_m throughput(m, X) / throughput(m, X^equal) scale_m."""
    X, problem = given.variable(), given.problem
    factor = 1 / (problem.weight * given.fair)
    objective = cp.Maximize(cp.min(cp.multiply(factor, given.throughput(X))))
    return given.solved(X, objective, given.valid(X))


def makespan(given: RateSetting) -> Specified | Status:
    """5.4.2: minimise the largest num_steps_m / throughput(m, X); its inverse is concave."""
    X = given.variable()
    inverse = cp.min(cp.multiply(1 / given.problem.steps, given.throughput(X)))
    return given.solved(X, cp.Maximize(inverse), given.valid(X), convert=lambda value: 1 / value)


def finish_time_fairness(given: RateSetting) -> Specified | Status:
    """5.4.2 (Themis): minimise the largest of the time until a job is done / that on 1/n."""
    X, problem = given.variable(), given.problem
    on_its_own = problem.isolated_seconds + problem.steps / given.isolated
    # inv_pos of a number near 1 is what interior points do well.
    speed = cp.multiply(1 / given.fastest, given.throughput(X))
    seconds = problem.elapsed_seconds + cp.multiply(
        problem.steps / given.fastest, cp.inv_pos(speed)
    )
    rho = cp.max(cp.multiply(1 / on_its_own, seconds))
    return given.solved(X, cp.Minimize(rho), given.valid(X))


def fifo(given: RateSetting) -> Specified | Status:
    """5.4.2: maximise the sum of throughput(m, X) / throughput(m, X^fastest) (M - m), m from 0."""
    X, jobs = given.variable(), len(given.problem)
    factor = (jobs - np.arange(jobs)) / given.fastest
    return given.solved(X, cp.Maximize(factor @ given.throughput(X)), given.valid(X))


def shortest_job_first(given: RateSetting) -> Specified | Status:
    """5.4.2: minimise the duration of the shortest job, num_steps_m / throughput(m, X)."""
    answers = []
    for job, steps in enumerate(given.problem.steps):
        X = given.variable()
        objective = cp.Maximize(given.throughput(X)[job] / steps)
        answer = given.solved(X, objective, given.valid(X), convert=lambda value: 1 / value)
        if not isinstance(answer, Specified):
            return answer
        answers.append(answer)
    return min(answers, key=lambda answer: answer.objective)


def max_throughput(given: RateSetting) -> Specified | Status:
    """6.4.1, with jobs made comparable: maximise the sum of throughput / fastest throughput."""
    X = given.variable()
    objective = cp.Maximize(cp.sum(cp.multiply(1 / given.fastest, given.throughput(X))))
    return given.solved(X, objective, given.valid(X))


def min_cost(given: RateSetting, *, deadlines: bool = False) -> Specified | Status:
    """6.4.2 as the ratio of sums: maximise steps' least dollars per dollar that is spent.

    The steps of different models are added at what they cost where they cost least. With
    ``deadlines``, throughput(m, X) >= num_steps_m / SLO_m (6.4.3). Y = X / cost(X), of which
    ``whole`` is 1 / cost(X), makes the linear-fractional program linear (Charnes and Cooper, 1962).
    """
    Y, whole, problem = given.variable(), cp.Variable(nonneg=True), given.problem
    throughput = given.throughput(Y)
    positive_prices(problem)
    others = [given.dollars_per_second(Y) == 1]
    if deadlines:
        others += [throughput >= cost.needs(problem) * whole]
    objective = cp.Maximize(given.cheapest_dollars_per_step() @ throughput)
    return given.solved(Y, objective, given.valid(Y, whole), others, whole=whole)


def min_cost_slo(given: RateSetting) -> Specified | Status:
    """6.4.3: :func:`min_cost` such that every job meets its SLO; infeasible where they cannot."""
    return min_cost(given, deadlines=True)


def makespan_budget(given: RateSetting) -> Specified | Status:
    """6.4.3: the least M such that every job is done by M and M sum_m cost(m, X) <= B.

    Linear in Y = M X, the seconds of each combination on each worker type.
    """
    Y, M = given.variable(), cp.Variable(nonneg=True)
    others = [
        given.throughput(Y) >= given.problem.steps,
        given.dollars_per_second(Y) <= require_budget(given.budget_dollars),
    ]
    return given.solved(Y, cp.Minimize(M), given.valid(Y, M), others, whole=M)


def water_filling(given: RateSetting) -> Specified | Status:
    """5.4.3 at one level: raise all jobs alike; one that is stuck stays; go on with the rest."""
    return _filled(given, lambda stuck: given.problem.weight * ~stuck)


def hierarchical(given: RateSetting) -> Specified | Status:
    """5.4.3: water-filling by entities' weights; stuck entities leave their part to siblings."""
    entities = given.problem.entities
    if not entities:
        return water_filling(given)
    total = sum(entity.weight for entity in entities if entity.parent is None)
    return _filled(given, lambda stuck: total * _parts(given.problem, None, ~stuck))


def _filled(given: RateSetting, weights: Callable[[Bools], Floats]) -> Specified | Status:
    """Maximise the least 1/w_m (throughput / equal - t_m) scale_m over w_m > 0, again and again.

    t_m is what job m was sure of before. A job is stuck that can gain nothing while every other
    keeps what it is sure of. The objective is that of the first round.
    """
    sure, stuck = np.zeros(len(given.problem)), np.zeros(len(given.problem), dtype=bool)
    levels: list[float] = []
    while True:
        weight = weights(stuck)
        unit = weight * given.fair
        answer = _raised(given, sure, unit)
        if not isinstance(answer, Specified):
            return answer
        levels.append(answer.objective)
        sure = (sure + answer.objective * unit) * (1 - 1e-10)  # in spite of rounding
        newly = _newly_stuck(given, sure, weight)
        if isinstance(newly, Status):
            return newly
        stuck |= newly
        if stuck.all():
            return replace(answer, objective=levels[0])


def _raised(given: RateSetting, sure: Floats, unit: Floats) -> Specified | Status:
    """A round: every job gets its guaranteed throughput, and theta units more."""
    X, theta = given.variable(), cp.Variable()
    rising = given.throughput(X) >= sure + cp.multiply(theta, unit)
    return given.solved(X, cp.Maximize(theta), given.valid(X), [rising])


def _newly_stuck(given: RateSetting, sure: Floats, weight: Floats) -> Bools | Status:
    """The rising jobs that can gain nothing while every other job keeps its part."""
    found = np.zeros(len(sure), dtype=bool)
    for job in np.flatnonzero(weight).tolist():
        X = given.variable()
        throughput = given.throughput(X)
        others = throughput >= sure * (np.arange(len(sure)) != job)
        objective = cp.Maximize(throughput[job] / given.fastest[job])
        best = given.solved(X, objective, given.valid(X), [others])
        if not isinstance(best, Specified):
            return best
        found[job] = best.throughput[job] <= sure[job] + STUCK * given.fastest[job]
    if not found.any():
        raise UnknownStatusError("no job is stuck at the highest level: rounding exceeds 1e-6")
    return found


def _parts(problem: AllocationProblem, owner: str | None, live: Bools) -> Floats:
    """Each job's part of ``owner``'s share (None: the cluster's); 0 if no job below is live."""
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
