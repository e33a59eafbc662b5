"""Ranks read the data that they need, and replicas their own samples."""

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training_plans as make  # noqa: E402
from models import EXAMPLES, vectors  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from stagewright.executor.programs.program import plan_devices  # noqa: E402
from stagewright.executor.training.data.batches import readers_of, replica_of  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MICROBATCHES, OWN = 4, 2  # samples of a replica in a microbatch


def trained(_: Any, rank: int, plan: PipelinePlan, model: Any, batches: Any, own: bool) -> Any:
    executor = Executor(plan, model, None, SGD, dtype=torch.float64, own_samples=own)
    if own:
        batches = [
            tuple(of_replica(one, plan.stages[0], executor.replica) for one in batch)
            for batch in batches
        ]
    return [executor.step(*batch) for batch in batches], executor.parameters_on_first_rank()


def of_replica(whole: Tensor, stage: Stage, replica: int) -> Tensor:
    """The samples of a replica, microbatch by microbatch."""
    parts = whole.chunk(MICROBATCHES)
    if stage.replication == "round-robin":
        return torch.cat(parts[replica :: stage.replicas])
    return torch.cat([part.chunk(stage.replicas)[replica] for part in parts])


REPLICATED = {
    "split": [Stage((0, 8), ("a", "b"), "split")],
    "round-robin": [Stage((0, 8), ("a", "b"), "round-robin")],
    "stages of turns": [
        Stage((0, 3), ("a", "b"), "round-robin"),
        Stage((3, 8), ("c", "d"), "round-robin"),
    ],
    "between which is one": [
        Stage((0, 3), ("a", "b"), "round-robin"),
        Stage((3, 5), ("c",)),
        Stage((5, 8), ("a", "b"), "round-robin"),
    ],
    "stages on the same devices": [
        Stage((0, 3), ("a", "b"), "split"),
        Stage((3, 8), ("a", "b"), "split"),
    ],
}


@pytest.mark.parametrize("layout", REPLICATED)
def test_own_samples_are_those_of_the_whole_mini_batch(ranks: Ranks, layout: str) -> None:
    stages = REPLICATED[layout]
    plan = make.fill_and_drain(stages, MICROBATCHES)
    example = EXAMPLES["dropping-transformer"]
    samples = MICROBATCHES * OWN * len(stages[0].runners(0))
    batches = [example.batch(samples, seed) for seed in range(2)]
    world = len(plan_devices(plan))
    model = example.build().double()
    whole = ranks.run(trained, world, plan, model, batches, False)
    own = ranks.run(trained, world, plan, model, batches, True)
    assert [one[0] for one in own] == [one[0] for one in whole]
    for name, value in whole[0][1].items():
        assert torch.equal(own[0][1][name], value), name


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ([Stage((0, 1), ("a", "b")), Stage((1, 2), ("c",))], "as many replicas in the last stage"),
        ([Stage((0, 1), ("a", "b")), Stage((1, 2), ("c", "d"))], "the same samples"),
        ([Stage((0, 1), ("a", "b")), Stage((1, 2), ("b", "a"))], "the same samples"),
        ([Stage((0, 2), ("a", "b", "c"), "round-robin")], "as many microbatches"),
    ],
)
def test_plans_whose_replicas_have_no_samples_of_their_own(stages: Any, named: str) -> None:
    plan = make.fill_and_drain(stages, MICROBATCHES)
    with pytest.raises(InputError, match=named):
        replica_of(plan, "a")


def reading(_: Any, rank: int, plan: PipelinePlan) -> Any:
    """How many mini-batches a rank has read, and its losses, with what is evaluated."""
    torch.manual_seed(0)
    read = 0

    def batches(seeds: range) -> Any:
        nonlocal read
        for seed in seeds:
            read += 1
            yield vectors(8 if seed < 2 else 16, seed)

    model = nn.Sequential(
        *(nn.Linear(vectors(1)[0].shape[1], 8) for _ in range(1)), nn.Linear(8, 8), nn.Linear(8, 5)
    )
    executor = Executor(plan, model, None, SGD, evaluates=True)
    readers = readers_of(plan, rank)
    losses = [executor.step(*batch) for batch in readers.each(lambda: batches(range(3)))]
    evaluated = executor.evaluate(readers.each(lambda: batches(range(3, 5))))
    return read, losses, evaluated


def test_ranks_in_the_middle_read_nothing(ranks: Ranks) -> None:
    found = ranks.run(reading, 3, make.gpipe(make.straight([1, 1, 1]), 2))
    assert [one[0] for one in found] == [5, 0, 5]
    assert all(one is not None for one in found[2][1])
    assert found[2][2] is not None
