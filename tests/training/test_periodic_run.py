"""Periodic plans on processes: what is trained is what their rule of the weights means."""

import gc
import re
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import UNSHRUNK, examples, slow_after

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training  # noqa: E402
import training_plans as make  # noqa: E402
from launches import Job  # noqa: E402
from models import CLASSES, EXAMPLES, WIDTH, ResidualMLP, tokens, vectors  # noqa: E402
from ranks import Ranks, RanksFailed  # noqa: E402
from torch import nn  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from stagewright.cli import app  # noqa: E402
from stagewright.executor.programs.periodic import lower_periodic  # noqa: E402
from stagewright.executor.programs.trace import TracedStep  # noqa: E402
from stagewright.executor.training import preparation  # noqa: E402
from stagewright.executor.training.interpreter.last_stage import OutOfMemory  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.patterns.one_f_one_b import one_f_one_b_star, period_bound  # noqa: E402
from stagewright.formulations.plans.actions import ActionKind  # noqa: E402
from stagewright.formulations.plans.periodic import unroll_run  # noqa: E402
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, Stage, save_plan  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402
from stagewright.graphs.documents.units import format_seconds  # noqa: E402

LAYERS = 6
STEPS = 5
CROSS_ENTROPY = torch.nn.functional.cross_entropy
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)


def dropping() -> list[nn.Module]:
    """Six layers, every other one of which draws what it drops."""
    inner = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3 * (i % 2))) for i in range(LAYERS - 1)
    ]
    return [*inner, nn.Linear(WIDTH, CLASSES)]


MODELS = {  # how it is made, its mini-batches, and its layers
    "residual-mlp": (ResidualMLP, vectors, LAYERS),
    "dropping": (dropping, vectors, LAYERS),
    "tied": (EXAMPLES["dropping-transformer"].build, tokens, 8),
    "used-twice": (EXAMPLES["used-twice"].build, vectors, 4),
}


def run(
    _: Any,
    rank: int,
    plan: PipelinePlan,
    model: Any,
    batches: Any,
    optimizer: Any,
    drains: Sequence[int] = (),
) -> Any:
    """Parameters on rank 0; what every step returned, and what the drains behind it did."""
    executor = Executor(plan, model, CROSS_ENTROPY, optimizer, dtype=torch.float64)
    found = []
    for i, batch in enumerate(batches):
        loss = executor.step(*batch)
        found.append((loss, executor.finish() if i in (*drains, len(batches) - 1) else []))
    return executor.parameters_on_first_rank(), found


def doubles(samples: int, name: str = "dropping", steps: int = STEPS) -> list[tuple[Any, Any]]:
    batches = [MODELS[name][1](samples, i) for i in range(steps)]
    return [(x.double() if x.is_floating_point() else x, y) for x, y in batches]


def built(name: str) -> Any:
    torch.manual_seed(0)
    model: Any = MODELS[name][0]()
    return [one.double() for one in model] if isinstance(model, list) else model.double()


def world(plan: PipelinePlan) -> int:
    return len({name for stage in plan.stages for name in stage.devices})


def require_equal(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol / 1e3, msg=name)


def losses_of(results: Any) -> list[list[float]]:
    """Per rank the losses in the order in which they came."""
    return [
        [one for loss, rest in steps for one in (loss, *rest) if one is not None]
        for _, steps in results
    ]


def compare_with_reference(
    ranks: Ranks,
    plan: PipelinePlan,
    name: str = "residual-mlp",
    optimizer: Any = SGD,
    drains: Sequence[int] = (),
) -> Any:
    """Carry out ``plan`` on the pool, and by the oracle; what the ranks returned."""
    model, samples = built(name), make.even_samples(plan.stages) * plan.microbatches
    batches = doubles(samples, name)
    results = ranks.run(run, world(plan), plan, model, batches, optimizer, drains)
    expected = training.train(plan, model, batches, CROSS_ENTROPY, optimizer, drains=drains)
    require_equal(results[0][0], expected.state)
    last = plan.stages[-1].devices
    devices = dict.fromkeys(name for stage in plan.stages for name in stage.devices)
    for device, losses in zip(devices, losses_of(results), strict=True):
        right = list(expected.losses) if device in last else []
        assert losses == pytest.approx(right, rel=1e-9)
    return results


def on(*groups: str, recompute: Any = "none", layers: int = LAYERS) -> list[Stage]:
    """A layer for each stage but the last, which has the rest; a letter is a device."""
    stops = [*range(1, len(groups)), layers]
    return [
        Stage((s, stop), tuple(group), recompute=recompute)
        for s, (stop, group) in enumerate(zip(stops, groups, strict=True))
    ]


def slow_links(kind: ActionKind) -> float:
    return 3.0 if kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD) else 2.0


def waiting(*seconds: float) -> Any:
    turns = cycle(seconds)
    return lambda: next(turns)


@pytest.mark.parametrize(
    ("plan", "name", "optimizer"),
    [
        pytest.param(make.overlapping(on("a"), 2), "dropping", SGD, id="one device"),
        pytest.param(make.overlapping(on("a", "b"), 1), "dropping", ADAM, id="one microbatch"),
        pytest.param(
            make.overlapping(on("a", "b", "a"), 2), "residual-mlp", SGD, id="there and back"
        ),
        pytest.param(
            make.overlapping(on("a", "b", "c", "b", recompute="full"), 3, slow_links),
            "dropping", ADAM, id="two stages on a device",
        ),
        pytest.param(
            make.overlapping(on("ab", "c", recompute="layer"), 2), "residual-mlp", SGD,
            id="a group first",
        ),
        pytest.param(
            make.overlapping(on("a", "bc", "a"), 2, wait=waiting(1, 0, 2)), "dropping", ADAM,
            id="a group between",
        ),
        pytest.param(
            make.overlapping(on("a", "bc"), 1, slow_links), "residual-mlp", ADAM, id="a group last"
        ),
        pytest.param(
            make.overlapping(on("ab", "cd", "ab"), 2, slow_links), "dropping", SGD, id="two groups"
        ),
        pytest.param(
            make.in_two(make.overlapping(on("a", "bc", "a", recompute="full"), 2)),
            "dropping", ADAM, id="backwards in two",
        ),
        pytest.param(
            make.overlapping([replace(one, offload=True) for one in on("a", "b")], 2),
            "dropping", ADAM, id="offloaded",
        ),
        *(
            pytest.param(
                make.overlapping(stages, microbatches, slow_links, weights=weights),
                "dropping", optimizer, id=f"{weights}, {name}",
            )
            for weights in ("stash", "stash+vertical-sync")
            for name, stages, microbatches, optimizer in (
                ("two ranks", on("a", "b"), 1, ADAM),
                ("three ranks", on("a", "b", "c"), 2, SGD),
                ("there and back", on("a", "b", "a", recompute="full"), 3, SGD),
                ("a group first", on("ab", "c", recompute="layer"), 2, ADAM),
                ("a group last", on("a", "bc"), 1, SGD),
            )
        ),
        pytest.param(
            make.in_two(make.overlapping(on("a", "bc", "a"), 2, weights="stash")),
            "dropping", ADAM, id="stash, backwards in two",
        ),
    ],
)  # fmt: skip
def test_known_plans(ranks: Ranks, plan: PipelinePlan, name: str, optimizer: Any) -> None:
    compare_with_reference(ranks, plan, name, optimizer)


# Shrinking would take minutes: every example starts a process group.
@examples(5, quick=1, phases=UNSHRUNK)
@given(data=st.data())
def test_random_plans(ranks: Ranks, data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(MODELS)))
    # What stages share, they must update together.
    shares = name in ("tied", "used-twice")
    weights = ["double-buffer"] if shares else make.PERIODIC_WEIGHTS
    plan = data.draw(make.periodic_plans(MODELS[name][2], weights=weights))
    drains = data.draw(st.sets(st.integers(0, STEPS - 2), max_size=2))
    optimizer = data.draw(st.sampled_from([SGD, ADAM]))
    compare_with_reference(ranks, plan, name, optimizer, sorted(drains))


@pytest.mark.parametrize(
    ("groups", "microbatches", "wait"),
    [
        pytest.param(("a", "b"), 2, (0,), id="two ranks", marks=pytest.mark.slow),
        pytest.param(("a", "b"), 1, (0, 2, 3), id="the last is ahead"),
        pytest.param(("a", "b", "a"), 2, (0,), id="on one rank"),
        pytest.param(("ab", "c", "ab"), 1, (0, 1), id="on one group", marks=pytest.mark.slow),
        pytest.param(("a", "b", "cd"), 1, (0,), id="a group last"),
    ],
)
def test_a_parameter_of_two_stages(
    ranks: Ranks, groups: tuple[str, ...], microbatches: int, wait: tuple[int, ...]
) -> None:
    stages = on(*groups, layers=8)
    plan = make.overlapping(stages, microbatches, slow_links, waiting(*wait))
    compare_with_reference(ranks, plan, "tied", ADAM)


def star(stages: list[Stage], microbatches: int) -> PipelinePlan:
    """1F1B* at the least period: the first stages keep microbatches of two iterations."""
    problem = make.pattern_of(stages, microbatches, slow_links)
    return make.periodic(stages, problem, one_f_one_b_star(problem, period_bound(problem)))


@pytest.mark.parametrize("microbatches", slow_after(1, [2, 4]))
def test_one_f_one_b_star(ranks: Ranks, microbatches: int) -> None:
    plan = star(on("a", "b"), microbatches)
    first = lower_periodic(plan).segments[-1][0]
    uses = {str(one) for one in first if one.action.kind is ActionKind.USE}
    assert len(uses) == 2  # two iterations are in flight
    compare_with_reference(ranks, plan)


def test_periodic_and_finite_plans_train_the_same(ranks: Ranks) -> None:
    model, batches = built("dropping"), doubles(8)
    finite = make.one_f_one_b(on("a", "b"), 4, "double-buffer")
    plans = (star(on("a", "b"), 4), finite)
    one, other = (ranks.run(run, 2, plan, model, batches, ADAM) for plan in plans)
    require_equal(one[0][0], other[0][0], 1e-12)
    assert losses_of(one) == [pytest.approx(losses, rel=1e-12) for losses in losses_of(other)]


# --- Losses that come later, and the drain ------------------------------------------------------


def late_plan(weights: Any = "double-buffer") -> PipelinePlan:
    """The last stage's forward comes two periods behind the first one's."""
    return make.overlapping(on("a", "b"), 2, slow_links, waiting(0, 2, 3), weights)


def test_losses_come_with_the_step_that_ends_their_mini_batch(ranks: Ranks) -> None:
    found = compare_with_reference(ranks, late_plan())
    first, *others, (loss, rest) = found[1][1]
    assert first == (None, [])
    assert all(loss is not None and rest == [] for loss, rest in others)
    assert loss is not None
    assert len(rest) == 1


def test_a_drain_changes_nothing(ranks: Ranks) -> None:
    plan, model, batches = late_plan(), built("dropping"), doubles(8)
    whole, drained = (
        ranks.run(run, 2, plan, model, batches, SGD, drains) for drains in ((), (0, 2, 3))
    )
    require_equal(drained[0][0], whole[0][0], 0.0)
    assert losses_of(drained) == losses_of(whole)


def in_between(_: Any, rank: int, plan: PipelinePlan) -> list[str]:
    """What is refused while mini-batches are in flight; afterwards all is well."""
    torch.manual_seed(0)
    executor = Executor(plan, dropping(), CROSS_ENTROPY, SGD)
    executor.step(*vectors(8))
    refused = []
    for attempt in (
        executor.state,
        executor.parameters_on_first_rank,
        lambda: executor.load_state({}, 0),
        lambda: executor.step(*vectors(4)),
    ):
        with pytest.raises(InputError) as caught:
            attempt()
        refused.append(str(caught.value))
    executor.finish()
    assert executor.finish() == []
    state = executor.state()
    assert any(key.startswith("previous.") for key in state) == any(
        key.startswith("optimizer.") for key in state
    )
    executor.step(*vectors(4))
    executor.finish()
    assert executor.steps_done == 2
    return refused


def test_what_must_wait_for_the_drain(ranks: Ranks) -> None:
    for refused in ranks.run(in_between, 2, late_plan()):
        for line in refused[:3]:
            assert line == (
                "mini-batches are in flight after step 1: call finish() on all ranks first"
            )
        assert refused[3] == (
            f"a mini-batch of shape (4, {WIDTH}) follows others while they are in flight; call "
            "finish() on all ranks before the shape changes"
        )


def kept_batches(_: Any, rank: int, plan: PipelinePlan) -> list[int]:
    """How many mini-batches are still in memory behind each step, and behind the drain."""
    executor = Executor(plan, dropping(), CROSS_ENTROPY, SGD)
    references, alive = [], []
    for i in range(8):
        inputs, targets = vectors(8, i)
        references += [weakref.ref(inputs), weakref.ref(targets)]
        executor.step(inputs, targets)
        del inputs, targets
        gc.collect()
        alive.append(sum(one() is not None for one in references))
    executor.finish()
    gc.collect()
    return [*alive, sum(one() is not None for one in references)]


def test_mini_batches_are_forgotten_when_they_have_ended(ranks: Ranks) -> None:
    for alive in ranks.run(kept_batches, 2, late_plan()):
        assert max(alive) <= 4
        assert alive[-1] == 0


# --- Traces -------------------------------------------------------------------------------------


def traced(_: Any, rank: int, plan: PipelinePlan, model: Any, batches: Any, drain: int) -> Any:
    """The trace, which is refused while mini-batches are in flight, and this rank's losses."""
    executor = Executor(plan, model, CROSS_ENTROPY, SGD, dtype=torch.float64, trace=True)
    losses = []
    for i, batch in enumerate(batches):
        losses.append(executor.step(*batch))
        if i == 0:
            with pytest.raises(InputError, match="mini-batches are in flight after step 1"):
                executor.trace_on_first_rank()
        if i in (drain, len(batches) - 1):
            losses += executor.finish()
    return executor.trace_on_first_rank(), [one for one in losses if one is not None]


CLOCK_SECONDS = 0.02  # ranks leave a barrier one after another


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        pytest.param(late_plan(), "dropping", id="two ranks"),
        pytest.param(
            make.in_two(make.overlapping(on("a", "bc", "a"), 2, slow_links)),
            "residual-mlp",
            id="a group",
        ),
        pytest.param(
            make.overlapping(on("ab", "c", "ab", layers=8), 2, slow_links), "tied", id="tied"
        ),
        pytest.param(make.overlapping(on("a"), 2), "dropping", id="one device"),
        pytest.param(
            make.overlapping(on("a", "bc"), 2, slow_links, weights="stash"), "dropping", id="stash"
        ),
    ],
)
def test_a_run_between_two_drains_is_one_step_of_the_trace(
    ranks: Ranks, plan: PipelinePlan, name: str
) -> None:
    results = ranks.run(traced, world(plan), plan, built(name), doubles(8, name), 2)
    trace, losses = results[0][0], next(own for _, own in results if own)
    assert [(one.step, one.iterations) for one in trace.steps] == [(0, 3), (3, 2)]
    assert [one.loss for one in trace.steps] == pytest.approx(
        [sum(losses[:3]) / 3, sum(losses[3:]) / 2]
    )
    for step in trace.steps:
        planned = unroll_run(plan, step.iterations * plan.microbatches).actions
        updates = [one for one in step.actions if one.action.endswith("UPDATE")]
        assert Counter((one.device, one.action) for one in updates) == {
            (device, f"{s}UPDATE"): step.iterations
            for s, stage in enumerate(plan.stages)
            for device in stage.devices
            if plan.weights == "double-buffer"  # else they are parts of the backwards
        }
        rest = [one for one in step.actions if one not in updates]
        named = [(one.device, one.action) for one in rest]
        assert sorted(named) == sorted((one.device, one.action) for one in planned)
        require_dependencies(plan, replace(step, actions=tuple(rest), waited_seconds=None))
        finish = max(one.finish_seconds for one in rest)
        assert step.iteration_seconds == finish
        assert 0 < step.update_seconds < max(one.finish_seconds for one in step.actions)


def require_dependencies(plan: PipelinePlan, step: TracedStep) -> None:
    """Each microbatch goes forth and back, and a device does one computation at a time."""
    begun, ended = dict[str, float](), dict[str, float]()
    for one in step.actions:
        assert 0 <= one.start_seconds <= one.finish_seconds
        begun[one.action] = min(begun.get(one.action, one.start_seconds), one.start_seconds)
        ended[one.action] = max(ended.get(one.action, 0.0), one.finish_seconds)
    assert step.iterations is not None
    alone = all(len(stage.devices) == 1 for stage in plan.stages)
    for m in range(step.iterations * plan.microbatches):
        for before, after in pairwise(way_of(plan, m, begun)):
            # On several devices, the first may be ahead of what the last one does before.
            assert ended[before] <= (begun if alone else ended)[after] + CLOCK_SECONDS
    for device in {one.device for one in step.actions}:
        own = [one for one in step.actions if one.device == device and one.sources is None]
        own.sort(key=lambda one: one.start_seconds)
        for one, other in pairwise(own):
            assert one.finish_seconds <= other.start_seconds
        place = {one.action: i for i, one in enumerate(own)}
        for forward in (action for action in place if "F" in action):
            same = [place[name] for kind in "FBIW" if (name := forward.replace("F", kind)) in place]
            assert len(same) > 1
            assert same == sorted(same)


def way_of(plan: PipelinePlan, m: int, there: Collection[str]) -> list[str]:
    """The actions of a microbatch one after another, as far as they are ``there``."""
    stages = range(len(plan.stages))
    way = [f"{s}{kind}{m}" for s in stages for kind in ("F", "SEND_F")]
    way += [f"{s}{kind}{m}" for s in reversed(stages) for kind in ("B", "I", "SEND_B")]
    return [action for action in way if action in there]


# --- Mistakes -----------------------------------------------------------------------------------


def infinite(_: Any, rank: int, plan: PipelinePlan) -> None:
    executor = Executor(plan, dropping(), CROSS_ENTROPY, SGD)
    for i in range(4):
        inputs, targets = vectors(8, i)
        inputs[-1] *= float("inf") if i == 2 else 1.0
        executor.step(inputs, targets)
    executor.finish()


def test_a_loss_that_is_not_finite_is_named(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks.run(infinite, 2, late_plan())
    message = "NonFiniteLoss: the loss of microbatch 1 on stage 1 is nan in step 3"
    assert any(text.startswith(message) for text in failed.value.errors.values())


def test_what_cannot_fit_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "total_bytes", lambda device: 1000.0)
    executor = Executor(make.overlapping(on("a"), 2), dropping())
    with pytest.raises(OutOfMemory, match=r"stage 0 does not fit: rank 0 \(a\) needs .* short"):
        executor.step(*vectors(8))
    executor.finish()
    assert executor.steps_done == 0


# --- The command line ---------------------------------------------------------------------------


def in_two_runs(_: Any, rank: int, plan: PipelinePlan, model: Any, batches: Any) -> Any:
    """Parameters on rank 0 of a run in one piece, and of one that begins again after two steps.

    With stashed weights the run in one piece drains there too: that changes what it trains.
    """

    def trained(executor: Executor, some: Any) -> Executor:
        for batch in some:
            executor.step(*batch)
        executor.finish()
        return executor

    def new() -> Executor:
        return Executor(plan, model, CROSS_ENTROPY, ADAM, dtype=torch.float64)

    executor, rest = new(), batches
    if plan.weights == "stash":
        trained(executor, batches[:2])
        rest = batches[2:]
    whole = trained(executor, rest).parameters_on_first_rank()
    first, second = trained(new(), batches[:2]), new()
    second.load_state({name: one.clone() for name, one in first.state().items()}, first.steps_done)
    return whole, trained(second, batches[2:]).parameters_on_first_rank()


@pytest.mark.parametrize("weights", ["double-buffer", "stash"])
def test_a_run_is_resumed_as_if_it_had_not_ended(ranks: Ranks, weights: Any) -> None:
    plan, batches = late_plan(weights), doubles(8)
    whole, resumed = ranks.run(in_two_runs, 2, plan, built("dropping"), batches)[0]
    require_equal(resumed, whole, 0.0)


@pytest.mark.slow
def test_a_traced_run_is_laid_beside_its_plan(tmp_path: Path) -> None:
    job = Job(tmp_path)
    plan = make.overlapping([Stage((0, 2), ("a",)), Stage((2, 4), ("b",))], 4, slow_links)
    save_plan(plan, tmp_path / "periodic.json")
    out, complaints = job.run("--steps", 12, "--trace", "trace.json", plan="periodic.json")
    assert complaints == []
    assert "trace.json is written" in out
    files = [str(tmp_path / name) for name in ("periodic.json", "trace.json", "both.png")]
    result = CliRunner().invoke(app, ["compare", *files[:2], "--png", files[2]])
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    assert isinstance(plan.schedule, PeriodicSchedule)
    planned = re.escape(format_seconds(plan.schedule.period_seconds))
    assert re.search(
        rf"^predicted period {planned}, measured \S+ [mu]?s \(mean of \d+ microbatches, ",
        result.stdout,
        re.MULTILINE,
    )
    assert Path(files[2]).read_bytes().startswith(b"\x89PNG")
