"""Plans whose replicas divide their state, against plain arithmetic."""

from dataclasses import replace
from itertools import pairwise, permutations
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from shard_oracle import WHOLE, ShardOracle

from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check
from stagewright.formulations.plans.actions import Action, parse_action
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import SHARDS
from stagewright.formulations.plans.timing import empty_blocks
from stagewright.graphs.machines.cluster import Device, from_matrix
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

NAMES = [f"d{i}" for i in range(6)]
NUMBERS = st.integers(1, 9)
BYTES = st.sampled_from([0.0, 4.0, 100.0, 4_000_004.0, 5_000_000.0, 12_345_678.0])
Times = dict[Action, tuple[float, float]]


@st.composite
def chains(draw: st.DrawFn, layers: int) -> Chain:
    """Layers of odd sizes, some without weights, on two kinds of device, at degrees 1 and 2."""

    def cost(kind: str, output: float, steps: bool, shard: float | None) -> LayerCost:
        return LayerCost(
            6, draw(NUMBERS), draw(NUMBERS) * 1e6, output,
            input_gradient_seconds=draw(NUMBERS), weight_gradient_seconds=draw(NUMBERS),
            update_seconds=draw(NUMBERS) / 4 if steps else None, device_kind=kind,
            tensor=None if shard is None else 2, shard_parameter_bytes=shard,
        )  # fmt: skip

    def layer(i: int) -> Layer:
        output, steps, whole = draw(NUMBERS) * 1e6, draw(st.booleans()), draw(BYTES)
        costs = [cost(k, output, steps, shard) for k in "vw" for shard in (None, whole * 0.75)]
        return Layer(f"l{i}", whole, tuple(costs))

    state = draw(st.sampled_from([0.0, 1.0, 2.0]))
    found = tuple(layer(i) for i in range(layers))
    return Chain("random", "test", 6, found, optimizer_bytes_per_parameter_byte=state)


@st.composite
def stages(draw: st.DrawFn, layers: tuple[int, int]) -> Stage:
    """One to three replicas of one or two devices, which other stages may use too."""
    t = draw(st.sampled_from([1, 2]))
    order = draw(st.sampled_from(list(permutations([(0, 1), (2, 3), (4, 5)]))))
    devices = [f"d{v}" for pair in order for v in pair]
    count = draw(st.integers(1, 3))
    shards = draw(st.sampled_from(SHARDS)) if count > 1 else "none"
    ways = ["split"] if shards in WHOLE else ["split", "round-robin"]
    return Stage(
        layers, tuple(devices[: count * t]), draw(st.sampled_from(ways)),
        draw(st.sampled_from(["none", "full", "layer"])), tensor=t, shards=shards,
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> tuple[PipelineProblem, ShardOracle, Times, PipelinePlan]:
    """A problem, its oracle, the times of a plan, and the plan."""
    layers = draw(st.integers(1, 4))
    chain = draw(chains(layers))
    # By a seed, as Hypothesis' own draws are mostly equal.
    mixed = Random(draw(st.integers(0, 10**6)))
    width = {(a, b): mixed.randint(5, 9) * 1e6 for a in NAMES for b in NAMES if a < b}
    rows = [[width.get((min(a, b), max(a, b))) for b in NAMES] for a in NAMES]
    late = draw(st.sampled_from([0.0, 0.125]))
    cluster = from_matrix([Device(n, "vvvvww"[i], 1e12) for i, n in enumerate(NAMES)], rows, late)
    cluster = replace(cluster, all_reduce_share=draw(st.sampled_from([None, 0.5])))
    links = {(a, b): (width[min(a, b), max(a, b)], late) for a in NAMES for b in NAMES if a != b}
    problem = PipelineProblem(chain, cluster, draw(st.integers(1, 3)))
    inner = draw(st.sets(st.integers(1, layers - 1), max_size=2)) if layers > 1 else set()
    found = [draw(stages(span)) for span in pairwise([0, *sorted(inner), layers])]
    split = [draw(st.booleans()) for _ in found]
    oracle = ShardOracle(problem, found, links, split)
    times = oracle.schedule(lambda waiting: draw(st.sampled_from(waiting)))
    starts = empty_blocks(len(found), problem.microbatches)
    for action, (start, _) in times.items():
        place: Any = (
            action.stage if action.microbatch is None else (action.stage, action.microbatch)
        )
        starts[action.kind][place] = start
    return problem, oracle, times, assemble(problem, "test", found, starts)


@examples(500)
@given(cases())
def test_times_and_memory(case: Any) -> None:
    """Every action, the iteration, the simulation, and the peak of every device."""
    problem, oracle, times, plan = case
    assert check(problem, plan) == ()
    found = {
        parse_action(one.action): (one.start_seconds, one.finish_seconds) for one in plan.actions
    }
    assert found.keys() == times.keys()
    for action, span in times.items():
        assert found[action] == pytest.approx(span), action
    assert plan.predicted is not None
    assert plan.predicted.link_bytes == pytest.approx(oracle.link_bytes())
    last = max(end for _, end in times.values())
    assert plan.predicted.iteration_seconds == pytest.approx(last)
    assert simulate(problem, plan).iteration_seconds == pytest.approx(last)
    for name in NAMES:
        assert plan.predicted.peak_memory_bytes.get(name, 0.0) == pytest.approx(
            oracle.peak(name, times), rel=1e-12
        )
