"""Narayanan's thesis, section 6.3.2: what a job saves on cloud instances (figures 6.5 and 6.6).

The price logs are the thesis' own (AWS and Azure, 24 February to 23 March 2020). Where the text
leaves it open: AWS and Azure are taken in the US (as in figure 6.3), a job may start at midnight
(UTC) of every day on which all of its strategies end within the logs, and a cost reduction is the
mean over those days of the baseline's dollars over the strategy's. Moving is free, as there; a row
at the end has moves that take ten minutes. A job has one GPU and pays a share of its instance, as
there: others are packed onto the rest. The last rows are of instances that are rented whole, by a
job of one GPU and by one of eight.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import nan
from pathlib import Path

import numpy as np
from rich.progress import track

from benchmarks.report import Table, percent
from stagewright.formulations.cloud.strategies import STRATEGIES, Home, follow
from stagewright.formulations.cloud.switching import (
    NO_OVERHEADS,
    Offer,
    Outcome,
    Overheads,
    SwitchingProblem,
    offers_of,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.cloud_prices import read_cloud_logs, read_model_rates
from stagewright.graphs.workloads.prices import Instance, Market
from stagewright.solvers.cloud.switching import SwitchingResult, solve_switching

DATA = Path(__file__).parents[2] / "shared" / "data" / "cloud"

MODELS = {
    "Transformer": "Transformer (batch size 256)",
    "A3C": "A3C",
    "CycleGAN": "CycleGAN",
    "ResNet-18": "ResNet-18 (batch size 256)",
    "ResNet-50": "ResNet-50 (batch size 128)",
    "LM": "LM (batch size 80)",
    "Recommendation": "Recommendation (batch size 8192)",
}
"""At the batch sizes whose rates give table 6.1; the last two are not in it."""

DAY = 86_400.0
JOB_DAYS = 4.0  # "Each ML training job takes 4 days to complete"
DURATIONS = (0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0)  # days on a V100
MOVES = Overheads(checkpoint_seconds=300.0, restore_seconds=300.0)
HOME = Home()


def shares_of(market: Market, rates: Mapping[str, float]) -> tuple[Offer, ...]:
    """Offers for a job of one GPU, which pays only one GPU's share of an instance.

    The thesis's assumption (6.3.2): other jobs use and pay the rest of the instance.
    """
    offers = offers_of(market, rates)
    return tuple(replace(offer, instances=1 / offer.instance.gpus) for offer in offers)


def is_in_study(one: Instance) -> bool:
    """AWS and Azure in the US."""
    return one.provider in ("aws", "azure") and one.region.startswith("us")


@cache
def market() -> Market:
    """The study's prices."""
    if not DATA.is_dir():
        raise InputError(f"{DATA}: the price logs are not beside the checkout")
    return read_cloud_logs(DATA / "logs").of(is_in_study)


@cache
def rates(model: str) -> dict[str, float]:
    """Work per hour of each kind of GPU, of which a V100 does one."""
    found = read_model_rates(DATA / "notebooks" / "oracle_throughputs.json")[MODELS[model]]
    return {gpu: rate / found["v100"] for gpu, rate in found.items()}


@dataclass(frozen=True, slots=True)
class Run:
    """A job that starts on one day: each strategy's outcome, and the optimum's.

    ``no_later`` is the optimum among plans that end when *dynamic* does or before; ``optimum`` may
    wait, and take until the logs' end.
    """

    followed: dict[str, Outcome]
    no_later: SwitchingResult
    optimum: SwitchingResult

    def dollars(self, name: str) -> float:
        """Of a strategy, or of ``no later`` or ``optimum``."""
        if name in self.followed:
            return self.followed[name].dollars
        found = (self.no_later if name == NO_LATER else self.optimum).outcome
        return nan if found is None else found.dollars


NO_LATER, OPTIMUM = "optimum, no later", "optimum"


def runs(
    model: str,
    days: float,
    names: Sequence[str],
    overheads: Overheads = NO_OVERHEADS,
    whole_gpus: int | None = None,
) -> Iterator[Run]:
    """The job on every day from which all strategies of ``names`` end within the logs.

    It pays a share of an instance; or, with ``whole_gpus``, whole instances for so many GPUs.
    """
    offers = shares_of(market(), rates(model))
    if whole_gpus is not None:
        offers = offers_of(market(), rates(model), whole_gpus)
    begin, end = market().from_seconds, market().until_seconds
    while begin < end:
        asked = SwitchingProblem(offers, 24 * days, begin, end, overheads)
        begin += DAY
        found = {name: follow(asked, name, HOME) for name in names}
        outcomes = {name: one.outcome for name, one in found.items() if one.outcome is not None}
        if len(outcomes) < len(found):
            continue
        deadline = found["dynamic"].plan[-1].end_seconds
        in_time = [one.plan for one in found.values() if one.plan[-1].end_seconds <= deadline]
        yield Run(
            outcomes,
            solve_switching(replace(asked, deadline_seconds=deadline), in_time),
            solve_switching(asked, [one.plan for one in found.values()]),
        )


def reduction(found: Sequence[Run], name: str, baseline: str = "1xv100") -> float:
    """Mean over the runs of the baseline's dollars over those of ``name``."""
    return float(np.mean([run.dollars(baseline) / run.dollars(name) for run in found]))


# --- Tables --------------------------------------------------------------------------------------

NAMES = (*STRATEGIES, NO_LATER, OPTIMUM)
STICK, MOVE = "multi-cloud", "dynamic"


def figure5_table(found: dict[str, Sequence[Run]]) -> Table:
    """Cost reductions of a job of four V100-days, a row per model."""
    rows = []
    for model, at in found.items():
        switches = [run.followed["dynamic"].switches for run in at]
        gaps = [run.optimum.gap or 0.0 for run in at]
        rows.append(
            (
                model,
                len(at),
                f"{np.mean([run.dollars('1xv100') for run in at]):.2f}",
                *(f"{reduction(at, name):.2f}" for name in NAMES[1:]),
                f"{np.mean(switches):.1f} ({max(switches)})",
                percent(max(gaps)),
            )
        )
    return Table(
        "cloud",
        f"Thesis figure 6.5: mean cost of 1xv100 over a strategy's, {JOB_DAYS:g} V100-days, one "
        "GPU that pays its share of an instance "
        "(printed: up to 3.5 for dynamic)",
        (
            "model", "start days", "1xv100, $", *NAMES[1:], "moves of dynamic: mean (most)",
            "largest gap of the optimum",
        ),
        tuple(rows),
    )  # fmt: skip


def figure6_table(found: dict[str, dict[float, Sequence[Run]]]) -> Table:
    """Cost reduction of moving over sticking with the best choice at the start."""
    rows = []
    for model, by_days in found.items():
        cells = []
        for at in by_days.values():
            ratios = [run.dollars(STICK) / run.dollars(MOVE) for run in at]
            cells.append(f"{np.mean(ratios):.2f}, {max(ratios):.2f} ({len(at)})" if at else "-")
        rows.append((model, *cells))
    return Table(
        "cloud-figure6",
        "Thesis figure 6.6: cost of multi-cloud over dynamic's by V100-days of the job: mean, most "
        "(start days); printed: average up to 1.4",
        ("model", *(f"{days:g} d" for days in next(iter(found.values())))),
        tuple(rows),
    )


def tables(quick: bool) -> list[Table]:
    """Both figures as tables."""
    models = list(MODELS)[:1] if quick else list(MODELS)
    durations = (1.0, JOB_DAYS) if quick else DURATIONS
    four: dict[str, Sequence[Run]] = {}
    by_days: dict[str, dict[float, Sequence[Run]]] = {}
    for model in track(models, "cloud"):
        four[model] = list(runs(model, JOB_DAYS, list(STRATEGIES)))
        by_days[model] = {days: list(runs(model, days, (STICK, MOVE))) for days in durations}
    names = list(STRATEGIES)
    rest = {
        "Transformer, 10 min a move": list(runs("Transformer", JOB_DAYS, names, MOVES)),
        "Transformer, whole instances": list(runs("Transformer", JOB_DAYS, names, whole_gpus=1)),
        "Transformer, 8 GPUs, whole": list(runs("Transformer", JOB_DAYS, names, whole_gpus=8)),
    }
    return [figure5_table({**four, **rest}), figure6_table(by_days)]
