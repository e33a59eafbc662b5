"""A plan as one self-contained HTML page: timeline, memory, bounds and stages; works offline."""

import html
import os
from typing import TYPE_CHECKING

import numpy as np

from stagewright.executor.drawing.periods import finish_seconds, iteration_seconds, phases
from stagewright.executor.drawing.summary import in_flight, shared_text, shifts_text, summarise
from stagewright.executor.drawing.timeline import (
    BAND_COLOUR,
    KIND_COLOURS,
    KIND_NAMES,
    Block,
    Row,
    device_count,
    row_note,
    shorten_devices,
    time_unit,
    timeline,
)
from stagewright.formulations.checking.certificates import headlines
from stagewright.formulations.plans.actions import ON_DEVICE, ActionKind
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure, Scatter

BAR_WIDTH = {"device": 0.86, "channel": 0.5, "reduce": 0.5}  # of the space between two rows
MAX_LABELLED_BLOCKS = 2500  # text in more bars than this makes a browser slow
ROW_PIXELS = 22
MAX_FIGURE_PIXELS = 4000

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2733; background: #f5f6f8; margin: 0; }
main { max-width: 1500px; margin: 0 auto; padding: 24px; }
h1 { font-size: 24px; margin: 0; }
h2 { font-size: 16px; margin: 0 0 6px; }
p.sub { color: #5a6776; margin: 2px 0 18px; }
section { background: #fff; border: 1px solid #e2e5ea; border-radius: 8px; padding: 16px;
  margin-bottom: 16px; overflow-x: auto; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px;
  margin-bottom: 16px; }
.fact { background: #fff; border: 1px solid #e2e5ea; border-radius: 8px; padding: 12px 16px; }
.fact b { display: block; font-size: 22px; font-weight: 600; }
.fact span { color: #5a6776; font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr));
  gap: 0 16px; }
.charts section { min-width: 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; white-space: nowrap; padding: 5px 10px;
  border-bottom: 1px solid #eceef1; }
th { color: #5a6776; font-weight: 500; font-size: 13px; }
th.text, td.text { text-align: left; white-space: normal; }
.bounds td { padding: 3px 6px; font-size: 13px; }
.bar { width: 45%; }
.bar div { height: 14px; border-radius: 2px; background: #1d2733; }
.bar div.problem { background: #4d8fd1; }
.bar div.schedule { background: #a9c6e6; }
b.problem { border-bottom: 3px solid #4d8fd1; font-weight: 500; }
b.schedule { border-bottom: 3px solid #a9c6e6; font-weight: 500; }
"""


def write_html(plan: PipelinePlan, path: str | os.PathLike[str]) -> None:
    """Write the page to ``path`` atomically."""
    documents.write_text(path, page(plan))


def page(plan: PipelinePlan) -> str:
    """The page's HTML, with plotly's script inside it."""
    from plotly.offline import get_plotlyjs

    title = html.escape(f"{plan.model} on {plan.cluster}")
    note = row_note(plan)
    charts = {
        "Peak memory": _memory_figure(plan),
        "Microbatches in flight, per stage": _in_flight_figure(plan),
    }
    sections = "".join(
        f"<section><h2>{name}</h2>{_embed(figure)}</section>"
        for name, figure in charts.items()
        if figure is not None
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{STYLE}</style><script>{get_plotlyjs()}</script></head>
<body><main>
<h1>{title}</h1>
<p class="sub">{html.escape(_subtitle(plan))}</p>
<div class="facts">{_facts(plan)}</div>
<section><h2>{html.escape(", ".join(filter(None, (_shown(plan), note))))}</h2>
{_embed(_timeline_figure(plan), buttons=True)}</section>
<div class="charts">{sections}{_bounds(plan)}</div>
<section><h2>Stages</h2>{_stage_table(plan)}</section>
{_guarantees(plan)}
</main></body></html>
"""


def _embed(figure: "Figure", buttons: bool = False) -> str:
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
        f"planner {plan.planner} · {len(plan.stages)} stages on {device_count(plan)} devices · "
        f"{plan.microbatches} microbatches"
    )


def _shown(plan: PipelinePlan) -> str:
    """What the timeline shows."""
    shown = phases(plan)
    if shown is None:
        return "One training iteration"
    return f"{shown.last + 1} microbatches, from the first until the pipeline has drained"


def _facts(plan: PipelinePlan) -> str:
    facts = [(format_seconds(iteration_seconds(plan)), "per iteration")]
    shown = phases(plan)
    if shown is not None:
        facts.append((format_seconds(shown.period_seconds), "period, for a microbatch each"))
    if plan.certificate is not None:
        certificate = plan.certificate
        facts.append(
            (format_seconds(certificate.bound_seconds), f"bound, by {certificate.proved_by}")
        )
        facts += [(f"{one.gap:.2%}", f"gap, over {one.plans}") for one in headlines(certificate)]
    if plan.predicted is not None:
        facts.append((f"{plan.predicted.bubble:.1%}", "of the devices' time idle"))
        peak = max(plan.predicted.peak_memory_bytes.values(), default=0.0)
        facts.append((format_bytes(peak), "peak memory of a device"))
    return "".join(
        f'<div class="fact"><b>{html.escape(value)}</b><span>{html.escape(what)}</span></div>'
        for value, what in facts
    )


def _figure(name: str, height: int) -> "Figure":
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.update_layout(
        meta=name,
        template="plotly_white",
        height=height,
        margin={"l": 10, "r": 10, "t": 34, "b": 40},
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#1d2733"},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        yaxis={"automargin": True},
    )
    return figure


def _timeline_figure(plan: PipelinePlan) -> "Figure":
    """One trace of bars per kind of action, so that the number of traces never grows."""
    rows = timeline(plan)
    unit, scale = time_unit(finish_seconds(plan))
    figure = _figure("timeline", min(MAX_FIGURE_PIXELS, 120 + ROW_PIXELS * len(rows)))
    labelled = sum(len(row.blocks) for row in rows) <= MAX_LABELLED_BLOCKS
    for kind in KIND_COLOURS:
        placed = [(y, row, block) for y, row in enumerate(rows) for block in row.blocks]
        placed = [entry for entry in placed if entry[2].action.kind is kind]
        if placed:
            figure.add_trace(_bars(kind, placed, unit, scale, labelled))
    if phases(plan) is not None:
        _mark_phases(figure, plan, scale)
    elif plan.certificate is not None:
        bound = plan.certificate.bound_seconds * scale
        figure.add_trace(_bound_line(bound, len(rows), unit))
    figure.update_layout(barmode="overlay", bargap=0, hovermode="closest")
    figure.update_xaxes(title=f"time in {unit}", range=[0, finish_seconds(plan) * scale * 1.01])
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=[row.name for row in rows],
        ticks="outside",
        ticklen=6,
        tickcolor="white",
        range=[len(rows) - 0.4, -0.6 if phases(plan) is None else -1.6],
        fixedrange=True,
        showgrid=False,
        zeroline=False,
    )
    return figure


def _mark_phases(figure: "Figure", plan: PipelinePlan, scale: float) -> None:
    """Part a periodic plan's run into its periods, and name them above the rows."""
    shown = phases(plan)
    if shown is None:
        return
    for at in shown.bounds:
        line = {"color": "#8593a3", "width": 1, "dash": "dot"}
        figure.add_vline(at * scale, line=line, layer="below")
    for i, (name, begin, end) in enumerate(shown.headings):
        colour = BAND_COLOUR if i == 0 else "rgba(0, 0, 0, 0)"
        figure.add_vrect(
            begin * scale,
            end * scale,
            fillcolor=colour,
            line_width=0,
            layer="below",
            annotation={"text": name, "font": {"color": "#3c4a5a"}},
            annotation_position="top",
        )


def _bars(
    kind: ActionKind, placed: list[tuple[int, Row, Block]], unit: str, scale: float, labelled: bool
) -> "Bar":
    from plotly.graph_objects import Bar

    blocks = [block for _, _, block in placed]
    starts = np.array([block.start_seconds for block in blocks]) * scale
    finishes = np.array([block.finish_seconds for block in blocks]) * scale
    computes = kind in ON_DEVICE
    text = labelled and computes
    # White outlines part computations; a transfer's own colour makes the shortest one visible.
    outline = {"color": "white", "width": 0.5 if labelled else 0}
    return Bar(
        name=KIND_NAMES[kind],
        orientation="h",
        y=[y for y, _, _ in placed],
        base=starts,
        x=finishes - starts,
        width=[BAR_WIDTH[row.group] for _, row, _ in placed],
        marker={
            "color": KIND_COLOURS[kind],
            "line": outline if computes else {"color": KIND_COLOURS[kind], "width": 1},
        },
        text=[block.action.microbatch for block in blocks] if text else None,
        textposition="inside" if text else "none",
        insidetextanchor="middle",
        textangle=0,
        constraintext="inside",
        textfont={"color": "white"},
        customdata=[
            (str(block.action), row.name, finish, block.detail and f"<br>{block.detail}")
            for (_, row, block), finish in zip(placed, finishes, strict=True)
        ],
        hovertemplate=(
            "<b>%{customdata[0]}</b> " + KIND_NAMES[kind] + "<br>%{customdata[1]}<br>"
            f"%{{base:.6g}} to %{{customdata[2]:.6g}} {unit}, %{{x:.4g}} {unit} long"
            "%{customdata[3]}<extra></extra>"
        ),
    )


def _bound_line(bound: float, rows: int, unit: str) -> "Scatter":
    from plotly.graph_objects import Scatter

    return Scatter(
        name="proved lower bound",
        x=[bound, bound],
        y=[-0.6, rows - 0.4],
        mode="lines",
        line={"color": "#b02a30", "dash": "dash", "width": 1.5},
        hovertemplate=f"proved lower bound: %{{x:.6g}} {unit}<extra></extra>",
    )


def _memory_figure(plan: PipelinePlan) -> "Figure | None":
    """Peak memory per device; per stage (its fullest device) where a row is a stage."""
    if plan.predicted is None:
        return None
    from plotly.graph_objects import Bar

    if row_note(plan):
        stages = summarise(plan)
        names = [f"stage {line.stage}" for line in stages]
        peaks = [line.peak_memory_bytes or 0.0 for line in stages]
    else:
        names = list(dict.fromkeys(device for stage in plan.stages for device in stage.devices))
        peaks = [plan.predicted.peak_memory_bytes.get(name, 0.0) for name in names]
    figure = _figure("memory", 330)
    figure.add_trace(
        Bar(
            x=names,
            y=np.array(peaks) / 1e9,
            marker_color="#6c7f93",
            customdata=[format_bytes(peak) for peak in peaks],
            hovertemplate="%{x}: %{customdata}<extra></extra>",
        )
    )
    figure.update_yaxes(title="GB")
    return figure


def _in_flight_figure(plan: PipelinePlan) -> "Figure":
    """Microbatches whose activations are kept, over time: what memory follows."""
    from plotly.colors import sample_colorscale
    from plotly.graph_objects import Scatter

    unit, scale = time_unit(finish_seconds(plan))
    figure = _figure("in-flight", 330)
    shades = sample_colorscale("Viridis", np.linspace(0, 0.9, len(plan.stages)).tolist())
    for (s, (times, counts)), shade in zip(enumerate(in_flight(plan)), shades, strict=True):
        figure.add_trace(
            Scatter(
                x=times * scale,
                y=counts,
                mode="lines",
                line={"shape": "hv", "width": 1.6, "color": shade},
                hovertemplate=f"stage {s}: %{{y}} at %{{x:.5g}} {unit}<extra></extra>",
            )
        )
    figure.update_layout(showlegend=False)
    figure.update_xaxes(title=f"time in {unit}", range=[0, finish_seconds(plan) * scale * 1.01])
    figure.update_yaxes(title="microbatches", rangemode="tozero")
    return figure


def _bounds(plan: PipelinePlan) -> str:
    """The cost beside every lower bound that was computed, as bars to scale."""
    if plan.certificate is None:
        return ""
    cost = plan.certificate.cost_seconds
    largest = {
        (bound.proved_by, bound.scope, bound.plans): bound.seconds
        for bound in sorted(plan.certificate.bounds, key=lambda bound: bound.seconds)
    }
    rows = [("this plan", "", "cost", cost)]
    for (who, scope, plans), seconds in reversed(largest.items()):
        of = str(plans) if scope == "problem" else plans.schedule_phrase()
        rows.append((who, of, scope, seconds))
    body = "".join(
        f'<tr><td class="text">{html.escape(who)}</td><td class="bar"><div class="{scope}" '
        f'style="width: {100 * min(1.0, seconds / (cost or 1.0)):.2f}%"></div></td>'
        f'<td>{format_seconds(seconds)}</td><td class="text">{html.escape(of)}</td></tr>'
        for who, of, scope, seconds in rows
    )
    return (
        "<section><h2>Cost and lower bounds</h2>"
        '<p class="sub">of <b class="problem">plans of the problem</b>, and of '
        '<b class="schedule">schedules of these stages</b></p>'
        f'<table class="bounds"><tbody>{body}</tbody></table></section>'
    )


def _stage_table(plan: PipelinePlan) -> str:
    head = (
        '<th>stage</th><th>layers</th><th class="text">devices</th><th>replicas</th>'
        "<th>forward</th><th>backward</th><th>in flight</th><th>peak memory</th>"
    )
    is_periodic = phases(plan) is not None
    if is_periodic:
        head += "<th>index shifts</th><th>shares with</th>"
    body = ""
    for line in summarise(plan):
        peak = "" if line.peak_memory_bytes is None else format_bytes(line.peak_memory_bytes)
        body += (
            f"<tr><td>{line.stage}</td><td>{line.layers[0]} to {line.layers[1] - 1}</td>"
            f'<td class="text">{html.escape(shorten_devices(line.devices))}</td>'
            f"<td>{len(line.devices)}</td><td>{format_seconds(line.forward_seconds)}</td>"
            f"<td>{format_seconds(line.backward_seconds)}</td><td>{line.in_flight}</td>"
            f"<td>{peak}</td>"
        )
        if is_periodic:
            body += f"<td>{shifts_text(line)}</td><td>{shared_text(line)}</td>"
        body += "</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _guarantees(plan: PipelinePlan) -> str:
    if plan.certificate is None or not plan.certificate.guarantees:
        return ""
    body = "".join(
        f'<tr><td class="text">{html.escape(one.theorem)}</td>'
        f"<td>{format_seconds(one.cost_seconds)}</td><td>{format_seconds(one.seconds)}</td>"
        f"<td>{'yes' if one.holds else 'no'}</td>"
        f'<td class="text">{html.escape(one.premise)}</td></tr>'
        for one in plan.certificate.guarantees
    )
    head = '<th class="text">theorem</th><th>cost</th><th>promised at most</th><th>holds</th>'
    head += '<th class="text">premise</th>'
    return (
        f"<section><h2>Guarantees</h2><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></section>"
    )
