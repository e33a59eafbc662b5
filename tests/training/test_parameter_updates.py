"""Groups of parameters, schedules of learning rates: as a plain loop with the same optimizer."""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import torch.distributed as dist  # noqa: E402
import training_plans as make  # noqa: E402
from models import EXAMPLES, VOCABULARY, WIDTH, ResidualMLP, vectors  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from stagewright.executor.capture.tracing import capture  # noqa: E402
from stagewright.executor.training import checkpoint  # noqa: E402
from stagewright.executor.training.checkpoint import Header  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.executor.training.stages.learning_rates import RateSchedule  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402

STEPS = 5
MICROBATCHES = 4
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.3)
GROUPS = {"norm|bias": {"weight_decay": 0.0}, r"^head\.": {"lr": 0.05, "betas": (0.5, 0.9)}}

PLANS: Mapping[str, Callable[[], PipelinePlan]] = {
    "two stages": lambda: make.one_f_one_b(make.straight([2, 2]), MICROBATCHES),
    "split": lambda: make.gpipe(
        [Stage((0, 2), ("d0", "d1")), Stage((2, 4), ("d2",))], MICROBATCHES
    ),
    # Between updates there is one microbatch alone: the weights are those of a loop over them.
    "double-buffer": lambda: make.overlapping(make.straight([2, 2]), MICROBATCHES),
    "periodic stash": lambda: make.overlapping(make.straight([4]), MICROBATCHES, weights="stash"),
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
    optimizer: Any,
    groups: Mapping[str, Any],
    *,
    schedule: Any = None,
    by_microbatch: bool = False,
    delayed: bool = False,
) -> tuple[dict[str, Any], list[list[float]]]:
    """Parameters, and the learning rates of every step.

    A ``delayed`` gradient is that of the weights before the last update (PipeDream-2BW).
    """
    module, rates = model(), []
    older = deepcopy(module)
    stepping = optimizer(of_groups([*module.named_parameters()], groups))
    scheduler = None if schedule is None else schedule(stepping)
    for inputs, targets in batches():
        rates.append([group["lr"] for group in stepping.param_groups])
        count = MICROBATCHES if by_microbatch else 1
        for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            computing = older if delayed else module
            found = torch.autograd.grad(F.cross_entropy(computing(x), y), [*computing.parameters()])
            older.load_state_dict(module.state_dict())
            for one, gradient in zip(module.parameters(), found, strict=True):
                one.grad = gradient
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


def expected_of(plan: PipelinePlan, groups: Mapping[str, Any], schedule: Any = None) -> Any:
    return plain(
        ADAMW,
        groups,
        schedule=schedule,
        by_microbatch=plan.weights == "stash",
        delayed=plan.weights == "double-buffer",
    )


def require_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", PLANS)
def test_groups_are_those_of_a_plain_loop(ranks: Ranks, name: str) -> None:
    plan = PLANS[name]()
    world = len({one for stage in plan.stages for one in stage.devices})
    found = ranks.run(run, world, plan, {"groups": GROUPS})[0]
    expected, _ = expected_of(plan, GROUPS)
    require_equal(found, expected)
    without, _ = expected_of(plan, {})
    assert not torch.allclose(without["head.weight"], expected["head.weight"], rtol=1e-3)


def test_a_group_may_have_no_parameter_of_a_stage(ranks: Ranks) -> None:
    plan = make.one_f_one_b(make.straight([1, 3]), MICROBATCHES)
    groups = {"^stem": {"lr": 0.1}}
    found = ranks.run(run, 2, plan, {"groups": groups})[0]
    require_equal(found, plain(ADAMW, groups)[0])


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


# --- Learning rates ----------------------------------------------------------------------------


def by_torch(optimizer: Any) -> Any:
    """Warm-up of one step, then half a cosine to a tenth, of torch's own schedulers."""
    schedulers = torch.optim.lr_scheduler
    parts = [
        schedulers.LinearLR(optimizer, start_factor=0.5, total_iters=1),
        schedulers.CosineAnnealingLR(optimizer, STEPS - 1, eta_min=0.001),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[1])


SCHEDULES = {
    "cosine": RateSchedule("cosine", STEPS, warmup=1, min=0.1),
    "torch": by_torch,
    "steps": partial(torch.optim.lr_scheduler.StepLR, step_size=2),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", ["cosine", "steps"])
def test_learning_rates_are_those_of_a_plain_loop(ranks: Ranks, name: str, kind: str) -> None:
    plan, schedule = PLANS[name](), SCHEDULES[kind]
    world = len({one for stage in plan.stages for one in stage.devices})
    found = ranks.run(run, world, plan, {"groups": GROUPS, "schedule": schedule})[0]
    expected, rates = expected_of(plan, GROUPS, schedule)
    assert len(set(map(tuple, rates))) > 1
    require_equal(found, expected)


def test_a_schedule_has_the_learning_rates_of_torch() -> None:
    _, own = plain(ADAMW, {}, schedule=SCHEDULES["cosine"])
    _, theirs = plain(ADAMW, {}, schedule=SCHEDULES["torch"])
    assert [rate for (rate,) in own] == pytest.approx([rate for (rate,) in theirs], rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (RateSchedule("constant", 4, warmup=1), [0.5, 1, 1, 1, 1]),
        (RateSchedule("linear", 4), [1, 0.75, 0.5, 0.25, 0]),
        (RateSchedule("linear", 4, warmup=2, min=0.5), [1 / 3, 2 / 3, 1, 0.75, 0.5]),
        (RateSchedule("cosine", 2, min=0.2), [1, 0.6, 0.2, 0.2, 0.2]),
        (RateSchedule("linear", 2, warmup=2), [1 / 3, 2 / 3, 1, 0, 0]),
    ],
)
def test_factors_of_schedules(schedule: RateSchedule, factors: list[float]) -> None:
    assert [schedule.factor(step) for step in range(5)] == pytest.approx(factors)


def halves(_: Any, rank: int, plans: Sequence[PipelinePlan], folder: Path, schedule: Any) -> Any:
    """The first steps by one plan, the others by the next one."""
    options = {"groups": GROUPS, "schedule": schedule}
    first, second = (
        Executor(plan, model(), None, ADAMW, dtype=torch.float64, **options) for plan in plans
    )
    for batch in batches()[:3]:
        first.step(*batch)
    first.finish()
    path = checkpoint.save(folder, first.state(), Header(3, plans[0].weights, "adamw"))
    dist.barrier()
    second.load_state(checkpoint.read(path, second.wanted(checkpoint.read_kinds(path))), 3)
    for batch in batches()[3:]:
        second.step(*batch)
    second.finish()
    return second.parameters_on_first_rank()


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("layers", [[1, 3], [3, 1]])
def test_learning_rates_are_restored_under_another_plan(
    ranks: Ranks, tmp_path: Path, kind: str, layers: list[int]
) -> None:
    cuts = make.straight([2, 2]), make.straight(layers)
    plans = [make.one_f_one_b(stages, MICROBATCHES) for stages in cuts]
    found = ranks.run(halves, 2, plans, tmp_path, SCHEDULES[kind])[0]
    require_equal(found, expected_of(plans[0], GROUPS, SCHEDULES[kind])[0])


def test_options_that_a_scheduler_changes_are_restored(ranks: Ranks, tmp_path: Path) -> None:
    """OneCycleLR moves the betas too."""
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=[0.01] * 3, total_steps=STEPS + 1)
    plan = make.one_f_one_b(make.straight([2, 2]), MICROBATCHES)
    found = ranks.run(halves, 2, [plan, plan], tmp_path, cycle)[0]
    require_equal(found, expected_of(plan, GROUPS, cycle)[0])


def test_schedulers_that_need_more_than_steps_are_refused() -> None:
    plan = make.gpipe(make.straight([4]), MICROBATCHES)
    with pytest.raises(InputError, match="by the number of steps, got ReduceLROnPlateau"):
        Executor(plan, model(), schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)


# --- Several mini-batches for an update ---------------------------------------------------------


def sparse_loss(output: Any, targets: Any) -> Any:
    """A sum over the samples that are not of class 0, and their number."""
    counts = targets != 0
    each = F.cross_entropy(output, targets, reduction="none")
    return (each * counts).sum(), counts.sum()


def mean_loss(output: Any, targets: Any) -> Any:
    return F.cross_entropy(output, targets)


def accumulated(
    _: Any, rank: int, plan: PipelinePlan, model: Any, given: Any, loss: Any, options: Any
) -> Any:
    executor = Executor(plan, model, loss, ADAMW, dtype=torch.float64, accumulate=2, **options)
    losses = [executor.step(*batch) for batch in given]
    return executor.parameters_on_first_rank(), losses


def plain_accumulated(module: Any, given: Any, loss: Any, clip: float, schedule: Any) -> Any:
    optimizer = ADAMW([*module.parameters()])
    scheduler = schedule(optimizer)
    for pair in zip(given[::2], given[1::2], strict=True):
        optimizer.zero_grad()
        found = [loss(module(inputs), targets) for inputs, targets in pair]
        if loss is sparse_loss:
            (sum(one for one, _ in found) / sum(count for _, count in found)).backward()
        else:
            for one in found:
                (one / 2).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return module.state_dict()


@pytest.mark.parametrize("name", ["two stages", "split"])
@pytest.mark.parametrize("loss", [mean_loss, sparse_loss])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_an_update_by_two_mini_batches(
    ranks: Ranks, name: str, loss: Any, clip_norm: float | None
) -> None:
    """The second two are of different sizes."""
    plan, schedule = PLANS[name](), SCHEDULES["steps"]
    longer, targets = vectors(4 * MICROBATCHES, 9)
    given = [*batches()[:2], (longer.double(), targets), batches()[2]]
    world = len({one for stage in plan.stages for one in stage.devices})
    options = {"clip_norm": clip_norm, "schedule": schedule}
    found = ranks.run(accumulated, world, plan, model(), given, loss, options)[0]
    clip = float("inf") if clip_norm is None else clip_norm
    require_equal(found[0], plain_accumulated(model(), given, loss, clip, schedule))


def test_tied_parameters_are_accumulated(ranks: Ranks) -> None:
    torch.manual_seed(0)
    module = EXAMPLES["tied-transformer"].build().double()
    layers = len(capture(module).layers)
    plan = make.one_f_one_b(make.straight([3, layers - 3]), 2)
    given = [EXAMPLES["tied-transformer"].batch(4, i) for i in range(4)]
    options: dict[str, Any] = {"schedule": None}
    found = ranks.run(accumulated, 2, plan, module, given, mean_loss, options)[0]
    same = partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
    expected = plain_accumulated(module, given, mean_loss, float("inf"), same)
    require_equal(found[0], expected)


@pytest.mark.parametrize(
    ("plan", "options", "complaint"),
    [
        (
            "stash",
            {"accumulate": 2},
            "accumulate needs a finite plan with 'flush' weights .* 'stash'",
        ),
        ("double-buffer", {"accumulate": 2}, "accumulate needs a finite plan"),
        ("two stages", {"accumulate": 0}, "accumulate must be a number of mini-batches from 1 on"),
        ("two stages", {"accumulate": 2, "trace": True}, "leave one of the two out"),
    ],
)
def test_what_cannot_accumulate_is_refused(plan: str, options: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Executor(PLANS[plan](), model(), **options)


def test_half_an_update_is_not_in_a_checkpoint() -> None:
    executor = Executor(make.gpipe(make.straight([4]), 4), model(), accumulate=2)
    executor.step(*vectors(8))
    with pytest.raises(InputError, match="the update of the last 1 is missing: it takes 2"):
        executor.state()
    executor.step(*vectors(8))
    assert executor.state()
