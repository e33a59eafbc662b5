"""What runs on a GPU trains what a plain loop there does; skipped where there is none."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training_plans as make  # noqa: E402
from races import in_two_streams  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from benchmarks.any_model import layers_of  # noqa: E402
from benchmarks.any_models import MODELS, AnyModel  # noqa: E402
from benchmarks.plain_loop import difference, loop  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.actions import parse_action  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

STEPS, MICROBATCHES, SAMPLES = 3, 4, 4
WIDTH, LAYERS, CLASSES = 1024, 6, 16
MEAN = nn.functional.cross_entropy
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def in_order(stages: list[Stage], text: str, begins: Any = "forward") -> PipelinePlan:
    order = [parse_action(word) for word in text.split()]
    microbatches = 1 + max(one.microbatch or 0 for one in order)
    return make.plan_in_order(stages, microbatches, {"a": order}, begins=begins)


# --- Models of any origin ------------------------------------------------------------------------


def two_on_one(layers: int) -> PipelinePlan:
    """Two stages on the device: all forwards, all input gradients, all weight gradients."""
    half = layers // 2
    stages = [Stage((0, half), ("a",)), Stage((half, layers), ("a",))]
    kinds = (("F", (0, 1)), ("I", (1, 0)), ("W", (1, 0)))
    words = [f"{s}{k}{m}" for k, order in kinds for s, m in product(order, range(MICROBATCHES))]
    return in_order(stages, " ".join(words))


def models() -> list[Any]:
    return [
        pytest.param(
            one,
            marks=pytest.mark.skipif(
                find_spec(one.package) is None, reason=f"{one.package} is not installed"
            ),
            id=one.name,
        )
        for one in MODELS.values()
    ]


@pytest.mark.parametrize("one", models())
def test_a_model_trains_on_a_gpu_as_in_a_plain_loop(one: AnyModel) -> None:
    batches = list(one.batches(SAMPLES * MICROBATCHES, STEPS))
    pairs = [(batch, ()) if isinstance(batch, dict) else batch for batch in batches]
    optimizer = partial(torch.optim.SGD, lr=one.lr, momentum=0.9)
    executor = Executor(
        two_on_one(len(layers_of(one))),
        one.make(),
        None,
        optimizer,
        example=pairs[0][0],
        dtype=torch.float64,
    )
    losses = [executor.step(*batch) for batch in pairs]
    # There, as kernels round otherwise than on the CPU where a model computes in float32.
    moved = tree_map_only(Tensor, lambda value: value.cuda(), batches)
    expected = loop(one.make().cuda(), moved, MICROBATCHES, optimizer)
    state, found = expected.state, executor.parameters_on_first_rank()
    assert found is not None
    assert difference(on_cpu(found), on_cpu(state), one.make().state_dict()) <= one.rounding
    assert losses == pytest.approx(expected.losses, rel=1e-9)


def on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in state.items()}


# --- Streams and graphs --------------------------------------------------------------------------


BY_LAYER = [Stage((i, i + 1), ("a",)) for i in range(LAYERS)]
DELAYED = in_order(
    BY_LAYER, "5I0 4I0 5W0 3I0 4W0 2I0 3W0 1I0 2W0 0I0 1W0 0W0 0F0 1F0 2F0 3F0 4F0 5F0", "backward"
)
LATE = in_order(
    BY_LAYER, "5I0 4I0 3I0 2I0 1I0 0I0 0W0 0F0 1W0 1F0 2W0 2F0 3W0 3F0 4W0 4F0 5W0 5F0", "backward"
)
MIXED = in_order(
    BY_LAYER,
    "5I1 5I0 4I0 5W0 4I1 3I1 3I0 2I0 5W1 2I1 1I1 4W0 1I0 0I0 1W1 0I1 4W1 3W0 3W1 0W1 0W0 0F0 2W1 "
    "2W0 1W0 1F0 0F1 2F0 1F1 3F0 2F1 3F1 4F0 4F1 5F0 5F1",
    "backward",
)


def wide() -> nn.Module:
    """Kernels that last longer than their launches, so that streams overlap."""
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS - 1)]
    return nn.Sequential(*inner, nn.Linear(WIDTH, CLASSES))


def vectors(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, WIDTH, generator=random, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (samples,), generator=random)


def train(
    plan: PipelinePlan, optimizer: Any = SGD, *, slower: int = 99, drain: int = 99, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    executor = Executor(plan, wide(), MEAN, optimizer, dtype=torch.float64, **options)
    losses = []
    for i in range(10):
        if i == slower:
            for one in executor.optimizers:
                for group in one.param_groups:
                    group["lr"] = 0.01
        losses.append(executor.step(*vectors(512 * plan.microbatches, i)))
        if i == drain:
            executor.finish()
    executor.finish()
    state = executor.parameters_on_first_rank()
    assert state is not None
    return on_cpu(state), losses


def require_same(found: Any, expected: Any) -> None:
    assert found[1] == pytest.approx(expected[1], rel=1e-10)
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("plan", [DELAYED, LATE, MIXED])
@pytest.mark.parametrize("turn", range(3))
def test_two_streams_train_what_one_does_on_the_cpu(plan: PipelinePlan, turn: int) -> None:
    expected = train(plan, device="cpu")
    require_same(train(in_two_streams(plan)), expected)


@pytest.mark.parametrize(
    ("streams", "options"),
    [
        pytest.param(lambda plan: plan, {}, id="one stream"),
        pytest.param(in_two_streams, {}, id="two streams"),
        pytest.param(in_two_streams, {"slower": 5}, id="another learning rate"),
        pytest.param(in_two_streams, {"drain": 4}, id="drained"),
    ],
)
@pytest.mark.parametrize("plan", [DELAYED, LATE, MIXED])
def test_replayed_windows_train_the_same(
    plan: PipelinePlan, streams: Callable[[PipelinePlan], PipelinePlan], options: Any
) -> None:
    expected = train(plan, device="cpu", **options)
    require_same(train(streams(plan), graph=True, **options), expected)


def test_an_optimizer_that_is_captured() -> None:
    # Its number of steps is in float32, so that it differs from one that counts on the host.
    adam = partial(torch.optim.AdamW, lr=1e-3, capturable=True)
    require_same(train(in_two_streams(LATE), adam, graph=True), train(LATE, adam))
