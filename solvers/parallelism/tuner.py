"""Which layout to try next, and when no other is worth a trial.

Corrected times of all candidates, given the trials, are a Student's process (``trials`` has the
prior). The next layout has the largest expected improvement; of several at once each is chosen as
if the ones before had their corrected times (Ginsbourger et al. 2010, "kriging believer").
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.special import ndtr, stdtr, stdtrit

from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.trials import (
    MARGIN,
    MOST_CHANCE,
    PRIOR_RUNS,
    REPETITION,
    Claim,
    Tuning,
    common_deviation,
    covariance,
    fit_chance,
    may_fit,
)
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.parallelism.tree import compiled_walk


@dataclass(frozen=True, slots=True)
class Corrected:
    """A layout without a time: its corrected seconds and the range of 9 of 10.

    ``chance`` of being faster than the best by more than the margin, ``fit`` of fitting.
    """

    layout: Layout
    predicted: float
    seconds: float
    low: float
    high: float
    chance: float
    fit: float


@dataclass(frozen=True, slots=True)
class Standing:
    """What trials tell: the claim, None before the first time; what may still win; what is next."""

    claim: Claim | None
    open: tuple[Corrected, ...]
    next: tuple[Corrected, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class _Posterior:
    """Means and deviations of log(measured / predicted) of layouts, with degrees of freedom.

    All variances have the factor ``scale``.
    """

    means: Floats
    deviations: Floats
    freedom: float
    scale: float = 1.0


class Tuner:
    """The process over a tuning's candidates and tried layouts."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.measured = tuning.measured
        known = [one.layout for one in tuning.candidates]
        layouts = list(dict.fromkeys([*known, *self.measured]))
        walk = compiled_walk()
        found = [evaluate(tuning.problem, one, walk) for one in layouts]
        self.layouts, self.places = layouts, {one: i for i, one in enumerate(layouts)}
        self.predicted = np.array([one.seconds for one in found])
        self.prior = covariance(tuning.problem, found)
        self.tried = [self.places[one] for one in self.measured]
        times = np.array(list(self.measured.values()))
        self.ratios = np.log(times / self.predicted[self.tried])
        self.fits = [fit_chance(tuning, one.peak_bytes) for one in tuning.candidates]
        self.open = [
            place
            for place, one in enumerate(tuning.candidates)
            if one.layout not in self.measured and may_fit(tuning, one.layout, one.peak_bytes)
        ]

    def standing(self, count: int = 1, pending: Sequence[Layout] = ()) -> Standing:
        """What the trials tell, and the ``count`` next trials beside those that are ``pending``."""
        posterior = self._posterior(self.tried, self.ratios)
        best = min(self.measured.values(), default=None)
        corrected = {one: self._corrected(one, posterior, best) for one in self.open}
        claim = None if best is None else self._claim(best, posterior, corrected.values())
        chosen = self._next(count, [self.places[one] for one in pending if one in self.places])
        by_time = sorted(corrected.values(), key=lambda one: one.low)
        return Standing(
            claim=claim,
            open=tuple(one for one in by_time if best is None or one.low < (1 - MARGIN) * best),
            next=tuple(corrected[one] for one in chosen),
            left_out=sum(fit < 1 for fit in self.fits) and self._too_large(),
        )

    def _too_large(self) -> int:
        """The candidates that count as ones that do not fit, without a trial of their own."""
        tried, counted = self.tuning.failed.keys() | self.measured.keys(), set(self.open)
        return sum(
            place not in counted and one.layout not in tried
            for place, one in enumerate(self.tuning.candidates)
        )

    def _told(self, tried: Sequence[int]) -> Floats:
        """The covariance of trials, repetition included."""
        own: Floats = self.prior[np.ix_(tried, tried)] + REPETITION**2 * np.eye(len(tried))
        return own

    def _posterior(self, tried: Sequence[int], ratios: Floats) -> _Posterior:
        variances = np.diag(self.prior) + REPETITION**2
        if not len(tried):
            return _Posterior(np.zeros(len(variances)), np.sqrt(variances), PRIOR_RUNS)
        factor = cho_factor(self._told(tried), lower=True)
        cross = self.prior[:, tried]
        explained = np.einsum("ij,ji->i", cross, cho_solve(factor, cross.T))
        # The scale is an inverse gamma's, with as much weight as PRIOR_RUNS runs.
        freedom = PRIOR_RUNS + len(tried)
        scale = (PRIOR_RUNS + float(ratios @ cho_solve(factor, ratios))) / freedom
        deviations = np.sqrt(scale * np.maximum(variances - explained, REPETITION**2))
        return _Posterior(cross @ cho_solve(factor, ratios), deviations, freedom, scale)

    def _corrected(self, place: int, of: _Posterior, best: float | None) -> Corrected:
        center = log(self.predicted[place]) + float(of.means[place])
        deviation = float(of.deviations[place])
        width = float(stdtrit(of.freedom, 0.95)) * deviation
        return Corrected(
            layout=self.layouts[place],
            predicted=float(self.predicted[place]),
            seconds=exp(center),
            low=exp(center - width),
            high=exp(center + width),
            chance=1.0 if best is None else self._chance(best, center, deviation, of.freedom),
            fit=self.fits[place],
        )

    @staticmethod
    def _chance(best: float, center: float, deviation: float, freedom: float) -> float:
        return float(stdtr(freedom, (log((1 - MARGIN) * best) - center) / deviation))

    def _claim(self, best: float, of: _Posterior, corrected: Collection[Corrected]) -> Claim:
        seconds = [one.seconds for one in corrected]
        chances = [one.chance for one in corrected]
        if self.tuning.rest_seconds is not None:
            center, deviation = self._rest(self.tuning.rest_seconds, of.scale)
            seconds.append(exp(center))
            chances.append(self._chance(best, center, deviation, of.freedom))
        chance = min(1.0, sum(chances))
        off = min(seconds) / ((1 - MARGIN) * best) if seconds else None
        errors = self._left_out()
        return Claim(
            best=min(self.measured, key=lambda one: self.measured[one]),
            seconds=best,
            chance=chance,
            wrong=0 if off is None else int((np.abs(errors) > abs(log(off))).sum()),
            runs=len(errors),
            stop=chance <= MOST_CHANCE,
            off=off,
        )

    def _rest(self, seconds: float, scale: float) -> tuple[float, float]:
        """Mean and deviation of the logarithm of the least seconds of all other layouts.

        They share the common factor alone with what was tried, as far as is known.
        """
        shared = common_deviation(self.tuning.problem) ** 2
        factor = cho_factor(self._told(self.tried), lower=True)
        told = cho_solve(factor, self.ratios)
        explained = shared**2 * float(cho_solve(factor, np.ones(len(self.tried))).sum())
        variance = scale * (float(np.diag(self.prior).max()) + REPETITION**2 - explained)
        return log(seconds) + shared * float(told.sum()), sqrt(variance)

    def _left_out(self) -> Floats:
        """Logarithms of measured over predicted seconds of every trial, corrected by the others."""
        # Rasmussen and Williams 2006, equation 5.12.
        inverse = np.linalg.inv(self._told(self.tried))
        found: Floats = inverse @ self.ratios / np.diag(inverse)
        return found

    def _next(self, count: int, pending: Sequence[int]) -> list[int]:
        tried, ratios = list(self.tried), self.ratios
        chosen: list[int] = []
        waiting = [one for one in pending if one not in tried]
        for _ in range(count + len(waiting)):
            of = self._posterior(tried, ratios)
            if waiting:
                place = waiting.pop()
            else:
                left = [one for one in self.open if one not in tried]
                if not left:
                    break
                place = max(left, key=self._gains(of, tried, ratios).__getitem__)
                chosen.append(place)
            tried, ratios = [*tried, place], np.append(ratios, of.means[place])
        return chosen

    def _gains(self, of: _Posterior, tried: Sequence[int], ratios: Floats) -> Floats:
        """The expected improvement of the best logarithm, times the chance to fit."""
        centers = np.log(self.predicted) + of.means
        fits = np.array([*self.fits, *(1.0 for _ in self.layouts[len(self.fits) :])])
        if not len(tried):
            first: Floats = np.where(fits >= 0.5, -centers, -centers - 100)  # whatever may fit
            return first
        best = float((np.log(self.predicted[tried]) + ratios).min())
        steps = (best - centers) / of.deviations
        density = np.exp(-(steps**2) / 2) / sqrt(2 * np.pi)
        found: Floats = fits * of.deviations * (steps * ndtr(steps) + density)
        return found


def standing_of(tuning: Tuning, count: int = 1, pending: Sequence[Layout] = ()) -> Standing:
    """What the trials of a tuning tell, and the ``count`` next ones."""
    return Tuner(tuning).standing(count, pending)
