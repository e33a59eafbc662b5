"""The rate sets of the package: least squares on published iterations, one set a stack and device.

``python -m benchmarks.rates [NAME ...]`` fits, and writes ``graphs/machines/rate_sets/NAME.json``.
The residuals are logarithms of predicted over measured seconds, one per run, with a loss that bends
few outliers; a weak prior holds what the runs hardly tell. Links are not fitted: their rates are
those of the machine (``networks.py``). Each model is left out of a fit, and predicted by it.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from multiprocessing import get_context
from statistics import mean

import numpy as np
from scipy.optimize import least_squares

from benchmarks.layout_runs import compiled
from benchmarks.measured_layouts import (
    MeasuredRun,
    measured_runs,
    published_on_a100,
    published_on_h100,
)
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.ranges import measured_by
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.units import counted
from stagewright.graphs.machines.rates import (
    FOLDER,
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

    Sets of one stack and kind of device are fitted together: the ``own`` constants of each to its
    runs, since a release decides them, and all others to the runs of all.
    """

    name: str
    stack: str
    devices: tuple[str, ...]
    releases: str
    source: str
    of: Callable[[MeasuredRun], bool]
    constants: tuple[str, ...]
    own: tuple[str, ...] = ()
    start: Reached = START
    like: str | None = None

    @property
    def together(self) -> "tuple[Fit, ...]":
        """The sets that are fitted with this one, itself among them."""
        return tuple(one for one in FITS if (one.stack, one.devices) == (self.stack, self.devices))


_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md and -archive.md"
_TABLE = "NVIDIA/Megatron-LM, images/model_table.png of 2024, whose layouts are chosen"
_NEMO = "NVIDIA/NeMo, performance summary of 24.07, long sequences; DGX Cloud benchmarking"
_OLD = ("25.09", "25.11", "26.02")
_OF_2024 = ("nemo24.07", "nemo-longseq", "2024")
_OF_RELEASE = ("matmul", "cast_bytes", *EXPERTS)
"""The library of products in 16 bits, how operands in 8 bits are made, and what the host does for
experts are software; the rest is the device's."""
_BLACKWELL_OLD = (*_OLD, "26.02.01", "26.04", "26.04.01")


def _megatron(run: MeasuredRun) -> bool:
    return run.stack in ("megatron-bridge", "nemo", "megatron-2024")


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

_H100 = (
    *(one for one in PRODUCTS if one != "matmul"),
    *ATTENTION,
    "attention_half_flops",
    "fp8_matmul",
)
_B200 = (*PRODUCTS, *ATTENTION, *EIGHT_BITS)

FITS = (
    Fit(
        "megatron-a100-2022", "megatron", ("a100", "a100-80gb"), "2021 and 2022",
        "Korthikanti et al. 2022, tables 3 to 5; Narayanan's thesis, table 4.1; vTrain's runs; "
        "fused attention, which none of them has, is assumed to be near that of FSDP's runs",
        lambda run: run.stack in ("megatron-2021", "megatron-2022"),
        (),
        start=_A100,
    ),
    Fit(
        "megatron-h100-24.07",
        "megatron",
        ("h100",),
        "24.07 to 26.02; without experts, 2024 alone",
        f"{_BRIDGE}; {_NEMO}; {_TABLE}",
        lambda run: _on_h100(run) and run.release in (_OLD if run.is_sparse else _OF_2024),
        _H100,
        _OF_RELEASE,
    ),
    Fit(
        "megatron-h100-26.06",
        "megatron",
        ("h100",),
        "25.09 to 26.06; with experts, 26.02.01 to 26.06",
        f"{_BRIDGE}; {_NEMO}",
        lambda run: _on_h100(run)
        and run.release not in (_OLD if run.is_sparse else _OF_2024),
        _H100,
        _OF_RELEASE,
    ),
    Fit(
        "megatron-b200-25.09", "megatron", ("b200", "gb200"), "25.09 to 26.04.01", _BRIDGE,
        lambda run: _megatron(run) and _blackwell(run)
        and (not run.is_sparse or run.release in _BLACKWELL_OLD),
        _B200,
        EXPERTS,
    ),
    Fit(
        "megatron-b200-26.08", "megatron", ("b200", "gb200"), "26.06 to 26.08", _BRIDGE,
        lambda run: _megatron(run) and _blackwell(run)
        and (not run.is_sparse or run.release not in _BLACKWELL_OLD),
        _B200,
        EXPERTS,
    ),
    Fit(
        "torchtitan-h100", "torchtitan", ("h100",), "2024 and 2025, compiled",
        "pytorch/torchtitan, benchmarks",
        lambda run: run.stack == "torchtitan" and not run.note.startswith("eager"),
        ("matmul", "memory", "contention", "logit_bytes", *ATTENTION, *EIGHT_BITS),
        start=replace(START, context_balanced=False),
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


Pair = tuple[MeasuredRun, float]
"""A run and its predicted seconds."""


def every_run() -> tuple[MeasuredRun, ...]:
    """What may be fitted to."""
    return measured_runs() + published_on_a100() + published_on_h100()


@lru_cache(maxsize=4096)
def seconds(run: MeasuredRun, reached: Reached) -> float:
    """Predicted seconds of a run's iteration."""
    rates = replace(run.problem.rates, reached=reached)
    return evaluate(replace(run.problem, rates=rates), run.layout, compiled).seconds


def fitted(
    fits: Sequence[Fit],
    start: dict[str, Reached],
    without: Sequence[MeasuredRun] = (),
    tries: int = 12,
) -> dict[str, Reached]:
    """The constants by set that fit the runs best, of all runs but some.

    What no run tells stays as it is in ``start``.
    """
    runs = _runs_of(fits, without)
    every = [run for some in runs.values() for run in some]
    keys = [
        (of, name)
        for of, names, told in (
            (None, fits[0].constants, every),
            *((one.name, one.own, runs[one.name]) for one in fits),
        )
        for name in names
        if (any(run.is_sparse for run in told) if name in EXPERTS else told)
    ]
    if not keys:
        return start
    prior, least, most, weight = np.array([CONSTANTS[name] for _, name in keys]).T
    first = [getattr(start[of or fits[0].name], name) or CONSTANTS[name][0] for of, name in keys]

    def reached(values: Sequence[float]) -> dict[str, Reached]:
        found = list(zip(keys, values, strict=True))
        return {
            one.name: replace(
                start[one.name],
                **{name: value for (of, name), value in found if of in (None, one.name)},
            )
            for one in fits
        }

    def residuals(logarithms: Floats) -> Floats:
        found = reached(np.exp(logarithms).tolist())
        off = [
            log(seconds(run, found[name]) / run.seconds)
            for name, some in runs.items()
            for run in some
        ]
        return np.array([*off, *(weight * (logarithms - np.log(prior)))])

    best = least_squares(
        residuals, np.log(np.clip(first, least * 1.001, most * 0.999)),
        bounds=(np.log(least), np.log(most)), diff_step=2e-2, loss="soft_l1", f_scale=BENT,
        max_nfev=tries,
    )  # fmt: skip
    return reached([float(f"{value:.3g}") for value in np.exp(best.x)])


def _runs_of(fits: Sequence[Fit], without: Sequence[MeasuredRun]) -> dict[str, list[MeasuredRun]]:
    """The runs by set; one that is of several sets counts for the first."""
    found: dict[str, list[MeasuredRun]] = {one.name: [] for one in fits}
    for run in every_run():
        names = [one.name for one in fits if one.of(run)]
        if names and run not in without:
            found[names[0]].append(run)
    return found


def cases(runs: Sequence[MeasuredRun]) -> dict[str, list[MeasuredRun]]:
    """The runs that are left out together: those of a model; where there is one model, each run."""
    alone = len({run.model for run in runs}) == 1
    found: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        found.setdefault(f"{run.model}, run {run.id}" if alone else run.model, []).append(run)
    return found


def family(fits: Sequence[Fit], known: dict[str, RateSet]) -> Iterator[RateSet]:
    """The fitted sets of a stack and device, with errors and ranges of what is left out."""
    like = fits[0].like
    start = {one.name: known[like].reached if like else one.start for one in fits}
    reached = fitted(fits, start)
    runs = [run for run in every_run() if any(one.of(run) for one in fits)]
    left_out: dict[str, dict[str, list[Pair]]] = {one.name: {} for one in fits}
    left = cases(runs)
    with get_context("fork").Pool(2) as pool:
        names = tuple(one.name for one in fits)
        every = pool.starmap(_fitted_without, [(names, reached, case) for case in left], 1)
    for (case, out), others in zip(left.items(), every, strict=True):
        for one in fits:
            mine = [(run, seconds(run, others[one.name])) for run in out if one.of(run)]
            left_out[one.name] |= {case: mine} if mine else {}
    for one in fits:
        found = _rate_set(one, reached[one.name], left_out[one.name], known)
        yield replace(found, **measured_by([(run.problem, run.layout) for run in runs]))


def _fitted_without(
    names: Sequence[str], start: dict[str, Reached], case: str
) -> dict[str, Reached]:
    """The constants of sets that are fitted together, without the runs of a case."""
    fits = [one for one in FITS if one.name in names]
    runs = [run for run in every_run() if any(one.of(run) for one in fits)]
    return fitted(fits, start, cases(runs)[case], tries=4)


def _rate_set(
    fit: Fit, reached: Reached, left_out: dict[str, list[Pair]], known: dict[str, RateSet]
) -> RateSet:
    pairs = [(run, seconds(run, reached)) for run in every_run() if fit.of(run)]
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for run, found in itertools.chain(pairs, *left_out.values()):
        ratios[run.is_sparse].append(run.seconds / found)
    errors = []
    for case, out in left_out.items():
        off = [found / run.seconds - 1 for run, found in out]
        errors.append(LeftOut(case, len(out), round(mean(map(abs, off)), 4), round(mean(off), 4)))
    dense = spread(ratios[False]) if ratios[False] else known["megatron-h100-26.06"].dense
    experts = spread(ratios[True]) if ratios[True] else dense.widened(1.25)
    models = counted(len({run.model for run, _ in pairs}), "model", "models")
    many = f"{len(pairs)} iterations of {models}"
    others = " and ".join(one.name for one in fit.together if one != fit)
    if others:
        many += f"; what releases share, to those of {others} too"
    if fit.like is not None:
        many += f"; all but {', '.join(fit.constants)} from {fit.like}"
    return RateSet(
        fit.name, fit.stack, fit.devices, fit.releases, fit.source, f"fitted to {many}", reached,
        dense, experts, Spread(0.94, 1.06), tuple(errors),
    )  # fmt: skip


def spread(ratios: Sequence[float]) -> Spread:
    """The range of measured over predicted: none is faster, few are slower."""
    return Spread(
        round(0.98 * min(min(ratios), 1.0), 3),
        round(max(float(np.quantile(ratios, SURE)), 1.05), 3),
    )


def main(names: Sequence[str]) -> None:
    """Fit and write the sets."""
    known = dict(rate_sets())
    for fits in dict.fromkeys(one.together for one in FITS):
        if names and not {one.name for one in fits} & set(names):
            continue
        for found in family(fits, known):
            known[found.name] = found
            documents.write(RateSet, found, FOLDER / f"{found.name}.json")
            print(found.name, found.reached)
            for one in found.errors:
                print(f"  {one.model}: {one.runs} runs, {one.error:.1%} off, bias {one.bias:+.1%}")
            print(
                f"  {found.mean_error or 0:.1%}; dense {found.dense}, experts {found.experts}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
