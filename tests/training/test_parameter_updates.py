"""Groups of parameters, schedules of learning rates: as a plain loop with the same optimizer."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training_plans as make  # noqa: E402
from models import EXAMPLES, VOCABULARY, WIDTH, ResidualMLP, vectors  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from stagewright.executor.capture.tracing import capture  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402

STEPS = 5
MICROBATCHES = 4
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.3)
GROUPS = {"norm|bias": {"weight_decay": 0.0}, r"^head\.": {"lr": 0.05, "betas": (0.5, 0.9)}}

PLANS: Mapping[str, Callable[[], PipelinePlan]] = {
    "two stages": lambda: make.one_f_one_b(make.straight([2, 2]), MICROBATCHES),
    "split": lambda: make.gpipe([Stage((0, 2), ("d0", "d1")), Stage((2, 4), ("d2",))], MICROBATCHES),
    # Between updates there is one microbatch alone: the weights are those of a loop over them.
    "stash": lambda: make.one_f_one_b(make.straight([4]), MICROBATCHES, "stash"),
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return ResidualMLP(2).double()


def batches() -> list[Any]:
    every = [vectors(2 * MICROBATCHES, i) for i in range(STEPS)]
    return [(inputs.double(), targets) for inputs, targets in every]


def of_groups(named: Sequence[tuple[str, Any]], groups: Mapping[str, Any]) -> list[Any]:
    made: dict[str | None, list[Any]] = {None: [], **{pattern: [] for pattern in groups}}
    for name, one in named:
        made[next((p for p in groups if re.search(p, name)), None)].append(one)
    return [{"params": found, **groups.get(key, {})} for key, found in made.items()]


def plain(
    optimizer: Any, groups: Mapping[str, Any], *, schedule: Any = None, by_microbatch: bool
) -> tuple[dict[str, Any], list[list[float]]]:
    """Parameters, and the learning rates of every step."""
    module, rates = model(), []
    stepping = optimizer(of_groups([*module.named_parameters()], groups))
    scheduler = None if schedule is None else schedule(stepping)
    for inputs, targets in batches():
        rates.append([group["lr"] for group in stepping.param_groups])
        count = MICROBATCHES if by_microbatch else 1
        for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            stepping.zero_grad()
            F.cross_entropy(module(x), y).backward()
            stepping.step()
        if scheduler is not None:
            scheduler.step()
    return module.state_dict(), rates


def run(_: Any, rank: int, plan: PipelinePlan, options: Mapping[str, Any]) -> Any:
    executor = Executor(plan, model(), None, ADAMW, dtype=torch.float64, **options)
    for batch in batches():
        executor.step(*batch)
    executor.finish()
    return executor.parameters_on_first_rank()


def require_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", PLANS)
def test_groups_are_those_of_a_plain_loop(ranks: Ranks, name: str) -> None:
    plan = PLANS[name]()
    world = len({one for stage in plan.stages for one in stage.devices})
    found = ranks.run(run, world, plan, {"groups": GROUPS})[0]
    expected, _ = plain(ADAMW, GROUPS, by_microbatch=name == "stash")
    require_equal(found, expected)
    without, _ = plain(ADAMW, {}, by_microbatch=name == "stash")
    assert not torch.allclose(without["head.weight"], expected["head.weight"], rtol=1e-3)


def test_a_group_may_have_no_parameter_of_a_stage(ranks: Ranks) -> None:
    plan = make.one_f_one_b(make.straight([1, 3]), MICROBATCHES)
    groups = {"^stem": {"lr": 0.1}}
    found = ranks.run(run, 2, plan, {"groups": groups})[0]
    require_equal(found, plain(ADAMW, groups, by_microbatch=False)[0])


@pytest.mark.parametrize(
    ("groups", "complaint"),
    [
        ({"nrom": {"lr": 1.0}}, r"group 'nrom' matches no trained parameter; .* blocks.0"),
        ({"(": {"lr": 1.0}}, r"group '\(' is no regular expression"),
        ({"bias": {"lr": 1.0}, "head.bias": {"lr": 2.0}}, "'head.bias': all parameters that it"),
        ({"bias": {"decay": 0.0}}, "'bias': AdamW has no 'decay' for a group; one of lr, betas"),
    ],
)
def test_groups_that_would_change_nothing_are_refused(
    groups: Mapping[str, Any], complaint: str
) -> None:
    plan = make.gpipe(make.straight([4]), MICROBATCHES)
    with pytest.raises(InputError, match=complaint):
        Executor(plan, model(), None, ADAMW, groups=groups)


def tied(_: Any, rank: int, plan: PipelinePlan, pattern: str) -> Any:
    """The shapes of this stage's parameters in the group."""
    torch.manual_seed(0)
    executor = Executor(
        plan, EXAMPLES["tied-transformer"].build(), None, ADAMW, groups={pattern: {"lr": 0.5}}
    )
    (optimizer,) = executor.optimizers
    return [tuple(one.shape) for one in optimizer.param_groups[1]["params"]]


def test_a_tied_parameter_is_in_the_group_of_its_first_name(ranks: Ranks) -> None:
    layers = len(capture(EXAMPLES["tied-transformer"].build()).layers)
    plan = make.gpipe(make.straight([3, layers - 3]), 2)
    shapes = ranks.run(tied, 2, plan, r"^token\.weight$")
    assert shapes == [[(VOCABULARY, WIDTH)]] * 2  # in both stages
