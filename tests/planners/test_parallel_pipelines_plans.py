"""PipeDream-2BW's and PipeDream-Flush's plans: the best of all configurations, one by one."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from strategies import random_chain

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.patterns.parallel_pipelines import Configuration, Line
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.parallel_pipelines import RULES, PlannedPipelines
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan

SIZES = (8, 4, 2, 1)
LIMITS = Limits(60.0)


def configurations(devices, layers, batch):
    for width in range(1, devices + 1):
        for depth in range(1, min(devices // width, layers) + 1):
            for size in range(1, batch + 1):
                count, rest = divmod(batch, width * size)
                if rest == 0 and depth <= count and width * size in SIZES:
                    for recompute in ("none", "full"):
                        yield Configuration(width, depth, size, count, recompute)


def slowest(chain, cuts, one):
    """The longest stage between the cuts, in seconds of a replica's share."""
    again = 2 if one.recompute == "full" else 1
    total = []
    for start, stop in pairwise(cuts):
        total.append(0.0)
        for layer in chain.layers[start:stop]:
            cost = next(cost for cost in layer.costs if cost.microbatch_size == one.microbatch_size)
            total[-1] += again * cost.forward_seconds + cost.total_backward_seconds
    return max(total)


@pytest.mark.parametrize("planner", ["2bw", "2bw-flush"])
@given(st.data())
@examples(60)
def test_the_plan_is_the_best_of_every_configuration(planner, data):
    chain = data.draw(random_chain(4, sizes=SIZES))
    servers, size = data.draw(st.sampled_from([(1, 2), (1, 3), (2, 2)]))
    memory = data.draw(st.sampled_from([0.3e9, 0.6e9, 4e9]))
    links = Link(4e9), Link(data.draw(st.sampled_from([0.5e9, 4e9])))
    cluster = uniform_servers(servers, size, *links, memory_bytes=memory)
    batch = data.draw(st.sampled_from([4, 8, 16]))
    problem = PipelineProblem(chain, cluster, 1)
    costs = PlannedPipelines(
        {
            samples: replace(problem, microbatches=batch // samples, microbatch_size=samples)
            for samples in SIZES
            if batch % samples == 0
        },
        RULES[planner],
    )
    best, count = math.inf, 0
    for one in configurations(len(cluster), len(chain), batch):
        count += 1
        seconds = costs.seconds(one)
        line = Line(one.width, one.microbatch_size, one.microbatches, one.recompute, one.depth)
        assert costs.floors(line)[-1] <= seconds * (1 + 1e-9)
        stages = costs.stages(one)
        assert all(len(stage.devices) == one.width for stage in stages)
        cuts = [stage.layers[0] for stage in stages] + [len(chain)]
        inner = combinations(range(1, len(chain)), one.depth - 1)
        balanced = min(slowest(chain, [0, *cut, len(chain)], one) for cut in inner)
        assert slowest(chain, cuts, one) == pytest.approx(balanced)
        best = min(best, seconds)
    choices = Choices(recompute="auto", batch=batch)
    found = plan(problem, planner, LIMITS, choices=choices)
    if best == math.inf:
        assert found.status is Status.INFEASIBLE
        assert f"none of {count} configurations" in found.reason
        return
    assert found.cost == pytest.approx(best)
    assert found.plan.microbatches * found.plan.microbatch_size == batch
    asked = replace(
        problem, microbatches=found.plan.microbatches, microbatch_size=found.plan.microbatch_size
    )
    assert not check(asked, found.plan)
    assert f"of {count} configurations" in found.reason


def test_replicas_are_on_one_server():
    chain = uniform_chain(6)
    cluster = uniform_servers(3, 4, Link(1e11), Link(1e8), memory_bytes=1e12)
    found = plan(PipelineProblem(chain, cluster, 8), "2bw", LIMITS, choices=Choices(group_size=4))
    server = {d.name: d.name.partition("g")[0] for d in cluster.devices}
    assert len(found.plan.stages) > 1
    for stage in found.plan.stages:
        assert len({server[name] for name in stage.devices}) == 1


def uniform_chain(layers):
    costs = tuple(LayerCost(n, 1e-3 * n, 1e5 * n, 1e5 * n, 2e-3 * n) for n in SIZES)
    return Chain("even", "test", 8, tuple(Layer(f"l{i}", 1e6, costs) for i in range(layers)), 0.0)


def test_a_batch_that_no_microbatch_divides():
    problem = PipelineProblem(uniform_chain(2), uniform_servers(1, 2, Link(1e9)), 1)
    with pytest.raises(InputError, match="the batch must be at least 1 sample, got 0"):
        plan(problem, "2bw", LIMITS, choices=Choices(batch=0))
    with pytest.raises(InputError, match="'spp' does not support a batch: use 2bw"):
        plan(problem, "spp", LIMITS, choices=Choices(batch=8))
