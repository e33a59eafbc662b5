"""The page's figures: timeline, peak memory, and microbatches in flight."""

from typing import TYPE_CHECKING

import numpy as np

from stagewright.executor.drawing.periods import finish_seconds, phases
from stagewright.executor.drawing.summary import in_flight, summarise
from stagewright.executor.drawing.timeline import (
    BAND_COLOUR,
    KIND_COLOURS,
    KIND_NAMES,
    Block,
    Row,
    notes,
    row_note,
    time_unit,
    timeline,
)
from stagewright.formulations.plans.actions import ON_DEVICE, ActionKind
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.units import byte_unit, format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure, Scatter

BAR_WIDTH = {"device": 0.86, "channel": 0.5, "reduce": 0.5}  # of the space between two rows
MAX_LABELLED_BLOCKS = 2500  # more labels make a browser slow
ROW_PIXELS = 22
MAX_FIGURE_PIXELS = 4000


def new_figure(name: str, height: int) -> "Figure":
    """An empty figure in the style of all."""
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


def timeline_figure(plan: PipelinePlan) -> "Figure":
    """The timeline with one trace of bars per kind of action, which bounds their number."""
    rows = timeline(plan)
    unit, scale = time_unit(finish_seconds(plan))
    figure = new_figure("timeline", min(MAX_FIGURE_PIXELS, 120 + ROW_PIXELS * len(rows)))
    labelled = sum(len(row.blocks) for row in rows) <= MAX_LABELLED_BLOCKS
    for kind in KIND_COLOURS:
        placed = [(y, row, block) for y, row in enumerate(rows) for block in row.blocks]
        placed = [entry for entry in placed if entry[2].action.kind is kind]
        if placed:
            figure.add_trace(bars(kind, placed, unit, scale, labelled))
    if phases(plan) is not None:
        _mark_phases(figure, plan, scale)
    elif plan.certificate is not None:
        bound = plan.certificate.bound_seconds * scale
        figure.add_trace(_bound_line(bound, len(rows), unit))
    figure.update_layout(barmode="overlay", bargap=0, hovermode="closest")
    title = f"time in {unit} · {notes(plan)}"
    figure.update_xaxes(title=title, range=[0, finish_seconds(plan) * scale * 1.01])
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
    """Mark the periods of a periodic plan's run, and name them above the rows."""
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


def bars(
    kind: ActionKind, placed: list[tuple[int, Row, Block]], unit: str, scale: float, labelled: bool
) -> "Bar":
    """All blocks of one kind, each with the height and name of its row."""
    from plotly.graph_objects import Bar

    blocks = [block for _, _, block in placed]
    starts = np.array([block.start_seconds for block in blocks]) * scale
    finishes = np.array([block.finish_seconds for block in blocks]) * scale
    computes = kind in ON_DEVICE
    text = labelled and computes
    # White outlines separate computations; outlines in their own colour keep transfers visible.
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
        text=[block.label for block in blocks] if text else None,
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


def memory_figure(plan: PipelinePlan) -> "Figure | None":
    """Peak memory per device, or per stage (its fullest device) if rows are stages."""
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
    unit, scale = byte_unit(max(peaks))
    figure = new_figure("memory", 330)
    figure.add_trace(
        Bar(
            x=names,
            y=np.array(peaks) / scale,
            marker_color="#6c7f93",
            customdata=[format_bytes(peak) for peak in peaks],
            hovertemplate="%{x}: %{customdata}<extra></extra>",
        )
    )
    figure.update_yaxes(title=unit)
    return figure


def in_flight_figure(plan: PipelinePlan) -> "Figure":
    """Microbatches in flight over time, per stage."""
    from plotly.colors import sample_colorscale
    from plotly.graph_objects import Scatter

    unit, scale = time_unit(finish_seconds(plan))
    figure = new_figure("in-flight", 330)
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
