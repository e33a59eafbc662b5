"""Bounds on the schedules of given stages between two losses, beside all orders."""

from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest
from profiles import slow_after

from stagewright.formulations.backprop.of_stages import (
    BETWEEN_LOSSES,
    SEARCHED_BETWEEN_LOSSES,
    stage_bounds,
)
from stagewright.formulations.backprop.orders import OutOfOrder
from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.checking.proofs import verdicts
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.actions import Action, B, F, I, W
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.schedules.backward_first import earliest_starts
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Device, from_matrix
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan

HOMES = {
    "one device": ((0,), (0,)),
    "a device for each": ((0,), (1,)),
    "there and back": ((0,), (1,), (0,)),
    "two on the first": ((0,), (0,), (1,)),
    "shared by both": ((0, 1), (0, 1)),
    "both, then one": ((0, 1), (1,)),
}


def drawn(draw: Random, stages: int, microbatches: int, whole: bool) -> PipelineProblem:
    """A layer per stage with small whole seconds, on links that differ by direction."""

    def cost() -> LayerCost:
        forward, of_input, of_weights = (float(draw.randint(0, 3)) for _ in range(3))
        output = draw.choice((0.0, 1e6, 4e6))
        if whole:
            return LayerCost(2, forward, 0.0, output, of_input + of_weights, update_seconds=1.0)
        whole_too = float(draw.randint(0, 5)) if draw.random() < 0.5 else None
        return LayerCost(2, forward, 0.0, output, whole_too, of_input, of_weights)

    layers = [Layer(f"l{i}", draw.choice((0.0, 3e6)), (cost(),)) for i in range(stages)]
    links = [[None, draw.choice((1e6, 2e6))], [1e6, None]]
    devices = [Device(f"d{i}", "gpu", 1e12) for i in range(2)]
    return PipelineProblem(
        Chain("drawn", "test", 2, tuple(layers)), from_matrix(devices, links, 0.0), microbatches
    )


def best_of_all_orders(problem: PipelineProblem, stages: list[Stage]) -> float:
    """The shortest window over every order of computations, whole and split, and all-reduces."""
    reduced = [s for s, stage in enumerate(stages) if len(stage.devices) > 1]
    known = [problem.layer_with_whole_backward(*stage.layers) is None for stage in stages]
    best = float("inf")
    for split in product(*[(True, False) if each else (False,) for each in known]):
        rows = {}
        for name in ("d0", "d1"):
            own = [
                Action(s, kind, m)
                for s, stage in enumerate(stages)
                if name in stage.devices
                for m in range(problem.microbatches)
                for kind in ((I, W, F) if split[s] else (B, F))
            ]
            rows[name] = [row for row in permutations(own) if _keeps_order(row)]
        for first, second in product(rows["d0"], rows["d1"]):
            for order in permutations(reduced) if reduced else (None,):
                try:
                    starts = earliest_starts(problem, stages, {"d0": first, "d1": second}, order)
                except InputError:  # the devices wait for each other
                    continue
                made = assemble(problem, "test", tuple(stages), starts, begins="backward")
                best = min(best, max(one.finish_seconds for one in made.actions))
    return best


def _keeps_order(row: tuple[Action, ...]) -> bool:
    """Whether W follows its I, a stage's forwards its backwards, and microbatches each other."""
    place = {one: i for i, one in enumerate(row)}
    for one, i in place.items():
        earlier = [Action(one.stage, I, one.microbatch)] if one.kind is W else []
        if one.kind is F:
            earlier = [each for each in row if each.stage == one.stage and each.kind is not F]
        if one.microbatch:
            earlier.append(Action(one.stage, one.kind, one.microbatch - 1))
        if any(place[each] > i for each in earlier):
            return False
    return True


CASES = [
    (name, microbatches, seed)
    for seed in range(12)
    for name, homes in HOMES.items()
    for microbatches in (1, 2)
    if microbatches * len(homes) < 4
]


@pytest.mark.parametrize(("name", "microbatches", "seed"), slow_after(14, CASES))
def test_no_order_is_below_the_bounds(name: str, microbatches: int, seed: int) -> None:
    draw = Random(f"{name} {microbatches} {seed}")
    homes = HOMES[name]
    problem = drawn(draw, len(homes), microbatches, whole=seed % 3 == 2)
    stages = [Stage((s, s + 1), tuple(f"d{d}" for d in home)) for s, home in enumerate(homes)]
    best, bounds = best_of_all_orders(problem, stages), list(stage_bounds(problem, stages))
    if name == "shared by both":
        found = plan(problem, "ooo", Limits(5.0), choices=Choices(out_of_order=OutOfOrder())).plan
        assert found is not None
        assert found.certificate is not None
        assert found.stages == tuple(stages)
        bounds += [b for b in found.certificate.bounds if b.proved_by == SEARCHED_BETWEEN_LOSSES]
    for bound in bounds:
        assert bound.seconds <= best * (1 + 1e-9), bound


def test_every_pair_of_neighbours_has_its_channel() -> None:
    """Groups of one layer around two devices, with transfers longer than computations.

    Four channels carry what one link from a device to the other would carry in turn.
    """
    cost = LayerCost(1, 1.0, 0.0, 5e6, input_gradient_seconds=1.0, weight_gradient_seconds=1.0)
    chain = Chain("m", "test", 1, tuple(Layer(f"l{i}", 0.0, (cost,)) for i in range(8)))
    links = [[None, 1e6], [1e6, None]]
    cluster = from_matrix([Device(f"d{i}", "gpu", 1e12) for i in range(2)], links, 0.0)
    problem = PipelineProblem(chain, cluster, 4)
    asked = Choices(out_of_order=OutOfOrder("pipeline", group=1))
    found = plan(problem, "ooo", Limits(5.0), choices=asked).plan
    assert found is not None
    cost_seconds = require_valid(problem, found)
    bounds = {one.proved_by: one for one in found.certificate.bounds}
    path, resource = (bounds[name] for name in BETWEEN_LOSSES.values())
    # Loss to loss a microbatch has 7 transfers each way, 8 forwards, 8 input gradients, and the
    # weight gradient of the first layer, which its forward waits for; a channel carries the other
    # three microbatches before it on the way back, and after it on the way there.
    assert path.seconds == 8 + 8 + 1 + 14 * 5 + 2 * 3 * 5
    assert path.seconds == resource.seconds == cost_seconds < 4 * 14 * 5 / 2
    assert {one.verdict for one in verdicts(problem, found)} == {"verified"}
    for name in BETWEEN_LOSSES.values():
        forged = tuple(
            replace(one, seconds=1.001 * one.seconds) if one.proved_by == name else one
            for one in found.certificate.bounds
        )
        other = replace(found, certificate=replace(found.certificate, bounds=forged))
        assert [one.name for one in verdicts(problem, other) if one.verdict == "refuted"] == [name]


def test_what_the_argument_does_not_cover_has_no_bound() -> None:
    problem = drawn(Random(0), 2, 2, whole=False)
    both, one = ("d0", "d1"), ("d1",)
    assert stage_bounds(problem, [Stage((0, 1), both), Stage((1, 2), one)])
    assert not stage_bounds(problem, [Stage((0, 1), both, "round-robin"), Stage((1, 2), one)])
    assert not stage_bounds(problem, [Stage((0, 1), both, recompute="full"), Stage((1, 2), one)])
