"""A plan as one self-contained HTML page: timeline, memory, bounds and stages; works offline."""

import os
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from stagewright.executor.drawing.figures import (
    in_flight_figure,
    memory_figure,
    timeline_figure,
)
from stagewright.executor.drawing.periods import iteration_seconds, phases
from stagewright.executor.drawing.summary import shared_text, shifts_text, summarise
from stagewright.executor.drawing.timeline import device_count, notes, shorten_devices
from stagewright.formulations.checking.certificates import headlines
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TEMPLATE = "page.html.jinja"


def write_html(plan: PipelinePlan, path: str | os.PathLike[str]) -> None:
    """Write the page to ``path`` atomically."""
    documents.write_text(path, page(plan))


def page(plan: PipelinePlan) -> str:
    """The page's HTML, with plotly's script embedded."""
    charts = {
        "Peak memory": memory_figure(plan),
        "Microbatches in flight, per stage": in_flight_figure(plan),
    }
    return render(
        TEMPLATE,
        title=f"{plan.model} on {plan.cluster}",
        subtitle=_subtitle(plan),
        facts=list(_facts(plan)),
        shown=", ".join(filter(None, (_shown(plan), notes(plan)))),
        timeline=embed(timeline_figure(plan), buttons=True),
        charts=[(name, embed(chart)) for name, chart in charts.items() if chart is not None],
        bounds=_bounds(plan),
        is_periodic=phases(plan) is not None,
        stages=summarise(plan),
        guarantees=() if plan.certificate is None else plan.certificate.guarantees,
    )


def render(template: str, **values: Any) -> str:
    """A page in the style of all, with plotly's script embedded."""
    from plotly.offline import get_plotlyjs

    return _environment().get_template(template).render(plotly=get_plotlyjs(), **values)


@cache
def _environment() -> Environment:
    """The templates, which escape all text not marked as safe."""
    folder = files("stagewright.executor.drawing")
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
    )
    environment.filters |= {
        "seconds": format_seconds,
        "bytes": format_bytes,
        "devices": shorten_devices,
        "shifts": shifts_text,
        "shared": shared_text,
    }
    return environment


def embed(figure: "Figure", buttons: bool = False) -> str:
    """The figure as a part of a page."""
    config = {
        "responsive": True,
        "displaylogo": False,
        "displayModeBar": buttons,
        "modeBarButtons": [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    }
    # plotly draws a random id per figure; a fixed one makes the page the same for the same plan.
    name = f"figure-{figure.layout.meta}"
    return str(figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config))


def _subtitle(plan: PipelinePlan) -> str:
    return (
        f"planner {plan.planner} · {counted(len(plan.stages), 'stage', 'stages')} on "
        f"{counted(device_count(plan), 'device', 'devices')} · "
        f"{counted(plan.microbatches, 'microbatch', 'microbatches')}"
    )


def _shown(plan: PipelinePlan) -> str:
    """Caption of the timeline."""
    shown = phases(plan)
    if plan.is_backward_first:
        return "From one loss to the next: backwards, updates, and the next iteration's forwards"
    if shown is None:
        return "One training iteration"
    return f"{shown.last + 1} microbatches, from the first until the pipeline has drained"


def _facts(plan: PipelinePlan) -> Iterator[tuple[str, str]]:
    """The main numbers and their labels."""
    yield format_seconds(iteration_seconds(plan)), "per iteration"
    shown = phases(plan)
    if shown is not None:
        yield format_seconds(shown.period_seconds), "period, one per microbatch"
    if plan.certificate is not None:
        certificate = plan.certificate
        yield format_seconds(certificate.bound_seconds), f"bound, by {certificate.proved_by}"
        for one in headlines(certificate):
            yield f"{one.gap:.2%}", f"gap, over {one.plans}{plan.of_sizes}"
    if plan.predicted is not None:
        yield f"{plan.predicted.bubble:.1%}", "of the devices' time idle"
        peak = max(plan.predicted.peak_memory_bytes.values(), default=0.0)
        yield format_bytes(peak), "peak memory of a device"


def _bounds(plan: PipelinePlan) -> list[dict[str, Any]]:
    """The cost and every computed lower bound; ``percent`` is relative to the cost."""
    if plan.certificate is None:
        return []
    cost = plan.certificate.cost_seconds
    largest = {
        (bound.proved_by, bound.scope, bound.plans): bound.seconds
        for bound in sorted(plan.certificate.bounds, key=lambda bound: bound.seconds)
    }
    rows = [("this plan", "", "cost", cost)]
    for (who, scope, plans), seconds in reversed(largest.items()):
        of = (str(plans) if scope == "problem" else plans.schedule_phrase()) + plan.of_sizes
        rows.append((who, of, scope, seconds))
    return [
        {
            "proved_by": who,
            "plans": of,
            "kind": scope,
            "seconds": seconds,
            "percent": f"{100 * min(1.0, seconds / (cost or 1.0)):.2f}",
        }
        for who, of, scope, seconds in rows
    ]
