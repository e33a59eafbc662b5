"""What the page shows of answers without a plan, of the examples that it offers."""

import json
import threading
from functools import cache
from importlib.resources import files
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the service is not installed")

from profiles import slow_after

from stagewright.formulations.forms.answers import silent
from stagewright.service.http.app import OWN
from stagewright.service.http.figures import figures
from stagewright.service.jobs.kinds import KINDS, parse_request
from stagewright.service.whole_answers import written

QUICK = ["jobshop", "schedule", "allocate", "rounds", "simulate-cluster", "cloud"]
OTHERS = [kind for kind in KINDS if kind != "plan"]


@cache
def answered(kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The example's request, its answer, and what is shown of it."""
    return shown_of(kind, files(OWN).joinpath(f"example-{kind}.json").read_text())


def shown_of(kind: str, text: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The request in a text, its answer, and what is shown of it."""
    request = parse_request(kind, text)
    answer = json.loads(written(KINDS[kind].answer(request, silent, threading.Event())))
    return json.loads(text), answer, figures(kind, request, answer).table()


@pytest.mark.parametrize(
    "kind", slow_after(len(QUICK), [*QUICK, *(one for one in OTHERS if one not in QUICK)])
)
def test_every_kind_is_shown(kind: str) -> None:
    _, _, shown = answered(kind)
    assert json.loads(json.dumps(shown))
    assert len(shown["facts"]) >= 2
    assert shown["tables"] or shown["timelines"]
    for one in shown["tables"]:
        assert {len(row) for row in one["rows"]} == {len(one["head"])}
        assert all(isinstance(cell, str) for row in one["rows"] for cell in row)


def spans(lane: dict[str, Any], drawing: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What a lane runs, from when to when, in the drawing's unit."""
    found, at, kinds = [], 0.0, [one["name"] for one in drawing["kinds"]]
    for pause, length, kind in zip(lane["start"], lane["length"], lane["kind"], strict=True):
        start = at + pause
        at = start + length
        found.append((kinds[kind], *(t / drawing["ticks"] * drawing["end"] for t in (start, at))))
    return found


def test_a_job_shop_has_every_step_on_its_machine() -> None:
    request, answer, shown = answered("jobshop")
    (drawn,) = (one["timeline"] for one in shown["timelines"])
    expected = [
        (machine, f"job {j}", start, start + time)
        for j, (steps, starts) in enumerate(zip(request["jobs"], answer["starts"], strict=True))
        for (machine, time), start in zip(steps, starts, strict=True)
    ]
    found = [
        (machine, job, round(start, 4), round(end, 4))
        for machine, lane in enumerate(drawn["lanes"])
        for job, start, end in spans(lane, drawn)
    ]
    assert sorted(found) == sorted(expected)


def test_a_flexible_job_shop_is_drawn_on_the_chosen_machines() -> None:
    request = parse_request("jobshop", '{"jobs": [[[[0, 3], [1, 2]], [[1, 1]]], [[1, 9]]]}')
    answer = {"makespan": 12, "bound": 10, "proved_by": "CP-SAT", "gap": 0.1,
              "starts": [[0, 3], [4]], "chosen_machines": [[0, 1], [1]]}  # fmt: skip
    (drawn,) = (one["timeline"] for one in figures("jobshop", request, answer).table()["timelines"])
    found = [
        (lane["name"], job, round(start, 4), round(end, 4))
        for lane in drawn["lanes"]
        for job, start, end in spans(lane, drawn)
    ]
    assert found == [
        ("machine 0", "job 0", 0.0, 3.0),
        ("machine 1", "job 0", 3.0, 4.0),
        ("machine 1", "job 1", 4.0, 13.0),
    ]


def test_a_schedule_has_the_times_of_its_actions() -> None:
    _, answer, shown = answered("schedule")
    (drawn,) = (one["timeline"] for one in shown["timelines"])
    title, *lanes = drawn["lanes"]
    assert title["name"] == "optimal"
    assert max(end for lane in lanes for _, _, end in spans(lane, drawn)) == answer["makespan"]
    for lane, starts in zip(lanes, answer["starts"], strict=True):
        assert [start for _, start, _ in spans(lane, drawn)] == pytest.approx(starts, abs=1e-4)


def test_shares_become_accelerators() -> None:
    request, answer, shown = answered("allocate")
    (drawn,) = (one["timeline"] for one in shown["timelines"])
    scales = {job["name"]: job["scale"] for job in request["workload"]["jobs"]}
    for lane, one in zip(drawn["lanes"], request["pool"]["accelerators"], strict=True):
        held = {job: end - start for job, start, end in spans(lane, drawn)}
        assert held == pytest.approx(
            {
                " + ".join(share["jobs"]): share["share"] * scales[share["jobs"][0]]
                for share in answer["allocation"]
                if share["accelerator"] == one["name"]
            },
            abs=1e-5,
        )
        assert sum(held.values()) <= one["count"] * (1 + 1e-6)


def accelerator_of(request: dict[str, Any], kind: str, number: int) -> str:
    """What a row is called: the accelerator by its server, where the pool has servers."""
    (size,) = (one.get("per_server") for one in request["pool"]["accelerators"]
               if one["name"] == kind)  # fmt: skip
    if size is None:
        return f"{kind} {number}"
    return f"{kind} server {number // size} GPU {number % size}"


def test_rounds_are_on_accelerators_until_their_jobs_change() -> None:
    request, answer, shown = answered("rounds")
    (drawn,) = (one["timeline"] for one in shown["timelines"])
    hours = request.get("round_seconds", 360.0) / 3600
    (jobs,) = shown["tables"]
    assert jobs["head"][-2:] == ["time of v100", "time of p100"]
    for name, waits, _, *times in jobs["rows"]:
        ran = [r for r, assigned in enumerate(answer["rounds"])
               if any(name in one["jobs"] for one in assigned)]  # fmt: skip
        assert waits == (f"{ran[0] * hours:.4g} h" if ran else "does not run")
        for kind, time in zip(("v100", "p100"), times, strict=True):
            held = sum(len(one["numbers"]) for assigned in answer["rounds"] for one in assigned
                       if name in one["jobs"] and one["accelerator"] == kind)  # fmt: skip
            assert time == (f"{held * hours:.4g} h" if held else "")
    by_round = [
        {
            accelerator_of(request, one["accelerator"], number): " + ".join(one["jobs"])
            for one in assigned
            for number in one["numbers"]
        }
        for assigned in answer["rounds"]
    ]
    for lane in drawn["lanes"]:
        runs = spans(lane, drawn)
        for r, assigned in enumerate(by_round):
            middle = (r + 0.5) * hours
            here = [job for job, start, end in runs if start <= middle < end]
            assert here == [job for place, job in assigned.items() if place == lane["name"]]
        ends = [(job, end) for job, _, end in runs]
        assert not {(job, start) for job, start, _ in runs} & set(ends)


def test_a_simulated_cluster_shows_who_was_where() -> None:
    request, answer, shown = answered("simulate-cluster")
    (drawn,) = (one["timeline"] for one in shown["timelines"])
    counts = {one["name"]: one["count"] for one in request["pool"]["accelerators"]}
    names = [
        accelerator_of(request, kind, number)
        for kind, count in counts.items()
        for number in range(count)
    ]
    assert [lane["name"] for lane in drawn["lanes"]] == names
    last = max(end for lane in drawn["lanes"] for _, _, end in spans(lane, drawn))
    # A job ends within its last round.
    round_hours = request["round_seconds"] / 3600
    assert 0 <= last - answer["makespan_seconds"] / 3600 <= round_hours
    ran = {job for lane in drawn["lanes"] for job, _, _ in spans(lane, drawn)}
    assert ran == {job["name"] for job in request["workload"]["jobs"]}


@pytest.mark.slow
def test_the_front_of_schedules_is_what_nothing_is_better_than() -> None:
    _, answer, shown = answered("compare-schedules")
    (chart,) = (one["chart"] for one in shown["charts"])
    line, front, others = chart["series"]
    every = {(one["peak_memory"], one["makespan"]) for one in answer["schedules"]}

    def beaten(memory: float, makespan: float) -> bool:
        return any(
            other != (memory, makespan) and other[0] <= memory and other[1] <= makespan
            for other in every
        )

    def rounded(points: Any) -> set[tuple[float, float]]:
        return {(round(memory, 4), round(makespan, 4)) for memory, makespan in points}

    on_front = rounded(point for point in every if not beaten(*point))
    assert rounded(zip(front["x"], front["y"], strict=True)) == on_front
    assert rounded(zip(others["x"], others["y"], strict=True)) == rounded(every) - on_front
    assert rounded(zip(line["x"], line["y"], strict=True)) >= on_front
    named = ", ".join([*front["names"], *others["names"]]).split(", ")
    kinds = [k for one in answer["schedules"] for k in (one["kind"], *one["same_as_kinds"])]
    assert sorted(named) == sorted(kinds)


@pytest.mark.slow
def test_a_sweep_marks_the_best_row() -> None:
    _, answer, shown = answered("sweep")
    (rows,) = (one["rows"] for one in shown["tables"])
    assert len(rows) == len(answer["rows"])
    assert [i for i, row in enumerate(rows) if row[0].startswith("★")] == [answer["best"]]


def test_a_job_is_explained_before_the_shares_that_ask_for_it() -> None:
    request, _, shown = answered("allocate")
    (shares,) = [one for one in shown["tables"] if one["title"] == shown["explains"]]
    names = [row[0] for row in shares["rows"]]
    assert names == [job["name"] for job in request["workload"]["jobs"]]
    asked = json.dumps(request | {"explain": names[0], "forecast": True})
    _, _, more = shown_of("allocate", asked)
    assert more["lead"][0] == f"Why {names[0]}?"
    assert any("if no other job comes" in line for line in more["lead"])
    (shares,) = [one for one in more["tables"] if one["title"] == more["explains"]]
    assert "done after" in shares["head"]
