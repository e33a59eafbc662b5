"""Small models that groups of devices train: their plans, data, and what a rank does."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import training
from ranks import Ranks
from training_plans import fill_and_drain

from examples.models import Llama, Transformer
from stagewright.executor.training.runtime import Executor
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.documents.errors import InputError

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
    ranks: Ranks,
    model: Any,
    stages: list[Stage],
    microbatches: int = 2,
    samples: int = 4,
    *,
    tolerance: float = 1e-13,
    **options: Any,
) -> list[Any]:
    """Run on the pool, and compare with the model on one device, within an absolute tolerance."""
    torch.manual_seed(0)
    whole = model().double()
    plan = fill_and_drain(stages, microbatches)
    data = batches(samples * microbatches)
    world = len({name for stage in stages for name in stage.devices})
    loss, optimizer = options.pop("loss", ENTROPY), options.pop("optimizer", SGD)
    given = {"loss": loss, "optimizer": optimizer, **options}
    found = ranks.run(run, world, plan, whole, data, given)
    expected = training.train(plan, whole, data, loss, optimizer, **options)
    assert found[0][0].keys() == expected.state.keys()
    for name, one in expected.state.items():
        torch.testing.assert_close(found[0][0][name], one, rtol=1e-11, atol=tolerance, msg=name)
    for _, losses, _ in found:
        known = [value for value in losses if value is not None]
        assert not known or known == pytest.approx(expected.losses, rel=1e-12)
    return found


def interrupted(
    _: Any, rank: int, plan: PipelinePlan, model: Any, data: Any, state: Any, optimizer: Any = ADAM
) -> dict[str, Any]:
    """Load ``state``, if there is one, do the steps, and return this rank's share."""
    executor = Executor(plan, model, ENTROPY, optimizer, dtype=torch.float64)
    if state is not None:
        executor.load_state({key: state[key] for key in executor.wanted(state)}, 1)
    for batch in data:
        executor.step(*batch)
    return {key: one.clone() for key, one in executor.state().items()}


def evaluated(
    _: Any, rank: int, plan: PipelinePlan, model: Any, data: Any, state: Any, options: Any
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """As `interrupted`: losses, evaluations of the first mini-batch, and this rank's share."""
    executor = Executor(plan, model, ENTROPY, dtype=torch.float64, evaluates=True, **options)
    if state is not None:
        executor.load_state({key: state[key] for key in executor.wanted(state)}, 1)
    losses, found = [], []
    for batch in data:
        losses.append(executor.step(*batch))
        found.append(executor.evaluate([batch]))
    return losses, found, {key: one.clone() for key, one in executor.state().items()}


def constructed(_: Any, rank: int, plan: PipelinePlan, model: Any, data: Any) -> str:
    """The warnings of making an executor and of a step, or the refusal."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            executor = Executor(plan, model, ENTROPY, SGD, dtype=torch.float64)
            executor.step(*data)
        except InputError as error:
            return f"refused: {error}"
    return "; ".join(str(one.message) for one in caught)


def refusal(ranks: Ranks, model: Any, stages: list[Stage], change: Any = None) -> str:
    plan = fill_and_drain(stages, 2)
    plan = plan if change is None else change(plan)
    world = len({name for stage in stages for name in stage.devices})
    told = ranks.run(constructed, world, plan, model, batches(4, 1)[0])
    return next(text for text in told if text.startswith("refused"))
