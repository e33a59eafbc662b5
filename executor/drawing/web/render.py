"""Pages from templates: one file each, which loads nothing and works offline."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from stagewright.executor.drawing.lanes import packed
from stagewright.executor.drawing.web.charts import Chart

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
