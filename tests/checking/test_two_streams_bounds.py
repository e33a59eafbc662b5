"""Bounds on plans with two streams, against every order of both streams of tiny problems."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from zlib import crc32

import numpy as np
import pytest
from profiles import by_profile, slow_after
from streams import (
    Shares,
    device_problem,
    every_order,
    plan_of_orders,
    random_order,
    two_stream_plan,
)

from stagewright.formulations.backprop.models import TWO_STREAMS, two_streams_bound
from stagewright.formulations.checking.check import check, require_valid
from stagewright.formulations.pipelines.bounds.every_plan import (
    LOAD,
    copies_bound,
    layer_bound,
    priced_load_bound,
)
from stagewright.formulations.plans.actions import Action, B, I, W
from stagewright.formulations.plans.assembly import certify
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import (
    EVERY_BACKWARD_FIRST,
    EVERY_PLAN,
    ONE_STREAM,
    class_of,
)
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.pipelines.every_plan import every_plan_bounds

ROUNDING = 1 + 1e-9


def joins(one: Action) -> Action:
    """The weight gradient that is a whole backward with this input gradient."""
    return replace(one, kind=W)


def random_problem(seed: int, count: int = 3, microbatches: int = 1) -> PipelineProblem:
    """Layers most of which leave a part of the device, some of unknown share.

    Whole backwards of some take less or more than both parts.
    """
    chance = random.Random(seed)
    times = [tuple(float(chance.randint(0, 5)) for _ in range(3)) for _ in range(count)]
    share = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, None)
    shares: list[Shares] = [tuple(chance.choices(share, k=3)) for _ in range(count)]
    updates = [chance.choice((0.0, 0.0, 1.0)) for _ in range(count)]
    problem = device_problem(times, shares, updates, microbatches)
    layers = tuple(
        replace(layer, costs=(replace(layer.costs[0], backward_seconds=whole),))
        for layer in problem.chain.layers
        for whole in (chance.choice((None, float(chance.randint(0, 11)))),)
    )
    return replace(problem, chain=replace(problem.chain, layers=layers))


def require_bounds(
    problem: PipelineProblem, bounds: Sequence[Bound], main: Sequence[Action], sub: Sequence[Action]
) -> bool:
    """No bound on a class of these orders' plan is above it; whether they make a plan.

    Nor of the plan in which a W right after its I is a whole backward with it.
    """
    joined = [
        replace(one, kind=B) if one.kind is I and after == joins(one) else one
        for before, one, after in zip([None, *main], main, [*main[1:], None], strict=False)
        if before is None or before.kind is not I or one != joins(before)
    ]
    if joined != list(main):
        require_bounds(problem, bounds, joined, sub)
    try:
        plan = plan_of_orders(problem, main, sub)
    except InvalidPlan:  # the streams wait for each other
        return False
    cost, plans = plan.predicted.iteration_seconds * ROUNDING, class_of(plan)
    assert plans.streams == (2 if sub else 1)
    for bound in bounds:
        assert bound.seconds <= cost or not bound.plans.contains(plans), (bound, main, sub)
    if crc32(repr(main).encode()) % 50 == 0:  # the same ones in every process
        assert check(problem, plan) == ()
    return True


@pytest.mark.parametrize("seed", slow_after(5, range(60)))
def test_no_order_of_both_streams_is_below_its_bounds(seed: int) -> None:
    problem = random_problem(seed, 1 + seed % 3)
    bounds = every_plan_bounds(problem)
    assert (TWO_STREAMS in {bound.proved_by for bound in bounds}) == problem.knows_shares
    orders = every_order(problem)
    if seed % 3 == 2:  # of three layers, in `make test` one order in twelve
        orders = islice(orders, 0, None, by_profile(12, 1))
    assert sum(require_bounds(problem, bounds, *order) for order in orders) > 1


@pytest.mark.parametrize("seed", slow_after(5, range(60)))
def test_random_orders_of_several_microbatches_are_not_below_them(seed: int) -> None:
    problem, chance = random_problem(seed, 2 + seed % 3, 2 + seed % 2), random.Random(seed)
    bounds = every_plan_bounds(problem)
    orders = (random_order(problem, chance) for _ in range(60))
    assert any([require_bounds(problem, bounds, *order) for order in orders])


def test_a_bound_on_one_stream_is_not_one_on_two() -> None:
    """Everything on half of the device: the load of one stream exceeds the plan's time."""
    problem = device_problem([(1.0, 1.0, 1.0)] * 3, [(0.5, 0.5, 0.5)] * 3)
    plan = two_stream_plan(problem, "2I0 1I0 0I0 0F0 1F0 2F0", "2W0 1W0 0W0")
    assert require_valid(problem, plan) == 7
    one = np.ones(1)
    assert priced_load_bound(problem, one, streams=1) == 9
    assert priced_load_bound(problem, one, streams=2) == 6  # the main stream alone
    assert two_streams_bound(problem) == 7  # and the first weight gradient
    load = Bound(6.0, LOAD, "problem", EVERY_PLAN, (1.0,))
    beside = Bound(7.0, TWO_STREAMS, "problem", EVERY_BACKWARD_FIRST)
    above = Bound(9.0, LOAD, "problem", ONE_STREAM, (1.0,))
    found = certify(problem, plan, [load, beside, above], ())
    assert (found.certificate.bound_seconds, found.certificate.gap) == (7, 0)
    assert found.certificate.every_bound_seconds == 6
    assert check(problem, found) == ()
    with pytest.raises(InvalidPlan, match="below 9"):
        certify(problem, plan, [replace(above, plans=EVERY_PLAN)], ())


def test_a_whole_backward_may_take_less_than_its_parts() -> None:
    problem = device_problem([(1.0, 2.0, 2.0)], [(1.0, 1.0, 0.1)])
    (layer,) = problem.chain.layers
    assert two_streams_bound(problem) == pytest.approx(5)  # I, then F with W alone
    cost = replace(layer.costs[0], backward_seconds=1.0)
    layers = (replace(layer, costs=(cost,)),)
    problem = replace(problem, chain=replace(problem.chain, layers=layers))
    assert two_streams_bound(problem) == pytest.approx(2)  # B, then F


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        (Bound(6.5, LOAD, "problem", EVERY_PLAN, (1.0,)), "the argument gives 6 s"),
        (Bound(6.5, TWO_STREAMS, "problem", EVERY_PLAN), "proved for every backward-first plan"),
        (Bound(6.5, "two streams", "problem", EVERY_BACKWARD_FIRST), "not known"),
    ],
)
def test_other_claims_are_refuted(bound: Bound, reason: str) -> None:
    problem = device_problem([(1.0, 1.0, 1.0)] * 3, [(0.5, 0.5, 0.5)] * 3)
    plan = two_stream_plan(problem, "2I0 1I0 0I0 0F0 1F0 2F0", "2W0 1W0 0W0")
    right = Bound(6.0, LOAD, "problem", EVERY_PLAN, (1.0,))
    (found,) = check(problem, certify(problem, plan, [right, bound], ()))
    assert found.rule == "proof"
    assert reason in found.message


def test_shares_only_lower_the_bounds_on_every_plan() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        assert layer_bound(problem, 2) <= layer_bound(problem, 1)
        assert copies_bound(problem, 2) <= copies_bound(problem, 1) * (1 + 2e-6)  # by bisection
        prices = np.ones(1)
        assert priced_load_bound(problem, prices, 2) <= priced_load_bound(problem, prices, 1)
        full = replace(problem, chain=_without_shares(problem))
        assert layer_bound(full, 2) == layer_bound(full, 1)
        assert {bound.plans.streams for bound in every_plan_bounds(full)} == {1, 2}
        assert ONE_STREAM not in {bound.plans for bound in every_plan_bounds(full)}


def _without_shares(problem: PipelineProblem):
    unknown = {"forward_share": None, "input_gradient_share": None, "weight_gradient_share": None}
    layers = tuple(
        replace(layer, costs=tuple(replace(cost, **unknown) for cost in layer.costs))
        for layer in problem.chain.layers
    )
    return replace(problem.chain, layers=layers)


def test_only_a_single_device_has_the_bound() -> None:
    problem = device_problem([(1.0, 1.0, 1.0)] * 2, [(0.5,) * 3] * 2, devices=2)
    assert two_streams_bound(problem) is None
    assert TWO_STREAMS not in {bound.proved_by for bound in every_plan_bounds(problem)}


def test_the_device_is_alone_with_its_first_gradient_and_the_last_forwards() -> None:
    """I and F on half of it: half of the second that each of these takes is lost."""
    problem = device_problem([(1.0, 1.0, 2.0)] * 2, [(0.5, 0.5, 1.0)] * 2)
    assert two_streams_bound(problem) == 2 * (0.5 + 0.5 + 2) + 0.5 + 0.5
    plan = two_stream_plan(problem, "1I0 0I0 0F0 1F0", "0W0 1W0")
    assert plan.predicted.iteration_seconds == 7.5
