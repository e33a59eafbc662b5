"""The oracle for training, the random plans and the pool of processes, held against known values.

Plain training of the whole model, recursions by hand on scalars, and the versions of Narayanan's
thesis (section 2.4.3): W(t+1) = W(t) - lr grad f(W_1(t-p+1), ..., W_p(t)).
"""

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from hypothesis import given  # noqa: E402
from profiles import examples  # noqa: E402
from ranks import Ranks, RanksFailed  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import mse_loss  # noqa: E402
from training import Trained, train, update_rules  # noqa: E402
from training_plans import (  # noqa: E402
    even_samples,
    gpipe,
    interleaved,
    one_f_one_b,
    plan_in_order,
    plans,
    straight,
    zero_bubble_h1,
)

from stagewright.executor.programs.lower import lower  # noqa: E402
from stagewright.executor.programs.verification.verify import verify  # noqa: E402
from stagewright.executor.training.stages.weights import layer_seed  # noqa: E402
from stagewright.formulations.plans.actions import COMPUTE, Action, Weights, parse_action  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402

LAYERS = 5
SGD = partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS = {
    "sgd": SGD,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01),
}

# --- Plans ------------------------------------------------------------------------------------


def computations(plan: PipelinePlan) -> dict[Action, list[tuple[str, float, float]]]:
    found = defaultdict(list)
    for entry in plan.actions:
        action = parse_action(entry.action)
        if action.kind in COMPUTE:
            found[action].append((entry.device, entry.start_seconds, entry.finish_seconds))
    return found


def test_the_orders_of_1f1b_and_zero_bubble() -> None:
    def order(plan: PipelinePlan, device: str) -> str:
        at = [(start, str(a)) for a, on in computations(plan).items() for d, start, _ in on
              if d == device]  # fmt: skip
        return " ".join(text for _, text in sorted(at))

    plan = one_f_one_b(straight([1, 1]), 3)
    assert order(plan, "d0") == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert order(plan, "d1") == "1F0 1B0 1F1 1B1 1F2 1B2"
    plan = zero_bubble_h1(straight([1, 1]), 3)
    assert order(plan, "d0") == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"
    assert order(plan, "d1") == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"


def test_interleaved_starts_with_a_round_on_every_chunk() -> None:
    stages = [Stage((s, s + 1), (f"d{s % 2}",)) for s in range(4)]
    first = sorted((e.start_seconds, e.action) for e in interleaved(stages, 4).actions
                   if e.device == "d0")  # fmt: skip
    forwards = [action for _, action in first if "F" in action and "SEND" not in action]
    assert forwards == ["0F0", "0F1", "2F0", "2F1", "0F2", "0F3", "2F2", "2F3"]
    with pytest.raises(ValueError, match="multiple"):
        interleaved(stages, 3)


@examples(60)
@given(plans(LAYERS))
def test_random_plans_are_sound(plan: PipelinePlan) -> None:
    """The program of a plan that is not sound is refused, here and in every run."""
    verify(plan, lower(plan))
    assert [layer for s in plan.stages for layer in range(*s.layers)] == list(range(LAYERS))
    assert len({device for stage in plan.stages for device in stage.devices}) in (2, 3, 4)


# --- Flush and double-buffer --------------------------------------------------------------------


class Residual(nn.Module):
    """Five layers for rows of three numbers, with a skip connection over three of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.middle = nn.Linear(4, 4)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.drop(self.middle(self.norm(x)).tanh()))


class Tied(nn.Module):
    """The same matrix in the first and the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 3, bias=False)
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(x)).tanh())


def made(kind: Callable[..., nn.Module], *args: float) -> nn.Module:
    torch.manual_seed(1)
    return kind(*args).double()


def drawn(samples: int, steps: int = 3, width: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(draw(samples, 3), draw(samples, width)) for _ in range(steps)]


def batches_for(plan: PipelinePlan, steps: int = 3, width: int = 2) -> list[tuple[Tensor, Tensor]]:
    return drawn(even_samples(plan.stages) * plan.microbatches, steps, width)


def plainly(
    module: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], optimizer: Callable
) -> Trained:
    """Training without a pipeline."""
    module = deepcopy(module)
    steps = optimizer(list(module.parameters()))
    losses = []
    for inputs, targets in batches:
        steps.zero_grad()
        loss = mse_loss(module(inputs), targets)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return Trained(module.state_dict(), tuple(losses))


def assert_equal(one: Trained, other: Trained) -> None:
    assert one.state.keys() == other.state.keys()
    for name, value in one.state.items():
        torch.testing.assert_close(value, other.state[name], rtol=1e-12, atol=1e-12)
    assert one.losses == pytest.approx(other.losses, rel=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
@examples(15)
@given(plan=plans(LAYERS, weights=["flush"]))
def test_flush_is_plain_training(name: str, plan: PipelinePlan) -> None:
    module, batches = made(Residual), batches_for(plan)
    found = train(plan, module, batches, mse_loss, OPTIMIZERS[name])
    assert_equal(found, plainly(module, batches, OPTIMIZERS[name]))


def test_flush_sums_the_gradients_of_a_tied_parameter() -> None:
    module, plan = made(Tied), one_f_one_b(straight([1, 1, 1]), 3)
    batches = batches_for(plan, width=3)
    found = train(plan, module, batches, mse_loss, SGD)
    assert_equal(found, plainly(module, batches, SGD))
    assert torch.equal(found.state["head.weight"], found.state["embedding.weight"])


def test_frozen_parameters_stay_and_unused_ones_have_no_gradient() -> None:
    module = made(Residual)
    module.first.requires_grad_(False)
    module.spare = nn.Parameter(torch.ones(2, dtype=torch.float64))
    batches = drawn(6)
    found = train(gpipe(straight([2, 3]), 2), module, batches, mse_loss, OPTIMIZERS["momentum"])
    assert_equal(found, plainly(module, batches, OPTIMIZERS["momentum"]))
    assert torch.equal(found.state["spare"], torch.ones(2, dtype=torch.float64))


def scalar(*weights: float) -> list[nn.Module]:
    """y = ... w_2 w_1 x."""
    modules = [nn.Linear(1, 1, bias=False).double() for _ in weights]
    for module, weight in zip(modules, weights, strict=True):
        nn.init.constant_(module.weight, weight)
    return modules


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1)


def test_double_buffer_by_hand() -> None:
    x, y, rate, decay = 2.0, 3.0, 0.05, 0.5
    optimizer = partial(torch.optim.SGD, lr=rate, momentum=decay)
    plan = gpipe([Stage((0, 1), ("a",))], 2, "double-buffer")
    batch = (column(x, 2 * x), column(y, y))
    found = train(plan, scalar(1.0), [batch] * 4, mse_loss, optimizer)
    w, velocity, losses = [1.0, 1.0], 0.0, []  # W(-1) = W(0)
    for _ in range(4):
        errors = (w[-2] * x - y, w[-2] * 2 * x - y)
        velocity = decay * velocity + errors[0] * x + errors[1] * 2 * x
        losses.append((errors[0] ** 2 + errors[1] ** 2) / 2)
        w.append(w[-1] - rate * velocity)
    assert found.state["0.weight"].item() == pytest.approx(w[-1], rel=1e-13)
    assert found.losses == pytest.approx(losses, rel=1e-13)


@examples(15)
@given(plan=plans(LAYERS, weights=["double-buffer"]))
def test_double_buffer_is_plain_gradients_one_step_late(plan: PipelinePlan) -> None:
    module, batches = made(Residual), batches_for(plan)
    newest, shadow = deepcopy(module), deepcopy(module)
    optimizer = torch.optim.Adam(newest.parameters(), lr=0.01)
    for inputs, targets in batches:
        loss = mse_loss(shadow(inputs), targets)
        gradients = torch.autograd.grad(loss, list(shadow.parameters()))
        shadow.load_state_dict(newest.state_dict())
        for parameter, gradient in zip(newest.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    found = train(plan, module, batches, mse_loss, OPTIMIZERS["adam"])
    assert_equal(found, Trained(newest.state_dict(), found.losses))


# --- Stashed weights --------------------------------------------------------------------------


@pytest.mark.parametrize("synchronised", [False, True])
def test_stashing_by_hand(synchronised: bool) -> None:
    xs, ys, rate = (1.0, 2.0, -1.0, 0.5), (1.0, 1.0, 2.0, 3.0), 0.05
    weights: Weights = "stash+vertical-sync" if synchronised else "stash"
    plan = one_f_one_b(straight([1, 1]), 4, weights)
    batch = (column(*xs), column(*ys))
    found = train(plan, scalar(0.5, 1.5), [batch] * 2, mse_loss, partial(torch.optim.SGD, lr=rate))
    a, b, losses = 0.5, 1.5, []
    for _ in range(2):
        first, second, errors = [a], [b], []
        for m, (x, y) in enumerate(zip(xs, ys, strict=True)):
            a, b = first[max(0, m - 1)], second[max(0, m - 1) if synchronised else m]
            errors.append(b * a * x - y)
            first.append(first[-1] - rate * 2 * errors[m] * b * x)
            second.append(second[-1] - rate * 2 * errors[m] * a * x)
        a, b = first[-1], second[-1]
        losses.append(sum(error**2 for error in errors) / 4)
    assert found.state["0.weight"].item() == pytest.approx(a, rel=1e-13)
    assert found.state["1.weight"].item() == pytest.approx(b, rel=1e-13)
    assert found.losses == pytest.approx(losses, rel=1e-13)


@pytest.mark.parametrize("microbatches", [1, 3, 7])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_versions_of_a_straight_pipeline(p: int, microbatches: int) -> None:
    stages, every = straight([1] * p), range(microbatches)
    in_turn = tuple((m,) for m in every)
    for s, rule in enumerate(update_rules(one_f_one_b(stages, microbatches, "stash"))):
        assert rule.used == tuple(max(0, m - (p - 1 - s)) for m in every)
        assert rule.rounds == in_turn
    # Stage s of ZB-H1 makes its versions s microbatches later: all are p - 1 behind.
    plans = (
        one_f_one_b(stages, microbatches, "stash+vertical-sync"),
        zero_bubble_h1(stages, microbatches, "stash"),
    )
    for rule in update_rules(plans[0]) + update_rules(plans[1]):
        assert rule.used == tuple(max(0, m - (p - 1)) for m in every)
        assert rule.rounds == in_turn


def test_updates_come_in_the_order_of_the_backwards() -> None:
    for rule in update_rules(gpipe(straight([1, 1]), 3, "stash")):
        assert rule.used == (0, 0, 0)
        assert rule.rounds == ((2,), (1,), (0,))


@examples(15)
@given(plan=plans(LAYERS, weights=["stash", "stash+vertical-sync"], max_microbatches=1))
def test_stashing_one_microbatch_is_plain_training(plan: PipelinePlan) -> None:
    module, batches = made(Residual), batches_for(plan)
    found = train(plan, module, batches, mse_loss, OPTIMIZERS["momentum"])
    assert_equal(found, plainly(module, batches, OPTIMIZERS["momentum"]))


@examples(15)
@given(plan=plans(LAYERS, weights=["stash", "stash+vertical-sync"]))
def test_stashing_updates_once_per_microbatch(plan: PipelinePlan) -> None:
    """A loss that is linear in the weights has one gradient, whatever the version."""
    module = nn.ModuleList(nn.Identity() for _ in range(LAYERS - 1))
    module.append(made(partial(nn.Linear, 3, 2)))
    batches = batches_for(plan)
    found = train(plan, module, batches, lambda out, y: (out * y).sum(1).mean(), SGD)
    moved = 0.1 * plan.microbatches * sum(y.T @ x / len(x) for x, y in batches)
    expected = module[-1].weight - moved
    torch.testing.assert_close(found.state[f"{LAYERS - 1}.weight"], expected)


def test_what_the_equations_leave_open_is_refused() -> None:
    batches = drawn(4)
    turns = [Stage((0, 2), ("a", "b"), "round-robin"), Stage((2, 5), ("c",))]
    with pytest.raises(ValueError, match="round of turns"):
        train(one_f_one_b(turns, 2, "stash"), made(Residual), batches, mse_loss, SGD)
    tied = one_f_one_b(straight([1, 2]), 2, "stash")
    with pytest.raises(ValueError, match="several stages"):
        train(tied, made(Tied), drawn(4, width=3), mse_loss, SGD)
    within = one_f_one_b(straight([3]), 1, "stash")
    assert train(within, made(Tied), drawn(4, width=3), mse_loss, SGD).losses
    with pytest.raises(ValueError, match="3 layers"):
        train(gpipe(straight([2]), 2), made(Tied), batches, mse_loss, SGD)
    with pytest.raises(ValueError, match="4 samples"):
        train(gpipe(straight([5]), 3), made(Residual), batches, mse_loss, SGD)
    normed = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    with pytest.raises(ValueError, match="buffer"):
        train(gpipe(straight([2]), 2), normed, batches, mse_loss, SGD)


def test_a_version_that_is_not_made_in_time_is_refused() -> None:
    orders = {"d0": "0F0 0B0 0F1 0B1", "d1": "1F0 1I0 1F1 1I1 1W0 1W1"}
    actions = {device: [*map(parse_action, text.split())] for device, text in orders.items()}
    stages = straight([2, 3])
    assert update_rules(plan_in_order(stages, 2, actions, "stash"))[1].used == (0, 0)
    with pytest.raises(ValueError, match="stage 1 has not yet"):
        update_rules(plan_in_order(stages, 2, actions, "stash+vertical-sync"))


# --- Dropout ------------------------------------------------------------------------------------


@examples(15)
@given(plan=plans(LAYERS, weights=["flush"]))
def test_dropout_does_not_depend_on_the_cuts(plan: PipelinePlan) -> None:
    module, batches = made(Residual, 0.5), batches_for(plan)
    whole = gpipe(straight([LAYERS]), plan.microbatches)
    found, other = (train(p, module, batches, mse_loss, SGD, seed=7) for p in (plan, whole))
    assert_equal(found, other)
    assert train(whole, module, batches, mse_loss, SGD, seed=8).losses != found.losses


def test_dropout_in_a_split_stage_by_hand() -> None:
    plan = gpipe([Stage((0, 2), ("a", "b"))], 2)
    inputs = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(8, 1)
    parts = []
    for step, m in product(range(2), range(2)):
        torch.manual_seed(layer_seed(5, step, m, 1))
        parts.append(nn.functional.dropout(3 * inputs[4 * m : 4 * m + 4], 0.5))
    means = torch.stack(parts).reshape(2, 8).mean(1)
    batches, still = [(inputs, inputs)] * 2, partial(torch.optim.SGD, lr=0.0)
    model = [*scalar(3.0), nn.Dropout(0.5)]
    state = torch.get_rng_state()
    found = train(plan, model, batches, lambda out, _: out.mean(), still, seed=5)
    assert found.losses == pytest.approx(means.tolist(), rel=1e-13)
    assert torch.equal(torch.get_rng_state(), state)


# --- The pool of processes --------------------------------------------------------------------


def ring(group: dist.ProcessGroup, rank: int, offset: int) -> tuple[int, int, float]:
    """What a rank sees: the sum over all, and what its neighbour in a group of two sent."""
    size = dist.get_world_size(group)
    total = torch.tensor([rank + offset])
    dist.all_reduce(total, group=group)
    pairs = [dist.new_group([a, a + 1]) for a in range(0, size - 1, 2)]
    value = torch.tensor([float(rank)])
    if rank // 2 < len(pairs):
        dist.all_reduce(value, group=pairs[rank // 2])
    return size, int(total), value.item()


def tensors(_: dist.ProcessGroup, rank: int) -> dict[str, Tensor]:
    return {"rank": torch.full((2,), float(rank)), "threads": torch.tensor(torch.get_num_threads())}


def one_fails(group: dist.ProcessGroup, rank: int) -> None:
    """The others wait for what never comes, with a send that nobody takes."""
    dist.barrier(group)  # all are connected
    if rank == 0:
        dist.isend(torch.ones(1), 1, group=group)
        raise LookupError("no such thing")
    dist.barrier(group)


def dies(group: dist.ProcessGroup, rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier(group)


def sleeps(_: dist.ProcessGroup, rank: int) -> None:
    time.sleep(600 * rank)


def test_ranks_answer_in_order_and_groups_end_with_the_run(ranks: Ranks) -> None:
    assert ranks.run(ring, 4, 0) == [(4, 6, 1.0), (4, 6, 1.0), (4, 6, 5.0), (4, 6, 5.0)]
    assert ranks.run(ring, 3, 1) == [(3, 6, 1.0), (3, 6, 1.0), (3, 6, 2.0)]
    assert ranks.run(ring, 1, 5) == [(1, 5, 0.0)]
    assert ranks.run(ring, 4, 1) == [(4, 10, 1.0), (4, 10, 1.0), (4, 10, 5.0), (4, 10, 5.0)]
    found = ranks.run(tensors, 2)
    assert [(x["rank"].tolist(), x["threads"].item()) for x in found] == [([0, 0], 1), ([1, 1], 1)]
    with pytest.raises(ValueError, match="world_size"):
        ranks.run(ring, 5, 0)


def test_an_exception_comes_back_and_the_pool_goes_on(ranks: Ranks) -> None:
    ranks.run(ring, 4, 0)
    before = ranks.process_ids
    with pytest.raises(RanksFailed, match="rank 0: LookupError: no such thing") as caught:
        ranks.run(one_fails, 4)
    assert caught.value.errors.keys() == {0, 1, 2, 3}
    assert "in one_fails" in caught.value.errors[0]
    assert ranks.run(ring, 3, 1)[0] == (3, 6, 1.0)
    assert ranks.process_ids == before


def test_a_dead_or_stuck_rank_ends_the_processes_and_new_ones_start() -> None:
    with Ranks(2) as pool:
        with pytest.raises(RanksFailed, match="rank 1: the process died"):
            pool.run(dies, 2)
        assert pool.process_ids == ()
        assert pool.run(ring, 2, 0) == [(2, 1, 1.0)] * 2
        processes = pool.process_ids
        with pytest.raises(RanksFailed, match="rank 1: no answer"):
            pool.run(sleeps, 2, timeout_seconds=3.0)
        assert pool.process_ids == ()
        assert all(map(gone, processes))


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import ranks; ranks.PRELOADED = ('torch',); pool = ranks.Ranks(1); pool.start(); "
        "print('up', flush=True); input()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1] / "shared",
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed parent leaves its files
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    parent.kill()
    # The child writes to the same pipe: it ends when both are gone.
    assert parent.communicate(timeout=300) == ("", None)
