"""Pages in a browser: nothing runs off the side, everything is reachable, colours differ."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from browser import Browser, browsing
from hypothesis import given
from hypothesis import strategies as st
from order_timing import timed
from pages import CHROMIUM, colours, drawings, visit
from plans import elaborate, made_up_certificate, make_stages, scheduled, small_problem, valid_plan
from profiles import examples, slow_after

from stagewright.executor.drawing.charts import layouts
from stagewright.executor.drawing.colours import (
    CATEGORIES,
    DARK_COLOURS,
    KIND_COLOURS,
    MEMORY_COLOURS,
)
from stagewright.executor.drawing.lanes import TICKS
from stagewright.executor.drawing.operators import page as operators_page
from stagewright.executor.drawing.page import page, page_object
from stagewright.executor.drawing.schedules import Curve, curve_page, panel, schedules_page
from stagewright.executor.drawing.timeline import fold, timeline
from stagewright.executor.drawing.topology import topology, topology_rows
from stagewright.executor.simulation.explanation import explain_plan
from stagewright.formulations.checking.check import predict
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.formulations.plans.actions import ON_DEVICE, ActionKind, parse_action
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Guarantee, PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import PlanClass, class_of
from stagewright.formulations.schedules.published.one_f_one_b import one_f_one_b
from stagewright.formulations.schedules.timing import StageTimes
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.graphs.machines.cluster import Cluster, Link, ServerLinks, uniform_servers
from stagewright.graphs.models.operators.step_graph import Node, Output, StepGraph
from stagewright.solvers.operators.planning import plan_operators

pytestmark = pytest.mark.real

LIMITS = Limits(seconds=10)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def test_classes_that_are_too_long_for_a_number_are_told_apart(
    plan: PipelinePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagewright.executor.drawing.page.MOST_OF", 0)
    assert "gap, over its class of plans" in page(plan)
    assert "gap, over schedules of these stages" in page(plan)


def test_positions_in_a_pipeline_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "save", lambda figure: figure)
    sizes = {f"{kind}_bytes": 1e9 for kind in MEMORY_COLOURS}
    for count in (1, 2, 16):
        ranks = [SimpleNamespace(rank=rank, **sizes) for rank in range(count)]
        axes = layouts.memory_png(ranks, 80e9, "a layout").axes[0]  # type: ignore[attr-defined]
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert ticks
        assert all(tick in range(count) for tick in ticks)


@pytest.fixture(scope="module")
def plan() -> PipelinePlan:
    """A certified plan with replicas, and all kinds of actions but updates."""
    problem = small_problem(microbatches=5, parts=True)
    stages = make_stages((2, 4, 6), (2, 1, 3), ("split", "split", "round-robin"))
    plan = valid_plan(problem, stages, split=[(0, 1), (2, 3)])
    predicted = predict(problem, plan)
    cost = predicted.iteration_seconds
    promise = Guarantee("Lemma 1", 2 * cost, cost, True, "always", plan.stages)
    certificate = replace(made_up_certificate(problem, plan, cost), guarantees=(promise,))
    return replace(plan, predicted=predicted, certificate=certificate)


@pytest.fixture(scope="module")
def pages(plan: PipelinePlan) -> dict[str, str]:
    """A page of every kind."""
    times = StageTimes((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, (0.1,) * 3, (0.1,) * 3)
    orders = [panel(f"depth {n}", timed(one_f_one_b(4, n), times), 8.0) for n in (4, 6)]
    others = (("1f1b", 3.0, 6.5),)
    curve = Curve((1.0, 2.0, 4.0), (9.0, 7.0, 6.0), (8.0, 6.5, 6.0), "makespan", others)
    head, rows = ("<schedule", "makespan"), [["1f1b", "19"], ["zb-h1", "17"]]
    return {
        "plan": page(plan, small_problem().cluster),
        "schedules": schedules_page("Two orders", "4 stages", head, rows, orders),
        "curve": curve_page(curve, "4 stages", head, rows),
        "operators": operators_page(placed_plan()),
    }


def placed_plan() -> OperatorPlan:
    batch = Output(1e5)
    nodes = (
        Node("x", "placeholder", "input", outputs=(batch,)),
        Node("y", "mm", "forward", (("x", 0),), (batch,), {"a": 4e-3}),
        Node("z", "sum", "backward", (("y", 0),), (Output(4.0),), {"a": 1e-3}),
    )
    cluster = uniform_servers(1, 2, Link(1e9, 1e-6), kind="a")
    found = plan_operators(StepGraph("small", "test", 8, nodes), cluster, "os-dpos", limits=LIMITS)
    assert found.plan is not None
    return found.plan


QUICK = [
    ("plan", 400, True),
    ("schedules", 400, False),
    ("curve", 400, True),
    ("operators", 768, False),
]
VISITS = [*product(("plan", "schedules", "curve", "operators"), (1400, 768, 400), (False, True))]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@in_a_browser
@pytest.mark.parametrize(
    ("which", "width", "dark"),
    slow_after(len(QUICK), [*QUICK, *(one for one in VISITS if one not in QUICK)]),
)
def test_a_browser_draws_a_page_within_its_width(
    browser: Browser, which: str, width: int, dark: bool, pages: dict[str, str], tmp_path: Path
) -> None:
    seen = visit(browser, pages[which], tmp_path, width, dark)
    assert seen.errors == []
    assert seen.found["inner"] == width
    assert seen.found["width"] <= width
    assert seen.found["timelines"] == pages[which].count('class="timeline"')
    assert seen.found["charts"] == pages[which].count('class="chart"')
    assert seen.found["topologies"] == pages[which].count('class="topology"')
    picture = matplotlib.image.imread(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
    background = "#0e1217" if dark else "#f5f6f8"
    corner = (picture[-1, 0, :3] * 255).round().astype(int)
    assert tuple(corner) == tuple(bytes.fromhex(background[1:]))
    drawn = colours(picture)
    if which != "curve":
        kinds = DARK_COLOURS if dark else KIND_COLOURS
        assert tuple(bytes.fromhex(kinds[ActionKind.FORWARD][1:])) in drawn


@in_a_browser
def test_keys_reach_every_action(
    browser: Browser, pages: dict[str, str], plan: PipelinePlan, tmp_path: Path
) -> None:
    seen = visit(browser, pages["plan"], tmp_path, 1400, dark=False)
    critical, following = seen.found["told"][:2]
    # The first of the critical path, and the one after it on its row.
    found = explain_plan(plan)
    assert found is not None
    assert critical.startswith(f"{found.path[0].action} forward, on the critical path · ")
    assert following.startswith("0F1 forward · ")
    devices = len({name for stage in plan.stages for name in stage.devices})
    others = sum(row.group != "device" for row in timeline(plan))
    # The last fold but one unfolds, the last folds again.
    assert seen.found["rows"] == len(fold(timeline(plan)))
    assert seen.found["rows"] < devices + others


def test_a_page_holds_every_action_once_for_identical_devices(plan: PipelinePlan) -> None:
    (drawing,) = drawings(page(plan))
    rows = fold(timeline(plan))
    assert [len(lane["start"]) for lane in drawing["lanes"]] == [len(row.blocks) for row in rows]
    grid = drawing["end"] / drawing["ticks"]
    for lane, row in zip(drawing["lanes"], rows, strict=True):
        until = 0
        for pause, length, block in zip(lane["start"], lane["length"], row.blocks, strict=True):
            start = until + pause
            until = start + length
            # Rounded to ticks, at most one more per bar.
            near = len(row.blocks) * grid
            assert start * grid == pytest.approx(block.start_seconds, abs=near)
            assert until * grid == pytest.approx(block.finish_seconds, abs=near)
        names = zip(lane["stem"], lane["number"], strict=True)
        texts = [name_of(drawing, stem, n) for stem, n in names]
        assert texts == [str(block.action) for block in row.blocks]
    members = Counter(name for lane in drawing["lanes"] for name in lane["members"])
    assert set(members.values()) == {1}
    assert set(members) == {name for stage in plan.stages for name in stage.devices}


@examples(20)
@given(st.one_of(scheduled(waits=True), elaborate(waits=True)))
def test_every_plan_has_a_page_of_all_its_computations(
    case: tuple[PipelineProblem, PipelinePlan],
) -> None:
    _, plan = case
    (drawing,) = drawings(page(plan))
    drawn = Counter(
        (member, name_of(drawing, stem, number))
        for lane in drawing["lanes"]
        for member in lane["members"]
        for stem, number in zip(lane["stem"], lane["number"], strict=True)
    )
    kinds = {timed.action: parse_action(timed.action).kind for timed in plan.actions}
    assert drawn == Counter(
        (timed.device, timed.action) for timed in plan.actions if kinds[timed.action] in ON_DEVICE
    )


def name_of(drawing: dict[str, Any], stem: int, number: int) -> str:
    return drawing["texts"][stem] + ("" if number < 0 else str(number))


def test_a_page_marks_critical_path_bottleneck_and_idle_time(plan: PipelinePlan) -> None:
    found = explain_plan(plan)
    assert found is not None
    (drawing,) = drawings(page(plan))
    marked = []
    for lane in drawing["lanes"]:
        columns = zip(lane["stem"], lane["number"], lane["critical"], strict=True)
        marked += [name_of(drawing, stem, n) for stem, n, critical in columns if critical]
    assert sorted(marked) == sorted(str(step.action) for step in found.path)
    (busiest,) = [lane for lane in drawing["lanes"] if lane["bottleneck"]]
    assert busiest["members"] == list(found.bottleneck.devices)
    for lane in (lane for lane in drawing["lanes"] if lane["members"]):
        idle = sum(length for _, length, _ in lane["idle"]) / TICKS * found.iteration_seconds
        expected = sum(found.idle_seconds[lane["members"][0]].values())
        assert idle == pytest.approx(expected, rel=1e-4)


def test_a_page_says_what_binds_and_shows_limits_and_layers(plan: PipelinePlan) -> None:
    text = page(plan)
    for words in (
        "The bottleneck is stage 1 (g2): it works for",
        "On the critical path, the longest chain",
        "is a lower bound for every plan",
        "what a device may use",
        "of 16 GB",
        "layer0 to layer1",
    ):
        assert words in text, words


def test_a_page_is_small() -> None:
    problem = small_problem(devices=72)
    plan = valid_plan(problem, make_stages((3, 6), (66, 6), ("round-robin", "split")))
    assert len(page(plan)) < 60_000


# The cluster


def test_a_cluster_shows_stages_replicas_memory_and_bytes(plan: PipelinePlan) -> None:
    drawn = topology(plan, small_problem().cluster)
    assert [one["stages"] for one in drawn["devices"]] == [[0], [0], [1], [2], [2], [2]]
    assert drawn["devices"][1]["about"] == ["stage 0, replica 2 of 2"]
    assert plan.predicted is not None
    fullest = max(plan.predicted.peak_memory_bytes.values())
    assert max(one["share"] for one in drawn["devices"]) == pytest.approx(fullest / 16e9, abs=1e-4)
    # Stage 1 has one device, which all bytes of both boundaries pass.
    crossing = plan.predicted.link_bytes["0-1"] + plan.predicted.link_bytes["1-2"]
    assert drawn["devices"][2]["sent"] == format_bytes(crossing)
    assert drawn["devices"][2]["reduced"] == ""
    # Of the five microbatches the last of three devices that take turns has one, the others two.
    parts = [format_bytes(n / 5 * plan.predicted.link_bytes["1-2"]) for n in (2, 2, 1)]
    assert [one["sent"] for one in drawn["devices"][3:]] == parts
    rows = topology_rows(drawn)
    assert [row[1] for row in rows] == ["g0, g1", "g2", "g3, g4", "g5"]
    assert [row[3] for row in rows][2] == "stage 2, replica 1 of 3 to replica 2 of 3"
    # Pairs of devices have faster links, which the only server shows.
    assert [one["text"] for one in drawn["levels"]] == ["4 to 20 GB/s"]
    fast = [(i, j) for i, j, rate in drawn["servers"][0]["links"] if rate == 20e9]
    assert fast == [(1, 0), (3, 2), (5, 4)]


def test_levels_of_links_are_those_that_join_something() -> None:
    plan = placed(uniform_servers(4, 2, Link(300e9), Link(25e9, 5e-6), kind="fast"))
    links = plan[1].links
    assert isinstance(links, ServerLinks)
    racks = (sum(links.servers[:2], ()), sum(links.servers[2:], ()))
    apart = replace(plan[1], links=replace(links, racks=racks, inter_rack=Link(10e9)))
    drawn = topology(plan[0], apart)
    assert [(one["name"], one["text"]) for one in drawn["levels"]] == [
        ("within a server", "300 GB/s"),
        ("between servers", "25 GB/s, 5 us latency"),
        ("between racks", "10 GB/s"),
    ]
    assert [one["rack"] for one in drawn["servers"]] == [0, 0, 1, 1]
    one = uniform_servers(1, 8, Link(300e9), Link(25e9), name="one", kind="fast")
    with pytest.raises(InputError, match="cluster one: the plan's device 's1g0' is not in it"):
        topology(plan[0], one)


def placed(cluster: Cluster) -> tuple[PipelinePlan, Cluster]:
    """A plan on the first four devices."""
    names = tuple(device.name for device in cluster.devices)
    problem = replace(small_problem(), cluster=cluster)
    stages = (Stage((0, 3), names[:2]), Stage((3, 6), names[2:4]))
    return valid_plan(problem, stages), cluster


@in_a_browser
def test_keys_reach_every_device(browser: Browser, plan: PipelinePlan, tmp_path: Path) -> None:
    cluster = uniform_servers(16, 8, Link(300e9), Link(25e9), kind="fast")
    seen = visit(browser, page(*placed(cluster)), tmp_path, 400, dark=True)
    assert seen.errors == []
    first, second, below, last = seen.found["devices"]
    assert first.startswith("s0g0 · fast · server 0 · stage 0, replica 1 of 2")
    assert second.startswith("s0g1 ")
    assert below.split(" ")[0] not in ("s0g0", "s0g1")
    assert last.startswith("s15g7 ")
    assert last.endswith("server 15 · not used by this plan · memory 16 GB")
    # Many devices are shown as blocks, and as devices after a key.
    assert seen.found["blocks"] == [16, 0]


# Colours


# From RGB without the cones for red, green and blue light (Machado et al. 2009, severity 1).
WITHOUT = {
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
              [-0.011820, 0.042940, 0.968881]],
    "blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
             [0.004733, 0.691367, 0.303900]],
    "none": np.eye(3),
}  # fmt: skip
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    """Linear RGB of a colour."""
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of linear RGB."""
    white = np.array([0.9505, 1.0, 1.089])
    ratio = XYZ @ np.clip(rgb, 0, 1) / white
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("missing", WITHOUT)
@pytest.mark.parametrize(
    "colours",
    [KIND_COLOURS.values(), DARK_COLOURS.values(), CATEGORIES, MEMORY_COLOURS.values()],
    ids=["light", "dark", "categories", "memory"],
)
def test_colours_differ_for_every_kind_of_colour_vision(
    colours: Iterable[str], missing: str
) -> None:
    seen = {one: lab(np.array(WITHOUT[missing]) @ linear(one)) for one in colours}
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 20, (one, other)


@pytest.mark.parametrize(
    ("colours", "page_colour"), [(KIND_COLOURS, "#ffffff"), (DARK_COLOURS, "#151a21")]
)
def test_colours_stand_out_from_the_page(colours: dict[ActionKind, str], page_colour: str) -> None:
    behind = XYZ[1] @ linear(page_colour)
    for kind, one in colours.items():
        light, dark = sorted((XYZ[1] @ linear(one), behind), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 1.75, kind


def test_bounds_of_plans_that_this_one_is_not_among_come_last(plan: PipelinePlan) -> None:
    assert plan.certificate is not None
    cost, one = plan.certificate.cost_seconds, plan.certificate.bounds[0]
    smaller = replace(class_of(plan), replication=())
    above = replace(one, seconds=2 * cost, plans=smaller, scope="problem")
    of_all = replace(one, seconds=cost / 2, plans=PlanClass(), scope="problem")
    certificate = replace(plan.certificate, bounds=(above, of_all))
    shown = page_object(replace(plan, certificate=certificate))["bounds"]
    assert [(it["kind"], it["text"]) for it in shown] == [
        ("cost", format_seconds(cost)),
        ("problem", format_seconds(cost / 2)),
        ("outside", format_seconds(2 * cost)),
    ]
