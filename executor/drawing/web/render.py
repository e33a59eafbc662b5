"""Pages from templates: one file each, which loads nothing and works offline."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from jinja2 import Environment, FunctionLoader, StrictUndefined

from stagewright.executor.drawing.lanes import packed
from stagewright.graphs.documents.units import format_seconds

Style = Literal["steps", "dashes", "points"]


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a chart: joined by ``steps`` or ``dashes``, or alone with their ``names``.

    ``colour`` is the name of one of the page's colours; empty: by its rank among the series.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "steps"
    colour: str = ""
    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """Series on two axes with titles; x is in ``unit``."""

    x_title: str
    y_title: str
    series: tuple[Series, ...]
    height: int = 300

    def table(self) -> dict[str, Any]:
        """The data of the page's script."""
        return {
            "x": self.x_title,
            "y": self.y_title,
            "height": self.height,
            "series": [
                {
                    "name": one.name,
                    "x": [float(f"{value:.7g}") for value in one.x],
                    "y": [float(f"{value:.7g}") for value in one.y],
                    "style": one.style,
                    "colour": one.colour,
                    "names": list(one.names),
                }
                for one in self.series
            ],
        }


def bound_bars(rows: Iterable[tuple[str, str, str, float]], cost: float) -> list[dict[str, str]]:
    """Bars of bounds: who proved each, of which plans, its kind, and its seconds of the cost."""
    return [
        {
            "proved_by": who,
            "plans": plans,
            "kind": kind,
            "text": format_seconds(seconds),
            "percent": f"{100 * min(1.0, seconds / (cost or 1.0)):.2f}",
        }
        for who, plans, kind, seconds in rows
    ]


FOLDER = "stagewright.executor.drawing.web"
STYLE = "page.css"
SCRIPTS = ("timeline.js", "interaction.js", "charts.js")
CLUSTER_SCRIPT = "topology.js"


def render(template: str, **values: Any) -> str:
    """A page in the style of all, with the scripts that draw on it."""
    names = (*SCRIPTS, CLUSTER_SCRIPT) if values.get("topology") else SCRIPTS
    scripts = "\n".join(map(_read, names))
    style = _read(STYLE)
    return _environment().get_template(template).render(scripts=scripts, style=style, **values)


@cache
def _read(name: str) -> str:
    return files(FOLDER).joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    """The templates, which escape all text not marked as safe."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_read),
    )
    environment.filters |= {"packed": packed, "chart": _chart}
    return environment


def _chart(chart: Chart) -> str:
    return json.dumps(chart.table(), separators=(",", ":"))
