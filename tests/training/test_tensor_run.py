"""Stages that groups of devices compute together train as the model on one device does."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training  # noqa: E402
import training_plans as make  # noqa: E402
from ranks import Ranks, RanksFailed  # noqa: E402

from examples.models import Llama, Transformer  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.actions import Action, ActionKind  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
VOCABULARY, SEQUENCE, STEPS = 12, 6, 3
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)
ENTROPY = torch.nn.functional.cross_entropy


def gpt() -> Any:
    """Layers: embedding, two blocks, head."""
    return Transformer(2, 16, 4, SEQUENCE, VOCABULARY)


def llama() -> Any:
    """Layers: embedding, two blocks, head."""
    return Llama(2, 16, 4, 2, 24, VOCABULARY)


def batches(samples: int, steps: int = STEPS) -> list[Any]:
    random = torch.Generator().manual_seed(1)
    shape = (samples, SEQUENCE)
    return [
        tuple(torch.randint(VOCABULARY, shape, generator=random) for _ in range(2))
        for _ in range(steps)
    ]


def summed(output: Any, targets: Any) -> Any:
    """A loss with its count, of which some samples have fewer."""
    counted = targets.where(targets > 3, -100)
    return ENTROPY(output, counted, reduction="sum"), (counted >= 0).sum()


def fill_and_drain(stages: list[Stage], microbatches: int) -> PipelinePlan:
    """On every device all forwards, stage by stage, then all backwards."""
    every = range(len(stages))
    order = [Action(s, F, m) for s in every for m in range(microbatches)]
    order += [Action(s, B, m) for s in reversed(every) for m in range(microbatches)]
    orders = {
        name: [one for one in order if name in stages[one.stage].runners(one.microbatch or 0)]
        for stage in stages
        for name in stage.devices
    }
    return make.plan_in_order(stages, microbatches, orders)


def run(
    _: Any, rank: int, plan: PipelinePlan, model: Any, data: Any, options: dict[str, Any]
) -> Any:
    """Parameters on rank 0, losses, and the sizes of the parameters on this rank."""
    executor = Executor(plan, model, dtype=torch.float64, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = [executor.step(*batch) for batch in data]
    groups = [group for one in executor.optimizers for group in one.param_groups]
    own = sum(one.numel() for group in groups for one in group["params"])
    return executor.parameters_on_first_rank(), losses, own


def trained(
    ranks: Ranks, model: Any, stages: list[Stage], microbatches: int = 2, **options: Any
) -> list[Any]:
    """Run on the pool, and compare with the model on one device."""
    torch.manual_seed(0)
    whole = model().double()
    plan = fill_and_drain(stages, microbatches)
    data = batches(4 * microbatches)
    world = len({name for stage in stages for name in stage.devices})
    loss, optimizer = options.pop("loss", ENTROPY), options.pop("optimizer", SGD)
    given = {"loss": loss, "optimizer": optimizer, **options}
    found = ranks.run(run, world, plan, whole, data, given)
    expected = training.train(plan, whole, data, loss, optimizer, **options)
    assert found[0][0].keys() == expected.state.keys()
    for name, one in expected.state.items():
        torch.testing.assert_close(found[0][0][name], one, rtol=1e-11, atol=1e-13, msg=name)
    for _, losses, _ in found:
        known = [value for value in losses if value is not None]
        assert not known or known == pytest.approx(expected.losses, rel=1e-12)
    return found


@pytest.mark.parametrize("model", [gpt, llama])
def test_a_group_trains_as_one_device(ranks: Ranks, model: Any) -> None:
    found = trained(ranks, model, [Stage((0, 4), ("a", "b"), tensor=2)])
    whole = sum(one.numel() for one in model().parameters())
    assert [own for *_, own in found] == [found[0][2]] * 2
    assert whole / 2 < found[0][2] < (0.8 if model is gpt else 0.55) * whole


TWO = {
    "a group, then a group": [((0, 2), "ab", 2), ((2, 4), "cd", 2)],
    "a device, then a group": [((0, 2), "a", 1), ((2, 4), "bc", 2)],
    "a group, then a device": [((0, 2), "ab", 2), ((2, 4), "c", 1)],
    "two groups of the same devices": [((0, 2), "ab", 2), ((2, 4), "ba", 2)],
    "replicas, then a group of them": [((0, 2), "ab", 1), ((2, 4), "ab", 2)],
    "a group, then replicas": [((0, 2), "ab", 2), ((2, 4), "bc", 1)],
    "two replicas of groups": [((0, 4), "abcd", 2)],
    "two replicas, in an order of their own": [((0, 1), "abcd", 1), ((1, 4), "dbca", 2)],
    "a group of four": [((0, 1), "a", 1), ((1, 3), "badc", 4), ((3, 4), "b", 1)],
}


@pytest.mark.covering
@pytest.mark.parametrize("name", TWO)
def test_stages_of_groups(ranks: Ranks, name: str) -> None:
    model = gpt if name == "a group of four" else llama
    stages = [Stage(layers, tuple(devices), tensor=t) for layers, devices, t in TWO[name]]
    trained(ranks, model, stages)


def test_groups_in_turn_recompute(ranks: Ranks) -> None:
    stages = [
        Stage((0, 4), ("a", "b", "c", "d"), "round-robin", "layer", tensor=2),
    ]
    trained(ranks, llama, stages, microbatches=3)
    trained(ranks, gpt, [Stage((0, 4), ("a", "b"), recompute="full", tensor=2)])
