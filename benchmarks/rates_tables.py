"""Tables of the rate sets: errors and ranges, what is left out of them, choices; and a picture."""

from collections.abc import Iterator, Sequence
from statistics import mean

from matplotlib.figure import Figure
from scipy.stats import spearmanr

from benchmarks import rates_transfer
from benchmarks.rates import FITS, Fit, Pair, every_run, seconds
from benchmarks.report import FIGURES, Table
from stagewright.graphs.machines.rates import RateSet, rate_sets


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
    yield from rates_transfer.tables()


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
