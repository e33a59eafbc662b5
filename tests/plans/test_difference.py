"""One plan against another: the causes add up to the iterations, and every change is named."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commands import answered, answered_json, refused
from periodic_plans import plan_by_hand
from plans import AtFirstPlan, small_problem

from stagewright.executor.simulation.difference import differ
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, save_plan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planning import plan

PLANNERS = ("dp", "gpipe", "pipedream", "spp", "general", "madpipe", "1f1b-star", "ooo")


def found(planner: str, microbatches: int = 4) -> PipelinePlan:
    watch = AtFirstPlan()
    problem = replace(small_problem(parts=True), microbatches=microbatches)
    made = plan(problem, planner, Limits(60.0, stop=watch.stop), watch)
    assert made.plan is not None, planner
    return made.plan


@pytest.fixture(scope="module")
def plans() -> dict[str, PipelinePlan]:
    return {planner: found(planner) for planner in PLANNERS}


def test_the_causes_add_up_to_both_iterations(plans) -> None:
    for one in plans.values():
        for other in plans.values():
            told = differ(one, other)
            assert sum(part.first_seconds for part in told.parts) == pytest.approx(
                told.iteration.first_seconds
            )
            assert sum(part.second_seconds for part in told.parts) == pytest.approx(
                told.iteration.second_seconds
            )
            assert told.iteration.first_seconds == pytest.approx(one.certificate.cost_seconds)
            assert sum(part.difference for part in told.parts) == pytest.approx(
                other.certificate.cost_seconds - one.certificate.cost_seconds
            )


def test_a_plan_does_not_differ_from_itself(plans) -> None:
    for one in plans.values():
        told = differ(one, one)
        assert all(part.difference == 0 for part in told.parts)
        assert told.changes == ()
        assert repr(told).startswith("iteration ")


def test_it_prints_as_lines(plans) -> None:
    told = repr(differ(plans["dp"], plans["gpipe"])).splitlines()
    assert re.fullmatch(r"iteration \S+ m?s -> \S+ m?s, [+-]\S+ m?s", told[0])
    assert "planner: dp -> gpipe" in told


def chain_on(bandwidth: float) -> PipelinePlan:
    """A microbatch through two layers of 1 s + 2 s, with 1e9 bytes between them."""
    layers = tuple(Layer(f"l{i}", 1e6, (LayerCost(840, 1.0, 1e6, 1e9, 2.0),)) for i in range(2))
    cluster = uniform_servers(1, 2, Link(bandwidth), memory_bytes=16e9)
    made = plan(PipelineProblem(Chain("two", "test", 840, layers), cluster, 1), "gpipe")
    assert made.plan is not None
    return made.plan


def test_the_cause_of_slower_links_is_transfers() -> None:
    told = differ(chain_on(1e9), chain_on(5e8))
    by_cause = {part.cause: part for part in told.parts}
    assert by_cause["forwards"].first_seconds == pytest.approx(2.0)
    assert by_cause["backwards"].first_seconds == pytest.approx(4.0)
    assert by_cause["transfers"].first_seconds == pytest.approx(2.0)
    assert by_cause["transfers"].difference == pytest.approx(2.0)
    assert told.iteration.difference == pytest.approx(2.0)
    assert told.changes == ()


def test_a_period_is_the_load_and_the_idle_time_of_a_device() -> None:
    """Stage 0 works 3 of the 4 s of each of 4 periods."""
    _, one = plan_by_hand()
    told = {part.cause: part.first_seconds for part in differ(one, one).parts}
    assert told["forwards"] == pytest.approx(4.0)
    assert told["backwards"] == pytest.approx(8.0)
    assert sum(told.values()) == pytest.approx(differ(one, one).iteration.first_seconds)
    assert "transfers" not in told


def test_every_change_of_a_stage_is_named(plans) -> None:
    one = plans["pipedream"]
    stage = one.stages[0]
    other = replace(one, stages=(replace(stage, recompute="full"), *one.stages[1:]))
    assert differ(one, other).changes == ("stage 0: recompute none -> full",)
    more = found("dp", 2)
    told = differ(plans["dp"], more).changes
    assert told == ("microbatches: 4 -> 2",)
    assert "stages: " in " ".join(differ(plans["dp"], plans["gpipe"]).changes)


def test_other_models_are_refused(plans) -> None:
    with pytest.raises(InputError, match=r"the first plan is of 'two' with 2 layers, the second"):
        differ(chain_on(1e9), plans["dp"])


def test_the_command_prints_causes_and_changes(plans, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(plans["dp"], "a.json")
    save_plan(plans["gpipe"], "b.json")
    told = answered("diff", "a.json", "b.json")
    assert "iteration" in told
    assert "planner: dp -> gpipe" in told
    assert all(len(line) <= 80 for line in told.splitlines() if "layers end" not in line)
    document = answered_json("diff", "a.json", "b.json")
    assert document["iteration"]["second_seconds"] == plans["gpipe"].certificate.cost_seconds
    Path("c.json").write_text(json.dumps({"format": "stagewright-cluster"}))
    assert "c.json" in refused("diff", "a.json", "c.json")
