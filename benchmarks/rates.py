"""The rate sets of the package: least squares on published iterations, one set a stack and device.

``python -m benchmarks.rates [NAME ...]`` fits, and writes ``graphs/machines/rate_sets/NAME.json``.
The residuals are logarithms of predicted over measured seconds, one per run, with a loss that bends
few outliers; a weak prior holds what the runs hardly tell. Links are not fitted: their rates are
those of the machine (``networks.py``). Each model is left out of a fit, and predicted by it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import mean
from typing import get_args

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from benchmarks.layout_runs import compiled
from benchmarks.measured_layouts import MeasuredRun, measured_runs, published_on_a100
from benchmarks.report import FIGURES, Table
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.ranges import features
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.machines.rates import (
    FOLDER,
    Feature,
    LeftOut,
    RateSet,
    Reached,
    Spread,
    rate_sets,
)

# Of each constant: a prior value, least, most, and the prior's weight: a factor e costs as much as
# a run that is off by this share.
CONSTANTS = {
    "matmul": (0.65, 0.2, 0.85, 0.05),
    "half_flops": (1.5e10, 1e8, 5e11, 0.02),
    "memory": (0.7, 0.25, 0.95, 0.1),
    "launch_seconds": (4e-6, 1e-6, 8e-6, 0.02),
    "fp8_matmul": (0.6, 0.2, 0.78, 0.05),
    "cast_bytes": (4.0, 1.0, 16.0, 0.05),
    "attention": (0.5, 0.1, 0.9, 0.1),
    "attention_backward": (0.42, 0.1, 0.9, 0.1),
    "attention_half_flops": (1e10, 1e8, 1e12, 0.02),
    "contention": (0.15, 1e-3, 2.0, 0.05),
    "logit_bytes": (16.0, 2.0, 80.0, 0.05),
    "expert_seconds": (2e-4, 1e-7, 1e-2, 0.02),
    "each_expert_seconds": (3e-5, 1e-7, 1e-3, 0.02),
    "expert_overlap": (0.3, 1e-3, 0.95, 0.05),
}
"""What may be fitted; see :class:`Reached`."""

PRODUCTS = ("matmul", "half_flops", "memory", "launch_seconds", "contention", "logit_bytes")
ATTENTION = ("attention", "attention_backward")
EIGHT_BITS = ("fp8_matmul", "cast_bytes")
EXPERTS = ("expert_seconds", "each_expert_seconds", "expert_overlap")

START = Reached(0.65, 1.5e10, 0.7, 4e-6, dispatch_seconds=3e-5, fp8_head=False, once_per_unit=True)
BENT = 0.08
"""Errors above this count less than their squares."""
SURE = 0.95
"""The part of the left-out runs that is no slower than the range; none is faster."""


@dataclass(frozen=True)
class Fit:
    """A set to fit: the runs ``of`` it, its constants, and those that are taken from ``like``.

    With ``shared`` the constants are fitted to those runs, and then ``own`` ones to the set's.
    """

    name: str
    stack: str
    devices: tuple[str, ...]
    releases: str
    source: str
    of: Callable[[MeasuredRun], bool]
    constants: tuple[str, ...]
    start: Reached = START
    like: str | None = None
    shared: Callable[[MeasuredRun], bool] | None = None
    own: tuple[str, ...] = ()


_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md and -archive.md"
_NEMO = "NVIDIA/NeMo, performance summary of 24.07, long sequences; DGX Cloud benchmarking"
_OLD = ("25.09", "25.11", "26.02")
_NEMO_RELEASES = ("nemo24.07", "nemo-longseq")
_OF_RELEASE = ("matmul", "fp8_matmul", "cast_bytes", *EXPERTS)
_BLACKWELL_OLD = (*_OLD, "26.02.01", "26.04", "26.04.01")


def _megatron(run: MeasuredRun) -> bool:
    return run.stack in ("megatron-bridge", "nemo")


def _on_h100(run: MeasuredRun) -> bool:
    return _megatron(run) and run.device == "h100"


def _blackwell(run: MeasuredRun) -> bool:
    return run.device in ("b200", "gb200")


# A fit of the first two gives 0.766 and 0.60, hardly better than these, which order vTrain's runs
# on one server better: their layers are small and wait for the host.
_A100 = replace(
    START, matmul=0.76, memory=0.562, half_flops=2.15e10, launch_seconds=4.4e-6,
    dispatch_seconds=1e-4, attention=0.5, attention_backward=0.4,
)  # fmt: skip

FITS = (
    Fit(
        "megatron-a100-2022", "megatron", ("a100", "a100-80gb"), "2021 and 2022",
        "Korthikanti et al. 2022, tables 3 to 5; Narayanan's thesis, table 4.1; vTrain's runs; "
        "fused attention, which none of them has, is assumed to be near that of FSDP's runs",
        lambda run: run.stack in ("megatron-2021", "megatron-2022"),
        (),
        _A100,
    ),
    Fit(
        "megatron-h100-24.07",
        "megatron",
        ("h100",),
        "24.07 to 26.02; without experts, 24.07 alone",
        f"{_BRIDGE}; {_NEMO}",
        lambda run: _on_h100(run) and run.release in (_OLD if run.is_sparse else _NEMO_RELEASES),
        (*PRODUCTS, *ATTENTION, "attention_half_flops", *EIGHT_BITS, *EXPERTS),
        shared=lambda run: _on_h100(run) and (not run.is_sparse or run.release in _OLD),
        own=_OF_RELEASE,
    ),
    Fit(
        "megatron-h100-26.06",
        "megatron",
        ("h100",),
        "25.09 to 26.06; with experts, 26.02.01 to 26.06",
        f"{_BRIDGE}; {_NEMO}",
        lambda run: _on_h100(run)
        and run.release not in (_OLD if run.is_sparse else _NEMO_RELEASES),
        (*PRODUCTS, *ATTENTION, "attention_half_flops", *EIGHT_BITS, *EXPERTS),
        shared=lambda run: _on_h100(run) and (not run.is_sparse or run.release not in _OLD),
        own=_OF_RELEASE,
    ),
    Fit(
        "megatron-b200-25.09", "megatron", ("b200", "gb200"), "25.09 to 26.04.01", _BRIDGE,
        lambda run: _megatron(run) and _blackwell(run)
        and (not run.is_sparse or run.release in _BLACKWELL_OLD),
        (*PRODUCTS, *ATTENTION, *EIGHT_BITS, *EXPERTS),
        shared=lambda run: _megatron(run) and _blackwell(run),
        own=EXPERTS,
    ),
    Fit(
        "megatron-b200-26.08", "megatron", ("b200", "gb200"), "26.06 to 26.08", _BRIDGE,
        lambda run: _megatron(run) and _blackwell(run)
        and (not run.is_sparse or run.release not in _BLACKWELL_OLD),
        (*PRODUCTS, *ATTENTION, *EIGHT_BITS, *EXPERTS),
        shared=lambda run: _megatron(run) and _blackwell(run),
        own=EXPERTS,
    ),
    Fit(
        "torchtitan-h100", "torchtitan", ("h100",), "2024 and 2025, compiled",
        "pytorch/torchtitan, benchmarks",
        lambda run: run.stack == "torchtitan" and not run.note.startswith("eager"),
        ("matmul", "memory", "contention", "logit_bytes", *ATTENTION, *EIGHT_BITS),
        replace(START, context_balanced=False),
    ),
    Fit(
        "torchtitan-eager-h100", "torchtitan-eager", ("h100",), "2024 and 2025, not compiled",
        "pytorch/torchtitan, benchmarks",
        lambda run: run.stack == "torchtitan" and run.note.startswith("eager"),
        ("memory",),
        like="torchtitan-h100",
    ),
    Fit(
        "fsdp-h100", "fsdp", ("h100",), "2023 and 2024",
        "mosaicml/llm-foundry, scripts/train/benchmarking",
        lambda run: run.stack == "fsdp" and run.device == "h100",
        (*PRODUCTS, *ATTENTION, *EIGHT_BITS),
    ),
    Fit(
        "fsdp-a100", "fsdp", ("a100", "a100-80gb"), "2023 and 2024",
        "mosaicml/llm-foundry, scripts/train/benchmarking",
        lambda run: run.stack == "fsdp" and run.device != "h100",
        (*PRODUCTS, *ATTENTION),
    ),
)  # fmt: skip


def every_run() -> tuple[MeasuredRun, ...]:
    """What may be fitted to."""
    return measured_runs() + published_on_a100()


def seconds(run: MeasuredRun, reached: Reached) -> float:
    """Predicted seconds of a run's iteration."""
    rates = replace(run.problem.rates, reached=reached)
    return evaluate(replace(run.problem, rates=rates), run.layout, compiled).seconds


def fitted(
    runs: Sequence[MeasuredRun], names: Sequence[str], start: Reached, tries: int = 12
) -> Reached:
    """The constants called ``names`` that fit the runs best; the others are those of ``start``."""
    prior, least, most, weight = np.array([CONSTANTS[name] for name in names]).T
    first = [getattr(start, name) or CONSTANTS[name][0] for name in names]

    def residuals(logarithms: Floats) -> Floats:
        reached = replace(start, **dict(zip(names, np.exp(logarithms).tolist(), strict=True)))
        off = [log(seconds(run, reached) / run.seconds) for run in runs]
        return np.array([*off, *(weight * (logarithms - np.log(prior)))])

    found = least_squares(
        residuals, np.log(np.clip(first, least * 1.001, most * 0.999)),
        bounds=(np.log(least), np.log(most)), diff_step=2e-2, loss="soft_l1", f_scale=BENT,
        max_nfev=tries,
    )  # fmt: skip
    rounded = {
        name: float(f"{value:.3g}") for name, value in zip(names, np.exp(found.x), strict=True)
    }
    return replace(start, **rounded)


def cases(runs: Sequence[MeasuredRun]) -> dict[str, list[MeasuredRun]]:
    """The runs that are left out together: those of a model; where there is one model, each run."""
    alone = len({run.model for run in runs}) == 1
    found: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        found.setdefault(f"{run.model}, run {run.id}" if alone else run.model, []).append(run)
    return found


def constants_of(
    fit: Fit, start: Reached, without: Sequence[MeasuredRun] = (), tries: int = 12
) -> Reached:
    """The constants of a set, fitted to all its runs but some."""
    every = [run for run in every_run() if run not in without]
    for of, names in ((fit.shared, fit.constants), (fit.of, fit.own or fit.constants)):
        runs = [] if of is None else [run for run in every if of(run)]
        # What no run tells stays as it is.
        sparse = any(run.is_sparse for run in runs)
        dense = of is fit.shared or any(not run.is_sparse for run in runs)
        names = [name for name in names if (sparse if name in EXPERTS else dense)]
        if runs and names:
            start = fitted(runs, names, start, tries)
    return start


def rate_set(fit: Fit, known: dict[str, RateSet]) -> RateSet:
    """The fitted set, with the errors and the ranges of what is left out."""
    runs = [run for run in every_run() if fit.of(run)]
    reached = constants_of(fit, known[fit.like].reached if fit.like else fit.start)
    ratios: dict[bool, list[float]] = {False: [], True: []}
    errors = []
    for case, out in cases(runs).items():
        other = constants_of(fit, reached, out, tries=4)
        off = [seconds(run, other) / run.seconds for run in out]
        error = mean(abs(one - 1) for one in off)
        errors.append(LeftOut(case, len(out), round(error, 4), round(mean(off) - 1, 4)))
        for run, ratio in zip(out, off, strict=True):
            ratios[run.is_sparse] += [1 / ratio, run.seconds / seconds(run, reached)]
    dense = spread(ratios[False]) if ratios[False] else known["megatron-h100-26.06"].dense
    experts = spread(ratios[True]) if ratios[True] else dense.widened(1.25)
    many = f"{len(runs)} iterations of {len({run.model for run in runs})} models"
    return RateSet(
        fit.name, fit.stack, fit.devices, fit.releases, fit.source, f"fitted to {many}", reached,
        dense, experts, Spread(0.94, 1.06), tuple(errors), measured=measured_by(runs),
    )  # fmt: skip


def measured_by(runs: Sequence[MeasuredRun]) -> tuple[Feature, ...]:
    """The features that any of the runs has."""
    found = [features(run.problem, run.layout) for run in runs]
    return tuple(one for one in get_args(Feature) if any(one in of for of in found))


def spread(ratios: Sequence[float]) -> Spread:
    """The range of measured over predicted: none is faster, few are slower."""
    return Spread(
        round(0.98 * min(min(ratios), 1.0), 3),
        round(max(float(np.quantile(ratios, SURE)), 1.05), 3),
    )


def tables(_: bool) -> Iterator[Table]:
    """Every set's errors and ranges, by model too, and choices among layouts; draws a picture."""
    found = [(one, _predicted(fit, one)) for fit in FITS for one in [rate_sets()[fit.name]]]
    rows = []
    for one, pairs in found:
        for kind, sparse in (("dense", False), ("experts", True)):
            of_kind = [pair for pair in pairs if pair[0].is_sparse == sparse]
            if of_kind:
                rows.append((one.name, kind, *_row(one, of_kind, sparse)))
    columns = (
        "rates", "models", "runs", "off", "bias", "range", "in the range", "faster than the range",
    )  # fmt: skip
    yield Table("rates", "Measured iterations by their rate sets", columns, tuple(rows))
    models = [
        (one.name, error.model, error.runs, f"{error.error:.1%}", f"{error.bias:+.1%}")
        for one, _ in found
        for error in one.errors
    ]
    columns = ("rates", "left out", "runs", "off", "bias")
    yield Table("rates_left_out", "Iterations that were left out of a fit", columns, tuple(models))
    yield choices([pair for _, pairs in found for pair in pairs])
    _draw(found)


Pair = tuple[MeasuredRun, float]
"""A run and its predicted seconds."""


def _predicted(fit: Fit, one: RateSet) -> list[Pair]:
    return [(run, seconds(run, one.reached)) for run in every_run() if fit.of(run)]


def _row(one: RateSet, pairs: Sequence[Pair], sparse: bool) -> tuple[str, ...]:
    ratios = [run.seconds / found for run, found in pairs]
    off = [1 / ratio - 1 for ratio in ratios]
    of = one.experts if sparse else one.dense
    return (
        str(len(pairs)),
        f"{mean(map(abs, off)):.1%}",
        f"{mean(off):+.1%}",
        f"{of.low:.2f} to {of.high:.2f}",
        f"{mean(of.low <= ratio <= of.high for ratio in ratios):.0%}",
        str(sum(ratio < of.low for ratio in ratios)),
    )


def choices(pairs: Sequence[Pair]) -> Table:
    """Of all layouts that were measured for a model, a batch and a number of GPUs."""
    groups: dict[tuple[object, ...], dict[str, Pair]] = {}
    for run, found in pairs:
        of = run.problem
        key = (
            run.stack, run.release, run.device, run.model, of.fabric.devices, of.sequence, of.batch,
        )  # fmt: skip
        groups.setdefault(key, {})[run.id] = run, found
    rows = []
    for key, found_by in groups.items():
        group = list(found_by.values())
        if len(group) < 3:
            continue
        chosen, _ = min(group, key=lambda pair: pair[1])
        best = min(run.seconds for run, _ in group)
        order = spearmanr([run.seconds for run, _ in group], [found for _, found in group])
        rows.append(
            (*key, len(group), f"{order.statistic:.2f}", f"{chosen.seconds / best - 1:.1%}")
        )
    columns = (
        "stack", "release", "device", "model", "GPUs", "tokens", "batch", "layouts",
        "rank correlation", "the chosen one is slower by",
    )  # fmt: skip
    return Table("rates_choices", "Choices among measured layouts", columns, tuple(rows))


def _draw(found: Sequence[tuple[RateSet, Sequence[Pair]]]) -> None:
    """Predicted over measured seconds of every run, by set, with the sets' ranges."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for place, (one, pairs) in enumerate(found):
        for sparse, colour in ((False, "tab:blue"), (True, "tab:orange")):
            ratios = [run.seconds / value for run, value in pairs if run.is_sparse == sparse]
            of = one.experts if sparse else one.dense
            at = place + 0.2 * sparse
            if ratios:
                axes.plot([at, at], [of.low, of.high], color=colour, alpha=0.3, linewidth=8)
                axes.plot([at] * len(ratios), ratios, ".", color=colour)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(found)), [one.name for one, _ in found], rotation=30, ha="right")
    axes.set_ylabel("measured over predicted seconds")
    axes.set_title("Runs and ranges of the rate sets: dense models blue, experts orange")
    figure.savefig(FIGURES / "rates.png", dpi=110)


def main(names: Sequence[str]) -> None:
    """Fit and write the sets."""
    known = dict(rate_sets())
    for fit in FITS:
        if names and fit.name not in names:
            continue
        found = known[fit.name] = rate_set(fit, known)
        documents.write(RateSet, found, FOLDER / f"{fit.name}.json")
        print(fit.name, found.reached)
        for one in found.errors:
            print(f"  {one.model}: {one.runs} runs, {one.error:.1%} off, bias {one.bias:+.1%}")
        print(
            f"  {found.mean_error or 0:.1%}; dense {found.dense}, experts {found.experts}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
