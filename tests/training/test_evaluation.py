"""An evaluation is the loss of the whole model in evaluation, and leaves the training as it was."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import UNSHRUNK, examples, slow_after

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training_plans as make  # noqa: E402
from models import EXAMPLES  # noqa: E402
from ranks import Ranks, RanksFailed  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.any_models import MODELS as FOREIGN  # noqa: E402
from stagewright.executor.capture.tracing import capture  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CROSS_ENTROPY = nn.functional.cross_entropy
STEPS = 2


class Modes(nn.Module):
    """Whatever differs between training and evaluation: modules, functions, and plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.second = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = nn.functional.dropout(self.second(x), 0.3, self.training)
        if not self.training:
            x = 2 * x
        return self.last(self.norm(x))


def modes_batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=draws, dtype=torch.float64)
    return inputs, torch.randint(3, (samples,), generator=draws)


def right(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(1) == targets).sum(), len(targets)  # of each sample, or of all its places


def evaluated(
    _: Any,
    rank: int,
    plan: PipelinePlan,
    model: Any,
    batches: Any,
    held_out: Any,
    evaluates: bool,
    optimizer: Any = SGD,
) -> Any:
    """Losses, what was evaluated with the state that it was of, and the state at the end."""
    executor = Executor(
        plan,
        FOREIGN[model].make() if isinstance(model, str) else model,
        None,
        optimizer,
        example=batches[0][0],
        dtype=torch.float64,
        evaluates=evaluates,
    )
    losses, found = [], []
    for batch in batches:
        losses.append(executor.step(*batch))
        losses += executor.finish()
        if evaluates:
            takes_loss = isinstance(batch[0], dict)
            found.append(
                (
                    executor.evaluate(held_out),
                    None if takes_loss else executor.evaluate(held_out, right),
                    executor.parameters_on_first_rank(),
                )
            )
    return losses, found, executor.parameters_on_first_rank()


def plainly(model: Any, state: dict[str, Tensor], held_out: Any) -> tuple[float, float | None]:
    """The mean loss of all samples, and the share of right answers, by the whole model."""
    whole = FOREIGN[model].make().double() if isinstance(model, str) else model
    whole.load_state_dict(state)
    whole.eval()
    loss, correct, samples, labels = 0.0, 0, 0, 0
    with torch.no_grad():
        for inputs, targets in held_out:
            if isinstance(inputs, dict):
                count = len(next(iter(inputs.values())))
                loss += count * float(whole(**inputs).loss)
                labels += count
            else:
                output = whole(*inputs) if isinstance(inputs, tuple) else whole(inputs)
                count = len(targets)
                loss += float(CROSS_ENTROPY(output, targets, reduction="sum"))
                labels += targets.numel()
                correct += int(right(output, targets)[0])
            samples += count
    whole.train()
    return loss / labels, None if isinstance(inputs, dict) else correct / samples


def compare(
    ranks: Ranks, plan: PipelinePlan, model: Any, batches: Any, held_out: Any, optimizer: Any = SGD
) -> None:
    world = len({name for stage in plan.stages for name in stage.devices})
    with_it = ranks.run(evaluated, world, plan, model, batches, held_out, True, optimizer)
    without = ranks.run(evaluated, world, plan, model, batches, held_out, False, optimizer)
    last = {plan_rank(plan, name) for name in plan.stages[-1].devices}
    for rank, (one, other) in enumerate(zip(with_it, without, strict=True)):
        assert one[0] == other[0]
        for value, measured, _ in one[1]:
            assert (value is not None) == (rank in last)
            assert value is not None or measured is None
    for name, value in without[0][2].items():
        assert torch.equal(value, with_it[0][2][name]), name
    for step, (*_, state) in enumerate(with_it[0][1]):
        expected = plainly(model, state, held_out)
        for rank in last:
            value, measured, _ = with_it[rank][1][step]
            # The losses of transformers are computed in 32 bits.
            assert value == pytest.approx(
                expected[0], rel=1e-9 if expected[1] is not None else 1e-6
            )
            if expected[1] is not None:
                assert measured == pytest.approx(expected[1], rel=1e-12)


def plan_rank(plan: PipelinePlan, device: str) -> int:
    return list(dict.fromkeys(v for stage in plan.stages for v in stage.devices)).index(device)


@pytest.mark.parametrize(
    "stages",
    [
        [Stage((0, 1), ("a",)), Stage((1, 3), ("b",)), Stage((3, 4), ("a",))],
        [Stage((0, 2), ("a", "b"), "split"), Stage((2, 4), ("c",))],
        [Stage((0, 4), ("a", "b"), "round-robin")],
    ],
    ids=["twice on a device", "split", "round-robin"],
)
def test_modes_are_those_of_evaluation(ranks: Ranks, stages: list[Stage]) -> None:
    model = Modes().double()
    assert len(capture(model)) == 4
    plan = make.fill_and_drain(stages, 3)
    batches = [modes_batch(12, seed) for seed in range(STEPS)]
    # Of other numbers of samples than in training; one that does not divide; fewer than parts.
    held_out = [modes_batch(12, 10), modes_batch(7, 11), modes_batch(2, 12)]
    compare(ranks, plan, model, batches, held_out)


# Shrinking would take minutes: every example starts a process group.
@examples(30, quick=2, phases=UNSHRUNK)
@given(data=st.data())
def test_random_plans(ranks: Ranks, data: Any) -> None:
    name = data.draw(st.sampled_from(["residual-mlp", "tied-transformer", "dropping-transformer"]))
    example = EXAMPLES[name]
    weights = make.ALL_WEIGHTS if name == "residual-mlp" else ("flush", "double-buffer")
    model = example.build().double()
    plan = data.draw(make.plans(len(capture(model).layers), weights=weights))
    samples = make.even_samples(plan.stages)
    batches = [doubled(example.batch(samples * plan.microbatches, i)) for i in range(STEPS)]
    counts = data.draw(st.lists(st.integers(samples, 3 * samples), min_size=1, max_size=2))
    held_out = [doubled(example.batch(count, 10 + i)) for i, count in enumerate(counts)]
    compare(ranks, plan, model, batches, held_out)


def doubled(batch: Any) -> Any:
    return tuple(one.double() if one.is_floating_point() else one for one in batch)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt2"),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in sorted(FOREIGN)[::2]
            if one != "gpt2"
        ),
    ],
)
def test_models_that_were_written_elsewhere(ranks: Ranks, name: str) -> None:
    one = FOREIGN[name]
    pytest.importorskip(one.package, reason=f"{one.package} is not installed")
    pairs = [b if isinstance(b, tuple) else (b, ()) for b in one.batches(8, 4)]
    count = layers_of(one.make().double(), pairs[0][0])
    plan = make.one_f_one_b([Stage((0, count // 2), ("a",)), Stage((count // 2, count), ("b",))], 4)
    stepping = partial(torch.optim.SGD, lr=one.lr, momentum=0.9)
    # By name: what models of transformers hook into themselves does not travel to the ranks.
    compare(ranks, plan, name, pairs[:STEPS], pairs[STEPS:], stepping)


def layers_of(model: Any, example: Any) -> int:
    from stagewright.executor.measuring.whole_models import captured_by_size

    captured = captured_by_size(
        lambda: model,
        example,
        [2],
        isinstance(example, dict),
        device=torch.device("cpu"),
        dtype=torch.float64,
        autocast=None,
    )
    return len(captured[2])


def misused(_: Any, rank: int, evaluates: bool, samples: int) -> Any:
    plan = make.gpipe([Stage((0, 4), ("a", "b"), "split")], 2)
    executor = Executor(plan, Modes(), None, SGD, dtype=torch.float64, evaluates=evaluates)
    executor.evaluate([modes_batch(samples, 0)] if samples else [])


@pytest.mark.parametrize(
    ("evaluates", "samples", "named"),
    [
        (False, 4, "make the executor with evaluates=True"),
        (True, 1, "a mini-batch of 1 samples is too small"),
        (True, 0, "there is no mini-batch"),
    ],
)
def test_misuse_is_named(ranks: Ranks, evaluates: bool, samples: int, named: str) -> None:
    with pytest.raises(RanksFailed, match=named):
        ranks.run(misused, 2, evaluates, samples)


class Auxiliary(nn.Module):
    """A model with a head that only training has."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aside = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x) + self.aside(x) if self.training else self.head(x)


def test_other_layers_in_evaluation_are_refused_at_the_start(ranks: Ranks) -> None:
    model = Auxiliary()
    plan = make.gpipe([Stage((0, len(capture(model))), ("a",))], 1)
    batch = [modes_batch(2, 0)]
    with pytest.raises(RanksFailed, match="in evaluation the model has other layers"):
        ranks.run(evaluated, 1, plan, model, batch, batch, True)


class Counting(nn.Module):
    """Every forward changes a buffer, on which the result depends."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (1 - 0.5**self.calls)


def test_buffers_are_afterwards_what_they_were(ranks: Ranks) -> None:
    model = nn.Sequential(Counting()).double()
    plan = make.gpipe([Stage((0, 1), ("a",))], 2)
    batches = [modes_batch(4, seed) for seed in range(3)]
    with_it, without = (
        ranks.run(evaluated, 1, plan, model, batches, batches, evaluates)[0]
        for evaluates in (True, False)
    )
    assert with_it[0] == without[0]
    assert all(torch.equal(value, with_it[2][name]) for name, value in without[2].items())


def failing(_: Any, rank: int, batches: Any) -> Any:
    """Two evaluations of the first mini-batch, between which one of the second has failed."""
    plan = make.gpipe([Stage((0, 4), ("a",))], 2)
    executor = Executor(plan, Modes(), None, SGD, dtype=torch.float64, evaluates=True)

    def none(output: Tensor, targets: Tensor) -> Tensor:
        raise ValueError("no such measure")

    before = executor.evaluate(batches[:1])
    with pytest.raises(ValueError, match="no such measure"):
        executor.evaluate(batches[1:], none)
    return before, executor.evaluate(batches[:1])


def test_an_evaluation_after_one_that_failed_is_right(ranks: Ranks) -> None:
    before, after = ranks.run(failing, 1, [modes_batch(4, seed) for seed in range(2)])[0]
    assert after == before


class Doubling(nn.Linear):
    """Sets more than its mode."""

    def train(self, mode: bool = True) -> Any:
        self.factor = 1.0 if mode else 2.0
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Merging(nn.Linear):
    """Changes its weights."""

    def train(self, mode: bool = True) -> Any:
        self.weight.data += -1 if mode else 1
        return super().train(mode)


class Staying(nn.Dropout):
    """Is always in training."""

    def train(self, mode: bool = True) -> Any:
        return super().train()


class Frozen(nn.BatchNorm1d):
    """Is always in evaluation."""

    def train(self, mode: bool = True) -> Any:
        return super().train(mode=False)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (Doubling(6, 6), "the method train of Doubling changes 'factor'"),
        (Merging(6, 6), "the method train of Merging computes"),
        (Staying(), "the method train of Staying leaves a module in training"),
    ],
)
def test_modes_that_are_more_than_modes_are_refused(part: nn.Module, named: str) -> None:
    model = nn.Sequential(part, nn.Linear(6, 3)).train()
    before = [one.clone() for one in model.parameters()]
    plan = make.gpipe([Stage((0, 2), ("a",))], 2)
    with pytest.raises(InputError, match=named):
        Executor(plan, model, None, SGD, evaluates=True)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    Executor(plan, model, None, SGD)


def test_a_module_that_is_always_in_evaluation_stays_so(ranks: Ranks) -> None:
    model = nn.Sequential(Frozen(6), nn.Linear(6, 3)).double().train()
    plan = make.gpipe([Stage((0, 1), ("a",)), Stage((1, 2), ("b",))], 2)
    batches = [modes_batch(4, seed) for seed in range(STEPS)]
    compare(ranks, plan, model, batches, batches)


def masked(_: Any, rank: int, plan: PipelinePlan, batches: Any) -> Any:
    executor = Executor(plan, FOREIGN["gpt2"].make(), None, SGD, example=batches[0], evaluates=True)
    return executor.evaluate(batches), executor.parameters_on_first_rank()


@pytest.mark.slow
def test_a_models_own_loss_is_of_whole_mini_batches(ranks: Ranks) -> None:
    one = FOREIGN["gpt2"]
    pytest.importorskip(one.package, reason=f"{one.package} is not installed")
    batches = list(one.batches(8, 2))
    for batch in batches:  # labels that do not count: a microbatch has none at all
        batch["labels"] = batch["labels"].clone()
        batch["labels"][2:5] = -100
    count = layers_of(one.make().double(), batches[0])
    plan = make.one_f_one_b([Stage((0, 4), ("a",)), Stage((4, count), ("b",))], 4)
    (_, state), (value, _) = ranks.run(masked, 2, plan, batches)
    expected, _ = plainly(one.make(), state, [(batch, ()) for batch in batches])
    assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shards", slow_after(1, ["weights", "optimizer"]))
def test_stages_whose_replicas_divide_their_state(ranks: Ranks, shards: Any) -> None:
    example = EXAMPLES["dropping-transformer"]
    model = example.build().double()
    count = len(capture(model))
    plan = make.gpipe([Stage((0, count), ("a", "b"), "split", shards=shards)], 2)
    batches = [doubled(example.batch(8, seed)) for seed in range(STEPS)]
    held_out = [doubled(example.batch(5, 10))]
    compare(ranks, plan, model, batches, held_out)


@pytest.mark.slow
def test_exported_models_whose_weights_are_gathered(ranks: Ranks) -> None:
    """For numbers of samples that training, whose layers are not captured again, would refuse."""
    one = FOREIGN["gpt2"]
    pytest.importorskip(one.package, reason=f"{one.package} is not installed")
    *batches, held_out = [(batch, ()) for batch in one.batches(8, STEPS + 1)]
    fewer = [({key: v[:n] for key, v in held_out[0].items()}, ()) for n in (6, 7)]
    count = layers_of(one.make().double(), batches[0][0])
    plan = make.gpipe([Stage((0, count), ("a", "b"), "split", shards="weights")], 2)
    compare(ranks, plan, "gpt2", batches, [held_out, *fewer])
