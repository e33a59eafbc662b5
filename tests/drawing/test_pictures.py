"""Pictures hold all of their text, and devices and names have the room that they need."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from markets import problem as market
from matplotlib.figure import Figure
from order_timing import timed
from plans import made_up_certificate, make_stages, small_problem, valid_plan

from stagewright.executor.drawing import operators
from stagewright.executor.drawing.charts import layouts
from stagewright.executor.drawing.charts.chart import png, stacked_png
from stagewright.executor.drawing.charts.layouts import stages_png
from stagewright.executor.drawing.charts.prices import price_png
from stagewright.executor.drawing.colours import MEMORY_COLOURS
from stagewright.executor.drawing.schedules import panel, schedules_png
from stagewright.executor.drawing.timeline import timeline
from stagewright.formulations.checking.check import predict
from stagewright.formulations.operators.plan import OperatorPlan, PlacedOperator
from stagewright.formulations.plans.plan import PipelinePlan, Schedule
from stagewright.formulations.schedules.published.one_f_one_b import one_f_one_b
from stagewright.formulations.schedules.timing import StageTimes

LONG = "a title of a model and a cluster whose names are long, with all that is said of both, " * 3


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, laid out and not written."""
    saved = list[Figure]()

    def keep(self: Figure, *_: object, **__: object) -> None:
        self.draw_without_rendering()
        saved.append(self)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def certified(
    stages: int, replicas: int = 1, prefix: str = "g", microbatches: int = 4
) -> PipelinePlan:
    """A certified plan of equal stages; its devices' names begin with ``prefix``."""
    problem = small_problem(stages, stages * replicas, microbatches, memory_bytes=64e9)
    equal = make_stages(range(1, stages + 1), [replicas] * stages, ["split"] * stages)
    plan = valid_plan(problem, equal)
    predicted = predict(problem, plan)
    certificate = made_up_certificate(problem, plan, predicted.iteration_seconds)
    plan = replace(plan, predicted=predicted, certificate=certificate)
    return _renamed(plan, prefix)


def _renamed(plan: PipelinePlan, prefix: str) -> PipelinePlan:
    def name(devices: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return devices and tuple(one.replace("g", prefix) for one in devices)

    stages = tuple(replace(one, devices=name(one.devices)) for one in plan.stages)
    actions = tuple(
        replace(it, device=it.device.replace("g", prefix), sources=name(it.sources),
                targets=name(it.targets))
        for it in plan.actions
    )  # fmt: skip
    return replace(plan, stages=stages, schedule=Schedule(actions))


def placed(*spans: tuple[str, float, float]) -> OperatorPlan:
    """Operators of one device, by name, start and end."""
    alone = tuple(PlacedOperator(name, "forward", "g0", at, end) for name, at, end in spans)
    return OperatorPlan("", "", LONG, "c", "fastt", "free", alone, (), (spans[0][0],), {"g0": 1.0})


def a_schedule() -> bytes:
    times = StageTimes((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, (0.1,) * 3, (0.1,) * 3)
    return schedules_png([panel("1f1b", timed(one_f_one_b(4, 6), times), 8.0)])


RANKS = [
    SimpleNamespace(rank=rank, **{f"{kind}_bytes": 1e9 for kind in MEMORY_COLOURS})
    for rank in (0, 1)
]
POINTS = [SimpleNamespace(peak_bytes=2e9, seconds=1.0, layout="p1 t1 d8 b1 zero3 full sp")]
STAGE = SimpleNamespace(
    first=0, stop=2, device_kind="h100", replicas=2, tensor=1, forward_seconds=1.0,
    backward_seconds=2.0, memory_bytes=1e9, capacity_bytes=2e9,
)  # fmt: skip
WIDE = "server-with-a-long-name-in-a-rack-gpu"
PICTURES: dict[str, Callable[[], bytes]] = {
    "narrow labels": lambda: png(certified(3)),
    "wide labels": lambda: png(certified(3, prefix=WIDE)),
    "replicas": lambda: png(certified(4, 2, WIDE)),
    "stacked": lambda: stacked_png([certified(2), certified(3, prefix=WIDE)], [LONG, LONG]),
    "operators": lambda: operators.png(placed(("mm", 0.0, 1.0))),
    "schedules": a_schedule,
    "memory": lambda: layouts.memory_png(RANKS, 80e9, LONG),
    "front": lambda: layouts.front_png(POINTS, 80e9, LONG),
    "prices": lambda: price_png(market([(1.0, [1.0, 2.0])], 1.0), [], LONG),
    "stages": lambda: stages_png([STAGE], LONG),
}


@pytest.mark.parametrize("name", PICTURES)
def test_all_text_is_inside_the_picture(name: str, figures: list[Figure]) -> None:
    PICTURES[name]()
    (figure,) = figures
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) >= 0
    assert box.x1 <= width
    assert box.y1 <= height


def test_devices_have_most_of_the_height_and_only_the_busiest_links_a_row(
    figures: list[Figure],
) -> None:
    plan = certified(16, 4)
    png(plan)
    axes = figures[0].axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    rows = dict(zip(names, axes.get_yticks(), strict=True))
    links = {name: y for name, y in rows.items() if name.startswith(("channel", "all-reduce"))}
    bottom, top = axes.get_ylim()
    assert (min(links.values()) - top) / (bottom - top) > 0.75
    assert "the 8 busiest of 31 channels and all-reduces" in axes.get_xlabel()
    used = {
        row.name: sum(one.finish_seconds - one.start_seconds for one in row.blocks)
        for row in timeline(plan)
        if row.group != "device"
    }
    assert len(links) == 8
    assert min(used[name] for name in links) >= max(used[name] for name in used.keys() - links)


def written(figure: Figure) -> list[str]:
    """The texts on bars, each of which is inside its bar."""
    (axes,) = figure.axes
    bars = [
        path.get_extents(collection.get_transform())
        for collection in axes.collections
        for path in collection.get_paths()
    ]
    for text in axes.texts:
        box = text.get_window_extent()
        assert any(bar.x0 <= box.x0 and box.x1 <= bar.x1 and bar.y0 <= box.y0 and box.y1 <= bar.y1
                   for bar in bars), text.get_text()  # fmt: skip
    return [text.get_text() for text in axes.texts]


def test_bars_have_stage_and_microbatch_where_they_are_wide_enough(figures: list[Figure]) -> None:
    png(certified(2, microbatches=2))
    png(certified(2, microbatches=2, prefix=WIDE))
    png(certified(2, microbatches=24))
    wide, labelled, narrow = map(written, figures)
    for texts in (wide, labelled):
        assert texts.count("1.0") == texts.count("0.1") == 2
        assert "0" not in texts
    assert {"23", "1.23"} <= {*narrow}


def test_operators_are_named_as_far_as_their_bars_are_wide(figures: list[Figure]) -> None:
    name = "convolution_backward_with_a_name"
    short = (("addmm_mm", 4.0, 4.6), (name, 4.6, 5.05), ("mm", 5.06, 5.1), (name, 5.1, 5.11))
    operators.png(placed((name, 0.0, 4.0), *short, ("max_mmm_pool", 5.2, 20.0)))
    assert written(figures[0]) == [name, "addm…", "con…", "max_mmm_pool"]
