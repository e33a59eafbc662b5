"""Estimates of the rates of new jobs in pairs, from a few measurements (thesis 5.3.3 and 5.6).

What a job keeps of its rate beside each reference job, and what it leaves to them, is a row of a
matrix of low rank. A new job's row is measured in a few places and completed from the principal
components of the reference jobs' rows, after Quasar (Delimitrou and Kozyrakis, 2014). The job whose
row is nearest stands for it: what two jobs keep of their rates is what their reference jobs keep,
until it is measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import PairRate, Rate, Throughputs

RANK = 12
_RIDGE = 0.003  # squared part of a rate that a measurement may be off the components
ROUNDS = 20

Kind = tuple[str, int]  # model, scale


def pairs_to_profile(
    reference: Throughputs, kind: Kind, fraction: float, seed: int = 0
) -> tuple[tuple[str, str], ...]:
    """A random ``fraction`` of all (accelerator, reference model) to measure a new job with.

    At least one.

    Raises
    ------
    InputError
        If the fraction is not above 0 and at most 1, or no reference job has this scale.
    """
    if not 0 < fraction <= 1:
        raise InputError(f"fraction must be above 0 and at most 1, got {fraction:g}")
    model, scale = kind
    places = sorted(
        (rate.accelerator, rate.model)
        for rate in reference.alone
        if rate.scale == scale and rate.model != model
    )
    if not places:
        raise InputError(f"no reference job runs on {scale} accelerators; {model!r} asks for them")
    count = max(1, round(fraction * len(places)))
    chosen = np.random.default_rng(seed).choice(len(places), count, replace=False)
    return tuple(places[number] for number in sorted(chosen.tolist()))


@dataclass(frozen=True, slots=True)
class Estimator:
    """The estimator from reference jobs, whose rates alone and in pairs are all measured.

    Rates on accelerators of different servers are not estimated.
    """

    reference: Throughputs

    def estimate(self, measured: Throughputs) -> Throughputs:
        """All rates alone, all measured pairs, and estimates of the new jobs' other pairs.

        A job is new if it is not among the reference jobs. As more of its pairs are measured, call
        again: measurements replace estimates.

        ``measured``: rates of new jobs: alone on every type of accelerator, and in some pairs.

        Raises
        ------
        InputError
            If a pair was measured of a job without a rate alone, or no reference job has the scale
            of a new one.
        """
        alone = _by_place((*self.reference.alone, *measured.alone))
        pairs = {_key(pair): pair for pair in (*self.reference.pairs, *measured.pairs)}
        stands_for = self.nearest(measured)
        kept = _kept(self.reference.pairs, alone)
        for scale, accelerator, models in _colocations(alone):
            for both in combinations_with_replacement(models, 2):
                key = (scale, accelerator, *both)
                if key in pairs or not any((model, scale) in stands_for for model in both):
                    continue
                one, other = (stands_for.get((model, scale), model) for model in both)
                parts = [
                    kept.get((scale, accelerator, one, other)),
                    kept.get((scale, accelerator, other, one)),
                ]
                rates = [
                    part * alone[scale, accelerator, model]
                    for part, model in zip(parts, both, strict=True)
                    if part is not None
                ]
                if len(rates) == 2:
                    pairs[key] = PairRate(both, scale, accelerator, (rates[0], rates[1]))
        rates_alone = {
            (rate.model, rate.scale, rate.accelerator): rate
            for rate in (*self.reference.alone, *measured.alone)
        }
        return Throughputs(tuple(rates_alone.values()), tuple(pairs.values()))

    def nearest(self, measured: Throughputs) -> dict[Kind, str]:
        """The reference model that each new job is most like, by their completed rows."""
        old = {(rate.model, rate.scale) for rate in self.reference.alone}
        new = sorted({(rate.model, rate.scale) for rate in measured.alone} - old)
        alone = _by_place((*self.reference.alone, *measured.alone))
        kept = _kept((*self.reference.pairs, *measured.pairs), alone)
        found: dict[Kind, str] = {}
        for scale in sorted({scale for _, scale in new}):
            references = sorted(model for model, size in old if size == scale)
            asked = [model for model, size in new if size == scale]
            if not references:
                raise InputError(f"{asked[0]!r}: no reference job runs on {scale} accelerators")
            accelerators = sorted({place[1] for place in alone if place[0] == scale})
            known, partly = (
                np.array([_row(kept, scale, accelerators, model, references) for model in models])
                for models in (references, asked)
            )
            fingerprints, rows = completed(known, partly)
            for model, row in zip(asked, rows, strict=True):
                distance = np.linalg.norm(fingerprints - row, axis=1)
                found[model, scale] = references[int(distance.argmin())]
        return found


def completed(
    reference: Floats, rows: Floats, rank: int = RANK, ridge: float = _RIDGE
) -> tuple[Floats, Floats]:
    """Both matrices with NaN replaced by estimates; known entries are unchanged.

    Holes of ``reference`` are filled from its own ``rank`` principal components, over and over;
    ``rows`` are means plus multiples of the components, fitted by ridge regression to what is known
    of each. A row of which nothing is known gets the means.
    """
    known = np.isfinite(reference)
    mean = np.where(known, reference, 0.0).sum(axis=0) / np.maximum(1, known.sum(axis=0))
    filled = np.where(known, reference, mean)
    for _ in range(1 if known.all() else ROUNDS):
        mean = filled.mean(axis=0)
        left, size, right = np.linalg.svd(filled - mean, full_matrices=False)
        fitted = mean + (left[:, :rank] * size[:rank]) @ right[:rank]
        filled = np.where(known, reference, fitted)
    # Scaled so that the reference jobs' multiples have variance 1.
    components = right[:rank] * (size[:rank, None] / np.sqrt(len(reference)))
    return filled, np.array([_fitted(row, mean, components, ridge) for row in rows])


def _fitted(row: Floats, mean: Floats, components: Floats, ridge: float) -> Floats:
    known = np.isfinite(row)
    seen = components[:, known]
    gram = seen @ seen.T + ridge * np.eye(len(seen))
    multiples = np.linalg.solve(gram, seen @ (row - mean)[known])
    return np.where(known, row, mean + multiples @ components)


# --- Tables of rates -----------------------------------------------------------------------------


def _key(pair: PairRate) -> tuple[int, str, str, str]:
    one, other = sorted(pair.models)
    return pair.scale, pair.accelerator, one, other


def _by_place(rates: tuple[Rate, ...]) -> dict[tuple[int, str, str], float]:
    """Steps per second alone, by scale, accelerator and model; the last of several counts."""
    return {(rate.scale, rate.accelerator, rate.model): rate.steps_per_second for rate in rates}


def _colocations(alone: dict[tuple[int, str, str], float]) -> Iterator[tuple[int, str, list[str]]]:
    """Scale, accelerator, and the models that run there, sorted."""
    together: dict[tuple[int, str], list[str]] = {}
    for scale, accelerator, model in sorted(alone):
        together.setdefault((scale, accelerator), []).append(model)
    for (scale, accelerator), models in together.items():
        yield scale, accelerator, models


def _kept(
    pairs: tuple[PairRate, ...], alone: dict[tuple[int, str, str], float]
) -> dict[tuple[int, str, str, str], float]:
    """The kept part of a model's rate, by (scale, accelerator, model, partner)."""
    kept = {}
    for pair in pairs:
        place, models = (pair.scale, pair.accelerator), pair.models
        for model, partner, rate in zip(models, models[::-1], pair.steps_per_second, strict=True):
            if (*place, model) not in alone:
                raise InputError(
                    f"{model!r} was measured with {partner!r} on {pair.scale} x "
                    f"{pair.accelerator!r}, but not alone: add its rate alone"
                )
            whole = alone[*place, model]
            kept[*place, model, partner] = rate / whole if whole else 0.0
    return kept


def _row(
    kept: dict[tuple[int, str, str, str], float],
    scale: int,
    accelerators: list[str],
    model: str,
    partners: list[str],
) -> list[float]:
    """Kept rates of ``model`` and each partner when sharing, by accelerator; nan if unknown."""
    return [
        kept.get((scale, accelerator, *both), np.nan)
        for accelerator in accelerators
        for partner in partners
        for both in ((model, partner), (partner, model))
    ]
