"""Plans for a framework: all small ones that it runs are compared, and the bound is below them."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from random import Random

import pytest
from exported_plans import random_rows
from hypothesis import assume, given
from hypothesis import strategies as st
from plans import small_problem
from profiles import examples
from strategies import random_problem

from stagewright.executor.export import export
from stagewright.executor.export.options import FormatOptions
from stagewright.executor.export.runtimes import RUNTIMES, runtime_of
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Status, silent
from stagewright.formulations.pipelines.bounds.relaxation import FILL_AND_DRAIN, WIDE_FILL_AND_DRAIN
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import class_of
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.planned import starts_to_the_end
from stagewright.formulations.schedules.published.one_f_one_b import gpipe, interleaved, one_f_one_b
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.chain import Chain, Layer
from stagewright.service.pipelines.launching import plan_for, why_not
from stagewright.solvers.pipelines.relaxation import fill_and_drain_bound
from stagewright.solvers.planners.launchable import plans_of
from stagewright.solvers.planners.order import StagedOrder, fitting, timed
from stagewright.solvers.planners.steps.proposal import Choices, Proposal, cost_of
from stagewright.solvers.planners.structures.arrangements import arrangements
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
    found = plan_for("nemo", problem, "auto", Limits(60.0, gap=0.9), silent, Choices())
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


def launched(problem: PipelineProblem, to: str, draw) -> Iterator[PipelinePlan]:
    """The valid plans that the export ``to`` writes, by ``draw`` (a Random) in one random order."""
    for stages, place in staged(problem, to):
        for order in orders(place, problem.microbatches, draw):
            try:
                starts = starts_to_the_end(problem, stages, order)
                plan = assemble(problem, "oracle", stages, starts)
                export(plan, to, FormatOptions(model=problem.chain))
            except InputError:
                continue
            if check(problem, plan) == ():
                yield plan


def staged(problem: PipelineProblem, to: str) -> Iterator[tuple[tuple[Stage, ...], tuple]]:
    """All stages on equal groups of devices, with the group of each."""
    layers, names = len(problem.chain), [one.name for one in problem.cluster.devices]
    modes = ("none", "full", "layer") if to == "deepspeed" else ("none",)
    for count, ranks in product(range(1, layers + 1), range(1, len(names) + 1)):
        sizes = range(1, len(names) // ranks + 1)
        inner = combinations(range(1, layers), count - 1)
        places = [one for one in product(range(ranks), repeat=count) if _in_order(one, ranks)]
        for cut, place, size, mode in product(inner, places, sizes, modes):
            for groups in disjoint(names, size, ranks):
                pairs = zip(pairwise((0, *cut, layers)), place, strict=True)
                yield tuple(Stage(one, groups[p], recompute=mode) for one, p in pairs), place


def _in_order(place: tuple[int, ...], ranks: int) -> bool:
    """Whether all ranks have stages, and the first ones ascend."""
    return list(dict.fromkeys(place)) == list(range(ranks))


def disjoint(names, size: int, count: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """``count`` groups of ``size`` devices."""
    if count == 0:
        yield ()
        return
    for group in combinations(names, size):
        rest = [one for one in names if one not in group]
        yield from ((group, *groups) for groups in disjoint(rest, size, count - 1))


def orders(place: tuple[int, ...], microbatches: int, draw) -> Iterator[Order]:
    """(Interleaved) 1F1B, GPipe and a random order, of those that exist."""
    ranks, stages = 1 + max(place), len(place)
    if place == tuple(s % ranks for s in range(stages)) and stages % ranks == 0:
        with suppress(InputError):  # not of all numbers
            yield interleaved(ranks, stages // ranks, microbatches)
    yield gpipe(place, microbatches)
    yield Order(tuple(map(tuple, random_rows(place, microbatches, draw.random(), split=False))))


def of_decoder(problem):
    """The problem with the layers of a decoder."""
    layers = problem.chain.layers
    blocks = (f"layers.{i}" for i in range(len(layers) - 2))
    names = ("embedding", *blocks, "head")
    renamed = tuple(replace(one, name=name) for one, name in zip(layers, names, strict=True))
    return replace(problem, chain=replace(problem.chain, layers=renamed))


def solved(problem, to, choices=None, compares=False):
    return plan_for(to, problem, "auto", Limits(1.0), silent, choices or Choices(), compares)


@examples(60, quick=3)
@given(
    random_problem(3, 3, 2, tight_memory=True, kinds=("a", "b")),
    st.sampled_from(RUNTIMES),
    st.randoms(use_true_random=False),
)
def test_no_plan_that_is_exported_refutes_a_claim(problem, to, draw) -> None:
    assume(len(problem.chain) >= 2)
    problem = of_decoder(problem)
    found = solved(problem, to)
    every = list(launched(problem, to, draw))
    best = min((one.predicted.iteration_seconds for one in every), default=float("inf"))
    assert all(found.restriction.plans.contains(class_of(one)) for one in every)
    if found.status is Status.INFEASIBLE:
        assert not every
    if found.plan is None:
        return
    assert found.restriction.bound <= min(best, found.cost) * (1 + 1e-9)
    if found.status is Status.OPTIMAL:
        assert found.cost <= best * (1 + 1e-6)


@examples(60, quick=3)
@given(random_problem(3, 3, 2, tight_memory=True, kinds=("a", "b")))
def test_a_pipeline_is_found_wherever_one_fits(problem) -> None:
    """Of 1F1B, which DeepSpeed runs, on whatever devices in whatever order."""
    assume(len(problem.chain) >= 2)
    problem = of_decoder(problem)
    fits = any(launched(problem, "deepspeed", Random(0)))
    found = solved(problem, "deepspeed")
    assert fits == (found.plan is not None)


def test_optimal_is_the_best_of_what_the_framework_runs() -> None:
    """Not the best of a smaller class: that of disjoint devices has fewer plans than torch's."""
    for to in ("torch-csv", "megatron"):
        found = solved(of_decoder(small_problem()), to, compares=True)
        assert (found.status is Status.OPTIMAL) == (found.restriction.gap <= 1e-6)


@pytest.mark.parametrize(
    ("to", "shards", "recompute"),
    [("megatron", "optimizer", None), ("deepspeed", "optimizer", "full"),
     ("torchtitan", "weights", None)],
)  # fmt: skip
def test_plans_with_shards_are_exported(to: str, shards, recompute) -> None:
    problem = of_decoder(small_problem())
    found = solved(problem, to, Choices(shards=shards, recompute=recompute))
    assert why_not(found.plan, to, problem.chain) is None


def test_what_the_framework_cannot_do_is_refused() -> None:
    problem = of_decoder(small_problem())
    for choices, message in (
        (Choices(recompute="full"), "recompute 'full': plans for torchtitan have none or auto"),
        (Choices(shards="optimizer"), "shards 'optimizer': plans for torchtitan have none or we"),
    ):
        with pytest.raises(InputError, match=message):
            solved(problem, "torchtitan", choices)


@pytest.mark.parametrize(("to", "devices"), [("torchtitan", 1), ("nemo", 1), ("nemo", 3)])
def test_too_few_devices_or_microbatches_are_a_proved_no(to: str, devices: int) -> None:
    found = solved(of_decoder(small_problem(devices=devices, microbatches=1)), to)
    assert found.status is Status.INFEASIBLE
    assert "its pipelines have at least 2 ranks" in found.reason


def test_copies_of_a_pipeline_have_equal_shares() -> None:
    """The average of their gradients is the mini-batch's only then."""
    problem = small_problem(devices=4)
    problem = replace(problem, chain=replace(problem.chain, microbatch_size=6))
    found = solved(problem, "torch-csv")
    assert 4 not in found.restriction.plans.equal_groups
    names = tuple(one.name for one in problem.cluster.devices)
    stages = (replace(found.plan.stages[0], layers=(0, len(problem.chain)), devices=names),)
    assert "6 samples cannot be split evenly among 4" in why_not(
        replace(found.plan, stages=stages), "torch-csv", problem.chain
    )


def test_arrangements_are_every_one_of_few_devices_that_differ() -> None:
    alike = small_problem(devices=4)
    first, *others = arrangements(alike, 2, 2)
    assert len({v for group in first for v in group}) == 4
    assert len(others) < 6  # devices or links are alike
    assert isinstance(alike.cluster, Cluster)
    memory = [replace(one, memory_bytes=one.memory_bytes + v)
              for v, one in enumerate(alike.cluster.devices)]  # fmt: skip
    uneven = replace(alike, cluster=replace(alike.cluster, devices=tuple(memory)))
    assert len(list(arrangements(uneven, 2, 2))) == 6
    assert len(list(arrangements(uneven, 1, 4))) == 24
