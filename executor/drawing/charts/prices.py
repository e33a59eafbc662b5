"""Prices over time and the stays of a plan as a PNG."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagewright.executor.drawing.charts.figures import bare, new_figure, save
from stagewright.executor.drawing.colours import CATEGORIES
from stagewright.formulations.cloud.switching import Offer, Stay, SwitchingProblem

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MARKERS = "osD^vP*X"  # lines are told apart without their colours too


@dataclass(frozen=True, slots=True)
class SweepLine:
    """Samples per second at each place of the horizontal axis; None without a plan."""

    name: str
    rates: tuple[float | None, ...]


def sweep_png(axis: str, places: Sequence[str], lines: Sequence[SweepLine]) -> bytes:
    """A PNG; ``axis`` names the size whose values are ``places``."""
    figure = new_figure()
    axes = figure.add_subplot()
    for number, line in enumerate(lines):
        rates = [float("nan") if rate is None else rate for rate in line.rates]
        marker = _MARKERS[number % len(_MARKERS)]
        colour = CATEGORIES[number % len(CATEGORIES)]
        axes.plot(range(len(places)), rates, f"{marker}-", color=colour, label=line.name, ms=5)
    axes.set_xticks(range(len(places)), places)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(axis)
    axes.set_ylabel("samples per second")
    if len(lines) > 1 or lines[0].name:
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    bare(axes, "both")
    return save(figure)


DAY = 86_400.0
MOST_LINES = 8
"""Number of drawn offers: those of the plan, then the cheapest of other regions and GPU kinds."""
_HEADROOM = 4.0
"""Height of the axis relative to the plan's highest price of work; higher prices are clipped."""


def price_png(problem: SwitchingProblem, plan: Sequence[Stay], title: str) -> bytes:
    """Dollars per hour of work on the plan's offers and a few others, stays in thick lines."""
    figure = new_figure(11.0, 5.0, 120)
    axes = figure.add_subplot()
    for place, number in enumerate(drawn_offers(problem, plan)):
        stays = [stay for stay in plan if stay.offer == number]
        _draw_offer(axes, problem, problem.offers[number], stays, f"C{place}")
    axes.set_title(title, fontsize=11, loc="left", wrap=True)
    axes.set_ylabel("dollars per hour of work")
    paid = [problem.offers[stay.offer].dollars_per_work(stay.begin_seconds) for stay in plan]
    axes.set_ylim(0, _HEADROOM * max(paid, default=0.0) or None)
    began = datetime.datetime.fromtimestamp(problem.start_seconds, datetime.UTC)
    axes.set_xlabel(f"days after {began:%Y-%m-%d %H:%M} UTC")
    bare(axes, "both", ())
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return save(figure)


def drawn_offers(problem: SwitchingProblem, plan: Sequence[Stay]) -> list[int]:
    """Positions of the drawn offers: the plan's, then the cheapest of each other group.

    A group is a provider's region and a kind of GPU; the cheapest is that at the start.
    """
    used = list(dict.fromkeys(stay.offer for stay in plan))
    kinds = {_sort(problem.offers[number]) for number in used}
    others = []
    for number in sorted(
        range(len(problem.offers)),
        key=lambda i: (problem.offers[i].dollars_per_work(problem.start_seconds), i),
    ):
        if _sort(problem.offers[number]) not in kinds:
            kinds.add(_sort(problem.offers[number]))
            others.append(number)
    return [*used, *others[: max(0, MOST_LINES - len(used))]]


def _sort(offer: Offer) -> tuple[str, str, str]:
    return offer.instance.provider, offer.instance.region, offer.instance.gpu


def _draw_offer(
    axes: "Axes", problem: SwitchingProblem, offer: Offer, stays: Sequence[Stay], colour: str
) -> None:
    begin, end = problem.start_seconds, problem.deadline_seconds
    times = [begin, *(at for at in offer.series.seconds if begin < at < end), end]
    axes.step(*_steps(offer, times, begin), where="post", color=colour, lw=1.0,
              label=offer.instance.key)  # fmt: skip
    for stay in stays:
        inside = [at for at in times if stay.begin_seconds < at < stay.end_seconds]
        axes.step(*_steps(offer, [stay.begin_seconds, *inside, stay.end_seconds], begin),
                  where="post", color=colour, lw=5.0, alpha=0.45)  # fmt: skip


def _steps(offer: Offer, times: Sequence[float], start: float) -> tuple[list[float], list[float]]:
    """Days after the start, and the cost of work from each time on; the last is repeated."""
    costs = [offer.dollars_per_work(at) for at in times[:-1]]
    return [(at - start) / DAY for at in times], [*costs, costs[-1]]
