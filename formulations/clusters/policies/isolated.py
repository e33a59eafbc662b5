"""Baselines that divide every type of accelerator in fixed parts (thesis 5.4.2, 5.7.3).

X^isolated gives each of n jobs 1/n of every type, divided by its scale, at most all of its time.
A static partition gives every entity, or without entities every job, a part in proportion to its
weight; an entity divides its part among its jobs. An unused part stays idle.

Both are judged by the least normalised throughput of max-min fairness, at the weights by which
they divide.
"""

import numpy as np

from stagewright.formulations.clusters.allocation import (
    Allocation,
    AllocationProblem,
    allocation_of_shares,
    throughput,
)
from stagewright.formulations.clusters.policies import max_min
from stagewright.formulations.clusters.rates import server_rows
from stagewright.graphs.documents.arrays import Floats, Ints


def divided(problem: AllocationProblem, part: Floats) -> Floats:
    """Shares of time of jobs that have ``part`` of every type, shape (jobs, workers).

    Where placement counts, a job has its part of the servers too; the time for which that is too
    little for its accelerators together, they are spread.
    """
    table, uses = problem.table, problem.uses
    left, chosen = problem.parted(part)
    counts = np.take_along_axis(uses, chosen, axis=1)
    most = np.full(uses.shape, np.inf)
    for _, parts, servers in server_rows(table):
        of_job = parts[problem.kind]
        fit = np.full(uses.shape, np.inf)
        np.divide(part[:, None] * servers, of_job, out=fit, where=of_job > 0)
        most = np.minimum(most, fit)
    shares = np.zeros_like(most)
    jobs = np.arange(len(problem))
    for workers in np.argsort(-problem.rates, axis=1, kind="stable").T:
        types = table.accelerator[workers]
        given = np.minimum(left[jobs, types], most[jobs, workers])
        runs = problem.rates[jobs, workers] > 0
        given = np.where(runs & (uses[jobs, workers] == counts[jobs, types]), given, 0.0)
        shares[jobs, workers] = given
        left[jobs, types] -= given
    return shares


def isolated(problem: AllocationProblem) -> Allocation:
    """X^isolated."""
    return allocation_of_shares(divided(problem, np.full(len(problem), 1 / len(problem))))


def static_parts(problem: AllocationProblem) -> Floats:
    """Each job's part of every type in a static partition, shape (jobs,).

    An entity without jobs keeps its part. One that serves its jobs in order gives each as much as
    it can use.
    """
    if not problem.entities:
        return np.asarray(problem.weight / problem.weight.sum())
    entities, parts = problem.entities, np.zeros(len(problem))
    siblings: dict[str | None, float] = {}
    for entity in entities:
        siblings[entity.parent] = siblings.get(entity.parent, 0.0) + entity.weight
    by_name = {entity.name: entity for entity in entities}
    for number, entity in enumerate(entities):
        part, above = entity.weight / siblings[entity.parent], entity.parent
        while above is not None:
            part *= by_name[above].weight / siblings[by_name[above].parent]
            above = by_name[above].parent
        jobs = np.flatnonzero(problem.entity == number)
        if entity.discipline == "fifo":
            parts[jobs] = _in_order(problem, jobs, part)
        else:
            parts[jobs] = part * problem.weight[jobs] / problem.weight[jobs].sum()
    return parts


def _in_order(problem: AllocationProblem, jobs: Ints, part: float) -> Floats:
    """Each job's part of a static ``part`` that the jobs fill one after the other."""
    runs = np.zeros((len(jobs), len(problem.table.counts)), dtype=bool)
    for worker, accelerator in enumerate(problem.table.accelerator):
        runs[:, accelerator] |= problem.rates[jobs, worker] > 0
    enough = problem.scale[jobs] / (runs @ problem.table.counts)
    taken = np.minimum(np.cumsum(enough), part)
    return np.diff(taken, prepend=0.0)


def weighted(problem: AllocationProblem, part: Floats) -> Floats:
    """Steps per second at which a job's throughput, normalised by its part, is 1."""
    return max_min.needs(problem) / problem.weight * part * len(problem)


def objective(problem: AllocationProblem, allocation: Allocation, part: Floats) -> float:
    """The least normalised throughput, among the jobs that have a part."""
    has = part > 0
    return float((throughput(problem, allocation)[has] / weighted(problem, part)[has]).min())
