"""Small markets of cloud instances for tests."""

from collections.abc import Sequence

from stagewright.formulations.cloud.switching import (
    NO_OVERHEADS,
    Offer,
    Overheads,
    SwitchingProblem,
)
from stagewright.graphs.workloads.prices import HOUR, Instance, PriceSeries

START = 1_582_502_400.0  # 2020-02-24


def series(
    prices: Sequence[float],
    *,
    name: str = "a",
    gpu: str = "v100",
    gpus: int = 1,
    place: tuple[str, str] = ("aws", "us-east-1"),
    hours: float = 1.0,
) -> PriceSeries:
    """A price per ``hours`` from the start on."""
    instance = Instance(*place, name, gpu, gpus)
    times = tuple(START + i * hours * HOUR for i in range(len(prices)))
    return PriceSeries(instance, times, tuple(prices), START + len(prices) * hours * HOUR)


def problem(
    offers: Sequence[tuple[float, Sequence[float]]],
    work: float,
    overheads: Overheads = NO_OVERHEADS,
    *,
    places: Sequence[tuple[str, str]] | None = None,
    hours: float = 1.0,
) -> SwitchingProblem:
    """Offers are (rate, price per hour of time); the deadline is the prices' end."""
    made = tuple(
        Offer(
            series(
                prices, name=f"i{i}", hours=hours,
                place=places[i] if places else ("aws", "us-east-1"),
            ),
            rate,
        )
        for i, (rate, prices) in enumerate(offers)
    )  # fmt: skip
    return SwitchingProblem(made, work, START, made[0].series.until_seconds, overheads)
