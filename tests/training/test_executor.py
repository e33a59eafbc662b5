"""The executor's parameters after some steps are those of a single process."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import UNSHRUNK, examples

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training  # noqa: E402
import training_plans as make  # noqa: E402
from models import EXAMPLES, vectors  # noqa: E402
from ranks import Ranks  # noqa: E402

from stagewright.executor.capture.tracing import capture  # noqa: E402
from stagewright.executor.measuring.compare import compare  # noqa: E402
from stagewright.executor.training import preparation  # noqa: E402
from stagewright.executor.training.interpreter.last_stage import OutOfMemory  # noqa: E402
from stagewright.executor.training.ranks import rank as rank_module  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan  # noqa: E402

STEPS = 3
CROSS_ENTROPY = torch.nn.functional.cross_entropy
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# A key's bias has no gradient but rounding, which a smaller eps would make a step of.
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)


def run(
    _: Any, rank: int, plan: PipelinePlan, model: Any, batches: Any, loss: Any, optimizer: Any
) -> Any:
    """Parameters on rank 0, and the losses where the last stage is."""
    executor = Executor(plan, model, loss, optimizer, dtype=torch.float64)
    losses = [executor.step(*batch) for batch in batches]
    return executor.parameters_on_first_rank(), losses


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def compare_with_reference(
    ranks: Ranks, plan: PipelinePlan, example: Any, samples: int, optimizer: Any = SGD
) -> None:
    """Carry out ``plan`` on the pool, and by the oracle."""
    torch.manual_seed(0)
    model = example.build().double()
    batches = [example.batch(samples * plan.microbatches, seed) for seed in range(STEPS)]
    batches = [tuple(_double(x) for x in batch) for batch in batches]
    world = len({name for stage in plan.stages for name in stage.devices})
    results = ranks.run(run, world, plan, model, batches, CROSS_ENTROPY, optimizer)
    expected = training.train(plan, model, batches, CROSS_ENTROPY, optimizer)
    require_equal(results[0][0], expected.state)
    for _, losses in results:
        for step, value in enumerate(losses):
            if value is not None:
                assert value == pytest.approx(expected.losses[step], rel=1e-9)


def _double(x: Any) -> Any:
    return x.double() if x.is_floating_point() else x


MODELS = {
    "residual-mlp": EXAMPLES["residual-mlp"],
    "tied-transformer": EXAMPLES["tied-transformer"],
    "dropping-transformer": EXAMPLES["dropping-transformer"],
    "used-twice": EXAMPLES["used-twice"],
}


@pytest.mark.covering
@pytest.mark.parametrize("weights", ["flush", "double-buffer", "stash", "stash+vertical-sync"])
@pytest.mark.parametrize("name", ["residual-mlp", "dropping-transformer"])
def test_one_forward_one_backward(ranks: Ranks, weights: Any, name: str) -> None:
    example = MODELS[name]
    layers = len(capture(example.build()).layers)
    ties = name == "dropping-transformer" and weights.startswith("stash")
    counts = [layers] if ties else [1, layers - 2, 1]
    plan = make.one_f_one_b(make.straight(counts), 5, weights)
    compare_with_reference(ranks, plan, example, 2)


# Shrinking would take minutes: every example starts a process group.
@examples(40, quick=2, phases=UNSHRUNK)
@given(data=st.data())
def test_random_plans(ranks: Ranks, data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(MODELS)))
    example = MODELS[name]
    # Stages that share a parameter cannot update it at different times.
    weights = make.ALL_WEIGHTS if name == "residual-mlp" else ("flush", "double-buffer")
    layers = len(capture(example.build()).layers)
    plan = data.draw(make.plans(layers, weights=weights))
    optimizer = data.draw(st.sampled_from([SGD, ADAM]))
    samples = make.even_samples(plan.stages)
    compare_with_reference(ranks, plan, example, samples, optimizer)


class Slow(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        time.sleep(0.1)
        return super().forward(x)


def traced(_: Any, rank: int, plan: PipelinePlan) -> Any:
    width = vectors(1)[0].shape[1]
    executor = Executor(plan, [torch.nn.Linear(width, width), Slow(width, width)], trace=True)
    executor.step(*vectors(8))
    return executor.trace_on_first_rank()


def test_a_transfer_ends_when_it_arrives_and_not_when_it_is_needed(ranks: Ranks) -> None:
    plan = make.gpipe(make.straight([1, 1]), 2)
    trace = ranks.run(traced, 2, plan)[0]
    (step,) = trace.steps
    updates = {"0UPDATE", "1UPDATE"}
    assert {one.action for one in step.actions} == {one.action for one in plan.actions} | updates
    at = {one.action: one for one in step.actions}
    assert at["0SEND_F1"].finish_seconds < at["1F0"].finish_seconds <= at["1F1"].start_seconds


LARGE = 4_000_000  # numbers


class Holding(torch.nn.Linear):
    """Keeps much memory in its forward."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) + torch.zeros(LARGE).add_(1.0).mean()


def traced_holding(_: Any, rank: int, plan: PipelinePlan) -> Any:
    width = vectors(1)[0].shape[1]
    layers = [torch.nn.Linear(width, width), Holding(width, width)]
    executor = Executor(plan, layers, trace=True)
    executor.step(*vectors(8))
    return executor.trace_on_first_rank()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_trace_has_the_memory_of_each_rank_and_what_it_waited_for_a_core(ranks: Ranks) -> None:
    plan = make.gpipe(make.straight([1, 1]), 2)
    ranks.stop()  # in new processes: others hold memory that was freed, and use it again
    trace = ranks.run(traced_holding, 2, plan)[0]
    assert trace.reference_seconds > 0
    assert trace.memory.kind == "resident"
    assert trace.memory.peak_bytes.keys() == {"d0", "d1"}
    assert trace.memory.peak_bytes["d1"] >= 4 * LARGE
    (step,) = trace.steps
    assert len(step.waited_seconds) == len(step.actions)
    explanation = compare(plan, trace).explanation
    assert explanation is not None
    pair = compare(plan, trace).iteration_seconds
    every = sum(one.seconds for one in explanation.causes) + explanation.rest_seconds
    assert every == pytest.approx(pair.measured - pair.predicted)


def test_what_cannot_fit_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make.gpipe(make.straight([6]), 4)
    monkeypatch.setattr(preparation, "total_bytes", lambda device: 1000.0)
    executor = Executor(plan, EXAMPLES["residual-mlp"].build())
    with pytest.raises(OutOfMemory, match=r"stage 0 does not fit: rank 0 \(d0\) needs .* short"):
        executor.step(*vectors(8))
    assert executor.steps_done == 0


def test_a_rank_lowers_and_verifies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what stages share is only known from the model: here the norm of all gradients."""
    done = {name: counted(monkeypatch, name) for name in ("lower_any", "verify")}
    plan = make.gpipe(make.straight([6]), 4)
    Executor(plan, EXAMPLES["residual-mlp"].build(), clip_norm=1.0)
    assert {name: len(calls) for name, calls in done.items()} == {"lower_any": 1, "verify": 1}


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[None]:
    real, calls = getattr(rank_module, name), list[None]()

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return real(*args, **options)

    monkeypatch.setattr(rank_module, name, counting)
    return calls
