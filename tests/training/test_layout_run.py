"""A layout that was searched is lowered, and four processes train by it as one device does."""

import warnings
from functools import partial
from typing import Any

import pytest
from profiles import slow_after

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training  # noqa: E402
from own_rates import own_rates  # noqa: E402
from ranks import Ranks  # noqa: E402

from examples.models import Llama, Transformer  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.parallelism.lowering import lowered  # noqa: E402
from stagewright.formulations.parallelism.training import TrainingProblem  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan  # noqa: E402
from stagewright.graphs.machines.fabric import Fabric, Level  # noqa: E402
from stagewright.graphs.machines.rates import Reached  # noqa: E402
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention  # noqa: E402
from stagewright.service.layouts.requests import LayoutRequest  # noqa: E402
from stagewright.service.layouts.searching import find_layouts  # noqa: E402
from stagewright.solvers.parallelism.space import Space  # noqa: E402

BLOCKS, HIDDEN, VOCABULARY, SEQUENCE, BATCH = 4, 16, 12, 6, 16
ENTROPY = torch.nn.functional.cross_entropy
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)

GPT = (
    lambda: Transformer(BLOCKS, HIDDEN, 4, SEQUENCE, VOCABULARY),
    Architecture(
        "gpt", BLOCKS, HIDDEN, VOCABULARY,
        GroupedAttention(4, 4, 4, bias=True, output_bias=True),
        FeedForward(4 * HIDDEN, gated=False, bias=True), norm="layer", positions=SEQUENCE,
    ),
)  # fmt: skip
LLAMA = (
    lambda: Llama(BLOCKS, HIDDEN, 4, 2, 24, VOCABULARY),
    Architecture("llama", BLOCKS, HIDDEN, VOCABULARY, GroupedAttention(4, 2, 4), FeedForward(24)),
)


def found_plan(architecture: Architecture, chunks: int, limits: dict[str, Any]) -> PipelinePlan:
    """The best layout within limits that a plan can express, lowered."""
    fabric = Fabric("h100", 80e9, (Level("server", 4, 4e11),))
    problem = TrainingProblem(
        architecture, SEQUENCE, BATCH, fabric, own_rates(Reached(0.7, 1e9, 0.8, 1e-6))
    )
    space = Space(microbatch=(2,), chunks=chunks, **limits)
    answer = find_layouts(LayoutRequest(problem=problem, space=space, framework="plan"))
    assert answer.plan is not None
    layout = answer.plan.layout
    assert layout.chunks == chunks
    return lowered(problem, layout)[1]


def steps(_: Any, rank: int, plan: PipelinePlan, model: Any, data: Any) -> Any:
    """Parameters on rank 0, and the size of the parameters on this rank."""
    executor = Executor(plan, model, ENTROPY, SGD, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some layers of the GPT are whole on every device
        for batch in data:
            executor.step(*batch)
    groups = [group for one in executor.optimizers for group in one.param_groups]
    own = sum(one.numel() for group in groups for one in group["params"])
    return executor.parameters_on_first_rank(), own


@pytest.mark.parametrize(
    ("model", "chunks", "limits"),
    slow_after(3, [
        (LLAMA, 1, {"pipeline": (2,), "tensor": (2,)}),
        (LLAMA, 2, {"pipeline": (2,), "tensor": (2,)}),
        (GPT, 1, {"pipeline": (2,), "tensor": (2,)}),
        (GPT, 1, {"pipeline": (2,), "data": (2,)}),
        (GPT, 2, {"pipeline": (2,), "schedules": ("zero-bubble",), "recompute": ("full",)}),
        (LLAMA, 1, {"tensor": (2,), "data": (2,)}),
        (LLAMA, 2, {"pipeline": (2,), "tensor": (2,), "schedules": ("zero-bubble",)}),
        (LLAMA, 1, {"tensor": (2,), "data": (2,), "zero": (2,)}),
        (GPT, 1, {"pipeline": (2,), "data": (2,), "zero": (3,), "schedules": ("zero-bubble",)}),
    ]),
)  # fmt: skip
def test_the_layout_that_was_found_is_what_runs(
    ranks: Ranks, model: Any, chunks: int, limits: dict[str, Any]
) -> None:
    module, architecture = model
    torch.manual_seed(0)
    whole = module().double()
    plan = found_plan(architecture, chunks, limits)
    random = torch.Generator().manual_seed(1)
    shape = (BATCH, SEQUENCE)
    data = [
        tuple(torch.randint(VOCABULARY, shape, generator=random) for _ in range(2))
        for _ in range(3)
    ]
    found = ranks.run(steps, 4, plan, whole, data)
    expected = training.train(plan, whole, data, ENTROPY, SGD)
    assert found[0][0].keys() == expected.state.keys()
    for name, one in expected.state.items():
        torch.testing.assert_close(found[0][0][name], one, rtol=1e-11, atol=1e-13, msg=name)
    sizes = sum(one.numel() for one in whole.parameters())
    assert all(0 < own < 0.8 * sizes for _, own in found)
