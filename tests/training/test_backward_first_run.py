"""Plans between two losses on processes: the parameters are those of plain training."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
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
from models import CLASSES, EXAMPLES, WIDTH, ResidualMLP, vectors  # noqa: E402
from ranks import Ranks, RanksFailed  # noqa: E402
from torch import nn  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from stagewright.cli import app  # noqa: E402
from stagewright.executor.measuring.compare import compare, measured_plan  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.actions import parse_action  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage, save_plan  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402

LAYERS = 6
STEPS = 4
CROSS_ENTROPY = torch.nn.functional.cross_entropy
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)


def dropping() -> list[nn.Module]:
    """Six layers, every other one of which draws what it drops."""
    inner = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3 * (i % 2))) for i in range(LAYERS - 1)
    ]
    return [*inner, nn.Linear(WIDTH, CLASSES)]


def built(kind: Any) -> Any:
    torch.manual_seed(0)
    model = kind()
    return [one.double() for one in model] if isinstance(model, list) else model.double()


def doubles(plan: PipelinePlan, steps: int = STEPS) -> list[tuple[Any, Any]]:
    samples = make.even_samples(plan.stages) * plan.microbatches
    return [(x.double(), y) for x, y in (vectors(samples, i) for i in range(steps))]


def world(plan: PipelinePlan) -> int:
    return len({name for stage in plan.stages for name in stage.devices})


def layerwise(*devices: str) -> list[Stage]:
    """A stage per layer, on the devices named one after another and again from the first."""
    return [Stage((i, i + 1), tuple(devices[i % len(devices)])) for i in range(LAYERS)]


def row(text: str) -> list[Any]:
    return [parse_action(word) for word in text.split()]


def reverse_first(k: int, whole: bool = False) -> PipelinePlan:
    """Data parallelism on two devices; weight gradients of the first k stages in reverse order."""
    words = []
    for s in reversed(range(LAYERS)):
        words += [f"{s}B0"] if whole and s >= k else [f"{s}I0"] + [f"{s}W0"] * (s >= k)
    words += [f"{s}W0" for s in range(k)] + [f"{s}F0" for s in range(LAYERS)]
    stages, order = layerwise("ab"), row(" ".join(words))
    return make.plan_in_order(stages, 1, {"a": order, "b": order}, begins="backward")


def modulo(microbatches: int = 2) -> PipelinePlan:
    """A layer for each of two devices in turn; weight gradients as soon as nothing else is due."""
    orders: dict[str, list[Any]] = {"a": [], "b": []}
    for s in reversed(range(LAYERS)):
        for kind in "IW":
            orders["ab"[s % 2]] += row(" ".join(f"{s}{kind}{m}" for m in range(microbatches)))
    for s in range(LAYERS):
        orders["ab"[s % 2]] += row(" ".join(f"{s}F{m}" for m in range(microbatches)))
    return make.plan_in_order(layerwise("a", "b"), microbatches, orders, begins="backward")


def run(
    _: Any, rank: int, plan: PipelinePlan, model: Any, batches: Any, optimizer: Any,
    drains: Sequence[int], loss: Any = CROSS_ENTROPY,
) -> Any:  # fmt: skip
    """Parameters on rank 0; the losses of steps, and what drains returned."""
    executor = Executor(plan, model, loss, optimizer, dtype=torch.float64)
    found = []
    for i, batch in enumerate(batches):
        found.append(executor.step(*batch))
        if i in (*drains, len(batches) - 1):
            assert executor.finish() == []
    return executor.parameters_on_first_rank(), found


def require_trained(
    ranks: Ranks, plan: PipelinePlan, kind: Any = dropping, optimizer: Any = SGD,
    drains: Sequence[int] = (),
) -> Any:  # fmt: skip
    model, batches = built(kind), doubles(plan)
    results = ranks.run(run, world(plan), plan, model, batches, optimizer, drains)
    expected = training.train(plan, model, batches, CROSS_ENTROPY, optimizer)
    assert results[0][0].keys() == expected.state.keys()
    for name, value in expected.state.items():
        torch.testing.assert_close(results[0][0][name], value, rtol=1e-9, atol=1e-12, msg=name)
    devices = dict.fromkeys(name for stage in plan.stages for name in stage.devices)
    for device, (_, losses) in zip(devices, results, strict=True):
        if device in plan.stages[-1].devices:
            assert losses == pytest.approx(expected.losses, rel=1e-9)
        else:
            assert losses == [None] * STEPS
    return results


ALONE = make.plan_in_order(
    layerwise("a"),
    2,
    {"a": row("5B1 5I0 4B0 5W0 4B1 3B1 3B0 2I0 2I1 1I1 1B0 0B0 1W1 0B1 0F0 2W1 2W0 "
              "1F0 0F1 2F0 1F1 3F0 2F1 3F1 4F0 4F1 5F0 5F1")},
    begins="backward",
)  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "kind", "optimizer", "drains"),
    [
        pytest.param(reverse_first(0, whole=True), dropping, SGD, (), id="conventional"),
        pytest.param(reverse_first(3), ResidualMLP, ADAM, (), id="reverse first-3"),
        pytest.param(
            make.with_steps(reverse_first(LAYERS)), dropping, SGD, (1,), id="reverse all, drained"
        ),
        pytest.param(modulo(), ResidualMLP, SGD, (), id="modulo"),
        pytest.param(ALONE, dropping, ADAM, (0, 1), id="one device"),
    ],
)
def test_known_orders(
    ranks: Ranks, plan: PipelinePlan, kind: Any, optimizer: Any, drains: Sequence[int]
) -> None:
    require_trained(ranks, plan, kind, optimizer, drains)


@examples(5, quick=1, phases=UNSHRUNK)
@given(data=st.data())
def test_random_orders(ranks: Ranks, data: Any) -> None:
    plan = data.draw(make.plans(LAYERS, weights=["flush"], begins="backward", max_microbatches=3))
    if data.draw(st.booleans()):
        plan = make.with_steps(plan)
    require_trained(ranks, plan, drains=data.draw(st.sampled_from([(), (1,)])))


@pytest.mark.parametrize("k", slow_after(1, [2, 0, LAYERS]))
def test_to_the_bit_the_result_of_a_barrier(ranks: Ranks, k: int) -> None:
    """A stage per layer with its own update, against one stage that waits for everything."""
    plan, model = reverse_first(k), built(ResidualMLP)
    barrier = make.plan_in_order(
        [Stage((0, LAYERS), ("a", "b"))], 1, {name: row("0F0 0B0") for name in "ab"}
    )
    batches = doubles(plan)
    found, losses = ranks.run(run, 2, plan, model, batches, SGD, ())[0]
    expected, right = ranks.run(run, 2, barrier, model, batches, SGD, ())[0]
    assert losses == right
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def torchs_own(_: Any, rank: int, model: Any, batches: Any) -> dict[str, Any]:
    """The parameters that DistributedDataParallel trains, each rank on half of the samples."""
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = SGD(parallel.parameters())
    for inputs, targets in batches:
        half = len(targets) // 2
        mine = slice(rank * half, (rank + 1) * half)
        optimizer.zero_grad()
        CROSS_ENTROPY(parallel(inputs[mine]), targets[mine]).backward()
        optimizer.step()
    return {name: one.detach() for name, one in model.named_parameters()}


def test_torchs_own_data_parallelism_trains_the_same(ranks: Ranks) -> None:
    plan, model = reverse_first(3), built(ResidualMLP)
    batches = doubles(replace(plan, microbatches=2))
    found, _ = ranks.run(run, 2, plan, model, batches, SGD, ())[0]
    right = ranks.run(torchs_own, 2, model, batches)[0]
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def counted(output: Any, targets: Any) -> Any:
    """A sum over the even targets, and their number."""
    chosen = targets % 2 == 0
    return CROSS_ENTROPY(output[chosen], targets[chosen], reduction="sum"), chosen.sum()


def test_a_loss_that_counts_is_normalised_over_its_own_mini_batch(ranks: Ranks) -> None:
    plan, model = reverse_first(2), built(dropping)
    batches = doubles(replace(plan, microbatches=6))
    found, losses = ranks.run(run, 2, plan, model, batches, SGD, (), counted)[0]
    expected = training.train(plan, model, batches, counted, SGD)
    assert losses == pytest.approx(expected.losses)
    for name, value in expected.state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


# --- Traces -----------------------------------------------------------------------------------


def traced(_: Any, rank: int, plan: PipelinePlan, model: Any, batches: Any, drain: int) -> Any:
    executor = Executor(plan, model, CROSS_ENTROPY, SGD, dtype=torch.float64, trace=True)
    losses = []
    for i, batch in enumerate(batches):
        losses.append(executor.step(*batch))
        if i in (drain, len(batches) - 1):
            executor.finish()
        if i == 0:
            with pytest.raises(InputError, match="in flight after step 1"):
                executor.trace_on_first_rank()
    return executor.trace_on_first_rank(), losses


@pytest.mark.parametrize("plan", [make.with_steps(reverse_first(2), 1.0), modulo(), ALONE])
def test_a_trace_has_the_windows_between_two_losses(ranks: Ranks, plan: PipelinePlan) -> None:
    results = ranks.run(traced, world(plan), plan, built(dropping), doubles(plan, 6), 2)
    trace, losses = results[0][0], next(own for _, own in results if own[0] is not None)
    assert [one.step for one in trace.steps] == [1, 2, 4, 5]
    assert [one.loss for one in trace.steps] == pytest.approx([losses[i] for i in (1, 2, 4, 5)])
    planned = Counter((one.device, one.action) for one in plan.actions)
    for step in trace.steps:
        found = Counter((one.device, one.action) for one in step.actions)
        assert all("UPDATE" in action for _, action in found - planned)
        assert planned - found == Counter()
        require_own_updates_first(step.actions)
    compared = compare(plan, trace)
    assert compared.steps == 3
    assert measured_plan(plan, trace).is_backward_first


def require_own_updates_first(actions: Sequence[Any]) -> None:
    """On each device a stage does its backwards, its update, and then its forwards."""
    for device in {one.device for one in actions}:
        own = sorted(
            (one for one in actions if one.device == device and one.sources is None),
            key=lambda one: one.start_seconds,
        )
        for one, other in pairwise(own):
            assert one.finish_seconds <= other.start_seconds
        kinds: dict[int, str] = {}
        for one in own:
            action = parse_action(one.action)
            phase = {"F": "f", "UPDATE": "u"}.get(str(action.kind), "b")
            kinds[action.stage] = kinds.get(action.stage, "") + phase
        for text in kinds.values():
            assert text == "b" * text.count("b") + "u" + "f" * text.count("f")


# --- Checkpoints and mistakes -----------------------------------------------------------------


def in_two_runs(_: Any, rank: int, plan: PipelinePlan, model: Any, batches: Any) -> Any:
    """Parameters on rank 0 of a run in one piece, and of one that begins again after two steps."""

    def new() -> Executor:
        return Executor(plan, model, CROSS_ENTROPY, ADAM, dtype=torch.float64)

    def trained(executor: Executor, some: Any) -> Executor:
        for batch in some:
            executor.step(*batch)
        with pytest.raises(InputError, match="in flight after step"):
            executor.state()
        executor.finish()
        return executor

    whole = trained(new(), batches).parameters_on_first_rank()
    first, second = trained(new(), batches[:2]), new()
    second.load_state({name: one.clone() for name, one in first.state().items()}, first.steps_done)
    return whole, trained(second, batches[2:]).parameters_on_first_rank()


def test_a_run_is_resumed_as_if_it_had_not_ended(ranks: Ranks) -> None:
    plan = modulo()  # every rank's share has all that it needs
    whole, resumed = ranks.run(in_two_runs, 2, plan, built(dropping), doubles(plan))[0]
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


def test_updates_that_need_the_gradients_of_others_are_refused(ranks: Ranks) -> None:
    with pytest.raises(InputError, match="clip_norm needs all gradients before the first update"):
        Executor(ALONE, dropping(), CROSS_ENTROPY, SGD, clip_norm=1.0)
    tied = EXAMPLES["dropping-transformer"].build
    stages = [Stage((i, i + 1), ("a",)) for i in range(8)]
    order = [f"{s}B0" for s in reversed(range(8))] + [f"{s}F0" for s in range(8)]
    plan = make.plan_in_order(stages, 1, {"a": row(" ".join(order))}, begins="backward")
    with pytest.raises(InputError, match=r"shared by stages .* begins with the backwards"):
        Executor(plan, tied(), CROSS_ENTROPY, SGD)


def infinite(_: Any, rank: int, plan: PipelinePlan) -> None:
    executor = Executor(plan, dropping(), CROSS_ENTROPY, SGD)
    for inputs, targets in (vectors(4, i) for i in range(3)):
        executor.step(inputs * (float("inf") if executor.steps_done == 1 else 1), targets)


def test_a_loss_that_is_not_finite_is_named(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"loss of microbatch 0 on stage 5 is nan in step 2"):
        ranks.run(infinite, 2, reverse_first(2))


# --- The command ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_trains_resumes_traces_and_compares(tmp_path: Path) -> None:
    job = Job(tmp_path)
    order = {
        "a": row("2I0 2W0 2I1 0I0 2W1 0I1 0W0 0W1 0F0 0F1 2F0 2F1"),
        "b": row("3I0 3I1 1I0 3W0 1I1 3W1 1W0 1W1 1F0 1F1 3F0 3F1"),
    }
    plan = make.plan_in_order(layerwise("a", "b")[:4], 2, order, begins="backward")
    save_plan(plan, tmp_path / "window.json")
    saved = ["--save-parameters", "window.pt", "--checkpoint", "kept", "--checkpoint-every", 2]
    job.run("--steps", 3, *saved, plan="window.json")
    job.run("--steps", 8, *saved, "--resume", "--trace", "trace.json", plan="window.json")
    job.run("--steps", 8, "--save-parameters", "one.pt", plan="one.json")
    found, right = (torch.load(tmp_path / name) for name in ("window.pt", "one.pt"))
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
    files = [str(tmp_path / name) for name in ("window.json", "trace.json")]
    answer = CliRunner().invoke(app, ["compare", *files, "--png", str(tmp_path / "both.png")])
    assert (answer.exit_code, answer.stderr) == (0, ""), answer.exception
