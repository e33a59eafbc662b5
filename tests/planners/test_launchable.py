"""Plans for a framework alone: it runs them as they are, and the bound is below all of them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import small_problem
from profiles import examples

from stagewright.executor.export import export
from stagewright.executor.export.options import FormatOptions
from stagewright.executor.export.runtimes import RUNTIMES, runtime_of
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.pipelines.bounds.relaxation import FILL_AND_DRAIN, WIDE_FILL_AND_DRAIN
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.plan_class import class_of
from stagewright.formulations.schedules.published.one_f_one_b import one_f_one_b
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain, Layer
from stagewright.service.pipelines.launching import plan_for
from stagewright.solvers.pipelines.relaxation import fill_and_drain_bound
from stagewright.solvers.planners.launchable import plans_of
from stagewright.solvers.planners.order import StagedOrder, fitting, timed
from stagewright.solvers.planners.steps.proposal import Choices, Proposal, cost_of
from stagewright.solvers.planning import plan
from stagewright.solvers.proofs import prove

NAMES = ("embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head")


def named(problem: PipelineProblem) -> PipelineProblem:
    """The problem with layers that the frameworks know."""
    layers: list[Layer] = []
    for name, layer in zip(NAMES, problem.chain.layers, strict=True):
        layers.append(replace(layer, name=name))
    return replace(problem, chain=replace(problem.chain, layers=tuple(layers)))


def planned(problem: PipelineProblem, to: str, seconds: float = 5.0):
    choices = Choices(runtime=runtime_of(to, problem.chain))
    return plan(problem, "auto", Limits(seconds), choices=choices)


@pytest.mark.parametrize("to", RUNTIMES)
def test_the_framework_runs_the_plan_as_it_is(to: str) -> None:
    problem = named(small_problem(devices=4, parts=True))
    found = planned(problem, to)
    assert found.plan is not None
    assert check(problem, found.plan) == ()
    assert export(found.plan, to, FormatOptions(model=None if to == "torch-csv" else problem.chain))
    assert found.planner == "launchable"
    assert plans_of(problem, runtime_of(to, problem.chain)).contains(class_of(found.plan))


def pipelines(problem: PipelineProblem) -> Iterator[tuple[int, tuple[Stage, ...]]]:
    """Every number of replicas and all stages on equal groups of any devices."""
    size, layers = len(problem.cluster), len(problem.chain)
    names = [device.name for device in problem.cluster.devices]
    for r, ranks in product(range(1, size + 1), repeat=2):
        if problem.chain.microbatch_size % r or r * ranks > size:
            continue
        for order, inner in product(
            permutations(names, r * ranks), combinations(range(1, layers), ranks - 1)
        ):
            groups = [order[i * r : (i + 1) * r] for i in range(ranks)]
            cuts = pairwise((0, *inner, layers))
            yield r, tuple(Stage(cut, group) for cut, group in zip(cuts, groups, strict=True))


def straight_plans(problem: PipelineProblem) -> Iterator[tuple[int, float]]:
    """The costs of all 1F1B pipelines of equal groups of any devices that fit; brute force."""
    modes = ("none", "full", "layer")  # of DeepSpeed, in all stages alike
    for (r, plain), mode in product(pipelines(problem), modes):
        stages = tuple(replace(one, recompute=mode) for one in plain)
        order = one_f_one_b(len(stages), problem.microbatches)
        made = timed(problem, "1f1b", StagedOrder(order, stages))
        if isinstance(made, Proposal):
            made = fitting(problem, "1f1b", made)
        if isinstance(made, Proposal):
            yield r, cost_of(problem, made)


@examples(60, quick=3)
@given(st.integers(2, 4), st.integers(2, 3), st.integers(1, 3), st.sampled_from([16e9, 2e9, 1e9]))
def test_bounds_are_below_every_plan_of_equal_groups(layers, devices, microbatches, memory) -> None:
    problem = small_problem(layers, devices, microbatches, memory)
    every = list(straight_plans(problem))
    best = min((cost for _, cost in every), default=float("inf"))
    for r in {r for r, _ in every}:
        least = min(cost for size, cost in every if size == r)
        assert fill_and_drain_bound(problem, 1e3, True, sizes=(r,)) <= least * (1 + 1e-9)
    found = planned(problem, "deepspeed", 2.0)
    if found.plan is None:
        assert not every
        return
    assert found.cost >= best * (1 - 1e-9)
    assert found.bound <= best * (1 + 1e-9)


def test_equal_groups_make_the_relaxation_no_weaker() -> None:
    problem = small_problem()
    whole = fill_and_drain_bound(problem, 1e3)
    each = [fill_and_drain_bound(problem, 1e3, sizes=(r,)) for r in (1, 2, 3)]
    assert all(whole <= one * (1 + 1e-9) for one in each)
    assert max(each) > whole * (1 + 1e-3)  # the restriction is seen
    assert fill_and_drain_bound(problem, 1e3, sizes=(1, 2, 3)) == pytest.approx(min(each), rel=2e-3)


def test_the_bound_of_equal_groups_is_proved_again() -> None:
    problem = small_problem()
    found = planned(problem, "deepspeed")
    verdicts = prove(problem, found.plan, Limits(20.0))
    assert {one.verdict for one in verdicts} <= {"verified"}
    bounds = found.plan.certificate.bounds
    equal = [i for i, one in enumerate(bounds) if one.plans.equal_groups == (1, 2, 3, 6)]
    assert {bounds[i].proved_by for i in equal} == {FILL_AND_DRAIN, WIDE_FILL_AND_DRAIN}
    # A claim above what the relaxation gives is refuted.
    for i in equal:
        assert bounds[i].seconds < 0.98 * found.cost
        forged = [replace(one, seconds=0.99 * found.cost) if k == i else one
                  for k, one in enumerate(bounds)]  # fmt: skip
        certificate = replace(found.plan.certificate, bounds=tuple(forged))
        judged = prove(problem, replace(found.plan, certificate=certificate), Limits(20.0))
        assert judged[i].verdict == "refuted"


def test_what_the_restriction_costs_is_said() -> None:
    problem = named(small_problem())
    found = plan_for("nemo", problem, "auto", Limits(1.0), silent, Choices())
    known = found.restriction
    assert known is not None
    assert known.name == "NeMo AutoModel"
    assert known.plans.equal_groups == (1,)
    assert known.bound <= found.cost
    assert known.free_cost <= found.cost * (1 + 1e-9)
    assert found.gap >= 0


def test_what_no_framework_knows_is_refused() -> None:
    problem = small_problem()
    with pytest.raises(InputError, match=r"torchtitan has an embedding .* neither end can be"):
        planned(problem, "torchtitan")
    with pytest.raises(InputError, match=r"no framework of that name .* torch-csv, torchtitan"):
        planned(problem, "jax")
    with pytest.raises(InputError, match="'dp' does not support plans for torch alone: use launch"):
        plan(problem, "dp", choices=Choices(runtime=runtime_of("torch-csv", problem.chain)))


def test_modules_are_not_cut() -> None:
    """Megatron-LM has one output layer, with the norm before it."""
    layers = [Layer(name, 8.0, one.costs) for name, one in zip(
        ("embedding", "layers.0", "layers.1", "norm", "head", "loss"),
        small_problem().chain.layers, strict=True,
    )]  # fmt: skip
    chain = Chain("m", "test", 6, tuple(layers))
    assert runtime_of("megatron", chain).cuts == (1, 2, 3)
    assert runtime_of("torchtitan", chain).cuts == (1, 2, 3, 4)
    assert runtime_of("torch-csv", chain).cuts == (1, 2, 3, 4, 5)
