"""A run trains what the model says: each case against a plain loop over microbatches."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training  # noqa: E402
import training_plans as make  # noqa: E402
from models import WIDTH, vectors  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils.checkpoint import checkpoint  # noqa: E402

from stagewright.executor.capture.tracing import capture  # noqa: E402
from stagewright.executor.measuring.machine import MeasuringMachine  # noqa: E402
from stagewright.executor.measuring.profiling import measure_layers  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.executor.training.stages.weights import layer_seed  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402

STEPS, MICROBATCHES, SAMPLES = 2, 3, 12
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
RECOMPUTE = ("none", "full", "layer")
SCHEDULES = (make.one_f_one_b, make.zero_bubble_h1)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).double()


def batches() -> list[tuple[Any, Any]]:
    drawn = (vectors(SAMPLES, seed) for seed in range(STEPS))
    return [(inputs.double(), targets) for inputs, targets in drawn]


def made(model: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return model()


def listed(*kinds: Callable[[], nn.Module]) -> list[nn.Module]:
    return [kind() for kind in kinds]


def in_turn(modules: Any, x: Any) -> Any:
    """What a list of modules means."""
    values = (x,)
    for module in modules:
        result = module(*values)
        values = tuple(result) if isinstance(result, list | tuple) else (result,)
    return result


def plain(model: Any, loss: Any = F.cross_entropy, optimizer: Any = SGD) -> dict[str, Any]:
    """The state after a plain loop; gradients are summed up over the microbatches."""
    model = made(model)
    whole = nn.ModuleList(model) if isinstance(model, list) else model
    stepper = optimizer([one for one in whole.parameters() if one.requires_grad])
    for inputs, targets in batches():
        stepper.zero_grad()
        for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            output = in_turn(model, x) if isinstance(model, list) else model(x)
            (loss(output, y) / MICROBATCHES).backward()
        stepper.step()
    return whole.state_dict()


def run(_: Any, rank: int, plan: Any, model: Any, loss: Any, optimizer: Any) -> Any:
    executor = Executor(plan, model, loss, optimizer, dtype=torch.float64)
    for batch in batches():
        executor.step(*batch)
    return executor.parameters_on_first_rank()


def require_equal(found: Any, expected: Any, name: str = "") -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=f"{name} {key}")


def straight(model: Any, schedule: Any = make.one_f_one_b, recompute: str = "none") -> PipelinePlan:
    """Two stages, the second of one layer; one stage for a model of one layer."""
    count = len(capture(made(model)))
    plan = schedule(make.straight([count - 1, 1] if count > 1 else [1]), MICROBATCHES)
    return replace(plan, stages=tuple(replace(one, recompute=recompute) for one in plan.stages))


def require_as_plain(
    ranks: Ranks, model: Any, loss: Any = F.cross_entropy, optimizer: Any = SGD, **how: Any
) -> None:
    """``model`` is a factory: a parameter's hooks and attributes do not go from rank to rank."""
    plan = straight(model, **how)
    results = ranks.run(run, len(plan.stages), plan, model, loss, optimizer)
    require_equal(results[0], plain(model, loss, optimizer), str(how))


def refused(words: str, model: Any, loss: Any = F.cross_entropy, of_plan: bool = False) -> None:
    """By a run and by profiling, in the same line; a plan's own rules are unknown to the latter."""
    said = []
    for start in (_run_alone, _profile)[: 1 if of_plan else 2]:
        with pytest.raises(InputError, match=words) as error:
            start(made(model), loss)
        said.append(str(error.value))
    assert len(set(said)) == 1
    assert "\n" not in said[0]


def _run_alone(model: Any, loss: Any) -> None:
    count = len(capture(model))
    plan = make.one_f_one_b(make.straight([count]), MICROBATCHES)
    run(None, 0, plan, model, loss, SGD)


def _profile(model: Any, loss: Any) -> None:
    machine = MeasuringMachine(torch.device("cpu"), kind="core")
    sizes = [SAMPLES // MICROBATCHES]
    measure_layers(capture(model), batches()[0], sizes, machine=machine, loss=loss, rounds=1)


# --- What a list of modules returns -------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = linear(), linear()

    def forward(self, x: Any) -> Any:
        return self.left(x), self.right(x)


class One(Two):
    def forward(self, x: Any) -> Any:
        return (self.left(x),)


class Scores(Two):
    def forward(self, x: Any) -> Any:
        return {"scores": self.left(x)}


def of_two(outputs: Any, targets: Any) -> Any:
    left, right = outputs
    return F.cross_entropy(left, targets) + right.square().mean()


def of_a_tuple(outputs: Any, targets: Any) -> Any:
    assert isinstance(outputs, tuple)
    return F.cross_entropy(outputs[0], targets)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loss_gets_all_that_the_last_module_returns(ranks: Ranks, schedule: Any) -> None:
    require_as_plain(ranks, partial(listed, linear, linear, Two), of_two, schedule=schedule)
    require_as_plain(ranks, partial(listed, linear, One), of_a_tuple, schedule=schedule)


def test_what_is_no_tuple_of_tensors_is_refused() -> None:
    refused(
        "layer '1' returns a dict; it may return a tensor or a tuple",
        partial(listed, linear, Scores),
    )


# --- Modes --------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """A norm whose statistics are those of another training, and a dropout that is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH).double(), nn.Dropout(0.5)
        self.norm.running_mean.add_(0.3)
        self.norm.eval(), self.drop.eval()

    def forward(self, x: Any) -> Any:
        return self.last(self.drop(self.norm(self.first(x)).tanh()))


def fixed_list() -> Any:
    model = Fixed()
    return [model.first, model.norm, model.drop, model.last]


@pytest.mark.covering
@pytest.mark.parametrize("model", [Fixed, fixed_list])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_modules_in_eval_mode_stay_there(ranks: Ranks, schedule: Any, model: Any) -> None:
    require_as_plain(ranks, model, schedule=schedule)


# --- Attributes and hooks of parameters ---------------------------------------------------------


class Marked(nn.Parameter):
    """A kind of parameter of the user's own."""


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()
        self.first.bias.no_decay = True
        self.scale = Marked(torch.ones(WIDTH).double())

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x).tanh()) * self.scale


def by_attribute(parameters: list[Any]) -> Any:
    """No decay for what says so; another rate for parameters of a class."""
    kinds: dict[tuple[bool, bool], list[Any]] = {}
    for one in parameters:
        kinds.setdefault((hasattr(one, "no_decay"), isinstance(one, Marked)), []).append(one)
    groups = [
        {"params": own, "weight_decay": 0.0 if free else 0.5, "lr": 0.3 if marked else 0.1}
        for (free, marked), own in kinds.items()
    ]
    return torch.optim.SGD(groups)


@pytest.mark.parametrize("factory", [False, True])
def test_optimizers_see_the_parameters_attributes(factory: bool) -> None:
    plan = make.one_f_one_b(make.straight([2]), MICROBATCHES)
    model = Grouped if factory else made(Grouped)
    found = run(None, 0, plan, model, F.cross_entropy, by_attribute)
    require_equal(found, plain(Grouped, optimizer=by_attribute))


def test_attributes_go_with_new_versions(ranks: Ranks) -> None:
    plan = make.one_f_one_b(make.straight([1, 1]), MICROBATCHES, "double-buffer")
    assert all(ranks.run(run_and_find_attributes, 2, plan))


def run_and_find_attributes(_: Any, rank: int, plan: Any) -> bool:
    executor = Executor(plan, made(Grouped), optimizer=by_attribute, dtype=torch.float64)
    for batch in batches():
        executor.step(*batch)
    held = [p for o in executor.optimizers for g in o.param_groups for p in g["params"]]
    return any(hasattr(one, "no_decay") or isinstance(one, Marked) for one in held)


def clipped(gradient: Any) -> Any:
    return gradient.clamp(-0.01, 0.01)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = linear(), linear(), linear()
        for layer in (self.first, self.last):
            layer.weight.register_hook(clipped)

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x).tanh()).tanh())


@pytest.mark.covering
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_of_parameters_see_a_microbatchs_gradient(
    ranks: Ranks, schedule: Any, recompute: str
) -> None:
    require_as_plain(ranks, Hooked, schedule=schedule, recompute=recompute)


class HookedTwice(Hooked):
    def forward(self, x: Any) -> Any:
        return self.first(self.middle(self.first(x).tanh()).tanh())


def test_hooks_of_parameters_that_would_see_a_part_are_refused(ranks: Ranks) -> None:
    split = make.gpipe([Stage((0, 3), ("d0", "d1"))], MICROBATCHES)
    found = ranks.run(refusal, 2, split, Hooked)
    assert len(set(found)) == 1
    assert "'first.weight' has a hook, which each of the devices that split" in found[0]
    with pytest.raises(InputError, match=r"'first\.weight' has a hook and is used in 2 layers"):
        capture(HookedTwice())


def refusal(_: Any, rank: int, plan: Any, model: Any) -> str:
    with pytest.raises(InputError) as error:
        run(_, rank, plan, model, F.cross_entropy, SGD)
    return str(error.value)


def test_a_hook_after_accumulation_is_refused() -> None:
    def model() -> nn.Module:
        fixed = Fixed()
        fixed.first.weight.register_post_accumulate_grad_hook(lambda one: None)
        return fixed

    with pytest.raises(InputError, match=r"'first\.weight' has a hook that runs after"):
        capture(model())
    with pytest.raises(InputError, match=r"parameter '1\.weight' has no shape yet"):
        capture([linear(), nn.LazyLinear(WIDTH)])


# --- Hooks of modules ---------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x).tanh())


def with_hooks() -> nn.Module:
    model = Plain()
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    model.register_forward_hook(lambda module, inputs, output: output + inputs[0])
    model.first.register_forward_hook(lambda module, inputs, output: output.sin())
    model.last.register_full_backward_hook(lambda module, before, after: (before[0] * 3,))
    return model


def forward_replaced() -> nn.Module:
    model = Plain()
    model.forward = lambda x: model.first(x).sin()
    return model


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_of_modules_are_called(schedule: Any) -> None:
    plan = schedule(make.straight([2]), MICROBATCHES)
    found = run(None, 0, plan, with_hooks, F.cross_entropy, SGD)
    require_equal(found, plain(with_hooks))


def test_a_forward_of_the_instances_own_is_the_one_that_runs() -> None:
    plan = make.one_f_one_b(make.straight([1]), MICROBATCHES)
    found = run(None, 0, plan, forward_replaced, F.cross_entropy, SGD)
    require_equal(found, plain(forward_replaced))


def test_backward_hooks_of_what_is_cut_are_refused() -> None:
    model = Plain()
    model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(InputError, match="Plain has a backward hook, but is cut into layers"):
        capture(model)


# --- Python state -------------------------------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.counter, self.seen = linear(), 0, []
        self.average = torch.zeros(WIDTH).double()
        self.random = random.Random(0)


class CountsUp(Stateful):
    def forward(self, x: Any) -> Any:
        self.counter += 1
        return self.layer(x) * self.counter


class Warms(Stateful):
    def forward(self, x: Any) -> Any:
        self.counter += 1
        return self.layer(x) if self.counter < 100 else x


class Lists(Stateful):
    def forward(self, x: Any) -> Any:
        self.seen.append(len(self.seen))
        return self.layer(x)


class Averages(Stateful):
    def forward(self, x: Any) -> Any:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.layer(x) + self.average


class AveragesInPlace(Stateful):
    def forward(self, x: Any) -> Any:
        self.average.mul_(0.9)
        return self.layer(x) + self.average


class Chooses(Stateful):
    def forward(self, x: Any) -> Any:
        return x if random.random() < 1e-9 else self.layer(x)


class ChoosesItself(Stateful):
    def forward(self, x: Any) -> Any:
        return x if self.random.random() < 1e-9 else self.layer(x)


STATEFUL = [CountsUp, Warms, Lists, Averages, AveragesInPlace, Chooses, ChoosesItself]


@pytest.mark.parametrize("kind", STATEFUL)
def test_python_state_is_refused_in_a_layer(kind: Any) -> None:
    refused("the forward of layer '1' changes", partial(listed, linear, kind))
    refused("the forward of layer '1' changes", lambda: nn.Sequential(linear(), kind()))


@pytest.mark.parametrize("kind", STATEFUL)
def test_python_state_is_refused_in_what_is_traced(kind: Any) -> None:
    with pytest.raises(InputError) as error:
        capture(made(kind))
    assert "\n" not in str(error.value)


NUMBERS = iter(range(1000))


class Numbered(Stateful):
    """Its state is not its own."""

    def forward(self, x: Any) -> Any:
        return self.layer(x) * next(NUMBERS)


def test_what_is_another_in_a_second_trace_is_refused() -> None:
    with pytest.raises(InputError, match="computes something else when it is traced again"):
        capture(Numbered())


class Caches(Stateful):
    """Keeps what it makes once, and what it computed last, and reads neither in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.sizes = None, {}

    def forward(self, x: Any) -> Any:
        if self.mask is None:
            self.mask = torch.ones(WIDTH, dtype=x.dtype)
        if x.size(1) not in self.sizes:
            self.sizes[x.size(1)] = torch.full((WIDTH,), 2.0, dtype=x.dtype)
        self.last = self.layer(x) * self.mask * self.sizes[x.size(1)]
        return self.last


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cache_is_no_state(ranks: Ranks, schedule: Any) -> None:
    require_as_plain(ranks, partial(listed, linear, Caches, linear), schedule=schedule)


# --- What a loss depends on ---------------------------------------------------------------------


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()).double())

    def forward(self, output: Any, targets: Any) -> Any:
        return F.cross_entropy(output * self.temperature, targets)


def test_a_loss_with_parameters_is_refused() -> None:
    loss = Tempered()
    for form in (loss, loss.forward, partial(loss), lambda *given: loss(*given)):
        refused("the loss has its own parameter 'temperature' of Tempered",
                partial(listed, linear, linear), form)  # fmt: skip
    weight = nn.Parameter(torch.ones(WIDTH).double())
    kept = [weight]
    refused(r"the loss depends on a parameter of shape \(6,\) that is not an output",
            partial(listed, linear, linear),
            lambda out, y: F.cross_entropy(out * kept[0], y))  # fmt: skip


def test_a_loss_with_frozen_parameters_is_no_more_than_a_function(ranks: Ranks) -> None:
    loss = Tempered().requires_grad_(False)
    require_as_plain(ranks, partial(listed, linear, linear), loss)
    require_as_plain(ranks, Plain, nn.CrossEntropyLoss(weight=torch.ones(WIDTH).double()))


# --- What depends on no parameter ---------------------------------------------------------------


class Cut(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.detach()


class TwoOfOne(nn.Module):
    """Of two outputs one gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Any) -> Any:
        out = self.layer(x)
        return out, out.detach() * 2


def frozen_then_trained() -> Any:
    return [linear().requires_grad_(False), nn.Tanh(), linear().requires_grad_(False), linear()]


class FrozenTied(nn.Module):
    """The first and the last layer have one table, which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = linear(), linear(), linear()
        self.last.weight = self.first.weight
        self.first.weight.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.middle(self.first(x))))


def test_a_frozen_parameter_in_several_stages(ranks: Ranks) -> None:
    require_as_plain(ranks, FrozenTied)


@pytest.mark.covering
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_without_a_gradient(ranks: Ranks, schedule: Any, recompute: str) -> None:
    require_as_plain(ranks, frozen_then_trained, schedule=schedule, recompute=recompute)
    model: Any = partial(listed, linear, Cut, linear)
    require_as_plain(ranks, model, schedule=schedule, recompute=recompute)
    require_as_plain(
        ranks, partial(listed, linear, TwoOfOne), of_two, schedule=schedule, recompute=recompute
    )


def test_what_nothing_trains_is_refused() -> None:
    refused("no output of the model depends on a parameter that is trained",
            partial(listed, linear, linear, Cut))  # fmt: skip
    refused("no output of the model depends", lambda: [linear().requires_grad_(False)])
    refused(
        "the loss must be a tensor of one number that depends on the output",
        partial(listed, linear, TwoOfOne),
        lambda out, y: F.cross_entropy(out[1], y),
    )


# --- torch's own checkpoints --------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.wide, self.back, self.reentrant = linear(), linear(), reentrant

    def forward(self, x: Any) -> Any:
        return x + checkpoint(self._inner, x, use_reentrant=self.reentrant)

    def _inner(self, x: Any) -> Any:
        return self.back(self.wide(x).tanh())


@pytest.mark.covering
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_within_a_layer(
    ranks: Ranks, reentrant: bool, schedule: Any, recompute: str
) -> None:
    model = partial(checkpointed, reentrant)
    require_as_plain(ranks, model, schedule=schedule, recompute=recompute)
    _profile(made(model), F.cross_entropy)


def checkpointed(reentrant: bool) -> Any:
    return [linear(), Checkpointed(reentrant), linear()]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_within_a_layer_use_the_versions_of_their_forward(
    ranks: Ranks, reentrant: bool
) -> None:
    plan = make.one_f_one_b(make.straight([2, 1]), MICROBATCHES, "stash")
    model = made(partial(checkpointed, reentrant))
    found = ranks.run(run, 2, plan, model, F.cross_entropy, SGD)[0]
    # The same computation without checkpoints: the oracle differentiates by parameters.
    for module in model:
        if isinstance(module, Checkpointed):
            module.forward = partial(_without_checkpoint, module)
    expected = training.train(plan, model, batches(), F.cross_entropy, SGD)
    require_equal(found, expected.state)


def _without_checkpoint(module: Any, x: Any) -> Any:
    return x + module._inner(x)


class NormsAgain(Checkpointed):
    def __init__(self) -> None:
        super().__init__(reentrant=False)
        self.norm = nn.BatchNorm1d(WIDTH).double()

    def _inner(self, x: Any) -> Any:
        return self.norm(self.wide(x))


def test_checkpoints_that_change_buffers_are_refused() -> None:
    refused("layer '1' changes its buffers in its backward", partial(listed, linear, NormsAgain))


# --- Buffers under recomputation ----------------------------------------------------------------


def spectral() -> Any:
    norm = nn.utils.parametrizations.spectral_norm
    return [norm(linear()), nn.BatchNorm1d(WIDTH).double(), nn.Tanh(), norm(linear()), linear()]


def spectral_by_hook() -> Any:
    return [nn.utils.spectral_norm(linear()), nn.Tanh(), nn.utils.spectral_norm(linear()), linear()]


class Steps(nn.Module):
    """A buffer that is set anew in every forward and scales what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        self.calls = self.calls + 1
        return self.layer(x) / self.calls.sqrt()


def stepping() -> Any:
    shared = Steps()
    return [shared, nn.Tanh(), shared, linear()]


@pytest.mark.covering
@pytest.mark.parametrize("model", [spectral, spectral_by_hook, stepping])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_recomputed_forward_finds_the_buffers_of_the_first(
    ranks: Ranks, schedule: Any, recompute: str, model: Any
) -> None:
    require_as_plain(ranks, model, schedule=schedule, recompute=recompute)


# --- Random numbers -----------------------------------------------------------------------------


class Draws(nn.Module):
    """Draws for each sample, for several entries of each, and for all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.heads = linear(), nn.Dropout(0.4)

    def forward(self, x: Any) -> Any:
        n = len(x)
        x = F.dropout(self.layer(x), 0.3) + 0.1 * torch.randn(n, WIDTH, dtype=x.dtype)
        x = self.heads(x.view(2 * n, WIDTH // 2)).view(n, WIDTH)
        noise = torch.rand(WIDTH, WIDTH, dtype=x.dtype)
        columns = F.dropout(x.t(), 0.2).t()
        mixed = torch.bernoulli(x.sigmoid()) + torch.rand_like(x) + torch.empty_like(x).uniform_()
        return columns @ noise + mixed


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True).double()

    def forward(self, x: Any) -> Any:
        x = x[:, None] * torch.linspace(0.5, 1, 3, dtype=x.dtype)[:, None]
        heads = x[:, None]  # a fused kernel, which draws nothing here
        x = F.dropout(x + F.scaled_dot_product_attention(heads, heads, heads)[:, 0], 0.2)
        return self.attention(x, x, x)[0].mean(1)


def drawing() -> Any:
    return [linear(), Draws(), nn.Dropout(0.5), Attends(), linear()]


def by_seeds(plan: Any, model: Any) -> dict[str, Any]:
    """The plain loop, where every layer is seeded before it runs on a whole microbatch."""
    modules = nn.ModuleList(made(model))
    stepper = SGD(modules.parameters())
    for step, (inputs, targets) in enumerate(batches()):
        stepper.zero_grad()
        pairs = zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
        for m, (x, y) in enumerate(pairs):
            for i, module in enumerate(modules):
                torch.manual_seed(layer_seed(0, step, m, i))
                x = module(x)
            (F.cross_entropy(x, y) / MICROBATCHES).backward()
        stepper.step()
    return modules.state_dict()


DEVICES = {
    "pipeline": [(2, ("a",)), (3, ("b",))],
    "data parallel": [(5, ("a", "b"))],
    "four of four": [(5, ("a", "b", "c", "d"))],
    "uneven": [(5, ("a", "b", "c"))],
    "one to three": [(1, ("a",)), (4, ("b", "c", "d"))],
    "two to one": [(1, ("a", "b")), (4, ("c",))],
    "two to two": [(2, ("a", "b")), (3, ("c", "d"))],
}


@pytest.mark.covering
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DEVICES)
def test_random_numbers_never_depend_on_the_cuts_or_replicas(
    ranks: Ranks, name: str, schedule: Any, recompute: str
) -> None:
    stages, start = [], 0
    for count, devices in DEVICES[name]:
        stages.append(Stage((start, start + count), devices, recompute=recompute))
        start += count
    plan = schedule(stages, MICROBATCHES)
    world = sum(len(devices) for _, devices in DEVICES[name])
    results = ranks.run(run, world, plan, made(drawing), F.cross_entropy, SGD)
    require_equal(results[0], by_seeds(None, drawing), name)
