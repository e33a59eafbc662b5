"""Bounds over every plan, against the best plan of the whole language by brute force."""

import json
import random
from math import inf

import pytest
from hypothesis import given
from language_instances import random_instance
from language_oracle import Language, best
from profiles import examples, slow_after
from strategies import hard_problem

from stagewright.formulations.pipelines.bounds.every_plan import (
    LeastTimes,
    layer_bound,
    layer_path_bound,
    why_nothing_fits,
)
from stagewright.formulations.pipelines.bounds.memory_of_plans import MEMORY_LOAD, MEMORY_PATH
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import (
    DISJOINT_SPLIT,
    DISJOINT_WHOLE,
    EVERY_FINITE,
    EVERY_PLAN,
    SHARED_SPLIT,
    SHARED_WHOLE,
    WHOLE_FINITE,
)
from stagewright.graphs.documents.documents import parse
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.pipelines.every_plan import every_plan_bounds
from stagewright.solvers.pipelines.relaxation import fill_and_drain_bound
from stagewright.solvers.pipelines.servers.relaxation import is_server_bound, server_bound

SLACK = 1 + 1e-9
FROM_MEMORY = (MEMORY_LOAD, MEMORY_PATH)
SHORT_OF_MEMORY = (8, 53, 61, 124, 24, 92, 112, 134, 156, 244)  # with one of these bounds
NONE = frozenset({"none"})
LANGUAGES = {
    EVERY_PLAN: Language(),
    EVERY_FINITE: Language(),
    WHOLE_FINITE: Language(split_backward=False),
    DISJOINT_WHOLE: Language(False, split_backward=False),
    DISJOINT_SPLIT: Language(False, frozenset({"split"}), False, NONE, False),
    SHARED_SPLIT: Language(replications=frozenset({"split"}), groups=True),
    SHARED_WHOLE: Language(replications=frozenset({"split"}), split_backward=False, groups=True),
}
RELAXED = (DISJOINT_SPLIT, DISJOINT_WHOLE, SHARED_WHOLE, SHARED_SPLIT)


def read(seed):
    model, cluster, microbatches = random_instance(seed)
    chain = parse(Chain, json.dumps(model), "model")
    machines = parse(Cluster, json.dumps(cluster), "cluster")
    return (model, cluster, microbatches), PipelineProblem(chain, machines, microbatches)


@pytest.mark.parametrize("seed", slow_after(9, range(40)))
def test_no_plan_undercuts_a_bound_on_its_class(seed):
    documents, problem = read(seed)
    optimum = {}
    for plans, language in LANGUAGES.items():
        found = best(*documents, language)
        optimum[plans] = inf if found is None else found[0]
    if why_nothing_fits(problem) is not None:
        assert optimum[EVERY_FINITE] == inf
        return
    for bound in every_plan_bounds(problem):
        assert bound.seconds <= optimum[bound.plans] * SLACK, bound
    for plans in (DISJOINT_SPLIT, DISJOINT_WHOLE):
        if optimum[plans] < inf:
            bound = fill_and_drain_bound(problem, 1.0, wide=plans == DISJOINT_WHOLE)
            assert bound <= optimum[plans] * SLACK
    for plans in RELAXED:
        if optimum[plans] < inf:
            assert server_bound(problem, inf, inf, plans) <= optimum[plans] * SLACK
            assert not is_server_bound(problem, optimum[plans] * (1 + 1e-6), plans)


@pytest.mark.parametrize("seed", slow_after(4, SHORT_OF_MEMORY))
def test_no_plan_undercuts_the_bounds_from_memory(seed):
    (model, cluster, microbatches), _ = read(seed)
    draw = random.Random(seed)
    for layer in model["layers"]:
        layer["parameter_bytes"] *= 10
        for entry in layer["costs"]:
            entry["saved_bytes"] *= 10
    copies = 2 + model["optimizer_bytes_per_parameter_byte"]
    states = copies * sum(layer["parameter_bytes"] for layer in model["layers"])
    saved = sum(layer["costs"][0]["saved_bytes"] for layer in model["layers"])
    for device in cluster["devices"]:
        device["memory_bytes"] = float(int(states * draw.uniform(0.5, 1)) + int(saved / 2))
    chain = parse(Chain, json.dumps(model), "model")
    problem = PipelineProblem(chain, parse(Cluster, json.dumps(cluster), "c"), microbatches)
    assert why_nothing_fits(problem) is None
    bounds = [one for one in every_plan_bounds(problem) if one.proved_by in FROM_MEMORY]
    assert bounds
    found = best(model, cluster, microbatches, Language(offload=bounds[0].plans.offload))
    for bound in bounds:
        assert bound.seconds <= (inf if found is None else found[0]) * SLACK, bound


@examples(100)
@given(hard_problem(4, 9, 3))
def test_more_devices_than_worthwhile_give_no_other_bound(problem):
    def bounds():
        return (
            layer_bound(problem), layer_path_bound(problem, True), layer_path_bound(problem, False)
        )  # fmt: skip

    quick = bounds()
    with pytest.MonkeyPatch.context() as patch:
        every = range(1, len(problem.cluster) + 1)
        patch.setattr(LeastTimes, "worthwhile", every)
        assert bounds() == quick
