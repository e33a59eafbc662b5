"""T of the thesis from the throughputs as they were given: no pair of jobs is left out."""

from collections.abc import Sequence
from itertools import permutations
from time import perf_counter

import numpy as np
from scipy import sparse
from strategies_allocation import use_of

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.graphs.documents.arrays import Bools, Floats
from stagewright.graphs.workloads.jobs import PairRate, Throughputs
from stagewright.solvers.clusters.specification.setting import UNLIMITED, RateSetting


def specify(
    problem: AllocationProblem, throughputs: Throughputs, *, space_sharing: bool = False
) -> RateSetting:
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
    return _setting(problem, combinations, np.array(rates).swapaxes(0, 1), np.array(runs))


def specify_agnostic(
    problem: AllocationProblem, throughputs: Throughputs, *, alike: bool
) -> RateSetting:
    """T of a policy that takes all accelerators for alike.

    A job runs at its best rate on as many accelerators wherever it runs or, where jobs are
    ``alike``, at the part of it that this is of its best of all.
    """
    aware = specify(problem, throughputs)
    alone, counts = aware.alone, [worker.count for worker in problem.table.workers]
    for job, rates in enumerate(aware.alone):
        for worker in np.flatnonzero(rates):
            best = max(
                rate for rate, count in zip(rates, counts, strict=True) if count == counts[worker]
            )
            alone[job, worker] = best / aware.fastest[job] if alike else best
    rates = np.eye(len(problem))[:, :, None] * alone
    return _setting(problem, aware.combinations, rates, aware.runs)


def _setting(
    problem: AllocationProblem, combinations: Sequence[tuple[int, ...]], rates: Floats, runs: Bools
) -> RateSetting:
    matrix = sparse.csr_array(rates.reshape(len(problem), -1))
    return RateSetting(problem, tuple(combinations), matrix, runs, UNLIMITED, perf_counter())


def _alone(problem: AllocationProblem, throughputs: Throughputs) -> Floats:
    found = np.zeros((len(problem), len(problem.table.workers)))
    known = {(rate.model, rate.scale, rate.accelerator): rate for rate in throughputs.alone}
    for job, kind in enumerate(problem.kind):
        model = problem.table.kinds[kind][0]
        for column, worker in enumerate(problem.table.workers):
            accelerator = problem.table.pool.accelerators[worker.accelerator]
            scale = use_of(problem, job, column)
            if not scale:
                continue
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
