"""AlloX (Le et al., EuroSys 2020): queues of minimum mean completion time.

The k-th job from the end of an accelerator's queue delays itself and the k - 1 jobs after it: it
adds k times its duration to the sum of completion times. So the best queues are a matching of
minimum cost of jobs to places (accelerator, k). Accelerators of a type are equal: of each type,
``count`` jobs fit on each k. Jobs have one accelerator, and are not preempted.
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError, InvalidPlan


@dataclass(frozen=True, slots=True, eq=False)
class Matching:
    """Variable i puts ``job[i]`` on ``worker[i]``, ``position[i]`` from the end (1 is the last).

    The form counts in ``unit_seconds``.
    """

    form: LinearProgram
    job: Ints
    worker: Ints
    position: Ints
    unit_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Queues:
    """The queue of each job, and how many jobs are after it, including itself; shape (jobs,)."""

    worker: Ints
    position: Ints


def require_single(problem: AllocationProblem) -> None:
    """Refuse jobs that ask for several accelerators."""
    if (problem.scale > 1).any():
        first = int(np.argmax(problem.scale > 1))
        raise InputError(
            f"job {problem.names[first]!r}: AlloX places jobs of one accelerator, this one asks "
            f"for {problem.scale[first]}; choose another policy, for example max-min"
        )


def matching(problem: AllocationProblem) -> Matching:
    """The transportation problem, in which all vertices are matchings.

    Of each type, accelerators' queues differ by one job at most, so no position beyond jobs over
    count, rounded up, is of use.

    Raises InputError if a job asks for several accelerators.
    """
    require_single(problem)
    jobs, counts = len(problem), problem.table.counts[problem.table.accelerator]
    longest = -(-jobs // counts)
    slot_worker = np.repeat(np.arange(len(counts)), longest)
    slot_position = np.concatenate([np.arange(1, length + 1) for length in longest])
    job, slot = np.nonzero(problem.rates[:, slot_worker] > 0)
    worker, position = slot_worker[slot], slot_position[slot]
    cost = position * problem.steps[job] / problem.rates[job, worker]
    unit = float(cost.mean())
    at = np.arange(len(job))
    ones = np.ones(len(job))
    matrix = sparse.vstack(
        [
            sparse.csr_array((ones, (job, at)), shape=(jobs, len(at))),
            sparse.csr_array((ones, (slot, at)), shape=(len(slot_worker), len(at))),
        ],
        format="csr",
    )
    form = LinearProgram(
        cost / unit,
        sparse.csr_array(matrix),
        np.concatenate([np.ones(jobs), np.full(len(slot_worker), -np.inf)]),
        np.concatenate([np.ones(jobs), counts[slot_worker].astype(float)]),
        np.zeros(len(at)),
        ones,
        np.zeros(len(at), dtype=bool),
    )
    return Matching(form, job, worker, position, unit)


def queues(problem: AllocationProblem, asked: Matching, chosen: Floats) -> Queues:
    """The queues of the matching's variables.

    Raises InvalidPlan if they are no matching: a solver's answer between two of them.
    """
    taken = np.flatnonzero(chosen > 0.5)
    if not np.array_equal(np.sort(asked.job[taken]), np.arange(len(problem))):
        raise InvalidPlan("AlloX: a job is not matched to one place")
    order = taken[np.argsort(asked.job[taken])]
    return Queues(asked.worker[order], asked.position[order])


def running(problem: AllocationProblem, waiting: Queues) -> Allocation:
    """The first of every queue have their accelerators all of the time.

    Which jobs of one position stand in the longer queues changes nothing; the later ones do.
    """
    first: list[int] = []
    for worker in np.unique(waiting.worker):
        ahead = 0
        for position in range(int(waiting.position.max()), 0, -1):
            here = np.flatnonzero((waiting.worker == worker) & (waiting.position == position))
            first.extend(here[: max(0, len(here) - ahead)].tolist())
            ahead = max(ahead, len(here))
    job = np.array(first, dtype=np.int64)
    return Allocation(job, np.full(len(job), -1), waiting.worker[job], np.ones(len(job)))


def objective(problem: AllocationProblem, waiting: Queues) -> float:
    """Mean seconds from arrival to completion."""
    rates = problem.rates[np.arange(len(problem)), waiting.worker]
    return float((problem.elapsed_seconds + waiting.position * problem.steps / rates).mean())
