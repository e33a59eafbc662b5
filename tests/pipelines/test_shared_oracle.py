"""No plan of equal or disjoint groups is faster than the server bound on these plans.

The oracle knows nothing of the relaxation: it enumerates all structures of tiny instances and
schedules them by CP-SAT. Its plans are checked, so that a violation is one of the checker's rules.
"""

import json
import math
import random
from itertools import islice

import pytest
from group_instances import FAMILIES, documents_of, named_stages, random_problem
from language_oracle import Language, Search, best
from language_prices import Instance
from language_schedule import TICK, best_schedule, build_tasks, fits
from profiles import slow_after

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.pipelines.grouped_stages import is_grouped, relaxed_schedule
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import SHARED_SPLIT, SHARED_WHOLE, class_of
from stagewright.graphs.documents.documents import parse
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.servers.relaxation import is_server_bound, server_bound

SECONDS = 60.0
ROUNDING = 1e-9
NEAR = 1.03  # plans that take longer than that many times the bound are not searched for
SEEDS = [(name, seed) for seed in range(60) for name in FAMILIES]
LANGUAGES = {  # by whether backwards may be split
    split: Language(replications={"split"}, split_backward=split, groups=True)
    for split in (False, True)
}
FASTER_PARTS = ("slow", 106)  # whole backwards that take longer than both of their parts


def layered(times, microbatches, *, parts=False, parameters=0.0, output=0.0, devices=2, samples=1):
    """Layers of (F, B) or (F, I, W) seconds, with bytes of ``parameters`` and of ``output``.

    Links have 1 byte/us, so that a million bytes takes a second.
    """
    weights = parameters if isinstance(parameters, tuple) else (parameters,) * len(times)
    layers = []
    for i, (forward, *backward) in enumerate(times):
        names = ("input_gradient_seconds", "weight_gradient_seconds")
        way = dict(zip(names if parts else ("backward_seconds",), backward, strict=True))
        cost = LayerCost(samples, forward, 0.0, output, **way)
        layers.append(Layer(f"l{i}", weights[i], (cost,)))
    cluster = uniform_servers(1, devices, Link(1e6), memory_bytes=1e12)
    return PipelineProblem(Chain("m", "special", samples, tuple(layers)), cluster, microbatches)


SPECIAL = {
    "there and back": layered([(1.0, 1.0), (1.0, 1.0), (0.0, 1.0)], 2),
    "four equal on two": layered([(1.0, 2.0)] * 4, 2),
    "five equal on two": layered([(1.0, 2.0)] * 5, 3),
    "four equal on two, in parts": layered([(1.0, 1.0, 1.0)] * 4, 2, parts=True),
    "five equal on three": layered([(1.0, 1.0)] * 5, 2, devices=3),
    "embedding": layered(
        [(0.0, 0.0), (2.0, 4.0), (2.0, 4.0)], 2, parameters=(5e7, 1e6, 1e6), samples=2
    ),
    "reduces in turn": layered([(1.0, 2.0), (1.0, 2.0), (1.0, 2.0)], 2, parameters=2e6, samples=2),
    "reduces of the last layers": layered(
        [(4.0, 4.0), (1.0, 1.0), (1.0, 1.0)], 1, parameters=(0.0, 4e6, 4e6), samples=2
    ),
    "one long layer": layered([(0.1, 0.1), (10.0, 20.0), (0.1, 0.1), (0.1, 0.1)], 3),
    "sends as long as work": layered([(1.0, 1.0)] * 4, 2, output=1e6),
    "one microbatch": layered([(1.0, 2.0)] * 4, 1, output=5e5),
    "one microbatch in parts": layered([(1.0, 1.0, 3.0)] * 4, 1, parts=True),
}


def on_servers():
    """All-reduces between the two servers take long, but for those of the last layer."""
    times = ((1.0, 2.0), (2.0, 4.0), (2.0, 4.0), (1.0, 2.0), (0.0, 0.0))
    layers = tuple(
        Layer(
            f"l{i}",
            0.0 if f == 0 else 5e6,
            (LayerCost(1, f / 2, 0.0, 1e5, b / 2), LayerCost(2, f, 0.0, 2e5, b)),
        )
        for i, (f, b) in enumerate(times)
    )
    cluster = uniform_servers(2, 2, Link(1e7), Link(1e6), memory_bytes=1e12)
    return PipelineProblem(Chain("m", "special", 2, layers), cluster, 3)


def fastest_plan(problem, split, below=math.inf):
    """Seconds of the fastest plan that takes less than ``below``, and the plan; None for none."""
    found = best(*documents_of(problem), LANGUAGES[split], below=below)
    if found is None:
        return None
    plan = json.dumps(found[1] | {"digest": problem.digest})
    return found[0], parse(PipelinePlan, plan, "oracle")


def attack(problem, split):
    """Compare the bound with the fastest plan near it, if there is one."""
    plans = SHARED_SPLIT if split else SHARED_WHOLE
    bound = server_bound(problem, math.inf, SECONDS, plans)
    found = fastest_plan(problem, split, bound * NEAR)
    if found is None:
        return
    cost, plan = found
    assert not check(problem, plan)
    assert plans.contains(class_of(plan))
    assert bound <= cost * (1 + ROUNDING)
    assert not is_server_bound(problem, cost * (1 + 1e-6), plans)  # sharper than the bound
    assert server_bound(problem, cost, SECONDS, plans) <= cost * (1 + ROUNDING)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", SPECIAL)
def test_no_plan_of_a_special_case_is_faster(name, split):
    attack(SPECIAL[name], split)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("name", "seed"), slow_after(12, [FASTER_PARTS, *SEEDS]))
def test_no_plan_is_faster_than_the_bound(name, seed, split):
    attack(random_problem(name, seed), split)


def test_the_oracle_shares_devices_in_any_order():
    """The first device runs layer 2 between the microbatches' ways through layer 1."""
    seconds, plan = fastest_plan(SPECIAL["there and back"], False)
    assert not check(SPECIAL["there and back"], plan)
    assert seconds == pytest.approx(6)
    first, between, last = (stage.devices for stage in plan.stages)
    assert first == last != between


def test_the_bound_is_near_the_fastest_plan_on_servers():
    """One stage on all devices does not reduce all gradients in the time of the last layer's."""
    cost, _ = fastest_plan(on_servers(), False)
    assert 0.96 * cost < server_bound(on_servers(), math.inf, SECONDS, SHARED_WHOLE) <= cost


@pytest.mark.parametrize(
    ("name", "seed", "split"),
    slow_after(len(FAMILIES), [(*one, i % 2 == 0) for i, one in enumerate(SEEDS)]),
)
def test_no_schedule_of_the_stages_undercuts_a_bound(name, seed, split):
    """Recomputation, offloading, all-reduces in turn and both ways of a backward included."""
    problem, draw = random_problem(name, seed), random.Random(seed)
    instance = Instance(*documents_of(problem))
    search = Search(instance, LANGUAGES[split])
    found = list(islice(search.structures(), 300))
    for plain in draw.sample(found, min(3, len(found))):
        stages = tuple(draw.choice([one, *search.stage_variants(one)]) for one in plain)
        if not fits(instance, stages):
            continue
        ticks, _ = best_schedule(instance, stages, build_tasks(instance, stages, split), math.inf)
        cost = ticks * TICK * (1 + 1e-6)
        relaxed = relaxed_schedule(problem, named_stages(instance, stages), split)
        assert all(bound.seconds <= cost for bound in schedule_bounds(relaxed))
        assert solve_schedule(relaxed, "optimal", Limits(0.5)).bound <= cost


def test_stages_on_the_same_devices_in_another_order_are_no_group():
    one, two = Stage((0, 1), ("a", "b")), Stage((1, 2), ("b", "a"))
    assert not is_grouped((one, two))
    assert is_grouped((one, Stage((1, 2), ("a", "b"))))
    assert not is_grouped((one, Stage((1, 2), ("a",))))
