"""The document of a tuning: candidate layouts, the trials so far, and the claim that rests on them.

The model of the trials (``docs/decisions/0044-trials.md``): the logarithm of measured over
predicted seconds is a Gaussian process over layouts, a factor that all share, deviations in
proportion to the parts of an iteration and by the degrees and switches, and repetition. Its scale
is not known: an inverse gamma of ``PRIOR_RUNS``, so that corrected times have Student's
distribution.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, isfinite, log, sqrt
from typing import ClassVar, Literal, NoReturn

import numpy as np
from pydantic import ConfigDict

from stagewright.formulations.parallelism.document import PARTS, differ
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.pipeline_time import Walk, walk
from stagewright.formulations.parallelism.ranges import unknown_prices
from stagewright.formulations.parallelism.training import (
    AGREE,
    TrainingProblem,
    require_layout,
)
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.machines.rates import UNMEASURED

Outcome = Literal["measured", "out of memory", "crashed"]

MARGIN = 0.02
"""A layout that is faster than the best by less than this part is not worth a trial."""
MOST_CHANCE = 0.01
"""A tuning stops where all that may still be faster is as likely as this at the most."""

PRIOR_RUNS = 2.0
"""As many runs as these say how large deviations are, before any trial."""
REPETITION = 0.02
"""Standard deviation of what no other layout tells, of logarithms of seconds."""
COMMON_DEVIATION = 0.5
"""Of what all layouts share, at least: 9 of 10 machines take 0.44 to 2.3 times the prediction."""
LEAST_DEVIATION, USUAL_DEVIATION = 0.05, 0.1
"""Of layouts of one model: at least; and where no run was left out of the rates' fit."""
NINETY = 2 * 1.645
"""Standard deviations between the ends of a range that holds 9 of 10."""
OF_MEAN = 1.2533
"""A normal variable's standard deviation over the mean of its absolute value."""


def _require_positive(name: str, value: float | None) -> None:
    if value is not None and not (isfinite(value) and value > 0):
        raise InputError(f"{name} must be above 0, got {value:g}")


@documents.record
class Trial:
    """A run of a layout: its seconds, or why it has none; ``place`` is where that is written."""

    layout: Layout
    outcome: Outcome
    place: str
    seconds: float | None = None
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_bytes"):
            _require_positive(f"{self.place}: {name}", getattr(self, name))
        if (self.outcome == "measured") != (self.seconds is not None):
            raise InputError(f"{self.place}: a trial has seconds if it was measured, and only then")


@documents.record
class Candidate:
    """A layout with its predicted seconds and peak bytes."""

    layout: Layout
    seconds: float
    peak_bytes: float

    def __post_init__(self) -> None:
        for name in ("seconds", "peak_bytes"):
            _require_positive(name, getattr(self, name))


@documents.record
class Claim:
    """No layout that fits is faster than ``(1 - MARGIN)`` of the best, unless prices are off.

    That is, unless its time is less than its corrected prediction by more than the factor ``off``
    (None: there is no other layout). Of ``runs`` trials, each predicted by the others, ``wrong``
    differed by more. ``chance`` is how likely the model says one is, and with ``stop`` that is at
    most MOST_CHANCE.
    """

    best: Layout
    seconds: float
    chance: float
    wrong: int
    runs: int
    stop: bool
    off: float | None = None


@dataclass(frozen=True, eq=False)
class Tuning:
    """A tuning: all that it knows. Every other layout of ``space`` takes ``rest_seconds`` or more.

    That is predicted, and None if there is no other.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    problem: TrainingProblem
    framework: str
    space: str
    proved_by: str
    candidates: tuple[Candidate, ...]
    rest_seconds: float | None = None
    trials: tuple[Trial, ...] = ()
    claim: Claim | None = None
    format: Literal["stagewright-tuning"] = "stagewright-tuning"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        _require_positive("rest_seconds", self.rest_seconds)
        if not self.candidates:
            raise InputError("candidates: there must be one or more")
        layouts = [one.layout for one in self.candidates]
        if len(set(layouts)) < len(layouts):
            raise InputError("candidates: a layout appears twice")
        by_layout: dict[Layout, Trial] = {}
        for one in self.trials:
            with naming(one.place):
                require_layout(self.problem, one.layout)
            if one.seconds is None:
                if one.outcome == "out of memory" and one.layout in by_layout:
                    self._contradict(one, one.outcome, by_layout[one.layout])
                continue
            other = by_layout.setdefault(one.layout, one)
            assert other.seconds is not None
            slow, fast = max(one.seconds, other.seconds), min(one.seconds, other.seconds)
            if slow > (1 + AGREE) * fast:
                self._contradict(one, f"{one.seconds:g} s", other)

    @staticmethod
    def _contradict(one: Trial, said: str, other: Trial) -> NoReturn:
        raise InputError(
            f"{one.place}: {said} contradicts {other.place}, which has "
            f"{other.seconds:g} s for the same layout; leave out the wrong one"
        )

    @property
    def measured(self) -> dict[Layout, float]:
        """Seconds of the layouts that were measured, means where several times."""
        found: dict[Layout, list[float]] = {}
        for one in self.trials:
            if one.seconds is not None:
                found.setdefault(one.layout, []).append(one.seconds)
        return {layout: sum(some) / len(some) for layout, some in found.items()}

    @property
    def failed(self) -> dict[Layout, Outcome]:
        """The layouts without seconds, and why the last trial has none."""
        known = self.measured
        return {one.layout: one.outcome for one in self.trials if one.layout not in known}

    def with_trials(self, trials: Sequence[Trial]) -> "Tuning":
        """The tuning with more trials, without a claim; of a layout and a place the last counts."""
        by_place = {(one.place, one.layout): one for one in (*self.trials, *trials)}
        return replace(self, trials=tuple(by_place.values()), claim=None)


def load_tuning(path: str | os.PathLike[str]) -> Tuning:
    """Read the document of a tuning; errors are one line with the file and the place."""
    return documents.read(Tuning, path)


def save_tuning(tuning: Tuning, path: str | os.PathLike[str]) -> None:
    """Write the document of a tuning atomically."""
    documents.write(Tuning, tuning, path)


# --- The prior -----------------------------------------------------------------------------------


def common_deviation(problem: TrainingProblem) -> float:
    """Of the factor that all layouts share: 9 of 10 are within the rates' range, or a wide one.

    Wide, so that a machine that is slower in all does not make layouts seem to deviate much.
    """
    return max(COMMON_DEVIATION, log(problem.spread.high / problem.spread.low) / NINETY)


def own_deviation(problem: TrainingProblem) -> float:
    """Of layouts of one model: of runs that were left out of the fit, less their models' means."""
    errors = problem.rates.errors
    runs = sum(one.runs for one in errors)
    if not runs:
        return USUAL_DEVIATION
    variance = sum(one.runs * max(0.0, one.error**2 - one.bias**2) for one in errors) / runs
    return max(LEAST_DEVIATION, OF_MEAN * sqrt(variance))


def covariance(problem: TrainingProblem, of: Sequence[Estimate]) -> Floats:
    """The prior covariance of log(measured / predicted seconds) without repetition, of layouts.

    A price that is off moves layouts by the share of their time that it is; another degree or
    switch moves them by itself, less likely by much the more of these two layouts have in common;
    and a feature that no run of the rates has moves those that have it.
    """
    shares = np.array([[getattr(one, name) / one.seconds for name in PARTS.values()] for one in of])
    coordinates = np.array([_coordinates(one.layout) for one in of])
    squares = ((coordinates[:, None] - coordinates) ** 2).sum(-1)
    for name in ("schedule", "recompute", "sequence_parallel", "offload_optimizer", "placement"):
        values = np.array([str(getattr(one.layout, name)) for one in of])
        squares = squares + (values[:, None] != values)
    own = own_deviation(problem) ** 2
    alike = shares @ shares.T + np.exp(-squares / 2)
    found: Floats = common_deviation(problem) ** 2 + own * alike
    unknown = [unknown_prices(problem, one.layout) for one in of]
    for feature in {name for names in unknown for name in names}:
        has = np.array([feature in names for names in unknown], float)
        low, high = UNMEASURED[feature]
        found += (log(low * high) / NINETY) ** 2 * np.outer(has, has)
    return found


def _coordinates(of: Layout) -> list[float]:
    degrees = (
        of.pipeline, of.tensor, of.context, of.data, of.expert, of.microbatch, of.chunks,
    )  # fmt: skip
    ends = [0.5 * (one is not None) for one in (of.first_blocks, of.last_blocks)]
    return [*np.log2(degrees), float(of.zero), *ends]


# --- The checker ---------------------------------------------------------------------------------


def violations(tuning: Tuning, run: Walk = walk) -> tuple[str, ...]:
    """What is wrong with a document, computed again from its problem and trials; empty if valid.

    Predictions, and the claim, of which the corrected times are conditional means by the inverse of
    the whole covariance, without the tuner's own algebra. The search that proves ``rest_seconds``
    is not run again.
    """
    faults = []
    for one in tuning.candidates:
        try:
            found = evaluate(tuning.problem, one.layout, run)
        except InputError as error:
            return (f"{one.layout}: {error}",)
        for name in ("seconds", "peak_bytes"):
            said, computed = getattr(one, name), getattr(found, name)
            if differ(said, computed):
                faults.append(f"{one.layout}: {name} is {said:.6g}, computed {computed:.6g}")
    if tuning.claim is not None:
        faults += _faults_of_claim(tuning, tuning.claim, run)
    return tuple(faults)


def _faults_of_claim(tuning: Tuning, claim: Claim, run: Walk) -> Iterator[str]:
    measured = tuning.measured
    if claim.best not in measured or differ(min(measured.values()), measured[claim.best]):
        yield f"claim: {claim.best} is not the fastest that was measured"
        return
    if differ(claim.seconds, measured[claim.best]):
        yield f"claim: seconds is {claim.seconds:.6g}, measured {measured[claim.best]:.6g}"
    if claim.runs != len(measured):
        yield f"claim: {claim.runs} runs, there are {len(measured)}"
    off, wrong, chance = _computed_claim(tuning, run)
    if (claim.off is None) != (off is None) or abs((claim.off or 0) - (off or 0)) > 1e-6:
        yield f"claim: off is {claim.off}, computed {off}"
    elif claim.wrong != wrong:
        yield f"claim: wrong in {claim.wrong} runs, computed {wrong}"
    if abs(claim.chance - chance) > 1e-6:
        yield f"claim: chance is {claim.chance:.6g}, computed {chance:.6g}"
    if claim.stop != (chance <= MOST_CHANCE):
        yield f"claim: stop is {claim.stop} at a chance of {chance:.3g}"


def _computed_claim(tuning: Tuning, run: Walk) -> tuple[float | None, int, float]:
    """The claim's factor, how many trials were off by more, and the chance of a faster layout."""
    from scipy.stats import t

    problem, measured = tuning.problem, tuning.measured
    layouts = list(measured)
    others = [
        one.layout for one in tuning.candidates
        if one.layout not in measured and may_fit(tuning, one.layout, one.peak_bytes)
    ]  # fmt: skip
    found = [evaluate(problem, one, run) for one in (*layouts, *others)]
    prior = covariance(problem, found)
    if tuning.rest_seconds is not None:
        # One more layout, which shares the common factor alone, and is as uncertain as any.
        shared = np.full(len(found), common_deviation(problem) ** 2)
        most = float(np.diag(covariance(problem, _estimates(tuning, run))).max())
        prior = np.block([[prior, shared[:, None]], [shared, most]])
    prior = prior + REPETITION**2 * np.eye(len(prior))
    seconds = [*(one.seconds for one in found), tuning.rest_seconds]
    ratios = np.array([log(measured[one.layout] / one.seconds) for one in found[: len(layouts)]])
    places, goal = list(range(len(layouts))), (1 - MARGIN) * min(measured.values())
    freedom = PRIOR_RUNS + len(layouts)
    weighted = float(ratios @ np.linalg.inv(prior[: len(layouts), : len(layouts)]) @ ratios)
    off, chance = None, 0.0
    for one in range(len(layouts), len(prior)):
        mean, variance = _conditional(prior, ratios, places, one)
        beyond = log(seconds[one] or 1.0) + mean - log(goal)
        off = beyond if off is None else min(off, beyond)
        scale = (PRIOR_RUNS + weighted) / freedom
        chance += float(t.sf(beyond / sqrt(scale * variance), freedom))
    errors = [
        ratios[one] - _conditional(prior, ratios, [o for o in places if o != one], one)[0]
        for one in places
    ]
    wrong = 0 if off is None else sum(abs(one) > abs(off) for one in errors)
    return None if off is None else exp(off), wrong, min(1.0, chance)


def _estimates(tuning: Tuning, run: Walk) -> list[Estimate]:
    """Those of all that the tuner knows."""
    known = dict.fromkeys([*(one.layout for one in tuning.candidates), *tuning.measured])
    return [evaluate(tuning.problem, one, run) for one in known]


def _conditional(prior: Floats, ratios: Floats, known: list[int], of: int) -> tuple[float, float]:
    """Mean and variance of one given others, by the inverse of their covariance together."""
    inverse = np.linalg.inv(prior[np.ix_([*known, of], [*known, of])])
    return -float(inverse[-1, :-1] @ ratios[known]) / float(inverse[-1, -1]), 1 / inverse[-1, -1]


# --- Memory --------------------------------------------------------------------------------------

OWN_MEMORY = 0.02
"""Standard deviation of log(measured / predicted peak) of one layout, beside what all share."""
LEAST_FIT = 0.05
"""A layout that fits with less than this chance counts as one that does not."""


def may_fit(tuning: Tuning, layout: Layout, peak_bytes: float) -> bool:
    """Whether a layout counts: it has not failed, and may fit as far as the trials tell."""
    return layout not in tuning.failed and fit_chance(tuning, peak_bytes) >= LEAST_FIT


def fit_chance(tuning: Tuning, peak_bytes: float) -> float:
    """How likely a predicted peak fits, given the trials' peaks, and which ran out of memory."""
    from scipy.special import ndtr

    factors, weights = _memory_factor(tuning)
    room = log(tuning.problem.fabric.memory_bytes / peak_bytes)
    return float((weights * ndtr((room - factors) / OWN_MEMORY)).sum())


@lru_cache(maxsize=2)
def _memory_factor(tuning: Tuning) -> tuple[Floats, Floats]:
    """The logarithm of the factor that all peaks share, on a grid, and how likely each value is."""
    from scipy.special import log_ndtr

    spread = tuning.problem.rates.memory
    deviation = log(spread.high / spread.low) / NINETY
    factors = np.linspace(-8, 8, 321) * deviation
    weights = -0.5 * (factors / deviation) ** 2
    peaks = {one.layout: one.peak_bytes for one in tuning.candidates}
    known = tuning.measured
    for one in tuning.trials:
        peak = peaks.get(one.layout)
        if peak is None or one.outcome == "crashed" or (one.layout in known and not one.seconds):
            continue
        beyond = (factors - log(tuning.problem.fabric.memory_bytes / peak)) / OWN_MEMORY
        if one.outcome == "out of memory":
            weights = weights + log_ndtr(beyond)
        elif one.memory_bytes is not None:
            off = factors - log(one.memory_bytes / peak)
            weights = weights - 0.5 * (off / OWN_MEMORY) ** 2
        else:
            weights = weights + log_ndtr(-beyond)
    likely = np.exp(weights - weights.max())
    return factors, likely / likely.sum()
