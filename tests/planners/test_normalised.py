"""Losses with a count, and clipped norms: the plan does not change what is trained."""

import re
from functools import partial
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import UNSHRUNK, examples, slow_but

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training  # noqa: E402
import training_plans as make  # noqa: E402
from models import EXAMPLES, ResidualMLP, vectors  # noqa: E402
from ranks import Ranks, RanksFailed  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from stagewright.executor.capture.tracing import capture  # noqa: E402
from stagewright.executor.measuring.compare import compare, correct  # noqa: E402
from stagewright.executor.training.losses import IGNORED, cross_entropy  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.actions import ActionKind, parse_action  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402
from stagewright.graphs.models.chain import Chain, Layer, LayerCost  # noqa: E402

STEPS = 3
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def weighted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Classes count differently."""
    weights = torch.tensor([0.25, 1.0, 2.5, 0.5], dtype=output.dtype)[targets]
    return (F.cross_entropy(output, targets, reduction="none") * weights).sum(), weights.sum()


def run(
    _: Any, rank: int, plan: PipelinePlan, model: Any, batches: Any, options: dict[str, Any]
) -> Any:
    """Parameters on rank 0, the losses that this rank knows, and a trace if it is asked for."""
    executor = Executor(plan, model, optimizer=SGD, dtype=torch.float64, **options)
    losses = [executor.step(*batch) for batch in batches] + executor.finish()
    trace = executor.trace_on_first_rank() if options.get("trace") else None
    return executor.parameters_on_first_rank(), [one for one in losses if one is not None], trace


def world(plan: PipelinePlan) -> int:
    return len({name for stage in plan.stages for name in stage.devices})


def masked(samples: int, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Mini-batches in which the first half of the labels, and some others, do not count."""
    batches = []
    for i in range(steps):
        x, y = vectors(samples, i)
        y = y.clone()
        y[: samples // 2] = IGNORED
        y[-1 - i] = IGNORED
        batches.append((x.double(), y))
    return batches


def built() -> nn.Module:
    torch.manual_seed(0)
    return ResidualMLP().double()


def require_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def compare_runs(
    ranks: Ranks, plan: PipelinePlan, model: Any, batches: Any, loss: Any, **options: Any
) -> Any:
    """Carry out ``plan`` on the pool and by the oracle; what the ranks returned."""
    results = ranks.run(run, world(plan), plan, model, batches, {"loss": loss} | options)
    clip_norm = options.get("clip_norm")
    expected = training.train(plan, model, batches, loss, SGD, clip_norm=clip_norm)
    require_equal(results[0][0], expected.state)
    for _, losses, _ in results:
        assert losses == [] or losses == pytest.approx(expected.losses, rel=1e-9)
    assert any(losses for _, losses, _ in results)
    return results


def plainly(batches: Any, clip_norm: float | None = None) -> dict[str, Tensor]:
    """The loop that everybody writes, without microbatches."""
    model = built()
    optimizer = SGD(model.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return model.state_dict()


PLANS = {
    "one": make.gpipe(make.straight([6]), 1),
    "pipeline": make.one_f_one_b(make.straight([1, 3, 2]), 4),
    "zero-bubble": make.zero_bubble_h1(make.straight([3, 3]), 4),
    "data parallel": make.gpipe([Stage((0, 6), ("d0", "d1"))], 2),
    "turns": make.gpipe([Stage((0, 4), ("d0",)), Stage((4, 6), ("d1", "d2"), "round-robin")], 4),
    "shared": make.plan_in_order(
        [Stage((0, 3), ("d0", "d1")), Stage((3, 6), ("d1", "d2"))],
        2,
        {
            device: [parse_action(f"{one}{m}") for m in (0, 1) for one in order]
            for device, order in {
                "d0": ("0F", "0B"),
                "d1": ("0F", "1F", "1B", "0B"),
                "d2": ("1F", "1B"),
            }.items()
        },
    ),
}


def some_plans(turn: int) -> list[Any]:
    """All names, of which three from number ``turn`` on are quick."""
    marks = slow_but(3, turn, len(PLANS))
    return [pytest.param(name, marks=mark) for name, mark in zip(PLANS, marks, strict=True)]


@pytest.mark.parametrize("name", some_plans(0))
def test_masked_labels_count_as_without_a_plan(ranks: Ranks, name: str) -> None:
    batches = masked(16)
    results = ranks.run(run, world(PLANS[name]), PLANS[name], built(), batches, {})
    require_equal(results[0][0], plainly(batches))


@pytest.mark.parametrize("name", some_plans(3))
def test_gradients_are_clipped_as_without_a_plan(ranks: Ranks, name: str) -> None:
    batches = masked(16)
    free, clipped = plainly(batches), plainly(batches, 0.5)
    assert any(
        (one - other).abs().max() > 1e-3
        for one, other in zip(free.values(), clipped.values(), strict=True)
    )
    options = {"clip_norm": 0.5, "trace": name == "shared"}
    results = ranks.run(run, world(PLANS[name]), PLANS[name], built(), batches, options)
    require_equal(results[0][0], clipped)


@examples(25, quick=1, phases=UNSHRUNK)
@given(data=st.data())
def test_random_plans(ranks: Ranks, data: Any) -> None:
    name = data.draw(st.sampled_from(["residual-mlp", "tied-transformer"]))
    weights = make.ALL_WEIGHTS if name == "residual-mlp" else ("flush", "double-buffer")
    torch.manual_seed(0)
    model = EXAMPLES[name].build().double()
    plan = data.draw(make.plans(len(capture(model).layers), weights=weights))
    if any(stage.turns > 1 for stage in plan.stages) and plan.weights.startswith("stash"):
        return
    samples = make.even_samples(plan.stages) * plan.microbatches
    batches = [EXAMPLES[name].batch(samples, i) for i in range(STEPS)]
    if name == "residual-mlp":
        batches = [(x.double(), y) for x, y in batches]
    clips = plan.weights in ("flush", "double-buffer") and data.draw(st.booleans())
    loss = weighted if name == "residual-mlp" else cross_entropy
    compare_runs(ranks, plan, model, batches, loss, clip_norm=0.3 if clips else None)


@pytest.mark.parametrize("weights", ["stash", "stash+vertical-sync"])
def test_a_microbatch_that_is_an_update_is_normalised_alone(ranks: Ranks, weights: Any) -> None:
    stages = [Stage((0, 3), ("d0",)), Stage((3, 6), ("d1", "d2"))]
    batches = [(x[4:], y[4:]) for x, y in masked(12)]
    batches = [(x, y.where(torch.arange(8) != 5, IGNORED)) for x, y in batches]
    compare_runs(ranks, make.one_f_one_b(stages, 2, weights), built(), batches, cross_entropy)


@examples(15, quick=1, phases=UNSHRUNK)
@given(data=st.data())
def test_random_periodic_plans(ranks: Ranks, data: Any) -> None:
    plan = data.draw(make.periodic_plans(6))
    samples = make.even_samples(plan.stages) * plan.microbatches
    batches = [(x.double(), y) for x, y in (vectors(samples, i) for i in range(2 * STEPS))]
    clips = not plan.weight_rule.updates_every_round and data.draw(st.booleans())
    trace = data.draw(st.booleans())
    clip_norm = 0.3 if clips else None
    compare_runs(ranks, plan, built(), batches, weighted, clip_norm=clip_norm, trace=trace)


@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_the_optimizers_steps_of_a_plan_are_traced_and_compared(
    ranks: Ranks, clip_norm: float | None
) -> None:
    stages = [Stage((s, s + 1), (f"d{s % 2}",)) for s in range(4)]
    stages[-1] = Stage((3, 6), ("d1",))
    plan = make.with_steps(make.interleaved(stages, 2), 0.5)
    batches = masked(8)
    options = {"trace": True, "clip_norm": clip_norm}
    trace = compare_runs(ranks, plan, built(), batches, cross_entropy, **options)[0][2]
    for step in trace.steps:
        updates = sorted(one.action for one in step.actions if "UPDATE" in one.action)
        assert updates == ["0UPDATE", "1UPDATE", "2UPDATE", "3UPDATE"]
        assert step.iteration_seconds == max(one.finish_seconds for one in step.actions)
    comparison = compare(plan, trace)
    kinds = {one.kind: (one.count, one.seconds) for one in comparison.kinds}
    count, seconds = kinds[ActionKind.UPDATE]
    assert (count, seconds.predicted, seconds.measured > 0) == (4, 0.5, True)
    assert comparison.update_seconds.predicted == 1.0  # two stages on each device
    cost = LayerCost(2, 1.0, 1.0, 1.0, backward_seconds=2.0, update_seconds=0.25)
    layers = tuple(Layer(str(i), 4.0, (cost,)) for i in range(6))
    corrected = correct(Chain("test", "test", 2, layers), plan, trace)
    measured = median(
        one.finish_seconds - one.start_seconds
        for step in trace.steps[1:]
        for one in step.actions
        if one.action == "3UPDATE"
    )
    (found,) = {layer.costs[0].update_seconds for layer in corrected.layers[3:]}
    assert found == pytest.approx(0.25 * measured / 0.5)


def test_a_mini_batch_without_labels_ends_the_run_on_every_rank(ranks: Ranks) -> None:
    x, y = vectors(8)
    batches = [(x.double(), torch.full_like(y, IGNORED))]
    with pytest.raises(RanksFailed) as failed:
        ranks.run(run, 3, PLANS["pipeline"], built(), batches, {})
    line = "NonFiniteLoss: the loss of step 1 has a sum over a count of 0"
    # A rank may hear of another's end before it comes to its own.
    assert next(iter(failed.value.errors.values())).startswith(line)


def test_the_default_loss_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(3, 5, 2, generator=generator)
    labels = torch.randint(0, 5, (3, 2), generator=generator)
    labels[1, 0] = IGNORED
    for targets in (labels, output.softmax(1)):
        total, count = cross_entropy(output, targets)
        torch.testing.assert_close(total / count, F.cross_entropy(output, targets))


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda output, _: output.mean(0), "a tensor of shape (4,)"),
        (lambda output, _: output.detach().mean(), "a tensor of shape () without a gradient"),
        (lambda *_: 1.0, "float"),
        (lambda output, _: (output.sum(), output), "(a tensor of shape (), a tensor of shape (4"),
        (lambda output, _: (output.sum(), None), "(a tensor of shape (), NoneType)"),
        (lambda output, _: (output.sum(),) * 3, "(a tensor of shape (), a tensor of shape (), a t"),
        (lambda output, _: {"loss": output.sum()}, "dict"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, got: str) -> None:
    executor = Executor(make.gpipe(make.straight([6]), 2), built(), loss, dtype=torch.float64)
    with pytest.raises(InputError, match=rf"or a pair \(sum, count\).*, got {re.escape(got)}"):
        executor.step(*vectors(8))


def test_a_count_below_nothing_is_refused() -> None:
    executor = Executor(
        make.gpipe(make.straight([6]), 2), built(), lambda output, _: (output.sum(), -1)
    )
    with pytest.raises(InputError, match="the loss counts -1; a count must be a number from 0 on"):
        executor.step(*vectors(8))


def test_a_norm_needs_a_step_of_the_whole_model() -> None:
    stash = make.one_f_one_b(make.straight([6]), 2, "stash")
    for plan, clip_norm, complaint in (
        (stash, 1.0, "with 'stash' weights every stage updates at different times"),
        (PLANS["one"], 0.0, "clip_norm must be a positive number, got 0"),
        (PLANS["one"], float("nan"), "clip_norm must be a positive number, got nan"),
    ):
        with pytest.raises(InputError, match=complaint):
            Executor(plan, built(), clip_norm=clip_norm)


class ClippingSGD(torch.optim.SGD):
    """Clips by the norm of what it is given."""


def with_maximum(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr=0.1)
    made.defaults["max_grad_norm"] = 1.0
    return made


def refused(_: Any, rank: int, plan: PipelinePlan, optimizer: Any) -> str | None:
    try:
        Executor(plan, built(), optimizer=optimizer)
    except InputError as error:
        return str(error)
    return None


def test_an_optimizer_that_clips_a_stage_is_refused(ranks: Ranks) -> None:
    plan = make.gpipe(make.straight([3, 3]), 2)
    for optimizer, name in (
        (partial(ClippingSGD, lr=0.1), "ClippingSGD"),
        (with_maximum, r"SGD with max_grad_norm=1.0"),
    ):
        for line in ranks.run(refused, 2, plan, optimizer):
            assert re.fullmatch(rf"the optimizer {name} clips[^\n]+clip_norm[^\n]+", line)
        assert refused(None, 0, PLANS["one"], optimizer) is None  # all is in one stage
