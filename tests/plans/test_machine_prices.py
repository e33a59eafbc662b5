"""Whole samples, all-reduces in turn and the optimizer's step, by hand."""

from dataclasses import replace

import pytest
from plans import make_stages, small_problem, valid_plan

import stagewright
from stagewright.executor.drawing.periods import finish_seconds
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check
from stagewright.formulations.plans.actions import B, F
from stagewright.formulations.plans.memory import in_flight_limit
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Schedule, Stage
from stagewright.formulations.plans.timing import durations
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost


def hand_made(samples: int = 4, layers: int = 1, **more: object) -> PipelineProblem:
    """Layers of 1 + 2 s, 1 GB of parameters each, on four devices with links of 1 GB/s."""
    cost = LayerCost(samples, 1.0, 1e6, 1e9, 2.0)
    layer = Layer("l", 1e9, (cost,))
    for name, value in more.items():
        if name == "update_seconds":
            layer = replace(layer, costs=(replace(cost, update_seconds=value),))
        else:
            layer = replace(layer, **{name: value})
    chain = Chain(
        "hand", "test", samples, tuple(replace(layer, name=f"l{i}") for i in range(layers))
    )
    return PipelineProblem(chain, uniform_servers(1, 4, Link(1e9), memory_bytes=1e12), 2)


NAMES = ("s0g0", "s0g1", "s0g2", "s0g3")


def moved(plan: PipelinePlan, action: str, seconds: float) -> PipelinePlan:
    entries = tuple(
        replace(
            e, start_seconds=e.start_seconds + seconds, finish_seconds=e.finish_seconds + seconds
        )
        if e.action == action
        else e
        for e in plan.actions
    )
    return replace(plan, schedule=Schedule(entries))


def test_four_samples_on_three_devices_take_two_samples_time() -> None:
    problem = hand_made()
    assert problem.compute_seconds(0, 1, (0, 1, 2)) == (0.5, 1.0)
    assert problem.compute_seconds(0, 1, (0, 1)) == (0.5, 1.0)
    assert problem.saved_bytes(0, 1, 3) == 0.5e6


def test_a_piece_of_a_transfer_has_whole_samples() -> None:
    """Three senders, three receivers, four samples: one sample is the largest piece of nine."""
    there, back = hand_made(layers=2).transfer_seconds(1, (0, 1, 2), (1, 2, 3))
    assert there == back == 0.25


def test_messages_take_time_of_computations_on_both_sides() -> None:
    """F and B of 2 + 1 + 1 stages of 1 + 2 s, of which the last two are on one device."""
    problem = hand_made(layers=3)
    problem = replace(problem, cluster=replace(problem.cluster, message_seconds=0.25))
    stages = [Stage((0, 1), NAMES[:2]), *(Stage((i, i + 1), NAMES[2:3]) for i in (1, 2))]
    lasting = durations(problem, stages)
    # Each of two devices with one other; that one with both, and nothing with itself.
    assert lasting[F][:, 0].tolist() == [0.5 + 0.25, 1 + 2 * 0.25, 1]
    assert lasting[B][:, 0].tolist() == [1 + 0.25, 2 + 2 * 0.25, 2]
    # Each of the two devices sends its half of the microbatch.
    half = problem.boundary_bytes(1) / 2
    cluster = replace(problem.cluster, message_bytes_per_second=half / 0.125)
    lasting = durations(replace(problem, cluster=cluster), stages)
    assert lasting[F][:, 0].tolist() == [0.5 + 0.375, 1 + 2 * 0.375, 1]
    assert lasting[B][:, 0].tolist() == [1 + 0.375, 2 + 2 * 0.375, 2]


def test_a_plan_says_what_its_messages_cost_and_how_fast_the_machine_was() -> None:
    problem = small_problem(layers=4, devices=2, microbatches=2)
    cluster = replace(problem.cluster, message_seconds=1.0, message_bytes_per_second=1e6)
    chain = replace(problem.chain, reference_seconds=1.0)
    problem = replace(problem, chain=chain, cluster=cluster)
    plan = valid_plan(problem, make_stages((2, 4), (1, 1), ("split", "split")))
    assert check(problem, plan) == ()
    assert simulate(problem, plan).iteration_seconds == pytest.approx(finish_seconds(plan))
    for name in ("message_seconds", "message_bytes_per_second", "reference_seconds"):
        for forged in (None, 2.0):
            rules = [one.rule for one in check(problem, replace(plan, **{name: forged}))]
            assert rules == [name]


def test_more_devices_than_samples_break_a_rule() -> None:
    plan = valid_plan(small_problem(1, 6, 2), make_stages((1,), (3,), ("split",)))
    problem = hand_made(samples=2)
    stage = Stage((0, 1), NAMES[:3])
    found = check(problem, replace(plan, digest=problem.digest, stages=(stage,), layers=None))
    assert [(v.rule, v.place) for v in found] == [("samples", "stage 0")]
    assert "2 samples among 3 devices, at most 2 are possible" in found[0].message


def test_a_layer_that_needs_two_samples_is_split_among_half_as_many() -> None:
    problem = hand_made(min_samples=2)
    assert problem.most_replicas(0, 1) == 2
    assert in_flight_limit(problem, 0, 1, (0, 1)) == 2
    assert in_flight_limit(problem, 0, 1, (0, 1, 2)) == 0
    with pytest.raises(InputError, match="needs at least 5 samples, the planned microbatch has 4"):
        hand_made(min_samples=5)


@pytest.mark.parametrize("planner", ["spp", "dp", "pipedream", "gpipe", "exact", "auto"])
def test_planners_split_no_sample(planner: str) -> None:
    """One sample a microbatch, four devices, two layers."""
    problem = hand_made(samples=1, layers=2)
    found = stagewright.plan(problem.chain, problem.cluster, 2, planner, 2.0)
    assert found.plan is not None
    assert all(
        stage.replication == "round-robin" or len(stage.devices) == 1 for stage in found.plan.stages
    )


def test_all_reduces_of_one_device_take_turns() -> None:
    """Two stages on the same two devices, each with an all-reduce of 1 s."""
    problem = hand_made(layers=2)
    stages = [Stage((0, 1), NAMES[:2]), Stage((1, 2), NAMES[:2])]
    plan = valid_plan(problem, stages)
    assert check(problem, plan) == ()
    # Stage 1 ends its backwards at 5 s at the latest, stage 0 at 6 s; then 1 s each, in turn.
    assert simulate(problem, plan).iteration_seconds == pytest.approx(7)
    first = next(e for e in plan.actions if e.action == "1REDUCE_GRAD")
    second = next(e for e in plan.actions if e.action == "0REDUCE_GRAD")
    together = moved(plan, "1REDUCE_GRAD", second.start_seconds - first.start_seconds)
    found = check(problem, together)
    assert [(v.rule, v.place) for v in found] == [("overlap", "all-reduces on device s0g0")]


def test_all_reduces_that_share_one_device_take_turns_in_the_simulation() -> None:
    problem = hand_made(layers=2)
    stages = [Stage((0, 1), NAMES[:2]), Stage((1, 2), NAMES[1:3])]
    plan = valid_plan(problem, stages)
    ends = {e.action: e for e in simulate(problem, plan).actions if e.action.endswith("GRAD")}
    one, other = sorted(ends.values(), key=lambda e: e.start_seconds)
    assert other.start_seconds >= one.finish_seconds


@pytest.mark.parametrize("devices", [1, 2])
def test_the_optimizers_step_follows_the_all_reduce(devices: int) -> None:
    problem = hand_made(update_seconds=0.75)
    plan = valid_plan(problem, [Stage((0, 1), NAMES[:devices])])
    assert check(problem, plan) == ()
    reduction = 1.0 if devices == 2 else 0.0
    expected = 2 * 3 / devices + reduction + 0.75
    assert simulate(problem, plan).iteration_seconds == pytest.approx(expected)
    assert sum(e.action == "0UPDATE" for e in plan.actions) == devices
    early = [(v.rule, v.place) for v in check(problem, moved(plan, "0UPDATE", -0.5))]
    assert ("dependency", "0UPDATE") in early
    without = tuple(e for e in plan.actions if e.action != "0UPDATE")
    found = check(problem, replace(plan, schedule=Schedule(without)))
    assert {v.rule for v in found} == {"missing"}


def test_a_step_that_takes_no_time_is_no_action() -> None:
    timed = valid_plan(hand_made(update_seconds=0.75), [Stage((0, 1), NAMES[:1])])
    problem = hand_made()
    found = check(problem, replace(timed, digest=problem.digest))
    assert {(v.rule, v.place) for v in found} == {("unexpected", "0UPDATE on s0g0")}


def test_with_stashing_the_step_is_part_of_the_backward() -> None:
    problem = hand_made(update_seconds=0.75)
    plan = valid_plan(problem, [Stage((0, 1), NAMES[:1])], weights="stash")
    assert check(problem, plan) == ()
    assert simulate(problem, plan).iteration_seconds == pytest.approx(2 * (3 + 0.75))


@pytest.mark.parametrize("planner", ["spp", "dp", "pipedream", "gpipe", "exact", "auto"])
def test_planners_plan_the_step(planner: str) -> None:
    problem = hand_made(layers=2, update_seconds=0.75)
    found = stagewright.plan(problem.chain, problem.cluster, 2, planner, 2.0)
    assert found.plan is not None
    updates = {e.action for e in found.plan.actions if e.action.endswith("UPDATE")}
    assert len(updates) == len(found.plan.stages)
    if planner == "auto":
        return  # what it finds in two seconds depends on the machine
    faster = hand_made(layers=2)
    without = stagewright.plan(faster.chain, faster.cluster, 2, planner, 2.0)
    assert found.cost >= without.cost + 0.75 - 1e-9


def test_memory_at_the_edge_is_an_answer() -> None:
    """A microbatch passes 1 GB between the layers, which no plan on one device ever buffers."""
    cost = LayerCost(4, 1.0, 1e3, 1e9, 2.0)
    chain = Chain("edge", "test", 4, (Layer("a", 1e6, (cost,)), Layer("b", 1e6, (cost,))))
    cluster = uniform_servers(1, 1, Link(1e9), memory_bytes=2e7)
    found = stagewright.plan(chain, cluster, 2, "auto", 5.0)
    assert found.plan is not None
    tight = stagewright.plan(chain, cluster, 2, "auto", 5.0, memory_limit_bytes=1e6)
    assert (tight.status.value, tight.plan) == ("infeasible", None)
