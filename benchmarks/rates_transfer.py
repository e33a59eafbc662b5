"""How far rates carry: runs of a release, a device, a stack or a feature that no rate has seen.

What is left out is predicted by the rates that are taken where there are no others: the set of the
same stack and family fitted without it, or the nearest set, borrowed, with its wider range.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import mean

from benchmarks.measured_layouts import MeasuredRun
from benchmarks.rates import FITS, Fit, every_run, fitted, seconds
from benchmarks.report import Table
from stagewright.formulations.parallelism.ranges import expected, features, products
from stagewright.graphs.machines.devices import ACCELERATORS
from stagewright.graphs.machines.rates import (
    Feature,
    RateSet,
    rate_sets,
    rates_of,
    taken_for,
)

PART = 4
"""By how many times the GPUs, and the tokens of a sequence, of what is left out are more."""

Case = tuple[str, RateSet, list[MeasuredRun]]
"""What is left out, the rates that predict it, and the runs."""


def tables() -> Iterator[Table]:
    """What is left out, and how many of its runs are in their range."""
    columns = (
        "left out", "runs", "predicted by", "models", "off", "bias", "in the range",
        "faster than the range",
    )  # fmt: skip
    for name, title, found in (
        ("rates_transfer", "Runs of releases, devices and stacks without rates", _transfers()),
        ("rates_features", "Runs with a feature that was left out of the fit", _features()),
    ):
        yield Table(name, title, columns, tuple(row for case in found for row in _rows(case)))


def _rows(case: Case) -> Iterator[tuple[object, ...]]:
    left_out, rates, runs = case
    for kind, sparse in (("dense", False), ("experts", True)):
        some = [run for run in runs if run.is_sparse == sparse]
        if not some:
            continue
        off, inside, below = [], 0, 0
        for run in some:
            problem = replace(run.problem, rates=rates)
            found = seconds(run, rates.reached)
            of = expected(problem, features(problem, run.layout))
            off.append(found / run.seconds - 1)
            inside += of.low * found <= run.seconds <= of.high * found
            below += run.seconds < of.low * found
        yield (
            left_out, len(some), rates.name, kind, f"{mean(map(abs, off)):.1%}",
            f"{mean(off):+.1%}", f"{inside / len(some):.0%}", below,
        )  # fmt: skip


def _families() -> Iterator[tuple[tuple[Fit, ...], list[MeasuredRun]]]:
    """Sets that are fitted together, and their runs."""
    for fits in dict.fromkeys(one.together for one in FITS):
        if fits[0].constants and fits[0].like is None:
            yield fits, [run for run in every_run() if any(one.of(run) for one in fits)]


def _without(
    name: str,
    fits: Sequence[Fit],
    runs: Sequence[MeasuredRun],
    is_out: Callable[[MeasuredRun], bool],
    changed: Callable[[RateSet], RateSet] = lambda rates: rates,
) -> Iterator[Case]:
    """The runs that are left out, by each set of a family fitted without them."""
    out = [run for run in runs if is_out(run)]
    if not out or len(runs) - len(out) < len(fits) * 4:
        return
    found = fitted(fits, {one.name: one.start for one in fits}, out, tries=10)
    taken: set[str] = set()
    for one in fits:
        mine = [run for run in out if one.of(run) and run.id not in taken]
        taken |= {run.id for run in mine}
        if mine:
            yield name, changed(replace(rate_sets()[one.name], reached=found[one.name])), mine


def _transfers() -> Iterator[Case]:
    for fits, runs in _families():
        for release in sorted({run.release for run in runs} - {""}):
            yield from _without(release, fits, runs, lambda run, of=release: run.release == of)
        for device in sorted({run.device for run in runs}):
            yield from _without(device, fits, runs, lambda run, of=device: run.device == of)
    yield from _devices()
    yield from _stacks()


def _devices() -> Iterator[Case]:
    """Runs on a kind by the same stack's newest rates on every other kind."""
    for fit in FITS:
        for device in ("a100", "h100", "b200"):
            rates = rates_of(device, fit.stack) if fit.like is None else None
            if rates is None or device in fit.devices or rates.borrowed is not None:
                continue
            card = ACCELERATORS[fit.devices[0]]
            runs = [run for run in every_run() if fit.of(run)]
            yield f"{fit.name}: {card.name}", taken_for(rates, card), runs


def _stacks() -> Iterator[Case]:
    """Runs of a stack by every other stack's newest rates on the same kind."""
    for fit in FITS:
        for stack in ("megatron", "torchtitan", "fsdp"):
            card = ACCELERATORS[fit.devices[0]]
            rates = rates_of(card, stack)
            if stack == fit.stack or rates.borrowed is not None:
                continue
            runs = [run for run in every_run() if fit.of(run) and not run.is_sparse]
            yield f"{fit.name}: {fit.stack}", taken_for(rates, card, fit.stack), runs


def _features() -> Iterator[Case]:
    for fits, runs in _families():
        for feature in (
            "ZeRO 2-3 between servers", "context parallelism", "experts between servers",
            "products in 8 bits", "products in 16 bits",
        ):  # fmt: skip
            yield from _without(
                feature, fits, runs, lambda run, of=feature: of in _of(run),
                lambda rates, of=feature: replace(
                    rates, measured=tuple(one for one in rates.measured if one != of)
                ),
            )  # fmt: skip
        most = max(run.problem.fabric.devices for run in runs) // PART
        yield from _without(
            "more GPUs", fits, runs, lambda run, of=most: run.problem.fabric.devices > of,
            lambda rates, of=most: replace(rates, most_devices=of),
        )  # fmt: skip
        longest = max(run.problem.sequence for run in runs) // PART
        yield from _without(
            "longer sequences", fits, runs, lambda run, of=longest: run.problem.sequence > of,
            lambda rates, of=longest: replace(rates, longest_sequence=of),
        )  # fmt: skip


def _of(run: MeasuredRun) -> tuple[Feature, ...]:
    return (*features(run.problem, run.layout), products(run.problem.precision))
