"""Rates of a user's own machine and stack: few constants of a rate set, fitted to measured runs.

Unless all runs lie on one side of the rates' range they confirm the rates, and nothing is fitted.
Else, with n runs at most n - 1 of three factors are fitted, least squares of the logarithms of
predicted over measured seconds: one on all that a kernel reaches (products, attention, memory),
then one on memory-bound kernels alone, then one on what exchanges take from the computation beside
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil, exp, floor, inf, log, sqrt

import numpy as np
from scipy.optimize import least_squares
from scipy.special import stdtrit

from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.ranges import measured_by
from stagewright.formulations.parallelism.training import (
    AGREE,
    CalibrationRun,
    TrainingProblem,
    require_layout,
)
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.documents.units import counted
from stagewright.graphs.machines.rates import BORROWED, LeftOut, RateSet, Reached, Spread
from stagewright.solvers.parallelism.tree import compiled_walk

FACTORS = {
    "kernels": ("matmul", "fp8_matmul", "attention", "attention_backward", "memory"),
    "memory-bound kernels": ("memory",),
    "contention": ("contention",),
}
"""What is scaled, in this order, and the constants of each."""

_MOST = 20.0
"""A factor is from 1 / 20 to 20."""
_WEIGHT = 5e-3
"""A factor e costs as much as a run that is off by this share: it holds what no run tells."""


@dataclass(frozen=True)
class Calibration:
    """The fitted set and the ``factors``; of each run predicted seconds over measured.

    Runs of the same work are one. ``before`` is by the rates at the start, ``after`` by the fitted
    ones, ``left_out`` by those fitted to the other runs, empty if there is no other.
    """

    rates: RateSet
    runs: tuple[CalibrationRun, ...]
    factors: dict[str, float]
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: tuple[float, ...]

    @property
    def at_peak(self) -> tuple[str, ...]:
        """The fitted constants that are the device's peak, which runs would still exceed."""
        names = dict.fromkeys(one for kind in self.factors for one in FACTORS[kind])
        return tuple(one for one in names if getattr(self.rates.reached, one) == 1.0)


def require_runs(runs: Sequence[CalibrationRun]) -> None:
    """Refuse a layout that cannot be, more FLOP/s than the devices have, and contradictions.

    Raises InputError with the run's place.
    """
    for run in runs:
        with naming(run.place):
            if not 0 < run.seconds < 1e9:
                raise InputError(f"seconds must be above 0, got {run.seconds:g}")
            require_layout(run.problem, run.layout)
            peak = run.problem.peak_flops * run.problem.fabric.devices
            mfu = run.problem.model_flops / run.seconds / peak
            if mfu > 1:
                raise InputError(
                    f"{run.seconds:g} s would be an MFU of {mfu:.0%}; check seconds, batch, "
                    "sequence and precision"
                )
    for one, other in combinations(runs, 2):
        slow, fast = max(one.seconds, other.seconds), min(one.seconds, other.seconds)
        if _work(one) == _work(other) and slow > (1 + AGREE) * fast:
            raise InputError(
                f"{other.place}: {other.seconds:g} s contradicts {one.place}, which has "
                f"{one.seconds:g} s for the same layout; leave out the wrong one"
            )


def _work(run: CalibrationRun) -> tuple[object, ...]:
    of = run.problem
    return (run.layout, of.fabric.devices, of.sequence, of.batch, of.precision)


def calibrated(runs: Sequence[CalibrationRun], name: str, source: str) -> Calibration:
    """The rates of the runs' problems, fitted to the runs; the new set's name and source.

    Runs of the same work count once, with their mean. Raises as :func:`require_runs` does.
    """
    require_runs(runs)
    start, once = runs[0].problem.rates, _merged(runs)
    before = tuple(_ratio(run, start.reached) for run in once)
    if _confirm(runs[0].problem, before):
        factors, ratios = [], list(before if len(once) > 1 else ())
    else:
        factors, ratios = _fitted(once, start.reached), []
        for run in once if len(once) > 1 else ():
            others = [one for one in once if one is not run]
            ratios.append(_ratio(run, _scaled(start.reached, _fitted(others, start.reached))))
    reached = _scaled(start.reached, factors)
    after = [_ratio(run, reached) for run in once]
    dense, experts = _ranges(start, once, ratios, after)
    rates = RateSet(
        name, start.stack, (runs[0].problem.card.name,), "that of the runs",
        f"{source}; from {start.name}",
        f"{'fitted to' if factors else 'confirmed by'} "
        f"{counted(len(once), 'iteration', 'iterations')} of one's own",
        reached, dense, experts, _memory(start, once),
        tuple(
            LeftOut(str(run.layout), 1, round(abs(one - 1), 4), round(one - 1, 4))
            for run, one in zip(once, ratios, strict=False)
        ),
        **measured_by((run.problem, run.layout) for run in once),
    )  # fmt: skip
    named = dict(zip(FACTORS, factors, strict=False))
    return Calibration(rates, tuple(once), named, before, tuple(after), tuple(ratios))


def _confirm(problem: TrainingProblem, before: Sequence[float]) -> bool:
    """Whether runs, predicted over measured, do not all lie on one side of their rates' range.

    A machine that differs shows in every run. Else the deviation is the model's or the layout's:
    rates that are fitted to it are farther off for other models. Borrowed rates are of another
    machine, and are always fitted.
    """
    spread, ratios = problem.spread, [1 / one for one in before]
    differs = min(ratios) > spread.high or max(ratios) < spread.low
    return problem.rates.borrowed is None and not differs


def _merged(runs: Sequence[CalibrationRun]) -> list[CalibrationRun]:
    """One run of each work, with the mean of its seconds."""
    alike: dict[tuple[object, ...], list[CalibrationRun]] = {}
    for run in runs:
        alike.setdefault(_work(run), []).append(run)
    return [
        replace(same[0], seconds=sum(one.seconds for one in same) / len(same))
        for same in alike.values()
    ]


def _ratio(run: CalibrationRun, reached: Reached) -> float:
    """Predicted seconds over measured."""
    rates = replace(run.problem.rates, reached=reached)
    problem = replace(run.problem, rates=rates)
    return evaluate(problem, run.layout, compiled_walk()).seconds / run.seconds


def _scaled(start: Reached, factors: Sequence[float]) -> Reached:
    """The constants times their factors; no kernel reaches more than the peak."""
    for (kind, names), factor in zip(FACTORS.items(), factors, strict=False):
        most = inf if kind == "contention" else 1.0
        known = {name: getattr(start, name) for name in names}
        scaled = {name: min(most, old * factor) for name, old in known.items() if old is not None}
        start = replace(start, **scaled)
    return start


def _fitted(runs: Sequence[CalibrationRun], start: Reached) -> list[float]:
    """The factors, one fewer than there are runs, but at least the first."""
    count = min(max(1, len(runs) - 1), len(FACTORS))

    def residuals(logarithms: Floats) -> Floats:
        reached = _scaled(start, np.exp(logarithms).tolist())
        off = [log(_ratio(run, reached)) for run in runs]
        return np.array([*off, *(_WEIGHT * logarithms)])

    limit = log(_MOST)
    found = least_squares(residuals, np.zeros(count), bounds=(-limit, limit), diff_step=1e-3)
    return [float(one) for one in np.exp(found.x)]


def _ranges(
    start: RateSet,
    runs: Sequence[CalibrationRun],
    left_out: Sequence[float],
    after: Sequence[float],
) -> tuple[Spread, Spread]:
    """The ranges without and with experts.

    Of the kind of model that was measured: where 9 of 10 of further runs are, by Student's
    distribution about the rates with as many degrees of freedom as runs were left out, and every
    run too; it has that of the start, since runs of one model do not tell how models differ. Of the
    other kind the start's, wider.
    """
    sparse = runs[0].problem.architecture.experts is not None
    own, other = (start.experts, start.dense) if sparse else (start.dense, start.experts)
    if left_out:
        off = [log(one) for one in left_out]
        width = stdtrit(len(off), 0.95) * sqrt(sum(one**2 for one in off) / len(off))
        half = exp(min(width, log(_MOST)))
        seen = [1 / one for one in (*left_out, *after)]
        own = _around([own.low, own.high, 1 / half, half, *seen])
    other = other.widened(BORROWED)
    return (other, own) if sparse else (own, other)


def _memory(start: RateSet, runs: Sequence[CalibrationRun]) -> Spread:
    """The start's range of bytes, with what was measured."""
    ratios = [
        run.memory_bytes / evaluate(run.problem, run.layout, compiled_walk()).peak_bytes
        for run in runs
        if run.memory_bytes is not None
    ]
    return _around([start.memory.low, start.memory.high, *ratios])


def _around(ratios: Sequence[float]) -> Spread:
    """The range from the least to the largest, to four digits outwards."""
    return Spread(floor(1e4 * min(ratios)) / 1e4, ceil(1e4 * max(ratios)) / 1e4)
