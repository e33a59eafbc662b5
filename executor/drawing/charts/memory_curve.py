"""The best cost of a schedule for every limit of memory: PNG and HTML."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.executor.drawing.charts.figures import bare, new_figure, save
from stagewright.executor.drawing.colours import CATEGORIES, CRITICAL_COLOUR
from stagewright.executor.drawing.web.render import Chart, Series, render

TEMPLATE = "schedules.html.jinja"
HEIGHT_PIXELS = 460


@dataclass(frozen=True, slots=True)
class Curve:
    """``cost`` and ``bound`` (named ``cost_name``) per limit in ``memory``.

    ``others`` are schedules to compare with: name, memory, cost.
    """

    memory: tuple[float, ...]
    cost: tuple[float, ...]
    bound: tuple[float, ...]
    cost_name: str
    others: tuple[tuple[str, float, float], ...]

    def shown(self) -> list[tuple[str, float, float]]:
        """The published schedules near the curve; schedules at one point share a label."""
        places: dict[tuple[float, float], str] = {}
        for name, memory, cost in self.others:
            if memory <= 1.1 * self.memory[-1] and cost <= 1.1 * self.cost[0]:
                known = places.get((memory, cost))
                places[memory, cost] = f"{known}, {name}" if known else name
        return [(name, memory, cost) for (memory, cost), name in places.items()]


def curve_png(curve: Curve) -> bytes:
    """A PNG of the curve, its bound and the others."""
    figure = new_figure()
    axes = figure.add_subplot()
    for costs, colour, label, style in (
        (curve.cost, CATEGORIES[0], "best schedule", "o-"),
        (curve.bound, CRITICAL_COLOUR, "proved lower bound", "--"),
    ):
        axes.step(curve.memory, costs, style, where="post", color=colour, label=label, ms=4)
    for name, memory, cost in curve.shown():
        axes.plot(memory, cost, "D", color=CATEGORIES[-1], ms=5)
        axes.annotate(name, (memory, cost), (5, 4), textcoords="offset points", fontsize=8)
    axes.set_xlabel("limit of memory on every device")
    axes.set_ylabel(curve.cost_name)
    axes.legend(frameon=False)
    bare(axes, "both")
    return save(figure)


def curve_page(
    curve: Curve, subtitle: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """A self-contained page with a table, whose text columns begin with ``<``, and the curve."""
    return render(
        TEMPLATE,
        title=f"Memory and {curve.cost_name}",
        subtitle=subtitle,
        head=head,
        rows=rows,
        heading="Schedules and bounds",
        timeline=None,
        chart=curve_chart(curve),
    )


def curve_chart(curve: Curve) -> Chart:
    """The curve, its bound and the published schedules, as pages draw them."""
    series = [
        Series("best schedule", curve.memory, curve.cost, colour="--best"),
        Series("proved lower bound", curve.memory, curve.bound, "dashes", "--critical"),
    ]
    shown = curve.shown()
    if shown:
        names, memory, costs = zip(*shown, strict=True)
        series.append(
            Series("published schedules", memory, costs, "points", "--other", names=names)
        )
    return Chart("limit of memory on every device", curve.cost_name, tuple(series), HEIGHT_PIXELS)
