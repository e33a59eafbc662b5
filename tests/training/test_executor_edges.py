"""The executor at its edges: unusual models, state, memory, mistakes."""

import gc
import os
import resource
import sys
import warnings
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import torch.distributed as dist  # noqa: E402
import training  # noqa: E402
import training_plans as make  # noqa: E402
from models import SEQUENCE, VOCABULARY, WIDTH, TiedTransformer, WithBatchNorm, vectors  # noqa: E402
from profiles import slow_after  # noqa: E402
from ranks import Ranks, RanksFailed  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from stagewright.executor.capture.tracing import capture  # noqa: E402
from stagewright.executor.export import export  # noqa: E402
from stagewright.executor.training.interpreter.exchange import Messages, message_of  # noqa: E402
from stagewright.executor.training.interpreter.last_stage import NonFiniteLoss  # noqa: E402
from stagewright.executor.training.model_checks import warn_of_divided_loss  # noqa: E402
from stagewright.executor.training.ranks.rank import RankPlace  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.actions import Action  # noqa: E402
from stagewright.formulations.plans.plan import PlannedLayer  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402

STEPS = 3
DECAYING = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-3)
RECOMPUTE = ("none", "full", "layer")


def run(
    _: Any,
    rank: int,
    plan: Any,
    model: Any,
    batches: Any,
    loss: Any,
    optimizer: Any,
    **options: Any,
) -> Any:
    """Parameters on rank 0, and the losses where the last stage is."""
    executor = Executor(plan, model, loss, optimizer, **{"dtype": torch.float64} | options)
    losses = [executor.step(*batch) for batch in batches]
    return executor.parameters_on_first_rank(), losses


def world(plan: Any) -> int:
    return len({name for stage in plan.stages for name in stage.devices})


def reference(
    model: Any, microbatches: int, batches: Any, loss: Any, optimizer: Any, autocast: Any = None
) -> Any:
    """One process that runs the same microbatches in order, and adds their gradients up."""
    torch.manual_seed(0)
    model = model()
    module = nn.Sequential(*model) if isinstance(model, list) else model.train()
    stepper = optimizer([one for one in module.parameters() if one.requires_grad])
    for inputs, targets in batches:
        stepper.zero_grad()
        for m in range(microbatches):
            given, wanted = (_microbatch(one, m, microbatches) for one in (inputs, targets))
            given = given if isinstance(given, tuple) else (given,)
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                value = loss(module(*given), wanted)
            (value / microbatches).backward()
        stepper.step()
    return module.state_dict()


def _microbatch(batch: Any, m: int, microbatches: int) -> Any:
    if isinstance(batch, tuple):
        return tuple(_microbatch(one, m, microbatches) for one in batch)
    return batch.chunk(microbatches)[m]


def made(model: Any) -> Any:
    torch.manual_seed(0)
    return model()


def require_equal(found: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=name)


def doubles(samples: int, steps: int = STEPS) -> Any:
    return [(vectors(samples, i)[0].double(), vectors(samples, i)[1]) for i in range(steps)]


def recomputed(plan: Any, recompute: str) -> Any:
    return replace(plan, stages=tuple(replace(one, recompute=recompute) for one in plan.stages))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).double()


# --- Buffers ------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Buffers that are set anew, changed in place, or read by the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("factor", torch.rand(WIDTH).double(), persistent=False)

    def forward(self, x: Any) -> Any:
        self.calls = self.calls + 1
        self.seen += len(x)
        return self.layer(x) * self.factor


class Normed(WithBatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def forward(self, x: Any) -> Any:
        return super().forward(self.counts(x))


def normed() -> nn.Module:
    return Normed().double()


@pytest.mark.covering
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", [make.one_f_one_b, make.zero_bubble_h1])
def test_buffers_change_once_and_in_order(ranks: Ranks, schedule: Any, recompute: str) -> None:
    plan = recomputed(schedule(make.straight([2, 1, 3]), 4), recompute)
    batches = doubles(16)
    results = ranks.run(run, 3, plan, made(normed), batches, F.cross_entropy, DECAYING)
    require_equal(results[0][0], reference(normed, 4, batches, F.cross_entropy, DECAYING))


# --- bfloat16 -----------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Layers that autocast computes in bfloat16, and in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(x + self.second(F.gelu(self.first(x)))))


@pytest.mark.covering
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", [make.one_f_one_b, make.zero_bubble_h1])
def test_bfloat16_is_autocast(ranks: Ranks, schedule: Any, recompute: str) -> None:
    plan = recomputed(schedule(make.straight([1, 3]), 2), recompute)
    batches = [vectors(8, i) for i in range(STEPS)]
    results = ranks.run(
        partial(run, dtype=torch.bfloat16), 2, plan, made(Mixed), batches, F.cross_entropy, DECAYING
    )
    expected = reference(Mixed, 2, batches, F.cross_entropy, DECAYING, torch.bfloat16)
    assert {one.dtype for one in results[0][0].values()} == {torch.float32}
    require_equal(results[0][0], expected, rtol=0.0, atol=0.0)


# --- Models -------------------------------------------------------------------------------------


class ManyValues(nn.Module):
    """Two inputs, integers that pass by a layer, two outputs of which one passes by too."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.scale, self.mix, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: Any, x: Any) -> Any:
        chosen = tokens.argmax(-1)
        early = self.scale(x) + self.token(tokens).sum(1)
        late = self.head(self.mix(early).roll(1, -1))
        return late + chosen[:, None], early


def two_losses(outputs: Any, targets: Any) -> Any:
    return F.mse_loss(outputs[0], targets[0]) + F.l1_loss(outputs[1], targets[1])


def many_values_batches() -> Any:
    return [
        (
            (torch.randint(VOCABULARY, (12, SEQUENCE)), torch.randn(12, WIDTH).double()),
            (torch.randn(12, WIDTH).double(), torch.randn(12, WIDTH).double()),
        )
        for _ in range(STEPS)
    ]


def values_model() -> nn.Module:
    return ManyValues().double()


class Untrained(nn.Module):
    """Frozen, unused, cut off: what has no gradient must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.cut_off, self.middle, self.head, self.unused = (
            linear() for _ in range(5)
        )
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH).double()
        self.norm.bias.requires_grad_(False)
        self.alone = nn.Parameter(torch.ones(3).double())

    def forward(self, x: Any) -> Any:
        x = self.cut_off(self.frozen(x))
        return self.head(self.norm(self.middle(x.detach() + x.detach().cos())))


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Any) -> Any:
        return self.layer(x.detach())


def detached_list() -> Any:
    return [linear(), linear(), Detached(), linear()]


class Times(nn.Module):
    def __init__(self, weight: Any, detached: bool = False) -> None:
        super().__init__()
        self.weight, self.detached = weight, detached

    def forward(self, x: Any) -> Any:
        return x @ (self.weight.detach() if self.detached else self.weight)


def tied_list() -> Any:
    """A parameter of three stages, of which the middle one gives no gradient."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH).double())
    return [Times(weight), nn.Sequential(linear(), Times(weight, True)), linear(), Times(weight)]


def in_place_list() -> Any:
    first = nn.Sequential(nn.ReLU6(inplace=True), linear())
    return [linear(), nn.ReLU(inplace=True), linear(), first]


class Constant(nn.Module):
    """A tensor that is registered nowhere, and weights that a recurrent layer keeps twice."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.rand(WIDTH).double()
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True).double()

    def forward(self, x: Any) -> Any:
        return self.cells((x * self.factor)[:, None])[0][:, 0]


def constant_list() -> Any:
    return [Constant(), linear(), nn.Tanh(), Constant()]


class Unsplittable(nn.Module):
    """Its backward draws random numbers (and multiplies them by nothing)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Any) -> Any:
        return Noise.apply(self.layer(x))


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return 2 * gradient + 0 * torch.rand_like(gradient)


def unsplittable_list() -> Any:
    return [Unsplittable(), linear(), Unsplittable(), linear()]


MODELS = {
    "values": (values_model, two_losses, many_values_batches),
    "untrained": (lambda: Untrained(), F.cross_entropy, partial(doubles, 12)),
    "detached": (detached_list, F.cross_entropy, partial(doubles, 12)),
    "tied": (tied_list, F.cross_entropy, partial(doubles, 12)),
    "in place": (in_place_list, F.cross_entropy, partial(doubles, 12)),
    "constant": (constant_list, F.cross_entropy, partial(doubles, 12)),
    "unsplittable": (unsplittable_list, F.cross_entropy, partial(doubles, 12)),
}
PLACES = {
    "1F1B": (make.one_f_one_b, [("d0",), ("d1",), ("d2",)]),
    "I and W": (make.zero_bubble_h1, [("d0",), ("d1",), ("d2",)]),
    "split": (make.one_f_one_b, [("d0", "d1"), ("d2",), ("d3",)]),
}


@pytest.mark.covering
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", MODELS)
def test_unusual_models(ranks: Ranks, name: str, places: str) -> None:
    model, loss, batches = MODELS[name]
    schedule, devices = PLACES[places]
    given = made(model)
    layers = len(given) if isinstance(given, list) else {"values": 4, "untrained": 5}[name]
    stages = make.straight([1, layers - 2, 1])
    stages = [replace(one, devices=group) for one, group in zip(stages, devices, strict=True)]
    plan = schedule(stages, 3)
    torch.manual_seed(1)
    drawn = batches()
    results = ranks.run(run, world(plan), plan, given, drawn, loss, DECAYING)
    require_equal(results[0][0], reference(model, 3, drawn, loss, DECAYING))


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x: Any) -> Any:
        return self.third(torch.tanh(self.second(torch.relu(self.first(x)))))


def alone(layers: int, microbatches: int = 3) -> Any:
    return make.one_f_one_b(make.straight([layers]), microbatches)


def test_without_a_process_group_from_a_factory_or_a_module() -> None:
    batches = doubles(12)
    expected = reference(Linears, 3, batches, F.cross_entropy, ADAMW)
    for given in (Linears, made(Linears)):
        found, losses = run(None, 0, alone(3), given, batches, F.cross_entropy, ADAMW)
        require_equal(found, expected)
        assert all(loss > 0 for loss in losses)


def test_mini_batches_of_several_sizes(ranks: Ranks) -> None:
    stages = make.straight([1, 1, 1])
    stages[1] = replace(stages[1], devices=("d1", "d3"))
    plan = make.zero_bubble_h1(stages, 2, "double-buffer")
    batches = [batch for n in (8, 4, 12, 8) for batch in doubles(n, 1)]
    results = ranks.run(run, 4, plan, made(Linears), batches, F.cross_entropy, DECAYING)
    expected = training.train(plan, made(Linears), batches, F.cross_entropy, DECAYING)
    require_equal(results[0][0], expected.state)


def test_a_step_leaves_the_callers_random_numbers_alone() -> None:
    model = nn.Sequential(linear(), nn.Dropout(), linear())
    executor = Executor(alone(3), model, F.cross_entropy, DECAYING, dtype=torch.float64)
    before, parameters = torch.get_rng_state(), executor.parameters_on_first_rank()
    executor.step(*doubles(6, 1)[0])
    assert torch.equal(torch.get_rng_state(), before)
    after = executor.parameters_on_first_rank()
    assert not any(torch.equal(after[name], value) for name, value in parameters.items())


# --- Memory -------------------------------------------------------------------------------------

SAMPLES = 13  # a number that stands in no shape but of activations
GRAPHS: "weakref.WeakSet[Any]" = weakref.WeakSet()


class Mark:
    """Lives as long as a graph of autograd."""


class Marks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark = Mark()
        GRAPHS.add(ctx.mark)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return 2 * gradient


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Any) -> Any:
        return Marks.apply(self.layer(x))


def run_and_count(_: Any, rank: int, plans: Any) -> Any:
    """What is left of two steps of each plan: graphs, and tensors of a microbatch or more."""
    left = []
    for plan in plans:
        executor = Executor(plan, [Marked(), Marked(), Marked()], F.cross_entropy, DECAYING,
                            dtype=torch.float64)  # fmt: skip
        for _ in range(2):
            executor.step(*doubles(SAMPLES * plan.microbatches, 1)[0])
        assert executor.steps_done == 2
        gc.collect()
        sizes = (SAMPLES, SAMPLES * plan.microbatches)
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        left.append((len(GRAPHS), [one.shape for one in tensors if len(one.shape) and
                                   one.shape[0] in sizes]))  # fmt: skip
    return left


def test_nothing_of_a_step_stays(ranks: Ranks) -> None:
    stages = make.straight([1, 1, 1])
    plans = [recomputed(make.one_f_one_b(stages, 3, "stash"), kind) for kind in RECOMPUTE]
    plans += [recomputed(make.zero_bubble_h1(stages, 3), kind) for kind in RECOMPUTE]
    for left in ranks.run(run_and_count, 3, plans):
        assert left == [(0, [])] * len(plans)


# --- Optimizers ---------------------------------------------------------------------------------


class Halving(torch.optim.SGD):
    """The learning rate halves after every step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] /= 2


def run_with_schedulers(_: Any, rank: int, plan: Any, model: Any, batches: Any) -> Any:
    executor = Executor(plan, model, F.cross_entropy, DECAYING, dtype=torch.float64)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in executor.optimizers]
    for batch in batches:
        executor.step(*batch)
        for scheduler in schedulers:
            scheduler.step()
    return executor.parameters_on_first_rank()


@pytest.mark.parametrize("weights", ["flush", "double-buffer"])
def test_a_scheduler_goes_on_with_new_versions(ranks: Ranks, weights: Any) -> None:
    plan = make.one_f_one_b(make.straight([1, 1, 1]), 2, weights)
    batches = doubles(4, 5)
    results = ranks.run(run_with_schedulers, 3, plan, made(Linears), batches)
    halving = partial(Halving, **DECAYING.keywords)
    expected = training.train(plan, made(Linears), batches, F.cross_entropy, halving)
    require_equal(results[0], expected.state)


@pytest.mark.covering
@pytest.mark.parametrize("optimizer", [DECAYING, ADAMW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("weights", ["stash", "stash+vertical-sync", "double-buffer"])
def test_the_optimizers_state_goes_on_with_new_versions(
    ranks: Ranks, weights: Any, optimizer: Any
) -> None:
    plan = make.one_f_one_b(make.straight([1, 1, 1]), 4, weights)
    batches = doubles(8)
    results = ranks.run(run, 3, plan, made(Linears), batches, F.cross_entropy, optimizer)
    expected = training.train(plan, made(Linears), batches, F.cross_entropy, optimizer)
    require_equal(results[0][0], expected.state)


# --- State --------------------------------------------------------------------------------------


def run_from(
    _: Any, rank: int, plan: Any, model: Any, optimizer: Any, batches: Any, state: Any, done: int
) -> Any:
    """Go on from ``state``; what this rank would save, and what the model is then."""
    executor = Executor(plan, model, F.cross_entropy, optimizer, dtype=torch.float64)
    if state is not None:
        wanted = executor.wanted(state)
        executor.load_state({key: state[key] for key in wanted}, done)
    for batch in batches:
        executor.step(*batch)
    return executor.state(), executor.parameters_on_first_rank()


def saved(results: Any) -> Any:
    keys = [key for state, _ in results for key in state]
    assert len(keys) == len(set(keys)), "a key stands on two ranks"
    return {key: value for state, _ in results for key, value in state.items()}


def sharing(weights: Any, counts: Any, devices: Any) -> Any:
    """Several stages on a device, each microbatch after the other."""
    stages = [
        replace(one, devices=(name,))
        for one, name in zip(make.straight(counts), devices, strict=True)
    ]
    orders: dict[str, list[Action]] = {name: [] for name in devices}
    for m in range(2):
        way = [Action(s, make.F, m) for s in range(len(stages))]
        way += [Action(s, make.B, m) for s in reversed(range(len(stages)))]
        for action in way:
            orders[devices[action.stage]].append(action)
    return make.plan_in_order(stages, 2, orders, weights)


@pytest.mark.parametrize("optimizer", slow_after(1, [ADAMW, DECAYING], ["AdamW", "SGD"]))
@pytest.mark.parametrize("weights", slow_after(1, ["double-buffer", "flush"]))
def test_a_run_goes_on_from_its_state(ranks: Ranks, weights: Any, optimizer: Any) -> None:
    layers = len(capture(TiedTransformer()).layers)
    # The tied weights are in stages of one device, then of two.
    first = sharing(weights, [2, layers - 4, 2], ["d0", "d1", "d0"])
    wide = [replace(one, devices=group) for one, group in zip(
        make.straight([3, layers - 3]), [("d0", "d2"), ("d1",)], strict=True)]  # fmt: skip
    second = make.one_f_one_b(wide, 2, weights)
    drawn = torch.randint(VOCABULARY, (4, 8, SEQUENCE, 2))
    batches = [(one[..., 0].contiguous(), one[..., 1].contiguous()) for one in drawn]
    # What is drawn depends on the samples that a device has: without dropout on other plans.
    for plan, dropout in ((first, 0.2), (second, 0.0)):
        torch.manual_seed(0)
        model = TiedTransformer(dropout=dropout).double()
        straight = ranks.run(run_from, 2, first, model, optimizer, batches, None, 0)
        half = ranks.run(run_from, 2, first, model, optimizer, batches[:2], None, 0)
        rest = ranks.run(
            run_from, world(plan), plan, model, optimizer, batches[2:], saved(half), 2
        )  # fmt: skip
        tolerance = 0.0 if plan is first else 1e-12
        require_equal(rest[0][1], straight[0][1], rtol=tolerance, atol=tolerance)
        require_equal(saved(rest), saved(straight), rtol=tolerance, atol=tolerance)
        assert any(key.startswith("previous.") for key in saved(rest)) == (weights != "flush")


# --- Mistakes -----------------------------------------------------------------------------------


def refused(message: str, plan: Any, model: Any, batch: Any = None, kind: Any = InputError) -> None:
    """Alone on this process."""
    with pytest.raises(kind, match=message) as error:
        run(None, 0, plan, model, [batch] if batch else [], F.cross_entropy, DECAYING)
    assert "\n" not in str(error.value)


def test_another_model_is_refused() -> None:
    plan = alone(3)
    names, size = ("first", "second", "third"), 8.0 * (WIDTH + 1) * WIDTH
    layers = tuple(PlannedLayer(name, size) for name in names)
    run(None, 0, replace(plan, layers=layers), Linears, [], F.cross_entropy, DECAYING)
    other = (*layers[:1], replace(layers[1], name="other"), *layers[2:])
    refused("layer 1 is 'other' in the plan, 'second' in the model",
            replace(plan, layers=other), Linears)  # fmt: skip
    for wrong in (size / 2, 0.0):
        other = (*layers[:2], replace(layers[2], parameter_bytes=wrong))
        refused(f"layer 2, 'third', has {wrong:.0f} bytes of parameters in the plan and 42",
                replace(plan, layers=other), Linears)  # fmt: skip
    refused("the plan has 2 layers, the model 3: first, second, third", alone(2), Linears)
    refused("needs 2 ranks, one for each of d0, d1; there are 1",
            make.one_f_one_b(make.straight([1, 2]), 2), Linears)  # fmt: skip


def test_mini_batches_that_do_not_fit_are_refused() -> None:
    plan, (x, y) = alone(3), doubles(12, 1)[0]
    refused("10 samples cannot be cut into 3 equal microbatches", plan, Linears, (x[:10], y[:10]))
    refused("0 samples cannot be cut", plan, Linears, (x[:0], y[:0]))
    refused("as many samples in all .* got shapes \\(12, 6\\), \\(3, 6\\), \\(12,\\)",
            plan, Linears, ((x, x[:3]), y))  # fmt: skip
    refused("as many samples", plan, Linears, (x[:9], y))
    refused("inputs hold no tensor", plan, Linears, ({}, y))
    refused("layer 'first' fails on inputs of shape \\(4, 3\\): RuntimeError: ",
            plan, Linears, (x[:, :3], y))  # fmt: skip
    refused("layer 'first' fails on inputs of shape \\(4, 6\\), \\(4, 6\\)", plan, Linears,
            ((x, x), y))  # fmt: skip
    refused("layer '1' fails .* changes an input in place", alone(2),
            [linear(), nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True))], (x, y))  # fmt: skip


@pytest.mark.parametrize("replication", ["split", "round-robin"])
def test_a_loss_of_the_model_s_own_that_is_divided_is_said(replication: str) -> None:
    stage = replace(make.straight([3])[0], devices=("a", "b"), replication=replication)
    plan = make.gpipe([stage], 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_divided_loss(plan)
    assert bool(said) == (replication == "split")
    assert all("mean of those of the parts" in str(one.message) for one in said)


class Spoiled(nn.Module):
    def forward(self, x: Any) -> Any:
        return x / (x != 7)


def test_a_loss_that_is_no_number_is_named_at_once() -> None:
    x, y = doubles(12, 1)[0]
    x[5] = 7
    model = [Spoiled(), linear()]
    message = "loss of microbatch 1 on stage 0 is (nan|inf) in step 1"
    refused(message, alone(2), model, (x, y), NonFiniteLoss)


def test_what_stages_cannot_share_is_refused() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH).double())
    plan = sharing("stash", [1, 1], ["d0", "d0"])
    refused("'0.weight' is shared by stages 0 and 1, which with 'stash' update it at different",
            plan, [Times(weight), Times(weight)])  # fmt: skip
    norm = nn.BatchNorm1d(WIDTH).double()
    message = "layer '0' changes its buffers, of which '0.num_batches_tracked' is used in stages"
    refused(message, replace(plan, weights="flush"), [norm, norm], doubles(12, 1)[0])


class Rotating(nn.Module):
    """A buffer of the whole model that every layer uses, as rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, WIDTH))
        self.first, self.second = linear(), linear()

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x) * self.angles.cos()) * self.angles.sin()


def test_stages_may_share_a_buffer_that_none_changes() -> None:
    batch, model = doubles(12, 1)[0], Rotating().double()
    plan = sharing("flush", [1, 1], ["d0", "d0"])
    optimizer = partial(torch.optim.SGD, lr=1.0)
    executor = Executor(plan, model, optimizer=optimizer, dtype=torch.float64)
    executor.step(*batch)
    found = executor.parameters_on_first_rank()
    assert found is not None
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    for name, one in model.named_parameters():
        torch.testing.assert_close(found[name], (one - one.grad).detach(), rtol=1e-12, atol=1e-14)


def test_after_a_failed_step_there_is_no_other() -> None:
    batch = doubles(12, 1)[0]
    losses = {
        "got a tensor of shape \\(4,\\)": partial(F.cross_entropy, reduction="none"),
        "got float": lambda *_: 1.0,
    }
    for message, loss in losses.items():
        executor = Executor(alone(2), [linear(), linear()], loss, dtype=torch.float64)
        with pytest.raises(
            InputError, match=f"one number that depends on the output, .*, {message}"
        ):
            executor.step(*batch)
    with pytest.raises(InputError, match="a step failed before; make a new executor"):
        executor.step(*batch)


class Beside(nn.Module):
    """Passes a value on that has no samples, with a gradient or without."""

    def __init__(self, gradient: bool) -> None:
        super().__init__()
        self.layer, self.gradient = linear(), gradient

    def forward(self, x: Any) -> Any:
        beside = self.layer.weight.sum(0)
        return self.layer(x), beside if self.gradient else beside.detach()


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Any, beside: Any) -> Any:
        return self.layer(x) * beside


def beside_and_joins(gradient: bool) -> Any:
    return [Beside(gradient), Joins()]


class Flattens(nn.Module):
    """Passes on what has several entries for each sample in its first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Any) -> Any:
        return self.layer(x), x.long().flatten()


class Unflattens(Flattens):
    def forward(self, x: Any, whole: Any) -> Any:
        return self.layer(x) + whole.view(x.shape)


class InTurn(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return self[1](*self[0](x))


def test_values_without_samples_between_split_stages(ranks: Ranks) -> None:
    narrow, wide = make.straight([1, 1])
    wide = replace(wide, devices=("d1", "d2"))
    batches = doubles(8)
    for stages in ([narrow, wide], [replace(wide, layers=(0, 1)), replace(narrow, layers=(1, 2))]):
        plan = make.one_f_one_b(stages, 2)
        torch.manual_seed(0)
        model = beside_and_joins(False)
        results = ranks.run(run, 3, plan, model, batches, F.cross_entropy, DECAYING)
        expected = reference(lambda: InTurn(*beside_and_joins(False)), 2, batches, F.cross_entropy,
                             DECAYING)  # fmt: skip
        require_equal(results[0][0], expected)
    with pytest.raises(RanksFailed, match="between stages 0 and 1 has no samples in its first"):
        ranks.run(run, 3, plan, beside_and_joins(True), batches, F.cross_entropy, DECAYING)
    with pytest.raises(RanksFailed, match="between stages 0 and 1 has no samples in its first"):
        ranks.run(run, 3, plan, [Flattens(), Unflattens()], batches, F.cross_entropy, DECAYING)
    plan = make.one_f_one_b([narrow, wide], 2)
    with pytest.raises(RanksFailed, match="stage 1: a microbatch of 1 samples cannot be split"):
        ranks.run(run, 3, plan, model, doubles(2), F.cross_entropy, DECAYING)


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Any) -> Any:
        return self.layer(x).repeat(1, 1 << 27).sum(1, keepdim=True) * x


def run_short_of_memory(_: Any, rank: int, plan: Any, batch: Any) -> Any:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    executor = Executor(plan, [linear(), Greedy()], F.cross_entropy, DECAYING, dtype=torch.float64)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + 256_000_000
    resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
    try:
        executor.step(*batch)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_out_of_memory_names_stage_and_instruction(ranks: Ranks) -> None:
    plan = sharing("flush", [1, 1], ["d0", "d0"])
    with pytest.raises(RanksFailed) as error:
        ranks.run(run_short_of_memory, 1, plan, doubles(4, 1)[0])
    said = error.value.errors[0].splitlines()[0]
    assert said.startswith("OutOfMemory: stage 1 does not fit: 1F0 ran out of memory in step 1: ")


# --- A second opinion ---------------------------------------------------------------------------


def run_both(_: Any, rank: int, plan: Any, layers: Any, batch: Any, file: str) -> Any:
    """The parameters' changes by our step at learning rate 1, and torch's gradients."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    executor = Executor(plan, layers, F.mse_loss, partial(torch.optim.SGD, lr=1.0),
                        dtype=torch.float64)  # fmt: skip
    executor.step(*batch)
    found = executor.parameters_on_first_rank()
    own = [s for s, stage in enumerate(plan.stages) if stage.devices == (f"d{rank}",)]
    cpu, count = torch.device("cpu"), len(plan.stages)
    stages = [PipelineStage(layers[s], s, count, cpu) for s in own]
    schedule = _PipelineScheduleRuntime(stages, plan.microbatches, loss_fn=F.mse_loss)
    schedule._load_csv(file)
    inputs, targets = batch
    schedule.step(*([inputs] if 0 in own else []), target=targets if count - 1 in own else None)
    gradients = [{f"{s}.{name}": one.grad for name, one in layers[s].named_parameters()}
                 for s in own]  # fmt: skip
    shares: list[Any] = [None] * 2
    dist.all_gather_object(shares, [pair for part in gradients for pair in part.items()])
    return found, dict(pair for share in shares for pair in share)


def test_torchs_own_runtime_gets_the_same_gradients(ranks: Ranks, tmp_path: Any) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(linear(), nn.Tanh()) for _ in range(4)]
    turns = [replace(one, devices=(f"d{s % 2}",))
             for s, one in enumerate(make.straight([1] * 4))]  # fmt: skip
    before = {f"{i}.{name}": one.detach().clone() for i, layer in enumerate(layers)
              for name, one in layer.named_parameters()}  # fmt: skip
    batch = (torch.randn(16, WIDTH).double(), torch.randn(16, WIDTH).double())
    plans = [make.interleaved(turns, 4), make.zero_bubble_h1(make.straight([1, 1]), 4)]
    for i, plan in enumerate(plans):
        path = tmp_path / f"{i}.csv"
        path.write_text(export(plan, "torch-csv")["schedule.csv"])
        own = layers[: len(plan.stages)]
        results = ranks.run(run_both, 2, plan, own, batch, str(path))
        found, gradients = results[0]
        require_equal({name: before[name] - value for name, value in found.items()}, gradients)


def test_tensors_of_all_types_pass_in_one_message() -> None:
    sent = [
        torch.tensor([True, False, True]),
        torch.randn(3, 5, dtype=torch.float64).T,
        torch.empty(0, 4),
        torch.tensor(7),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.randn(9).to(torch.bfloat16),
    ]
    layouts = [(tuple(one.shape), one.dtype) for one in sent]
    (message, rooms), (received, taken) = (
        message_of(layouts, torch.device("cpu")) for _ in range(2)
    )
    for room, one in zip(rooms, sent, strict=True):
        room.copy_(one)
    received.copy_(message)
    for room, one in zip(taken, sent, strict=True):
        assert torch.equal(room, one)
        assert room.data_ptr() % 64 == 0 or room.numel() == 0
    assert message_of([], torch.device("cpu"))[0].numel() == 0


def _policies(group: Any, rank: int) -> list[tuple[str, int]]:
    """The policies of gloo's threads and of this one, where messages pass between ranks."""
    cpu = torch.device("cpu")
    Messages(RankPlace(("a", "b"), rank, cpu, cpu, group))
    names = {int(one.name): (one / "comm").read_text() for one in Path("/proc/self/task").iterdir()}
    of_gloo = [("gloo", os.sched_getscheduler(n)) for n in names if "gloo_tcp" in names[n]]
    return [*of_gloo, ("own", os.sched_getscheduler(0))]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has this policy")
def test_gloos_threads_do_not_interrupt_computations(ranks: Ranks) -> None:
    for found in ranks.run(_policies, 2):
        assert set(found) == {("gloo", os.SCHED_BATCH), ("own", os.SCHED_OTHER)}
