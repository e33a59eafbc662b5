"""Plan documents: what is written is read back, any fault is one line; actions as text."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from periodic_plans import plan_by_hand
from plans import made_up_certificate, make_stages, small_problem, valid_plan
from pydantic import TypeAdapter

from stagewright.executor.drawing.timeline import timeline
from stagewright.formulations.checking.check import check, predict
from stagewright.formulations.clusters.allocation_plan import AllocationPlan
from stagewright.formulations.plans.actions import Action, ActionKind, parse_action
from stagewright.formulations.plans.plan import Guarantee, PipelinePlan, Stage, load_plan, save_plan
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError

PROBLEM = small_problem(layers=4, devices=4, microbatches=2)


def small_plan() -> PipelinePlan:
    plan = valid_plan(PROBLEM, make_stages((1, 4), (2, 1), ("round-robin", "split")))
    figures = predict(PROBLEM, plan)
    cost = figures.iteration_seconds
    certificate = made_up_certificate(PROBLEM, plan, cost)
    return replace(plan, predicted=figures, certificate=certificate)


@pytest.fixture
def data() -> dict[str, Any]:
    """A plan document as plain data, to be damaged."""
    plan = small_plan()
    assert plan.certificate is not None
    cost = plan.certificate.cost_seconds
    promise = Guarantee("Theorem 1", 2 * cost, cost, True, "always", plan.stages)
    promised = replace(plan, certificate=replace(plan.certificate, guarantees=(promise,)))
    found: dict[str, Any] = json.loads(documents.to_json(promised))
    return found


def load(tmp_path: Path, text: str) -> PipelinePlan:
    path = tmp_path / "plan.json"
    path.write_text(text)
    return load_plan(path)


def test_the_same_plan_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(small_plan(), path)
    assert load_plan(path) == small_plan()
    assert check(PROBLEM, load_plan(path)) == ()
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_figures_and_certificate_may_be_absent(tmp_path: Path) -> None:
    bare = replace(small_plan(), predicted=None, certificate=None, layers=None)
    save_plan(bare, tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert "predicted" not in text
    assert load_plan(tmp_path / "plan.json") == bare


def test_what_other_programs_read(data: dict[str, Any]) -> None:
    assert (data["format"], data["version"], data["kind"]) == ("stagewright-plan", 1, "pipeline")
    kept = {"recompute": "none", "offload": False, "tensor": 1, "shards": "none"}
    assert data["stages"] == [
        {"layers": [0, 1], "devices": ["g0", "g1"], "replication": "round-robin", **kept},
        {"layers": [1, 4], "devices": ["g2"], "replication": "split", **kept},
    ]
    assert data["layers"][1] == {"name": "layer1", "parameter_bytes": 9e7}
    assert data["weights"] == "flush"
    assert data["microbatches"] == 2
    actions = data["schedule"]["actions"]
    assert set(actions[0]) == {"device", "action", "start_seconds", "finish_seconds"}
    send = next(entry for entry in actions if entry["action"] == "0SEND_F1")
    assert (send["device"], send["sources"], send["targets"]) == ("g1", ["g1"], ["g2"])
    assert send["bytes"] == PROBLEM.boundary_bytes(1)


Damage = Callable[[dict[str, Any]], Any]


def put(*path: Any, value: Any) -> Damage:
    def damage(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return damage


def without(*path: Any) -> Damage:
    def damage(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put("format", value="stagewright-model"), "expected a 'stagewright-plan' document"),
        (without("format"), "expected a 'stagewright-plan' document"),
        (put("version", value=2), "version 2 is not known; this release reads 1"),
        (without("version"), "version None is not known"),
        (put("version", value=True), "version True is not known"),
        (put("kind", value="operators"), "kind: "),
        (put("colour", value="red"), "colour: unknown field"),
        (put("stages", 0, "gpus", value=[]), r"stages\[0\].gpus: unknown field"),
        (put("schedule", "actions", 3, "note", value=""), r"actions\[3\].note: unknown field"),
        (put("predicted", "flops", value=1), "predicted.flops: unknown field"),
        (without("digest"), "digest: missing field"),
        (without("stages", 1, "devices"), r"stages\[1\].devices: missing field"),
        (without("schedule", "actions", 0, "start_seconds"), r"actions\[0\].start_seconds: miss"),
        (put("microbatches", value="many"), "microbatches: .*got 'many'"),
        (put("microbatches", value="2"), "microbatches: .*integer, got '2'"),
        (put("microbatches", value=True), "microbatches: .*integer, got True"),
        (put("stages", 0, "layers", value=["0", 1]), r"stages\[0\].layers\[0\]: .*got '0'"),
        (put("predicted", "bubble", value="0.5"), "predicted.bubble: .*number, got '0.5'"),
        (put("predicted", "bubble", value=True), "predicted.bubble: .*number, got True"),
        (put("predicted", "bubble", value=10**400), "predicted.bubble: .*finite number, got 1000"),
        (put("digest", value="\ud800"), "not a complete JSON document"),
        (put("microbatches", value=2.5), "microbatches: .*got 2.5"),
        (put("microbatches", value=0), "microbatches must be at least 1, got 0"),
        (put("stages", value=[]), "a plan needs at least one stage"),
        (put("stages", value="all"), "stages: "),
        (put("stages", 0, "layers", value=[0]), r"stages\[0\].layers\[1\]: missing field"),
        (put("stages", 0, "layers", value=[1, 1]), r"stages\[0\]: layers must be \[start, stop\)"),
        (put("stages", 0, "layers", value=[0, 1, 2]), r"stages\[0\].layers: "),
        (put("stages", 0, "devices", value=[]), r"stages\[0\]: a stage needs at least one device"),
        (put("stages", 0, "devices", value=[0, 1]), r"stages\[0\].devices\[0\]: .*string"),
        (put("stages", 0, "replication", value="both"), r"stages\[0\].replication: .*'split'"),
        (put("stages", 0, "recompute", value="some"), r"stages\[0\].recompute: .*'full'"),
        (put("weights", value="often"), "weights: .*'flush', 'stash'"),
        (put("layers", 0, "flops", value=1), r"layers\[0\].flops: unknown field"),
        (put("layers", 0, "parameter_bytes", value="1"), r"layers\[0\].parameter_bytes: .*number"),
        (put("schedule", "kind", value="periodic"), "schedule.period_seconds: missing field"),
        (put("schedule", "kind", value="weekly"),
         "schedule.kind: must be one of 'finite', 'periodic', got 'weekly'"),
        (put("schedule", "kind", value=7), "schedule.kind: must be one of .*, got '7'"),
        (put("schedule", "kind", value=None), "schedule.kind: must be one of .*, got 'None'"),
        (without("schedule", "kind"), "schedule.kind: missing field"),
        (without("schedule", "actions"), "schedule.actions: missing field"),
        (without("schedule"), "plan.json: schedule: missing field"),
        (put("schedule", value=[]), "schedule: Input should be an object"),
        (put("schedule", "note", value=""), "schedule.note: unknown field"),
        (put("schedule", "finite", value={}), "schedule.finite: unknown field"),
        (put("schedule", "period_seconds", value=1.0), "schedule.period_seconds: unknown field"),
        (put("schedule", "actions", 0, "shift", value=1), r"schedule.actions\[0\].shift: unknown"),
        (put("schedule", "actions", 1, "start_seconds", value=None), r"actions\[1\].start_seconds"),
        (put("schedule", "actions", 1, "device", value=7), r"actions\[1\].device: .*string"),
        (put("predicted", "bubble", value="small"), "predicted.bubble: .*got 'small'"),
        (put("certificate", "bounds", 0, "scope", value="mine"), r"bounds\[0\].scope: "),
        (put("certificate", "guarantees", 0, "holds", value="often"), r"guarantees\[0\].holds: "),
    ],
)  # fmt: skip
def test_a_damaged_document_is_refused(
    tmp_path: Path, data: dict[str, Any], damage: Damage, message: str
) -> None:
    damage(data)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, json.dumps(data))
    assert str(caught.value).startswith(f"{tmp_path / 'plan.json'}: ")
    assert "\n" not in str(caught.value)


@pytest.fixture
def periodic() -> dict[str, Any]:
    """A periodic plan document as plain data; action 0 is a forward, 2 a transfer."""
    found: dict[str, Any] = json.loads(documents.to_json(plan_by_hand()[1]))
    assert [one["action"] for one in found["schedule"]["actions"][:3]] == ["0F", "2F", "2SEND_B"]
    return found


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put("schedule", "period_seconds", value=0.0),
         "schedule: period_seconds must be positive, got 0.0"),
        (put("schedule", "period_seconds", value=-1.0), "schedule: period_seconds must be positi"),
        (put("schedule", "period_seconds", value="4"), "schedule.period_seconds: .*got '4'"),
        (without("schedule", "period_seconds"), "schedule.period_seconds: missing field"),
        (put("schedule", "actions", 0, "start_seconds", value=4.0),
         r"schedule: actions\[0\], 0F: start_seconds must be in \[0, 4.0\)"),
        (put("schedule", "actions", 0, "start_seconds", value=-0.5),
         r"schedule: actions\[0\], 0F: start_seconds must be in \[0, 4.0\)"),
        (put("schedule", "actions", 0, "seconds", value=-1.0), "seconds not negative, got 0.0 and"),
        (put("schedule", "actions", 0, "shift", value=-1),
         r"schedule: actions\[0\], 0F: shift must be from 0 to \d+, got -1"),
        (put("schedule", "actions", 0, "shift", value=10**12), "shift must be from 0 to"),
        (put("schedule", "actions", 0, "shift", value=0.5),
         r"schedule.actions\[0\].shift: .*integer, got 0.5"),
        (without("schedule", "actions", 0, "shift"), r"schedule.actions\[0\].shift: missing field"),
        (put("schedule", "actions", 0, "finish_seconds", value=1.0),
         r"schedule.actions\[0\].finish_seconds: unknown field"),
        (put("schedule", "actions", 2, "bytes", value="many"),
         r"schedule.actions\[2\].bytes: .*got 'many'"),
        (put("schedule", "kind", value="finite"), "schedule.period_seconds: unknown field|missing"),
        (put("schedule", "kind", value="weekly"), "schedule.kind: must be one of"),
        (without("schedule", "kind"), "schedule.kind: missing field"),
    ],
)  # fmt: skip
def test_a_damaged_periodic_document_is_refused(
    tmp_path: Path, periodic: dict[str, Any], damage: Damage, message: str
) -> None:
    damage(periodic)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, json.dumps(periodic))
    assert str(caught.value).startswith(f"{tmp_path / 'plan.json'}: schedule")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forward", "'forward' is not an operation; write for example 2F"),
        ("0F3", "'0F3' is not an operation; write for example 2F"),
        ("0USE", "0USE belongs to programs, not to plans"),
        ("7F", "7F has stage 7, the plan has 3 stages"),
    ],
)
def test_an_operation_that_is_none_is_named_with_its_place(
    tmp_path: Path, periodic: dict[str, Any], text: str, message: str
) -> None:
    """As in a finite plan, the document is read, and whoever uses the actions refuses them."""
    put("schedule", "actions", 0, "action", value=text)(periodic)
    plan = load(tmp_path, json.dumps(periodic))
    with pytest.raises(InputError) as caught:
        timeline(plan)
    assert str(caught.value).startswith(f"schedule.actions[0]: {message}")
    assert check(plan_by_hand()[0], plan)


def test_the_same_periodic_plan_comes_back(tmp_path: Path) -> None:
    problem, plan = plan_by_hand()
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert check(problem, load_plan(tmp_path / "plan.json")) == ()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, number: str) -> None:
    text = documents.to_json(small_plan()).replace(
        '"start_seconds": 0.0', f'"start_seconds": {number}', 1
    )
    with pytest.raises(InputError, match=r"schedule.actions\[0\].start_seconds: .*finite"):
        load(tmp_path, text)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    text = documents.to_json(small_plan()).rstrip()
    with pytest.raises(InputError, match="not a complete JSON document") as caught:
        load(tmp_path, text[: int(share * len(text))])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000])
def test_json_that_breaks_parsers_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="not a complete JSON document") as caught:
        load(tmp_path, text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["[]", "null", "3", '"plan"'])
def test_other_json_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="expected a 'stagewright-plan' document"):
        load(tmp_path, text)


def test_an_absent_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.json: No such file"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(InputError, match="is a folder; name a file in it"):
        load_plan(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a text file"):
        load_plan(tmp_path / "binary")


def test_a_stage_knows_who_runs_a_microbatch() -> None:
    assert Stage((0, 1), ("a", "b")).runners(3) == ("a", "b")
    turns = Stage((0, 1), ("a", "b", "c"), "round-robin")
    assert [turns.runners(m) for m in range(4)] == [("a",), ("b",), ("c",), ("a",)]


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_the_schema_is_json_and_closed(data: dict[str, Any]) -> None:
    schema = json.loads(json.dumps(TypeAdapter(PipelinePlan).json_schema()))
    assert references(schema) == {f"#/$defs/{name}" for name in schema["$defs"]}
    for part in (schema, *schema["$defs"].values()):
        assert part["type"] == "object"
        assert part["additionalProperties"] is False
    left_out = {"memory_limit_bytes", "assumed_share", "microbatch_size"}
    left_out |= {"message_seconds", "message_bytes_per_second", "reference_seconds"}
    assert set(data) | left_out == set(schema["properties"])
    assert set(schema["required"]) <= set(data)
    assert {"stages", "microbatches", "schedule", "digest"} <= set(schema["required"])


def test_a_field_that_stands_twice_is_refused(tmp_path: Path) -> None:
    text = documents.to_json(small_plan()).replace(
        '"microbatches": 2', '"microbatches": 2, "microbatches": 3', 1
    )
    with pytest.raises(InputError, match="'microbatches' appears twice"):
        load(tmp_path, text)


def test_every_plan_document_is_an_envelope() -> None:
    """A pipeline plan and an allocation are asked alike for what problem they are."""
    plan = small_plan()
    allocation = AllocationPlan("d", "max_min", (), objective=4.0, bound=5.0, proved_by="duality")
    assert plan.answers(PROBLEM.digest)
    assert not allocation.answers(PROBLEM.digest)


BARE = (ActionKind.REDUCE, ActionKind.UPDATE, ActionKind.RUN)
NUMBERS = st.integers(0, 999_999_999)
ACTIONS = st.one_of(
    st.builds(
        Action, NUMBERS, st.sampled_from([kind for kind in ActionKind if kind not in BARE]), NUMBERS
    ),
    st.builds(Action, NUMBERS, st.sampled_from(BARE)),
)


@given(ACTIONS)
def test_text_and_back(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(st.one_of(st.text(), st.from_regex(r"\d{0,3}(F|B|SEND_F|REDUCE_GRAD)\d{0,3}\s?")))
def test_what_parses_prints_the_same(text: str) -> None:
    try:
        action = parse_action(text)
    except InputError:
        return
    assert str(action) == text


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, ActionKind.FORWARD, 0)),
        ("1B13", Action(1, ActionKind.BACKWARD, 13)),
        ("10SEND_F2", Action(10, ActionKind.SEND_FORWARD, 2)),
        ("3SEND_B0", Action(3, ActionKind.SEND_BACKWARD, 0)),
        ("0REDUCE_GRAD", Action(0, ActionKind.REDUCE)),
        ("1I3", Action(1, ActionKind.INPUT_GRADIENT, 3)),
        ("1W3", Action(1, ActionKind.WEIGHT_GRADIENT, 3)),
        ("2RECV_F0", Action(2, ActionKind.RECEIVE_FORWARD, 0)),
        ("2RECV_B0", Action(2, ActionKind.RECEIVE_BACKWARD, 0)),
        ("4UPDATE", Action(4, ActionKind.UPDATE)),
        ("4STASH1", Action(4, ActionKind.STASH, 1)),
        ("4USE1", Action(4, ActionKind.USE, 1)),
        ("4DROP1", Action(4, ActionKind.DROP, 1)),
    ],
)
def test_the_spelling_of_the_schedule_files(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    ["", "F", "2F", "F0", "2X0", "2f0", "-1F0", "1F-1", "2F0 ", " 2F0", "2F0\n", "02F0", "2F00",
     "2SEND0", "2SEND_F", "2REDUCE_GRAD0", "\u0662F0", "2F" + 5000 * "1"],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_action(text)


def test_a_microbatch_belongs_to_all_but_a_reduce_and_an_update() -> None:
    with pytest.raises(InputError, match="a microbatch or version belongs to every action"):
        Action(0, ActionKind.FORWARD)
    with pytest.raises(InputError, match="0REDUCE_GRAD1: a microbatch"):
        Action(0, ActionKind.REDUCE, 1)
