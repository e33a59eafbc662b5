"""One price of one collective, whoever asks."""

import pytest

from stagewright.formulations.parallelism.profiles.cluster import Route
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.prices.collectives import all_reduce_seconds
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.machines.fabric import Fabric, Level
from stagewright.graphs.machines.groups import links
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

RATE, LATENCY, BYTES = 12.5e9, 20e-6, 100e6


@pytest.mark.parametrize("k", [2, 8, 64, 256, 1024])
def test_an_all_reduce_costs_a_plan_a_layout_and_a_profiled_layout_the_same(k: int) -> None:
    layer = Layer("a", BYTES, (LayerCost(k, 1.0, 1e6, 1e6, backward_seconds=1.0),))
    link = Link(RATE, LATENCY)
    problem = PipelineProblem(Chain("c", "x", k, (layer,)), uniform_servers(k, 1, link, link), 1)
    group = links(Fabric("x", 1e9, (Level("network", k, RATE, LATENCY),)), ((1, k),))
    expected = 2 * (k - 1) * (BYTES / k / RATE + LATENCY)
    assert [
        problem.reduce_seconds(0, 1, range(k)),
        all_reduce_seconds(group, BYTES),
        Route(RATE, RATE, LATENCY).reduce_seconds(BYTES, k),
    ] == pytest.approx([expected] * 3, rel=1e-12)
