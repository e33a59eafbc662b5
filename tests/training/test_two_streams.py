"""Plans with a sub-stream on processes: equal to one stream to the bit, and without races.

There is no GPU here. What can be shown without one is that the program does the same where streams
do nothing, and that the calls of the interface order all accesses to the same memory.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import UNSHRUNK, examples, slow_after

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training_plans as make  # noqa: E402
from models import ResidualMLP, vectors  # noqa: E402
from races import Accesses, RecordedStreams, in_two_streams  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch import nn  # noqa: E402

from stagewright.executor.programs.periodic import lower_backward_first  # noqa: E402
from stagewright.executor.programs.program import waits  # noqa: E402
from stagewright.executor.training import preparation  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.actions import parse_action  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402

LAYERS, STEPS = 6, 4
LOSS = torch.nn.functional.cross_entropy


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def one_stream(text: str, layers: int = LAYERS) -> PipelinePlan:
    order = [parse_action(word) for word in text.split()]
    stages = [Stage((i, i + 1), ("a",)) for i in range(layers)]
    microbatches = 1 + max(one.microbatch or 0 for one in order)
    return make.plan_in_order(stages, microbatches, {"a": order}, begins="backward")


DELAYED = one_stream("5I0 4I0 5W0 3I0 4W0 2I0 3W0 1I0 2W0 0I0 1W0 0W0 0F0 1F0 2F0 3F0 4F0 5F0")
LATE = one_stream("5I0 4I0 3I0 2I0 1I0 0B0 0F0 1W0 1F0 2W0 2F0 3W0 3F0 4W0 4F0 5W0 5F0")
MIXED = one_stream(
    "5B1 5I0 4B0 5W0 4B1 3B1 3B0 2I0 2I1 1I1 1B0 0B0 1W1 0B1 0F0 2W1 2W0 "
    "1F0 0F1 2F0 1F1 3F0 2F1 3F1 4F0 4F1 5F0 5F1"
)


def recomputed(plan: PipelinePlan) -> PipelinePlan:
    return replace(plan, stages=tuple(replace(one, recompute="full") for one in plan.stages))


@st.composite
def plans_alone(draw: st.DrawFn) -> PipelinePlan:
    """Any order on one device, with any weight gradients in the sub-stream."""
    plan = draw(make.plans(LAYERS, (1,), weights=["flush"], begins="backward", max_microbatches=3))
    words = sorted({one.action for one in plan.actions if "W" in one.action})
    return in_two_streams(plan, draw(st.sets(st.sampled_from(words))) if words else ())


def model() -> nn.Module:
    torch.manual_seed(0)
    return ResidualMLP()


def batches(plan: PipelinePlan) -> list[tuple[Any, Any]]:
    samples = make.even_samples(plan.stages) * plan.microbatches * 2
    return [vectors(samples, i) for i in range(STEPS)]


# --- The same program, streams doing nothing -----------------------------------------------------


def trained(_: Any, rank: int, plan: PipelinePlan) -> Any:
    executor = Executor(plan, model(), LOSS, adam)
    losses = [executor.step(*batch) for batch in batches(plan)]
    executor.finish()
    return executor.parameters_on_first_rank(), losses


def replicated(plan: PipelinePlan) -> PipelinePlan:
    """The plan's order on two devices that share every microbatch."""
    order = [parse_action(one.action) for one in plan.actions]
    stages = [Stage((i, i + 1), ("a", "b")) for i in range(LAYERS)]
    return make.plan_in_order(stages, 1, {"a": order, "b": order}, begins="backward")


@pytest.mark.parametrize("plan", [DELAYED, LATE, MIXED, replicated(DELAYED)])
def test_two_streams_train_what_one_does_to_the_bit(ranks: Ranks, plan: PipelinePlan) -> None:
    world = len(plan.stages[0].devices)
    expected, right = ranks.run(trained, world, plan)[0]
    found, losses = ranks.run(trained, world, in_two_streams(plan))[0]
    assert losses == right
    assert losses[-1] is not None
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# --- Every access to memory ----------------------------------------------------------------------


@contextmanager
def streams_are(streams: RecordedStreams) -> Iterator[None]:
    before = preparation.make_streams
    preparation.make_streams = lambda _: streams
    try:
        yield
    finally:
        preparation.make_streams = before


def races(plan: PipelinePlan, dropped: Collection[int] = (), keeps: bool = True) -> list[str]:
    """Races in two windows and the drain; the first forwards are done before."""
    streams = RecordedStreams(dropped, keeps)
    first, second, third, _ = batches(plan)
    with streams_are(streams):
        executor = Executor(plan, model(), LOSS, adam)
        executor.step(*first)
        with Accesses(streams):
            executor.step(*second)
            executor.step(*third)
            executor.finish()
    assert streams.waited == awaited(plan)
    return streams.races


def awaited(plan: PipelinePlan) -> set[int]:
    """The events of the window and of the drain."""
    program = lower_backward_first(plan)
    rows = (program.segments[1][0], program.drains[1][0])
    return {event for row in rows for event in waits(row) if event is not None}


def of_the_first_stage(plan: PipelinePlan) -> set[int]:
    """Events of the first stage's input gradients: data need none, so nothing is computed."""
    row = lower_backward_first(plan).segments[1][0]
    return {i for i, one in enumerate(row) if str(one).startswith("0I")}


@pytest.mark.parametrize("plan", slow_after(2, [DELAYED, MIXED, LATE, recomputed(DELAYED)]))
def test_no_memory_is_raced_for_and_every_wait_is_needed(plan: PipelinePlan) -> None:
    streamed = in_two_streams(plan)
    assert races(streamed) == []
    events = awaited(streamed) - of_the_first_stage(streamed)
    assert events
    for event in events:
        assert races(streamed, dropped=[event]), f"event {event} is awaited in vain"


def test_memory_of_the_other_stream_is_kept_while_it_is_in_use() -> None:
    found = races(in_two_streams(DELAYED), keeps=False)
    assert found
    assert all("reads memory of the other stream" in one for one in found)


@examples(20, phases=UNSHRUNK)
@given(plans_alone())
def test_random_plans_race_for_no_memory(plan: PipelinePlan) -> None:
    if any(one.stream is not None for one in plan.actions):
        assert races(plan) == []
