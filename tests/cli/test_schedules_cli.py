"""``schedule``: published kinds, memory, comparison, files, and what is refused."""

import csv
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import pytest
from commands import answered, answered_json, refused, run
from order_timing import most_on_device
from pages import drawings

import stagewright
from stagewright.formulations.schedules.planned import with_channels
from stagewright.formulations.schedules.published.kinds import KINDS
from stagewright.formulations.schedules.published.one_f_one_b import round_robin
from stagewright.formulations.schedules.timing import StageTimes
from stagewright.service.schedules.setting import SCHEDULES

FIELDS = {
    "status", "kind", "makespan", "span", "bound", "gap", "peak_memory", "wall_seconds", "idle",
}  # fmt: skip


def of(stages: int, microbatches: int, *options: object, times: str = "1,1,1") -> list[object]:
    return [
        "schedule", "--stages", stages, "--microbatches", microbatches, "--times", times,
        "--threads", 1, *options,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        (["--kind", "interleaved", "--chunks", 2], 0.099),
        (["--kind", "zb1p"], 0.068),
        (["--kind", "zbv"], 0.035),
        (["--kind", "dualpipev"], 0.035),
    ],
)
def test_known_bubbles(options: list[object], idle: float) -> None:
    found = answered_json(*of(8, 32, *options))
    assert set(found) >= FIELDS
    assert round(found["idle"], 3) == idle
    assert found["devices"] == 8


@pytest.mark.parametrize("kind", [*KINDS, "pe"])
def test_every_kind_is_scheduled(kind: str) -> None:
    """All its computations are in the order, none before time 0, and the figures agree."""
    found = answered_json(*of(4, 8, "--kind", kind, "--transfer", 0.25))
    chunks = found["chunks"]
    rows = [list(zip(*pair, strict=True)) for pair in zip(found["order"], found["starts"])]  # noqa: B905
    parts = [
        part
        for row in rows
        for action, _ in row
        for part in ([action.replace("B", half) for half in "IW"] if "B" in action else [action])
    ]
    assert sorted(parts) == sorted(
        f"{s}{what}{m}" for s in range(4 * chunks) for what in "FIW" for m in range(8)
    )
    ends = [[start + (1 + ("B" in action)) / chunks for action, start in row] for row in rows]
    spans = [end[-1] - row[0][1] for row, end in zip(rows, ends, strict=True)]
    assert found["makespan"] == pytest.approx(max(map(max, ends)))
    assert found["span"] == pytest.approx(max(spans))
    assert found["idle"] == pytest.approx(1 - 24 / found["makespan"])
    assert found["bubble"] == pytest.approx((found["makespan"] - 24) / 24)
    assert 0 < found["bound"] <= found["makespan"]
    assert found["gap"] == pytest.approx(1 - found["bound"] / found["makespan"])


@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 3, 2), (2, 3, 1), (1, 1, 1)])
def test_copies_of_stages_take_turns(replicas: tuple[int, ...]) -> None:
    """The published order, as early as it can be; memory is limited on all devices."""
    times = {"forward": (2, 1, 1), "input_gradient": (4, 3, 2), "weight_gradient": (0, 0, 0)}
    sends = {"send_forward": (0.25, 0.25), "send_backward": (0.25, 0.25)}
    order = round_robin(replicas, 6)
    timed, _ = with_channels(order, StageTimes(**times, **sends))
    given = of(3, 6, "--kind", "1f1b-rr", "--transfer", 0.25, times="2,4;1,3;1,2")
    options = [*given, "--replicas", ",".join(map(str, replicas))]
    found = answered_json(*options)
    assert found["order"] == [[str(one) for one in row] for row in order.rows]
    assert found["starts"] == [list(row) for row in timed.starts]
    assert found["bound"] >= max(timed.loads())
    peaks = found["peak_memory_per_device"]
    assert peaks == list(most_on_device(order))
    fits = answered_json(*options, "--memory-limit", ",".join(map(str, peaks)))
    assert fits["makespan"] == found["makespan"]
    last = next(d for d in reversed(range(len(peaks))) if peaks[d] > 1)
    peaks[last] -= 1
    short = answered(*options, "--memory-limit", ",".join(map(str, peaks)), code=1)
    assert f"holds {peaks[last] + 1} on device {last}, whose limit is {peaks[last]}" in short


def test_rules_and_published_kinds_have_the_same_times() -> None:
    """1F1B sends a whole backward's gradient after both its parts: (M + P - 1) (F + I + W)."""
    whole = answered_json(*of(4, 8, "--kind", "1f1b"))
    assert whole["makespan"] == 11 * 3
    alike = [
        answered_json(*of(4, 8, *options))["makespan"]
        for options in (["--kind", "pipedream"], ["--kind", "interleaved", "--chunks", 1])
    ]
    assert alike == [33, 33]
    assert answered_json(*of(4, 8, "--kind", "1f1b", times="1,2"))["makespan"] == 33


def test_chunks_are_parts_of_stages_and_devices_place_stages() -> None:
    """Two chunks of 1, 2, 3 in a V, by hand: the same schedule."""
    by_chunks = answered_json(*of(2, 6, "--kind", "zbv", "--saved", "4,2,2", times="2,4,6"))
    by_hand = answered_json(
        *of(4, 6, "--kind", "zbv", "--stage-devices", "0,1,1,0", "--saved", "2,1,1", times="1,2,3")
    )
    for name in ("makespan", "span", "order", "starts", "peak_memory", "chunks", "devices"):
        assert by_chunks[name] == by_hand[name]
    unlike = answered_json(*of(2, 6, "--kind", "zbv", "--chunks", 2, times="2,4,6;4,2,2"))
    assert unlike["bound"] >= 6 * 12


@pytest.mark.parametrize(("placement", "devices"), [("loop", "0,1,0,1"), ("v", "0,1,1,0")])
def test_the_optimum_takes_a_placement(placement: str, devices: str) -> None:
    found = answered_json(*of(2, 3, "--chunks", 2, "--placement", placement, times="2,4"))
    by_hand = answered_json(*of(4, 3, "--stage-devices", devices, times="1,2"))
    assert (found["status"], found["chunks"], found["devices"]) == ("optimal", 2, 2)
    assert (found["makespan"], found["bound"]) == (by_hand["makespan"], by_hand["bound"])
    assert found["order"] == by_hand["order"]
    assert found["placement"].lower() == placement


def test_memory_is_counted_and_limited() -> None:
    """ZB-H2 keeps 2 p - 1 microbatches in flight on its first device, ZB-H1 p on all."""
    assert answered_json(*of(4, 12, "--kind", "zb-h1"))["peak_memory_per_device"] == [4] * 4
    halves = answered_json(*of(4, 12, "--kind", "zb-h2", "--saved", "6,4,2"))
    assert halves["peak_memory"] == 4 + 6 * 6 + 2  # 6 saved whole ones around an I
    limited = of(4, 12, "--kind", "zb-h2", "--memory-limit", "9,5,5,5")
    found = answered_json(*limited, code=1)
    assert (found["status"], found["makespan"], found["peak_memory"]) == ("infeasible", None, 7)
    assert "holds 7 on device" not in answered(*of(4, 12, "--kind", "zb-h2", "--memory-limit", 7))
    text = answered(*limited, code=1)
    assert "zb-h2 holds 7 on device 1, whose limit is 5" in text
    assert "at least 7" in text


@pytest.mark.parametrize("kind", ["zb1p", "zb2p", "zbv"])
def test_heuristics_keep_the_limit(kind: str) -> None:
    free = answered_json(*of(4, 12, "--kind", kind, times="3,2,1"))
    tight = answered_json(*of(4, 12, "--kind", kind, "--memory-limit", 3, times="3,2,1"))
    assert tight["peak_memory"] <= 3 < free["peak_memory"]
    assert tight["makespan"] >= free["makespan"]


def test_the_optimum_keeps_memory_and_minimises_the_span() -> None:
    """Zero-bubble's published example: 195 with memory 10, where its heuristic has 198."""
    example = of(
        4, 12, "--saved", "2,1,1", "--memory-limit", 10, "--time-limit", 20, times="5,6,4"
    )  # fmt: skip
    found = answered_json(*example)
    assert (found["status"], found["makespan"], found["bound"]) == ("optimal", 195, 195)
    assert found["peak_memory"] <= 10
    span = answered_json(*of(4, 8, "--objective", "span", "--memory-limit", 5))
    assert (span["status"], span["span"], span["bound"]) == ("optimal", 26, 26)


def test_the_least_memory_within_a_makespan() -> None:
    options = [*of(3, 6, "--chunks", 2, "--placement", "v"), "--objective", "memory"]
    least = answered_json(*options, "--makespan-limit", 20)
    assert (least["status"], least["peak_memory"], least["bound"]) == ("optimal", 2.5, 2.5)
    assert least["makespan"] <= 20
    alone = answered_json(*of(2, 3, "--chunks", 2, "--placement", "v"), "--objective", "memory")
    assert (alone["status"], alone["peak_memory"], alone["bound"]) == ("optimal", 1, 1)
    none = answered_json(*options, "--makespan-limit", 18, code=1)
    assert (none["status"], none["makespan"]) == ("infeasible", None)
    assert "no schedule has a makespan of at most 18" in none["reason"]


def test_the_best_placement() -> None:
    """Any of the named ones, with the least of their bounds; free, with a bound of its own."""
    named = [
        answered_json(*of(2, 3, "--chunks", 2, "--placement", name, times="2,4"))
        for name in ("loop", "v")
    ]
    found = answered_json(*of(2, 3, "--chunks", 2, "--placement", "any", times="2,4"))
    assert found["makespan"] == min(one["makespan"] for one in named)
    assert found["bound"] == min(one["bound"] for one in named)
    unequal = of(3, 4, "--placement", "free", "--time-limit", 3, times="1,1;5,5;1,1")
    free = answered_json(*unequal)
    assert free["bound"] <= free["makespan"]
    assert sorted(set(free["device"])) == [0, 1, 2]


# --curve


def test_a_curve_of_memory(tmp_path: Path) -> None:
    """More memory is never slower; the published kinds are not below the curve."""
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    found = answered_json(
        *of(2, 3, "--chunks", 2, "--placement", "v", "--curve", "--time-limit", 60),
        "--html",
        page,
        "--png",
        picture,
    )
    assert found["status"] == "optimal"
    ends = [point["makespan"] for point in found["points"]]
    memories = [point["memory"] for point in found["points"]]
    assert memories[0] == 1
    assert ends == sorted(ends, reverse=True)
    assert [point["bound"] for point in found["points"]] == ends
    for kind in found["kinds"]:
        fitting = [
            end
            for memory, end in zip(memories, ends, strict=False)
            if memory <= kind["peak_memory"]
        ]
        assert kind["makespan"] >= min(fitting)
    assert {"zbv", "v-half"} <= {kind["kind"] for kind in found["kinds"]}
    assert "zbv" in page.read_text()
    assert matplotlib.image.imread(picture).shape[1] == 1500
    some = answered(*of(2, 4, "--curve", "--memory-limit", "2,1"))
    assert [line.split()[0] for line in some.splitlines()[3:5]] == ["1", "2"]


def test_objectives_have_their_own_bounds() -> None:
    span = answered_json(*of(4, 12, "--kind", "zbv", "--objective", "span"))
    assert (span["status"], span["bound"], span["span"]) == ("optimal", 36, 36)
    assert span["makespan"] > 36
    memory = answered_json(*of(4, 12, "--kind", "v-min", "--objective", "memory"))
    assert (memory["bound"], memory["status"]) == (1, "feasible")
    assert memory["gap"] == pytest.approx(1 - 1 / memory["peak_memory"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "interleaved"], "(the devices), got 6; the nearest are 4 or 8"),
        (["--kind", "interleaved", "--chunks", 0], "--chunks must be at least 1"),
        (["--kind", "gpipe", "--chunks", 2], "gpipe has 1 stage per device, got 2; interleaved,"),
        (["--kind", "zbv", "--chunks", 3], "zbv has 2 stages per device, got 3"),
        (["--kind", "zb-h1", "--times", "1,2"], "--times: weight gradient is needed: zb-h1 splits"),
        (["--kind", "dualpipe"], "DualPipe needs at least 8 microbatches (2 p), got 6"),
        (["--kind", "zb1p", "--memory-limit", "0.5"], "limit[0] must be at least 1.0, one"),
        (["--kind", "zb1p", "--memory-limit", "4,4"], "limit needs one value or 4, one per device"),
        (["--kind", "zb1p", "--memory-limit", "4,x"], "-limit: '4,x' is no list of numbers"),
        (["--kind", "zb1p", "--memory-limit", "-4"], "limit[0] must be finite and not negative"),
        (["--saved", "4,1,2"], "stage 0: I and W must give back what F adds, 4, not 1 + 2"),
        (["--saved", "1,2"], "--saved: 2 numbers; write f for every stage or f,i,w"),
        (["--saved", "2,3,-1"], "--saved: i[0] must be 0 to 2"),
        (["--memory-limit", "0.5"], "limit[0] must be at least 1.0, one"),
        (["--memory-limit", "4", "--backend", "highs"], "highs takes neither memory nor spans"),
        (["--objective", "span", "--backend", "highs"], "takes neither memory nor spans; use cp"),
        (["--chunks", "2"], "--placement must be given for optimal with chunks: loop, V, wave, or"),
        (["--kind", "pe", "--placement", "any"], "--placement any is for kind optimal, not pe"),
        (["--placement", "free", "--objective", "memory"], "memory is for named placements"),
        (["--placement", "free", "--memory-limit", "4,4,4,5"], "limit must be one value for"),
        (["--makespan-limit", "9"], "--makespan-limit is for kind optimal with objective memory"),
        (["--kind", "1f1b", "--replicas", "2,1,1,1"], "--replicas are of kind 1f1b-rr, not 1f1b"),
        (["--kind", "1f1b-rr", "--replicas", "2,1,1"], "--replicas needs 4 values, got 3"),
        (["--kind", "1f1b-rr", "--replicas", "2,1,1,0"], "--replicas must be at least 1, got 0"),
        (["--kind", "1f1b-rr", "--replicas", "2;1"], "--replicas must be whole numbers such as"),
        (["--kind", "1f1b-rr", "--replicas", "7,1,1,1"], "1F1B-RR needs at least 7 microbatches"),
        (["--compare", "--replicas", "2,1,1,1"], "--replicas is of one schedule; leave it or"),
        (["--curve", "--kind", "zbv"], "--kind is of one schedule; leave it or --curve out"),
        (["--curve", "--objective", "memory"], "--objective memory is for single schedules"),
        (["--curve", "--memory-limit", "2,0.5"], "--memory-limit[0] must be at least 1.0"),
        (["--curve", "--placement", "any"], "'line', 'loop', 'V' or 'wave', got 'any'"),
        (["--chunks", "3", "--placement", "v"], "--placement V has 2 stages per device, got 3"),
        (["--kind", "zbv", "--placement", "loop"], "--placement of zbv is V, got loop"),
        (["--kind", "zbv", "--stage-devices", "0,1,0,1"], "zbv has its own, 0,1,1,0"),
        (["--kind", "chimera", "--stage-devices", "0,1,2,3"], "chimera has its own, two per stage"),
        (["--kind", "zbv", "--stage-devices", "0,1,2,0"], "must have as many stages of zbv"),
        (["--stage-devices", "0,1,0,1", "--chunks", "2"], "--chunks must be left out"),
        (["--kind", "zb"], "'zb' is none of gpipe, 1f1b, pe, pipedream"),
        (["--placement", "zig"], "Invalid value for '--placement': 'zig' is not one of 'line', "),
        (
            ["--kind", "interleaved", "--chunks", 2, "--times", "1,2;1,2;1,-2;1,2"],
            "--times: backward of stage 2 must be finite and not negative, got -2",
        ),
        (["--compare", "--kind", "zbv"], "--kind is of one schedule"),
        (["--compare", "--csv", "x.csv"], "--csv is of one schedule"),
        (["--kind", "zbv", "--csv", "x.html"], "--csv x.html: the name must end in .csv"),
        (["--kind", "chimera", "--csv", "x.csv"], "chimera has two copies of every stage"),
        (["--kind", "2bw", "--csv", "x.csv"], "2bw keeps several versions of the weights"),
    ],
)  # fmt: skip
def test_schedule_refuses(
    options: list[object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["schedule", "--stages", 4, "--microbatches", 6]
    given += [] if "--times" in options else ["--times", "1,1,1"]
    assert message in refused(*given, *options)
    assert not [*tmp_path.iterdir()]


def test_odd_devices_in_both_directions_are_refused() -> None:
    assert "even number of devices, got 5; the nearest are 4 or 6" in refused(
        *of(5, 6, "--kind", "chimera")
    )


def test_in_flight_limits_hold_for_published_kinds() -> None:
    found = answered_json(*of(4, 8, "--kind", "zb-h2", "--in-flight", 4), code=1)
    assert found["reason"] == "zb-h2 keeps 7 microbatches in flight on stage 0, not 4"
    assert answered_json(*of(4, 8, "--kind", "zb-h1", "--in-flight", 4))["makespan"] == 27


# --compare


def test_all_kinds_are_compared_with_the_optimum() -> None:
    found = answered_json(*of(4, 8, "--compare"))
    rows = {one["kind"]: one for one in found["schedules"]}
    shown = [name for one in found["schedules"] for name in (one["kind"], *one["same_as_kinds"])]
    assert sorted(set(shown)) == sorted(SCHEDULES)
    assert set(rows["1f1b"]["same_as_kinds"]) == {"pipedream", "1f1b-rr", "2bw"}
    ends = [one["makespan"] for one in found["schedules"]]
    assert ends == sorted(ends)
    assert found["refused"] == []
    optima = {one["placement"]: one for one in found["schedules"] if one["kind"] == "optimal"}
    assert set(optima) == {"line", "loop", "V"}
    for one in found["schedules"]:
        if one["placement"] in optima:
            best = optima[one["placement"]]
            assert best["bound"] <= best["makespan"] <= one["makespan"]
    alone = answered_json(*of(4, 8, "--kind", "v-half"))
    row = rows["v-half"] | {"wall_seconds": alone["wall_seconds"], "same_as_kinds": None}
    assert all(row[name] == alone[name] for name in row if name != "same_as_kinds")


def test_a_comparison_says_what_does_not_fit() -> None:
    options = of(4, 6, "--compare", "--memory-limit", 4, times="1,2")
    found = answered_json(*options)
    reasons = {one["kind"]: one["reason"] for one in found["refused"]}
    assert "gpipe holds 6 on device 0, whose limit is 4" in reasons["gpipe"]
    assert "splits backwards" in reasons["zb-h1"]
    assert "multiple of 4 microbatches" in reasons["interleaved"]
    assert {one["kind"] for one in found["schedules"]} == {"1f1b", "chimera", "hanayo", "optimal"}
    for one in found["schedules"]:
        assert one["peak_memory"] <= 4
        assert one["bound"] <= one["makespan"]
    text = answered(*options)
    assert "without zb-h1: --times: weight gradient is needed" in text
    assert "pipedream" in text  # in the row of 1f1b
    by_memory = answered_json(*of(4, 4, "--compare", "--objective", "memory", "--time-limit", 1))
    peaks = [one["peak_memory"] for one in by_memory["schedules"]]
    assert peaks == sorted(peaks)
    kinds = [one["kind"] for one in by_memory["schedules"]]
    assert kinds.index("v-min") == kinds.count("optimal")  # the first after the least of all


def test_a_comparison_refuses_what_no_kind_takes() -> None:
    message = refused(*of(4, 6, "--compare", times="1,-2"))
    assert "--times: backward of stage 0 must be finite and not negative, got -2" in message
    assert "--memory-limit[0] must be at least" in refused(
        *of(4, 6, "--compare", "--memory-limit", 0.1)
    )


# Files


def test_schedules_are_drawn(tmp_path: Path) -> None:
    picture, page = tmp_path / "a.png", tmp_path / "a.html"
    options = ["--kind", "chimera", "--png", picture, "--html", page]
    found = answered_json(*of(4, 8, *options))
    assert found["files"] == [str(page), str(picture)]
    alone = matplotlib.image.imread(picture).shape
    text = page.read_text()
    (drawing,) = drawings(text)
    kinds = Counter(
        drawing["kinds"][kind]["name"] for lane in drawing["lanes"] for kind in lane["kind"]
    )
    assert kinds == {"forward": 4 * 8, "backward": 4 * 8}
    assert len({kind["light"] for kind in drawing["kinds"]}) == 4  # two directions
    assert "both directions" in drawing["lanes"][0]["name"]
    compared = answered(*of(2, 4, "--compare", "--png", picture, "--html", page))
    assert f"{picture} is written" in compared
    assert matplotlib.image.imread(picture).shape[0] > 5 * alone[0]
    text = page.read_text()
    assert all(kind in text for kind in SCHEDULES)
    titles = [lane["name"] for lane in drawings(text)[0]["lanes"] if lane["group"] == "title"]
    assert len(titles) > 4


def test_nothing_is_written_without_a_schedule(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    assert answered_json(
        *of(4, 8, "--kind", "gpipe", "--memory-limit", 2, "--html", page), code=1
    )["files"] == []  # fmt: skip
    assert not page.exists()


PLAIN = [name for name, kind in KINDS.items() if kind.weights == "flush"]


@pytest.mark.parametrize("kind", [*PLAIN, "pe", "optimal"])
def test_torch_loads_the_file(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    result = run(*of(2, 4, "--kind", kind, "--csv", file, "--json"))
    if kind in KINDS and KINDS[kind].placement == "both directions":
        assert (result.exit_code, file.exists()) == (2, False)
        return
    found = json.loads(result.stdout)
    rows = [row for row in csv.reader(file.open(newline=""))]
    split = kind == "optimal" or (kind in KINDS and KINDS[kind].is_split)
    assert {one.strip("0123456789") for row in rows for one in row} <= set(
        "FBIW" if split else "FB"
    )
    if split and "B" not in file.read_text():
        assert rows == found["order"]
    pytest.importorskip("torch")
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    count = 2 * found["chunks"]
    stage = SimpleNamespace(num_stages=count, group_size=2, group_rank=0)
    schedule = _PipelineScheduleRuntime([stage], 4)
    schedule._load_csv(str(file))
    homes = {int(one[0]): rank for rank, row in enumerate(rows) for one in row}
    assert schedule.stage_index_to_group_rank == homes


# Python


def test_python_schedules_and_compares() -> None:
    ones = (1.0,) * 4
    answer = stagewright.schedule(8, ones, ones, weight_gradient=ones, kind="zbv", memory=[3.0])
    assert answer.peak_memory <= 3
    assert answer.timed.makespan() == answer.makespan == answer.result.cost
    both = stagewright.schedule(8, ones, ones, weight_gradient=ones, kind="dualpipe")
    assert (both.result, len(both.timed.order.paths)) == (None, 2)
    found = stagewright.compare_schedules(8, ones, ones, chunks=4)
    by_kind = {one.kind: one for one in found.schedules}
    assert by_kind["interleaved"].chunks == by_kind["hanayo"].chunks == 4
    assert by_kind["1f1b"].chunks == 1
    with pytest.raises(stagewright.InputError, match="kind 'zb' is none of gpipe, 1f1b, pe"):
        stagewright.schedule(8, ones, ones, kind="zb")
    with pytest.raises(stagewright.InputError, match="weight_gradient is needed: zbv splits"):
        stagewright.schedule(8, ones, ones, kind="zbv")
    with pytest.raises(stagewright.InputError, match="saved needs 4 values, got 1"):
        stagewright.schedule(8, ones, ones, saved=[1.0])
