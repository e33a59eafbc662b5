"""Thesis 5.3.3, 5.6 and 5.7.6: rates beside other jobs, estimated from a few measurements.

Every model of Gavel's table in turn is taken for new, measured beside a part of the others, and its
other pairs are estimated. Then half of the models are new at once, and max-min fairness with space
sharing is planned with estimates and judged by the measured rates, in the spirit of figure 5.16.
"""

from collections.abc import Iterable

import numpy as np

from benchmarks.gavel_runs import measured
from benchmarks.report import Table, percent
from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, problem_of
from stagewright.formulations.clusters.policies import max_min
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.workloads.jobs import Job, PairRate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.clusters.estimation import Estimator, pairs_to_profile
from stagewright.solvers.clusters.policies import allocate

SCALE = 1
FRACTIONS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
SEEDS = (0, 1, 2)
JOBS, ROUNDS = 128, 4

Rates = dict[tuple[str, str, str], float]  # (accelerator, model, partner): steps per second


def measured_table() -> Throughputs:
    """Gavel's table of jobs on one accelerator."""
    table = measured()
    return table.of((rate.model, rate.scale) for rate in table.alone if rate.scale == SCALE)


def models_of(table: Throughputs) -> list[str]:
    return sorted({rate.model for rate in table.alone})


def without(table: Throughputs, models: Iterable[str]) -> Throughputs:
    """The table of the other models."""
    gone = set(models)
    return table.of((rate.model, SCALE) for rate in table.alone if rate.model not in gone)


def profiled(table: Throughputs, new: Iterable[str], fraction: float, seed: int) -> Throughputs:
    """What is measured of new models: alone everywhere, and beside some of the others."""
    new = list(new)
    reference = without(table, new)
    pairs = {(pair.accelerator, frozenset(pair.models)): pair for pair in table.pairs}
    chosen: list[PairRate] = []
    for number, model in enumerate(new):
        places = pairs_to_profile(reference, (model, SCALE), fraction, seed * len(new) + number)
        chosen += [pairs[accelerator, frozenset((model, other))] for accelerator, other in places]
    return Throughputs(tuple(rate for rate in table.alone if rate.model in new), tuple(chosen))


def rates(table: Throughputs) -> Rates:
    found = {}
    for pair in table.pairs:
        for side in (0, 1):
            key = (pair.accelerator, pair.models[side], pair.models[1 - side])
            found[key] = pair.steps_per_second[side]
    return found


# --- One new model at a time ---------------------------------------------------------------------


def mean_of_others(table: Throughputs, new: str) -> Rates:
    """The baseline: a job keeps, and leaves to another, what the reference jobs do on average."""
    alone = {(rate.accelerator, rate.model): rate.steps_per_second for rate in table.alone}
    true = rates(table)
    others = [model for model in models_of(table) if model != new]
    found = {}
    for accelerator, partner in {(rate.accelerator, rate.model) for rate in table.alone}:
        beside = [m for m in others if m != partner]
        keeps = [true[accelerator, m, partner] / alone[accelerator, m] for m in beside]
        leaves = [true[accelerator, partner, m] for m in beside]
        found[accelerator, new, partner] = float(np.mean(keeps)) * alone[accelerator, new]
        found[accelerator, partner, new] = float(np.mean(leaves))
    return found


def errors(table: Throughputs, new: str, fraction: float, seed: int) -> list[tuple[float, ...]]:
    """Of each pair not measured that runs: relative errors of the estimate and of the mean.

    A pair that does not run (rate 0) counts in the third and fourth number alone: whether the
    estimate and the mean are right on whether sharing beats taking turns.
    """
    alone = {(rate.accelerator, rate.model): rate.steps_per_second for rate in table.alone}
    measured = profiled(table, [new], fraction, seed)
    known = rates(measured)
    true = rates(table)
    guesses = (
        rates(Estimator(without(table, [new])).estimate(measured)),
        mean_of_others(table, new),
    )
    rows = []
    for (accelerator, model, partner), rate in true.items():
        if new not in (model, partner) or (accelerator, model, partner) in known:
            continue
        key, back = (accelerator, model, partner), (accelerator, partner, model)
        whole, other = alone[accelerator, model], alone[accelerator, partner]
        row = [abs(guess[key] - rate) / rate if rate else np.nan for guess in guesses]
        helps = rate / whole + true[back] / other > 1
        row += [(guess[key] / whole + guess[back] / other > 1) == helps for guess in guesses]
        rows.append(tuple(row))
    return rows


def error_table(quick: bool) -> Table:
    """Leave one out: median relative errors, and how often "worth sharing?" is answered right."""
    table, seeds = measured_table(), SEEDS[:1] if quick else SEEDS
    rows = []
    for fraction in FRACTIONS[:5:4] if quick else FRACTIONS[:5]:
        found = np.array(
            [
                row
                for seed in seeds
                for model in models_of(table)
                for row in errors(table, model, fraction, seed)
            ],
            dtype=float,
        )
        estimate, mean = np.nanmedian(found[:, 0]), np.nanmedian(found[:, 1])
        rows.append(
            (percent(fraction), percent(estimate), percent(mean),
             percent(found[:, 2].mean()), percent(found[:, 3].mean()))
        )  # fmt: skip
    return Table(
        "estimation",
        "5.7.6: estimates of pairs that were not measured; each of 26 models new in turn",
        ("profiled", "median error", "of the mean", "worth sharing: right", "by the mean"),
        tuple(rows),
    )


# --- Half of the models new ----------------------------------------------------------------------


def judged(problem: AllocationProblem, allocation: Allocation, true: Rates) -> float:
    """Max-min's objective of an allocation at the measured rates, of pairs too."""
    names = [accelerator.name for accelerator in problem.table.pool.accelerators]
    models = [problem.table.kinds[kind][0] for kind in problem.kind]
    found: Floats = np.zeros(len(problem))
    for job, partner, worker, share in zip(
        allocation.job, allocation.partner, allocation.worker, allocation.share, strict=True
    ):
        if partner < 0:
            found[job] += share * problem.rates[job, worker]
            continue
        for one, other in ((job, partner), (partner, job)):
            found[one] += share * true[names[worker], models[one], models[other]]
    return float((found / max_min.needs(problem)).min())


def used_pairs(
    problem: AllocationProblem, allocation: Allocation, table: Throughputs
) -> list[PairRate]:
    """The measurements of the pairs that run in ``allocation``."""
    pairs = {(pair.accelerator, frozenset(pair.models)): pair for pair in table.pairs}
    names = problem.table.pool.names
    models = [problem.table.kinds[kind][0] for kind in problem.kind]
    shared = allocation.partner >= 0
    ran = zip(
        allocation.job[shared], allocation.partner[shared], allocation.worker[shared], strict=True
    )
    places = {(names[worker], frozenset((models[a], models[b]))) for a, b, worker in ran}
    return [pairs[place] for place in places]


def loss_table(quick: bool) -> Table:
    """What max-min with space sharing reaches with estimates, of what it reaches with the rates.

    After each round the pairs that ran are known, and the next is planned with that.
    """
    table = measured_table()
    true, models, seeds = rates(table), models_of(table), SEEDS[:1] if quick else SEEDS
    pool = parse_pool(f"v100={JOBS // 4},p100={JOBS // 4},k80={JOBS // 4}")
    rows = []
    for fraction in FRACTIONS[::5] if quick else FRACTIONS:
        columns = []
        for seed in seeds:
            rng = np.random.default_rng(seed)
            new = sorted(rng.choice(models, len(models) // 2, replace=False).tolist())
            jobs = tuple(
                Job(str(number), str(model), 1.0)
                for number, model in enumerate(rng.choice(models, JOBS))
            )
            measured = profiled(table, new, fraction, seed)
            alone, oracle = (
                problem_of(Workload(jobs, table), pool, space_sharing=sharing)
                for sharing in (False, True)
            )
            best = allocate(oracle, "max-min").objective
            parts = [allocate(alone, "max-min").objective / best]
            for _ in range(ROUNDS):
                estimate = Estimator(without(table, new)).estimate(measured)
                problem = problem_of(Workload(jobs, estimate), pool, space_sharing=True)
                planned = allocate(problem, "max-min").allocation
                parts.append(judged(oracle, planned, true) / best)
                measured = Throughputs(
                    measured.alone, tuple({*measured.pairs, *used_pairs(problem, planned, table)})
                )
            columns.append(parts)
        mean = np.mean(columns, axis=0)
        rows.append((percent(fraction), *(percent(float(value)) for value in mean)))
    return Table(
        "estimation-loss",
        f"Figure 5.16's question: max-min of {JOBS} jobs, half of the models new; part of the "
        "objective with all pairs measured",
        (
            "profiled",
            "no space sharing",
            "at first",
            *(f"after round {n + 1}" for n in range(ROUNDS - 1)),
        ),
        tuple(rows),
    )


def tables(quick: bool) -> list[Table]:
    """Both tables."""
    return [error_table(quick), loss_table(quick)]
