"""Gandiva's ad-hoc packing (thesis 5.7.3; Xiao et al., OSDI 2018): equal time, chance pairs.

If the jobs ask for more accelerators than there are, jobs of equal scale are paired at random.
A pair that does no more than taking turns, on every type, is given up; where another pair does no
more on one type, its jobs take turns there. All pairs and single jobs have the same part of every
type. The random numbers are drawn anew for every problem, so that equal problems have equal
answers.
"""

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.clusters.policies import isolated, max_min
from stagewright.formulations.forms.answers import Limits
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.policies.isolated import judged


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """Nothing is optimised; the bound is that of max-min fairness with space sharing."""
    partner = _partners(problem, np.random.default_rng(limits.seed))
    allocation = _equal_time(problem, partner)
    return judged(
        problem, allocation, max_min.needs(problem), max_min.objective(problem, allocation), limits
    )


def _useful(problem: AllocationProblem) -> set[tuple[int, int, int]]:
    """(first kind, second kind, worker) of the pairs that do more than taking turns."""
    table = problem.table
    return set(zip(table.first.tolist(), table.second.tolist(), table.worker.tolist(), strict=True))


def _partners(problem: AllocationProblem, random: np.random.Generator) -> Ints:
    """Each job's partner, or -1; shape (jobs,)."""
    partner = np.full(len(problem), -1)
    if problem.scale.sum() <= problem.table.counts.sum():
        return partner
    together = {(first, second) for first, second, _ in _useful(problem)}
    for scale in np.unique(problem.scale):
        drawn = random.permutation(np.flatnonzero(problem.scale == scale))
        for a, b in zip(drawn[::2].tolist(), drawn[1::2].tolist(), strict=False):
            if tuple(sorted((int(problem.kind[a]), int(problem.kind[b])))) in together:
                partner[a], partner[b] = b, a
    return partner


def _equal_time(problem: AllocationProblem, partner: Ints) -> Allocation:
    """Every pair, listed as its job of the first kind, and every single job has an equal part."""
    kind, jobs = problem.kind, np.arange(len(problem))
    leads = (kind < kind[partner]) | ((kind == kind[partner]) & (jobs < partner)) | (partner < 0)
    shares = isolated.divided(problem, leads / leads.sum())
    useful = _useful(problem)
    rows: list[tuple[int, int, int, float]] = []
    for job, worker in zip(*(found.tolist() for found in np.nonzero(shares)), strict=True):
        other, share = int(partner[job]), float(shares[job, worker])
        rows.extend(_rows(problem.rates, useful, kind, (job, other), worker, share))
    job_of, partner_of, worker_of, share_of = zip(*rows, strict=True)
    return Allocation(
        np.array(job_of), np.array(partner_of), np.array(worker_of), np.array(share_of)
    )


def _rows(
    rates: Floats,
    useful: set[tuple[int, int, int]],
    kind: Ints,
    jobs: tuple[int, int],
    worker: int,
    share: float,
) -> list[tuple[int, int, int, float]]:
    """A single job, a pair, or two jobs that take turns on ``worker``."""
    job, other = jobs
    if other < 0:
        return [(job, -1, worker, share)]
    if (int(kind[job]), int(kind[other]), worker) in useful:
        return [(job, other, worker, share)]
    able = [one for one in jobs if rates[one, worker] > 0]
    return [(one, -1, worker, share / len(able)) for one in able]
