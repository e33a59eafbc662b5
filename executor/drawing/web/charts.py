"""Charts of lines and points, drawn by the page's script."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
